//! The settings that are lists: additional paths to show, inputs to copy, variables to set, globs for outputs.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use crate::collect::Globs;
use crate::request::{Input, ReadRoot};

use super::entries::{SettingEntry, SettingError, SettingOrigin, SettingValue, absolute};
use super::env_names::{is_env_name, is_name_pattern};
use super::error::ConfigError;
use super::merged::MergedSettings;
use super::table::{ENV_BYTES_MAX, Key, VARIABLE_PREFIX};

impl MergedSettings {
    /// Iterates over the items of a list from every source, each with its entry.
    pub(super) fn items(&self, key: Key) -> impl Iterator<Item = (&SettingEntry, &OsString)> {
        self.entries
            .iter()
            .filter(move |entry| entry.place.setting.key == key)
            .filter_map(|entry| match &entry.value {
                SettingValue::List(items) => Some((entry, items)),
                _ => None,
            })
            .flat_map(|(entry, items)| items.iter().map(move |item| (entry, item)))
    }

    pub(super) fn reads(&self) -> Result<Vec<ReadRoot>, ConfigError> {
        self.items(Key::Read)
            .map(|(entry, item)| {
                let (host, inside) = split_suffix(entry, item, "INSIDE")?;
                match inside {
                    Some(given) if !is_allowed_inside_path(&given) => Err(ConfigError::BadInside {
                        place: entry.place.clone(),
                        given,
                    }),
                    inside => Ok(ReadRoot { host, inside }),
                }
            })
            .collect()
    }

    pub(super) fn inputs(&self) -> Result<Vec<Input>, ConfigError> {
        self.items(Key::Input)
            .map(|(entry, item)| {
                let (host, name) = split_suffix(entry, item, "NAME")?;
                match name {
                    Some(given) if !is_relative_name(&given) => Err(ConfigError::BadName {
                        place: entry.place.clone(),
                        given,
                    }),
                    name => Ok(Input { host, name }),
                }
            })
            .collect()
    }

    /// Returns the globs for the outputs' paths without duplicates. Compiles them to report a mistake before the run
    /// instead of after it.
    pub(super) fn globs(&self, key: Key) -> Result<Vec<String>, ConfigError> {
        let mut globs: Vec<String> = Vec::new();
        for (entry, item) in self.items(key) {
            let glob = item.to_str().ok_or_else(|| SettingError::NotText {
                place: entry.place.clone(),
            })?;
            if !globs.iter().any(|known| known == glob) {
                globs.push(glob.to_owned());
            }
        }
        Globs::new(&globs).map_err(|source| ConfigError::Globs {
            name: key.setting().name,
            source,
        })?;
        Ok(globs)
    }

    /// Returns the names of variables whose values are not recorded, from every source and the policy.
    pub(super) fn secret_env(&self) -> Result<Vec<String>, ConfigError> {
        let policy = self.policy.iter().flat_map(|policy| &policy.secret_env);
        let mut names: BTreeSet<String> = policy.cloned().collect();
        for (entry, item) in self.items(Key::SecretEnv) {
            match item.to_str().filter(|name| is_name_pattern(name)) {
                Some(name) => names.insert(name.to_owned()),
                None => {
                    return Err(ConfigError::SecretName {
                        place: entry.place.clone(),
                        given: item.clone(),
                    });
                }
            };
        }
        Ok(names.into_iter().collect())
    }

