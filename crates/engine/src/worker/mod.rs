//! Takes analyses from the queue and starts a runner for each.
//!
//! The worker itself runs nothing. Each attempt has a process of its own, the runner, that holds its lease and commits its
//! result; the worker may be killed, upgraded or started anew at any time, and finds its runners as they are (`slot.rs`).
//! What it decides is what is taken, and never more at once than it was given: slots, and the sums of memory and CPUs.
//! What may take long is done in a thread beside it (`keeper.rs`), so that a wish to cancel never waits for that.

mod claiming;
pub mod lease_renewal;
mod maintenance;
mod name;
pub mod slot;
mod slot_table;

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::attempt::finalize::SettleError;
use crate::attempt::record::Status;
use crate::attempt::recorder::Ledger;
use crate::home::{self, Home, HomeError, make_private};
use crate::plan::limits::error_chain;
use crate::request::AnalysisId;
use maintenance::{Chore, Done, Keeper, Left, Sweep};
pub use name::holder;
use slot::Slot;
use slot_table::{Place, State};
use store::{Capacity, ChangeListener};

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error("{0:?} is no name for a worker: [A-Za-z0-9][A-Za-z0-9._-]{{0,63}}")]
    Name(String),
    #[error(
        "a worker named {name} is running already in {home:?}; stop it, or give this one another --name"
    )]
    Running { name: String, home: PathBuf },
    #[error("lock {path:?}")]
    Lock { path: PathBuf, source: io::Error },
    #[error("use the slot {path:?}")]
    Slot { path: PathBuf, source: io::Error },
    #[error("start the worker's threads")]
    Start(#[source] io::Error),
    #[error("a thread of the worker's has ended; this is a bug in Fumehood")]
    KeeperGone,
}

pub struct Options {
    pub name: String,
    pub slots: u32,
    pub total: Capacity,
    /// What a request counts for, and gets, that asks for no memory.
    pub memory_default_bytes: u64,
    pub lease_ms: u64,
    /// How long something waits for a worker that is large enough, while others are there.
    pub park_after_ms: u64,
    /// Nothing is taken that could not be kept.
    pub free_reserve_bytes: u64,
    pub store_quota_bytes: Option<u64>,
    /// Our own binary and its arguments, to be started as a runner.
    pub program: PathBuf,
    pub args: Vec<OsString>,
}

/// What the worker has to tell whoever watches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    Took {
        id: String,
        attempt: u32,
    },
    /// A runner of this worker has ended, whatever came of its attempt.
    Ended {
        id: String,
        attempt: u32,
    },
    /// Something that a dead runner had left is committed.
    Finished {
        id: String,
        attempt: u32,
        status: Status,
    },
    GaveUp {
        id: String,
        attempt: u32,
    },
    Parked {
        id: String,
    },
    /// The database cannot be used for now. What runs goes on.
    Away(String),
    Back,
    Trouble(String),
}

/// When things are looked at that nothing tells us of.
const CANCELS_EVERY: Duration = Duration::from_secs(1);
const SWEEP_EVERY: Duration = Duration::from_secs(5);
const SEEN_EVERY: Duration = Duration::from_secs(15);
const IDLE_WAIT: Duration = Duration::from_secs(5);
const LOCK_WAIT_MS: u64 = 1000;
/// After a failure of the database.
const AWAY_WAIT: Duration = Duration::from_secs(2);
const BUSY_WAIT: Duration = Duration::from_millis(50);
/// What a runner exits with that could not start its analysis.
const COULD_NOT_RUN: i32 = 125;

pub struct Worker {
    options: Options,
    ledger: Ledger,
    host: String,
    boot_id: String,
    account: String,
    started_ms: i64,
    /// Locked while we live; runners look at it.
    lock: PathBuf,
    _locked: OwnedFd,
    slots: Vec<Place>,
    bell: Option<ChangeListener>,
    keeper: Keeper,
    draining: bool,
    away_until: Option<Instant>,
    is_away: bool,
    sweeping: bool,
    cancels_at: Instant,
    sweep_at: Instant,
    seen_at: Instant,
    /// Nothing was there to be taken when we last looked, and nothing has rung since.
    sated: bool,
    nothing_queued: bool,
    /// Counts what was begun and ended here; as it was when a sweep began that left nothing unfinished.
    changes: u64,
    swept_at: Option<u64>,
    /// Of a claim whose answer did not arrive: with the same keys it is told again what it took.
    keys: Vec<String>,
    /// Runners in a row that could not start their analysis.
    unstarted: u32,
    /// Nothing is taken before.
    pause_until: Option<Instant>,
    /// Told that there is no room.
    no_room: bool,
}

