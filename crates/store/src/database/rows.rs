//! Inserts many rows into a table with few statements. The statements are built once from constants and contain only
//! placeholders.

use std::fmt::Write as _;
use std::sync::LazyLock;

use crate::database::connection::Connection;
use crate::database::error::StoreError;
use crate::database::value::SqlValue;

/// An INSERT statement for one table.
pub(crate) struct InsertStatement {
    /// The text for each number of rows in [`SIZES`].
    texts: [LazyLock<String>; SIZES.len()],
    columns: usize,
}

/// Enough rows that a round trip of a millisecond does not matter, and few enough that the placeholders stay far
/// below both databases' bounds.
const ROWS_MAX: usize = 64;
/// How many rows a statement can take. A batch is split into these sizes, so that few statements are sent and few
/// texts are built.
const SIZES: [usize; 4] = [ROWS_MAX, 8, 2, 1];
/// When the pending rows hold more than this, they are written. An output may hold up to a mebibyte.
const PENDING_BYTES_MAX: usize = 1 << 20;

macro_rules! insert {
    ($name:ident, $columns:literal, $into:literal) => {
        pub(crate) static $name: InsertStatement = InsertStatement {
            texts: [
                LazyLock::new(|| text($into, $columns, SIZES[0])),
                LazyLock::new(|| text($into, $columns, SIZES[1])),
                LazyLock::new(|| text($into, $columns, SIZES[2])),
                LazyLock::new(|| text($into, $columns, SIZES[3])),
            ],
            columns: $columns,
        };
    };
}

insert!(
    OUTPUTS,
    11,
    "INSERT INTO outputs (id, attempt, path, path_text, bytes, media_type, blake3, modified_ms, artifact_store, host, content)"
);
insert!(
    REMARKS,
    5,
    "INSERT INTO remarks (id, attempt, position, path_text, remark)"
);
insert!(
    REMARK_COUNTS,
    4,
    "INSERT INTO remark_counts (id, attempt, remark, count)"
);
insert!(
    LOGS,
    12,
    "INSERT INTO logs (id, attempt, stream, total_bytes, dropped_bytes, truncated, head, tail, blake3, artifact_store, object_bytes, object_head_bytes)"
);
insert!(
    QUEUED_ATTEMPTS,
    9,
    "INSERT INTO attempts (id, attempt, key, state, host, boot_id, submitter, created_ms, retries_left)"
);
insert!(
    SUBMISSIONS,
    11,
    "INSERT INTO submissions (id, submit_key, fingerprint, request, submitter, priority, retries, retry_on, memory_bytes, cpu_milli, created_ms)"
);
insert!(
    SUBMISSION_BLOBS,
    2,
    "INSERT INTO submission_blobs (id, blake3)"
);
insert!(
    QUEUE,
    10,
    "INSERT INTO queue (id, attempt, submitter, priority, turn, queued_ms, ready_ms, not_before_ms, memory_bytes, cpu_milli)"
);
insert!(
    EVENTS,
    6,
    "INSERT INTO events (id, attempt, ms, event, reason, by)"
);

fn text(into: &'static str, columns: usize, rows: usize) -> String {
    let mut text = format!("{into} VALUES ");
    for row in 0..rows {
        text.push_str(if row == 0 { "(" } else { "), (" });
        for column in 1..=columns {
            let comma = if column == 1 { "" } else { ", " };
            // Writing to a String cannot fail.
            let _ = write!(text, "{comma}${}", row * columns + column);
        }
    }
    text.push(')');
    text
}

/// Collects rows for one table and writes them in batches.
pub(crate) struct RowInserter<'a, 'd> {
    db: &'d mut Connection,
    what: &'static str,
    insert: &'static InsertStatement,
    pending: Vec<SqlValue<'a>>,
    pending_bytes: usize,
}

impl<'a, 'd> RowInserter<'a, 'd> {
    pub fn new(
        db: &'d mut Connection,
        what: &'static str,
        insert: &'static InsertStatement,
    ) -> RowInserter<'a, 'd> {
        RowInserter {
            db,
            what,
            insert,
            pending: Vec::new(),
            pending_bytes: 0,
        }
    }

    pub fn push<const N: usize>(&mut self, row: [SqlValue<'a>; N]) -> Result<(), StoreError> {
        self.pending_bytes += row.iter().map(SqlValue::size).sum::<usize>();
        self.pending.extend(row);
        let full = self.pending.len() == ROWS_MAX * self.insert.columns;
        match full || self.pending_bytes > PENDING_BYTES_MAX {
            true => self.flush(),
            false => Ok(()),
        }
    }

    pub fn finish(mut self) -> Result<(), StoreError> {
        self.flush()
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        let mut rest = self.pending.as_slice();
        for (size, text) in SIZES.iter().zip(&self.insert.texts) {
            let values = size * self.insert.columns;
            while let Some((these, others)) = rest.split_at_checked(values) {
                let text: &'static str = text;
                self.db.execute(self.what, text, these)?;
                rest = others;
            }
        }
        self.pending.clear();
        self.pending_bytes = 0;
        Ok(())
    }
}
