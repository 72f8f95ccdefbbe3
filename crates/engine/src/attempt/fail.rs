//! From `AbortedAttempt` to the end: records that Fumehood could not start the program, and releases everything.

use crate::attempt::context::PlannedRun;
use crate::attempt::error::AttemptError;
use crate::attempt::finalize;
use crate::attempt::finalize::ended_attempt::{EndedAttempt, Finisher, Leftovers};
use crate::attempt::finalize::outcome_file;
use crate::attempt::log_capture::CapturedLog;
use crate::attempt::post_process;
use crate::attempt::record::{CommitState, Record};
use crate::attempt::record_builder;
use crate::attempt::states::{AbortedAttempt, RowState};
use crate::plan::limits::error_chain;
use crate::request::KeepPolicy;
use crate::run_dir::RunState;
use crate::workspace::Receipt;
#[cfg(doc)]
use store::types::crash_points::CrashPoint;

/// A run that Fumehood could not start. `record` is set if the database has a row for the attempt. The attempt is then
/// committed or awaits its commit.
#[derive(Debug)]
pub struct StartFailure {
    /// Why the program could not be started.
    pub error: AttemptError,
    /// The record of the attempt. `None`: as far as is known, the database has no row for the attempt.
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

impl AbortedAttempt<'_> {
    /// Begins the row if nobody has tried that yet, and commits the error. Durable steps, as far as they
    /// are due: [`CrashPoint::Begun`], those from [`CrashPoint::LogsKept`] to [`CrashPoint::Committed`] without outputs,
    /// [`CrashPoint::PostProcessed`] and [`CrashPoint::Marked`].
    pub fn record(self: Box<Self>, run: &PlannedRun<'_>) -> StartFailure {
        let AbortedAttempt {
            error,
            mut holdings,
            mut row,
        } = *self;
        tracing::debug!(error = ?error_chain(&error), "the program could not be started");
        let owned = &mut holdings.run;
        if let Some(staged_inputs) = owned.unrecorded_inputs.take()
            && row.is_to_be_recorded()
        {
            // The failure to start is the error to report.
            let _ = owned.record_provenance(run, &staged_inputs);
        }
        // Without a row the failure is only reported, not recorded.
        let _ = row.begin(owned, run);
        let (recorder, commit_plan) = match row {
            RowState::Begun {
                recorder,
                commit_plan,
            } => (recorder, commit_plan),
            RowState::Unknown => {
                holdings.leave_run_dir();
                return error.into();
            }
            RowState::NotRecorded | RowState::NotBegun { .. } => {
                holdings.give_back(Receipt::NothingRan);
                return error.into();
            }
        };
        recorder.resume();
        let mut record =
            record_builder::start_failure_record(run.request, owned.record.attempt, &error);
        let nothing = CapturedLog::default();
        let ended = EndedAttempt::new(
            &owned.dir,
            &owned.record,
            &commit_plan,
            &record,
            Leftovers::Nothing,
            Finisher::Runner {
                keep: KeepPolicy::Never,
                logs: [&nothing, &nothing],
            },
        );
        let finalized = outcome_file::write(&ended)
            .and_then(|()| finalize::finalize_attempt(&ended, recorder, &mut |_| {}));
        match finalized {
            Ok(finalized) => {
                record = finalized;
                let key = (record.id.as_str(), record.attempt);
                record.post_process = post_process::run_if_due(recorder, key, owned.dir.path());
                if let Some(before) = &mut owned.prepared_state {
                    *before = RunState::Recorded;
                }
                holdings.give_back(Receipt::NothingRan);
            }
            // The run directory keeps the outcome for a later commit.
            Err(e) => {
                // Nothing ran, so little is lost if this fails.
                let _ = owned.dir.make_durable();
                match owned.prepared_state {
                    // The user's workspace stays; `post-process` commits that nothing ran in it.
                    Some(_) => holdings.keep_workspace(RunState::Ran, &mut Vec::new()),
                    None => holdings.move_to_pending(&run.context.home),
                }
                record.commit.state = CommitState::Pending;
                record.commit.message = Some(error_chain(&e));
            }
        }
        StartFailure {
            error,
            record: Some(Box::new(record)),
        }
    }
}
