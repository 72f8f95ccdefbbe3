//! The watch: measures the run's disk use, files, CPU time, memory, processes and open files up to ten times a
//! second, and says which limit was exceeded.
//!
//! The watch is a thread of init, because no process inside can signal init. It is separate from init's loop, so that a
//! long measurement does not delay the deadlines. One turn of the watch thread is called a *pass*. A pass takes a
//! *measurement* of the files and a *census* of the processes.
//!
//! The program must not be able to write faster than the disk watch measures. The disk watch uses three readings:
//!
//! - *written*: the bytes that the kernel says the live processes, and the children they reaped, have dirtied;
//! - *in use*: what the whole file system holds, which also shows bytes written by processes that are gone;
//! - *measured*: the size of every file below the workspace, and of every file that was unlinked and is still open.
//!
//! Measuring is the slowest. It is done once *written* or *in use* has grown enough to matter, and at least once a
//! second. While the named files can be walked quickly, they are measured at every pass, because an empty file costs no
//! bytes but counts as a file.
//!
//! Some things cannot be measured in bounded time: a directory or process that init may not read, an excessive depth or
//! number of descriptors, a deleted file that is only mapped, a descriptor in flight over a socket. All bytes that the
//! run has written and all growth of the file system are then charged to the run. A pass is cut short when the program
//! writes as much as its limit during it. A long pass, also over memory, is interrupted at every tick to check the
//! disk, and a run that writes as much as its limit while its files are being measured has exceeded the limit.
//!
//! Two cases need other means. A file that only a system call in progress holds is in no list; `processes/pause.rs`
//! makes such calls release it. Reading a file of /proc may block on the process that it describes; `init_watch.rs`
//! lets init check the limits meanwhile.

mod disk;
mod file_table;
mod init_watch;
mod progress;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::confine::capabilities::{self, Bounding};
use crate::events::{self, PollFlags, WakeEvent};
use crate::inside::processes::{CensusRequest, ProcessCensus, ProcessSet};
use crate::outcome::Stop;
use crate::resources::cgroup::CpuUnit;
use crate::spec::{Limits, Spec};
use crate::sys;
use disk::Disk;
use file_table::FileTable;
pub use file_table::open_on_host;
use init_watch::InitWatch;
use progress::WatchProgress;

/// The time between two passes.
pub const TICK: Duration = Duration::from_millis(100);

/// Everything the watch thread needs to measure the run and compare it with its limits.
pub struct LimitWatch {
    limits: Limits,
    cpu_counter: Option<(OwnedFd, CpuUnit)>,
    watched: WatchedLimits,
    census: ProcessCensus,
    disk: Disk,
    file_table: Option<FileTable>,
    progress: Arc<WatchProgress>,
    init_watch: Option<InitWatch>,
    pub peak: PeakUsage,
}

/// Which limits nothing else enforces, so that the watch must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchedLimits {
    pub memory: bool,
    pub pids: bool,
}

/// The largest values measured so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeakUsage {
    pub disk_bytes: u64,
    pub files: u64,
    pub memory_bytes: Option<u64>,
    pub pids: u64,
    pub cpu_ms: u64,
}

/// Init's handle to the watch thread.
pub struct WatchThread {
    /// The thread's id in the sandbox's pid namespace. The seccomp filter needs it, to protect the thread.
    pub thread: u32,
    workspace: OwnedFd,
    commands: Sender<WatchCommand>,
    link: WatchLink,
    progress: Arc<WatchProgress>,
    /// What init checks itself: the number of descriptors always, the other limits while the watch thread is late. Used
    /// from the program's start on.
    init_watch: Option<InitWatch>,
    started: bool,
}

/// What the watch thread tells init.
#[derive(Clone, Copy, Default)]
struct Shared {
    peak: PeakUsage,
    exceeded_limit: Option<Stop>,
    /// Whether the thread has ended.
    has_ended: bool,
    /// Whether the thread has ended although init did not order it to.
    ended_unexpectedly: bool,
}

/// What the watch thread tells init, and the event that wakes init.
#[derive(Clone)]
struct WatchLink {
    shared: Arc<Mutex<Shared>>,
    wake_event: WakeEvent,
}

impl WatchLink {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells init when the thread ends, even by a panic: a run without a watch must not go on.
struct EndNotifier<'a>(&'a WatchLink);

