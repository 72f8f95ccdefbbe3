//! One analysis from request to record, in order, on one screen: [`run`]. Read this file first.
//!
//! The types that a caller needs are re-exported here.

use crate::attempt::context::LaunchRequest;
pub use crate::attempt::context::{ClaimedAttempt, RunContext, WorkspaceSource};
pub use crate::attempt::end::{CompletedRun, StartFailure};
pub use crate::attempt::error::AttemptError;
use crate::attempt::isolation;
pub use crate::attempt::observer::{CancelCause, RunObserver};
use crate::attempt::record_builder;
use crate::attempt::recorder::Recorder;
use crate::attempt::state::Attempt;
use crate::plan::limits::{self, WorkspaceStorage};
use crate::plan::{self, PrivatePaths};
use crate::recovery::reaper;
use crate::request::Request;
use store::types::timings;

/// Makes one attempt: plans it, runs the program, commits the result, and removes everything that was made on the way.
///
/// Every way out removes what was created, after the outputs are safe. Without a recorder nothing is recorded.
pub fn run(
    request: &Request,
    context: &RunContext,
    mut recorder: Option<&mut Recorder>,
    observer: &mut dyn RunObserver,
) -> Result<CompletedRun, StartFailure> {
    recorder
        .iter_mut()
        .for_each(|recorder| recorder.open_in_background());
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
    let mut attempt = Attempt::begin(request, context, &plan, recorder.as_deref_mut())?;
    let ran = attempt
        .create_workspace(request, context, &plan, &limits, recorder.as_deref_mut())
        .and_then(|storage| {
            if storage == WorkspaceStorage::DiskOnTmpfs {
                observer.notice("the workspace root is a tmpfs: disk used there is memory");
            }
            attempt.create_cgroup(request, &limits)?;
            timings::mark("cgroup_made");
            let launch = LaunchRequest {
                request,
                context,
                plan: &plan,
                limits: &limits,
                storage,
            };
            isolation::run_at_strongest_level(
                &mut attempt,
                &launch,
                recorder.as_deref_mut(),
                observer,
            )
        });
    let (enforcement, ran) = match ran {
        Ok(ran) => ran,
        Err(error) => return Err(attempt.fail(request, context, &plan, recorder, error)),
    };
    let number = attempt.number();
    let mut record =
        record_builder::program_record(request, number, &plan, &limits, &enforcement, &ran);
    record_builder::apply_cancel_cause(&mut record, observer);
    let completed = attempt.end(request, context, recorder, record, ran, observer);
    timings::mark("cleaned_up");
    Ok(completed)
}
