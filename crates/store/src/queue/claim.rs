//! The queue: who is next, and taking what fits.
//!
//! A queued attempt is a row of `attempts` in the state `queued` and a row of `queue`, made and ended together. Whoever ends
//! its waiting deletes the row of `queue` first and changes the row of `attempts` then. On PostgreSQL that row is what two
//! of them meet at: a claim passes over one that somebody holds, and never waits; cancelling and removing wait for the claim,
//! holding nothing that it wants.

use std::collections::{HashMap, HashSet};

use crate::Store;
use crate::attempts::attempt::State;
use crate::attempts::commit::{lock, notify};
use crate::attempts::events::{self, Told};
use crate::attempts::secrets::erase_secrets;
use crate::database::connection::{Connection, Dialect, Purpose, Row, Value};
use crate::database::error::StoreError;
use crate::database::rows::{self, Rows};
use crate::queue::queue_types::{Capacity, Claim, Claimed, Happened, Worker};
use crate::types::submission::REQUEST_BYTES_MAX;

/// A worker that told of itself so lately is there.
pub(crate) const LIVE_MS: i64 = 60_000;
/// What a request counts for that asks for no CPUs: it may use them all, and the kernel divides them.
const CPU_DEFAULT_MILLI: u64 = 0;
/// What fits a worker but not what is free now is passed over for so long. Then nothing behind it is taken until it fits,
/// or small ones would keep a large one waiting for ever.
const PASSED_OVER_MS: i64 = 60_000;
/// For so long, and then for as long not.
const HELD_BACK_MS: i64 = 300_000;
/// How many a claim makes ready; the rest is for the next one.
const PROMOTE_ROWS: u32 = 200;
const PARK_ROWS: u32 = 100;
/// Keys that are asked about at a time.
const KEYS: usize = 16;

impl Store {
    /// Takes what fits, in the queue's order, at most one for each key. One transaction. Repeated with the same keys, after
    /// an answer that was lost, it returns what they took before.
    pub fn claim(&mut self, claim: &Claim) -> Result<Vec<Claimed>, StoreError> {
        let what = "take work from the queue";
        let mut claimed = already_claimed(&mut self.db, claim)?;
        // Without a transaction: whoever looks into an empty queue must not keep others from writing.
        let any = "SELECT attempt FROM queue LIMIT 1";
        if claimed.len() == claim.keys.len() || self.db.query_one(what, any, &[])?.is_none() {
            return Ok(claimed);
        }
        self.db.transaction(what, Purpose::Write, |db| {
            let now = db.now_ms()?;
            promote_due(db, now)?;
            let used: HashSet<&str> = claimed.iter().map(|c| c.key.as_str()).collect();
            let held = claimed.iter().map(|c| c.counted);
            let free = held.fold(claim.free, without);
            let unused = claim.keys.iter().filter(|k| !used.contains(k.as_str()));
            let mut taker = Taker {
                claim,
                now,
                free,
                keys: unused.map(String::as_str).collect(),
                seen: HashSet::new(),
                claimed: Vec::new(),
            };
            for look in &LOOKS {
                let rows = look.rows(db, claim)?;
                let is_all = rows.len() < look.rows_max;
                if taker.walk(db, rows)? == Walk::Ended || is_all {
                    break;
                }
            }
            let taken = taker.claimed;
            claimed.extend(taken);
            Ok(claimed)
        })
    }

    /// Lets those wait no longer whose time has come. When the next one's time comes, in milliseconds from now.
    pub fn promote(&mut self) -> Result<Option<u64>, StoreError> {
        let what = "look for analyses whose time has come";
        let first = "SELECT MIN(not_before_ms) FROM queue WHERE not_before_ms IS NOT NULL";
        let ask = |db: &mut Connection| match db.query_one(what, first, &[])? {
            None => Ok(None),
            Some(mut row) => row.maybe_int(what),
        };
        let Some(first_ms) = ask(&mut self.db)? else {
            return Ok(None);
        };
        let now = self.db.now_ms()?;
        let left = |first_ms: i64| u64::try_from(first_ms.saturating_sub(now)).unwrap_or(0);
        if first_ms > now {
            return Ok(Some(left(first_ms)));
        }
        self.db.transaction(what, Purpose::Write, |db| {
            promote_due(db, now)?;
            Ok(ask(db)?.map(left))
        })
    }

