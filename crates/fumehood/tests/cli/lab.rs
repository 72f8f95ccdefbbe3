//! One trial's surroundings: a project, a home and a workspace root of its own, and the binary in them.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::plain_user;

/// The bound of every wait. Nothing here takes long; a broken promise must not hang the tests.
pub const AT_MOST: Duration = Duration::from_secs(120);

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Waits until `holds`, by looking again and again.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let give_up = Instant::now() + AT_MOST;
    while !holds() {
        assert!(Instant::now() < give_up, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub struct Lab {
    /// Removed when the trial ends.
    dir: TempDir,
    pub project: PathBuf,
    /// FUMEHOOD_HOME.
    pub home: PathBuf,
    /// The workspace root.
    pub root: PathBuf,
    /// The caller's own home directory.
    pub person: PathBuf,
}

impl Lab {
    pub fn new() -> Lab {
        let dir = tempfile::Builder::new()
            .prefix("fumehood-lab-")
            .tempdir_in(ground())
            .unwrap();
        let make = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        Lab {
            project: make("project"),
            home: dir.path().join("home"),
            root: make("work"),
            person: make("person"),
            dir,
        }
    }

    /// A path beside the project, not made.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file below the lab, with its directories; gives its path.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    /// As [`Lab::write`], executable.
    pub fn write_program(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.write(name, content);
        set_mode(&path, 0o755);
        path
    }

    /// `fumehood`, with nothing of this process's environment.
    pub fn fumehood(&self) -> Command {
        self.with_surroundings(Command::new(plain_user::binary()))
    }

    pub fn with_surroundings(&self, mut command: Command) -> Command {
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .env("HOME", &self.person)
            .env("FUMEHOOD_HOME", &self.home)
            .env("FUMEHOOD_WORKSPACE_ROOT", &self.root)
            .current_dir(&self.project)
            .stdin(Stdio::null());
        command
    }

    /// `fumehood run ARGS`.
    pub fn run_command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.fumehood();
        command.arg("run").args(args);
        command
    }

    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Ended {
        finish(self.run_command(args))
    }

    /// Runs a shell script inside, after the options.
    pub fn sh(&self, options: &[&str], script: &str) -> Ended {
        self.run(options.iter().copied().chain(["--", "sh", "-c", script]))
    }

    pub fn python(&self, options: &[&str], script: &str) -> Ended {
        let python = ["--", "/usr/bin/python3", "-c", script];
        self.run(options.iter().copied().chain(python))
    }

    /// As [`Lab::sh`] with `--json`: the document, whatever the end.
    pub fn sh_json(&self, options: &[&str], script: &str) -> Value {
        let options: Vec<&str> = ["--json"].iter().chain(options).copied().collect();
        self.sh(&options, script).document()
    }

    pub fn start<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Live {
        Live::start(self.run_command(args))
    }

    pub fn gc(&self, args: &[&str]) -> Ended {
        let mut command = self.fumehood();
        command.arg("gc").args(args);
        finish(command)
    }

    /// `fumehood ARGS`, to its end.
    pub fn ask<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Ended {
        let mut command = self.fumehood();
        command.args(args);
        finish(command)
    }

    /// As [`Lab::ask`], good, and its one JSON document.
    #[track_caller]
    pub fn ask_json<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Value {
        let ended = self.ask(args);
        ended.good();
        ended.document()
    }

    /// What another program reads in the SQLite database: rows of values, bytes in hex.
    #[track_caller]
    pub fn sql(&self, query: &str) -> Vec<Vec<Value>> {
        let script = "import json, sqlite3, sys
db = sqlite3.connect('file:' + sys.argv[1] + '?mode=ro', uri=True)
plain = lambda v: v.hex() if isinstance(v, bytes) else v
print(json.dumps([[plain(v) for v in row] for row in db.execute(sys.argv[2])]))";
        let asked = Command::new("/usr/bin/python3")
            .args(["-c", script])
            .arg(self.home.join("fumehood.db"))
            .arg(query)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&asked.stderr);
        assert!(asked.status.success(), "{query}: {said}");
        serde_json::from_slice(&asked.stdout).unwrap()
    }

    /// The one value of the one row.
    #[track_caller]
    pub fn sql_one(&self, query: &str) -> Value {
        let mut rows = self.sql(query);
        assert_eq!(rows.len(), 1, "{query}: {rows:?}");
        rows.remove(0).remove(0)
    }

    /// Where the artifact store keeps some content.
    pub fn object(&self, hash: &str) -> PathBuf {
        let (first, rest) = hash.split_at(2);
        self.home.join("artifacts/objects").join(first).join(rest)
    }

    /// Names in the workspace root.
    pub fn workspaces(&self) -> Vec<OsString> {
        names_in(&self.root)
    }

    pub fn workspace(&self, id: &str) -> PathBuf {
        self.root.join(format!("scidex-analysis-{id}"))
    }

    /// Neither a workspace, a draft of one, nor a run directory is left.
    pub fn assert_nothing_left(&self) {
        assert_eq!(self.workspaces(), Vec::<OsString>::new(), "workspaces");
        let runs = names_in(&self.home.join("runs"));
        assert_eq!(runs, Vec::<OsString>::new(), "run directories");
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // A trial that failed half-way leaves cgroups behind, and the records that name them go with the lab.
        if std::thread::panicking() {
            let mut command = self.fumehood();
            let _told_by_the_failure = command.args(["gc", "--kept"]).output();
        }
    }
}

