//! How Fumehood passes on a program's output: completely if the stream is redirected, and escaped and bounded if it is
//! a terminal. Passing on output never delays a deadline.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::OpenptFlags;
use testkit::command::{FinishedCommand, finish};
use testkit::home::TestHome;
use testkit::program;
use testkit::trial;
use testkit::wait::eventually;

/// Runs a command line with a pseudo-terminal as its standard streams, as far as the line does not redirect them.
fn on_terminal(test_home: &TestHome, line: &str) -> FinishedCommand {
    let line = line.replace("fumehood", program::binary().to_str().unwrap());
    let mut command = test_home.with_environment(Command::new("script"));
    command.args(["-q", "-e", "-c", &line, "/dev/null"]);
    command.current_dir(&test_home.project);
    finish(command)
}

/// Sequences that may pass. `EVIL` may not: it sets the title, queries the terminal, sets the clipboard, moves the cursor, and
/// has C1 controls in both forms and bidirectional overrides.
const GOOD: &str = "\x1b[1;31mred\x1b[0m \x1b[38:2::1:2:3mrgb\x1b[m\r 10%\x1b[K\x08\tdone";
const EVIL: &[&[u8]] = &[
    b"\x1b]0;title\x07",
    b"\x1b]52;c;cm0=\x1b\\",
    b"\x1bP$q\x1b\\",
    b"\x1b_apc\x1b\\",
    b"\x1b^pm\x1b\\",
    b"\x1bXsos\x1b\\",
    b"\x1b[6n",
    b"\x1b[2J",
    b"\x1b[1;1H",
    b"\x1b[?1049h",
    b"\x1bc",
    b"\x9b2J",
    b"\xc2\x9b2J",
    b"\xc2\x9d0;t",
    b"\xe2\x80\xae",
    b"\xe2\x81\xa6",
    b"\xd8\x9c",
    b"\x07\x0e\x7f\xff",
];

/// Writes a script that prints `GOOD` and `EVIL`, one byte at a time, to a descriptor.
fn print_script(test_home: &TestHome) -> Vec<u8> {
    let mut all = format!("<{GOOD}>\n").into_bytes();
    all.extend(EVIL.concat());
    all.extend(b"\n");
    let list: String = all.iter().fold(String::new(), |mut text, b| {
        let _ = write!(text, "{b},");
        text
    });
    let script =
        format!("import os, sys\nfor b in [{list}]: os.write(int(sys.argv[1]), bytes([b]))\n");
    test_home.write("project/print.py", script);
    all
}

/// Asserts that `GOOD` is unchanged, and that only plain text of `EVIL` is shown.
#[track_caller]
fn assert_safe(shown: &[u8]) {
    // The terminal turns a line feed into CR LF.
    let text = String::from_utf8(shown.to_vec())
        .unwrap()
        .replace("\r\n", "\n");
    let (before, rest) = text.split_once(GOOD).unwrap_or_else(|| panic!("{text:?}"));
    let rest = rest.split("fumehood: ").next().unwrap();
    for part in [before, rest] {
        let bad = part.find(|c: char| c.is_control() && c != '\n');
        assert_eq!(bad, None, "{text:?}");
        assert!(
            !part.contains(['\u{202e}', '\u{2066}', '\u{61c}']),
            "{text:?}"
        );
    }
    for spelled in [
        "\\x1b]0;title\\x07",
        "\\x1b[6n",
        "\\x9b2J",
        "\\u{9b}2J",
        "\\u{202e}",
        "\\xff",
    ] {
        assert!(rest.contains(spelled), "{spelled}: {text:?}");
    }
}

