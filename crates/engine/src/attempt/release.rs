//! From `AttemptToRelease` to the end: removes, keeps or quarantines the workspace, and releases everything else. Also has
//! every way in which an attempt gives up its `Holdings`.

use sandbox::spec::WorkspaceKind;

use crate::attempt::context::PlannedRun;
use crate::attempt::finalize::ended_attempt::is_kept;
use crate::attempt::log_capture::CapturedLog;
use crate::attempt::post_process;
use crate::attempt::record::{CommitState, Record};
use crate::attempt::states::{AttemptToRelease, Holdings, OwnedRun};
use crate::home::{self, Home};
use crate::plan::limits::error_chain;
use crate::run_dir::RunState;
use crate::workspace::{Receipt, Workspace};
use store::types::crash_points::{self, CrashPoint};

/// The record of a run that took place, and what the program printed.
pub struct CompletedRun {
    /// The record of the attempt.
    pub record: Record,
    /// What the program printed to standard output.
    pub stdout: CapturedLog,
    /// What the program printed to standard error.
    pub stderr: CapturedLog,
}

impl AttemptToRelease<'_> {
    /// The record lists what could not be removed.
    ///
    /// Durable steps: [`CrashPoint::WorkspaceRemoved`]; then in [`post_process`], if a command is due,
    /// [`CrashPoint::PostProcessed`] and [`CrashPoint::Marked`]; last [`CrashPoint::Finished`].
    pub fn release(self, run: &PlannedRun<'_>) -> CompletedRun {
        let AttemptToRelease {
            mut holdings,
            recorder,
            mut record,
            all_dead,
            logs: [stdout, stderr],
        } = self;
        let notices = &mut record.notices;
        match record.commit.state {
            _ if !all_dead => {
                // Everything else stays in place for the reaper.
                holdings.run.record.state = RunState::Quarantined;
                notices.extend(holdings.run.save().err().map(|e| error_chain(&e)));
            }
            CommitState::InWorkspace => holdings.keep_workspace(RunState::Live, notices),
            CommitState::Awaited => holdings.keep_workspace(RunState::Ran, notices),
            CommitState::Pending => holdings.move_to_pending(&run.context.home),
            // Nothing is recorded, but the workspace is the user's to remove.
            CommitState::Unrecorded if holdings.run.prepared_state.is_some() => {
                holdings.keep_workspace(RunState::Recorded, notices);
            }
            CommitState::Unrecorded | CommitState::Committed | CommitState::Superseded => {
                let mut keep = is_kept(run.request.keep, record.status);
                if keep && run.request.workspace_kind == WorkspaceKind::Memory {
                    notices.push("a workspace in memory cannot be kept".into());
                    keep = false;
                }
                if !keep {
                    notices.extend(holdings.remove_workspace(Receipt::OutputsDurable));
                    notices.extend(crash_point_notice(CrashPoint::WorkspaceRemoved));
                }
                if let Some(recorder) = recorder {
                    let (key, dir) = ((record.id.as_str(), record.attempt), &holdings.run.dir);
                    record.post_process = post_process::run_if_due(recorder, key, dir.path());
                }
                if keep {
                    let until = home::unix_seconds() + run.request.keep_for_ms.div_ceil(1000);
                    holdings.keep_workspace(RunState::Kept { until }, notices);
                    record.kept_until = Some(until);
                } else {
                    notices.extend(holdings.remove(Receipt::OutputsDurable));
                    notices.extend(crash_point_notice(CrashPoint::Finished));
                }
            }
        }
        CompletedRun {
            record,
            stdout,
            stderr,
        }
    }
}

impl Holdings {
    /// Nothing is to be kept. Removes everything, and the run directory last. Returns what could not be removed.
    fn remove(mut self, receipt: Receipt) -> Option<String> {
        let mut problems: Vec<String> = self.remove_workspace(receipt).into_iter().collect();
        problems.extend(self.release_quota());
        problems.extend(self.remove_cgroup());
        self.release_uid();
        if problems.is_empty() {
            problems.extend(self.run.dir.remove().err().map(|e| error_chain(&e)));
        }
        (!problems.is_empty())
            .then(|| format!("{}; `fumehood gc` tries again", problems.join("; ")))
    }

