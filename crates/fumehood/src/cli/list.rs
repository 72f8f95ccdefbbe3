//! `fumehood list`: what was run, newest first.

use std::ffi::OsString;

use anyhow::Context;
use engine::home;
use serde::Serialize;
use store::{AttemptFilter, AttemptSelection, AttemptSummary, PostProcessState, State};

use super::args::StoreArgs;
use super::document::Entry;
use super::print::{self, Align, Table, clean};
use super::standing::{self, Next, Standing};
use super::{ledger, show, when};

/// List analyses, newest first.
///
/// Of each analysis the attempt that counts is shown: the newest that was not superseded. An ID@2 is attempt 2.
#[derive(Clone, Debug, clap::Args)]
pub struct ListArgs {
    /// Only these, separated by commas: queued, running, collecting, succeeded, failed, timed_out, out_of_memory,
    /// limit_exceeded, cancelled, error
    #[arg(long, value_name = "STATUS", value_delimiter = ',')]
    pub status: Vec<String>,

    /// Only those begun since then: how long ago (2d, 1h30m), or a date in UTC (2026-01-31, 2026-01-31T12:00)
    #[arg(long, value_name = "TIME")]
    pub since: Option<OsString>,

    /// At most so many
    #[arg(long, short = 'n', value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub limit: u32,

    /// Every attempt, earlier and superseded ones too
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
    /// Whether there are more than these.
    more: bool,
    analyses: Vec<Entry<'a>>,
    /// What stands in this home: running, or awaiting something.
    here: Vec<Here<'a>>,
}

#[derive(Serialize)]
struct Here<'a> {
    id: &'a str,
    attempt: u32,
    state: &'static str,
    workspace: String,
}

pub fn list(args: &ListArgs) -> anyhow::Result<u8> {
    let states = states(&args.status)?;
    let (home, mut ledger) = ledger::open(&args.store)?;
    let now_ms = ledger.with(|store| store.now_ms())?;
    let since_ms = match &args.since {
        Some(text) => {
            Some(when::parse_since(&text.to_string_lossy(), now_ms).context("read --since")?)
        }
        None => None,
    };
    let filter = AttemptFilter {
        states: &states,
        since_ms,
        which: if args.all {
            AttemptSelection::All
        } else {
            AttemptSelection::Latest
        },
        // One more, to know whether there are more.
        limit: args.limit + 1,
    };
    let mut found = ledger.with(|store| store.list(&filter))?;
    let more = found.len() > args.limit as usize;
    found.truncate(args.limit as usize);
    let here = standing::all(&home);
    match args.json {
        true => print::json(&Document {
            schema: "fumehood.list/1",
            more,
            analyses: found.iter().map(Entry::from).collect(),
            here: here.iter().map(as_json).collect(),
        })?,
        false => print_table(&found, &here, now_ms, more)?,
    }
    Ok(0)
}

/// Words of states, with `-` or `_`.
pub fn states(words: &[String]) -> anyhow::Result<Vec<State>> {
    let state = |word: &String| {
        State::parse(&word.trim().replace('-', "_")).with_context(|| {
            format!(
                "--status {word:?} is none; the states are {}",
                State::ALL.map(State::as_str).join(", ")
            )
        })
    };
    words.iter().map(state).collect()
}

fn as_json(standing: &Standing) -> Here<'_> {
    let record = &standing.record;
    Here {
        id: record.id.as_str(),
        attempt: record.attempt,
        state: match standing.next() {
            Next::Runs => "running",
            Next::Finish => "awaits_commit",
            Next::Run => "workspace_open",
            Next::PostProcess => "awaits_post_process",
            Next::Remove => "workspace_kept",
            Next::Clean => "left_behind",
            Next::Elsewhere => "elsewhere",
        },
        workspace: store::types::escaping::escape_text(
            record.workspace.as_os_str().as_encoded_bytes(),
        ),
    }
}

fn print_table(
    found: &[AttemptSummary],
    here: &[Standing],
    now_ms: i64,
    more: bool,
) -> anyhow::Result<()> {
    let mut out = print::Out::new();
    if !found.is_empty() {
        let mut table = Table::new(&[
            Align::Left,
            Align::Left,
            Align::Right,
            Align::Right,
            Align::Left,
            Align::Left,
        ]);
        table.row(["ID", "STATUS", "AGE", "TIME", "OUTPUTS", "NOTE"].map(String::from));
        for listed in found {
            table.row([
                name(listed),
                ended(listed),
                when::age(now_ms, listed.created_ms),
                listed.wall_ms.map_or(String::new(), when::brief),
                outputs(listed),
                note(listed, here),
            ]);
        }
        table.print(&mut out, "")?;
    }
    out.finish()?;
    if found.is_empty() {
        show::line("nothing is recorded, or nothing that matches");
    }
    if more {
        show::line("there are more; --limit N shows them, --since and --status narrow the list");
    }
    tell_of(found, here);
    Ok(())
}

