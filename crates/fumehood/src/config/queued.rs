//! What a worker makes of a submission: the same request that `run` would have made of it, under the worker's own policy.
//!
//! Whoever can write to the database can write a submission, by hand and against every rule that the client keeps. So
//! each value is read by the table again, and nothing of the worker's own surroundings is lent to it: no file of a project,
//! none of the worker's variables by name, no path of the worker's to copy from.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use engine::request::bundle;
use engine::request::{Command, Input, IsolationLevel, QueueWriters, RequestOrigin, Stdin};
use store::types::submission::{Submission, SubmittedCommand, SubmittedSetting as Queued};

use super::layer::{self, Entry, Origin, Place, SettingError, Value};
use super::record::DbChoice;
use super::settings::{Key, Kind, Rule, SETTINGS, Setting, nearest};
use super::{ConfigError, Merged, Project, Resolved, Sources};
use crate::cli::args::StoreArgs;

/// What the worker's own files and variables decide. A floor and what is withheld can only add to what was submitted.
const WORKERS: [Key; 7] = [
    Key::WorkspaceRoot,
    Key::Db,
    Key::Artifacts,
    Key::StoreQuota,
    Key::FreeReserve,
    Key::SecretEnv,
    Key::Isolation,
];

/// What takes memory of the runner's own, which no limit counts, or outlives the run: for strangers the defaults, unless an
/// operator says more.
const MOST_FOR_STRANGERS: [(Key, u64); 4] = [
    (Key::LogLimit, 10 << 20),
    (Key::MaxOutputs, 10_000),
    (Key::InlineMax, 1 << 20),
    (Key::KeepFor, 24 * 3600 * 1000),
];

/// The request of a submission whose files were laid out in `staged`. `store` is what the worker's command line says of
/// the record.
pub fn queued(
    submission: &Submission,
    staged: &Path,
    store: &StoreArgs,
    sources: &Sources,
) -> Result<Resolved, ConfigError> {
    submission.check().map_err(ConfigError::Submission)?;
    let mut merged = Merged::gather(store.given(), sources, Project::Unheard)?;
    merged
        .entries
        .retain(|entry| WORKERS.contains(&entry.place.setting.key));
    let has_floor = merged.policy.is_some() || merged.last(Key::Isolation).is_some();
    for (name, value) in &submission.settings {
        merged.entries.push(entry(name, value)?);
    }
    let inputs = staged.join(bundle::INPUTS);
    // Without one it has no project but what came with it: nothing of it is shown, as nothing of a project is.
    merged.project = merged.path(Key::Project).unwrap_or_else(|| inputs.clone());
    let writers = writers(merged.db(sources)?.as_ref(), sources.uid);
    merged.check_strangers(writers)?;
    let command = match &submission.command {
        SubmittedCommand::Script { name, args, .. } => Command::Script {
            script: inputs.join(name),
            args: args.iter().map(OsString::from).collect(),
        },
        SubmittedCommand::Argv(words) => Command::Argv(words.iter().map(OsString::from).collect()),
    };
    let mut resolved = merged.resolve(command, sources)?;
    let request = &mut resolved.request;
    // The weaker level tells a program more of the machine that it runs on. Who typed a request accepts that for himself; for
    // strangers the operator must, by a policy or by the worker's own `isolation`.
    if writers == QueueWriters::OtherUsers && !has_floor {
        request.floor = IsolationLevel::Full;
    }
    request.id = submission.id.clone();
    request.inputs = tops(submission, &inputs);
    request.stdin = match submission.stdin {
        Some(_) => Stdin::File(staged.join(bundle::STDIN)),
        None => Stdin::Null,
    };
    request.asked_by = RequestOrigin::Queue {
        staged: staged.to_owned(),
        writers,
        submitted_script: match &submission.command {
            SubmittedCommand::Script { from, .. } => Some(from.clone()),
            SubmittedCommand::Argv(_) => None,
        },
    };
    Ok(resolved)
}

/// What lies at the top of the inputs, the script excepted, which is copied as such.
fn tops(submission: &Submission, inputs: &Path) -> Vec<Input> {
    let script = match &submission.command {
        SubmittedCommand::Script { name, .. } => Some(name.as_path()),
        SubmittedCommand::Argv(_) => None,
    };
    let names = submission.inputs.iter().map(|item| item.name());
    names
        .filter(|name| name.components().count() == 1 && Some(*name) != script)
        .map(|name| Input {
            host: inputs.join(name),
            name: Some(name.to_owned()),
        })
        .collect()
}

