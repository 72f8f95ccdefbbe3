//! The runner's side of a run: start the launcher, pass the streams, wait for the end, and keep the backstop deadline.
//!
//! Init keeps the run's deadlines (`inside/init.rs`). The runner keeps only a later deadline, the backstop. If init has
//! not ended the run in time, the runner ends it. At level `full` the runner kills init, and the kernel kills the whole
//! pid namespace with it. At level `landlock` the runner commands the guardian to kill, and kills the run's cgroup and
//! the processes of its leased uid, as far as the run has them. If the runner cannot prove that all processes are dead,
//! the outcome says so.

mod error;
mod handler;
mod init_exit;
mod launcher_process;
mod stdio;
mod streams;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::process::{Pid, WaitId, WaitIdOptions};

use crate::channel::{self, InitCommand, RunEnd, SandboxReport, Wait};
use crate::events::{self, PollFlags};
use crate::inside::dying::BACKSTOP;
use crate::inside::watch::open_on_host;
use crate::launch::standby;
pub use crate::launch_step::LaunchStep;
use crate::outcome::{Outcome, ResourceUsage, Stop};
use crate::plan::{self, LaunchPlan};
use crate::resources::cgroup::Group;
use crate::spec::{Hardness, LaunchPurpose, Layer, LimitName, Spec, Terminal, WorkspaceKind};
use crate::step_report;
use crate::sys;
pub use error::RunError;
use error::start;
pub(crate) use handler::SilentHandler;
pub use handler::{Control, Stream, SupervisorHandler};
pub use init_exit::InitExit;
use stdio::{pipe, set_nonblocking, stdin_pair};
use streams::{StreamEvent, Streams};

/// How long building the sandbox may take. This time does not count against the program's limits.
const BUILD_TIME_MAX: Duration = Duration::from_secs(30);
/// How often the runner tells init that the program is active while its output is blocked: a program that waits for the
/// handler is not idle.
const BLOCKED_REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// The shortest time between two reports to init that the program is active.
const ACTIVITY_REPORT_INTERVAL: Duration = Duration::from_millis(50);

/// The resources of the caller that [`spawn`] needs beside the spec.
pub struct SpawnResources<'a, 'm> {
    /// The binary to execute as the launcher: `/proc/self/exe`, unless a test uses another.
    pub launcher: &'m Path,
    /// The open workspace directory. Not needed for a workspace in memory.
    pub workspace: Option<BorrowedFd<'m>>,
    /// The runner reads this descriptor and pipes its bytes to the program. With `None` the program gets /dev/null.
    pub stdin: Option<OwnedFd>,
    /// The run's cgroup, if it has one.
    pub group: Option<&'a Group>,
}

/// The result of a run: how it ended, and which layers were really in force.
#[derive(Debug)]
pub struct FinishedRun {
    /// How the run ended.
    pub outcome: Outcome,
    /// The layers that were in force, each with the mechanism that held it.
    pub layers: Vec<(Layer, String)>,
    /// The steps that built the sandbox, each with the [`monotonic_us`](crate::monotonic_us) time at which it began.
    pub step_log: Vec<(LaunchStep, u64)>,
    /// The workspace in memory, still readable through this descriptor.
    pub workspace: Option<OwnedFd>,
    /// How many forks the cgroup's limit on processes refused.
    pub pids_denied: u64,
    /// The exit of pid 1, if pid 1 was alone and still about to exit.
    pub init_exit: Option<InitExit>,
    /// The pid of init, if not every process could be proved dead. Init exits after all others, so the caller can wait
    /// for it.
    pub live_init_pid: Option<u32>,
}

/// A run whose sandbox is being built, or whose program runs.
pub struct Running<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) group: Option<&'a Group>,
    socket: OwnedFd,
    /// The launcher, if it was executed for this run. `None` for a standby launcher, which is init itself.
    pub(crate) launcher: Option<Child>,
    step_log: OwnedFd,
    pub(crate) init: Option<OwnedFd>,
    pub(crate) init_pid: Option<Pid>,
    streams: Streams,
    /// When the runner last told init that the program is active.
    active_at: Instant,
    failure: Option<RunError>,
    /// `Some` once the child has reported that it executes the program.
    layers: Option<Vec<(Layer, String)>>,
    /// What init reported when everything had ended.
    pub(crate) end_report: Option<RunEnd>,
    /// What init last reported while killed processes were still dying.
    dying_report: Option<RunEnd>,
    /// When init first reported dying processes.
    pub(crate) dying_since: Option<Instant>,
    /// Whether init has reported that it is the only process left inside.
    init_is_alone: bool,
    workspace: Option<OwnedFd>,
    stop_requested: Option<Stop>,
    started_at: Instant,
    /// The backstop deadline. Once it has passed, the end of the wait for init's exit.
    pub(crate) backstop_at: Instant,
    /// Whether the backstop deadline has passed, and the runner has therefore acted to end the run.
    pub(crate) backstop_passed: bool,
}

