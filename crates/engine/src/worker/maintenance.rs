//! Work that may take long, in threads: closes slots whose runner has ended, finishes what dead runners left, and gives
//! up attempts whose runners on other machines are lost.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sandbox::events::WakeEvent;

use super::error::WorkerError;
use super::event::WorkerEvent;
use super::slot::Slot;
use crate::attempt::context::Claim;
use crate::attempt::error::CommitError;
use crate::attempt::record::Reason;
use crate::attempt::recorder::Recorder;
use crate::home::Home;
use crate::plan::limits::error_chain;
use crate::recovery::reaper;
use crate::run_dir;
use store::types::analysis_id::AnalysisId;
use store::{ExpiredLease, LossProof, LostAttempt, State, WorkerRow as Row};

/// An attempt of another machine is given up if this worker has seen its lease expired for this long. If the database
/// was unavailable for everybody, the runner will renew the lease soon.
const EXPIRED_GRACE: Duration = Duration::from_secs(30);
/// For this long an attempt that has ended is left to its own machine, which has the outputs.
const COLLECTING_GRACE_MS: u64 = 15 * 60 * 1000;
const EXPIRED_BATCH_MAX: u32 = 1_000;
/// How often the worker ends (*parks*) requests that no worker is large enough for. This reads the whole queue, so it
/// is rare.
const PARK_EVERY: Duration = Duration::from_secs(60);

pub(super) enum MaintenanceJob {
    /// Close this slot, whose runner is dead.
    Close(usize, Slot),
    Sweep(SweepRequest),
}

/// What a sweep must know of the worker. This sweep finishes attempts of dead runners; the sweep of the artifact store
/// (`store::artifacts`) removes objects.
pub(super) struct SweepRequest {
    /// The keys of attempts whose runner is alive or whose slot is being closed.
    pub busy_keys: HashSet<String>,
    /// The worker's change count when it asked for the sweep.
    pub at: u64,
    pub row: Row,
    pub memory_default_bytes: u64,
    pub park_after_ms: u64,
}

pub(super) enum MaintenanceReport {
    /// The slot is free again, or could not be closed for this reason.
    Closed(usize, Result<Slot, (Slot, String)>),
    Swept {
        at: u64,
        result: SweepResult,
    },
    Event(WorkerEvent),
}

/// Whether a sweep finished everything that dead runners left in this home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SweepResult {
    Clean,
    /// Something is left, and the next sweep tries again.
    Unfinished,
}

/// Several slots are closed at the same time, because the post_process command may be slow.
const CLOSING_THREADS: usize = 4;

/// The threads, as the worker sees them: some close slots, one sweeps.
pub(super) struct Maintenance {
    closings: Sender<MaintenanceJob>,
    sweeps: Sender<MaintenanceJob>,
    reports: Receiver<MaintenanceReport>,
    wake_event: WakeEvent,
    threads: Vec<JoinHandle<()>>,
}

impl Maintenance {
    pub fn start(home: Home, recorder: Recorder) -> Result<Maintenance, WorkerError> {
        let wake_event = WakeEvent::new().map_err(WorkerError::Start)?;
        let (closings, to_close) = channel();
        let (sweeps, to_sweep) = channel();
        let (report_sender, reports) = channel();
        let (to_close, to_sweep) = (
            Arc::new(Mutex::new(to_close)),
            Arc::new(Mutex::new(to_sweep)),
        );
        let mut threads = Vec::new();
        for number in 0..=CLOSING_THREADS {
            let thread = MaintenanceThread {
                home: home.clone(),
                recorder: recorder.new_connection(),
                reports: report_sender.clone(),
                wake_event: wake_event.clone(),
                expired: HashMap::new(),
                next_park: Instant::now(),
                reported_problems: HashSet::new(),
            };
            let jobs = match number {
                0 => to_sweep.clone(),
                _ => to_close.clone(),
            };
            let started = std::thread::Builder::new()
                .name("maintenance".into())
                .spawn(move || thread.work(&jobs));
            threads.push(started.map_err(WorkerError::Start)?);
        }
        Ok(Maintenance {
            closings,
            sweeps,
            reports,
            wake_event,
            threads,
        })
    }

