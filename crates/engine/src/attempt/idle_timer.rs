//! Says when a runner that only waits for its program should give back what it does not need: the database
//! connection, and the pages of its own code.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use sandbox::events::{self, BootTimer, boot_time};

/// How long everything is kept for a program that may end at any moment.
const HELD_TIME: Duration = Duration::from_secs(1);

/// A timer that expires once, combined with the control descriptor of the observer.
pub(super) struct IdleTimer {
    timer: BootTimer,
    /// Readable when either of the two is.
    either: OwnedFd,
}

impl IdleTimer {
    /// `control_fd` is the observer's descriptor for control requests, if it has one.
    pub fn start(control_fd: Option<BorrowedFd<'_>>) -> io::Result<IdleTimer> {
        let timer = BootTimer::new()?;
        let fds = [Some(timer.as_fd()), control_fd].into_iter();
        let either = events::any_of(fds.flatten())?;
        timer.expire_at(boot_time() + HELD_TIME)?;
        Ok(IdleTimer { timer, either })
    }

    /// What to poll in place of `control_fd` while the timer runs.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }

    pub fn is_due(&self) -> bool {
        self.timer.take_expired()
    }
}
