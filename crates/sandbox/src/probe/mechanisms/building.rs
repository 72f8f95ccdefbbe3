//! Mechanisms that build the sandbox: namespaces, mounts and uids.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode};
use rustix::mount::{MountAttrFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags};
use rustix::process::{Gid, Uid};

use super::{ActResult, MechanismVerdict, ProbeInputs, in_child, works};
use crate::confine::capabilities::{self, Bounding};
use crate::launch::{mounts, namespaces};
use crate::layout::{INSIDE_GID, INSIDE_UID};
use crate::spec::ProgramIdentity;
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys::{self, procfs};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Creates namespaces as the launcher does: as root directly, otherwise in a new user namespace. One call for each,
/// so that a failure names its step.
fn enter(flags: libc::c_int) -> Result<(), LaunchStepError> {
    if !is_root() {
        own_user_namespace()?;
    }
    sys::unshare(flags).during(|| "unshare".into())
}

fn own_user_namespace() -> Result<(), LaunchStepError> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    sys::unshare(libc::CLONE_NEWUSER).during(|| "unshare the user namespace".into())?;
    map_to_inside(uid.as_raw(), gid.as_raw())
}

fn map_to_inside(uid: u32, gid: u32) -> Result<(), LaunchStepError> {
    for (file, text) in [
        ("self/setgroups", String::from("deny")),
        ("self/uid_map", format!("{INSIDE_UID} {uid} 1")),
        ("self/gid_map", format!("{INSIDE_GID} {gid} 1")),
    ] {
        procfs::write(None, file, &text).during(|| format!("write /proc/{file}"))?;
    }
    Ok(())
}

/// As root, becomes the leased uid and keeps the capabilities that a launch still has at that point.
fn become_leased(uid: u32) -> Result<(), LaunchStepError> {
    rustix::thread::set_keep_capabilities(true).during(|| "keep capabilities".into())?;
    rustix::thread::set_thread_groups(&[]).during(|| "drop groups".into())?;
    let group = Gid::from_raw(uid);
    rustix::thread::set_thread_res_gid(group, group, group)
        .during(|| format!("set the gid to {uid}"))?;
    let user = Uid::from_raw(uid);
    rustix::thread::set_thread_res_uid(user, user, user)
        .during(|| format!("set the uid to {uid}"))?;
    let mut sets = rustix::thread::capabilities(None).during(|| "read capabilities".into())?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets).during(|| "raise capabilities".into())
}

pub fn user_namespace(inputs: &ProbeInputs) -> ActResult {
    match inputs.leased_uid {
        None => own_user_namespace()?,
        Some(uid) => {
            become_leased(uid)?;
            rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable)
                .during(|| "become dumpable".into())?;
            sys::unshare(libc::CLONE_NEWUSER).during(|| "unshare the user namespace".into())?;
            map_to_inside(uid, uid)?;
        }
    }
    works("made, one user mapped")
}

/// A plain user's program runs in a second, inner user namespace. Root's program needs only the first.
pub fn inner_user_namespace(inputs: &ProbeInputs) -> ActResult {
    if inputs.leased_uid.is_some() {
        return Ok(MechanismVerdict::NotUsed);
    }
    own_user_namespace()?;
    sys::unshare(libc::CLONE_NEWUSER).during(|| "unshare inside the first".into())?;
    map_to_inside(INSIDE_UID, INSIDE_GID)?;
    works("made inside the first")
}

fn private_mounts() -> Result<(), LaunchStepError> {
    enter(libc::CLONE_NEWNS)?;
    rustix::mount::mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .during(|| "make / private".into())
}

/// Runs `act` in a child, as pid 1 of the new pid namespace, and returns the child's result.
fn as_pid_1(act: impl FnOnce() -> ActResult) -> ActResult {
    match in_child(act) {
        MechanismVerdict::Fails { step, errno } => Err(LaunchStepError {
            errno,
            detail: step,
        }),
        verdict => Ok(verdict),
    }
}

pub fn pid_namespace() -> ActResult {
    enter(libc::CLONE_NEWPID)?;
    as_pid_1(|| match rustix::process::getpid().is_init() {
        true => works("made, its first process is 1"),
        false => Err(LaunchStepError::new("the child is not the first process")),
    })
}

pub fn new_proc() -> ActResult {
    private_mounts()?;
    sys::unshare(libc::CLONE_NEWPID).during(|| "unshare the pid namespace".into())?;
    as_pid_1(|| {
        mounts::new_filesystem("proc", &[], MountAttrFlags::MOUNT_ATTR_NOEXEC)
            .during(|| "make a new /proc".into())?;
        works("made")
    })
}

