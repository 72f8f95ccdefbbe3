//! The directory of objects, and which objects still have pages in the page cache because of this process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{Advice, Mode, OFlags};

use super::object_name;
use crate::types::manifest::ContentHash;

/// When this many objects are remembered, their pages are dropped at once.
const SYNCED_MAX: usize = 65_536;

#[derive(Debug)]
pub(super) struct ObjectDirectory {
    dir: OwnedFd,
    /// Durable objects, which the transaction that refers to them may still read once.
    synced: Mutex<Vec<ContentHash>>,
}

impl ObjectDirectory {
    pub(super) fn new(dir: OwnedFd) -> ObjectDirectory {
        ObjectDirectory {
            dir,
            synced: Mutex::default(),
        }
    }

    pub(super) fn note_synced(&self, hashes: impl Iterator<Item = ContentHash>) {
        for hash in hashes {
            let mut synced = self.synced();
            if synced.len() >= SYNCED_MAX {
                drop(synced);
                self.drop_page_cache();
                synced = self.synced();
            }
            synced.push(hash);
        }
    }

    /// Drops the pages of durable objects from the page cache.
    ///
    /// A page that the program wrote is charged to the program's memory cgroup as long as it is cached. The kernel
    /// keeps such a cgroup after its removal and walks all of them when memory is short. Without this call each run
    /// with an output would leave one, and the host would get slower with every run. The kernel drops only clean
    /// pages, so call this after the sync.
    pub(super) fn drop_page_cache(&self) {
        let synced = std::mem::take(&mut *self.synced());
        for hash in synced {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let opened = rustix::fs::openat(&self.dir, object_name(&hash), flags, Mode::empty());
            // Pages that stay cached cost a little time and nothing else.
            let _ =
                opened.and_then(|object| rustix::fs::fadvise(&object, 0, None, Advice::DontNeed));
        }
    }

    /// Each operation leaves the list consistent, so a panic elsewhere does not damage it.
    fn synced(&self) -> MutexGuard<'_, Vec<ContentHash>> {
        self.synced.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for ObjectDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}
