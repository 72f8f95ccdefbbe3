//! Every mechanism that confinement is made of, tried for real and one by one.
//!
//! A level that is tried as a whole names the first step that failed; what lies behind that step stays unknown until it
//! is mended. So each mechanism is also tried by itself, in a process that is thrown away: our own binary started
//! again, single-threaded from birth, forks once for each act and waits. Whatever an act changes (namespaces, mounts,
//! filters, its uid) ends with its process, and an act that is killed, as some filters do, is told apart from one that
//! is refused.

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

/// The word after the program's name that makes it try the mechanisms.
pub const ARGUMENT: &str = "__probe";

/// All acts together take some tens of milliseconds; one that waits this long for the kernel waits for ever.
const TIME_MAX: Duration = Duration::from_secs(10);
/// The answers are a few kilobytes.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// One thing the kernel is asked for.
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

/// What rests on a mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Need {
    /// Level `full` does not start without it.
    Full,
    /// Level `landlock` does not start without it; `full` does, one layer thinner.
    Landlock,
    /// Neither level starts without it.
    Both,
    /// Something weaker takes its place.
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

    /// The word in documents.
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
            // Views are then plain binds, and data must be readable by everyone.
            Mechanism::Overlay | Mechanism::IdmappedMounts => Need::Neither,
        }
    }
}

/// What became of one act.
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
    /// Only root would use it, and this is not root.
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

/// What the acts are tried with.
#[derive(Clone, Debug)]
pub struct ProbeInputs {
    /// For root: the uid that a run would have, leased by the caller.
    pub leased_uid: Option<u32>,
    /// A directory that a run would show: whether it can be idmapped depends on its file system.
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
    NotificationAnswer(#[source] serde_json::Error),
}

/// Tries every mechanism, in processes of our own binary.
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
        // The group is the child's own, and the child is not reaped yet: its number is nobody else's.
        let _ = rustix::process::kill_process_group(Pid::from_child(&child), Signal::KILL);
    }
    // The answer tells how it went.
    let _ = child.wait();
    let answer = answer?;
    let lines = answer.split(|b| *b == b'\n').filter(|l| !l.is_empty());
    lines
        .map(|line| serde_json::from_slice(line).map_err(ProbeError::NotificationAnswer))
        .collect()
}

fn read_in_time(mut from: impl Read + AsFd) -> Result<Vec<u8>, ProbeError> {
    let give_up = Instant::now() + TIME_MAX;
    let mut answer = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        let left = give_up.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| ProbeError::TooLong)?;
        let mut fds = [PollFd::from_borrowed_fd(from.as_fd(), PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&left)) {
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

/// Whether this process was started to try the mechanisms. To be asked before any thread exists.
pub fn is_probe() -> bool {
    std::env::args_os().nth(1).is_some_and(|a| a == ARGUMENT)
}

/// Never returns. One line of JSON for each act goes to standard output.
pub fn main() -> ! {
    let mut args = std::env::args_os().skip(2);
    let leased_uid = args
        .next()
        .and_then(|a| a.to_str().and_then(|t| t.parse().ok()));
    let shown = args.next().map_or_else(|| "/".into(), PathBuf::from);
    let inputs = ProbeInputs { leased_uid, shown };
    // Refused: the mechanisms are tried all the same.
    let _ = die_with_parent();
    for mechanism in Mechanism::ALL {
        let verdict = in_child(|| act(mechanism, &inputs));
        let line = serde_json::to_vec(&MechanismResult { mechanism, verdict });
        let told = line.map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            io::stdout().write_all(&line)
        });
        if told.is_err() {
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

/// Does something in a process of its own and tells how it went.
fn in_child(act: impl FnOnce() -> ActResult) -> MechanismVerdict {
    let failed = |step: &str, e: io::Error| MechanismVerdict::Fails {
        step: step.to_owned(),
        errno: e.raw_os_error(),
    };
    let (ours, theirs) = match rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) {
        Ok(pipe) => pipe,
        Err(e) => return failed("make a pipe", e.into()),
    };
    // By way of the C library, which takes the older call where clone3 is refused.
    let child = match sys::fork_threaded() {
        Ok(ForkSide::Child) => {
            drop(ours);
            let verdict = die_with_parent().and_then(|()| act());
            let verdict = verdict.unwrap_or_else(|e| MechanismVerdict::Fails {
                step: e.detail,
                errno: e.errno,
            });
            let line = serde_json::to_vec(&verdict).unwrap_or_default();
            let told = std::fs::File::from(theirs).write_all(&line);
            sys::exit_now(i32::from(told.is_err()))
        }
        Ok(ForkSide::Parent { child }) => child,
        Err(e) => return failed("fork", e),
    };
    drop(theirs);
    let mut answer = Vec::new();
    let heard = std::fs::File::from(ours)
        .take(ANSWER_BYTES_MAX)
        .read_to_end(&mut answer);
    let ended = reap(child);
    if let (Ok(_), Ok(verdict)) = (heard, serde_json::from_slice(&answer)) {
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

/// Waits for a child; gives the signal that ended it.
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

fn act(mechanism: Mechanism, inputs: &ProbeInputs) -> ActResult {
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
