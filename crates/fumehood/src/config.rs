//! What was asked for, from every place, becomes one [`Request`] under the operator's policy.
//!
//! Weakest first: built-in defaults, the user's `config.toml`, the project's `fumehood.toml`, the caller's
//! `FUMEHOOD_*` variables, the options. The strongest place that sets a value wins; lists add up. Then the
//! policy is applied to what came out: a value asked for that goes beyond it is an error that names the
//! policy, a default that does is lowered to it. Nothing weaker than the policy can reach the request,
//! because the request is only ever built from checked values at the end of this file.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::PathBuf;

use engine::collect::GlobError;
use engine::request::{
    AnalysisId, AnalysisIdError, Command, IdReuse, IsolationLevel, LimitName, NamedBy,
    NamedDirectory, Request, RequestOrigin, RequestedLimit, RequestedLimits, SiblingModules, Stdin,
};
use sandbox::spec::{Layer, SharedMemory};
use store::State;
use store::types::submission::SubmissionError;

use crate::cli::args::{ArgsError, RunArgs, ShellArgs};

pub mod file;
pub mod layer;
mod lists;
pub mod policy;
pub mod post_process;
mod queued;
pub mod record;
pub mod settings;
mod submitting;

use file::{FileError, Privacy, Trust};
use layer::{Entry, FileSettings, Origin, Place, SettingError, Value};
use policy::{POLICY_PATH, Policy, PolicyError};
pub use post_process::PostProcess;
pub use queued::queued;
pub use record::{
    DbChoice, RecordError, RecordSettings, handed_in_settings, record_settings, workspace_settings,
};
use settings::Key;
pub use submitting::{Queueing, Submitter, ToSubmit, given_env};

/// The part of the memory default that does not depend on the host.
const MEMORY_DEFAULT_MAX_BYTES: u64 = 4 << 30;
const KEEP_FOR_DEFAULT_MS: u64 = 24 * 3600 * 1000;
const WORKSPACE_ROOT_DEFAULT: &str = "/tmp";
/// The kernel takes no longer string at execve (MAX_ARG_STRLEN).
const ENV_BYTES_MAX: usize = 128 << 10;

/// Everything outside the options that decides about a request, so that nothing here looks at the process.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The whole command line, the program's own name first.
    pub argv: Vec<OsString>,
    pub env: BTreeMap<OsString, OsString>,
    pub cwd: PathBuf,
    pub uid: u32,
    pub user_config: Option<PathBuf>,
    pub policy: PathBuf,
    /// Who must own the policy: root, except in tests that are not root.
    pub policy_owner_uid: u32,
}

