//! Stops the run's processes for a moment, so that they release files that only a system call in progress holds.
//!
//! A thread inside a system call holds the files that the call was given, even after another thread has closed their
//! descriptors: `sendfile` into a full pipe, `flock` on a locked file, `sendmsg` of descriptors to a peer that does not
//! read. Such a file has no name, no descriptor and no mapping, and nothing in /proc shows it. SIGSTOP makes every
//! waiting call return to user space (signal(7)). The kernel frees the file on the way, and restarts the call with a
//! descriptor that is closed by then. So if a file system holds less after a pause than before, such calls held the
//! difference.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use super::{ProcessSet, open_descendants, other_pids};
use crate::sys;
use crate::sys::procfs::{ProcessStat, numbers_in, open_pidfd};

/// How long to wait for all threads to stop. A thread that writes one large block, or waits for a disk, stops only
/// afterwards.
const STOP_WAIT_MAX: Duration = Duration::from_secs(1);
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// The shortest time between two pauses. A pause interrupts calls that ordinary programs make, such as epoll_wait.
const PAUSE_INTERVAL: Duration = Duration::from_millis(500);
/// The same after a pause that freed something: a program that hides files goes on writing meanwhile.
const PAUSE_INTERVAL_AFTER_FREEING: Duration = Duration::from_millis(50);
/// How many pauses must agree before hidden growth is charged to the run. Other processes of the host may free space
/// during one pause, but hardly during each.
const PAUSES_FOR_VERDICT: u32 = 2;

/// The processes that were stopped. Dropping this value continues them.
pub struct PausedProcesses {
    stopped: Vec<(u32, OwnedFd)>,
    /// Whether every process with several threads has stopped.
    pub all_stopped: bool,
}

impl Drop for PausedProcesses {
    fn drop(&mut self) {
        // Continue children first, so that a parent that waits for stopped children (WUNTRACED) finds none.
        self.stopped.sort_by_key(|(pid, _)| std::cmp::Reverse(*pid));
        for (_, pidfd) in &self.stopped {
            let _ = sys::signal_pidfd(pidfd.as_fd(), libc::SIGCONT);
        }
    }
}

/// Stops all processes of the run except this one, and waits for them, at most [`STOP_WAIT_MAX`].
pub fn pause(process_set: ProcessSet) -> PausedProcesses {
    let until = Instant::now() + STOP_WAIT_MAX;
    let mut stopped: HashMap<u32, Option<OwnedFd>> = HashMap::new();
    let all_stopped = loop {
        // A process that is new in this round may have forked another one since, so go through the list again.
        let mut all = true;
        for (pid, pidfd) in open_processes(process_set) {
            if stopped.contains_key(&pid) {
                all &= thread_counts(pid).hides_nothing();
                continue;
            }
            // Do not continue a process later that the program itself has stopped.
            let by_us = thread_counts(pid).running > 0;
            if by_us {
                all = false;
                let _ = sys::signal_pidfd(pidfd.as_fd(), libc::SIGSTOP);
            }
            stopped.insert(pid, by_us.then_some(pidfd));
        }
        if all || Instant::now() >= until {
            break all;
        }
        std::thread::sleep(STOP_POLL_INTERVAL);
    };
    let by_us = |(pid, pidfd): (u32, Option<OwnedFd>)| Some((pid, pidfd?));
    PausedProcesses {
        stopped: stopped.into_iter().filter_map(by_us).collect(),
        all_stopped,
    }
}

/// Opens a pidfd for every process of the run except this one.
fn open_processes(process_set: ProcessSet) -> Vec<(u32, OwnedFd)> {
    match process_set {
        ProcessSet::Descendants => open_descendants(),
        ProcessSet::Namespace => {
            let opened = |pid| Some((pid, open_pidfd(pid)?));
            other_pids(process_set).filter_map(opened).collect()
        }
    }
}

/// How many threads a process has.
struct ThreadCounts {
    all: usize,
    /// Threads that are neither stopped nor dead.
    running: usize,
}

impl ThreadCounts {
    /// Whether the process cannot hold a hidden file: all threads have stopped, or there is only one. No other thread
    /// can close a descriptor that a single thread uses.
    fn hides_nothing(&self) -> bool {
        self.running == 0 || self.all == 1
    }
}

