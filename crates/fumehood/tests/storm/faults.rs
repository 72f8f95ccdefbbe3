//! The disk is full, broken, or descriptors are used up at a step: the exit code and the message tell it, nothing is
//! lost, and it can be finished.

use store::types::crash_points::{self, CrashPoint};

use crate::bench::{Bench, Recovery};
use crate::lab::finish;
use crate::model::Fate;
use crate::rows::text;
use crate::steps::{is_before, strikes};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    ("a_full_disk_at_every_step", For::Everyone, || {
        at_every_step(&Bench::sqlite("enospc"), &["enospc"], &[Recovery::Gc]);
    }),
    ("a_broken_disk_at_every_step", For::Everyone, || {
        at_every_step(&Bench::sqlite("eio"), &["eio"], &[Recovery::PostProcess]);
    }),
    ("no_descriptor_at_every_step", For::Everyone, || {
        at_every_step(&Bench::sqlite("emfile"), &["emfile"], &[Recovery::NextRun]);
    }),
    ("each_of_them_on_postgres", For::Everyone, || {
        let words = ["enospc", "eio", "emfile"];
        at_every_step(
            &Bench::postgres("faults"),
            &words,
            &[Recovery::PostProcess, Recovery::Gc],
        );
    }),
    (
        "what_could_not_start_awaits_no_step_for_ever",
        For::Everyone,
        not_started,
    ),
    (
        "what_is_marked_done_is_not_called_failed",
        For::Everyone,
        marked_is_done,
    ),
];

/// What a failure at a step must come to.
struct Verdict {
    code: i32,
    fate: Fate,
    /// What is said on stderr.
    said: &'static [&'static str],
}

fn verdict(step: CrashPoint) -> Verdict {
    let (code, fate, said): (i32, Fate, &[&str]) = match step {
        // From here on there is something to be told of, and the database hears of it.
        CrashPoint::Claimed => (125, Fate::Unknown, &["error: ", "claimed"]),
        step if is_before(step, CrashPoint::Ended) => (125, Fate::NotRun, &["error: "]),
        step if is_before(step, CrashPoint::Committed) => (
            121,
            Fate::Whole,
            &["NOT COMMITTED: ", "fumehood post-process "],
        ),
        // The platform's step ran, but nobody will know: it is repeated.
        CrashPoint::PostProcessed => (
            121,
            Fate::Whole,
            &["post_process failed: ", "fumehood post-process "],
        ),
        // Committed, and marked where that was asked for: whatever fails now is left to the next start.
        _ => (0, Fate::Whole, &[]),
    };
    Verdict { code, fate, said }
}

/// At each step one of these faults, then one of these ways to finish it, each in its turn.
fn at_every_step(bench: &Bench, faults: &[&str], ways: &[Recovery]) {
    let mut fates = Vec::new();
    for (turn, (step, word)) in strikes().into_iter().enumerate() {
        let id = bench.id(&word.replace(':', "-"));
        let mut command = bench.program(&bench.place, &id);
        let fault = faults[turn % faults.len()];
        command.env(crash_points::VARIABLE, format!("{word}={fault}"));
        let ended = finish(command);
        let must = verdict(step);
        if step == CrashPoint::Marked {
            // All is done, whatever is said about it: see the trial on that.
            fates.push((id, must.fate));
            bench.check(&fates);
            continue;
        }
        assert_eq!(ended.code(), must.code, "{word}={fault}: {}", ended.err());
        for said in must.said {
            assert!(
                ended.err().contains(said),
                "{word}={fault}: no {said:?} in: {}",
                ended.err()
            );
        }
        fates.push((id.clone(), must.fate));
        match (must.code, step) {
            // A step of the platform's that is not known to have been taken is repeated by whoever is told to, only.
            (121, CrashPoint::PostProcessed) => drop(bench.recover(Recovery::PostProcess, &id)),
            (121, _) => drop(bench.recover(ways[turn % ways.len()], &id)),
            // Nothing was left to be done.
            _ => {}
        }
        bench.check(&fates);
    }
    bench.check_for_good(&fates, Recovery::Gc);
}

/// The platform hears of it, or was never to hear of it; but nothing waits for a step that nobody takes.
fn not_started() {
    let bench = Bench::sqlite("unstarted");
    let id = bench.id("begun");
    let mut command = bench.program(&bench.place, &id);
    command.env(crash_points::VARIABLE, "begun=eio");
    assert_eq!(finish(command).code(), 125);
    bench.recover(Recovery::Gc, &id);
    bench.check(&[(id.clone(), Fate::NotRun)]);
    let rows = bench.rows();
    let step = text(rows.of("attempts", &id)[0], "post_process").map(String::from);
    assert!(matches!(step.as_deref(), None | Some("done")), "{step:?}");
}

/// Nobody is sent to repeat what is done and known to be done.
fn marked_is_done() {
    let bench = Bench::sqlite("marked");
    let id = bench.id("marked");
    let mut command = bench.program(&bench.place, &id);
    command.env(crash_points::VARIABLE, "marked=eio");
    let ended = finish(command);
    bench.check(&[(id, Fate::Whole)]);
    assert_eq!(ended.code(), 0, "{}", ended.err());
}
