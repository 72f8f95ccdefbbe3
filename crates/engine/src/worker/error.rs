//! Errors that end a worker.

use std::io;
use std::path::{Path, PathBuf};

use crate::home::HomeError;

/// Why a worker cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum WorkerError {
    /// The home, or a directory in it, cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The worker's name is not valid.
    #[error("{0:?} is not a valid name for a worker: [A-Za-z0-9][A-Za-z0-9._-]{{0,63}}")]
    Name(String),
    /// A live worker has the name.
    #[error(
        "a worker named {name} is running already in {home:?}; stop it, or give this one another --name"
    )]
    Running { name: String, home: PathBuf },
    /// The file that reserves the name could not be locked or written.
    #[error("lock {path:?}")]
    Lock { path: PathBuf, source: io::Error },
    /// The directory of a slot, or a file in it, could not be used.
    #[error("use the slot {path:?}")]
    Slot { path: PathBuf, source: io::Error },
    /// The threads for maintenance could not be started.
    #[error("start the worker's threads")]
    Start(#[source] io::Error),
    /// A thread for maintenance has ended.
    #[error("a thread of the worker has ended unexpectedly; this is a bug in Fumehood")]
    ThreadEnded,
}

pub(super) fn slot_error(path: &Path, source: io::Error) -> WorkerError {
    WorkerError::Slot {
        path: path.to_path_buf(),
        source,
    }
}
