//! Symlinks that decide what is shown, copied or written to: who owns them, and where they may lead.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};

use super::error::PlanError;

/// The kernel follows at most this many symlinks in one path.
const LINKS_MAX: u32 = 40;

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
        Ok(meta) if meta.is_symlink() => Some(std::os::unix::fs::MetadataExt::uid(&meta)),
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
    match resolve_links(above.unwrap_or(path), &|owner| owner == 0) {
        Ok(ResolvedLinks::To(dir)) => {
            dir.join(last.unwrap_or_default()) == real && !real.is_symlink()
        }
        Ok(ResolvedLinks::ForeignLink) | Err(_) => false,
    }
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
    match resolve_links(path, &is_own_or_root) {
        Ok(ResolvedLinks::To(real)) => Ok(real),
        Ok(ResolvedLinks::ForeignLink) => Err(PlanError::Refused {
            path: path.to_path_buf(),
            why: "it leads through a link that another user made; name the file itself",
        }),
        Err(source) => Err(PlanError::Unreachable {
            path: path.to_path_buf(),
            source: source.into(),
        }),
    }
}

/// Resolves the path of a directory that the caller writes to, and that may not exist yet. Returns `None` if a symlink
/// on the way belongs to somebody else than the caller or root: that user would choose the directory that is written to
/// with the caller's rights.
pub fn resolve_writable_directory(path: &Path) -> std::io::Result<Option<PathBuf>> {
    let path = std::path::absolute(path)?;
    let exists = |part: &&Path| std::fs::symlink_metadata(part).is_ok();
    let existing = path.ancestors().find(exists).unwrap_or(Path::new("/"));
    Ok(match resolve_links(existing, &is_own_or_root)? {
        ResolvedLinks::To(real) => {
            let below = path.strip_prefix(existing).unwrap_or(Path::new(""));
            Some(real.join(below))
        }
        ResolvedLinks::ForeignLink => None,
    })
}

fn is_own_or_root(owner: u32) -> bool {
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

enum ResolvedLinks {
    /// The path without symlinks and `..`.
    To(PathBuf),
    /// A symlink on the way belongs to a user whose symlinks are not followed.
    ForeignLink,
}

/// Resolves an absolute path, and follows only symlinks whose owner `may_follow` accepts. Opens each symlink once, and
/// reads its owner and its target from the open descriptor, because the name may be given to another symlink between
/// two lookups.
fn resolve_links(
    path: &Path,
    may_follow: &dyn Fn(u32) -> bool,
) -> rustix::io::Result<ResolvedLinks> {
    let mut at = PathBuf::from("/");
    let mut pending = components_reversed(path);
    let mut links = 0;
    while let Some(component) = pending.pop() {
        if component == ".." {
            // `at` holds no symlink, so its parent directory is its parent path.
            at.pop();
            continue;
        }
        at.push(component);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(&at, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(rustix::io::Errno::LOOP);
        }
        if !may_follow(stat.st_uid) {
            return Ok(ResolvedLinks::ForeignLink);
        }
        let target = rustix::fs::readlinkat(&file, "", Vec::new())?.into_bytes();
        let target = PathBuf::from(OsString::from_vec(target));
        match target.is_absolute() {
            true => at = PathBuf::from("/"),
            false => drop(at.pop()),
        }
        pending.extend(components_reversed(&target));
    }
    Ok(ResolvedLinks::To(at))
}

/// Returns the names and `..` components of a path, the last one first.
fn components_reversed(path: &Path) -> Vec<OsString> {
    let is_step =
        |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    let parts = path.components().filter(is_step).rev();
    parts.map(|part| part.as_os_str().to_owned()).collect()
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
