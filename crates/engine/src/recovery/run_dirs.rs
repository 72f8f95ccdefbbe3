//! The run directories of this home, read without changing or locking them; and how to cancel the run in one.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::home::{self, Home};
use crate::request::AnalysisId;
use crate::run_dir::{RunDir, RunRecord, RunState, StateFile};

const RECORD_FILE: &str = "run.json";
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// A file in a run directory: somebody has signalled its runner to cancel.
const CANCEL_MARK: &str = "cancel";

/// One run directory.
pub struct RunDirInfo {
    /// The directory.
    pub path: PathBuf,
    /// What its `run.json` said when it was read.
    pub record: RunRecord,
    /// Whether the process that made it seems to be alive. Good enough for messages; only the directory's lock proves
    /// it.
    pub alive: bool,
}

/// What to do next about a run directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextAction {
    /// Nothing: its runner is running or collecting the attempt.
    AwaitRunner,
    /// Commit it: the attempt awaits its commit, or a runner that died left it.
    Finish,
    /// Run in it: `workspace create` made it, and nothing has run.
    RunIn,
    /// Collect and commit what `run --in` left.
    PostProcess,
    /// Remove the workspace: the attempt is recorded.
    RemoveWorkspace,
    /// Remove it: a run without a record left it.
    CleanUp,
    /// Nothing: the home is on a shared disk, and the directory belongs to another machine.
    LeaveToOther,
}

impl RunDirInfo {
    /// Returns what to do next. It changes nothing.
    pub fn next_action(&self) -> NextAction {
        let record = &self.record;
        if record.host != home::machine_id() {
            return NextAction::LeaveToOther;
        }
        match record.state {
            _ if self.alive => NextAction::AwaitRunner,
            RunState::Live | RunState::Quarantined if record.commit_plan.is_some() => {
                NextAction::Finish
            }
            RunState::Live | RunState::Quarantined => NextAction::CleanUp,
            RunState::Open { .. } => NextAction::RunIn,
            RunState::Ran => NextAction::PostProcess,
            RunState::Kept { .. } | RunState::Recorded => NextAction::RemoveWorkspace,
        }
    }

    /// Returns a short description, with what to do.
    pub fn advice(&self) -> String {
        let id = &self.record.id;
        let at = self.record.workspace.display();
        match self.next_action() {
            NextAction::AwaitRunner => format!("{id} is running"),
            NextAction::Finish => {
                format!("{id} awaits its commit; `fumehood post-process {id}` finishes it")
            }
            NextAction::RunIn => format!(
                "{id} has a workspace, {at}; run in it with `fumehood run --in {id} …`, or `fumehood workspace remove {id}`"
            ),
            NextAction::PostProcess => {
                format!("{id} ran in its workspace, {at}; `fumehood post-process {id}` commits it")
            }
            NextAction::RemoveWorkspace => format!(
                "{id} is recorded, and its workspace is kept at {at}; `fumehood workspace remove {id}` removes it"
            ),
            NextAction::CleanUp => format!("{id} left things behind; `fumehood gc` removes them"),
            NextAction::LeaveToOther => format!("{id} is another machine's"),
        }
    }
}

/// How to cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelMode {
    /// SIGTERM to the program's processes, the grace period, SIGKILL.
    Graceful,
    /// SIGKILL at once.
    Immediate,
}

/// The result of signalling a runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelSignal {
    /// The runner was signalled now.
    Sent,
    /// Somebody has signalled it before. A second signal would skip the grace period.
    AlreadySent,
    /// The program has ended; the runner is only collecting outputs.
    HasEnded,
    /// The runner is dead, or no proof shows that this process is the runner.
    Unreachable,
}

impl RunDirInfo {
    /// Returns the runner's process, if it is proved to be the runner. A pid alone may have been reused. Two facts
    /// prove it: the directory is locked, and this process has the directory open. The pidfd was opened before these
    /// checks and the process is alive after them, so the pid named one process throughout.
    pub fn runner(&self) -> Option<RunnerProcess> {
        if !self.alive {
            return None;
        }
        let runner = RunnerProcess::open(&self.record)?;
        let is_locked = matches!(RunDir::try_lock(&self.path), Ok(None));
        let same =
            read_record(&self.path).is_some_and(|now| now.runner_pid == self.record.runner_pid);
        let shown = is_locked && same && has_open(self.record.runner_pid, &self.path);
        (shown && !runner.has_ended()).then_some(runner)
    }

