//! Control groups: one group per run, made with its limits before the first process enters it.
//!
//! The runner makes the group and opens the files by which processes attach; each process of the
//! run then attaches *itself* by writing `0` to them, because moving a process from outside takes
//! several times as long. The kernel checks the credentials of whoever opened the file, so the
//! launcher can attach after it has dropped its own.
//!
//! Both versions are spoken, per controller: version 2 where its tree offers the controller to us
//! (`v2.rs`), version 1 otherwise (`v1.rs`). What works is found by trying it and reading the
//! value back. Only groups made here are ever written to, with one exception: a version 2
//! subtree delegated to us must have its controllers switched on.
//!
//! Invariant: no path or pid is trusted for longer than it is held. Directories are held by
//! descriptor, processes by pidfd.

mod v1;
mod v2;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

use crate::spec::{Hardness, LimitName};

/// Every group made for a run is called `fumehood-<id>-<pid of the runner>`; recovery touches no other.
const NAME_PREFIX: &str = "fumehood-";
const ID_LEN_MAX: usize = 64;
/// The kernel's own files are far smaller; a longer answer is cut, not waited for.
const FILE_BYTES_MAX: usize = 1 << 20;
/// A killed process leaves its group within milliseconds; a longer wait means it cannot die.
const REMOVE_WAIT: Duration = Duration::from_secs(2);
const KILL_WAIT: Duration = Duration::from_secs(2);
/// Descriptors held at once while killing, well below any usual RLIMIT_NOFILE.
const KILL_CHUNK: usize = 128;

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error(
        "no cgroup that this process may use: run as root, or inside a delegated subtree (systemd-run --scope -p Delegate=yes, with --user for a plain user)"
    )]
    Unavailable {
        #[source]
        refusal: Option<Box<CgroupError>>,
    },
    #[error("{0:?} cannot be part of a cgroup's name")]
    BadName(String),
    #[error("no usable cgroup hierarchy has the {0} controller")]
    NoController(&'static str),
    #[error("open cgroup {path:?}")]
    Open { path: PathBuf, source: io::Error },
    #[error("{0:?} is not on a cgroup file system")]
    NotCgroup(PathBuf),
    #[error("make cgroup {path:?}")]
    Make { path: PathBuf, source: io::Error },
    #[error("read {file} of cgroup {path:?}")]
    Read {
        path: PathBuf,
        file: &'static str,
        source: io::Error,
    },
    #[error("write {value:?} to {file} of cgroup {path:?}")]
    Write {
        path: PathBuf,
        file: &'static str,
        value: String,
        source: io::Error,
    },
    #[error("{file} of cgroup {path:?} holds {found:?} after {wrote:?} was written")]
    NotKept {
        path: PathBuf,
        file: &'static str,
        wrote: String,
        found: String,
    },
    #[error(
        "cgroup {0:?} is not delegated to this process: use systemd-run --scope -p Delegate=yes"
    )]
    NotDelegated(PathBuf),
    #[error(
        "other processes sit in cgroup {0:?}, so its controllers cannot be switched on: start fumehood alone in its own scope or service"
    )]
    OthersInside(PathBuf),
    #[error("processes remain in cgroup {0:?}")]
    Busy(PathBuf),
    #[error("remove cgroup {path:?}")]
    Remove { path: PathBuf, source: io::Error },
    #[error("read the boot id")]
    BootId(#[source] io::Error),
    #[error("cgroup {path:?} is left alone: {why}")]
    Foreign { path: PathBuf, why: &'static str },
}

impl CgroupError {
    /// Whether the error only says that this hierarchy is not for us, so that another may be tried.
    /// Anything else, above all a group that exists already, stops the run.
    fn means_not_ours(&self) -> bool {
        match self {
            CgroupError::Open { source, .. }
            | CgroupError::Make { source, .. }
            | CgroupError::Read { source, .. }
            | CgroupError::Write { source, .. } => matches!(
                Errno::from_io_error(source),
                Some(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::NOENT | Errno::OPNOTSUPP)
            ),
            CgroupError::NotCgroup(_)
            | CgroupError::NoController(_)
            | CgroupError::NotDelegated(_)
            | CgroupError::OthersInside(_) => true,
            _ => false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// The file system's magic number (linux/magic.h), which no other mount can imitate.
    fn magic(self) -> u64 {
        match self {
            Version::V1 => 0x0027_e0eb,
            Version::V2 => 0x6367_7270,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Controller {
    Memory,
    Pids,
    Cpu,
    Cpuacct,
    Cpuset,
}

impl Controller {
    fn from_name(name: &str) -> Option<Controller> {
        Some(match name {
            "memory" => Controller::Memory,
            "pids" => Controller::Pids,
            "cpu" => Controller::Cpu,
            "cpuacct" => Controller::Cpuacct,
            "cpuset" => Controller::Cpuset,
            _ => return None,
        })
    }
}

/// Where this process sits in one mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Site {
    version: Version,
    controllers: Vec<Controller>,
    /// Where the hierarchy is mounted: nothing above it is ours to see.
    mount: PathBuf,
    /// The directory of the group this process is in.
    own: PathBuf,
}

/// The hierarchies this process sits in and could use.
#[derive(Clone, Debug, Default)]
pub struct Host {
    v1: Vec<Site>,
    v2: Option<Site>,
}

impl Host {
    /// True where no mounted hierarchy offers a controller that limits anything.
    pub fn is_none(&self) -> bool {
        let limits = [Controller::Memory, Controller::Pids, Controller::Cpu];
        let mut sites = self.v1.iter().chain(&self.v2);
        !sites.any(|site| site.controllers.iter().any(|c| limits.contains(c)))
    }

    /// Makes the version 2 subtree ready, moving this process into a leaf of its own if need be.
    /// A daemon calls this before it starts anything, so that its children are born in the leaf
    /// and none of them keeps the controllers from being switched on. [`Group::create`] does the
    /// same for a process that is alone. Without a version 2 tree there is nothing to do.
    pub fn prepare(&self) -> Result<(), CgroupError> {
        match &self.v2 {
            Some(site) => v2::settle(site).map(|_| ()),
            None => Ok(()),
        }
    }
}

/// Reads where this process sits. Nothing is changed, and nothing that cannot be read is an error:
/// a host without cgroups gives a [`Host`] that is none.
pub fn discover() -> Host {
    let mut host = sites();
    if let Some(site) = &mut host.v2 {
        site.controllers = v2::offered(site);
    }
    // A hybrid host mounts version 2 beside version 1 with no controllers: that one is no use.
    host.v2 = host.v2.filter(|site| !site.controllers.is_empty());
    host
}

/// Every hierarchy we sit in, also one that hands no controller down to us but may limit us from above.
fn sites() -> Host {
    let mountinfo = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let membership = fs::read("/proc/self/cgroup").unwrap_or_default();
    host_from(&mountinfo, &membership)
}

struct Mount {
    version: Version,
    controllers: Vec<Controller>,
    root: PathBuf,
    point: PathBuf,
}

fn host_from(mountinfo: &[u8], membership: &[u8]) -> Host {
    let mounts: Vec<Mount> = lines(mountinfo).filter_map(parse_mount).collect();
    let mut host = Host::default();
    for (version, controllers, path) in lines(membership).filter_map(parse_membership) {
        let found = mounts
            .iter()
            .filter(|m| m.version == version && m.controllers == controllers)
            .find_map(|m| Some((m, locate(m, &path)?)));
        let Some((mount, own)) = found else { continue };
        // A hierarchy of cpuset alone holds nothing that we limit or count.
        if controllers == [Controller::Cpuset] {
            continue;
        }
        let site = Site {
            version,
            controllers,
            mount: mount.point.clone(),
            own,
        };
        match version {
            Version::V1 => host.v1.push(site),
            Version::V2 => host.v2 = Some(site),
        }
    }
    host
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n').filter(|line| !line.is_empty())
}

/// One line of mountinfo (proc_pid_mountinfo(5)): `id parent dev root point options [tags] - type
/// source super-options`. Lines of other file systems, and lines we do not understand, give `None`.
fn parse_mount(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
    let dash = fields.iter().skip(6).position(|f| *f == b"-")? + 6;
    let (version, controllers) = match *fields.get(dash + 1)? {
        b"cgroup" => (Version::V1, controllers_in(fields.get(dash + 3)?)),
        b"cgroup2" => (Version::V2, Vec::new()),
        _ => return None,
    };
    // Of version 1, a hierarchy that holds none of our controllers (name=systemd) is no use.
    (version == Version::V2 || !controllers.is_empty()).then_some(())?;
    Some(Mount {
        version,
        controllers,
        root: plain_absolute(unescape(fields[3]))?,
        point: plain_absolute(unescape(fields[4]))?,
    })
}

/// One line of /proc/self/cgroup: `id:controllers:path`, where version 2 is `0::path`. The path may
/// itself contain colons.
fn parse_membership(line: &[u8]) -> Option<(Version, Vec<Controller>, PathBuf)> {
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
fn controllers_in(list: &[u8]) -> Vec<Controller> {
    let all = ["memory", "pids", "cpu", "cpuacct", "cpuset"];
    all.into_iter()
        .filter(|name| list.split(|b| *b == b',').any(|f| f == name.as_bytes()))
        .filter_map(Controller::from_name)
        .collect()
}

/// The directory of group `path` below a mount that shows the hierarchy from `root` downwards, as
/// the mounts inside a container do.
fn locate(mount: &Mount, path: &Path) -> Option<PathBuf> {
    let below = path.strip_prefix(&mount.root).ok()?;
    Some(match below.as_os_str().is_empty() {
        true => mount.point.clone(),
        false => mount.point.join(below),
    })
}

/// The kernel writes space, tab, newline, backslash and `#` as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
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
fn plain_absolute(bytes: Vec<u8>) -> Option<PathBuf> {
    let path = PathBuf::from(std::ffi::OsString::from_vec(bytes));
    let plain = path
        .components()
        .all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    (path.is_absolute() && plain && !path.as_os_str().as_bytes().contains(&0)).then_some(path)
}

/// One cgroup's directory, held open.
#[derive(Debug)]
struct Node {
    version: Version,
    fd: OwnedFd,
    path: PathBuf,
}

impl Node {
    fn open(version: Version, path: &Path) -> Result<Node, CgroupError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let fd = rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve);
        Node::checked(version, fd, path.to_path_buf())
    }

    fn open_child(&self, name: &str) -> Result<Node, CgroupError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty());
        Node::checked(self.version, fd, self.path.join(name))
    }

    fn checked(
        version: Version,
        fd: rustix::io::Result<OwnedFd>,
        path: PathBuf,
    ) -> Result<Node, CgroupError> {
        let opened = fd.and_then(|fd| Ok((rustix::fs::fstatfs(&fd)?.f_type as u64, fd)));
        match opened {
            Ok((magic, fd)) if magic == version.magic() => Ok(Node { version, fd, path }),
            Ok(_) => Err(CgroupError::NotCgroup(path)),
            Err(e) => Err(CgroupError::Open {
                path,
                source: e.into(),
            }),
        }
    }

    /// Makes a group below this one. One that exists already is an error: it may hold processes
    /// and limits that are not ours.
    fn make_child(&self, name: &str) -> Result<Node, CgroupError> {
        let mode = Mode::from_raw_mode(0o755);
        rustix::fs::mkdirat(&self.fd, name, mode).map_err(|e| CgroupError::Make {
            path: self.path.join(name),
            source: e.into(),
        })?;
        self.open_child(name).inspect_err(|_| {
            // It was made a moment ago and is of no use; what cannot be removed is reported by
            // the error that is on its way already.
            let _ = rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR);
        })
    }

    fn open_file(&self, file: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&self.fd, file, flags, Mode::empty())
    }

    fn read(&self, file: &'static str) -> Result<String, CgroupError> {
        self.open_file(file, OFlags::RDONLY)
            .map_err(io::Error::from)
            .and_then(|fd| {
                use io::Read;
                let mut text = String::new();
                fs::File::from(fd)
                    .take(FILE_BYTES_MAX as u64)
                    .read_to_string(&mut text)?;
                Ok(text)
            })
            .map_err(|source| CgroupError::Read {
                path: self.path.clone(),
                file,
                source,
            })
    }

    /// Writes the value in one call, as the kernel's files demand.
    fn write(&self, file: &'static str, value: &str) -> Result<(), CgroupError> {
        self.open_file(file, OFlags::WRONLY)
            .and_then(|fd| rustix::io::write(fd, value.as_bytes()))
            .map(|_| ())
            .map_err(|e| CgroupError::Write {
                path: self.path.clone(),
                file,
                value: value.to_owned(),
                source: e.into(),
            })
    }

    fn number(&self, file: &'static str) -> Option<u64> {
        self.read(file).ok()?.trim().parse().ok()
    }

    /// The number after `key` in a file of `key value` lines.
    fn keyed(&self, file: &'static str, key: &str) -> Option<u64> {
        keyed(&self.read(file).ok()?, key)
    }

    /// Sets a limit and shows that the kernel holds it: the value read back must satisfy `kept`.
    fn write_kept(
        &self,
        file: &'static str,
        value: &str,
        kept: impl Fn(&str) -> bool,
    ) -> Result<(), CgroupError> {
        self.write(file, value)?;
        let found = self.read(file)?;
        match kept(found.trim()) {
            true => Ok(()),
            false => Err(CgroupError::NotKept {
                path: self.path.clone(),
                file,
                wrote: value.to_owned(),
                found: found.trim().to_owned(),
            }),
        }
    }

    fn pids(&self) -> Result<BTreeSet<i32>, CgroupError> {
        Ok(pids_in(&self.read("cgroup.procs")?))
    }

    fn is_empty(&self) -> bool {
        match self.version {
            Version::V2 => self.keyed("cgroup.events", "populated") == Some(0),
            Version::V1 => self.read("tasks").is_ok_and(|text| text.trim().is_empty()),
        }
    }

    fn kill(&self) {
        if self.version == Version::V2 && self.write("cgroup.kill", "1").is_ok() {
            return;
        }
        let deadline = Instant::now() + KILL_WAIT;
        while Instant::now() < deadline {
            let pids: Vec<i32> = self.pids().unwrap_or_default().into_iter().collect();
            if pids.is_empty() {
                return;
            }
            // Everything is signalled before anything is waited for, or the rest would go on forking.
            let mut last = None;
            for chunk in pids.chunks(KILL_CHUNK) {
                last = self.kill_chunk(chunk).or(last);
            }
            if let Some(last) = last {
                wait_on(last.as_fd(), PollFlags::IN, Duration::from_millis(20));
            }
        }
    }

    /// Kills those of the processes that are still members, and returns one of them to wait for. A pid
    /// can be taken over by a stranger at any time, so each is first held by a pidfd and then looked
    /// up once more: one that is listed after it is held is either the held process or gone, and a
    /// signal to a process that is gone reaches nobody.
    fn kill_chunk(&self, pids: &[i32]) -> Option<OwnedFd> {
        let hold = |raw: &i32| {
            let fd = rustix::process::pidfd_open(Pid::from_raw(*raw)?, PidfdFlags::empty());
            Some((*raw, fd.ok()?))
        };
        let held: Vec<(i32, OwnedFd)> = pids.iter().filter_map(hold).collect();
        let members = self.pids().unwrap_or_default();
        let mut signalled = None;
        for (_, fd) in held.into_iter().filter(|(pid, _)| members.contains(pid)) {
            if rustix::process::pidfd_send_signal(&fd, Signal::KILL).is_ok() {
                signalled = Some(fd);
            }
        }
        signalled
    }
}

