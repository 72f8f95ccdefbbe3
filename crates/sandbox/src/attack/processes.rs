//! Attacks on processes that are not the program's own: signal, trace, read, slow down or communicate with them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, WaitOptions};

use super::calls::{self, OpenQueue};
use super::{
    ATTACKER_PARENT, AttackAim, AttackFailure, AttackResult, Attempts, PARENT_TARGET, all_or,
    c_string, refused, unable,
};
use crate::sys::{self, Arg, Call};

/// A signal whose default action ends a witness.
const SIGNAL: Signal = Signal::USR1;

fn parse_target(text: &[u8]) -> Result<Pid, AttackFailure> {
    let number = match text == PARENT_TARGET.as_bytes() {
        true => ATTACKER_PARENT.get().copied(),
        false => std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()),
    };
    let Some(pid) = number.and_then(Pid::from_raw) else {
        return unable("no process to aim at");
    };
    // In a pid namespace of its own the witness's pid may belong to any process, including the attacker.
    let own = [Some(rustix::process::getpid()), rustix::process::getppid()];
    match own.contains(&Some(pid)) {
        true => refused("that number is its own here"),
        false => Ok(pid),
    }
}

fn number_args<const N: usize>(numbers: [i32; N]) -> [Arg<'static>; N] {
    numbers.map(|n| Arg::Number(i64::from(n)))
}

fn send(pid: Pid, signal: Signal) -> AttackResult {
    let (raw, number) = (pid.as_raw_pid(), signal.as_raw());
    let group = || match pid {
        // kill(-1) signals every process, not a process group.
        Pid::INIT => refused("is everybody"),
        _ => Ok(rustix::process::kill_process_group(pid, signal)?),
    };
    let queue = || {
        // siginfo_t: the signal, errno, and SI_QUEUE as its code. The rest is zero.
        let mut info = [0u8; 128];
        info[..4].copy_from_slice(&number.to_ne_bytes());
        info[8..12].copy_from_slice(&(-1i32).to_ne_bytes());
        let [pid, signal] = number_args([raw, number]);
        let args = &mut [pid, signal, Arg::Bytes(&mut info)];
        sys::attempt(Call::RT_SIGQUEUEINFO, args)
    };
    let by_pidfd = || {
        let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        rustix::process::pidfd_send_signal(process, signal)
    };
    let tgkill = || sys::attempt(Call::TGKILL, &mut number_args([raw, raw, number]));
    Attempts::default()
        .add("kill", "sent", rustix::process::kill_process(pid, signal))
        .add("killpg", "sent", group())
        .add("tgkill", "sent", tgkill())
        .add("sigqueue", "sent", queue())
        .add("pidfd", "sent", by_pidfd())
        .result()
}

pub fn signal(aim: &AttackAim<'_>) -> AttackResult {
    send(parse_target(aim.target.as_bytes())?, SIGNAL)
}

/// Signals init or the guardian. How the run ends shows whether a signal had an effect.
pub fn signal_holder(aim: &AttackAim<'_>) -> AttackResult {
    let pid = parse_target(aim.target.as_bytes())?;
    let mut sent = Vec::new();
    let mut last = String::new();
    let rest = [Signal::TERM, Signal::HUP, Signal::STOP, Signal::KILL];
    for signal in [SIGNAL].into_iter().chain(rest) {
        match send(pid, signal) {
            Ok(how) => sent.push(format!("signal {} {how}", signal.as_raw())),
            Err(failure) => last = failure.reason(),
        }
    }
    all_or(sent, last)
}

/// Makes the kernel send the signal when a pipe becomes readable.
pub fn signal_by_descriptor(aim: &AttackAim<'_>) -> AttackResult {
    let pid = parse_target(aim.target.as_bytes())?;
    let (read, write) = rustix::pipe::pipe()?;
    let signal_through_pipe = |owner: i32| {
        calls::signal_owner(read.as_fd(), owner, SIGNAL.as_raw())?;
        Ok::<_, io::Error>(rustix::io::write(&write, b"x")?)
    };
    let raw = pid.as_raw_pid();
    Attempts::default()
        .add("to the process", "sent", signal_through_pipe(raw))
        .add("to the group", "sent", signal_through_pipe(-raw))
        .result()
}

pub fn trace(aim: &AttackAim<'_>) -> AttackResult {
    const PTRACE_ATTACH: i32 = 16;
    const PTRACE_DETACH: i32 = 17;
    let pid = parse_target(aim.target.as_bytes())?;
    let ptrace = |request: i32, data: i32| {
        let args = &mut number_args([request, pid.as_raw_pid(), 0, data]);
        sys::attempt(Call::PTRACE, args)
    };
    let attach = || {
        ptrace(PTRACE_ATTACH, 0)?;
        rustix::process::waitpid(Some(pid), WaitOptions::UNTRACED)?;
        // Detach with a signal that nobody sent, so that the attacker determines how the witness continues.
        ptrace(PTRACE_DETACH, SIGNAL.as_raw())
    };
    Attempts::default()
        .add_result("read its memory", reach_memory(pid))
        .add("take a descriptor", "taken", take_descriptor(pid))
        .add("attach", "attached", attach())
        .result()
}

