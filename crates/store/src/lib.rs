//! The record: SQLite or PostgreSQL behind one blocking face. All SQL of the project is in this directory.
//!
//! Every statement is a constant with its values beside it (`connection.rs`); nothing is ever formatted into one. Text is
//! cleaned of NUL, which PostgreSQL refuses, in one place. Both databases have the same tables, made by migrations, and
//! read-only views for other programs (docs/database.md).
//!
//! An attempt is begun, then committed in one transaction guarded by its number, its key and its state. The key, a random
//! token that only the attempt's runner and its run directory have, makes both steps repeatable: whoever repeats a commit
//! whose answer was lost finds the key and is told `Already`. Whoever comes after somebody else ended the attempt is
//! stored beside it as superseded, outputs and all.
//!
//! A [`Store`] holds one connection and a runtime of its own, so it may not be used on a thread that runs async code.

#![forbid(unsafe_code)]

pub mod artifacts;
mod attempts;
mod database;
mod queue;
pub mod types;

pub use attempts::attempt::{
    Begin, Commit, Committed, Content, Log, Lost, PostProcess, Proof, STREAMS, State, Usage,
};
pub use attempts::export::Status;
pub use attempts::objects::InStore;
pub use attempts::read::{
    Attempt, Due, Filter, Listed, RemarkCount, StoredLog, StoredOutput, StoredRemark, Unfinished,
    Which,
};
pub use attempts::remove::{Removable, Removed, WhileRunning};
pub use database::error::{Fault, StoreError, Trouble};
pub use database::location::{Environment, Location, LocationError, Origin, Server, SslMode};
pub use database::schema::{GRANTS, GRANTS_TO_READ, GRANTS_TO_REMOVE, Migrated, Schema};
pub use queue::change_listener::Bell;
pub use queue::queue_position::{AHEAD_MAX, InQueue, Place};
pub use queue::queue_types::{
    Busy, Cancelled, Capacity, Claim, Claimed, Event, Expired, Happened, Held, Overview, Renewed,
    Submit, Submitted, Waiting, Worker,
};

use database::connection::{Connection, Dialect};

/// An open record.
pub struct Store {
    db: Connection,
    id: String,
}

impl Store {
    /// Opens a record that this Fumehood can use. A SQLite file is made and migrated where needed; PostgreSQL is only
    /// ever migrated by [`Store::migrate`].
    pub fn open(location: &Location) -> Result<Store, StoreError> {
        Store::open_waiting(location, database::open::LOCK_WAIT_MS)
    }

    /// The same, with another bound on how long a statement waits for somebody else's lock.
    pub fn open_waiting(location: &Location, lock_wait_ms: u64) -> Result<Store, StoreError> {
        let mut db = Connection::open(location, lock_wait_ms)?;
        let id = match database::schema::check(&mut db) {
            Err(StoreError::NeedsMigration { .. }) if db.dialect() == Dialect::Sqlite => {
                database::schema::migrate(&mut db, Schema::CURRENT)?;
                database::schema::check(&mut db)?
            }
            checked => checked?,
        };
        Ok(Store { db, id })
    }

    /// Makes the schema, or brings it up to date. Needs the owner of the schema, or the right to create one.
    pub fn migrate(location: &Location) -> Result<Migrated, StoreError> {
        Store::migrate_to(location, Schema::CURRENT)
    }

    /// As an older Fumehood would have; for the tests of what such a one left behind.
    pub fn migrate_to(location: &Location, to: Schema) -> Result<Migrated, StoreError> {
        let mut db = Connection::open(location, database::open::LOCK_WAIT_MS)?;
        database::schema::migrate(&mut db, to.min(Schema::CURRENT))
    }

    /// Notes which files it is, for [`Store::is_in_place`] to compare.
    pub fn note_place(&mut self) {
        self.db.note_place();
    }

    /// Whether the database, and the log that was last written to, are still where they were. A server answers for itself.
    pub fn is_in_place(&self) -> bool {
        self.db.is_in_place()
    }

    /// Lets go of the database in a process that is about to end. SQLite's write-ahead log then stays beside the file, and
    /// is read by whoever opens it next.
    pub fn leave(self) {
        self.db.leave();
    }

    /// The database's own name: 32 hex digits, made with it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Where it is, without the password.
    pub fn location(&self) -> &Location {
        self.db.location()
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.db.location())
    }
}
