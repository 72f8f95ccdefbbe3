//! From requested limits to enforced limits, each with the mechanism that enforces it.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

use sandbox::cgroup::{self, AncestorLimit, AncestorLimits, EnforcedLimit, Group, GroupLimits};
use sandbox::spec::{ConfinementLevel, Enforcement, Hardness, LimitName, Limits, WorkspaceKind};

use crate::request::{RequestedLimit, RequestedLimits};

const MEMORY_DEFAULT_MAX: u64 = 4 << 30;

/// Why a limit of a request does not hold on this host.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum LimitError {
    /// The request sets the limit explicitly, only a weaker watch can enforce it here, and the request does not accept
    /// that.
    #[error(
        "the {limit} limit cannot be enforced firmly on this host: {why}; run as root or in a delegated cgroup, \
         or accept a weaker watch with --allow-degraded {limit}",
        limit = .limit.as_str()
    )]
    NotEnforceable { limit: LimitName, why: String },
}

/// The values that hold for this run: the requested ones, or defaults that suit the host.
pub fn resolve(asked: &RequestedLimits) -> Limits {
    let memory_default = || MEMORY_DEFAULT_MAX.min(cgroup::memory_available_bytes() / 2);
    let cpus_default = cpus_usable() * 1000;
    // A value that is not explicit is the operator's ceiling on the default.
    let or_default = |asked: Option<RequestedLimit<u64>>, default: &dyn Fn() -> u64| match asked {
        Some(limit) if limit.explicit => limit.value,
        Some(limit) => limit.value.min(default()),
        None => default(),
    };
    let pids = asked.pids.value;
    Limits {
        wall_ms: asked.wall_ms.value,
        cpu_ms: asked.cpu_ms.map(|a| a.value),
        idle_ms: asked.idle_ms.map(|a| a.value),
        grace_ms: asked.grace_ms.value,
        memory_bytes: or_default(asked.memory_bytes, &memory_default),
        cpu_milli: or_default(asked.cpu_milli, &|| cpus_default),
        pids: match asked.pids.explicit {
            true => pids,
            false => pids.min(half_of_free_processes(pids)),
        },
        open_files: asked.open_files.value,
        open_files_of_run: open_files_of_run(
            number_in("/proc/sys/fs/file-max"),
            pids,
            asked.open_files.value,
        ),
        tcp_bytes: tcp_bytes_of_host() / 10,
        disk_bytes: asked.disk_bytes.value,
        files: asked.files.value,
        log_bytes: asked.log_bytes.value,
    }
}

/// Half of the processes that the user may still start, so that a run leaves enough for the user's other programs.
/// Root, and a run with a uid of its own, have no shared process count.
///
/// Counting the user's processes takes a walk through /proc. Skip the walk if even all threads of the host would
/// leave at least `default`.
fn half_of_free_processes(default: u64) -> u64 {
    let uid = rustix::process::getuid();
    let limit = match uid.is_root() || rustix::process::geteuid().is_root() {
        true => None,
        false => rustix::process::getrlimit(rustix::process::Resource::Nproc).current,
    };
    let Some(limit) = limit else {
        return u64::MAX;
    };
    match threads_of_host().map(|used| half_of_remaining(limit, used)) {
        Some(at_least) if at_least >= default => at_least,
        _ => half_of_remaining(limit, threads_of_user(uid.as_raw())),
    }
}

/// The threads of all users. The fourth word of /proc/loadavg is `running/all`.
fn threads_of_host() -> Option<u64> {
    let text = read_once("/proc/loadavg".as_ref())?;
    let (_, all) = text.split_ascii_whitespace().nth(3)?.split_once('/')?;
    all.parse().ok()
}

