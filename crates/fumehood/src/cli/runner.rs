//! `fumehood __runner`: one attempt that a worker has claimed, from its request in the queue to its record.
//!
//! The worker starts it with its order as standard input (`engine::worker::slot`). The runner may outlive the worker.
//! What it cannot finish stays where the next worker finds it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use engine::attempt::log_capture::OutputChunk;
use engine::attempt::record::Reason;
use engine::attempt::recorder::Recorder;
use engine::collect::CollectProgress;
use engine::home::Home;
use engine::pipeline::{
    self, AttemptError, CancelCause, ClaimedAttempt, CompletedRun, RunContext, RunObserver,
    StartFailure, WorkspaceSource,
};
use engine::plan::PlanError;
use engine::plan::limits::error_chain;
use engine::plan::runtime::CallerEnvironment;
use engine::recovery::reaper;
use engine::request::bundle::{self, BundleError};
use engine::request::{QueueWriters, RequestOrigin};
use engine::run_dir;
use engine::worker::lease_renewal::{AttemptLease, EndCause, LeaseKeeper};
use engine::worker::slot::{self, RunnerOrder};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sandbox::cgroup::OwnProcess;
use sandbox::events::{self, SignalQueue, boot_time};
use sandbox::spec::Terminal;
use sandbox::supervise::{Control, Stream};
use store::types::submission::Submission;
use store::{LossProof, LostAttempt};

use super::args::StoreArgs;
use super::run_dirs::{self, RunDirInfo};
use super::{exit, messages, record_access};
use engine::settings::{RecordSettings, Request, ReservedCapacity, Sources, WorkerSettings};

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// Started by `fumehood worker`; not for people.
#[derive(Clone, Debug, clap::Args)]
pub struct RunnerArgs {
    #[command(flatten)]
    pub store: StoreArgs,
}

