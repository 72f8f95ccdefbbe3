//! The settings of a worker, and the request that it makes from a submission: the same that `run` would make, under the
//! worker's own policy.
//!
//! Whoever can write to the database can write a submission by hand, against every rule that the client keeps. So the
//! table of settings checks each value again, and a submission gets nothing of the worker's environment: no project
//! file, none of the worker's variables by name, no path of the worker's to copy from.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::request::bundle;
use crate::request::{
    Command, IdReuse, Input, IsolationLevel, QueueWriters, RequestFields, RequestOrigin,
    RequestedLimit, Stdin,
};
use store::types::submission::{Submission, SubmittedCommand, SubmittedSetting as QueuedSetting};

use super::database_url::sqlite_path;
use super::entries::{self, SettingEntry, SettingError, SettingOrigin, SettingPlace, SettingValue};
use super::error::ConfigError;
use super::merged::{MergedSettings, ProjectFile};
use super::record::{DbChoice, RecordSettings};
use super::request::Request;
use super::sources::Sources;
use super::suggestion::{excerpt, nearest};
use super::table::{GivenSettings, Key, PlaceRule, SETTINGS, Setting, SettingKind};

/// The settings that the worker's own files and variables decide. A floor and names of secret variables only add to
/// what was submitted.
const WORKER_SETTINGS: [Key; 7] = [
    Key::WorkspaceRoot,
    Key::Db,
    Key::Artifacts,
    Key::StoreQuota,
    Key::FreeReserve,
    Key::SecretEnv,
    Key::Isolation,
];

/// Settings that take memory of the runner, which no limit counts, or that outlive the run. Other users get at most
/// these defaults, unless a policy says otherwise.
const OTHER_USERS_MAX: [(Key, u64); 4] = [
    (Key::LogLimit, 10 << 20),
    (Key::MaxOutputs, 10_000),
    (Key::InlineMax, 1 << 20),
    (Key::KeepFor, 24 * 3600 * 1000),
];

/// What a worker decides about every submission that it runs, from its own options, variables and files and the policy.
/// It is resolved once, before any submission is read.
pub struct WorkerSettings {
    /// Where the worker's queue and results are.
    pub record: RecordSettings,
    /// The policy, and the entries of [`WORKER_SETTINGS`].
    merged: MergedSettings,
    writers: QueueWriters,
}

/// What a worker has reserved for an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReservedCapacity {
    /// The memory that the attempt counts for.
    pub memory_bytes: u64,
    /// Thousandths of a CPU that the attempt counts for.
    pub cpu_milli: u64,
    /// The CPUs for a request that asks for no number of them: all that the worker has.
    pub cpu_milli_max: u64,
}

impl WorkerSettings {
    /// `given` holds the options about the record from the worker's command line.
    pub fn read(given: GivenSettings, sources: &Sources) -> Result<WorkerSettings, ConfigError> {
        let mut merged = MergedSettings::read(given, sources, ProjectFile::Ignored)?;
        let db = merged.db(sources)?;
        let writers = writers(db.as_ref(), sources.uid);
        let record = merged.record(db)?;
        merged
            .entries
            .retain(|entry| WORKER_SETTINGS.contains(&entry.place.setting.key));
        Ok(WorkerSettings {
            record,
            merged,
            writers,
        })
    }

    /// Makes the request of a submission whose files are staged in `staged`. Reads nothing of this process and no file.
    pub(crate) fn request(
        &self,
        submission: &Submission,
        staged: &Path,
    ) -> Result<Request, ConfigError> {
        submission.check().map_err(ConfigError::Submission)?;
        let mut merged = self.merged.clone();
        for (name, value) in &submission.settings {
            merged.entries.push(entry(name, value)?);
        }
        let inputs = staged.join(bundle::INPUTS);
        // A submission without a project has only what came with it. The inputs directory contains no data/ or docs/
        // to show.
        merged.project = merged.path(Key::Project).unwrap_or_else(|| inputs.clone());
        merged.check_other_users(self.writers)?;
        let (command, submitted_script) = match &submission.command {
            SubmittedCommand::Script { name, args, from } => {
                let script = inputs.join(name);
                let args = args.iter().map(OsString::from).collect();
                (Command::Script { script, args }, Some(from.clone()))
            }
            SubmittedCommand::Argv(words) => {
                let words = words.iter().map(OsString::from).collect();
                (Command::Argv(words), None)
            }
        };
        // No variable is passed on by name, so none is needed here.
        let env = BTreeMap::new();
        let mut fields = merged.request_fields(command, Some(&submission.id), &env)?;
        // Level `landlock` tells a program more about the machine. A caller who types a request accepts that. For
        // submissions of other users the operator must accept it, by a policy or by the worker's own `isolation`.
        let has_floor = self.merged.policy.is_some() || self.merged.last(Key::Isolation).is_some();
        if self.writers == QueueWriters::OtherUsers && !has_floor {
            fields.floor = IsolationLevel::Full;
        }
        // The attempt has its row, so no earlier analysis is looked up.
        fields.id_reuse = IdReuse::Generated;
        fields.inputs = top_level_inputs(submission, &inputs);
        fields.stdin = match submission.stdin {
            Some(_) => Stdin::File(staged.join(bundle::STDIN)),
            None => Stdin::Null,
        };
        fields.asked_by = RequestOrigin::Queue {
            staged: staged.to_owned(),
            writers: self.writers,
            submitted_script,
        };
        Ok(Request::within_policy(fields))
    }
}

