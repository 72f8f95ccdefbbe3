//! The steps of a run as single commands: `workspace create`, `run --in`, `post-process`, `workspace remove`; and `record`, for
//! results that were made without a sandbox.

use std::os::unix::process::ExitStatusExt;

use serde_json::json;
use store::types::crash_points;
use testkit::home::{TestHome, set_mode};
use testkit::trial;

trial!(Everyone, each_command_of_a_prepared_workspace_does_its_step);
fn each_command_of_a_prepared_workspace_does_its_step() {
    let test_home = TestHome::new();
    let path = test_home.ask(["workspace", "create", "w"]).good();
    let workspace = test_home.workspace("w");
    assert_eq!(path.trim_end(), workspace.to_str().unwrap());
    assert_eq!(
        std::os::unix::fs::MetadataExt::mode(&workspace.metadata().unwrap()) & 0o7777,
        0o700
    );
    std::fs::write(workspace.join("in.txt"), "put there\n").unwrap();
    std::fs::write(workspace.join("edit.txt"), "before\n").unwrap();
    assert!(test_home.ask(["list"]).err().contains("run --in w"));
    let ended = test_home.run([
        "--in",
        "w",
        "--",
        "sh",
        "-c",
        "cat in.txt; echo after > edit.txt; echo '{\"n\": 3}' > result.json; exit 4",
    ]);
    assert_eq!(ended.code(), 4, "{}", ended.err());
    assert_eq!(ended.out(), "put there\n");
    assert!(
        ended.err().contains("fumehood post-process w"),
        "{}",
        ended.err()
    );
    assert_eq!(
        test_home.sql_one("SELECT COUNT(*) FROM outputs_v1"),
        0,
        "nothing is committed yet"
    );
    assert_eq!(
        std::fs::read(workspace.join("edit.txt")).unwrap(),
        b"after\n"
    );
    // `post-process` exits with the code of the run.
    let done = test_home.ask(["post-process", "w"]);
    assert_eq!(done.code(), 4, "{}", done.err());
    let rows = test_home.sql("SELECT path_text FROM outputs_v1 ORDER BY path");
    assert_eq!(
        rows,
        [[json!("edit.txt")], [json!("result.json")]],
        "the input is unchanged"
    );
    let row =
        test_home.sql("SELECT state, exit_code, isolation_level, result ->> 'n' FROM analyses_v1");
    assert_eq!(row, [[json!("failed"), json!(4), json!("full"), json!(3)]]);
    // A repeated `post-process` changes nothing, and the files belong to the user.
    assert_eq!(test_home.ask(["post-process", "w"]).code(), 4);
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM attempts_v1"), 1);
    std::fs::write(workspace.join("edit.txt"), "mine\n").unwrap();
    assert_eq!(
        test_home
            .ask(["outputs", "w", "edit.txt", "-o", "-"])
            .good(),
        "after\n"
    );
    test_home.ask(["verify"]).good();
    test_home.ask(["workspace", "remove", "w"]).good();
    test_home.assert_nothing_left();
    assert_eq!(
        test_home.ask(["workspace", "remove", "w"]).code(),
        125,
        "it is gone"
    );
    assert_eq!(
        test_home
            .ask(["outputs", "w", "edit.txt", "-o", "-"])
            .good(),
        "after\n"
    );
}

