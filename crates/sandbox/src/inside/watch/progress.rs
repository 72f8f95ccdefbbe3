//! How far the watch has come, and what init looks at itself while the watch waits.
//!
//! Some files of /proc wait for the process that they tell of: `smaps_rollup` and `maps` for its memory map, which a thread
//! of it can hold for seconds, `io` for the end of an `execve`. The program decides how long that is. So the watch notes
//! its progress, and when none is made in time, the run counts as one that hides: init, whose loop never waits for a
//! process, takes the growth of the file system for the run's.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub struct WatchProgress {
    origin: Instant,
    /// When the disk was last judged, or a file measured, in milliseconds since the origin.
    pub(super) disk_ms: AtomicU64,
    /// When a process last answered.
    pub(super) process_ms: AtomicU64,
    pub(super) known: Mutex<Known>,
}

/// What was measured of the run last, and what the whole file system held then: bytes, and files.
#[derive(Clone, Copy, Default)]
pub(super) struct Known {
    pub(super) measured: (u64, u64),
    pub(super) in_use: (u64, u64),
}

impl WatchProgress {
    pub fn new() -> Self {
        WatchProgress {
            origin: Instant::now(),
            disk_ms: AtomicU64::new(0),
            process_ms: AtomicU64::new(0),
            known: Mutex::default(),
        }
    }

    pub fn mark_disk(&self) {
        self.disk_ms.store(self.now_ms(), Ordering::Relaxed);
        self.mark_process();
    }

    pub fn mark_process(&self) {
        self.process_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// All that the run has was measured, while so much was in use.
    pub fn measured(&self, measured: (u64, u64), in_use: (u64, u64)) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Known { measured, in_use };
    }

    fn now_ms(&self) -> u64 {
        self.origin.elapsed().as_millis() as u64
    }

    pub(super) fn since(&self, mark: &AtomicU64) -> Duration {
        Duration::from_millis(self.now_ms().saturating_sub(mark.load(Ordering::Relaxed)))
    }
}
