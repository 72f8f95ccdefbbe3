//! Ends attempts whose runner is gone.

use crate::Store;
use crate::analyses::analysis_row::lock_analysis;
use crate::analyses::events::{self, EventKind, EventRecord};
use crate::analyses::notifications::notify_commit;
use crate::database::connection::TransactionKind;
use crate::database::error::StoreError;
use crate::database::value::values;
use crate::queue::retry::{self, AttemptEnd};
use crate::types::attempt::{LossProof, LostAttempt};

impl Store {
    /// Ends an attempt whose runner is gone, as `error`, and queues a retry if one is due. Returns false if the
    /// attempt is not running any more.
    pub fn give_up(&mut self, lost: &LostAttempt) -> Result<bool, StoreError> {
        let what = "give up the attempt";
        self.db.transaction(what, TransactionKind::Write, |db| {
            lock_analysis(db, lost.id)?;
            let now = db.now_ms()?;
            let values = values![lost.id, lost.attempt, lost.key, lost.by, lost.reason, lost.message, now, lost.proof == LossProof::RunnerGone];
            // If cancellation was requested, the attempt ends as cancelled.
            let sql = "
                UPDATE attempts SET state = CASE WHEN cancel_ms IS NULL THEN 'error' ELSE 'cancelled' END,
                    committed_by = $4, reason = $5, message = $6, committed_ms = $7, complete = FALSE
                WHERE id = $1 AND attempt = $2 AND key = $3 AND state IN ('running', 'collecting')
                    AND ($8 OR lease_ms IS NULL OR lease_ms < $7)
                RETURNING state";
            let row = db.query_one(what, sql, &values)?;
            let done = row.is_some();
            if let Some(mut row) = row {
                let state = row.state()?;
                // Leave `by` empty: it is a secret token.
                let event = EventRecord::new(EventKind::Ended, Some(lost.reason), None);
                events::record_event(db, lost.id, lost.attempt, &event)?;
                let end = AttemptEnd {
                    id: lost.id,
                    attempt: lost.attempt,
                    state,
                    reason: lost.reason,
                };
                let budget = retry::read_retry_budget(db, &end)?;
                retry::retry_or_finish(db, &end, &budget)?;
                notify_commit(db, lost.id, lost.attempt, state)?;
            }
            Ok(done)
        })
    }
}
