//! Why the address of a database cannot be used. No message repeats any part of the address, which may hold a
//! password.

use std::io;
use std::path::PathBuf;

use crate::database::libpq_settings::{Settings, UnknownSetting};

/// Why the address of a database cannot be used.
#[allow(missing_docs, reason = "the variants say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// The text is not an address.
    #[error("a database is `none`, `sqlite:PATH` or `postgres://USER@HOST:PORT/DATABASE`")]
    Form,
    /// The address of a SQLite database does not name a file.
    #[error("`sqlite:` needs the path of a file")]
    NoPath,
    /// The address contains a password and was given on the command line.
    #[error(
        "a password on the command line can be read by every user of this machine; put it into a file named by PGPASSFILE (mode 0600), or the whole address into FUMEHOOD_DB or a file named by FUMEHOOD_DB_FILE"
    )]
    PasswordOnCommandLine,
    /// A part of the address is not percent-encoded text.
    #[error("the PostgreSQL address has a part that is not percent-encoded UTF-8 without NUL")]
    Encoding,
    /// The address names more than one host.
    #[error("the PostgreSQL address names several hosts; name one")]
    SeveralHosts,
    /// A setting has a value that libpq does not allow or that Fumehood does not support.
    #[error("the PostgreSQL setting `{name}` has a value that is not one of its own")]
    Setting { name: &'static str },
    /// The address contains a setting that Fumehood does not support.
    #[error("the PostgreSQL address has a setting that Fumehood does not know; it knows {}", Settings::names().join(", "))]
    UnknownSetting,
    /// An environment variable is not UTF-8.
    #[error("the environment variable {name} is not UTF-8")]
    Variable { name: &'static str },
    /// No service file has the service.
    #[error(
        "the PostgreSQL service {service:?} is in none of the service files (PGSERVICEFILE, ~/.pg_service.conf)"
    )]
    NoService { service: String },
    /// A line of a service file, counted from 1, cannot be used.
    #[error("line {line} of {} is not a comment, a [service] or a setting that Fumehood knows", .path.display())]
    ServiceLine { path: PathBuf, line: usize },
    /// The password file that was named may be read by others.
    #[error("the password file {} may be read by others, so it is not used; give it mode 0600 with chmod", .path.display())]
    PasswordFileMode { path: PathBuf },
    /// Reading a service file or password file failed.
    #[error("read {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl From<UnknownSetting> for LocationError {
    fn from(_: UnknownSetting) -> LocationError {
        LocationError::UnknownSetting
    }
}
