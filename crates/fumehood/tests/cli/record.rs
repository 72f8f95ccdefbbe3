//! P14, P15 and P18 through the binary: the record has the outputs of an analysis unchanged, however the analysis
//! ended.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use store::types::manifest::ContentHash;
use testkit::command::{FinishedCommand, finish};
use testkit::home::{TestHome, set_mode};
use testkit::process::{names_in, processes_with};
use testkit::program;
use testkit::wait::eventually;
use testkit::{fresh_id, trial};

use crate::policy;

/// The JSON document of a run that committed.
#[track_caller]
fn committed_document(ended: &FinishedCommand) -> Value {
    let document = ended.document();
    assert_eq!(document["commit"]["state"], "committed", "{document}");
    document
}

/// The outputs of the only attempt, by path: bytes, media type, hash.
fn outputs(test_home: &TestHome) -> BTreeMap<String, (u64, String, String)> {
    let rows = test_home.sql("SELECT path_text, bytes, media_type, blake3 FROM outputs_v1");
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    let entry = |row: Vec<Value>| {
        let value = (row[1].as_u64().unwrap(), text(&row[2]), text(&row[3]));
        (text(&row[0]), value)
    };
    rows.into_iter().map(entry).collect()
}

/// Pseudo-random bytes, the same here and in the program.
fn noise(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| ((i * 7919 + i / 251) % 256) as u8)
        .collect()
}

const NOISE: &str = "def noise(n): return bytes((i * 7919 + i // 251) % 256 for i in range(n))\n";