    /// Ends what has waited this long for a worker that is large enough, while others were there. Ids.
    ///
    /// Looks at every row, so it is for once a minute and not for every claim.
    pub fn park_unfit(
        &mut self,
        worker: &Worker,
        memory_default_bytes: u64,
        after_ms: u64,
    ) -> Result<Vec<String>, StoreError> {
        let what = "look for analyses that no worker is large enough for";
        let now = self.db.now_ms()?;
        let mut live = live_workers(&mut self.db, now)?;
        live.push(worker.total);
        let since = now.saturating_sub(i64::try_from(after_ms).unwrap_or(i64::MAX));
        let sql = "
            SELECT id, attempt, COALESCE(memory_bytes, $2), COALESCE(cpu_milli, $4) FROM queue
            WHERE not_before_ms IS NULL AND ready_ms <= $1
                AND (COALESCE(memory_bytes, $2) > $3 OR COALESCE(cpu_milli, $4) > $5)
            ORDER BY priority DESC, turn, queued_ms, id LIMIT $6";
        let values = [
            Value::int(since),
            Value::count(memory_default_bytes),
            Value::count(worker.total.memory_bytes),
            Value::count(CPU_DEFAULT_MILLI),
            Value::count(worker.total.cpu_milli),
            Value::int(PARK_ROWS),
        ];
        let mut parked = Vec::new();
        for mut row in self.db.query(what, sql, &values)? {
            let (id, attempt) = (row.text(what)?, row.attempt()?);
            let asked = Capacity {
                memory_bytes: row.count(what)?,
                cpu_milli: row.count(what)?,
            };
            // A transaction each: nobody holds the locks of several analyses but a submission, which sorts them.
            if !live.iter().any(|total| fits(asked, *total))
                && self.park(&id, attempt, asked, &worker.name)?
            {
                parked.push(id);
            }
        }
        Ok(parked)
    }

    fn park(
        &mut self,
        id: &str,
        attempt: u32,
        asked: Capacity,
        by: &str,
    ) -> Result<bool, StoreError> {
        let what = "park the analysis";
        let message = format!(
            "it asks for {} of memory and {} CPUs, and no worker has that much; ask for less, or start a larger worker and retry it",
            crate::types::units::format_size(asked.memory_bytes),
            crate::types::units::format_cpus(asked.cpu_milli),
        );
        self.db.transaction(what, Purpose::Write, |db| {
            lock(db, id)?;
            let end = QueuedEnd {
                state: State::Error,
                reason: "does_not_fit",
                message: &message,
            };
            if !end_queued(db, id, attempt, &end)? {
                return Ok(false);
            }
            let told = Told {
                happened: Happened::Parked,
                reason: Some("does_not_fit"),
                by: Some(by),
            };
            events::tell(db, id, attempt, &told)?;
            erase_secrets(db, id)?;
            notify(db, id, attempt, State::Error)?;
            Ok(true)
        })
    }
}

/// What a claim does with the rows it sees, and what it has left.
struct Taker<'a> {
    claim: &'a Claim<'a>,
    now: i64,
    free: Capacity,
    /// Still to be used.
    keys: Vec<&'a str>,
    /// The second look sees the first rows again.
    seen: HashSet<(String, u32)>,
    claimed: Vec<Claimed>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Walk {
    /// More rows would be looked at.
    Open,
    Ended,
}

struct Candidate {
    id: String,
    attempt: u32,
    submitter: String,
    ready_ms: i64,
    counted: Capacity,
    fits_worker: bool,
}

/// How far a claim looks. The numbers are written into the statements, so that the server's plan is for few rows.
struct Look {
    sql: &'static str,
    rows_max: usize,
}

/// Nearly always the first rows are enough. Otherwise those are left out that are too large for this worker, or a
/// thousand of them at the front would hide the rest from it.
const LOOKS: [Look; 2] = [
    Look {
        sql: "
            SELECT id, attempt, submitter, ready_ms, COALESCE(memory_bytes, $1), COALESCE(cpu_milli, $2),
                COALESCE(memory_bytes, $1) <= $3 AND COALESCE(cpu_milli, $2) <= $4
            FROM queue
            WHERE not_before_ms IS NULL
            ORDER BY priority DESC, turn, queued_ms, id LIMIT 50",
        rows_max: 50,
    },
    Look {
        sql: "
            SELECT id, attempt, submitter, ready_ms, COALESCE(memory_bytes, $1), COALESCE(cpu_milli, $2), TRUE
            FROM queue
            WHERE not_before_ms IS NULL AND COALESCE(memory_bytes, $1) <= $3 AND COALESCE(cpu_milli, $2) <= $4
            ORDER BY priority DESC, turn, queued_ms, id LIMIT 1000",
        rows_max: 1_000,
    },
];

