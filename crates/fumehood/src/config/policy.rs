//! The operator's policy: what nobody else can loosen. Whatever is wrong with the file stops every run.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use analysis::request::{Level, LimitName};
use sandbox::spec::Layer;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::StrDeserializer;

use super::layer::{self, Origin, Place, SettingError, Value, excerpt};
use super::settings::{Key, SETTINGS, Setting, nearest};

/// Where the operator's policy stands. No variable and no option changes it.
pub const POLICY_PATH: &str = "/etc/fumehood/policy.toml";

const ENTRIES_MAX: usize = 10_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub path: PathBuf,
    pub floor: Level,
    /// Layers without which a run may not start, whatever its level.
    pub layers: BTreeSet<Layer>,
    /// `None`: the policy does not bound what may be read.
    pub readable_roots: Option<Vec<PathBuf>>,
    ceilings: BTreeMap<Key, u64>,
    env_pass: Option<Vec<NamePattern>>,
    degraded: BTreeSet<LimitName>,
}

/// A variable's name, or its beginning where the operator wrote a star at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NamePattern {
    Exactly(String),
    Beginning(String),
}

#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("read the policy {path:?} as TOML")]
    Toml {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("policy {path:?}: unknown key `{key}`{}", layer::meant(nearest))]
    UnknownKey {
        path: PathBuf,
        key: String,
        nearest: Option<String>,
    },
    #[error("policy {path:?}: `{key}` must be {expected}")]
    WrongType {
        path: PathBuf,
        key: String,
        expected: &'static str,
    },
    #[error("policy {path:?}: `{key}` does not know {given:?}; it knows {}", known.join(", "))]
    UnknownWord {
        path: PathBuf,
        key: &'static str,
        given: String,
        known: Vec<String>,
    },
    #[error("policy {path:?}: `floor.layers`")]
    Layer {
        path: PathBuf,
        #[source]
        source: serde::de::value::Error,
    },
    #[error(
        "policy {path:?}: `read.roots` holds {given:?}, which is not an absolute path without `..`"
    )]
    Root { path: PathBuf, given: String },
    #[error(
        "policy {path:?}: `env.pass` holds {given:?}, which is neither a name nor the beginning of one and a star"
    )]
    EnvName { path: PathBuf, given: String },
    #[error("policy {path:?}: a ceiling is wrong")]
    Ceiling {
        path: PathBuf,
        #[source]
        source: Box<SettingError>,
    },
}

const SECTIONS: [&str; 5] = ["floor", "ceilings", "read", "env", "degraded"];

impl Policy {
    pub fn parse(text: &str, path: &Path) -> Result<Policy, PolicyError> {
        let table: toml::Table = text.parse().map_err(|error| PolicyError::Toml {
            path: path.to_owned(),
            source: Box::new(error),
        })?;
        let reader = Reader { path };
        reader.check_keys("", &table, &SECTIONS)?;
        let floor = reader.section(&table, "floor", &["level", "layers"])?;
        let ceiling_names: Vec<&str> = SETTINGS
            .iter()
            .filter(|setting| setting.kind.bounds().is_some())
            .map(|setting| setting.name)
            .collect();
        let ceilings = reader.section(&table, "ceilings", &ceiling_names)?;
        let read = reader.section(&table, "read", &["roots"])?;
        let env = reader.section(&table, "env", &["pass"])?;
        let degraded = reader.section(&table, "degraded", &["allow"])?;
        Ok(Policy {
            path: path.to_owned(),
            floor: reader.level(floor.get("level"))?,
            layers: reader.layers(floor.get("layers"))?,
            readable_roots: reader.roots(read.get("roots"))?,
            ceilings: reader.ceilings(&ceilings)?,
            env_pass: reader.env_pass(env.get("pass"))?,
            degraded: reader.degraded(degraded.get("allow"))?,
        })
    }

    pub fn ceiling(&self, key: Key) -> Option<u64> {
        self.ceilings.get(&key).copied()
    }

