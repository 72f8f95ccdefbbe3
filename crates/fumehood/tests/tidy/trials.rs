//! The test programs with a harness of testkit: every file is part of its program, and every trial has a name of its own.

use std::collections::BTreeSet;

use crate::sources::{code, read, sources};

const PROGRAMS: [&str; 4] = [
    "crates/fumehood/tests/cli",
    "crates/fumehood/tests/storm",
    "crates/sandbox/tests/promises",
    "crates/store/tests/store",
];

/// The functions that a file registers as trials. The text has neither comments nor literals.
fn registered(code: &str) -> Vec<String> {
    let calls = ["trial!(", "on_both!("];
    let starts = |at: usize| code[..at].is_empty() || code[..at].ends_with('\n');
    let mut names = Vec::new();
    for call in calls {
        for (at, _) in code.match_indices(call).filter(|(at, _)| starts(*at)) {
            let (arguments, _) = code[at + call.len()..].split_once(')').unwrap();
            let mut words = arguments.split(',').map(str::trim);
            // The first argument of `trial!` is who runs it.
            let name = if call == "trial!(" {
                words.nth(1)
            } else {
                words.next()
            };
            names.push(name.unwrap().to_owned());
        }
    }
    names
}

/// What is wrong with the trials of one file.
fn faults(file: &str, text: &str) -> Vec<String> {
    let code = code(text);
    let mut faults = Vec::new();
    let mut seen = BTreeSet::new();
    for name in registered(&code) {
        if !code.contains(&format!("fn {name}(")) {
            faults.push(format!("{file}: {name} is registered and not there"));
        }
        if !seen.insert(name.clone()) {
            faults.push(format!("{file}: {name} is registered twice"));
        }
    }
    // A test of libtest would be compiled and never run.
    if code.contains("#[test]") {
        faults.push(format!("{file}: #[test] in a program without libtest"));
    }
    faults
}

#[test]
fn every_trial_file_is_part_of_its_program() {
    for dir in PROGRAMS {
        let main = code(&read(&format!("{dir}/main.rs")));
        let mut with_trials = 0;
        for (name, text) in sources() {
            let below = name.strip_prefix(&format!("{dir}/"));
            let Some(module) = below.and_then(|n| n.strip_suffix(".rs")) else {
                continue;
            };
            if module == "main" {
                continue;
            }
            assert!(
                main.contains(&format!("mod {module};")),
                "{name} is not part of {dir}/main.rs"
            );
            crate::sources::none(faults(&name, &text), "trials");
            with_trials += usize::from(!registered(&code(&text)).is_empty());
        }
        assert!(
            with_trials > 5,
            "{dir}: only {with_trials} files with trials"
        );
    }
}

#[test]
fn faults_of_trials_are_found() {
    let good = "trial!(Root, a);\nfn a() {}\ntrial!(\n    Everyone,\n    b,\n    only_at_full = \"\"\n);\nfn b() {}";
    assert_eq!(faults("good", good), [] as [String; 0]);
    assert_eq!(registered(&code(good)), ["a", "b"]);
    for bad in [
        "trial!(Root, a);\nfn a() {}\ntrial!(Root, a);",
        "trial!(Root, gone);\nfn other() {}",
        "on_both!(gone);",
        "#[test]\nfn a() {}",
    ] {
        assert_eq!(faults("bad", bad).len(), 1, "{bad}");
    }
}
