//! The settings of one source (a file, the variables, the options), each read by the table of settings and checked
//! alone: a wrong value is an error even where a stronger source overrides it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use store::types::units::UnitError;

use super::post_process::{self, PostProcessError, PostProcessSettings};
use super::suggestion::{did_you_mean, excerpt, nearest};
use super::table::{
    GivenSettings, Key, OffWord, PlaceRule, RESERVED_VARIABLES, SETTINGS, Setting, SettingKind,
    TEST_PREFIX, VARIABLE_PREFIX,
};

/// A longer list comes from a mistake or an attacker.
const LIST_ENTRIES_MAX: usize = 1000;

/// Where a value was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingOrigin {
    /// The user's `config.toml`, at this path.
    UserFile(PathBuf),
    /// The project's `fumehood.toml`, at this path.
    ProjectFile(PathBuf),
    /// A `FUMEHOOD_*` variable of the caller's environment.
    Variable,
    /// An option on the command line.
    Flag,
    /// A line of a batch file.
    Line,
    /// A submission that a worker took from the queue.
    Queue,
}

/// A setting and where it was set, for error messages. Displays the name as that source writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingPlace {
    /// The setting's row in the table of all settings.
    pub setting: &'static Setting,
    /// The source that sets it.
    pub origin: SettingOrigin,
}

impl fmt::Display for SettingPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            SettingOrigin::UserFile(path) | SettingOrigin::ProjectFile(path) => {
                write!(f, "`{}` in {}", self.setting.name, path.display())
            }
            SettingOrigin::Variable => f.write_str(&self.setting.variable_name()),
            SettingOrigin::Flag => f.write_str(&self.setting.flag()),
            SettingOrigin::Line => write!(f, "`{}`", self.setting.name),
            SettingOrigin::Queue => write!(f, "`{}` of the submission", self.setting.name),
        }
    }
}

/// A value that was read by the kind of its setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingValue {
    /// A number within the setting's bounds, in the unit of its kind: milliseconds, bytes, thousandths of a CPU, or a
    /// count.
    Number(u64),
    /// The word `off`: no limit.
    Off,
    /// One of the setting's words.
    Word(&'static str),
    /// An absolute path.
    Path(PathBuf),
    /// Text that is not empty and holds no NUL byte.
    Text(OsString),
    /// Whether the switch is on.
    Switch(bool),
    /// The items that this source adds to the list. None is empty.
    List(Vec<OsString>),
}

/// One setting of one source, with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingEntry {
    /// The setting, and the source that sets it.
    pub place: SettingPlace,
    /// What the source sets it to.
    pub value: SettingValue,
    /// The directory to which relative paths in the value are relative.
    pub(crate) base: PathBuf,
}

/// The settings of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSettings {
    /// The settings of the file, without `post_process`.
    pub entries: Vec<SettingEntry>,
    pub(crate) post_process: Option<PostProcessSettings>,
}