/// Starts the launcher and hands it the launch plan and all descriptors. The launcher then builds the sandbox on its
/// own; the program does not start before [`Running::supervise`].
pub fn spawn<'a>(
    spec: &'a Spec,
    resources: SpawnResources<'a, '_>,
) -> Result<Running<'a>, RunError> {
    spec.check()?;
    // The kernel counts descriptors in flight over sockets per user and checks the count against the sender's
    // RLIMIT_NOFILE. Raise the limit, so that other runs of the same user do not keep this process from sending
    // descriptors.
    let _ = crate::resources::rlimits::raise_open_files();
    let (ours, launcher, init) = match standby::take(resources.launcher, spec) {
        Some((socket, init)) => (socket, None, Some(launcher_process::open_init(init)?)),
        None => {
            let (socket, launcher) = launcher_process::start_launcher(resources.launcher)?;
            (socket, Some(launcher), None)
        }
    };
    let (init_pid, init) = init.unzip();
    let (out_read, out_write) = pipe(spec.identity)?;
    let (err_read, err_write) = pipe(spec.identity)?;
    // The program owns the pipes and may read from them too, so a read after a successful poll may find nothing.
    for end in [&out_read, &err_read] {
        set_nonblocking(end)?;
    }
    let (stdin, stdin_pump) = stdin_pair(spec, resources.stdin)?;
    let cpu = resources.group.and_then(Group::cpu_usage_fd);
    let oom = resources.group.and_then(Group::oom_kills_fd);
    let attach = match resources.group {
        Some(group) => group
            .attach_fds()
            .map_err(|e| start("open the cgroup")(io::Error::other(e)))?,
        None => Vec::new(),
    };
    let group_directory = resources.group.and_then(Group::directory_fd);
    let enforced = |limit| {
        let enforcement = resources.group.and_then(|group| group.enforces(limit));
        enforcement.is_some_and(|by_group| by_group.how_hard == Hardness::Hard)
    };
    let plan = LaunchPlan {
        spec: spec.clone(),
        stdin: stdin.is_some(),
        attach_files: attach.len(),
        group_directory: group_directory.is_some(),
        cpu_counter: cpu.as_ref().map(|(_, unit)| *unit),
        oom_counter: oom.is_some(),
        memory: hardness(enforced(LimitName::Memory)),
        // RLIMIT_NPROC counts a user's processes. It is exact where the uid has no processes outside the run: a leased
        // uid, or a user namespace of its own.
        pids: hardness(
            spec.has(Layer::UserNamespace) || spec.is_leased() || enforced(LimitName::Pids),
        ),
        pin_to_cpus: spec.limits.cpu_milli.div_ceil(1000) as usize,
        pinned_for_good: !enforced(LimitName::Cpus),
    };
    let file = plan::write_sealed(&plan).map_err(start("write the plan"))?;
    let step_log = rustix::fs::memfd_create(c"fumehood-step-log", MemfdFlags::CLOEXEC)
        .map_err(|e| start("make the step log")(e.into()))?;
    let mut fds = vec![file.as_fd(), step_log.as_fd()];
    fds.extend(stdin.iter().map(AsFd::as_fd));
    fds.extend([out_write.as_fd(), err_write.as_fd()]);
    if spec.workspace_kind == WorkspaceKind::Disk && spec.purpose == LaunchPurpose::Run {
        let missing = || start("hand over the workspace")(io::Error::other("no descriptor"));
        fds.push(resources.workspace.ok_or_else(missing)?);
    }
    fds.extend(cpu.iter().map(|(fd, _)| fd.as_fd()));
    fds.extend(oom.iter().map(AsFd::as_fd));
    fds.extend(attach.iter().map(AsFd::as_fd));
    fds.extend(group_directory);
    channel::send(ours.as_fd(), &fds.len(), &fds).map_err(start("send the plan"))?;
    let terminal = matches!(spec.terminal, Terminal::Own { .. });
    Ok(Running {
        spec,
        group: resources.group,
        socket: ours,
        launcher,
        step_log,
        init,
        init_pid,
        // With a terminal, the program's output comes from the terminal and the pipes are unused.
        streams: match terminal {
            true => Streams::new([None, None], stdin_pump),
            false => Streams::new([Some(out_read), Some(err_read)], stdin_pump),
        },
        active_at: Instant::now(),
        failure: None,
        layers: None,
        end_report: None,
        dying_report: None,
        dying_since: None,
        init_is_alone: false,
        workspace: None,
        stop_requested: None,
        started_at: Instant::now(),
        backstop_at: Instant::now() + BUILD_TIME_MAX + deadline(spec),
        backstop_passed: false,
    })
}

