//! The runner's side: start the launcher, pass the streams, wait for the end, and hold the last deadline.
//!
//! Init keeps the deadlines (`inside/init.rs`). The runner only keeps a backstop behind them: if init has not
//! ended the run in time, it is killed, and with it the whole pid namespace; if even that cannot be
//! shown to be done, the outcome says so.

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

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, WaitId, WaitIdOptions};

use crate::channel::{self, InitOrder, SandboxReport, Wait};
use crate::inside::dying::BACKSTOP;
use crate::launch::standby;
use crate::outcome::{Exit, Outcome, ResourceUsage, Stop};
use crate::plan::{self, LaunchPlan};
use crate::resources::cgroup::Group;
use crate::spec::{Hardness, LaunchPurpose, Layer, LimitName, Spec, Terminal, WorkspaceKind};
use crate::step_report;
pub use error::RunError;
use error::start;
pub(crate) use handler::SilentHandler;
pub use handler::{Control, Stream, SupervisorHandler};
pub use init_exit::InitExit;
use stdio::{pipe, set_nonblocking, stdin_pair};
use streams::{StreamEvent, Streams};

/// Building the sandbox is not the program's time; it gets some of its own.
const BUILD_TIME_MAX: Duration = Duration::from_secs(30);
/// A program whose output nobody takes is not idle; init is told so this often.
const BLOCKED_REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// Init is told of activity no more often than this.
const ACTIVITY_REPORT_INTERVAL: Duration = Duration::from_millis(50);

/// What a run is started with, beside its spec.
pub struct SpawnResources<'a, 'm> {
    /// Our own binary; `/proc/self/exe` unless a test brings another.
    pub launcher: &'m Path,
    /// The held workspace directory; not needed for one in memory.
    pub workspace: Option<BorrowedFd<'m>>,
    /// Read and piped to the program; `None` is /dev/null.
    pub stdin: Option<OwnedFd>,
    pub group: Option<&'a Group>,
}

/// What came of it: how it ended, and which layers were really in force.
#[derive(Debug)]
pub struct FinishedRun {
    pub outcome: Outcome,
    pub layers: Vec<(Layer, String)>,
    /// The steps of building it, and when each was begun, by [`monotonic_us`](crate::monotonic_us).
    pub step_log: Vec<(String, u64)>,
    /// The workspace that lived in memory, still readable.
    pub workspace: Option<OwnedFd>,
    pub pids_denied: u64,
    /// Pid 1, which had nobody left with it, and is about to end.
    pub init_exit: Option<InitExit>,
    /// The pid of init, where not every process could be shown dead: it ends after all others.
    pub unkilled_init: Option<u32>,
}

pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: (time.subsec_nanos() | 1).into(),
    }
}

pub struct Running<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) group: Option<&'a Group>,
    socket: OwnedFd,
    /// One that stood by is init itself.
    pub(crate) launcher: Option<Child>,
    step_log: OwnedFd,
    pub(crate) init: Option<OwnedFd>,
    pub(crate) init_pid: Option<Pid>,
    streams: Streams,
    /// When init was last told that the program is not idle.
    active_at: Instant,
    failed: Option<RunError>,
    /// `Some` once the program has been started.
    layers: Option<Vec<(Layer, String)>>,
    pub(crate) ended: Option<(Option<Exit>, Option<Stop>, ResourceUsage)>,
    /// The same as far as it was known when init last told of the dying, and since when it has.
    dying: Option<(Option<Exit>, Option<Stop>, ResourceUsage)>,
    pub(crate) dying_since: Option<Instant>,
    /// Init has told that nobody is left in there with it.
    alone: bool,
    workspace: Option<OwnedFd>,
    asked_to_stop: Option<Stop>,
    started: Instant,
    pub(crate) kill_init_at: Instant,
    pub(crate) killed_init: bool,
}

