//! Limits that others set above this process: a batch system's job, a container, a service. They also bind a run that
//! has no group of its own, and the record may name them, but only with a value that was read.

use std::fs;
use std::path::Path;

use super::host::{Site, mounts_and_membership, sites_from};
use super::node::Node;
use super::{Controller, SWAP_NOT_COUNTED, Version, ancestors, host_has_swap};
use crate::spec::Hardness;

/// The limits that apply to this process from above. `None`: there is no limit, or none that can be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AncestorLimits {
    /// In bytes.
    pub memory: Option<AncestorLimit>,
    /// In thousandths of a CPU.
    pub cpus: Option<AncestorLimit>,
    /// The Slurm job of this process, even if its groups limit nothing.
    pub slurm_job: Option<u64>,
}

/// A limit of a group above this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AncestorLimit {
    /// The limit, in the unit that [`AncestorLimits`] names.
    pub value: u64,
    /// The owner and the file: `Slurm job 7, cgroup v2 memory.max of /system.slice/slurmstepd.scope/job_7`.
    pub by: String,
    /// `Watched` if memory can continue to grow in swap when this limit is reached.
    pub how_hard: Hardness,
}

/// Reads the limits above this process. Changes nothing, and treats what cannot be read as absent.
pub fn ancestor_limits() -> AncestorLimits {
    let (mountinfo, membership) = mounts_and_membership();
    let job = std::env::var("SLURM_JOB_ID").ok();
    ancestor_limits_in(&sites_from(&mountinfo, &membership), job.as_deref())
}

fn ancestor_limits_in(sites: &[Site], job_in_environment: Option<&str>) -> AncestorLimits {
    let job = sites.iter().find_map(|site| slurm_job_in(&site.own));
    let quotas = sites.iter().filter_map(quota);
    AncestorLimits {
        memory: tightest(sites.iter().filter_map(memory)),
        cpus: tightest(quotas.chain(sites.iter().filter_map(cpu_set))),
        slurm_job: job.or_else(|| job_in_environment?.parse().ok()),
    }
}

/// Returns the tightest limit. A hard limit comes before a watched one.
fn tightest(limits: impl Iterator<Item = AncestorLimit>) -> Option<AncestorLimit> {
    limits.min_by_key(|limit| (limit.how_hard == Hardness::Watched, limit.value))
}

fn ancestor_limit(site: &Site, group: &Path, file: &str, value: u64) -> AncestorLimit {
    let version = site.version.name();
    let below = group.strip_prefix(&site.mount).unwrap_or(group);
    let owner = slurm_job_in(group).map_or(String::new(), |job| format!("Slurm job {job}, "));
    AncestorLimit {
        value,
        by: format!("{owner}cgroup {version} {file} of /{}", below.display()),
        how_hard: Hardness::Hard,
    }
}

/// Returns the number after `job_`, below a directory of Slurm: `slurm/uid_1000/job_7/step_0` or, with version 2,
/// `slurmstepd.scope/job_7/step_0/user/task_0`. A directory above the job does not belong to the job.
fn slurm_job_in(group: &Path) -> Option<u64> {
    let mut names = group.components().filter_map(|c| c.as_os_str().to_str());
    names.find(|name| name.starts_with("slurm"))?;
    names.find_map(|name| name.strip_prefix("job_")?.parse().ok())
}

/// Version 1 writes "no limit" as the largest whole number of pages.
fn is_limit(value: &u64) -> bool {
    *value < 1 << 62
}

fn memory(site: &Site) -> Option<AncestorLimit> {
    let by_version = match site.version {
        Version::V1 => memory_v1,
        Version::V2 => memory_v2,
    };
    let without_swap = by_version(site, Swap::Free).map(|limit| match host_has_swap() {
        false => limit,
        true => AncestorLimit {
            by: format!("{}{SWAP_NOT_COUNTED}", limit.by),
            how_hard: Hardness::Watched,
            ..limit
        },
    });
    tightest(
        by_version(site, Swap::Counted)
            .into_iter()
            .chain(without_swap),
    )
}

/// Whether a limit has to cover swap too.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Swap {
    Counted,
    Free,
}

fn memory_v2(site: &Site, swap: Swap) -> Option<AncestorLimit> {
    tightest(ancestors(site).filter_map(|node| {
        let memory = node.number("memory.max")?;
        let (file, more) = match swap {
            Swap::Free => ("memory.max", 0),
            Swap::Counted => match node.number("memory.swap.max")? {
                0 => ("memory.max, memory.swap.max=0", 0),
                more => ("memory.max and memory.swap.max", more),
            },
        };
        Some(ancestor_limit(
            site,
            &node.path,
            file,
            memory.saturating_add(more),
        ))
    }))
}

