//! Calls that the filter hands over, made on the program's behalf.
//!
//! At level `full` these are socket calls. A read-only mount does not stop a connect(), or a datagram, to a path-name
//! socket that lies in it, and seccomp cannot see the address behind the pointer. So the filter hands every connect() to a
//! process of ours (`process.rs`), and every send that may name an address, which copies the address once, takes
//! a copy of the socket, decides, and makes the call itself (`sockets.rs`). A path-name socket is reached only in the
//! workspace, the private /tmp and /dev/shm: the run's own. `SO_PEERCRED` and `SO_PASSCRED` therefore name that process.
//!
//! At level `landlock` connect() is refused, and other calls are handed over: see `syscall_proxy.rs`. Threads serve them: a child
//! of the guardian would be taken for one of the run's processes.

mod message;
mod process;
mod sockets;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::syscall_proxy::{self, SyscallProxy};
use crate::resources::cgroup::GroupAccess;
use crate::spec::{ConfinementLevel, Spec};
use crate::sys::{self, Notification};
use process::BrokerProcess;
use sockets::Sockets;

/// Calls that the syscall proxy serves at one time.
const CALLS_MAX: usize = 64;
/// Enough for a path and what resolves it.
const THREAD_STACK_BYTES: usize = 128 * 1024;

pub struct Broker {
    listener: Arc<OwnedFd>,
    duty: BrokerKind,
}

/// What is handed over, by level.
enum BrokerKind {
    /// Socket calls, by a process that takes them itself once it is started.
    Sockets(BrokerProcess),
    /// Modes, times, lengths and signals.
    Proxy {
        proxy: Arc<SyscallProxy>,
        busy: Arc<AtomicUsize>,
    },
}

impl Broker {
    pub fn new(
        listener: OwnedFd,
        spec: &Spec,
        group_access: Option<GroupAccess>,
        main: i32,
    ) -> io::Result<Self> {
        let duty = match spec.level {
            ConfinementLevel::Full => {
                let group_access = group_access.unwrap_or_default();
                BrokerKind::Sockets(BrokerProcess::new(Sockets::new(spec)?, group_access, main))
            }
            ConfinementLevel::Landlock => BrokerKind::Proxy {
                proxy: Arc::new(SyscallProxy::new(spec)),
                busy: Arc::default(),
            },
        };
        Ok(Broker {
            listener: Arc::new(listener),
            duty,
        })
    }

    fn listener(&self) -> BorrowedFd<'_> {
        (*self.listener).as_fd()
    }

    /// What tells of a call for [`Broker::serve`]; nothing while the broker process takes the calls itself, or all threads are busy.
    pub fn awaited(&self) -> Option<BorrowedFd<'_>> {
        let served_elsewhere = self.process().is_some() || self.is_full();
        (!served_elsewhere).then(|| self.listener())
    }

    /// Our own process among the run's.
    pub fn process(&self) -> Option<i32> {
        match &self.duty {
            BrokerKind::Sockets(process) => process.pid(),
            BrokerKind::Proxy { .. } => None,
        }
    }

    /// Hears of a child that init reaped.
    pub fn reaped(&mut self, pid: i32) {
        if let BrokerKind::Sockets(process) = &mut self.duty {
            process.reaped(pid, (*self.listener).as_fd());
        }
    }

    /// Whether a call is better left with the kernel for a moment. None of those that the syscall proxy serves waits for
    /// anybody, and no program expects to be told to try again.
    pub fn is_full(&self) -> bool {
        match &self.duty {
            BrokerKind::Sockets(_) => false,
            BrokerKind::Proxy { busy, .. } => busy.load(Ordering::Relaxed) >= CALLS_MAX,
        }
    }

    /// Whether there can be calls that this will have served. Without it the listener is to be closed, and every call that
    /// is handed over fails.
    pub fn can_serve(&self) -> bool {
        match &self.duty {
            BrokerKind::Sockets(process) => process.pid().is_some() || process.may_start(),
            BrokerKind::Proxy { .. } => true,
        }
    }

    /// Has the call that waits served.
    pub fn serve(&mut self) -> io::Result<()> {
        if let BrokerKind::Sockets(process) = &mut self.duty
            && process.start((*self.listener).as_fd()).is_ok()
        {
            return Ok(());
        }
        let call = sys::notification_receive(self.listener())?;
        let taken = match &self.duty {
            // Sent here and now: it never waits.
            BrokerKind::Proxy { .. } if syscall_proxy::is_signal(&call) => {
                let errno = errno_of(syscall_proxy::signal(&call, || self.valid(&call)));
                return sys::notification_answer(self.listener(), call.id, errno);
            }
            BrokerKind::Proxy { proxy, busy } => self.serve_in_thread(proxy, busy, call),
            BrokerKind::Sockets(_) => Err(io::ErrorKind::WouldBlock.into()),
        };
        // Whoever cannot be served is told so, rather than left waiting.
        match taken {
            Ok(()) => Ok(()),
            Err(_) => sys::notification_answer(self.listener(), call.id, libc::EAGAIN),
        }
    }

    fn serve_in_thread(
        &self,
        proxy: &Arc<SyscallProxy>,
        busy: &Arc<AtomicUsize>,
        call: Notification,
    ) -> io::Result<()> {
        let (listener, proxy) = (Arc::clone(&self.listener), Arc::clone(proxy));
        let slot = BusySlot::take(busy);
        let serve = move || {
            let _slot = slot;
            let valid = || sys::notification_valid(listener.as_fd(), call.id);
            let errno = errno_of(proxy.perform(&call, valid));
            // The caller may have died meanwhile; then nobody waits for the answer.
            let _ = sys::notification_answer(listener.as_fd(), call.id, errno);
        };
        let small = std::thread::Builder::new().stack_size(THREAD_STACK_BYTES);
        small.spawn(serve).map(drop)
    }

    /// The pid was the caller's all the while: nothing was read from a stranger.
    fn valid(&self, call: &Notification) -> io::Result<()> {
        sys::notification_valid(self.listener(), call.id)
    }
}

/// One of the hands that serve, counted while it does.
struct BusySlot(Arc<AtomicUsize>);

impl BusySlot {
    fn take(busy: &Arc<AtomicUsize>) -> BusySlot {
        busy.fetch_add(1, Ordering::Relaxed);
        BusySlot(Arc::clone(busy))
    }
}

impl Drop for BusySlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn errno_of(done: io::Result<()>) -> i32 {
    match done {
        Ok(()) => 0,
        Err(e) => e.raw_os_error().unwrap_or(libc::EACCES),
    }
}
