//! What everybody on this host may read. A queued request may come from somebody with fewer rights than the worker has, so
//! the worker's own rights must not decide what it is shown, nor tell what else there is.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Access, AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::PolicyError;

/// As many links as the kernel follows.
const LINKS_MAX: u32 = 40;
/// Directories that are looked through hold no more than this, nor lie deeper in each other.
const ENTRIES_MAX: u32 = 100_000;
const DEPTH_MAX: usize = 64;

const OTHERS_READ: u32 = 0o004;
const OTHERS_ENTER: u32 = 0o001;

/// What the path leads to, resolved as the kernel would for somebody who has no rights but those that everybody has: one
/// name at a time, each by the descriptor of the directory before, which everybody must be able to enter.
pub(super) fn find(path: &Path) -> Result<PathBuf, PolicyError> {
    let failed = |source: Errno| PolicyError::Unreachable {
        path: path.to_path_buf(),
        source: source.into(),
    };
    let mut ahead: VecDeque<OsString> = names(path);
    let mut at = vec![Step::root().map_err(failed)?];
    let mut links = 0;
    while let Some(name) = ahead.pop_front() {
        let here = at.last().ok_or_else(|| failed(Errno::NOENT))?;
        if name == ".." {
            if at.len() > 1 {
                at.pop();
            }
            continue;
        }
        if here.kind() != FileType::Directory {
            return Err(failed(Errno::NOTDIR));
        }
        if !here.lets_everybody(OTHERS_ENTER) {
            return Err(closed(path, &at));
        }
        let next = here.below(&name).map_err(failed)?;
        if next.kind() != FileType::Symlink {
            at.push(next);
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(failed(Errno::LOOP));
        }
        let target = rustix::fs::readlinkat(&next.fd, "", Vec::new()).map_err(failed)?;
        let target = Path::new(OsStr::from_bytes(target.as_bytes()));
        if target.is_absolute() {
            at.truncate(1);
        }
        for name in names(target).into_iter().rev() {
            ahead.push_front(name);
        }
    }
    let wanted = match at.last().map(Step::kind) {
        Some(FileType::Directory) => OTHERS_READ | OTHERS_ENTER,
        _ => OTHERS_READ,
    };
    match at.last().is_some_and(|last| last.lets_everybody(wanted)) {
        true => Ok(path_of(&at)),
        false => Err(closed(path, &at)),
    }
}

/// Something below a directory that we can read and not everybody can. Where the program runs as our own user, a
/// directory that is open to everybody would show it that.
pub(super) fn check_nothing_private(directory: &Path) -> Result<(), PolicyError> {
    let failed = |source: Errno| PolicyError::Unreachable {
        path: directory.to_path_buf(),
        source: source.into(),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = rustix::fs::open(directory, flags, Mode::empty()).map_err(failed)?;
    let mut left = ENTRIES_MAX;
    let mut levels = vec![(
        Dir::read_from(&top).map_err(failed)?,
        top,
        directory.to_path_buf(),
    )];
    loop {
        let depth = levels.len();
        let Some((entries, dir, at)) = levels.last_mut() else {
            return Ok(());
        };
        let Some(entry) = entries.next().transpose().map_err(failed)? else {
            levels.pop();
            continue;
        };
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let Some(fewer) = left.checked_sub(1) else {
            return Err(PolicyError::TooLarge {
                path: directory.to_path_buf(),
            });
        };
        left = fewer;
        let path = at.join(OsStr::from_bytes(name.to_bytes()));
        let stat = rustix::fs::statat(&*dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let wanted = match kind {
            FileType::Symlink => continue,
            FileType::Directory => OTHERS_READ | OTHERS_ENTER,
            _ => OTHERS_READ,
        };
        if stat.st_mode & wanted != wanted && ours_to_read(dir.as_fd(), name) {
            return Err(PolicyError::NotEverybodys {
                path: directory.to_path_buf(),
                closed: path,
            });
        }
        if kind == FileType::Directory && stat.st_mode & wanted == wanted {
            if depth >= DEPTH_MAX {
                return Err(PolicyError::TooLarge {
                    path: directory.to_path_buf(),
                });
            }
            let below = rustix::fs::openat(&*dir, name, flags, Mode::empty()).map_err(failed)?;
            levels.push((Dir::read_from(&below).map_err(failed)?, below, path));
        }
    }
}

fn ours_to_read(dir: BorrowedFd<'_>, name: &std::ffi::CStr) -> bool {
    let may = |access| rustix::fs::accessat(dir, name, access, AtFlags::EACCESS).is_ok();
    may(Access::READ_OK) || may(Access::EXEC_OK)
}

/// The names that a path consists of, `..` included.
fn names(path: &Path) -> VecDeque<OsString> {
    let name = |part: Component<'_>| match part {
        Component::Normal(_) | Component::ParentDir => Some(part.as_os_str().to_owned()),
        _ => None,
    };
    path.components().filter_map(name).collect()
}

fn closed(path: &Path, at: &[Step]) -> PolicyError {
    PolicyError::NotEverybodys {
        path: path.to_path_buf(),
        closed: path_of(at),
    }
}

fn path_of(at: &[Step]) -> PathBuf {
    let mut path = PathBuf::from("/");
    path.extend(at.iter().skip(1).map(|step| &step.name));
    path
}

/// One component on the way, held open, so that what was looked at is what is gone through.
struct Step {
    fd: OwnedFd,
    stat: Stat,
    name: OsString,
}

impl Step {
    fn root() -> rustix::io::Result<Step> {
        let fd = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        Step::of(fd, OsString::from("/"))
    }

    fn below(&self, name: &OsStr) -> rustix::io::Result<Step> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty())?;
        Step::of(fd, name.to_owned())
    }

    fn of(fd: OwnedFd, name: OsString) -> rustix::io::Result<Step> {
        let stat = rustix::fs::fstat(&fd)?;
        Ok(Step { fd, stat, name })
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    fn lets_everybody(&self, wanted: u32) -> bool {
        self.stat.st_mode & wanted == wanted
    }
}
