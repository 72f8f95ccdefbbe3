//! A census of the run's processes: their number, their CPU time and their memory.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{
    MAPS_BYTES_MAX, PauseVerdict, ProcessSet, ScanResult, UnexplainedGrowth,
    has_descriptors_in_flight,
};
use super::{field, for_each_open_file, other_pids, pause, pids, queues, read_first};
use crate::sys;
use crate::sys::procfs::{ProcessStat, SMALL_FILE_BYTES, read};

/// How much is read of a table of the run's sockets or shared memory segments.
const TABLE_BYTES_MAX: usize = 8 << 20;
/// How often the socket tables are read.
const SOCKETS_INTERVAL: Duration = Duration::from_secs(1);
/// For how many passes in a row a process may be unreadable. A process is unreadable for a moment while it executes
/// another program; one that stays unreadable may hold any amount of memory.
const HIDDEN_PASSES_MAX: u32 = 20;
/// How often the data in pipes and sockets is measured.
const QUEUES_INTERVAL: Duration = Duration::from_millis(300);
/// For how many passes in a row descriptors may be in flight while memory is short. For a moment they are ordinary.
const IN_FLIGHT_PASSES_MAX: u32 = 5;
/// How many processes are remembered by their CPU time before these times are summed up.
const PROCESS_TIMES_MAX: usize = 50_000;

/// What to read of each process. Reading less matters: there may be a thousand processes, and there are ten passes a
/// second.
#[derive(Clone, Copy, Default)]
pub struct CensusRequest {
    pub cpu: bool,
    /// Whether to count threads rather than processes.
    pub tasks: bool,
    /// The memory limit, if the watch enforces it.
    pub memory: Option<u64>,
    /// Bytes of the run's files that are in memory, because the workspace is in a tmpfs.
    pub files_in_memory: u64,
}

/// Memory of the whole host that processes can hold without showing it in /proc.
#[derive(Clone, Copy)]
struct HostMemory {
    shared: u64,
    unaccounted: u64,
}

impl HostMemory {
    fn now() -> Self {
        let meminfo = read("/proc/meminfo", SMALL_FILE_BYTES).unwrap_or_default();
        HostMemory {
            shared: field(&meminfo, "Shmem:") * 1024,
            unaccounted: queues::unaccounted_memory(&meminfo),
        }
    }
}

/// The results of the last census, and what is remembered between two of them.
pub struct ProcessCensus {
    process_set: ProcessSet,
    pub count: u64,
    /// The threads of all processes. A limit on processes counts threads.
    pub tasks: u64,
    pub cpu_ms: u64,
    pub memory_bytes: u64,
    /// For how many passes in a row the descriptors of some process could not be read.
    hidden_passes: u32,
    /// For how many passes in a row descriptors were in flight over a socket while memory was short.
    in_flight_passes: u32,
    at_start: Option<HostMemory>,
    /// How much memory the data in pipes and sockets can keep, and when that was measured.
    queues: Option<(u64, Instant)>,
    /// The growth of the host's shared memory beyond what was measured of the run.
    unexplained: Option<UnexplainedGrowth>,
    /// The bytes in socket buffers, and when they were measured.
    sockets: Option<(u64, Instant)>,
    /// The CPU time in milliseconds of each process, by pid and start time.
    own_time: HashMap<(u32, u64), u64>,
    /// The sum of the CPU times that were removed from `own_time`.
    summed_up_ms: u64,
}

impl ProcessCensus {
    pub fn new(process_set: ProcessSet) -> Self {
        ProcessCensus {
            process_set,
            count: 0,
            tasks: 0,
            cpu_ms: 0,
            memory_bytes: 0,
            hidden_passes: 0,
            in_flight_passes: 0,
            at_start: None,
            queues: None,
            unexplained: None,
            sockets: None,
            own_time: HashMap::new(),
            summed_up_ms: 0,
        }
    }

    /// Whether a process stays unreadable. A memory file that is open but not mapped shows only among descriptors, so a
    /// process whose descriptors cannot be read may hold any amount of memory.
    pub fn hides_memory(&self) -> bool {
        self.hidden_passes > HIDDEN_PASSES_MAX
    }

