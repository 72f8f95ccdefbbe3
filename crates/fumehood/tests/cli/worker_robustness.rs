//! A worker goes on, and counts its slots right, whatever requests, runners and the database do.
//!
//! Each trial is a regression test for a defect that an attacker of the queue could use. Its comment describes the defect.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use testkit::command::{RunningCommand, finish};
use testkit::home::TestHome;
use testkit::process::names_in;
use testkit::wait::eventually;
use testkit::{program, trial};

use crate::queue_home::{QueueHome, RunningWorker};

trial!(
    Everyone,
    requests_for_missing_programs_do_not_pause_the_worker
);
/// The defect: after three requests for missing programs the worker printed "3 analyses in a row could not be started here" and
/// claimed nothing for half a minute.
fn requests_for_missing_programs_do_not_pause_the_worker() {
    let queue = QueueHome::new();
    let file = queue.test_home.write("project/input", "input");
    let file = file.to_str().unwrap();
    for n in 1..=4 {
        let name = format!("nosuchprogram{n}");
        queue.submit(&name, &["--priority", "5"], &["--", &name]);
        let gone = format!("gone{n}");
        queue.submit(
            &gone,
            &["--priority", "5", "--input", file],
            &["--", "true"],
        );
    }
    queue.submit("good", &[], &["--", "true"]);
    queue.sql("DELETE FROM submission_blobs");
    queue.sql("DELETE FROM blobs");
    let worked = queue.work("1");
    assert!(!worked.err().contains("in a row"), "{}", worked.err());
    for n in 1..=4 {
        assert_eq!(
            queue.ends(&format!("nosuchprogram{n}")),
            "error|not_found",
            "not tried again"
        );
        assert_eq!(queue.ends(&format!("gone{n}")), "error|refused");
    }
    assert_eq!(queue.ends("good"), "succeeded|exit");
}

trial!(
    Everyone,
    a_request_without_a_valid_id_ends_and_delays_no_other_request
);
/// The defect: requests without a valid id stayed `running` for ever, and the first three paused the worker for half a minute. A
/// newline in an id began a new line in the worker's log.
fn a_request_without_a_valid_id_ends_and_delays_no_other_request() {
    let queue = QueueHome::new();
    let bad = [
        "../../evil",
        ".x",
        "a b",
        "x\nfumehood: worker default is draining",
    ];
    for id in bad {
        let request = json!({"version": 1, "id": id, "command": {"argv": ["true"]}, "settings": {}, "inputs": [], "stdin": null});
        queue.submit_by_hand(id, &request);
    }
    queue.submit("good", &[], &["--", "true"]);
    let worked = queue.work("1");
    assert!(!worked.err().contains("in a row"), "{}", worked.err());
    let draining = |line: &str| line == "fumehood: worker default is draining";
    assert!(!worked.err().lines().any(draining), "{}", worked.err());
    let ended = "SELECT COUNT(*) FROM attempts WHERE submitter = 'mallory' AND state = 'error' AND reason = 'refused'";
    assert_eq!(queue.sql(ended), bad.len().to_string());
    assert_eq!(
        queue.sql("SELECT COUNT(*) FROM attempts"),
        (bad.len() + 1).to_string()
    );
    assert_eq!(queue.ends("good"), "succeeded|exit");
    queue.test_home.assert_nothing_left();
}

trial!(Everyone, a_too_long_request_ends_with_a_short_error);
/// The defects: the worker fetched a request of any length; its error message quoted all of the bad part; it retried a file name
/// that is too long for any disk.
fn a_too_long_request_ends_with_a_short_error() {
    let queue = QueueHome::new();
    let request = |id: &str, settings: Value, inputs: Value| {
        json!({
            "version": 1, "id": id, "command": {"argv": ["true"]}, "settings": settings,
            "inputs": inputs, "stdin": null,
        })
    };
    queue.submit_by_hand("g-request", &request("g-request", json!({}), json!([])));
    queue.sql("UPDATE submissions SET request = repeat('x', 5000000) WHERE id = 'g-request'");
    let item = json!({"env": {"list": ["x".repeat(200_000)]}});
    queue.submit_by_hand("s-env", &request("s-env", item, json!([])));
    let word = json!({"keep": {"text": "x".repeat(200_000)}});
    queue.submit_by_hand("s-word", &request("s-word", word, json!([])));
    let name = json!([{"directory": {"name": "x".repeat(300)}}]);
    queue.submit_by_hand("t-name", &request("t-name", json!({}), name));
    queue.submit("good", &[], &["--", "true"]);
    queue.work("1");
    for id in ["g-request", "s-env", "s-word", "t-name"] {
        assert_eq!(queue.ends(id), "error|refused", "{id}");
    }
    let longest = queue.sql("SELECT MAX(length(message)) FROM attempts");
    assert!(longest.parse::<u32>().unwrap() <= 4_000, "{longest}");
    assert_eq!(queue.ends("good"), "succeeded|exit");
}

