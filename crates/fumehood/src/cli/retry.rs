//! `fumehood retry`: another attempt of what was submitted and has ended.

use std::ffi::OsString;

use engine::attempt::recorder::Recorder;
use engine::provenance;
use serde::Serialize;
use store::StoreError;

use super::args::StoreArgs;
use super::print::{self, clean};
use super::{exit, ids, ledger, show};
use crate::config::{self, Sources};

/// Queue another attempt of analyses that have ended, as they were submitted.
///
/// Earlier attempts stay in the history. It may be retried by itself again as often as it was submitted with. The values of
/// secret variables (--secret-env, or names that look it) are erased when an analysis has ended; give them again with --env.
#[derive(Clone, Debug, clap::Args)]
pub struct RetryArgs {
    #[arg(value_name = "ID", required = true, help = ids::HELP_WHOLE)]
    pub ids: Vec<OsString>,

    /// The value of a variable that was erased when the analysis ended; without =V it is your own. Repeatable
    #[arg(long, value_name = "K[=V]")]
    pub env: Vec<OsString>,

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
    /// `secrets_erased`, where values must be given again.
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
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
    let secrets = match args.env.is_empty() {
        true => Vec::new(),
        false => config::given_env(args.env.clone(), &Sources::from_process()?)?,
    };
    let mut done = Document {
        schema: "fumehood.retry/1",
        queued: Vec::new(),
        refused: Vec::new(),
    };
    for id in wanted {
        match again(&mut ledger, &id, &by, &secrets) {
            Ok(attempt) => done.queued.push(Queued { id, attempt }),
            Err(e) => done.refused.push(Refused {
                code: e.downcast_ref::<StoreError>().and_then(StoreError::code),
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

fn again(
    ledger: &mut Recorder,
    id: &str,
    by: &str,
    secrets: &[(String, String)],
) -> anyhow::Result<u32> {
    ledger
        .with(|store| store.retry(id, by, secrets))
        .map_err(ids::plainly)
}
