//! What the store and the export do with single files, all of it by descriptor.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, SeekFrom};
use rustix::io::Errno;

use super::hashing::{LARGE_BYTES, Large, Threads};
use crate::types::manifest::ContentHash;

const BUFFER_BYTES: usize = 256 * 1024;
static ZEROS: [u8; BUFFER_BYTES] = [0; BUFFER_BYTES];

/// A directory of the store, never through a link and never into a mount: linking would fail there.
pub fn open_dir(parent: BorrowedFd<'_>, name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), resolve)
}

/// A regular file of the store. NONBLOCK, so that something else in its place does not hold us up.
pub fn open_object(dir: BorrowedFd<'_>, name: &str) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let file = rustix::fs::openat2(dir, name, flags, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&file)?;
    match FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        true => Ok(File::from(file)),
        false => Err(Errno::INVAL),
    }
}

/// Where a descriptor can be named. What is reached through it is the very file that the descriptor pins.
pub fn proc_path(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Gives the file behind a descriptor another name, which must be free.
pub fn link(file: BorrowedFd<'_>, dir: BorrowedFd<'_>, name: &str) -> rustix::io::Result<()> {
    match rustix::fs::linkat(file, c"", dir, name, AtFlags::EMPTY_PATH) {
        // Before Linux 6.10 only root may say it that way.
        Err(Errno::NOENT) => link_by_proc(file, dir, name),
        done => done,
    }
}

pub fn link_by_proc(
    file: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    name: &str,
) -> rustix::io::Result<()> {
    let path = proc_path(file);
    rustix::fs::linkat(CWD, path, dir, name, AtFlags::SYMLINK_FOLLOW)
}

/// A new file that is not an object yet. Without a name where the file system can do that, so that a crash leaves
/// nothing; else with one in `staging`, which goes when this is dropped, or by the garbage collector.
pub struct Draft<'a> {
    staging: BorrowedFd<'a>,
    file: OwnedFd,
    name: Option<String>,
}

impl<'a> Draft<'a> {
    pub fn new(staging: BorrowedFd<'a>) -> io::Result<Draft<'a>> {
        let mode = Mode::RUSR | Mode::WUSR;
        let nameless = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::openat(staging, ".", nameless, mode) {
            Ok(file) => {
                return Ok(Draft {
                    staging,
                    file,
                    name: None,
                });
            }
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS) => {}
            Err(e) => return Err(e.into()),
        }
        let name = super::random_hex()?;
        let named = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::openat(staging, &name, named, mode)?;
        Ok(Draft {
            staging,
            file,
            name: Some(name),
        })
    }
}

impl AsFd for Draft<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // What stays behind is the garbage collector's.
            let _left = rustix::fs::unlinkat(self.staging, name, AtFlags::empty());
        }
    }
}

/// Whether a file is the content of that hash and length. Reads all of it.
pub fn is_content(file: BorrowedFd<'_>, hash: &ContentHash, bytes: u64) -> io::Result<bool> {
    if length(file)? != bytes {
        return Ok(false);
    }
    match hash_of(file, bytes) {
        Ok(found) => Ok(found == *hash),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e),
    }
}

pub fn length(file: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0))
}

pub fn hash_of(file: BorrowedFd<'_>, bytes: u64) -> io::Result<ContentHash> {
    read_hashed(file, None, bytes)
}

/// Hashes the first `bytes` of a file and writes the data, without the holes, to the same places of `to`. A file that
/// ends before is an error.
pub fn read_hashed(
    from: BorrowedFd<'_>,
    to: Option<BorrowedFd<'_>>,
    bytes: u64,
) -> io::Result<ContentHash> {
    if bytes >= LARGE_BYTES {
        let large = Large {
            from,
            to,
            bytes,
            holes: Holes::Sought,
        };
        return large.hash(Threads::Several, &mut |_| {});
    }
    let mut hasher = blake3::Hasher::new();
    read_through(from, to, bytes, &mut |chunk| {
        hasher.update(chunk);
    })?;
    Ok(ContentHash::from_bytes(*hasher.finalize().as_bytes()))
}

/// Reads the first `bytes` of a file, shows every byte to `see`, those of holes too, and writes the data, without the
/// holes, to the same places of `to`. A file that ends before is an error.
pub fn read_through(
    from: BorrowedFd<'_>,
    to: Option<BorrowedFd<'_>>,
    bytes: u64,
    see: &mut dyn FnMut(&[u8]),
) -> io::Result<()> {
    if let Some(to) = to {
        rustix::fs::ftruncate(to, bytes)?;
    }
    read_stretch(from, to, 0..bytes, Holes::Sought, &mut Vec::new(), see)
}

/// Whether the file system is asked for holes: two calls for each stretch of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holes {
    Sought,
    /// There are none, or they may be read as zeros.
    None,
}

/// What [`read_through`] does, for a part of the file, with a buffer that can be used again.
pub fn read_stretch(
    from: BorrowedFd<'_>,
    to: Option<BorrowedFd<'_>>,
    stretch: Range<u64>,
    holes: Holes,
    buffer: &mut Vec<u8>,
    see: &mut dyn FnMut(&[u8]),
) -> io::Result<()> {
    let Range {
        start: mut offset,
        end: stop,
    } = stretch;
    let wanted = clamp(stop.saturating_sub(offset));
    if buffer.len() < wanted {
        buffer.resize(wanted, 0);
    }
    while offset < stop {
        let (start, end) = match holes {
            Holes::Sought => next_data(from, offset, stop)?,
            Holes::None => (offset, stop),
        };
        while offset < start {
            let length = clamp(start - offset);
            see(&ZEROS[..length]);
            offset += length as u64;
        }
        while offset < end {
            let length = clamp(end - offset);
            let got = match rustix::io::pread(from, &mut buffer[..length], offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(Errno::INTR) => continue,
                got => got?,
            };
            see(&buffer[..got]);
            if let Some(to) = to {
                write_all_at(to, &buffer[..got], offset)?;
            }
            offset += got as u64;
        }
    }
    Ok(())
}

fn clamp(bytes: u64) -> usize {
    usize::try_from(bytes).map_or(BUFFER_BYTES, |n| n.min(BUFFER_BYTES))
}

/// The next stretch of data at or after `offset`, an empty one at `end` if there is none.
pub fn next_data(file: BorrowedFd<'_>, offset: u64, end: u64) -> rustix::io::Result<(u64, u64)> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        // A hole up to the end of the file; which may be before `end`, and then there is nothing to read.
        Err(Errno::NXIO) if rustix::fs::seek(file, SeekFrom::End(0))? < end => {
            return Ok((offset, end));
        }
        Err(Errno::NXIO) => return Ok((end, end)),
        // The file system knows nothing of holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((offset, end)),
        start => start?.min(end),
    };
    let stop = rustix::fs::seek(file, SeekFrom::Hole(start)).map_or(end, |stop| stop.min(end));
    // Whatever the file system answers, there is progress.
    Ok((start, if stop > start { stop } else { end }))
}

pub fn write_all_at(
    file: BorrowedFd<'_>,
    mut bytes: &[u8],
    mut offset: u64,
) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, offset) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(n) => {
                bytes = &bytes[n..];
                offset += n as u64;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
