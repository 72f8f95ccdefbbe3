//! What went wrong with the record, and what to do about it.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::artifacts::ArtifactError;
use crate::attempts::attempt::State;
use crate::database::connection::DriverError;
use crate::database::schema::Schema;
use crate::queue::queue_types::Capacity;
use crate::types::escaping::escape_terminal;
use crate::types::submission::SubmissionError;

/// The kinds of trouble that a caller treats differently; everything finer is for people to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It cannot be reached, or went away. Whether the last transaction was committed is not known: repeat it.
    Away,
    ReadOnly,
    /// Somebody else holds it, for longer than we wait.
    Busy,
    Full,
    Permission,
    /// Another version of the schema, or none.
    Schema,
    Damaged,
    Other,
}

impl Trouble {
    pub fn advice(self) -> &'static str {
        match self {
            Trouble::Away => {
                "see that the database runs and can be reached, then repeat the command"
            }
            Trouble::ReadOnly => {
                "make the database writable (its disk, its file, or the server's role), then repeat"
            }
            Trouble::Busy => {
                "another program holds the database; wait for it or stop it, then repeat"
            }
            Trouble::Full => "make room on the database's disk, then repeat",
            Trouble::Permission => {
                "check user and password (PGUSER, PGPASSFILE with mode 0600, PGSERVICE) and the grants in docs/database.md"
            }
            Trouble::Schema => "run `fumehood db migrate`",
            Trouble::Damaged => "the database is damaged; restore it from a backup",
            Trouble::Other => "see docs/database.md",
        }
    }
}

/// What the database or its driver said: bounded, free of control characters, and free of the password.
#[derive(Debug)]
pub struct Fault {
    pub trouble: Trouble,
    text: String,
}

const FAULT_TEXT_MAX: usize = 500;

impl Fault {
    pub(crate) fn new(trouble: Trouble, text: &str) -> Fault {
        // Constraint messages may repeat a value that an attacker chose.
        let text = escape_terminal(text.as_bytes());
        let text = text.chars().take(FAULT_TEXT_MAX).collect();
        Fault { trouble, text }
    }

    pub(crate) fn from_driver(error: &DriverError, secret: Option<&str>) -> Fault {
        let (trouble, text) = match error {
            DriverError::Sqlite(e) => from_sqlite(e),
            DriverError::Postgres(e) => from_postgres(e),
        };
        // No driver is known to repeat the password; this makes it impossible.
        match secret.filter(|s| !s.is_empty() && text.contains(s)) {
            Some(secret) => Fault::new(trouble, &text.replace(secret, "(withheld)")),
            None => Fault::new(trouble, &text),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Fault {}

/// A server that closes the connection shows as any of several errors; a full disk or missing right does not.
fn io_trouble(e: &io::Error) -> Trouble {
    match e.kind() {
        io::ErrorKind::PermissionDenied => Trouble::Permission,
        io::ErrorKind::ReadOnlyFilesystem => Trouble::ReadOnly,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Trouble::Full,
        _ => Trouble::Away,
    }
}

fn from_sqlite(error: &rusqlite::Error) -> (Trouble, String) {
    let Some(code) = error.sqlite_extended_error_code() else {
        return (Trouble::Other, error.to_string());
    };
    (sqlite_trouble(code), format!("{error} (code {code})"))
}

fn from_postgres(error: &sqlx::Error) -> (Trouble, String) {
    match error {
        sqlx::Error::Database(e) => {
            let code = e.code().unwrap_or(Cow::Borrowed(""));
            let text = format!("{} (code {code})", e.message());
            (postgres_trouble(&code), text)
        }
        sqlx::Error::Io(e) => (io_trouble(e), e.to_string()),
        sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) => (Trouble::Away, error.to_string()),
        other => (Trouble::Other, other.to_string()),
    }
}

/// <https://www.sqlite.org/rescode.html>; the low byte is the primary code.
fn sqlite_trouble(code: i32) -> Trouble {
    match code & 0xff {
        5 | 6 => Trouble::Busy,
        8 => Trouble::ReadOnly,
        13 => Trouble::Full,
        3 | 23 => Trouble::Permission,
        11 | 26 => Trouble::Damaged,
        10 | 14 => Trouble::Away,
        _ => Trouble::Other,
    }
}

/// <https://www.postgresql.org/docs/current/errcodes-appendix.html>
fn postgres_trouble(code: &str) -> Trouble {
    match code {
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "3D000" => Trouble::Away,
        "53100" => Trouble::Full,
        "53300" | "55P03" | "57014" | "40001" | "40P01" => Trouble::Busy,
        "25006" => Trouble::ReadOnly,
        "42501" => Trouble::Permission,
        "42P01" | "42703" | "3F000" => Trouble::Schema,
        "XX001" | "XX002" => Trouble::Damaged,
        code if code.starts_with("08") => Trouble::Away,
        code if code.starts_with("28") => Trouble::Permission,
        _ => Trouble::Other,
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "there is no database: --db none keeps no record; name one with --db, FUMEHOOD_DB or FUMEHOOD_DB_FILE"
    )]
    NoDatabase,
    #[error("start the database connection's runtime")]
    Runtime(#[source] io::Error),
    #[error("open the database {location}: {}", .source.trouble.advice())]
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
    NotOurs { location: String },
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
        found: Option<Schema>,
    },
    #[error(
        "use {location}: its schema is {found}, this Fumehood knows {}; use a newer Fumehood",
        Schema::CURRENT
    )]
    NewerSchema { location: String, found: Schema },
    #[error("{what}: {}", .source.trouble.advice())]
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
    /// One of several that were to be queued together; counted from 0.
    #[error("queue submission number {}, and none of the others", .at + 1)]
    Submission {
        at: usize,
        #[source]
        source: Box<StoreError>,
    },
    #[error("queue {id}: it is there twice; give each its own --id")]
    Twice { id: String },
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

fn found_schema(found: &Option<Schema>) -> String {
    match found {
        Some(found) => format!(
            "its schema is {found}, this Fumehood needs {}",
            Schema::CURRENT
        ),
        None => "it has no schema `fumehood` yet".to_owned(),
    }
}

impl StoreError {
    /// A word for programs, where they can do something about it.
    pub fn code(&self) -> Option<&'static str> {
        match self {
            StoreError::SecretsErased { .. } => Some("secrets_erased"),
            _ => None,
        }
    }

    pub fn trouble(&self) -> Trouble {
        match self {
            StoreError::Open { source, .. } | StoreError::Statement { source, .. } => {
                source.trouble
            }
            StoreError::File { source, .. } => match io_trouble(source) {
                Trouble::Away if source.kind() == io::ErrorKind::NotFound => Trouble::Away,
                trouble => trouble,
            },
            StoreError::UnsafeFile { .. } | StoreError::SchemaOwner { .. } => Trouble::Permission,
            StoreError::NeedsMigration { .. } | StoreError::NewerSchema { .. } => Trouble::Schema,
            StoreError::BadValue { .. } => Trouble::Damaged,
            StoreError::Submission { source, .. } => source.trouble(),
            _ => Trouble::Other,
        }
    }

    /// Whether it is the database's condition and not the request: what was collected must then wait in `pending`.
    pub fn is_away(&self) -> bool {
        self.trouble() != Trouble::Other
    }
}
