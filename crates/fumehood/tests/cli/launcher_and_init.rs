//! P6 for the launcher and init. The launcher is forked from the runner, so the trials search the memory of every process of
//! the run for the runner's arguments and environment.

use std::io::{Read, Seek, SeekFrom};

use testkit::command::{RunningCommand, finish};
use testkit::home::TestHome;
use testkit::program;
use testkit::{fresh_id, trial};

use crate::exit_codes::below;

trial!(
    Root,
    the_program_sees_nothing_of_the_runners_arguments_and_environment
);
fn the_program_sees_nothing_of_the_runners_arguments_and_environment() {
    beginnings(&[]);
}

trial!(
    Root,
    the_program_sees_nothing_of_the_runners_start_at_level_landlock
);
fn the_program_sees_nothing_of_the_runners_start_at_level_landlock() {
    beginnings(&["--level", "landlock"]);
}

fn beginnings(level: &[&str]) {
    let test_home = TestHome::new();
    // An allocator reuses short blocks soon and longer blocks later, so use arguments of many lengths.
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
    let mut command = test_home.run_command(options);
    command.env("OF_THE_CALLER", &in_environment);
    examine(command, secrets);
}

trial!(
    Root,
    the_program_sees_nothing_of_the_runners_loader_variables
);
/// The dynamic loader keeps copies of the variables that configure it.
fn the_program_sees_nothing_of_the_runners_loader_variables() {
    let test_home = TestHome::new();
    let secret = fresh_id("loader");
    let options = ["--db", "none", "--", "sh", "-c", "echo up; sleep 600"];
    let mut command = test_home.run_command(options);
    command.env("LD_LIBRARY_PATH", format!("/nowhere/{secret}"));
    examine(command, [&secret, &secret]);
}

fn examine(command: std::process::Command, secrets: [&String; 2]) {
    let mut live = RunningCommand::start(command);
    live.wait_for("up");
    let runner = live.pid();
    for secret in secrets {
        let has = has_in_memory(runner, secret);
        assert_eq!(has, Some(true), "the control: {secret}");
    }
    let inside = below(runner);
    let mut examined = 0;
    for pid in &inside {
        for secret in secrets {
            let has = has_in_memory(*pid, secret);
            assert_ne!(has, Some(true), "{pid} has {secret}");
            examined += usize::from(has.is_some());
            for file in ["environ", "cmdline"] {
                let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
                assert!(!String::from_utf8_lossy(&bytes).contains(secret), "{file}");
            }
        }
    }
    assert!(examined >= 2 * secrets.len(), "{inside:?}");
    live.signal(rustix::process::Signal::TERM);
    live.finish();
}

trial!(Everyone, the_program_does_not_inherit_the_callers_umask);
/// Under the caller's umask, Fumehood would make files that only their owner can read, and the program has another uid.
fn the_program_does_not_inherit_the_callers_umask() {
    let test_home = TestHome::new();
    let mut command = test_home.with_environment(std::process::Command::new("/bin/sh"));
    let script = "umask 077; exec \"$0\" run --quiet -- stat -c %a / /etc /etc/passwd /dev";
    command.args(["-c", script]).arg(program::binary());
    let shown = finish(command).good();
    assert_eq!(shown, "755\n755\n644\n755\n");
}

/// Whether any readable memory of the process contains these bytes. Returns `None` if the process has ended: an unneeded
/// launcher may be ending.
fn has_in_memory(pid: u32, what: &str) -> Option<bool> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut memory = match std::fs::File::open(format!("/proc/{pid}/mem")) {
        Err(error) if matches!(error.raw_os_error(), Some(2 | 3)) => {
            return None;
        }
        opened => opened.unwrap(),
    };
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
    Some(found)
}

trial!(Everyone, an_unneeded_launcher_exits);
/// A command that runs no program leaves no launcher, and a level that needs another launcher starts one.
fn an_unneeded_launcher_exits() {
    let test_home = TestHome::new();
    test_home
        .run(["--memory", "nonsense", "--", "true"])
        .refused(125, "nonsense");
    test_home.run(["--help"]).good();
    test_home.run(["--level", "landlock", "--", "true"]).good();
    test_home.run(["--", "true"]).good();
    let binary = program::binary();
    let ours = |pid: &u32| {
        let exe = std::fs::read_link(format!("/proc/{pid}/exe"));
        exe.is_ok_and(|exe| exe == binary)
            && std::fs::read_link(format!("/proc/{pid}/cwd"))
                .is_ok_and(|cwd| cwd == test_home.project || cwd == std::path::Path::new("/"))
            && std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.is_empty())
    };
    let mine = below(std::process::id());
    assert_eq!(mine.iter().filter(|pid| ours(pid)).count(), 0);
}

