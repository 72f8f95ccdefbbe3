//! Stops the run's processes for a moment, so that they let go of what only a system call of theirs holds.
//!
//! A thread inside a system call holds the files that the call was given, also after another thread has closed
//! their descriptors: `sendfile` into a full pipe, `flock` on a locked file, `sendmsg` of descriptors to a peer that does not
//! read. Such a file has no name, no descriptor and no mapping, and nothing in /proc shows it. SIGSTOP makes every call that
//! waits return to user space first (signal(7)); the file is freed on the way, and the call is made anew with a
//! descriptor that is closed. What a file system holds less after a pause than before it was held by such calls.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use super::{ProcessSet, open_descendants, pids};
use crate::sys;
use crate::sys::procfs::{SMALL_FILE_BYTES, numbers_in, open_pidfd, read};

/// A thread that writes one large piece, or waits for a disk, stops only after that.
const ANSWER_AT_MOST: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// A pause interrupts calls that ordinary programs make, such as epoll_wait.
const PAUSE_EVERY: Duration = Duration::from_millis(500);
/// After a pause that freed something: who hides writes on meanwhile.
const PAUSE_AGAIN: Duration = Duration::from_millis(50);
/// Others may free space during one pause, but hardly during each.
const CERTAIN: u32 = 2;

/// The processes that were stopped go on when this is dropped.
pub struct PausedProcesses {
    stopped: Vec<(u32, OwnedFd)>,
    /// Every process whose threads share descriptors has stopped.
    pub answered: bool,
}

impl Drop for PausedProcesses {
    fn drop(&mut self) {
        // Children first: a parent that waits for stopped children finds none.
        self.stopped.sort_by_key(|(pid, _)| std::cmp::Reverse(*pid));
        for (_, held) in &self.stopped {
            let _ = sys::signal_pidfd(held.as_fd(), libc::SIGCONT);
        }
    }
}

/// Stops all processes of the run but this one, and waits for them, with a bound.
pub fn pause(process_set: ProcessSet) -> PausedProcesses {
    let until = Instant::now() + ANSWER_AT_MOST;
    let mut stopped: HashMap<u32, Option<OwnedFd>> = HashMap::new();
    let answered = loop {
        // One that is found in this round may have been born after its parent's list was read.
        let mut all = true;
        for (pid, held) in held_processes(process_set) {
            if stopped.contains_key(&pid) {
                all &= threads(pid).is_harmless();
                continue;
            }
            // One that the program itself has stopped stays so.
            let by_us = threads(pid).running > 0;
            if by_us {
                all = false;
                let _ = sys::signal_pidfd(held.as_fd(), libc::SIGSTOP);
            }
            stopped.insert(pid, by_us.then_some(held));
        }
        if all || Instant::now() >= until {
            break all;
        }
        std::thread::sleep(LOOK_AGAIN);
    };
    let by_us = |(pid, held): (u32, Option<OwnedFd>)| Some((pid, held?));
    PausedProcesses {
        stopped: stopped.into_iter().filter_map(by_us).collect(),
        answered,
    }
}

fn held_processes(process_set: ProcessSet) -> Vec<(u32, OwnedFd)> {
    match process_set {
        ProcessSet::Descendants => open_descendants(),
        ProcessSet::Namespace => {
            let own = std::process::id();
            let others = pids(process_set).into_iter().filter(|pid| *pid != own);
            others
                .filter_map(|pid| Some((pid, open_pidfd(pid)?)))
                .collect()
        }
    }
}

struct Threads {
    all: usize,
    /// Neither stopped nor dead.
    running: usize,
}

impl Threads {
    /// A single thread holds nothing that its own table does not show: nobody else can close its descriptors.
    fn is_harmless(&self) -> bool {
        self.running == 0 || self.all == 1
    }
}

