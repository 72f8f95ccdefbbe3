//! The run's share of the host's table of open files (`fs.file-max`).
//!
//! The kernel counts open files for the whole host only. So there are two upper bounds on the run's open files, and the
//! smaller one is charged to the run:
//!
//! - by how much the host's count has grown since the program started;
//! - how many files the run can hold: one for each slot in its processes' descriptor tables, and one for each mapping
//!   of a file, since a mapping keeps its file open after the descriptor is closed. Files that processes share after a
//!   fork count for each of them; this stops a run only if the host's count has grown too.
//!
//! The second bound does not include files that are only in flight over a unix socket (RLIMIT_NOFILE bounds these for
//! each user), nor files that only a system call in progress holds (a few for each thread).
//!
//! Both are counted only if the host's count has grown by more than the run's share. Init counts descriptors itself, at
//! most twenty times a second, because the files of /proc that it reads for this never block on a process. The list of
//! mappings can block, so only the watch thread counts mappings, together with the descriptors.

use std::time::{Duration, Instant};

use super::TICK;
use crate::inside::processes::{self, ProcessSet};
use crate::outcome::Stop;
use crate::spec::Limits;
use crate::sys::procfs;

/// Counting takes at most one part in this many of the time.
const LOOK_SHARE: u32 = 5;

/// Checks the run against its share of the host's open files.
#[derive(Clone)]
pub struct FileTable {
    share: u64,
    process_set: ProcessSet,
    /// The smallest number of open files that the whole host has had since the program started.
    smallest_count: u64,
    last_look: Instant,
    last_look_duration: Duration,
}

impl FileTable {
    /// Returns `None` if the run's other limits already keep it below its share.
    pub fn new(limits: &Limits, process_set: ProcessSet) -> Option<Self> {
        Some(FileTable {
            share: limits.open_files_of_run?,
            process_set,
            smallest_count: 0,
            last_look: Instant::now(),
            last_look_duration: Duration::ZERO,
        })
    }

    /// The program is about to run, and the host has this many files open.
    pub fn begin(&mut self, open: Option<u64>) {
        self.smallest_count = open.unwrap_or(0);
    }

    /// Whether the host's count has grown by more than the run's share.
    pub fn has_grown(&mut self) -> bool {
        // If the count cannot be read, assume the worst.
        let now = open_on_host().unwrap_or(u64::MAX);
        self.smallest_count = self.smallest_count.min(now);
        now - self.smallest_count > self.share
    }

    /// Compares the number of descriptors with the share. Never blocks on a process.
    pub fn look_at_descriptors(&mut self) -> Option<Stop> {
        self.look(&mut |process_set| processes::descriptors_at_most(process_set))
    }

    /// Compares the number of descriptors and mappings with the share. Asks before each process whether to continue.
    pub fn look_at_mappings(&mut self, should_continue: &mut dyn FnMut() -> bool) -> Option<Stop> {
        self.look(&mut |process_set| {
            let descriptors = processes::descriptors_at_most(process_set);
            descriptors.saturating_add(processes::count_file_mappings(process_set, should_continue))
        })
    }

    fn look(&mut self, count: &mut dyn FnMut(ProcessSet) -> u64) -> Option<Stop> {
        let pause = (self.last_look_duration * LOOK_SHARE).max(TICK / 2);
        if self.last_look.elapsed() < pause {
            return None;
        }
        let start = Instant::now();
        let exceeded = self.has_grown() && count(self.process_set) > self.share;
        (self.last_look, self.last_look_duration) = (Instant::now(), start.elapsed());
        exceeded.then_some(Stop::OpenFiles)
    }
}

/// How many files the whole host has open.
pub fn open_on_host() -> Option<u64> {
    let text = procfs::read("/proc/sys/fs/file-nr", 256)?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_smaller_of_two_bounds_is_charged_to_the_run() {
        let table = |share, smallest_count| FileTable {
            share,
            process_set: ProcessSet::Descendants,
            smallest_count,
            last_look: Instant::now() - Duration::from_secs(1),
            last_look_duration: Duration::ZERO,
        };
        let open = open_on_host().unwrap();
        assert!(open > 0);
        let look = |mut table: FileTable, held_files| table.look(&mut |_| held_files);
        // Other processes of this host open and close files meanwhile.
        assert_eq!(look(table(0, 0), 1), Some(Stop::OpenFiles));
        assert_eq!(look(table(10, 0), 10), None);
        assert_eq!(look(table(1 << 40, 0), u64::MAX), None);
        let mut closed_since = table(1 << 40, u64::MAX);
        assert!(!closed_since.has_grown());
        assert!(closed_since.smallest_count < u64::MAX);
    }
}
