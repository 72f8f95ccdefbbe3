//! Claims analyses from the queue and starts a runner process for each.
//!
//! The worker itself runs no program. Each attempt has its own process, the runner, which renews its lease and commits
//! its result. So the worker may be killed, upgraded or restarted at any time, and finds its runners where they were.
//! The worker decides what to claim, and never claims more than it was given: a number of slots, and a sum of memory
//! and of CPUs. Work that may take long happens in threads, so that a cancellation never waits for it.
//!
//! The caller runs the loop: it calls [`Worker::run_once`], then waits for [`Worker::wake_fds`], a signal or the
//! returned time.
//!
//! In reading order: `options`, `event` and `error` (the interface), `slot` (a slot on disk, and the order for its
//! runner), `slot_table` (the slots of a worker), this file (one round of the loop), `claiming` (claims work and starts
//! runners), `maintenance` (the threads), `runner` and `lease_renewal` (the runner's side), `name` (the lock on a worker's
//! name).

mod claiming;
mod error;
mod event;
pub(crate) mod lease_renewal;
mod maintenance;
mod name;
mod options;
pub mod runner;
pub mod slot;
mod slot_table;

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::attempt::error::CommitError;
use crate::attempt::recorder::Recorder;
use crate::home::{self, Home, create_private_dir};
use crate::plan::limits::error_chain;
pub use error::WorkerError;
use error::slot_error;
pub use event::WorkerEvent;
use maintenance::{Maintenance, MaintenanceJob, MaintenanceReport, SweepRequest, SweepResult};
pub use name::lock_holder;
pub use options::WorkerOptions;
use slot::Slot;
use slot_table::{SlotEntry, SlotState};
use store::ChangeListener;
use store::types::analysis_id::AnalysisId;

/// How often the worker looks for changes that nothing announces.
const CANCEL_CHECK_EVERY: Duration = Duration::from_secs(1);
const SWEEP_EVERY: Duration = Duration::from_secs(5);
const HEARTBEAT_EVERY: Duration = Duration::from_secs(15);
const IDLE_WAIT: Duration = Duration::from_secs(5);
const LOCK_WAIT_MS: u64 = 1000;
/// How long to wait after a failure of the database.
const DATABASE_RETRY_WAIT: Duration = Duration::from_secs(2);
const BUSY_WAIT: Duration = Duration::from_millis(50);
/// The exit code of a runner that could not start its analysis.
const COULD_NOT_RUN: i32 = 125;

/// Claims queued analyses and starts a runner process for each. It does nothing by itself: the caller repeats
/// [`Worker::run_once`].
pub struct Worker {
    options: WorkerOptions,
    recorder: Recorder,
    host: String,
    boot_id: String,
    account: String,
    started_ms: i64,
    /// Locked while the worker lives. Runners check that.
    lock: PathBuf,
    _lock_file: OwnedFd,
    slots: Vec<SlotEntry>,
    change_listener: Option<ChangeListener>,
    maintenance: Maintenance,
    draining: bool,
    retry_database_at: Option<Instant>,
    database_unavailable: bool,
    sweep_running: bool,
    next_cancel_check: Instant,
    next_sweep: Instant,
    next_heartbeat: Instant,
    /// At the last claim nothing was left to claim, and no change was announced since.
    queue_seen_empty: bool,
    nothing_queued: bool,
    /// How many times an attempt began or ended here.
    change_count: u64,
    /// The change count at the start of the last sweep that left nothing unfinished.
    swept_at_change: Option<u64>,
    /// The keys of a claim whose answer did not arrive. A claim with the same keys returns the same attempts again.
    claim_keys: Vec<String>,
    /// How many runners in a row could not start their analysis.
    failed_starts: u32,
    /// Nothing is claimed before this time.
    paused_until: Option<Instant>,
    /// The lack of space was reported already.
    no_space_reported: bool,
}