    pub fn submit(&self, job: MaintenanceJob) -> Result<(), WorkerError> {
        let sent = match job {
            MaintenanceJob::Close(..) => self.closings.send(job),
            MaintenanceJob::Sweep(_) => self.sweeps.send(job),
        };
        sent.map_err(|_| WorkerError::ThreadEnded)
    }

    /// The reports that arrived. Fails if a thread has ended: a thread ends only by a panic while the worker lives.
    pub fn take_reports(&self) -> Result<Vec<MaintenanceReport>, WorkerError> {
        self.wake_event.clear();
        match self.threads.iter().any(JoinHandle::is_finished) {
            true => Err(WorkerError::ThreadEnded),
            false => Ok(self.reports.try_iter().collect()),
        }
    }
}

impl AsFd for Maintenance {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake_event.as_fd()
    }
}

struct MaintenanceThread {
    home: Home,
    recorder: Recorder,
    reports: Sender<MaintenanceReport>,
    wake_event: WakeEvent,
    /// Since when this worker has seen which leases expired, by key. Contains only leases that still are.
    expired: HashMap<String, Instant>,
    next_park: Instant,
    /// Problems that were reported already.
    reported_problems: HashSet<String>,
}

impl MaintenanceThread {
    fn work(mut self, jobs: &Mutex<Receiver<MaintenanceJob>>) {
        // The lock is released before the job is done.
        let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        while let Ok(job) = next() {
            let report = match job {
                MaintenanceJob::Close(at, slot) => MaintenanceReport::Closed(at, self.close(slot)),
                MaintenanceJob::Sweep(sweep) => {
                    let result = self.sweep(&sweep);
                    MaintenanceReport::Swept {
                        at: sweep.at,
                        result,
                    }
                }
            };
            if self.send(report).is_none() {
                return;
            }
        }
    }

    /// `None`: the worker is gone.
    fn send(&self, report: MaintenanceReport) -> Option<()> {
        self.reports.send(report).ok()?;
        self.wake_event.signal();
        Some(())
    }

    fn send_event(&self, event: WorkerEvent) {
        // Without a worker nobody needs the event.
        let _ = self.send(MaintenanceReport::Event(event));
    }

    fn close(&mut self, mut slot: Slot) -> Result<Slot, (Slot, String)> {
        match self.try_close(&mut slot) {
            Ok(()) => Ok(slot),
            Err(why) => Err((slot, why)),
        }
    }

    fn try_close(&mut self, slot: &mut Slot) -> Result<(), String> {
        remove_inputs_dir(slot).map_err(|e| format!("remove {:?}: {e}", slot.inputs_dir()))?;
        if let Some(order) = slot.order().map_err(|e| e.to_string())? {
            self.finish_dead_runner(&order.claim)?;
        }
        slot.clear().map_err(|e| e.to_string())
    }

    /// The runner is dead. Finishes what it left, and gives up the attempt if that did not end it.
    fn finish_dead_runner(&mut self, claim: &Claim) -> Result<(), String> {
        let reaped = reaper::reap_one(&self.home, &mut self.recorder, &claim.id);
        for record in &reaped.finished {
            self.send_event(WorkerEvent::Recovered {
                id: record.id.to_string(),
                attempt: record.attempt,
                status: record.status,
            });
        }
        if run_dir::attempt_exists(&self.home, &claim.id, claim.attempt) {
            // The database is unavailable, or some process cannot be killed. The run directory keeps everything that is
            // needed, and the next sweep tries again.
            return Ok(());
        }
        let by = run_dir::new_attempt_key();
        let message = "its runner died before it began";
        let lost = claim.lost_attempt(&by, Reason::RunnerLost, message);
        let given_up = match self.recorder.with(|store| store.give_up(&lost)) {
            // The worker tries to close the slot again later.
            Err(e) if e.is_transient() => return Err(error_chain(&e)),
            // A repetition would fail in the same way, and the slot is needed. The attempt is given up when its lease
            // expires.
            Err(e) => {
                self.send_event(WorkerEvent::Problem(error_chain(&e)));
                false
            }
            Ok(given_up) => given_up,
        };
        if given_up {
            self.send_event(WorkerEvent::GivenUp {
                id: claim.id.to_string(),
                attempt: claim.attempt,
            });
        }
        Ok(())
    }

