//! Reads a configuration file that nobody else may have written.
//!
//! The file is opened once, and every check uses the descriptor that is then read. This module follows symlinks itself
//! (dotfiles are often links into a repository), so that it can check each link and each directory on the way: whoever
//! can replace one of them decides what is read.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

pub const FILE_BYTES_MAX: u64 = 1 << 20;
const LINKS_MAX: usize = 8;

/// Who may have written the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileTrust {
    /// The caller or root.
    Caller { uid: u32 },
    /// Only the operator. The same holds for the directory.
    Operator { uid: u32 },
}

/// Who else may read the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privacy {
    /// The mode grants nothing to the group or to others.
    Private,
    Shared,
}

#[derive(Clone, PartialEq, Eq)]
pub struct TrustedText {
    pub text: String,
    pub privacy: Privacy,
}

#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("open {path:?}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("read {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path:?} leads through more than {LINKS_MAX} symlinks")]
    TooManyLinks { path: PathBuf },
    #[error("{path:?} is not a regular file")]
    NotRegular { path: PathBuf },
    #[error("{path:?} is larger than {FILE_BYTES_MAX} bytes")]
    TooLarge { path: PathBuf },
    #[error("{path:?} is not UTF-8 text")]
    NotText { path: PathBuf },
    #[error("{path:?} may be written by others (mode {mode:o}); run: chmod go-w {path:?}")]
    WritableByOthers { path: PathBuf, mode: u32 },
    #[error("{path:?} may be read by others; run: chmod 600 {path:?}")]
    ReadableByOthers { path: PathBuf },
    #[error("{path:?} belongs to uid {owner}; it must belong to {trusted}")]
    ForeignOwner {
        path: PathBuf,
        owner: u32,
        trusted: String,
    },
}

impl FileError {
    fn open(path: &Path, errno: Errno) -> FileError {
        FileError::Open {
            path: path.to_owned(),
            source: errno.into(),
        }
    }
}

/// Returns the file's text, or `None` if the file does not exist. A file that exists and cannot be read is an error:
/// skipping a broken policy would disable it.
pub fn read_trusted(path: &Path, trust: FileTrust) -> Result<Option<TrustedText>, FileError> {
    let Some(descriptor) = open_trusted(path, trust)? else {
        return Ok(None);
    };
    let path = path.to_owned();
    let stat = rustix::fs::fstat(&descriptor).map_err(|errno| FileError::open(&path, errno))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(FileError::NotRegular { path });
    }
    trust.check_owner(&path, &stat)?;
    check_mode(&path, &stat)?;
    let mut bytes = Vec::new();
    // The file may grow after fstat, so bound what is read.
    let read = File::from(descriptor)
        .take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes);
    if let Err(source) = read {
        return Err(FileError::Read { path, source });
    }
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(FileError::TooLarge { path });
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some(TrustedText {
            text,
            privacy: privacy(&stat),
        })),
        Err(_) => Err(FileError::NotText { path }),
    }
}

/// Returns the first line of a file that holds a secret, trimmed. The file must exist, and others must not be able to
/// read it.
pub fn read_secret_line(path: &Path, uid: u32) -> Result<String, FileError> {
    let Some(secret) = read_trusted(path, FileTrust::Caller { uid })? else {
        return Err(FileError::open(path, Errno::NOENT));
    };
    match secret.privacy {
        Privacy::Private => Ok(first_line(&secret.text).to_owned()),
        Privacy::Shared => Err(FileError::ReadableByOthers {
            path: path.to_owned(),
        }),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default().trim()
}

/// Follows symlinks one by one, checks the directory that holds each, and opens the file at the end.
fn open_trusted(named: &Path, trust: FileTrust) -> Result<Option<OwnedFd>, FileError> {
    let mut path = named.to_owned();
    for links in 0..=LINKS_MAX {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(FileError::NotRegular { path });
        };
        // The parent of a bare name is empty, and opening an empty path fails.
        let parent = if parent.as_os_str().is_empty() {
            Path::new(".")
        } else {
            parent
        };
        let directory_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = match rustix::fs::open(parent, directory_flags, Mode::empty()) {
            Ok(directory) => directory,
            Err(Errno::NOENT) if links == 0 && is_absent(parent) => return Ok(None),
            Err(errno) => return Err(FileError::open(parent, errno)),
        };
        trust.check_directory(parent, &directory)?;
        // Without NONBLOCK, opening a FIFO in the file's place would block for ever.
        let file_flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        match rustix::fs::openat(&directory, name, file_flags, Mode::empty()) {
            Ok(descriptor) => return Ok(Some(descriptor)),
            // Only the name itself may be missing. Somebody made a link that leads nowhere, so a dangling link is an
            // error.
            Err(Errno::NOENT) if links == 0 => return Ok(None),
            Err(Errno::LOOP) => {
                let stat = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(|errno| FileError::open(&path, errno))?;
                trust.check_owner(&path, &stat)?;
                let target = rustix::fs::readlinkat(&directory, name, Vec::new())
                    .map_err(|errno| FileError::open(&path, errno))?;
                let target = std::ffi::OsString::from_vec(target.into_bytes());
                path = parent.join(target);
            }
            Err(errno) => return Err(FileError::open(&path, errno)),
        }
    }
    Err(FileError::TooManyLinks {
        path: named.to_owned(),
    })
}

/// Whether no file has this name. A dangling symlink counts as a file.
fn is_absent(path: &Path) -> bool {
    matches!(path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

impl FileTrust {
    fn check_owner(self, path: &Path, stat: &Stat) -> Result<(), FileError> {
        let (trusted, good) = match self {
            FileTrust::Caller { uid } => (
                format!("you (uid {uid}) or root"),
                stat.st_uid == uid || stat.st_uid == 0,
            ),
            FileTrust::Operator { uid } => (format!("uid {uid}"), stat.st_uid == uid),
        };
        match good {
            true => Ok(()),
            false => Err(FileError::ForeignOwner {
                path: path.to_owned(),
                owner: stat.st_uid,
                trusted,
            }),
        }
    }

    /// In a world-writable directory anybody can replace the file, unless the sticky bit reserves that to the owner.
    /// The policy's directory must belong to the operator.
    fn check_directory(self, path: &Path, directory: &OwnedFd) -> Result<(), FileError> {
        let stat = rustix::fs::fstat(directory).map_err(|errno| FileError::open(path, errno))?;
        if let FileTrust::Operator { .. } = self {
            self.check_owner(path, &stat)?;
            return check_mode(path, &stat);
        }
        let mode = Mode::from_raw_mode(stat.st_mode);
        match mode.contains(Mode::WOTH) && !mode.contains(Mode::SVTX) {
            true => Err(FileError::WritableByOthers {
                path: path.to_owned(),
                mode: mode.bits(),
            }),
            false => Ok(()),
        }
    }
}

/// The group bits contain the mask of an access control list, so this also detects access that a list grants.
fn privacy(stat: &Stat) -> Privacy {
    let mode = Mode::from_raw_mode(stat.st_mode);
    match mode.intersects(Mode::RWXG | Mode::RWXO) {
        true => Privacy::Shared,
        false => Privacy::Private,
    }
}

/// The group bits contain the mask of an access control list, so this also detects write access that a list grants.
fn check_mode(path: &Path, stat: &Stat) -> Result<(), FileError> {
    let mode = Mode::from_raw_mode(stat.st_mode);
    match mode.intersects(Mode::WGRP | Mode::WOTH) {
        true => Err(FileError::WritableByOthers {
            path: path.to_owned(),
            mode: mode.bits(),
        }),
        false => Ok(()),
    }
}
