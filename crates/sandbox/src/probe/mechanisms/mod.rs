//! Tries every mechanism of the confinement for real, one by one.
//!
//! A probe, which builds a whole level in miniature, names the first step that failed, and says nothing about the steps
//! behind it. Each mechanism is therefore also tried by itself, in a process of its own: this binary, executed again
//! and single-threaded from the start, forks once for each mechanism and waits. Everything a trial changes (namespaces,
//! mounts, filters, its uid) ends with its process. Some filters kill the caller instead of refusing the call. The
//! result distinguishes the two.

mod building;
mod calls;

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use serde::{Deserialize, Serialize};

use crate::launch::die_with_parent;
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys;

/// The first argument that makes this binary try the mechanisms.
pub const ARGUMENT: &str = "__probe";

/// All trials together take some tens of milliseconds. One that takes this long will never end.
const TIME_MAX: Duration = Duration::from_secs(10);
/// The answers are a few kilobytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// One feature of the kernel that a sandbox uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mechanism {
    /// A user namespace with one user mapped.
    UserNamespace,
    /// A user namespace inside a plain user's first one.
    InnerUserNamespace,
    /// A mount namespace whose mounts are private.
    MountNamespace,
    /// A pid namespace whose first process is 1.
    PidNamespace,
    /// A network namespace with loopback.
    NetNamespace,
    /// An IPC namespace.
    IpcNamespace,
    /// A UTS namespace with a host name of its own.
    UtsNamespace,
    /// A cgroup namespace.
    CgroupNamespace,
    /// A new /proc in a new pid namespace.
    NewProc,
    /// A tmpfs, attached to the tree.
    Tmpfs,
    /// A devpts of its own.
    Devpts,
    /// An overlay of two read-only layers.
    Overlay,
    /// Making a copied tree of mounts read-only (mount_setattr).
    ReadOnlyMounts,
    /// Showing a tree with another owner (idmapped mounts).
    IdmappedMounts,
    /// pivot_root, and letting go of the old root.
    PivotRoot,
    /// Becoming the leased uid and dropping every capability.
    LeasedUid,
    /// Landlock: an access that no rule allows is refused.
    Landlock,
    /// A seccomp filter that refuses a call.
    SeccompFilter,
    /// A seccomp filter that lets another process answer a call.
    SeccompNotification,
    /// Reading a child's memory (process_vm_readv).
    MemoryOfChild,
    /// Signalling and waiting through a pidfd.
    Pidfd,
    /// Joining a new session keyring.
    SessionKeyring,
    /// openat2 with its RESOLVE flags.
    Openat2,
    /// Marking many descriptors close-on-exec with one call.
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

/// Every mechanism in the order of the enum, with its name in documents, the levels that need it, and its trial.
#[rustfmt::skip]
const MECHANISMS: [(Mechanism, &str, Need, Trial); 24] = [
    (Mechanism::UserNamespace, "user_namespace", Need::Full, building::user_namespace),
    (Mechanism::InnerUserNamespace, "inner_user_namespace", Need::Full, building::inner_user_namespace),
    (Mechanism::MountNamespace, "mount_namespace", Need::Full, |_| building::mount_namespace()),
    (Mechanism::PidNamespace, "pid_namespace", Need::Full, |_| building::pid_namespace()),
    (Mechanism::NetNamespace, "net_namespace", Need::Full, |_| building::net_namespace()),
    (Mechanism::IpcNamespace, "ipc_namespace", Need::Full, |_| building::namespace(libc::CLONE_NEWIPC)),
    (Mechanism::UtsNamespace, "uts_namespace", Need::Full, |_| building::uts_namespace()),
    (Mechanism::CgroupNamespace, "cgroup_namespace", Need::Full, |_| building::namespace(libc::CLONE_NEWCGROUP)),
    (Mechanism::NewProc, "new_proc", Need::Full, |_| building::new_proc()),
    (Mechanism::Tmpfs, "tmpfs", Need::Full, |_| building::tmpfs()),
    (Mechanism::Devpts, "devpts", Need::Full, |_| building::devpts()),
    // Without this, views are plain binds.
    (Mechanism::Overlay, "overlay", Need::Neither, |_| building::overlay()),
    (Mechanism::ReadOnlyMounts, "read_only_mounts", Need::Full, |_| building::read_only_mounts()),
    // Without this, data must be readable by everyone.
    (Mechanism::IdmappedMounts, "idmapped_mounts", Need::Neither, building::idmapped_mounts),
    (Mechanism::PivotRoot, "pivot_root", Need::Full, |_| building::pivot_root()),
    (Mechanism::LeasedUid, "leased_uid", Need::Both, building::leased_uid),
    (Mechanism::Landlock, "landlock", Need::Landlock, |_| calls::landlock()),
    (Mechanism::SeccompFilter, "seccomp_filter", Need::Both, |_| calls::seccomp_filter()),
    (Mechanism::SeccompNotification, "seccomp_notification", Need::Both, |_| calls::seccomp_notification()),
    (Mechanism::MemoryOfChild, "memory_of_child", Need::Both, |_| calls::memory_of_child()),
    (Mechanism::Pidfd, "pidfd", Need::Both, |_| calls::pidfd()),
    // At level `landlock` seccomp alone keeps the caller's keys from the program.
    (Mechanism::SessionKeyring, "session_keyring", Need::Full, |_| calls::session_keyring()),
    (Mechanism::Openat2, "openat2", Need::Both, |_| calls::openat2()),
    (Mechanism::CloseRange, "close_range", Need::Both, |_| calls::close_range()),
];