impl Worker {
    /// Locks the worker's name and takes up what runs in its slots.
    pub fn open(home: Home, mut ledger: Ledger, options: Options) -> Result<Worker, WorkerError> {
        // The name becomes a directory's.
        let name = AnalysisId::new(&options.name);
        let name = name.map_err(|_| WorkerError::Name(options.name.clone()))?;
        let base = home.workers().join(name.as_str());
        let slots_at = base.join("slots");
        for dir in [&home.workers(), &base, &slots_at] {
            make_private(dir)?;
        }
        let lock = base.join("lock");
        let locked = name::hold(&lock)?.ok_or_else(|| WorkerError::Running {
            name: options.name.clone(),
            home: home.path().to_path_buf(),
        })?;
        let mut patient = ledger.another();
        patient.be_patient();
        let keeper = Keeper::start(home.clone(), patient)?;
        // Here a wish to cancel must not wait for somebody else's writing.
        ledger.lock_wait_ms = Some(LOCK_WAIT_MS);
        ledger.rest();
        let now = Instant::now();
        let mut worker = Worker {
            slots: slot_table::take_up(&slots_at, options.slots)?,
            options,
            host: home::machine(),
            boot_id: home::boot_id(),
            account: name::account(&home),
            started_ms: i64::try_from(home::unix_seconds() * 1000).unwrap_or(i64::MAX),
            ledger,
            lock,
            _locked: locked,
            bell: None,
            keeper,
            draining: false,
            away_until: None,
            is_away: false,
            sweeping: false,
            cancels_at: now,
            sweep_at: now,
            seen_at: now,
            sated: false,
            nothing_queued: false,
            changes: 0,
            swept_at: None,
            keys: Vec::new(),
            unstarted: 0,
            pause_until: None,
            no_room: false,
        };
        worker.close_free()?;
        Ok(worker)
    }

    /// Takes no more work.
    pub fn drain(&mut self) {
        self.draining = true;
        self.seen_at = Instant::now();
    }

    /// How many attempts it has in hand.
    pub fn running(&self) -> usize {
        let busy = |place: &&Place| !matches!(place.state, State::Free(_));
        self.slots.iter().filter(busy).count()
    }

    /// How many runners it looks after that live.
    pub fn living(&self) -> usize {
        let busy = |place: &&Place| matches!(place.state, State::Busy(_));
        self.slots.iter().filter(busy).count()
    }

    /// Nothing runs, and everything that ran here is finished.
    pub fn is_drained(&self) -> bool {
        self.running() == 0 && !self.is_away && self.swept_at == Some(self.changes)
    }

    /// That, and since then nothing was queued, not even for later.
    pub fn is_idle(&self) -> bool {
        self.is_drained() && self.nothing_queued
    }

    pub fn slots(&self) -> u32 {
        self.options.slots
    }

