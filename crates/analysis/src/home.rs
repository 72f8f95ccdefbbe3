//! Where Fumehood keeps its own files, and the run directory of one attempt.
//!
//! A run directory is made and locked before anything else of the attempt exists, and removed after everything else
//! is gone. Whoever finds one unlocked knows that its runner is dead, and its record says what
//! the dead left: that is all the reaper needs.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::request::AnalysisId;
use crate::workspace::Identity;

#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    #[error("find a home for Fumehood: set FUMEHOOD_HOME, or HOME, to an absolute path")]
    NoHome,
    #[error("FUMEHOOD_HOME is {path:?}; it must be an absolute path")]
    Relative { path: PathBuf },
    #[error("make the directory {path:?}")]
    Make { path: PathBuf, source: io::Error },
    #[error(
        "{path:?} belongs to another user or can be written by others; chmod 700 it, or set FUMEHOOD_HOME to a directory of your own"
    )]
    NotOurs { path: PathBuf },
    #[error(
        "analysis {id} is running already, or its directory is being cleaned up; choose another --id, or wait for it"
    )]
    Running { id: AnalysisId },
    #[error(
        "analysis {id} left a kept workspace at {workspace:?}; remove it with `fumehood gc --kept {id}`, or choose another --id"
    )]
    Kept { id: AnalysisId, workspace: PathBuf },
    #[error("lock {path:?}")]
    Lock { path: PathBuf, source: io::Error },
    #[error("write the run's record {path:?}")]
    Write { path: PathBuf, source: io::Error },
    #[error("read the run's record {path:?}")]
    Read { path: PathBuf, source: io::Error },
}

/// `$FUMEHOOD_HOME`, else `/var/lib/fumehood` for root and the user's data directory for others.
#[derive(Clone, Debug)]
pub struct Home {
    path: PathBuf,
}

impl Home {
    pub fn find(env: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Home, HomeError> {
        let root = rustix::process::geteuid().is_root();
        let absolute = |path: &PathBuf| path.is_absolute();
        if let Some(given) = env("FUMEHOOD_HOME").filter(|path| !path.is_absolute()) {
            return Err(HomeError::Relative { path: given });
        }
        let path = env("FUMEHOOD_HOME")
            .or_else(|| root.then(|| PathBuf::from("/var/lib/fumehood")))
            .or_else(|| {
                env("XDG_DATA_HOME")
                    .filter(absolute)
                    .map(|p| p.join("fumehood"))
            })
            .or_else(|| {
                env("HOME")
                    .filter(absolute)
                    .map(|p| p.join(".local/share/fumehood"))
            })
            .ok_or(HomeError::NoHome)?;
        Ok(Home { path })
    }

    /// Makes the directory, closed to everyone else, and refuses one that is not.
    pub fn open(self) -> Result<Home, HomeError> {
        make_private(&self.path)?;
        make_private(&self.runs())?;
        Ok(self)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn runs(&self) -> PathBuf {
        self.path.join("runs")
    }
}

fn make_private(path: &Path) -> Result<(), HomeError> {
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path);
    made.map_err(|source| HomeError::Make {
        path: path.to_path_buf(),
        source,
    })?;
    let meta = std::fs::metadata(path).map_err(|source| HomeError::Make {
        path: path.to_path_buf(),
        source,
    })?;
    let ours = meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0;
    match ours {
        true => Ok(()),
        false => Err(HomeError::NotOurs {
            path: path.to_path_buf(),
        }),
    }
}

/// What the reaper must know of an attempt. Versioned, written before the thing it names is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    pub version: u32,
    pub id: AnalysisId,
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
    pub state: RunState,
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
}

pub const RECORD_VERSION: u32 = 1;
const RECORD: &str = "run.json";
const DRAFT: &str = "run.json.new";
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// The held, locked directory of one attempt.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Locked exclusively for as long as the runner lives.
    lock: OwnedFd,
}

impl RunDir {
    /// Claims `runs/{id}/1`. The name is refused while somebody else holds it.
    pub fn claim(home: &Home, id: &AnalysisId) -> Result<RunDir, HomeError> {
        let path = home.runs().join(id.as_str()).join("1");
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
            Ok(Some(RunRecord {
                state: RunState::Kept { .. },
                workspace,
                ..
            })) => Err(HomeError::Kept {
                id: id.clone(),
                workspace,
            }),
            // Its runner is dead, and it could not be reaped just now.
            Ok(Some(_)) => Err(HomeError::Running { id: id.clone() }),
            Ok(None) => Ok(Some(dir)),
            Err(e) => Err(e),
        }
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

