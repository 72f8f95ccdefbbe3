//! The request, and those of `fumehood run` and `fumehood shell`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::ops::Deref;

use crate::request::{
    AnalysisId, Command, IdReuse, IsolationLevel, LimitName, NamedBy, NamedDirectory,
    RequestFields, RequestOrigin, SiblingModules, Stdin,
};
use sandbox::spec::SharedMemory;

use super::entries::{self, SettingEntry, SettingOrigin, SettingValue};
use super::error::ConfigError;
use super::merged::{MergedSettings, ProjectFile};
use super::record::{DbChoice, RecordSettings};
use super::sources::Sources;
use super::suggestion::excerpt;
use super::table::{self, GivenSettings, Key};

/// A requested analysis within the operator's policy. Its fields can be read and not changed.
///
/// A limit that nobody asked for is an upper bound: where the default depends on the host (memory, cpus), the lower of
/// the two holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request(RequestFields);

impl Deref for Request {
    type Target = RequestFields;

    fn deref(&self) -> &RequestFields {
        &self.0
    }
}

impl Request {
    /// The caller has applied the policy to each field.
    pub(super) fn within_policy(fields: RequestFields) -> Request {
        Request(fields)
    }

    /// A request that no settings were resolved for.
    #[cfg(test)]
    pub(crate) fn for_tests(fields: RequestFields) -> Request {
        Request(fields)
    }
}

/// A request, and what the policy and the caller ask for besides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// What to run, within the policy.
    pub request: Request,
    /// What to print.
    pub presentation: Presentation,
    /// Where the record goes.
    pub record: RecordSettings,
}

/// How a command reports to the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Presentation {
    /// Whether to print the result as JSON.
    pub json: bool,
    /// Whether to print neither progress nor a summary.
    pub quiet: bool,
}

/// Returns the request of `fumehood run`.
pub fn run_request(
    command: Command,
    given: GivenSettings,
    sources: &Sources,
) -> Result<Resolved, ConfigError> {
    let command = match command {
        Command::Script { script, args } => Command::Script {
            script: entries::absolute(script.as_os_str(), &sources.cwd),
            args,
        },
        command => command,
    };
    MergedSettings::read(given, sources, ProjectFile::Read)?.resolve(command, sources)
}

/// Returns the request of `fumehood shell`. The shell gets the kind of the caller's terminal.
pub fn shell_request(given: GivenSettings, sources: &Sources) -> Result<Resolved, ConfigError> {
    let merged = MergedSettings::read(given, sources, ProjectFile::Read)?;
    let mut resolved = merged.resolve(Command::Shell, sources)?;
    let kind = sources.env.get(OsStr::new("TERM"));
    let kind = kind.cloned().unwrap_or_else(|| "dumb".into());
    resolved.request.0.env.push(("TERM".into(), kind));
    Ok(resolved)
}

impl MergedSettings {
    pub(super) fn resolve(
        &self,
        command: Command,
        sources: &Sources,
    ) -> Result<Resolved, ConfigError> {
        let db = match command {
            Command::Shell => Some(DbChoice::none()),
            _ => self.db(sources)?,
        };
        let record = self.record(db)?;
        let known_id = record.in_workspace.as_ref();
        let fields = self.request_fields(command, known_id, &sources.env)?;
        Ok(Resolved {
            request: Request::within_policy(fields),
            presentation: Presentation {
                json: self.switch(Key::Json),
                quiet: self.switch(Key::Quiet),
            },
            record,
        })
    }

    /// Applies the policy to each field. `known_id` is the id, unless the settings name or generate it; `env` has the
    /// caller's variables, for those that are passed on by name.
    pub(super) fn request_fields(
        &self,
        command: Command,
        known_id: Option<&AnalysisId>,
        env: &BTreeMap<OsString, OsString>,
    ) -> Result<RequestFields, ConfigError> {
        let limits = self.limits()?;
        let policy = self.policy.as_ref();
        Ok(RequestFields {
            id: known_id.map_or_else(|| self.id(), |id| Ok(id.clone()))?,
            command,
            project: self.project.clone(),
            data: self.named_directory(Key::Data),
            docs: self.named_directory(Key::Docs),
            reads: self.reads()?,
            inputs: self.inputs()?,
            siblings: match self.switch(Key::Siblings) {
                true => SiblingModules::Include,
                false => SiblingModules::Exclude,
            },
            runtime: self.path(Key::Runtime),
            env: self.env(env)?,
            stdin: self.stdin(),
            workspace_kind: self.workspace_kind(),
            workspace_root: self.workspace_root(),
            keep: self.keep(),
            keep_for_ms: self.keep_for_ms()?,
            floor: self.floor()?,
            level: self.level(),
            required_layers: policy.map_or_else(BTreeSet::new, |policy| policy.layers.clone()),
            shared_memory: self.shared_memory()?,
            allow_degraded: self.allow_degraded()?,
            readable_roots: policy.and_then(|policy| policy.readable_roots.clone()),
            collection: self.collection(limits.disk_bytes.value)?,
            limits,
            id_reuse: match self.again() {
                // A generated id is new, so skip the lookup of an earlier analysis.
                IdReuse::Refuse if known_id.is_none() && self.last(Key::Id).is_none() => {
                    IdReuse::Generated
                }
                again => again,
            },
            secret_env: self.secret_env()?,
            asked_by: RequestOrigin::Caller,
        })
    }

