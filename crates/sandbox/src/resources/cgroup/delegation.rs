//! Finds whether this process may make groups where it is, or must be moved first, and which limits a move would
//! lose.

use std::path::{Path, PathBuf};

use super::host::{Site, lines, parse_membership, read_proc, sites};
use super::node::Node;
use super::{Version, ancestors, v2};

/// Whether this process may make version 2 groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delegation {
    /// There is no version 2 tree with the controllers, or only a part of one is visible. No move could improve this.
    Fixed,
    /// This process owns a version 2 subtree, and the tree's manager, if there is one, has marked it as delegated.
    Delegated,
    /// A version 2 tree has the controllers, but no part of it is delegated to this process.
    Undelegated(GroupLocation),
}

/// The group of this process, by the name that the tree's manager uses, and the limits on the way up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLocation {
    /// The group, as a path from the root of the tree.
    pub group: PathBuf,
    /// The limits of each group, from this process's own group up.
    levels: Vec<(PathBuf, LevelLimits)>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct LevelLimits {
    file: Option<&'static str>,
    pids_max: Option<u64>,
}

impl GroupLocation {
    /// Returns the nearest group below `kept`, including this process's own, that limits memory or CPUs, and the file
    /// that sets the limit. A process that moves elsewhere below `kept` escapes this limit.
    pub fn limit_lost_by_move(&self, kept: &Path) -> Option<(PathBuf, &'static str)> {
        self.levels_below(kept)
            .find_map(|(group, limits)| Some((group.clone(), limits.file?)))
    }

    /// Returns the lowest process limit of the groups below `kept`.
    pub fn pids_max(&self, kept: &Path) -> Option<u64> {
        self.levels_below(kept)
            .filter_map(|(_, limits)| limits.pids_max)
            .min()
    }

    fn levels_below<'a>(
        &'a self,
        kept: &'a Path,
    ) -> impl Iterator<Item = &'a (PathBuf, LevelLimits)> {
        self.levels
            .iter()
            .filter(move |(group, _)| group != kept && group.starts_with(kept))
    }
}

/// Reads whether this process may make groups. Changes nothing; on a version 1 host it reads two short files.
pub fn delegation() -> Delegation {
    let Some(site) = v2_site() else {
        return Delegation::Fixed;
    };
    if v2::is_ours(&site) {
        return Delegation::Delegated;
    }
    location_in(&site).map_or(Delegation::Fixed, Delegation::Undelegated)
}

/// Returns the group of this process in a version 2 tree that has the controllers, whether or not it may make groups
/// there. Returns `None` in the cases of [`Delegation::Fixed`].
pub fn group_location() -> Option<GroupLocation> {
    v2_site().and_then(|site| location_in(&site))
}

fn v2_site() -> Option<Site> {
    let host = sites();
    match host.v1.iter().any(Site::has_limits) {
        true => None,
        false => v2::with_controllers(host).v2,
    }
}

fn location_in(site: &Site) -> Option<GroupLocation> {
    let membership = read_proc("/proc/self/cgroup");
    let group = lines(&membership)
        .filter_map(parse_membership)
        .find_map(|(version, _, path)| (version == Version::V2).then_some(path))?;
    // In a container that sees a part of the tree, the names differ from those of the manager outside.
    (path_below(&site.mount, &group) == site.own).then(|| GroupLocation {
        levels: ancestors(site)
            .filter_map(|node| level_limits(site, &node))
            .collect(),
        group,
    })
}

fn path_below(mount: &Path, group: &Path) -> PathBuf {
    let names = group.components().skip(1);
    std::iter::once(mount.as_os_str())
        .chain(names.map(|name| name.as_os_str()))
        .collect()
}

fn level_limits(site: &Site, node: &Node) -> Option<(PathBuf, LevelLimits)> {
    let group = Path::new("/").join(node.path.strip_prefix(&site.mount).ok()?);
    let numbers = ["memory.max", "memory.high", "memory.swap.max"];
    let mut file = numbers.into_iter().find(|file| node.number(file).is_some());
    if node
        .read("cpu.max")
        .is_ok_and(|text| !text.starts_with("max"))
    {
        file = file.or(Some("cpu.max"));
    }
    if node
        .read("cpuset.cpus")
        .is_ok_and(|text| !text.trim().is_empty())
    {
        file = file.or(Some("cpuset.cpus"));
    }
    let pids_max = node.number("pids.max");
    Some((group, LevelLimits { file, pids_max }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::names::{is_scope_name, scope_name};
    use super::super::{CgroupError, Controller, Hierarchies, OwnProcess, discover, left_behind};
    use super::*;

    #[test]
    fn a_move_loses_the_limits_below_the_kept_group() {
        let level = |group: &str, file, pids_max| (group.into(), LevelLimits { file, pids_max });
        let location = GroupLocation {
            group: "/a.slice/b.slice/c.service".into(),
            levels: vec![
                level("/a.slice/b.slice/c.service", None, Some(50)),
                level("/a.slice/b.slice", Some("memory.max"), Some(20)),
                level("/a.slice", Some("cpu.max"), Some(10)),
                level("/", None, None),
            ],
        };
        let lost = |kept: &str| location.limit_lost_by_move(Path::new(kept));
        assert_eq!(lost("/a.slice/b.slice"), None);
        assert_eq!(
            lost("/a.slice"),
            Some(("/a.slice/b.slice".into(), "memory.max"))
        );
        assert_eq!(lost("/").unwrap().1, "memory.max");
        // Names that only share a prefix.
        assert_eq!(lost("/a"), None);
        assert_eq!(location.pids_max(Path::new("/a.slice/b.slice")), Some(50));
        assert_eq!(location.pids_max(Path::new("/a.slice")), Some(20));
        assert_eq!(location.pids_max(Path::new("/")), Some(10));
    }

    #[test]
    fn with_version_1_delegation_is_fixed() {
        let host = discover(OwnProcess::Stays);
        match host
            .v1
            .iter()
            .any(|s| s.controllers.contains(&Controller::Memory))
        {
            true => assert_eq!((delegation(), group_location()), (Delegation::Fixed, None)),
            false => eprintln!(
                "UNAVAILABLE: no version 1 hierarchy with the memory controller is mounted"
            ),
        }
    }

    #[test]
    fn our_scopes_are_recognised_by_name() {
        let name = scope_name(7);
        assert!(is_scope_name(&name), "{name}");
        let (rest, _) = name.split_once(".scope").unwrap();
        for other in [
            "fumehood-1.scope",
            "fumehood--0000000000000007.scope",
            "fumehood-x-0000000000000007.scope",
            "fumehood-1-7.scope",
            "app-fumehood-1-0000000000000007.scope",
            rest,
            &format!("{rest}.service"),
        ] {
            assert!(!is_scope_name(other), "{other}");
        }
        // Recovery does not mistake a scope for a run's group.
        let path = Path::new("/sys/fs/cgroup").join(&name);
        let mounts = b"1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let answer = left_behind(&path, mounts, &Hierarchies::default());
        assert!(
            matches!(answer, Err(CgroupError::Foreign { .. })),
            "{answer:?}"
        );
    }

    #[test]
    fn names_of_groups_are_put_below_the_mount() {
        let mount = Path::new("/sys/fs/cgroup");
        assert_eq!(path_below(mount, Path::new("/")), mount);
        assert_eq!(path_below(mount, Path::new("/a/b")), mount.join("a/b"));
    }
}
