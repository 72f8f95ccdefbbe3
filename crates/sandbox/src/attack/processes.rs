//! Attacks on processes that are not the program's own: signal, trace, read, slow down or communicate with them.

use std::ffi::CString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, WaitOptions};

use super::calls::{self, OpenQueue};
use super::{ATTACKER_PARENT, AttackAim, AttackFailure, AttackResult, PARENT_TARGET, any_of};
use crate::sys::{self, Arg, Call};

/// A signal whose default action ends a witness.
const SIGNAL: Signal = Signal::USR1;

fn parse_target(text: &[u8]) -> Result<Pid, AttackFailure> {
    let number = match text == PARENT_TARGET.as_bytes() {
        true => ATTACKER_PARENT.get().copied(),
        false => std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()),
    };
    let none = || AttackFailure::Unable("no process to aim at".into());
    let pid = number.and_then(Pid::from_raw).ok_or_else(none)?;
    // In a pid namespace of its own the witness's pid may belong to any process, including the attacker.
    let own = [Some(rustix::process::getpid()), rustix::process::getppid()];
    match own.contains(&Some(pid)) {
        true => Err(AttackFailure::Refused("that number is its own here".into())),
        false => Ok(pid),
    }
}

fn number_arg(of: i32) -> Arg<'static> {
    Arg::Number(i64::from(of))
}

fn send(pid: Pid, signal: Signal) -> AttackResult {
    let raw = pid.as_raw_pid();
    let mut kill = || {
        rustix::process::kill_process(pid, signal)?;
        Ok("sent".into())
    };
    let mut group = || match pid {
        // kill(-1) signals every process, not a process group.
        Pid::INIT => Err(AttackFailure::Refused("is everybody".into())),
        _ => {
            rustix::process::kill_process_group(pid, signal)?;
            Ok("sent".into())
        }
    };
    let mut thread = || {
        let args = &mut [
            number_arg(raw),
            number_arg(raw),
            number_arg(signal.as_raw()),
        ];
        sys::attempt(Call::TGKILL, args)?;
        Ok("sent".into())
    };
    let mut queue = || {
        // siginfo_t: the signal, errno, and SI_QUEUE as its code. The rest is zero.
        let mut info = [0u8; 128];
        info[..4].copy_from_slice(&signal.as_raw().to_ne_bytes());
        info[8..12].copy_from_slice(&(-1i32).to_ne_bytes());
        let args = &mut [
            number_arg(raw),
            number_arg(signal.as_raw()),
            Arg::Bytes(&mut info),
        ];
        sys::attempt(Call::RT_SIGQUEUEINFO, args)?;
        Ok("sent".into())
    };
    let mut by_pidfd = || {
        let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        rustix::process::pidfd_send_signal(process, signal)?;
        Ok("sent".into())
    };
    any_of(&mut [
        ("kill", &mut kill),
        ("killpg", &mut group),
        ("tgkill", &mut thread),
        ("sigqueue", &mut queue),
        ("pidfd", &mut by_pidfd),
    ])
}

pub fn signal(aim: &AttackAim<'_>) -> AttackResult {
    send(parse_target(aim.target.as_bytes())?, SIGNAL)
}

/// Signals init or the guardian. How the run ends shows whether a signal had an effect.
pub fn signal_holder(aim: &AttackAim<'_>) -> AttackResult {
    let pid = parse_target(aim.target.as_bytes())?;
    let signals = [
        Signal::USR1,
        Signal::TERM,
        Signal::HUP,
        Signal::STOP,
        Signal::KILL,
    ];
    let mut sent = Vec::new();
    let mut last = String::new();
    for signal in signals {
        match send(pid, signal) {
            Ok(how) => sent.push(format!("signal {} {how}", signal.as_raw())),
            Err(AttackFailure::Refused(why) | AttackFailure::Unable(why)) => last = why,
        }
    }
    match sent.is_empty() {
        false => Ok(sent.join("; ")),
        true => Err(AttackFailure::Refused(last)),
    }
}

/// Makes the kernel send the signal when a pipe becomes readable.
pub fn signal_by_descriptor(aim: &AttackAim<'_>) -> AttackResult {
    let pid = parse_target(aim.target.as_bytes())?;
    let (read, write) = rustix::pipe::pipe()?;
    let signal_through_pipe = |owner: i32| -> AttackResult {
        calls::signal_owner(read.as_fd(), owner, SIGNAL.as_raw())?;
        rustix::io::write(&write, b"x")?;
        Ok("sent".into())
    };
    let raw = pid.as_raw_pid();
    any_of(&mut [
        ("to the process", &mut || signal_through_pipe(raw)),
        ("to the group", &mut || signal_through_pipe(-raw)),
    ])
}