trial!(Everyone, steps_out_of_order_are_refused);
fn steps_out_of_order_are_refused() {
    let test_home = TestHome::new();
    test_home.ask(["workspace", "create", "a"]).good();
    assert_eq!(
        test_home.ask(["workspace", "create", "a"]).code(),
        125,
        "it is there"
    );
    assert_eq!(
        test_home.ask(["post-process", "a"]).code(),
        125,
        "nothing ran"
    );
    assert_eq!(
        test_home.run(["--in", "b", "--", "true"]).code(),
        125,
        "it was not made"
    );
    assert_eq!(
        test_home.sh(&["--id", "a"], "true").code(),
        125,
        "the id is taken"
    );
    for with in [
        ["--id", "a"],
        ["--keep", "always"],
        ["--workspace", "memory"],
    ] {
        let args = ["--in", "a"].iter().chain(&with).chain(&["--", "true"]);
        assert_eq!(test_home.run(args).code(), 125, "{with:?}");
    }
    for odd in ["../x", "", "a/b", "-x", "x\u{1b}"] {
        assert_eq!(
            test_home.ask(["workspace", "create", "--", odd]).code(),
            125,
            "{odd:?}"
        );
        assert_eq!(
            test_home.ask(["workspace", "remove", "--", odd]).code(),
            125,
            "{odd:?}"
        );
    }
    // A directory that Fumehood did not make is neither used nor removed.
    std::fs::create_dir(test_home.workspace("mine")).unwrap();
    std::fs::write(test_home.workspace("mine").join("f"), "mine").unwrap();
    assert_eq!(test_home.ask(["workspace", "create", "mine"]).code(), 125);
    assert_eq!(test_home.run(["--in", "mine", "--", "true"]).code(), 125);
    assert_eq!(test_home.ask(["workspace", "remove", "mine"]).code(), 125);
    assert!(test_home.workspace("mine").join("f").exists());
    std::fs::remove_dir_all(test_home.workspace("mine")).unwrap();
    // If the workspace was replaced by another directory, no run starts in it.
    std::fs::rename(
        test_home.workspace("a"),
        test_home.workspace_root.join("moved"),
    )
    .unwrap();
    std::fs::create_dir(test_home.workspace("a")).unwrap();
    std::fs::write(test_home.workspace("a").join("f"), "mine").unwrap();
    let ended = test_home.run(["--in", "a", "--", "rm", "f"]);
    assert_eq!(ended.code(), 125, "{}", ended.err());
    test_home.ask(["workspace", "remove", "a"]);
    assert!(test_home.workspace("a").join("f").exists());
}

trial!(
    Everyone,
    an_uncommitted_workspace_is_not_removed_without_discard
);
fn an_uncommitted_workspace_is_not_removed_without_discard() {
    let test_home = TestHome::new();
    test_home.ask(["workspace", "create", "w"]).good();
    test_home
        .run(["--in", "w", "--", "sh", "-c", "echo precious > f"])
        .good();
    test_home
        .ask(["workspace", "remove", "w"])
        .refused(125, "--discard");
    test_home.gc(&[]).good();
    test_home.gc(&["--kept"]).good();
    test_home.sh(&[], "true").good();
    assert_eq!(
        std::fs::read(test_home.workspace("w").join("f")).unwrap(),
        b"precious\n"
    );
    assert_eq!(test_home.ask(["rm", "w"]).code(), 125);
    test_home
        .ask(["workspace", "remove", "w", "--discard"])
        .good();
    let row = test_home.sql("SELECT state, outputs_count FROM analyses_v1 WHERE id = 'w'");
    assert_eq!(row, [[json!("succeeded"), json!(0)]]);
    test_home.assert_nothing_left();
    // A workspace in which nothing ran can be removed without --discard.
    test_home.ask(["workspace", "create", "v"]).good();
    std::fs::write(test_home.workspace("v").join("f"), "x").unwrap();
    test_home.ask(["workspace", "remove", "v"]).good();
    test_home.assert_nothing_left();
}

trial!(Everyone, a_workspace_is_run_in_once);
fn a_workspace_is_run_in_once() {
    let test_home = TestHome::new();
    test_home.ask(["workspace", "create", "w"]).good();
    test_home
        .run(["--in", "w", "--", "sh", "-c", "echo 1 > one"])
        .good();
    let second = ["--in", "w", "--replace", "--", "sh", "-c", "rm one"];
    // A second run is refused before and after the commit, because its outputs would mix with those of the first.
    test_home.run(second).refused(125, "post-process");
    assert!(test_home.workspace("w").join("one").exists());
    test_home.ask(["post-process", "w"]).good();
    test_home.run(second).refused(125, "workspace remove");
    assert!(test_home.workspace("w").join("one").exists());
    test_home.ask(["workspace", "remove", "w"]).good();
    // A run in a new workspace under the same id is a new attempt, and needs --replace.
    test_home.ask(["workspace", "create", "w"]).good();
    test_home
        .run(["--in", "w", "--", "true"])
        .refused(125, "--replace");
    test_home
        .run(["--in", "w", "--replace", "--", "sh", "-c", "echo 2 > two"])
        .good();
    test_home.ask(["post-process", "w"]).good();
    assert_eq!(
        test_home.ask(["outputs", "w", "two", "-o", "-"]).good(),
        "2\n"
    );
    assert_eq!(
        test_home.ask(["outputs", "w@1", "one", "-o", "-"]).good(),
        "1\n"
    );
    test_home.ask(["workspace", "remove", "w"]).good();
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    hostile_outputs_of_a_prepared_workspace_are_refused
);
fn hostile_outputs_of_a_prepared_workspace_are_refused() {
    let test_home = TestHome::new();
    test_home.ask(["workspace", "create", "w"]).good();
    // `post-process` does not follow links that the user made in the workspace, either.
    std::os::unix::fs::symlink("/etc/passwd", test_home.workspace("w").join("passwd")).unwrap();
    let script = "ln -s / root; mkfifo pipe; echo x > good; mkdir c; echo y > c/f; chmod 0 c c/f good; printf z > \"$(printf 'a\\033b')\"";
    test_home
        .run(["--in", "w", "--", "sh", "-c", script])
        .good();
    let done = test_home.ask(["post-process", "w", "--json"]);
    assert_eq!(done.code(), 0, "{}", done.err());
    let document = done.document();
    let outputs = document["outputs"].as_array().unwrap();
    let paths: Vec<&str> = outputs
        .iter()
        .map(|o| o["path"].as_str().unwrap())
        .collect();
    assert_eq!(paths, ["a\u{1b}b", "c/f", "good"], "{document}");
    assert_eq!(
        document["collection"]["remark_counts"]["symlink"], 2,
        "{document}"
    );
    assert_eq!(document["collection"]["remark_counts"]["fifo"], 1);
    test_home.ask(["workspace", "remove", "w"]).good();
    test_home.assert_nothing_left();
}

