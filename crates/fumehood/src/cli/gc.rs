//! `fumehood gc`: what dead runners left, kept workspaces, old analyses, and unreferenced objects.

use std::collections::HashSet;
use std::ffi::OsString;

use anyhow::Context;
use engine::attempt::record::{Reason, Status};
use engine::attempt::recorder::Recorder;
use engine::home::{self, Home};
use engine::recovery::reaper::{self, ReapReport};
use engine::recovery::staged_commands::{self, PostProcessResult};
use engine::request::AnalysisId;
use engine::run_dir::{self, RunState};
use engine::worker::slot;
use serde::Serialize;
use store::types::units::{format_size, parse_duration_ms};
use store::{
    Location, LossProof, LostAttempt, PostProcessState, RemovableAnalysis, State,
    UnfinishedAttempt, UnfinishedPolicy,
};

use super::args::StoreArgs;
use super::object_gc::{self, ObjectGcOptions, ObjectGcReport, ObjectScope, OtherUsers};
use super::print::{self, escape, format_count};
use super::run_dirs::{self, NextAction};
use super::{attempt_text, exit, messages, record_access, remove};

/// Finish or remove what dead runners left, and remove what nobody needs any more.
///
/// This covers attempts and workspaces of runners that died, kept workspaces whose time has passed, and objects that no
/// analysis refers to; with --older-than also old analyses.
///
/// Attempts that could not be committed are committed now, if the database is reachable. An attempt that the database
/// lists as running on this machine ends as `error` (runner_lost) if it began before the last boot and nothing of it is
/// in this home.
#[derive(Clone, Debug, clap::Args)]
pub struct GcArgs {
    /// Also remove kept workspaces before their time: that of ID, or all
    #[arg(long, value_name = "ID", num_args = 0..=1)]
    pub kept: Option<Option<String>>,

    /// Change nothing; print what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,

    /// Also remove analyses whose last attempt was recorded longer ago than this, such as 90d
    #[arg(long, value_name = "TIME")]
    pub older_than: Option<OsString>,

    /// With --older-than: remove only analyses with these statuses, separated by commas: succeeded, failed, timed_out,
    /// out_of_memory, limit_exceeded, cancelled, error
    #[arg(
        long,
        value_name = "STATUS",
        value_delimiter = ',',
        requires = "older_than"
    )]
    pub status: Vec<String>,

    /// Remove objects even if another database or home has used this artifact store: objects that only those refer to
    /// are lost
    #[arg(long)]
    pub forget_others: bool,

    /// Print one JSON document (fumehood.gc/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// Everything that was done, or would be.
