//! A runner's hold on its attempt: renews the lease while the runner lives, and ends the analysis if it cannot.
//!
//! A thread renews the lease and looks for a cancellation. That thread may hang in a call to a server that does not
//! answer. So a kernel timer ends the analysis before the lease ends, and each renewal moves the timer. The timer
//! counts the time since boot, including suspension, because the clock of the machine may be wrong.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use sandbox::events::{self, BootTimer, WakeEvent, boot_time};

use crate::attempt::context::Claim;
use crate::attempt::recorder::Recorder;
use crate::home;
use crate::worker::slot;
use store::{Location, RenewOutcome};

/// How often the thread checks what is due.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// How often to renew a lease.
fn renew_every(lease_ms: u64, location: &Location) -> Duration {
    // At least two renewals before another worker gives up a lease that it sees expired. On one machine, where the lock
    // counts, a little less often.
    let (part, at_most) = match location {
        Location::Postgres(_) => (6, Duration::from_secs(10)),
        _ => (4, Duration::from_secs(15)),
    };
    let part = Duration::from_millis(lease_ms / part);
    part.min(at_most).max(CHECK_EVERY)
}

/// How long after the last renewal the analysis is ended. A quarter of the lease is left for its processes to die.
fn kill_after(lease_ms: u64) -> Duration {
    Duration::from_millis(lease_ms - lease_ms / 4)
}

/// What the renewal thread tells the runner.
#[derive(Default)]
struct RenewalSignals {
    cancel: AtomicBool,
    was_cancelled: AtomicBool,
    /// Another process has ended the attempt.
    lost: AtomicBool,
    stop: Mutex<bool>,
    stopped: Condvar,
}

pub struct LeaseKeeper {
    recorder: Recorder,
    claim: Claim,
    signals: Arc<RenewalSignals>,
    thread: Option<JoinHandle<()>>,
    /// Expires when the analysis must end. `None` with SQLite, where the lock on the run directory counts.
    timer: Option<BootTimer>,
    wake_event: WakeEvent,
    /// Readable if one of the two above is, or the runner's own control descriptor.
    wait_set: OwnedFd,
}

/// Why the analysis should end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndCause {
    Cancelled,
    LeaseLost,
}

impl LeaseKeeper {
    /// Starts the thread for a lease that was renewed at `since` (see [`boot_time`]). `worker` is the file that the worker
    /// keeps locked. `control_fd` is polled as well.
    pub fn start(
        recorder: Recorder,
        claim: Claim,
        worker: PathBuf,
        since: Duration,
        control_fd: BorrowedFd<'_>,
    ) -> io::Result<LeaseKeeper> {
        let wake_event = WakeEvent::new()?;
        // A SQLite database belongs to one machine, where a lock shows whether a runner lives.
        let timer = match recorder.location {
            Location::Postgres(_) => {
                let timer = BootTimer::new()?;
                timer.expire_at(since + kill_after(claim.lease_ms))?;
                Some(timer)
            }
            _ => None,
        };
        let fds = [wake_event.as_fd(), control_fd].into_iter();
        let wait_set = events::any_of(fds.chain(timer.as_ref().map(AsFd::as_fd)))?;
        let signals = Arc::new(RenewalSignals::default());
        let renewal = RenewalThread {
            recorder: recorder.new_connection(),
            claim: claim.clone(),
            worker,
            timer: timer.clone(),
            wake_event: wake_event.clone(),
            signals: signals.clone(),
            renewed: since,
            cancel_reported: false,
        };
        let thread = std::thread::Builder::new()
            .name("lease-renewal".into())
            .spawn(move || renewal.run())?;
        Ok(LeaseKeeper {
            recorder,
            claim,
            signals,
            thread: Some(thread),
            timer,
            wake_event,
            wait_set,
        })
    }

    pub fn end_cause(&self) -> Option<EndCause> {
        if self.timer.as_ref().is_some_and(BootTimer::take_expired) {
            // Nobody moves the timer after this, so the lease stays lost.
            self.signals.lost.store(true, Ordering::SeqCst);
        }
        self.wake_event.clear();
        if self.signals.lost.load(Ordering::SeqCst) {
            return Some(EndCause::LeaseLost);
        }
        let cancel = self.signals.cancel.swap(false, Ordering::SeqCst);
        cancel.then_some(EndCause::Cancelled)
    }

