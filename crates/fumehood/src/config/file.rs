//! Reading a configuration file that must not have been written by somebody else.
//!
//! The file is opened once; every check is made on the descriptor that is then read. Symlinks are
//! followed by hand (dotfiles are often links into a repository), so that each link and each directory
//! on the way is held to the same rule as the file: whoever can replace one decides what is read.

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
pub enum Trust {
    /// The caller or root.
    Caller { uid: u32 },
    /// The operator alone, the directory included.
    Operator { uid: u32 },
}

/// Who else may read the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privacy {
    /// Neither its group nor others can do anything with it.
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

/// The file's text, or `None` if there is no such file. A file that is there and cannot be read is an
/// error: a policy that is skipped because it is broken would be no policy.
pub fn read_trusted(path: &Path, trust: Trust) -> Result<Option<TrustedText>, FileError> {
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
    // The size told by fstat may grow while we read; the bound is on what is read.
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

/// A secret's first line, without the space around it. A file that others can read keeps no secret, and one that is
/// not there was meant to be.
pub fn read_secret_line(path: &Path, uid: u32) -> Result<String, FileError> {
    let Some(secret) = read_trusted(path, Trust::Caller { uid })? else {
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

/// Follows links one by one, checking the directory that holds each, and opens what is at the end.
fn open_trusted(named: &Path, trust: Trust) -> Result<Option<OwnedFd>, FileError> {
    let mut path = named.to_owned();
    for links in 0..=LINKS_MAX {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(FileError::NotRegular { path });
        };
        // `parent` of a bare name is empty, which would not open.
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
        // Without NONBLOCK a FIFO put in the file's place would hold us for ever.
        let file_flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        match rustix::fs::openat(&directory, name, file_flags, Mode::empty()) {
            Ok(descriptor) => return Ok(Some(descriptor)),
            // Only the name itself may be missing. A link that leads nowhere was put there by somebody.
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

/// Whether nothing at all has that name; a dangling link has it.
fn is_absent(path: &Path) -> bool {
    matches!(path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

impl Trust {
    fn check_owner(self, path: &Path, stat: &Stat) -> Result<(), FileError> {
        let (trusted, good) = match self {
            Trust::Caller { uid } => (
                format!("you (uid {uid}) or root"),
                stat.st_uid == uid || stat.st_uid == 0,
            ),
            Trust::Operator { uid } => (format!("uid {uid}"), stat.st_uid == uid),
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

    /// In a directory that everybody may write, anybody can put another file in this one's place,
    /// unless the sticky bit leaves that to its owner. The policy's directory is the operator's alone.
    fn check_directory(self, path: &Path, directory: &OwnedFd) -> Result<(), FileError> {
        let stat = rustix::fs::fstat(directory).map_err(|errno| FileError::open(path, errno))?;
        if let Trust::Operator { .. } = self {
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

/// An access list's mask stands in the group bits, so this sees access given that way too.
fn privacy(stat: &Stat) -> Privacy {
    let mode = Mode::from_raw_mode(stat.st_mode);
    match mode.intersects(Mode::RWXG | Mode::RWXO) {
        true => Privacy::Shared,
        false => Privacy::Private,
    }
}

/// An access list's mask stands in the group bits, so this sees write access given that way too.
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
