//! Version 2: one tree for all controllers. Two rules of the kernel shape this file.
//!
//! A controller works in a group only if the group above has switched it on, and a group that has processes of its
//! own cannot do so (except the root). A process that is alone in its delegated group therefore first moves into a
//! leaf below it, and the run's group becomes the leaf's sibling.
//!
//! Only the owner of a delegation may write to a group. A plain user owns the directories that were delegated to it.
//! Root owns all of them, so under systemd the manager's own mark decides.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Access, AtFlags};
use rustix::io::Errno;

use super::host::{Hierarchies, OwnProcess, Site};
use super::names::is_scope_name;
use super::node::{CreatedGroup, Node};
use super::{
    CPU_PERIOD_US, CgroupError, Controller, Counters, EnforcedLimit, Version, ancestors, cpu_limit,
    cpu_quota_us, is_rounded,
};
use crate::standby_slot;

/// The name prefix of the leaf into which a process moves itself. It has an underscore where groups of runs have a
/// hyphen, so no id can make a run's group look like a leaf, and recovery never mistakes a leaf for a run's group.
const LEAF_PREFIX: &str = "fumehood_runner-";
const LEAF_TRIES_MAX: u32 = 3;
const LEAVES_MAX: usize = 1024;

/// One thread at a time moves the process and switches controllers on. The next thread finds both done.
static PREPARE_LOCK: Mutex<()> = Mutex::new(());

/// Fills in which controllers the version 2 tree offers to this process.
pub(super) fn with_controllers(mut host: Hierarchies) -> Hierarchies {
    if let Some(site) = &mut host.v2 {
        site.controllers = offered_controllers(site);
    }
    // A hybrid host mounts version 2 beside version 1 without controllers. Such a tree is of no use.
    host.v2 = host.v2.filter(|site| !site.controllers.is_empty());
    host
}

/// Returns the controllers that the group of this process could pass on. In a leaf of a delegated group these are the
/// controllers of the delegated group, because the leaf itself has none until they are switched on.
fn offered_controllers(site: &Site) -> Vec<Controller> {
    let has = |node: Node| listed_controllers(&node, "cgroup.controllers").unwrap_or_default();
    let own = Node::open(Version::V2, &site.own).map_or_else(|_| Vec::new(), has);
    match own.is_empty() {
        false => own,
        true => delegated_above(site)
            .ok()
            .flatten()
            .map_or_else(Vec::new, has),
    }
}

fn listed_controllers(node: &Node, file: &'static str) -> Result<Vec<Controller>, CgroupError> {
    let text = node.read(file)?;
    let on = |name: &str| text.split_ascii_whitespace().any(|word| word == name);
    let ours = Controller::LIMITING.into_iter();
    Ok(ours.filter(|controller| on(controller.name())).collect())
}

pub(super) fn make(
    site: &Site,
    name: &str,
    own_process: OwnProcess,
) -> Result<CreatedGroup, CgroupError> {
    let (parent, controllers) = prepare_parent(site, own_process)?;
    let node = parent.make_child(name)?;
    let created = CreatedGroup {
        node,
        parent,
        name: name.to_owned(),
        controllers,
    };
    let kind = created.node.read("cgroup.type");
    match kind.as_deref().map(str::trim) {
        Ok("domain") => Ok(created),
        // In a threaded subtree no process can enter the new group. It is empty, so remove it.
        _ => {
            let _ = created.rmdir();
            Err(CgroupError::OthersInside(created.parent.path))
        }
    }
}

/// Finds or prepares the group below which runs' groups are made, and returns the controllers that they get.
pub(super) fn prepare_parent(
    site: &Site,
    own_process: OwnProcess,
) -> Result<(Node, Vec<Controller>), CgroupError> {
    let _guard = PREPARE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = shared_parent(site)? {
        return Ok(shared);
    }
    let own = Node::open(Version::V2, &site.own)?;
    if !is_delegated(&own) {
        return Err(CgroupError::NotDelegated(own.path));
    }
    let on = switch_controllers_on(&own)?;
    if !on.is_empty() {
        return Ok((own, on));
    }
    if own_process == OwnProcess::Stays {
        return Err(CgroupError::MoveNeeded(own.path));
    }
    // A standby launcher would stay behind in the group, and the kernel switches no controller on where a process is.
    standby_slot::dismiss();
    for _ in 0..LEAF_TRIES_MAX {
        match move_into_leaf(&own) {
            Ok(on) if !on.is_empty() => return Ok((own, on)),
            Ok(_) => break,
            // Another process removed the empty leaf before this process entered it. Try again.
            Err(CgroupError::Write { source, .. })
                if matches!(
                    Errno::from_io_error(&source),
                    Some(Errno::NOENT | Errno::NODEV)
                ) => {}
            Err(e) => return Err(e),
        }
    }
    Err(CgroupError::OthersInside(own.path))
}

