//! The end of pid 1: everyone else in the sandbox is dead, and what is left of it is the kernel's to take down.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, WaitId, WaitIdOptions};

use crate::supervise::{BACKSTOP, LAST_WAIT, timespec};

/// A process that has said its last word. Dropped, it is waited for.
#[derive(Debug)]
pub struct Leaving(Option<OwnedFd>);

impl Leaving {
    pub(crate) fn new(init: Option<OwnedFd>) -> Leaving {
        Leaving(init)
    }

    /// Sees it off. False: it could not be seen to end in time.
    pub fn wait(mut self) -> bool {
        self.see_off()
    }

    fn see_off(&mut self) -> bool {
        let Some(init) = self.0.take() else {
            return true;
        };
        for (patience, then) in [(BACKSTOP, Some(Signal::KILL)), (LAST_WAIT, None)] {
            let mut fds = [PollFd::new(&init, PollFlags::IN)];
            if matches!(poll(&mut fds, Some(&timespec(patience))), Ok(1..)) {
                let init = WaitId::PidFd(init.as_fd());
                let _status = rustix::process::waitid(init, WaitIdOptions::EXITED);
                return true;
            }
            let _gone = then.map(|signal| rustix::process::pidfd_send_signal(&init, signal));
        }
        false
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.see_off();
    }
}
