//! What the run's processes use: how many they are, their CPU time, their memory.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{
    MAPS_BYTES_MAX, PauseVerdict, ProcessSet, ScanResult, UnexplainedGrowth, descriptors_in_flight,
};
use super::{field, open_files, pause, pids, queues, read_first};
use crate::sys;
use crate::sys::procfs::{SMALL_FILE_BYTES, read};

/// Tables of the run's own sockets and segments.
const TABLE_BYTES_MAX: usize = 8 << 20;
const SOCKETS_EVERY: Duration = Duration::from_secs(1);
/// A process may be hidden while it starts another program; one that stays so answers for the most there is.
const HIDDEN_LOOKS_MAX: u32 = 20;
const QUEUES_EVERY: Duration = Duration::from_millis(300);
const IN_FLIGHT_LOOKS_MAX: u32 = 5;
/// Ended processes remembered for their CPU time before they are summed up.
const REMEMBERED_MAX: usize = 50_000;

/// What to read of each process: a thousand of them are looked at ten times a second.
#[derive(Clone, Copy)]
pub struct CensusRequest {
    pub cpu: bool,
    /// Threads, rather than one for each process.
    pub tasks: bool,
    /// The limit that is held by watching, where it is.
    pub memory: Option<u64>,
    /// Bytes of the run's files that are kept in memory: a workspace in a tmpfs.
    pub files_in_memory: u64,
}

/// What the host's memory holds that no process need show.
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

/// What the last look at the processes gave.
pub struct ProcessCensus {
    process_set: ProcessSet,
    pub count: u64,
    /// Threads of all processes: what a limit on processes counts.
    pub tasks: u64,
    pub cpu_ms: u64,
    pub memory_bytes: u64,
    /// For how many looks in a row some process would not have its descriptors looked at.
    hidden_looks: u32,
    /// For how many looks in a row descriptors have waited in a socket while it mattered.
    in_flight_looks: u32,
    at_start: Option<HostMemory>,
    /// What waits in pipes and sockets can keep so much in memory.
    queues: Option<(u64, Instant)>,
    /// What the host has come to hold as shared memory beyond what was measured.
    unexplained: Option<UnexplainedGrowth>,
    sockets: Option<(u64, Instant)>,
    own_time: HashMap<(u32, u64), u64>,
    forgotten_ms: u64,
}

impl ProcessCensus {
    pub fn new(process_set: ProcessSet) -> Self {
        ProcessCensus {
            process_set,
            count: 0,
            tasks: 0,
            cpu_ms: 0,
            memory_bytes: 0,
            hidden_looks: 0,
            in_flight_looks: 0,
            at_start: None,
            queues: None,
            unexplained: None,
            sockets: None,
            own_time: HashMap::new(),
            forgotten_ms: 0,
        }
    }

    /// Whether somebody hides from us for good. Memory files that are held and not mapped are seen in no other way than
    /// among descriptors, so who shows none may have taken any amount.
    pub fn hides_memory(&self) -> bool {
        self.hidden_looks > HIDDEN_LOOKS_MAX
    }

