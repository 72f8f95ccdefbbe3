//! The rows that belong to a committed attempt: outputs, remarks, logs.

use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::rows::{self, RowInserter};
use crate::database::value::SqlValue;
use crate::types::attempt::Commit;

pub(crate) fn write_outputs(
    db: &mut Connection,
    commit: &mut Commit,
    attempt: u32,
) -> Result<(), StoreError> {
    let mut rows = RowInserter::new(db, "write the outputs", &rows::OUTPUTS);
    for output in commit.outputs {
        let content = (commit.content)(output).map_err(|source| StoreError::Content {
            path: output.path.text(),
            source,
        })?;
        rows.push([
            SqlValue::text(commit.begin.id),
            SqlValue::int(attempt),
            SqlValue::bytes(output.path.as_bytes()),
            SqlValue::Text(Some(output.path.text().into())),
            SqlValue::count(output.bytes),
            SqlValue::text(&output.media_type),
            SqlValue::Text(Some(output.blake3.to_string().into())),
            SqlValue::int(output.modified_ms),
            SqlValue::text(commit.artifact_store),
            SqlValue::text(commit.begin.host),
            SqlValue::Bytes(content.map(Into::into)),
        ])?;
    }
    rows.finish()
}

pub(crate) fn write_remarks(
    db: &mut Connection,
    commit: &Commit,
    attempt: u32,
) -> Result<(), StoreError> {
    let mut rows = RowInserter::new(db, "write the remarks", &rows::REMARKS);
    for (position, remarked) in commit.remarks.iter().enumerate() {
        rows.push([
            SqlValue::text(commit.begin.id),
            SqlValue::int(attempt),
            SqlValue::count(position as u64),
            SqlValue::text(&remarked.path),
            SqlValue::text(remarked.remark.as_str()),
        ])?;
    }
    rows.finish()?;
    let mut rows = RowInserter::new(db, "count the remarks", &rows::REMARK_COUNTS);
    for (remark, count) in commit.remark_counts {
        rows.push([
            SqlValue::text(commit.begin.id),
            SqlValue::int(attempt),
            SqlValue::text(remark.as_str()),
            SqlValue::count(*count),
        ])?;
    }
    rows.finish()
}

pub(crate) fn write_logs(
    db: &mut Connection,
    commit: &Commit,
    attempt: u32,
) -> Result<(), StoreError> {
    let mut rows = RowInserter::new(db, "write the logs", &rows::LOGS);
    for log in commit.logs {
        let object = log.object.as_ref();
        rows.push([
            SqlValue::text(commit.begin.id),
            SqlValue::int(attempt),
            SqlValue::text(log.stream),
            SqlValue::count(log.total_bytes),
            SqlValue::count(log.dropped_bytes),
            SqlValue::bool(log.dropped_bytes > 0),
            SqlValue::bytes(&log.head),
            SqlValue::bytes(&log.tail),
            SqlValue::Text(object.map(|hash| hash.to_string().into())),
            SqlValue::maybe_text(object.map(|_| commit.artifact_store)),
            SqlValue::maybe_count(object.map(|_| log.object_bytes)),
            SqlValue::maybe_count(object.map(|_| log.object_head_bytes)),
        ])?;
    }
    rows.finish()
}