impl Drop for EndNotifier<'_> {
    fn drop(&mut self) {
        let mut shared = self.0.lock();
        shared.ended_unexpectedly = !shared.has_ended;
        shared.has_ended = true;
        drop(shared);
        self.0.wake_event.signal();
    }
}

impl WatchThread {
    pub fn start(mut watch: LimitWatch, bounding: Bounding) -> io::Result<WatchThread> {
        let (commands, received) = std::sync::mpsc::channel();
        let link = WatchLink {
            shared: Arc::default(),
            wake_event: WakeEvent::new()?,
        };
        let thread_link = link.clone();
        let workspace = rustix::io::fcntl_dupfd_cloexec(&watch.disk.workspace, 3)?;
        let (progress, init_watch) = (Arc::clone(&watch.progress), watch.init_watch.take());
        let (send_id, thread_id) = std::sync::mpsc::channel();
        sys::use_one_malloc_arena();
        std::thread::Builder::new().spawn(move || {
            // Credentials belong to a thread. Init drops its own later, so this thread must drop its copy itself.
            let unprivileged = capabilities::drop_capabilities(bounding).is_ok()
                && rustix::thread::set_no_new_privs(true).is_ok();
            let id = unprivileged.then(|| rustix::thread::gettid().as_raw_nonzero().get() as u32);
            // The receiver is in this function and waits.
            let _ = send_id.send(id);
            if unprivileged {
                let _notifier = EndNotifier(&thread_link);
                watch_loop(watch, &received, &thread_link);
            }
        })?;
        let id = thread_id.recv().ok().flatten();
        let thread = id.ok_or_else(|| io::Error::other("the thread kept capabilities"))?;
        Ok(WatchThread {
            thread,
            workspace,
            commands,
            link,
            progress,
            init_watch,
            started: false,
        })
    }

    /// Returns the limit that the run exceeded since the last call, if any. Runs init's own checks too.
    pub fn take_exceeded_limit(&mut self) -> Option<Stop> {
        self.link.wake_event.clear();
        let (exceeded, has_ended) = {
            let mut shared = self.link.lock();
            (shared.exceeded_limit.take(), shared.has_ended)
        };
        exceeded.or_else(|| {
            let init_watch = self
                .init_watch
                .as_mut()
                .filter(|_| self.started && !has_ended)?;
            init_watch.check(&self.progress, self.workspace.as_fd())
        })
    }

    /// Whether the thread has ended although init did not order it to.
    pub fn has_ended_unexpectedly(&self) -> bool {
        self.link.lock().ended_unexpectedly
    }

    pub fn peak(&self) -> PeakUsage {
        self.link.lock().peak
    }

    /// Starts the passes, because the program is about to run. What is in use on the file system by now does not count
    /// against the run, nor do the files that the host had open when the runner sent its command. Without that number,
    /// the whole count of the host counts against the run.
    ///
    /// There are no passes before this. The child that becomes the program cannot be read yet, and a pass would charge all
    /// growth to the run because of that.
    pub fn begin(&mut self, open_on_host: Option<u64>) {
        let in_use = disk::in_use(self.workspace.as_fd());
        self.progress.set_measured((0, 0), in_use);
        self.progress.mark_disk();
        let init_watch = self.init_watch.iter_mut();
        init_watch.for_each(|init_watch| init_watch.begin(open_on_host));
        self.started = true;
        let _ = self.commands.send(WatchCommand::Begin {
            in_use,
            open_on_host,
        });
    }

    /// Orders a last pass, and waits for it at most this long. Calls `at_each_tick` meanwhile.
    pub fn finish(&self, at_most: Duration, at_each_tick: &mut dyn FnMut()) -> PeakUsage {
        let _ = self.commands.send(WatchCommand::End);
        let until = Instant::now() + at_most;
        while !self.link.lock().has_ended && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now()).min(TICK);
            let woken = events::wait_for(&self.link.wake_event, PollFlags::IN, left);
            self.link.wake_event.clear();
            if !woken {
                at_each_tick();
            }
        }
        self.peak()
    }
}

/// The descriptor is readable when a limit was exceeded, or when the thread has ended.
impl AsFd for WatchThread {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.wake_event.as_fd()
    }
}

enum WatchCommand {
    /// The program is about to run. Carries what is in use on the file system, and how many files the host has open.
    Begin {
        in_use: (u64, u64),
        open_on_host: Option<u64>,
    },
    End,
}

