//! P18 through the binary: a run has the level that its result says, never one below the floor, and steps down only
//! where this host, and not the request, leaves no other choice.

use std::collections::BTreeSet;

use rustix::process::Signal;
use serde_json::Value;

use crate::doctor::docker_like;
use crate::lab::{Ended, Lab, eventually, fresh_id, processes_with};
use crate::policy::{As, under, with};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    ("a_result_says_its_level", For::Everyone, says_its_level),
    ("what_landlock_cannot_have", For::Everyone, cannot_have),
    ("semaphores_if_asked_for", For::Everyone, semaphores),
    ("the_floor_holds_for_an_exact_level", For::Root, floor),
    ("required_layers_hold_at_both_levels", For::Root, required),
    (
        "it_steps_down_where_the_host_gives_no_more",
        For::Root,
        steps_down,
    ),
    (
        "a_request_talks_nobody_down",
        For::Everyone,
        not_talked_down,
    ),
    (
        "killed_at_level_landlock_nothing_stays",
        For::Everyone,
        killed,
    ),
];

const LANDLOCK: &[&str] = &["--level", "landlock"];

fn layers(document: &Value) -> BTreeSet<&str> {
    let layers = document["isolation"]["layers"].as_object().unwrap();
    layers.keys().map(String::as_str).collect()
}

fn says_its_level() {
    let lab = Lab::new();
    lab.write("data/numbers", "1 2 3");
    let script = "cat data/numbers > copy; ls -d data; chmod 640 copy; touch -d 2020-01-01 copy";
    let id = fresh_id("level");
    let options = ["--id", &id, "--level", "landlock"];
    let said = lab.sh_json(&options, script);
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
    // The link that stands for data/ is no output, and nothing that was refused.
    let outputs = said["outputs"].as_array().unwrap();
    assert_eq!(outputs.len(), 1, "{said}");
    assert_eq!(outputs[0]["path"], "copy");
    assert_eq!(
        said["collection"]["remarks"].as_array().map_or(0, Vec::len),
        0,
        "{said}"
    );
    let stored = "SELECT isolation_level FROM attempts";
    assert_eq!(lab.sql_one(stored), "landlock");
    let full = lab.sh_json(&["--level", "full"], "true");
    assert_eq!(full["isolation"]["level"], "full");
    assert!(layers(&full).contains("mount_namespace") && !layers(&full).contains("guardian"));
    lab.assert_nothing_left();
}

fn cannot_have() {
    let lab = Lab::new();
    let memory = ["--level", "landlock", "--workspace", "memory"];
    lab.sh(&memory, "true").refused(125, "memory");
    let elsewhere = lab.write("elsewhere/file", "x");
    let moved = format!("{}:/opt/other", elsewhere.parent().unwrap().display());
    let moved = ["--level", "landlock", "--read", moved.as_str()];
    lab.sh(&moved, "true").refused(125, "level landlock");
    // By a name at the top of the workspace, which is a link.
    let id = fresh_id("named");
    let other = lab.workspace(&id).join("other");
    let from = elsewhere.parent().unwrap();
    let named = format!("{}:{}", from.display(), other.display());
    let named = ["--level", "landlock", "--id", &id, "--read", &named];
    assert_eq!(lab.sh(&named, "cat other/file").good().trim(), "x");
    lab.assert_nothing_left();
}

fn semaphores() {
    let lab = Lab::new();
    let pool = "import multiprocessing\nprint(multiprocessing.Pool(2).map(abs, [-1, 2]))";
    let off = lab.python(LANDLOCK, pool);
    assert_ne!(off.code(), 0);
    assert!(off.err().contains("--shared-memory host"), "{}", off.err());
    let on = lab.python(&["--level", "landlock", "--shared-memory", "host"], pool);
    assert_eq!(on.good().trim(), "[1, 2]");
}

fn floor() {
    let lab = Lab::new();
    for policy in ["", "[floor]\nlevel = \"full\""] {
        with(&lab, policy, &["--level", "landlock", "--", "true"]).refused(125, "floor");
    }
    let lowered = "[floor]\nlevel = \"landlock\"";
    with(&lab, lowered, &["--level", "landlock", "--", "true"]).good();
    let raised = ["--isolation", "full", "--level", "landlock", "--", "true"];
    with(&lab, lowered, &raised).refused(125, "floor");
    lab.run(raised).refused(125, "floor");
    let shm = [
        "--shared-memory",
        "host",
        "--level",
        "landlock",
        "--",
        "true",
    ];
    with(&lab, lowered, &shm).refused(125, "shared_memory");
    lab.assert_nothing_left();
}

fn required() {
    let lab = Lab::new();
    let policy = |layer: &str| format!("[floor]\nlevel = \"landlock\"\nlayers = [\"{layer}\"]");
    let at = |level: &'static str, layer: &str| {
        with(&lab, &policy(layer), &["--level", level, "--", "true"])
    };
    at("landlock", "guardian").good();
    at("full", "guardian").refused(125, "guardian");
    at("full", "net_namespace").good();
    at("landlock", "net_namespace").refused(125, "net_namespace");
    at("landlock", "cgroup").good();
    let prepare = format!("cat > policy.toml <<'END'\n{}\nEND", policy("cgroup"));
    let plain = under(
        &lab,
        &prepare,
        As::Plain,
        &["--level", "landlock", "--", "true"],
    );
    plain.refused(125, "cgroup");
    lab.assert_nothing_left();
}

/// A real filter refuses what Docker's refuses.
fn steps_down() {
    let lab = Lab::new();
    let inside = |args: &[&str]| -> Ended {
        let all: Vec<&str> = ["run", "--db", "none"]
            .iter()
            .chain(args)
            .copied()
            .collect();
        docker_like(&lab, &[], &all)
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
    // What is piped in is not eaten by the attempt that came to nothing.
    let long = "x".repeat(300_000);
    let input = lab.write("long", &long);
    let input = input.to_str().unwrap();
    let counted = inside(&["--quiet", "--stdin", input, "--", "wc", "-c"]);
    assert_eq!(counted.good().trim(), long.len().to_string());
}

/// A launch that fails for what was asked fails: the host gives level full, and that is found out.
fn not_talked_down() {
    let lab = Lab::new();
    std::fs::write(lab.project.join("tool"), "no program").unwrap();
    let options = ["--json", "--input", "tool", "--", "./tool"];
    let said = lab.run(options).document();
    assert_eq!(said["status"], "error", "{said}");
    assert_eq!(said["reason"], "not_executable", "{said}");
    assert!(!said.to_string().contains("landlock"), "{said}");
    lab.assert_nothing_left();
}

/// The guardian outlives the runner until all is dead, and holds the workspace so long.
fn killed() {
    let lab = Lab::new();
    let mark = fresh_id("outlive");
    let script = format!("(setsid sh -c 'echo up; sleep 600' {mark} &); sleep 600");
    let mut live = lab.start(["--level", "landlock", "--", "sh", "-c", &script, &mark]);
    live.wait_for("up");
    // The runner has the word too, among its arguments.
    assert!(processes_with(&mark).len() >= 3);
    live.signal(Signal::KILL);
    live.end();
    eventually("its processes are gone", || {
        processes_with(&mark).is_empty()
    });
    lab.gc(&[]).good();
    lab.assert_nothing_left();
}
