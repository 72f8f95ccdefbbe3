//! The row of a waiting attempt: how it enters the queue, its turn, and how it leaves without a claim.

use std::collections::HashMap;

use crate::analyses::notifications::notify_queue;
use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::rows::{self, RowInserter};
use crate::database::value::{SqlValue, values};
use crate::types::attempt::State;

/// Assigns turns within one transaction.
///
/// The queue is ordered by priority, then turn. A submitter's next turn is one after its own last ready row, but not
/// below the lowest turn of any ready row. So submitters take turns. A new submitter's first
/// attempt gets the lowest turn in use. A submitter who waits gains nothing.
#[derive(Default)]
pub(crate) struct TurnCounter {
    last: HashMap<(String, u32), i64>,
}

impl TurnCounter {
    pub fn next(
        &mut self,
        db: &mut Connection,
        submitter: &str,
        priority: u32,
    ) -> Result<i64, StoreError> {
        let what = "find a place in the queue";
        let of = (submitter.to_owned(), priority);
        let turn = match self.last.get(&of) {
            Some(last) => last.saturating_add(1),
            None => {
                let sql = "
                    SELECT (SELECT MAX(turn) FROM queue
                            WHERE submitter = $1 AND priority = $2 AND not_before_ms IS NULL),
                           (SELECT MIN(turn) FROM queue WHERE priority = $2 AND not_before_ms IS NULL)";
                let values = values![submitter, priority];
                let mut row = db.query_single(what, sql, &values)?;
                let (last, lowest) = (row.maybe_int(what)?, row.maybe_int(what)?);
                last.map_or(0, |last| last.saturating_add(1))
                    .max(lowest.unwrap_or(0))
            }
        };
        self.last.insert(of, turn);
        Ok(turn)
    }
}

/// The row of `queue` for an attempt.
pub(crate) struct NewQueueRow<'a> {
    pub id: &'a str,
    pub attempt: u32,
    pub submitter: &'a str,
    pub priority: u32,
    pub now: i64,
    /// `None`: ready at once.
    pub not_before_ms: Option<i64>,
    pub memory_bytes: Option<u64>,
    pub cpu_milli: Option<u64>,
}

/// The further columns of a queued attempt's row in `attempts`.
pub(crate) struct QueuedAttempt {
    pub retries_left: u32,
    /// A random key that Fumehood gives to no process, so no process can commit the attempt before a claim replaces
    /// the key.
    pub key: String,
}

impl<'a> NewQueueRow<'a> {
    /// The values for the table `queue`. A delayed attempt gets its turn when it becomes ready, since the others move
    /// on until then.
    pub fn queue_row(
        &self,
        db: &mut Connection,
        turns: &mut TurnCounter,
    ) -> Result<[SqlValue<'a>; 10], StoreError> {
        let turn = match self.not_before_ms {
            None => turns.next(db, self.submitter, self.priority)?,
            Some(_) => 0,
        };
        Ok(values![
            self.id,
            self.attempt,
            self.submitter,
            self.priority,
            turn,
            self.now,
            self.not_before_ms.unwrap_or(self.now),
            self.not_before_ms,
            self.memory_bytes,
            self.cpu_milli
        ])
    }

    pub fn attempt_row<'q>(&self, queued: &'q QueuedAttempt) -> [SqlValue<'q>; 9]
    where
        'a: 'q,
    {
        values![
            self.id,
            self.attempt,
            &queued.key,
            State::Queued.as_str(),
            "",
            "",
            self.submitter,
            self.now,
            queued.retries_left
        ]
    }
}

/// Queues one attempt. The analysis is locked.
pub(crate) fn enqueue(
    db: &mut Connection,
    entry: &NewQueueRow,
    queued: &QueuedAttempt,
) -> Result<(), StoreError> {
    let what = "queue the attempt";
    let row = entry.queue_row(db, &mut TurnCounter::default())?;
    let mut rows = RowInserter::new(db, what, &rows::QUEUED_ATTEMPTS);
    rows.push(entry.attempt_row(queued))?;
    rows.finish()?;
    let mut rows = RowInserter::new(db, what, &rows::QUEUE);
    rows.push(row)?;
    rows.finish()?;
    notify_queue(db)
}

/// The final state of an attempt that leaves the queue without being claimed.
pub(crate) struct QueueExit<'a> {
    pub state: State,
    pub reason: &'a str,
    pub message: &'a str,
}

/// Takes an attempt out of the queue and ends it. The analysis is locked. Returns false if the attempt is not waiting
/// any more: a concurrent claim has it.
pub(crate) fn end_queued(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    end: &QueueExit,
) -> Result<bool, StoreError> {
    let what = "take the attempt out of the queue";
    let sql = "DELETE FROM queue WHERE id = $1 AND attempt = $2";
    if db.execute(what, sql, &values![id, attempt])? == 0 {
        return Ok(false);
    }
    let now = db.now_ms()?;
    let sql = "
        UPDATE attempts SET state = $3, reason = $4, message = $5, committed_ms = $6, complete = FALSE
        WHERE id = $1 AND attempt = $2 AND state = 'queued'";
    let values = values![
        id,
        attempt,
        end.state.as_str(),
        end.reason,
        end.message,
        now
    ];
    Ok(db.execute(what, sql, &values)? == 1)
}
