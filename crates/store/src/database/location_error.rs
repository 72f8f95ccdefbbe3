//! Why the address of a database cannot be used. No message repeats any part of the address, which may hold a
//! password.

use std::io;
use std::path::PathBuf;

use crate::database::libpq_settings::{Settings, UnknownSetting};

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
    #[error("the PostgreSQL address has a setting that Fumehood does not know; it knows {}", Settings::names().join(", "))]
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

impl From<UnknownSetting> for LocationError {
    fn from(_: UnknownSetting) -> LocationError {
        LocationError::UnknownSetting
    }
}
