//! The position of one attempt in the queue, and the parameters of its submission.

use crate::Store;
use crate::database::error::StoreError;
use crate::database::value::values;

/// What the queue knows about an attempt. An attempt that was not submitted has none of this.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct QueuePosition {
    /// Higher priorities run first.
    pub priority: u64,
    /// How often it may be tried again in all.
    pub retries: u64,
    /// How often it may still be tried again.
    pub retries_left: Option<u64>,
    /// The states after which the attempt is tried again.
    pub retry_on: Vec<String>,
    /// What admission counts. `None`: the worker's default applies.
    pub memory_bytes: Option<u64>,
    /// In thousandths of a CPU. `None`: nothing is counted.
    pub cpu_milli: Option<u64>,
    /// The worker that claimed the attempt.
    pub worker: Option<String>,
    /// When the runner's lease expires.
    pub lease_ms: Option<i64>,
    /// When somebody first requested cancellation, and who.
    pub cancel_ms: Option<i64>,
    /// Who first requested cancellation.
    pub cancel_by: Option<String>,
    /// `None` if the attempt is not waiting.
    #[serde(skip)]
    pub waiting: Option<QueueWait>,
}

/// How an attempt waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueWait {
    /// When it was queued, by the database's clock.
    pub queued_ms: i64,
    /// After a failure, the attempt waits until this time.
    pub not_before_ms: Option<i64>,
    /// How many attempts are claimed before this one, if none is passed over. Counted up to [`AHEAD_MAX`].
    pub ahead: u64,
}

/// Splits a list whose items are separated by commas.
fn words(list: &str) -> Vec<String> {
    let words = list.split(',').map(str::trim);
    words
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The largest number that is counted. Counting further would only cost time.
pub const AHEAD_MAX: u64 = 10_000;

impl Store {
    /// What the queue knows about an attempt. `None` if there is no such attempt or its analysis was not submitted.
    pub fn queue_position(
        &mut self,
        id: &str,
        attempt: u32,
    ) -> Result<Option<QueuePosition>, StoreError> {
        let what = "look for the attempt's place in the queue";
        let sql = "
            SELECT s.priority, s.retries, s.retry_on, a.retries_left, s.memory_bytes, s.cpu_milli, a.worker, a.lease_ms,
                a.cancel_ms, a.cancel_by, q.queued_ms, q.not_before_ms
            FROM attempts a JOIN submissions s ON s.id = a.id
                LEFT JOIN queue q ON q.id = a.id AND q.attempt = a.attempt
            WHERE a.id = $1 AND a.attempt = $2";
        let values = values![id, attempt];
        let Some(mut row) = self.db.query_one(what, sql, &values)? else {
            return Ok(None);
        };
        let mut position = QueuePosition {
            priority: row.count(what)?,
            retries: row.count(what)?,
            retry_on: words(&row.text(what)?),
            retries_left: row.maybe_count(what)?,
            memory_bytes: row.maybe_count(what)?,
            cpu_milli: row.maybe_count(what)?,
            worker: row.maybe_text(what)?,
            lease_ms: row.maybe_int(what)?,
            cancel_ms: row.maybe_int(what)?,
            cancel_by: row.maybe_text(what)?,
            waiting: None,
        };
        let (queued_ms, not_before_ms) = (row.maybe_int(what)?, row.maybe_int(what)?);
        if let Some(queued_ms) = queued_ms {
            position.waiting = Some(QueueWait {
                queued_ms,
                not_before_ms,
                ahead: self.count_ahead(id, attempt)?,
            });
        }
        Ok(Some(position))
    }

    /// Counts the attempts before this one in claim order. Zero if it is delayed.
    fn count_ahead(&mut self, id: &str, attempt: u32) -> Result<u64, StoreError> {
        let what = "count what is queued before the attempt";
        let sql = "
            SELECT COUNT(*) FROM (
                SELECT 1 AS one FROM queue o, queue q
                WHERE q.id = $1 AND q.attempt = $2 AND q.not_before_ms IS NULL AND o.not_before_ms IS NULL
                    AND (o.priority > q.priority OR (o.priority = q.priority AND (o.turn < q.turn
                        OR (o.turn = q.turn AND (o.queued_ms < q.queued_ms
                            OR (o.queued_ms = q.queued_ms AND o.id < q.id))))))
                LIMIT $3
            ) AS before_it";
        let values = values![id, attempt, AHEAD_MAX];
        let row = self.db.query_one(what, sql, &values)?;
        row.map_or(Ok(0), |mut row| row.count(what))
    }
}
