//! The testbed: a directory with everything that is attacked, the installed binary, and a copy of it that makes the
//! attacks. Dropping the testbed removes the directory.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use engine::plan::limits::error_chain;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use sandbox::attack::{self, ARGUMENT};
use sandbox::events::{self, PollFlags};
use sandbox::spec::ConfinementLevel;
use serde_json::Value;
use store::types::crash_points::VARIABLE;

use super::AttackOptions;
use super::attack_output::ActResult;
use super::error::{AttackError, OperationContext};

/// The longest time that one process of the battery may take. Normally none comes near it; the bound ends the battery
/// on a host where something hangs.
const PROCESS_TIME_MAX: Duration = Duration::from_secs(90);
/// Directories that have room and allow execution on nearly every host.
const PARENT_DIRS: [&str; 2] = ["/var/tmp", "/tmp"];

pub struct Testbed {
    dir: PathBuf,
    /// Part of every name that the battery makes on the host.
    word: String,
    /// The attacker: a copy of this binary.
    pub binary: PathBuf,
    /// The binary at its installed path. A host may permit things by path, for instance with an AppArmor profile.
    installed: PathBuf,
    level: Option<ConfinementLevel>,
    warn: fn(&str),
}

/// What a process of the battery printed.
pub struct ProcessOutput {
    pub stdout: String,
    pub stderr: String,
}

/// The result of one run of the installed binary.
pub struct ConfinedRun {
    /// What the attacker printed.
    pub stdout: String,
    pub record: Value,
}

impl ConfinedRun {
    /// Parses the document of `fumehood run --json`.
    pub fn read(output: &ProcessOutput) -> Result<ConfinedRun, AttackError> {
        let first = output.stdout.lines().next().unwrap_or_default();
        let record: Value =
            serde_json::from_str(first).map_err(|source| AttackError::NoRunRecord {
                output: format!("{}{}", output.stdout, output.stderr),
                source,
            })?;
        let stdout = record["stdout"]["text"].as_str().unwrap_or_default().into();
        Ok(ConfinedRun { stdout, record })
    }

    pub fn status(&self) -> &str {
        self.record["status"].as_str().unwrap_or("unknown")
    }

    /// Returns why the run did not start, if it did not.
    pub fn why_not_started(&self) -> Option<&str> {
        let why = self.record["message"].as_str();
        let level = &self.record["isolation"]["level"];
        let why = why.unwrap_or("for no reason given");
        level.is_null().then_some(why)
    }

    /// Judges a run that started. A run that did not start tried nothing.
    pub fn judge(&self, started: impl FnOnce() -> ActResult) -> ActResult {
        match self.why_not_started() {
            Some(why) => ActResult::Unable(why.to_owned()),
            None => started(),
        }
    }
}

impl Testbed {
    pub fn make(options: &AttackOptions<'_>) -> Result<Testbed, AttackError> {
        let installed = std::env::current_exe().operation("find our own binary")?;
        let mut failures = Vec::new();
        for parent in PARENT_DIRS {
            match Testbed::make_in(Path::new(parent), &installed, options) {
                Ok(testbed) => return Ok(testbed),
                Err(e) => failures.push(format!("{parent}: {}", error_chain(&e))),
            }
        }
        Err(AttackError::NoDirectory { failures })
    }

