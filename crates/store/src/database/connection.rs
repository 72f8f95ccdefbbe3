//! One connection to either database, behind blocking calls.
//!
//! Every statement is a `&'static str` with `$1`, `$2`, … and typed values beside it, so no value can become SQL. If
//! the connection is lost, the next call makes a new one, but never within a transaction.

use sqlx::{Connection as _, Postgres};

use crate::database::error::StoreError;
use crate::database::fault::{DriverError, Fault, FaultKind};
use crate::database::location::Location;
use crate::database::open::{self, DriverConnection, FileId};
use crate::database::postgres::{
    PostgresSession, block_on_bounded, block_on_within, postgres_arguments, row_set,
};
use crate::database::sqlite;
use crate::database::value::{FromRow, Row, RowSet, SqlValue, readable};

/// How long to wait for an orderly close. The server also handles a socket that is simply closed.
const CLOSE_LIMIT_MS: u64 = 1_000;

/// The database's clock in Unix milliseconds, as an SQL expression.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Sqlite,
    Postgres,
}

/// What a transaction is for. The two databases begin such transactions with different statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransactionKind {
    Write,
    /// All reads see the state of one moment.
    Snapshot,
}

/// A statement in both dialects. SQLite runs several statements with the same values in one call, so its text may
/// also begin and end the transaction.
pub(crate) struct DialectSql {
    pub sqlite: &'static str,
    pub postgres: &'static str,
}

pub(crate) struct Connection {
    /// `None` after the connection was lost.
    driver: Option<DriverConnection>,
    location: Location,
    dialect: Dialect,
    lock_wait_ms: u64,
    in_transaction: bool,
    /// The identity of the SQLite file, and of its log and index when [`Connection::note_files`] was called.
    file: Option<FileId>,
    companions: Option<[Option<FileId>; 2]>,
}

impl Connection {
    pub fn open(location: &Location, lock_wait_ms: u64) -> Result<Connection, StoreError> {
        let (driver, file) = open::connect(location, lock_wait_ms)?;
        tracing::debug!(database = ?location.to_string(), "connected");
        let dialect = match driver {
            DriverConnection::Sqlite(_) => Dialect::Sqlite,
            DriverConnection::Postgres(_) => Dialect::Postgres,
        };
        Ok(Connection {
            driver: Some(driver),
            location: location.clone(),
            dialect,
            lock_wait_ms,
            in_transaction: false,
            file,
            companions: None,
        })
    }

    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub fn location(&self) -> &Location {
        &self.location
    }

    /// Runs a statement and returns how many rows it changed.
    pub fn execute(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[SqlValue],
    ) -> Result<u64, StoreError> {
        self.exchange(what, |driver| match driver {
            DriverConnection::Sqlite(driver) => Ok(sqlite::run(driver, sql, values)?.1),
            DriverConnection::Postgres(session) => {
                let PostgresSession { driver, runtime } = &mut **session;
                let arguments = postgres_arguments(values).map_err(sqlx::Error::Encode)?;
                let query = sqlx::query_with::<Postgres, _>(sql, arguments);
                let done = block_on_bounded(runtime, query.execute(driver))?;
                Ok(done.rows_affected())
            }
        })
    }

    pub fn query(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[SqlValue],
    ) -> Result<Vec<Row>, StoreError> {
        self.table(what, sql, values).map(|table| table.rows)
    }

    pub fn query_one(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[SqlValue],
    ) -> Result<Option<Row>, StoreError> {
        Ok(self.query(what, sql, values)?.into_iter().next())
    }

    /// The one row that the statement always returns.
    pub fn query_single(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[SqlValue],
    ) -> Result<Row, StoreError> {
        let none = StoreError::BadValue { what };
        self.query_one(what, sql, values)?.ok_or(none)
    }

    pub fn fetch_all<T: FromRow>(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[SqlValue],
    ) -> Result<Vec<T>, StoreError> {
        let rows = self.query(what, sql, values)?;
        rows.into_iter().map(|mut row| row.read(what)).collect()
    }

    /// Like [`Connection::fetch_all`], without the rows that Fumehood would not write, so that one bad row does not
    /// hide the others.
    pub fn fetch_readable<T: FromRow>(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[SqlValue],
    ) -> Result<Vec<T>, StoreError> {
        Ok(readable(self.query(what, sql, values)?, |mut row| {
            row.read(what)
        }))
    }

