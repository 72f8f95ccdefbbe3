//! The directory itself: its lock, its move to `pending/`, its removal.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};

use super::record::RunRecord;
use crate::home::{Home, HomeError, create_private_dir};
use store::artifacts::files;

pub(super) const RECORD: &str = "run.json";
const RECORD_NAME: &std::ffi::CStr = c"run.json";
const OBJECTS: &str = "objects";

/// The directory of one attempt, open and locked.
#[derive(Debug)]
pub struct RunDir {
    pub(super) path: PathBuf,
    /// Locked exclusively for as long as this value, and so the runner, lives.
    pub(super) lock: OwnedFd,
    /// The names of the directory and its parents are durable.
    pub(super) names_synced: std::cell::Cell<bool>,
    /// The file `run.json`, if this process wrote it.
    pub(super) record: std::cell::RefCell<Option<std::fs::File>>,
}

impl RunDir {
    /// Locks a run directory. `None`: a live runner holds the lock.
    pub(crate) fn try_lock(path: &Path) -> Result<Option<RunDir>, HomeError> {
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
                    names_synced: std::cell::Cell::new(false),
                    record: std::cell::RefCell::new(None),
                };
                // Between the open and the lock, another process may have removed the directory and created another of
                // that name.
                Ok(dir.is_in_place().then_some(dir))
            }
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// The pid in the record, read without the lock. Use it only to decide whether waiting is worthwhile.
    pub(crate) fn recorded_runner_pid(path: &Path) -> Option<u32> {
        RunDir::peek(path).map(|record| record.runner_pid)
    }

    /// The record, read without the lock and unchecked.
    pub(super) fn peek(path: &Path) -> Option<RunRecord> {
        serde_json::from_slice(&std::fs::read(path.join(RECORD)).ok()?).ok()
    }

    /// Whether the path still names the locked directory.
    pub(super) fn is_in_place(&self) -> bool {
        let held = rustix::fs::fstat(&self.lock).map(|s| (s.st_dev, s.st_ino));
        let named = rustix::fs::lstat(&self.path).map(|s| (s.st_dev, s.st_ino));
        matches!((held, named), (Ok(a), Ok(b)) if a == b)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where outputs go that the artifact store did not take.
    pub(crate) fn objects(&self) -> PathBuf {
        self.path.join(OBJECTS)
    }

    /// Makes the directory findable after a power cut: its name and those of its parents may be as new as the
    /// directory.
    pub(super) fn sync_names(&self) -> io::Result<()> {
        rustix::fs::fsync(&self.lock)?;
        if !self.names_synced.get() {
            for above in self.path.ancestors().skip(1).take(2) {
                std::fs::File::open(above)?.sync_all()?;
            }
            self.names_synced.set(true);
        }
        Ok(())
    }

    /// Moves the directory from `runs/` to `pending/`: the attempt has ended, its workspace is gone, and it is not
    /// committed. The lock stays held.
    pub(crate) fn move_to_pending(&mut self, home: &Home) -> Result<(), HomeError> {
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
        create_private_dir(to_parent)?;
        std::fs::rename(&self.path, &to).map_err(|source| self.write_error("", source))?;
        // Fails if another attempt of the id is there.
        let _ = std::fs::remove_dir(from_parent);
        self.path = to;
        self.names_synced.set(false);
        self.sync_names()
            .map_err(|source| self.write_error("", source))
    }

    /// Removes the directory, as the last act of an attempt, and the id's directory if that is empty then.
    pub(crate) fn remove(self) -> Result<(), HomeError> {
        let failed = |source: rustix::io::Errno| self.write_error("", source.into());
        // Remove the record first: without it the rest of the directory belongs to nobody, whatever part of it remains.
        match rustix::fs::unlinkat(&self.lock, RECORD, rustix::fs::AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(failed(e)),
        }
        self.clear()?;
        if self.is_in_place() {
            rustix::fs::rmdir(&self.path).map_err(failed)?;
        }
        if let Some(parent) = self.path.parent() {
            // Fails if another attempt of the id is there.
            let _ = std::fs::remove_dir(parent);
        }
        Ok(())
    }

    /// Removes everything but the record.
    pub(super) fn clear(&self) -> Result<(), HomeError> {
        let mut names = Vec::new();
        files::each_entry(self.lock.as_fd(), &mut |name| names.push(name.to_owned()))
            .map_err(|e| self.write_error("", e.into()))?;
        let mut others = names.iter().filter(|name| name.as_c_str() != RECORD_NAME);
        others.try_for_each(|name| self.remove_entry(name))
    }

    /// Removes a file, or one of the directories that hold outputs.
    pub(super) fn remove_entry(&self, name: &std::ffi::CStr) -> Result<(), HomeError> {
        use rustix::fs::AtFlags;
        let shown = name.to_string_lossy();
        match rustix::fs::unlinkat(&self.lock, name, AtFlags::empty()) {
            Err(rustix::io::Errno::ISDIR) => {}
            Ok(()) | Err(rustix::io::Errno::NOENT) => return Ok(()),
            Err(e) => return Err(self.write_error(&shown, e.into())),
        }
        let stat = rustix::fs::statat(&self.lock, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| self.write_error(&shown, e.into()))?;
        let bytes = std::os::unix::ffi::OsStrExt::from_bytes(name.to_bytes());
        crate::workspace::tree::remove(self.lock.as_fd(), bytes, (stat.st_dev, stat.st_ino))
            .map(drop)
            .map_err(|e| self.write_error(&shown, io::Error::other(e)))
    }

    pub(super) fn write_error(&self, name: &str, source: io::Error) -> HomeError {
        HomeError::Write {
            path: self.path.join(name),
            source,
        }
    }

    pub(super) fn read_error(&self, name: &str, source: io::Error) -> HomeError {
        HomeError::Read {
            path: self.path.join(name),
            source,
        }
    }
}
