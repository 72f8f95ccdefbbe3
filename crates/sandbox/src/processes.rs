//! The run's processes as its own /proc tells of them: what each wrote, used and holds.
//!
//! Everything is read with a bound, and what cannot be read is said to be so: a process may make itself
//! unreadable, lose its first thread, or be gone after a moment.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Descriptors looked at in one pass. More cannot be looked at in the time between two looks.
const DESCRIPTORS_MAX: usize = 20_000;
/// Likewise the bytes of /proc/PID/maps.
const MAPS_BYTES_MAX: usize = 16 << 20;
/// The files of /proc that are a few lines long.
const SMALL: usize = 16 << 10;
/// Tables of the run's own sockets and segments.
const TABLE_BYTES_MAX: usize = 8 << 20;
const SOCKETS_EVERY: Duration = Duration::from_secs(1);
/// Ended processes remembered for their CPU time before they are summed up.
const REMEMBERED_MAX: usize = 50_000;

/// What to read of each process: a thousand of them are looked at ten times a second.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub cpu: bool,
    pub memory: bool,
}

/// What the last look at the processes gave.
#[derive(Default)]
pub struct Census {
    pub count: u64,
    pub written_bytes: u64,
    /// Some process would not be looked into.
    pub unreadable: bool,
    pub cpu_ms: u64,
    pub memory_bytes: u64,
    sockets: Option<(u64, Instant)>,
    own_time: HashMap<(u32, u64), u64>,
    forgotten_ms: u64,
}

impl Census {
    pub fn take(&mut self, wanted: Wanted) {
        (self.count, self.written_bytes, self.unreadable) = (0, 0, false);
        let (mut private, mut shared, mut tree_ms) = (0, 0, 0);
        let own = std::process::id();
        for pid in pids() {
            // Init itself counts too: what it reaped is credited to it.
            match read_written(pid) {
                Some(bytes) => self.written_bytes += bytes,
                None => self.unreadable |= lives(pid),
            }
            if pid == own {
                // Its own time is ours, not the run's; that of whom it reaped is the run's.
                let reaped = wanted.cpu.then(|| read_times(pid)).flatten();
                tree_ms += reaped.map_or(0, |times| times.children_ms);
                continue;
            }
            if wanted.cpu {
                tree_ms += self.note_time(pid).unwrap_or(0);
            }
            self.count += 1;
            if wanted.memory {
                let (its, mapped) = read_memory(pid).unwrap_or((0, 0));
                private += its;
                shared += mapped;
            }
        }
        if wanted.memory {
            self.memory_bytes = private + shared.max(shared_memory()) + self.socket_bytes();
        }
        if wanted.cpu {
            // Of children that nobody waited for only the second sum knows, of short-lived ones only the first.
            let seen_ms = self.forgotten_ms + self.own_time.values().sum::<u64>();
            self.cpu_ms = self.cpu_ms.max(tree_ms).max(seen_ms);
        }
    }

    /// What waits in sockets. The kernel walks through large tables for this, so not at every look.
    fn socket_bytes(&mut self) -> u64 {
        if self
            .sockets
            .is_none_or(|(_, at)| at.elapsed() >= SOCKETS_EVERY)
        {
            self.sockets = Some((socket_buffers(), Instant::now()));
        }
        self.sockets.map_or(0, |(bytes, _)| bytes)
    }

    /// Notes the process's own time; returns that and the time of the children it waited for.
    fn note_time(&mut self, pid: u32) -> Option<u64> {
        let times = read_times(pid)?;
        if self.own_time.len() >= REMEMBERED_MAX {
            self.forgotten_ms += self.own_time.drain().map(|(_, ms)| ms).sum::<u64>();
        }
        self.own_time.insert((pid, times.started), times.own_ms);
        Some(times.own_ms + times.children_ms)
    }
}

pub fn pids() -> impl Iterator<Item = u32> {
    numbers_in(Path::new("/proc"))
}

