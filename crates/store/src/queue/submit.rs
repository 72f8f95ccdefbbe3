//! Queues a batch of requests with their files, all or none.
//!
//! On PostgreSQL every submission takes its locks in the same order, so no two of them can deadlock: submit keys,
//! analyses, files, each sorted, and the lock of the queue's bound last.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::Store;
use crate::analyses::analysis_row::{allocate_attempt_number, refuse_conflicting_attempt};
use crate::analyses::events::{self, EventKind, EventRecord};
use crate::analyses::notifications::notify_queue;
use crate::analyses::submitted_files::{list_files_of, lock_file, remove_unused_file, store_file};
use crate::database::connection::{Connection, Dialect, TransactionKind};
use crate::database::error::StoreError;
use crate::database::rows::{self, RowInserter};
use crate::database::value::{SqlValue, values};
use crate::queue::queue_row::{NewQueueRow, QueuedAttempt, TurnCounter};
use crate::queue::queue_types::{NewSubmission, SubmitOutcome};
use crate::queue::workers::live_workers;
use crate::types::capacity::Capacity;
use crate::types::random_hex::random_hex;

/// Numbers of advisory locks that no other program is likely to use. Submit keys share a few locks, because a server
/// has room for a limited number and a batch may have thousands of keys.
const QUEUE_BOUND_LOCK: i64 = 7_310_025_461_900;
const SUBMIT_KEY_LOCKS: i64 = 7_310_025_462_000;
const SUBMIT_KEY_LOCKS_COUNT: u8 = 64;
impl Store {
    /// Queues all submissions or none, in one transaction. An error names the submission that caused it
    /// (`StoreError::Submission { at, .. }`).
    pub fn submit(
        &mut self,
        all: &[NewSubmission],
        queue_max: u64,
    ) -> Result<Vec<SubmitOutcome>, StoreError> {
        let what = "queue the analyses";
        self.db.transaction(what, TransactionKind::Write, |db| {
            lock_keys(db, all)?;
            let known = known_keys(db, all)?;
            let fresh: Vec<usize> = (0..all.len()).filter(|at| known[*at].is_none()).collect();
            let now = db.now_ms()?;
            refuse_unrunnable(db, all, &fresh, now)?;
            let numbers = number_attempts(db, all, &fresh)?;
            let batch = Batch {
                all,
                fresh: &fresh,
                numbers: &numbers,
                now,
            };
            batch.write(db)?;
            if !fresh.is_empty() {
                check_queue_bound(db, fresh.len() as u64, queue_max)?;
                notify_queue(db)?;
            }
            let submitted = known
                .into_iter()
                .enumerate()
                .map(|(at, known)| match known {
                    Some(id) => SubmitOutcome::Already { id },
                    None => SubmitOutcome::Now {
                        attempt: numbers.get(&at).copied().unwrap_or(1),
                    },
                });
            Ok(submitted.collect())
        })
    }

    /// The request that an analysis was submitted with. `None` if it was not submitted.
    pub fn submission_request(&mut self, id: &str) -> Result<Option<String>, StoreError> {
        let what = "read the submission";
        let sql = "SELECT request FROM submissions WHERE id = $1";
        self.db.fetch_one(what, sql, &values![id])
    }
}

fn in_submission(at: usize) -> impl FnOnce(StoreError) -> StoreError {
    move |source| match source {
        // An error of the database belongs to no single submission.
        source if source.is_database_fault() => source,
        source => StoreError::Submission {
            at,
            source: Box::new(source),
        },
    }
}

/// Locks the submit keys, so that of two submissions with the same key the second finds the first. SQLite has only
/// one writer anyway.
fn lock_keys(db: &mut Connection, all: &[NewSubmission]) -> Result<(), StoreError> {
    if db.dialect() != Dialect::Postgres {
        return Ok(());
    }
    let keys = all.iter().filter_map(|submit| submit.submit_key);
    let bucket = |key: &str| blake3::hash(key.as_bytes()).as_bytes()[0] % SUBMIT_KEY_LOCKS_COUNT;
    let buckets: BTreeSet<u8> = keys.map(bucket).collect();
    for bucket in buckets {
        advisory_lock(db, SUBMIT_KEY_LOCKS + i64::from(bucket))?;
    }
    Ok(())
}