    /// Takes a census. Asks before each process whether to continue; if not, keeps the previous memory and CPU time.
    pub fn take(&mut self, request: CensusRequest, should_continue: &mut dyn FnMut() -> bool) {
        (self.count, self.tasks) = (0, 0);
        let mut memory: Vec<(u32, u64, u64)> = Vec::new();
        let mut tree_ms = 0;
        let own = std::process::id();
        for pid in pids(self.process_set) {
            if !should_continue() {
                return;
            }
            if pid == own {
                // The time of this process, init, is not the run's. The time of the children it reaped is.
                let reaped = request.cpu.then(|| read_times(pid)).flatten();
                tree_ms += reaped.map_or(0, |times| times.children_ms);
                continue;
            }
            if request.cpu {
                tree_ms += self.note_time(pid).unwrap_or(0);
            }
            self.count += 1;
            self.tasks += if request.tasks { threads_of(pid) } else { 1 };
            if request.memory.is_some() {
                memory.extend(memory_entry(pid));
            }
        }
        if let Some(limit) = request.memory {
            let (shared, shown, scanned) = shared_memory(self.process_set, should_continue);
            let shared = shared + request.files_in_memory;
            self.memory_bytes = self.add_up(&memory, shared);
            let HostMemory {
                shared: grown,
                unaccounted,
            } = self.host_memory_grown();
            if self.memory_bytes.max(grown) > limit {
                // The cheap sum may pass the limit, so be exact: remove what was counted twice, and add what no process
                // shows.
                drop_shared_copies(&mut memory);
                let unseen = match scanned {
                    ScanResult::All | ScanResult::Hidden => {
                        mapped_shared_memory(self.process_set, &shown)
                    }
                    // Memory files may be among the descriptors that were not examined.
                    ScanResult::Many => u64::MAX,
                };
                let unseen = unseen.max(self.memory_in_flight());
                let shared = shared.max(unseen.min(grown));
                let shared = shared.max(self.memory_held_by_calls(grown, shared, limit));
                self.memory_bytes = self.add_up(&memory, shared);
                if self.memory_bytes > limit {
                    // Two processes that share their memory (vfork) count as two if the memory changed between the two
                    // reads. Read again and take the smaller sum.
                    let again = memory.iter().filter_map(|(pid, ..)| memory_entry(*pid));
                    let mut memory: Vec<_> = again.collect();
                    drop_shared_copies(&mut memory);
                    self.memory_bytes = self.memory_bytes.min(self.add_up(&memory, shared));
                }
            }
            if unaccounted > limit / 8 && self.memory_bytes + unaccounted > limit {
                self.memory_bytes += self.memory_in_queues(unaccounted);
            }
            self.hidden_passes = match scanned {
                ScanResult::All | ScanResult::Many => 0,
                ScanResult::Hidden => self.hidden_passes.saturating_add(1),
            };
        }
        if request.cpu {
            // The first sum misses children that were never waited for, the second one short-lived processes. Take the
            // larger.
            let seen_ms = self.summed_up_ms + self.own_time.values().sum::<u64>();
            self.cpu_ms = self.cpu_ms.max(tree_ms).max(seen_ms);
        }
    }

    /// An upper bound on memory files that are in flight over a socket, whose size cannot be read: 0 if descriptors are
    /// in flight only for a moment, which is ordinary, and else `u64::MAX`.
    fn memory_in_flight(&mut self) -> u64 {
        let mut found = false;
        for_each_open_file(self.process_set, &mut |pid, fd, stat| {
            let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
            found = kind == rustix::fs::FileType::Socket && has_descriptors_in_flight(pid, fd);
            !found
        });
        self.in_flight_passes = match found {
            true => self.in_flight_passes.saturating_add(1),
            false => 0,
        };
        match self.in_flight_passes > IN_FLIGHT_PASSES_MAX {
            true => u64::MAX,
            false => 0,
        }
    }

    /// The size of memory files that only a system call in progress holds (see `pause.rs`).
    fn memory_held_by_calls(&mut self, grown: u64, measured: u64, limit: u64) -> u64 {
        let unexplained = self
            .unexplained
            .get_or_insert_with(|| UnexplainedGrowth::new(0, limit / 8));
        if !unexplained.needs_pause(grown, measured) {
            return 0;
        }
        let paused = pause(self.process_set);
        let after = self.host_memory_grown().shared;
        let verdict = self
            .unexplained
            .as_mut()
            .map(|unexplained| unexplained.note_pause(grown, after, measured, paused.all_stopped));
        match verdict {
            Some(PauseVerdict::Hidden(bytes)) => bytes,
            Some(PauseVerdict::NotStopped) => grown,
            Some(PauseVerdict::Nothing) | None => 0,
        }
    }

    /// The memory of the run: private memory, socket buffers, and the larger of the shared memory that processes map
    /// and the `shared` memory that was found otherwise.
    fn add_up(&mut self, memory: &[(u32, u64, u64)], shared: u64) -> u64 {
        let private: u64 = memory.iter().map(|(_, private, _)| private).sum();
        let mapped: u64 = memory.iter().map(|(_, _, mapped)| mapped).sum();
        private + mapped.max(shared) + self.socket_bytes()
    }

    /// The program is about to run: what the host's memory holds now does not count against the run.
    pub fn begin(&mut self) {
        self.at_start = Some(HostMemory::now());
    }

