//! What a run needs besides its request: [`RunContext`] from the caller, and `PlannedRun` for the transitions.

use std::path::PathBuf;

use sandbox::cgroup::OwnProcess;
use sandbox::spec::{Limits, Terminal};

use crate::home::Home;
use crate::plan::Plan;
use crate::plan::runtime::CallerEnvironment;
use crate::settings::Request;

/// What a run needs besides its request.
pub struct RunContext {
    pub home: Home,
    pub caller: CallerEnvironment,
    /// The `fumehood` binary. It is executed again as the launcher.
    pub launcher: PathBuf,
    pub terminal: Terminal,
    /// Whether this process may be moved into another cgroup, so that the run's limits can be enforced there.
    pub own_process: OwnProcess,
    pub workspace_source: WorkspaceSource,
    /// How much space must stay free where outputs are stored, and how much the artifact store may hold in total.
    pub free_reserve_bytes: u64,
    pub store_quota_bytes: Option<u64>,
    /// The attempt that a worker claimed. `None`: this process begins the attempt itself.
    pub claimed: Option<ClaimedAttempt>,
}

/// An attempt that a worker claimed in the database for this process to run. It has no `Debug`, because the key must
/// not be printed.
#[derive(Clone)]
pub struct ClaimedAttempt {
    pub attempt: u32,
    pub key: String,
    pub database_id: String,
    pub lease_ms: u64,
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
