//! What is summed up ten times a second over all processes of the run: bytes written, files, CPU, memory,
//! open files.
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
//!
//! Two things are beyond what can be measured. A file that only a system call holds is in no list; `pause.rs` makes the
//! calls let go of it. A file of /proc may wait for the process it tells of; `fallback.rs` has init look meanwhile.

mod disk;
mod fallback;
mod file_table;
mod progress;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::confine::capabilities::{self, Bounding};
use crate::inside::processes::{CensusRequest, ProcessCensus, ProcessSet};
use crate::outcome::Stop;
use crate::resources::cgroup::CpuUnit;
use crate::spec::{Limits, Spec};
use crate::sys;
use disk::Disk;
use fallback::FallbackWatch;
use file_table::FileTable;
use progress::WatchProgress;

pub const TICK: Duration = Duration::from_millis(100);
pub struct LimitWatch {
    limits: Limits,
    cpu_counter: Option<(OwnedFd, CpuUnit)>,
    watched: WatchedLimits,
    census: ProcessCensus,
    disk: Disk,
    file_table: Option<FileTable>,
    progress: Arc<WatchProgress>,
    fallback: Option<FallbackWatch>,
    pub seen: PeakUsage,
}

/// What nothing else holds, so that the watch must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchedLimits {
    pub memory: bool,
    pub pids: bool,
}

/// The largest values seen so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeakUsage {
    pub disk_bytes: u64,
    pub files: u64,
    pub memory_bytes: Option<u64>,
    pub pids: u64,
    pub cpu_ms: u64,
}

/// The watch at work in a thread of its own, and what it last saw.
pub struct WatchThread {
    /// The thread's number inside.
    pub thread: u32,
    workspace: OwnedFd,
    commands: Sender<WatchCommand>,
    shared: Arc<Mutex<Shared>>,
    event_fd: OwnedFd,
    progress: Arc<WatchProgress>,
    /// From the beginning of the program on.
    fallback: Option<FallbackWatch>,
    started: bool,
}

#[derive(Clone, Copy, Default)]
struct Shared {
    seen: PeakUsage,
    passed: Option<Stop>,
    over: bool,
    /// The thread is gone, though it was not told to.
    lost: bool,
}

/// Rings when the watch ends in whatever way: an unwatched run must not go on.
struct EndNotifier<'a> {
    shared: &'a Mutex<Shared>,
    event_fd: &'a OwnedFd,
}

impl Drop for EndNotifier<'_> {
    fn drop(&mut self) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.lost = !shared.over;
        shared.over = true;
        drop(shared);
        let _ = rustix::io::write(self.event_fd, &1u64.to_ne_bytes());
    }
}

impl WatchThread {
    pub fn start(mut watch: LimitWatch, bounding: Bounding) -> io::Result<WatchThread> {
        let (commands, received) = std::sync::mpsc::channel();
        let shared = Arc::new(Mutex::new(Shared::default()));
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let event_fd = rustix::event::eventfd(0, flags)?;
        let (theirs, ring) = (
            Arc::clone(&shared),
            rustix::io::fcntl_dupfd_cloexec(&event_fd, 3)?,
        );
        let workspace = rustix::io::fcntl_dupfd_cloexec(&watch.disk.workspace, 3)?;
        let (progress, fallback) = (Arc::clone(&watch.progress), watch.fallback.take());
        let (tell, thread_number) = std::sync::mpsc::channel();
        sys::use_one_malloc_arena();
        std::thread::Builder::new().spawn(move || {
            // Credentials are a thread's own: what init gives up later, this thread gives up now.
            let bare = capabilities::drop_capabilities(bounding).is_ok()
                && rustix::thread::set_no_new_privs(true).is_ok();
            let number = bare.then(|| rustix::thread::gettid().as_raw_nonzero().get() as u32);
            let _ = tell.send(number);
            if bare {
                let _notifier = EndNotifier {
                    shared: &theirs,
                    event_fd: &ring,
                };
                watch_loop(watch, &received, &theirs, &ring);
            }
        })?;
        let number = thread_number.recv().ok().flatten();
        let thread = number.ok_or_else(|| io::Error::other("it kept capabilities"))?;
        Ok(WatchThread {
            thread,
            workspace,
            commands,
            shared,
            event_fd,
            progress,
            fallback,
            started: false,
        })
    }

    /// Readable when a limit was passed, or the last look is over.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }

    /// Which limit was passed, if any, since this was last asked.
    pub fn passed(&mut self) -> Option<Stop> {
        let _ = rustix::io::read(&self.event_fd, &mut [0u8; 8]);
        let (passed, over) = {
            let mut shared = self.lock();
            (shared.passed.take(), shared.over)
        };
        passed.or_else(|| {
            let fallback = self.fallback.as_mut().filter(|_| self.started && !over)?;
            fallback.look(&self.progress, self.workspace.as_fd())
        })
    }

    /// Whether nobody watches any more, though somebody should.
    pub fn is_lost(&self) -> bool {
        self.lock().lost
    }

    pub fn seen(&self) -> PeakUsage {
        self.lock().seen
    }

