//! The commands around the queue: what they tell, what they exit with, and whom they end.

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

use crate::lab::{Ended, Lab, Live, eventually, finish, fresh_id};
use crate::postgres::Bench;
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "what_is_queued_is_shown_and_can_be_cancelled",
        For::Everyone,
        queued,
    ),
    (
        "what_is_queued_is_shown_and_can_be_cancelled_on_postgresql",
        For::Everyone,
        queued_on_postgresql,
    ),
    (
        "what_a_worker_has_is_shown_and_marked_to_be_cancelled",
        For::Everyone,
        claimed,
    ),
    (
        "a_foreground_run_is_cancelled_with_its_grace",
        For::Everyone,
        foreground,
    ),
    (
        "a_run_without_a_record_is_cancelled",
        For::Everyone,
        unrecorded,
    ),
    (
        "only_the_runner_itself_is_signalled",
        For::Everyone,
        forged_runner,
    ),
    ("wait_exits_as_run_would_have", For::Everyone, wait_codes),
    (
        "wait_hears_of_the_end_and_of_a_removal",
        For::Everyone,
        wait_live,
    ),
    (
        "wait_hears_of_the_end_on_postgresql",
        For::Everyone,
        wait_on_postgresql,
    ),
    (
        "one_that_is_tried_again_has_not_ended",
        For::Everyone,
        tried_again,
    ),
    (
        "what_a_worker_runs_is_followed_waited_for_and_cancelled",
        For::Everyone,
        by_a_worker,
    ),
    ("retry_says_what_to_do_instead", For::Everyone, retried),
    (
        "top_prints_once_where_nobody_looks",
        For::Everyone,
        top_once,
    ),
    ("top_gives_the_terminal_back", For::Everyone, top_live),
];

/// A lab and its database, as the commands see it and as the library does.
struct Desk {
    lab: Lab,
    url: Option<String>,
    store: Store,
}

impl Desk {
    fn sqlite() -> Desk {
        let lab = Lab::new();
        lab.ask(["list"]).good();
        let location = Location::Sqlite(lab.home.join("fumehood.db"));
        Desk {
            store: Store::open(&location).unwrap(),
            lab,
            url: None,
        }
    }

