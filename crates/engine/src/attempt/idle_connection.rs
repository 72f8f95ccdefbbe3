//! The database connection while the program runs.
//!
//! Most programs end soon, and opening a connection costs more than all statements of an attempt. So the connection is
//! kept for one second. Then it is closed: a program may run for hours, a server has a bounded number of connections,
//! nobody can move or repair a database file that is held open, and a runner that only waits should use little memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use store::Store;

/// How long the connection is kept for a program that may end at any moment.
const HELD_S: i64 = 1;

/// A connection that nobody uses, and the timer that ends it.
pub(super) struct IdleConnection {
    store: Option<Store>,
    timer: Option<HoldTimer>,
}

/// A timer, combined with the control descriptor of the observer.
struct HoldTimer {
    timer: OwnedFd,
    /// An epoll descriptor. It is readable when either of the two is.
    either: OwnedFd,
}

impl IdleConnection {
    /// `control_fd` is the observer's descriptor for control requests, if it has one.
    pub fn new(store: Option<Store>, control_fd: Option<BorrowedFd<'_>>) -> IdleConnection {
        match HoldTimer::start(control_fd) {
            Ok(timer) => IdleConnection {
                store,
                timer: Some(timer),
            },
            // Without a timer nothing would close the connection later, so close it now.
            Err(_) => IdleConnection {
                store: None,
                timer: None,
            },
        }
    }

    /// What to poll in place of `control_fd` while the timer runs.
    pub fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.timer.as_ref().map(|timer| timer.either.as_fd())
    }

    /// Whether the timer has expired. If so, closes the connection.
    pub fn release_if_due(&mut self) -> bool {
        let Some(timer) = &self.timer else {
            return false;
        };
        let mut times = [0u8; 8];
        let is_due = rustix::io::read(&timer.timer, &mut times).is_ok();
        if is_due {
            self.timer = None;
            // Closing checkpoints the write-ahead log by its file name. Skip that if another database has the name by
            // now.
            drop(self.store.take_if(|store| store.files_in_place()));
            // The program may run for hours, and this process only passes on its output.
            sandbox::drop_code_pages();
        }
        is_due
    }

    pub fn into_store(self) -> Option<Store> {
        self.store
    }
}

impl HoldTimer {
    fn start(control_fd: Option<BorrowedFd<'_>>) -> io::Result<HoldTimer> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [Some(timer.as_fd()), control_fd].into_iter().flatten() {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&either, fd, data, epoll::EventFlags::IN)?;
        }
        let (never, once) = ((0, 0), (HELD_S, 0));
        let time = |(tv_sec, tv_nsec)| Timespec { tv_sec, tv_nsec };
        let at = Itimerspec {
            it_interval: time(never),
            it_value: time(once),
        };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &at)?;
        Ok(HoldTimer { timer, either })
    }
}
