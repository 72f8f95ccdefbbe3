//! Mechanisms that are single system calls: Landlock, seccomp, and calls that other code relies on.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};

use super::{TrialResult, die_with_parent, reap, works};
use crate::channel::{self, Wait};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys::{self, ForkSide, Instruction, Listener};

/// Checks Landlock's effect, not only its version: an access that was allowed before is refused afterwards.
pub fn landlock() -> TrialResult {
    use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr};
    let abi = sys::landlock_version().doing("ask for its version")?;
    std::fs::read_dir("/").doing("list / without it")?;
    let failed = |e: landlock::RulesetError| LaunchStepError::new(e.to_string());
    let rules = Ruleset::default().handle_access(AccessFs::from_all(ABI::V1));
    let rules = rules.and_then(|r| r.create()).map_err(failed)?;
    rules.restrict_self().map_err(failed)?;
    match std::fs::read_dir("/").map_err(|e| e.kind()) {
        Err(io::ErrorKind::PermissionDenied) => works(format!("ABI {abi}")),
        _ => Err(LaunchStepError::new(
            "an access that no rule allows was allowed",
        )),
    }
}

/// An errno that getpgid never returns, so it can come only from the filter.
const FILTER_ERRNO: i32 = libc::EXDEV;

/// A filter that answers getpgid with `answer` and allows every other call.
fn filter(answer: u32) -> [Instruction; 4] {
    let instruction = |code: u16, jf: u8, k: u32| Instruction { code, jt: 0, jf, k };
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    [
        instruction(LOAD_WORD, 0, 0),
        instruction(JUMP_IF_EQUAL, 1, libc::SYS_getpgid as u32),
        instruction(RETURN, 0, answer),
        instruction(RETURN, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

fn install(answer: u32, listener: Listener) -> Result<Option<OwnedFd>, LaunchStepError> {
    rustix::thread::set_no_new_privs(true).doing("set no_new_privs")?;
    sys::seccomp_install(&filter(answer), listener).doing("install a filter")
}

fn is_filtered() -> bool {
    let answer = rustix::process::getpgid(None);
    answer.is_err_and(|e| e.raw_os_error() == FILTER_ERRNO)
}

pub fn seccomp_filter() -> TrialResult {
    install(
        libc::SECCOMP_RET_ERRNO | FILTER_ERRNO as u32,
        Listener::None,
    )?;
    match is_filtered() {
        true => works("a call refused"),
        false => Err(LaunchStepError::new("the filter did not hold")),
    }
}

fn socket_pair() -> Result<(OwnedFd, OwnedFd), LaunchStepError> {
    rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .doing("make a socket pair")
}

/// Makes the parent answer a call of its child, as init answers connect().
pub fn seccomp_notification() -> TrialResult {
    let (ours, theirs) = socket_pair()?;
    let child = match sys::fork_threaded().doing("fork")? {
        ForkSide::Child => {
            drop(ours);
            let installed = die_with_parent()
                .and_then(|()| install(libc::SECCOMP_RET_USER_NOTIF, Listener::New));
            let sent = match &installed {
                Ok(listener) => {
                    let listener: Vec<BorrowedFd<'_>> = listener.iter().map(AsFd::as_fd).collect();
                    channel::send(theirs.as_fd(), &(0, ""), &listener)
                }
                Err(e) => {
                    let errno = e.errno.unwrap_or(libc::EIO);
                    channel::send(theirs.as_fd(), &(errno, e.detail.as_str()), &[])
                }
            };
            drop(installed);
            sys::exit_now(match sent.is_ok() && is_filtered() {
                true => 0,
                false => 1,
            })
        }
        ForkSide::Parent { child } => child,
    };
    drop(theirs);
    let answered = answer_one(ours.as_fd());
    // A call that nobody answers would wait forever.
    if answered.is_err() {
        let _ = Pid::from_raw(child)
            .map(|pid| rustix::process::kill_process(pid, Signal::KILL))
            .transpose();
    }
    let waited = rustix::process::waitpid(Pid::from_raw(child), WaitOptions::empty());
    answered?;
    let exit = waited.ok().flatten().and_then(|(_, s)| s.exit_status());
    match exit {
        Some(0) => works("a call answered by another process"),
        _ => Err(LaunchStepError::new("the answer did not arrive")),
    }
}

fn answer_one(from: BorrowedFd<'_>) -> Result<(), LaunchStepError> {
    let message: Option<((i32, String), Vec<OwnedFd>)> =
        channel::receive(from, Wait::Block).doing("receive the listener")?;
    let Some(((errno, detail), listeners)) = message else {
        return Err(LaunchStepError::new("the filtered process ended at once"));
    };
    let Some(listener) = listeners.first() else {
        return Err(LaunchStepError {
            errno: Some(errno),
            detail,
        });
    };
    let call =
        sys::notification_receive(listener.as_fd()).doing("receive a call from the filter")?;
    sys::notification_answer(listener.as_fd(), call.id, FILTER_ERRNO).doing("answer a call")
}

/// Forks a child that waits until its parent closes the returned descriptor.
fn idle_child() -> Result<(i32, OwnedFd), LaunchStepError> {
    let (ours, theirs) = socket_pair()?;
    match sys::fork_threaded().doing("fork")? {
        ForkSide::Child => {
            drop(ours);
            let _ = die_with_parent().map(|()| rustix::io::read(&theirs, &mut [0u8]));
            sys::exit_now(0)
        }
        ForkSide::Parent { child } => Ok((child, ours)),
    }
}

/// Init reads the address of a connect() from the program's memory.
pub fn memory_of_child() -> TrialResult {
    let secret = *b"fumehood";
    let (child, hold) = idle_child()?;
    let mut read = [0u8; 8];
    let address = secret.as_ptr() as usize as u64;
    let read_result = sys::read_memory(child as u32, address, &mut read);
    drop(hold);
    reap(child);
    read_result.doing("read a child's memory")?;
    match read == secret {
        true => works("read"),
        false => Err(LaunchStepError::new("the child's memory was read wrongly")),
    }
}

pub fn pidfd() -> TrialResult {
    let (child, hold) = idle_child()?;
    let pid = Pid::from_raw(child).ok_or_else(|| LaunchStepError::new("no pid"))?;
    let killed = rustix::process::pidfd_open(pid, PidfdFlags::empty())
        .doing("open a pidfd")
        .and_then(|fd| {
            rustix::process::pidfd_send_signal(&fd, Signal::KILL)
                .doing("signal through a pidfd")?;
            let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
            rustix::event::poll(&mut fds, None).doing("wait for a pidfd")
        });
    drop(hold);
    let signal = reap(child);
    killed?;
    match signal == Some(Signal::KILL.as_raw()) {
        true => works("killed and waited for"),
        false => Err(LaunchStepError::new("the signal had no effect")),
    }
}

pub fn session_keyring() -> TrialResult {
    sys::new_session_keyring().doing("join a new session keyring")?;
    works("left")
}

pub fn openat2() -> TrialResult {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::openat2(CWD, "/", flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
        .doing("open /")?;
    works("opened / without links")
}

pub fn close_range() -> TrialResult {
    sys::close_on_exec_from(3).doing("mark descriptors close-on-exec")?;
    works("marked")
}
