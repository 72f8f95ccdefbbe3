//! What stands in this home: run directories, as they are, looked at without touching or locking them.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use analysis::home::{self, Home};
use analysis::request::AnalysisId;
use analysis::run_dir::{RunRecord, RunState};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

const RECORD: &str = "run.json";
const RECORD_BYTES_MAX: u64 = 1 << 20;

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
        if record.host != home::machine() {
            return Next::Elsewhere;
        }
        match record.state {
            _ if self.alive => Next::Runs,
            RunState::Live | RunState::Quarantined if record.task.is_some() => Next::Finish,
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
    let here = record.host == home::machine() && record.boot_id == home::boot_id();
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
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
