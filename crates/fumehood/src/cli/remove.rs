//! `fumehood rm`: removes an analysis with everything that belongs to it alone.

use std::collections::HashSet;
use std::ffi::OsString;

use engine::attempt::recorder::Recorder;
use engine::home::Home;
use engine::request::AnalysisId;
use engine::run_dir::RunDir;
use serde::Serialize;
use store::types::manifest::ContentHash;
use store::{RemovalCounts, STREAMS, State, UnfinishedPolicy};

use super::args::StoreArgs;
use super::object_gc::{self, ObjectGcReport, ObjectScope};
use super::print::{self, escape, format_count};
use super::{ids, messages, record_access, run_dirs};

/// Remove analyses from the record, with all their attempts, logs and outputs.
///
/// There is no confirmation, and nothing can be restored. If any named analysis is queued or running, or has something
/// left in this home (a kept workspace, an attempt that awaits its commit), nothing is removed.
#[derive(Clone, Debug, clap::Args)]
pub struct RmArgs {
    #[arg(
        value_name = "ID",
        required = true,
        help = ids::HELP_ANALYSIS
    )]
    pub ids: Vec<OsString>,

    /// Also remove attempts that the database lists as running, for a machine that is gone. If the runner lives after
    /// all, it records its attempt again, as superseded
    #[arg(long, short)]
    pub force: bool,

    /// Print one JSON document (fumehood.rm/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Serialize)]
struct Document {
    schema: &'static str,
    removed: Vec<RemovedEntry>,
    swept: ObjectGcReport,
}

#[derive(Serialize)]
struct RemovedEntry {
    id: String,
    #[serde(flatten)]
    counts: RemovalCounts,
}

pub fn rm(args: &RmArgs) -> anyhow::Result<u8> {
    let (home, mut recorder) = record_access::open(&args.store)?;
    let mut wanted = Vec::new();
    for given in &args.ids {
        let id = ids::resolve_analysis(&mut recorder, given)?;
        refuse_if_in_home(&home, &id)?;
        if !wanted.contains(&id) {
            wanted.push(id);
        }
    }
    let running = match args.force {
        true => UnfinishedPolicy::Remove,
        false => UnfinishedPolicy::Refuse,
    };
    if !args.force {
        for id in &wanted {
            refuse_if_unfinished(&mut recorder, id)?;
        }
    }
    let mut objects = HashSet::new();
    let mut removed = Vec::new();
    for id in wanted {
        objects_of(&mut recorder, &id, &mut objects)?;
        let counts = recorder.with(|store| store.remove(&id, running))?;
        removed.push(RemovedEntry { id, counts });
    }
    // The record is already gone, so a problem here is not a failure: the next `gc` removes the objects.
    let swept = object_gc::remove_unreferenced(&home, &mut recorder, &ObjectScope::Only(objects));
    if args.json {
        print::json(&Document {
            schema: "fumehood.rm/1",
            removed,
            swept,
        })?;
        return Ok(0);
    }
    for entry in &removed {
        let attempts = format_count(entry.counts.attempts, "attempt", "attempts");
        let outputs = format_count(entry.counts.outputs, "output", "outputs");
        messages::line(&format!(
            "removed {}: {attempts}, {outputs}",
            escape(&entry.id)
        ));
    }
    swept.print();
    Ok(0)
}

/// Refuses an analysis with a run directory in this home, which refers to the row or will.
pub fn refuse_if_in_home(home: &Home, id: &str) -> anyhow::Result<()> {
    let id = AnalysisId::new(id)?;
    if let Some(run_dir) = run_dirs::list_analysis(home, &id).first() {
        anyhow::bail!("{}; then remove it", run_dir.advice());
    }
    // A directory without a record yet is only known by its lock.
    let found = RunDir::find(home, &id)?;
    anyhow::ensure!(
        found.is_none(),
        "{id} is being run or cleaned up; repeat this"
    );
    Ok(())
}

/// Refuses an unfinished analysis before anything is removed. The removal checks again in its transaction.
fn refuse_if_unfinished(recorder: &mut Recorder, id: &str) -> anyhow::Result<()> {
    let attempts = recorder.with(|store| store.attempts(id))?;
    if let Some(queued) = attempts.iter().find(|a| a.state == State::Queued) {
        anyhow::bail!(
            "{id} is queued (attempt {}); cancel it first, with `fumehood cancel {id}`",
            queued.attempt
        );
    }
    if let Some(running) = attempts.iter().find(|a| !a.state.is_final()) {
        anyhow::bail!(
            "{id} has an attempt ({}) that is {} on {}; wait for it, `fumehood cancel {id}`, run `fumehood gc` there if its runner died, or use --force",
            running.attempt,
            running.state,
            escape(&running.host)
        );
    }
    Ok(())
}

/// Collects the objects that may be unreferenced once this analysis is removed.
fn objects_of(
    recorder: &mut Recorder,
    id: &str,
    objects: &mut HashSet<ContentHash>,
) -> anyhow::Result<()> {
    for summary in recorder.with(|store| store.attempts(id))? {
        let outputs = recorder.with(|store| store.outputs(id, summary.attempt))?;
        objects.extend(outputs.iter().map(|output| output.blake3));
        for stream in STREAMS {
            let log = recorder.with(|store| store.log(id, summary.attempt, stream))?;
            objects.extend(log.and_then(|log| log.object));
        }
    }
    Ok(())
}
