//! `fumehood __runner`: one attempt that a worker has claimed, from its request in the queue to its record.
//!
//! Started by the worker with its order as standard input (analysis, `worker/slot.rs`). It outlives the worker if need
//! be; what it could not do is left where the next worker finds it.

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
    self, AttemptError, CancelCause, ClaimedAttempt, RunContext, RunObserver, StartFailure,
    WorkspaceSource,
};
use engine::plan::PlanError;
use engine::plan::limits::error_chain;
use engine::plan::runtime::CallerEnvironment;
use engine::recovery::reaper;
use engine::request::bundle::{self, BundleError};
use engine::request::{QueueWriters, RequestOrigin, RequestedLimit};
use engine::run_dir;
use engine::worker::lease_renewal::{self, AttemptLease, EndCause, LeaseKeeper};
use engine::worker::slot::{self, RunnerOrder};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sandbox::spec::Terminal;
use sandbox::supervise::{Control, Stream};
use store::types::submission::Submission;
use store::{LossProof, LostAttempt};

use super::args::StoreArgs;
use super::standing::{self, Standing};
use super::{exit, ledger, show};
use crate::config::{self, Resolved, Sources};

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
    // First: from the moment that our number is known somebody may tell us to end.
    let hearing = Hearing::new()?;
    let (order, held) = slot::receive_order().context("read the order from standard input")?;
    // Before anything else is started: a scope beside the worker's, which may be stopped.
    let _where_we_are = engine::attempt::systemd_scope::ensure_own_scope();
    let (home, mut ledger) = ledger::open(&args.store)?;
    ledger.wait_long_for_locks();
    let since = lease_renewal::now();
    let lease = AttemptLease {
        id: order.id.to_string(),
        attempt: order.attempt,
        key: order.key.clone(),
        lease_ms: order.lease_ms,
        worker: order.worker.clone(),
    };
    let heart = LeaseKeeper::start(
        ledger.new_connection(),
        lease,
        since,
        hearing.signals.as_fd(),
    )
    .context("hold the lease")?;
    let mut ears = Ears {
        hearing,
        heart,
        signalled: false,
    };
    let finished = attempt(args, &order, &home, &mut ledger, &mut ears);
    drop(ears);
    if let Err(e) = &finished {
        show::error(e);
    }
    if std::fs::remove_dir_all(order.inputs_dir()).is_ok() || !order.inputs_dir().exists() {
        // The worker need not look whether anything is left to be done.
        if matches!(finished, Ok(Finished::Entirely | Finished::WithoutStart)) {
            slot::clear_order(&held).context("clear the order")?;
        }
    }
    Ok(match finished {
        Ok(Finished::Entirely | Finished::Later) => 0,
        // Nothing ran: the worker takes note, since it may be the machine's fault.
        Ok(Finished::WithoutStart) | Err(_) => exit::COULD_NOT_RUN,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finished {
    /// Committed, or ended in the database some other way.
    Entirely,
    /// The same, and this machine could not start it.
    WithoutStart,
    /// Something stands in this home that is to be finished later.
    Later,
}

fn attempt(
    args: &RunnerArgs,
    order: &RunnerOrder,
    home: &Home,
    ledger: &mut Recorder,
    ears: &mut Ears,
) -> anyhow::Result<Finished> {
    let resolved = match prepare(args, order, ledger) {
        Ok(resolved) => resolved,
        Err(Unprepared::Refused(e)) => return give_up(order, ledger, Reason::Refused, &e),
        Err(Unprepared::Failed(e)) => return give_up(order, ledger, Reason::NotStarted, &e),
    };
    clear_the_way(home, ledger, order, ears);
    let around = RunContext {
        home: home.clone(),
        caller: CallerEnvironment::from_process(),
        launcher: PathBuf::from("/proc/self/exe"),
        terminal: Terminal::None,
        required_layers: resolved.required_layers.clone(),
        workspace_source: WorkspaceSource::Fresh,
        free_reserve_bytes: resolved.record.free_reserve_bytes,
        store_quota_bytes: resolved.record.store_quota_bytes,
        claimed: Some(ClaimedAttempt {
            attempt: order.attempt,
            key: order.key.clone(),
            database_id: order.database_id.clone(),
            lease_ms: order.lease_ms,
        }),
    };
    let asked = lease_renewal::now();
    let ran = loop {
        let ran = pipeline::run(&resolved.request, &around, Some(ledger), ears);
        let waits = |error: &AttemptError| match error {
            AttemptError::Commit(e) => e.is_transient(),
            _ => false,
        };
        match &ran {
            // Nothing was begun, and the attempt is still ours: a database that is restarted costs nobody a try.
            Err(StartFailure {
                error,
                record: None,
            }) if waits(error)
                && !ears.is_told()
                && lease_renewal::now() - asked < WAY_CLEAR_WITHIN =>
            {
                std::thread::sleep(LOOK_AGAIN * 10);
            }
            _ => break ran,
        }
    };
    match ran {
        Ok(_) => {}
        Err(StartFailure {
            error,
            record: Some(_),
        }) => {
            if !error.is_refusal() && !run_dir::attempt_exists(home, &order.id, order.attempt) {
                return Ok(Finished::WithoutStart);
            }
        }
        // The database has it as running, and nothing of it is here.
        Err(StartFailure {
            error,
            record: None,
        }) => {
            if let (true, AttemptError::Plan(PlanError::Runtime(_))) =
                (is_strangers(&resolved), &error)
            {
                return give_up(
                    order,
                    ledger,
                    Reason::NotFound,
                    &anyhow::anyhow!(NOT_FOR_STRANGERS),
                );
            }
            let reason = match error.is_refusal() {
                true => Reason::Refused,
                false => error.status_and_reason().1,
            };
            return give_up(order, ledger, reason, &anyhow::Error::new(error));
        }
    }
    Ok(
        match run_dir::attempt_exists(home, &order.id, order.attempt) {
            true => Finished::Later,
            false => Finished::Entirely,
        },
    )
}

/// Whether a program is there, or could be executed, by whom and why not: a stranger would learn from that what is where not
/// everybody may look, and the worker's PATH.
const NOT_FOR_STRANGERS: &str = "the command, or an interpreter that it needs, is not on the worker's machine for everybody to execute";

fn is_strangers(resolved: &Resolved) -> bool {
    let asked_by = &resolved.request.asked_by;
    matches!(asked_by, RequestOrigin::Queue { writers, .. } if *writers == QueueWriters::OtherUsers)
}

/// Why there is nothing to be run.
enum Unprepared {
    /// It will be the same wherever and whenever it is tried.
    Refused(anyhow::Error),
    Failed(anyhow::Error),
}

fn prepare(
    args: &RunnerArgs,
    order: &RunnerOrder,
    ledger: &mut Recorder,
) -> Result<Resolved, Unprepared> {
    let submission = Submission::read(&order.request, order.id.as_str())
        .context("read the submission")
        .map_err(Unprepared::Refused)?;
    let staged = order.inputs_dir();
    lay_out(&submission, &staged, ledger)?;
    let sources = Sources::from_process().map_err(|e| Unprepared::Failed(e.into()))?;
    let resolved = config::queued(&submission, &staged, &args.store, &sources);
    let mut resolved = resolved.map_err(|e| Unprepared::Refused(e.into()))?;
    // What it asks for is what the worker counted for it, whatever else the queue said of it.
    let more = |asked: Option<RequestedLimit<u64>>, counted: u64| {
        asked.is_some_and(|asked| asked.explicit && asked.value > counted)
    };
    let asked = &resolved.request.limits;
    if more(asked.memory_bytes, order.memory_bytes) || more(asked.cpu_milli, order.cpu_milli) {
        let why = "it asks for more memory or CPUs than it was queued with";
        return Err(Unprepared::Refused(anyhow::anyhow!(why)));
    }
    // What it did not ask for is what the worker counted for it, or all that the worker has.
    let limits = &mut resolved.request.limits;
    let counted = |value| RequestedLimit {
        value,
        explicit: false,
    };
    let least = |asked: &mut Option<RequestedLimit<u64>>, value: u64| match asked {
        Some(asked) if asked.explicit => {}
        Some(asked) => asked.value = asked.value.min(value),
        None => *asked = Some(counted(value)),
    };
    least(&mut limits.memory_bytes, order.memory_bytes);
    least(&mut limits.cpu_milli, order.cpu_milli_max);
    Ok(resolved)
}

fn lay_out(
    submission: &Submission,
    staged: &Path,
    ledger: &mut Recorder,
) -> Result<(), Unprepared> {
    let failed = |e: anyhow::Error| Unprepared::Failed(e.context("lay out the inputs"));
    let _left_by_a_dead_one = std::fs::remove_dir_all(staged);
    let dir = make_directory(staged).map_err(|e| failed(e.into()))?;
    let deadline = Instant::now() + WAY_CLEAR_WITHIN;
    let laid_out = bundle::lay_out(submission, dir.as_fd(), &mut |hash| {
        loop {
            match ledger.with(|store| store.submitted_file(hash)) {
                Err(e) if e.is_transient() && Instant::now() < deadline => {
                    std::thread::sleep(LOOK_AGAIN * 10);
                }
                answer => return Ok(answer?),
            }
        }
    });
    laid_out.map_err(|e| match e {
        // The database's, or the disk's.
        BundleError::Fetch { .. } => failed(e.into()),
        BundleError::LayOut { source, .. } if source != Errno::NAMETOOLONG => failed(e.into()),
        e => Unprepared::Refused(anyhow::Error::new(e).context("lay out the inputs")),
    })
}

fn make_directory(path: &Path) -> std::io::Result<OwnedFd> {
    rustix::fs::mkdir(path, Mode::RWXU)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// How long the attempt before this one may take to be cleaned up.
const WAY_CLEAR_WITHIN: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// An earlier attempt of the same analysis has the same workspace: what is left of it goes first, also one that was kept for
/// somebody to look at. What is another's, by the same id, is not touched, and stops this attempt.
fn clear_the_way(home: &Home, ledger: &mut Recorder, order: &RunnerOrder, ears: &mut Ears) {
    if !standing::any_of(home, &order.id) {
        return;
    }
    let Ok(database) = ledger.store().map(|store| store.id().to_owned()) else {
        return;
    };
    let is_ours = |standing: &Standing| {
        let task = standing.record.commit_plan.as_ref();
        task.is_some_and(|task| task.database_id == database)
            && standing.record.attempt < order.attempt
    };
    let deadline = Instant::now() + WAY_CLEAR_WITHIN;
    loop {
        let standing = standing::of_id(home, &order.id);
        if standing.is_empty() || !standing.iter().all(is_ours) || Instant::now() >= deadline {
            return;
        }
        reaper::reap_one(home, ledger, &order.id);
        reaper::reap_kept(home, Some(ledger), Some(order.id.as_str()));
        if !standing::any_of(home, &order.id) || ears.is_told() {
            return;
        }
        // Its runner, or a reaper, is at it: there is nothing to wait on but time.
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// A submitter may have written most of it.
const MESSAGE_CHARS_MAX: usize = 4_000;

/// Ends the attempt in the database: nothing of it ran.
fn give_up(
    order: &RunnerOrder,
    ledger: &mut Recorder,
    reason: Reason,
    error: &anyhow::Error,
) -> anyhow::Result<Finished> {
    let message: String = format!("{error:#}")
        .chars()
        .take(MESSAGE_CHARS_MAX)
        .collect();
    let lost = LostAttempt {
        id: order.id.as_str(),
        attempt: order.attempt,
        key: &order.key,
        // Its own end.
        by: &order.key,
        reason: reason.as_str(),
        message: &message,
        proof: LossProof::RunnerGone,
    };
    // A database that is away for a moment is asked again; then the worker does it, with fewer words.
    let deadline = Instant::now() + WAY_CLEAR_WITHIN;
    loop {
        match ledger.with(|store| store.give_up(&lost)) {
            Ok(_) if reason == Reason::NotStarted => return Ok(Finished::WithoutStart),
            Ok(_) => return Ok(Finished::Entirely),
            Err(e) if Instant::now() >= deadline => {
                anyhow::bail!("{message}; and {}", error_chain(&e))
            }
            Err(_) => std::thread::sleep(LOOK_AGAIN * 20),
        }
    }
}

struct Hearing {
    signals: OwnedFd,
}

impl Hearing {
    fn new() -> anyhow::Result<Hearing> {
        let wanted = [SIGHUP, SIGINT, SIGTERM];
        sandbox::block_signals(Some(&wanted)).context("block signals")?;
        let signals = sandbox::signal_fd(&wanted).context("listen for signals")?;
        Ok(Hearing { signals })
    }
}

/// Nobody watches: what it prints is in the run directory. Orders to stop come from the worker, from `fumehood cancel`, and
/// from the database.
struct Ears {
    hearing: Hearing,
    heart: LeaseKeeper,
    /// Somebody told this process to end, as whoever cancels does, and whoever shuts a machine down.
    signalled: bool,
}

impl Ears {
    /// Whether somebody wants the end before there is anything to be ended. What was heard is heard again.
    fn is_told(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.heart.as_fd(), PollFlags::IN)];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        matches!(poll(&mut fds, Some(&at_once)), Ok(1..))
    }
}

impl RunObserver for Ears {
    fn output(&mut self, _: Stream, _: OutputChunk<'_>) {}

    fn notice(&mut self, _: &str) {}

    fn progress(&mut self, _: CollectProgress) {}

    fn blocked_on(&self, _: Stream) -> Option<BorrowedFd<'_>> {
        None
    }

    fn unblocked(&mut self, _: Stream) {}

    fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.heart.as_fd())
    }

    fn next_control(&mut self) -> Option<Control> {
        match self.heart.end_cause() {
            Some(EndCause::LeaseLost) => return Some(Control::Kill),
            Some(EndCause::Cancelled) => return Some(Control::Cancel),
            None => {}
        }
        // The worker, the database and whoever cancels may all tell of the same wish. Only one who is impatient says so.
        match sandbox::read_signal(self.hearing.signals.as_fd())? {
            SIGINT => Some(Control::Kill),
            _ => {
                self.signalled = true;
                Some(Control::Cancel)
            }
        }
    }

    fn cancel_cause(&mut self) -> CancelCause {
        match (self.heart.is_lost(), self.signalled) {
            (true, _) => CancelCause::LeaseLost,
            (false, true) if !self.heart.is_cancelled() => CancelCause::RunnerStopped,
            (false, _) => CancelCause::Requested,
        }
    }
}
