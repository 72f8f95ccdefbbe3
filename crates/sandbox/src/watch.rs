//! What init sums up ten times a second over all processes of the run: bytes written, files, CPU, memory.
//!
//! The disk watch must not be outrun. It rests on two readings. *Written* is what the kernel says the live processes (and
//! those they reaped) have dirtied; as long as it is below the limit, so is the disk. Past that, and
//! at least once a second in any case, the tree is *measured*: every file below the workspace,
//! and every file that was unlinked and is still open. What cannot be measured (a directory we may not read, a
//! depth nobody needs, a deleted file that is only mapped, a descriptor in flight on a socket)
//! makes the run answer for all it has written, and for all that the file system has grown by.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir};

use crate::cgroup::CpuUnit;
use crate::outcome::Stop;
use crate::spec::{Limits, WorkspaceKind};

pub const TICK: Duration = Duration::from_millis(100);
/// Files are measured at least this often, whatever the counters say.
const MEASURE_AT_LEAST: Duration = Duration::from_secs(1);
/// The share of its own time that init spends measuring at most: one part in so many.
const MEASURE_SHARE: u32 = 5;
/// Directories held open at once while measuring; deeper ones count as unmeasured.
const DEPTH_MAX: usize = 128;

pub struct Watch {
    limits: Limits,
    workspace: OwnedFd,
    workspace_kind: WorkspaceKind,
    device: u64,
    cpu_counter: Option<(OwnedFd, CpuUnit)>,
    memory_watched: bool,
    /// Inodes in use on the file system when last measured: a cheap sign that files were made.
    inodes_in_use: u64,
    /// Bytes in use on the whole file system at the start.
    used_at_start: u64,
    measured_at: Instant,
    measuring_took: Duration,
    pub disk_bytes_peak: u64,
    pub files_peak: u64,
    pub memory_peak: Option<u64>,
    pub pids_peak: u64,
}

/// What one look at the processes gave.
#[derive(Clone, Copy, Debug, Default)]
pub struct Processes {
    pub count: u64,
    pub written_bytes: u64,
    pub cpu_ms: u64,
    pub memory_bytes: u64,
}

#[derive(Default)]
struct Measured {
    bytes: u64,
    files: u64,
    unmeasured: bool,
    /// Inodes with several names, or none, counted once.
    seen: HashSet<u64>,
}

impl Watch {
    pub fn new(
        limits: &Limits,
        workspace: OwnedFd,
        workspace_kind: WorkspaceKind,
        cpu_counter: Option<(OwnedFd, CpuUnit)>,
        memory_watched: bool,
    ) -> io::Result<Self> {
        let device = rustix::fs::fstat(&workspace)?.st_dev;
        let mut watch = Watch {
            limits: limits.clone(),
            workspace,
            workspace_kind,
            device,
            cpu_counter,
            memory_watched,
            inodes_in_use: 0,
            used_at_start: 0,
            measured_at: Instant::now(),
            measuring_took: Duration::ZERO,
            disk_bytes_peak: 0,
            files_peak: 0,
            memory_peak: None,
            pids_peak: 0,
        };
        (watch.used_at_start, _, watch.inodes_in_use) = watch.file_system();
        Ok(watch)
    }

    /// One look. Says which limit was passed, if any.
    pub fn look(&mut self) -> Option<Stop> {
        let wanted = Wanted {
            cpu: self.limits.cpu_ms.is_some() && self.cpu_counter.is_none(),
            memory: self.memory_watched,
        };
        let processes = look_at_processes(wanted);
        self.pids_peak = self.pids_peak.max(processes.count);
        if self.memory_watched {
            self.memory_peak = self.memory_peak.max(Some(processes.memory_bytes));
            if processes.memory_bytes > self.limits.memory_bytes {
                return Some(Stop::Memory);
            }
        }
        if self
            .limits
            .cpu_ms
            .is_some_and(|most| self.cpu_ms(processes) > most)
        {
            return Some(Stop::CpuTime);
        }
        self.look_at_disk(processes)
    }

    pub fn cpu_ms_now(&self) -> u64 {
        self.cpu_ms(look_at_processes(Wanted {
            cpu: self.cpu_counter.is_none(),
            memory: false,
        }))
    }

    /// CPU time of the whole run: the cgroup's counter where there is one.
    fn cpu_ms(&self, processes: Processes) -> u64 {
        self.cpu_counter
            .as_ref()
            .and_then(|(fd, unit)| unit.read_us(fd.as_fd()).ok())
            .map(|us| us / 1000)
            .unwrap_or(processes.cpu_ms)
    }

