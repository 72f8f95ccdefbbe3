//! The result of an attempt: the document that `--json` prints and that is committed.
//!
//! The schema is `docs/result-v1.schema.json`. Status and reason come from the outcome of the sandbox: facts from the
//! kernel and Fumehood's own timers. Nothing that the program prints can change them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use sandbox::outcome::{Exit, Outcome, Stop};
use sandbox::spec::{Enforcement, Hardness, Layer, LimitName};
use serde::{Deserialize, Serialize};

use crate::attempt::hints::Hint;
use crate::attempt::log_capture::CapturedLog;
use crate::request::IsolationLevel;
use store::State;
use store::types::analysis_id::AnalysisId;
use store::types::manifest::{
    CollectedOutputs, ContentHash, Output, OutputPath, Remark, RemarkedPath,
};
use store::types::timings::Timings;

/// The value of [`Record::schema`].
pub const SCHEMA: &str = "fumehood.result/1";

/// How an attempt ended. For results that `fumehood record` stored, the person who recorded them says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The program ended with exit code 0, and each pattern of `--expect` matches an output.
    Succeeded,
    /// The program ended with another exit code, a signal killed it, or a pattern of `--expect` matches no output.
    Failed,
    /// The program reached its limit of wall time, CPU time or idle time.
    TimedOut,
    /// The program reached its memory limit.
    OutOfMemory,
    /// The program reached its limit of disk space, file size, files, processes or open files.
    LimitExceeded,
    /// Somebody cancelled the run.
    Cancelled,
    /// Fumehood's error, never the program's.
    Error,
}

impl Status {
    /// The word for this status in documents and in the database.
    pub fn as_str(self) -> &'static str {
        State::from(self).as_str()
    }
}

impl From<Status> for State {
    fn from(status: Status) -> State {
        match status {
            Status::Succeeded => State::Succeeded,
            Status::Failed => State::Failed,
            Status::TimedOut => State::TimedOut,
            Status::OutOfMemory => State::OutOfMemory,
            Status::LimitExceeded => State::LimitExceeded,
            Status::Cancelled => State::Cancelled,
            Status::Error => State::Error,
        }
    }
}

/// Says more than the status. One word each, listed in the schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The program ended by itself.
    Exit,
    /// A signal killed the program.
    Signal,
    /// The program ran for longer than its limit of wall time.
    WallTime,
    /// The program used more CPU time than its limit.
    CpuTime,
    /// The program printed nothing and used hardly any CPU for longer than its limit of idle time.
    IdleTime,
    /// The kernel killed processes of the program at the memory limit.
    OomKilled,
    /// Fumehood measured that the program used more memory than its limit. The kernel killed none of its processes for
    /// that.
    MemoryWatch,
    /// The files of the program took more space than its limit.
    Disk,
    /// SIGXFSZ killed the program: the kernel sends it when a file would grow beyond the disk limit.
    FileSize,
    /// The program had more files than its limit.
    Files,
    /// More processes than allowed, on a host where only the watch counts them.
    Pids,
    /// All processes together had more files open than one run's share of what the host allows.
    OpenFiles,
    /// Somebody cancelled the run.
    Cancelled,
    /// Something outside killed init before it could report the outcome.
    InitLost,
    /// Some process could not be shown dead, and nothing else is known about the end.
    Unkillable,
    /// Fumehood could not start the program. The message names the step that failed.
    NotStarted,
    /// The program was not found, or its interpreter. For a queued request of another user, this may also mean
    /// that no runtime may be shown.
    NotFound,
    /// The program may not be executed, or the kernel refused to execute it.
    NotExecutable,
    /// The runner died before the outcome of the program was known.
    RunnerLost,
    /// The runner could not renew its lease in time and ended the analysis, because another runner may have been given
    /// it.
    LeaseLost,
    /// The runner was told to stop, and nobody had cancelled the analysis.
    RunnerStopped,
    /// The policy of the worker does not allow what was submitted.
    Refused,
    /// No worker is large enough for the analysis.
    DoesNotFit,
    /// The program succeeded, but an output that `--expect` names is missing.
    MissingOutput,
    /// The results were made without a sandbox; `record` stored them.
    Recorded,
}

