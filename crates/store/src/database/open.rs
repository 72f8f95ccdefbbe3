//! Opening a connection: what must hold of a file or server before anything is asked of it.

use std::ffi::OsStr;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{ConnectOptions as _, Postgres, Row as _};

use crate::database::connection::{DriverError, Served, Wire, bounded};
use crate::database::error::{Fault, StoreError, Trouble};
use crate::database::location::{Location, Server, SslMode};
use crate::database::sqlite;

/// How long a write waits for another's lock, on either database, before it says that somebody is in the way. [`SESSION`]
/// has it too.
pub(crate) const LOCK_WAIT_MS: u64 = 30_000;
const BUSY_PAUSE_MS: u64 = 20;

/// - `search_path`: nobody's temporary or public object can stand before a table or function of ours.
/// - timeouts: a run must never hang on the server. The last one frees the locks of a runner that was stopped (SIGSTOP).
/// - `synchronous_commit`: a commit that a power cut could undo is no commit; a stricter setting is left alone.
const SESSION: &str = "
    SET search_path = pg_catalog, fumehood, pg_temp;
    SET statement_timeout = '120s';
    SET idle_in_transaction_session_timeout = '10min';
    SET lock_timeout = '30s';
    SET standard_conforming_strings = on;
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
    SELECT current_setting('server_encoding');
";

pub(crate) fn connect(
    location: &Location,
    lock_wait_ms: u64,
) -> Result<(Wire, Option<FileId>), StoreError> {
    match location {
        Location::None => Err(StoreError::NoDatabase),
        Location::Sqlite(path) => {
            let (wire, file) = open_file(location, path, lock_wait_ms)?;
            Ok((Wire::Sqlite(wire), Some(file)))
        }
        Location::Postgres(server) => {
            let served = postgres(location, server, lock_wait_ms)?;
            Ok((Wire::Postgres(Box::new(served)), None))
        }
    }
}

/// A file, whatever it is called: its device and its inode.
pub(crate) type FileId = (u64, u64);

/// What stands beside a database that is in use: its write-ahead log, and the index of that, which has the locks.
pub(crate) fn beside(path: &Path) -> [Option<FileId>; 2] {
    ["-wal", "-shm"].map(|ending| {
        let mut name = path.as_os_str().to_owned();
        name.push(ending);
        file_id(Path::new(&name))
    })
}

/// Which file has this name now.
pub(crate) fn file_id(path: &Path) -> Option<FileId> {
    let found = rustix::fs::lstat(path).ok()?;
    Some((found.st_dev, found.st_ino))
}

fn failed(location: &Location, e: impl Into<DriverError>) -> StoreError {
    StoreError::Open {
        location: location.to_string(),
        source: Fault::from_driver(&e.into(), location.secret()),
    }
}

fn open_file(
    location: &Location,
    path: &Path,
    lock_wait_ms: u64,
) -> Result<(rusqlite::Connection, FileId), StoreError> {
    let path = std::path::absolute(path).map_err(|source| StoreError::File {
        what: "find",
        path: path.to_owned(),
        source,
    })?;
    crate::artifacts::refuse_network_fs(&path)?;
    let file = ready_file(&path)?;
    // Only the first switch to write-ahead logging is not covered by SQLite's own waiting, so this rarely turns twice.
    let lock_wait = Duration::from_millis(lock_wait_ms);
    let until = Instant::now() + lock_wait;
    loop {
        match sqlite::open(&path, lock_wait) {
            Ok(wire) => return Ok((wire, file)),
            Err(e) => match failed(location, e) {
                e if e.trouble() == Trouble::Busy && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(BUSY_PAUSE_MS));
                }
                e => return Err(e),
            },
        }
    }
}

