//! The ways out of an attempt: committed and removed, kept, set aside, quarantined, or never begun.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use sandbox::spec::WorkspaceKind;

use super::{Attempt, Ran};
use crate::attempt::finalize::{self, Ended, Left, SettleError};
use crate::attempt::log_capture::Captured;
use crate::attempt::pipeline::{Audience, Done, NotRun, PipelineError, Place, Surroundings};
use crate::attempt::post_process;
use crate::attempt::record::{CommitState, Record, Status};
use crate::attempt::record_builder;
use crate::attempt::recorder::Ledger;
use crate::collect::{self, Modes};
use crate::home;
use crate::plan::Plan;
use crate::plan::limits::error_chain;
use crate::request::{Keep, Request};
use crate::run_dir::{ProcessIdentity, RunState};
use crate::workspace::{Receipt, Workspace};
use store::artifacts::{ContentCheck, TransferMode};
use store::types::crash_points::{self, CrashPoint};

impl Attempt {
    /// Fumehood could not start it. If the database knows of the attempt, it learns of its end.
    pub fn fail(
        mut self,
        request: &Request,
        around: &Surroundings,
        plan: &Plan,
        ledger: Option<&mut Ledger>,
        error: PipelineError,
    ) -> NotRun {
        let Some(ledger) = ledger else {
            return error.into();
        };
        if let Some(puts) = self.unexplained.take() {
            let _or_not = self.note_provenance(request, plan, &puts);
        }
        // What became of it is told, also where it failed before the database knew of it; but not to one that refused it.
        if !matches!(
            error,
            PipelineError::Ledger(_) | PipelineError::TakenAway { .. }
        ) {
            let _or_not = self.begin_in(Some(ledger), request, around.taken.as_ref());
        }
        if self.unanswered {
            // The run directory stays, and what the user made.
            self.workspace = self.workspace.take().filter(|_| self.prepared.is_none());
            self.dir = None;
        }
        if !self.begun {
            return error.into();
        }
        ledger.take_back(self.lent.take());
        let record = record_builder::not_run(request, self.number(), &error);
        let nothing = Captured::default();
        let settled = self
            .write_ending(&record, &nothing, &nothing)
            .and_then(|()| self.settle(Left::Nothing, Keep::Never, ledger, &mut |_| {}));
        let record = match settled {
            Ok(mut settled) => {
                self.begun = self.prepared.is_some();
                if let Some(dir) = &self.dir {
                    let key = (settled.id.as_str(), settled.attempt);
                    settled.post_process = post_process::if_due(ledger, key, dir.path());
                }
                settled
            }
            // The run directory tells it later.
            Err(e) => {
                let _nothing_ran = self.make_durable();
                match self.prepared {
                    // The user's workspace stays; `post-process` commits that nothing ran in it.
                    Some(_) => self.stay(&mut Vec::new(), RunState::Ran),
                    None => self.leave_pending(around),
                }
                unfinished(record, Some(e), CommitState::Pending)
            }
        };
        NotRun {
            error,
            record: Some(Box::new(record)),
        }
    }

    /// Everything is dead, or is not: what it left is committed, and the workspace goes, stays, or is quarantined.
    pub fn end(
        mut self,
        request: &Request,
        around: &Surroundings,
        mut ledger: Option<&mut Ledger>,
        record: Record,
        mut ran: Ran,
        audience: &mut dyn Audience,
    ) -> Done {
        let memory = ran.memory.take();
        let (stdout, stderr) = (ran.stdout, ran.stderr);
        let mut record = match ledger.as_deref_mut() {
            None => record,
            Some(ledger) => {
                ledger.take_back(self.lent.take());
                let written = finalize::reached(CrashPoint::Ended)
                    .and(self.write_ending(&record, &stdout, &stderr));
                match (ran.outcome.all_dead, around.place) {
                    (false, _) => {
                        // Its end is known, and is committed from here: no other machine need try it again.
                        self.tell_of_end(around, ledger, &record);
                        let durable = written.and_then(|()| self.make_durable());
                        unfinished(record, durable.err(), CommitState::InWorkspace)
                    }
                    (true, Place::Prepared) => {
                        let durable = written.and_then(|()| self.make_durable());
                        self.record.state = RunState::Ran;
                        unfinished(record, durable.err(), CommitState::Awaited)
                    }
                    (true, Place::Fresh) => {
                        self.tell_of_end(around, ledger, &record);
                        let memory = memory.as_ref().map(OwnedFd::as_fd);
                        self.commit(request, around, ledger, record, memory, written, audience)
                    }
                }
            }
        };
        self.record.init = ran.undead_init.and_then(ProcessIdentity::of);
        self.leave(request, ran.outcome.all_dead, &mut record, ledger);
        Done {
            record,
            stdout,
            stderr,
        }
    }

