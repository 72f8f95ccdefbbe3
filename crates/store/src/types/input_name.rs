//! The names of inputs in a workspace.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

/// Names at the top of the workspace that Fumehood reserves: the two read-only mounts and its own hidden directory.
pub const RESERVED_NAMES: [&str; 3] = ["data", "docs", ".fumehood"];

/// The largest number of components in a name.
pub const DEPTH_MAX: usize = 128;

/// Why an input cannot have a name in the workspace.
#[allow(missing_docs, reason = "the variants say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum InputNameError {
    /// The name is not a relative path of plain components, or has more than [`DEPTH_MAX`] of them.
    #[error("input name {name:?} must be a relative path without `..`")]
    BadName { name: PathBuf },
    /// The name begins with one of [`RESERVED_NAMES`].
    #[error(
        "input name {name:?}: {reserved:?} at the top of the workspace is Fumehood's own; give another with --input PATH:NAME"
    )]
    Reserved {
        name: PathBuf,
        reserved: &'static str,
    },
    /// No name was given, and the path ends in none.
    #[error("input {path:?} has no name of its own; give one with --input PATH:NAME")]
    NoName { path: PathBuf },
}

/// The name of an input in the workspace: the given name, or the last component of its path.
pub fn name_for(source: &Path, given: Option<&Path>) -> Result<PathBuf, InputNameError> {
    let name = match (given, source.file_name()) {
        (Some(name), _) => name.to_path_buf(),
        (None, Some(name)) => PathBuf::from(name),
        (None, None) => {
            return Err(InputNameError::NoName {
                path: source.to_path_buf(),
            });
        }
    };
    check_name(&name)?;
    Ok(name)
}

/// Checks a name and splits it into components below the workspace.
pub fn check_name(name: &Path) -> Result<Vec<CString>, InputNameError> {
    let bad = || InputNameError::BadName {
        name: name.to_path_buf(),
    };
    let part = |c: Component<'_>| match c {
        Component::Normal(part) => CString::new(part.as_bytes()).map_err(|_| bad()),
        _ => Err(bad()),
    };
    let parts: Vec<CString> = name.components().map(part).collect::<Result<_, _>>()?;
    let first = parts.first().ok_or_else(bad)?;
    if parts.len() > DEPTH_MAX {
        return Err(bad());
    }
    match RESERVED_NAMES
        .iter()
        .find(|r| first.as_bytes() == r.as_bytes())
    {
        Some(reserved) => Err(InputNameError::Reserved {
            name: name.to_path_buf(),
            reserved,
        }),
        None => Ok(parts),
    }
}

/// Whether the target of a link stays inside the copied tree. The link is `depth` directories below the top of the
/// tree. `..` is accepted only at the beginning of the target: after a name, which may itself be a link to anywhere,
/// `..` could leave the tree.
pub fn stays_inside(target: &Path, depth: usize) -> bool {
    let mut climbed = 0;
    let mut named = false;
    for part in target.components() {
        match part {
            Component::CurDir => {}
            Component::Normal(_) => named = true,
            Component::ParentDir if !named => climbed += 1,
            _ => return false,
        }
    }
    climbed <= depth
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_input_gets_its_own_name_unless_that_is_reserved() {
        assert_eq!(
            name_for(Path::new("/x/fit.R"), None).unwrap(),
            Path::new("fit.R")
        );
        assert!(matches!(
            name_for(Path::new("/"), None),
            Err(InputNameError::NoName { .. })
        ));
        assert!(matches!(
            name_for(Path::new("/x/data"), None),
            Err(InputNameError::Reserved { .. })
        ));
    }

    proptest::proptest! {
        #[test]
        fn no_link_judged_inside_leads_out(target in "[ab./]{1,12}", depth in 0usize..4) {
            let target = Path::new(&target);
            if stays_inside(target, depth) {
                let mut level = depth as isize;
                for part in target.components() {
                    level += match part {
                        Component::ParentDir => -1,
                        Component::Normal(_) => 1,
                        _ => 0,
                    };
                    proptest::prop_assert!(level >= 0 && target.is_relative());
                }
            }
        }
    }
}
