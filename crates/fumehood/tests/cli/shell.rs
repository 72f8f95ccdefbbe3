//! `fumehood shell` on a real terminal: the same sandbox, on a pseudo-terminal of its own.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::pty::OpenptFlags;
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use testkit::command::finish;
use testkit::home::TestHome;
use testkit::process::processes_with;
use testkit::program;
use testkit::wait::{WAIT_MAX, eventually};
use testkit::{fresh_id, trial};

/// A terminal with a program on it, seen from the side of the person who types.
struct Terminal {
    master: File,
    /// Kept open to read the terminal's settings.
    slave: OwnedFd,
    child: Child,
    screen: Receiver<Vec<u8>>,
    seen: String,
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

impl Terminal {
    /// Starts `program` as the leader of a session whose controlling terminal this is.
    fn start(test_home: &TestHome, program: &[&std::ffi::OsStr]) -> Terminal {
        let master =
            rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
                .unwrap();
        rustix::pty::grantpt(&master).unwrap();
        rustix::pty::unlockpt(&master).unwrap();
        let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
        let flags =
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
        let slave = rustix::fs::open(name, flags, rustix::fs::Mode::empty()).unwrap();
        tcsetwinsize(&master, size(33, 77)).unwrap();
        let mut command = test_home.with_environment(Command::new("setsid"));
        command.arg("--ctty").args(program).env("TERM", "xterm");
        let end = || Stdio::from(slave.try_clone().unwrap());
        let child = command
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .unwrap();
        let mut reader = File::from(master.try_clone().unwrap());
        let (sender, screen) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal {
            master: File::from(master),
            slave,
            child,
            screen,
            seen: String::new(),
        }
    }

    fn shell(test_home: &TestHome, options: &[&str]) -> Terminal {
        let binary = program::binary();
        let mut words = vec![binary.as_os_str(), "shell".as_ref()];
        words.extend(options.iter().map(|o| std::ffi::OsStr::new(*o)));
        Terminal::start(test_home, &words)
    }

