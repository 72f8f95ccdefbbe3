//! `fumehood submit`: the queue keeps a request and its files as they were submitted, and a worker gives an analysis no file
//! that its submitter cannot read.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};
use store::types::submission::{InputItem, Submission, SubmittedCommand, SubmittedSetting};
use store::{Location, Store};
use testkit::command::{FinishedCommand, RunningCommand, finish};
use testkit::home::{TestHome, set_mode};
use testkit::{is_root, trial};

fn store(test_home: &TestHome) -> Store {
    Store::open(&Location::Sqlite(test_home.home.join("fumehood.db"))).unwrap()
}

fn stored(test_home: &TestHome, id: &str) -> Submission {
    let json = store(test_home).submission_request(id).unwrap().unwrap();
    Submission::read(&json, id).unwrap()
}

fn submit(test_home: &TestHome, args: &[&str]) -> FinishedCommand {
    test_home.ask(["submit"].iter().chain(args))
}

fn from(test_home: &TestHome, args: &[&str], lines: &[Value]) -> FinishedCommand {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    test_home.write("batch.jsonl", text);
    let path = test_home.path("batch.jsonl");
    submit(
        test_home,
        &[args, &["--from", path.to_str().unwrap()]].concat(),
    )
}

fn queued(test_home: &TestHome) -> u64 {
    store(test_home).overview(1).unwrap().queued
}

trial!(Everyone, submit_prints_the_id);
fn submit_prints_the_id() {
    let test_home = TestHome::new();
    let said = submit(&test_home, &["--", "true"]).good();
    let id = said.trim_end();
    assert_eq!(said, format!("{id}\n"));
    assert_eq!(
        stored(&test_home, id).command,
        SubmittedCommand::Argv(vec!["true".into()])
    );
    let named = submit(
        &test_home,
        &["--id", "x", "--memory", "64M", "--", "sh", "-c", "exit 3"],
    )
    .good();
    assert_eq!(named, "x\n");
    let settings = stored(&test_home, "x").settings;
    assert_eq!(settings["memory"], SubmittedSetting::Number(64 << 20));
    let twice = submit(&test_home, &["--id", "x", "--", "true"]);
    twice.refused(125, "x");
    assert_eq!(twice.out(), "");
    let document = submit(&test_home, &["--json", "--priority", "3", "--", "true"]).document();
    assert_eq!(document["schema"], "fumehood.submit/1");
    assert_eq!(document["submitted"][0]["already"], false);
    assert_eq!(document["submitted"][0]["attempt"], 1);
    let overview = store(&test_home).overview(10).unwrap();
    assert_eq!(overview.queued, 3);
    assert_eq!(overview.next[0].priority, 3);
    assert_eq!(overview.next[2].memory_bytes, Some(64 << 20));
}

trial!(Everyone, a_key_submits_once);
fn a_key_submits_once() {
    let test_home = TestHome::new();
    let first = submit(&test_home, &["--key", "k", "--", "echo", "1"]).good();
    assert_eq!(
        submit(&test_home, &["--key", "k", "--", "echo", "1"]).good(),
        first
    );
    submit(&test_home, &["--key", "k", "--", "echo", "2"]).refused(125, "key");
    let document = submit(&test_home, &["--json", "--key", "k", "--", "echo", "1"]).document();
    assert_eq!(document["submitted"][0]["already"], true);
    assert_eq!(queued(&test_home), 1);
}

trial!(Everyone, a_submission_contains_the_siblings);
/// A submission contains the modules beside the script, as it contains any other input.
fn a_submission_contains_the_siblings() {
    let test_home = TestHome::new();
    test_home.write("project/pkg/main.py", "import lib.a\n");
    test_home.write("project/pkg/lib/__init__.py", "");
    test_home.write("project/pkg/lib/a.py", "print('from lib')\n");
    test_home.write("project/pkg/lib/b.py", "");
    let said = submit(&test_home, &["--id", "x", "--siblings", "pkg/main.py"]);
    assert_eq!(said.good(), "x\n");
    assert!(said.err().contains("lib/a.py"), "{}", said.err());
    let names = stored(&test_home, "x").inputs;
    let mut names: Vec<String> = names
        .iter()
        .map(|item| item.name().display().to_string())
        .collect();
    names.sort();
    assert_eq!(names, ["lib", "lib/__init__.py", "lib/a.py", "main.py"]);
    submit(&test_home, &["--siblings", "--", "true"]).refused(125, "--siblings");
    assert_eq!(queued(&test_home), 1);
    let worker = RunningWorker::start(&test_home);
    let ended = &ends(&test_home, &["x"])[0];
    drop(worker);
    assert_eq!(ended["status"], "succeeded", "{ended}");
    assert_eq!(test_home.ask(["logs", "x"]).out(), "from lib\n");
}