    /// The queue learns that the program has ended, and that this machine has what it left. A database that is away
    /// learns it from the commit.
    fn tell_of_end(&self, around: &Surroundings, ledger: &mut Ledger, record: &Record) {
        let (Some(taken), Some(task)) = (&around.taken, &self.record.task) else {
            return;
        };
        let held = store::LeasedAttempt {
            id: self.record.id.as_str(),
            attempt: self.record.attempt,
            key: &task.key,
        };
        let reason = record.reason.as_str();
        let _learns_it_later =
            ledger.with(|store| store.mark_collecting(&held, taken.lease_ms, reason));
    }

    #[allow(clippy::too_many_arguments)]
    fn commit(
        &mut self,
        request: &Request,
        around: &Surroundings,
        ledger: &mut Ledger,
        record: Record,
        memory: Option<BorrowedFd<'_>>,
        written: Result<(), SettleError>,
        audience: &mut dyn Audience,
    ) -> Record {
        let owner_uid = self.owner_uid();
        let disk = self.workspace.take();
        let left = match (memory, &disk) {
            (Some(memory), _) => Left::Directory {
                dir: memory,
                owner_uid,
            },
            (None, Some(disk)) => Left::Directory {
                dir: disk.dir(),
                owner_uid,
            },
            (None, None) => Left::Nothing,
        };
        let progress = &mut |p| audience.progress(p);
        let settled = written.and_then(|()| self.settle(left, request.keep, ledger, progress));
        let record = match settled {
            Ok(mut settled) => {
                settled.stdout = record.stdout;
                settled.stderr = record.stderr;
                settled
            }
            Err(e) => {
                let mut state = self.set_aside(left, &e);
                // Before anybody is told that it is kept, and before the workspace goes.
                if self.make_durable().is_err() && !self.is_in_memory() {
                    state = CommitState::InWorkspace;
                }
                unfinished(record, Some(e), state)
            }
        };
        self.workspace = disk;
        if record.commit.state == CommitState::Pending {
            self.remove_workspace();
            self.leave_pending(around);
        }
        record
    }

    fn settle(
        &self,
        left: Left<'_>,
        keep: Keep,
        ledger: &mut Ledger,
        progress: &mut dyn FnMut(collect::Progress),
    ) -> Result<Record, SettleError> {
        let (Some(dir), Some(task)) = (&self.dir, &self.record.task) else {
            return Err(SettleError::NoOutcome);
        };
        let transfer = |record: &Record| match keeps(keep, record.status) {
            true => TransferMode::Copy,
            false => TransferMode::Move,
        };
        let ended = Ended {
            dir,
            run: &self.record,
            task,
            left,
            transfer: &transfer,
            trust: ContentCheck::TrustManifest,
            modes: Modes::Override,
        };
        finalize::settle(&ended, ledger, progress)
    }