fn advisory_lock(db: &mut Connection, number: i64) -> Result<(), StoreError> {
    let sql = "SELECT 1::bigint FROM pg_advisory_xact_lock($1)";
    db.query("wait for other submissions", sql, &values![number])
        .map(drop)
}

/// For each submission, the id that its key already has, in the database or earlier in this batch.
fn known_keys(
    db: &mut Connection,
    all: &[NewSubmission],
) -> Result<Vec<Option<String>>, StoreError> {
    let what = "look for the submission's key";
    let mut here: HashMap<&str, (&str, &str)> = HashMap::new();
    let mut known = Vec::new();
    for (i, submit) in all.iter().enumerate() {
        let Some(key) = submit.submit_key else {
            known.push(None);
            continue;
        };
        let sql = "SELECT id, fingerprint FROM submissions WHERE submit_key = $1";
        let found = match db.query_one(what, sql, &values![key])? {
            Some(mut row) => Some((row.text(what)?, row.text(what)?)),
            None => here
                .insert(key, (submit.id, submit.fingerprint))
                .map(|(id, print)| (id.to_owned(), print.to_owned())),
        };
        known.push(match found {
            None => None,
            Some((id, print)) if print == submit.fingerprint => Some(id),
            Some((id, _)) => {
                let key = key.to_owned();
                return Err(in_submission(i)(StoreError::KeyUsed { key, id }));
            }
        });
    }
    Ok(known)
}

/// Refuses a request that is too large for every live worker, so that it does not wait in vain.
fn refuse_unrunnable(
    db: &mut Connection,
    all: &[NewSubmission],
    fresh: &[usize],
    now: i64,
) -> Result<(), StoreError> {
    let live = live_workers(db, now)?;
    if live.is_empty() {
        return Ok(());
    }
    for i in fresh {
        let submit = &all[*i];
        let asked = Capacity {
            memory_bytes: submit.memory_bytes.unwrap_or(0),
            cpu_milli: submit.cpu_milli.unwrap_or(0),
        };
        if !live.iter().any(|total| asked.fits_in(*total)) {
            return Err(in_submission(*i)(StoreError::DoesNotFit {
                id: submit.id.to_owned(),
                asked,
                largest: Capacity {
                    memory_bytes: live.iter().map(|w| w.memory_bytes).max().unwrap_or(0),
                    cpu_milli: live.iter().map(|w| w.cpu_milli).max().unwrap_or(0),
                },
            }));
        }
    }
    Ok(())
}

/// Locks every analysis and allocates its next attempt number. The result is keyed by the index of the submission.
fn number_attempts(
    db: &mut Connection,
    all: &[NewSubmission],
    fresh: &[usize],
) -> Result<HashMap<usize, u32>, StoreError> {
    let mut order = fresh.to_vec();
    order.sort_by_key(|i| all[*i].id);
    let mut numbers = HashMap::new();
    let mut before = None;
    for i in order {
        let submit = &all[i];
        if before == Some(submit.id) {
            let id = submit.id.to_owned();
            return Err(in_submission(i)(StoreError::DuplicateId { id }));
        }
        before = Some(submit.id);
        let attempt = allocate_attempt_number(db, submit.id)?;
        if attempt > 1 {
            refuse_conflicting_attempt(db, submit.id, submit.replace).map_err(in_submission(i))?;
        }
        numbers.insert(i, attempt);
    }
    Ok(numbers)
}

/// The new submissions, with numbers. Their analyses are locked.
struct Batch<'a> {
    all: &'a [NewSubmission<'a>],
    fresh: &'a [usize],
    numbers: &'a HashMap<usize, u32>,
    now: i64,
}

