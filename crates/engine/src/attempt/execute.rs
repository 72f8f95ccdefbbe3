//! The third transition: starts the program in the sandbox, supervises it to its end, and captures its output within
//! the bounds of the logs.

use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use sandbox::cgroup::Group;
use sandbox::spec::{ConfinementLevel, Limits, SharedMemory, Spec, Terminal};
use sandbox::supervise::{self, Control, SpawnResources, Stream, SupervisorHandler};

use crate::attempt::context::LaunchRequest;
use crate::attempt::error::AttemptError;
use crate::attempt::idle_connection::IdleConnection;
use crate::attempt::input_copy::copy_inputs;
use crate::attempt::log_capture::LogCapture;
use crate::attempt::observer::RunObserver;
use crate::attempt::recorder::Recorder;
use crate::attempt::state::{Attempt, ProgramRun};
use crate::home::unix_ms;
use crate::plan::limits::error_chain;
use crate::plan::{self, Plan, StartParameters};
use crate::request::{Request, Stdin};
use crate::run_dir::RunDir;
use crate::workspace::Workspace;
use crate::workspace::tree::{self, TreeError};
use store::types::timings;

impl Attempt {
    pub fn execute(
        &mut self,
        launch: &LaunchRequest<'_>,
        level: ConfinementLevel,
        recorder: Option<&mut Recorder>,
        observer: &mut dyn RunObserver,
    ) -> Result<ProgramRun, AttemptError> {
        // Take the group out of `self`: `execute_in_group` needs it while it changes the rest of `self`.
        let group = std::mem::replace(&mut self.group, Err(String::new()));
        let ran = self.execute_in_group(group.as_ref().ok(), launch, level, recorder, observer);
        self.group = group;
        ran
    }

    fn execute_in_group(
        &mut self,
        group: Option<&Group>,
        launch: &LaunchRequest<'_>,
        level: ConfinementLevel,
        recorder: Option<&mut Recorder>,
        observer: &mut dyn RunObserver,
    ) -> Result<ProgramRun, AttemptError> {
        let LaunchRequest {
            request,
            context,
            plan,
            limits,
            storage,
        } = *launch;
        let spec = plan::build_spec(
            plan,
            request,
            limits,
            StartParameters {
                identity: self.identity(),
                kind: storage.kind(),
                terminal: context.terminal,
                level,
                required: &context.required_layers,
            },
        )?;
        let links = match level {
            ConfinementLevel::Full => Vec::new(),
            // Without a mount namespace, links in the workspace stand in for the mounts.
            ConfinementLevel::Landlock => plan::workspace_links(plan, request)?,
        };
        if let Some(workspace) = &self.workspace {
            workspace.link(&links, self.owner())?;
        }
        // A run that was killed may have left files there.
        let _ = self.clear_shared_memory(&spec);
        let resources = SpawnResources {
            launcher: &context.launcher,
            workspace: self.workspace.as_ref().map(Workspace::dir),
            stdin: open_stdin(request, plan, context.terminal)?,
            group,
        };
        // A failed spawn does not prove that init is dead.
        let running = supervise::spawn(&spec, resources).map_err(|error| {
            self.init_may_live = true;
            AttemptError::Start(error)
        })?;
        timings::mark("plan_sent");
        let provenance = match self.unrecorded_inputs.take() {
            Some(staged_inputs) => self.record_provenance(request, plan, &staged_inputs),
            None => Ok(()),
        };
        let begun =
            provenance.and_then(|()| self.ensure_row(recorder, request, context.claimed.as_ref()));
        if let Err(error) = begun {
            self.init_may_live |= !running.cancel_before_start();
            return Err(error);
        }
        let log_bytes = usize::try_from(limits.log_bytes).unwrap_or(usize::MAX);
        let idle_connection =
            IdleConnection::new(self.detached_store.take(), observer.control_fd());
        let mut bridge = ObserverBridge {
            observer,
            captures: [LogCapture::new(log_bytes), LogCapture::new(log_bytes)],
            files: self.log_files(),
            attempt: self,
            idle_connection,
            request,
            plan,
            limits,
            fill_error: None,
        };
        let started_ms = unix_ms();
        let finished = running.supervise(&mut bridge);
        let ended_ms = unix_ms();
        if let (Some(workspace), Ok(finished)) = (&self.workspace, &finished)
            && finished.outcome.all_dead
        {
            workspace.unlink(&links);
            // A failure is no loss: the next run with this uid clears it too.
            let _ = self.clear_shared_memory(&spec);
        }
        let (captures, fill_error) = (bridge.captures, bridge.fill_error.take());
        self.detached_store = bridge.idle_connection.into_store();
        if let Some(e) = fill_error {
            return Err(e);
        }
        let [stdout, stderr] = captures.map(LogCapture::finish);
        self.init_may_live |= finished.is_err();
        let mut finished = finished.map_err(AttemptError::Start)?;
        self.init_exit = finished.init_exit.take();
        timings::mark("program_and_teardown");
        timings::note_sandbox_steps(std::mem::take(&mut finished.step_log));
        Ok(ProgramRun {
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
            undead_init: finished.unkilled_init,
        })
    }

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

    /// The files to which the logs are written as they arrive, for `logs -f` and for recovery.
    fn log_files(&self) -> [LogFile; 2] {
        match (&self.dir, &self.record.commit_plan) {
            (Some(_), Some(_)) => [LogFile::Unmade, LogFile::Unmade],
            _ => [LogFile::None, LogFile::None],
        }
    }

    fn new_log(&self, stream: Stream) -> LogFile {
        let made = self
            .dir
            .as_ref()
            .and_then(|dir| dir.new_log(store::STREAMS[stream as usize]).ok());
        made.map_or(LogFile::None, LogFile::Open)
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
struct ObserverBridge<'a> {
    observer: &'a mut dyn RunObserver,
    captures: [LogCapture; 2],
    files: [LogFile; 2],
    attempt: &'a Attempt,
    idle_connection: IdleConnection,
    request: &'a Request,
    plan: &'a Plan,
    limits: &'a Limits,
    fill_error: Option<AttemptError>,
}

impl ObserverBridge<'_> {
    fn fill_memory_workspace(&self, memory: BorrowedFd<'_>) -> Result<(), AttemptError> {
        copy_inputs(memory, &self.plan.inputs, self.attempt.owner(), self.limits)?;
        let staged_inputs = self.attempt.record_staged_inputs(memory, self.plan)?;
        self.attempt
            .record_provenance(self.request, self.plan, &staged_inputs)
    }
}

impl SupervisorHandler for ObserverBridge<'_> {
    fn fill(&mut self, memory: BorrowedFd<'_>) -> io::Result<()> {
        if let Some(workspace) = &self.attempt.workspace {
            workspace.create_private_dirs(memory, self.attempt.owner())?;
        }
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
            *file = self.attempt.new_log(stream);
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
        self.idle_connection
            .wait_fd()
            .or_else(|| self.observer.control_fd())
    }

    fn next_control(&mut self) -> Option<Control> {
        // If another event is pending too, the next call handles it.
        match self.idle_connection.release_if_due() {
            true => {
                self.attempt.dir.iter().for_each(RunDir::start_writeback);
                None
            }
            false => self.observer.next_control(),
        }
    }
}
