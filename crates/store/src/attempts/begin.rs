//! Begins attempts.

use crate::Store;
use crate::analyses::analysis_row::{allocate_attempt_number, refuse_conflicting_attempt};
use crate::database::connection::{
    Connection, DialectSql, TransactionKind, postgres_now, sqlite_now,
};
use crate::database::error::StoreError;
use crate::database::value::{SqlValue, from_row, values};
use crate::types::attempt::{NewAttempt, State};

/// Begins the first attempt of a new analysis, which is by far the most common case, in one call. Returns no row and
/// changes nothing if the analysis or the key exists. SQLite's `changes()` counts the rows of the statement before.
const BEGIN_FIRST: DialectSql = DialectSql {
    sqlite: concat!(
        "PRAGMA synchronous = NORMAL;
         BEGIN IMMEDIATE;
         INSERT INTO analyses (id, created_ms, attempt_last) SELECT $1, ",
        sqlite_now!(),
        ", 1 WHERE NOT EXISTS (SELECT 1 FROM attempts WHERE key = $2) ON CONFLICT (id) DO NOTHING;
         INSERT INTO attempts (id, attempt, key, state, superseded, host, boot_id, submitter, workspace, provenance, created_ms)
         SELECT $1, 1, $2, 'running', FALSE, $3, $4, $5, $6, $7, ",
        sqlite_now!(),
        " WHERE changes() = 1
         RETURNING attempt;
         COMMIT;
         PRAGMA synchronous = FULL"
    ),
    // The third argument limits the setting to this transaction.
    postgres: concat!(
        "WITH analysis AS (
             INSERT INTO analyses (id, created_ms, attempt_last) SELECT $1, ",
        postgres_now!(),
        ", 1 WHERE NOT EXISTS (SELECT 1 FROM attempts WHERE key = $2)
             ON CONFLICT (id) DO NOTHING RETURNING id, created_ms
         ), begun AS (
             INSERT INTO attempts (id, attempt, key, state, superseded, host, boot_id, submitter, workspace, provenance, created_ms)
             SELECT id, 1, $2, 'running', FALSE, $3, $4, $5, $6, $7, created_ms FROM analysis
             RETURNING attempt
         )
         SELECT attempt, set_config('synchronous_commit', 'off', true) FROM begun"
    ),
};

impl Store {
    /// Begins the next attempt of an analysis, in the state `running`, and returns its number. A repeat with the same
    /// key returns the same number.
    ///
    /// A power cut may undo this call. Nothing is lost then: nobody has been told of the attempt, and whoever finds
    /// its run directory commits it as an error. Killing the runner undoes nothing.
    pub fn begin(&mut self, begin: &NewAttempt) -> Result<u32, StoreError> {
        let rows =
            self.db
                .query_without_sync("begin the attempt", &BEGIN_FIRST, &begin_values(begin))?;
        if let Some(mut row) = rows.into_iter().next() {
            return row.attempt();
        }
        // The analysis exists. Whether it may have another attempt depends on its earlier ones.
        self.db
            .transaction("begin the attempt", TransactionKind::Write, |db| {
                let found = find_key(db, begin.key)?;
                if let Some(found) = found {
                    return match found.id == begin.id && !found.state.is_final() {
                        true => Ok(found.attempt),
                        false => Err(found.wrong_key_error(begin.id)),
                    };
                }
                begin_next(db, begin)
            })
    }

    /// The number that the next attempt of an analysis would get.
    pub fn next_attempt_number(&mut self, id: &str) -> Result<u32, StoreError> {
        let sql = "SELECT attempt_last + 1 FROM analyses WHERE id = $1";
        let row = self
            .db
            .query_one("look for the analysis", sql, &values![id])?;
        row.map_or(Ok(1), |mut row| row.attempt())
    }

    /// The number of the attempt with this key, if there is one.
    pub fn attempt_with_key(&mut self, key: &str) -> Result<Option<u32>, StoreError> {
        Ok(find_key(&mut self.db, key)?.map(|holder| holder.attempt))
    }
}

pub(crate) struct KeyHolder {
    pub id: String,
    pub attempt: u32,
    pub state: State,
    pub superseded: bool,
    pub committed_by: Option<String>,
}

impl KeyHolder {
    pub fn wrong_key_error(self, id: &str) -> StoreError {
        StoreError::WrongKey {
            id: id.to_owned(),
            other: self.id,
            attempt: self.attempt,
        }
    }
}

pub(crate) fn find_key(db: &mut Connection, key: &str) -> Result<Option<KeyHolder>, StoreError> {
    let what = "look for the attempt's key";
    let sql = "SELECT id, attempt, state, superseded, committed_by FROM attempts WHERE key = $1";
    db.fetch_one(what, sql, &values![key])
}

/// Begins the next attempt of an existing analysis, if that is allowed.
pub(crate) fn begin_next(db: &mut Connection, begin: &NewAttempt) -> Result<u32, StoreError> {
    let attempt = allocate_attempt_number(db, begin.id)?;
    refuse_conflicting_attempt(db, begin.id, begin.replace)?;
    insert_running(db, begin, attempt, begin.key, false)?;
    Ok(attempt)
}

pub(crate) fn insert_running(
    db: &mut Connection,
    begin: &NewAttempt,
    attempt: u32,
    key: &str,
    superseded: bool,
) -> Result<(), StoreError> {
    let now = db.now_ms()?;
    let sql = "
        INSERT INTO attempts (id, key, state, host, boot_id, submitter, workspace, provenance, attempt, superseded, created_ms)
        VALUES ($1, $2, 'running', $3, $4, $5, $6, $7, $8, $9, $10)";
    let begin = NewAttempt { key, ..*begin };
    let more = values![attempt, superseded, now];
    let values: Vec<SqlValue> = begin_values(&begin).into_iter().chain(more).collect();
    db.execute("begin the attempt", sql, &values).map(drop)
}

/// The values of [`BEGIN_FIRST`].
fn begin_values<'a>(begin: &NewAttempt<'a>) -> [SqlValue<'a>; 7] {
    values![
        begin.id,
        begin.key,
        begin.host,
        begin.boot_id,
        begin.submitter,
        begin.workspace,
        SqlValue::json(begin.provenance)
    ]
}

from_row!(KeyHolder: id, attempt, state, superseded, committed_by);
