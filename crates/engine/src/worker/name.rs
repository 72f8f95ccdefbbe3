//! The lock on a worker's name: two workers with one name would share their slots.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};

use super::error::WorkerError;
use super::slot;
use crate::home::Home;

/// A runner without a worker tests this lock for a moment now and then, so try more than once.
const LOCK_TRIES: u32 = 100;
const LOCK_WAIT: Duration = Duration::from_millis(20);

/// Locks a worker's name. `None`: another worker has it.
pub(super) fn lock_name(path: &Path) -> Result<Option<OwnedFd>, WorkerError> {
    let failed = |source: io::Error| WorkerError::Lock {
        path: path.to_path_buf(),
        source,
    };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| failed(e.into()))?;
    for _ in 0..LOCK_TRIES {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let pid = std::process::id().to_string();
                rustix::fs::ftruncate(&file, 0).map_err(|e| failed(e.into()))?;
                rustix::io::pwrite(&file, pid.as_bytes(), 0).map_err(|e| failed(e.into()))?;
                return Ok(Some(file));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(LOCK_WAIT),
            Err(e) => return Err(failed(e.into())),
        }
    }
    Ok(None)
}

/// The pid of the worker that has this name, if one is running.
pub fn lock_holder(home: &Home, name: &str) -> Option<u32> {
    let lock = home.workers().join(name).join("lock");
    let text = std::fs::read_to_string(&lock).ok()?;
    let pid = text.trim().parse().ok()?;
    slot::is_locked(&lock).then_some(pid)
}

/// Distinguishes workers of one machine that have the same name in different homes.
pub(super) fn account(home: &Home) -> String {
    let hash = blake3::hash(home.path().as_os_str().as_encoded_bytes());
    let uid = rustix::process::geteuid().as_raw();
    format!("{uid}-{}", &hash.to_hex()[..8])
}

pub(super) fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}
