//! The first transition: claims the run directory and the uid on this host. Also has `ensure_row`, which begins the row
//! in the database later.

use sandbox::cgroup;
use sandbox::spec::WorkspaceKind;

use crate::attempt::context::{ClaimedAttempt, RunContext, WorkspaceSource};
use crate::attempt::error::{AttemptError, CommitError, pass_crash_point};
use crate::attempt::recorder::Recorder;
use crate::attempt::state::Attempt;
use crate::collect;
use crate::home::{self, HomeError};
use crate::plan::Plan;
use crate::provenance;
use crate::request::{IdReuse, Request};
use crate::run_dir::{CommitPlan, RunDir, RunRecord, RunState};
use crate::workspace::uid_pool::UidLease;
use store::artifacts::Artifacts;
use store::types::crash_points::CrashPoint;

impl Attempt {
    /// Claims the id on this host. The database gets its row later: while the sandbox is being built, or before many
    /// inputs are copied.
    pub fn begin(
        request: &Request,
        context: &RunContext,
        plan: &Plan,
        mut recorder: Option<&mut Recorder>,
    ) -> Result<Attempt, AttemptError> {
        check_globs(request)?;
        let artifacts = recorder.as_deref().map(Recorder::artifacts).transpose()?;
        if let Some(artifacts) = &artifacts {
            check_free_space(
                artifacts,
                context.free_reserve_bytes,
                context.store_quota_bytes,
            )?;
        }
        let (dir, record, prepared_state) = match context.workspace_source {
            WorkspaceSource::Fresh => {
                let number = match (&context.claimed, recorder.as_deref_mut()) {
                    (Some(claimed), _) => claimed.attempt,
                    (None, Some(recorder)) if request.id_reuse != IdReuse::Generated => {
                        next_number(recorder, request)?
                    }
                    _ => 1,
                };
                let dir = RunDir::claim(&context.home, &request.id, number)?;
                let record = RunRecord::new(&request.id, &plan.workspace_root, number);
                (dir, record, None)
            }
            WorkspaceSource::Prepared => open_prepared(request, context)?,
        };
        let lease = rustix::process::geteuid()
            .is_root()
            .then(UidLease::acquire)
            .transpose();
        if recorder.is_some() {
            dir.reserve_outcome_space();
        }
        // This may move the process into another cgroup, so it comes before `discover`. `create_cgroup` reports a
        // failure.
        let _ = crate::attempt::systemd_scope::ensure_delegated();
        let mut attempt = Attempt {
            dir: Some(dir),
            record,
            lease: None,
            workspace: None,
            quota: None,
            group: Err(String::from("no cgroup was made")),
            group_removal_error: None,
            cgroup_host: cgroup::discover(),
            init_exit: None,
            init_may_live: false,
            detached_store: None,
            artifacts,
            unrecorded_inputs: None,
            row_unknown: false,
            row_begun: false,
            prepared_state,
        };
        // A generated id is new, so skip the database lookup.
        if let (true, Some(recorder)) = (request.id_reuse != IdReuse::Generated, recorder) {
            let artifacts = attempt.artifacts.as_ref();
            let commit_plan = artifacts
                .map(|at| new_commit_plan(request, recorder, at, context.claimed.as_ref()));
            attempt.record.commit_plan = commit_plan.transpose()?;
        }
        attempt.lease = lease?;
        attempt.record.uid = attempt.lease.as_ref().map(|l| l.uid);
        let id = request.id.as_str();
        attempt.record.cgroups = cgroup::planned_paths(&attempt.cgroup_host, id);
        attempt.save()?;
        pass_crash_point(CrashPoint::Claimed)?;
        Ok(attempt)
    }

    /// Begins the row, and repeats the call once with the same key if the answer was lost. If the second answer is lost
    /// too, the reaper asks the database later: the key is in the run directory.
    fn begin_row_with_retry(
        &mut self,
        recorder: &mut Recorder,
        commit_plan: &CommitPlan,
        id_reuse: IdReuse,
    ) -> Result<u32, CommitError> {
        // If the connection fails here, nothing was sent, so the database has no row.
        recorder.store()?;
        match begin_row(recorder, &self.record, commit_plan, id_reuse) {
            Err(e) if e.is_unavailable() => recorder.disconnect(),
            answer => return answer,
        }
        let answer = begin_row(recorder, &self.record, commit_plan, id_reuse);
        self.row_unknown = answer.as_ref().is_err_and(CommitError::is_unavailable);
        answer
    }

