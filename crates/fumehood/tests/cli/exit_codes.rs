//! P17 through the binary: each way to end has its own exit code, status and reason, and one JSON document reports all of
//! them.

use std::collections::BTreeSet;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use testkit::command::finish;
use testkit::home::{TestHome, set_mode};
use testkit::process::processes_with;
use testkit::wait::eventually;
use testkit::{fresh_id, is_root, trial};

const FIELDS: [&str; 28] = [
    "schema",
    "id",
    "attempt",
    "status",
    "reason",
    "message",
    "exit_code",
    "signal",
    "times",
    "timings",
    "cpu_ms",
    "memory_peak_bytes",
    "pids_peak",
    "disk_bytes",
    "files",
    "oom_kills",
    "stdout",
    "stderr",
    "workspace",
    "kept_until",
    "isolation",
    "limits",
    "outputs",
    "collection",
    "commit",
    "post_process",
    "hints",
    "notices",
];

/// Asserts that the document has every field of the schema, with the right type.
#[track_caller]
fn assert_whole(document: &Value) {
    let has: BTreeSet<&str> = document
        .as_object()
        .unwrap()
        .keys()
        .map(|k| k.as_str())
        .collect();
    let wants: BTreeSet<&str> = FIELDS.into_iter().collect();
    assert_eq!(has, wants);
    assert_eq!(document["schema"], "fumehood.result/1");
    let statuses = [
        "succeeded",
        "failed",
        "timed_out",
        "out_of_memory",
        "limit_exceeded",
        "cancelled",
        "error",
    ];
    assert!(
        statuses.contains(&document["status"].as_str().unwrap()),
        "{document}"
    );
    assert!(document["reason"].is_string(), "{document}");
    for key in ["started_ms", "ended_ms", "wall_ms"] {
        assert!(document["times"][key].is_u64(), "times.{key}");
    }
    assert!(document["times"]["started_ms"].as_u64() <= document["times"]["ended_ms"].as_u64());
    for key in ["cpu_ms", "disk_bytes", "files", "oom_kills"] {
        assert!(document[key].is_u64(), "{key}");
    }
    for stream in ["stdout", "stderr"] {
        assert!(document[stream]["text"].is_string());
        assert!(document[stream]["bytes"].is_u64());
        assert!(document[stream]["truncated"].is_boolean());
    }
    assert!(document["workspace"].as_str().unwrap().starts_with('/'));
    assert!(document["hints"].is_array());
    assert_eq!(
        document["message"].is_string(),
        document["status"] == "error" && document["isolation"]["level"].is_null()
    );
    if document["isolation"]["level"].is_null() {
        return;
    }
    assert_eq!(document["isolation"]["level"], "full");
    let layers = document["isolation"]["layers"].as_object().unwrap();
    for layer in [
        "user_namespace",
        "mount_namespace",
        "pid_namespace",
        "net_namespace",
        "ipc_namespace",
        "uts_namespace",
        "cgroup_namespace",
        "no_new_privs",
        "capabilities",
        "landlock",
        "seccomp",
    ] {
        assert!(layers.contains_key(layer), "{layer}");
    }
    assert_eq!(layers.contains_key("leased_uid"), is_root());
    for limit in [
        "wall_time",
        "memory",
        "cpus",
        "pids",
        "open_files",
        "disk",
        "files",
        "logs",
    ] {
        let entry = &document["limits"][limit];
        assert!(entry["asked"].is_u64(), "{limit}");
        assert!(
            !entry["enforced_by"].as_str().unwrap().is_empty(),
            "{limit}"
        );
        assert!(
            ["hard", "watched"].contains(&entry["how_hard"].as_str().unwrap()),
            "{limit}"
        );
    }
}

/// Runs a program twice and asserts how it ended: by exit code and summary, then by the document. Returns the document.
#[track_caller]
fn assert_end(
    test_home: &TestHome,
    options: &[&str],
    command: &[&str],
    code: i32,
    status: &str,
    reason: &str,
) -> Value {
    let words = |first: &[&str]| -> Vec<String> {
        let all = first.iter().chain(options).chain(&["--"]).chain(command);
        all.map(|w| w.to_string()).collect()
    };
    let ended = test_home.run(words(&[]));
    assert_eq!(ended.code(), code, "{command:?}: {}", ended.err());
    let ended = test_home.run(words(&["--json"]));
    assert_eq!(ended.code(), code, "{command:?}: {}", ended.err());
    assert_eq!(ended.err(), "", "with --json stderr is silent");
    let document = ended.document();
    assert_whole(&document);
    let got = (
        document["status"].as_str().unwrap(),
        document["reason"].as_str().unwrap(),
    );
    assert_eq!(got, (status, reason), "{command:?}: {document}");
    test_home.assert_nothing_left();
    document
}