    /// What to wait for between two turns, besides time and signals.
    pub fn wakers(&self) -> Vec<BorrowedFd<'_>> {
        let mut wakers = vec![self.keeper.as_fd()];
        wakers.extend(self.bell.as_ref().map(AsFd::as_fd));
        wakers
    }

    /// Does whatever is to be done now. How long to wait until the next turn, if nothing else happens.
    pub fn turn(&mut self, tell: &mut dyn FnMut(News)) -> Result<Duration, WorkerError> {
        self.hear(tell)?;
        self.look_at_runners(tell)?;
        if self.away_until.is_none_or(|until| until <= Instant::now()) {
            self.away_until = None;
            if let Err(e) = self.ask_the_database(tell) {
                self.away(&e, tell);
            } else if self.is_away {
                self.is_away = false;
                tell(News::Back);
            }
        }
        self.sweep()?;
        Ok(self.until_next())
    }

    fn away(&mut self, error: &SettleError, tell: &mut dyn FnMut(News)) {
        if error.is_busy() {
            // Others are writing. There is another turn in a moment.
            self.away_until = Some(Instant::now() + BUSY_WAIT);
            return;
        }
        self.ledger.rest();
        self.bell = None;
        self.sated = false;
        self.away_until = Some(Instant::now() + AWAY_WAIT);
        if !std::mem::replace(&mut self.is_away, true) {
            tell(News::Away(error_chain(error)));
        }
    }

    fn until_next(&self) -> Duration {
        let now = Instant::now();
        let mut at = vec![now + IDLE_WAIT, self.sweep_at, self.seen_at];
        if self.living() > 0 {
            at.push(self.cancels_at);
        }
        if let Some(until) = self.away_until {
            // Nothing else can be done before.
            at = vec![until, now + CANCELS_EVERY];
        }
        let next = at.into_iter().min().unwrap_or(now);
        // A moment at least: what is overdue is waited for.
        next.saturating_duration_since(now)
            .max(Duration::from_millis(5))
    }

    /// What the keeper and the bell have to say.
    fn hear(&mut self, tell: &mut dyn FnMut(News)) -> Result<(), WorkerError> {
        for done in self.keeper.done()? {
            match done {
                Done::Closed(at, Ok(slot)) => {
                    self.slots[at].state = State::Free(slot);
                    self.changed();
                }
                Done::Closed(at, Err((slot, why))) => {
                    tell(News::Trouble(why));
                    let until = Instant::now() + AWAY_WAIT;
                    self.slots[at].state = State::Stuck { slot, until };
                }
                Done::Swept { at, left } => {
                    self.swept_at = (left == Left::Nothing).then_some(at);
                    self.nothing_queued = false;
                    self.sweeping = false;
                    self.sweep_at = Instant::now() + SWEEP_EVERY;
                    // What it finished may be queued again.
                    self.sated = false;
                }
                Done::News(News::Away(_)) if self.is_away => {}
                Done::News(news) => tell(news),
            }
        }
        // What is over the number we were given goes when it is free.
        let slots = self.options.slots as usize;
        while self.slots.len() > slots
            && matches!(
                self.slots.last().map(|place| &place.state),
                Some(State::Free(_))
            )
        {
            if let Some(place) = self.slots.pop() {
                drop(place.state);
                let _empty = std::fs::remove_dir_all(&place.path);
            }
        }
        if let Some(bell) = &mut self.bell
            && is_ready(bell.as_fd())
        {
            bell.consume();
            self.sated = false;
            self.cancels_at = Instant::now();
        }
        Ok(())
    }

    /// Whatever was seen before may be otherwise now.
    fn changed(&mut self) {
        self.changes += 1;
        self.sated = false;
        self.nothing_queued = false;
        if self.running() == 0 {
            self.sweep_at = Instant::now();
        }
    }

    /// Which runners have ended.
    fn look_at_runners(&mut self, tell: &mut dyn FnMut(News)) -> Result<(), WorkerError> {
        for at in 0..self.slots.len() {
            let place = &mut self.slots[at];
            let slot = match &mut place.state {
                State::Busy(busy) => {
                    if let Some(child) = &mut busy.child {
                        let code = match child.try_wait() {
                            Ok(None) => continue,
                            Ok(Some(status)) => status.code(),
                            // Somebody else waited for it; the lock tells.
                            Err(_) => None,
                        };
                        self.unstarted = match code {
                            Some(COULD_NOT_RUN) => self.unstarted + 1,
                            _ => 0,
                        };
                        busy.child = None;
                    }
                    let locked = Slot::lock(&place.path);
                    let Some(slot) = locked.map_err(|e| of_slot(&place.path, e))? else {
                        continue;
                    };
                    tell(News::Ended {
                        id: busy.id.clone(),
                        attempt: busy.attempt,
                    });
                    slot
                }
                State::Stuck { until, .. } if *until <= Instant::now() => {
                    let taken = std::mem::replace(&mut place.state, State::Closing { key: None });
                    match taken {
                        State::Stuck { slot, .. } => slot,
                        _ => continue,
                    }
                }
                _ => continue,
            };
            self.close(at, slot)?;
        }
        Ok(())
    }

    fn close(&mut self, at: usize, mut slot: Slot) -> Result<(), WorkerError> {
        let order = slot.order().map_err(|e| of_slot(slot.path(), e))?;
        if order.is_none() && !slot.staged().exists() {
            // Its runner left nothing to be done.
            slot.clear().map_err(|e| of_slot(slot.path(), e))?;
            self.slots[at].state = State::Free(slot);
            self.changed();
            return Ok(());
        }
        self.slots[at].state = State::Closing {
            key: order.map(|order| order.key),
        };
        self.keeper.give(Chore::Close(at, slot))
    }

    /// Slots that were free when we came, whose last runner may have left something.
    fn close_free(&mut self) -> Result<(), WorkerError> {
        for at in 0..self.slots.len() {
            let closing = State::Closing { key: None };
            match std::mem::replace(&mut self.slots[at].state, closing) {
                State::Free(slot) => self.close(at, slot)?,
                other => self.slots[at].state = other,
            }
        }
        Ok(())
    }

    fn ask_the_database(&mut self, tell: &mut dyn FnMut(News)) -> Result<(), SettleError> {
        if self.bell.is_none() {
            let bell = ChangeListener::subscribe(&self.ledger.location);
            self.bell = Some(bell.map_err(|e| self.ledger.trouble(e))?);
        }
        if self.seen_at <= Instant::now() {
            let row = self.row();
            self.ledger.with(|store| store.record_worker(&row))?;
            self.seen_at = Instant::now() + SEEN_EVERY;
        }
        if self.living() > 0 && self.cancels_at <= Instant::now() {
            self.pass_on_cancels()?;
            self.cancels_at = Instant::now() + CANCELS_EVERY;
        }
        if !self.draining && self.may_take(tell) {
            self.take(tell)?;
        }
        Ok(())
    }

    fn pass_on_cancels(&mut self) -> Result<(), SettleError> {
        let host = self.host.clone();
        let wanted = self.ledger.with(|store| store.requested_cancels(&host))?;
        for (_, _, key) in wanted {
            let of_it = |place: &&mut Place| matches!(&place.state, State::Busy(b) if b.key == key && !b.told);
            if let Some(place) = self.slots.iter_mut().find(of_it)
                && let State::Busy(busy) = &mut place.state
            {
                busy.told = slot::signal(&place.path);
            }
        }
        Ok(())
    }

    fn sweep(&mut self) -> Result<(), WorkerError> {
        if self.sweeping || self.sweep_at > Instant::now() {
            return Ok(());
        }
        let keys = self.slots.iter().filter_map(|place| match &place.state {
            State::Busy(busy) => Some(busy.key.clone()),
            State::Closing { key } => key.clone(),
            State::Free(_) | State::Stuck { .. } => None,
        });
        let sweep = Sweep {
            busy: keys.collect::<HashSet<String>>(),
            at: self.changes,
            row: self.row(),
            memory_default_bytes: self.options.memory_default_bytes,
            park_after_ms: self.options.park_after_ms,
        };
        self.sweeping = true;
        self.keeper.give(Chore::Sweep(sweep))
    }

    fn row(&self) -> store::WorkerRow {
        store::WorkerRow {
            host: self.host.clone(),
            account: self.account.clone(),
            name: self.options.name.clone(),
            host_name: name::host_name(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            slots: self.options.slots,
            total: self.options.total,
            running: u32::try_from(self.running()).unwrap_or(u32::MAX),
            draining: self.draining,
            started_ms: self.started_ms,
            seen_ms: 0,
        }
    }

    /// Says goodbye. Runners that live go on without us.
    pub fn leave(mut self) {
        let row = self.row();
        // Nobody waits for it: who is not seen any more is gone as well.
        let _gone_all_the_same = self.ledger.with(|store| store.remove_worker(&row));
    }
}

fn is_ready(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(poll(&mut fds, Some(&at_once)), Ok(1..))
}

fn of_slot(path: &Path, source: io::Error) -> WorkerError {
    WorkerError::Slot {
        path: path.to_path_buf(),
        source,
    }
}
