//! The run directory of one attempt.
//!
//! It is made and locked before anything else of the attempt exists, and removed after everything else
//! is gone. Whoever finds one unlocked knows that its runner is dead, and what stands in it says what
//! the dead left and how far they came: that is all that finishing the attempt needs.
//!
//! | file | what | written |
//! |---|---|---|
//! | `run.json` | [`RunRecord`] | before each thing it names is made |
//! | `puts.json` | what was put into the workspace, by hash | before the start, where something was |
//! | `provenance.json` | what the attempt was made from | before the start |
//! | `stdout`, `stderr` | the logs, up to half their limit | as they arrive, if anything does |
//! | `stdout.tail`, `stderr.tail` | their ends | once all is dead |
//! | `outcome.json` | how it ended | once all is dead |
//! | `manifest.json` | what is taken of what it left | before the first file moves; where none does, if the commit fails |
//! | `objects/` | outputs that the artifact store would not take | when it would not |
//!
//! Each is written so that killing us leaves it whole or not there. A power cut may tear it, take it away or leave it empty until
//! [`RunDir::make_durable`]: that is called before the first file moves, and before anybody is told that the attempt
//! awaits its commit. Where nothing moves, the commit itself comes first, and is durable.

mod others;

use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::home::{self, Home, HomeError, make_private};
use crate::request::{AnalysisId, Collection};
use crate::workspace::Identity;

pub use others::{holds, stands};
use others::{in_the_way, refuse_beside, siblings};

/// What the reaper must know of an attempt. Versioned, written before the thing it names is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    pub version: u32,
    pub id: AnalysisId,
    #[serde(default = "first")]
    pub attempt: u32,
    pub host: String,
    pub boot_id: String,
    pub runner_pid: u32,
    pub workspace: PathBuf,
    /// The name, unknown to anyone else, under which the workspace is made before it gets its own.
    pub draft: PathBuf,
    /// What the workspace is, once it is made: proof that it is ours.
    pub workspace_is: Option<Identity>,
    pub uid: Option<u32>,
    /// The project whose quota holds the workspace, where the file system has such a thing.
    #[serde(default)]
    pub project_quota: Option<u32>,
    pub cgroups: Vec<PathBuf>,
    /// Of a quarantined run: its init, which ends after every other process of the run. Its lock on the workspace does
    /// not tell: the kernel closes a process's files before it waits for the rest of the pid namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init: Option<ProcessIdentity>,
    pub state: RunState,
    /// The workspace was made by `workspace create`: whatever happens, it is the user's to remove.
    #[serde(default)]
    pub prepared: bool,
    /// `None`: nothing of it is recorded, and what is left is only removed.
    #[serde(default)]
    pub task: Option<Task>,
}

fn first() -> u32 {
    1
}

/// A process of this boot, told from a later one with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pid: u32,
    /// When it started, in the kernel's ticks since the boot.
    started: u64,
}

impl ProcessIdentity {
    /// `None`: there is no such process, or it has ended.
    pub fn of(pid: u32) -> Option<ProcessIdentity> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may hold anything; the fields follow its last parenthesis.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?;
        let started = fields.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X")).then_some(ProcessIdentity { pid, started })
    }

    pub fn lives(self) -> bool {
        ProcessIdentity::of(self.pid) == Some(self)
    }
}

/// What finishing the attempt needs to know, decided at its start, so that whoever finishes it does the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Tells this attempt from every other, whatever its id and number.
    pub key: String,
    /// Which database has it: its own id, and where it was found, for people.
    pub database_id: String,
    pub database: String,
    pub collection: Collection,
    /// The artifact store that its outputs go to, whoever finishes it: its path and its own id.
    pub artifacts: PathBuf,
    pub artifacts_id: String,
    /// The database has, or had, a row for it.
    pub begun: bool,
    /// The workspace lives in memory and dies with the runner.
    pub memory: bool,
    /// The workspace's files were given to us: the leased uid may be another's by now.
    pub taken_over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    Live,
    /// The workspace stays until this time (Unix seconds).
    Kept {
        until: u64,
    },
    /// Some process could not be killed; nothing may be removed before it is gone.
    Quarantined,
    /// Made by `workspace create`, until this time; nothing has run in it.
    Open {
        until: u64,
    },
    /// Ran by `run --in`; `post-process` collects and commits it.
    Ran,
    /// Committed by `post-process`; `workspace remove` removes it.
    Recorded,
}

