//! P6 for the processes that stand around the program: the launcher is forked from the runner, so what the runner was
//! started with is looked for in the memory of every process of the run.

use std::io::{Read, Seek, SeekFrom};

use crate::ending::below;
use crate::lab::{Lab, Live, fresh_id};
use crate::{Entry, For};

pub const TRIALS: &[Entry] = &[
    (
        "nothing_the_runner_was_started_with_is_inside",
        For::Root,
        || beginnings(&[]),
    ),
    ("nor_at_level_landlock", For::Root, || {
        beginnings(&["--level", "landlock"])
    }),
    (
        "a_launcher_that_is_not_needed_is_gone",
        For::Everyone,
        not_needed,
    ),
];

fn beginnings(level: &[&str]) {
    let lab = Lab::new();
    // Taken apart here, so that this process's own strings are no match.
    let (in_environment, in_arguments) =
        (fresh_id("variable"), fresh_id("ARGUMENT").replace('-', "_"));
    let options = ["--db", "none", "--secret-env", &in_arguments];
    let program = ["--", "sh", "-c", "echo up; sleep 600"];
    let all = options.iter().chain(level).chain(&program);
    let mut command = lab.run_command(all);
    command.env("OF_THE_CALLER", &in_environment);
    let mut live = Live::start(command);
    live.wait_for("up");
    let runner = live.pid();
    for secret in [&in_environment, &in_arguments] {
        assert!(has_in_memory(runner, secret), "the control: {secret}");
    }
    let inside = below(runner);
    assert!(inside.len() >= 2, "{inside:?}");
    for pid in inside {
        for secret in [&in_environment, &in_arguments] {
            assert!(!has_in_memory(pid, secret), "{pid} has {secret}");
        }
        for file in ["environ", "cmdline"] {
            let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes);
            assert!(!text.contains(&in_environment) && !text.contains(&in_arguments));
        }
    }
    live.signal(rustix::process::Signal::TERM);
    live.end();
}

/// Whether any memory that the process may read holds these bytes.
fn has_in_memory(pid: u32, what: &str) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let readable = maps.lines().filter(|line| {
        let mut fields = line.split_ascii_whitespace();
        fields.nth(1).is_some_and(|rights| rights.starts_with('r')) && !line.contains("[v")
    });
    let mut found = false;
    for line in readable {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let number = |hex| u64::from_str_radix(hex, 16).unwrap();
        let mut bytes = vec![0; (number(to) - number(from)) as usize];
        memory.seek(SeekFrom::Start(number(from))).unwrap();
        if memory.read_exact(&mut bytes).is_ok() {
            found |= bytes.windows(what.len()).any(|w| w == what.as_bytes());
        }
    }
    found
}

/// A command that turns out to run nothing leaves no process, and a level that needs another launcher gets one.
fn not_needed() {
    let lab = Lab::new();
    lab.run(["--memory", "nonsense", "--", "true"])
        .refused(125, "nonsense");
    lab.run(["--help"]).good();
    lab.run(["--level", "landlock", "--", "true"]).good();
    lab.run(["--", "true"]).good();
    let binary = crate::plain_user::binary();
    let ours = |pid: &u32| {
        let exe = std::fs::read_link(format!("/proc/{pid}/exe"));
        exe.is_ok_and(|exe| exe == binary)
            && std::fs::read_link(format!("/proc/{pid}/cwd"))
                .is_ok_and(|cwd| cwd == lab.project || cwd == std::path::Path::new("/"))
            && std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.is_empty())
    };
    let mine = below(std::process::id());
    assert_eq!(mine.iter().filter(|pid| ours(pid)).count(), 0);
}
