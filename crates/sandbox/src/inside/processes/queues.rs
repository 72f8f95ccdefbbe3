//! Memory that data waiting in pipes and sockets keeps from being freed.
//!
//! `sendfile` and `splice` put no copy into a pipe or a socket but the page itself. The page stays in memory when its
//! file is truncated, and with it the whole of a large folio: one byte in a pipe can hold 2 MiB. Such a page is in no
//! process's account, and the kernel has no counter for it. What it leaves is a difference: memory of the host that is not
//! free and in none of the categories of /proc/meminfo. Others have such memory too (drivers, ZFS), so the run answers for
//! the growth of that difference only as far as what waits in its own pipes and sockets can account for it.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;

use rustix::fs::FileType;
use rustix::process::PidfdGetfdFlags;

use super::{ProcessSet, ScanResult, descriptors_in_flight, field, open_files};
use crate::sys::procfs::open_pidfd;

/// The largest piece of a file's pages that the kernel keeps together and frees only as a whole.
const FOLIO_BYTES_MAX: u64 = 2 << 20;
const PAGE: u64 = 4096;
/// A socket's queue is bounded in bytes; so many pieces fit at most.
const SOCKET_PIECES_MAX: u64 = 4096;

/// Memory of the host that is neither free nor in any category.
pub fn unaccounted_memory(meminfo: &str) -> u64 {
    const ACCOUNTED: [&str; 13] = [
        "MemFree:",
        "Buffers:",
        "Cached:",
        "SwapCached:",
        "AnonPages:",
        "Slab:",
        "KernelStack:",
        "PageTables:",
        "SecPageTables:",
        "Percpu:",
        "Hugetlb:",
        "Zswap:",
        "Balloon:",
    ];
    let accounted: u64 = ACCOUNTED.iter().map(|name| field(meminfo, name)).sum();
    field(meminfo, "MemTotal:").saturating_sub(accounted) * 1024
}

/// The most that what waits in the run's pipes and sockets can keep in memory. `None`: descriptors are in flight.
pub fn queued_pages_at_most(process_set: ProcessSet) -> Option<u64> {
    let (mut bytes, mut seen, mut in_flight) = (0u64, HashSet::new(), false);
    let mut process: Option<(u32, OwnedFd)> = None;
    let looked = open_files(process_set, &mut |pid, fd, stat| {
        let kind = FileType::from_raw_mode(stat.st_mode);
        let queues = matches!(kind, FileType::Fifo | FileType::Socket);
        if !queues || !seen.insert((stat.st_dev, stat.st_ino)) {
            return true;
        }
        in_flight |= kind == FileType::Socket && descriptors_in_flight(pid, fd);
        if process.as_ref().is_none_or(|(held, _)| *held != pid) {
            process = open_pidfd(pid).map(|held| (pid, held));
        }
        let held = process.as_ref().map(|(_, held)| held);
        let pieces = held.and_then(|held| pieces_waiting(held, fd, kind));
        bytes = bytes.saturating_add(pieces.unwrap_or(0).saturating_mul(FOLIO_BYTES_MAX));
        !in_flight
    });
    (looked == ScanResult::All && !in_flight).then_some(bytes)
}

/// How many pieces at most wait to be read.
fn pieces_waiting(process: &OwnedFd, fd: &OsStr, kind: FileType) -> Option<u64> {
    let number = fd.to_str()?.parse().ok()?;
    // The same description: opening a pipe anew would make its ends believe in one more reader.
    let theirs = rustix::process::pidfd_getfd(process, number, PidfdGetfdFlags::empty()).ok()?;
    let waiting = rustix::io::ioctl_fionread(&theirs).ok()?;
    let pieces_max = match kind {
        FileType::Fifo => rustix::pipe::fcntl_getpipe_size(&theirs).ok()? as u64 / PAGE,
        _ => SOCKET_PIECES_MAX,
    };
    Some(waiting.min(pieces_max))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_no_category_is_the_rest() {
        let meminfo = "MemTotal: 100 kB\nMemFree: 10 kB\nCached: 20 kB\nAnonPages: 30 kB\n";
        assert_eq!(unaccounted_memory(meminfo), 40 << 10);
        let host = std::fs::read_to_string("/proc/meminfo").unwrap();
        assert!(unaccounted_memory(&host) < field(&host, "MemTotal:") * 1024 / 2);
    }
}
