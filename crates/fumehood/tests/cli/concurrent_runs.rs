//! P7 through the binary: analyses that run at the same time cannot reach each other.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;

use testkit::command::RunningCommand;
use testkit::home::TestHome;
use testkit::process::{processes_with, status_number};
use testkit::{fresh_id, is_root, trial};

fn held(test_home: &TestHome, id: &str, script: &str) -> RunningCommand {
    let mut command =
        test_home.run_command(["--id", id, "--stdin", "-", "--", "sh", "-c", script, id]);
    command.stdin(Stdio::piped());
    RunningCommand::start(command)
}

trial!(Everyone, two_runs_at_once_do_not_see_each_other);
fn two_runs_at_once_do_not_see_each_other() {
    let test_home = TestHome::new();
    let (one, two) = (fresh_id("one"), fresh_id("two"));
    let mut first = held(
        &test_home,
        &one,
        "echo mine > secret; echo ready; read go; cat secret",
    );
    first.wait_for("ready");
    let there = test_home.workspace(&one);
    // The attack is in a file, because as an argument it would itself contain the id of the other analysis.
    let attack = format!(
        "cat {0}/secret; ls {0}; echo x > {0}/secret; rm -rf {0}; cat /proc/*/cmdline | tr '\\0' ' '; ls {1}\necho tried",
        there.display(),
        test_home.workspace_root.display()
    );
    test_home.write("project/attack.sh", attack);
    let args = ["--id", &two, "--stdin", "-", "--input", "attack.sh"];
    let script = ["--", "sh", "-c", "sh attack.sh 2>&-; read go; ls"];
    let mut command = test_home.run_command(args.iter().chain(&script));
    command.stdin(Stdio::piped());
    let mut second = RunningCommand::start(command);
    second.wait_for("tried");
    assert_eq!(std::fs::read(there.join("secret")).unwrap(), b"mine\n");
    drop(first.child.stdin.take());
    drop(second.child.stdin.take());
    assert_eq!(first.finish().good(), "ready\nmine\n");
    let out = second.finish().good();
    assert!(!out.contains("mine") && !out.contains(&one), "{out}");
    // An analysis sees only its own workspace by name.
    assert!(out.contains(&format!("scidex-analysis-{two}\n")), "{out}");
    test_home.assert_nothing_left();
}

trial!(Everyone, twenty_runs_at_once_all_succeed);
fn twenty_runs_at_once_all_succeed() {
    let test_home = TestHome::new();
    let stem = fresh_id("many");
    let ids: Vec<String> = (0..20).map(|n| format!("{stem}-{n}")).collect();
    let mut all: Vec<RunningCommand> = ids
        .iter()
        .map(|id| held(&test_home, id, "echo ready; read go; echo $FUMEHOOD_ID"))
        .collect();
    for live in &mut all {
        live.wait_for("ready");
    }
    let mut uids = BTreeSet::new();
    for (id, live) in ids.iter().zip(&all) {
        let program = processes_with(id)
            .into_iter()
            .find(|p| *p != live.pid() && is_shell(*p));
        let program = program.unwrap_or_else(|| panic!("no process of {id}"));
        uids.insert(status_number(program, "Uid").unwrap());
        let workspace = test_home.workspace(id).metadata().unwrap().uid();
        assert!(
            uids.contains(&u64::from(workspace)),
            "{workspace} of {uids:?}"
        );
    }
    let own = u64::from(rustix::process::geteuid().as_raw());
    match is_root() {
        true => assert_eq!((uids.len(), uids.contains(&0)), (20, false), "{uids:?}"),
        false => assert_eq!(uids, BTreeSet::from([own])),
    }
    for live in &mut all {
        drop(live.child.stdin.take());
    }
    for (id, live) in ids.iter().zip(all) {
        assert_eq!(live.finish().good(), format!("ready\n{id}\n"));
    }
    test_home.assert_nothing_left();
}

/// Whether a process is the program itself and not the runner, whose arguments contain the same id.
fn is_shell(pid: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim() == "sh"
}
