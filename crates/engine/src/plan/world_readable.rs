//! What every user of this host may read. A queued request may come from a user with fewer rights than the worker.
//! The worker's rights must then neither decide what is shown nor reveal what else exists.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::error::PlanError;
use super::paths::{PathStep, WalkError, path_of, walk};

/// Bounds on the entries that [`check_nothing_private`] looks at, and on the depth.
const ENTRIES_MAX: u32 = 100_000;
const DEPTH_MAX: usize = 64;

const OTHERS_READ: u32 = 0o004;
const OTHERS_ENTER: u32 = 0o001;

/// Resolves a path as the kernel would for a user with no rights but those of "others".
pub(super) fn resolve(path: &Path) -> Result<PathBuf, PlanError> {
    let is_open = |step: &PathStep, wanted: u32| step.stat.st_mode & wanted == wanted;
    let may_pass = |s: &PathStep| s.kind() == FileType::Symlink || is_open(s, OTHERS_ENTER);
    let closed = |closed: PathBuf| PlanError::NotWorldReadable {
        path: path.to_path_buf(),
        closed,
    };
    let steps = walk(path, &may_pass).map_err(|error| match error {
        WalkError::NotPassable(at) => closed(at),
        WalkError::Failed(errno) => PlanError::unreachable(path, errno),
    })?;
    let may_read = |last: &PathStep| is_open(last, wanted_by_all(last.kind()));
    match steps.last().is_some_and(may_read) {
        true => Ok(path_of(&steps)),
        false => Err(closed(path_of(&steps))),
    }
}

/// The rights that everybody needs to read a file or a directory.
fn wanted_by_all(kind: FileType) -> u32 {
    match kind {
        FileType::Directory => OTHERS_READ | OTHERS_ENTER,
        _ => OTHERS_READ,
    }
}

/// Fails if anything below `directory` is readable for this process but not for everybody. This matters where the
/// program runs as the user who runs Fumehood: a directory that is open to everybody may hold private files of that
/// user.
pub(super) fn check_nothing_private(directory: &Path) -> Result<(), PlanError> {
    let failed = |errno: Errno| PlanError::unreachable(directory, errno);
    let too_large = || PlanError::TooLargeToCheck {
        path: directory.to_path_buf(),
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
        left = left.checked_sub(1).ok_or_else(too_large)?;
        let path = at.join(OsStr::from_bytes(name.to_bytes()));
        let stat = rustix::fs::statat(&*dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Symlink {
            continue;
        }
        let wanted = wanted_by_all(kind);
        if stat.st_mode & wanted != wanted && may_we_read(dir.as_fd(), name) {
            return Err(PlanError::NotWorldReadable {
                path: directory.to_path_buf(),
                closed: path,
            });
        }
        if kind == FileType::Directory && stat.st_mode & wanted == wanted {
            if depth >= DEPTH_MAX {
                return Err(too_large());
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
