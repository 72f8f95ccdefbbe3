//! Which files a run makes durable and when, and which work it leaves to the next run. A run makes as few syncs as it
//! can without a loss.

use std::process::Command;

use rustix::process::Signal;
use serde_json::json;
use store::types::crash_points;
use testkit::command::{FinishedCommand, finish};
use testkit::home::TestHome;
use testkit::program;
use testkit::trial;
use testkit::wait::eventually;

/// Runs `fumehood run` under strace. Returns the syncs and removals of the runner and its threads in order, as `call path`.
fn traced(
    test_home: &TestHome,
    fault: Option<&str>,
    options: &[&str],
    script: &str,
) -> (FinishedCommand, Vec<String>) {
    let log = test_home.path("strace");
    let mut command = test_home.with_environment(Command::new("/usr/bin/strace"));
    command.args(["-f", "-qq", "-y", "-e", "signal=none", "-o"]);
    command.arg(&log);
    command.args([
        "-e",
        "trace=fsync,fdatasync,syncfs,sync_file_range,unlinkat,linkat",
    ]);
    command.arg(program::binary()).arg("run");
    command.args(options).args(["--", "sh", "-c", script]);
    if let Some(fault) = fault {
        command.env(crash_points::VARIABLE, fault);
    }
    let ended = finish(command);
    let log = std::fs::read_to_string(log).unwrap();
    (ended, log.lines().map(String::from).collect())
}

fn syncs(calls: &[String]) -> Vec<&String> {
    calls.iter().filter(|call| call.contains("sync")).collect()
}

/// The position of the first call of this kind on a file of this name.
#[track_caller]
fn position(calls: &[String], call: &str, name: &str) -> usize {
    let found = calls
        .iter()
        .position(|line| line.contains(call) && line.contains(name));
    found.unwrap_or_else(|| panic!("no {call} of {name} in {calls:#?}"))
}

trial!(Everyone, a_run_without_outputs_syncs_the_database_alone);
fn a_run_without_outputs_syncs_the_database_alone() {
    let test_home = TestHome::new();
    // The first run creates the database and its log.
    test_home.sh(&[], "true").good();
    let (ended, calls) = traced(&test_home, None, &[], "true");
    ended.good();
    // SQLite syncs the log and, as a precaution, the log's directory. On a slow machine the runner has closed the database in
    // the meantime, and SQLite syncs the database file as well.
    let home = format!("<{}>", test_home.home.display());
    let syncs = syncs(&calls);
    let of_database = |call: &&&String| call.contains("fumehood.db") || call.contains(&home);
    assert_eq!(
        syncs.iter().filter(of_database).count(),
        syncs.len(),
        "{syncs:#?}"
    );
    assert!(
        syncs.iter().any(|call| call.contains("fumehood.db-wal")),
        "{syncs:#?}"
    );
    // Control: a run with an output syncs more.
    let (ended, calls) = traced(&test_home, None, &[], "echo x > x");
    ended.good();
    assert!(calls.iter().any(|call| call.contains("outcome.json")));
}

trial!(
    Everyone,
    an_uncommitted_attempt_is_durable_before_its_workspace_is_removed
);
fn an_uncommitted_attempt_is_durable_before_its_workspace_is_removed() {
    let test_home = TestHome::new();
    test_home.sh(&[], "true").good();
    let options = ["--id", "late"];
    let (ended, calls) = traced(
        &test_home,
        Some("transaction_open=eio"),
        &options,
        "echo said",
    );
    ended.refused(121, "NOT COMMITTED");
    let workspace = position(&calls, "unlinkat", "scidex-analysis-late");
    for paper in ["run.json", "outcome.json", "manifest.json", "stdout"] {
        let synced = position(&calls, "fdatasync", paper);
        assert!(synced < workspace, "{paper}: {calls:#?}");
    }
    let runs = position(&calls, "fsync", "/runs>");
    assert!(runs < workspace, "{calls:#?}");
    test_home.gc(&[]).good();
    let row = "SELECT state FROM analyses_v1 WHERE id = 'late'";
    assert_eq!(test_home.sql_one(row), "succeeded");
}

