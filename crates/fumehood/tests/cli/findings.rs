//! What attackers found when they were given the source, each with the way it went wrong. Found, closed, and kept here.

use std::os::unix::fs::symlink;
use std::process::Command;

use serde_json::json;

use crate::lab::{Ended, Lab, cgroups_of, finish, fresh_id};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "what_awaits_its_commit_is_finished_into_its_own_artifact_store",
        For::Everyone,
        own_artifact_store,
    ),
    (
        "a_prepared_workspace_outlives_a_crash_before_anything_ran",
        For::Everyone,
        prepared_and_claimed,
    ),
    (
        "a_prepared_workspace_outlives_a_crash_after_it_ran",
        For::Everyone,
        prepared_and_ended,
    ),
    (
        "a_workspace_that_is_gone_is_not_called_complete",
        For::Everyone,
        gone,
    ),
    (
        "an_older_copy_of_the_database_gets_the_attempt_anew",
        For::Everyone,
        older_copy,
    ),
    (
        "in_recovery_the_content_decides_not_the_time",
        For::Everyone,
        touched,
    ),
    (
        "what_is_lost_is_not_counted_nor_expected_in_vain",
        For::Everyone,
        lost,
    ),
    ("what_is_discarded_leaves_nothing", For::Everyone, discarded),
    (
        "a_database_that_was_exchanged_is_not_committed_to",
        For::Everyone,
        exchanged,
    ),
    (
        "an_older_copy_of_the_database_frees_nothing",
        For::Everyone,
        sweeping_copy,
    ),
    (
        "a_script_behind_anothers_link_is_not_copied",
        For::Root,
        script_link,
    ),
    (
        "a_projects_patterns_are_bounded",
        For::Everyone,
        wild_patterns,
    ),
    (
        "a_label_that_the_program_made_up_is_not_kept",
        For::Everyone,
        label,
    ),
    (
        "a_sparse_file_of_many_names_is_laid_out_as_one",
        For::Everyone,
        many_names,
    ),
];

const LEAVES: &str = "echo small > a; head -c 3000000 /dev/zero > big";

/// `fumehood ARGS`, stopped or failing at a step.
fn with_fault(lab: &Lab, fault: &str, args: &[&str]) -> Ended {
    let mut command = lab.fumehood();
    command.args(args).env("FUMEHOOD_FAULT", fault);
    finish(command)
}

fn run_with_fault(lab: &Lab, fault: &str, options: &[&str], script: &str) -> Ended {
    let head = ["run"].iter().chain(options);
    let args: Vec<&str> = head.chain(&["--", "sh", "-c", script]).copied().collect();
    with_fault(lab, fault, &args)
}

fn own_artifact_store() {
    let lab = Lab::new();
    let other = lab.path("other-store");
    let at = ["--id", "p", "--artifacts", other.to_str().unwrap()];
    let ended = run_with_fault(&lab, "transaction_open=eio", &at, LEAVES);
    assert_eq!(ended.code(), 121, "{}", ended.err());
    // Somebody finishes it who has another store.
    lab.gc(&[]).good();
    let row = "SELECT outputs_count, complete FROM analyses_v1";
    assert_eq!(lab.sql(row), [[json!(2), json!(1)]]);
    let verified = lab.ask(["verify", "--artifacts", other.to_str().unwrap()]);
    verified.good();
    lab.assert_nothing_left();
}

fn prepared_and_claimed() {
    let lab = Lab::new();
    lab.ask(["workspace", "create", "w"]).good();
    let precious = lab.workspace("w").join("precious");
    std::fs::write(&precious, "mine").unwrap();
    let ended = run_with_fault(&lab, "claimed=kill", &["--in", "w"], "true");
    assert_eq!(ended.status.code(), None, "it was killed");
    lab.gc(&[]).good();
    assert!(precious.exists());
    lab.run(["--in", "w", "--", "sh", "-c", "cat precious; echo x > f"])
        .good();
    lab.ask(["post-process", "w"]).good();
    assert!(precious.exists());
    lab.ask(["workspace", "remove", "w"]).good();
    lab.assert_nothing_left();
}

