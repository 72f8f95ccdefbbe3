//! One place's settings, each read by the table and checked by itself: a wrong value is an error
//! even where a stronger place overrides it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use store::types::units::UnitError;

use super::post_process::{self, PostProcess, PostProcessError};
use super::settings::{
    Key, Kind, Off, RESERVED_VARIABLES, Rule, SETTINGS, Setting, TEST_PREFIX, VARIABLE_PREFIX,
    nearest,
};

/// A list longer than this was made by a mistake or an attacker.
const LIST_ENTRIES_MAX: usize = 1000;

/// Where a value was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    UserFile(PathBuf),
    ProjectFile(PathBuf),
    Variable,
    Flag,
    /// A line of a batch, which is a client's own.
    Line,
    /// A submission that a worker took from the queue.
    Queue,
}

/// A setting's name as its place writes it, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub setting: &'static Setting,
    pub origin: Origin,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::UserFile(path) | Origin::ProjectFile(path) => {
                write!(f, "`{}` in {}", self.setting.name, path.display())
            }
            Origin::Variable => f.write_str(&self.setting.variable_name()),
            Origin::Flag => f.write_str(&self.setting.flag()),
            Origin::Line => write!(f, "`{}`", self.setting.name),
            Origin::Queue => write!(f, "`{}` of the submission", self.setting.name),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Number(u64),
    Off,
    Word(&'static str),
    /// Absolute.
    Path(PathBuf),
    Text(OsString),
    Switch(bool),
    List(Vec<OsString>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub place: Place,
    pub value: Value,
    /// What relative paths in the value are relative to.
    pub base: PathBuf,
}

/// What one file sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSettings {
    pub entries: Vec<Entry>,
    pub post_process: Option<PostProcess>,
}

#[derive(Debug, thiserror::Error)]
pub enum SettingError {
    #[error("read {path:?} as TOML")]
    Toml {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("{}: unknown key `{key}`{}", path.display(), meant(nearest))]
    UnknownKey {
        path: PathBuf,
        key: String,
        nearest: Option<String>,
    },
    #[error("unknown variable {name}{}", meant(nearest))]
    UnknownVariable {
        name: String,
        nearest: Option<String>,
    },
    #[error("{place} may not be set there: {reason}; use {}", place.setting.places())]
    NotThere { place: Place, reason: &'static str },
    #[error(
        "`post_process` in {} may not be set there: it is a command that runs unconfined, as you; use your own \
         config.toml or the operator's policy",
        path.display()
    )]
    ProjectPostProcess { path: PathBuf },
    #[error("refuse `post_process` in {}", path.display())]
    PostProcess {
        path: PathBuf,
        #[source]
        source: PostProcessError,
    },
    #[error(
        "{place} would hand on a variable of the caller's, which a project's file may not; \
         give a value (K=V), or use --env"
    )]
    ProjectPassesEnv { place: Place },
    #[error(
        "{place} is not a visible directory below the project, which is all that a project's file \
         may name; use {}",
        place.setting.flag()
    )]
    NotBelowProject { place: Place },
    #[error("{place} must be {expected}")]
    WrongType {
        place: Place,
        expected: &'static str,
    },
    #[error("{place} is empty")]
    Empty { place: Place },
    #[error("{place} contains a NUL byte")]
    NulByte { place: Place },
    #[error("{place} is not UTF-8 text")]
    NotText { place: Place },
    #[error("{place} has more than {LIST_ENTRIES_MAX} entries")]
    TooMany { place: Place },
    #[error("read {place}")]
    Number {
        place: Place,
        #[source]
        source: UnitError,
    },
    #[error("{place} is {given}; it must be from {least} to {most}")]
    OutOfBounds {
        place: Place,
        given: String,
        least: String,
        most: String,
    },
    #[error("{place} is {given:?}; it must be one of: {}", choices.join(", "))]
    NotAChoice {
        place: Place,
        given: String,
        choices: Vec<&'static str>,
    },
}

pub fn meant(nearest: &Option<String>) -> String {
    match nearest {
        Some(word) => format!("; did you mean `{word}`?"),
        None => String::new(),
    }
}

/// The settings of a user's or a project's file.
pub fn from_file(text: &str, origin: &Origin) -> Result<FileSettings, SettingError> {
    let mut settings = FileSettings::default();
    let (Origin::UserFile(path) | Origin::ProjectFile(path)) = origin else {
        return Ok(settings);
    };
    let table: toml::Table = text.parse().map_err(|error| SettingError::Toml {
        path: path.clone(),
        source: Box::new(error),
    })?;
    for (key, value) in &table {
        match (key.as_str(), origin) {
            (post_process::SECTION, Origin::UserFile(_)) => {
                let read =
                    PostProcess::read(value).map_err(|source| SettingError::PostProcess {
                        path: path.clone(),
                        source,
                    })?;
                settings.post_process = Some(read);
            }
            (post_process::SECTION, _) => {
                return Err(SettingError::ProjectPostProcess { path: path.clone() });
            }
            _ => settings.entries.push(file_entry(key, value, origin, path)?),
        }
    }
    Ok(settings)
}

