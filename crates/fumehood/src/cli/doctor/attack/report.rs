//! What the battery came to, held against what is promised.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use sandbox::promises::{ACTS, PromiseStatus, promise_status};
use sandbox::spec::ConfinementLevel;
use serde::Serialize;
use store::types::escaping::escape_terminal;

use super::battery::{Came, Results, Tried};

const SCHEMA: &str = "fumehood.attack/1";
/// What people are told of a refusal; programs are told all.
const DETAIL_CHARS_MAX: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Promised, refused, and shown to work unconfined.
    Held,
    /// Not promised, and indeed done.
    KnownGap,
    /// Refused; but nothing shows that it would have worked unconfined.
    Unproven,
    /// Not promised, and yet refused: the table gives up too much.
    Better,
    /// Promised, and done.
    Escaped,
}

#[derive(Debug, Serialize)]
struct Finding {
    promise: &'static str,
    name: &'static str,
    verdict: Verdict,
    /// What the table says of it: `held`, the feature that is refused for it, or why it is not held.
    expected: String,
    /// What became of it unconfined, and in the sandbox.
    control: String,
    inside: String,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Counts {
    held: usize,
    known_gaps: usize,
    unproven: usize,
    better: usize,
    escaped: usize,
}

#[derive(Debug, Serialize)]
pub struct Report {
    schema: &'static str,
    version: &'static str,
    level: &'static str,
    landlock_abi: i32,
    root: bool,
    /// Where the targets were; it is gone.
    place: PathBuf,
    acts: Vec<Finding>,
    counts: Counts,
}

impl Report {
    pub fn new(results: &Results, landlock_abi: i32) -> Report {
        let mut acts = Vec::new();
        let mut counts = Counts::default();
        for act in ACTS {
            let missing = || Came::Unable("it was not tried".into());
            let tried = results
                .acts
                .get(act.name)
                .cloned()
                .unwrap_or_else(|| Tried {
                    control: missing(),
                    inside: missing(),
                });
            let promised = promise_status(act, results.level, landlock_abi);
            let verdict = judge(promised, &tried);
            *match verdict {
                Verdict::Held => &mut counts.held,
                Verdict::KnownGap => &mut counts.known_gaps,
                Verdict::Unproven => &mut counts.unproven,
                Verdict::Better => &mut counts.better,
                Verdict::Escaped => &mut counts.escaped,
            } += 1;
            acts.push(Finding {
                promise: act.promise,
                name: act.name,
                verdict,
                expected: match promised {
                    PromiseStatus::Kept => "held".into(),
                    PromiseStatus::KeptByRefusing(what) => format!("held by refusing {what}"),
                    PromiseStatus::NotKept(why) => format!("not held: {why}"),
                },
                control: tell(&tried.control, &results.place),
                inside: tell(&tried.inside, &results.place),
            });
        }
        Report {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            level: match results.level {
                ConfinementLevel::Full => "full",
                ConfinementLevel::Landlock => "landlock",
            },
            landlock_abi,
            root: rustix::process::geteuid().is_root(),
            place: results.place.clone(),
            acts,
            counts,
        }
    }

    pub fn is_bad(&self, strict: bool) -> bool {
        self.counts.escaped > 0 || strict && self.counts.better > 0
    }

    pub fn print_json(&self) -> anyhow::Result<()> {
        let text = serde_json::to_string(self).context("write the report as JSON")?;
        writeln!(std::io::stdout(), "{text}").context("print the report")
    }

    pub fn print(&self) -> anyhow::Result<()> {
        std::io::stdout()
            .write_all(self.text().as_bytes())
            .context("print the report")
    }

    fn text(&self) -> String {
        let mut text = format!(
            "attacked at level {}, Landlock ABI {}, as {}; services are stand-ins on loopback: it is their reach that is attacked\n",
            self.level,
            self.landlock_abi,
            if self.root { "root" } else { "a plain user" },
        );
        let mut promise = "";
        for found in &self.acts {
            if found.promise != promise {
                promise = found.promise;
                text.push_str(&format!("\n{promise}  {}\n", title(promise)));
            }
            let (word, detail) = match found.verdict {
                Verdict::Held => ("ok", &found.inside),
                Verdict::KnownGap => ("gap", &found.expected),
                Verdict::Unproven if found.inside.starts_with(COULD_NOT) => {
                    ("unproven", &found.inside)
                }
                Verdict::Unproven => ("unproven", &found.control),
                Verdict::Better => ("better", &found.inside),
                Verdict::Escaped => ("ESCAPED", &found.inside),
            };
            let whose = match found.verdict {
                Verdict::Unproven => "the control: ",
                _ => "",
            };
            let whose = if detail.starts_with(COULD_NOT) {
                ""
            } else {
                whose
            };
            let detail = escape_terminal(shorten(detail).as_bytes());
            text.push_str(&format!("  {word:<9} {:<24} {whose}{detail}\n", found.name));
        }
        text.push_str(&format!("\n{}\n", self.closing()));
        text
    }

