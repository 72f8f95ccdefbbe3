//! The rows that belong to a committed attempt: outputs, remarks, logs.

use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::rows::{self, RowInserter};
use crate::database::value::{SqlValue, values};
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
        rows.push(values![
            commit.begin.id,
            attempt,
            output.path.as_bytes(),
            SqlValue::Text(Some(output.path.text().into())),
            output.bytes,
            &output.media_type,
            SqlValue::Text(Some(output.blake3.to_string().into())),
            output.modified_ms,
            commit.artifact_store,
            commit.begin.host,
            SqlValue::Bytes(content.map(Into::into))
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
        rows.push(values![
            commit.begin.id,
            attempt,
            position as u64,
            &remarked.path,
            remarked.remark.as_str()
        ])?;
    }
    rows.finish()?;
    let mut rows = RowInserter::new(db, "count the remarks", &rows::REMARK_COUNTS);
    for (remark, count) in commit.remark_counts {
        rows.push(values![commit.begin.id, attempt, remark.as_str(), *count])?;
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
        rows.push(values![
            commit.begin.id,
            attempt,
            log.stream,
            log.total_bytes,
            log.dropped_bytes,
            log.dropped_bytes > 0,
            &log.head,
            &log.tail,
            SqlValue::Text(object.map(|hash| hash.to_string().into())),
            object.map(|_| commit.artifact_store),
            object.map(|_| log.object_bytes),
            object.map(|_| log.object_head_bytes)
        ])?;
    }
    rows.finish()
}