trial!(Everyone, a_slot_is_freed_when_no_attempt_number_is_left);
/// The defect: the end of an attempt could not be written because the next attempt had no number left. The slot stayed occupied,
/// even after a restart, or the result was never committed.
fn a_slot_is_freed_when_no_attempt_number_is_left() {
    let queue = QueueHome::new();
    let again = ["--retries", "1", "--retry-on", "failed"];
    queue.submit("failed", &again, &["--", "false"]);
    queue.submit("unstarted", &again, &["--", "true"]);
    queue.submit("good", &[], &["--", "true"]);
    // A directory with the name of the workspace prevents the start.
    std::fs::create_dir(queue.test_home.workspace("unstarted")).unwrap();
    queue.sql("UPDATE analyses SET attempt_last = 9223372036854775807 WHERE id <> 'good'");
    queue.work("1");
    assert_eq!(queue.ends("failed"), "failed|exit");
    assert!(queue.ends("unstarted").starts_with("error|"));
    assert_eq!(queue.ends("good"), "succeeded|exit");
    assert_eq!(names_in(&queue.test_home.home.join("pending")), [""; 0]);
}

trial!(Everyone, an_unreadable_attempt_does_not_stop_the_worker);
/// The defect: while an unreadable attempt ran, the worker printed "the database cannot be used for now", claimed nothing and
/// cancelled nothing.
fn an_unreadable_attempt_does_not_stop_the_worker() {
    let queue = QueueHome::new();
    queue.submit_gated("busy", &[]);
    let worker = queue.worker(&["--slots", "2", "--until-idle"]);
    queue.wait_until_up("busy");
    queue.sql(
        "INSERT INTO attempts (id, attempt, key, state, host, boot_id, created_ms, lease_ms, cancel_ms)
         SELECT id, 5000000000, 'k', state, host, boot_id, 1, 1, 1 FROM attempts WHERE id = 'busy'",
    );
    queue.submit("good", &[], &["--", "true"]);
    eventually("others are served", || {
        queue.ends("good") == "succeeded|exit"
    });
    queue.submit_gated("cancelled", &[]);
    queue.wait_until_up("cancelled");
    queue.ask(&["cancel", "--wait", "cancelled"]).good();
    queue.let_go("busy");
    eventually("it ends", || {
        queue.ends("busy").starts_with("succeeded|exit")
    });
    assert!(
        !worker.said().contains("cannot be used"),
        "{}",
        worker.said()
    );
    worker.kill();
}

trial!(
    Everyone,
    a_restarted_worker_respects_its_new_number_of_slots
);
/// The defect: a worker restarted with one slot, while two analyses of the earlier worker still ran, claimed a third.
fn a_restarted_worker_respects_its_new_number_of_slots() {
    let queue = QueueHome::new();
    // Little memory, so that memory is no reason to wait.
    let little = ["--memory", "16M", "--allow-degraded", "memory"];
    for id in ["first", "second", "third"] {
        queue.submit_gated(id, &little);
    }
    let worker = queue.worker(&["--slots", "3"]);
    for id in ["first", "second", "third"] {
        queue.wait_until_up(id);
    }
    worker.kill();
    // Free the first slot, which is also the one slot of the restarted worker.
    queue.let_go("first");
    eventually("the first ends", || queue.ends("first") == "succeeded|exit");
    // A runner keeps its slot until it has cleaned up after the commit.
    eventually("its runner ends", || queue.runners().len() == 2);
    queue.submit("late", &little, &["--", "true"]);
    let worker = queue.worker(&["--slots", "1", "--until-idle"]);
    worker.wait_until_it_says("2 analyses run on from before");
    eventually("it has looked at the queue", || {
        queue.sql("SELECT slots, running FROM workers") == "1|2"
    });
    for id in ["second", "third"] {
        assert_eq!(queue.ends("late"), "queued|", "while {id} runs");
        queue.let_go(id);
        eventually("it ends", || queue.ends(id) == "succeeded|exit");
    }
    worker.end();
    assert_eq!(queue.ends("late"), "succeeded|exit");
    let order = "SELECT id FROM events WHERE id IN ('second', 'third') AND event = 'committed' OR id = 'late' AND event = 'claimed' ORDER BY seq";
    assert_eq!(queue.sql(order), "second\nthird\nlate");
}

