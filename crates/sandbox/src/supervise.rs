//! The runner's side: start the launcher, pass the streams, wait for the end, and hold the last deadline.
//!
//! Deadlines are init's (`init.rs`). The runner only keeps a backstop behind them: if init has not
//! ended the run in time, it is killed, and with it the whole pid namespace; if even that cannot be
//! shown to be done, the outcome says so.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use crate::cgroup::Group;
use crate::channel::{self, Order, Report, Wait};
use crate::feed::{CHUNK_BYTES, Feed, never_wait, pipe, stdin_pair};
use crate::launch::Plan;
pub use crate::leaving::Leaving;
use crate::outcome::{Outcome, Stop, Usage};
use crate::probe::Nobody;
use crate::processes;
use crate::spec::{
    Hardness, Identity, Layer, Level, LimitName, Purpose, Spec, SpecError, Terminal, WorkspaceKind,
};
use crate::standby;

/// Init has this long, beyond the grace, before it is killed.
pub(crate) const BACKSTOP: Duration = Duration::from_millis(700);
/// And the kernel this long to finish what init was in charge of.
pub(crate) const LAST_WAIT: Duration = Duration::from_millis(280);
/// Building the sandbox is not the program's time; it gets some of its own.
const BUILDING_AT_MOST: Duration = Duration::from_secs(30);
/// Reads after the last process has died: what a pipe can hold, and no more.
const DRAIN_READS_MAX: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("the run is not possible as described")]
    Spec(#[from] SpecError),
    #[error("{action}")]
    Start {
        action: &'static str,
        source: io::Error,
    },
    #[error("{step}: {detail}")]
    Step {
        step: String,
        detail: String,
        #[source]
        source: Option<io::Error>,
    },
    #[error("the launcher died in the step \"{step}\"")]
    Died { step: String },
    #[error("fill the workspace")]
    Fill { source: io::Error },
}

pub(crate) fn start(action: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |source| RunError::Start { action, source }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// What whoever watches the run wants of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// SIGTERM, the grace, SIGKILL.
    Cancel,
    /// SIGKILL.
    Kill,
    /// The terminal has a new size.
    Resize { rows: u16, columns: u16 },
}

/// Whoever watches the run: takes its output, and may wish for its end.
pub trait Attendant {
    /// A workspace in memory is there to be filled; nothing runs yet.
    fn fill(&mut self, workspace: BorrowedFd<'_>) -> io::Result<()>;
    fn output(&mut self, stream: Stream, bytes: &[u8]);
    /// A descriptor that must become writable before more output is wanted.
    fn blocked_on(&self) -> Option<BorrowedFd<'_>>;
    fn unblocked(&mut self);
    /// A descriptor that is readable when there is a wish.
    fn wishes(&self) -> Option<BorrowedFd<'_>>;
    fn wish(&mut self) -> Option<Wish>;
}

/// What a run is started with, beside its spec.
pub struct Means<'a, 'm> {
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
pub struct Finished {
    pub outcome: Outcome,
    pub layers: Vec<(Layer, String)>,
    /// The steps of building it, and when each was begun, by [`channel::monotonic_us`].
    pub diary: Vec<(String, u64)>,
    /// The workspace that lived in memory, still readable.
    pub workspace: Option<OwnedFd>,
    pub pids_denied: u64,
    /// Pid 1, which had nobody left with it, and is about to end.
    pub leaving: Option<Leaving>,
}

pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: (time.subsec_nanos() | 1).into(),
    }
}

pub struct Running<'a> {
    spec: &'a Spec,
    group: Option<&'a Group>,
    socket: OwnedFd,
    /// One that stood by is init itself.
    launcher: Option<Child>,
    diary: OwnedFd,
    init: Option<OwnedFd>,
    init_pid: Option<Pid>,
    out: [Option<OwnedFd>; 2],
    terminal: Option<OwnedFd>,
    stdin: Feed,
    failed: Option<RunError>,
    /// `Some` once the program has been started.
    layers: Option<Vec<(Layer, String)>>,
    ended: Option<(Option<crate::outcome::Exit>, Option<Stop>, Usage)>,
    /// Init has told that nobody is left in there with it.
    alone: bool,
    workspace: Option<OwnedFd>,
    asked_to_stop: Option<Stop>,
    started: Instant,
    kill_init_at: Instant,
    killed_init: bool,
}

