//! Which outputs are collected under a bound, and the cost of an export.

use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};
use testkit::home::TestHome;
use testkit::trial;

fn names(document: &Value) -> Vec<String> {
    let outputs = document["outputs"].as_array().unwrap();
    let path = |output: &Value| output["path"].as_str().unwrap().to_owned();
    outputs.iter().map(path).collect()
}

trial!(Everyone, every_name_of_a_file_counts_against_max_output);
fn every_name_of_a_file_counts_against_max_output() {
    let test_home = TestHome::new();
    let script =
        "head -c 4194304 /dev/zero | tr '\\0' x > f; for n in $(seq 10 59); do ln f f$n; done";
    let bounds = ["--id", "n", "--max-output", "10M"];
    let document = test_home.sh_json(&bounds, script);
    assert_eq!(document["status"], "succeeded", "{document}");
    assert_eq!(
        names(&document),
        ["f", "f10"],
        "two names of four MiB each fit"
    );
    let to = test_home.path("to");
    test_home
        .ask(["outputs", "n", "--to", to.to_str().unwrap()])
        .good();
    let files = std::fs::read_dir(&to).unwrap().flatten();
    let bytes: u64 = files.map(|file| file.metadata().unwrap().len()).sum();
    assert_eq!(bytes, 2 * 4_194_304);
    let row = test_home.sql("SELECT outputs_count, output_bytes FROM analyses_v1 WHERE id = 'n'");
    assert_eq!(row, [[json!(2), json!(2 * 4_194_304)]]);
    // Each file is also checked against the bound for one file.
    let bounds = ["--max-output-file", "1M"];
    assert_eq!(
        names(&test_home.sh_json(&bounds, script)),
        Vec::<String>::new()
    );
    // Control: within the bound every name is collected.
    let document = test_home.sh_json(&["--id", "all"], script);
    assert_eq!(names(&document).len(), 51, "{document}");
}

trial!(Everyone, equal_outputs_are_exported_as_files_of_their_own);
fn equal_outputs_are_exported_as_files_of_their_own() {
    let test_home = TestHome::new();
    let script =
        "echo same > a; ln a b; echo same > c; mkdir d; ln a d/e; : > empty; ln empty empty2";
    test_home.sh(&["--id", "n"], script).good();
    let to = test_home.path("to");
    test_home
        .ask(["outputs", "n", "--to", to.to_str().unwrap()])
        .good();
    let mut inodes = std::collections::BTreeSet::new();
    for name in ["a", "b", "c", "d/e", "empty", "empty2"] {
        inodes.insert(to.join(name).metadata().unwrap().ino());
    }
    assert_eq!(inodes.len(), 6, "writing to one must not change another");
    assert_eq!(std::fs::read(to.join("d/e")).unwrap(), b"same\n");
}

trial!(Everyone, many_empty_files_displace_no_result);
fn many_empty_files_displace_no_result() {
    let test_home = TestHome::new();
    let script = "
import os
for d in range(30):
    os.makedirs(f'a{d}/deep')
    for n in range(50):
        open(f'a{d}/{n}', 'w').close()
        open(f'a{d}/deep/{n}', 'w').close()
open('zz-good.csv', 'w').write('x' * 5000)
open('result.json', 'w').write('{\"answer\": 42}' + ' ' * 9000)
os.makedirs('p/q/r')
open('p/q/r/wanted.csv', 'w').write('y' * 7000)
open('p/q/r/named.bin', 'w').write('z' * 8000)";
    let options = [
        "--max-outputs",
        "5",
        "--expect",
        "**/wanted.csv",
        "--expect",
        "p/q/r/named.bin",
        "--json",
    ];
    let document = test_home.python(&options, script).document();
    let kept = names(&document);
    for name in [
        "p/q/r/named.bin",
        "p/q/r/wanted.csv",
        "result.json",
        "zz-good.csv",
    ] {
        assert!(kept.iter().any(|kept| kept == name), "{name}: {kept:?}");
    }
    assert_eq!(kept.len(), 5, "{kept:?}");
    assert_eq!(document["status"], "succeeded", "{document}");
    // Without an effective bound, every file is collected.
    let document = test_home.python(&["--json"], script).document();
    assert_eq!(names(&document).len(), 3004);
}

trial!(
    Everyone,
    collection_allots_bytes_to_outputs_in_the_same_order_each_time
);
fn collection_allots_bytes_to_outputs_in_the_same_order_each_time() {
    let test_home = TestHome::new();
    let script = "
import os
os.makedirs('a/b')
for n in range(40):
    open(f'a/b/{n}', 'w').write('j' * 900)
open('a/table.csv', 'w').write('t' * 4000)
open('z.csv', 'w').write('g' * 5000)
open('result.json', 'w').write('{}' + ' ' * 6000)";
    let document = test_home
        .python(&["--max-output", "16000", "--json"], script)
        .document();
    let kept = names(&document);
    assert_eq!(kept, ["a/b/0", "a/table.csv", "result.json", "z.csv"]);
}

trial!(Everyone, a_projects_patterns_are_bounded);
fn a_projects_patterns_are_bounded() {
    let test_home = TestHome::new();
    let wild = "*a".repeat(240);
    let patterns: Vec<String> = (0..64)
        .map(|n| format!("{:?}", format!("{wild}{n}")))
        .collect();
    test_home.write(
        "project/fumehood.toml",
        format!("output = [{}]\n", patterns.join(", ")),
    );
    test_home.sh(&[], "true").refused(125, "wildcards");
}
