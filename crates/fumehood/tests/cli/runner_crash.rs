//! P5 and P12 through the binary: if a runner is killed at any moment, its analysis dies too, and the next run removes what
//! both left.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use testkit::command::finish;
use testkit::home::{TestHome, set_mode};
use testkit::process::{cgroups_of, names_in, processes_with};
use testkit::program;
use testkit::wait::eventually;
use testkit::{fresh_id, trial};

/// A program that makes files all the time, so that a kill always interrupts a change.
const BUSY: &str = "i=0; while :; do i=$((i+1)); mkdir -p d$i; echo x > d$i/f; done";

/// Small numbers that look random and are the same in every run.
struct RandomNumbers(u64);

impl RandomNumbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// Asserts that no file, cgroup or process with this id exists.
#[track_caller]
fn assert_no_trace(test_home: &TestHome, id: &str) {
    test_home.assert_nothing_left();
    let groups = cgroups_of(id);
    assert!(groups.is_empty(), "{groups:?}");
    assert_eq!(processes_with(id), [0u32; 0], "processes");
}

trial!(Everyone, a_runner_killed_at_a_random_moment_leaves_nothing);
fn a_runner_killed_at_a_random_moment_leaves_nothing() {
    let test_home = TestHome::new();
    let mut random = RandomNumbers(2);
    let stem = fresh_id("crash");
    let (mut unmade, mut halfway) = (0, 0);
    for turn in 0..30 {
        let id = format!("{stem}-{turn}");
        let mut live = test_home.start(["--id", &id, "--", "sh", "-c", BUSY, &id]);
        // This sleep waits for no event. It varies the moment of the interruption.
        std::thread::sleep(Duration::from_micros(random.below(60_000)));
        live.signal(Signal::KILL);
        live.child.wait().unwrap();
        match test_home.workspaces().is_empty() {
            true => unmade += 1,
            false => halfway += 1,
        }
        // The next run cleans up. It has the same id or another one.
        let next = if turn % 2 == 0 { id.as_str() } else { "next" };
        test_home.sh(&["--id", next, "--replace"], "true").good();
        assert_no_trace(&test_home, &id);
    }
    assert!(
        unmade > 0 && halfway > 0,
        "{unmade} early, {halfway} late: no spread"
    );
}

trial!(Everyone, a_runner_killed_while_it_cleans_up_leaves_nothing);
fn a_runner_killed_while_it_cleans_up_leaves_nothing() {
    let test_home = TestHome::new();
    let mut random = RandomNumbers(5);
    let stem = fresh_id("end");
    for turn in 0..10 {
        let id = format!("{stem}-{turn}");
        let script = "for i in 1 2 3 4 5 6 7 8; do mkdir -p $i/a/b; : > $i/a/b/c; done; echo last";
        let mut live = test_home.start(["--id", &id, "--", "sh", "-c", script, &id]);
        live.wait_for("last");
        // This sleep waits for no event. It varies the moment of the interruption.
        std::thread::sleep(Duration::from_micros(random.below(15_000)));
        // The runner may have ended already. Then nothing is left either.
        live.signal(Signal::KILL);
        live.child.wait().unwrap();
        test_home.sh(&["--id", &id, "--replace"], "true").good();
        assert_no_trace(&test_home, &id);
    }
}

/// Asserts, after a runner was killed while it kept its workspace, that the next run finishes this work. The kept
/// workspace is then complete and can be removed.
#[track_caller]
fn assert_keep_finished(test_home: &TestHome, id: &str) {
    test_home.sh(&["--id", "next", "--replace"], "true").good();
    let groups = cgroups_of(id);
    assert!(groups.is_empty(), "{groups:?}");
    let kept = test_home.workspace(id);
    if kept.exists() {
        let result = std::fs::read(kept.join("result")).unwrap();
        assert_eq!(result, b"kept\n");
        test_home.gc(&["--kept", id]).good();
    }
    assert_no_trace(test_home, id);
}

trial!(
    Everyone,
    a_runner_killed_while_it_keeps_the_workspace_leaves_no_cgroup
);
fn a_runner_killed_while_it_keeps_the_workspace_leaves_no_cgroup() {
    let test_home = TestHome::new();
    let stem = fresh_id("keep");
    let script = "echo kept > result; mkdir -p a/b; : > a/b/c; echo last";
    let args = |id: &str| {
        let options = ["--keep", "always", "--id", id, "--", "sh", "-c", script, id];
        options.map(String::from)
    };
    let mut random = RandomNumbers(11);
    for turn in 0..8 {
        let id = format!("{stem}-{turn}");
        let mut live = test_home.start(args(&id));
        live.wait_for("last");
        // This sleep waits for no event. It varies the moment of the interruption.
        std::thread::sleep(Duration::from_micros(random.below(15_000)));
        live.signal(Signal::KILL);
        live.child.wait().unwrap();
        assert_keep_finished(&test_home, &id);
    }
    if !Path::new("/usr/bin/strace").exists() {
        return;
    }
    // The runner keeps a workspace in several system calls: it removes cgroups, replaces the record and changes the
    // tree's owner. Kill the runner just before each of these calls.
    let kill_points = kill_points_of_keeping(&test_home, &args(&format!("{stem}-dry")));
    let (mut killed, all) = (0, kill_points.len());
    for (call, nth) in kill_points {
        let id = format!("{stem}-{call}-{nth}");
        let inject = format!("inject={call}:signal=SIGKILL:when={nth}");
        let ended = finish(traced(&test_home, &["-e", &inject], &args(&id)));
        killed += usize::from(ended.status.signal() == Some(Signal::KILL.as_raw()));
        assert_keep_finished(&test_home, &id);
    }
    // The removal of a busy cgroup is repeated a varying number of times, so the number of a call can differ.
    assert!(killed * 2 > all, "only {killed} of {all} were killed");
}

