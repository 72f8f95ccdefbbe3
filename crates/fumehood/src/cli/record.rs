//! `fumehood record`: results that were made without a sandbox.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::Context;
use engine::attempt::record::{Reason, Status};
use engine::attempt::recorder::Recorder;
use engine::recovery::staged_commands::{self, ExternalResult};
use engine::request::AnalysisId;

use super::args::{self, StoreArgs};
use super::progress::ProgressLine;
use super::{exit, ledger, print, show, standing};
use crate::config::settings::Key;
use crate::config::{self, Sources};

/// Record results that were made without Fumehood, marked as such (isolation: none).
///
/// They are read by the same rules as what a confined program leaves: no links, no devices, nothing of another owner than
/// the directory's. The files themselves stay where they are.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["result", "dir"]))]
pub struct RecordArgs {
    /// The new analysis's name, [A-Za-z0-9][A-Za-z0-9._-]{0,63}
    #[arg(value_name = "ID")]
    pub id: OsString,

    /// A file that becomes the output result.json, stored as JSON where it is such
    #[arg(long, value_name = "FILE")]
    pub result: Option<PathBuf>,

    /// Everything in this directory becomes outputs
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,

    /// How it ended
    #[arg(long, value_name = "STATUS", default_value = "succeeded", value_parser = ["succeeded", "failed"])]
    pub status: String,

    /// Record an id that is recorded already again, as a new attempt; earlier ones stay in its history
    #[arg(long)]
    pub replace: bool,

    /// Take only files whose path in the directory matches, such as 'figures/**' or '*.csv'. Repeatable
    #[arg(long, value_name = "GLOB", help_heading = "Outputs")]
    pub output: Vec<OsString>,

    /// A file that must be among the outputs; else it is recorded as failed. Repeatable
    #[arg(long, value_name = "GLOB", help_heading = "Outputs")]
    pub expect: Vec<OsString>,

    /// Bytes that all outputs may have; what fits is kept, the rest is refused and counted [default: 10G]
    #[arg(long, value_name = "SIZE", help_heading = "Outputs")]
    pub max_output: Option<OsString>,

    /// Bytes that one output may have [default: as --max-output]
    #[arg(long, value_name = "SIZE", help_heading = "Outputs")]
    pub max_output_file: Option<OsString>,

    /// How many outputs are kept, at most 1000000 [default: 10000]
    #[arg(long, value_name = "N", help_heading = "Outputs")]
    pub max_outputs: Option<OsString>,

    /// How deep in the directory an output may lie, from 1 to 256 [default: 32]
    #[arg(long, value_name = "N", help_heading = "Outputs")]
    pub max_depth: Option<OsString>,

    /// Outputs up to this size are also stored in the database; at most 64M [default: 1M]
    #[arg(long, value_name = "SIZE", help_heading = "Outputs")]
    pub inline_max: Option<OsString>,

    /// Print one JSON document (fumehood.result/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

impl RecordArgs {
    fn given(&self) -> Vec<(Key, Vec<OsString>)> {
        let own = [
            args::many(Key::Output, &self.output),
            args::many(Key::Expect, &self.expect),
            args::one(Key::MaxOutput, &self.max_output),
            args::one(Key::MaxOutputFile, &self.max_output_file),
            args::one(Key::MaxOutputs, &self.max_outputs),
            args::one(Key::MaxDepth, &self.max_depth),
            args::one(Key::InlineMax, &self.inline_max),
            args::switch(Key::Replace, self.replace),
        ];
        let own = own.into_iter().flatten();
        self.store.given().into_iter().chain(own).collect()
    }
}

pub fn record(args: &RecordArgs) -> anyhow::Result<u8> {
    let id = AnalysisId::new(&args.id.to_string_lossy()).context("record results")?;
    let sources = Sources::from_process()?;
    let (settings, collection, again) = config::handed_in_settings(args.given(), &sources)?;
    let home = ledger::home()?;
    let mut ledger: Recorder = ledger::of(&settings, &home)?
        .context("--db none keeps no record; name a database, or leave it out")?;
    let handed = ExternalResult {
        id: &id,
        id_reuse: again,
        status: match args.status.as_str() {
            "failed" => Status::Failed,
            _ => Status::Succeeded,
        },
        result: args.result.as_deref(),
        dir: args.dir.as_deref(),
        collection,
    };
    let mut line = std::io::stderr().is_terminal().then(ProgressLine::default);
    let done = staged_commands::record(&home, &mut ledger, &handed, &mut |progress| {
        if let Some(text) = line.as_mut().and_then(|line| line.show(progress)) {
            // Nobody may be listening; that is no reason to fail.
            let _unheard = std::io::stderr().write_all(text.as_bytes());
        }
    });
    if let Some(text) = line.as_mut().and_then(ProgressLine::clear) {
        let _unheard = std::io::stderr().write_all(text.as_bytes());
    }
    let record = match done {
        Ok(record) => record,
        Err(e) if standing::any_of(&home, &id) => {
            // Begun, and everything is in the artifact store.
            show::error(&e.into());
            show::line(&format!("finish it with `fumehood post-process {id}`"));
            return Ok(exit::NOT_COMMITTED);
        }
        Err(e) => return Err(e.into()),
    };
    match args.json {
        true => print::json(&record)?,
        false => show::summary(&record),
    }
    let unprocessed = record.post_process.as_ref().is_some_and(|p| !p.done);
    Ok(match (record.status, record.reason) {
        // That it failed elsewhere was handed in, and is recorded: all is well here.
        (Status::Failed, Reason::Recorded) if unprocessed => exit::NOT_COMMITTED,
        (Status::Failed, Reason::Recorded) => 0,
        _ => exit::code(&record),
    })
}
