//! What can fail on Fumehood's side: [`AttemptError`] before the program has run, [`CommitError`] from then on. What
//! the program does is never an error here.

use std::io;
use std::path::PathBuf;

use sandbox::quota::QuotaError;
use sandbox::supervise::{LaunchStep, RunError};

use crate::attempt::record::{Reason, Status};
use crate::collect::{CollectError, GlobError};
use crate::home::HomeError;
use crate::plan::PlanError;
use crate::plan::limits::LimitError;
use crate::workspace::WorkspaceError;
use crate::workspace::copy_in::CopyError;
use crate::workspace::uid_pool::UidLeaseError;
use store::StoreError;
use store::artifacts::ArtifactError;
use store::types::analysis_id::AnalysisId;
use store::types::crash_points::{self, CrashPoint};

/// Why Fumehood could not run the program, or not to its end.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum AttemptError {
    /// The request is refused, or cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Use the directory of Fumehood, or the run directory of the attempt.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// Lease a uid for the program.
    #[error(transparent)]
    Lease(#[from] UidLeaseError),
    /// Create or fill the workspace.
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    /// Copy an input into the workspace.
    #[error(transparent)]
    Input(#[from] CopyError),
    /// A limit cannot be enforced as the request asks.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// Take back a quota that was set only in part.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// Open the file for standard input.
    #[error("open {path:?} for standard input")]
    Stdin { path: PathBuf, source: io::Error },
    /// The request names a level of confinement that is weaker than the weakest acceptable one.
    #[error(
        "--level {} is below the floor, {}; leave the option out, or have the operator lower the floor", asked.as_str(), floor.as_str()
    )]
    BelowFloor {
        asked: sandbox::spec::ConfinementLevel,
        floor: crate::request::IsolationLevel,
    },
    /// The start at level `full` failed, which the host does not support. Then the attempt at level `landlock` failed
    /// too.
    #[error("this host supports neither level full ({full}) nor level landlock")]
    NoLevel {
        full: String,
        #[source]
        landlock: Box<AttemptError>,
    },
    /// Start the sandbox, or supervise the run in it.
    #[error("start the sandbox")]
    Start(#[source] RunError),
    /// The run was cancelled before the program started.
    #[error("cancelled before the start")]
    Cancelled,
    /// The attempt that a worker claimed for this process is not this process's any more: the claim was given up, or
    /// another process has the attempt.
    #[error("attempt {attempt} of {id} no longer belongs to this runner")]
    ClaimLost { id: AnalysisId, attempt: u32 },
    /// A pattern of `--output` or `--expect` is not valid.
    #[error(transparent)]
    Glob(#[from] GlobError),
    /// List the inputs, to recognise later which of them the program changed.
    #[error("list the inputs in the workspace")]
    StagedInputs(#[from] CollectError),
    /// The database or the artifact store cannot be used, so the record would have nowhere to go.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// Less space than the reserve is free where outputs are stored.
    #[error(
        "{what} has {free} free, and {reserve} is to stay free; make room, or lower free_reserve"
    )]
    TooLittleSpace {
        what: PathBuf,
        free: String,
        reserve: String,
    },
    /// The artifact store has reached its quota.
    #[error(
        "the artifact store holds {used}, and its quota is {quota}; remove analyses with `fumehood rm` or `fumehood gc --older-than`, or raise store_quota"
    )]
    StoreFull { used: String, quota: String },
    /// A test injected a failure.
    #[error(transparent)]
    CrashPoint(#[from] CrashPointError),
}

impl AttemptError {
    /// Whether the request itself is not allowed, so that every repetition fails in the same way whatever the host is
    /// doing.
    pub(crate) fn is_refusal(&self) -> bool {
        match self {
            AttemptError::Plan(PlanError::Runtime(_)) => false,
            AttemptError::Plan(_)
            | AttemptError::BelowFloor { .. }
            | AttemptError::Glob(_)
            | AttemptError::Input(_)
            | AttemptError::Limit(_) => true,
            _ => false,
        }
    }