pub const RECORD_VERSION: u32 = 1;
const RECORD: &str = "run.json";
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// The other files of versioned JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paper {
    Puts,
    Provenance,
    Outcome,
    Manifest,
}

impl Paper {
    pub fn name(self) -> &'static str {
        match self {
            Paper::Puts => "puts.json",
            Paper::Provenance => "provenance.json",
            Paper::Outcome => "outcome.json",
            Paper::Manifest => "manifest.json",
        }
    }

    /// A million outputs with long names; what is larger is not ours.
    const BYTES_MAX: u64 = 1 << 30;
}

/// Whether a write must outlive a power cut before the next step is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durable {
    Yes,
    No,
}

/// The held, locked directory of one attempt.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Locked exclusively for as long as the runner lives.
    lock: OwnedFd,
    /// The names above it are durable.
    findable: std::cell::Cell<bool>,
    /// The record that stands there, if it was written by us.
    record: std::cell::RefCell<Option<std::fs::File>>,
}

impl RunDir {
    /// Claims `runs/{id}/{attempt}`. The id is refused while an attempt of it, this one or another, stands there.
    pub fn claim(home: &Home, id: &AnalysisId, attempt: u32) -> Result<RunDir, HomeError> {
        let path = home.runs().join(id.as_str()).join(attempt.to_string());
        for other in siblings(home, id).filter(|other| *other != path) {
            refuse_beside(&other, id)?;
        }
        // A reaper looking through may take an empty directory away, or hold its lock for a moment: then again.
        const TRIES: u32 = 200;
        for _ in 0..TRIES {
            match RunDir::try_claim(&path, id) {
                Ok(Some(dir)) => return Ok(dir),
                Err(HomeError::Make { source, .. } | HomeError::Lock { source, .. })
                    if source.kind() == io::ErrorKind::NotFound => {}
                Ok(None) => {}
                Err(e) => return Err(e),
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        Err(HomeError::Running { id: id.clone() })
    }

    fn try_claim(path: &Path, id: &AnalysisId) -> Result<Option<RunDir>, HomeError> {
        make_private(path)?;
        let Some(dir) = RunDir::try_lock(path)? else {
            // A runner writes its record at once; without one it is a reaper, or a runner just born.
            return match path.join(RECORD).exists() {
                true => Err(HomeError::Running { id: id.clone() }),
                false => Ok(None),
            };
        };
        match dir.read() {
            Ok(Some(record)) => Err(in_the_way(record)),
            // Papers of an earlier attempt, whose removal was cut short, must not be taken for ours.
            Ok(None) => dir.clear().map(|()| Some(dir)),
            Err(e) => Err(e),
        }
    }

    /// Takes up the workspace that `workspace create` made for an id, or the attempt that awaits its end.
    pub fn find(home: &Home, id: &AnalysisId) -> Result<Option<(RunDir, RunRecord)>, HomeError> {
        for path in siblings(home, id) {
            let Some(dir) = RunDir::try_lock(&path)? else {
                return Err(HomeError::Running { id: id.clone() });
            };
            if let Some(record) = dir.read()? {
                return Ok(Some((dir, record)));
            }
        }
        Ok(None)
    }

    /// `None` when a living runner holds it.
    pub fn try_lock(path: &Path) -> Result<Option<RunDir>, HomeError> {
        let failed = |source: rustix::io::Errno| HomeError::Lock {
            path: path.to_path_buf(),
            source: source.into(),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let dir = RunDir {
                    path: path.to_path_buf(),
                    lock,
                    findable: std::cell::Cell::new(false),
                    record: std::cell::RefCell::new(None),
                };
                // Between opening and locking it may have been removed, and another may stand in its place.
                Ok(dir.is_in_place().then_some(dir))
            }
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// The pid on record, without the lock: only to ask whether it is worth waiting for.
    pub fn runner_named_in(path: &Path) -> Option<u32> {
        let text = std::fs::read(path.join(RECORD)).ok()?;
        let record: RunRecord = serde_json::from_slice(&text).ok()?;
        Some(record.runner_pid)
    }

    /// Whether the locked directory is still the one that the path names.
    fn is_in_place(&self) -> bool {
        let held = rustix::fs::fstat(&self.lock).map(|s| (s.st_dev, s.st_ino));
        let named = rustix::fs::lstat(&self.path).map(|s| (s.st_dev, s.st_ino));
        matches!((held, named), (Ok(a), Ok(b)) if a == b)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the record in one step: who has the lock finds the old one or the new one. What says that a workspace is the
    /// user's, now or later, also outlives a power cut; of a run that is under way it may be lost with the run.
    pub fn write(&self, record: &RunRecord) -> Result<(), HomeError> {
        if record.state != RunState::Live || record.prepared {
            return self.write_durably(record);
        }
        match self.write_over(record) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let written = self.replace(RECORD, record, Durable::No)?;
                *self.record.borrow_mut() = Some(written);
                Ok(())
            }
            Err(source) => Err(self.unwritten(RECORD, source)),
        }
    }

    /// Over the record that we wrote before, if there is one and both fit in a page: the kernel takes over a page at once, and
    /// nobody is killed meanwhile. A new file, and on ext4 a name that takes the place of another, costs more than all else
    /// that is done to write it.
    fn write_over(&self, record: &RunRecord) -> io::Result<bool> {
        const PAGE_BYTES: usize = 4096;
        let held = self.record.borrow();
        let Some(file) = held.as_ref() else {
            return Ok(false);
        };
        let stat = rustix::fs::fstat(file)?;
        let mut text = serde_json::to_vec(record)?;
        let before = usize::try_from(stat.st_size).unwrap_or(usize::MAX);
        if text.len().max(before) > PAGE_BYTES {
            return Ok(false);
        }
        if stat.st_nlink == 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        // What is left of a longer one would be no JSON.
        text.resize(text.len().max(before), b' ');
        file.write_all_at(&text, 0).map(|()| true)
    }

    /// Whether the machine stopped before the record of a run came to the disk: there is nothing in it, and it is older than
    /// this start of the machine. Nothing else in the directory is durable then.
    pub fn was_cut_off(&self) -> bool {
        let stat = rustix::fs::statat(&self.lock, RECORD, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
        let older = stat.is_ok_and(|s| home::boot_seconds().is_some_and(|boot| s.st_mtime < boot));
        let bytes = || self.bytes(RECORD, RECORD_BYTES_MAX).ok().flatten();
        older && bytes().is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0))
    }

    pub fn read(&self) -> Result<Option<RunRecord>, HomeError> {
        let Some(record) = self.load::<RunRecord>(RECORD, RECORD_BYTES_MAX)? else {
            return Ok(None);
        };
        match self.is_of(&record) {
            true => Ok(Some(record)),
            false => Err(self.unread(
                RECORD,
                io::Error::other("it names things that are not this run's"),
            )),
        }
    }

    /// The same, and it outlives a power cut.
    pub fn write_durably(&self, record: &RunRecord) -> Result<(), HomeError> {
        let written = self.replace(RECORD, record, Durable::Yes)?;
        *self.record.borrow_mut() = Some(written);
        Ok(())
    }

    /// All that finishing the attempt needs outlives a power cut from here on.
    pub fn make_durable(&self) -> Result<(), HomeError> {
        let logs = store::STREAMS.map(|stream| [stream.to_owned(), tail_name(stream)]);
        let papers = [RECORD, Paper::Outcome.name(), Paper::Manifest.name()];
        let papers = papers.map(str::to_owned);
        self.give_back_reserve();
        for name in papers.iter().chain(logs.as_flattened()) {
            self.sync(name)
                .map_err(|source| self.unwritten(name, source))?;
        }
        self.make_findable()
            .map_err(|source| self.unwritten("", source))
    }

    /// Its content, if it is there and has any.
    fn sync(&self, name: &str) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.lock, name, flags, Mode::empty()) {
            Ok(file) => Ok(rustix::fs::fdatasync(file)?),
            Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    pub fn put<T: Serialize>(
        &self,
        paper: Paper,
        value: &T,
        durable: Durable,
    ) -> Result<(), HomeError> {
        self.replace(paper.name(), value, durable).map(drop)
    }

    pub fn get<T: DeserializeOwned>(&self, paper: Paper) -> Result<Option<T>, HomeError> {
        self.load(paper.name(), Paper::BYTES_MAX)
    }

    /// All of this goes by the locked descriptor: the path may name another attempt's directory by now.
    fn replace<T: Serialize>(
        &self,
        name: &str,
        value: &T,
        durable: Durable,
    ) -> Result<std::fs::File, HomeError> {
        let write = || -> io::Result<std::fs::File> {
            let draft = format!("{name}.new");
            let reserved = name == Paper::Outcome.name();
            let file = match reserved {
                // Not truncated before it is written: it would lose its blocks.
                true => self.open_to_write(&draft, OFlags::empty())?,
                false => self.create(&draft)?,
            };
            let mut writer = io::BufWriter::with_capacity(AT_ONCE_BYTES, file);
            serde_json::to_writer(&mut writer, value)?;
            let mut file = writer
                .into_inner()
                .map_err(io::IntoInnerError::into_error)?;
            if reserved {
                let length = file.stream_position()?;
                // What a longer one left. The room beyond goes with the file, or when it is to stay.
                if file.metadata()?.len() > length {
                    file.set_len(length)?;
                }
            }
            if durable == Durable::Yes {
                file.sync_data()?;
            }
            rustix::fs::renameat(&self.lock, &draft, &self.lock, name)?;
            if durable == Durable::Yes {
                self.make_findable()?;
            }
            Ok(file)
        };
        write().map_err(|source| self.unwritten(name, source))
    }

    /// Has the kernel begin to write the record to the disk. A power cut during a long run then leaves it whole; most
    /// runs are over before.
    pub fn send_off(&self) {
        if let Some(record) = self.record.borrow().as_ref() {
            let advice = rustix::fs::Advice::DontNeed;
            let _sooner_or_later = rustix::fs::fadvise(record, 0, None, advice);
        }
    }

    /// Room for the outcome, taken before the start: a disk that the program, or anybody else, fills meanwhile must
    /// not make us forget how it ended. Where the file system cannot, it must go without.
    pub fn reserve_for_outcome(&self) {
        const BYTES: u64 = 128 << 10;
        let draft = format!("{}.new", Paper::Outcome.name());
        if let Ok(file) = self.open_to_write(&draft, OFlags::empty()) {
            let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
            let _without = rustix::fs::fallocate(&file, flags, 0, BYTES);
        }
    }

    /// A file that is cut where it ends gives back the room that it has beyond.
    fn give_back_reserve(&self) {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.lock, Paper::Outcome.name(), flags, Mode::empty());
        if let Ok(file) = file.map(std::fs::File::from) {
            let _kept = file.metadata().and_then(|meta| file.set_len(meta.len()));
        }
    }