/// The pids that can be signalled. A last line without its newline was cut off in the middle of a number
/// and would name a stranger; zero stands for a process of another pid namespace; we are not meant.
fn pids_in(text: &str) -> BTreeSet<i32> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let pids = whole.lines().filter_map(|line| line.trim().parse().ok());
    pids.filter(|pid| *pid > 0 && *pid != own).collect()
}

fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))
        .and_then(|value| value.trim().parse().ok())
}

/// Waits for the event, at most so long. An interruption only makes the caller look again early.
fn wait_on(fd: BorrowedFd<'_>, events: PollFlags, at_most: Duration) {
    let timeout = Timespec::try_from(at_most).unwrap_or_default();
    let _ = rustix::event::poll(&mut [PollFd::new(&fd, events)], Some(&timeout));
}

/// A group that we made: its directory, and its parent's, from which it is removed.
#[derive(Debug)]
struct Made {
    node: Node,
    parent: Node,
    name: String,
    controllers: Vec<Controller>,
}

impl Made {
    fn has(&self, controller: Controller) -> bool {
        self.controllers.contains(&controller)
    }

    fn rmdir(&self) -> rustix::io::Result<()> {
        match rustix::fs::unlinkat(&self.parent.fd, &self.name, AtFlags::REMOVEDIR) {
            Err(Errno::NOENT) => Ok(()),
            other => other,
        }
    }