fn numbers_in(dir: &Path) -> impl Iterator<Item = u32> + use<> {
    std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// Whether a process is more than a corpse waiting to be reaped.
fn lives(pid: u32) -> bool {
    let stat = read(format!("/proc/{pid}/stat"), SMALL).unwrap_or_default();
    let Some((_, rest)) = stat.rsplit_once(')') else {
        return false;
    };
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let threads = fields.get(17).and_then(|n| n.parse::<u32>().ok());
    !matches!(fields.first(), Some(&"Z" | &"X")) || threads.is_some_and(|n| n > 1)
}

/// The directories in which a process's files can be read: its own or, where its first thread has ended, those
/// of its threads. Threads share their descriptors: seccomp refuses to make one that does not.
fn places(pid: u32) -> impl Iterator<Item = PathBuf> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let threads = process.join("task");
    let of_threads = numbers_in(&threads).map(move |tid| threads.join(tid.to_string()));
    [process].into_iter().chain(of_threads)
}

/// A file of /proc, and no more of it than was asked for: the program has a hand in how long some of them are.
fn read(path: impl AsRef<Path>, bytes_max: usize) -> Option<String> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).ok()?;
    file.take(bytes_max as u64).read_to_end(&mut bytes).ok()?;
    // A cut may go through a character.
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn read_first(pid: u32, name: &str, bytes_max: usize) -> Option<String> {
    let texts = places(pid).filter_map(|dir| read(dir.join(name), bytes_max));
    texts.into_iter().find(|text| !text.is_empty())
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(name));
    let number = line.map(|n| n.trim().trim_end_matches("kB").trim_end());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}

fn read_written(pid: u32) -> Option<u64> {
    let text = read(format!("/proc/{pid}/io"), SMALL)?;
    let cancelled = field(&text, "cancelled_write_bytes:");
    Some(field(&text, "write_bytes:").saturating_sub(cancelled))
}

struct CpuTimes {
    started: u64,
    own_ms: u64,
    children_ms: u64,
}

fn read_times(pid: u32) -> Option<CpuTimes> {
    let stat = read(format!("/proc/{pid}/stat"), SMALL)?;
    // The name in parentheses may hold anything; the fields follow its last parenthesis.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let number = |n: usize| fields.get(n).and_then(|f| f.parse::<u64>().ok());
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let ms = |ticks: u64| ticks * 1000 / per_second;
    Some(CpuTimes {
        started: number(19)?,
        own_ms: ms(number(11)? + number(12)?),
        children_ms: ms(number(13)? + number(14)?),
    })
}

/// Memory of one process: what is its own and in swap, and what it maps of shared memory. Proportional
/// shares, so that a forked pool is not counted many times over.
fn read_memory(pid: u32) -> Option<(u64, u64)> {
    let text = read_first(pid, "smaps_rollup", SMALL)?;
    let status = read(format!("/proc/{pid}/status"), SMALL).unwrap_or_default();
    // Page tables are memory too, and can be most of it.
    let own = field(&text, "Pss_Anon:") + field(&text, "SwapPss:") + field(&status, "VmPTE:");
    Some((own * 1024, field(&text, "Pss_Shmem:") * 1024))
}

/// Shared memory of the run, mapped or not: its /dev/shm, SysV segments, and memory files.
fn shared_memory() -> u64 {
    let shm = rustix::fs::statvfs("/dev/shm");
    let shm = shm.map_or(0, |s| s.f_blocks.saturating_sub(s.f_bfree) * s.f_frsize);
    let segments = read("/proc/sysvipc/shm", TABLE_BYTES_MAX).unwrap_or_default();
    let segment = |line: &str| -> u64 {
        let fields = line.split_ascii_whitespace().skip(14).take(2);
        fields.filter_map(|f| f.parse::<u64>().ok()).sum()
    };
    let segments: u64 = segments.lines().skip(1).map(segment).sum();
    let (mut files, mut seen) = (0, HashSet::new());
    let _within_bounds = open_files(&mut |pid, fd, stat| {
        let unlinked = stat.st_nlink == 0 && seen.insert((stat.st_dev, stat.st_ino));
        if unlinked && is_memory_file(pid, fd) {
            files += stat.st_blocks as u64 * 512;
        }
    });
    shm + segments + files
}

/// Bytes waiting in the sockets of the run's own network.
fn socket_buffers() -> u64 {
    let queued = |line: &str| -> Option<u64> {
        // `tx_queue:rx_queue`, in hexadecimal.
        let (sending, receiving) = line.split_ascii_whitespace().nth(4)?.split_once(':')?;
        let number = |hex| u64::from_str_radix(hex, 16).ok();
        Some(number(sending)? + number(receiving)?)
    };
    let tables = ["tcp", "tcp6", "udp", "udp6"].map(|name| format!("/proc/net/{name}"));
    let texts = tables.iter().filter_map(|path| read(path, TABLE_BYTES_MAX));
    texts
        .map(|text| text.lines().skip(1).filter_map(queued).sum::<u64>())
        .sum()
}