trial!(Everyone, the_outputs_of_a_program_are_committed);
fn the_outputs_of_a_program_are_committed() {
    let test_home = TestHome::new();
    let script = format!(
        "{NOISE}
import os
os.makedirs('figures/deep')
open('table.csv', 'w').write('a,b\\n1,2\\n')
open('empty', 'w')
open('figures/plot.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + noise(100))
open('figures/deep/large.bin', 'wb').write(noise(1500000))
open('result.json', 'w').write('{{\"p_value\": 0.03}}')
os.utime('table.csv', (1000000000, 1000000000))"
    );
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    png.extend(noise(100));
    let expected: [(&str, Vec<u8>, &str); 5] = [
        ("empty", Vec::new(), "application/x-empty"),
        (
            "figures/deep/large.bin",
            noise(1_500_000),
            "application/octet-stream",
        ),
        ("figures/plot.png", png, "image/png"),
        (
            "result.json",
            b"{\"p_value\": 0.03}".to_vec(),
            "application/json",
        ),
        ("table.csv", b"a,b\n1,2\n".to_vec(), "text/csv"),
    ];
    let ended = test_home.python(&["--json", "--id", "whole"], &script);
    ended.good();
    let document = committed_document(&ended);
    assert_eq!(document["collection"]["complete"], true, "{document}");
    let stored = outputs(&test_home);
    assert_eq!(stored.len(), expected.len(), "{stored:?}");
    for (path, content, media) in &expected {
        let hash = ContentHash::of(content).to_string();
        let (bytes, media_type, blake3) = &stored[*path];
        assert_eq!((*bytes, blake3), (content.len() as u64, &hash), "{path}");
        if *path != "empty" {
            assert_eq!(media_type, media, "{path}");
        }
        let object = test_home.object(&hash);
        assert_eq!(&std::fs::read(&object).unwrap(), content, "{path}");
        let meta = object.metadata().unwrap();
        assert_eq!(meta.permissions().mode() & 0o7777, 0o444, "{path}");
        assert_eq!(meta.uid(), rustix::process::geteuid().as_raw(), "{path}");
        let listed = document["outputs"].as_array().unwrap();
        let listed = listed.iter().find(|o| o["path"] == *path).unwrap();
        assert_eq!(listed["blake3"], hash.as_str());
    }
    let time =
        test_home.sql_one("SELECT modified_at FROM outputs_v1 WHERE path_text = 'table.csv'");
    assert_eq!(time, "2001-09-09T01:46:40.000Z");
    let sum: u64 = expected
        .iter()
        .map(|(_, content, _)| content.len() as u64)
        .sum();
    let row = test_home
        .sql("SELECT state, complete, outputs_count, output_bytes, refused_count FROM analyses_v1");
    assert_eq!(
        row,
        [[json!("succeeded"), json!(1), json!(5), json!(sum), json!(0)]]
    );
    test_home.assert_nothing_left();
    // The summary for people names the outputs too.
    let said = test_home.sh(&[], "echo 1 > one; echo 2 > two").err();
    assert!(said.contains("2 outputs (4 B) committed"), "{said}");
    assert!(
        said.contains("  one\n") && said.contains("  two\n"),
        "{said}"
    );
}

trial!(Everyone, inputs_and_caches_are_not_collected);
fn inputs_and_caches_are_not_collected() {
    let test_home = TestHome::new();
    test_home.write("project/a.txt", "as it was");
    test_home.write("project/b.txt", "as it was, too");
    test_home.write("project/dir/c.txt", "in a directory");
    test_home.write(
        "project/main.py",
        "open('b.txt', 'a').write('!'); open('made', 'w')",
    );
    let options = [
        "--json", "--input", "a.txt", "--input", "b.txt", "--input", "dir",
    ];
    let ended = test_home.run(options.iter().chain(&["main.py"]));
    ended.good();
    let document = committed_document(&ended);
    let paths: Vec<String> = outputs(&test_home).into_keys().collect();
    assert_eq!(paths, ["b.txt", "made"]);
    assert_eq!(document["collection"]["inputs_unchanged"], 3, "{document}");
    assert_eq!(document["collection"]["complete"], true);
    // An input that is replaced by the same bytes is still an input, whatever its modification time.
    let same =
        "cat a.txt > t; rm a.txt; mv t a.txt; mkdir -p __pycache__; echo > __pycache__/x.pyc";
    let document = test_home.sh_json(&["--input", "a.txt"], same);
    assert_eq!(document["outputs"], json!([]), "{document}");
    assert_eq!(document["collection"]["cached"], 1, "{document}");
    // Files in the private /tmp and home are no outputs either.
    let document = test_home.sh_json(&[], "echo > /tmp/x; echo > ~/y; echo > $TMPDIR/z; echo > w");
    let paths: Vec<&Value> = document["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| &o["path"])
        .collect();
    assert_eq!(paths, [&json!("w")]);
}

trial!(Everyone, sql_reads_values_of_a_result);
fn sql_reads_values_of_a_result() {
    let test_home = TestHome::new();
    let result = r#"{"p_value": 0.03125, "n": 12345678901, "name": "\u00e4 \ud83e\uddea", "list": [1, null, true]}"#;
    test_home.write("project/r.json", result);
    for (id, content) in [("good", result), ("array", "[1, 2, 3]"), ("number", "17")] {
        test_home.write("project/r.json", content);
        test_home
            .sh(&["--id", id, "--stdin", "r.json"], "cat > result.json")
            .good();
    }
    let ask = |column: &str| {
        test_home.sql_one(&format!(
            "SELECT {column} FROM analyses_v1 WHERE id = 'good'"
        ))
    };
    assert_eq!(ask("result ->> 'p_value'"), 0.03125);
    assert_eq!(ask("result ->> 'n'"), 12_345_678_901u64);
    assert_eq!(ask("result ->> 'name'"), "ä 🧪");
    assert_eq!(ask("result ->> '$.list[2]'"), 1);
    // The query that the documentation shows.
    let query =
        "SELECT id FROM analyses_v1 WHERE state = 'succeeded' AND result ->> 'p_value' < 0.05";
    assert_eq!(test_home.sql(query), [[json!("good")]]);
    assert_eq!(
        test_home.sql_one("SELECT result FROM analyses_v1 WHERE id = 'number'"),
        "17"
    );
    assert_eq!(
        test_home.sql_one("SELECT result ->> 1 FROM analyses_v1 WHERE id = 'array'"),
        2
    );
    // Only a file named result.json at the top of the workspace is a result.
    test_home
        .sh(
            &["--id", "below"],
            "mkdir d; echo 1 > d/result.json; echo 1 > Result.json",
        )
        .good();
    let row = test_home.sql("SELECT result, result_note FROM analyses_v1 WHERE id = 'below'");
    assert_eq!(row, [[Value::Null, Value::Null]]);
}

trial!(Everyone, equal_content_is_stored_once);
fn equal_content_is_stored_once() {
    let test_home = TestHome::new();
    test_home
        .sh(
            &["--id", "one"],
            "echo same > a; echo same > b; ln a c; echo other > d",
        )
        .good();
    test_home.sh(&["--id", "two"], "echo same > e").good();
    let hash = ContentHash::of(b"same\n").to_string();
    let query =
        format!("SELECT id, path_text FROM outputs_v1 WHERE blake3 = '{hash}' ORDER BY id, path");
    let rows = test_home.sql(&query);
    let expected = [["one", "a"], ["one", "b"], ["one", "c"], ["two", "e"]];
    assert_eq!(rows, expected.map(|row| row.map(Value::from).to_vec()));
    assert_eq!(test_home.sql_one("SELECT COUNT(*) FROM outputs_v1"), 5);
    let objects = test_home.ask_json(["db", "status", "--json"]);
    assert_eq!(objects["artifacts"]["objects"], 2, "{objects}");
    assert_eq!(test_home.object(&hash).metadata().unwrap().nlink(), 1);
    // Each name of a hard-linked file is an output.
    assert_eq!(
        test_home.sql_one("SELECT output_bytes FROM analyses_v1 WHERE id = 'one'"),
        21
    );
}

/// An id, options and a script that ends in some way; then the exit code, state and reason to expect.
type ExpectedEnd = (
    &'static str,
    &'static [&'static str],
    &'static str,
    i32,
    &'static str,
    &'static str,
);

trial!(Everyone, every_kind_of_end_is_recorded);
fn every_kind_of_end_is_recorded() {
    let test_home = TestHome::new();
    let leave = "echo partial > left; echo said; echo oops >&2; ";
    let ends: [ExpectedEnd; 5] = [
        ("exit", &[], "exit 7", 7, "failed", "exit"),
        (
            "signal",
            &[],
            "kill -SEGV $$; sleep 60",
            139,
            "failed",
            "signal",
        ),
        (
            "time",
            &["--timeout", "1s", "--grace", "0"],
            "sleep 600",
            124,
            "timed_out",
            "wall_time",
        ),
        (
            "disk",
            &["--disk", "4M"],
            "exec head -c 9M /dev/zero > zbig",
            122,
            "limit_exceeded",
            "file_size",
        ),
        ("fine", &[], "true", 0, "succeeded", "exit"),
    ];
    for (id, options, act, code, state, reason) in ends {
        let options: Vec<&str> = ["--id", id].iter().chain(options).copied().collect();
        let ended = test_home.sh(&options, &format!("{leave}{act}"));
        assert_eq!(ended.code(), code, "{id}: {}", ended.err());
        let columns = "state, reason, complete, exit_code, signal, isolation_level";
        let row = test_home.sql(&format!(
            "SELECT {columns} FROM analyses_v1 WHERE id = '{id}'"
        ));
        let complete = u8::from(code == 0);
        assert_eq!(
            row[0][..3],
            [json!(state), json!(reason), json!(complete)],
            "{id}"
        );
        assert_eq!(row[0][5], "full");
        let left = format!(
            "SELECT CAST(content AS TEXT) FROM outputs_v1 WHERE id = '{id}' AND path_text = 'left'"
        );
        assert_eq!(test_home.sql_one(&left), "partial\n", "{id}");
        let log = format!(
            "SELECT CAST(head AS TEXT) FROM logs_v1 WHERE id = '{id}' ORDER BY stream DESC"
        );
        assert_eq!(
            test_home.sql(&log),
            [[json!("said\n")], [json!("oops\n")]],
            "{id}"
        );
    }
    cancelled_is_recorded(&test_home);
    test_home.assert_nothing_left();
}

fn cancelled_is_recorded(test_home: &TestHome) {
    let mut live = test_home.start([
        "--id",
        "stop",
        "--",
        "sh",
        "-c",
        "echo partial > left; echo up; sleep 600",
    ]);
    live.wait_for("up");
    live.signal(rustix::process::Signal::INT);
    assert_eq!(live.finish().code(), 123);
    let row =
        test_home.sql("SELECT state, complete, outputs_count FROM analyses_v1 WHERE id = 'stop'");
    assert_eq!(row, [[json!("cancelled"), json!(0), json!(1)]]);
}

trial!(Everyone, logs_are_kept_as_printed);
fn logs_are_kept_as_printed() {
    let test_home = TestHome::new();
    let long: String = (0..40_000).map(|i| format!("line {i}\n")).collect();
    let script =
        "import sys\nfor i in range(40000): print('line', i)\nprint('end', file=sys.stderr)";
    // This log fits into the database.
    test_home.python(&["--id", "fits"], script).good();
    // This log is longer: the database has its head and its tail, and the artifact store has all of it.
    test_home
        .python(&["--id", "long", "--inline-max", "10K"], script)
        .good();
    // This log is longer than the limit on what is kept.
    let ended = test_home.python(&["--id", "cut", "--log-limit", "64K", "--json"], script);
    let document = committed_document(&ended);
    for id in ["fits", "long"] {
        assert_eq!(test_home.ask(["logs", id]).good(), long, "{id}");
        assert_eq!(
            test_home.ask(["logs", id, "--stderr"]).good(),
            "end\n",
            "{id}"
        );
    }
    let columns = "total_bytes, dropped_bytes, truncated, LENGTH(head), LENGTH(tail), blake3";
    let row = |id: &str| {
        let query =
            format!("SELECT {columns} FROM logs_v1 WHERE stream = 'stdout' AND id = '{id}'");
        test_home.sql(&query).remove(0)
    };
    let total = long.len() as u64;
    let fits = row("fits");
    assert_eq!(fits[..3], [json!(total), json!(0), json!(0)]);
    assert_eq!(fits[3].as_u64().unwrap() + fits[4].as_u64().unwrap(), total);
    let whole = row("long");
    assert_eq!(
        whole[..5],
        [json!(total), json!(0), json!(0), json!(5120), json!(5120)]
    );
    assert_eq!(whole[5], ContentHash::of(long.as_bytes()).to_string());
    let cut = row("cut");
    let dropped = document["stdout"]["dropped_bytes"].as_u64().unwrap();
    assert!(dropped > total / 2, "{dropped} of {total}");
    assert_eq!(cut[..3], [json!(total), json!(dropped), json!(1)]);
    let shown = test_home.ask(["logs", "cut"]).good();
    let (head, tail) = (&long[..1000], &long[long.len() - 1000..]);
    assert!(
        shown.starts_with(head) && shown.ends_with(tail),
        "{}",
        shown.len()
    );
    assert!(
        shown.contains(" bytes of stdout not shown]"),
        "the gap is told"
    );
    assert!(shown.len() < 80 << 10);
}

trial!(Everyone, provenance_records_command_inputs_and_environment);
fn provenance_records_command_inputs_and_environment() {
    let test_home = TestHome::new();
    test_home.write("project/data/table.csv", "1,2\n");
    test_home.write("project/docs/about.md", "x");
    test_home.write("project/more.txt", "more\n");
    let script = "#!/usr/bin/env python3\nprint('x')\n";
    test_home.write("project/fit.py", script);
    let args = [
        "--id", "p", "--input", "more.txt", "--env", "SEED=7", "fit.py", "--alpha", "0.5 x",
    ];
    test_home.run(args).good();
    let text = test_home.sql_one("SELECT provenance FROM analyses_v1");
    let from: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
    let argv: Vec<&str> = from["argv"]
        .as_array()
        .unwrap()
        .iter()
        .map(|a| a.as_str().unwrap())
        .collect();
    assert_eq!(argv[argv.len() - 2..], ["--alpha", "0.5 x"], "{argv:?}");
    assert_eq!(
        from["script"]["blake3"],
        ContentHash::of(script.as_bytes()).to_string()
    );
    assert!(
        from["script"]["path"]
            .as_str()
            .unwrap()
            .ends_with("/project/fit.py")
    );
    let input = |path: &str| {
        let files = from["inputs"]["files"].as_array().unwrap();
        files
            .iter()
            .find(|f| f["path"] == path)
            .unwrap_or(&Value::Null)
            .clone()
    };
    assert_eq!(
        input("more.txt")["blake3"],
        ContentHash::of(b"more\n").to_string()
    );
    assert_eq!(
        input("fit.py")["blake3"],
        ContentHash::of(script.as_bytes()).to_string()
    );
    assert_eq!(from["env"], json!([{"name": "SEED", "value": "7"}]));
    assert!(from["data"].as_str().unwrap().ends_with("/project/data"));
    assert!(from["docs"].as_str().unwrap().ends_with("/project/docs"));
    assert_eq!(
        from["git"],
        Value::Null,
        "the control of the trial with git"
    );
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(from["host"]["kernel"], kernel.trim());
    assert_eq!(
        from["submitter"]["uid"],
        rustix::process::geteuid().as_raw()
    );
    assert_eq!(from["runtime"]["kind"], "python");
    assert!(
        from["runtime"]["version"]
            .as_str()
            .unwrap()
            .starts_with("3."),
        "{}",
        from["runtime"]
    );
    let packages: Vec<&str> = from["runtime"]["libraries"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|l| l["packages"].as_array().unwrap())
        .filter_map(|p| p["name"].as_str())
        .collect();
    assert!(packages.contains(&"numpy"), "{packages:?}");
    let limits: Value = serde_json::from_str(
        test_home
            .sql_one("SELECT limits FROM analyses_v1")
            .as_str()
            .unwrap(),
    )
    .unwrap();
    assert!(limits["wall_time"]["enforced_by"].is_string(), "{limits}");
    let layers: Value = serde_json::from_str(
        test_home
            .sql_one("SELECT isolation FROM analyses_v1")
            .as_str()
            .unwrap(),
    )
    .unwrap();
    assert!(
        layers["landlock"].is_string() && layers["seccomp"].is_string(),
        "{layers}"
    );
}

trial!(Everyone, provenance_records_the_commit_of_a_git_project);
fn provenance_records_the_commit_of_a_git_project() {
    let test_home = TestHome::new();
    test_home.write("project/a.py", "print(1)\n");
    let git = |args: &[&str]| {
        let mut command = test_home.with_environment(Command::new("git"));
        command.env("PATH", "/usr/local/bin:/usr/bin:/bin").args([
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t",
        ]);
        command.args(args);
        finish(command).good()
    };
    git(&["init", "-q", "-b", "main"]);
    git(&["add", "a.py"]);
    git(&["commit", "-q", "-m", "one"]);
    let head = git(&["rev-parse", "HEAD"]);
    let of = |id: &str| -> Value {
        test_home.run(["--id", id, "a.py"]).good();
        let text = test_home.sql_one(&format!(
            "SELECT provenance FROM analyses_v1 WHERE id = '{id}'"
        ));
        let from: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
        from["git"].clone()
    };
    let clean = of("clean");
    assert_eq!(clean["commit"], head.trim(), "{clean}");
    assert_eq!(
        (&clean["dirty"], &clean["branch"]),
        (&json!(false), &json!("main")),
        "{clean}"
    );
    test_home.write("project/a.py", "print(2)\n");
    let dirty = of("dirty");
    assert_eq!(
        (&dirty["commit"], &dirty["dirty"]),
        (&json!(head.trim()), &json!(true)),
        "{dirty}"
    );
}

/// The files below a directory that contain these bytes.
pub fn files_with(dir: &Path, marker: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(t) if t.is_dir() => found.extend(files_with(&path, marker)),
            Ok(t) if t.is_file() => {
                let bytes = std::fs::read(&path).unwrap_or_default();
                if bytes.windows(marker.len()).any(|w| w == marker) {
                    found.push(path.display().to_string());
                }
            }
            _ => {}
        }
    }
    found
}

