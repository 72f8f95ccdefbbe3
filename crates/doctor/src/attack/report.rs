//! The outcomes of the battery, compared with the promises.

use std::path::{Path, PathBuf};

use sandbox::promises::{ACTS, PromiseStatus, promise_status};
use serde::Serialize;
use store::types::escaping::escape_terminal;

use super::attack_output::ActResult;
use super::battery::{BatteryResults, TriedAct};

const SCHEMA: &str = "fumehood.attack/1";
/// The text report cuts details off here; JSON has them whole.
const DETAIL_CHARS_MAX: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActVerdict {
    /// Promised and refused, and the control worked.
    Held,
    /// Not promised, and the act succeeded.
    KnownGap,
    /// Refused, but the control does not show that the act works unconfined.
    Unproven,
    /// Not promised, and yet refused: the table promises too little.
    Better,
    /// Promised, and the act succeeded.
    Escaped,
}

#[derive(Debug, Serialize)]
struct ActFinding {
    promise: &'static str,
    name: &'static str,
    verdict: ActVerdict,
    /// What the table says: `held`, the feature that is refused to hold it, or why the promise does not cover this act.
    expected: String,
    /// The outcome of the control, and of the act in the sandbox.
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

/// The document `fumehood.attack/1`.
#[derive(Debug, Serialize)]
pub struct AttackReport {
    schema: &'static str,
    version: &'static str,
    level: &'static str,
    landlock_abi: i32,
    root: bool,
    /// The directory of the testbed, which no longer exists.
    #[serde(rename = "place")]
    testbed_dir: PathBuf,
    acts: Vec<ActFinding>,
    counts: Counts,
}

impl AttackReport {
    /// Compares the results with what is promised at their level and this Landlock ABI.
    pub fn new(results: &BatteryResults, landlock_abi: i32) -> AttackReport {
        let mut acts = Vec::new();
        let mut counts = Counts::default();
        for act in ACTS {
            let missing = TriedAct {
                control: ActResult::Unable("it was not tried".into()),
                inside: ActResult::Unable("it was not tried".into()),
            };
            let tried = results.acts.get(act.name).unwrap_or(&missing);
            let promised = promise_status(act, results.level, landlock_abi);
            let verdict = compare_with_promise(promised, tried);
            *match verdict {
                ActVerdict::Held => &mut counts.held,
                ActVerdict::KnownGap => &mut counts.known_gaps,
                ActVerdict::Unproven => &mut counts.unproven,
                ActVerdict::Better => &mut counts.better,
                ActVerdict::Escaped => &mut counts.escaped,
            } += 1;
            acts.push(ActFinding {
                promise: act.promise,
                name: act.name,
                verdict,
                expected: match promised {
                    PromiseStatus::Kept => "held".into(),
                    PromiseStatus::KeptByRefusing(what) => format!("held by refusing {what}"),
                    PromiseStatus::NotKept(why) => format!("not held: {why}"),
                },
                control: describe_outcome(&tried.control, &results.testbed_dir),
                inside: describe_outcome(&tried.inside, &results.testbed_dir),
            });
        }
        AttackReport {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            level: results.level.as_str(),
            landlock_abi,
            root: rustix::process::geteuid().is_root(),
            testbed_dir: results.testbed_dir.clone(),
            acts,
            counts,
        }
    }

    /// Whether an act escaped, or, if `strict`, the table promises too little.
    pub fn is_bad(&self, strict: bool) -> bool {
        self.counts.escaped > 0 || strict && self.counts.better > 0
    }

