//! How Python installations point elsewhere: pyvenv.cfg, and pyenv's shims.
//!
//! A shim is a shell script that asks pyenv which version is meant and starts that version. Nothing is executed here;
//! this module reads the same files in pyenv's order.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use super::caller::CallerEnvironment;
use super::error::RuntimeError;
use super::host_files::{self, LinkPolicy};

/// The names of a Python interpreter, the usual one first.
pub(super) const NAMES: [&str; 5] = ["python3", "python", "pypy3", "pypy", "python2"];

/// The Python in a directory, as a path that may be a symlink.
pub(super) fn name_in(bin: &Path) -> Option<PathBuf> {
    let mut paths = NAMES.iter().map(|name| bin.join(name));
    paths.find(|path| path.symlink_metadata().is_ok())
}

/// The most versions that one .python-version may list.
const VERSIONS_MAX: usize = 64;

/// The directories that a pyvenv.cfg names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct VenvConfig {
    /// The directory of the base interpreter.
    pub home: Option<PathBuf>,
    /// The prefix of the base interpreter; virtualenv writes it.
    pub base_prefix: Option<PathBuf>,
}

/// Parses `key = value` lines as Python does: keys in any case, blanks trimmed, the first `home` counts.
pub(super) fn parse_venv_config(text: &[u8]) -> VenvConfig {
    let mut config = VenvConfig::default();
    for (key, value) in venv_settings(text) {
        let slot = match key.as_slice() {
            b"home" => &mut config.home,
            b"base-prefix" => &mut config.base_prefix,
            _ => continue,
        };
        slot.get_or_insert_with(|| PathBuf::from(OsStr::from_bytes(value)));
    }
    config
}

/// The keys, in lower case, and values of a pyvenv.cfg; without empty values.
pub(crate) fn venv_settings(text: &[u8]) -> impl Iterator<Item = (Vec<u8>, &[u8])> {
    text.split(|b| *b == b'\n').filter_map(|line| {
        let equals = line.iter().position(|b| *b == b'=')?;
        let key = line[..equals].trim_ascii().to_ascii_lowercase();
        let value = line[equals + 1..].trim_ascii();
        (!value.is_empty()).then_some((key, value))
    })
}

/// Where a shim leads.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ShimTarget {
    /// This program.
    Program(PathBuf),
    /// pyenv's `system`: search the rest of PATH.
    System,
}

/// The root of pyenv if `dir`, a directory on PATH, is pyenv's directory of shims.
pub(super) fn pyenv_root(dir: &Path) -> Option<PathBuf> {
    let root = dir.canonicalize().ok()?.parent()?.to_path_buf();
    (dir.file_name() == Some(OsStr::new("shims")) && root.join("versions").is_dir()).then_some(root)
}

/// Finds what the shim for `command` would start.
pub(super) fn resolve_shim(
    root: &Path,
    command: &OsStr,
    caller: &CallerEnvironment,
) -> Result<ShimTarget, RuntimeError> {
    let (versions, origin) = wanted_versions(root, caller)?;
    if versions.is_empty() {
        return Ok(ShimTarget::System);
    }
    let mut missing = None;
    for version in &versions {
        if version == "system" {
            return Ok(ShimTarget::System);
        }
        let Some(dir) = find_version_dir(root, version) else {
            missing.get_or_insert(version);
            continue;
        };
        let program = dir.join("bin").join(command);
        if host_files::is_executable(&program) {
            return Ok(ShimTarget::Program(program));
        }
    }
    Err(match missing {
        Some(version) => RuntimeError::VersionMissing {
            version: version.clone(),
            origin,
            root: root.to_path_buf(),
        },
        None => RuntimeError::NotInVersion {
            command: command.to_owned(),
            versions,
            origin,
        },
    })
}