trial!(
    Everyone,
    the_manifest_is_durable_before_a_file_is_linked_or_a_row_committed
);
fn the_manifest_is_durable_before_a_file_is_linked_or_a_row_committed() {
    let test_home = TestHome::new();
    test_home.sh(&[], "true").good();
    let (ended, calls) = traced(&test_home, None, &[], "echo x > x");
    ended.good();
    let committed = calls.iter().rposition(|call| call.contains("db-wal"));
    let papers = ["run.json", "outcome.json", "manifest.json"];
    let moved = calls
        .iter()
        .position(|call| call.contains("linkat(") && call.contains("artifacts/objects"));
    for paper in papers {
        let synced = position(&calls, "fdatasync", paper);
        assert!(Some(synced) < committed, "{paper}: {calls:#?}");
        // If the file system allows no link, the file is copied, and the trace does not include copies.
        assert!(moved.is_none_or(|moved| synced < moved), "{calls:#?}");
    }
}

trial!(Everyone, the_next_run_reads_the_database_log_of_the_last);
fn the_next_run_reads_the_database_log_of_the_last() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "one"], "true").good();
    test_home.sh(&["--id", "two"], "echo x > x").good();
    let log = test_home.home.join("fumehood.db-wal");
    assert!(std::fs::metadata(&log).unwrap().len() > 0);
    // A copy of the database with its log is complete. A copy without the log is older, and consistent.
    let copied = |name: &str, endings: &[&str]| {
        for ending in endings {
            let from = test_home.home.join(format!("fumehood.db{ending}"));
            std::fs::copy(from, test_home.path(&format!("{name}{ending}"))).unwrap();
        }
        let text = "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute(sys.argv[2]).fetchone())";
        let mut python = Command::new("/usr/bin/python3");
        python.args(["-I", "-c", text]).arg(test_home.path(name));
        python.arg("SELECT (SELECT COUNT(*) FROM sqlite_schema WHERE name = 'attempts'), integrity_check FROM pragma_integrity_check");
        let whole = finish(python).good();
        assert!(whole.trim().ends_with("ok"), "{whole}");
        whole.trim() == "1 ok"
    };
    assert!(copied("with", &["", "-wal"]));
    let _of_an_earlier_time = copied("without", &[""]);
    // Another program and Fumehood itself see all rows.
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM analyses_v1"), 2);
    test_home.sh(&["--id", "three"], "true").good();
    let listed = test_home.ask(["list"]).good();
    for id in ["one", "two", "three"] {
        assert!(listed.contains(id), "{listed}");
    }
}

/// Changes the database to the state after a power cut.
#[track_caller]
fn change(test_home: &TestHome, statements: &str) {
    let text = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.argv[2])";
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-I", "-c", text]);
    python
        .arg(test_home.home.join("fumehood.db"))
        .arg(statements);
    finish(python).good();
}

fn with_fault(test_home: &TestHome, fault: &str, options: &[&str], script: &str) {
    let sh = ["--", "sh", "-c", script];
    let mut command = test_home.run_command(options.iter().chain(&sh));
    command.env(crash_points::VARIABLE, fault);
    finish(command);
}

trial!(
    Everyone,
    an_attempt_whose_row_a_power_cut_took_is_committed_anew
);
fn an_attempt_whose_row_a_power_cut_took_is_committed_anew() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "before"], "true").good();
    for (id, fault) in [("b", "begun=kill"), ("e", "ended=kill")] {
        with_fault(&test_home, fault, &["--id", id], "echo x > x");
        // The run directory survived; the database row did not.
        let take = format!(
            "DELETE FROM attempts WHERE id = '{id}'; DELETE FROM analyses WHERE id = '{id}'"
        );
        change(&test_home, &take);
        let rows = format!("SELECT COUNT(*) FROM attempts WHERE id = '{id}'");
        assert_eq!(test_home.sql_one(&rows), 0, "the control");
        test_home.gc(&[]).good();
        let row = format!("SELECT state, reason FROM analyses_v1 WHERE id = '{id}'");
        assert_eq!(
            test_home.sql(&row),
            [[json!("error"), json!("runner_lost")]]
        );
        test_home.assert_nothing_left();
        // The id can still be used.
        test_home.sh(&["--id", id, "--replace"], "true").good();
    }
    with_fault(&test_home, "claimed=kill", &["--id", "c"], "true");
    test_home.gc(&[]).good();
    let rows = "SELECT COUNT(*) FROM attempts WHERE id = 'c'";
    assert_eq!(
        test_home.sql_one(rows),
        0,
        "nothing ran, and nothing was begun"
    );
}

