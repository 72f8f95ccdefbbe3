//! Killed at every named step: one recovery ends it, in the right state, and another one changes nothing.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use rustix::process::Signal;
use store::types::crash_points::{self, CrashPoint};

use crate::bench::{Bench, Recovery};
use crate::lab::{eventually, finish, processes_with};
use crate::model::{self, Fate, Files, OBJECTS};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "killed_at_every_step_gc_finishes_it_on_sqlite",
        For::Everyone,
        || {
            at_every_step(&Bench::sqlite("steps"), Recovery::Gc);
        },
    ),
    (
        "killed_at_every_step_gc_finishes_it_on_postgres",
        For::Everyone,
        || {
            at_every_step(&Bench::postgres("steps"), Recovery::Gc);
        },
    ),
    (
        "killed_at_every_step_the_next_run_finishes_it",
        For::Everyone,
        || {
            at_every_step(&Bench::sqlite("steps"), Recovery::NextRun);
        },
    ),
    (
        "killed_at_every_step_post_process_finishes_it",
        For::Everyone,
        || {
            at_every_step(&Bench::sqlite("steps"), Recovery::PostProcess);
        },
    ),
    (
        "a_step_that_is_not_reached_kills_nobody",
        For::Everyone,
        not_reached,
    ),
    (
        "a_killed_recovery_is_recovered_from",
        For::Everyone,
        recovery_killed,
    ),
    (
        "an_id_of_our_own_is_known_from_begun_on",
        For::Everyone,
        made_up,
    ),
    (
        "what_was_never_there_is_not_called_lost",
        For::Everyone,
        nothing_lost,
    ),
];

/// Every step, and the times it is reached that matter.
pub fn strikes() -> Vec<(CrashPoint, String)> {
    let times = |step: &CrashPoint| match step {
        CrashPoint::ObjectMoved => vec![
            step.name().to_owned(),
            format!("{}:2", step.name()),
            format!("{}:{OBJECTS}", step.name()),
        ],
        _ => vec![step.name().to_owned()],
    };
    let each = |step: &CrashPoint| {
        times(step)
            .into_iter()
            .map(|word| (*step, word))
            .collect::<Vec<_>>()
    };
    CrashPoint::ALL.iter().flat_map(each).collect()
}

/// Whether one step comes before another in an attempt.
pub fn is_before(step: CrashPoint, other: CrashPoint) -> bool {
    let position = |step| CrashPoint::ALL.iter().position(|s| *s == step);
    position(step) < position(other)
}

fn fate(bench: &Bench, step: CrashPoint, id: &str) -> Fate {
    match step {
        step if is_before(step, CrashPoint::Begun) => Fate::Unknown,
        step if is_before(step, CrashPoint::OutcomeWritten) => {
            Fate::Lost(model::left_in(&bench.place.workspace(id), id))
        }
        _ => Fate::Whole,
    }
}

/// Runs to the strike, and shows that it was struck.
fn strike(mut command: Command, word: &str) {
    command.env(crash_points::VARIABLE, format!("{word}=kill"));
    let ended = finish(command);
    let killed = ended.status.signal() == Some(Signal::KILL.as_raw());
    assert!(killed, "{word}: {} {}", ended.status, ended.err());
}

fn at_every_step(bench: &Bench, how: Recovery) {
    let mut fates = Vec::new();
    for (step, word) in strikes() {
        let id = bench.id(&word.replace(':', "-"));
        strike(bench.program(&bench.place, &id), &word);
        eventually("its program is dead", || processes_with(&id).is_empty());
        let fate = fate(bench, step, &id);
        match &fate {
            Fate::Lost(left) if !is_before(step, CrashPoint::Ended) => {
                assert_eq!(*left, model::outputs(&id), "{word}");
            }
            Fate::Lost(left) => assert!(left.is_empty(), "{word}"),
            _ => {}
        }
        let ended = finish(bench.recovery(&bench.place, how, &id));
        // `post-process` ends as the run would have; the others have nothing but their own work to tell of.
        let code = match (how, &fate) {
            (Recovery::PostProcess, Fate::Lost(_) | Fate::Unknown) => 125,
            _ => 0,
        };
        assert_eq!(ended.code(), code, "{word}: {}", ended.err());
        fates.push((id, fate));
        bench.check(&fates);
    }
    let again = match how {
        Recovery::PostProcess => Recovery::Gc,
        how => how,
    };
    bench.check_for_good(&fates, again);
}