trial!(Everyone, run_exits_with_the_programs_code);
fn run_exits_with_the_programs_code() {
    let test_home = TestHome::new();
    // Fumehood itself uses some of these codes too; the status distinguishes them.
    for code in [0, 1, 2, 77, 122, 123, 124, 125, 126, 127, 137, 255] {
        let script = format!("exit {code}");
        let status = if code == 0 { "succeeded" } else { "failed" };
        let document = assert_end(
            &test_home,
            &[],
            &["sh", "-c", &script],
            code,
            status,
            "exit",
        );
        assert_eq!(document["exit_code"], code);
        assert!(document["signal"].is_null());
    }
}

trial!(Everyone, run_exits_with_128_plus_the_signal);
fn run_exits_with_128_plus_the_signal() {
    let test_home = TestHome::new();
    for signal in [1, 2, 6, 9, 11, 15, 31] {
        let script = format!("kill -{signal} $$; sleep 60");
        let document = assert_end(
            &test_home,
            &[],
            &["sh", "-c", &script],
            128 + signal,
            "failed",
            "signal",
        );
        assert_eq!(document["signal"], signal);
        assert!(document["exit_code"].is_null());
    }
}

trial!(Everyone, run_exits_with_124_after_a_time_limit);
fn run_exits_with_124_after_a_time_limit() {
    let test_home = TestHome::new();
    let spin = ["sh", "-c", "while :; do :; done"];
    assert_end(
        &test_home,
        &["--timeout", "300ms", "--grace", "0"],
        &["sleep", "600"],
        124,
        "timed_out",
        "wall_time",
    );
    assert_end(
        &test_home,
        // Without a cgroup the limit is only watched, so the run needs --allow-degraded.
        &[
            "--cpu-time",
            "300ms",
            "--grace",
            "0",
            "--allow-degraded",
            "cpu_time",
        ],
        &spin,
        124,
        "timed_out",
        "cpu_time",
    );
    assert_end(
        &test_home,
        &["--idle-timeout", "1s", "--grace", "0"],
        &["sleep", "600"],
        124,
        "timed_out",
        "idle_time",
    );
    // A program that uses the CPU or prints is not idle.
    let busy = "for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done";
    assert_eq!(
        test_home.sh(&["--idle-timeout", "1s"], busy).good(),
        "1\n2\n3\n4\n5\n6\n"
    );
    // A program that exits on SIGTERM has still timed out.
    let polite = "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done";
    assert_end(
        &test_home,
        &["--timeout", "500ms"],
        &["sh", "-c", polite],
        124,
        "timed_out",
        "wall_time",
    );
}

trial!(Everyone, run_exits_with_122_after_another_limit);
fn run_exits_with_122_after_another_limit() {
    let test_home = TestHome::new();
    let one = ["head", "-c", "64M", "/dev/zero"];
    let ended = test_home.run(["--disk", "8M", "--"].iter().chain(&one));
    ended.good();
    let exec = ["sh", "-c", "exec head -c 64M /dev/zero > f"];
    assert_end(
        &test_home,
        &["--disk", "8M"],
        &exec,
        122,
        "limit_exceeded",
        "file_size",
    );
    let many = [
        "sh",
        "-c",
        "i=0; while :; do i=$((i+1)); head -c 1M /dev/zero > f$i; done",
    ];
    assert_end(
        &test_home,
        &["--disk", "8M", "--grace", "0"],
        &many,
        122,
        "limit_exceeded",
        "disk",
    );
    let files = ["sh", "-c", "i=0; while :; do i=$((i+1)); : > f$i; done"];
    assert_end(
        &test_home,
        &["--files", "100", "--grace", "0"],
        &files,
        122,
        "limit_exceeded",
        "files",
    );
}

