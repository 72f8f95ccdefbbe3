//! Detached mounts: copies of the host's mounts, and new file systems, before they are attached anywhere.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};

use crate::step_report::{LaunchStepError, StepContext};
use crate::sys;

/// The kernel bounds the number of terminals for the whole host (kernel.pty.max). This is the run's share.
const TERMINALS_MAX: &str = "64";

/// A detached copy of a host path's mount, with its restrictions set, to be attached at `target`.
pub struct DetachedMount {
    pub mount: OwnedFd,
    pub target: PathBuf,
    pub directory: bool,
}

pub fn open_detached(
    source: &Path,
    target: &Path,
    attributes: u64,
) -> Result<DetachedMount, LaunchStepError> {
    let mount = clone_tree(CWD, source.as_os_str())
        .step_context(|| format!("open {}", source.display()))?;
    let directory =
        is_directory(mount.as_fd()).step_context(|| format!("look at {}", source.display()))?;
    sys::mount_restrict(mount.as_fd(), attributes)
        .step_context(|| format!("make {} read-only", source.display()))?;
    Ok(DetachedMount {
        mount,
        target: target.to_path_buf(),
        directory,
    })
}

/// Makes a detached copy of the mounts at a path. The path must hold no symlink: the runner resolved it once, so a
/// symlink means that somebody replaced a directory.
pub fn clone_tree(at: BorrowedFd<'_>, path: &OsStr) -> rustix::io::Result<OwnedFd> {
    rustix::mount::open_tree(
        sys::open_resolved(at, path, OFlags::PATH)?,
        "",
        OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE
            | OpenTreeFlags::AT_EMPTY_PATH,
    )
}

fn is_directory(fd: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode);
    Ok(kind == rustix::fs::FileType::Directory)
}

pub fn new_filesystem(
    kind: &str,
    options: &[(&str, &str)],
    attributes: MountAttrFlags,
) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        match value.is_empty() {
            true => rustix::mount::fsconfig_set_flag(context.as_fd(), *key)?,
            false => rustix::mount::fsconfig_set_string(context.as_fd(), *key, *value)?,
        }
    }
    rustix::mount::fsconfig_create(context.as_fd())?;
    rustix::mount::fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NOSUID | attributes,
    )
}

/// Makes a devpts for the run's own terminals.
pub(super) fn new_devpts() -> Result<DetachedMount, LaunchStepError> {
    let mount = new_filesystem(
        "devpts",
        &[
            ("ptmxmode", "0666"),
            ("mode", "0620"),
            ("max", TERMINALS_MAX),
        ],
        // Not nodev: terminals are devices, and devpts can hold no other devices.
        MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )
    .doing("make a devpts")?;
    Ok(DetachedMount {
        mount,
        target: PathBuf::from("/dev/pts"),
        directory: true,
    })
}

pub(super) fn new_tmpfs(options: &[(&str, &str)]) -> rustix::io::Result<OwnedFd> {
    new_filesystem("tmpfs", options, MountAttrFlags::MOUNT_ATTR_NODEV)
}

/// Attaches a mount at a path below a directory.
pub(super) fn attach(
    mount: BorrowedFd<'_>,
    at: BorrowedFd<'_>,
    target: &Path,
) -> rustix::io::Result<()> {
    rustix::mount::move_mount(
        mount,
        "",
        at,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
}