trial!(Everyone, a_terminal_gets_colours_and_no_other_sequence);
fn a_terminal_gets_colours_and_no_other_sequence() {
    let test_home = TestHome::new();
    let all = print_script(&test_home);
    for fd in [1, 2] {
        let shown = on_terminal(
            &test_home,
            &format!("fumehood run --id t{fd} -q print.py {fd}"),
        );
        assert_eq!(shown.code(), 0);
        assert_safe(&shown.stdout);
        // `fumehood logs` shows the recorded output just as safely.
        let stream = ["--stdout", "--stderr"][fd - 1];
        assert_safe(&on_terminal(&test_home, &format!("fumehood logs t{fd} {stream}")).stdout);
        // Control: with --raw everything passes.
        let raw = on_terminal(&test_home, &format!("fumehood run --raw -q print.py {fd}"));
        for evil in EVIL {
            assert!(
                raw.stdout.windows(evil.len()).any(|w| w == *evil),
                "{evil:?}"
            );
        }
    }
    let piped = test_home.run(["-q", "print.py", "1"]);
    assert_eq!(piped.stdout, all, "a pipe gets the bytes as they are");
}

trial!(Everyone, stdout_and_stderr_are_decided_separately);
fn stdout_and_stderr_are_decided_separately() {
    let test_home = TestHome::new();
    let all = print_script(&test_home);
    let both = "sh -c 'python3 print.py 1; python3 print.py 2'";
    let line = format!("fumehood run -q --input print.py -- {both}");
    let shown = on_terminal(&test_home, &format!("{line} 2> err"));
    assert_safe(&shown.stdout);
    assert_eq!(std::fs::read(test_home.path("project/err")).unwrap(), all);
    let shown = on_terminal(&test_home, &format!("{line} > out"));
    assert_safe(&shown.stdout);
    assert_eq!(std::fs::read(test_home.path("project/out")).unwrap(), all);
}

trial!(Everyone, colours_end_with_the_program);
fn colours_end_with_the_program() {
    let test_home = TestHome::new();
    let line = "fumehood run -- printf '\\033[31mred \\033[1'";
    let shown = String::from_utf8(on_terminal(&test_home, line).stdout).unwrap();
    assert!(
        shown.contains("\x1b[31mred \\x1b\\x5b\\x31\x1b[0m"),
        "a sequence that is never completed is spelled out, and the colour set back: {shown:?}"
    );
    let (_, ours) = shown.split_once("\x1b[0m").unwrap();
    assert!(ours.contains("fumehood: "), "{shown:?}");
}

trial!(Everyone, a_document_on_a_terminal_has_no_control_characters);
fn a_document_on_a_terminal_has_no_control_characters() {
    let test_home = TestHome::new();
    let line = "fumehood run --json -- printf 'a\\302\\233b\\177\\342\\200\\256'";
    let shown = String::from_utf8(on_terminal(&test_home, line).stdout).unwrap();
    assert!(
        !shown.trim_end().contains(|c: char| c.is_control()),
        "{shown:?}"
    );
    let document: serde_json::Value = serde_json::from_str(shown.trim_end()).unwrap();
    assert_eq!(document["stdout"]["text"], "a\u{9b}b\u{7f}\u{202e}");
}

const LINES: usize = 200_000;

fn lines(prefix: &str) -> String {
    (0..LINES).map(|n| format!("{prefix} {n}\n")).collect()
}

trial!(Everyone, redirected_output_is_whole);
fn redirected_output_is_whole() {
    let test_home = TestHome::new();
    let script = format!(
        "import sys\nfor n in range({LINES}):\n  print('out', n)\n  print('err', n, file=sys.stderr)"
    );
    let ended = test_home.python(&["--id", "w", "--log-limit", "64K", "-q"], &script);
    assert!(
        ended.stdout == lines("out").as_bytes(),
        "{} bytes",
        ended.stdout.len()
    );
    assert!(
        ended.stderr == lines("err").as_bytes(),
        "{} bytes",
        ended.stderr.len()
    );
    // The kept log is still bounded, and reports how much is missing.
    let log = test_home.ask(["logs", "w"]).good();
    assert!(
        log.len() < 66 << 10 && log.contains("bytes of stdout not shown]"),
        "{}",
        log.len()
    );
    let logs = test_home.ask_json(["logs", "w", "--json"]);
    let kept = &logs["logs"][0];
    assert_eq!(kept["bytes"], lines("out").len());
    let dropped = kept["dropped_bytes"].as_u64().unwrap() as usize;
    assert_eq!(dropped, lines("out").len() - (64 << 10));
    // A file as stdout also gets everything.
    test_home.write(
        "project/long.py",
        format!("for n in range({LINES}): print('out', n)"),
    );
    let mut command = test_home.run_command(["--log-limit", "64K", "-q", "long.py"]);
    let file = std::fs::File::create(test_home.path("out.txt")).unwrap();
    assert!(command.stdout(file).status().unwrap().success());
    assert!(std::fs::read_to_string(test_home.path("out.txt")).unwrap() == lines("out"));
    test_home.assert_nothing_left();
}