/// The control: the strikes above hit because they were aimed, and one more object would not have moved.
fn not_reached() {
    let bench = Bench::sqlite("control");
    let mut fates = Vec::new();
    for (at, word) in [format!("object_moved:{}", OBJECTS + 1), "nowhere".into()]
        .iter()
        .enumerate()
    {
        let id = bench.id(&at.to_string());
        let mut command = bench.program(&bench.place, &id);
        command.env(crash_points::VARIABLE, format!("{word}=kill"));
        finish(command).good();
        fates.push((id, Fate::Whole));
    }
    bench.check(&fates);
}

/// The steps that somebody comes through who takes an attempt up after one of them. Each move is killed once: what has
/// moved need not move again.
fn steps_after(first: CrashPoint, objects: u32) -> Vec<CrashPoint> {
    let done_by_the_runner = [
        CrashPoint::Ended,
        CrashPoint::LogsKept,
        CrashPoint::WorkspaceRemoved,
        CrashPoint::Finished,
    ];
    let times = |step: &CrashPoint| match step {
        CrashPoint::ObjectMoved => objects as usize,
        step if is_before(first, *step) && !done_by_the_runner.contains(step) => 1,
        _ => 0,
    };
    let later = CrashPoint::ALL
        .iter()
        .filter(|step| !is_before(**step, CrashPoint::Ended));
    later
        .flat_map(|step| std::iter::repeat_n(*step, times(step)))
        .collect()
}

/// Recovery goes through the same steps, and is killed at each of them, too.
fn recovery_killed() {
    let bench = Bench::sqlite("again");
    let mut fates = Vec::new();
    let firsts = [
        (CrashPoint::Begun, 0),
        (CrashPoint::Ended, OBJECTS),
        (CrashPoint::OutcomeWritten, OBJECTS),
        (CrashPoint::ObjectMoved, OBJECTS - 1),
    ];
    for (first, objects) in firsts {
        let id = bench.id(first.name());
        strike(bench.program(&bench.place, &id), first.name());
        eventually("its program is dead", || processes_with(&id).is_empty());
        fates.push((id.clone(), fate(&bench, first, &id)));
        for step in steps_after(first, objects) {
            strike(bench.recovery(&bench.place, Recovery::Gc, &id), step.name());
        }
        bench.recover(Recovery::Gc, &id);
        bench.check(&fates);
    }
    bench.check_for_good(&fates, Recovery::Gc);
}

/// Killed before the program could make anything, an attempt has lost nothing, and its record does not say so.
fn nothing_lost() {
    let bench = Bench::sqlite("early");
    let mut fates = Vec::new();
    let id = bench.id("begun");
    strike(bench.program(&bench.place, &id), CrashPoint::Begun.name());
    fates.push((id, Fate::Lost(Files::new())));
    // Where much is to be copied, the database knows of it before.
    let large = bench.place.root.join("large");
    std::fs::write(&large, vec![7; (1 << 20) + 1]).unwrap();
    let id = bench.id("filled");
    let mut command = bench.fumehood(&bench.place, ["run", "-q", "--id", &id, "--input"]);
    command.arg(&large).args(["--", "true"]);
    strike(command, CrashPoint::Filled.name());
    std::fs::remove_file(&large).unwrap();
    fates.push((id, Fate::Lost(Files::new())));
    bench.recover(Recovery::Gc, "");
    bench.check(&fates);
    let rows = bench.rows();
    for (id, _) in &fates {
        let remarks = rows.of("remarks", id);
        assert!(remarks.is_empty(), "{id}: {remarks:?}");
    }
}

/// Nobody asks the database for an id that was made up just now: until it is begun, the run directory knows no database.
fn made_up() {
    let bench = Bench::sqlite("made-up");
    let mut fates = Vec::new();
    let early = [
        CrashPoint::Claimed,
        CrashPoint::WorkspaceMade,
        CrashPoint::Filled,
        CrashPoint::Begun,
    ];
    for step in early {
        strike(
            bench.fumehood(&bench.place, ["run", "-q", "--", "true"]),
            step.name(),
        );
        let runs = std::fs::read_dir(bench.place.home.join("runs")).unwrap();
        let ids: Vec<_> = runs.map(|run| run.unwrap().file_name()).collect();
        let [id] = &ids[..] else {
            panic!("{}: {ids:?}", step.name());
        };
        if step == CrashPoint::Begun {
            let lost = Fate::Lost(Files::new());
            fates.push((id.to_str().unwrap().to_owned(), lost));
        }
        bench.recover(Recovery::Gc, "");
        bench.check(&fates);
    }
    bench.check_for_good(&fates, Recovery::Gc);
}
