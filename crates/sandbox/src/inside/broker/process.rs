//! The process that makes socket calls on the program's behalf. Its work is the run's: it is in the run's control group and
//! on the run's CPUs, and the watch sums up its time with the others'.
//!
//! It is started at the first call and stays. It takes calls from the listener itself, in as many threads as there are
//! calls that wait for somebody. It is a copy of init that holds nothing but the listener, is in the user namespace above
//! the program's and in no Landlock domain, so that the program cannot trace it or look into it. Where Landlock does
//! not know of signals the program can kill it, as it can kill its other processes: init then answers the calls that
//! were in hand and starts another, a bounded number of times.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{DumpableBehavior, Pid, Signal};

use super::sockets::{CallReply, PendingCall, Sockets};
use crate::resources::cgroup::GroupAccess;
use crate::sys::{self, ForkSide, NotificationAnswer};

/// Calls served at one time. More get EAGAIN, as from a full backlog.
const THREADS_MAX: usize = 64;
/// Threads that wait for calls: one while another serves, so that a call that waits keeps nobody else waiting.
const SPARE_THREADS_MAX: usize = 2;
/// Enough for a path and what resolves it; data is on the heap.
const THREAD_STACK_BYTES: usize = 128 * 1024;
/// How often one may be started. Who kills it more often than that does without.
const STARTS_MAX: u32 = 64;

/// Init's side.
pub struct BrokerProcess {
    sockets: Sockets,
    group_access: GroupAccess,
    /// The program, whose CPUs are the run's.
    main: i32,
    pid: Option<i32>,
    starts: u32,
    /// Shared with the process: first its number if it was born in the run's group, then the calls that each thread has in
    /// hand.
    shared: Option<&'static [AtomicU64]>,
}

impl BrokerProcess {
    pub fn new(sockets: Sockets, group_access: GroupAccess, main: i32) -> BrokerProcess {
        BrokerProcess {
            sockets,
            group_access,
            main,
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

    /// Starts the process, which takes the call that waits.
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
                // Init answers the calls that were in hand.
                let _ = self.run_process(listener, shared);
                sys::exit_now(1)
            }
        }
    }

    /// A child of init's has ended. When it was the process, nobody else answers the calls that it had in hand.
    pub fn reaped(&mut self, pid: i32, listener: BorrowedFd<'_>) {
        let shared = self.shared.unwrap_or_default();
        let Some((born_in_group, in_hand)) = shared.split_first() else {
            return;
        };
        let born = born_in_group.load(Ordering::Acquire) as i32;
        match pid {
            _ if pid == born => born_in_group.store(0, Ordering::Release),
            // It only brought the process into the world.
            _ if Some(pid) == self.pid && born != 0 => {
                self.pid = Some(born);
                return;
            }
            _ if Some(pid) == self.pid => {}
            _ => return,
        }
        if born == 0 || Some(born) == self.pid {
            self.pid = None;
        }
        for slot in in_hand {
            let id = slot.swap(0, Ordering::AcqRel);
            if id != 0 {
                let _ = sys::notification_answer(listener, id, libc::EAGAIN);
            }
        }
    }

    fn run_process(
        &self,
        listener: BorrowedFd<'_>,
        shared: &'static [AtomicU64],
    ) -> io::Result<()> {
        // Single-threaded again: of init's threads only the one that forked is here.
        let (born_in_group, in_hand) = shared
            .split_first()
            .ok_or_else(|| io::Error::other("no shared memory"))?;
        if let Some(child) = self.group_access.enter()? {
            born_in_group.store(child as u64, Ordering::Release);
            sys::exit_now(0);
        }
        sys::set_process_name(c"fumehood-broker");
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        if let Ok(cpus) = rustix::thread::sched_getaffinity(Pid::from_raw(self.main)) {
            rustix::thread::sched_setaffinity(None, &cpus)?;
        }
        sys::close_all_but(listener)?;
        // So that init can look into it as into the run's other processes.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
        let pool = Arc::new(ThreadPool {
            listener: rustix::io::fcntl_dupfd_cloexec(listener, 3)?,
            sockets: self.sockets.clone(),
            in_hand,
            waiting: AtomicUsize::new(1),
            threads: AtomicUsize::new(1),
        });
        pool.serve_until_spare(true);
        Ok(())
    }
}

/// A panic is a bug of ours. One thread less would leave a caller waiting for ever; when all are gone init answers.
struct EndOnPanic;

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            sys::exit_now(1);
        }
    }
}

struct ThreadPool {
    listener: OwnedFd,
    sockets: Sockets,
    in_hand: &'static [AtomicU64],
    /// Threads that wait for a call, or were started and soon will: while there is one, no other is started.
    waiting: AtomicUsize,
    threads: AtomicUsize,
}

impl ThreadPool {
    /// Serves one call after the other until enough other threads wait for calls; the first thread stays for good.
    fn serve_until_spare(self: Arc<Self>, first: bool) {
        let _guard = EndOnPanic;
        loop {
            let Ok(call) = sys::notification_receive(self.listener.as_fd()) else {
                self.leave_if_nobody_calls();
                continue;
            };
            let still_waiting = self.waiting.fetch_sub(1, Ordering::AcqRel) - 1;
            let slot = self.in_hand.iter().find(|slot| {
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
            // Count this thread as waiting before it answers. The answer wakes the caller, and the caller's next call can
            // come before this thread runs again: it would start one more thread each time, up to the last.
            let stays = first || self.waiting.load(Ordering::Acquire) < SPARE_THREADS_MAX;
            if stays {
                self.waiting.fetch_add(1, Ordering::AcqRel);
            }
            // The caller may have died meanwhile; then nobody waits for the answer.
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

    /// `false`: as many threads as there may be have calls in hand.
    fn add_thread(self: &Arc<Self>) -> bool {
        if self.threads.fetch_add(1, Ordering::AcqRel) >= THREADS_MAX {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            return false;
        }
        let pool = Arc::clone(self);
        let small = std::thread::Builder::new().stack_size(THREAD_STACK_BYTES);
        // At the run's own limit of processes there is no second thread. Then this call is served, and the next waits.
        self.waiting.fetch_add(1, Ordering::AcqRel);
        if small.spawn(move || pool.serve_until_spare(false)).is_err() {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            self.threads.fetch_sub(1, Ordering::AcqRel);
        }
        true
    }

    fn leave_if_nobody_calls(&self) {
        let listener = self.listener.as_fd();
        let mut fds = [PollFd::new(&listener, PollFlags::IN)];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let ready = rustix::event::poll(&mut fds, Some(&at_once));
        if ready.is_ok() && fds[0].revents().contains(PollFlags::HUP) {
            sys::exit_now(0);
        }
    }
}