pub fn trace(aim: &AttackAim<'_>) -> AttackResult {
    const PTRACE_ATTACH: i64 = 16;
    const PTRACE_DETACH: i64 = 17;
    let pid = parse_target(aim.target.as_bytes())?;
    let raw = pid.as_raw_pid();
    let ptrace = |request: i64, data: i64| {
        let args = &mut [
            Arg::Number(request),
            number_arg(raw),
            Arg::Number(0),
            Arg::Number(data),
        ];
        sys::attempt(Call::PTRACE, args)
    };
    let mut read = || reach_memory(pid);
    let mut take = || take_descriptor(pid);
    let mut attach = || {
        ptrace(PTRACE_ATTACH, 0)?;
        rustix::process::waitpid(Some(pid), WaitOptions::UNTRACED)?;
        // Detach with a signal that nobody sent, so that the attacker determines how the witness continues.
        ptrace(PTRACE_DETACH, i64::from(SIGNAL.as_raw()))?;
        Ok("attached".into())
    };
    any_of(&mut [
        ("read its memory", &mut read),
        ("take a descriptor", &mut take),
        ("attach", &mut attach),
    ])
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

fn take_descriptor(pid: Pid) -> AttackResult {
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    rustix::process::pidfd_getfd(process, 0, PidfdGetfdFlags::empty())?;
    Ok("taken".into())
}

/// Reads what /proc shows of another process, and prints what it finds of the witness.
pub fn look_at(aim: &AttackAim<'_>) -> AttackResult {
    let pid = parse_target(aim.target.as_bytes())?.as_raw_pid();
    let read = |name: &str| -> AttackResult {
        let content = std::fs::read(format!("/proc/{pid}/{name}"))?;
        Ok(String::from_utf8_lossy(&content).into_owned())
    };
    any_of(&mut [
        ("its command line", &mut || read("cmdline")),
        ("its environment", &mut || read("environ")),
        ("its memory map", &mut || {
            read("maps").map(|_| "read".into())
        }),
        ("its descriptors", &mut || count_descriptors(pid)),
    ])
}

fn count_descriptors(pid: i32) -> AttackResult {
    let count = std::fs::read_dir(format!("/proc/{pid}/fd"))?
        .flatten()
        .count();
    Ok(format!("{count} seen"))
}

/// Reads memory, environment, descriptors and root of a process that holds more than the program may have.
pub fn memory(aim: &AttackAim<'_>) -> AttackResult {
    let mut successes = Vec::new();
    let mut refusals = Vec::new();
    for part in aim.parts() {
        let pid = match parse_target(part.as_bytes()) {
            Ok(pid) => pid,
            Err(AttackFailure::Refused(why) | AttackFailure::Unable(why)) => {
                refusals.push(why);
                continue;
            }
        };
        let raw = pid.as_raw_pid();
        let open = |name: &str| -> AttackResult {
            std::fs::File::open(format!("/proc/{raw}/{name}"))?;
            Ok("opened".into())
        };
        let list = |name: &str| -> AttackResult {
            std::fs::read_dir(format!("/proc/{raw}/{name}"))?;
            Ok("listed".into())
        };
        let reached = any_of(&mut [
            ("mem", &mut || open("mem")),
            ("environ", &mut || open("environ")),
            ("exe", &mut || open("exe")),
            ("fd", &mut || list("fd")),
            ("root", &mut || list("root/")),
            ("process_vm_readv", &mut || reach_memory(pid)),
            ("pidfd_getfd", &mut || take_descriptor(pid)),
        ]);
        match reached {
            Ok(what) => successes.push(format!("{raw}: {what}")),
            Err(AttackFailure::Refused(why) | AttackFailure::Unable(why)) => {
                refusals.push(format!("{raw}: {why}"))
            }
        }
    }
    match successes.is_empty() {
        false => Ok(successes.join("; ")),
        true => Err(AttackFailure::Refused(refusals.join("; "))),
    }
}

/// Limits or slows another process, which can halt it without a signal.
pub fn limit(aim: &AttackAim<'_>) -> AttackResult {
    let pid = parse_target(aim.target.as_bytes())?;
    let raw = pid.as_raw_pid();
    let mut files = || {
        let most = Some(64);
        let limit = Rlimit {
            current: most,
            maximum: most,
        };
        rustix::process::prlimit(Some(pid), Resource::Nofile, limit)?;
        Ok("set".into())
    };
    let mut priority = || {
        rustix::process::setpriority_process(Some(pid), 19)?;
        Ok("set".into())
    };
    let mut affinity = || {
        let set = rustix::thread::sched_getaffinity(None)?;
        rustix::thread::sched_setaffinity(Some(pid), &set)?;
        Ok("set".into())
    };
    let mut input_output = || {
        const IOPRIO_WHO_PROCESS: i64 = 1;
        const IDLE: i64 = 3 << 13;
        let args = &mut [
            Arg::Number(IOPRIO_WHO_PROCESS),
            number_arg(raw),
            Arg::Number(IDLE),
        ];
        sys::attempt(Call::IOPRIO_SET, args)?;
        Ok("set".into())
    };
    any_of(&mut [
        ("prlimit", &mut files),
        ("setpriority", &mut priority),
        ("sched_setaffinity", &mut affinity),
        ("ioprio_set", &mut input_output),
    ])
}

/// System V identifiers are numbers for the whole host, and every process may try them.
pub fn segment(aim: &AttackAim<'_>) -> AttackResult {
    let id: i64 = aim.number()?;
    let args = &mut [Arg::Number(id), Arg::Number(0), Arg::Number(0)];
    sys::attempt(Call::SHMAT, args)?;
    Ok("attached".into())
}

/// POSIX message queues have names like files but no path, so Landlock does not cover them.
pub fn queue(aim: &AttackAim<'_>) -> AttackResult {
    let no_name = |_| AttackFailure::Unable("a name with a NUL byte".into());
    let name = CString::new(aim.target.as_bytes()).map_err(no_name)?;
    OpenQueue::open(&name, libc::O_WRONLY)?.send(aim.mark.as_bytes())?;
    Ok("sent".into())
}
