//! Version 1: one hierarchy per controller, or per set of controllers mounted together. A group is a directory in
//! each hierarchy, below this process's own group, so that limits set above still apply.

use super::host::Site;
use super::node::{CreatedGroup, Node};
use super::{
    CPU_PERIOD_US, CgroupError, Controller, Counters, EnforcedLimit, Version, ancestors, cpu_limit,
    cpu_quota_us, hard, is_rounded,
};

pub(super) fn make(site: &Site, name: &str) -> Result<CreatedGroup, CgroupError> {
    let parent = Node::open(Version::V1, &site.own)?;
    let node = parent.make_child(name)?;
    let created = CreatedGroup {
        node,
        parent,
        name: name.to_owned(),
        controllers: site.controllers.clone(),
    };
    let inherited = fix_inherited_settings(&created);
    if inherited.is_err() {
        // The group is new and empty. The returned error names the directory.
        let _ = created.rmdir();
    }
    inherited.map(|()| created)
}

/// Corrects settings that a new group inherits wrongly, or does not inherit.
fn fix_inherited_settings(created: &CreatedGroup) -> Result<(), CgroupError> {
    if created.has(Controller::Cpuset) {
        // A new cpuset has no CPUs and no memory nodes, so no process can enter it.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let above = created.parent.read(file)?;
            created.node.write(file, above.trim())?;
        }
    }
    let oom_control = "memory.oom_control";
    if created.has(Controller::Memory)
        && created.node.keyed(oom_control, "oom_kill_disable") == Some(1)
    {
        // oom_kill_disable is inherited. With it, the program would hang forever at its limit instead of being
        // killed.
        created.node.write(oom_control, "0")?;
    }
    Ok(())
}

/// What a program that communicates with itself over loopback needs at least.
const TCP_BYTES_MIN: u64 = 4 << 20;

/// Sets the limit on memory first: the kernel refuses a limit on memory plus swap that is below it. Both have the
/// same value, so that swap adds nothing.
pub(super) fn limit_memory(part: &CreatedGroup, bytes: u64) -> Result<EnforcedLimit, CgroupError> {
    const MEMORY: &str = "memory.limit_in_bytes";
    const WITH_SWAP: &str = "memory.memsw.limit_in_bytes";
    let text = bytes.to_string();
    part.node.write_kept(MEMORY, &text, is_rounded(bytes))?;
    // Version 1 counts TCP buffers separately, and against a number for the whole host. A kernel without this file
    // charges them to nobody.
    let buffers = (bytes / 8).max(TCP_BYTES_MIN);
    let _ = part.node.write_kept(
        "memory.kmem.tcp.limit_in_bytes",
        &buffers.to_string(),
        is_rounded(buffers),
    );
    super::memory_limit(
        format!("cgroup v1 {MEMORY} and {WITH_SWAP}"),
        format!("cgroup v1 {MEMORY}"),
        part.node.write_kept(WITH_SWAP, &text, is_rounded(bytes)),
    )
}

pub(super) fn limit_cpu(part: &CreatedGroup, cpu_milli: u64) -> Result<EnforcedLimit, CgroupError> {
    const QUOTA: &str = "cpu.cfs_quota_us";
    const PERIOD: &str = "cpu.cfs_period_us";
    let quota_us = cpu_quota_us(cpu_milli);
    part.node.write_exact(PERIOD, &CPU_PERIOD_US.to_string())?;
    match part.node.write_exact(QUOTA, &quota_us.to_string()) {
        Ok(()) => Ok(cpu_limit(&format!("cgroup v1 {QUOTA}"), cpu_milli)),
        // The kernel refuses a quota above that of a group above the run's. The run's group then has no quota of its
        // own, and the one above applies, which is tighter than the request.
        Err(e) => match is_tighter_above(part, quota_us) {
            true => Ok(hard(format!("cgroup v1 {QUOTA} of a group above"))),
            false => Err(e),
        },
    }
}

fn is_tighter_above(part: &CreatedGroup, quota_us: u64) -> bool {
    let above = Site {
        version: Version::V1,
        controllers: Vec::new(),
        mount: "/".into(),
        own: part.parent.path.clone(),
    };
    ancestors(&above).any(|node| {
        let quota = node.number("cpu.cfs_quota_us");
        let period = node.number("cpu.cfs_period_us");
        // Compare as fractions: quota / period <= asked / CPU_PERIOD_US. "No quota" reads -1, which does not parse
        // here.
        quota.zip(period).is_some_and(|(quota, period)| {
            u128::from(quota) * u128::from(CPU_PERIOD_US)
                <= u128::from(quota_us) * u128::from(period)
        })
    })
}

pub(super) fn count(part: &CreatedGroup, counters: &mut Counters) {
    let node = &part.node;
    if part.has(Controller::Memory) {
        counters.oom_kills = node.keyed("memory.oom_control", "oom_kill");
        counters.memory_peak_bytes = node.number("memory.max_usage_in_bytes");
    }
    if part.has(Controller::Pids) {
        counters.pids_peak = node.number("pids.peak");
        counters.pids_denied = node.keyed("pids.events", "max");
    }
    if part.has(Controller::Cpuacct) {
        counters.cpu_usage_us = node.number("cpuacct.usage").map(|ns| ns / 1000);
    }
}

/// Returns the lowest memory limit above this process. `hierarchical_memory_limit` also covers groups above a
/// container's mount, which cannot be opened from inside.
pub(super) fn memory_limit(site: &Site) -> Option<u64> {
    if !site.controllers.contains(&Controller::Memory) {
        return None;
    }
    let own = Node::open(Version::V1, &site.own).ok()?;
    own.keyed("memory.stat", "hierarchical_memory_limit")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{Group, GroupLimits, Hierarchies, OwnProcess, discover};
    use super::*;
    use crate::spec::LimitName;

    /// The kernel refuses a child more than its parent has. The parent's quota is then the limit.
    #[test]
    fn a_tighter_cpu_quota_above_is_the_limit() {
        let host = discover(OwnProcess::Stays);
        let cpu = |site: &&Site| site.controllers.contains(&Controller::Cpu);
        let Some(site) = host.v1.iter().find(cpu) else {
            eprintln!("UNAVAILABLE: no version 1 hierarchy with the cpu controller is mounted");
            return;
        };
        let only_cpu = |own: &std::path::Path| Hierarchies {
            v1: vec![Site {
                own: own.to_path_buf(),
                ..site.clone()
            }],
            ..Hierarchies::default()
        };
        let limits = |cpu_milli| GroupLimits {
            cpu_milli: Some(cpu_milli),
            ..GroupLimits::default()
        };
        let outer = Group::create(&only_cpu(&site.own), "outer", &limits(500)).unwrap();
        let inside = only_cpu(&outer.paths()[0]);
        for (asked, by) in [
            (1000, "cgroup v1 cpu.cfs_quota_us of a group above"),
            (200, "cgroup v1 cpu.cfs_quota_us"),
            (
                1,
                "cgroup v1 cpu.cfs_quota_us (raised to the kernel's least, 0.01 CPU)",
            ),
        ] {
            let inner = Group::create(&inside, "inner", &limits(asked)).unwrap();
            assert_eq!(inner.enforces(LimitName::Cpus).unwrap().by, by);
            inner.remove().unwrap();
        }
        outer.remove().unwrap();
    }
}