    /// Asks before each process whether to go on, and leaves off with what it had otherwise.
    pub fn take(&mut self, wanted: CensusRequest, go_on: &mut dyn FnMut() -> bool) {
        (self.count, self.tasks) = (0, 0);
        let mut memory: Vec<(u32, u64, u64)> = Vec::new();
        let mut tree_ms = 0;
        let own = std::process::id();
        for pid in pids(self.process_set) {
            if !go_on() {
                return;
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
            self.tasks += if wanted.tasks { threads_of(pid) } else { 1 };
            if wanted.memory.is_some() {
                memory.extend(read_memory(pid).map(|(its, mapped)| (pid, its, mapped)));
            }
        }
        if let Some(limit) = wanted.memory {
            let (apart, shown, looked) = shared_memory(self.process_set, go_on);
            let apart = apart + wanted.files_in_memory;
            self.memory_bytes = self.add_up(&memory, apart);
            let HostMemory {
                shared: grown,
                unaccounted,
            } = self.host_memory_grown();
            if self.memory_bytes.max(grown) > limit {
                // Now it matters to the byte: what was counted twice, and what no process shows.
                drop_shared_copies(&mut memory);
                let unseen = match looked {
                    ScanResult::All | ScanResult::Hidden => {
                        mapped_shared_memory(self.process_set, &shown)
                    }
                    // Memory files may be among the descriptors that were not looked at.
                    ScanResult::Many => u64::MAX,
                };
                let unseen = unseen.max(self.memory_in_flight());
                let apart = apart.max(unseen.min(grown));
                let apart = apart.max(self.memory_held_by_calls(grown, apart, limit));
                self.memory_bytes = self.add_up(&memory, apart);
                if self.memory_bytes > limit {
                    // Two that were one, and changed between our looks at either, were counted as two. Seen twice, it is so.
                    let again = |(pid, ..): &(u32, u64, u64)| {
                        read_memory(*pid).map(|(its, mapped)| (*pid, its, mapped))
                    };
                    let mut memory: Vec<_> = memory.iter().filter_map(again).collect();
                    drop_shared_copies(&mut memory);
                    self.memory_bytes = self.memory_bytes.min(self.add_up(&memory, apart));
                }
            }
            if unaccounted > limit / 8 && self.memory_bytes + unaccounted > limit {
                self.memory_bytes += self.memory_in_queues(unaccounted);
            }
            self.hidden_looks = match looked {
                ScanResult::All | ScanResult::Many => 0,
                ScanResult::Hidden => self.hidden_looks.saturating_add(1),
            };
        }
        if wanted.cpu {
            // Of children that nobody waited for only the second sum knows, of short-lived ones only the first.
            let seen_ms = self.forgotten_ms + self.own_time.values().sum::<u64>();
            self.cpu_ms = self.cpu_ms.max(tree_ms).max(seen_ms);
        }
    }

    /// Memory files may be in flight over a socket, where nobody sees how large they are. For a moment that is ordinary.
    fn memory_in_flight(&mut self) -> u64 {
        let mut found = false;
        open_files(self.process_set, &mut |pid, fd, stat| {
            let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
            found = kind == rustix::fs::FileType::Socket && descriptors_in_flight(pid, fd);
            !found
        });
        self.in_flight_looks = match found {
            true => self.in_flight_looks.saturating_add(1),
            false => 0,
        };
        match self.in_flight_looks > IN_FLIGHT_LOOKS_MAX {
            true => u64::MAX,
            false => 0,
        }
    }

    /// Memory files that only a system call holds (see `pause.rs`).
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
            .map(|unexplained| unexplained.note_pause(grown, after, measured, paused.answered));
        match verdict {
            Some(PauseVerdict::Hidden(bytes)) => bytes,
            Some(PauseVerdict::Unanswered) => grown,
            Some(PauseVerdict::Nothing) | None => 0,
        }
    }

    fn add_up(&mut self, memory: &[(u32, u64, u64)], apart: u64) -> u64 {
        let private: u64 = memory.iter().map(|(_, its, _)| its).sum();
        let shared: u64 = memory.iter().map(|(_, _, mapped)| mapped).sum();
        private + shared.max(apart) + self.socket_bytes()
    }

    /// The program is about to run: what the host's memory holds now is not the run's.
    pub fn begin(&mut self) {
        self.at_start = Some(HostMemory::now());
    }

    /// By how much the host's memory has grown since the program began.
    fn host_memory_grown(&mut self) -> HostMemory {
        let now = HostMemory::now();
        let at_start = self.at_start.get_or_insert(now);
        // Others may give back what was there at the start.
        at_start.unaccounted = at_start.unaccounted.min(now.unaccounted);
        HostMemory {
            shared: now.shared.saturating_sub(at_start.shared),
            unaccounted: now.unaccounted - at_start.unaccounted,
        }
    }

    /// How much of the host's memory that nothing accounts for can be in the run's pipes and sockets.
    fn memory_in_queues(&mut self, unaccounted: u64) -> u64 {
        if self
            .queues
            .is_none_or(|(_, at)| at.elapsed() >= QUEUES_EVERY)
        {
            let pages = queues::queued_pages_at_most(self.process_set);
            // Descriptors in flight are ordinary for a moment.
            let in_flight = self.in_flight_looks > IN_FLIGHT_LOOKS_MAX;
            let known = pages.unwrap_or(if in_flight { u64::MAX } else { 0 });
            self.queues = Some((known, Instant::now()));
        }
        self.queues.map_or(0, |(pages, _)| pages.min(unaccounted))
    }

