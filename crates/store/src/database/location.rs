//! Where the record is kept: `none`, `sqlite:PATH`, or `postgres://…` completed the way libpq completes it.
//!
//! The password is in one private field that nothing prints: not Display, not Debug, and no error made here repeats any
//! part of a connection string, since nobody knows which part of a mistyped one is the password.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::database::libpq::{self, Settings};

/// A connection that does not come about must not keep a run waiting.
const CONNECT_LIMIT_MS: u64 = 10_000;
const CONNECT_LIMIT_S_MAX: u64 = 300;

/// Who wrote the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Every user of the machine can read it in the list of processes.
    CommandLine,
    Environment,
    File,
}

#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    #[error("a database is `none`, `sqlite:PATH` or `postgres://USER@HOST:PORT/DATABASE`")]
    Form,
    #[error("`sqlite:` needs the path of a file")]
    NoPath,
    #[error(
        "a password on the command line can be read by every user of this machine; put it into a file named by PGPASSFILE (mode 0600), or the whole address into FUMEHOOD_DB or a file named by FUMEHOOD_DB_FILE"
    )]
    PasswordOnCommandLine,
    #[error("the PostgreSQL address has a part that is not percent-encoded UTF-8 without NUL")]
    Encoding,
    #[error("the PostgreSQL address names several hosts; name one")]
    SeveralHosts,
    #[error("the PostgreSQL setting `{name}` has a value that is not one of its own")]
    Setting { name: &'static str },
    #[error("the PostgreSQL address has a setting that Fumehood does not know; it knows {}", Settings::NAMES.join(", "))]
    UnknownSetting,
    #[error("the environment variable {name} is not UTF-8")]
    Variable { name: &'static str },
    #[error(
        "the PostgreSQL service {service:?} is in none of the service files (PGSERVICEFILE, ~/.pg_service.conf)"
    )]
    NoService { service: String },
    #[error("line {line} of {} is not a comment, a [service] or a setting that Fumehood knows", .path.display())]
    ServiceLine { path: PathBuf, line: usize },
    #[error("the password file {} may be read by others, so it is not used; give it mode 0600 with chmod", .path.display())]
    PasswordFileMode { path: PathBuf },
    #[error("read {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SslMode {
    Disable,
    Allow,
    #[default]
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

impl SslMode {
    fn parse(text: &str) -> Result<SslMode, LocationError> {
        Ok(match text {
            "disable" => SslMode::Disable,
            "allow" => SslMode::Allow,
            "prefer" => SslMode::Prefer,
            "require" => SslMode::Require,
            "verify-ca" => SslMode::VerifyCa,
            "verify-full" => SslMode::VerifyFull,
            _ => return Err(LocationError::Setting { name: "sslmode" }),
        })
    }
}

/// A string that prints as nothing.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(withheld)")
    }
}

/// A PostgreSQL server and database, complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// A name, an address, or the directory of a socket.
    pub host: String,
    pub port: u16,
    pub user: String,
    pub database: String,
    pub ssl_mode: SslMode,
    pub ssl_root_cert: Option<PathBuf>,
    pub ssl_cert: Option<PathBuf>,
    pub ssl_key: Option<PathBuf>,
    pub connect_limit_ms: u64,
    password: Option<Secret>,
}

impl Server {
    pub(crate) fn password(&self) -> Option<&str> {
        self.password.as_ref().map(|p| p.0.as_str())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// No record at all.
    None,
    Sqlite(PathBuf),
    Postgres(Box<Server>),
}

/// How the environment is looked at, so that a test can have its own.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

impl Location {
    pub fn parse(text: &str, origin: Origin, env: Environment) -> Result<Location, LocationError> {
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
        if given.password.is_some() && origin == Origin::CommandLine {
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
    // What SQLite itself would take for a database in memory is a mistake here: a record is to last.
    match path.is_empty() || path == ":memory:" || path.contains('\0') {
        true => Err(LocationError::NoPath),
        false => Ok(Location::Sqlite(PathBuf::from(path))),
    }
}

fn server(settings: Settings, env: Environment) -> Result<Server, LocationError> {
    let bad = |name| LocationError::Setting { name };
    let port = match &settings.port {
        Some(port) => port
            .parse::<u16>()
            .ok()
            .filter(|p| *p > 0)
            .ok_or(bad("port"))?,
        None => 5432,
    };
    let host = settings
        .host
        .clone()
        .unwrap_or_else(|| libpq::default_host(port));
    if host.contains(',') {
        return Err(LocationError::SeveralHosts);
    }
    let user = settings.user.clone().unwrap_or_else(libpq::default_user);
    let database = settings.dbname.clone().unwrap_or_else(|| user.clone());
    let connect_limit_ms = match &settings.connect_timeout {
        None => CONNECT_LIMIT_MS,
        // Zero and below mean "for ever" to libpq, which nobody can have here.
        Some(text) => match text.parse::<i64>().map_err(|_| bad("connect_timeout"))? {
            seconds if seconds <= 0 => CONNECT_LIMIT_MS,
            seconds => seconds.unsigned_abs().min(CONNECT_LIMIT_S_MAX) * 1000,
        },
    };
    let password = match settings.password.clone() {
        Some(password) => Some(password),
        None => libpq::password_from_file(&host, port, &database, &user, &settings, env)?,
    };
    let ssl_mode = settings
        .sslmode
        .as_deref()
        .map_or(Ok(SslMode::default()), SslMode::parse)?;
    Ok(Server {
        ssl_root_cert: libpq::root_certificate(&settings, ssl_mode, env),
        ssl_cert: settings.sslcert.map(PathBuf::from),
        ssl_key: settings.sslkey.map(PathBuf::from),
        host,
        port,
        user,
        database,
        ssl_mode,
        connect_limit_ms,
        password,
    })
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::None => f.write_str("none"),
            Location::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Location::Postgres(server) => {
                let [user, database] =
                    [&server.user, &server.database].map(|t| libpq::percent_encode(t, b""));
                let (host, port) = (&server.host, server.port);
                if host.starts_with('/') {
                    let host = libpq::percent_encode(host, b"/");
                    return write!(
                        f,
                        "postgres:///{database}?host={host}&port={port}&user={user}"
                    );
                }
                let host = match host.contains(':') {
                    true => format!("[{}]", libpq::percent_encode(host, b":")),
                    false => libpq::percent_encode(host, b""),
                };
                write!(f, "postgres://{user}@{host}:{port}/{database}")
            }
        }
    }
}

#[cfg(test)]
#[path = "location_tests.rs"]
mod tests;