fn file_entry(
    key: &str,
    value: &toml::Value,
    origin: &Origin,
    path: &Path,
) -> Result<Entry, SettingError> {
    let names = || SETTINGS.iter().map(|s| s.name);
    let setting = Setting::named(key).ok_or_else(|| SettingError::UnknownKey {
        path: path.to_owned(),
        key: excerpt(key),
        nearest: nearest(key, names().chain([post_process::SECTION])).map(str::to_owned),
    })?;
    let place = Place {
        setting,
        origin: origin.clone(),
    };
    let rule = match origin {
        Origin::ProjectFile(_) => setting.project_file,
        _ => setting.user_file,
    };
    allowed(rule, &place)?;
    let words = toml_words(value, &place)?;
    let base = path.parent().unwrap_or(Path::new("/"));
    let entry = Entry::new(place, words, base)?;
    if let Origin::ProjectFile(_) = origin {
        entry.check_project(base)?;
    }
    Ok(entry)
}

/// The settings among the caller's variables.
pub fn from_variables(
    env: &BTreeMap<OsString, OsString>,
    cwd: &Path,
) -> Result<Vec<Entry>, SettingError> {
    let mut entries = Vec::new();
    for (name, value) in env {
        let is_ours = name.as_bytes().starts_with(VARIABLE_PREFIX.as_bytes());
        if !is_ours || is_reserved(name) {
            continue;
        }
        let setting = SETTINGS
            .iter()
            .find(|setting| name.as_os_str() == OsStr::new(&setting.variable_name()))
            .ok_or_else(|| unknown_variable(name))?;
        let place = Place {
            setting,
            origin: Origin::Variable,
        };
        allowed(setting.variable, &place)?;
        let words = match setting.kind {
            Kind::List => value
                .as_bytes()
                .split(|byte| *byte == b',')
                .map(|word| OsString::from_vec(word.trim_ascii().to_vec()))
                .collect(),
            _ => vec![value.clone()],
        };
        entries.push(Entry::new(place, words, cwd)?);
    }
    Ok(entries)
}

/// Whether the variable is read elsewhere. Only a build that listens to the tests' faults knows their variable; in
/// a release it is as unknown as any other.
fn is_reserved(name: &OsStr) -> bool {
    name.as_bytes().starts_with(TEST_PREFIX.as_bytes())
        || RESERVED_VARIABLES.iter().any(|reserved| name == *reserved)
        || (cfg!(debug_assertions) && name == store::types::crash_points::VARIABLE)
}

/// The settings given as options.
pub fn from_flags(
    given: Vec<(Key, Vec<OsString>)>,
    cwd: &Path,
) -> Result<Vec<Entry>, SettingError> {
    given
        .into_iter()
        .map(|(key, words)| {
            let place = Place {
                setting: key.setting(),
                origin: Origin::Flag,
            };
            Entry::new(place, words, cwd)
        })
        .collect()
}

fn unknown_variable(name: &OsStr) -> SettingError {
    let name = name.to_string_lossy();
    let names: Vec<String> = SETTINGS
        .iter()
        .filter(|setting| setting.variable == Rule::Yes)
        .map(Setting::variable_name)
        .collect();
    // The prefix is always right and would make every short name look near: compare what follows.
    let tail = |name: &str| name[VARIABLE_PREFIX.len()..].to_owned();
    let tails: Vec<String> = names
        .iter()
        .map(String::as_str)
        .chain(RESERVED_VARIABLES)
        .map(tail)
        .collect();
    let near = nearest(&tail(&name), tails.iter().map(String::as_str));
    SettingError::UnknownVariable {
        nearest: near.map(|near| format!("{VARIABLE_PREFIX}{near}")),
        name: excerpt(&name),
    }
}

pub fn allowed(rule: Rule, place: &Place) -> Result<(), SettingError> {
    match rule {
        Rule::Yes => Ok(()),
        Rule::No(reason) => Err(SettingError::NotThere {
            place: place.clone(),
            reason,
        }),
    }
}

/// A TOML value as the words that the option would have been given.
fn toml_words(value: &toml::Value, place: &Place) -> Result<Vec<OsString>, SettingError> {
    let kind = place.setting.kind;
    let wrong = |expected| SettingError::WrongType {
        place: place.clone(),
        expected,
    };
    let is_number = kind.bounds().is_some();
    match (kind, value) {
        (Kind::Switch, toml::Value::Boolean(on)) => Ok(vec![on.to_string().into()]),
        (Kind::Switch, _) => Err(wrong("true or false")),
        (Kind::List, toml::Value::Array(items)) => items
            .iter()
            .map(|item| item.as_str().map(OsString::from))
            .collect::<Option<_>>()
            .ok_or_else(|| wrong("an array of strings")),
        (Kind::List, _) => Err(wrong("an array of strings")),
        (_, toml::Value::String(text)) => Ok(vec![text.into()]),
        (_, toml::Value::Integer(number)) if is_number => Ok(vec![number.to_string().into()]),
        (_, toml::Value::Float(number)) if is_number => Ok(vec![number.to_string().into()]),
        _ if is_number => Err(wrong("a number or a string")),
        _ => Err(wrong("a string")),
    }
}

