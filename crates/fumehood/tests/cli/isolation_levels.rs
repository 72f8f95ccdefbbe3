//! P18 through the binary: a run has the level that its result reports, never one below the floor, and a lower level only if
//! this host, and not the request, makes level full impossible.

use std::collections::BTreeSet;

use rustix::process::Signal;
use serde_json::Value;
use testkit::command::FinishedCommand;
use testkit::home::TestHome;
use testkit::process::processes_with;
use testkit::wait::eventually;
use testkit::{fresh_id, trial};

use crate::doctor::docker_like;
use crate::policy::{Account, under, with};

const LANDLOCK: &[&str] = &["--level", "landlock"];

fn layers(document: &Value) -> BTreeSet<&str> {
    let layers = document["isolation"]["layers"].as_object().unwrap();
    layers.keys().map(String::as_str).collect()
}

trial!(Everyone, a_result_records_its_level);
fn a_result_records_its_level() {
    let test_home = TestHome::new();
    test_home.write("data/numbers", "1 2 3");
    let script = "cat data/numbers > copy; ls -d data; chmod 640 copy; touch -d 2020-01-01 copy";
    let id = fresh_id("level");
    let options = ["--id", &id, "--level", "landlock"];
    let said = test_home.sh_json(&options, script);
    assert_eq!(said["status"], "succeeded", "{said}");
    assert_eq!(said["isolation"]["level"], "landlock");
    assert!(said["isolation"]["landlock_abi"].as_i64().unwrap() >= 1);
    let has = layers(&said);
    assert!(has.is_superset(&BTreeSet::from([
        "guardian",
        "landlock",
        "no_new_privs",
        "seccomp"
    ])));
    assert!(
        has.iter().all(|layer| !layer.ends_with("_namespace")),
        "{has:?}"
    );
    // The link that stands for data/ is neither an output nor a refused file.
    let outputs = said["outputs"].as_array().unwrap();
    assert_eq!(outputs.len(), 1, "{said}");
    assert_eq!(outputs[0]["path"], "copy");
    assert_eq!(
        said["collection"]["remarks"].as_array().map_or(0, Vec::len),
        0,
        "{said}"
    );
    let stored = "SELECT isolation_level FROM attempts";
    assert_eq!(test_home.sql_one(stored), "landlock");
    let full = test_home.sh_json(&["--level", "full"], "true");
    assert_eq!(full["isolation"]["level"], "full");
    assert!(layers(&full).contains("mount_namespace") && !layers(&full).contains("guardian"));
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    level_landlock_refuses_a_memory_workspace_and_moved_reads
);
fn level_landlock_refuses_a_memory_workspace_and_moved_reads() {
    let test_home = TestHome::new();
    let memory = ["--level", "landlock", "--workspace", "memory"];
    test_home.sh(&memory, "true").refused(125, "memory");
    let elsewhere = test_home.write("elsewhere/file", "x");
    let moved = format!("{}:/opt/other", elsewhere.parent().unwrap().display());
    let moved = ["--level", "landlock", "--read", moved.as_str()];
    test_home.sh(&moved, "true").refused(125, "level landlock");
    // Control: the directory may be shown under a name at the top of the workspace, because Fumehood makes that name a
    // link.
    let id = fresh_id("named");
    let other = test_home.workspace(&id).join("other");
    let from = elsewhere.parent().unwrap();
    let named = format!("{}:{}", from.display(), other.display());
    let named = ["--level", "landlock", "--id", &id, "--read", &named];
    assert_eq!(test_home.sh(&named, "cat other/file").good().trim(), "x");
    test_home.assert_nothing_left();
}

trial!(Everyone, shared_memory_host_permits_semaphores);
fn shared_memory_host_permits_semaphores() {
    let test_home = TestHome::new();
    let pool = "import multiprocessing\nprint(multiprocessing.Pool(2).map(abs, [-1, 2]))";
    let off = test_home.python(LANDLOCK, pool);
    assert_ne!(off.code(), 0);
    assert!(off.err().contains("--shared-memory host"), "{}", off.err());
    let on = test_home.python(&["--level", "landlock", "--shared-memory", "host"], pool);
    assert_eq!(on.good().trim(), "[1, 2]");
}

