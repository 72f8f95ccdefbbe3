//! Resolving host paths, and normalising paths inside the sandbox.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::error::PlanError;

/// The kernel follows at most this many symlinks in one path.
const LINKS_MAX: u32 = 40;

pub(super) fn canonical_of(path: &Path) -> Result<PathBuf, PlanError> {
    path.canonicalize()
        .map_err(|source| PlanError::unreachable(path, source))
}

/// The path if it can be used as a mount target as written: absolute, without `.` and `..`.
pub(super) fn plain(path: &Path) -> Option<PathBuf> {
    let fine = path.is_absolute()
        && path
            .components()
            .all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    fine.then(|| path.components().collect())
}

/// Resolves the INSIDE of `--read PATH:INSIDE`. Refuses targets that would hide the system or Fumehood's own mounts.
pub(super) fn inside_target(inside: &Path, workspace: &Path) -> Result<PathBuf, PlanError> {
    let bad = |why| PlanError::BadTarget {
        inside: inside.to_path_buf(),
        why,
    };
    let target = plain(&workspace.join(inside))
        .ok_or_else(|| bad("it must be a plain path without `..`"))?;
    let made = ["/etc", "/proc", "/sys", "/dev"];
    let mut taken = sandbox::SYSTEM_DIRS.iter().chain(&made);
    if target == Path::new("/") || taken.any(|t| target.starts_with(t)) {
        return Err(bad("the system is there"));
    }
    let own = workspace.starts_with(&target)
        || target.starts_with(workspace.join(sandbox::HIDDEN_DIR))
        || target == Path::new("/tmp");
    match own {
        true => Err(bad("it would cover the workspace")),
        false => Ok(target),
    }
}

/// Removes `.` and `..` from a path without looking at the file system. Inside, no directory on the way is a symlink.
pub(super) fn without_dot_components(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

/// One component of a path, held open, so that the directory that was checked is the directory that is used.
pub(super) struct PathStep {
    fd: OwnedFd,
    pub(super) stat: Stat,
    name: OsString,
}

impl PathStep {
    fn root() -> rustix::io::Result<PathStep> {
        let fd = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        PathStep::of(fd, OsString::from("/"))
    }

    fn below(&self, name: OsString) -> rustix::io::Result<PathStep> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, &name, flags, Mode::empty())?;
        PathStep::of(fd, name)
    }

    fn of(fd: OwnedFd, name: OsString) -> rustix::io::Result<PathStep> {
        let stat = rustix::fs::fstat(&fd)?;
        Ok(PathStep { fd, stat, name })
    }

    pub(super) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }
}

pub(super) enum WalkError {
    Failed(Errno),
    /// The walk may not pass through the directory at this path, or through a symlink in it.
    NotPassable(PathBuf),
}

impl From<Errno> for WalkError {
    fn from(errno: Errno) -> WalkError {
        WalkError::Failed(errno)
    }
}

/// Resolves an absolute path as the kernel would: one name at a time, each relative to the descriptor of the directory
/// before. Asks `may_pass` about each directory in which a name is looked up, and about each symlink before following
/// it. Reads the owner and the target of a symlink from one descriptor, because the name may be given to another
/// symlink between two lookups.
pub(super) fn walk(
    path: &Path,
    may_pass: &dyn Fn(&PathStep) -> bool,
) -> Result<Vec<PathStep>, WalkError> {
    let mut at = vec![PathStep::root()?];
    let mut pending = names_reversed(path);
    let mut links = 0;
    while let Some(name) = pending.pop() {
        if name == ".." {
            // `at` holds no symlink, so its parent directory is its parent path.
            at.truncate(1.max(at.len() - 1));
            continue;
        }
        let here = at.last().ok_or(Errno::NOENT)?;
        if here.kind() != FileType::Directory {
            return Err(Errno::NOTDIR.into());
        }
        if !may_pass(here) {
            return Err(WalkError::NotPassable(path_of(&at)));
        }
        let next = here.below(name)?;
        if next.kind() != FileType::Symlink {
            at.push(next);
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        if !may_pass(&next) {
            return Err(WalkError::NotPassable(path_of(&at)));
        }
        let target = rustix::fs::readlinkat(&next.fd, "", Vec::new())?.into_bytes();
        let target = PathBuf::from(OsString::from_vec(target));
        if target.is_absolute() {
            at.truncate(1);
        }
        pending.extend(names_reversed(&target));
    }
    Ok(at)
}

/// The names and `..` components of a path, the last one first.
fn names_reversed(path: &Path) -> Vec<OsString> {
    let is_name =
        |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    let parts = path.components().filter(is_name).rev();
    parts.map(|part| part.as_os_str().to_owned()).collect()
}

/// The path without symlinks and `..` that a walk has found.
pub(super) fn path_of(at: &[PathStep]) -> PathBuf {
    at.iter().map(|step| &step.name).collect()
}
