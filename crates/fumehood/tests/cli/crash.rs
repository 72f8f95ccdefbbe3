//! P5 and P12 through the binary: a runner killed at any moment takes its analysis along, and the next run leaves
//! nothing of either.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::lab::{Lab, cgroups_of, eventually, finish, fresh_id, names_in, processes_with};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "killed_at_any_moment_nothing_stays",
        For::Everyone,
        any_moment,
    ),
    (
        "killed_while_it_cleans_up_nothing_stays",
        For::Everyone,
        in_the_end,
    ),
    (
        "killed_while_it_keeps_no_cgroup_stays",
        For::Everyone,
        while_it_keeps,
    ),
    (
        "killed_in_the_middle_its_processes_die",
        For::Everyone,
        in_the_middle,
    ),
    (
        "gc_finishes_what_a_dead_runner_left",
        For::Everyone,
        gc_finishes,
    ),
    (
        "a_damaged_record_is_told_and_harms_nothing",
        For::Everyone,
        damaged_record,
    ),
];

/// A program that keeps making files, so that there is always something half made.
const BUSY: &str = "i=0; while :; do i=$((i+1)); mkdir -p d$i; echo x > d$i/f; done";

/// Small numbers that look random and are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// Nothing anywhere: neither files, cgroups nor processes that bear the id.
#[track_caller]
fn assert_no_trace(lab: &Lab, id: &str) {
    lab.assert_nothing_left();
    let groups = cgroups_of(id);
    assert!(groups.is_empty(), "{groups:?}");
    assert_eq!(processes_with(id), [0u32; 0], "processes");
}

fn any_moment() {
    let lab = Lab::new();
    let mut dice = Dice(2);
    let stem = fresh_id("crash");
    let (mut unmade, mut halfway) = (0, 0);
    for turn in 0..30 {
        let id = format!("{stem}-{turn}");
        let mut live = lab.start(["--id", &id, "--", "sh", "-c", BUSY, &id]);
        // Not to wait for anything: to strike at different moments.
        std::thread::sleep(Duration::from_micros(dice.below(60_000)));
        live.signal(Signal::KILL);
        live.child.wait().unwrap();
        match lab.workspaces().is_empty() {
            true => unmade += 1,
            false => halfway += 1,
        }
        // The next run, under the same id or another.
        let next = if turn % 2 == 0 { id.as_str() } else { "next" };
        lab.sh(&["--id", next, "--replace"], "true").good();
        assert_no_trace(&lab, &id);
    }
    assert!(
        unmade > 0 && halfway > 0,
        "{unmade} early, {halfway} late: no spread"
    );
}

fn in_the_end() {
    let lab = Lab::new();
    let mut dice = Dice(5);
    let stem = fresh_id("end");
    for turn in 0..10 {
        let id = format!("{stem}-{turn}");
        let script = "for i in 1 2 3 4 5 6 7 8; do mkdir -p $i/a/b; : > $i/a/b/c; done; echo last";
        let mut live = lab.start(["--id", &id, "--", "sh", "-c", script, &id]);
        live.wait_for("last");
        // Not to wait for anything: to strike at different moments.
        std::thread::sleep(Duration::from_micros(dice.below(15_000)));
        // It may have ended already: then there is nothing to kill, and nothing left either.
        live.signal(Signal::KILL);
        live.child.wait().unwrap();
        lab.sh(&["--id", &id, "--replace"], "true").good();
        assert_no_trace(&lab, &id);
    }
}

/// After a runner was killed while it kept its workspace: the next run finishes what it had begun, and what is kept is
/// whole and can be removed.
#[track_caller]
fn assert_keep_finished(lab: &Lab, id: &str) {
    lab.sh(&["--id", "next", "--replace"], "true").good();
    let groups = cgroups_of(id);
    assert!(groups.is_empty(), "{groups:?}");
    let kept = lab.workspace(id);
    if kept.exists() {
        let result = std::fs::read(kept.join("result")).unwrap();
        assert_eq!(result, b"kept\n");
        lab.gc(&["--kept", id]).good();
    }
    assert_no_trace(lab, id);
}

