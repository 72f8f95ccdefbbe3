//! What a machine can check of the house's rules, so that no reader has to: where `unsafe` is, which way the
//! crates depend on each other, how long files are, what the documents must mention, which licences come in.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Before its tests. Near 500 is the aim (style, section 2); beyond this a file is two files.
const LINES_MAX: usize = 700;

/// Waiting by looking again and again, with a bound, where no event can be waited for: processes that are not ours
/// to reap, and files of cgroup version 1. A function by its name; everything else waits on events.
const POLLING: &[(&str, &str)] = &[
    ("crates/fumehood/tests/cli/lab.rs", "eventually"),
    ("crates/fumehood/tests/storm/yard.rs", "until"),
    (
        "crates/sandbox/tests/promises/p11_deadline.rs",
        "look_until",
    ),
    (
        "crates/sandbox/src/resources/cgroup/tests.rs",
        "forks_beyond_the_process_limit_are_refused",
    ),
    // Lets time pass in which nothing must happen.
    (
        "crates/sandbox/tests/promises/p12_runner_death.rs",
        "nothing_runs_before_the_word_to_go",
    ),
];

/// Crash tests kill at many moments. A sleep for that waits for nothing, and says so on the line above it.
const STRIKES: &str = "// Not to wait for anything: to strike at different moments.";

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap().to_path_buf()
}

/// Every file of the repository with its path from the root; what is built or fetched is left out.
fn files() -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    let mut pending = vec![root()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if ["target", ".git", "corpus", "artifacts"].contains(&name.as_str()) {
                continue;
            }
            let path = entry.path();
            match entry.file_type().unwrap().is_dir() {
                true => pending.push(path),
                false => {
                    let below = path.strip_prefix(root()).unwrap();
                    found.push((below.to_str().unwrap().to_owned(), path));
                }
            }
        }
    }
    found.sort();
    assert!(found.len() > 50, "only {} files were found", found.len());
    found
}

/// Rust files with their text.
fn sources() -> Vec<(String, String)> {
    files()
        .into_iter()
        .filter(|(name, _)| name.ends_with(".rs"))
        .map(|(name, path)| (name, fs::read_to_string(path).unwrap()))
        .collect()
}

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn is_test(name: &str) -> bool {
    name.contains("/tests/") || name.ends_with("/tests.rs")
}

/// The same lines with comments and the insides of literals blanked, so that words are only found in code.
fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let blank = |out: &mut Vec<u8>, from: usize, to: usize| {
        for b in &mut out[from..to] {
            if *b != b'\n' {
                *b = b' ';
            }
        }
    };
    let find = |from: usize, what: &[u8]| {
        let found = bytes[from..].windows(what.len()).position(|w| w == what);
        found.map_or(bytes.len(), |at| from + at)
    };
    let mut i = 0;
    while i < bytes.len() {
        let rest = &bytes[i..];
        let end = if rest.starts_with(b"//") {
            find(i, b"\n")
        } else if rest.starts_with(b"/*") {
            (find(i, b"*/") + 2).min(bytes.len())
        } else if let Some(hashes) = raw_string(bytes, i) {
            let close = format!("\"{}", "#".repeat(hashes));
            (find(i + hashes + 2, close.as_bytes()) + close.len()).min(bytes.len())
        } else if rest[0] == b'"' {
            let mut j = i + 1;
            while j < bytes.len() && bytes[j] != b'"' {
                j += if bytes[j] == b'\\' { 2 } else { 1 };
            }
            (j + 1).min(bytes.len())
        } else if rest.starts_with(b"'\\") {
            find(i + 3, b"'") + 1
        } else if rest[0] == b'\'' && rest.get(2) == Some(&b'\'') {
            i + 3
        } else {
            i += 1;
            continue;
        };
        blank(&mut out, i, end);
        i = end;
    }
    String::from_utf8(out).unwrap()
}

/// Whether `r"` or `r#"` begins here; with how many hashes.
fn raw_string(bytes: &[u8], at: usize) -> Option<usize> {
    let before = at.checked_sub(1).map(|i| bytes[i]);
    let word = before.is_some_and(|b| b.is_ascii_alphanumeric() && b != b'b' || b == b'_');
    let rest = bytes[at..].strip_prefix(b"r")?;
    let hashes = rest.iter().take_while(|b| **b == b'#').count();
    (!word && rest.get(hashes) == Some(&b'"')).then_some(hashes)
}