/// The versions in force, and where they are set: PYENV_VERSION, else the nearest .python-version, else pyenv's own
/// version file. If there are none, `system` is in force.
fn wanted_versions(
    root: &Path,
    caller: &CallerEnvironment,
) -> Result<(Vec<String>, PathBuf), RuntimeError> {
    if let Some(value) = caller
        .env
        .get(OsStr::new("PYENV_VERSION"))
        .filter(|value| !value.is_empty())
    {
        let lines: Vec<&[u8]> = value.as_bytes().split(|b| *b == b':').collect();
        let versions = parse_versions(&lines.join(&b'\n'));
        return Ok((versions, PathBuf::from("PYENV_VERSION")));
    }
    for dir in caller.cwd.ancestors() {
        let file = dir.join(".python-version");
        // A machine may have written the project. Following a symlink here would quote the first word of any file in
        // a message.
        match file.symlink_metadata() {
            Ok(meta) if meta.is_file() => {}
            Ok(meta) if meta.is_dir() => continue,
            Ok(_) => return Err(RuntimeError::VersionFile { path: file }),
            Err(_) => continue,
        }
        return match host_files::read_text(&file, LinkPolicy::Refuse) {
            Some(text) => Ok((parse_versions(&text), file)),
            None => Err(RuntimeError::VersionFile { path: file }),
        };
    }
    let file = root.join("version");
    let text = host_files::read_text(&file, LinkPolicy::Follow).unwrap_or_default();
    Ok((parse_versions(&text), file))
}

/// The first word of each line, without comments and without words that cannot name a directory in `versions`. pyenv
/// does the same since CVE-2022-35861.
pub(super) fn parse_versions(text: &[u8]) -> Vec<String> {
    let words = text.split(|b| *b == b'\n').filter_map(|line| {
        let line = std::str::from_utf8(line).ok()?;
        let word = line.split_whitespace().next()?;
        let good = !word.starts_with('#') && word.len() <= 255 && is_inner_path(word);
        good.then(|| word.to_owned())
    });
    words.take(VERSIONS_MAX).collect()
}

/// Whether the word is a path that stays below the directory it is joined to: `3.12.1`, `3.12.1/envs/paper`.
fn is_inner_path(word: &str) -> bool {
    !word.is_empty()
        && !word.contains(|c: char| c.is_control())
        && Path::new(word)
            .components()
            .all(|c| matches!(c, Component::Normal(_)))
}

/// The directory of a version: by its full name, without the prefix `python-`, or the newest release of a series
/// (`3.12`).
fn find_version_dir(root: &Path, version: &str) -> Option<PathBuf> {
    let versions = root.join("versions");
    let short = version.strip_prefix("python-").unwrap_or(version);
    let named = [version, short]
        .into_iter()
        .map(|name| versions.join(name))
        .find(|dir| {
            // A symlink directly in `versions` was created by pyenv-virtualenv or by the user. A longer path must not
            // lead out of `versions`.
            let inside = || match (dir.canonicalize(), versions.canonicalize()) {
                (Ok(dir), Ok(versions)) => dir.starts_with(versions),
                _ => false,
            };
            dir.is_dir() && (dir.parent() == Some(&versions) || inside())
        });
    named.or_else(|| newest_version_dir(&versions, short))
}

fn newest_version_dir(versions: &Path, stem: &str) -> Option<PathBuf> {
    let stem = format!("{stem}.");
    let complete = |name: OsString| -> Option<Vec<u64>> {
        let rest = name.to_str()?.strip_prefix(&stem)?.to_owned();
        rest.split('.').map(|number| number.parse().ok()).collect()
    };
    let entries = host_files::entries(versions);
    let candidates = entries.filter_map(|entry| Some((complete(entry.file_name())?, entry.path())));
    candidates
        .max()
        .map(|(_, path)| path)
        .filter(|path| path.is_dir())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn config_is_read_as_python_reads_it() {
        let config =
            parse_venv_config(b"HOME = /a/bin\r\nhome = /b/bin\nbase-prefix=/a\nnonsense\n = x\n");
        assert_eq!(config.home.unwrap(), Path::new("/a/bin"));
        assert_eq!(config.base_prefix.unwrap(), Path::new("/a"));
        assert_eq!(
            parse_venv_config(b"home =\nhome = \n"),
            VenvConfig::default()
        );
    }

    #[test]
    fn versions_that_climb_are_left_out() {
        let text = b"# mine\n\n 3.12.1 rest\r\n../../etc\n/etc\n..\n./x\n3.11.7/envs/paper\n3.11.7/../..\n";
        assert_eq!(parse_versions(text), ["3.12.1", "3.11.7/envs/paper"]);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_do_not_panic(text in proptest::collection::vec(proptest::num::u8::ANY, 0..400)) {
            parse_venv_config(&text);
            parse_venv_config(&[b"home = ".as_slice(), &text].concat());
            for version in parse_versions(&text) {
                proptest::prop_assert!(is_inner_path(&version));
            }
        }
    }
}
