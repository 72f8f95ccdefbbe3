//! Takes analyses from the queue and starts a runner for each.
//!
//! The worker itself runs nothing. Each attempt has a process of its own, the runner, that holds its lease and commits its
//! result; the worker may be killed, upgraded or started anew at any time, and finds its runners as they are (`slot.rs`).
//! What it decides is what is taken, and never more at once than it was given: slots, and the sums of memory and CPUs.
//! What may take long is done in a thread beside it (`keeper.rs`), so that a wish to cancel never waits for that.

mod keeper;
mod name;
mod places;
pub mod slot;

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::attempt::check_room;
use crate::home::{self, Home, HomeError, make_private};
use crate::ledger::Ledger;
use crate::limits::error_chain;
use crate::record::Status;
use crate::request::AnalysisId;
use crate::run_dir;
use crate::settle::SettleError;
use crate::store::{self, Bell, Capacity, Claim, Claimed, Store, StoreError};
use keeper::{Chore, Done, Keeper, Sweep};
pub use name::holder;
use places::{Busy, Place, State};
use slot::{ORDER_VERSION, Order, Slot};

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
/// After a failure of the database.
const AWAY_WAIT: Duration = Duration::from_secs(2);
/// A machine on which nothing starts must not use up the queue: after so many in a row it pauses.
const UNSTARTED_MAX: u32 = 3;
const UNSTARTED_PAUSE: Duration = Duration::from_secs(30);
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
    bell: Option<Bell>,
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
    /// Runners in a row that could not start their analysis.
    unstarted: u32,
    /// Nothing is taken before.
    pause_until: Option<Instant>,
    /// Told that there is no room.
    no_room: bool,
}

