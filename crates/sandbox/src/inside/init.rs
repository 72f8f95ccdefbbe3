//! Init: pid 1 of the sandbox, or the guardian at level `landlock`.
//!
//! Init reaps processes, keeps every deadline, enforces the watched limits, lets the broker serve the calls that
//! seccomp hands over, and dies last. Init does not depend on the runner: while the runner is stopped, every limit
//! still holds, and when the runner is gone, init ends the run. Init reports how the program ended over a socket that
//! the program never holds. The program cannot reach init, because init is not dumpable, is in a user namespace above
//! the program's, and blocks all signals.
//!
//! When pid 1 exits, the kernel kills whatever is left in the pid namespace. The guardian exits only when it has no
//! child left. The guardian is the subreaper of its descendants, so without children it has no descendants either: this
//! proves that all processes are dead.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, WaitOptions};

use serde::{Deserialize, Serialize};

use super::broker::Broker;
use super::dying::{DyingProcesses, DyingProgress};
use super::kill_helper::KillHelper;
use super::oom::OomWatch;
use super::processes::{self, ProcessSet};
use super::watch::{PeakUsage, TICK, WatchThread};
use crate::channel::{self, InitCommand, RunEnd, SandboxReport, Wait};
use crate::confine::seccomp;
use crate::events::{self, PollFlags, SignalQueue};
use crate::outcome::{Exit, ResourceUsage, Stop};
use crate::plan::LaunchPlan;
use crate::resources::cgroup::GroupAccess;
use crate::resources::rlimits;
use crate::spec::{LaunchPurpose, Limits, Spec};
use crate::step_report::Reporter;
use crate::sys::{self, Instruction};

/// After this many rounds of SIGKILL, init also forbids the remaining processes to fork: they fork faster than init
/// kills them.
const KILL_ROUNDS_BEFORE_FORK_BAN: u32 = 3;
/// How long init sends no SIGKILL of its own after it has closed its end of the socket to the kill helper.
const HELPER_KILL_TIME: Duration = Duration::from_millis(400);
/// How soon init checks again whether a busy broker can take another call.
const BROKER_RETRY: Duration = Duration::from_millis(1);
/// How long the last measurement of the workspace may take.
const LAST_MEASURE_MAX: Duration = Duration::from_secs(10);
/// The interval over which CPU use is compared to decide whether the program is idle.
const IDLE_SAMPLE_TIME: Duration = Duration::from_secs(1);

/// The child's message to init once it has installed its seccomp filter.
///
/// At level `landlock` these descriptors come along: the listener, the guardian's end of the kill helper's socket if
/// there is one, and the program's own files in /proc. At level `full` the filter already hands sendmsg over, so no
/// descriptor can come along, and init copies the listener by its number.
#[derive(Serialize, Deserialize)]
pub struct FilterReport {
    pub kill_helper: Option<u32>,
    /// The number of the listener among the child's descriptors, if init has to copy it.
    pub listener: Option<i32>,
}

/// The state of init's loop.
pub struct Init {
    limits: Limits,
    /// The pid of the program's first process.
    main_pid: i32,
    main_exit: Option<Exit>,
    stop: Option<Stop>,
    /// When to send SIGKILL: after the grace, and then again at every tick until all are dead.
    kill_at: Option<Instant>,
    killed: bool,
    kill_rounds: u32,
    /// When the program was allowed to start. `None` before; that wait counts against no limit.
    start: Option<Instant>,
    active_at: Instant,
    /// The CPU time in milliseconds at the last check for idleness, and the time of that check.
    idle_sample: (u64, Instant),
    /// `None` for a probe, which executes no program.
    watch: Option<WatchThread>,
    /// `None` where no cgroup counts out-of-memory kills.
    oom: Option<OomWatch>,
    oom_killed_main: Option<bool>,
    broker: Option<Broker>,
    /// The way into the run's cgroup, for the broker process.
    group_access: Option<GroupAccess>,
    /// The socket to the child. Init sends the filter once, and the child answers with one [`FilterReport`].
    child_socket: Option<OwnedFd>,
    filter: Vec<Instruction>,
    kill_helper: Option<KillHelper>,
    helper_fired_at: Option<Instant>,
    /// `Some` once init has sent SIGKILL to every process.
    dying: Option<DyingProcesses>,
    /// The program's own files in /proc. A Landlock rule for such a file holds only while the kernel keeps the file's
    /// inode, so init keeps these open.
    _own_proc_files: Vec<OwnedFd>,
    children: SignalQueue,
    spec: Spec,
    process_set: ProcessSet,
}