trial!(Everyone, secret_values_are_not_recorded);
fn secret_values_are_not_recorded() {
    let test_home = TestHome::new();
    let options = [
        "--id",
        "s",
        "--keep",
        "always",
        "--secret-env",
        "LAB_*",
        "--env",
        "LAB_KEY=marker-one",
        "--env",
        "API_TOKEN=marker-two",
        "--env",
        "URL=postgres://u:marker-three@h/d",
        "--env",
        "SEED=marker-four",
    ];
    // The program gets the secrets.
    let out = test_home
        .sh(&options, "echo ${#LAB_KEY} ${#API_TOKEN} ${#URL} ${#SEED}")
        .good();
    assert_eq!(out, "10 10 29 11\n");
    let text = test_home.sql_one("SELECT provenance FROM analyses_v1");
    let from: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
    let of = |name: &str| {
        let all = from["env"].as_array().unwrap();
        all.iter().find(|v| v["name"] == name).unwrap().clone()
    };
    assert_eq!(
        (&of("LAB_KEY")["value"], &of("LAB_KEY")["withheld"]),
        (&Value::Null, &json!("policy"))
    );
    assert_eq!(
        (&of("API_TOKEN")["value"], &of("API_TOKEN")["withheld"]),
        (&Value::Null, &json!("name"))
    );
    assert_eq!(
        (&of("URL")["value"], &of("URL")["withheld"]),
        (&Value::Null, &json!("value"))
    );
    assert_eq!(of("SEED")["value"], "marker-four", "the control");
    assert!(
        !files_with(&test_home.home, b"marker-four").is_empty(),
        "the control"
    );
    for marker in ["marker-one", "marker-two", "marker-three"] {
        let found = files_with(&test_home.home, marker.as_bytes());
        assert_eq!(found, [""; 0], "{marker}");
    }
}

