//! Beginning an attempt and committing it: the two transactions that everything else rests on.

use crate::Store;
use crate::attempts::attempt::{Begin, Commit, Committed, Lost, Proof, State};
use crate::attempts::events::{self, Told};
use crate::database::connection::{
    Connection, Dialect, First, Purpose, Row, Value, postgres_now, sqlite_now,
};
use crate::database::error::StoreError;
use crate::database::rows::{self, Rows};
use crate::queue::queue_types::Happened;
use crate::queue::retry::{self, Ended, Left};
use crate::types::result_value;

/// The first attempt of an analysis that nobody knew, which is nearly every one: in one exchange. Does nothing, and
/// returns no row, if the analysis is known, or the key. `changes()` are those of the statement before.
const BEGIN_FIRST: First = First {
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
    // The setting is this transaction's alone.
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

/// The guarded change of state. No row: the attempt is not there, not ours, or ended.
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

const FINISH: First = First {
    sqlite: finish!(sqlite_now!(), "", ""),
    postgres: finish!(postgres_now!(), "", ""),
};

/// The same as the first statement of a transaction. On PostgreSQL the analysis is locked first, as always: the attempt
/// is looked for by what that gives back.
const COMMIT_FIRST: First = First {
    sqlite: concat!("BEGIN IMMEDIATE; ", finish!(sqlite_now!(), "", "")),
    postgres: concat!(
        "WITH locked AS (
             UPDATE analyses SET attempt_last = attempt_last WHERE id = $1 RETURNING id AS locked_id
         ) ",
        finish!(postgres_now!(), "FROM locked", "AND id = locked_id")
    ),
};

impl Store {
    /// Makes the next attempt of an analysis, in the state `running`. Repeated with the same key it returns the same number.
    ///
    /// A power cut may undo it: nobody was told of anything yet that would be lost with it, and whoever finds the run
    /// directory of such an attempt commits that it came to nothing. Killing the runner undoes nothing.
    pub fn begin(&mut self, begin: &Begin) -> Result<u32, StoreError> {
        let rows = self
            .db
            .undurably("begin the attempt", &BEGIN_FIRST, &running(begin))?;
        if let Some(mut row) = rows.into_iter().next() {
            return row.attempt();
        }
        // The analysis is known: what follows depends on what became of its earlier attempts.
        self.db
            .transaction("begin the attempt", Purpose::Write, |db| {
                let found = find_key(db, begin.key)?;
                if let Some(found) = found {
                    return match found.id == begin.id && !found.state.is_final() {
                        true => Ok(found.attempt),
                        false => Err(found.wrong(begin.id)),
                    };
                }
                claim(db, begin)
            })
    }

    /// What the next attempt would be called.
    pub fn next_attempt(&mut self, id: &str) -> Result<u32, StoreError> {
        let sql = "SELECT attempt_last + 1 FROM analyses WHERE id = $1";
        let row = self
            .db
            .query_one("look for the analysis", sql, &[Value::text(id)])?;
        row.map_or(Ok(1), |mut row| row.attempt())
    }

    /// The number of the attempt that was begun with this key, if one was.
    pub fn attempt_of(&mut self, key: &str) -> Result<Option<u32>, StoreError> {
        Ok(find_key(&mut self.db, key)?.map(|holder| holder.attempt))
    }

    /// Commits an attempt that was begun, exactly once.
    pub fn commit(&mut self, commit: &mut Commit) -> Result<Committed, StoreError> {
        must_be_final(commit)?;
        let refusal = refusal(commit);
        let values = ending(commit, commit.attempt, commit.begin.key, refusal.as_deref());
        let what = "commit the attempt";
        self.db
            .transaction_with(what, &COMMIT_FIRST, &values, |db, rows| {
                let claim = match rows.into_iter().next() {
                    Some(row) => Claim::Write {
                        attempt: commit.attempt,
                        committed: Committed::Now,
                        finished: Finished::read(row)?,
                    },
                    None => claim_late(db, commit)?,
                };
                match claim {
                    Claim::Write {
                        attempt,
                        committed,
                        finished,
                    } => {
                        write(db, commit, attempt, committed, &finished)?;
                        Ok(committed)
                    }
                    Claim::Written(committed) => Ok(committed),
                }
            })
    }

