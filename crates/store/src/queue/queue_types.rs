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
    /// The id of the analysis.
    pub id: &'a str,
    /// `--key`: another submission with the same key returns the first one.
    pub submit_key: Option<&'a str>,
    /// A hash of the request. The same key with another request is an error.
    pub fingerprint: &'a str,
    /// JSON of a [`crate::types::submission::Submission`].
    pub request_json: &'a str,
    /// The user who submits. Submitters of one priority take turns.
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
    /// In thousandths of a CPU. `None`: nothing is counted.
    pub cpu_milli: Option<u64>,
    /// The files that the request refers to, with their hashes.
    pub blobs: &'a [(ContentHash, Arc<Vec<u8>>)],
    /// Whether a finished analysis with this id gets another attempt. This request then replaces the earlier one.
    pub replace: bool,
}

/// How a submission ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubmitOutcome {
    /// This call queued the submission.
    Now {
        /// The number of the attempt that waits.
        attempt: u32,
    },
    /// The key was used before, for the same request, which has this id.
    Already {
        /// The id of the analysis that the first submission became.
        id: String,
    },
}

/// A worker's request for work. Has no `Debug`, because it holds keys.
#[derive(Clone, Copy)]
pub struct ClaimRequest<'a> {
    /// The id of the worker's machine.
    pub host: &'a str,
    /// The kernel's id of the current boot.
    pub boot_id: &'a str,
    /// The name of the worker.
    pub worker: &'a str,
    /// How long each claimed attempt is leased, from now on.
    pub lease_ms: u64,
    /// The worker's free capacity.
    pub free: Capacity,
    /// The worker's total capacity.
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
    /// The id of the analysis.
    pub id: String,
    /// The number of the attempt.
    pub attempt: u32,
    /// The key of the request that was given to this attempt.
    pub key: String,
    /// JSON of a [`crate::types::submission::Submission`], unchecked. Empty if the stored text is longer than
    /// allowed.
    pub request_json: String,
    /// The user who submitted it.
    pub submitter: String,
    /// What admission counted for the attempt.
    pub counted: Capacity,
}

/// An attempt that a runner holds by a lease. Has no `Debug`, because it holds the key.
#[derive(Clone, Copy)]
pub struct LeasedAttempt<'a> {
    /// The id of the analysis.
    pub id: &'a str,
    /// The number of the attempt.
    pub attempt: u32,
    /// The attempt's token. See [`crate::NewAttempt`].
    pub key: &'a str,
}

/// The answer to a lease renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenewOutcome {
    /// The lease is renewed.
    Renewed,
    /// Somebody requested cancellation. The lease is renewed.
    CancelRequested {
        /// Who requested it.
        by: String,
    },
    /// The runner has lost the attempt: somebody else ended it, or its row is gone.
    Lost,
}

/// The result of a cancel request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CancelOutcome {
    /// The attempt was queued, and has ended now.
    Now {
        /// The number of the attempt.
        attempt: u32,
    },
    /// The attempt is running. Its runner is asked to end it.
    Requested {
        /// The number of the attempt.
        attempt: u32,
        /// The id of the machine that runs it.
        host: String,
    },
    /// The attempt had already ended.
    AlreadyEnded {
        /// The number of the attempt.
        attempt: u32,
        /// The state in which it ended.
        state: State,
    },
}

/// An attempt whose lease has expired by the database's clock. Has no `Debug`, because it holds the key.
#[derive(Clone, PartialEq, Eq)]
pub struct ExpiredLease {
    /// The id of the analysis.
    pub id: String,
    /// The number of the attempt.
    pub attempt: u32,
    /// The attempt's token. See [`crate::NewAttempt`].
    pub key: String,
    /// Running or collecting.
    pub state: State,
    /// The id of the machine whose runner held the lease.
    pub host: String,
    /// How long ago the lease expired.
    pub expired_ms: u64,
}

/// A worker, as other machines see it, and as `top --json` prints it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct WorkerRow {
    /// The id of the worker's machine.
    pub host: String,
    /// The name of the machine, for people.
    pub host_name: String,
    /// The user that the worker runs as and its home, which tell two workers of a host apart.
    pub account: String,
    /// The name of the worker.
    pub name: String,
    /// Its process id.
    pub pid: u32,
    /// Its version of Fumehood.
    pub version: String,
    /// How many attempts it runs at the same time, at most.
    pub slots: u32,
    /// How many attempts it runs now.
    pub running: u32,
    /// What all its attempts together may ask for.
    #[serde(flatten)]
    pub total: Capacity,
    /// Whether it has stopped claiming attempts.
    pub draining: bool,
    /// When it started, by its own clock.
    pub started_ms: i64,
    /// When the worker last reported, by the database's clock. Ignored on write.
    pub seen_ms: i64,
}

/// A queued attempt.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct WaitingAttempt {
    /// The id of the analysis.
    pub id: String,
    /// The number of the attempt.
    pub attempt: u32,
    /// The user who submitted it.
    pub submitter: String,
    /// Higher priorities run first.
    pub priority: u32,
    /// When it was queued, by the database's clock.
    pub queued_ms: i64,
    /// After a failure, the attempt waits until this time.
    pub not_before_ms: Option<i64>,
    /// The memory that it asks for. `None`: the worker's default applies.
    #[serde(rename = "asked_memory_bytes")]
    pub memory_bytes: Option<u64>,
    /// The CPUs that it asks for, in thousandths. `None`: nothing is counted.
    #[serde(rename = "asked_cpu_milli")]
    pub cpu_milli: Option<u64>,
}

/// A running or collecting attempt.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ActiveAttempt {
    /// The id of the analysis.
    pub id: String,
    /// The number of the attempt.
    pub attempt: u32,
    /// Running or collecting.
    #[serde(rename = "status")]
    pub state: State,
    /// The user who asked for it, if known.
    pub submitter: Option<String>,
    /// The id of the machine that runs it.
    pub host: String,
    /// The worker that claimed it. `None` if `run` began it.
    pub worker: Option<String>,
    /// When it was queued, or begun by `run`, by the database's clock.
    pub created_ms: i64,
    /// When its runner started it, by the database's clock. `None` if that has not happened or `run` began it.
    pub started_ms: Option<i64>,
    /// The memory that it asks for. `None` if it was not submitted or does not say.
    #[serde(rename = "asked_memory_bytes")]
    pub memory_bytes: Option<u64>,
    /// The CPUs that it asks for, in thousandths. `None` if it was not submitted or does not say.
    #[serde(rename = "asked_cpu_milli")]
    pub cpu_milli: Option<u64>,
    /// Whether somebody requested cancellation.
    pub cancel_asked: bool,
}

/// The state of the queue at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueOverview {
    /// The database's clock.
    pub now_ms: i64,
    /// How many attempts are queued.
    pub queued: u64,
    /// How many of the queued attempts are delayed after a failure.
    pub delayed: u64,
    /// Queued attempts in claim order.
    pub next: Vec<WaitingAttempt>,
    /// How many attempts are running or collecting.
    pub running: u64,
    /// Running and collecting attempts, oldest first.
    pub busy: Vec<ActiveAttempt>,
    /// The workers that reported in the last day.
    pub workers: Vec<WorkerRow>,
}
