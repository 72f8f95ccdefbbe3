//! Symlinks that decide what is shown, copied or written to: who owns them, and where they may lead.

use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::FileType;

use super::error::PlanError;
use super::paths::{PathStep, WalkError, path_of, walk};

/// The most entries to look at below a directory that a symlink selects. Looking takes some tenths of a second.
const LOOKED_AT_MAX: usize = 100_000;

/// Top-level directories of a project that a symlink may never select: the pages that the project serves.
const NEVER_BY_LINK: [&str; 1] = ["site"];

/// Whether the project may choose to show the resolved path `real` in place of `data/` or `docs/`. It must lie
/// strictly below the project's root, with no hidden directory on the way, and must hold no repository or environment
/// file.
pub(super) fn may_project_show(real: &Path, project: &Path) -> bool {
    let Ok(below) = real.strip_prefix(project) else {
        return false;
    };
    let hidden = |part: Component<'_>| part.as_os_str().as_encoded_bytes().starts_with(b".");
    let Some(top) = below.components().next() else {
        return false;
    };
    !below.components().any(hidden)
        && !NEVER_BY_LINK.iter().any(|name| top.as_os_str() == *name)
        && !may_hold_secrets(real)
}

/// Whether a `.git` or `.env*` lies anywhere below the directory. A directory that cannot be listed or is too large
/// may hold one.
fn may_hold_secrets(dir: &Path) -> bool {
    let secret = |name: &[u8]| name == b".git" || name.starts_with(b".env");
    let mut pending = vec![dir.to_path_buf()];
    let mut looked_at = 0;
    while let Some(dir) = pending.pop() {
        let Ok(entries) = std::fs::read_dir(dir) else {
            return true;
        };
        for entry in entries {
            looked_at += 1;
            // `file_type` does not follow symlinks. Inside, a symlink leads only to what is visible anyway.
            let Ok((name, kind, path)) =
                entry.and_then(|e| Ok((e.file_name(), e.file_type()?, e.path())))
            else {
                return true;
            };
            if looked_at > LOOKED_AT_MAX || secret(name.as_encoded_bytes()) {
                return true;
            }
            if kind.is_dir() {
                pending.push(path);
            }
        }
    }
    false
}

/// Whether only root can change where a path leads: the path does not end in a symlink, and every symlink on the way
/// belongs to root. A path that does not exist counts as stable.
pub(super) fn is_stable_path(path: &Path) -> bool {
    let is_link = |part: &Path| match std::fs::symlink_metadata(part) {
        Ok(meta) if meta.is_symlink() => Some(meta.uid()),
        _ => None,
    };
    is_link(path).is_none()
        && path
            .ancestors()
            .all(|part| is_link(part).is_none_or(|uid| uid == 0))
}

/// Whether a path leads to `real`, does not end in a symlink, and leads through no symlinks but root's. `real` was
/// resolved at another moment, and somebody who can write to a directory on the way may have put a symlink there for
/// that moment.
pub(super) fn is_stable_path_to(path: &Path, real: &Path) -> bool {
    let last = path.file_name();
    let above = path.parent().filter(|_| last.is_some());
    resolve_links(above.unwrap_or(path), &|owner| owner == 0)
        .is_ok_and(|dir| dir.join(last.unwrap_or_default()) == real && !real.is_symlink())
}

/// Whether every symlink on the way belongs to the caller or to root. Other users who can write to the project must
/// not choose what is read with the caller's rights.
pub(super) fn links_are_own(path: &Path) -> Result<bool, PlanError> {
    match resolve_own_links(path) {
        Err(PlanError::Refused { .. }) => Ok(false),
        other => other.map(|_| true),
    }
}

/// Resolves the path of a script. Fails if a symlink on the way belongs to somebody else than the caller or root. A
/// script is copied with the caller's rights; another user who can write beside it must not choose the file by a
/// symlink. The result led through no symlink when it was resolved. Open the result later, never `path` again.
pub(super) fn resolve_own_links(path: &Path) -> Result<PathBuf, PlanError> {
    const FOREIGN: &str = "it leads through a link that another user made; name the file itself";
    resolve_links(path, &is_own_or_root).map_err(|error| match error {
        WalkError::NotPassable(_) => PlanError::refused(path, FOREIGN),
        WalkError::Failed(errno) => PlanError::unreachable(path, errno),
    })
}

/// Resolves the path of a directory that the caller writes to, and that may not exist yet. Returns `None` if a symlink
/// on the way belongs to somebody else than the caller or root: that user would choose the directory that is written to
/// with the caller's rights.
pub fn resolve_writable_directory(path: &Path) -> std::io::Result<Option<PathBuf>> {
    let path = std::path::absolute(path)?;
    let exists = |part: &&Path| std::fs::symlink_metadata(part).is_ok();
    let existing = path.ancestors().find(exists).unwrap_or(Path::new("/"));
    let below = path.strip_prefix(existing).unwrap_or(Path::new(""));
    match resolve_links(existing, &is_own_or_root) {
        Ok(real) => Ok(Some(real.join(below))),
        Err(WalkError::NotPassable(_)) => Ok(None),
        Err(WalkError::Failed(errno)) => Err(errno.into()),
    }
}

fn is_own_or_root(owner: u32) -> bool {
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

/// Resolves an absolute path, and follows only symlinks whose owner `may_follow` accepts.
fn resolve_links(path: &Path, may_follow: &dyn Fn(u32) -> bool) -> Result<PathBuf, WalkError> {
    let is_link = |step: &PathStep| step.kind() == FileType::Symlink;
    let may_pass = |step: &PathStep| !is_link(step) || may_follow(step.stat.st_uid);
    walk(path, &may_pass).map(|steps| path_of(&steps))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_found_however_deep_they_lie() {
        for (made, shown) in [
            ("part/a/b/table.csv", true),
            ("part/.env", false),
            ("part/api/.env.local", false),
            ("part/a/b/.git/config", false),
            ("part/a/.environment", false),
            ("part/a/.hidden/x", true),
        ] {
            let project = tempfile::tempdir().unwrap();
            let file = project.path().join(made);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
            // Following this symlink would never end.
            std::os::unix::fs::symlink("..", project.path().join("part/up")).unwrap();
            let part = project.path().join("part");
            assert_eq!(may_project_show(&part, project.path()), shown, "{made}");
        }
    }

    #[test]
    fn a_fixed_path_leads_where_it_says() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(top.join("a/b")).unwrap();
        std::fs::create_dir(top.join("other")).unwrap();
        std::os::unix::fs::symlink("other", top.join("link")).unwrap();
        for (path, real, fixed) in [
            ("a/b", "a/b", true),
            ("a/b/", "a/b", true),
            ("other/../a/./b", "a/b", true),
            // A symlink was there when the path was resolved, and is gone.
            ("a/b", "other", false),
            ("link", "other", false),
        ] {
            let (path, real) = (top.join(path), top.join(real));
            assert_eq!(is_stable_path_to(&path, &real), fixed, "{path:?} {real:?}");
        }
        // A symlink of root.
        if let Ok(real) = Path::new("/bin").canonicalize()
            && real != Path::new("/bin")
        {
            let below = std::fs::read_dir(&real).unwrap().next().unwrap().unwrap();
            let path = Path::new("/bin").join(below.file_name());
            assert_eq!(is_stable_path_to(&path, &below.path()), !path.is_symlink());
        }
    }
}
