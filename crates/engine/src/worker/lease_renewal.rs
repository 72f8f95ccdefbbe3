//! A runner's hold on its attempt: the lease, renewed while it lives, and the end of the analysis when it cannot be.
//!
//! A thread renews the lease and learns of a wish to cancel. What ends the analysis before the lease does is not that
//! thread, which may be waiting for a server that does not answer, but a timer of the kernel's that every renewal puts
//! off. It goes by the time since boot, suspensions included: the machine's clock may be wrong.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};

use crate::attempt::recorder::Ledger;
use crate::home;
use crate::worker::slot;
use store::{LeasedAttempt, Location, RenewOutcome};

/// How often the thread looks around, at most.
const LOOK: Duration = Duration::from_secs(1);

/// Whose lease it is. Not for printing: it has the key.
#[derive(Clone)]
pub struct Lease {
    pub id: String,
    pub attempt: u32,
    pub key: String,
    pub lease_ms: u64,
    /// Held locked by the worker while it lives, and then it tells of cancels at once.
    pub worker: PathBuf,
}

impl Lease {
    fn held(&self) -> LeasedAttempt<'_> {
        LeasedAttempt {
            id: &self.id,
            attempt: self.attempt,
            key: &self.key,
        }
    }

    /// Renewed this often, and the analysis ended this long after the last renewal: a quarter of the lease is left for it
    /// to die in.
    fn renew_every(&self, location: &Location) -> Duration {
        // Twice at least before anybody who sees it expired gives it up. Where nothing hangs on it, a little more rarely.
        let (part, at_most) = match location {
            Location::Postgres(_) => (6, Duration::from_secs(10)),
            _ => (4, Duration::from_secs(15)),
        };
        let part = Duration::from_millis(self.lease_ms / part);
        part.min(at_most).max(LOOK)
    }

    fn fatal_after(&self) -> Duration {
        Duration::from_millis(self.lease_ms - self.lease_ms / 4)
    }
}

/// What the thread has to say.
#[derive(Default)]
struct Said {
    cancel: AtomicBool,
    was_cancelled: AtomicBool,
    /// Somebody else has ended the attempt.
    lost: AtomicBool,
    stop: Mutex<bool>,
    stopped: Condvar,
}

pub struct Heart {
    ledger: Ledger,
    lease: Lease,
    said: Arc<Said>,
    thread: Option<JoinHandle<()>>,
    /// Fires when the lease is about to end; `None` where the lock on the run directory is what counts.
    timer: Option<Arc<OwnedFd>>,
    news: Arc<OwnedFd>,
    /// Readable when there is something to be told: the two above, and whatever the runner listens to besides.
    all: OwnedFd,
}

/// Why the analysis should end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    Cancelled,
    LeaseLost,
}

impl Heart {
    /// Starts with a lease that was renewed at `since`, by [`now`], and listens to `besides` as well.
    pub fn start(
        ledger: Ledger,
        lease: Lease,
        since: Duration,
        besides: BorrowedFd<'_>,
    ) -> io::Result<Heart> {
        let news = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        // SQLite is one machine's, where a lock tells whether a runner lives.
        let timer = match ledger.location {
            Location::Postgres(_) => Some(Arc::new(timerfd_create(
                TimerfdClockId::Boottime,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )?)),
            _ => None,
        };
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = |fd: BorrowedFd<'_>| {
            epoll::add(
                &all,
                fd,
                epoll::EventData::new_u64(0),
                epoll::EventFlags::IN,
            )
        };
        watch(news.as_fd().as_fd())?;
        watch(besides)?;
        if let Some(timer) = &timer {
            put_off(timer, since + lease.fatal_after())?;
            watch(timer.as_fd().as_fd())?;
        }
        let said = Arc::new(Said::default());
        let beating = Beating {
            ledger: ledger.another(),
            lease: lease.clone(),
            timer: timer.clone(),
            news: news.clone(),
            said: said.clone(),
            renewed: since,
            told: false,
        };
        let thread = std::thread::Builder::new()
            .name("heart".into())
            .spawn(move || beating.beat())?;
        Ok(Heart {
            ledger,
            lease,
            said,
            thread: Some(thread),
            timer,
            news,
            all,
        })
    }

    pub fn why(&self) -> Option<Why> {
        let expired = self.timer.as_ref().is_some_and(|timer| {
            let mut count = [0u8; 8];
            // It stays expired: nobody puts it off after this.
            match rustix::io::read(timer.as_ref(), &mut count) {
                Ok(_) => {
                    self.said.lost.store(true, Ordering::SeqCst);
                    true
                }
                Err(_) => false,
            }
        });
        let mut count = [0u8; 8];
        let _none = rustix::io::read(self.news.as_ref(), &mut count);
        if expired || self.said.lost.load(Ordering::SeqCst) {
            return Some(Why::LeaseLost);
        }
        let cancel = self.said.cancel.swap(false, Ordering::SeqCst);
        cancel.then_some(Why::Cancelled)
    }

    /// Whether somebody has cancelled it, as far as the database can be asked right now.
    pub fn is_cancelled(&mut self) -> bool {
        if self.said.was_cancelled.load(Ordering::SeqCst) {
            return true;
        }
        let (held, lease_ms) = (self.lease.held(), self.lease.lease_ms);
        let answer = self.ledger.with(|store| store.renew_lease(&held, lease_ms));
        self.ledger.rest();
        matches!(answer, Ok(RenewOutcome::CancelRequested { .. }))
    }

    pub fn is_lost(&self) -> bool {
        self.said.lost.load(Ordering::SeqCst)
    }
}

