//! Messages on stderr: summaries, notices and errors. Everything that may come from a program, a file name or a request
//! is escaped first.

use std::io::Write;

use engine::attempt::record::{CommitState, LimitEntry, Record, Status};
use engine::request::IsolationLevel;
use rustix::termios::OutputModes;
use sandbox::spec::{Hardness, LimitName};
use store::types::escaping::escape_terminal;
use store::types::timings::{TimedPart, Timings};
use store::types::units::{format_duration, format_size};

/// Prints a text on stderr, each line with the name `fumehood` before it.
pub fn line(text: &str) {
    // Nobody may be reading stderr. That is not a reason to fail.
    let _ = std::io::stderr().write_all(format_lines(text).as_bytes());
}

/// Formats a text for stderr, each line with the name `fumehood` before it.
pub fn format_lines(text: &str) -> String {
    // `fumehood shell` puts the terminal in raw mode, where a new line needs a carriage return.
    let raw = rustix::termios::tcgetattr(rustix::stdio::stderr())
        .is_ok_and(|t| !t.output_modes.contains(OutputModes::OPOST));
    let end = if raw { "\r\n" } else { "\n" };
    let line = |part: &str| format!("fumehood: {}{end}", escape_terminal(part.as_bytes()));
    text.lines().map(line).collect()
}

pub fn error(error: &anyhow::Error) {
    line(&format!("error: {error:#}"));
}

/// Prints how a run ended, in a few lines.
pub fn summary(record: &Record) {
    if record.isolation.level == Some(IsolationLevel::None) {
        line(&format!(
            "{} recorded as {}, made without a sandbox (isolation: none)",
            record.id,
            record.status.as_str()
        ));
    } else {
        line(&outcome_line(record));
        if record.status != Status::Error || record.isolation.level.is_some() {
            line(&isolation_line(record));
        }
    }
    commit_summary(record);
    unfinished_work(record);
    for hint in &record.hints {
        line(&hint.text);
    }
    if let Some(until) = record.kept_until {
        let left = until.saturating_sub(engine::home::unix_seconds());
        line(&format!(
            "kept for {}: {}",
            format_duration(left * 1000),
            record.workspace.display()
        ));
    }
}

/// The number of outputs that a summary lists. It only counts the rest.
const LISTED_MAX: usize = 20;

/// Prints how long each part of a run took, with the steps of building the sandbox below theirs.
pub fn timings(timings: &Timings) {
    let one = |indent: &str, part: &TimedPart| {
        let ms = part.us as f64 / 1000.0;
        let name = format!("{indent}{}", part.name.replace('_', " "));
        line(&format!("{name:<44}{ms:>10.3} ms"));
    };
    for part in &timings.steps {
        one("", part);
        if part.name == "sandbox" {
            timings.sandbox.iter().for_each(|part| one("  ", part));
        }
    }
    let total = TimedPart {
        name: String::from("total"),
        us: timings.total_us,
    };
    one("", &total);
}

/// Prints what is left to do. Printed even with --quiet.
pub fn unfinished_work(record: &Record) {
    let finish = format!("finish it with `fumehood post-process {}`", record.id);
    let why = record.commit.message.as_deref().unwrap_or_default();
    match record.commit.state {
        CommitState::Pending => line(&format!(
            "NOT COMMITTED: {why}\nits outputs are safe in FUMEHOOD_HOME; {finish}"
        )),
        CommitState::InWorkspace => line(&format!(
            "NOT COMMITTED: {why}\nits outputs are still in {}; {finish}",
            record.workspace.display()
        )),
        _ => {}
    }
    if let Some(step) = record.post_process.as_ref().filter(|step| !step.done) {
        line(&format!(
            "post_process failed: {}\nnothing is lost; repeat it with `fumehood post-process {}`",
            step.message.as_deref().unwrap_or_default(),
            record.id
        ));
    }
}

