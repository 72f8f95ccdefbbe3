//! What an attempt is, as it is handed to the record.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use crate::types::manifest::{ContentHash, Output, Remark, Remarked};

/// What the two logs are called, in this order.
pub const STREAMS: [&str; 2] = ["stdout", "stderr"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// A word that this Fumehood does not know, as a newer one may have written. It is read and shown, never written.
    Unknown,
}

impl State {
    /// Those that Fumehood writes.
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

/// Who makes an attempt of what. Not for printing: it has the key.
#[derive(Clone, Copy)]
pub struct Begin<'a> {
    pub id: &'a str,
    /// The attempt's token: 128 random bits in hex, known to its runner and run directory alone.
    pub key: &'a str,
    /// Whether an analysis of this id that has ended gets another attempt.
    pub replace: bool,
    pub host: &'a str,
    pub boot_id: &'a str,
    pub submitter: Option<&'a str>,
    pub workspace: Option<&'a str>,
    /// JSON.
    pub provenance: Option<&'a str>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub wall_ms: u64,
    pub cpu_ms: u64,
    pub memory_peak_bytes: Option<u64>,
    pub pids_peak: Option<u64>,
    pub disk_bytes: u64,
    pub files: u64,
    pub oom_kills: u64,
}

/// One standard stream. `head` and `tail` are excerpts; `object` is all that was kept, where that is more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// One of [`STREAMS`].
    pub stream: &'static str,
    pub total_bytes: u64,
    /// Written by the program and kept nowhere.
    pub dropped_bytes: u64,
    pub head: Vec<u8>,
    pub tail: Vec<u8>,
    pub object: Option<ContentHash>,
    pub object_bytes: u64,
    /// How many bytes of the object come before what was dropped.
    pub object_head_bytes: u64,
}

/// Whether the platform's own step is still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostProcess {
    NotAsked,
    Pending,
    Done,
    Failed,
    /// A word that this Fumehood does not write. Whoever lists attempts shows it; one row must not keep the others away.
    Unknown,
}

impl PostProcess {
    pub fn as_str(self) -> Option<&'static str> {
        match self {
            PostProcess::NotAsked => None,
            PostProcess::Pending => Some("pending"),
            PostProcess::Done => Some("done"),
            PostProcess::Failed => Some("failed"),
            PostProcess::Unknown => Some("unknown"),
        }
    }

    pub(crate) fn parse(text: Option<&str>) -> PostProcess {
        let all = [
            PostProcess::NotAsked,
            PostProcess::Pending,
            PostProcess::Done,
            PostProcess::Failed,
        ];
        let known = all.into_iter().find(|p| p.as_str() == text);
        known.unwrap_or(PostProcess::Unknown)
    }
}

/// The bytes of an output that is to be readable from the database itself; `None` for the others.
pub type Content<'a> = dyn FnMut(&Output) -> io::Result<Option<Vec<u8>>> + 'a;

/// Everything about an attempt that has ended. Names ending in `_json` hold JSON text that Fumehood wrote.
pub struct Commit<'a> {
    /// As it was begun; used again if the row is gone.
    pub begin: Begin<'a>,
    pub attempt: u32,
    pub state: State,
    pub reason: &'a str,
    pub message: Option<&'a str>,
    pub started_ms: Option<i64>,
    pub ended_ms: Option<i64>,
    pub usage: Option<Usage>,
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
    /// `result.json`, judged by [`crate::types::result_value::check`]; judged again here, because it must not fail in the transaction.
    pub result: Option<&'a str>,
    pub result_note: Option<&'a str>,
    pub post_process: PostProcess,
    pub outputs: &'a [Output],
    /// The id of the artifact store that holds outputs and whole logs.
    pub artifact_store: &'a str,
    pub remarks: &'a [Remarked],
    pub remark_counts: &'a BTreeMap<Remark, u64>,
    pub logs: &'a [Log],
    /// Asked for one output at a time.
    pub content: &'a mut Content<'a>,
    /// Called when everything is written and nothing is committed.
    pub before_commit: &'a mut dyn FnMut() -> io::Result<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Committed {
    Now,
    /// It was committed before; nothing was changed.
    Already,
    /// Somebody else ended or removed the attempt; this one is stored beside it, under another number.
    Superseded {
        attempt: u32,
    },
    /// Its row was gone (an older copy of the database, or `rm --force`); it was made again, under this number.
    Anew {
        attempt: u32,
    },
}

/// An attempt that somebody else gives up. Not for printing: it has keys.
#[derive(Clone, Copy)]
pub struct Lost<'a> {
    pub id: &'a str,
    pub attempt: u32,
    /// The attempt's own, so that no newer one is meant by mistake.
    pub key: &'a str,
    /// A token of the one who gives it up.
    pub by: &'a str,
    pub reason: &'a str,
    pub message: &'a str,
    /// Whose word it is that its runner is gone.
    pub proof: Proof,
}

/// How it is known that the runner of an attempt is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// A lock, a boot, or the runner itself says so.
    Known,
    /// Only its lease: should that have been renewed meanwhile, nothing is done.
    Lease,
}
