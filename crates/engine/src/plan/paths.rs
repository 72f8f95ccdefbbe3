//! Resolving host paths, and normalising paths inside the sandbox.

use std::path::{Component, Path, PathBuf};

use super::error::PlanError;

pub(super) fn canonical(path: &Path) -> std::io::Result<PathBuf> {
    std::fs::canonicalize(path)
}

pub(super) fn canonical_of(path: &Path) -> Result<PathBuf, PlanError> {
    canonical(path).map_err(|source| PlanError::Unreachable {
        path: path.to_path_buf(),
        source,
    })
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