/// The kernel's own minimum over the groups above is the effective limit: with `use_hierarchy` off a limit above has
/// no effect, and a group above a container's mount cannot be opened. The owner of the limit is looked up only to
/// name it.
fn memory_v1(site: &Site, swap: Swap) -> Option<AncestorLimit> {
    if !site.controllers.contains(&Controller::Memory) {
        return None;
    }
    let (file, key) = match swap {
        Swap::Free => ("memory.limit_in_bytes", "hierarchical_memory_limit"),
        Swap::Counted => ("memory.memsw.limit_in_bytes", "hierarchical_memsw_limit"),
    };
    let own = Node::open(Version::V1, &site.own).ok()?;
    let value = own.keyed("memory.stat", key).filter(is_limit)?;
    let owner = ancestors(site).find(|node| node.number(file) == Some(value));
    Some(match owner {
        Some(node) => ancestor_limit(site, &node.path, file, value),
        None => ancestor_limit(site, &own.path, &format!("memory.stat {key}"), value),
    })
}

fn quota(site: &Site) -> Option<AncestorLimit> {
    if site.version == Version::V1 && !site.controllers.contains(&Controller::Cpu) {
        return None;
    }
    tightest(ancestors(site).filter_map(|node| {
        let (file, quota, period) = match site.version {
            Version::V1 => (
                "cpu.cfs_quota_us",
                node.number("cpu.cfs_quota_us")?,
                node.number("cpu.cfs_period_us")?,
            ),
            Version::V2 => {
                let text = node.read("cpu.max").ok()?;
                let (quota, period) = text.trim().split_once(' ')?;
                ("cpu.max", quota.parse().ok()?, period.parse().ok()?)
            }
        };
        // Round up, so that the recorded limit is not below the real one.
        let milli = u64::checked_mul(quota, 1000)?
            .checked_add(u64::checked_sub(period, 1)?)?
            .checked_div(period)?;
        Some(ancestor_limit(site, &node.path, file, milli))
    }))
}

/// A set of CPUs is a limit if it does not contain all CPUs.
fn cpu_set(site: &Site) -> Option<AncestorLimit> {
    let files: &[&'static str] = match site.version {
        Version::V1 if !site.controllers.contains(&Controller::Cpuset) => return None,
        Version::V1 => &["cpuset.effective_cpus", "cpuset.cpus"],
        Version::V2 => &["cpuset.cpus.effective"],
    };
    let all = fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    let all = cpus_in(&all)?;
    // If the controller is off for this process's group, the set of the nearest group above that has it applies.
    let (node, file, count) = ancestors(site).find_map(|node| {
        let read = |file: &&'static str| Some((*file, cpus_in(&node.read(file).ok()?)?));
        let (file, count) = files.iter().find_map(read)?;
        Some((node, file, count))
    })?;
    (count < all).then(|| ancestor_limit(site, &node.path, file, count * 1000))
}