impl Reason {
    /// The word for this reason in documents and in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Exit => "exit",
            Reason::Signal => "signal",
            Reason::WallTime => "wall_time",
            Reason::CpuTime => "cpu_time",
            Reason::IdleTime => "idle_time",
            Reason::OomKilled => "oom_killed",
            Reason::MemoryWatch => "memory_watch",
            Reason::Disk => "disk",
            Reason::FileSize => "file_size",
            Reason::Files => "files",
            Reason::Pids => "pids",
            Reason::OpenFiles => "open_files",
            Reason::Cancelled => "cancelled",
            Reason::InitLost => "init_lost",
            Reason::Unkillable => "unkillable",
            Reason::NotStarted => "not_started",
            Reason::NotFound => "not_found",
            Reason::NotExecutable => "not_executable",
            Reason::RunnerLost => "runner_lost",
            Reason::LeaseLost => "lease_lost",
            Reason::RunnerStopped => "runner_stopped",
            Reason::Refused => "refused",
            Reason::DoesNotFit => "does_not_fit",
            Reason::MissingOutput => "missing_output",
            Reason::Recorded => "recorded",
        }
    }
}

/// Status and reason, from the outcome of the sandbox.
pub(crate) fn status_of(outcome: &Outcome) -> (Status, Reason) {
    // If some process cannot be shown dead, keep what is known: why the run was stopped, or how its first process
    // ended.
    if !outcome.all_dead && outcome.stop.is_none() && outcome.exit.is_none() {
        return (Status::Error, Reason::Unkillable);
    }
    match outcome.stop {
        Some(Stop::WallTime) => return (Status::TimedOut, Reason::WallTime),
        Some(Stop::CpuTime) => return (Status::TimedOut, Reason::CpuTime),
        Some(Stop::IdleTime) => return (Status::TimedOut, Reason::IdleTime),
        // The cgroup, if there is one, counts the kernel's kills. Without a cgroup the watch kills, and counts none.
        Some(Stop::Memory) if outcome.usage.oom_kills > 0 => {
            return (Status::OutOfMemory, Reason::OomKilled);
        }
        Some(Stop::Memory) => return (Status::OutOfMemory, Reason::MemoryWatch),
        Some(Stop::Disk) => return (Status::LimitExceeded, Reason::Disk),
        Some(Stop::Files) => return (Status::LimitExceeded, Reason::Files),
        Some(Stop::Pids) => return (Status::LimitExceeded, Reason::Pids),
        Some(Stop::OpenFiles) => return (Status::LimitExceeded, Reason::OpenFiles),
        Some(Stop::Cancelled) => return (Status::Cancelled, Reason::Cancelled),
        None => {}
    }
    const SIGKILL: i32 = 9;
    const SIGXCPU: i32 = 24;
    const SIGXFSZ: i32 = 25;
    match outcome.exit {
        Some(Exit::Code(0)) => (Status::Succeeded, Reason::Exit),
        Some(Exit::Code(_)) => (Status::Failed, Reason::Exit),
        // If the kernel killed only a child for memory, a later SIGKILL of the program is not an out-of-memory kill.
        Some(Exit::Signal(SIGKILL))
            if outcome.usage.oom_kills > 0 && outcome.usage.oom_killed_main != Some(false) =>
        {
            (Status::OutOfMemory, Reason::OomKilled)
        }
        Some(Exit::Signal(SIGXFSZ)) => (Status::LimitExceeded, Reason::FileSize),
        Some(Exit::Signal(SIGXCPU)) => (Status::TimedOut, Reason::CpuTime),
        Some(Exit::Signal(_)) => (Status::Failed, Reason::Signal),
        None if outcome.usage.oom_kills > 0 => (Status::OutOfMemory, Reason::OomKilled),
        None => (Status::Error, Reason::InitLost),
    }
}