    /// The program is about to run. Before that nothing is looked at: what is to become it cannot be looked into, like
    /// somebody who hides. What others have written by now is not its own.
    pub fn begin(&mut self) {
        let in_use = disk::in_use(self.workspace.as_fd());
        self.progress.measured((0, 0), in_use);
        self.progress.mark_disk();
        let open_on_host = file_table::open_on_host();
        let fallback = self.fallback.iter_mut();
        fallback.for_each(|fallback| fallback.begin(open_on_host));
        self.started = true;
        let _ = self.commands.send(WatchCommand::Begin {
            in_use,
            open_on_host,
        });
    }

    /// A last look, for as long as there is time for it. Calls `at_each_tick` meanwhile.
    pub fn finish(&self, at_most: Duration, at_each_tick: &mut dyn FnMut()) -> PeakUsage {
        let _ = self.commands.send(WatchCommand::End);
        let until = Instant::now() + at_most;
        while !self.lock().over && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now()).min(TICK);
            let left = rustix::event::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut fds = [PollFd::new(&self.event_fd, PollFlags::IN)];
            let woken = rustix::event::poll(&mut fds, Some(&left));
            let _ = rustix::io::read(&self.event_fd, &mut [0u8; 8]);
            if woken == Ok(0) {
                at_each_tick();
            }
        }
        self.seen()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum WatchCommand {
    /// With what is in use on the file system, and how many files the host has open.
    Begin {
        in_use: (u64, u64),
        open_on_host: Option<u64>,
    },
    End,
}

fn watch_loop(
    mut watch: LimitWatch,
    received: &Receiver<WatchCommand>,
    shared: &Mutex<Shared>,
    event_fd: &OwnedFd,
) {
    let mut started = false;
    loop {
        let word = match started {
            true => received.recv_timeout(TICK),
            false => received.recv().map_err(RecvTimeoutError::from),
        };
        let (passed, over) = match word {
            Ok(WatchCommand::Begin {
                in_use,
                open_on_host,
            }) => {
                watch.disk.begin(in_use);
                let table = watch.file_table.iter_mut();
                table.for_each(|table| table.begin(open_on_host));
                if watch.watched.memory {
                    watch.census.begin();
                }
                started = true;
                continue;
            }
            Ok(WatchCommand::End) => (watch.look_at_end(), true),
            Err(RecvTimeoutError::Timeout) => (watch.look(), false),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.seen = watch.seen;
        shared.passed = shared.passed.or(passed);
        shared.over = over;
        drop(shared);
        if passed.is_some() || over {
            let _ = rustix::io::write(event_fd, &1u64.to_ne_bytes());
        }
        if over {
            return;
        }
    }
}

impl LimitWatch {
    pub fn new(
        spec: &Spec,
        workspace: OwnedFd,
        cpu_counter: Option<(OwnedFd, CpuUnit)>,
        watched: WatchedLimits,
        process_set: ProcessSet,
    ) -> io::Result<Self> {
        let progress = Arc::new(WatchProgress::new());
        Ok(LimitWatch {
            limits: spec.limits.clone(),
            fallback: Some(FallbackWatch::new(
                spec,
                watched,
                process_set,
                cpu_counter.is_none(),
            )),
            cpu_counter,
            watched,
            census: ProcessCensus::new(process_set),
            disk: Disk::new(spec, workspace, process_set, Arc::clone(&progress))?,
            file_table: FileTable::new(&spec.limits, process_set),
            progress,
            seen: PeakUsage::default(),
        })
    }

    /// One look. Says which limit was passed, if any.
    pub fn look(&mut self) -> Option<Stop> {
        self.disk.restrict_top_directory();
        let mut passed = self.disk.check().or_else(|| self.look_at_mappings());
        if passed.is_none() {
            let wanted = CensusRequest {
                cpu: self.cpu_counter.is_none(),
                tasks: self.watched.pids,
                memory: self.watched.memory.then_some(self.limits.memory_bytes),
                files_in_memory: self.disk.bytes_in_memory(),
            };
            let (disk, progress) = (&mut self.disk, &self.progress);
            self.census.take(wanted, &mut || {
                progress.mark_process();
                passed = passed.or_else(|| disk.check_if_due());
                passed.is_none()
            });
        }
        (self.seen.disk_bytes, self.seen.files) = self.disk.seen;
        passed.or_else(|| self.judge())
    }

    fn look_at_mappings(&mut self) -> Option<Stop> {
        let (disk, progress) = (&mut self.disk, &self.progress);
        let mut passed = None;
        let too_many = self.file_table.as_mut()?.look_at_mappings(&mut || {
            progress.mark_process();
            passed = passed.or_else(|| disk.check_if_due());
            passed.is_none()
        });
        passed.or(too_many)
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
        // The kill helper is among them.
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
        self.disk.restrict_top_directory();
        let passed = self.disk.look_at_end();
        (self.seen.disk_bytes, self.seen.files) = self.disk.seen;
        if self.cpu_counter.is_none() {
            let wanted = CensusRequest {
                cpu: true,
                tasks: false,
                memory: None,
                files_in_memory: 0,
            };
            self.census.take(wanted, &mut || true);
        }
        self.seen.cpu_ms = self.cpu_ms();
        passed
    }
}
