//! Memory that data in pipes and sockets keeps from being freed.
//!
//! `sendfile` and `splice` put the page of a file into a pipe or a socket, not a copy. The page stays in memory when
//! its file is truncated, and so does the whole large folio that it belongs to: one byte in a pipe can keep 2 MiB. Such
//! a page is charged to no process, and the kernel has no counter for it. It shows only as a difference: memory of the
//! host that is neither free nor in any category of /proc/meminfo. Drivers and ZFS have such memory too. So the growth
//! of this difference is charged to the run only as far as the data in its own pipes and sockets can explain it.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;

use rustix::fs::FileType;
use rustix::process::PidfdGetfdFlags;

use super::{ProcessSet, ScanResult, field, for_each_open_file, has_descriptors_in_flight};
use crate::sys::procfs::open_pidfd;

/// The largest folio: pages of a file that the kernel frees only together.
const FOLIO_BYTES_MAX: u64 = 2 << 20;
const PAGE: u64 = 4096;
/// The most pages in one socket's queue, which is bounded in bytes.
const SOCKET_PIECES_MAX: u64 = 4096;

/// The memory of the host that is neither free nor in any category of /proc/meminfo.
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

/// An upper bound on the memory that the data in the run's pipes and sockets can keep. Returns `None` if descriptors
/// are in flight or the scan was incomplete.
pub fn queued_pages_at_most(process_set: ProcessSet) -> Option<u64> {
    let (mut bytes, mut seen, mut in_flight) = (0u64, HashSet::new(), false);
    let mut process: Option<(u32, OwnedFd)> = None;
    let scanned = for_each_open_file(process_set, &mut |pid, fd, stat| {
        let kind = FileType::from_raw_mode(stat.st_mode);
        let is_queue = matches!(kind, FileType::Fifo | FileType::Socket);
        if !is_queue || !seen.insert((stat.st_dev, stat.st_ino)) {
            return true;
        }
        in_flight |= kind == FileType::Socket && has_descriptors_in_flight(pid, fd);
        if process.as_ref().is_none_or(|(last, _)| *last != pid) {
            process = open_pidfd(pid).map(|pidfd| (pid, pidfd));
        }
        let pidfd = process.as_ref().map(|(_, pidfd)| pidfd);
        let pieces = pidfd.and_then(|pidfd| queued_pieces_max(pidfd, fd, kind));
        bytes = bytes.saturating_add(pieces.unwrap_or(0).saturating_mul(FOLIO_BYTES_MAX));
        !in_flight
    });
    (scanned == ScanResult::All && !in_flight).then_some(bytes)
}

/// An upper bound on the pieces that wait to be read: each byte may be one, up to the slots of the queue.
fn queued_pieces_max(process: &OwnedFd, fd: &OsStr, kind: FileType) -> Option<u64> {
    let number = fd.to_str()?.parse().ok()?;
    // Copy the descriptor. Opening the pipe through /proc would add a reader, which its users could notice.
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
    fn unaccounted_memory_is_the_total_less_all_categories() {
        let meminfo = "MemTotal: 100 kB\nMemFree: 10 kB\nCached: 20 kB\nAnonPages: 30 kB\n";
        assert_eq!(unaccounted_memory(meminfo), 40 << 10);
        let host = std::fs::read_to_string("/proc/meminfo").unwrap();
        assert!(unaccounted_memory(&host) < field(&host, "MemTotal:") * 1024 / 2);
    }
}
