//! Commits attempts, exactly once each.

use crate::Store;
use crate::analyses::analysis_row::{allocate_attempt_number, lock_analysis};
use crate::analyses::events::{self, EventKind, EventRecord};
use crate::analyses::notifications::notify_commit;
use crate::attempts::begin::{begin_next, find_key, insert_running};
use crate::attempts::commit_rows::{write_logs, write_outputs, write_remarks};
use crate::database::connection::{
    Connection, DialectSql, TransactionKind, postgres_now, sqlite_now,
};
use crate::database::error::StoreError;
use crate::database::value::{Row, SqlValue, values};
use crate::queue::retry::{self, AttemptEnd, RetryBudget};
use crate::types::attempt::{Commit, CommitOutcome};
use crate::types::random_hex::to_hex;
use crate::types::result_value;

/// Changes the state of an attempt if number, key and old state match. Returns no row if the attempt does not exist,
/// has another key, or has ended.
macro_rules! finish {
    ($now:expr, $from:literal, $and:literal) => {
        concat!(
            "UPDATE attempts SET
                committed_by = $3, committed_ms = ",
            $now,
            ", state = $4, reason = $5, message = $6, started_ms = $7, ended_ms = $8,
                wall_ms = $9, cpu_ms = $10, memory_peak_bytes = $11, pids_peak = $12, disk_bytes = $13, files = $14,
                oom_kills = $15, exit_code = $16, signal = $17, isolation_level = $18, isolation = $19, limits = $20,
                hints = $21, notices = $22, provenance = COALESCE($23, provenance), complete = $24, outputs_count = $25,
                output_bytes = $26, refused_count = $27, result = $28, result_note = $29, post_process = $30 ",
            $from,
            " WHERE id = $1 AND attempt = $2 AND key = $3 AND state IN ('running', 'collecting') ",
            $and,
            " RETURNING committed_ms, retries_left, cancel_ms"
        )
    };
}

const FINISH: DialectSql = DialectSql {
    sqlite: finish!(sqlite_now!(), "", ""),
    postgres: finish!(postgres_now!(), "", ""),
};

/// [`FINISH`] as the first statement of a transaction. On PostgreSQL the statement locks the analysis first, like
/// every transaction, because the attempt is found by the id that the lock returns.
const COMMIT_FIRST: DialectSql = DialectSql {
    sqlite: concat!("BEGIN IMMEDIATE; ", finish!(sqlite_now!(), "", "")),
    postgres: concat!(
        "WITH locked AS (
             UPDATE analyses SET attempt_last = attempt_last WHERE id = $1 RETURNING id AS locked_id
         ) ",
        finish!(postgres_now!(), "FROM locked", "AND id = locked_id")
    ),
};

impl Store {
    /// Commits an attempt that was begun. Repeating the call is safe.
    pub fn commit(&mut self, commit: &mut Commit) -> Result<CommitOutcome, StoreError> {
        must_be_final(commit)?;
        let refusal = result_refusal(commit);
        let values = finish_values(commit, commit.attempt, commit.begin.key, refusal.as_deref());
        let what = "commit the attempt";
        self.db
            .transaction_with(what, &COMMIT_FIRST, &values, |db, rows| {
                let target = match rows.into_iter().next() {
                    Some(row) => CommitTarget::Write {
                        attempt: commit.attempt,
                        outcome: CommitOutcome::Now,
                        finished: FinishedRow::read(row)?,
                    },
                    None => find_late_target(db, commit)?,
                };
                match target {
                    CommitTarget::Write {
                        attempt,
                        outcome,
                        finished,
                    } => {
                        write_dependent_rows(db, commit, attempt, outcome, &finished)?;
                        Ok(outcome)
                    }
                    CommitTarget::AlreadyWritten(outcome) => Ok(outcome),
                }
            })
    }

    /// Begins and commits an attempt in one transaction, for results that were made without a sandbox. Returns the
    /// attempt's number.
    pub fn record(&mut self, commit: &mut Commit) -> Result<(u32, CommitOutcome), StoreError> {
        must_be_final(commit)?;
        self.db
            .transaction("record the results", TransactionKind::Write, |db| {
                let key = commit.begin.key;
                if let Some(found) = find_key(db, key)? {
                    return match found.id == commit.begin.id && found.state.is_final() {
                        true => Ok((found.attempt, CommitOutcome::Already)),
                        false => Err(found.wrong_key_error(commit.begin.id)),
                    };
                }
                let attempt = begin_next(db, &commit.begin)?;
                let finished = finish(db, commit, attempt, key)?;
                write_dependent_rows(db, commit, attempt, CommitOutcome::Now, &finished)?;
                Ok((attempt, CommitOutcome::Now))
            })
    }
}

fn must_be_final(commit: &Commit) -> Result<(), StoreError> {
    match commit.state.is_final() {
        true => Ok(()),
        false => Err(StoreError::NotFinal {
            id: commit.begin.id.to_owned(),
            state: commit.state,
        }),
    }
}

/// What a commit has to do.
enum CommitTarget {
    Write {
        attempt: u32,
        outcome: CommitOutcome,
        finished: FinishedRow,
    },
    AlreadyWritten(CommitOutcome),
}

/// An attempt that this transaction made final.
struct FinishedRow {
    now_ms: i64,
    retry_budget: RetryBudget,
}

impl FinishedRow {
    fn read(mut row: Row) -> Result<FinishedRow, StoreError> {
        let what = "commit the attempt";
        Ok(FinishedRow {
            now_ms: row.int(what)?,
            retry_budget: RetryBudget::read(&mut row, what)?,
        })
    }
}

