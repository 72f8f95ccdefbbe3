//! From [`ReadyAttempt`] to [`ExecutedAttempt`]: starts the program in the sandbox, supervises it to its end, and captures its output
//! within the bounds of the logs.

use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use sandbox::spec::{ConfinementLevel, Enforcement, SharedMemory, Spec, Terminal};
use sandbox::supervise::{self, Control, LaunchStep, SpawnResources, Stream, SupervisorHandler};

use crate::attempt::context::PlannedRun;
use crate::attempt::error::AttemptError;
use crate::attempt::idle_timer::IdleTimer;
use crate::attempt::input_copy::copy_inputs;
use crate::attempt::isolation;
use crate::attempt::log_capture::LogCapture;
use crate::attempt::observer::RunObserver;
use crate::attempt::record_builder;
use crate::attempt::states::{
    AbortedAttempt, ExecutedAttempt, FilledAttempt, LockedAttempt, OwnedRun, ProgramRun,
    ReadyAttempt,
};
use crate::home::unix_ms;
use crate::plan::limits::error_chain;
use crate::plan::{self, Plan, StartParameters};
use crate::request::Stdin;
use crate::settings::Request;
use crate::workspace::tree::{self, TreeError};
use store::types::timings;

impl<'r> ReadyAttempt<'r> {
    /// Runs the program at the strongest allowed level that this host supports.
    ///
    /// Durable step: [`CrashPoint::Begun`](store::types::crash_points::CrashPoint::Begun), unless the row was begun
    /// before. The logs are written as they arrive.
    pub fn execute(
        mut self,
        run: &PlannedRun<'_>,
        observer: &mut dyn RunObserver,
    ) -> Result<ExecutedAttempt<'r>, Box<AbortedAttempt<'r>>> {
        match self.run_at_strongest_level(run, observer) {
            Ok((enforcement, ran)) => {
                let number = self.filled.claimed.run.record.attempt;
                let mut record = record_builder::program_record(run, number, &enforcement, &ran);
                record_builder::apply_cancel_cause(&mut record, observer);
                Ok(ExecutedAttempt {
                    ready: self,
                    ran,
                    record,
                })
            }
            Err(error) => Err(AbortedAttempt::new(error, self.into_holdings())),
        }
    }

    fn run_at_strongest_level(
        &mut self,
        run: &PlannedRun<'_>,
        observer: &mut dyn RunObserver,
    ) -> Result<(Vec<Enforcement>, ProgramRun), AttemptError> {
        let levels = isolation::allowed_levels(run.request)?;
        let mut stepped_down: Option<String> = None;
        for level in &levels {
            let last = levels.last() == Some(level);
            match self.run_at(*level, run, observer) {
                Ok((enforcement, mut ran)) => {
                    ran.notices = isolation::confinement_notices(&ran, stepped_down.as_deref());
                    // The notice about a lower level was given before the program ran.
                    if stepped_down.is_none() {
                        ran.notices.iter().for_each(|text| observer.notice(text));
                    }
                    return Ok((enforcement, ran));
                }
                Err(error) if !last && isolation::host_lacks_full(&error, run.context) => {
                    let why = error_chain(&error);
                    tracing::debug!(?why, "step down");
                    observer.notice(&isolation::step_down_notice(&why));
                    stepped_down = Some(why);
                }
                Err(error) => {
                    return Err(match stepped_down {
                        None => error,
                        Some(full) => AttemptError::NoLevel {
                            full,
                            landlock: Box::new(error),
                        },
                    });
                }
            }
        }
        Err(AttemptError::Cancelled)
    }

