//! The program's time: from the spec to its end, with its output heard and its logs kept within their bounds.

use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use sandbox::cgroup::Group;
use sandbox::spec::{ConfinementLevel, Limits, SharedMemory, Spec, Terminal};
use sandbox::supervise::{self, Control, SpawnResources, Stream, SupervisorHandler};

use super::resting::Resting;
use super::{Attempt, Ran};
use crate::attempt::isolation::Errand;
use crate::attempt::log_capture::Capture;
use crate::attempt::pipeline::{Audience, PipelineError, unix_ms};
use crate::attempt::recorder::Ledger;
use crate::plan::limits::error_chain;
use crate::plan::{self, Place, Plan};
use crate::request::{Request, Stdin};
use crate::run_dir::RunDir;
use crate::workspace::Workspace;
use crate::workspace::copy_in::{self, Budget, CopyError};
use crate::workspace::tree::{self, TreeError};
use store::types::timings;

impl Attempt {
    pub fn execute(
        &mut self,
        errand: &Errand<'_>,
        level: ConfinementLevel,
        ledger: Option<&mut Ledger>,
        audience: &mut dyn Audience,
    ) -> Result<Ran, PipelineError> {
        // Held beside everything else, which changes while the sandbox is being built.
        let group = std::mem::replace(&mut self.group, Err(String::new()));
        let ran = self.execute_in(group.as_ref().ok(), errand, level, ledger, audience);
        self.group = group;
        ran
    }

    fn execute_in(
        &mut self,
        group: Option<&Group>,
        errand: &Errand<'_>,
        level: ConfinementLevel,
        ledger: Option<&mut Ledger>,
        audience: &mut dyn Audience,
    ) -> Result<Ran, PipelineError> {
        let Errand {
            request,
            around,
            plan,
            limits,
            storage,
        } = *errand;
        let spec = plan::spec(
            plan,
            request,
            limits,
            Place {
                identity: self.identity(),
                kind: storage.kind(),
                terminal: around.terminal,
                level,
                required: &around.required_layers,
            },
        )?;
        let links = match level {
            ConfinementLevel::Full => Vec::new(),
            // What a mount would show there is a link.
            ConfinementLevel::Landlock => plan::links(plan, request)?,
        };
        if let Some(workspace) = &self.workspace {
            workspace.link(&links, self.owner())?;
        }
        let _left_by_one_that_was_killed = self.clear_shared_memory(&spec);
        let means = SpawnResources {
            launcher: &around.launcher,
            workspace: self.workspace.as_ref().map(Workspace::dir),
            stdin: open_stdin(request, plan, around.terminal)?,
            group,
        };
        // What could not be started may not be dead either.
        let running = supervise::spawn(&spec, means).map_err(|error| {
            self.init_stays = true;
            PipelineError::Start(error)
        })?;
        timings::mark("plan_sent");
        let explained = match self.unexplained.take() {
            Some(puts) => self.note_provenance(request, plan, &puts),
            None => Ok(()),
        };
        let begun = explained.and_then(|()| self.begin_in(ledger, request, around.taken.as_ref()));
        if let Err(error) = begun {
            self.init_stays |= !running.cancel_before_start();
            return Err(error);
        }
        let log_bytes = usize::try_from(limits.log_bytes).unwrap_or(usize::MAX);
        let resting = Resting::new(self.lent.take(), audience.wishes());
        let mut ears = Ears {
            audience,
            captures: [Capture::new(log_bytes), Capture::new(log_bytes)],
            files: self.log_files(),
            attempt: self,
            resting,
            request,
            plan,
            limits,
            fill_error: None,
        };
        let started_ms = unix_ms();
        let finished = running.supervise(&mut ears);
        let ended_ms = unix_ms();
        if let (Some(workspace), Ok(finished)) = (&self.workspace, &finished)
            && finished.outcome.all_dead
        {
            workspace.unlink(&links);
            let _the_next_tries_again = self.clear_shared_memory(&spec);
        }
        let (captures, fill_error) = (ears.captures, ears.fill_error.take());
        self.lent = ears.resting.wake();
        if let Some(e) = fill_error {
            return Err(e);
        }
        let [stdout, stderr] = captures.map(Capture::finish);
        self.init_stays |= finished.is_err();
        let mut finished = finished.map_err(PipelineError::Start)?;
        self.leaving = finished.init_exit.take();
        timings::mark("program_and_teardown");
        timings::note_sandbox_steps(std::mem::take(&mut finished.step_log));
        Ok(Ran {
            outcome: finished.outcome,
            level,
            notices: Vec::new(),
            layers: finished.layers,
            stdout,
            stderr,
            started_ms,
            ended_ms,
            pids_denied: finished.pids_denied,
            memory: finished.workspace,
            undead_init: finished.unkilled_init,
        })
    }

