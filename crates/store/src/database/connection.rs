//! One connection to either database behind blocking calls: the only file that knows there are two.
//!
//! Every statement is a `&'static str` with `$1`, `$2`, … and typed values beside it, so no value can become SQL. The async
//! driver of PostgreSQL runs on a current-thread runtime in here. A connection that was lost is made anew by the next call, but never
//! within a transaction.

use std::borrow::Cow;
use std::future::Future;
use std::time::Duration;

use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgArguments, PgTypeInfo, PgValueFormat, PgValueRef};
use sqlx::{
    Arguments as _, Column as _, Connection as _, Decode, Encode, PgConnection, Postgres, Row as _,
    Type, TypeInfo as _, ValueRef as _,
};
use tokio::runtime::Runtime;

use crate::attempts::attempt::State;
use crate::database::error::{Fault, StoreError, Trouble};
use crate::database::json;
use crate::database::location::Location;
use crate::database::open::{self, FileId};
use crate::database::sqlite;

/// Longer than the server's own bounds (see `open.rs`), so that it cuts in only when the server is silent.
const SERVER_SILENT_MS: u64 = 150_000;
/// A goodbye is a courtesy; the server also understands a closed socket.
const GOODBYE_MS: u64 = 1_000;

/// The database's own clock, in Unix milliseconds, as part of a statement.
macro_rules! sqlite_now {
    () => {
        "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"
    };
}
macro_rules! postgres_now {
    () => {
        "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"
    };
}
pub(crate) use {postgres_now, sqlite_now};

/// A value on its way to a statement. NULL has a type too, because PostgreSQL infers nothing from an untyped one here.
#[derive(Clone, Debug)]
pub(crate) enum Value<'a> {
    Int(Option<i64>),
    Text(Option<Cow<'a, str>>),
    Bytes(Option<Cow<'a, [u8]>>),
    Json(Option<Cow<'a, str>>),
    Bool(Option<bool>),
}

impl<'a> Value<'a> {
    pub fn text(text: &'a str) -> Value<'a> {
        Value::Text(Some(Cow::Borrowed(text)))
    }

    pub fn maybe_text(text: Option<&'a str>) -> Value<'a> {
        Value::Text(text.map(Cow::Borrowed))
    }

    pub fn int(value: impl Into<i64>) -> Value<'a> {
        Value::Int(Some(value.into()))
    }

    /// Sizes and counts; what is beyond the databases' integers is as large as they go.
    pub fn count(value: u64) -> Value<'a> {
        Value::Int(Some(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    pub fn maybe_count(value: Option<u64>) -> Value<'a> {
        value.map_or(Value::Int(None), Value::count)
    }

    pub fn bytes(bytes: &'a [u8]) -> Value<'a> {
        Value::Bytes(Some(Cow::Borrowed(bytes)))
    }

    pub fn json(text: Option<&'a str>) -> Value<'a> {
        Value::Json(text.map(Cow::Borrowed))
    }

    pub fn bool(value: bool) -> Value<'a> {
        Value::Bool(Some(value))
    }

    /// About how much memory it holds.
    pub fn size(&self) -> usize {
        match self {
            Value::Text(Some(text)) | Value::Json(Some(text)) => text.len(),
            Value::Bytes(Some(bytes)) => bytes.len(),
            _ => size_of::<Value>(),
        }
    }
}

/// PostgreSQL refuses NUL in text, and a tool that reads SQLite's may stop at one. The one place where it is escaped.
pub(crate) fn without_nul<'a>(text: &'a str) -> Cow<'a, str> {
    match text.contains('\0') {
        true => Cow::Owned(text.replace('\0', "\\x00")),
        false => Cow::Borrowed(text),
    }
}

/// `jsonb` as PostgreSQL sends and takes it: a version byte, then the text. The driver's own support needs a feature
/// that would turn every JSON value into a tree.
struct Jsonb(String);

const JSONB: PgTypeInfo = PgTypeInfo::with_oid(Oid(3802));
const JSONB_VERSION: u8 = 1;

impl Type<Postgres> for Jsonb {
    fn type_info() -> PgTypeInfo {
        JSONB
    }
}

impl Encode<'_, Postgres> for Jsonb {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buffer.extend_from_slice(&[JSONB_VERSION]);
        buffer.extend_from_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }
}

fn postgres_arguments(values: &[Value]) -> Result<PgArguments, BoxDynError> {
    let mut arguments = PgArguments::default();
    for value in values {
        match value {
            Value::Int(v) => arguments.add(*v)?,
            Value::Bool(v) => arguments.add(*v)?,
            Value::Text(v) => arguments.add(v.as_deref().map(without_nul))?,
            Value::Json(v) => arguments.add(v.as_deref().map(|t| Jsonb(json::without_nul(t))))?,
            Value::Bytes(v) => arguments.add(v.as_deref())?,
        }
    }
    Ok(arguments)
}

/// A value as it came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    Null,
    Int(i64),
    Text(String),
    Bytes(Vec<u8>),
    Json(String),
    Bool(bool),
}

