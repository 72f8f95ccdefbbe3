//! The states of an attempt. Each owns exactly what may be released from it; a transition consumes one state and
//! returns the next, or a [`AbortedAttempt`], which owns what must be released then.

use std::os::fd::OwnedFd;

use sandbox::cgroup::{Group, Hierarchies};
use sandbox::outcome::Outcome;
use sandbox::quota::ProjectQuota;
use sandbox::spec::{ConfinementLevel, Layer, ProgramIdentity};
use sandbox::supervise::InitExit;

use crate::attempt::error::AttemptError;
use crate::attempt::log_capture::CapturedLog;
use crate::attempt::record::Record;
use crate::attempt::recorder::Recorder;
use crate::collect::StagedInput;
use crate::home::HomeError;
use crate::plan::limits::WorkspaceStorage;
use crate::run_dir::{CommitPlan, RunDir, RunRecord, RunState};
use crate::workspace::Workspace;
use crate::workspace::uid_pool::UidLease;
use store::artifacts::Artifacts;

/// The first state: the run directory is locked and the uid is leased.
pub(crate) struct LockedAttempt<'r> {
    pub(super) run: OwnedRun,
    pub(super) row: RowState<'r>,
    /// Where the cgroups of the run are created.
    pub(super) cgroup_host: Hierarchies,
}

/// The workspace exists and has its inputs. A workspace in memory gets them at the start.
pub(crate) struct FilledAttempt<'r> {
    pub(super) claimed: LockedAttempt<'r>,
    pub(super) workspace: Workspace,
    pub(super) storage: WorkspaceStorage,
    /// `None`: not asked for, or the file system has no project quotas.
    pub(super) quota: Option<ProjectQuota>,
}

/// The cgroup exists, or it is known why there is none. The program can be started.
pub(crate) struct ReadyAttempt<'r> {
    pub(super) filled: FilledAttempt<'r>,
    pub(super) group: Result<Group, String>,
    /// True if a launch failed and its init was not seen to end.
    pub(super) init_may_live: bool,
}

/// The program has ended, or could not be shown to be dead. `record` says how the program ended; it is not written
/// anywhere yet.
pub(crate) struct ExecutedAttempt<'r> {
    pub(super) ready: ReadyAttempt<'r>,
    pub(super) ran: ProgramRun,
    pub(super) record: Record,
}

/// The record is committed, or the run directory or the workspace keeps it for a later commit, or nothing is recorded.
pub(crate) struct AttemptToRelease<'r> {
    pub(super) holdings: Holdings,
    /// `None`: nothing is recorded.
    pub(super) recorder: Option<&'r mut Recorder>,
    /// Its `commit` says what becomes of the workspace.
    pub(super) record: Record,
    pub(super) all_dead: bool,
    pub(super) logs: [CapturedLog; 2],
}

/// The program could not be started.
pub(crate) struct AbortedAttempt<'r> {
    pub(super) error: AttemptError,
    pub(super) holdings: Holdings,
    pub(super) row: RowState<'r>,
}

/// Whether the database has a row for the attempt. Whoever finds `NotBegun` begins it.
pub(crate) enum RowState<'r> {
    /// This process writes no row: nothing is recorded, or beginning the row failed.
    NotRecorded,
    NotBegun {
        recorder: &'r mut Recorder,
        artifacts: Artifacts,
    },
    /// The row must reach a final state, as the plan says.
    Begun {
        recorder: &'r mut Recorder,
        commit_plan: CommitPlan,
    },
    /// The database did not answer, so it may or may not have the row. The reaper asks it later.
    Unknown,
}

/// The run directory and the uid of an attempt.
pub(crate) struct OwnedRun {
    pub dir: RunDir,
    pub record: RunRecord,
    /// `None`: Fumehood does not run as root, and the program has the caller's uid.
    pub lease: Option<UidLease>,
    /// The state of the workspace before the run, if `workspace create` made it. Such a workspace is the user's to
    /// remove.
    pub prepared_state: Option<RunState>,
    /// The inputs that were copied into the workspace, until their provenance is written.
    pub unrecorded_inputs: Option<Vec<StagedInput>>,
}

