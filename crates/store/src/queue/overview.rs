//! An overview of the queue, for `fumehood top` and the like.

use crate::Store;
use crate::database::connection::{Connection, TransactionKind};
use crate::database::error::StoreError;
use crate::database::value::{from_row, values};
use crate::queue::queue_types::{ActiveAttempt, QueueOverview, WaitingAttempt};
use crate::queue::workers::list_workers;

impl Store {
    /// The state of the queue at one moment, with at most `limit` waiting attempts and `limit` active ones.
    pub fn overview(&mut self, limit: u32) -> Result<QueueOverview, StoreError> {
        let what = "look at the queue";
        self.db.transaction(what, TransactionKind::Snapshot, |db| {
            let now_ms = db.now_ms()?;
            let sql = "SELECT COUNT(*), COUNT(not_before_ms) FROM queue";
            let mut counts = db.query_single(what, sql, &[])?;
            let sql = "SELECT COUNT(*) FROM attempts WHERE state IN ('running', 'collecting')";
            let mut running = db.query_single(what, sql, &[])?;
            let mut next = list_waiting(db, QueuePart::Ready, limit)?;
            let left = limit.saturating_sub(u32::try_from(next.len()).unwrap_or(u32::MAX));
            next.extend(list_waiting(db, QueuePart::Delayed, left)?);
            Ok(QueueOverview {
                now_ms,
                queued: counts.count(what)?,
                delayed: counts.count(what)?,
                next,
                running: running.count(what)?,
                busy: list_active(db, limit)?,
                workers: list_workers(db, now_ms)?,
            })
        })
    }
}

#[derive(Clone, Copy)]
enum QueuePart {
    Ready,
    Delayed,
}

fn list_waiting(
    db: &mut Connection,
    part: QueuePart,
    limit: u32,
) -> Result<Vec<WaitingAttempt>, StoreError> {
    let what = "look at what waits";
    let sql = match part {
        QueuePart::Ready => {
            "SELECT id, attempt, submitter, priority, queued_ms, not_before_ms, memory_bytes, cpu_milli FROM queue
             WHERE not_before_ms IS NULL ORDER BY priority DESC, turn, queued_ms, id LIMIT $1"
        }
        QueuePart::Delayed => {
            "SELECT id, attempt, submitter, priority, queued_ms, not_before_ms, memory_bytes, cpu_milli FROM queue
             WHERE not_before_ms IS NOT NULL ORDER BY not_before_ms, id LIMIT $1"
        }
    };
    db.fetch_readable(what, sql, &values![limit])
}

/// Running and collecting attempts, oldest first. Includes those of `fumehood run`.
fn list_active(db: &mut Connection, limit: u32) -> Result<Vec<ActiveAttempt>, StoreError> {
    let what = "look at what runs";
    let sql = "
        SELECT a.id, a.attempt, a.state, COALESCE(a.submitter, s.submitter), a.host, a.worker, a.created_ms,
            (SELECT MIN(e.ms) FROM events e WHERE e.id = a.id AND e.attempt = a.attempt AND e.event = 'started'),
            s.memory_bytes, s.cpu_milli, a.cancel_ms IS NOT NULL
        FROM attempts a LEFT JOIN submissions s ON s.id = a.id AND a.retries_left IS NOT NULL
        WHERE a.state IN ('running', 'collecting') ORDER BY a.created_ms, a.id LIMIT $1";
    db.fetch_readable(what, sql, &values![limit])
}

from_row!(ActiveAttempt: id, attempt, state, submitter, host, worker, created_ms, started_ms, memory_bytes,
    cpu_milli, cancel_asked);

from_row!(WaitingAttempt: id, attempt, submitter, priority, queued_ms, not_before_ms, memory_bytes,
    cpu_milli);
