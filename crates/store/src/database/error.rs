//! Errors of the store, each with advice on what to do.

use std::io;
use std::path::PathBuf;

use crate::artifacts::ArtifactError;
use crate::database::fault::{DriverError, Fault, FaultKind, io_fault_kind};
use crate::database::location::Location;
use crate::database::migrations::SchemaVersion;
use crate::types::attempt::State;
use crate::types::capacity::Capacity;
use crate::types::submission::SubmissionError;

/// Why the store could not do what it was asked to do.
#[allow(missing_docs, reason = "the variants say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The address is `none`, so there is nothing to open.
    #[error(
        "there is no database: --db none keeps no record; name one with --db, FUMEHOOD_DB or FUMEHOOD_DB_FILE"
    )]
    NoDatabase,
    /// Starting the runtime of the PostgreSQL driver failed.
    #[error("start the database connection's runtime")]
    Runtime(#[source] io::Error),
    /// Connecting to the database failed.
    #[error("open the database {location}: {}", .source.kind.advice())]
    Open {
        location: String,
        #[source]
        source: Fault,
    },
    /// Preparing the database file or its directory failed: `what` says what was attempted.
    #[error("{what} {}", .path.display())]
    File {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The database file, or its directory, could be changed by others or is not a plain file.
    #[error("use {} as a database: {why}", .path.display())]
    UnsafeFile { path: PathBuf, why: &'static str },
    /// The database file is on a network file system, or that could not be found out.
    #[error(transparent)]
    NetworkFs(#[from] ArtifactError),
    /// The database holds tables of another program.
    #[error(
        "use {location}: it holds something else than Fumehood's tables; name another file or database"
    )]
    ForeignDatabase { location: String },
    /// The database does not store text as UTF-8.
    #[error(
        "use {location}: its encoding is {encoding}, and names of files need UTF8; make the database with ENCODING 'UTF8'"
    )]
    Encoding { location: String, encoding: String },
    /// The schema belongs to another role than the one that migrates.
    #[error(
        "use {location}: the schema `fumehood` belongs to {owner}, who could change what we read; connect as its owner"
    )]
    SchemaOwner { location: String, owner: String },
    /// The schema is missing (`found` is `None`) or older than this Fumehood needs.
    #[error("use {location}: {}; run `fumehood db migrate --db …` as the owner of the schema", found_schema(.found))]
    NeedsMigration {
        location: String,
        found: Option<SchemaVersion>,
    },
    /// The schema has a major version that this Fumehood does not know.
    #[error(
        "use {location}: its schema is {found}, this Fumehood knows {}; use a newer Fumehood",
        SchemaVersion::CURRENT
    )]
    NewerSchema {
        location: String,
        found: SchemaVersion,
    },
    /// A statement or a transaction failed: `what` says what it was for.
    #[error("{what}: {}", .source.kind.advice())]
    Statement {
        what: &'static str,
        #[source]
        source: Fault,
    },
    /// The database holds a value that Fumehood does not write.
    #[error("read {what} from the database: the value is not one that Fumehood writes")]
    BadValue { what: &'static str },
    /// The id has a finished attempt, and no replacement was asked for.
    #[error(
        "analysis {id} exists already (attempt {attempt}, {state}); `fumehood show {id}` shows it, --replace makes a new attempt, another --id leaves it alone"
    )]
    Exists {
        id: String,
        attempt: u32,
        state: State,
        /// When that attempt was committed, by the database's clock. `None` if it has no such time.
        committed_ms: Option<i64>,
    },
    /// The id has an attempt that has not ended.
    #[error("analysis {id} has an attempt ({attempt}) that is {}", unfinished(.id, .state, .host))]
    Running {
        id: String,
        attempt: u32,
        state: State,
        host: String,
    },
    /// The key that was given belongs to another attempt.
    #[error("commit {id}: its key belongs to attempt {attempt} of {other}")]
    WrongKey {
        id: String,
        other: String,
        attempt: u32,
    },
    /// An attempt was to be committed in a state that is not final.
    #[error("commit {id}: the state {state} is not a final one")]
    NotFinal { id: String, state: State },
    /// Reading an output, to store its bytes in the database, failed.
    #[error("read the content of output {path} for the database")]
    Content {
        path: String,
        #[source]
        source: io::Error,
    },
    /// The caller's function that runs before the transaction is committed failed.
    #[error("finish the transaction")]
    BeforeCommit(#[source] io::Error),
    /// There is no such analysis or attempt.
    #[error("no analysis matches {given:?}; `fumehood list` shows what there is")]
    NotFound { given: String },
    /// A prefix stands for several ids. `candidates` lists the first of them.
    #[error("{given:?} is the beginning of several ids: {}; write more of it", .candidates.join(", "))]
    Ambiguous {
        given: String,
        candidates: Vec<String>,
    },
    /// A function of the caller, to which rows are passed, failed.
    #[error("hand on what was read from the database")]
    Callback(#[source] io::Error),
    /// The error of one of several submissions that were to be queued together. `at` counts from 0.
    #[error("queue submission number {}, and none of the others", .at + 1)]
    Submission {
        at: usize,
        #[source]
        source: Box<StoreError>,
    },
    /// Two of the submissions that were to be queued together have the same id.
    #[error("queue {id}: it is there twice; give each its own --id")]
    DuplicateId { id: String },
    /// The queue would hold more than the caller allows.
    #[error(
        "queue {asked} more: {queued} wait already, and the queue holds at most {queue_max}; wait until some have run, or cancel some"
    )]
    QueueFull {
        queued: u64,
        asked: u64,
        queue_max: u64,
    },
    /// A submission with this key but another request exists.
    #[error(
        "the key {key:?} was used before, for another request, which became analysis {id}; use another --key, or repeat that request as it was"
    )]
    KeyUsed { key: String, id: String },
    /// No live worker has the memory and the CPUs that the request asks for.
    #[error(
        "analysis {id} asks for {}, and the workers have at most {}; ask for less with --memory and --cpus, or start a larger worker",
        capacity(.asked), capacity(.largest)
    )]
    DoesNotFit {
        id: String,
        asked: Capacity,
        largest: Capacity,
    },
    /// A retry was asked for, but the analysis came from `fumehood run`.
    #[error(
        "retry {id}: it was never submitted, so no request is kept that could be run again; use `fumehood run --id {id} --replace`"
    )]
    NeverSubmitted { id: String },
    /// A retry was asked for, but the values of secret variables were erased.
    #[error(
        "retry {id}: secrets_erased: the values of {} were erased when it ended; give each again with --env NAME=VALUE, or with --env NAME \
         to take it from your environment",
        .names.join(", ")
    )]
    SecretsErased { id: String, names: Vec<String> },
    /// A retry was given the value of a variable that has not been erased.
    #[error(
        "retry {id}: {name} was not erased, and it runs as it was submitted; leave out --env {name}"
    )]
    NotErased { id: String, name: String },
    /// A retry's request, with the values put back, cannot be written.
    #[error("retry {id}: write its request with these values")]
    Request {
        id: String,
        #[source]
        source: SubmissionError,
    },
    /// A retry was asked for while an attempt has not ended.
    #[error(
        "retry {id}: attempt {attempt} is {state}, and has not ended; wait for it with `fumehood wait {id}`, or cancel it first"
    )]
    NotEnded {
        id: String,
        attempt: u32,
        state: State,
    },
}