/// Why the value of one source cannot be used, or its file or name not read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum SettingError {
    /// The file is not TOML.
    #[error("read {path:?} as TOML")]
    Toml {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A key of the file is not the name of a setting.
    #[error("{}: unknown key `{key}`{}", path.display(), did_you_mean(nearest))]
    UnknownKey {
        path: PathBuf,
        key: String,
        nearest: Option<String>,
    },
    /// A `FUMEHOOD_*` variable belongs to no setting.
    #[error("unknown variable {name}{}", did_you_mean(nearest))]
    UnknownVariable {
        name: String,
        nearest: Option<String>,
    },
    /// The setting may not be set in this kind of source.
    #[error("{place} may not be set there: {reason}; use {}", place.setting.places())]
    NotThere {
        place: SettingPlace,
        reason: &'static str,
    },
    /// A project's file sets `post_process`, which only the user and the operator may set.
    #[error(
        "`post_process` in {} may not be set there: it is a command that runs unconfined, as you; use your own \
         config.toml or the operator's policy",
        path.display()
    )]
    ProjectPostProcess { path: PathBuf },
    /// The section `post_process` of the user's file is wrong.
    #[error("refuse `post_process` in {}", path.display())]
    PostProcess {
        path: PathBuf,
        #[source]
        source: PostProcessError,
    },
    /// A project's file names a variable without a value, which would pass on the caller's.
    #[error(
        "{place} would hand on a variable of the caller's, which a project's file may not; \
         give a value (K=V), or use --env"
    )]
    ProjectPassesEnv { place: SettingPlace },
    /// A project's file names a path outside the project.
    #[error(
        "{place} is not a visible directory below the project, which is all that a project's file \
         may name; use {}",
        place.setting.flag()
    )]
    NotBelowProject { place: SettingPlace },
    /// The value has another type than the setting's kind.
    #[error("{place} must be {expected}")]
    WrongType {
        place: SettingPlace,
        expected: &'static str,
    },
    /// The value, or an item of the list, is empty.
    #[error("{place} is empty")]
    Empty { place: SettingPlace },
    /// The value contains a NUL byte, which neither a path nor an argument can hold.
    #[error("{place} contains a NUL byte")]
    NulByte { place: SettingPlace },
    /// The value is not UTF-8, and the setting needs text.
    #[error("{place} is not UTF-8 text")]
    NotText { place: SettingPlace },
    /// The list has too many items.
    #[error("{place} has more than {LIST_ENTRIES_MAX} entries")]
    TooMany { place: SettingPlace },
    /// The text cannot be read as a number in the unit of the setting.
    #[error("read {place}")]
    Number {
        place: SettingPlace,
        #[source]
        source: UnitError,
    },
    /// The number is outside the setting's bounds.
    #[error("{place} is {given}; it must be from {least} to {most}")]
    OutOfBounds {
        place: SettingPlace,
        given: String,
        least: String,
        most: String,
    },
    /// The text is none of the setting's words.
    #[error("{place} is {given:?}; it must be one of: {}", choices.join(", "))]
    NotAChoice {
        place: SettingPlace,
        given: String,
        choices: Vec<&'static str>,
    },
}