/// What is kept of one output stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSummary {
    /// Valid UTF-8 as it is; other bytes as `\xNN`, a backslash as `\\`. A gap is marked `\[fumehood: …]`.
    pub text: String,
    /// How many bytes the program printed.
    pub bytes: u64,
    /// Whether bytes were dropped because of the log limit.
    pub truncated: bool,
    /// How many bytes were dropped.
    pub dropped_bytes: u64,
}

impl LogSummary {
    /// Leaves the text out: it may be several times as large as the bytes, so it is made only where a document is
    /// printed.
    pub(crate) fn without_text(captured: &CapturedLog) -> LogSummary {
        LogSummary {
            text: String::new(),
            bytes: captured.total_bytes,
            truncated: captured.truncated,
            dropped_bytes: captured.dropped_bytes,
        }
    }
}

/// How the program was confined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Isolation {
    /// The level of confinement. `None`: nothing was started.
    pub level: Option<IsolationLevel>,
    /// The ABI version of Landlock, if that layer was in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub landlock_abi: Option<i32>,
    /// Each layer that the launcher reported, and what enforces it.
    pub layers: BTreeMap<Layer, String>,
}

/// A limit of the run, and what enforces it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitEntry {
    /// The value in force, requested or default: in milliseconds, bytes, thousandths of a CPU, or a count.
    pub asked: u64,
    /// The mechanism, in words.
    pub enforced_by: String,
    /// Whether the mechanism keeps the program within the limit, or Fumehood measures the use and stops the run.
    pub how_hard: Hardness,
}

/// When the program ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// Unix time in milliseconds.
    pub started_ms: u64,
    /// Unix time in milliseconds. If nothing ran, this and `started_ms` are when the record was made.
    pub ended_ms: u64,
    /// How many milliseconds the program ran, without the time that Fumehood needed before and after. 0 if nothing ran.
    pub wall_ms: u64,
}

/// An output, as documents list it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputSummary {
    /// The path below the workspace.
    pub path: OutputPath,
    /// The length of the file.
    pub bytes: u64,
    /// Guessed from the first bytes and the file's extension. Says nothing about safety.
    pub media_type: String,
    /// The hash of the content.
    pub blake3: ContentHash,
    /// When the file was last changed, as Unix time in milliseconds. The program can set it, so it proves nothing.
    pub modified_ms: i64,
}

impl From<&Output> for OutputSummary {
    fn from(output: &Output) -> OutputSummary {
        OutputSummary {
            path: output.path.clone(),
            bytes: output.bytes,
            media_type: output.media_type.clone(),
            blake3: output.blake3,
            modified_ms: output.modified_ms,
        }
    }
}

/// What collection took of the files that the program left, and what it did not take.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectionSummary {
    /// The program succeeded, and no content that it left is missing.
    pub complete: bool,
    /// The sum of the lengths of all outputs. A file with several names counts once for each.
    pub bytes: u64,
    /// How many files and other entries were refused, each for the reason in its remark.
    pub refused: u64,
    /// What was not taken, or not as it was: the first 1,000.
    pub remarks: Vec<RemarkedPath>,
    /// How many remarks of each kind there are, also of those that `remarks` does not list.
    pub remark_counts: BTreeMap<Remark, u64>,
    /// How many inputs the program did not change. They are not outputs.
    pub inputs_unchanged: u64,
    /// How many files in cache directories were left out.
    pub cached: u64,
    /// How many files match no pattern of `--output`. They are not outputs.
    pub not_asked: u64,
    /// Patterns of `--expect` that no output matches.
    pub missing: Vec<String>,
    /// Why `result.json` is not in the database as JSON.
    pub result_note: Option<String>,
}