    pub fn fetch_one<T: FromRow>(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[SqlValue],
    ) -> Result<Option<T>, StoreError> {
        let row = self.query_one(what, sql, values)?;
        row.map(|mut row| row.read(what)).transpose()
    }

    /// Returns all rows at once. The statements themselves limit how many rows there are.
    pub fn table(
        &mut self,
        what: &'static str,
        sql: &'static str,
        values: &[SqlValue],
    ) -> Result<RowSet, StoreError> {
        self.exchange(what, |driver| match driver {
            DriverConnection::Sqlite(driver) => Ok(sqlite::run(driver, sql, values)?.0),
            DriverConnection::Postgres(session) => {
                let PostgresSession { driver, runtime } = &mut **session;
                // A statement without values needs no preparation, which saves a round trip.
                let rows = match values.is_empty() {
                    true => block_on_bounded(runtime, sqlx::raw_sql(sql).fetch_all(driver))?,
                    false => {
                        let arguments = postgres_arguments(values).map_err(sqlx::Error::Encode)?;
                        let query = sqlx::query_with::<Postgres, _>(sql, arguments);
                        block_on_bounded(runtime, query.fetch_all(driver))?
                    }
                };
                Ok(row_set(rows)?)
            }
        })
    }

    /// Runs several statements without values, such as a migration.
    pub fn execute_script(
        &mut self,
        what: &'static str,
        sql: &'static str,
    ) -> Result<(), StoreError> {
        self.exchange(what, |driver| match driver {
            DriverConnection::Sqlite(driver) => Ok(sqlite::run(driver, sql, &[]).map(drop)?),
            DriverConnection::Postgres(session) => {
                let PostgresSession { driver, runtime } = &mut **session;
                Ok(block_on_bounded(runtime, sqlx::raw_sql(sql).execute(driver)).map(drop)?)
            }
        })
    }