fn has_word(line: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back().is_some_and(part);
        let after = line[at + word.len()..].chars().next().is_some_and(part);
        !before && !after
    })
}

/// Where in which files a line of code is of the kind asked for.
fn lines_of_code(want: impl Fn(&str, &str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for (name, text) in sources() {
        for (n, line) in code(&text).lines().enumerate() {
            if want(&name, line) {
                found.push(format!("{name}:{}: {}", n + 1, line.trim()));
            }
        }
    }
    found
}

#[track_caller]
fn none(found: Vec<String>, rule: &str) {
    assert!(found.is_empty(), "{rule}:\n{}", found.join("\n"));
}

#[test]
fn the_checks_see_code_and_not_words() {
    let text = "let a = \"unsafe\"; // unsafe\nlet c = '\"'; unsafe {}\nr#\"todo!() \"x\" \"#;/* FIXME */ 'a: loop {}";
    let seen = code(text);
    assert_eq!(seen.lines().count(), 3);
    assert!(!seen.lines().next().unwrap().contains("unsafe"));
    assert!(has_word(seen.lines().nth(1).unwrap(), "unsafe"));
    assert!(!seen.contains("todo") && !seen.contains("FIXME") && seen.contains("loop {}"));
    assert!(!has_word("#![deny(unsafe_code)]", "unsafe"));
}

#[test]
fn unsafe_stands_in_one_file() {
    let found = lines_of_code(|name, line| {
        !name.starts_with("crates/sandbox/src/sys/")
            && !name.starts_with("fuzz/")
            && has_word(line, "unsafe")
    });
    none(found, "unsafe belongs in crates/sandbox/src/sys/");
    for name in [
        "crates/store/src/lib.rs",
        "crates/engine/src/lib.rs",
        "crates/doctor/src/lib.rs",
        "crates/fumehood/src/main.rs",
    ] {
        assert!(read(name).contains("#![forbid(unsafe_code)]"), "{name}");
    }
    assert!(read("crates/sandbox/src/lib.rs").contains("#![deny(unsafe_code)]"));
    let allowed = lines_of_code(|_, line| line.contains("allow(unsafe_code)"));
    assert_eq!(allowed.len(), 1, "{allowed:?}");
}

/// sandbox and store know nothing of each other; engine uses both; doctor uses all three; the binary uses everything.
/// The second list is what each crate must not depend on.
#[test]
fn crates_depend_one_way() {
    let absent = [
        (
            "sandbox",
            &[
                "store", "engine", "doctor", "fumehood", "tokio", "clap", "sqlx", "rusqlite",
                "hyper", "axum", "anyhow", "toml",
            ][..],
        ),
        (
            "store",
            &[
                "sandbox", "engine", "doctor", "fumehood", "clap", "anyhow", "axum", "toml", "libc",
            ],
        ),
        (
            "engine",
            &[
                "doctor", "fumehood", "clap", "anyhow", "axum", "toml", "libc", "tokio", "sqlx",
                "rusqlite",
            ],
        ),
        (
            "doctor",
            &[
                "fumehood", "clap", "anyhow", "axum", "toml", "libc", "tokio", "sqlx", "rusqlite",
            ],
        ),
        ("fumehood", &["libc", "tokio", "sqlx", "rusqlite"]),
    ];
    for (of, unwanted) in absent {
        let manifest: toml::Table = read(&format!("crates/{of}/Cargo.toml")).parse().unwrap();
        let needs = manifest["dependencies"].as_table().unwrap();
        for word in unwanted {
            assert!(!needs.contains_key(*word), "{of} must not depend on {word}");
            let found = lines_of_code(|name, line| {
                name.starts_with(&format!("crates/{of}/src/"))
                    && (line.contains(&format!("{word}::")) && has_word(line, word))
                    && !line.contains(&format!("crate::{word}"))
                    && !line.contains(&format!("super::{word}"))
            });
            none(found, &format!("{of} must not use {word}"));
        }
    }
}

#[test]
fn files_stay_short_enough_to_be_read() {
    let long = sources()
        .into_iter()
        .filter(|(name, _)| !is_test(name))
        .filter_map(|(name, text)| {
            let lines: Vec<&str> = text.lines().collect();
            let inline = |w: &[&str]| w[0] == "#[cfg(test)]" && w.contains(&"mod tests {");
            let before_tests = lines.windows(3).position(inline).unwrap_or(lines.len());
            (before_tests > LINES_MAX).then(|| format!("{name}: {before_tests} lines"))
        });
    none(
        long.collect(),
        "split what is longer than a reader's patience",
    );
}

#[test]
fn nothing_is_left_for_later() {
    let unfinished = |line: &str| {
        ["todo!", "unimplemented!", "dbg!"]
            .iter()
            .any(|m| line.contains(m))
            || line.contains("#[ignore")
    };
    none(
        lines_of_code(|_, line| unfinished(line)),
        "finish it, or take it out",
    );
    let mut marked = Vec::new();
    let marks = ["TODO", "FIXME", "XXX", "HACK"];
    for (name, path) in files() {
        let Ok(text) = fs::read_to_string(path) else {
            continue;
        };
        // This file has to name what it looks for.
        if name == "crates/fumehood/tests/tidy.rs" || name == "CONTRIBUTING.md" {
            continue;
        }
        for (n, line) in text.lines().enumerate() {
            if marks.iter().any(|m| has_word(line, m)) {
                marked.push(format!("{name}:{}: {}", n + 1, line.trim()));
            }
        }
    }
    none(marked, "write it down in the document that owns it");
}

/// The function around a line: the nearest `fn` above that is not deeper.
fn function_around<'a>(lines: &[&'a str], at: usize) -> &'a str {
    let indent = |l: &str| l.len() - l.trim_start().len();
    let above = lines[..at].iter().rev();
    let heads = above.filter(|l| has_word(l, "fn") && indent(l) < indent(lines[at]));
    let head = heads.map(|l| l.split("fn ").nth(1)).next().flatten();
    head.and_then(|l| l.split(['(', '<']).next()).unwrap_or("")
}

