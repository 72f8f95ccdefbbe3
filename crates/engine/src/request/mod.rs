//! What a caller asks for. [`RequestFields`] says it in full; the settings make a [`Request`](crate::settings::Request)
//! of them, within the operator's policy, and only that can be run.
//!
//! - `bundle.rs`: the input files that travel with a queued submission.

pub mod bundle;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

pub use sandbox::spec::{LimitName, WorkspaceKind};
use serde::{Deserialize, Serialize};
pub use store::types::analysis_id::{AnalysisId, AnalysisIdError};

/// The command to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `run SCRIPT ARGS`: the script is an input. Its `#!` line names the interpreter, or else its file name
    /// extension does.
    Script {
        script: PathBuf,
        args: Vec<OsString>,
    },
    /// `run -- CMD ARGS`: the words as given.
    Argv(Vec<OsString>),
    /// `shell`: an interactive shell on a pseudo-terminal that belongs to the sandbox.
    Shell,
}

/// A directory to show as `data` or `docs`, named explicitly by somebody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDirectory {
    pub path: PathBuf,
    pub named_by: NamedBy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedBy {
    /// An option, an environment variable, the user's own configuration file or a submission.
    Caller,
    /// The project's own configuration file. It may choose only directories inside the project.
    ProjectFile,
}

/// `--read PATH[:INSIDE]`: a host path to show read-only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRoot {
    pub host: PathBuf,
    pub inside: Option<PathBuf>,
}

/// `--input PATH[:NAME]`: a host path to copy in. `name` is relative to the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    pub host: PathBuf,
    pub name: Option<PathBuf>,
}

/// `--siblings`: whether to copy in the Python modules beside the script that the script imports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SiblingModules {
    Exclude,
    Include,
}

/// The value of a limit, and whether the request sets it explicitly or it is the default. If CPU time, memory, CPUs or
/// processes are set explicitly and cannot be enforced firmly, the run does not start. Every other limit, and every
/// default, may be enforced by a weaker watch; the record then says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedLimit<T> {
    pub value: T,
    pub explicit: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestedLimits {
    pub wall_ms: RequestedLimit<u64>,
    pub cpu_ms: Option<RequestedLimit<u64>>,
    pub idle_ms: Option<RequestedLimit<u64>>,
    pub grace_ms: RequestedLimit<u64>,
    /// `None`: use the default, which depends on the host.
    pub memory_bytes: Option<RequestedLimit<u64>>,
    /// Thousandths of a CPU. `None`: all CPUs that this process may run on.
    pub cpu_milli: Option<RequestedLimit<u64>>,
    pub pids: RequestedLimit<u64>,
    pub open_files: RequestedLimit<u64>,
    pub disk_bytes: RequestedLimit<u64>,
    pub files: RequestedLimit<u64>,
    pub log_bytes: RequestedLimit<u64>,
}

impl<T> RequestedLimit<T> {
    /// A limit that the request sets.
    pub fn asked(value: T) -> RequestedLimit<T> {
        RequestedLimit {
            value,
            explicit: true,
        }
    }

    /// A limit that the request leaves open.
    pub fn default_of(value: T) -> RequestedLimit<T> {
        RequestedLimit {
            value,
            explicit: false,
        }
    }
}

impl Default for RequestedLimits {
    fn default() -> Self {
        let default = RequestedLimit::default_of;
        RequestedLimits {
            wall_ms: default(3_600_000),
            cpu_ms: None,
            idle_ms: None,
            grace_ms: default(10_000),
            memory_bytes: None,
            cpu_milli: None,
            pids: default(1024),
            open_files: default(4096),
            disk_bytes: default(10 << 30),
            files: default(100_000),
            log_bytes: default(10 << 20),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeepPolicy {
    Never,
    OnFailure,
    Always,
}

/// A level of confinement. Later variants are stronger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IsolationLevel {
    /// The results come from outside: `fumehood record` stored them, and Fumehood confined nothing.
    None,
    Landlock,
    Full,
}

impl IsolationLevel {
    pub fn as_str(self) -> &'static str {
        match self {
            IsolationLevel::None => "none",
            IsolationLevel::Landlock => "landlock",
            IsolationLevel::Full => "full",
        }
    }
}

impl From<sandbox::spec::ConfinementLevel> for IsolationLevel {
    fn from(level: sandbox::spec::ConfinementLevel) -> IsolationLevel {
        match level {
            sandbox::spec::ConfinementLevel::Landlock => IsolationLevel::Landlock,
            sandbox::spec::ConfinementLevel::Full => IsolationLevel::Full,
        }
    }
}

/// Where standard input comes from. Inside the sandbox it is always a pipe or /dev/null.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stdin {
    Null,
    File(PathBuf),
    /// `--stdin -`: the caller's own standard input, through a pipe.
    Caller,
}