impl Cell {
    /// For a message.
    pub fn shown(self) -> String {
        match self {
            Cell::Null => String::new(),
            Cell::Int(value) => value.to_string(),
            Cell::Bool(value) => value.to_string(),
            Cell::Text(text) | Cell::Json(text) => text,
            Cell::Bytes(bytes) => format!("{} bytes", bytes.len()),
        }
    }
}

fn postgres_cell(row: &sqlx::postgres::PgRow, at: usize) -> Result<Cell, sqlx::Error> {
    let value = row.try_get_raw(at)?;
    if value.is_null() {
        return Ok(Cell::Null);
    }
    let kind = value.type_info().name().to_owned();
    let cell = match kind.as_str() {
        "INT8" => <i64 as Decode<Postgres>>::decode(value).map(Cell::Int),
        "INT4" => <i32 as Decode<Postgres>>::decode(value).map(|i| Cell::Int(i.into())),
        "BOOL" => <bool as Decode<Postgres>>::decode(value).map(Cell::Bool),
        "BYTEA" => <Vec<u8> as Decode<Postgres>>::decode(value).map(Cell::Bytes),
        "JSONB" => jsonb_text(&value).map(Cell::Json),
        _ => <String as Decode<Postgres>>::decode(value).map(Cell::Text),
    };
    cell.map_err(sqlx::Error::Decode)
}

fn jsonb_text(value: &PgValueRef) -> Result<String, BoxDynError> {
    let bytes = value.as_bytes()?;
    let text = match value.format() {
        PgValueFormat::Text => bytes,
        PgValueFormat::Binary => bytes
            .strip_prefix(&[JSONB_VERSION])
            .ok_or("jsonb of an unknown version")?,
    };
    Ok(std::str::from_utf8(text)?.to_owned())
}

/// One row, taken from left to right or by position.
#[derive(Debug)]
pub(crate) struct Row {
    cells: std::vec::IntoIter<Cell>,
}

macro_rules! taker {
    ($name:ident, $maybe:ident, $type:ty, $($pattern:pat => $made:expr),+) => {
        /// The next column, which may be NULL.
        pub fn $maybe(&mut self, what: &'static str) -> Result<Option<$type>, StoreError> {
            match self.cells.next() {
                Some(Cell::Null) => Ok(None),
                $(Some($pattern) => Ok(Some($made)),)+
                _ => Err(StoreError::BadValue { what }),
            }
        }

        /// The next column, which is never NULL.
        pub fn $name(&mut self, what: &'static str) -> Result<$type, StoreError> {
            self.$maybe(what)?.ok_or(StoreError::BadValue { what })
        }
    };
}

impl Row {
    pub fn new(cells: Vec<Cell>) -> Row {
        let cells = cells.into_iter();
        Row { cells }
    }

    taker!(int, maybe_int, i64, Cell::Int(v) => v);
    taker!(text, maybe_text, String, Cell::Text(v) => v);
    taker!(bytes, maybe_bytes, Vec<u8>, Cell::Bytes(v) => v);
    taker!(bool, maybe_bool, bool, Cell::Bool(v) => v, Cell::Int(v) => v != 0);

    /// The next column as JSON text, which is what SQLite has for it.
    pub fn maybe_json(&mut self, what: &'static str) -> Result<Option<String>, StoreError> {
        match self.cells.next() {
            Some(Cell::Null) => Ok(None),
            Some(Cell::Json(text) | Cell::Text(text)) => Ok(Some(text)),
            _ => Err(StoreError::BadValue { what }),
        }
    }

