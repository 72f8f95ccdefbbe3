//! Begins the row of an attempt in the database. This is not a transition of its own: the row is begun while the
//! sandbox is being built, before many inputs are copied, or when the start has failed, whichever comes first.

use sandbox::spec::WorkspaceKind;

use crate::attempt::context::{Claim, PlannedRun};
use crate::attempt::error::{AttemptError, CommitError, pass_crash_point};
use crate::attempt::recorder::Recorder;
use crate::attempt::states::{OwnedRun, RowState};
use crate::provenance;
use crate::request::IdReuse;
use crate::run_dir::{CommitPlan, RunRecord};
use store::artifacts::Artifacts;
use store::types::crash_points::CrashPoint;

impl RowState<'_> {
    /// Begins the row, unless that is done or nothing is to be recorded. Nothing of the program runs before.
    ///
    /// Durable step: [`CrashPoint::Begun`].
    pub fn begin(
        &mut self,
        owned: &mut OwnedRun,
        run: &PlannedRun<'_>,
    ) -> Result<(), AttemptError> {
        let (recorder, artifacts) = match std::mem::replace(self, RowState::NotRecorded) {
            RowState::NotBegun {
                recorder,
                artifacts,
            } => (recorder, artifacts),
            other => {
                *self = other;
                return Ok(());
            }
        };
        let commit_plan = match &owned.record.commit_plan {
            Some(commit_plan) => commit_plan.clone(),
            None => {
                let commit_plan = new_commit_plan(run, recorder, &artifacts)?;
                owned.record.commit_plan = Some(commit_plan.clone());
                // Save the key first: if this process dies now, the reaper asks the database whether it has that key.
                owned.save()?;
                commit_plan
            }
        };
        match &run.context.claimed {
            Some(claimed) => take_over_claim(recorder, &owned.record, &commit_plan, claimed)?,
            None => {
                // If the connection fails here, nothing was sent, so the database has no row.
                recorder.store()?;
                let id_reuse = run.request.id_reuse;
                let mut answer = begin_row(recorder, &owned.record, &commit_plan, id_reuse);
                // If the answer was lost, repeat the call once with the same key. If the second answer is lost too, the
                // reaper asks the database later: the key is in the run directory.
                if answer.as_ref().is_err_and(CommitError::is_unavailable) {
                    recorder.disconnect();
                    answer = begin_row(recorder, &owned.record, &commit_plan, id_reuse);
                    if answer.as_ref().is_err_and(CommitError::is_unavailable) {
                        *self = RowState::Unknown;
                    }
                }
                // The number differs from the expected one if another machine began an attempt of the same id first.
                owned.record.attempt = answer?;
            }
        }
        let commit_plan = CommitPlan {
            begun: true,
            ..commit_plan
        };
        owned.record.commit_plan = Some(commit_plan.clone());
        let saved = owned.save().map_err(AttemptError::from);
        let saved = saved.and_then(|()| Ok(pass_crash_point(CrashPoint::Begun)?));
        if saved.is_ok() {
            recorder.put_aside();
        }
        *self = RowState::Begun {
            recorder,
            commit_plan,
        };
        saved
    }
}

/// What finishing this attempt needs.
pub(super) fn new_commit_plan(
    run: &PlannedRun<'_>,
    recorder: &mut Recorder,
    artifacts: &Artifacts,
) -> Result<CommitPlan, CommitError> {
    let claimed = run.context.claimed.as_ref();
    let database_id = claimed.map(|claimed| claimed.database_id.as_str());
    let known = database_id.filter(|id| !id.is_empty());
    let mut commit_plan = recorder.new_commit_plan(&run.request.collection, artifacts, known)?;
    if let Some(claimed) = claimed {
        commit_plan.key.clone_from(&claimed.key);
    }
    commit_plan.memory = run.request.workspace_kind == WorkspaceKind::Memory;
    Ok(commit_plan)
}

/// Inserts the row of the attempt, in state `running`.
pub(crate) fn begin_row(
    recorder: &mut Recorder,
    run: &RunRecord,
    commit_plan: &CommitPlan,
    id_reuse: IdReuse,
) -> Result<u32, CommitError> {
    let workspace = run.workspace.to_string_lossy();
    let submitter = provenance::submitter_name();
    let mut begin = row_values(run, commit_plan, &workspace);
    begin.replace = id_reuse == IdReuse::Replace;
    begin.submitter = Some(&submitter);
    recorder.with(|store| store.begin(&begin))
}

/// Takes over the row that a worker claimed for this process. Fails if the claim was given up or another process took
/// it over.
fn take_over_claim(
    recorder: &mut Recorder,
    run: &RunRecord,
    commit_plan: &CommitPlan,
    claimed: &Claim,
) -> Result<(), AttemptError> {
    let workspace = run.workspace.to_string_lossy();
    let begin = row_values(run, commit_plan, &workspace);
    let is_ours =
        recorder.with(|store| store.start_claimed(&begin, claimed.attempt, claimed.lease_ms))?;
    match is_ours {
        true => Ok(()),
        false => Err(AttemptError::ClaimLost {
            id: run.id.clone(),
            attempt: claimed.attempt,
        }),
    }
}

fn row_values<'a>(
    run: &'a RunRecord,
    commit_plan: &'a CommitPlan,
    workspace: &'a str,
) -> store::NewAttempt<'a> {
    store::NewAttempt {
        id: run.id.as_str(),
        key: &commit_plan.key,
        replace: false,
        host: &run.host,
        boot_id: &run.boot_id,
        submitter: None,
        workspace: Some(workspace),
        provenance: None,
    }
}
