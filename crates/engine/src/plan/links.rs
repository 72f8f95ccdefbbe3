//! Symlinks that decide what is shown or copied: who owns them, and where they may lead.

use std::path::{Component, Path, PathBuf};

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

/// Whether a stable path leads to `real`. The path is examined more than once, and somebody who can write to a
/// directory on the way may create a symlink for only one of these looks. Therefore `real` must be the path itself,
/// apart from root's symlinks.
pub(super) fn is_stable_path_to(path: &Path, real: &Path) -> bool {
    let is_link = |part: &&Path| part.is_symlink();
    // Ignore the last component: [`is_stable_path`] refuses a symlink there.
    let (mut at, rest) = match path.ancestors().skip(1).find(is_link) {
        Some(link) => match (std::fs::canonicalize(link), path.strip_prefix(link)) {
            (Ok(at), Ok(rest)) => (at, rest),
            _ => return false,
        },
        None => (PathBuf::from("/"), path),
    };
    // The rest holds no symlink, so `..` removes the component before it.
    for part in rest.components() {
        match part {
            Component::Normal(name) => at.push(name),
            Component::ParentDir => drop(at.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    is_stable_path(path) && at == real
}

/// Whether every symlink on the way belongs to the caller or to root. Other users who can write to the project must
/// not choose what is read with the caller's rights.
pub(super) fn links_are_own(path: &Path) -> Result<bool, PlanError> {
    match check_links_are_own(path) {
        Err(PlanError::Refused { .. }) => Ok(false),
        other => other.map(|()| true),
    }
}

/// Fails if a symlink on the way to `path` belongs to somebody else than the caller or root. A script is copied with
/// the caller's rights; another user who can write beside it must not choose the file by a symlink.
pub(super) fn check_links_are_own(path: &Path) -> Result<(), PlanError> {
    let unreachable = |source| PlanError::Unreachable {
        path: path.to_path_buf(),
        source,
    };
    let mut at = path.to_path_buf();
    for _ in 0..=LINKS_MAX {
        let mut above: Vec<&Path> = at.ancestors().collect();
        above.reverse();
        let mut link = None;
        for part in above {
            let meta = std::fs::symlink_metadata(part).map_err(unreachable)?;
            let owner = std::os::unix::fs::MetadataExt::uid(&meta);
            if meta.is_symlink() {
                if ![0, rustix::process::geteuid().as_raw()].contains(&owner) {
                    return Err(PlanError::Refused {
                        path: path.to_path_buf(),
                        why: "it leads through a link that another user made; name the file itself",
                    });
                }
                link = Some(part.to_path_buf());
                break;
            }
        }
        let Some(link) = link else {
            return Ok(());
        };
        let to = std::fs::read_link(&link).map_err(unreachable)?;
        let below = at.strip_prefix(&link).unwrap_or(Path::new(""));
        let mut next = link.parent().unwrap_or(Path::new("/")).join(to);
        if !below.as_os_str().is_empty() {
            next.push(below);
        }
        at = next;
    }
    Ok(())
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