trial!(Everyone, collection_bounds_keep_the_outputs_that_fit);
fn collection_bounds_keep_the_outputs_that_fit() {
    let test_home = TestHome::new();
    let script = "mkdir -p a/b/c; echo 1 > one; echo 22 > two; head -c 3000 /dev/zero > three; echo 4 > a/b/c/four; echo 5 > a/five";
    let all = test_home.sh_json(&[], script);
    assert_eq!(all["outputs"].as_array().unwrap().len(), 5);
    assert_eq!(all["collection"]["complete"], true, "the control");
    let cases: [(&[&str], &str, u64, &[&str]); 4] = [
        (
            &["--max-output-file", "2K"],
            "file_too_large",
            1,
            &["a/b/c/four", "a/five", "one", "two"],
        ),
        (
            &["--max-depth", "2"],
            "too_deep",
            1,
            &["a/five", "one", "three", "two"],
        ),
        (&["--max-outputs", "3"], "too_many", 2, &[]),
        (&["--max-output", "8"], "total_too_large", 1, &[]),
    ];
    for (options, remark, count, paths) in cases {
        let document = test_home.sh_json(options, script);
        let collection = &document["collection"];
        assert_eq!(document["status"], "succeeded", "{options:?}");
        assert_eq!(collection["complete"], false, "{options:?}");
        assert!(
            collection["remark_counts"][remark].as_u64().unwrap() >= count,
            "{collection}"
        );
        let kept: Vec<&str> = document["outputs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|o| o["path"].as_str().unwrap())
            .collect();
        if !paths.is_empty() {
            assert_eq!(kept, paths, "{options:?}");
        }
        let refused = collection["refused"].as_u64().unwrap();
        assert_eq!(kept.len() as u64 + refused, 5, "{options:?}: {collection}");
        let sum: u64 = document["outputs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|o| o["bytes"].as_u64().unwrap())
            .sum();
        assert!(remark != "total_too_large" || sum <= 8, "{sum}");
        let id = document["id"].as_str().unwrap();
        let row = test_home.sql(&format!(
            "SELECT complete, refused_count FROM analyses_v1 WHERE id = '{id}'"
        ));
        assert_eq!(row, [[json!(0), json!(refused)]]);
    }
    // Files that no pattern matches are not reported as lost.
    let narrowed = test_home.sh_json(&["--output", "a/**", "--output", "one"], script);
    let kept: Vec<&str> = narrowed["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| o["path"].as_str().unwrap())
        .collect();
    assert_eq!(kept, ["a/b/c/four", "a/five", "one"]);
    assert_eq!(narrowed["collection"]["complete"], true);
    assert_eq!(narrowed["collection"]["not_asked"], 2);
    for wrong in ["/etc/*", "../x", "[", ""] {
        let ended = test_home.sh(&["--output", wrong], "true");
        assert_eq!(ended.code(), 125, "{wrong:?}: {}", ended.err());
    }
    test_home.assert_nothing_left();
}

trial!(Everyone, a_missing_output_fails_with_120);
fn a_missing_output_fails_with_120() {
    let test_home = TestHome::new();
    let script = "echo '{}' > result.json; mkdir f; echo x > f/a.png";
    test_home
        .sh(&["--expect", "result.json", "--expect", "f/*.png"], script)
        .good();
    let ended = test_home.sh(
        &["--id", "m", "--expect", "result.json", "--expect", "*.csv"],
        script,
    );
    ended.refused(120, "no output matches *.csv");
    let row = test_home.sql(
        "SELECT state, reason, complete, outputs_count, exit_code FROM analyses_v1 WHERE id = 'm'",
    );
    assert_eq!(
        row,
        [[
            json!("failed"),
            json!("missing_output"),
            json!(0),
            json!(2),
            json!(0)
        ]]
    );
    let document = test_home.sh_json(&["--expect", "*.csv"], script);
    assert_eq!(document["collection"]["missing"], json!(["*.csv"]));
    // A symlink is no output, so it satisfies no pattern of --expect.
    assert_eq!(
        test_home
            .sh(&["--expect", "x.csv"], "ln -s /etc/passwd x.csv")
            .code(),
        120
    );
    // A program that failed keeps its own exit code.
    assert_eq!(test_home.sh(&["--expect", "*.csv"], "exit 3").code(), 3);
    test_home.assert_nothing_left();
}

trial!(Everyone, small_outputs_are_in_the_database);
fn small_outputs_are_in_the_database() {
    let test_home = TestHome::new();
    let script = "for i in 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18; do (echo $i; head -c 1048573 /dev/zero) > f$i; done; head -c 1048577 /dev/zero > over; echo s > small";
    test_home.sh(&["--id", "d"], script).good();
    let row = "SELECT COUNT(*), SUM(content IS NOT NULL), SUM(LENGTH(content)) FROM outputs_v1 WHERE id = 'd'";
    let row = test_home.sql(row).remove(0);
    assert_eq!(row[0], 20);
    let (count, bytes) = (row[1].as_u64().unwrap(), row[2].as_u64().unwrap());
    assert!(
        (3..=5).contains(&count) && bytes <= 4 << 20,
        "{count}, {bytes}"
    );
    let small = test_home.sql_one("SELECT content FROM outputs_v1 WHERE path_text = 'small'");
    assert_ne!(small, Value::Null, "the smallest first");
    let over = test_home.sql_one("SELECT content FROM outputs_v1 WHERE path_text = 'over'");
    assert_eq!(over, Value::Null);
    for (id, limit, kept) in [("none", "0", 0), ("tiny", "2", 1), ("all", "64M", 2)] {
        test_home
            .sh(
                &["--id", id, "--inline-max", limit],
                "echo s > small; echo large > large",
            )
            .good();
        let query = format!("SELECT COUNT(content) FROM outputs_v1 WHERE id = '{id}'");
        assert_eq!(test_home.sql_one(&query), kept, "{id}");
        assert_eq!(
            test_home.ask(["outputs", id, "large", "-o", "-"]).good(),
            "large\n"
        );
    }
    let ended = test_home.sh(&["--inline-max", "65M"], "true");
    assert_eq!(ended.code(), 125, "{}", ended.err());
}

trial!(Everyone, an_export_overwrites_nothing);
fn an_export_overwrites_nothing() {
    let test_home = TestHome::new();
    let to = test_home.path("results");
    let to = to.to_str().unwrap();
    let read = |name: &str| std::fs::read_to_string(Path::new(to).join(name)).unwrap();
    let script =
        |text: &str| format!("mkdir -p d; echo {text} > d/a; echo {text} > b; ln -s /etc/passwd l");
    test_home.sh(&["--to", to], &script("first")).good();
    assert_eq!(
        (read("d/a"), read("b")),
        ("first\n".into(), "first\n".into())
    );
    assert!(!Path::new(to).join("l").exists());
    // A second export to the same directory changes nothing there; the run is committed.
    let ended = test_home.sh(&["--id", "second", "--to", to], &script("second"));
    assert_ne!(ended.code(), 0, "{}", ended.err());
    assert!(ended.err().contains("--force"), "{}", ended.err());
    assert_eq!(
        (read("d/a"), read("b")),
        ("first\n".into(), "first\n".into())
    );
    assert_eq!(
        test_home.sql_one("SELECT outputs_count FROM analyses_v1 WHERE id = 'second'"),
        2
    );
    test_home
        .sh(&["--to", to, "--force"], &script("third"))
        .good();
    assert_eq!(
        (read("d/a"), read("b")),
        ("third\n".into(), "third\n".into())
    );
    // The export does not follow a link that somebody planted.
    let victim = test_home.write("victim", "precious");
    std::fs::remove_file(Path::new(to).join("b")).unwrap();
    std::os::unix::fs::symlink(&victim, Path::new(to).join("b")).unwrap();
    test_home.sh(&["--to", to], &script("fourth"));
    test_home.sh(&["--to", to, "--force"], &script("fifth"));
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    test_home.sh(&["--force"], "true").refused(125, "--to");
    // Changing an exported file does not change the record.
    let document = test_home.sh_json(
        &["--to", test_home.path("own").to_str().unwrap()],
        "echo own > f",
    );
    std::fs::write(test_home.path("own/f"), "changed").unwrap();
    let hash = document["outputs"][0]["blake3"].as_str().unwrap();
    assert_eq!(std::fs::read(test_home.object(hash)).unwrap(), b"own\n");
}

trial!(Everyone, an_id_is_run_again_only_on_request);
fn an_id_is_run_again_only_on_request() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "x"], "echo 1 > f").good();
    let refused = test_home.sh(&["--id", "x"], "echo never > f; echo ran");
    refused.refused(125, "--replace");
    assert_eq!(refused.out(), "", "it did not run");
    let said = test_home
        .sh(&["--id", "x", "--replace"], "echo 2 > f")
        .err();
    assert!(said.contains("attempt 2"), "{said}");
    let rows =
        test_home.sql("SELECT attempt, CAST(content AS TEXT) FROM outputs_v1 ORDER BY attempt");
    assert_eq!(rows, [[json!(1), json!("1\n")], [json!(2), json!("2\n")]]);
    assert_eq!(
        test_home.sql("SELECT id, attempt FROM analyses_v1"),
        [[json!("x"), json!(2)]]
    );
    // --replace is allowed for a first attempt.
    test_home.sh(&["--id", "new", "--replace"], "true").good();
    // While an attempt runs, a second one is refused, with or without --replace.
    let mut live = test_home.start(["--id", "busy", "--", "sh", "-c", "echo up; sleep 600"]);
    live.wait_for("up");
    assert_eq!(
        test_home.sh(&["--id", "busy", "--replace"], "true").code(),
        125
    );
    live.signal(rustix::process::Signal::TERM);
    assert_eq!(live.finish().code(), 123);
    test_home.sh(&["--id", "busy", "--replace"], "true").good();
}

