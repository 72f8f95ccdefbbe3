//! The run's processes as /proc tells of them: which they are, what each wrote, used and holds.
//!
//! Everything is read with a bound, and what cannot be read is said to be so: a process may make itself
//! unreadable, lose its first thread, or be gone after a moment.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::sys;

/// Descriptors looked at in one pass. More cannot be looked at in the time between two looks.
const DESCRIPTORS_MAX: usize = 20_000;
/// Likewise the bytes of /proc/PID/maps.
const MAPS_BYTES_MAX: usize = 16 << 20;
/// The files of /proc that are a few lines long.
const SMALL: usize = 16 << 10;
/// Tables of the run's own sockets and segments.
const TABLE_BYTES_MAX: usize = 8 << 20;
const SOCKETS_EVERY: Duration = Duration::from_secs(1);
/// A process may be hidden while it starts another program; one that stays so answers for the most there is.
const HIDDEN_LOOKS_MAX: u32 = 20;
/// Ended processes remembered for their CPU time before they are summed up.
const REMEMBERED_MAX: usize = 50_000;

/// Which processes are the run's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Realm {
    /// All that this pid namespace has.
    Namespace,
    /// This process and its descendants. It is their subreaper, so that whoever loses a parent becomes its child: none
    /// leaves the tree, and the tree is empty when this process has no child.
    Descendants,
}

/// What to read of each process: a thousand of them are looked at ten times a second.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub cpu: bool,
    /// Threads, rather than one for each process.
    pub tasks: bool,
    /// The limit that is held by watching, where it is.
    pub memory: Option<u64>,
}

/// What the kernel says that the live processes, and those they or we reaped, have written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    pub gross: u64,
    /// By live processes alone, without what never came to the disk, because it was deleted before.
    pub net: u64,
    /// Some process would not be looked into.
    pub unreadable: bool,
}

/// What the last look at the processes gave.
pub struct Census {
    realm: Realm,
    pub count: u64,
    /// Threads of all processes: what a limit on processes counts.
    pub tasks: u64,
    pub cpu_ms: u64,
    pub memory_bytes: u64,
    /// For how many looks in a row some process would not have its descriptors looked at.
    hidden_looks: u32,
    shared_at_start: Option<u64>,
    sockets: Option<(u64, Instant)>,
    own_time: HashMap<(u32, u64), u64>,
    forgotten_ms: u64,
}

