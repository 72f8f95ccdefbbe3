//! The data that callers pass to the queue and get from it.

use std::sync::Arc;

use crate::types::attempt::State;
use crate::types::capacity::Capacity;
use crate::types::manifest::ContentHash;

/// What a request without a CPU limit counts for: it may use all CPUs, and the kernel divides them.
pub(crate) const CPU_DEFAULT_MILLI: u64 = 0;

/// An analysis to be queued. Has no `Debug`, because the request may hold secrets.
#[derive(Clone, Copy)]
pub struct NewSubmission<'a> {
    pub id: &'a str,
    /// `--key`: another submission with the same key returns the first one.
    pub submit_key: Option<&'a str>,
    /// A hash of the request. The same key with another request is an error.
    pub fingerprint: &'a str,
    /// JSON of a [`crate::types::submission::Submission`].
    pub request_json: &'a str,
    pub submitter: &'a str,
    /// Higher priorities run first.
    pub priority: u32,
    /// How often a failed attempt is retried.
    pub retries: u32,
    /// Final states of the program after which it is retried. Lost runners and Fumehood's own errors are always
    /// retried.
    pub retry_on: &'a [State],
    /// What admission counts. `None`: the worker's default applies.
    pub memory_bytes: Option<u64>,
    pub cpu_milli: Option<u64>,
    /// The files that the request refers to, with their hashes.
    pub blobs: &'a [(ContentHash, Arc<Vec<u8>>)],
    /// Whether a finished analysis with this id gets another attempt. This request then replaces the earlier one.
    pub replace: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubmitOutcome {
    Now {
        attempt: u32,
    },
    /// The key was used before, for the same request, which has this id.
    Already {
        id: String,
    },
}

/// A worker's request for work. Has no `Debug`, because it holds keys.
#[derive(Clone, Copy)]
pub struct ClaimRequest<'a> {
    pub host: &'a str,
    pub boot_id: &'a str,
    pub worker: &'a str,
    pub lease_ms: u64,
    /// The worker's free capacity and its total capacity.
    pub free: Capacity,
    pub total: Capacity,
    /// What a request without a memory limit counts for.
    pub memory_default_bytes: u64,
    /// One key for each attempt that may be claimed. It becomes that attempt's key.
    pub keys: &'a [String],
}

/// A claimed attempt, which the caller now runs. Has no `Debug`, because it holds the key and the request may hold
/// secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct GrantedClaim {
    pub id: String,
    pub attempt: u32,
    pub key: String,
    pub request_json: String,
    pub submitter: String,
    /// What admission counted for the attempt.
    pub counted: Capacity,
}

/// An attempt that a runner holds by a lease. Has no `Debug`, because it holds the key.
#[derive(Clone, Copy)]
pub struct LeasedAttempt<'a> {
    pub id: &'a str,
    pub attempt: u32,
    pub key: &'a str,
}

/// The answer to a lease renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenewOutcome {
    Renewed,
    /// Somebody requested cancellation. The lease is renewed.
    CancelRequested {
        by: String,
    },
    /// The runner has lost the attempt: somebody else ended it, or its row is gone.
    Lost,
}

/// The result of a cancel request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CancelOutcome {
    /// The attempt was queued, and has ended now.
    Now { attempt: u32 },
    /// The attempt is running. Its runner is asked to end it.
    Requested { attempt: u32, host: String },
    /// The attempt had already ended.
    AlreadyEnded { attempt: u32, state: State },
}

/// An attempt whose lease has expired by the database's clock. Has no `Debug`, because it holds the key.
#[derive(Clone, PartialEq, Eq)]
pub struct ExpiredLease {
    pub id: String,
    pub attempt: u32,
    pub key: String,
    pub state: State,
    pub host: String,
    /// How long ago the lease expired.
    pub expired_ms: u64,
}

/// A worker, as other machines see it, and as `top --json` prints it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct WorkerRow {
    pub host: String,
    /// The name of the machine, for people.
    pub host_name: String,
    /// The user that the worker runs as and its home, which tell two workers of a host apart.
    pub account: String,
    pub name: String,
    pub pid: u32,
    pub version: String,
    pub slots: u32,
    pub running: u32,
    #[serde(flatten)]
    pub total: Capacity,
    pub draining: bool,
    pub started_ms: i64,
    /// When the worker last reported, by the database's clock. Ignored on write.
    pub seen_ms: i64,
}

/// A queued attempt.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct WaitingAttempt {
    pub id: String,
    pub attempt: u32,
    pub submitter: String,
    pub priority: u32,
    pub queued_ms: i64,
    /// After a failure, the attempt waits until this time.
    pub not_before_ms: Option<i64>,
    #[serde(rename = "asked_memory_bytes")]
    pub memory_bytes: Option<u64>,
    #[serde(rename = "asked_cpu_milli")]
    pub cpu_milli: Option<u64>,
}

/// A running or collecting attempt.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ActiveAttempt {
    pub id: String,
    pub attempt: u32,
    #[serde(rename = "status")]
    pub state: State,
    pub submitter: Option<String>,
    pub host: String,
    pub worker: Option<String>,
    pub created_ms: i64,
    pub started_ms: Option<i64>,
    #[serde(rename = "asked_memory_bytes")]
    pub memory_bytes: Option<u64>,
    #[serde(rename = "asked_cpu_milli")]
    pub cpu_milli: Option<u64>,
    pub cancel_asked: bool,
}

/// The state of the queue at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueOverview {
    pub now_ms: i64,
    pub queued: u64,
    /// How many of the queued attempts are delayed after a failure.
    pub delayed: u64,
    /// Queued attempts in claim order.
    pub next: Vec<WaitingAttempt>,
    pub running: u64,
    pub busy: Vec<ActiveAttempt>,
    pub workers: Vec<WorkerRow>,
}