impl Worker {
    /// Locks the worker's name and takes up what runs in its slots.
    pub fn open(home: Home, ledger: Ledger, options: Options) -> Result<Worker, WorkerError> {
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
        let keeper = Keeper::start(home.clone(), ledger.another())?;
        let now = Instant::now();
        let mut worker = Worker {
            slots: places::take_up(&slots_at, options.slots)?,
            options,
            host: home::machine(),
            boot_id: home::boot_id(),
            account: account(&home),
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

    /// Nothing runs, and when we last looked nothing was queued, not even for later.
    pub fn is_idle(&self) -> bool {
        self.running() == 0 && self.nothing_queued
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
        self.hear(tell);
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
    fn hear(&mut self, tell: &mut dyn FnMut(News)) {
        for done in self.keeper.done() {
            match done {
                Done::Closed(at, Ok(slot)) => self.slots[at].state = State::Free(slot),
                Done::Closed(at, Err((slot, why))) => {
                    tell(News::Trouble(why));
                    let until = Instant::now() + AWAY_WAIT;
                    self.slots[at].state = State::Stuck { slot, until };
                }
                Done::Swept => {
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
            bell.silence();
            self.sated = false;
            self.cancels_at = Instant::now();
        }
    }

    /// Which runners have ended.
    fn look_at_runners(&mut self, tell: &mut dyn FnMut(News)) -> Result<(), WorkerError> {
        for at in 0..self.slots.len() {
            let place = &mut self.slots[at];
            let slot = match &mut place.state {
                State::Busy(busy) => {
                    if let Some(child) = &mut busy.child {
                        let Ok(Some(status)) = child.try_wait() else {
                            continue;
                        };
                        self.unstarted = match status.code() {
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
            let bell = Bell::hang(&self.ledger.location);
            self.bell = Some(bell.map_err(|e| self.ledger.trouble(e))?);
        }
        if self.seen_at <= Instant::now() {
            let row = self.row();
            self.ledger.with(|store| store.worker_seen(&row))?;
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

    /// Whether this machine is fit to run anything just now.
    fn may_take(&mut self, tell: &mut dyn FnMut(News)) -> bool {
        let now = Instant::now();
        if self.unstarted >= UNSTARTED_MAX {
            self.unstarted = 0;
            self.pause_until = Some(now + UNSTARTED_PAUSE);
            tell(News::Trouble(format!(
                "{UNSTARTED_MAX} analyses in a row could not be started here (`fumehood show` says why); no more are taken for {} s",
                UNSTARTED_PAUSE.as_secs()
            )));
        }
        if self.pause_until.is_some_and(|until| until > now) {
            return false;
        }
        self.pause_until = None;
        if self.sated {
            return true;
        }
        let (reserve, quota) = (
            self.options.free_reserve_bytes,
            self.options.store_quota_bytes,
        );
        match check_room(&self.ledger, reserve, quota) {
            Ok(()) => {
                self.no_room = false;
                true
            }
            Err(e) => {
                if !std::mem::replace(&mut self.no_room, true) {
                    tell(News::Trouble(format!(
                        "no work is taken: {}",
                        error_chain(&e)
                    )));
                }
                self.sated = true;
                false
            }
        }
    }

    fn pass_on_cancels(&mut self) -> Result<(), SettleError> {
        let host = self.host.clone();
        let wanted = self.ledger.with(|store| store.cancels(&host))?;
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

    /// Takes what fits.
    fn take(&mut self, tell: &mut dyn FnMut(News)) -> Result<(), SettleError> {
        while !self.sated {
            let free: Vec<usize> = self.free_slots().collect();
            if free.is_empty() {
                return Ok(());
            }
            let keys: Vec<String> = free.iter().map(|_| run_dir::fresh_key()).collect();
            let worker = format!("{}@{}", self.options.name, host_name());
            let claim = Claim {
                host: &self.host,
                boot_id: &self.boot_id,
                worker: &worker,
                lease_ms: self.options.lease_ms,
                free: self.free(),
                total: self.options.total,
                memory_default_bytes: self.options.memory_default_bytes,
                keys: &keys,
            };
            let claimed = self.ledger.with(|store| claim_next(store, &claim))?;
            self.nothing_queued = match claimed {
                Ok(_) => false,
                Err(queued) => queued == 0,
            };
            let claimed = claimed.unwrap_or_default();
            self.sated = claimed.len() < keys.len();
            for (at, claimed) in free.into_iter().zip(claimed) {
                let (id, attempt) = (claimed.id.clone(), claimed.attempt);
                match self.start(at, claimed) {
                    Ok(()) => tell(News::Took { id, attempt }),
                    // The order stands, and says what to give up.
                    Err(e) => {
                        self.unstarted += 1;
                        self.sated = true;
                        tell(News::Trouble(format!("start a runner for {id}: {e}")));
                    }
                }
            }
        }
        Ok(())
    }

    fn free_slots(&self) -> impl Iterator<Item = usize> {
        let places = self.slots.iter().take(self.options.slots as usize);
        places
            .enumerate()
            .filter(|(_, place)| matches!(place.state, State::Free(_)))
            .map(|(at, _)| at)
    }

    /// What is not promised to any runner.
    fn free(&self) -> Capacity {
        let mut free = self.options.total;
        for place in &self.slots {
            if let State::Busy(busy) = &place.state {
                free.memory_bytes = free.memory_bytes.saturating_sub(busy.counted.memory_bytes);
                free.cpu_milli = free.cpu_milli.saturating_sub(busy.counted.cpu_milli);
            }
        }
        free
    }

    fn start(&mut self, at: usize, claimed: Claimed) -> io::Result<()> {
        let place = &mut self.slots[at];
        let Ok(id) = AnalysisId::new(&claimed.id) else {
            return Err(io::Error::other("the database gave an id that is none"));
        };
        let order = Order {
            version: ORDER_VERSION,
            id,
            attempt: claimed.attempt,
            key: claimed.key,
            request: claimed.request_json,
            submitter: claimed.submitter,
            lease_ms: self.options.lease_ms,
            memory_bytes: claimed.counted.memory_bytes,
            cpu_milli: claimed.counted.cpu_milli,
            cpu_milli_max: self.options.total.cpu_milli,
            slot: place.path.clone(),
            worker: self.lock.clone(),
        };
        let closing = State::Closing { key: None };
        let State::Free(mut slot) = std::mem::replace(&mut place.state, closing) else {
            return Err(io::Error::other("the slot is not free"));
        };
        let started = slot
            .write(&order)
            .and_then(|()| slot.order_for_runner())
            .and_then(|input| spawn(&self.options, input));
        place.state = match started {
            Ok(child) => {
                // From here on the lock is the runner's alone.
                drop(slot);
                State::Busy(Busy {
                    id: order.id.to_string(),
                    attempt: order.attempt,
                    key: order.key,
                    counted: Capacity {
                        memory_bytes: order.memory_bytes,
                        cpu_milli: order.cpu_milli,
                    },
                    child: Some(child),
                    told: false,
                })
            }
            Err(e) => {
                let until = Instant::now();
                place.state = State::Stuck { slot, until };
                return Err(e);
            }
        };
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
            row: self.row(),
            memory_default_bytes: self.options.memory_default_bytes,
            park_after_ms: self.options.park_after_ms,
        };
        self.sweeping = true;
        self.keeper.give(Chore::Sweep(sweep))
    }

    fn row(&self) -> store::Worker {
        store::Worker {
            host: self.host.clone(),
            account: self.account.clone(),
            name: self.options.name.clone(),
            host_name: host_name(),
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
        let _gone_all_the_same = self.ledger.with(|store| store.worker_gone(&row));
    }
}

/// What was taken; or, where nothing was there to be taken, how many are queued that cannot be yet.
fn claim_next(store: &mut Store, claim: &Claim) -> Result<Result<Vec<Claimed>, u64>, StoreError> {
    let claimed = store.claim(claim)?;
    match claimed.is_empty() {
        false => Ok(Ok(claimed)),
        true => Ok(Err(store.overview(0)?.queued)),
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

fn spawn(options: &Options, input: OwnedFd) -> io::Result<Child> {
    let mut command = Command::new(&options.program);
    command.args(&options.args).stdin(Stdio::from(input));
    command.stdout(Stdio::null());
    // What systemd told the worker is not for its runners.
    for name in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"] {
        command.env_remove(name);
    }
    command.current_dir("/");
    // A group of its own: Ctrl-C on the worker's terminal is not meant for it.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command.spawn()
}

fn of_slot(path: &Path, source: io::Error) -> WorkerError {
    WorkerError::Slot {
        path: path.to_path_buf(),
        source,
    }
}

/// Tells workers of one machine apart that have the same name in different homes.
fn account(home: &Home) -> String {
    let hash = blake3::hash(home.path().as_os_str().as_encoded_bytes());
    let uid = rustix::process::geteuid().as_raw();
    format!("{uid}-{}", &hash.to_hex()[..8])
}

fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}
