//! What `fumehood submit` was asked for: the request that `run` would have made of it here, and the settings that go into
//! the queue, each already resolved, for a worker to make a request of under its own policy.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use engine::request::{Command, LimitName, ReadRoot, Request};
use store::State;
use store::types::submission::SubmittedSetting as Queued;

use super::layer::{self, Entry, Origin, Place, SettingError, Value};
use super::settings::{Key, Rule, SETTINGS};
use super::{ConfigError, Merged, Presentation, Project, RecordSettings, Sources};

/// Ends of a program's own after which it may be tried again, if asked.
pub const RETRY_ON: [State; 4] = [
    State::Failed,
    State::TimedOut,
    State::OutOfMemory,
    State::LimitExceeded,
];
pub const KEY_CHARS_MAX: usize = 200;
const PRIORITY_DEFAULT: u64 = 0;
const RETRIES_DEFAULT: u64 = 2;
const QUEUE_MAX_DEFAULT: u64 = 200_000;

/// How it waits, and what is done when it fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queueing {
    pub priority: u32,
    pub retries: u32,
    pub retry_on: Vec<State>,
    pub key: Option<String>,
    pub queue_max: u64,
}

/// One analysis to be submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToSubmit {
    /// As `run` would have it here. Its inputs are still to be read.
    pub request: Request,
    /// Whether the id was asked for, rather than made up.
    pub is_named: bool,
    pub settings: BTreeMap<String, Queued>,
    pub queueing: Queueing,
}

/// Everything that submissions made at once have in common, read once.
pub struct Submitter<'a> {
    sources: &'a Sources,
    given: Vec<(Key, Vec<OsString>)>,
    merged: Merged,
}

impl<'a> Submitter<'a> {
    pub fn new(
        given: Vec<(Key, Vec<OsString>)>,
        sources: &'a Sources,
    ) -> Result<Submitter<'a>, ConfigError> {
        let merged = Merged::gather(given.clone(), sources, Project::Heard)?;
        merged.check_submittable()?;
        Ok(Submitter {
            sources,
            given,
            merged,
        })
    }

    pub fn record(&self) -> Result<RecordSettings, ConfigError> {
        self.merged.record(self.merged.db(self.sources)?)
    }

    pub fn presentation(&self) -> Presentation {
        Presentation {
            json: self.merged.switch(Key::Json),
            quiet: self.merged.switch(Key::Quiet),
        }
    }

    pub fn queue_max(&self) -> Result<u64, ConfigError> {
        Ok(self.merged.limit(Key::QueueMax, QUEUE_MAX_DEFAULT)?.value)
    }

    /// One submission: what a line says beside the options, over which it wins. Lists add up.
    pub fn resolve(
        &self,
        command: Command,
        line: Vec<(Key, Vec<OsString>)>,
    ) -> Result<ToSubmit, ConfigError> {
        let command = match command {
            Command::Script { script, args } => Command::Script {
                script: layer::absolute(script.as_os_str(), &self.sources.cwd),
                args,
            },
            command => command,
        };
        let mut merged = self.merged.clone();
        if let Some(project) = line.iter().find(|(key, _)| *key == Key::Project) {
            // Another project has another file.
            let mut given = self.given.clone();
            given.retain(|(key, _)| *key != Key::Project);
            given.push(project.clone());
            merged = Merged::gather(given, self.sources, Project::Heard)?;
        }
        for (key, words) in line {
            let place = Place {
                setting: key.setting(),
                origin: Origin::Line,
            };
            merged
                .entries
                .push(Entry::new(place, words, &self.sources.cwd)?);
        }
        let queueing = merged.queueing()?;
        let is_named = merged.last(Key::Id).is_some();
        let read = merged.clone();
        let request = merged.resolve(command, self.sources)?.request;
        Ok(ToSubmit {
            settings: read.stored(&request)?,
            request,
            is_named,
            queueing,
        })
    }
}

/// Variables as `--env` gives them, with their values, and no others.
pub fn given_env(
    words: Vec<OsString>,
    sources: &Sources,
) -> Result<Vec<(String, String)>, ConfigError> {
    let mut merged = Merged::gather(vec![(Key::Env, words)], sources, Project::Unheard)?;
    merged
        .entries
        .retain(|entry| entry.place.origin == Origin::Flag);
    let pair = |(name, value): (OsString, OsString)| {
        let name = text("a variable's name", &name)?;
        Ok((name, text("a variable's value", &value)?))
    };
    merged.env(&sources.env)?.into_iter().map(pair).collect()
}

impl Merged {
    /// What was typed and would have no effect is refused; in a file or a variable it is meant for other runs.
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
            if let Some(entry) = typed.filter(|entry| entry.place.origin == Origin::Flag) {
                return Err(ConfigError::NotSubmitted {
                    place: entry.place.clone(),
                    why,
                });
            }
        }
        Ok(())
    }

    fn queueing(&self) -> Result<Queueing, ConfigError> {
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        Ok(Queueing {
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
            // `--retry-on failed,timed_out` is how people write it.
            for word in item.to_string_lossy().split(',').map(str::trim) {
                let state = RETRY_ON.into_iter().find(|state| state.as_str() == word);
                let state = state.ok_or_else(|| ConfigError::RetryOn {
                    place: entry.place.clone(),
                    given: layer::excerpt(word),
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
        let Value::Text(text) = &entry.value else {
            return Err(bad());
        };
        let text = text.to_str().ok_or_else(bad)?;
        let good = text.chars().count() <= KEY_CHARS_MAX && !text.chars().any(char::is_control);
        match good {
            true => Ok(Some(text.to_owned())),
            false => Err(bad()),
        }
    }

    /// The settings that somebody asked for, as a worker reads them.
    fn stored(&self, request: &Request) -> Result<BTreeMap<String, Queued>, ConfigError> {
        let mut stored = BTreeMap::new();
        for setting in SETTINGS.iter().filter(|s| s.queue == Rule::Yes) {
            let value = match setting.key {
                Key::Env => list(self.stored_env(request)?),
                Key::Read => list(self.stored_reads(request)?),
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
                // The highest that anybody asked for.
                Key::Isolation => self
                    .last(Key::Isolation)
                    .map(|_| Queued::Text(request.floor.as_str().to_owned())),
                _ => self.last(setting.key).map(stored_value).transpose()?,
            };
            stored.extend(value.map(|value| (setting.name.to_owned(), value)));
        }
        Ok(stored)
    }

    fn stored_env(&self, request: &Request) -> Result<Vec<String>, ConfigError> {
        let pair = |(name, value): &(OsString, OsString)| {
            let name = text("a variable's name", name)?;
            Ok(format!("{name}={}", text("a variable's value", value)?))
        };
        request.env.iter().map(pair).collect()
    }

    fn stored_reads(&self, request: &Request) -> Result<Vec<String>, ConfigError> {
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

fn list(items: Vec<String>) -> Option<Queued> {
    match items.is_empty() {
        true => None,
        false => Some(Queued::List(items)),
    }
}

fn stored_value(entry: &Entry) -> Result<Queued, ConfigError> {
    let name = entry.place.setting.name;
    Ok(match &entry.value {
        Value::Number(number) => Queued::Number(*number),
        Value::Off => Queued::Off,
        Value::Word(word) => Queued::Text((*word).to_owned()),
        Value::Path(path) => Queued::Text(text(name, path.as_os_str())?),
        Value::Text(given) => Queued::Text(text(name, given)?),
        Value::Switch(on) => Queued::Switch(*on),
        Value::List(_) => {
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
