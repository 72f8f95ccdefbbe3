//! One attempt of an analysis, as callers pass it to the store.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use crate::types::manifest::{ContentHash, Output, Remark, RemarkedPath};

/// The names of the two logs.
pub const STREAMS: [&str; 2] = ["stdout", "stderr"];

/// The state of an attempt. The record stores it as a word, [`State::as_str`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Submitted, and not claimed by a worker yet.
    Queued,
    /// Begun by a runner, whose sandbox is being built or whose program runs.
    Running,
    /// The program has ended, and its runner collects the outputs.
    Collecting,
    /// The program ended successfully.
    Succeeded,
    /// The program ended unsuccessfully. The reason says how.
    Failed,
    /// A limit on time stopped the program.
    TimedOut,
    /// The program needed more memory than it may use.
    OutOfMemory,
    /// Another limit stopped the program.
    LimitExceeded,
    /// Somebody cancelled the attempt.
    Cancelled,
    /// Fumehood failed, not the program.
    Error,
    /// A state that this version of Fumehood does not know; a newer version may have written it. Never written.
    Unknown,
}

impl State {
    /// The states that Fumehood writes.
    pub const ALL: [State; 10] = [
        State::Queued,
        State::Running,
        State::Collecting,
        State::Succeeded,
        State::Failed,
        State::TimedOut,
        State::OutOfMemory,
        State::LimitExceeded,
        State::Cancelled,
        State::Error,
    ];

    /// The word that the database and every document use for the state.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Queued => "queued",
            State::Running => "running",
            State::Collecting => "collecting",
            State::Succeeded => "succeeded",
            State::Failed => "failed",
            State::TimedOut => "timed_out",
            State::OutOfMemory => "out_of_memory",
            State::LimitExceeded => "limit_exceeded",
            State::Cancelled => "cancelled",
            State::Error => "error",
            State::Unknown => "unknown",
        }
    }

    /// The state that a word means. `None` if Fumehood writes no such word; `unknown` is not one either.
    pub fn parse(text: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.as_str() == text)
    }

    /// Whether an attempt in this state has ended. False for [`State::Unknown`].
    pub fn is_final(self) -> bool {
        !matches!(
            self,
            State::Queued | State::Running | State::Collecting | State::Unknown
        )
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A new attempt: which analysis, and who runs it. Has no `Debug`, because it holds the key.
#[derive(Clone, Copy)]
pub struct NewAttempt<'a> {
    /// The id of the analysis.
    pub id: &'a str,
    /// The attempt's token: 128 random bits in hex. The database, the runner, its run directory and, for a queued
    /// attempt, the worker's order contain it. No view shows it.
    pub key: &'a str,
    /// Whether a finished analysis with this id gets another attempt.
    pub replace: bool,
    /// The id of the machine that runs the attempt.
    pub host: &'a str,
    /// The id that the kernel gave to the machine's current boot.
    pub boot_id: &'a str,
    /// The user who asked for the attempt. `None` if that is not known.
    pub submitter: Option<&'a str>,
    /// The path of the workspace on the host. `None` if that is not known.
    pub workspace: Option<&'a str>,
    /// JSON text.
    pub provenance: Option<&'a str>,
}

/// What the program used.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct AttemptUsage {
    /// The time by the clock. Not serialized, because the documents have it beside the usage.
    #[serde(skip)]
    pub wall_ms: u64,
    /// The time on processors, of all processes together.
    pub cpu_ms: u64,
    /// The most memory at one time. `None` if it could not be measured.
    pub memory_peak_bytes: Option<u64>,
    /// The most processes at one time. `None` if it could not be measured.
    pub pids_peak: Option<u64>,
    /// The most bytes seen in the workspace.
    pub disk_bytes: u64,
    /// The most files seen in the workspace.
    pub files: u64,
    /// How many processes the kernel killed for want of memory.
    pub oom_kills: u64,
}

/// The log of one standard stream. `head` and `tail` are excerpts; `object` is everything that was kept, if that is
/// more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRow {
    /// One of [`STREAMS`].
    pub stream: &'static str,
    /// How many bytes the program wrote.
    pub total_bytes: u64,
    /// Bytes that the program wrote and that were not kept.
    pub dropped_bytes: u64,
    /// The first bytes that were kept.
    pub head: Vec<u8>,
    /// The last bytes that were kept.
    pub tail: Vec<u8>,
    /// The object that holds every byte that was kept. `None` if `head` and `tail` hold them.
    pub object: Option<ContentHash>,
    /// How many bytes were kept, which is the length of the object. Stored only if there is an object.
    pub object_bytes: u64,
    /// How many bytes of the object come before the gap that was dropped.
    pub object_head_bytes: u64,
}

/// The state of an attempt's post-process, the command that the site runs after the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostProcessState {
    /// No command is set up.
    NotAsked,
    /// The command has not been recorded as ended yet.
    Pending,
    /// The command has succeeded.
    Done,
    /// The command has failed.
    Failed,
    /// A state that this version of Fumehood does not know. Listings show it, so that one row does not hide the
    /// others.
    Unknown,
}

