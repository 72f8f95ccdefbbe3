//! The run's share of the table of open files that the whole host has one of (`fs.file-max`).
//!
//! The kernel counts open files for the host, and for nobody in particular. So there are two upper bounds, and the run answers
//! for the smaller: by how much the host's count has grown since the program began, and how many files the run can hold. It can
//! hold one for each place in its processes' tables of descriptors and one for each mapping of a file, since a mapping keeps its
//! file open after the descriptor is closed. What processes share after a fork counts for each of them: that stops a
//! run only if the host's count has grown too.
//!
//! Neither bound has the files that only wait in a unix socket (RLIMIT_NOFILE bounds them for the user) or that only a
//! system call holds (a few for each thread).
//!
//! Init counts descriptors itself, at every turn of its loop: no file that it reads for this waits for a process. Mappings
//! are in files that do, so the watch counts these.

use std::time::{Duration, Instant};

use super::TICK;
use crate::inside::processes::{self, ProcessSet};
use crate::outcome::Stop;
use crate::spec::Limits;
use crate::sys::procfs;

/// A look takes at most one part in so many of the time.
const LOOK_SHARE: u32 = 5;

#[derive(Clone)]
pub struct FileTable {
    share: u64,
    process_set: ProcessSet,
    /// Open files of the whole host when the program began, or fewer if others have closed some since.
    before: u64,
    looked_at: Instant,
    took: Duration,
}

impl FileTable {
    /// `None`: the run cannot pass its share.
    pub fn new(limits: &Limits, process_set: ProcessSet) -> Option<Self> {
        Some(FileTable {
            share: limits.open_files_of_run?,
            process_set,
            before: 0,
            looked_at: Instant::now(),
            took: Duration::ZERO,
        })
    }

    /// The program is about to run, and the host has so many files open.
    pub fn begin(&mut self, open: Option<u64>) {
        self.before = open.unwrap_or(0);
    }

    /// Whether the host's count has grown by more than the run's share.
    pub fn has_grown(&mut self) -> bool {
        // One that cannot be read may be any.
        let now = open_on_host().unwrap_or(u64::MAX);
        self.before = self.before.min(now);
        now - self.before > self.share
    }

    pub fn look_at_descriptors(&mut self) -> Option<Stop> {
        self.look(&mut |process_set| processes::descriptors_at_most(process_set))
    }

    /// Descriptors and mappings. Asks before each process whether to go on.
    pub fn look_at_mappings(&mut self, go_on: &mut dyn FnMut() -> bool) -> Option<Stop> {
        self.look(&mut |process_set| {
            let descriptors = processes::descriptors_at_most(process_set);
            descriptors.saturating_add(processes::file_mappings(process_set, go_on))
        })
    }

    fn look(&mut self, count: &mut dyn FnMut(ProcessSet) -> u64) -> Option<Stop> {
        let pause = (self.took * LOOK_SHARE).max(TICK / 2);
        if self.looked_at.elapsed() < pause {
            return None;
        }
        let start = Instant::now();
        let passed = self.has_grown() && count(self.process_set) > self.share;
        (self.looked_at, self.took) = (Instant::now(), start.elapsed());
        passed.then_some(Stop::OpenFiles)
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
    fn the_run_answers_for_the_smaller_of_two_bounds() {
        let table = |share, before| FileTable {
            share,
            process_set: ProcessSet::Descendants,
            before,
            looked_at: Instant::now() - Duration::from_secs(1),
            took: Duration::ZERO,
        };
        let open = open_on_host().unwrap();
        assert!(open > 0);
        let held = |mut table: FileTable, held| table.look(&mut |_| held);
        // Others of this host open and close some meanwhile.
        assert_eq!(held(table(0, 0), 1), Some(Stop::OpenFiles));
        assert_eq!(held(table(10, 0), 10), None);
        assert_eq!(held(table(1 << 40, 0), u64::MAX), None);
        let mut closed_since = table(1 << 40, u64::MAX);
        assert!(!closed_since.has_grown());
        assert!(closed_since.before < u64::MAX);
    }
}
