//! Reads files that the code to be confined may have written: a venv, a library, a `.git`.
//!
//! Everything is opened relative to a held directory, without following symlinks, and only if it is a regular file. A
//! FIFO must not block, a device must not have side effects, and a symlink must not bring another file's content into
//! the record. Every read is bounded.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};

/// The longest path. Nothing that this module looks for has a longer one.
const NAME_BYTES_MAX: usize = 4096;
/// The most entries of a directory to look at. A directory may hold millions, and every run pays for the look.
const ENTRIES_MAX: usize = 100_000;

pub(super) struct InspectedDir(OwnedFd);

/// The first bytes of a file, and whether that is the whole file.
pub(super) struct FileHead {
    pub(super) bytes: Vec<u8>,
    pub(super) whole: bool,
}

pub(super) struct Listing {
    /// Sorted.
    pub(super) names: Vec<CString>,
    /// Whether entries were left out.
    pub(super) more: bool,
}

impl InspectedDir {
    /// Opens a directory by its canonical path.
    pub(super) fn open(path: &Path) -> io::Result<InspectedDir> {
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        open(CWD, path.as_os_str().as_bytes(), OFlags::DIRECTORY, resolve).map(InspectedDir)
    }

    /// Opens a directory by a path that a file states. The path may be absolute or lead upwards. Symlinks on the way
    /// are followed, but the last component must not be one.
    pub(super) fn open_stated(&self, path: &[u8]) -> io::Result<InspectedDir> {
        let resolve = ResolveFlags::NO_MAGICLINKS;
        let fd = open(&self.0, path, OFlags::DIRECTORY | OFlags::NOFOLLOW, resolve)?;
        Ok(InspectedDir(fd))
    }

    pub(super) fn open_dir(&self, path: &[u8]) -> io::Result<InspectedDir> {
        open(&self.0, path, OFlags::DIRECTORY, inside_only()).map(InspectedDir)
    }

    /// `None` if there is no entry of that name. Takes a single component, so that no symlink is followed.
    pub(super) fn stat(&self, name: &[u8]) -> io::Result<Option<Stat>> {
        debug_assert!(!name.contains(&b'/'));
        match rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The uid of the directory's owner.
    pub(super) fn owner(&self) -> io::Result<u32> {
        Ok(rustix::fs::fstat(&self.0)?.st_uid)
    }

    /// The target of a symlink, as written.
    pub(super) fn read_link(&self, name: &[u8]) -> io::Result<Vec<u8>> {
        Ok(rustix::fs::readlinkat(&self.0, name, Vec::new())?.into_bytes())
    }

    pub(super) fn open_file(&self, path: &[u8]) -> io::Result<File> {
        open_regular(&self.0, path)
    }

    pub(super) fn read(&self, path: &[u8], bytes_max: usize) -> io::Result<FileHead> {
        let file = self.open_file(path)?;
        let mut bytes = Vec::with_capacity(bytes_max.min(4096));
        file.take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
        let whole = bytes.len() <= bytes_max;
        bytes.truncate(bytes_max);
        Ok(FileHead { bytes, whole })
    }

    /// Reads a whole file; fails if it is larger than `bytes_max`.
    pub(super) fn read_whole(&self, path: &[u8], bytes_max: usize) -> io::Result<Vec<u8>> {
        let head = self.read(path, bytes_max)?;
        match head.whole {
            true => Ok(head.bytes),
            false => Err(io::ErrorKind::FileTooLarge.into()),
        }
    }

    /// Lists at most `names_max` names that are `wanted`, among the first [`ENTRIES_MAX`] entries.
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

/// Opens a regular file below a directory for reading.
pub(crate) fn open_regular(dir: impl AsFd, path: &[u8]) -> io::Result<File> {
    // Check the type before opening, because opening some devices has side effects, and after, because the entry may
    // have been replaced.
    let path = check_name_length(path)?;
    let stat = rustix::fs::statat(dir.as_fd(), path, AtFlags::SYMLINK_NOFOLLOW)?;
    check_regular(&stat)?;
    let file = open(dir, path, OFlags::empty(), inside_only())?;
    check_regular(&rustix::fs::fstat(&file)?)?;
    Ok(File::from(file))
}

fn inside_only() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS
}

fn open(at: impl AsFd, path: &[u8], more: OFlags, resolve: ResolveFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | more;
    let fd = rustix::fs::openat2(at, check_name_length(path)?, flags, Mode::empty(), resolve)?;
    Ok(fd)
}

fn check_name_length(path: &[u8]) -> io::Result<&[u8]> {
    match path.len() <= NAME_BYTES_MAX {
        true => Ok(path),
        false => Err(io::ErrorKind::InvalidFilename.into()),
    }
}

fn check_regular(stat: &Stat) -> io::Result<()> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a regular file",
        )),
    }
}