trial!(
    Everyone,
    the_program_cannot_change_inits_threads_whatever_their_ids
);
/// Init has the program's uid, so seccomp protects init's threads from the program by their thread ids. The ids vary:
/// in some runs a process makes a user namespace for the owner of a view, and takes the id that the watch thread has in
/// other runs.
fn the_program_cannot_change_inits_threads_whatever_their_ids() {
    const TRY: &str = "
import os, resource
usable = os.sched_getaffinity(0)
acts = {
    'prlimit': lambda t: resource.prlimit(t, resource.RLIMIT_CPU, (1000, 1000)),
    'affinity': lambda t: os.sched_setaffinity(t, usable),
    'priority': lambda t: os.setpriority(os.PRIO_PROCESS, t, 5),
    'scheduler': lambda t: os.sched_setscheduler(t, os.SCHED_BATCH, os.sched_param(0)),
}
for name, act in acts.items():
    # Without a cgroup the CPUs are fixed, and nobody's can be changed.
    if name != 'affinity':
        act(os.getpid())
threads = sorted(int(t) for t in os.listdir('/proc/1/task'))
print('threads', threads)
for t in threads:
    for name, act in acts.items():
        try:
            act(t)
            print('REACHED', name, t)
        except PermissionError:
            pass
print('tried')
";
    let test_home = TestHome::new();
    let data = test_home.project.join("data");
    std::fs::create_dir_all(&data).unwrap();
    std::fs::write(data.join("a.csv"), "1\n").unwrap();
    let expected = match rustix::process::geteuid().is_root() {
        true => {
            for path in [&data.join("a.csv"), &data] {
                std::os::unix::fs::chown(path, Some(65_534), Some(65_534)).unwrap();
            }
            "threads [1, 4]"
        }
        false => "threads [1, 3]",
    };
    let said = test_home
        .run(["--quiet", "--", "/usr/bin/python3", "-c", TRY])
        .good();
    assert!(said.contains(expected) && said.contains("tried"), "{said}");
    assert!(!said.contains("REACHED"), "{said}");
}

const NO_PROGRAM: &[u8] = b"\x7fELFgarbage";

fn not_executable(at: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(at, NO_PROGRAM).unwrap();
    std::fs::set_permissions(at, std::fs::Permissions::from_mode(0o755)).unwrap();
}

trial!(
    Everyone,
    the_runner_waits_for_inits_death_before_it_returns_the_uid
);
/// Regression: if the program could not be executed, init reported that no process was left, and the runner did not wait for
/// init itself.
fn the_runner_waits_for_inits_death_before_it_returns_the_uid() {
    let test_home = TestHome::new();
    not_executable(&test_home.project.join("bad"));
    for (program, code) in [("true", 0), ("./bad", 126)] {
        let log = test_home.path("strace");
        let mut command = test_home.with_environment(std::process::Command::new("/usr/bin/strace"));
        command.args(["-qq", "-e", "signal=none", "-e", "trace=waitid", "-o"]);
        command.arg(&log).arg(program::binary());
        let ended = finish({
            command.args(["run", "--input", "bad", "--", program]);
            command
        });
        assert_eq!(ended.code(), code, "{}", ended.err());
        let log = std::fs::read_to_string(log).unwrap();
        let seen = log
            .lines()
            .any(|line| line.contains("P_PIDFD") && line.contains("si_code=CLD_EXITED"));
        assert!(seen, "{program}: {log}");
    }
}

trial!(Everyone, a_launch_failure_with_a_long_path_is_reported);
/// Regression: the text of a failure must fit into a message, however long a path becomes when its bytes are escaped.
fn a_launch_failure_with_a_long_path_is_reported() {
    let test_home = TestHome::new();
    let name = "\u{1}".repeat(250);
    let deep = (0..13).fold(std::path::PathBuf::from("deep"), |path, _| path.join(&name));
    std::fs::create_dir_all(test_home.project.join(&deep)).unwrap();
    not_executable(&test_home.project.join(&deep).join("bad"));
    let program = format!("./{}/bad", deep.display());
    let ended = test_home.run(["--input", "deep", "--", &program]);
    assert_eq!(ended.code(), 126, "{}", ended.err());
}