impl Worker {
    /// Locks the worker's name, and takes over the runners in its slots.
    pub fn open(
        home: Home,
        mut recorder: Recorder,
        options: WorkerOptions,
    ) -> Result<Worker, WorkerError> {
        // The name becomes the name of a directory, so it follows the rules for ids.
        let name = AnalysisId::new(&options.name);
        let name = name.map_err(|_| WorkerError::Name(options.name.clone()))?;
        let base = home.workers().join(name.as_str());
        let slots_at = base.join("slots");
        for dir in [&home.workers(), &base, &slots_at] {
            create_private_dir(dir)?;
        }
        let lock = base.join("lock");
        let locked = name::lock_name(&lock)?.ok_or_else(|| WorkerError::Running {
            name: options.name.clone(),
            home: home.path().to_path_buf(),
        })?;
        let mut patient = recorder.new_connection();
        patient.wait_long_for_locks();
        let maintenance = Maintenance::start(home.clone(), patient)?;
        // On this connection a cancellation must not wait long for another process's write.
        recorder.lock_wait_ms = Some(LOCK_WAIT_MS);
        recorder.disconnect();
        let now = Instant::now();
        let mut worker = Worker {
            slots: slot_table::open_slots(&slots_at, options.slots)?,
            options,
            host: home::machine_id(),
            boot_id: home::boot_id(),
            account: name::account(&home),
            started_ms: i64::try_from(home::unix_seconds() * 1000).unwrap_or(i64::MAX),
            recorder,
            lock,
            _lock_file: locked,
            change_listener: None,
            maintenance,
            draining: false,
            retry_database_at: None,
            database_unavailable: false,
            sweep_running: false,
            next_cancel_check: now,
            next_sweep: now,
            next_heartbeat: now,
            queue_seen_empty: false,
            nothing_queued: false,
            change_count: 0,
            swept_at_change: None,
            claim_keys: Vec::new(),
            failed_starts: 0,
            paused_until: None,
            no_space_reported: false,
        };
        worker.close_free_slots()?;
        Ok(worker)
    }

    /// Stops claiming work.
    pub fn drain(&mut self) {
        self.draining = true;
        self.next_heartbeat = Instant::now();
    }

    /// How many slots are not free.
    pub fn busy_slots(&self) -> usize {
        let busy = |entry: &&SlotEntry| !matches!(entry.state, SlotState::Free(_));
        self.slots.iter().filter(busy).count()
    }

    /// How many runners are alive in its slots.
    pub fn live_runners(&self) -> usize {
        let busy = |entry: &&SlotEntry| matches!(entry.state, SlotState::Busy(_));
        self.slots.iter().filter(busy).count()
    }

    /// Whether every slot is free, the database is available, and the last sweep after the last change left nothing
    /// unfinished.
    pub fn has_no_work_left(&self) -> bool {
        self.busy_slots() == 0
            && !self.database_unavailable
            && self.swept_at_change == Some(self.change_count)
    }

    /// Like [`Worker::has_no_work_left`], and the queue was empty when last seen, delayed retries included.
    pub fn is_idle(&self) -> bool {
        self.has_no_work_left() && self.nothing_queued
    }

    /// Returns how many analyses can run at the same time.
    pub fn slots(&self) -> u32 {
        self.options.slots
    }

