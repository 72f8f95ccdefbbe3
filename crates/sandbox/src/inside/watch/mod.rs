//! The watch: measures the run's disk use, files, CPU time, memory, processes and open files ten times a second, and
//! says which limit was passed.
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
//! disk, and a run that writes as much as its limit while its files are being measured has passed the limit.
//!
//! Two cases need other means. A file that only a system call in progress holds is in no list; `processes/pause.rs`
//! makes such calls release it. Reading a file of /proc may block on the process that it describes; `fallback.rs` lets
//! init check the limits meanwhile.

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
pub use file_table::open_on_host;
use progress::WatchProgress;

/// The time between two passes.
pub const TICK: Duration = Duration::from_millis(100);

/// Everything the watch thread needs to measure the run and judge its limits.
pub struct LimitWatch {
    limits: Limits,
    cpu_counter: Option<(OwnedFd, CpuUnit)>,
    watched: WatchedLimits,
    census: ProcessCensus,
    disk: Disk,
    file_table: Option<FileTable>,
    progress: Arc<WatchProgress>,
    fallback: Option<FallbackWatch>,
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
    shared: Arc<Mutex<Shared>>,
    event_fd: OwnedFd,
    progress: Arc<WatchProgress>,
    /// What init checks itself while the watch thread is blocked. Used from the program's start on.
    fallback: Option<FallbackWatch>,
    started: bool,
}

/// What the watch thread tells init.
#[derive(Clone, Copy, Default)]
struct Shared {
    peak: PeakUsage,
    passed: Option<Stop>,
    /// Whether the thread has ended.
    over: bool,
    /// Whether the thread has ended although init did not order it to.
    lost: bool,
}

/// Tells init when the thread ends, even by a panic: a run without a watch must not go on.
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
        let (thread_shared, thread_event_fd) = (
            Arc::clone(&shared),
            rustix::io::fcntl_dupfd_cloexec(&event_fd, 3)?,
        );
        let workspace = rustix::io::fcntl_dupfd_cloexec(&watch.disk.workspace, 3)?;
        let (progress, fallback) = (Arc::clone(&watch.progress), watch.fallback.take());
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
                let _notifier = EndNotifier {
                    shared: &thread_shared,
                    event_fd: &thread_event_fd,
                };
                watch_loop(watch, &received, &thread_shared, &thread_event_fd);
            }
        })?;
        let id = thread_id.recv().ok().flatten();
        let thread = id.ok_or_else(|| io::Error::other("the thread kept capabilities"))?;
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

    /// A descriptor that is readable when a limit was passed, or when the thread has ended.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }

    /// Which limit was passed, if any, since the last call. Runs the fallback checks too.
    pub fn take_passed_limit(&mut self) -> Option<Stop> {
        let _ = rustix::io::read(&self.event_fd, &mut [0u8; 8]);
        let (passed, over) = {
            let mut shared = self.lock();
            (shared.passed.take(), shared.over)
        };
        passed.or_else(|| {
            let fallback = self.fallback.as_mut().filter(|_| self.started && !over)?;
            fallback.check(&self.progress, self.workspace.as_fd())
        })
    }

    /// Whether the thread has ended although init did not order it to.
    pub fn is_lost(&self) -> bool {
        self.lock().lost
    }

    pub fn peak(&self) -> PeakUsage {
        self.lock().peak
    }

    /// Starts the passes, because the program is about to run. What is in use on the file system by now does not count
    /// against the run, nor do the files that the host had open when the runner sent its order. Without that number,
    /// the whole count of the host counts against the run.
    ///
    /// There are no passes before this: the child that becomes the program is still unreadable, and all growth is
    /// charged to a run with an unreadable process.
    pub fn begin(&mut self, open_on_host: Option<u64>) {
        let in_use = disk::in_use(self.workspace.as_fd());
        self.progress.set_measured((0, 0), in_use);
        self.progress.mark_disk();
        let fallback = self.fallback.iter_mut();
        fallback.for_each(|fallback| fallback.begin(open_on_host));
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
        self.peak()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
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

fn watch_loop(
    mut watch: LimitWatch,
    received: &Receiver<WatchCommand>,
    shared: &Mutex<Shared>,
    event_fd: &OwnedFd,
) {
    let mut started = false;
    loop {
        let command = match started {
            true => received.recv_timeout(TICK),
            false => received.recv().map_err(RecvTimeoutError::from),
        };
        let (passed, over) = match command {
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
        let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.peak = watch.peak;
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
            peak: PeakUsage::default(),
        })
    }

    /// Makes one pass. Returns which limit was passed, if any.
    pub fn run_pass(&mut self) -> Option<Stop> {
        self.disk.restrict_top_directory();
        let mut passed = self.disk.check().or_else(|| self.look_at_mappings());
        if passed.is_none() {
            let request = CensusRequest {
                cpu: self.cpu_counter.is_none(),
                tasks: self.watched.pids,
                memory: self.watched.memory.then_some(self.limits.memory_bytes),
                files_in_memory: self.disk.bytes_in_memory(),
            };
            let (disk, progress) = (&mut self.disk, &self.progress);
            self.census.take(request, &mut || {
                progress.mark_process();
                passed = passed.or_else(|| disk.check_if_due());
                passed.is_none()
            });
        }
        (self.peak.disk_bytes, self.peak.files) = self.disk.peak;
        passed.or_else(|| self.judge())
    }

    /// Checks the run's share of the host's open files. Interrupts itself to check the disk.
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

    /// Which limit the last census shows as passed, if any.
    fn judge(&mut self) -> Option<Stop> {
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
        let passed = self.disk.measure_at_end();
        (self.peak.disk_bytes, self.peak.files) = self.disk.peak;
        if self.cpu_counter.is_none() {
            let request = CensusRequest {
                cpu: true,
                tasks: false,
                memory: None,
                files_in_memory: 0,
            };
            self.census.take(request, &mut || true);
        }
        self.peak.cpu_ms = self.cpu_ms();
        passed
    }
}
