//! The run's processes as /proc shows them: which they are, and what each has written, uses and holds.
//!
//! Every read is bounded. The functions report what they could not read, because a process may make itself unreadable,
//! lose its first thread, or disappear at any moment.

mod census;
mod files;
mod pause;
mod queues;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::spec::{Layer, Spec};
use crate::sys;
use crate::sys::procfs::{ProcessStat, SMALL_FILE_BYTES, numbers_in, open_pidfd, read};

pub use census::{CensusRequest, ProcessCensus, memory_at_most};
pub use files::{ScanResult, count_file_mappings, descriptors_at_most, has_descriptors_in_flight};
pub use files::{for_each_open_file, maps_deleted_file};
pub use pause::{PauseVerdict, UnexplainedGrowth, pause};

/// How many bytes of /proc/PID/maps one pass of the watch reads. More cannot be read in the time between two passes.
const MAPS_BYTES_MAX: usize = 16 << 20;

/// Which processes belong to the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessSet {
    /// All processes of this pid namespace.
    Namespace,
    /// This process and its descendants. This process is their subreaper, so a descendant that loses its parent becomes
    /// a child of this process. No process leaves the tree, and the tree is empty when this process has no child.
    Descendants,
}

impl ProcessSet {
    /// The process set for a run of this spec.
    pub fn of(spec: &Spec) -> ProcessSet {
        match spec.has(Layer::PidNamespace) {
            true => ProcessSet::Namespace,
            false => ProcessSet::Descendants,
        }
    }
}

/// How many bytes the live processes, and the processes that they or this process reaped, have written by the kernel's
/// count.
#[derive(Clone, Copy, Debug, Default)]
pub struct WrittenBytes {
    pub gross: u64,
    /// Bytes of live processes only, less the bytes that never reached the disk because they were deleted first.
    pub net: u64,
    /// Whether the counter of a live process could not be read.
    pub unreadable: bool,
}

/// The pids of this process and of all others of the run.
pub fn pids(process_set: ProcessSet) -> Vec<u32> {
    match process_set {
        ProcessSet::Namespace => numbers_in(Path::new("/proc")).collect(),
        ProcessSet::Descendants => {
            let mut all = vec![std::process::id()];
            all.extend(descendants());
            all
        }
    }
}

/// The pids of all processes of the run except this one.
pub fn other_pids(process_set: ProcessSet) -> impl Iterator<Item = u32> {
    let own = std::process::id();
    pids(process_set).into_iter().filter(move |pid| *pid != own)
}

/// The pids of all descendants of this process. A process that is being forked may be missing, so a caller that needs
/// all of them must ask again.
pub fn descendants() -> Vec<u32> {
    let mut found = Vec::new();
    let mut pending = vec![std::process::id()];
    while let Some(pid) = pending.pop() {
        let Some(children) = children_of(pid) else {
            return descendants_by_parents();
        };
        found.extend(&children);
        pending.extend(children);
    }
    found
}

/// The children of a process, or `None` if this kernel does not list children (CONFIG_PROC_CHILDREN).
fn children_of(pid: u32) -> Option<Vec<u32>> {
    let tasks = PathBuf::from(format!("/proc/{pid}/task"));
    let mut children = Vec::new();
    for thread in numbers_in(&tasks) {
        let list = tasks.join(thread.to_string()).join("children");
        match std::fs::read_to_string(&list) {
            Ok(text) => children.extend(
                text.split_ascii_whitespace()
                    .filter_map(|n| n.parse::<u32>().ok()),
            ),
            Err(_) if pid == std::process::id() && !list.exists() => return None,
            Err(_) => {}
        }
    }
    Some(children)
}