    /// The commit failed. Are the outputs safe without the workspace?
    fn set_aside(&self, left: Left<'_>, error: &SettleError) -> CommitState {
        let (Some(dir), Some(task)) = (&self.dir, &self.record.task) else {
            return CommitState::InWorkspace;
        };
        if error.is_of_the_database() {
            return CommitState::Pending;
        }
        if task.memory {
            // What does not fit beside the record is lost with the memory: there is no workspace to leave it in.
            let _told_by_the_record = finalize::set_aside(&Ended {
                dir,
                run: &self.record,
                task,
                left,
                transfer: &|_| TransferMode::Move,
                trust: ContentCheck::TrustManifest,
                modes: Modes::Override,
            });
            return CommitState::Pending;
        }
        let ended = Ended {
            dir,
            run: &self.record,
            task,
            left,
            transfer: &|_| TransferMode::Move,
            trust: ContentCheck::TrustManifest,
            modes: Modes::Override,
        };
        match finalize::set_aside(&ended) {
            Ok(()) => CommitState::Pending,
            Err(_) => CommitState::InWorkspace,
        }
    }

    /// What the run directory says outlives a power cut from here on.
    fn make_durable(&self) -> Result<(), SettleError> {
        match &self.dir {
            Some(dir) => Ok(dir.make_durable()?),
            None => Ok(()),
        }
    }

    /// Whether the workspace dies with us.
    fn is_in_memory(&self) -> bool {
        self.record.task.as_ref().is_some_and(|task| task.memory)
    }

    fn write_ending(
        &self,
        record: &Record,
        stdout: &Captured,
        stderr: &Captured,
    ) -> Result<(), SettleError> {
        match &self.dir {
            Some(dir) => finalize::write_ending(dir, record, [stdout, stderr]),
            None => Err(SettleError::NoOutcome),
        }
    }

    fn remove_workspace(&mut self) -> Option<String> {
        let workspace = self.workspace.take()?;
        self.see_init_off();
        workspace
            .remove(Receipt::Settled)
            .err()
            .map(|e| error_chain(&e))
    }

    /// Ended and not committed: the run directory goes where nobody takes it for a running one.
    fn leave_pending(&mut self, around: &Surroundings) {
        let workspace = self.remove_workspace();
        let _quota = self.release_quota();
        let group = self.finish_group();
        self.finish_lease();
        if let Some(mut dir) = self.dir.take() {
            if group.is_none() {
                self.record.cgroups.clear();
            }
            let _as_it_was = dir.write_durably(&self.record);
            // Where it stands it is found as well.
            if workspace.is_none() && group.is_none() {
                let _found_there = dir.move_to_pending(&around.home);
            }
        }
    }

    /// What stays of the attempt besides its record, and what goes.
    fn leave(
        &mut self,
        request: &Request,
        all_dead: bool,
        record: &mut Record,
        ledger: Option<&mut Ledger>,
    ) {
        if !all_dead {
            self.record.state = RunState::Quarantined;
            record
                .notices
                .extend(self.save().err().map(|e| error_chain(&e)));
            self.forget();
            return;
        }
        let state = self.record.state;
        match record.commit.state {
            CommitState::InWorkspace | CommitState::Awaited => {
                return self.stay(&mut record.notices, state);
            }
            CommitState::Pending => return,
            CommitState::Unrecorded if self.prepared.is_some() => {
                // Nobody wants a record, but the workspace is the user's to remove.
                return self.stay(&mut record.notices, RunState::Recorded);
            }
            CommitState::Unrecorded | CommitState::Committed | CommitState::Superseded => {}
        }
        let mut keep = keeps(request.keep, record.status);
        if keep && request.workspace_kind == WorkspaceKind::Memory {
            record
                .notices
                .push("a workspace in memory cannot be kept".into());
            keep = false;
        }
        if !keep {
            record.notices.extend(self.remove_workspace());
            record.notices.extend(told(CrashPoint::WorkspaceRemoved));
        }
        if let (Some(ledger), Some(dir)) = (ledger, &self.dir) {
            let (id, attempt) = (record.id.as_str(), record.attempt);
            record.post_process = post_process::if_due(ledger, (id, attempt), dir.path());
        }
        if keep {
            let until = home::unix_seconds() + request.keep_for_ms.div_ceil(1000);
            self.stay(&mut record.notices, RunState::Kept { until });
            record.kept_until = Some(until);
            return;
        }
        record.notices.extend(self.undo(Receipt::Settled));
        record.notices.extend(told(CrashPoint::Finished));
    }