trial!(Root, the_floor_applies_to_an_exact_level);
fn the_floor_applies_to_an_exact_level() {
    let test_home = TestHome::new();
    for policy in ["", "[floor]\nlevel = \"full\""] {
        with(&test_home, policy, &["--level", "landlock", "--", "true"]).refused(125, "floor");
    }
    let lowered = "[floor]\nlevel = \"landlock\"";
    with(&test_home, lowered, &["--level", "landlock", "--", "true"]).good();
    let raised = ["--isolation", "full", "--level", "landlock", "--", "true"];
    with(&test_home, lowered, &raised).refused(125, "floor");
    test_home.run(raised).refused(125, "floor");
    let shm = [
        "--shared-memory",
        "host",
        "--level",
        "landlock",
        "--",
        "true",
    ];
    with(&test_home, lowered, &shm).refused(125, "shared_memory");
    test_home.assert_nothing_left();
}

trial!(Root, required_layers_hold_at_both_levels);
fn required_layers_hold_at_both_levels() {
    let test_home = TestHome::new();
    let policy = |layer: &str| format!("[floor]\nlevel = \"landlock\"\nlayers = [\"{layer}\"]");
    let at = |level: &'static str, layer: &str| {
        with(
            &test_home,
            &policy(layer),
            &["--level", level, "--", "true"],
        )
    };
    at("landlock", "guardian").good();
    at("full", "guardian").refused(125, "guardian");
    at("full", "net_namespace").good();
    at("landlock", "net_namespace").refused(125, "net_namespace");
    at("landlock", "cgroup").good();
    let prepare = format!("cat > policy.toml <<'END'\n{}\nEND", policy("cgroup"));
    let plain = under(
        &test_home,
        &prepare,
        Account::Plain,
        &["--level", "landlock", "--", "true"],
    );
    plain.refused(125, "cgroup");
    test_home.assert_nothing_left();
}

trial!(
    Root,
    a_run_gets_level_landlock_where_the_host_refuses_level_full
);
/// A real seccomp filter refuses the calls that Docker's filter refuses.
fn a_run_gets_level_landlock_where_the_host_refuses_level_full() {
    let test_home = TestHome::new();
    let inside = |args: &[&str]| -> FinishedCommand {
        let all: Vec<&str> = ["run", "--db", "none"]
            .iter()
            .chain(args)
            .copied()
            .collect();
        docker_like(&test_home, &[], &all)
    };
    let said = inside(&["--json", "--", "true"]).document();
    assert_eq!(said["status"], "succeeded", "{said}");
    assert_eq!(said["isolation"]["level"], "landlock", "{said}");
    assert!(
        said["notices"]
            .to_string()
            .contains("level full cannot be had"),
        "{said}"
    );
    let warned = inside(&["--", "true"]);
    assert!(
        warned.err().contains("this run has level landlock"),
        "{}",
        warned.err()
    );
    inside(&["--isolation", "full", "--", "true"]).refused(125, "fumehood doctor");
    inside(&["--level", "full", "--", "true"]).refused(125, "fumehood doctor");
    // The failed attempt at level full has not consumed standard input.
    let long = "x".repeat(300_000);
    let input = test_home.write("long", &long);
    let input = input.to_str().unwrap();
    let counted = inside(&["--quiet", "--stdin", input, "--", "wc", "-c"]);
    assert_eq!(counted.good().trim(), long.len().to_string());
}

trial!(Everyone, a_failing_request_does_not_lower_the_level);
/// A launch that fails because of the request is an error. Fumehood finds that the host offers level full, and does not lower
/// the level.
fn a_failing_request_does_not_lower_the_level() {
    let test_home = TestHome::new();
    std::fs::write(test_home.project.join("tool"), "no program").unwrap();
    let options = ["--json", "--input", "tool", "--", "./tool"];
    let said = test_home.run(options).document();
    assert_eq!(said["status"], "error", "{said}");
    assert_eq!(said["reason"], "not_executable", "{said}");
    assert!(!said.to_string().contains("landlock"), "{said}");
    test_home.assert_nothing_left();
}

trial!(Everyone, a_killed_runner_leaves_nothing_at_level_landlock);
/// The guardian outlives the runner until every process is dead, and keeps the workspace until then.
fn a_killed_runner_leaves_nothing_at_level_landlock() {
    let test_home = TestHome::new();
    let mark = fresh_id("outlive");
    let script = format!("(setsid sh -c 'echo up; sleep 600' {mark} &); sleep 600");
    let mut live = test_home.start(["--level", "landlock", "--", "sh", "-c", &script, &mark]);
    live.wait_for("up");
    // The runner counts too, because its arguments contain the mark.
    assert!(processes_with(&mark).len() >= 3);
    live.signal(Signal::KILL);
    live.finish();
    eventually("its processes are gone", || {
        processes_with(&mark).is_empty()
    });
    test_home.gc(&[]).good();
    test_home.assert_nothing_left();
}