/// `fumehood run ARGS` under strace, which traces only the runner and ends as the runner does.
fn traced(test_home: &TestHome, options: &[&str], args: &[String]) -> Command {
    let mut command = test_home.with_environment(Command::new("/usr/bin/strace"));
    command.args(["-qq", "-e", "signal=none"]).args(options);
    command.arg(program::binary()).arg("run");
    command.args(args);
    command
}

/// The system calls by which a run keeps its workspace. Each has its name, and its number among the calls of that name.
fn kill_points_of_keeping(test_home: &TestHome, args: &[String]) -> Vec<(String, usize)> {
    const CALLS: [&str; 5] = ["unlinkat", "renameat", "fchmod", "fchown", "fchownat"];
    let log = test_home.path("strace");
    let trace = format!("trace={}", CALLS.join(","));
    let options = ["-e", &trace, "-o", log.to_str().unwrap()];
    finish(traced(test_home, &options, args)).good();
    test_home.gc(&["--kept"]).good();
    let log = std::fs::read_to_string(log).unwrap();
    let calls: Vec<&str> = log.lines().filter_map(|l| l.split('(').next()).collect();
    // A run removes its cgroups first. Without cgroups it replaces the record first.
    let first = calls.iter().position(|call| *call == "unlinkat").unwrap();
    let saved = calls.iter().rposition(|call| *call == "renameat").unwrap();
    let numbered = calls.iter().enumerate().map(|(at, call)| {
        let nth = calls[..=at].iter().filter(|c| *c == call).count();
        (String::from(*call), nth)
    });
    numbered.skip(first.min(saved)).collect()
}

trial!(Everyone, the_processes_of_a_killed_runner_die);
fn the_processes_of_a_killed_runner_die() {
    let test_home = TestHome::new();
    let id = fresh_id("middle");
    // Start a daemon, a stopped process and an orphan. None of them survives the runner.
    let script =
        "setsid sleep 600 $0 & sh -c 'kill -STOP $$' $0 & (sleep 600 $0 &) ; echo up; sleep 600";
    let script = script.replace("sleep 600 $0", "sh -c 'while :; do sleep 1; done' $0");
    let mut live = test_home.start(["--id", &id, "--", "sh", "-c", &script, &id]);
    live.wait_for("up");
    eventually("all are up", || processes_with(&id).len() >= 4);
    live.signal(Signal::KILL);
    live.child.wait().unwrap();
    eventually("all are dead", || processes_with(&id).is_empty());
    assert_eq!(
        names_in(&test_home.home.join("runs")).len(),
        1,
        "the record of the dead"
    );
    test_home.sh(&[], "true").good();
    assert_no_trace(&test_home, &id);
}

trial!(Everyone, gc_finishes_what_a_dead_runner_left);
fn gc_finishes_what_a_dead_runner_left() {
    let test_home = TestHome::new();
    let id = fresh_id("gc");
    let mut live = test_home.start([
        "--keep",
        "always",
        "--id",
        &id,
        "--",
        "sh",
        "-c",
        "echo up; sleep 600",
        &id,
    ]);
    live.wait_for("up");
    // `gc` leaves a live run alone.
    test_home.gc(&[]).good();
    test_home.gc(&["--kept"]).good();
    assert!(test_home.workspace(&id).exists());
    live.signal(Signal::KILL);
    live.child.wait().unwrap();
    let gc = test_home.gc(&[]);
    gc.good();
    assert!(gc.err().contains("removed"), "{}", gc.err());
    assert_no_trace(&test_home, &id);
    assert_eq!(test_home.gc(&[]).good(), "");
}

trial!(
    Everyone,
    a_damaged_run_record_is_reported_and_stops_no_other_run
);
fn a_damaged_run_record_is_reported_and_stops_no_other_run() {
    let test_home = TestHome::new();
    let victim = test_home.write("victim/precious", "x");
    let dir = test_home.home.join("runs/odd/1");
    test_home.sh(&[], "true").good();
    for text in ["", "{", "[]", "{\"version\":99}"] {
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("run.json"), text).unwrap();
        set_mode(&test_home.home.join("runs/odd"), 0o700);
        test_home.sh(&["--id", "fine", "--replace"], "true").good();
        let gc = test_home.gc(&[]);
        assert_eq!(gc.code(), 125, "{text}: {}", gc.err());
        assert!(gc.err().contains("could not clean up"), "{}", gc.err());
    }
    assert!(victim.exists());
}