    fn remove(&self, deadline: Instant) -> Result<(), CgroupError> {
        let path = || self.node.path.clone();
        let mut pause = Duration::from_millis(1);
        loop {
            match self.rmdir() {
                Ok(()) => return Ok(()),
                Err(Errno::BUSY) if Instant::now() < deadline => self.wait_for_exit(pause),
                Err(Errno::BUSY) => return Err(CgroupError::Busy(path())),
                Err(e) => {
                    return Err(CgroupError::Remove {
                        path: path(),
                        source: e.into(),
                    });
                }
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// Version 2 tells when a group empties: a change of `cgroup.events` is an exceptional
    /// condition for poll. Version 1 has no such event that costs less than looking again.
    fn wait_for_exit(&self, pause: Duration) {
        match self.node.open_file("cgroup.events", OFlags::RDONLY) {
            Ok(fd) if self.node.version == Version::V2 => {
                // Reading arms the event; the first poll reports changes from here on.
                let mut text = [0; 256];
                let _ = rustix::io::read(&fd, &mut text[..]);
                if !self.node.is_empty() {
                    wait_on(fd.as_fd(), PollFlags::PRI, Duration::from_millis(100));
                } else {
                    std::thread::sleep(pause);
                }
            }
            _ => std::thread::sleep(pause),
        }
    }
}

/// What a run's group limits. `None` leaves that resource unlimited, but still counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupLimits {
    pub memory_bytes: Option<u64>,
    pub pids: Option<u64>,
    pub cpu_milli: Option<u64>,
}

/// How a limit is held, for the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enforced {
    pub by: String,
    pub how_hard: Hardness,
}

/// What the kernel counted. `None`: this kernel does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Processes of the group that the kernel killed for want of memory, for whatever reason.
    pub oom_kills: Option<u64>,
    pub memory_peak_bytes: Option<u64>,
    pub pids_peak: Option<u64>,
    /// Forks refused by the process limit.
    pub pids_denied: Option<u64>,
    pub cpu_usage_us: Option<u64>,
}

/// How the file that [`Group::cpu_usage_fd`] hands out is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuUnit {
    /// Version 1 `cpuacct.usage`: one number, nanoseconds.
    Nanoseconds,
    /// Version 2 `cpu.stat`: the line `usage_usec`, microseconds.
    UsageUsecLine,
}

impl CpuUnit {
    /// Microseconds of CPU time used so far, read afresh from the descriptor's start.
    pub fn read_us(self, fd: BorrowedFd<'_>) -> io::Result<u64> {
        let mut buffer = [0; 4096];
        let length = rustix::io::pread(fd, &mut buffer[..], 0)?;
        let text = String::from_utf8_lossy(&buffer[..length]);
        match self {
            CpuUnit::Nanoseconds => text.trim().parse::<u64>().ok().map(|ns| ns / 1000),
            CpuUnit::UsageUsecLine => keyed(&text, "usage_usec"),
        }
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }
}