    /// By how much the host's memory use has grown since the program started.
    fn host_memory_grown(&mut self) -> HostMemory {
        let now = HostMemory::now();
        let at_start = self.at_start.get_or_insert(now);
        // Other processes may have released memory that was in use at the start.
        at_start.unaccounted = at_start.unaccounted.min(now.unaccounted);
        HostMemory {
            shared: now.shared.saturating_sub(at_start.shared),
            unaccounted: now.unaccounted - at_start.unaccounted,
        }
    }

    /// How much of the host's unaccounted memory the data in the run's pipes and sockets can explain (see `queues.rs`).
    fn memory_in_queues(&mut self, unaccounted: u64) -> u64 {
        if self
            .queues
            .is_none_or(|(_, at)| at.elapsed() >= QUEUES_INTERVAL)
        {
            let pages = queues::queued_pages_at_most(self.process_set);
            // For a moment, descriptors in flight are ordinary.
            let in_flight = self.in_flight_passes > IN_FLIGHT_PASSES_MAX;
            let bytes = pages.unwrap_or(if in_flight { u64::MAX } else { 0 });
            self.queues = Some((bytes, Instant::now()));
        }
        self.queues.map_or(0, |(bytes, _)| bytes.min(unaccounted))
    }

    /// The bytes in socket buffers. Not read at every pass, because the kernel walks large tables for this.
    fn socket_bytes(&mut self) -> u64 {
        // Without a network namespace the tables are the host's. The run has no such sockets there, since seccomp
        // refuses them.
        if self.process_set == ProcessSet::Descendants {
            return 0;
        }
        if self
            .sockets
            .is_none_or(|(_, at)| at.elapsed() >= SOCKETS_INTERVAL)
        {
            self.sockets = Some((socket_buffers(), Instant::now()));
        }
        self.sockets.map_or(0, |(bytes, _)| bytes)
    }

    /// Records the CPU time of a process. Returns the sum of this time and the time of the children it waited for.
    fn note_time(&mut self, pid: u32) -> Option<u64> {
        let times = read_times(pid)?;
        if self.own_time.len() >= PROCESS_TIMES_MAX {
            self.summed_up_ms += self.own_time.drain().map(|(_, ms)| ms).sum::<u64>();
        }
        self.own_time.insert((pid, times.started), times.own_ms);
        Some(times.own_ms + times.children_ms)
    }
}

struct CpuTimes {
    started: u64,
    own_ms: u64,
    children_ms: u64,
}

fn read_times(pid: u32) -> Option<CpuTimes> {
    let stat = ProcessStat::of(pid)?;
    let number = |n: usize| stat.number::<u64>(n);
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let ms = |ticks: u64| ticks * 1000 / per_second;
    Some(CpuTimes {
        started: number(19)?,
        own_ms: ms(number(11)? + number(12)?),
        children_ms: ms(number(13)? + number(14)?),
    })
}

/// The memory of one process in bytes: its private memory with swap, and the shared memory that it maps. Both are
/// proportional shares (PSS), so that the memory of a forked pool is not counted several times.
fn read_memory(pid: u32) -> Option<(u64, u64)> {
    let status = read_first(pid, "status", SMALL_FILE_BYTES)?;
    let Some(text) = read_first(pid, "smaps_rollup", SMALL_FILE_BYTES) else {
        // The shares cannot be read. Count all of its resident memory as private.
        return Some((resident(&status), 0));
    };
    // Page tables are memory too, and can be the largest part.
    let own = field(&text, "Pss_Anon:") + field(&text, "SwapPss:") + field(&status, "VmPTE:");
    Some((own * 1024, field(&text, "Pss_Shmem:") * 1024))
}

/// A pid with its [`read_memory`].
fn memory_entry(pid: u32) -> Option<(u32, u64, u64)> {
    read_memory(pid).map(|(private, mapped)| (pid, private, mapped))
}

/// An upper bound on the memory of all processes of the run: memory that processes share counts for each of them. Reads
/// only files of /proc that never block on a process.
pub fn memory_at_most(process_set: ProcessSet) -> u64 {
    let statuses =
        other_pids(process_set).filter_map(|pid| read_first(pid, "status", SMALL_FILE_BYTES));
    statuses.map(|status| resident(&status)).sum()
}

fn resident(status: &str) -> u64 {
    let parts = ["RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:"];
    parts.iter().map(|name| field(status, name)).sum::<u64>() * 1024
}

