//! Prints a diagnosis, as text and as JSON.

use std::io::IsTerminal;

use doctor::host_checks::{
    Diagnosis, Finding, HostFacts, LevelCheck, Severity, Subject, describe_errno, errno_name,
    landlock_abi,
};
use sandbox::probe::mechanisms::{Mechanism, MechanismResult, MechanismVerdict, Need};
use sandbox::spec::{ConfinementLevel, Enforcement, Hardness, LimitName};
use serde::Serialize;

use crate::cli::print::{self, StdoutWriter, escape};

/// The width of wrapped text. Lines to copy are never wrapped.
const WIDTH: usize = 80;

pub fn print_text(diagnosis: &Diagnosis, subject: &Subject, verbose: bool) -> anyhow::Result<()> {
    let mut out = StdoutWriter::new();
    print_lines(&mut out, wrap(&verdict(diagnosis, subject), "", ""))?;
    let is_shown = |f: &&Finding| verbose || f.severity > Severity::Fine;
    for finding in diagnosis.findings.iter().filter(is_shown) {
        print_finding(&mut out, finding, verbose)?;
    }
    if verbose {
        print_details(&mut out, diagnosis)?;
    } else if diagnosis.findings.iter().any(|f| is_shown(&f)) {
        out.line("")?;
        let notes = diagnosis.findings.iter();
        let notes = notes.filter(|f| f.severity == Severity::Note && f.remedy.is_some());
        out.line(match notes.count() {
            0 => "`fumehood doctor -v` also shows what is fine.",
            _ => "`fumehood doctor -v` shows more: what to do about notes, and what is fine.",
        })?;
    }
    out.finish()
}

fn print_lines(out: &mut StdoutWriter, lines: Vec<String>) -> anyhow::Result<()> {
    lines.iter().try_for_each(|line| out.line(line))
}

/// Returns the first line, which many people read alone.
fn verdict(diagnosis: &Diagnosis, subject: &Subject) -> String {
    let who = match diagnosis.facts.is_root {
        true => "root",
        false => "this user",
    };
    let abi = landlock_abi(&diagnosis.mechanisms);
    let abi = abi.map_or(String::new(), |abi| format!(" (Landlock ABI {abi})"));
    let warnings = diagnosis.findings.iter();
    let warnings = warnings.filter(|f| f.severity == Severity::Warning).count();
    let but = match warnings {
        0 => String::new(),
        1 => String::from("; one warning"),
        n => format!("; {n} warnings"),
    };
    match (diagnosis.level, diagnosis.starts()) {
        (None, _) => String::from("Runs do not start: this host gives no level of confinement."),
        (Some(level), _) if level < subject.floor => format!(
            "Runs do not start: this host gives {who} level `{}`{abi}, and the floor is `{}`.",
            level.as_str(),
            subject.floor.as_str()
        ),
        (Some(level), false) => format!(
            "Runs do not start, though this host gives {who} level `{}`{abi}.",
            level.as_str()
        ),
        (Some(ConfinementLevel::Full), true) => {
            format!("Runs start at level `full`, the strongest{but}.")
        }
        (Some(ConfinementLevel::Landlock), true) => {
            format!("Runs start at level `landlock`{abi}, not at `full`{but}.")
        }
    }
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Fine => "fine",
        Severity::Note => "note",
        Severity::Warning => "WARNING",
        Severity::Stops => "STOPS",
    }
}

fn print_finding(out: &mut StdoutWriter, finding: &Finding, verbose: bool) -> anyhow::Result<()> {
    let head = format!("{:<8}", word(finding.severity));
    let margin = " ".repeat(head.len());
    // An empty line separates findings that need action.
    if finding.severity > Severity::Note {
        out.line("")?;
    }
    let head = match std::io::stdout().is_terminal() && finding.severity > Severity::Note {
        true => format!("\x1b[1m{head}\x1b[0m"),
        false => head,
    };
    let mut lines = wrap(&to_sentence(&finding.text), "", &margin);
    lines[0] = format!("{head}{}", lines[0].trim_start());
    print_lines(out, lines)?;
    let Some(remedy) = &finding.remedy else {
        return Ok(());
    };
    if finding.severity < Severity::Warning && !verbose {
        return Ok(());
    }
    let text = remedy.text.trim_end_matches([':', '.']);
    let caveat = match remedy.untried {
        true => " (from documents; not tried here)",
        false => "",
    };
    let end = match remedy.lines.is_empty() {
        true => '.',
        false => ':',
    };
    print_lines(out, wrap(&format!("{text}{caveat}{end}"), &margin, &margin))?;
    let mut lines = remedy.lines.iter().flat_map(|lines| lines.lines());
    lines.try_for_each(|line| out.line(&format!("{margin}  {}", escape(line))))
}

/// Makes a sentence of a finding. Findings begin in lower case, like errors.
fn to_sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string());
    let stop = if text.ends_with(['.', ':']) { "" } else { "." };
    // A text that begins with a path or a name stays unchanged.
    match text.starts_with(|c: char| c.is_ascii_lowercase()) {
        true => format!("{}{}{stop}", first.unwrap_or_default(), chars.as_str()),
        false => format!("{text}{stop}"),
    }
}

