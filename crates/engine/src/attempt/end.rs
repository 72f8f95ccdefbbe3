//! The last transition: every way out of an attempt. The result is committed, kept for a later commit, or quarantined
//! with processes that could not be killed; or the program never started.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use sandbox::spec::WorkspaceKind;

use crate::attempt::context::{RunContext, WorkspaceSource};
use crate::attempt::error::{AttemptError, CommitError, pass_crash_point};
use crate::attempt::finalize;
use crate::attempt::finalize::ended_attempt::{EndedAttempt, Leftovers};
use crate::attempt::finalize::outcome_file;
use crate::attempt::finalize::output_transfer;
use crate::attempt::log_capture::CapturedLog;
use crate::attempt::observer::RunObserver;
use crate::attempt::post_process;
use crate::attempt::record::{CommitState, Record, Status};
use crate::attempt::record_builder;
use crate::attempt::recorder::Recorder;
use crate::attempt::state::{Attempt, ProgramRun};
use crate::collect::{self, ModePolicy};
use crate::home;
use crate::plan::Plan;
use crate::plan::limits::error_chain;
use crate::request::{KeepPolicy, Request};
use crate::run_dir::{ProcessIdentity, RunState};
use crate::workspace::{Receipt, Workspace};
use store::artifacts::{ContentCheck, TransferMode};
use store::types::crash_points::{self, CrashPoint};

/// The record of a run that took place, and what the program printed.
pub struct CompletedRun {
    pub record: Record,
    pub stdout: CapturedLog,
    pub stderr: CapturedLog,
}

/// A run that Fumehood could not start. `record` is set if the database knows of the attempt; it is then committed or
/// awaits its commit.
#[derive(Debug)]
pub struct StartFailure {
    pub error: AttemptError,
    pub record: Option<Box<Record>>,
}

impl<E: Into<AttemptError>> From<E> for StartFailure {
    fn from(error: E) -> StartFailure {
        StartFailure {
            error: error.into(),
            record: None,
        }
    }
}

impl Attempt {
    /// Fumehood could not start the program. If the database has a row for the attempt, commits its end.
    pub fn fail(
        mut self,
        request: &Request,
        context: &RunContext,
        plan: &Plan,
        recorder: Option<&mut Recorder>,
        error: AttemptError,
    ) -> StartFailure {
        let Some(recorder) = recorder else {
            return error.into();
        };
        if let Some(staged_inputs) = self.unrecorded_inputs.take() {
            // The failure to start is the error to report.
            let _ = self.record_provenance(request, plan, &staged_inputs);
        }
        // Record the failure even if the row was not begun yet, unless the database itself failed or refused the
        // attempt.
        if !matches!(
            error,
            AttemptError::Commit(_) | AttemptError::ClaimLost { .. }
        ) {
            // Without a row the failure is only reported, not recorded.
            let _ = self.ensure_row(Some(recorder), request, context.claimed.as_ref());
        }
        if self.row_unknown {
            // Leave the run directory to the reaper, and the workspace too if the user made it.
            self.workspace = self
                .workspace
                .take()
                .filter(|_| self.prepared_state.is_none());
            self.dir = None;
        }
        if !self.row_begun {
            return error.into();
        }
        recorder.reattach(self.detached_store.take());
        let record = record_builder::start_failure_record(request, self.number(), &error);
        let nothing = CapturedLog::default();
        let finalized = self
            .write_outcome(&record, &nothing, &nothing)
            .and_then(|()| {
                self.finalize(Leftovers::Nothing, KeepPolicy::Never, recorder, &mut |_| {})
            });
        let record = match finalized {
            Ok(mut finalized) => {
                self.row_begun = self.prepared_state.is_some();
                if let Some(dir) = &self.dir {
                    let key = (finalized.id.as_str(), finalized.attempt);
                    finalized.post_process = post_process::run_if_due(recorder, key, dir.path());
                }
                finalized
            }
            // The run directory keeps the outcome for a later commit.
            Err(e) => {
                // Nothing ran, so little is lost if this fails.
                let _ = self.make_durable();
                match self.prepared_state {
                    // The user's workspace stays; `post-process` commits that nothing ran in it.
                    Some(_) => self.keep_workspace(&mut Vec::new(), RunState::Ran),
                    None => self.move_to_pending(context),
                }
                uncommitted(record, Some(e), CommitState::Pending)
            }
        };
        StartFailure {
            error,
            record: Some(Box::new(record)),
        }
    }