impl Look {
    fn rows(&self, db: &mut Connection, claim: &Claim) -> Result<Vec<Candidate>, StoreError> {
        let what = "look into the queue";
        let values = [
            Value::count(claim.memory_default_bytes),
            Value::count(CPU_DEFAULT_MILLI),
            Value::count(claim.total.memory_bytes),
            Value::count(claim.total.cpu_milli),
        ];
        let candidate = |mut row: Row| {
            Ok(Candidate {
                id: row.text(what)?,
                attempt: row.attempt()?,
                submitter: row.text(what)?,
                ready_ms: row.int(what)?,
                counted: Capacity {
                    memory_bytes: row.count(what)?,
                    cpu_milli: row.count(what)?,
                },
                fits_worker: row.bool(what)?,
            })
        };
        let rows = db.query(what, self.sql, &values)?;
        rows.into_iter().map(candidate).collect()
    }
}

impl Taker<'_> {
    fn walk(&mut self, db: &mut Connection, rows: Vec<Candidate>) -> Result<Walk, StoreError> {
        for row in rows {
            let Some(key) = self.keys.last().copied() else {
                return Ok(Walk::Ended);
            };
            if !self.seen.insert((row.id.clone(), row.attempt)) {
                continue;
            }
            if !row.fits_worker {
                continue;
            }
            if !fits(row.counted, self.free) {
                if holds_back(self.now.saturating_sub(row.ready_ms)) {
                    return Ok(Walk::Ended);
                }
                continue;
            }
            if let Some(claimed) = self.take(db, row, key)? {
                self.keys.pop();
                self.free = without(self.free, claimed.counted);
                self.claimed.push(claimed);
            }
        }
        Ok(Walk::Open)
    }

    /// `None`: somebody else has it, or ended it.
    fn take(
        &self,
        db: &mut Connection,
        row: Candidate,
        key: &str,
    ) -> Result<Option<Claimed>, StoreError> {
        let what = "take an analysis from the queue";
        let place = [Value::text(&row.id), Value::int(row.attempt)];
        let hold = db.either(
            "SELECT attempt FROM queue WHERE id = $1 AND attempt = $2 AND not_before_ms IS NULL",
            "SELECT attempt FROM queue WHERE id = $1 AND attempt = $2 AND not_before_ms IS NULL FOR UPDATE SKIP LOCKED",
        );
        if db.query_one(what, hold, &place)?.is_none() {
            return Ok(None);
        }
        // Whoever wrote it may have written anything; what is too long is not even fetched.
        let sql = db.either(
            "SELECT CASE WHEN LENGTH(CAST(request AS BLOB)) <= $2 THEN request ELSE '' END FROM submissions WHERE id = $1",
            "SELECT CASE WHEN OCTET_LENGTH(request) <= $2 THEN request ELSE '' END FROM submissions WHERE id = $1",
        );
        let of = [Value::text(&row.id), Value::count(REQUEST_BYTES_MAX as u64)];
        let Some(mut request) = db.query_one(what, sql, &of)? else {
            return Ok(None);
        };
        let sql = "DELETE FROM queue WHERE id = $1 AND attempt = $2";
        db.execute(what, sql, &place)?;
        let lease = i64::try_from(self.claim.lease_ms).unwrap_or(i64::MAX);
        let sql = "
            UPDATE attempts SET state = 'running', key = $3, host = $4, boot_id = $5, worker = $6, lease_ms = $7
            WHERE id = $1 AND attempt = $2 AND state = 'queued'";
        let [id, attempt] = place;
        let values = [
            id,
            attempt,
            Value::text(key),
            Value::text(self.claim.host),
            Value::text(self.claim.boot_id),
            Value::text(self.claim.worker),
            Value::int(self.now.saturating_add(lease)),
        ];
        if db.execute(what, sql, &values)? != 1 {
            // A row that somebody left behind who does not know the queue; it is gone now.
            return Ok(None);
        }
        let told = Told {
            happened: Happened::Claimed,
            reason: None,
            by: Some(self.claim.worker),
        };
        events::tell(db, &row.id, row.attempt, &told)?;
        Ok(Some(Claimed {
            request_json: request.text(what)?,
            id: row.id,
            attempt: row.attempt,
            key: key.to_owned(),
            submitter: row.submitter,
            counted: row.counted,
        }))
    }
}

