//! What a worker reports to its caller.

use crate::attempt::record::Status;

/// Something that happened in the worker, for its log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEvent {
    /// An attempt was claimed, and its runner started.
    Claimed {
        /// The analysis.
        id: String,
        /// The number of the attempt.
        attempt: u32,
    },
    /// A runner of this worker has ended, whatever the result of its attempt.
    RunnerEnded {
        /// The analysis.
        id: String,
        /// The number of the attempt.
        attempt: u32,
    },
    /// An attempt that a dead runner had left is committed.
    Recovered {
        /// The analysis.
        id: String,
        /// The number of the attempt.
        attempt: u32,
        /// How the attempt ended.
        status: Status,
    },
    /// An attempt was ended in the database because its runner is dead or its lease expired.
    GivenUp {
        /// The analysis.
        id: String,
        /// The number of the attempt.
        attempt: u32,
    },
    /// An attempt was taken out of the queue because no live worker is large enough for it.
    Parked {
        /// The analysis.
        id: String,
    },
    /// The database cannot be used for now. Running analyses go on.
    DatabaseUnavailable(String),
    /// The database can be used again.
    DatabaseAvailable,
    /// Something failed, and the worker goes on. Holds the message.
    Problem(String),
}
