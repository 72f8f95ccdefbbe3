//! Pid 1 of the sandbox: reaps, keeps every deadline itself, watches the limits, serves connect(), dies last.
//!
//! It depends on the runner for nothing: a runner that is stopped suspends no limit, and one that is gone
//! ends the run. It tells how the program ended over a socket that the program never holds, and it is
//! beyond the program's reach: not dumpable, in a user namespace above, immune to signals from inside.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, WaitOptions};

use crate::broker::Broker;
use crate::channel::{self, Order, Report, Reporter, Wait};
use crate::launch::Plan;
use crate::outcome::{Exit, Stop, Usage};
use crate::spec::{Layer, Limits};
use crate::sys;
use crate::watch::{TICK, Watching};

/// After SIGKILL to all, how long init waits for the last to be reaped before it leaves itself, upon
/// which the kernel kills and reaps whatever there is.
const REAP_AT_MOST: Duration = Duration::from_millis(150);
/// The last measuring of a large tree.
const LAST_LOOK_AT_MOST: Duration = Duration::from_secs(10);
/// CPU use is looked at over this long to tell idleness.
const IDLE_SAMPLE: Duration = Duration::from_secs(1);

pub struct Init {
    limits: Limits,
    main: i32,
    main_exit: Option<Exit>,
    stop: Option<Stop>,
    kill_at: Option<Instant>,
    killed: bool,
    start: Instant,
    active_at: Instant,
    /// CPU time at the last sample for idleness, and when that was.
    sampled: (u64, Instant),
    watch: Watching,
    broker: Option<Broker>,
    /// The child's end of this brings the listener, once.
    from_child: Option<OwnedFd>,
    children: OwnedFd,
    workspace_path: PathBuf,
    all_in_one_namespace: bool,
}

impl Init {
    pub fn new(
        plan: &Plan,
        main: i32,
        watch: Watching,
        workspace_path: PathBuf,
        from_child: OwnedFd,
    ) -> io::Result<Self> {
        let spec = &plan.spec;
        Ok(Init {
            limits: spec.limits.clone(),
            main,
            main_exit: None,
            stop: None,
            kill_at: None,
            killed: false,
            start: Instant::now(),
            active_at: Instant::now(),
            sampled: (0, Instant::now()),
            watch,
            broker: None,
            from_child: spec.has(Layer::Seccomp).then_some(from_child),
            children: sys::signal_fd(&[libc::SIGCHLD])?,
            workspace_path,
            all_in_one_namespace: spec.has(Layer::PidNamespace),
        })
    }

    pub fn run(mut self, report: &mut Reporter) -> ! {
        let mut someone_left = true;
        // After an order to stop, the children that outlive the program have their grace too.
        while self.main_exit.is_none() || self.stop.is_some() && someone_left && !self.killed {
            self.wait(report);
            someone_left = self.reap();
            if let Some(passed) = self.watch.passed() {
                self.passed(passed);
            }
            let now = Instant::now();
            self.look_for_idleness();
            if self.stop.is_none()
                && self.start.elapsed() >= Duration::from_millis(self.limits.wall_ms)
            {
                self.begin_stop(Stop::WallTime);
            }
            if self.kill_at.is_some_and(|at| now >= at) {
                self.kill_all();
            }
        }
        self.finish(report)
    }

    /// Idle is: nothing printed, and less than one part in a hundred of a CPU used, for the whole time.
    fn look_for_idleness(&mut self) {
        let Some(idle_ms) = self.limits.idle_ms else {
            return;
        };
        let window = self.sampled.1.elapsed();
        if window >= IDLE_SAMPLE.min(Duration::from_millis(idle_ms)) {
            let cpu_ms = self.watch.seen().cpu_ms;
            let used = Duration::from_millis(cpu_ms.saturating_sub(self.sampled.0));
            if used * 100 > window {
                self.active_at = Instant::now();
            }
            self.sampled = (cpu_ms, Instant::now());
        }
        if self.active_at.elapsed() >= Duration::from_millis(idle_ms) {
            self.begin_stop(Stop::IdleTime);
        }
    }