trial!(Everyone, without_a_database_nothing_is_recorded);
fn without_a_database_nothing_is_recorded() {
    let test_home = TestHome::new();
    let document = test_home.sh_json(&["--db", "none", "--id", "x"], "echo f > f");
    assert_eq!(document["commit"]["state"], "unrecorded", "{document}");
    assert!(!test_home.home.join("fumehood.db").exists());
    test_home.sh(&["--db", "none", "--id", "x"], "true").good();
    test_home
        .ask(["list", "--db", "none"])
        .refused(125, "no record");
    test_home.assert_nothing_left();
    test_home.sh(&["--id", "x"], "true").good();
    assert!(test_home.home.join("fumehood.db").exists(), "the control");
    // The variable and the user's own file can name the database. The project's file cannot.
    let mut command = test_home.run_command(["--json", "--", "true"]);
    command.env("FUMEHOOD_DB", "none");
    assert_eq!(finish(command).document()["commit"]["state"], "unrecorded");
    test_home.write("project/fumehood.toml", "db = \"none\"\n");
    test_home.sh(&[], "true").refused(125, "db");
    std::fs::remove_file(test_home.path("project/fumehood.toml")).unwrap();
    test_home.write("person/.config/fumehood/config.toml", "db = \"none\"\n");
    assert_eq!(
        test_home.sh_json(&[], "true")["commit"]["state"],
        "unrecorded"
    );
    // The run is recorded in another database, and `list` finds it there.
    let elsewhere = format!("sqlite:{}", test_home.path("person/other.db").display());
    let document = test_home.sh_json(&["--db", &elsewhere, "--id", "there"], "echo f > f");
    assert_eq!(document["commit"]["state"], "committed");
    let list = test_home.ask_json(["list", "--json", "--db", &elsewhere]);
    assert_eq!(list["analyses"][0]["id"], "there", "{list}");
}

