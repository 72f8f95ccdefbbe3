//! `fumehood cancel`: a queued analysis never runs; a running one is ended, and its outputs are kept.

use std::ffi::OsString;

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::home::{self, Home};
use engine::provenance;
use engine::request::AnalysisId;
use serde::Serialize;
use store::{CancelOutcome, State};

use super::args::StoreArgs;
use super::print::{self, escape};
use super::run_dirs::{self, CancelMode, CancelSignal, NextAction, RunDirInfo};
use super::{exit, ids, messages, record_access, wait};

/// Cancel analyses: a queued analysis never runs; a running one is ended, and its outputs are kept, marked incomplete.
///
/// The runner of a worker learns of it within two seconds, on any machine. An analysis that runs in this FUMEHOOD_HOME,
/// also by `fumehood run`, is signalled at once. Its processes get SIGTERM, the grace period, and SIGKILL. Cancelling
/// twice does no harm.
#[derive(Clone, Debug, clap::Args)]
pub struct CancelArgs {
    #[arg(value_name = "ID", required = true, help = ids::HELP_ANALYSIS)]
    pub ids: Vec<OsString>,

    /// Skip the grace period: SIGKILL at once, as a second Ctrl-C does. Only for analyses that run in this
    /// FUMEHOOD_HOME
    #[arg(long)]
    pub now: bool,

    /// Wait until they have ended
    #[arg(long, short)]
    pub wait: bool,

    /// Print one JSON document (fumehood.cancel/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    analyses: &'a [CancelResult],
}

