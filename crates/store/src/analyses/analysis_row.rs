//! The row of an analysis: its lock, the numbers of its attempts, and its latest attempt.

use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::value::{from_row, values};
use crate::types::attempt::State;

/// Locks the analysis until the end of the transaction. Every transaction that changes attempts takes this lock
/// first, so no two of them can deadlock.
pub(crate) fn lock_analysis(db: &mut Connection, id: &str) -> Result<(), StoreError> {
    let sql = "UPDATE analyses SET attempt_last = attempt_last WHERE id = $1";
    db.execute("lock the analysis", sql, &values![id]).map(drop)
}

/// How often an analysis may be removed by others between its creation and its numbering before this process reports an
/// error.
const REMOVALS_MAX: usize = 5;

/// Allocates the next attempt number. The analysis is locked afterwards.
pub(crate) fn allocate_attempt_number(db: &mut Connection, id: &str) -> Result<u32, StoreError> {
    let what = "number the attempt";
    for _ in 0..REMOVALS_MAX {
        let now = db.now_ms()?;
        let sql = "INSERT INTO analyses (id, created_ms, attempt_last) VALUES ($1, $2, 0) ON CONFLICT (id) DO NOTHING";
        db.execute(what, sql, &values![id, now])?;
        // Do not allocate a number that does not fit 32 bits: nobody could read the row.
        let sql = "UPDATE analyses SET attempt_last = attempt_last + 1
                   WHERE id = $1 AND attempt_last BETWEEN 0 AND 4294967294 RETURNING attempt_last";
        if let Some(mut row) = db.query_one(what, sql, &values![id])? {
            return row.attempt();
        }
    }
    Err(StoreError::BadValue {
        what: "the analysis",
    })
}

/// Refuses a new attempt if another attempt has not ended, or if one has ended and `replace` is false.
pub(crate) fn refuse_conflicting_attempt(
    db: &mut Connection,
    id: &str,
    replace: bool,
) -> Result<(), StoreError> {
    let Some(found) = find_latest_attempt(db, "look for earlier attempts", id)? else {
        return Ok(());
    };
    let (id, attempt, state) = (id.to_owned(), found.attempt, found.state);
    match state.is_final() {
        false => Err(StoreError::Running {
            id,
            attempt,
            state,
            host: found.host,
        }),
        true if !replace => Err(StoreError::Exists {
            id,
            attempt,
            state,
            committed_ms: found.committed_ms,
        }),
        true => Ok(()),
    }
}

/// The attempt that a cancel or retry request means: the unfinished one, or the newest that is not superseded.
pub(crate) struct LatestAttempt {
    pub attempt: u32,
    pub state: State,
    pub committed_ms: Option<i64>,
    pub host: String,
}

from_row!(LatestAttempt: attempt, state, committed_ms, host);

pub(crate) fn latest_attempt(db: &mut Connection, id: &str) -> Result<LatestAttempt, StoreError> {
    let found = find_latest_attempt(db, "look for the attempt", id)?;
    found.ok_or_else(|| StoreError::NotFound {
        given: id.to_owned(),
    })
}

/// Unfinished attempts first, then those that are not superseded, then the newest.
fn find_latest_attempt(
    db: &mut Connection,
    what: &'static str,
    id: &str,
) -> Result<Option<LatestAttempt>, StoreError> {
    let sql = "
        SELECT attempt, state, committed_ms, host FROM attempts WHERE id = $1
        ORDER BY CASE WHEN state IN ('queued', 'running', 'collecting') THEN 0 ELSE 1 END, superseded, attempt DESC
        LIMIT 1";
    db.fetch_one(what, sql, &values![id])
}
