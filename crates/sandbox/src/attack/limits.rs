//! Attacks on the host's resources, and on the end of a run. Each is bounded by itself, because unconfined nothing
//! else bounds it, and every process that it starts dies with the one that started it, but for the daemons, which are
//! meant to stay and give up after a minute.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};
use rustix::thread::CpuSet;

use super::{AttackAim, AttackFailure, AttackResult, say};
use crate::sys::{self, ForkSide};

/// How long what was taken must be held to count: a watch that looks ten times a second has long looked.
const HELD_FOR: Duration = Duration::from_millis(1500);
const PROCESSES: usize = 300;
const MEMORY_SHARES: usize = 4;
const MEMORY_SHARE_BYTES: usize = 64 << 20;
const DISK_BYTES: usize = 32 << 20;
const FILES: usize = 800;
const LOG_BYTES: usize = 4 << 20;
const OOM_CHILDREN: u32 = 4;
const OOM_CHILD_BYTES: usize = 128 << 20;
/// Their page tables take 80 MiB in all.
const SLOW_CHILDREN: usize = 40;
const SLOW_CHILD_MAPS: usize = 1 << 30;
const DAEMON_FOR: Duration = Duration::from_secs(60);

/// Starts a process that dies with this one.
fn start(act: impl FnOnce()) -> Result<Option<Pid>, AttackFailure> {
    let parent = rustix::process::getpid();
    match sys::fork_threaded()? {
        ForkSide::Parent { child } => Ok(Pid::from_raw(child)),
        ForkSide::Child => {
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            // It may have died before that was asked for.
            if rustix::process::getppid() == Some(parent) {
                act();
            }
            sys::exit_now(0)
        }
    }
}

/// How many of them somebody has ended.
fn ended(children: &[Pid]) -> usize {
    let gone = |child: &&Pid| {
        matches!(
            rustix::process::waitpid(Some(**child), WaitOptions::NOHANG),
            Ok(Some(_))
        )
    };
    children.iter().filter(gone).count()
}

fn end(children: &[Pid]) {
    for child in children {
        let _ = rustix::process::kill_process(*child, Signal::KILL);
        let _ = rustix::process::waitpid(Some(*child), WaitOptions::empty());
    }
}

pub fn fork(_aim: &AttackAim<'_>) -> AttackResult {
    let mut children = Vec::new();
    let mut refused = None;
    while children.len() < PROCESSES && refused.is_none() {
        match start(|| std::thread::sleep(DAEMON_FOR)) {
            Ok(child) => children.extend(child),
            Err(stopped) => refused = Some(stopped),
        }
    }
    if refused.is_none() {
        std::thread::sleep(HELD_FOR);
    }
    let lost = ended(&children);
    let count = children.len();
    end(&children);
    match refused {
        Some(AttackFailure::Refused(why) | AttackFailure::Unable(why)) => Err(
            AttackFailure::Refused(format!("{why} after {count} processes")),
        ),
        None if lost > 0 => Err(AttackFailure::Refused(format!(
            "{lost} of {count} were ended"
        ))),
        None => Ok(format!("{count} processes at once")),
    }
}

/// Several processes, none of which is large by itself.
pub fn memory(_aim: &AttackAim<'_>) -> AttackResult {
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut children = Vec::new();
    for _ in 0..MEMORY_SHARES {
        let mut theirs = theirs.try_clone()?;
        children.extend(start(move || {
            // Not zero, which would stay one shared page.
            let taken = vec![1u8; MEMORY_SHARE_BYTES];
            let _ = theirs.write_all(&taken[..1]);
            std::thread::sleep(DAEMON_FOR);
            drop(taken);
        })?);
    }
    drop(theirs);
    let mut filled = 0;
    let mut word = [0u8; 1];
    ours.set_read_timeout(Some(Duration::from_secs(10)))?;
    while filled < MEMORY_SHARES && ours.read(&mut word).is_ok_and(|n| n == 1) {
        filled += 1;
    }
    std::thread::sleep(HELD_FOR);
    let lost = ended(&children);
    end(&children);
    match filled == MEMORY_SHARES && lost == 0 {
        true => Ok(format!(
            "{} MiB held in {MEMORY_SHARES} processes",
            (MEMORY_SHARES * MEMORY_SHARE_BYTES) >> 20
        )),
        false => Err(AttackFailure::Refused(format!(
            "{filled} of {MEMORY_SHARES} shares were filled, {lost} were ended"
        ))),
    }
}

