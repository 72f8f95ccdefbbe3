//! `fumehood show`: everything about one attempt.

mod document;
mod events;

use std::collections::BTreeMap;
use std::ffi::OsString;

use engine::attempt::record::LimitEntry;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use engine::provenance::Provenance;
use serde_json::value::RawValue;
use store::types::units::{format_cpus, format_size};
use store::{
    AnalysisEvent, AttemptRow, AttemptSummary, PostProcessState, QueuePosition, RemarkCount,
    STREAMS, State, StoredLog, StoredOutput, StoredRemark,
};

use super::args::StoreArgs;
use super::attempt_text;
use super::print::{self, Align, Table, escape, format_count};
use super::{ids, record_access, run_dirs, time_format};

/// Show everything about one attempt.
///
/// How it ended, what it used, how it was confined, what it was made from, what it left, and what remains to be done.
#[derive(Clone, Debug, clap::Args)]
pub struct ShowArgs {
    #[arg(value_name = "ID[@ATTEMPT]", help = ids::HELP)]
    pub id: OsString,

    /// Which attempt [default: the newest that was not superseded]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub attempt: Option<u32>,

    /// Also show the events of the analysis, in all its attempts
    #[arg(long)]
    pub events: bool,

    /// Print one JSON document (fumehood.show/1), with all outputs, remarks, events and the provenance
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// The number of items that a list shows.
const LISTED_MAX: usize = 20;
const LINE_CHARS_MAX: usize = 120;

/// Everything that the database has of an attempt, without the content of outputs and logs.
pub struct AttemptDetails {
    pub attempt: AttemptRow,
    pub attempts: Vec<AttemptSummary>,
    pub outputs: Vec<StoredOutput>,
    pub remarks: Vec<StoredRemark>,
    pub remark_counts: Vec<RemarkCount>,
    pub logs: Vec<StoredLog>,
    /// The events of all attempts.
    pub events: Vec<AnalysisEvent>,
    /// `None`: it was never submitted.
    pub place: Option<QueuePosition>,
    pub now_ms: i64,
}

pub fn show(args: &ShowArgs) -> anyhow::Result<u8> {
    let (home, mut recorder) = record_access::open(&args.store)?;
    let attempt = ids::resolve_attempt(&mut recorder, &args.id, args.attempt)?;
    let all = gather(&mut recorder, attempt)?;
    match args.json {
        true => print::json(&document::from_details(&all))?,
        false => print_all(&all, &home, args.events)?,
    }
    Ok(0)
}

fn gather(recorder: &mut Recorder, attempt: AttemptRow) -> anyhow::Result<AttemptDetails> {
    let (id, number) = (attempt.summary.id.clone(), attempt.summary.attempt);
    let (remarks, remark_counts) = recorder.with(|store| store.remarks(&id, number))?;
    let mut logs = Vec::new();
    for stream in STREAMS {
        logs.extend(recorder.with(|store| store.log(&id, number, stream))?);
    }
    Ok(AttemptDetails {
        attempts: recorder.with(|store| store.attempts(&id))?,
        outputs: recorder.with(|store| store.outputs(&id, number))?,
        remarks,
        remark_counts,
        logs,
        events: recorder.with(|store| store.events(&id))?,
        place: recorder.with(|store| store.queue_position(&id, number))?,
        now_ms: recorder.with(|store| store.now_ms())?,
        attempt,
    })
}

/// A page of named facts.
#[derive(Default)]
struct FactPage {
    lines: Vec<String>,
}

impl FactPage {
    /// Adds `name   text`, if there is a text. Further lines of the text are indented to the same column.
    fn fact(&mut self, name: &str, text: impl Into<Option<String>>) {
        for (at, line) in text.into().unwrap_or_default().lines().enumerate() {
            let name = if at == 0 { name } else { "" };
            self.lines.push(format!("{name:<12} {line}"));
        }
    }