/// Starts the launcher and hands it everything. The sandbox is built from then on by itself; the program waits in it
/// for [`Running::supervise`].
pub fn spawn<'a>(spec: &'a Spec, means: Means<'a, '_>) -> Result<Running<'a>, RunError> {
    spec.check()?;
    // Descriptors on their way over sockets are counted for the user, against the limit of whoever sends: other
    // analyses of the same user must not keep us from sending ours.
    let _as_many_as_allowed = crate::rlimits::raise_open_files();
    let (ours, launcher, init) = match standby::take(means.launcher, spec) {
        Some((socket, init)) => (socket, None, Some(standby::hold(init)?)),
        None => {
            let (socket, launcher) = standby::start_launcher(means.launcher)?;
            (socket, Some(launcher), None)
        }
    };
    let (init_pid, init) = init.unzip();
    let (out_read, out_write) = pipe(spec.identity)?;
    let (err_read, err_write) = pipe(spec.identity)?;
    // The program owns the pipes and may read from them too: what poll promised may be gone when we read.
    for end in [&out_read, &err_read] {
        never_wait(end)?;
    }
    let (stdin, feed) = stdin_pair(spec, means.stdin)?;
    let cpu = means.group.and_then(Group::cpu_usage_fd);
    let attach = match means.group {
        Some(group) => group
            .attach_fds()
            .map_err(|e| start("open the cgroup")(io::Error::other(e)))?,
        None => Vec::new(),
    };
    let birthplace = means.group.and_then(Group::directory_fd);
    let enforced = |limit| {
        let held = means.group.and_then(|group| group.enforces(limit));
        held.is_some_and(|held| held.how_hard == Hardness::Hard)
    };
    let plan = Plan {
        spec: spec.clone(),
        stdin: stdin.is_some(),
        attach_files: attach.len(),
        birthplace: birthplace.is_some(),
        cpu_counter: cpu.as_ref().map(|(_, unit)| *unit),
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
    let file = standby::plan_file(&plan).map_err(start("write the plan"))?;
    let diary = rustix::fs::memfd_create(c"fumehood-diary", MemfdFlags::CLOEXEC)
        .map_err(|e| start("make a diary")(e.into()))?;
    let mut fds = vec![file.as_fd(), diary.as_fd()];
    fds.extend(stdin.iter().map(AsFd::as_fd));
    fds.extend([out_write.as_fd(), err_write.as_fd()]);
    if spec.workspace_kind == WorkspaceKind::Disk && spec.purpose == Purpose::Run {
        let missing = || start("hand over the workspace")(io::Error::other("no descriptor"));
        fds.push(means.workspace.ok_or_else(missing)?);
    }
    fds.extend(cpu.iter().map(|(fd, _)| fd.as_fd()));
    fds.extend(attach.iter().map(AsFd::as_fd));
    fds.extend(birthplace);
    channel::send(ours.as_fd(), &fds.len(), &fds).map_err(start("send the plan"))?;
    let terminal = matches!(spec.terminal, Terminal::Own { .. });
    Ok(Running {
        spec,
        group: means.group,
        socket: ours,
        launcher,
        diary,
        init,
        init_pid,
        // With a terminal the pipes lead nowhere; the program's output comes from the terminal.
        out: if terminal {
            [None, None]
        } else {
            [Some(out_read), Some(err_read)]
        },
        terminal: None,
        stdin: feed,
        failed: None,
        layers: None,
        ended: None,
        alone: false,
        workspace: None,
        asked_to_stop: None,
        started: Instant::now(),
        kill_init_at: Instant::now() + BUILDING_AT_MOST + deadline(spec),
        killed_init: false,
    })
}

/// By when init must have ended the run, counted from the program's start.
fn deadline(spec: &Spec) -> Duration {
    let limits = &spec.limits;
    Duration::from_millis(limits.wall_ms.saturating_add(limits.grace_ms)) + BACKSTOP
}

/// What there is to be done after a poll.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Socket,
    Init,
    Out(usize),
    Terminal,
    Input,
    Program,
    Wishes,
    Unblocked,
}

