//! `fumehood record`: records results that were made without a sandbox.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Context;
use engine::attempt::record::{Reason, Status};
use engine::attempt::recorder::Recorder;
use engine::recovery::staged_commands::{self, ExternalResult};
use engine::request::AnalysisId;

use super::args::{self, StoreArgs};
use super::progress::StderrProgress;
use super::{exit, messages, print, record_access, run_dirs};
use engine::settings::table::{GivenSettings, Key};
use engine::settings::{self, Sources};

/// Record results that were made without Fumehood, marked as such (isolation: none).
///
/// The same rules apply as to files that a confined program leaves: no links, no devices, and every file must belong to
/// the owner of the directory. The files themselves stay where they are.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["result", "dir"]))]
pub struct RecordArgs {
    /// The new analysis's name, [A-Za-z0-9][A-Za-z0-9._-]{0,63}
    #[arg(value_name = "ID")]
    pub id: OsString,

    /// A file that becomes the output result.json, also stored as JSON if it is valid
    #[arg(long, value_name = "FILE")]
    pub result: Option<PathBuf>,

    /// Record every file in this directory as an output
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,

    /// How the analysis ended
    #[arg(long, value_name = "STATUS", default_value = "succeeded", value_parser = ["succeeded", "failed"])]
    pub status: String,

    /// Record an id again that is recorded already, as a new attempt; earlier attempts stay in its history
    #[arg(long)]
    pub replace: bool,

    /// Take only files whose path in the directory matches, such as 'figures/**' or '*.csv'. Repeatable
    #[arg(long, value_name = "GLOB", help_heading = "Outputs")]
    pub output: Vec<OsString>,

    /// A file that must be among the outputs; otherwise the analysis is recorded as failed. Repeatable
    #[arg(long, value_name = "GLOB", help_heading = "Outputs")]
    pub expect: Vec<OsString>,

    /// Total size of the outputs; files beyond it are refused and counted [default: 10G]
    #[arg(long, value_name = "SIZE", help_heading = "Outputs")]
    pub max_output: Option<OsString>,

    /// Size of one output [default: as --max-output]
    #[arg(long, value_name = "SIZE", help_heading = "Outputs")]
    pub max_output_file: Option<OsString>,

    /// Number of outputs, at most 1000000 [default: 10000]
    #[arg(long, value_name = "N", help_heading = "Outputs")]
    pub max_outputs: Option<OsString>,

    /// How deep in the directory an output may be, from 1 to 256 [default: 32]
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
    fn given_settings(&self) -> GivenSettings {
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
        self.store.given_settings().into_iter().chain(own).collect()
    }
}

pub fn record(args: &RecordArgs) -> anyhow::Result<u8> {
    let id = AnalysisId::new(&args.id.to_string_lossy()).context("record results")?;
    let sources = Sources::from_process()?;
    let (settings, collection, again) =
        settings::record_command_settings(args.given_settings(), &sources)?;
    let home = record_access::home()?;
    let mut recorder: Recorder = Recorder::from_settings(&settings, &home)?
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
    let mut line = StderrProgress::new();
    let done = staged_commands::record(&home, &mut recorder, &handed, &mut |progress| {
        line.show(progress);
    });
    line.clear();
    let record = match done {
        Ok(record) => record,
        Err(e) if run_dirs::has_any(&home, &id) => {
            // The attempt has begun and all outputs are in the artifact store.
            messages::error(&e.into());
            messages::line(&format!("finish it with `fumehood post-process {id}`"));
            return Ok(exit::NOT_FINISHED);
        }
        Err(e) => return Err(e.into()),
    };
    match args.json {
        true => print::json(&record)?,
        false => messages::summary(&record),
    }
    let unprocessed = record.post_process.as_ref().is_some_and(|p| !p.done);
    Ok(match (record.status, record.reason) {
        // The caller recorded that the analysis failed elsewhere. Recording it succeeded.
        (Status::Failed, Reason::Recorded) if unprocessed => exit::NOT_FINISHED,
        (Status::Failed, Reason::Recorded) => 0,
        _ => exit::code_of_record(&record),
    })
}
