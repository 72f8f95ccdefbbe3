//! The settings of `fumehood submit`: the request that `run` would make on this machine, and the resolved settings for
//! the queue. A worker makes its own request from the settings, under its own policy.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::request::{Command, LimitName, ReadRoot};
use store::State;
use store::types::submission::SubmittedSetting as QueuedSetting;

use super::entries::{self, SettingEntry, SettingError, SettingOrigin, SettingPlace, SettingValue};
use super::error::ConfigError;
use super::merged::{MergedSettings, ProjectFile};
use super::record::RecordSettings;
use super::request::{Presentation, Request};
use super::sources::Sources;
use super::suggestion::excerpt;
use super::table::{GivenSettings, KEY_CHARS_MAX, Key, PlaceRule, RETRY_ON, SETTINGS};

const PRIORITY_DEFAULT: u64 = 0;
const RETRIES_DEFAULT: u64 = 2;
const QUEUE_MAX_DEFAULT: u64 = 200_000;

/// How an analysis waits in the queue, and when it is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Analyses with a higher priority are claimed first.
    pub priority: u32,
    /// How many more attempts may follow the first.
    pub retries: u32,
    /// The ends of a program after which another attempt is made.
    pub retry_on: Vec<State>,
    /// A key under which only one analysis is submitted, however often the command is repeated. `None`: no such check.
    pub key: Option<String>,
    /// The most analyses that the queue may hold. More are refused.
    pub queue_max: u64,
}

/// One analysis to be submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedSubmission {
    /// The request that `run` would make on this machine. Its inputs are not read yet.
    pub request: Request,
    /// Whether the caller named the id. Otherwise it was generated.
    pub is_named: bool,
    /// The settings that the queue stores, by name.
    pub settings: BTreeMap<String, QueuedSetting>,
    /// How it waits, and when it is tried again.
    pub queue_options: QueueOptions,
}

/// What all submissions of one command have in common; read once.
pub struct SubmissionConfig<'a> {
    sources: &'a Sources,
    given: GivenSettings,
    merged: MergedSettings,
}

impl<'a> SubmissionConfig<'a> {
    /// Reads all sources. Fails if a setting is given that cannot be submitted.
    pub fn new(
        given: GivenSettings,
        sources: &'a Sources,
    ) -> Result<SubmissionConfig<'a>, ConfigError> {
        let merged = MergedSettings::read(given.clone(), sources, ProjectFile::Read)?;
        merged.check_submittable()?;
        Ok(SubmissionConfig {
            sources,
            given,
            merged,
        })
    }

    /// Returns the settings about the record: which database has the queue, and where results go.
    pub fn record(&self) -> Result<RecordSettings, ConfigError> {
        self.merged.record(self.merged.db(self.sources)?)
    }

    /// Returns how to report to the caller.
    pub fn presentation(&self) -> Presentation {
        Presentation {
            json: self.merged.switch(Key::Json),
            quiet: self.merged.switch(Key::Quiet),
        }
    }

    /// Returns the most analyses that the queue may hold.
    pub fn queue_max(&self) -> Result<u64, ConfigError> {
        Ok(self.merged.limit(Key::QueueMax, QUEUE_MAX_DEFAULT)?.value)
    }

    /// Resolves one submission. The settings of a batch line override the options; lists add up.
    pub fn resolve(
        &self,
        command: Command,
        line: GivenSettings,
    ) -> Result<ResolvedSubmission, ConfigError> {
        let command = match command {
            Command::Script { script, args } => Command::Script {
                script: entries::absolute(script.as_os_str(), &self.sources.cwd),
                args,
            },
            command => command,
        };
        let mut merged = self.merged.clone();
        if let Some(project) = line.iter().find(|(key, _)| *key == Key::Project) {
            // Another project has another fumehood.toml, so read all sources again.
            let mut given = self.given.clone();
            given.retain(|(key, _)| *key != Key::Project);
            given.push(project.clone());
            merged = MergedSettings::read(given, self.sources, ProjectFile::Read)?;
        }
        for (key, words) in line {
            let place = SettingPlace {
                setting: key.setting(),
                origin: SettingOrigin::Line,
            };
            merged
                .entries
                .push(SettingEntry::new(place, words, &self.sources.cwd)?);
        }
        let queue_options = merged.queue_options()?;
        let is_named = merged.last(Key::Id).is_some();
        let request = merged.resolve(command, self.sources)?.request;
        Ok(ResolvedSubmission {
            settings: merged.submitted_settings(&request)?,
            request,
            is_named,
            queue_options,
        })
    }
}

