//! Tries every mechanism of the confinement for real, one by one.
//!
//! An attempt to build a whole level names the first step that failed, and says nothing about the steps behind it. Each
//! mechanism is therefore also tried by itself, in a process of its own: this binary, executed again and
//! single-threaded from the start, forks once for each mechanism and waits. Everything an attempt changes (namespaces,
//! mounts, filters, its uid) ends with its process. A child that is killed, as some filters do, is distinguished from a
//! call that is refused.

mod building;
mod calls;

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, WaitOptions};
use serde::{Deserialize, Serialize};

use crate::step_report::{LaunchStepError, StepContext};
use crate::sys::{self, ForkSide};

/// The first argument that makes this binary try the mechanisms.
pub const ARGUMENT: &str = "__probe";

/// All attempts together take some tens of milliseconds. One that takes this long will never end.
const TIME_MAX: Duration = Duration::from_secs(10);
/// The answers are a few kilobytes.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// One feature of the kernel that a sandbox uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mechanism {
    UserNamespace,
    InnerUserNamespace,
    MountNamespace,
    PidNamespace,
    NetNamespace,
    IpcNamespace,
    UtsNamespace,
    CgroupNamespace,
    NewProc,
    Tmpfs,
    Devpts,
    Overlay,
    ReadOnlyMounts,
    IdmappedMounts,
    PivotRoot,
    LeasedUid,
    Landlock,
    SeccompFilter,
    SeccompNotification,
    MemoryOfChild,
    Pidfd,
    SessionKeyring,
    Openat2,
    CloseRange,
}

/// Which levels need a mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Need {
    /// Level `full` does not start without it.
    Full,
    /// Level `landlock` does not start without it. Level `full` does, with one layer less.
    Landlock,
    /// Neither level starts without it.
    Both,
    /// Neither level needs it: a weaker mechanism takes its place.
    Neither,
}

impl Mechanism {
    pub const ALL: [Mechanism; 24] = [
        Mechanism::UserNamespace,
        Mechanism::InnerUserNamespace,
        Mechanism::MountNamespace,
        Mechanism::PidNamespace,
        Mechanism::NetNamespace,
        Mechanism::IpcNamespace,
        Mechanism::UtsNamespace,
        Mechanism::CgroupNamespace,
        Mechanism::NewProc,
        Mechanism::Tmpfs,
        Mechanism::Devpts,
        Mechanism::Overlay,
        Mechanism::ReadOnlyMounts,
        Mechanism::IdmappedMounts,
        Mechanism::PivotRoot,
        Mechanism::LeasedUid,
        Mechanism::Landlock,
        Mechanism::SeccompFilter,
        Mechanism::SeccompNotification,
        Mechanism::MemoryOfChild,
        Mechanism::Pidfd,
        Mechanism::SessionKeyring,
        Mechanism::Openat2,
        Mechanism::CloseRange,
    ];

    /// Returns the name of the mechanism in documents.
    pub fn as_str(self) -> &'static str {
        match self {
            Mechanism::UserNamespace => "user_namespace",
            Mechanism::InnerUserNamespace => "inner_user_namespace",
            Mechanism::MountNamespace => "mount_namespace",
            Mechanism::PidNamespace => "pid_namespace",
            Mechanism::NetNamespace => "net_namespace",
            Mechanism::IpcNamespace => "ipc_namespace",
            Mechanism::UtsNamespace => "uts_namespace",
            Mechanism::CgroupNamespace => "cgroup_namespace",
            Mechanism::NewProc => "new_proc",
            Mechanism::Tmpfs => "tmpfs",
            Mechanism::Devpts => "devpts",
            Mechanism::Overlay => "overlay",
            Mechanism::ReadOnlyMounts => "read_only_mounts",
            Mechanism::IdmappedMounts => "idmapped_mounts",
            Mechanism::PivotRoot => "pivot_root",
            Mechanism::LeasedUid => "leased_uid",
            Mechanism::Landlock => "landlock",
            Mechanism::SeccompFilter => "seccomp_filter",
            Mechanism::SeccompNotification => "seccomp_notification",
            Mechanism::MemoryOfChild => "memory_of_child",
            Mechanism::Pidfd => "pidfd",
            Mechanism::SessionKeyring => "session_keyring",
            Mechanism::Openat2 => "openat2",
            Mechanism::CloseRange => "close_range",
        }
    }

    pub fn need(self) -> Need {
        match self {
            Mechanism::UserNamespace
            | Mechanism::InnerUserNamespace
            | Mechanism::MountNamespace
            | Mechanism::PidNamespace
            | Mechanism::NetNamespace
            | Mechanism::IpcNamespace
            | Mechanism::UtsNamespace
            | Mechanism::CgroupNamespace
            | Mechanism::NewProc
            | Mechanism::Tmpfs
            | Mechanism::Devpts
            | Mechanism::ReadOnlyMounts
            | Mechanism::PivotRoot
            // At level `landlock` seccomp alone keeps the caller's keys from the program.
            | Mechanism::SessionKeyring => Need::Full,
            Mechanism::Landlock => Need::Landlock,
            Mechanism::LeasedUid
            | Mechanism::SeccompFilter
            | Mechanism::SeccompNotification
            | Mechanism::MemoryOfChild
            | Mechanism::Pidfd
            | Mechanism::Openat2
            | Mechanism::CloseRange => Need::Both,
            // Without these, views are plain binds, and data must be readable by everyone.
            Mechanism::Overlay | Mechanism::IdmappedMounts => Need::Neither,
        }
    }
}