impl Census {
    pub fn new(realm: Realm) -> Self {
        Census {
            realm,
            count: 0,
            tasks: 0,
            cpu_ms: 0,
            memory_bytes: 0,
            hidden_looks: 0,
            shared_at_start: None,
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
    pub fn take(&mut self, wanted: Wanted, go_on: &mut dyn FnMut() -> bool) {
        (self.count, self.tasks) = (0, 0);
        let mut memory: Vec<(u32, u64, u64)> = Vec::new();
        let mut tree_ms = 0;
        let own = std::process::id();
        for pid in pids(self.realm) {
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
            let (apart, looked) = shared_memory(self.realm, go_on);
            self.memory_bytes = self.add_up(&memory, apart);
            let grown = self.shared_memory_grown();
            if self.memory_bytes.max(grown) > limit {
                // Now it matters to the byte: what was counted twice, and what no process shows.
                once_each(&mut memory);
                let unseen = match looked {
                    Looked::All | Looked::Hidden => mapped_shared_memory(self.realm),
                    // Memory files may be among the descriptors that were not looked at.
                    Looked::Many => u64::MAX,
                };
                let apart = apart.max(unseen.min(grown));
                self.memory_bytes = self.add_up(&memory, apart);
                if self.memory_bytes > limit {
                    // Two that were one, and changed between our looks at either, were counted as two. Seen twice, it is so.
                    let again = |(pid, ..): &(u32, u64, u64)| {
                        read_memory(*pid).map(|(its, mapped)| (*pid, its, mapped))
                    };
                    let mut memory: Vec<_> = memory.iter().filter_map(again).collect();
                    once_each(&mut memory);
                    self.memory_bytes = self.memory_bytes.min(self.add_up(&memory, apart));
                }
            }
            self.hidden_looks = match looked {
                Looked::All | Looked::Many => 0,
                Looked::Hidden => self.hidden_looks.saturating_add(1),
            };
        }
        if wanted.cpu {
            // Of children that nobody waited for only the second sum knows, of short-lived ones only the first.
            let seen_ms = self.forgotten_ms + self.own_time.values().sum::<u64>();
            self.cpu_ms = self.cpu_ms.max(tree_ms).max(seen_ms);
        }
    }

    fn add_up(&mut self, memory: &[(u32, u64, u64)], apart: u64) -> u64 {
        let private: u64 = memory.iter().map(|(_, its, _)| its).sum();
        let shared: u64 = memory.iter().map(|(_, _, mapped)| mapped).sum();
        private + shared.max(apart) + self.socket_bytes()
    }

    /// By how much all shared memory of the host has grown since the first look.
    fn shared_memory_grown(&mut self) -> u64 {
        let meminfo = read("/proc/meminfo", SMALL).unwrap_or_default();
        let now = field(&meminfo, "Shmem:") * 1024;
        now.saturating_sub(*self.shared_at_start.get_or_insert(now))
    }

    /// What waits in sockets. The kernel walks through large tables for this, so not at every look.
    fn socket_bytes(&mut self) -> u64 {
        // Without a network namespace there are no such sockets, and the tables are the host's.
        if self.realm == Realm::Descendants {
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

/// This process and all others of the run.
pub fn pids(realm: Realm) -> Vec<u32> {
    match realm {
        Realm::Namespace => numbers_in(Path::new("/proc")).collect(),
        Realm::Descendants => {
            let mut all = vec![std::process::id()];
            all.extend(descendants());
            all
        }
    }
}

/// The processes below this one. One that is being born may be missing: whoever must have them all asks again.
pub fn descendants() -> Vec<u32> {
    let mut found = Vec::new();
    let mut pending = vec![std::process::id()];
    while let Some(pid) = pending.pop() {
        let Some(children) = children_of(pid) else {
            return descendants_by_parents();
        };
        found.extend(&children);
        pending.extend(children);
    }
    found
}

/// `None`: this kernel does not list children (CONFIG_PROC_CHILDREN).
fn children_of(pid: u32) -> Option<Vec<u32>> {
    let tasks = PathBuf::from(format!("/proc/{pid}/task"));
    let mut children = Vec::new();
    for thread in numbers_in(&tasks) {
        let list = tasks.join(thread.to_string()).join("children");
        match std::fs::read_to_string(&list) {
            Ok(text) => children.extend(
                text.split_ascii_whitespace()
                    .filter_map(|n| n.parse::<u32>().ok()),
            ),
            Err(_) if pid == std::process::id() && !list.exists() => return None,
            Err(_) => {}
        }
    }
    Some(children)
}

/// The same by asking every process of the host for its parent.
fn descendants_by_parents() -> Vec<u32> {
    let all: Vec<(u32, u32)> = numbers_in(Path::new("/proc"))
        .filter_map(|pid| Some((pid, relations(pid)?.parent)))
        .collect();
    let mut found = HashSet::from([std::process::id()]);
    loop {
        let before = found.len();
        for (pid, parent) in &all {
            if found.contains(parent) {
                found.insert(*pid);
            }
        }
        if found.len() == before {
            break;
        }
    }
    found.remove(&std::process::id());
    found.into_iter().collect()
}

/// Whom a process belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relations {
    pub parent: u32,
    pub group: u32,
}

pub fn relations(pid: u32) -> Option<Relations> {
    let stat = read(format!("/proc/{pid}/stat"), SMALL)?;
    // The name may hold anything; the fields follow its last parenthesis: state, parent, group.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(1);
    let mut next = || fields.next()?.parse().ok();
    Some(Relations {
        parent: next()?,
        group: next()?,
    })
}

/// Deeper families are nobody's; a chain that long has changed under our eyes.
const GENERATIONS_MAX: usize = 65_536;

/// Holds whichever process has this number now.
pub fn hold(pid: u32) -> Option<OwnedFd> {
    let number = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
    rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty()).ok()
}

/// Holds a process that is below this one. What is held first and found to be of the family afterwards is either that
/// process or gone, so a signal through the descriptor reaches nobody else.
pub fn hold_descendant(pid: u32) -> Option<OwnedFd> {
    let held = hold(pid)?;
    let own = std::process::id();
    let mut at = pid;
    for _ in 0..GENERATIONS_MAX {
        match relations(at).map(|of| of.parent) {
            Some(parent) if parent == own => return Some(held),
            Some(0 | 1) => return None,
            Some(parent) => at = parent,
            // Gone; or not dumpable, and so not in /proc at all where that is mounted with hidepid=2. Its parent lists it.
            None => return descendants().contains(&pid).then_some(held),
        }
    }
    None
}

/// Holds every process below this one, as [`hold_descendant`] does for one, in time that grows with their number only.
pub fn hold_descendants() -> Vec<(u32, OwnedFd)> {
    let each = |pid: u32| Some((pid, hold(pid)?));
    let mut held: Vec<(u32, OwnedFd)> = descendants().into_iter().filter_map(each).collect();
    let still: HashSet<u32> = descendants().into_iter().collect();
    held.retain(|(pid, _)| still.contains(pid));
    held
}

/// The processes of a user, by real uid.
pub fn of_user(uid: u32) -> Vec<u32> {
    let is_of = |pid: &u32| {
        let status = read(format!("/proc/{pid}/status"), SMALL).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u32>().ok()) == Some(uid)
    };
    numbers_in(Path::new("/proc")).filter(is_of).collect()
}

/// The threads of a user's processes: what RLIMIT_NPROC counts.
pub fn threads_of_user(uid: u32) -> u64 {
    let threads = |pid: u32| numbers_in(Path::new(&format!("/proc/{pid}/task"))).count() as u64;
    of_user(uid).into_iter().map(threads).sum()
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
        // Not there to be read, and not gone either: hidden (see `hold_descendant`).
        return descendants().contains(&pid);
    };
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let threads = fields.get(17).and_then(|n| n.parse::<u32>().ok());
    let corpse = matches!(fields.first(), Some(&"Z" | &"X")) && threads.is_none_or(|n| n <= 1);
    // Who has given up all memory is on the way out, and cannot be looked into any more.
    let has_memory = || {
        let sizes = places(pid).filter_map(|dir| read(dir.join("statm"), SMALL));
        sizes.into_iter().any(|text| !text.starts_with("0 "))
    };
    !corpse && has_memory()
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
pub(crate) fn read(path: impl AsRef<Path>, bytes_max: usize) -> Option<String> {
    // They have no size; with room for most, one call reads the whole and another tells that it is.
    let mut bytes = Vec::with_capacity(bytes_max.min(4096));
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

/// What all processes of the run have written. Init is among them: what it reaped is credited to it.
pub fn written(realm: Realm) -> Written {
    // What we reaped; of its own, init writes nothing to speak of. Our own file in /proc would tell the same, and also what
    // of it was deleted again, but it is root's, as that of any process without a core dump, and closed to us.
    let mut all = Written {
        gross: sys::written_by_reaped(),
        ..Written::default()
    };
    let own = std::process::id();
    for pid in pids(realm).into_iter().filter(|pid| *pid != own) {
        let Some(text) = read(format!("/proc/{pid}/io"), SMALL) else {
            all.unreadable |= lives(pid);
            continue;
        };
        let gross = field(&text, "write_bytes:");
        all.gross += gross;
        all.net += gross.saturating_sub(field(&text, "cancelled_write_bytes:"));
    }
    all
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
    let status = read_first(pid, "status", SMALL)?;
    let Some(text) = read_first(pid, "smaps_rollup", SMALL) else {
        // It would not be looked into: all that it has in memory is then its own, shared or not.
        let own = ["RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:"].map(|name| field(&status, name));
        return Some((own.iter().sum::<u64>() * 1024, 0));
    };
    // Page tables are memory too, and can be most of it.
    let own = field(&text, "Pss_Anon:") + field(&text, "SwapPss:") + field(&status, "VmPTE:");
    Some((own * 1024, field(&text, "Pss_Shmem:") * 1024))
}

/// Between vfork and exec two processes are one in memory, and would be counted as two.
fn once_each(memory: &mut Vec<(u32, u64, u64)>) {
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
/// there has come to be on the host.
fn mapped_shared_memory(realm: Realm) -> u64 {
    let mut left = MAPS_BYTES_MAX;
    let mut sizes: HashMap<u64, u64> = HashMap::new();
    let own = std::process::id();
    for pid in pids(realm).into_iter().filter(|pid| *pid != own) {
        let maps = read_first(pid, "maps", left).unwrap_or_default();
        left = left.saturating_sub(maps.len());
        for line in maps.lines() {
            if let Some((inode, bytes)) = shared_mapping(line) {
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
    let stat = read(format!("/proc/{pid}/stat"), SMALL).unwrap_or_default();
    let fields = stat.rsplit_once(')').map(|(_, rest)| rest);
    let threads = fields.and_then(|rest| rest.split_ascii_whitespace().nth(17)?.parse().ok());
    // A corpse keeps its number until it is reaped.
    threads.unwrap_or(1u64).max(1)
}

/// Shared memory of the run, mapped or not: its /dev/shm, SysV segments, and memory files.
fn shared_memory(realm: Realm, go_on: &mut dyn FnMut() -> bool) -> (u64, Looked) {
    let (mut files, mut seen) = (0, HashSet::new());
    let looked = open_files(realm, &mut |pid, fd, stat| {
        let unlinked = stat.st_nlink == 0 && seen.insert((stat.st_dev, stat.st_ino));
        if unlinked && is_memory_file(pid, fd) {
            files += stat.st_blocks as u64 * 512;
        }
        go_on()
    });
    if realm == Realm::Descendants {
        // Neither a /dev/shm nor segments of its own.
        return (files, looked);
    }
    let shm = rustix::fs::statvfs("/dev/shm");
    let shm = shm.map_or(0, |s| s.f_blocks.saturating_sub(s.f_bfree) * s.f_frsize);
    let segments = read("/proc/sysvipc/shm", TABLE_BYTES_MAX).unwrap_or_default();
    let segment = |line: &str| -> u64 {
        let fields = line.split_ascii_whitespace().skip(14).take(2);
        fields.filter_map(|f| f.parse::<u64>().ok()).sum()
    };
    let segments: u64 = segments.lines().skip(1).map(segment).sum();
    (shm + segments + files, looked)
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

/// How far a look at descriptors went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    All,
    /// As many as can be looked at in the time, or were asked for.
    Many,
    /// Until a process would not be looked into.
    Hidden,
}

/// Calls `each` for every open descriptor of the run, as long as that says to go on.
pub fn open_files(
    realm: Realm,
    each: &mut dyn FnMut(u32, &OsStr, &rustix::fs::Stat) -> bool,
) -> Looked {
    let mut left = DESCRIPTORS_MAX;
    let own = std::process::id();
    for pid in pids(realm).into_iter().filter(|pid| *pid != own) {
        let listing = match list_descriptors(pid) {
            Ok(Some(listing)) => listing,
            Ok(None) => continue,
            Err(Unreadable) => return Looked::Hidden,
        };
        // A program that was deleted while it runs is held by no descriptor.
        for held in ["exe", "cwd"] {
            if let Ok(stat) = rustix::fs::stat(format!("/proc/{pid}/{held}"))
                && !each(pid, OsStr::new(held), &stat)
            {
                return Looked::Many;
            }
        }
        for entry in listing.flatten() {
            left -= 1;
            if left == 0 {
                return Looked::Many;
            }
            if let Ok(stat) = rustix::fs::stat(entry.path())
                && !each(pid, &entry.file_name(), &stat)
            {
                return Looked::Many;
            }
        }
    }
    Looked::All
}

/// A process that lives and would not be looked into.
struct Unreadable;

/// `None` for one that is gone. A process that is just executing another program cannot be looked into for a moment.
fn list_descriptors(pid: u32) -> Result<Option<std::fs::ReadDir>, Unreadable> {
    const TRIES: usize = 5;
    for n in 0..TRIES {
        let listing = places(pid).find_map(|dir| std::fs::read_dir(dir.join("fd")).ok());
        if listing.is_some() || !lives(pid) {
            return Ok(listing);
        }
        if n + 1 < TRIES {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Err(Unreadable)
}

/// Whether descriptors wait in this socket's queue: they may be files that nothing else shows.
pub fn descriptors_in_flight(pid: u32, fd: &OsStr) -> bool {
    let path = Path::new(&format!("/proc/{pid}/fdinfo")).join(fd);
    read(path, SMALL).is_some_and(|text| field(&text, "scm_fds:") > 0)
}

/// Whether some process maps a deleted file of the run's that no descriptor shows: its size cannot be asked for.
/// Also when there are more maps than can be read between two looks, or `go_on` says no.
pub fn map_deleted_files(
    realm: Realm,
    shown: &HashSet<u64>,
    workspace: &str,
    go_on: &mut dyn FnMut() -> bool,
) -> bool {
    let mut left = MAPS_BYTES_MAX;
    let own = std::process::id();
    pids(realm)
        .into_iter()
        .filter(|pid| *pid != own)
        .any(|pid| {
            let maps = read_first(pid, "maps", left).unwrap_or_default();
            left = left.saturating_sub(maps.len());
            left == 0 || has_deleted_file(&maps, shown, workspace) || !go_on()
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
#[allow(clippy::unwrap_used)]
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
        assert!(lives(own) && pids(Realm::Namespace).contains(&own));
        assert!(pids(Realm::Descendants).contains(&own));
        assert!(read_times(own).is_some_and(|t| t.started > 0));
        assert!(read_memory(own).is_some_and(|(private, _)| private > 0));
    }

    /// Or the watch would walk through the whole tree at every look, because it cannot tell.
    #[test]
    fn what_a_dead_child_has_written_is_known() {
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        let dir = tempfile::tempdir_in(".").unwrap();
        let kind = rustix::fs::statfs(dir.path()).unwrap().f_type as u64;
        if kind == TMPFS_MAGIC {
            eprintln!("UNAVAILABLE: nothing is written to a disk here");
            return;
        }
        let before = written(Realm::Descendants);
        let status = std::process::Command::new("dd")
            .args(["if=/dev/zero", "of=f", "bs=64k", "count=16"])
            .current_dir(dir.path())
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        let after = written(Realm::Descendants);
        assert!(after.gross >= before.gross + (1 << 20), "{after:?}");
    }

    #[test]
    fn a_child_is_found_held_and_told_from_a_stranger() {
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", "read line"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        assert!(descendants().contains(&child.id()));
        assert!(descendants_by_parents().contains(&child.id()));
        assert!(hold_descendant(child.id()).is_some());
        let parent = relations(std::process::id()).unwrap().parent;
        assert!(hold_descendant(parent).is_none() && hold_descendant(1).is_none());
        assert!(!descendants().contains(&parent));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(hold_descendant(child.id()).is_none());
    }
}