trial!(Everyone, run_exits_with_137_after_the_memory_limit);
fn run_exits_with_137_after_the_memory_limit() {
    let test_home = TestHome::new();
    let hog = [
        "/usr/bin/python3",
        "-c",
        "x = bytearray(600 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nimport time; time.sleep(60)",
    ];
    let options = [
        "--memory",
        "64M",
        "--allow-degraded",
        "memory",
        "--grace",
        "0",
    ];
    // With a cgroup the kernel kills the program; without one Fumehood's watch does.
    let reason = if is_root() {
        "oom_killed"
    } else {
        "memory_watch"
    };
    let document = assert_end(&test_home, &options, &hog, 137, "out_of_memory", reason);
    assert_eq!(document["limits"]["memory"]["asked"], 64 << 20);
    let small = ["/usr/bin/python3", "-c", "x = bytearray(20 << 20)"];
    assert_end(&test_home, &options, &small, 0, "succeeded", "exit");
}

trial!(Root, a_childs_oom_is_only_counted);
fn a_childs_oom_is_only_counted() {
    let test_home = TestHome::new();
    let script = "/usr/bin/python3 -c 'x = bytearray(600 << 20)'; echo survived; exit 0";
    let document = assert_end(
        &test_home,
        &["--memory", "64M"],
        &["sh", "-c", script],
        0,
        "succeeded",
        "exit",
    );
    assert!(document["oom_kills"].as_u64().unwrap() >= 1, "{document}");
    assert_eq!(document["stdout"]["text"], "survived\n");
}

trial!(Root, the_third_oom_ends_the_run);
/// With cgroup version 1 the third OOM kill ends the run, and with version 2 the first.
fn the_third_oom_ends_the_run() {
    let test_home = TestHome::new();
    let script = "for i in $(seq 100); do /usr/bin/python3 -c 'x = bytearray(600 << 20)'; done; echo the end";
    let document = assert_end(
        &test_home,
        &["--memory", "64M"],
        &["sh", "-c", script],
        137,
        "out_of_memory",
        "oom_killed",
    );
    assert!(
        !document["stdout"]["text"]
            .as_str()
            .unwrap()
            .contains("the end")
    );
}

trial!(Root, a_kill_long_after_an_oom_is_a_signal);
/// Only for cgroup version 1. Version 2 kills the program together with its child.
fn a_kill_long_after_an_oom_is_a_signal() {
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        return;
    }
    let test_home = TestHome::new();
    let script = "/usr/bin/python3 -c 'x = bytearray(600 << 20)'; sleep 3; kill -9 $$";
    let document = assert_end(
        &test_home,
        &["--memory", "64M"],
        &["sh", "-c", script],
        137,
        "failed",
        "signal",
    );
    assert_eq!(document["oom_kills"], 1, "{document}");
}

trial!(Everyone, a_program_that_cannot_start_ends_with_status_error);
fn a_program_that_cannot_start_ends_with_status_error() {
    let test_home = TestHome::new();
    test_home.write("project/plain", "text");
    let bad = test_home.write("project/bad-format", [0x7f, b'E', b'L', b'F', 0, 1, 2, 3]);
    set_mode(&bad, 0o755);
    let none: [&str; 0] = [];
    assert_end(
        &test_home,
        &none,
        &["no-such-command"],
        127,
        "error",
        "not_found",
    );
    assert_end(
        &test_home,
        &none,
        &["/usr/bin/no-such-command"],
        127,
        "error",
        "not_found",
    );
    assert_end(
        &test_home,
        &["--input", "plain"],
        &["./plain"],
        126,
        "error",
        "not_executable",
    );
    assert_end(
        &test_home,
        &["--input", "bad-format"],
        &["./bad-format"],
        126,
        "error",
        "not_executable",
    );
    assert_end(&test_home, &none, &["/usr"], 126, "error", "not_executable");
    assert_end(
        &test_home,
        &["--input", "absent"],
        &["true"],
        125,
        "error",
        "not_started",
    );
    assert_end(
        &test_home,
        &["--read", "/proc"],
        &["true"],
        125,
        "error",
        "not_started",
    );
    assert_end(
        &test_home,
        &["--read", "/"],
        &["true"],
        125,
        "error",
        "not_started",
    );
}