fn hardness(is_enforced: bool) -> Hardness {
    match is_enforced {
        true => Hardness::Hard,
        false => Hardness::Watched,
    }
}

/// How long after the program's start init must have ended the run.
fn deadline(spec: &Spec) -> Duration {
    let limits = &spec.limits;
    Duration::from_millis(limits.wall_ms.saturating_add(limits.grace_ms)) + BACKSTOP
}

/// Whether the handler cannot take output now, so that the program waits or soon will.
fn is_blocked(handler: &dyn SupervisorHandler) -> bool {
    let mut both = [Stream::Stdout, Stream::Stderr].into_iter();
    both.any(|stream| handler.blocked_on(stream).is_some())
}

/// What `poll` found ready.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Socket,
    Init,
    Stream(StreamEvent),
    Control,
}

impl Running<'_> {
    /// Starts the program, and supervises it until every process is proved dead or the backstop deadline has passed.
    pub fn supervise(
        mut self,
        handler: &mut dyn SupervisorHandler,
    ) -> Result<FinishedRun, RunError> {
        // The time between `spawn` and this call counts against no limit.
        self.started_at = Instant::now();
        self.backstop_at = Instant::now() + BUILD_TIME_MAX + deadline(self.spec);
        if self.spec.workspace_kind == WorkspaceKind::Disk {
            self.send_start_command(handler);
        }
        self.run_until_end(handler)
    }

    /// Tells init to start the program. If the handler has already requested a stop, kills the sandbox instead: no
    /// program runs yet that would need the grace.
    fn send_start_command(&mut self, handler: &mut dyn SupervisorHandler) {
        if handler.control_fd().is_some_and(events::is_readable) {
            self.handle_control(handler);
        }
        match self.stop_requested {
            None => {
                let share = self.spec.limits.open_files_of_run;
                let open_on_host = share.and_then(|_| open_on_host());
                self.send_command(InitCommand::Go { open_on_host });
            }
            Some(_) => self.send_command(InitCommand::Kill),
        }
    }

    /// Ends a run whose program was never started. Returns whether every process is proved dead.
    pub fn cancel_before_start(mut self) -> bool {
        self.stop_requested = Some(Stop::Cancelled);
        self.send_command(InitCommand::Kill);
        self.shorten_deadline(BACKSTOP);
        let identity = self.spec.identity;
        let result = self.run_until_end(&mut SilentHandler(identity));
        result.is_ok_and(|finished| finished.outcome.all_dead)
    }

    fn run_until_end(
        mut self,
        handler: &mut dyn SupervisorHandler,
    ) -> Result<FinishedRun, RunError> {
        let mut socket_open = true;
        let mut init_dead = false;
        self.active_at = Instant::now();
        while (socket_open || !init_dead) && !self.has_ended_cleanly() {
            let ready = self.wait(handler, socket_open, init_dead);
            for source in ready {
                match source {
                    Source::Socket => socket_open = self.handle_report_or_kill(handler),
                    Source::Init => init_dead = true,
                    Source::Stream(event) => {
                        if self.streams.handle(event, handler) {
                            self.report_activity(ACTIVITY_REPORT_INTERVAL);
                        }
                    }
                    Source::Control => self.handle_control(handler),
                }
            }
            if is_blocked(handler) {
                self.report_activity(BLOCKED_REPORT_INTERVAL);
            }
            if !socket_open && self.init.is_none() {
                // The launcher ended before it started init.
                init_dead = true;
            }
            if !init_dead && !self.has_ended_cleanly() && !self.enforce_backstop() {
                break;
            }
        }
        let _ = self.launcher.as_mut().map(Child::wait);
        self.streams.drain(handler);
        self.into_result(init_dead)
    }

    fn wait(
        &self,
        handler: &dyn SupervisorHandler,
        socket_open: bool,
        init_dead: bool,
    ) -> Vec<Source> {
        let mut list: Vec<(Source, BorrowedFd<'_>, PollFlags)> = Vec::with_capacity(8);
        if socket_open {
            list.push((Source::Socket, self.socket.as_fd(), PollFlags::IN));
        }
        if let (Some(init), false) = (&self.init, init_dead) {
            list.push((Source::Init, init.as_fd(), PollFlags::IN));
        }
        let streams = self.streams.wanted(handler, self.has_started());
        list.extend(streams.map(|(event, fd, flags)| (Source::Stream(event), fd, flags)));
        let control_fd = handler.control_fd();
        list.extend(control_fd.map(|fd| (Source::Control, fd, PollFlags::IN)));
        let ready = events::wait_for_any(list, self.poll_timeout(handler)).unwrap_or_default();
        ready.into_iter().map(|(source, _)| source).collect()
    }

    fn poll_timeout(&self, handler: &dyn SupervisorHandler) -> Duration {
        let now = Instant::now();
        let from_now = |at: Instant| at.saturating_duration_since(now);
        let mut time = from_now(self.backstop_at).min(Duration::from_secs(60));
        if let Some(at) = self.streams.resume_at() {
            time = time.min(from_now(at));
        }
        if self.spec.limits.idle_ms.is_some() && is_blocked(handler) {
            time = time.min(BLOCKED_REPORT_INTERVAL);
        }
        time
    }

    /// Tells init that the program is active, unless the last such report is more recent than `at_most_every`.
    fn report_activity(&mut self, at_most_every: Duration) {
        if self.spec.limits.idle_ms.is_some() && self.active_at.elapsed() > at_most_every {
            self.active_at = Instant::now();
            self.send_command(InitCommand::Active);
        }
    }

    /// Whether the program ran, every other process is dead, and init is about to exit. After a failure the runner
    /// waits for the death of init instead.
    fn has_ended_cleanly(&self) -> bool {
        self.init_is_alone && self.failure.is_none() && self.has_started()
    }

    /// Handles one report. If the report cannot be received or parsed, kills the sandbox and stops reading from it.
    /// Returns whether the socket is still open.
    fn handle_report_or_kill(&mut self, handler: &mut dyn SupervisorHandler) -> bool {
        self.handle_report(handler).unwrap_or_else(|error| {
            self.failure.get_or_insert(error);
            self.send_command(InitCommand::Kill);
            self.shorten_deadline(BACKSTOP);
            false
        })
    }

    /// Receives and handles one report. Returns false when the peer has closed the socket.
    fn handle_report(&mut self, handler: &mut dyn SupervisorHandler) -> Result<bool, RunError> {
        let received = match channel::receive::<SandboxReport>(self.socket.as_fd(), Wait::No) {
            Ok(received) => received,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => None,
            Err(e) => return Err(start("receive a report from the sandbox")(e)),
        };
        let Some((report, mut fds)) = received else {
            return Ok(false);
        };
        match report {
            SandboxReport::Failed {
                step,
                errno,
                detail,
            } => {
                let source = errno.map(io::Error::from_raw_os_error);
                self.failure.get_or_insert(RunError::Launch {
                    step,
                    detail,
                    source,
                });
            }
            SandboxReport::Started { layers } => self.note_started(layers),
            SandboxReport::Init { pid } => self.note_init(pid)?,
            SandboxReport::Workspace => {
                self.workspace = fds.pop();
                self.fill_workspace(handler)?;
            }
            SandboxReport::Terminal => {
                let terminal = fds.pop();
                terminal.as_ref().map(set_nonblocking).transpose()?;
                self.streams.terminal = terminal;
            }
            SandboxReport::Dying(end) => {
                self.dying_report = Some(end);
                self.extend_deadline_for_dying();
            }
            SandboxReport::Ended { end, alone } => {
                (self.end_report, self.init_is_alone) = (Some(end), alone)
            }
        }
        Ok(true)
    }

    fn note_started(&mut self, layers: Vec<(Layer, String)>) {
        // The launcher ended when it had started init. Reap it now, so that it is no zombie for the whole run.
        let _ = self.launcher.as_mut().map(Child::try_wait);
        self.backstop_at = Instant::now() + deadline(self.spec);
        self.layers = Some(layers);
    }

    fn note_init(&mut self, pid: i32) -> Result<(), RunError> {
        let no_init = || io::Error::other("no such pid");
        let pid = Pid::from_raw(pid)
            .ok_or_else(no_init)
            .map_err(start("find init"))?;
        let (pid, pidfd) = launcher_process::open_init(pid)?;
        (self.init_pid, self.init) = (Some(pid), Some(pidfd));
        Ok(())
    }

    fn fill_workspace(&mut self, handler: &mut dyn SupervisorHandler) -> Result<(), RunError> {
        if let Some(workspace) = &self.workspace
            && let Err(source) = handler.fill(workspace.as_fd())
        {
            self.failure = Some(RunError::Fill { source });
            self.send_command(InitCommand::Kill);
            return Ok(());
        }
        self.send_command(InitCommand::Filled);
        self.send_start_command(handler);
        Ok(())
    }

    pub(crate) fn send_command(&self, command: InitCommand) {
        // A send fails only if init is gone, and then the command has no purpose.
        let _ = channel::send(self.socket.as_fd(), &command, &[]);
    }

    fn handle_control(&mut self, handler: &mut dyn SupervisorHandler) {
        match handler.next_control() {
            None => {}
            Some(Control::Cancel) => {
                self.stop_requested.get_or_insert(Stop::Cancelled);
                self.send_command(InitCommand::Stop(Stop::Cancelled));
                self.shorten_deadline(Duration::from_millis(self.spec.limits.grace_ms) + BACKSTOP);
            }
            Some(Control::Kill) => {
                self.stop_requested.get_or_insert(Stop::Cancelled);
                self.send_command(InitCommand::Kill);
                self.shorten_deadline(BACKSTOP);
            }
            Some(Control::Resize { rows, columns }) => {
                let terminal = self.streams.terminal.as_ref();
                let _ = terminal.map(|terminal| sys::set_terminal_size(terminal, rows, columns));
            }
        }
    }

    pub(crate) fn has_started(&self) -> bool {
        self.layers.is_some()
    }

    fn into_result(mut self, init_dead: bool) -> Result<FinishedRun, RunError> {
        if let (Some(init), true) = (&self.init, init_dead) {
            let _ = rustix::process::waitid(WaitId::PidFd(init.as_fd()), WaitIdOptions::EXITED);
        }
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        // A stop on request before the program started is not an error. Anything else is: the launcher or init died.
        if !self.has_started() && self.stop_requested.is_none() {
            let last = step_report::read_step_log(self.step_log.as_fd()).pop();
            let step = last.map_or(LaunchStep::StartLauncher, |(step, _)| step);
            return Err(RunError::Died { step });
        }
        let ended_cleanly = self.has_ended_cleanly();
        let all_dead = ended_cleanly || self.all_dead(init_dead);
        // Init's report decides how the run ended. Without a report, init was asked to stop, or the runner ended the
        // run past the backstop deadline, or somebody else killed init.
        let overdue = self.backstop_passed.then_some(Stop::WallTime);
        let reported = self.end_report.take().or(self.dying_report.take());
        let mut end = reported.unwrap_or_else(|| RunEnd {
            stop: self.stop_requested.or(overdue),
            usage: ResourceUsage {
                wall_ms: self.started_at.elapsed().as_millis() as u64,
                ..ResourceUsage::default()
            },
            exit: None,
        });
        let usage = &mut end.usage;
        let counters = self.group.map(|g| g.counters()).unwrap_or_default();
        usage.oom_kills = counters.oom_kills.unwrap_or(usage.oom_kills);
        usage.memory_peak_bytes = counters.memory_peak_bytes.or(usage.memory_peak_bytes);
        usage.pids_peak = counters.pids_peak.or(usage.pids_peak);
        usage.cpu_ms = counters.cpu_usage_us.map_or(usage.cpu_ms, |us| us / 1000);
        Ok(FinishedRun {
            outcome: Outcome {
                exit: end.exit,
                stop: end.stop,
                usage: end.usage,
                all_dead,
            },
            layers: self.layers.unwrap_or_default(),
            step_log: step_report::read_step_log(self.step_log.as_fd()),
            workspace: self.workspace,
            pids_denied: counters.pids_denied.unwrap_or(0),
            live_init_pid: match self.init_pid {
                Some(pid) if !all_dead => u32::try_from(pid.as_raw_nonzero().get()).ok(),
                _ => None,
            },
            init_exit: (ended_cleanly && !init_dead).then(|| InitExit::new(self.init.take())),
        })
    }
}