trial!(Root, the_policy_sets_what_is_recorded_and_where);
fn the_policy_sets_what_is_recorded_and_where() {
    let test_home = TestHome::new();
    let required = "[record]\nrequired = true";
    policy::with(&test_home, required, &["--db", "none", "--", "true"]).refused(125, "requires");
    policy::with(&test_home, required, &["--", "true"]).good();
    let db = test_home.path("person/operators.db");
    let locked = format!("[record]\ndb = \"sqlite:{}\"", db.display());
    let elsewhere = format!("sqlite:{}", test_home.path("person/mine.db").display());
    policy::with(&test_home, &locked, &["--db", &elsewhere, "--", "true"]).refused(125, "operator");
    policy::with(&test_home, &locked, &["--id", "op", "--", "true"]).good();
    assert!(db.exists() && !test_home.path("person/mine.db").exists());
    let secret = "[env]\nsecret = [\"HIDDEN_*\"]";
    policy::with(
        &test_home,
        secret,
        &["--id", "h", "--env", "HIDDEN_X=marker-hidden", "--", "true"],
    )
    .good();
    assert_eq!(files_with(&test_home.home, b"marker-hidden"), [""; 0]);
    // The operator's post-process command runs instead of the user's.
    let [mine, theirs] = ["mine", "theirs"].map(|name| {
        let body = format!(
            "#!/bin/sh\necho ran > {}\n",
            test_home.path(&format!("{name}.ran")).display()
        );
        test_home.write_program(name, body)
    });
    configure_step(&test_home, &mine, "");
    let step = format!("[post_process]\ncommand = [{theirs:?}]");
    policy::with(&test_home, &step, &["--", "true"]).good();
    assert!(test_home.path("theirs.ran").exists() && !test_home.path("mine.ran").exists());
    policy::with(&test_home, "", &["--", "true"]).good();
    assert!(test_home.path("mine.ran").exists(), "the control");
}

/// Writes the user's configuration with a post-process command.
fn configure_step(test_home: &TestHome, program: &Path, more: &str) {
    let text =
        format!("[post_process]\ncommand = [{program:?}, \"an argument\", \"$(touch x)\"]\n{more}");
    test_home.write("person/.config/fumehood/config.toml", text);
}

