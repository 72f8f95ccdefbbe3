//! `fumehood doctor --attack`: it confirms each act in the table of `sandbox::promises`, and it detects an escape when a layer
//! is missing.

use std::collections::BTreeSet;
use std::path::Path;

use sandbox::promises::{ACTS, PromiseStatus, promise_status};
use sandbox::spec::ConfinementLevel;
use serde_json::Value;
use testkit::command::{FinishedCommand, finish};
use testkit::home::TestHome;
use testkit::process::names_in;
use testkit::{is_root, trial};

/// Controls that some hosts do not permit to a plain user. As root all of them work.
const MAY_BE_UNPROVEN: &[&str] = &["bpf", "perf", "user_namespace", "terminal_injection"];

fn attack(test_home: &TestHome, options: &[&str], without: &str) -> FinishedCommand {
    let mut command = test_home.fumehood();
    command.args(["doctor", "--attack"]).args(options);
    if !without.is_empty() {
        command.env("FUMEHOOD_FAULT", format!("without={without}"));
    }
    finish(command)
}

fn names_with<'a>(document: &'a Value, verdict: &str) -> BTreeSet<&'a str> {
    let acts = document["acts"].as_array().unwrap();
    let with = acts.iter().filter(|act| act["verdict"] == verdict);
    with.map(|act| act["name"].as_str().unwrap()).collect()
}

fn table(level: ConfinementLevel) {
    let test_home = TestHome::new();
    let ended = attack(
        &test_home,
        &["--level", level.as_str(), "--json", "--strict"],
        "",
    );
    ended.good();
    let document = ended.document();
    assert_eq!(document["schema"], "fumehood.attack/1");
    assert_eq!(document["level"], level.as_str());
    assert_eq!(document["root"], is_root());
    let abi = i32::try_from(document["landlock_abi"].as_i64().unwrap()).unwrap();
    let acts = document["acts"].as_array().unwrap();
    assert_eq!(acts.len(), ACTS.len());
    let unproven = names_with(&document, "unproven");
    let gaps = ACTS
        .iter()
        .filter(|act| matches!(promise_status(act, level, abi), PromiseStatus::NotKept(_)))
        .map(|act| act.name);
    assert_eq!(names_with(&document, "known_gap"), gaps.collect());
    for name in &unproven {
        let told = MAY_BE_UNPROVEN.contains(name) && !is_root();
        let act = acts.iter().find(|act| act["name"] == *name).unwrap();
        assert!(told, "{name}: {act}");
    }
    let proven = acts.len() - unproven.len();
    let counts = &document["counts"];
    let counted = counts["held"].as_u64().unwrap() + counts["known_gaps"].as_u64().unwrap();
    assert_eq!(counted, proven as u64, "{counts}");
    test_home.assert_nothing_left();
    assert_nothing_of_the_battery(&test_home, Path::new(document["place"].as_str().unwrap()));
}

/// Asserts that the attack left neither its directory nor a target file, and did not change the caller's home of Fumehood.
fn assert_nothing_of_the_battery(test_home: &TestHome, place: &Path) {
    let name = place.file_name().unwrap().to_str().unwrap();
    let word = name.strip_prefix("fumehood-attack-").unwrap();
    for dir in ["/var/tmp", "/tmp", "/dev/shm"] {
        let names = names_in(Path::new(dir)).into_iter();
        let mut left = names.filter(|name| name.to_string_lossy().contains(word));
        assert_eq!(left.next(), None, "in {dir}");
    }
    assert!(!test_home.home.exists(), "it has a home of its own");
}

trial!(Everyone, attack_reports_every_act_at_level_full);
fn attack_reports_every_act_at_level_full() {
    table(ConfinementLevel::Full);
}

trial!(Everyone, attack_reports_every_act_at_level_landlock);
fn attack_reports_every_act_at_level_landlock() {
    table(ConfinementLevel::Landlock);
}

trial!(Everyone, attack_notices_a_missing_layer_at_level_full);
/// If layers are missing, exactly the acts that rest on them succeed, and the exit code reports that.
fn attack_notices_a_missing_layer_at_level_full() {
    let test_home = TestHome::new();
    let without = "net_namespace,ipc_namespace";
    let ended = attack(&test_home, &["--level", "full", "--json"], without);
    let document = ended.document();
    let expected = BTreeSet::from([
        "postgres_tcp",
        "postgres_abstract",
        "unix_datagram",
        "udp",
        "dns",
        "netlink",
        "system_v_ipc",
    ]);
    assert_eq!(
        names_with(&document, "escaped"),
        expected,
        "{}",
        ended.err()
    );
    assert_eq!(document["counts"]["escaped"], expected.len());
    assert_eq!(ended.code(), 1, "{}", ended.err());
}

trial!(Everyone, attack_notices_a_missing_layer_at_level_landlock);
fn attack_notices_a_missing_layer_at_level_landlock() {
    let test_home = TestHome::new();
    let ended = attack(&test_home, &["--level", "landlock", "--json"], "landlock");
    assert_eq!(ended.code(), 1, "{}", ended.err());
    let document = ended.document();
    let got_out = names_with(&document, "escaped");
    for act in [
        "read_project",
        "read_secret_file",
        "write_host_tmp",
        "write_host_shm",
    ] {
        assert!(got_out.contains(act), "{act} is not among {got_out:?}");
    }
}

trial!(Everyone, attack_prints_one_line_for_each_act);
fn attack_prints_one_line_for_each_act() {
    let test_home = TestHome::new();
    let ended = attack(&test_home, &["--level", "full"], "ipc_namespace");
    assert_eq!(ended.code(), 1, "{}", ended.err());
    let out = ended.out();
    for act in ACTS {
        let line = |l: &str| l.split_whitespace().nth(1) == Some(act.name);
        assert_eq!(out.lines().filter(|l| line(l)).count(), 1, "{}", act.name);
    }
    assert!(out.contains("  ESCAPED   system_v_ipc "), "{out}");
    let last = out.lines().last().unwrap();
    let whole = last.contains(" held, 0 known gaps, ") && last.ends_with(" unproven, 1 escaped");
    assert!(whole, "{last}");
}

trial!(Everyone, attack_refuses_level_none);
fn attack_refuses_level_none() {
    let test_home = TestHome::new();
    let ended = attack(&test_home, &["--level", "none"], "");
    assert_eq!(ended.code(), 125, "{}", ended.err());
}
