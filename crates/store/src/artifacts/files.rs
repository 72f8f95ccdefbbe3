//! Operations on single files, all by descriptor.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, SeekFrom, Stat};
use rustix::io::Errno;

use crate::types::random_hex::random_hex;

const BUFFER_BYTES: usize = 256 * 1024;
static ZEROS: [u8; BUFFER_BYTES] = [0; BUFFER_BYTES];

/// Opens a directory of the store. Does not follow links and does not enter mounts, since hard links across mounts
/// would fail.
pub(crate) fn open_dir(parent: BorrowedFd<'_>, name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), resolve)
}

/// Makes a directory, unless something has the name already.
pub(super) fn make_dir(
    parent: BorrowedFd<'_>,
    name: impl rustix::path::Arg,
    mode: Mode,
) -> rustix::io::Result<()> {
    match rustix::fs::mkdirat(parent, name, mode) {
        Err(Errno::EXIST) => Ok(()),
        done => done,
    }
}

/// Opens a directory with `open`, after making it if there is nothing of that name.
pub(super) fn open_or_make_dir<N: rustix::path::Arg + Copy>(
    parent: BorrowedFd<'_>,
    name: N,
    mode: Mode,
    open: impl Fn(BorrowedFd<'_>, N) -> rustix::io::Result<OwnedFd>,
) -> rustix::io::Result<OwnedFd> {
    match open(parent, name) {
        Err(Errno::NOENT) => {
            make_dir(parent, name, mode)?;
            open(parent, name)
        }
        opened => opened,
    }
}

/// Calls `see` for every entry of a directory but `.` and `..`.
pub fn each_entry(dir: BorrowedFd<'_>, see: &mut dyn FnMut(&CStr)) -> rustix::io::Result<()> {
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            see(name);
        }
    }
    Ok(())
}

/// Opens a regular file of the store. NONBLOCK, so that a FIFO or device in its place cannot block this process.
pub(crate) fn open_object(dir: BorrowedFd<'_>, name: &str) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let file = rustix::fs::openat2(dir, name, flags, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&file)?;
    match FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        true => Ok(File::from(file)),
        false => Err(Errno::INVAL),
    }
}

/// Reads at most `bytes_max` of a small file of the store. `None` if there is none.
pub(super) fn read_small(
    dir: BorrowedFd<'_>,
    name: &str,
    bytes_max: u64,
) -> io::Result<Option<Vec<u8>>> {
    let file = match open_object(dir, name) {
        Err(Errno::NOENT) => return Ok(None),
        file => file?,
    };
    let mut text = Vec::new();
    file.take(bytes_max).read_to_end(&mut text)?;
    Ok(Some(text))
}

/// Writes a small file of the store, unless there is one of that name. The file is durable before it gets its name,
/// and the name is durable on return.
pub(super) fn write_small(
    staging: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    name: &str,
    content: &[u8],
) -> io::Result<()> {
    let draft = Draft::new(staging)?;
    write_all_at(draft.as_fd(), content, 0)?;
    rustix::fs::fsync(draft.as_fd())?;
    match link(draft.as_fd(), dir, name) {
        Ok(()) | Err(Errno::EXIST) => Ok(rustix::fs::fsync(dir)?),
        Err(e) => Err(e.into()),
    }
}

/// A path that leads to the very file behind the descriptor.
pub fn proc_path(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Gives the file behind a descriptor another name, which must be free.
pub(crate) fn link(
    file: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    name: &str,
) -> rustix::io::Result<()> {
    match rustix::fs::linkat(file, c"", dir, name, AtFlags::EMPTY_PATH) {
        // Before Linux 6.10 only root may link a descriptor with AT_EMPTY_PATH.
        Err(Errno::NOENT) => link_by_proc(file, dir, name),
        done => done,
    }
}

pub(crate) fn link_by_proc(
    file: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    name: &str,
) -> rustix::io::Result<()> {
    let path = proc_path(file);
    rustix::fs::linkat(CWD, path, dir, name, AtFlags::SYMLINK_FOLLOW)
}

/// A new file that is not an object yet. It has no name if the file system supports that, so a crash leaves nothing
/// behind. Otherwise it has a name in `staging`, which is removed on drop or, after a crash, by the next sweep.
pub(crate) struct Draft<'a> {
    staging: BorrowedFd<'a>,
    file: OwnedFd,
    name: Option<String>,
}

impl<'a> Draft<'a> {
    pub(crate) fn new(staging: BorrowedFd<'a>) -> io::Result<Draft<'a>> {
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
        let name = random_hex()?;
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
            // If this fails, a sweep removes the file later.
            let _ = rustix::fs::unlinkat(self.staging, name, AtFlags::empty());
        }
    }
}

/// The time of the last change of content, in milliseconds since 1970. The program may have set a time that does not
/// fit, so saturate.
pub fn modified_ms(stat: &Stat) -> i64 {
    let below = i64::try_from(stat.st_mtime_nsec / 1_000_000).unwrap_or(0);
    stat.st_mtime.saturating_mul(1_000).saturating_add(below)
}

/// The length of a file in bytes.
pub fn length(file: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0))
}

/// Reads the first `bytes` of a file and passes every byte to `see`, including the zeros of holes. If `to` is given,
/// writes the data to the same offsets there, without the holes. A file that is too short is an error.
pub fn read_through(
    from: BorrowedFd<'_>,
    to: Option<BorrowedFd<'_>>,
    bytes: u64,
    see: &mut dyn FnMut(&[u8]),
) -> io::Result<()> {
    if let Some(to) = to {
        rustix::fs::ftruncate(to, bytes)?;
    }
    read_range(from, to, 0..bytes, HoleHandling::Skip, &mut Vec::new(), see)
}

/// How to treat holes of a sparse file. Looking for them costs two system calls for each range of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoleHandling {
    /// Pass their zeros on without reading them, and leave them out of the copy.
    Skip,
    /// The file has no holes, or they may be read as zeros.
    ReadAsZeros,
}

/// Like `read_through`, for a part of the file, with a buffer that the caller can reuse.
pub fn read_range(
    from: BorrowedFd<'_>,
    to: Option<BorrowedFd<'_>>,
    stretch: Range<u64>,
    holes: HoleHandling,
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
            HoleHandling::Skip => next_data(from, offset, stop)?,
            HoleHandling::ReadAsZeros => (offset, stop),
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

/// The next range of data at or after `offset`. Returns an empty range at `end` if there is none.
pub fn next_data(file: BorrowedFd<'_>, offset: u64, end: u64) -> rustix::io::Result<(u64, u64)> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        // There is a hole up to the end of the file. If the file ends before `end`, return a range that cannot be
        // read, which becomes an error.
        Err(Errno::NXIO) if rustix::fs::seek(file, SeekFrom::End(0))? < end => {
            return Ok((offset, end));
        }
        Err(Errno::NXIO) => return Ok((end, end)),
        // The file system does not support holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((offset, end)),
        start => start?.min(end),
    };
    let stop = rustix::fs::seek(file, SeekFrom::Hole(start)).map_or(end, |stop| stop.min(end));
    // Make progress whatever the file system answers.
    Ok((start, if stop > start { stop } else { end }))
}

/// Writes all bytes at an offset.
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