fn entry(name: &str, value: &Queued) -> Result<Entry, ConfigError> {
    let setting = Setting::named(name).ok_or_else(|| {
        let names = SETTINGS.iter().filter(|setting| setting.queue == Rule::Yes);
        ConfigError::UnknownQueued {
            name: layer::excerpt(name),
            nearest: nearest(name, names.map(|setting| setting.name)).map(str::to_owned),
        }
    })?;
    let place = Place {
        setting,
        origin: Origin::Queue,
    };
    layer::allowed(setting.queue, &place)?;
    let entry = Entry::new(place.clone(), words(value, &place)?, Path::new("/"))?;
    match &entry.value {
        // Its values were put in where it was submitted; a name alone would be a variable of the worker's.
        Value::List(items) if setting.key == Key::Env => {
            let whole = |item: &OsString| item.as_encoded_bytes().contains(&b'=');
            match items.iter().all(whole) {
                true => Ok(entry),
                false => Err(ConfigError::QueuedEnv { place }),
            }
        }
        Value::Path(_) | Value::List(_) if is_relative(value, setting) => {
            Err(ConfigError::QueuedRelative { place })
        }
        _ => Ok(entry),
    }
}

/// There is no directory of the submitter's here that a path could be relative to.
fn is_relative(value: &Queued, setting: &Setting) -> bool {
    let relative = |text: &String| !text.starts_with('/');
    match (value, setting.kind) {
        (Queued::Text(text), Kind::Path) => relative(text),
        (Queued::List(items), _) if setting.key == Key::Read => items.iter().any(relative),
        _ => false,
    }
}

/// A value as the words that the option would have been given, for the same code to read. Numbers are plain ones, in the
/// unit that the table keeps them in.
fn words(value: &Queued, place: &Place) -> Result<Vec<OsString>, SettingError> {
    let kind = place.setting.kind;
    let wrong = |expected| SettingError::WrongType {
        place: place.clone(),
        expected,
    };
    let is_number = kind.bounds().is_some();
    match (kind, value) {
        (_, Queued::Number(number)) if is_number => Ok(vec![kind.exact(*number).into()]),
        (_, Queued::Off) if is_number => Ok(vec!["off".into()]),
        (Kind::Switch, Queued::Switch(on)) => Ok(vec![on.to_string().into()]),
        (Kind::List, Queued::List(items)) => Ok(items.iter().map(OsString::from).collect()),
        (Kind::Path | Kind::Text | Kind::Word(_), Queued::Text(text)) => Ok(vec![text.into()]),
        (Kind::List, _) => Err(wrong("a list")),
        (Kind::Switch, _) => Err(wrong("a switch")),
        _ if is_number => Err(wrong("a number")),
        _ => Err(wrong("a text")),
    }
}

/// Who can write to the queue that this worker takes from. Root takes from nobody's queue without looking, since whoever
/// can write to it need not be root.
fn writers(db: Option<&DbChoice>, uid: u32) -> QueueWriters {
    let only_ours = match db {
        _ if uid == 0 => false,
        // Below FUMEHOOD_HOME, which is refused where others can reach it.
        None => true,
        Some(choice) => {
            super::record::sqlite_path(&choice.text).is_some_and(|path| is_ours_alone(path, uid))
        }
    };
    match only_ours {
        true => QueueWriters::OnlyThisUser,
        false => QueueWriters::OtherUsers,
    }
}

/// Whether nobody else can write the file or anything beside it, nor put others in their place.
fn is_ours_alone(path: &str, uid: u32) -> bool {
    const OTHERS_WRITE: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    let Ok(path) = Path::new(path).canonicalize() else {
        return false;
    };
    let mut above = path.ancestors();
    let closed = |path: Option<&Path>| {
        let meta = path.and_then(|path| path.symlink_metadata().ok());
        meta.is_some_and(|meta| [0, uid].contains(&meta.uid()) && meta.mode() & OTHERS_WRITE == 0)
    };
    let kept = |path: &Path| {
        let sticky =
            |meta: std::fs::Metadata| [0, uid].contains(&meta.uid()) && meta.mode() & STICKY != 0;
        closed(Some(path)) || path.symlink_metadata().is_ok_and(sticky)
    };
    closed(above.next()) && closed(above.next()) && above.all(kept)
}

impl Merged {
    /// Without a policy `run` lends the host's /dev/shm to whoever asks; to a stranger only a policy does.
    fn check_strangers(&self, writers: QueueWriters) -> Result<(), ConfigError> {
        if writers == QueueWriters::OnlyThisUser || self.policy.is_some() {
            // An operator's policy has ceilings for all of these.
            return Ok(());
        }
        if let Some(entry) = self.last(Key::SharedMemory)
            && entry.value == Value::Word("host")
        {
            return Err(ConfigError::QueuedSharedMemory {
                place: entry.place.clone(),
            });
        }
        for (key, most) in MOST_FOR_STRANGERS {
            if let Some(entry) = self.last(key)
                && let Value::Number(number) = entry.value
                && number > most
            {
                return Err(ConfigError::QueuedTooMuch {
                    place: entry.place.clone(),
                    given: key.setting().kind.show(number),
                    most: key.setting().kind.show(most),
                });
            }
        }
        Ok(())
    }
}