fn prepared_and_ended() {
    let lab = Lab::new();
    lab.ask(["workspace", "create", "w"]).good();
    let precious = lab.workspace("w").join("precious");
    std::fs::write(&precious, "mine").unwrap();
    let ended = run_with_fault(&lab, "ended=kill", &["--in", "w"], LEAVES);
    assert_eq!(ended.status.code(), None, "it was killed");
    lab.gc(&[]).good();
    assert!(precious.exists());
    let processed = lab.ask(["post-process", "w"]);
    assert_eq!(processed.code(), 125, "{}", processed.err());
    let row = "SELECT reason, outputs_count FROM analyses_v1";
    let expected = [json!("runner_lost"), json!(2)];
    assert_eq!(lab.sql(row), [expected]);
    assert!(precious.exists());
    lab.ask(["workspace", "remove", "w"]).good();
    lab.assert_nothing_left();
}

fn gone() {
    let lab = Lab::new();
    lab.ask(["workspace", "create", "w"]).good();
    lab.run(["--in", "w", "--", "sh", "-c", LEAVES]).good();
    // As when /tmp is emptied at boot.
    std::fs::remove_dir_all(lab.workspace("w")).unwrap();
    lab.ask(["post-process", "w"]).good();
    let row = "SELECT complete, outputs_count FROM analyses_v1";
    assert_eq!(lab.sql(row), [[json!(0), json!(0)]]);
    assert_eq!(lab.sql_one("SELECT remark FROM remarks_v1"), "lost");
}

fn older_copy() {
    let lab = Lab::new();
    lab.sh(&["--id", "before"], "true").good();
    // Whoever closes the database puts what is in its log into the file.
    lab.gc(&[]).good();
    let database = lab.home.join("fumehood.db");
    let copy = lab.path("copy.db");
    std::fs::copy(&database, &copy).unwrap();
    run_with_fault(&lab, "ended=kill", &["--id", "later"], LEAVES);
    for ending in ["", "-wal", "-shm"] {
        let _absent = std::fs::remove_file(lab.home.join(format!("fumehood.db{ending}")));
    }
    std::fs::copy(&copy, &database).unwrap();
    lab.gc(&[]).good();
    let row = "SELECT outputs_count FROM analyses_v1 WHERE id = 'later'";
    assert_eq!(lab.sql_one(row), 2);
    lab.assert_nothing_left();
}

fn touched() {
    let lab = Lab::new();
    run_with_fault(&lab, "manifest_written=kill", &["--id", "t"], LEAVES);
    let file = std::fs::File::options()
        .append(true)
        .open(lab.workspace("t").join("big"));
    file.unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    lab.gc(&[]).good();
    let row = "SELECT outputs_count, complete FROM analyses_v1";
    assert_eq!(lab.sql(row), [[json!(2), json!(1)]]);
}

fn lost() {
    let lab = Lab::new();
    let options = ["--id", "l", "--expect", "big"];
    run_with_fault(&lab, "manifest_written=kill", &options, LEAVES);
    std::fs::remove_file(lab.workspace("l").join("big")).unwrap();
    lab.gc(&[]).good();
    let row = "SELECT state, reason, output_bytes FROM analyses_v1";
    let expected = [json!("failed"), json!("missing_output"), json!(6)];
    assert_eq!(lab.sql(row), [expected]);
}

fn discarded() {
    let lab = Lab::new();
    let id = fresh_id("d");
    run_with_fault(&lab, "outcome_written=kill", &["--id", &id], LEAVES);
    lab.ask(["workspace", "remove", &id])
        .refused(125, "--discard");
    lab.ask(["workspace", "remove", &id, "--discard"]).good();
    let row = "SELECT state, complete, outputs_count FROM analyses_v1";
    let expected = [json!("succeeded"), json!(0), json!(0)];
    assert_eq!(lab.sql(row), [expected]);
    assert_eq!(cgroups_of(&id), Vec::<std::path::PathBuf>::new());
    lab.assert_nothing_left();
}

