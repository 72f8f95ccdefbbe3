//! A runner is killed at every crash point: one recovery brings the attempt to the right state, and another changes nothing.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use rustix::process::Signal;
use store::types::crash_points::{self, CrashPoint};
use testkit::command::finish;
use testkit::process::processes_with;
use testkit::trial;
use testkit::wait::eventually;

use crate::deployment::{Recovery, TestDeployment};
use crate::expected_state::{self, ExpectedState, Files, OBJECTS};

/// Every crash point. If it matters at which pass of a crash point the kill happens, the word names the pass.
pub fn kill_points() -> Vec<(CrashPoint, String)> {
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

/// Whether an attempt reaches one crash point before another.
pub fn is_before(step: CrashPoint, other: CrashPoint) -> bool {
    let position = |step| CrashPoint::ALL.iter().position(|s| *s == step);
    position(step) < position(other)
}

fn state_after_kill(deployment: &TestDeployment, step: CrashPoint, id: &str) -> ExpectedState {
    match step {
        step if is_before(step, CrashPoint::Begun) => ExpectedState::Unknown,
        step if is_before(step, CrashPoint::OutcomeWritten) => ExpectedState::Lost(
            expected_state::left_in(&deployment.machine.workspace(id), id),
        ),
        _ => ExpectedState::Whole,
    }
}

/// Runs a command with a kill at a crash point, and asserts that the kill happened.
fn run_until_killed(mut command: Command, word: &str) {
    command.env(crash_points::VARIABLE, format!("{word}=kill"));
    let ended = finish(command);
    let killed = ended.status.signal() == Some(Signal::KILL.as_raw());
    assert!(killed, "{word}: {} {}", ended.status, ended.err());
}

trial!(
    Everyone,
    gc_finishes_attempts_killed_at_every_step_on_sqlite
);
fn gc_finishes_attempts_killed_at_every_step_on_sqlite() {
    at_every_step(&TestDeployment::sqlite("steps"), Recovery::Gc);
}

trial!(
    Everyone,
    gc_finishes_attempts_killed_at_every_step_on_postgres
);
fn gc_finishes_attempts_killed_at_every_step_on_postgres() {
    at_every_step(&TestDeployment::postgres("steps"), Recovery::Gc);
}

trial!(
    Everyone,
    the_next_run_finishes_attempts_killed_at_every_step
);
fn the_next_run_finishes_attempts_killed_at_every_step() {
    at_every_step(&TestDeployment::sqlite("steps"), Recovery::NextRun);
}

trial!(
    Everyone,
    post_process_finishes_attempts_killed_at_every_step
);
fn post_process_finishes_attempts_killed_at_every_step() {
    at_every_step(&TestDeployment::sqlite("steps"), Recovery::PostProcess);
}

fn at_every_step(deployment: &TestDeployment, how: Recovery) {
    let mut expected_states = Vec::new();
    for (step, word) in kill_points() {
        let id = deployment.id(&word.replace(':', "-"));
        run_until_killed(deployment.program(&deployment.machine, &id), &word);
        eventually("its program is dead", || processes_with(&id).is_empty());
        let expected = state_after_kill(deployment, step, &id);
        match &expected {
            ExpectedState::Lost(left) if !is_before(step, CrashPoint::Ended) => {
                assert_eq!(*left, expected_state::outputs(&id), "{word}");
            }
            ExpectedState::Lost(left) => assert!(left.is_empty(), "{word}"),
            _ => {}
        }
        let ended = finish(deployment.recovery(&deployment.machine, how, &id));
        // `post-process` exits with the code of the run; `gc` and the next run exit with their own.
        let code = match (how, &expected) {
            (Recovery::PostProcess, ExpectedState::Lost(_) | ExpectedState::Unknown) => 125,
            _ => 0,
        };
        assert_eq!(ended.code(), code, "{word}: {}", ended.err());
        expected_states.push((id, expected));
        deployment.check(&expected_states);
    }
    let again = match how {
        Recovery::PostProcess => Recovery::Gc,
        how => how,
    };
    deployment.check_for_good(&expected_states, again);
}

trial!(Everyone, a_crash_point_that_is_not_reached_kills_no_process);
/// Control: a crash point that an attempt does not reach kills nothing.
fn a_crash_point_that_is_not_reached_kills_no_process() {
    let deployment = TestDeployment::sqlite("control");
    let mut expected_states = Vec::new();
    for (at, word) in [format!("object_moved:{}", OBJECTS + 1), "nowhere".into()]
        .iter()
        .enumerate()
    {
        let id = deployment.id(&at.to_string());
        let mut command = deployment.program(&deployment.machine, &id);
        command.env(crash_points::VARIABLE, format!("{word}=kill"));
        finish(command).good();
        expected_states.push((id, ExpectedState::Whole));
    }
    deployment.check(&expected_states);
}

/// The crash points at which to kill a recovery after a kill at `first`. There is one kill for each object that is not
/// yet moved, because a moved object need not move again.
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

trial!(Everyone, a_killed_recovery_is_recovered_from);
/// A recovery reaches the same crash points. The trial kills a recovery at each of them too.
fn a_killed_recovery_is_recovered_from() {
    let deployment = TestDeployment::sqlite("again");
    let mut expected_states = Vec::new();
    let firsts = [
        (CrashPoint::Begun, 0),
        (CrashPoint::Ended, OBJECTS),
        (CrashPoint::OutcomeWritten, OBJECTS),
        (CrashPoint::ObjectMoved, OBJECTS - 1),
    ];
    for (first, objects) in firsts {
        let id = deployment.id(first.name());
        run_until_killed(deployment.program(&deployment.machine, &id), first.name());
        eventually("its program is dead", || processes_with(&id).is_empty());
        expected_states.push((id.clone(), state_after_kill(&deployment, first, &id)));
        for step in steps_after(first, objects) {
            run_until_killed(
                deployment.recovery(&deployment.machine, Recovery::Gc, &id),
                step.name(),
            );
        }
        deployment.recover(Recovery::Gc, &id);
        deployment.check(&expected_states);
    }
    deployment.check_for_good(&expected_states, Recovery::Gc);
}

trial!(Everyone, an_attempt_killed_before_it_wrote_reports_no_loss);
/// An attempt that is killed before the program could write anything has lost nothing, and its record reports no loss.
fn an_attempt_killed_before_it_wrote_reports_no_loss() {
    let deployment = TestDeployment::sqlite("early");
    let mut expected_states = Vec::new();
    let id = deployment.id("begun");
    run_until_killed(
        deployment.program(&deployment.machine, &id),
        CrashPoint::Begun.name(),
    );
    expected_states.push((id, ExpectedState::Lost(Files::new())));
    // If the inputs are large, the attempt is begun in the database before they are copied.
    let large = deployment.machine.root.join("large");
    std::fs::write(&large, vec![7; (1 << 20) + 1]).unwrap();
    let id = deployment.id("filled");
    let mut command =
        deployment.fumehood(&deployment.machine, ["run", "-q", "--id", &id, "--input"]);
    command.arg(&large).args(["--", "true"]);
    run_until_killed(command, CrashPoint::Filled.name());
    std::fs::remove_file(&large).unwrap();
    expected_states.push((id, ExpectedState::Lost(Files::new())));
    deployment.recover(Recovery::Gc, "");
    deployment.check(&expected_states);
    let rows = deployment.rows();
    for (id, _) in &expected_states {
        let remarks = rows.of("remarks", id);
        assert!(remarks.is_empty(), "{id}: {remarks:?}");
    }
}

trial!(
    Everyone,
    an_attempt_with_a_generated_id_is_recorded_from_begun_on
);
/// A generated id is new, so the runner skips the database lookup: until the attempt is begun, the run directory names no
/// database.
fn an_attempt_with_a_generated_id_is_recorded_from_begun_on() {
    let deployment = TestDeployment::sqlite("made-up");
    let mut expected_states = Vec::new();
    let early = [
        CrashPoint::Claimed,
        CrashPoint::WorkspaceMade,
        CrashPoint::Filled,
        CrashPoint::Begun,
    ];
    for step in early {
        run_until_killed(
            deployment.fumehood(&deployment.machine, ["run", "-q", "--", "true"]),
            step.name(),
        );
        let runs = std::fs::read_dir(deployment.machine.home.join("runs")).unwrap();
        let ids: Vec<_> = runs.map(|run| run.unwrap().file_name()).collect();
        let [id] = &ids[..] else {
            panic!("{}: {ids:?}", step.name());
        };
        if step == CrashPoint::Begun {
            let lost = ExpectedState::Lost(Files::new());
            expected_states.push((id.to_str().unwrap().to_owned(), lost));
        }
        deployment.recover(Recovery::Gc, "");
        deployment.check(&expected_states);
    }
    deployment.check_for_good(&expected_states, Recovery::Gc);
}
