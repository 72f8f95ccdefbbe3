//! What comes after an attempt: another one, or none. And the wishes of people: cancel, retry.

use crate::Store;
use crate::attempts::attempt::State;
use crate::attempts::commit::{allocate, lock, notify};
use crate::attempts::events::{self, Told};
use crate::attempts::secrets::{erase_secrets, restore_secrets};
use crate::database::connection::{Connection, Purpose, Row, Value};
use crate::database::error::StoreError;
use crate::database::schema::random_hex;
use crate::queue::claim::{self, Place, Queued, QueuedEnd, small};
use crate::queue::queue_types::{Cancelled, Happened};

/// The first pause before another attempt; each is twice the one before.
const PAUSE_MS: u64 = 2_000;
const PAUSE_MS_MAX: u64 = 300_000;
/// An error for one of these reasons would come again.
const NOT_TRIED_AGAIN: [&str; 4] = ["not_found", "not_executable", "refused", "does_not_fit"];
/// How often a claim can take an attempt from under a wish to cancel it: there is one, and it is running afterwards.
const CLAIMS_MAX: usize = 3;

/// An attempt that has just become final, in this transaction.
pub(crate) struct Ended<'a> {
    pub id: &'a str,
    pub attempt: u32,
    pub state: State,
    pub reason: &'a str,
}

/// What was submitted, as far as another attempt needs it.
struct Submitted {
    submitter: String,
    priority: u32,
    retries: u32,
    retry_on: String,
    memory_bytes: Option<u64>,
    cpu_milli: Option<u64>,
}

/// How often an attempt may still be tried again.
pub(crate) enum Left {
    /// It did not come from the queue.
    NotAsked,
    /// Somebody cancelled it.
    Cancelled,
    Times(i64),
}

impl Left {
    /// From `retries_left` and `cancel_ms`. Without a number it did not come from the queue.
    pub fn read(row: &mut Row, what: &'static str) -> Result<Left, StoreError> {
        Ok(match (row.maybe_int(what)?, row.maybe_int(what)?) {
            (Some(retries_left), None) => Left::Times(retries_left),
            (Some(_), Some(_)) => Left::Cancelled,
            (None, _) => Left::NotAsked,
        })
    }
}

pub(crate) fn left(db: &mut Connection, ended: &Ended) -> Result<Left, StoreError> {
    let what = "look whether it is tried again";
    let sql = "SELECT retries_left, cancel_ms FROM attempts WHERE id = $1 AND attempt = $2";
    let of = [Value::text(ended.id), Value::int(ended.attempt)];
    let row = db.query_one(what, sql, &of)?;
    row.map_or(Ok(Left::NotAsked), |mut row| Left::read(&mut row, what))
}

/// Queues the next attempt if there is to be one. In the transaction that ended the last, so that none is ever lost
/// between them; the analysis is locked.
pub(crate) fn after_end(db: &mut Connection, ended: &Ended, left: &Left) -> Result<(), StoreError> {
    match *left {
        Left::NotAsked => return Ok(()),
        Left::Cancelled => {}
        Left::Times(retries_left) => try_again(db, ended, retries_left)?,
    }
    erase_secrets(db, ended.id)
}

fn try_again(db: &mut Connection, ended: &Ended, retries_left: i64) -> Result<(), StoreError> {
    // What cannot be read of it, or numbered, is not tried again: the end of an attempt must not hang on that.
    let Some(submitted) = submitted(db, ended.id).or_else(unread)? else {
        return Ok(());
    };
    let left = u32::try_from(retries_left).unwrap_or(0);
    let again = match ended.state {
        State::Error => !NOT_TRIED_AGAIN.contains(&ended.reason),
        state => submitted.retry_on.split(',').any(|s| s == state.as_str()),
    };
    match left.checked_sub(1) {
        Some(retries_left) if again && may_be_numbered(db, ended.id)? => {
            let tried = submitted.retries.saturating_sub(left);
            let pause = pause_ms(tried, ended.id, ended.attempt);
            let told = Told {
                happened: Happened::Retried,
                reason: Some(ended.reason),
                by: None,
            };
            let number = another(db, ended.id, &submitted, retries_left, Some(pause))?;
            events::tell(db, ended.id, number, &told)
        }
        // Nobody tries it again by itself, and it was not the program's own doing.
        _ if ended.state == State::Error => {
            let told = Told {
                happened: Happened::Parked,
                reason: Some(ended.reason),
                by: None,
            };
            events::tell(db, ended.id, ended.attempt, &told)
        }
        _ => Ok(()),
    }
}