fn threads(pid: u32) -> Threads {
    let dir = format!("/proc/{pid}/task");
    let state = |tid: u32| -> Option<char> {
        let stat = read(format!("{dir}/{tid}/stat"), SMALL_FILE_BYTES)?;
        stat.rsplit_once(')')?.1.trim_start().chars().next()
    };
    let states: Vec<char> = numbers_in(Path::new(&dir)).filter_map(state).collect();
    let is_running = |state: &&char| !matches!(state, 'T' | 't' | 'Z' | 'X');
    Threads {
        all: states.len(),
        running: states.iter().filter(is_running).count(),
    }
}

/// What a whole file system, or the host's shared memory, holds beyond what was measured of the run. It is others', or
/// held by calls of the run's; a pause tells which.
pub struct UnexplainedGrowth {
    /// Others hold no more than this.
    others: i64,
    slack: u64,
    paused_at: Option<Instant>,
    /// What pauses have freed, and how many of them.
    freed: u64,
    freeing_pauses: u32,
    unanswered_pauses: u32,
}

/// What was learnt from a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseVerdict {
    Nothing,
    /// So much has been held by calls in all.
    Hidden(u64),
    /// Threads do not stop, and hold whatever they hold.
    Unanswered,
}

impl UnexplainedGrowth {
    pub fn new(in_use: u64, slack: u64) -> Self {
        UnexplainedGrowth {
            others: in_use as i64,
            slack,
            paused_at: None,
            freed: 0,
            freeing_pauses: 0,
            unanswered_pauses: 0,
        }
    }

    /// Whether so much has come to be in use, beyond what was measured, that it may be hidden.
    pub fn needs_pause(&mut self, in_use: u64, measured: u64) -> bool {
        let unexplained = in_use as i64 - measured as i64;
        if unexplained <= self.others.saturating_add_unsigned(self.slack) {
            self.others = self.others.min(unexplained);
            return false;
        }
        let interval = match self.freeing_pauses {
            0 => PAUSE_EVERY,
            _ => PAUSE_AGAIN,
        };
        self.paused_at.is_none_or(|at| at.elapsed() >= interval)
    }

    /// What was in use before a pause, and in the midst of it.
    pub fn note_pause(
        &mut self,
        before: u64,
        after: u64,
        measured: u64,
        answered: bool,
    ) -> PauseVerdict {
        self.paused_at = Some(Instant::now());
        self.others = after as i64 - measured as i64;
        let freed = before.saturating_sub(after);
        if freed > self.slack / 2 {
            self.freed += freed;
            self.freeing_pauses += 1;
        }
        self.unanswered_pauses = match answered {
            true => 0,
            false => self.unanswered_pauses + 1,
        };
        if self.freeing_pauses >= CERTAIN {
            return PauseVerdict::Hidden(self.freed);
        }
        match self.unanswered_pauses >= CERTAIN {
            true => PauseVerdict::Unanswered,
            false => PauseVerdict::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_hold_is_asked_about_once() {
        let mut disk = UnexplainedGrowth::new(1000, 100);
        // The run had inputs of 200 from the start.
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
    fn hidden_is_what_two_pauses_free() {
        let mut disk = UnexplainedGrowth::new(0, 100);
        assert!(disk.needs_pause(500, 0));
        assert_eq!(disk.note_pause(500, 0, 0, true), PauseVerdict::Nothing);
        assert_eq!(
            disk.note_pause(600, 20, 0, true),
            PauseVerdict::Hidden(1080)
        );
    }

    #[test]
    fn who_does_not_stop_twice_in_a_row_hides() {
        let mut disk = UnexplainedGrowth::new(0, 100);
        assert_eq!(disk.note_pause(500, 500, 0, false), PauseVerdict::Nothing);
        assert_eq!(disk.note_pause(900, 900, 0, true), PauseVerdict::Nothing);
        assert_eq!(disk.note_pause(1300, 1300, 0, false), PauseVerdict::Nothing);
        assert_eq!(
            disk.note_pause(1800, 1800, 0, false),
            PauseVerdict::Unanswered
        );
    }
}
