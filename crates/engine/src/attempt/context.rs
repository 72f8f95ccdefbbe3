//! What a run needs besides its request: [`RunContext`] from the caller, and `PlannedRun` for the transitions.

use std::path::PathBuf;

use sandbox::cgroup::OwnProcess;
use sandbox::spec::{Limits, Terminal};
use serde::{Deserialize, Serialize};

use crate::attempt::record::Reason;
use crate::home::Home;
use crate::plan::Plan;
use crate::plan::runtime::CallerEnvironment;
use crate::settings::{RecordSettings, Request};
use store::types::analysis_id::AnalysisId;
use store::{LeasedAttempt, LossProof, LostAttempt};

/// What a run needs besides its request.
pub struct RunContext {
    /// The directory in which Fumehood keeps run directories and, by default, the record.
    pub home: Home,
    /// The environment of the caller, which chooses the runtime.
    pub caller: CallerEnvironment,
    /// The executable that is executed again as the launcher; see [`sandbox::launch`].
    pub launcher: PathBuf,
    /// Whether the program gets a terminal.
    pub terminal: Terminal,
    /// Whether this process may be moved into another cgroup, so that the run's limits can be enforced there.
    pub own_process: OwnProcess,
    /// Which workspace the program runs in.
    pub workspace_source: WorkspaceSource,
    /// How many bytes must be free where outputs are stored when the run starts.
    pub free_reserve_bytes: u64,
    /// The run does not start if the artifact store holds this many bytes. `None`: no quota.
    pub store_quota_bytes: Option<u64>,
    /// The attempt that a worker claimed. `None`: this process begins the attempt itself.
    pub claimed: Option<Claim>,
}

impl RunContext {
    /// A run of the caller's own, by this executable, without a terminal. This process stays in its cgroup.
    pub fn new(home: Home, record: &RecordSettings) -> RunContext {
        RunContext {
            home,
            caller: CallerEnvironment::from_process(),
            launcher: PathBuf::from("/proc/self/exe"),
            terminal: Terminal::None,
            own_process: OwnProcess::Stays,
            workspace_source: match record.in_workspace {
                Some(_) => WorkspaceSource::Prepared,
                None => WorkspaceSource::Fresh,
            },
            free_reserve_bytes: record.free_reserve_bytes,
            store_quota_bytes: record.store_quota_bytes,
            claimed: None,
        }
    }
}

/// A claim of a worker on an attempt, from the queue to the commit. A runner's order holds it. It has no `Debug`,
/// because the key must not be printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The id of the analysis.
    pub id: AnalysisId,
    /// The number of the attempt.
    pub attempt: u32,
    /// The token of the attempt. Whoever has it can renew the lease and commit the attempt.
    pub key: String,
    /// The database that has the attempt. Empty in the order of an older worker.
    #[serde(default)]
    pub database_id: String,
    /// For how long a renewal extends the lease, in milliseconds.
    pub lease_ms: u64,
}

impl Claim {
    pub(crate) fn leased_attempt(&self) -> LeasedAttempt<'_> {
        LeasedAttempt {
            id: self.id.as_str(),
            attempt: self.attempt,
            key: &self.key,
        }
    }

    /// The attempt, for whoever ends it because its runner is gone. `by` is a token of the caller.
    pub(crate) fn lost_attempt<'a>(
        &'a self,
        by: &'a str,
        reason: Reason,
        message: &'a str,
    ) -> LostAttempt<'a> {
        LostAttempt {
            id: self.id.as_str(),
            attempt: self.attempt,
            key: &self.key,
            by,
            reason: reason.as_str(),
            message,
            proof: LossProof::RunnerGone,
        }
    }
}

/// Which workspace the program runs in, and who commits its outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkspaceSource {
    /// A new workspace. The run commits its outputs and removes it at the end.
    Fresh,
    /// A workspace that `workspace create` made. `post-process` commits its outputs.
    Prepared,
}

/// A request with everything that was decided before the attempt began. Every transition reads it.
pub(crate) struct PlannedRun<'a> {
    pub request: &'a Request,
    pub context: &'a RunContext,
    pub plan: &'a Plan,
    pub limits: &'a Limits,
}