/// Reads the settings of a user's or a project's file.
pub fn from_file(text: &str, origin: &SettingOrigin) -> Result<FileSettings, SettingError> {
    let mut settings = FileSettings::default();
    let (SettingOrigin::UserFile(path) | SettingOrigin::ProjectFile(path)) = origin else {
        return Ok(settings);
    };
    let table: toml::Table = text.parse().map_err(|error| SettingError::Toml {
        path: path.clone(),
        source: Box::new(error),
    })?;
    for (key, value) in &table {
        match (key.as_str(), origin) {
            (post_process::SECTION, SettingOrigin::UserFile(_)) => {
                let read = PostProcessSettings::read(value).map_err(|source| {
                    SettingError::PostProcess {
                        path: path.clone(),
                        source,
                    }
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
    origin: &SettingOrigin,
    path: &Path,
) -> Result<SettingEntry, SettingError> {
    let names = || SETTINGS.iter().map(|s| s.name);
    let setting = Setting::named(key).ok_or_else(|| SettingError::UnknownKey {
        path: path.to_owned(),
        key: excerpt(key),
        nearest: nearest(key, names().chain([post_process::SECTION])).map(str::to_owned),
    })?;
    let place = SettingPlace {
        setting,
        origin: origin.clone(),
    };
    let rule = match origin {
        SettingOrigin::ProjectFile(_) => setting.project_file,
        _ => setting.user_file,
    };
    check_allowed(rule, &place)?;
    let words = toml_words(value, &place)?;
    let base = path.parent().unwrap_or(Path::new("/"));
    let entry = SettingEntry::new(place, words, base)?;
    if let SettingOrigin::ProjectFile(_) = origin {
        entry.check_project(base)?;
    }
    Ok(entry)
}

/// Reads the settings among the caller's environment variables.
pub(crate) fn from_variables(
    env: &BTreeMap<OsString, OsString>,
    cwd: &Path,
) -> Result<Vec<SettingEntry>, SettingError> {
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
        let place = SettingPlace {
            setting,
            origin: SettingOrigin::Variable,
        };
        check_allowed(setting.variable, &place)?;
        let words = match setting.kind {
            SettingKind::List => value
                .as_bytes()
                .split(|byte| *byte == b',')
                .map(|word| OsString::from_vec(word.trim_ascii().to_vec()))
                .collect(),
            _ => vec![value.clone()],
        };
        entries.push(SettingEntry::new(place, words, cwd)?);
    }
    Ok(entries)
}

/// Whether other code reads this variable. Only a debug build knows the variable with which tests inject faults; a
/// release build refuses it like any unknown name.
fn is_reserved(name: &OsStr) -> bool {
    name.as_bytes().starts_with(TEST_PREFIX.as_bytes())
        || RESERVED_VARIABLES.iter().any(|reserved| name == *reserved)
        || (cfg!(debug_assertions) && name == store::types::crash_points::VARIABLE)
}

/// Reads the settings that were given as options.
pub(crate) fn from_flags(
    given: GivenSettings,
    cwd: &Path,
) -> Result<Vec<SettingEntry>, SettingError> {
    given
        .into_iter()
        .map(|(key, words)| {
            let place = SettingPlace {
                setting: key.setting(),
                origin: SettingOrigin::Flag,
            };
            SettingEntry::new(place, words, cwd)
        })
        .collect()
}

fn unknown_variable(name: &OsStr) -> SettingError {
    let name = name.to_string_lossy();
    let names: Vec<String> = SETTINGS
        .iter()
        .filter(|setting| setting.variable == PlaceRule::Yes)
        .map(Setting::variable_name)
        .collect();
    // Compare what follows the prefix: the common prefix would make every short name look similar.
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

pub(crate) fn check_allowed(rule: PlaceRule, place: &SettingPlace) -> Result<(), SettingError> {
    match rule {
        PlaceRule::Yes => Ok(()),
        PlaceRule::No(reason) => Err(SettingError::NotThere {
            place: place.clone(),
            reason,
        }),
    }
}

/// Converts a TOML value to the words that the option would have.
fn toml_words(value: &toml::Value, place: &SettingPlace) -> Result<Vec<OsString>, SettingError> {
    let kind = place.setting.kind;
    let wrong = |expected| SettingError::WrongType {
        place: place.clone(),
        expected,
    };
    let is_number = kind.bounds().is_some();
    match (kind, value) {
        (SettingKind::Switch, toml::Value::Boolean(on)) => Ok(vec![on.to_string().into()]),
        (SettingKind::Switch, _) => Err(wrong("true or false")),
        (SettingKind::List, toml::Value::Array(items)) => items
            .iter()
            .map(|item| item.as_str().map(OsString::from))
            .collect::<Option<_>>()
            .ok_or_else(|| wrong("an array of strings")),
        (SettingKind::List, _) => Err(wrong("an array of strings")),
        (_, toml::Value::String(text)) => Ok(vec![text.into()]),
        (_, toml::Value::Integer(number)) if is_number => Ok(vec![number.to_string().into()]),
        (_, toml::Value::Float(number)) if is_number => Ok(vec![number.to_string().into()]),
        _ if is_number => Err(wrong("a number or a string")),
        _ => Err(wrong("a string")),
    }
}

impl SettingEntry {
    pub(crate) fn new(
        place: SettingPlace,
        words: Vec<OsString>,
        base: &Path,
    ) -> Result<SettingEntry, SettingError> {
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
            (SettingKind::List, _) => SettingValue::List(words),
            (_, None) => return Err(SettingError::Empty { place }),
            (SettingKind::Path, Some(word)) => SettingValue::Path(absolute(word, base)),
            (SettingKind::Text, Some(word)) => SettingValue::Text(word.clone()),
            (SettingKind::Switch, Some(word)) => {
                SettingValue::Switch(switch(&place, text(&place, word)?)?)
            }
            (SettingKind::Word(choices), Some(word)) => {
                SettingValue::Word(choice(&place, text(&place, word)?, choices)?)
            }
            (_, Some(word)) => number(&place, text(&place, word)?)?,
        };
        Ok(SettingEntry {
            place,
            value,
            base: base.to_owned(),
        })
    }

    /// Checks a value that a project's file may set only within bounds. `data = "."` or `".git"` would show the program
    /// what promise P2 hides.
    ///
    /// Compares the paths as written and, where they exist, with symlinks resolved, so that a link cannot lead out of
    /// the project.
    fn check_project(&self, project: &Path) -> Result<(), SettingError> {
        let place = self.place.clone();
        match (&self.value, self.place.setting.key) {
            (SettingValue::Path(path), _)
                if !is_below(path, project) || resolves_outside(path, project) =>
            {
                Err(SettingError::NotBelowProject { place })
            }
            (SettingValue::List(items), Key::Env)
                if !items.iter().all(|item| item.as_bytes().contains(&b'=')) =>
            {
                Err(SettingError::ProjectPassesEnv { place })
            }
            _ => Ok(()),
        }
    }
}

pub(crate) fn number(place: &SettingPlace, text: &str) -> Result<SettingValue, SettingError> {
    let kind = place.setting.kind;
    let bounds = kind.bounds().unwrap_or(super::table::NumberBounds {
        least: 0,
        most: u64::MAX,
        off: OffWord::Refused,
    });
    if bounds.off == OffWord::Allowed && text == "off" {
        return Ok(SettingValue::Off);
    }
    let number = kind
        .parse_number(text)
        .map_err(|source| SettingError::Number {
            place: place.clone(),
            source,
        })?;
    match (bounds.least..=bounds.most).contains(&number) {
        true => Ok(SettingValue::Number(number)),
        false => Err(SettingError::OutOfBounds {
            place: place.clone(),
            given: kind.show(number),
            least: kind.show(bounds.least),
            most: kind.show(bounds.most),
        }),
    }
}

fn text<'a>(place: &SettingPlace, word: &'a OsStr) -> Result<&'a str, SettingError> {
    word.to_str().ok_or_else(|| SettingError::NotText {
        place: place.clone(),
    })
}

fn choice(
    place: &SettingPlace,
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

fn switch(place: &SettingPlace, text: &str) -> Result<bool, SettingError> {
    const WORDS: &[&str] = &["true", "1", "false", "0"];
    Ok(["true", "1"].contains(&choice(place, text, WORDS)?))
}

/// Joins a relative path to `base`. Leaves `..` for the kernel to resolve: removing it from the text gives the wrong
/// directory after a symlink.
pub(crate) fn absolute(path: &OsStr, base: &Path) -> PathBuf {
    base.join(path).components().collect()
}

/// Whether a path exists and, with its symlinks resolved, is not below the directory.
fn resolves_outside(path: &Path, directory: &Path) -> bool {
    match (
        std::fs::canonicalize(path),
        std::fs::canonicalize(directory),
    ) {
        (Ok(path), Ok(directory)) => !is_below(&path, &directory),
        _ => false,
    }
}

/// Whether the path is below the directory, is not the directory itself, and passes through no hidden directory.
fn is_below(path: &Path, directory: &Path) -> bool {
    let directory: PathBuf = directory.components().collect();
    let visible = |part: Component<'_>| match part {
        Component::Normal(name) => !name.as_bytes().starts_with(b"."),
        _ => false,
    };
    path.strip_prefix(directory)
        .is_ok_and(|rest| rest != Path::new("") && rest.components().all(visible))
}