    fn make_in(
        parent: &Path,
        installed: &Path,
        options: &AttackOptions<'_>,
    ) -> Result<Testbed, AttackError> {
        let word = random_word()?;
        let dir = parent.join(format!("fumehood-attack-{word}"));
        std::fs::create_dir(&dir).operation_on("make", &dir)?;
        let testbed = Testbed {
            binary: dir.join("runtime/bin/fumehood"),
            dir,
            word,
            installed: installed.to_owned(),
            level: options.level,
            warn: options.warn,
        };
        for name in ["", "runtime", "runtime/bin", "work", "person"] {
            make_dir(&testbed.dir.join(name), 0o755)?;
        }
        std::fs::copy("/proc/self/exe", &testbed.binary).operation("copy our own binary")?;
        set_mode(&testbed.binary, 0o755)?;
        // Also shows whether the directory allows execution.
        testbed.finish(testbed.attacker(&[attack::RUN_ATTACKS, "nothing"]))?;
        Ok(testbed)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns a new mark that no other process or file has.
    pub fn mark(&self) -> Result<String, AttackError> {
        Ok(format!("{}{}", self.word, random_word()?))
    }

    pub fn home(&self) -> PathBuf {
        self.path("home")
    }

    pub fn workspace(&self, id: &str) -> PathBuf {
        self.path("work").join(format!("scidex-analysis-{id}"))
    }

    /// Replaces the caller's environment, so that neither its settings nor its secrets take part.
    fn set_environment(&self, mut command: Command) -> Command {
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .env("HOME", self.path("person"))
            .env("FUMEHOOD_HOME", self.home())
            .env("FUMEHOOD_WORKSPACE_ROOT", self.path("work"))
            .stdin(Stdio::null());
        // The tests set this variable to switch a layer off, and check that the battery notices.
        if cfg!(debug_assertions)
            && let Some(fault) = std::env::var_os(VARIABLE)
        {
            command.env(VARIABLE, fault);
        }
        command
    }

    /// The attacker, unconfined.
    pub fn attacker<S: AsRef<OsStr>>(&self, words: &[S]) -> Command {
        let mut command = self.set_environment(Command::new(&self.binary));
        command.arg(ARGUMENT).args(words).current_dir(&self.dir);
        command
    }

    /// The installed binary with the given arguments.
    pub fn product(&self, words: &[&str]) -> Command {
        let mut command = self.set_environment(Command::new(&self.installed));
        command.args(words).current_dir(&self.dir);
        command
    }

    /// `fumehood run` of the attacker in a project.
    pub fn run<S: AsRef<OsStr>>(&self, project: &Path, options: &[&str], words: &[S]) -> Command {
        let mut command = self.product(&["run", "--quiet"]);
        if let Some(level) = self.level {
            command.args(["--level", level.as_str()]);
        }
        command
            .arg("--project")
            .arg(project)
            .arg("--runtime")
            .arg(self.path("runtime"))
            .args(options)
            .args(["--", "fumehood", ARGUMENT])
            .args(words);
        command
    }

    /// Runs a command to its end.
    pub fn finish(&self, command: Command) -> Result<ProcessOutput, AttackError> {
        BatteryProcess::start(command)?.finish()
    }

    /// Runs `fumehood run --json` to its end and parses its document.
    pub fn finish_run(&self, command: Command) -> Result<ConfinedRun, AttackError> {
        ConfinedRun::read(&self.finish(command)?)
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        // Let the product itself remove what its runs left, cgroups above all. A failure shows below: the directory
        // cannot be removed.
        if self.home().exists() {
            let _ = self.product(&["gc", "--kept"]).output();
        }
        if let Err(e) = std::fs::remove_dir_all(&self.dir) {
            (self.warn)(&format!("remove {:?}: {e}", self.dir));
        }
    }
}

/// A process of the battery. Dropping it kills it.
pub struct BatteryProcess {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
}

impl BatteryProcess {
    pub fn start(mut command: Command) -> Result<BatteryProcess, AttackError> {
        command.stderr(Stdio::piped());
        BatteryProcess::start_with_own_stderr(command)
    }

    pub fn start_with_own_stderr(mut command: Command) -> Result<BatteryProcess, AttackError> {
        command.stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .operation_on("start", Path::new(command.get_program()))?;
        let stdout = child.stdout.take().expect("the standard output is piped");
        let stdout = BufReader::new(stdout);
        Ok(BatteryProcess { child, stdout })
    }

