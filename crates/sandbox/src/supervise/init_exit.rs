//! The end of a run, as the runner sees it: the last deadline behind init's own, the proof that every process is dead,
//! and the end of pid 1, when everyone else in the sandbox is dead and the rest is the kernel's to take down.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, WaitId, WaitIdOptions};

use super::{Running, timespec};
use crate::channel::InitOrder;
use crate::inside::dying::{BACKSTOP, DYING_TIME_MAX};
use crate::spec::ConfinementLevel;
use crate::sys::procfs;

/// The kernel has this long to finish what init was in charge of, once that is killed.
const EXIT_WAIT: Duration = Duration::from_millis(280);
/// Init after its last report, on its way to its exit. Dropping this waits for the exit.
#[derive(Debug)]
pub struct InitExit(Option<OwnedFd>);

impl InitExit {
    pub(crate) fn new(init: Option<OwnedFd>) -> InitExit {
        InitExit(init)
    }

    /// Sees it off. False: it could not be seen to end in time.
    pub fn wait(mut self) -> bool {
        self.wait_for_exit()
    }

    fn wait_for_exit(&mut self) -> bool {
        let Some(init) = self.0.take() else {
            return true;
        };
        for (patience, then) in [(BACKSTOP, Some(Signal::KILL)), (EXIT_WAIT, None)] {
            let mut fds = [PollFd::new(&init, PollFlags::IN)];
            if matches!(poll(&mut fds, Some(&timespec(patience))), Ok(1..)) {
                let init = WaitId::PidFd(init.as_fd());
                let _ = rustix::process::waitid(init, WaitIdOptions::EXITED);
                return true;
            }
            let _ = then.map(|signal| rustix::process::pidfd_send_signal(&init, signal));
        }
        false
    }
}

impl Drop for InitExit {
    fn drop(&mut self) {
        self.wait_for_exit();
    }
}

impl Running<'_> {
    pub(crate) fn shorten_deadline(&mut self, within: Duration) {
        self.kill_init_at = self.kill_init_at.min(Instant::now() + within);
    }

    /// Some are dying, and there is progress: init has time for as long as there is, within a bound.
    pub(crate) fn extend_deadline_for_dying(&mut self) {
        let now = Instant::now();
        let last = *self.dying_since.get_or_insert(now) + DYING_TIME_MAX;
        self.kill_init_at = self.kill_init_at.max(now + BACKSTOP).min(last);
    }

    /// Kills init when it is overdue. False when even that has not helped in time.
    pub(crate) fn enforce_backstop(&mut self) -> bool {
        if Instant::now() < self.kill_init_at {
            return true;
        }
        if self.killed_init {
            return false;
        }
        self.killed_init = true;
        self.kill_init_at = Instant::now() + EXIT_WAIT;
        let _ = self.launcher.as_mut().map(Child::kill);
        match self.spec.level {
            ConfinementLevel::Full => {
                if let Some(init) = &self.init {
                    let _ = rustix::process::pidfd_send_signal(init, Signal::KILL);
                }
            }
            // The guardian kills its descendants one by one, so it must stay until none is left.
            ConfinementLevel::Landlock => {
                self.order(InitOrder::Kill);
                self.kill_from_outside();
            }
        }
        true
    }

    /// Everything of the run's that can be told without the guardian: its group, or its uid.
    fn kill_from_outside(&self) {
        if let Some(group) = self.group {
            group.kill();
        }
        if let Some(uid) = self.spec.own_uid() {
            // The guardian has the uid too, and tells the end.
            let guardian = self.init_pid.map(|pid| pid.as_raw_nonzero().get() as u32);
            let others = procfs::pids_of_user(uid).into_iter();
            for pid in others.filter(|pid| Some(*pid) != guardian) {
                // Nobody else is ever given the uid while it is leased.
                let held = procfs::open_pidfd(pid);
                let _ = held.map(|held| rustix::process::pidfd_send_signal(held, Signal::KILL));
            }
        }
    }

    /// Whether every process of the run is known to be dead.
    pub(crate) fn all_dead(&self, init_dead: bool) -> bool {
        // The guardian tells the end when it has no child left. Pid 1 takes everyone with it, whatever it said.
        if self.spec.level == ConfinementLevel::Full
            || !init_dead
            || self.ended.is_some()
            || !self.started()
        {
            return init_dead;
        }
        // Somebody killed the guardian.
        let until = Instant::now() + EXIT_WAIT;
        loop {
            self.kill_from_outside();
            let empty = match (self.group, self.spec.own_uid()) {
                (Some(group), _) => group.is_empty(),
                (None, Some(uid)) => procfs::pids_of_user(uid).is_empty(),
                (None, None) => return false,
            };
            if empty || Instant::now() > until {
                return empty;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