trial!(Everyone, a_torn_outcome_file_counts_as_no_outcome);
fn a_torn_outcome_file_counts_as_no_outcome() {
    let test_home = TestHome::new();
    for (id, content) in [
        ("empty", ""),
        ("zeros", "\0\0\0\0"),
        ("half", "{\"version\":1,"),
    ] {
        with_fault(
            &test_home,
            "outcome_written=kill",
            &["--id", id],
            "echo x > x",
        );
        let paper = test_home.home.join("runs").join(id).join("1/outcome.json");
        std::fs::metadata(&paper).unwrap();
        std::fs::write(&paper, content).unwrap();
        test_home.gc(&[]).good();
        let row = format!("SELECT reason, outputs_count FROM analyses_v1 WHERE id = '{id}'");
        assert_eq!(test_home.sql(&row), [[json!("runner_lost"), json!(1)]]);
        // A kill after the commit and before the removal of the directory leaves the record unchanged.
        let later = format!("{id}-later");
        with_fault(
            &test_home,
            "workspace_removed=kill",
            &["--id", &later],
            "echo x > x",
        );
        let paper = test_home
            .home
            .join("runs")
            .join(&later)
            .join("1/outcome.json");
        std::fs::write(&paper, content).unwrap();
        test_home.gc(&[]).good();
        let row = format!("SELECT state, outputs_count FROM analyses_v1 WHERE id = '{later}'");
        assert_eq!(test_home.sql(&row), [[json!("succeeded"), json!(1)]]);
        test_home.assert_nothing_left();
    }
}

trial!(
    Everyone,
    a_runner_whose_database_locks_are_lost_undoes_no_other_run
);
/// Regression: a connection that was kept while a program ran continued with locks that no other process saw.
fn a_runner_whose_database_locks_are_lost_undoes_no_other_run() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "first"], "true").good();
    // The runner keeps its connection for a second. The first program ends within that second, the other one after it.
    for (n, sleeps) in ["0.7", "1.6"].iter().enumerate() {
        for (m, gone) in [&["-shm"][..], &["-shm", "-wal"]].iter().enumerate() {
            let ids = ["holds", "beside"].map(|name| format!("{name}-{n}{m}"));
            let script = format!("echo up; sleep {sleeps}");
            let mut live = test_home.start(["--id", &ids[0], "--", "sh", "-c", &script]);
            live.wait_for("up");
            for ending in *gone {
                let name = test_home.home.join(format!("fumehood.db{ending}"));
                std::fs::remove_file(name).unwrap();
            }
            test_home.sh(&["--id", &ids[1]], "true").good();
            live.finish().refused(121, "moved or removed");
            test_home.gc(&[]).good();
            for id in &ids {
                let row = format!("SELECT state FROM analyses_v1 WHERE id = '{id}'");
                assert_eq!(test_home.sql(&row), [[json!("succeeded")]], "{id}");
            }
        }
    }
}

trial!(
    Everyone,
    a_run_commits_nothing_into_a_database_that_was_moved_away
);
/// Regression: the check ran only when the program ended, so the database could be moved while outputs were collected.
fn a_run_commits_nothing_into_a_database_that_was_moved_away() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "first"], "true").good();
    let script = "for n in $(seq 1500); do echo $n > $n; done";
    let live = test_home.start(["--id", "moved", "--", "sh", "-c", script]);
    let outcome = test_home.home.join("runs/moved/1/outcome.json");
    eventually("it has ended", || outcome.exists());
    live.signal(Signal::STOP);
    let away = test_home.path("away");
    std::fs::create_dir(&away).unwrap();
    for ending in ["", "-wal", "-shm"] {
        let name = format!("fumehood.db{ending}");
        // SQLite's side files may be missing.
        let _ = std::fs::rename(test_home.home.join(&name), away.join(&name));
    }
    live.signal(Signal::CONT);
    live.finish().refused(121, "NOT COMMITTED");
    for ending in ["", "-wal", "-shm"] {
        let name = format!("fumehood.db{ending}");
        // SQLite's side files may be missing.
        let _ = std::fs::remove_file(test_home.home.join(&name));
        let _ = std::fs::rename(away.join(&name), test_home.home.join(&name));
    }
    test_home.gc(&[]).good();
    let row = "SELECT state, outputs_count FROM analyses_v1 WHERE id = 'moved'";
    assert_eq!(test_home.sql(row), [[json!("succeeded"), json!(1500)]]);
}