/// The file is ours alone, in a directory where nobody else can put a journal beside it.
///
/// Nothing here opens it: closing any descriptor of a file gives up every POSIX lock that this process has on it, those
/// of SQLite in another thread included. An O_PATH descriptor is no such one.
fn ready_file(path: &Path) -> Result<FileId, StoreError> {
    let unsafe_file = |why| StoreError::UnsafeFile {
        path: path.to_owned(),
        why,
    };
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(unsafe_file("it is no file name"));
    };
    let us = rustix::process::geteuid().as_raw();
    let directory = ready_directory(parent, us)?;
    let create = || {
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(&directory, name, FileType::RegularFile, mode, 0)
    };
    let file_error = |what, errno: Errno| StoreError::File {
        what,
        path: path.to_owned(),
        source: errno.into(),
    };
    match create() {
        Ok(()) | Err(Errno::EXIST) => (),
        Err(e) => return Err(file_error("create the database", e)),
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let held = rustix::fs::openat(&directory, name, flags, Mode::empty())
        .map_err(|e| file_error("look at the database", e))?;
    let found = rustix::fs::fstat(&held).map_err(|e| file_error("look at the database", e))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(unsafe_file(
            "it is not a regular file (symlinks are not followed)",
        ));
    }
    if found.st_uid != us {
        return Err(unsafe_file("it belongs to another user"));
    }
    if found.st_nlink > 1 {
        return Err(unsafe_file(
            "it has another name (hard link), so its journal would not be found",
        ));
    }
    if found.st_mode & 0o077 != 0 {
        return Err(unsafe_file(
            "others may read or write it; give it mode 0600 with chmod",
        ));
    }
    // SQLite would only say that it cannot open it.
    for name in [name, OsStr::new(".")] {
        rustix::fs::accessat(&directory, name, Access::WRITE_OK, AtFlags::EACCESS)
            .map_err(|e| file_error("write to the database", e))?;
    }
    Ok((found.st_dev, found.st_ino))
}

fn ready_directory(parent: &Path, us: u32) -> Result<rustix::fd::OwnedFd, StoreError> {
    let file_error = |what, source: io::Error| StoreError::File {
        what,
        path: parent.to_owned(),
        source,
    };
    let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
    made.map_err(|e| file_error("create the database's directory", e))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(CWD, parent, flags, Mode::empty())
        .map_err(|e| file_error("open the database's directory", e.into()))?;
    let found = rustix::fs::fstat(&directory)
        .map_err(|e| file_error("look at the database's directory", e.into()))?;
    match found.st_uid == us && found.st_mode & 0o022 == 0 {
        true => Ok(directory),
        false => Err(StoreError::UnsafeFile {
            path: PathBuf::from(parent),
            why: "others may write to this directory, and a journal put there becomes part of the database; \
                  use a directory of your own with mode 0700",
        }),
    }
}

/// The size of the file and of what stands beside it.
pub(crate) fn sqlite_bytes(path: &Path) -> u64 {
    let beside = |ending: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(ending);
        std::fs::symlink_metadata(name).map_or(0, |m| m.size())
    };
    ["", "-wal", "-shm"].into_iter().map(beside).sum()
}

fn postgres(location: &Location, server: &Server, lock_wait_ms: u64) -> Result<Served, StoreError> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build().map_err(StoreError::Runtime)?;
    let options = postgres_options(server);
    let limit = Duration::from_millis(server.connect_limit_ms);
    let timed = runtime.block_on(async { tokio::time::timeout(limit, options.connect()).await });
    let mut wire = match timed {
        Ok(Ok(wire)) => wire,
        Ok(Err(e)) => return Err(failed(location, e)),
        Err(_) => {
            let text = format!("no answer within {} seconds", limit.as_secs());
            return Err(StoreError::Open {
                location: location.to_string(),
                source: Fault::new(Trouble::Away, &text),
            });
        }
    };
    let told = bounded(&runtime, sqlx::raw_sql(SESSION).fetch_all(&mut wire))
        .map_err(|e| failed(location, e))?;
    if lock_wait_ms != LOCK_WAIT_MS {
        let set = sqlx::query::<Postgres>("SELECT set_config('lock_timeout', $1, false)");
        let set = set.bind(lock_wait_ms.to_string());
        bounded(&runtime, set.execute(&mut wire)).map_err(|e| failed(location, e))?;
    }
    // The last statement's row: one before it has one only where there was something to set.
    let encoding: String = match told.last() {
        Some(row) => row.try_get(0).map_err(|e| failed(location, e))?,
        None => String::new(),
    };
    match encoding.as_str() {
        "UTF8" => Ok(Served { wire, runtime }),
        _ => Err(StoreError::Encoding {
            location: location.to_string(),
            encoding,
        }),
    }
}

pub(crate) fn postgres_options(server: &Server) -> PgConnectOptions {
    // Everything the driver would look up by itself is set, because it knows neither service files nor our rules.
    let mut options = PgConnectOptions::new_without_pgpass()
        .host(&server.host)
        .port(server.port)
        .username(&server.user)
        .database(&server.database)
        .application_name("fumehood")
        // Nobody but the kernel is on a socket's way, and libpq too asks for nothing there.
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
