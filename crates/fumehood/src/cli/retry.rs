//! `fumehood retry`: queues another attempt of an analysis that was submitted and has ended.

use std::ffi::OsString;

use engine::provenance;
use serde::Serialize;
use store::StoreError;

use super::args::StoreArgs;
use super::print::{self, escape};
use super::{exit, ids, messages, record_access};
use engine::settings::{self, Sources};

/// Queue another attempt of analyses that have ended, as they were submitted.
///
/// Earlier attempts stay in the history. The number of automatic retries starts again from what was submitted. The
/// values of secret variables (--secret-env, or names that look secret) are erased when an analysis ends; give them
/// again with --env.
#[derive(Clone, Debug, clap::Args)]
pub struct RetryArgs {
    #[arg(value_name = "ID", required = true, help = ids::HELP_ANALYSIS)]
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
    queued: Vec<QueuedEntry>,
    refused: Vec<RefusedEntry>,
}

#[derive(Serialize)]
struct QueuedEntry {
    id: String,
    attempt: u32,
}

#[derive(Serialize)]
struct RefusedEntry {
    id: String,
    /// `secrets_erased` if the caller must give values again.
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
    message: String,
}

pub fn retry(args: &RetryArgs) -> anyhow::Result<u8> {
    let (_, mut recorder) = record_access::open(&args.store)?;
    let wanted = ids::resolve_analyses(&mut recorder, &args.ids)?;
    let by = provenance::submitter_name();
    let secrets = match args.env.is_empty() {
        true => Vec::new(),
        false => settings::env_from_options(args.env.clone(), &Sources::from_process()?)?,
    };
    let mut done = Document {
        schema: "fumehood.retry/1",
        queued: Vec::new(),
        refused: Vec::new(),
    };
    for id in wanted {
        let retried = recorder.with(|store| store.retry(&id, &by, &secrets));
        match retried.map_err(ids::without_database_context) {
            Ok(attempt) => done.queued.push(QueuedEntry { id, attempt }),
            Err(e) => done.refused.push(RefusedEntry {
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
        let QueuedEntry { id, attempt } = queued;
        messages::line(&format!("{} is queued as attempt {attempt}", escape(id)));
    }
    for refused in &done.refused {
        messages::line(&format!("error: {}", refused.message));
    }
    Ok(match done.refused.is_empty() {
        true => 0,
        false => exit::COULD_NOT_RUN,
    })
}
