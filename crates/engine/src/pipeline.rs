//! One analysis from request to record: [`run`] plans it, finishes what dead runners left, and makes the attempt. The
//! states of an attempt are in [`attempt`].
//!
//! The types that a caller needs are re-exported here.

use crate::attempt;
use crate::attempt::context::PlannedRun;
pub use crate::attempt::context::{Claim, RunContext, WorkspaceSource};
pub use crate::attempt::error::AttemptError;
pub use crate::attempt::fail::StartFailure;
use crate::attempt::isolation;
pub use crate::attempt::observer::{CancelCause, RunObserver};
use crate::attempt::recorder::Recorder;
pub use crate::attempt::release::CompletedRun;
use crate::plan::{self, PrivatePaths, limits};
use crate::recovery::reaper;
use crate::settings::Request;
use store::types::timings;

/// Makes one attempt: plans it, runs the program and commits the result. Then removes what it created.
///
/// The workspace stays if the user keeps it or prepared it, or if the outputs are safe nowhere else. The run directory
/// stays as long as the workspace does, if the commit is pending, or if a process could not be killed. Without a
/// recorder nothing is recorded.
pub fn run(
    request: &Request,
    context: &RunContext,
    mut recorder: Option<&mut Recorder>,
    observer: &mut dyn RunObserver,
) -> Result<CompletedRun, StartFailure> {
    recorder
        .iter_mut()
        .for_each(|recorder| recorder.open_in_background());
    tracing::debug!(id = %request.id, project = ?request.project, "plan the run");
    let limits = limits::resolve(&request.limits);
    let plan = plan::plan(
        request,
        &context.caller,
        &PrivatePaths {
            home: context.home.path(),
            records: &recorder
                .as_ref()
                .map(|recorder| recorder.private_paths())
                .unwrap_or_default(),
        },
    )?;
    isolation::allowed_levels(request)?;
    timings::mark("planned");
    plan.notices.iter().for_each(|n| observer.notice(n));
    // A worker reaps for its runners, so a runner that a worker started skips this.
    let reaped = match context.claimed {
        None => reaper::reap(&context.home, recorder.as_deref_mut()),
        Some(_) => reaper::ReapReport::default(),
    };
    for finished in &reaped.finished {
        let status = finished.status.as_str().replace('_', " ");
        observer.notice(&format!(
            "{} had been left unfinished; it is committed now ({status})",
            finished.id
        ));
    }

    timings::mark("reaped");
    let run = PlannedRun {
        request,
        context,
        plan: &plan,
        limits: &limits,
    };
    let completed = attempt::make_attempt(&run, recorder, observer)?;
    timings::mark("cleaned_up");
    Ok(completed)
}