trial!(Everyone, run_exits_with_125_after_wrong_usage);
fn run_exits_with_125_after_wrong_usage() {
    let test_home = TestHome::new();
    let wrong: [&[&str]; 15] = [
        &[],
        &["run", "--\u{1b}]0;title\u{7}", "--", "true"],
        &["run"],
        &["run", "--no-such-option", "--", "true"],
        &["run", "--timeout", "soon", "--", "true"],
        &["run", "--memory", "-1", "--", "true"],
        &["run", "--memory", "5X", "--", "true"],
        &["run", "--cpus", "0", "--", "true"],
        &["run", "--keep", "sometimes", "--", "true"],
        &["run", "--network", "host", "--", "true"],
        &["run", "--workspace", "cloud", "--", "true"],
        &["run", "--isolation", "none", "--", "true"],
        &["run", "--allow-degraded", "everything", "--", "true"],
        &["run", "--project", "/nowhere/at/all", "--", "true"],
        &["frobnicate"],
    ];
    for args in wrong {
        let mut command = test_home.fumehood();
        command.args(args);
        let ended = finish(command);
        assert_eq!(ended.code(), 125, "{args:?}: {}", ended.err());
        assert_eq!(ended.out(), "", "{args:?}");
        assert!(!ended.err().is_empty(), "{args:?}");
        assert!(!ended.err().contains(['\u{1b}', '\u{7}']), "{args:?}");
    }
    test_home.assert_nothing_left();
}

/// A program that prints `up` at its start, and `bye` on SIGTERM.
const ENDS_ON_SIGTERM: &str = "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.05; done";

trial!(Everyone, sigint_cancels);
fn sigint_cancels() {
    cancels(Signal::INT);
}

trial!(Everyone, sigterm_cancels);
fn sigterm_cancels() {
    cancels(Signal::TERM);
}

trial!(Everyone, sighup_cancels);
fn sighup_cancels() {
    cancels(Signal::HUP);
}

fn cancels(signal: Signal) {
    let test_home = TestHome::new();
    let mut live = test_home.start(["--", "sh", "-c", ENDS_ON_SIGTERM]);
    live.wait_for("up");
    live.signal(signal);
    let ended = live.finish();
    assert_eq!(ended.code(), 123, "{}", ended.err());
    assert_eq!(ended.out(), "up\nbye\n");
    assert!(ended.err().contains("cancelled"), "{}", ended.err());
    test_home.assert_nothing_left();

    let document = cancelled_document(&test_home, signal);
    assert_whole(&document);
    assert_eq!(document["status"], "cancelled");
    assert_eq!(document["exit_code"], 5);
    assert_eq!(document["stdout"]["text"], "up\nbye\n");
    test_home.assert_nothing_left();
}

/// With `--json` the program's output is not shown live, so a file shows that the program runs.
fn cancelled_document(test_home: &TestHome, signal: Signal) -> Value {
    let script = ENDS_ON_SIGTERM.replace("echo up", "echo up; touch there");
    let live = test_home.start(["--json", "--id", "j", "--", "sh", "-c", &script]);
    let there = test_home.workspace("j").join("there");
    eventually("the program is up", || there.exists());
    live.signal(signal);
    let ended = live.finish();
    assert_eq!(ended.code(), 123);
    ended.document()
}

trial!(Everyone, a_second_sigint_skips_the_grace);
fn a_second_sigint_skips_the_grace() {
    let test_home = TestHome::new();
    let stubborn = "trap 'echo no' TERM; echo up; while :; do sleep 0.05; done";
    let mut live = test_home.start(["--grace", "1h", "--", "sh", "-c", stubborn]);
    live.wait_for("up");
    live.signal(Signal::INT);
    live.wait_for("no");
    assert!(
        live.child.try_wait().unwrap().is_none(),
        "the grace was not honoured"
    );
    live.signal(Signal::INT);
    let ended = live.finish();
    assert_eq!(ended.code(), 123, "{}", ended.err());
    test_home.assert_nothing_left();
    // Without a second signal, the end of the grace period kills the program.
    let mut live = test_home.start(["--grace", "200ms", "--", "sh", "-c", stubborn]);
    live.wait_for("up");
    live.signal(Signal::INT);
    assert_eq!(live.finish().code(), 123);
    test_home.assert_nothing_left();
}