impl PostProcessState {
    /// The word that the database and every document use for the state. `None` for [`PostProcessState::NotAsked`].
    pub fn as_str(self) -> Option<&'static str> {
        match self {
            PostProcessState::NotAsked => None,
            PostProcessState::Pending => Some("pending"),
            PostProcessState::Done => Some("done"),
            PostProcessState::Failed => Some("failed"),
            PostProcessState::Unknown => Some("unknown"),
        }
    }

    pub(crate) fn parse(text: Option<&str>) -> PostProcessState {
        let all = [
            PostProcessState::NotAsked,
            PostProcessState::Pending,
            PostProcessState::Done,
            PostProcessState::Failed,
        ];
        let known = all.into_iter().find(|p| p.as_str() == text);
        known.unwrap_or(PostProcessState::Unknown)
    }
}

/// Returns the bytes of an output that is also stored in the database; `None` for outputs that are only in the
/// artifact store.
pub type OutputContentFn<'a> = dyn FnMut(&Output) -> io::Result<Option<Vec<u8>>> + 'a;

/// Everything about an attempt that has ended. Fields ending in `_json` hold JSON text that Fumehood wrote.
pub struct Commit<'a> {
    /// The values that the attempt was begun with. The commit needs them again if the row is gone.
    pub begin: NewAttempt<'a>,
    /// The number of the attempt.
    pub attempt: u32,
    /// The final state.
    pub state: State,
    /// A word that says more about the state.
    pub reason: &'a str,
    /// A sentence for people, if there is one.
    pub message: Option<&'a str>,
    /// When the program started, by the runner's clock. `None` if it did not run.
    pub started_ms: Option<i64>,
    /// When the attempt ended, by the runner's clock.
    pub ended_ms: Option<i64>,
    /// What the program used. `None` if it did not run.
    pub usage: Option<AttemptUsage>,
    /// The exit status of the program, if it exited.
    pub exit_code: Option<i32>,
    /// The number of the signal that ended the program, if one did.
    pub signal: Option<i32>,
    /// The level of the sandbox, as a word. `None` if none was in force.
    pub isolation_level: Option<&'a str>,
    /// The layers in force.
    pub isolation_json: Option<&'a str>,
    /// Each limit, and what enforced it.
    pub limits_json: Option<&'a str>,
    /// Guesses at why the program failed.
    pub hints_json: Option<&'a str>,
    /// What the user was told.
    pub notices_json: Option<&'a str>,
    /// Whether the program succeeded and Fumehood took everything that it left.
    pub complete: bool,
    /// Sum of the lengths of all outputs.
    pub output_bytes: u64,
    /// How many things in the workspace were not collected.
    pub refused_count: u64,
    /// `result.json`, which [`crate::types::result_value::check`] has accepted. The commit checks it again, because a
    /// refusal by the database would undo the whole transaction.
    pub result: Option<&'a str>,
    /// Why `result.json` is kept only as a file, if it is.
    pub result_note: Option<&'a str>,
    /// Whether the site's command is still to be run.
    pub post_process: PostProcessState,
    /// The collected files.
    pub outputs: &'a [Output],
    /// The id of the artifact store that holds the outputs and the whole logs.
    pub artifact_store: &'a str,
    /// The first remarks on what was not collected or was changed.
    pub remarks: &'a [RemarkedPath],
    /// How many remarks of each kind there are, listed or not.
    pub remark_counts: &'a BTreeMap<Remark, u64>,
    /// The logs of the standard streams.
    pub logs: &'a [LogRow],
    /// Called once for each output.
    pub content: &'a mut OutputContentFn<'a>,
    /// Called after everything is written and before the transaction is committed.
    pub before_commit: &'a mut dyn FnMut() -> io::Result<()>,
}

/// How a commit ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// This call committed the attempt.
    Now,
    /// The attempt was committed before. Nothing was changed.
    Already,
    /// Somebody else ended or removed the attempt. This result is stored beside it, under another number.
    Superseded {
        /// The number under which the result is stored.
        attempt: u32,
    },
    /// The attempt's row was gone (an older copy of the database, or `rm --force`), so the commit wrote a new row
    /// with this number.
    Recreated {
        /// The number of the new row.
        attempt: u32,
    },
}

/// An attempt whose runner is gone and that somebody else ends. Has no `Debug`, because it holds keys.
#[derive(Clone, Copy)]
pub struct LostAttempt<'a> {
    /// The id of the analysis.
    pub id: &'a str,
    /// The number of the attempt.
    pub attempt: u32,
    /// The attempt's key, so that the call cannot end a newer attempt by mistake.
    pub key: &'a str,
    /// A token of the caller.
    pub by: &'a str,
    /// A word that says why the attempt ended.
    pub reason: &'a str,
    /// A sentence for people.
    pub message: &'a str,
    /// How the caller knows that the runner is gone.
    pub proof: LossProof,
}

/// How somebody knows that the runner of an attempt is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossProof {
    /// The run directory's lock is free, the machine was rebooted, or the runner itself says so.
    RunnerGone,
    /// Only the lease has expired. If the runner renews the lease meanwhile, nothing is done.
    LeaseExpired,
}