    /// Status and reason of a run that could not be started.
    pub(crate) fn status_and_reason(&self) -> (Status, Reason) {
        match self {
            AttemptError::Plan(PlanError::Runtime(e)) => match e.exit_code() {
                127 => (Status::Error, Reason::NotFound),
                126 => (Status::Error, Reason::NotExecutable),
                _ => (Status::Error, Reason::NotStarted),
            },
            AttemptError::Start(RunError::Launch {
                step: LaunchStep::ExecuteProgram,
                source: Some(e),
                ..
            }) => match e.kind() {
                io::ErrorKind::NotFound => (Status::Error, Reason::NotFound),
                _ => (Status::Error, Reason::NotExecutable),
            },
            AttemptError::Cancelled => (Status::Cancelled, Reason::Cancelled),
            _ => (Status::Error, Reason::NotStarted),
        }
    }
}

/// Why a result could not be collected or committed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum CommitError {
    /// Use the directory of Fumehood, or the run directory of the attempt.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// Collect what the program left.
    #[error("collect what the program left")]
    Collect(#[from] CollectError),
    /// A pattern of `--output` or `--expect` is not valid.
    #[error(transparent)]
    Glob(#[from] GlobError),
    /// Store the outputs in the artifact store.
    #[error("store the outputs of the attempt")]
    Artifacts(#[from] ArtifactError),
    /// Use the database.
    #[error("use the database {database}")]
    Database {
        database: String,
        #[source]
        source: StoreError,
    },
    /// A test injected a failure.
    #[error(transparent)]
    CrashPoint(#[from] CrashPointError),
    /// The run directory lacks what is needed to store the outputs, for example a manifest.
    #[error("the run directory does not say how the attempt ended")]
    NoOutcome,
    /// The workspace was in memory, and this many outputs, which could not be copied to the disk, are lost.
    #[error("{outputs} of its outputs, which were in memory, did not fit on the disk and are lost")]
    LostWithMemory { outputs: usize },
    /// The database that is now at this location is not the one that has the attempt.
    #[error("the attempt was begun in another database than the one that is now at {database}")]
    OtherDatabase { database: String },
    /// Files of the database were moved or removed while the program ran.
    #[error(
        "files of the database {database} were moved or removed while it was in use, so this process writes nothing more there"
    )]
    DatabaseReplaced { database: String },
    /// The artifact store that may have the outputs is not at its path any more. Another one is there.
    #[error(
        "{outputs} of its outputs were in an artifact store that is not at {path:?} any more; bring it back, or give them up with `fumehood workspace remove {id} --discard`"
    )]
    ArtifactStoreMissing {
        id: AnalysisId,
        path: PathBuf,
        outputs: usize,
    },
}

impl CommitError {
    /// Whether another process held a lock in the database for longer than this process waits.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, CommitError::Database { source, .. } if source.fault_kind() == store::FaultKind::Busy)
    }

    /// Whether the database did not answer.
    pub(crate) fn is_unavailable(&self) -> bool {
        matches!(self, CommitError::Database { source, .. } if source.fault_kind() == store::FaultKind::Unreachable)
    }

    /// Whether the condition of the database is the cause, so that a repetition may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        let passing = [
            store::FaultKind::Unreachable,
            store::FaultKind::Busy,
            store::FaultKind::Full,
            store::FaultKind::ReadOnly,
        ];
        matches!(self, CommitError::Database { source, .. } if passing.contains(&source.fault_kind()))
    }

    /// Whether the outputs are safe in the artifact store and only the commit to the database is missing.
    pub(crate) fn is_database_error(&self) -> bool {
        matches!(
            self,
            CommitError::Database { .. }
                | CommitError::OtherDatabase { .. }
                | CommitError::DatabaseReplaced { .. }
        )
    }
}

/// A failure that a test injects at a named crash point.
#[derive(Debug, thiserror::Error)]
#[error("after the crash point `{}`", point.name())]
pub struct CrashPointError {
    point: CrashPoint,
    source: io::Error,
}

/// Passes a named crash point. It fails, or kills this process, only if a test asks for that.
pub(crate) fn pass_crash_point(point: CrashPoint) -> Result<(), CrashPointError> {
    crash_points::reach(point).map_err(|source| CrashPointError { point, source })
}