/// What these keys took before, in a claim whose answer did not arrive.
fn already_claimed(db: &mut Connection, claim: &Claim) -> Result<Vec<Claimed>, StoreError> {
    let what = "look for what was claimed before";
    macro_rules! claimed_before {
        ($length:literal) => {
            concat!(
                "SELECT a.id, a.attempt, a.key, CASE WHEN ", $length, " <= $19 THEN s.request ELSE '' END, s.submitter,
                    COALESCE(s.memory_bytes, $1), COALESCE(s.cpu_milli, $2)
                 FROM attempts a JOIN submissions s ON s.id = a.id
                 WHERE a.state = 'running' AND a.workspace IS NULL AND a.key IN
                    ($3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)"
            )
        };
    }
    let sql = db.either(
        claimed_before!("LENGTH(CAST(s.request AS BLOB))"),
        claimed_before!("OCTET_LENGTH(s.request)"),
    );
    let mut claimed = Vec::new();
    for keys in claim.keys.chunks(KEYS) {
        let mut values = vec![
            Value::count(claim.memory_default_bytes),
            Value::count(CPU_DEFAULT_MILLI),
        ];
        // No key is empty.
        let padded = keys.iter().map(String::as_str).chain(std::iter::repeat(""));
        values.extend(padded.take(KEYS).map(Value::text));
        values.push(Value::count(REQUEST_BYTES_MAX as u64));
        for mut row in db.query(what, sql, &values)? {
            claimed.push(Claimed {
                id: row.text(what)?,
                attempt: row.attempt()?,
                key: row.text(what)?,
                request_json: row.text(what)?,
                submitter: row.text(what)?,
                counted: Capacity {
                    memory_bytes: row.count(what)?,
                    cpu_milli: row.count(what)?,
                },
            });
        }
    }
    Ok(claimed)
}

/// Whether one that has been ready for so long without fitting keeps others from being taken. By turns: what runs beside
/// it may run for a year, and the others must not wait for that.
fn holds_back(ready_for_ms: i64) -> bool {
    let passed_over_ms = ready_for_ms.saturating_sub(PASSED_OVER_MS);
    passed_over_ms > 0 && passed_over_ms % (2 * HELD_BACK_MS) < HELD_BACK_MS
}

pub(crate) fn fits(asked: Capacity, within: Capacity) -> bool {
    asked.memory_bytes <= within.memory_bytes && asked.cpu_milli <= within.cpu_milli
}

fn without(free: Capacity, taken: Capacity) -> Capacity {
    Capacity {
        memory_bytes: free.memory_bytes.saturating_sub(taken.memory_bytes),
        cpu_milli: free.cpu_milli.saturating_sub(taken.cpu_milli),
    }
}

/// What the workers that are there have, each.
pub(crate) fn live_workers(db: &mut Connection, now: i64) -> Result<Vec<Capacity>, StoreError> {
    let what = "look for workers";
    // One that was seen in the future was not seen.
    let sql = "SELECT memory_bytes, cpu_milli FROM workers WHERE seen_ms BETWEEN $1 AND $2";
    let (from, to) = (now.saturating_sub(LIVE_MS), now.saturating_add(LIVE_MS));
    let rows = db.query(what, sql, &[Value::int(from), Value::int(to)])?;
    let capacity = |mut row: Row| {
        Ok(Capacity {
            memory_bytes: row.count(what)?,
            cpu_milli: row.count(what)?,
        })
    };
    rows.into_iter().map(capacity).collect()
}

/// Turns as they are given out within one transaction.
///
/// The next turn of a submitter is one after its last that is ready, but none before the lowest that is ready: so the
/// submitters take turns, whoever comes new starts where the others are, and nobody saves up turns by waiting.
#[derive(Default)]
pub(crate) struct Turns {
    last: HashMap<(String, u32), i64>,
}

impl Turns {
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
                let values = [Value::text(submitter), Value::int(priority)];
                let none = StoreError::BadValue { what };
                let mut row = db.query_one(what, sql, &values)?.ok_or(none)?;
                let (last, lowest) = (row.maybe_int(what)?, row.maybe_int(what)?);
                last.map_or(0, |last| last.saturating_add(1))
                    .max(lowest.unwrap_or(0))
            }
        };
        self.last.insert(of, turn);
        Ok(turn)
    }
}

/// Where an attempt waits.
pub(crate) struct Place<'a> {
    pub id: &'a str,
    pub attempt: u32,
    pub submitter: &'a str,
    pub priority: u32,
    pub now: i64,
    /// `None`: at once.
    pub not_before_ms: Option<i64>,
    pub memory_bytes: Option<u64>,
    pub cpu_milli: Option<u64>,
}

/// What an attempt that waits is, beside its place.
pub(crate) struct Queued {
    pub retries_left: u32,
    /// Nobody knows it, so nobody can commit what was not claimed.
    pub key: String,
}

