//! The operator's policy, which nobody else can loosen. An error in the file stops every run.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use crate::request::{IsolationLevel, LimitName};
use sandbox::spec::Layer;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::StrDeserializer;

use super::database_url::{holds_password, is_relative_sqlite};
use super::entries::{self, SettingError, SettingOrigin, SettingPlace, SettingValue};
use super::env_names::is_name_pattern;
use super::post_process::{self, PostProcessError, PostProcessSettings};
use super::suggestion::{did_you_mean, excerpt, nearest};
use super::table::{self, Key, SETTINGS, Setting};

/// The path of the operator's policy. No variable and no option changes it.
pub(crate) const POLICY_PATH: &str = "/etc/fumehood/policy.toml";

const ENTRIES_MAX: usize = 10_000;

/// What the operator of this machine allows, from `/etc/fumehood/policy.toml`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The file it was read from, for messages.
    pub(crate) path: PathBuf,
    /// The weakest isolation level that a run may have.
    pub(crate) floor: IsolationLevel,
    /// Layers without which a run may not start, whatever its level.
    pub(crate) layers: BTreeSet<Layer>,
    /// Whether a run at level `landlock` may use the host's /dev/shm.
    pub(crate) host_shared_memory: bool,
    /// `None`: the policy does not restrict what may be read.
    pub(crate) readable_roots: Option<Vec<PathBuf>>,
    /// The only database in which results may be recorded; `None`: the caller chooses.
    pub db: Option<String>,
    /// Whether to refuse a run that is not recorded.
    pub(crate) record_required: bool,
    /// The command to run after each commit. `None`: the user's own, if there is one.
    pub(crate) post_process: Option<PostProcessSettings>,
    /// Names of variables whose values are not recorded; a star at the end matches every continuation.
    pub(crate) secret_env: Vec<String>,
    ceilings: BTreeMap<Key, u64>,
    env_pass: Option<Vec<NamePattern>>,
    degraded: BTreeSet<LimitName>,
}

/// A variable's name, or the beginning of one where the operator wrote a star at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NamePattern {
    Exactly(String),
    Beginning(String),
}

/// What is wrong in the policy. No run starts before it is corrected.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum PolicyFileError {
    /// The file is not TOML.
    #[error("read the policy {path:?} as TOML")]
    Toml {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    /// The file has a key that no policy has.
    #[error("policy {path:?}: unknown key `{key}`{}", did_you_mean(nearest))]
    UnknownKey {
        path: PathBuf,
        key: String,
        nearest: Option<String>,
    },
    /// The value has another type than this key needs.
    #[error("policy {path:?}: `{key}` must be {expected}")]
    WrongType {
        path: PathBuf,
        key: String,
        expected: &'static str,
    },
    /// The text, or an item of the array, is none of the words that this key knows.
    #[error("policy {path:?}: `{key}` does not know {given:?}; it knows {}", known.join(", "))]
    UnknownWord {
        path: PathBuf,
        key: &'static str,
        given: String,
        known: Vec<String>,
    },
    /// `floor.layers` names a layer that does not exist.
    #[error("policy {path:?}: `floor.layers`")]
    Layer {
        path: PathBuf,
        #[source]
        source: serde::de::value::Error,
    },
    /// `read.roots` holds a path that is not absolute and plain.
    #[error(
        "policy {path:?}: `read.roots` holds {given:?}, which is not an absolute path without `..`"
    )]
    Root { path: PathBuf, given: String },
    /// The text is not a pattern for names of variables.
    #[error(
        "policy {path:?}: `{key}` holds {given:?}, which is neither a name nor the beginning of one and a star"
    )]
    EnvName {
        path: PathBuf,
        key: &'static str,
        given: String,
    },
    /// `record.db` contains a password, and every user can read the policy.
    #[error(
        "policy {path:?}: `record.db` holds a password, which every user could read there; leave it out, and let \
         each user's PGPASSFILE hold it"
    )]
    DbPassword { path: PathBuf },
    /// `record.db` is a relative path.
    #[error("policy {path:?}: `record.db` must name an absolute path after `sqlite:`")]
    DbRelative { path: PathBuf },
    /// `record.required` demands a record, and `record.db` says that there is none.
    #[error("policy {path:?}: `record.required` is true and `record.db` is `none`; leave one out")]
    DbContradicts { path: PathBuf },
    /// The section `post_process` is wrong.
    #[error("policy {path:?}")]
    PostProcess {
        path: PathBuf,
        #[source]
        source: PostProcessError,
    },
    /// A ceiling cannot be read, or is outside the bounds of its setting.
    #[error("policy {path:?}: a ceiling is wrong")]
    Ceiling {
        path: PathBuf,
        #[source]
        source: Box<SettingError>,
    },
}

