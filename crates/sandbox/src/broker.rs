//! connect() on the program's behalf.
//!
//! A read-only mount does not stop connect() to a path-name socket that lies in it, and seccomp cannot see the
//! address behind the pointer. So the filter hands every connect() to init, which copies the address once,
//! takes a copy of the socket, decides, and connects itself; the kernel is never told to go on
//! with the program's own memory, which it could have changed meanwhile. A path-name socket is
//! reached only in the workspace, the private /tmp and /dev/shm: the run's own.
//!
//! Each call is served by a short-lived child of init, since a connect may block; their number is bounded.
//! `SO_PEERCRED` therefore names init's uid (the same) and the child's pid.
//!
//! At level `landlock` connect() is refused, and other calls are handed over: see `deputy.rs`. Threads serve them: a child
//! of the guardian would be taken for one of the run's processes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::deputy::{self, Deputy};
use crate::spec::{Level, Spec};
use crate::sys::{self, Forked, Notification};

/// Calls served at one time. More get EAGAIN, as from a full backlog.
const IN_HAND_MAX: usize = 64;
/// Enough for a path and what resolves it.
const THREAD_STACK_BYTES: usize = 128 * 1024;
/// struct sockaddr_storage.
const ADDRESS_BYTES_MAX: usize = 128;

pub struct Broker {
    listener: Arc<OwnedFd>,
    duty: Duty,
}

/// What is handed over, by level.
enum Duty {
    /// connect(), to sockets in these mounts: those are the run's own.
    Connect {
        own_mounts: Vec<u64>,
        in_hand: Vec<i32>,
    },
    /// Modes, times, lengths and signals.
    Deputy {
        deputy: Arc<Deputy>,
        in_hand: Arc<AtomicUsize>,
    },
}

impl Broker {
    pub fn new(listener: OwnedFd, spec: &Spec) -> io::Result<Self> {
        let duty = match spec.level {
            Level::Full => {
                let own = [
                    spec.workspace.as_path(),
                    "/tmp".as_ref(),
                    "/dev/shm".as_ref(),
                ];
                let mounts = own.iter().map(|path| {
                    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                    mount_id(rustix::fs::open(*path, flags, Mode::empty())?.as_fd())
                });
                Duty::Connect {
                    own_mounts: mounts.collect::<io::Result<_>>()?,
                    in_hand: Vec::new(),
                }
            }
            Level::Landlock => Duty::Deputy {
                deputy: Arc::new(Deputy::new(spec)),
                in_hand: Arc::default(),
            },
        };
        Ok(Broker {
            listener: Arc::new(listener),
            duty,
        })
    }

