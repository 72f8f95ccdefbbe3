//! Removing analyses, and finding out what the artifact store still has to keep.

use std::io;

use crate::Store;
use crate::attempts::attempt::State;
use crate::attempts::read::ten_states;
use crate::database::connection::{Connection, Purpose, Value};
use crate::database::error::StoreError;
use crate::queue::submit;
use crate::types::manifest::ContentHash;

/// What to do about an attempt that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhileRunning {
    Refuse,
    /// Its runner will find it gone, and store what it has as superseded.
    Remove,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed {
    pub attempts: u64,
    pub outputs: u64,
}

/// An analysis that has ended and is old enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removable {
    pub id: String,
    /// Of the attempt that counts.
    pub state: State,
    pub attempts: u64,
    /// Of the newest attempt.
    pub committed_ms: i64,
    pub output_bytes: u64,
}

/// Hashes per question, so that memory does not grow with the record.
const PAGE: u32 = 1_000;

impl Store {
    /// Removes an analysis with all its attempts. What they left in the artifact store is for garbage collection.
    pub fn remove(&mut self, id: &str, running: WhileRunning) -> Result<Removed, StoreError> {
        let what =
            "remove the analysis (on PostgreSQL the role needs DELETE: see docs/database.md)";
        self.db.transaction(what, Purpose::Write, |db| {
            let lock = "UPDATE analyses SET attempt_last = attempt_last WHERE id = $1";
            if db.execute(what, lock, &[Value::text(id)])? == 0 {
                let given = id.to_owned();
                return Err(StoreError::NotFound { given });
            }
            // First what a claim holds, so that it is through before we look: see `queue.rs`.
            match running {
                WhileRunning::Refuse => refuse_running(db, id)?,
                WhileRunning::Remove => {
                    let sql = "DELETE FROM queue WHERE id = $1";
                    db.execute(what, sql, &[Value::text(id)])?;
                }
            }
            let files = submit::blobs_of(db, id)?;
            for hash in &files {
                submit::lock_blob(db, hash)?;
            }
            let mut delete = |sql: &'static str| db.execute(what, sql, &[Value::text(id)]);
            let outputs = delete("DELETE FROM outputs WHERE id = $1")?;
            delete("DELETE FROM logs WHERE id = $1")?;
            delete("DELETE FROM remarks WHERE id = $1")?;
            delete("DELETE FROM remark_counts WHERE id = $1")?;
            let attempts = delete("DELETE FROM attempts WHERE id = $1")?;
            // Submission and events go with it.
            delete("DELETE FROM analyses WHERE id = $1")?;
            for hash in &files {
                submit::drop_blob(db, hash)?;
            }
            Ok(Removed { attempts, outputs })
        })
    }

    /// Analyses all of whose attempts ended before a time of the database's clock, and the last of which is in one of
    /// the states (none means any). Oldest first.
    pub fn removable(
        &mut self,
        before_ms: i64,
        states: &[State],
        limit: u32,
    ) -> Result<Vec<Removable>, StoreError> {
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
        let mut values = vec![Value::int(before_ms)];
        values.extend(ten_states(states).map(|state| Value::text(state.as_str())));
        values.push(Value::int(limit));
        let rows = self.db.query(what, sql, &values)?;
        let removable = rows.into_iter().map(|mut row| {
            Ok(Removable {
                id: row.text(what)?,
                state: row.state()?,
                attempts: row.count(what)?,
                committed_ms: row.int(what)?,
                output_bytes: row.count(what)?,
            })
        });
        removable.collect()
    }

    /// Every object that the record refers to in one artifact store, in order, each once. What is committed meanwhile may
    /// be left out: a sweep must spare what is younger than itself, or hold the store.
    pub fn referenced(
        &mut self,
        artifact_store: &str,
        each: &mut dyn FnMut(&ContentHash) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let what = "look for objects that are referred to";
        // Each half is cut to a page by its index before they are joined, or every page would read all that is left.
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
        let mut after = String::new();
        loop {
            let values = [
                Value::text(artifact_store),
                Value::text(&after),
                Value::int(PAGE),
            ];
            let rows = self.db.query(what, sql, &values)?;
            let is_last = rows.len() < PAGE as usize;
            for mut row in rows {
                after = row.text(what)?;
                let hash = ContentHash::parse(&after)
                    .map_err(|_| StoreError::BadValue { what: "a hash" })?;
                each(&hash).map_err(StoreError::Callback)?;
            }
            if is_last {
                return Ok(());
            }
        }
    }
}

fn refuse_running(db: &mut Connection, id: &str) -> Result<(), StoreError> {
    let what = "look for attempts that have not ended";
    let sql = "SELECT attempt, state, host FROM attempts WHERE id = $1
               AND state IN ('queued', 'running', 'collecting') ORDER BY attempt LIMIT 1";
    match db.query_one(what, sql, &[Value::text(id)])? {
        None => Ok(()),
        Some(mut row) => Err(StoreError::Running {
            id: id.to_owned(),
            attempt: row.attempt()?,
            state: row.state()?,
            host: row.text(what)?,
        }),
    }
}
