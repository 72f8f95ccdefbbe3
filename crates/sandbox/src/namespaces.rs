//! Namespaces, user and group maps, and the giving up of privilege.
//!
//! Two user namespaces stand between a plain user's program and the host. The outer one owns every other
//! namespace and holds the privilege needed to build the sandbox; the program is put into an inner one that owns
//! nothing, so that even a full set of capabilities there would command none of it. For root there is
//! no outer one: root builds, and the program runs under a leased uid in the inner one.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::process::{DumpableBehavior, Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::channel::{During, Reporter, StepError};
use crate::mounts::{self, INSIDE_GID, INSIDE_UID, OwnerMaps, Prepared};
use crate::spec::{Identity, Layer, Level, Owner, Spec};
use crate::sys::{self, Forked, Parentage};

/// What a launcher has done before it knew its plan.
pub enum Entered {
    Nothing,
    /// The namespaces in [`EARLY`], a plain user's in a user namespace, with a root that is prepared.
    Early(Prepared),
    /// This step of it failed.
    Failed(String, StepError),
}

/// Namespaces that are the same for every plan. The network's alone costs as much as all the rest.
const EARLY: [Layer; 3] = [
    Layer::NetNamespace,
    Layer::IpcNamespace,
    Layer::UtsNamespace,
];

/// Whether a launcher that has entered [`EARLY`] can serve this plan.
pub fn fits_early(spec: &Spec) -> bool {
    spec.level == Level::Full && EARLY.iter().all(|layer| spec.has(*layer))
}

/// Does what every plan at level `full` needs. Where that cannot be had, it will be said when there is a plan.
pub fn enter_early(report: &mut Reporter) -> Entered {
    let flags = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let owned = match uid.is_root() {
        true => flags,
        false => flags | libc::CLONE_NEWUSER,
    };
    if sys::unshare(owned).is_err() {
        return Entered::Nothing;
    }
    let prepared = match uid.is_root() {
        true => Ok(()),
        false => {
            report.step("map the user");
            write_maps(None, (INSIDE_UID, uid.as_raw()), (INSIDE_GID, gid.as_raw()))
                .during(|| "write /proc/self/uid_map".into())
        }
    };
    match prepared.and_then(|()| mounts::prepare(report)) {
        Ok(prepared) => Entered::Early(prepared),
        Err(error) => Entered::Failed(report.current_step().to_owned(), error),
    }
}

/// Moves the launcher into the namespaces that its next child, the sandbox's pid 1, is born into, with what is prepared.
pub fn enter(
    spec: &Spec,
    entered: Entered,
    report: &mut Reporter,
) -> Result<Option<Prepared>, StepError> {
    report.step("create namespaces");
    let prepared = match entered {
        Entered::Nothing => None,
        Entered::Early(prepared) => Some(prepared),
        Entered::Failed(step, error) => {
            report.step(&step);
            return Err(error);
        }
    };
    let early = prepared.is_some();
    let mut flags = if early { 0 } else { libc::CLONE_NEWNS };
    for (layer, flag) in [
        (Layer::PidNamespace, libc::CLONE_NEWPID),
        (Layer::NetNamespace, libc::CLONE_NEWNET),
        (Layer::IpcNamespace, libc::CLONE_NEWIPC),
        (Layer::UtsNamespace, libc::CLONE_NEWUTS),
    ] {
        if spec.has(layer) && !(early && EARLY.contains(&layer)) {
            flags |= flag;
        }
    }
    match spec.identity {
        Identity::Caller { .. } if early => sys::unshare(flags).during(|| "unshare".into())?,
        Identity::Leased { .. } => sys::unshare(flags).during(|| "unshare".into())?,
        Identity::Caller { uid, gid } => {
            sys::unshare(flags | libc::CLONE_NEWUSER)
                .during(|| "unshare, with a user namespace".into())?;
            report.step("map the user");
            write_maps(None, (INSIDE_UID, uid), (INSIDE_GID, gid))
                .during(|| "write /proc/self/uid_map".into())?;
        }
    }
    for (layer, how) in [
        (Layer::PidNamespace, "own init, own /proc"),
        (Layer::NetNamespace, "loopback only"),
        (Layer::IpcNamespace, "own SysV IPC and message queues"),
        (Layer::UtsNamespace, "own host name"),
    ] {
        if spec.has(layer) {
            report.layer(layer, how);
        }
    }
    Ok(prepared)
}

