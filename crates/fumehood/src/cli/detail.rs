//! `fumehood show`: everything about one attempt.

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
use super::list;
use super::print::{self, Align, Out, Table, clean, counted};
use super::{document, events, ids, ledger, standing, when};

/// Show everything about one attempt.
///
/// How it ended, what it used, what held it, what it was made from, what it left, and what is to be done about it.
#[derive(Clone, Debug, clap::Args)]
pub struct ShowArgs {
    #[arg(value_name = "ID[@ATTEMPT]", help = ids::HELP)]
    pub id: OsString,

    /// Which attempt [default: the newest that was not superseded]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub attempt: Option<u32>,

    /// Also what happened to the analysis, step by step, in all its attempts
    #[arg(long)]
    pub events: bool,

    /// Print one JSON document (fumehood.show/1), with all outputs, remarks, events and the provenance
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// How many of a list people see.
const LISTED_MAX: usize = 20;
const LINE_CHARS_MAX: usize = 120;

/// All that the database has of an attempt but the content of outputs and logs.
pub struct Everything {
    pub attempt: AttemptRow,
    pub attempts: Vec<AttemptSummary>,
    pub outputs: Vec<StoredOutput>,
    pub remarks: Vec<StoredRemark>,
    pub remark_counts: Vec<RemarkCount>,
    pub logs: Vec<StoredLog>,
    /// Of all attempts.
    pub events: Vec<AnalysisEvent>,
    /// `None`: it was never submitted.
    pub place: Option<QueuePosition>,
    pub now_ms: i64,
}

pub fn show(args: &ShowArgs) -> anyhow::Result<u8> {
    let (home, mut ledger) = ledger::open(&args.store)?;
    let attempt = ids::attempt(&mut ledger, &args.id, args.attempt)?;
    let all = gather(&mut ledger, attempt)?;
    match args.json {
        true => print::json(&document::of(&all))?,
        false => print_all(&all, &home, args.events)?,
    }
    Ok(0)
}

fn gather(ledger: &mut Recorder, attempt: AttemptRow) -> anyhow::Result<Everything> {
    let (id, number) = (attempt.summary.id.clone(), attempt.summary.attempt);
    let (remarks, remark_counts) = ledger.with(|store| store.remarks(&id, number))?;
    let mut logs = Vec::new();
    for stream in STREAMS {
        logs.extend(ledger.with(|store| store.log(&id, number, stream))?);
    }
    Ok(Everything {
        attempts: ledger.with(|store| store.attempts(&id))?,
        outputs: ledger.with(|store| store.outputs(&id, number))?,
        remarks,
        remark_counts,
        logs,
        events: ledger.with(|store| store.events(&id))?,
        place: ledger.with(|store| store.queue_position(&id, number))?,
        now_ms: ledger.with(|store| store.now_ms())?,
        attempt,
    })
}

/// A page of names and what they are.
struct Page {
    out: Out,
}

impl Page {
    /// `name   text`; a text of several lines stands below each other.
    fn fact(&mut self, name: &str, text: &str) -> anyhow::Result<()> {
        for (at, line) in text.lines().enumerate() {
            let name = if at == 0 { name } else { "" };
            self.out.line(&format!("{name:<12} {line}"))?;
        }
        Ok(())
    }

    fn maybe(&mut self, name: &str, text: Option<String>) -> anyhow::Result<()> {
        text.map_or(Ok(()), |text| self.fact(name, &text))
    }

