//! The run's processes as /proc tells of them: which they are, what each wrote, used and holds.
//!
//! Everything is read with a bound, and what cannot be read is said to be so: a process may make itself
//! unreadable, lose its first thread, or be gone after a moment.

mod census;
mod files;
mod pause;
mod queues;

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::spec::{Layer, Spec};
use crate::sys;
use crate::sys::procfs::{SMALL_FILE_BYTES, numbers_in, open_pidfd, read};

pub use census::{CensusRequest, ProcessCensus, memory_at_most};
pub use files::{ScanResult, descriptors_at_most, descriptors_in_flight, file_mappings};
pub use files::{map_deleted_files, open_files};
pub use pause::{PauseVerdict, UnexplainedGrowth, pause};

/// Bytes of /proc/PID/maps read in one pass. More cannot be read in the time between two looks.
const MAPS_BYTES_MAX: usize = 16 << 20;

/// Which processes are the run's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessSet {
    /// All that this pid namespace has.
    Namespace,
    /// This process and its descendants. It is their subreaper, so that whoever loses a parent becomes its child: none
    /// leaves the tree, and the tree is empty when this process has no child.
    Descendants,
}

impl ProcessSet {
    /// Whose processes are the run's.
    pub fn of(spec: &Spec) -> ProcessSet {
        match spec.has(Layer::PidNamespace) {
            true => ProcessSet::Namespace,
            false => ProcessSet::Descendants,
        }
    }
}

/// What the kernel says that the live processes, and those they or we reaped, have written.
#[derive(Clone, Copy, Debug, Default)]
pub struct WrittenBytes {
    pub gross: u64,
    /// By live processes alone, without what never came to the disk, because it was deleted before.
    pub net: u64,
    /// Some process would not be looked into.
    pub unreadable: bool,
}

/// This process and all others of the run.
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

/// The processes below this one. One that is being born may be missing: whoever must have them all asks again.
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

/// `None`: this kernel does not list children (CONFIG_PROC_CHILDREN).
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

/// The same by asking every process of the host for its parent.
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

/// Whom a process belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relations {
    pub parent: u32,
    pub group: u32,
}

pub fn relations(pid: u32) -> Option<Relations> {
    let stat = read(format!("/proc/{pid}/stat"), SMALL_FILE_BYTES)?;
    // The name may hold anything; the fields follow its last parenthesis: state, parent, group.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(1);
    let mut next = || fields.next()?.parse().ok();
    Some(Relations {
        parent: next()?,
        group: next()?,
    })
}

/// Whether a signal has ended it and the kernel is taking it down: its first thread, which is not one that left earlier.
pub fn is_dying_of_signal(pid: u32) -> bool {
    /// `PF_SIGNALED` in the kernel's sched.h.
    const SIGNALED: u64 = 0x400;
    let stat = read(format!("/proc/{pid}/stat"), SMALL_FILE_BYTES).unwrap_or_default();
    // After the name: state, parent, group, session, terminal, its group, flags.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let flags = fields.split_ascii_whitespace().nth(6);
    let flags = flags.and_then(|flags| flags.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & SIGNALED != 0)
}

/// Deeper families are nobody's; a chain that long has changed under our eyes.
const GENERATIONS_MAX: usize = 65_536;

/// Holds a process that is below this one. What is held first and found to be of the family afterwards is either that
/// process or gone, so a signal through the descriptor reaches nobody else.
pub fn open_descendant(pid: u32) -> Option<OwnedFd> {
    let held = open_pidfd(pid)?;
    let own = std::process::id();
    let mut at = pid;
    for _ in 0..GENERATIONS_MAX {
        match relations(at).map(|of| of.parent) {
            Some(parent) if parent == own => return Some(held),
            Some(0 | 1) => return None,
            Some(parent) => at = parent,
            // Gone; or not dumpable, and so not in /proc at all where that is mounted with hidepid=2. Its parent lists it.
            None => return descendants().contains(&pid).then_some(held),
        }
    }
    None
}

/// Holds every process below this one, as [`open_descendant`] does for one, in time that grows with their number only.
pub fn open_descendants() -> Vec<(u32, OwnedFd)> {
    let each = |pid: u32| Some((pid, open_pidfd(pid)?));
    let mut held: Vec<(u32, OwnedFd)> = descendants().into_iter().filter_map(each).collect();
    let still: HashSet<u32> = descendants().into_iter().collect();
    held.retain(|(pid, _)| still.contains(pid));
    held
}