/// Writes this process's own maps: one user, one group, and no setgroups.
fn write_maps(proc: Option<BorrowedFd<'_>>, uid: (u32, u32), gid: (u32, u32)) -> io::Result<()> {
    write_proc(proc, "self/setgroups", "deny")?;
    write_proc(proc, "self/uid_map", &format!("{} {} 1", uid.0, uid.1))?;
    write_proc(proc, "self/gid_map", &format!("{} {} 1", gid.0, gid.1))
}

pub fn write_proc(proc: Option<BorrowedFd<'_>>, name: &str, text: &str) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = match proc {
        Some(proc) => rustix::fs::openat(proc, name, flags, Mode::empty())?,
        None => rustix::fs::open(format!("/proc/{name}"), flags, Mode::empty())?,
    };
    // A map must be written in one call.
    match rustix::io::write(&file, text.as_bytes())? {
        n if n == text.len() => Ok(()),
        _ => Err(io::Error::other("short write")),
    }
}

/// For root: a user namespace for each owner among the mapped views, by which that owner is shown as the
/// leased uid. The groups are left unmapped on purpose: the kernel refuses any write, also to a socket
/// or FIFO, whose group has no name in the mount (HAS_UNMAPPED_ID in fs/namei.c), while the owner's
/// reading goes on. A read-only mount alone would not stop a connect().
pub fn owner_maps(spec: &Spec) -> Result<OwnerMaps, StepError> {
    let mut maps = OwnerMaps::new();
    if !spec.is_leased() {
        return Ok(maps);
    }
    for view in spec.views.iter().filter(|v| v.owner == Owner::Mapped) {
        let path = view.source.as_path();
        let owner = rustix::fs::stat(path)
            .during(|| format!("look at {}", path.display()))?
            .st_uid;
        if maps.iter().all(|(uid, _)| *uid != owner) {
            let map = owner_map(owner, spec.identity)
                .during(|| format!("make a user namespace for uid {owner}"))?;
            maps.push((owner, map));
        }
    }
    Ok(maps)
}

/// A group that no file has: what the one entry that a group map needs is spent on.
const GROUP_OF_NOBODY: u32 = 0xffff_fffe;

pub fn owner_map(owner: u32, identity: Identity) -> io::Result<OwnedFd> {
    let (ours, theirs) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    match sys::fork(Parentage::Own)? {
        Forked::Child => {
            drop(ours);
            let done = sys::unshare(libc::CLONE_NEWUSER).is_ok();
            let _told = rustix::io::write(&theirs, &[u8::from(done)]);
            // Holds the namespace until its descriptor has been taken.
            let _released = rustix::io::read(&theirs, &mut [0u8]);
            sys::exit_now(0);
        }
        Forked::Parent { child } => {
            drop(theirs);
            let mut byte = [0u8];
            let made = rustix::io::read(&ours, &mut byte)? == 1 && byte[0] == 1;
            let map = match made {
                true => fill_owner_map(child, owner, identity),
                false => Err(io::Error::from_raw_os_error(libc::EPERM)),
            };
            drop(ours);
            let pid = rustix::process::Pid::from_raw(child);
            let _reaped = rustix::process::waitpid(pid, rustix::process::WaitOptions::empty());
            map
        }
    }
}

fn fill_owner_map(child: i32, owner: u32, identity: Identity) -> io::Result<OwnedFd> {
    let base = format!("/proc/{child}");
    std::fs::write(
        format!("{base}/uid_map"),
        format!("{owner} {} 1", identity.uid()),
    )?;
    std::fs::write(
        format!("{base}/gid_map"),
        format!("{GROUP_OF_NOBODY} {} 1", identity.gid()),
    )?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(
        format!("{base}/ns/user"),
        flags,
        Mode::empty(),
    )?)
}

