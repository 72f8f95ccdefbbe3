//! Links that decide what is shown or copied: whose they are, and where they may lead.

use std::path::{Component, Path, PathBuf};

use super::PolicyError;

/// As many links as the kernel follows.
const LINKS_MAX: u32 = 40;

/// Entries looked at below a directory that a link shows; some tenths of a second.
const LOOKED_AT_MAX: usize = 100_000;

/// Directories of a project that are never shown by a link, whatever they hold: the pages that the project serves.
const NEVER_BY_LINK: [&str; 1] = ["site"];

/// Whether a resolved path is a part of the project that the project may choose to show in place of `data/` or `docs/`:
/// strictly below its root, through nothing hidden, and not a directory of code and secrets itself.
pub(super) fn is_shown_part(real: &Path, project: &Path) -> bool {
    let Ok(below) = real.strip_prefix(project) else {
        return false;
    };
    let hidden = |part: Component<'_>| part.as_os_str().as_encoded_bytes().starts_with(b".");
    let Some(top) = below.components().next() else {
        return false;
    };
    !below.components().any(hidden)
        && !NEVER_BY_LINK.iter().any(|name| top.as_os_str() == *name)
        && !holds_secrets(real)
}

/// Whether a repository or an environment file lies anywhere in a directory: what lies in it is shown as well. What cannot
/// be listed, or is too much to look through, may hold both.
fn holds_secrets(dir: &Path) -> bool {
    let secret = |name: &[u8]| name == b".git" || name.starts_with(b".env");
    let mut pending = vec![dir.to_path_buf()];
    let mut looked_at = 0;
    while let Some(dir) = pending.pop() {
        let Ok(entries) = std::fs::read_dir(dir) else {
            return true;
        };
        for entry in entries {
            looked_at += 1;
            // The kind of a link is that of the link: inside it leads to nothing that is not shown.
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

/// Whether a path leads to the same place until root changes something: it ends in no link, and leads through none but
/// root's. A path that does not exist is fixed.
pub(super) fn is_fixed(path: &Path) -> bool {
    let is_link = |part: &Path| match std::fs::symlink_metadata(part) {
        Ok(meta) if meta.is_symlink() => Some(std::os::unix::fs::MetadataExt::uid(&meta)),
        _ => None,
    };
    is_link(path).is_none()
        && path
            .ancestors()
            .all(|part| is_link(part).is_none_or(|uid| uid == 0))
}

/// Whether a fixed path leads to `real`. The path is looked at more than once, and whoever can write on the way may put a link there
/// for one of these looks: so `real` must be what the path says itself, but for root's links.
pub(super) fn is_fixed_at(path: &Path, real: &Path) -> bool {
    let is_link = |part: &&Path| part.is_symlink();
    // The last part is never a link, whatever it is by now.
    let (mut at, rest) = match path.ancestors().skip(1).find(is_link) {
        Some(link) => match (std::fs::canonicalize(link), path.strip_prefix(link)) {
            (Ok(at), Ok(rest)) => (at, rest),
            _ => return false,
        },
        None => (PathBuf::from("/"), path),
    };
    // No part of the rest is a link, so `..` is what stands before it.
    for part in rest.components() {
        match part {
            Component::Normal(name) => at.push(name),
            Component::ParentDir => drop(at.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    is_fixed(path) && at == real
}

/// Whether every link on the way belongs to the caller or to root: whoever else can write in the project does not thereby
/// choose what is read with the caller's rights.
pub(super) fn has_own_links(path: &Path) -> Result<bool, PolicyError> {
    match through_own_links(path) {
        Err(PolicyError::Refused { .. }) => Ok(false),
        other => other.map(|()| true),
    }
}

/// A script is copied with the caller's rights. Whoever can write beside it must not choose, by a link on the way to
/// it, which file of the caller's that is.
pub(super) fn through_own_links(path: &Path) -> Result<(), PolicyError> {
    let unreachable = |source| PolicyError::Unreachable {
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
                    return Err(PolicyError::Refused {
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
            // Not followed, or it would not end.
            std::os::unix::fs::symlink("..", project.path().join("part/up")).unwrap();
            let part = project.path().join("part");
            assert_eq!(is_shown_part(&part, project.path()), shown, "{made}");
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
            // A link was there when it was resolved, and is gone.
            ("a/b", "other", false),
            ("link", "other", false),
        ] {
            let (path, real) = (top.join(path), top.join(real));
            assert_eq!(is_fixed_at(&path, &real), fixed, "{path:?} {real:?}");
        }
        // Root's own.
        if let Ok(real) = Path::new("/bin").canonicalize()
            && real != Path::new("/bin")
        {
            let below = std::fs::read_dir(&real).unwrap().next().unwrap().unwrap();
            let path = Path::new("/bin").join(below.file_name());
            assert_eq!(is_fixed_at(&path, &below.path()), !path.is_symlink());
        }
    }
}