trial!(Everyone, a_submission_contains_the_inputs_as_they_were);
fn a_submission_contains_the_inputs_as_they_were() {
    let test_home = TestHome::new();
    test_home.write("project/a.py", "print(1)\n");
    test_home.write("project/dir/x", "one");
    test_home.write_program("project/dir/tool", "#!/bin/sh\n");
    submit(
        &test_home,
        &["--id", "x", "--input", "dir:d/e", "a.py", "arg"],
    )
    .good();
    // Changes after the submission have no effect.
    test_home.write("project/dir/x", "two");
    std::fs::remove_file(test_home.path("project/a.py")).unwrap();
    let submission = stored(&test_home, "x");
    let SubmittedCommand::Script { name, from, args } = &submission.command else {
        panic!("{submission:?}");
    };
    assert_eq!(
        (name.to_str(), args.as_slice()),
        (Some("a.py"), &["arg".to_owned()][..])
    );
    assert_eq!(from, &test_home.project.join("a.py"));
    let content = |wanted: &str| {
        let hash = submission.inputs.iter().find_map(|item| match item {
            InputItem::File { name, blake3, .. } if name == Path::new(wanted) => Some(*blake3),
            _ => None,
        });
        store(&test_home)
            .submitted_file(&hash.unwrap())
            .unwrap()
            .unwrap()
    };
    assert_eq!(content("a.py"), b"print(1)\n");
    assert_eq!(content("d/e/x"), b"one");
    let tool = |item: &InputItem| matches!(item, InputItem::File { name, executable: true, .. } if name == Path::new("d/e/tool"));
    assert!(submission.inputs.iter().any(tool));
}