    fn closing(&self) -> String {
        let c = &self.counts;
        let better = match c.better {
            0 => String::new(),
            n => format!(", {n} refused that are not promised"),
        };
        format!(
            "{} held, {} known gaps, {} unproven, {} escaped{better}",
            c.held, c.known_gaps, c.unproven, c.escaped
        )
    }
}

/// An act that was done was done, whether or not its control worked; one that was refused proves something only if
/// the control was not.
fn judge(promised: PromiseStatus, tried: &Tried) -> Verdict {
    let works_here = matches!(tried.control, Came::Done(_));
    match (&tried.inside, promised.is_kept()) {
        (Came::Done(_), true) => Verdict::Escaped,
        (Came::Done(_), false) => Verdict::KnownGap,
        (Came::Refused(_), true) if works_here => Verdict::Held,
        (Came::Refused(_), false) if works_here => Verdict::Better,
        (Came::Refused(_) | Came::Unable(_), _) => Verdict::Unproven,
    }
}

const COULD_NOT: &str = "could not be tried";

/// Without the place, which was the battery's own and is no more.
fn tell(came: &Came, place: &Path) -> String {
    let told = match came {
        Came::Done(what) => format!("done: {what}"),
        Came::Refused(why) => format!("refused: {why}"),
        Came::Unable(why) => format!("{COULD_NOT}: {why}"),
    };
    let place = place.display().to_string();
    ["confined/", "control/", ""]
        .iter()
        .fold(told, |text, part| {
            text.replace(&format!("{place}{part}"), "")
        })
}

fn shorten(text: &str) -> String {
    let text = text.strip_prefix("refused: ").unwrap_or(text);
    match text.chars().count() > DETAIL_CHARS_MAX {
        true => text.chars().take(DETAIL_CHARS_MAX).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

fn title(promise: &str) -> &'static str {
    match promise {
        "P2" => "data and docs can be read, not changed; the rest of the project is absent",
        "P3" => "nothing else of the host's can be read",
        "P4" => "nothing but the workspace can be written",
        "P6" => "no service and no credential can be reached",
        "P7" => "no other process can be seen, signalled, traced or slowed",
        "P8" => "no privilege is gained",
        "P9" => "no way out by the terminal",
        "P10" => "every limit holds",
        "P11" => "at the deadline everything is dead",
        "P12" => "the analysis dies with its runner",
        "P13" => "collection follows nothing and is bounded",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(control: Came, inside: Came) -> Tried {
        Tried { control, inside }
    }

    fn done() -> Came {
        Came::Done("x".into())
    }

    fn refused() -> Came {
        Came::Refused("EPERM".into())
    }

    fn unable() -> Came {
        Came::Unable("no kernel for it".into())
    }

    #[test]
    fn what_got_out_got_out_whatever_the_control_says() {
        for control in [done(), refused(), unable()] {
            let both = tried(control, done());
            assert_eq!(judge(PromiseStatus::Kept, &both), Verdict::Escaped);
            assert_eq!(
                judge(PromiseStatus::KeptByRefusing("x"), &both),
                Verdict::Escaped
            );
            assert_eq!(judge(PromiseStatus::NotKept("x"), &both), Verdict::KnownGap);
        }
    }

    #[test]
    fn a_refusal_counts_only_with_its_control() {
        assert_eq!(
            judge(PromiseStatus::Kept, &tried(done(), refused())),
            Verdict::Held
        );
        assert_eq!(
            judge(PromiseStatus::NotKept("x"), &tried(done(), refused())),
            Verdict::Better
        );
        for control in [refused(), unable()] {
            assert_eq!(
                judge(PromiseStatus::Kept, &tried(control, refused())),
                Verdict::Unproven
            );
        }
        assert_eq!(
            judge(PromiseStatus::Kept, &tried(done(), unable())),
            Verdict::Unproven
        );
    }

    #[test]
    fn an_act_that_was_not_tried_is_unproven_not_held() {
        let results = Results {
            level: ConfinementLevel::Full,
            place: "/nowhere/".into(),
            acts: Default::default(),
        };
        let report = Report::new(&results, 7);
        assert_eq!(report.counts.unproven, ACTS.len());
        assert!(!report.is_bad(true));
        assert!(report.closing().starts_with("0 held, 0 known gaps, "));
    }
}
