//! The record of analyses: a database (SQLite or PostgreSQL) and a content-addressed artifact store. All SQL of the
//! project is in this crate.
//!
//! # Theory of operation
//!
//! The crate has no processes and no threads of its own, apart from [`ChangeListener`] and the threads that hash
//! large files. A [`Store`] owns one database connection and offers blocking calls. The PostgreSQL driver is async,
//! so each connection carries a private single-threaded runtime; for that reason a `Store` must not be used on a
//! thread that runs async code. A lost connection is replaced by the next call, but never within a transaction.
//!
//! Every SQL statement is a constant string with typed values beside it. No value is ever formatted into a statement.
//! Both databases have the same tables, which migrations create, and read-only views for other programs
//! (docs/database.md).
//!
//! A runner begins an attempt ([`Store::begin`]), runs the program, moves the outputs into the artifact store
//! ([`artifacts::Artifacts`]), makes them durable, and only then commits the attempt ([`Store::commit`]). The commit
//! is one transaction. Its first statement changes the state only if attempt number, key and old state match. The key
//! is a random token. The database, the attempt's runner, its run directory and the worker's order have it, and no view
//! shows it. The key makes both calls repeatable: a runner that repeats a commit whose answer was lost gets
//! [`CommitOutcome::Already`]. If somebody else ended the attempt meanwhile, the late result is stored beside it under
//! another number, marked as superseded, with its
//! outputs.
//!
//! Queued work takes the same path. [`Store::submit`] writes requests and their files, a worker calls
//! [`Store::claim`], the runner calls [`Store::start_claimed`] and renews a lease by the database's clock. A runner
//! whose lease has expired is given up ([`Store::give_up`]); the transaction that ends an attempt also queues its
//! retry.
//!
//! # Folders
//!
//! Each folder uses only the folders before it.
//!
//! - [`types`]: the data that is stored, its bounds, and the crash points of the tests
//! - [`artifacts`]: objects named by the hash of their content
//! - `database`: connection, address, schema, errors
//! - `analyses`: what the queue and attempts share: lock and numbers of an analysis, events, submitted files, secrets
//! - `queue`: submit, claim, lease, retry, cancel
//! - `attempts`: begin, commit, give up, read, remove, export
//!
//! # Example
//!
//! ```
//! use store::{Location, NewAttempt, State, Store};
//!
//! let directory = tempfile::tempdir()?;
//! let mut store = Store::open(&Location::Sqlite(directory.path().join("fumehood.db")))?;
//! let attempt = store.begin(&NewAttempt {
//!     id: "my-analysis",
//!     key: "0123456789abcdef0123456789abcdef",
//!     replace: false,
//!     host: "this-machine",
//!     boot_id: "this-boot",
//!     submitter: None,
//!     workspace: None,
//!     provenance: None,
//! })?;
//! let found = store.show("my-analysis", Some(attempt))?;
//! assert_eq!((found.summary.attempt, found.summary.state), (1, State::Running));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod analyses;
pub mod artifacts;
mod attempts;
mod database;
mod queue;
pub mod types;

pub use analyses::events::AnalysisEvent;
pub use attempts::export::StoreStatus;
pub use attempts::objects::ArtifactStoreUse;
pub use attempts::read::{
    AttemptFilter, AttemptRow, AttemptSelection, AttemptSummary, DuePostProcess, RemarkCount,
    StoredLog, StoredOutput, StoredRemark, UnfinishedAttempt,
};
pub use attempts::remove::{RemovableAnalysis, RemovalCounts, UnfinishedPolicy};
pub use database::error::StoreError;
pub use database::fault::{Fault, FaultKind};
pub use database::libpq_settings::Environment;
pub use database::location::{Location, LocationOrigin, PostgresAddress};
pub use database::location_error::LocationError;
pub use database::migrations::{GRANTS, GRANTS_TO_READ, GRANTS_TO_REMOVE, SchemaVersion};
pub use database::schema::MigrationResult;
pub use queue::change_listener::ChangeListener;
pub use queue::queue_position::{AHEAD_MAX, QueuePosition, QueueWait};
pub use queue::queue_types::{
    ActiveAttempt, CancelOutcome, ClaimRequest, ExpiredLease, GrantedClaim, LeasedAttempt,
    NewSubmission, QueueOverview, RenewOutcome, SubmitOutcome, WaitingAttempt, WorkerRow,
};
pub use types::attempt::{
    AttemptUsage, Commit, CommitOutcome, LogRow, LossProof, LostAttempt, NewAttempt,
    OutputContentFn, PostProcessState, STREAMS, State,
};
pub use types::capacity::Capacity;

use database::connection::{Connection, Dialect};

/// An open database.
pub struct Store {
    db: Connection,
    id: String,
}

impl Store {
    /// Opens a database whose schema this version of Fumehood can use. Creates and migrates a SQLite file if
    /// necessary. PostgreSQL is migrated only by [`Store::migrate`].
    pub fn open(location: &Location) -> Result<Store, StoreError> {
        Store::open_with_lock_wait(location, database::postgres::LOCK_WAIT_MS)
    }

    /// Like [`Store::open`], with another limit on how long a statement waits for another connection's lock.
    pub fn open_with_lock_wait(
        location: &Location,
        lock_wait_ms: u64,
    ) -> Result<Store, StoreError> {
        let mut db = Connection::open(location, lock_wait_ms)?;
        let id = match database::schema::check(&mut db) {
            Err(StoreError::NeedsMigration { .. }) if db.dialect() == Dialect::Sqlite => {
                database::schema::migrate(&mut db, SchemaVersion::CURRENT)?;
                database::schema::check(&mut db)?
            }
            checked => checked?,
        };
        Ok(Store { db, id })
    }

    /// Creates the schema or brings it up to date. The role must own the schema or have the right to create one.
    pub fn migrate(location: &Location) -> Result<MigrationResult, StoreError> {
        Store::migrate_to(location, SchemaVersion::CURRENT)
    }

    /// Migrates to an older version of the schema. For tests of databases that an older Fumehood wrote.
    pub fn migrate_to(
        location: &Location,
        to: SchemaVersion,
    ) -> Result<MigrationResult, StoreError> {
        let mut db = Connection::open(location, database::postgres::LOCK_WAIT_MS)?;
        database::schema::migrate(&mut db, to.min(SchemaVersion::CURRENT))
    }

    /// Remembers which files the database consists of, for [`Store::files_in_place`] to compare with.
    pub fn note_files(&mut self) {
        self.db.note_files();
    }

    /// Whether the SQLite file, and the write-ahead log that was last written to, still have their names. Always true
    /// for PostgreSQL.
    pub fn files_in_place(&self) -> bool {
        self.db.files_in_place()
    }

    /// Gives up the connection without closing it, in a process that is about to exit. SQLite's write-ahead log then
    /// stays beside the file, and the next connection reads it.
    pub fn leak_until_exit(self) {
        self.db.leak_until_exit();
    }

    /// The id of the database: 32 hex digits, created with it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The address of the database, without the password.
    pub fn location(&self) -> &Location {
        self.db.location()
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.db.location())
    }
}