impl<'a> Place<'a> {
    /// Whoever has to wait gets its turn when it is ready: until then the others move on.
    pub fn row(
        &self,
        db: &mut Connection,
        turns: &mut Turns,
    ) -> Result<[Value<'a>; 10], StoreError> {
        let turn = match self.not_before_ms {
            None => turns.next(db, self.submitter, self.priority)?,
            Some(_) => 0,
        };
        Ok([
            Value::text(self.id),
            Value::int(self.attempt),
            Value::text(self.submitter),
            Value::int(self.priority),
            Value::int(turn),
            Value::int(self.now),
            Value::int(self.not_before_ms.unwrap_or(self.now)),
            Value::Int(self.not_before_ms),
            Value::maybe_count(self.memory_bytes),
            Value::maybe_count(self.cpu_milli),
        ])
    }

    pub fn attempt_row<'q>(&self, queued: &'q Queued) -> [Value<'q>; 9]
    where
        'a: 'q,
    {
        [
            Value::text(self.id),
            Value::int(self.attempt),
            Value::text(&queued.key),
            Value::text(State::Queued.as_str()),
            Value::text(""),
            Value::text(""),
            Value::text(self.submitter),
            Value::int(self.now),
            Value::int(queued.retries_left),
        ]
    }
}

/// One attempt that waits from now on. Its analysis is locked.
pub(crate) fn enqueue(
    db: &mut Connection,
    place: &Place,
    queued: &Queued,
) -> Result<(), StoreError> {
    let what = "queue the attempt";
    let row = place.row(db, &mut Turns::default())?;
    let mut rows = Rows::new(db, what, &rows::QUEUED_ATTEMPTS);
    rows.push(place.attempt_row(queued))?;
    rows.finish()?;
    let mut rows = Rows::new(db, what, &rows::QUEUE);
    rows.push(row)?;
    rows.finish()?;
    notify_queue(db)
}

/// Heard by workers, on `fumehood_queue`.
pub(crate) fn notify_queue(db: &mut Connection) -> Result<(), StoreError> {
    if db.dialect() != Dialect::Postgres {
        return Ok(());
    }
    let sql = "SELECT pg_notify('fumehood_queue', '')";
    db.execute("tell the workers", sql, &[]).map(drop)
}

/// How the waiting of an attempt ends that nobody took.
pub(crate) struct QueuedEnd<'a> {
    pub state: State,
    pub reason: &'a str,
    pub message: &'a str,
}

/// Its analysis is locked. False: it does not wait any more; a claim that was under way has it now.
pub(crate) fn end_queued(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    end: &QueuedEnd,
) -> Result<bool, StoreError> {
    let what = "take the attempt out of the queue";
    let sql = "DELETE FROM queue WHERE id = $1 AND attempt = $2";
    if db.execute(what, sql, &[Value::text(id), Value::int(attempt)])? == 0 {
        return Ok(false);
    }
    let now = db.now_ms()?;
    let sql = "
        UPDATE attempts SET state = $3, reason = $4, message = $5, committed_ms = $6, complete = FALSE
        WHERE id = $1 AND attempt = $2 AND state = 'queued'";
    let values = [
        Value::text(id),
        Value::int(attempt),
        Value::text(end.state.as_str()),
        Value::text(end.reason),
        Value::text(end.message),
        Value::int(now),
    ];
    Ok(db.execute(what, sql, &values)? == 1)
}

fn promote_due(db: &mut Connection, now: i64) -> Result<(), StoreError> {
    let what = "make analyses ready whose time has come";
    let sql = db.either(
        "SELECT id, attempt, submitter, priority FROM queue WHERE not_before_ms <= $1 ORDER BY not_before_ms, id LIMIT $2",
        "SELECT id, attempt, submitter, priority FROM queue WHERE not_before_ms <= $1 ORDER BY not_before_ms, id LIMIT $2
         FOR UPDATE SKIP LOCKED",
    );
    let due = db.query(what, sql, &[Value::int(now), Value::int(PROMOTE_ROWS)])?;
    let mut turns = Turns::default();
    for mut row in due {
        let (id, attempt, submitter) = (row.text(what)?, row.attempt()?, row.text(what)?);
        let priority = small(&mut row, "a priority")?;
        let turn = turns.next(db, &submitter, priority)?;
        let sql = "UPDATE queue SET not_before_ms = NULL, ready_ms = $3, turn = $4 WHERE id = $1 AND attempt = $2";
        let values = [
            Value::text(&id),
            Value::int(attempt),
            Value::int(now),
            Value::int(turn),
        ];
        db.execute(what, sql, &values)?;
    }
    Ok(())
}

pub(crate) fn small(row: &mut Row, what: &'static str) -> Result<u32, StoreError> {
    u32::try_from(row.int(what)?).map_err(|_| StoreError::BadValue { what })
}