    fn list(&mut self, table: &Table) -> anyhow::Result<()> {
        table.print(&mut self.out, "               ")
    }
}

fn print_all(all: &Everything, home: &Home, with_events: bool) -> anyhow::Result<()> {
    let mut page = Page { out: Out::new() };
    how_it_ended(&mut page, all, home)?;
    how_it_waits(&mut page, all)?;
    what_held_it(&mut page, &all.attempt)?;
    what_it_was(&mut page, &all.attempt)?;
    what_it_left(&mut page, all)?;
    what_is_said(&mut page, all)?;
    if with_events {
        let from = parsed::<Provenance>(&all.attempt.provenance_json);
        let host = &all.attempt.summary.host;
        let name = from.map_or(host.clone(), |from| from.host.name);
        let table = events::table(&all.events, (host, &name));
        for (at, line) in table.lines().iter().enumerate() {
            page.fact(if at == 0 { "events" } else { "" }, line)?;
        }
    }
    page.out.finish()
}

fn how_it_ended(page: &mut Page, all: &Everything, home: &Home) -> anyhow::Result<()> {
    let attempt = &all.attempt;
    let listed = &attempt.summary;
    page.fact("id", &list::name(listed))?;
    let superseded = if listed.superseded {
        ", superseded"
    } else {
        ""
    };
    page.fact("status", &format!("{}{superseded}", list::ended(listed)))?;
    page.maybe("message", listed.message.as_deref().map(clean))?;
    let here = standing::all(home);
    let here = here.iter().filter(|s| s.record.id.as_str() == listed.id);
    for standing in here {
        page.fact("here", &clean(&standing.advice()))?;
    }
    // What waits, or was cancelled while it did, has never begun.
    let begun = match (listed.started_ms, listed.host.is_empty()) {
        (None, true) => ("queued", listed.created_ms),
        (started_ms, _) => ("begun", started_ms.unwrap_or(listed.created_ms)),
    };
    let ago = when::age(all.now_ms, listed.created_ms);
    let text = format!("{} UTC ({ago} ago)", when::date(begun.1));
    page.fact(begun.0, &text)?;
    if let (Some(ended), Some(wall)) = (listed.ended_ms, listed.wall_ms) {
        let text = format!("{} UTC, after {}", when::date(ended), when::brief(wall));
        page.fact("ended", &text)?;
    }
    // Machines are told apart by an id that nobody knows by heart.
    let from = parsed::<Provenance>(&attempt.provenance_json);
    let host = from.map_or(clean(&listed.host), |from| clean(&from.host.name));
    let by = attempt.submitter.as_deref().map(clean);
    let by = by.into_iter().chain((!host.is_empty()).then_some(host));
    page.fact("by", &by.collect::<Vec<_>>().join(" on "))?;
    if let Some(usage) = &attempt.usage {
        let mut used = vec![format!("CPU {}", when::brief(usage.cpu_ms))];
        used.extend(
            usage
                .memory_peak_bytes
                .map(|b| format!("memory {}", format_size(b))),
        );
        used.extend(usage.pids_peak.map(|n| counted(n, "process", "processes")));
        used.push(format!("disk {}", format_size(usage.disk_bytes)));
        used.push(counted(usage.files, "file", "files"));
        if usage.oom_kills > 0 {
            used.push(counted(
                usage.oom_kills,
                "kill for memory",
                "kills for memory",
            ));
        }
        page.fact("used", &used.join(", "))?;
    }
    Ok(())
}

/// Its place in the queue, and what the queue knows of it.
fn how_it_waits(page: &mut Page, all: &Everything) -> anyhow::Result<()> {
    let Some(place) = &all.place else {
        return Ok(());
    };
    let listed = &all.attempt.summary;
    page.maybe("waits", events::waits(place, all.now_ms))?;
    if !listed.state.is_final() {
        let asks = events::asks(place.memory_bytes, place.cpu_milli);
        page.fact("asks for", &asks)?;
        let worker = place.worker.as_deref().map(clean);
        page.maybe("worker", worker.filter(|_| listed.state != State::Queued))?;
        let cancel = place.cancel_ms.map(|ms| {
            let by = place.cancel_by.as_deref().unwrap_or_default();
            format!(
                "asked for by {} {} ago",
                clean(by),
                when::age(all.now_ms, ms)
            )
        });
        page.maybe("cancel", cancel)?;
    }
    page.maybe("retries", events::retries(place))
}

fn what_held_it(page: &mut Page, attempt: &AttemptRow) -> anyhow::Result<()> {
    let level = attempt.summary.isolation_level.as_deref();
    let layers: BTreeMap<String, String> = parsed(&attempt.isolation_json).unwrap_or_default();
    let names: Vec<String> = layers.keys().map(|name| clean(name)).collect();
    let text = match (level, names.is_empty()) {
        (None, _) => None,
        (Some("none"), _) => Some("none: made without a sandbox, and recorded".to_owned()),
        (Some(level), true) => Some(clean(level)),
        (Some(level), false) => Some(format!("{}: {}", clean(level), names.join(", "))),
    };
    page.maybe("isolation", text.map(|text| folded(&text)))?;
    let limits: BTreeMap<String, LimitEntry> = parsed(&attempt.limits_json).unwrap_or_default();
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Left]);
    for (name, limit) in &limits {
        table.row([
            clean(name).replace('_', " "),
            amount(name, limit.asked),
            format!("{} ({})", clean(&limit.enforced_by), hardness(limit)),
        ]);
    }
    for (at, line) in table.lines().iter().enumerate() {
        page.fact(if at == 0 { "limits" } else { "" }, line)?;
    }
    Ok(())
}