#[test]
fn tests_wait_on_events() {
    let mut found = Vec::new();
    for (name, text) in sources() {
        let code = code(&text);
        let lines: Vec<&str> = code.lines().collect();
        let written: Vec<&str> = text.lines().map(str::trim).collect();
        let tests_from = match is_test(&name) {
            true => 0,
            false => lines
                .iter()
                .position(|l| *l == "#[cfg(test)]")
                .unwrap_or(lines.len()),
        };
        for at in tests_from..lines.len() {
            if !has_word(lines[at], "sleep") || !lines[at].contains("sleep(") {
                continue;
            }
            let function = function_around(&lines, at);
            let strikes = at > 0 && written[at - 1] == STRIKES;
            if !strikes && !POLLING.contains(&(name.as_str(), function)) {
                found.push(format!("{name}:{}: in {function:?}", at + 1));
            }
        }
    }
    none(
        found,
        "a sleep is no synchronisation; wait on an event, with a bound",
    );
}

#[test]
fn sql_stays_in_the_store() {
    let statements = [
        "SELECT ",
        "INSERT INTO ",
        "UPDATE ",
        "DELETE FROM ",
        "CREATE TABLE ",
    ];
    let mut found = Vec::new();
    for (name, text) in sources() {
        // Tests ask the databases what is really in them.
        let allowed = name.starts_with("crates/store/src/") || is_test(&name);
        for (n, line) in text.lines().enumerate() {
            let in_literal =
                |s: &&&str| line.contains(&format!("\"{s}")) || line.trim_start().starts_with(**s);
            if !allowed && statements.iter().any(|s| in_literal(&s)) {
                found.push(format!("{name}:{}: {}", n + 1, line.trim()));
            }
        }
    }
    none(found, "SQL belongs in crates/store/src/");
}

#[test]
fn modules_are_nouns_of_the_domain() {
    let empty_words = [
        "util", "utils", "common", "helper", "helpers", "manager", "misc", "imp", "shared",
    ];
    let named = lines_of_code(|_, line| {
        let module = line.trim().trim_start_matches("pub ").strip_prefix("mod ");
        let name = module.and_then(|m| m.split([';', ' ']).next());
        name.is_some_and(|n| empty_words.contains(&n))
    });
    none(named, "name the module after what it is about");
}

/// A promise file that nobody registered would be a promise that nobody tests.
#[test]
fn every_trial_file_is_registered() {
    for dir in ["crates/sandbox/tests/promises", "crates/fumehood/tests/cli"] {
        let main = code(&read(&format!("{dir}/main.rs")));
        let mut with_trials = 0;
        for (name, text) in sources() {
            let Some(module) = name
                .strip_prefix(&format!("{dir}/"))
                .and_then(|n| n.strip_suffix(".rs"))
            else {
                continue;
            };
            if module == "main" {
                continue;
            }
            assert!(
                main.contains(&format!("mod {module};")),
                "{name} is not part of {dir}"
            );
            if code(&text).contains("pub const TRIALS") {
                with_trials += 1;
                assert!(
                    main.contains(&format!("{module}::TRIALS")),
                    "{name} is not registered"
                );
                let none = |line: &str| line.contains("TRIALS") && line.ends_with("= &[];");
                assert!(!text.lines().any(none), "{name} has no trials");
            }
        }
        assert!(
            with_trials > 5,
            "{dir}: only {with_trials} files with trials"
        );
    }
}

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