/// Removes processes that share all their memory with another one, as between vfork and exec, so that it is not counted
/// twice.
fn drop_shared_copies(memory: &mut Vec<(u32, u64, u64)>) {
    memory.sort_by_key(|(_, private, mapped)| (*private, *mapped));
    memory.dedup_by(
        |(pid, private, mapped), (kept, kept_private, kept_mapped)| {
            let equal = private == kept_private && mapped == kept_mapped && *private > 0;
            if equal && !sys::share_memory(*pid, *kept).unwrap_or(false) {
                // They may have shared their memory when it was read, and one of them has executed another program
                // since. Read again.
                (*private, *mapped) = read_memory(*pid).unwrap_or_default();
                (*kept_private, *kept_mapped) = read_memory(*kept).unwrap_or_default();
                return false;
            }
            equal
        },
    );
}

/// How much shared memory the run's processes have mapped.
///
/// Pages of a shared mapping that a process has dropped (MADV_DONTNEED) stay in memory and are in no resident set. So
/// all that the run has mapped is charged to it, but no more than the growth of the host's shared memory; the caller
/// applies this bound. Returns `u64::MAX` for a mapped memory file that is not among `shown`, the inodes found by
/// descriptor: only a part may be mapped, and the file may have any size.
fn mapped_shared_memory(process_set: ProcessSet, shown: &HashSet<u64>) -> u64 {
    let mut left = MAPS_BYTES_MAX;
    let mut sizes: HashMap<u64, u64> = HashMap::new();
    for pid in other_pids(process_set) {
        let maps = read_first(pid, "maps", left).unwrap_or_default();
        left = left.saturating_sub(maps.len());
        for line in maps.lines() {
            if let Some((inode, bytes)) = shared_mapping(line) {
                if line.contains(" /memfd:") && !shown.contains(&inode) {
                    return u64::MAX;
                }
                *sizes.entry(inode).or_default() += bytes;
            }
        }
        if left == 0 {
            // There are more mappings than can be read, so all growth is charged to the run.
            return u64::MAX;
        }
    }
    sizes.values().sum()
}

/// The inode and the length of a shared memory mapping, if this line of /proc/PID/maps is one.
fn shared_mapping(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let mut fields = fields.skip(3);
    let inode = fields.next()?.parse().ok()?;
    let name = fields.next()?;
    let memory_names = ["/dev/zero", "/memfd:", "/SYSV", "/dev/shm/"];
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    memory_names
        .iter()
        .any(|start| name.starts_with(start))
        .then(|| Some((inode, number(to)?.saturating_sub(number(from)?))))?
}

fn threads_of(pid: u32) -> u64 {
    let threads = ProcessStat::of(pid).and_then(|stat| stat.number(17));
    // A zombie keeps its pid until it is reaped, so it counts as one.
    threads.unwrap_or(1u64).max(1)
}

/// The shared memory of the run, mapped or not: its /dev/shm, SysV segments, and memory files that a descriptor shows.
/// Also returns the inodes of these files, and how far the scan of descriptors went.
fn shared_memory(
    process_set: ProcessSet,
    should_continue: &mut dyn FnMut() -> bool,
) -> (u64, HashSet<u64>, ScanResult) {
    let (mut files, mut seen, mut shown) = (0, HashSet::new(), HashSet::new());
    let scanned = for_each_open_file(process_set, &mut |pid, fd, stat| {
        let unlinked = stat.st_nlink == 0 && seen.insert((stat.st_dev, stat.st_ino));
        if unlinked && is_memory_file(pid, fd) {
            files += stat.st_blocks as u64 * 512;
            shown.insert(stat.st_ino);
        }
        should_continue()
    });
    if process_set == ProcessSet::Descendants {
        // Without namespaces the run has neither a /dev/shm nor SysV segments of its own.
        return (files, shown, scanned);
    }
    let shm = rustix::fs::statvfs("/dev/shm");
    let shm = shm.map_or(0, |s| s.f_blocks.saturating_sub(s.f_bfree) * s.f_frsize);
    let segments = read("/proc/sysvipc/shm", TABLE_BYTES_MAX).unwrap_or_default();
    let segment = |line: &str| -> u64 {
        let fields = line.split_ascii_whitespace().skip(14).take(2);
        fields.filter_map(|f| f.parse::<u64>().ok()).sum()
    };
    let segments: u64 = segments.lines().skip(1).map(segment).sum();
    (shm + segments + files, shown, scanned)
}

/// The bytes in the buffers of all TCP and UDP sockets of the run's network namespace.
fn socket_buffers() -> u64 {
    let queued = |line: &str| -> Option<u64> {
        // The fifth field is `tx_queue:rx_queue`, in hexadecimal.
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

/// Whether a descriptor, or `exe`, of a process is a memory file.
fn is_memory_file(pid: u32, link: &OsStr) -> bool {
    // A program can run from a memory file that is larger than what is mapped of it.
    let dir = match link == OsStr::new("exe") {
        true => format!("/proc/{pid}"),
        false => format!("/proc/{pid}/fd"),
    };
    let target = std::fs::read_link(Path::new(&dir).join(link));
    target.is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"))
}
