//! Untrusted input becomes a [`Request`]; every bound is applied here.

pub mod bundle;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

pub use sandbox::spec::{LimitName, WorkspaceKind};
use serde::{Deserialize, Serialize};
pub use store::types::analysis_id::{AnalysisId, AnalysisIdError};

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// `run SCRIPT ARGS`: the script is an input; its interpreter comes from `#!`, else its ending.
    Script {
        script: PathBuf,
        args: Vec<OsString>,
    },
    /// `run -- CMD ARGS`: as given.
    Argv(Vec<OsString>),
    /// `shell`: an interactive shell on a terminal of the sandbox's own.
    Shell,
}

/// What is shown as `data` or `docs`, where somebody named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDirectory {
    pub path: PathBuf,
    pub named_by: NamedBy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedBy {
    /// An option, a variable, the user's own configuration or a submission.
    Caller,
    /// The project's own file, which does not decide what is shown outside the project.
    ProjectFile,
}

/// `--read PATH[:INSIDE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRoot {
    pub host: PathBuf,
    pub inside: Option<PathBuf>,
}

/// `--input PATH[:NAME]`; the name is relative to the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    pub host: PathBuf,
    pub name: Option<PathBuf>,
}

/// `--siblings`: whether the modules beside a script come along that its imports name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Siblings {
    Left,
    Brought,
}

/// A limit's value, and whether somebody asked for it or it is our default: a limit that was asked
/// for and cannot be enforced hard stops the run, a default may step down to a watch, said aloud.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked<T> {
    pub value: T,
    pub explicit: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedLimits {
    pub wall_ms: Asked<u64>,
    pub cpu_ms: Option<Asked<u64>>,
    pub idle_ms: Option<Asked<u64>>,
    pub grace_ms: Asked<u64>,
    /// `None`: the default, which depends on the host.
    pub memory_bytes: Option<Asked<u64>>,
    /// Thousandths of a CPU. `None`: the CPUs this process may run on.
    pub cpu_milli: Option<Asked<u64>>,
    pub pids: Asked<u64>,
    pub open_files: Asked<u64>,
    pub disk_bytes: Asked<u64>,
    pub files: Asked<u64>,
    pub log_bytes: Asked<u64>,
}

impl Default for AskedLimits {
    fn default() -> Self {
        fn default(value: u64) -> Asked<u64> {
            Asked {
                value,
                explicit: false,
            }
        }
        AskedLimits {
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
pub enum Keep {
    Never,
    OnFailure,
    Always,
}

/// A level of confinement; later ones are stronger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Not of a run of ours: results that `record` was handed.
    None,
    Landlock,
    Full,
}

impl Level {
    pub fn as_str(self) -> &'static str {
        match self {
            Level::None => "none",
            Level::Landlock => "landlock",
            Level::Full => "full",
        }
    }
}

impl From<sandbox::spec::ConfinementLevel> for Level {
    fn from(level: sandbox::spec::ConfinementLevel) -> Level {
        match level {
            sandbox::spec::ConfinementLevel::Landlock => Level::Landlock,
            sandbox::spec::ConfinementLevel::Full => Level::Full,
        }
    }
}

/// Where standard input comes from. It is always a pipe or /dev/null inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stdin {
    Null,
    File(PathBuf),
    /// `--stdin -`: the caller's own standard input, piped.
    Caller,
}

/// What is taken of what an analysis leaves, and within which bounds. Kept in the run directory, so that whoever finishes
/// the attempt takes the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collection {
    /// `--output`: globs that narrow what is an output; none: everything.
    pub outputs: Vec<String>,
    /// `--expect`: globs that must each match an output.
    pub expects: Vec<String>,
    pub total_bytes_max: u64,
    pub file_bytes_max: u64,
    pub outputs_max: u64,
    pub depth_max: u32,
    /// Content up to this size also goes into the database.
    pub inline_bytes_max: u64,
    /// All content of one attempt in the database.
    pub inline_total_bytes_max: u64,
}

impl Default for Collection {
    fn default() -> Self {
        let disk_bytes = AskedLimits::default().disk_bytes.value;
        Collection {
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

/// Whether an id that is in the database already may be run again, as a new attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// It cannot be there: it was made up for this run.
    New,
    Refused,
    Replace,
}

/// Who asked, and so what may be shown: a queue is written to by others than whoever takes from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asker {
    /// Whoever started this process, whose own rights decide.
    Caller,
    /// Somebody who can write to the queue. What is copied in lies below `staged`, laid out by ourselves.
    Queue {
        staged: PathBuf,
        writers: Writers,
        /// Where the script lay when it was submitted, for the record.
        script_from: Option<PathBuf>,
    },
}

/// Who can write to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// Nobody but this process's own user, who is not root: the kernel's own check of what it may read suffices.
    OnlyUs,
    /// Perhaps people with fewer rights than this process: what not everybody may read is not shown, unless the operator
    /// lists it.
    Others,
}

/// One analysis as asked for, after settings, environment and flags were merged under the
/// operator's policy. Nothing in it has touched the file system yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub id: AnalysisId,
    pub command: Command,
    pub project: PathBuf,
    /// `None`: `data` in the project, if it is there.
    pub data: Option<NamedDirectory>,
    pub docs: Option<NamedDirectory>,
    pub reads: Vec<ReadRoot>,
    pub inputs: Vec<Input>,
    pub siblings: Siblings,
    pub runtime: Option<PathBuf>,
    pub env: Vec<(OsString, OsString)>,
    pub stdin: Stdin,
    pub limits: AskedLimits,
    pub workspace_kind: WorkspaceKind,
    pub workspace_root: PathBuf,
    pub keep: Keep,
    pub keep_for_ms: u64,
    /// The run stops rather than start below this.
    pub floor: Level,
    /// Exactly this level, or none; `None`: the strongest that this host gives.
    pub level: Option<sandbox::spec::ConfinementLevel>,
    pub shared_memory: sandbox::spec::SharedMemory,
    pub allow_degraded: BTreeSet<LimitName>,
    /// From the operator's policy: if set, only paths below these may be read.
    pub readable_roots: Option<Vec<PathBuf>>,
    pub collection: Collection,
    pub again: Again,
    /// Names of variables, or their beginnings and a star, whose values are not stored.
    pub secret_env: Vec<String>,
    pub asked_by: Asker,
}