#[derive(Debug, Default, Serialize)]
struct GcReport {
    schema: &'static str,
    dry_run: bool,
    removed: Vec<String>,
    kept: Vec<String>,
    finished: Vec<FinishedAttempt>,
    waiting: Vec<String>,
    given_up: Vec<GivenUpAttempt>,
    analyses: Vec<RemovableAnalysis>,
    swept: ObjectGcReport,
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct FinishedAttempt {
    id: AnalysisId,
    attempt: u32,
    /// `null` in a dry run: the status is known only after finishing.
    status: Option<Status>,
}

#[derive(Debug, Serialize)]
struct GivenUpAttempt {
    id: String,
    attempt: u32,
}

pub fn gc(args: &GcArgs) -> anyhow::Result<u8> {
    let states = attempt_text::parse_states(&args.status)?;
    let older_than = args.older_than.as_ref();
    let older_ms = older_than.map(|text| parse_duration_ms(&text.to_string_lossy()));
    let older_ms = older_ms.transpose().context("read --older-than")?;
    let older_ms = older_ms.map(|ms| i64::try_from(ms).unwrap_or(i64::MAX));
    let (home, mut recorder) = record_access::open_optional(&args.store)?;
    if args.dry_run {
        recorder = recorder.filter(exists);
    }
    let mut report = GcReport {
        schema: "fumehood.gc/1",
        dry_run: args.dry_run,
        ..GcReport::default()
    };
    match args.dry_run {
        true => list_reapable(&home, recorder.as_ref(), args, &mut report),
        false => reap(&home, recorder.as_mut(), args, &mut report),
    }
    if let Some(recorder) = &mut recorder {
        let mut in_database = || -> anyhow::Result<()> {
            give_up_lost(&home, recorder, args.dry_run, &mut report)?;
            if !args.dry_run {
                clear_slots(&home, recorder)?;
                run_pending_post_process(&home, recorder, &mut report)?;
            }
            if let Some(older_ms) = older_ms {
                remove_old(
                    &home,
                    recorder,
                    (older_ms, &states),
                    args.dry_run,
                    &mut report,
                )?;
            }
            report.swept = remove_unreferenced_objects(&home, recorder, args);
            Ok(())
        };
        if let Err(e) = in_database() {
            report.problems.push(format!("{e:#}"));
        }
    }
    let failed = !report.problems.is_empty();
    match args.json {
        true => print::json(&report)?,
        false => print_report(&report),
    }
    let nothing_kept = matches!(&args.kept, Some(Some(_))) && report.removed.is_empty() && !failed;
    if let (true, Some(Some(id))) = (nothing_kept, &args.kept) {
        messages::line(&format!("nothing is kept for {id}"));
    }
    Ok(match failed || nothing_kept {
        true => exit::COULD_NOT_RUN,
        false => 0,
    })
}

/// Removes what dead workers left in their slots for attempts that have ended since.
fn clear_slots(home: &Home, recorder: &mut Recorder) -> anyhow::Result<()> {
    let database_id = recorder.store()?.id().to_owned();
    let unfinished = recorder.with(|store| store.unfinished(None))?;
    let running: HashSet<&str> = unfinished.iter().map(|u| u.key.as_str()).collect();
    slot::clear_finished_orders(home, |order| {
        let claim = &order.claim;
        claim.database_id == database_id && !running.contains(claim.key.as_str())
    })
    .context("clear what dead workers left in their slots")
}

/// The number of post_process commands that one call runs.
const POST_PROCESS_MAX: u32 = 1000;

/// Runs the post_process command for attempts whose runner did not get that far or could not record that the command
/// ran. A command that failed is repeated only on request.
fn run_pending_post_process(
    home: &Home,
    recorder: &mut Recorder,
    report: &mut GcReport,
) -> anyhow::Result<()> {
    if recorder.post_process.is_none() {
        return Ok(());
    }
    let machine = home::machine_id();
    let due = recorder.with(|store| store.post_process_due(Some(&machine), POST_PROCESS_MAX))?;
    for due in due
        .iter()
        .filter(|due| due.state == PostProcessState::Pending)
    {
        let id = AnalysisId::new(&due.id).context("read an id from the database")?;
        // The runner may be running the command right now.
        if run_dirs::has_any(home, &id) {
            continue;
        }
        if let Ok(PostProcessResult::CommandRun { report: step, .. }) =
            staged_commands::post_process(home, recorder, &id)
            && let Some(message) = step.message
        {
            let text = format!("the post_process command failed for {id}: {message}");
            report.waiting.push(text);
        }
    }
    Ok(())
}

/// Whether the database exists. A dry run does not create an empty one.
fn exists(recorder: &Recorder) -> bool {
    match &recorder.location {
        Location::Sqlite(path) => path.exists(),
        _ => true,
    }
}

fn reap(home: &Home, recorder: Option<&mut Recorder>, args: &GcArgs, report: &mut GcReport) {
    let ReapReport {
        removed,
        kept,
        finished,
        waiting,
        problems,
    } = match &args.kept {
        None => reaper::reap(home, recorder),
        Some(id) => reaper::reap_kept(home, recorder, id.as_deref()),
    };
    report.removed = removed.iter().map(|p| p.display().to_string()).collect();
    report.kept = kept.iter().map(|(p, _)| p.display().to_string()).collect();
    let finished = finished.into_iter().map(|record| FinishedAttempt {
        id: record.id,
        attempt: record.attempt,
        status: Some(record.status),
    });
    report.finished = finished.collect();
    report.waiting = waiting;
    report.problems = problems;
}

/// Lists what [`reap`] would do, without taking a lock or writing.
fn list_reapable(home: &Home, recorder: Option<&Recorder>, args: &GcArgs, report: &mut GcReport) {
    let named = |id: &str| match &args.kept {
        None => false,
        Some(None) => true,
        Some(Some(kept)) => kept == id,
    };
    let now = home::unix_seconds();
    for run_dir in run_dirs::list_all(home) {
        let record = &run_dir.record;
        let workspace = record.workspace.display().to_string();
        let over = match record.state {
            RunState::Kept { until } => until <= now || named(record.id.as_str()),
            RunState::Recorded => named(record.id.as_str()),
            RunState::Open { until } => until <= now,
            _ => false,
        };
        match run_dir.next_action() {
            NextAction::AwaitRunner | NextAction::LeaveToOther => {}
            NextAction::Finish if recorder.is_none() => report.waiting.push(run_dir.advice()),
            NextAction::Finish => report.finished.push(FinishedAttempt {
                id: record.id.clone(),
                attempt: record.attempt,
                status: None,
            }),
            NextAction::PostProcess => report.waiting.push(run_dir.advice()),
            NextAction::CleanUp => report.removed.push(workspace),
            NextAction::RunIn | NextAction::RemoveWorkspace if over => {
                report.removed.push(workspace)
            }
            NextAction::RunIn => {}
            NextAction::RemoveWorkspace => report.kept.push(workspace),
        }
    }
}

/// Ends attempts that cannot be running on this machine any more.
///
/// An attempt may run in another home of this machine, which this process cannot see. The proof that it does not run is
/// that the machine has booted since the attempt began: no process survives that. Cloned machines may share a machine
/// id, so a different boot id alone proves nothing; the attempt must also be older than this boot. If the attempt has a
/// directory in this home, leave it to the reaper, which had a reason not to finish it just now. If the attempt's
/// outcome waits in another home after all, that home still commits it, as superseded.
fn give_up_lost(
    home: &Home,
    recorder: &mut Recorder,
    dry_run: bool,
    report: &mut GcReport,
) -> anyhow::Result<()> {
    let (machine, boot_id) = (home::machine_id(), home::boot_id());
    let boot_ms = home::boot_seconds().and_then(|seconds| seconds.checked_mul(1_000));
    let Some(boot_ms) = boot_ms.filter(|_| !boot_id.is_empty() && !machine.is_empty()) else {
        return Ok(());
    };
    let here: HashSet<String> = run_dirs::list_all(home)
        .into_iter()
        .filter_map(|run_dir| run_dir.record.commit_plan.map(|task| task.key))
        .collect();
    let unfinished = recorder.with(|store| store.unfinished(Some(&machine)))?;
    let lost = |attempt: &&UnfinishedAttempt| {
        attempt.boot_id != boot_id && attempt.created_ms < boot_ms && !here.contains(&attempt.key)
    };
    let by = run_dir::new_attempt_key();
    for attempt in unfinished.iter().filter(lost) {
        let given_up = dry_run
            || recorder.with(|store| {
                store.give_up(&LostAttempt {
                    id: &attempt.id,
                    attempt: attempt.attempt,
                    key: &attempt.key,
                    by: &by,
                    reason: Reason::RunnerLost.as_str(),
                    message: "the machine was started anew while it ran, and nothing of it is left",
                    // For an attempt from the queue the lease decides, because cloned machines may share a machine id.
                    proof: LossProof::LeaseExpired,
                })
            })?;
        if given_up {
            report.given_up.push(GivenUpAttempt {
                id: attempt.id.clone(),
                attempt: attempt.attempt,
            });
        }
    }
    Ok(())
}

fn remove_old(
    home: &Home,
    recorder: &mut Recorder,
    (older_ms, states): (i64, &[State]),
    dry_run: bool,
    report: &mut GcReport,
) -> anyhow::Result<()> {
    const AT_ONCE: u32 = 10_000;
    let now_ms = recorder.with(|store| store.now_ms())?;
    let before_ms = now_ms.saturating_sub(older_ms);
    let mut skipped = HashSet::new();
    loop {
        let old = recorder.with(|store| store.removable(before_ms, states, AT_ONCE))?;
        let mut progress = false;
        for old in old {
            if skipped.contains(&old.id) {
                continue;
            }
            if remove::refuse_if_in_home(home, &old.id).is_err() {
                report.waiting.push(format!(
                    "{} has a workspace or run directory here, and stays",
                    old.id
                ));
                skipped.insert(old.id);
                continue;
            }
            if !dry_run {
                recorder.with(|store| store.remove(&old.id, UnfinishedPolicy::Refuse))?;
                progress = true;
            }
            report.analyses.push(old);
        }
        if !progress {
            return Ok(());
        }
    }
}

fn remove_unreferenced_objects(
    home: &Home,
    recorder: &mut Recorder,
    args: &GcArgs,
) -> ObjectGcReport {
    let options = ObjectGcOptions {
        dry_run: args.dry_run,
        others: match args.forget_others {
            true => OtherUsers::Forget,
            false => OtherUsers::Respect,
        },
    };
    object_gc::remove_unreferenced(home, recorder, &ObjectScope::All(options))
}

fn print_report(report: &GcReport) {
    let would = |past: &str, future: &str| match report.dry_run {
        true => format!("would {future}"),
        false => past.to_owned(),
    };
    for path in &report.removed {
        messages::line(&format!("{} {path}", would("removed", "remove")));
    }
    for path in &report.kept {
        messages::line(&format!("still kept: {path}"));
    }
    for record in &report.finished {
        let status = record
            .status
            .map(|s| format!(": {}", s.as_str().replace('_', " ")));
        let (id, status) = (&record.id, status.unwrap_or_default());
        messages::line(&format!("{} {id}{status}", would("finished", "finish")));
    }
    for attempt in &report.given_up {
        let id = escape(&attempt.id);
        let what = would("gave up", "give up");
        messages::line(&format!("{what} {id}: its runner is lost"));
    }
    for old in &report.analyses {
        let attempts = format_count(old.attempts, "attempt", "attempts");
        messages::line(&format!(
            "{} {}, {}: {attempts}, {} of outputs",
            would("removed", "remove"),
            escape(&old.id),
            old.state.as_str().replace('_', " "),
            format_size(old.output_bytes)
        ));
    }
    if report.dry_run && !report.analyses.is_empty() {
        messages::line("and the objects that only they refer to, which are not counted here");
    }
    for waiting in &report.waiting {
        messages::line(waiting);
    }
    report.swept.print();
    for problem in &report.problems {
        messages::line(&format!("could not clean up: {problem}"));
    }
}