    /// Sleeps until something happens or the next look is due.
    fn wait(&mut self, report: &Reporter) {
        let next_look = Instant::now() + TICK;
        let until = self.kill_at.map_or(next_look, |at| at.min(next_look));
        let timeout = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let socket = report.socket();
        let mut fds = vec![
            PollFd::new(&socket, PollFlags::IN),
            PollFd::new(&self.children, PollFlags::IN),
        ];
        let bell = self.watch.bell();
        fds.push(PollFd::new(&bell, PollFlags::IN));
        let listener = self.broker.as_ref().map(Broker::listener);
        let third = listener.or(self.from_child.as_ref().map(AsFd::as_fd));
        if let Some(third) = &third {
            fds.push(PollFd::new(third, PollFlags::IN));
        }
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return,
            // An init that cannot wait cannot keep its promises: the kernel kills all when it leaves.
            Err(_) => sys::exit_now(1),
        }
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        if !ready[0].is_empty() {
            self.obey(report);
        }
        if ready.get(3).is_some_and(|r| !r.is_empty()) {
            self.serve_child(ready[3]);
        }
    }

    fn obey(&mut self, report: &Reporter) {
        match report.receive_order(Wait::No) {
            Ok(Some(Order::Go)) => {}
            Ok(Some(Order::Active)) => self.active_at = Instant::now(),
            Ok(Some(Order::Stop(why))) => self.begin_stop(why),
            Ok(Some(Order::Kill)) => {
                self.stop.get_or_insert(Stop::Cancelled);
                self.kill_at = Some(Instant::now());
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            // The runner is gone. So is the run: the kernel kills all when init leaves.
            Ok(None) | Err(_) => sys::exit_now(0),
        }
    }

    fn serve_child(&mut self, ready: PollFlags) {
        if let Some(broker) = &mut self.broker {
            if ready.contains(PollFlags::IN) {
                // A call whose caller died before it was taken is nobody's loss.
                let _served = broker.serve();
            } else {
                // No process of the run is left to make a call.
                self.broker = None;
            }
            return;
        }
        let Some(socket) = self.from_child.take() else {
            return;
        };
        if let Ok(Some(((), mut fds))) = channel::receive::<()>(socket.as_fd(), Wait::No) {
            self.broker = fds
                .pop()
                .and_then(|listener| self.make_broker(listener).ok());
        }
    }

    /// Without a broker the listener is closed and every connect() fails: closed, not open.
    fn make_broker(&self, listener: OwnedFd) -> io::Result<Broker> {
        let open = |path: &std::path::Path| {
            let flags = rustix::fs::OFlags::PATH
                | rustix::fs::OFlags::DIRECTORY
                | rustix::fs::OFlags::CLOEXEC;
            rustix::fs::open(path, flags, rustix::fs::Mode::empty())
        };
        let own = [
            open(&self.workspace_path)?,
            open("/tmp".as_ref())?,
            open("/dev/shm".as_ref())?,
        ];
        Broker::new(listener, &[own[0].as_fd(), own[1].as_fd(), own[2].as_fd()])
    }

    /// Past a limit that more time would only make worse: killed at once. CPU time gets the grace.
    fn passed(&mut self, why: Stop) {
        match why {
            Stop::Disk | Stop::Files | Stop::Memory => {
                self.stop.get_or_insert(why);
                self.kill_all();
            }
            _ => self.begin_stop(why),
        }
    }

    /// SIGTERM to all; SIGKILL when the grace is over. The first reason stays the reason.
    fn begin_stop(&mut self, why: Stop) {
        if self.kill_at.is_some() {
            return;
        }
        self.stop.get_or_insert(why);
        self.signal_all(libc::SIGTERM);
        // A stopped process handles nothing until it is continued.
        self.signal_all(libc::SIGCONT);
        self.kill_at = Some(Instant::now() + Duration::from_millis(self.limits.grace_ms));
    }

    fn signal_all(&self, signal: i32) {
        let _none_left = if self.all_in_one_namespace {
            sys::kill_everyone(signal)
        } else {
            // Only in tests without a pid namespace: "everyone" would be all of the user's processes.
            let group =
                Pid::from_raw(self.main).zip(rustix::process::Signal::from_named_raw(signal));
            group.map_or(Ok(()), |(pid, signal)| {
                rustix::process::kill_process_group(pid, signal).map_err(Into::into)
            })
        };
    }

    /// Again at every tick until the last is gone.
    fn kill_all(&mut self) {
        self.signal_all(libc::SIGKILL);
        self.killed = true;
        self.kill_at = Some(Instant::now() + TICK);
    }

    /// Takes in every dead child: the program's, those it orphaned, the broker's.
    fn reap(&mut self) -> bool {
        while sys::read_signal(self.children.as_fd()).is_some() {}
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    let pid = pid.as_raw_nonzero().get();
                    if pid == self.main {
                        self.main_exit = status
                            .exit_status()
                            .map(Exit::Code)
                            .or(status.terminating_signal().map(Exit::Signal));
                    }
                    if let Some(broker) = &mut self.broker {
                        broker.reaped(pid);
                    }
                }
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// The program has ended: everything else ends with it.
    fn finish(mut self, report: &mut Reporter) -> ! {
        let wall_ms = self.start.elapsed().as_millis() as u64;
        let give_up = Instant::now() + REAP_AT_MOST;
        self.kill_all();
        // What is left when init leaves is killed and reaped by the kernel.
        while self.stop.is_none() && self.reap() && Instant::now() < give_up {
            self.kill_all();
            let timeout = Timespec {
                tv_sec: 0,
                tv_nsec: 10_000_000,
            };
            let _woken = poll(
                &mut [PollFd::new(&self.children, PollFlags::IN)],
                Some(&timeout),
            );
        }
        let seen = match self.stop {
            None => self.watch.finish(LAST_LOOK_AT_MOST),
            // Late already: whoever waits for the end of this run has been promised it.
            Some(_) => self.watch.seen(),
        };
        // Past a limit between the last two looks is past it all the same.
        let by_itself = self.stop.is_none() && matches!(self.main_exit, Some(Exit::Code(_)));
        if let (true, Some(passed @ (Stop::Disk | Stop::Files))) = (by_itself, self.watch.passed())
        {
            self.stop = Some(passed);
        }
        let usage = Usage {
            wall_ms,
            cpu_ms: seen.cpu_ms,
            memory_peak_bytes: seen.memory_bytes,
            pids_peak: (seen.pids > 0).then_some(seen.pids),
            disk_bytes: seen.disk_bytes,
            files: seen.files,
            oom_kills: 0,
        };
        report.tell(
            &Report::Ended {
                exit: self.main_exit,
                stop: self.stop,
                usage,
            },
            &[],
        );
        sys::exit_now(0)
    }
}
