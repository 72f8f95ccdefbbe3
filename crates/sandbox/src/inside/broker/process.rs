//! The broker process, which makes socket calls on the program's behalf.
//!
//! Its work is charged to the run: it is in the run's cgroup and on the run's CPUs, and the watch adds its CPU time to
//! that of the run's processes.
//!
//! Init starts the broker process at the first call, and it stays. It receives calls from the listener itself, and has
//! a thread for each call that waits. It is a fork of init that holds nothing but the listener. It is in the user
//! namespace above the program's and in no Landlock domain, so the program can neither trace it nor read its memory.
//! Where Landlock cannot scope signals, the program can kill the broker process like its own processes. Init then
//! answers the calls in progress with EAGAIN and starts another broker process, a bounded number of times.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{DumpableBehavior, Pid, Signal};

use super::sockets::{CallReply, PendingCall, Sockets};
use crate::events::{self, PollFlags};
use crate::resources::cgroup::GroupAccess;
use crate::sys::{self, ForkSide, NotificationAnswer};

/// How many calls are served at one time. Further calls get EAGAIN, as from a full backlog.
const THREADS_MAX: usize = 64;
/// The most threads that wait for calls. At least one waits while another serves, so that a call that blocks delays no
/// other call.
const SPARE_THREADS_MAX: usize = 2;
/// Enough for a path and its resolution. Data is on the heap.
const THREAD_STACK_BYTES: usize = 128 * 1024;
/// How often the broker process may be started. A program that kills it more often has to do without.
const STARTS_MAX: u32 = 64;

/// Init's handle to the broker process.
pub struct BrokerProcess {
    sockets: Sockets,
    group_access: GroupAccess,
    /// The pid of the program, whose CPU affinity the broker process adopts.
    main_pid: i32,
    pid: Option<i32>,
    starts: u32,
    /// Memory shared with the broker process. The first slot holds the pid of a broker process that was forked into the
    /// run's cgroup, or 0. The others hold the ids of the calls in progress.
    shared: Option<&'static [AtomicU64]>,
}

impl BrokerProcess {
    pub fn new(sockets: Sockets, group_access: GroupAccess, main_pid: i32) -> BrokerProcess {
        BrokerProcess {
            sockets,
            group_access,
            main_pid,
            pid: None,
            starts: 0,
            shared: None,
        }
    }

    pub fn pid(&self) -> Option<i32> {
        self.pid
    }

    pub fn may_start(&self) -> bool {
        self.starts < STARTS_MAX
    }

    /// Starts the broker process, which receives the waiting call.
    pub fn start(&mut self, listener: BorrowedFd<'_>) -> io::Result<()> {
        self.starts += 1;
        let shared = match self.shared {
            Some(shared) => shared,
            None => sys::shared_counters(1 + THREADS_MAX)?,
        };
        self.shared = Some(shared);
        match sys::fork_threaded()? {
            ForkSide::Parent { child } => {
                self.pid = Some(child);
                Ok(())
            }
            ForkSide::Child => {
                // On failure, init answers the calls in progress when it reaps this process.
                let _ = self.run_process(listener, shared);
                sys::exit_now(1)
            }
        }
    }

    /// Records that init has reaped a child. If it was the broker process, answers the calls in progress, because no
    /// other process would.
    pub fn note_reaped(&mut self, pid: i32, listener: BorrowedFd<'_>) {
        let shared = self.shared.unwrap_or_default();
        let Some((pid_in_group, calls_in_progress)) = shared.split_first() else {
            return;
        };
        let in_group = pid_in_group.load(Ordering::Acquire) as i32;
        match pid {
            _ if pid == in_group => pid_in_group.store(0, Ordering::Release),
            // The reaped child only forked the broker process into the cgroup.
            _ if Some(pid) == self.pid && in_group != 0 => {
                self.pid = Some(in_group);
                return;
            }
            _ if Some(pid) == self.pid => {}
            _ => return,
        }
        if in_group == 0 || Some(in_group) == self.pid {
            self.pid = None;
        }
        for slot in calls_in_progress {
            let id = slot.swap(0, Ordering::AcqRel);
            if id != 0 {
                let _ = sys::notification_answer(listener, id, libc::EAGAIN);
            }
        }
    }

