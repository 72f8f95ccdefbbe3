//! Where attempts are recorded: a database, and the artifact store that goes with it.

use std::path::PathBuf;
use std::thread::JoinHandle;

use crate::attempt::error::CommitError;
use crate::home::Home;
use crate::request::CollectionSettings;
use crate::run_dir::{self, CommitPlan};
use crate::settings::{PostProcessSettings, RecordLocationError, RecordSettings};
use store::artifacts::Artifacts;
use store::types::analysis_id::AnalysisId;
use store::{Location, Store, StoreError};

/// The database and the artifact store of an attempt. Each is opened when it is needed. The connection is not kept
/// while a program runs for hours.
pub struct Recorder {
    /// Where the database is.
    pub location: Location,
    /// The directory of the artifact store.
    pub artifacts_at: PathBuf,
    /// The command to run after each commit. `None`: no command is configured.
    pub post_process: Option<PostProcessSettings>,
    /// How long a statement waits for another process's lock. `None`: the store's default.
    pub lock_wait_ms: Option<u64>,
    store: Option<Store>,
    /// A thread that opens the connection in the background.
    opening: Option<JoinHandle<Result<Store, StoreError>>>,
    /// The process ends soon after it drops this.
    process_ends_soon: bool,
    /// The connection is kept for a program that may end at any moment.
    is_idle: bool,
    /// The connection was kept while a program ran.
    was_idle: bool,
    /// Files of the database were moved or removed while this process used it.
    file_replaced: bool,
}

fn open_store(location: &Location, lock_wait_ms: Option<u64>) -> Result<Store, StoreError> {
    match lock_wait_ms {
        Some(ms) => Store::open_with_lock_wait(location, ms),
        None => Store::open(location),
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(store) = self.store.take().filter(|_| self.process_ends_soon) {
            store.leak_until_exit();
        }
    }
}

impl Recorder {
    /// The recorder that the settings ask for, with the variables of this process for the database. Nothing is opened
    /// yet. Returns `None` if nothing is to be recorded.
    pub fn from_settings(
        settings: &RecordSettings,
        home: &Home,
    ) -> Result<Option<Recorder>, RecordLocationError> {
        let location = settings.location(home, &|name| std::env::var_os(name))?;
        let artifacts_at = settings.artifacts.clone();
        let artifacts_at = artifacts_at.unwrap_or_else(|| home.artifacts());
        Ok(match location {
            Location::None => None,
            location => Some(Recorder::new(
                location,
                artifacts_at,
                settings.post_process.clone(),
            )),
        })
    }

    /// A recorder for this database and artifact store. Nothing is opened yet.
    pub fn new(
        location: Location,
        artifacts_at: PathBuf,
        post_process: Option<PostProcessSettings>,
    ) -> Recorder {
        Recorder {
            location,
            artifacts_at,
            post_process,
            lock_wait_ms: None,
            store: None,
            opening: None,
            process_ends_soon: false,
            is_idle: false,
            was_idle: false,
            file_replaced: false,
        }
    }

    /// A recorder for the same database with a connection of its own, for another thread.
    pub(crate) fn new_connection(&self) -> Recorder {
        let (location, artifacts_at) = (self.location.clone(), self.artifacts_at.clone());
        let mut new_connection = Recorder::new(location, artifacts_at, self.post_process.clone());
        new_connection.lock_wait_ms = self.lock_wait_ms;
        new_connection
    }

    /// Lets statements wait ten minutes for a lock, for callers that lose more by giving up. SQLite has one writer at a
    /// time and lets the others wait in no order, and each write may be slow on a busy disk.
    pub(crate) fn wait_long_for_locks(&mut self) {
        const PATIENT_MS: u64 = 10 * 60 * 1000;
        if let Location::Sqlite(_) = self.location {
            self.lock_wait_ms = Some(PATIENT_MS);
            self.disconnect();
        }
    }

    /// Returns the connection to the database, and opens it first if there is none. Fails for good if files of the
    /// database were moved or removed while a program ran.
    pub fn store(&mut self) -> Result<&mut Store, CommitError> {
        if !self.is_in_place()
            && let Some(store) = self.store.take()
        {
            // Leave the old file and the file that took its name as they are. If only the log or the locks are gone, a
            // second connection in this process does not help: SQLite would keep using the old ones.
            store.leak_until_exit();
            self.file_replaced = self.was_idle;
        }
        if self.file_replaced {
            let database = self.location.to_string();
            return Err(CommitError::DatabaseReplaced { database });
        }
        let store = match self.store.take() {
            Some(store) => store,
            None => match self.opening.take().map(JoinHandle::join) {
                Some(Ok(opened)) => opened,
                _ => open_store(&self.location, self.lock_wait_ms),
            }
            .map_err(|e| self.database_error(e))?,
        };
        Ok(self.store.insert(store))
    }