trial!(
    Everyone,
    an_attempt_whose_runner_gets_sigterm_is_not_recorded_as_cancelled
);
/// The defect: a shutdown of the machine ended its analyses as `cancelled`, which is not retried.
fn an_attempt_whose_runner_gets_sigterm_is_not_recorded_as_cancelled() {
    let queue = QueueHome::new();
    for id in ["told", "cancelled"] {
        queue.submit_gated(id, &["--retries", "1"]);
    }
    let worker = queue.worker(&["--slots", "2", "--until-idle"]);
    for id in ["told", "cancelled"] {
        queue.wait_until_up(id);
    }
    queue.sql("UPDATE attempts SET cancel_ms = 1, cancel_by = 'bob' WHERE id = 'cancelled'");
    for id in ["told", "cancelled"] {
        kill_process(queue.runner_of(id), Signal::TERM).unwrap();
    }
    eventually("it is tried again", || {
        queue.ends("told") == "error|runner_stopped running|"
    });
    queue.wait_until_up("told");
    queue.let_go("told");
    worker.end();
    assert_eq!(queue.ends("told"), "error|runner_stopped succeeded|exit");
    assert_eq!(queue.ends("cancelled"), "cancelled|cancelled");
}

trial!(
    Everyone,
    a_parent_that_ignores_sigchld_does_not_break_the_worker
);
/// The defect: a worker whose parent ignores SIGCHLD never saw the end of its children, and enforced no time limit.
fn a_parent_that_ignores_sigchld_does_not_break_the_worker() {
    let queue = QueueHome::new();
    queue.submit("queued", &[], &["--", "true"]);
    let deaf = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])";
    let worker = ["worker", "--slots", "1", "--memory", "1G", "--until-idle"];
    for args in [&worker[..], &["run", "--timeout", "60s", "--", "true"]] {
        let mut python = queue
            .test_home
            .with_environment(Command::new("/usr/bin/python3"));
        python.env("FUMEHOOD_DB", &queue.url);
        python.args(["-c", deaf]).arg(program::binary()).args(args);
        finish(python).good();
    }
    assert_eq!(queue.ends("queued"), "succeeded|exit");
}

trial!(Everyone, a_worker_is_not_idle_while_a_retry_is_queued);
/// The defect: on SQLite, `worker --until-idle` sometimes exited while a retry of an analysis, whose runner had died, was queued.
fn a_worker_is_not_idle_while_a_retry_is_queued() {
    let queue = QueueHome {
        test_home: TestHome::new(),
        url: String::new(),
    };
    let test_home = &queue.test_home;
    let ids = ["one", "two", "three"];
    for id in ids {
        let script = "touch up; sleep 2";
        let words = ["--retries", "1", "--id", id, "--", "sh", "-c", script];
        test_home.ask(["submit"].iter().chain(&words)).good();
    }
    let mut command = test_home.fumehood();
    command.args(["worker", "--slots", "4", "--memory", "1G", "--until-idle"]);
    let worker = RunningWorker::start(command, test_home);
    for id in ids {
        queue.wait_until_up(id);
        kill_process(queue.runner_of(id), Signal::KILL).unwrap();
    }
    worker.end();
    let rows = test_home.sql("SELECT id, attempt, state FROM attempts ORDER BY attempt, id");
    let states: Vec<&str> = rows.iter().map(|row| row[2].as_str().unwrap()).collect();
    assert_eq!(states[..3], ["error"; 3], "{rows:?}");
    assert_eq!(states[3..], ["succeeded"; 3], "{rows:?}");
    test_home.assert_nothing_left();
}

/// A proxy in front of the queue's database that can make the database unreachable.
struct DatabaseProxy {
    queue: QueueHome,
    direct: QueueHome,
    link: PathBuf,
    socket: PathBuf,
}