/// Everything that an attempt has created and must release. What was not created, or is released already, is `None`.
pub(crate) struct Holdings {
    pub run: OwnedRun,
    pub workspace: Option<Workspace>,
    pub quota: Option<ProjectQuota>,
    pub group: Option<Group>,
    /// Why the cgroup could not be removed, if its removal has failed already.
    pub group_removal_error: Option<String>,
    /// The sandbox's init while it exits. Every other process of the run is dead by then.
    pub init_exit: Option<InitExit>,
    /// Nobody saw init end. The uid is then not returned as clean, and the next process that leases it looks for
    /// leftover processes.
    pub init_may_live: bool,
}

/// How the sandboxed program went.
pub(crate) struct ProgramRun {
    pub outcome: Outcome,
    pub level: ConfinementLevel,
    pub layers: Vec<(Layer, String)>,
    /// Where the confinement is weaker than it might be, in words.
    pub notices: Vec<String>,
    pub stdout: CapturedLog,
    pub stderr: CapturedLog,
    pub started_ms: u64,
    pub ended_ms: u64,
    pub pids_denied: u64,
    /// The workspace, if it was in memory.
    pub memory_workspace: Option<OwnedFd>,
    /// The sandbox's init, if it was alone and about to exit.
    pub init_exit: Option<InitExit>,
    /// The pid of the sandbox's init, if not every process could be shown dead. Init ends after all others.
    pub undead_init: Option<u32>,
}

impl ProgramRun {
    pub fn landlock_abi(&self) -> Option<i32> {
        let in_force = self
            .layers
            .iter()
            .any(|(layer, _)| *layer == Layer::Landlock);
        in_force.then(sandbox::probe::landlock_abi)
    }
}

impl OwnedRun {
    pub fn save(&self) -> Result<(), HomeError> {
        self.dir.write_record(&self.record)
    }

    pub fn owner(&self) -> Option<(u32, u32)> {
        self.lease.as_ref().map(|l| (l.uid, l.uid))
    }

    pub fn owner_uid(&self) -> u32 {
        let own_uid = rustix::process::geteuid().as_raw();
        self.lease.as_ref().map_or(own_uid, |lease| lease.uid)
    }

    pub fn identity(&self) -> ProgramIdentity {
        match &self.lease {
            Some(lease) => ProgramIdentity::Leased {
                uid: lease.uid,
                gid: lease.uid,
            },
            None => ProgramIdentity::Caller {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
        }
    }
}

impl RowState<'_> {
    pub fn is_to_be_recorded(&self) -> bool {
        !matches!(self, RowState::NotRecorded)
    }

    pub fn recorder(&mut self) -> Option<&mut Recorder> {
        match self {
            RowState::NotBegun { recorder, .. } | RowState::Begun { recorder, .. } => {
                Some(recorder)
            }
            RowState::NotRecorded | RowState::Unknown => None,
        }
    }
}

impl<'r> LockedAttempt<'r> {
    pub fn into_holdings(self) -> (Holdings, RowState<'r>) {
        let holdings = Holdings {
            run: self.run,
            workspace: None,
            quota: None,
            group: None,
            group_removal_error: None,
            init_exit: None,
            init_may_live: false,
        };
        (holdings, self.row)
    }
}

impl<'r> FilledAttempt<'r> {
    pub fn is_on_tmpfs(&self) -> bool {
        self.storage == WorkspaceStorage::DiskOnTmpfs
    }

    pub fn into_holdings(self) -> (Holdings, RowState<'r>) {
        let (mut holdings, row) = self.claimed.into_holdings();
        holdings.workspace = Some(self.workspace);
        holdings.quota = self.quota;
        (holdings, row)
    }
}

impl<'r> ReadyAttempt<'r> {
    pub fn into_holdings(self) -> (Holdings, RowState<'r>) {
        let (mut holdings, row) = self.filled.into_holdings();
        holdings.group = self.group.ok();
        holdings.init_may_live = self.init_may_live;
        (holdings, row)
    }
}

impl<'r> AbortedAttempt<'r> {
    pub fn new(
        error: AttemptError,
        (holdings, row): (Holdings, RowState<'r>),
    ) -> Box<AbortedAttempt<'r>> {
        Box::new(AbortedAttempt {
            error,
            holdings,
            row,
        })
    }
}
