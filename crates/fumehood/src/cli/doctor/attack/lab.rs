//! Where the battery is run: a directory of its own with everything that is attacked, the product as it is installed,
//! and a copy of it that plays the attacker. Gone when the battery is over.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, PidfdFlags, Signal};
use sandbox::attack::{self, ARGUMENT};
use sandbox::spec::ConfinementLevel;
use serde_json::Value;
use store::types::crash_points::VARIABLE;

/// Nothing in the battery takes nearly as long; a host on which something hangs is told so.
const AT_MOST: Duration = Duration::from_secs(90);
/// On these there is room, and they allow execution, on nearly every host.
const GROUNDS: [&str; 2] = ["/var/tmp", "/tmp"];

pub struct Lab {
    dir: PathBuf,
    /// In every name that the battery makes anywhere.
    word: String,
    /// The attacker.
    pub binary: PathBuf,
    /// As it is installed: what a host permits may hang on the path.
    installed: PathBuf,
    pub level: Option<ConfinementLevel>,
}

/// How a process of the battery ended, and what it printed.
pub struct Ended {
    pub stdout: String,
    pub stderr: String,
}

/// What one run of the product came to.
pub struct Confined {
    /// What the attacker printed.
    pub said: String,
    pub record: Value,
}

impl Confined {
    pub fn status(&self) -> &str {
        self.record["status"].as_str().unwrap_or("unknown")
    }

    /// Why it did not start, if it did not.
    pub fn not_started(&self) -> Option<&str> {
        let started = !self.record["isolation"]["level"].is_null();
        let why = || {
            self.record["message"]
                .as_str()
                .unwrap_or("for no reason given")
        };
        (!started).then(why)
    }
}

impl Lab {
    pub fn make(level: Option<ConfinementLevel>) -> anyhow::Result<Lab> {
        let installed = std::env::current_exe().context("find our own binary")?;
        let mut troubles = Vec::new();
        for ground in GROUNDS {
            match Lab::make_in(Path::new(ground), &installed, level) {
                Ok(lab) => return Ok(lab),
                Err(e) => troubles.push(format!("{ground}: {e:#}")),
            }
        }
        bail!("find a place for the battery: {}", troubles.join("; "))
    }

