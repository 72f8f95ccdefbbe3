//! What may take long, in threads of its own: closing slots whose runner has ended, finishing what dead runners left,
//! giving up what other machines have lost.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::slot::{Order, Slot};
use super::{News, WorkerError};
use crate::attempt::finalize::SettleError;
use crate::attempt::record::Reason;
use crate::attempt::recorder::Ledger;
use crate::home::Home;
use crate::plan::limits::error_chain;
use crate::recovery::reaper;
use crate::run_dir;
use store::{ExpiredLease, LossProof, LostAttempt, State, WorkerRow as Row};

/// An attempt of another machine's is given up when its lease has been over for this long while we looked: the database
/// may have been away for everybody, and then its runner is about to be heard of again.
const EXPIRED_FOR: Duration = Duration::from_secs(30);
/// One that had ended is finished by its own machine, if that is ever heard of again.
const COLLECTING_FOR_MS: u64 = 15 * 60 * 1000;
const EXPIRED_AT_ONCE: u32 = 1_000;
/// Looking for what fits no worker looks at the whole queue.
const PARK_EVERY: Duration = Duration::from_secs(60);

pub(super) enum Chore {
    /// The runner of this slot is dead.
    Close(usize, Slot),
    Sweep(Sweep),
}

/// What a sweep must know of the worker.
pub(super) struct Sweep {
    /// Keys of attempts whose runners live, or are being looked after.
    pub busy: HashSet<String>,
    /// What the worker had seen when it asked.
    pub at: u64,
    pub row: Row,
    pub memory_default_bytes: u64,
    pub park_after_ms: u64,
}

pub(super) enum Done {
    /// Free again, or, with a reason, to be tried again later.
    Closed(usize, Result<Slot, (Slot, String)>),
    Swept {
        at: u64,
        left: Left,
    },
    News(News),
}

/// What dead runners left in this home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    Nothing,
    /// To be tried again.
    Something,
}

/// Closings at the same time: the platform's own step after a commit may be slow.
const CLOSERS: usize = 4;

/// The threads, seen from the worker: some that close slots, and one that sweeps.
pub(super) struct Keeper {
    closings: Sender<Chore>,
    sweeps: Sender<Chore>,
    done: Receiver<Done>,
    rung: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Keeper {
    pub fn start(home: Home, ledger: Ledger) -> Result<Keeper, WorkerError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let rung = Arc::new(eventfd(0, flags).map_err(|e| WorkerError::Start(e.into()))?);
        let (closings, to_close) = channel();
        let (sweeps, to_sweep) = channel();
        let (tell, done) = channel();
        let (to_close, to_sweep) = (
            Arc::new(Mutex::new(to_close)),
            Arc::new(Mutex::new(to_sweep)),
        );
        let mut threads = Vec::new();
        for number in 0..=CLOSERS {
            let thread = Thread {
                home: home.clone(),
                ledger: ledger.another(),
                tell: tell.clone(),
                rung: rung.clone(),
                expired: HashMap::new(),
                park_at: Instant::now(),
                told: HashSet::new(),
            };
            let to_do = match number {
                0 => to_sweep.clone(),
                _ => to_close.clone(),
            };
            let started = std::thread::Builder::new()
                .name("keeper".into())
                .spawn(move || thread.work(&to_do));
            threads.push(started.map_err(WorkerError::Start)?);
        }
        Ok(Keeper {
            closings,
            sweeps,
            done,
            rung,
            threads,
        })
    }

    pub fn give(&self, chore: Chore) -> Result<(), WorkerError> {
        let sent = match chore {
            Chore::Close(..) => self.closings.send(chore),
            Chore::Sweep(_) => self.sweeps.send(chore),
        };
        sent.map_err(|_| WorkerError::KeeperGone)
    }

    /// None of the threads ends while we live, unless it panicked.
    pub fn done(&self) -> Result<Vec<Done>, WorkerError> {
        let mut count = [0u8; 8];
        let _none = rustix::io::read(self.rung.as_ref(), &mut count);
        match self.threads.iter().any(JoinHandle::is_finished) {
            true => Err(WorkerError::KeeperGone),
            false => Ok(self.done.try_iter().collect()),
        }
    }
}

impl AsFd for Keeper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.rung.as_ref().as_fd()
    }
}

struct Thread {
    home: Home,
    ledger: Ledger,
    tell: Sender<Done>,
    rung: Arc<OwnedFd>,
    /// Since when we have seen whose lease over, by key. Only of those that still are.
    expired: HashMap<String, Instant>,
    park_at: Instant,
    /// Problems that were told of.
    told: HashSet<String>,
}

impl Thread {
    fn work(mut self, to_do: &Mutex<Receiver<Chore>>) {
        // The lock is let go before the chore is done.
        let next = || to_do.lock().unwrap_or_else(PoisonError::into_inner).recv();
        while let Ok(chore) = next() {
            let done = match chore {
                Chore::Close(at, slot) => Done::Closed(at, self.close(slot)),
                Chore::Sweep(sweep) => {
                    let left = self.sweep(&sweep);
                    Done::Swept { at: sweep.at, left }
                }
            };
            if self.say(done).is_none() {
                return;
            }
        }
    }

    /// `None`: the worker is gone.
    fn say(&self, done: Done) -> Option<()> {
        self.tell.send(done).ok()?;
        let _full_is_rung = rustix::io::write(self.rung.as_ref(), &1u64.to_ne_bytes());
        Some(())
    }

