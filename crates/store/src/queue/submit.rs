//! Submitting: all of a batch or nothing of it, and the files that go with it.
//!
//! On PostgreSQL locks are taken in one order, in which no two submissions can wait for each other: keys, analyses, files,
//! each sorted, and the bound of the queue last.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::Store;
use crate::attempts::commit::{allocate, refuse_another};
use crate::attempts::events::{self, Told};
use crate::database::connection::{Connection, Dialect, Purpose, Value};
use crate::database::error::StoreError;
use crate::database::rows::{self, Rows};
use crate::database::schema::random_hex;
use crate::queue::claim::{self, Place, Queued, Turns, fits};
use crate::queue::queue_types::{Capacity, Happened, Submit, Submitted};
use crate::types::manifest::ContentHash;
use crate::types::submission::INPUT_BYTES_MAX;

/// Numbers that no other program is likely to use for its locks. Keys share a few, because a server has room for so many
/// locks only, and a batch may have thousands of keys.
const LOCK_OF_BOUND: i64 = 7_310_025_461_900;
const LOCKS_OF_KEYS: i64 = 7_310_025_462_000;
const LOCKS_OF_KEYS_COUNT: u8 = 64;
/// How often a file may vanish between looking and writing before we say that something is wrong.
const REMOVALS_MAX: usize = 5;

impl Store {
    /// Queues all of them, or none: in one transaction. An error names which (`StoreError::Submission { at, .. }`).
    pub fn submit(&mut self, all: &[Submit], queue_max: u64) -> Result<Vec<Submitted>, StoreError> {
        let what = "queue the analyses";
        self.db.transaction(what, Purpose::Write, |db| {
            lock_keys(db, all)?;
            let known = known_keys(db, all)?;
            let fresh: Vec<usize> = (0..all.len()).filter(|at| known[*at].is_none()).collect();
            let now = db.now_ms()?;
            refuse_unfit(db, all, &fresh, now)?;
            let numbers = number(db, all, &fresh)?;
            let batch = Batch {
                all,
                fresh: &fresh,
                numbers: &numbers,
                now,
            };
            batch.write(db)?;
            if !fresh.is_empty() {
                keep_bound(db, fresh.len() as u64, queue_max)?;
                claim::notify_queue(db)?;
            }
            let submitted = known
                .into_iter()
                .enumerate()
                .map(|(at, known)| match known {
                    Some(id) => Submitted::Already { id },
                    None => Submitted::Now {
                        attempt: numbers.get(&at).copied().unwrap_or(1),
                    },
                });
            Ok(submitted.collect())
        })
    }

    /// A file of a submission. What does not have its hash is damaged, or was put there by somebody.
    pub fn blob(&mut self, hash: &ContentHash) -> Result<Option<Vec<u8>>, StoreError> {
        let what = "read a submitted file";
        // What is too long was not submitted by us, and is not even fetched.
        let sql = self.db.either(
            "SELECT content FROM blobs WHERE blake3 = $1 AND LENGTH(content) <= $2",
            "SELECT content FROM blobs WHERE blake3 = $1 AND OCTET_LENGTH(content) <= $2",
        );
        let name = hash.to_string();
        let of = [Value::text(&name), Value::count(INPUT_BYTES_MAX)];
        let Some(mut row) = self.db.query_one(what, sql, &of)? else {
            return Ok(None);
        };
        let content = row.bytes(what)?;
        match ContentHash::of(&content) == *hash {
            true => Ok(Some(content)),
            false => Err(StoreError::BadValue {
                what: "a submitted file",
            }),
        }
    }

    /// The request that an analysis was submitted with; `None`: it never was.
    pub fn submission(&mut self, id: &str) -> Result<Option<String>, StoreError> {
        let what = "read the submission";
        let sql = "SELECT request FROM submissions WHERE id = $1";
        let row = self.db.query_one(what, sql, &[Value::text(id)])?;
        row.map(|mut row| row.text(what)).transpose()
    }
}

fn at(at: usize) -> impl FnOnce(StoreError) -> StoreError {
    move |source| match source {
        // The database's condition is nobody's in particular.
        source if source.is_away() => source,
        source => StoreError::Submission {
            at,
            source: Box::new(source),
        },
    }
}

/// Whoever submits with a key does it alone, so that the second finds what the first made. SQLite has one writer anyway.
fn lock_keys(db: &mut Connection, all: &[Submit]) -> Result<(), StoreError> {
    if db.dialect() != Dialect::Postgres {
        return Ok(());
    }
    let keys = all.iter().filter_map(|submit| submit.submit_key);
    let bucket = |key: &str| blake3::hash(key.as_bytes()).as_bytes()[0] % LOCKS_OF_KEYS_COUNT;
    let buckets: BTreeSet<u8> = keys.map(bucket).collect();
    for bucket in buckets {
        advisory_lock(db, LOCKS_OF_KEYS + i64::from(bucket))?;
    }
    Ok(())
}