/// Prints what was committed, and what was not.
fn commit_summary(record: &Record) {
    let outputs = &record.outputs;
    let what = match outputs.len() {
        0 => String::from("no outputs"),
        1 => format!("1 output ({})", format_size(record.collection.bytes)),
        n => format!("{n} outputs ({})", format_size(record.collection.bytes)),
    };
    let attempt = match record.attempt {
        1 => String::new(),
        n => format!(" as attempt {n}"),
    };
    match record.commit.state {
        CommitState::Unrecorded | CommitState::Pending | CommitState::InWorkspace => {}
        CommitState::Committed => line(&format!("{what} committed{attempt}")),
        CommitState::Superseded => line(&format!(
            "{what} committed{attempt}, superseded: somebody else had ended this attempt"
        )),
        CommitState::Awaited => line(&format!(
            "what it left is in {}; collect and commit it with `fumehood post-process {}`",
            record.workspace.display(),
            record.id
        )),
    }
    for output in outputs.iter().take(LISTED_MAX) {
        let path = escape_terminal(output.path.as_bytes());
        line(&format!("  {:>8}  {path}", format_size(output.bytes)));
    }
    if outputs.len() > LISTED_MAX {
        let more = outputs.len() - LISTED_MAX;
        line(&format!(
            "  … and {more} more: `fumehood outputs {}`",
            record.id
        ));
    }
    not_taken(record);
}

fn not_taken(record: &Record) {
    let collection = &record.collection;
    let counts: Vec<String> = collection
        .remark_counts
        .iter()
        .filter(|(remark, _)| !remark.is_taken())
        .map(|(remark, count)| format!("{count} {}", remark.as_str().replace('_', " ")))
        .collect();
    if !counts.is_empty() {
        line(&format!(
            "not taken: {}; `fumehood show {}` lists them",
            counts.join(", "),
            record.id
        ));
    }
    if !collection.missing.is_empty() {
        let missing = collection.missing.join(", ");
        line(&format!("missing: no output matches {missing}"));
    }
    if let Some(note) = &collection.result_note {
        line(&format!("result.json is kept as a file only: {note}"));
    }
    if record.post_process.as_ref().is_some_and(|step| step.done) {
        line("post-processed");
    }
}

fn outcome_line(record: &Record) -> String {
    let how = match (record.exit_code, record.signal) {
        (Some(0), _) if record.status == Status::Failed => {
            format!(" ({})", record.reason.as_str().replace('_', " "))
        }
        (Some(code), _) if record.status == Status::Failed => format!(" with exit code {code}"),
        (_, Some(signal)) if record.status == Status::Failed => format!(" by signal {signal}"),
        _ if record.status == Status::Succeeded => String::new(),
        _ => {
            format!(" ({})", record.reason.as_str().replace('_', " "))
        }
    };
    let memory = record.memory_peak_bytes.map_or(String::new(), |b| {
        format!(", peak memory {}", format_size(b))
    });
    format!(
        "{} {}{how} after {}, CPU {}{memory}",
        record.id,
        record.status.as_str().replace('_', " "),
        format_duration(record.times.wall_ms),
        format_duration(record.cpu_ms),
    )
}

/// Says which limits are hard, and which Fumehood only watches.
fn isolation_line(record: &Record) -> String {
    let words = |hardness: Hardness| -> String {
        let of = |(name, entry): (&LimitName, &LimitEntry)| {
            (entry.how_hard == hardness).then(|| name.as_str().replace('_', " "))
        };
        let list: Vec<String> = record.limits.iter().filter_map(of).collect();
        match list.is_empty() {
            true => String::from("none"),
            false => list.join(", "),
        }
    };
    let memory = record.limits.get(&LimitName::Memory);
    let memory_by = memory.map_or("", |entry| entry.enforced_by.as_str());
    format!(
        "isolation {} ({} layers); enforced: {}; watched: {}; memory by {memory_by}",
        record
            .isolation
            .level
            .map_or("none", IsolationLevel::as_str),
        record.isolation.layers.len(),
        words(Hardness::Hard),
        words(Hardness::Watched),
    )
}