/// The result of trying one mechanism.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum MechanismVerdict {
    Works {
        how: String,
    },
    Fails {
        step: String,
        errno: Option<i32>,
    },
    /// Only root would use the mechanism, and this process is not root.
    NotUsed,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MechanismResult {
    pub mechanism: Mechanism,
    #[serde(flatten)]
    pub verdict: MechanismVerdict,
}

impl MechanismResult {
    pub fn failed(&self) -> Option<(&str, Option<i32>)> {
        match &self.verdict {
            MechanismVerdict::Fails { step, errno } => Some((step, *errno)),
            MechanismVerdict::Works { .. } | MechanismVerdict::NotUsed => None,
        }
    }
}

/// Inputs of the attempts.
#[derive(Clone, Debug)]
pub struct ProbeInputs {
    /// For root: the uid that a run would have. The caller has leased it.
    pub leased_uid: Option<u32>,
    /// A directory that a run would show. Its file system decides whether it can be idmapped.
    pub shown: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("start {path:?} to try the mechanisms")]
    Start { path: PathBuf, source: io::Error },
    #[error("read what was found")]
    Read(#[source] io::Error),
    #[error("trying the mechanisms took longer than {} s", TIME_MAX.as_secs())]
    TooLong,
    #[error("understand what was found")]
    InvalidAnswer(#[source] serde_json::Error),
}

/// Tries every mechanism, in processes that execute this binary again.
pub fn try_all(launcher: &Path, inputs: &ProbeInputs) -> Result<Vec<MechanismResult>, ProbeError> {
    let uid = inputs
        .leased_uid
        .map_or(String::from("-"), |uid| uid.to_string());
    let mut child = Command::new(launcher)
        .arg(ARGUMENT)
        .arg(uid)
        .arg(&inputs.shown)
        .env_clear()
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|source| ProbeError::Start {
            path: launcher.to_path_buf(),
            source,
        })?;
    let answer = match child.stdout.take() {
        Some(stdout) => read_in_time(stdout),
        None => Err(ProbeError::Read(io::ErrorKind::BrokenPipe.into())),
    };
    if answer.is_err() {
        // The child leads this process group and is not reaped yet, so no other process has the number.
        let _ = rustix::process::kill_process_group(Pid::from_child(&child), Signal::KILL);
    }
    // The answer says how the attempts went, so the exit status does not matter.
    let _ = child.wait();
    let answer = answer?;
    let lines = answer.split(|b| *b == b'\n').filter(|l| !l.is_empty());
    lines
        .map(|line| serde_json::from_slice(line).map_err(ProbeError::InvalidAnswer))
        .collect()
}

fn read_in_time(mut from: impl Read + AsFd) -> Result<Vec<u8>, ProbeError> {
    let give_up = Instant::now() + TIME_MAX;
    let mut answer = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        let time_left = give_up.saturating_duration_since(Instant::now());
        let time_left = Timespec::try_from(time_left).map_err(|_| ProbeError::TooLong)?;
        let mut fds = [PollFd::from_borrowed_fd(from.as_fd(), PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&time_left)) {
            Ok(0) => return Err(ProbeError::TooLong),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(ProbeError::Read(e.into())),
        }
        match from.read(&mut buffer).map_err(ProbeError::Read)? {
            0 => return Ok(answer),
            n => answer.extend(&buffer[..n]),
        }
        if answer.len() as u64 > ANSWER_BYTES_MAX {
            return Err(ProbeError::Read(io::ErrorKind::InvalidData.into()));
        }
    }
}

/// Returns whether this process was started to try the mechanisms. Call it before any thread exists.
pub fn is_probe() -> bool {
    std::env::args_os().nth(1).is_some_and(|a| a == ARGUMENT)
}