/// What init waits for.
enum Source {
    /// A command of the runner.
    Runner,
    /// The death of a child.
    Deaths,
    /// The listener or, before there is one, the socket to the child.
    Child,
    /// The watch thread.
    Watch,
}

impl Init {
    pub fn new(
        plan: &LaunchPlan,
        main_pid: i32,
        (watch, oom): (Option<WatchThread>, Option<OomWatch>),
        child_socket: OwnedFd,
        filter: Vec<Instruction>,
        group_access: GroupAccess,
    ) -> io::Result<Self> {
        let spec = &plan.spec;
        Ok(Init {
            limits: spec.limits.clone(),
            main_pid,
            main_exit: None,
            stop: None,
            kill_at: None,
            killed: false,
            kill_rounds: 0,
            start: None,
            active_at: Instant::now(),
            idle_sample: (0, Instant::now()),
            watch,
            oom,
            oom_killed_main: None,
            broker: None,
            group_access: Some(group_access),
            child_socket: Some(child_socket),
            filter,
            kill_helper: None,
            helper_fired_at: None,
            dying: None,
            _own_proc_files: Vec::new(),
            children: SignalQueue::of_blocked(&[libc::SIGCHLD])?,
            spec: spec.clone(),
            process_set: ProcessSet::of(spec),
        })
    }

    pub fn run(mut self, report: &mut Reporter) -> ! {
        let mut processes_left = true;
        // Nobody records a probe, so init does not wait for the runner's command to start.
        if self.spec.purpose == LaunchPurpose::Probe {
            self.start_program(None);
        }
        // After a command to stop, processes that outlive the program have the grace too.
        while self.main_exit.is_none() || self.stop.is_some() && processes_left && !self.killed {
            self.wait(report);
            processes_left = self.reap() && self.has_program_processes();
            let watch = self.watch.as_ref();
            if watch.is_some_and(WatchThread::has_ended_unexpectedly) {
                // Without the watch its limits do not hold. Exit without a report, so that the outcome is an error of
                // Fumehood's.
                self.kill_all_and_exit();
            }
            if let Some(limit) = self.take_exceeded_limit() {
                self.stop_for_limit(limit);
            }
            self.check_oom_kills();
            let now = Instant::now();
            // Init may wake after the deadline though the program ended before it. Such an end is no timeout.
            if self.main_exit.is_none() {
                self.check_idle();
                self.check_wall_time();
            }
            if self.kill_at.is_some_and(|at| now >= at) {
                self.kill_all();
            }
            self.report_dying(report);
        }
        self.finish(report)
    }

    fn check_wall_time(&mut self) {
        let wall = Duration::from_millis(self.limits.wall_ms);
        if self.stop.is_none() && self.start.is_some_and(|start| start.elapsed() >= wall) {
            self.begin_stop(Stop::WallTime);
        }
    }

    /// Stops the run if the program was idle for the whole idle limit: it printed nothing and used at most a
    /// hundredth of a CPU.
    fn check_idle(&mut self) {
        let Some(idle_ms) = self.limits.idle_ms.filter(|_| self.start.is_some()) else {
            return;
        };
        let window = self.idle_sample.1.elapsed();
        if window >= IDLE_SAMPLE_TIME.min(Duration::from_millis(idle_ms)) {
            let cpu_ms = self.peak_usage().cpu_ms;
            let used = Duration::from_millis(cpu_ms.saturating_sub(self.idle_sample.0));
            if used * 100 > window {
                self.active_at = Instant::now();
            }
            self.idle_sample = (cpu_ms, Instant::now());
        }
        if self.active_at.elapsed() >= Duration::from_millis(idle_ms) {
            self.begin_stop(Stop::IdleTime);
        }
    }

