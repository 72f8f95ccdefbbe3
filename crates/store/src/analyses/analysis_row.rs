//! The row of an analysis: its lock, the numbers of its attempts, and its latest attempt.

use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::value::SqlValue;
use crate::types::attempt::State;

/// Locks the analysis until the end of the transaction. Every transaction that changes attempts takes this lock
/// first, so no two of them can deadlock.
pub(crate) fn lock_analysis(db: &mut Connection, id: &str) -> Result<(), StoreError> {
    let sql = "UPDATE analyses SET attempt_last = attempt_last WHERE id = $1";
    db.execute("lock the analysis", sql, &[SqlValue::text(id)])
        .map(drop)
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
        db.execute(what, sql, &[SqlValue::text(id), SqlValue::int(now)])?;
        // Do not allocate a number that does not fit 32 bits: nobody could read the row.
        let sql = "UPDATE analyses SET attempt_last = attempt_last + 1
                   WHERE id = $1 AND attempt_last BETWEEN 0 AND 4294967294 RETURNING attempt_last";
        if let Some(mut row) = db.query_one(what, sql, &[SqlValue::text(id)])? {
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
    let what = "look for earlier attempts";
    // Unfinished attempts first, then those that are not superseded, then the newest.
    let sql = "
        SELECT attempt, state, committed_ms, host FROM attempts WHERE id = $1
        ORDER BY CASE WHEN state IN ('queued', 'running', 'collecting') THEN 0 ELSE 1 END, superseded, attempt DESC
        LIMIT 1";
    if let Some(mut row) = db.query_one(what, sql, &[SqlValue::text(id)])? {
        let (id, attempt) = (id.to_owned(), row.attempt()?);
        let (state, committed_ms) = (row.state()?, row.maybe_int(what)?);
        let host = row.text(what)?;
        match state.is_final() {
            false => {
                return Err(StoreError::Running {
                    id,
                    attempt,
                    state,
                    host,
                });
            }
            true if !replace => {
                return Err(StoreError::Exists {
                    id,
                    attempt,
                    state,
                    committed_ms,
                });
            }
            true => (),
        }
    }
    Ok(())
}

/// The attempt that a cancel or retry request means: the unfinished one, or the newest that is not superseded.
pub(crate) struct LatestAttempt {
    pub attempt: u32,
    pub state: State,
    pub host: String,
}

pub(crate) fn latest_attempt(db: &mut Connection, id: &str) -> Result<LatestAttempt, StoreError> {
    let what = "look for the attempt";
    let sql = "
        SELECT attempt, state, host FROM attempts WHERE id = $1
        ORDER BY CASE WHEN state IN ('queued', 'running', 'collecting') THEN 0 ELSE 1 END, superseded, attempt DESC
        LIMIT 1";
    let row = db.query_one(what, sql, &[SqlValue::text(id)])?;
    let mut row = row.ok_or_else(|| StoreError::NotFound {
        given: id.to_owned(),
    })?;
    Ok(LatestAttempt {
        attempt: row.attempt()?,
        state: row.state()?,
        host: row.text(what)?,
    })
}