/// Tries every mechanism and writes one line of JSON for each to standard output. Never returns.
pub fn main() -> ! {
    let mut args = std::env::args_os().skip(2);
    let leased_uid = args
        .next()
        .and_then(|a| a.to_str().and_then(|t| t.parse().ok()));
    let shown = args.next().map_or_else(|| "/".into(), PathBuf::from);
    let inputs = ProbeInputs { leased_uid, shown };
    // Try the mechanisms even if this fails.
    let _ = die_with_parent();
    for mechanism in Mechanism::ALL {
        let verdict = in_child(|| try_mechanism(mechanism, &inputs));
        let line = serde_json::to_vec(&MechanismResult { mechanism, verdict });
        let written = line.map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            io::stdout().write_all(&line)
        });
        if written.is_err() {
            sys::exit_now(125);
        }
    }
    sys::exit_now(0)
}

fn die_with_parent() -> Result<(), LaunchStepError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .during(|| "ask to die with the parent".into())
}

type ActResult = Result<MechanismVerdict, LaunchStepError>;

/// Runs `act` in a child process and returns its verdict.
fn in_child(act: impl FnOnce() -> ActResult) -> MechanismVerdict {
    let failed = |step: &str, e: io::Error| MechanismVerdict::Fails {
        step: step.to_owned(),
        errno: e.raw_os_error(),
    };
    let (ours, theirs) = match rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) {
        Ok(pipe) => pipe,
        Err(e) => return failed("make a pipe", e.into()),
    };
    // The C library's fork falls back to the older call where clone3 is refused.
    let child = match sys::fork_threaded() {
        Ok(ForkSide::Child) => {
            drop(ours);
            let verdict = die_with_parent().and_then(|()| act());
            let verdict = verdict.unwrap_or_else(|e| MechanismVerdict::Fails {
                step: e.detail,
                errno: e.errno,
            });
            let line = serde_json::to_vec(&verdict).unwrap_or_default();
            let written = std::fs::File::from(theirs).write_all(&line);
            sys::exit_now(i32::from(written.is_err()))
        }
        Ok(ForkSide::Parent { child }) => child,
        Err(e) => return failed("fork", e),
    };
    drop(theirs);
    let mut answer = Vec::new();
    let read = std::fs::File::from(ours)
        .take(ANSWER_BYTES_MAX)
        .read_to_end(&mut answer);
    let ended = reap(child);
    if let (Ok(_), Ok(verdict)) = (read, serde_json::from_slice(&answer)) {
        return verdict;
    }
    MechanismVerdict::Fails {
        step: match ended {
            Some(signal) => format!("killed by signal {signal}"),
            None => String::from("ended without an answer"),
        },
        errno: None,
    }
}

/// Waits for a child, and returns the signal that killed it, if any.
fn reap(child: i32) -> Option<i32> {
    let waited = rustix::process::waitpid(Pid::from_raw(child), WaitOptions::empty());
    waited
        .ok()
        .flatten()
        .and_then(|(_, status)| status.terminating_signal())
}

fn works(how: impl Into<String>) -> ActResult {
    Ok(MechanismVerdict::Works { how: how.into() })
}

fn try_mechanism(mechanism: Mechanism, inputs: &ProbeInputs) -> ActResult {
    match mechanism {
        Mechanism::UserNamespace => building::user_namespace(inputs),
        Mechanism::InnerUserNamespace => building::inner_user_namespace(inputs),
        Mechanism::MountNamespace => building::mount_namespace(),
        Mechanism::PidNamespace => building::pid_namespace(),
        Mechanism::NetNamespace => building::net_namespace(),
        Mechanism::IpcNamespace => building::namespace(libc::CLONE_NEWIPC),
        Mechanism::UtsNamespace => building::uts_namespace(),
        Mechanism::CgroupNamespace => building::namespace(libc::CLONE_NEWCGROUP),
        Mechanism::NewProc => building::new_proc(),
        Mechanism::Tmpfs => building::tmpfs(),
        Mechanism::Devpts => building::devpts(),
        Mechanism::Overlay => building::overlay(),
        Mechanism::ReadOnlyMounts => building::read_only_mounts(),
        Mechanism::IdmappedMounts => building::idmapped_mounts(inputs),
        Mechanism::PivotRoot => building::pivot_root(),
        Mechanism::LeasedUid => building::leased_uid(inputs),
        Mechanism::Landlock => calls::landlock(),
        Mechanism::SeccompFilter => calls::seccomp_filter(),
        Mechanism::SeccompNotification => calls::seccomp_notification(),
        Mechanism::MemoryOfChild => calls::memory_of_child(),
        Mechanism::Pidfd => calls::pidfd(),
        Mechanism::SessionKeyring => calls::session_keyring(),
        Mechanism::Openat2 => calls::openat2(),
        Mechanism::CloseRange => calls::close_range(),
    }
}
