//! What every user of this host may read. A queued request may come from a user with fewer rights than the worker.
//! The worker's rights must then neither decide what is shown nor reveal what else exists.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Access, AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::error::PlanError;

/// The kernel follows at most this many symlinks in one path.
const LINKS_MAX: u32 = 40;
/// Bounds on the entries that [`check_nothing_private`] looks at, and on the depth.
const ENTRIES_MAX: u32 = 100_000;
const DEPTH_MAX: usize = 64;

const OTHERS_READ: u32 = 0o004;
const OTHERS_ENTER: u32 = 0o001;

/// Resolves a path as the kernel would for a user with no rights but those of "others": one name at a time, each
/// relative to the descriptor of the directory before, which others must be able to enter.
pub(super) fn resolve(path: &Path) -> Result<PathBuf, PlanError> {
    let failed = |source: Errno| PlanError::Unreachable {
        path: path.to_path_buf(),
        source: source.into(),
    };
    let mut ahead: VecDeque<OsString> = names(path);
    let mut at = vec![PathStep::root().map_err(failed)?];
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
        if !here.allows_everybody(OTHERS_ENTER) {
            return Err(not_world_readable(path, &at));
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
    let wanted = match at.last().map(PathStep::kind) {
        Some(FileType::Directory) => OTHERS_READ | OTHERS_ENTER,
        _ => OTHERS_READ,
    };
    match at.last().is_some_and(|last| last.allows_everybody(wanted)) {
        true => Ok(path_of(&at)),
        false => Err(not_world_readable(path, &at)),
    }
}

/// Fails if anything below `directory` is readable for this process but not for everybody. This matters where the
/// program runs as the user who runs Fumehood: a directory that is open to everybody may hold private files of that
/// user.
pub(super) fn check_nothing_private(directory: &Path) -> Result<(), PlanError> {
    let failed = |source: Errno| PlanError::Unreachable {
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
            return Err(PlanError::TooLargeToCheck {
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
        if stat.st_mode & wanted != wanted && may_we_read(dir.as_fd(), name) {
            return Err(PlanError::NotWorldReadable {
                path: directory.to_path_buf(),
                closed: path,
            });
        }
        if kind == FileType::Directory && stat.st_mode & wanted == wanted {
            if depth >= DEPTH_MAX {
                return Err(PlanError::TooLargeToCheck {
                    path: directory.to_path_buf(),
                });
            }
            let below = rustix::fs::openat(&*dir, name, flags, Mode::empty()).map_err(failed)?;
            levels.push((Dir::read_from(&below).map_err(failed)?, below, path));
        }
    }
}

fn may_we_read(dir: BorrowedFd<'_>, name: &std::ffi::CStr) -> bool {
    let may = |access| rustix::fs::accessat(dir, name, access, AtFlags::EACCESS).is_ok();
    may(Access::READ_OK) || may(Access::EXEC_OK)
}

/// The names that a path consists of, including `..`.
fn names(path: &Path) -> VecDeque<OsString> {
    let name = |part: Component<'_>| match part {
        Component::Normal(_) | Component::ParentDir => Some(part.as_os_str().to_owned()),
        _ => None,
    };
    path.components().filter_map(name).collect()
}

fn not_world_readable(path: &Path, at: &[PathStep]) -> PlanError {
    PlanError::NotWorldReadable {
        path: path.to_path_buf(),
        closed: path_of(at),
    }
}

fn path_of(at: &[PathStep]) -> PathBuf {
    let mut path = PathBuf::from("/");
    path.extend(at.iter().skip(1).map(|step| &step.name));
    path
}

/// One component of a path, held open, so that the directory that was checked is the directory that is used.
struct PathStep {
    fd: OwnedFd,
    stat: Stat,
    name: OsString,
}

impl PathStep {
    fn root() -> rustix::io::Result<PathStep> {
        let fd = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        PathStep::of(fd, OsString::from("/"))
    }

    fn below(&self, name: &OsStr) -> rustix::io::Result<PathStep> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty())?;
        PathStep::of(fd, name.to_owned())
    }

    fn of(fd: OwnedFd, name: OsString) -> rustix::io::Result<PathStep> {
        let stat = rustix::fs::fstat(&fd)?;
        Ok(PathStep { fd, stat, name })
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    fn allows_everybody(&self, wanted: u32) -> bool {
        self.stat.st_mode & wanted == wanted
    }
}
