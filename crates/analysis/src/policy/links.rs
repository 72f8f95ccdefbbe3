//! Links that decide what is shown or copied: whose they are, and where they may lead.

use std::path::{Path, PathBuf};

use super::{PolicyError, canonical};

/// As many links as the kernel follows.
const LINKS_MAX: u32 = 40;

/// `data` may be a link, which then decides what is shown. Whoever can write in a project does not thereby read with
/// the caller's rights: not by a link that somebody else made, and not by one to people's homes and what is hidden in them.
pub(super) fn trusted_link(path: &Path, homes: &[PathBuf]) -> Result<(), PolicyError> {
    let refuse = |why| {
        Err(PolicyError::Refused {
            path: path.to_path_buf(),
            why,
        })
    };
    let unreachable = |source| PolicyError::Unreachable {
        path: path.to_path_buf(),
        source,
    };
    let mut at = path.to_path_buf();
    for hop in 0.. {
        let meta = std::fs::symlink_metadata(&at).map_err(unreachable)?;
        if !meta.is_symlink() {
            match hop {
                0 => return Ok(()),
                _ => break,
            }
        }
        let owner = std::os::unix::fs::MetadataExt::uid(&meta);
        if ![0, rustix::process::geteuid().as_raw()].contains(&owner) || hop > LINKS_MAX {
            return refuse(
                "it is a link that another user made; name what it leads to with --data or --docs",
            );
        }
        let to = std::fs::read_link(&at).map_err(unreachable)?;
        at = at.parent().unwrap_or(Path::new("/")).join(to);
    }
    let real = canonical(path).map_err(unreachable)?;
    // A home may itself be reached through a link.
    let resolved = homes.iter().filter_map(|home| canonical(home).ok());
    let private = |home: &PathBuf| {
        let below = real
            .strip_prefix(home)
            .ok()
            .and_then(|p| p.components().next());
        home.starts_with(&real)
            || below.is_some_and(|c| c.as_os_str().as_encoded_bytes().starts_with(b"."))
    };
    let system = ["/etc", "/var", "/run", "/boot"]
        .iter()
        .any(|dir| real.starts_with(dir));
    match system && !real.starts_with("/var/tmp")
        || homes
            .iter()
            .cloned()
            .chain(resolved)
            .any(|home| private(&home))
    {
        true => refuse(
            "it is a link to what is private on this host; if it is meant, name it with --data or --docs",
        ),
        false => Ok(()),
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
