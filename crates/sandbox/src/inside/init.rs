//! Pid 1 of the sandbox, or at level `landlock` the guardian: reaps, keeps every deadline itself, watches the limits,
//! serves the calls that seccomp hands over, dies last.
//!
//! It depends on the runner for nothing: a runner that is stopped suspends no limit, and one that is gone
//! ends the run. It tells how the program ended over a socket that the program never holds, and it is
//! beyond the program's reach: not dumpable, in a user namespace above, immune to signals from inside.
//!
//! Pid 1 leaves, and the kernel kills whatever there is. The guardian cannot leave before it has no child left: being
//! the subreaper, it then has no descendant either, which is what proves that all are dead.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, WaitOptions};

use serde::{Deserialize, Serialize};

use super::broker::Broker;
use super::dying::{DyingProcesses, DyingProgress};
use super::kill_helper::KillHelper;
use super::oom::OomWatch;
use super::processes::{self, ProcessSet};
use super::watch::{PeakUsage, TICK, WatchThread};
use crate::channel::{self, InitOrder, SandboxReport, Wait};
use crate::confine::seccomp;
use crate::outcome::{Exit, ResourceUsage, Stop};
use crate::plan::LaunchPlan;
use crate::resources::cgroup::GroupAccess;
use crate::resources::rlimits;
use crate::spec::{LaunchPurpose, Limits, Spec};
use crate::step_report::Reporter;
use crate::sys::{self, Instruction};

/// Families that are still there after so many rounds are growing.
const KILL_ROUNDS_BEFORE_FORK_BAN: u32 = 3;
/// After the kill helper was triggered, init sends no SIGKILL of its own for this long.
const HELPER_KILL_TIME: Duration = Duration::from_millis(400);
/// How soon to look again whether the broker can take another call.
const BROKER_RETRY: Duration = Duration::from_millis(1);
/// The last measuring of a large tree.
const LAST_MEASURE_MAX: Duration = Duration::from_secs(10);
/// CPU use is looked at over this long to tell idleness.
const IDLE_SAMPLE: Duration = Duration::from_secs(1);

/// What the child tells init once it has its filter. Descriptors come along, if sendmsg is still allowed: the listener, what
/// the kill helper waits for, and the program's own files in /proc.
#[derive(Serialize, Deserialize)]
pub struct FilterReport {
    pub kill_helper: Option<u32>,
    /// Where the listener is among the child's descriptors, for init to take a copy.
    pub listener: Option<i32>,
}

pub struct Init {
    limits: Limits,
    main: i32,
    main_exit: Option<Exit>,
    stop: Option<Stop>,
    kill_at: Option<Instant>,
    killed: bool,
    kill_rounds: u32,
    /// `None` until the program may begin: the wait for that is not its time.
    start: Option<Instant>,
    active_at: Instant,
    /// CPU time at the last sample for idleness, and when that was.
    sampled: (u64, Instant),
    /// `None` where nothing is executed.
    watch: Option<WatchThread>,
    /// `None` where no cgroup counts kills for want of memory.
    oom: Option<OomWatch>,
    oom_killed_main: Option<bool>,
    broker: Option<Broker>,
    /// For the broker, once there is one.
    group_access: Option<GroupAccess>,
    /// The socket to the child: the filter goes to the child, then the listener comes back, once each.
    from_child: Option<OwnedFd>,
    filter: Vec<Instruction>,
    kill_helper: Option<KillHelper>,
    helper_fired_at: Option<Instant>,
    /// `Some` once every process was sent SIGKILL.
    dying: Option<DyingProcesses>,
    /// Holds what the program's rules for its own files in /proc rest on.
    _own_proc: Vec<OwnedFd>,
    children: OwnedFd,
    spec: Spec,
    process_set: ProcessSet,
}

impl Init {
    pub fn new(
        plan: &LaunchPlan,
        main: i32,
        (watch, oom): (Option<WatchThread>, Option<OomWatch>),
        from_child: OwnedFd,
        filter: Vec<Instruction>,
        group_access: GroupAccess,
    ) -> io::Result<Self> {
        let spec = &plan.spec;
        Ok(Init {
            limits: spec.limits.clone(),
            main,
            main_exit: None,
            stop: None,
            kill_at: None,
            killed: false,
            kill_rounds: 0,
            start: None,
            active_at: Instant::now(),
            sampled: (0, Instant::now()),
            watch,
            oom,
            oom_killed_main: None,
            broker: None,
            group_access: Some(group_access),
            from_child: Some(from_child),
            filter,
            kill_helper: None,
            helper_fired_at: None,
            dying: None,
            _own_proc: Vec::new(),
            children: sys::signal_fd(&[libc::SIGCHLD])?,
            spec: spec.clone(),
            process_set: ProcessSet::of(spec),
        })
    }

