//! What a runner holds while the program runs. Most programs end soon, and making a connection to the database costs more
//! than all that is said on it; others run for hours, a server has a bounded number of connections, a file that is held
//! open is none that anybody could move or mend meanwhile, and a runner that only waits should take little room.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use store::Store;

/// For how long a connection is held for a program that may end any moment.
const HELD_S: i64 = 1;

/// A connection at rest.
pub(super) struct Resting {
    store: Option<Store>,
    clock: Option<Clock>,
}

/// Tells when the time is over, together with whatever else is listened to.
struct Clock {
    timer: OwnedFd,
    /// Readable when either is.
    either: OwnedFd,
}

impl Resting {
    /// `besides` is what whoever runs the program listens to.
    pub fn new(store: Option<Store>, besides: Option<BorrowedFd<'_>>) -> Resting {
        match Clock::start(besides) {
            Ok(clock) => Resting {
                store,
                clock: Some(clock),
            },
            // Without a clock there is no holding on.
            Err(_) => Resting {
                store: None,
                clock: None,
            },
        }
    }

    /// What is to be listened to in place of `besides`, as long as there is something.
    pub fn listens(&self) -> Option<BorrowedFd<'_>> {
        self.clock.as_ref().map(|clock| clock.either.as_fd())
    }

    /// Whether it was only the clock. Then the connection is let go.
    pub fn rang(&mut self) -> bool {
        let Some(clock) = &self.clock else {
            return false;
        };
        let mut times = [0u8; 8];
        let rang = rustix::io::read(&clock.timer, &mut times).is_ok();
        if rang {
            self.clock = None;
            // Closing puts its log in order, by name: not where that is another's by now.
            drop(self.store.take_if(|store| store.files_in_place()));
            // The program may run for hours, and nothing is to be done here but to pass its output on.
            sandbox::drop_code_pages();
        }
        rang
    }

    pub fn wake(self) -> Option<Store> {
        self.store
    }
}

impl Clock {
    fn start(besides: Option<BorrowedFd<'_>>) -> io::Result<Clock> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [Some(timer.as_fd()), besides].into_iter().flatten() {
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
        Ok(Clock { timer, either })
    }
}
