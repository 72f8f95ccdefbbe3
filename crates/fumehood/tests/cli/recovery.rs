//! How `gc` and other commands finish what a crash, a failed commit or an exchanged database left. Each trial is a
//! regression test for a defect that was found by reading the source.

use serde_json::json;
use testkit::command::{FinishedCommand, RunningCommand, finish};
use testkit::home::TestHome;
use testkit::process::cgroups_of;
use testkit::{fresh_id, trial};

const LEAVES: &str = "echo small > a; head -c 3000000 /dev/zero > big";

/// Runs `fumehood ARGS` with a fault at a crash point.
fn with_fault(test_home: &TestHome, fault: &str, args: &[&str]) -> FinishedCommand {
    let mut command = test_home.fumehood();
    command.args(args).env("FUMEHOOD_FAULT", fault);
    finish(command)
}

fn run_with_fault(
    test_home: &TestHome,
    fault: &str,
    options: &[&str],
    script: &str,
) -> FinishedCommand {
    let head = ["run"].iter().chain(options);
    let args: Vec<&str> = head.chain(&["--", "sh", "-c", script]).copied().collect();
    with_fault(test_home, fault, &args)
}

trial!(
    Everyone,
    a_pending_attempt_is_finished_into_its_own_artifact_store
);
fn a_pending_attempt_is_finished_into_its_own_artifact_store() {
    let test_home = TestHome::new();
    let other = test_home.path("other-store");
    let at = ["--id", "p", "--artifacts", other.to_str().unwrap()];
    let ended = run_with_fault(&test_home, "transaction_open=eio", &at, LEAVES);
    assert_eq!(ended.code(), 121, "{}", ended.err());
    // This `gc` has another artifact store, and still finishes the attempt into the attempt's own store.
    test_home.gc(&[]).good();
    let row = "SELECT outputs_count, complete FROM analyses_v1";
    assert_eq!(test_home.sql(row), [[json!(2), json!(1)]]);
    let verified = test_home.ask(["verify", "--artifacts", other.to_str().unwrap()]);
    verified.good();
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    a_prepared_workspace_outlives_a_crash_before_anything_ran
);
fn a_prepared_workspace_outlives_a_crash_before_anything_ran() {
    let test_home = TestHome::new();
    test_home.ask(["workspace", "create", "w"]).good();
    let precious = test_home.workspace("w").join("precious");
    std::fs::write(&precious, "mine").unwrap();
    let ended = run_with_fault(&test_home, "claimed=kill", &["--in", "w"], "true");
    assert_eq!(ended.status.code(), None, "it was killed");
    test_home.gc(&[]).good();
    assert!(precious.exists());
    test_home
        .run(["--in", "w", "--", "sh", "-c", "cat precious; echo x > f"])
        .good();
    test_home.ask(["post-process", "w"]).good();
    assert!(precious.exists());
    test_home.ask(["workspace", "remove", "w"]).good();
    test_home.assert_nothing_left();
}

trial!(Everyone, a_prepared_workspace_outlives_a_crash_after_it_ran);
fn a_prepared_workspace_outlives_a_crash_after_it_ran() {
    let test_home = TestHome::new();
    test_home.ask(["workspace", "create", "w"]).good();
    let precious = test_home.workspace("w").join("precious");
    std::fs::write(&precious, "mine").unwrap();
    let ended = run_with_fault(&test_home, "ended=kill", &["--in", "w"], LEAVES);
    assert_eq!(ended.status.code(), None, "it was killed");
    test_home.gc(&[]).good();
    assert!(precious.exists());
    let processed = test_home.ask(["post-process", "w"]);
    assert_eq!(processed.code(), 125, "{}", processed.err());
    let row = "SELECT reason, outputs_count FROM analyses_v1";
    let expected = [json!("runner_lost"), json!(2)];
    assert_eq!(test_home.sql(row), [expected]);
    assert!(precious.exists());
    test_home.ask(["workspace", "remove", "w"]).good();
    test_home.assert_nothing_left();
}

trial!(Everyone, an_attempt_whose_workspace_is_gone_is_incomplete);
fn an_attempt_whose_workspace_is_gone_is_incomplete() {
    let test_home = TestHome::new();
    test_home.ask(["workspace", "create", "w"]).good();
    test_home
        .run(["--in", "w", "--", "sh", "-c", LEAVES])
        .good();
    // The workspace is gone, as when /tmp is emptied at boot.
    std::fs::remove_dir_all(test_home.workspace("w")).unwrap();
    test_home.ask(["post-process", "w"]).good();
    let row = "SELECT complete, outputs_count FROM analyses_v1";
    assert_eq!(test_home.sql(row), [[json!(0), json!(0)]]);
    assert_eq!(test_home.sql_one("SELECT remark FROM remarks_v1"), "lost");
}

