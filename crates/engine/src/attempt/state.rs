//! [`Attempt`]: everything that this process has created for an attempt so far, and [`ProgramRun`]: how the program
//! went.

use std::os::fd::OwnedFd;

use sandbox::cgroup::{Group, Hierarchies};
use sandbox::outcome::Outcome;
use sandbox::quota::ProjectQuota;
use sandbox::spec::{ConfinementLevel, Layer, ProgramIdentity};
use sandbox::supervise::InitExit;

use crate::attempt::log_capture::CapturedLog;
use crate::collect::StagedInput;
use crate::home::HomeError;
use crate::run_dir::{RunDir, RunRecord, RunState};
use crate::workspace::Workspace;
use crate::workspace::uid_pool::UidLease;
use store::Store;
use store::artifacts::Artifacts;

/// What has been created so far. Dropping it removes everything; what cannot be removed is left to the reaper.
pub(crate) struct Attempt {
    pub(super) dir: Option<RunDir>,
    pub(super) record: RunRecord,
    pub(super) lease: Option<UidLease>,
    pub(super) workspace: Option<Workspace>,
    pub(super) quota: Option<ProjectQuota>,
    pub(super) group: Result<Group, String>,
    /// Why the cgroup could not be removed, if `remove_cgroup` has failed already.
    pub(super) group_removal_error: Option<String>,
    /// Where the cgroups of the run are created.
    pub(super) cgroup_host: Hierarchies,
    /// The sandbox's init while it exits. Every other process of the run is dead by then.
    pub(super) init_exit: Option<InitExit>,
    /// Nobody saw init end. The uid is then not returned as clean, and the next process that leases it looks for
    /// leftover processes.
    pub(super) init_may_live: bool,
    /// The database connection, taken out of the recorder while the program runs.
    pub(super) detached_store: Option<Store>,
    /// The artifact store for the outputs. `Some` only while the attempt is to be recorded and has no row yet.
    pub(super) artifacts: Option<Artifacts>,
    /// The inputs that were copied into the workspace, until their provenance is written.
    pub(super) unrecorded_inputs: Option<Vec<StagedInput>>,
    /// The database did not answer, so it may or may not have a row for the attempt.
    pub(super) row_unknown: bool,
    /// The database has a row for the attempt, which must reach a final state.
    pub(super) row_begun: bool,
    /// The state of the workspace before the run, if `workspace create` made it. Such a workspace is the user's to
    /// remove.
    pub(super) prepared_state: Option<RunState>,
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

impl Attempt {
    pub fn number(&self) -> u32 {
        self.record.attempt
    }

    pub(super) fn save(&self) -> Result<(), HomeError> {
        self.dir
            .as_ref()
            .map_or(Ok(()), |dir| dir.write_record(&self.record))
    }

    pub(super) fn owner(&self) -> Option<(u32, u32)> {
        self.lease.as_ref().map(|l| (l.uid, l.uid))
    }

    pub(super) fn owner_uid(&self) -> u32 {
        let own_uid = rustix::process::geteuid().as_raw();
        self.lease.as_ref().map_or(own_uid, |lease| lease.uid)
    }

    pub(super) fn identity(&self) -> ProgramIdentity {
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

    pub(super) fn is_recorded(&self) -> bool {
        self.artifacts.is_some() || self.record.commit_plan.is_some()
    }
}