fn is_memory_file(pid: u32, fd: &OsStr) -> bool {
    let link = std::fs::read_link(Path::new(&format!("/proc/{pid}/fd")).join(fd));
    link.is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"))
}

/// Calls `each` for every open descriptor of the run. False when some could not be looked at.
pub fn open_files(each: &mut dyn FnMut(u32, &OsStr, &rustix::fs::Stat)) -> bool {
    let mut left = DESCRIPTORS_MAX;
    let own = std::process::id();
    for pid in pids().filter(|pid| *pid != own) {
        let listing = places(pid).find_map(|dir| std::fs::read_dir(dir.join("fd")).ok());
        let Some(listing) = listing else {
            if lives(pid) {
                return false;
            }
            continue;
        };
        // A program that was deleted while it runs is held by no descriptor.
        for held in ["exe", "cwd"] {
            if let Ok(stat) = rustix::fs::stat(format!("/proc/{pid}/{held}")) {
                each(pid, OsStr::new(held), &stat);
            }
        }
        for entry in listing.flatten() {
            left -= 1;
            if left == 0 {
                return false;
            }
            if let Ok(stat) = rustix::fs::stat(entry.path()) {
                each(pid, &entry.file_name(), &stat);
            }
        }
    }
    true
}

/// Whether descriptors wait in this socket's queue: they may be files that nothing else shows.
pub fn descriptors_in_flight(pid: u32, fd: &OsStr) -> bool {
    let path = Path::new(&format!("/proc/{pid}/fdinfo")).join(fd);
    read(path, SMALL).is_some_and(|text| field(&text, "scm_fds:") > 0)
}

/// Whether some process maps a deleted file of the run's that no descriptor shows: its size cannot be asked for.
/// Also when there are more maps than can be read between two looks.
pub fn map_deleted_files(shown: &HashSet<u64>, workspace: &str) -> bool {
    let mut left = MAPS_BYTES_MAX;
    let own = std::process::id();
    pids().filter(|pid| *pid != own).any(|pid| {
        let maps = read_first(pid, "maps", left).unwrap_or_default();
        left = left.saturating_sub(maps.len());
        left == 0 || has_deleted_file(&maps, shown, workspace)
    })
}

fn has_deleted_file(maps: &str, shown: &HashSet<u64>, workspace: &str) -> bool {
    let deleted = maps.lines().filter(|line| line.ends_with(" (deleted)"));
    deleted.into_iter().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(4);
        let inode = fields.next().and_then(|i| i.parse::<u64>().ok());
        let name = fields.next().unwrap_or_default();
        // Elsewhere it is memory, or a library of the host's that was replaced meanwhile.
        let own = name.starts_with("/tmp/") || name.starts_with(workspace);
        own && inode.is_some_and(|i| !shown.contains(&i))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_deleted_files_on_disk_that_no_descriptor_shows_count() {
        let none = HashSet::new();
        let line = |name: &str| {
            format!("7f0000000000-7f0000001000 rw-s 00000000 fe:00 4711 {name} (deleted)\n")
        };
        let found = |name: &str, shown| has_deleted_file(&line(name), shown, "/scratch/w");
        assert!(found("/tmp/x", &none) && found("/scratch/w/x", &none));
        assert!(found("/tmp/a name with blanks", &none));
        let shown = HashSet::from([4711]);
        assert!(!found("/tmp/x", &shown));
        assert!(!found("/memfd:x", &none) && !found("/usr/lib/x.so", &none));
        let alive = "7f00-7f01 r-xp 00000000 fe:00 12 /tmp/x\n";
        assert!(!has_deleted_file(alive, &none, "/scratch/w"));
    }

    #[test]
    fn this_process_is_found_alive_with_its_times() {
        let own = std::process::id();
        assert!(lives(own) && pids().any(|pid| pid == own));
        assert!(read_times(own).is_some_and(|t| t.started > 0));
        assert!(read_memory(own).is_some_and(|(private, _)| private > 0));
    }
}
