//! Where attempts are recorded: a database, and an artifact store beside it.

use std::path::PathBuf;
use std::thread::JoinHandle;

use crate::attempt::finalize::SettleError;
use crate::attempt::post_process::PostProcess;
use crate::request::Collection;
use crate::run_dir::{self, Task};
use store::artifacts::Artifacts;
use store::{Location, Store, StoreError};

/// The database and the artifact store that an attempt is recorded in. Each is opened when it is needed: a connection
/// is not held while a program runs for hours.
pub struct Ledger {
    pub location: Location,
    pub artifacts_at: PathBuf,
    pub post_process: Option<PostProcess>,
    /// How long a statement waits for somebody else's lock; `None`: as long as the store sees fit.
    pub lock_wait_ms: Option<u64>,
    store: Option<Store>,
    /// Where one is being opened meanwhile.
    ahead: Option<JoinHandle<Result<Store, StoreError>>>,
    /// The process has little left to do when it drops this.
    ends_soon: bool,
    /// The connection rested while a program ran.
    was_lent: bool,
    /// Files of the database were moved or removed while this process used it.
    put_away: bool,
}

fn open(location: &Location, lock_wait_ms: Option<u64>) -> Result<Store, StoreError> {
    match lock_wait_ms {
        Some(ms) => Store::open_with_lock_wait(location, ms),
        None => Store::open(location),
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        if let Some(store) = self.store.take().filter(|_| self.ends_soon) {
            store.leak_until_exit();
        }
    }
}

impl Ledger {
    pub fn new(
        location: Location,
        artifacts_at: PathBuf,
        post_process: Option<PostProcess>,
    ) -> Ledger {
        Ledger {
            location,
            artifacts_at,
            post_process,
            lock_wait_ms: None,
            store: None,
            ahead: None,
            ends_soon: false,
            was_lent: false,
            put_away: false,
        }
    }

    /// The same record, on a connection of its own: for another thread.
    pub fn another(&self) -> Ledger {
        let (location, artifacts_at) = (self.location.clone(), self.artifacts_at.clone());
        let mut another = Ledger::new(location, artifacts_at, self.post_process.clone());
        another.lock_wait_ms = self.lock_wait_ms;
        another
    }

    /// For who has time, and would lose more by giving up: SQLite has one writer at a time, lets many wait in no order,
    /// and each may take as long as a disk that is full of work.
    pub fn be_patient(&mut self) {
        const PATIENT_MS: u64 = 10 * 60 * 1000;
        if let Location::Sqlite(_) = self.location {
            self.lock_wait_ms = Some(PATIENT_MS);
            self.rest();
        }
    }

    pub fn store(&mut self) -> Result<&mut Store, SettleError> {
        if !self.is_in_place()
            && let Some(store) = self.store.take()
        {
            // Nothing is written to a file that somebody put away, nor removed of the one in its place. Where only its log or
            // locks are gone, another connection of this process does not help: SQLite would go on with what it has.
            store.leak_until_exit();
            self.put_away = self.was_lent;
        }
        if self.put_away {
            let database = self.location.to_string();
            return Err(SettleError::PutAway { database });
        }
        let store = match self.store.take() {
            Some(store) => store,
            None => match self.ahead.take().map(JoinHandle::join) {
                Some(Ok(opened)) => opened,
                _ => open(&self.location, self.lock_wait_ms),
            }
            .map_err(|e| self.trouble(e))?,
        };
        Ok(self.store.insert(store))
    }

    /// It will be needed soon. A server has to make a process for whoever connects, and meanwhile there is something else
    /// to be done; a file is opened before a thread would be there.
    pub(crate) fn open_ahead(&mut self) {
        if let (Location::Postgres(_), None, None) = (&self.location, &self.store, &self.ahead) {
            let (location, lock_wait_ms) = (self.location.clone(), self.lock_wait_ms);
            let thread = std::thread::Builder::new();
            // Without a thread it is opened when it is needed.
            self.ahead = thread.spawn(move || open(&location, lock_wait_ms)).ok();
        }
    }

    /// What an attempt that is to be recorded here needs to be finished. Whose database is known is not opened for it.
    pub(crate) fn task(
        &mut self,
        collection: &Collection,
        artifacts: &Artifacts,
        database_id: Option<&str>,
    ) -> Result<Task, SettleError> {
        Ok(Task {
            key: run_dir::fresh_key(),
            database_id: match database_id {
                Some(id) => id.to_owned(),
                None => self.store()?.id().to_owned(),
            },
            database: self.location.to_string(),
            collection: collection.clone(),
            artifacts: artifacts.path().to_path_buf(),
            artifacts_id: artifacts.id().to_owned(),
            begun: false,
            memory: false,
            taken_over: false,
        })
    }

    /// Does something with the artifact store that an attempt was begun with, which need not be ours.
    pub(crate) fn with_artifacts_of<T>(
        &mut self,
        task: &Task,
        act: impl FnOnce(&mut Ledger) -> T,
    ) -> T {
        let ours = std::mem::replace(&mut self.artifacts_at, task.artifacts.clone());
        let done = act(self);
        self.artifacts_at = ours;
        done
    }

    /// One question or order to the database.
    pub fn with<T>(
        &mut self,
        ask: impl FnOnce(&mut Store) -> Result<T, StoreError>,
    ) -> Result<T, SettleError> {
        let answer = ask(self.store()?);
        answer.map_err(|e| self.trouble(e))
    }

    pub fn artifacts(&self) -> Result<Artifacts, SettleError> {
        Ok(Artifacts::open(&self.artifacts_at)?)
    }

    /// What no view may show.
    pub fn kept_at(&self) -> Vec<PathBuf> {
        let mut kept = vec![self.artifacts_at.clone()];
        if let Location::Sqlite(file) = &self.location {
            kept.push(file.clone());
        }
        kept
    }

    /// Lets the connection go until it is needed again.
    pub fn rest(&mut self) {
        self.store = None;
    }

    /// This process makes one attempt and ends: nobody need wait for the database to be put in order.
    pub(crate) fn ends_soon(&mut self) {
        self.ends_soon = true;
    }

    /// The connection, for as long as a program runs.
    pub(crate) fn lend(&mut self) -> Option<Store> {
        let mut store = self.store.take();
        store.iter_mut().for_each(Store::note_files);
        store
    }

    /// Whether the connection, if there is one, is to the database that has the name.
    pub(crate) fn is_in_place(&self) -> bool {
        self.store.as_ref().is_none_or(Store::files_in_place)
    }

    pub(crate) fn was_lent(&self) -> bool {
        self.was_lent
    }

    /// The connection that was lent, if it was not let go meanwhile.
    pub(crate) fn take_back(&mut self, lent: Option<Store>) {
        if lent.is_some() {
            (self.store, self.was_lent) = (lent, true);
        }
    }

    pub fn trouble(&self, source: StoreError) -> SettleError {
        SettleError::Database {
            database: self.location.to_string(),
            source,
        }
    }
}