    fn look_at_disk(&mut self, processes: Processes) -> Option<Stop> {
        if self.workspace_kind == WorkspaceKind::Memory {
            // The tmpfs refuses what is too much; here it is only noted.
            let (bytes, files, _) = self.file_system();
            self.disk_bytes_peak = self.disk_bytes_peak.max(bytes);
            self.files_peak = self.files_peak.max(files);
            return None;
        }
        let since = self.measured_at.elapsed();
        let grown = self.file_system().2.saturating_sub(self.inodes_in_use);
        let near =
            processes.written_bytes > self.limits.disk_bytes || grown > self.limits.files / 8;
        let due = since >= MEASURE_AT_LEAST || near;
        if !due || since < self.measuring_took * MEASURE_SHARE {
            return None;
        }
        self.measure(processes)
    }

    fn measure(&mut self, processes: Processes) -> Option<Stop> {
        let start = Instant::now();
        let measured = self.measure_tree(processes);
        self.measuring_took = start.elapsed();
        self.measured_at = Instant::now();
        self.inodes_in_use = self.file_system().2;
        self.disk_bytes_peak = self.disk_bytes_peak.max(measured.bytes);
        self.files_peak = self.files_peak.max(measured.files);
        if measured.bytes > self.limits.disk_bytes {
            return Some(Stop::Disk);
        }
        (measured.files > self.limits.files).then_some(Stop::Files)
    }

    /// At the end, when nothing lives: what is there.
    pub fn measure_at_end(&mut self) {
        match self.workspace_kind {
            WorkspaceKind::Memory => drop(self.look_at_disk(Processes::default())),
            WorkspaceKind::Disk => drop(self.measure(Processes::default())),
        }
    }

    fn measure_tree(&self, processes: Processes) -> Measured {
        let mut measured = Measured::default();
        let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat(&self.workspace, ".", open, Mode::empty()) {
            Ok(top) => measured.directory(top, self.device, DEPTH_MAX, self.limits.files),
            Err(_) => measured.unmeasured = true,
        }
        if processes.count > 0 {
            self.measure_unlinked(&mut measured);
        }
        if measured.unmeasured {
            let grown = self.file_system().0.saturating_sub(self.used_at_start);
            measured.bytes = measured.bytes.max(processes.written_bytes).max(grown);
        }
        measured
    }

    /// Files without a name that some process still holds.
    fn measure_unlinked(&self, measured: &mut Measured) {
        for pid in pids() {
            let Ok(dir) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
                // Gone meanwhile; or not to be looked into, which no process of the run can bring about.
                continue;
            };
            for entry in dir.flatten() {
                let Ok(stat) = rustix::fs::stat(entry.path()) else {
                    continue;
                };
                let kind = FileType::from_raw_mode(stat.st_mode);
                if kind == FileType::RegularFile && stat.st_dev == self.device && stat.st_nlink == 0
                {
                    measured.file(&stat);
                }
                if kind == FileType::Socket && descriptors_in_flight(pid, &entry.file_name()) {
                    measured.unmeasured = true;
                }
            }
            if maps_deleted_file(pid, measured) {
                measured.unmeasured = true;
            }
        }
    }

    /// Bytes and inodes in use on the file system that holds the workspace; the inodes twice, for callers that
    /// mean the whole file system.
    fn file_system(&self) -> (u64, u64, u64) {
        match rustix::fs::fstatvfs(&self.workspace) {
            Ok(s) => {
                let inodes = s.f_files.saturating_sub(s.f_ffree);
                (
                    s.f_blocks.saturating_sub(s.f_bfree) * s.f_frsize,
                    inodes,
                    inodes,
                )
            }
            Err(_) => (0, 0, 0),
        }
    }
}

impl Measured {
    fn file(&mut self, stat: &rustix::fs::Stat) {
        if stat.st_nlink == 1 || self.seen.insert(stat.st_ino) {
            self.bytes += stat.st_blocks as u64 * 512;
        }
    }

