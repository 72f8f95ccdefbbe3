//! What an event loop is made of: one wait for several descriptors, and descriptors that exist to be waited for.
//!
//! The runner, init, the watch, the worker and the lease renewal have loops of their own, because each waits for other
//! things. They share these parts. The loops call `poll`, not epoll: what they wait for changes from turn to turn, and
//! epoll would need a system call for each change. [`any_of`] uses epoll, because it needs one descriptor for several.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

pub use rustix::event::PollFlags;
use rustix::event::{EventfdFlags, PollFd, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use crate::sys;

/// Waits until a descriptor is ready, at most this long. Each descriptor comes with the event that its readiness means
/// and with the flags to wait for. Returns the events of the ready descriptors, in the order given, with the flags that
/// the kernel found. A signal ends the wait early.
pub fn wait_for_any<'fd, E>(
    wanted: impl IntoIterator<Item = (E, BorrowedFd<'fd>, PollFlags)>,
    at_most: Duration,
) -> io::Result<Vec<(E, PollFlags)>> {
    let entry = |(event, fd, flags)| (event, PollFd::from_borrowed_fd(fd, flags));
    let (events, mut fds): (Vec<E>, Vec<PollFd<'fd>>) = wanted.into_iter().map(entry).unzip();
    // A time that the kernel cannot express is longer than any process lives.
    match poll(&mut fds, Timespec::try_from(at_most).ok().as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    let found = events.into_iter().zip(fds.iter().map(PollFd::revents));
    Ok(found.filter(|(_, flags)| !flags.is_empty()).collect())
}

/// Waits until the descriptor is ready, at most this long. Returns whether it is. A failure counts as not ready.
pub fn wait_for(fd: impl AsFd, flags: PollFlags, at_most: Duration) -> bool {
    wait_for_any([((), fd.as_fd(), flags)], at_most).is_ok_and(|ready| !ready.is_empty())
}

/// Whether a read of the descriptor would not block.
pub fn is_readable(fd: impl AsFd) -> bool {
    wait_for(fd, PollFlags::IN, Duration::ZERO)
}

/// Returns a descriptor that is readable while one of these is (epoll).
pub fn any_of<'fd>(fds: impl IntoIterator<Item = BorrowedFd<'fd>>) -> io::Result<OwnedFd> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for fd in fds {
        let data = epoll::EventData::new_u64(0);
        epoll::add(&set, fd, data, epoll::EventFlags::IN)?;
    }
    Ok(set)
}

/// A descriptor by which one thread wakes another (eventfd). Clones share it.
#[derive(Clone, Debug)]
pub struct WakeEvent(Arc<OwnedFd>);

impl WakeEvent {
    /// Makes an event that is not signalled.
    pub fn new() -> io::Result<WakeEvent> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(WakeEvent(Arc::new(fd)))
    }

    /// Makes the descriptor readable.
    pub fn signal(&self) {
        // Fails if the counter is at its maximum. The descriptor is readable then.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next signal.
    pub fn clear(&self) {
        // Fails if there was no signal.
        let _ = rustix::io::read(&*self.0, &mut [0u8; 8]);
    }
}

impl AsFd for WakeEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().as_fd()
    }
}

/// The time since boot, including suspension. No change of the wall clock affects it.
pub fn boot_time() -> Duration {
    let now = rustix::time::clock_gettime(ClockId::Boottime);
    Duration::try_from(now).unwrap_or_default()
}

/// A descriptor that becomes readable at a [`boot_time`] (timerfd). Clones share it.
#[derive(Clone, Debug)]
pub struct BootTimer(Arc<OwnedFd>);

impl BootTimer {
    /// Makes a timer that is not set.
    pub fn new() -> io::Result<BootTimer> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = rustix::time::timerfd_create(TimerfdClockId::Boottime, flags)?;
        Ok(BootTimer(Arc::new(fd)))
    }

    /// Sets the timer anew.
    pub fn expire_at(&self, at: Duration) -> io::Result<()> {
        let at = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec::try_from(at).map_err(io::Error::other)?,
        };
        rustix::time::timerfd_settime(&*self.0, TimerfdTimerFlags::ABSTIME, &at)?;
        Ok(())
    }

    /// Whether the timer has expired since it was set. Returns true once.
    pub fn take_expired(&self) -> bool {
        rustix::io::read(&*self.0, &mut [0u8; 8]).is_ok()
    }
}

impl AsFd for BootTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().as_fd()
    }
}

/// Signals that are read from a descriptor between two events instead of interrupting at any moment (signalfd).
#[derive(Debug)]
pub struct SignalQueue(OwnedFd);

impl SignalQueue {
    /// Blocks the signals in this thread, and in threads that it starts later, and queues them.
    pub fn block(signals: &[i32]) -> io::Result<SignalQueue> {
        sys::block_signals(Some(signals))?;
        SignalQueue::of_blocked(signals)
    }

    /// Queues signals that are blocked already.
    pub(crate) fn of_blocked(signals: &[i32]) -> io::Result<SignalQueue> {
        sys::signal_fd(signals).map(SignalQueue)
    }

    /// Takes one signal from the queue.
    pub fn take(&self) -> Option<i32> {
        sys::read_signal(self.0.as_fd())
    }
}

impl AsFd for SignalQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