fn unfinished(id: &str, state: &State, host: &str) -> String {
    match state {
        State::Queued => format!(
            "queued; wait for it with `fumehood wait {id}`, or take it out with `fumehood cancel {id}`"
        ),
        state => format!(
            "{state} on {host}; wait for it, or, if its runner is gone, run `fumehood gc` there"
        ),
    }
}

fn capacity(capacity: &Capacity) -> String {
    let memory = crate::types::units::format_size(capacity.memory_bytes);
    let cpus = crate::types::units::format_cpus(capacity.cpu_milli);
    format!("{memory} of memory and {cpus} CPUs")
}

fn found_schema(found: &Option<SchemaVersion>) -> String {
    match found {
        Some(found) => format!(
            "its schema is {found}, this Fumehood needs {}",
            SchemaVersion::CURRENT
        ),
        None => "it has no schema `fumehood` yet".to_owned(),
    }
}

impl StoreError {
    pub(crate) fn opening(location: &Location, e: impl Into<DriverError>) -> StoreError {
        StoreError::Open {
            location: location.to_string(),
            source: Fault::from_driver(&e.into(), location.secret()),
        }
    }

    /// A stable word for programs that can react to this error.
    pub fn code(&self) -> Option<&'static str> {
        match self {
            StoreError::SecretsErased { .. } => Some("secrets_erased"),
            _ => None,
        }
    }

    /// The kind of the database failure. [`FaultKind::Other`] if the request, not the database, caused the error.
    pub fn fault_kind(&self) -> FaultKind {
        match self {
            StoreError::Open { source, .. } | StoreError::Statement { source, .. } => source.kind,
            StoreError::File { source, .. } => match io_fault_kind(source) {
                FaultKind::Unreachable if source.kind() == io::ErrorKind::NotFound => {
                    FaultKind::Unreachable
                }
                kind => kind,
            },
            StoreError::UnsafeFile { .. } | StoreError::SchemaOwner { .. } => FaultKind::Permission,
            StoreError::NeedsMigration { .. } | StoreError::NewerSchema { .. } => FaultKind::Schema,
            StoreError::BadValue { .. } => FaultKind::Damaged,
            StoreError::Submission { source, .. } => source.fault_kind(),
            _ => FaultKind::Other,
        }
    }

    /// Whether the database caused the error, not the request. The caller then keeps the collected outputs in
    /// `pending` and commits them later.
    pub fn is_database_fault(&self) -> bool {
        self.fault_kind() != FaultKind::Other
    }
}
