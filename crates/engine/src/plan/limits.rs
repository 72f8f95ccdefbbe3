//! From limits as asked for to limits as they are enforced on this host, each by a named mechanism.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

use sandbox::cgroup::{self, AncestorLimit, AncestorLimits, EnforcedLimit, Group, GroupLimits};
use sandbox::spec::{ConfinementLevel, Enforcement, Hardness, LimitName, Limits, WorkspaceKind};

use crate::request::{Asked, AskedLimits};

const MEMORY_DEFAULT_MAX: u64 = 4 << 30;

#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    #[error(
        "the {limit} limit cannot be enforced firmly on this host: {why}; run as root or in a delegated cgroup, \
         or accept a weaker watch with --allow-degraded {limit}",
        limit = .limit.as_str()
    )]
    NotEnforceable { limit: LimitName, why: String },
}

/// The numbers that hold for this run: what was asked for, or a default that suits the host.
pub fn resolve(asked: &AskedLimits) -> Limits {
    let memory_default = || MEMORY_DEFAULT_MAX.min(cgroup::memory_available_bytes() / 2);
    let cpus_default = cpus_usable() * 1000;
    // An ask that is not explicit is the operator's ceiling over our default.
    let or_default = |asked: Option<Asked<u64>>, default: &dyn Fn() -> u64| match asked {
        Some(Asked {
            value,
            explicit: true,
        }) => value,
        Some(Asked {
            value,
            explicit: false,
        }) => value.min(default()),
        None => default(),
    };
    Limits {
        wall_ms: asked.wall_ms.value,
        cpu_ms: asked.cpu_ms.map(|a| a.value),
        idle_ms: asked.idle_ms.map(|a| a.value),
        grace_ms: asked.grace_ms.value,
        memory_bytes: or_default(asked.memory_bytes, &memory_default),
        cpu_milli: or_default(asked.cpu_milli, &|| cpus_default),
        pids: match asked.pids.explicit {
            true => asked.pids.value,
            false => asked
                .pids
                .value
                .min(half_of_users_processes(asked.pids.value)),
        },
        open_files: asked.open_files.value,
        open_files_of_run: open_files_of_run(
            number_in("/proc/sys/fs/file-max"),
            number_in("/proc/sys/vm/max_map_count"),
            asked.pids.value,
            asked.open_files.value,
        ),
        tcp_bytes: tcp_bytes_of_host() / 10,
        disk_bytes: asked.disk_bytes.value,
        files: asked.files.value,
        log_bytes: asked.log_bytes.value,
    }
}

/// Half of the processes that the user may still start, so that a run does not use up what the user's other programs need.
/// Root, and a run with a uid of its own, share no such count.
///
/// Counting them takes a walk through /proc, and matters only if all that run on the host would leave less than `default`.
fn half_of_users_processes(default: u64) -> u64 {
    let uid = rustix::process::getuid();
    let limit = match uid.is_root() || rustix::process::geteuid().is_root() {
        true => None,
        false => rustix::process::getrlimit(rustix::process::Resource::Nproc).current,
    };
    let Some(limit) = limit else {
        return u64::MAX;
    };
    match threads_of_host().map(|used| half_of_left(limit, used)) {
        Some(at_least) if at_least >= default => at_least,
        _ => half_of_left(limit, threads_of_user(uid.as_raw())),
    }
}

/// The threads of all users. The fourth word of the file is `running/all`.
fn threads_of_host() -> Option<u64> {
    let text = read_once("/proc/loadavg".as_ref())?;
    let (_, all) = text.split_ascii_whitespace().nth(3)?.split_once('/')?;
    all.parse().ok()
}

