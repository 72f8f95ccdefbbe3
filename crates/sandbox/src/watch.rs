//! What is summed up ten times a second over all processes of the run: bytes written, files, CPU, memory.
//!
//! The watch is a thread of init's: of the process that nothing inside can signal, and apart from the loop
//! that keeps the deadlines, so that no amount of things to look at delays those.
//!
//! The disk watch must not be outrun. It rests on three readings. *Written* is what the kernel says the live
//! processes (and those they reaped) have dirtied. *In use* is what the whole file system holds, which also tells of
//! what nobody who lives has written. Once either has grown enough to matter, and at least once a second in any case, the
//! tree is *measured*: every file below the workspace, and every file that was unlinked and is still open. As long as the files
//! with names are soon walked through, that is done at every look: names cost no byte. What cannot be measured in bounded time (a directory or
//! process we may not read, a depth or a number of descriptors nobody needs, a deleted file that is only
//! mapped, a descriptor in flight on a socket) makes the run answer for all it has written, and for
//! all that the file system has grown by. Time is bounded by what is written in it: a look that takes long, at
//! memory too, is broken off for a glance at the disk every tick, and who writes as much as the limit
//! allows while the files are being measured has written too much.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir};

use crate::cgroup::CpuUnit;
use crate::namespaces::{self, Bounding};
use crate::outcome::Stop;
use crate::processes::{self, Census, Realm, Wanted, Written};
use crate::spec::{Limits, Spec, WorkspaceKind};
use crate::sys;

pub const TICK: Duration = Duration::from_millis(100);
/// Files are measured at least this often, whatever the counters say.
const MEASURE_AT_LEAST: Duration = Duration::from_secs(1);
/// Measuring takes at most one part in so many of the watch's time; half of it, when a limit may have been passed.
const MEASURE_SHARE: u32 = 5;
/// A tree that takes no more than this part of it is measured at every look: two milliseconds.
const SOON_SHARE: u32 = 50;
/// What our own directories in the workspace take: not the program's.
const OWN_BYTES: u64 = 64 << 10;
/// Directories held open at once while measuring; deeper ones count as unmeasured.
const DEPTH_MAX: usize = 512;

pub struct Watch {
    limits: Limits,
    cpu_counter: Option<(OwnedFd, CpuUnit)>,
    watched: Watched,
    census: Census,
    disk: Disk,
    pub seen: Seen,
}

/// What the run has on disk.
struct Disk {
    bytes_max: u64,
    files_max: u64,
    workspace: OwnedFd,
    /// As the program names it.
    workspace_path: String,
    workspace_kind: WorkspaceKind,
    device: u64,
    realm: Realm,
    /// Bytes and inodes in use on the whole file system at the start.
    at_start: (u64, u64),
    /// Bytes and inodes in use when last measured: a cheap sign that something was written, or files were made.
    when_measured: (u64, u64),
    written: Written,
    /// All that had been written when a measuring last began.
    written_before: u64,
    glanced_at: Instant,
    tree: Measuring,
    whole: Measuring,
    /// The most seen: bytes, and files.
    seen: (u64, u64),
}

/// When something was last measured, and how long that took.
#[derive(Clone, Copy)]
struct Measuring {
    at: Instant,
    took: Duration,
}

impl Measuring {
    fn begun(start: Instant) -> Self {
        Measuring {
            at: Instant::now(),
            took: start.elapsed(),
        }
    }

    /// Whether enough time has passed since for this to take no more than one part in `share` of it.
    fn is_affordable(&self, share: u32) -> bool {
        self.at.elapsed() >= self.took * share
    }
}

/// What nothing else holds, so that the watch must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    pub memory: bool,
    pub pids: bool,
}

/// The largest values seen so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub disk_bytes: u64,
    pub files: u64,
    pub memory_bytes: Option<u64>,
    pub pids: u64,
    pub cpu_ms: u64,
}

/// The watch at work in a thread of its own, and what it last saw.
pub struct Watching {
    /// The thread's number inside.
    pub thread: u32,
    workspace: OwnedFd,
    orders: Sender<Word>,
    shared: Arc<Mutex<Shared>>,
    bell: OwnedFd,
}

