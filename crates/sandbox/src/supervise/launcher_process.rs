//! The processes that the runner starts and holds by descriptor: the launcher, and init.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, PidfdFlags};

use super::error::{RunError, start};
use crate::channel;
use crate::launch::launcher;

/// Opens a pidfd for init. Init is a child of this process and only this process reaps it, so the pid cannot have been
/// reused.
pub(super) fn open_init(child: Pid) -> Result<(Pid, OwnedFd), RunError> {
    let pidfd = rustix::process::pidfd_open(child, PidfdFlags::empty());
    Ok((child, pidfd.map_err(|e| start("find init")(e.into()))?))
}

/// Executes the runner's own binary again, as the launcher. Its environment is empty, so that no process inside holds
/// any of the caller's variables. It has its own process group, so that Ctrl-C at the terminal reaches only the runner.
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
