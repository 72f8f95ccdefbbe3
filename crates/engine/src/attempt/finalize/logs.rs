//! The logs of an attempt: in its run directory, and as rows of the transaction.

use crate::attempt::error::CommitError;
use crate::attempt::finalize::ended_attempt::EndedAttempt;
use crate::attempt::log_capture::CapturedLog;
use crate::attempt::record::Record;
use crate::home::HomeError;
use crate::run_dir::{RunDir, tail_name};
use store::artifacts::{Artifacts, SharedLock};

/// Writes the captured logs to the run directory, unless they are there already.
pub(super) fn write(dir: &RunDir, logs: [&CapturedLog; 2]) -> Result<(), CommitError> {
    for (name, captured) in store::STREAMS.into_iter().zip(logs) {
        dir.write_log(name, &captured.head)?;
        if !captured.tail.is_empty() {
            dir.write_log(&tail_name(name), &captured.tail)?;
        }
    }
    Ok(())
}

/// What the run directory has of one log.
pub(super) struct KeptLog {
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl KeptLog {
    pub fn bytes(&self) -> u64 {
        (self.head.len() + self.tail.len()) as u64
    }
}

pub(super) fn read(ended: &EndedAttempt<'_>) -> Result<Vec<KeptLog>, CommitError> {
    let bytes_of = |name: &str| -> Result<Vec<u8>, HomeError> {
        let bytes = ended.dir.read_bytes(name, u64::MAX)?;
        Ok(bytes.unwrap_or_default())
    };
    let text = |stream: &str| -> Result<KeptLog, CommitError> {
        let head = bytes_of(stream)?;
        // A log without a head has no tail either.
        let tail = match head.is_empty() {
            true => Vec::new(),
            false => bytes_of(&tail_name(stream))?,
        };
        Ok(KeptLog { head, tail })
    };
    store::STREAMS.into_iter().map(text).collect()
}

/// The rows for the logs: excerpts, and where a log is longer, the whole log as an object in the store.
pub(super) fn log_rows(
    ended: &EndedAttempt<'_>,
    record: &Record,
    kept_logs: Vec<KeptLog>,
    store: Option<(&Artifacts, &SharedLock)>,
) -> Result<Vec<store::LogRow>, CommitError> {
    let of = [&record.stdout, &record.stderr];
    let mut logs = Vec::new();
    for ((stream, facts), text) in store::STREAMS.into_iter().zip(of).zip(kept_logs) {
        let whole = text.bytes();
        let KeptLog { mut head, mut tail } = text;
        let head_bytes = head.len();
        // A runner that died did not record the length. Then what arrived is all there is.
        let total_bytes = facts.bytes.max(whole);
        let mut object = None;
        if let Some((artifacts, hold)) = store
            && whole > ended.commit_plan.collection.inline_bytes_max
        {
            head.append(&mut tail);
            object = Some(artifacts.put(hold, &head)?);
            let half = usize::try_from(ended.commit_plan.collection.inline_bytes_max / 2);
            let half = half.unwrap_or(usize::MAX).min(head.len());
            tail = head.split_off(head.len().saturating_sub(half).max(half));
            head.truncate(half);
            head.shrink_to_fit();
        }
        logs.push(store::LogRow {
            stream,
            total_bytes,
            dropped_bytes: total_bytes - whole,
            head,
            tail,
            object,
            object_bytes: whole,
            object_head_bytes: head_bytes as u64,
        });
    }
    Ok(logs)
}
