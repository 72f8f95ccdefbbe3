//! One attempt of an analysis, as callers pass it to the store.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use crate::types::manifest::{ContentHash, Output, Remark, RemarkedPath};

/// The names of the two logs.
pub const STREAMS: [&str; 2] = ["stdout", "stderr"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Queued,
    Running,
    Collecting,
    Succeeded,
    Failed,
    TimedOut,
    OutOfMemory,
    LimitExceeded,
    Cancelled,
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

    pub fn parse(text: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.as_str() == text)
    }

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
    pub id: &'a str,
    /// The attempt's token: 128 random bits in hex. The database, the runner, its run directory and, for a queued
    /// attempt, the worker's order contain it. No view shows it.
    pub key: &'a str,
    /// Whether a finished analysis with this id gets another attempt.
    pub replace: bool,
    pub host: &'a str,
    pub boot_id: &'a str,
    pub submitter: Option<&'a str>,
    pub workspace: Option<&'a str>,
    /// JSON text.
    pub provenance: Option<&'a str>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct AttemptUsage {
    #[serde(skip)]
    pub wall_ms: u64,
    pub cpu_ms: u64,
    pub memory_peak_bytes: Option<u64>,
    pub pids_peak: Option<u64>,
    pub disk_bytes: u64,
    pub files: u64,
    pub oom_kills: u64,
}

/// The log of one standard stream. `head` and `tail` are excerpts; `object` is everything that was kept, if that is
/// more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRow {
    /// One of [`STREAMS`].
    pub stream: &'static str,
    pub total_bytes: u64,
    /// Bytes that the program wrote and that were not kept.
    pub dropped_bytes: u64,
    pub head: Vec<u8>,
    pub tail: Vec<u8>,
    pub object: Option<ContentHash>,
    pub object_bytes: u64,
    /// How many bytes of the object come before the gap that was dropped.
    pub object_head_bytes: u64,
}

/// The state of an attempt's post-process, the command that the site runs after the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostProcessState {
    NotAsked,
    Pending,
    Done,
    Failed,
    /// A state that this version of Fumehood does not know. Listings show it, so that one row does not hide the
    /// others.
    Unknown,
}

impl PostProcessState {
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
    pub attempt: u32,
    pub state: State,
    pub reason: &'a str,
    pub message: Option<&'a str>,
    pub started_ms: Option<i64>,
    pub ended_ms: Option<i64>,
    pub usage: Option<AttemptUsage>,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub isolation_level: Option<&'a str>,
    pub isolation_json: Option<&'a str>,
    pub limits_json: Option<&'a str>,
    pub hints_json: Option<&'a str>,
    pub notices_json: Option<&'a str>,
    pub complete: bool,
    pub output_bytes: u64,
    pub refused_count: u64,
    /// `result.json`, which [`crate::types::result_value::check`] has accepted. The commit checks it again, because a
    /// refusal by the database would undo the whole transaction.
    pub result: Option<&'a str>,
    pub result_note: Option<&'a str>,
    pub post_process: PostProcessState,
    pub outputs: &'a [Output],
    /// The id of the artifact store that holds the outputs and the whole logs.
    pub artifact_store: &'a str,
    pub remarks: &'a [RemarkedPath],
    pub remark_counts: &'a BTreeMap<Remark, u64>,
    pub logs: &'a [LogRow],
    /// Called once for each output.
    pub content: &'a mut OutputContentFn<'a>,
    /// Called after everything is written and before the transaction is committed.
    pub before_commit: &'a mut dyn FnMut() -> io::Result<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    Now,
    /// The attempt was committed before. Nothing was changed.
    Already,
    /// Somebody else ended or removed the attempt. This result is stored beside it, under another number.
    Superseded {
        attempt: u32,
    },
    /// The attempt's row was gone (an older copy of the database, or `rm --force`), so the commit wrote a new row
    /// with this number.
    Recreated {
        attempt: u32,
    },
}

/// An attempt whose runner is gone and that somebody else ends. Has no `Debug`, because it holds keys.
#[derive(Clone, Copy)]
pub struct LostAttempt<'a> {
    pub id: &'a str,
    pub attempt: u32,
    /// The attempt's key, so that the call cannot end a newer attempt by mistake.
    pub key: &'a str,
    /// A token of the caller.
    pub by: &'a str,
    pub reason: &'a str,
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
