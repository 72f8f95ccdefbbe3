//! The one launcher that stands by, if there is one: the socket to it, and its pid.
//!
//! The runner forks it (`launch/standby.rs`) and takes it for its run. It is held here, below both, because whoever moves
//! this process into another control group must send it away first.

use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::process::{Pid, Signal, WaitOptions};

/// The one that waits, if any: the socket to it, and its pid.
static STANDBY: Mutex<Option<(OwnedFd, Pid)>> = Mutex::new(None);

/// Keeps a launcher that was just forked.
pub fn put(socket: OwnedFd, pid: Pid) {
    if let Ok(mut standby) = STANDBY.lock() {
        *standby = Some((socket, pid));
    }
}

/// Takes it, whether or not it still lives.
pub fn take() -> Option<(OwnedFd, Pid)> {
    STANDBY.lock().ok()?.take()
}

/// Its pid.
pub fn pid() -> Option<u32> {
    let standby = STANDBY.lock().ok()?;
    u32::try_from(standby.as_ref()?.1.as_raw_nonzero().get()).ok()
}

/// Sends it away: what it was born into is not where runs are to be any more.
pub fn dismiss() {
    let standby = STANDBY.lock().ok().and_then(|mut standby| standby.take());
    if let Some(standby) = standby {
        end(standby);
    }
}

/// Also of one that somebody has stopped.
pub fn end((socket, pid): (OwnedFd, Pid)) {
    drop(socket);
    // Not reaped by anybody else, so the number is still its own.
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    while matches!(
        rustix::process::waitpid(Some(pid), WaitOptions::empty()),
        Err(rustix::io::Errno::INTR)
    ) {}
}
