//! The commands that read the record: they find an analysis by its id, a prefix of it or `@last`, and list, show and export it.

use std::process::{Command, Stdio};

use serde_json::{Value, json};
use testkit::command::{RunningCommand, finish};
use testkit::home::{TestHome, set_mode};
use testkit::trial;

fn ids(document: &Value) -> Vec<&str> {
    let all = document["analyses"].as_array().unwrap();
    all.iter().map(|a| a["id"].as_str().unwrap()).collect()
}

trial!(Everyone, a_list_is_filtered_and_bounded);
fn a_list_is_filtered_and_bounded() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "fine"], "echo x > f").good();
    assert_eq!(test_home.sh(&["--id", "bad"], "exit 3").code(), 3);
    assert_eq!(
        test_home
            .sh(
                &["--id", "slow", "--timeout", "300ms", "--grace", "0"],
                "sleep 60"
            )
            .code(),
        124
    );
    test_home.sh(&["--id", "fine", "--replace"], "true").good();
    let all = test_home.ask_json(["list", "--json"]);
    assert_eq!(ids(&all), ["fine", "slow", "bad"], "newest first");
    assert_eq!(
        (&all["analyses"][0]["attempt"], &all["more"]),
        (&json!(2), &json!(false))
    );
    let text = test_home.ask(["list"]).good();
    assert!(
        text.contains("fine@2") && text.contains("failed (exit 3)"),
        "{text}"
    );
    assert!(text.contains("timed out (wall time)"), "{text}");
    let of = |args: &[&str]| {
        let args: Vec<&str> = ["list", "--json"].iter().chain(args).copied().collect();
        let document = test_home.ask_json(args);
        ids(&document)
            .iter()
            .map(|id| id.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(of(&["--status", "failed"]), ["bad"]);
    assert_eq!(of(&["--status", "failed,timed-out"]), ["slow", "bad"]);
    assert_eq!(of(&["--status", "out_of_memory"]), [""; 0]);
    assert_eq!(of(&["--since", "1d"]).len(), 3);
    assert_eq!(of(&["--since", "2999-01-01"]), [""; 0]);
    assert_eq!(of(&["--all"]), ["fine", "slow", "bad", "fine"]);
    assert_eq!(of(&["-n", "1"]), ["fine"]);
    assert_eq!(
        test_home.ask_json(["list", "--json", "-n", "1"])["more"],
        true
    );
    for wrong in [
        &["--status", "fine"][..],
        &["--since", "yesterday"],
        &["-n", "0"],
        &["x"],
    ] {
        let args: Vec<&str> = ["list"].iter().chain(wrong).copied().collect();
        assert_eq!(test_home.ask(args).code(), 125, "{wrong:?}");
    }
}

trial!(Everyone, analyses_are_found_by_id_prefix_attempt_and_last);
fn analyses_are_found_by_id_prefix_attempt_and_last() {
    let test_home = TestHome::new();
    for id in ["gwas-7", "gwas-70", "fit", "Fit", "a.b_c"] {
        test_home
            .sh(&["--id", id], &format!("echo {id} > f"))
            .good();
    }
    test_home
        .sh(&["--id", "fit", "--replace"], "echo again > f")
        .good();
    let content = |given: &str| test_home.ask(["outputs", given, "f", "-o", "-"]).good();
    assert_eq!(
        content("gwas-7"),
        "gwas-7\n",
        "the whole id, though it is the beginning of another"
    );
    assert_eq!(content("gwas-70"), "gwas-70\n");
    assert_eq!(content("a"), "a.b_c\n");
    assert_eq!(content("Fi"), "Fit\n", "case matters");
    assert_eq!(content("@last"), "again\n");
    assert_eq!(content("fit@1"), "fit\n");
    assert_eq!(content("fit@2"), "again\n");
    assert_eq!(content("@last@1"), "fit\n");
    let ended = test_home.ask(["show", "gwas"]);
    ended.refused(125, "several ids");
    assert!(ended.err().contains("gwas-7, gwas-70"), "{}", ended.err());
    for none in [
        "nothing",
        "",
        "%",
        "_",
        "gwas-7%",
        "*",
        "fit@3",
        "fit@0",
        "@first",
        "f' OR '1'='1",
    ] {
        assert_eq!(test_home.ask(["show", none]).code(), 125, "{none:?}");
    }
}

trial!(Everyone, show_prints_every_part_of_an_attempt);
fn show_prints_every_part_of_an_attempt() {
    let test_home = TestHome::new();
    test_home.write("project/data/x", "1");
    let script = "echo '{\"p\": 0.5}' > result.json; echo hi; echo oh >&2; ln -s x l; exit 3";
    assert_eq!(
        test_home
            .sh(&["--id", "s", "--env", "SEED=7"], script)
            .code(),
        3
    );
    let text = test_home.ask(["show", "s"]).good();
    for part in [
        "failed (exit 3)",
        "SEED",
        "result.json",
        "symlink",
        "landlock",
        "incomplete",
        "wall time",
        "\"p\"",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let document = test_home.ask_json(["show", "s", "--json"]);
    assert_eq!(document["schema"], "fumehood.show/1");
    assert_eq!(
        (&document["exit_code"], &document["reason"]),
        (&json!(3), &json!("exit"))
    );
    assert_eq!(document["result"], json!({"p": 0.5}));
    assert_eq!(document["logs"]["stdout"]["bytes"], 3);
    assert_eq!(document["remark_counts"], json!({"symlink": 1}));
    assert_eq!(document["outputs"][0]["path"], "result.json");
    assert!(
        document["limits"]["memory"].is_object() && document["isolation"]["seccomp"].is_string()
    );
    // Earlier attempts stay.
    test_home.sh(&["--id", "s", "--replace"], "true").good();
    assert_eq!(
        test_home.ask_json(["show", "s", "--json"])["status"],
        "succeeded"
    );
    let first = test_home.ask_json(["show", "s@1", "--json"]);
    assert_eq!(
        (&first["status"], &first["attempt"]),
        (&json!("failed"), &json!(1))
    );
    assert_eq!(
        first,
        test_home.ask_json(["show", "s", "--attempt", "1", "--json"])
    );
    assert_eq!(first["attempts"].as_array().unwrap().len(), 2);
}

trial!(Everyone, outputs_writes_files_as_they_were);
fn outputs_writes_files_as_they_were() {
    let test_home = TestHome::new();
    let script = "mkdir p; head -c 2M /dev/urandom > p/large; echo a > p/a.txt; echo b > b.txt; : > empty; sha256sum p/large";
    let sum = test_home.sh(&["--id", "o"], script).good();
    let sum = sum.split(' ').next().unwrap();
    let document = test_home.ask_json(["outputs", "o", "--json"]);
    let list = document["outputs"].as_array().unwrap();
    let paths: Vec<&str> = list.iter().map(|o| o["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["b.txt", "empty", "p/a.txt", "p/large"]);
    assert_eq!(list[3]["inline"], false);
    let text = test_home.ask(["outputs", "o"]);
    assert!(
        text.good().contains("p/large") && text.err().contains("4 outputs, 2 MiB"),
        "{}",
        text.err()
    );
    // Export all outputs, some of them, and one.
    let to = test_home.path("all");
    let exported = test_home.ask_json(["outputs", "o", "--to", to.to_str().unwrap(), "--json"]);
    let large = exported["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .find(|o| o["path"] == "p/large")
        .unwrap();
    assert_eq!(large["sha256"], sum);
    assert_eq!(std::fs::read(to.join("b.txt")).unwrap(), b"b\n");
    test_home
        .ask(["outputs", "o", "--to", to.to_str().unwrap()])
        .refused(125, "force");
    test_home
        .ask(["outputs", "o", "--to", to.to_str().unwrap(), "--force"])
        .good();
    let some = test_home.path("some");
    test_home
        .ask([
            "outputs",
            "o",
            "p/*.txt",
            "empty",
            "--to",
            some.to_str().unwrap(),
        ])
        .good();
    assert!(
        some.join("p/a.txt").exists()
            && some.join("empty").exists()
            && !some.join("b.txt").exists()
    );
    let file = test_home.path("one");
    let file = file.to_str().unwrap();
    test_home.ask(["outputs", "o", "b.txt", "-o", file]).good();
    assert_eq!(std::fs::read(file).unwrap(), b"b\n");
    assert_eq!(
        test_home
            .ask(["outputs", "o", "p/a.txt", "-o", file])
            .code(),
        125,
        "it exists"
    );
    test_home
        .ask(["outputs", "o", "p/a.txt", "-o", file, "--force"])
        .good();
    assert_eq!(std::fs::read(file).unwrap(), b"a\n");
    test_home
        .ask(["outputs", "o", "nothing", "-o", "-"])
        .refused(125, "no output");
    test_home
        .ask(["outputs", "o", "*.txt", "p", "-o", "-"])
        .refused(125, "one output");
    test_home.ask(["outputs", "o", "-o", "-"]).refused(125, "");
    assert_eq!(
        test_home.ask(["outputs", "o", "empty", "-o", "-"]).good(),
        ""
    );
}

trial!(Everyone, logs_are_printed_and_followed);
fn logs_are_printed_and_followed() {
    let test_home = TestHome::new();
    test_home
        .sh(
            &["--id", "l"],
            "echo out; echo err >&2; printf 'no newline'",
        )
        .good();
    assert_eq!(test_home.ask(["logs", "l"]).good(), "out\nno newline");
    assert_eq!(test_home.ask(["logs", "l", "--stderr"]).good(), "err\n");
    let both = test_home.ask(["logs", "l", "--stdout", "--stderr"]);
    assert_eq!(
        (both.good().as_str(), both.err().as_str()),
        ("out\nno newline", "err\n")
    );
    assert_eq!(
        test_home.ask(["logs", "l", "-f"]).good(),
        "out\nno newline",
        "ended: nothing to follow"
    );
    // During the run `logs -f` prints the existing output, then the new output.
    let gate = test_home.path("project/gate");
    assert!(
        Command::new("mkfifo")
            .arg(&gate)
            .status()
            .unwrap()
            .success()
    );
    let script =
        "echo one; read x; echo two; head -c 100000 /dev/zero | tr '\\0' z; echo; echo three";
    let mut run = test_home.start([
        "--id",
        "f",
        "--stdin",
        gate.to_str().unwrap(),
        "--",
        "sh",
        "-c",
        script,
    ]);
    let mut hold = std::fs::OpenOptions::new().write(true).open(&gate).unwrap();
    run.wait_for("one");
    let mut command = test_home.fumehood();
    command.args(["logs", "f", "-f"]);
    let mut follow = RunningCommand::start(command);
    follow.wait_for("one");
    assert!(follow.child.try_wait().unwrap().is_none(), "it goes on");
    assert_eq!(test_home.ask(["logs", "f"]).good(), "one\n");
    std::io::Write::write_all(&mut hold, b"go\n").unwrap();
    drop(hold);
    assert_eq!(run.finish().code(), 0);
    let followed = follow.finish();
    let expected = format!("one\ntwo\n{}\nthree\n", "z".repeat(100_000));
    assert_eq!(followed.good().len(), expected.len());
    assert_eq!(followed.good(), expected);
    assert_eq!(test_home.ask(["logs", "f"]).good(), expected);
}

trial!(Everyone, a_closed_stdout_is_no_error);
fn a_closed_stdout_is_no_error() {
    let test_home = TestHome::new();
    test_home
        .python(
            &["--id", "r"],
            "print('x' * 3000000)\nopen('f', 'w').write('y' * 3000000)",
        )
        .good();
    for args in [&["logs", "r"][..], &["outputs", "r", "f", "-o", "-"]] {
        let mut command = test_home.fumehood();
        let mut child = command
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        let mut one = [0; 1];
        std::io::Read::read_exact(&mut out, &mut one).unwrap();
        drop(out);
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(said, "", "{args:?}");
        assert!(!ended.status.success(), "{args:?}");
    }
}

trial!(Everyone, an_empty_record_is_no_error);
fn an_empty_record_is_no_error() {
    let test_home = TestHome::new();
    assert_eq!(test_home.ask(["list"]).good(), "");
    assert_eq!(ids(&test_home.ask_json(["list", "--json"])), [""; 0]);
    for args in [
        ["show", "@last"],
        ["outputs", "x"],
        ["logs", "x"],
        ["rm", "x"],
        ["post-process", "x"],
    ] {
        let ended = test_home.ask(args);
        assert_eq!(ended.code(), 125, "{args:?}: {}", ended.err());
        assert!(
            !ended.err().is_empty() && !ended.err().contains("panicked"),
            "{args:?}: {}",
            ended.err()
        );
    }
    test_home.ask(["gc"]).good();
    test_home.ask(["db", "status"]).good();
    // A broken configuration file of the project does not block commands that read.
    test_home.sh(&["--id", "x"], "true").good();
    test_home.write("project/fumehood.toml", "this is not toml [");
    test_home.ask(["show", "x"]).good();
}

trial!(Everyone, a_running_analysis_is_shown_and_cannot_be_removed);
fn a_running_analysis_is_shown_and_cannot_be_removed() {
    let test_home = TestHome::new();
    let mut live = test_home.start(["--id", "busy", "--", "sh", "-c", "echo up; sleep 600"]);
    live.wait_for("up");
    let document = test_home.ask_json(["list", "--json"]);
    assert_eq!(document["analyses"][0]["status"], "running");
    assert_eq!(document["here"][0]["state"], "running");
    assert_eq!(
        test_home.ask_json(["show", "busy", "--json"])["status"],
        "running"
    );
    assert_eq!(
        test_home.ask_json(["outputs", "busy", "--json"])["outputs"],
        json!([])
    );
    assert_eq!(test_home.ask(["rm", "busy"]).code(), 125, "it runs");
    assert_eq!(
        test_home.ask(["post-process", "busy"]).code(),
        125,
        "it runs"
    );
    live.signal(rustix::process::Signal::TERM);
    assert_eq!(live.finish().code(), 123);
    assert_eq!(test_home.ask_json(["list", "--json"])["here"], json!([]));
}

trial!(
    Everyone,
    outputs_refuses_to_print_or_export_a_damaged_object
);
fn outputs_refuses_to_print_or_export_a_damaged_object() {
    let test_home = TestHome::new();
    let document = test_home.sh_json(&["--id", "d", "--inline-max", "0"], "echo content > f");
    let object = test_home.object(document["outputs"][0]["blake3"].as_str().unwrap());
    assert_eq!(
        test_home.ask(["outputs", "d", "f", "-o", "-"]).good(),
        "content\n",
        "the control"
    );
    set_mode(&object, 0o644);
    std::fs::write(&object, "changed\n").unwrap();
    set_mode(&object, 0o444);
    let ended = test_home.ask(["outputs", "d", "f", "-o", "-"]);
    ended.refused(125, "damaged");
    assert_eq!(ended.out(), "");
    let to = test_home.path("to");
    let mut command = test_home.fumehood();
    command.args(["outputs", "d", "--to"]).arg(&to);
    assert_eq!(finish(command).code(), 125);
    assert!(!to.join("f").exists());
}