    /// Makes the runner cancel its analysis, as Ctrl-C would. The first caller leaves a mark file in the directory,
    /// because a runner takes a second signal for a request to kill at once. The mark is removed with the directory. It
    /// is not made once the program has ended, so that it does not interfere with the directory's removal.
    pub fn cancel(&self, mode: CancelMode) -> io::Result<CancelSignal> {
        let Some(runner) = self.runner() else {
            return Ok(CancelSignal::Unreachable);
        };
        if self.path.join(StateFile::Outcome.name()).exists() {
            return Ok(CancelSignal::HasEnded);
        }
        let first = match File::create_new(self.path.join(CANCEL_MARK)) {
            Ok(_) => true,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => false,
            Err(e) => return Err(e),
        };
        if first {
            runner.signal(Signal::TERM)?;
        }
        if mode == CancelMode::Immediate {
            // Send another signal than the first: two pending signals of one kind merge.
            runner.signal(Signal::INT)?;
        }
        Ok(match first || mode == CancelMode::Immediate {
            true => CancelSignal::Sent,
            false => CancelSignal::AlreadySent,
        })
    }
}

/// Whether a process has exactly this directory open. Returns false if its descriptors cannot be read.
fn has_open(pid: u32, dir: &Path) -> bool {
    let Ok(wanted) = std::fs::symlink_metadata(dir) else {
        return false;
    };
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter();
    let mut open = open.flatten().flatten().map(|entry| entry.path());
    open.any(|fd| {
        let found = std::fs::metadata(fd);
        found.is_ok_and(|m| (m.dev(), m.ino()) == (wanted.dev(), wanted.ino()))
    })
}

/// Lists every run directory of this home. Skips directories that vanish meanwhile or have no record yet. An attempt
/// moves only from `runs` to `pending`, so this order sees a moving attempt at least once.
pub fn list_all(home: &Home) -> Vec<RunDirInfo> {
    let bases = [home.runs(), home.pending()];
    let ids = bases.iter().flat_map(|base| entries(base));
    ids.flat_map(|id| list_attempts(&id)).collect()
}

/// Lists the run directories of one analysis.
pub fn list_analysis(home: &Home, id: &AnalysisId) -> Vec<RunDirInfo> {
    let bases = [home.runs(), home.pending()];
    let found = bases
        .iter()
        .flat_map(|base| list_attempts(&base.join(id.as_str())));
    found.collect()
}

/// Whether the home has a directory of the analysis, of any attempt.
pub fn has_any(home: &Home, id: &AnalysisId) -> bool {
    !list_analysis(home, id).is_empty()
}

fn list_attempts(id: &Path) -> Vec<RunDirInfo> {
    let look = |path: PathBuf| {
        let record = read_record(&path)?;
        let ours = id.file_name() == Some(record.id.as_str().as_ref());
        ours.then(|| RunDirInfo {
            alive: is_alive(&record),
            path,
            record,
        })
    };
    entries(id).into_iter().filter_map(look).collect()
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let list = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = list.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Reads the `run.json` of a directory without its lock. `None`: there is none, or it cannot be read.
pub fn read_record(dir: &Path) -> Option<RunRecord> {
    let mut text = Vec::new();
    let file = open_file(&dir.join(RECORD_FILE)).ok()?;
    file.take(RECORD_BYTES_MAX).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Opens a file to read it. Follows no link, and does not wait for the writer of a FIFO.
pub fn open_file(path: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map(File::from)
}

fn is_alive(record: &RunRecord) -> bool {
    let here = record.host == home::machine_id() && record.boot_id == home::boot_id();
    let runs = matches!(record.state, RunState::Live | RunState::Quarantined);
    here && runs && RunnerProcess::open(record).is_some_and(|runner| !runner.has_ended())
}

/// A runner's process, as a pidfd. A pid alone would also name a process that has ended and is not reaped.
pub struct RunnerProcess(OwnedFd);

impl RunnerProcess {
    /// Opens the process that now has the pid of the record. It need not be the runner. `None`: no process has the pid.
    pub fn open(record: &RunRecord) -> Option<RunnerProcess> {
        let pid = Pid::from_raw(i32::try_from(record.runner_pid).ok()?)?;
        pidfd_open(pid, PidfdFlags::empty()).ok().map(RunnerProcess)
    }

    /// Whether the process has ended, even if its parent has not waited for it.
    pub fn has_ended(&self) -> bool {
        sandbox::events::is_readable(&self.0)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.0, signal) {
            // The process has ended meanwhile, as wanted.
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

impl AsFd for RunnerProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
