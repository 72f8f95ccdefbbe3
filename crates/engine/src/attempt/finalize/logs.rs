//! The logs of an attempt: in its run directory, and as rows of the transaction.

use crate::attempt::error::CommitError;
use crate::attempt::finalize::ended_attempt::EndedAttempt;
use crate::attempt::log_capture::CapturedLog;
use crate::home::HomeError;
use crate::run_dir::tail_name;
use store::artifacts::{Artifacts, SharedLock};

/// Writes the captured logs to the run directory, unless they are there already.
pub(super) fn write(ended: &EndedAttempt<'_>) -> Result<(), CommitError> {
    let logs = ended.captured_logs().into_iter().flatten();
    for (name, captured) in store::STREAMS.into_iter().zip(logs) {
        ended.dir.write_log(name, &captured.head)?;
        if !captured.tail.is_empty() {
            ended.dir.write_log(&tail_name(name), &captured.tail)?;
        }
    }
    Ok(())
}

/// What is kept of one log.
pub(super) struct LogExcerpt {
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl LogExcerpt {
    pub fn bytes(&self) -> u64 {
        (self.head.len() + self.tail.len()) as u64
    }
}

/// The logs as this process captured them, or as the run directory has them.
pub(super) fn excerpts(ended: &EndedAttempt<'_>) -> Result<Vec<LogExcerpt>, CommitError> {
    if let Some(logs) = ended.captured_logs() {
        let excerpt = |log: &CapturedLog| LogExcerpt {
            head: log.head.clone(),
            tail: log.tail.clone(),
        };
        return Ok(logs.map(excerpt).into());
    }
    let bytes_of = |name: &str| -> Result<Vec<u8>, HomeError> {
        let bytes = ended.dir.read_bytes(name, u64::MAX)?;
        Ok(bytes.unwrap_or_default())
    };
    let text = |stream: &str| -> Result<LogExcerpt, CommitError> {
        Ok(LogExcerpt {
            head: bytes_of(stream)?,
            tail: bytes_of(&tail_name(stream))?,
        })
    };
    store::STREAMS.into_iter().map(text).collect()
}

/// The rows for the logs: excerpts, and where a log is longer, the whole log as an object in the store.
pub(super) fn log_rows(
    ended: &EndedAttempt<'_>,
    log_excerpts: Vec<LogExcerpt>,
    store: Option<(&Artifacts, &SharedLock)>,
) -> Result<Vec<store::LogRow>, CommitError> {
    let of = [&ended.outcome.stdout, &ended.outcome.stderr];
    let mut logs = Vec::new();
    for ((stream, facts), text) in store::STREAMS.into_iter().zip(of).zip(log_excerpts) {
        let whole = text.bytes();
        let LogExcerpt { mut head, mut tail } = text;
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
