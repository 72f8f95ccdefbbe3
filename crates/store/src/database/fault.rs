//! Classifies what a database or its driver reported.

use std::borrow::Cow;
use std::fmt;
use std::io;

use crate::types::escaping::escape_terminal;

/// The kinds of database failures that callers treat differently. The message holds the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The database cannot be reached, or the connection was lost. The last transaction may or may not be committed:
    /// repeat it.
    Unreachable,
    /// The database, its file system or the transaction cannot be written to.
    ReadOnly,
    /// Another connection holds a lock for longer than this process waits.
    Busy,
    /// The disk of the database, or a quota on it, is full.
    Full,
    /// The server, or the file system, refuses access.
    Permission,
    /// The schema is missing or has another version.
    Schema,
    /// The database is damaged, or holds a value that Fumehood does not write.
    Damaged,
    /// Anything else.
    Other,
}

impl FaultKind {
    pub(crate) fn advice(self) -> &'static str {
        match self {
            FaultKind::Unreachable => {
                "see that the database runs and can be reached, then repeat the command"
            }
            FaultKind::ReadOnly => {
                "make the database writable (its disk, its file, or the server's role), then repeat"
            }
            FaultKind::Busy => {
                "another program holds the database; wait for it or stop it, then repeat"
            }
            FaultKind::Full => "make room on the database's disk, then repeat",
            FaultKind::Permission => {
                "check user and password (PGUSER, PGPASSFILE with mode 0600, PGSERVICE) and the grants in docs/database.md"
            }
            FaultKind::Schema => "run `fumehood db migrate`",
            FaultKind::Damaged => "the database is damaged; restore it from a backup",
            FaultKind::Other => "see docs/database.md",
        }
    }
}

/// A message from the database or its driver: of limited length, without control characters, without the password.
#[derive(Debug)]
pub struct Fault {
    /// What kind of failure the message tells of.
    pub kind: FaultKind,
    text: String,
}

const FAULT_TEXT_MAX: usize = 500;

impl Fault {
    pub(crate) fn new(kind: FaultKind, text: &str) -> Fault {
        // Messages about constraints may repeat a value that an attacker chose.
        let text = escape_terminal(text.as_bytes());
        let text = text.chars().take(FAULT_TEXT_MAX).collect();
        Fault { kind, text }
    }

    pub(crate) fn from_driver(error: &DriverError, secret: Option<&str>) -> Fault {
        let (kind, text) = match error {
            DriverError::Sqlite(e) => from_sqlite(e),
            DriverError::Postgres(e) => from_postgres(e),
        };
        // No driver is known to repeat the password. This makes sure.
        match secret.filter(|s| !s.is_empty() && text.contains(s)) {
            Some(secret) => Fault::new(kind, &text.replace(secret, "(withheld)")),
            None => Fault::new(kind, &text),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Fault {}

/// A server that closes the connection causes one of several I/O errors. A full disk or a missing right is told
/// apart.
pub(crate) fn io_fault_kind(e: &io::Error) -> FaultKind {
    match e.kind() {
        io::ErrorKind::PermissionDenied => FaultKind::Permission,
        io::ErrorKind::ReadOnlyFilesystem => FaultKind::ReadOnly,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FaultKind::Full,
        _ => FaultKind::Unreachable,
    }
}

fn from_sqlite(error: &rusqlite::Error) -> (FaultKind, String) {
    let Some(code) = error.sqlite_extended_error_code() else {
        return (FaultKind::Other, error.to_string());
    };
    (sqlite_fault_kind(code), format!("{error} (code {code})"))
}

fn from_postgres(error: &sqlx::Error) -> (FaultKind, String) {
    match error {
        sqlx::Error::Database(e) => {
            let code = e.code().unwrap_or(Cow::Borrowed(""));
            let text = format!("{} (code {code})", e.message());
            (postgres_fault_kind(&code), text)
        }
        sqlx::Error::Io(e) => (io_fault_kind(e), e.to_string()),
        sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) => {
            (FaultKind::Unreachable, error.to_string())
        }
        other => (FaultKind::Other, other.to_string()),
    }
}

/// Result codes: <https://www.sqlite.org/rescode.html>. The low byte is the primary code.
fn sqlite_fault_kind(code: i32) -> FaultKind {
    match code & 0xff {
        5 | 6 => FaultKind::Busy,
        8 => FaultKind::ReadOnly,
        13 => FaultKind::Full,
        3 | 23 => FaultKind::Permission,
        11 | 26 => FaultKind::Damaged,
        10 | 14 => FaultKind::Unreachable,
        _ => FaultKind::Other,
    }
}

/// Error codes: <https://www.postgresql.org/docs/current/errcodes-appendix.html>
fn postgres_fault_kind(code: &str) -> FaultKind {
    match code {
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "3D000" => FaultKind::Unreachable,
        "53100" => FaultKind::Full,
        "53300" | "55P03" | "57014" | "40001" | "40P01" => FaultKind::Busy,
        "25006" => FaultKind::ReadOnly,
        "42501" => FaultKind::Permission,
        "42P01" | "42703" | "3F000" => FaultKind::Schema,
        "XX001" | "XX002" => FaultKind::Damaged,
        code if code.starts_with("08") => FaultKind::Unreachable,
        code if code.starts_with("28") => FaultKind::Permission,
        _ => FaultKind::Other,
    }
}

/// An error of one of the two drivers.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) enum DriverError {
    Sqlite(#[from] rusqlite::Error),
    Postgres(#[from] sqlx::Error),
}
