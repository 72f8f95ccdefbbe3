//! Where this process sits: the mounted hierarchies and its own place in each, from /proc.

use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Controller, Version};

/// Where this process sits in one mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Site {
    pub(super) version: Version,
    pub(super) controllers: Vec<Controller>,
    /// Where the hierarchy is mounted: nothing above it is ours to see.
    pub(super) mount: PathBuf,
    /// The directory of the group this process is in.
    pub(super) own: PathBuf,
}

/// The hierarchies this process sits in and could use.
#[derive(Clone, Debug, Default)]
pub struct Hierarchies {
    pub(super) v1: Vec<Site>,
    pub(super) v2: Option<Site>,
}

impl Hierarchies {
    /// True where no mounted hierarchy offers a controller that limits anything.
    pub fn is_none(&self) -> bool {
        let limits = [Controller::Memory, Controller::Pids, Controller::Cpu];
        let mut sites = self.v1.iter().chain(&self.v2);
        !sites.any(|site| site.controllers.iter().any(|c| limits.contains(c)))
    }
}

/// Every hierarchy we sit in, also one that hands no controller down to us but may limit us from above.
pub(super) fn sites() -> Hierarchies {
    let (mountinfo, membership) = mounts_and_membership();
    host_from(&mountinfo, &membership)
}

/// The mounts that this process sees, and its groups. Of a run's questions in a row only the first makes the kernel write
/// down every mount of the host; the groups may change between two.
pub(super) fn mounts_and_membership() -> (Vec<u8>, Vec<u8>) {
    const GOOD_FOR: Duration = Duration::from_millis(250);
    static MOUNTS: Mutex<Option<(Instant, Vec<u8>)>> = Mutex::new(None);
    let mut known = MOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let fresh = known.take().filter(|(at, _)| at.elapsed() < GOOD_FOR);
    let (at, mounts) = fresh.unwrap_or_else(|| (Instant::now(), read_proc("/proc/self/mountinfo")));
    *known = Some((at, mounts.clone()));
    (mounts, read_proc("/proc/self/cgroup"))
}

/// A file of /proc, in two calls as a rule: it has no size that tells how much room to make.
pub(super) fn read_proc(path: &str) -> Vec<u8> {
    use io::Read;
    let mut bytes = Vec::with_capacity(16 << 10);
    // What cannot be read is empty.
    let _ = fs::File::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
    bytes
}

pub(super) struct CgroupMount {
    pub(super) version: Version,
    pub(super) controllers: Vec<Controller>,
    pub(super) root: PathBuf,
    pub(super) point: PathBuf,
}

pub(super) fn host_from(mountinfo: &[u8], membership: &[u8]) -> Hierarchies {
    let mut host = Hierarchies::default();
    for site in sites_from(mountinfo, membership) {
        match site.version {
            // A hierarchy of cpuset alone holds nothing that we limit or count.
            Version::V1 if site.controllers == [Controller::Cpuset] => {}
            Version::V1 => host.v1.push(site),
            Version::V2 => host.v2 = Some(site),
        }
    }
    host
}

/// Every hierarchy that is mounted where we can see our own place in it.
pub(super) fn sites_from(mountinfo: &[u8], membership: &[u8]) -> Vec<Site> {
    let mounts: Vec<CgroupMount> = lines(mountinfo).filter_map(parse_mount).collect();
    let site = |(version, controllers, path): (Version, Vec<Controller>, PathBuf)| {
        let (mount, own) = mounts
            .iter()
            .filter(|m| m.version == version && m.controllers == controllers)
            .find_map(|m| Some((m, locate(m, &path)?)))?;
        Some(Site {
            version,
            controllers,
            mount: mount.point.clone(),
            own,
        })
    };
    lines(membership)
        .filter_map(parse_membership)
        .filter_map(site)
        .collect()
}

pub(super) fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n').filter(|line| !line.is_empty())
}

/// Every mount point in a mountinfo text, of whatever file system.
pub fn mount_points_in(mountinfo: &[u8]) -> Vec<PathBuf> {
    let points = lines(mountinfo).filter_map(|line| line.split(|b| *b == b' ').nth(4));
    points
        .filter_map(|point| plain_absolute(unescape(point)))
        .collect()
}

/// One line of mountinfo (proc_pid_mountinfo(5)): `id parent dev root point options [tags] - type
/// source super-options`. Lines of other file systems, and lines we do not understand, give `None`.
pub(super) fn parse_mount(line: &[u8]) -> Option<CgroupMount> {
    let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
    let dash = fields.iter().skip(6).position(|f| *f == b"-")? + 6;
    let (version, controllers) = match *fields.get(dash + 1)? {
        b"cgroup" => (Version::V1, controllers_in(fields.get(dash + 3)?)),
        b"cgroup2" => (Version::V2, Vec::new()),
        _ => return None,
    };
    // Of version 1, a hierarchy that holds none of our controllers (name=systemd) is no use.
    (version == Version::V2 || !controllers.is_empty()).then_some(())?;
    Some(CgroupMount {
        version,
        controllers,
        root: plain_absolute(unescape(fields[3]))?,
        point: plain_absolute(unescape(fields[4]))?,
    })
}

/// One line of /proc/self/cgroup: `id:controllers:path`, where version 2 is `0::path`. The path may
/// itself contain colons.
pub(super) fn parse_membership(line: &[u8]) -> Option<(Version, Vec<Controller>, PathBuf)> {
    let mut fields = line.splitn(3, |b| *b == b':');
    let (id, names, path) = (fields.next()?, fields.next()?, fields.next()?);
    let path = plain_absolute(path.to_vec())?;
    match (id, names) {
        (b"0", b"") => Some((Version::V2, Vec::new(), path)),
        _ => {
            let controllers = controllers_in(names);
            (!controllers.is_empty()).then_some((Version::V1, controllers, path))
        }
    }
}

/// Our controllers in a comma-separated list, in a fixed order so that two lists compare.
pub(super) fn controllers_in(list: &[u8]) -> Vec<Controller> {
    let all = ["memory", "pids", "cpu", "cpuacct", "cpuset"];
    all.into_iter()
        .filter(|name| list.split(|b| *b == b',').any(|f| f == name.as_bytes()))
        .filter_map(Controller::from_name)
        .collect()
}

/// The directory of group `path` below a mount that shows the hierarchy from `root` downwards, as
/// the mounts inside a container do.
pub(super) fn locate(mount: &CgroupMount, path: &Path) -> Option<PathBuf> {
    let below = path.strip_prefix(&mount.root).ok()?;
    Some(match below.as_os_str().is_empty() {
        true => mount.point.clone(),
        false => mount.point.join(below),
    })
}

/// The kernel writes space, tab, newline, backslash and `#` as a backslash and three octal digits.
pub(super) fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        match rest {
            [
                b'\\',
                a @ b'0'..=b'3',
                b @ b'0'..=b'7',
                c @ b'0'..=b'7',
                tail @ ..,
            ] => {
                out.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
                rest = tail;
            }
            _ => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

/// An absolute path of plain names. A group outside our cgroup namespace shows as `/../x`, which
/// must never be joined to a mount point.
pub(super) fn plain_absolute(bytes: Vec<u8>) -> Option<PathBuf> {
    let path = PathBuf::from(std::ffi::OsString::from_vec(bytes));
    let plain = path
        .components()
        .all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    (path.is_absolute() && plain && !path.as_os_str().as_bytes().contains(&0)).then_some(path)
}
