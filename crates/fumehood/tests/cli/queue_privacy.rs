//! The queue reveals neither which private files a worker can read, nor what belongs to another user or another
//! database.
//!
//! Each trial is a regression test for a defect that an attacker of the queue found. Its comment describes the defect.

use std::os::unix::fs::symlink;
use std::process::Command;

use rustix::process::{Signal, kill_process};
use testkit::command::finish;
use testkit::home::set_mode;
use testkit::wait::eventually;
use testkit::{program, trial};

use crate::queue_home::QueueHome;

trial!(
    Everyone,
    errors_do_not_reveal_which_private_interpreters_exist
);
/// The defect: a submitter got four different answers about files that only the worker's user can see: missing, present,
/// executable, a Python environment. The answer about a missing program quoted the worker's PATH.
fn errors_do_not_reveal_which_private_interpreters_exist() {
    let queue = QueueHome::new();
    let test_home = &queue.test_home;
    test_home.write("private/plain", "text");
    test_home.write_program("private/program", std::fs::read("/bin/sh").unwrap());
    test_home.write_program("private/script", "#!/bin/sh\n");
    test_home.write(
        "private/venv/pyvenv.cfg",
        "home = /usr/bin\nversion = 3.11.2\n",
    );
    std::fs::create_dir(test_home.path("private/venv/bin")).unwrap();
    symlink(
        "/usr/bin/python3",
        test_home.path("private/venv/bin/python"),
    )
    .unwrap();
    symlink(
        test_home.path("private/program"),
        test_home.path("private/link"),
    )
    .unwrap();
    set_mode(&test_home.path("private"), 0o700);
    let names = [
        "nothing",
        "plain",
        "program",
        "script",
        "venv/bin/python",
        "venv/nothing",
        "link",
    ];
    for (n, name) in names.iter().enumerate() {
        let interpreter = test_home.path("private").join(name);
        let line = format!("#!{}\nexit 0\n", interpreter.display());
        let script = test_home.write_program(&format!("project/s{n}"), line);
        queue.submit(&format!("s{n}"), &[], &[script.to_str().unwrap()]);
        queue.submit(
            &format!("p{n}"),
            &[],
            &["--", interpreter.to_str().unwrap()],
        );
    }
    queue.submit("nowhere", &[], &["--", "nosuchprogram"]);
    let open = test_home.write_program("project/open", "#!/bin/sh\nexit 0\n");
    queue.submit("open", &[], &[open.to_str().unwrap()]);
    queue.work("2");
    let told = queue.sql(
        "SELECT DISTINCT state, reason, message FROM attempts WHERE id LIKE 's%' OR id = 'nowhere'",
    );
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(told.starts_with("error|not_found|"), "{told}");
    for secret in ["/usr/sbin", "private", test_home.project.to_str().unwrap()] {
        assert!(!told.contains(secret), "{told}");
    }
    // A submitter who names a path learns that it is not public, and not whether it exists.
    let mut answers: Vec<String> = Vec::new();
    for (n, name) in names.iter().enumerate() {
        let sql = format!("SELECT state, reason, message FROM attempts WHERE id = 'p{n}'");
        answers.push(queue.sql(&sql).replacen(&format!("private/{name}"), "", 1));
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert!(answers[0].starts_with("error|refused|"), "{answers:?}");
    // Control: a public program is found, and a user's own foreground run gets the full answer.
    assert_eq!(queue.ends("open"), "succeeded|exit");
    let own = queue.ask(&["run", "--", "nosuchprogram"]);
    assert!(own.err().contains("/usr/sbin"), "{}", own.err());
}

trial!(
    Root,
    errors_about_paths_out_of_a_listed_root_reveal_no_private_file
);
/// The defect: for a path with `..` or a link below a root that the operator lists, the answers "no such file" and "not listed"
/// told which private files exist and where a private link leads.
fn errors_about_paths_out_of_a_listed_root_reveal_no_private_file() {
    let queue = QueueHome::new();
    let test_home = &queue.test_home;
    set_mode(test_home.path("project").parent().unwrap(), 0o755);
    test_home.write("private/there", "secret");
    set_mode(&test_home.path("private"), 0o700);
    let roots = [("open", 0o755), ("closed", 0o700)];
    let pairs = [
        ("up", "../private/there", "../private/nothing"),
        ("link", "l-there", "l-nothing"),
    ];
    for (root, mode) in roots {
        let dir = test_home.path(root);
        let control = test_home.write(&format!("{root}/control"), "control");
        set_mode(&dir, mode);
        symlink(test_home.path("private/there"), dir.join("l-there")).unwrap();
        symlink(test_home.path("private/nothing"), dir.join("l-nothing")).unwrap();
        for (how, there, nothing) in pairs {
            for (what, name) in [("there", there), ("nothing", nothing)] {
                let path = format!("{}/{name}", dir.display());
                let id = format!("{root}-{how}-{what}");
                queue.submit(&id, &["--read", &path], &["--", "true"]);
            }
        }
        let control = control.to_str().unwrap();
        queue.submit(root, &["--read", control], &["--", "true"]);
    }
    let policy = format!(
        "[read]\nroots = [{:?}, {:?}]\n",
        test_home.path("open"),
        test_home.path("closed")
    );
    let args = ["worker", "--slots", "2", "--memory", "1G", "--until-idle"];
    finish(under_policy(&queue, &policy, &args)).good();
    for (root, _) in roots {
        for (how, there, nothing) in pairs {
            let answer = |what: &str, name: &str| {
                let id = format!("{root}-{how}-{what}");
                assert_eq!(queue.ends(&id), "error|refused", "{id}");
                let sql = format!("SELECT message FROM attempts WHERE id = '{id}'");
                // The two answers may differ in the name that the submitter chose.
                queue.sql(&sql).replace(name, "")
            };
            let answers = [answer("there", there), answer("nothing", nothing)];
            assert_eq!(answers[0], answers[1], "{root} {how}");
            // Everybody may read where a link in the open root leads. The answer about a link in the closed root must
            // not tell it.
            if (root, how) == ("closed", "link") {
                assert!(!answers[0].contains("private"), "{answers:?}");
            }
        }
        assert_eq!(queue.ends(root), "succeeded|exit");
    }
}

/// A command of `fumehood` that sees a copy of /etc with this policy. The host's /etc does not change.
fn under_policy(queue: &QueueHome, policy: &str, args: &[&str]) -> Command {
    let script = r#"
        set -e
        mount -t tmpfs -o mode=755 none "$1"
        cp -a /etc/. "$1"
        mount --bind "$1" /etc
        mkdir -m 755 /etc/fumehood
        umask 022
        printf %s "$2" > /etc/fumehood/policy.toml
        shift 2
        exec "$@"
    "#;
    let etc = queue.test_home.path("etc");
    std::fs::create_dir(&etc).unwrap();
    let mut command = queue.test_home.with_environment(Command::new("unshare"));
    command.env("FUMEHOOD_DB", &queue.url);
    command.args(["--mount", "--propagation", "private", "sh", "-c", script]);
    command.arg("sh").arg(&etc).arg(policy);
    command.arg(program::binary()).args(args);
    command
}

trial!(
    Everyone,
    a_submission_of_another_user_beyond_its_bounds_is_refused
);
/// The defects, for a submission of another user whose row was changed by hand: the submission reserved no memory and
/// ran with 8 GiB on a worker of 2 GiB; it chose the weaker level; it made the runner use gigabytes; its kept workspace
/// stayed for a year.
fn a_submission_of_another_user_beyond_its_bounds_is_refused() {
    let queue = QueueHome::new();
    let degraded = ["--allow-degraded", "memory", "--allow-degraded", "cpus"];
    queue.submit(
        "e-memory",
        &[&degraded[..], &["--memory", "64M"]].concat(),
        &["--", "true"],
    );
    queue.submit(
        "e-cpus",
        &[&degraded[..], &["--cpus", "1"]].concat(),
        &["--", "true"],
    );
    for table in ["queue", "submissions"] {
        queue.sql(&format!(
            "UPDATE {table} SET memory_bytes = 0, cpu_milli = 0 WHERE id IN ('e-memory', 'e-cpus')"
        ));
    }
    let cases = [
        ("f-level", ["--level", "landlock"]),
        ("h-log", ["--log-limit", "1G"]),
        ("h-outputs", ["--max-outputs", "1000000"]),
        ("h-inline", ["--inline-max", "64M"]),
        ("m-keep-for", ["--keep-for", "2d"]),
    ];
    for (id, option) in cases {
        queue.submit(id, &option, &["--", "true"]);
    }
    // Control: the same request within the bounds runs.
    let within = [
        ["--log-limit", "1M"],
        ["--max-outputs", "100"],
        ["--inline-max", "1K"],
        ["--keep-for", "1h"],
        ["--memory", "64M"],
    ];
    let within = [degraded.to_vec(), within.concat()].concat();
    queue.submit("within", &within, &["--", "true"]);
    queue.work("2");
    for id in ["e-memory", "e-cpus"].into_iter().chain(cases.map(|c| c.0)) {
        assert_eq!(queue.ends(id), "error|refused", "{id}");
    }
    assert_eq!(queue.ends("within"), "succeeded|exit");
}

trial!(Root, a_private_repository_is_not_in_the_record);
/// The defect: the record had the branch, commit and state of a repository that only root can read, if a submitter named its
/// directory.
fn a_private_repository_is_not_in_the_record() {
    let queue = QueueHome::new();
    let test_home = &queue.test_home;
    set_mode(test_home.path("project").parent().unwrap(), 0o755);
    let git = |args: &[&str]| {
        let mut git = test_home.with_environment(Command::new("git"));
        let who = ["-c", "user.name=x", "-c", "user.email=x"];
        let ended = finish({
            git.args(who).args(args);
            git
        });
        ended.good();
    };
    git(&["init", "-q", "-b", "secretbranch"]);
    git(&["commit", "-q", "--allow-empty", "-m", "x"]);
    set_mode(&test_home.path("project/.git"), 0o700);
    let project = test_home.project.to_str().unwrap();
    queue.submit("theirs", &["--project", project], &["--", "true"]);
    queue.work("1");
    assert_eq!(queue.ends("theirs"), "succeeded|exit");
    queue.ask(&["run", "--id", "own", "--", "true"]).good();
    let tells = "SELECT id FROM attempts WHERE provenance::text LIKE '%secretbranch%'";
    assert_eq!(queue.sql(tells), "own", "and the control");
}

trial!(Everyone, a_private_library_is_not_in_the_record);
/// The defect: R_LIBS could name any directory, and the record listed the packages in it.
fn a_private_library_is_not_in_the_record() {
    let queue = QueueHome::new();
    let test_home = &queue.test_home;
    test_home.write(
        "private/secretpkg/DESCRIPTION",
        "Package: secretpkg\nVersion: 6.6.6\nBuilt: R 4.2.2; ; 2024-01-01 00:00:00 UTC; unix\n",
    );
    set_mode(&test_home.path("private"), 0o700);
    let variable = format!("R_LIBS={}", test_home.path("private").display());
    queue.submit("theirs", &["--env", &variable], &["--", "true"]);
    queue.work("1");
    assert_eq!(queue.ends("theirs"), "succeeded|exit");
    let own = ["run", "--id", "own", "--env", &variable, "--", "true"];
    queue.ask(&own).good();
    let tells = "SELECT id FROM attempts WHERE provenance::text LIKE '%6.6.6%'";
    assert_eq!(queue.sql(tells), "own", "and the control");
}

trial!(
    Everyone,
    a_workspace_that_another_database_kept_is_not_removed
);
/// The defect: `submit --id ID` to a worker's database removed the workspace of the operator's own run with that id, which another
/// database had recorded.
fn a_workspace_that_another_database_kept_is_not_removed() {
    let queue = QueueHome::new();
    let test_home = &queue.test_home;
    let other = format!("sqlite:{}", test_home.path("other.db").display());
    let keep = ["--keep", "always", "--keep-for", "1d"];
    let options = [&["--db", &other, "--id", "kept"][..], &keep].concat();
    test_home.sh(&options, "echo precious > file").good();
    let file = test_home.workspace("kept").join("file");
    assert!(file.exists());
    queue.submit("kept", &[], &["--", "true"]);
    queue.work("1");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious\n");
    assert!(queue.ends("kept").starts_with("error|"));
    // Control: a workspace that this database's own attempt kept does not block the next attempt.
    let args = [&["--retries", "0"][..], &keep].concat();
    queue.submit("again", &args, &["--", "sh", "-c", "touch first; ls"]);
    queue.work("1");
    assert!(test_home.workspace("again").join("first").exists());
    queue.ask(&["retry", "again"]).good();
    queue.work("1");
    assert_eq!(queue.ends("again"), "succeeded|exit succeeded|exit");
    test_home.gc(&["--kept"]).good();
}

trial!(Everyone, a_secret_does_not_stay_in_a_dead_workers_slot);
/// The defect: after a kill of runner and worker, `gc` ended the attempt and erased the secret in the database. The order file in
/// the slot kept the secret until a worker with the same name started.
fn a_secret_does_not_stay_in_a_dead_workers_slot() {
    let queue = QueueHome::new();
    let secret = ["--env", "WORD=marker-secret", "--secret-env", "WORD"];
    queue.submit_gated("told", &[&secret[..], &["--retries", "0"]].concat());
    let worker = queue.worker(&[]);
    queue.wait_until_up("told");
    let runner = queue.runner_of("told");
    worker.kill();
    let order = queue.test_home.home.join("workers/default/slots/0/order");
    let holds = || {
        std::fs::read_to_string(&order)
            .unwrap()
            .contains("marker-secret")
    };
    queue.ask(&["gc"]).good();
    assert!(holds(), "its runner lives");
    kill_process(runner, Signal::KILL).unwrap();
    eventually("gc ends it", || {
        queue.ask(&["gc"]);
        queue.ends("told") == "error|runner_lost"
    });
    assert!(!holds());
}
