//! From [`ExecutedAttempt`] to [`AttemptToRelease`]: writes the outcome, and commits the attempt or keeps it for a later commit.

use std::os::fd::AsFd;

use crate::attempt::context::{PlannedRun, WorkspaceSource};
use crate::attempt::error::{CommitError, pass_crash_point};
use crate::attempt::finalize;
use crate::attempt::finalize::ended_attempt::{EndedAttempt, Finisher, Leftovers};
use crate::attempt::finalize::outcome_file;
use crate::attempt::finalize::output_transfer;
use crate::attempt::observer::RunObserver;
use crate::attempt::record::{CommitState, Record};
use crate::attempt::recorder::Recorder;
use crate::attempt::states::{AttemptToRelease, ExecutedAttempt, RowState};
use crate::plan::limits::error_chain;
use crate::run_dir::ProcessIdentity;
use store::types::crash_points::CrashPoint;

impl<'r> ExecutedAttempt<'r> {
    /// Durable steps: [`CrashPoint::Ended`], [`CrashPoint::LogsKept`] and [`CrashPoint::OutcomeWritten`] here, and in
    /// [`finalize`] those from [`CrashPoint::Collected`] to [`CrashPoint::Committed`].
    pub fn commit(
        self,
        run: &PlannedRun<'_>,
        observer: &mut dyn RunObserver,
    ) -> AttemptToRelease<'r> {
        let ExecutedAttempt {
            ready,
            ran,
            mut record,
        } = self;
        let (mut holdings, row) = ready.into_holdings();
        holdings.init_exit = ran.init_exit;
        let all_dead = ran.outcome.all_dead;
        let logs = [ran.stdout, ran.stderr];
        let mut recorder = None;
        if let RowState::Begun {
            recorder: begun_in,
            commit_plan,
        } = row
        {
            let owned = &holdings.run;
            let memory = ran.memory_workspace.as_ref().map(AsFd::as_fd);
            let disk = holdings.workspace.as_ref().map(|disk| disk.dir());
            let leftovers = memory.or(disk).map(|dir| Leftovers::Directory {
                dir,
                owner_uid: owned.owner_uid(),
            });
            let ended = EndedAttempt::new(
                &owned.dir,
                &owned.record,
                &commit_plan,
                &record,
                leftovers.unwrap_or(Leftovers::Nothing),
                Finisher::Runner {
                    keep: run.request.keep,
                    logs: logs.each_ref(),
                },
            );
            match finish(&ended, run, begun_in, all_dead, observer) {
                Ok(committed) => record = committed,
                Err(uncommitted) => {
                    record.commit.state = uncommitted.state;
                    record.commit.message = uncommitted.error.map(|e| error_chain(&e));
                }
            }
            recorder = Some(begun_in);
        }
        tracing::debug!(
            id = %record.id,
            attempt = record.attempt,
            status = record.status.as_str(),
            reason = record.reason.as_str(),
            commit = ?record.commit.state,
            why = ?record.commit.message,
            "the attempt ended"
        );
        holdings.run.record.init = ran.undead_init.and_then(ProcessIdentity::of);
        AttemptToRelease {
            holdings,
            recorder,
            record,
            all_dead,
            logs,
        }
    }
}

/// Where record and outputs are until they are committed.
struct Uncommitted {
    state: CommitState,
    error: Option<CommitError>,
}

fn finish(
    ended: &EndedAttempt<'_>,
    run: &PlannedRun<'_>,
    recorder: &mut Recorder,
    all_dead: bool,
    observer: &mut dyn RunObserver,
) -> Result<Record, Uncommitted> {
    recorder.resume();
    let written = pass_crash_point(CrashPoint::Ended)
        .map_err(CommitError::from)
        .and(outcome_file::write(ended));
    let awaited = all_dead && run.context.workspace_source == WorkspaceSource::Prepared;
    if !awaited {
        // If some process is not dead, this machine commits the end later, so no other machine need repeat the attempt.
        report_program_end(ended, run, recorder);
    }
    if awaited || !all_dead {
        let durable = written.and_then(|()| Ok(ended.dir.make_durable()?));
        return Err(Uncommitted {
            state: match awaited {
                true => CommitState::Awaited,
                false => CommitState::InWorkspace,
            },
            error: durable.err(),
        });
    }
    let progress = &mut |p| observer.progress(p);
    let finalized = written.and_then(|()| finalize::finalize_attempt(ended, recorder, progress));
    finalized.map_err(|e| {
        let mut state = save_outputs_aside(ended, &e);
        // This comes before the caller hears that the result is kept, and before the workspace is removed.
        if ended.dir.make_durable().is_err() && !ended.commit_plan.memory {
            state = CommitState::InWorkspace;
        }
        Uncommitted {
            state,
            error: Some(e),
        }
    })
}

/// Tells the queue that the program has ended and that this machine has its outputs. If the database is unavailable,
/// the commit says the same later.
fn report_program_end(ended: &EndedAttempt<'_>, run: &PlannedRun<'_>, recorder: &mut Recorder) {
    let Some(claim) = &run.context.claimed else {
        return;
    };
    let held = claim.leased_attempt();
    let reason = ended.outcome.reason.as_str();
    // If this fails, the commit reports the end later.
    let _ = recorder.with(|store| store.mark_collecting(&held, claim.lease_ms, reason));
}

/// The commit failed. Stores the outputs in the run directory where that is needed, and returns where the attempt
/// waits for its commit.
fn save_outputs_aside(ended: &EndedAttempt<'_>, error: &CommitError) -> CommitState {
    if error.is_database_error() {
        return CommitState::Pending;
    }
    match output_transfer::store_outputs_aside(ended) {
        Ok(()) => CommitState::Pending,
        // Outputs that do not fit are lost with the memory, because no workspace on disk holds them. The record says so.
        Err(_) if ended.commit_plan.memory => CommitState::Pending,
        Err(_) => CommitState::InWorkspace,
    }
}