fn watch_loop(mut watch: LimitWatch, received: &Receiver<WatchCommand>, link: &WatchLink) {
    let mut started = false;
    loop {
        let command = match started {
            true => received.recv_timeout(TICK),
            false => received.recv().map_err(RecvTimeoutError::from),
        };
        let (exceeded, is_last) = match command {
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
            Ok(WatchCommand::End) => (watch.run_last_pass(), true),
            Err(RecvTimeoutError::Timeout) => (watch.run_pass(), false),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let mut shared = link.lock();
        shared.peak = watch.peak;
        shared.exceeded_limit = shared.exceeded_limit.or(exceeded);
        shared.has_ended = is_last;
        drop(shared);
        if exceeded.is_some() || is_last {
            link.wake_event.signal();
        }
        if is_last {
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
            init_watch: Some(InitWatch::new(
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
            peak: PeakUsage::default(),
        })
    }

    /// Makes one pass. Returns the limit that the run exceeded, if any.
    pub fn run_pass(&mut self) -> Option<Stop> {
        self.disk.restrict_top_directory();
        let mut exceeded = self.disk.check().or_else(|| self.check_open_files());
        if exceeded.is_none() {
            let request = CensusRequest {
                cpu: self.cpu_counter.is_none(),
                tasks: self.watched.pids,
                memory: self.watched.memory.then_some(self.limits.memory_bytes),
                files_in_memory: self.disk.bytes_in_memory(),
            };
            let (disk, progress) = (&mut self.disk, &self.progress);
            self.census.take(request, &mut || {
                progress.mark_process();
                exceeded = exceeded.or_else(|| disk.check_if_due());
                exceeded.is_none()
            });
        }
        (self.peak.disk_bytes, self.peak.files) = self.disk.peak;
        exceeded.or_else(|| self.exceeded_limit())
    }

    /// Compares the run's descriptors and mappings with its share of the host's open files. Also checks the disk when a
    /// tick has passed.
    fn check_open_files(&mut self) -> Option<Stop> {
        let (disk, progress) = (&mut self.disk, &self.progress);
        let mut exceeded = None;
        let too_many = self.file_table.as_mut()?.look_at_mappings(&mut || {
            progress.mark_process();
            exceeded = exceeded.or_else(|| disk.check_if_due());
            exceeded.is_none()
        });
        exceeded.or(too_many)
    }

    /// Returns the limit that the run exceeded according to the last census, if any.
    fn exceeded_limit(&mut self) -> Option<Stop> {
        self.peak.pids = self.peak.pids.max(self.census.count);
        self.peak.cpu_ms = self.cpu_ms();
        if self.watched.memory {
            let bytes = self.census.memory_bytes;
            // A run that ends before the first pass has no known peak, rather than a peak of zero.
            let measured = (bytes > 0).then_some(bytes);
            self.peak.memory_bytes = self.peak.memory_bytes.max(measured);
            if bytes > self.limits.memory_bytes || self.census.hides_memory() {
                return Some(Stop::Memory);
            }
        }
        // Allow one more: the kill helper is counted too.
        if self.watched.pids && self.census.tasks > self.limits.pids.saturating_add(1) {
            return Some(Stop::Pids);
        }
        let limit = self.limits.cpu_ms;
        limit
            .is_some_and(|limit| self.peak.cpu_ms > limit)
            .then_some(Stop::CpuTime)
    }

    /// The CPU time of the whole run: from the cgroup's counter if there is one, else from the last census.
    fn cpu_ms(&self) -> u64 {
        let counter = self.cpu_counter.as_ref();
        let counted = counter.and_then(|(fd, unit)| unit.read_us(fd.as_fd()).ok());
        counted.map_or(self.census.cpu_ms, |us| us / 1000)
    }

    /// Makes the last pass, when no process is left: measures the workspace, and the CPU time of the whole run.
    pub fn run_last_pass(&mut self) -> Option<Stop> {
        self.disk.restrict_top_directory();
        let exceeded = self.disk.measure_at_end();
        (self.peak.disk_bytes, self.peak.files) = self.disk.peak;
        if self.cpu_counter.is_none() {
            let request = CensusRequest {
                cpu: true,
                ..CensusRequest::default()
            };
            self.census.take(request, &mut || true);
        }
        self.peak.cpu_ms = self.cpu_ms();
        exceeded
    }
}
