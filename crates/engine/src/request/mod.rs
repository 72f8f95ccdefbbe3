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
        /// The path of the script.
        script: PathBuf,
        /// The arguments after the script.
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
    /// The path of the directory on the host. It may lead through symlinks.
    pub path: PathBuf,
    /// Who chose the path.
    pub named_by: NamedBy,
}

/// Who named a directory. This decides where the directory may be.
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
    /// The path on the host.
    pub host: PathBuf,
    /// The path at which the program sees it; a relative one is below the workspace. `None`: at the path on the host,
    /// as it is given and with symlinks resolved.
    pub inside: Option<PathBuf>,
}

/// `--input PATH[:NAME]`: a host path to copy in. `name` is relative to the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The path on the host.
    pub host: PathBuf,
    /// The name in the workspace. `None`: the last component of `host`.
    pub name: Option<PathBuf>,
}

/// `--siblings`: whether to copy in the Python modules beside the script that the script imports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SiblingModules {
    /// Copy in only what the request names.
    Exclude,
    /// Also copy in those modules.
    Include,
}

/// The value of a limit, and whether the request sets it explicitly or it is the default. If CPU time, memory, CPUs or
/// processes are set explicitly and cannot be enforced firmly, the run does not start. Every other limit, and every
/// default, may be enforced by a weaker watch; the record then says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedLimit<T> {
    /// The value. The name of the field that holds the limit gives the unit.
    pub value: T,
    /// Whether somebody asked for this value. If not, it is the default, or the operator's bound on the default.
    pub explicit: bool,
}

/// The limits that a request asks for. [`Limits`](sandbox::spec::Limits) has those that hold for a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestedLimits {
    /// The time from the start of the program to its stop.
    pub wall_ms: RequestedLimit<u64>,
    /// The CPU time of all processes together. `None`: no limit.
    pub cpu_ms: Option<RequestedLimit<u64>>,
    /// For how long the program may print nothing and use hardly any CPU. `None`: no limit.
    pub idle_ms: Option<RequestedLimit<u64>>,
    /// The time between SIGTERM and SIGKILL when Fumehood stops the run.
    pub grace_ms: RequestedLimit<u64>,
    /// `None`: use the default, which depends on the host.
    pub memory_bytes: Option<RequestedLimit<u64>>,
    /// Thousandths of a CPU. `None`: all CPUs that this process may run on.
    pub cpu_milli: Option<RequestedLimit<u64>>,
    /// Processes, of which each thread is one.
    pub pids: RequestedLimit<u64>,
    /// Open files of each process.
    pub open_files: RequestedLimit<u64>,
    /// Bytes of all files in the workspace and /tmp.
    pub disk_bytes: RequestedLimit<u64>,
    /// Files and directories in the workspace and /tmp.
    pub files: RequestedLimit<u64>,
    /// How many bytes of each output stream are kept.
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

/// Whether the workspace stays after the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeepPolicy {
    /// Remove it.
    Never,
    /// Keep it if the status is not `succeeded`.
    OnFailure,
    /// Keep it.
    Always,
}

/// A level of confinement. Later variants are stronger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IsolationLevel {
    /// The results come from outside: `fumehood record` stored them, and Fumehood confined nothing.
    None,
    /// No namespaces: Landlock and seccomp confine a program that sees the host's own file tree.
    Landlock,
    /// Namespaces and a private root file system, with Landlock and seccomp on top.
    Full,
}

impl IsolationLevel {
    /// The word for this level in documents and in the database.
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
    /// Nothing: /dev/null.
    Null,
    /// This file on the host.
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
    /// The most bytes that all outputs may have together. A file with several names counts once for each.
    pub total_bytes_max: u64,
    /// The most bytes that one output may have.
    pub file_bytes_max: u64,
    /// How many outputs are collected at most.
    pub outputs_max: u64,
    /// How many components the path of an output may have at most.
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
    /// Refuse the run.
    Refuse,
    /// Begin another attempt if the earlier analysis has ended.
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
        /// The directory that holds the submitted files.
        staged: PathBuf,
        /// Who can write to the queue, and so can have made this request.
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
    /// The id of the analysis.
    pub id: AnalysisId,
    /// What to run.
    pub command: Command,
    /// The directory of the project on the host. Of its content, the program sees `data` and `docs`, and what the
    /// request names.
    pub project: PathBuf,
    /// `None`: the project's own `data` directory, if it has one.
    pub data: Option<NamedDirectory>,
    /// As `data`, for the directory `docs`.
    pub docs: Option<NamedDirectory>,
    /// The host paths to show read-only, besides `data` and `docs`.
    pub reads: Vec<ReadRoot>,
    /// The files and directories to copy into the workspace. The script of `command` is copied too.
    pub inputs: Vec<Input>,
    /// Whether to copy in the Python modules beside the script.
    pub siblings: SiblingModules,
    /// `--runtime`: the prefix whose programs take precedence. `None`: the runtime is found from the command.
    pub runtime: Option<PathBuf>,
    /// Names and values of environment variables. They take precedence over those that Fumehood and the runtime set.
    pub env: Vec<(OsString, OsString)>,
    /// Where standard input comes from.
    pub stdin: Stdin,
    /// The limits of the run.
    pub limits: RequestedLimits,
    /// Whether the workspace is on disk or in memory.
    pub workspace_kind: WorkspaceKind,
    /// The directory on the host below which the workspace has its path.
    pub workspace_root: PathBuf,
    /// Whether the workspace stays after the commit.
    pub keep: KeepPolicy,
    /// For how long a workspace that is kept stays, in milliseconds.
    pub keep_for_ms: u64,
    /// The weakest acceptable level. The run stops rather than start below it.
    pub floor: IsolationLevel,
    /// Use exactly this level, or stop. `None`: use the strongest level that this host supports.
    pub level: Option<sandbox::spec::ConfinementLevel>,
    /// From the operator's policy. The run stops rather than start without one of these layers, at any level.
    pub required_layers: BTreeSet<sandbox::spec::Layer>,
    /// Which /dev/shm the program has.
    pub shared_memory: sandbox::spec::SharedMemory,
    /// `--allow-degraded`: the limits that a weaker watch may enforce although they are set explicitly.
    pub allow_degraded: BTreeSet<LimitName>,
    /// From the operator's policy. If set, only paths below these directories may be read.
    pub readable_roots: Option<Vec<PathBuf>>,
    /// Which outputs to collect.
    pub collection: CollectionSettings,
    /// What to do if the database already holds an analysis with this id.
    pub id_reuse: IdReuse,
    /// Names of environment variables whose values are not stored; a name may end in `*`.
    pub secret_env: Vec<String>,
    /// Who made the request.
    pub asked_by: RequestOrigin,
}
