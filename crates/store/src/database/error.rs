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

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "there is no database: --db none keeps no record; name one with --db, FUMEHOOD_DB or FUMEHOOD_DB_FILE"
    )]
    NoDatabase,
    #[error("start the database connection's runtime")]
    Runtime(#[source] io::Error),
    #[error("open the database {location}: {}", .source.kind.advice())]
    Open {
        location: String,
        #[source]
        source: Fault,
    },
    #[error("{what} {}", .path.display())]
    File {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("use {} as a database: {why}", .path.display())]
    UnsafeFile { path: PathBuf, why: &'static str },
    #[error(transparent)]
    NetworkFs(#[from] ArtifactError),
    #[error(
        "use {location}: it holds something else than Fumehood's tables; name another file or database"
    )]
    ForeignDatabase { location: String },
    #[error(
        "use {location}: its encoding is {encoding}, and names of files need UTF8; make the database with ENCODING 'UTF8'"
    )]
    Encoding { location: String, encoding: String },
    #[error(
        "use {location}: the schema `fumehood` belongs to {owner}, who could change what we read; connect as its owner"
    )]
    SchemaOwner { location: String, owner: String },
    #[error("use {location}: {}; run `fumehood db migrate --db …` as the owner of the schema", found_schema(.found))]
    NeedsMigration {
        location: String,
        found: Option<SchemaVersion>,
    },
    #[error(
        "use {location}: its schema is {found}, this Fumehood knows {}; use a newer Fumehood",
        SchemaVersion::CURRENT
    )]
    NewerSchema {
        location: String,
        found: SchemaVersion,
    },
    #[error("{what}: {}", .source.kind.advice())]
    Statement {
        what: &'static str,
        #[source]
        source: Fault,
    },
    #[error("read {what} from the database: the value is not one that Fumehood writes")]
    BadValue { what: &'static str },
    #[error(
        "analysis {id} exists already (attempt {attempt}, {state}); `fumehood show {id}` shows it, --replace makes a new attempt, another --id leaves it alone"
    )]
    Exists {
        id: String,
        attempt: u32,
        state: State,
        committed_ms: Option<i64>,
    },
    #[error("analysis {id} has an attempt ({attempt}) that is {}", unfinished(.id, .state, .host))]
    Running {
        id: String,
        attempt: u32,
        state: State,
        host: String,
    },
    #[error("commit {id}: its key belongs to attempt {attempt} of {other}")]
    WrongKey {
        id: String,
        other: String,
        attempt: u32,
    },
    #[error("commit {id}: the state {state} is not a final one")]
    NotFinal { id: String, state: State },
    #[error("read the content of output {path} for the database")]
    Content {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("finish the transaction")]
    BeforeCommit(#[source] io::Error),
    #[error("no analysis matches {given:?}; `fumehood list` shows what there is")]
    NotFound { given: String },
    #[error("{given:?} is the beginning of several ids: {}; write more of it", .candidates.join(", "))]
    Ambiguous {
        given: String,
        candidates: Vec<String>,
    },
    #[error("hand on what was read from the database")]
    Callback(#[source] io::Error),
    /// The error of one of several submissions that were to be queued together. `at` counts from 0.
    #[error("queue submission number {}, and none of the others", .at + 1)]
    Submission {
        at: usize,
        #[source]
        source: Box<StoreError>,
    },
    #[error("queue {id}: it is there twice; give each its own --id")]
    DuplicateId { id: String },
    #[error(
        "queue {asked} more: {queued} wait already, and the queue holds at most {queue_max}; wait until some have run, or cancel some"
    )]
    QueueFull {
        queued: u64,
        asked: u64,
        queue_max: u64,
    },
    #[error(
        "the key {key:?} was used before, for another request, which became analysis {id}; use another --key, or repeat that request as it was"
    )]
    KeyUsed { key: String, id: String },
    #[error(
        "analysis {id} asks for {}, and the workers have at most {}; ask for less with --memory and --cpus, or start a larger worker",
        capacity(.asked), capacity(.largest)
    )]
    DoesNotFit {
        id: String,
        asked: Capacity,
        largest: Capacity,
    },
    #[error(
        "retry {id}: it was never submitted, so no request is kept that could be run again; use `fumehood run --id {id} --replace`"
    )]
    NeverSubmitted { id: String },
    #[error(
        "retry {id}: secrets_erased: the values of {} were erased when it ended; give each again with --env NAME=VALUE, or with --env NAME \
         to take it from your environment",
        .names.join(", ")
    )]
    SecretsErased { id: String, names: Vec<String> },
    #[error(
        "retry {id}: {name} was not erased, and it runs as it was submitted; leave out --env {name}"
    )]
    NotErased { id: String, name: String },
    #[error("retry {id}: write its request with these values")]
    Request {
        id: String,
        #[source]
        source: SubmissionError,
    },
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
