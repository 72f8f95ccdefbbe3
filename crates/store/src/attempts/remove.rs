//! Removes analyses, and finds the objects that the artifact store must keep.

use std::io;

use crate::Store;
use crate::analyses::submitted_files;
use crate::attempts::read::ten_states;
use crate::database::connection::{Connection, TransactionKind};
use crate::database::error::StoreError;
use crate::database::value::{SqlValue, from_row, values};
use crate::types::attempt::State;
use crate::types::manifest::ContentHash;

/// What to do with an attempt that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnfinishedPolicy {
    /// Remove nothing, and return an error.
    Refuse,
    /// Remove it. Its runner finds the row gone and stores its result under a new number.
    Remove,
}

/// What was removed with an analysis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RemovalCounts {
    /// The number of attempts.
    pub attempts: u64,
    /// The number of outputs.
    pub outputs: u64,
}

/// A finished analysis that is old enough to be removed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct RemovableAnalysis {
    /// The id of the analysis.
    pub id: String,
    /// The state of the current attempt.
    #[serde(rename = "status")]
    pub state: State,
    /// The number of attempts.
    pub attempts: u64,
    /// When the newest attempt was committed.
    #[serde(skip)]
    pub committed_ms: i64,
    /// Sum of the lengths of the outputs of all attempts.
    pub output_bytes: u64,
}

impl Store {
    /// Removes an analysis with all its attempts. A sweep of the artifact store later removes their objects.
    pub fn remove(
        &mut self,
        id: &str,
        unfinished: UnfinishedPolicy,
    ) -> Result<RemovalCounts, StoreError> {
        let what =
            "remove the analysis (on PostgreSQL the role needs DELETE: see docs/database.md)";
        self.db.transaction(what, TransactionKind::Write, |db| {
            let lock = "UPDATE analyses SET attempt_last = attempt_last WHERE id = $1";
            if db.execute(what, lock, &values![id])? == 0 {
                let given = id.to_owned();
                return Err(StoreError::NotFound { given });
            }
            // `Remove` deletes the rows of `queue` first. A claim locks these rows, so it has ended before this
            // transaction continues: see `queue/claim.rs`.
            match unfinished {
                UnfinishedPolicy::Refuse => refuse_unfinished(db, id)?,
                UnfinishedPolicy::Remove => {
                    let sql = "DELETE FROM queue WHERE id = $1";
                    db.execute(what, sql, &values![id])?;
                }
            }
            let files = submitted_files::list_files_of(db, id)?;
            for hash in &files {
                submitted_files::lock_file(db, hash)?;
            }
            let mut delete = |sql: &'static str| db.execute(what, sql, &values![id]);
            let outputs = delete("DELETE FROM outputs WHERE id = $1")?;
            delete("DELETE FROM logs WHERE id = $1")?;
            delete("DELETE FROM remarks WHERE id = $1")?;
            delete("DELETE FROM remark_counts WHERE id = $1")?;
            let attempts = delete("DELETE FROM attempts WHERE id = $1")?;
            // The foreign keys also remove the submission and the events.
            delete("DELETE FROM analyses WHERE id = $1")?;
            for hash in &files {
                submitted_files::remove_unused_file(db, hash)?;
            }
            Ok(RemovalCounts { attempts, outputs })
        })
    }

    /// Analyses whose attempts all ended before `before_ms`, by the database's clock, and whose current attempt is in
    /// one of the given states (empty means any). Oldest first.
    pub fn removable(
        &mut self,
        before_ms: i64,
        states: &[State],
        limit: u32,
    ) -> Result<Vec<RemovableAnalysis>, StoreError> {
        let what = "look for analyses to remove";
        let sql = "
            SELECT a.id, a.state, s.attempts, s.committed_ms, s.output_bytes
            FROM attempts a JOIN (
                SELECT id, COUNT(*) AS attempts, MAX(committed_ms) AS committed_ms,
                    CAST(SUM(COALESCE(output_bytes, 0)) AS BIGINT) AS output_bytes,
                    MIN(CASE WHEN state IN ('queued', 'running', 'collecting') THEN 0 ELSE 1 END) AS all_ended
                FROM attempts GROUP BY id
            ) s ON s.id = a.id
            WHERE s.all_ended = 1 AND s.committed_ms < $1 AND a.state IN ($2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
                AND NOT EXISTS (
                    SELECT 1 FROM attempts b WHERE b.id = a.id AND (
                        (a.superseded AND NOT b.superseded)
                        OR (a.superseded = b.superseded AND b.attempt > a.attempt)))
            ORDER BY s.committed_ms, a.id LIMIT $12";
        let mut values = vec![SqlValue::int(before_ms)];
        values.extend(ten_states(states).map(|state| SqlValue::text(state.as_str())));
        values.push(SqlValue::int(limit));
        self.db.fetch_all(what, sql, &values)
    }

    /// Calls `each` for every object of an artifact store that the database refers to, in order, each once. May miss
    /// objects that are committed meanwhile, so a sweep must either lock the artifact store or keep objects that are
    /// newer than the start of the sweep.
    pub fn for_each_referenced_object(
        &mut self,
        artifact_store: &str,
        each: &mut dyn FnMut(&ContentHash) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let what = "look for objects that are referred to";
        // Cut each half to a page by its index before joining them; otherwise every page would read all remaining
        // rows.
        let sql = "
            SELECT blake3 FROM (
                SELECT DISTINCT blake3 FROM outputs WHERE artifact_store = $1 AND blake3 > $2 ORDER BY blake3 LIMIT $3
            ) AS of_outputs
            UNION
            SELECT blake3 FROM (
                SELECT DISTINCT blake3 FROM logs WHERE artifact_store = $1 AND blake3 IS NOT NULL AND blake3 > $2
                ORDER BY blake3 LIMIT $3
            ) AS of_logs
            ORDER BY blake3 LIMIT $3";
        self.for_each_page_row(what, sql, artifact_store, &mut |hash, _| {
            each(hash).map_err(StoreError::Callback)
        })
    }
}

fn refuse_unfinished(db: &mut Connection, id: &str) -> Result<(), StoreError> {
    let what = "look for attempts that have not ended";
    let sql = "SELECT attempt, state, host FROM attempts WHERE id = $1
               AND state IN ('queued', 'running', 'collecting') ORDER BY attempt LIMIT 1";
    match db.query_one(what, sql, &values![id])? {
        None => Ok(()),
        Some(mut row) => Err(StoreError::Running {
            id: id.to_owned(),
            attempt: row.attempt()?,
            state: row.state()?,
            host: row.text(what)?,
        }),
    }
}

from_row!(RemovableAnalysis: id, state, attempts, committed_ms, output_bytes);