impl<'a> Batch<'a> {
    fn each(&self) -> impl Iterator<Item = (&'a NewSubmission<'a>, u32)> + use<'a> {
        let (all, numbers) = (self.all, self.numbers);
        let fresh = self.fresh.iter();
        fresh.map(move |i| (&all[*i], numbers.get(i).copied().unwrap_or(1)))
    }

    fn write(&self, db: &mut Connection) -> Result<(), StoreError> {
        let old = self.remove_replaced(db)?;
        self.write_submissions(db)?;
        self.write_blobs(db, &old)?;
        self.write_queue(db)
    }

    /// Removes the earlier submissions of the same analyses. Returns the hashes of their files.
    fn remove_replaced(&self, db: &mut Connection) -> Result<BTreeSet<String>, StoreError> {
        let mut old = BTreeSet::new();
        for (submit, _) in self.each().filter(|(_, attempt)| *attempt > 1) {
            old.extend(list_files_of(db, submit.id)?);
            let sql = "DELETE FROM submissions WHERE id = $1";
            db.execute("replace the submission", sql, &values![submit.id])?;
        }
        Ok(old)
    }

    fn write_submissions(&self, db: &mut Connection) -> Result<(), StoreError> {
        let mut rows = RowInserter::new(db, "write the submissions", &rows::SUBMISSIONS);
        for (submit, _) in self.each() {
            let retry_on: Vec<&str> = submit.retry_on.iter().map(|s| s.as_str()).collect();
            rows.push(values![
                submit.id,
                submit.submit_key,
                submit.fingerprint,
                submit.request_json,
                submit.submitter,
                submit.priority,
                submit.retries,
                SqlValue::Text(Some(retry_on.join(",").into())),
                submit.memory_bytes,
                submit.cpu_milli,
                self.now
            ])?;
        }
        rows.finish()
    }

    fn write_blobs(&self, db: &mut Connection, old: &BTreeSet<String>) -> Result<(), StoreError> {
        let mut wanted: BTreeMap<String, Option<&[u8]>> =
            old.iter().map(|hash| (hash.clone(), None)).collect();
        let mut refers = BTreeSet::new();
        for (submit, _) in self.each() {
            for (hash, content) in submit.blobs {
                let hash = hash.to_string();
                refers.insert((submit.id, hash.clone()));
                wanted.insert(hash, Some(content));
            }
        }
        for (hash, content) in &wanted {
            match content {
                Some(content) => store_file(db, hash, content)?,
                None => lock_file(db, hash)?,
            }
        }
        let mut rows = RowInserter::new(
            db,
            "note the files of the submissions",
            &rows::SUBMISSION_BLOBS,
        );
        for (id, hash) in &refers {
            rows.push(values![*id, hash])?;
        }
        rows.finish()?;
        old.iter().try_for_each(|hash| remove_unused_file(db, hash))
    }

    fn write_queue(&self, db: &mut Connection) -> Result<(), StoreError> {
        let what = "queue the analyses";
        let entry = |submit: &'a NewSubmission<'a>, attempt: u32| NewQueueRow {
            id: submit.id,
            attempt,
            submitter: submit.submitter,
            priority: submit.priority,
            now: self.now,
            not_before_ms: None,
            memory_bytes: submit.memory_bytes,
            cpu_milli: submit.cpu_milli,
        };
        let mut queued = Vec::new();
        for (submit, _) in self.each() {
            queued.push(QueuedAttempt {
                retries_left: submit.retries,
                key: random_hex().map_err(StoreError::Runtime)?,
            });
        }
        let mut rows = RowInserter::new(db, what, &rows::QUEUED_ATTEMPTS);
        for ((submit, attempt), queued) in self.each().zip(&queued) {
            rows.push(entry(submit, attempt).attempt_row(queued))?;
        }
        rows.finish()?;
        let mut turns = TurnCounter::default();
        let mut queue_rows = Vec::new();
        for (submit, attempt) in self.each() {
            queue_rows.push(entry(submit, attempt).queue_row(db, &mut turns)?);
        }
        let mut rows = RowInserter::new(db, what, &rows::QUEUE);
        for row in queue_rows {
            rows.push(row)?;
        }
        rows.finish()?;
        let mut rows = RowInserter::new(db, what, &rows::EVENTS);
        for (submit, attempt) in self.each() {
            let event = EventRecord::new(EventKind::Submitted, None, Some(submit.submitter));
            rows.push(events::event_row(submit.id, attempt, self.now, &event))?;
        }
        rows.finish()
    }
}

/// Checks the bound of the queue after all rows are written. The lock makes concurrent submissions count one after
/// the other, so that they cannot exceed the bound together.
fn check_queue_bound(db: &mut Connection, asked: u64, queue_max: u64) -> Result<(), StoreError> {
    let what = "count what waits";
    if db.dialect() == Dialect::Postgres {
        advisory_lock(db, QUEUE_BOUND_LOCK)?;
    }
    let sql = "SELECT COUNT(*) FROM queue";
    let all = db.query_single(what, sql, &[])?.count(what)?;
    match all <= queue_max {
        true => Ok(()),
        false => Err(StoreError::QueueFull {
            queued: all.saturating_sub(asked),
            asked,
            queue_max,
        }),
    }
}