    /// In the host's /dev/shm, what belongs to the leased uid: only this run and those before it had that uid, and the next
    /// must not find it. A plain user's own files there cannot be told from the program's, and stay.
    fn clear_shared_memory(&self, spec: &Spec) -> Result<(), TreeError> {
        let opened =
            spec.level == ConfinementLevel::Landlock && spec.shared_memory == SharedMemory::Host;
        match &self.lease {
            Some(lease) if opened => tree::remove_owned(Path::new("/dev/shm"), lease.uid),
            _ => Ok(()),
        }
    }

    /// Where the logs go as they arrive, for `logs -f` and for whoever finds us dead.
    fn log_files(&self) -> [LogFile; 2] {
        match (&self.dir, &self.record.task) {
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

/// A log as it arrives. Most programs that end well print little, and many nothing.
enum LogFile {
    /// There is none, or the disk is full: the log is in memory too, and written whole at the end.
    None,
    /// Nothing has arrived.
    Unmade,
    Open(std::fs::File),
}

pub(super) fn fill(
    workspace: BorrowedFd<'_>,
    inputs: &[(PathBuf, PathBuf)],
    owner: Option<(u32, u32)>,
    limits: &Limits,
) -> Result<(), CopyError> {
    let mut budget = Budget {
        bytes: limits.disk_bytes,
        files: limits.files,
    };
    for (source, name) in inputs {
        copy_in::copy_in(source, workspace, name, owner, &mut budget)?;
    }
    Ok(())
}

fn open_stdin(
    request: &Request,
    plan: &Plan,
    terminal: Terminal,
) -> Result<Option<OwnedFd>, PipelineError> {
    let shell = matches!(terminal, Terminal::Own { .. });
    if shell || request.stdin == Stdin::Caller {
        return Ok(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3).ok());
    }
    let opened = plan.stdin.as_ref().map(|path| {
        open_plainly(path).map_err(|source| PipelineError::Stdin {
            path: path.clone(),
            source,
        })
    });
    opened.transpose()
}

/// Opens a file to be piped in. Its path was resolved and checked when the plan was made; a link that stands there now
/// is somebody's trick. Never waits for the other end of a FIFO.
fn open_plainly(path: &Path) -> io::Result<OwnedFd> {
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

/// Between the sandbox and the audience: keeps the logs within their bounds.
struct Ears<'a> {
    audience: &'a mut dyn Audience,
    captures: [Capture; 2],
    files: [LogFile; 2],
    attempt: &'a Attempt,
    resting: Resting,
    request: &'a Request,
    plan: &'a Plan,
    limits: &'a Limits,
    fill_error: Option<PipelineError>,
}

impl Ears<'_> {
    fn fill_memory(&self, memory: BorrowedFd<'_>) -> Result<(), PipelineError> {
        fill(memory, &self.plan.inputs, self.attempt.owner(), self.limits)?;
        let puts = self.attempt.note_puts(memory, self.plan)?;
        self.attempt.note_provenance(self.request, self.plan, &puts)
    }
}

impl SupervisorHandler for Ears<'_> {
    fn fill(&mut self, memory: BorrowedFd<'_>) -> io::Result<()> {
        if let Some(workspace) = &self.attempt.workspace {
            workspace.furnish(memory, self.attempt.owner())?;
        }
        self.fill_memory(memory).map_err(|e| {
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
        self.audience.live(stream, live);
    }

    fn blocked_on(&self, stream: Stream) -> Option<BorrowedFd<'_>> {
        self.audience.blocked_on(stream)
    }

    fn unblocked(&mut self, stream: Stream) {
        self.audience.unblocked(stream);
    }

    fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        self.resting.listens().or_else(|| self.audience.wishes())
    }

    fn next_control(&mut self) -> Option<Control> {
        // Whatever else there is is heard at the next turn.
        match self.resting.rang() {
            true => {
                self.attempt.dir.iter().for_each(RunDir::send_off);
                None
            }
            false => self.audience.wish(),
        }
    }
}
