//! The second transition: creates the workspace, its quota and the cgroup, and finds out who enforces each limit.

use std::path::PathBuf;

use sandbox::cgroup::{self, AncestorLimits, Group};
use sandbox::quota::{self, QuotaError};
use sandbox::spec::{ConfinementLevel, Enforcement, Limits, WorkspaceKind};

use crate::attempt::context::{RunContext, WorkspaceSource};
use crate::attempt::error::{AttemptError, pass_crash_point};
use crate::attempt::input_copy::copy_inputs;
use crate::attempt::recorder::Recorder;
use crate::attempt::state::Attempt;
use crate::home::HomeError;
use crate::plan::Plan;
use crate::plan::limits::{self, EnforcementContext, WorkspaceStorage, error_chain};
use crate::request::Request;
use crate::workspace::{LockWait, Workspace};
use store::types::crash_points::CrashPoint;

impl Attempt {
    pub fn create_workspace(
        &mut self,
        request: &Request,
        context: &RunContext,
        plan: &Plan,
        limits: &Limits,
        recorder: Option<&mut Recorder>,
    ) -> Result<WorkspaceStorage, AttemptError> {
        match context.workspace_source {
            WorkspaceSource::Fresh => self.create_new_workspace()?,
            WorkspaceSource::Prepared => self.open_prepared_workspace()?,
        }
        pass_crash_point(CrashPoint::WorkspaceMade)?;
        if !are_small_files(&plan.inputs) {
            self.ensure_row(recorder, request, context.claimed.as_ref())?;
        }
        let on_tmpfs = self.workspace.as_ref().is_some_and(Workspace::is_on_tmpfs);
        let fresh = context.workspace_source == WorkspaceSource::Fresh;
        let storage = match (request.workspace_kind, on_tmpfs) {
            (WorkspaceKind::Memory, _) => WorkspaceStorage::Memory,
            (WorkspaceKind::Disk, true) => WorkspaceStorage::DiskOnTmpfs,
            // The quota comes before the inputs, because they count as disk use.
            (WorkspaceKind::Disk, false) if fresh && self.set_project_quota(limits)? => {
                WorkspaceStorage::Quota
            }
            (WorkspaceKind::Disk, false) => WorkspaceStorage::Disk,
        };
        if let Some(workspace) = &self.workspace
            && storage != WorkspaceStorage::Memory
        {
            copy_inputs(workspace.dir(), &plan.inputs, self.owner(), limits)?;
            self.unrecorded_inputs = Some(self.record_staged_inputs(workspace.dir(), plan)?);
        }
        pass_crash_point(CrashPoint::Filled)?;
        Ok(storage)
    }

    fn create_new_workspace(&mut self) -> Result<(), AttemptError> {
        // If the process dies between any two of these steps, the record proves that what is left belongs to this run.
        let owner = self.owner();
        let made = Workspace::draft(self.record.workspace.clone(), &self.record.draft, owner)?;
        self.record.workspace_identity = Some(made.identity());
        self.workspace = Some(made);
        self.save()?;
        self.workspace.as_mut().map_or(Ok(()), Workspace::publish)?;
        Ok(())
    }

    /// Opens the workspace that `workspace create` made, if the path still names the same directory.
    fn open_prepared_workspace(&mut self) -> Result<(), AttemptError> {
        let gone = || HomeError::NoWorkspace {
            id: self.record.id.clone(),
        };
        let identity = self.record.workspace_identity.ok_or_else(gone)?;
        let path = self.record.workspace.clone();
        let workspace = Workspace::reopen(path, identity, LockWait::NoWait)?.ok_or_else(gone)?;
        workspace.prepare(self.owner())?;
        self.workspace = Some(workspace);
        Ok(())
    }

    /// Sets a project quota for the disk limits. Returns false where the file system has none; the watch then enforces
    /// the limits, and the record says so.
    fn set_project_quota(&mut self, limits: &Limits) -> Result<bool, AttemptError> {
        let (Some(lease), Some(workspace)) = (&self.lease, &self.workspace) else {
            return Ok(false);
        };
        let Ok(project) =
            quota::unused_project(workspace.dir(), limits::quota_project_ids(lease.uid))
        else {
            return Ok(false);
        };
        self.record.project_quota = Some(project);
        self.save()?;
        // The workspace's own directory counts as an inode, and is not one of the program's files.
        let inodes = limits.files.saturating_add(1);
        match quota::limit(workspace.dir(), project, limits.disk_bytes, inodes) {
            Ok(quota) => self.quota = Some(quota),
            Err(e @ QuotaError::Undo { .. }) => return Err(e.into()),
            // This file system has no project quotas.
            Err(_) => self.record.project_quota = None,
        }
        self.save()?;
        Ok(self.quota.is_some())
    }

    pub fn create_cgroup(
        &mut self,
        request: &Request,
        limits: &Limits,
    ) -> Result<(), AttemptError> {
        let limits_of_group = limits::group_limits(limits);
        let made = Group::create(&self.cgroup_host, request.id.as_str(), &limits_of_group);
        self.group = made.map_err(
            |e| match crate::attempt::systemd_scope::ensure_delegated() {
                Ok(_) => error_chain(&e),
                Err(why) => format!("{}; {}", error_chain(&e), error_chain(why)),
            },
        );
        Ok(())
    }

    /// Who enforces each limit at that level. Fails if a limit that the request sets explicitly would not be enforced
    /// as firmly as it must be, and `allow_degraded` does not name the limit; see `limits::enforcement`.
    pub fn enforcement(
        &self,
        request: &Request,
        limits: &Limits,
        storage: WorkspaceStorage,
        level: ConfinementLevel,
    ) -> Result<Vec<Enforcement>, AttemptError> {
        let group = self.group.as_ref().map_err(Clone::clone);
        let outer = match group.as_ref().is_ok_and(|g| limits::group_suffices(g)) {
            true => AncestorLimits::default(),
            false => cgroup::ancestor_limits(),
        };
        let enforcement_context = EnforcementContext {
            level,
            has_own_uid: self.lease.is_some(),
            storage,
        };
        Ok(limits::enforcement(
            &request.limits,
            limits,
            group,
            &outer,
            enforcement_context,
            &request.allow_degraded,
        )?)
    }
}

/// Whether copying the inputs takes so little time that the database row can wait until they are copied.
fn are_small_files(inputs: &[(PathBuf, PathBuf)]) -> bool {
    const FILES_MAX: usize = 16;
    const BYTES_MAX: u64 = 1 << 20;
    let is_small = |(source, _): &(PathBuf, PathBuf)| {
        std::fs::symlink_metadata(source)
            .is_ok_and(|meta| meta.is_file() && meta.len() <= BYTES_MAX)
    };
    inputs.len() <= FILES_MAX && inputs.iter().all(is_small)
}