/// As [`descendants`], by reading the parent of every process of the host.
fn descendants_by_parents() -> Vec<u32> {
    let all: Vec<(u32, u32)> = numbers_in(Path::new("/proc"))
        .filter_map(|pid| Some((pid, relations(pid)?.parent)))
        .collect();
    let mut found = HashSet::from([std::process::id()]);
    loop {
        let before = found.len();
        for (pid, parent) in &all {
            if found.contains(parent) {
                found.insert(*pid);
            }
        }
        if found.len() == before {
            break;
        }
    }
    found.remove(&std::process::id());
    found.into_iter().collect()
}

/// The parent and the process group of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relations {
    pub parent: u32,
    pub group: u32,
}

pub fn relations(pid: u32) -> Option<Relations> {
    let stat = ProcessStat::of(pid)?;
    Some(Relations {
        parent: stat.number(1)?,
        group: stat.number(2)?,
    })
}

/// Whether a signal has killed the process, and the kernel is taking it down. Reads the flags of the first thread, and
/// so ignores other threads that exited earlier.
pub fn is_dying_of_signal(pid: u32) -> bool {
    /// `PF_SIGNALED` in the kernel's sched.h.
    const PF_SIGNALED: u64 = 0x400;
    // The fields after the name are state, parent, group, session, terminal, terminal group, flags.
    let flags = ProcessStat::of(pid).and_then(|stat| stat.number::<u64>(6));
    flags.is_some_and(|flags| flags & PF_SIGNALED != 0)
}

/// The longest chain of parents that is followed. A longer one must have changed while it was read.
const GENERATIONS_MAX: usize = 65_536;

/// Opens a pidfd for a descendant of this process. The pidfd is opened before the check that the pid is a descendant.
/// So it refers to that descendant or to a process that is gone, and a signal through it reaches no other process.
pub fn open_descendant(pid: u32) -> Option<OwnedFd> {
    let pidfd = open_pidfd(pid)?;
    let own = std::process::id();
    let mut at = pid;
    for _ in 0..GENERATIONS_MAX {
        match relations(at).map(|of| of.parent) {
            Some(parent) if parent == own => return Some(pidfd),
            Some(0 | 1) => return None,
            Some(parent) => at = parent,
            // The process is gone, or /proc hides it: with hidepid=2, /proc does not show a process that is not
            // dumpable. Its parent still lists it as a child.
            None => return descendants().contains(&pid).then_some(pidfd),
        }
    }
    None
}

/// Opens a pidfd for every descendant of this process, as [`open_descendant`] does for one, in time linear in their
/// number.
pub fn open_descendants() -> Vec<(u32, OwnedFd)> {
    let each = |pid: u32| Some((pid, open_pidfd(pid)?));
    let mut opened: Vec<(u32, OwnedFd)> = descendants().into_iter().filter_map(each).collect();
    let still_there: HashSet<u32> = descendants().into_iter().collect();
    opened.retain(|(pid, _)| still_there.contains(pid));
    opened
}

/// Whether a process is alive: neither a zombie nor about to become one.
fn is_alive(pid: u32) -> bool {
    let Some(stat) = ProcessStat::of(pid) else {
        // /proc may hide a live process (see `open_descendant`).
        return descendants().contains(&pid);
    };
    // The first thread of a live process may be a zombie while other threads run.
    let alone = stat.number::<u32>(17).is_none_or(|threads| threads <= 1);
    let zombie = matches!(stat.state(), Some('Z' | 'X')) && alone;
    // A process that has released all its memory is exiting, and its files in /proc cannot be read any more.
    let has_memory = || {
        let sizes = proc_dirs(pid).filter_map(|dir| read(dir.join("statm"), SMALL_FILE_BYTES));
        sizes.into_iter().any(|text| !text.starts_with("0 "))
    };
    !zombie && has_memory()
}

/// The directories in which a process's files may be readable: the process's own and, for the case that its first
/// thread has ended, those of its threads. Threads share their descriptors, because seccomp refuses to make a thread
/// that does not.
fn proc_dirs(pid: u32) -> impl Iterator<Item = PathBuf> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let threads = process.join("task");
    let of_threads = numbers_in(&threads).map(move |tid| threads.join(tid.to_string()));
    [process].into_iter().chain(of_threads)
}