    fn directory(&mut self, dir: OwnedFd, device: u64, depth: usize, files_max: u64) {
        let mut space = Vec::with_capacity(32 * 1024);
        let mut below = Vec::new();
        let mut entries = RawDir::new(&dir, space.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let Ok(entry) = entry else {
                self.unmeasured = true;
                break;
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let Ok(stat) = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            self.files += 1;
            self.file(&stat);
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                below.push(name.to_owned());
            }
            // Enough to know that the limit is passed.
            if self.files > files_max.saturating_mul(2) {
                return;
            }
        }
        for name in below {
            let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            match rustix::fs::openat(&dir, name, open, Mode::empty()) {
                // data/ and docs/ are mounts of other people's files.
                Ok(child) if rustix::fs::fstat(&child).is_ok_and(|s| s.st_dev != device) => {}
                Ok(child) if depth > 0 => self.directory(child, device, depth - 1, files_max),
                Ok(_) | Err(rustix::io::Errno::ACCESS) => self.unmeasured = true,
                Err(_) => {}
            }
            if self.files > files_max.saturating_mul(2) {
                return;
            }
        }
    }
}

fn pids() -> impl Iterator<Item = u32> {
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// What to read of each process: a thousand of them are looked at ten times a second.
#[derive(Clone, Copy)]
struct Wanted {
    cpu: bool,
    memory: bool,
}

fn look_at_processes(wanted: Wanted) -> Processes {
    let mut sum = Processes::default();
    let mut shared = 0;
    let own = std::process::id();
    for pid in pids() {
        // Init itself counts too: what it reaped is credited to it.
        sum.written_bytes += read_written(pid).unwrap_or(0);
        if wanted.cpu {
            sum.cpu_ms += read_cpu_ms(pid).unwrap_or(0);
        }
        if pid != own {
            sum.count += 1;
            if wanted.memory {
                let (private, mapped) = read_memory(pid).unwrap_or((0, 0));
                sum.memory_bytes += private;
                shared += mapped;
            }
        }
    }
    if wanted.memory {
        sum.memory_bytes += shared.max(shm_bytes());
    }
    sum
}

fn read_written(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    let field = |name: &str| -> u64 {
        let line = text.lines().find_map(|l| l.strip_prefix(name));
        line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    };
    Some(field("write_bytes:").saturating_sub(field("cancelled_write_bytes:")))
}

/// User and system time of a process and of the children it waited for.
fn read_cpu_ms(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the fields follow its last parenthesis.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let ticks: u64 = fields
        .get(11..15)?
        .iter()
        .filter_map(|f| f.parse::<u64>().ok())
        .sum();
    Some(ticks * 1000 / rustix::param::clock_ticks_per_second().max(1))
}

/// Memory of one process: what is its own and in swap, and what it maps of shared memory. Proportional
/// shares, so that a forked pool is not counted many times over.
fn read_memory(pid: u32) -> Option<(u64, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let field = |name: &str| -> u64 {
        let line = text.lines().find_map(|l| l.strip_prefix(name));
        line.and_then(|n| n.trim().strip_suffix("kB")?.trim().parse().ok())
            .unwrap_or(0)
    };
    let own = field("Pss_Anon:") + field("SwapPss:");
    Some((own * 1024, field("Pss_Shmem:") * 1024))
}

/// What lies in the run's own /dev/shm, mapped or not.
fn shm_bytes() -> u64 {
    let stat = rustix::fs::statvfs("/dev/shm");
    stat.map_or(0, |s| s.f_blocks.saturating_sub(s.f_bfree) * s.f_frsize)
}

/// Whether descriptors wait in this socket's queue: they may be files that nothing else shows.
fn descriptors_in_flight(pid: u32, fd: &std::ffi::OsStr) -> bool {
    let path = format!("/proc/{pid}/fdinfo/{}", fd.to_string_lossy());
    std::fs::read_to_string(path).is_ok_and(|text| {
        text.lines()
            .find_map(|l| l.strip_prefix("scm_fds:"))
            .is_some_and(|n| n.trim() != "0")
    })
}

/// Whether a process maps a deleted file that no descriptor shows: its size cannot be asked for.
fn maps_deleted_file(pid: u32, measured: &Measured) -> bool {
    let Ok(maps) = std::fs::read_to_string(format!("/proc/{pid}/maps")) else {
        return false;
    };
    maps.lines()
        .filter(|line| line.ends_with(" (deleted)"))
        .any(|line| {
            let mut fields = line.split_ascii_whitespace().skip(3);
            let (device, inode) = (fields.next(), fields.next());
            // Minor devices of memory files have major 0; their pages are memory, not disk.
            let on_disk = device.is_some_and(|d| !d.starts_with("00:"));
            let inode = inode.and_then(|i| i.parse::<u64>().ok());
            on_disk && inode.is_some_and(|i| !measured.seen.contains(&i))
        })
}