fn advisory_lock(db: &mut Connection, number: i64) -> Result<(), StoreError> {
    let sql = "SELECT 1::bigint FROM pg_advisory_xact_lock($1)";
    db.query("wait for other submissions", sql, &[Value::int(number)])
        .map(drop)
}

/// For each submission the id that its key got before, in the database or in this batch.
fn known_keys(db: &mut Connection, all: &[Submit]) -> Result<Vec<Option<String>>, StoreError> {
    let what = "look for the submission's key";
    let mut here: HashMap<&str, (&str, &str)> = HashMap::new();
    let mut known = Vec::new();
    for (i, submit) in all.iter().enumerate() {
        let Some(key) = submit.submit_key else {
            known.push(None);
            continue;
        };
        let sql = "SELECT id, fingerprint FROM submissions WHERE submit_key = $1";
        let found = match db.query_one(what, sql, &[Value::text(key)])? {
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
                return Err(at(i)(StoreError::KeyUsed { key, id }));
            }
        });
    }
    Ok(known)
}

/// Where it is known that nobody could ever run it, nobody has to wait to learn that.
fn refuse_unfit(
    db: &mut Connection,
    all: &[Submit],
    fresh: &[usize],
    now: i64,
) -> Result<(), StoreError> {
    let live = claim::live_workers(db, now)?;
    if live.is_empty() {
        return Ok(());
    }
    for i in fresh {
        let submit = &all[*i];
        let asked = Capacity {
            memory_bytes: submit.memory_bytes.unwrap_or(0),
            cpu_milli: submit.cpu_milli.unwrap_or(0),
        };
        if !live.iter().any(|total| fits(asked, *total)) {
            return Err(at(*i)(StoreError::DoesNotFit {
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

/// Locks every analysis and gives it its next number. By index of the submission.
fn number(
    db: &mut Connection,
    all: &[Submit],
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
            return Err(at(i)(StoreError::Twice { id }));
        }
        before = Some(submit.id);
        let attempt = allocate(db, submit.id)?;
        if attempt > 1 {
            refuse_another(db, submit.id, submit.replace).map_err(at(i))?;
        }
        numbers.insert(i, attempt);
    }
    Ok(numbers)
}

/// Those that are new, numbered, with their analyses locked.
struct Batch<'a> {
    all: &'a [Submit<'a>],
    fresh: &'a [usize],
    numbers: &'a HashMap<usize, u32>,
    now: i64,
}

impl<'a> Batch<'a> {
    fn each(&self) -> impl Iterator<Item = (&'a Submit<'a>, u32)> + use<'a> {
        let (all, numbers) = (self.all, self.numbers);
        let fresh = self.fresh.iter();
        fresh.map(move |i| (&all[*i], numbers.get(i).copied().unwrap_or(1)))
    }

    fn write(&self, db: &mut Connection) -> Result<(), StoreError> {
        let old = self.forget_replaced(db)?;
        self.write_submissions(db)?;
        self.write_blobs(db, &old)?;
        self.write_queue(db)
    }

    /// What an analysis was submitted with before is nobody's any more. The files that it had.
    fn forget_replaced(&self, db: &mut Connection) -> Result<BTreeSet<String>, StoreError> {
        let mut old = BTreeSet::new();
        for (submit, _) in self.each().filter(|(_, attempt)| *attempt > 1) {
            old.extend(blobs_of(db, submit.id)?);
            let sql = "DELETE FROM submissions WHERE id = $1";
            db.execute("replace the submission", sql, &[Value::text(submit.id)])?;
        }
        Ok(old)
    }

    fn write_submissions(&self, db: &mut Connection) -> Result<(), StoreError> {
        let mut rows = Rows::new(db, "write the submissions", &rows::SUBMISSIONS);
        for (submit, _) in self.each() {
            let retry_on: Vec<&str> = submit.retry_on.iter().map(|s| s.as_str()).collect();
            rows.push([
                Value::text(submit.id),
                Value::maybe_text(submit.submit_key),
                Value::text(submit.fingerprint),
                Value::text(submit.request_json),
                Value::text(submit.submitter),
                Value::int(submit.priority),
                Value::int(submit.retries),
                Value::Text(Some(retry_on.join(",").into())),
                Value::maybe_count(submit.memory_bytes),
                Value::maybe_count(submit.cpu_milli),
                Value::int(self.now),
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
                Some(content) => have_blob(db, hash, content)?,
                None => lock_blob(db, hash)?,
            }
        }
        let mut rows = Rows::new(
            db,
            "note the files of the submissions",
            &rows::SUBMISSION_BLOBS,
        );
        for (id, hash) in &refers {
            rows.push([Value::text(id), Value::text(hash)])?;
        }
        rows.finish()?;
        old.iter().try_for_each(|hash| drop_blob(db, hash))
    }

    fn write_queue(&self, db: &mut Connection) -> Result<(), StoreError> {
        let what = "queue the analyses";
        let place = |submit: &'a Submit<'a>, attempt: u32| Place {
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
            queued.push(Queued {
                retries_left: submit.retries,
                key: random_hex().map_err(StoreError::Runtime)?,
            });
        }
        let mut rows = Rows::new(db, what, &rows::QUEUED_ATTEMPTS);
        for ((submit, attempt), queued) in self.each().zip(&queued) {
            rows.push(place(submit, attempt).attempt_row(queued))?;
        }
        rows.finish()?;
        let mut turns = Turns::default();
        let mut places = Vec::new();
        for (submit, attempt) in self.each() {
            places.push(place(submit, attempt).row(db, &mut turns)?);
        }
        let mut rows = Rows::new(db, what, &rows::QUEUE);
        for place in places {
            rows.push(place)?;
        }
        rows.finish()?;
        let mut rows = Rows::new(db, what, &rows::EVENTS);
        for (submit, attempt) in self.each() {
            let told = Told {
                happened: Happened::Submitted,
                reason: None,
                by: Some(submit.submitter),
            };
            rows.push(events::row(submit.id, attempt, self.now, &told))?;
        }
        rows.finish()
    }
}

/// Counted when all is written, by one at a time until the end of its transaction, so that many who submit at once do not
/// get past it together.
fn keep_bound(db: &mut Connection, asked: u64, queue_max: u64) -> Result<(), StoreError> {
    let what = "count what waits";
    if db.dialect() == Dialect::Postgres {
        advisory_lock(db, LOCK_OF_BOUND)?;
    }
    let none = StoreError::BadValue { what };
    let mut row = db
        .query_one(what, "SELECT COUNT(*) FROM queue", &[])?
        .ok_or(none)?;
    let all = row.count(what)?;
    match all <= queue_max {
        true => Ok(()),
        false => Err(StoreError::QueueFull {
            queued: all.saturating_sub(asked),
            asked,
            queue_max,
        }),
    }
}

/// In order.
pub(crate) fn blobs_of(db: &mut Connection, id: &str) -> Result<Vec<String>, StoreError> {
    let what = "look for the submission's files";
    let sql = "SELECT blake3 FROM submission_blobs WHERE id = $1 ORDER BY blake3";
    let rows = db.query(what, sql, &[Value::text(id)])?;
    rows.into_iter().map(|mut row| row.text(what)).collect()
}

/// Afterwards the file is there, and stays until the end of the transaction.
fn have_blob(db: &mut Connection, hash: &str, content: &[u8]) -> Result<(), StoreError> {
    let what = "store a submitted file";
    let hold = db.either(
        "SELECT bytes FROM blobs WHERE blake3 = $1",
        "SELECT bytes FROM blobs WHERE blake3 = $1 FOR KEY SHARE",
    );
    for _ in 0..REMOVALS_MAX {
        if db.query_one(what, hold, &[Value::text(hash)])?.is_some() {
            return Ok(());
        }
        let sql = "INSERT INTO blobs (blake3, bytes, content) VALUES ($1, $2, $3) ON CONFLICT (blake3) DO NOTHING";
        let values = [
            Value::text(hash),
            Value::count(content.len() as u64),
            Value::bytes(content),
        ];
        db.execute(what, sql, &values)?;
    }
    Err(StoreError::BadValue {
        what: "a submitted file",
    })
}

/// Whoever refers to it is through, and nobody begins to until the end of the transaction.
pub(crate) fn lock_blob(db: &mut Connection, hash: &str) -> Result<(), StoreError> {
    let sql = db.either(
        "SELECT bytes FROM blobs WHERE blake3 = $1",
        "SELECT bytes FROM blobs WHERE blake3 = $1 FOR UPDATE",
    );
    db.query("hold a submitted file", sql, &[Value::text(hash)])
        .map(drop)
}

/// Removes a file that is locked, unless somebody refers to it.
pub(crate) fn drop_blob(db: &mut Connection, hash: &str) -> Result<(), StoreError> {
    let sql = "DELETE FROM blobs WHERE blake3 = $1
               AND NOT EXISTS (SELECT 1 FROM submission_blobs s WHERE s.blake3 = $1)";
    db.execute("remove a submitted file", sql, &[Value::text(hash)])
        .map(drop)
}