trial!(Everyone, results_made_elsewhere_are_recorded);
fn results_made_elsewhere_are_recorded() {
    let test_home = TestHome::new();
    let result = test_home.write("project/answer.json", "{\"answer\": 42}");
    test_home.write("project/out/plot.svg", "<svg/>");
    test_home.write("project/out/deep/x", "x");
    test_home
        .ask(["record", "r", "--result", "answer.json", "--dir", "out"])
        .good();
    let row = test_home.sql("SELECT state, reason, isolation_level, result ->> 'answer', outputs_count FROM analyses_v1");
    assert_eq!(
        row,
        [[
            json!("succeeded"),
            json!("recorded"),
            json!("none"),
            json!(42),
            json!(3)
        ]]
    );
    assert_eq!(
        test_home
            .ask(["outputs", "r", "result.json", "-o", "-"])
            .good(),
        "{\"answer\": 42}"
    );
    assert_eq!(
        test_home.ask(["outputs", "r", "deep/x", "-o", "-"]).good(),
        "x"
    );
    let shown = test_home.ask(["show", "r"]).good();
    assert!(shown.contains("without a sandbox"), "{shown}");
    // The files stay in place and belong to the user.
    assert!(result.exists());
    std::fs::write(test_home.path("project/out/deep/x"), "changed").unwrap();
    test_home.ask(["verify"]).good();
    // Recording an id again needs --replace.
    test_home
        .ask(["record", "r", "--result", "answer.json"])
        .refused(125, "--replace");
    test_home.ask([
        "record",
        "r",
        "--result",
        "answer.json",
        "--replace",
        "--status",
        "failed",
    ]);
    assert_eq!(test_home.sql_one("SELECT state FROM analyses_v1"), "failed");
    test_home
        .ask(["record", "e", "--dir", "out", "--expect", "*.csv"])
        .refused(120, "*.csv");
    assert_eq!(
        test_home.ask(["record", "x"]).code(),
        125,
        "nothing to record"
    );
    assert_eq!(
        test_home.ask(["record", "x", "--dir", "nowhere"]).code(),
        125
    );
    assert_eq!(
        test_home.ask(["record", "x", "--result", "nowhere"]).code(),
        125
    );
    assert_eq!(
        test_home
            .ask(["record", "x", "--dir", "out", "--db", "none"])
            .code(),
        125
    );
    test_home.write("project/out/result.json", "{}");
    assert_eq!(
        test_home
            .ask(["record", "x", "--dir", "out", "--result", "answer.json"])
            .code(),
        125,
        "two results"
    );
    // The failed commands left nothing that blocks a later `record`.
    test_home.ask(["record", "x", "--dir", "out"]).good();
    test_home.assert_nothing_left();
}