/// A request, and what the policy and the caller want beyond it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// A limit in it that nobody asked for is an upper bound: where the default depends on the host
    /// (memory, cpus) the lesser of the two holds.
    pub request: Request,
    /// Layers that the operator requires, whatever the level.
    pub required_layers: BTreeSet<Layer>,
    pub presentation: Presentation,
    pub record: RecordSettings,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Presentation {
    pub json: bool,
    pub quiet: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("find the current directory")]
    CurrentDirectory(#[source] io::Error),
    #[error(transparent)]
    Args(#[from] ArgsError),
    #[error("refuse the configuration file")]
    File(#[source] FileError),
    #[error("refuse to run without the operator's policy")]
    PolicyFile(#[source] FileError),
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Submission(SubmissionError),
    #[error("unknown setting `{name}` of the submission{}", layer::meant(nearest))]
    UnknownQueued {
        name: String,
        nearest: Option<String>,
    },
    #[error("{place} must hold values (K=V): the variables of the worker are not handed on")]
    QueuedEnv { place: Place },
    #[error("{place} must be an absolute path")]
    QueuedRelative { place: Place },
    #[error(
        "{place} is {given}, and this worker, whose queue others can write, allows {most}; its operator can allow more in /etc/fumehood/policy.toml, [ceilings]"
    )]
    QueuedTooMuch {
        place: Place,
        given: String,
        most: String,
    },
    #[error(
        "{place} asks for the host's /dev/shm, which others than the worker's own user get only where its operator's policy \
         grants it (`floor.shared_memory = \"host\"`)"
    )]
    QueuedSharedMemory { place: Place },
    #[error("{place} cannot be submitted: {why}")]
    NotSubmitted { place: Place, why: &'static str },
    #[error(
        "{place}: {given:?} holds a colon, and is not here when it is read again; give PATH:INSIDE"
    )]
    SubmittedColon { place: Place, given: PathBuf },
    #[error("{what} is not UTF-8 text, which a submission must be: {given:?}")]
    SubmittedText { what: &'static str, given: OsString },
    #[error(
        "{place}: {given:?} is no end after which an analysis can be tried again; these are {}",
        submitting::RETRY_ON.map(State::as_str).join(", ")
    )]
    RetryOn { place: Place, given: String },
    #[error(
        "{place} must have from 1 to {} characters, and no control characters",
        submitting::KEY_CHARS_MAX
    )]
    BadKey { place: Place },
    #[error("read --id")]
    Id(#[source] AnalysisIdError),
    #[error("the project {0:?} is not a directory")]
    NoProject(PathBuf),
    #[error(
        "{place}: {given:?} has nothing before or after its last colon; give PATH or PATH:{suffix}"
    )]
    EmptyPart {
        place: Place,
        given: OsString,
        suffix: &'static str,
    },
    #[error("{place}: {given:?} is not an absolute path without `..` outside /proc, /dev and /sys")]
    BadInside { place: Place, given: PathBuf },
    #[error("{place}: {given:?} is not a relative path without `..`")]
    BadName { place: Place, given: PathBuf },
    #[error("{place}: {given:?} is not a variable's name, [A-Za-z_][A-Za-z0-9_]*")]
    EnvName { place: Place, given: OsString },
    #[error("{place}: names that begin with FUMEHOOD_ are reserved, {name:?} too")]
    EnvReserved { place: Place, name: OsString },
    #[error("{place}: {name:?} is longer than {ENV_BYTES_MAX} bytes")]
    EnvTooLong { place: Place, name: OsString },
    #[error("{place}: you have no variable {name:?} to hand on; give a value, {name:?}=…")]
    EnvMissing { place: Place, name: OsString },
    #[error(
        "{place}: the policy {policy:?} does not let {name:?} be handed on; the operator can \
         list it in `env.pass`"
    )]
    EnvNotPassed {
        place: Place,
        name: OsString,
        policy: PathBuf,
    },
    #[error("{place}: {given:?} is neither a variable's name nor the beginning of one and a star")]
    SecretName { place: Place, given: OsString },
    #[error("read the globs of `{name}`")]
    Globs {
        name: &'static str,
        #[source]
        source: GlobError,
    },
    #[error(
        "{place}: there is no limit {given:?}; the limits are {}",
        limit_names()
    )]
    NoSuchLimit { place: Place, given: String },
    #[error(
        "{place}: the policy {policy:?} does not let {} be degraded; the operator can list it in \
         `degraded.allow`",
        limit.as_str()
    )]
    DegradedRefused {
        place: Place,
        limit: LimitName,
        policy: PathBuf,
    },
    #[error("{place} is {given}, above the ceiling of {ceiling} in the policy {policy:?}")]
    OverCeiling {
        place: Place,
        given: String,
        ceiling: String,
        policy: PathBuf,
    },
    #[error(
        "{place} is below the floor `full` in the policy {policy:?}; only the operator can lower it"
    )]
    BelowFloor { place: Place, policy: PathBuf },
    #[error(
        "{place} asks for the host's /dev/shm, and the policy {policy:?} does not grant it (`floor.shared_memory = \"host\"`)"
    )]
    HostSharedMemory { place: Place, policy: PathBuf },
}

impl Sources {
    pub fn from_process() -> Result<Sources, ConfigError> {
        let env: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        Ok(Sources {
            argv: std::env::args_os().collect(),
            cwd: std::env::current_dir().map_err(ConfigError::CurrentDirectory)?,
            uid: rustix::process::geteuid().as_raw(),
            user_config: user_config(&env),
            env,
            policy: PathBuf::from(POLICY_PATH),
            policy_owner_uid: 0,
        })
    }
}

/// `$XDG_CONFIG_HOME/fumehood/config.toml`, or below `~/.config`. The XDG rules say that a path that is not
/// absolute is to be ignored.
fn user_config(env: &BTreeMap<OsString, OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| {
        let path = PathBuf::from(env.get(OsStr::new(name))?);
        path.is_absolute().then_some(path)
    };
    let base = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")))?;
    Some(base.join("fumehood/config.toml"))
}