    fn sweep(&mut self, sweep: &SweepRequest) -> SweepResult {
        let reaped = reaper::reap(&self.home, Some(&mut self.recorder));
        for record in &reaped.finished {
            self.send_event(WorkerEvent::Recovered {
                id: record.id.to_string(),
                attempt: record.attempt,
                status: record.status,
            });
        }
        let result = match reaped.problems.is_empty() {
            true => SweepResult::Clean,
            false => SweepResult::Unfinished,
        };
        // Report each problem once for as long as it lasts.
        let problems: HashSet<String> = reaped.problems.into_iter().collect();
        for problem in problems.difference(&self.reported_problems) {
            self.send_event(WorkerEvent::Problem(problem.clone()));
        }
        self.reported_problems = problems;
        if let Err(e) = self.give_up_expired(sweep) {
            // What was seen before the database became unavailable says nothing about the leases.
            self.expired.clear();
            self.send_event(WorkerEvent::DatabaseUnavailable(error_chain(&e)));
            return SweepResult::Unfinished;
        }
        self.park(sweep);
        result
    }

    fn park(&mut self, sweep: &SweepRequest) {
        if self.next_park > Instant::now() {
            return;
        }
        self.next_park = Instant::now() + PARK_EVERY;
        let parked = self.recorder.with(|store| {
            store.park_unfit(&sweep.row, sweep.memory_default_bytes, sweep.park_after_ms)
        });
        for id in parked.unwrap_or_default() {
            self.send_event(WorkerEvent::Parked { id });
        }
    }

    fn give_up_expired(&mut self, sweep: &SweepRequest) -> Result<(), CommitError> {
        let expired = self
            .recorder
            .with(|store| store.expired_leases(EXPIRED_BATCH_MAX))?;
        // If the attempt has a directory here, the reaper finishes it: the lock shows whether its runner is alive.
        let is_elsewhere = |one: &&ExpiredLease| {
            let id = AnalysisId::new(&one.id);
            // A text that is not a valid id has no directory.
            let held = id.is_ok_and(|id| {
                run_dir::attempt_exists_with_key(&self.home, &id, one.attempt, &one.key)
            });
            !sweep.busy_keys.contains(&one.key) && !held
        };
        let expired: Vec<&ExpiredLease> = expired.iter().filter(is_elsewhere).collect();
        let still: HashSet<&str> = expired.iter().map(|one| one.key.as_str()).collect();
        self.expired.retain(|key, _| still.contains(key.as_str()));
        for one in expired {
            let since = *self
                .expired
                .entry(one.key.clone())
                .or_insert_with(Instant::now);
            let grace_is_over = match one.state {
                State::Collecting => one.expired_ms >= COLLECTING_GRACE_MS,
                _ => true,
            };
            if since.elapsed() < EXPIRED_GRACE || !grace_is_over {
                continue;
            }
            let by = run_dir::new_attempt_key();
            let lost = LostAttempt {
                id: &one.id,
                attempt: one.attempt,
                key: &one.key,
                by: &by,
                reason: Reason::RunnerLost.as_str(),
                message: "its runner did not renew its lease",
                proof: LossProof::LeaseExpired,
            };
            if self.recorder.with(|store| store.give_up(&lost))? {
                self.send_event(WorkerEvent::GivenUp {
                    id: one.id.clone(),
                    attempt: one.attempt,
                });
            }
        }
        Ok(())
    }
}

/// The runner created these files from the database, and no program ever had access to them, so no careful walk is
/// needed.
fn remove_inputs_dir(slot: &Slot) -> std::io::Result<()> {
    match std::fs::remove_dir_all(slot.inputs_dir()) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