fn while_it_keeps() {
    let lab = Lab::new();
    let stem = fresh_id("keep");
    let script = "echo kept > result; mkdir -p a/b; : > a/b/c; echo last";
    let args = |id: &str| {
        let options = ["--keep", "always", "--id", id, "--", "sh", "-c", script, id];
        options.map(String::from)
    };
    let mut dice = Dice(11);
    for turn in 0..8 {
        let id = format!("{stem}-{turn}");
        let mut live = lab.start(args(&id));
        live.wait_for("last");
        // Not to wait for anything: to strike at different moments.
        std::thread::sleep(Duration::from_micros(dice.below(15_000)));
        live.signal(Signal::KILL);
        live.child.wait().unwrap();
        assert_keep_finished(&lab, &id);
    }
    if !Path::new("/usr/bin/strace").exists() {
        return;
    }
    // Just before a call that keeping makes: groups are removed, the record is replaced, the tree changes hands.
    let strikes = strikes_of_keeping(&lab, &args(&format!("{stem}-dry")));
    let (mut killed, all) = (0, strikes.len());
    for (call, nth) in strikes {
        let id = format!("{stem}-{call}-{nth}");
        let inject = format!("inject={call}:signal=SIGKILL:when={nth}");
        let ended = finish(traced(&lab, &["-e", &inject], &args(&id)));
        killed += usize::from(ended.status.signal() == Some(Signal::KILL.as_raw()));
        assert_keep_finished(&lab, &id);
    }
    // How often a busy group must be tried may differ, and with it a call's number.
    assert!(killed * 2 > all, "only {killed} of {all} were killed");
}

/// `fumehood run ARGS` below strace, which looks at the runner alone and dies as it does.
fn traced(lab: &Lab, options: &[&str], args: &[String]) -> Command {
    let mut command = lab.with_surroundings(Command::new("/usr/bin/strace"));
    command.args(["-qq", "-e", "signal=none"]).args(options);
    command.arg(crate::plain_user::binary()).arg("run");
    command.args(args);
    command
}

/// The calls by which a run keeps its workspace, each by its number among those of its kind.
fn strikes_of_keeping(lab: &Lab, args: &[String]) -> Vec<(String, usize)> {
    const CALLS: [&str; 5] = ["unlinkat", "renameat", "fchmod", "fchown", "fchownat"];
    let log = lab.path("strace");
    let trace = format!("trace={}", CALLS.join(","));
    let options = ["-e", &trace, "-o", log.to_str().unwrap()];
    finish(traced(lab, &options, args)).good();
    lab.gc(&["--kept"]).good();
    let log = std::fs::read_to_string(log).unwrap();
    let calls: Vec<&str> = log.lines().filter_map(|l| l.split('(').next()).collect();
    // The groups are the first thing that a run removes, and where there are none the record is replaced first.
    let first = calls.iter().position(|call| *call == "unlinkat").unwrap();
    let saved = calls.iter().rposition(|call| *call == "renameat").unwrap();
    let numbered = calls.iter().enumerate().map(|(at, call)| {
        let nth = calls[..=at].iter().filter(|c| *c == call).count();
        (String::from(*call), nth)
    });
    numbered.skip(first.min(saved)).collect()
}

fn in_the_middle() {
    let lab = Lab::new();
    let id = fresh_id("middle");
    // A daemon, a stopped process and an orphan: none holds on.
    let script =
        "setsid sleep 600 $0 & sh -c 'kill -STOP $$' $0 & (sleep 600 $0 &) ; echo up; sleep 600";
    let script = script.replace("sleep 600 $0", "sh -c 'while :; do sleep 1; done' $0");
    let mut live = lab.start(["--id", &id, "--", "sh", "-c", &script, &id]);
    live.wait_for("up");
    eventually("all are up", || processes_with(&id).len() >= 4);
    live.signal(Signal::KILL);
    live.child.wait().unwrap();
    eventually("all are dead", || processes_with(&id).is_empty());
    assert_eq!(
        names_in(&lab.home.join("runs")).len(),
        1,
        "the record of the dead"
    );
    lab.sh(&[], "true").good();
    assert_no_trace(&lab, &id);
}

fn gc_finishes() {
    let lab = Lab::new();
    let id = fresh_id("gc");
    let mut live = lab.start([
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
    // A living one is left alone.
    lab.gc(&[]).good();
    lab.gc(&["--kept"]).good();
    assert!(lab.workspace(&id).exists());
    live.signal(Signal::KILL);
    live.child.wait().unwrap();
    let gc = lab.gc(&[]);
    gc.good();
    assert!(gc.err().contains("removed"), "{}", gc.err());
    assert_no_trace(&lab, &id);
    assert_eq!(lab.gc(&[]).good(), "");
}

fn damaged_record() {
    let lab = Lab::new();
    let victim = lab.write("victim/precious", "x");
    let dir = lab.home.join("runs/odd/1");
    lab.sh(&[], "true").good();
    for text in ["", "{", "[]", "{\"version\":99}"] {
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("run.json"), text).unwrap();
        crate::lab::set_mode(&lab.home.join("runs/odd"), 0o700);
        lab.sh(&["--id", "fine", "--replace"], "true").good();
        let gc = lab.gc(&[]);
        assert_eq!(gc.code(), 125, "{text}: {}", gc.err());
        assert!(gc.err().contains("could not clean up"), "{}", gc.err());
    }
    assert!(victim.exists());
}