const SECTIONS: [&str; 7] = [
    "floor",
    "ceilings",
    "read",
    "env",
    "degraded",
    "record",
    post_process::SECTION,
];

impl Policy {
    /// Reads the text of a policy. `path` names the file in errors.
    pub fn parse(text: &str, path: &Path) -> Result<Policy, PolicyFileError> {
        let table: toml::Table = text.parse().map_err(|error| PolicyFileError::Toml {
            path: path.to_owned(),
            source: Box::new(error),
        })?;
        let reader = Reader { path };
        reader.check_keys("", &table, &SECTIONS)?;
        let floor = reader.section(&table, "floor", &["level", "layers", "shared_memory"])?;
        let ceiling_names: Vec<&str> = SETTINGS
            .iter()
            .filter(|setting| setting.has_ceiling())
            .map(|setting| setting.name)
            .collect();
        let ceilings = reader.section(&table, "ceilings", &ceiling_names)?;
        let read = reader.section(&table, "read", &["roots"])?;
        let env = reader.section(&table, "env", &["pass", "secret"])?;
        let degraded = reader.section(&table, "degraded", &["allow"])?;
        let record = reader.section(&table, "record", &["db", "required"])?;
        let db = reader.db(record.get("db"))?;
        let record_required = reader.required(record.get("required"), db.as_deref())?;
        Ok(Policy {
            path: path.to_owned(),
            floor: reader.level(floor.get("level"))?,
            layers: reader.layers(floor.get("layers"))?,
            host_shared_memory: reader.host_shared_memory(floor.get("shared_memory"))?,
            readable_roots: reader.roots(read.get("roots"))?,
            ceilings: reader.ceilings(&ceilings)?,
            env_pass: reader.env_pass(env.get("pass"))?,
            secret_env: reader
                .name_patterns("env.secret", env.get("secret"))?
                .unwrap_or_default(),
            db,
            record_required,
            post_process: reader.post_process(table.get(post_process::SECTION))?,
            degraded: reader.degraded(degraded.get("allow"))?,
        })
    }

    /// Returns the most that callers may ask for, in the unit of the setting's kind. `None`: the policy sets no ceiling
    /// for it.
    pub fn ceiling(&self, key: Key) -> Option<u64> {
        self.ceilings.get(&key).copied()
    }

    /// Whether the caller's variable of that name may be passed on.
    pub(crate) fn passes_env(&self, name: &OsStr) -> bool {
        let Some(patterns) = &self.env_pass else {
            return true;
        };
        let Some(name) = name.to_str() else {
            return false;
        };
        patterns.iter().any(|pattern| match pattern {
            NamePattern::Exactly(whole) => name == whole,
            NamePattern::Beginning(start) => name.starts_with(start),
        })
    }

    pub(crate) fn allows_degraded(&self, limit: LimitName) -> bool {
        self.degraded.contains(&limit)
    }
}

/// Reads the parts of the file at `path` and names the file in each error.
struct Reader<'a> {
    path: &'a Path,
}

