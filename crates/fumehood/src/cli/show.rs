//! What people read on the terminal: the summary, notices and errors. Everything that may come from
//! a program, a file name or a request is escaped first.

use std::io::Write;

use analysis::logs::escape_terminal;
use analysis::record::{LimitEntry, Record, Status};
use analysis::units::{format_duration, format_size};
use rustix::termios::OutputModes;
use sandbox::spec::{Hardness, LimitName};

/// One line on stderr, with our name before it.
pub fn line(text: &str) {
    let mut err = std::io::stderr().lock();
    // While `fumehood shell` has the terminal pass everything through, a new line needs its return.
    let raw = rustix::termios::tcgetattr(rustix::stdio::stderr())
        .is_ok_and(|t| !t.output_modes.contains(OutputModes::OPOST));
    let end = if raw { "\r\n" } else { "\n" };
    for part in text.lines() {
        // Nobody may be listening; that is no reason to fail.
        let _unheard = write!(err, "fumehood: {}{end}", escape_terminal(part.as_bytes()));
    }
}

pub fn error(error: &anyhow::Error) {
    line(&format!("error: {error:#}"));
}

/// How it ended, in a line or two.
pub fn summary(record: &Record) {
    line(&ended(record));
    if record.status != Status::Error || record.isolation.level.is_some() {
        line(&held(record));
    }
    for hint in &record.hints {
        line(&hint.text);
    }
    if let Some(until) = record.kept_until {
        let left = until.saturating_sub(analysis::home::unix_seconds());
        line(&format!(
            "kept for {}: {}",
            format_duration(left * 1000),
            record.workspace.display()
        ));
    }
}

fn ended(record: &Record) -> String {
    let how = match (record.exit_code, record.signal) {
        (Some(code), _) if record.status == Status::Failed => format!(" with exit code {code}"),
        (_, Some(signal)) if record.status == Status::Failed => format!(" by signal {signal}"),
        _ if record.status == Status::Succeeded => String::new(),
        _ => {
            let reason = serde_json::to_value(record.reason).ok();
            let word = reason
                .as_ref()
                .and_then(|r| r.as_str())
                .unwrap_or_default()
                .replace('_', " ");
            format!(" ({word})")
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

/// Which limits the kernel holds, and which are only watched.
fn held(record: &Record) -> String {
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
        "isolation full ({} layers); enforced: {}; watched: {}; memory by {memory_by}",
        record.isolation.layers.len(),
        words(Hardness::Hard),
        words(Hardness::Watched),
    )
}
