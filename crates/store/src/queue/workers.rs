//! The workers that share the queue.

use crate::Store;
use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::value::{Row, SqlValue, readable};
use crate::queue::queue_types::WorkerRow;
use crate::types::capacity::Capacity;

/// A worker that reported within this time counts as live.
const WORKER_LIVE_MS: i64 = 60_000;

/// A worker that did not report for this long is not shown any more.
const WORKER_FORGOTTEN_MS: i64 = 24 * 3_600_000;

impl Store {
    /// Records that a worker is alive, and its capacity.
    pub fn record_worker(&mut self, worker: &WorkerRow) -> Result<(), StoreError> {
        let what = "tell of the worker";
        let now = self.db.now_ms()?;
        let values = [
            SqlValue::text(&worker.host),
            SqlValue::text(&worker.account),
            SqlValue::text(&worker.name),
            SqlValue::text(&worker.host_name),
            SqlValue::int(worker.pid),
            SqlValue::text(&worker.version),
            SqlValue::int(worker.slots),
            SqlValue::count(worker.total.memory_bytes),
            SqlValue::count(worker.total.cpu_milli),
            SqlValue::int(worker.running),
            SqlValue::bool(worker.draining),
            SqlValue::int(worker.started_ms),
            SqlValue::int(now),
        ];
        let sql = "
            INSERT INTO workers (host, account, name, host_name, pid, version, slots, memory_bytes, cpu_milli, running,
                draining, started_ms, seen_ms)
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
            ON CONFLICT (host, account, name) DO UPDATE SET host_name = excluded.host_name, pid = excluded.pid,
                version = excluded.version, slots = excluded.slots, memory_bytes = excluded.memory_bytes,
                cpu_milli = excluded.cpu_milli, running = excluded.running, draining = excluded.draining,
                started_ms = excluded.started_ms, seen_ms = excluded.seen_ms";
        self.db.execute(what, sql, &values).map(drop)
    }

    /// Removes a worker that ends, and all workers that did not report for a day.
    pub fn remove_worker(&mut self, worker: &WorkerRow) -> Result<(), StoreError> {
        let what = "tell that the worker is gone";
        let now = self.db.now_ms()?;
        let sql =
            "DELETE FROM workers WHERE (host = $1 AND account = $2 AND name = $3) OR seen_ms < $4";
        let values = [
            SqlValue::text(&worker.host),
            SqlValue::text(&worker.account),
            SqlValue::text(&worker.name),
            SqlValue::int(now - WORKER_FORGOTTEN_MS),
        ];
        self.db.execute(what, sql, &values).map(drop)
    }
}

/// The total capacity of each live worker.
pub(crate) fn live_workers(db: &mut Connection, now: i64) -> Result<Vec<Capacity>, StoreError> {
    let what = "look for workers";
    // A report with a time in the future does not count.
    let sql = "SELECT memory_bytes, cpu_milli FROM workers WHERE seen_ms BETWEEN $1 AND $2";
    let (from, to) = (
        now.saturating_sub(WORKER_LIVE_MS),
        now.saturating_add(WORKER_LIVE_MS),
    );
    let rows = db.query(what, sql, &[SqlValue::int(from), SqlValue::int(to)])?;
    let capacity = |mut row: Row| {
        Ok(Capacity {
            memory_bytes: row.count(what)?,
            cpu_milli: row.count(what)?,
        })
    };
    rows.into_iter().map(capacity).collect()
}

pub(crate) fn list_workers(db: &mut Connection, now: i64) -> Result<Vec<WorkerRow>, StoreError> {
    let what = "look at the workers";
    let sql = "
        SELECT host, account, name, host_name, pid, version, slots, memory_bytes, cpu_milli, running, draining, started_ms,
            seen_ms
        FROM workers WHERE seen_ms >= $1 ORDER BY host, account, name";
    let row = |mut row: Row| {
        Ok(WorkerRow {
            host: row.text(what)?,
            account: row.text(what)?,
            name: row.text(what)?,
            host_name: row.text(what)?,
            pid: row.small(what)?,
            version: row.text(what)?,
            slots: row.small(what)?,
            total: Capacity {
                memory_bytes: row.count(what)?,
                cpu_milli: row.count(what)?,
            },
            running: row.small(what)?,
            draining: row.bool(what)?,
            started_ms: row.int(what)?,
            seen_ms: row.int(what)?,
        })
    };
    let rows = db.query(what, sql, &[SqlValue::int(now - WORKER_FORGOTTEN_MS)])?;
    Ok(readable(rows, row))
}