impl Entry {
    pub fn new(place: Place, words: Vec<OsString>, base: &Path) -> Result<Entry, SettingError> {
        if words.len() > LIST_ENTRIES_MAX {
            return Err(SettingError::TooMany { place });
        }
        if words.iter().any(|word| word.is_empty()) {
            return Err(SettingError::Empty { place });
        }
        if words.iter().any(|word| word.as_bytes().contains(&0)) {
            return Err(SettingError::NulByte { place });
        }
        let value = match (place.setting.kind, words.first()) {
            (Kind::List, _) => Value::List(words),
            (_, None) => return Err(SettingError::Empty { place }),
            (Kind::Path, Some(word)) => Value::Path(absolute(word, base)),
            (Kind::Text, Some(word)) => Value::Text(word.clone()),
            (Kind::Switch, Some(word)) => Value::Switch(switch(&place, text(&place, word)?)?),
            (Kind::Word(choices), Some(word)) => {
                Value::Word(choice(&place, text(&place, word)?, choices)?)
            }
            (_, Some(word)) => number(&place, text(&place, word)?)?,
        };
        Ok(Entry {
            place,
            value,
            base: base.to_owned(),
        })
    }

    /// What a project's file may set, but not to every value. `data = "."` or `".git"` would show what
    /// promise P2 keeps from the program.
    ///
    /// The paths are compared as written and, where they exist, as they resolve: a link does not lead out.
    fn check_project(&self, project: &Path) -> Result<(), SettingError> {
        let place = self.place.clone();
        match (&self.value, self.place.setting.key) {
            (Value::Path(path), _) if !is_below(path, project) || leads_out(path, project) => {
                Err(SettingError::NotBelowProject { place })
            }
            (Value::List(items), Key::Env)
                if !items.iter().all(|item| item.as_bytes().contains(&b'=')) =>
            {
                Err(SettingError::ProjectPassesEnv { place })
            }
            _ => Ok(()),
        }
    }
}

pub fn number(place: &Place, text: &str) -> Result<Value, SettingError> {
    let kind = place.setting.kind;
    let bounds = kind.bounds().unwrap_or(super::settings::Bounds {
        least: 0,
        most: u64::MAX,
        off: Off::Refused,
    });
    if bounds.off == Off::Allowed && text == "off" {
        return Ok(Value::Off);
    }
    let number = kind
        .parse_number(text)
        .map_err(|source| SettingError::Number {
            place: place.clone(),
            source,
        })?;
    match (bounds.least..=bounds.most).contains(&number) {
        true => Ok(Value::Number(number)),
        false => Err(SettingError::OutOfBounds {
            place: place.clone(),
            given: kind.show(number),
            least: kind.show(bounds.least),
            most: kind.show(bounds.most),
        }),
    }
}

fn text<'a>(place: &Place, word: &'a OsStr) -> Result<&'a str, SettingError> {
    word.to_str().ok_or_else(|| SettingError::NotText {
        place: place.clone(),
    })
}

fn choice(
    place: &Place,
    text: &str,
    choices: &'static [&'static str],
) -> Result<&'static str, SettingError> {
    let found = choices.iter().find(|choice| **choice == text);
    found.copied().ok_or_else(|| SettingError::NotAChoice {
        place: place.clone(),
        given: excerpt(text),
        choices: choices.to_vec(),
    })
}

fn switch(place: &Place, text: &str) -> Result<bool, SettingError> {
    const WORDS: &[&str] = &["true", "1", "false", "0"];
    Ok(["true", "1"].contains(&choice(place, text, WORDS)?))
}

/// Joined to `base` where relative. `..` is left for the kernel to resolve: cutting it out of the text
/// would be wrong after a symlink.
pub fn absolute(path: &OsStr, base: &Path) -> PathBuf {
    base.join(path).components().collect()
}

/// Whether a path that exists is not below the directory once its links are followed.
fn leads_out(path: &Path, directory: &Path) -> bool {
    match (
        std::fs::canonicalize(path),
        std::fs::canonicalize(directory),
    ) {
        (Ok(path), Ok(directory)) => !is_below(&path, &directory),
        _ => false,
    }
}

/// Below, not the directory itself, and through no hidden directory.
fn is_below(path: &Path, directory: &Path) -> bool {
    let directory: PathBuf = directory.components().collect();
    let visible = |part: Component<'_>| match part {
        Component::Normal(name) => !name.as_bytes().starts_with(b"."),
        _ => false,
    };
    path.strip_prefix(directory)
        .is_ok_and(|rest| rest != Path::new("") && rest.components().all(visible))
}

pub fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}
