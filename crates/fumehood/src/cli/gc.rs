//! `fumehood gc`: what the dead left, kept workspaces, old analyses, and objects that nobody refers to.

use std::collections::HashSet;
use std::ffi::OsString;

use anyhow::Context;
use engine::attempt::record::Reason;
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
    Location, LossProof, LostAttempt, PostProcessState, State, UnfinishedAttempt, UnfinishedPolicy,
};

use super::args::StoreArgs;
use super::print::{self, clean, counted};
use super::standing::{self, Next};
use super::sweep::{self, Others, Scope, Sweep, Sweeping};
use super::{exit, ledger, list, remove, show};

/// Finish or remove what dead runners left, and what nobody needs any more.
///
/// That is: attempts and workspaces of runners that died, kept workspaces whose time is over, objects that no analysis
/// refers to; with --older-than also old analyses.
///
/// Attempts that could not be committed are committed now, if the database is there. An attempt that the database
/// believes to run on this machine is given up, as `error` (runner_lost), when it was begun before the machine was last
/// started and nothing of it is in this home.
#[derive(Clone, Debug, clap::Args)]
pub struct GcArgs {
    /// Also remove kept workspaces before their time: that of ID, or all
    #[arg(long, value_name = "ID", num_args = 0..=1)]
    pub kept: Option<Option<String>>,

    /// Change nothing; say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,

    /// Also remove analyses whose last attempt was recorded longer ago than this, such as 90d
    #[arg(long, value_name = "TIME")]
    pub older_than: Option<OsString>,