    /// The descriptors to wait for between two rounds, besides time and signals.
    pub fn wake_fds(&self) -> Vec<BorrowedFd<'_>> {
        let mut wake_fds = vec![self.maintenance.as_fd()];
        wake_fds.extend(self.change_listener.as_ref().map(AsFd::as_fd));
        wake_fds
    }

    /// Does everything that is due now. Returns how long to wait until the next round if nothing else happens.
    pub fn run_once(
        &mut self,
        on_event: &mut dyn FnMut(WorkerEvent),
    ) -> Result<Duration, WorkerError> {
        self.handle_reports(on_event)?;
        self.check_runners(on_event)?;
        if self
            .retry_database_at
            .is_none_or(|until| until <= Instant::now())
        {
            self.retry_database_at = None;
            if let Err(e) = self.use_database(on_event) {
                self.database_failed(&e, on_event);
            } else if self.database_unavailable {
                self.database_unavailable = false;
                on_event(WorkerEvent::DatabaseAvailable);
            }
        }
        self.sweep()?;
        Ok(self.next_wait())
    }

    fn database_failed(&mut self, error: &CommitError, on_event: &mut dyn FnMut(WorkerEvent)) {
        if error.is_busy() {
            // Other processes are writing. Try again in a moment.
            self.retry_database_at = Some(Instant::now() + BUSY_WAIT);
            return;
        }
        self.recorder.disconnect();
        self.change_listener = None;
        self.queue_seen_empty = false;
        self.retry_database_at = Some(Instant::now() + DATABASE_RETRY_WAIT);
        if !std::mem::replace(&mut self.database_unavailable, true) {
            on_event(WorkerEvent::DatabaseUnavailable(error_chain(error)));
        }
    }

    fn next_wait(&self) -> Duration {
        let now = Instant::now();
        let mut at = vec![now + IDLE_WAIT, self.next_sweep, self.next_heartbeat];
        if self.live_runners() > 0 {
            at.push(self.next_cancel_check);
        }
        if let Some(until) = self.retry_database_at {
            // Until then the database cannot be used, so only runners are checked.
            at = vec![until, now + CANCEL_CHECK_EVERY];
        }
        let next = at.into_iter().min().unwrap_or(now);
        // Wait a moment at least, even if something is overdue.
        next.saturating_duration_since(now)
            .max(Duration::from_millis(5))
    }

    /// Handles the reports of the maintenance threads, and announced changes.
    fn handle_reports(&mut self, on_event: &mut dyn FnMut(WorkerEvent)) -> Result<(), WorkerError> {
        for report in self.maintenance.take_reports()? {
            match report {
                MaintenanceReport::Closed(at, Ok(slot)) => {
                    self.slots[at].state = SlotState::Free(slot);
                    self.note_change();
                }
                MaintenanceReport::Closed(at, Err((slot, why))) => {
                    on_event(WorkerEvent::Problem(why));
                    let until = Instant::now() + DATABASE_RETRY_WAIT;
                    self.slots[at].state = SlotState::Stuck { slot, until };
                }
                MaintenanceReport::Swept { at, result } => {
                    self.swept_at_change = (result == SweepResult::Clean).then_some(at);
                    self.nothing_queued = false;
                    self.sweep_running = false;
                    self.next_sweep = Instant::now() + SWEEP_EVERY;
                    // Attempts that the sweep finished may be queued again.
                    self.queue_seen_empty = false;
                }
                MaintenanceReport::Event(WorkerEvent::DatabaseUnavailable(_))
                    if self.database_unavailable => {}
                MaintenanceReport::Event(event) => on_event(event),
            }
        }
        // After a restart with fewer slots, remove each slot beyond that number when it is free.
        let slots = self.options.slots as usize;
        while self.slots.len() > slots
            && matches!(
                self.slots.last().map(|entry| &entry.state),
                Some(SlotState::Free(_))
            )
        {
            if let Some(entry) = self.slots.pop() {
                drop(entry.state);
                // A directory that stays is empty, and does no harm.
                let _ = std::fs::remove_dir_all(&entry.path);
            }
        }
        if let Some(change_listener) = &mut self.change_listener
            && sandbox::events::is_readable(&*change_listener)
        {
            change_listener.consume();
            self.queue_seen_empty = false;
            self.next_cancel_check = Instant::now();
        }
        Ok(())
    }

    /// Notes that an attempt began or ended: what was seen of the queue before may be outdated.
    fn note_change(&mut self) {
        self.change_count += 1;
        self.queue_seen_empty = false;
        self.nothing_queued = false;
        if self.busy_slots() == 0 {
            self.next_sweep = Instant::now();
        }
    }

    /// Finds runners that have ended, and closes their slots.
    fn check_runners(&mut self, on_event: &mut dyn FnMut(WorkerEvent)) -> Result<(), WorkerError> {
        for at in 0..self.slots.len() {
            let entry = &mut self.slots[at];
            let slot = match &mut entry.state {
                SlotState::Busy(busy) => {
                    if let Some(child) = &mut busy.child {
                        let code = match child.try_wait() {
                            Ok(None) => continue,
                            Ok(Some(status)) => status.code(),
                            // Something else in this process waited for the child; the lock on the slot shows whether it has ended.
                            Err(_) => None,
                        };
                        self.failed_starts = match code {
                            Some(COULD_NOT_RUN) => self.failed_starts + 1,
                            _ => 0,
                        };
                        busy.child = None;
                    }
                    let locked = Slot::lock(&entry.path);
                    let Some(slot) = locked.map_err(|e| slot_error(&entry.path, e))? else {
                        continue;
                    };
                    if let Some(claim) = &busy.claim {
                        on_event(WorkerEvent::RunnerEnded {
                            id: claim.id.to_string(),
                            attempt: claim.attempt,
                        });
                    }
                    slot
                }
                SlotState::Stuck { until, .. } if *until <= Instant::now() => {
                    let stuck =
                        std::mem::replace(&mut entry.state, SlotState::Closing { key: None });
                    match stuck {
                        SlotState::Stuck { slot, .. } => slot,
                        _ => continue,
                    }
                }
                _ => continue,
            };
            self.close_slot(at, slot)?;
        }
        Ok(())
    }

    fn close_slot(&mut self, at: usize, mut slot: Slot) -> Result<(), WorkerError> {
        let order = slot.order().map_err(|e| slot_error(slot.path(), e))?;
        if order.is_none() && !slot.inputs_dir().exists() {
            // The runner left nothing to finish.
            slot.clear().map_err(|e| slot_error(slot.path(), e))?;
            self.slots[at].state = SlotState::Free(slot);
            self.note_change();
            return Ok(());
        }
        self.slots[at].state = SlotState::Closing {
            key: order.map(|order| order.claim.key),
        };
        self.maintenance.submit(MaintenanceJob::Close(at, slot))
    }

    /// Closes the slots that are free at the start: their last runner may have left something to finish.
    fn close_free_slots(&mut self) -> Result<(), WorkerError> {
        for at in 0..self.slots.len() {
            let closing = SlotState::Closing { key: None };
            match std::mem::replace(&mut self.slots[at].state, closing) {
                SlotState::Free(slot) => self.close_slot(at, slot)?,
                other => self.slots[at].state = other,
            }
        }
        Ok(())
    }

    fn use_database(&mut self, on_event: &mut dyn FnMut(WorkerEvent)) -> Result<(), CommitError> {
        if self.change_listener.is_none() {
            let change_listener = ChangeListener::subscribe(&self.recorder.location);
            self.change_listener =
                Some(change_listener.map_err(|e| self.recorder.database_error(e))?);
        }
        if self.next_heartbeat <= Instant::now() {
            let row = self.worker_row();
            self.recorder.with(|store| store.record_worker(&row))?;
            self.next_heartbeat = Instant::now() + HEARTBEAT_EVERY;
        }
        if self.live_runners() > 0 && self.next_cancel_check <= Instant::now() {
            self.forward_cancels()?;
            self.next_cancel_check = Instant::now() + CANCEL_CHECK_EVERY;
        }
        if !self.draining && self.can_claim(on_event) {
            self.claim(on_event)?;
        }
        Ok(())
    }

    fn forward_cancels(&mut self) -> Result<(), CommitError> {
        let host = self.host.clone();
        let cancels = self.recorder.with(|store| store.requested_cancels(&host))?;
        for (_, _, key) in cancels {
            let of_it = |entry: &&mut SlotEntry| matches!(&entry.state, SlotState::Busy(b) if b.has_key(&key) && !b.cancel_sent);
            if let Some(entry) = self.slots.iter_mut().find(of_it)
                && let SlotState::Busy(busy) = &mut entry.state
            {
                busy.cancel_sent = slot::signal_runner(&entry.path);
            }
        }
        Ok(())
    }

    fn sweep(&mut self) -> Result<(), WorkerError> {
        if self.sweep_running || self.next_sweep > Instant::now() {
            return Ok(());
        }
        let keys = self.slots.iter().filter_map(|entry| match &entry.state {
            SlotState::Busy(busy) => busy.claim.as_ref().map(|claim| claim.key.clone()),
            SlotState::Closing { key } => key.clone(),
            SlotState::Free(_) | SlotState::Stuck { .. } => None,
        });
        let sweep = SweepRequest {
            busy_keys: keys.collect::<HashSet<String>>(),
            at: self.change_count,
            row: self.worker_row(),
            memory_default_bytes: self.options.memory_default_bytes,
            park_after_ms: self.options.park_after_ms,
        };
        self.sweep_running = true;
        self.maintenance.submit(MaintenanceJob::Sweep(sweep))
    }

    fn worker_row(&self) -> store::WorkerRow {
        store::WorkerRow {
            host: self.host.clone(),
            account: self.account.clone(),
            name: self.options.name.clone(),
            host_name: name::host_name(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            slots: self.options.slots,
            total: self.options.total,
            running: u32::try_from(self.busy_slots()).unwrap_or(u32::MAX),
            draining: self.draining,
            started_ms: self.started_ms,
            seen_ms: 0,
        }
    }

    /// Removes the worker from the database. Live runners go on without it.
    pub fn deregister(mut self) {
        let row = self.worker_row();
        // If this fails, the missing heartbeat shows that the worker is gone.
        let _ = self.recorder.with(|store| store.remove_worker(&row));
    }
}