    fn list(&mut self, table: &Table) {
        let lines = table.lines().into_iter();
        self.lines
            .extend(lines.map(|line| format!("               {line}")));
    }
}

fn print_all(all: &AttemptDetails, home: &Home, with_events: bool) -> anyhow::Result<()> {
    let mut page = FactPage::default();
    add_status(&mut page, all, home);
    add_queue_position(&mut page, all);
    add_confinement(&mut page, &all.attempt);
    add_provenance(&mut page, &all.attempt);
    add_outputs(&mut page, all);
    add_notes(&mut page, all);
    if with_events {
        let from = parse_json::<Provenance>(&all.attempt.provenance_json);
        let host = &all.attempt.summary.host;
        let name = from.map_or(host.clone(), |from| from.host.name);
        let table = events::event_table(&all.events, (host, &name));
        page.fact("events", table.lines().join("\n"));
    }
    print::lines(page.lines)
}

fn add_status(page: &mut FactPage, all: &AttemptDetails, home: &Home) {
    let attempt = &all.attempt;
    let summary = &attempt.summary;
    page.fact("id", attempt_text::display_name(summary));
    let superseded = if summary.superseded {
        ", superseded"
    } else {
        ""
    };
    page.fact(
        "status",
        format!("{}{superseded}", attempt_text::status_text(summary)),
    );
    page.fact("message", summary.message.as_deref().map(escape));
    let here = run_dirs::list_all(home);
    let here = here.iter().filter(|s| s.record.id.as_str() == summary.id);
    for run_dir in here {
        page.fact("here", escape(&run_dir.advice()));
    }
    // An attempt that is queued, or was cancelled in the queue, has never begun.
    let begun = match (summary.started_ms, summary.host.is_empty()) {
        (None, true) => ("queued", summary.created_ms),
        (started_ms, _) => ("begun", started_ms.unwrap_or(summary.created_ms)),
    };
    let ago = time_format::format_age(all.now_ms, summary.created_ms);
    let text = format!("{} UTC ({ago} ago)", time_format::format_date(begun.1));
    page.fact(begun.0, text);
    if let (Some(ended), Some(wall)) = (summary.ended_ms, summary.wall_ms) {
        let text = format!(
            "{} UTC, after {}",
            time_format::format_date(ended),
            time_format::format_duration_brief(wall)
        );
        page.fact("ended", text);
    }
    // Show the machine's name instead of its id.
    let from = parse_json::<Provenance>(&attempt.provenance_json);
    let host = from.map_or(escape(&summary.host), |from| escape(&from.host.name));
    let by = attempt.submitter.as_deref().map(escape);
    let by = by.into_iter().chain((!host.is_empty()).then_some(host));
    page.fact("by", by.collect::<Vec<_>>().join(" on "));
    if let Some(usage) = &attempt.usage {
        let mut used = vec![format!(
            "CPU {}",
            time_format::format_duration_brief(usage.cpu_ms)
        )];
        used.extend(
            usage
                .memory_peak_bytes
                .map(|b| format!("memory {}", format_size(b))),
        );
        used.extend(
            usage
                .pids_peak
                .map(|n| format_count(n, "process", "processes")),
        );
        used.push(format!("disk {}", format_size(usage.disk_bytes)));
        used.push(format_count(usage.files, "file", "files"));
        if usage.oom_kills > 0 {
            used.push(format_count(
                usage.oom_kills,
                "kill for memory",
                "kills for memory",
            ));
        }
        page.fact("used", used.join(", "));
    }
}

/// Adds the position in the queue, and what the queue knows of the attempt.
fn add_queue_position(page: &mut FactPage, all: &AttemptDetails) {
    let Some(place) = &all.place else {
        return;
    };
    let summary = &all.attempt.summary;
    page.fact("waits", events::waiting_text(place, all.now_ms));
    if !summary.state.is_final() {
        let asks = events::resources_text(place.memory_bytes, place.cpu_milli);
        page.fact("asks for", asks);
        let worker = place.worker.as_deref().map(escape);
        page.fact("worker", worker.filter(|_| summary.state != State::Queued));
        let cancel = place.cancel_ms.map(|ms| {
            let by = place.cancel_by.as_deref().unwrap_or_default();
            format!(
                "asked for by {} {} ago",
                escape(by),
                time_format::format_age(all.now_ms, ms)
            )
        });
        page.fact("cancel", cancel);
    }
    page.fact("retries", events::retries_text(place));
}

fn add_confinement(page: &mut FactPage, attempt: &AttemptRow) {
    let level = attempt.summary.isolation_level.as_deref();
    let layers: BTreeMap<String, String> = parse_json(&attempt.isolation_json).unwrap_or_default();
    let names: Vec<String> = layers.keys().map(|name| escape(name)).collect();
    let text = match (level, names.is_empty()) {
        (None, _) => None,
        (Some("none"), _) => Some("none: made without a sandbox, and recorded".to_owned()),
        (Some(level), true) => Some(escape(level)),
        (Some(level), false) => Some(format!("{}: {}", escape(level), names.join(", "))),
    };
    page.fact("isolation", text.map(|text| fold_words(&text)));
    let limits: BTreeMap<String, LimitEntry> = parse_json(&attempt.limits_json).unwrap_or_default();
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Left]);
    for (name, limit) in &limits {
        table.row([
            escape(name).replace('_', " "),
            amount(name, limit.asked),
            format!("{} ({})", escape(&limit.enforced_by), hardness(limit)),
        ]);
    }
    page.fact("limits", table.lines().join("\n"));
}