fn thread_counts(pid: u32) -> ThreadCounts {
    let dir = format!("/proc/{pid}/task");
    let state = |tid: u32| ProcessStat::read(format!("{dir}/{tid}"))?.state();
    let states: Vec<char> = numbers_in(Path::new(&dir)).filter_map(state).collect();
    let is_running = |state: &&char| !matches!(state, 'T' | 't' | 'Z' | 'X');
    ThreadCounts {
        all: states.len(),
        running: states.iter().filter(is_running).count(),
    }
}

/// What a whole file system, or the host's shared memory, holds beyond what was measured of the run. It belongs to
/// other processes of the host, or system calls of the run hold it. A pause shows which.
pub struct UnexplainedGrowth {
    /// What the rest of the host holds, as far as known. Signed, because the run's inputs may have been there at the
    /// start.
    others: i64,
    /// Growth up to this amount is ignored.
    slack: u64,
    paused_at: Option<Instant>,
    /// How much all pauses together have freed.
    freed: u64,
    freeing_pauses: u32,
    incomplete_pauses: u32,
}

/// What the pauses so far have shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseVerdict {
    Nothing,
    /// System calls have held this much in all.
    Hidden(u64),
    /// Threads do not stop, so what they hold is unknown.
    NotStopped,
}

impl UnexplainedGrowth {
    pub fn new(in_use: u64, slack: u64) -> Self {
        UnexplainedGrowth {
            others: in_use as i64,
            slack,
            paused_at: None,
            freed: 0,
            freeing_pauses: 0,
            incomplete_pauses: 0,
        }
    }

    /// Whether so much more is in use than was measured that the run may hide it, and a pause is due.
    pub fn needs_pause(&mut self, in_use: u64, measured: u64) -> bool {
        let unexplained = in_use as i64 - measured as i64;
        if unexplained <= self.others.saturating_add_unsigned(self.slack) {
            self.others = self.others.min(unexplained);
            return false;
        }
        let interval = match self.freeing_pauses {
            0 => PAUSE_INTERVAL,
            _ => PAUSE_INTERVAL_AFTER_FREEING,
        };
        self.paused_at.is_none_or(|at| at.elapsed() >= interval)
    }

    /// Records what was in use before a pause and during it, and returns the verdict.
    pub fn note_pause(
        &mut self,
        before: u64,
        after: u64,
        measured: u64,
        all_stopped: bool,
    ) -> PauseVerdict {
        self.paused_at = Some(Instant::now());
        self.others = after as i64 - measured as i64;
        let freed = before.saturating_sub(after);
        if freed > self.slack / 2 {
            self.freed += freed;
            self.freeing_pauses += 1;
        }
        self.incomplete_pauses = match all_stopped {
            true => 0,
            false => self.incomplete_pauses + 1,
        };
        if self.freeing_pauses >= PAUSES_FOR_VERDICT {
            return PauseVerdict::Hidden(self.freed);
        }
        match self.incomplete_pauses >= PAUSES_FOR_VERDICT {
            true => PauseVerdict::NotStopped,
            false => PauseVerdict::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_that_a_pause_does_not_free_needs_no_second_pause() {
        let mut disk = UnexplainedGrowth::new(1000, 100);
        // The run's inputs took 200 from the start.
        assert!(!disk.needs_pause(1000, 200));
        assert!(!disk.needs_pause(1050, 200));
        assert!(disk.needs_pause(1500, 200));
        assert_eq!(
            disk.note_pause(1500, 1500, 200, true),
            PauseVerdict::Nothing
        );
        assert!(!disk.needs_pause(1580, 200));
        assert!(!disk.needs_pause(1480, 100), "it deleted something");
    }

    #[test]
    fn two_pauses_that_free_something_show_hidden_files() {
        let mut disk = UnexplainedGrowth::new(0, 100);
        assert!(disk.needs_pause(500, 0));
        assert_eq!(disk.note_pause(500, 0, 0, true), PauseVerdict::Nothing);
        assert_eq!(
            disk.note_pause(600, 20, 0, true),
            PauseVerdict::Hidden(1080)
        );
    }

    #[test]
    fn two_incomplete_pauses_in_a_row_show_threads_that_do_not_stop() {
        let mut disk = UnexplainedGrowth::new(0, 100);
        assert_eq!(disk.note_pause(500, 500, 0, false), PauseVerdict::Nothing);
        assert_eq!(disk.note_pause(900, 900, 0, true), PauseVerdict::Nothing);
        assert_eq!(disk.note_pause(1300, 1300, 0, false), PauseVerdict::Nothing);
        assert_eq!(
            disk.note_pause(1800, 1800, 0, false),
            PauseVerdict::NotStopped
        );
    }
}
