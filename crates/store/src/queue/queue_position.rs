//! Where one attempt stands in the queue, and what it was submitted with.

use crate::Store;
use crate::database::connection::Value;
use crate::database::error::StoreError;

/// What the queue knows of one attempt. Whoever never submitted it has none of this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub priority: u64,
    pub retries: u64,
    /// States, separated by commas.
    pub retry_on: String,
    pub retries_left: Option<u64>,
    /// What admission counts; `None`: the worker's own default.
    pub memory_bytes: Option<u64>,
    pub cpu_milli: Option<u64>,
    /// The worker that took it.
    pub worker: Option<String>,
    /// Until when its runner holds it.
    pub lease_ms: Option<i64>,
    /// Since when somebody wants it cancelled, and who.
    pub cancel_ms: Option<i64>,
    pub cancel_by: Option<String>,
    /// `None`: it does not wait.
    pub waiting: Option<InQueue>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InQueue {
    pub queued_ms: i64,
    /// Not before this time, after a failure.
    pub not_before_ms: Option<i64>,
    /// How many are taken before it, if none is passed over; counted up to [`AHEAD_MAX`].
    pub ahead: u64,
}

/// Counting further would only cost time.
pub const AHEAD_MAX: u64 = 10_000;

impl Store {
    pub fn place(&mut self, id: &str, attempt: u32) -> Result<Option<Place>, StoreError> {
        let what = "look for the attempt's place in the queue";
        let sql = "
            SELECT s.priority, s.retries, s.retry_on, a.retries_left, s.memory_bytes, s.cpu_milli, a.worker, a.lease_ms,
                a.cancel_ms, a.cancel_by, q.queued_ms, q.not_before_ms
            FROM attempts a JOIN submissions s ON s.id = a.id
                LEFT JOIN queue q ON q.id = a.id AND q.attempt = a.attempt
            WHERE a.id = $1 AND a.attempt = $2";
        let values = [Value::text(id), Value::int(attempt)];
        let Some(mut row) = self.db.query_one(what, sql, &values)? else {
            return Ok(None);
        };
        let mut place = Place {
            priority: row.count(what)?,
            retries: row.count(what)?,
            retry_on: row.text(what)?,
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
            place.waiting = Some(InQueue {
                queued_ms,
                not_before_ms,
                ahead: self.ahead(id, attempt)?,
            });
        }
        Ok(Some(place))
    }

    /// Those before it in the order in which they are claimed; none if it waits for its time.
    fn ahead(&mut self, id: &str, attempt: u32) -> Result<u64, StoreError> {
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
        let values = [
            Value::text(id),
            Value::int(attempt),
            Value::count(AHEAD_MAX),
        ];
        let row = self.db.query_one(what, sql, &values)?;
        row.map_or(Ok(0), |mut row| row.count(what))
    }
}
