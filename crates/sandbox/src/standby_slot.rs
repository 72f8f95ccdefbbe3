//! The standby launcher of this process, if there is one.
//!
//! `launch/standby.rs` forks the standby launcher before the runner does anything else, and the runner uses it for its
//! run. The slot is a module of its own below `launch` because `resources/cgroup` also needs it: before this process
//! moves into another cgroup it must end the standby launcher, which was forked in the old cgroup.

use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::process::{Pid, Signal, WaitOptions};

/// The control socket and the pid of the standby launcher.
static STANDBY: Mutex<Option<(OwnedFd, Pid)>> = Mutex::new(None);

/// Stores a launcher that was just forked.
pub fn put(socket: OwnedFd, pid: Pid) {
    if let Ok(mut standby) = STANDBY.lock() {
        *standby = Some((socket, pid));
    }
}

/// Takes the launcher out of the slot. The launcher may have died.
pub fn take() -> Option<(OwnedFd, Pid)> {
    STANDBY.lock().ok()?.take()
}

/// The pid of the standby launcher.
pub fn pid() -> Option<u32> {
    let standby = STANDBY.lock().ok()?;
    u32::try_from(standby.as_ref()?.1.as_raw_nonzero().get()).ok()
}

/// Ends the standby launcher, because the cgroup in which it was forked is no longer the one for runs.
pub fn dismiss() {
    let standby = STANDBY.lock().ok().and_then(|mut standby| standby.take());
    if let Some(standby) = standby {
        end(standby);
    }
}

/// Kills and reaps a launcher. SIGKILL also ends a launcher that somebody has stopped with SIGSTOP.
pub fn end((socket, pid): (OwnedFd, Pid)) {
    drop(socket);
    // Only this process reaps the launcher, so its pid cannot have been reused.
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    while matches!(
        rustix::process::waitpid(Some(pid), WaitOptions::empty()),
        Err(rustix::io::Errno::INTR)
    ) {}
}