trial!(
    Everyone,
    a_terminal_shows_a_note_for_the_middle_of_a_long_output
);
fn a_terminal_shows_a_note_for_the_middle_of_a_long_output() {
    let test_home = TestHome::new();
    test_home.write("project/long.py", "for n in range(5000): print('line', n)");
    let shown = on_terminal(&test_home, "fumehood run -q --log-limit 4K long.py");
    let text = String::from_utf8(shown.stdout)
        .unwrap()
        .replace("\r\n", "\n");
    assert!(text.starts_with("line 0\nline 1\n"), "{text}");
    let at = |what: &str| {
        text.find(what)
            .unwrap_or_else(|| panic!("no {what}: {text}"))
    };
    let told = at("[fumehood: stdout is longer than");
    assert!(told < at(" bytes of stdout not shown]\n"), "{text}");
    assert!(text.ends_with("line 4998\nline 4999\n"), "{text}");
    assert!(text.len() < 5000, "{}", text.len());
}

/// Starts a run with a pipe for stdout and another for stderr, which nobody reads yet.
fn start_with_unread_pipes(
    test_home: &TestHome,
    args: &[&str],
) -> (Child, std::io::PipeReader, std::io::PipeReader) {
    let (out, out_write) = std::io::pipe().unwrap();
    let (err, err_write) = std::io::pipe().unwrap();
    let mut command = test_home.run_command(args);
    command.stdout(out_write).stderr(err_write);
    (command.spawn().unwrap(), out, err)
}

fn text_of(mut from: std::io::PipeReader) -> String {
    let mut text = String::new();
    from.read_to_string(&mut text).unwrap();
    text
}

fn wait_unread(child: &mut Child) -> Option<i32> {
    eventually("the run ends", || child.try_wait().unwrap().is_some());
    child.wait().unwrap().code()
}

trial!(
    Everyone,
    the_runner_waits_until_the_remaining_output_is_read
);
fn the_runner_waits_until_the_remaining_output_is_read() {
    let test_home = TestHome::new();
    // The program prints more than the pipe to the trial holds, and less than both pipes and the runner's buffer hold
    // together.
    let script = "head -c 100000 /dev/zero | tr '\\0' x; exit 5";
    let (mut child, out, err) =
        start_with_unread_pipes(&test_home, &["--id", "rest", "--", "sh", "-c", script]);
    eventually("it is recorded", || {
        test_home.ask(["show", "rest"]).out().contains("(exit 5)")
    });
    // The runner commits the record before it removes the workspace.
    eventually("the workspace is removed", || {
        !test_home.workspace("rest").exists()
    });
    assert_eq!(child.try_wait().unwrap(), None, "the reader is waited for");
    assert_eq!(text_of(out), "x".repeat(100_000));
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert!(text_of(err).contains("exit code 5"));
}

const ENDLESS: &str = "while :; do echo a line that nobody reads; done";

trial!(Everyone, unread_output_does_not_delay_the_deadline);
fn unread_output_does_not_delay_the_deadline() {
    let test_home = TestHome::new();
    let args = [
        "--timeout",
        "500ms",
        "--grace",
        "0",
        "--",
        "sh",
        "-c",
        ENDLESS,
    ];
    let (mut child, out, err) = start_with_unread_pipes(&test_home, &args);
    assert_eq!(wait_unread(&mut child), Some(124));
    let said = text_of(err);
    assert!(said.contains("nobody read stdout in time"), "{said}");
    assert!(said.contains("timed out"), "{said}");
    drop(out);
    // An unread stderr does not delay the end either. Fumehood then cannot print its messages.
    let script = format!("exec >&2; {ENDLESS}");
    let args = [
        "--timeout",
        "500ms",
        "--grace",
        "0",
        "--",
        "sh",
        "-c",
        &script,
    ];
    let (mut child, out, err) = start_with_unread_pipes(&test_home, &args);
    assert_eq!(wait_unread(&mut child), Some(124));
    drop((out, err));
    test_home.assert_nothing_left();
}