/// Returns the variables that `--env` options give, with their values, and no others.
pub fn env_from_options(
    words: Vec<OsString>,
    sources: &Sources,
) -> Result<Vec<(String, String)>, ConfigError> {
    let mut merged = MergedSettings::read(vec![(Key::Env, words)], sources, ProjectFile::Ignored)?;
    merged
        .entries
        .retain(|entry| entry.place.origin == SettingOrigin::Flag);
    let pair = |(name, value): (OsString, OsString)| {
        let name = text("a variable's name", &name)?;
        Ok((name, text("a variable's value", &value)?))
    };
    merged.env(&sources.env)?.into_iter().map(pair).collect()
}

impl MergedSettings {
    /// Refuses an option that has no effect on a submission. The same setting in a file or a variable is meant for
    /// other runs.
    fn check_submittable(&self) -> Result<(), ConfigError> {
        for (key, why) in [
            (
                Key::To,
                "its outputs are there when it has run; export them then, with `fumehood outputs ID --to DIR`",
            ),
            (Key::Force, "it goes with --to, which is for `run`"),
            (
                Key::In,
                "a workspace made before is on one machine, and the worker may be on another",
            ),
            (
                Key::WorkspaceRoot,
                "where workspaces are made is the worker's to say",
            ),
            (
                Key::Artifacts,
                "where outputs are kept is the worker's to say",
            ),
            (Key::StoreQuota, "how much is kept is the worker's to say"),
            (Key::FreeReserve, "what stays free is the worker's to say"),
        ] {
            let typed = self.last(key);
            if let Some(entry) = typed.filter(|entry| entry.place.origin == SettingOrigin::Flag) {
                return Err(ConfigError::NotSubmitted {
                    place: entry.place.clone(),
                    why,
                });
            }
        }
        Ok(())
    }

    fn queue_options(&self) -> Result<QueueOptions, ConfigError> {
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        Ok(QueueOptions {
            priority: small(self.limit(Key::Priority, PRIORITY_DEFAULT)?.value),
            retries: small(self.limit(Key::Retries, RETRIES_DEFAULT)?.value),
            retry_on: self.retry_on()?,
            key: self.submit_key()?,
            queue_max: self.limit(Key::QueueMax, QUEUE_MAX_DEFAULT)?.value,
        })
    }

    fn retry_on(&self) -> Result<Vec<State>, ConfigError> {
        let mut states = Vec::new();
        for (entry, item) in self.items(Key::RetryOn) {
            // Accept `--retry-on failed,timed_out` too.
            for word in item.to_string_lossy().split(',').map(str::trim) {
                let state = RETRY_ON.into_iter().find(|state| state.as_str() == word);
                let state = state.ok_or_else(|| ConfigError::RetryOn {
                    place: entry.place.clone(),
                    given: excerpt(word),
                })?;
                if !states.contains(&state) {
                    states.push(state);
                }
            }
        }
        Ok(states)
    }

    fn submit_key(&self) -> Result<Option<String>, ConfigError> {
        let Some(entry) = self.last(Key::SubmitOnce) else {
            return Ok(None);
        };
        let bad = || ConfigError::BadKey {
            place: entry.place.clone(),
        };
        let SettingValue::Text(text) = &entry.value else {
            return Err(bad());
        };
        let text = text.to_str().ok_or_else(bad)?;
        let good = text.chars().count() <= KEY_CHARS_MAX && !text.chars().any(char::is_control);
        match good {
            true => Ok(Some(text.to_owned())),
            false => Err(bad()),
        }
    }

