//! Version 1: one hierarchy per controller, or per set of controllers mounted together. A group is a
//! directory in each, below the one this process sits in, so that limits set above still hold.

use rustix::io::Errno;

use super::host::Site;
use super::node::{CreatedGroup, Node};
use super::{
    CPU_PERIOD_US, CPU_QUOTA_US_MIN, CgroupError, Controller, Counters, EnforcedLimit, Version,
    ancestors, cpu_quota_us, hard, host_has_swap, is_rounded, memory_alone,
};

pub(super) fn make(site: &Site, name: &str) -> Result<CreatedGroup, CgroupError> {
    let parent = Node::open(Version::V1, &site.own)?;
    let node = parent.make_child(name)?;
    let made = CreatedGroup {
        node,
        parent,
        name: name.to_owned(),
        controllers: site.controllers.clone(),
    };
    let inherited = inherit(&made);
    if inherited.is_err() {
        // Made a moment ago and empty; the error that is on its way names the directory.
        let _ = made.rmdir();
    }
    inherited.map(|()| made)
}

/// Settings that a new group takes over wrongly, or not at all.
fn inherit(made: &CreatedGroup) -> Result<(), CgroupError> {
    if made.has(Controller::Cpuset) {
        // A new cpuset has no CPUs and no memory nodes, and no process can enter it.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let above = made.parent.read(file)?;
            made.node.write(file, above.trim())?;
        }
    }
    let oom_control = "memory.oom_control";
    if made.has(Controller::Memory) && made.node.keyed(oom_control, "oom_kill_disable") == Some(1) {
        // Inherited from above. At its limit the program would hang for ever instead of being killed.
        made.node.write(oom_control, "0")?;
    }
    Ok(())
}

/// What a program that talks to itself over loopback needs at least.
const TCP_BYTES_MIN: u64 = 4 << 20;

/// The limit on memory comes first: the kernel refuses a limit on memory with swap below it. Both are
/// the same number, so that swap adds nothing.
pub(super) fn limit_memory(part: &CreatedGroup, bytes: u64) -> Result<EnforcedLimit, CgroupError> {
    const MEMORY: &str = "memory.limit_in_bytes";
    const WITH_SWAP: &str = "memory.memsw.limit_in_bytes";
    let text = bytes.to_string();
    part.node.write_kept(MEMORY, &text, is_rounded(bytes))?;
    // TCP buffers are counted apart here, and against a number for the whole host. A kernel that does not have the
    // file charges them to nobody.
    let buffers = (bytes / 8).max(TCP_BYTES_MIN);
    let _ = part.node.write_kept(
        "memory.kmem.tcp.limit_in_bytes",
        &buffers.to_string(),
        is_rounded(buffers),
    );
    match part.node.write_kept(WITH_SWAP, &text, is_rounded(bytes)) {
        Ok(()) => Ok(hard(format!("cgroup v1 {MEMORY} and {WITH_SWAP}"))),
        // Kernels started without swap accounting do not have the file.
        Err(CgroupError::Write { source, .. })
            if Errno::from_io_error(&source) == Some(Errno::NOENT) =>
        {
            Ok(memory_alone(format!("cgroup v1 {MEMORY}"), host_has_swap()))
        }
        Err(e) => Err(e),
    }
}

pub(super) fn limit_cpu(part: &CreatedGroup, cpu_milli: u64) -> Result<EnforcedLimit, CgroupError> {
    const QUOTA: &str = "cpu.cfs_quota_us";
    const PERIOD: &str = "cpu.cfs_period_us";
    let period = CPU_PERIOD_US.to_string();
    let quota_us = cpu_quota_us(cpu_milli);
    let quota = quota_us.to_string();
    part.node
        .write_kept(PERIOD, &period, |found| found == period)?;
    match part.node.write_kept(QUOTA, &quota, |found| found == quota) {
        Ok(()) => Ok(hard(match quota_us > CPU_QUOTA_US_MIN || cpu_milli == 10 {
            true => format!("cgroup v1 {QUOTA}"),
            false => format!("cgroup v1 {QUOTA} (raised to the kernel's least, 0.01 CPU)"),
        })),
        // The kernel refuses a quota above that of a group above ours. Ours then has none of its own
        // and the one above holds, which is tighter than what was asked for.
        Err(e) => match tighter_above(part, quota_us) {
            true => Ok(hard(format!("cgroup v1 {QUOTA} of a group above"))),
            false => Err(e),
        },
    }
}

fn tighter_above(part: &CreatedGroup, quota_us: u64) -> bool {
    let above = Site {
        version: Version::V1,
        controllers: Vec::new(),
        mount: "/".into(),
        own: part.parent.path.clone(),
    };
    ancestors(&above).any(|node| {
        let quota = node.number("cpu.cfs_quota_us");
        let period = node.number("cpu.cfs_period_us");
        // Compared as fractions: quota / period <= asked / CPU_PERIOD_US. No quota reads -1, which is no number here.
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

/// The least memory limit over this process. `hierarchical_memory_limit` also covers groups above a
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
    use super::super::{Group, GroupLimits, Hierarchies, discover};
    use super::*;
    use crate::spec::LimitName;

    /// The kernel refuses a child more than its parent has; the parent's quota then is the limit.
    #[test]
    fn a_tighter_cpu_quota_above_is_what_holds() {
        let host = discover();
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
            v2: None,
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