    fn postgresql() -> Desk {
        let Bench { lab, url, .. } = Bench::new();
        let env: Environment = &|_| None;
        let location = Location::parse(&url, LocationOrigin::Environment, env).unwrap();
        Desk {
            store: Store::open(&location).unwrap(),
            lab,
            url: Some(url),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.lab.fumehood();
        command.args(args);
        if let Some(url) = &self.url {
            command.env("FUMEHOOD_DB", url);
        }
        command
    }

    fn ask(&self, args: &[&str]) -> Ended {
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

    /// Takes the next one, as a worker on some machine would.
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

fn queued() {
    shown_and_cancelled(Desk::sqlite());
}

fn queued_on_postgresql() {
    shown_and_cancelled(Desk::postgresql());
}

fn shown_and_cancelled(mut desk: Desk) {
    for id in ["first", "second", "third"] {
        desk.submit(id, "ada", 5, 2);
    }
    let listed = desk.ask(&["list"]).good();
    assert!(listed.contains("third   queued"), "{listed}");
    assert!(!listed.contains(" on "), "{listed}");

    let shown = desk.ask(&["show", "third", "--events"]).good();
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
    let document = desk.json(&["show", "first", "--json"]);
    assert_eq!(document["schema"], "fumehood.show/1");
    assert_eq!(document["queue"]["priority"], 5);
    assert_eq!(document["queue"]["ahead"], 0);
    assert_eq!(document["queue"]["retry_on"][0], "timed_out");
    assert_eq!(document["events"][0]["event"], "submitted");
    assert_eq!(document["host"], "");

    desk.ask(&["rm", "first"])
        .refused(125, "cancel it first, with `fumehood cancel first`");
    desk.ask(&["logs", "first"])
        .refused(125, "has printed nothing yet; -f waits for it");
    desk.ask(&["gc"]).good();
    assert_eq!(desk.status("first"), "queued", "gc leaves it where it is");

    // The beginning of an id is enough, and one that is named twice is meant once.
    let cancelled = desk.json(&["cancel", "fir", "first", "--json"]);
    assert_eq!(cancelled["schema"], "fumehood.cancel/1");
    assert_eq!(cancelled["analyses"].as_array().unwrap().len(), 1);
    assert_eq!(cancelled["analyses"][0]["came_of_it"], "cancelled");
    assert_eq!(desk.status("first"), "cancelled");
    let told = desk.ask(&["cancel", "second"]);
    told.good();
    assert!(
        told.err().contains("second is cancelled; it never ran"),
        "{}",
        told.err()
    );
    desk.ask(&["cancel", "second", "third"])
        .refused(125, "second had ended before (cancelled)");
    assert_eq!(
        desk.status("third"),
        "cancelled",
        "the others are cancelled all the same"
    );
    desk.ask(&["cancel", "nobody"])
        .refused(125, "no analysis matches");

    let waited = desk.ask(&["wait", "first"]);
    assert_eq!(
        (waited.code(), waited.out()),
        (123, "first cancelled\n".into())
    );
    let story = desk.ask(&["show", "first", "--events"]).good();
    assert!(story.contains("cancelled"), "{story}");
    desk.ask(&["rm", "first"]).good();
}

fn claimed() {
    let mut desk = Desk::sqlite();
    desk.submit("far", "ada", 0, 0);
    let claimed = desk.claim("another-machine");
    let shown = desk.ask(&["show", "far", "--events"]).good();
    for fact in ["status       running\n", "worker       bench\n", "claimed"] {
        assert!(shown.contains(fact), "no {fact:?} in:\n{shown}");
    }
    let told = desk.ask(&["cancel", "far"]);
    told.good();
    let words = "marked to be cancelled; its runner on another-machine will hear of it";
    assert!(told.err().contains(words), "{}", told.err());
    let held = desk.store.requested_cancels("another-machine").unwrap();
    assert_eq!(held, [("far".to_owned(), 1, claimed.key.clone())]);
    desk.ask(&["cancel", "far"]).good();
    let shown = desk.ask(&["show", "far"]).good();
    assert!(shown.contains("cancel       asked for by "), "{shown}");
    desk.ask(&["logs", "far"])
        .refused(125, "is running on another-machine");
}

/// Says `ready` on stdout, and on SIGTERM writes an output and ends; but only then.
const PATIENT: &str =
    "trap 'echo bye > out; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
/// Takes no notice of SIGTERM.
const STUBBORN: &str = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done";

fn foreground() {
    let lab = Lab::new();
    let id = fresh_id("patient");
    let mut run = lab.start(["--id", &id, "--", "sh", "-c", PATIENT]);
    run.wait_for("ready");
    let told = lab.ask(["cancel", &id, "--wait"]);
    told.good();
    assert!(told.err().contains("is being cancelled"), "{}", told.err());
    assert_eq!(run.end().code(), 123);
    let shown = lab.ask_json(["show", &id, "--json"]);
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
    let mut run = lab.start(["--id", &id, "--grace", "1h", "--", "sh", "-c", STUBBORN]);
    run.wait_for("ready");
    lab.ask(["cancel", &id]).good();
    run.wait_for("heard");
    // A second wish is no impatience, a third neither: it would be dead.
    lab.ask(["cancel", &id]).good();
    lab.ask(["cancel", &id]).good();
    let list = lab.ask_json(["list", "--json", "--status", "running"]);
    assert_eq!(list["analyses"][0]["id"], id.as_str());
    lab.ask(["cancel", &id, "--now", "--wait"]).good();
    assert_eq!(run.end().code(), 123);
    lab.assert_nothing_left();
}

fn unrecorded() {
    let lab = Lab::new();
    let id = fresh_id("unrecorded");
    let mut run = lab.start(["--db", "none", "--id", &id, "--", "sh", "-c", PATIENT]);
    run.wait_for("ready");
    lab.ask(["cancel", &id]).good();
    assert_eq!(run.end().code(), 123);
    lab.ask(["cancel", &id]).refused(125, "no analysis matches");
    lab.ask(["cancel", "--db", "none", &id])
        .refused(125, "does not run here");
    lab.assert_nothing_left();
}

/// A process that must not be ended.
struct Bystander(Child);

impl Bystander {
    fn new() -> Bystander {
        let child = Command::new("sleep")
            .arg("3600")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Bystander(child)
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

/// A runner's record outlives it, and its pid becomes another's; whoever cancels must not end that one. Neither while
/// nobody holds the directory nor while somebody else, who cleans it up, does.
fn forged_runner() {
    let lab = Lab::new();
    let id = fresh_id("forged");
    let mut run = lab.start(["--id", &id, "--", "sh", "-c", PATIENT]);
    run.wait_for("ready");
    let of = |id: &str| lab.home.join("runs").join(id).join("1");
    let text = std::fs::read_to_string(of(&id).join("run.json")).unwrap();
    let mut bystander = Bystander::new();
    let mut record: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(record["runner_pid"], run.pid());

    // The same in another analysis's name: a row that runs here, and a record that names the bystander.
    let other = fresh_id("other");
    let location = Location::Sqlite(lab.home.join("fumehood.db"));
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
    record["runner_pid"] = bystander.0.id().into();
    let dir: PathBuf = of(&other);
    let mut make = std::fs::DirBuilder::new();
    make.recursive(true).mode(0o700).create(&dir).unwrap();
    std::fs::write(dir.join("run.json"), record.to_string()).unwrap();

    let told = lab.ask(["cancel", &other, "--now"]);
    told.good();
    assert!(
        told.err().contains("marked to be cancelled"),
        "{}",
        told.err()
    );
    // Locked, as if a reaper were at it.
    let held = std::fs::File::open(&dir).unwrap();
    held.lock().unwrap();
    let told = lab.ask(["cancel", &other, "--now"]);
    told.good();
    let words = "cannot be shown to be the one it was";
    assert!(told.err().contains(words), "{}", told.err());
    assert!(bystander.0.try_wait().unwrap().is_none(), "it was ended");
    assert!(!dir.join("cancel").exists());

    // The control: the real one hears of it.
    lab.ask(["cancel", &id]).good();
    assert_eq!(run.end().code(), 123);
    std::fs::remove_dir_all(dir.parent().unwrap()).unwrap();
}

fn wait_codes() {
    let lab = Lab::new();
    let wait = |ids: &[&str]| lab.ask(["wait"].iter().chain(ids));
    lab.sh(&["--id", "good"], "true").good();
    assert_eq!(lab.sh(&["--id", "three"], "exit 3").code(), 3);
    assert_eq!(lab.sh(&["--id", "killed"], "kill -9 $$").code(), 137);
    assert_eq!(
        lab.sh(&["--id", "lacking", "--expect", "x"], "true").code(),
        120
    );
    assert_eq!(
        lab.sh(&["--id", "slow", "--timeout", "1s"], "sleep 60")
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

/// Ends with 5 as soon as a file is in its workspace that the trial puts there.
fn gated(lab: &Lab, id: &str) -> (Live, PathBuf) {
    let script = "echo ready; until [ -e gate ]; do sleep 0.05; done; exit 5";
    let mut run = lab.start(["--id", id, "--", "sh", "-c", script]);
    run.wait_for("ready");
    (run, lab.workspace(id).join("gate"))
}

fn wait_live() {
    let lab = Lab::new();
    let (run, gate) = gated(&lab, "gated");
    let over = lab.ask(["wait", "gated", "--timeout", "300ms"]);
    over.refused(119, "the time is over, and one has not ended: gated");
    let over = lab.ask(["wait", "gated", "--timeout", "0s", "--json"]);
    assert_eq!(
        (over.code(), &over.document()["timed_out"]),
        (119, &true.into())
    );
    let mut wait = lab.fumehood();
    wait.args(["wait", "gated"]);
    let mut wait = Live::start(wait);
    std::fs::write(&gate, "").unwrap();
    wait.wait_for("gated failed (exit 5)");
    assert_eq!(wait.end().code(), 5);
    assert_eq!(run.end().code(), 5);

    // One that somebody removes will never end.
    let mut desk = Desk::sqlite();
    desk.submit("gone", "ada", 0, 0);
    desk.submit("stays", "ada", 0, 0);
    let wait = Live::start(desk.command(&["wait", "gone", "stays"]));
    desk.ask(&["cancel", "gone"]).good();
    desk.ask(&["cancel", "stays"]).good();
    assert_eq!(wait.end().code(), 123);
    desk.submit("soon", "ada", 0, 0);
    let wait = Live::start(desk.command(&["wait", "soon"]));
    desk.ask(&["rm", "--force", "soon"]).good();
    wait.end().refused(125, "no analysis matches \"soon\"");
}

fn wait_on_postgresql() {
    let mut desk = Desk::postgresql();
    desk.submit("far", "ada", 0, 0);
    let claimed = desk.claim("another-machine");
    let wait = Live::start(desk.command(&["wait", "far", "--json"]));
    desk.lose(&claimed, "runner_lost");
    let ended = wait.end();
    assert_eq!(ended.code(), 125);
    assert_eq!(ended.document()["analyses"][0]["reason"], "runner_lost");
}

fn tried_again() {
    let mut desk = Desk::sqlite();
    desk.submit("again", "ada", 0, 1);
    let claimed = desk.claim("another-machine");
    desk.lose(&claimed, "runner_lost");
    let over = desk.ask(&["wait", "again", "--timeout", "0s", "--json"]);
    assert_eq!(over.code(), 119, "its next attempt is queued");
    let document = over.document();
    assert_eq!(document["analyses"][0]["attempt"], 2);
    assert_eq!(document["analyses"][0]["status"], "queued");
    let shown = desk.ask(&["show", "again", "--events"]).good();
    for fact in ["not before ", "retries      0 left of 1 retry", "retried"] {
        assert!(shown.contains(fact), "no {fact:?} in:\n{shown}");
    }
    let top = desk.ask(&["top", "--once"]).good();
    assert!(top.contains("1 queued (1 delayed)"), "{top}");
    assert!(top.contains("tried again in "), "{top}");
    desk.ask(&["cancel", "again"]).good();
    assert_eq!(desk.ask(&["wait", "again"]).code(), 123);
}

/// A worker of the trial's own, drained at its end.
struct Working(Child);

impl Working {
    fn over(desk: &Desk) -> Working {
        let mut worker = desk.command(&["worker", "--slots", "2", "--memory", "1G"]);
        worker.stdout(Stdio::null()).stderr(Stdio::null());
        Working(worker.spawn().unwrap())
    }

    fn drain(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

fn by_a_worker() {
    let desk = Desk::sqlite();
    let submit = |id: &str, script: &str| {
        // A plain user's memory is watched at best.
        let options = ["submit", "--memory", "64M", "--allow-degraded", "memory"];
        let more = ["--grace", "1h", "--id", id, "--", "sh", "-c", script];
        let args: Vec<&str> = options.into_iter().chain(more).collect();
        desk.ask(&args).good();
    };
    submit(
        "talks",
        "echo one; until [ -e gate ]; do sleep 0.05; done; echo two; exit 5",
    );
    // Both begin before there is a worker.
    let mut follow = Live::start(desk.command(&["logs", "-f", "talks"]));
    let wait = Live::start(desk.command(&["wait", "talks"]));
    let working = Working::over(&desk);
    follow.wait_for("one");
    let page = desk.ask(&["top"]).good();
    for fact in ["1 running", "1/2", "64 MiB/1 GiB", "talks", "default@"] {
        assert!(page.contains(fact), "no {fact:?} in:\n{page}");
    }
    std::fs::write(desk.lab.workspace("talks").join("gate"), "").unwrap();
    let followed = follow.end();
    assert_eq!(followed.good(), "one\ntwo\n");
    let words = "talks is queued; waiting for it to start";
    assert!(followed.err().contains(words), "{}", followed.err());
    let waited = wait.end();
    assert_eq!(
        (waited.code(), waited.out()),
        (5, "talks failed (exit 5)\n".into())
    );

    // Worker, runner and command all tell of the same wish, and it still has its grace.
    submit("patient", PATIENT);
    let mut follow = Live::start(desk.command(&["logs", "-f", "patient"]));
    follow.wait_for("ready");
    desk.ask(&["cancel", "patient", "--wait"]).good();
    desk.ask(&["cancel", "patient"])
        .refused(125, "had ended before (cancelled)");
    follow.end().good();
    let shown = desk.json(&["show", "patient", "--json"]);
    assert_eq!(
        (&shown["status"], &shown["complete"]),
        (&"cancelled".into(), &false.into())
    );
    assert_eq!(shown["outputs"][0]["path"], "out");

    desk.ask(&["retry", "patient"]).good();
    let mut follow = Live::start(desk.command(&["logs", "-f", "patient"]));
    follow.wait_for("ready");
    desk.ask(&["cancel", "patient", "--wait"]).good();
    follow.end().good();
    let shown = desk.ask(&["show", "patient", "--events"]).good();
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
    desk.lab.assert_nothing_left();
}

fn retried() {
    let mut desk = Desk::sqlite();
    desk.lab.sh(&["--id", "typed"], "true").good();
    desk.ask(&["retry", "typed"])
        .refused(125, "use `fumehood run --id typed --replace`");
    desk.submit("sent", "ada", 3, 0);
    let refused = desk.ask(&["retry", "sent"]);
    refused.refused(125, "cancel it first");
    assert!(!refused.err().contains("database"), "{}", refused.err());
    desk.ask(&["cancel", "sent"]).good();
    // One that cannot be is told of, and the others are queued.
    let both = desk.ask(&["retry", "typed", "sent", "--json"]);
    assert_eq!(both.code(), 125);
    let document = both.document();
    assert_eq!(document["queued"][0]["id"], "sent");
    assert_eq!(document["queued"][0]["attempt"], 2);
    assert_eq!(document["refused"][0]["id"], "typed");
    assert_eq!(desk.status("sent"), "queued");
    let listed = desk.ask(&["list"]).good();
    assert!(listed.contains("sent@2  queued"), "{listed}");
}

fn top_once() {
    let mut desk = Desk::sqlite();
    let empty = desk.ask(&["top"]).good();
    assert!(
        empty.starts_with("0 running, 0 queued, 0 workers"),
        "{empty}"
    );
    desk.lab.sh(&["--id", "past"], "exit 3");
    desk.submit("busy", "\u{1b}[31mada", 0, 0);
    desk.claim("another-machine");
    desk.submit("later", "ada", 7, 0);
    desk.submit("latest", "ada", 1, 0);
    let (run, gate) = gated(&desk.lab, "here");
    let page = desk.ask(&["top"]).good();
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
    let document = desk.json(&["top", "--json"]);
    assert_eq!(document["schema"], "fumehood.top/1");
    assert_eq!(document["next"][0]["id"], "later");
    assert_eq!(document["running"], 2);
    let busy = document["busy"].as_array().unwrap();
    let here = busy.iter().find(|b| b["id"] == "here").unwrap();
    let counts = std::path::Path::new("/sys/fs/cgroup").exists() && crate::lab::is_root();
    assert_eq!(here["memory_bytes"].is_u64(), counts, "{here}");
    std::fs::write(&gate, "").unwrap();
    assert_eq!(run.end().code(), 5);
    desk.ask(&["top", "--interval", "1ms"])
        .refused(125, "--interval must be at least");
}

/// Runs `fumehood top` on a terminal of its own, does something to it once the first frame is there, and tells how it
/// ended, whether the terminal is as it was, and what was drawn.
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

fn top_live() {
    let mut desk = Desk::sqlite();
    desk.submit("one-that-has-a-long-name", "ada", 0, 0);
    for (how, code) in [("q", 0), ("ctrl-c", 0), ("term", 143), ("size", 0)] {
        let top = desk.command(&["top"]);
        let mut python = desk.lab.with_surroundings(Command::new("/usr/bin/python3"));
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
        desk.ask(&["list"]).status.success()
    });
}