trial!(
    Everyone,
    an_attempt_is_committed_again_to_an_older_copy_of_the_database
);
fn an_attempt_is_committed_again_to_an_older_copy_of_the_database() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "before"], "true").good();
    // The process that closes the database last copies the log into the database file.
    test_home.gc(&[]).good();
    let database = test_home.home.join("fumehood.db");
    let copy = test_home.path("copy.db");
    std::fs::copy(&database, &copy).unwrap();
    run_with_fault(&test_home, "ended=kill", &["--id", "later"], LEAVES);
    for ending in ["", "-wal", "-shm"] {
        let _absent = std::fs::remove_file(test_home.home.join(format!("fumehood.db{ending}")));
    }
    std::fs::copy(&copy, &database).unwrap();
    test_home.gc(&[]).good();
    let row = "SELECT outputs_count FROM analyses_v1 WHERE id = 'later'";
    assert_eq!(test_home.sql_one(row), 2);
    test_home.assert_nothing_left();
}

trial!(Everyone, recovery_compares_content_and_not_times);
fn recovery_compares_content_and_not_times() {
    let test_home = TestHome::new();
    run_with_fault(&test_home, "manifest_written=kill", &["--id", "t"], LEAVES);
    let file = std::fs::File::options()
        .append(true)
        .open(test_home.workspace("t").join("big"));
    file.unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    test_home.gc(&[]).good();
    let row = "SELECT outputs_count, complete FROM analyses_v1";
    assert_eq!(test_home.sql(row), [[json!(2), json!(1)]]);
}

trial!(Everyone, a_lost_output_is_not_counted_and_fails_expect);
fn a_lost_output_is_not_counted_and_fails_expect() {
    let test_home = TestHome::new();
    let options = ["--id", "l", "--expect", "big"];
    run_with_fault(&test_home, "manifest_written=kill", &options, LEAVES);
    std::fs::remove_file(test_home.workspace("l").join("big")).unwrap();
    test_home.gc(&[]).good();
    let row = "SELECT state, reason, output_bytes FROM analyses_v1";
    let expected = [json!("failed"), json!("missing_output"), json!(6)];
    assert_eq!(test_home.sql(row), [expected]);
}

trial!(Everyone, discarding_an_uncommitted_attempt_leaves_nothing);
fn discarding_an_uncommitted_attempt_leaves_nothing() {
    let test_home = TestHome::new();
    let id = fresh_id("d");
    run_with_fault(&test_home, "outcome_written=kill", &["--id", &id], LEAVES);
    test_home
        .ask(["workspace", "remove", &id])
        .refused(125, "--discard");
    test_home
        .ask(["workspace", "remove", &id, "--discard"])
        .good();
    let row = "SELECT state, complete, outputs_count FROM analyses_v1";
    let expected = [json!("succeeded"), json!(0), json!(0)];
    assert_eq!(test_home.sql(row), [expected]);
    assert_eq!(cgroups_of(&id), Vec::<std::path::PathBuf>::new());
    test_home.assert_nothing_left();
}

trial!(Everyone, a_run_does_not_commit_to_an_exchanged_database);
fn a_run_does_not_commit_to_an_exchanged_database() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "before"], "true").good();
    // The process that closes the database last copies the log into the database file.
    test_home.gc(&[]).good();
    let script = "echo ready; read go; echo x > f";
    let mut command =
        test_home.run_command(["--id", "e", "--stdin", "-", "--", "sh", "-c", script]);
    command.stdin(std::process::Stdio::piped());
    let mut live = RunningCommand::start(command);
    live.wait_for("ready");
    let (database, aside) = (
        test_home.home.join("fumehood.db"),
        test_home.path("aside.db"),
    );
    std::fs::rename(&database, &aside).unwrap();
    drop(live.child.stdin.take());
    let ended = live.finish();
    assert_eq!(ended.code(), 121, "{}", ended.err());
    for ending in ["", "-wal", "-shm"] {
        let _absent = std::fs::remove_file(test_home.home.join(format!("fumehood.db{ending}")));
    }
    std::fs::rename(&aside, &database).unwrap();
    test_home.ask(["post-process", "e"]).good();
    let row = "SELECT outputs_count FROM analyses_v1 WHERE id = 'e'";
    assert_eq!(test_home.sql_one(row), 1);
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    gc_with_an_older_copy_of_the_database_removes_no_object
);
fn gc_with_an_older_copy_of_the_database_removes_no_object() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "before"], "echo before > f").good();
    test_home.gc(&[]).good();
    let copy = test_home.home.join("copy.db");
    std::fs::copy(test_home.home.join("fumehood.db"), &copy).unwrap();
    test_home.sh(&["--id", "after"], "echo after > f").good();
    let db = format!("sqlite:{}", copy.display());
    let _refused = test_home.gc(&["--db", &db]);
    test_home.ask(["verify"]).good();
}