    /// The broker process itself: enters the cgroup, drops everything but the listener, and serves calls.
    fn run_process(
        &self,
        listener: BorrowedFd<'_>,
        shared: &'static [AtomicU64],
    ) -> io::Result<()> {
        // This process has a single thread: fork copies only the thread that calls it.
        let (pid_in_group, calls_in_progress) = shared
            .split_first()
            .ok_or_else(|| io::Error::other("no shared memory"))?;
        if let Some(child) = self.group_access.enter()? {
            pid_in_group.store(child as u64, Ordering::Release);
            sys::exit_now(0);
        }
        sys::set_process_name(c"fumehood-broker");
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        if let Ok(cpus) = rustix::thread::sched_getaffinity(Pid::from_raw(self.main_pid)) {
            rustix::thread::sched_setaffinity(None, &cpus)?;
        }
        sys::close_all_but(listener)?;
        // Init's watch reads /proc of this process as of the run's others, which needs a dumpable process.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
        let pool = Arc::new(ThreadPool {
            listener: rustix::io::fcntl_dupfd_cloexec(listener, 3)?,
            sockets: self.sockets.clone(),
            calls_in_progress,
            waiting: AtomicUsize::new(1),
            threads: AtomicUsize::new(1),
        });
        pool.serve_until_spare(true);
        Ok(())
    }
}

/// Ends the whole process when a thread panics. If only the thread ended, its caller would wait forever; when the
/// process ends, init answers the calls in progress.
struct ExitOnPanic;

impl Drop for ExitOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            sys::exit_now(1);
        }
    }
}

/// The threads of the broker process.
struct ThreadPool {
    listener: OwnedFd,
    sockets: Sockets,
    /// The id of the call that each thread serves, or 0. Shared with init.
    calls_in_progress: &'static [AtomicU64],
    /// How many threads wait for a call, or were started and soon will. While there is one, no other is started.
    waiting: AtomicUsize,
    threads: AtomicUsize,
}

impl ThreadPool {
    /// Serves one call after the other until enough other threads wait for calls. The first thread never returns.
    fn serve_until_spare(self: Arc<Self>, first: bool) {
        let _guard = ExitOnPanic;
        loop {
            let Ok(call) = sys::notification_receive(self.listener.as_fd()) else {
                self.exit_if_no_caller_is_left();
                continue;
            };
            let still_waiting = self.waiting.fetch_sub(1, Ordering::AcqRel) - 1;
            let slot = self.calls_in_progress.iter().find(|slot| {
                let free = slot.compare_exchange(0, call.id, Ordering::AcqRel, Ordering::Relaxed);
                free.is_ok()
            });
            let all_busy = still_waiting == 0 && !self.add_thread();
            let reply = match all_busy {
                true => CallReply::Answer(NotificationAnswer::Errno(libc::EAGAIN)),
                false => self.sockets.perform(&PendingCall {
                    call: &call,
                    valid: &|| sys::notification_valid(self.listener.as_fd(), call.id),
                }),
            };
            // Count this thread as waiting before it answers. The answer wakes the caller, and the caller's next call
            // can come before this thread runs again. That call would then start one more thread each time, up to the
            // maximum.
            let stays = first || self.waiting.load(Ordering::Acquire) < SPARE_THREADS_MAX;
            if stays {
                self.waiting.fetch_add(1, Ordering::AcqRel);
            }
            // An error means that the caller has died meanwhile and waits for no answer.
            let _ = self.answer(call.id, reply);
            if let Some(slot) = slot {
                slot.store(0, Ordering::Release);
            }
            if !stays {
                self.threads.fetch_sub(1, Ordering::AcqRel);
                return;
            }
        }
    }

    fn answer(&self, id: u64, reply: CallReply) -> io::Result<()> {
        let listener = self.listener.as_fd();
        let answer = match reply {
            CallReply::Answer(answer) => answer,
            CallReply::Descriptor { fd, close_on_exec } => {
                match sys::answer_with_descriptor(listener, id, fd.as_fd(), close_on_exec) {
                    Ok(()) => return Ok(()),
                    Err(e) => NotificationAnswer::Errno(e.raw_os_error().unwrap_or(libc::EMFILE)),
                }
            }
        };
        sys::notification_answer_with(listener, id, answer)
    }

    /// Starts another thread. Returns false if there are already [`THREADS_MAX`].
    fn add_thread(self: &Arc<Self>) -> bool {
        if self.threads.fetch_add(1, Ordering::AcqRel) >= THREADS_MAX {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            return false;
        }
        let pool = Arc::clone(self);
        let small = std::thread::Builder::new().stack_size(THREAD_STACK_BYTES);
        // At the run's own limit on processes, no thread can be started. Then this call is served, and the next one
        // waits.
        self.waiting.fetch_add(1, Ordering::AcqRel);
        if small.spawn(move || pool.serve_until_spare(false)).is_err() {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            self.threads.fetch_sub(1, Ordering::AcqRel);
        }
        true
    }

    /// Exits if the listener hangs up, which means that no process with the filter is left.
    fn exit_if_no_caller_is_left(&self) {
        let listener = [((), self.listener.as_fd(), PollFlags::IN)];
        let ready = events::wait_for_any(listener, Duration::ZERO).unwrap_or_default();
        if ready
            .iter()
            .any(|(_, flags)| flags.contains(PollFlags::HUP))
        {
            sys::exit_now(0);
        }
    }
}
