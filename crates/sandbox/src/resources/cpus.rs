//! Which CPUs a process may use, and which one it begins on.

use rustix::io;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Has a child of ours begin on another CPU than this one, if it may use another. Kernels that keep few CPUs busy on purpose, as
/// those of virtual machines may, leave it on ours, where it does not begin before we wait for something.
pub fn move_off_this_cpu(child: i32) -> io::Result<()> {
    let child = Pid::from_raw(child);
    let all = sched_getaffinity(child)?;
    let mut elsewhere = all;
    elsewhere.unset(sched_getcpu());
    if elsewhere.count() > 0 {
        sched_setaffinity(child, &elsewhere)?;
        sched_setaffinity(child, &all)?;
    }
    Ok(())
}

/// `count` of the CPUs this process may use, from a random one on: runs side by side should not all
/// crowd onto the first.
pub fn pin(count: usize) -> io::Result<()> {
    let mine = sched_getaffinity(None)?;
    let usable: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|cpu| mine.is_set(*cpu))
        .collect();
    if count >= usable.len() {
        return Ok(());
    }
    let mut noise = [0u8; 2];
    rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty())?;
    let first = usize::from(u16::from_ne_bytes(noise)) % usable.len();
    let mut few = CpuSet::new();
    usable
        .iter()
        .cycle()
        .skip(first)
        .take(count.max(1))
        .for_each(|cpu| few.set(*cpu));
    sched_setaffinity(None, &few)
}
