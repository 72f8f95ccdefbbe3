//! What stands in this home: run directories, as they are, looked at without touching or locking them.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use engine::home::{self, Home};
use engine::request::AnalysisId;
use engine::run_dir::{RunDir, RunRecord, RunState, StateFile};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

const RECORD: &str = "run.json";
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// In a run directory: its runner was told to cancel.
const TOLD: &str = "cancel";

/// One run directory.
pub struct Standing {
    pub path: PathBuf,
    pub record: RunRecord,
    /// Whether the process that made it seems to live. For people: only the directory's lock is proof.
    pub alive: bool,
}

/// What is to be done about an attempt that has ended and is not in the database, or has something left on this disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It is being run, or collected.
    Runs,
    /// It awaits its commit, or a runner that died left it.
    Finish,
    /// Made by `workspace create`; nothing has run.
    Run,
    /// Ran by `run --in`.
    PostProcess,
    /// Recorded; only the workspace stands.
    Remove,
    /// Left by a run without a record.
    Clean,
    /// A home on a shared disk: another machine's.
    Elsewhere,
}

impl Standing {
    pub fn next(&self) -> Next {
        let record = &self.record;
        if record.host != home::machine_id() {
            return Next::Elsewhere;
        }
        match record.state {
            _ if self.alive => Next::Runs,
            RunState::Live | RunState::Quarantined if record.commit_plan.is_some() => Next::Finish,
            RunState::Live | RunState::Quarantined => Next::Clean,
            RunState::Open { .. } => Next::Run,
            RunState::Ran => Next::PostProcess,
            RunState::Kept { .. } | RunState::Recorded => Next::Remove,
        }
    }

    /// In a few words, with what to do.
    pub fn advice(&self) -> String {
        let id = &self.record.id;
        let at = self.record.workspace.display();
        match self.next() {
            Next::Runs => format!("{id} is running"),
            Next::Finish => {
                format!("{id} awaits its commit; `fumehood post-process {id}` finishes it")
            }
            Next::Run => format!(
                "{id} has a workspace, {at}; run in it with `fumehood run --in {id} …`, or `fumehood workspace remove {id}`"
            ),
            Next::PostProcess => {
                format!("{id} ran in its workspace, {at}; `fumehood post-process {id}` commits it")
            }
            Next::Remove => format!(
                "{id} is recorded, and its workspace is kept at {at}; `fumehood workspace remove {id}` removes it"
            ),
            Next::Clean => format!("{id} left things behind; `fumehood gc` removes them"),
            Next::Elsewhere => format!("{id} is another machine's"),
        }
    }
}

/// How much of a hurry there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hurry {
    /// SIGTERM to its processes, the grace, SIGKILL.
    No,
    /// SIGKILL at once.
    Now,
}

/// What came of telling a runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Now,
    /// Somebody has told it before, and once more would take its grace from it.
    Before,
    /// The program has ended; only what it left is being collected.
    HasEnded,
    /// It does not live, or cannot be shown to be the runner.
    Unreachable,
}

impl Standing {
    /// The runner's process, shown to be it. A pid alone may be another's by now. That the directory is locked shows that
    /// somebody is at it, and that the very process has the directory open, that it is this one; its descriptor was
    /// opened before we looked, and the process lives after we have looked, so the pid named one process all along.
    pub fn runner(&self) -> Option<Process> {
        if !self.alive {
            return None;
        }
        let runner = Process::of(&self.record)?;
        let is_locked = matches!(RunDir::try_lock(&self.path), Ok(None));
        let same = read(&self.path).is_some_and(|now| now.runner_pid == self.record.runner_pid);
        let shown = is_locked && same && has_open(self.record.runner_pid, &self.path);
        (shown && !runner.has_ended()).then_some(runner)
    }

    /// Has the runner cancel its analysis, as Ctrl-C would. Whoever comes first leaves a mark in the directory: a runner
    /// takes a second signal for impatience. The mark goes with the directory, and is not made once the program has
    /// ended, lest it stand in the way of the directory's removal.
    pub fn cancel(&self, hurry: Hurry) -> io::Result<Told> {
        let Some(runner) = self.runner() else {
            return Ok(Told::Unreachable);
        };
        if self.path.join(StateFile::Outcome.name()).exists() {
            return Ok(Told::HasEnded);
        }
        let first = match std::fs::File::create_new(self.path.join(TOLD)) {
            Ok(_) => true,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => false,
            Err(e) => return Err(e),
        };
        if first {
            runner.signal(Signal::TERM)?;
        }
        if hurry == Hurry::Now {
            // Another one than the first: two of a kind that are sent at once may arrive as one.
            runner.signal(Signal::INT)?;
        }
        Ok(match first || hurry == Hurry::Now {
            true => Told::Now,
            false => Told::Before,
        })
    }
}

/// Whether a process has this very directory open. What may not be looked at is not shown.
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

/// Every run directory of this home. What vanishes meanwhile, or has no record yet, is left out. Attempts move from
/// `runs` to `pending` only, so what is moved while we look is seen at least once.
pub fn all(home: &Home) -> Vec<Standing> {
    let bases = [home.runs(), home.pending()];
    let ids = bases.iter().flat_map(|base| entries(base));
    ids.flat_map(|id| of(&id)).collect()
}

/// The run directories of one analysis.
pub fn of_id(home: &Home, id: &AnalysisId) -> Vec<Standing> {
    let bases = [home.runs(), home.pending()];
    let found = bases.iter().flat_map(|base| of(&base.join(id.as_str())));
    found.collect()
}

pub fn any_of(home: &Home, id: &AnalysisId) -> bool {
    !of_id(home, id).is_empty()
}

fn of(id: &Path) -> Vec<Standing> {
    let look = |path: PathBuf| {
        let record = read(&path)?;
        let ours = id.file_name() == Some(record.id.as_str().as_ref());
        ours.then(|| Standing {
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

pub fn read(dir: &Path) -> Option<RunRecord> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir.join(RECORD), flags, Mode::empty()).ok()?;
    let mut text = Vec::new();
    let file = std::fs::File::from(file);
    file.take(RECORD_BYTES_MAX).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

fn is_alive(record: &RunRecord) -> bool {
    let here = record.host == home::machine_id() && record.boot_id == home::boot_id();
    let runs = matches!(record.state, RunState::Live | RunState::Quarantined);
    here && runs && Process::of(record).is_some_and(|runner| !runner.has_ended())
}

/// A runner's process. A pid alone would still name one that has ended and whom nobody has reaped yet.
pub struct Process(OwnedFd);

impl Process {
    pub fn of(record: &RunRecord) -> Option<Process> {
        let pid = Pid::from_raw(i32::try_from(record.runner_pid).ok()?)?;
        pidfd_open(pid, PidfdFlags::empty()).ok().map(Process)
    }

    pub fn has_ended(&self) -> bool {
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&at_once)), Ok(1..))
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.0, signal) {
            // It has ended meanwhile, which is what was wanted.
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
