//! Claims queued attempts for a worker, in the queue's order.
//!
//! A queued attempt is a row of `attempts` in the state `queued` and a row of `queue`. Both rows are created together
//! and ended together: whoever ends the waiting first deletes the row of `queue` and then changes the row of
//! `attempts`. On PostgreSQL the row of `queue` is also the lock. A claim skips a row that another transaction holds,
//! and never waits. Cancelling and removing wait for the claim, and hold no lock that the claim needs.

use std::collections::HashSet;

use crate::Store;
use crate::analyses::events::{self, EventKind, EventRecord};
use crate::database::connection::{Connection, TransactionKind};
use crate::database::error::StoreError;
use crate::database::value::{SqlValue, from_row, values};
use crate::queue::queue_row::TurnCounter;
use crate::queue::queue_types::{CPU_DEFAULT_MILLI, ClaimRequest, GrantedClaim};
use crate::types::capacity::Capacity;
use crate::types::submission::REQUEST_BYTES_MAX;

/// How long a request that fits the worker, but not its free capacity, is passed over. After that, smaller requests
/// behind it are held back, since otherwise they could keep it waiting for ever.
const PASS_OVER_MS: i64 = 60_000;
/// Smaller requests are held back for this long, then let through for as long, and so on.
const HOLD_BACK_MS: i64 = 300_000;
/// How many delayed rows one claim makes ready. The next claim continues.
const PROMOTE_ROWS: u32 = 200;
/// How many keys one query looks up.
const KEYS_PER_QUERY: usize = 16;

impl Store {
    /// Claims attempts that fit, at most one for each key, in one transaction. A repeat with the same keys, after an
    /// answer was lost, returns what those keys claimed before.
    pub fn claim(&mut self, claim: &ClaimRequest) -> Result<Vec<GrantedClaim>, StoreError> {
        let what = "take work from the queue";
        let mut claimed = already_claimed(&mut self.db, claim)?;
        // Check for an empty queue outside a transaction, so that idle workers do not block writers.
        let any = "SELECT attempt FROM queue LIMIT 1";
        if claimed.len() == claim.keys.len() || self.db.query_one(what, any, &[])?.is_none() {
            return Ok(claimed);
        }
        self.db.transaction(what, TransactionKind::Write, |db| {
            let now = db.now_ms()?;
            promote_due_rows(db, now)?;
            let used: HashSet<&str> = claimed.iter().map(|c| c.key.as_str()).collect();
            let held = claimed.iter().map(|c| c.counted);
            let free = held.fold(claim.free, Capacity::minus);
            let unused = claim.keys.iter().filter(|k| !used.contains(k.as_str()));
            let mut pass = ClaimPass {
                claim,
                now,
                free,
                keys: unused.map(String::as_str).collect(),
                seen: HashSet::new(),
                claimed: Vec::new(),
            };
            for scan in &QUEUE_SCANS {
                let rows = scan.rows(db, claim)?;
                let is_all = rows.len() < scan.rows_max;
                if pass.take_fitting(db, rows)? == ScanProgress::Stop || is_all {
                    break;
                }
            }
            let taken = pass.claimed;
            claimed.extend(taken);
            Ok(claimed)
        })
    }

    /// Makes delayed attempts ready whose time has come. Returns in how many milliseconds the next one is due.
    pub fn promote_delayed(&mut self) -> Result<Option<u64>, StoreError> {
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
        self.db.transaction(what, TransactionKind::Write, |db| {
            promote_due_rows(db, now)?;
            Ok(ask(db)?.map(left))
        })
    }
}

/// The state of one claim.
struct ClaimPass<'a> {
    claim: &'a ClaimRequest<'a>,
    now: i64,
    free: Capacity,
    /// Keys that are not used yet.
    keys: Vec<&'a str>,
    /// Rows already considered. The second scan sees the rows of the first again.
    seen: HashSet<(String, u32)>,
    claimed: Vec<GrantedClaim>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanProgress {
    /// Further rows may still be claimed.
    Continue,
    Stop,
}