impl Reader<'_> {
    fn check_keys(
        &self,
        section: &str,
        table: &toml::Table,
        known: &[&str],
    ) -> Result<(), PolicyFileError> {
        match table.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => Err(PolicyFileError::UnknownKey {
                path: self.path.to_owned(),
                key: format!("{section}{}", excerpt(key)),
                nearest: nearest(key, known.iter().copied()).map(|near| format!("{section}{near}")),
            }),
        }
    }

    fn wrong_type(&self, key: &str, expected: &'static str) -> PolicyFileError {
        PolicyFileError::WrongType {
            path: self.path.to_owned(),
            key: key.to_owned(),
            expected,
        }
    }

    fn section(
        &self,
        table: &toml::Table,
        name: &str,
        known: &[&str],
    ) -> Result<toml::Table, PolicyFileError> {
        match table.get(name) {
            None => Ok(toml::Table::new()),
            Some(toml::Value::Table(section)) => {
                self.check_keys(&format!("{name}."), section, known)?;
                Ok(section.clone())
            }
            Some(_) => Err(self.wrong_type(name, "a table")),
        }
    }

    fn texts<'v>(
        &self,
        key: &'static str,
        value: Option<&'v toml::Value>,
    ) -> Result<Option<Vec<&'v str>>, PolicyFileError> {
        let Some(value) = value else {
            return Ok(None);
        };
        let wrong = || self.wrong_type(key, "an array of at most 10000 strings");
        let items = value.as_array().ok_or_else(wrong)?;
        if items.len() > ENTRIES_MAX {
            return Err(wrong());
        }
        let texts: Option<Vec<&str>> = items.iter().map(toml::Value::as_str).collect();
        texts.map(Some).ok_or_else(wrong)
    }

    /// Returns which of the words `known` it is.
    fn word(
        &self,
        key: &'static str,
        value: Option<&toml::Value>,
        known: [&'static str; 2],
    ) -> Result<Option<&'static str>, PolicyFileError> {
        let Some(value) = value else {
            return Ok(None);
        };
        let text = value.as_str();
        let text = text.ok_or_else(|| self.wrong_type(key, "a string"))?;
        match known.into_iter().find(|word| *word == text) {
            Some(word) => Ok(Some(word)),
            None => Err(PolicyFileError::UnknownWord {
                path: self.path.to_owned(),
                key,
                given: excerpt(text),
                known: known.map(str::to_owned).to_vec(),
            }),
        }
    }

    /// A policy that names no floor has the floor `full`.
    fn level(&self, value: Option<&toml::Value>) -> Result<IsolationLevel, PolicyFileError> {
        Ok(
            match self.word("floor.level", value, ["full", "landlock"])? {
                Some("landlock") => IsolationLevel::Landlock,
                _ => IsolationLevel::Full,
            },
        )
    }

    fn host_shared_memory(&self, value: Option<&toml::Value>) -> Result<bool, PolicyFileError> {
        let word = self.word("floor.shared_memory", value, ["host", "private"])?;
        Ok(word == Some("host"))
    }

    fn layers(&self, value: Option<&toml::Value>) -> Result<BTreeSet<Layer>, PolicyFileError> {
        let names = self.texts("floor.layers", value)?.unwrap_or_default();
        names
            .into_iter()
            .map(|name| {
                let word: StrDeserializer<serde::de::value::Error> = name.into_deserializer();
                Layer::deserialize(word).map_err(|source| PolicyFileError::Layer {
                    path: self.path.to_owned(),
                    source,
                })
            })
            .collect()
    }

    fn roots(&self, value: Option<&toml::Value>) -> Result<Option<Vec<PathBuf>>, PolicyFileError> {
        let Some(texts) = self.texts("read.roots", value)? else {
            return Ok(None);
        };
        let root = |text: &str| {
            let path = Path::new(text);
            let plain = path.is_absolute()
                && !text.contains('\0')
                && path
                    .components()
                    .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
            match plain {
                true => Ok(path.components().collect()),
                false => Err(PolicyFileError::Root {
                    path: self.path.to_owned(),
                    given: excerpt(text),
                }),
            }
        };
        texts
            .into_iter()
            .map(root)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    fn ceilings(&self, table: &toml::Table) -> Result<BTreeMap<Key, u64>, PolicyFileError> {
        let mut ceilings = BTreeMap::new();
        for (name, value) in table {
            let key = format!("ceilings.{name}");
            let Some(setting) = Setting::named(name) else {
                return Err(self.wrong_type(&key, "a limit"));
            };
            let text = match value {
                toml::Value::String(text) => text.clone(),
                toml::Value::Integer(number) => number.to_string(),
                toml::Value::Float(number) => number.to_string(),
                _ => return Err(self.wrong_type(&key, "a number or a string")),
            };
            let place = SettingPlace {
                setting,
                origin: SettingOrigin::UserFile(self.path.to_owned()),
            };
            match entries::number(&place, &text) {
                Ok(SettingValue::Number(number)) => ceilings.insert(setting.key, number),
                // `off` would mean no ceiling. An operator who means that leaves the line out.
                Ok(_) => return Err(self.wrong_type(&key, "a number or a string, not off")),
                Err(source) => {
                    return Err(PolicyFileError::Ceiling {
                        path: self.path.to_owned(),
                        source: Box::new(source),
                    });
                }
            };
        }
        Ok(ceilings)
    }

    fn env_pass(
        &self,
        value: Option<&toml::Value>,
    ) -> Result<Option<Vec<NamePattern>>, PolicyFileError> {
        let pattern = |text: String| match text.strip_suffix('*') {
            Some(start) => NamePattern::Beginning(start.to_owned()),
            None => NamePattern::Exactly(text),
        };
        let texts = self.name_patterns("env.pass", value)?;
        Ok(texts.map(|texts| texts.into_iter().map(pattern).collect()))
    }

    fn name_patterns(
        &self,
        key: &'static str,
        value: Option<&toml::Value>,
    ) -> Result<Option<Vec<String>>, PolicyFileError> {
        let Some(texts) = self.texts(key, value)? else {
            return Ok(None);
        };
        let good = |text: &str| match is_name_pattern(text) {
            true => Ok(text.to_owned()),
            false => Err(PolicyFileError::EnvName {
                path: self.path.to_owned(),
                key,
                given: excerpt(text),
            }),
        };
        texts
            .into_iter()
            .map(good)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    fn db(&self, value: Option<&toml::Value>) -> Result<Option<String>, PolicyFileError> {
        let path = || self.path.to_owned();
        let Some(value) = value else {
            return Ok(None);
        };
        let text = value
            .as_str()
            .map(str::trim)
            .filter(|text| !text.is_empty() && !text.contains('\0'))
            .ok_or_else(|| self.wrong_type("record.db", "none, sqlite:PATH or postgres://…"))?;
        // Every user can read the policy, so it must not contain a password.
        if holds_password(text) {
            return Err(PolicyFileError::DbPassword { path: path() });
        }
        // The runs of different users have no common directory to which the path could be relative.
        if is_relative_sqlite(text) {
            return Err(PolicyFileError::DbRelative { path: path() });
        }
        Ok(Some(text.to_owned()))
    }

    fn required(
        &self,
        value: Option<&toml::Value>,
        db: Option<&str>,
    ) -> Result<bool, PolicyFileError> {
        match value {
            None | Some(toml::Value::Boolean(false)) => Ok(false),
            Some(toml::Value::Boolean(true)) if db == Some("none") => {
                Err(PolicyFileError::DbContradicts {
                    path: self.path.to_owned(),
                })
            }
            Some(toml::Value::Boolean(true)) => Ok(true),
            Some(_) => Err(self.wrong_type("record.required", "true or false")),
        }
    }

    fn post_process(
        &self,
        value: Option<&toml::Value>,
    ) -> Result<Option<PostProcessSettings>, PolicyFileError> {
        value
            .map(PostProcessSettings::read)
            .transpose()
            .map_err(|source| PolicyFileError::PostProcess {
                path: self.path.to_owned(),
                source,
            })
    }

    fn degraded(
        &self,
        value: Option<&toml::Value>,
    ) -> Result<BTreeSet<LimitName>, PolicyFileError> {
        let names = self.texts("degraded.allow", value)?.unwrap_or_default();
        names
            .into_iter()
            .map(|name| {
                table::limit_name(name).ok_or_else(|| PolicyFileError::UnknownWord {
                    path: self.path.to_owned(),
                    key: "degraded.allow",
                    given: excerpt(name),
                    known: LimitName::ALL
                        .map(|limit| limit.as_str().to_owned())
                        .to_vec(),
                })
            })
            .collect()
    }
}