trial!(Everyone, the_post_process_command_runs_after_the_commit);
fn the_post_process_command_runs_after_the_commit() {
    let test_home = TestHome::new();
    let (told, seen) = (test_home.path("told.json"), test_home.path("seen"));
    let db = test_home.home.join("fumehood.db");
    let body = format!(
        "#!/bin/sh\ncat > {}\n(printf '%s|' \"$@\"; echo; pwd; cat result.json d/*; find . | sort) > {}
        python3 -c \"import sqlite3; print(sqlite3.connect('file:{}?mode=ro', uri=True).execute('SELECT state FROM analyses_v1').fetchall())\" >> {}
        for f in result.json d/new; do (echo spoilt >> $f) 2>/dev/null; done; exit 0\n",
        told.display(), seen.display(), db.display(), seen.display()
    );
    let program = test_home.write_program("step", body);
    configure_step(&test_home, &program, "");
    let ended = test_home.sh(
        &["--id", "s"],
        "mkdir d; echo '{\"a\": 1}' > result.json; echo deep > d/f; ln -s / l",
    );
    ended.good();
    assert!(ended.err().contains("post-processed"), "{}", ended.err());
    let told: Value = serde_json::from_slice(&std::fs::read(told).unwrap()).unwrap();
    assert_eq!(told["schema"], "fumehood.post-process/1");
    assert_eq!(
        (&told["key"], &told["id"], &told["attempt"]),
        (&json!("s/1"), &json!("s"), &json!(1))
    );
    assert_eq!(
        (&told["status"], &told["complete"]),
        (&json!("succeeded"), &json!(true))
    );
    assert_eq!(told["result"], json!({"a": 1}));
    let paths: Vec<&Value> = told["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|o| &o["path"])
        .collect();
    assert_eq!(paths, [&json!("d/f"), &json!("result.json")]);
    let seen = std::fs::read_to_string(seen).unwrap();
    let lines: Vec<&str> = seen.lines().collect();
    assert_eq!(lines[0], "an argument|$(touch x)|");
    assert_eq!(lines[1], told["outputs_dir"].as_str().unwrap());
    assert_eq!(
        lines[2..8],
        ["{\"a\": 1}", "deep", ".", "./d", "./d/f", "./result.json"]
    );
    assert_eq!(lines[8], "[('succeeded',)]", "it is committed by then");
    assert_eq!(
        test_home.sql_one("SELECT post_process FROM analyses_v1"),
        "done"
    );
    // The command could not change the record.
    test_home.ask(["verify"]).good();
    assert!(!Path::new(told["outputs_dir"].as_str().unwrap()).exists());
    test_home.assert_nothing_left();
    // Failed runs are post-processed too.
    assert_eq!(test_home.sh(&["--id", "f"], "exit 4").code(), 4);
    assert_eq!(
        test_home.sql_one("SELECT post_process FROM analyses_v1 WHERE id = 'f'"),
        "done"
    );
}

trial!(
    Everyone,
    a_failed_post_process_command_is_reported_and_repeated
);
fn a_failed_post_process_command_is_reported_and_repeated() {
    let test_home = TestHome::new();
    let keys = test_home.path("keys");
    let body = |end: &str| {
        format!(
            "#!/usr/bin/python3\nimport json, sys\nopen({keys:?}, 'a').write(json.load(sys.stdin)['key'] + '\\n')\n{end}\n"
        )
    };
    let program = test_home.write_program("step", body("sys.exit('no \\x1b[31mred\\x1b[0m luck')"));
    configure_step(&test_home, &program, "");
    let ended = test_home.sh(&["--id", "s"], "echo kept > f");
    ended.refused(121, "post_process failed");
    assert!(
        ended.err().contains("luck") && !ended.stderr.contains(&0x1b),
        "{}",
        ended.err()
    );
    assert!(
        ended.err().contains("fumehood post-process s"),
        "{}",
        ended.err()
    );
    let row = "SELECT state, post_process, post_process_tries, outputs_count FROM analyses_v1 WHERE id = 's'";
    assert_eq!(
        test_home.sql(row),
        [[json!("succeeded"), json!("failed"), json!(1), json!(1)]]
    );
    assert!(!test_home.ask(["show", "s"]).stdout.contains(&0x1b));
    // The command fails again, then succeeds.
    let ended = test_home.ask(["post-process", "s"]);
    assert_eq!(ended.code(), 121, "{}", ended.err());
    test_home.write_program("step", body(""));
    test_home.ask(["post-process", "s"]).good();
    assert_eq!(
        test_home.sql(row),
        [[json!("succeeded"), json!("done"), json!(3), json!(1)]]
    );
    assert_eq!(std::fs::read_to_string(&keys).unwrap(), "s/1\ns/1\ns/1\n");
    // A repeated `post-process` gives the same answer and does not run the command again.
    test_home.ask(["post-process", "s"]).good();
    assert_eq!(
        test_home.sql(row),
        [[json!("succeeded"), json!("done"), json!(3), json!(1)]]
    );
    // A program that failed keeps its exit code. A post-process command that cannot be started has failed.
    std::fs::remove_file(test_home.path("step")).unwrap();
    assert_eq!(test_home.sh(&["--id", "own"], "exit 9").code(), 9);
    assert_eq!(
        test_home.sql_one("SELECT post_process FROM analyses_v1 WHERE id = 'own'"),
        "failed"
    );
    test_home.assert_nothing_left();
}

trial!(Everyone, a_hanging_post_process_command_is_ended);
fn a_hanging_post_process_command_is_ended() {
    let test_home = TestHome::new();
    let marker = fresh_id("step");
    let body = format!(
        "#!/bin/sh\n(exec sh -c 'while :; do sleep 1; done' {marker}) &\nexec sh -c 'while :; do sleep 1; done' {marker}\n"
    );
    let program = test_home.write_program("step", body);
    configure_step(&test_home, &program, "timeout = \"1s\"\n");
    let ended = test_home.sh(&["--id", "s"], "true");
    ended.refused(121, "did not end within 1 s");
    eventually("what it started is dead", || {
        processes_with(&marker).is_empty()
    });
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    a_projects_file_cannot_set_the_post_process_command
);
fn a_projects_file_cannot_set_the_post_process_command() {
    let test_home = TestHome::new();
    let ran = test_home.path("ran");
    let program = test_home.write_program("step", format!("#!/bin/sh\ntouch {}\n", ran.display()));
    let table = format!("[post_process]\ncommand = [{program:?}]\n");
    test_home.write("project/fumehood.toml", &table);
    test_home.sh(&[], "true").refused(125, "post_process");
    assert!(!ran.exists());
    std::fs::remove_file(test_home.path("project/fumehood.toml")).unwrap();
    for name in ["FUMEHOOD_POST_PROCESS", "FUMEHOOD_POST_PROCESS_COMMAND"] {
        let mut command = test_home.run_command(["--", "true"]);
        command.env(name, &program);
        assert_eq!(finish(command).code(), 125, "{name}");
    }
    assert!(!ran.exists());
    test_home.write("person/.config/fumehood/config.toml", &table);
    test_home.sh(&[], "true").good();
    assert!(ran.exists(), "the control");
    std::fs::remove_file(&ran).unwrap();
    set_mode(
        &test_home.path("person/.config/fumehood/config.toml"),
        0o666,
    );
    assert_eq!(
        test_home.sh(&[], "true").code(),
        125,
        "others could write it"
    );
    assert!(!ran.exists());
}

trial!(Everyone, no_run_starts_without_free_space);
fn no_run_starts_without_free_space() {
    let test_home = TestHome::new();
    test_home
        .sh(&["--free-reserve", "0"], "head -c 2M /dev/urandom > f")
        .good();
    let ended = test_home.sh(&["--free-reserve", "1000T"], "echo ran");
    ended.refused(125, "free_reserve");
    assert_eq!(ended.out(), "");
    let ended = test_home.sh(&["--store-quota", "1M"], "echo ran");
    ended.refused(125, "store_quota");
    assert_eq!(ended.out(), "");
    test_home.sh(&["--store-quota", "1G"], "true").good();
    assert_eq!(
        test_home.sql_one("SELECT COUNT(*) FROM attempts_v1"),
        2,
        "what never began is not recorded"
    );
    // Without a record the reserve of free space does not apply.
    test_home
        .sh(&["--free-reserve", "1000T", "--db", "none"], "true")
        .good();
    test_home.assert_nothing_left();
}

trial!(Everyone, a_workspace_in_memory_is_recorded);
fn a_workspace_in_memory_is_recorded() {
    let test_home = TestHome::new();
    let script = "mkdir d; echo deep > d/f; head -c 3M /dev/zero > big; echo '{\"a\": 2}' > result.json; ln -s x l";
    let document = test_home.sh_json(&["--workspace", "memory", "--id", "m"], script);
    assert_eq!(document["commit"]["state"], "committed", "{document}");
    assert_eq!(document["collection"]["complete"], true);
    let paths: Vec<String> = outputs(&test_home).into_keys().collect();
    assert_eq!(paths, ["big", "d/f", "result.json"]);
    let stored = outputs(&test_home);
    assert_eq!(
        stored["big"].2,
        ContentHash::of(&vec![0; 3 << 20]).to_string()
    );
    assert_eq!(
        test_home.sql_one("SELECT result ->> 'a' FROM analyses_v1"),
        2
    );
    assert_eq!(
        test_home.ask(["outputs", "m", "d/f", "-o", "-"]).good(),
        "deep\n"
    );
    test_home.ask(["verify"]).good();
    test_home.assert_nothing_left();
}

trial!(Everyone, a_kept_workspace_is_the_users_own);
fn a_kept_workspace_is_the_users_own() {
    let test_home = TestHome::new();
    let script = "echo one > f; mkdir d; echo two > d/g; chmod 444 f";
    let ended = test_home.sh(&["--id", "k", "--keep", "always", "--json"], script);
    let document = committed_document(&ended);
    let workspace = test_home.workspace("k");
    let hash = document["outputs"].as_array().unwrap()[1]["blake3"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(hash, ContentHash::of(b"one\n").to_string());
    assert_eq!(std::fs::read(workspace.join("f")).unwrap(), b"one\n");
    assert_eq!(std::fs::read(workspace.join("d/g")).unwrap(), b"two\n");
    // The user changes the kept workspace; the record stays the same.
    std::fs::write(workspace.join("d/g"), "changed").unwrap();
    set_mode(&workspace.join("f"), 0o644);
    std::fs::write(workspace.join("f"), "changed").unwrap();
    assert_eq!(std::fs::read(test_home.object(&hash)).unwrap(), b"one\n");
    test_home.ask(["verify"]).good();
    test_home.gc(&["--kept", "k"]).good();
    assert!(!workspace.exists());
    assert_eq!(
        test_home.ask(["outputs", "k", "d/g", "-o", "-"]).good(),
        "two\n"
    );
    // --keep on-failure keeps only a failed run's workspace.
    test_home
        .sh(&["--id", "fine", "--keep", "on-failure"], "echo x > f")
        .good();
    assert!(!test_home.workspace("fine").exists());
    assert_eq!(
        test_home
            .sh(
                &["--id", "bad", "--keep", "on-failure"],
                "echo x > f; exit 2"
            )
            .code(),
        2
    );
    assert_eq!(
        std::fs::read(test_home.workspace("bad").join("f")).unwrap(),
        b"x\n"
    );
    assert_eq!(
        test_home.sql_one("SELECT outputs_count FROM analyses_v1 WHERE id = 'bad'"),
        1
    );
}

trial!(Everyone, an_attempt_that_could_not_start_is_recorded);
fn an_attempt_that_could_not_start_is_recorded() {
    let test_home = TestHome::new();
    assert_eq!(
        test_home
            .run(["--id", "a", "--input", "absent", "--", "true"])
            .code(),
        125
    );
    test_home.write("project/huge", vec![0; 3 << 20]);
    let ended = test_home.run(["--id", "b", "--disk", "1M", "--input", "huge", "--", "true"]);
    assert_eq!(ended.code(), 125, "{}", ended.err());
    for row in test_home.sql("SELECT id, state, reason, complete, outputs_count FROM attempts_v1") {
        assert_eq!(
            row[1..],
            [json!("error"), json!("not_started"), json!(0), json!(0)],
            "{row:?}"
        );
    }
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    a_damaged_database_or_artifact_store_loses_no_outputs
);
/// The database is damaged, or the artifact store is replaced by a file, while the program runs.
fn a_damaged_database_or_artifact_store_loses_no_outputs() {
    let test_home = TestHome::new();
    test_home.sh(&["--id", "before"], "true").good();
    // Closing the database moves the content of its write-ahead log into the file.
    test_home.gc(&[]).good();
    let db = test_home.home.join("fumehood.db");
    for (id, spoil, mend) in [
        (
            "damaged",
            "cp fumehood.db saved; rm -f fumehood.db-*; head -c 8192 /dev/urandom > fumehood.db",
            "mv saved fumehood.db; rm -f fumehood.db-*",
        ),
        (
            "store",
            "mv artifacts away; echo > artifacts",
            "rm artifacts; mv away artifacts",
        ),
    ] {
        let gate = test_home.path("project/gate");
        let _gone = std::fs::remove_file(&gate);
        let made = Command::new("mkfifo").arg(&gate).status().unwrap();
        assert!(made.success());
        let gate_text = gate.to_str().unwrap().to_owned();
        let script = "echo precious > f; echo up; read x";
        let mut live =
            test_home.start(["--id", id, "--stdin", &gate_text, "--", "sh", "-c", script]);
        let mut hold = std::fs::OpenOptions::new().write(true).open(&gate).unwrap();
        live.wait_for("up");
        let sh = |act: &str| {
            let done = Command::new("sh")
                .args(["-ec", act])
                .current_dir(&test_home.home)
                .status()
                .unwrap();
            assert!(done.success(), "{act}");
        };
        sh(spoil);
        std::io::Write::write_all(&mut hold, b"go\n").unwrap();
        drop(hold);
        let ended = live.finish();
        ended.refused(121, "NOT COMMITTED");
        assert!(
            ended.err().contains(&format!("fumehood post-process {id}")),
            "{}",
            ended.err()
        );
        sh(mend);
        assert!(db.exists());
        test_home.ask(["post-process", id]).good();
        assert_eq!(
            test_home.ask(["outputs", id, "f", "-o", "-"]).good(),
            "precious\n"
        );
        assert_eq!(
            test_home.sql_one(&format!(
                "SELECT COUNT(*) FROM attempts_v1 WHERE id = '{id}'"
            )),
            1
        );
        test_home.assert_nothing_left();
        assert_eq!(names_in(&test_home.home.join("pending")), [""; 0]);
    }
    assert_eq!(
        test_home.sql_one("SELECT state FROM analyses_v1 WHERE id = 'before'"),
        "succeeded"
    );
}

trial!(Everyone, the_readme_commands_work);
/// Runs every line of the README's second code block, as written, in a copy of the example.
fn the_readme_commands_work() {
    let test_home = TestHome::new();
    let (readme, files) = readme_and_examples();
    for (name, content) in &files {
        test_home.write(&format!("project/examples/{name}"), content);
    }
    let block = readme
        .split("```sh\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let bin = test_home.path("bin");
    std::fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(program::binary(), bin.join("fumehood")).unwrap();
    let mut ran = 0;
    for line in block.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') || line == "fumehood shell" {
            continue;
        }
        let root = test_home.workspace_root.display().to_string();
        let line = line.replace("/tmp/scidex", &format!("{root}/scidex"));
        let mut command = test_home.with_environment(Command::new("sh"));
        command
            .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
            // A plain user's memory limit needs a delegated cgroup, as the README says, and a trial has none.
            .env("FUMEHOOD_ALLOW_DEGRADED", "memory")
            .current_dir(test_home.path("project/examples/gwas"))
            .args(["-c", &line]);
        let ended = finish(command);
        assert_eq!(ended.code(), 0, "{line}\n{}\n{}", ended.out(), ended.err());
        if line.starts_with("fumehood outputs gwas-7 result.json") {
            let _json: Value = serde_json::from_str(&ended.out()).unwrap();
        }
        ran += 1;
    }
    assert!(ran >= 13, "{ran}");
    assert!(
        test_home
            .path("project/examples/gwas/results/result.json")
            .exists()
    );
    test_home.assert_nothing_left();
}

/// The README and the examples. They are compiled into the test, because the test account may not be able to read the
/// checkout.
fn readme_and_examples() -> (&'static str, Vec<(&'static str, &'static [u8])>) {
    let readme = include_str!("../../../../README.md");
    let files: Vec<(&str, &[u8])> = vec![
        (
            "gwas/analysis.py",
            include_bytes!("../../../../examples/gwas/analysis.py"),
        ),
        (
            "regression/fit.R",
            include_bytes!("../../../../examples/regression/fit.R"),
        ),
        (
            "gwas/data/genotypes.csv",
            include_bytes!("../../../../examples/gwas/data/genotypes.csv"),
        ),
        (
            "gwas/docs/columns.md",
            include_bytes!("../../../../examples/gwas/docs/columns.md"),
        ),
    ];
    (readme, files)
}