fn print_details(out: &mut StdoutWriter, diagnosis: &Diagnosis) -> anyhow::Result<()> {
    for tried in &diagnosis.levels {
        out.line("")?;
        let level = tried.level.as_str();
        print_lines(
            out,
            match &tried.message {
                None => vec![format!("level {level}: built in miniature")],
                Some(why) => wrap(&format!("level {level} does not start: {why}"), "", "  "),
            },
        )?;
        let mut table = print::Table::new(&[print::Align::Left; 2]);
        for held in &tried.layers {
            table.row([held.layer.as_str().replace('_', " "), escape(&held.how)]);
        }
        table.print(out, "  ")?;
    }
    out.line("\nmechanisms, each tried by itself")?;
    let mut table = print::Table::new(&[print::Align::Left; 2]);
    for tried in &diagnosis.mechanisms {
        let how = match &tried.verdict {
            MechanismVerdict::Works { how } => how.clone(),
            MechanismVerdict::NotUsed => String::from("not used by this user"),
            MechanismVerdict::Fails { step, errno } => {
                let errno = errno.map_or(String::new(), |n| format!(", {}", describe_errno(n)));
                format!("FAILS: {step}{errno}")
            }
        };
        table.row([tried.mechanism.as_str().replace('_', " "), escape(&how)]);
    }
    table.print(out, "  ")?;
    out.line("\nlimits, and who would hold them")?;
    let mut table = print::Table::new(&[print::Align::Left; 3]);
    for entry in &diagnosis.limits {
        table.row([
            entry.limit.as_str().replace('_', " "),
            String::from(match entry.how_hard {
                Hardness::Hard => "hard",
                Hardness::Watched => "watched",
            }),
            escape(&entry.enforced_by),
        ]);
    }
    table.print(out, "  ")
}

/// Wraps a text between words. A word longer than a line stays whole.
fn wrap(text: &str, first: &str, rest: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::from(first);
    let mut is_empty = true;
    let room = WIDTH - if first.is_empty() { rest.len() } else { 0 };
    for word in escape(text).split(' ') {
        let length = line.chars().count() + 1 + word.chars().count();
        let most = if lines.is_empty() { room } else { WIDTH };
        if !is_empty && length > most {
            lines.push(std::mem::replace(&mut line, String::from(rest)));
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    lines.push(line);
    lines
}

/// The document that docs/doctor-v1.schema.json describes. Fields are only ever added.
#[derive(Serialize)]
struct DoctorDocument<'a> {
    schema: &'static str,
    version: &'static str,
    /// Whether a run with the present configuration would start.
    starts: bool,
    level: Option<ConfinementLevel>,
    floor: ConfinementLevel,
    landlock_abi: Option<i32>,
    host: &'a HostFacts,
    levels: &'a [LevelCheck],
    mechanisms: Vec<MechanismEntry<'a>>,
    limits: Vec<LimitEntry<'a>>,
    findings: &'a [Finding],
}

#[derive(Serialize)]
struct MechanismEntry<'a> {
    mechanism: Mechanism,
    verdict: &'static str,
    needed_for: Need,
    how: Option<&'a str>,
    step: Option<&'a str>,
    errno: Option<i32>,
    errno_name: Option<&'static str>,
    /// The name of the finding that says why, and what to do.
    finding: Option<&'static str>,
}

#[derive(Serialize)]
struct LimitEntry<'a> {
    limit: LimitName,
    value: u64,
    enforced_by: &'a str,
    how_hard: Hardness,
}

impl<'a> MechanismEntry<'a> {
    fn of(tried: &'a MechanismResult, findings: &[Finding]) -> MechanismEntry<'a> {
        let (verdict, how) = match &tried.verdict {
            MechanismVerdict::Works { how } => ("works", Some(how.as_str())),
            MechanismVerdict::Fails { .. } => ("fails", None),
            MechanismVerdict::NotUsed => ("not_used", None),
        };
        let (step, errno) = tried.failed().unzip();
        let errno = errno.flatten();
        let mut because = findings.iter();
        let because = because.find(|f| f.mechanisms.contains(&tried.mechanism));
        MechanismEntry {
            mechanism: tried.mechanism,
            verdict,
            needed_for: tried.mechanism.need(),
            how,
            step,
            errno,
            errno_name: errno.and_then(errno_name),
            finding: because.map(|f| f.name),
        }
    }
}

fn limit_entry(entry: &Enforcement) -> LimitEntry<'_> {
    LimitEntry {
        limit: entry.limit,
        value: entry.asked,
        enforced_by: &entry.enforced_by,
        how_hard: entry.how_hard,
    }
}

pub fn print_json(diagnosis: &Diagnosis, subject: &Subject) -> anyhow::Result<()> {
    let findings = &diagnosis.findings;
    let mechanisms = diagnosis.mechanisms.iter();
    print::json(&DoctorDocument {
        schema: "fumehood.doctor/1",
        version: env!("CARGO_PKG_VERSION"),
        starts: diagnosis.starts(),
        level: diagnosis.level,
        floor: subject.floor,
        landlock_abi: landlock_abi(&diagnosis.mechanisms),
        host: &diagnosis.facts,
        levels: &diagnosis.levels,
        mechanisms: mechanisms
            .map(|t| MechanismEntry::of(t, findings))
            .collect(),
        limits: diagnosis.limits.iter().map(limit_entry).collect(),
        findings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_broken_between_words_within_the_width() {
        let text = "word ".repeat(60);
        let lines = wrap(text.trim(), "", "        ");
        assert!(lines.len() > 3);
        // The first line is printed after its severity.
        assert!(lines[0].len() + 8 <= WIDTH);
        assert!(
            lines[1..]
                .iter()
                .all(|l| l.len() <= WIDTH && l.starts_with("        w"))
        );
        let long = "x".repeat(100);
        assert_eq!(wrap(&long, "", ""), [long.as_str()]);
        assert_eq!(wrap("\x1b[31m", "", ""), [escape("\x1b[31m")]);
    }

    #[test]
    fn findings_are_shown_as_sentences() {
        assert_eq!(to_sentence("this host swaps"), "This host swaps.");
        assert_eq!(to_sentence("/tmp is a tmpfs"), "/tmp is a tmpfs.");
        assert_eq!(to_sentence("AppArmor forbids it."), "AppArmor forbids it.");
    }
}
