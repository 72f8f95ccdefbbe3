//! The objects' directory, and which of its objects the kernel still holds in memory on our account.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{Advice, Mode, OFlags};

use super::object_name;
use crate::types::manifest::ContentHash;

/// So many are remembered; then the first of them leave memory at once.
const SYNCED_MAX: usize = 65_536;

#[derive(Debug)]
pub(super) struct Objects {
    dir: OwnedFd,
    /// Made durable, and perhaps still to be read once for the transaction that refers to them.
    synced: Mutex<Vec<ContentHash>>,
}

impl Objects {
    pub(super) fn new(dir: OwnedFd) -> Objects {
        Objects {
            dir,
            synced: Mutex::default(),
        }
    }

    pub(super) fn note_synced(&self, hashes: impl Iterator<Item = ContentHash>) {
        for hash in hashes {
            let mut synced = self.synced();
            if synced.len() >= SYNCED_MAX {
                drop(synced);
                self.leave_memory();
                synced = self.synced();
            }
            synced.push(hash);
        }
    }

    /// Takes the content of what was made durable out of the page cache.
    ///
    /// A page that the program wrote is charged to its memory cgroup for as long as it is cached. The kernel keeps such a cgroup
    /// after it was removed, and walks through all of them when memory is short: without this each run with an output leaves one,
    /// and the host grows slower with every run. Only clean pages go, so this comes after the sync.
    pub(super) fn leave_memory(&self) {
        let synced = std::mem::take(&mut *self.synced());
        for hash in synced {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let opened = rustix::fs::openat(&self.dir, object_name(&hash), flags, Mode::empty());
            // What stays in memory costs a little time, no more.
            let _advised =
                opened.and_then(|object| rustix::fs::fadvise(&object, 0, None, Advice::DontNeed));
        }
    }

    /// The list is whole after every single operation, so a panic elsewhere does not spoil it.
    fn synced(&self) -> MutexGuard<'_, Vec<ContentHash>> {
        self.synced.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Objects {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}