/// What stands in this home and is not in the table, or awaits somebody.
fn tell_of(found: &[AttemptSummary], here: &[Standing]) {
    const TOLD_MAX: usize = 8;
    let told: Vec<&Standing> = here
        .iter()
        .filter(|standing| match standing.next() {
            Next::Runs => !found.iter().any(|l| l.id == standing.record.id.as_str()),
            Next::Elsewhere => false,
            _ => true,
        })
        .collect();
    for standing in told.iter().take(TOLD_MAX) {
        show::line(&standing.advice());
    }
    if told.len() > TOLD_MAX {
        show::line(&format!("… and {} more", told.len() - TOLD_MAX));
    }
}

/// As `show` and the others take it.
pub fn name(listed: &AttemptSummary) -> String {
    match listed.attempt {
        1 => clean(&listed.id),
        n => format!("{}@{n}", clean(&listed.id)),
    }
}

/// The status, and why if that says more.
pub fn ended(listed: &AttemptSummary) -> String {
    let status = clean(&listed.state_word).replace('_', " ");
    let reason = listed.reason.as_deref().unwrap_or_default();
    let why = match (listed.state, reason, listed.exit_code, listed.signal) {
        (State::Failed, "exit", Some(code), _) => format!("exit {code}"),
        (State::Failed, "signal", _, Some(signal)) => format!("signal {signal}"),
        (State::Succeeded, "exit", ..) | (_, "", ..) => return status,
        (state, reason, ..) if state.as_str() == reason => return status,
        (_, reason, ..) => clean(reason).replace('_', " "),
    };
    format!("{status} ({why})")
}

fn outputs(listed: &AttemptSummary) -> String {
    match (listed.outputs_count, listed.output_bytes) {
        (Some(count), bytes) => print::outputs_and_size(count, bytes.unwrap_or(0)),
        (None, _) => String::new(),
    }
}

/// What somebody should know who only looks at the list.
fn note(listed: &AttemptSummary, here: &[Standing]) -> String {
    let mut notes = Vec::new();
    if listed.superseded {
        notes.push("superseded".to_owned());
    }
    if listed.complete == Some(false) && listed.state == State::Succeeded {
        notes.push("incomplete".to_owned());
    }
    match listed.post_process {
        PostProcessState::Failed => notes.push("post_process failed".to_owned()),
        PostProcessState::Pending => notes.push("post_process pending".to_owned()),
        PostProcessState::Unknown => {
            let word = listed.post_process_word.as_deref().unwrap_or_default();
            notes.push(format!("post_process {}", clean(word)));
        }
        PostProcessState::NotAsked | PostProcessState::Done => {}
    }
    if matches!(listed.state, State::Running | State::Collecting) {
        let standing = here.iter().find(|s| s.record.id.as_str() == listed.id);
        match standing.map(Standing::next) {
            Some(Next::Runs) => {}
            Some(Next::Finish | Next::PostProcess) => notes.push("awaits its commit".to_owned()),
            _ if listed.host != home::machine_id() => {
                notes.push(format!("on {}", clean(&listed.host)));
            }
            _ => notes.push("its runner is not in this home".to_owned()),
        }
    }
    notes.join(", ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn listed(state: State, reason: &str) -> AttemptSummary {
        AttemptSummary {
            id: "a".into(),
            attempt: 1,
            state,
            state_word: state.as_str().into(),
            reason: Some(reason.into()),
            message: None,
            superseded: false,
            host: home::machine_id(),
            created_ms: 0,
            started_ms: None,
            ended_ms: None,
            committed_ms: None,
            wall_ms: None,
            exit_code: None,
            signal: None,
            isolation_level: None,
            complete: Some(true),
            outputs_count: Some(0),
            output_bytes: Some(0),
            post_process: PostProcessState::NotAsked,
            post_process_word: None,
        }
    }

    #[test]
    fn a_status_says_why_in_a_word_or_two() {
        assert_eq!(ended(&listed(State::Succeeded, "exit")), "succeeded");
        assert_eq!(ended(&listed(State::Cancelled, "cancelled")), "cancelled");
        assert_eq!(
            ended(&listed(State::TimedOut, "wall_time")),
            "timed out (wall time)"
        );
        let mut failed = listed(State::Failed, "exit");
        failed.exit_code = Some(3);
        assert_eq!(ended(&failed), "failed (exit 3)");
        let forged = listed(State::Error, "\u{1b}[31mx");
        assert_eq!(ended(&forged), "error (\\x1b[31mx)");
    }

    #[test]
    fn states_are_words() {
        let parse =
            |words: &[&str]| states(&words.iter().map(|w| w.to_string()).collect::<Vec<_>>());
        assert_eq!(
            parse(&["failed", "timed-out"]).unwrap(),
            [State::Failed, State::TimedOut]
        );
        assert!(
            parse(&["fine"])
                .unwrap_err()
                .to_string()
                .contains("out_of_memory")
        );
    }
}