    fn create(&self, name: &str) -> io::Result<std::fs::File> {
        self.open_to_write(name, OFlags::TRUNC)
    }

    fn open_to_write(&self, name: &str, more: OFlags) -> io::Result<std::fs::File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
        let file = rustix::fs::openat(&self.lock, name, flags, Mode::from_raw_mode(0o600))?;
        Ok(file.into())
    }

    /// After a power cut too: the names above it may be as new as the directory itself.
    fn make_findable(&self) -> io::Result<()> {
        rustix::fs::fsync(&self.lock)?;
        if !self.findable.get() {
            for above in self.path.ancestors().skip(1).take(2) {
                std::fs::File::open(above)?.sync_all()?;
            }
            self.findable.set(true);
        }
        Ok(())
    }

    fn load<T: DeserializeOwned>(
        &self,
        name: &str,
        bytes_max: u64,
    ) -> Result<Option<T>, HomeError> {
        let Some(text) = self.bytes(name, bytes_max)? else {
            return Ok(None);
        };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|e| self.unread(name, e.into()))
    }

    /// The content of one of its files, up to a bound.
    pub fn bytes(&self, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, HomeError> {
        let read = || -> io::Result<Option<Vec<u8>>> {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = match rustix::fs::openat(&self.lock, name, flags, Mode::empty()) {
                Ok(file) => file,
                Err(rustix::io::Errno::NOENT) => return Ok(None),
                Err(e) => return Err(e.into()),
            };
            if rustix::fs::fstat(&file)?.st_uid != rustix::process::geteuid().as_raw() {
                return Err(io::Error::other("it belongs to another user"));
            }
            let mut text = Vec::new();
            std::fs::File::from(file)
                .take(bytes_max)
                .read_to_end(&mut text)?;
            Ok(Some(text))
        };
        read().map_err(|source| self.unread(name, source))
    }

    /// A log, new and empty, to be appended to.
    pub fn new_log(&self, name: &str) -> Result<std::fs::File, HomeError> {
        self.create(name)
            .map_err(|source| self.unwritten(name, source))
    }

    /// A log's content as it is to be from now on. What arrived is there already, as a rule; if not, it is replaced in one
    /// step, so that a crash loses nothing that had arrived.
    pub fn keep_log(&self, name: &str, bytes: &[u8]) -> Result<(), HomeError> {
        let write = || -> io::Result<()> {
            let found = rustix::fs::statat(&self.lock, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
            let length = match found {
                Ok(found) => u64::try_from(found.st_size).unwrap_or(u64::MAX),
                // None is as good as an empty one.
                Err(rustix::io::Errno::NOENT) => 0,
                Err(e) => return Err(e.into()),
            };
            if length == bytes.len() as u64 {
                return Ok(());
            }
            let draft = format!("{name}.new");
            let mut file = self.create(&draft)?;
            file.write_all(bytes)?;
            Ok(rustix::fs::renameat(&self.lock, &draft, &self.lock, name)?)
        };
        write().map_err(|source| self.unwritten(name, source))
    }

    pub fn dir(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Where outputs go that the artifact store would not take.
    pub fn objects(&self) -> PathBuf {
        self.path.join(OBJECTS)
    }

    fn unwritten(&self, name: &str, source: io::Error) -> HomeError {
        HomeError::Write {
            path: self.path.join(name),
            source,
        }
    }

    fn unread(&self, name: &str, source: io::Error) -> HomeError {
        HomeError::Read {
            path: self.path.join(name),
            source,
        }
    }

    /// From `runs/` to `pending/`: it ended, its workspace is gone, and it is not committed. The lock goes with it.
    pub fn move_to_pending(&mut self, home: &Home) -> Result<(), HomeError> {
        let under = |base: PathBuf| -> Option<PathBuf> {
            let below = self.path.strip_prefix(home.runs()).ok()?;
            Some(base.join(below))
        };
        let Some(to) = under(home.pending()).filter(|_| self.is_in_place()) else {
            return Ok(());
        };
        let parents = (self.path.parent(), to.parent());
        let (Some(from_parent), Some(to_parent)) = parents else {
            return Ok(());
        };
        make_private(to_parent)?;
        std::fs::rename(&self.path, &to).map_err(|source| self.unwritten("", source))?;
        let _not_empty = std::fs::remove_dir(from_parent);
        self.path = to;
        self.findable.set(false);
        self.make_findable()
            .map_err(|source| self.unwritten("", source))
    }

    /// Whether a record speaks of this directory's id, and of names that only that id's workspace can have.
    fn is_of(&self, record: &RunRecord) -> bool {
        let id = record.id.as_str();
        let named = |path: &Path, start: String| {
            let name = path.file_name().and_then(|n| n.to_str());
            name.is_some_and(|n| n.starts_with(&start))
        };
        let directory = self.path.parent().and_then(Path::file_name);
        directory == Some(std::ffi::OsStr::new(id))
            && record.workspace.file_name()
                == Some(std::ffi::OsStr::new(&format!("scidex-analysis-{id}")))
            && named(&record.draft, format!(".scidex-analysis-{id}-"))
            && record.draft.parent() == record.workspace.parent()
    }

    /// The last act of an attempt. The id's directory goes when it is empty.
    pub fn remove(self) -> Result<(), HomeError> {
        let failed = |source: rustix::io::Errno| self.unwritten("", source.into());
        // The record first: without it, what is left of the directory is nobody's, whatever part of it that is.
        match rustix::fs::unlinkat(&self.lock, RECORD, rustix::fs::AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(failed(e)),
        }
        self.clear()?;
        if self.is_in_place() {
            rustix::fs::rmdir(&self.path).map_err(failed)?;
        }
        if let Some(parent) = self.path.parent() {
            // Another attempt of the same id may be there.
            let _not_empty = std::fs::remove_dir(parent);
        }
        Ok(())
    }

    /// Removes everything but the record.
    fn clear(&self) -> Result<(), HomeError> {
        let names = names_in(&self.lock).map_err(|e| self.unwritten("", e.into()))?;
        let mut others = names.iter().filter(|name| name.as_c_str() != RECORD_NAME);
        others.try_for_each(|name| self.remove_entry(name))
    }

    /// A file, or one of the directories that hold outputs.
    fn remove_entry(&self, name: &std::ffi::CStr) -> Result<(), HomeError> {
        use rustix::fs::AtFlags;
        let shown = name.to_string_lossy();
        match rustix::fs::unlinkat(&self.lock, name, AtFlags::empty()) {
            Err(rustix::io::Errno::ISDIR) => {}
            Ok(()) | Err(rustix::io::Errno::NOENT) => return Ok(()),
            Err(e) => return Err(self.unwritten(&shown, e.into())),
        }
        let stat = rustix::fs::statat(&self.lock, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| self.unwritten(&shown, e.into()))?;
        let bytes = std::os::unix::ffi::OsStrExt::from_bytes(name.to_bytes());
        crate::workspace::tree::remove(self.lock.as_fd(), bytes, (stat.st_dev, stat.st_ino))
            .map(drop)
            .map_err(|e| self.unwritten(&shown, io::Error::other(e)))
    }
}

/// The end of a log whose middle was dropped.
pub fn tail_name(stream: &str) -> String {
    format!("{stream}.tail")
}

/// Nearly every paper is written in one call.
const AT_ONCE_BYTES: usize = 64 << 10;
const RECORD_NAME: &std::ffi::CStr = c"run.json";
const OBJECTS: &str = "objects";

fn names_in(dir: &OwnedFd) -> rustix::io::Result<Vec<std::ffi::CString>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let name = entry?.file_name().to_owned();
        if name.as_c_str() != c"." && name.as_c_str() != c".." {
            names.push(name);
        }
    }
    Ok(names)
}

