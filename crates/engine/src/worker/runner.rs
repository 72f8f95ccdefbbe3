//! The runner: makes one attempt that a worker has claimed, from its request in the queue to its record.
//!
//! The worker starts the runner's process with its order as standard input (`slot`). The runner may outlive the worker.
//! What it cannot finish stays where the next worker finds it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sandbox::cgroup::OwnProcess;
use sandbox::events::{self, SignalQueue, boot_time};
use sandbox::supervise::{Control, Stream};

use super::lease_renewal::{EndCause, LeaseKeeper};
use super::slot::{self, RunnerOrder};
use crate::attempt::context::{Claim, RunContext, WorkspaceSource};
use crate::attempt::error::{AttemptError, CommitError};
use crate::attempt::fail::StartFailure;
use crate::attempt::log_capture::OutputChunk;
use crate::attempt::observer::{CancelCause, RunObserver};
use crate::attempt::record::Reason;
use crate::attempt::recorder::Recorder;
use crate::attempt::release::CompletedRun;
use crate::attempt::systemd_scope;
use crate::home::Home;
use crate::pipeline;
use crate::plan::PlanError;
use crate::plan::limits::error_chain;
use crate::recovery::reaper;
use crate::recovery::run_dirs::{self, RunDirInfo};
use crate::request::bundle::{self, BundleError};
use crate::request::{QueueWriters, RequestOrigin};
use crate::run_dir;
use crate::settings::{ConfigError, Request, ReservedCapacity, WorkerSettings};
use store::types::submission::{Submission, SubmissionError};

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// A process that a worker started, with its order.
pub struct Runner {
    order: RunnerOrder,
    /// Holds the lock of the slot.
    order_file: OwnedFd,
    signals: SignalQueue,
}

/// How a runner leaves its attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunnerResult {
    /// Committed, or ended in the database in another way.
    Complete,
    /// Ended in the database, because this machine could not start it.
    NotStarted,
    /// Something in this home has to be finished later.
    Unfinished,
}