#[derive(Clone, Copy, Default)]
struct Shared {
    seen: Seen,
    passed: Option<Stop>,
    over: bool,
    /// The thread is gone, though it was not told to.
    lost: bool,
}

/// Rings when the watch ends in whatever way: an unwatched run must not go on.
struct Alarm<'a> {
    shared: &'a Mutex<Shared>,
    bell: &'a OwnedFd,
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.lost = !shared.over;
        shared.over = true;
        drop(shared);
        let _rung = rustix::io::write(self.bell, &1u64.to_ne_bytes());
    }
}

impl Watching {
    pub fn start(watch: Watch, bounding: Bounding) -> io::Result<Watching> {
        let (orders, inbox) = std::sync::mpsc::channel();
        let shared = Arc::new(Mutex::new(Shared::default()));
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let bell = rustix::event::eventfd(0, flags)?;
        let (theirs, ring) = (
            Arc::clone(&shared),
            rustix::io::fcntl_dupfd_cloexec(&bell, 3)?,
        );
        let workspace = rustix::io::fcntl_dupfd_cloexec(&watch.disk.workspace, 3)?;
        let (tell, born) = std::sync::mpsc::channel();
        sys::share_one_heap();
        std::thread::Builder::new().spawn(move || {
            // Credentials are a thread's own: what init gives up later, this thread gives up now.
            let bare = namespaces::drop_capabilities(bounding).is_ok()
                && rustix::thread::set_no_new_privs(true).is_ok();
            let number = bare.then(|| rustix::thread::gettid().as_raw_nonzero().get() as u32);
            let _init_waits = tell.send(number);
            if bare {
                let _seen_to_end = Alarm {
                    shared: &theirs,
                    bell: &ring,
                };
                keep_watch(watch, &inbox, &theirs, &ring);
            }
        })?;
        let number = born.recv().ok().flatten();
        let thread = number.ok_or_else(|| io::Error::other("it kept capabilities"))?;
        Ok(Watching {
            thread,
            workspace,
            orders,
            shared,
            bell,
        })
    }

    /// Readable when a limit was passed, or the last look is over.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Which limit was passed, if any, since this was last asked.
    pub fn passed(&self) -> Option<Stop> {
        let _quiet_again = rustix::io::read(&self.bell, &mut [0u8; 8]);
        self.lock().passed.take()
    }

    /// Whether nobody watches any more, though somebody should.
    pub fn is_lost(&self) -> bool {
        self.lock().lost
    }

    pub fn seen(&self) -> Seen {
        self.lock().seen
    }

    /// The program is about to run. Before that nothing is looked at: what is to become it cannot be looked into, like
    /// somebody who hides. What others have written by now is not its own.
    pub fn begin(&self) {
        let in_use = in_use(self.workspace.as_fd());
        let _lost = self.orders.send(Word::Begin { in_use });
    }