impl Request {
    /// Bounds memory and CPUs by what the worker has reserved. The worker read that from columns of the queue, so a
    /// request that asks for more is refused. A limit that the request leaves open becomes what is reserved for it.
    pub(crate) fn within_reservation(
        &self,
        reserved: ReservedCapacity,
    ) -> Result<Request, ConfigError> {
        let bound =
            |limit: Option<RequestedLimit<u64>>, asked_max: u64, default_max: u64| match limit
                .filter(|limit| limit.explicit)
            {
                Some(asked) if asked.value > asked_max => Err(ConfigError::OverReservation),
                Some(asked) => Ok(Some(asked)),
                None => {
                    let value = limit.map_or(default_max, |limit| limit.value.min(default_max));
                    Ok(Some(RequestedLimit::default_of(value)))
                }
            };
        let (memory, cpus) = (reserved.memory_bytes, reserved.cpu_milli);
        let mut fields = RequestFields::clone(self);
        let limits = &mut fields.limits;
        limits.memory_bytes = bound(limits.memory_bytes, memory, memory)?;
        limits.cpu_milli = bound(limits.cpu_milli, cpus, reserved.cpu_milli_max)?;
        Ok(Request::within_policy(fields))
    }
}

/// Returns the top-level inputs without the script, which is copied separately.
fn top_level_inputs(submission: &Submission, inputs: &Path) -> Vec<Input> {
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

fn entry(name: &str, value: &QueuedSetting) -> Result<SettingEntry, ConfigError> {
    let setting = Setting::named(name).ok_or_else(|| {
        let names = SETTINGS
            .iter()
            .filter(|setting| setting.queue == PlaceRule::Yes);
        ConfigError::UnknownQueued {
            name: excerpt(name),
            nearest: nearest(name, names.map(|setting| setting.name)).map(str::to_owned),
        }
    })?;
    let place = SettingPlace {
        setting,
        origin: SettingOrigin::Queue,
    };
    entries::check_allowed(setting.queue, &place)?;
    let entry = SettingEntry::new(place.clone(), words(value, &place)?, Path::new("/"))?;
    match &entry.value {
        // The client stores variables with their values. A name alone would pass on a variable of the worker's.
        SettingValue::List(items) if setting.key == Key::Env => {
            let whole = |item: &OsString| item.as_encoded_bytes().contains(&b'=');
            match items.iter().all(whole) {
                true => Ok(entry),
                false => Err(ConfigError::QueuedEnv { place }),
            }
        }
        SettingValue::Path(_) | SettingValue::List(_) if is_relative(value, setting) => {
            Err(ConfigError::QueuedRelative { place })
        }
        _ => Ok(entry),
    }
}

/// Whether a path is relative. The worker has no directory of the submitter's that it could be relative to.
fn is_relative(value: &QueuedSetting, setting: &Setting) -> bool {
    let relative = |text: &String| !text.starts_with('/');
    match (value, setting.kind) {
        (QueuedSetting::Text(text), SettingKind::Path) => relative(text),
        (QueuedSetting::List(items), _) if setting.key == Key::Read => items.iter().any(relative),
        _ => false,
    }
}

/// Converts a stored value to the words that the option would have, so that the same code checks it. Stored numbers are
/// in the unit of the table.
fn words(value: &QueuedSetting, place: &SettingPlace) -> Result<Vec<OsString>, SettingError> {
    let kind = place.setting.kind;
    let wrong = |expected| SettingError::WrongType {
        place: place.clone(),
        expected,
    };
    let is_number = kind.bounds().is_some();
    match (kind, value) {
        (_, QueuedSetting::Number(number)) if is_number => Ok(vec![kind.exact(*number).into()]),
        (_, QueuedSetting::Off) if is_number => Ok(vec!["off".into()]),
        (SettingKind::Switch, QueuedSetting::Switch(on)) => Ok(vec![on.to_string().into()]),
        (SettingKind::List, QueuedSetting::List(items)) => {
            Ok(items.iter().map(OsString::from).collect())
        }
        (
            SettingKind::Path | SettingKind::Text | SettingKind::Word(_),
            QueuedSetting::Text(text),
        ) => Ok(vec![text.into()]),
        (SettingKind::List, _) => Err(wrong("a list")),
        (SettingKind::Switch, _) => Err(wrong("a switch")),
        _ if is_number => Err(wrong("a number")),
        _ => Err(wrong("a text")),
    }
}

/// Returns who can write to the queue of this worker. For a worker that runs as root the answer is always other users:
/// whoever can write to the queue need not be root.
fn writers(db: Option<&DbChoice>, uid: u32) -> QueueWriters {
    let only_ours = match db {
        _ if uid == 0 => false,
        // The default database is in FUMEHOOD_HOME, which Fumehood refuses to use if others can write to it.
        None => true,
        Some(choice) => sqlite_path(&choice.text).is_some_and(|path| is_ours_alone(path, uid)),
    };
    match only_ours {
        true => QueueWriters::OnlyThisUser,
        false => QueueWriters::OtherUsers,
    }
}

/// Whether nobody else can write the file or the files beside it, or replace them.
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

impl MergedSettings {
    /// Without a policy, `run` grants the host's /dev/shm to any caller. A submission of other users gets it only by a
    /// policy.
    fn check_other_users(&self, writers: QueueWriters) -> Result<(), ConfigError> {
        if writers == QueueWriters::OnlyThisUser || self.policy.is_some() {
            // An operator's policy has ceilings for all of these.
            return Ok(());
        }
        if let Some(entry) = self.last(Key::SharedMemory)
            && entry.value == SettingValue::Word("host")
        {
            return Err(ConfigError::QueuedSharedMemory {
                place: entry.place.clone(),
            });
        }
        for (key, most) in OTHER_USERS_MAX {
            if let Some(entry) = self.last(key)
                && let SettingValue::Number(number) = entry.value
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