/// What `fumehood run` was asked for.
pub fn request(args: &RunArgs, sources: &Sources) -> Result<Resolved, ConfigError> {
    let command = match args.command(&sources.argv)? {
        Command::Script { script, args } => Command::Script {
            script: layer::absolute(script.as_os_str(), &sources.cwd),
            args,
        },
        command => command,
    };
    Merged::gather(args.given(), sources, Project::Heard)?.resolve(command, sources)
}

/// What `fumehood shell` was asked for.
pub fn shell_request(args: &ShellArgs, sources: &Sources) -> Result<Resolved, ConfigError> {
    Merged::gather(args.given(), sources, Project::Heard)?.resolve(Command::Shell, sources)
}

/// Whether the project matters, and with it its file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Project {
    Heard,
    Unheard,
}

/// Every entry of every place, weakest place first, and the policy above them.
#[derive(Clone)]
struct Merged {
    project: PathBuf,
    entries: Vec<Entry>,
    policy: Option<Policy>,
    /// Who may read the user's own file.
    user_privacy: Privacy,
    user_post_process: Option<PostProcess>,
}

impl Merged {
    fn gather(
        given: Vec<(Key, Vec<OsString>)>,
        sources: &Sources,
        heard: Project,
    ) -> Result<Merged, ConfigError> {
        let operator = Trust::Operator {
            uid: sources.policy_owner_uid,
        };
        let policy = file::read_trusted(&sources.policy, operator)
            .map_err(ConfigError::PolicyFile)?
            .map(|policy| Policy::parse(&policy.text, &sources.policy))
            .transpose()?;
        let mut strongest = layer::from_variables(&sources.env, &sources.cwd)?;
        strongest.extend(layer::from_flags(given, &sources.cwd)?);
        let (user, user_privacy) = match sources.user_config.clone().map(Origin::UserFile) {
            Some(origin) => read_file(&origin, sources.uid)?,
            None => (FileSettings::default(), Privacy::Shared),
        };
        let mut merged = Merged {
            // Only these two places can name the project, so its file can be found before files are merged.
            project: match last(&strongest, Key::Project).map(|entry| &entry.value) {
                Some(Value::Path(path)) => path.clone(),
                _ => layer::absolute(OsStr::new(""), &sources.cwd),
            },
            entries: user.entries,
            policy,
            user_privacy,
            user_post_process: user.post_process,
        };
        if heard == Project::Heard {
            merged.hear_project(sources.uid)?;
        }
        merged.entries.extend(strongest);
        Ok(merged)
    }

    fn hear_project(&mut self, uid: u32) -> Result<(), ConfigError> {
        // A mistyped project would otherwise be a project without data.
        if !self.project.is_dir() {
            return Err(ConfigError::NoProject(self.project.clone()));
        }
        let origin = Origin::ProjectFile(self.project.join("fumehood.toml"));
        let (settings, _) = read_file(&origin, uid)?;
        self.entries.extend(settings.entries);
        Ok(())
    }

    fn resolve(self, command: Command, sources: &Sources) -> Result<Resolved, ConfigError> {
        let db = match command {
            Command::Shell => Some(DbChoice::nowhere()),
            _ => self.db(sources)?,
        };
        let record = self.record(db)?;
        let limits = self.limits()?;
        let request = Request {
            id: match &record.in_workspace {
                Some(id) => id.clone(),
                None => self.id()?,
            },
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
            env: self.env(&sources.env)?,
            stdin: self.stdin(),
            workspace_kind: self.workspace_kind(),
            workspace_root: self.workspace_root(),
            keep: self.keep(),
            keep_for_ms: self.keep_for_ms()?,
            floor: self.floor()?,
            level: self.level(),
            shared_memory: self.shared_memory()?,
            allow_degraded: self.allow_degraded()?,
            readable_roots: self
                .policy
                .as_ref()
                .and_then(|policy| policy.readable_roots.clone()),
            collection: self.collection(limits.disk_bytes.value)?,
            limits,
            id_reuse: match self.again() {
                // An id that is made up here is nobody else's.
                IdReuse::Refuse
                    if record.in_workspace.is_none() && self.last(Key::Id).is_none() =>
                {
                    IdReuse::Generated
                }
                again => again,
            },
            secret_env: self.secret_env()?,
            asked_by: RequestOrigin::Caller,
        };
        Ok(Resolved {
            request,
            required_layers: self
                .policy
                .as_ref()
                .map(|policy| policy.layers.clone())
                .unwrap_or_default(),
            presentation: Presentation {
                json: self.switch(Key::Json),
                quiet: self.switch(Key::Quiet),
            },
            record,
        })
    }

