//! The address of the database: `none`, `sqlite:PATH`, or `postgres://…`, completed by libpq's rules.
//!
//! The password is in a private field that neither Display nor Debug prints. No error repeats any part of an address,
//! since any part of a mistyped address may be the password.

use std::fmt;
use std::path::PathBuf;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::database::libpq;
use crate::database::libpq_settings::{Environment, Secret, Settings, SslMode};
use crate::database::location_error::LocationError;

/// The longest wait for a connection, so that a run does not wait for an unreachable server.
const CONNECT_LIMIT_MS: u64 = 10_000;
const CONNECT_LIMIT_S_MAX: u64 = 300;

/// Where the text of the address comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocationOrigin {
    /// Every user of the machine can read a command line in the process list.
    CommandLine,
    /// An environment variable, which only the same user can read.
    Environment,
    /// A file: one with settings, one that the user named, or the operator's policy.
    File,
}

/// A PostgreSQL server and database, with all settings complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostgresAddress {
    /// A host name, an IP address, or the directory of a socket.
    pub(crate) host: String,
    /// The TCP port, or the number in the name of the socket.
    pub(crate) port: u16,
    /// The role to connect as.
    pub(crate) user: String,
    /// The name of the database.
    pub(crate) database: String,
    /// Whether to use TLS and what to check.
    pub(crate) ssl_mode: SslMode,
    /// The file with the certificates of trusted authorities. `None`: those of the system.
    pub(crate) ssl_root_cert: Option<PathBuf>,
    /// The file with the client's certificate.
    pub(crate) ssl_cert: Option<PathBuf>,
    /// The file with the key of the client's certificate.
    pub(crate) ssl_key: Option<PathBuf>,
    /// How long to wait for a connection.
    pub(crate) connect_limit_ms: u64,
    password: Option<Secret>,
}

impl PostgresAddress {
    pub(crate) fn password(&self) -> Option<&str> {
        self.password.as_ref().map(|p| p.0.as_str())
    }
}

/// Where the record is kept. `Display` shows the address without the password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// Keep no record.
    None,
    /// The file of a SQLite database.
    Sqlite(PathBuf),
    /// A PostgreSQL database.
    Postgres(Box<PostgresAddress>),
}

impl Location {
    /// Reads an address. For PostgreSQL, completes it from the environment, the service file and the password file.
    pub fn parse(
        text: &str,
        origin: LocationOrigin,
        env: Environment,
    ) -> Result<Location, LocationError> {
        let text = text.trim();
        if text == "none" {
            return Ok(Location::None);
        }
        if let Some(path) = text.strip_prefix("sqlite:") {
            return sqlite(path.strip_prefix("//").unwrap_or(path));
        }
        let rest = ["postgres://", "postgresql://"]
            .into_iter()
            .find_map(|p| text.strip_prefix(p));
        let given = libpq::parse_url(rest.ok_or(LocationError::Form)?)?;
        if given.get("password").is_some() && origin == LocationOrigin::CommandLine {
            return Err(LocationError::PasswordOnCommandLine);
        }
        let completed = libpq::complete(given, env)?;
        server(completed, env).map(|server| Location::Postgres(Box::new(server)))
    }

    pub(crate) fn secret(&self) -> Option<&str> {
        match self {
            Location::Postgres(server) => server.password(),
            _ => None,
        }
    }
}

fn sqlite(path: &str) -> Result<Location, LocationError> {
    // SQLite would open a database in memory, but the record must outlive the process.
    match path.is_empty() || path == ":memory:" || path.contains('\0') {
        true => Err(LocationError::NoPath),
        false => Ok(Location::Sqlite(PathBuf::from(path))),
    }
}

fn server(settings: Settings, env: Environment) -> Result<PostgresAddress, LocationError> {
    let bad = |name| LocationError::Setting { name };
    let port = match settings.get("port") {
        Some(port) => port
            .parse::<u16>()
            .ok()
            .filter(|p| *p > 0)
            .ok_or(bad("port"))?,
        None => 5432,
    };
    let text = |name| settings.get(name).map(str::to_owned);
    let path = |name| settings.get(name).map(PathBuf::from);
    let host = text("host").unwrap_or_else(|| libpq::default_host(port));
    if host.contains(',') {
        return Err(LocationError::SeveralHosts);
    }
    let user = text("user").unwrap_or_else(libpq::default_user);
    let database = text("dbname").unwrap_or_else(|| user.clone());
    let connect_limit_ms = match settings.get("connect_timeout") {
        None => CONNECT_LIMIT_MS,
        // For libpq zero and negative values mean "wait for ever", which Fumehood does not offer.
        Some(text) => match text.parse::<i64>().map_err(|_| bad("connect_timeout"))? {
            seconds if seconds <= 0 => CONNECT_LIMIT_MS,
            seconds => seconds.unsigned_abs().min(CONNECT_LIMIT_S_MAX) * 1000,
        },
    };
    let password = match text("password") {
        Some(password) => Some(Secret(password)),
        None => libpq::password_from_file(&host, port, &database, &user, &settings, env)?,
    };
    let ssl_mode = settings.get("sslmode");
    let ssl_mode = ssl_mode.map_or(Some(SslMode::default()), SslMode::parse);
    let ssl_mode = ssl_mode.ok_or(bad("sslmode"))?;
    Ok(PostgresAddress {
        ssl_root_cert: libpq::root_certificate(&settings, ssl_mode, env),
        ssl_cert: path("sslcert"),
        ssl_key: path("sslkey"),
        host,
        port,
        user,
        database,
        ssl_mode,
        connect_limit_ms,
        password,
    })
}

/// What is percent-encoded when an address is shown.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'-');

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::None => f.write_str("none"),
            Location::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Location::Postgres(server) => {
                let encode =
                    |text, set: &'static AsciiSet| utf8_percent_encode(text, set).to_string();
                let [user, database] = [&server.user, &server.database].map(|t| encode(t, ENCODED));
                let (host, port) = (&server.host, server.port);
                if host.starts_with('/') {
                    let host = encode(host, const { &ENCODED.remove(b'/') });
                    return write!(
                        f,
                        "postgres:///{database}?host={host}&port={port}&user={user}"
                    );
                }
                let host = match host.contains(':') {
                    true => format!("[{}]", encode(host, const { &ENCODED.remove(b':') })),
                    false => encode(host, ENCODED),
                };
                write!(f, "postgres://{user}@{host}:{port}/{database}")
            }
        }
    }
}

#[cfg(test)]
#[path = "location_tests.rs"]
mod tests;
