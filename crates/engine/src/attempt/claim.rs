//! The first transition, to [`LockedAttempt`]: locks the run directory of the id and leases the uid on this host. It writes
//! nothing to the database. (A queued attempt has had its row since it was submitted.)

use sandbox::cgroup::{self, OwnProcess};

use crate::attempt::context::{PlannedRun, WorkspaceSource};
use crate::attempt::error::{AttemptError, CommitError, pass_crash_point};
use crate::attempt::recorder::Recorder;
use crate::attempt::row::new_commit_plan;
use crate::attempt::states::{LockedAttempt, OwnedRun, RowState};
use crate::attempt::systemd_scope;
use crate::collect;
use crate::home::{self, HomeError};
use crate::request::IdReuse;
use crate::run_dir::{RunDir, RunRecord, RunState};
use crate::settings::Request;
use crate::workspace::Receipt;
use crate::workspace::uid_pool::{UidLease, UidLeaseError};
use store::artifacts::Artifacts;
use store::types::crash_points::CrashPoint;

impl<'r> LockedAttempt<'r> {
    /// Durable step: [`CrashPoint::Claimed`].
    pub fn claim(
        run: &PlannedRun<'_>,
        recorder: Option<&'r mut Recorder>,
    ) -> Result<LockedAttempt<'r>, AttemptError> {
        let (request, context) = (run.request, run.context);
        check_globs(request)?;
        let mut row = match recorder {
            None => RowState::NotRecorded,
            Some(recorder) => {
                let artifacts = recorder.artifacts()?;
                let quota = context.store_quota_bytes;
                check_free_space(&artifacts, context.free_reserve_bytes, quota)?;
                RowState::NotBegun {
                    recorder,
                    artifacts,
                }
            }
        };
        let (dir, record, prepared_state) = match context.workspace_source {
            WorkspaceSource::Fresh => {
                let number = match (&context.claimed, row.recorder()) {
                    (Some(claimed), _) => claimed.attempt,
                    (None, Some(recorder)) if request.id_reuse != IdReuse::Generated => {
                        recorder.next_attempt_number(&request.id)?
                    }
                    _ => 1,
                };
                let dir = RunDir::claim(&context.home, &request.id, number)?;
                let record = RunRecord::new(&request.id, &run.plan.workspace_root, number);
                (dir, record, None)
            }
            WorkspaceSource::Prepared => open_prepared(run)?,
        };
        let lease = rustix::process::geteuid()
            .is_root()
            .then(UidLease::acquire)
            .transpose();
        if row.is_to_be_recorded() {
            dir.reserve_outcome_space();
        }
        if context.own_process == OwnProcess::MayMove {
            // This may move the process into another cgroup, so it comes before `discover`. `FilledAttempt::create_cgroup`
            // reports a failure.
            let _ = systemd_scope::ensure_delegated();
        }
        let mut claimed = LockedAttempt {
            run: OwnedRun {
                dir,
                record,
                lease: None,
                prepared_state,
                unrecorded_inputs: None,
            },
            row,
            cgroup_host: cgroup::discover(context.own_process),
        };
        match claimed.write_first_record(run, lease) {
            Ok(()) => Ok(claimed),
            Err(error) => {
                // The caller reports the error. The reaper removes what cannot be removed now.
                claimed.into_holdings().0.give_back(Receipt::NothingRan);
                Err(error)
            }
        }
    }

    fn write_first_record(
        &mut self,
        run: &PlannedRun<'_>,
        lease: Result<Option<UidLease>, UidLeaseError>,
    ) -> Result<(), AttemptError> {
        let record = &mut self.run.record;
        // A generated id is new, so skip the database lookup.
        if let RowState::NotBegun {
            recorder,
            artifacts,
        } = &mut self.row
            && run.request.id_reuse != IdReuse::Generated
        {
            record.commit_plan = Some(new_commit_plan(run, recorder, artifacts)?);
        }
        self.run.lease = lease?;
        record.uid = self.run.lease.as_ref().map(|l| l.uid);
        record.cgroups = cgroup::planned_paths(&self.cgroup_host, run.request.id.as_str());
        self.run.save()?;
        Ok(pass_crash_point(CrashPoint::Claimed)?)
    }
}

/// Finds a bad pattern before anything runs.
fn check_globs(request: &Request) -> Result<(), AttemptError> {
    collect::Globs::new(&request.collection.outputs)?;
    collect::Globs::new(&request.collection.expects)?;
    Ok(())
}

/// Opens the run directory that `workspace create` made for this id. Fails if something has run in it.
fn open_prepared(
    run: &PlannedRun<'_>,
) -> Result<(RunDir, RunRecord, Option<RunState>), AttemptError> {
    let id = run.request.id.clone();
    let found = RunDir::find(&run.context.home, &id)?;
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
