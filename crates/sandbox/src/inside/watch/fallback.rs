//! What init looks at itself while the watch waits for a process.

use std::os::fd::BorrowedFd;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::disk::{OWN_BYTES, in_use};
use super::file_table::FileTable;
use super::progress::WatchProgress;
use super::{TICK, WatchedLimits};
use crate::inside::processes::{self, CensusRequest, ProcessCensus, ProcessSet};
use crate::outcome::Stop;
use crate::spec::{Limits, Spec, WorkspaceKind};

/// The disk is looked at ten times a second; a machine that is busy with other things may make that half as often.
const DISK_AT_MOST: Duration = Duration::from_millis(200);
/// A process that holds much memory takes long to tell how much, and many of them take long together.
const PROCESS_AT_MOST: Duration = Duration::from_secs(2);
const LOOK_AT_MOST: Duration = Duration::from_secs(10);

/// The look that init takes itself: nothing in it waits for a process.
pub struct FallbackWatch {
    limits: Limits,
    watched: WatchedLimits,
    workspace_kind: WorkspaceKind,
    process_set: ProcessSet,
    /// Where no counter of a cgroup tells the CPU time.
    census: Option<ProcessCensus>,
    file_table: Option<FileTable>,
    looked_at: Instant,
}

impl FallbackWatch {
    pub fn new(
        spec: &Spec,
        watched: WatchedLimits,
        process_set: ProcessSet,
        counts_cpu: bool,
    ) -> Self {
        FallbackWatch {
            limits: spec.limits.clone(),
            watched,
            workspace_kind: spec.workspace_kind,
            process_set,
            census: counts_cpu.then(|| ProcessCensus::new(process_set)),
            file_table: FileTable::new(&spec.limits, process_set),
            looked_at: Instant::now(),
        }
    }

    /// The program is about to run, and the host has so many files open.
    pub fn begin(&mut self, open_on_host: Option<u64>) {
        self.file_table
            .iter_mut()
            .for_each(|table| table.begin(open_on_host));
    }

    /// Whether too many files are open; and which other limit is passed, as far as can be told without the watch, if that
    /// has not come on in time.
    pub fn look(&mut self, progress: &WatchProgress, workspace: BorrowedFd<'_>) -> Option<Stop> {
        let table = self.file_table.as_mut();
        let passed = table.and_then(FileTable::look_at_descriptors);
        passed.or_else(|| self.look_if_late(progress, workspace))
    }

    fn look_if_late(
        &mut self,
        progress: &WatchProgress,
        workspace: BorrowedFd<'_>,
    ) -> Option<Stop> {
        let disk_for = progress.since(&progress.disk_ms);
        if disk_for < DISK_AT_MOST || self.looked_at.elapsed() < TICK {
            return None;
        }
        self.looked_at = Instant::now();
        let waits = progress.since(&progress.process_ms) >= PROCESS_AT_MOST;
        let passed = self.judge_disk(progress, workspace);
        passed.or_else(|| {
            (waits || disk_for >= LOOK_AT_MOST)
                .then(|| self.judge_processes())
                .flatten()
        })
    }

    fn judge_disk(&self, progress: &WatchProgress, workspace: BorrowedFd<'_>) -> Option<Stop> {
        if self.workspace_kind == WorkspaceKind::Memory {
            // The tmpfs refuses what is too much.
            return None;
        }
        let known = progress.known.lock();
        let known = *known.unwrap_or_else(PoisonError::into_inner);
        let now = in_use(workspace);
        let bytes = known.measured.0 + now.0.saturating_sub(known.in_use.0);
        let files = known.measured.1 + now.1.saturating_sub(known.in_use.1);
        if bytes > self.limits.disk_bytes.saturating_add(OWN_BYTES) {
            return Some(Stop::Disk);
        }
        (files > self.limits.files).then_some(Stop::Files)
    }

    fn judge_processes(&mut self) -> Option<Stop> {
        if self.watched.memory {
            let bytes = processes::memory_at_most(self.process_set);
            if bytes > self.limits.memory_bytes {
                return Some(Stop::Memory);
            }
        }
        // Mapped files may be what the watch waits to be told of.
        let table = self.file_table.as_mut();
        if table.is_some_and(FileTable::has_grown) {
            return Some(Stop::OpenFiles);
        }
        let census = self.census.as_mut()?;
        let wanted = CensusRequest {
            cpu: true,
            tasks: self.watched.pids,
            memory: None,
            files_in_memory: 0,
        };
        census.take(wanted, &mut || true);
        if self.watched.pids && census.tasks > self.limits.pids {
            return Some(Stop::Pids);
        }
        let most = self.limits.cpu_ms;
        most.is_some_and(|most| census.cpu_ms > most)
            .then_some(Stop::CpuTime)
    }
}
