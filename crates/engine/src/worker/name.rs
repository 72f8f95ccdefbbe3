//! A worker's name, held by a lock: two with one name would share their slots.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};

use super::{WorkerError, slot};
use crate::home::Home;

/// A runner that finds no worker looks at the lock for a moment now and then.
const LOCK_TRIES: u32 = 100;
const LOCK_WAIT: Duration = Duration::from_millis(20);

/// The lock of a worker's name; `None`: another has it.
pub(super) fn hold(path: &Path) -> Result<Option<OwnedFd>, WorkerError> {
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

/// The process that holds a worker's name, if one does.
pub fn holder(home: &Home, name: &str) -> Option<u32> {
    let lock = home.workers().join(name).join("lock");
    let text = std::fs::read_to_string(&lock).ok()?;
    let pid = text.trim().parse().ok()?;
    slot::is_held(&lock).then_some(pid)
}

/// Tells workers of one machine apart that have the same name in different homes.
pub(super) fn account(home: &Home) -> String {
    let hash = blake3::hash(home.path().as_os_str().as_encoded_bytes());
    let uid = rustix::process::geteuid().as_raw();
    format!("{uid}-{}", &hash.to_hex()[..8])
}

pub(super) fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}