    /// The program has ended, or could not be shown to be dead. Commits what it left, and then removes, keeps or
    /// quarantines the workspace.
    pub fn end(
        mut self,
        request: &Request,
        context: &RunContext,
        mut recorder: Option<&mut Recorder>,
        record: Record,
        mut ran: ProgramRun,
        observer: &mut dyn RunObserver,
    ) -> CompletedRun {
        let memory_workspace = ran.memory_workspace.take();
        let (stdout, stderr) = (ran.stdout, ran.stderr);
        let mut record = match recorder.as_deref_mut() {
            None => record,
            Some(recorder) => {
                recorder.reattach(self.detached_store.take());
                let written = pass_crash_point(CrashPoint::Ended)
                    .map_err(CommitError::from)
                    .and(self.write_outcome(&record, &stdout, &stderr));
                match (ran.outcome.all_dead, context.workspace_source) {
                    (false, _) => {
                        // The end is known and this machine commits it later, so no other machine need repeat the
                        // attempt.
                        self.report_program_end(context, recorder, &record);
                        let durable = written.and_then(|()| self.make_durable());
                        uncommitted(record, durable.err(), CommitState::InWorkspace)
                    }
                    (true, WorkspaceSource::Prepared) => {
                        let durable = written.and_then(|()| self.make_durable());
                        self.record.state = RunState::Ran;
                        uncommitted(record, durable.err(), CommitState::Awaited)
                    }
                    (true, WorkspaceSource::Fresh) => {
                        self.report_program_end(context, recorder, &record);
                        let memory = memory_workspace.as_ref().map(OwnedFd::as_fd);
                        self.commit(
                            request, context, recorder, record, memory, written, observer,
                        )
                    }
                }
            }
        };
        self.record.init = ran.undead_init.and_then(ProcessIdentity::of);
        self.clean_up(request, ran.outcome.all_dead, &mut record, recorder);
        CompletedRun {
            record,
            stdout,
            stderr,
        }
    }

    /// Tells the queue that the program has ended and that this machine has its outputs. If the database is
    /// unavailable, the commit says the same later.
    fn report_program_end(&self, context: &RunContext, recorder: &mut Recorder, record: &Record) {
        let (Some(claimed), Some(commit_plan)) = (&context.claimed, &self.record.commit_plan)
        else {
            return;
        };
        let held = store::LeasedAttempt {
            id: self.record.id.as_str(),
            attempt: self.record.attempt,
            key: &commit_plan.key,
        };
        let reason = record.reason.as_str();
        // If this fails, the commit reports the end later.
        let _ = recorder.with(|store| store.mark_collecting(&held, claimed.lease_ms, reason));
    }

    #[allow(clippy::too_many_arguments)]
    fn commit(
        &mut self,
        request: &Request,
        context: &RunContext,
        recorder: &mut Recorder,
        record: Record,
        memory: Option<BorrowedFd<'_>>,
        written: Result<(), CommitError>,
        observer: &mut dyn RunObserver,
    ) -> Record {
        let owner_uid = self.owner_uid();
        let disk = self.workspace.take();
        let leftovers = match (memory, &disk) {
            (Some(memory), _) => Leftovers::Directory {
                dir: memory,
                owner_uid,
            },
            (None, Some(disk)) => Leftovers::Directory {
                dir: disk.dir(),
                owner_uid,
            },
            (None, None) => Leftovers::Nothing,
        };
        let progress = &mut |p| observer.progress(p);
        let finalized =
            written.and_then(|()| self.finalize(leftovers, request.keep, recorder, progress));
        let record = match finalized {
            Ok(mut finalized) => {
                finalized.stdout = record.stdout;
                finalized.stderr = record.stderr;
                finalized
            }
            Err(e) => {
                let mut state = self.save_outputs_aside(leftovers, &e);
                // This comes before the caller hears that the result is kept, and before the workspace is removed.
                if self.make_durable().is_err() && !self.is_in_memory() {
                    state = CommitState::InWorkspace;
                }
                uncommitted(record, Some(e), state)
            }
        };
        self.workspace = disk;
        if record.commit.state == CommitState::Pending {
            self.remove_workspace();
            self.move_to_pending(context);
        }
        record
    }

    fn finalize(
        &self,
        leftovers: Leftovers<'_>,
        keep: KeepPolicy,
        recorder: &mut Recorder,
        progress: &mut dyn FnMut(collect::CollectProgress),
    ) -> Result<Record, CommitError> {
        let (Some(dir), Some(commit_plan)) = (&self.dir, &self.record.commit_plan) else {
            return Err(CommitError::NoOutcome);
        };
        let transfer = |record: &Record| match is_kept(keep, record.status) {
            true => TransferMode::Copy,
            false => TransferMode::Move,
        };
        let ended = EndedAttempt {
            dir,
            run: &self.record,
            commit_plan,
            leftovers,
            transfer: &transfer,
            trust: ContentCheck::TrustManifest,
            modes: ModePolicy::Override,
        };
        finalize::finalize_attempt(&ended, recorder, progress)
    }

