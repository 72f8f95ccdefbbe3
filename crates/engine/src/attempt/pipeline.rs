//! One analysis from request to record, in order, on one screen: [`run`]. Read this file first.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use sandbox::quota::QuotaError;
use sandbox::spec::{Layer, Terminal};
use sandbox::supervise::{Control, RunError, Stream};

use crate::attempt::Attempt;
use crate::attempt::finalize::SettleError;
use crate::attempt::isolation::{self, Errand};
use crate::attempt::log_capture::{Captured, Live};
use crate::attempt::record::{Reason, Record, Status};
use crate::attempt::record_builder;
use crate::attempt::recorder::Ledger;
use crate::collect::{CollectError, GlobError, Progress};
use crate::home::{Home, HomeError};
use crate::plan::limits::{self, LimitError, Storage};
use crate::plan::runtime::Caller;
use crate::plan::{self, PolicyError, Private};
use crate::recovery::reaper;
use crate::request::{AnalysisId, Request};
use crate::workspace::WorkspaceError;
use crate::workspace::copy_in::CopyError;
use crate::workspace::uid_pool::LeaseError;
use store::types::crash_points::CrashPoint;
use store::types::timings;

#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error(transparent)]
    Lease(#[from] LeaseError),
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    #[error(transparent)]
    Input(#[from] CopyError),
    #[error(transparent)]
    Limit(#[from] LimitError),
    #[error(transparent)]
    Quota(#[from] QuotaError),
    #[error("open {path:?} for standard input")]
    Stdin { path: PathBuf, source: io::Error },
    #[error(
        "--level {} is below the floor, {}; leave the option out, or have the operator lower the floor", asked.as_str(), floor.as_str()
    )]
    BelowFloor {
        asked: sandbox::spec::ConfinementLevel,
        floor: crate::request::Level,
    },
    #[error("level full cannot be had here ({full}), and level landlock neither")]
    NoLevel {
        full: String,
        #[source]
        landlock: Box<PipelineError>,
    },
    #[error("start the sandbox")]
    Start(#[source] RunError),
    #[error("cancelled before the start")]
    Cancelled,
    #[error("attempt {attempt} of {id} is not this runner's any more")]
    TakenAway { id: AnalysisId, attempt: u32 },
    #[error(transparent)]
    Glob(#[from] GlobError),
    #[error("list what was put into the workspace")]
    Puts(#[from] CollectError),
    /// The record would have nowhere to go: better not to begin.
    #[error(transparent)]
    Ledger(#[from] SettleError),
    #[error(
        "{what} has {free} free, and {reserve} is to stay free; make room, or lower free_reserve"
    )]
    NoRoom {
        what: PathBuf,
        free: String,
        reserve: String,
    },
    #[error(
        "the artifact store holds {used}, and its quota is {quota}; remove analyses with `fumehood rm` or `fumehood gc --older-than`, or raise store_quota"
    )]
    StoreFull { used: String, quota: String },
    #[error("after the step `{}`", step.name())]
    Step { step: CrashPoint, source: io::Error },
}

impl PipelineError {
    /// Whether it will be the same every time, whatever the host is busy with: what was asked for is not allowed.
    pub fn is_refusal(&self) -> bool {
        match self {
            PipelineError::Policy(PolicyError::Runtime(_)) => false,
            PipelineError::Policy(_)
            | PipelineError::BelowFloor { .. }
            | PipelineError::Glob(_)
            | PipelineError::Input(_)
            | PipelineError::Limit(_) => true,
            _ => false,
        }
    }

    /// Status, reason and exit code of a run that never was.
    pub fn verdict(&self) -> (Status, Reason) {
        match self {
            PipelineError::Policy(PolicyError::Runtime(e)) => match e.exit_code() {
                127 => (Status::Error, Reason::NotFound),
                126 => (Status::Error, Reason::NotExecutable),
                _ => (Status::Error, Reason::NotStarted),
            },
            PipelineError::Start(RunError::Step {
                step,
                source: Some(e),
                ..
            }) if step == "execute the program" => match e.kind() {
                io::ErrorKind::NotFound => (Status::Error, Reason::NotFound),
                _ => (Status::Error, Reason::NotExecutable),
            },
            PipelineError::Cancelled => (Status::Cancelled, Reason::Cancelled),
            _ => (Status::Error, Reason::NotStarted),
        }
    }
}

/// Whoever listens to a run as it goes.
pub trait Audience {
    /// What the program has just printed: all of it, whatever is kept.
    fn live(&mut self, stream: Stream, live: Live<'_>);
    fn notice(&mut self, text: &str);
    /// How far collection has come; called often.
    fn progress(&mut self, progress: Progress);
    /// See [`Attendant`](sandbox::supervise::Attendant).
    fn blocked_on(&self, stream: Stream) -> Option<BorrowedFd<'_>>;
    fn unblocked(&mut self, stream: Stream);
    fn wishes(&self) -> Option<BorrowedFd<'_>>;
    fn wish(&mut self) -> Option<Control>;
    /// Why it wished for the end, if it did. Asked once all is dead; may take its time.
    fn ended_for(&mut self) -> EndedFor {
        EndedFor::Wish
    }
}

/// Why a program was ended that had not ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndedFor {
    /// Somebody wanted that.
    Wish,
    /// The attempt may be another's by now.
    LeaseLost,
    /// The runner itself was told to end, and nobody had cancelled the analysis: its machine is being shut down, say.
    Stopped,
}

/// What a run needs beside its request.
pub struct Surroundings {
    pub home: Home,
    pub caller: Caller,
    /// Our own binary, to be started again as the launcher.
    pub launcher: PathBuf,
    pub terminal: Terminal,
    pub required_layers: BTreeSet<Layer>,
    pub place: Place,
    /// What must stay free where outputs are kept, and how much may be kept at all.
    pub free_reserve_bytes: u64,
    pub store_quota_bytes: Option<u64>,
    /// `None`: the attempt is begun here.
    pub taken: Option<Taken>,
}

/// An attempt that a worker has claimed in the database, and that is this process's to run. Not for printing: it has the
/// key.
#[derive(Clone)]
pub struct Taken {
    pub attempt: u32,
    pub key: String,
    pub database_id: String,
    pub lease_ms: u64,
}

/// Where the program works, and when what it leaves is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a workspace of its own, made now, committed and removed at the end.
    Fresh,
    /// In one that `workspace create` made; `post-process` commits it.
    Prepared,
}

