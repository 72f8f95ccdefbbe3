//! The runner's hold on the processes it starts: the launcher, and init.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, PidfdFlags};

use super::error::{RunError, start};
use crate::channel;
use crate::launch::launcher;

/// A child of ours: nobody else reaps it, so the number cannot have been given to another process.
pub(super) fn open_init(child: Pid) -> Result<(Pid, OwnedFd), RunError> {
    let pidfd = rustix::process::pidfd_open(child, PidfdFlags::empty());
    Ok((child, pidfd.map_err(|e| start("find init")(e.into()))?))
}

/// Our own binary, once more. An empty environment: nothing of the caller's is to be found in any process inside. Its
/// own process group: the terminal's Ctrl-C is the runner's to handle.
pub(super) fn start_launcher(program: &Path) -> Result<(OwnedFd, Child), RunError> {
    let (ours, theirs) = channel::pair().map_err(|e| start("make the control socket")(e.into()))?;
    let launcher = Command::new(program)
        .arg(launcher::ARGUMENT)
        .env_clear()
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(start("start the launcher"))?;
    Ok((ours, launcher))
}