    /// Stops the run after too many out-of-memory kills, unless the program has already ended by itself.
    fn check_oom_kills(&mut self) {
        let ended_by_itself = self.main_exit.is_some() && self.stop.is_none();
        let Some(oom) = self.oom.as_mut().filter(|_| !ended_by_itself) else {
            return;
        };
        if oom.check(self.main_pid as u32) {
            self.stop_for_limit(Stop::Memory);
        }
    }

    fn peak_usage(&self) -> PeakUsage {
        let watch = self.watch.as_ref();
        watch.map(WatchThread::peak).unwrap_or_default()
    }

    fn take_exceeded_limit(&mut self) -> Option<Stop> {
        self.watch.as_mut()?.take_exceeded_limit()
    }

    /// Waits for an event or the next tick, and handles the runner's commands and the child's calls.
    fn wait(&mut self, report: &Reporter) {
        let next_tick = Instant::now() + TICK;
        let until = self.kill_at.map_or(next_tick, |at| at.min(next_tick));
        let full = self.broker.as_ref().is_some_and(Broker::is_full);
        let mut timeout = until.saturating_duration_since(Instant::now());
        if full {
            timeout = timeout.min(BROKER_RETRY);
        }
        let listener = self.broker.as_ref().and_then(Broker::listener_to_poll);
        let wanted = [
            (Source::Runner, Some(report.socket())),
            (Source::Deaths, Some(self.children.as_fd())),
            (
                Source::Child,
                listener.or(self.child_socket.as_ref().map(AsFd::as_fd)),
            ),
            (Source::Watch, self.watch.as_ref().map(AsFd::as_fd)),
        ];
        let wanted = wanted.into_iter();
        let wanted = wanted.filter_map(|(source, fd)| Some((source, fd?, PollFlags::IN)));
        let Ok(ready) = events::wait_for_any(wanted, timeout) else {
            // Init cannot keep deadlines if it cannot wait.
            self.kill_all_and_exit()
        };
        for (source, flags) in ready {
            match source {
                Source::Runner => self.handle_command(report),
                Source::Child => self.serve_child(flags),
                // The loop reaps and asks the watch at every turn.
                Source::Deaths | Source::Watch => {}
            }
        }
    }

