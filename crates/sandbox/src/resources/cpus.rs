//! Which CPUs a process may use, and on which CPU a new child starts.

use rustix::io;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Moves a new child to another CPU than this one, if it may use another. Some kernels, for example those of virtual
/// machines, deliberately keep few CPUs busy. They would leave the child on this CPU, where it would not run until
/// this process waits.
pub fn move_off_this_cpu(child: i32) -> io::Result<()> {
    let child = Pid::from_raw(child);
    let all = sched_getaffinity(child)?;
    let mut others = all;
    others.unset(sched_getcpu());
    if others.count() > 0 {
        sched_setaffinity(child, &others)?;
        sched_setaffinity(child, &all)?;
    }
    Ok(())
}

/// Pins this process to `count` of the CPUs it may use, starting at a random one, so that concurrent runs do not all
/// use the first CPUs.
pub fn pin(count: usize) -> io::Result<()> {
    let allowed = sched_getaffinity(None)?;
    let usable: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|cpu| allowed.is_set(*cpu))
        .collect();
    if count >= usable.len() {
        return Ok(());
    }
    let mut random = [0u8; 2];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let first = usize::from(u16::from_ne_bytes(random)) % usable.len();
    let mut pinned = CpuSet::new();
    usable
        .iter()
        .cycle()
        .skip(first)
        .take(count.max(1))
        .for_each(|cpu| pinned.set(*cpu));
    sched_setaffinity(None, &pinned)
}
