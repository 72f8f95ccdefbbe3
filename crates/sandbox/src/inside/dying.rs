//! After SIGKILL: whether the run's processes make progress towards their death, and how long to wait for them.
//!
//! The kernel may need seconds to take down the address spaces of many processes, and the program decides how large
//! these are. So there is no fixed time after which a process counts as one that cannot die.

use std::time::{Duration, Instant};

use super::processes::{self, ProcessSet};
use crate::sys::procfs;

/// How much later than init the runner acts: this long after init should have ended the run, the runner ends it. Init
/// also gives up on dying processes that make no progress for this long.
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
        let own = std::process::id();
        let mut left = processes::pids(self.process_set);
        left.retain(|pid| *pid != own);
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

    /// Whether the remaining processes are not worth waiting for any longer.
    pub fn is_hopeless(&self) -> bool {
        self.progress_at.elapsed() >= BACKSTOP || self.since.elapsed() >= DYING_TIME_MAX
    }
}

/// Whether a thread of the process is running or ready to run.
fn is_runnable(pid: u32) -> bool {
    let state = |stat: String| Some(stat.rsplit_once(')')?.1.trim_start().starts_with('R'));
    let stat = |path: String| procfs::read(path, 4096).and_then(state);
    match stat(format!("/proc/{pid}/stat")) {
        Some(true) => true,
        // The first thread may be dead or waiting while other threads are being taken down.
        Some(false) => procfs::threads(pid)
            .any(|thread| stat(format!("/proc/{pid}/task/{thread}/stat")) == Some(true)),
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