/// Makes a tmpfs, attaches it, and makes two directories in it.
fn attach_tmpfs() -> Result<OwnedFd, LaunchStepError> {
    let options = [("size", "64k"), ("nr_inodes", "16"), ("mode", "0755")];
    let root = mounts::new_filesystem("tmpfs", &options, MountAttrFlags::MOUNT_ATTR_NODEV)
        .during(|| "make a tmpfs".into())?;
    let attach = |at: &str| {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&root, "", CWD, at, flags)
    };
    attach("/tmp")
        .or_else(|_| attach("/mnt"))
        .during(|| "attach a tmpfs".into())?;
    for name in ["one", "two"] {
        rustix::fs::mkdirat(&root, name, Mode::from_raw_mode(0o755))
            .during(|| "make a directory on a tmpfs".into())?;
    }
    Ok(root)
}

pub fn overlay() -> ActResult {
    private_mounts()?;
    let root = attach_tmpfs()?;
    rustix::process::fchdir(&root).during(|| "enter a tmpfs".into())?;
    let options = [("lowerdir", "one:two"), ("userxattr", "")];
    mounts::new_filesystem("overlay", &options, MountAttrFlags::MOUNT_ATTR_NODEV)
        .during(|| "make an overlay".into())?;
    works("made, of two read-only layers")
}

pub fn read_only_mounts() -> ActResult {
    private_mounts()?;
    let tree = mounts::clone_tree(CWD, OsStr::new("/usr")).during(|| "copy a mount".into())?;
    let attributes = sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV;
    sys::mount_restrict(tree.as_fd(), attributes).during(|| "make a mount read-only".into())?;
    let flags = rustix::fs::fstatvfs(&tree)
        .during(|| "look at the mount".into())?
        .f_flag;
    match flags.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
        true => works("copied and made read-only, with all that is mounted below"),
        false => Err(LaunchStepError::new("the mount did not become read-only")),
    }
}

pub fn idmapped_mounts(inputs: &ProbeInputs) -> ActResult {
    let Some(uid) = inputs.leased_uid else {
        return Ok(MechanismVerdict::NotUsed);
    };
    let what = || format!("look at {}", inputs.shown.display());
    let owner = rustix::fs::stat(&inputs.shown).during(what)?.st_uid;
    let map = namespaces::owner_map(owner, ProgramIdentity::Leased { uid, gid: uid })
        .during(|| "make a user namespace that maps the owner".into())?;
    private_mounts()?;
    let what = || format!("show {} with another owner", inputs.shown.display());
    let tree = mounts::clone_tree(CWD, inputs.shown.as_os_str()).during(what)?;
    sys::mount_idmap(tree.as_fd(), map.as_fd()).during(what)?;
    let seen = rustix::fs::fstat(&tree).during(what)?.st_uid;
    match seen == uid {
        true => works(format!("{} shown as the program's", inputs.shown.display())),
        false => Err(LaunchStepError::new("the owner is shown as before")),
    }
}

pub fn pivot_root() -> ActResult {
    private_mounts()?;
    let root = attach_tmpfs()?;
    rustix::process::fchdir(&root).during(|| "enter the new root".into())?;
    rustix::process::pivot_root(".", ".").during(|| "pivot_root".into())?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).during(|| "let go of the old root".into())?;
    works("the root changed, the old one gone")
}

pub fn leased_uid(inputs: &ProbeInputs) -> ActResult {
    let Some(uid) = inputs.leased_uid else {
        return Ok(MechanismVerdict::NotUsed);
    };
    become_leased(uid)?;
    capabilities::drop_capabilities(Bounding::Dropped)?;
    works(format!("uid {uid}, no capability left"))
}

pub fn mount_namespace() -> ActResult {
    private_mounts()?;
    works("made, and its mounts private")
}

/// Creates one namespace that needs no further setup.
pub fn namespace(flag: libc::c_int) -> ActResult {
    enter(flag)?;
    works("made")
}

pub fn net_namespace() -> ActResult {
    enter(libc::CLONE_NEWNET)?;
    sys::loopback_up().during(|| "bring loopback up".into())?;
    works("made, with loopback")
}

pub fn uts_namespace() -> ActResult {
    enter(libc::CLONE_NEWUTS)?;
    rustix::system::sethostname(b"fumehood").during(|| "set the host name".into())?;
    works("made, with a name of its own")
}

pub fn tmpfs() -> ActResult {
    private_mounts()?;
    attach_tmpfs()?;
    works("mounted")
}

pub fn devpts() -> ActResult {
    private_mounts()?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOEXEC;
    mounts::new_filesystem("devpts", &[("ptmxmode", "0666")], attributes)
        .during(|| "make a devpts".into())?;
    works("made")
}
