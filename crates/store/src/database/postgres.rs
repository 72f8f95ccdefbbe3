//! PostgreSQL: an async driver that runs on a private single-threaded runtime.

use std::future::Future;
use std::time::Duration;

use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{
    PgArgumentBuffer, PgArguments, PgConnectOptions, PgSslMode, PgTypeInfo, PgValueFormat,
    PgValueRef,
};
use sqlx::{
    Arguments as _, Column as _, ConnectOptions as _, Decode, Encode, PgConnection, Postgres,
    Row as _, Type, TypeInfo as _, ValueRef as _,
};
use tokio::runtime::Runtime;

use crate::database::error::StoreError;
use crate::database::fault::{Fault, FaultKind};
use crate::database::json;
use crate::database::libpq_settings::SslMode;
use crate::database::location::{Location, PostgresAddress};
use crate::database::value::{Cell, Row, RowSet, SqlValue, without_nul};

/// How long a write waits for another connection's lock, on either database, before it fails. [`SESSION`] repeats
/// this value.
pub(crate) const LOCK_WAIT_MS: u64 = 30_000;

/// Longer than the server's own timeouts in [`SESSION`], so it applies only when the server does not answer at all.
const SERVER_ANSWER_LIMIT_MS: u64 = 150_000;

/// - `search_path`: no temporary or public object can shadow the store's tables or functions.
/// - timeouts: a run must never hang on the server. The last one frees the locks of a runner that was stopped
///   (SIGSTOP).
/// - `synchronous_commit`: a commit must survive a power cut. A stricter setting is left alone.
const SESSION: &str = "
    SET search_path = pg_catalog, fumehood, pg_temp;
    SET statement_timeout = '120s';
    SET idle_in_transaction_session_timeout = '10min';
    SET lock_timeout = '30s';
    SET standard_conforming_strings = on;
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
    SELECT current_setting('server_encoding');
";

/// A connection to a server, and the runtime that drives it.
pub(crate) struct PostgresSession {
    pub driver: PgConnection,
    /// Dropped last, because the connection's socket is registered with the runtime.
    pub runtime: Runtime,
}

pub(crate) fn open(
    location: &Location,
    server: &PostgresAddress,
    lock_wait_ms: u64,
) -> Result<PostgresSession, StoreError> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().map_err(StoreError::Runtime)?;
    let options = connect_options(server);
    let limit = Duration::from_millis(server.connect_limit_ms);
    let timed = runtime.block_on(async { tokio::time::timeout(limit, options.connect()).await });
    let mut driver = match timed {
        Ok(Ok(driver)) => driver,
        Ok(Err(e)) => return Err(StoreError::opening(location, e)),
        Err(_) => {
            let text = format!("no answer within {} seconds", limit.as_secs());
            return Err(StoreError::Open {
                location: location.to_string(),
                source: Fault::new(FaultKind::Unreachable, &text),
            });
        }
    };
    let rows = block_on_bounded(&runtime, sqlx::raw_sql(SESSION).fetch_all(&mut driver))
        .map_err(|e| StoreError::opening(location, e))?;
    if lock_wait_ms != LOCK_WAIT_MS {
        let set = sqlx::query::<Postgres>("SELECT set_config('lock_timeout', $1, false)");
        let set = set.bind(lock_wait_ms.to_string());
        block_on_bounded(&runtime, set.execute(&mut driver))
            .map_err(|e| StoreError::opening(location, e))?;
    }
    // The row of the last statement. The statement before it returns a row only if it changed the setting.
    let encoding: String = match rows.last() {
        Some(row) => row
            .try_get(0)
            .map_err(|e| StoreError::opening(location, e))?,
        None => String::new(),
    };
    match encoding.as_str() {
        "UTF8" => Ok(PostgresSession { driver, runtime }),
        _ => Err(StoreError::Encoding {
            location: location.to_string(),
            encoding,
        }),
    }
}

pub(crate) fn connect_options(server: &PostgresAddress) -> PgConnectOptions {
    // Set everything that the driver would otherwise look up by itself: it knows neither service files nor Fumehood's
    // rules.
    let mut options = PgConnectOptions::new_without_pgpass()
        .host(&server.host)
        .port(server.port)
        .username(&server.user)
        .database(&server.database)
        .application_name("fumehood")
        // Only the kernel is between the ends of a Unix socket. libpq uses no TLS there either.
        .ssl_mode(match server.ssl_mode {
            _ if server.host.starts_with('/') => PgSslMode::Disable,
            SslMode::Disable => PgSslMode::Disable,
            SslMode::Allow => PgSslMode::Allow,
            SslMode::Prefer => PgSslMode::Prefer,
            SslMode::Require => PgSslMode::Require,
            SslMode::VerifyCa => PgSslMode::VerifyCa,
            SslMode::VerifyFull => PgSslMode::VerifyFull,
        })
        .disable_statement_logging();
    if let Some(path) = &server.ssl_root_cert {
        options = options.ssl_root_cert(path);
    }
    if let Some(path) = &server.ssl_cert {
        options = options.ssl_client_cert(path);
    }
    if let Some(path) = &server.ssl_key {
        options = options.ssl_client_key(path);
    }
    if let Some(password) = server.password() {
        options = options.password(password);
    }
    options
}

/// Runs a call with a limit on how long the server may be silent. The server's own timeouts come first.
pub(crate) fn block_on_bounded<T>(
    runtime: &Runtime,
    exchange: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    block_on_within(runtime, SERVER_ANSWER_LIMIT_MS, exchange)
}

pub(crate) fn block_on_within<T>(
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

/// `jsonb` in PostgreSQL's wire format: a version byte, then the text. The driver's own support would need a feature
/// that parses every JSON value into a tree.
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

pub(crate) fn postgres_arguments(values: &[SqlValue]) -> Result<PgArguments, BoxDynError> {
    let mut arguments = PgArguments::default();
    for value in values {
        match value {
            SqlValue::Int(v) => arguments.add(*v)?,
            SqlValue::Bool(v) => arguments.add(*v)?,
            SqlValue::Text(v) => arguments.add(v.as_deref().map(without_nul))?,
            SqlValue::Json(v) => {
                arguments.add(v.as_deref().map(|t| Jsonb(json::without_nul(t))))?
            }
            SqlValue::Bytes(v) => arguments.add(v.as_deref())?,
        }
    }
    Ok(arguments)
}

fn cell(row: &sqlx::postgres::PgRow, at: usize) -> Result<Cell, sqlx::Error> {
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

pub(crate) fn row_set(rows: Vec<sqlx::postgres::PgRow>) -> Result<RowSet, sqlx::Error> {
    let columns = rows.first().map_or(Vec::new(), |row| {
        let columns = row.columns().iter();
        columns.map(|column| column.name().to_owned()).collect()
    });
    let row = |row: sqlx::postgres::PgRow| {
        let cells = (0..row.len()).map(|at| cell(&row, at));
        Ok(Row::new(cells.collect::<Result<Vec<_>, _>>()?))
    };
    let rows = rows
        .into_iter()
        .map(row)
        .collect::<Result<_, sqlx::Error>>()?;
    Ok(RowSet { columns, rows })
}