    fn run_at(
        &mut self,
        level: ConfinementLevel,
        run: &PlannedRun<'_>,
        observer: &mut dyn RunObserver,
    ) -> Result<(Vec<Enforcement>, ProgramRun), AttemptError> {
        tracing::debug!(id = %run.request.id, level = level.as_str(), "start the sandbox");
        let enforcement = self.enforcement(run, level)?;
        let ReadyAttempt {
            filled,
            group,
            init_may_live,
        } = self;
        let (plan, request, limits) = (run.plan, run.request, run.limits);
        let spec = plan::build_spec(
            plan,
            request,
            limits,
            StartParameters {
                identity: filled.claimed.run.identity(),
                kind: filled.storage.kind(),
                terminal: run.context.terminal,
                level,
                required: &run.request.required_layers,
            },
        )?;
        let links = match level {
            ConfinementLevel::Full => Vec::new(),
            // Without a mount namespace, links in the workspace stand in for the mounts.
            ConfinementLevel::Landlock => plan::workspace_links(plan, request)?,
        };
        filled.workspace.link(&links, filled.claimed.run.owner())?;
        // A run that was killed may have left files there.
        let _ = filled.claimed.run.clear_shared_memory(&spec);
        let resources = SpawnResources {
            launcher: &run.context.launcher,
            workspace: Some(filled.workspace.dir()),
            stdin: open_stdin(request, plan, run.context.terminal)?,
            group: group.as_ref().ok(),
        };
        // A failed spawn does not prove that init is dead.
        let running = supervise::spawn(&spec, resources).map_err(|error| {
            *init_may_live = true;
            AttemptError::Start(error)
        })?;
        timings::mark("plan_sent");
        if let Err(error) = filled.claimed.begin_row(run) {
            *init_may_live |= !running.cancel_before_start();
            return Err(error);
        }
        let mut bridge = ObserverBridge::new(observer, filled, run);
        let started_ms = unix_ms();
        let finished = running.supervise(&mut bridge);
        let ended_ms = unix_ms();
        let (captures, fill_error) = (bridge.captures, bridge.fill_error);
        if finished.as_ref().is_ok_and(|f| f.outcome.all_dead) {
            filled.workspace.unlink(&links);
            // A failure is no loss: the next run with this uid clears it too.
            let _ = filled.claimed.run.clear_shared_memory(&spec);
        }
        if let Some(e) = fill_error {
            return Err(e);
        }
        let [stdout, stderr] = captures.map(LogCapture::finish);
        *init_may_live |= finished.is_err();
        let finished = finished.map_err(AttemptError::Start)?;
        timings::mark("program_and_teardown");
        for (layer, detail) in &finished.layers {
            tracing::debug!(layer = layer.as_str(), ?detail, "layer in force");
        }
        tracing::debug!(
            exit = ?finished.outcome.exit,
            stop = ?finished.outcome.stop,
            all_dead = finished.outcome.all_dead,
            "the program ended"
        );
        let named = |(step, at): &(LaunchStep, u64)| (step.name().to_owned(), *at);
        timings::note_sandbox_steps(finished.step_log.iter().map(named).collect());
        let ran = ProgramRun {
            outcome: finished.outcome,
            level,
            notices: Vec::new(),
            layers: finished.layers,
            stdout,
            stderr,
            started_ms,
            ended_ms,
            pids_denied: finished.pids_denied,
            memory_workspace: finished.workspace,
            init_exit: finished.init_exit,
            undead_init: finished.live_init_pid,
        };
        Ok((enforcement, ran))
    }
}

impl LockedAttempt<'_> {
    /// Writes the provenance of the inputs and begins the row, unless that is done. The sandbox is built meanwhile.
    fn begin_row(&mut self, run: &PlannedRun<'_>) -> Result<(), AttemptError> {
        if let Some(staged_inputs) = self.run.unrecorded_inputs.take()
            && self.row.is_to_be_recorded()
        {
            self.run.record_provenance(run, &staged_inputs)?;
        }
        self.row.begin(&mut self.run, run)
    }
}

impl OwnedRun {
    /// Removes the files of the leased uid from the host's /dev/shm. Only this run and earlier ones had that uid, and
    /// the next run must not find them. A plain user's own files cannot be distinguished from the program's, so they
    /// stay.
    fn clear_shared_memory(&self, spec: &Spec) -> Result<(), TreeError> {
        let opened =
            spec.level == ConfinementLevel::Landlock && spec.shared_memory == SharedMemory::Host;
        match &self.lease {
            Some(lease) if opened => tree::remove_owned(Path::new("/dev/shm"), lease.uid),
            _ => Ok(()),
        }
    }
}

/// A log file. It is created when the first output arrives, because many programs print nothing.
enum LogFile {
    /// No file is written, because nothing is recorded or the disk is full. The log is also in memory, and the end of
    /// the attempt writes it whole.
    None,
    /// No output has arrived yet.
    Unmade,
    Open(std::fs::File),
}

fn open_stdin(
    request: &Request,
    plan: &Plan,
    terminal: Terminal,
) -> Result<Option<OwnedFd>, AttemptError> {
    let shell = matches!(terminal, Terminal::Own { .. });
    if shell || request.stdin == Stdin::Caller {
        return Ok(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).ok());
    }
    let opened = plan.stdin.as_ref().map(|path| {
        open_input_file(path).map_err(|source| AttemptError::Stdin {
            path: path.clone(),
            source,
        })
    });
    opened.transpose()
}

