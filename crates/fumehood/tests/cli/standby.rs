//! P6 for the processes that stand around the program: the launcher is forked from the runner, so what the runner was
//! started with is looked for in the memory of every process of the run.

use std::io::{Read, Seek, SeekFrom};

use crate::ending::below;
use crate::lab::{Lab, Live, finish, fresh_id};
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
    ("nor_what_the_loader_was_set", For::Root, loader_settings),
    (
        "the_callers_umask_is_not_the_programs",
        For::Everyone,
        umask,
    ),
    (
        "a_launcher_that_is_not_needed_is_gone",
        For::Everyone,
        not_needed,
    ),
];

fn beginnings(level: &[&str]) {
    let lab = Lab::new();
    // An allocator reuses what is short at once, and what is longer later: so of all lengths.
    let marker = fresh_id("X").replace('-', "_");
    let arguments: Vec<String> = [20, 60, 104, 136, 300, 2000]
        .map(|length| format!("{marker}_{}", "a".repeat(length)))
        .into();
    let in_environment = fresh_id("variable");
    let secrets = [&in_environment, &marker];
    let mut options = vec!["--db", "none"];
    for argument in &arguments {
        options.extend(["--secret-env", argument]);
    }
    options.extend(level);
    options.extend(["--", "sh", "-c", "echo up; sleep 600"]);
    let mut command = lab.run_command(options);
    command.env("OF_THE_CALLER", &in_environment);
    examine(command, secrets);
}

/// The loader keeps copies of what it is set.
fn loader_settings() {
    let lab = Lab::new();
    let secret = fresh_id("loader");
    let options = ["--db", "none", "--", "sh", "-c", "echo up; sleep 600"];
    let mut command = lab.run_command(options);
    command.env("LD_LIBRARY_PATH", format!("/nowhere/{secret}"));
    examine(command, [&secret, &secret]);
}

fn examine(command: std::process::Command, secrets: [&String; 2]) {
    let mut live = Live::start(command);
    live.wait_for("up");
    let runner = live.pid();
    for secret in secrets {
        assert!(has_in_memory(runner, secret), "the control: {secret}");
    }
    let inside = below(runner);
    assert!(inside.len() >= 2, "{inside:?}");
    for pid in inside {
        for secret in secrets {
            assert!(!has_in_memory(pid, secret), "{pid} has {secret}");
            for file in ["environ", "cmdline"] {
                let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
                assert!(!String::from_utf8_lossy(&bytes).contains(secret), "{file}");
            }
        }
    }
    live.signal(rustix::process::Signal::TERM);
    live.end();
}

/// Files that only their owner may read are of no use to a program that has another uid.
fn umask() {
    let lab = Lab::new();
    let mut command = lab.with_surroundings(std::process::Command::new("/bin/sh"));
    let script = "umask 077; exec \"$0\" run --quiet -- stat -c %a / /etc /etc/passwd /dev";
    command
        .args(["-c", script])
        .arg(crate::plain_user::binary());
    let shown = finish(command).good();
    assert_eq!(shown, "755\n755\n644\n755\n");
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