    /// Whether the caller's variable of that name may be handed on.
    pub fn passes_env(&self, name: &OsStr) -> bool {
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

    pub fn allows_degraded(&self, limit: LimitName) -> bool {
        self.degraded.contains(&limit)
    }
}

/// Reads the parts of the file at `path`, naming it in each error.
struct Reader<'a> {
    path: &'a Path,
}

impl Reader<'_> {
    fn check_keys(
        &self,
        section: &str,
        table: &toml::Table,
        known: &[&str],
    ) -> Result<(), PolicyError> {
        match table.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => Err(PolicyError::UnknownKey {
                path: self.path.to_owned(),
                key: format!("{section}{}", excerpt(key)),
                nearest: nearest(key, known.iter().copied()).map(|near| format!("{section}{near}")),
            }),
        }
    }

    fn wrong_type(&self, key: &str, expected: &'static str) -> PolicyError {
        PolicyError::WrongType {
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
    ) -> Result<toml::Table, PolicyError> {
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
    ) -> Result<Option<Vec<&'v str>>, PolicyError> {
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

    /// An operator who wrote a policy and named no floor has not lowered it.
    fn level(&self, value: Option<&toml::Value>) -> Result<Level, PolicyError> {
        match value.map(toml::Value::as_str) {
            None => Ok(Level::Full),
            Some(None) => Err(self.wrong_type("floor.level", "a string")),
            Some(Some("full")) => Ok(Level::Full),
            Some(Some("landlock")) => Ok(Level::Landlock),
            Some(Some(other)) => Err(PolicyError::UnknownWord {
                path: self.path.to_owned(),
                key: "floor.level",
                given: excerpt(other),
                known: vec!["full".to_owned(), "landlock".to_owned()],
            }),
        }
    }

    fn layers(&self, value: Option<&toml::Value>) -> Result<BTreeSet<Layer>, PolicyError> {
        let names = self.texts("floor.layers", value)?.unwrap_or_default();
        names
            .into_iter()
            .map(|name| {
                let word: StrDeserializer<serde::de::value::Error> = name.into_deserializer();
                Layer::deserialize(word).map_err(|source| PolicyError::Layer {
                    path: self.path.to_owned(),
                    source,
                })
            })
            .collect()
    }

    fn roots(&self, value: Option<&toml::Value>) -> Result<Option<Vec<PathBuf>>, PolicyError> {
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
                false => Err(PolicyError::Root {
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

    fn ceilings(&self, table: &toml::Table) -> Result<BTreeMap<Key, u64>, PolicyError> {
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
            let place = Place {
                setting,
                origin: Origin::UserFile(self.path.to_owned()),
            };
            match layer::number(&place, &text) {
                Ok(Value::Number(number)) => ceilings.insert(setting.key, number),
                // `off` would be no ceiling at all: whoever means that leaves the line out.
                Ok(_) => return Err(self.wrong_type(&key, "a number or a string, not off")),
                Err(source) => {
                    return Err(PolicyError::Ceiling {
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
    ) -> Result<Option<Vec<NamePattern>>, PolicyError> {
        let Some(texts) = self.texts("env.pass", value)? else {
            return Ok(None);
        };
        let pattern = |text: &str| {
            let (start, pattern) = match text.strip_suffix('*') {
                Some(start) => (start, NamePattern::Beginning(start.to_owned())),
                None => (text, NamePattern::Exactly(text.to_owned())),
            };
            // A star alone passes everything, and says so plainly.
            match text == "*" || super::lists::is_env_name(start.as_bytes()) {
                true => Ok(pattern),
                false => Err(PolicyError::EnvName {
                    path: self.path.to_owned(),
                    given: excerpt(text),
                }),
            }
        };
        texts
            .into_iter()
            .map(pattern)
            .collect::<Result<_, _>>()
            .map(Some)
    }

    fn degraded(&self, value: Option<&toml::Value>) -> Result<BTreeSet<LimitName>, PolicyError> {
        let names = self.texts("degraded.allow", value)?.unwrap_or_default();
        names
            .into_iter()
            .map(|name| {
                super::limit_name(name).ok_or_else(|| PolicyError::UnknownWord {
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