fn hardness(limit: &LimitEntry) -> String {
    // The word in JSON is also the word for people.
    let word = serde_json::to_value(limit.how_hard);
    word.ok()
        .and_then(|w| w.as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// Formats a limit's value in its unit.
fn amount(name: &str, asked: u64) -> String {
    match name {
        "wall_time" | "cpu_time" | "idle_time" => time_format::format_duration_brief(asked),
        "memory" | "disk" | "logs" => format_size(asked),
        "cpus" => format_cpus(asked),
        _ => asked.to_string(),
    }
}

fn add_provenance(page: &mut FactPage, attempt: &AttemptRow) {
    let Some(from) = parse_json::<Provenance>(&attempt.provenance_json) else {
        return;
    };
    let argv: Vec<String> = from.argv.iter().map(|word| shell_word(word)).collect();
    page.fact("command", shorten(&escape(&argv.join(" "))));
    let script = from.script.as_ref().map(|script| {
        let hash = script
            .blake3
            .map_or(String::new(), |h| format!(", blake3 {h}"));
        format!("{}{hash}", escape(&script.path))
    });
    page.fact("script", script);
    let inputs = &from.inputs;
    if inputs.count > 0 {
        let what = format_count(inputs.count, "file", "files");
        page.fact("inputs", format!("{what}, {}", format_size(inputs.bytes)));
    }
    let runtime = &from.runtime;
    let version = runtime
        .version
        .as_deref()
        .map(|v| format!(" ({})", escape(v)));
    let program = runtime.interpreter.as_deref().unwrap_or(&runtime.program);
    page.fact(
        "runtime",
        format!("{}{}", escape(program), version.unwrap_or_default()),
    );
    let project = Some(escape(&from.project)).filter(|project| !project.is_empty());
    page.fact("project", project);
    let git = from.git.as_ref().map(|git| {
        let commit = git.commit.as_deref().unwrap_or("no commit");
        let branch = git.branch.as_deref().map(|b| format!(" on {}", escape(b)));
        let dirty = match git.dirty {
            Some(true) => ", with changes that are not committed",
            Some(false) => ", clean",
            None => "",
        };
        format!("{}{}{dirty}", escape(commit), branch.unwrap_or_default())
    });
    page.fact("git", git);
    page.fact("data", from.data.as_deref().map(escape));
    page.fact("docs", from.docs.as_deref().map(escape));
    let names: Vec<String> = from
        .env
        .iter()
        .map(|variable| escape(&variable.name))
        .collect();
    let names = (!names.is_empty()).then(|| fold_words(&names.join(", ")));
    page.fact("variables", names);
    let host = &from.host;
    let made_by = format!(
        "Fumehood {}, Linux {}, {}",
        escape(&from.fumehood),
        escape(&host.kernel),
        escape(&host.architecture)
    );
    page.fact("made by", made_by);
}

fn add_outputs(page: &mut FactPage, all: &AttemptDetails) {
    let summary = &all.attempt.summary;
    let whole = match summary.complete {
        Some(true) => ", complete",
        Some(false) => ", incomplete",
        None => "",
    };
    let (count, bytes) = (all.outputs.len() as u64, summary.output_bytes.unwrap_or(0));
    if summary.state.is_final() {
        let what = print::outputs_and_size(count, bytes);
        page.fact("outputs", format!("{what}{whole}"));
    }
    let mut table = Table::new(&[Align::Right, Align::Left, Align::Left]);
    for output in all.outputs.iter().take(LISTED_MAX) {
        table.row(attempt_text::output_cells(output));
    }
    page.list(&table);
    if all.outputs.len() > LISTED_MAX {
        let more = all.outputs.len() - LISTED_MAX;
        let id = attempt_text::display_name(summary);
        page.fact("", format!("  … and {more} more: `fumehood outputs {id}`"));
    }
    let counts = all.remark_counts.iter();
    let counts: Vec<String> = counts
        .map(|c| format!("{} {}", c.count, escape(&c.remark).replace('_', " ")))
        .collect();
    if !counts.is_empty() {
        page.fact("remarks", fold_words(&counts.join(", ")));
        let mut table = Table::new(&[Align::Left, Align::Left]);
        for remark in all.remarks.iter().take(LISTED_MAX) {
            let word = escape(&remark.remark).replace('_', " ");
            table.row([word, shorten(&escape(&remark.path_text))]);
        }
        page.list(&table);
        if all.remarks.len() > LISTED_MAX {
            let more = all.remarks.len() - LISTED_MAX;
            page.fact("", format!("  … and {more} more with --json"));
        }
    }
    for log in &all.logs {
        let dropped = match log.dropped_bytes {
            0 => String::new(),
            n => format!(", {} of it dropped", format_size(n)),
        };
        page.fact(
            &escape(&log.stream),
            format!("{}{dropped}", format_size(log.total_bytes)),
        );
    }
    page.fact("result", excerpt(&all.attempt.result_json));
    let note = all.attempt.result_note.as_deref();
    page.fact(
        "result",
        note.map(|n| format!("kept as a file only: {}", escape(n))),
    );
}

fn add_notes(page: &mut FactPage, all: &AttemptDetails) {
    let attempt = &all.attempt;
    let step = match attempt.summary.post_process {
        PostProcessState::NotAsked => None,
        PostProcessState::Done => Some("done".to_owned()),
        PostProcessState::Pending => Some("pending".to_owned()),
        PostProcessState::Unknown => attempt.summary.post_process_word.as_deref().map(escape),
        PostProcessState::Failed => Some(format!(
            "failed {}: {}; repeat it with `fumehood post-process {}`",
            format_count(attempt.post_process_tries, "time", "times"),
            escape(attempt.post_process_message.as_deref().unwrap_or_default()),
            escape(&attempt.summary.id)
        )),
    };
    page.fact("post_process", step);
    let hints: Vec<engine::attempt::hints::Hint> =
        parse_json(&attempt.hints_json).unwrap_or_default();
    let hints: Vec<String> = hints.iter().map(|hint| escape(&hint.text)).collect();
    page.fact("hints", hints.join("\n"));
    let notices: Vec<String> = parse_json(&attempt.notices_json).unwrap_or_default();
    let notices: Vec<String> = notices.iter().map(|notice| escape(notice)).collect();
    page.fact("notices", notices.join("\n"));
    if all.attempts.len() > 1 {
        page.fact("attempts", all.attempts.len().to_string());
        let mut table = Table::new(&[Align::Left, Align::Left, Align::Left]);
        for summary in &all.attempts {
            let superseded = if summary.superseded { "superseded" } else { "" };
            table.row([
                format!("@{}", summary.attempt),
                format!("{} UTC", time_format::format_date(summary.created_ms)),
                format!("{} {superseded}", attempt_text::status_text(summary)),
            ]);
        }
        page.list(&table);
    }
}

fn parse_json<T: serde::de::DeserializeOwned>(text: &Option<String>) -> Option<T> {
    serde_json::from_str(text.as_deref()?).ok()
}

/// Returns the result in a few lines, one for each key. `--json` has deeper or longer values.
fn excerpt(result: &Option<String>) -> Option<String> {
    let text = result.as_deref()?;
    let Some(keys) = parse_json::<BTreeMap<String, Box<RawValue>>>(result) else {
        return Some(shorten(&escape(text)));
    };
    let line = |key: &str, value: &RawValue| {
        let line = format!("{}: {}", escape(key), escape(value.get()));
        shorten(&line)
    };
    let shown = keys.iter().take(LISTED_MAX);
    let mut lines: Vec<String> = shown.map(|(key, value)| line(key, value)).collect();
    if keys.len() > LISTED_MAX {
        lines.push(format!(
            "… and {} more with --json",
            keys.len() - LISTED_MAX
        ));
    }
    Some(match lines.is_empty() {
        true => "{}".to_owned(),
        false => lines.join("\n"),
    })
}

fn shorten(text: &str) -> String {
    print::shorten(text, LINE_CHARS_MAX)
}

/// Folds words into lines of about 90 characters.
fn fold_words(text: &str) -> String {
    const WIDTH: usize = 90;
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split(' ') {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines.join("\n")
}

/// Quotes a word like a shell, for reading rather than for pasting.
fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_a_shell_would_split_are_quoted() {
        assert_eq!(shell_word("a-b.py"), "a-b.py");
        assert_eq!(shell_word(""), "''");
        assert_eq!(shell_word("it's $x"), "'it'\\''s $x'");
    }

    #[test]
    fn a_long_list_is_folded_and_loses_nothing() {
        let text = "word, ".repeat(40);
        let folded = fold_words(text.trim());
        assert!(folded.lines().all(|line| line.chars().count() <= 90));
        assert_eq!(folded.replace('\n', " "), text.trim());
    }

    #[test]
    fn limits_have_their_units() {
        assert_eq!(amount("wall_time", 3_600_000), "1h");
        assert_eq!(amount("memory", 4 << 30), "4 GiB");
        assert_eq!(amount("cpus", 1_500), "1.5");
        assert_eq!(amount("pids", 1_024), "1024");
    }

    #[test]
    fn a_result_is_cut_and_cannot_speak_to_the_terminal() {
        let nasty = Some(format!(
            "{{\"a\": \"\u{9b}2J\", \"b\": [{}1]}}",
            "1,".repeat(500)
        ));
        let shown = excerpt(&nasty).unwrap_or_default();
        assert!(!shown.contains('\u{9b}') && shown.lines().count() == 2);
        assert!(
            shown
                .lines()
                .all(|line| line.chars().count() <= LINE_CHARS_MAX + 1)
        );
        assert_eq!(excerpt(&Some("[1, 2]".into())).as_deref(), Some("[1, 2]"));
        assert_eq!(excerpt(&Some("{}".into())).as_deref(), Some("{}"));
        assert_eq!(excerpt(&None), None);
    }
}