/// What each layer owns, and what rests on one alone, is told to people as it is told to the tests.
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
        // `    (Layer, ..., "act", ...`
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

/// What holds at level `landlock` is told to people as `doctor --attack` and the tests assert it, and nothing beside.
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

/// The table of crashes names every step at which the tests can stop a runner, in their order, and none beside.
#[test]
fn every_step_of_an_attempt_is_in_the_table_of_crashes() {
    let text = read("ARCHITECTURE.md");
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| step | what a crash there leaves"))
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let documented: Vec<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();
    let steps: Vec<&str> = store::types::crash_points::CrashPoint::ALL
        .iter()
        .map(|step| step.name())
        .collect();
    assert_eq!(documented, steps);
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

/// Where this was written is nobody's business and true nowhere else.
#[test]
fn no_path_of_one_machine() {
    // Put together here, so that this file does not hold them.
    let work = ["/", "work", "/"].concat();
    let homes = [
        ["/", "root", "/.cargo"].concat(),
        ["/", "root", "/.pyenv"].concat(),
    ];
    let mut found = Vec::new();
    for (name, path) in files() {
        let Ok(text) = fs::read_to_string(path) else {
            continue;
        };
        for (n, line) in text.lines().enumerate() {
            let whole = line.match_indices(&work).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                !before.is_some_and(|c| c.is_alphanumeric() || "._-}".contains(c))
            });
            if whole || homes.iter().any(|h| line.contains(h)) {
                found.push(format!("{name}:{}: {}", n + 1, line.trim()));
            }
        }
    }
    none(found, "a path of the machine it was written on");
}

/// Every dependency's licence is on the list in deny.toml. Read from what cargo has already fetched.
#[test]
fn licences_are_on_the_list() {
    let deny: toml::Table = read("deny.toml").parse().unwrap();
    let list = deny["licenses"]["allow"].as_array().unwrap();
    let allowed: BTreeSet<&str> = list.iter().map(|l| l.as_str().unwrap()).collect();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked", "--offline"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(
        packages.len() > 20,
        "only {} packages were found",
        packages.len()
    );
    let bad = packages.iter().filter_map(|package| {
        let licence = package["license"].as_str().unwrap_or("none given");
        (!permitted(licence, &allowed)).then(|| format!("{}: {licence}", package["name"]))
    });
    none(bad.collect(), "a licence that deny.toml does not allow");
}

/// SPDX with `OR`, `AND` and one level of parentheses; the old `/` means OR. A choice needs one that is allowed.
fn permitted(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    let text = expression.replace('/', " OR ");
    let mut rest = text.as_str();
    let mut flat = String::new();
    while let Some((before, after)) = rest.split_once('(') {
        let Some((inner, after)) = after.split_once(')') else {
            return false;
        };
        flat.push_str(before);
        flat.push_str(if permitted(inner, allowed) {
            "@yes"
        } else {
            "@no"
        });
        rest = after;
    }
    flat.push_str(rest);
    // AND binds tighter than OR.
    flat.split(" OR ").any(|choice| {
        choice
            .split(" AND ")
            .all(|one| one.trim() == "@yes" || allowed.contains(one.trim()))
    })
}

#[test]
fn licence_expressions_are_understood() {
    let allowed = BTreeSet::from(["MIT", "Apache-2.0 WITH LLVM-exception"]);
    for fine in [
        "MIT",
        "GPL-3.0 OR MIT",
        "MIT/GPL-3.0",
        "(MIT OR GPL-3.0) AND MIT",
        "Apache-2.0 WITH LLVM-exception OR X",
    ] {
        assert!(permitted(fine, &allowed), "{fine}");
    }
    for bad in [
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(GPL-3.0 OR X) AND MIT",
        "none given",
        "",
        "(MIT",
        "@yes AND GPL",
    ] {
        assert!(!permitted(bad, &allowed), "{bad}");
    }
}

/// Real documents against docs/result-v1.schema.json, and a spoiled one to see that the schema can say no.
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