    /// Returns the variables that are set for the program. Of two with one name, the later one counts.
    ///
    /// No name is refused for its effect inside. LD_PRELOAD and the like make the program run other code, which the
    /// program could do anyway. Fumehood's own processes run without these variables, and set-user-id programs have no
    /// effect. HOME, TMPDIR and PATH given here replace Fumehood's values; the program still sees only what is visible
    /// in the sandbox.
    pub(super) fn env(
        &self,
        caller: &BTreeMap<OsString, OsString>,
    ) -> Result<Vec<(OsString, OsString)>, ConfigError> {
        let mut env = BTreeMap::new();
        for (entry, item) in self.items(Key::Env) {
            let place = || entry.place.clone();
            let (name, value) = match item.as_bytes().iter().position(|byte| *byte == b'=') {
                Some(at) => {
                    let (name, value) = item.as_bytes().split_at(at);
                    (
                        OsString::from_vec(name.to_vec()),
                        Some(OsString::from_vec(value[1..].to_vec())),
                    )
                }
                None => (item.clone(), None),
            };
            if !is_env_name(name.as_bytes()) {
                return Err(ConfigError::EnvName {
                    place: place(),
                    given: name,
                });
            }
            if name.as_bytes().starts_with(VARIABLE_PREFIX.as_bytes()) {
                return Err(ConfigError::EnvReserved {
                    place: place(),
                    name,
                });
            }
            let value = match value {
                Some(value) => value,
                None => self.caller_value(entry, &name, caller)?,
            };
            if name.len() + value.len() + 2 > ENV_BYTES_MAX {
                return Err(ConfigError::EnvTooLong {
                    place: place(),
                    name,
                });
            }
            env.insert(name, value);
        }
        Ok(env.into_iter().collect())
    }

    /// Returns the caller's own value of a variable, if the policy allows passing it on.
    fn caller_value(
        &self,
        entry: &SettingEntry,
        name: &OsStr,
        caller: &BTreeMap<OsString, OsString>,
    ) -> Result<OsString, ConfigError> {
        if let Some(policy) = self
            .policy
            .as_ref()
            .filter(|policy| !policy.passes_env(name))
        {
            return Err(ConfigError::EnvNotPassed {
                place: entry.place.clone(),
                name: name.to_owned(),
                policy: policy.path.clone(),
            });
        }
        caller
            .get(name)
            .cloned()
            .ok_or_else(|| ConfigError::EnvMissing {
                place: entry.place.clone(),
                name: name.to_owned(),
            })
    }
}

/// Splits `PATH[:SUFFIX]` at its last colon, unless a file with the whole name exists.
fn split_suffix(
    entry: &SettingEntry,
    item: &OsStr,
    suffix: &'static str,
) -> Result<(PathBuf, Option<PathBuf>), ConfigError> {
    let whole = absolute(item, &entry.base);
    let colon = item.as_bytes().iter().rposition(|byte| *byte == b':');
    // The submitter's machine has already decided where a queued item splits. Whether a file with the whole name exists
    // on this machine must not matter.
    let is_queued = entry.place.origin == SettingOrigin::Queue;
    let Some(at) = colon.filter(|_| is_queued || whole.symlink_metadata().is_err()) else {
        return Ok((whole, None));
    };
    let (path, rest) = (&item.as_bytes()[..at], &item.as_bytes()[at + 1..]);
    if path.is_empty() || rest.is_empty() {
        return Err(ConfigError::EmptyPart {
            place: entry.place.clone(),
            given: item.to_owned(),
            suffix,
        });
    }
    let path = absolute(OsStr::from_bytes(path), &entry.base);
    Ok((path, Some(PathBuf::from(OsStr::from_bytes(rest)))))
}

/// Whether a path inside the sandbox is absolute, plain, and outside /proc, /dev and /sys. Those belong to the sandbox:
/// a view mounted over them would hide files that it needs.
fn is_allowed_inside_path(path: &Path) -> bool {
    let mut parts = path.components();
    let rooted = parts.next() == Some(Component::RootDir);
    let parts: Vec<Component<'_>> = parts.collect();
    let first = parts.first().map(|part| part.as_os_str().as_bytes());
    rooted
        && !matches!(first, None | Some(b"proc" | b"dev" | b"sys"))
        && parts
            .iter()
            .all(|part| matches!(part, Component::Normal(_)))
}

fn is_relative_name(path: &Path) -> bool {
    path.components().next().is_some()
        && path
            .components()
            .all(|part| matches!(part, Component::Normal(_)))
}
