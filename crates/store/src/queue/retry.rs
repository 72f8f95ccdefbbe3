//! Decides whether an ended attempt is retried, and queues retries.

use crate::Store;
use crate::analyses::analysis_row::{allocate_attempt_number, latest_attempt, lock_analysis};
use crate::analyses::events::{self, EventKind, EventRecord};
use crate::analyses::secrets::{erase_secrets, restore_secrets};
use crate::database::connection::{Connection, TransactionKind};
use crate::database::error::StoreError;
use crate::database::value::{Row, from_row, values};
use crate::queue::queue_row::{NewQueueRow, QueuedAttempt, enqueue};
use crate::types::attempt::State;
use crate::types::random_hex::random_hex;

/// The pause before the first retry. Each pause is twice the one before.
const RETRY_PAUSE_MS: u64 = 2_000;
const RETRY_PAUSE_MS_MAX: u64 = 300_000;
/// An error with one of these reasons would happen again. What makes a run `unkillable` is the program's doing.
const REASONS_NOT_RETRIED: [&str; 5] = [
    "not_found",
    "not_executable",
    "refused",
    "does_not_fit",
    "unkillable",
];
/// An attempt that became final in this transaction.
pub(crate) struct AttemptEnd<'a> {
    pub id: &'a str,
    pub attempt: u32,
    pub state: State,
    pub reason: &'a str,
}

/// The columns of the submission that a retry needs.
struct SubmissionRow {
    submitter: String,
    priority: u32,
    retries: u32,
    retry_on: String,
    memory_bytes: Option<u64>,
    cpu_milli: Option<u64>,
}

/// How often an attempt may still be retried.
pub(crate) enum RetryBudget {
    /// The attempt did not come from the queue.
    NotQueued,
    /// Somebody cancelled the attempt.
    Cancelled,
    Retries(i64),
}

impl RetryBudget {
    /// Reads `retries_left` and `cancel_ms`. `retries_left` is NULL if the attempt did not come from the queue.
    pub fn read(row: &mut Row, what: &'static str) -> Result<RetryBudget, StoreError> {
        Ok(match (row.maybe_int(what)?, row.maybe_int(what)?) {
            (Some(retries_left), None) => RetryBudget::Retries(retries_left),
            (Some(_), Some(_)) => RetryBudget::Cancelled,
            (None, _) => RetryBudget::NotQueued,
        })
    }
}

pub(crate) fn read_retry_budget(
    db: &mut Connection,
    end: &AttemptEnd,
) -> Result<RetryBudget, StoreError> {
    let what = "look whether it is tried again";
    let sql = "SELECT retries_left, cancel_ms FROM attempts WHERE id = $1 AND attempt = $2";
    let of = values![end.id, end.attempt];
    let row = db.query_one(what, sql, &of)?;
    row.map_or(Ok(RetryBudget::NotQueued), |mut row| {
        RetryBudget::read(&mut row, what)
    })
}

/// Queues a retry if one is due, and otherwise erases the secrets. Runs in the transaction that ended the attempt, so
/// that no crash loses the retry. The analysis is locked.
pub(crate) fn retry_or_finish(
    db: &mut Connection,
    end: &AttemptEnd,
    budget: &RetryBudget,
) -> Result<(), StoreError> {
    match *budget {
        RetryBudget::NotQueued => return Ok(()),
        RetryBudget::Cancelled => {}
        RetryBudget::Retries(retries_left) => queue_retry_if_allowed(db, end, retries_left)?,
    }
    erase_secrets(db, end.id)
}

fn queue_retry_if_allowed(
    db: &mut Connection,
    end: &AttemptEnd,
    retries_left: i64,
) -> Result<(), StoreError> {
    // If the submission cannot be read or has no next number, do not retry. The end of the attempt must be committed
    // in any case.
    let Some(submitted) = read_submission(db, end.id).or_else(bad_value_as_none)? else {
        return Ok(());
    };
    let left = u32::try_from(retries_left).unwrap_or(0);
    let again = match end.state {
        State::Error => !REASONS_NOT_RETRIED.contains(&end.reason),
        state => submitted.retry_on.split(',').any(|s| s == state.as_str()),
    };
    match left.checked_sub(1) {
        Some(retries_left) if again && has_next_number(db, end.id)? => {
            let tried = submitted.retries.saturating_sub(left);
            let pause = pause_ms(tried, end.id, end.attempt);
            let event = EventRecord::new(EventKind::Retried, Some(end.reason), None);
            let number = queue_next_attempt(db, end.id, &submitted, retries_left, Some(pause))?;
            events::record_event(db, end.id, number, &event)
        }
        // There is no retry, and Fumehood, not the program, caused the error: note that a person has to act.
        _ if end.state == State::Error => {
            let event = EventRecord::new(EventKind::Parked, Some(end.reason), None);
            events::record_event(db, end.id, end.attempt, &event)
        }
        _ => Ok(()),
    }
}

