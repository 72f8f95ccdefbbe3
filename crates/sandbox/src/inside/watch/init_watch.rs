//! The checks that init makes itself: the number of descriptors always, the other limits while the watch thread is
//! late, usually because it is blocked on a process.

use std::os::fd::BorrowedFd;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::disk::{OWN_DIRECTORIES_BYTES, in_use};
use super::file_table::FileTable;
use super::progress::WatchProgress;
use super::{TICK, WatchedLimits};
use crate::inside::processes::{self, CensusRequest, ProcessCensus, ProcessSet};
use crate::outcome::Stop;
use crate::spec::{Limits, Spec, WorkspaceKind};

/// How long the watch thread may go without a check of the disk before init makes one. The thread checks the disk ten
/// times a second, and half as often on a busy machine.
const DISK_GAP_MAX: Duration = Duration::from_millis(200);
/// How long the watch thread may wait for one read from /proc before init checks the processes. Such a read takes long
/// for a process that holds much memory.
const PROCESS_GAP_MAX: Duration = Duration::from_secs(2);
/// How long the watch thread may go without a check of the disk before init checks the processes too. Many processes
/// with much memory take long together.
const PASS_TIME_MAX: Duration = Duration::from_secs(10);

/// The checks that init makes itself. None of these checks waits for a process. They may therefore count use that an
/// exact measurement would not charge to the run.
pub struct InitWatch {
    limits: Limits,
    watched: WatchedLimits,
    workspace_kind: WorkspaceKind,
    process_set: ProcessSet,
    /// For the CPU time, where no cgroup counts it.
    census: Option<ProcessCensus>,
    file_table: Option<FileTable>,
    last_check: Instant,
}

impl InitWatch {
    pub fn new(
        spec: &Spec,
        watched: WatchedLimits,
        process_set: ProcessSet,
        counts_cpu: bool,
    ) -> Self {
        InitWatch {
            limits: spec.limits.clone(),
            watched,
            workspace_kind: spec.workspace_kind,
            process_set,
            census: counts_cpu.then(|| ProcessCensus::new(process_set)),
            file_table: FileTable::new(&spec.limits, process_set),
            last_check: Instant::now(),
        }
    }

    /// The program is about to run, and the host has this many files open.
    pub fn begin(&mut self, open_on_host: Option<u64>) {
        self.file_table
            .iter_mut()
            .for_each(|table| table.begin(open_on_host));
    }

    /// Checks the number of open files. If the watch thread has made no progress in time, also checks the other limits.
    /// Returns the limit that the run exceeded, if any.
    pub fn check(&mut self, progress: &WatchProgress, workspace: BorrowedFd<'_>) -> Option<Stop> {
        let table = self.file_table.as_mut();
        let exceeded = table.and_then(FileTable::look_at_descriptors);
        exceeded.or_else(|| self.check_if_late(progress, workspace))
    }

    fn check_if_late(
        &mut self,
        progress: &WatchProgress,
        workspace: BorrowedFd<'_>,
    ) -> Option<Stop> {
        let disk_gap = progress.since(&progress.disk_ms);
        if disk_gap < DISK_GAP_MAX || self.last_check.elapsed() < TICK {
            return None;
        }
        self.last_check = Instant::now();
        let is_blocked = progress.since(&progress.process_ms) >= PROCESS_GAP_MAX;
        let exceeded = self.check_disk(progress, workspace);
        exceeded.or_else(|| {
            (is_blocked || disk_gap >= PASS_TIME_MAX)
                .then(|| self.check_processes())
                .flatten()
        })
    }

    /// Adds all growth of the file system since the last measurement to what was measured then.
    fn check_disk(&self, progress: &WatchProgress, workspace: BorrowedFd<'_>) -> Option<Stop> {
        if self.workspace_kind == WorkspaceKind::Memory {
            // The tmpfs itself refuses to exceed its size.
            return None;
        }
        let last = progress.last.lock();
        let last = *last.unwrap_or_else(PoisonError::into_inner);
        let now = in_use(workspace);
        let bytes = last.measured.0 + now.0.saturating_sub(last.in_use.0);
        let files = last.measured.1 + now.1.saturating_sub(last.in_use.1);
        if bytes > self.limits.disk_bytes.saturating_add(OWN_DIRECTORIES_BYTES) {
            return Some(Stop::Disk);
        }
        (files > self.limits.files).then_some(Stop::Files)
    }

    fn check_processes(&mut self) -> Option<Stop> {
        if self.watched.memory {
            let bytes = processes::memory_at_most(self.process_set);
            if bytes > self.limits.memory_bytes {
                return Some(Stop::Memory);
            }
        }
        // The watch thread may be blocked on the list of mapped files, so check only the growth of the
        // host's count.
        let table = self.file_table.as_mut();
        if table.is_some_and(FileTable::has_grown) {
            return Some(Stop::OpenFiles);
        }
        let census = self.census.as_mut()?;
        let request = CensusRequest {
            cpu: true,
            tasks: self.watched.pids,
            ..CensusRequest::default()
        };
        census.take(request, &mut || true);
        if self.watched.pids && census.tasks > self.limits.pids {
            return Some(Stop::Pids);
        }
        let limit = self.limits.cpu_ms;
        limit
            .is_some_and(|limit| census.cpu_ms > limit)
            .then_some(Stop::CpuTime)
    }
}
