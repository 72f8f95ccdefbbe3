//! Cancels analyses: a queued attempt ends at once; the runner of a running attempt is asked to end it.

use crate::Store;
use crate::analyses::analysis_row::{latest_attempt, lock_analysis};
use crate::analyses::events::{self, EventKind, EventRecord};
use crate::analyses::notifications::{notify_commit, notify_queue};
use crate::analyses::secrets::erase_secrets;
use crate::database::connection::{Connection, TransactionKind};
use crate::database::error::StoreError;
use crate::database::value::values;
use crate::queue::queue_row::{QueueExit, end_queued};
use crate::queue::queue_types::CancelOutcome;
use crate::types::attempt::State;

/// How often a claim may take the attempt while this process tries to cancel it. In fact only once: afterwards the
/// attempt is running.
const CLAIMS_MAX: usize = 3;

impl Store {
    /// Ends a queued attempt, or asks the runner of a running attempt to end it.
    pub fn cancel(&mut self, id: &str, by: &str) -> Result<CancelOutcome, StoreError> {
        let what = "cancel the analysis";
        self.db.transaction(what, TransactionKind::Write, |db| {
            lock_analysis(db, id)?;
            for _ in 0..CLAIMS_MAX {
                let found = latest_attempt(db, id)?;
                match found.state {
                    State::Queued if cancel_queued(db, id, found.attempt, by)? => {
                        let attempt = found.attempt;
                        return Ok(CancelOutcome::Now { attempt });
                    }
                    // A claim took the attempt and has committed. Look again.
                    State::Queued => continue,
                    State::Running | State::Collecting => {
                        request_cancel(db, id, found.attempt, by)?;
                        return Ok(CancelOutcome::Requested {
                            attempt: found.attempt,
                            host: found.host,
                        });
                    }
                    state => {
                        return Ok(CancelOutcome::AlreadyEnded {
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
}

fn cancel_queued(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    by: &str,
) -> Result<bool, StoreError> {
    let message = format!("{by} cancelled it before it was started");
    let end = QueueExit {
        state: State::Cancelled,
        reason: "cancelled",
        message: &message,
    };
    if !end_queued(db, id, attempt, &end)? {
        return Ok(false);
    }
    note_cancel(db, id, attempt, by)?;
    erase_secrets(db, id)?;
    notify_commit(db, id, attempt, State::Cancelled)?;
    Ok(true)
}

fn request_cancel(db: &mut Connection, id: &str, attempt: u32, by: &str) -> Result<(), StoreError> {
    note_cancel(db, id, attempt, by)?;
    // Notify even if the cancellation was already requested: a user who asks twice may do so because a notification
    // was lost.
    notify_queue(db)
}

/// Records who requested the cancellation first.
fn note_cancel(db: &mut Connection, id: &str, attempt: u32, by: &str) -> Result<(), StoreError> {
    let what = "note the wish to cancel";
    let now = db.now_ms()?;
    let sql = "UPDATE attempts SET cancel_ms = $3, cancel_by = $4
               WHERE id = $1 AND attempt = $2 AND cancel_ms IS NULL";
    let values = values![id, attempt, now, by];
    if db.execute(what, sql, &values)? == 1 {
        let event = EventRecord::new(EventKind::Cancelled, None, Some(by));
        events::record_event(db, id, attempt, &event)?;
    }
    Ok(())
}
