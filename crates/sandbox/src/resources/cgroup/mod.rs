//! Control groups: one group per run, made with its limits before the first process enters it.
//!
//! The runner makes the group and opens the files through which processes attach. On version 2, clone3 starts the child
//! in the group where the kernel allows that. Otherwise the child, and later the broker, attaches *itself* by writing `0`
//! to the files, because moving a process from outside takes several times as long; the other processes inherit the
//! group. The kernel checks the credentials of the process that opened the file, so a process can attach after it has
//! dropped its own.
//!
//! Each controller uses version 2 where its tree offers the controller to this process (`v2.rs`), and version 1
//! otherwise (`v1.rs`). What works is found by trying it and reading the value back. Only groups made here are ever
//! written to, with one exception: in a version 2 subtree delegated to the user who runs Fumehood the controllers must
//! be switched on.
//!
//! Invariant: a path or pid is trusted only while it is held. Directories are held by descriptor, processes by pidfd.

mod ancestor_limits;
mod clone_into;
mod delegation;
mod host;
mod names;
mod node;
mod v1;
mod v2;

pub use ancestor_limits::{AncestorLimit, AncestorLimits, ancestor_limits};
pub(crate) use clone_into::{GroupAccess, GroupEntry, fork_into};
pub use delegation::{Delegation, GroupLocation, delegation, group_location};
pub(crate) use host::mount_points_in;
pub use host::{Hierarchies, OwnProcess};
use host::{Site, lines, parse_mount, plain_absolute, read_proc, sites};
pub use names::scope_name;
use names::{check_id, is_run_group, name_for};
use node::{CreatedGroup, Node, keyed};

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::spec::{Hardness, LimitName};

/// A killed process leaves its group within milliseconds. A longer wait means that it cannot die.
const REMOVE_WAIT: Duration = Duration::from_secs(2);

/// What failed with a cgroup. `path` is the directory of the cgroup, `file` one of its files.
#[derive(Debug, thiserror::Error)]
#[expect(
    missing_docs,
    reason = "each message says what the variant and its fields mean"
)]
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
    #[error(
        "this process sits in cgroup {0:?}, so its controllers cannot be switched on, and nobody allowed to move it"
    )]
    MoveNeeded(PathBuf),
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
    /// Returns whether the error only means that this process may not use this hierarchy, so that another may be tried.
    /// Any other error, above all a group that already exists, stops the run.
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
            | CgroupError::OthersInside(_)
            | CgroupError::MoveNeeded(_) => true,
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
    /// The file system's magic number (linux/magic.h), which no other file system can imitate.
    fn magic(self) -> u64 {
        match self {
            Version::V1 => 0x0027_e0eb,
            Version::V2 => 0x6367_7270,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Version::V1 => "v1",
            Version::V2 => "v2",
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
    const ALL: [Controller; 5] = [
        Controller::Memory,
        Controller::Pids,
        Controller::Cpu,
        Controller::Cpuacct,
        Controller::Cpuset,
    ];
    /// Those that limit something.
    const LIMITING: [Controller; 3] = [Controller::Memory, Controller::Pids, Controller::Cpu];

    fn name(self) -> &'static str {
        match self {
            Controller::Memory => "memory",
            Controller::Pids => "pids",
            Controller::Cpu => "cpu",
            Controller::Cpuacct => "cpuacct",
            Controller::Cpuset => "cpuset",
        }
    }
}

/// The limits of a run's group. `None` leaves that resource unlimited, but still counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupLimits {
    /// Memory, with swap where the kernel counts it.
    pub memory_bytes: Option<u64>,
    /// Processes, of which each thread is one.
    pub pids: Option<u64>,
    /// Thousandths of a CPU.
    pub cpu_milli: Option<u64>,
}

/// The mechanism that enforces a limit, for the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnforcedLimit {
    /// The mechanism in words.
    pub by: String,
    /// How firmly the limit holds.
    pub how_hard: Hardness,
}