/// Child after child takes too much memory, also after the kernel has killed the first ones. Each kill writes dozens of
/// lines into the host's log.
pub fn oom_loop(aim: &AttackAim<'_>) -> AttackResult {
    let held_for = aim.milliseconds()?;
    let mut killed = 0;
    for _ in 0..OOM_CHILDREN {
        let child = start(|| {
            let taken = std::hint::black_box(vec![1u8; OOM_CHILD_BYTES]);
            std::thread::sleep(held_for / OOM_CHILDREN);
            drop(taken);
        })?;
        let ended = rustix::process::waitpid(child, WaitOptions::empty())?;
        killed += u32::from(ended.is_some_and(|(_, status)| status.signaled()));
    }
    if killed > 0 {
        std::thread::sleep(held_for);
    }
    Ok(format!(
        "went on after {OOM_CHILDREN} children of {} MiB, {killed} of them killed",
        OOM_CHILD_BYTES >> 20
    ))
}

pub fn disk(_aim: &AttackAim<'_>) -> AttackResult {
    let mut file = std::fs::File::create_new("bomb")?;
    let chunk = vec![b'x'; 1 << 20];
    for n in 0..DISK_BYTES / chunk.len() {
        if let Err(e) = file.write_all(&chunk) {
            let why = super::errno_name(&e);
            return Err(AttackFailure::Refused(format!("{why} after {n} MiB")));
        }
    }
    std::thread::sleep(HELD_FOR);
    // It stays: what is past the limit at the end is past it, however seldom anybody looked.
    Ok(format!("{} MiB held", DISK_BYTES >> 20))
}

pub fn files(_aim: &AttackAim<'_>) -> AttackResult {
    std::fs::create_dir("many")?;
    for n in 0..FILES {
        if let Err(e) = std::fs::File::create_new(format!("many/{n}")) {
            let why = super::errno_name(&e);
            return Err(AttackFailure::Refused(format!("{why} after {n} files")));
        }
    }
    std::thread::sleep(HELD_FOR);
    Ok(format!("{FILES} files held"))
}

pub fn log(aim: &AttackAim<'_>) -> AttackResult {
    let line = format!("{}\n", aim.mark.repeat(1 + 1000 / aim.mark.len().max(1)));
    for _ in 0..LOG_BYTES / line.len() {
        say(&line);
    }
    Ok(format!("{} MiB printed", LOG_BYTES >> 20))
}

/// Leaves the process group, the session and the parent, hears no signal that can be ignored, and stays.
pub fn daemon(_aim: &AttackAim<'_>) -> AttackResult {
    match sys::fork_threaded()? {
        ForkSide::Parent { .. } => {
            say("holding\n");
            std::thread::sleep(DAEMON_FOR);
            Ok("was not stopped".into())
        }
        ForkSide::Child => {
            let _ = rustix::process::setsid();
            let _ = sys::block_signals(None);
            if let Ok(ForkSide::Child) = sys::fork_threaded() {
                let _ = rustix::process::setsid();
                std::thread::sleep(DAEMON_FOR);
            }
            sys::exit_now(0)
        }
    }
}

/// Processes that the kernel needs long to end, because each has many page tables, and all are on one CPU.
pub fn slow_death(_aim: &AttackAim<'_>) -> AttackResult {
    let allowed = rustix::thread::sched_getaffinity(None)?;
    let mut one = CpuSet::new();
    if let Some(first) = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)) {
        one.set(first);
        // Refused where a limit on CPUs rests on it; then that limit leaves few.
        let _ = rustix::thread::sched_setaffinity(None, &one);
    }
    sys::fill_page_tables(SLOW_CHILD_MAPS)?;
    for _ in 0..SLOW_CHILDREN {
        match sys::fork_threaded() {
            Ok(ForkSide::Parent { .. }) => {}
            Ok(ForkSide::Child) => {
                std::thread::sleep(DAEMON_FOR);
                sys::exit_now(0)
            }
            // There is a limit on processes, which others of the user's use up too. Fewer do as well.
            Err(_) => break,
        }
    }
    say("holding\n");
    std::thread::sleep(DAEMON_FOR);
    Ok("was not stopped".into())
}