impl Mechanism {
    /// Returns the name of the mechanism in documents.
    pub fn as_str(self) -> &'static str {
        MECHANISMS[self as usize].1
    }

    /// Returns which levels need the mechanism.
    pub fn need(self) -> Need {
        MECHANISMS[self as usize].2
    }
}

/// The result of trying one mechanism.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum MechanismVerdict {
    /// The mechanism did what it was tried for.
    Works {
        /// What it did.
        how: String,
    },
    /// The mechanism was refused, or had no effect.
    Fails {
        /// The step that failed.
        step: String,
        /// The kernel's errno, if it gave one.
        errno: Option<i32>,
    },
    /// Only root would use the mechanism, and this process is not root.
    NotUsed,
}

/// One mechanism and the result of trying it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MechanismResult {
    /// The mechanism that was tried.
    pub mechanism: Mechanism,
    /// What came of it.
    #[serde(flatten)]
    pub verdict: MechanismVerdict,
}

impl MechanismResult {
    /// Returns the step that failed and its errno, if the mechanism failed.
    pub fn failed(&self) -> Option<(&str, Option<i32>)> {
        match &self.verdict {
            MechanismVerdict::Fails { step, errno } => Some((step, *errno)),
            MechanismVerdict::Works { .. } | MechanismVerdict::NotUsed => None,
        }
    }
}

/// Inputs of the mechanism trials.
#[derive(Clone, Debug)]
pub struct TrialInputs {
    /// For root: the uid that a run would have. The caller has leased it.
    pub leased_uid: Option<u32>,
    /// A directory that a run would show. Its file system decides whether it can be idmapped.
    pub shown: PathBuf,
}

/// Why a program gave no answer in time. The messages describe the variants.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the variants")]
pub enum TrialError {
    #[error("start {path:?}")]
    Start { path: PathBuf, source: io::Error },
    #[error("read what was found")]
    Read(#[source] io::Error),
    #[error("the program took too long")]
    TooLong,
    #[error("understand what was found")]
    InvalidAnswer(#[source] serde_json::Error),
}

/// Tries every mechanism, in processes that execute this binary again.
pub fn try_all(launcher: &Path, inputs: &TrialInputs) -> Result<Vec<MechanismResult>, TrialError> {
    let uid = inputs.leased_uid.map(|uid| uid.to_string());
    let mut command = Command::new(launcher);
    command
        .arg(ARGUMENT)
        .arg(uid.as_deref().unwrap_or("-"))
        .arg(&inputs.shown)
        .env_clear()
        .current_dir("/");
    // The answer says how the trials went, so the exit status does not matter.
    let answer = output_in_time(&mut command, TIME_MAX)?.stdout;
    let lines = answer.split(|b| *b == b'\n').filter(|l| !l.is_empty());
    lines
        .map(|line| serde_json::from_slice(line).map_err(TrialError::InvalidAnswer))
        .collect()
}

/// Runs a program that reads nothing, and returns what it prints to standard output, within a bound of time and size.
/// Kills the process group of a program that exceeds a bound.
pub fn output_in_time(command: &mut Command, time_max: Duration) -> Result<Output, TrialError> {
    command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn().map_err(|source| TrialError::Start {
        path: command.get_program().into(),
        source,
    })?;
    let read = match child.stdout.take() {
        Some(stdout) => read_in_time(stdout, time_max),
        None => Err(TrialError::Read(io::ErrorKind::BrokenPipe.into())),
    };
    if read.is_err() {
        // The child leads this process group and is not reaped yet, so no other process has the number.
        let _ = rustix::process::kill_process_group(Pid::from_child(&child), Signal::KILL);
    }
    let waited = child.wait();
    Ok(Output {
        stdout: read?,
        stderr: Vec::new(),
        status: waited.map_err(TrialError::Read)?,
    })
}

/// Reads what a process prints until it closes its end.
fn read_in_time(mut from: ChildStdout, time_max: Duration) -> Result<Vec<u8>, TrialError> {
    let give_up = Instant::now() + time_max;
    let mut answer = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        let time_left = give_up.saturating_duration_since(Instant::now());
        let time_left = Timespec::try_from(time_left).map_err(|_| TrialError::TooLong)?;
        match rustix::event::poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&time_left)) {
            Ok(0) => return Err(TrialError::TooLong),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(TrialError::Read(e.into())),
        }
        match from.read(&mut buffer).map_err(TrialError::Read)? {
            0 => return Ok(answer),
            n => answer.extend(&buffer[..n]),
        }
        if answer.len() > ANSWER_BYTES_MAX {
            return Err(TrialError::Read(io::ErrorKind::InvalidData.into()));
        }
    }
}

