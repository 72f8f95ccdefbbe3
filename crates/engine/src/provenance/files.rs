//! Looking at files that the code to be confined may have put there: a venv, a library, a `.git`.
//!
//! Everything is opened from a held directory, through no symlink, and only if it is a regular file: a FIFO must not make us
//! wait, a device must not act, a symlink must not bring somebody's secret into the record. Every read has a bound.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};

/// Longer ones are no names of anything that we look for.
const NAME_BYTES_MAX: usize = 4096;
/// A directory may hold millions, and looking through it is paid by every run.
const ENTRIES_MAX: usize = 100_000;

pub(super) struct Dir(OwnedFd);

/// The first bytes of a file, and whether that is all of it.
pub(super) struct Head {
    pub(super) bytes: Vec<u8>,
    pub(super) whole: bool,
}

pub(super) struct Listing {
    /// Sorted.
    pub(super) names: Vec<CString>,
    /// Whether entries were left out.
    pub(super) more: bool,
}

impl Dir {
    /// A directory by its canonical path.
    pub(super) fn open(path: &Path) -> io::Result<Dir> {
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        open(CWD, path.as_os_str().as_bytes(), OFlags::DIRECTORY, resolve).map(Dir)
    }

    /// A directory by a path written down somewhere, which may begin with `/` or lead upwards. Symlinks on the way
    /// are the host's own business, but it must not be one itself.
    pub(super) fn stated(&self, path: &[u8]) -> io::Result<Dir> {
        let resolve = ResolveFlags::NO_MAGICLINKS;
        let fd = open(&self.0, path, OFlags::DIRECTORY | OFlags::NOFOLLOW, resolve)?;
        Ok(Dir(fd))
    }

    pub(super) fn sub(&self, path: &[u8]) -> io::Result<Dir> {
        open(&self.0, path, OFlags::DIRECTORY, inside()).map(Dir)
    }

    /// `None` if there is nothing by that name. A single name, so that no symlink is followed.
    pub(super) fn stat(&self, name: &[u8]) -> io::Result<Option<Stat>> {
        debug_assert!(!name.contains(&b'/'));
        match rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The user to whom the directory belongs.
    pub(super) fn owner(&self) -> io::Result<u32> {
        Ok(rustix::fs::fstat(&self.0)?.st_uid)
    }

    /// The target of a symlink, as written.
    pub(super) fn link(&self, name: &[u8]) -> io::Result<Vec<u8>> {
        Ok(rustix::fs::readlinkat(&self.0, name, Vec::new())?.into_bytes())
    }

    /// A regular file, opened for reading.
    pub(super) fn file(&self, path: &[u8]) -> io::Result<File> {
        // Looked at before it is opened, because opening some devices acts; and after, because it may be another.
        let path = cut(path)?;
        regular(&rustix::fs::statat(
            &self.0,
            path,
            AtFlags::SYMLINK_NOFOLLOW,
        )?)?;
        let file = open(&self.0, path, OFlags::empty(), inside())?;
        regular(&rustix::fs::fstat(&file)?)?;
        Ok(File::from(file))
    }

    pub(super) fn read(&self, path: &[u8], bytes_max: usize) -> io::Result<Head> {
        let file = self.file(path)?;
        let mut bytes = Vec::with_capacity(bytes_max.min(4096));
        file.take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
        let whole = bytes.len() <= bytes_max;
        bytes.truncate(bytes_max);
        Ok(Head { bytes, whole })
    }

    /// The whole of a small file; an error if it is larger.
    pub(super) fn read_whole(&self, path: &[u8], bytes_max: usize) -> io::Result<Vec<u8>> {
        let head = self.read(path, bytes_max)?;
        match head.whole {
            true => Ok(head.bytes),
            false => Err(io::ErrorKind::FileTooLarge.into()),
        }
    }

    /// At most so many of the names that are `wanted`, among the first [`ENTRIES_MAX`].
    pub(super) fn list(
        &self,
        names_max: usize,
        wanted: impl Fn(&[u8]) -> bool,
    ) -> io::Result<Listing> {
        let mut names = Vec::new();
        let mut looked_at = 0;
        let mut more = false;
        for entry in rustix::fs::Dir::read_from(&self.0)? {
            let entry = entry?;
            looked_at += 1;
            let name = entry.file_name();
            if looked_at > ENTRIES_MAX {
                more = true;
                break;
            }
            if !wanted(name.to_bytes()) || name == c"." || name == c".." {
                continue;
            }
            if names.len() == names_max {
                more = true;
                break;
            }
            names.push(CStr::to_owned(name));
        }
        names.sort();
        Ok(Listing { names, more })
    }
}

fn inside() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS
}

fn open(
    at: impl std::os::fd::AsFd,
    path: &[u8],
    more: OFlags,
    resolve: ResolveFlags,
) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | more;
    let fd = rustix::fs::openat2(at, cut(path)?, flags, Mode::empty(), resolve)?;
    Ok(fd)
}

fn cut(path: &[u8]) -> io::Result<&[u8]> {
    match path.len() <= NAME_BYTES_MAX {
        true => Ok(path),
        false => Err(io::ErrorKind::InvalidFilename.into()),
    }
}

fn regular(stat: &Stat) -> io::Result<()> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a regular file",
        )),
    }
}