impl CollectionSummary {
    pub(crate) fn new(
        collected: &CollectedOutputs,
        missing: &[String],
        result_note: Option<String>,
    ) -> Self {
        CollectionSummary {
            complete: false,
            bytes: collected.bytes,
            refused: collected.refused_count(),
            remarks: collected.remarks.clone(),
            remark_counts: collected.remark_counts.clone(),
            inputs_unchanged: collected.inputs_unchanged,
            cached: collected.cached,
            not_asked: collected.not_asked,
            missing: missing.to_vec(),
            result_note,
        }
    }
}

/// Where the result of an attempt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommitState {
    /// Nothing is recorded, because of `--db none` or because the run did not get that far.
    Unrecorded,
    /// Record and outputs are in the database and the artifact store.
    Committed,
    /// Another process ended this attempt meanwhile. The outputs are stored as another attempt beside it.
    Superseded,
    /// Outputs and record are safe in FUMEHOOD_HOME; the database does not have them.
    Pending,
    /// The outputs are still in the workspace and nowhere else.
    InWorkspace,
    /// The program ran by `run --in`; `post-process` commits it.
    Awaited,
}

/// Where the result of an attempt is, and why it is not in the database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitSummary {
    /// Where the result is.
    pub state: CommitState,
    /// The database that has the record, without a password. `None`: no database has the result.
    pub database: Option<String>,
    /// What prevented the commit.
    pub message: Option<String>,
}

/// How the configured post_process command went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostProcessReport {
    /// Whether the command succeeded.
    pub done: bool,
    /// Why the command failed or could not be run. `None`: it succeeded.
    pub message: Option<String>,
}

/// One attempt's result: what `--json` prints and what is committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// The id of the analysis.
    pub id: AnalysisId,
    /// The number of the attempt. The first is 1.
    pub attempt: u32,
    /// How the attempt ended.
    pub status: Status,
    /// Says more than `status`.
    pub reason: Reason,
    /// What went wrong on Fumehood's side, for status `error`; or which patterns of `--expect` match no output.
    pub message: Option<String>,
    /// The exit code of the program, from 0 to 255. `None`: a signal killed the program, its end is not known,
    /// or it never ran.
    pub exit_code: Option<i32>,
    /// The number of the signal that killed the program. `None`: no signal is known to have
    /// killed it.
    pub signal: Option<i32>,
    /// When the program ran.
    pub times: Times,
    /// The user and system time of all processes, in milliseconds.
    pub cpu_ms: u64,
    /// The most memory that the run used at one time. `None`: it was not measured.
    pub memory_peak_bytes: Option<u64>,
    /// The most processes that the run had at one time. `None`: they were not counted.
    pub pids_peak: Option<u64>,
    /// The most bytes that the workspace and the private /tmp were seen to hold.
    pub disk_bytes: u64,
    /// The most files that they were seen to hold.
    pub files: u64,
    /// How many processes the kernel killed at the run's memory limit. The program may have survived that.
    pub oom_kills: u64,
    /// What the program printed to standard output.
    pub stdout: LogSummary,
    /// What the program printed to standard error.
    pub stderr: LogSummary,
    /// The path of the workspace on the host, which is the same inside. For results that `fumehood record` stored: the
    /// directory that they are from, or `/` if only a file was named.
    pub workspace: PathBuf,
    /// Unix seconds; `null` when the workspace is gone.
    pub kept_until: Option<u64>,
    /// How the program was confined.
    pub isolation: Isolation,
    /// What enforced each limit. Empty if nothing was started; a limit that is off has no entry.
    pub limits: BTreeMap<LimitName, LimitEntry>,
    /// The outputs, sorted by path.
    pub outputs: Vec<OutputSummary>,
    /// What collection took and what it did not take.
    pub collection: CollectionSummary,
    /// Where the result is.
    pub commit: CommitSummary,
    /// `null`: no command is configured, or it has not run yet.
    pub post_process: Option<PostProcessReport>,
    /// At most five guesses why the program failed. They never decide the status.
    pub hints: Vec<Hint>,
    /// What the user should know and is not an error: for example a runtime that was shown, or a limit that is only
    /// watched.
    pub notices: Vec<String>,
    /// Only in the record of a run that was just made. A record that is read later has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