/// Handles a commit whose attempt could not be changed. Finds out why. If somebody else ended or removed the attempt,
/// writes a new row for the late result.
fn find_late_target(db: &mut Connection, commit: &Commit) -> Result<CommitTarget, StoreError> {
    let key = commit.begin.key;
    lock_analysis(db, commit.begin.id)?;
    let late_key = match find_key(db, key)? {
        // The attempt was removed, so its key is free. The new row uses it, which makes a repeat of this commit
        // recognizable.
        None => key.to_owned(),
        Some(found) if found.id != commit.begin.id || !found.state.is_final() => {
            return Err(found.wrong_key_error(commit.begin.id));
        }
        Some(found) if found.committed_by.as_deref() == Some(key) => {
            return Ok(CommitTarget::AlreadyWritten(match found.superseded {
                true => CommitOutcome::Superseded {
                    attempt: found.attempt,
                },
                false => CommitOutcome::Already,
            }));
        }
        // Somebody else ended the attempt.
        Some(_) => superseded_key(key),
    };
    if let Some(found) = find_key(db, &late_key)? {
        let attempt = found.attempt;
        return Ok(CommitTarget::AlreadyWritten(CommitOutcome::Superseded {
            attempt,
        }));
    }
    // If the attempt was removed and no other attempt is current, the new row becomes the current one.
    let is_current = late_key == key && !has_current_attempt(db, commit.begin.id)?;
    let attempt = allocate_attempt_number(db, commit.begin.id)?;
    insert_running(db, &commit.begin, attempt, &late_key, !is_current)?;
    let finished = finish(db, commit, attempt, &late_key)?;
    let outcome = match is_current {
        true => CommitOutcome::Recreated { attempt },
        false => CommitOutcome::Superseded { attempt },
    };
    Ok(CommitTarget::Write {
        attempt,
        outcome,
        finished,
    })
}

fn has_current_attempt(db: &mut Connection, id: &str) -> Result<bool, StoreError> {
    let sql = "SELECT attempt FROM attempts WHERE id = $1 AND NOT superseded LIMIT 1";
    let row = db.query_one("look for other attempts", sql, &values![id])?;
    Ok(row.is_some())
}

/// The key for the row of a late result. It is the same for every repeat, so a late result is stored only once.
fn superseded_key(key: &str) -> String {
    let hash = blake3::derive_key(
        "fumehood 2026-11 key of a superseded attempt",
        key.as_bytes(),
    );
    to_hex(&hash[..16])
}

/// Why `result.json` is not stored as JSON, if it is refused.
fn result_refusal(commit: &Commit) -> Option<String> {
    let judged = commit
        .result
        .map(|text| result_value::check(text.as_bytes()))?;
    judged.err().map(|e| e.to_string())
}

/// Makes an attempt final that this transaction has created.
fn finish(
    db: &mut Connection,
    commit: &Commit,
    attempt: u32,
    key: &str,
) -> Result<FinishedRow, StoreError> {
    let what = "commit the attempt";
    let refusal = result_refusal(commit);
    let sql = db.for_dialect(FINISH.sqlite, FINISH.postgres);
    let row = db.query_one(
        what,
        sql,
        &finish_values(commit, attempt, key, refusal.as_deref()),
    )?;
    row.map_or(Err(StoreError::BadValue { what }), FinishedRow::read)
}

/// The values of [`FINISH`].
fn finish_values<'v, 'a: 'v>(
    commit: &Commit<'a>,
    attempt: u32,
    key: &'v str,
    refusal: Option<&'v str>,
) -> [SqlValue<'v>; 30] {
    let result = commit.result.filter(|_| refusal.is_none());
    let usage = commit.usage.as_ref();
    values![
        commit.begin.id,
        attempt,
        key,
        commit.state.as_str(),
        commit.reason,
        commit.message,
        commit.started_ms,
        commit.ended_ms,
        usage.map(|u| u.wall_ms),
        usage.map(|u| u.cpu_ms),
        usage.and_then(|u| u.memory_peak_bytes),
        usage.and_then(|u| u.pids_peak),
        usage.map(|u| u.disk_bytes),
        usage.map(|u| u.files),
        usage.map(|u| u.oom_kills),
        commit.exit_code.map(i64::from),
        commit.signal.map(i64::from),
        commit.isolation_level,
        SqlValue::json(commit.isolation_json),
        SqlValue::json(commit.limits_json),
        SqlValue::json(commit.hints_json),
        SqlValue::json(commit.notices_json),
        SqlValue::json(commit.begin.provenance),
        commit.complete,
        commit.outputs.len() as u64,
        commit.output_bytes,
        commit.refused_count,
        SqlValue::json(result),
        refusal.or(commit.result_note),
        commit.post_process.as_str()
    ]
}

/// Writes everything that belongs to the attempt. Queues a retry if one is due, but never after a late result.
fn write_dependent_rows(
    db: &mut Connection,
    commit: &mut Commit,
    attempt: u32,
    outcome: CommitOutcome,
    finished: &FinishedRow,
) -> Result<(), StoreError> {
    write_outputs(db, commit, attempt)?;
    write_remarks(db, commit, attempt)?;
    write_logs(db, commit, attempt)?;
    let event = EventRecord::new(
        EventKind::Committed,
        Some(commit.state.as_str()),
        Some(commit.begin.host),
    );
    events::record_event_at(db, commit.begin.id, attempt, finished.now_ms, &event)?;
    if outcome == CommitOutcome::Now {
        let end = AttemptEnd {
            id: commit.begin.id,
            attempt,
            state: commit.state,
            reason: commit.reason,
        };
        retry::retry_or_finish(db, &end, &finished.retry_budget)?;
    }
    notify_commit(db, commit.begin.id, attempt, commit.state)?;
    (commit.before_commit)().map_err(StoreError::BeforeCommit)
}