/// Why a runner could not end its attempt. The worker finishes what it left.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// The signals to the runner could not be blocked.
    #[error("listen for signals")]
    Signals(#[source] io::Error),
    /// The worker's order could not be received on standard input.
    #[error("read the order from standard input")]
    Order(#[source] io::Error),
    /// The renewal of the lease could not be started.
    #[error("hold the lease")]
    Lease(#[source] io::Error),
    /// Nothing ran, and that could not be recorded.
    #[error("{message}; and {}", error_chain(.database))]
    NotRecorded {
        /// Why nothing ran.
        message: String,
        /// Why it could not be recorded.
        database: Box<CommitError>,
    },
    /// The order of the ended attempt could not be removed from the slot.
    #[error("clear the order")]
    ClearOrder(#[source] io::Error),
}

/// Why there is nothing to run.
#[derive(Debug, thiserror::Error)]
enum PrepareError {
    #[error("read the submission")]
    Submission(#[source] SubmissionError),
    #[error("lay out the inputs")]
    MakeDirectory(#[source] io::Error),
    #[error("lay out the inputs")]
    Inputs(#[source] BundleError),
    #[error(transparent)]
    Settings(#[from] ConfigError),
}

impl PrepareError {
    /// `Refused` if the submission is invalid on every machine and at any time.
    fn reason(&self) -> Reason {
        match self {
            PrepareError::MakeDirectory(_) => Reason::NotStarted,
            // A failure of the database or the disk, which may pass.
            PrepareError::Inputs(BundleError::Fetch { .. }) => Reason::NotStarted,
            PrepareError::Inputs(BundleError::LayOut { source, .. })
                if *source != Errno::NAMETOOLONG =>
            {
                Reason::NotStarted
            }
            _ => Reason::Refused,
        }
    }
}

impl Runner {
    /// Makes this process the runner of the order on its standard input.
    pub fn from_stdin() -> Result<Runner, RunnerError> {
        // Block signals first: as soon as the pid of this process is known, somebody may signal it to stop.
        let signals = SignalQueue::block(&[SIGHUP, SIGINT, SIGTERM]);
        let signals = signals.map_err(RunnerError::Signals)?;
        let (order, order_file) = slot::receive_order().map_err(RunnerError::Order)?;
        // Move to a scope of the runner's own before anything else starts: the worker's scope may be stopped. Without
        // systemd there is nothing to move to, so ignore a failure.
        let _ = systemd_scope::ensure_own_scope();
        Ok(Runner {
            order,
            order_file,
            signals,
        })
    }

    /// Makes the attempt. The recorder is that of the settings.
    pub fn run(
        self,
        settings: &WorkerSettings,
        home: &Home,
        mut recorder: Recorder,
    ) -> Result<RunnerResult, RunnerError> {
        recorder.wait_long_for_locks();
        let (claim, worker) = (self.order.claim.clone(), self.order.worker.clone());
        let (since, signals) = (boot_time(), self.signals.as_fd());
        let lease_keeper =
            LeaseKeeper::start(recorder.new_connection(), claim, worker, since, signals)
                .map_err(RunnerError::Lease)?;
        let mut observer = RunnerObserver {
            signals: self.signals,
            lease_keeper,
            signalled: false,
        };
        let result = make_attempt(&self.order, settings, home, &mut recorder, &mut observer);
        drop(observer);
        let inputs = self.order.inputs_dir();
        let inputs_removed = std::fs::remove_dir_all(&inputs).is_ok() || !inputs.exists();
        let is_over = matches!(
            result,
            Ok(RunnerResult::Complete | RunnerResult::NotStarted)
        );
        if inputs_removed && is_over {
            // Clear the order, so that the worker need not look for leftovers.
            slot::clear_order(&self.order_file).map_err(RunnerError::ClearOrder)?;
        }
        result
    }
}

fn make_attempt(
    order: &RunnerOrder,
    settings: &WorkerSettings,
    home: &Home,
    recorder: &mut Recorder,
    observer: &mut RunnerObserver,
) -> Result<RunnerResult, RunnerError> {
    let claim = &order.claim;
    let request = match prepare(order, settings, recorder) {
        Ok(request) => request,
        Err(e) => return record_failure(claim, recorder, e.reason(), &error_chain(&e)),
    };
    remove_earlier_attempts(home, recorder, claim, observer);
    let context = RunContext {
        own_process: OwnProcess::MayMove,
        claimed: Some(claim.clone()),
        // A queued attempt never runs in a workspace that somebody prepared.
        workspace_source: WorkspaceSource::Fresh,
        ..RunContext::new(home.clone(), &settings.record)
    };
    let is_here = || run_dir::attempt_exists(home, &claim.id, claim.attempt);
    match run_with_retries(&request, &context, recorder, observer) {
        Err(StartFailure {
            error,
            record: Some(_),
        }) if !error.is_refusal() && !is_here() => Ok(RunnerResult::NotStarted),
        // The database lists the attempt as running, and this home has nothing of it.
        Err(StartFailure {
            error,
            record: None,
        }) => {
            let (reason, message) = match &error {
                AttemptError::Plan(PlanError::Runtime(_)) if is_from_others(&request) => {
                    (Reason::NotFound, COMMAND_NOT_AVAILABLE.to_owned())
                }
                error if error.is_refusal() => (Reason::Refused, error_chain(error)),
                error => (error.status_and_reason().1, error_chain(error)),
            };
            record_failure(claim, recorder, reason, &message)
        }
        _ if is_here() => Ok(RunnerResult::Unfinished),
        _ => Ok(RunnerResult::Complete),
    }
}

/// Runs the attempt. Tries again if nothing has begun, the attempt is still claimed and the database is only away for a
/// moment, so that a restarted database does not cost a retry.
fn run_with_retries(
    request: &Request,
    context: &RunContext,
    recorder: &mut Recorder,
    observer: &mut RunnerObserver,
) -> Result<CompletedRun, StartFailure> {
    let asked = boot_time();
    let may_pass = |error: &AttemptError| match error {
        AttemptError::Commit(e) => e.is_transient(),
        _ => false,
    };
    loop {
        let ran = pipeline::run(request, context, Some(recorder), observer);
        match &ran {
            Err(StartFailure {
                error,
                record: None,
            }) if may_pass(error)
                && !observer.is_stop_requested()
                && boot_time() - asked < RETRY_WITHIN =>
            {
                std::thread::sleep(LOOK_AGAIN * 10);
            }
            _ => return ran,
        }
    }
}

/// The message for submissions of other users. The real error would reveal which files exist where not everybody may
/// look, who may execute them, and the worker's PATH.
const COMMAND_NOT_AVAILABLE: &str = "the command, or an interpreter that it needs, is not on the worker's machine for everybody to execute";

fn is_from_others(request: &Request) -> bool {
    matches!(request.asked_by, RequestOrigin::Queue { writers, .. } if writers == QueueWriters::OtherUsers)
}

fn prepare(
    order: &RunnerOrder,
    settings: &WorkerSettings,
    recorder: &mut Recorder,
) -> Result<Request, PrepareError> {
    let submission = Submission::read(&order.request, order.claim.id.as_str())
        .map_err(PrepareError::Submission)?;
    let staged = order.inputs_dir();
    stage_inputs(&submission, &staged, recorder)?;
    let request = settings.request(&submission, &staged)?;
    Ok(request.within_reservation(ReservedCapacity {
        memory_bytes: order.memory_bytes,
        cpu_milli: order.cpu_milli,
        cpu_milli_max: order.cpu_milli_max,
    })?)
}

/// Puts the submitted files into the directory, from the database.
fn stage_inputs(
    submission: &Submission,
    staged: &Path,
    recorder: &mut Recorder,
) -> Result<(), PrepareError> {
    // A runner that died may have left the directory.
    let _ = std::fs::remove_dir_all(staged);
    let dir = make_directory(staged).map_err(PrepareError::MakeDirectory)?;
    let deadline = Instant::now() + RETRY_WITHIN;
    let staged_inputs = bundle::lay_out(submission, dir.as_fd(), &mut |hash| {
        loop {
            match recorder.with(|store| store.submitted_file(hash)) {
                Err(e) if e.is_transient() && Instant::now() < deadline => {
                    std::thread::sleep(LOOK_AGAIN * 10);
                }
                answer => return Ok(answer?),
            }
        }
    });
    staged_inputs.map_err(PrepareError::Inputs)
}

fn make_directory(path: &Path) -> io::Result<OwnedFd> {
    rustix::fs::mkdir(path, Mode::RWXU)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// How long to retry: until an earlier attempt is cleaned up, or the database is back.
const RETRY_WITHIN: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Removes what earlier attempts of the same analysis left, also a workspace that was kept, because all attempts of an
/// analysis use one workspace path. Does not touch a directory of another database with the same id; that directory
/// stops this attempt.
fn remove_earlier_attempts(
    home: &Home,
    recorder: &mut Recorder,
    claim: &Claim,
    observer: &mut RunnerObserver,
) {
    if !run_dirs::has_any(home, &claim.id) {
        return;
    }
    let Ok(database) = recorder.store().map(|store| store.id().to_owned()) else {
        return;
    };
    let is_ours = |run_dir: &RunDirInfo| {
        let plan = run_dir.record.commit_plan.as_ref();
        plan.is_some_and(|plan| plan.database_id == database)
            && run_dir.record.attempt < claim.attempt
    };
    let deadline = Instant::now() + RETRY_WITHIN;
    loop {
        let run_dir = run_dirs::list_analysis(home, &claim.id);
        if run_dir.is_empty() || !run_dir.iter().all(is_ours) || Instant::now() >= deadline {
            return;
        }
        reaper::reap_one(home, recorder, &claim.id);
        reaper::reap_kept(home, Some(recorder), Some(claim.id.as_str()));
        if !run_dirs::has_any(home, &claim.id) || observer.is_stop_requested() {
            return;
        }
        // Its runner or a reaper is at work, and neither sends an event. Poll.
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// The bound of a recorded message. A submitter may have written most of its text.
const MESSAGE_CHARS_MAX: usize = 4_000;

/// Ends the attempt in the database: nothing of it ran.
fn record_failure(
    claim: &Claim,
    recorder: &mut Recorder,
    reason: Reason,
    message: &str,
) -> Result<RunnerResult, RunnerError> {
    let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
    // The attempt's own runner ends it.
    let lost = claim.lost_attempt(&claim.key, reason, &message);
    // Retry while the database is away for a moment. After that the worker ends the attempt, with a shorter message.
    let deadline = Instant::now() + RETRY_WITHIN;
    loop {
        match recorder.with(|store| store.give_up(&lost)) {
            Ok(_) if reason == Reason::NotStarted => return Ok(RunnerResult::NotStarted),
            Ok(_) => return Ok(RunnerResult::Complete),
            Err(database) if Instant::now() >= deadline => {
                let database = Box::new(database);
                return Err(RunnerError::NotRecorded { message, database });
            }
            Err(_) => std::thread::sleep(LOOK_AGAIN * 20),
        }
    }
}

/// The observer of a queued run. It prints nothing; the output is in the run directory. Requests to stop come from the worker, from
/// `fumehood cancel` and from the database.
struct RunnerObserver {
    signals: SignalQueue,
    lease_keeper: LeaseKeeper,
    /// Whether a signal asked this process to stop, from `fumehood cancel` or a shutdown of the machine.
    signalled: bool,
}

impl RunnerObserver {
    /// Whether somebody asks to stop before the program has started. The request stays queued and is read again later.
    fn is_stop_requested(&self) -> bool {
        events::is_readable(&self.lease_keeper)
    }
}

impl RunObserver for RunnerObserver {
    fn output(&mut self, _: Stream, _: OutputChunk<'_>) {}

    fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.lease_keeper.as_fd())
    }

    fn next_control(&mut self) -> Option<Control> {
        match self.lease_keeper.end_cause() {
            Some(EndCause::LeaseLost) => return Some(Control::Kill),
            Some(EndCause::Cancelled) => return Some(Control::Cancel),
            None => {}
        }
        // The worker, the database and `fumehood cancel` may all pass on the same request. Only SIGINT asks to kill at
        // once.
        match self.signals.take()? {
            SIGINT => Some(Control::Kill),
            _ => {
                self.signalled = true;
                Some(Control::Cancel)
            }
        }
    }

    fn cancel_cause(&mut self) -> CancelCause {
        match (self.lease_keeper.is_lost(), self.signalled) {
            (true, _) => CancelCause::LeaseLost,
            (false, true) if !self.lease_keeper.is_cancelled() => CancelCause::RunnerStopped,
            (false, _) => CancelCause::Requested,
        }
    }
}
