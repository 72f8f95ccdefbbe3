//! Mechanisms that build the sandbox: namespaces, mounts and uids.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode};
use rustix::mount::{MountAttrFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags};

use super::{MechanismVerdict, TrialInputs, TrialResult, check, in_child, works};
use crate::confine::capabilities::{self, Bounding};
use crate::launch::mounts;
use crate::launch::namespaces::{become_leased, owner_map, write_maps};
use crate::layout::{INSIDE_GID, INSIDE_UID};
use crate::spec::ProgramIdentity;
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Creates namespaces as the launcher does: as root directly, otherwise in a new user namespace. One call for each,
/// so that a failure names its step.
fn enter(flags: libc::c_int) -> Result<(), LaunchStepError> {
    if !is_root() {
        own_user_namespace()?;
    }
    sys::unshare(flags).doing("unshare")
}

fn own_user_namespace() -> Result<(), LaunchStepError> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    sys::unshare(libc::CLONE_NEWUSER).doing("unshare the user namespace")?;
    write_maps(None, uid.as_raw(), gid.as_raw())
}

pub fn user_namespace(inputs: &TrialInputs) -> TrialResult {
    match inputs.leased_uid {
        None => own_user_namespace()?,
        Some(uid) => {
            become_leased(uid, uid)?;
            rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable)
                .doing("become dumpable")?;
            sys::unshare(libc::CLONE_NEWUSER).doing("unshare the user namespace")?;
            write_maps(None, uid, uid)?;
        }
    }
    works("made, one user mapped")
}

/// A plain user's program runs in a second, inner user namespace. Root's program needs only the first.
pub fn inner_user_namespace(inputs: &TrialInputs) -> TrialResult {
    if inputs.leased_uid.is_some() {
        return Ok(MechanismVerdict::NotUsed);
    }
    own_user_namespace()?;
    sys::unshare(libc::CLONE_NEWUSER).doing("unshare inside the first")?;
    write_maps(None, INSIDE_UID, INSIDE_GID)?;
    works("made inside the first")
}

fn private_mounts() -> Result<(), LaunchStepError> {
    enter(libc::CLONE_NEWNS)?;
    rustix::mount::mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .doing("make / private")
}

pub fn pid_namespace() -> TrialResult {
    enter(libc::CLONE_NEWPID)?;
    // The child is pid 1 of the new namespace.
    in_child(|| {
        let is_first = rustix::process::getpid().is_init();
        let how = "made, its first process is 1";
        check(is_first, how, "the child is not the first process")
    })
}

pub fn new_proc() -> TrialResult {
    private_mounts()?;
    sys::unshare(libc::CLONE_NEWPID).doing("unshare the pid namespace")?;
    in_child(|| {
        mounts::new_filesystem("proc", &[], MountAttrFlags::MOUNT_ATTR_NOEXEC)
            .doing("make a new /proc")?;
        works("made")
    })
}

/// Makes a tmpfs, attaches it, and makes two directories in it.
fn attach_tmpfs() -> Result<OwnedFd, LaunchStepError> {
    let options = [("size", "64k"), ("nr_inodes", "16"), ("mode", "0755")];
    let root = mounts::new_filesystem("tmpfs", &options, MountAttrFlags::MOUNT_ATTR_NODEV)
        .doing("make a tmpfs")?;
    let attach = |at: &str| {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&root, "", CWD, at, flags)
    };
    attach("/tmp")
        .or_else(|_| attach("/mnt"))
        .doing("attach a tmpfs")?;
    for name in ["one", "two"] {
        rustix::fs::mkdirat(&root, name, Mode::from_raw_mode(0o755))
            .doing("make a directory on a tmpfs")?;
    }
    Ok(root)
}

pub fn overlay() -> TrialResult {
    private_mounts()?;
    let root = attach_tmpfs()?;
    rustix::process::fchdir(&root).doing("enter a tmpfs")?;
    let options = [("lowerdir", "one:two"), ("userxattr", "")];
    mounts::new_filesystem("overlay", &options, MountAttrFlags::MOUNT_ATTR_NODEV)
        .doing("make an overlay")?;
    works("made, of two read-only layers")
}

pub fn read_only_mounts() -> TrialResult {
    private_mounts()?;
    let tree = mounts::clone_tree(CWD, OsStr::new("/usr")).doing("copy a mount")?;
    let attributes = sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV;
    sys::mount_restrict(tree.as_fd(), attributes).doing("make a mount read-only")?;
    let flags = rustix::fs::fstatvfs(&tree)
        .doing("look at the mount")?
        .f_flag;
    let how = "copied and made read-only, with all that is mounted below";
    let is_read_only = flags.contains(rustix::fs::StatVfsMountFlags::RDONLY);
    check(is_read_only, how, "the mount did not become read-only")
}

pub fn idmapped_mounts(inputs: &TrialInputs) -> TrialResult {
    let Some(uid) = inputs.leased_uid else {
        return Ok(MechanismVerdict::NotUsed);
    };
    let shown = inputs.shown.display();
    let what = || format!("look at {shown}");
    let owner = rustix::fs::stat(&inputs.shown).step_context(what)?.st_uid;
    let map = owner_map(owner, ProgramIdentity::Leased { uid, gid: uid })
        .doing("make a user namespace that maps the owner")?;
    private_mounts()?;
    let what = || format!("show {shown} with another owner");
    let tree = mounts::clone_tree(CWD, inputs.shown.as_os_str()).step_context(what)?;
    sys::mount_idmap(tree.as_fd(), map.as_fd()).step_context(what)?;
    let seen = rustix::fs::fstat(&tree).step_context(what)?.st_uid;
    let how = format!("{shown} shown as the program's");
    check(seen == uid, how, "the owner is shown as before")
}

pub fn pivot_root() -> TrialResult {
    private_mounts()?;
    let root = attach_tmpfs()?;
    rustix::process::fchdir(&root).doing("enter the new root")?;
    rustix::process::pivot_root(".", ".").doing("pivot_root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).doing("let go of the old root")?;
    works("the root changed, the old one gone")
}

pub fn leased_uid(inputs: &TrialInputs) -> TrialResult {
    let Some(uid) = inputs.leased_uid else {
        return Ok(MechanismVerdict::NotUsed);
    };
    become_leased(uid, uid)?;
    capabilities::drop_capabilities(Bounding::Dropped)?;
    works(format!("uid {uid}, no capability left"))
}

pub fn mount_namespace() -> TrialResult {
    private_mounts()?;
    works("made, and its mounts private")
}

/// Creates one namespace that needs no further setup.
pub fn namespace(flag: libc::c_int) -> TrialResult {
    enter(flag)?;
    works("made")
}

pub fn net_namespace() -> TrialResult {
    enter(libc::CLONE_NEWNET)?;
    sys::loopback_up().doing("bring loopback up")?;
    works("made, with loopback")
}

pub fn uts_namespace() -> TrialResult {
    enter(libc::CLONE_NEWUTS)?;
    rustix::system::sethostname(b"fumehood").doing("set the host name")?;
    works("made, with a name of its own")
}

pub fn tmpfs() -> TrialResult {
    private_mounts()?;
    attach_tmpfs()?;
    works("mounted")
}

pub fn devpts() -> TrialResult {
    private_mounts()?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOEXEC;
    mounts::new_filesystem("devpts", &[("ptmxmode", "0666")], attributes).doing("make a devpts")?;
    works("made")
}