trial!(Everyone, an_unread_terminal_does_not_delay_the_end);
/// Both streams are one terminal. When it accepts no output of the program, it accepts no message of Fumehood either.
fn an_unread_terminal_does_not_delay_the_end() {
    let test_home = TestHome::new();
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags).unwrap();
    rustix::pty::grantpt(&master).unwrap();
    rustix::pty::unlockpt(&master).unwrap();
    let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
    let name = Path::new(OsStr::from_bytes(name.as_bytes()));
    let side = File::options().write(true).open(name).unwrap();
    let args = ["--timeout", "500ms", "--grace", "0", "--"];
    let mut command = test_home.run_command(args.iter().chain(&["sh", "-c", ENDLESS]));
    command.stdout(side.try_clone().unwrap()).stderr(side);
    let mut child = command.spawn().unwrap();
    assert_eq!(wait_unread(&mut child), Some(124));
    test_home.assert_nothing_left();
}

/// Whether a pipe is full. The number of bytes does not show it, because pages of the pipe may be half empty.
fn is_full(pipe: &std::io::PipeReader) -> bool {
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    let write_end = std::fs::File::options().write(true).open(path).unwrap();
    let mut fds = [PollFd::new(&write_end, PollFlags::OUT)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 0
}

trial!(Everyone, unread_output_does_not_delay_a_cancel);
fn unread_output_does_not_delay_a_cancel() {
    let test_home = TestHome::new();
    let (mut child, out, err) = start_with_unread_pipes(&test_home, &["--", "sh", "-c", ENDLESS]);
    eventually("the pipe is full", || is_full(&out));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(wait_unread(&mut child), Some(123));
    assert!(text_of(err).contains("cancelled"));
    test_home.assert_nothing_left();
}

trial!(Everyone, a_program_blocked_by_a_slow_reader_is_not_idle);
fn a_program_blocked_by_a_slow_reader_is_not_idle() {
    let test_home = TestHome::new();
    let script = "head -c 1000000 /dev/zero | tr '\\0' x";
    let args = ["--idle-timeout", "1s", "--", "sh", "-c", script];
    let (mut child, out, _err) = start_with_unread_pipes(&test_home, &args);
    eventually("the pipe is full", || is_full(&out));
    // Control: an idle program is stopped. It also makes the trial wait longer than the first run's idle timeout.
    let idle = test_home.sh(&["--idle-timeout", "2s", "--grace", "0"], "sleep 600");
    assert_eq!(idle.code(), 124, "{}", idle.err());
    assert_eq!(text_of(out).len(), 1_000_000);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

trial!(Everyone, an_unread_stream_does_not_stop_the_other_stream);
fn an_unread_stream_does_not_stop_the_other_stream() {
    let test_home = TestHome::new();
    // A background process fills one stream, which nobody reads. The other stream continues.
    let script = format!("({ENDLESS}) & while :; do echo tick >&2; sleep 0.1; done");
    let args = [
        "--grace",
        "0",
        "--timeout",
        "60s",
        "--",
        "sh",
        "-c",
        &script,
    ];
    let (mut child, out, mut err) = start_with_unread_pipes(&test_home, &args);
    eventually("the pipe is full", || is_full(&out));
    let mut seen = Vec::new();
    while seen.len() < 30 * "tick\n".len() {
        let mut some = [0; 64];
        let n = err.read(&mut some).unwrap();
        assert!(n > 0, "{seen:?}");
        seen.extend_from_slice(&some[..n]);
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(wait_unread(&mut child), Some(123));
}

trial!(Everyone, a_full_disk_behind_stdout_is_reported);
fn a_full_disk_behind_stdout_is_reported() {
    let test_home = TestHome::new();
    let mut command = test_home.run_command(["--", "sh", "-c", "echo out; exit 3"]);
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let ended = command
        .stdout(full)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(3));
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(said.contains("stdout could not be passed on"), "{said}");
    assert!(said.contains("No space left"), "{said}");
}