    /// The commit failed. Stores the outputs in the run directory where that is needed, and returns whether they are
    /// safe without the workspace.
    fn save_outputs_aside(&self, leftovers: Leftovers<'_>, error: &CommitError) -> CommitState {
        let (Some(dir), Some(commit_plan)) = (&self.dir, &self.record.commit_plan) else {
            return CommitState::InWorkspace;
        };
        if error.is_database_error() {
            return CommitState::Pending;
        }
        if commit_plan.memory {
            // Outputs that do not fit are lost with the memory, because no workspace on disk holds them. The record
            // says so.
            let _ = output_transfer::store_outputs_aside(&EndedAttempt {
                dir,
                run: &self.record,
                commit_plan,
                leftovers,
                transfer: &|_| TransferMode::Move,
                trust: ContentCheck::TrustManifest,
                modes: ModePolicy::Override,
            });
            return CommitState::Pending;
        }
        let ended = EndedAttempt {
            dir,
            run: &self.record,
            commit_plan,
            leftovers,
            transfer: &|_| TransferMode::Move,
            trust: ContentCheck::TrustManifest,
            modes: ModePolicy::Override,
        };
        match output_transfer::store_outputs_aside(&ended) {
            Ok(()) => CommitState::Pending,
            Err(_) => CommitState::InWorkspace,
        }
    }

    /// From here on, the content of the run directory survives a power cut.
    fn make_durable(&self) -> Result<(), CommitError> {
        match &self.dir {
            Some(dir) => Ok(dir.make_durable()?),
            None => Ok(()),
        }
    }

    /// Whether the workspace is in memory and disappears with this process.
    fn is_in_memory(&self) -> bool {
        self.record
            .commit_plan
            .as_ref()
            .is_some_and(|commit_plan| commit_plan.memory)
    }

    fn write_outcome(
        &self,
        record: &Record,
        stdout: &CapturedLog,
        stderr: &CapturedLog,
    ) -> Result<(), CommitError> {
        match &self.dir {
            Some(dir) => outcome_file::write(dir, record, [stdout, stderr]),
            None => Err(CommitError::NoOutcome),
        }
    }

    fn remove_workspace(&mut self) -> Option<String> {
        let workspace = self.workspace.take()?;
        self.wait_for_init();
        workspace
            .remove(Receipt::OutputsDurable)
            .err()
            .map(|e| error_chain(&e))
    }

    /// The attempt has ended and is not committed. Moves its run directory to `pending/`, where nobody takes it for a
    /// running attempt.
    fn move_to_pending(&mut self, context: &RunContext) {
        let workspace = self.remove_workspace();
        // Stale limits do no harm: the next run with this project replaces them.
        let _ = self.release_quota();
        let group = self.remove_cgroup();
        self.release_uid();
        if let Some(mut dir) = self.dir.take() {
            if group.is_none() {
                self.record.cgroups.clear();
            }
            // If this fails, the earlier record stays and says enough.
            let _ = dir.write_record_durably(&self.record);
            // The reaper looks in `runs/` too, so a failed move is harmless.
            if workspace.is_none() && group.is_none() {
                let _ = dir.move_to_pending(&context.home);
            }
        }
    }

    /// Removes the workspace and everything else of the attempt, or keeps what must stay. The record lists what could
    /// not be removed.
    fn clean_up(
        &mut self,
        request: &Request,
        all_dead: bool,
        record: &mut Record,
        recorder: Option<&mut Recorder>,
    ) {
        if !all_dead {
            self.record.state = RunState::Quarantined;
            record
                .notices
                .extend(self.save().err().map(|e| error_chain(&e)));
            self.abandon_to_reaper();
            return;
        }
        let state = self.record.state;
        match record.commit.state {
            CommitState::InWorkspace | CommitState::Awaited => {
                return self.keep_workspace(&mut record.notices, state);
            }
            CommitState::Pending => return,
            CommitState::Unrecorded if self.prepared_state.is_some() => {
                // Nothing is recorded, but the workspace is the user's to remove.
                return self.keep_workspace(&mut record.notices, RunState::Recorded);
            }
            CommitState::Unrecorded | CommitState::Committed | CommitState::Superseded => {}
        }
        let mut keep = is_kept(request.keep, record.status);
        if keep && request.workspace_kind == WorkspaceKind::Memory {
            record
                .notices
                .push("a workspace in memory cannot be kept".into());
            keep = false;
        }
        if !keep {
            record.notices.extend(self.remove_workspace());
            record
                .notices
                .extend(crash_point_notice(CrashPoint::WorkspaceRemoved));
        }
        if let (Some(recorder), Some(dir)) = (recorder, &self.dir) {
            let (id, attempt) = (record.id.as_str(), record.attempt);
            record.post_process = post_process::run_if_due(recorder, (id, attempt), dir.path());
        }
        if keep {
            let until = home::unix_seconds() + request.keep_for_ms.div_ceil(1000);
            self.keep_workspace(&mut record.notices, RunState::Kept { until });
            record.kept_until = Some(until);
            return;
        }
        record
            .notices
            .extend(self.remove_everything(Receipt::OutputsDurable));
        record
            .notices
            .extend(crash_point_notice(CrashPoint::Finished));
    }

