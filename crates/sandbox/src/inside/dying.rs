//! After SIGKILL: whether the run's processes come nearer to their end, and how long that is waited for.
//!
//! Taking down the address spaces of many processes takes the kernel seconds, and the program decides how large they
//! are. So there is no fixed time after which a process counts as one that cannot die.

use std::time::{Duration, Instant};

use super::processes::{self, ProcessSet};
use crate::sys::procfs;

/// Without progress, init has this long beyond the grace before the runner kills it.
pub const BACKSTOP: Duration = Duration::from_millis(700);
/// With progress, the dying are waited for no longer than this.
pub const DYING_TIME_MAX: Duration = Duration::from_secs(30);
/// How often they are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Processes that were sent SIGKILL.
pub struct DyingProcesses {
    process_set: ProcessSet,
    since: Instant,
    /// `None` before the first look.
    looked_at: Option<Instant>,
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
            looked_at: None,
            progress_at: now,
            count: usize::MAX,
        }
    }

    /// Looks at them, if it is time to; the first look counts as progress. Otherwise progress is that they are fewer, or
    /// that one of them can run: no code of the program's runs any more, so that is the kernel at work on its end, or
    /// about to be. All of them may end at the same moment, at the end of a long time, so fewer is not enough. A process
    /// that cannot die waits for something, and does not run.
    pub fn look(&mut self) -> Option<DyingProgress> {
        let before = self.looked_at.unwrap_or(self.since);
        if before.elapsed() < LOOK_EVERY {
            return None;
        }
        let own = std::process::id();
        let mut left = processes::pids(self.process_set);
        left.retain(|pid| *pid != own);
        let progress = left.len() < self.count || left.iter().any(|pid| can_run(*pid));
        self.count = left.len();
        let now = Instant::now();
        self.looked_at = Some(now);
        if !progress {
            return Some(DyingProgress::None);
        }
        self.progress_at = now;
        Some(DyingProgress::Made)
    }

    /// Whether there is no use in waiting any longer.
    pub fn is_hopeless(&self) -> bool {
        self.progress_at.elapsed() >= BACKSTOP || self.since.elapsed() >= DYING_TIME_MAX
    }
}

/// Whether the kernel has one of its threads running, or ready to run.
fn can_run(pid: u32) -> bool {
    let state = |stat: String| Some(stat.rsplit_once(')')?.1.trim_start().starts_with('R'));
    let stat = |path: String| procfs::read(path, 4096).and_then(state);
    match stat(format!("/proc/{pid}/stat")) {
        Some(true) => true,
        // The first thread may be dead, or wait, while others end.
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
    fn a_process_that_waits_does_not_run_and_a_busy_one_does() {
        let mut waits = Command::new("sleep").arg("60").spawn().unwrap();
        let mut runs = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while (can_run(waits.id()) || !can_run(runs.id())) && Instant::now() < until {
            std::thread::yield_now();
        }
        let found = (can_run(waits.id()), can_run(runs.id()));
        for child in [&mut waits, &mut runs] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(found, (false, true));
        assert!(!can_run(runs.id()));
    }
}