    pub fn run(mut self, report: &mut Reporter) -> ! {
        let mut processes_left = true;
        // Nothing is recorded of a probe.
        if self.spec.purpose == LaunchPurpose::Probe {
            self.start_program();
        }
        // After an order to stop, the children that outlive the program have their grace too.
        while self.main_exit.is_none() || self.stop.is_some() && processes_left && !self.killed {
            self.wait(report);
            processes_left = self.reap() && self.has_program_processes();
            if self.watch.as_ref().is_some_and(WatchThread::is_lost) {
                // Its limits hold no more. Without an end that is told, the outcome is an error of ours.
                self.kill_all_and_exit();
            }
            if let Some(passed) = self.watch.as_mut().and_then(WatchThread::passed) {
                self.stop_for_limit(passed);
            }
            self.check_oom_kills();
            let now = Instant::now();
            self.check_idle();
            let wall = Duration::from_millis(self.limits.wall_ms);
            if self.stop.is_none() && self.start.is_some_and(|start| start.elapsed() >= wall) {
                self.begin_stop(Stop::WallTime);
            }
            if self.kill_at.is_some_and(|at| now >= at) {
                self.kill_all();
            }
            self.report_dying(report);
        }
        self.finish(report)
    }

    /// Idle is: nothing printed, and less than one part in a hundred of a CPU used, for the whole time.
    fn check_idle(&mut self) {
        let Some(idle_ms) = self.limits.idle_ms.filter(|_| self.start.is_some()) else {
            return;
        };
        let window = self.sampled.1.elapsed();
        if window >= IDLE_SAMPLE.min(Duration::from_millis(idle_ms)) {
            let cpu_ms = self.peak_usage().cpu_ms;
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

    /// A program that has ended by itself is not stopped any more.
    fn check_oom_kills(&mut self) {
        let runs = self.main_exit.is_none() || self.stop.is_some();
        let Some(oom) = self.oom.as_mut().filter(|_| runs) else {
            return;
        };
        if oom.look(self.main as u32) {
            self.stop_for_limit(Stop::Memory);
        }
    }

    fn peak_usage(&self) -> PeakUsage {
        self.watch
            .as_ref()
            .map(WatchThread::seen)
            .unwrap_or_default()
    }

    /// Sleeps until something happens or the next look is due.
    fn wait(&mut self, report: &Reporter) {
        let next_look = Instant::now() + TICK;
        let until = self.kill_at.map_or(next_look, |at| at.min(next_look));
        let full = self.broker.as_ref().is_some_and(Broker::is_full);
        let mut timeout = until.saturating_duration_since(Instant::now());
        if full {
            timeout = timeout.min(BROKER_RETRY);
        }
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let socket = report.socket();
        let mut fds = vec![
            PollFd::new(&socket, PollFlags::IN),
            PollFd::new(&self.children, PollFlags::IN),
        ];
        let listener = self.broker.as_ref().and_then(Broker::awaited);
        let third = listener.or(self.from_child.as_ref().map(AsFd::as_fd));
        let third_at = third.as_ref().map(|fd| {
            fds.push(PollFd::new(fd, PollFlags::IN));
            fds.len() - 1
        });
        let event_fd = self.watch.as_ref().map(WatchThread::event_fd);
        fds.extend(
            event_fd
                .as_ref()
                .map(|event_fd| PollFd::new(event_fd, PollFlags::IN)),
        );
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return,
            // An init that cannot wait cannot keep its promises.
            Err(_) => self.kill_all_and_exit(),
        }
        let ready: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        if !ready[0].is_empty() {
            self.handle_order(report);
        }
        if let Some(ready) = third_at.map(|at| ready[at]).filter(|r| !r.is_empty()) {
            self.serve_child(ready);
        }
    }

    fn handle_order(&mut self, report: &Reporter) {
        match report.receive_order(Wait::No) {
            Ok(Some(InitOrder::Filled)) => {}
            Ok(Some(InitOrder::Go)) => self.start_program(),
            Ok(Some(InitOrder::Active)) => self.active_at = Instant::now(),
            Ok(Some(InitOrder::Stop(why))) => self.begin_stop(why),
            Ok(Some(InitOrder::Kill)) => {
                self.stop.get_or_insert(Stop::Cancelled);
                self.kill_at = Some(Instant::now());
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            // The runner is gone. So is the run.
            Ok(None) | Err(_) => self.kill_all_and_exit(),
        }
    }

    fn start_program(&mut self) {
        let now = Instant::now();
        (self.start, self.active_at, self.sampled.1) = (Some(now), now, now);
        self.watch.iter_mut().for_each(WatchThread::begin);
        let child = self.from_child.as_ref();
        // One that has died shows as that.
        let _ = child.map(|child| seccomp::send(child.as_fd(), &self.filter));
        self.filter = Vec::new();
    }

    /// Nobody is left to tell anything: the kernel kills all when pid 1 leaves, the guardian does it itself.
    fn kill_all_and_exit(&mut self) -> ! {
        while self.process_set == ProcessSet::Descendants && self.reap() {
            self.kill_all();
            self.wait_for_deaths();
        }
        sys::exit_now(0)
    }

    /// Until a child has died, or for a moment: some may not be children yet.
    fn wait_for_deaths(&self) {
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 10_000_000,
        };
        let mut fds = [PollFd::new(&self.children, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&timeout));
    }

    fn serve_child(&mut self, ready: PollFlags) {
        if let Some(broker) = &mut self.broker {
            let is_wanted = ready.contains(PollFlags::IN) && broker.can_serve();
            match is_wanted {
                // A call whose caller died before it was taken is nobody's loss.
                true => drop(broker.serve()),
                // No process of the run is left to make a call; or nobody is to serve it, and it fails.
                false => self.broker = None,
            }
            return;
        }
        let Some(socket) = self.from_child.take() else {
            return;
        };
        let heard = channel::receive::<FilterReport>(socket.as_fd(), Wait::No);
        if let Ok(Some((told, fds))) = heard {
            let mut fds = fds.into_iter();
            let listener = match told.listener {
                Some(number) => self.copy_child_descriptor(number).ok(),
                None => fds.next(),
            };
            // The child waits for this.
            drop(socket);
            // Without a broker the listener is closed and every call handed over fails: closed, not open.
            let group_access = self.group_access.take();
            self.broker = listener.and_then(|listener| {
                Broker::new(listener, &self.spec, group_access, self.main).ok()
            });
            self.kill_helper = told.kill_helper.and_then(|pid| {
                Some(KillHelper {
                    pid,
                    trigger: fds.next()?,
                })
            });
            self._own_proc = fds.collect();
        }
    }

    /// A copy of one of the child's descriptors.
    fn copy_child_descriptor(&self, number: i32) -> io::Result<OwnedFd> {
        let pid = Pid::from_raw(self.main).ok_or(io::ErrorKind::NotFound)?;
        let child = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let taken = rustix::process::pidfd_getfd(&child, number, PidfdGetfdFlags::empty())?;
        Ok(taken)
    }

    /// Past a limit that more time would only make worse: killed at once. CPU time gets the grace.
    fn stop_for_limit(&mut self, why: Stop) {
        match why {
            Stop::Disk | Stop::Files | Stop::Memory | Stop::Pids | Stop::OpenFiles => {
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
        self.kill_at = Some(Instant::now() + Duration::from_millis(self.limits.grace_ms));
        // A stopped process handles nothing until it is continued.
        self.signal_all(&[libc::SIGTERM, libc::SIGCONT]);
    }

    /// Sends the signals, in their order, to every process of the run.
    fn signal_all(&self, signals: &[i32]) {
        // In a pid namespace of its own, or with a uid of its own, everyone whom this process may signal is of the run,
        // and the kernel reaches them all at once, whoever forks meanwhile.
        if self.process_set == ProcessSet::Namespace || self.spec.own_uid().is_some() {
            for signal in signals {
                let _ = sys::kill_all(*signal);
            }
            return;
        }
        for (pid, held) in processes::open_descendants() {
            if signals.contains(&libc::SIGKILL) && self.kill_rounds > KILL_ROUNDS_BEFORE_FORK_BAN {
                // Who forks faster than we look forks no more: its children inherit this.
                let _ = rlimits::forbid_forks(pid);
            }
            for signal in signals {
                let _ = sys::signal_pidfd(held.as_fd(), *signal);
            }
        }
    }

    /// Again at every tick until the last is gone.
    fn kill_all(&mut self) {
        self.kill_rounds = self.kill_rounds.saturating_add(1);
        // The kill helper fires when nobody holds the other end of its socket.
        if self.kill_helper.take().is_some() {
            self.helper_fired_at = Some(Instant::now());
        }
        self.killed = true;
        self.dying
            .get_or_insert_with(|| DyingProcesses::new(self.process_set));
        self.kill_at = Some(Instant::now() + TICK);
        // All are hit at once; to look for those who are dying would only keep them from being reaped.
        if self
            .helper_fired_at
            .is_some_and(|at| at.elapsed() < HELPER_KILL_TIME)
        {
            return;
        }
        self.signal_all(&[libc::SIGKILL]);
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
                        if self.main_exit == Some(Exit::Signal(libc::SIGKILL)) {
                            let oom = self.oom.as_mut();
                            self.oom_killed_main = oom.and_then(OomWatch::has_killed_main);
                        }
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

    /// Whether any of the children is the program's.
    fn has_program_processes(&self) -> bool {
        let kill_helper = self.kill_helper.as_ref().map(|kill_helper| kill_helper.pid);
        let broker = self.broker.as_ref().and_then(Broker::process);
        let ours = [kill_helper, broker.map(|pid| pid as u32)];
        match self.main_exit {
            // Asked for only when the program itself has ended: a walk through all processes is not for every tick.
            Some(_) if ours.iter().any(Option::is_some) => processes::descendants()
                .into_iter()
                .any(|pid| !ours.contains(&Some(pid))),
            _ => true,
        }
    }

    /// After SIGKILL to all: tells the runner that they are dying, for as long as they are seen to.
    fn report_dying(&mut self, report: &mut Reporter) {
        let progress = self.dying.as_mut().and_then(DyingProcesses::look);
        if progress == Some(DyingProgress::Made) {
            self.report_progress(self.wall_ms(), report);
        }
    }

    /// What is known of the end so far. The runner then has patience with init, and keeps this should init not tell more.
    fn report_progress(&self, wall_ms: u64, report: &mut Reporter) {
        report.send(
            &SandboxReport::Dying {
                exit: self.main_exit,
                stop: self.stop,
                usage: self.usage(wall_ms, self.peak_usage()),
            },
            &[],
        );
    }

    fn wall_ms(&self) -> u64 {
        let wall = self.start.map_or(Duration::ZERO, |start| start.elapsed());
        wall.as_millis() as u64
    }

    fn usage(&self, wall_ms: u64, seen: PeakUsage) -> ResourceUsage {
        ResourceUsage {
            wall_ms,
            cpu_ms: seen.cpu_ms,
            memory_peak_bytes: seen.memory_bytes,
            pids_peak: (seen.pids > 0).then_some(seen.pids),
            disk_bytes: seen.disk_bytes,
            files: seen.files,
            oom_kills: 0,
            oom_killed_main: self.oom_killed_main,
        }
    }

    /// The program has ended: everything else ends with it.
    fn finish(mut self, report: &mut Reporter) -> ! {
        let wall_ms = self.wall_ms();
        self.kill_all();
        // What is left when pid 1 leaves is killed and reaped by the kernel. The guardian waits for the last.
        let bounded = self.process_set == ProcessSet::Namespace;
        let mut processes_left = self.reap();
        while processes_left {
            self.report_dying(report);
            if bounded && self.dying.as_ref().is_some_and(DyingProcesses::is_hopeless) {
                break;
            }
            self.kill_all();
            self.wait_for_deaths();
            processes_left = self.reap();
        }
        let seen = match self.stop {
            None => {
                // The look may take longer than until the deadline, and a program that ended before it did not time out.
                let mut tell = || self.report_progress(wall_ms, report);
                let watch = self.watch.as_ref();
                watch
                    .map(|watch| watch.finish(LAST_MEASURE_MAX, &mut tell))
                    .unwrap_or_default()
            }
            // Late already: whoever waits for the end of this run has been promised it.
            Some(_) => self.peak_usage(),
        };
        // Past a limit between the last two looks is past it all the same.
        let by_itself = self.stop.is_none() && matches!(self.main_exit, Some(Exit::Code(_)));
        if let (true, Some(passed @ (Stop::Disk | Stop::Files))) =
            (by_itself, self.watch.as_mut().and_then(WatchThread::passed))
        {
            self.stop = Some(passed);
        }
        let usage = self.usage(wall_ms, seen);
        report.send(
            &SandboxReport::Ended {
                exit: self.main_exit,
                stop: self.stop,
                usage,
                alone: bounded && !processes_left,
            },
            &[],
        );
        sys::exit_now(0)
    }
}