    /// Starts to open the connection in a thread, because it is needed soon. A PostgreSQL server takes a while to start
    /// a process for a client. A SQLite file is open sooner than a thread starts.
    pub(crate) fn open_in_background(&mut self) {
        if let (Location::Postgres(_), None, None) = (&self.location, &self.store, &self.opening) {
            let (location, lock_wait_ms) = (self.location.clone(), self.lock_wait_ms);
            let thread = std::thread::Builder::new();
            // If no thread can be started, `store` opens the connection when it is needed.
            self.opening = thread
                .spawn(move || open_store(&location, lock_wait_ms))
                .ok();
        }
    }

    /// What finishing an attempt needs, for an attempt that is recorded here. If the caller knows the database's id,
    /// the database is not opened.
    pub(crate) fn new_commit_plan(
        &mut self,
        collection: &CollectionSettings,
        artifacts: &Artifacts,
        database_id: Option<&str>,
    ) -> Result<CommitPlan, CommitError> {
        Ok(CommitPlan {
            key: run_dir::new_attempt_key(),
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
            workspace_reowned: false,
        })
    }

    /// Runs `action` with the artifact store that the attempt was begun with, which may differ from this recorder's.
    pub(crate) fn with_artifact_store_of<T>(
        &mut self,
        commit_plan: &CommitPlan,
        action: impl FnOnce(&mut Recorder) -> T,
    ) -> T {
        let own_path = std::mem::replace(&mut self.artifacts_at, commit_plan.artifacts.clone());
        let result = action(self);
        self.artifacts_at = own_path;
        result
    }

    /// Runs one query or command on the database.
    pub fn with<T>(
        &mut self,
        query: impl FnOnce(&mut Store) -> Result<T, StoreError>,
    ) -> Result<T, CommitError> {
        let answer = query(self.store()?);
        answer.map_err(|e| self.database_error(e))
    }

    /// Opens the artifact store.
    pub fn artifacts(&self) -> Result<Artifacts, CommitError> {
        Ok(Artifacts::open(&self.artifacts_at)?)
    }

    /// The paths that no view may show to a program.
    pub fn private_paths(&self) -> Vec<PathBuf> {
        let mut kept = vec![self.artifacts_at.clone()];
        if let Location::Sqlite(file) = &self.location {
            kept.push(file.clone());
        }
        kept
    }

    /// Closes the connection. The next call of [`store`](Self::store) opens a new one.
    pub fn disconnect(&mut self) {
        self.store = None;
    }

    /// Puts the connection aside while a program runs. Most programs end soon, and opening a connection costs more than
    /// all statements of an attempt, so it stays open until [`close_idle`](Self::close_idle). This process makes one
    /// attempt and ends, so it need not wait for the database to be checkpointed at its end.
    pub(crate) fn put_aside(&mut self) {
        self.process_ends_soon = true;
        self.is_idle = true;
        self.store.iter_mut().for_each(Store::note_files);
    }

    /// Closes the connection that was put aside: a program may run for hours, a server has a bounded number of
    /// connections, nobody can move or repair a database file that is held open, and a runner that only waits should
    /// use little memory.
    pub(crate) fn close_idle(&mut self) {
        // Closing checkpoints the write-ahead log by its file name. Skip that if another database has the name by now.
        drop(self.store.take_if(|store| store.files_in_place()));
    }

    /// The program has ended, and the connection is in use again, unless it was closed meanwhile.
    pub(crate) fn resume(&mut self) {
        self.was_idle |= std::mem::take(&mut self.is_idle) && self.store.is_some();
    }

    /// Whether the connection, if there is one, still belongs to the file at the location.
    pub(crate) fn is_in_place(&self) -> bool {
        self.store.as_ref().is_none_or(Store::files_in_place)
    }

    /// Whether the connection was kept while a program ran, so that the server may have closed it.
    pub(crate) fn was_idle(&self) -> bool {
        self.was_idle
    }

    /// The number that the next attempt of this id gets, unless another process begins one first.
    pub(crate) fn next_attempt_number(&mut self, id: &AnalysisId) -> Result<u32, CommitError> {
        self.with(|store| store.next_attempt_number(id.as_str()))
    }

    /// Adds to an error of the database which database it is.
    pub fn database_error(&self, source: StoreError) -> CommitError {
        CommitError::Database {
            database: self.location.to_string(),
            source,
        }
    }
}