/// Returns how many CPUs a list like `0-3,8` names, or `None` if the text is empty or not such a list.
fn cpus_in(list: &str) -> Option<u64> {
    let mut count = 0u64;
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::node::CreatedGroup;
    use super::super::tests::{MIB, host, limits, start};
    use super::super::{Group, GroupLimits, v1, v2};
    use super::*;

    const PRINT_LIMITS_VARIABLE: &str = "FUMEHOOD_TEST_TELL_OUTER_LIMITS";

    #[test]
    fn a_job_is_named_only_at_or_below_its_directory() {
        for (group, job) in [
            ("/sys/fs/cgroup/memory/slurm/uid_1000/job_7/step_0", Some(7)),
            (
                "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_12",
                Some(12),
            ),
            (
                "/sys/fs/cgroup/memory/slurm_node1/uid_0/job_3/step_batch/task_0",
                Some(3),
            ),
            ("/sys/fs/cgroup/system.slice/slurmd.service", None),
            ("/sys/fs/cgroup/job_7", None),
            ("/job_7/slurm", None),
            ("/slurm/job_x/job_-1", None),
        ] {
            assert_eq!(slurm_job_in(Path::new(group)), job, "{group}");
        }
        // The environment alone names the job, but gives it no limit.
        let output = ancestor_limits_in(&[], Some("42"));
        assert_eq!(output.slurm_job, Some(42));
        assert!(output.memory.is_none() && output.cpus.is_none());
        assert_eq!(ancestor_limits_in(&[], Some("x; rm")).slurm_job, None);
    }

    #[test]
    fn lists_of_cpus_are_counted() {
        for (list, count) in [
            ("0-3,8\n", Some(5)),
            ("0", Some(1)),
            ("", None),
            ("3-0", None),
            ("0-18446744073709551615", None),
            ("a-b", None),
        ] {
            assert_eq!(cpus_in(list), count, "{list:?}");
        }
    }

    /// Only prints. The test below starts this test inside a group.
    #[test]
    fn prints_its_ancestor_limits() {
        if std::env::var_os(PRINT_LIMITS_VARIABLE).is_some() {
            println!("{:?}", ancestor_limits());
        }
    }

    /// Makes a directory with a name as Slurm's, sets real limits on it, and runs this program inside.
    #[test]
    fn a_limit_is_attributed_to_the_job_that_really_has_it() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "slurm", &limits(64 * MIB, 64, 500)).unwrap();
        let free = Group::create(&host, "slurm-free", &GroupLimits::default()).unwrap();
        for (group, limited) in [(group, true), (free, false)] {
            let jobs = nest_as_jobs(&group);
            let exe = std::env::current_exe().unwrap();
            let test = "resources::cgroup::ancestor_limits::tests::prints_its_ancestor_limits";
            let script =
                format!("{PRINT_LIMITS_VARIABLE}=1 exec {exe:?} --exact --nocapture {test}");
            let finished = start(&jobs, &[], &script).wait_with_output().unwrap();
            let output = String::from_utf8(finished.stdout).unwrap();
            for part in &jobs.parts {
                part.rmdir().unwrap();
                let above = part.parent.path.clone();
                fs::remove_dir(&above).unwrap();
                fs::remove_dir(above.parent().unwrap()).unwrap();
            }
            drop(jobs);
            group.remove().unwrap();
            assert!(output.contains("slurm_job: Some(7)"), "{output}");
            let is_listed =
                |limit: &str| output.contains(&format!("{limit}: Some(AncestorLimit {{"));
            // If this machine is itself a container, a limit from further above may apply, which is not Slurm's.
            let by_slurm = output.matches("Slurm job 7, cgroup").count();
            assert_eq!(by_slurm, if limited { 2 } else { 0 }, "{output}");
            if limited {
                assert!(is_listed("memory") && is_listed("cpus"), "{output}");
                assert!(output.contains(&format!("value: {}", 64 * MIB)), "{output}");
                assert!(output.contains("value: 500"), "{output}");
            }
        }
    }

    /// Makes `slurm/uid_0/job_7` below each directory of the group and moves the limits to the job. Returns the jobs
    /// as a group that processes can enter.
    fn nest_as_jobs(group: &Group) -> Group {
        let nest = |part: &CreatedGroup| {
            let mut node = Node::open(part.node.version, &part.node.path).unwrap();
            let mut parent = None;
            for name in ["slurm", "uid_0", "job_7"] {
                if node.version == Version::V2 {
                    for controller in ["+memory", "+cpu"] {
                        node.write("cgroup.subtree_control", controller).unwrap();
                    }
                }
                let child = node.make_child(name).unwrap();
                parent = Some(std::mem::replace(&mut node, child));
            }
            let above = Site {
                version: node.version,
                controllers: part.controllers.clone(),
                mount: part.parent.path.clone(),
                own: part.node.path.clone(),
            };
            let created = CreatedGroup {
                node,
                parent: parent.unwrap(),
                name: "job_7".into(),
                controllers: part.controllers.clone(),
            };
            if created.has(Controller::Memory)
                && memory(&above).is_some_and(|m| m.value == 64 * MIB)
            {
                match created.node.version {
                    Version::V1 => v1::limit_memory(&created, 64 * MIB).unwrap(),
                    Version::V2 => v2::limit_memory(&created, 64 * MIB).unwrap(),
                };
            }
            if created.has(Controller::Cpu) && quota(&above).is_some_and(|q| q.value == 500) {
                match created.node.version {
                    Version::V1 => v1::limit_cpu(&created, 500).unwrap(),
                    Version::V2 => v2::limit_cpu(&created, 500).unwrap(),
                };
            }
            created
        };
        Group {
            parts: group.parts.iter().map(nest).collect(),
            enforcement: Vec::new(),
        }
    }
}
