//! What happened to an analysis, who works, and the queue at one moment.

use crate::Store;
use crate::attempts::attempt::State;
use crate::database::connection::{Connection, Purpose, Row, Value};
use crate::database::error::StoreError;
use crate::database::rows::{self, Rows};
use crate::queue::claim::small;
use crate::queue::queue_types::{Busy, Capacity, Event, Happened, Overview, Waiting, Worker};

/// One line of the story, as it is written.
pub(crate) struct Told<'a> {
    pub happened: Happened,
    pub reason: Option<&'a str>,
    pub by: Option<&'a str>,
}

/// A reason is a word or a sentence of ours; whatever else it may be one day, it stays short.
const REASON_CHARS_MAX: usize = 500;
/// A worker that nobody heard of for so long is not shown any more.
const FORGOTTEN_MS: i64 = 24 * 3_600_000;

/// In the transaction of what it tells of, so that there is neither without the other.
pub(crate) fn tell(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    told: &Told,
) -> Result<(), StoreError> {
    let now = db.now_ms()?;
    tell_at(db, id, attempt, now, told)
}

/// For who has asked for the time.
pub(crate) fn tell_at(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    now: i64,
    told: &Told,
) -> Result<(), StoreError> {
    let mut rows = Rows::new(db, "note what happened", &rows::EVENTS);
    rows.push(row(id, attempt, now, told))?;
    rows.finish()
}

pub(crate) fn row<'a>(id: &'a str, attempt: u32, now: i64, told: &Told<'a>) -> [Value<'a>; 6] {
    let cut = |text: &'a str| match text.char_indices().nth(REASON_CHARS_MAX) {
        Some((at, _)) => &text[..at],
        None => text,
    };
    [
        Value::text(id),
        Value::int(attempt),
        Value::int(now),
        Value::text(told.happened.as_str()),
        Value::maybe_text(told.reason.map(cut)),
        Value::maybe_text(told.by.map(cut)),
    ]
}

impl Store {
    /// First to last.
    pub fn events(&mut self, id: &str) -> Result<Vec<Event>, StoreError> {
        let what = "read what happened";
        let sql = "SELECT attempt, ms, event, reason, by FROM events WHERE id = $1 ORDER BY seq";
        let rows = self.db.query(what, sql, &[Value::text(id)])?;
        let event = |mut row: Row| {
            Ok(Event {
                attempt: row.attempt()?,
                ms: row.int(what)?,
                event: row.text(what)?,
                reason: row.maybe_text(what)?,
                by: row.maybe_text(what)?,
            })
        };
        rows.into_iter().map(event).collect()
    }

