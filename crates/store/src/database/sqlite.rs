//! SQLite: a file that the calling thread itself reads and writes.

use std::borrow::Cow;
use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::fallible_iterator::FallibleIterator as _;
use rusqlite::types::ValueRef;
use rusqlite::{Batch, Connection, Error, OpenFlags, Statement};

use crate::database::json;
use crate::database::value::{Cell, Row, RowSet, SqlValue, without_nul};

/// - `wal_autocheckpoint`: writers exit without a checkpoint, so the write-ahead log outlives them. The first process
///   to open the database reads the whole log, so the log must stay short. But a checkpoint costs two syncs, so it
///   must not happen in every run, which writes about sixteen pages.
/// - `secure_delete`: deleted data, such as the values of secret variables, is overwritten.
/// - `trusted_schema`: SQLite does not run a function or virtual table that somebody put into the file's schema.
const SESSION: &str = "
    PRAGMA journal_mode = WAL;
    PRAGMA foreign_keys = ON;
    PRAGMA synchronous = FULL;
    PRAGMA wal_autocheckpoint = 128;
    PRAGMA secure_delete = ON;
    PRAGMA trusted_schema = OFF;
    PRAGMA cell_size_check = ON;
";

/// The path must be absolute, because SQLite gives `:memory:`, the empty name and `file:…` meanings of their own.
pub(crate) fn open(path: &Path, lock_wait: Duration) -> Result<Connection, Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX
        | OpenFlags::SQLITE_OPEN_PRIVATE_CACHE;
    let mut connection = Connection::open_with_flags(path, flags)?;
    connection.busy_handler(Some(busy_handler(lock_wait)))?;
    run(&connection, SESSION, &[])?;
    Ok(connection)
}

/// Waits for another connection's lock. Most locks are held for less than a millisecond, but SQLite's own handler
/// soon sleeps for tens of milliseconds, longer than the lock is held.
fn busy_handler(lock_wait: Duration) -> impl FnMut(i32) -> bool + Send + 'static {
    const STEP: Duration = Duration::from_micros(250);
    const STEPS_MAX: u32 = 20;
    /// SQLite does not restart the count for every wait. A pause of this length between calls means a new wait.
    const NEW_WAIT_AFTER: Duration = Duration::from_millis(100);
    let (mut since, mut asked) = (Instant::now(), Instant::now());
    move |count| {
        let count = u32::try_from(count).unwrap_or(0);
        if count == 0 || asked.elapsed() > NEW_WAIT_AFTER {
            since = Instant::now();
        }
        asked = Instant::now();
        let left = lock_wait.saturating_sub(since.elapsed());
        std::thread::sleep(left.min(STEP * (count + 1).min(STEPS_MAX)));
        !left.is_zero()
    }
}

/// Runs every statement of the text, all with the same values. Returns the rows of all statements, and how many rows
/// the last writing statement changed.
pub(crate) fn run(
    connection: &Connection,
    sql: &str,
    values: &[SqlValue],
) -> Result<(RowSet, u64), Error> {
    let mut table = RowSet {
        columns: Vec::new(),
        rows: Vec::new(),
    };
    let mut changed = 0;
    let sql = with_numbered_parameters(sql);
    let mut statements = Batch::new(connection, &sql);
    while let Some(mut statement) = statements.next()? {
        bind(&mut statement, values)?;
        if statement.column_count() > 0 && table.rows.is_empty() {
            let names = statement.column_names();
            table.columns = names.into_iter().map(str::to_owned).collect();
        }
        let count = statement.column_count();
        let mut rows = statement.raw_query();
        while let Some(row) = rows.next()? {
            let cells = (0..count).map(|at| cell(row.get_ref(at)?, at));
            table
                .rows
                .push(Row::new(cells.collect::<Result<Vec<_>, Error>>()?));
        }
        drop(rows);
        if !statement.readonly() {
            changed = connection.changes();
        }
    }
    Ok((table, changed))
}

/// Replaces `$2` by `?2`. SQLite treats `$2` as a name, which it searches for among all parameters, and `?2` as the
/// second parameter. The store's statements have a dollar before a digit for no other reason.
fn with_numbered_parameters(sql: &str) -> Cow<'_, str> {
    if !sql.contains('$') {
        return Cow::Borrowed(sql);
    }
    let mut after_dollar = sql.chars().skip(1);
    let number = |this: char| match (this, after_dollar.next()) {
        ('$', Some('0'..='9')) => '?',
        _ => this,
    };
    Cow::Owned(sql.chars().map(number).collect())
}

fn bind(statement: &mut Statement, values: &[SqlValue]) -> Result<(), Error> {
    for at in 1..=statement.parameter_count() {
        let missing = || Error::InvalidParameterCount(values.len(), at);
        let value = values.get(at - 1).ok_or_else(missing)?;
        match value {
            SqlValue::Int(v) => statement.raw_bind_parameter(at, v)?,
            SqlValue::Bool(v) => statement.raw_bind_parameter(at, v)?,
            SqlValue::Text(v) => statement.raw_bind_parameter(at, v.as_deref().map(without_nul))?,
            SqlValue::Json(v) => {
                statement.raw_bind_parameter(at, v.as_deref().map(json::without_nul))?;
            }
            SqlValue::Bytes(v) => statement.raw_bind_parameter(at, v.as_deref())?,
        }
    }
    Ok(())
}

fn cell(value: ValueRef, at: usize) -> Result<Cell, Error> {
    Ok(match value {
        ValueRef::Null => Cell::Null,
        ValueRef::Integer(value) => Cell::Int(value),
        ValueRef::Real(value) => Cell::Text(value.to_string()),
        ValueRef::Blob(bytes) => Cell::Bytes(bytes.to_vec()),
        ValueRef::Text(bytes) => {
            let text = str::from_utf8(bytes).map_err(|e| Error::Utf8Error(at, e))?;
            Cell::Text(text.to_owned())
        }
    })
}
