//! Attacks on the host's resources, and on the end of a run. Each attack bounds itself, because nothing else bounds
//! it in the unconfined control. Every process that an attack starts dies with its parent, except the daemons, which
//! are meant to stay and exit after a minute.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};
use rustix::thread::CpuSet;

use super::{AttackAim, AttackResult, errno_name, print_unbuffered, refused};
use crate::sys;

/// How long an attack must hold a resource to count as successful: a watch that checks ten times a second has checked
/// by then.
const HOLD_TIME: Duration = Duration::from_millis(1500);
const PROCESSES: usize = 300;
const MEMORY_SHARES: usize = 4;
const MEMORY_SHARE_BYTES: usize = 64 << 20;
const DISK_BYTES: usize = 32 << 20;
const FILES: usize = 800;
const LOG_BYTES: usize = 4 << 20;
const OOM_CHILDREN: u32 = 4;
const OOM_CHILD_BYTES: usize = 128 << 20;
/// The page tables of all these children take 80 MiB.
const SLOW_CHILDREN: usize = 40;
const SLOW_CHILD_MAPS: usize = 1 << 30;
const DAEMON_LIFETIME: Duration = Duration::from_secs(60);

/// Starts a process that dies with this one.
fn start_child(act: impl FnOnce()) -> io::Result<Pid> {
    let parent = rustix::process::getpid();
    sys::fork_and_run(|| {
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        // The parent may have died before the death signal was set.
        if rustix::process::getppid() == Some(parent) {
            act();
        }
        0
    })
}

/// Kills the children, and returns how many of them others had ended before.
fn end_children(children: &[Pid]) -> usize {
    let wait = |child: &Pid, options| rustix::process::waitpid(Some(*child), options);
    let has_ended = |child: &&Pid| matches!(wait(child, WaitOptions::NOHANG), Ok(Some(_)));
    let ended = children.iter().filter(has_ended).count();
    for child in children {
        let _ = rustix::process::kill_process(*child, Signal::KILL);
        let _ = wait(child, WaitOptions::empty());
    }
    ended
}

pub fn fork(_aim: &AttackAim<'_>) -> AttackResult {
    let mut children = Vec::new();
    let mut failure = None;
    while children.len() < PROCESSES && failure.is_none() {
        match start_child(|| std::thread::sleep(DAEMON_LIFETIME)) {
            Ok(child) => children.push(child),
            Err(stopped) => failure = Some(stopped),
        }
    }
    if failure.is_none() {
        std::thread::sleep(HOLD_TIME);
    }
    let (ended, count) = (end_children(&children), children.len());
    match failure {
        Some(failure) => refused(format!("{} after {count} processes", errno_name(&failure))),
        None if ended > 0 => refused(format!("{ended} of {count} were ended")),
        None => Ok(format!("{count} processes at once")),
    }
}

/// Uses the memory in several processes, none of which is large by itself.
pub fn memory(_aim: &AttackAim<'_>) -> AttackResult {
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut children = Vec::new();
    for _ in 0..MEMORY_SHARES {
        let mut theirs = theirs.try_clone()?;
        children.push(start_child(move || {
            // Not zero: a zeroed vector leaves its pages untouched, and they use no memory.
            let memory = vec![1u8; MEMORY_SHARE_BYTES];
            let _ = theirs.write_all(&memory[..1]);
            std::thread::sleep(DAEMON_LIFETIME);
            drop(memory);
        })?);
    }
    drop(theirs);
    let mut filled = 0;
    let mut byte = [0u8; 1];
    ours.set_read_timeout(Some(Duration::from_secs(10)))?;
    while filled < MEMORY_SHARES && ours.read(&mut byte).is_ok_and(|n| n == 1) {
        filled += 1;
    }
    std::thread::sleep(HOLD_TIME);
    let ended = end_children(&children);
    match filled == MEMORY_SHARES && ended == 0 {
        true => Ok(format!(
            "{} MiB held in {MEMORY_SHARES} processes",
            (MEMORY_SHARES * MEMORY_SHARE_BYTES) >> 20
        )),
        false => refused(format!(
            "{filled} of {MEMORY_SHARES} shares were filled, {ended} were ended"
        )),
    }
}

/// Starts children one after the other that use too much memory, even after the kernel has killed the first ones.
/// Each kill writes dozens of lines into the host's log.
pub fn oom_loop(aim: &AttackAim<'_>) -> AttackResult {
    let hold_time = aim.milliseconds()?;
    let mut killed = 0;
    for _ in 0..OOM_CHILDREN {
        let child = start_child(|| {
            let memory = std::hint::black_box(vec![1u8; OOM_CHILD_BYTES]);
            std::thread::sleep(hold_time / OOM_CHILDREN);
            drop(memory);
        })?;
        let ended = rustix::process::waitpid(Some(child), WaitOptions::empty())?;
        killed += u32::from(ended.is_some_and(|(_, status)| status.signaled()));
    }
    if killed > 0 {
        std::thread::sleep(hold_time);
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
            return refused(format!("{} after {n} MiB", errno_name(&e)));
        }
    }
    std::thread::sleep(HOLD_TIME);
    // The file stays, so that the final count finds it even if the watch did not.
    Ok(format!("{} MiB held", DISK_BYTES >> 20))
}

pub fn files(_aim: &AttackAim<'_>) -> AttackResult {
    std::fs::create_dir("many")?;
    for n in 0..FILES {
        if let Err(e) = std::fs::File::create_new(format!("many/{n}")) {
            return refused(format!("{} after {n} files", errno_name(&e)));
        }
    }
    std::thread::sleep(HOLD_TIME);
    Ok(format!("{FILES} files held"))
}

pub fn log(aim: &AttackAim<'_>) -> AttackResult {
    let line = format!("{}\n", aim.mark.repeat(1 + 1000 / aim.mark.len().max(1)));
    for _ in 0..LOG_BYTES / line.len() {
        print_unbuffered(&line);
    }
    Ok(format!("{} MiB printed", LOG_BYTES >> 20))
}

/// Leaves the process group, the session and the parent, blocks every signal that can be blocked, and stays.
pub fn daemon(_aim: &AttackAim<'_>) -> AttackResult {
    sys::fork_and_run(|| {
        let _ = rustix::process::setsid();
        let _ = sys::block_signals(None);
        let _ = sys::fork_and_run(|| {
            let _ = rustix::process::setsid();
            sleep_for_life()
        });
        0
    })?;
    stay()
}

/// What a daemon does.
fn sleep_for_life() -> i32 {
    std::thread::sleep(DAEMON_LIFETIME);
    0
}

/// Tells the caller that the processes have started, and stays beside them.
fn stay() -> AttackResult {
    print_unbuffered("holding\n");
    sleep_for_life();
    Ok("was not stopped".into())
}

/// Starts processes that take the kernel long to end: each has many page tables, and all are on one CPU.
pub fn slow_death(_aim: &AttackAim<'_>) -> AttackResult {
    let allowed = rustix::thread::sched_getaffinity(None)?;
    let mut one_cpu = CpuSet::new();
    if let Some(first) = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)) {
        one_cpu.set(first);
        // Refused where the CPU limit depends on the affinity. That limit then leaves few CPUs anyway.
        let _ = rustix::thread::sched_setaffinity(None, &one_cpu);
    }
    sys::fill_page_tables(SLOW_CHILD_MAPS)?;
    for _ in 0..SLOW_CHILDREN {
        // The process limit may also count other processes of the user. Fewer children suffice.
        if sys::fork_and_run(sleep_for_life).is_err() {
            break;
        }
    }
    stay()
}
