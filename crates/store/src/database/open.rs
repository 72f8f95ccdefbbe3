//! Opens a connection, after checking the file or server.

use std::ffi::OsStr;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::database::error::StoreError;
use crate::database::fault::FaultKind;
use crate::database::location::Location;
use crate::database::postgres::{self, PostgresSession};
use crate::database::sqlite;

const BUSY_PAUSE_MS: u64 = 20;

pub(crate) enum DriverConnection {
    Sqlite(rusqlite::Connection),
    Postgres(Box<PostgresSession>),
}

pub(crate) fn connect(
    location: &Location,
    lock_wait_ms: u64,
) -> Result<(DriverConnection, Option<FileId>), StoreError> {
    match location {
        Location::None => Err(StoreError::NoDatabase),
        Location::Sqlite(path) => {
            let (driver, file) = open_sqlite(location, path, lock_wait_ms)?;
            Ok((DriverConnection::Sqlite(driver), Some(file)))
        }
        Location::Postgres(server) => {
            let session = postgres::open(location, server, lock_wait_ms)?;
            Ok((DriverConnection::Postgres(Box::new(session)), None))
        }
    }
}

/// A file's device and inode, whatever its name.
pub(crate) type FileId = (u64, u64);

/// The files beside a SQLite database in use: its write-ahead log, and the log's index, which holds the locks.
pub(crate) fn companion_files(path: &Path) -> [Option<FileId>; 2] {
    ["-wal", "-shm"].map(|ending| file_id(&beside(path, ending)))
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// The identity of the file that has this name now.
pub(crate) fn file_id(path: &Path) -> Option<FileId> {
    let found = rustix::fs::lstat(path).ok()?;
    Some((found.st_dev, found.st_ino))
}

fn open_sqlite(
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
    let file = prepare_file(&path)?;
    // SQLite's own waiting does not cover the first switch to write-ahead logging. The loop rarely runs twice.
    let lock_wait = Duration::from_millis(lock_wait_ms);
    let until = Instant::now() + lock_wait;
    loop {
        match sqlite::open(&path, lock_wait) {
            Ok(driver) => return Ok((driver, file)),
            Err(e) => match StoreError::opening(location, e) {
                e if e.fault_kind() == FaultKind::Busy && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(BUSY_PAUSE_MS));
                }
                e => return Err(e),
            },
        }
    }
}

/// Makes sure that the file belongs to this user alone, in a directory where nobody else can put a journal beside it.
/// Creates the file if necessary.
///
/// This function never opens the file: closing any descriptor of a file releases all POSIX locks that this process
/// holds on it, including those of SQLite in another thread. An O_PATH descriptor does not.
fn prepare_file(path: &Path) -> Result<FileId, StoreError> {
    let unsafe_file = |why| StoreError::UnsafeFile {
        path: path.to_owned(),
        why,
    };
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(unsafe_file("it is no file name"));
    };
    let us = rustix::process::geteuid().as_raw();
    let directory = prepare_directory(parent, us)?;
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
    // Check for write access here, since SQLite would only report that it cannot open the file.
    for name in [name, OsStr::new(".")] {
        rustix::fs::accessat(&directory, name, Access::WRITE_OK, AtFlags::EACCESS)
            .map_err(|e| file_error("write to the database", e))?;
    }
    Ok((found.st_dev, found.st_ino))
}

fn prepare_directory(parent: &Path, us: u32) -> Result<rustix::fd::OwnedFd, StoreError> {
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

/// The size of the file, its log and its index.
pub(crate) fn sqlite_size_bytes(path: &Path) -> u64 {
    let size = |ending| std::fs::symlink_metadata(beside(path, ending)).map_or(0, |m| m.size());
    ["", "-wal", "-shm"].into_iter().map(size).sum()
}