    /// Tells the others that a worker is there, and what it has.
    pub fn worker_seen(&mut self, worker: &Worker) -> Result<(), StoreError> {
        let what = "tell of the worker";
        let now = self.db.now_ms()?;
        let values = [
            Value::text(&worker.host),
            Value::text(&worker.account),
            Value::text(&worker.name),
            Value::text(&worker.host_name),
            Value::int(worker.pid),
            Value::text(&worker.version),
            Value::int(worker.slots),
            Value::count(worker.total.memory_bytes),
            Value::count(worker.total.cpu_milli),
            Value::int(worker.running),
            Value::bool(worker.draining),
            Value::int(worker.started_ms),
            Value::int(now),
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

    /// It ends, and says so; those that did not say so for a day go with it.
    pub fn worker_gone(&mut self, worker: &Worker) -> Result<(), StoreError> {
        let what = "tell that the worker is gone";
        let now = self.db.now_ms()?;
        let sql =
            "DELETE FROM workers WHERE (host = $1 AND account = $2 AND name = $3) OR seen_ms < $4";
        let values = [
            Value::text(&worker.host),
            Value::text(&worker.account),
            Value::text(&worker.name),
            Value::int(now - FORGOTTEN_MS),
        ];
        self.db.execute(what, sql, &values).map(drop)
    }

    /// The queue at one moment, with at most `limit` of those that wait and as many of those that run.
    pub fn overview(&mut self, limit: u32) -> Result<Overview, StoreError> {
        let what = "look at the queue";
        self.db.transaction(what, Purpose::Snapshot, |db| {
            let now_ms = db.now_ms()?;
            let sql = "SELECT COUNT(*), COUNT(not_before_ms) FROM queue";
            let mut counts = one(db, what, sql)?;
            let sql = "SELECT COUNT(*) FROM attempts WHERE state IN ('running', 'collecting')";
            let mut running = one(db, what, sql)?;
            let mut next = waiting(db, Waits::Ready, limit)?;
            let left = limit.saturating_sub(u32::try_from(next.len()).unwrap_or(u32::MAX));
            next.extend(waiting(db, Waits::Delayed, left)?);
            Ok(Overview {
                now_ms,
                queued: counts.count(what)?,
                delayed: counts.count(what)?,
                next,
                running: running.count(what)?,
                busy: busy(db, limit)?,
                workers: workers(db, now_ms)?,
            })
        })
    }
}

/// A row that Fumehood would not write must not hide the others.
fn readable<T>(rows: Vec<Row>, read: impl Fn(Row) -> Result<T, StoreError>) -> Vec<T> {
    rows.into_iter().filter_map(|row| read(row).ok()).collect()
}

fn one(db: &mut Connection, what: &'static str, sql: &'static str) -> Result<Row, StoreError> {
    let none = StoreError::BadValue { what };
    db.query_one(what, sql, &[])?.ok_or(none)
}

#[derive(Clone, Copy)]
enum Waits {
    Ready,
    Delayed,
}

fn waiting(db: &mut Connection, waits: Waits, limit: u32) -> Result<Vec<Waiting>, StoreError> {
    let what = "look at what waits";
    let sql = match waits {
        Waits::Ready => {
            "SELECT id, attempt, submitter, priority, queued_ms, not_before_ms, memory_bytes, cpu_milli FROM queue
             WHERE not_before_ms IS NULL ORDER BY priority DESC, turn, queued_ms, id LIMIT $1"
        }
        Waits::Delayed => {
            "SELECT id, attempt, submitter, priority, queued_ms, not_before_ms, memory_bytes, cpu_milli FROM queue
             WHERE not_before_ms IS NOT NULL ORDER BY not_before_ms, id LIMIT $1"
        }
    };
    let row = |mut row: Row| {
        Ok(Waiting {
            id: row.text(what)?,
            attempt: row.attempt()?,
            submitter: row.text(what)?,
            priority: small(&mut row, what)?,
            queued_ms: row.int(what)?,
            not_before_ms: row.maybe_int(what)?,
            memory_bytes: row.maybe_count(what)?,
            cpu_milli: row.maybe_count(what)?,
        })
    };
    let rows = db.query(what, sql, &[Value::int(limit)])?;
    Ok(readable(rows, row))
}

/// Oldest first; those of `fumehood run` too.
fn busy(db: &mut Connection, limit: u32) -> Result<Vec<Busy>, StoreError> {
    let what = "look at what runs";
    let sql = "
        SELECT a.id, a.attempt, a.state, COALESCE(a.submitter, s.submitter), a.host, a.worker, a.created_ms,
            (SELECT MIN(e.ms) FROM events e WHERE e.id = a.id AND e.attempt = a.attempt AND e.event = 'started'),
            s.memory_bytes, s.cpu_milli, a.cancel_ms IS NOT NULL
        FROM attempts a LEFT JOIN submissions s ON s.id = a.id AND a.retries_left IS NOT NULL
        WHERE a.state IN ('running', 'collecting') ORDER BY a.created_ms, a.id LIMIT $1";
    let row = |mut row: Row| {
        let (id, attempt, state): (_, _, State) = (row.text(what)?, row.attempt()?, row.state()?);
        Ok(Busy {
            id,
            attempt,
            state,
            submitter: row.maybe_text(what)?,
            host: row.text(what)?,
            worker: row.maybe_text(what)?,
            created_ms: row.int(what)?,
            started_ms: row.maybe_int(what)?,
            memory_bytes: row.maybe_count(what)?,
            cpu_milli: row.maybe_count(what)?,
            cancel_asked: row.bool(what)?,
        })
    };
    let rows = db.query(what, sql, &[Value::int(limit)])?;
    Ok(readable(rows, row))
}

fn workers(db: &mut Connection, now: i64) -> Result<Vec<Worker>, StoreError> {
    let what = "look at the workers";
    let sql = "
        SELECT host, account, name, host_name, pid, version, slots, memory_bytes, cpu_milli, running, draining, started_ms,
            seen_ms
        FROM workers WHERE seen_ms >= $1 ORDER BY host, account, name";
    let row = |mut row: Row| {
        Ok(Worker {
            host: row.text(what)?,
            account: row.text(what)?,
            name: row.text(what)?,
            host_name: row.text(what)?,
            pid: small(&mut row, what)?,
            version: row.text(what)?,
            slots: small(&mut row, what)?,
            total: Capacity {
                memory_bytes: row.count(what)?,
                cpu_milli: row.count(what)?,
            },
            running: small(&mut row, what)?,
            draining: row.bool(what)?,
            started_ms: row.int(what)?,
            seen_ms: row.int(what)?,
        })
    };
    let rows = db.query(what, sql, &[Value::int(now - FORGOTTEN_MS)])?;
    Ok(readable(rows, row))
}