/// Reads a file of a process from the first of its [`proc_dirs`] in which it is not empty.
fn read_first(pid: u32, name: &str, bytes_max: usize) -> Option<String> {
    let texts = proc_dirs(pid).filter_map(|dir| read(dir.join(name), bytes_max));
    texts.into_iter().find(|text| !text.is_empty())
}

/// The number after `name` in a file with one field in each line; 0 if there is none.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(name));
    let number = line.map(|n| n.trim().trim_end_matches("kB").trim_end());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Sums up what all processes of the run have written, including those that this process, init, has reaped.
pub fn written_bytes(process_set: ProcessSet) -> WrittenBytes {
    // Take the reaped processes from getrusage. /proc/self/io would also say how much was deleted again, but it belongs
    // to root, since init is not dumpable. What init itself writes is negligible.
    let mut all = WrittenBytes {
        gross: sys::bytes_written_by_reaped(),
        ..WrittenBytes::default()
    };
    for pid in other_pids(process_set) {
        let Some(text) = read(format!("/proc/{pid}/io"), SMALL_FILE_BYTES) else {
            all.unreadable |= is_alive(pid);
            continue;
        };
        let gross = field(&text, "write_bytes:");
        all.gross += gross;
        all.net += gross.saturating_sub(field(&text, "cancelled_write_bytes:"));
    }
    all
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive_and_its_census_can_be_taken() {
        let own = std::process::id();
        assert!(is_alive(own) && pids(ProcessSet::Namespace).contains(&own));
        assert!(pids(ProcessSet::Descendants).contains(&own));
        let mut census = ProcessCensus::new(ProcessSet::Descendants);
        let request = CensusRequest {
            cpu: true,
            tasks: true,
            memory: Some(u64::MAX),
            files_in_memory: 0,
        };
        census.take(request, &mut || true);
        assert!(memory_at_most(ProcessSet::Namespace) > 0);
    }

    #[test]
    fn a_process_killed_by_a_signal_is_distinguished_from_live_and_exited_ones() {
        let mut killed = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let mut exited = std::process::Command::new("true").spawn().unwrap();
        assert!(!is_dying_of_signal(killed.id()));
        killed.kill().unwrap();
        // Neither is reaped yet, so /proc still shows both.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while (is_alive(killed.id()) || is_alive(exited.id())) && std::time::Instant::now() < until
        {
            std::thread::yield_now();
        }
        let found = [&killed, &exited].map(|child| is_dying_of_signal(child.id()));
        killed.wait().unwrap();
        exited.wait().unwrap();
        assert_eq!(found, [true, false]);
    }

    /// Without this count the watch would have to measure the whole tree at every pass.
    #[test]
    fn bytes_written_by_a_reaped_child_are_counted() {
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        let dir = tempfile::tempdir_in(".").unwrap();
        let kind = rustix::fs::statfs(dir.path()).unwrap().f_type as u64;
        if kind == TMPFS_MAGIC {
            eprintln!("UNAVAILABLE: the test directory is on a tmpfs, not on a disk");
            return;
        }
        let before = written_bytes(ProcessSet::Descendants);
        let status = std::process::Command::new("dd")
            .args(["if=/dev/zero", "of=f", "bs=64k", "count=16"])
            .current_dir(dir.path())
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        let after = written_bytes(ProcessSet::Descendants);
        assert!(after.gross >= before.gross + (1 << 20), "{after:?}");
    }

    #[test]
    fn open_descendant_finds_a_child_and_no_other_process() {
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", "read line"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        assert!(descendants().contains(&child.id()));
        assert!(descendants_by_parents().contains(&child.id()));
        assert!(open_descendant(child.id()).is_some());
        let parent = relations(std::process::id()).unwrap().parent;
        assert!(open_descendant(parent).is_none() && open_descendant(1).is_none());
        assert!(!descendants().contains(&parent));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(open_descendant(child.id()).is_none());
    }
}
