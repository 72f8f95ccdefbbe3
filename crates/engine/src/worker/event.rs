//! What a worker reports to its caller.

use crate::attempt::record::Status;

/// Something that happened in the worker, for its log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEvent {
    Claimed {
        id: String,
        attempt: u32,
    },
    /// A runner of this worker has ended, whatever the result of its attempt.
    RunnerEnded {
        id: String,
        attempt: u32,
    },
    /// An attempt that a dead runner had left is committed.
    Recovered {
        id: String,
        attempt: u32,
        status: Status,
    },
    GivenUp {
        id: String,
        attempt: u32,
    },
    Parked {
        id: String,
    },
    /// The database cannot be used for now. Running analyses go on.
    DatabaseUnavailable(String),
    DatabaseAvailable,
    Problem(String),
}
