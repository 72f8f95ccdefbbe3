//! At each crash point the disk is full, the disk is broken, or descriptors are used up. The exit code and the message report it,
//! nothing is lost, and a recovery can finish the attempt.

use store::types::crash_points::{self, CrashPoint};
use testkit::command::finish;
use testkit::trial;

use crate::database_rows::text;
use crate::deployment::{Recovery, TestDeployment};
use crate::expected_state::ExpectedState;
use crate::kill_at_crash_points::{is_before, kill_points};

/// What must follow from a failure at a crash point.
struct ExpectedFailure {
    code: i32,
    state: ExpectedState,
    /// Texts on the standard error.
    messages: &'static [&'static str],
}

fn verdict(step: CrashPoint) -> ExpectedFailure {
    let (code, state, messages): (i32, ExpectedState, &[&str]) = match step {
        // At this point the attempt has no workspace and the database does not know it. At later points the database
        // records the failure.
        CrashPoint::Claimed => (125, ExpectedState::Unknown, &["error: ", "claimed"]),
        step if is_before(step, CrashPoint::Ended) => (125, ExpectedState::NotRun, &["error: "]),
        step if is_before(step, CrashPoint::Committed) => (
            121,
            ExpectedState::Whole,
            &["NOT COMMITTED: ", "fumehood post-process "],
        ),
        // The post-process command ran, but that was not recorded: the command runs again.
        CrashPoint::PostProcessed => (
            121,
            ExpectedState::Whole,
            &["post_process failed: ", "fumehood post-process "],
        ),
        // The attempt is committed, and its post-process command is recorded. The next start does what is left.
        _ => (0, ExpectedState::Whole, &[]),
    };
    ExpectedFailure {
        code,
        state,
        messages,
    }
}

trial!(Everyone, a_full_disk_at_every_step);
fn a_full_disk_at_every_step() {
    at_every_step(
        &TestDeployment::sqlite("enospc"),
        &["enospc"],
        &[Recovery::Gc],
    );
}

trial!(Everyone, a_broken_disk_at_every_step);
fn a_broken_disk_at_every_step() {
    at_every_step(
        &TestDeployment::sqlite("eio"),
        &["eio"],
        &[Recovery::PostProcess],
    );
}

trial!(Everyone, no_descriptor_at_every_step);
fn no_descriptor_at_every_step() {
    at_every_step(
        &TestDeployment::sqlite("emfile"),
        &["emfile"],
        &[Recovery::NextRun],
    );
}

/// At each crash point injects one of these faults, then recovers in one of these ways, each in turn.
fn at_every_step(deployment: &TestDeployment, faults: &[&str], ways: &[Recovery]) {
    let mut expected_states = Vec::new();
    for (turn, (step, word)) in kill_points().into_iter().enumerate() {
        let id = deployment.id(&word.replace(':', "-"));
        let mut command = deployment.program(&deployment.machine, &id);
        let fault = faults[turn % faults.len()];
        command.env(crash_points::VARIABLE, format!("{word}={fault}"));
        let ended = finish(command);
        let must = verdict(step);
        if step == CrashPoint::Marked {
            // Everything is done, even if a failure was reported; another trial checks the report.
            expected_states.push((id, must.state));
            deployment.check(&expected_states);
            continue;
        }
        assert_eq!(ended.code(), must.code, "{word}={fault}: {}", ended.err());
        for message in must.messages {
            assert!(
                ended.err().contains(message),
                "{word}={fault}: no {message:?} in: {}",
                ended.err()
            );
        }
        expected_states.push((id.clone(), must.state));
        match (must.code, step) {
            // If it is unknown whether the command ran, only `post-process` runs it again.
            (121, CrashPoint::PostProcessed) => {
                drop(deployment.recover(Recovery::PostProcess, &id))
            }
            (121, _) => drop(deployment.recover(ways[turn % ways.len()], &id)),
            // Nothing is left to do.
            _ => {}
        }
        deployment.check(&expected_states);
    }
    deployment.check_for_good(&expected_states, Recovery::Gc);
}

trial!(
    Everyone,
    an_attempt_that_could_not_start_does_not_wait_for_post_processing
);
/// An analysis that could not start never waits for a post-process command that nobody runs: the command runs, or the
/// record says that none is due.
fn an_attempt_that_could_not_start_does_not_wait_for_post_processing() {
    let deployment = TestDeployment::sqlite("unstarted");
    let id = deployment.id("begun");
    let mut command = deployment.program(&deployment.machine, &id);
    command.env(crash_points::VARIABLE, "begun=eio");
    assert_eq!(finish(command).code(), 125);
    deployment.recover(Recovery::Gc, &id);
    deployment.check(&[(id.clone(), ExpectedState::NotRun)]);
    let rows = deployment.rows();
    let step = text(rows.of("attempts", &id)[0], "post_process").map(String::from);
    assert!(matches!(step.as_deref(), None | Some("done")), "{step:?}");
}

trial!(
    Everyone,
    a_command_recorded_as_done_is_not_reported_as_failed
);
/// A command that is recorded as done is not reported as failed.
fn a_command_recorded_as_done_is_not_reported_as_failed() {
    let deployment = TestDeployment::sqlite("marked");
    let id = deployment.id("marked");
    let mut command = deployment.program(&deployment.machine, &id);
    command.env(crash_points::VARIABLE, "marked=eio");
    let ended = finish(command);
    deployment.check(&[(id, ExpectedState::Whole)]);
    assert_eq!(ended.code(), 0, "{}", ended.err());
}

trial!(Everyone, every_io_fault_at_every_step_on_postgres);
fn every_io_fault_at_every_step_on_postgres() {
    let words = ["enospc", "eio", "emfile"];
    at_every_step(
        &TestDeployment::postgres("faults"),
        &words,
        &[Recovery::PostProcess, Recovery::Gc],
    );
}