trial!(Everyone, record_collects_a_directory_as_untrusted);
fn record_collects_a_directory_as_untrusted() {
    let test_home = TestHome::new();
    let secret = test_home.write("secret", "not handed in");
    test_home.write("project/out/good", "good");
    let out = test_home.path("project/out");
    std::os::unix::fs::symlink(&secret, out.join("link")).unwrap();
    assert!(
        std::process::Command::new("mkfifo")
            .arg(out.join("pipe"))
            .status()
            .unwrap()
            .success()
    );
    std::fs::hard_link(&secret, out.join("hard")).unwrap();
    test_home.write("project/out/closed", "closed");
    set_mode(&out.join("closed"), 0o000);
    let document = test_home.ask_json(["record", "h", "--dir", "out", "--json"]);
    let outputs = document["outputs"].as_array().unwrap();
    let paths: Vec<&str> = outputs
        .iter()
        .map(|o| o["path"].as_str().unwrap())
        .collect();
    assert!(
        paths.contains(&"good") && !paths.contains(&"link") && !paths.contains(&"hard"),
        "{document}"
    );
    let counts = &document["collection"]["remark_counts"];
    assert_eq!(
        (
            &counts["symlink"],
            &counts["fifo"],
            &counts["linked_elsewhere"]
        ),
        (&json!(1), &json!(1), &json!(1))
    );
    // `record` only reads: file modes are unchanged.
    let mode =
        std::os::unix::fs::MetadataExt::mode(&out.join("closed").metadata().unwrap()) & 0o7777;
    assert_eq!(mode, 0, "the mode of a file that was only to be read");
    assert!(out.join("link").symlink_metadata().unwrap().is_symlink());
    assert_eq!(std::fs::read(&secret).unwrap(), b"not handed in");
}

trial!(Everyone, the_steps_work_without_a_database);
fn the_steps_work_without_a_database() {
    let test_home = TestHome::new();
    test_home
        .ask(["workspace", "create", "w", "--db", "none"])
        .good();
    test_home
        .run(["--in", "w", "--db", "none", "--", "sh", "-c", "echo x > f"])
        .good();
    assert_eq!(
        std::fs::read(test_home.workspace("w").join("f")).unwrap(),
        b"x\n"
    );
    test_home
        .ask(["workspace", "remove", "w", "--db", "none"])
        .good();
    assert!(!test_home.home.join("fumehood.db").exists());
    test_home.assert_nothing_left();
}

/// Runs `run --in w`, which kills itself at a crash point.
fn run_until_killed(test_home: &TestHome, fault: &str, options: &[&str]) {
    let program = ["--", "true"];
    let mut command = test_home.run_command(["--in", "w"].iter().chain(options).chain(&program));
    command.env(crash_points::VARIABLE, fault);
    let killed = command.output().unwrap().status;
    assert_eq!(killed.signal(), Some(9), "{killed}");
}

trial!(
    Everyone,
    a_runner_that_dies_leaves_the_workspace_to_its_user
);
fn a_runner_that_dies_leaves_the_workspace_to_its_user() {
    for options in [&[][..], &["--db", "none"]] {
        let test_home = TestHome::new();
        let ask = |words: &[&'static str]| test_home.ask(words.iter().chain(options)).good();
        ask(&["workspace", "create", "w"]);
        let mine = test_home.workspace("w").join("mine");
        std::fs::write(&mine, "precious").unwrap();
        run_until_killed(&test_home, "filled=kill", options);
        ask(&["gc"]);
        assert_eq!(std::fs::read(&mine).unwrap(), b"precious");
        // A run in the workspace still works.
        test_home
            .run(["--in", "w"].iter().chain(options).chain(&["--", "true"]))
            .good();
        assert_eq!(std::fs::read(&mine).unwrap(), b"precious");
    }
}

trial!(
    Everyone,
    a_row_that_run_json_does_not_mention_is_ended_as_runner_lost
);
fn a_row_that_run_json_does_not_mention_is_ended_as_runner_lost() {
    let test_home = TestHome::new();
    test_home.ask(["workspace", "create", "w"]).good();
    run_until_killed(&test_home, "begun=kill", &[]);
    let paper = test_home.home.join("runs/w/1/run.json");
    let noted = std::fs::read_to_string(&paper).unwrap();
    assert!(noted.contains("\"begun\":true"), "{noted}");
    let not = noted.replace("\"begun\":true", "\"begun\":false");
    std::fs::write(&paper, not).unwrap();
    test_home.gc(&[]).good();
    test_home.ask(["post-process", "w"]);
    let row = "SELECT state, reason FROM analyses_v1 WHERE id = 'w'";
    assert_eq!(test_home.sql(row), [[json!("error"), json!("runner_lost")]]);
}