/// Tries to read address 1, which is never mapped. EFAULT instead of a refusal means that access was granted.
fn reach_memory(pid: Pid) -> AttackResult {
    let mut into = [0u8; 8];
    match sys::read_memory(pid.as_raw_pid() as u32, 1, &mut into) {
        Ok(_) => Ok("read".into()),
        Err(e) if e.raw_os_error() == Some(libc::EFAULT) => Ok("open to reading".into()),
        Err(e) => Err(e.into()),
    }
}

fn take_descriptor(pid: Pid) -> rustix::io::Result<OwnedFd> {
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    rustix::process::pidfd_getfd(process, 0, PidfdGetfdFlags::empty())
}

/// Reads what /proc shows of another process, and prints what it finds of the witness.
pub fn look_at(aim: &AttackAim<'_>) -> AttackResult {
    let pid = parse_target(aim.target.as_bytes())?.as_raw_pid();
    let read = |name: &str| -> AttackResult {
        let content = std::fs::read(format!("/proc/{pid}/{name}"))?;
        Ok(String::from_utf8_lossy(&content).into_owned())
    };
    let count_descriptors = || -> AttackResult {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd"))?;
        Ok(format!("{} seen", entries.flatten().count()))
    };
    Attempts::default()
        .add_result("its command line", read("cmdline"))
        .add_result("its environment", read("environ"))
        .add("its memory map", "read", read("maps"))
        .add_result("its descriptors", count_descriptors())
        .result()
}

/// Reads memory, environment, descriptors and root of a process that holds more than the program may have.
pub fn memory(aim: &AttackAim<'_>) -> AttackResult {
    let mut successes = Vec::new();
    let mut refusals = Vec::new();
    for part in aim.parts() {
        let pid = match parse_target(part.as_bytes()) {
            Ok(pid) => pid,
            Err(failure) => {
                refusals.push(failure.reason());
                continue;
            }
        };
        let path = |name: &str| format!("/proc/{}/{name}", pid.as_raw_pid());
        let reached = Attempts::default()
            .add("mem", "opened", File::open(path("mem")))
            .add("environ", "opened", File::open(path("environ")))
            .add("exe", "opened", File::open(path("exe")))
            .add("fd", "listed", std::fs::read_dir(path("fd")))
            .add("root", "listed", std::fs::read_dir(path("root/")))
            .add_result("process_vm_readv", reach_memory(pid))
            .add("pidfd_getfd", "taken", take_descriptor(pid))
            .result();
        match reached {
            Ok(what) => successes.push(format!("{}: {what}", pid.as_raw_pid())),
            Err(failure) => refusals.push(format!("{}: {}", pid.as_raw_pid(), failure.reason())),
        }
    }
    all_or(successes, refusals.join("; "))
}

/// Limits or slows another process, which can halt it without a signal.
pub fn limit(aim: &AttackAim<'_>) -> AttackResult {
    const IOPRIO_WHO_PROCESS: i32 = 1;
    const IDLE: i32 = 3 << 13;
    let pid = parse_target(aim.target.as_bytes())?;
    let files = Rlimit {
        current: Some(64),
        maximum: Some(64),
    };
    let files = || rustix::process::prlimit(Some(pid), Resource::Nofile, files);
    let priority = || rustix::process::setpriority_process(Some(pid), 19);
    let affinity = || {
        let set = rustix::thread::sched_getaffinity(None)?;
        rustix::thread::sched_setaffinity(Some(pid), &set)
    };
    let input_output = || {
        let args = &mut number_args([IOPRIO_WHO_PROCESS, pid.as_raw_pid(), IDLE]);
        sys::attempt(Call::IOPRIO_SET, args)
    };
    Attempts::default()
        .add("prlimit", "set", files())
        .add("setpriority", "set", priority())
        .add("sched_setaffinity", "set", affinity())
        .add("ioprio_set", "set", input_output())
        .result()
}

/// System V identifiers are numbers for the whole host, and every process may try them.
pub fn segment(aim: &AttackAim<'_>) -> AttackResult {
    let id: i64 = aim.number()?;
    sys::attempt(Call::SHMAT, &mut [id, 0, 0].map(Arg::Number))?;
    Ok("attached".into())
}

/// POSIX message queues have names like files but no path, so Landlock does not cover them.
pub fn queue(aim: &AttackAim<'_>) -> AttackResult {
    let name = c_string(aim.target.as_bytes())?;
    OpenQueue::open(&name, libc::O_WRONLY)?.send(aim.mark.as_bytes())?;
    Ok("sent".into())
}