/// Returns the group above this process's own, if it is the delegated one. This process is then in a leaf already: its
/// own, its daemon's, or one that the service manager made (DelegateSubgroup=).
fn shared_parent(site: &Site) -> Result<Option<(Node, Vec<Controller>)>, CgroupError> {
    let Some(parent) = delegated_above(site)? else {
        return Ok(None);
    };
    let on = switch_controllers_on(&parent)?;
    Ok((!on.is_empty()).then_some((parent, on)))
}

fn delegated_above(site: &Site) -> Result<Option<Node>, CgroupError> {
    if site.own == site.mount {
        return Ok(None);
    }
    let in_leaf = site.own.file_name().and_then(|name| name.to_str());
    let in_leaf = in_leaf.is_some_and(|name| name.starts_with(LEAF_PREFIX));
    let Some(above) = site.own.parent() else {
        return Ok(None);
    };
    let parent = Node::open(Version::V2, above)?;
    let ours = match in_leaf {
        // The process that made the leaf has checked that the group above is delegated.
        true => is_writable(&parent),
        false => is_writable(&parent) && is_marked_delegated(&parent),
    };
    Ok(ours.then_some(parent))
}

/// Returns whether [`prepare_parent`] would find a group that no other process uses. Changes nothing.
pub(super) fn is_ours(site: &Site) -> bool {
    let alone = |node: &Node| {
        let own = [Some(std::process::id()), standby_slot::pid()];
        node.read("cgroup.procs")
            .is_ok_and(|pids| pids.lines().all(|pid| own.contains(&pid.parse().ok())))
    };
    let above = delegated_above(site).ok().flatten();
    let own = Node::open(Version::V2, &site.own).ok();
    let own = own.filter(is_delegated);
    above.is_some_and(|parent| alone(&parent)) || own.is_some_and(|own| alone(&own))
}

fn is_delegated(node: &Node) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    // Without systemd nobody else manages the tree: a container, or a host with a plain init.
    let managed = Path::new("/run/systemd/system").exists();
    let manager_agrees = match is_root {
        true => !managed || is_marked_delegated(node),
        false => !managed || !is_unit_of_user_manager(&node.path) || is_scope(&node.path),
    };
    is_writable(node) && manager_agrees
}

/// Whether the group is a unit of a user's systemd manager. The user owns the groups of all these units, but the
/// manager may reconfigure a unit that it did not delegate at any time, and then the limits of the groups below are
/// lost. The user's manager sets no mark. Of its units, only a scope that was requested as delegated is therefore
/// known to be delegated.
fn is_unit_of_user_manager(path: &Path) -> bool {
    let is_manager = |name: &str| name.starts_with("user@") && name.ends_with(".service");
    let is_unit = |name: &str| {
        let kinds = [".scope", ".service", ".slice"];
        kinds.iter().any(|kind| name.ends_with(kind))
    };
    let mut above = path.ancestors().skip(1).filter_map(name_of);
    name_of(path).is_some_and(is_unit) && above.any(is_manager)
}

fn is_scope(path: &Path) -> bool {
    name_of(path).is_some_and(is_scope_name)
}

fn name_of(path: &Path) -> Option<&str> {
    path.file_name().and_then(|name| name.to_str())
}