    /// Returns the report for a terminal. Text from the attacker is escaped.
    pub fn text(&self) -> String {
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
                ActVerdict::Held => ("ok", &found.inside),
                ActVerdict::KnownGap => ("gap", &found.expected),
                ActVerdict::Unproven if found.inside.starts_with(COULD_NOT) => {
                    ("unproven", &found.inside)
                }
                ActVerdict::Unproven => ("unproven", &found.control),
                ActVerdict::Better => ("better", &found.inside),
                ActVerdict::Escaped => ("ESCAPED", &found.inside),
            };
            let whose = match found.verdict {
                ActVerdict::Unproven if !detail.starts_with(COULD_NOT) => "the control: ",
                _ => "",
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

/// An act that succeeded in the sandbox counts whether or not its control worked. A refusal proves something only if
/// the control succeeded.
fn compare_with_promise(promised: PromiseStatus, tried: &TriedAct) -> ActVerdict {
    let works_here = matches!(tried.control, ActResult::Done(_));
    match (&tried.inside, promised.is_kept()) {
        (ActResult::Done(_), true) => ActVerdict::Escaped,
        (ActResult::Done(_), false) => ActVerdict::KnownGap,
        (ActResult::Refused(_), true) if works_here => ActVerdict::Held,
        (ActResult::Refused(_), false) if works_here => ActVerdict::Better,
        (ActResult::Refused(_) | ActResult::Unable(_), _) => ActVerdict::Unproven,
    }
}

const COULD_NOT: &str = "could not be tried";

/// Leaves the path of the testbed out: the directory is gone.
fn describe_outcome(outcome: &ActResult, testbed_dir: &Path) -> String {
    let text = match outcome {
        ActResult::Done(what) => format!("done: {what}"),
        ActResult::Refused(why) => format!("refused: {why}"),
        ActResult::Unable(why) => format!("{COULD_NOT}: {why}"),
    };
    let testbed_dir = testbed_dir.display().to_string();
    let parts = ["confined/", "control/", ""].map(|part| format!("{testbed_dir}{part}"));
    parts.iter().fold(text, |text, part| text.replace(part, ""))
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
    use sandbox::spec::ConfinementLevel;

    fn tried(control: ActResult, inside: ActResult) -> TriedAct {
        TriedAct { control, inside }
    }

    fn done() -> ActResult {
        ActResult::Done("x".into())
    }

    fn refused() -> ActResult {
        ActResult::Refused("EPERM".into())
    }

    fn unable() -> ActResult {
        ActResult::Unable("no kernel for it".into())
    }

    #[test]
    fn an_act_that_succeeded_inside_counts_whatever_the_control_did() {
        for control in [done(), refused(), unable()] {
            let both = tried(control, done());
            assert_eq!(
                compare_with_promise(PromiseStatus::Kept, &both),
                ActVerdict::Escaped
            );
            assert_eq!(
                compare_with_promise(PromiseStatus::KeptByRefusing("x"), &both),
                ActVerdict::Escaped
            );
            assert_eq!(
                compare_with_promise(PromiseStatus::NotKept("x"), &both),
                ActVerdict::KnownGap
            );
        }
    }

    #[test]
    fn a_refusal_counts_only_with_its_control() {
        assert_eq!(
            compare_with_promise(PromiseStatus::Kept, &tried(done(), refused())),
            ActVerdict::Held
        );
        assert_eq!(
            compare_with_promise(PromiseStatus::NotKept("x"), &tried(done(), refused())),
            ActVerdict::Better
        );
        for control in [refused(), unable()] {
            assert_eq!(
                compare_with_promise(PromiseStatus::Kept, &tried(control, refused())),
                ActVerdict::Unproven
            );
        }
        assert_eq!(
            compare_with_promise(PromiseStatus::Kept, &tried(done(), unable())),
            ActVerdict::Unproven
        );
    }

    #[test]
    fn an_act_that_was_not_tried_is_unproven_not_held() {
        let results = BatteryResults {
            level: ConfinementLevel::Full,
            testbed_dir: "/nowhere/".into(),
            acts: Default::default(),
        };
        let report = AttackReport::new(&results, 7);
        assert_eq!(report.counts.unproven, ACTS.len());
        assert!(!report.is_bad(true));
        assert!(report.closing().starts_with("0 held, 0 known gaps, "));
    }
}
