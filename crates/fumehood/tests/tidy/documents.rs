//! What the documents must mention, and results that match their schema.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use serde_json::Value;
use store::types::crash_points::CrashPoint;

use crate::sources::{has_word, read, root};

#[test]
fn every_exit_code_is_documented() {
    let documents = [read("README.md"), read("crates/fumehood/src/cli/exit.rs")];
    let help = documents[1]
        .split("HELP: &str = \"")
        .nth(1)
        .unwrap()
        .split("\";")
        .next()
        .unwrap();
    let mut codes = 0;
    for line in documents[1].lines() {
        let Some(rest) = line.strip_prefix("pub const ") else {
            continue;
        };
        let Some((name, value)) = rest.split_once(": u8 = ") else {
            continue;
        };
        let value = value.trim_end_matches(';');
        codes += 1;
        assert!(
            has_word(help, value),
            "--help does not mention {name}, {value}"
        );
        let row = format!("| {value} |");
        assert!(
            documents[0].contains(&row),
            "README has no row `{row}` for {name}"
        );
    }
    assert!(codes >= 7, "only {codes} exit codes were found");
}

/// SECURITY.md has a row for each act in the tests' two lists: the acts of each layer, and the acts that rest on one
/// layer.
#[test]
fn the_layers_are_documented_as_they_are_tested() {
    let tested = read("crates/sandbox/tests/promises/layers.rs");
    let document = read("SECURITY.md");
    for (list, mark) in [
        ("pub const OWNED", ""),
        ("pub const RESTS_ON_ONE_LAYER", "`"),
    ] {
        let (_, rest) = tested.split_once(list).unwrap();
        let (rows, _) = rest.split_once("\n];").unwrap();
        // A row of a list begins with `    (Layer, ..., "act", ...`.
        let rows: Vec<(&str, &str)> = rows
            .lines()
            .filter_map(|line| {
                let (layer, rest) = line.strip_prefix("    (")?.split_once(',')?;
                Some((layer, rest.split('"').nth(1)?))
            })
            .collect();
        assert!(rows.len() >= 5, "{list}: {rows:?}");
        for (layer, act) in rows {
            let layer = format!("| `{}`", snake_case(layer));
            let act = format!("{mark}{act}{mark}");
            let row = |line: &str| line.starts_with(&layer) && line.contains(&act);
            assert!(
                document.lines().any(row),
                "SECURITY.md has no row of {layer} that names {act:?}"
            );
        }
    }
}

/// The documented table of level `landlock` has exactly the rows that `doctor --attack` and the tests assert.
#[test]
fn the_table_of_level_landlock_is_the_one_that_is_asserted() {
    let document = read("SECURITY.md");
    let (_, rest) = document
        .split_once("| promise | act | level `landlock` |\n|---|---|---|\n")
        .expect("SECURITY.md has the table");
    let told: Vec<&str> = rest
        .lines()
        .take_while(|line| line.starts_with('|'))
        .collect();
    let asserted: Vec<String> = sandbox::promises::ACTS
        .iter()
        .map(|act| {
            format!(
                "| {} | `{}` | {} |",
                act.promise,
                act.name,
                act.at_landlock()
            )
        })
        .collect();
    assert_eq!(told, asserted);
}

/// The cells of a table, each without its backquotes. `start` is the beginning of the table's first line.
fn table_rows<'a>(text: &'a str, start: &str) -> Vec<Vec<&'a str>> {
    let lines = text.lines().skip_while(|line| !line.starts_with(start));
    let lines = lines.map(|line| line.trim_start_matches("//! "));
    let rows = lines.skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        row.split(" | ")
            .map(|cell| cell.trim_matches([' ', '|', '`']))
            .collect()
    })
    .collect()
}

