//! `fumehood rm`: an analysis, with everything that only it has.

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
use super::print::{self, clean, counted};
use super::sweep::{self, Scope, Sweep};
use super::{ids, ledger, show, standing};

/// Remove analyses from the record, with all their attempts, logs and outputs.
///
/// Nothing is asked, and nothing can be brought back. An analysis that is queued or running, or that left something in this home
/// (a kept workspace, an attempt that awaits its commit), is refused, and then none of those named is removed.
#[derive(Clone, Debug, clap::Args)]
pub struct RmArgs {
    #[arg(
        value_name = "ID",
        required = true,
        help = ids::HELP_WHOLE
    )]
    pub ids: Vec<OsString>,

    /// Remove what the database believes to be running, too: for a machine that is gone. A runner that lives after all
    /// records its attempt anew, as superseded
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
    swept: Sweep,
}

#[derive(Serialize)]
struct RemovedEntry {
    id: String,
    attempts: u64,
    outputs: u64,
}

pub fn rm(args: &RmArgs) -> anyhow::Result<u8> {
    let (home, mut ledger) = ledger::open(&args.store)?;
    let mut wanted = Vec::new();
    for given in &args.ids {
        let id = ids::analysis(&mut ledger, given)?;
        refuse_standing(&home, &id)?;
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
            refuse_running(&mut ledger, id)?;
        }
    }
    let mut objects = HashSet::new();
    let mut removed = Vec::new();
    for id in wanted {
        objects_of(&mut ledger, &id, &mut objects)?;
        let RemovalCounts { attempts, outputs } =
            ledger.with(|store| store.remove(&id, running))?;
        removed.push(RemovedEntry {
            id,
            attempts,
            outputs,
        });
    }
    // The record is gone already, so what goes wrong here is no failure: `gc` comes by again.
    let swept = sweep::sweep(&home, &mut ledger, &Scope::Only(objects));
    if args.json {
        print::json(&Document {
            schema: "fumehood.rm/1",
            removed,
            swept,
        })?;
        return Ok(0);
    }
    for entry in &removed {
        let attempts = counted(entry.attempts, "attempt", "attempts");
        let outputs = counted(entry.outputs, "output", "outputs");
        show::line(&format!(
            "removed {}: {attempts}, {outputs}",
            clean(&entry.id)
        ));
    }
    swept.tell();
    Ok(0)
}

/// What stands in this home still refers to the row, or will.
pub fn refuse_standing(home: &Home, id: &str) -> anyhow::Result<()> {
    let id = AnalysisId::new(id)?;
    if let Some(standing) = standing::of_id(home, &id).first() {
        anyhow::bail!("{}; then remove it", standing.advice());
    }
    // Only the lock tells what has no record yet.
    let found = RunDir::find(home, &id)?;
    anyhow::ensure!(
        found.is_none(),
        "{id} is being run or cleaned up; repeat this"
    );
    Ok(())
}

/// Before anything is removed. The removal itself checks again, in its transaction.
fn refuse_running(ledger: &mut Recorder, id: &str) -> anyhow::Result<()> {
    let attempts = ledger.with(|store| store.attempts(id))?;
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
            clean(&running.host)
        );
    }
    Ok(())
}

/// The objects that nobody may refer to any more when this analysis is gone.
fn objects_of(
    ledger: &mut Recorder,
    id: &str,
    objects: &mut HashSet<ContentHash>,
) -> anyhow::Result<()> {
    for listed in ledger.with(|store| store.attempts(id))? {
        let outputs = ledger.with(|store| store.outputs(id, listed.attempt))?;
        objects.extend(outputs.iter().map(|output| output.blake3));
        for stream in STREAMS {
            let log = ledger.with(|store| store.log(id, listed.attempt, stream))?;
            objects.extend(log.and_then(|log| log.object));
        }
    }
    Ok(())
}