/// Whether the directory belongs to this process's user and its control files are writable, as delegation demands.
fn is_writable(node: &Node) -> bool {
    let owned = rustix::fs::fstat(&node.fd)
        .is_ok_and(|stat| stat.st_uid == rustix::process::geteuid().as_raw());
    let writable = |file: &str| {
        rustix::fs::accessat(&node.fd, file, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
    };
    owned && writable("cgroup.procs") && writable("cgroup.subtree_control")
}

/// Whether systemd has marked the group as delegated. Only root can read the older of the two attributes.
fn is_marked_delegated(node: &Node) -> bool {
    ["user.delegate", "trusted.delegate"].iter().any(|name| {
        let mut value = [0; 8];
        rustix::fs::fgetxattr(&node.fd, *name, &mut value[..])
            .is_ok_and(|length| value.get(..length) == Some(&b"1"[..]))
    })
}

/// Switches on those controllers that Fumehood uses and the group has, and returns which are on. Switches none on while
/// processes are in the group itself. The kernel would accept cpu and pids even then, but would make the group the root
/// of a threaded subtree, in which no process of Fumehood could enter a new group.
fn switch_controllers_on(node: &Node) -> Result<Vec<Controller>, CgroupError> {
    const FILE: &str = "cgroup.subtree_control";
    // Only the root of the whole tree has no type. Only the root may have both processes and controllers switched on.
    let is_root = node.read("cgroup.type").is_err();
    if !is_root && !node.read("cgroup.procs")?.trim().is_empty() {
        return Ok(Vec::new());
    }
    let has = listed_controllers(node, "cgroup.controllers")?;
    let on = listed_controllers(node, FILE)?;
    // One by one: a controller that this group cannot have must not prevent the others.
    for controller in has.iter().filter(|controller| !on.contains(controller)) {
        let _ = node.write(FILE, &format!("+{}", controller.name()));
    }
    listed_controllers(node, FILE)
}

/// Moves this process into a leaf and switches the controllers on. If others remain in the group, so that the move
/// does not help, the process moves back.
fn move_into_leaf(own: &Node) -> Result<Vec<Controller>, CgroupError> {
    remove_empty_leaves(own);
    let name = format!("{LEAF_PREFIX}{}", std::process::id());
    let leaf = own.make_child(&name)?;
    let go_back = || {
        // If the process cannot move back, the leaf stays in use, which costs nothing.
        let _ = own.write("cgroup.procs", "0");
        let _ = rustix::fs::unlinkat(&own.fd, &name, AtFlags::REMOVEDIR);
    };
    if let Err(e) = leaf.write("cgroup.procs", "0") {
        go_back();
        return Err(e);
    }
    let on = switch_controllers_on(own);
    if !on.as_ref().is_ok_and(|on| !on.is_empty()) {
        go_back();
    }
    on
}

/// Removes leaves that hold no process. The kernel refuses to remove a leaf in use.
fn remove_empty_leaves(own: &Node) {
    let Ok(entries) = std::fs::read_dir(&own.path) else {
        return;
    };
    for entry in entries.flatten().take(LEAVES_MAX) {
        let name = entry.file_name();
        if name.to_str().is_some_and(|n| n.starts_with(LEAF_PREFIX)) {
            let _ = rustix::fs::unlinkat(&own.fd, &name, AtFlags::REMOVEDIR);
        }
    }
}

/// Sets swap to zero, so that the one limit bounds memory plus swap.
pub(super) fn limit_memory(part: &CreatedGroup, bytes: u64) -> Result<EnforcedLimit, CgroupError> {
    // At the limit the kernel kills the whole program: a pool that lost one worker would wait for it until the
    // deadline. Only the program is in this group, neither its init nor the runner. If the kernel refuses this
    // setting, the limit still holds.
    let _ = part.node.write("memory.oom.group", "1");
    let text = bytes.to_string();
    part.node
        .write_kept("memory.max", &text, is_rounded(bytes))?;
    super::memory_limit(
        "cgroup v2 memory.max, memory.swap.max=0".into(),
        "cgroup v2 memory.max".into(),
        part.node.write_exact("memory.swap.max", "0"),
    )
}

pub(super) fn limit_cpu(part: &CreatedGroup, cpu_milli: u64) -> Result<EnforcedLimit, CgroupError> {
    let text = format!("{} {CPU_PERIOD_US}", cpu_quota_us(cpu_milli));
    part.node.write_exact("cpu.max", &text)?;
    Ok(cpu_limit("cgroup v2 cpu.max", cpu_milli))
}

pub(super) fn count(part: &CreatedGroup, counters: &mut Counters) {
    let node = &part.node;
    if part.has(Controller::Memory) {
        // `oom_kill` includes kills in groups below. `oom` of the local file counts only this group's own limit.
        counters.oom_kills = node.keyed("memory.events", "oom_kill");
        let local = node.keyed("memory.events.local", "oom");
        counters.ooms_at_limit = local.or_else(|| node.keyed("memory.events", "oom"));
        // Linux before 5.19 does not have this file.
        counters.memory_peak_bytes = node.number("memory.peak");
    }
    if part.has(Controller::Pids) {
        counters.pids_peak = node.number("pids.peak");
        counters.pids_denied = node.keyed("pids.events", "max");
    }
    counters.cpu_usage_us = node.keyed("cpu.stat", "usage_usec");
}

pub(super) fn memory_limit(site: &Site) -> Option<u64> {
    ancestors(site)
        .filter_map(|node| node.number("memory.max"))
        .min()
}