/// The record, and what the program printed, for whoever shows it.
pub struct Done {
    pub record: Record,
    pub stdout: Captured,
    pub stderr: Captured,
}

/// A run that never was: why, and the record of that, which is committed if the database knew of the attempt.
#[derive(Debug)]
pub struct NotRun {
    pub error: PipelineError,
    pub record: Option<Box<Record>>,
}

impl<E: Into<PipelineError>> From<E> for NotRun {
    fn from(error: E) -> NotRun {
        NotRun {
            error: error.into(),
            record: None,
        }
    }
}

/// The whole life of one attempt. What is made on the way is removed on every way out, once what it left is safe.
/// Without a ledger nothing is recorded.
pub fn run(
    request: &Request,
    around: &Surroundings,
    mut ledger: Option<&mut Ledger>,
    audience: &mut dyn Audience,
) -> Result<Done, NotRun> {
    ledger.iter_mut().for_each(|ledger| ledger.open_ahead());
    let limits = limits::resolve(&request.limits);
    let plan = plan::plan(
        request,
        &around.caller,
        &Private {
            home: around.home.path(),
            kept: &ledger.as_ref().map(|l| l.kept_at()).unwrap_or_default(),
        },
    )?;
    isolation::candidates(request)?;
    timings::mark("planned");
    plan.notices.iter().for_each(|n| audience.notice(n));
    // A worker sees to that for its runners.
    let reaped = match around.taken {
        None => reaper::reap(&around.home, ledger.as_deref_mut()),
        Some(_) => reaper::Reaped::default(),
    };
    for finished in &reaped.finished {
        let status = finished.status.as_str().replace('_', " ");
        audience.notice(&format!(
            "{} had been left unfinished; it is committed now ({status})",
            finished.id
        ));
    }

    timings::mark("reaped");
    let mut attempt = Attempt::begin(request, around, &plan, ledger.as_deref_mut())?;
    let ran = attempt
        .make_workspace(request, around, &plan, &limits, ledger.as_deref_mut())
        .and_then(|storage| {
            if storage == Storage::DiskOnTmpfs {
                audience.notice("the workspace root is a tmpfs: disk used there is memory");
            }
            attempt.make_group(request, &limits)?;
            timings::mark("cgroup_made");
            let errand = Errand {
                request,
                around,
                plan: &plan,
                limits: &limits,
                storage,
            };
            isolation::strongest(&mut attempt, &errand, ledger.as_deref_mut(), audience)
        });
    let (enforcement, ran) = match ran {
        Ok(ran) => ran,
        Err(error) => return Err(attempt.fail(request, around, &plan, ledger, error)),
    };
    let number = attempt.number();
    let mut record = record_builder::describe(request, number, &plan, &limits, &enforcement, &ran);
    record_builder::ended_for(&mut record, audience);
    let done = attempt.end(request, around, ledger, record, ran, audience);
    timings::mark("cleaned_up");
    Ok(done)
}

pub(crate) fn unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |d| d.as_millis() as u64)
}