/// A value that Fumehood does not write is as good as none.
fn unread(error: StoreError) -> Result<Option<Submitted>, StoreError> {
    match error {
        StoreError::BadValue { .. } => Ok(None),
        e => Err(e),
    }
}

fn may_be_numbered(db: &mut Connection, id: &str) -> Result<bool, StoreError> {
    let what = "look for the last attempt's number";
    let sql = "SELECT attempt_last BETWEEN 0 AND 4294967294 FROM analyses WHERE id = $1";
    let row = db.query_one(what, sql, &[Value::text(id)])?;
    row.map_or(Ok(false), |mut row| row.bool(what))
}

/// Longer each time, and not the same for all that failed together.
fn pause_ms(tried: u32, id: &str, attempt: u32) -> i64 {
    let pause = PAUSE_MS
        .saturating_mul(1_u64.checked_shl(tried).unwrap_or(u64::MAX))
        .min(PAUSE_MS_MAX);
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

fn submitted(db: &mut Connection, id: &str) -> Result<Option<Submitted>, StoreError> {
    let what = "look for the submission";
    let sql = "SELECT submitter, priority, retries, retry_on, memory_bytes, cpu_milli FROM submissions WHERE id = $1";
    let read = |mut row: Row| {
        Ok(Submitted {
            submitter: row.text(what)?,
            priority: small(&mut row, what)?,
            retries: small(&mut row, what)?,
            retry_on: row.text(what)?,
            memory_bytes: row.maybe_count(what)?,
            cpu_milli: row.maybe_count(what)?,
        })
    };
    let row = db.query_one(what, sql, &[Value::text(id)])?;
    row.map(read).transpose()
}

/// The next attempt, queued; at once, or after a pause. Its number.
fn another(
    db: &mut Connection,
    id: &str,
    submitted: &Submitted,
    retries_left: u32,
    pause_ms: Option<i64>,
) -> Result<u32, StoreError> {
    let attempt = allocate(db, id)?;
    let now = db.now_ms()?;
    let place = Place {
        id,
        attempt,
        submitter: &submitted.submitter,
        priority: submitted.priority,
        now,
        not_before_ms: pause_ms.map(|pause| now.saturating_add(pause)),
        memory_bytes: submitted.memory_bytes,
        cpu_milli: submitted.cpu_milli,
    };
    let queued = Queued {
        retries_left,
        key: random_hex().map_err(StoreError::Runtime)?,
    };
    claim::enqueue(db, &place, &queued)?;
    Ok(attempt)
}

/// The attempt that a wish is about: the one that has not ended, else the newest that counts.
struct Latest {
    attempt: u32,
    state: State,
    host: String,
}

fn latest(db: &mut Connection, id: &str) -> Result<Latest, StoreError> {
    let what = "look for the attempt";
    let sql = "
        SELECT attempt, state, host FROM attempts WHERE id = $1
        ORDER BY CASE WHEN state IN ('queued', 'running', 'collecting') THEN 0 ELSE 1 END, superseded, attempt DESC
        LIMIT 1";
    let row = db.query_one(what, sql, &[Value::text(id)])?;
    let mut row = row.ok_or_else(|| StoreError::NotFound {
        given: id.to_owned(),
    })?;
    Ok(Latest {
        attempt: row.attempt()?,
        state: row.state()?,
        host: row.text(what)?,
    })
}

impl Store {
    /// Ends what waits, and asks the runner of what runs.
    pub fn cancel(&mut self, id: &str, by: &str) -> Result<Cancelled, StoreError> {
        let what = "cancel the analysis";
        self.db.transaction(what, Purpose::Write, |db| {
            lock(db, id)?;
            for _ in 0..CLAIMS_MAX {
                let found = latest(db, id)?;
                match found.state {
                    State::Queued if cancel_queued(db, id, found.attempt, by)? => {
                        let attempt = found.attempt;
                        return Ok(Cancelled::Now { attempt });
                    }
                    // A claim was quicker, and is through.
                    State::Queued => continue,
                    State::Running | State::Collecting => {
                        ask_to_cancel(db, id, found.attempt, by)?;
                        return Ok(Cancelled::Asked {
                            attempt: found.attempt,
                            host: found.host,
                        });
                    }
                    state => {
                        return Ok(Cancelled::Ended {
                            attempt: found.attempt,
                            state,
                        });
                    }
                }
            }
            Err(StoreError::BadValue {
                what: "the state of a queued attempt",
            })
        })
    }

    /// Another attempt of an analysis that has ended, by the request that it was submitted with. Its number.
    ///
    /// The values of secret variables were erased when it ended; `secrets` has them again.
    pub fn retry(
        &mut self,
        id: &str,
        by: &str,
        secrets: &[(String, String)],
    ) -> Result<u32, StoreError> {
        let what = "try the analysis again";
        self.db.transaction(what, Purpose::Write, |db| {
            lock(db, id)?;
            let found = latest(db, id)?;
            if !found.state.is_final() {
                return Err(StoreError::NotEnded {
                    id: id.to_owned(),
                    attempt: found.attempt,
                    state: found.state,
                });
            }
            let Some(submitted) = submitted(db, id)? else {
                return Err(StoreError::NeverSubmitted { id: id.to_owned() });
            };
            restore_secrets(db, id, secrets)?;
            let number = another(db, id, &submitted, submitted.retries, None)?;
            let told = Told {
                happened: Happened::Retried,
                reason: None,
                by: Some(by),
            };
            events::tell(db, id, number, &told)?;
            Ok(number)
        })
    }
}

fn cancel_queued(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    by: &str,
) -> Result<bool, StoreError> {
    let message = format!("{by} cancelled it before it was started");
    let end = QueuedEnd {
        state: State::Cancelled,
        reason: "cancelled",
        message: &message,
    };
    if !claim::end_queued(db, id, attempt, &end)? {
        return Ok(false);
    }
    note_wish(db, id, attempt, by)?;
    erase_secrets(db, id)?;
    notify(db, id, attempt, State::Cancelled)?;
    Ok(true)
}

fn ask_to_cancel(db: &mut Connection, id: &str, attempt: u32, by: &str) -> Result<(), StoreError> {
    note_wish(db, id, attempt, by)?;
    // Also for a wish that was there before: whoever asks twice may have lost patience with a bell that did not ring.
    claim::notify_queue(db)
}

/// Who wanted it first.
fn note_wish(db: &mut Connection, id: &str, attempt: u32, by: &str) -> Result<(), StoreError> {
    let what = "note the wish to cancel";
    let now = db.now_ms()?;
    let sql = "UPDATE attempts SET cancel_ms = $3, cancel_by = $4
               WHERE id = $1 AND attempt = $2 AND cancel_ms IS NULL";
    let values = [
        Value::text(id),
        Value::int(attempt),
        Value::int(now),
        Value::text(by),
    ];
    if db.execute(what, sql, &values)? == 1 {
        let told = Told {
            happened: Happened::Cancelled,
            reason: None,
            by: Some(by),
        };
        events::tell(db, id, attempt, &told)?;
    }
    Ok(())
}