/// Whether a process is more than a corpse waiting to be reaped.
fn is_alive(pid: u32) -> bool {
    let stat = read(format!("/proc/{pid}/stat"), SMALL_FILE_BYTES).unwrap_or_default();
    let Some((_, rest)) = stat.rsplit_once(')') else {
        // Not there to be read, and not gone either: hidden (see `open_descendant`).
        return descendants().contains(&pid);
    };
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let threads = fields.get(17).and_then(|n| n.parse::<u32>().ok());
    let corpse = matches!(fields.first(), Some(&"Z" | &"X")) && threads.is_none_or(|n| n <= 1);
    // Who has given up all memory is on the way out, and cannot be looked into any more.
    let has_memory = || {
        let sizes = proc_dirs(pid).filter_map(|dir| read(dir.join("statm"), SMALL_FILE_BYTES));
        sizes.into_iter().any(|text| !text.starts_with("0 "))
    };
    !corpse && has_memory()
}

/// The directories in which a process's files can be read: its own or, where its first thread has ended, those
/// of its threads. Threads share their descriptors: seccomp refuses to make one that does not.
fn proc_dirs(pid: u32) -> impl Iterator<Item = PathBuf> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let threads = process.join("task");
    let of_threads = numbers_in(&threads).map(move |tid| threads.join(tid.to_string()));
    [process].into_iter().chain(of_threads)
}

fn read_first(pid: u32, name: &str, bytes_max: usize) -> Option<String> {
    let texts = proc_dirs(pid).filter_map(|dir| read(dir.join(name), bytes_max));
    texts.into_iter().find(|text| !text.is_empty())
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(name));
    let number = line.map(|n| n.trim().trim_end_matches("kB").trim_end());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// What all processes of the run have written. Init is among them: what it reaped is credited to it.
pub fn written(process_set: ProcessSet) -> WrittenBytes {
    // What we reaped; of its own, init writes nothing to speak of. Our own file in /proc would tell the same, and also what
    // of it was deleted again, but it is root's, as that of any process without a core dump, and closed to us.
    let mut all = WrittenBytes {
        gross: sys::bytes_written_by_reaped(),
        ..WrittenBytes::default()
    };
    let own = std::process::id();
    for pid in pids(process_set).into_iter().filter(|pid| *pid != own) {
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
    fn this_process_is_found_alive_with_its_times() {
        let own = std::process::id();
        assert!(is_alive(own) && pids(ProcessSet::Namespace).contains(&own));
        assert!(pids(ProcessSet::Descendants).contains(&own));
        let mut census = ProcessCensus::new(ProcessSet::Descendants);
        let wanted = CensusRequest {
            cpu: true,
            tasks: true,
            memory: Some(u64::MAX),
            files_in_memory: 0,
        };
        census.take(wanted, &mut || true);
        assert!(memory_at_most(ProcessSet::Namespace) > 0);
    }

    /// Or the watch would walk through the whole tree at every look, because it cannot tell.
    #[test]
    fn a_death_by_a_signal_is_told_from_life_and_from_an_exit() {
        let mut killed = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let mut exited = std::process::Command::new("true").spawn().unwrap();
        assert!(!is_dying_of_signal(killed.id()));
        killed.kill().unwrap();
        // Not reaped yet, so both are still there to be looked at.
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

    #[test]
    fn what_a_dead_child_has_written_is_known() {
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        let dir = tempfile::tempdir_in(".").unwrap();
        let kind = rustix::fs::statfs(dir.path()).unwrap().f_type as u64;
        if kind == TMPFS_MAGIC {
            eprintln!("UNAVAILABLE: nothing is written to a disk here");
            return;
        }
        let before = written(ProcessSet::Descendants);
        let status = std::process::Command::new("dd")
            .args(["if=/dev/zero", "of=f", "bs=64k", "count=16"])
            .current_dir(dir.path())
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        let after = written(ProcessSet::Descendants);
        assert!(after.gross >= before.gross + (1 << 20), "{after:?}");
    }

    #[test]
    fn a_child_is_found_held_and_told_from_a_stranger() {
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