/// Opens a file to be piped to standard input. The plan resolved and checked the path, so a symlink that is there now
/// is an attack. The call never waits for the other end of a FIFO.
fn open_input_file(path: &Path) -> io::Result<OwnedFd> {
    use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
    let file = rustix::fs::openat2(
        rustix::fs::CWD,
        path,
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )?;
    match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
        FileType::RegularFile | FileType::Fifo => Ok(file),
        _ if path == Path::new("/dev/null") => Ok(file),
        _ => Err(io::Error::other("it is not a plain file or a FIFO")),
    }
}

/// Passes events from the sandbox to the observer, and keeps the logs within their bounds.
struct ObserverBridge<'a, 'r> {
    observer: &'a mut dyn RunObserver,
    captures: [LogCapture; 2],
    /// The files to which the logs are written as they arrive, for `logs -f` and for recovery.
    files: [LogFile; 2],
    filled: &'a mut FilledAttempt<'r>,
    /// `None`: it has expired, or none could be made.
    idle_timer: Option<IdleTimer>,
    run: &'a PlannedRun<'a>,
    fill_error: Option<AttemptError>,
}

impl<'a, 'r> ObserverBridge<'a, 'r> {
    fn new(
        observer: &'a mut dyn RunObserver,
        filled: &'a mut FilledAttempt<'r>,
        run: &'a PlannedRun<'a>,
    ) -> ObserverBridge<'a, 'r> {
        let log_bytes = usize::try_from(run.limits.log_bytes).unwrap_or(usize::MAX);
        let idle_timer = IdleTimer::start(observer.control_fd()).ok();
        if let (None, Some(recorder)) = (&idle_timer, filled.claimed.row.recorder()) {
            // Without a timer nothing would close the connection later, so close it now.
            recorder.close_idle();
        }
        let files = match filled.claimed.row.is_to_be_recorded() {
            true => [LogFile::Unmade, LogFile::Unmade],
            false => [LogFile::None, LogFile::None],
        };
        ObserverBridge {
            observer,
            captures: [LogCapture::new(log_bytes), LogCapture::new(log_bytes)],
            files,
            filled,
            idle_timer,
            run,
            fill_error: None,
        }
    }

    fn fill_memory_workspace(&self, memory: BorrowedFd<'_>) -> Result<(), AttemptError> {
        let LockedAttempt {
            run: owned, row, ..
        } = &self.filled.claimed;
        let plan = self.run.plan;
        copy_inputs(memory, &plan.inputs, owned.owner(), self.run.limits)?;
        if row.is_to_be_recorded() {
            let staged_inputs = owned.record_staged_inputs(memory, plan)?;
            owned.record_provenance(self.run, &staged_inputs)?;
        }
        Ok(())
    }
}

impl SupervisorHandler for ObserverBridge<'_, '_> {
    fn fill(&mut self, memory: BorrowedFd<'_>) -> io::Result<()> {
        let owner = self.filled.claimed.run.owner();
        self.filled.workspace.create_private_dirs(memory, owner)?;
        self.fill_memory_workspace(memory).map_err(|e| {
            let text = error_chain(&e);
            self.fill_error = Some(e);
            io::Error::other(text)
        })
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        let live = self.captures[stream as usize].push(bytes);
        let file = &mut self.files[stream as usize];
        if let LogFile::Unmade = file
            && !live.head.is_empty()
        {
            let name = store::STREAMS[stream as usize];
            let made = self.filled.claimed.run.dir.new_log(name);
            *file = made.map_or(LogFile::None, LogFile::Open);
        }
        if let LogFile::Open(open) = file
            && open.write_all(live.head).is_err()
        {
            *file = LogFile::None;
        }
        self.observer.output(stream, live);
    }

    fn blocked_on(&self, stream: Stream) -> Option<BorrowedFd<'_>> {
        self.observer.blocked_on(stream)
    }

    fn unblocked(&mut self, stream: Stream) {
        self.observer.unblocked(stream);
    }

    fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.idle_timer {
            Some(timer) => Some(timer.wait_fd()),
            None => self.observer.control_fd(),
        }
    }

    fn next_control(&mut self) -> Option<Control> {
        if self.idle_timer.take_if(|timer| timer.is_due()).is_none() {
            return self.observer.next_control();
        }
        let LockedAttempt {
            run: owned, row, ..
        } = &mut self.filled.claimed;
        if let Some(recorder) = row.recorder() {
            recorder.close_idle();
        }
        // The program may run for hours, and this process only passes on its output.
        sandbox::drop_code_pages();
        owned.dir.start_writeback();
        // If another event is pending too, the next call handles it.
        None
    }
}