/// The kernel's counters. `None`: this kernel does not provide the value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// Processes of the group that the kernel's OOM killer killed, for any reason.
    pub oom_kills: Option<u64>,
    /// How often this group itself was at its limit with nothing left to reclaim. Kills without any of these mean
    /// that a group above, or the machine, ran out of memory.
    pub ooms_at_limit: Option<u64>,
    /// The most memory at one time.
    pub memory_peak_bytes: Option<u64>,
    /// The most processes at one time.
    pub pids_peak: Option<u64>,
    /// Forks refused by the process limit.
    pub pids_denied: Option<u64>,
    /// The CPU time of all processes.
    pub cpu_usage_us: Option<u64>,
}

/// How to read the file of [`Group::cpu_usage_fd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuUnit {
    /// Version 1 `cpuacct.usage`: one number, nanoseconds.
    Nanoseconds,
    /// Version 2 `cpu.stat`: the line `usage_usec`, microseconds.
    UsageUsecLine,
}

impl CpuUnit {
    /// Reads the microseconds of CPU time used so far, from the start of the file.
    pub fn read_us(self, fd: BorrowedFd<'_>) -> io::Result<u64> {
        let text = read_from_start(fd)?;
        match self {
            CpuUnit::Nanoseconds => text.trim().parse::<u64>().ok().map(|ns| ns / 1000),
            CpuUnit::UsageUsecLine => keyed(&text, "usage_usec"),
        }
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }
}

