//! What is recorded can be read again: found by its id, the beginning of one or `@last`, listed, shown, written out.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::lab::{Lab, Live, finish};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    ("a_list_is_filtered_and_bounded", For::Everyone, list),
    (
        "an_analysis_is_found_by_what_names_it",
        For::Everyone,
        found,
    ),
    ("all_of_an_attempt_is_shown", For::Everyone, shown),
    ("outputs_are_written_as_they_were", For::Everyone, outputs),
    ("logs_are_printed_and_followed", For::Everyone, logs),
    (
        "a_reader_that_leaves_is_no_error",
        For::Everyone,
        reader_gone,
    ),
    ("an_empty_record_is_no_error", For::Everyone, empty),
    (
        "what_runs_is_shown_and_left_alone",
        For::Everyone,
        while_running,
    ),
    (
        "damage_is_never_passed_off_as_content",
        For::Everyone,
        damaged,
    ),
];

fn ids(document: &Value) -> Vec<&str> {
    let all = document["analyses"].as_array().unwrap();
    all.iter().map(|a| a["id"].as_str().unwrap()).collect()
}

fn list() {
    let lab = Lab::new();
    lab.sh(&["--id", "fine"], "echo x > f").good();
    assert_eq!(lab.sh(&["--id", "bad"], "exit 3").code(), 3);
    assert_eq!(
        lab.sh(
            &["--id", "slow", "--timeout", "300ms", "--grace", "0"],
            "sleep 60"
        )
        .code(),
        124
    );
    lab.sh(&["--id", "fine", "--replace"], "true").good();
    let all = lab.ask_json(["list", "--json"]);
    assert_eq!(ids(&all), ["fine", "slow", "bad"], "newest first");
    assert_eq!(
        (&all["analyses"][0]["attempt"], &all["more"]),
        (&json!(2), &json!(false))
    );
    let text = lab.ask(["list"]).good();
    assert!(
        text.contains("fine@2") && text.contains("failed (exit 3)"),
        "{text}"
    );
    assert!(text.contains("timed out (wall time)"), "{text}");
    let of = |args: &[&str]| {
        let args: Vec<&str> = ["list", "--json"].iter().chain(args).copied().collect();
        let document = lab.ask_json(args);
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
    assert_eq!(lab.ask_json(["list", "--json", "-n", "1"])["more"], true);
    for wrong in [
        &["--status", "fine"][..],
        &["--since", "yesterday"],
        &["-n", "0"],
        &["x"],
    ] {
        let args: Vec<&str> = ["list"].iter().chain(wrong).copied().collect();
        assert_eq!(lab.ask(args).code(), 125, "{wrong:?}");
    }
}

fn found() {
    let lab = Lab::new();
    for id in ["gwas-7", "gwas-70", "fit", "Fit", "a.b_c"] {
        lab.sh(&["--id", id], &format!("echo {id} > f")).good();
    }
    lab.sh(&["--id", "fit", "--replace"], "echo again > f")
        .good();
    let content = |given: &str| lab.ask(["outputs", given, "f", "-o", "-"]).good();
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
    let ended = lab.ask(["show", "gwas"]);
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
        assert_eq!(lab.ask(["show", none]).code(), 125, "{none:?}");
    }
}

fn shown() {
    let lab = Lab::new();
    lab.write("project/data/x", "1");
    let script = "echo '{\"p\": 0.5}' > result.json; echo hi; echo oh >&2; ln -s x l; exit 3";
    assert_eq!(lab.sh(&["--id", "s", "--env", "SEED=7"], script).code(), 3);
    let text = lab.ask(["show", "s"]).good();
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
    let document = lab.ask_json(["show", "s", "--json"]);
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
    lab.sh(&["--id", "s", "--replace"], "true").good();
    assert_eq!(lab.ask_json(["show", "s", "--json"])["status"], "succeeded");
    let first = lab.ask_json(["show", "s@1", "--json"]);
    assert_eq!(
        (&first["status"], &first["attempt"]),
        (&json!("failed"), &json!(1))
    );
    assert_eq!(
        first,
        lab.ask_json(["show", "s", "--attempt", "1", "--json"])
    );
    assert_eq!(first["attempts"].as_array().unwrap().len(), 2);
}