    /// Of those, only these (separated by commas): succeeded, failed, timed_out, out_of_memory, limit_exceeded,
    /// cancelled, error
    #[arg(
        long,
        value_name = "STATUS",
        value_delimiter = ',',
        requires = "older_than"
    )]
    pub status: Vec<String>,

    /// Remove objects although another database or home was used with this artifact store, too: what only that one
    /// refers to is lost
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
struct Done {
    schema: &'static str,
    dry_run: bool,
    removed: Vec<String>,
    kept: Vec<String>,
    finished: Vec<Finished>,
    waiting: Vec<String>,
    given_up: Vec<Attempt>,
    analyses: Vec<Old>,
    swept: Sweep,
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Finished {
    id: String,
    attempt: u32,
    /// `null` in a dry run: only finishing it tells.
    status: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Attempt {
    id: String,
    attempt: u32,
}

#[derive(Debug, Serialize)]
struct Old {
    id: String,
    status: &'static str,
    attempts: u64,
    output_bytes: u64,
}

pub fn gc(args: &GcArgs) -> anyhow::Result<u8> {
    let states = list::states(&args.status)?;
    let older_ms = match &args.older_than {
        Some(text) => {
            let ms = parse_duration_ms(&text.to_string_lossy()).context("read --older-than")?;
            Some(i64::try_from(ms).unwrap_or(i64::MAX))
        }
        None => None,
    };
    let (home, mut ledger) = ledger::open_if_any(&args.store)?;
    if args.dry_run {
        ledger = ledger.filter(exists);
    }
    let mut done = Done {
        schema: "fumehood.gc/1",
        dry_run: args.dry_run,
        ..Done::default()
    };
    match args.dry_run {
        true => would_reap(&home, ledger.as_ref(), args, &mut done),
        false => reap(&home, ledger.as_mut(), args, &mut done),
    }
    if let Some(ledger) = &mut ledger {
        let mut in_database = || -> anyhow::Result<()> {
            give_up_lost(&home, ledger, args.dry_run, &mut done)?;
            if !args.dry_run {
                clear_slots(&home, ledger)?;
                take_pending_steps(&home, ledger, &mut done)?;
            }
            if let Some(older_ms) = older_ms {
                remove_old(&home, ledger, (older_ms, &states), args.dry_run, &mut done)?;
            }
            done.swept = sweep_all(&home, ledger, args);
            Ok(())
        };
        if let Err(e) = in_database() {
            done.problems.push(format!("{e:#}"));
        }
    }
    let failed = !done.problems.is_empty();
    match args.json {
        true => print::json(&done)?,
        false => tell(&done),
    }
    let nothing_kept = matches!(&args.kept, Some(Some(_))) && done.removed.is_empty() && !failed;
    if let (true, Some(Some(id))) = (nothing_kept, &args.kept) {
        show::line(&format!("nothing is kept for {id}"));
    }
    Ok(match failed || nothing_kept {
        true => exit::COULD_NOT_RUN,
        false => 0,
    })
}

/// What dead workers left in their slots of attempts that have ended since.
fn clear_slots(home: &Home, ledger: &mut Recorder) -> anyhow::Result<()> {
    let database_id = ledger.store()?.id().to_owned();
    let unfinished = ledger.with(|store| store.unfinished(None))?;
    let running: HashSet<&str> = unfinished.iter().map(|u| u.key.as_str()).collect();
    slot::clear_finished_orders(home, |order| {
        order.database_id == database_id && !running.contains(order.key.as_str())
    })
    .context("clear what dead workers left in their slots")
}

/// How many steps of the platform's own one pass catches up with.
const STEPS_MAX: u32 = 1000;

/// The platform's own step for attempts whose runner could not note that it ran, or did not get that far. One that
/// failed is repeated only when somebody asks for it.
fn take_pending_steps(home: &Home, ledger: &mut Recorder, done: &mut Done) -> anyhow::Result<()> {
    if ledger.post_process.is_none() {
        return Ok(());
    }
    let machine = home::machine_id();
    let due = ledger.with(|store| store.post_process_due(Some(&machine), STEPS_MAX))?;
    for due in due
        .iter()
        .filter(|due| due.state == PostProcessState::Pending)
    {
        let id = AnalysisId::new(&due.id).context("read an id from the database")?;
        // Its runner may be at it right now.
        if standing::any_of(home, &id) {
            continue;
        }
        if let Ok(PostProcessResult::CommandRun { report: step, .. }) =
            staged_commands::post_process(home, ledger, &id)
            && let Some(message) = step.message
        {
            let told = format!("the post_process command failed for {id}: {message}");
            done.waiting.push(told);
        }
    }
    Ok(())
}

/// A dry run does not even make an empty database.
fn exists(ledger: &Recorder) -> bool {
    match &ledger.location {
        Location::Sqlite(path) => path.exists(),
        _ => true,
    }
}

fn reap(home: &Home, ledger: Option<&mut Recorder>, args: &GcArgs, done: &mut Done) {
    let ReapReport {
        removed,
        kept,
        finished,
        waiting,
        problems,
    } = match &args.kept {
        None => reaper::reap(home, ledger),
        Some(id) => reaper::reap_kept(home, ledger, id.as_deref()),
    };
    done.removed = removed.iter().map(|p| p.display().to_string()).collect();
    done.kept = kept.iter().map(|(p, _)| p.display().to_string()).collect();
    done.finished = finished
        .iter()
        .map(|record| Finished {
            id: record.id.as_str().to_owned(),
            attempt: record.attempt,
            status: Some(record.status.as_str()),
        })
        .collect();
    done.waiting = waiting;
    done.problems = problems;
}

/// What [`reap`] would look at, without a lock or a write.
fn would_reap(home: &Home, ledger: Option<&Recorder>, args: &GcArgs, done: &mut Done) {
    let named = |id: &str| match &args.kept {
        None => false,
        Some(None) => true,
        Some(Some(kept)) => kept == id,
    };
    let now = home::unix_seconds();
    for standing in standing::all(home) {
        let record = &standing.record;
        let workspace = record.workspace.display().to_string();
        let over = match record.state {
            RunState::Kept { until } => until <= now || named(record.id.as_str()),
            RunState::Recorded => named(record.id.as_str()),
            RunState::Open { until } => until <= now,
            _ => false,
        };
        match standing.next() {
            Next::Runs | Next::Elsewhere => {}
            Next::Finish if ledger.is_none() => done.waiting.push(standing.advice()),
            Next::Finish => done.finished.push(Finished {
                id: record.id.as_str().to_owned(),
                attempt: record.attempt,
                status: None,
            }),
            Next::PostProcess => done.waiting.push(standing.advice()),
            Next::Clean => done.removed.push(workspace),
            Next::Run | Next::Remove if over => done.removed.push(workspace),
            Next::Run => {}
            Next::Remove => done.kept.push(workspace),
        }
    }
}

/// Ends what this machine cannot be running any more.
///
/// An attempt may run in another home of the same machine, of which we know nothing. What proves that it does not run is
/// that the machine was started anew since it began: no process lives through that. Machines that were cloned may
/// share an id, so another boot id alone is no proof: the attempt must also be older than this boot. And if it has a
/// directory here, finishing it is the reaper's, who did not do so just now for some reason. Should its end be waiting
/// in another home after all, it is still committed from there, beside this one, as superseded.
fn give_up_lost(
    home: &Home,
    ledger: &mut Recorder,
    dry_run: bool,
    done: &mut Done,
) -> anyhow::Result<()> {
    let (machine, boot_id) = (home::machine_id(), home::boot_id());
    let boot_ms = home::boot_seconds().and_then(|seconds| seconds.checked_mul(1_000));
    let Some(boot_ms) = boot_ms.filter(|_| !boot_id.is_empty() && !machine.is_empty()) else {
        return Ok(());
    };
    let here: HashSet<String> = standing::all(home)
        .into_iter()
        .filter_map(|standing| standing.record.commit_plan.map(|task| task.key))
        .collect();
    let unfinished = ledger.with(|store| store.unfinished(Some(&machine)))?;
    let lost = |attempt: &&UnfinishedAttempt| {
        attempt.boot_id != boot_id && attempt.created_ms < boot_ms && !here.contains(&attempt.key)
    };
    let by = run_dir::new_attempt_key();
    for attempt in unfinished.iter().filter(lost) {
        let given_up = dry_run
            || ledger.with(|store| {
                store.give_up(&LostAttempt {
                    id: &attempt.id,
                    attempt: attempt.attempt,
                    key: &attempt.key,
                    by: &by,
                    reason: Reason::RunnerLost.as_str(),
                    message: "the machine was started anew while it ran, and nothing of it is left",
                    // Of what came from the queue the lease has the last word: machines that were cloned share an id.
                    proof: LossProof::LeaseExpired,
                })
            })?;
        if given_up {
            done.given_up.push(Attempt {
                id: attempt.id.clone(),
                attempt: attempt.attempt,
            });
        }
    }
    Ok(())
}

fn remove_old(
    home: &Home,
    ledger: &mut Recorder,
    (older_ms, states): (i64, &[State]),
    dry_run: bool,
    done: &mut Done,
) -> anyhow::Result<()> {
    const AT_ONCE: u32 = 10_000;
    let now_ms = ledger.with(|store| store.now_ms())?;
    let before_ms = now_ms.saturating_sub(older_ms);
    let mut skipped = HashSet::new();
    loop {
        let old = ledger.with(|store| store.removable(before_ms, states, AT_ONCE))?;
        let mut progress = false;
        for old in old {
            if skipped.contains(&old.id) {
                continue;
            }
            if remove::refuse_standing(home, &old.id).is_err() {
                done.waiting.push(format!(
                    "{} has a workspace or run directory here, and stays",
                    old.id
                ));
                skipped.insert(old.id);
                continue;
            }
            if !dry_run {
                ledger.with(|store| store.remove(&old.id, UnfinishedPolicy::Refuse))?;
                progress = true;
            }
            done.analyses.push(Old {
                id: old.id,
                status: old.state.as_str(),
                attempts: old.attempts,
                output_bytes: old.output_bytes,
            });
        }
        if !progress {
            return Ok(());
        }
    }
}

fn sweep_all(home: &Home, ledger: &mut Recorder, args: &GcArgs) -> Sweep {
    let sweeping = Sweeping {
        dry_run: args.dry_run,
        others: match args.forget_others {
            true => Others::Forgotten,
            false => Others::Respected,
        },
    };
    sweep::sweep(home, ledger, &Scope::All(sweeping))
}

fn tell(done: &Done) {
    let would = |past: &str, future: &str| match done.dry_run {
        true => format!("would {future}"),
        false => past.to_owned(),
    };
    for path in &done.removed {
        show::line(&format!("{} {path}", would("removed", "remove")));
    }
    for path in &done.kept {
        show::line(&format!("still kept: {path}"));
    }
    for record in &done.finished {
        let status = record.status.map(|s| format!(": {}", s.replace('_', " ")));
        let (id, status) = (&record.id, status.unwrap_or_default());
        show::line(&format!("{} {id}{status}", would("finished", "finish")));
    }
    for attempt in &done.given_up {
        let id = clean(&attempt.id);
        let what = would("gave up", "give up");
        show::line(&format!("{what} {id}: its runner is lost"));
    }
    for old in &done.analyses {
        let attempts = counted(old.attempts, "attempt", "attempts");
        show::line(&format!(
            "{} {}, {}: {attempts}, {} of outputs",
            would("removed", "remove"),
            clean(&old.id),
            old.status.replace('_', " "),
            format_size(old.output_bytes)
        ));
    }
    if done.dry_run && !done.analyses.is_empty() {
        show::line("and the objects that only they refer to, which are not counted here");
    }
    for waiting in &done.waiting {
        show::line(waiting);
    }
    done.swept.tell();
    for problem in &done.problems {
        show::line(&format!("could not clean up: {problem}"));
    }
}