/// Which outputs to collect, and within which bounds. The run directory keeps these settings, so that whoever
/// finishes the attempt collects the same outputs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectionSettings {
    /// `--output`: globs that select the outputs. If there are none, every file is an output.
    pub outputs: Vec<String>,
    /// `--expect`: globs, each of which must match an output.
    pub expects: Vec<String>,
    pub total_bytes_max: u64,
    pub file_bytes_max: u64,
    pub outputs_max: u64,
    pub depth_max: u32,
    /// Outputs up to this size are also stored in the database.
    pub inline_bytes_max: u64,
    /// The most bytes that the outputs of one attempt may take up in the database.
    pub inline_total_bytes_max: u64,
}

impl Default for CollectionSettings {
    fn default() -> Self {
        let disk_bytes = RequestedLimits::default().disk_bytes.value;
        CollectionSettings {
            outputs: Vec::new(),
            expects: Vec::new(),
            total_bytes_max: disk_bytes,
            file_bytes_max: disk_bytes,
            outputs_max: 10_000,
            depth_max: 32,
            inline_bytes_max: 1 << 20,
            inline_total_bytes_max: 4 << 20,
        }
    }
}

/// What to do if the database already holds an analysis with the requested id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdReuse {
    /// The id was generated for this run, so the database cannot hold it.
    Generated,
    Refuse,
    Replace,
}

/// Who made the request. This decides what the run may be shown: other users than the worker's own may write to a
/// queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestOrigin {
    /// The user who started this process. That user's own rights decide.
    Caller,
    /// Somebody who can write to the queue. Fumehood has laid out the submitted files below `staged`; inputs are
    /// copied only from there.
    Queue {
        staged: PathBuf,
        writers: QueueWriters,
        /// The path of the script when it was submitted, for the record.
        submitted_script: Option<PathBuf>,
    },
}

/// Who can write to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueWriters {
    /// Only the user of this process, who is not root. The kernel's permission checks on this process suffice.
    OnlyThisUser,
    /// Perhaps users with fewer rights than this process. The run is shown only what every user of the host may read,
    /// and what the operator lists.
    OtherUsers,
}

/// One requested analysis, after options, environment and configuration files were merged. Building it does not touch
/// the files that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFields {
    pub id: AnalysisId,
    pub command: Command,
    pub project: PathBuf,
    /// `None`: the project's own `data` directory, if it has one.
    pub data: Option<NamedDirectory>,
    pub docs: Option<NamedDirectory>,
    pub reads: Vec<ReadRoot>,
    pub inputs: Vec<Input>,
    pub siblings: SiblingModules,
    pub runtime: Option<PathBuf>,
    pub env: Vec<(OsString, OsString)>,
    pub stdin: Stdin,
    pub limits: RequestedLimits,
    pub workspace_kind: WorkspaceKind,
    pub workspace_root: PathBuf,
    pub keep: KeepPolicy,
    pub keep_for_ms: u64,
    /// The weakest acceptable level. The run stops rather than start below it.
    pub floor: IsolationLevel,
    /// Use exactly this level, or stop. `None`: use the strongest level that this host supports.
    pub level: Option<sandbox::spec::ConfinementLevel>,
    /// From the operator's policy. The run stops rather than start without one of these layers, at any level.
    pub required_layers: BTreeSet<sandbox::spec::Layer>,
    pub shared_memory: sandbox::spec::SharedMemory,
    pub allow_degraded: BTreeSet<LimitName>,
    /// From the operator's policy. If set, only paths below these directories may be read.
    pub readable_roots: Option<Vec<PathBuf>>,
    pub collection: CollectionSettings,
    pub id_reuse: IdReuse,
    /// Names of environment variables whose values are not stored; a name may end in `*`.
    pub secret_env: Vec<String>,
    pub asked_by: RequestOrigin,
}