    fn handle_command(&mut self, report: &Reporter) {
        match report.receive_command(Wait::No) {
            Ok(Some(InitCommand::Filled)) => {}
            Ok(Some(InitCommand::Go { open_on_host })) => self.start_program(open_on_host),
            Ok(Some(InitCommand::Active)) => self.active_at = Instant::now(),
            Ok(Some(InitCommand::Stop(why))) => self.begin_stop(why),
            Ok(Some(InitCommand::Kill)) => {
                self.stop.get_or_insert(Stop::Cancelled);
                self.kill_at = Some(Instant::now());
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            // The runner is gone, so end the run.
            Ok(None) | Err(_) => self.kill_all_and_exit(),
        }
    }

    /// Sends the child its filter. The child has waited for it, installs it and executes the program.
    fn start_program(&mut self, open_on_host: Option<u64>) {
        let now = Instant::now();
        (self.start, self.active_at, self.idle_sample.1) = (Some(now), now, now);
        let watch = self.watch.iter_mut();
        watch.for_each(|watch| watch.begin(open_on_host));
        let child = self.child_socket.as_ref();
        // An error means that the child has died, and init sees that when it reaps.
        let _ = child.map(|child| seccomp::send(child.as_fd(), &self.filter));
        self.filter = Vec::new();
    }

    /// Ends the run without a report. When pid 1 exits the kernel kills all other processes; the guardian kills them
    /// itself first.
    fn kill_all_and_exit(&mut self) -> ! {
        while self.process_set == ProcessSet::Descendants && self.reap() {
            self.kill_all();
            self.wait_for_deaths();
        }
        sys::exit_now(0)
    }

    /// Waits until a child has died, for at most 10 ms: some processes become children of init only later.
    fn wait_for_deaths(&self) {
        events::wait_for(&self.children, PollFlags::IN, Duration::from_millis(10));
    }

    /// Handles an event on the listener or, before there is one, on the socket to the child.
    fn serve_child(&mut self, ready: PollFlags) {
        if let Some(broker) = &mut self.broker {
            let can_serve = ready.contains(PollFlags::IN) && broker.can_serve();
            match can_serve {
                // An error means that the caller died before its call was received.
                true => drop(broker.serve()),
                // Either no process with the filter is left, or the broker may not start again. Closing the listener
                // makes further calls fail.
                false => self.broker = None,
            }
            return;
        }
        let Some(socket) = self.child_socket.take() else {
            return;
        };
        let received = channel::receive::<FilterReport>(socket.as_fd(), Wait::No);
        if let Ok(Some((filter_report, fds))) = received {
            let mut fds = fds.into_iter();
            let listener = match filter_report.listener {
                Some(number) => self.copy_child_descriptor(number).ok(),
                None => fds.next(),
            };
            // The child waits for init to close the socket before it goes on.
            drop(socket);
            // Fail closed: if there is no broker, the listener is dropped here, and every call that is handed over
            // fails.
            let group_access = self.group_access.take();
            self.broker = listener.and_then(|listener| {
                Broker::new(listener, &self.spec, group_access, self.main_pid).ok()
            });
            self.kill_helper = filter_report.kill_helper.and_then(|pid| {
                Some(KillHelper {
                    pid,
                    trigger: fds.next()?,
                })
            });
            self._own_proc_files = fds.collect();
        }
    }

    /// Copies one of the child's descriptors into this process.
    fn copy_child_descriptor(&self, number: i32) -> io::Result<OwnedFd> {
        let pid = Pid::from_raw(self.main_pid).ok_or(io::ErrorKind::NotFound)?;
        let child = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let copy = rustix::process::pidfd_getfd(&child, number, PidfdGetfdFlags::empty())?;
        Ok(copy)
    }

    /// Stops the run because it has exceeded a limit. For disk, files, memory, processes and open files, sends SIGKILL
    /// at once, because the run could use more during the grace period. For CPU time, grants the grace period.
    fn stop_for_limit(&mut self, why: Stop) {
        match why {
            Stop::Disk | Stop::Files | Stop::Memory | Stop::Pids | Stop::OpenFiles => {
                self.stop.get_or_insert(why);
                self.kill_all();
            }
            _ => self.begin_stop(why),
        }
    }

    /// Sends SIGTERM to all processes, and schedules SIGKILL for the end of the grace. The first reason to stop is the
    /// one reported.
    fn begin_stop(&mut self, why: Stop) {
        if self.kill_at.is_some() {
            return;
        }
        self.stop.get_or_insert(why);
        self.kill_at = Some(Instant::now() + Duration::from_millis(self.limits.grace_ms));
        // A process that was stopped handles SIGTERM only once it is continued.
        self.signal_all(&[libc::SIGTERM, libc::SIGCONT]);
    }

    /// Sends the signals, in order, to every process of the run.
    fn signal_all(&self, signals: &[i32]) {
        // In a private pid namespace, or with a leased uid, this process may signal only processes of the run. kill(-1)
        // then reaches all of them atomically, even while they fork.
        if self.process_set == ProcessSet::Namespace || self.spec.own_uid().is_some() {
            for signal in signals {
                let _ = sys::kill_all(*signal);
            }
            return;
        }
        for (pid, pidfd) in processes::open_descendants() {
            if signals.contains(&libc::SIGKILL) && self.kill_rounds > KILL_ROUNDS_BEFORE_FORK_BAN {
                // The processes fork faster than init kills them. Forbid forks; children inherit the ban.
                let _ = rlimits::forbid_forks(pid);
            }
            for signal in signals {
                let _ = sys::signal_pidfd(pidfd.as_fd(), *signal);
            }
        }
    }

    /// Sends SIGKILL to every process. Init repeats this at every tick until the last process is gone.
    fn kill_all(&mut self) {
        self.kill_rounds = self.kill_rounds.saturating_add(1);
        // Dropping the guardian's end of the socket makes the kill helper kill the run's processes.
        if self.kill_helper.take().is_some() {
            self.helper_fired_at = Some(Instant::now());
        }
        self.killed = true;
        self.dying
            .get_or_insert_with(|| DyingProcesses::new(self.process_set));
        self.kill_at = Some(Instant::now() + TICK);
        // The kill helper kills all processes at once. A search for the dying ones would only delay reaping them.
        if self
            .helper_fired_at
            .is_some_and(|at| at.elapsed() < HELPER_KILL_TIME)
        {
            return;
        }
        self.signal_all(&[libc::SIGKILL]);
    }

    /// Reaps every dead child: the program, its orphans, and helpers. Returns whether init still has children.
    fn reap(&mut self) -> bool {
        while self.children.take().is_some() {}
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    let pid = pid.as_raw_nonzero().get();
                    if pid == self.main_pid {
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
                        broker.note_reaped(pid);
                    }
                }
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Whether a process other than init's own helpers is left.
    fn has_program_processes(&self) -> bool {
        let kill_helper = self.kill_helper.as_ref().map(|kill_helper| kill_helper.pid);
        let broker = self.broker.as_ref().and_then(Broker::process);
        let helpers = [kill_helper, broker.map(|pid| pid as u32)];
        match self.main_exit {
            // Only once the program itself has ended: listing all processes is too costly for every tick.
            Some(_) if helpers.iter().any(Option::is_some) => processes::descendants()
                .into_iter()
                .any(|pid| !helpers.contains(&Some(pid))),
            _ => true,
        }
    }

    /// After SIGKILL: reports to the runner that processes are dying, as long as there is progress.
    fn report_dying(&mut self, report: &mut Reporter) {
        let progress = self.dying.as_mut().and_then(DyingProcesses::check);
        if progress == Some(DyingProgress::Made) {
            self.report_progress(self.wall_ms(), report);
        }
    }

    /// Reports what is known about the end so far. The runner then extends its deadline, and uses this report if no
    /// further one follows.
    fn report_progress(&self, wall_ms: u64, report: &mut Reporter) {
        let end = self.run_end(wall_ms, self.peak_usage());
        report.send(&SandboxReport::Dying(end), &[]);
    }

    fn wall_ms(&self) -> u64 {
        let wall = self.start.map_or(Duration::ZERO, |start| start.elapsed());
        wall.as_millis() as u64
    }

    fn run_end(&self, wall_ms: u64, peak: PeakUsage) -> RunEnd {
        RunEnd {
            exit: self.main_exit,
            stop: self.stop,
            usage: ResourceUsage {
                wall_ms,
                cpu_ms: peak.cpu_ms,
                memory_peak_bytes: peak.memory_bytes,
                pids_peak: (peak.pids > 0).then_some(peak.pids),
                disk_bytes: peak.disk_bytes,
                files: peak.files,
                oom_kills: 0,
                oom_killed_main: self.oom_killed_main,
            },
        }
    }

    /// The program has ended: kills what is left of the run, measures the workspace a last time, reports the end and
    /// exits.
    fn finish(mut self, report: &mut Reporter) -> ! {
        let wall_ms = self.wall_ms();
        self.kill_all();
        // The kernel kills and reaps what is left when pid 1 exits, so pid 1 gives up on processes that do not die. The
        // guardian waits for the last one.
        let in_namespace = self.process_set == ProcessSet::Namespace;
        let mut processes_left = self.reap();
        while processes_left {
            self.report_dying(report);
            let dying = self.dying.as_ref();
            if in_namespace && dying.is_some_and(DyingProcesses::is_wait_over) {
                break;
            }
            self.kill_all();
            self.wait_for_deaths();
            processes_left = self.reap();
        }
        let peak = match self.stop {
            None => {
                // The measurement may take until after the deadline. Report the end known so far at every tick, so that
                // the runner does not take it for a time-out.
                let mut at_each_tick = || self.report_progress(wall_ms, report);
                let watch = self.watch.as_ref();
                watch
                    .map(|watch| watch.finish(LAST_MEASURE_MAX, &mut at_each_tick))
                    .unwrap_or_default()
            }
            // The run was stopped, and its deadline leaves no time for another measurement.
            Some(_) => self.peak_usage(),
        };
        // The run may have passed a disk limit after the last regular measurement; that counts too.
        let by_itself = self.stop.is_none() && matches!(self.main_exit, Some(Exit::Code(_)));
        if let (true, Some(limit @ (Stop::Disk | Stop::Files))) =
            (by_itself, self.take_exceeded_limit())
        {
            self.stop = Some(limit);
        }
        let end = self.run_end(wall_ms, peak);
        let alone = in_namespace && !processes_left;
        report.send(&SandboxReport::Ended { end, alone }, &[]);
        sys::exit_now(0)
    }
}