impl AsFd for Heart {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.all.as_fd()
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        *self
            .said
            .stop
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.said.stopped.notify_all();
        // It may be waiting for a server; everything is done, so it is not waited for.
        drop(self.thread.take());
    }
}

/// Time since boot, suspensions included.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0))
}

fn put_off(timer: &OwnedFd, until: Duration) -> io::Result<()> {
    let at = Itimerspec {
        it_interval: Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        },
        it_value: Timespec {
            tv_sec: i64::try_from(until.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: until.subsec_nanos().into(),
        },
    };
    timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &at)?;
    Ok(())
}

struct Beating {
    ledger: Ledger,
    lease: Lease,
    timer: Option<Arc<OwnedFd>>,
    news: Arc<OwnedFd>,
    said: Arc<Said>,
    renewed: Duration,
    /// The wish to cancel was passed on.
    told: bool,
}

impl Beating {
    fn beat(mut self) {
        let mut tried = self.renewed;
        while !self.is_over() {
            let due = now().saturating_sub(tried) >= self.lease.renew_every(&self.ledger.location);
            if due {
                tried = now();
                self.renew(tried);
            } else if !worker_lives(&self.lease.worker) {
                // Nobody else would tell us of a wish to cancel.
                self.look();
            }
            if self.said.lost.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    fn renew(&mut self, asked: Duration) {
        let (held, lease_ms) = (self.lease.held(), self.lease.lease_ms);
        let answer = self.ledger.with(|store| store.renew_lease(&held, lease_ms));
        self.ledger.rest();
        match answer {
            Ok(RenewOutcome::Renewed) => self.renewed_at(asked),
            Ok(RenewOutcome::CancelRequested { .. }) => {
                self.renewed_at(asked);
                self.tell_of_cancel();
            }
            Ok(RenewOutcome::Lost) => {
                self.said.lost.store(true, Ordering::SeqCst);
                self.ring();
            }
            // Away for now. The timer runs.
            Err(_) => {}
        }
    }

    fn look(&mut self) {
        if self.told {
            return;
        }
        let (host, key) = (home::machine(), self.lease.key.clone());
        let wanted = self.ledger.with(|store| store.requested_cancels(&host));
        self.ledger.rest();
        if wanted.is_ok_and(|wanted| wanted.iter().any(|(_, _, other)| *other == key)) {
            self.tell_of_cancel();
        }
    }

    /// Once: what it does not obey the grace ends.
    fn tell_of_cancel(&mut self) {
        if !std::mem::replace(&mut self.told, true) {
            self.said.cancel.store(true, Ordering::SeqCst);
            self.said.was_cancelled.store(true, Ordering::SeqCst);
            self.ring();
        }
    }

    /// Counted from before the question: the database may have answered late.
    fn renewed_at(&mut self, asked: Duration) {
        self.renewed = asked;
        if let Some(timer) = &self.timer {
            // Should the kernel refuse, it fires as it was set.
            let _as_it_was = put_off(timer, asked + self.lease.fatal_after());
        }
    }

    fn ring(&self) {
        let _full_is_rung = rustix::io::write(self.news.as_ref(), &1u64.to_ne_bytes());
    }

    /// Waits a moment; true if there is nothing left to hold.
    fn is_over(&self) -> bool {
        let stop = self
            .said
            .stop
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .said
            .stopped
            .wait_timeout_while(stop, LOOK, |stop| !*stop);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn worker_lives(lock: &Path) -> bool {
    slot::is_held(lock)
}