/// Reads from the file of [`Group::oom_kills_fd`] how many processes the OOM killer has killed so far.
pub(crate) fn read_oom_kills(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let kills = keyed(&read_from_start(fd)?, "oom_kill");
    kills.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Reads a counter's file from its start.
fn read_from_start(fd: BorrowedFd<'_>) -> io::Result<String> {
    let mut buffer = [0; 4096];
    let length = rustix::io::pread(fd, &mut buffer[..], 0)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

/// One run's group: a directory in each hierarchy that has one of its controllers.
///
/// Dropping it removes the directories that are empty and leaves the others to recovery.
#[derive(Debug)]
pub struct Group {
    parts: Vec<CreatedGroup>,
    enforcement: Vec<(LimitName, Result<EnforcedLimit, CgroupError>)>,
}

impl Group {
    /// Makes the group of run `id` with its limits. A missing controller, or a limit that the kernel refuses, is not
    /// an error here: [`Group::enforces`] reports it, and the caller decides. Moves no process, unless the
    /// caller of [`discover`] allowed to move this one.
    pub fn create(
        host: &Hierarchies,
        id: &str,
        limits: &GroupLimits,
    ) -> Result<Group, CgroupError> {
        check_id(id)?;
        let name = name_for(id);
        // If a later step fails, dropping the group removes the parts made so far.
        let mut group = Group {
            parts: Vec::new(),
            enforcement: Vec::new(),
        };
        let mut refusal = None;
        let v2 = host
            .v2
            .iter()
            .map(|site| v2::make(site, &name, host.own_process));
        let v1 = host.v1.iter().map(|site| v1::make(site, &name));
        for created in v2.chain(v1) {
            match created {
                Ok(created) => group.parts.push(created),
                Err(e) if e.means_not_ours() => refusal = refusal.or(Some(e)),
                Err(e) => return Err(e),
            }
        }
        if group.parts.is_empty() {
            return Err(CgroupError::Unavailable {
                refusal: refusal.map(Box::new),
            });
        }
        let requested = [
            (LimitName::Memory, Controller::Memory, limits.memory_bytes),
            (LimitName::Pids, Controller::Pids, limits.pids),
            (LimitName::Cpus, Controller::Cpu, limits.cpu_milli),
        ];
        for (limit, controller, value) in requested {
            if let Some(value) = value {
                let enforcement = group.limit(controller, value);
                group.enforcement.push((limit, enforcement));
            }
        }
        Ok(group)
    }

    fn limit(&self, controller: Controller, value: u64) -> Result<EnforcedLimit, CgroupError> {
        let part = self.part(controller);
        let part = part.ok_or(CgroupError::NoController(controller.name()))?;
        match (controller, part.node.version) {
            (Controller::Memory, Version::V1) => v1::limit_memory(part, value),
            (Controller::Memory, Version::V2) => v2::limit_memory(part, value),
            (Controller::Pids, _) => limit_pids(part, value),
            (_, Version::V1) => v1::limit_cpu(part, value),
            (_, Version::V2) => v2::limit_cpu(part, value),
        }
    }

    fn part(&self, controller: Controller) -> Option<&CreatedGroup> {
        self.parts.iter().find(|part| part.has(controller))
    }

    /// Returns descriptors through which a process attaches itself: it writes `0` to each, once, while it has a
    /// single thread (version 1 moves only the thread that writes). A process that holds them can attach whatever its
    /// credentials, so they are closed before the program runs. The version 2 descriptor, if any, comes first: a
    /// process that started in [`Group::directory_fd`] is in that part already.
    pub(crate) fn attach_fds(&self) -> Result<Vec<OwnedFd>, CgroupError> {
        let open = |part: &CreatedGroup| {
            let file = match part.node.version {
                // A write to `tasks` avoids the lock over all threads of the system that `cgroup.procs` takes.
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

    /// Returns the version 2 directory, in which a process can start (CLONE_INTO_CGROUP). Version 1 has no such call.
    pub(crate) fn directory_fd(&self) -> Option<BorrowedFd<'_>> {
        let mut parts = self.parts.iter();
        let part = parts.find(|part| part.node.version == Version::V2);
        part.map(|part| part.node.fd.as_fd())
    }

    /// Returns how `limit` is enforced, or `None` if it was not asked for or this group does not enforce it.
    pub fn enforces(&self, limit: LimitName) -> Option<&EnforcedLimit> {
        let found = self.enforcement.iter().find(|(name, _)| *name == limit);
        found.and_then(|(_, enforcement)| enforcement.as_ref().ok())
    }

    /// Returns why a limit that was asked for is not enforced.
    pub fn why_not(&self, limit: LimitName) -> Option<&CgroupError> {
        let found = self.enforcement.iter().find(|(name, _)| *name == limit);
        found.and_then(|(_, enforcement)| enforcement.as_ref().err())
    }

    /// Reads the kernel's counters.
    pub(crate) fn counters(&self) -> Counters {
        let mut counters = Counters::default();
        for part in &self.parts {
            match part.node.version {
                Version::V1 => v1::count(part, &mut counters),
                Version::V2 => v2::count(part, &mut counters),
            }
        }
        counters
    }

    /// Returns a file that any process that holds the descriptor can read with [`CpuUnit::read_us`].
    pub fn cpu_usage_fd(&self) -> Option<(OwnedFd, CpuUnit)> {
        self.parts.iter().find_map(|part| {
            let (file, unit) = match part.node.version {
                Version::V1 if part.has(Controller::Cpuacct) => {
                    ("cpuacct.usage", CpuUnit::Nanoseconds)
                }
                Version::V1 => return None,
                // Version 2 counts CPU time in every group, even without the controller.
                Version::V2 => ("cpu.stat", CpuUnit::UsageUsecLine),
            };
            Some((part.node.open_file(file, OFlags::RDONLY).ok()?, unit))
        })
    }

    /// Returns a file that any process that holds the descriptor can read with [`read_oom_kills`].
    pub(crate) fn oom_kills_fd(&self) -> Option<OwnedFd> {
        let part = self.parts.iter().find(|p| p.has(Controller::Memory))?;
        let file = match part.node.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        part.node.open_file(file, OFlags::RDONLY).ok()
    }

    /// Returns the group's directories, for the crash record and [`remove_left_behind`].
    pub fn paths(&self) -> Vec<PathBuf> {
        self.parts.iter().map(|p| p.node.path.clone()).collect()
    }

    /// Kills every process in the group, in all of its directories.
    pub fn kill(&self) {
        self.parts.iter().for_each(|part| part.node.kill());
    }

    /// Returns whether every process has left. A group that cannot be read counts as not empty.
    pub fn is_empty(&self) -> bool {
        self.parts.iter().all(|part| part.node.is_empty())
    }

    /// Removes the group, and waits a bounded time for processes that are exiting. On error [`remove_left_behind`]
    /// can remove the rest later.
    pub fn remove(mut self) -> Result<(), CgroupError> {
        let parts = std::mem::take(&mut self.parts);
        remove_all(&parts)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for part in &self.parts {
            // Only an empty group can be removed. A group in use is left to recovery.
            let _ = part.rmdir();
        }
    }
}

/// Reads the groups of this process. Changes nothing, and treats what cannot be read as absent: for a host without
/// cgroups [`Hierarchies::is_none`] is true.
pub fn discover(own_process: OwnProcess) -> Hierarchies {
    Hierarchies {
        own_process,
        ..v2::with_controllers(sites())
    }
}

/// Removes every part, continues after a failure, and returns the first error.
fn remove_all(parts: &[CreatedGroup]) -> Result<(), CgroupError> {
    let deadline = Instant::now() + REMOVE_WAIT;
    let results: Vec<_> = parts.iter().map(|part| part.remove(deadline)).collect();
    results.into_iter().collect()
}

fn limit_pids(part: &CreatedGroup, value: u64) -> Result<EnforcedLimit, CgroupError> {
    part.node.write_exact("pids.max", &value.to_string())?;
    Ok(hard(format!(
        "cgroup {} pids.max",
        part.node.version.name()
    )))
}

fn hard(by: impl Into<String>) -> EnforcedLimit {
    EnforcedLimit {
        by: by.into(),
        how_hard: Hardness::Hard,
    }
}

const SWAP_NOT_COUNTED: &str = " (swap not counted)";

/// Describes a CPU quota as the kernel keeps it.
fn cpu_limit(by: &str, cpu_milli: u64) -> EnforcedLimit {
    hard(
        match cpu_quota_us(cpu_milli) > CPU_QUOTA_US_MIN || cpu_milli == 10 {
            true => by.to_owned(),
            false => format!("{by} (raised to the kernel's least, 0.01 CPU)"),
        },
    )
}

/// Describes a memory limit, from its name with swap and without, and the result of limiting swap.
fn memory_limit(
    with_swap: String,
    without_swap: String,
    swap: Result<(), CgroupError>,
) -> Result<EnforcedLimit, CgroupError> {
    match swap {
        Ok(()) => Ok(hard(with_swap)),
        // Kernels booted without swap accounting do not have the file.
        Err(CgroupError::Write { source, .. })
            if Errno::from_io_error(&source) == Some(Errno::NOENT) =>
        {
            Ok(limit_without_swap(without_swap, host_has_swap()))
        }
        Err(e) => Err(e),
    }
}

/// Describes a memory limit that does not limit swap. On a host with swap only the watch over both enforces the
/// requested limit.
fn limit_without_swap(by: String, has_swap: bool) -> EnforcedLimit {
    match has_swap {
        false => hard(by),
        true => EnforcedLimit {
            by: format!("{by}{SWAP_NOT_COUNTED}, init's watch over both"),
            how_hard: Hardness::Watched,
        },
    }
}

/// Checks that a memory limit read back is the one written. The kernel rounds down to whole pages, and the largest
/// page in use is 64 KiB.
fn is_rounded(asked: u64) -> impl Fn(&str) -> bool {
    move |found| {
        let found = found.parse::<u64>();
        found.is_ok_and(|found| found <= asked && asked - found < 65_536)
    }
}

/// 100 ms, the kernel's default. A shorter period costs more and throttles no better.
const CPU_PERIOD_US: u64 = 100_000;
/// The kernel accepts no quota below a millisecond.
const CPU_QUOTA_US_MIN: u64 = 1_000;

fn cpu_quota_us(cpu_milli: u64) -> u64 {
    cpu_milli
        .saturating_mul(CPU_PERIOD_US / 1000)
        .max(CPU_QUOTA_US_MIN)
}

fn host_has_swap() -> bool {
    // If it cannot be read, assume that there is swap: the record must not promise too much.
    let meminfo = String::from_utf8(read_proc("/proc/meminfo")).unwrap_or_default();
    meminfo_bytes(&meminfo, "SwapTotal:") != Some(0)
}

fn meminfo_bytes(meminfo: &str, key: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Kills the remaining processes in the groups of a run whose runner died, and removes the groups. Returns how many
/// groups were removed. The caller has verified that the runner is dead (its lock is free).
///
/// The paths come from a record on disk, which is not trusted: each must lie below a cgroup mount, have the name of a
/// run's group, and contain neither this process nor an ancestor of its group. Groups do not outlive a boot, so under
/// another boot id there is nothing to remove, and a group that has the name now belongs to somebody else.
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
            Some(created) => {
                created.node.kill();
                remove_all(std::slice::from_ref(&created)).map(|()| 1)
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

/// Returns every path at which [`Group::create`] may make a directory for this id. The record must name them before
/// any of them is made, so that a crash at any moment leaves nothing unrecorded.
pub fn planned_paths(host: &Hierarchies, id: &str) -> Vec<PathBuf> {
    let sites = host.v1.iter().chain(&host.v2);
    let parents = sites.flat_map(|site| match site.version {
        Version::V1 => vec![site.own.clone()],
        // If this process is in a leaf of its own, the group is made beside the leaf.
        Version::V2 => site
            .own
            .ancestors()
            .take(2)
            .map(Path::to_path_buf)
            .collect(),
    });
    parents.map(|parent| parent.join(name_for(id))).collect()
}

/// Opens a group that a record names, or says why it is not the group of a run of Fumehood. Returns `None` if the group
/// is already gone.
fn left_behind(
    path: &Path,
    mountinfo: &[u8],
    host: &Hierarchies,
) -> Result<Option<CreatedGroup>, CgroupError> {
    let foreign = |why| CgroupError::Foreign {
        path: path.to_path_buf(),
        why,
    };
    let plain = plain_absolute(path.as_os_str().as_bytes().to_vec())
        .ok_or_else(|| foreign("it is not a plain absolute path"))?;
    let name = plain.file_name().and_then(|n| n.to_str());
    let name = name.ok_or_else(|| foreign("it has no name"))?;
    if !is_run_group(name) {
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
    let is_not_found = |e: &CgroupError| matches!(e, CgroupError::Open { source, .. } if source.kind() == io::ErrorKind::NotFound);
    let opened =
        Node::open(mount.version, parent).and_then(|parent| Ok((parent.open_child(name)?, parent)));
    match opened {
        Ok((node, parent)) => Ok(Some(CreatedGroup {
            node,
            parent,
            name: name.to_owned(),
            controllers: mount.controllers,
        })),
        Err(e) if is_not_found(&e) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Returns the maximal memory that this process could use: the minimum of the machine's memory and of every limit
/// from its own group upwards. Returns zero only if the kernel provides no value at all.
pub fn memory_available_bytes() -> u64 {
    let meminfo = String::from_utf8(read_proc("/proc/meminfo")).unwrap_or_default();
    let total = meminfo_bytes(&meminfo, "MemTotal:").unwrap_or_else(|| {
        let info = rustix::system::sysinfo();
        (info.totalram as u64).saturating_mul(u64::from(info.mem_unit))
    });
    let host = sites();
    let v1 = host.v1.iter().filter_map(v1::memory_limit);
    let v2 = host.v2.iter().filter_map(v2::memory_limit);
    v1.chain(v2).fold(total, u64::min)
}

/// Returns every group from this process's own up to the mount point.
fn ancestors(site: &Site) -> impl Iterator<Item = Node> + '_ {
    site.own
        .ancestors()
        .take_while(|path| path.starts_with(&site.mount))
        .filter_map(|path| Node::open(site.version, path).ok())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