    /// Sizes and counts were never negative when they were written.
    pub fn maybe_count(&mut self, what: &'static str) -> Result<Option<u64>, StoreError> {
        let value = self.maybe_int(what)?;
        let count = value.map(|v| u64::try_from(v).map_err(|_| StoreError::BadValue { what }));
        count.transpose()
    }

    pub fn count(&mut self, what: &'static str) -> Result<u64, StoreError> {
        self.maybe_count(what)?.ok_or(StoreError::BadValue { what })
    }

    pub fn attempt(&mut self) -> Result<u32, StoreError> {
        let what = "an attempt number";
        u32::try_from(self.int(what)?).map_err(|_| StoreError::BadValue { what })
    }

    pub fn state(&mut self) -> Result<State, StoreError> {
        let what = "a state";
        State::parse(&self.text(what)?).ok_or(StoreError::BadValue { what })
    }

    pub fn cells(self) -> impl Iterator<Item = Cell> {
        self.cells
    }
}

/// Rows and, for the export, what their columns are called.
pub(crate) struct Table {
    pub columns: Vec<String>,
    pub rows: Vec<Row>,
}

pub(crate) enum Wire {
    Sqlite(rusqlite::Connection),
    Postgres(Box<Served>),
}

/// A connection to a server, and what drives it.
pub(crate) struct Served {
    pub wire: PgConnection,
    /// Dropped last: the wire's socket is registered with it.
    pub runtime: Runtime,
}

/// What a driver says went wrong.
pub(crate) enum DriverError {
    Sqlite(rusqlite::Error),
    Postgres(sqlx::Error),
}

impl From<rusqlite::Error> for DriverError {
    fn from(e: rusqlite::Error) -> Self {
        DriverError::Sqlite(e)
    }
}

impl From<sqlx::Error> for DriverError {
    fn from(e: sqlx::Error) -> Self {
        DriverError::Postgres(e)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Sqlite,
    Postgres,
}

/// What a transaction is for; the two databases have different words for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Write,
    /// Everything read comes from one moment.
    Snapshot,
}

/// A transaction's first statement. SQLite takes several in one exchange, with the same values: its text begins the
/// transaction too.
pub(crate) struct First {
    pub sqlite: &'static str,
    pub postgres: &'static str,
}

pub(crate) struct Connection {
    /// `None`: lost.
    wire: Option<Wire>,
    location: Location,
    dialect: Dialect,
    lock_wait_ms: u64,
    in_transaction: bool,
    /// Which file it is, where it is one, and which stood beside it when that was noted.
    file: Option<FileId>,
    beside: Option<[Option<FileId>; 2]>,
}

impl Connection {
    pub fn open(location: &Location, lock_wait_ms: u64) -> Result<Connection, StoreError> {
        let (wire, file) = open::connect(location, lock_wait_ms)?;
        let dialect = match wire {
            Wire::Sqlite(_) => Dialect::Sqlite,
            Wire::Postgres(_) => Dialect::Postgres,
        };
        Ok(Connection {
            wire: Some(wire),
            location: location.clone(),
            dialect,
            lock_wait_ms,
            in_transaction: false,
            file,
            beside: None,
        })
    }

    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub fn location(&self) -> &Location {
        &self.location
    }

    /// How many rows it changed.
    pub fn execute(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[Value],
    ) -> Result<u64, StoreError> {
        self.attempt(what, |wire| match wire {
            Wire::Sqlite(wire) => Ok(sqlite::run(wire, sql, values)?.1),
            Wire::Postgres(served) => {
                let Served { wire, runtime } = &mut **served;
                let arguments = postgres_arguments(values).map_err(sqlx::Error::Encode)?;
                let query = sqlx::query_with::<Postgres, _>(sql, arguments);
                let done = bounded(runtime, query.execute(wire))?;
                Ok(done.rows_affected())
            }
        })
    }

    pub fn query(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[Value],
    ) -> Result<Vec<Row>, StoreError> {
        self.table(what, sql, values).map(|table| table.rows)
    }

    pub fn query_one(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[Value],
    ) -> Result<Option<Row>, StoreError> {
        Ok(self.query(what, sql, values)?.into_iter().next())
    }