/// The table of crashes in ARCHITECTURE.md has exactly the crash points of the tests, in their order. For each crash
/// point it names the same transition as the table in the engine's `attempt/mod.rs`, and the file of that transition
/// mentions the crash point.
#[test]
fn every_crash_point_is_in_the_table_of_crashes() {
    let text = read("ARCHITECTURE.md");
    let documented: Vec<(&str, &str)> =
        table_rows(&text, "| crash point | transition | what a crash")
            .iter()
            .map(|row| (row[0], row[1]))
            .collect();
    let front = read("crates/engine/src/attempt/mod.rs");
    let rows = table_rows(&front, "//! | transition | file |");
    let mut listed = Vec::new();
    for row in &rows {
        let steps = row[4].split(", ").map(|step| step.trim_matches('`'));
        let is_step = |name: &&str| CrashPoint::ALL.iter().any(|point| point.name() == *name);
        listed.extend(steps.filter(is_step).map(|step| (step, row[1])));
    }
    assert_eq!(documented, listed);
    let points: Vec<&str> = CrashPoint::ALL.iter().map(|point| point.name()).collect();
    let steps: Vec<&str> = documented.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, points);
    for ((_, transition), point) in documented.iter().zip(CrashPoint::ALL) {
        let folder = "crates/engine/src/attempt";
        let source = match *transition {
            "finalize" => read(&format!("{folder}/finalize/mod.rs")),
            file => read(&format!("{folder}/{file}.rs")),
        };
        let mention = format!("CrashPoint::{point:?}`");
        assert!(source.contains(&mention), "{transition}: {mention}");
    }
}

fn snake_case(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.extend(c.to_lowercase());
    }
    out
}

/// Real documents match docs/result-v1.schema.json. As a control, the schema refuses an invalid document.
#[test]
fn results_are_as_their_schema_says() {
    let home = tempfile::tempdir().unwrap();
    let project = tempfile::tempdir().unwrap();
    let runs: BTreeMap<&str, (i32, Vec<&str>)> = BTreeMap::from([
        (
            "succeeded",
            (0, vec!["--", "sh", "-c", "printf 'a\\377b'; echo oh >&2"]),
        ),
        (
            "failed",
            (3, vec!["--", "sh", "-c", "cat /srv/nothing-there; exit 3"]),
        ),
        (
            "timed_out",
            (
                124,
                vec![
                    "--timeout",
                    "300ms",
                    "--grace",
                    "0s",
                    "--",
                    "sh",
                    "-c",
                    "while :; do :; done",
                ],
            ),
        ),
        (
            "limit_exceeded",
            (
                122,
                vec![
                    "--disk",
                    "1M",
                    "--",
                    "dd",
                    "if=/dev/zero",
                    "of=big",
                    "bs=4M",
                    "count=1",
                ],
            ),
        ),
        ("error", (127, vec!["--", "no-such-command-here"])),
    ]);
    let mut documents = Vec::new();
    for (status, (code, args)) in runs {
        let output = Command::new(env!("CARGO_BIN_EXE_fumehood"))
            .args(["run", "--json"])
            .args(args)
            .env("FUMEHOOD_HOME", home.path())
            .current_dir(project.path())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(code), "{text}");
        let document: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(document["status"], status, "{text}");
        documents.push(document);
    }
    let file = project.path().join("documents.json");
    fs::write(&file, serde_json::to_vec(&documents).unwrap()).unwrap();
    let checker = "import json, sys, jsonschema\n\
        schema, documents = (json.load(open(a)) for a in sys.argv[1:])\n\
        jsonschema.Draft202012Validator.check_schema(schema)\n\
        v = jsonschema.Draft202012Validator(schema)\n\
        for d in documents: v.validate(d)\n\
        for spoil in (dict(status='fine'), dict(reason='disk'), dict(extra=1), dict(exit_code='0')):\n\
        \x20   assert not v.is_valid({**documents[-1], **spoil}), spoil\n";
    let output = Command::new("/usr/bin/python3")
        .args(["-I", "-c", checker])
        .arg(root().join("docs/result-v1.schema.json"))
        .arg(&file)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