/// Reads a file of /proc that is shorter than a page with one call. Such files report size 0.
fn read_once(path: &Path) -> Option<String> {
    let mut bytes = [0; 4096];
    let length = std::fs::File::open(path).ok()?.read(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

/// 8 is the smallest value that `--pids` accepts.
fn half_of_remaining(limit: u64, used: u64) -> u64 {
    (limit.saturating_sub(used) / 2).max(8)
}

/// The user's threads, as the kernel counts them for RLIMIT_NPROC: by real uid. Processes that are hidden from this
/// process are not counted.
fn threads_of_user(uid: u32) -> u64 {
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return 0;
    };
    let threads = |entry: std::fs::DirEntry| {
        let name = entry.file_name();
        if !name.as_encoded_bytes().first()?.is_ascii_digit() {
            return None;
        }
        let status = read_once(&entry.path().join("status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_ascii_whitespace().next()?.parse::<u64>().ok()
        };
        (field("Uid:")? == u64::from(uid)).then_some(field("Threads:")?)
    };
    processes.flatten().filter_map(threads).sum()
}

/// The bound on open files of all processes of a run together: a tenth of the host's, if the other limits would allow
/// more. A process holds an open file with each descriptor and each mapping.
fn open_files_of_run(of_host: u64, pids: u64, open_files: u64) -> Option<u64> {
    // The largest value that vm.max_map_count can be set to. Reading the real value would save the watch only on a host
    // whose `file-max` is large and still below the kernel's largest number, which systemd sets.
    const MAPPINGS_MAX: u64 = i32::MAX as u64;
    let share = of_host / 10;
    let most = pids.saturating_mul(open_files.saturating_add(MAPPINGS_MAX));
    (most > share).then_some(share)
}

/// The host's memory for TCP buffers. The file cannot be read outside the initial network namespace, for example in a
/// container. Then assume the kernel's default, nearly a tenth of the memory.
fn tcp_bytes_of_host() -> u64 {
    const KERNEL_SHARE: u64 = 11;
    let text = read_once("/proc/sys/net/ipv4/tcp_mem".as_ref()).unwrap_or_default();
    let pages = text.split_ascii_whitespace().nth(2);
    let pages = pages.and_then(|pages| pages.parse::<u64>().ok());
    let page = rustix::param::page_size() as u64;
    let memory = || {
        let info = rustix::system::sysinfo();
        info.totalram.saturating_mul(u64::from(info.mem_unit)) / KERNEL_SHARE
    };
    pages.map_or_else(memory, |pages| pages.saturating_mul(page))
}

/// A limit of the kernel. If the file cannot be read, there is no limit.
fn number_in(path: &str) -> u64 {
    let number = read_once(path.as_ref()).and_then(|text| text.trim().parse().ok());
    number.unwrap_or(u64::MAX)
}

fn cpus_usable() -> u64 {
    rustix::thread::sched_getaffinity(None).map_or(1, |set| u64::from(set.count()).max(1))
}

/// The limits to set on the run's cgroup.
pub fn group_limits(limits: &Limits) -> GroupLimits {
    GroupLimits {
        memory_bytes: Some(limits.memory_bytes),
        pids: Some(limits.pids),
        cpu_milli: Some(limits.cpu_milli),
    }
}

/// The quota project ids that belong to a leased uid. Leased uids span less than `STEP`, so no other uid has the same
/// ids. A kept workspace keeps its project id, so the next run with the same uid takes the next one.
pub fn quota_project_ids(uid: u32) -> impl Iterator<Item = u32> {
    const STEP: usize = 65_536;
    const COUNT: usize = 1024;
    (uid..=i32::MAX as u32).step_by(STEP).take(COUNT)
}

/// Where the bytes of the workspace are. The record says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkspaceStorage {
    /// A disk without a project quota. A watch measures the files.
    Disk,
    /// A file system with project quotas.
    Quota,
    /// `--workspace disk` on a tmpfs: its bytes count as memory too.
    DiskOnTmpfs,
    /// A tmpfs of the run's own.
    Memory,
}

impl WorkspaceStorage {
    /// Whether the program has a workspace on disk or in memory.
    pub fn kind(self) -> WorkspaceKind {
        match self {
            WorkspaceStorage::Disk | WorkspaceStorage::Quota | WorkspaceStorage::DiskOnTmpfs => {
                WorkspaceKind::Disk
            }
            WorkspaceStorage::Memory => WorkspaceKind::Memory,
        }
    }
}

/// The properties of a run that decide which mechanism enforces its limits.
#[derive(Clone, Copy, Debug)]
pub struct EnforcementContext {
    /// The level of confinement.
    pub level: ConfinementLevel,
    /// The program runs with a leased uid.
    pub has_own_uid: bool,
    /// Where the bytes of the workspace are.
    pub storage: WorkspaceStorage,
}

impl EnforcementContext {
    /// What limits the number of processes without a cgroup.
    fn pids(self) -> (&'static str, Hardness) {
        match (self.level, self.has_own_uid) {
            (ConfinementLevel::Full, _) => (
                "RLIMIT_NPROC in the run's own user namespace",
                Hardness::Hard,
            ),
            (ConfinementLevel::Landlock, true) => {
                ("RLIMIT_NPROC of the run's own uid", Hardness::Hard)
            }
            (ConfinementLevel::Landlock, false) => (
                "the guardian's watch over the run's processes, RLIMIT_NPROC over the user's processes",
                Hardness::Watched,
            ),
        }
    }
}

/// Whether the run's own cgroup firmly enforces memory and CPUs, so that limits of outer cgroups need not be read.
pub(crate) fn group_suffices(group: &Group) -> bool {
    let firm = |name| group.enforces(name).map(|e| e.how_hard) == Some(Hardness::Hard);
    firm(LimitName::Memory) && firm(LimitName::Cpus)
}

/// Lists what enforces each limit, and how hard. Fails if CPU time, memory, CPUs or processes are set explicitly, would
/// not be enforced firmly, and `allow_degraded` does not name the limit. Firmly means: memory and processes are hard, a
/// cgroup counts the CPU time, and CPUs are limited by a cgroup or are a whole number.
pub fn enforcement(
    asked: &RequestedLimits,
    limits: &Limits,
    group: Result<&Group, String>,
    outer: &AncestorLimits,
    context: EnforcementContext,
    allow_degraded: &BTreeSet<LimitName>,
) -> Result<Vec<Enforcement>, LimitError> {
    let mut list = EnforcementList {
        asked,
        limits,
        group,
        allow_degraded,
        entries: Vec::new(),
    };
    list.add_times()?;
    list.add_memory(outer)?;
    list.add_cpus(outer)?;
    list.add_pids(context)?;
    list.add_files(context.storage);
    list.add(
        LimitName::Logs,
        limits.log_bytes,
        "the runner keeps head and tail of each stream",
        Hardness::Hard,
    );
    Ok(list.entries)
}

/// Collects what enforces each limit of one run.
struct EnforcementList<'a> {
    asked: &'a RequestedLimits,
    limits: &'a Limits,
    group: Result<&'a Group, String>,
    allow_degraded: &'a BTreeSet<LimitName>,
    entries: Vec<Enforcement>,
}

