//! The lock of a store: many processes may add objects at the same time, or one may sweep: remove the objects that
//! nobody refers to.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::page_cache::ObjectDirectory;
use super::{ArtifactError, Artifacts};

const LOCK: &str = "lock";
/// How long a process that adds objects waits for a sweep.
const SHARED_LOCK_WAIT: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_millis(5);

/// While this value exists, no sweep removes an object. The kernel releases the lock when the process ends, however it
/// ends.
///
/// The holder keeps the lock until nobody has to read the new objects again, so dropping it also drops their pages
/// from the page cache.
#[derive(Debug)]
pub struct SharedLock {
    store: String,
    objects: Arc<ObjectDirectory>,
    _lock: OwnedFd,
}

impl Drop for SharedLock {
    fn drop(&mut self) {
        self.objects.drop_page_cache();
    }
}

/// While this value exists, nobody adds objects.
#[derive(Debug)]
pub struct ExclusiveLock {
    store: String,
    _lock: OwnedFd,
}

impl Artifacts {
    /// Locks the store for adding objects. Hold the lock from before the first object is added until the transaction
    /// that refers to the objects is committed.
    pub fn lock_shared(&self) -> Result<SharedLock, ArtifactError> {
        Ok(SharedLock {
            _lock: self.lock(FlockOperation::NonBlockingLockShared, SHARED_LOCK_WAIT)?,
            store: self.id.clone(),
            objects: Arc::clone(&self.objects),
        })
    }

    /// Locks the store for a sweep. After `wait` the error names the processes that hold the lock.
    pub fn lock_exclusive(&self, wait: Duration) -> Result<ExclusiveLock, ArtifactError> {
        Ok(ExclusiveLock {
            _lock: self.lock(FlockOperation::NonBlockingLockExclusive, wait)?,
            store: self.id.clone(),
        })
    }

    pub(super) fn check_shared(&self, hold: &SharedLock) -> Result<(), ArtifactError> {
        self.check_store(&hold.store)
    }

    pub(super) fn check_exclusive(&self, alone: &ExclusiveLock) -> Result<(), ArtifactError> {
        self.check_store(&alone.store)
    }

    fn check_store(&self, store: &str) -> Result<(), ArtifactError> {
        match store == self.id {
            true => Ok(()),
            false => Err(ArtifactError::OtherStore {
                path: self.path.clone(),
            }),
        }
    }

    /// Polls instead of blocking in the kernel, so that the wait has a limit.
    fn lock(&self, how: FlockOperation, wait: Duration) -> Result<OwnedFd, ArtifactError> {
        let failed = |e: Errno| ArtifactError::Lock {
            path: self.path.join(LOCK),
            source: e.into(),
        };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = rustix::fs::openat(&self.dir, LOCK, flags, mode).map_err(failed)?;
        let began = Instant::now();
        loop {
            match rustix::fs::flock(&file, how) {
                Ok(()) => return Ok(file),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if began.elapsed() < wait => std::thread::sleep(PAUSE),
                Err(Errno::WOULDBLOCK) => {
                    return Err(ArtifactError::Busy {
                        path: self.path.clone(),
                        pids: holders(&file),
                    });
                }
                Err(e) => return Err(failed(e)),
            }
        }
    }
}

/// The processes that hold a lock on this file, according to the kernel. Used only in the message: processes in other
/// pid namespaces are missing.
fn holders(file: &OwnedFd) -> Vec<u32> {
    let Ok(stat) = rustix::fs::fstat(file.as_fd()) else {
        return Vec::new();
    };
    let (major, minor) = (
        rustix::fs::major(stat.st_dev),
        rustix::fs::minor(stat.st_dev),
    );
    let place = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let text = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let pid = |line: &str| -> Option<u32> {
        // A line reads "1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF". A waiting process has "->" before FLOCK.
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_holder = words.get(1) == Some(&"FLOCK") && words.get(5) == Some(&place.as_str());
        is_holder.then(|| words.get(4)?.parse().ok()).flatten()
    };
    let mut pids: Vec<u32> = text.lines().filter_map(pid).filter(|p| *p > 0).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

pub(super) fn describe(pids: &[u32]) -> String {
    const SHOWN: usize = 10;
    let list: Vec<String> = pids.iter().take(SHOWN).map(u32::to_string).collect();
    match (pids.len(), pids.len().saturating_sub(SHOWN)) {
        (0, _) => "another process".to_owned(),
        (1, _) => format!("process {}", list.join("")),
        (_, 0) => format!("processes {}", list.join(", ")),
        (_, more) => format!("processes {} and {more} more", list.join(", ")),
    }
}