    fn last(&self, key: Key) -> Option<&Entry> {
        last(&self.entries, key)
    }

    fn path(&self, key: Key) -> Option<PathBuf> {
        match &self.last(key)?.value {
            Value::Path(path) => Some(path.clone()),
            _ => None,
        }
    }

    fn named_directory(&self, key: Key) -> Option<NamedDirectory> {
        let named_by = match self.last(key)?.place.origin {
            Origin::ProjectFile(_) => NamedBy::ProjectFile,
            _ => NamedBy::Caller,
        };
        let path = self.path(key)?;
        Some(NamedDirectory { path, named_by })
    }

    fn workspace_root(&self) -> PathBuf {
        let root = self.path(Key::WorkspaceRoot);
        root.unwrap_or_else(|| PathBuf::from(WORKSPACE_ROOT_DEFAULT))
    }

    fn keep_for_ms(&self) -> Result<u64, ConfigError> {
        Ok(self.limit(Key::KeepFor, KEEP_FOR_DEFAULT_MS)?.value)
    }

    fn word(&self, key: Key) -> Option<&'static str> {
        match self.last(key)?.value {
            Value::Word(word) => Some(word),
            _ => None,
        }
    }

    fn switch(&self, key: Key) -> bool {
        matches!(
            self.last(key),
            Some(Entry {
                value: Value::Switch(true),
                ..
            })
        )
    }

    fn id(&self) -> Result<AnalysisId, ConfigError> {
        match self.last(Key::Id).map(|entry| &entry.value) {
            Some(Value::Text(text)) => {
                AnalysisId::new(&text.to_string_lossy()).map_err(ConfigError::Id)
            }
            _ => Ok(AnalysisId::generate()),
        }
    }

    fn stdin(&self) -> Stdin {
        match self.last(Key::Stdin) {
            Some(Entry {
                value: Value::Text(text),
                ..
            }) if text == "-" => Stdin::Caller,
            Some(Entry {
                value: Value::Text(text),
                base,
                ..
            }) => Stdin::File(layer::absolute(text, base)),
            _ => Stdin::Null,
        }
    }

    fn limits(&self) -> Result<RequestedLimits, ConfigError> {
        let default = RequestedLimits::default();
        Ok(RequestedLimits {
            wall_ms: self.limit(Key::Timeout, default.wall_ms.value)?,
            cpu_ms: self.optional_limit(Key::CpuTime, u64::MAX)?,
            idle_ms: self.optional_limit(Key::IdleTimeout, u64::MAX)?,
            grace_ms: self.limit(Key::Grace, default.grace_ms.value)?,
            memory_bytes: self.optional_limit(Key::Memory, MEMORY_DEFAULT_MAX_BYTES)?,
            cpu_milli: self.optional_limit(Key::Cpus, u64::MAX)?,
            pids: self.limit(Key::Pids, default.pids.value)?,
            open_files: self.limit(Key::OpenFiles, default.open_files.value)?,
            disk_bytes: self.limit(Key::Disk, default.disk_bytes.value)?,
            files: self.limit(Key::Files, default.files.value)?,
            log_bytes: self.limit(Key::LogLimit, default.log_bytes.value)?,
        })
    }

    /// A limit that always holds. A default is not an ask, so one above the ceiling is lowered in silence.
    fn limit(&self, key: Key, default: u64) -> Result<RequestedLimit<u64>, ConfigError> {
        Ok(match self.asked(key)? {
            Some(Value::Number(value)) => RequestedLimit {
                value,
                explicit: true,
            },
            _ => RequestedLimit {
                value: default.min(self.ceiling(key).unwrap_or(u64::MAX)),
                explicit: false,
            },
        })
    }

    /// A limit that is off, or left to the host, unless asked for; under a ceiling it is never off.
    fn optional_limit(
        &self,
        key: Key,
        default_max: u64,
    ) -> Result<Option<RequestedLimit<u64>>, ConfigError> {
        Ok(match (self.asked(key)?, self.ceiling(key)) {
            (Some(Value::Number(value)), _) => Some(RequestedLimit {
                value,
                explicit: true,
            }),
            (_, Some(ceiling)) => Some(RequestedLimit {
                value: ceiling.min(default_max),
                explicit: false,
            }),
            (_, None) => None,
        })
    }

    /// The value asked for, which must keep to the ceiling; `off` keeps to none.
    fn asked(&self, key: Key) -> Result<Option<Value>, ConfigError> {
        let Some(entry) = self.last(key) else {
            return Ok(None);
        };
        let kind = key.setting().kind;
        let over = |given: String, ceiling: u64, policy: &Policy| ConfigError::OverCeiling {
            place: entry.place.clone(),
            given,
            ceiling: kind.show(ceiling),
            policy: policy.path.clone(),
        };
        if let Some((policy, ceiling)) = self
            .policy
            .as_ref()
            .and_then(|p| Some((p, p.ceiling(key)?)))
        {
            match entry.value {
                Value::Number(number) if number > ceiling => {
                    return Err(over(kind.show(number), ceiling, policy));
                }
                Value::Off => return Err(over("off".to_owned(), ceiling, policy)),
                _ => {}
            }
        }
        Ok(Some(entry.value.clone()))
    }

    fn ceiling(&self, key: Key) -> Option<u64> {
        self.policy.as_ref()?.ceiling(key)
    }

    /// Exactly this level, if somebody asked for one; the pipeline holds it against the floor.
    fn level(&self) -> Option<sandbox::spec::ConfinementLevel> {
        Some(match self.last(Key::Level)?.value {
            Value::Word("landlock") => sandbox::spec::ConfinementLevel::Landlock,
            _ => sandbox::spec::ConfinementLevel::Full,
        })
    }

    /// The host's /dev/shm holds what others keep there: under a policy only the operator can open it.
    fn shared_memory(&self) -> Result<SharedMemory, ConfigError> {
        let Some(entry) = self.last(Key::SharedMemory) else {
            return Ok(SharedMemory::Private);
        };
        match (&entry.value, &self.policy) {
            (Value::Word("host"), Some(policy)) if !policy.host_shared_memory => {
                Err(ConfigError::HostSharedMemory {
                    place: entry.place.clone(),
                    policy: policy.path.clone(),
                })
            }
            (Value::Word("host"), _) => Ok(SharedMemory::Host),
            _ => Ok(SharedMemory::Private),
        }
    }

    /// The highest floor that anybody set. Without a policy, the lowest there is: the strongest level that the host
    /// gives is tried first in any case.
    fn floor(&self) -> Result<IsolationLevel, ConfigError> {
        let level = |entry: &Entry| match entry.value {
            Value::Word("landlock") => IsolationLevel::Landlock,
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

    fn allow_degraded(&self) -> Result<BTreeSet<LimitName>, ConfigError> {
        let mut allowed = BTreeSet::new();
        for (entry, item) in self.items(Key::AllowDegraded) {
            let name = item.to_string_lossy();
            let limit = limit_name(&name).ok_or_else(|| ConfigError::NoSuchLimit {
                place: entry.place.clone(),
                given: layer::excerpt(&name),
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

fn last(entries: &[Entry], key: Key) -> Option<&Entry> {
    entries
        .iter()
        .rev()
        .find(|entry| entry.place.setting.key == key)
}

fn read_file(origin: &Origin, uid: u32) -> Result<(FileSettings, Privacy), ConfigError> {
    let nothing = (FileSettings::default(), Privacy::Shared);
    let (Origin::UserFile(path) | Origin::ProjectFile(path)) = origin else {
        return Ok(nothing);
    };
    match file::read_trusted(path, Trust::Caller { uid }).map_err(ConfigError::File)? {
        Some(read) => Ok((layer::from_file(&read.text, origin)?, read.privacy)),
        None => Ok(nothing),
    }
}

fn limit_names() -> String {
    LimitName::ALL.map(LimitName::as_str).join(", ")
}

fn limit_name(name: &str) -> Option<LimitName> {
    LimitName::ALL
        .into_iter()
        .find(|limit| limit.as_str() == name)
}

#[cfg(test)]
mod tests;