/// Starts the launcher and hands it everything. The sandbox is built from then on by itself; the program waits in it
/// for [`Running::supervise`].
pub fn spawn<'a>(
    spec: &'a Spec,
    resources: SpawnResources<'a, '_>,
) -> Result<Running<'a>, RunError> {
    spec.check()?;
    // Descriptors on their way over sockets are counted for the user, against the limit of whoever sends: other
    // analyses of the same user must not keep us from sending ours.
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
    // The program owns the pipes and may read from them too: what poll promised may be gone when we read.
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
        let held = resources.group.and_then(|group| group.enforces(limit));
        held.is_some_and(|held| held.how_hard == Hardness::Hard)
    };
    let plan = LaunchPlan {
        spec: spec.clone(),
        stdin: stdin.is_some(),
        attach_files: attach.len(),
        group_directory: group_directory.is_some(),
        cpu_counter: cpu.as_ref().map(|(_, unit)| *unit),
        oom_counter: oom.is_some(),
        memory: if enforced(LimitName::Memory) {
            Hardness::Hard
        } else {
            Hardness::Watched
        },
        // A leased uid has no other processes, and in a user namespace of its own a user has none.
        pids: match spec.has(Layer::UserNamespace) || spec.is_leased() || enforced(LimitName::Pids)
        {
            true => Hardness::Hard,
            false => Hardness::Watched,
        },
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
        // With a terminal the pipes lead nowhere; the program's output comes from the terminal.
        streams: match terminal {
            true => Streams::new([None, None], stdin_pump),
            false => Streams::new([Some(out_read), Some(err_read)], stdin_pump),
        },
        active_at: Instant::now(),
        failed: None,
        layers: None,
        ended: None,
        dying: None,
        dying_since: None,
        alone: false,
        workspace: None,
        asked_to_stop: None,
        started: Instant::now(),
        kill_init_at: Instant::now() + BUILD_TIME_MAX + deadline(spec),
        killed_init: false,
    })
}

/// By when init must have ended the run, counted from the program's start.
fn deadline(spec: &Spec) -> Duration {
    let limits = &spec.limits;
    Duration::from_millis(limits.wall_ms.saturating_add(limits.grace_ms)) + BACKSTOP
}

/// Whether the program waits, or soon will, for somebody to take its output.
fn is_blocked(handler: &dyn SupervisorHandler) -> bool {
    let mut both = [Stream::Stdout, Stream::Stderr].into_iter();
    both.any(|stream| handler.blocked_on(stream).is_some())
}

/// What there is to be done after a poll.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Socket,
    Init,
    Stream(StreamEvent),
    Control,
}