    /// All of it at once: the statements themselves bound how many rows come.
    pub fn table(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[Value],
    ) -> Result<Table, StoreError> {
        self.attempt(what, |wire| match wire {
            Wire::Sqlite(wire) => Ok(sqlite::run(wire, sql, values)?.0),
            Wire::Postgres(served) => {
                let Served { wire, runtime } = &mut **served;
                // Without values there is nothing to prepare, which would be an exchange more.
                let rows = match values.is_empty() {
                    true => bounded(runtime, sqlx::raw_sql(sql).fetch_all(wire))?,
                    false => {
                        let arguments = postgres_arguments(values).map_err(sqlx::Error::Encode)?;
                        let query = sqlx::query_with::<Postgres, _>(sql, arguments);
                        bounded(runtime, query.fetch_all(wire))?
                    }
                };
                Ok(collect(rows)?)
            }
        })
    }

    /// Several statements without values, such as a migration.
    pub fn script(&mut self, what: &'static str, sql: &'static str) -> Result<(), StoreError> {
        self.attempt(what, |wire| match wire {
            Wire::Sqlite(wire) => Ok(sqlite::run(wire, sql, &[]).map(drop)?),
            Wire::Postgres(served) => {
                let Served { wire, runtime } = &mut **served;
                Ok(bounded(runtime, sqlx::raw_sql(sql).execute(wire)).map(drop)?)
            }
        })
    }

