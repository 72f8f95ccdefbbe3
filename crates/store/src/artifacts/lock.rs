//! Who may do what in the store: many put objects in, or one collects garbage.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::cache::Objects;
use super::{ArtifactError, Artifacts};

const LOCK: &str = "lock";
/// How long one who puts objects in waits for the garbage collector.
const PATIENCE: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_millis(5);

/// While it exists no object is collected. Goes with the process, however that ends.
///
/// It is held until nobody needs to read the objects any more, so that when it goes what was made durable leaves memory.
#[derive(Debug)]
pub struct Hold {
    store: String,
    objects: Arc<Objects>,
    _lock: OwnedFd,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.objects.leave_memory();
    }
}

/// While it exists nobody puts anything in.
#[derive(Debug)]
pub struct Alone {
    store: String,
    _lock: OwnedFd,
}

impl Artifacts {
    /// To be held from before the first object is put in until the transaction that refers to it is committed.
    pub fn hold(&self) -> Result<Hold, ArtifactError> {
        Ok(Hold {
            _lock: self.lock(FlockOperation::NonBlockingLockShared, PATIENCE)?,
            store: self.id.clone(),
            objects: Arc::clone(&self.objects),
        })
    }

    /// For the garbage collector; says after `patience` which processes are in the way.
    pub fn hold_alone(&self, patience: Duration) -> Result<Alone, ArtifactError> {
        Ok(Alone {
            _lock: self.lock(FlockOperation::NonBlockingLockExclusive, patience)?,
            store: self.id.clone(),
        })
    }

    pub(super) fn check_hold(&self, hold: &Hold) -> Result<(), ArtifactError> {
        self.check_store(&hold.store)
    }

    pub(super) fn check_alone(&self, alone: &Alone) -> Result<(), ArtifactError> {
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

    /// Asks again and again instead of waiting in the kernel, so that the wait has a bound.
    fn lock(&self, how: FlockOperation, patience: Duration) -> Result<OwnedFd, ArtifactError> {
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
                Err(Errno::WOULDBLOCK) if began.elapsed() < patience => std::thread::sleep(PAUSE),
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

/// The processes that the kernel lists as holding a lock on this file. Only for the message: those in other pid
/// namespaces are missing.
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
        // "1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF"; one who waits has "->" before FLOCK.
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
