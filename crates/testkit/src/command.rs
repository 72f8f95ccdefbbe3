//! Commands that a trial starts, each with a time limit.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::wait::WAIT_MAX;

/// How a command ended, and what it printed.
#[derive(Debug)]
pub struct FinishedCommand {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl FinishedCommand {
    /// The exit code. Panics if a signal killed the command, which no trial expects of Fumehood.
    #[track_caller]
    pub fn code(&self) -> i32 {
        assert_eq!(self.status.signal(), None, "killed: {}", self.err());
        self.status.code().unwrap()
    }

    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// Asserts exit code 0, and returns the standard output.
    #[track_caller]
    pub fn good(&self) -> String {
        assert_eq!(self.code(), 0, "{}\n{}", self.out(), self.err());
        self.out()
    }

    /// Asserts an exit code, and that the standard error contains a text.
    #[track_caller]
    pub fn refused(&self, code: i32, said: &str) {
        assert_eq!(self.code(), code, "{}\n{}", self.out(), self.err());
        assert!(self.err().contains(said), "no {said:?} in: {}", self.err());
    }

    /// The standard output, which must be one JSON document on one line.
    #[track_caller]
    pub fn document(&self) -> Value {
        let out = self.out();
        assert_eq!(out.matches('\n').count(), 1, "{out}\n{}", self.err());
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
    }
}

/// Runs a command to its end, and kills it after [`WAIT_MAX`].
pub fn finish(command: Command) -> FinishedCommand {
    RunningCommand::start(command).finish()
}

/// A command that runs while the trial does other things.
pub struct RunningCommand {
    pub child: Child,
    out: BufReader<ChildStdout>,
    err: Option<JoinHandle<Vec<u8>>>,
    /// The standard output that was read so far.
    seen: Vec<u8>,
    has_ended: bool,
}

impl RunningCommand {
    pub fn start(mut command: Command) -> RunningCommand {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let out = BufReader::new(child.stdout.take().unwrap());
        let err = read_in_thread(child.stderr.take().unwrap());
        RunningCommand {
            child,
            out,
            err: Some(err),
            seen: Vec::new(),
            has_ended: false,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits until the command prints this line. Panics if the command ends first.
    #[track_caller]
    pub fn wait_for(&mut self, line: &str) {
        self.wait_for_any(&[line]);
    }

    /// Waits until the command prints one of these lines. Panics if the command ends first.
    #[track_caller]
    pub fn wait_for_any(&mut self, lines: &[&str]) {
        loop {
            let from = self.seen.len();
            let got = self.out.read_until(b'\n', &mut self.seen).unwrap();
            if got == 0 {
                let end = self.wait_for_end();
                panic!("ended ({}) before {lines:?}: {}", end.status, end.err());
            }
            let got = self.seen[from..].trim_ascii_end();
            if lines.iter().any(|line| got == line.as_bytes()) {
                return;
            }
        }
    }

    /// Writes to the standard input of the command, which must be a pipe.
    pub fn write(&mut self, text: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(text.as_bytes()).unwrap();
    }

    /// Waits for the end of the command, and kills the command after [`WAIT_MAX`].
    pub fn finish(mut self) -> FinishedCommand {
        self.wait_for_end()
    }

    fn wait_for_end(&mut self) -> FinishedCommand {
        let mut out = std::mem::take(&mut self.seen);
        let watchdog = Watchdog::over(self.child.id());
        self.out.read_to_end(&mut out).unwrap();
        let err = self.err.take().unwrap().join().unwrap();
        let status = self.child.wait().unwrap();
        self.has_ended = true;
        watchdog.dismiss();
        FinishedCommand {
            status,
            stdout: out,
            stderr: err,
        }
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // Only a trial that failed half-way leaves its command running.
        if !self.has_ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn read_in_thread(mut from: ChildStderr) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// Kills a command after [`WAIT_MAX`], so that the trial fails instead of hanging.
struct Watchdog {
    done: std::sync::mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Watchdog {
    fn over(pid: u32) -> Watchdog {
        let (done, waiting) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            if waiting.recv_timeout(WAIT_MAX).is_err() {
                let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
                let _ = kill_process(pid, Signal::KILL);
            }
        });
        Watchdog { done, thread }
    }

    fn dismiss(self) {
        // The send fails if the watchdog has fired.
        let _ = self.done.send(());
        self.thread.join().unwrap();
    }
}