    /// Starts a process of the host's that waits to be attacked, in a process group of its own.
    pub fn start_target(testbed: &Testbed, secret: &str) -> Result<BatteryProcess, AttackError> {
        // The secret is on the command line too, which everybody who sees the process can read.
        let mut command = testbed.attacker(&[attack::victims::WITNESS, secret]);
        command
            .env(attack::WITNESS_VARIABLE, secret)
            .stdin(Stdio::piped())
            .process_group(0);
        let mut process = BatteryProcess::start(command)?;
        match process.wait_for(attack::victims::READY) {
            true => Ok(process),
            false => Err(AttackError::TargetProcessNotReady),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits up to 100 ms for the process to end, because a signal takes a moment to arrive.
    pub fn died(&mut self) -> bool {
        self.ends_within(Duration::from_millis(100))
    }

    fn ends_within(&mut self, time: Duration) -> bool {
        if let Ok(process) = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()) {
            events::wait_for(process, PollFlags::IN, time);
        }
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Calls `look` again and again until the process ends.
    pub fn watch(&mut self, mut look: impl FnMut()) {
        let _watchdog = kill_if_late(&self.child);
        while !self.ends_within(Duration::from_millis(10)) {
            look();
        }
    }

    /// Returns what another process can change of this one: its limits and its priority.
    pub fn limits(&self) -> String {
        let read = |name: &str| {
            std::fs::read_to_string(format!("/proc/{}/{name}", self.pid())).unwrap_or_default()
        };
        // The process name, in parentheses, may contain spaces. After it come the state and, 15 fields later, priority
        // and niceness.
        let stat = read("stat");
        let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        let nice: Vec<&str> = fields.skip(15).take(2).collect();
        format!("{}{}", read("limits"), nice.join(" "))
    }

    /// Waits for a line. Returns false if the process ends without printing it.
    pub fn wait_for(&mut self, word: &str) -> bool {
        let _watchdog = kill_if_late(&self.child);
        let mut line = String::new();
        while matches!(self.stdout.read_line(&mut line), Ok(n) if n > 0) {
            if line.trim() == word {
                return true;
            }
            line.clear();
        }
        false
    }

    pub fn kill(&mut self) {
        // Both fail only if the process has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Closes the pipe to the process's standard input, if there is one, and waits for the process.
    pub fn finish(mut self) -> Result<ProcessOutput, AttackError> {
        let _watchdog = kill_if_late(&self.child);
        drop(self.child.stdin.take());
        // Read stderr on a thread of its own, so that neither pipe fills while the other is read.
        let errors = self.child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                let _ = pipe.read_to_end(&mut text);
                text
            })
        });
        let mut stdout = Vec::new();
        self.stdout
            .read_to_end(&mut stdout)
            .operation("read what it prints")?;
        let stderr = errors.and_then(|e| e.join().ok()).unwrap_or_default();
        self.child.wait().operation("wait for its end")?;
        Ok(ProcessOutput {
            stdout: String::from_utf8_lossy(&stdout).into_owned(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        })
    }
}

impl Drop for BatteryProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Kills a process that takes too long. Dropping what is returned cancels that.
fn kill_if_late(child: &Child) -> Sender<()> {
    let (cancel, cancelled) = std::sync::mpsc::channel();
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty());
    std::thread::spawn(move || {
        let timed_out = cancelled.recv_timeout(PROCESS_TIME_MAX) == Err(RecvTimeoutError::Timeout);
        if let (true, Ok(process)) = (timed_out, process) {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
    });
    cancel
}

/// Returns the processes of this host that have the mark in their command line. No other process has it.
pub fn processes_with(mark: &str) -> Vec<(Pid, Vec<String>)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let processes = numbers.filter_map(Pid::from_raw);
    processes
        .map(|pid| (pid, words_of(pid)))
        .filter(|(_, words)| words.iter().any(|w| w.contains(mark)))
        .collect()
}

/// Returns the command line of a process.
fn words_of(pid: Pid) -> Vec<String> {
    let path = format!("/proc/{}/cmdline", pid.as_raw_pid());
    let line = std::fs::read(path).unwrap_or_default();
    let line = String::from_utf8_lossy(&line);
    line.split('\0').map(str::to_owned).collect()
}

/// Waits until no process with the mark is left, at most for `patience`. Kills those that are, and returns their
/// number.
pub fn kill_survivors(mark: &str, patience: Duration) -> usize {
    let until = Instant::now() + patience;
    let mut left = processes_with(mark);
    while !left.is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
        left = processes_with(mark);
    }
    for (pid, _) in &left {
        // Open the process first and read its command line again, so that a recycled pid is not mistaken for it.
        if let Ok(process) = pidfd_open(*pid, PidfdFlags::empty())
            && words_of(*pid).iter().any(|w| w.contains(mark))
        {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
    }
    left.len()
}

/// Opens a new pseudo-terminal. Returns the outer end, which the caller keeps, and the inner end.
pub fn open_terminal() -> Result<(OwnedFd, OwnedFd), AttackError> {
    use rustix::pty::OpenptFlags;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let outer = rustix::pty::openpt(flags).operation("open a terminal")?;
    rustix::pty::unlockpt(&outer).operation("unlock the terminal")?;
    let inner = rustix::pty::ioctl_tiocgptpeer(&outer, flags).operation("open the terminal")?;
    Ok((outer, inner))
}

pub fn random_word() -> Result<String, AttackError> {
    let mut bytes = [0u8; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .operation("ask for random bytes")?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

pub fn make_dir(path: &Path, mode: u32) -> Result<(), AttackError> {
    std::fs::create_dir_all(path).operation_on("make", path)?;
    set_mode(path, mode)
}

pub fn set_mode(path: &Path, mode: u32) -> Result<(), AttackError> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .operation_on("set the mode of", path)
}
