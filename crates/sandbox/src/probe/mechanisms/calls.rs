//! Mechanisms that are single system calls: Landlock, seccomp, and calls that other code relies on.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitStatus};

use super::{TrialResult, check, reap, works};
use crate::channel::{self, Wait};
use crate::launch::die_with_parent;
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys::{self, Instruction, Listener};

/// Checks Landlock's effect, not only its version: an access that was allowed before is refused afterwards.
pub fn landlock() -> TrialResult {
    use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr};
    let abi = sys::landlock_version().doing("ask for its version")?;
    std::fs::read_dir("/").doing("list / without it")?;
    let failed = |e: landlock::RulesetError| LaunchStepError::new(e.to_string());
    let rules = Ruleset::default().handle_access(AccessFs::from_all(ABI::V1));
    let rules = rules.and_then(|r| r.create()).map_err(failed)?;
    rules.restrict_self().map_err(failed)?;
    let listed = std::fs::read_dir("/").map_err(|e| e.kind());
    check(
        matches!(listed, Err(io::ErrorKind::PermissionDenied)),
        format!("ABI {abi}"),
        "an access that no rule allows was allowed",
    )
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
    let answer = libc::SECCOMP_RET_ERRNO | FILTER_ERRNO as u32;
    install(answer, Listener::None)?;
    check(is_filtered(), "a call refused", "the filter did not hold")
}

/// Makes the parent answer a call of its child, as init answers connect().
pub fn seccomp_notification() -> TrialResult {
    let (ours, theirs) = channel::pair().doing("make a socket pair")?;
    let child = sys::fork_and_run(move || {
        let installed =
            die_with_parent().and_then(|()| install(libc::SECCOMP_RET_USER_NOTIF, Listener::New));
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
        i32::from(sent.is_err() || !is_filtered())
    });
    let child = child.doing("fork")?;
    let answered = answer_one(ours.as_fd());
    // A call that nobody answers would wait forever.
    if answered.is_err() {
        let _ = rustix::process::kill_process(child, Signal::KILL);
    }
    let exit = reap(child).and_then(WaitStatus::exit_status);
    answered?;
    let how = "a call answered by another process";
    check(exit == Some(0), how, "the answer did not arrive")
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

/// Forks a child that waits until it is killed.
fn idle_child() -> Result<Pid, LaunchStepError> {
    let wait = || {
        let _ = die_with_parent().map(|()| std::thread::sleep(super::TIME_MAX));
        0
    };
    sys::fork_and_run(wait).doing("fork")
}

/// Init reads the address of a connect() from the program's memory.
pub fn memory_of_child() -> TrialResult {
    let secret = *b"fumehood";
    let child = idle_child()?;
    let mut read = [0u8; 8];
    let address = secret.as_ptr() as usize as u64;
    let read_result = sys::read_memory(child.as_raw_pid() as u32, address, &mut read);
    let _ = rustix::process::kill_process(child, Signal::KILL);
    reap(child);
    read_result.doing("read a child's memory")?;
    check(
        read == secret,
        "read",
        "the child's memory was read wrongly",
    )
}

pub fn pidfd() -> TrialResult {
    let child = idle_child()?;
    let kill = || {
        let fd = rustix::process::pidfd_open(child, PidfdFlags::empty()).doing("open a pidfd")?;
        rustix::process::pidfd_send_signal(&fd, Signal::KILL).doing("signal through a pidfd")?;
        let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
        rustix::event::poll(&mut fds, None).doing("wait for a pidfd")
    };
    let killed = kill();
    if killed.is_err() {
        let _ = rustix::process::kill_process(child, Signal::KILL);
    }
    let signal = reap(child).and_then(WaitStatus::terminating_signal);
    killed?;
    let is_killed = signal == Some(Signal::KILL.as_raw());
    check(
        is_killed,
        "killed and waited for",
        "the signal had no effect",
    )
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
