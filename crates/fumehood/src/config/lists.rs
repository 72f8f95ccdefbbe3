//! The settings that are lists: what else is shown, what is copied in, which variables are set, what is an output.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use engine::collect::Globs;
use engine::request::{Input, ReadRoot};

use super::layer::{Entry, Origin, SettingError, Value, absolute};
use super::settings::{Key, VARIABLE_PREFIX};
use super::{ConfigError, ENV_BYTES_MAX, Merged};

impl Merged {
    /// Each item of a list, from every place, with the entry it came from.
    pub(super) fn items(&self, key: Key) -> impl Iterator<Item = (&Entry, &OsString)> {
        self.entries
            .iter()
            .filter(move |entry| entry.place.setting.key == key)
            .filter_map(|entry| match &entry.value {
                Value::List(items) => Some((entry, items)),
                _ => None,
            })
            .flat_map(|(entry, items)| items.iter().map(move |item| (entry, item)))
    }

    pub(super) fn reads(&self) -> Result<Vec<ReadRoot>, ConfigError> {
        self.items(Key::Read)
            .map(|(entry, item)| {
                let (host, inside) = split_suffix(entry, item, "INSIDE")?;
                match inside {
                    Some(given) if !is_inside(&given) => Err(ConfigError::BadInside {
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

    /// Globs for the outputs' paths, each once. They are compiled here too: a mistake in one must not show only when
    /// the run is over.
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

    /// Names of variables whose values are withheld from the record, from every place and the policy.
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

    /// The variables asked for, later ones over earlier ones of the same name.
    ///
    /// No name is refused for what it does inside: LD_PRELOAD and its like can make the program run other
    /// code, which it could run anyway; Fumehood's own processes are executed without any of these, and set-user-id
    /// programs have no effect. HOME, TMPDIR and PATH given here win over Fumehood's: what they name is
    /// still bounded by what is visible.
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
                None => self.passed(entry, &name, caller)?,
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

    /// The caller's own value of a variable, if the policy lets it be handed on.
    fn passed(
        &self,
        entry: &Entry,
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

/// Splits `PATH[:SUFFIX]` at its last colon, unless the whole is the name of something that exists.
fn split_suffix(
    entry: &Entry,
    item: &OsStr,
    suffix: &'static str,
) -> Result<(PathBuf, Option<PathBuf>), ConfigError> {
    let whole = absolute(item, &entry.base);
    let colon = item.as_bytes().iter().rposition(|byte| *byte == b':');
    // What was queued was split before, where its files are; whether such a path is here too must not matter.
    let is_queued = entry.place.origin == Origin::Queue;
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

/// /proc, /dev and /sys inside are the sandbox's own; a view laid over them would hide what it relies on.
fn is_inside(path: &Path) -> bool {
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

/// A variable's name, or its beginning and a star. A star alone means every name, and says so plainly.
pub(super) fn is_name_pattern(text: &str) -> bool {
    text == "*" || is_env_name(text.strip_suffix('*').unwrap_or(text).as_bytes())
}

fn is_env_name(name: &[u8]) -> bool {
    let starts_well = name
        .first()
        .is_some_and(|byte| byte.is_ascii_alphabetic() || *byte == b'_');
    starts_well
        && name
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}