/// Returns whether this process was started to try the mechanisms. Call it before any thread exists.
pub fn is_mechanism_trial() -> bool {
    std::env::args_os().nth(1).is_some_and(|a| a == ARGUMENT)
}

/// Tries every mechanism and writes one line of JSON for each to standard output. Never returns.
pub fn main() -> ! {
    let mut args = std::env::args_os().skip(2);
    let leased_uid = args
        .next()
        .and_then(|a| a.to_str().and_then(|t| t.parse().ok()));
    let shown = args.next().map_or_else(|| "/".into(), PathBuf::from);
    let inputs = TrialInputs { leased_uid, shown };
    // Try the mechanisms even if this fails.
    let _ = die_with_parent();
    for (mechanism, .., trial) in MECHANISMS {
        let verdict = in_child(|| trial(&inputs)).unwrap_or_else(fails);
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

/// Tries one mechanism.
type Trial = fn(&TrialInputs) -> TrialResult;
type TrialResult = Result<MechanismVerdict, LaunchStepError>;

/// Makes the verdict of a failure.
fn fails(failure: LaunchStepError) -> MechanismVerdict {
    MechanismVerdict::Fails {
        step: failure.detail,
        errno: failure.errno,
    }
}

/// Runs `act` in a child process and returns its result.
fn in_child(act: impl FnOnce() -> TrialResult) -> TrialResult {
    let (ours, mut theirs) = io::pipe().doing("make a pipe")?;
    // The C library's fork falls back to the older call where clone3 is refused.
    let child = sys::fork_and_run(move || {
        let result = die_with_parent().and_then(|()| act());
        let line = serde_json::to_vec(&result.unwrap_or_else(fails)).unwrap_or_default();
        i32::from(theirs.write_all(&line).is_err())
    });
    let child = child.doing("fork")?;
    let mut answer = Vec::new();
    let read = ours.take(ANSWER_BYTES_MAX as u64).read_to_end(&mut answer);
    let signal = reap(child).and_then(WaitStatus::terminating_signal);
    match (read, serde_json::from_slice(&answer), signal) {
        (Ok(_), Ok(MechanismVerdict::Fails { step, errno }), _) => Err(LaunchStepError {
            errno,
            detail: step,
        }),
        (Ok(_), Ok(verdict), _) => Ok(verdict),
        (_, _, Some(signal)) => Err(LaunchStepError::new(format!("killed by signal {signal}"))),
        (_, _, None) => Err(LaunchStepError::new("ended without an answer")),
    }
}

/// Waits for a child, and returns how it ended.
fn reap(child: Pid) -> Option<WaitStatus> {
    let waited = rustix::process::waitpid(Some(child), WaitOptions::empty());
    waited.ok().flatten().map(|(_, status)| status)
}

/// The verdict of a trial that did what it tried, or the failure that `why_not` describes.
fn check(worked: bool, how: impl Into<String>, why_not: &str) -> TrialResult {
    match worked {
        true => works(how),
        false => Err(LaunchStepError::new(why_not)),
    }
}

fn works(how: impl Into<String>) -> TrialResult {
    Ok(MechanismVerdict::Works { how: how.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_mechanism_in_the_order_of_the_enum() {
        for (n, (mechanism, name, ..)) in MECHANISMS.iter().enumerate() {
            assert_eq!(*mechanism as usize, n);
            assert_eq!(serde_json::to_value(mechanism).ok(), Some((*name).into()));
        }
    }
}