    /// Nothing ran, or an error is returned instead of a result. Removes everything, except a workspace that the user
    /// made, which gets its state back. The reaper removes what cannot be removed now.
    pub fn give_back(self, receipt: Receipt) {
        match self.run.prepared_state {
            Some(before) => self.keep_workspace(before, &mut Vec::new()),
            None => drop(self.remove(receipt)),
        }
    }

    /// As [`give_back`](Self::give_back), but leaves the run directory to the reaper, and a workspace that the user made
    /// too.
    pub fn leave_run_dir(mut self) {
        if self.run.prepared_state.is_some() {
            self.workspace = None;
        }
        self.remove_workspace(Receipt::NothingRan);
        self.release_quota();
        self.remove_cgroup();
        self.release_uid();
    }

    /// Keeps the workspace and takes ownership of its files: another run will have the leased uid later.
    pub fn keep_workspace(mut self, state: RunState, notices: &mut Vec<String>) {
        // The cgroups stay in the record until they are gone. The uid stays leased until no file belongs to it.
        let group_error = self.remove_cgroup();
        if group_error.is_none() {
            self.run.record.cgroups.clear();
        }
        notices.extend(group_error);
        self.run.record.state = state;
        let kept = self.workspace.take().map(Workspace::keep);
        match kept {
            Some(Err(e)) => notices.push(format!("{}; it is kept as it is", error_chain(&e))),
            _ => {
                if let Some(commit_plan) = &mut self.run.record.commit_plan {
                    commit_plan.workspace_reowned = true;
                }
            }
        }
        notices.extend(self.run.save().err().map(|e| error_chain(&e)));
        notices.extend(self.release_quota());
        self.release_uid();
    }

    /// The attempt has ended and is not committed. Moves its run directory to `pending/`, where nobody takes it for a
    /// running attempt.
    pub fn move_to_pending(mut self, home: &Home) {
        let workspace = self.remove_workspace(Receipt::OutputsDurable);
        // Stale limits do no harm: the next run with this project replaces them.
        let _ = self.release_quota();
        let group = self.remove_cgroup();
        self.release_uid();
        let OwnedRun {
            mut dir,
            mut record,
            ..
        } = self.run;
        if group.is_none() {
            record.cgroups.clear();
        }
        // If this fails, the earlier record stays and says enough.
        let _ = dir.write_record_durably(&record);
        // The reaper looks in `runs/` too, so a failed move is harmless.
        if workspace.is_none() && group.is_none() {
            let _ = dir.move_to_pending(home);
        }
    }

    fn remove_workspace(&mut self, receipt: Receipt) -> Option<String> {
        self.wait_for_init();
        let removed = self.workspace.take()?.remove(receipt);
        removed.err().map(|e| error_chain(&e))
    }

    /// Frees the quota project. This comes before the uid is released, because the project belongs to the uid.
    fn release_quota(&mut self) -> Option<String> {
        let quota = self.quota.take()?;
        let project = quota.project();
        let e = quota.release().err()?;
        Some(format!("free project {project} of its limits: {e}"))
    }

    /// Removes the cgroup. Returns the error of this removal, or of an earlier one that nobody has reported.
    fn remove_cgroup(&mut self) -> Option<String> {
        let failed = self.group.take().and_then(|g| g.remove().err());
        failed
            .map(|e| error_chain(&e))
            .or_else(|| self.group_removal_error.take())
    }

    fn release_uid(&mut self) {
        self.wait_for_init();
        // A uid that is not returned as clean is checked for leftover processes before its next use.
        if let Some(lease) = self.run.lease.take()
            && !self.init_may_live
        {
            lease.release_clean();
        }
    }

    /// Waits until the sandbox's init has ended. Init may end while outputs are collected and committed, and the
    /// sandbox's mounts disappear with it. The workspace and the uid are released only after that.
    fn wait_for_init(&mut self) {
        let Some(init) = self.init_exit.take() else {
            return;
        };
        // Init is in none of the run's cgroups, and the processes that were in them are dead, so removing the cgroups
        // need not wait for init.
        self.group_removal_error = self.remove_cgroup();
        self.init_may_live |= !init.wait();
    }
}

/// Passes a crash point after the commit. A failure there cannot change the result, so it only becomes a notice.
fn crash_point_notice(step: CrashPoint) -> Option<String> {
    let e = crash_points::reach(step).err()?;
    Some(format!("after the step `{}`: {e}", step.name()))
}