    pub(super) fn named_directory(&self, key: Key) -> Option<NamedDirectory> {
        let named_by = match self.last(key)?.place.origin {
            SettingOrigin::ProjectFile(_) => NamedBy::ProjectFile,
            _ => NamedBy::Caller,
        };
        let path = self.path(key)?;
        Some(NamedDirectory { path, named_by })
    }

    pub(super) fn id(&self) -> Result<AnalysisId, ConfigError> {
        match self.last(Key::Id).map(|entry| &entry.value) {
            Some(SettingValue::Text(text)) => {
                AnalysisId::new(&text.to_string_lossy()).map_err(ConfigError::Id)
            }
            _ => Ok(AnalysisId::generate()),
        }
    }

    pub(super) fn stdin(&self) -> Stdin {
        match self.last(Key::Stdin) {
            Some(SettingEntry {
                value: SettingValue::Text(text),
                ..
            }) if text == "-" => Stdin::Caller,
            Some(SettingEntry {
                value: SettingValue::Text(text),
                base,
                ..
            }) => Stdin::File(entries::absolute(text, base)),
            _ => Stdin::Null,
        }
    }

    /// Returns the exact level, if somebody asked for one. The pipeline compares it with the floor.
    pub(super) fn level(&self) -> Option<sandbox::spec::ConfinementLevel> {
        Some(match self.last(Key::Level)?.value {
            SettingValue::Word("landlock") => sandbox::spec::ConfinementLevel::Landlock,
            _ => sandbox::spec::ConfinementLevel::Full,
        })
    }

    /// The host's /dev/shm contains files of other users. Under a policy, only the operator can grant it.
    pub(super) fn shared_memory(&self) -> Result<SharedMemory, ConfigError> {
        let Some(entry) = self.last(Key::SharedMemory) else {
            return Ok(SharedMemory::Private);
        };
        match (&entry.value, &self.policy) {
            (SettingValue::Word("host"), Some(policy)) if !policy.host_shared_memory => {
                Err(ConfigError::HostSharedMemory {
                    place: entry.place.clone(),
                    policy: policy.path.clone(),
                })
            }
            (SettingValue::Word("host"), _) => Ok(SharedMemory::Host),
            _ => Ok(SharedMemory::Private),
        }
    }

    /// Returns the highest floor that anybody set. Without a policy the default is the lowest level, because the
    /// launcher tries the strongest level first in any case.
    pub(super) fn floor(&self) -> Result<IsolationLevel, ConfigError> {
        let level = |entry: &SettingEntry| match entry.value {
            SettingValue::Word("landlock") => IsolationLevel::Landlock,
            _ => IsolationLevel::Full,
        };
        let asked = self
            .entries
            .iter()
            .filter(|entry| entry.place.setting.key == Key::Isolation)
            .max_by_key(|entry| level(entry));
        match (asked, &self.policy) {
            (Some(entry), Some(policy)) if level(entry) < policy.floor => {
                Err(ConfigError::BelowFloor {
                    place: entry.place.clone(),
                    policy: policy.path.clone(),
                })
            }
            (Some(entry), _) => Ok(level(entry)),
            (None, Some(policy)) => Ok(policy.floor),
            (None, None) => Ok(IsolationLevel::Landlock),
        }
    }

    pub(super) fn allow_degraded(&self) -> Result<BTreeSet<LimitName>, ConfigError> {
        let mut allowed = BTreeSet::new();
        for (entry, item) in self.items(Key::AllowDegraded) {
            let name = item.to_string_lossy();
            let limit = table::limit_name(&name).ok_or_else(|| ConfigError::NoSuchLimit {
                place: entry.place.clone(),
                given: excerpt(&name),
            })?;
            if let Some(policy) = self
                .policy
                .as_ref()
                .filter(|policy| !policy.allows_degraded(limit))
            {
                return Err(ConfigError::DegradedRefused {
                    place: entry.place.clone(),
                    limit,
                    policy: policy.path.clone(),
                });
            }
            allowed.insert(limit);
        }
        Ok(allowed)
    }
}