trial!(Everyone, every_process_gets_the_grace_period);
fn every_process_gets_the_grace_period() {
    let test_home = TestHome::new();
    let marker = fresh_id("grace");
    // A daemon in its own session gets SIGTERM too, and a daemon that ignores SIGTERM is killed.
    let script = "setsid sh -c 'trap \"echo daemon; exit\" TERM; echo one; while :; do sleep 0.05; done' $0 &
        setsid sh -c 'trap \"\" TERM; echo two; while :; do sleep 0.05; done' $0 &
        trap 'wait %1; exit 0' TERM; wait";
    let mut live = test_home.start(["--grace", "2s", "--", "sh", "-c", script, &marker]);
    let mut missing = 2;
    while missing > 0 {
        missing -= 1;
        live.wait_for_any(&["one", "two"]);
    }
    live.signal(Signal::TERM);
    let ended = live.finish();
    assert_eq!(ended.code(), 123, "{}", ended.err());
    assert!(ended.out().contains("daemon\n"), "{}", ended.out());
    assert_eq!(processes_with(&marker), [0u32; 0]);
    test_home.assert_nothing_left();
}

trial!(Everyone, a_cancel_before_the_start_leaves_nothing);
fn a_cancel_before_the_start_leaves_nothing() {
    // Signal the runner before it has set up anything, and at later moments of the start.
    for turn in 0..8u64 {
        let test_home = TestHome::new();
        let live = test_home.start(["--grace", "0", "--", "sleep", "600"]);
        // This sleep waits for no event. It varies the moment of the interruption.
        std::thread::sleep(std::time::Duration::from_millis(turn * 6));
        live.signal(Signal::TERM);
        let ended = live.finish();
        // Before the runner handles signals, SIGTERM kills it.
        let died_early = std::os::unix::process::ExitStatusExt::signal(&ended.status) == Some(15);
        assert!(
            died_early || ended.code() == 123,
            "{:?} {}",
            ended.status,
            ended.err()
        );
        test_home.sh(&[], "true").good();
        test_home.assert_nothing_left();
    }
}

trial!(Everyone, printed_text_decides_nothing);
fn printed_text_decides_nothing() {
    let test_home = TestHome::new();
    let script = "echo Killed >&2; echo 'Out of memory: Killed process 1' >&2
        echo '{\"schema\":\"fumehood.result/1\",\"status\":\"succeeded\",\"exit_code\":0}'
        echo 'fumehood: x timed out (wall time) after 1h' >&2; exit 9";
    let document = assert_end(&test_home, &[], &["sh", "-c", script], 9, "failed", "exit");
    assert_eq!(document["exit_code"], 9);
    assert!(
        document["stdout"]["text"]
            .as_str()
            .unwrap()
            .contains("fumehood.result/1")
    );
    assert!(
        document["stderr"]["text"]
            .as_str()
            .unwrap()
            .starts_with("Killed\n")
    );
}

/// All descendants of a process, nearest first.
pub fn below(pid: u32) -> Vec<u32> {
    let list =
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children: Vec<u32> = list
        .split_whitespace()
        .filter_map(|p| p.parse().ok())
        .collect();
    let deeper = children.iter().flat_map(|child| below(*child));
    children.iter().copied().chain(deeper).collect()
}

trial!(Everyone, init_killed_from_outside_ends_with_status_error);
fn init_killed_from_outside_ends_with_status_error() {
    let test_home = TestHome::new();
    let program = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.starts_with(b"/usr/bin/sleep\0")
    };
    let dead = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        !status.contains("State:\t") || status.contains("State:\tZ")
    };
    let live = test_home.start(["--json", "--", "sleep", "600"]);
    eventually("the program is up", || {
        below(live.pid()).iter().any(program)
    });
    let is_init = |pid: &u32| !program(pid) && !dead(pid);
    let ours: Vec<u32> = below(live.pid()).into_iter().filter(is_init).collect();
    let [init] = ours[..] else {
        panic!("not one process of ours above the program but {ours:?}");
    };
    let init = rustix::process::Pid::from_raw(i32::try_from(init).unwrap()).unwrap();
    rustix::process::kill_process(init, Signal::KILL).unwrap();
    let ended = live.finish();
    let document = ended.document();
    assert_eq!(document["status"], "error", "{document}");
    assert_eq!(document["reason"], "init_lost", "{document}");
    assert_eq!(ended.code(), 125);
    test_home.assert_nothing_left();
}
