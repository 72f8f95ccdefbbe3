//! From [`LockedAttempt`] to [`FilledAttempt`]: creates the workspace and its quota, and copies the inputs.

use std::path::PathBuf;

use sandbox::quota::{self, QuotaError};
use sandbox::spec::{Limits, WorkspaceKind};

use crate::attempt::context::{PlannedRun, WorkspaceSource};
use crate::attempt::error::{AttemptError, pass_crash_point};
use crate::attempt::input_copy::copy_inputs;
use crate::attempt::states::{AbortedAttempt, FilledAttempt, LockedAttempt, OwnedRun};
use crate::home::HomeError;
use crate::plan::limits::{self, WorkspaceStorage};
use crate::workspace::{LockWait, Workspace};
use store::types::crash_points::CrashPoint;

impl<'r> LockedAttempt<'r> {
    /// Durable steps: [`CrashPoint::WorkspaceMade`], [`CrashPoint::Begun`] if there are many inputs,
    /// [`CrashPoint::Filled`].
    pub fn fill(
        mut self,
        run: &PlannedRun<'_>,
    ) -> Result<FilledAttempt<'r>, Box<AbortedAttempt<'r>>> {
        let workspace = match run.context.workspace_source {
            WorkspaceSource::Fresh => draft_workspace(&mut self.run),
            WorkspaceSource::Prepared => open_prepared_workspace(&self.run),
        };
        let workspace = match workspace {
            Ok(workspace) => workspace,
            Err(error) => return Err(AbortedAttempt::new(error, self.into_holdings())),
        };
        let mut filled = FilledAttempt {
            claimed: self,
            workspace,
            storage: WorkspaceStorage::Disk,
            quota: None,
        };
        match filled.publish_and_fill(run) {
            Ok(()) => Ok(filled),
            Err(error) => Err(AbortedAttempt::new(error, filled.into_holdings())),
        }
    }
}

impl FilledAttempt<'_> {
    fn publish_and_fill(&mut self, run: &PlannedRun<'_>) -> Result<(), AttemptError> {
        let fresh = run.context.workspace_source == WorkspaceSource::Fresh;
        if fresh {
            self.claimed.run.save()?;
            self.workspace.publish()?;
        }
        pass_crash_point(CrashPoint::WorkspaceMade)?;
        if !are_small_files(&run.plan.inputs) {
            self.claimed.row.begin(&mut self.claimed.run, run)?;
        }
        let on_tmpfs = self.workspace.is_on_tmpfs();
        self.storage = match (run.request.workspace_kind, on_tmpfs) {
            (WorkspaceKind::Memory, _) => WorkspaceStorage::Memory,
            (WorkspaceKind::Disk, true) => WorkspaceStorage::DiskOnTmpfs,
            // The quota comes before the inputs, because they count as disk use.
            (WorkspaceKind::Disk, false) if fresh && self.set_project_quota(run.limits)? => {
                WorkspaceStorage::Quota
            }
            (WorkspaceKind::Disk, false) => WorkspaceStorage::Disk,
        };
        if self.storage != WorkspaceStorage::Memory {
            let LockedAttempt {
                run: owned, row, ..
            } = &mut self.claimed;
            let dir = self.workspace.dir();
            copy_inputs(dir, &run.plan.inputs, owned.owner(), run.limits)?;
            let staged_inputs = match row.is_to_be_recorded() {
                true => owned.record_staged_inputs(dir, run.plan)?,
                false => Vec::new(),
            };
            owned.unrecorded_inputs = Some(staged_inputs);
        }
        Ok(pass_crash_point(CrashPoint::Filled)?)
    }

    /// Sets a project quota for the disk limits. Returns false where the file system has none; the watch then enforces
    /// the limits, and the record says so.
    fn set_project_quota(&mut self, limits: &Limits) -> Result<bool, AttemptError> {
        let (owned, dir) = (&mut self.claimed.run, self.workspace.dir());
        let Some(lease) = &owned.lease else {
            return Ok(false);
        };
        let Ok(project) = quota::unused_project(dir, limits::quota_project_ids(lease.uid)) else {
            return Ok(false);
        };
        owned.record.project_quota = Some(project);
        owned.save()?;
        // The workspace's own directory counts as an inode, and is not one of the program's files.
        let inodes = limits.files.saturating_add(1);
        match quota::limit(dir, project, limits.disk_bytes, inodes) {
            Ok(quota) => self.quota = Some(quota),
            Err(e @ QuotaError::Undo { .. }) => return Err(e.into()),
            // This file system has no project quotas.
            Err(_) => owned.record.project_quota = None,
        }
        owned.save()?;
        Ok(self.quota.is_some())
    }
}

/// Creates the workspace under its draft name. The caller saves its identity before it publishes the workspace. If the
/// process dies between any two of these steps, the record proves that what is left belongs to this run.
fn draft_workspace(owned: &mut OwnedRun) -> Result<Workspace, AttemptError> {
    let (path, owner) = (owned.record.workspace.clone(), owned.owner());
    let workspace = Workspace::draft(path, &owned.record.draft, owner)?;
    owned.record.workspace_identity = Some(workspace.identity());
    Ok(workspace)
}

/// Opens the workspace that `workspace create` made, if the path still names the same directory.
fn open_prepared_workspace(owned: &OwnedRun) -> Result<Workspace, AttemptError> {
    let gone = || HomeError::NoWorkspace {
        id: owned.record.id.clone(),
    };
    let identity = owned.record.workspace_identity.ok_or_else(gone)?;
    let path = owned.record.workspace.clone();
    let workspace = Workspace::reopen(path, identity, LockWait::NoWait)?.ok_or_else(gone)?;
    workspace.prepare(owned.owner())?;
    Ok(workspace)
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