fn exchanged() {
    let lab = Lab::new();
    lab.sh(&["--id", "before"], "true").good();
    // Whoever closes the database puts what is in its log into the file.
    lab.gc(&[]).good();
    let script = "echo ready; read go; echo x > f";
    let mut command = lab.run_command(["--id", "e", "--stdin", "-", "--", "sh", "-c", script]);
    command.stdin(std::process::Stdio::piped());
    let mut live = crate::lab::Live::start(command);
    live.wait_for("ready");
    let (database, aside) = (lab.home.join("fumehood.db"), lab.path("aside.db"));
    std::fs::rename(&database, &aside).unwrap();
    drop(live.child.stdin.take());
    let ended = live.end();
    assert_eq!(ended.code(), 121, "{}", ended.err());
    for ending in ["", "-wal", "-shm"] {
        let _absent = std::fs::remove_file(lab.home.join(format!("fumehood.db{ending}")));
    }
    std::fs::rename(&aside, &database).unwrap();
    lab.ask(["post-process", "e"]).good();
    let row = "SELECT outputs_count FROM analyses_v1 WHERE id = 'e'";
    assert_eq!(lab.sql_one(row), 1);
    lab.assert_nothing_left();
}

fn sweeping_copy() {
    let lab = Lab::new();
    lab.sh(&["--id", "before"], "echo before > f").good();
    lab.gc(&[]).good();
    let copy = lab.home.join("copy.db");
    std::fs::copy(lab.home.join("fumehood.db"), &copy).unwrap();
    lab.sh(&["--id", "after"], "echo after > f").good();
    let db = format!("sqlite:{}", copy.display());
    let _refused = lab.gc(&["--db", &db]);
    lab.ask(["verify"]).good();
}

fn script_link() {
    let lab = Lab::new();
    let secret = lab.write("secret", "the secret is out\n");
    let link = lab.project.join("a.sh");
    symlink(&secret, &link).unwrap();
    // The control: a link of the caller's own.
    let ended = lab.run([link.to_str().unwrap()]);
    assert!(ended.err().contains("line 1: the"), "{}", ended.err());
    std::os::unix::fs::lchown(&link, Some(54321), Some(54321)).unwrap();
    let ended = lab.run([link.to_str().unwrap()]);
    ended.refused(125, "another user made");
}

fn wild_patterns() {
    let lab = Lab::new();
    let wild = "*a".repeat(240);
    let patterns: Vec<String> = (0..64)
        .map(|n| format!("{:?}", format!("{wild}{n}")))
        .collect();
    lab.write(
        "project/fumehood.toml",
        format!("output = [{}]\n", patterns.join(", ")),
    );
    lab.sh(&[], "true").refused(125, "wildcards");
}

fn label() {
    let lab = Lab::new();
    let script = "import os\nopen('f', 'w').write('x')\n\
        try: os.setxattr('f', 'security.selinux', b'A' * 100)\nexcept OSError as e: print(e)\n\
        try: os.setxattr('f', 'user.mine', b'A')\nexcept OSError as e: print(e)";
    lab.python(&["--id", "x"], script).good();
    let hash = lab.sql_one("SELECT blake3 FROM outputs_v1");
    let object = lab.object(hash.as_str().unwrap());
    let mut command = Command::new("getfattr");
    let listed = command.args(["-m", "-", "--absolute-names"]).arg(&object);
    let listed = listed.output().unwrap();
    assert!(listed.status.success());
    assert_eq!(String::from_utf8_lossy(&listed.stdout), "");
}

fn many_names() {
    let lab = Lab::new();
    let size = lab.path("size");
    let script = format!(
        "#!/bin/sh\nls | wc -l > {0}.names\ndu -sk . | cut -f1 > {0}\n",
        size.display()
    );
    let step = lab.write_program("step", script);
    lab.write(
        "person/.config/fumehood/config.toml",
        format!("[post_process]\ncommand = [{step:?}]\n"),
    );
    let script = "truncate -s 200M f; for n in 1 2 3 4 5 6 7 8 9; do ln f f$n; done";
    lab.sh(&["--id", "n"], script).good();
    let read = |path: String| -> u64 {
        let text = std::fs::read_to_string(path).unwrap();
        text.trim().parse().unwrap()
    };
    assert_eq!(read(format!("{}.names", size.display())), 10, "the control");
    assert!(read(size.display().to_string()) < 10_000, "KiB on disk");
}