impl EnforcementList<'_> {
    fn add(&mut self, limit: LimitName, asked: u64, by: &str, how_hard: Hardness) {
        self.entries.push(Enforcement {
            limit,
            asked,
            enforced_by: by.to_owned(),
            how_hard,
        });
    }

    /// What the run's own cgroup enforces of this limit.
    fn by_group(&self, limit: LimitName) -> Option<EnforcedLimit> {
        self.group.as_ref().ok()?.enforces(limit).cloned()
    }

    /// The caller has found that this host cannot enforce the limit firmly. Fails if the request sets the limit
    /// explicitly and `allow_degraded` does not name it.
    fn require_firm(&self, limit: LimitName, explicit: bool) -> Result<(), LimitError> {
        match explicit && !self.allow_degraded.contains(&limit) {
            false => Ok(()),
            true => Err(LimitError::NotEnforceable {
                limit,
                why: why_not(&self.group, limit),
            }),
        }
    }

    fn add_times(&mut self) -> Result<(), LimitError> {
        self.add(
            LimitName::WallTime,
            self.limits.wall_ms,
            "init's loop; a later deadline of the runner if init is late",
            Hardness::Hard,
        );
        if let Some(cpu_ms) = self.limits.cpu_ms {
            let group = self.group.as_ref().ok();
            if group.and_then(|g| g.cpu_usage_fd()).is_none() {
                // Only a cgroup counts the CPU time of children that nobody waits for.
                let explicit = self.asked.cpu_ms.is_some_and(|a| a.explicit);
                self.require_firm(LimitName::CpuTime, explicit)?;
            }
            self.add(
                LimitName::CpuTime,
                cpu_ms,
                "init's watch over the run's processes, RLIMIT_CPU per process",
                Hardness::Watched,
            );
        }
        if let Some(idle_ms) = self.limits.idle_ms {
            self.add(
                LimitName::IdleTime,
                idle_ms,
                "init's loop: no output, and at most 1 % of a CPU",
                Hardness::Watched,
            );
        }
        Ok(())
    }

    fn add_memory(&mut self, outer: &AncestorLimits) -> Result<(), LimitError> {
        let bytes = self.limits.memory_bytes;
        let group = self.by_group(LimitName::Memory);
        let (by, how_hard) = memory_enforcement(bytes, group, outer);
        if how_hard == Hardness::Watched {
            let explicit = self.asked.memory_bytes.is_some_and(|a| a.explicit);
            self.require_firm(LimitName::Memory, explicit)?;
        }
        self.add(LimitName::Memory, bytes, &by, how_hard);
        Ok(())
    }

    fn add_cpus(&mut self, outer: &AncestorLimits) -> Result<(), LimitError> {
        let (limit, milli) = (LimitName::Cpus, self.limits.cpu_milli);
        match (self.by_group(limit), firm_outer_limit(&outer.cpus, milli)) {
            (Some(own), _) => self.add(limit, milli, &own.by, own.how_hard),
            (None, Some(outer)) => self.add(limit, milli, &outer.by, outer.how_hard),
            (None, None) => {
                // Affinity can pin whole CPUs firmly, but not a fraction of one.
                let explicit = self.asked.cpu_milli.is_some_and(|a| a.explicit);
                self.require_firm(limit, explicit && !milli.is_multiple_of(1000))?;
                self.add(
                    limit,
                    milli,
                    "CPU affinity, fixed by seccomp",
                    Hardness::Hard,
                );
            }
        }
        Ok(())
    }

    fn add_pids(&mut self, context: EnforcementContext) -> Result<(), LimitError> {
        let (limit, pids) = (LimitName::Pids, self.limits.pids);
        match self.by_group(limit) {
            Some(own) => self.add(limit, pids, &own.by, own.how_hard),
            None => {
                let (by, how_hard) = context.pids();
                if how_hard == Hardness::Watched {
                    self.require_firm(limit, self.asked.pids.explicit)?;
                }
                self.add(limit, pids, by, how_hard);
            }
        }
        Ok(())
    }

    fn add_files(&mut self, storage: WorkspaceStorage) {
        let by = match self.limits.open_files_of_run {
            Some(_) => "RLIMIT_NOFILE, init's watch over the run's tenth of fs.file-max",
            None => "RLIMIT_NOFILE",
        };
        self.add(
            LimitName::OpenFiles,
            self.limits.open_files,
            by,
            Hardness::Hard,
        );
        let (disk_by, files_by, how_hard) = match storage {
            WorkspaceStorage::Memory => (
                "size of the run's own tmpfs",
                "inodes of the run's own tmpfs",
                Hardness::Hard,
            ),
            WorkspaceStorage::Quota => (
                "project quota of the file system, init's watch behind it",
                "project quota of the file system, init's watch behind it",
                Hardness::Hard,
            ),
            WorkspaceStorage::DiskOnTmpfs => (
                "init's watch over the workspace's files (on a tmpfs: counts as memory too), RLIMIT_FSIZE per file",
                "init's watch over the workspace's files",
                Hardness::Watched,
            ),
            WorkspaceStorage::Disk => (
                "init's watch over the workspace's files, RLIMIT_FSIZE per file",
                "init's watch over the workspace's files",
                Hardness::Watched,
            ),
        };
        self.add(LimitName::Disk, self.limits.disk_bytes, disk_by, how_hard);
        self.add(LimitName::Files, self.limits.files, files_by, how_hard);
    }
}