/// A word that no other attempt has.
pub fn fresh_key() -> String {
    let mut noise = [0u8; 16];
    // Without randomness the time and our pid must do; the database refuses a key that it has.
    let filled = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty());
    if filled != Ok(noise.len()) {
        let time = crate::attempt::pipeline::unix_ms().to_ne_bytes();
        noise[..8].copy_from_slice(&time);
        noise[8..12].copy_from_slice(&std::process::id().to_ne_bytes());
    }
    format!("{:032x}", u128::from_ne_bytes(noise))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::home::{boot_id, machine};

    const ID: &str = "mine";

    fn home() -> (tempfile::TempDir, Home) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("home");
        let home = Home::find(&|_| Some(path.clone())).unwrap().open().unwrap();
        (dir, home)
    }

    fn id() -> AnalysisId {
        AnalysisId::new(ID).unwrap()
    }

    fn record() -> RunRecord {
        RunRecord {
            version: RECORD_VERSION,
            id: id(),
            attempt: 1,
            host: machine(),
            boot_id: boot_id(),
            runner_pid: 1,
            workspace: PathBuf::from("/srv/w/scidex-analysis-mine"),
            draft: PathBuf::from("/srv/w/.scidex-analysis-mine-0123"),
            workspace_is: None,
            uid: None,
            project_quota: None,
            cgroups: Vec::new(),
            init: None,
            state: RunState::Live,
            prepared: false,
            task: None,
        }
    }

    /// As between opening and locking: the directory goes, and another attempt's takes its place.
    fn replace(path: &Path) {
        std::fs::rename(path, path.with_extension("old")).unwrap();
        std::fs::remove_dir_all(path.with_extension("old")).unwrap();
        make_private(path).unwrap();
    }

    #[test]
    fn a_lock_on_a_directory_that_was_made_again_holds_nothing() {
        let (_dir, home) = home();
        let dir = RunDir::claim(&home, &id(), 1).unwrap();
        assert!(dir.is_in_place());
        replace(&dir.path);
        assert!(!dir.is_in_place());
        let path = dir.path.clone();
        // The stale lock is no obstacle for the new directory's own.
        assert!(RunDir::try_lock(&path).unwrap().is_some());
    }

    /// Whoever removes the directory holds its lock. So who gets a lock, and looks whether it still is of the directory
    /// that stands there, must find that it is, however often another came in between. Many try, so that some are
    /// interrupted between opening and locking.
    #[test]
    fn a_lock_is_never_given_on_a_directory_that_is_gone() {
        const CONTENDERS: u32 = 16;
        const TURNS: u32 = 1000;
        let (_dir, home) = home();
        let path = home.runs().join(ID).join("1");
        let contend = || {
            for _ in 0..TURNS {
                // Its parent may go at any time, too.
                let _made = make_private(&path);
                match RunDir::try_lock(&path) {
                    Ok(Some(dir)) => {
                        assert!(dir.is_in_place());
                        dir.remove().unwrap();
                    }
                    Ok(None) => {}
                    Err(HomeError::Lock { source, .. }) => {
                        assert_eq!(source.kind(), io::ErrorKind::NotFound);
                    }
                    Err(e) => panic!("{e}"),
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..CONTENDERS {
                scope.spawn(contend);
            }
        });
    }

    #[test]
    fn a_stale_run_directory_never_touches_the_new_one() {
        let (_dir, home) = home();
        let stale = RunDir::claim(&home, &id(), 1).unwrap();
        stale.write(&record()).unwrap();
        let path = stale.path.clone();
        replace(&path);
        let new = RunDir::try_lock(&path).unwrap().unwrap();
        let theirs = RunRecord {
            runner_pid: 2,
            ..record()
        };
        new.write(&theirs).unwrap();

        assert_eq!(stale.read().unwrap(), None, "its own record is gone");
        stale.write(&record()).unwrap_err();
        assert_eq!(new.read().unwrap(), Some(theirs.clone()));
        stale.remove().unwrap();
        assert!(new.is_in_place());
        assert_eq!(new.read().unwrap(), Some(theirs));
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
    }

    /// Whether it fits into the place of the one before or not.
    #[test]
    fn the_record_that_was_written_last_is_the_one_that_is_read() {
        let (_dir, home) = home();
        let dir = RunDir::claim(&home, &id(), 1).unwrap();
        for groups in [0, 30, 1, 500, 2, 0] {
            let written = RunRecord {
                cgroups: vec![PathBuf::from("/sys/fs/cgroup/pids/x"); groups],
                init: None,
                ..record()
            };
            dir.write(&written).unwrap();
            assert_eq!(dir.read().unwrap(), Some(written.clone()), "{groups}");
            let text = std::fs::read(dir.path.join(RECORD)).unwrap();
            serde_json::from_slice::<RunRecord>(&text).unwrap();
            if groups == 1 {
                dir.write_durably(&written).unwrap();
                assert_eq!(dir.read().unwrap(), Some(written));
            }
        }
        let left = std::fs::read_dir(&dir.path).unwrap().count();
        assert_eq!(left, 1, "no draft stays");
        drop(dir);
        let path = home.runs().join(ID).join("1");
        let again = RunDir::try_lock(&path).unwrap().unwrap();
        assert_eq!(again.read().unwrap(), Some(record()));
    }

    /// Where the file system reserves at all.
    #[test]
    fn an_outcome_that_is_to_stay_keeps_no_more_room_than_it_needs() {
        use std::os::unix::fs::MetadataExt;
        let (_dir, home) = home();
        let dir = RunDir::claim(&home, &id(), 1).unwrap();
        dir.reserve_for_outcome();
        dir.put(Paper::Outcome, &"it ended", Durable::No).unwrap();
        let path = dir.path.join(Paper::Outcome.name());
        assert_eq!(
            dir.get(Paper::Outcome).unwrap(),
            Some("it ended".to_owned())
        );
        let reserved = path.metadata().unwrap().blocks() * 512;
        dir.make_durable().unwrap();
        let kept = path.metadata().unwrap().blocks() * 512;
        assert!(kept <= 64 << 10, "{reserved} bytes before, {kept} now");
        assert_eq!(
            dir.get(Paper::Outcome).unwrap(),
            Some("it ended".to_owned())
        );
    }

    #[test]
    fn a_record_of_other_things_is_refused() {
        let (_dir, home) = home();
        let dir = RunDir::claim(&home, &id(), 1).unwrap();
        dir.write(&record()).unwrap();
        assert_eq!(dir.read().unwrap(), Some(record()), "the control");
        let with = |change: &dyn Fn(&mut RunRecord)| {
            let mut changed = record();
            change(&mut changed);
            changed
        };
        let forged = [
            with(&|r| r.workspace = "/home/ada".into()),
            with(&|r| r.workspace = "/srv/w/scidex-analysis-other".into()),
            with(&|r| r.workspace = "/srv/w/scidex-analysis-mine2".into()),
            with(&|r| r.workspace = "/srv/w/scidex-analysis-mine/..".into()),
            with(&|r| r.workspace = "/".into()),
            with(&|r| r.draft = "/home/ada".into()),
            with(&|r| r.draft = "/srv/w/.scidex-analysis-other-0123".into()),
            with(&|r| r.draft = "/home/.scidex-analysis-mine-0123".into()),
            // True in itself, but this is not its directory.
            with(&|r| {
                r.id = AnalysisId::new("other").unwrap();
                r.workspace = "/srv/w/scidex-analysis-other".into();
                r.draft = "/srv/w/.scidex-analysis-other-0123".into();
            }),
        ];
        for record in forged {
            dir.write(&record).unwrap();
            let read = dir.read();
            assert!(matches!(read, Err(HomeError::Read { .. })), "{record:?}");
        }
    }

    #[test]
    fn a_record_that_another_user_wrote_or_that_is_no_file_is_refused() {
        let (_dir, home) = home();
        let dir = RunDir::claim(&home, &id(), 1).unwrap();
        dir.write(&record()).unwrap();
        let path = dir.path.join(RECORD);
        let aside = dir.path.join("aside");
        // Only root can give a file away; for others the rest is tried.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(54321), None).unwrap();
            assert!(matches!(dir.read(), Err(HomeError::Read { .. })));
            std::os::unix::fs::chown(&path, Some(0), None).unwrap();
            dir.read().unwrap().unwrap();
        }
        std::fs::rename(&path, &aside).unwrap();
        std::os::unix::fs::symlink(&aside, &path).unwrap();
        assert!(matches!(dir.read(), Err(HomeError::Read { .. })));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(matches!(dir.read(), Err(HomeError::Read { .. })));
    }

    #[test]
    fn a_damaged_record_is_not_taken_for_none() {
        let (_dir, home) = home();
        let path = home.runs().join(ID).join("1");
        drop(RunDir::claim(&home, &id(), 1).unwrap());
        for text in ["", "{", "[]", "{\"version\":99}", "\0\0\0\0"] {
            std::fs::write(path.join(RECORD), text).unwrap();
            let claimed = RunDir::claim(&home, &id(), 1);
            assert!(matches!(claimed, Err(HomeError::Read { .. })), "{text:?}");
            let left = std::fs::read(path.join(RECORD)).unwrap();
            assert_eq!(left, text.as_bytes(), "left as it was, to be looked at");
        }
        std::fs::remove_file(path.join(RECORD)).unwrap();
        RunDir::claim(&home, &id(), 1).unwrap();
    }
}
