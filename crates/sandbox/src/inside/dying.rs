//! After SIGKILL: whether the run's processes make progress towards their death, and how long to wait for them.
//!
//! The kernel may need seconds to take down the address spaces of many processes, and the program decides how large
//! these are. So there is no fixed time after which a process counts as one that cannot die.

use std::time::{Duration, Instant};

use super::processes::{self, ProcessSet};
use crate::sys::procfs::{self, ProcessStat};

/// The runner ends the run this long after init's own deadline. Init also gives up on dying processes that make no
/// progress for this long.
pub const BACKSTOP: Duration = Duration::from_millis(700);
/// With progress, init waits at most this long for the dying processes.
pub const DYING_TIME_MAX: Duration = Duration::from_secs(30);
/// How often progress is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Processes that were sent SIGKILL.
pub struct DyingProcesses {
    process_set: ProcessSet,
    since: Instant,
    /// `None` before the first check.
    checked_at: Option<Instant>,
    progress_at: Instant,
    count: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DyingProgress {
    Made,
    None,
}

impl DyingProcesses {
    pub fn new(process_set: ProcessSet) -> Self {
        let now = Instant::now();
        DyingProcesses {
            process_set,
            since: now,
            checked_at: None,
            progress_at: now,
            count: usize::MAX,
        }
    }

    /// Checks for progress, or returns `None` if the last check was less than [`CHECK_INTERVAL`] ago.
    ///
    /// The first check counts as progress. After that, progress means that there are fewer processes than before, or
    /// that one of them is runnable: none of the program's code runs any more, so a runnable process is one that the
    /// kernel is taking down. The number alone is not enough, because after a long time all processes may end at the
    /// same moment. A process that cannot die waits for something, so it is not runnable.
    pub fn check(&mut self) -> Option<DyingProgress> {
        let before = self.checked_at.unwrap_or(self.since);
        if before.elapsed() < CHECK_INTERVAL {
            return None;
        }
        let left: Vec<u32> = processes::other_pids(self.process_set).collect();
        let progress = left.len() < self.count || left.iter().any(|pid| is_runnable(*pid));
        self.count = left.len();
        let now = Instant::now();
        self.checked_at = Some(now);
        if !progress {
            return Some(DyingProgress::None);
        }
        self.progress_at = now;
        Some(DyingProgress::Made)
    }

    /// Whether the remaining processes made no progress for [`BACKSTOP`], or took longer than [`DYING_TIME_MAX`].
    pub fn is_wait_over(&self) -> bool {
        self.progress_at.elapsed() >= BACKSTOP || self.since.elapsed() >= DYING_TIME_MAX
    }
}

/// Whether a thread of the process is running or ready to run.
fn is_runnable(pid: u32) -> bool {
    let state = |dir: String| ProcessStat::read(dir)?.state();
    match state(format!("/proc/{pid}")) {
        Some('R') => true,
        // The first thread may be dead or waiting while other threads are being taken down.
        Some(_) => procfs::threads(pid)
            .any(|thread| state(format!("/proc/{pid}/task/{thread}")) == Some('R')),
        None => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_busy_process_is_runnable_and_a_sleeping_one_is_not() {
        let mut sleeping = Command::new("sleep").arg("60").spawn().unwrap();
        let mut busy = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while (is_runnable(sleeping.id()) || !is_runnable(busy.id())) && Instant::now() < until {
            std::thread::yield_now();
        }
        let found = (is_runnable(sleeping.id()), is_runnable(busy.id()));
        for child in [&mut sleeping, &mut busy] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(found, (false, true));
        assert!(!is_runnable(busy.id()));
    }
}