    fn make_in(
        ground: &Path,
        installed: &Path,
        level: Option<ConfinementLevel>,
    ) -> anyhow::Result<Lab> {
        let word = random_word()?;
        let dir = ground.join(format!("fumehood-attack-{word}"));
        std::fs::create_dir(&dir).with_context(|| format!("make {dir:?}"))?;
        let lab = Lab {
            binary: dir.join("runtime/bin/fumehood"),
            dir,
            word,
            installed: installed.to_owned(),
            level,
        };
        for name in ["", "runtime", "runtime/bin", "work", "person"] {
            make_open(&lab.dir.join(name), 0o755)?;
        }
        std::fs::copy("/proc/self/exe", &lab.binary).context("copy our own binary")?;
        set_mode(&lab.binary, 0o755)?;
        // Also shows whether programs may be executed there.
        let tried = lab.finish(lab.attacker(&[attack::RUN_ATTACKS, "nothing"]));
        tried.context("start the attacker")?;
        Ok(lab)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A new mark, which nobody else has.
    pub fn mark(&self) -> anyhow::Result<String> {
        Ok(format!("{}{}", self.word, random_word()?))
    }

    pub fn home(&self) -> PathBuf {
        self.path("home")
    }

    pub fn workspace(&self, id: &str) -> PathBuf {
        self.path("work").join(format!("scidex-analysis-{id}"))
    }

    /// Nothing of the caller's environment: neither its settings nor its secrets take part.
    fn surroundings(&self, mut command: Command) -> Command {
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .env("HOME", self.path("person"))
            .env("FUMEHOOD_HOME", self.home())
            .env("FUMEHOOD_WORKSPACE_ROOT", self.path("work"))
            .stdin(Stdio::null());
        // For the tests that leave a layer off, to see that it is noticed.
        if cfg!(debug_assertions)
            && let Some(wish) = std::env::var_os(VARIABLE)
        {
            command.env(VARIABLE, wish);
        }
        command
    }

    /// The attacker, unconfined.
    pub fn attacker<S: AsRef<OsStr>>(&self, words: &[S]) -> Command {
        let mut command = self.surroundings(Command::new(&self.binary));
        command.arg(ARGUMENT).args(words).current_dir(&self.dir);
        command
    }

    /// The product, as a user would type it.
    pub fn product(&self, words: &[&str]) -> Command {
        let mut command = self.surroundings(Command::new(&self.installed));
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

    /// Runs to the end.
    pub fn finish(&self, command: Command) -> anyhow::Result<Ended> {
        Live::start(command)?.finish()
    }

    /// Runs the product to the end, and reads its one document.
    pub fn finish_run(&self, command: Command) -> anyhow::Result<Confined> {
        let ended = self.finish(command)?;
        let first = ended.stdout.lines().next().unwrap_or_default();
        let record: Value = serde_json::from_str(first)
            .with_context(|| format!("the run gave no result: {}{}", ended.stdout, ended.stderr))?;
        Ok(Confined {
            said: record["stdout"]["text"].as_str().unwrap_or_default().into(),
            record,
        })
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // What runs have left unfinished is the product's own to clear away, cgroups above all.
        if self.home().exists() {
            let _told_below = self.product(&["gc", "--kept"]).output();
        }
        if let Err(e) = std::fs::remove_dir_all(&self.dir) {
            super::super::super::show::line(&format!("remove {:?}: {e}", self.dir));
        }
    }
}

/// A process of the battery, ended at the latest when it is dropped.
pub struct Live {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Live {
    pub fn start(mut command: Command) -> anyhow::Result<Live> {
        command.stdout(Stdio::piped());
        let mut child = command
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {:?}", command.get_program()))?;
        let stdout = child.stdout.take().context("its output is piped")?;
        Ok(Live {
            child,
            stdout: BufReader::new(stdout),
        })
    }

    /// With a terminal for its standard input and error.
    pub fn start_on(mut command: Command, terminal: OwnedFd) -> anyhow::Result<Live> {
        let error = terminal.try_clone().context("copy a descriptor")?;
        let mut child = command
            .stdin(terminal)
            .stderr(error)
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {:?}", command.get_program()))?;
        let stdout = child.stdout.take().context("its output is piped")?;
        Ok(Live {
            child,
            stdout: BufReader::new(stdout),
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for a line; false when it ends without having said it.
    pub fn wait_for(&mut self, word: &str) -> bool {
        let _watch = Watchdog::over(&self.child);
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
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }

    /// Ends its input, if it has any of ours, and waits for its end.
    pub fn finish(mut self) -> anyhow::Result<Ended> {
        let _watch = Watchdog::over(&self.child);
        drop(self.child.stdin.take());
        // On a thread of its own, so that neither pipe can fill while the other is read.
        let errors = self.child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                let _as_far_as_it_goes = pipe.read_to_end(&mut text);
                text
            })
        });
        let mut stdout = Vec::new();
        self.stdout
            .read_to_end(&mut stdout)
            .context("read what it prints")?;
        let stderr = errors.and_then(|e| e.join().ok()).unwrap_or_default();
        self.child.wait().context("wait for its end")?;
        Ok(Ended {
            stdout: String::from_utf8_lossy(&stdout).into_owned(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        })
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Ends a process that is not done in time; until dropped.
struct Watchdog(Option<std::sync::mpsc::Sender<()>>);

impl Watchdog {
    fn over(child: &Child) -> Watchdog {
        let (dismiss, dismissed) = std::sync::mpsc::channel();
        let process = rustix::process::pidfd_open(Pid::from_child(child), PidfdFlags::empty());
        std::thread::spawn(move || {
            let in_vain =
                dismissed.recv_timeout(AT_MOST) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
            if let (true, Ok(process)) = (in_vain, process) {
                let _gone = rustix::process::pidfd_send_signal(process, Signal::KILL);
            }
        });
        Watchdog(Some(dismiss))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// A process of the host's that waits to be attacked, in a process group of its own.
pub struct Witness(Live);

impl Witness {
    pub fn start(lab: &Lab, secret: &str) -> anyhow::Result<Witness> {
        // On its command line too, which is open to all who see the process at all.
        let mut command = lab.attacker(&[attack::victims::WITNESS, secret]);
        command
            .env(attack::WITNESS_VARIABLE, secret)
            .stdin(Stdio::piped())
            .process_group(0);
        let mut live = Live::start(command)?;
        match live.wait_for(attack::victims::READY) {
            true => Ok(Witness(live)),
            false => bail!("a witness did not get ready"),
        }
    }

    pub fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Waits a little: a signal that was sent is on its way.
    pub fn died(&mut self) -> bool {
        for _ in 0..20 {
            if !self.0.is_alive() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    /// What another process can set of this one, as the kernel tells it.
    pub fn limits(&self) -> String {
        let read = |name: &str| {
            std::fs::read_to_string(format!("/proc/{}/{name}", self.pid())).unwrap_or_default()
        };
        // The name, in brackets, may hold spaces; then come the state, and 15 fields on the priority and the niceness.
        let stat = read("stat");
        let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        let nice: Vec<&str> = fields.skip(15).take(2).collect();
        format!("{}{}", read("limits"), nice.join(" "))
    }
}

/// Processes of this host whose command line holds the mark, which nobody else's does.
pub fn processes_with(mark: &str) -> Vec<(Pid, Vec<String>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let number = entry.file_name().to_str().and_then(|n| n.parse().ok());
        let Some(pid) = number.and_then(Pid::from_raw) else {
            continue;
        };
        let words = words_of(pid);
        if words.iter().any(|w| w.contains(mark)) {
            found.push((pid, words));
        }
    }
    found
}

/// The command line of a process.
fn words_of(pid: Pid) -> Vec<String> {
    let path = format!("/proc/{}/cmdline", pid.as_raw_pid());
    let line = std::fs::read(path).unwrap_or_default();
    let words = line.split(|b| *b == 0);
    words
        .map(|w| String::from_utf8_lossy(w).into_owned())
        .collect()
}

/// Whether processes with the mark are still there after a while; they are ended then.
pub fn survivors(mark: &str, patience: Duration) -> usize {
    let until = Instant::now() + patience;
    let mut left = processes_with(mark);
    while !left.is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
        left = processes_with(mark);
    }
    for (pid, _) in &left {
        // Held first and looked at again, so that no number is taken for another process.
        if let Ok(process) = rustix::process::pidfd_open(*pid, PidfdFlags::empty())
            && words_of(*pid).iter().any(|w| w.contains(mark))
        {
            let _gone = rustix::process::pidfd_send_signal(process, Signal::KILL);
        }
    }
    left.len()
}

/// A new terminal: its outer end, to be kept, and its inner.
pub fn open_terminal() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    use rustix::pty::OpenptFlags;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let outer = rustix::pty::openpt(flags).context("open a terminal")?;
    rustix::pty::unlockpt(&outer).context("unlock the terminal")?;
    let inner = rustix::pty::ioctl_tiocgptpeer(&outer, flags).context("open the terminal")?;
    Ok((outer, inner))
}

pub fn random_word() -> anyhow::Result<String> {
    let mut bytes = [0u8; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .context("ask for random bytes")?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

pub fn make_open(path: &Path, mode: u32) -> anyhow::Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("make {path:?}"))?;
    set_mode(path, mode)
}

pub fn set_mode(path: &Path, mode: u32) -> anyhow::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .with_context(|| format!("set the mode of {path:?}"))
}
