//! `fumehood cancel`: what is queued never runs; what runs ends, and what it left is kept.

use std::ffi::OsString;

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::home::{self, Home};
use engine::provenance;
use engine::request::AnalysisId;
use serde::Serialize;
use store::{CancelOutcome, State};

use super::args::StoreArgs;
use super::print::{self, clean};
use super::standing::{self, Hurry, Next, Standing, Told};
use super::{exit, ids, ledger, show, wait};

/// Cancel analyses: one that is queued never runs; one that runs is ended, and what it left is kept, marked incomplete.
///
/// One that runs hears of it within two seconds wherever it runs, if a worker runs it; at once if it runs in this
/// FUMEHOOD_HOME, also by `fumehood run`. Its processes get SIGTERM, the grace, and SIGKILL. It may be cancelled again
/// without harm.
#[derive(Clone, Debug, clap::Args)]
pub struct CancelArgs {
    #[arg(value_name = "ID", required = true, help = ids::HELP_WHOLE)]
    pub ids: Vec<OsString>,

    /// Without the grace: SIGKILL at once, as a second Ctrl-C does. Only for what runs in this FUMEHOOD_HOME
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
    analyses: &'a [Done],
}

/// What came of it for one analysis.
#[derive(Clone, Debug, Serialize)]
struct Done {
    id: String,
    attempt: u32,
    came_of_it: CameOfIt,
    /// As far as it is known.
    status: Option<&'static str>,
    /// Where it runs.
    host: Option<String>,
    /// Whether its runner is in this home, and knows.
    told: bool,
    #[serde(skip)]
    why_not_told: Option<String>,
    /// Whether the database knows of it.
    #[serde(skip)]
    recorded: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum CameOfIt {
    /// It was queued, and has ended.
    Cancelled,
    /// Its runner ends it.
    Asked,
    /// It had ended before, or did so before it could be cancelled.
    Ended,
}

pub fn cancel(args: &CancelArgs) -> anyhow::Result<u8> {
    let hurry = match args.now {
        true => Hurry::Now,
        false => Hurry::No,
    };
    let (home, mut ledger) = ledger::open_if_any(&args.store)?;
    let mut wanted = Vec::new();
    for given in &args.ids {
        let id = which(&home, ledger.as_mut(), given)?;
        if !wanted.contains(&id) {
            wanted.push(id);
        }
    }
    let mut all = Vec::new();
    for id in &wanted {
        let done = match (&mut ledger, id) {
            (Some(ledger), Which::Recorded(id)) => recorded(&home, ledger, id, hurry)?,
            (_, Which::Recorded(id) | Which::Unrecorded(id)) => unrecorded(&home, id, hurry)?,
        };
        all.push(done);
    }
    if !args.json {
        all.iter().for_each(|done| show::line(&done.words()));
    }
    if let (true, Some(ledger)) = (args.wait, &mut ledger) {
        let tell = |done: &Done| match args.json {
            true => {}
            false => show::line(&done.words()),
        };
        await_ends(&home, ledger, &mut all, &tell)?;
    }
    if args.json {
        print::json(&Document {
            schema: "fumehood.cancel/1",
            analyses: &all,
        })?;
    }
    let late = all.iter().any(|done| done.came_of_it == CameOfIt::Ended);
    Ok(if late { exit::COULD_NOT_RUN } else { 0 })
}

#[derive(PartialEq, Eq)]
enum Which {
    Recorded(String),
    /// It runs here with `--db none`, or has no row yet.
    Unrecorded(String),
}

fn which(
    home: &Home,
    ledger: Option<&mut Recorder>,
    given: &std::ffi::OsStr,
) -> anyhow::Result<Which> {
    let exact = given.to_str().and_then(|text| AnalysisId::new(text).ok());
    let runs = |id: &AnalysisId| {
        let mut here = standing::of_id(home, id).into_iter();
        here.any(|standing| standing.next() == Next::Runs && !is_begun(&standing))
    };
    let unrecorded = exact.filter(runs);
    match (ledger, unrecorded) {
        (_, Some(id)) => Ok(Which::Unrecorded(id.as_str().to_owned())),
        (Some(ledger), None) => Ok(Which::Recorded(ids::analysis(ledger, given)?)),
        (None, None) => {
            anyhow::bail!("{given:?} does not run here, and there is no record with --db none")
        }
    }
}

fn is_begun(standing: &Standing) -> bool {
    let task = standing.record.commit_plan.as_ref();
    task.is_some_and(|task| task.begun)
}

fn unrecorded(home: &Home, id: &str, hurry: Hurry) -> anyhow::Result<Done> {
    let id = AnalysisId::new(id)?;
    let mut here = standing::of_id(home, &id).into_iter();
    let standing = here.find(|standing| standing.next() == Next::Runs);
    let standing = standing.with_context(|| format!("{id} has just ended"))?;
    let (told, why_not_told) = told(&standing, hurry);
    anyhow::ensure!(
        told,
        "{id} has no record, and its runner {}",
        why_not_told.unwrap_or_default()
    );
    Ok(Done {
        id: id.as_str().to_owned(),
        attempt: standing.record.attempt,
        came_of_it: CameOfIt::Asked,
        status: None,
        host: Some(home::machine_id()),
        told,
        why_not_told: None,
        recorded: false,
    })
}

fn recorded(home: &Home, ledger: &mut Recorder, id: &str, hurry: Hurry) -> anyhow::Result<Done> {
    let by = provenance::submitter_name();
    let cancelled = ledger.with(|store| store.cancel(id, &by));
    let mut done = Done {
        id: id.to_owned(),
        attempt: 0,
        came_of_it: CameOfIt::Ended,
        status: None,
        host: None,
        told: false,
        why_not_told: None,
        recorded: true,
    };
    match cancelled.map_err(ids::plainly)? {
        CancelOutcome::Now { attempt } => {
            done.attempt = attempt;
            done.came_of_it = CameOfIt::Cancelled;
            done.status = Some(State::Cancelled.as_str());
        }
        CancelOutcome::AlreadyEnded { attempt, state } => {
            done.attempt = attempt;
            done.status = Some(state.as_str());
        }
        CancelOutcome::Requested { attempt, host } => {
            done.attempt = attempt;
            done.came_of_it = CameOfIt::Asked;
            if let Some(standing) = here(home, ledger, id, attempt)? {
                (done.told, done.why_not_told) = told(&standing, hurry);
            }
            done.host = Some(host);
        }
    }
    Ok(done)
}

/// Where that very attempt runs, if it is in this home. The same id may be in another database, too.
fn here(
    home: &Home,
    ledger: &mut Recorder,
    id: &str,
    attempt: u32,
) -> anyhow::Result<Option<Standing>> {
    let database_id = ledger.store()?.id().to_owned();
    let is_it = |standing: &Standing| {
        let task = standing.record.commit_plan.as_ref();
        standing.record.attempt == attempt && task.is_some_and(|t| t.database_id == database_id)
    };
    let id = AnalysisId::new(id).context("read an id from the database")?;
    Ok(standing::of_id(home, &id).into_iter().find(is_it))
}

fn told(standing: &Standing, hurry: Hurry) -> (bool, Option<String>) {
    match standing.cancel(hurry) {
        Ok(Told::Now | Told::Before) => (true, None),
        Ok(Told::HasEnded) => (true, None),
        Ok(Told::Unreachable) if standing.alive => {
            let pid = standing.record.runner_pid;
            let why = format!("(process {pid}) cannot be shown to be the one it was");
            (false, Some(why))
        }
        Ok(Told::Unreachable) => (false, Some("is gone; `fumehood gc` finishes it".to_owned())),
        Err(e) => (false, Some(format!("could not be told: {e}"))),
    }
}

impl Done {
    fn words(&self) -> String {
        let id = clean(&self.id);
        let status = self.status.unwrap_or("ended").replace('_', " ");
        match self.came_of_it {
            CameOfIt::Cancelled if self.host.is_some() => format!("{id} is cancelled"),
            CameOfIt::Cancelled => format!("{id} is cancelled; it never ran"),
            CameOfIt::Ended => {
                format!("{id} had ended before ({status}); there was nothing to cancel")
            }
            CameOfIt::Asked if self.told => format!("{id} is being cancelled"),
            CameOfIt::Asked => match (&self.why_not_told, &self.host) {
                (Some(why), _) => format!("{id} is marked to be cancelled; its runner {why}"),
                (None, Some(host)) if *host != home::machine_id() => {
                    let host = clean(host);
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

fn await_ends(
    home: &Home,
    ledger: &mut Recorder,
    all: &mut [Done],
    tell: &dyn Fn(&Done),
) -> anyhow::Result<()> {
    let asked = |done: &&mut Done| done.came_of_it == CameOfIt::Asked && done.recorded;
    let mut waiting: Vec<&mut Done> = all.iter_mut().filter(asked).collect();
    let ids: Vec<String> = waiting.iter().map(|done| done.id.clone()).collect();
    let ended = wait::until_ended(home, ledger, &ids, None, &mut |_| Ok(()))?;
    for (done, last) in waiting.iter_mut().zip(ended) {
        done.attempt = last.listed.attempt;
        done.status = Some(last.listed.state.as_str());
        done.came_of_it = match last.listed.state {
            State::Cancelled => CameOfIt::Cancelled,
            _ => CameOfIt::Ended,
        };
        tell(done);
    }
    Ok(())
}