/// What enforces the memory limit: the run's own cgroup, an outer limit that is no larger than the requested one, or
/// init's watch.
fn memory_enforcement(
    asked: u64,
    held: Option<EnforcedLimit>,
    outer: &AncestorLimits,
) -> (String, Hardness) {
    const WATCH: &str = "init's watch over the proportional memory of the run's processes";
    match (held, firm_outer_limit(&outer.memory, asked)) {
        (Some(own), _) if own.how_hard == Hardness::Hard => (own.by, own.how_hard),
        (_, Some(outer)) => (outer.by.clone(), outer.how_hard),
        (Some(own), None) => (own.by, own.how_hard),
        (None, None) => (WATCH.to_owned(), Hardness::Watched),
    }
}

/// A limit of the batch job or container around this process that enforces the requested value firmly.
fn firm_outer_limit(outer: &Option<AncestorLimit>, asked: u64) -> Option<&AncestorLimit> {
    let firm = |limit: &&AncestorLimit| limit.how_hard == Hardness::Hard && limit.value <= asked;
    outer.as_ref().filter(firm)
}

fn why_not(group: &Result<&Group, String>, limit: LimitName) -> String {
    match group {
        Ok(group) => group
            .why_not(limit)
            .map_or_else(|| "no cgroup controller".into(), |e| error_chain(e)),
        Err(why) => why.clone(),
    }
}

/// An error with all its causes, in one line.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_remaining_processes_but_at_least_eight() {
        assert_eq!(half_of_remaining(1000, 200), 400);
        assert_eq!(half_of_remaining(1000, 999), 8);
        assert_eq!(half_of_remaining(1000, 5000), 8);
    }

    #[test]
    fn the_threads_of_this_process_are_counted() {
        let uid = rustix::process::getuid().as_raw();
        let before = threads_of_user(uid);
        assert!(before >= 1);
        assert_eq!(threads_of_user(u32::MAX - 7), 0);
        assert!(threads_of_host().is_some_and(|all| all >= 1));
    }

    /// On a host with a small file-max, and on one without a bound.
    #[test]
    fn open_files_of_a_run_are_a_tenth_of_the_hosts() {
        let of_run = |of_host| open_files_of_run(of_host, 1024, 4096);
        assert_eq!(of_run(2_465_780), Some(246_578));
        assert_eq!(of_run(i64::MAX as u64), None);
        assert_eq!(of_run(u64::MAX), None);
        // Mapped files count too.
        assert_eq!(open_files_of_run(1_000_000, 8, 16), Some(100_000));
        let limits = resolve(&RequestedLimits::default());
        assert_eq!(limits.open_files, 4096);
        assert!(limits.tcp_bytes > 1 << 20);
    }
}
