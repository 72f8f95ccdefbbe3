//! SQLite: a file that is opened and asked in the caller's own thread.

use std::borrow::Cow;
use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::fallible_iterator::FallibleIterator as _;
use rusqlite::types::ValueRef;
use rusqlite::{Batch, Connection, Error, OpenFlags, Statement};

use crate::database::connection::{Cell, Row, Table, Value, without_nul};
use crate::database::json;

/// - The write-ahead log outlives its writers, who do not wait for a checkpoint when they end. Whoever opens the database
///   when nobody else has it open reads all of the log, so it must stay short; and a checkpoint costs two syncs, so it must
///   not come with every run, which writes about sixteen pages.
/// - `secure_delete`: what was erased or removed, such as the values of secret variables, is overwritten, not only unlinked.
/// - `trusted_schema`: a function or virtual table that somebody put into the file's schema is not run.
const SESSION: &str = "
    PRAGMA journal_mode = WAL;
    PRAGMA foreign_keys = ON;
    PRAGMA synchronous = FULL;
    PRAGMA wal_autocheckpoint = 128;
    PRAGMA secure_delete = ON;
    PRAGMA trusted_schema = OFF;
    PRAGMA cell_size_check = ON;
";

/// The path is absolute: SQLite gives `:memory:`, the empty name and `file:…` meanings of their own.
pub(crate) fn open(path: &Path, lock_wait: Duration) -> Result<Connection, Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX
        | OpenFlags::SQLITE_OPEN_PRIVATE_CACHE;
    let mut wire = Connection::open_with_flags(path, flags)?;
    wire.busy_handler(Some(patient(lock_wait)))?;
    run(&wire, SESSION, &[])?;
    Ok(wire)
}

/// Waits for another's lock, of which most are held for less than a millisecond: SQLite's own way of waiting soon sleeps for
/// tens of them, while nobody holds the lock at all.
fn patient(lock_wait: Duration) -> impl FnMut(i32) -> bool + Send + 'static {
    const STEP: Duration = Duration::from_micros(250);
    const STEPS_MAX: u32 = 20;
    /// SQLite does not begin to count anew for every wait.
    const APART: Duration = Duration::from_millis(100);
    let (mut since, mut asked) = (Instant::now(), Instant::now());
    move |count| {
        let count = u32::try_from(count).unwrap_or(0);
        if count == 0 || asked.elapsed() > APART {
            since = Instant::now();
        }
        asked = Instant::now();
        let left = lock_wait.saturating_sub(since.elapsed());
        std::thread::sleep(left.min(STEP * (count + 1).min(STEPS_MAX)));
        !left.is_zero()
    }
}

/// Every statement of the text in its turn, all with the same values. The rows of all of them, and how many the last that
/// writes has changed.
pub(crate) fn run(wire: &Connection, sql: &str, values: &[Value]) -> Result<(Table, u64), Error> {
    let mut table = Table {
        columns: Vec::new(),
        rows: Vec::new(),
    };
    let mut changed = 0;
    let sql = numbered(sql);
    let mut statements = Batch::new(wire, &sql);
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
            changed = wire.changes();
        }
    }
    Ok((table, changed))
}

/// `$2` is a name to SQLite, which looks for it among all others each time, and `?2` the second value. No text of ours has
/// a dollar before a digit for any other reason.
fn numbered(sql: &str) -> Cow<'_, str> {
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

fn bind(statement: &mut Statement, values: &[Value]) -> Result<(), Error> {
    for at in 1..=statement.parameter_count() {
        let missing = || Error::InvalidParameterCount(values.len(), at);
        let value = values.get(at - 1).ok_or_else(missing)?;
        match value {
            Value::Int(v) => statement.raw_bind_parameter(at, v)?,
            Value::Bool(v) => statement.raw_bind_parameter(at, v)?,
            Value::Text(v) => statement.raw_bind_parameter(at, v.as_deref().map(without_nul))?,
            Value::Json(v) => {
                statement.raw_bind_parameter(at, v.as_deref().map(json::without_nul))?;
            }
            Value::Bytes(v) => statement.raw_bind_parameter(at, v.as_deref())?,
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
