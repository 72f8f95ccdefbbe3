//! Attacks on processes: signal, trace, read, slow or talk to those that are not the program's own.

use std::ffi::CString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, WaitOptions};

use super::calls::{self, OpenQueue};
use super::{AttackAim, AttackFailure, AttackResult, PARENT_TARGET, STARTED_BY, any_of};
use crate::sys::{self, Arg, Call};

/// What ends a witness that does not expect it.
const SIGNAL: Signal = Signal::USR1;

fn process(text: &[u8]) -> Result<Pid, AttackFailure> {
    let number = match text == PARENT_TARGET.as_bytes() {
        true => STARTED_BY.get().copied(),
        false => std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()),
    };
    let none = || AttackFailure::Unable("no process to aim at".into());
    let pid = number.and_then(Pid::from_raw).ok_or_else(none)?;
    // In a namespace of its own the witness's number may be anybody's, the attacker's included.
    let own = [Some(rustix::process::getpid()), rustix::process::getppid()];
    match own.contains(&Some(pid)) {
        true => Err(AttackFailure::Refused("that number is its own here".into())),
        false => Ok(pid),
    }
}

fn number(of: i32) -> Arg<'static> {
    Arg::Number(i64::from(of))
}

fn send(pid: Pid, signal: Signal) -> AttackResult {
    let raw = pid.as_raw_pid();
    let mut kill = || {
        rustix::process::kill_process(pid, signal)?;
        Ok("sent".into())
    };
    let mut group = || match pid {
        // To the kernel, the group of process 1 is everybody.
        Pid::INIT => Err(AttackFailure::Refused("is everybody".into())),
        _ => {
            rustix::process::kill_process_group(pid, signal)?;
            Ok("sent".into())
        }
    };
    let mut thread = || {
        let args = &mut [number(raw), number(raw), number(signal.as_raw())];
        sys::attempt(Call::TGKILL, args)?;
        Ok("sent".into())
    };
    let mut queue = || {
        // siginfo_t: the signal, errno, and SI_QUEUE as its origin; the rest is zero.
        let mut info = [0u8; 128];
        info[..4].copy_from_slice(&signal.as_raw().to_ne_bytes());
        info[8..12].copy_from_slice(&(-1i32).to_ne_bytes());
        let args = &mut [number(raw), number(signal.as_raw()), Arg::Bytes(&mut info)];
        sys::attempt(Call::RT_SIGQUEUEINFO, args)?;
        Ok("sent".into())
    };
    let mut held = || {
        let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        rustix::process::pidfd_send_signal(process, signal)?;
        Ok("sent".into())
    };
    any_of(&mut [
        ("kill", &mut kill),
        ("killpg", &mut group),
        ("tgkill", &mut thread),
        ("sigqueue", &mut queue),
        ("pidfd", &mut held),
    ])
}

pub fn signal(aim: &AttackAim<'_>) -> AttackResult {
    send(process(aim.target.as_bytes())?, SIGNAL)
}

/// Whoever holds the sandbox: its first process, or its guardian. Whether that had an effect shows in how the run ends.
pub fn signal_holder(aim: &AttackAim<'_>) -> AttackResult {
    let pid = process(aim.target.as_bytes())?;
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

/// The kernel sends the signal, when there is something to read.
pub fn signal_by_descriptor(aim: &AttackAim<'_>) -> AttackResult {
    let pid = process(aim.target.as_bytes())?;
    let (read, write) = rustix::pipe::pipe()?;
    let own_by = |owner: i32| -> AttackResult {
        calls::signal_owner(read.as_fd(), owner, SIGNAL.as_raw())?;
        rustix::io::write(&write, b"x")?;
        Ok("sent".into())
    };
    let raw = pid.as_raw_pid();
    any_of(&mut [
        ("to the process", &mut || own_by(raw)),
        ("to the group", &mut || own_by(-raw)),
    ])
}

pub fn trace(aim: &AttackAim<'_>) -> AttackResult {
    const PTRACE_ATTACH: i64 = 16;
    const PTRACE_DETACH: i64 = 17;
    let pid = process(aim.target.as_bytes())?;
    let raw = pid.as_raw_pid();
    let ptrace = |request: i64, data: i64| {
        let args = &mut [
            Arg::Number(request),
            number(raw),
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
        // Let go with a signal that was never sent: the witness goes on as the attacker wants it to.
        ptrace(PTRACE_DETACH, i64::from(SIGNAL.as_raw()))?;
        Ok("attached".into())
    };
    any_of(&mut [
        ("read its memory", &mut read),
        ("take a descriptor", &mut take),
        ("attach", &mut attach),
    ])
}

/// Address 1 is never mapped: being told so, rather than being refused, is to be let in.
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

/// What /proc tells of another process. It prints what it finds of the witness's.
pub fn look_at(aim: &AttackAim<'_>) -> AttackResult {
    let pid = process(aim.target.as_bytes())?.as_raw_pid();
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
        ("its descriptors", &mut || descriptors(pid)),
    ])
}

fn descriptors(pid: i32) -> AttackResult {
    let count = std::fs::read_dir(format!("/proc/{pid}/fd"))?
        .flatten()
        .count();
    Ok(format!("{count} seen"))
}

/// Memory, environment, descriptors and root of a process that holds more than the program may have.
pub fn memory(aim: &AttackAim<'_>) -> AttackResult {
    let mut got = Vec::new();
    let mut not = Vec::new();
    for part in aim.parts() {
        let pid = match process(part.as_bytes()) {
            Ok(pid) => pid,
            Err(AttackFailure::Refused(why) | AttackFailure::Unable(why)) => {
                not.push(why);
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
            Ok(what) => got.push(format!("{raw}: {what}")),
            Err(AttackFailure::Refused(why) | AttackFailure::Unable(why)) => {
                not.push(format!("{raw}: {why}"))
            }
        }
    }
    match got.is_empty() {
        false => Ok(got.join("; ")),
        true => Err(AttackFailure::Refused(not.join("; "))),
    }
}

/// Slower, fewer files: how another process can be brought to a halt without a signal.
pub fn limit(aim: &AttackAim<'_>) -> AttackResult {
    let pid = process(aim.target.as_bytes())?;
    let raw = pid.as_raw_pid();
    let mut files = || {
        let most = Some(64);
        let few = Rlimit {
            current: most,
            maximum: most,
        };
        rustix::process::prlimit(Some(pid), Resource::Nofile, few)?;
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
        const OF_A_PROCESS: i64 = 1;
        const IDLE: i64 = 3 << 13;
        let args = &mut [Arg::Number(OF_A_PROCESS), number(raw), Arg::Number(IDLE)];
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

/// System V: the identifiers are numbers for the whole host, and anyone may try them.
pub fn segment(aim: &AttackAim<'_>) -> AttackResult {
    let id: i64 = aim.number()?;
    let args = &mut [Arg::Number(id), Arg::Number(0), Arg::Number(0)];
    sys::attempt(Call::SHMAT, args)?;
    Ok("attached".into())
}

/// POSIX message queues have names like files, but no path: Landlock does not see them.
pub fn queue(aim: &AttackAim<'_>) -> AttackResult {
    let no_name = |_| AttackFailure::Unable("a name with a NUL byte".into());
    let name = CString::new(aim.target.as_bytes()).map_err(no_name)?;
    OpenQueue::open(&name, libc::O_WRONLY)?.send(aim.mark.as_bytes())?;
    Ok("sent".into())
}