/// As root: becomes the leased uid, keeping for now the capabilities that the last steps need.
pub fn become_leased(spec: &Spec, report: &mut Reporter) -> Result<(), StepError> {
    let Identity::Leased { uid, gid } = spec.identity else {
        return Ok(());
    };
    report.step("become the leased uid");
    rustix::thread::set_keep_capabilities(true).during(|| "keep capabilities".into())?;
    rustix::thread::set_thread_groups(&[]).during(|| "drop groups".into())?;
    let gid = Gid::from_raw(gid);
    rustix::thread::set_thread_res_gid(gid, gid, gid).during(|| "set the gid".into())?;
    let uid = Uid::from_raw(uid);
    rustix::thread::set_thread_res_uid(uid, uid, uid).during(|| "set the uid".into())?;
    let mut sets = rustix::thread::capabilities(None).during(|| "read capabilities".into())?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets).during(|| "raise capabilities".into())?;
    report.layer(
        Layer::LeasedUid,
        &format!("host uid {}", spec.identity.uid()),
    );
    Ok(())
}

/// Puts the program into a user namespace that owns nothing and in which no further one can be made.
pub fn enter_inner_user(
    spec: &Spec,
    proc: BorrowedFd<'_>,
    report: &mut Reporter,
) -> Result<(), StepError> {
    if !spec.has(Layer::UserNamespace) {
        return Ok(());
    }
    report.step("enter the inner user namespace");
    // Init is not dumpable, and this child is its copy; /proc/self would be root's.
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)
        .during(|| "become dumpable".into())?;
    sys::unshare(libc::CLONE_NEWUSER).during(|| "unshare".into())?;
    let (uid, gid) = match spec.identity {
        Identity::Leased { uid, gid } => (uid, gid),
        Identity::Caller { .. } => (INSIDE_UID, INSIDE_GID),
    };
    write_maps(Some(proc), (INSIDE_UID, uid), (INSIDE_GID, gid))
        .during(|| "write the maps".into())?;
    write_proc(Some(proc), "sys/user/max_user_namespaces", "0")
        .during(|| "forbid further user namespaces".into())?;
    // These are counted for the user on the whole host; one analysis gets a share.
    for (name, most) in [
        ("max_inotify_instances", "32"),
        ("max_inotify_watches", "16384"),
    ] {
        let path = format!("sys/user/{name}");
        write_proc(Some(proc), &path, most).during(|| format!("bound {name}"))?;
    }
    report.layer(Layer::UserNamespace, "owns nothing, may hold no other");
    Ok(())
}

/// Whether the bounding set must go too. Only who has a capability over it can drop it; without it no_new_privs alone
/// keeps file capabilities from having an effect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Bounding {
    Dropped,
    DroppedIfAllowed,
}

impl Bounding {
    /// A plain user at level `landlock` has no namespace in which it would be allowed.
    pub fn of(spec: &Spec) -> Bounding {
        match spec.level {
            Level::Full => Bounding::Dropped,
            Level::Landlock => Bounding::DroppedIfAllowed,
        }
    }
}

/// Gives up every capability for good, in every set. Says what holds.
pub fn drop_capabilities(bounding: Bounding) -> Result<&'static str, StepError> {
    let mut how = "none, in any set";
    for capability in CapabilitySet::all().iter() {
        // A capability that this kernel does not know is not there to be dropped.
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(rustix::io::Errno::PERM) if bounding == Bounding::DroppedIfAllowed => {
                how = "none; the bounding set is the caller's";
            }
            Err(e) => return Err(e).during(|| "drop the bounding set".into()),
        }
    }
    rustix::thread::clear_ambient_capability_set()
        .during(|| "clear ambient capabilities".into())?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).during(|| "drop capabilities".into())?;
    Ok(how)
}