    /// A last look, for as long as there is time for it.
    pub fn finish(&self, at_most: Duration) -> Seen {
        let _over_already = self.orders.send(Word::End);
        let until = Instant::now() + at_most;
        while !self.lock().over && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            let left = rustix::event::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut fds = [PollFd::new(&self.bell, PollFlags::IN)];
            let _woken = rustix::event::poll(&mut fds, Some(&left));
            let _quiet_again = rustix::io::read(&self.bell, &mut [0u8; 8]);
        }
        self.seen()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Word {
    /// With what is in use on the file system.
    Begin {
        in_use: (u64, u64),
    },
    End,
}

fn keep_watch(mut watch: Watch, inbox: &Receiver<Word>, shared: &Mutex<Shared>, bell: &OwnedFd) {
    let mut begun = false;
    loop {
        let word = match begun {
            true => inbox.recv_timeout(TICK),
            false => inbox.recv().map_err(RecvTimeoutError::from),
        };
        let (passed, over) = match word {
            Ok(Word::Begin { in_use }) => {
                (watch.disk.at_start, watch.disk.when_measured) = (in_use, in_use);
                begun = true;
                continue;
            }
            Ok(Word::End) => (watch.look_at_end(), true),
            Err(RecvTimeoutError::Timeout) => (watch.look(), false),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.seen = watch.seen;
        shared.passed = shared.passed.or(passed);
        shared.over = over;
        drop(shared);
        if passed.is_some() || over {
            let _rung = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
        if over {
            return;
        }
    }
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
        spec: &Spec,
        workspace: OwnedFd,
        cpu_counter: Option<(OwnedFd, CpuUnit)>,
        watched: Watched,
        realm: Realm,
    ) -> io::Result<Self> {
        Ok(Watch {
            limits: spec.limits.clone(),
            cpu_counter,
            watched,
            census: Census::new(realm),
            disk: Disk::new(spec, workspace, realm)?,
            seen: Seen::default(),
        })
    }

    /// One look. Says which limit was passed, if any.
    pub fn look(&mut self) -> Option<Stop> {
        self.disk.close_the_top();
        let mut passed = self.disk.glance();
        if passed.is_none() {
            let wanted = Wanted {
                cpu: self.cpu_counter.is_none(),
                tasks: self.watched.pids,
                memory: self.watched.memory.then_some(self.limits.memory_bytes),
            };
            let disk = &mut self.disk;
            self.census.take(wanted, &mut || {
                passed = passed.or_else(|| disk.glance_in_time());
                passed.is_none()
            });
        }
        (self.seen.disk_bytes, self.seen.files) = self.disk.seen;
        passed.or_else(|| self.judge())
    }

    /// Whether the last census shows a limit passed.
    fn judge(&mut self) -> Option<Stop> {
        self.seen.pids = self.seen.pids.max(self.census.count);
        self.seen.cpu_ms = self.cpu_ms();
        if self.watched.memory {
            let bytes = self.census.memory_bytes;
            // A run shorter than a look has no peak, rather than one of nothing.
            let measured = (bytes > 0).then_some(bytes);
            self.seen.memory_bytes = self.seen.memory_bytes.max(measured);
            if bytes > self.limits.memory_bytes || self.census.hides_memory() {
                return Some(Stop::Memory);
            }
        }
        // The sweeper is among them.
        if self.watched.pids && self.census.tasks > self.limits.pids.saturating_add(1) {
            return Some(Stop::Pids);
        }
        let most = self.limits.cpu_ms;
        most.is_some_and(|most| self.seen.cpu_ms > most)
            .then_some(Stop::CpuTime)
    }

    /// CPU time of the whole run: the cgroup's counter where there is one.
    fn cpu_ms(&self) -> u64 {
        let counter = self.cpu_counter.as_ref();
        let counted = counter.and_then(|(fd, unit)| unit.read_us(fd.as_fd()).ok());
        counted.map_or(self.census.cpu_ms, |us| us / 1000)
    }

    /// At the end, when nothing lives: what is there, and the time that all of it took.
    pub fn look_at_end(&mut self) -> Option<Stop> {
        self.disk.close_the_top();
        let passed = self.disk.look_at_end();
        (self.seen.disk_bytes, self.seen.files) = self.disk.seen;
        if self.cpu_counter.is_none() {
            let wanted = Wanted {
                cpu: true,
                tasks: false,
                memory: None,
            };
            self.census.take(wanted, &mut || true);
        }
        self.seen.cpu_ms = self.cpu_ms();
        passed
    }
}

impl Disk {
    fn new(spec: &Spec, workspace: OwnedFd, realm: Realm) -> io::Result<Self> {
        let now = Measuring {
            at: Instant::now(),
            took: Duration::ZERO,
        };
        let mut disk = Disk {
            bytes_max: spec.limits.disk_bytes,
            files_max: spec.limits.files,
            device: rustix::fs::fstat(&workspace)?.st_dev,
            workspace,
            workspace_path: spec.workspace.as_path().to_string_lossy().into_owned(),
            workspace_kind: spec.workspace_kind,
            realm,
            at_start: (0, 0),
            when_measured: (0, 0),
            written: Written::default(),
            written_before: 0,
            glanced_at: now.at,
            tree: now,
            whole: now,
            seen: (0, 0),
        };
        disk.at_start = disk.in_use();
        disk.when_measured = disk.at_start;
        Ok(disk)
    }

    /// The top directory is the program's, and so is its mode: opened to others, it is closed again.
    fn close_the_top(&self) {
        let open = rustix::fs::fstat(&self.workspace).is_ok_and(|s| s.st_mode & 0o7777 != 0o700);
        if open {
            let _others_keep_out = rustix::fs::fchmod(&self.workspace, Mode::from_raw_mode(0o700));
        }
    }

    /// In the midst of something else that takes long.
    fn glance_in_time(&mut self) -> Option<Stop> {
        (self.glanced_at.elapsed() >= TICK)
            .then(|| self.glance())
            .flatten()
    }

    /// What was written, and what is there if that may be too much.
    fn glance(&mut self) -> Option<Stop> {
        let passed = self.look();
        self.glanced_at = Instant::now();
        passed
    }

    fn look(&mut self) -> Option<Stop> {
        let (bytes, inodes) = self.in_use();
        if self.workspace_kind == WorkspaceKind::Memory {
            // The tmpfs refuses what is too much; here it is only noted.
            self.note(bytes, inodes);
            return None;
        }
        self.written = processes::written(self.realm);
        let grown = |now: u64, before: u64, limit: u64| now.saturating_sub(before) > limit / 8;
        let near = self.written.net > self.bytes_max
            || self.written.unreadable
            || grown(bytes, self.when_measured.0, self.bytes_max)
            || grown(inodes, self.when_measured.1, self.files_max);
        let due = self.whole.at.elapsed() >= MEASURE_AT_LEAST || near;
        if !due && self.tree.is_affordable(SOON_SHARE) {
            let tree = self.measure_tree();
            return self.judge(&tree);
        }
        let share = if near { 1 } else { MEASURE_SHARE };
        // What has names is soon measured, and is as a rule all there is.
        if !due || !self.tree.is_affordable(share) {
            return None;
        }
        let much = self.written_since(self.written_before) > self.bytes_max;
        match much || self.whole.is_affordable(share) {
            true => self.measure(),
            false => {
                let tree = self.measure_tree();
                self.judge(&tree)
            }
        }
    }

    /// When nobody is left who could hold a file without a name.
    fn look_at_end(&mut self) -> Option<Stop> {
        if self.workspace_kind == WorkspaceKind::Memory {
            return self.look();
        }
        // Of what the dead have written nobody tells how much was deleted again; what there is more than at the start does.
        self.written = Written::default();
        let tree = self.measure_tree();
        self.judge(&tree)
    }

    fn written_since(&self, before: u64) -> u64 {
        self.written.gross.saturating_sub(before)
    }

    fn note(&mut self, bytes: u64, files: u64) {
        self.seen = (self.seen.0.max(bytes), self.seen.1.max(files));
    }

    fn measure(&mut self) -> Option<Stop> {
        let start = Instant::now();
        self.written_before = self.written.gross;
        let mut measured = self.measure_tree();
        let passed = self.judge(&measured).or_else(|| {
            self.measure_unlinked(&mut measured);
            self.judge(&measured)
        });
        self.whole = Measuring::begun(start);
        self.when_measured = self.in_use();
        passed
    }

    fn judge(&mut self, measured: &Measured) -> Option<Stop> {
        let (mut bytes, mut files) = (measured.bytes, measured.files);
        if measured.unmeasured {
            let now = self.in_use();
            let grown = now.0.saturating_sub(self.at_start.0);
            bytes = bytes.max(self.written.net).max(grown);
            files = files.max(now.1.saturating_sub(self.at_start.1));
        }
        self.note(bytes, files);
        if bytes > self.bytes_max.saturating_add(OWN_BYTES) {
            return Some(Stop::Disk);
        }
        (files > self.files_max).then_some(Stop::Files)
    }

    fn measure_tree(&mut self) -> Measured {
        let start = Instant::now();
        let mut measured = Measured::default();
        let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat(&self.workspace, ".", open, Mode::empty()) {
            Ok(top) => {
                let mut pace = Pace::new(self);
                measured.directory(top, self.device, DEPTH_MAX, self.files_max, &mut pace);
                self.written = pace.written;
            }
            Err(_) => measured.unmeasured = true,
        }
        self.tree = Measuring::begun(start);
        measured
    }

    /// Files without a name that some process still holds.
    fn measure_unlinked(&mut self, measured: &mut Measured) {
        let mut pace = Pace::new(self);
        let looked = processes::open_files(self.realm, &mut |pid, entry, stat| {
            let kind = FileType::from_raw_mode(stat.st_mode);
            let unlinked = stat.st_nlink == 0 && stat.st_dev == self.device;
            if kind == FileType::RegularFile && unlinked {
                measured.file(stat);
            }
            if kind == FileType::Socket && processes::descriptors_in_flight(pid, entry) {
                measured.unmeasured = true;
            }
            pace.holds()
        });
        measured.unmeasured |= looked != processes::Looked::All;
        measured.unmeasured |= processes::map_deleted_files(
            self.realm,
            &measured.seen,
            &self.workspace_path,
            &mut || pace.holds(),
        );
        self.written = pace.written;
    }

    fn in_use(&self) -> (u64, u64) {
        in_use(self.workspace.as_fd())
    }
}

/// Bytes and inodes in use on the whole file system that holds the workspace.
fn in_use(workspace: BorrowedFd<'_>) -> (u64, u64) {
    rustix::fs::fstatvfs(workspace).map_or((0, 0), |s| {
        let bytes = s.f_blocks.saturating_sub(s.f_bfree) * s.f_frsize;
        (bytes, s.f_files.saturating_sub(s.f_ffree))
    })
}

/// Whether measuring keeps pace with writing: what was measured at its begin says little when much was written since.
struct Pace {
    realm: Realm,
    bytes_max: u64,
    before: u64,
    asked_at: Instant,
    written: Written,
}

impl Pace {
    fn new(disk: &Disk) -> Self {
        Pace {
            realm: disk.realm,
            bytes_max: disk.bytes_max,
            before: disk.written.gross,
            asked_at: Instant::now(),
            written: disk.written,
        }
    }

    fn holds(&mut self) -> bool {
        if self.asked_at.elapsed() >= TICK / 2 {
            self.written = processes::written(self.realm);
            self.asked_at = Instant::now();
        }
        self.written.gross.saturating_sub(self.before) <= self.bytes_max
    }
}

impl Measured {
    fn file(&mut self, stat: &rustix::fs::Stat) {
        if stat.st_nlink == 1 || self.seen.insert(stat.st_ino) {
            self.bytes += stat.st_blocks as u64 * 512;
        }
    }

    /// More than enough to know that the limit is passed, or more than can be measured.
    fn is_enough(&mut self, files_max: u64, pace: &mut Pace) -> bool {
        let holds = pace.holds();
        self.unmeasured |= !holds;
        !holds || self.files > files_max.saturating_mul(2)
    }

    fn directory(
        &mut self,
        dir: OwnedFd,
        device: u64,
        depth: usize,
        files_max: u64,
        pace: &mut Pace,
    ) {
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
            self.files += 1;
            let stat = match rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(rustix::io::Errno::NOENT) => continue,
                // Listed, and not to be looked at: a directory without the right to search it.
                Err(_) => {
                    self.unmeasured = true;
                    continue;
                }
            };
            self.file(&stat);
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                below.push(name.to_owned());
            }
            if self.is_enough(files_max, pace) {
                return;
            }
        }
        for name in below {
            let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            match rustix::fs::openat(&dir, name, open, Mode::empty()) {
                // Never into another file system, should one be mounted there.
                Ok(child) if rustix::fs::fstat(&child).is_ok_and(|s| s.st_dev != device) => {}
                Ok(child) if depth > 0 => {
                    self.directory(child, device, depth - 1, files_max, pace);
                }
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
                Ok(_) | Err(_) => self.unmeasured = true,
            }
            if self.is_enough(files_max, pace) {
                return;
            }
        }
    }
}