struct Candidate {
    id: String,
    attempt: u32,
    submitter: String,
    ready_ms: i64,
    counted: Capacity,
    fits_worker: bool,
}

/// A query for candidates. The limit is written into the statement, so that the server plans for few rows.
struct QueueScan {
    sql: &'static str,
    rows_max: usize,
}

/// The first rows are nearly always enough. If not, the second scan leaves out requests that are too large for this
/// worker, since a thousand of them at the front would hide the rest.
const QUEUE_SCANS: [QueueScan; 2] = [
    QueueScan {
        sql: "
            SELECT id, attempt, submitter, ready_ms, COALESCE(memory_bytes, $1), COALESCE(cpu_milli, $2),
                COALESCE(memory_bytes, $1) <= $3 AND COALESCE(cpu_milli, $2) <= $4
            FROM queue
            WHERE not_before_ms IS NULL
            ORDER BY priority DESC, turn, queued_ms, id LIMIT 50",
        rows_max: 50,
    },
    QueueScan {
        sql: "
            SELECT id, attempt, submitter, ready_ms, COALESCE(memory_bytes, $1), COALESCE(cpu_milli, $2), TRUE
            FROM queue
            WHERE not_before_ms IS NULL AND COALESCE(memory_bytes, $1) <= $3 AND COALESCE(cpu_milli, $2) <= $4
            ORDER BY priority DESC, turn, queued_ms, id LIMIT 1000",
        rows_max: 1_000,
    },
];

impl QueueScan {
    fn rows(
        &self,
        db: &mut Connection,
        claim: &ClaimRequest,
    ) -> Result<Vec<Candidate>, StoreError> {
        let what = "look into the queue";
        let values = values![
            claim.memory_default_bytes,
            CPU_DEFAULT_MILLI,
            claim.total.memory_bytes,
            claim.total.cpu_milli
        ];
        db.fetch_all(what, self.sql, &values)
    }
}

impl ClaimPass<'_> {
    fn take_fitting(
        &mut self,
        db: &mut Connection,
        rows: Vec<Candidate>,
    ) -> Result<ScanProgress, StoreError> {
        for row in rows {
            let Some(key) = self.keys.last().copied() else {
                return Ok(ScanProgress::Stop);
            };
            if !self.seen.insert((row.id.clone(), row.attempt)) {
                continue;
            }
            if !row.fits_worker {
                continue;
            }
            if !row.counted.fits_in(self.free) {
                if blocks_smaller(self.now.saturating_sub(row.ready_ms)) {
                    return Ok(ScanProgress::Stop);
                }
                continue;
            }
            if let Some(claimed) = self.take_one(db, row, key)? {
                self.keys.pop();
                self.free = self.free.minus(claimed.counted);
                self.claimed.push(claimed);
            }
        }
        Ok(ScanProgress::Continue)
    }

    /// Claims one row. `None` if somebody else holds or ended it.
    fn take_one(
        &self,
        db: &mut Connection,
        row: Candidate,
        key: &str,
    ) -> Result<Option<GrantedClaim>, StoreError> {
        let what = "take an analysis from the queue";
        let place = values![&row.id, row.attempt];
        let hold = db.for_dialect(
            "SELECT attempt FROM queue WHERE id = $1 AND attempt = $2 AND not_before_ms IS NULL",
            "SELECT attempt FROM queue WHERE id = $1 AND attempt = $2 AND not_before_ms IS NULL FOR UPDATE SKIP LOCKED",
        );
        if db.query_one(what, hold, &place)?.is_none() {
            return Ok(None);
        }
        // Any program may have written the request. If it is too long, do not even fetch it.
        let sql = db.for_dialect(
            "SELECT CASE WHEN LENGTH(CAST(request AS BLOB)) <= $2 THEN request ELSE '' END FROM submissions WHERE id = $1",
            "SELECT CASE WHEN OCTET_LENGTH(request) <= $2 THEN request ELSE '' END FROM submissions WHERE id = $1",
        );
        let of = values![&row.id, REQUEST_BYTES_MAX as u64];
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
        let values = values![
            id,
            attempt,
            key,
            self.claim.host,
            self.claim.boot_id,
            self.claim.worker,
            self.now.saturating_add(lease)
        ];
        if db.execute(what, sql, &values)? != 1 {
            // The row of `queue` was left behind by a program that does not know the queue. It is deleted now.
            return Ok(None);
        }
        let event = EventRecord::new(EventKind::Claimed, None, Some(self.claim.worker));
        events::record_event(db, &row.id, row.attempt, &event)?;
        Ok(Some(GrantedClaim {
            request_json: request.text(what)?,
            id: row.id,
            attempt: row.attempt,
            key: key.to_owned(),
            submitter: row.submitter,
            counted: row.counted,
        }))
    }
}