    /// Returns the settings that somebody set, in the form that a worker reads.
    fn submitted_settings(
        &self,
        request: &Request,
    ) -> Result<BTreeMap<String, QueuedSetting>, ConfigError> {
        let mut stored = BTreeMap::new();
        for setting in SETTINGS.iter().filter(|s| s.queue == PlaceRule::Yes) {
            let value = match setting.key {
                Key::Env => list(self.submitted_env(request)?),
                Key::Read => list(self.submitted_reads(request)?),
                Key::AllowDegraded => {
                    let limits = request.allow_degraded.iter().copied();
                    list(limits.map(LimitName::as_str).map(str::to_owned).collect())
                }
                Key::SecretEnv => {
                    let items = self.items(Key::SecretEnv).map(|(_, item)| item);
                    list(
                        items
                            .map(|i| text("secret_env", i))
                            .collect::<Result<_, _>>()?,
                    )
                }
                Key::Output => list(request.collection.outputs.clone()),
                Key::Expect => list(request.collection.expects.clone()),
                // The highest floor that anybody asked for.
                Key::Isolation => self
                    .last(Key::Isolation)
                    .map(|_| QueuedSetting::Text(request.floor.as_str().to_owned())),
                _ => self.last(setting.key).map(submitted_value).transpose()?,
            };
            stored.extend(value.map(|value| (setting.name.to_owned(), value)));
        }
        Ok(stored)
    }

    fn submitted_env(&self, request: &Request) -> Result<Vec<String>, ConfigError> {
        let pair = |(name, value): &(OsString, OsString)| {
            let name = text("a variable's name", name)?;
            Ok(format!("{name}={}", text("a variable's value", value)?))
        };
        request.env.iter().map(pair).collect()
    }

    fn submitted_reads(&self, request: &Request) -> Result<Vec<String>, ConfigError> {
        let colon = |path: &Path| path.as_os_str().as_encoded_bytes().contains(&b':');
        let one = |read: &ReadRoot| {
            let host = text("a path to read", read.host.as_os_str())?;
            match (&read.inside, self.last(Key::Read)) {
                (Some(inside), _) => Ok(format!(
                    "{host}:{}",
                    text("a path inside", inside.as_os_str())?
                )),
                (None, Some(entry)) if colon(&read.host) => Err(ConfigError::SubmittedColon {
                    place: entry.place.clone(),
                    given: read.host.clone(),
                }),
                (None, _) => Ok(host),
            }
        };
        request.reads.iter().map(one).collect()
    }
}

fn list(items: Vec<String>) -> Option<QueuedSetting> {
    match items.is_empty() {
        true => None,
        false => Some(QueuedSetting::List(items)),
    }
}

fn submitted_value(entry: &SettingEntry) -> Result<QueuedSetting, ConfigError> {
    let name = entry.place.setting.name;
    Ok(match &entry.value {
        SettingValue::Number(number) => QueuedSetting::Number(*number),
        SettingValue::Off => QueuedSetting::Off,
        SettingValue::Word(word) => QueuedSetting::Text((*word).to_owned()),
        SettingValue::Path(path) => QueuedSetting::Text(text(name, path.as_os_str())?),
        SettingValue::Text(given) => QueuedSetting::Text(text(name, given)?),
        SettingValue::Switch(on) => QueuedSetting::Switch(*on),
        SettingValue::List(_) => {
            return Err(SettingError::WrongType {
                place: entry.place.clone(),
                expected: "no list",
            }
            .into());
        }
    })
}

fn text(what: &'static str, given: &OsStr) -> Result<String, ConfigError> {
    match given.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(ConfigError::SubmittedText {
            what,
            given: given.to_owned(),
        }),
    }
}