impl Running<'_> {
    /// Lets the program run, and watches until every process is dead, or cannot be shown to be.
    pub fn supervise(
        mut self,
        handler: &mut dyn SupervisorHandler,
    ) -> Result<FinishedRun, RunError> {
        // Whatever was done since the plan was sent is nobody's time.
        self.started = Instant::now();
        self.kill_init_at = Instant::now() + BUILD_TIME_MAX + deadline(self.spec);
        if self.spec.workspace_kind == WorkspaceKind::Disk {
            self.send_start_order(handler);
        }
        self.run_until_end(handler)
    }

    /// Lets the program start. If the handler has asked for the end meanwhile, the sandbox is killed instead: nothing runs in it that
    /// would need the grace.
    fn send_start_order(&mut self, handler: &mut dyn SupervisorHandler) {
        let control_fd = handler.control_fd();
        let mut fds: Vec<_> = control_fd
            .iter()
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        if poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            self.handle_control(handler);
        }
        match self.asked_to_stop {
            None => self.order(InitOrder::Go),
            Some(_) => self.order(InitOrder::Kill),
        }
    }

    /// Ends what nobody has let run. Whether all of it is known to be dead.
    pub fn cancel_before_start(mut self) -> bool {
        self.asked_to_stop = Some(Stop::Cancelled);
        self.order(InitOrder::Kill);
        self.shorten_deadline(BACKSTOP);
        let identity = self.spec.identity;
        let ended = self.run_until_end(&mut SilentHandler(identity));
        ended.is_ok_and(|ended| ended.outcome.all_dead)
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
                // No init was ever born.
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
        let control_fd = handler.control_fd();
        let mut list: Vec<(Source, BorrowedFd<'_>, PollFlags)> = Vec::with_capacity(8);
        if socket_open {
            list.push((Source::Socket, self.socket.as_fd(), PollFlags::IN));
        }
        if let (Some(init), false) = (&self.init, init_dead) {
            list.push((Source::Init, init.as_fd(), PollFlags::IN));
        }
        let streams = self.streams.wanted(handler, self.started());
        list.extend(streams.map(|(event, fd, flags)| (Source::Stream(event), fd, flags)));
        list.extend(control_fd.map(|fd| (Source::Control, fd, PollFlags::IN)));
        let timeout = timespec(self.poll_timeout(handler));
        let mut fds: Vec<PollFd<'_>> = list
            .iter()
            .map(|(_, fd, flags)| PollFd::from_borrowed_fd(*fd, *flags))
            .collect();
        if poll(&mut fds, Some(&timeout)).is_err() {
            return Vec::new();
        }
        let ready = list
            .iter()
            .zip(&fds)
            .filter(|(_, fd)| !fd.revents().is_empty());
        ready.map(|((source, ..), _)| *source).collect()
    }

    fn poll_timeout(&self, handler: &dyn SupervisorHandler) -> Duration {
        let now = Instant::now();
        let from_now = |at: Instant| at.saturating_duration_since(now);
        let mut time = from_now(self.kill_init_at).min(Duration::from_secs(60));
        if let Some(at) = self.streams.resume_at() {
            time = time.min(from_now(at));
        }
        if self.spec.limits.idle_ms.is_some() && is_blocked(handler) {
            time = time.min(BLOCKED_REPORT_INTERVAL);
        }
        time
    }

    /// Tells init that the program is not idle, unless it was told that lately.
    fn report_activity(&mut self, at_most_every: Duration) {
        if self.spec.limits.idle_ms.is_some() && self.active_at.elapsed() > at_most_every {
            self.active_at = Instant::now();
            self.order(InitOrder::Active);
        }
    }

    /// The program ran and is dead, and init is about to end by itself. A run that failed is not left before init is dead.
    fn has_ended_cleanly(&self) -> bool {
        self.alone && self.failed.is_none() && self.started()
    }

    /// Who cannot be understood is not listened to any longer, and not left alive.
    fn handle_report_or_kill(&mut self, handler: &mut dyn SupervisorHandler) -> bool {
        self.handle_report(handler).unwrap_or_else(|error| {
            self.failed.get_or_insert(error);
            self.order(InitOrder::Kill);
            self.shorten_deadline(BACKSTOP);
            false
        })
    }

    /// One report. False when nobody is left on the other side.
    fn handle_report(&mut self, handler: &mut dyn SupervisorHandler) -> Result<bool, RunError> {
        let heard = match channel::receive::<SandboxReport>(self.socket.as_fd(), Wait::No) {
            Ok(heard) => heard,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => None,
            Err(e) => return Err(start("hear from the sandbox")(e)),
        };
        let Some((report, mut fds)) = heard else {
            return Ok(false);
        };
        match report {
            SandboxReport::Failed {
                step,
                errno,
                detail,
            } => {
                let source = errno.map(io::Error::from_raw_os_error);
                self.failed.get_or_insert(RunError::Step {
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
            SandboxReport::Dying { exit, stop, usage } => {
                self.dying = Some((exit, stop, usage));
                self.extend_deadline_for_dying();
            }
            SandboxReport::Ended {
                exit,
                stop,
                usage,
                alone,
            } => (self.ended, self.alone) = (Some((exit, stop, usage)), alone),
        }
        Ok(true)
    }

    fn note_started(&mut self, layers: Vec<(Layer, String)>) {
        // It ended when init was born; no need to keep its corpse for the whole run.
        let _ = self.launcher.as_mut().map(Child::try_wait);
        self.kill_init_at = Instant::now() + deadline(self.spec);
        self.layers = Some(layers);
    }

    fn note_init(&mut self, pid: i32) -> Result<(), RunError> {
        let no_init = || io::Error::other("no such pid");
        let pid = Pid::from_raw(pid)
            .ok_or_else(no_init)
            .map_err(start("find init"))?;
        let (pid, held) = launcher_process::open_init(pid)?;
        (self.init_pid, self.init) = (Some(pid), Some(held));
        Ok(())
    }

    fn fill_workspace(&mut self, handler: &mut dyn SupervisorHandler) -> Result<(), RunError> {
        if let Some(workspace) = &self.workspace
            && let Err(source) = handler.fill(workspace.as_fd())
        {
            self.failed = Some(RunError::Fill { source });
            self.order(InitOrder::Kill);
            return Ok(());
        }
        self.order(InitOrder::Filled);
        self.send_start_order(handler);
        Ok(())
    }

    pub(crate) fn order(&self, order: InitOrder) {
        // If init is gone there is nothing left to order.
        let _ = channel::send(self.socket.as_fd(), &order, &[]);
    }

    fn handle_control(&mut self, handler: &mut dyn SupervisorHandler) {
        match handler.next_control() {
            None => {}
            Some(Control::Cancel) => {
                self.asked_to_stop.get_or_insert(Stop::Cancelled);
                self.order(InitOrder::Stop(Stop::Cancelled));
                self.shorten_deadline(Duration::from_millis(self.spec.limits.grace_ms) + BACKSTOP);
            }
            Some(Control::Kill) => {
                self.asked_to_stop.get_or_insert(Stop::Cancelled);
                self.order(InitOrder::Kill);
                self.shorten_deadline(BACKSTOP);
            }
            Some(Control::Resize { rows, columns }) => {
                let size = rustix::termios::Winsize {
                    ws_row: rows,
                    ws_col: columns,
                    ws_xpixel: 0,
                    ws_ypixel: 0,
                };
                let terminal = self.streams.terminal.as_ref();
                let _ = terminal.map(|t| rustix::termios::tcsetwinsize(t, size));
            }
        }
    }

    pub(crate) fn started(&self) -> bool {
        self.layers.is_some()
    }

    fn into_result(mut self, init_dead: bool) -> Result<FinishedRun, RunError> {
        if let (Some(init), true) = (&self.init, init_dead) {
            let _ = rustix::process::waitid(WaitId::PidFd(init.as_fd()), WaitIdOptions::EXITED);
        }
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        // Stopped on request on the way is no failure of ours: nothing of the program has run.
        if !self.started() && self.asked_to_stop.is_none() {
            let last = step_report::read_step_log(self.step_log.as_fd()).pop();
            let step = last.map_or_else(|| String::from("start the launcher"), |(step, _)| step);
            return Err(RunError::Died { step });
        }
        let ended_well = self.has_ended_cleanly();
        let all_dead = ended_well || self.all_dead(init_dead);
        // What init said is the whole truth. If it could say nothing, it was asked to stop, was overdue, or
        // was killed by somebody else.
        let overdue = self.killed_init.then_some(Stop::WallTime);
        let wall_ms = self.started.elapsed().as_millis() as u64;
        let told = self.ended.take().or(self.dying.take());
        let (exit, stop, mut usage) = told.unwrap_or((
            None,
            self.asked_to_stop.or(overdue),
            ResourceUsage {
                wall_ms,
                ..ResourceUsage::default()
            },
        ));
        let counters = self.group.map(|g| g.counters()).unwrap_or_default();
        usage.oom_kills = counters.oom_kills.unwrap_or(usage.oom_kills);
        usage.memory_peak_bytes = counters.memory_peak_bytes.or(usage.memory_peak_bytes);
        usage.pids_peak = counters.pids_peak.or(usage.pids_peak);
        usage.cpu_ms = counters.cpu_usage_us.map_or(usage.cpu_ms, |us| us / 1000);
        let outcome = Outcome {
            exit,
            stop,
            usage,
            all_dead,
        };
        Ok(FinishedRun {
            outcome,
            layers: self.layers.unwrap_or_default(),
            step_log: step_report::read_step_log(self.step_log.as_fd()),
            workspace: self.workspace,
            pids_denied: counters.pids_denied.unwrap_or(0),
            unkilled_init: match self.init_pid {
                Some(pid) if !all_dead => u32::try_from(pid.as_raw_nonzero().get()).ok(),
                _ => None,
            },
            init_exit: (ended_well && !init_dead).then(|| InitExit::new(self.init.take())),
        })
    }
}