    /// The same statement in two tongues.
    pub fn either(&self, sqlite: &'static str, postgres: &'static str) -> &'static str {
        match self.dialect {
            Dialect::Sqlite => sqlite,
            Dialect::Postgres => postgres,
        }
    }

    /// The database's own clock, in Unix milliseconds: the same for all who share it.
    pub fn now_ms(&mut self) -> Result<i64, StoreError> {
        let what = "read the database's clock";
        let sql = self.either(
            concat!("SELECT ", sqlite_now!()),
            concat!("SELECT ", postgres_now!()),
        );
        let row = self.query_one(what, sql, &[])?;
        row.ok_or(StoreError::BadValue { what })?.int(what)
    }

    /// All of `work` or nothing of it.
    pub fn transaction<T>(
        &mut self,
        what: &'static str,
        purpose: Purpose,
        work: impl FnOnce(&mut Connection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let begin = self.begin_of(purpose);
        self.transaction_from(what, |db| db.script(what, begin), |db, ()| work(db))
    }

    /// A transaction to write whose first statement is known, so that SQLite begins it in the same exchange.
    pub fn transaction_with<T>(
        &mut self,
        what: &'static str,
        first: &First,
        values: &[Value],
        work: impl FnOnce(&mut Connection, Vec<Row>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let begin = self.begin_of(Purpose::Write);
        let begun = |db: &mut Connection| match db.dialect {
            Dialect::Sqlite => db.query(what, first.sqlite, values),
            Dialect::Postgres => {
                db.script(what, begin)?;
                db.query(what, first.postgres, values)
            }
        };
        self.transaction_from(what, begun, work)
    }

    /// Statements that are one transaction by themselves, and that a power cut may undo. SQLite's set and reset how
    /// durable it is, so a connection on which they failed is not used again.
    pub fn undurably(
        &mut self,
        what: &'static str,
        sql: &First,
        values: &[Value],
    ) -> Result<Vec<Row>, StoreError> {
        let sql = self.either(sql.sqlite, sql.postgres);
        let done = self.query(what, sql, values);
        if done.is_err() {
            self.lose();
        }
        done
    }

    fn begin_of(&self, purpose: Purpose) -> &'static str {
        // SQLite's plain BEGIN takes the lock at the first write, and then two writers can each hold what the other wants.
        match (self.dialect, purpose) {
            (Dialect::Sqlite, Purpose::Write) => "BEGIN IMMEDIATE",
            (Dialect::Sqlite, Purpose::Snapshot) => "BEGIN",
            (Dialect::Postgres, Purpose::Write) => "BEGIN ISOLATION LEVEL READ COMMITTED",
            (Dialect::Postgres, Purpose::Snapshot) => {
                "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
            }
        }
    }

    fn transaction_from<B, T>(
        &mut self,
        what: &'static str,
        begin: impl FnOnce(&mut Connection) -> Result<B, StoreError>,
        work: impl FnOnce(&mut Connection, B) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if self.in_transaction {
            // Some `work` panicked, and what it began must not become part of this.
            self.in_transaction = false;
            self.lose();
        }
        // A lost connection is made anew here, and not from here on.
        self.ready()?;
        self.in_transaction = true;
        let done = begin(self)
            .and_then(|begun| work(self, begun))
            .and_then(|made| self.script(what, "COMMIT").map(|()| made));
        if done.is_err() && self.wire.is_some() && self.script(what, "ROLLBACK").is_err() {
            // A transaction that cannot be ended must not swallow what comes next. After a failed BEGIN or COMMIT there may be
            // none to roll back, and then the connection is replaced for nothing, which costs little.
            self.lose();
        }
        self.in_transaction = false;
        done
    }

    fn ready(&mut self) -> Result<(), StoreError> {
        if self.wire.is_none() {
            let (wire, file) = open::connect(&self.location, self.lock_wait_ms)?;
            (self.wire, self.file) = (Some(wire), file);
        }
        Ok(())
    }

    /// Runs one exchange with the database, on a connection that is made anew if the last one was lost.
    fn attempt<T>(
        &mut self,
        what: &'static str,
        exchange: impl FnOnce(&mut Wire) -> Result<T, DriverError>,
    ) -> Result<T, StoreError> {
        if !self.in_transaction {
            self.ready()?;
        }
        let Some(wire) = self.wire.as_mut() else {
            let source = Fault::new(
                Trouble::Away,
                "the connection was lost within the transaction",
            );
            return Err(StoreError::Statement { what, source });
        };
        exchange(wire).map_err(|e| {
            let source = Fault::from_driver(&e, self.location.secret());
            if source.trouble == Trouble::Away && self.dialect == Dialect::Postgres {
                self.lose();
            }
            StoreError::Statement { what, source }
        })
    }

    fn lose(&mut self) {
        if let Some(Wire::Postgres(served)) = self.wire.take() {
            let Served { wire, runtime } = *served;
            let _inside = runtime.enter();
            drop(wire);
        }
    }

    pub fn is_in_place(&self) -> bool {
        match (&self.location, self.file) {
            (Location::Sqlite(path), Some(file)) => {
                let beside = self.beside.is_none_or(|noted| noted == open::beside(path));
                open::file_id(path) == Some(file) && beside
            }
            _ => true,
        }
    }

    /// Once something was written: what is written to a log that somebody has removed is lost, and who locks in an index
    /// that nobody else sees writes over what others wrote.
    pub fn note_place(&mut self) {
        if let Location::Sqlite(path) = &self.location {
            self.beside = Some(open::beside(path));
        }
    }

    /// Lets go as the end of the process would, which is to be near: the file stays open until then. Nobody waits for SQLite
    /// to copy its log into the file, which the next who open it do every few dozen commits.
    pub fn leave(mut self) {
        if let Some(Wire::Sqlite(wire)) = self.wire.take() {
            std::mem::forget(wire);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A close that is waited for leaves no write-ahead log behind. A failure leaves one, which the next open reads.
        match self.wire.take() {
            Some(Wire::Sqlite(wire)) => drop(wire.close()),
            Some(Wire::Postgres(served)) => {
                let Served { wire, runtime } = *served;
                drop(bounded_by(&runtime, GOODBYE_MS, wire.close()));
            }
            None => (),
        }
    }
}

/// A server that answers nothing at all is away. Its own timeouts come first.
pub(crate) fn bounded<T>(
    runtime: &Runtime,
    exchange: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    bounded_by(runtime, SERVER_SILENT_MS, exchange)
}

fn bounded_by<T>(
    runtime: &Runtime,
    limit_ms: u64,
    exchange: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    let limit = Duration::from_millis(limit_ms);
    match runtime.block_on(async { tokio::time::timeout(limit, exchange).await }) {
        Ok(done) => done,
        Err(_) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())),
    }
}

fn collect(rows: Vec<sqlx::postgres::PgRow>) -> Result<Table, sqlx::Error> {
    let columns = rows.first().map_or(Vec::new(), |row| {
        let columns = row.columns().iter();
        columns.map(|column| column.name().to_owned()).collect()
    });
    let row = |row: sqlx::postgres::PgRow| {
        let cells = (0..row.len()).map(|at| postgres_cell(&row, at));
        Ok(Row::new(cells.collect::<Result<Vec<_>, _>>()?))
    };
    let rows = rows
        .into_iter()
        .map(row)
        .collect::<Result<_, sqlx::Error>>()?;
    Ok(Table { columns, rows })
}
