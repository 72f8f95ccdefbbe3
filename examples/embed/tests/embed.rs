//! Runs the example.

#![allow(clippy::unwrap_used)]

use std::process::Command;

#[test]
fn the_example_runs_an_analysis_and_prints_its_outputs() {
    let dir = tempfile::tempdir().unwrap();
    let project = dir.path().join("project");
    std::fs::create_dir(&project).unwrap();
    let ran = Command::new(env!("CARGO_BIN_EXE_fumehood-embed"))
        .args(["sh", "-c", "mkdir out; printf 12345 > out/five.txt"])
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", dir.path())
        .env("FUMEHOOD_HOME", dir.path().join("home"))
        .current_dir(&project)
        .output()
        .unwrap();
    let (stdout, stderr) = (
        String::from_utf8(ran.stdout).unwrap(),
        String::from_utf8(ran.stderr).unwrap(),
    );
    assert!(ran.status.success(), "{stderr}");
    let lines: Vec<&str> = stdout.lines().collect();
    assert!(lines[0].ends_with(" succeeded"), "{stdout}{stderr}");
    assert_eq!(lines[1..], ["5 bytes out/five.txt"]);
    // The attempt is recorded, and nothing else is left.
    assert!(dir.path().join("home/fumehood.db").exists());
    let runs = std::fs::read_dir(dir.path().join("home/runs")).unwrap();
    assert_eq!(runs.count(), 0);
}