/// A file of /proc that is shorter than a page, by one call: they have no size to go by.
fn read_once(path: &Path) -> Option<String> {
    let mut bytes = [0; 4096];
    let length = std::fs::File::open(path).ok()?.read(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

/// The least is what `--pids` takes.
fn half_of_left(limit: u64, used: u64) -> u64 {
    (limit.saturating_sub(used) / 2).max(8)
}

/// As the kernel counts them: threads, by the real uid. What hides its processes from us hides from the count.
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

/// All processes of a run together have a tenth of what the host has, where they could have more. A process holds an open
/// file with each descriptor and each mapping.
fn open_files_of_run(of_host: u64, mappings_max: u64, pids: u64, open_files: u64) -> Option<u64> {
    let share = of_host / 10;
    let most = pids.saturating_mul(open_files.saturating_add(mappings_max));
    (most > share).then_some(share)
}

/// What the host has for the buffers of TCP. In a network namespace that is not the first, as in a container, it cannot be read, and
/// the kernel's default counts: nearly a tenth of the memory.
fn tcp_bytes_of_host() -> u64 {
    const KERNELS_SHARE: u64 = 11;
    let text = read_once("/proc/sys/net/ipv4/tcp_mem".as_ref()).unwrap_or_default();
    let pages = text.split_ascii_whitespace().nth(2);
    let pages = pages.and_then(|pages| pages.parse::<u64>().ok());
    let page = rustix::param::page_size() as u64;
    let memory = || {
        let info = rustix::system::sysinfo();
        info.totalram.saturating_mul(u64::from(info.mem_unit)) / KERNELS_SHARE
    };
    pages.map_or_else(memory, |pages| pages.saturating_mul(page))
}

/// A bound of the kernel's. Where none can be read there is none.
fn number_in(path: &str) -> u64 {
    let number = read_once(path.as_ref()).and_then(|text| text.trim().parse().ok());
    number.unwrap_or(u64::MAX)
}

fn cpus_usable() -> u64 {
    rustix::thread::sched_getaffinity(None).map_or(1, |set| u64::from(set.count()).max(1))
}

/// What is put on the run's cgroup.
pub fn group_limits(limits: &Limits) -> GroupLimits {
    GroupLimits {
        memory_bytes: Some(limits.memory_bytes),
        pids: Some(limits.pids),
        cpu_milli: Some(limits.cpu_milli),
    }
}

/// The project ids that go with a leased uid and are its holder's alone, since leased uids lie closer together than the
/// step. A kept workspace keeps its project, so the next run with the same uid takes another.
pub fn projects(uid: u32) -> impl Iterator<Item = u32> {
    const STEP: usize = 65_536;
    const COUNT: usize = 1024;
    (uid..=i32::MAX as u32).step_by(STEP).take(COUNT)
}

/// Where the workspace's bytes are, for the record's sake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    Disk,
    /// On a file system that refuses what is too much.
    Quota,
    /// `--workspace disk` on a tmpfs: it counts as memory as well.
    DiskOnTmpfs,
    Memory,
}

impl Storage {
    pub fn kind(self) -> WorkspaceKind {
        match self {
            Storage::Disk | Storage::Quota | Storage::DiskOnTmpfs => WorkspaceKind::Disk,
            Storage::Memory => WorkspaceKind::Memory,
        }
    }
}

/// What a run stands on, as far as it decides who holds its limits.
#[derive(Clone, Copy, Debug)]
pub struct Ground {
    pub level: ConfinementLevel,
    /// The program has a uid of its own.
    pub leased: bool,
    pub storage: Storage,
}

impl Ground {
    /// Who counts processes where no cgroup does.
    fn pids(self) -> (&'static str, Hardness) {
        match (self.level, self.leased) {
            (ConfinementLevel::Full, _) => (
                "RLIMIT_NPROC in the run's own user namespace",
                Hardness::Hard,
            ),
            (ConfinementLevel::Landlock, true) => {
                ("RLIMIT_NPROC of the run's own uid", Hardness::Hard)
            }
            (ConfinementLevel::Landlock, false) => (
                "the guardian's watch over the tree, RLIMIT_NPROC over the user's processes",
                Hardness::Watched,
            ),
        }
    }
}

/// Whether the run's own group holds what a limit around us might hold in its stead.
pub fn holds_alone(group: &Group) -> bool {
    let firm = |name| group.enforces(name).map(|e| e.how_hard) == Some(Hardness::Hard);
    firm(LimitName::Memory) && firm(LimitName::Cpus)
}

/// Who holds each limit, and how firmly. Stops the run if one that was asked for would not be held firmly.
pub fn enforcement(
    asked: &AskedLimits,
    limits: &Limits,
    group: Result<&Group, String>,
    outer: &AncestorLimits,
    ground: Ground,
    allow_degraded: &BTreeSet<LimitName>,
) -> Result<Vec<Enforcement>, LimitError> {
    let held = |name| group.as_ref().ok().and_then(|g| g.enforces(name));
    let firmly =
        |limit: LimitName, explicit: bool| match explicit && !allow_degraded.contains(&limit) {
            false => Ok(()),
            true => Err(LimitError::NotEnforceable {
                limit,
                why: why_not(&group, limit),
            }),
        };
    let mut list = Vec::new();
    let mut hold = |limit, asked: u64, by: &str, how_hard| {
        list.push(Enforcement {
            limit,
            asked,
            enforced_by: by.to_owned(),
            how_hard,
        });
    };
    hold(
        LimitName::WallTime,
        limits.wall_ms,
        "init's timer, the runner's behind it",
        Hardness::Hard,
    );
    if let Some(cpu_ms) = limits.cpu_ms {
        if group.as_ref().ok().and_then(|g| g.cpu_usage_fd()).is_none() {
            // Only a cgroup counts the time of children that nobody waits for.
            firmly(LimitName::CpuTime, asked.cpu_ms.is_some_and(|a| a.explicit))?;
        }
        hold(
            LimitName::CpuTime,
            cpu_ms,
            "init's watch over the tree, RLIMIT_CPU per process",
            Hardness::Watched,
        );
    }
    if let Some(idle_ms) = limits.idle_ms {
        hold(
            LimitName::IdleTime,
            idle_ms,
            "init's watch over output and CPU time",
            Hardness::Watched,
        );
    }
    let (by, how_hard) = memory_held(limits.memory_bytes, held(LimitName::Memory), outer);
    if how_hard == Hardness::Watched {
        firmly(
            LimitName::Memory,
            asked.memory_bytes.is_some_and(|a| a.explicit),
        )?;
    }
    hold(LimitName::Memory, limits.memory_bytes, &by, how_hard);
    let job = outer_holds(&outer.cpus, limits.cpu_milli);
    match (held(LimitName::Cpus), job) {
        (Some(e), _) => hold(LimitName::Cpus, limits.cpu_milli, &e.by, e.how_hard),
        (None, Some(job)) => hold(LimitName::Cpus, limits.cpu_milli, &job.by, job.how_hard),
        (None, None) => {
            // Whole CPUs can be pinned for good; a fraction of one cannot.
            let explicit = asked.cpu_milli.is_some_and(|a| a.explicit);
            firmly(
                LimitName::Cpus,
                explicit && !limits.cpu_milli.is_multiple_of(1000),
            )?;
            hold(
                LimitName::Cpus,
                limits.cpu_milli,
                "CPU affinity, fixed by seccomp",
                Hardness::Hard,
            );
        }
    }
    match held(LimitName::Pids) {
        Some(e) => hold(LimitName::Pids, limits.pids, &e.by, e.how_hard),
        None => {
            let (by, how_hard) = ground.pids();
            if how_hard == Hardness::Watched {
                firmly(LimitName::Pids, asked.pids.explicit)?;
            }
            hold(LimitName::Pids, limits.pids, by, how_hard);
        }
    }
    hold(
        LimitName::OpenFiles,
        limits.open_files,
        match limits.open_files_of_run {
            Some(_) => "RLIMIT_NOFILE, init's watch over the run's tenth of fs.file-max",
            None => "RLIMIT_NOFILE",
        },
        Hardness::Hard,
    );
    let (disk_by, files_by, how_hard) = match ground.storage {
        Storage::Memory => (
            "size of the run's own tmpfs",
            "inodes of the run's own tmpfs",
            Hardness::Hard,
        ),
        Storage::Quota => (
            "project quota of the file system, init's watch behind it",
            "project quota of the file system, init's watch behind it",
            Hardness::Hard,
        ),
        Storage::DiskOnTmpfs => (
            "init's watch over the tree (on a tmpfs: counts as memory too), RLIMIT_FSIZE per file",
            "init's watch over the tree",
            Hardness::Watched,
        ),
        Storage::Disk => (
            "init's watch over the tree, RLIMIT_FSIZE per file",
            "init's watch over the tree",
            Hardness::Watched,
        ),
    };
    hold(LimitName::Disk, limits.disk_bytes, disk_by, how_hard);
    hold(LimitName::Files, limits.files, files_by, how_hard);
    hold(
        LimitName::Logs,
        limits.log_bytes,
        "the runner keeps head and tail of each stream",
        Hardness::Hard,
    );
    Ok(list)
}

/// Who holds memory: the run's own group, a limit around us that is no larger than what was asked for, or the watch.
fn memory_held(
    asked: u64,
    held: Option<&EnforcedLimit>,
    outer: &AncestorLimits,
) -> (String, Hardness) {
    let outside = outer_holds(&outer.memory, asked);
    match (held, outside) {
        (Some(own), _) if own.how_hard == Hardness::Hard => (own.by.clone(), own.how_hard),
        (_, Some(job)) => (job.by.clone(), job.how_hard),
        (Some(own), None) => (own.by.clone(), own.how_hard),
        (None, None) => (
            String::from("init's watch over the tree's proportional memory"),
            Hardness::Watched,
        ),
    }
}

/// A limit of a batch job's or a container's, read from its own file, that lets no more through than was asked for.
fn outer_holds(outer: &Option<AncestorLimit>, asked: u64) -> Option<&AncestorLimit> {
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

/// An error and what caused it, in one line.
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
    fn half_of_what_is_left_and_never_too_few() {
        assert_eq!(half_of_left(1000, 200), 400);
        assert_eq!(half_of_left(1000, 999), 8);
        assert_eq!(half_of_left(1000, 5000), 8);
    }

    #[test]
    fn the_threads_of_this_process_are_counted() {
        let uid = rustix::process::getuid().as_raw();
        let before = threads_of_user(uid);
        assert!(before >= 1);
        assert_eq!(threads_of_user(u32::MAX - 7), 0);
        assert!(threads_of_host().is_some_and(|all| all >= 1));
    }

    /// On a host that has few, and on one that sets no bound.
    #[test]
    fn open_files_of_a_run_are_a_tenth_of_the_hosts() {
        let of_run = |of_host| open_files_of_run(of_host, 65_530, 1024, 4096);
        assert_eq!(of_run(2_465_780), Some(246_578));
        assert_eq!(of_run(i64::MAX as u64), None);
        assert_eq!(of_run(u64::MAX), None);
        // Mapped files count too.
        assert_eq!(open_files_of_run(1_000_000, 65_530, 8, 16), Some(100_000));
        let limits = resolve(&AskedLimits::default());
        assert_eq!(limits.open_files, 4096);
        assert!(limits.tcp_bytes > 1 << 20);
    }
}