fn outputs() {
    let lab = Lab::new();
    let script = "mkdir p; head -c 2M /dev/urandom > p/large; echo a > p/a.txt; echo b > b.txt; : > empty; sha256sum p/large";
    let sum = lab.sh(&["--id", "o"], script).good();
    let sum = sum.split(' ').next().unwrap();
    let document = lab.ask_json(["outputs", "o", "--json"]);
    let list = document["outputs"].as_array().unwrap();
    let paths: Vec<&str> = list.iter().map(|o| o["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["b.txt", "empty", "p/a.txt", "p/large"]);
    assert_eq!(list[3]["inline"], false);
    let text = lab.ask(["outputs", "o"]);
    assert!(
        text.good().contains("p/large") && text.err().contains("4 outputs, 2 MiB"),
        "{}",
        text.err()
    );
    // All of them, some of them, one of them.
    let to = lab.path("all");
    let exported = lab.ask_json(["outputs", "o", "--to", to.to_str().unwrap(), "--json"]);
    let large = exported["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .find(|o| o["path"] == "p/large")
        .unwrap();
    assert_eq!(large["sha256"], sum);
    assert_eq!(std::fs::read(to.join("b.txt")).unwrap(), b"b\n");
    lab.ask(["outputs", "o", "--to", to.to_str().unwrap()])
        .refused(125, "force");
    lab.ask(["outputs", "o", "--to", to.to_str().unwrap(), "--force"])
        .good();
    let some = lab.path("some");
    lab.ask([
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
    let file = lab.path("one");
    let file = file.to_str().unwrap();
    lab.ask(["outputs", "o", "b.txt", "-o", file]).good();
    assert_eq!(std::fs::read(file).unwrap(), b"b\n");
    assert_eq!(
        lab.ask(["outputs", "o", "p/a.txt", "-o", file]).code(),
        125,
        "it exists"
    );
    lab.ask(["outputs", "o", "p/a.txt", "-o", file, "--force"])
        .good();
    assert_eq!(std::fs::read(file).unwrap(), b"a\n");
    lab.ask(["outputs", "o", "nothing", "-o", "-"])
        .refused(125, "no output");
    lab.ask(["outputs", "o", "*.txt", "p", "-o", "-"])
        .refused(125, "one output");
    lab.ask(["outputs", "o", "-o", "-"]).refused(125, "");
    assert_eq!(lab.ask(["outputs", "o", "empty", "-o", "-"]).good(), "");
}

fn logs() {
    let lab = Lab::new();
    lab.sh(
        &["--id", "l"],
        "echo out; echo err >&2; printf 'no newline'",
    )
    .good();
    assert_eq!(lab.ask(["logs", "l"]).good(), "out\nno newline");
    assert_eq!(lab.ask(["logs", "l", "--stderr"]).good(), "err\n");
    let both = lab.ask(["logs", "l", "--stdout", "--stderr"]);
    assert_eq!(
        (both.good().as_str(), both.err().as_str()),
        ("out\nno newline", "err\n")
    );
    assert_eq!(
        lab.ask(["logs", "l", "-f"]).good(),
        "out\nno newline",
        "ended: nothing to follow"
    );
    // While it runs: what there is, then what comes.
    let gate = lab.path("project/gate");
    assert!(
        Command::new("mkfifo")
            .arg(&gate)
            .status()
            .unwrap()
            .success()
    );
    let script =
        "echo one; read x; echo two; head -c 100000 /dev/zero | tr '\\0' z; echo; echo three";
    let mut run = lab.start([
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
    let mut command = lab.fumehood();
    command.args(["logs", "f", "-f"]);
    let mut follow = Live::start(command);
    follow.wait_for("one");
    assert!(follow.child.try_wait().unwrap().is_none(), "it goes on");
    assert_eq!(lab.ask(["logs", "f"]).good(), "one\n");
    std::io::Write::write_all(&mut hold, b"go\n").unwrap();
    drop(hold);
    assert_eq!(run.end().code(), 0);
    let followed = follow.end();
    let expected = format!("one\ntwo\n{}\nthree\n", "z".repeat(100_000));
    assert_eq!(followed.good().len(), expected.len());
    assert_eq!(followed.good(), expected);
    assert_eq!(lab.ask(["logs", "f"]).good(), expected);
}

fn reader_gone() {
    let lab = Lab::new();
    lab.python(
        &["--id", "r"],
        "print('x' * 3000000)\nopen('f', 'w').write('y' * 3000000)",
    )
    .good();
    for args in [&["logs", "r"][..], &["outputs", "r", "f", "-o", "-"]] {
        let mut command = lab.fumehood();
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

fn empty() {
    let lab = Lab::new();
    assert_eq!(lab.ask(["list"]).good(), "");
    assert_eq!(ids(&lab.ask_json(["list", "--json"])), [""; 0]);
    for args in [
        ["show", "@last"],
        ["outputs", "x"],
        ["logs", "x"],
        ["rm", "x"],
        ["post-process", "x"],
    ] {
        let ended = lab.ask(args);
        assert_eq!(ended.code(), 125, "{args:?}: {}", ended.err());
        assert!(
            !ended.err().is_empty() && !ended.err().contains("panicked"),
            "{args:?}: {}",
            ended.err()
        );
    }
    lab.ask(["gc"]).good();
    lab.ask(["db", "status"]).good();
    // A project's broken file hides nobody's results.
    lab.sh(&["--id", "x"], "true").good();
    lab.write("project/fumehood.toml", "this is not toml [");
    lab.ask(["show", "x"]).good();
}

fn while_running() {
    let lab = Lab::new();
    let mut live = lab.start(["--id", "busy", "--", "sh", "-c", "echo up; sleep 600"]);
    live.wait_for("up");
    let document = lab.ask_json(["list", "--json"]);
    assert_eq!(document["analyses"][0]["status"], "running");
    assert_eq!(document["here"][0]["state"], "running");
    assert_eq!(
        lab.ask_json(["show", "busy", "--json"])["status"],
        "running"
    );
    assert_eq!(
        lab.ask_json(["outputs", "busy", "--json"])["outputs"],
        json!([])
    );
    assert_eq!(lab.ask(["rm", "busy"]).code(), 125, "it runs");
    assert_eq!(lab.ask(["post-process", "busy"]).code(), 125, "it runs");
    live.signal(rustix::process::Signal::TERM);
    assert_eq!(live.end().code(), 123);
    assert_eq!(lab.ask_json(["list", "--json"])["here"], json!([]));
}

fn damaged() {
    let lab = Lab::new();
    let document = lab.sh_json(&["--id", "d", "--inline-max", "0"], "echo content > f");
    let object = lab.object(document["outputs"][0]["blake3"].as_str().unwrap());
    assert_eq!(
        lab.ask(["outputs", "d", "f", "-o", "-"]).good(),
        "content\n",
        "the control"
    );
    crate::lab::set_mode(&object, 0o644);
    std::fs::write(&object, "changed\n").unwrap();
    crate::lab::set_mode(&object, 0o444);
    let ended = lab.ask(["outputs", "d", "f", "-o", "-"]);
    ended.refused(125, "damaged");
    assert_eq!(ended.out(), "");
    let to = lab.path("to");
    let mut command = lab.fumehood();
    command.args(["outputs", "d", "--to"]).arg(&to);
    assert_eq!(finish(command).code(), 125);
    assert!(!to.join("f").exists());
}
