//! Whether this process may make groups where it is or would first have to be moved, and what a move would leave behind.

use std::fs;
use std::path::{Path, PathBuf};

use super::host::{Site, lines, parse_membership, sites};
use super::node::Node;
use super::{Controller, Version, ancestors, v2};

/// How this process stands with the groups of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delegation {
    /// There is no version 2 tree with the controllers, or a part of it only: nobody could move us to a better place.
    Fixed,
    /// A version 2 subtree is ours, marked as such by its manager if there is one.
    Delegated,
    /// A version 2 tree has the controllers, but no part of it is ours.
    Undelegated(GroupLocation),
}

/// The group this process is in, by the name that the manager of the tree has for it, and what it limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLocation {
    pub group: PathBuf,
    /// From our own group up: what each limits for those below it.
    levels: Vec<(PathBuf, LevelLimits)>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct LevelLimits {
    file: Option<&'static str>,
    pids_max: Option<u64>,
}

impl GroupLocation {
    /// The nearest group below `kept`, our own included, that limits memory or CPUs, and the file that does. Who
    /// leaves for another place below `kept` is rid of that limit.
    pub fn limit_lost_by_move(&self, kept: &Path) -> Option<(PathBuf, &'static str)> {
        self.levels_below(kept)
            .find_map(|(group, limiting)| Some((group.clone(), limiting.file?)))
    }

    /// The least number of processes that a group below `kept` allows.
    pub fn pids_max(&self, kept: &Path) -> Option<u64> {
        self.levels_below(kept)
            .filter_map(|(_, limiting)| limiting.pids_max)
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

/// Reads how this process stands. Changes nothing; a host of version 1 costs two short files.
pub fn delegation() -> Delegation {
    let Some(site) = v2_site() else {
        return Delegation::Fixed;
    };
    if v2::is_ours(&site) {
        return Delegation::Delegated;
    }
    location_in(&site).map_or(Delegation::Fixed, Delegation::Undelegated)
}

/// Where this process is in a version 2 tree that has the controllers, whether or not it may make groups there. `None`
/// as with [`Delegation::Fixed`].
pub fn group_location() -> Option<GroupLocation> {
    v2_site().and_then(|site| location_in(&site))
}

fn v2_site() -> Option<Site> {
    let host = sites();
    let limits = [Controller::Memory, Controller::Pids, Controller::Cpu];
    let limits_by_v1 = |site: &Site| site.controllers.iter().any(|c| limits.contains(c));
    match host.v1.iter().any(limits_by_v1) {
        true => None,
        false => v2::with_controllers(host).v2,
    }
}

fn location_in(site: &Site) -> Option<GroupLocation> {
    let membership = fs::read("/proc/self/cgroup").unwrap_or_default();
    let group = lines(&membership)
        .filter_map(parse_membership)
        .find_map(|(version, _, path)| (version == Version::V2).then_some(path))?;
    // In a container that sees a part of the tree, its names are not those of the manager outside.
    (below(&site.mount, &group) == site.own).then(|| GroupLocation {
        levels: ancestors(site)
            .filter_map(|node| level(site, &node))
            .collect(),
        group,
    })
}

fn below(mount: &Path, group: &Path) -> PathBuf {
    let names = group.components().skip(1);
    std::iter::once(mount.as_os_str())
        .chain(names.map(|name| name.as_os_str()))
        .collect()
}

fn level(site: &Site, node: &Node) -> Option<(PathBuf, LevelLimits)> {
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
    use super::super::{CgroupError, Hierarchies, discover, left_behind};
    use super::*;

    #[test]
    fn what_a_move_would_shed_is_what_lies_below_the_place_that_is_kept() {
        let level = |group: &str, file, pids_max| (group.into(), LevelLimits { file, pids_max });
        let place = GroupLocation {
            group: "/a.slice/b.slice/c.service".into(),
            levels: vec![
                level("/a.slice/b.slice/c.service", None, Some(50)),
                level("/a.slice/b.slice", Some("memory.max"), Some(20)),
                level("/a.slice", Some("cpu.max"), Some(10)),
                level("/", None, None),
            ],
        };
        let shed = |kept: &str| place.limit_lost_by_move(Path::new(kept));
        assert_eq!(shed("/a.slice/b.slice"), None);
        assert_eq!(
            shed("/a.slice"),
            Some(("/a.slice/b.slice".into(), "memory.max"))
        );
        assert_eq!(shed("/").unwrap().1, "memory.max");
        // Names that merely begin alike.
        assert_eq!(shed("/a"), None);
        assert_eq!(place.pids_max(Path::new("/a.slice/b.slice")), Some(50));
        assert_eq!(place.pids_max(Path::new("/a.slice")), Some(20));
        assert_eq!(place.pids_max(Path::new("/")), Some(10));
    }

    #[test]
    fn with_version_1_there_is_nothing_to_ask_for() {
        let host = discover();
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
    fn a_scope_of_ours_is_known_by_its_name() {
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
        // Recovery takes it for no run's group.
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
        assert_eq!(below(mount, Path::new("/")), mount);
        assert_eq!(below(mount, Path::new("/a/b")), mount.join("a/b"));
    }
}