    /// What waits in sockets. The kernel walks through large tables for this, so not at every look.
    fn socket_bytes(&mut self) -> u64 {
        // Without a network namespace there are no such sockets, and the tables are the host's.
        if self.process_set == ProcessSet::Descendants {
            return 0;
        }
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

struct CpuTimes {
    started: u64,
    own_ms: u64,
    children_ms: u64,
}

fn read_times(pid: u32) -> Option<CpuTimes> {
    let stat = read(format!("/proc/{pid}/stat"), SMALL_FILE_BYTES)?;
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
    let status = read_first(pid, "status", SMALL_FILE_BYTES)?;
    let Some(text) = read_first(pid, "smaps_rollup", SMALL_FILE_BYTES) else {
        // It would not be looked into: all that it has in memory is then its own, shared or not.
        return Some((resident(&status), 0));
    };
    // Page tables are memory too, and can be most of it.
    let own = field(&text, "Pss_Anon:") + field(&text, "SwapPss:") + field(&status, "VmPTE:");
    Some((own * 1024, field(&text, "Pss_Shmem:") * 1024))
}

/// No less than the memory of all processes of the run, from files of /proc that are read without waiting for a process:
/// memory that is shared among them is counted for each.
pub fn memory_at_most(process_set: ProcessSet) -> u64 {
    let own = std::process::id();
    let others = pids(process_set).into_iter().filter(|pid| *pid != own);
    let statuses = others.filter_map(|pid| read_first(pid, "status", SMALL_FILE_BYTES));
    statuses.map(|status| resident(&status)).sum()
}

fn resident(status: &str) -> u64 {
    let parts = ["RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:"];
    parts.iter().map(|name| field(status, name)).sum::<u64>() * 1024
}

/// Between vfork and exec two processes are one in memory, and would be counted as two.
fn drop_shared_copies(memory: &mut Vec<(u32, u64, u64)>) {
    memory.sort_by_key(|(_, its, mapped)| (*its, *mapped));
    memory.dedup_by(|(pid, its, mapped), (kept, kept_its, kept_mapped)| {
        let alike = its == kept_its && mapped == kept_mapped && *its > 0;
        if alike && !sys::share_memory(*pid, *kept).unwrap_or(false) {
            // They may have been one when they were looked at: then one of them has become another program since.
            (*its, *mapped) = read_memory(*pid).unwrap_or_default();
            (*kept_its, *kept_mapped) = read_memory(*kept).unwrap_or_default();
            return false;
        }
        alike
    });
}

/// How much the run's processes map of shared memory. Pages of such a mapping that were let go of (MADV_DONTNEED) stay in
/// memory and are in nobody's resident set: the run answers for as much as it has mapped, and for no more than
/// there has come to be on the host. A memory file of which only a part is mapped, and that no descriptor shows, may be of
/// any size.
fn mapped_shared_memory(process_set: ProcessSet, shown: &HashSet<u64>) -> u64 {
    let mut left = MAPS_BYTES_MAX;
    let mut sizes: HashMap<u64, u64> = HashMap::new();
    let own = std::process::id();
    for pid in pids(process_set).into_iter().filter(|pid| *pid != own) {
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
            // More than can be read: it answers for all there is.
            return u64::MAX;
        }
    }
    sizes.values().sum()
}

fn shared_mapping(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let mut fields = fields.skip(3);
    let inode = fields.next()?.parse().ok()?;
    let name = fields.next()?;
    let of_memory = ["/dev/zero", "/memfd:", "/SYSV", "/dev/shm/"];
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    of_memory
        .iter()
        .any(|start| name.starts_with(start))
        .then(|| Some((inode, number(to)?.saturating_sub(number(from)?))))?
}

fn threads_of(pid: u32) -> u64 {
    let stat = read(format!("/proc/{pid}/stat"), SMALL_FILE_BYTES).unwrap_or_default();
    let fields = stat.rsplit_once(')').map(|(_, rest)| rest);
    let threads = fields.and_then(|rest| rest.split_ascii_whitespace().nth(17)?.parse().ok());
    // A corpse keeps its number until it is reaped.
    threads.unwrap_or(1u64).max(1)
}

/// Shared memory of the run, mapped or not: its /dev/shm, SysV segments, and memory files. Also the inodes of those files.
fn shared_memory(
    process_set: ProcessSet,
    go_on: &mut dyn FnMut() -> bool,
) -> (u64, HashSet<u64>, ScanResult) {
    let (mut files, mut seen, mut shown) = (0, HashSet::new(), HashSet::new());
    let looked = open_files(process_set, &mut |pid, fd, stat| {
        let unlinked = stat.st_nlink == 0 && seen.insert((stat.st_dev, stat.st_ino));
        if unlinked && is_memory_file(pid, fd) {
            files += stat.st_blocks as u64 * 512;
            shown.insert(stat.st_ino);
        }
        go_on()
    });
    if process_set == ProcessSet::Descendants {
        // Neither a /dev/shm nor segments of its own.
        return (files, shown, looked);
    }
    let shm = rustix::fs::statvfs("/dev/shm");
    let shm = shm.map_or(0, |s| s.f_blocks.saturating_sub(s.f_bfree) * s.f_frsize);
    let segments = read("/proc/sysvipc/shm", TABLE_BYTES_MAX).unwrap_or_default();
    let segment = |line: &str| -> u64 {
        let fields = line.split_ascii_whitespace().skip(14).take(2);
        fields.filter_map(|f| f.parse::<u64>().ok()).sum()
    };
    let segments: u64 = segments.lines().skip(1).map(segment).sum();
    (shm + segments + files, shown, looked)
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

fn is_memory_file(pid: u32, held: &OsStr) -> bool {
    // A running program may be a memory file, larger than what is mapped of it.
    let dir = match held == OsStr::new("exe") {
        true => format!("/proc/{pid}"),
        false => format!("/proc/{pid}/fd"),
    };
    let link = std::fs::read_link(Path::new(&dir).join(held));
    link.is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"/memfd:"))
}