/// One run's group: a directory in each hierarchy that holds one of its controllers.
///
/// Dropping it removes what is empty and leaves the rest to recovery.
#[derive(Debug)]
pub struct Group {
    parts: Vec<Made>,
    held: Vec<(LimitName, Result<Enforced, CgroupError>)>,
}

impl Group {
    /// Makes the group of run `id` with its limits. A controller that is missing, or a limit that the
    /// kernel does not take, is not an error here: [`Group::enforces`] tells, and the caller decides.
    pub fn create(host: &Host, id: &str, limits: &GroupLimits) -> Result<Group, CgroupError> {
        check_id(id)?;
        let name = format!("{NAME_PREFIX}{id}-{}", std::process::id());
        // Whatever fails from here on, dropping the group removes the parts made so far.
        let mut group = Group {
            parts: Vec::new(),
            held: Vec::new(),
        };
        let mut refusal = None;
        let v2 = host.v2.iter().map(|site| v2::make(site, &name));
        let v1 = host.v1.iter().map(|site| v1::make(site, &name));
        for made in v2.chain(v1) {
            match made {
                Ok(made) => group.parts.push(made),
                Err(e) if e.means_not_ours() => refusal = refusal.or(Some(e)),
                Err(e) => return Err(e),
            }
        }
        if group.parts.is_empty() {
            return Err(CgroupError::Unavailable {
                refusal: refusal.map(Box::new),
            });
        }
        let asked = [
            (LimitName::Memory, Controller::Memory, limits.memory_bytes),
            (LimitName::Pids, Controller::Pids, limits.pids),
            (LimitName::Cpus, Controller::Cpu, limits.cpu_milli),
        ];
        for (limit, controller, value) in asked {
            if let Some(value) = value {
                let held = group.limit(controller, value);
                group.held.push((limit, held));
            }
        }
        Ok(group)
    }

    fn limit(&self, controller: Controller, value: u64) -> Result<Enforced, CgroupError> {
        let part = self.part(controller);
        match (controller, part.map(|p| (p.node.version, p))) {
            (Controller::Memory, Some((Version::V1, part))) => v1::limit_memory(part, value),
            (Controller::Memory, Some((Version::V2, part))) => v2::limit_memory(part, value),
            (Controller::Cpu, Some((Version::V1, part))) => v1::limit_cpu(part, value),
            (Controller::Cpu, Some((Version::V2, part))) => v2::limit_cpu(part, value),
            (Controller::Pids, Some((version, part))) => limit_pids(part, version, value),
            (Controller::Memory, None) => Err(CgroupError::NoController("memory")),
            (Controller::Pids, None) => Err(CgroupError::NoController("pids")),
            (_, _) => Err(CgroupError::NoController("cpu")),
        }
    }

    fn part(&self, controller: Controller) -> Option<&Made> {
        self.parts.iter().find(|part| part.has(controller))
    }

    /// Descriptors by which a process attaches itself: it writes `0` to each, once, while it has a
    /// single thread (version 1 moves only the thread that writes). A process that was given
    /// them can attach whatever its own credentials are, so they are closed before the program runs.
    pub fn attach_fds(&self) -> Result<Vec<OwnedFd>, CgroupError> {
        let open = |part: &Made| {
            let file = match part.node.version {
                // Writing to `tasks` spares the lock over all threads of the system that `cgroup.procs` takes.
                Version::V1 => "tasks",
                Version::V2 => "cgroup.procs",
            };
            let path = || part.node.path.join(file);
            let fd = part.node.open_file(file, OFlags::WRONLY);
            fd.map_err(|e| CgroupError::Open {
                path: path(),
                source: e.into(),
            })
        };
        self.parts.iter().map(open).collect()
    }

    /// How `limit` is held; `None` if it was not asked for, or is not held by this group.
    pub fn enforces(&self, limit: LimitName) -> Option<&Enforced> {
        let found = self.held.iter().find(|(name, _)| *name == limit);
        found.and_then(|(_, held)| held.as_ref().ok())
    }

    /// Why a limit that was asked for is not held.
    pub fn why_not(&self, limit: LimitName) -> Option<&CgroupError> {
        let found = self.held.iter().find(|(name, _)| *name == limit);
        found.and_then(|(_, held)| held.as_ref().err())
    }

    pub fn counters(&self) -> Counters {
        let mut counters = Counters::default();
        for part in &self.parts {
            match part.node.version {
                Version::V1 => v1::count(part, &mut counters),
                Version::V2 => v2::count(part, &mut counters),
            }
        }
        counters
    }

    /// A file that any process given the descriptor can read with [`CpuUnit::read_us`].
    pub fn cpu_usage_fd(&self) -> Option<(OwnedFd, CpuUnit)> {
        self.parts.iter().find_map(|part| {
            let (file, unit) = match part.node.version {
                Version::V1 if part.has(Controller::Cpuacct) => {
                    ("cpuacct.usage", CpuUnit::Nanoseconds)
                }
                Version::V1 => return None,
                // Version 2 counts CPU time in every group, with the controller or without.
                Version::V2 => ("cpu.stat", CpuUnit::UsageUsecLine),
            };
            Some((part.node.open_file(file, OFlags::RDONLY).ok()?, unit))
        })
    }

    /// The group's directories, for the crash record and [`remove_left_behind`].
    pub fn paths(&self) -> Vec<PathBuf> {
        self.parts.iter().map(|p| p.node.path.clone()).collect()
    }

    /// Kills every process in the group, whichever of its directories it is in.
    pub fn kill(&self) {
        self.parts.iter().for_each(|part| part.node.kill());
    }

    /// Whether every process has left. A group that cannot be read is not shown to be empty.
    pub fn is_empty(&self) -> bool {
        self.parts.iter().all(|part| part.node.is_empty())
    }

    /// Removes the group, waiting a bounded time for processes that are on their way out. On error
    /// what is left is for [`remove_left_behind`].
    pub fn remove(mut self) -> Result<(), CgroupError> {
        let parts = std::mem::take(&mut self.parts);
        remove_all(&parts)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for part in &self.parts {
            // Only an empty group can be removed at all; a group in use is left to recovery.
            let _ = part.rmdir();
        }
    }
}

/// Removes every part, going on past one that fails; the first error is returned.
fn remove_all(parts: &[Made]) -> Result<(), CgroupError> {
    let deadline = Instant::now() + REMOVE_WAIT;
    let results: Vec<_> = parts.iter().map(|part| part.remove(deadline)).collect();
    results.into_iter().collect()
}

fn limit_pids(part: &Made, version: Version, value: u64) -> Result<Enforced, CgroupError> {
    let text = value.to_string();
    part.node
        .write_kept("pids.max", &text, |found| found == text)?;
    Ok(match version {
        Version::V1 => hard("cgroup v1 pids.max"),
        Version::V2 => hard("cgroup v2 pids.max"),
    })
}

