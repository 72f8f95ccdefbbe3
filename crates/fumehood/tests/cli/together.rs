//! P7 through the binary: analyses at once do not meet.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;

use crate::lab::{Lab, Live, fresh_id, is_root, processes_with};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    ("two_at_once_do_not_meet", For::Everyone, two),
    ("twenty_at_once_all_succeed", For::Everyone, twenty),
];

fn held(lab: &Lab, id: &str, script: &str) -> Live {
    let mut command = lab.run_command(["--id", id, "--stdin", "-", "--", "sh", "-c", script, id]);
    command.stdin(Stdio::piped());
    Live::start(command)
}

fn two() {
    let lab = Lab::new();
    let (one, two) = (fresh_id("one"), fresh_id("two"));
    let mut first = held(
        &lab,
        &one,
        "echo mine > secret; echo ready; read go; cat secret",
    );
    first.wait_for("ready");
    let there = lab.workspace(&one);
    // In a file, for its own arguments would name the other analysis.
    let attack = format!(
        "cat {0}/secret; ls {0}; echo x > {0}/secret; rm -rf {0}; cat /proc/*/cmdline | tr '\\0' ' '; ls {1}\necho tried",
        there.display(),
        lab.root.display()
    );
    lab.write("project/attack.sh", attack);
    let args = ["--id", &two, "--stdin", "-", "--input", "attack.sh"];
    let script = ["--", "sh", "-c", "sh attack.sh 2>&-; read go; ls"];
    let mut command = lab.run_command(args.iter().chain(&script));
    command.stdin(Stdio::piped());
    let mut second = Live::start(command);
    second.wait_for("tried");
    assert_eq!(std::fs::read(there.join("secret")).unwrap(), b"mine\n");
    drop(first.child.stdin.take());
    drop(second.child.stdin.take());
    assert_eq!(first.end().good(), "ready\nmine\n");
    let out = second.end().good();
    assert!(!out.contains("mine") && !out.contains(&one), "{out}");
    // The only workspace it can see by name is its own.
    assert!(out.contains(&format!("scidex-analysis-{two}\n")), "{out}");
    lab.assert_nothing_left();
}

fn twenty() {
    let lab = Lab::new();
    let stem = fresh_id("many");
    let ids: Vec<String> = (0..20).map(|n| format!("{stem}-{n}")).collect();
    let mut all: Vec<Live> = ids
        .iter()
        .map(|id| held(&lab, id, "echo ready; read go; echo $FUMEHOOD_ID"))
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
        uids.insert(crate::lab::status_number(program, "Uid").unwrap());
        let workspace = lab.workspace(id).metadata().unwrap().uid();
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
        assert_eq!(live.end().good(), format!("ready\n{id}\n"));
    }
    lab.assert_nothing_left();
}

/// Whether it is the program itself, not the runner whose arguments name the same id.
fn is_shell(pid: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim() == "sh"
}