    /// The workspace stays, everything in it ours: the leased uid will be another's tomorrow.
    fn stay(&mut self, notices: &mut Vec<String>, state: RunState) {
        // The groups stay on record until they are gone, and the lease is held until nothing is the uid's any more.
        let left = self.finish_group();
        if left.is_none() {
            self.record.cgroups.clear();
        }
        notices.extend(left);
        self.record.state = state;
        let kept = self.workspace.take().map(Workspace::keep);
        match kept {
            Some(Err(e)) => notices.push(format!("{}; it is kept as it is", error_chain(&e))),
            _ => {
                if let Some(task) = &mut self.record.task {
                    task.taken_over = true;
                }
            }
        }
        notices.extend(self.save().err().map(|e| error_chain(&e)));
        notices.extend(self.release_quota());
        self.finish_lease();
        self.dir = None;
    }

    /// Leaves everything where it is, for the reaper.
    fn forget(&mut self) {
        self.dir = None;
        self.workspace = None;
        self.quota = None;
        self.lease = None;
        self.group = Err(String::new());
    }

    /// Before the lease ends, with which the project is ours.
    fn release_quota(&mut self) -> Option<String> {
        let quota = self.quota.take()?;
        let project = quota.project();
        let e = quota.release().err()?;
        Some(format!("free project {project} of its limits: {e}"))
    }

    /// Says why, if the group could not be removed, now or before.
    fn finish_group(&mut self) -> Option<String> {
        let group = std::mem::replace(&mut self.group, Err(String::new()));
        let failed = group.ok().and_then(|g| g.remove().err());
        failed
            .map(|e| error_chain(&e))
            .or_else(|| self.group_stays.take())
    }

    fn finish_lease(&mut self) {
        self.see_init_off();
        // One that is not called clean is looked at before somebody else has it.
        if let Some(lease) = self.lease.take()
            && !self.init_stays
        {
            lease.give_back_clean();
        }
    }

    /// It may end while outputs are collected and committed, and takes the sandbox's mounts with it. The workspace and the
    /// uid are given up after that only.
    fn see_init_off(&mut self) {
        let Some(init) = self.leaving.take() else {
            return;
        };
        // It is in none of the run's groups, and those who were are dead: their removal need not wait for it.
        self.group_stays = self.finish_group();
        self.init_stays |= !init.wait();
    }

    /// Removes what was made, in an order that leaves the record until the end. Says what it could not.
    fn undo(&mut self, receipt: Receipt) -> Option<String> {
        let mut problems = Vec::new();
        if let Some(before) = self.prepared.filter(|_| self.dir.is_some()) {
            // What the user made is not ours to remove.
            self.stay(
                &mut problems,
                if self.begun {
                    RunState::Recorded
                } else {
                    before
                },
            );
            return problems.pop();
        }
        self.see_init_off();
        if let Some(workspace) = self.workspace.take()
            && let Err(e) = workspace.remove(receipt)
        {
            problems.push(error_chain(&e));
        }
        problems.extend(self.release_quota());
        problems.extend(self.finish_group());
        self.finish_lease();
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
        // Only on the way out with an error, which is the one to be told: nothing ran, or all is dead.
        let _left_to_the_reaper = self.undo(Receipt::NothingRan);
    }
}

fn keeps(keep: Keep, status: Status) -> bool {
    match keep {
        Keep::Never => false,
        Keep::OnFailure => status != Status::Succeeded,
        Keep::Always => true,
    }
}

/// The record of an attempt that is not committed yet, and why.
fn unfinished(mut record: Record, error: Option<SettleError>, state: CommitState) -> Record {
    record.commit.state = state;
    record.commit.message = error.map(|e| error_chain(&e));
    record
}

/// A failure after the commit changes nothing about it; it is only said.
fn told(step: CrashPoint) -> Option<String> {
    let e = crash_points::reach(step).err()?;
    Some(format!("after the step `{}`: {e}", step.name()))
}