pub(crate) fn limit_entries(list: &[Enforcement]) -> BTreeMap<LimitName, LimitEntry> {
    let entry = |e: &Enforcement| LimitEntry {
        asked: e.asked,
        enforced_by: e.enforced_by.clone(),
        how_hard: e.how_hard,
    };
    list.iter().map(|e| (e.limit, entry(e))).collect()
}

#[cfg(test)]
mod tests {
    use sandbox::outcome::ResourceUsage;

    use super::*;

    fn outcome(exit: Option<Exit>, stop: Option<Stop>, oom_kills: u64) -> Outcome {
        Outcome {
            exit,
            stop,
            usage: ResourceUsage {
                oom_kills,
                ..ResourceUsage::default()
            },
            all_dead: true,
        }
    }

    #[test]
    fn our_stop_outranks_the_exit_code_of_the_program() {
        let graceful = outcome(Some(Exit::Code(0)), Some(Stop::WallTime), 0);
        assert_eq!(status_of(&graceful), (Status::TimedOut, Reason::WallTime));
    }

    #[test]
    fn an_oom_that_the_program_survived_is_not_the_status() {
        assert_eq!(
            status_of(&outcome(Some(Exit::Code(0)), None, 3)),
            (Status::Succeeded, Reason::Exit)
        );
        assert_eq!(
            status_of(&outcome(Some(Exit::Code(1)), None, 3)),
            (Status::Failed, Reason::Exit)
        );
        assert_eq!(
            status_of(&outcome(Some(Exit::Signal(9)), None, 1)),
            (Status::OutOfMemory, Reason::OomKilled)
        );
    }

    #[test]
    fn a_kill_long_after_a_childs_oom_is_a_signal() {
        let mut killed = outcome(Some(Exit::Signal(9)), None, 1);
        killed.usage.oom_killed_main = Some(false);
        assert_eq!(status_of(&killed), (Status::Failed, Reason::Signal));
        killed.usage.oom_killed_main = Some(true);
        assert_eq!(status_of(&killed), (Status::OutOfMemory, Reason::OomKilled));
    }

    #[test]
    fn a_memory_stop_is_an_oom_kill_only_if_the_kernel_killed() {
        let stopped = |kills| outcome(Some(Exit::Signal(9)), Some(Stop::Memory), kills);
        assert_eq!(
            status_of(&stopped(3)),
            (Status::OutOfMemory, Reason::OomKilled)
        );
        assert_eq!(
            status_of(&stopped(0)),
            (Status::OutOfMemory, Reason::MemoryWatch)
        );
    }

    #[test]
    fn a_kill_without_an_oom_is_a_signal() {
        assert_eq!(
            status_of(&outcome(Some(Exit::Signal(9)), None, 0)),
            (Status::Failed, Reason::Signal)
        );
    }

    #[test]
    fn an_unkillable_run_keeps_its_known_outcome_and_is_an_error_without_one() {
        let stuck = |exit, stop| Outcome {
            all_dead: false,
            ..outcome(exit, stop, 0)
        };
        assert_eq!(
            status_of(&stuck(None, Some(Stop::WallTime))),
            (Status::TimedOut, Reason::WallTime)
        );
        assert_eq!(
            status_of(&stuck(Some(Exit::Code(3)), None)),
            (Status::Failed, Reason::Exit)
        );
        assert_eq!(
            status_of(&stuck(None, None)),
            (Status::Error, Reason::Unkillable)
        );
        assert_eq!(
            status_of(&outcome(None, None, 0)),
            (Status::Error, Reason::InitLost)
        );
    }
}
