//! Namespaces, user and group maps, and the change to the program's identity.
//!
//! Two user namespaces separate a plain user's program from the host. The outer one owns every other namespace and
//! holds the privilege that builds the sandbox. The program is in the inner one, which owns nothing, so even a full
//! set of capabilities there has no power over the other namespaces. When root runs Fumehood there is no outer user
//! namespace: root builds the sandbox, and the program runs under a leased uid in the inner one.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::process::{DumpableBehavior, Gid, Uid};

use super::mounts::{self, OwnerMaps, PreparedRoot};
use crate::channel;
use crate::launch_step::LaunchStep;
use crate::layout::{INSIDE_GID, INSIDE_UID};
use crate::spec::{ConfinementLevel, Layer, Owner, ProgramIdentity, Spec};
use crate::step_report::{LaunchStepError, Reporter, StepContext};
use crate::sys::{self, ForkSide, Namespace, Parentage, procfs};

/// What a launcher has done before it received its plan.
pub enum EarlyResult {
    Nothing,
    /// The launcher is already pid 1, in the namespaces of [`EARLY_NAMESPACES`].
    Entered(EarlySandbox),
    /// The named step failed.
    Failed(LaunchStep, LaunchStepError),
}

pub struct EarlySandbox {
    pub prepared: PreparedRoot,
    pub network: Network,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Network {
    SetUp,
    NotSetUp,
}

/// The namespaces, beside the mount namespace, that every plan needs. Creating the network namespace costs as much as
/// creating all the others.
const EARLY_NAMESPACES: [(Layer, libc::c_int); 4] = [
    (Layer::PidNamespace, libc::CLONE_NEWPID),
    (Layer::NetNamespace, libc::CLONE_NEWNET),
    (Layer::IpcNamespace, libc::CLONE_NEWIPC),
    (Layer::UtsNamespace, libc::CLONE_NEWUTS),
];

/// Returns whether a launcher that has entered [`EARLY_NAMESPACES`] can serve this plan.
pub fn fits_early(spec: &Spec) -> bool {
    spec.level == ConfinementLevel::Full
        && EARLY_NAMESPACES.iter().all(|(layer, _)| spec.has(*layer))
}

/// Returns how to fork a process that is to enter [`EARLY_NAMESPACES`].
pub fn early_parentage() -> Parentage {
    let user = match rustix::process::geteuid().is_root() {
        true => Namespace::Current,
        false => Namespace::New,
    };
    Parentage::First { user }
}

/// Does what every plan at level `full` needs. Runs as pid 1, forked as [`early_parentage`] says. A failure is kept
/// and reported when a plan has arrived.
pub fn enter_early(uid: Uid, gid: Gid, report: &mut Reporter) -> EarlyResult {
    match enter_early_namespaces(uid, gid, report) {
        Ok(early) => EarlyResult::Entered(early),
        Err(error) => EarlyResult::Failed(report.current_step(), error),
    }
}

fn enter_early_namespaces(
    uid: Uid,
    gid: Gid,
    report: &mut Reporter,
) -> Result<EarlySandbox, LaunchStepError> {
    if !uid.is_root() {
        map_user(uid.as_raw(), gid.as_raw(), report)?;
    }
    report.begin_step(LaunchStep::CreateNamespaces);
    let all = EARLY_NAMESPACES
        .iter()
        .fold(libc::CLONE_NEWNS, |flags, (_, flag)| flags | flag);
    sys::unshare(all & !libc::CLONE_NEWPID).doing("unshare")?;
    let network = match set_up_network(None) {
        Ok(()) => Network::SetUp,
        // The host's /proc may be read-only, and the sandbox's own is not mounted yet. Pid 1 tries again later.
        Err(_) => Network::NotSetUp,
    };
    let prepared = mounts::prepare(report)?;
    Ok(EarlySandbox { prepared, network })
}

/// Brings loopback up, and bounds the buffers of one connection: the kernel counts TCP buffers for the whole host.
pub fn set_up_network(proc: Option<BorrowedFd<'_>>) -> Result<(), LaunchStepError> {
    sys::loopback_up().doing("bring loopback up")?;
    for name in ["tcp_rmem", "tcp_wmem"] {
        let path = format!("sys/net/ipv4/{name}");
        procfs::write(proc, &path, "4096 65536 131072").step_context(|| format!("bound {name}"))?;
    }
    Ok(())
}

/// Moves the launcher into the namespaces in which its next child, the sandbox's pid 1, starts. A standby launcher is
/// already there.
pub fn enter(
    spec: &Spec,
    entered: EarlyResult,
    report: &mut Reporter,
) -> Result<Option<EarlySandbox>, LaunchStepError> {
    report.begin_step(LaunchStep::CreateNamespaces);
    let early = match entered {
        EarlyResult::Nothing => {
            enter_now(spec, report)?;
            None
        }
        EarlyResult::Entered(early) => Some(early),
        EarlyResult::Failed(step, error) => {
            report.begin_step(step);
            return Err(error);
        }
    };
    for (layer, how) in [
        (Layer::PidNamespace, "own init, own /proc"),
        (Layer::NetNamespace, "loopback only"),
        (Layer::IpcNamespace, "own SysV IPC and message queues"),
        (Layer::UtsNamespace, "own host name"),
    ] {
        if spec.has(layer) {
            report.add_layer(layer, how);
        }
    }
    Ok(early)
}

fn enter_now(spec: &Spec, report: &mut Reporter) -> Result<(), LaunchStepError> {
    let asked_for = EARLY_NAMESPACES
        .iter()
        .filter(|(layer, _)| spec.has(*layer));
    let flags = asked_for.fold(libc::CLONE_NEWNS, |flags, (_, flag)| flags | flag);
    match spec.identity {
        ProgramIdentity::Leased { .. } => sys::unshare(flags).doing("unshare"),
        ProgramIdentity::Caller { uid, gid } => {
            sys::unshare(flags | libc::CLONE_NEWUSER).doing("unshare, with a user namespace")?;
            map_user(uid, gid, report)
        }
    }
}

fn map_user(uid: u32, gid: u32, report: &mut Reporter) -> Result<(), LaunchStepError> {
    report.begin_step(LaunchStep::MapUser);
    write_maps(None, uid, gid)
}

/// Writes this process's own maps: one user, one group, and no setgroups.
pub fn write_maps(proc: Option<BorrowedFd<'_>>, uid: u32, gid: u32) -> Result<(), LaunchStepError> {
    for (file, text) in [
        ("self/setgroups", String::from("deny")),
        ("self/uid_map", format!("{INSIDE_UID} {uid} 1")),
        ("self/gid_map", format!("{INSIDE_GID} {gid} 1")),
    ] {
        procfs::write(proc, file, &text).step_context(|| format!("write /proc/{file}"))?;
    }
    Ok(())
}

/// For root: makes a user namespace for each owner among the mapped views. The view is mounted through that
/// namespace, which shows the owner as the leased uid.
///
/// The groups stay unmapped on purpose. The kernel refuses every write, also to a socket or FIFO, whose group has no
/// id in the mount (HAS_UNMAPPED_ID in fs/namei.c), while the owner can still read. A read-only mount alone would not
/// stop a connect().
pub fn owner_maps(spec: &Spec) -> Result<OwnerMaps, LaunchStepError> {
    let mut maps = OwnerMaps::new();
    if !spec.is_leased() {
        return Ok(maps);
    }
    for view in spec.views.iter().filter(|v| v.owner == Owner::Mapped) {
        let path = view.source.as_path();
        let owner = rustix::fs::stat(path)
            .step_context(|| format!("look at {}", path.display()))?
            .st_uid;
        if maps.iter().all(|(uid, _)| *uid != owner) {
            let map = owner_map(owner, spec.identity)
                .step_context(|| format!("make a user namespace for uid {owner}"))?;
            maps.push((owner, map));
        }
    }
    Ok(maps)
}

/// A group that no file has. A group map needs one entry, and this entry maps no real group.
const UNUSED_GID: u32 = 0xffff_fffe;

pub fn owner_map(owner: u32, identity: ProgramIdentity) -> io::Result<OwnedFd> {
    let (ours, theirs) = channel::pair()?;
    match sys::fork(Parentage::Own)? {
        ForkSide::Child => {
            drop(ours);
            // On failure the child exits without writing, and the parent reads an end-of-file.
            if let Some(name) =
                own_proc_name().filter(|_| sys::unshare(libc::CLONE_NEWUSER).is_ok())
            {
                let _ = rustix::io::write(&theirs, &name);
                // Keep the namespace alive until the parent has opened its descriptor.
                let _ = rustix::io::read(&theirs, &mut [0u8]);
            }
            sys::exit_now(0);
        }
        ForkSide::Parent { child } => {
            drop(theirs);
            let mut name = [0u8; 16];
            let len = rustix::io::read(&ours, &mut name)?;
            let map = match str::from_utf8(&name[..len]) {
                Ok(name) if !name.is_empty() => fill_owner_map(name, owner, identity),
                _ => Err(io::Error::from_raw_os_error(libc::EPERM)),
            };
            drop(ours);
            let pid = rustix::process::Pid::from_raw(child);
            let _ = rustix::process::waitpid(pid, rustix::process::WaitOptions::empty());
            map
        }
    }
}

/// Returns this process's name in the host's /proc: its pid in its own namespace may differ.
fn own_proc_name() -> Option<Vec<u8>> {
    let name = rustix::fs::readlink("/proc/self", Vec::new()).ok()?;
    Some(name.into_bytes())
}

fn fill_owner_map(process: &str, owner: u32, identity: ProgramIdentity) -> io::Result<OwnedFd> {
    let base = format!("/proc/{process}");
    std::fs::write(
        format!("{base}/uid_map"),
        format!("{owner} {} 1", identity.uid()),
    )?;
    std::fs::write(
        format!("{base}/gid_map"),
        format!("{UNUSED_GID} {} 1", identity.gid()),
    )?;
    Ok(sys::open(format!("{base}/ns/user"), OFlags::RDONLY)?)
}

/// As root: becomes the leased uid. Without root, does nothing.
pub fn leave_root(spec: &Spec, report: &mut Reporter) -> Result<(), LaunchStepError> {
    let ProgramIdentity::Leased { uid, gid } = spec.identity else {
        return Ok(());
    };
    report.begin_step(LaunchStep::BecomeLeasedUid);
    become_leased(uid, gid)?;
    report.add_layer(Layer::LeasedUid, &format!("host uid {uid}"));
    Ok(())
}

/// Takes these ids, and for now keeps the capabilities that the last steps need.
pub fn become_leased(uid: u32, gid: u32) -> Result<(), LaunchStepError> {
    rustix::thread::set_keep_capabilities(true).doing("keep capabilities")?;
    rustix::thread::set_thread_groups(&[]).doing("drop groups")?;
    let group = Gid::from_raw(gid);
    rustix::thread::set_thread_res_gid(group, group, group)
        .step_context(|| format!("set the gid to {gid}"))?;
    let user = Uid::from_raw(uid);
    rustix::thread::set_thread_res_uid(user, user, user)
        .step_context(|| format!("set the uid to {uid}"))?;
    let mut sets = rustix::thread::capabilities(None).doing("read capabilities")?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets).doing("raise capabilities")
}

