//! `fumehood list`: analyses, newest first.

use std::ffi::OsString;

use anyhow::Context;
use engine::home;
use serde::Serialize;
use store::{AttemptFilter, AttemptSelection, AttemptSummary, PostProcessState, State};

use super::args::StoreArgs;
use super::print::{self, Align, Table, escape};
use super::run_dirs::{self, NextAction, RunDirInfo};
use super::{attempt_text, messages, record_access, time_format};

/// List analyses, newest first.
///
/// For each analysis the list shows the newest attempt that was not superseded. ID@2 means attempt 2.
#[derive(Clone, Debug, clap::Args)]
pub struct ListArgs {
    /// Only these statuses, separated by commas: queued, running, collecting, succeeded, failed, timed_out,
    /// out_of_memory, limit_exceeded, cancelled, error
    #[arg(long, value_name = "STATUS", value_delimiter = ',')]
    pub status: Vec<String>,

    /// Only analyses that began since then: how long ago (2d, 1h30m), or a date in UTC (2026-01-31, 2026-01-31T12:00)
    #[arg(long, value_name = "TIME")]
    pub since: Option<OsString>,

    /// Show at most this many
    #[arg(long, short = 'n', value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub limit: u32,

    /// Show every attempt, also earlier and superseded ones
    #[arg(long, short)]
    pub all: bool,

    /// Print one JSON document (fumehood.list/1)
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    /// Whether there are more analyses than these.
    more: bool,
    analyses: &'a [AttemptSummary],
    /// Run directories of this home: running, or waiting for something.
    here: Vec<RunDirEntry<'a>>,
}

#[derive(Serialize)]
struct RunDirEntry<'a> {
    id: &'a str,
    attempt: u32,
    state: &'static str,
    workspace: String,
}

pub fn list(args: &ListArgs) -> anyhow::Result<u8> {
    let states = attempt_text::parse_states(&args.status)?;
    let (home, mut recorder) = record_access::open(&args.store)?;
    let now_ms = recorder.with(|store| store.now_ms())?;
    let since = args.since.as_ref();
    let since_ms = since.map(|text| time_format::parse_since(&text.to_string_lossy(), now_ms));
    let filter = AttemptFilter {
        states: &states,
        since_ms: since_ms.transpose().context("read --since")?,
        which: if args.all {
            AttemptSelection::All
        } else {
            AttemptSelection::Latest
        },
        // Fetch one more, to know whether there are more.
        limit: args.limit + 1,
    };
    let mut found = recorder.with(|store| store.list(&filter))?;
    let more = found.len() > args.limit as usize;
    found.truncate(args.limit as usize);
    let here = run_dirs::list_all(&home);
    match args.json {
        true => print::json(&Document {
            schema: "fumehood.list/1",
            more,
            analyses: &found,
            here: here.iter().map(run_dir_entry).collect(),
        })?,
        false => print_table(&found, &here, now_ms, more)?,
    }
    Ok(0)
}

fn run_dir_entry(run_dir: &RunDirInfo) -> RunDirEntry<'_> {
    let record = &run_dir.record;
    RunDirEntry {
        id: record.id.as_str(),
        attempt: record.attempt,
        state: match run_dir.next_action() {
            NextAction::AwaitRunner => "running",
            NextAction::Finish => "awaits_commit",
            NextAction::RunIn => "workspace_open",
            NextAction::PostProcess => "awaits_post_process",
            NextAction::RemoveWorkspace => "workspace_kept",
            NextAction::CleanUp => "left_behind",
            NextAction::LeaveToOther => "elsewhere",
        },
        workspace: store::types::escaping::escape_text(
            record.workspace.as_os_str().as_encoded_bytes(),
        ),
    }
}

fn print_table(
    found: &[AttemptSummary],
    here: &[RunDirInfo],
    now_ms: i64,
    more: bool,
) -> anyhow::Result<()> {
    if found.is_empty() {
        messages::line("nothing is recorded, or nothing that matches");
    } else {
        use Align::{Left, Right};
        let mut table = Table::new(&[Left, Left, Right, Right, Left, Left]);
        table.row(["ID", "STATUS", "AGE", "TIME", "OUTPUTS", "NOTE"].map(String::from));
        for summary in found {
            table.row([
                attempt_text::display_name(summary),
                attempt_text::status_text(summary),
                time_format::format_age(now_ms, summary.created_ms),
                attempt_text::wall_time(summary),
                outputs(summary),
                note(summary, here),
            ]);
        }
        print::lines(table.lines())?;
    }
    if more {
        messages::line(
            "there are more; --limit N shows them, --since and --status narrow the list",
        );
    }
    print_advice(found, here);
    Ok(())
}

/// Prints advice about run directories of this home that are not in the table or wait for somebody.
fn print_advice(found: &[AttemptSummary], here: &[RunDirInfo]) {
    const ADVICE_MAX: usize = 8;
    let shown: Vec<&RunDirInfo> = here
        .iter()
        .filter(|run_dir| match run_dir.next_action() {
            NextAction::AwaitRunner => !found.iter().any(|l| l.id == run_dir.record.id.as_str()),
            NextAction::LeaveToOther => false,
            _ => true,
        })
        .collect();
    for run_dir in shown.iter().take(ADVICE_MAX) {
        messages::line(&run_dir.advice());
    }
    if shown.len() > ADVICE_MAX {
        messages::line(&format!("… and {} more", shown.len() - ADVICE_MAX));
    }
}

fn outputs(summary: &AttemptSummary) -> String {
    match (summary.outputs_count, summary.output_bytes) {
        (Some(count), bytes) => print::outputs_and_size(count, bytes.unwrap_or(0)),
        (None, _) => String::new(),
    }
}

/// Returns remarks for a reader who sees only the list.
fn note(summary: &AttemptSummary, here: &[RunDirInfo]) -> String {
    let mut notes = Vec::new();
    if summary.superseded {
        notes.push("superseded".to_owned());
    }
    if summary.complete == Some(false) && summary.state == State::Succeeded {
        notes.push("incomplete".to_owned());
    }
    match summary.post_process {
        PostProcessState::Failed => notes.push("post_process failed".to_owned()),
        PostProcessState::Pending => notes.push("post_process pending".to_owned()),
        PostProcessState::Unknown => {
            let word = summary.post_process_word.as_deref().unwrap_or_default();
            notes.push(format!("post_process {}", escape(word)));
        }
        PostProcessState::NotAsked | PostProcessState::Done => {}
    }
    if matches!(summary.state, State::Running | State::Collecting) {
        let run_dir = here.iter().find(|s| s.record.id.as_str() == summary.id);
        match run_dir.map(RunDirInfo::next_action) {
            Some(NextAction::AwaitRunner) => {}
            Some(NextAction::Finish | NextAction::PostProcess) => {
                notes.push("awaits its commit".to_owned())
            }
            _ if summary.host != home::machine_id() => {
                notes.push(format!("on {}", escape(&summary.host)));
            }
            _ => notes.push("its runner is not in this home".to_owned()),
        }
    }
    notes.join(", ")
}
