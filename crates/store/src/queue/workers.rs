//! The workers that share the queue.

use crate::Store;
use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::value::{from_row, values};
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
        let values = values![
            &worker.host,
            &worker.account,
            &worker.name,
            &worker.host_name,
            worker.pid,
            &worker.version,
            worker.slots,
            worker.total.memory_bytes,
            worker.total.cpu_milli,
            worker.running,
            worker.draining,
            worker.started_ms,
            now
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
        let values = values![
            &worker.host,
            &worker.account,
            &worker.name,
            now - WORKER_FORGOTTEN_MS
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
    db.fetch_all(what, sql, &values![from, to])
}

pub(crate) fn list_workers(db: &mut Connection, now: i64) -> Result<Vec<WorkerRow>, StoreError> {
    let what = "look at the workers";
    let sql = "
        SELECT host, account, name, host_name, pid, version, slots, memory_bytes, cpu_milli, running, draining, started_ms,
            seen_ms
        FROM workers WHERE seen_ms >= $1 ORDER BY host, account, name";
    db.fetch_readable(what, sql, &values![now - WORKER_FORGOTTEN_MS])
}

from_row!(WorkerRow: host, account, name, host_name, pid, version, slots, total, running, draining,
    started_ms, seen_ms);