/// Returns the uid and gid that the program sees as its own.
pub fn ids_inside(spec: &Spec) -> (u32, u32) {
    match spec.identity {
        // Only tests run without the inner user namespace.
        ProgramIdentity::Leased { uid, gid } if !spec.has(Layer::UserNamespace) => (uid, gid),
        _ => (INSIDE_UID, INSIDE_GID),
    }
}

/// Puts the program into a user namespace that owns nothing and in which no further user namespace can be made.
pub fn enter_inner_user(
    spec: &Spec,
    proc: BorrowedFd<'_>,
    report: &mut Reporter,
) -> Result<(), LaunchStepError> {
    if !spec.has(Layer::UserNamespace) {
        return Ok(());
    }
    report.begin_step(LaunchStep::EnterInnerUserNamespace);
    // This child is a copy of init, which is not dumpable, so root would own the files of /proc/self.
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable).doing("become dumpable")?;
    sys::unshare(libc::CLONE_NEWUSER).doing("unshare")?;
    let (uid, gid) = match spec.identity {
        ProgramIdentity::Leased { uid, gid } => (uid, gid),
        ProgramIdentity::Caller { .. } => (INSIDE_UID, INSIDE_GID),
    };
    write_maps(Some(proc), uid, gid)?;
    procfs::write(Some(proc), "sys/user/max_user_namespaces", "0")
        .doing("forbid further user namespaces")?;
    report.add_layer(Layer::UserNamespace, "owns nothing, may hold no other");
    Ok(())
}