pub fn runner(args: &RunnerArgs) -> anyhow::Result<u8> {
    // Block signals first: as soon as the pid of this process is known, somebody may signal it to stop.
    let signals = SignalQueue::block(&[SIGHUP, SIGINT, SIGTERM]).context("listen for signals")?;
    let (order, held) = slot::receive_order().context("read the order from standard input")?;
    // Move to a scope of the runner's own before anything else starts: the worker's scope may be stopped. Without
    // systemd there is nothing to move to, so ignore a failure.
    let _ = engine::attempt::systemd_scope::ensure_own_scope();
    let settings = WorkerSettings::read(args.store.given_settings(), &Sources::from_process()?)?;
    let home = record_access::home()?;
    let mut recorder = record_access::open_required(&settings.record, &home)?;
    recorder.wait_long_for_locks();
    let since = boot_time();
    let lease = AttemptLease {
        id: order.id.to_string(),
        attempt: order.attempt,
        key: order.key.clone(),
        lease_ms: order.lease_ms,
        worker: order.worker.clone(),
    };
    let lease_keeper = LeaseKeeper::start(recorder.new_connection(), lease, since, signals.as_fd())
        .context("hold the lease")?;
    let mut observer = RunnerObserver {
        signals,
        lease_keeper,
        signalled: false,
    };
    let finished = run_attempt(&settings, &order, &home, &mut recorder, &mut observer);
    drop(observer);
    if let Err(e) = &finished {
        messages::error(e);
    }
    if std::fs::remove_dir_all(order.inputs_dir()).is_ok() || !order.inputs_dir().exists() {
        // Clear the order, so that the worker need not look for leftovers.
        if matches!(
            finished,
            Ok(RunnerResult::Complete | RunnerResult::NotStarted)
        ) {
            slot::clear_order(&held).context("clear the order")?;
        }
    }
    Ok(match finished {
        Ok(RunnerResult::Complete | RunnerResult::Unfinished) => 0,
        // Nothing ran. The worker counts such exits, because the machine may be at fault.
        Ok(RunnerResult::NotStarted) | Err(_) => exit::COULD_NOT_RUN,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunnerResult {
    /// Committed, or ended in the database in another way.
    Complete,
    /// Ended in the database, because this machine could not start it.
    NotStarted,
    /// Something in this home has to be finished later.
    Unfinished,
}

fn run_attempt(
    settings: &WorkerSettings,
    order: &RunnerOrder,
    home: &Home,
    recorder: &mut Recorder,
    observer: &mut RunnerObserver,
) -> anyhow::Result<RunnerResult> {
    let request = match prepare(settings, order, recorder) {
        Ok(request) => request,
        Err(PrepareError::Refused(e)) => {
            return record_failure(order, recorder, Reason::Refused, &e);
        }
        Err(PrepareError::Failed(e)) => {
            return record_failure(order, recorder, Reason::NotStarted, &e);
        }
    };
    remove_earlier_attempts(home, recorder, order, observer);
    let context = run_context(&settings.record, order, home);
    match run_with_retries(&request, &context, recorder, observer) {
        Ok(_) => {}
        Err(StartFailure {
            error,
            record: Some(_),
        }) => {
            if !error.is_refusal() && !run_dir::attempt_exists(home, &order.id, order.attempt) {
                return Ok(RunnerResult::NotStarted);
            }
        }
        // The database lists the attempt as running, and this home has nothing of it.
        Err(StartFailure {
            error,
            record: None,
        }) => {
            if let (true, AttemptError::Plan(PlanError::Runtime(_))) =
                (is_from_others(&request), &error)
            {
                return record_failure(
                    order,
                    recorder,
                    Reason::NotFound,
                    &anyhow::anyhow!(COMMAND_NOT_AVAILABLE),
                );
            }
            let reason = match error.is_refusal() {
                true => Reason::Refused,
                false => error.status_and_reason().1,
            };
            return record_failure(order, recorder, reason, &anyhow::Error::new(error));
        }
    }
    Ok(
        match run_dir::attempt_exists(home, &order.id, order.attempt) {
            true => RunnerResult::Unfinished,
            false => RunnerResult::Complete,
        },
    )
}

fn run_context(settings: &RecordSettings, order: &RunnerOrder, home: &Home) -> RunContext {
    RunContext {
        home: home.clone(),
        caller: CallerEnvironment::from_process(),
        launcher: PathBuf::from("/proc/self/exe"),
        terminal: Terminal::None,
        own_process: OwnProcess::MayMove,
        workspace_source: WorkspaceSource::Fresh,
        free_reserve_bytes: settings.free_reserve_bytes,
        store_quota_bytes: settings.store_quota_bytes,
        claimed: Some(ClaimedAttempt {
            attempt: order.attempt,
            key: order.key.clone(),
            database_id: order.database_id.clone(),
            lease_ms: order.lease_ms,
        }),
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
    let asked_by = &request.asked_by;
    matches!(asked_by, RequestOrigin::Queue { writers, .. } if *writers == QueueWriters::OtherUsers)
}

/// Why there is nothing to run.
enum PrepareError {
    /// The submission is invalid on every machine and at any time.
    Refused(anyhow::Error),
    Failed(anyhow::Error),
}

fn prepare(
    settings: &WorkerSettings,
    order: &RunnerOrder,
    recorder: &mut Recorder,
) -> Result<Request, PrepareError> {
    let submission = Submission::read(&order.request, order.id.as_str())
        .context("read the submission")
        .map_err(PrepareError::Refused)?;
    let staged = order.inputs_dir();
    stage_inputs(&submission, &staged, recorder)?;
    let reserved = ReservedCapacity {
        memory_bytes: order.memory_bytes,
        cpu_milli: order.cpu_milli,
        cpu_milli_max: order.cpu_milli_max,
    };
    let request = settings.request(&submission, &staged);
    request
        .and_then(|request| request.within_reservation(reserved))
        .map_err(|e| PrepareError::Refused(e.into()))
}

fn stage_inputs(
    submission: &Submission,
    staged: &Path,
    recorder: &mut Recorder,
) -> Result<(), PrepareError> {
    let failed = |e: anyhow::Error| PrepareError::Failed(e.context("lay out the inputs"));
    // A runner that died may have left the directory.
    let _ = std::fs::remove_dir_all(staged);
    let dir = make_directory(staged).map_err(|e| failed(e.into()))?;
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
    staged_inputs.map_err(|e| match e {
        // A failure of the database or the disk, which may pass.
        BundleError::Fetch { .. } => failed(e.into()),
        BundleError::LayOut { source, .. } if source != Errno::NAMETOOLONG => failed(e.into()),
        e => PrepareError::Refused(anyhow::Error::new(e).context("lay out the inputs")),
    })
}

fn make_directory(path: &Path) -> std::io::Result<OwnedFd> {
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
    order: &RunnerOrder,
    observer: &mut RunnerObserver,
) {
    if !run_dirs::has_any(home, &order.id) {
        return;
    }
    let Ok(database) = recorder.store().map(|store| store.id().to_owned()) else {
        return;
    };
    let is_ours = |run_dir: &RunDirInfo| {
        let task = run_dir.record.commit_plan.as_ref();
        task.is_some_and(|task| task.database_id == database)
            && run_dir.record.attempt < order.attempt
    };
    let deadline = Instant::now() + RETRY_WITHIN;
    loop {
        let run_dir = run_dirs::list_analysis(home, &order.id);
        if run_dir.is_empty() || !run_dir.iter().all(is_ours) || Instant::now() >= deadline {
            return;
        }
        reaper::reap_one(home, recorder, &order.id);
        reaper::reap_kept(home, Some(recorder), Some(order.id.as_str()));
        if !run_dirs::has_any(home, &order.id) || observer.is_stop_requested() {
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
    order: &RunnerOrder,
    recorder: &mut Recorder,
    reason: Reason,
    error: &anyhow::Error,
) -> anyhow::Result<RunnerResult> {
    let message: String = format!("{error:#}")
        .chars()
        .take(MESSAGE_CHARS_MAX)
        .collect();
    let lost = LostAttempt {
        id: order.id.as_str(),
        attempt: order.attempt,
        key: &order.key,
        // The attempt's own runner ends it.
        by: &order.key,
        reason: reason.as_str(),
        message: &message,
        proof: LossProof::RunnerGone,
    };
    // Retry while the database is away for a moment. After that the worker ends the attempt, with a shorter message.
    let deadline = Instant::now() + RETRY_WITHIN;
    loop {
        match recorder.with(|store| store.give_up(&lost)) {
            Ok(_) if reason == Reason::NotStarted => return Ok(RunnerResult::NotStarted),
            Ok(_) => return Ok(RunnerResult::Complete),
            Err(e) if Instant::now() >= deadline => {
                anyhow::bail!("{message}; and {}", error_chain(&e))
            }
            Err(_) => std::thread::sleep(LOOK_AGAIN * 20),
        }
    }
}

/// Observes a run that nobody watches: its output is in the run directory. Requests to stop come from the worker, from
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

    fn notice(&mut self, _: &str) {}

    fn progress(&mut self, _: CollectProgress) {}

    fn blocked_on(&self, _: Stream) -> Option<BorrowedFd<'_>> {
        None
    }

    fn unblocked(&mut self, _: Stream) {}

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
