//! Finds the mounted cgroup hierarchies and this process's group in each, from /proc.

use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Controller, Version};

/// This process's group in one mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Site {
    pub(super) version: Version,
    pub(super) controllers: Vec<Controller>,
    /// The mount point of the hierarchy. This process cannot see groups above it.
    pub(super) mount: PathBuf,
    /// The directory of the group this process is in.
    pub(super) own: PathBuf,
}

impl Site {
    /// Whether the hierarchy offers a controller that limits anything.
    pub(super) fn has_limits(&self) -> bool {
        let mut controllers = self.controllers.iter();
        controllers.any(|controller| Controller::LIMITING.contains(controller))
    }
}

/// The hierarchies that this process is in and could use.
#[derive(Clone, Debug, Default)]
pub struct Hierarchies {
    pub(super) v1: Vec<Site>,
    pub(super) v2: Option<Site>,
    pub(super) own_process: OwnProcess,
}

/// Whether [`Group::create`](super::Group::create) may move the calling process into another cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OwnProcess {
    /// It stays where it is.
    #[default]
    Stays,
    /// If it is alone in its version 2 group, it moves into a leaf below that group: the kernel switches controllers on
    /// only in a group without processes. The standby launcher is ended before.
    MayMove,
}

impl Hierarchies {
    /// Returns true if no mounted hierarchy offers a controller that limits anything.
    pub fn is_none(&self) -> bool {
        !self.v1.iter().chain(&self.v2).any(Site::has_limits)
    }
}

/// Returns every hierarchy of this process, even one that offers it no controller but may limit it from above.
pub(super) fn sites() -> Hierarchies {
    let (mountinfo, membership) = mounts_and_membership();
    host_from(&mountinfo, &membership)
}

/// Returns the lines of the cgroup mounts that this process sees, and its groups. The mounts are cached for a short
/// time, because the kernel has to list every mount of the host for each read. The groups are read each time, because
/// they may change.
pub(super) fn mounts_and_membership() -> (Vec<u8>, Vec<u8>) {
    const CACHE_TIME: Duration = Duration::from_millis(250);
    static MOUNTS: Mutex<Option<(Instant, Vec<u8>)>> = Mutex::new(None);
    let mut cached = MOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let fresh = cached.take().filter(|(at, _)| at.elapsed() < CACHE_TIME);
    let (at, mounts) = fresh.unwrap_or_else(|| {
        let all = read_proc("/proc/self/mountinfo");
        (Instant::now(), cgroup_lines(&all))
    });
    *cached = Some((at, mounts.clone()));
    (mounts, read_proc("/proc/self/cgroup"))
}

/// Returns the lines that may describe a cgroup mount; [`parse_mount`] decides. Most mounts of a host have another
/// type, and the cached lines are parsed several times per run.
pub(super) fn cgroup_lines(mountinfo: &[u8]) -> Vec<u8> {
    const MARK: &[u8] = b" - cgroup";
    let mut kept = Vec::new();
    for line in lines(mountinfo) {
        // Only a separator follows a space and precedes the type; a space within a field is escaped.
        let mut rest = line;
        while let Some(at) = rest.iter().position(|b| *b == MARK[1]) {
            if at > 0 && rest[at - 1..].starts_with(MARK) {
                kept.extend_from_slice(line);
                kept.push(b'\n');
                break;
            }
            rest = &rest[at + 1..];
        }
    }
    kept
}

/// Reads a file of /proc, usually in two calls. Such a file reports no size: the buffer has room for a typical file,
/// and the size is not asked for, as `read_to_end` of a [`File`](fs::File) does.
pub(super) fn read_proc(path: &str) -> Vec<u8> {
    use io::Read;
    let mut bytes = Vec::with_capacity(16 << 10);
    // A file that cannot be read counts as empty.
    let _ = fs::File::open(path).and_then(|file| file.take(u64::MAX).read_to_end(&mut bytes));
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
            // A hierarchy with only cpuset has nothing that Fumehood limits or counts.
            Version::V1 if site.controllers == [Controller::Cpuset] => {}
            Version::V1 => host.v1.push(site),
            Version::V2 => host.v2 = Some(site),
        }
    }
    host
}

/// Returns every hierarchy whose mount shows this process's own group.
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

/// Returns every mount point in a mountinfo text, of any file system.
pub fn mount_points_in(mountinfo: &[u8]) -> Vec<PathBuf> {
    let points = lines(mountinfo).filter_map(|line| line.split(|b| *b == b' ').nth(4));
    points
        .filter_map(|point| plain_absolute(unescape(point)))
        .collect()
}

/// Parses one line of mountinfo (proc_pid_mountinfo(5)): `id parent dev root point options [tags] - type source
/// super-options`. Returns `None` for a line of another file system, and for a line that cannot be parsed.
pub(super) fn parse_mount(line: &[u8]) -> Option<CgroupMount> {
    let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
    let dash = fields.iter().skip(6).position(|f| *f == b"-")? + 6;
    let (version, controllers) = match *fields.get(dash + 1)? {
        b"cgroup" => (Version::V1, controllers_in(fields.get(dash + 3)?)),
        b"cgroup2" => (Version::V2, Vec::new()),
        _ => return None,
    };
    // A version 1 hierarchy with none of the controllers that Fumehood uses (name=systemd) is of no use.
    (version == Version::V2 || !controllers.is_empty()).then_some(())?;
    Some(CgroupMount {
        version,
        controllers,
        root: plain_absolute(unescape(fields[3]))?,
        point: plain_absolute(unescape(fields[4]))?,
    })
}

/// Parses one line of /proc/self/cgroup: `id:controllers:path`, where version 2 is `0::path`. The path may itself
/// contain colons.
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

/// Returns those controllers of a comma-separated list that Fumehood uses, in a fixed order so that two lists can be
/// compared.
pub(super) fn controllers_in(list: &[u8]) -> Vec<Controller> {
    let is_listed = |controller: &Controller| {
        let mut names = list.split(|b| *b == b',');
        names.any(|name| name == controller.name().as_bytes())
    };
    Controller::ALL.into_iter().filter(is_listed).collect()
}

/// Returns the directory of group `path` below a mount that shows the hierarchy from `root` downwards, as the mounts
/// inside a container do.
pub(super) fn locate(mount: &CgroupMount, path: &Path) -> Option<PathBuf> {
    let below = path.strip_prefix(&mount.root).ok()?;
    Some(match below.as_os_str().is_empty() {
        true => mount.point.clone(),
        false => mount.point.join(below),
    })
}

/// Decodes mountinfo's escapes: the kernel writes space, tab, newline, backslash and `#` as a backslash and three
/// octal digits.
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

/// Returns an absolute path of plain names. A group outside this process's cgroup namespace appears as `/../x`, which
/// must never be joined to a mount point.
pub(super) fn plain_absolute(bytes: Vec<u8>) -> Option<PathBuf> {
    let path = PathBuf::from(std::ffi::OsString::from_vec(bytes));
    let plain = path
        .components()
        .all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    (path.is_absolute() && plain && !path.as_os_str().as_bytes().contains(&0)).then_some(path)
}