    /// Picks the text for this connection's database.
    pub fn for_dialect(&self, sqlite: &'static str, postgres: &'static str) -> &'static str {
        match self.dialect {
            Dialect::Sqlite => sqlite,
            Dialect::Postgres => postgres,
        }
    }

    /// The database's clock in Unix milliseconds. All machines that share the database share this clock.
    pub fn now_ms(&mut self) -> Result<i64, StoreError> {
        let what = "read the database's clock";
        let sql = self.for_dialect(
            concat!("SELECT ", sqlite_now!()),
            concat!("SELECT ", postgres_now!()),
        );
        self.query_single(what, sql, &[])?.int(what)
    }

    /// Runs `work` in a transaction. Either all of its changes are committed or none.
    pub fn transaction<T>(
        &mut self,
        what: &'static str,
        kind: TransactionKind,
        work: impl FnOnce(&mut Connection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let begin = self.begin_statement(kind);
        self.transaction_from(what, |db| db.execute_script(what, begin), |db, ()| work(db))
    }

    /// Like [`Connection::transaction`], for a write whose first statement is known. SQLite then begins the
    /// transaction in the same call.
    pub fn transaction_with<T>(
        &mut self,
        what: &'static str,
        first: &DialectSql,
        values: &[SqlValue],
        work: impl FnOnce(&mut Connection, Vec<Row>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let begin = self.begin_statement(TransactionKind::Write);
        let begun = |db: &mut Connection| match db.dialect {
            Dialect::Sqlite => db.query(what, first.sqlite, values),
            Dialect::Postgres => {
                db.execute_script(what, begin)?;
                db.query(what, first.postgres, values)
            }
        };
        self.transaction_from(what, begun, work)
    }

    /// Runs statements that are a transaction by themselves and that a power cut may undo. SQLite's text switches
    /// durability off and on again, so after a failure the connection is discarded.
    pub fn query_without_sync(
        &mut self,
        what: &'static str,
        sql: &DialectSql,
        values: &[SqlValue],
    ) -> Result<Vec<Row>, StoreError> {
        let sql = self.for_dialect(sql.sqlite, sql.postgres);
        let done = self.query(what, sql, values);
        if done.is_err() {
            self.discard_connection();
        }
        done
    }

    fn begin_statement(&self, kind: TransactionKind) -> &'static str {
        // SQLite's plain BEGIN takes the write lock only at the first write. Two such writers could then deadlock.
        match (self.dialect, kind) {
            (Dialect::Sqlite, TransactionKind::Write) => "BEGIN IMMEDIATE",
            (Dialect::Sqlite, TransactionKind::Snapshot) => "BEGIN",
            (Dialect::Postgres, TransactionKind::Write) => "BEGIN ISOLATION LEVEL READ COMMITTED",
            (Dialect::Postgres, TransactionKind::Snapshot) => {
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
            // An earlier `work` panicked. Its open transaction must not become part of this one.
            self.in_transaction = false;
            self.discard_connection();
        }
        // Reconnect now if necessary; within the transaction it is not allowed.
        self.ensure_connected()?;
        self.in_transaction = true;
        let done = begin(self)
            .and_then(|begun| work(self, begun))
            .and_then(|made| self.execute_script(what, "COMMIT").map(|()| made));
        if done.is_err() && self.driver.is_some() && self.execute_script(what, "ROLLBACK").is_err()
        {
            // A transaction that cannot be ended would swallow the statements that follow. After a failed BEGIN or
            // COMMIT there may be no transaction to roll back; then the connection is replaced needlessly, which
            // costs little.
            self.discard_connection();
        }
        self.in_transaction = false;
        done
    }

    fn ensure_connected(&mut self) -> Result<(), StoreError> {
        if self.driver.is_none() {
            let (driver, file) = open::connect(&self.location, self.lock_wait_ms)?;
            tracing::debug!(database = ?self.location.to_string(), "connected again");
            (self.driver, self.file) = (Some(driver), file);
        }
        Ok(())
    }

    /// Makes one call to the database. Outside a transaction, reconnects first if the connection was lost.
    fn exchange<T>(
        &mut self,
        what: &'static str,
        exchange: impl FnOnce(&mut DriverConnection) -> Result<T, DriverError>,
    ) -> Result<T, StoreError> {
        if !self.in_transaction {
            self.ensure_connected()?;
        }
        let Some(driver) = self.driver.as_mut() else {
            let source = Fault::new(
                FaultKind::Unreachable,
                "the connection was lost within the transaction",
            );
            return Err(StoreError::Statement { what, source });
        };
        tracing::trace!(what, "statement");
        exchange(driver).map_err(|e| {
            let source = Fault::from_driver(&e, self.location.secret());
            tracing::debug!(what, error = ?source.to_string(), "the database failed");
            if source.kind == FaultKind::Unreachable && self.dialect == Dialect::Postgres {
                self.discard_connection();
            }
            StoreError::Statement { what, source }
        })
    }

    fn discard_connection(&mut self) {
        if let Some(DriverConnection::Postgres(session)) = self.driver.take() {
            let PostgresSession { driver, runtime } = *session;
            let _guard = runtime.enter();
            drop(driver);
        }
    }

    pub fn files_in_place(&self) -> bool {
        match (&self.location, self.file) {
            (Location::Sqlite(path), Some(file)) => {
                let companions = self
                    .companions
                    .is_none_or(|noted| noted == open::companion_files(path));
                open::file_id(path) == Some(file) && companions
            }
            _ => true,
        }
    }

    /// Remembers the identity of the log and its index. Call after the first write. If somebody removes the log,
    /// later writes to it are lost; if somebody removes the index, which holds the locks, two writers overwrite each
    /// other.
    pub fn note_files(&mut self) {
        if let Location::Sqlite(path) = &self.location {
            self.companions = Some(open::companion_files(path));
        }
    }

    /// Leaves the SQLite file open until the process exits, which must be soon. Closing it would copy the write-ahead
    /// log into the file; later connections do that every few dozen commits.
    pub fn leak_until_exit(mut self) {
        if let Some(DriverConnection::Sqlite(driver)) = self.driver.take() {
            std::mem::forget(driver);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A close that succeeds leaves no write-ahead log behind. If it fails, the next connection reads the log.
        match self.driver.take() {
            Some(DriverConnection::Sqlite(driver)) => drop(driver.close()),
            Some(DriverConnection::Postgres(session)) => {
                let PostgresSession { driver, runtime } = *session;
                drop(block_on_within(&runtime, CLOSE_LIMIT_MS, driver.close()));
            }
            None => (),
        }
    }
}