/// Treats a value that Fumehood would not write as missing.
fn bad_value_as_none(error: StoreError) -> Result<Option<SubmissionRow>, StoreError> {
    match error {
        StoreError::BadValue { .. } => Ok(None),
        e => Err(e),
    }
}

fn has_next_number(db: &mut Connection, id: &str) -> Result<bool, StoreError> {
    let what = "look for the last attempt's number";
    let sql = "SELECT attempt_last BETWEEN 0 AND 4294967294 FROM analyses WHERE id = $1";
    let row = db.query_one(what, sql, &values![id])?;
    row.map_or(Ok(false), |mut row| row.bool(what))
}

/// The pause doubles with each retry. It also varies by id, so that attempts that failed together do not start
/// together.
fn pause_ms(tried: u32, id: &str, attempt: u32) -> i64 {
    let pause = RETRY_PAUSE_MS
        .saturating_mul(1_u64.checked_shl(tried).unwrap_or(u64::MAX))
        .min(RETRY_PAUSE_MS_MAX);
    let hash = blake3::Hasher::new()
        .update(id.as_bytes())
        .update(&attempt.to_le_bytes())
        .finalize();
    let noise = hash
        .as_bytes()
        .iter()
        .take(4)
        .fold(0_u64, |n, b| n << 8 | u64::from(*b));
    i64::try_from(pause + noise % (pause / 4 + 1)).unwrap_or(i64::MAX)
}

fn read_submission(db: &mut Connection, id: &str) -> Result<Option<SubmissionRow>, StoreError> {
    let what = "look for the submission";
    let sql = "SELECT submitter, priority, retries, retry_on, memory_bytes, cpu_milli FROM submissions WHERE id = $1";
    db.fetch_one(what, sql, &values![id])
}

/// Queues the next attempt, at once or after a pause. Returns its number.
fn queue_next_attempt(
    db: &mut Connection,
    id: &str,
    submitted: &SubmissionRow,
    retries_left: u32,
    pause_ms: Option<i64>,
) -> Result<u32, StoreError> {
    let attempt = allocate_attempt_number(db, id)?;
    let now = db.now_ms()?;
    let entry = NewQueueRow {
        id,
        attempt,
        submitter: &submitted.submitter,
        priority: submitted.priority,
        now,
        not_before_ms: pause_ms.map(|pause| now.saturating_add(pause)),
        memory_bytes: submitted.memory_bytes,
        cpu_milli: submitted.cpu_milli,
    };
    let queued = QueuedAttempt {
        retries_left,
        key: random_hex().map_err(StoreError::Runtime)?,
    };
    enqueue(db, &entry, &queued)?;
    Ok(attempt)
}

impl Store {
    /// Queues another attempt of a finished analysis, with the request that was submitted. Returns its number.
    ///
    /// The values of secret variables were erased when the last attempt ended, so the caller must give them again in
    /// `secrets`.
    pub fn retry(
        &mut self,
        id: &str,
        by: &str,
        secrets: &[(String, String)],
    ) -> Result<u32, StoreError> {
        let what = "try the analysis again";
        self.db.transaction(what, TransactionKind::Write, |db| {
            lock_analysis(db, id)?;
            let found = latest_attempt(db, id)?;
            if !found.state.is_final() {
                return Err(StoreError::NotEnded {
                    id: id.to_owned(),
                    attempt: found.attempt,
                    state: found.state,
                });
            }
            let Some(submitted) = read_submission(db, id)? else {
                return Err(StoreError::NeverSubmitted { id: id.to_owned() });
            };
            restore_secrets(db, id, secrets)?;
            let number = queue_next_attempt(db, id, &submitted, submitted.retries, None)?;
            let event = EventRecord::new(EventKind::Retried, None, Some(by));
            events::record_event(db, id, number, &event)?;
            Ok(number)
        })
    }
}

from_row!(SubmissionRow: submitter, priority, retries, retry_on, memory_bytes, cpu_milli);
