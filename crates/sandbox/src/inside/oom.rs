//! The run's out-of-memory kills, as its cgroup counts them: whether the program was one of the victims, and whether
//! there were too many.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::processes;
use super::watch::TICK;
use crate::resources::cgroup;

/// A death by SIGKILL counts as an out-of-memory kill if the counter rose at most this long before. The kernel counts,
/// then sends the signal, then takes down the victim's memory, which can take longer than a tick.
const WINDOW: Duration = Duration::from_secs(1);
/// The run is stopped after this many kills. Each kill writes dozens of lines into the host's log, and a program that
/// has lost so many processes is unlikely to succeed.
const KILLS_MAX: u64 = 3;

/// Watches the counter of out-of-memory kills.
pub struct OomWatch {
    counter: OwnedFd,
    kills: u64,
    rose_at: Option<Instant>,
    looked_at: Instant,
    /// Whether the program was seen dying of a signal within the window. Its death may take much longer.
    died_in_window: bool,
}

impl OomWatch {
    pub fn new(counter: OwnedFd) -> Self {
        OomWatch {
            counter,
            kills: 0,
            rose_at: None,
            looked_at: Instant::now(),
            died_in_window: false,
        }
    }

    /// Reads the counter, at most once a tick. Returns whether there were too many kills.
    pub fn check(&mut self, main_pid: u32) -> bool {
        if self.looked_at.elapsed() < TICK {
            return false;
        }
        // If the counter cannot be read, try again at the next tick.
        let _ = self.count();
        if self.is_in_window() && !self.died_in_window {
            self.died_in_window = processes::is_dying_of_signal(main_pid);
        }
        self.kills >= KILLS_MAX
    }

    /// To be called when the program was reaped and had died of SIGKILL. Returns whether this was an out-of-memory
    /// kill, or `None` if the counter cannot be read.
    pub fn has_killed_main(&mut self) -> Option<bool> {
        self.count()?;
        Some(self.died_in_window || self.is_in_window())
    }

    fn is_in_window(&self) -> bool {
        self.rose_at.is_some_and(|at| at.elapsed() <= WINDOW)
    }

    fn count(&mut self) -> Option<()> {
        self.looked_at = Instant::now();
        let kills = cgroup::read_oom_kills(self.counter.as_fd()).ok()?;
        if kills > self.kills {
            (self.kills, self.rose_at) = (kills, Some(self.looked_at));
        }
        Some(())
    }
}
