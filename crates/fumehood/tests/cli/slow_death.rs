//! P11, P17 through the binary: a run whose processes take long to die, or cannot die, keeps the reason for which it was
//! stopped. It is committed once, and the queue does not try it again.

use std::path::PathBuf;

use testkit::command::finish;
use testkit::home::TestHome;
use testkit::process::all_pids;
use testkit::wait::eventually;
use testkit::{fresh_id, trial};

/// A program like the one in `p11_slow_death.rs` of the sandbox's trials. Its processes take five seconds to fork, and
/// the kernel then needs seconds to kill them, even on two CPUs.
const SLOW_TO_DIE: &str = "
import mmap, os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open('left.txt', 'w').write('something')
m = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
m.madvise(15)
m[0] = 1
m.madvise(22)
begun = time.monotonic()
for _ in range(200):
    if os.fork() == 0:
        while True:
            signal.pause()
    if time.monotonic() - begun > 5:
        break
print('up', flush=True)
while True:
    signal.pause()
";

const LIMITS: &[&str] = &["--timeout", "12s", "--grace", "100ms"];

fn ends(test_home: &TestHome, id: &str) -> String {
    let sql = format!("SELECT state, reason FROM attempts WHERE id = '{id}' ORDER BY attempt");
    let rows = test_home.sql(&sql);
    let words = |row: &Vec<serde_json::Value>| format!("{}|{}", row[0], row[1]).replace('"', "");
    rows.iter().map(words).collect::<Vec<_>>().join(" ")
}

trial!(
    Everyone,
    a_timeout_is_committed_however_long_the_death_takes
);
fn a_timeout_is_committed_however_long_the_death_takes() {
    for level in ["full", "landlock"] {
        let test_home = TestHome::new();
        let id = fresh_id("slow");
        let options = [&["--json", "--id", &id, "--level", level], LIMITS].concat();
        let said = test_home.python(&options, SLOW_TO_DIE).document();
        assert_eq!(said["status"], "timed_out", "{level}: {said}");
        assert_eq!(said["reason"], "wall_time", "{level}: {said}");
        assert_eq!(said["commit"]["state"], "committed", "{level}: {said}");
        assert_eq!(said["outputs"][0]["path"], "left.txt", "{level}: {said}");
        assert_eq!(ends(&test_home, &id), "timed_out|wall_time");
        test_home.assert_nothing_left();
    }
}

trial!(Everyone, a_timeout_from_the_queue_is_not_tried_again);
fn a_timeout_from_the_queue_is_not_tried_again() {
    let test_home = TestHome::new();
    let id = fresh_id("slow");
    let submit = [&["submit", "--id", &id], LIMITS].concat();
    let program = ["--", "/usr/bin/python3", "-c", SLOW_TO_DIE];
    test_home.ask(submit.iter().chain(&program)).good();
    let worker = ["worker", "--slots", "1", "--memory", "1G", "--until-idle"];
    test_home.ask(worker).good();
    assert_eq!(ends(&test_home, &id), "timed_out|wall_time");
}

/// A group of the version 1 freezer: a process that is frozen in it does not die of SIGKILL.
struct Freezer(PathBuf);

impl Freezer {
    fn new(name: &str) -> Option<Freezer> {
        let path = PathBuf::from("/sys/fs/cgroup/freezer").join(name);
        std::fs::create_dir(&path).ok()?;
        path.join("freezer.state").exists().then_some(Freezer(path))
    }

    fn put(&self, file: &str, text: &str) {
        std::fs::write(self.0.join(file), text).unwrap();
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _as_it_is = std::fs::write(self.0.join("freezer.state"), "THAWED");
        let removed = || std::fs::remove_dir(&self.0).is_ok();
        // A second panic would hide the first.
        if !removed() && !std::thread::panicking() {
            eventually("the freezer's group is empty", removed);
        }
    }
}

trial!(
    Root,
    an_attempt_with_an_unkillable_process_is_committed_later
);
fn an_attempt_with_an_unkillable_process_is_committed_later() {
    let id = fresh_id("frozen");
    let Some(freezer) = Freezer::new(&id) else {
        eprintln!("UNAVAILABLE: no version 1 freezer, without which nothing here is unkillable");
        return;
    };
    let test_home = TestHome::new();
    let script = "echo kept > left.txt; exec sleep 60";
    let options = [
        "--json",
        "--id",
        &id,
        "--timeout",
        "6s",
        "--grace",
        "0",
        "--",
        "sh",
        "-c",
        script,
    ];
    let run = test_home.start(options);
    eventually("the program runs", || {
        let found = program_of(&test_home, &id);
        found
            .iter()
            .for_each(|pid| freezer.put("tasks", &pid.to_string()));
        !found.is_empty()
    });
    freezer.put("freezer.state", "FROZEN");
    let said = run.finish().document();
    assert_eq!(said["status"], "timed_out", "{said}");
    assert_eq!(said["reason"], "wall_time", "{said}");
    assert_eq!(said["commit"]["state"], "in_workspace", "{said}");
    assert!(said["notices"].to_string().contains("unkillable"), "{said}");
    // While the program is frozen, nothing is collected.
    let _problem = test_home.gc(&[]);
    assert!(test_home.workspace(&id).join("left.txt").exists());
    assert_ne!(ends(&test_home, &id), "timed_out|wall_time");
    freezer.put("freezer.state", "THAWED");
    eventually("it is committed", || {
        test_home.gc(&[]);
        ends(&test_home, &id) == "timed_out|wall_time"
    });
    test_home.assert_nothing_left();
}

/// The `sleep` processes of the run, which have the workspace as their working directory.
fn program_of(test_home: &TestHome, id: &str) -> Vec<u32> {
    let workspace = test_home.workspace(id);
    let is_in = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd"));
        name.trim() == "sleep" && cwd.is_ok_and(|cwd| cwd == workspace)
    };
    all_pids().filter(is_in).collect()
}

trial!(
    Everyone,
    a_program_ignores_no_signal_that_its_caller_ignored
);
fn a_program_ignores_no_signal_that_its_caller_ignored() {
    let test_home = TestHome::new();
    let inside =
        test_home.run_command(["--db", "none", "--", "grep", "SigIgn", "/proc/self/status"]);
    let mut ignoring = std::process::Command::new("bash");
    let words = std::iter::once(inside.get_program()).chain(inside.get_args());
    ignoring
        .args([
            "-c",
            "trap '' HUP USR1 PIPE RTMIN+7; grep SigIgn /proc/self/status >&2; exec \"$@\"",
            "-",
        ])
        .args(words);
    let ended = finish(test_home.with_environment(ignoring));
    assert!(
        !ended.err().contains("SigIgn:\t0000000000000000"),
        "the control: {}",
        ended.err()
    );
    assert!(
        ended.good().contains("SigIgn:\t0000000000000000"),
        "{}",
        ended.out()
    );
}