/// What these keys claimed before, in a claim whose answer was lost.
fn already_claimed(
    db: &mut Connection,
    claim: &ClaimRequest,
) -> Result<Vec<GrantedClaim>, StoreError> {
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
    let sql = db.for_dialect(
        claimed_before!("LENGTH(CAST(s.request AS BLOB))"),
        claimed_before!("OCTET_LENGTH(s.request)"),
    );
    let mut claimed = Vec::new();
    for keys in claim.keys.chunks(KEYS_PER_QUERY) {
        let mut values = vec![
            SqlValue::count(claim.memory_default_bytes),
            SqlValue::count(CPU_DEFAULT_MILLI),
        ];
        // No real key is empty, so empty keys can fill the placeholders.
        let padded = keys.iter().map(String::as_str).chain(std::iter::repeat(""));
        values.extend(padded.take(KEYS_PER_QUERY).map(SqlValue::text));
        values.push(SqlValue::count(REQUEST_BYTES_MAX as u64));
        for mut row in db.query(what, sql, &values)? {
            claimed.push(row.read(what)?);
        }
    }
    Ok(claimed)
}

/// Whether a request that has been ready for this long holds back smaller requests behind it. Periods alternate: the
/// attempts that run now may run for a year, and smaller requests must not wait for that.
fn blocks_smaller(ready_for_ms: i64) -> bool {
    let passed_over_ms = ready_for_ms.saturating_sub(PASS_OVER_MS);
    passed_over_ms > 0 && passed_over_ms % (2 * HOLD_BACK_MS) < HOLD_BACK_MS
}

fn promote_due_rows(db: &mut Connection, now: i64) -> Result<(), StoreError> {
    let what = "make analyses ready whose time has come";
    let sql = db.for_dialect(
        "SELECT id, attempt, submitter, priority FROM queue WHERE not_before_ms <= $1 ORDER BY not_before_ms, id LIMIT $2",
        "SELECT id, attempt, submitter, priority FROM queue WHERE not_before_ms <= $1 ORDER BY not_before_ms, id LIMIT $2
         FOR UPDATE SKIP LOCKED",
    );
    let due = db.query(what, sql, &values![now, PROMOTE_ROWS])?;
    let mut turns = TurnCounter::default();
    for mut row in due {
        let (id, attempt, submitter) = (row.text(what)?, row.attempt()?, row.text(what)?);
        let priority = row.small("a priority")?;
        let turn = turns.next(db, &submitter, priority)?;
        let sql = "UPDATE queue SET not_before_ms = NULL, ready_ms = $3, turn = $4 WHERE id = $1 AND attempt = $2";
        let values = values![&id, attempt, now, turn];
        db.execute(what, sql, &values)?;
    }
    Ok(())
}

from_row!(Candidate: id, attempt, submitter, ready_ms, counted, fits_worker);

from_row!(GrantedClaim: id, attempt, key, request_json, submitter, counted);