impl DatabaseProxy {
    fn new() -> DatabaseProxy {
        let mut queue = QueueHome::new();
        let direct = QueueHome {
            test_home: TestHome::new(),
            url: queue.url.clone(),
        };
        let dir = queue.test_home.path("front");
        std::fs::create_dir(&dir).unwrap();
        let (_, rest) = queue.url.split_once("host=").unwrap();
        let (host, _) = rest.split_once('&').unwrap();
        let socket = Path::new(host).join(".s.PGSQL.5432");
        queue.url = queue.url.replace(host, dir.to_str().unwrap());
        let link = dir.join(".s.PGSQL.5432");
        symlink(&socket, &link).unwrap();
        DatabaseProxy {
            queue,
            direct,
            link,
            socket,
        }
    }

    /// Closes all connections and refuses new ones, as a stopped server does.
    fn go_away(&self) {
        std::fs::remove_file(&self.link).unwrap();
        self.direct.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
        );
    }

    fn come_back(&self) {
        symlink(&self.socket, &self.link).unwrap();
    }
}

trial!(
    Everyone,
    a_worker_is_not_idle_while_the_database_is_unreachable
);
/// The defect: the worker exited as soon as its last runner ended. That runner could not reach the database, so its attempt stayed
/// `running` for ever.
fn a_worker_is_not_idle_while_the_database_is_unreachable() {
    let front = DatabaseProxy::new();
    let queue = &front.queue;
    queue.submit_gated("late", &[]);
    let worker = queue.worker(&["--slots", "2", "--until-idle"]);
    queue.wait_until_up("late");
    front.go_away();
    queue.let_go("late");
    eventually("its end waits for the database", || {
        queue.test_home.home.join("pending/late").exists()
    });
    worker.wait_until_it_says("cannot be used");
    assert_eq!(front.direct.ends("late"), "running|");
    front.come_back();
    worker.end();
    assert_eq!(queue.ends("late"), "succeeded|exit");
    assert_eq!(names_in(&queue.test_home.home.join("pending")), [""; 0]);
}

trial!(Everyone, a_database_that_is_restarted_costs_no_attempt);
/// The defect: attempts that had not begun ended for good as `not_started`, because the server was restarted at that moment.
fn a_database_that_is_restarted_costs_no_attempt() {
    let front = DatabaseProxy::new();
    let queue = &front.queue;
    queue.test_home.write("project/input", "input");
    let options = ["--retries", "0", "--input", "input"];
    queue.submit("early", &options, &["--", "cat", "input"]);
    // A lock makes the runner wait when it fetches an input: the worker has claimed the attempt, and the
    // runner has not taken it up.
    let mut holder = Command::new("psql");
    holder.args(["-X", "-q", "-d", &front.direct.url, "-c"]);
    holder.arg("BEGIN; LOCK TABLE fumehood.blobs IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(600)");
    let holder = RunningCommand::start(holder);
    let locks = |granted: &str| {
        let sql = format!(
            "SELECT COUNT(*) > 0 FROM pg_locks WHERE relation = 'blobs'::regclass AND {granted}"
        );
        front.direct.sql(&sql) == "t"
    };
    eventually("it is held", || locks("granted"));
    let worker = queue.worker(&["--slots", "1", "--until-idle"]);
    eventually("the runner waits", || locks("NOT granted"));
    front.go_away();
    holder.finish();
    worker.wait_until_it_says("cannot be used");
    front.come_back();
    worker.end();
    assert_eq!(queue.ends("early"), "succeeded|exit");
}

trial!(Root, a_torn_run_record_does_not_keep_its_attempt_running);
/// The defect: gc took a run record that a power cut had torn for one that its runner would finish, so the attempt stayed
/// `running` for ever.
fn a_torn_run_record_does_not_keep_its_attempt_running() {
    let queue = QueueHome::new();
    queue.submit_gated("torn", &["--retries", "0"]);
    let worker = queue.worker(&["--slots", "1", "--lease", "5s"]);
    queue.wait_until_up("torn");
    let runner = queue.runner_of("torn");
    worker.kill();
    kill_process(runner, Signal::KILL).unwrap();
    std::fs::write(queue.test_home.home.join("runs/torn/1/run.json"), "").unwrap();
    let worker = queue.worker(&["--slots", "1", "--lease", "5s"]);
    // The worker gives the attempt up half a minute after the lease has ended, because the database may have been
    // unreachable for everybody.
    eventually("it is given up", || {
        queue.ends("torn") == "error|runner_lost"
    });
    queue.submit("good", &[], &["--", "true"]);
    eventually("others are served", || {
        queue.ends("good") == "succeeded|exit"
    });
    worker.kill();
}