    /// Whether somebody has cancelled the analysis, as far as the database answers right now.
    pub fn is_cancelled(&mut self) -> bool {
        if self.signals.was_cancelled.load(Ordering::SeqCst) {
            return true;
        }
        let (held, lease_ms) = (self.claim.leased_attempt(), self.claim.lease_ms);
        let answer = self
            .recorder
            .with(|store| store.renew_lease(&held, lease_ms));
        self.recorder.disconnect();
        matches!(answer, Ok(RenewOutcome::CancelRequested { .. }))
    }

    pub fn is_lost(&self) -> bool {
        self.signals.lost.load(Ordering::SeqCst)
    }
}

impl AsFd for LeaseKeeper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wait_set.as_fd()
    }
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        *self
            .signals
            .stop
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.signals.stopped.notify_all();
        // The thread may hang in a call to a server, and everything is done, so do not join it.
        drop(self.thread.take());
    }
}

struct RenewalThread {
    recorder: Recorder,
    claim: Claim,
    /// The file that the worker keeps locked while it lives. A live worker forwards cancellations at once.
    worker: PathBuf,
    timer: Option<BootTimer>,
    wake_event: WakeEvent,
    signals: Arc<RenewalSignals>,
    renewed: Duration,
    /// The cancellation was reported to the runner.
    cancel_reported: bool,
}

impl RenewalThread {
    fn run(mut self) {
        let mut tried = self.renewed;
        while !self.wait_or_stop() {
            let due = boot_time().saturating_sub(tried)
                >= renew_every(self.claim.lease_ms, &self.recorder.location);
            if due {
                tried = boot_time();
                self.renew(tried);
            } else if !is_worker_alive(&self.worker) {
                // Without a worker nobody else forwards a cancellation.
                self.check_cancel();
            }
            if self.signals.lost.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    fn renew(&mut self, asked: Duration) {
        let (held, lease_ms) = (self.claim.leased_attempt(), self.claim.lease_ms);
        let answer = self
            .recorder
            .with(|store| store.renew_lease(&held, lease_ms));
        self.recorder.disconnect();
        tracing::debug!(id = ?self.claim.id, answer = ?answer.as_ref().ok(), "renew the lease");
        match answer {
            Ok(RenewOutcome::Renewed) => self.note_renewal(asked),
            Ok(RenewOutcome::CancelRequested { .. }) => {
                self.note_renewal(asked);
                self.report_cancel();
            }
            Ok(RenewOutcome::Lost) => {
                self.signals.lost.store(true, Ordering::SeqCst);
                self.wake_event.signal();
            }
            // The database is unavailable for now. The timer runs.
            Err(_) => {}
        }
    }

    fn check_cancel(&mut self) {
        if self.cancel_reported {
            return;
        }
        let (host, key) = (home::machine_id(), self.claim.key.clone());
        let cancels = self.recorder.with(|store| store.requested_cancels(&host));
        self.recorder.disconnect();
        if cancels.is_ok_and(|cancels| cancels.iter().any(|(_, _, other)| *other == key)) {
            self.report_cancel();
        }
    }

    /// Reports a cancellation once. If the program ignores it, the grace timer kills it.
    fn report_cancel(&mut self) {
        if !std::mem::replace(&mut self.cancel_reported, true) {
            self.signals.cancel.store(true, Ordering::SeqCst);
            self.signals.was_cancelled.store(true, Ordering::SeqCst);
            self.wake_event.signal();
        }
    }

    /// The lease counts from before the call, because the answer may have taken long.
    fn note_renewal(&mut self, asked: Duration) {
        self.renewed = asked;
        if let Some(timer) = &self.timer {
            // If the kernel refuses, the timer expires at the earlier time.
            let _ = timer.expire_at(asked + kill_after(self.claim.lease_ms));
        }
    }

    /// Waits for a moment. True if the runner is done and the thread must end.
    fn wait_or_stop(&self) -> bool {
        let stop = self
            .signals
            .stop
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .signals
            .stopped
            .wait_timeout_while(stop, CHECK_EVERY, |stop| !*stop);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn is_worker_alive(lock: &Path) -> bool {
    slot::is_locked(lock)
}
