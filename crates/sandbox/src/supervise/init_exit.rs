//! The end of a run, as the runner sees it: the backstop deadline behind init's own deadlines, the proof that every
//! process is dead, and the exit of init.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Signal, WaitId, WaitIdOptions};

use super::Running;
use crate::channel::InitCommand;
use crate::events::{self, PollFlags};
use crate::inside::dying::{BACKSTOP, DYING_TIME_MAX};
use crate::spec::ConfinementLevel;
use crate::sys::procfs;

/// How long the runner waits for the run's processes to be gone once the backstop deadline has passed.
const EXIT_WAIT: Duration = Duration::from_millis(280);

/// Init after its last report, when it is alone and about to exit. Dropping this value waits for the exit.
///
/// The kernel needs some time to take down pid 1 and its namespaces. The caller can do other work meanwhile.
#[derive(Debug)]
pub struct InitExit(Option<OwnedFd>);

impl InitExit {
    pub(crate) fn new(init: Option<OwnedFd>) -> InitExit {
        InitExit(init)
    }

    /// Waits for init to exit, and reaps it. Returns false if init did not exit in time, even after SIGKILL.
    pub fn wait(mut self) -> bool {
        self.wait_for_exit()
    }

    fn wait_for_exit(&mut self) -> bool {
        let Some(init) = self.0.take() else {
            return true;
        };
        for (timeout, signal_after) in [(BACKSTOP, Some(Signal::KILL)), (EXIT_WAIT, None)] {
            if events::wait_for(&init, PollFlags::IN, timeout) {
                let init = WaitId::PidFd(init.as_fd());
                let _ = rustix::process::waitid(init, WaitIdOptions::EXITED);
                return true;
            }
            let _ = signal_after.map(|signal| rustix::process::pidfd_send_signal(&init, signal));
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
    /// Moves the backstop deadline to at most `within` from now.
    pub(crate) fn shorten_deadline(&mut self, within: Duration) {
        self.backstop_at = self.backstop_at.min(Instant::now() + within);
    }

    /// Init has reported that killed processes are still dying, with progress: gives init more time, up to a bound.
    pub(crate) fn extend_deadline_for_dying(&mut self) {
        let now = Instant::now();
        let last = *self.dying_since.get_or_insert(now) + DYING_TIME_MAX;
        self.backstop_at = self.backstop_at.max(now + BACKSTOP).min(last);
    }

    /// Ends the run once the backstop deadline has passed: kills init at level `full`; at level `landlock` commands the
    /// guardian to kill, and kills from outside. Returns false if init is still there [`EXIT_WAIT`] after that.
    pub(crate) fn enforce_backstop(&mut self) -> bool {
        if Instant::now() < self.backstop_at {
            return true;
        }
        if self.backstop_passed {
            return false;
        }
        self.backstop_passed = true;
        self.backstop_at = Instant::now() + EXIT_WAIT;
        let _ = self.launcher.as_mut().map(Child::kill);
        match self.spec.level {
            ConfinementLevel::Full => {
                if let Some(init) = &self.init {
                    let _ = rustix::process::pidfd_send_signal(init, Signal::KILL);
                }
            }
            // The guardian kills its descendants one by one and must outlive them, so do not kill the guardian itself.
            ConfinementLevel::Landlock => {
                self.send_command(InitCommand::Kill);
                self.kill_from_outside();
            }
        }
        true
    }

    /// Kills every process of the run that can be found without the guardian: by the run's cgroup, or by its uid.
    fn kill_from_outside(&self) {
        if let Some(group) = self.group {
            group.kill();
        }
        if let Some(uid) = self.spec.own_uid() {
            // The guardian has the same uid. Spare it, because it reports the end of the run.
            let guardian = self.init_pid.map(|pid| pid.as_raw_nonzero().get() as u32);
            let others = procfs::pids_of_user(uid).into_iter();
            for pid in others.filter(|pid| Some(*pid) != guardian) {
                // While the uid is leased, no process outside the run has it.
                let pidfd = procfs::open_pidfd(pid);
                let _ = pidfd.map(|pidfd| rustix::process::pidfd_send_signal(pidfd, Signal::KILL));
            }
        }
    }

    /// Whether every process of the run is proved dead.
    pub(crate) fn all_dead(&self, init_dead: bool) -> bool {
        // At level full the death of pid 1 is the proof, since the kernel then kills its whole namespace. The guardian
        // reports the end only once it has no child left, so its report is the proof.
        if self.spec.level == ConfinementLevel::Full
            || !init_dead
            || self.end_report.is_some()
            || !self.has_started()
        {
            return init_dead;
        }
        // The guardian died without a report: somebody killed it.
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