    pub fn listener(&self) -> BorrowedFd<'_> {
        (*self.listener).as_fd()
    }

    /// Forgets a child that init reaped.
    pub fn reaped(&mut self, pid: i32) {
        if let Duty::Connect { in_hand, .. } = &mut self.duty {
            in_hand.retain(|p| *p != pid);
        }
    }

    /// Whether a call is better left with the kernel for a moment. None of those that the deputy serves waits for
    /// anybody, and no program expects to be told to try again.
    pub fn is_full(&self) -> bool {
        match &self.duty {
            Duty::Connect { .. } => false,
            Duty::Deputy { in_hand, .. } => in_hand.load(Ordering::Relaxed) >= IN_HAND_MAX,
        }
    }

    /// Takes one call and has it served.
    pub fn serve(&mut self) -> io::Result<()> {
        let call = sys::notification_receive(self.listener())?;
        let taken = match &self.duty {
            // Sent here and now: it never waits.
            Duty::Deputy { .. } if deputy::is_signal(&call) => {
                let errno = errno_of(deputy::signal(&call, || self.valid(&call)));
                return sys::notification_answer(self.listener(), call.id, errno);
            }
            Duty::Deputy { deputy, in_hand } => self.in_a_thread(deputy, in_hand, call),
            Duty::Connect { .. } => self.in_a_child(&call),
        };
        // Whoever cannot be served is told so, rather than left waiting.
        match taken {
            Ok(()) => Ok(()),
            Err(_) => sys::notification_answer(self.listener(), call.id, libc::EAGAIN),
        }
    }

    fn in_a_thread(
        &self,
        deputy: &Arc<Deputy>,
        in_hand: &Arc<AtomicUsize>,
        call: Notification,
    ) -> io::Result<()> {
        let (listener, deputy) = (Arc::clone(&self.listener), Arc::clone(deputy));
        let hand = Hand::take(in_hand);
        let serve = move || {
            let _until_answered = hand;
            let valid = || sys::notification_valid(listener.as_fd(), call.id);
            let errno = errno_of(deputy.perform(&call, valid));
            // The caller may have died meanwhile; then nobody waits for the answer.
            let _answered = sys::notification_answer(listener.as_fd(), call.id, errno);
        };
        let small = std::thread::Builder::new().stack_size(THREAD_STACK_BYTES);
        small.spawn(serve).map(drop)
    }

    fn in_a_child(&mut self, call: &Notification) -> io::Result<()> {
        let Duty::Connect {
            own_mounts,
            in_hand,
        } = &self.duty
        else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        if in_hand.len() >= IN_HAND_MAX {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        match sys::fork_threaded()? {
            Forked::Parent { child } => {
                if let Duty::Connect { in_hand, .. } = &mut self.duty {
                    in_hand.push(child);
                }
                Ok(())
            }
            Forked::Child => {
                let errno = errno_of(self.connect(call, own_mounts));
                // The caller may have died meanwhile; then nobody waits for the answer.
                let _answered = sys::notification_answer(self.listener(), call.id, errno);
                sys::exit_now(0)
            }
        }
    }

    /// The pid was the caller's all the while: nothing was read from a stranger.
    fn valid(&self, call: &Notification) -> io::Result<()> {
        sys::notification_valid(self.listener(), call.id)
    }

    fn connect(&self, call: &Notification, own_mounts: &[u64]) -> io::Result<()> {
        let length = call.args[2] as u32 as usize;
        if !(2..=ADDRESS_BYTES_MAX).contains(&length) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut address = vec![0u8; length];
        let read = sys::read_memory(call.pid, call.args[1], &mut address)
            .map_err(|_| io::Error::from_raw_os_error(libc::EFAULT))?;
        if read != length {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        let socket = self.socket_of(call)?;
        self.valid(call)?;
        let family = u16::from_ne_bytes([address[0], address[1]]);
        // What counts is the socket's own family; an address of another makes the kernel refuse.
        let path_name = family == libc::AF_UNIX as u16 && length > 2 && address[2] != 0;
        if !path_name {
            return sys::connect_raw(socket.as_fd(), &address);
        }
        let path = address[2..].split(|b| *b == 0).next().unwrap_or_default();
        let target = own_socket(call.pid, path, own_mounts)?;
        let through = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&target));
        let mut own_address = address[..2].to_vec();
        own_address.extend_from_slice(through.as_bytes());
        own_address.push(0);
        sys::connect_raw(socket.as_fd(), &own_address)
    }

    fn socket_of(&self, call: &Notification) -> io::Result<OwnedFd> {
        let bad = |errno| move |_| io::Error::from_raw_os_error(errno);
        // The notification names a thread; descriptors belong to its process. Threads share them unless they
        // unshared their table, in which case the copy below is of the leader's socket: still
        // one of the program's own.
        let leader = thread_group(call.pid)?;
        let pid = Pid::from_raw(leader).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        let process =
            rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(bad(libc::ESRCH))?;
        rustix::process::pidfd_getfd(&process, call.args[0] as i32, PidfdGetfdFlags::empty())
            .map_err(bad(libc::EBADF))
    }
}

/// Opens the socket that a path leads to from the caller's working directory, if it is the run's own.
fn own_socket(pid: u32, path: &[u8], own_mounts: &[u64]) -> io::Result<OwnedFd> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::path::Path::new(std::ffi::OsStr::from_bytes(path));
    let walk = OFlags::PATH | OFlags::CLOEXEC;
    let here = rustix::fs::open(
        format!("/proc/{pid}/cwd"),
        walk | OFlags::DIRECTORY,
        Mode::empty(),
    )?;
    // No magic links: `/proc/self/fd/N` would be a descriptor of ours, and lead to the host.
    let resolve = ResolveFlags::NO_MAGICLINKS;
    let target =
        rustix::fs::openat2(&here, path, walk, Mode::empty(), resolve).map_err(not_found)?;
    if FileType::from_raw_mode(rustix::fs::fstat(&target)?.st_mode) != FileType::Socket {
        return Err(io::Error::from_raw_os_error(libc::ECONNREFUSED));
    }
    match own_mounts.contains(&mount_id(target.as_fd())?) {
        true => Ok(target),
        false => Err(io::Error::from_raw_os_error(libc::EACCES)),
    }
}

/// One of the hands that serve, counted while it does.
struct Hand(Arc<AtomicUsize>);

impl Hand {
    fn take(busy: &Arc<AtomicUsize>) -> Hand {
        busy.fetch_add(1, Ordering::Relaxed);
        Hand(Arc::clone(busy))
    }
}

impl Drop for Hand {
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

pub(crate) fn thread_group(thread: u32) -> io::Result<i32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"))?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("Tgid:"))
        .and_then(|n| n.trim().parse().ok())
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}

/// What the program is told when a path led nowhere. That a magic link was met would say which descriptors we have open.
pub(crate) fn not_found(error: rustix::io::Errno) -> io::Error {
    match error {
        rustix::io::Errno::LOOP => io::Error::from_raw_os_error(libc::ENOENT),
        other => other.into(),
    }
}

fn mount_id(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    match stat.stx_mask & StatxFlags::MNT_ID.bits() {
        0 => Err(io::Error::from_raw_os_error(libc::ENOSYS)),
        _ => Ok(stat.stx_mnt_id),
    }
}