/// Where labs are made. Not below /tmp or /var/tmp, which inside are the analysis's own, so that a path of the
/// lab's that is seen inside was really shown.
fn ground() -> PathBuf {
    match is_root() {
        true => PathBuf::from("/srv"),
        false => PathBuf::from(std::env::var_os("HOME").unwrap()),
    }
}

pub fn names_in(dir: &Path) -> Vec<OsString> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|e| e.file_name()).collect()
}

pub fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// An id that no other trial, test process or user has.
pub fn fresh_id(stem: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{stem}-{}-{count}", std::process::id())
}

/// How a command ended, and what it printed.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl Ended {
    /// The exit code; a death by signal is never what a trial expects of Fumehood.
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

    /// Ended well; gives what it printed.
    #[track_caller]
    pub fn good(&self) -> String {
        assert_eq!(self.code(), 0, "{}\n{}", self.out(), self.err());
        self.out()
    }

    /// Ended with this code and said this on stderr.
    #[track_caller]
    pub fn refused(&self, code: i32, said: &str) {
        assert_eq!(self.code(), code, "{}\n{}", self.out(), self.err());
        assert!(self.err().contains(said), "no {said:?} in: {}", self.err());
    }

    /// stdout as exactly one JSON document on one line.
    #[track_caller]
    pub fn document(&self) -> Value {
        let out = self.out();
        assert_eq!(out.matches('\n').count(), 1, "{out}\n{}", self.err());
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
    }
}

/// Runs to the end, within the bound.
pub fn finish(command: Command) -> Ended {
    Live::start(command).end()
}

/// A command that runs while the trial looks on.
pub struct Live {
    pub child: Child,
    out: BufReader<ChildStdout>,
    err: Option<JoinHandle<Vec<u8>>>,
    seen: Vec<u8>,
    ended: bool,
}

impl Live {
    pub fn start(mut command: Command) -> Live {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let out = BufReader::new(child.stdout.take().unwrap());
        let err = read_aside(child.stderr.take().unwrap());
        Live {
            child,
            out,
            err: Some(err),
            seen: Vec::new(),
            ended: false,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for a line of stdout that is `line`. A program that ends first ends the wait.
    #[track_caller]
    pub fn wait_for(&mut self, line: &str) {
        self.wait_for_any(&[line]);
    }

    /// Waits for a line of stdout that is one of these.
    #[track_caller]
    pub fn wait_for_any(&mut self, lines: &[&str]) {
        loop {
            let from = self.seen.len();
            let got = self.out.read_until(b'\n', &mut self.seen).unwrap();
            if got == 0 {
                let end = self.finish();
                panic!("ended ({}) before {lines:?}: {}", end.status, end.err());
            }
            let got = self.seen[from..].trim_ascii_end();
            if lines.iter().any(|line| got == line.as_bytes()) {
                return;
            }
        }
    }

    /// Writes to its standard input, which must be a pipe.
    pub fn say(&mut self, text: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(text.as_bytes()).unwrap();
    }

    pub fn end(mut self) -> Ended {
        self.finish()
    }

    fn finish(&mut self) -> Ended {
        let mut out = std::mem::take(&mut self.seen);
        let watchdog = Watchdog::over(self.child.id());
        self.out.read_to_end(&mut out).unwrap();
        let err = self.err.take().unwrap().join().unwrap();
        let status = self.child.wait().unwrap();
        self.ended = true;
        watchdog.dismiss();
        Ended {
            status,
            stdout: out,
            stderr: err,
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // Only when the trial failed half-way: its runner must not outlive it.
        if !self.ended {
            let _gone = self.child.kill();
            let _gone = self.child.wait();
        }
    }
}

fn read_aside(mut from: ChildStderr) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// Kills a command that outstays the bound, so that the trial fails instead of hanging.
struct Watchdog {
    done: std::sync::mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Watchdog {
    fn over(pid: u32) -> Watchdog {
        let (done, waiting) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            if waiting.recv_timeout(AT_MOST).is_err() {
                let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
                let _gone = kill_process(pid, Signal::KILL);
            }
        });
        Watchdog { done, thread }
    }

    fn dismiss(self) {
        let _fired = self.done.send(());
        self.thread.join().unwrap();
    }
}

/// Processes anywhere on the host with `word` among their arguments.
pub fn processes_with(word: &str) -> Vec<u32> {
    let is_word = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).any(|arg| arg == word.as_bytes())
    };
    let own = std::process::id();
    all_pids().filter(|p| *p != own).filter(is_word).collect()
}

pub fn all_pids() -> impl Iterator<Item = u32> {
    names_in(Path::new("/proc"))
        .into_iter()
        .filter_map(|name| name.to_str()?.parse().ok())
}

/// A number from /proc/PID/status.
pub fn status_number(pid: u32, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    line.trim_start_matches(':')
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// cgroups of ours, of whatever hierarchy, that bear an analysis's id.
pub fn cgroups_of(id: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut todo = vec![(PathBuf::from("/sys/fs/cgroup"), 0)];
    let stem = format!("fumehood-{id}");
    while let Some((dir, depth)) = todo.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|t| t.is_dir()) {
                continue;
            }
            if entry.file_name().to_string_lossy().starts_with(&stem) {
                found.push(entry.path());
            } else if depth < 5 {
                todo.push((entry.path(), depth + 1));
            }
        }
    }
    found
}
