//! What the queue holds, as it is handed to the record and back. The statements are in `queue.rs`.

use std::sync::Arc;

use crate::attempts::attempt::State;
use crate::types::manifest::ContentHash;

/// One analysis to be queued. Not for printing: the request may hold secrets.
#[derive(Clone, Copy)]
pub struct Submit<'a> {
    pub id: &'a str,
    /// `--key`: whoever submits with the same key again is told of the first submission.
    pub submit_key: Option<&'a str>,
    /// A hash of what was asked for: the same key with another request is a mistake.
    pub fingerprint: &'a str,
    /// JSON of [`crate::types::submission::Submission`].
    pub request_json: &'a str,
    pub submitter: &'a str,
    /// Higher ones first.
    pub priority: u32,
    /// How often it is tried again.
    pub retries: u32,
    /// Ends of the program's own after which it is tried again; lost runners and our own errors always are.
    pub retry_on: &'a [State],
    /// What admission counts; `None`: the worker's own default.
    pub memory_bytes: Option<u64>,
    pub cpu_milli: Option<u64>,
    /// Files that the request refers to, by hash.
    pub blobs: &'a [(ContentHash, Arc<Vec<u8>>)],
    /// Whether an analysis of this id that has ended gets another attempt, by this request from now on.
    pub replace: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Submitted {
    Now {
        attempt: u32,
    },
    /// The key was used before, for the same request: this is the id that it got.
    Already {
        id: String,
    },
}

/// What may be used, or is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    pub memory_bytes: u64,
    pub cpu_milli: u64,
}

/// Who takes work, and how much of it. Not for printing: it has keys.
#[derive(Clone, Copy)]
pub struct Claim<'a> {
    pub host: &'a str,
    pub boot_id: &'a str,
    pub worker: &'a str,
    pub lease_ms: u64,
    /// What is free now; what the worker has in all.
    pub free: Capacity,
    pub total: Capacity,
    /// What a request counts for that asks for no memory.
    pub memory_default_bytes: u64,
    /// One for each attempt that may be taken; the attempt's key from now on.
    pub keys: &'a [String],
}

/// An attempt that is ours to run. Not for printing: it has the key, and the request may hold secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct Claimed {
    pub id: String,
    pub attempt: u32,
    pub key: String,
    pub request_json: String,
    pub submitter: String,
    /// As admission counted it.
    pub counted: Capacity,
}

/// The attempt that a runner holds. Not for printing: it has the key.
#[derive(Clone, Copy)]
pub struct Held<'a> {
    pub id: &'a str,
    pub attempt: u32,
    pub key: &'a str,
}

/// What a runner learns when it renews its lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renewed {
    Held,
    /// Somebody wants it cancelled; who.
    CancelAsked {
        by: String,
    },
    /// It is not this runner's any more: somebody else ended it, or it is gone.
    Lost,
}

/// What came of the wish to cancel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// It was still queued, and has ended now.
    Now { attempt: u32 },
    /// Its runner is told.
    Asked { attempt: u32, host: String },
    /// It had ended before.
    Ended { attempt: u32, state: State },
}

/// An attempt whose lease is over by the database's clock. Not for printing: it has the key.
#[derive(Clone, PartialEq, Eq)]
pub struct Expired {
    pub id: String,
    pub attempt: u32,
    pub key: String,
    pub state: State,
    pub host: String,
    /// For how long.
    pub expired_ms: u64,
}

/// A worker as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worker {
    pub host: String,
    /// The user it runs as, and its home: two of a host are told apart by it.
    pub account: String,
    pub name: String,
    /// The machine's name, for people.
    pub host_name: String,
    pub pid: u32,
    pub version: String,
    pub slots: u32,
    pub total: Capacity,
    pub running: u32,
    pub draining: bool,
    pub started_ms: i64,
    /// When it last told of itself, by the database's clock; ignored when written.
    pub seen_ms: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    Submitted,
    Claimed,
    Started,
    Ended,
    Committed,
    Cancelled,
    Retried,
    Parked,
}

impl Happened {
    pub const ALL: [Happened; 8] = [
        Happened::Submitted,
        Happened::Claimed,
        Happened::Started,
        Happened::Ended,
        Happened::Committed,
        Happened::Cancelled,
        Happened::Retried,
        Happened::Parked,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Happened::Submitted => "submitted",
            Happened::Claimed => "claimed",
            Happened::Started => "started",
            Happened::Ended => "ended",
            Happened::Committed => "committed",
            Happened::Cancelled => "cancelled",
            Happened::Retried => "retried",
            Happened::Parked => "parked",
        }
    }
}

/// One line of an analysis's story. Words as text: a newer Fumehood may know more of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub attempt: u32,
    pub ms: i64,
    pub event: String,
    pub reason: Option<String>,
    /// Who did it: a user, a worker, a runner.
    pub by: Option<String>,
}

/// One that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    pub id: String,
    pub attempt: u32,
    pub submitter: String,
    pub priority: u32,
    pub queued_ms: i64,
    /// Not before this time, after a failure.
    pub not_before_ms: Option<i64>,
    pub memory_bytes: Option<u64>,
    pub cpu_milli: Option<u64>,
}

/// One that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Busy {
    pub id: String,
    pub attempt: u32,
    pub state: State,
    pub submitter: Option<String>,
    pub host: String,
    pub worker: Option<String>,
    pub created_ms: i64,
    pub started_ms: Option<i64>,
    pub memory_bytes: Option<u64>,
    pub cpu_milli: Option<u64>,
    pub cancel_asked: bool,
}

/// The queue at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overview {
    pub now_ms: i64,
    pub queued: u64,
    /// Of these, waiting for their time after a failure.
    pub delayed: u64,
    /// In the order in which they would be taken.
    pub next: Vec<Waiting>,
    pub running: u64,
    pub busy: Vec<Busy>,
    pub workers: Vec<Worker>,
}