    /// Begins and commits in one transaction, for results that were made without a sandbox. With the number it got.
    pub fn record(&mut self, commit: &mut Commit) -> Result<(u32, Committed), StoreError> {
        must_be_final(commit)?;
        self.db
            .transaction("record the results", Purpose::Write, |db| {
                let key = commit.begin.key;
                if let Some(found) = find_key(db, key)? {
                    return match found.id == commit.begin.id && found.state.is_final() {
                        true => Ok((found.attempt, Committed::Already)),
                        false => Err(found.wrong(commit.begin.id)),
                    };
                }
                let attempt = claim(db, &commit.begin)?;
                let finished = finish(db, commit, attempt, key)?;
                write(db, commit, attempt, Committed::Now, &finished)?;
                Ok((attempt, Committed::Now))
            })
    }

    /// Ends an attempt whose runner is gone, as `error`, and queues the next one where there is to be one. False: it is not
    /// running any more.
    pub fn give_up(&mut self, lost: &Lost) -> Result<bool, StoreError> {
        let what = "give up the attempt";
        self.db.transaction(what, Purpose::Write, |db| {
            lock(db, lost.id)?;
            let now = db.now_ms()?;
            let values = [
                Value::text(lost.id),
                Value::int(lost.attempt),
                Value::text(lost.key),
                Value::text(lost.by),
                Value::text(lost.reason),
                Value::text(lost.message),
                Value::int(now),
                Value::bool(lost.proof == Proof::Known),
            ];
            // What somebody had cancelled, and of which nothing more is known, is cancelled.
            let sql = "
                UPDATE attempts SET state = CASE WHEN cancel_ms IS NULL THEN 'error' ELSE 'cancelled' END,
                    committed_by = $4, reason = $5, message = $6, committed_ms = $7, complete = FALSE
                WHERE id = $1 AND attempt = $2 AND key = $3 AND state IN ('running', 'collecting')
                    AND ($8 OR lease_ms IS NULL OR lease_ms < $7)
                RETURNING state";
            let row = db.query_one(what, sql, &values)?;
            let done = row.is_some();
            if let Some(mut row) = row {
                let state = row.state()?;
                // Not by whom: that is a token.
                let told = Told {
                    happened: Happened::Ended,
                    reason: Some(lost.reason),
                    by: None,
                };
                events::tell(db, lost.id, lost.attempt, &told)?;
                let ended = Ended {
                    id: lost.id,
                    attempt: lost.attempt,
                    state,
                    reason: lost.reason,
                };
                let left = retry::left(db, &ended)?;
                retry::after_end(db, &ended, &left)?;
                notify(db, lost.id, lost.attempt, state)?;
            }
            Ok(done)
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

struct Holder {
    id: String,
    attempt: u32,
    state: State,
    superseded: bool,
    committed_by: Option<String>,
}

impl Holder {
    fn wrong(self, id: &str) -> StoreError {
        StoreError::WrongKey {
            id: id.to_owned(),
            other: self.id,
            attempt: self.attempt,
        }
    }
}

fn find_key(db: &mut Connection, key: &str) -> Result<Option<Holder>, StoreError> {
    let what = "look for the attempt's key";
    let sql = "SELECT id, attempt, state, superseded, committed_by FROM attempts WHERE key = $1";
    let row = db.query_one(what, sql, &[Value::text(key)])?;
    let holder = row.map(|mut row| {
        Ok(Holder {
            id: row.text(what)?,
            attempt: row.attempt()?,
            state: row.state()?,
            superseded: row.bool(what)?,
            committed_by: row.maybe_text(what)?,
        })
    });
    holder.transpose()
}

/// Whoever changes attempts of an analysis does it alone until the end of the transaction. Always the first lock that is
/// taken, so that no two transactions wait for each other.
pub(crate) fn lock(db: &mut Connection, id: &str) -> Result<(), StoreError> {
    let sql = "UPDATE analyses SET attempt_last = attempt_last WHERE id = $1";
    db.execute("lock the analysis", sql, &[Value::text(id)])
        .map(drop)
}

/// How often an analysis may vanish between making and numbering it before we say that something is wrong.
const REMOVALS_MAX: usize = 5;

/// The next number, with the analysis locked.
pub(crate) fn allocate(db: &mut Connection, id: &str) -> Result<u32, StoreError> {
    let what = "number the attempt";
    for _ in 0..REMOVALS_MAX {
        let now = db.now_ms()?;
        let sql = "INSERT INTO analyses (id, created_ms, attempt_last) VALUES ($1, $2, 0) ON CONFLICT (id) DO NOTHING";
        db.execute(what, sql, &[Value::text(id), Value::int(now)])?;
        // A number that nobody could read is not given out.
        let sql = "UPDATE analyses SET attempt_last = attempt_last + 1
                   WHERE id = $1 AND attempt_last BETWEEN 0 AND 4294967294 RETURNING attempt_last";
        if let Some(mut row) = db.query_one(what, sql, &[Value::text(id)])? {
            return row.attempt();
        }
    }
    Err(StoreError::BadValue {
        what: "the analysis",
    })
}

/// A new attempt, if the analysis may have one.
fn claim(db: &mut Connection, begin: &Begin) -> Result<u32, StoreError> {
    let attempt = allocate(db, begin.id)?;
    refuse_another(db, begin.id, begin.replace)?;
    insert_running(db, begin, attempt, begin.key, false)?;
    Ok(attempt)
}

/// Refuses an attempt beside one that has not ended, and, unless it is to be replaced, after one that has.
pub(crate) fn refuse_another(
    db: &mut Connection,
    id: &str,
    replace: bool,
) -> Result<(), StoreError> {
    let what = "look for earlier attempts";
    // Unfinished ones first, then those that count, then the newest.
    let sql = "
        SELECT attempt, state, committed_ms, host FROM attempts WHERE id = $1
        ORDER BY CASE WHEN state IN ('queued', 'running', 'collecting') THEN 0 ELSE 1 END, superseded, attempt DESC
        LIMIT 1";
    if let Some(mut row) = db.query_one(what, sql, &[Value::text(id)])? {
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

fn insert_running(
    db: &mut Connection,
    begin: &Begin,
    attempt: u32,
    key: &str,
    superseded: bool,
) -> Result<(), StoreError> {
    let now = db.now_ms()?;
    let sql = "
        INSERT INTO attempts (id, key, state, host, boot_id, submitter, workspace, provenance, attempt, superseded, created_ms)
        VALUES ($1, $2, 'running', $3, $4, $5, $6, $7, $8, $9, $10)";
    let begin = Begin { key, ..*begin };
    let more = [
        Value::int(attempt),
        Value::bool(superseded),
        Value::int(now),
    ];
    let values: Vec<Value> = running(&begin).into_iter().chain(more).collect();
    db.execute("begin the attempt", sql, &values).map(drop)
}

/// The values of [`BEGIN_FIRST`].
fn running<'a>(begin: &Begin<'a>) -> [Value<'a>; 7] {
    [
        Value::text(begin.id),
        Value::text(begin.key),
        Value::text(begin.host),
        Value::text(begin.boot_id),
        Value::maybe_text(begin.submitter),
        Value::maybe_text(begin.workspace),
        Value::json(begin.provenance),
    ]
}

/// What a commit finds.
enum Claim {
    Write {
        attempt: u32,
        committed: Committed,
        finished: Finished,
    },
    Written(Committed),
}

/// An attempt that has just become final.
struct Finished {
    now_ms: i64,
    left: Left,
}

impl Finished {
    fn read(mut row: Row) -> Result<Finished, StoreError> {
        let what = "commit the attempt";
        Ok(Finished {
            now_ms: row.int(what)?,
            left: Left::read(&mut row, what)?,
        })
    }
}

/// The attempt was not ours to end. Finds out why, and stores it beside whatever stands there.
fn claim_late(db: &mut Connection, commit: &Commit) -> Result<Claim, StoreError> {
    let key = commit.begin.key;
    lock(db, commit.begin.id)?;
    let late_key = match find_key(db, key)? {
        // Removed. Its key is free, and makes a repeat of this commit known.
        None => key.to_owned(),
        Some(found) if found.id != commit.begin.id || !found.state.is_final() => {
            return Err(found.wrong(commit.begin.id));
        }
        Some(found) if found.committed_by.as_deref() == Some(key) => {
            return Ok(Claim::Written(match found.superseded {
                true => Committed::Superseded {
                    attempt: found.attempt,
                },
                false => Committed::Already,
            }));
        }
        // Ended by somebody else.
        Some(_) => late_key(key),
    };
    if let Some(found) = find_key(db, &late_key)? {
        let attempt = found.attempt;
        return Ok(Claim::Written(Committed::Superseded { attempt }));
    }
    // The row is gone, and nobody else's stands for the analysis: this one does, as it would have.
    let counts = late_key == key && !has_one_that_counts(db, commit.begin.id)?;
    let attempt = allocate(db, commit.begin.id)?;
    insert_running(db, &commit.begin, attempt, &late_key, !counts)?;
    let finished = finish(db, commit, attempt, &late_key)?;
    let committed = match counts {
        true => Committed::Anew { attempt },
        false => Committed::Superseded { attempt },
    };
    Ok(Claim::Write {
        attempt,
        committed,
        finished,
    })
}

fn has_one_that_counts(db: &mut Connection, id: &str) -> Result<bool, StoreError> {
    let sql = "SELECT attempt FROM attempts WHERE id = $1 AND NOT superseded LIMIT 1";
    let row = db.query_one("look for other attempts", sql, &[Value::text(id)])?;
    Ok(row.is_some())
}

/// The same for every repeat, so that a late attempt too is stored once.
fn late_key(key: &str) -> String {
    let hash = blake3::derive_key(
        "fumehood 2026-11 key of a superseded attempt",
        key.as_bytes(),
    );
    hash[..16].iter().map(|b| format!("{b:02x}")).collect()
}

/// Why what it calls its result is not stored, if it is not.
fn refusal(commit: &Commit) -> Option<String> {
    let judged = commit
        .result
        .map(|text| result_value::check(text.as_bytes()))?;
    judged.err().map(|e| e.to_string())
}

/// The change of state of an attempt that this transaction has made, or has found to be its own.
fn finish(
    db: &mut Connection,
    commit: &Commit,
    attempt: u32,
    key: &str,
) -> Result<Finished, StoreError> {
    let what = "commit the attempt";
    let refusal = refusal(commit);
    let sql = db.either(FINISH.sqlite, FINISH.postgres);
    let row = db.query_one(what, sql, &ending(commit, attempt, key, refusal.as_deref()))?;
    row.map_or(Err(StoreError::BadValue { what }), Finished::read)
}

/// The values of [`FINISH`].
fn ending<'v, 'a: 'v>(
    commit: &Commit<'a>,
    attempt: u32,
    key: &'v str,
    refusal: Option<&'v str>,
) -> [Value<'v>; 30] {
    let result = commit.result.filter(|_| refusal.is_none());
    let usage = commit.usage.as_ref();
    [
        Value::text(commit.begin.id),
        Value::int(attempt),
        Value::text(key),
        Value::text(commit.state.as_str()),
        Value::text(commit.reason),
        Value::maybe_text(commit.message),
        Value::Int(commit.started_ms),
        Value::Int(commit.ended_ms),
        Value::maybe_count(usage.map(|u| u.wall_ms)),
        Value::maybe_count(usage.map(|u| u.cpu_ms)),
        Value::maybe_count(usage.and_then(|u| u.memory_peak_bytes)),
        Value::maybe_count(usage.and_then(|u| u.pids_peak)),
        Value::maybe_count(usage.map(|u| u.disk_bytes)),
        Value::maybe_count(usage.map(|u| u.files)),
        Value::maybe_count(usage.map(|u| u.oom_kills)),
        Value::Int(commit.exit_code.map(i64::from)),
        Value::Int(commit.signal.map(i64::from)),
        Value::maybe_text(commit.isolation_level),
        Value::json(commit.isolation_json),
        Value::json(commit.limits_json),
        Value::json(commit.hints_json),
        Value::json(commit.notices_json),
        Value::json(commit.begin.provenance),
        Value::bool(commit.complete),
        Value::count(commit.outputs.len() as u64),
        Value::count(commit.output_bytes),
        Value::count(commit.refused_count),
        Value::json(result),
        Value::maybe_text(refusal.or(commit.result_note)),
        Value::maybe_text(commit.post_process.as_str()),
    ]
}

/// Everything that hangs on the attempt, and the next one where there is to be one: that is never after one that is late.
fn write(
    db: &mut Connection,
    commit: &mut Commit,
    attempt: u32,
    committed: Committed,
    finished: &Finished,
) -> Result<(), StoreError> {
    write_outputs(db, commit, attempt)?;
    write_remarks(db, commit, attempt)?;
    write_logs(db, commit, attempt)?;
    let told = Told {
        happened: Happened::Committed,
        reason: Some(commit.state.as_str()),
        by: Some(commit.begin.host),
    };
    events::tell_at(db, commit.begin.id, attempt, finished.now_ms, &told)?;
    if committed == Committed::Now {
        let ended = Ended {
            id: commit.begin.id,
            attempt,
            state: commit.state,
            reason: commit.reason,
        };
        retry::after_end(db, &ended, &finished.left)?;
    }
    notify(db, commit.begin.id, attempt, commit.state)?;
    (commit.before_commit)().map_err(StoreError::BeforeCommit)
}

fn write_outputs(db: &mut Connection, commit: &mut Commit, attempt: u32) -> Result<(), StoreError> {
    let mut rows = Rows::new(db, "write the outputs", &rows::OUTPUTS);
    for output in commit.outputs {
        let content = (commit.content)(output).map_err(|source| StoreError::Content {
            path: output.path.text(),
            source,
        })?;
        rows.push([
            Value::text(commit.begin.id),
            Value::int(attempt),
            Value::bytes(output.path.as_bytes()),
            Value::Text(Some(output.path.text().into())),
            Value::count(output.bytes),
            Value::text(&output.media_type),
            Value::Text(Some(output.blake3.to_string().into())),
            Value::int(output.modified_ms),
            Value::text(commit.artifact_store),
            Value::text(commit.begin.host),
            Value::Bytes(content.map(Into::into)),
        ])?;
    }
    rows.finish()
}

fn write_remarks(db: &mut Connection, commit: &Commit, attempt: u32) -> Result<(), StoreError> {
    let mut rows = Rows::new(db, "write the remarks", &rows::REMARKS);
    for (position, remarked) in commit.remarks.iter().enumerate() {
        rows.push([
            Value::text(commit.begin.id),
            Value::int(attempt),
            Value::count(position as u64),
            Value::text(&remarked.path),
            Value::text(remarked.remark.as_str()),
        ])?;
    }
    rows.finish()?;
    let mut rows = Rows::new(db, "count the remarks", &rows::REMARK_COUNTS);
    for (remark, count) in commit.remark_counts {
        rows.push([
            Value::text(commit.begin.id),
            Value::int(attempt),
            Value::text(remark.as_str()),
            Value::count(*count),
        ])?;
    }
    rows.finish()
}

fn write_logs(db: &mut Connection, commit: &Commit, attempt: u32) -> Result<(), StoreError> {
    let mut rows = Rows::new(db, "write the logs", &rows::LOGS);
    for log in commit.logs {
        let object = log.object.as_ref();
        rows.push([
            Value::text(commit.begin.id),
            Value::int(attempt),
            Value::text(log.stream),
            Value::count(log.total_bytes),
            Value::count(log.dropped_bytes),
            Value::bool(log.dropped_bytes > 0),
            Value::bytes(&log.head),
            Value::bytes(&log.tail),
            Value::Text(object.map(|hash| hash.to_string().into())),
            Value::maybe_text(object.map(|_| commit.artifact_store)),
            Value::maybe_count(object.map(|_| log.object_bytes)),
            Value::maybe_count(object.map(|_| log.object_head_bytes)),
        ])?;
    }
    rows.finish()
}

/// Heard by whoever listens on `fumehood_commit`, when the transaction is through. SQLite has nothing of the kind.
pub(crate) fn notify(
    db: &mut Connection,
    id: &str,
    attempt: u32,
    state: State,
) -> Result<(), StoreError> {
    if db.dialect() != Dialect::Postgres {
        return Ok(());
    }
    let payload = serde_json::json!({"id": id, "attempt": attempt, "state": state.as_str()});
    let sql = "SELECT pg_notify('fumehood_commit', $1)";
    let payload = payload.to_string();
    db.execute("tell of the commit", sql, &[Value::text(&payload)])
        .map(drop)
}
