//! `fumehood retry`: another attempt of what was submitted and has ended.

use std::ffi::OsString;

use analysis::ledger::Ledger;
use analysis::provenance;
use serde::Serialize;

use super::args::StoreArgs;
use super::print::{self, clean};
use super::{exit, ids, ledger, show};

/// Queue another attempt of analyses that have ended, as they were submitted.
///
/// Earlier attempts stay in the history. It may be retried by itself again as often as it was submitted with.
#[derive(Clone, Debug, clap::Args)]
pub struct RetryArgs {
    #[arg(value_name = "ID", required = true, help = ids::HELP_WHOLE)]
    pub ids: Vec<OsString>,

    /// Print one JSON document (fumehood.retry/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Serialize)]
struct Document {
    schema: &'static str,
    queued: Vec<Queued>,
    refused: Vec<Refused>,
}

#[derive(Serialize)]
struct Queued {
    id: String,
    attempt: u32,
}

#[derive(Serialize)]
struct Refused {
    id: String,
    message: String,
}

pub fn retry(args: &RetryArgs) -> anyhow::Result<u8> {
    let (_, mut ledger) = ledger::open(&args.store)?;
    let mut wanted = Vec::new();
    for given in &args.ids {
        let id = ids::analysis(&mut ledger, given)?;
        if !wanted.contains(&id) {
            wanted.push(id);
        }
    }
    let by = provenance::submitter_name();
    let mut done = Document {
        schema: "fumehood.retry/1",
        queued: Vec::new(),
        refused: Vec::new(),
    };
    for id in wanted {
        match again(&mut ledger, &id, &by) {
            Ok(attempt) => done.queued.push(Queued { id, attempt }),
            Err(e) => done.refused.push(Refused {
                message: format!("{e:#}"),
                id,
            }),
        }
    }
    if args.json {
        print::json(&done)?;
    }
    for queued in done.queued.iter().filter(|_| !args.json) {
        let Queued { id, attempt } = queued;
        show::line(&format!("{} is queued as attempt {attempt}", clean(id)));
    }
    for refused in &done.refused {
        show::line(&format!("error: {}", refused.message));
    }
    Ok(match done.refused.is_empty() {
        true => 0,
        false => exit::COULD_NOT_RUN,
    })
}

fn again(ledger: &mut Ledger, id: &str, by: &str) -> anyhow::Result<u32> {
    ledger
        .with(|store| store.retry(id, by))
        .map_err(ids::plainly)
}
