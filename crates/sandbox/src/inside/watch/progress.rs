//! The progress of the watch thread, which init checks.
//!
//! Reading some files of /proc blocks on the process that they describe: `smaps_rollup` and `maps` on its memory-map
//! lock, which one of its threads can hold for seconds, and `io` on the end of an `execve`. The program decides how
//! long that takes. So the watch thread records its progress here. If it makes none in time, init, whose loop never
//! waits for a process, attributes all growth of the file system to the run (`init_watch.rs`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// When the watch thread last made progress, and what it last measured.
pub struct WatchProgress {
    origin: Instant,
    /// When the disk limits were last checked, or a file was last measured, in milliseconds since the origin.
    pub(super) disk_ms: AtomicU64,
    /// When a read from /proc last returned, in milliseconds since the origin.
    pub(super) process_ms: AtomicU64,
    pub(super) last: Mutex<LastMeasurement>,
}

/// The last complete measurement: the bytes and files of the run, and the bytes and inodes in use on the whole file
/// system at that time.
#[derive(Clone, Copy, Default)]
pub(super) struct LastMeasurement {
    pub(super) measured: (u64, u64),
    pub(super) in_use: (u64, u64),
}

impl WatchProgress {
    pub fn new() -> Self {
        WatchProgress {
            origin: Instant::now(),
            disk_ms: AtomicU64::new(0),
            process_ms: AtomicU64::new(0),
            last: Mutex::default(),
        }
    }

    /// Records that the disk limits were checked, or a file measured.
    pub fn mark_disk(&self) {
        self.disk_ms.store(self.now_ms(), Ordering::Relaxed);
        self.mark_process();
    }

    /// Records that a read from /proc has returned.
    pub fn mark_process(&self) {
        self.process_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Records a complete measurement of the run, and what was in use on the file system at that time.
    pub fn set_measured(&self, measured: (u64, u64), in_use: (u64, u64)) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = LastMeasurement { measured, in_use };
    }

    fn now_ms(&self) -> u64 {
        self.origin.elapsed().as_millis() as u64
    }

    /// The time since one of the two marks.
    pub(super) fn since(&self, mark: &AtomicU64) -> Duration {
        Duration::from_millis(self.now_ms().saturating_sub(mark.load(Ordering::Relaxed)))
    }
}