fn hardness(limit: &LimitEntry) -> String {
    // Its own word in JSON is the word for people.
    let word = serde_json::to_value(limit.how_hard);
    word.ok()
        .and_then(|w| w.as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// A limit's value in the unit that goes with its name.
fn amount(name: &str, asked: u64) -> String {
    match name {
        "wall_time" | "cpu_time" | "idle_time" => when::brief(asked),
        "memory" | "disk" | "logs" => format_size(asked),
        "cpus" => format_cpus(asked),
        _ => asked.to_string(),
    }
}

fn what_it_was(page: &mut Page, attempt: &AttemptRow) -> anyhow::Result<()> {
    let Some(from) = parsed::<Provenance>(&attempt.provenance_json) else {
        return Ok(());
    };
    let argv: Vec<String> = from.argv.iter().map(|word| shell_word(word)).collect();
    page.fact("command", &shortened(&clean(&argv.join(" "))))?;
    let script = from.script.as_ref().map(|script| {
        let hash = script
            .blake3
            .map_or(String::new(), |h| format!(", blake3 {h}"));
        format!("{}{hash}", clean(&script.path))
    });
    page.maybe("script", script)?;
    let inputs = &from.inputs;
    if inputs.count > 0 {
        let what = counted(inputs.count, "file", "files");
        page.fact("inputs", &format!("{what}, {}", format_size(inputs.bytes)))?;
    }
    let runtime = &from.runtime;
    let version = runtime
        .version
        .as_deref()
        .map(|v| format!(" ({})", clean(v)));
    let program = runtime.interpreter.as_deref().unwrap_or(&runtime.program);
    page.fact(
        "runtime",
        &format!("{}{}", clean(program), version.unwrap_or_default()),
    )?;
    let project = Some(clean(&from.project)).filter(|project| !project.is_empty());
    page.maybe("project", project)?;
    let git = from.git.as_ref().map(|git| {
        let commit = git.commit.as_deref().unwrap_or("no commit");
        let branch = git.branch.as_deref().map(|b| format!(" on {}", clean(b)));
        let dirty = match git.dirty {
            Some(true) => ", with changes that are not committed",
            Some(false) => ", clean",
            None => "",
        };
        format!("{}{}{dirty}", clean(commit), branch.unwrap_or_default())
    });
    page.maybe("git", git)?;
    page.maybe("data", from.data.as_deref().map(clean))?;
    page.maybe("docs", from.docs.as_deref().map(clean))?;
    let names: Vec<String> = from
        .env
        .iter()
        .map(|variable| clean(&variable.name))
        .collect();
    let names = (!names.is_empty()).then(|| folded(&names.join(", ")));
    page.maybe("variables", names)?;
    let host = &from.host;
    let made_by = format!(
        "Fumehood {}, Linux {}, {}",
        clean(&from.fumehood),
        clean(&host.kernel),
        clean(&host.architecture)
    );
    page.fact("made by", &made_by)
}

fn what_it_left(page: &mut Page, all: &Everything) -> anyhow::Result<()> {
    let listed = &all.attempt.summary;
    let whole = match listed.complete {
        Some(true) => ", complete",
        Some(false) => ", incomplete",
        None => "",
    };
    let (count, bytes) = (all.outputs.len() as u64, listed.output_bytes.unwrap_or(0));
    if listed.state.is_final() {
        let what = print::outputs_and_size(count, bytes);
        page.fact("outputs", &format!("{what}{whole}"))?;
    }
    let mut table = Table::new(&[Align::Right, Align::Left, Align::Left]);
    for output in all.outputs.iter().take(LISTED_MAX) {
        table.row(output_cells(output));
    }
    page.list(&table)?;
    if all.outputs.len() > LISTED_MAX {
        let more = all.outputs.len() - LISTED_MAX;
        let id = list::name(listed);
        page.fact("", &format!("  … and {more} more: `fumehood outputs {id}`"))?;
    }
    let counts = all.remark_counts.iter();
    let counts: Vec<String> = counts
        .map(|c| format!("{} {}", c.count, clean(&c.remark).replace('_', " ")))
        .collect();
    if !counts.is_empty() {
        page.fact("remarks", &folded(&counts.join(", ")))?;
        let mut table = Table::new(&[Align::Left, Align::Left]);
        for remark in all.remarks.iter().take(LISTED_MAX) {
            let word = clean(&remark.remark).replace('_', " ");
            table.row([word, shortened(&clean(&remark.path_text))]);
        }
        page.list(&table)?;
        if all.remarks.len() > LISTED_MAX {
            let more = all.remarks.len() - LISTED_MAX;
            page.fact("", &format!("  … and {more} more with --json"))?;
        }
    }
    for log in &all.logs {
        let dropped = match log.dropped_bytes {
            0 => String::new(),
            n => format!(", {} of it dropped", format_size(n)),
        };
        page.fact(
            &clean(&log.stream),
            &format!("{}{dropped}", format_size(log.total_bytes)),
        )?;
    }
    page.maybe("result", excerpt(&all.attempt.result_json))?;
    let note = all.attempt.result_note.as_deref();
    page.maybe(
        "result",
        note.map(|n| format!("kept as a file only: {}", clean(n))),
    )
}

/// Size, kind and path of an output, for people.
pub fn output_cells(output: &StoredOutput) -> [String; 3] {
    [
        format_size(output.bytes),
        clean(&output.media_type),
        print::path(&output.path),
    ]
}

fn what_is_said(page: &mut Page, all: &Everything) -> anyhow::Result<()> {
    let attempt = &all.attempt;
    let step = match attempt.summary.post_process {
        PostProcessState::NotAsked => None,
        PostProcessState::Done => Some("done".to_owned()),
        PostProcessState::Pending => Some("pending".to_owned()),
        PostProcessState::Unknown => attempt.summary.post_process_word.as_deref().map(clean),
        PostProcessState::Failed => Some(format!(
            "failed {}: {}; repeat it with `fumehood post-process {}`",
            counted(attempt.post_process_tries, "time", "times"),
            clean(attempt.post_process_message.as_deref().unwrap_or_default()),
            clean(&attempt.summary.id)
        )),
    };
    page.maybe("post_process", step)?;
    let hints: Vec<engine::attempt::hints::Hint> = parsed(&attempt.hints_json).unwrap_or_default();
    for (at, hint) in hints.iter().enumerate() {
        page.fact(if at == 0 { "hints" } else { "" }, &clean(&hint.text))?;
    }
    let notices: Vec<String> = parsed(&attempt.notices_json).unwrap_or_default();
    for (at, notice) in notices.iter().enumerate() {
        page.fact(if at == 0 { "notices" } else { "" }, &clean(notice))?;
    }
    if all.attempts.len() > 1 {
        page.fact("attempts", &all.attempts.len().to_string())?;
        let mut table = Table::new(&[Align::Left, Align::Left, Align::Left]);
        for listed in &all.attempts {
            let superseded = if listed.superseded { "superseded" } else { "" };
            table.row([
                format!("@{}", listed.attempt),
                format!("{} UTC", when::date(listed.created_ms)),
                format!("{} {superseded}", list::ended(listed)),
            ]);
        }
        page.list(&table)?;
    }
    Ok(())
}

fn parsed<T: serde::de::DeserializeOwned>(text: &Option<String>) -> Option<T> {
    serde_json::from_str(text.as_deref()?).ok()
}

/// The result in a few lines: a key and its value in each. What is deeper or longer is for `--json`.
fn excerpt(result: &Option<String>) -> Option<String> {
    let text = result.as_deref()?;
    let Some(keys) = parsed::<BTreeMap<String, Box<RawValue>>>(result) else {
        return Some(shortened(&clean(text)));
    };
    let line = |key: &str, value: &RawValue| {
        let line = format!("{}: {}", clean(key), clean(value.get()));
        shortened(&line)
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

fn shortened(text: &str) -> String {
    match text.char_indices().nth(LINE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A list of words in lines of about 90 characters.
fn folded(text: &str) -> String {
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

/// As a shell would want it, so that a line can be read; it need not be pasted.
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
        let folded = folded(text.trim());
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