fn hard(by: impl Into<String>) -> Enforced {
    Enforced {
        by: by.into(),
        how_hard: Hardness::Hard,
    }
}

/// Whether a memory limit read back is the one written: the kernel rounds down to whole pages, and
/// the largest page in use is 64 KiB.
fn is_rounded(asked: u64) -> impl Fn(&str) -> bool {
    move |found| {
        let found = found.parse::<u64>();
        found.is_ok_and(|found| found <= asked && asked - found < 65_536)
    }
}

/// Every 100 ms, as the kernel does by default; a shorter period costs more and throttles no better.
const CPU_PERIOD_US: u64 = 100_000;
/// The kernel takes no quota below a millisecond.
const CPU_QUOTA_US_MIN: u64 = 1_000;

fn cpu_quota_us(cpu_milli: u64) -> u64 {
    cpu_milli
        .saturating_mul(CPU_PERIOD_US / 1000)
        .max(CPU_QUOTA_US_MIN)
}

fn host_has_swap() -> bool {
    // Unreadable means unknown, and unknown counts as swap: the record must not promise too much.
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    meminfo_bytes(&meminfo, "SwapTotal:") != Some(0)
}

fn meminfo_bytes(meminfo: &str, key: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The id is chosen by whoever asked for the run. It becomes part of a directory's name, so it is
/// checked here again although the request was checked before.
fn check_id(id: &str) -> Result<(), CgroupError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let first = id.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    match first && id.len() <= ID_LEN_MAX && id.bytes().all(plain) {
        true => Ok(()),
        false => Err(CgroupError::BadName(id.to_owned())),
    }
}

/// Kills what is left in the groups of a run whose runner died, and removes them; returns how many were
/// removed. The caller has shown that the runner is dead (its lock is free).
///
/// The paths come from a record on disk, which is not believed: each must lie below a cgroup mount, be
/// named as our groups are, and hold neither this process nor anything above it. Groups do not outlive
/// a boot, so under another boot id there is nothing to remove, and what has that name now is not meant.
pub fn remove_left_behind(paths: &[PathBuf], boot_id: &str) -> Result<usize, CgroupError> {
    let now = fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(CgroupError::BootId)?;
    if now.trim() != boot_id.trim() {
        return Ok(0);
    }
    let mountinfo = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let host = sites();
    let mut removed = 0;
    let mut first_error = None;
    for path in paths {
        let outcome = left_behind(path, &mountinfo, &host).and_then(|found| match found {
            Some(made) => {
                made.node.kill();
                remove_all(std::slice::from_ref(&made)).map(|()| 1)
            }
            None => Ok(0),
        });
        match outcome {
            Ok(count) => removed += count,
            Err(e) => first_error = first_error.or(Some(e)),
        }
    }
    first_error.map_or(Ok(removed), Err)
}