    /// Keeps the workspace and takes ownership of its files: another run will have the leased uid later.
    fn keep_workspace(&mut self, notices: &mut Vec<String>, state: RunState) {
        // The cgroups stay in the record until they are gone. The uid stays leased until no file belongs to it.
        let group_error = self.remove_cgroup();
        if group_error.is_none() {
            self.record.cgroups.clear();
        }
        notices.extend(group_error);
        self.record.state = state;
        let kept = self.workspace.take().map(Workspace::keep);
        match kept {
            Some(Err(e)) => notices.push(format!("{}; it is kept as it is", error_chain(&e))),
            _ => {
                if let Some(commit_plan) = &mut self.record.commit_plan {
                    commit_plan.workspace_reowned = true;
                }
            }
        }
        notices.extend(self.save().err().map(|e| error_chain(&e)));
        notices.extend(self.release_quota());
        self.release_uid();
        self.dir = None;
    }

    /// Leaves everything in place, for the reaper.
    fn abandon_to_reaper(&mut self) {
        self.dir = None;
        self.workspace = None;
        self.quota = None;
        self.lease = None;
        self.group = Err(String::new());
    }

    /// Frees the quota project. This comes before the uid is released, because the project belongs to the uid.
    fn release_quota(&mut self) -> Option<String> {
        let quota = self.quota.take()?;
        let project = quota.project();
        let e = quota.release().err()?;
        Some(format!("free project {project} of its limits: {e}"))
    }

    /// Removes the cgroup. Returns why, if that failed now or before.
    fn remove_cgroup(&mut self) -> Option<String> {
        let group = std::mem::replace(&mut self.group, Err(String::new()));
        let failed = group.ok().and_then(|g| g.remove().err());
        failed
            .map(|e| error_chain(&e))
            .or_else(|| self.group_removal_error.take())
    }

    fn release_uid(&mut self) {
        self.wait_for_init();
        // A uid that is not returned as clean is checked for leftover processes before its next use.
        if let Some(lease) = self.lease.take()
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

    /// Removes what was created, and the run directory last. Returns what could not be removed.
    fn remove_everything(&mut self, receipt: Receipt) -> Option<String> {
        let mut problems = Vec::new();
        if let Some(before) = self.prepared_state.filter(|_| self.dir.is_some()) {
            // The user made the workspace, so it stays.
            self.keep_workspace(
                &mut problems,
                if self.row_begun {
                    RunState::Recorded
                } else {
                    before
                },
            );
            return problems.pop();
        }
        self.wait_for_init();
        if let Some(workspace) = self.workspace.take()
            && let Err(e) = workspace.remove(receipt)
        {
            problems.push(error_chain(&e));
        }
        problems.extend(self.release_quota());
        problems.extend(self.remove_cgroup());
        self.release_uid();
        let dir = self.dir.take()?;
        if problems.is_empty() {
            problems.extend(dir.remove().err().map(|e| error_chain(&e)));
        }
        (!problems.is_empty())
            .then(|| format!("{}; `fumehood gc` tries again", problems.join("; ")))
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        // This runs only after an error, and the caller reports that error. Nothing ran, or every process is dead.
        // The reaper removes what is left.
        let _ = self.remove_everything(Receipt::NothingRan);
    }
}

fn is_kept(keep: KeepPolicy, status: Status) -> bool {
    match keep {
        KeepPolicy::Never => false,
        KeepPolicy::OnFailure => status != Status::Succeeded,
        KeepPolicy::Always => true,
    }
}

/// The record of an attempt that is not committed, and why it is not.
fn uncommitted(mut record: Record, error: Option<CommitError>, state: CommitState) -> Record {
    record.commit.state = state;
    record.commit.message = error.map(|e| error_chain(&e));
    record
}

/// Passes a crash point after the commit. A failure there cannot change the result, so it only becomes a notice.
fn crash_point_notice(step: CrashPoint) -> Option<String> {
    let e = crash_points::reach(step).err()?;
    Some(format!("after the step `{}`: {e}", step.name()))
}