    fn news(&self, news: News) {
        let _nobody_listens = self.say(Done::News(news));
    }

    fn close(&mut self, mut slot: Slot) -> Result<Slot, (Slot, String)> {
        match self.try_close(&mut slot) {
            Ok(()) => Ok(slot),
            Err(why) => Err((slot, why)),
        }
    }

    fn try_close(&mut self, slot: &mut Slot) -> Result<(), String> {
        remove_staged(slot).map_err(|e| format!("remove {:?}: {e}", slot.staged()))?;
        if let Some(order) = slot.order().map_err(|e| e.to_string())? {
            self.settle(&order)?;
        }
        slot.clear().map_err(|e| e.to_string())
    }

    /// The runner is dead: what it left is finished, and the attempt ended if that was not done.
    fn settle(&mut self, order: &Order) -> Result<(), String> {
        let reaped = reaper::reap_one(&self.home, &mut self.ledger, &order.id);
        for record in &reaped.finished {
            self.news(News::Finished {
                id: record.id.to_string(),
                attempt: record.attempt,
                status: record.status,
            });
        }
        if run_dir::stands(&self.home, &order.id, order.attempt) {
            // The database is away, or something of it cannot be killed: the next sweep tries again, and the directory
            // keeps everything that is needed.
            return Ok(());
        }
        let by = run_dir::fresh_key();
        let lost = LostAttempt {
            id: order.id.as_str(),
            attempt: order.attempt,
            key: &order.key,
            by: &by,
            reason: Reason::RunnerLost.as_str(),
            message: "its runner died before it began",
            proof: LossProof::RunnerGone,
        };
        let given_up = match self.ledger.with(|store| store.give_up(&lost)) {
            // It will be asked again.
            Err(e) if e.is_passing() => return Err(error_chain(&e)),
            // It would be the same every time, and the slot is wanted. What its lease ends is given up once more then.
            Err(e) => {
                self.news(News::Trouble(error_chain(&e)));
                false
            }
            Ok(given_up) => given_up,
        };
        if given_up {
            self.news(News::GaveUp {
                id: order.id.to_string(),
                attempt: order.attempt,
            });
        }
        Ok(())
    }

    fn sweep(&mut self, sweep: &Sweep) -> Left {
        let reaped = reaper::reap(&self.home, Some(&mut self.ledger));
        for record in &reaped.finished {
            self.news(News::Finished {
                id: record.id.to_string(),
                attempt: record.attempt,
                status: record.status,
            });
        }
        let left = match reaped.problems.is_empty() {
            true => Left::Nothing,
            false => Left::Something,
        };
        // Each is told once, for as long as it lasts.
        let problems: HashSet<String> = reaped.problems.into_iter().collect();
        for problem in problems.difference(&self.told) {
            self.news(News::Trouble(problem.clone()));
        }
        self.told = problems;
        if let Err(e) = self.give_up_expired(sweep) {
            // Nobody's lease is judged by what we saw before the database was away.
            self.expired.clear();
            self.news(News::Away(error_chain(&e)));
            return Left::Something;
        }
        self.park(sweep);
        left
    }

    fn park(&mut self, sweep: &Sweep) {
        if self.park_at > Instant::now() {
            return;
        }
        self.park_at = Instant::now() + PARK_EVERY;
        let parked = self.ledger.with(|store| {
            store.park_unfit(&sweep.row, sweep.memory_default_bytes, sweep.park_after_ms)
        });
        for id in parked.unwrap_or_default() {
            self.news(News::Parked { id });
        }
    }

    fn give_up_expired(&mut self, sweep: &Sweep) -> Result<(), SettleError> {
        let expired = self
            .ledger
            .with(|store| store.expired_leases(EXPIRED_AT_ONCE))?;
        // Whatever has a directory here is the reaper's, who has the lock to go by.
        let elsewhere = |one: &&ExpiredLease| {
            let id = crate::request::AnalysisId::new(&one.id);
            // What is no id has no directory.
            let held = id.is_ok_and(|id| run_dir::holds(&self.home, &id, one.attempt, &one.key));
            !sweep.busy.contains(&one.key) && !held
        };
        let expired: Vec<&ExpiredLease> = expired.iter().filter(elsewhere).collect();
        let still: HashSet<&str> = expired.iter().map(|one| one.key.as_str()).collect();
        self.expired.retain(|key, _| still.contains(key.as_str()));
        for one in expired {
            let since = *self
                .expired
                .entry(one.key.clone())
                .or_insert_with(Instant::now);
            let patience_is_over = match one.state {
                State::Collecting => one.expired_ms >= COLLECTING_FOR_MS,
                _ => true,
            };
            if since.elapsed() < EXPIRED_FOR || !patience_is_over {
                continue;
            }
            let by = run_dir::fresh_key();
            let lost = LostAttempt {
                id: &one.id,
                attempt: one.attempt,
                key: &one.key,
                by: &by,
                reason: Reason::RunnerLost.as_str(),
                message: "its runner did not renew its lease",
                proof: LossProof::LeaseExpired,
            };
            if self.ledger.with(|store| store.give_up(&lost))? {
                self.news(News::GaveUp {
                    id: one.id.clone(),
                    attempt: one.attempt,
                });
            }
        }
        Ok(())
    }
}

/// Made by the runner from the database, and copied from: nobody but us was ever in it.
fn remove_staged(slot: &Slot) -> std::io::Result<()> {
    match std::fs::remove_dir_all(slot.staged()) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
