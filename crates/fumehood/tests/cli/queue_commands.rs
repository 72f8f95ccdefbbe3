//! The commands of the queue: their output, their exit codes, and which processes they signal.

use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use engine::home;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use store::{
    Capacity, ClaimRequest, Environment, GrantedClaim, Location, LocationOrigin, LostAttempt,
    NewAttempt, NewSubmission, State, Store, SubmitOutcome,
};
use testkit::command::{FinishedCommand, RunningCommand, finish};
use testkit::home::TestHome;
use testkit::wait::eventually;
use testkit::{fresh_id, is_root, trial};

use crate::postgres::PostgresHome;

/// A test home and its database, for commands and for direct calls of the store.
struct HomeWithStore {
    test_home: TestHome,
    url: Option<String>,
    store: Store,
}

impl HomeWithStore {
    fn sqlite() -> HomeWithStore {
        let test_home = TestHome::new();
        test_home.ask(["list"]).good();
        let location = Location::Sqlite(test_home.home.join("fumehood.db"));
        HomeWithStore {
            store: Store::open(&location).unwrap(),
            test_home,
            url: None,
        }
    }

    fn postgresql() -> HomeWithStore {
        let PostgresHome { test_home, url, .. } = PostgresHome::new();
        let env: Environment = &|_| None;
        let location = Location::parse(&url, LocationOrigin::Environment, env).unwrap();
        HomeWithStore {
            store: Store::open(&location).unwrap(),
            test_home,
            url: Some(url),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.test_home.fumehood();
        command.args(args);
        if let Some(url) = &self.url {
            command.env("FUMEHOOD_DB", url);
        }
        command
    }

    fn ask(&self, args: &[&str]) -> FinishedCommand {
        finish(self.command(args))
    }

    #[track_caller]
    fn json(&self, args: &[&str]) -> Value {
        let ended = self.ask(args);
        ended.good();
        ended.document()
    }

    fn submit(&mut self, id: &str, submitter: &str, priority: u32, retries: u32) {
        let submit = NewSubmission {
            id,
            submit_key: None,
            fingerprint: "f",
            request_json: "{}",
            submitter,
            priority,
            retries,
            retry_on: &[State::TimedOut],
            memory_bytes: Some(1 << 30),
            cpu_milli: Some(1_500),
            blobs: &[],
            replace: false,
        };
        let queued = self.store.submit(&[submit], 1_000).unwrap();
        assert!(
            matches!(queued[..], [SubmitOutcome::Now { .. }]),
            "{queued:?}"
        );
    }

    /// Claims the next attempt, as a worker on the machine `host` would.
    fn claim(&mut self, host: &str) -> GrantedClaim {
        let all = Capacity {
            memory_bytes: 64 << 30,
            cpu_milli: 64_000,
        };
        let keys = [fresh_key()];
        let claim = ClaimRequest {
            host,
            boot_id: &home::boot_id(),
            worker: "bench",
            lease_ms: 60_000,
            free: all,
            total: all,
            memory_default_bytes: 1 << 30,
            keys: &keys,
        };
        let mut claimed = self.store.claim(&claim).unwrap();
        assert_eq!(claimed.len(), 1);
        claimed.remove(0)
    }

    fn lose(&mut self, claimed: &GrantedClaim, reason: &str) {
        let lost = LostAttempt {
            id: &claimed.id,
            attempt: claimed.attempt,
            key: &claimed.key,
            by: &fresh_key(),
            reason,
            message: "it is gone",
            proof: store::LossProof::RunnerGone,
        };
        assert!(self.store.give_up(&lost).unwrap());
    }

    fn status(&self, id: &str) -> String {
        let shown = self.json(&["show", id, "--json"]);
        shown["status"].as_str().unwrap().to_owned()
    }
}

fn fresh_key() -> String {
    engine::run_dir::new_attempt_key()
}

trial!(Everyone, a_queued_analysis_is_shown_and_can_be_cancelled);
fn a_queued_analysis_is_shown_and_can_be_cancelled() {
    shown_and_cancelled(HomeWithStore::sqlite());
}

trial!(
    Everyone,
    a_queued_analysis_is_shown_and_can_be_cancelled_on_postgresql
);
fn a_queued_analysis_is_shown_and_can_be_cancelled_on_postgresql() {
    shown_and_cancelled(HomeWithStore::postgresql());
}

fn shown_and_cancelled(mut home: HomeWithStore) {
    for id in ["first", "second", "third"] {
        home.submit(id, "ada", 5, 2);
    }
    let listed = home.ask(&["list"]).good();
    assert!(listed.contains("third   queued"), "{listed}");
    assert!(!listed.contains(" on "), "{listed}");

    let shown = home.ask(&["show", "third", "--events"]).good();
    for fact in [
        "status       queued\n",
        "priority 5, 2 before it\n",
        "asks for     1 GiB, 1.5 CPUs\n",
        "retries      2 left of 2 retries, also when timed out\n",
        "by           ada\n",
        "@1  submitted",
    ] {
        assert!(shown.contains(fact), "no {fact:?} in:\n{shown}");
    }
    let document = home.json(&["show", "first", "--json"]);
    assert_eq!(document["schema"], "fumehood.show/1");
    assert_eq!(document["queue"]["priority"], 5);
    assert_eq!(document["queue"]["ahead"], 0);
    assert_eq!(document["queue"]["retry_on"][0], "timed_out");
    assert_eq!(document["events"][0]["event"], "submitted");
    assert_eq!(document["host"], "");

    home.ask(&["rm", "first"])
        .refused(125, "cancel it first, with `fumehood cancel first`");
    home.ask(&["logs", "first"])
        .refused(125, "has printed nothing yet; -f waits for it");
    home.ask(&["gc"]).good();
    assert_eq!(home.status("first"), "queued", "gc leaves it where it is");

    // A prefix of an id is enough. An analysis that is named twice is cancelled once.
    let cancelled = home.json(&["cancel", "fir", "first", "--json"]);
    assert_eq!(cancelled["schema"], "fumehood.cancel/1");
    assert_eq!(cancelled["analyses"].as_array().unwrap().len(), 1);
    assert_eq!(cancelled["analyses"][0]["came_of_it"], "cancelled");
    assert_eq!(home.status("first"), "cancelled");
    let told = home.ask(&["cancel", "second"]);
    told.good();
    assert!(
        told.err().contains("second is cancelled; it never ran"),
        "{}",
        told.err()
    );
    home.ask(&["cancel", "second", "third"])
        .refused(125, "second had ended before (cancelled)");
    assert_eq!(
        home.status("third"),
        "cancelled",
        "the others are cancelled all the same"
    );
    home.ask(&["cancel", "nobody"])
        .refused(125, "no analysis matches");

    let waited = home.ask(&["wait", "first"]);
    assert_eq!(
        (waited.code(), waited.out()),
        (123, "first cancelled\n".into())
    );
    let story = home.ask(&["show", "first", "--events"]).good();
    assert!(story.contains("cancelled"), "{story}");
    home.ask(&["rm", "first"]).good();
}

trial!(
    Everyone,
    a_claimed_attempt_is_shown_and_can_be_marked_to_be_cancelled
);
fn a_claimed_attempt_is_shown_and_can_be_marked_to_be_cancelled() {
    let mut home = HomeWithStore::sqlite();
    home.submit("far", "ada", 0, 0);
    let claimed = home.claim("another-machine");
    let shown = home.ask(&["show", "far", "--events"]).good();
    for fact in ["status       running\n", "worker       bench\n", "claimed"] {
        assert!(shown.contains(fact), "no {fact:?} in:\n{shown}");
    }
    let told = home.ask(&["cancel", "far"]);
    told.good();
    let words = "marked to be cancelled; its runner on another-machine will hear of it";
    assert!(told.err().contains(words), "{}", told.err());
    let held = home.store.requested_cancels("another-machine").unwrap();
    assert_eq!(held, [("far".to_owned(), 1, claimed.key.clone())]);
    home.ask(&["cancel", "far"]).good();
    let shown = home.ask(&["show", "far"]).good();
    assert!(shown.contains("cancel       asked for by "), "{shown}");
    home.ask(&["logs", "far"])
        .refused(125, "is running on another-machine");
}

/// Prints `ready`, and runs until SIGTERM. Then it writes an output and exits.
const ENDS_ON_SIGTERM: &str =
    "trap 'echo bye > out; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
/// Does not end on SIGTERM.
const IGNORES_SIGTERM: &str = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done";

trial!(Everyone, a_foreground_run_is_cancelled_with_its_grace);
fn a_foreground_run_is_cancelled_with_its_grace() {
    let test_home = TestHome::new();
    let id = fresh_id("patient");
    let mut run = test_home.start(["--id", &id, "--", "sh", "-c", ENDS_ON_SIGTERM]);
    run.wait_for("ready");
    let told = test_home.ask(["cancel", &id, "--wait"]);
    told.good();
    assert!(told.err().contains("is being cancelled"), "{}", told.err());
    assert_eq!(run.finish().code(), 123);
    let shown = test_home.ask_json(["show", &id, "--json"]);
    assert_eq!(shown["status"], "cancelled");
    assert_eq!(shown["complete"], false);
    assert_eq!(shown["outputs"][0]["path"], "out", "it had its grace");
    let events: Vec<&str> = shown["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["event"].as_str().unwrap())
        .collect();
    assert!(events.contains(&"cancelled"), "{events:?}");

    let id = fresh_id("stubborn");
    let mut run = test_home.start([
        "--id",
        &id,
        "--grace",
        "1h",
        "--",
        "sh",
        "-c",
        IGNORES_SIGTERM,
    ]);
    run.wait_for("ready");
    test_home.ask(["cancel", &id]).good();
    run.wait_for("heard");
    // A repeated `cancel` does not skip the grace period.
    test_home.ask(["cancel", &id]).good();
    test_home.ask(["cancel", &id]).good();
    let list = test_home.ask_json(["list", "--json", "--status", "running"]);
    assert_eq!(list["analyses"][0]["id"], id.as_str());
    test_home.ask(["cancel", &id, "--now", "--wait"]).good();
    assert_eq!(run.finish().code(), 123);
    test_home.assert_nothing_left();
}

trial!(Everyone, a_run_without_a_record_is_cancelled);
fn a_run_without_a_record_is_cancelled() {
    let test_home = TestHome::new();
    let id = fresh_id("unrecorded");
    let mut run = test_home.start([
        "--db",
        "none",
        "--id",
        &id,
        "--",
        "sh",
        "-c",
        ENDS_ON_SIGTERM,
    ]);
    run.wait_for("ready");
    test_home.ask(["cancel", &id]).good();
    assert_eq!(run.finish().code(), 123);
    test_home
        .ask(["cancel", &id])
        .refused(125, "no analysis matches");
    test_home
        .ask(["cancel", "--db", "none", &id])
        .refused(125, "does not run here");
    test_home.assert_nothing_left();
}

/// A process that must not be ended.
struct UnrelatedProcess(Child);

impl UnrelatedProcess {
    fn new() -> UnrelatedProcess {
        let child = Command::new("sleep")
            .arg("3600")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        UnrelatedProcess(child)
    }
}

impl Drop for UnrelatedProcess {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

trial!(Everyone, cancel_signals_no_process_but_the_runner);
/// A runner's record outlives the runner, and the kernel may give its pid to another process. `cancel` must not signal that
/// process, neither while the run directory is unlocked nor while a process that cleans it up has locked it.
fn cancel_signals_no_process_but_the_runner() {
    let test_home = TestHome::new();
    let id = fresh_id("forged");
    let mut run = test_home.start(["--id", &id, "--", "sh", "-c", ENDS_ON_SIGTERM]);
    run.wait_for("ready");
    let of = |id: &str| test_home.home.join("runs").join(id).join("1");
    let text = std::fs::read_to_string(of(&id).join("run.json")).unwrap();
    let mut unrelated = UnrelatedProcess::new();
    let mut record: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(record["runner_pid"], run.pid());

    // Another analysis runs on this machine, according to its row. Its run record has the pid of the unrelated process.
    let other = fresh_id("other");
    let location = Location::Sqlite(test_home.home.join("fumehood.db"));
    let mut store = Store::open(&location).unwrap();
    let begun = store.begin(&NewAttempt {
        id: &other,
        key: &fresh_key(),
        replace: false,
        host: &home::machine_id(),
        boot_id: &home::boot_id(),
        submitter: Some("ada"),
        workspace: None,
        provenance: None,
    });
    assert_eq!(begun.unwrap(), 1);
    record["id"] = other.as_str().into();
    record["runner_pid"] = unrelated.0.id().into();
    let dir: PathBuf = of(&other);
    let mut make = std::fs::DirBuilder::new();
    make.recursive(true).mode(0o700).create(&dir).unwrap();
    std::fs::write(dir.join("run.json"), record.to_string()).unwrap();

    let told = test_home.ask(["cancel", &other, "--now"]);
    told.good();
    assert!(
        told.err().contains("marked to be cancelled"),
        "{}",
        told.err()
    );
    // Lock the directory, as a process that cleans it up does.
    let held = std::fs::File::open(&dir).unwrap();
    held.lock().unwrap();
    let told = test_home.ask(["cancel", &other, "--now"]);
    told.good();
    let words = "cannot be shown to be the one it was";
    assert!(told.err().contains(words), "{}", told.err());
    assert!(unrelated.0.try_wait().unwrap().is_none(), "it was ended");
    assert!(!dir.join("cancel").exists());

    // Control: the real runner gets the signal.
    test_home.ask(["cancel", &id]).good();
    assert_eq!(run.finish().code(), 123);
    std::fs::remove_dir_all(dir.parent().unwrap()).unwrap();
}

trial!(Everyone, wait_exits_with_the_code_of_run);
fn wait_exits_with_the_code_of_run() {
    let test_home = TestHome::new();
    let wait = |ids: &[&str]| test_home.ask(["wait"].iter().chain(ids));
    test_home.sh(&["--id", "good"], "true").good();
    assert_eq!(test_home.sh(&["--id", "three"], "exit 3").code(), 3);
    assert_eq!(test_home.sh(&["--id", "killed"], "kill -9 $$").code(), 137);
    assert_eq!(
        test_home
            .sh(&["--id", "lacking", "--expect", "x"], "true")
            .code(),
        120
    );
    assert_eq!(
        test_home
            .sh(&["--id", "slow", "--timeout", "1s"], "sleep 60")
            .code(),
        124
    );
    for (id, code) in [
        ("good", 0),
        ("three", 3),
        ("killed", 137),
        ("lacking", 120),
        ("slow", 124),
    ] {
        assert_eq!(wait(&[id]).code(), code, "{id}");
    }
    let several = wait(&["good", "slow", "three"]);
    assert_eq!(several.code(), 124, "the first that did not succeed");
    assert_eq!(
        several.out(),
        "good succeeded\nslow timed out (wall time)\nthree failed (exit 3)\n"
    );
    assert_eq!(wait(&["three", "slow"]).code(), 3);
    assert_eq!(wait(&["-q", "good", "goo"]).good(), "");
    wait(&["good", "nobody"]).refused(125, "no analysis matches");
    let told = wait(&["--json", "@last", "good"]);
    let document = told.document();
    assert_eq!(
        (told.code(), &document["schema"]),
        (124, &"fumehood.wait/1".into())
    );
    assert_eq!(document["timed_out"], false);
    assert_eq!(document["analyses"][0]["exit"], 124);
    assert_eq!(document["analyses"][1]["status"], "succeeded");
}

/// Starts a program that exits with 5 as soon as the trial has put a file into its workspace.
fn gated(test_home: &TestHome, id: &str) -> (RunningCommand, PathBuf) {
    let script = "echo ready; until [ -e gate ]; do sleep 0.05; done; exit 5";
    let mut run = test_home.start(["--id", id, "--", "sh", "-c", script]);
    run.wait_for("ready");
    (run, test_home.workspace(id).join("gate"))
}

trial!(Everyone, wait_returns_at_the_end_and_at_a_removal);
fn wait_returns_at_the_end_and_at_a_removal() {
    let test_home = TestHome::new();
    let (run, gate) = gated(&test_home, "gated");
    let over = test_home.ask(["wait", "gated", "--timeout", "300ms"]);
    over.refused(119, "the time is over, and one has not ended: gated");
    let over = test_home.ask(["wait", "gated", "--timeout", "0s", "--json"]);
    assert_eq!(
        (over.code(), &over.document()["timed_out"]),
        (119, &true.into())
    );
    let mut wait = test_home.fumehood();
    wait.args(["wait", "gated"]);
    let mut wait = RunningCommand::start(wait);
    std::fs::write(&gate, "").unwrap();
    wait.wait_for("gated failed (exit 5)");
    assert_eq!(wait.finish().code(), 5);
    assert_eq!(run.finish().code(), 5);

    // `wait` must not wait for an analysis that is removed, because it never ends.
    let mut home = HomeWithStore::sqlite();
    home.submit("gone", "ada", 0, 0);
    home.submit("stays", "ada", 0, 0);
    let wait = RunningCommand::start(home.command(&["wait", "gone", "stays"]));
    home.ask(&["cancel", "gone"]).good();
    home.ask(&["cancel", "stays"]).good();
    assert_eq!(wait.finish().code(), 123);
    home.submit("soon", "ada", 0, 0);
    let wait = RunningCommand::start(home.command(&["wait", "soon"]));
    home.ask(&["rm", "--force", "soon"]).good();
    wait.finish().refused(125, "no analysis matches \"soon\"");
}

trial!(Everyone, wait_returns_at_the_end_on_postgresql);
fn wait_returns_at_the_end_on_postgresql() {
    let mut home = HomeWithStore::postgresql();
    home.submit("far", "ada", 0, 0);
    let claimed = home.claim("another-machine");
    let wait = RunningCommand::start(home.command(&["wait", "far", "--json"]));
    home.lose(&claimed, "runner_lost");
    let ended = wait.finish();
    assert_eq!(ended.code(), 125);
    assert_eq!(ended.document()["analyses"][0]["reason"], "runner_lost");
}

trial!(Everyone, an_analysis_whose_retry_is_queued_has_not_ended);
fn an_analysis_whose_retry_is_queued_has_not_ended() {
    let mut home = HomeWithStore::sqlite();
    home.submit("again", "ada", 0, 1);
    let claimed = home.claim("another-machine");
    home.lose(&claimed, "runner_lost");
    let over = home.ask(&["wait", "again", "--timeout", "0s", "--json"]);
    assert_eq!(over.code(), 119, "its next attempt is queued");
    let document = over.document();
    assert_eq!(document["analyses"][0]["attempt"], 2);
    assert_eq!(document["analyses"][0]["status"], "queued");
    let shown = home.ask(&["show", "again", "--events"]).good();
    for fact in ["not before ", "retries      0 left of 1 retry", "retried"] {
        assert!(shown.contains(fact), "no {fact:?} in:\n{shown}");
    }
    let top = home.ask(&["top", "--once"]).good();
    assert!(top.contains("1 queued (1 delayed)"), "{top}");
    assert!(top.contains("tried again in "), "{top}");
    home.ask(&["cancel", "again"]).good();
    assert_eq!(home.ask(&["wait", "again"]).code(), 123);
}

/// A worker that the trial drains at its end.
struct RunningWorker(Child);

impl RunningWorker {
    fn over(home: &HomeWithStore) -> RunningWorker {
        let mut worker = home.command(&["worker", "--slots", "2", "--memory", "1G"]);
        worker.stdout(Stdio::null()).stderr(Stdio::null());
        RunningWorker(worker.spawn().unwrap())
    }

    fn drain(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for RunningWorker {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

trial!(
    Everyone,
    a_workers_attempt_can_be_followed_waited_for_and_cancelled
);
fn a_workers_attempt_can_be_followed_waited_for_and_cancelled() {
    let home = HomeWithStore::sqlite();
    let submit = |id: &str, script: &str| {
        // Without a cgroup, Fumehood only watches a plain user's memory.
        let options = ["submit", "--memory", "64M", "--allow-degraded", "memory"];
        let more = ["--grace", "1h", "--id", id, "--", "sh", "-c", script];
        let args: Vec<&str> = options.into_iter().chain(more).collect();
        home.ask(&args).good();
    };
    submit(
        "talks",
        "echo one; until [ -e gate ]; do sleep 0.05; done; echo two; exit 5",
    );
    // Both commands start before a worker does.
    let mut follow = RunningCommand::start(home.command(&["logs", "-f", "talks"]));
    let wait = RunningCommand::start(home.command(&["wait", "talks"]));
    let working = RunningWorker::over(&home);
    follow.wait_for("one");
    let page = home.ask(&["top"]).good();
    for fact in ["1 running", "1/2", "64 MiB/1 GiB", "talks", "default@"] {
        assert!(page.contains(fact), "no {fact:?} in:\n{page}");
    }
    std::fs::write(home.test_home.workspace("talks").join("gate"), "").unwrap();
    let followed = follow.finish();
    assert_eq!(followed.good(), "one\ntwo\n");
    let words = "talks is queued; waiting for it to start";
    assert!(followed.err().contains(words), "{}", followed.err());
    let waited = wait.finish();
    assert_eq!(
        (waited.code(), waited.out()),
        (5, "talks failed (exit 5)\n".into())
    );

    // The worker, the runner and the command all pass on the same cancellation. It counts once, so the program keeps its grace
    // period.
    submit("patient", ENDS_ON_SIGTERM);
    let mut follow = RunningCommand::start(home.command(&["logs", "-f", "patient"]));
    follow.wait_for("ready");
    home.ask(&["cancel", "patient", "--wait"]).good();
    home.ask(&["cancel", "patient"])
        .refused(125, "had ended before (cancelled)");
    follow.finish().good();
    let shown = home.json(&["show", "patient", "--json"]);
    assert_eq!(
        (&shown["status"], &shown["complete"]),
        (&"cancelled".into(), &false.into())
    );
    assert_eq!(shown["outputs"][0]["path"], "out");

    home.ask(&["retry", "patient"]).good();
    let mut follow = RunningCommand::start(home.command(&["logs", "-f", "patient"]));
    follow.wait_for("ready");
    home.ask(&["cancel", "patient", "--wait"]).good();
    follow.finish().good();
    let shown = home.ask(&["show", "patient", "--events"]).good();
    for fact in [
        "patient@2",
        "submitted",
        "claimed",
        "started",
        "retried",
        "committed",
    ] {
        assert!(shown.contains(fact), "no {fact:?} in:\n{shown}");
    }
    working.drain();
    home.test_home.assert_nothing_left();
}

trial!(Everyone, retry_names_the_command_to_use_instead);
fn retry_names_the_command_to_use_instead() {
    let mut home = HomeWithStore::sqlite();
    home.test_home.sh(&["--id", "typed"], "true").good();
    home.ask(&["retry", "typed"])
        .refused(125, "use `fumehood run --id typed --replace`");
    home.submit("sent", "ada", 3, 0);
    let refused = home.ask(&["retry", "sent"]);
    refused.refused(125, "cancel it first");
    assert!(!refused.err().contains("database"), "{}", refused.err());
    home.ask(&["cancel", "sent"]).good();
    // `retry` reports the analysis that cannot be retried, and queues the others.
    let both = home.ask(&["retry", "typed", "sent", "--json"]);
    assert_eq!(both.code(), 125);
    let document = both.document();
    assert_eq!(document["queued"][0]["id"], "sent");
    assert_eq!(document["queued"][0]["attempt"], 2);
    assert_eq!(document["refused"][0]["id"], "typed");
    assert_eq!(home.status("sent"), "queued");
    let listed = home.ask(&["list"]).good();
    assert!(listed.contains("sent@2  queued"), "{listed}");
}

trial!(Everyone, top_prints_once_without_a_terminal);
fn top_prints_once_without_a_terminal() {
    let mut home = HomeWithStore::sqlite();
    let empty = home.ask(&["top"]).good();
    assert!(
        empty.starts_with("0 running, 0 queued, 0 workers"),
        "{empty}"
    );
    home.test_home.sh(&["--id", "past"], "exit 3");
    home.submit("busy", "\u{1b}[31mada", 0, 0);
    home.claim("another-machine");
    home.submit("later", "ada", 7, 0);
    home.submit("latest", "ada", 1, 0);
    let (run, gate) = gated(&home.test_home, "here");
    let page = home.ask(&["top"]).good();
    assert!(page.starts_with("2 running, 2 queued, 0 workers"), "{page}");
    assert!(!page.contains('\u{1b}'), "{page}");
    for fact in [
        "busy",
        "\\x1b[31mada",
        "bench@another-",
        "later",
        "past",
        "failed (exit 3)",
    ] {
        assert!(page.contains(fact), "no {fact:?} in:\n{page}");
    }
    assert!(
        page.find("later").unwrap() < page.find("latest").unwrap(),
        "{page}"
    );
    let document = home.json(&["top", "--json"]);
    assert_eq!(document["schema"], "fumehood.top/1");
    assert_eq!(document["next"][0]["id"], "later");
    assert_eq!(document["running"], 2);
    let busy = document["busy"].as_array().unwrap();
    let here = busy.iter().find(|b| b["id"] == "here").unwrap();
    let counts = std::path::Path::new("/sys/fs/cgroup").exists() && is_root();
    assert_eq!(here["memory_bytes"].is_u64(), counts, "{here}");
    std::fs::write(&gate, "").unwrap();
    assert_eq!(run.finish().code(), 5);
    home.ask(&["top", "--interval", "1ms"])
        .refused(125, "--interval must be at least");
}

/// Runs `fumehood top` on a pseudo-terminal, acts on it after the first frame, and reports how it ended, whether the terminal
/// settings are restored, and what it drew.
const ON_A_TERMINAL: &str = r#"
import json, os, pty, select, signal, sys, termios, fcntl, struct
how = sys.argv[1]
main, side = pty.openpty()
fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
before = termios.tcgetattr(side)
pid = os.fork()
if pid == 0:
    os.setsid()
    fcntl.ioctl(side, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2): os.dup2(side, fd)
    os.environ["TERM"] = "xterm"
    os.execv(sys.argv[2], sys.argv[2:])
drawn = b""
def until(what):
    global drawn
    while what not in drawn:
        ready, _, _ = select.select([main], [], [], 60)
        assert ready, drawn
        drawn += os.read(main, 65536)
until(b"q quits")
raw = not termios.tcgetattr(side)[3] & termios.ECHO
if how == "size":
    drawn = b""
    fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 20, 0, 0))
    # What was being drawn is still the old size.
    fitting = []
    while not fitting:
        ready, _, _ = select.select([main], [], [], 60)
        assert ready, drawn
        drawn += os.read(main, 65536)
        whole = drawn.split(b"\x1b[?2026l")[:-1]
        fitting = [frame for frame in whole[1:] if frame.count(b"\r\n") < 5]
    small = fitting[0]
    how = "q"
else:
    small = b""
if how == "q": os.write(main, b"q")
if how == "ctrl-c": os.write(main, b"\x03")
if how == "term": os.kill(pid, signal.SIGTERM)
until(b"\x1b[?1049l")
_, status = os.waitpid(pid, 0)
print(json.dumps({"code": os.waitstatus_to_exitcode(status), "raw": raw, "as_before": termios.tcgetattr(side) == before,
    "drawn": drawn.decode(), "small": small.decode()}))
"#;

trial!(Everyone, top_restores_the_terminal);
fn top_restores_the_terminal() {
    let mut home = HomeWithStore::sqlite();
    home.submit("one-that-has-a-long-name", "ada", 0, 0);
    for (how, code) in [("q", 0), ("ctrl-c", 0), ("term", 143), ("size", 0)] {
        let top = home.command(&["top"]);
        let mut python = home
            .test_home
            .with_environment(Command::new("/usr/bin/python3"));
        python
            .args(["-c", ON_A_TERMINAL, how])
            .arg(top.get_program());
        python.args(top.get_args());
        let ended = finish(python);
        ended.good();
        let told = ended.document();
        assert_eq!(told["code"], code, "{how}: {told}");
        assert_eq!(
            (&told["raw"], &told["as_before"]),
            (&true.into(), &true.into()),
            "{how}"
        );
        let small = told["small"].as_str().unwrap();
        if how == "size" {
            assert!(small.split("\r\n").count() <= 5, "{small:?}");
            assert!(small.contains("one-that-has-a-long"), "{small:?}");
            assert!(!small.contains("one-that-has-a-long-"), "{small:?}");
        } else {
            let drawn = told["drawn"].as_str().unwrap();
            assert!(drawn.contains("one-that-has-a-long-name"), "{drawn:?}");
        }
    }
    eventually("nothing holds the database", || {
        home.ask(&["list"]).status.success()
    });
}