trial!(Everyone, standard_input_is_read_to_its_end);
fn standard_input_is_read_to_its_end() {
    let test_home = TestHome::new();
    let mut command = test_home.fumehood();
    command.args(["submit", "--id", "x", "--stdin", "-", "--", "cat"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"typed").unwrap();
    assert!(child.wait().unwrap().success());
    let hash = stored(&test_home, "x").stdin.unwrap();
    assert_eq!(
        store(&test_home).submitted_file(&hash).unwrap().unwrap(),
        b"typed"
    );
    test_home.write("project/in", "from a file");
    submit(&test_home, &["--id", "y", "--stdin", "in", "--", "cat"]).good();
    let hash = stored(&test_home, "y").stdin.unwrap();
    assert_eq!(
        store(&test_home).submitted_file(&hash).unwrap().unwrap(),
        b"from a file"
    );
}

trial!(Everyone, submit_refuses_options_that_cannot_be_queued);
fn submit_refuses_options_that_cannot_be_queued() {
    let test_home = TestHome::new();
    test_home.write("project/a.py", "");
    test_home.write("project/a:b/x", "");
    for (args, said) in [
        (
            &["--to", "out", "--", "true"][..],
            "--to cannot be submitted",
        ),
        (
            &["--workspace-root", "/srv", "--", "true"],
            "the worker's to say",
        ),
        (&["--in", "x", "--", "true"], "--in"),
        (&["--db", "none", "--", "true"], "no queue with --db none"),
        (&["--", "python3", "a.py"], "--input a.py"),
        (&["--read", "a:b", "--", "true"], "colon"),
        (&["--retries", "21", "--", "true"], "from 0 to 20"),
        (&["--priority", "101", "--", "true"], "from 0 to 100"),
        (&["--retry-on", "succeeded", "--", "true"], "timed_out"),
        (&["--key", "", "--", "true"], "empty"),
        (&["--input", "nothing", "--", "true"], "nothing"),
        (&["--memory", "1K", "--", "true"], "16 MiB"),
        (
            &["--queue-max", "1", "--id", "second", "--", "true"],
            "at most 1",
        ),
        (&["--continue", "--", "true"], "--from"),
        (&["--from", "x", "--", "true"], "--from"),
        (&[], "required"),
    ] {
        submit(
            &test_home,
            &["--id", "first", "--key", "first", "--", "true"],
        )
        .good();
        let ended = submit(&test_home, args);
        ended.refused(125, said);
        assert_eq!(ended.out(), "", "{args:?}");
    }
    let large = std::fs::File::create(test_home.path("project/large")).unwrap();
    large.set_len((64 << 20) + 1).unwrap();
    submit(&test_home, &["--input", "large", "--", "true"]).refused(125, "--read");
    let mut command = test_home.fumehood();
    let odd = std::os::unix::ffi::OsStringExt::from_vec(vec![0xff]);
    let odd: std::ffi::OsString = odd;
    command.args(["submit", "--", "echo"]).arg(odd);
    finish(command).refused(125, "UTF-8");
    assert_eq!(queued(&test_home), 1);
}

trial!(Everyone, a_batch_is_all_or_nothing);
fn a_batch_is_all_or_nothing() {
    let test_home = TestHome::new();
    test_home.write("project/a.py", "");
    let good = [
        json!({"id": "one", "command": ["echo", "1"], "limits": {"memory": "64M", "timeout": 5}}),
        json!({"script": "a.py", "args": ["x"], "env": {"A": "b"}, "priority": 2, "retries": 0}),
        json!({"id": "three", "command": ["true"], "limits": {"memory": "32M"}, "env": {"B": "c"}}),
    ];
    let said = from(&test_home, &["--memory", "16M", "--env", "A=a"], &good).good();
    let ids: Vec<&str> = said.lines().collect();
    assert_eq!((ids.len(), ids[0], ids[2]), (3, "one", "three"));
    assert_eq!(
        stored(&test_home, "one").settings["memory"],
        SubmittedSetting::Number(64 << 20)
    );
    let second = stored(&test_home, ids[1]).settings;
    assert_eq!(
        second["memory"],
        SubmittedSetting::Number(16 << 20),
        "the option is the default"
    );
    assert_eq!(
        second["env"],
        SubmittedSetting::List(vec!["A=b".into()]),
        "the line wins"
    );
    let both = SubmittedSetting::List(vec!["A=a".into(), "B=c".into()]);
    assert_eq!(stored(&test_home, "three").settings["env"], both);

    let mixed = [
        json!({"id": "four", "command": ["true"]}),
        json!({"id": "five", "comand": ["true"]}),
        json!({"id": "four", "command": ["true"]}),
        json!({"id": "six", "command": ["true"], "limits": {"memry": 1}}),
        json!({"id": "seven", "command": ["true"], "memory": "1G"}),
        json!({"id": "eight", "command": ["true"], "inputs": ["nothing"]}),
        json!([]),
    ];
    let ended = from(&test_home, &[], &mixed);
    ended.refused(125, "nothing is queued");
    assert_eq!(ended.out(), "");
    for said in [
        "line 2: unknown key `comand`; did you mean `command`?",
        "line 3: the id four is in line 1 already",
        "line 4: unknown key `limits.memry`; did you mean `limits.memory`?",
        "line 5: unknown key `memory`; did you mean `limits.memory`?",
        "line 6: ",
        "line 7: ",
    ] {
        assert!(
            ended.err().contains(said),
            "{said:?} not in {}",
            ended.err()
        );
    }
    // A line that only the database refuses also stops the whole batch.
    let known = [
        json!({"id": "nine", "command": ["true"]}),
        json!({"id": "one", "command": ["true"]}),
    ];
    let ended = from(&test_home, &[], &known);
    ended.refused(125, "line 2: ");
    assert_eq!(queued(&test_home), 3);
}

trial!(Everyone, a_batch_continues_past_errors_on_request);
fn a_batch_continues_past_errors_on_request() {
    let test_home = TestHome::new();
    submit(&test_home, &["--id", "taken", "--", "true"]).good();
    let lines = [
        json!({"id": "a", "command": ["true"]}),
        json!({"id": "b", "comand": ["true"]}),
        json!({"id": "taken", "command": ["true"]}),
        json!({"id": "c", "command": ["true"]}),
    ];
    let ended = from(&test_home, &["--continue"], &lines);
    assert_eq!((ended.code(), ended.out().as_str()), (125, "a\nc\n"));
    assert!(ended.err().contains("line 2: ") && ended.err().contains("line 3: "));
    assert_eq!(queued(&test_home), 3);
    let lines = [json!({"id": "d", "command": ["true"]}), json!({"x": 1})];
    let ended = from(&test_home, &["--continue", "--json"], &lines);
    assert_eq!(ended.code(), 125);
    let document: Value = serde_json::from_str(&ended.out()).unwrap();
    assert_eq!(document["submitted"][0]["line"], 1);
    assert_eq!(document["refused"][0]["line"], 2);
    // `submit` reads from standard input and skips empty lines.
    let mut command = test_home.fumehood();
    command.args(["submit", "--from", "-"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let text =
        b"\n{\"id\":\"e\",\"command\":[\"true\"]}\n   \n{\"id\":\"f\",\"command\":[\"true\"]}";
    child.stdin.take().unwrap().write_all(text).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.stdout, b"e\nf\n");
}

trial!(Everyone, a_batch_has_bounds);
fn a_batch_has_bounds() {
    let test_home = TestHome::new();
    let long = "x".repeat(4 << 20);
    let lines = [
        json!({"command": ["echo", long]}),
        json!({"id": "after", "command": ["true"]}),
    ];
    let ended = from(&test_home, &["--continue"], &lines);
    assert_eq!((ended.code(), ended.out().as_str()), (125, "after\n"));
    assert!(
        ended.err().contains("line 1: it is longer than"),
        "{}",
        ended.err()
    );
    test_home.write("batch.jsonl", "\n".repeat(100_001));
    let path = test_home.path("batch.jsonl");
    submit(&test_home, &["--from", path.to_str().unwrap()]).refused(125, "more than 100000 lines");
    let bad: Vec<Value> = (0..30).map(|n| json!({"n": n})).collect();
    let ended = from(&test_home, &[], &bad);
    assert_eq!(ended.err().matches("error: line").count(), 20);
    assert!(ended.err().contains("and 10 more"), "{}", ended.err());
    // A file that many lines name is held in memory and stored once.
    let file = std::fs::File::create(test_home.path("project/shared")).unwrap();
    file.set_len(32 << 20).unwrap();
    let many: Vec<Value> = (0..100)
        .map(|n| json!({"id": format!("m{n}"), "command": ["true"], "inputs": ["shared"]}))
        .collect();
    assert_eq!(from(&test_home, &[], &many).good().lines().count(), 100);
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM blobs"), 1);
}

trial!(Everyone, the_schema_and_the_parser_agree);
/// The published schema and `submit` accept and refuse the same lines.
fn the_schema_and_the_parser_agree() {
    let test_home = TestHome::new();
    test_home.write("project/a.py", "");
    test_home.write("project/in", "");
    let run = |more: Value| {
        let mut line = json!({"command": ["true"]});
        let fields = more.as_object().unwrap().clone();
        line.as_object_mut().unwrap().extend(fields);
        line
    };
    let good = [
        json!({"command": ["true"]}),
        json!({"script": "a.py"}),
        json!({"script": "a.py", "args": []}),
        json!({"script": "a.py", "args": ["", "-x"]}),
        json!({"command": ["echo", ""]}),
        run(json!({"id": "A.b_c-9"})),
        run(json!({"inputs": ["in", "a.py:x/y"], "stdin": "in"})),
        run(json!({"env": {"A": "", "PATH": null}})),
        run(json!({"limits": {}})),
        run(json!({"limits": {
            "timeout": "1h30m", "cpu_time": "off", "idle_timeout": 60, "grace": 0, "memory": "1.5G",
            "cpus": 1.5, "pids": 64, "open_files": "100", "disk": 1e9, "files": 100.0,
            "log_limit": "1 MiB", "max_output": 0, "max_output_file": "1k", "max_outputs": 0,
            "max_depth": 256, "inline_max": "64K"}})),
        run(json!({"outputs": ["*.csv"], "expect": ["a.csv"]})),
        run(
            json!({"data": "/srv", "docs": "/srv", "project": ".", "read": ["/srv:/mnt/x"], "runtime": "/opt"}),
        ),
        run(
            json!({"network": "none", "workspace": "memory", "keep": "on-failure", "keep_for": "2d"}),
        ),
        run(json!({"isolation": "full", "level": "full", "shared_memory": "private"})),
        run(json!({"allow_degraded": ["pids"], "secret_env": ["A*"]})),
        run(
            json!({"priority": 100, "retries": 20, "retry_on": ["failed", "out_of_memory"], "key": "k"}),
        ),
        run(json!({"replace": false})),
    ];
    let bad = [
        json!({}),
        json!([]),
        json!("true"),
        json!({"command": []}),
        json!({"command": [""]}),
        json!({"command": "true"}),
        json!({"command": ["true", 1]}),
        json!({"command": ["true"], "script": "a.py"}),
        json!({"command": ["true"], "args": ["x"]}),
        json!({"script": ""}),
        json!({"args": ["x"]}),
        run(json!({"id": "../x"})),
        run(json!({"id": ""})),
        run(json!({"id": 1})),
        run(json!({"nonsense": 1})),
        run(json!({"workspace_root": "/srv"})),
        run(json!({"db": "none"})),
        run(json!({"to": "x"})),
        run(json!({"inputs": "in"})),
        run(json!({"inputs": [""]})),
        run(json!({"stdin": "-"})),
        run(json!({"stdin": ""})),
        run(json!({"env": ["A=b"]})),
        run(json!({"env": {"1": "x"}})),
        run(json!({"env": {"A": 1}})),
        run(json!({"env": {"FUMEHOOD_DB": "x"}})),
        run(json!({"limits": {"nonsense": 1}})),
        run(json!({"limits": {"memory": -1}})),
        run(json!({"limits": {"memory": "off"}})),
        run(json!({"limits": {"memory": "much"}})),
        run(json!({"limits": {"pids": 1.5}})),
        run(json!({"limits": {"pids": 1}})),
        run(json!({"limits": {"cpus": 0}})),
        run(json!({"limits": {"max_depth": 257}})),
        run(json!({"limits": {"timeout": "soon"}})),
        run(json!({"limits": {"timeout": [1]}})),
        run(json!({"network": "host"})),
        run(json!({"isolation": "none"})),
        run(json!({"keep": "forever"})),
        run(json!({"allow_degraded": ["everything"]})),
        run(json!({"priority": 101})),
        run(json!({"priority": -1})),
        run(json!({"retries": 21})),
        run(json!({"retry_on": ["succeeded"]})),
        run(json!({"retry_on": "failed"})),
        run(json!({"key": ""})),
        run(json!({"key": "k".repeat(201)})),
        run(json!({"replace": "yes"})),
    ];
    for line in &good {
        let ended = from(&test_home, &["--json"], std::slice::from_ref(line));
        assert_eq!(ended.code(), 0, "{line}: {}", ended.err());
    }
    for line in &bad {
        let ended = from(&test_home, &[], std::slice::from_ref(line));
        assert_eq!(ended.code(), 125, "{line}");
    }
    let lines = test_home.write("lines.json", json!([&good[..], &bad[..]]).to_string());
    let schema = test_home.write(
        "schema.json",
        include_str!("../../../../docs/submission-v1.schema.json"),
    );
    let checker = "import json, sys, jsonschema\n\
        schema, (good, bad) = (json.load(open(a)) for a in sys.argv[1:])\n\
        jsonschema.Draft202012Validator.check_schema(schema)\n\
        v = jsonschema.Draft202012Validator(schema)\n\
        for line in good: v.validate(line)\n\
        for line in bad: assert not v.is_valid(line), line\n";
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-I", "-c", checker]).arg(schema).arg(lines);
    let checked = python.output().unwrap();
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success(), "{said}");
}

/// A worker that runs until it is dropped.
pub struct RunningWorker(Option<RunningCommand>);

impl RunningWorker {
    fn start(test_home: &TestHome) -> RunningWorker {
        let mut command = test_home.fumehood();
        command.arg("worker");
        RunningWorker(Some(RunningCommand::start(command)))
    }

    /// A worker whose operator accepts level landlock for other submitters.
    pub fn at_any_level(test_home: &TestHome) -> RunningWorker {
        let mut command = test_home.fumehood();
        command.arg("worker").env("FUMEHOOD_ISOLATION", "landlock");
        RunningWorker(Some(RunningCommand::start(command)))
    }
}

impl Drop for RunningWorker {
    fn drop(&mut self) {
        if let Some(live) = self.0.take() {
            live.signal(Signal::TERM);
            live.finish();
        }
    }
}

/// How each analysis ended, according to `list --json`.
fn ends(test_home: &TestHome, ids: &[&str]) -> Vec<Value> {
    test_home.ask(["wait", "--timeout", "120s"].iter().chain(ids));
    let listed = test_home.ask_json(["list", "--json"]);
    let all = listed["analyses"].as_array().unwrap();
    let of = |id: &&str| all.iter().find(|a| a["id"] == **id).unwrap().clone();
    ids.iter().map(of).collect()
}

trial!(Everyone, a_worker_runs_the_submission_as_it_was_made);
fn a_worker_runs_the_submission_as_it_was_made() {
    let test_home = TestHome::new();
    test_home.write("project/a.sh", "cat x; cat; echo $A $1 > out.txt\n");
    test_home.write("project/x", "input\n");
    test_home.write("project/in", "piped\n");
    submit(
        &test_home,
        &[
            "--id", "s", "--input", "x", "--stdin", "in", "--env", "A=b", "a.sh", "arg",
        ],
    )
    .good();
    for name in ["a.sh", "x", "in"] {
        std::fs::remove_file(test_home.project.join(name)).unwrap();
    }
    let worker = RunningWorker::start(&test_home);
    let ended = &ends(&test_home, &["s"])[0];
    drop(worker);
    assert_eq!(ended["status"], "succeeded", "{ended}");
    assert_eq!(test_home.ask(["logs", "s"]).out(), "input\npiped\n");
    let to = test_home.path("to");
    test_home
        .ask(["outputs", "s", "--to", to.to_str().unwrap()])
        .good();
    assert_eq!(
        std::fs::read_to_string(to.join("out.txt")).unwrap(),
        "b arg\n"
    );
}

trial!(Root, a_root_worker_shows_only_what_everybody_may_read);
fn a_root_worker_shows_only_what_everybody_may_read() {
    let test_home = TestHome::new();
    set_mode(test_home.path("project").parent().unwrap(), 0o755);
    let closed = test_home.path("closed");
    test_home.write("closed/x", "secret");
    set_mode(&closed, 0o750);
    let open = test_home.path("open");
    test_home.write("open/public", "public");
    set_mode(&test_home.write("open/private", "secret"), 0o600);
    set_mode(&open, 0o755);
    let postgres = test_home.path("postgres");
    test_home.write("postgres/main/base", "secret");
    set_mode(&postgres, 0o755);
    set_mode(&test_home.path("postgres/main"), 0o700);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let mut asked: Vec<String> = ["/root", "/etc/shadow", "/root/.bashrc"]
        .map(String::from)
        .into();
    asked.extend([text(&closed), text(&test_home.path("postgres/main"))]);
    for (n, target) in asked.clone().iter().enumerate() {
        let link = test_home.path(&format!("link{n}"));
        std::os::unix::fs::symlink(target, &link).unwrap();
        asked.push(text(&link));
    }
    let mut ids = Vec::new();
    for (n, path) in asked.iter().enumerate() {
        for (how, option) in [("r", "--read"), ("d", "--data")] {
            let id = format!("{how}{n}");
            submit(&test_home, &["--id", &id, option, path, "--", "true"]).good();
            ids.push(id);
        }
    }
    let open_text = text(&open);
    let look = format!(
        "exec 2>&1; cat {open_text}/public; cat {open_text}/private; cat data/private; ls {open_text}"
    );
    for level in ["full", "landlock"] {
        let options = ["--level", level, "--read", &open_text, "--data", &open_text];
        let options = [&["--id", level][..], &options, &["--", "sh", "-c", &look]].concat();
        submit(&test_home, &options).good();
    }
    let through = format!("exec 2>&1; cat {}/main/base; ls {0}", text(&postgres));
    let options = [
        "--id",
        "through",
        "--read",
        &text(&postgres),
        "--",
        "sh",
        "-c",
        &through,
    ];
    submit(&test_home, &options).good();
    let worker = RunningWorker::at_any_level(&test_home);
    let names: Vec<&str> = ids.iter().map(String::as_str).collect();
    for ended in ends(&test_home, &names) {
        assert_eq!(
            (&ended["status"], &ended["reason"]),
            (&json!("error"), &json!("refused")),
            "{ended}"
        );
    }
    // Controls: a readable directory is shown, and an unreadable file in it is not.
    for ended in ends(&test_home, &["full", "landlock", "through"]) {
        assert_eq!(ended["status"], "succeeded", "{ended}");
    }
    drop(worker);
    for level in ["full", "landlock"] {
        let logs = test_home.ask(["logs", level]);
        let all = format!("{}{}", logs.out(), logs.err());
        assert!(
            all.contains("public") && !all.contains("secret"),
            "{level}: {all}"
        );
        assert!(all.contains("Permission denied"), "{level}: {all}");
    }
    let logs = test_home.ask(["logs", "through"]);
    assert!(logs.out().contains("main") && !logs.out().contains("secret"));
    // Control: a run that root starts itself can read the file.
    let own = test_home.sh(&["--read", &open_text], &format!("cat {open_text}/private"));
    assert_eq!(own.good(), "secret");
    let mine = test_home.sh(
        &["--read", &text(&closed)],
        &format!("cat {}/x", text(&closed)),
    );
    assert!(is_root() && mine.good() == "secret");
}

trial!(Everyone, a_submission_written_by_hand_is_refused);
/// Writes into the database directly, as a person with a database login could.
fn a_submission_written_by_hand_is_refused() {
    let test_home = TestHome::new();
    let outside = test_home.path("outside");
    let request = |id: &str, settings: Value, inputs: Value| {
        json!({
            "version": 1, "id": id, "command": {"argv": ["true"]}, "settings": settings,
            "inputs": inputs, "stdin": null,
        })
    };
    let hash = store::types::manifest::ContentHash::of(b"evil");
    let file = |name: &str| json!([{"file": {"name": name, "blake3": hash.to_string(), "executable": true}}]);
    let none = json!([]);
    let requests = [
        request(
            "h0",
            json!({"workspace_root": {"text": outside}}),
            none.clone(),
        ),
        request("h1", json!({"db": {"text": "sqlite:/tmp/x"}}), none.clone()),
        request("h2", json!({"env": {"list": ["HOME"]}}), none.clone()),
        request("h3", json!({"memory": {"number": 1}}), none.clone()),
        request("h4", json!({"isolation": {"text": "none"}}), none.clone()),
        request("h5", json!({}), file("../../../outside")),
        request("h6", json!({}), file("/outside")),
        request("h7", json!({}), file(".fumehood/x")),
        request("other", json!({}), none.clone()),
        json!({"version": 2}),
        json!("nonsense"),
    ];
    let mut store = store(with_created_home(&test_home));
    let blobs = [(hash, std::sync::Arc::new(b"evil".to_vec()))];
    let mut ids = Vec::new();
    for (n, request) in requests.iter().enumerate() {
        let id = format!("h{n}");
        let submit = store::NewSubmission {
            id: &id,
            submit_key: None,
            fingerprint: "f",
            request_json: &request.to_string(),
            submitter: "mallory",
            priority: 0,
            retries: 3,
            retry_on: &[],
            memory_bytes: None,
            cpu_milli: None,
            blobs: &blobs,
            replace: false,
        };
        store.submit(&[submit], 1000).unwrap();
        ids.push(id);
    }
    let worker = RunningWorker::at_any_level(&test_home);
    let names: Vec<&str> = ids.iter().map(String::as_str).collect();
    for ended in ends(&test_home, &names) {
        assert_eq!(
            (&ended["status"], &ended["reason"]),
            (&json!("error"), &json!("refused")),
            "{ended}"
        );
        assert_eq!(
            ended["attempt"], 1,
            "what is refused is not tried again: {ended}"
        );
    }
    drop(worker);
    assert!(!outside.exists());
}

/// The first command that needs the home creates it.
fn with_created_home(test_home: &TestHome) -> &TestHome {
    test_home.ask(["list"]);
    test_home
}