/// Opens a group that a record names, or says why it is not ours. `None`: it is gone already.
fn left_behind(path: &Path, mountinfo: &[u8], host: &Host) -> Result<Option<Made>, CgroupError> {
    let foreign = |why| CgroupError::Foreign {
        path: path.to_path_buf(),
        why,
    };
    let plain = plain_absolute(path.as_os_str().as_bytes().to_vec())
        .ok_or_else(|| foreign("it is not a plain absolute path"))?;
    let name = plain.file_name().and_then(|n| n.to_str());
    let name = name.ok_or_else(|| foreign("it has no name"))?;
    let suffix = name.strip_prefix(NAME_PREFIX);
    let (id, pid) = suffix
        .and_then(|rest| rest.rsplit_once('-'))
        .ok_or_else(|| foreign("it is not named as a run's group is"))?;
    if check_id(id).is_err() || pid.is_empty() || !pid.bytes().all(|b| b.is_ascii_digit()) {
        return Err(foreign("it is not named as a run's group is"));
    }
    let mounts = lines(mountinfo).filter_map(parse_mount);
    let mount = mounts
        .filter(|m| plain.starts_with(&m.point) && plain != m.point)
        .max_by_key(|m| m.point.components().count())
        .ok_or_else(|| foreign("it is not below a cgroup mount"))?;
    let mut sites = host.v1.iter().chain(&host.v2);
    if sites.any(|site| site.own.starts_with(&plain)) {
        return Err(foreign("this process is in it"));
    }
    let parent = plain.parent().ok_or_else(|| foreign("it has no parent"))?;
    let gone = |e: &CgroupError| matches!(e, CgroupError::Open { source, .. } if source.kind() == io::ErrorKind::NotFound);
    let opened =
        Node::open(mount.version, parent).and_then(|parent| Ok((parent.open_child(name)?, parent)));
    match opened {
        Ok((node, parent)) => Ok(Some(Made {
            node,
            parent,
            name: name.to_owned(),
            controllers: mount.controllers,
        })),
        Err(e) if gone(&e) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The memory this process could use at most: the least of what the machine has and of every limit on
/// the way up from its own group. Zero only if the kernel tells nothing at all.
pub fn memory_available_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo_bytes(&meminfo, "MemTotal:").unwrap_or_else(|| {
        let info = rustix::system::sysinfo();
        (info.totalram as u64).saturating_mul(u64::from(info.mem_unit))
    });
    let host = sites();
    let v1 = host.v1.iter().filter_map(v1::memory_limit);
    let v2 = host.v2.iter().filter_map(v2::memory_limit);
    v1.chain(v2).fold(total, u64::min)
}

/// Every group from our own up to the mount point.
fn way_up(site: &Site) -> impl Iterator<Item = Node> + '_ {
    site.own
        .ancestors()
        .take_while(|path| path.starts_with(&site.mount))
        .filter_map(|path| Node::open(site.version, path).ok())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::process::{Child, Command, ExitStatus, Stdio};
    use std::sync::atomic::{AtomicU32, Ordering};

    // --- what the kernel's text files say ---

    const V1: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime master:1 propagate_from:2 - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    fn own(host: &Host, controller: Controller) -> Option<PathBuf> {
        let site = host.v1.iter().find(|s| s.controllers.contains(&controller));
        site.map(|s| s.own.clone())
    }

    #[test]
    fn co_mounted_controllers_are_one_site_and_hybrid_is_seen() {
        let cgroup = "9:name=systemd:/\n8:pids:/user\n4:memory:/a/b\n3:cpuset:/\n2:cpu,cpuacct:/x\n0::/init\n";
        let host = host_from(V1.as_bytes(), cgroup.as_bytes());
        assert_eq!(host.v1.len(), 3);
        let both = host.v1.iter().find(|s| s.controllers.len() == 2).unwrap();
        assert_eq!(both.own, Path::new("/sys/fs/cgroup/cpu,cpuacct/x"));
        assert_eq!(
            own(&host, Controller::Memory).unwrap(),
            Path::new("/sys/fs/cgroup/memory/a/b")
        );
        let v2 = host.v2.as_ref().unwrap();
        assert_eq!(v2.own, Path::new("/sys/fs/cgroup/unified/init"));
        assert!(!host.is_none());
    }

    #[test]
    fn version_2_alone() {
        let mounts = b"30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let host = host_from(mounts, b"0::/user.slice/a:b.scope\n");
        assert!(host.v1.is_empty());
        assert_eq!(
            host.v2.unwrap().own,
            Path::new("/sys/fs/cgroup/user.slice/a:b.scope")
        );
    }

    #[test]
    fn a_container_that_sees_a_part_of_the_hierarchy() {
        let mounts = b"35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let at_root = host_from(mounts, b"4:memory:/docker/abc\n");
        assert_eq!(
            own(&at_root, Controller::Memory).unwrap(),
            Path::new("/sys/fs/cgroup/memory")
        );
        let below = host_from(mounts, b"4:memory:/docker/abc/x\n");
        assert_eq!(
            own(&below, Controller::Memory).unwrap(),
            Path::new("/sys/fs/cgroup/memory/x")
        );
        // A sibling whose name merely begins alike is not below it.
        assert!(host_from(mounts, b"4:memory:/docker/abcdef\n").is_none());
        assert!(host_from(mounts, b"4:memory:/\n").is_none());
    }

    #[test]
    fn of_several_mounts_the_one_that_shows_us_is_taken() {
        let mounts = b"1 1 0:1 /other /a rw - cgroup cgroup rw,memory\n2 1 0:1 / /b rw - cgroup cgroup rw,memory\n";
        let host = host_from(mounts, b"4:memory:/mine\n");
        assert_eq!(
            own(&host, Controller::Memory).unwrap(),
            Path::new("/b/mine")
        );
    }

    #[test]
    fn octal_escapes_are_decoded_once() {
        assert_eq!(unescape(br"/a\040b\011c\012d\134040"), b"/a b\tc\nd\\040");
        assert_eq!(unescape(br"\04"), br"\04");
        assert_eq!(unescape(br"\999\777\"), br"\999\777\");
        let host = host_from(
            br"1 1 0:1 / /a\040b rw - cgroup cgroup rw,pids",
            b"1:pids:/\n",
        );
        assert_eq!(own(&host, Controller::Pids).unwrap(), Path::new("/a b"));
    }

    #[test]
    fn hostile_lines_are_passed_over() {
        for mounts in [
            &b"1 1 0:1 / /x rw - fuse.cgroup cgroup rw,memory"[..],
            b"1 1 0:1 / /x rw - ext4 cgroup rw,memory",
            b"1 1 0:1 / /x rw - cgroup",
            b"1 1 0:1 / /x/../y rw - cgroup cgroup rw,memory",
            b"1 1 0:1 / relative rw - cgroup cgroup rw,memory",
            b"- - - - - - -",
            b"1 1 0:1 / /x rw cgroup cgroup rw,memory",
        ] {
            assert!(host_from(mounts, b"4:memory:/\n").is_none(), "{mounts:?}");
        }
        let good = b"1 1 0:1 / /x rw - cgroup cgroup rw,memory\n";
        for line in [
            &b"4:memory:/../up"[..],
            b"4:memory:",
            b"4:memory",
            b"memory",
            b"4:memory:x",
            b"::",
        ] {
            assert!(host_from(good, line).is_none(), "{line:?}");
        }
    }

    #[test]
    fn ids_that_could_leave_their_directory_are_refused() {
        for id in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "-a",
            ".a",
            "a b",
            "a\n",
            "a\0",
            "é",
            &"a".repeat(65),
        ] {
            assert!(check_id(id).is_err(), "{id:?}");
        }
        for id in ["a", "A.b_c-9", &"a".repeat(64)] {
            assert!(check_id(id).is_ok(), "{id:?}");
        }
    }

    #[test]
    fn only_whole_positive_pids_of_others_are_signalled() {
        let text = format!("0\n-1\n77777\nx\n{}\n1234", std::process::id());
        assert_eq!(pids_in(&text), BTreeSet::from([77777]));
    }

    #[test]
    fn numbers() {
        assert_eq!(keyed("oom 1\noom_kill 3\n", "oom_kill"), Some(3));
        assert_eq!(keyed("oom_kill_disable 0\n", "oom_kill"), None);
        assert_eq!(
            meminfo_bytes("MemTotal:  24 kB\nSwapTotal: 0 kB\n", "SwapTotal:"),
            Some(0)
        );
        assert_eq!(cpu_quota_us(1500), 150_000);
        assert_eq!(cpu_quota_us(1), 1000);
        assert!(is_rounded(10_000_001)("9998336"));
        assert!(!is_rounded(10_000_000)("10000001"));
        assert!(!is_rounded(10_000_000)("max"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parsers_panic_or_leave_the_mount(
            mounts in "([0-9/ a-z.\\\\:,\\-\n]|cgroup2?|memory| - | / ){0,60}",
            groups in "([0-9/ a-z.:,\n]|memory|:/|\\.\\.){0,40}",
        ) {
            let host = host_from(mounts.as_bytes(), groups.as_bytes());
            for site in host.v1.iter().chain(&host.v2) {
                prop_assert!(site.own.starts_with(&site.mount));
                prop_assert!(!site.own.components().any(|c| c == Component::ParentDir));
            }
        }

        #[test]
        fn no_bytes_make_the_parsers_panic(mounts: Vec<u8>, groups: Vec<u8>, id: String) {
            let _ = host_from(&mounts, &groups);
            let _ = unescape(&mounts);
            let _ = left_behind(Path::new(&id), &mounts, &Host::default());
            if check_id(&id).is_ok() {
                prop_assert!(!id.contains('/') && id.len() <= ID_LEN_MAX);
            }
        }
    }

    // --- what the kernel does ---

    static SKIPPED: AtomicU32 = AtomicU32::new(0);

    /// Where the kernel has no cgroups at all there is nothing to test; anything less than that fails.
    fn host() -> Option<Host> {
        let host = discover();
        if host.is_none() {
            let count = SKIPPED.fetch_add(1, Ordering::SeqCst) + 1;
            eprintln!("SKIPPED ({count} so far): no cgroup hierarchy with controllers is mounted");
            return None;
        }
        Some(host)
    }

    const MIB: u64 = 1 << 20;

    fn limits(memory_bytes: u64, pids: u64, cpu_milli: u64) -> GroupLimits {
        GroupLimits {
            memory_bytes: Some(memory_bytes),
            pids: Some(pids),
            cpu_milli: Some(cpu_milli),
        }
    }

    /// Starts a shell that attaches itself to the group before it runs the script. `prefix` may change its
    /// credentials first: the descriptors stay those of this process.
    fn start(group: &Group, prefix: &[&str], script: &str) -> Child {
        let fds = group.attach_fds().unwrap();
        let mut attach = String::new();
        for fd in &fds {
            use std::os::fd::AsRawFd;
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).unwrap();
            attach += &format!("echo 0 >&{0} || exit 99; exec {0}>&-; ", fd.as_raw_fd());
        }
        let words = prefix.iter().chain(&["bash", "-c"]);
        let mut words = words.map(|w| w.to_string()).collect::<Vec<_>>();
        words.push(attach + script);
        Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn run(group: &Group, prefix: &[&str], script: &str) -> (ExitStatus, String) {
        let output = start(group, prefix, script).wait_with_output().unwrap();
        (output.status, String::from_utf8(output.stdout).unwrap())
    }

    fn read_line(child: &mut Child) -> String {
        use std::io::{BufRead, BufReader};
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        line.trim().to_owned()
    }

    fn boot_id() -> String {
        fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap()
    }

    /// Holds more memory than any limit here, but never more than 200 MiB of the host's.
    const HOG: &str = "head -c 200M /dev/zero | tail -c 200M | wc -c";

    #[test]
    fn every_limit_is_held_and_says_how() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "limits", &limits(64 * MIB + 5, 32, 1500)).unwrap();
        for limit in [LimitName::Memory, LimitName::Pids, LimitName::Cpus] {
            let enforced = group.enforces(limit);
            assert!(enforced.is_some(), "{limit:?}: {:?}", group.why_not(limit));
            eprintln!("{limit:?}: {}", enforced.unwrap().by);
        }
        assert!(group.enforces(LimitName::WallTime).is_none());
        let cpu = group.part(Controller::Cpu).unwrap();
        match cpu.node.version {
            Version::V1 => {
                assert_eq!(cpu.node.number("cpu.cfs_quota_us"), Some(150_000));
                assert_eq!(cpu.node.number("cpu.cfs_period_us"), Some(100_000));
            }
            Version::V2 => {
                assert_eq!(cpu.node.read("cpu.max").unwrap().trim(), "150000 100000");
                assert_eq!(cpu.node.read("memory.oom.group").unwrap().trim(), "0");
            }
        }
        assert_eq!(group.counters().oom_kills, Some(0));
        group.remove().unwrap();
    }

    #[test]
    fn what_is_not_asked_for_is_not_limited_but_counted() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "free", &GroupLimits::default()).unwrap();
        assert!(group.enforces(LimitName::Memory).is_none());
        assert!(group.why_not(LimitName::Memory).is_none());
        let (status, out) = run(&group, &[], HOG);
        assert!(status.success());
        assert_eq!(out.trim(), (200 * MIB).to_string());
        assert!(group.counters().oom_kills == Some(0));
        group.remove().unwrap();
    }

    #[test]
    fn a_limit_the_kernel_refuses_is_reported_as_not_held() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "toolarge", &limits(MIB, u64::MAX, u64::MAX)).unwrap();
        for limit in [LimitName::Pids, LimitName::Cpus] {
            assert!(group.enforces(limit).is_none());
            assert!(group.why_not(limit).is_some());
        }
        group.remove().unwrap();
    }

    #[test]
    fn a_process_over_the_memory_limit_dies_and_its_parent_lives() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "oom", &limits(48 * MIB, 32, 2000)).unwrap();
        let script = format!("{HOG} >/dev/null; echo ${{PIPESTATUS[*]}}; echo alive");
        let script = script.replace("| wc -c", "");
        let (status, out) = run(&group, &[], &script);
        assert!(status.success(), "{status:?}");
        assert!(out.contains("137") && out.ends_with("alive\n"), "{out}");
        let counters = group.counters();
        eprintln!("{counters:?}");
        assert_eq!(counters.oom_kills, Some(1));
        if let Some(peak) = counters.memory_peak_bytes {
            assert!((40 * MIB..=48 * MIB).contains(&peak), "{peak}");
        }
        group.remove().unwrap();
    }

    #[test]
    fn forks_beyond_the_process_limit_are_refused() {
        let Some(host) = host() else { return };
        let script = "for i in {1..20}; do sleep 60 & done 2>/dev/null; jobs -p | wc -l; kill $(jobs -p); wait";
        let group = Group::create(&host, "forks", &limits(64 * MIB, 6, 2000)).unwrap();
        // A shell that cannot fork tries again for long; its group is killed instead of awaited.
        let child = start(&group, &[], "for i in {1..20}; do sleep 60 & done");
        let deadline = Instant::now() + Duration::from_secs(20);
        while group.counters().pids_denied == Some(0) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let counters = group.counters();
        group.kill();
        let _ = child.wait_with_output();
        eprintln!("{counters:?}");
        assert!(counters.pids_denied.unwrap() > 0);
        assert!(counters.pids_peak.is_none_or(|peak| peak <= 6));
        group.remove().unwrap();
        // Control: the same forks with room for them.
        let group = Group::create(&host, "forks2", &limits(64 * MIB, 60, 2000)).unwrap();
        let (_, out) = run(&group, &[], script);
        assert_eq!(out.trim(), "20");
        assert_eq!(group.counters().pids_denied, Some(0));
        group.remove().unwrap();
    }

    #[test]
    fn cpu_time_is_counted_and_can_be_read_through_a_descriptor() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "cpu", &limits(64 * MIB, 32, 500)).unwrap();
        let (fd, unit) = group.cpu_usage_fd().unwrap();
        let before = unit.read_us(fd.as_fd()).unwrap();
        let begin = Instant::now();
        run(&group, &[], "for ((i = 0; i < 200000; i++)); do :; done");
        let (used, wall) = (unit.read_us(fd.as_fd()).unwrap() - before, begin.elapsed());
        assert!(used > 50_000, "{used}");
        assert!(group.counters().cpu_usage_us.unwrap() >= used);
        // Half a CPU: the wall time is at least about twice the CPU time.
        assert!(wall.as_micros() as u64 > used * 3 / 2, "{used} {wall:?}");
        group.remove().unwrap();
    }

    #[test]
    fn a_process_of_another_uid_in_a_user_namespace_attaches_itself() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "userns", &limits(48 * MIB, 32, 2000)).unwrap();
        let as_other = [
            "setpriv",
            "--reuid=54321",
            "--regid=54321",
            "--clear-groups",
        ];
        let prefix = match rustix::process::geteuid().is_root() {
            true => [&as_other[..], &["unshare", "-Ur"]].concat(),
            false => vec!["unshare", "-Ur"],
        };
        let mut child = start(&group, &prefix, "echo in; read -r; exit 7");
        assert_eq!(read_line(&mut child), "in");
        assert!(!group.is_empty());
        let pid = i32::try_from(child.id()).unwrap();
        for part in &group.parts {
            assert!(
                part.node.pids().unwrap().contains(&pid),
                "{:?}",
                part.node.path
            );
        }
        assert!(matches!(
            Made::remove(&group.parts[0], Instant::now()),
            Err(CgroupError::Busy(_))
        ));
        drop(child.stdin.take());
        assert_eq!(child.wait().unwrap().code(), Some(7));
        assert!(group.is_empty());
        group.remove().unwrap();
    }

    #[test]
    fn kill_reaches_daemonised_grandchildren() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "kill", &limits(64 * MIB, 64, 2000)).unwrap();
        let script = "for i in {1..20}; do setsid sleep 300 >/dev/null & done; echo ready; wait";
        let mut child = start(&group, &[], script);
        assert_eq!(read_line(&mut child), "ready");
        group.kill();
        assert!(!child.wait().unwrap().success());
        let paths = group.paths();
        group.remove().unwrap();
        assert!(paths.iter().all(|path| !path.exists()));
    }

    #[test]
    fn an_existing_group_is_not_reused_and_not_removed() {
        let Some(host) = host() else { return };
        let first = Group::create(&host, "twice", &limits(64 * MIB, 8, 1000)).unwrap();
        let second = Group::create(&host, "twice", &limits(64 * MIB, 8, 1000));
        assert!(
            matches!(second, Err(CgroupError::Make { .. })),
            "{second:?}"
        );
        assert!(first.paths().iter().all(|path| path.exists()));
        assert!(Group::create(&host, "../x", &GroupLimits::default()).is_err());
        let paths = first.paths();
        drop(first);
        assert!(paths.iter().all(|path| !path.exists()));
    }

    #[test]
    fn two_hundred_groups_leave_nothing() {
        let Some(host) = host() else { return };
        let groups_now = |parent: &Path| {
            let entries = fs::read_dir(parent).unwrap();
            let name = |e: &fs::DirEntry| e.file_name().to_string_lossy().into_owned();
            let ours = format!("-{}", std::process::id());
            let made = |n: &String| n.starts_with("fumehood-cycle") && n.ends_with(&ours);
            entries.flatten().map(|e| name(&e)).filter(made).count()
        };
        for round in 0..200 {
            let group = Group::create(&host, &format!("cycle{round}"), &limits(64 * MIB, 8, 1000));
            let group = group.unwrap();
            if round % 20 == 0 {
                assert!(run(&group, &[], "exit 0").0.success());
            }
            let parents: Vec<PathBuf> = group.parts.iter().map(|p| p.parent.path.clone()).collect();
            assert!(parents.iter().all(|p| groups_now(p) == 1));
            group.remove().unwrap();
            assert!(parents.iter().all(|p| groups_now(p) == 0));
        }
    }

    #[test]
    fn left_behind_groups_are_killed_and_removed_only_in_their_own_boot() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "left", &limits(64 * MIB, 32, 1000)).unwrap();
        let mut child = start(
            &group,
            &[],
            "setsid sleep 300 >/dev/null & echo ready; sleep 300",
        );
        assert_eq!(read_line(&mut child), "ready");
        let paths = group.paths();
        // Dropping the group is what the death of its runner looks like: it is in use and stays.
        drop(group);
        assert!(paths.iter().all(|path| path.exists()));
        assert_eq!(remove_left_behind(&paths, "another boot").unwrap(), 0);
        assert!(paths.iter().all(|path| path.exists()));
        assert_eq!(remove_left_behind(&paths, &boot_id()).unwrap(), paths.len());
        assert!(!child.wait().unwrap().success());
        assert!(paths.iter().all(|path| !path.exists()));
        // Repeating it changes nothing.
        assert_eq!(remove_left_behind(&paths, &boot_id()).unwrap(), 0);
    }

    #[test]
    fn recovery_refuses_what_is_not_a_runs_group() {
        let Some(host) = host() else { return };
        let directory = tempfile::tempdir().unwrap();
        let outside = directory.path().join("fumehood-a-1");
        fs::create_dir(&outside).unwrap();
        let link = directory.path().join("fumehood-b-1");
        let group = Group::create(&host, "refuse", &GroupLimits::default()).unwrap();
        let target = &group.paths()[0];
        std::os::unix::fs::symlink(target, &link).unwrap();
        let own = host.v2.iter().chain(&host.v1).next().unwrap();
        let mount = &own.mount;
        for path in [
            outside.clone(),
            link,
            own.own.clone(),
            mount.clone(),
            mount.join("user.slice"),
            mount.join("fumehood_runner-1"),
            mount.join("fumehood-"),
            mount.join("fumehood-x"),
            mount.join("fumehood-x-"),
            mount.join("fumehood-x-1y"),
            mount.join("fumehood-.x-1"),
            mount.join("fumehood-x y-1"),
            mount.join("fumehood-x-1/../../etc"),
            target.join("..").join("fumehood-refuse-1"),
            PathBuf::from("fumehood-x-1"),
            PathBuf::from("/"),
            PathBuf::new(),
        ] {
            let answer = remove_left_behind(std::slice::from_ref(&path), &boot_id());
            let refused = matches!(answer, Err(CgroupError::Foreign { .. }));
            assert!(refused, "{path:?}: {answer:?}");
        }
        assert!(outside.exists() && target.exists());
        // One bad path does not keep the others from being cleaned up.
        let both = [vec![outside.clone()], group.paths()].concat();
        assert!(remove_left_behind(&both, &boot_id()).is_err());
        assert!(outside.exists() && !target.exists());
    }

    #[test]
    fn the_memory_we_may_use_is_bounded_by_the_machine() {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
        let total = meminfo_bytes(&meminfo, "MemTotal:").unwrap();
        let available = memory_available_bytes();
        assert!(available > 0 && available <= total);
    }

    #[test]
    fn a_limit_above_us_bounds_the_memory_we_may_use() {
        let Some(host) = host() else { return };
        let group = Group::create(&host, "above", &limits(64 * MIB, 8, 1000)).unwrap();
        let part = group.part(Controller::Memory).unwrap();
        let inner = part.node.make_child("inner").unwrap();
        let site = Site {
            version: part.node.version,
            controllers: vec![Controller::Memory],
            mount: part.parent.path.clone(),
            own: inner.path.clone(),
        };
        let found = match site.version {
            Version::V1 => v1::memory_limit(&site),
            Version::V2 => v2::memory_limit(&site),
        };
        rustix::fs::unlinkat(&part.node.fd, "inner", AtFlags::REMOVEDIR).unwrap();
        assert_eq!(found, Some(64 * MIB));
        group.remove().unwrap();
    }
}
