//! Where code may be, how long files may be, and which words are forbidden.

use std::fs;

use crate::sources::*;

/// The most lines that a file may have before its tests. Aim at about 500, and split a file that is longer than this.
const LINES_MAX: usize = 700;

/// The functions that may poll, with a bound, because there is no event to wait for: processes that are not children, and
/// files of cgroup version 1. All other code waits for events.
const POLLING: &[(&str, &str)] = &[
    ("crates/testkit/src/wait.rs", "poll_until"),
    (
        "crates/sandbox/src/resources/cgroup/tests.rs",
        "forks_beyond_the_process_limit_are_refused",
    ),
    // Waits for a while to check that nothing happens.
    (
        "crates/sandbox/tests/promises/p12_runner_death.rs",
        "the_program_does_not_run_before_the_start_order",
    ),
];

/// The comment above a sleep that waits for no event: crash tests sleep so that each kill, cancel or restart hits a
/// different moment.
const RANDOM_DELAY_COMMENT: &str =
    "// This sleep waits for no event. It varies the moment of the interruption.";

#[test]
fn unsafe_is_only_in_sandbox_sys_and_fuzz() {
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
        "crates/testkit/src/lib.rs",
        "crates/fumehood/src/main.rs",
    ] {
        assert!(read(name).contains("#![forbid(unsafe_code)]"), "{name}");
    }
    assert!(read("crates/sandbox/src/lib.rs").contains("#![deny(unsafe_code)]"));
    let allowed = lines_of_code(|_, line| line.contains("allow(unsafe_code)"));
    assert_eq!(allowed.len(), 1, "{allowed:?}");
}

/// sandbox and store know nothing of each other; engine uses both; doctor uses all three; the binary uses everything;
/// testkit uses none of them, and is a dev-dependency alone.
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
                "doctor", "fumehood", "clap", "anyhow", "axum", "libc", "tokio", "sqlx", "rusqlite",
            ],
        ),
        (
            "doctor",
            &[
                "fumehood", "clap", "anyhow", "axum", "toml", "libc", "tokio", "sqlx", "rusqlite",
            ],
        ),
        ("fumehood", &["libc", "tokio", "sqlx", "rusqlite"]),
        (
            "testkit",
            &["sandbox", "store", "engine", "doctor", "fumehood"],
        ),
    ];
    for (of, unwanted) in absent {
        let manifest: toml::Table = read(&format!("crates/{of}/Cargo.toml")).parse().unwrap();
        let needs = manifest["dependencies"].as_table().unwrap();
        assert!(
            !needs.contains_key("testkit"),
            "testkit is for tests: make it a dev-dependency of {of}"
        );
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
    none(long.collect(), "split these files");
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
        if name == "crates/fumehood/tests/tidy/layout.rs" || name == "CONTRIBUTING.md" {
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

/// The name of the function around a line: of the nearest `fn` above that is indented less than the line.
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
            let is_random_delay = at > 0 && written[at - 1] == RANDOM_DELAY_COMMENT;
            if !is_random_delay && !POLLING.contains(&(name.as_str(), function)) {
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
        // Tests read the databases themselves, to see what is really in them.
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

/// No file may contain a path of the author's machine.
#[test]
fn no_path_of_one_machine() {
    // Concatenated, so that this file does not contain the paths itself.
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