    fn type_in(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    /// Waits until `text` appears on the screen after the text of the previous wait.
    #[track_caller]
    fn wait_for(&mut self, text: &str) {
        let give_up = Instant::now() + WAIT_MAX;
        while !self.seen.contains(text) {
            // Check for the exit first, so that output printed just before it is still read.
            let ended = self.child.try_wait().unwrap();
            match self.screen.recv_timeout(Duration::from_millis(100)) {
                Ok(bytes) => self.seen.push_str(&String::from_utf8_lossy(&bytes)),
                Err(_) if ended.is_none() && Instant::now() < give_up => {}
                Err(_) => panic!("no {text:?} on the screen ({ended:?}): {:?}", self.seen),
            }
        }
        let after = self.seen.find(text).unwrap() + text.len();
        self.seen.drain(..after);
    }

    #[track_caller]
    fn exit_code(&mut self) -> Option<i32> {
        eventually("the program ends", || {
            self.child.try_wait().unwrap().is_some()
        });
        self.child.wait().unwrap().code()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

trial!(
    Everyone,
    the_shell_runs_commands_and_passes_the_exit_code_on
);
fn the_shell_runs_commands_and_passes_the_exit_code_on() {
    let test_home = TestHome::new();
    let mut terminal = Terminal::shell(&test_home, &["--id", "sh"]);
    // The terminal echoes the input, so the expected output must differ from the input.
    terminal.type_in("echo answer $((6*7)); pwd\n");
    terminal.wait_for("answer 42");
    terminal.wait_for(test_home.workspace("sh").to_str().unwrap());
    terminal.type_in("tty; test -t 0 && test -t 1 && test -t 2 && echo all$((1+1))\n");
    terminal.wait_for("/dev/pts/");
    terminal.wait_for("all2");
    terminal.type_in("exit 7\n");
    assert_eq!(terminal.exit_code(), Some(7));
    test_home.assert_nothing_left();
}

trial!(Everyone, ctrl_c_stops_the_command_only);
fn ctrl_c_stops_the_command_only() {
    let test_home = TestHome::new();
    let mut terminal = Terminal::shell(&test_home, &[]);
    // The command itself prints `up2`, so it is in the foreground by then. A key that is typed earlier would go to the
    // shell.
    terminal.type_in("sh -c 'echo up$((1+1)); exec sleep 600'\n");
    terminal.wait_for("up2");
    terminal.type_in("\x03");
    terminal.type_in("echo still $((40+2))\n");
    terminal.wait_for("still 42");
    terminal.type_in("exit\n");
    terminal.exit_code();
    test_home.assert_nothing_left();
}

trial!(Everyone, the_window_size_arrives);
fn the_window_size_arrives() {
    let test_home = TestHome::new();
    let mut terminal = Terminal::shell(&test_home, &[]);
    terminal.type_in("stty size; echo done$((1+1))\n");
    terminal.wait_for("33 77");
    terminal.wait_for("done2");
    // The new size reaches the runner by a signal, so the loop waits until the shell has the size. The trial changes
    // the size only while the loop runs: a shell that is about to read a line takes the old size and sets it again
    // (readline's set_winsize), which would undo a change in between.
    terminal.type_in("echo up$((1+1)); until [ \"$(stty size)\" = '44 99' ]; do sleep 0.02; done; echo new$((1+1))\n");
    terminal.wait_for("up2");
    tcsetwinsize(&terminal.master, size(44, 99)).unwrap();
    terminal.wait_for("new2");
    terminal.type_in("exit 0\n");
    assert_eq!(terminal.exit_code(), Some(0));
}

trial!(Everyone, the_shell_sees_the_same_files_as_run);
fn the_shell_sees_the_same_files_as_run() {
    let test_home = TestHome::new();
    test_home.write("project/data/d.txt", "shown\n");
    test_home.write("project/in.txt", "copied\n");
    test_home.write("project/api.py", "hidden\n");
    let mut terminal = Terminal::shell(&test_home, &["--input", "in.txt", "--env", "SEED=7"]);
    let look = format!(
        "cat data/d.txt in.txt; echo seed-$SEED; cat {}/api.py\n",
        test_home.project.display()
    );
    terminal.type_in(&look);
    terminal.wait_for("shown");
    terminal.wait_for("copied");
    terminal.wait_for("seed-7");
    terminal.wait_for("No such file");
    terminal.type_in("exit 0\n");
    assert_eq!(terminal.exit_code(), Some(0));
    test_home.assert_nothing_left();
}

/// Tries twice to type a character with TIOCSTI, which is 0x5412, and prints what became of each try. The kernel ignores
/// the upper 32 bits of the second number.
const FORGE: &str = "import ctypes, platform\n\
    number = {'x86_64': 16, 'aarch64': 29}[platform.machine()]\n\
    libc = ctypes.CDLL(None)\n\
    def forge(code):\n\
    \x20 failed = libc.syscall(ctypes.c_long(number), ctypes.c_long(0), ctypes.c_ulong(code), b'x')\n\
    \x20 return 'refused' if failed else 'typed'\n\
    print('first', forge(0x5412)); print('second', forge(0x100005412))\n";

trial!(Everyone, a_command_cannot_type_into_the_callers_terminal);
fn a_command_cannot_type_into_the_callers_terminal() {
    let test_home = TestHome::new();
    let script = test_home.write("project/forge.py", FORGE);
    let mut terminal = Terminal::shell(&test_home, &["--input", "forge.py"]);
    terminal.type_in("/usr/bin/python3 forge.py\n");
    terminal.wait_for("first refused");
    terminal.wait_for("second refused");
    // The caller's terminal is not visible, neither by its name nor as the controlling terminal.
    terminal.type_in("ls /dev/pts | tr '\\n' ' '; echo end$((1+1))\n");
    terminal.wait_for("end2");
    terminal.type_in("exit 0\n");
    assert_eq!(terminal.exit_code(), Some(0));
    // Control: unconfined, on its own terminal, the kernel accepts TIOCSTI if the host allows it at all.
    let legacy = std::fs::read_to_string("/proc/sys/dev/tty/legacy_tiocsti").unwrap_or_default();
    if legacy.trim() == "1" {
        let mut control = Terminal::start(
            &test_home,
            &["/usr/bin/python3".as_ref(), script.as_os_str()],
        );
        control.wait_for("first typed");
        control.wait_for("second typed");
    }
}

trial!(Everyone, the_shell_needs_a_terminal);
fn the_shell_needs_a_terminal() {
    let test_home = TestHome::new();
    let mut command = test_home.fumehood();
    command.arg("shell");
    finish(command).refused(125, "needs a terminal");
    test_home.assert_nothing_left();
}

trial!(Everyone, the_shell_restores_the_terminal);
fn the_shell_restores_the_terminal() {
    let test_home = TestHome::new();
    let mut terminal = Terminal::shell(&test_home, &[]);
    terminal.type_in("echo up$((1+1))\n");
    terminal.wait_for("up2");
    let during = tcgetattr(&terminal.slave).unwrap();
    assert!(
        !during.local_modes.contains(LocalModes::ICANON),
        "keys go to the sandbox's own terminal"
    );
    terminal.type_in("stty -echo; exit 0\n");
    assert_eq!(terminal.exit_code(), Some(0));
    let after = tcgetattr(&terminal.slave).unwrap();
    assert!(
        after
            .local_modes
            .contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    );
    // Fumehood also restores the terminal's settings after a start that fails.
    let mut terminal = Terminal::shell(&test_home, &["--input", "missing"]);
    assert_eq!(terminal.exit_code(), Some(125));
    terminal.wait_for("missing");
    assert!(
        tcgetattr(&terminal.slave)
            .unwrap()
            .local_modes
            .contains(LocalModes::ICANON)
    );
}

trial!(Everyone, a_hangup_ends_the_shell);
fn a_hangup_ends_the_shell() {
    let test_home = TestHome::new();
    let marker = fresh_id("hangup");
    let mut terminal = Terminal::shell(&test_home, &["--grace", "1s"]);
    terminal.type_in(&format!(
        "echo up$((1+1)); sh -c 'while :; do sleep 1; done' {marker}\n"
    ));
    terminal.wait_for("up2");
    eventually("the command runs", || !processes_with(&marker).is_empty());
    let runner = rustix::process::Pid::from_child(&terminal.child);
    rustix::process::kill_process(runner, rustix::process::Signal::HUP).unwrap();
    assert_eq!(terminal.exit_code(), Some(123));
    assert_eq!(processes_with(&marker), [0u32; 0]);
    test_home.assert_nothing_left();
}