/// The result for one analysis.
#[derive(Clone, Debug, Serialize)]
struct CancelResult {
    id: String,
    attempt: u32,
    #[serde(rename = "came_of_it")]
    effect: CancelEffect,
    /// The status, if it is known.
    status: Option<State>,
    /// The machine on which it runs.
    host: Option<String>,
    /// Whether its runner is in this home and has been signalled.
    #[serde(rename = "told")]
    signalled: bool,
    #[serde(skip)]
    why_not_signalled: Option<String>,
    /// Whether the database has the analysis.
    #[serde(skip)]
    recorded: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum CancelEffect {
    /// It was queued, and has ended.
    Cancelled,
    /// Its runner is ending it.
    Asked,
    /// It ended before it could be cancelled.
    Ended,
}

pub fn cancel(args: &CancelArgs) -> anyhow::Result<u8> {
    let mode = match args.now {
        true => CancelMode::Immediate,
        false => CancelMode::Graceful,
    };
    let (home, mut recorder) = record_access::open_optional(&args.store)?;
    let mut wanted = Vec::new();
    for given in &args.ids {
        let id = find_target(&home, recorder.as_mut(), given)?;
        if !wanted.contains(&id) {
            wanted.push(id);
        }
    }
    let mut all = Vec::new();
    for id in &wanted {
        let result = match (&mut recorder, id) {
            (Some(recorder), CancelTarget::Recorded(id)) => {
                cancel_recorded(&home, recorder, id, mode)?
            }
            (_, CancelTarget::Recorded(id) | CancelTarget::Unrecorded(id)) => {
                cancel_unrecorded(&home, id, mode)?
            }
        };
        all.push(result);
    }
    if !args.json {
        all.iter()
            .for_each(|result| messages::line(&result.message()));
    }
    if let (true, Some(recorder)) = (args.wait, &mut recorder) {
        let report = |result: &CancelResult| match args.json {
            true => {}
            false => messages::line(&result.message()),
        };
        wait_for_ends(&home, recorder, &mut all, &report)?;
    }
    if args.json {
        print::json(&Document {
            schema: "fumehood.cancel/1",
            analyses: &all,
        })?;
    }
    let late = all
        .iter()
        .any(|result| result.effect == CancelEffect::Ended);
    Ok(if late { exit::COULD_NOT_RUN } else { 0 })
}

#[derive(PartialEq, Eq)]
enum CancelTarget {
    Recorded(String),
    /// It runs in this home with `--db none`, or has no row yet.
    Unrecorded(String),
}

fn find_target(
    home: &Home,
    recorder: Option<&mut Recorder>,
    given: &std::ffi::OsStr,
) -> anyhow::Result<CancelTarget> {
    let exact = given.to_str().and_then(|text| AnalysisId::new(text).ok());
    let runs = |id: &AnalysisId| {
        let mut here = run_dirs::list_analysis(home, id).into_iter();
        here.any(|run_dir| run_dir.next_action() == NextAction::AwaitRunner && !is_begun(&run_dir))
    };
    let unrecorded = exact.filter(runs);
    match (recorder, unrecorded) {
        (_, Some(id)) => Ok(CancelTarget::Unrecorded(id.as_str().to_owned())),
        (Some(recorder), None) => Ok(CancelTarget::Recorded(ids::resolve_analysis(
            recorder, given,
        )?)),
        (None, None) => {
            anyhow::bail!("{given:?} does not run here, and there is no record with --db none")
        }
    }
}

fn is_begun(run_dir: &RunDirInfo) -> bool {
    let task = run_dir.record.commit_plan.as_ref();
    task.is_some_and(|task| task.begun)
}

fn cancel_unrecorded(home: &Home, id: &str, mode: CancelMode) -> anyhow::Result<CancelResult> {
    let id = AnalysisId::new(id)?;
    let mut here = run_dirs::list_analysis(home, &id).into_iter();
    let run_dir = here.find(|run_dir| run_dir.next_action() == NextAction::AwaitRunner);
    let run_dir = run_dir.with_context(|| format!("{id} has just ended"))?;
    let (signalled, why_not_signalled) = signal_runner(&run_dir, mode);
    anyhow::ensure!(
        signalled,
        "{id} has no record, and its runner {}",
        why_not_signalled.unwrap_or_default()
    );
    Ok(CancelResult {
        id: id.as_str().to_owned(),
        attempt: run_dir.record.attempt,
        effect: CancelEffect::Asked,
        status: None,
        host: Some(home::machine_id()),
        signalled,
        why_not_signalled: None,
        recorded: false,
    })
}

fn cancel_recorded(
    home: &Home,
    recorder: &mut Recorder,
    id: &str,
    mode: CancelMode,
) -> anyhow::Result<CancelResult> {
    let by = provenance::submitter_name();
    let cancelled = recorder.with(|store| store.cancel(id, &by));
    let (attempt, effect, status, host) = match cancelled.map_err(ids::without_database_context)? {
        CancelOutcome::Now { attempt } => (
            attempt,
            CancelEffect::Cancelled,
            Some(State::Cancelled),
            None,
        ),
        CancelOutcome::AlreadyEnded { attempt, state } => {
            (attempt, CancelEffect::Ended, Some(state), None)
        }
        CancelOutcome::Requested { attempt, host } => {
            (attempt, CancelEffect::Asked, None, Some(host))
        }
    };
    let run_dir = match effect {
        CancelEffect::Asked => find_in_home(home, recorder, id, attempt)?,
        CancelEffect::Cancelled | CancelEffect::Ended => None,
    };
    let signal = run_dir.map(|run_dir| signal_runner(&run_dir, mode));
    let (signalled, why_not_signalled) = signal.unwrap_or_default();
    Ok(CancelResult {
        id: id.to_owned(),
        attempt,
        effect,
        status,
        host,
        signalled,
        why_not_signalled,
        recorded: true,
    })
}

/// Finds the run directory of exactly this attempt in this home. The same id may also be in another database.
fn find_in_home(
    home: &Home,
    recorder: &mut Recorder,
    id: &str,
    attempt: u32,
) -> anyhow::Result<Option<RunDirInfo>> {
    let database_id = recorder.store()?.id().to_owned();
    let is_it = |run_dir: &RunDirInfo| {
        let task = run_dir.record.commit_plan.as_ref();
        run_dir.record.attempt == attempt && task.is_some_and(|t| t.database_id == database_id)
    };
    let id = AnalysisId::new(id).context("read an id from the database")?;
    Ok(run_dirs::list_analysis(home, &id).into_iter().find(is_it))
}

fn signal_runner(run_dir: &RunDirInfo, mode: CancelMode) -> (bool, Option<String>) {
    match run_dir.cancel(mode) {
        Ok(CancelSignal::Sent | CancelSignal::AlreadySent) => (true, None),
        Ok(CancelSignal::HasEnded) => (true, None),
        Ok(CancelSignal::Unreachable) if run_dir.alive => {
            let pid = run_dir.record.runner_pid;
            let why = format!("(process {pid}) cannot be shown to be the one it was");
            (false, Some(why))
        }
        Ok(CancelSignal::Unreachable) => {
            (false, Some("is gone; `fumehood gc` finishes it".to_owned()))
        }
        Err(e) => (false, Some(format!("could not be signalled: {e}"))),
    }
}

impl CancelResult {
    fn message(&self) -> String {
        let id = escape(&self.id);
        let status = self.status.map_or("ended", State::as_str).replace('_', " ");
        match self.effect {
            CancelEffect::Cancelled if self.host.is_some() => format!("{id} is cancelled"),
            CancelEffect::Cancelled => format!("{id} is cancelled; it never ran"),
            CancelEffect::Ended => {
                format!("{id} had ended before ({status}); there was nothing to cancel")
            }
            CancelEffect::Asked if self.signalled => format!("{id} is being cancelled"),
            CancelEffect::Asked => match (&self.why_not_signalled, &self.host) {
                (Some(why), _) => format!("{id} is marked to be cancelled; its runner {why}"),
                (None, Some(host)) if *host != home::machine_id() => {
                    let host = escape(host);
                    format!(
                        "{id} is marked to be cancelled; its runner on {host} will hear of it if a worker started it"
                    )
                }
                (None, _) => format!(
                    "{id} is marked to be cancelled; its runner is not in this FUMEHOOD_HOME, and will hear of it if a worker started it"
                ),
            },
        }
    }
}

fn wait_for_ends(
    home: &Home,
    recorder: &mut Recorder,
    all: &mut [CancelResult],
    report: &dyn Fn(&CancelResult),
) -> anyhow::Result<()> {
    let asked =
        |result: &&mut CancelResult| result.effect == CancelEffect::Asked && result.recorded;
    let mut waiting: Vec<&mut CancelResult> = all.iter_mut().filter(asked).collect();
    let ids: Vec<String> = waiting.iter().map(|result| result.id.clone()).collect();
    let ended = wait::until_ended(home, recorder, &ids, None, &mut |_| Ok(()))?;
    for (result, last) in waiting.iter_mut().zip(ended) {
        result.attempt = last.summary.attempt;
        result.status = Some(last.summary.state);
        result.effect = match last.summary.state {
            State::Cancelled => CancelEffect::Cancelled,
            _ => CancelEffect::Ended,
        };
        report(result);
    }
    Ok(())
}
