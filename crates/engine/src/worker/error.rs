//! Errors that end a worker.

use std::io;
use std::path::{Path, PathBuf};

use crate::home::HomeError;

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error("{0:?} is not a valid name for a worker: [A-Za-z0-9][A-Za-z0-9._-]{{0,63}}")]
    Name(String),
    #[error(
        "a worker named {name} is running already in {home:?}; stop it, or give this one another --name"
    )]
    Running { name: String, home: PathBuf },
    #[error("lock {path:?}")]
    Lock { path: PathBuf, source: io::Error },
    #[error("use the slot {path:?}")]
    Slot { path: PathBuf, source: io::Error },
    #[error("start the worker's threads")]
    Start(#[source] io::Error),
    #[error("a thread of the worker has ended unexpectedly; this is a bug in Fumehood")]
    ThreadEnded,
}

pub(super) fn slot_error(path: &Path, source: io::Error) -> WorkerError {
    WorkerError::Slot {
        path: path.to_path_buf(),
        source,
    }
}
