//! The logs of an attempt: in its run directory, then as they are committed.

use super::{Ended, SettleError};
use crate::attempt::log_capture::Captured;
use crate::attempt::record::Record;
use crate::home::HomeError;
use crate::run_dir::{RunDir, tail_name};
use store::artifacts::{Artifacts, SharedLock};

/// Writes down what was heard, as far as it is not there yet.
pub(super) fn write(dir: &RunDir, logs: [&Captured; 2]) -> Result<(), SettleError> {
    for (name, captured) in store::STREAMS.into_iter().zip(logs) {
        dir.keep_log(name, &captured.head)?;
        if !captured.tail.is_empty() {
            dir.keep_log(&tail_name(name), &captured.tail)?;
        }
    }
    Ok(())
}

/// What was kept of a log.
pub(super) struct Text {
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl Text {
    pub fn bytes(&self) -> u64 {
        (self.head.len() + self.tail.len()) as u64
    }
}

pub(super) fn read(ended: &Ended<'_>) -> Result<Vec<Text>, SettleError> {
    let bytes_of = |name: &str| -> Result<Vec<u8>, HomeError> {
        let bytes = ended.dir.bytes(name, u64::MAX)?;
        Ok(bytes.unwrap_or_default())
    };
    let text = |stream: &str| -> Result<Text, SettleError> {
        let head = bytes_of(stream)?;
        // Without a beginning there is no end.
        let tail = match head.is_empty() {
            true => Vec::new(),
            false => bytes_of(&tail_name(stream))?,
        };
        Ok(Text { head, tail })
    };
    store::STREAMS.into_iter().map(text).collect()
}

/// The logs as they are committed: excerpts, and the whole as an object where it is longer.
pub(super) fn keep(
    ended: &Ended<'_>,
    record: &Record,
    texts: Vec<Text>,
    store: Option<(&Artifacts, &SharedLock)>,
) -> Result<Vec<store::LogRow>, SettleError> {
    let of = [&record.stdout, &record.stderr];
    let mut logs = Vec::new();
    for ((stream, facts), text) in store::STREAMS.into_iter().zip(of).zip(texts) {
        let whole = text.bytes();
        let Text { mut head, mut tail } = text;
        let head_bytes = head.len();
        // A runner that died has not told; then what arrived is all there is.
        let total_bytes = facts.bytes.max(whole);
        let mut object = None;
        if let Some((artifacts, hold)) = store
            && whole > ended.task.collection.inline_bytes_max
        {
            head.append(&mut tail);
            object = Some(artifacts.put(hold, &head)?);
            let half = usize::try_from(ended.task.collection.inline_bytes_max / 2);
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