    /// Begins the row in the database, unless that is done. Nothing of the program runs before.
    pub(super) fn ensure_row(
        &mut self,
        recorder: Option<&mut Recorder>,
        request: &Request,
        claimed: Option<&ClaimedAttempt>,
    ) -> Result<(), AttemptError> {
        let (Some(recorder), Some(artifacts)) = (recorder, self.artifacts.take()) else {
            return Ok(());
        };
        let commit_plan = match &self.record.commit_plan {
            Some(commit_plan) => commit_plan.clone(),
            None => {
                let commit_plan = new_commit_plan(request, recorder, &artifacts, claimed)?;
                self.record.commit_plan = Some(commit_plan.clone());
                // Save the key first: if this process dies now, the reaper asks the database whether it has that key.
                self.save()?;
                commit_plan
            }
        };
        match claimed {
            Some(claimed) => take_over_claim(recorder, &self.record, &commit_plan, claimed)?,
            // The number differs from the expected one if another machine began an attempt of the same id first.
            None => {
                self.record.attempt =
                    self.begin_row_with_retry(recorder, &commit_plan, request.id_reuse)?
            }
        }
        self.row_begun = true;
        self.record.commit_plan = Some(CommitPlan {
            begun: true,
            ..commit_plan
        });
        self.save()?;
        pass_crash_point(CrashPoint::Begun)?;
        recorder.set_process_ends_soon();
        self.detached_store = recorder.detach();
        Ok(())
    }
}

/// Finds a bad pattern before anything runs.
fn check_globs(request: &Request) -> Result<(), AttemptError> {
    collect::Globs::new(&request.collection.outputs)?;
    collect::Globs::new(&request.collection.expects)?;
    Ok(())
}

/// The number that the next attempt of this id gets, unless another process begins one first.
fn next_number(recorder: &mut Recorder, request: &Request) -> Result<u32, AttemptError> {
    Ok(recorder.with(|store| store.next_attempt_number(request.id.as_str()))?)
}

fn new_commit_plan(
    request: &Request,
    recorder: &mut Recorder,
    artifacts: &Artifacts,
    claimed: Option<&ClaimedAttempt>,
) -> Result<CommitPlan, AttemptError> {
    let database_id = claimed.map(|claimed| claimed.database_id.as_str());
    let known = database_id.filter(|id| !id.is_empty());
    let mut commit_plan = recorder.new_commit_plan(&request.collection, artifacts, known)?;
    if let Some(claimed) = claimed {
        commit_plan.key.clone_from(&claimed.key);
    }
    commit_plan.memory = request.workspace_kind == WorkspaceKind::Memory;
    Ok(commit_plan)
}

/// Opens the run directory that `workspace create` made for this id. Fails if something has run in it.
fn open_prepared(
    request: &Request,
    context: &RunContext,
) -> Result<(RunDir, RunRecord, Option<RunState>), AttemptError> {
    let id = request.id.clone();
    let found = RunDir::find(&context.home, &id)?;
    let (dir, mut record) = found.ok_or(HomeError::NoWorkspace { id: id.clone() })?;
    let before = record.state;
    match before {
        RunState::Open { .. } => {}
        _ => return Err(HomeError::RanAlready { id }.into()),
    }
    record.state = RunState::Live;
    record.prepared = true;
    record.runner_pid = std::process::id();
    record.boot_id = home::boot_id();
    Ok((dir, record, Some(before)))
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
    claimed: &ClaimedAttempt,
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

/// Fails if the artifact store has too little free space or has reached its quota. An attempt whose outputs could not
/// be kept is not begun.
pub(crate) fn check_free_space(
    artifacts: &Artifacts,
    free_reserve_bytes: u64,
    store_quota_bytes: Option<u64>,
) -> Result<(), AttemptError> {
    let free = rustix::fs::statvfs(artifacts.path())
        .map(|s| s.f_bavail.saturating_mul(s.f_frsize))
        .unwrap_or(u64::MAX);
    if free < free_reserve_bytes {
        return Err(AttemptError::TooLittleSpace {
            what: artifacts.path().to_path_buf(),
            free: store::types::units::format_size(free),
            reserve: store::types::units::format_size(free_reserve_bytes),
        });
    }
    if let Some(quota) = store_quota_bytes {
        let used = artifacts.usage().map_err(CommitError::from)?.bytes;
        if used >= quota {
            return Err(AttemptError::StoreFull {
                used: store::types::units::format_size(used),
                quota: store::types::units::format_size(quota),
            });
        }
    }
    Ok(())
}