impl Running<'_> {
    /// Lets the program run, and watches until every process is dead, or cannot be shown to be.
    pub fn supervise(mut self, attendant: &mut dyn Attendant) -> Result<Finished, RunError> {
        // Whatever was done since the plan was sent is nobody's time.
        self.started = Instant::now();
        self.kill_init_at = Instant::now() + BUILDING_AT_MOST + deadline(self.spec);
        if self.spec.workspace_kind == WorkspaceKind::Disk {
            self.let_run(attendant);
        }
        self.attend(attendant)
    }

    /// Unless somebody has wished otherwise meanwhile: then there is nothing that needs a grace.
    fn let_run(&mut self, attendant: &mut dyn Attendant) {
        let wishes = attendant.wishes();
        let mut fds: Vec<_> = wishes
            .iter()
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        if poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            self.hear_wish(attendant);
        }
        match self.asked_to_stop {
            None => self.order(Order::Go),
            Some(_) => self.order(Order::Kill),
        }
    }

    /// Ends what nobody has let run. Whether all of it is known to be dead.
    pub fn call_off(mut self) -> bool {
        self.asked_to_stop = Some(Stop::Cancelled);
        self.order(Order::Kill);
        self.hurry(BACKSTOP);
        let identity = self.spec.identity;
        let ended = self.attend(&mut Nobody(identity));
        ended.is_ok_and(|ended| ended.outcome.all_dead)
    }

    fn attend(mut self, attendant: &mut dyn Attendant) -> Result<Finished, RunError> {
        let mut socket_open = true;
        let mut init_dead = false;
        let mut activity = Instant::now();
        while (socket_open || !init_dead) && !self.has_ended_well() {
            let ready = self.wait(attendant, socket_open, init_dead);
            for source in ready {
                match source {
                    Source::Socket => socket_open = self.hear_or_kill(attendant),
                    Source::Init => init_dead = true,
                    Source::Out(n) => self.pass_output(n, attendant, &mut activity),
                    Source::Terminal => self.pass_terminal(attendant),
                    Source::Input => self.stdin.take_in(),
                    Source::Program => self.stdin.hand_on(self.terminal.as_ref()),
                    Source::Wishes => self.hear_wish(attendant),
                    Source::Unblocked => attendant.unblocked(),
                }
            }
            if !socket_open && self.init.is_none() {
                // No init was ever born.
                init_dead = true;
            }
            if !init_dead && !self.has_ended_well() && !self.backstop() {
                break;
            }
        }
        let _ended = self.launcher.as_mut().map(Child::wait);
        self.drain(attendant);
        self.conclude(init_dead)
    }

    fn wait(&self, attendant: &dyn Attendant, socket_open: bool, init_dead: bool) -> Vec<Source> {
        let blocked = attendant.blocked_on();
        let wishes = attendant.wishes();
        let mut list: Vec<(Source, BorrowedFd<'_>, PollFlags)> = Vec::with_capacity(8);
        if socket_open {
            list.push((Source::Socket, self.socket.as_fd(), PollFlags::IN));
        }
        if let (Some(init), false) = (&self.init, init_dead) {
            list.push((Source::Init, init.as_fd(), PollFlags::IN));
        }
        if let Some(fd) = blocked {
            list.push((Source::Unblocked, fd, PollFlags::OUT));
        } else {
            for (n, out) in self.out.iter().enumerate() {
                list.extend(
                    out.as_ref()
                        .map(|fd| (Source::Out(n), fd.as_fd(), PollFlags::IN)),
                );
            }
            list.extend(
                self.terminal
                    .as_ref()
                    .map(|fd| (Source::Terminal, fd.as_fd(), PollFlags::IN)),
            );
        }
        // Nothing is taken from the caller before there is a program to have it.
        let sink = self.stdin.sink.as_ref().or(self.terminal.as_ref());
        if let Some(sink) = sink.filter(|_| self.started()) {
            match (self.stdin.pending.is_empty(), &self.stdin.source) {
                (false, _) => list.push((Source::Program, sink.as_fd(), PollFlags::OUT)),
                (true, Some(source)) => list.push((Source::Input, source.as_fd(), PollFlags::IN)),
                (true, None) => {}
            }
        }
        list.extend(wishes.map(|fd| (Source::Wishes, fd, PollFlags::IN)));
        let timeout = self
            .kill_init_at
            .saturating_duration_since(Instant::now())
            .min(Duration::from_secs(60));
        let timeout = timespec(timeout);
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

    /// The program ran and is dead, and init is about to end by itself. A run that failed is not left before init is dead.
    fn has_ended_well(&self) -> bool {
        self.alone && self.failed.is_none() && self.started()
    }

    /// Who cannot be understood is not listened to any longer, and not left alive.
    fn hear_or_kill(&mut self, attendant: &mut dyn Attendant) -> bool {
        self.hear(attendant).unwrap_or_else(|error| {
            self.failed.get_or_insert(error);
            self.order(Order::Kill);
            self.hurry(BACKSTOP);
            false
        })
    }

    /// One report. False when nobody is left on the other side.
    fn hear(&mut self, attendant: &mut dyn Attendant) -> Result<bool, RunError> {
        let heard = match channel::receive::<Report>(self.socket.as_fd(), Wait::No) {
            Ok(heard) => heard,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => None,
            Err(e) => return Err(start("hear from the sandbox")(e)),
        };
        let Some((report, mut fds)) = heard else {
            return Ok(false);
        };
        match report {
            Report::Failed {
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
            Report::Started { layers } => self.started_with(layers),
            Report::Init { pid } => self.met_init(pid)?,
            Report::Workspace => {
                self.workspace = fds.pop();
                self.fill_workspace(attendant)?;
            }
            Report::Terminal => {
                self.terminal = fds.pop();
                self.terminal.as_ref().map(never_wait).transpose()?;
            }
            Report::Ended {
                exit,
                stop,
                usage,
                alone,
            } => (self.ended, self.alone) = (Some((exit, stop, usage)), alone),
        }
        Ok(true)
    }

    fn started_with(&mut self, layers: Vec<(Layer, String)>) {
        // It ended when init was born; no need to keep its corpse for the whole run.
        let _ended = self.launcher.as_mut().map(Child::try_wait);
        self.kill_init_at = Instant::now() + deadline(self.spec);
        self.layers = Some(layers);
    }

    fn met_init(&mut self, pid: i32) -> Result<(), RunError> {
        let no_init = || io::Error::other("no such pid");
        let pid = Pid::from_raw(pid)
            .ok_or_else(no_init)
            .map_err(start("find init"))?;
        let (pid, held) = standby::hold(pid)?;
        (self.init_pid, self.init) = (Some(pid), Some(held));
        Ok(())
    }

    fn fill_workspace(&mut self, attendant: &mut dyn Attendant) -> Result<(), RunError> {
        if let Some(workspace) = &self.workspace
            && let Err(source) = attendant.fill(workspace.as_fd())
        {
            self.failed = Some(RunError::Fill { source });
            self.order(Order::Kill);
            return Ok(());
        }
        self.order(Order::Filled);
        self.let_run(attendant);
        Ok(())
    }

    fn order(&self, order: Order) {
        // If init is gone there is nothing left to order.
        let _gone = channel::send(self.socket.as_fd(), &order, &[]);
    }

    fn pass_output(&mut self, n: usize, attendant: &mut dyn Attendant, activity: &mut Instant) {
        let Some(fd) = &self.out[n] else { return };
        let mut chunk = vec![0u8; CHUNK_BYTES];
        match rustix::io::read(fd, &mut chunk) {
            Ok(0) => self.out[n] = None,
            Ok(len) => {
                attendant.output(
                    if n == 0 {
                        Stream::Stdout
                    } else {
                        Stream::Stderr
                    },
                    &chunk[..len],
                );
                if self.spec.limits.idle_ms.is_some()
                    && activity.elapsed() > Duration::from_millis(50)
                {
                    *activity = Instant::now();
                    self.order(Order::Active);
                }
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(_) => self.out[n] = None,
        }
    }

    fn pass_terminal(&mut self, attendant: &mut dyn Attendant) {
        let Some(fd) = &self.terminal else { return };
        let mut chunk = vec![0u8; CHUNK_BYTES];
        match rustix::io::read(fd, &mut chunk) {
            Ok(len) if len > 0 => attendant.output(Stream::Stdout, &chunk[..len]),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            // EIO: the last process has closed the terminal.
            _ => self.terminal = None,
        }
    }

    fn hear_wish(&mut self, attendant: &mut dyn Attendant) {
        match attendant.wish() {
            None => {}
            Some(Wish::Cancel) => {
                self.asked_to_stop.get_or_insert(Stop::Cancelled);
                self.order(Order::Stop(Stop::Cancelled));
                self.hurry(Duration::from_millis(self.spec.limits.grace_ms) + BACKSTOP);
            }
            Some(Wish::Kill) => {
                self.asked_to_stop.get_or_insert(Stop::Cancelled);
                self.order(Order::Kill);
                self.hurry(BACKSTOP);
            }
            Some(Wish::Resize { rows, columns }) => {
                let size = rustix::termios::Winsize {
                    ws_row: rows,
                    ws_col: columns,
                    ws_xpixel: 0,
                    ws_ypixel: 0,
                };
                let _gone = self
                    .terminal
                    .as_ref()
                    .map(|t| rustix::termios::tcsetwinsize(t, size));
            }
        }
    }

    fn hurry(&mut self, within: Duration) {
        self.kill_init_at = self.kill_init_at.min(Instant::now() + within);
    }

    /// Kills init when it is overdue. False when even that has not helped in time.
    fn backstop(&mut self) -> bool {
        if Instant::now() < self.kill_init_at {
            return true;
        }
        if self.killed_init {
            return false;
        }
        self.killed_init = true;
        self.kill_init_at = Instant::now() + LAST_WAIT;
        let _gone = self.launcher.as_mut().map(Child::kill);
        match self.spec.level {
            Level::Full => {
                if let Some(init) = &self.init {
                    let _gone = rustix::process::pidfd_send_signal(init, Signal::KILL);
                }
            }
            // The guardian is what sweeps: it stays until nothing is left, whoever waits for that.
            Level::Landlock => {
                self.order(Order::Kill);
                self.kill_from_outside();
            }
        }
        true
    }

    /// Everything of the run's that can be told without the guardian: its group, or its uid.
    fn kill_from_outside(&self) {
        if let Some(group) = self.group {
            group.kill();
        }
        if let Identity::Leased { uid, .. } = self.spec.identity {
            // The guardian has the uid too, and tells the end.
            let guardian = self.init_pid.map(|pid| pid.as_raw_nonzero().get() as u32);
            let others = processes::of_user(uid).into_iter();
            for pid in others.filter(|pid| Some(*pid) != guardian) {
                // Nobody else is ever given the uid while it is leased.
                let held = processes::hold(pid);
                let _gone = held.map(|held| rustix::process::pidfd_send_signal(held, Signal::KILL));
            }
        }
    }

    /// Whether every process of the run is known to be dead.
    fn all_dead(&self, init_dead: bool) -> bool {
        // The guardian tells the end when it has no child left. Pid 1 takes everyone with it, whatever it said.
        if self.spec.level == Level::Full || !init_dead || self.ended.is_some() || !self.started() {
            return init_dead;
        }
        // Somebody killed the guardian.
        let until = Instant::now() + LAST_WAIT;
        loop {
            self.kill_from_outside();
            let empty = match (self.group, self.spec.identity) {
                (Some(group), _) => group.is_empty(),
                (None, Identity::Leased { uid, .. }) => processes::of_user(uid).is_empty(),
                (None, Identity::Caller { .. }) => return false,
            };
            if empty || Instant::now() > until {
                return empty;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn started(&self) -> bool {
        self.layers.is_some()
    }

    /// What is still in the pipes. Whoever else holds them is not waited for.
    fn drain(&mut self, attendant: &mut dyn Attendant) {
        for _ in 0..DRAIN_READS_MAX {
            self.pass_terminal(attendant);
        }
        for n in 0..2 {
            let Some(fd) = self.out[n].take() else {
                continue;
            };
            let mut chunk = vec![0u8; CHUNK_BYTES];
            for _ in 0..DRAIN_READS_MAX {
                match rustix::io::read(&fd, &mut chunk) {
                    Ok(len) if len > 0 => {
                        attendant.output(
                            if n == 0 {
                                Stream::Stdout
                            } else {
                                Stream::Stderr
                            },
                            &chunk[..len],
                        );
                    }
                    _ => break,
                }
            }
        }
    }

    fn conclude(mut self, init_dead: bool) -> Result<Finished, RunError> {
        if let (Some(init), true) = (&self.init, init_dead) {
            let _status =
                rustix::process::waitid(WaitId::PidFd(init.as_fd()), WaitIdOptions::EXITED);
        }
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        // Stopped on request on the way is no failure of ours: nothing of the program has run.
        if !self.started() && self.asked_to_stop.is_none() {
            let last = channel::read_diary(self.diary.as_fd()).pop();
            let step = last.map_or_else(|| String::from("start the launcher"), |(step, _)| step);
            return Err(RunError::Died { step });
        }
        let ended_well = self.has_ended_well();
        let all_dead = ended_well || self.all_dead(init_dead);
        // What init said is the whole truth. If it could say nothing, it was asked to stop, was overdue, or
        // was killed by somebody else.
        let overdue = self.killed_init.then_some(Stop::WallTime);
        let wall_ms = self.started.elapsed().as_millis() as u64;
        let (exit, stop, mut usage) = self.ended.take().unwrap_or((
            None,
            self.asked_to_stop.or(overdue),
            Usage {
                wall_ms,
                ..Usage::default()
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
        Ok(Finished {
            outcome,
            layers: self.layers.unwrap_or_default(),
            diary: channel::read_diary(self.diary.as_fd()),
            workspace: self.workspace,
            pids_denied: counters.pids_denied.unwrap_or(0),
            leaving: (ended_well && !init_dead).then(|| Leaving::new(self.init.take())),
        })
    }
}
