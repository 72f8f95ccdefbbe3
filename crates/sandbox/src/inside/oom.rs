//! Processes that the kernel killed for want of memory, as the run's cgroup counts them: whether the program was one of
//! them, and whether they are too many.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::processes;
use super::watch::TICK;
use crate::resources::cgroup;

/// A death by SIGKILL is the kernel's doing if the counter rose at most this long before it. The kernel counts, then
/// sends the signal, then the victim's memory is taken down, which takes longer than a tick.
const WINDOW: Duration = Duration::from_secs(1);
/// Each kill writes dozens of lines into the host's log. A program that goes on after so many is not going to end well.
const KILLS_MAX: u64 = 3;

pub struct OomWatch {
    counter: OwnedFd,
    kills: u64,
    rose_at: Option<Instant>,
    looked_at: Instant,
    /// The program was seen dying of a signal within the window, however long its death then takes.
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

    /// Looks at the counter, once a tick. Says whether there were too many kills.
    pub fn look(&mut self, main: u32) -> bool {
        if self.looked_at.elapsed() < TICK {
            return false;
        }
        // An unreadable counter is read again at the next tick.
        let _ = self.count();
        if self.is_in_window() && !self.died_in_window {
            self.died_in_window = processes::is_dying_of_signal(main);
        }
        self.kills >= KILLS_MAX
    }

    /// For when the program was reaped, killed by SIGKILL: whether that was for want of memory. `None`: the counter
    /// does not say.
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