    /// Replaces the record in one step: a reader finds the old one or the new one.
    ///
    /// All of this goes by the locked descriptor: the path may name another attempt's directory by now.
    pub fn write(&self, record: &RunRecord) -> Result<(), HomeError> {
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec(record)?;
            let flags = OFlags::WRONLY
                | OFlags::CREATE
                | OFlags::TRUNC
                | OFlags::NOFOLLOW
                | OFlags::CLOEXEC;
            let draft = rustix::fs::openat(&self.lock, DRAFT, flags, Mode::from_raw_mode(0o600))?;
            io::Write::write_all(&mut std::fs::File::from(draft), &text)?;
            Ok(rustix::fs::renameat(&self.lock, DRAFT, &self.lock, RECORD)?)
        };
        write().map_err(|source| HomeError::Write {
            path: self.path.join(RECORD),
            source,
        })
    }

    pub fn read(&self) -> Result<Option<RunRecord>, HomeError> {
        let failed = |source| HomeError::Read {
            path: self.path.join(RECORD),
            source,
        };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.lock, RECORD, flags, Mode::empty()) {
            Ok(file) => file,
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(e) => return Err(failed(e.into())),
        };
        let stat = rustix::fs::fstat(&file).map_err(|e| failed(e.into()))?;
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(failed(io::Error::other("it belongs to another user")));
        }
        let mut text = Vec::new();
        let bounded = io::Read::take(std::fs::File::from(file), RECORD_BYTES_MAX);
        io::Read::read_to_end(&mut { bounded }, &mut text).map_err(failed)?;
        let record: RunRecord = serde_json::from_slice(&text).map_err(|e| failed(e.into()))?;
        match self.is_of(&record) {
            true => Ok(Some(record)),
            false => Err(failed(io::Error::other(
                "it names things that are not this run's",
            ))),
        }
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

    /// The last act of an attempt without a record to keep. The id's directory goes when it is empty.
    pub fn remove(self) -> Result<(), HomeError> {
        let failed = |source: rustix::io::Errno| HomeError::Write {
            path: self.path.clone(),
            source: source.into(),
        };
        for name in [DRAFT, RECORD] {
            match rustix::fs::unlinkat(&self.lock, name, rustix::fs::AtFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        if self.is_in_place() {
            rustix::fs::rmdir(&self.path).map_err(failed)?;
        }
        if let Some(parent) = self.path.parent() {
            // Another attempt of the same id may be there.
            let _not_empty = std::fs::remove_dir(parent);
        }
        Ok(())
    }
}

/// Which machine this is: its id, which a change of name does not change.
pub fn machine() -> String {
    let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    match id.trim() {
        "" => rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned(),
        id => id.to_owned(),
    }
}

/// Distinguishes this start of the machine from every other.
pub fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    text.map(|t| t.trim().to_owned()).unwrap_or_default()
}

pub fn unix_seconds() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map(|d| d.as_secs()).unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ID: &str = "mine";

    fn home() -> (tempfile::TempDir, Home) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("home");
        let home = Home { path }.open().unwrap();
        (dir, home)
    }

    fn id() -> AnalysisId {
        AnalysisId::new(ID).unwrap()
    }

    fn record() -> RunRecord {
        RunRecord {
            version: RECORD_VERSION,
            id: id(),
            host: machine(),
            boot_id: boot_id(),
            runner_pid: 1,
            workspace: PathBuf::from("/srv/w/scidex-analysis-mine"),
            draft: PathBuf::from("/srv/w/.scidex-analysis-mine-0123"),
            workspace_is: None,
            uid: None,
            project_quota: None,
            cgroups: Vec::new(),
            state: RunState::Live,
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
        let dir = RunDir::claim(&home, &id()).unwrap();
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
        let stale = RunDir::claim(&home, &id()).unwrap();
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

    #[test]
    fn a_record_of_other_things_is_refused() {
        let (_dir, home) = home();
        let dir = RunDir::claim(&home, &id()).unwrap();
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
        let dir = RunDir::claim(&home, &id()).unwrap();
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
        drop(RunDir::claim(&home, &id()).unwrap());
        for text in ["", "{", "[]", "{\"version\":99}", "\0\0\0\0"] {
            std::fs::write(path.join(RECORD), text).unwrap();
            let claimed = RunDir::claim(&home, &id());
            assert!(matches!(claimed, Err(HomeError::Read { .. })), "{text:?}");
            let left = std::fs::read(path.join(RECORD)).unwrap();
            assert_eq!(left, text.as_bytes(), "left as it was, to be looked at");
        }
        std::fs::remove_file(path.join(RECORD)).unwrap();
        RunDir::claim(&home, &id()).unwrap();
    }

    #[test]
    fn a_relative_home_is_refused_and_not_replaced_by_another() {
        let find = |given: &'static str| {
            Home::find(&move |name| match name {
                "FUMEHOOD_HOME" => Some(given.into()),
                _ => Some("/home/ada".into()),
            })
        };
        for relative in ["", ".", "runs", "../runs"] {
            let found = find(relative);
            let refused = matches!(found, Err(HomeError::Relative { .. }));
            assert!(refused, "{relative:?}: {found:?}");
        }
        assert_eq!(find("/srv/fume").unwrap().path(), Path::new("/srv/fume"));
    }
}
