//! The broker: makes the calls that the seccomp filter hands over, on the program's behalf.
//!
//! At level `full` these are socket calls. A read-only mount does not stop a connect() or a datagram to a path-name
//! socket in it, and seccomp cannot see the address behind a pointer. So the filter hands every connect(), and every
//! send that may name an address, to a separate process (`process.rs`). That process copies the address once, copies
//! the socket, decides, and makes the call itself (`sockets.rs`). The program can reach path-name sockets only in the
//! workspace, the private /tmp and /dev/shm, which belong to the run. Since the broker process makes the call,
//! `SO_PEERCRED` and `SO_PASSCRED` name that process.
//!
//! At level `landlock` the filter refuses connect() and hands other calls over; see `syscall_proxy.rs`. Threads of the
//! guardian serve these calls, because a child process of the guardian would count as one of the run's processes.

mod message;
mod process;
mod sockets;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::syscall_proxy::{self, SyscallProxy};
use crate::resources::cgroup::GroupAccess;
use crate::spec::{ConfinementLevel, Spec};
use crate::sys::{self, Notification};
use process::BrokerProcess;
use sockets::Sockets;

/// How many calls the syscall proxy serves at one time.
const CALLS_MAX: usize = 64;
/// Enough for a path and its resolution.
const THREAD_STACK_BYTES: usize = 128 * 1024;

/// Serves the calls of one seccomp listener.
pub struct Broker {
    listener: Arc<OwnedFd>,
    kind: BrokerKind,
}

/// Which calls are handed over, and who serves them.
enum BrokerKind {
    /// Level `full`: socket calls. A separate process receives and serves them once it is started.
    Sockets(BrokerProcess),
    /// Level `landlock`: calls that change modes, times and lengths of files, or send signals. Threads serve them.
    /// Each thread holds a clone, so the number of clones is the number of calls in progress.
    Proxy(Arc<SyscallProxy>),
}

impl Broker {
    pub fn new(
        listener: OwnedFd,
        spec: &Spec,
        group_access: Option<GroupAccess>,
        main_pid: i32,
    ) -> io::Result<Self> {
        let kind = match spec.level {
            ConfinementLevel::Full => {
                let group_access = group_access.unwrap_or_default();
                BrokerKind::Sockets(BrokerProcess::new(
                    Sockets::new(spec)?,
                    group_access,
                    main_pid,
                ))
            }
            ConfinementLevel::Landlock => BrokerKind::Proxy(Arc::new(SyscallProxy::new(spec))),
        };
        Ok(Broker {
            listener: Arc::new(listener),
            kind,
        })
    }

    fn listener(&self) -> BorrowedFd<'_> {
        (*self.listener).as_fd()
    }

    /// The descriptor that is readable when there is a call for [`Broker::serve`]. `None` while the broker process
    /// receives the calls itself, or while all threads are busy.
    pub fn listener_to_poll(&self) -> Option<BorrowedFd<'_>> {
        let served_elsewhere = self.process().is_some() || self.is_full();
        (!served_elsewhere).then(|| self.listener())
    }

    /// The pid of the broker process, if it runs.
    pub fn process(&self) -> Option<i32> {
        match &self.kind {
            BrokerKind::Sockets(process) => process.pid(),
            BrokerKind::Proxy(_) => None,
        }
    }

    /// Records that init has reaped a child, which may be the broker process.
    pub fn note_reaped(&mut self, pid: i32) {
        if let BrokerKind::Sockets(process) = &mut self.kind {
            process.note_reaped(pid, (*self.listener).as_fd());
        }
    }

    /// Whether the syscall proxy serves as many calls as it may, so that further calls are left with the kernel for a
    /// moment. The proxy's calls never wait for another process, so this passes soon. EAGAIN is no alternative, because
    /// no program expects it from these calls.
    pub fn is_full(&self) -> bool {
        match &self.kind {
            BrokerKind::Sockets(_) => false,
            BrokerKind::Proxy(proxy) => Arc::strong_count(proxy) > CALLS_MAX,
        }
    }

    /// Whether calls can still be served. If not, the caller must close the listener, so that every call that is handed
    /// over fails.
    pub fn can_serve(&self) -> bool {
        match &self.kind {
            BrokerKind::Sockets(process) => process.pid().is_some() || process.may_start(),
            BrokerKind::Proxy(_) => true,
        }
    }

    /// Has one waiting call served: starts the broker process, or a thread.
    pub fn serve(&mut self) -> io::Result<()> {
        if let BrokerKind::Sockets(process) = &mut self.kind
            && process.start((*self.listener).as_fd()).is_ok()
        {
            return Ok(());
        }
        let call = sys::notification_receive(self.listener())?;
        let served = match &self.kind {
            // Send a signal without a thread, because this never waits.
            BrokerKind::Proxy(_) if syscall_proxy::is_signal(&call) => {
                let errno = errno_of(syscall_proxy::signal(&call, || self.valid(&call)));
                return sys::notification_answer(self.listener(), call.id, errno);
            }
            BrokerKind::Proxy(proxy) => self.serve_in_thread(proxy, call),
            BrokerKind::Sockets(_) => Err(io::ErrorKind::WouldBlock.into()),
        };
        // If the call cannot be served, answer it rather than leave the caller waiting.
        match served {
            Ok(()) => Ok(()),
            Err(_) => sys::notification_answer(self.listener(), call.id, libc::EAGAIN),
        }
    }

    fn serve_in_thread(&self, proxy: &Arc<SyscallProxy>, call: Notification) -> io::Result<()> {
        let (listener, proxy) = (Arc::clone(&self.listener), Arc::clone(proxy));
        let serve = move || {
            let valid = || sys::notification_valid(listener.as_fd(), call.id);
            let errno = errno_of(proxy.perform(&call, valid));
            // An error means that the caller has died meanwhile and waits for no answer.
            let _ = sys::notification_answer(listener.as_fd(), call.id, errno);
        };
        let small = std::thread::Builder::new().stack_size(THREAD_STACK_BYTES);
        small.spawn(serve).map(drop)
    }

    /// Fails if the caller no longer waits. If this succeeds, the pid has belonged to the caller all the time, so
    /// nothing was read from another process.
    fn valid(&self, call: &Notification) -> io::Result<()> {
        sys::notification_valid(self.listener(), call.id)
    }
}

fn errno_of(done: io::Result<()>) -> i32 {
    match done {
        Ok(()) => 0,
        Err(e) => e.raw_os_error().unwrap_or(libc::EACCES),
    }
}
