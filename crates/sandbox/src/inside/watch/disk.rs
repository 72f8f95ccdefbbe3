//! The run's disk use: the tree below its workspace, and unlinked files that a process still holds.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Mode, RawDir};

use super::TICK;
use super::progress::WatchProgress;
use crate::inside::processes::{self, PauseVerdict, ProcessSet, UnexplainedGrowth, WrittenBytes};
use crate::outcome::Stop;
use crate::spec::{Spec, WorkspaceKind};
use crate::sys;

/// The longest time between two measurements, whatever the counters say.
const MEASURE_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// Measuring takes at most one part in this many of the watch's time, or half of its time when a limit may have been
/// exceeded.
const MEASURE_SHARE: u32 = 5;
/// A tree that takes no more than one part in this many of the time is measured at every pass: two milliseconds of a
/// tick.
const QUICK_TREE_SHARE: u32 = 50;
/// What Fumehood's own directories in the workspace take. This does not count against the program.
pub const OWN_DIRECTORIES_BYTES: u64 = 64 << 10;
/// Growth of a file system that is not worth a pause of the run's processes: directories, extents, short-lived
/// reservations.
const NEGLIGIBLE_BYTES: u64 = 4 << 20;
const NEGLIGIBLE_FILES: u64 = 100;
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// How many directories may be open at once while measuring. Deeper ones count as unmeasured.
const DEPTH_MAX: usize = 512;

/// Measures the run's disk use and compares it with its limits. Pairs of numbers are bytes and files, or bytes and
/// inodes.
pub struct Disk {
    bytes_max: u64,
    files_max: u64,
    pub workspace: OwnedFd,
    /// The workspace's path inside the sandbox.
    workspace_path: String,
    workspace_kind: WorkspaceKind,
    device: u64,
    process_set: ProcessSet,
    /// Whether the workspace's files are in a tmpfs, and so in memory.
    is_tmpfs: bool,
    /// The bytes and files that were last measured.
    last_measurement: (u64, u64),
    /// The growth, in bytes and in inodes, of the whole file system beyond what was measured.
    unexplained: Option<(UnexplainedGrowth, UnexplainedGrowth)>,
    progress: Arc<WatchProgress>,
    /// Bytes and inodes in use on the whole file system when the program started.
    at_start: (u64, u64),
    /// Bytes and inodes in use at the last measurement. A difference is a cheap sign that bytes were written or files
    /// made.
    in_use_at_measurement: (u64, u64),
    written: WrittenBytes,
    /// How many bytes had been written when the last whole measurement began.
    written_at_measurement: u64,
    checked_at: Instant,
    /// The last measurement of the named files.
    tree_timing: MeasureTiming,
    /// The last measurement that included unlinked files.
    whole_timing: MeasureTiming,
    /// The most bytes and files measured so far.
    pub peak: (u64, u64),
}

/// When a measurement ended, and how long it took.
#[derive(Clone, Copy)]
struct MeasureTiming {
    at: Instant,
    took: Duration,
}

impl MeasureTiming {
    fn ending_now(start: Instant) -> Self {
        MeasureTiming {
            at: Instant::now(),
            took: start.elapsed(),
        }
    }

    /// Whether enough time has passed since then that another measurement takes no more than one part in `share` of the
    /// time.
    fn is_affordable(&self, share: u32) -> bool {
        self.at.elapsed() >= self.took * share
    }
}

/// A measurement in progress, or its result.
#[derive(Default)]
struct Measured {
    bytes: u64,
    files: u64,
    /// Whether something could not be measured.
    unmeasured: bool,
    /// The inodes with several names, or with none, that were counted already.
    seen: HashSet<u64>,
}

impl Disk {
    pub fn new(
        spec: &Spec,
        workspace: OwnedFd,
        process_set: ProcessSet,
        progress: Arc<WatchProgress>,
    ) -> io::Result<Self> {
        let now = MeasureTiming {
            at: Instant::now(),
            took: Duration::ZERO,
        };
        let mut disk = Disk {
            bytes_max: spec.limits.disk_bytes,
            files_max: spec.limits.files,
            device: rustix::fs::fstat(&workspace)?.st_dev,
            is_tmpfs: rustix::fs::fstatfs(&workspace)?.f_type as u64 == TMPFS_MAGIC,
            workspace,
            workspace_path: spec.workspace.as_path().to_string_lossy().into_owned(),
            workspace_kind: spec.workspace_kind,
            process_set,
            last_measurement: (0, 0),
            unexplained: None,
            progress,
            at_start: (0, 0),
            in_use_at_measurement: (0, 0),
            written: WrittenBytes::default(),
            written_at_measurement: 0,
            checked_at: now.at,
            tree_timing: now,
            whole_timing: now,
            peak: (0, 0),
        };
        let now = disk.in_use();
        disk.begin(now);
        Ok(disk)
    }

    /// The program is about to run, and this is in use on the file system.
    pub fn begin(&mut self, in_use: (u64, u64)) {
        (self.at_start, self.in_use_at_measurement) = (in_use, in_use);
        self.unexplained = None;
        self.progress.set_measured((0, 0), in_use);
    }

    /// How much memory the workspace's files take.
    pub fn bytes_in_memory(&self) -> u64 {
        if self.is_tmpfs {
            self.last_measurement.0
        } else {
            0
        }
    }

    /// Restores mode 0700 of the workspace. The program owns the directory and could open it to other users of the
    /// host.
    pub fn restrict_top_directory(&self) {
        let open = rustix::fs::fstat(&self.workspace).is_ok_and(|s| s.st_mode & 0o7777 != 0o700);
        if open {
            let _ = rustix::fs::fchmod(&self.workspace, Mode::from_raw_mode(0o700));
        }
    }

    /// Checks the disk if the last check is a tick ago. To be called during anything that takes long.
    pub fn check_if_due(&mut self) -> Option<Stop> {
        (self.checked_at.elapsed() >= TICK)
            .then(|| self.check())
            .flatten()
    }

    /// Reads how much was written and, if that may be too much, measures. Returns the limit that the run exceeded, if
    /// any.
    pub fn check(&mut self) -> Option<Stop> {
        let exceeded = self.measure_if_needed();
        self.checked_at = Instant::now();
        self.progress.mark_disk();
        exceeded
    }

    fn measure_if_needed(&mut self) -> Option<Stop> {
        let (bytes, inodes) = self.in_use();
        if self.workspace_kind == WorkspaceKind::Memory {
            // The tmpfs itself refuses to exceed its size, so only record the peak.
            self.last_measurement = (bytes, inodes);
            self.update_peak(bytes, inodes);
            return None;
        }
        self.written = processes::written_bytes(self.process_set);
        let grown = |now: u64, before: u64, limit: u64| now.saturating_sub(before) > limit / 8;
        let near = self.written.net > self.bytes_max
            || self.written.unreadable
            || grown(bytes, self.in_use_at_measurement.0, self.bytes_max)
            || grown(inodes, self.in_use_at_measurement.1, self.files_max);
        let due = self.whole_timing.at.elapsed() >= MEASURE_INTERVAL_MAX || near;
        if !due && self.tree_timing.is_affordable(QUICK_TREE_SHARE) {
            let tree = self.measure_tree();
            return self.check_measurement(&tree);
        }
        let share = if near { 1 } else { MEASURE_SHARE };
        // Named files are quick to measure, and are usually all there is. So measure at least the tree.
        if !due || !self.tree_timing.is_affordable(share) {
            return None;
        }
        let much = self.written_since(self.written_at_measurement) > self.bytes_max;
        match much || self.whole_timing.is_affordable(share) {
            true => self.measure(),
            false => {
                let tree = self.measure_tree();
                self.check_measurement(&tree)
            }
        }
    }

    /// Measures when no process is left that could hold an unlinked file.
    pub fn measure_at_end(&mut self) -> Option<Stop> {
        if self.workspace_kind == WorkspaceKind::Memory {
            return self.measure_if_needed();
        }
        // The kernel does not say how much of what dead processes wrote was deleted again. Use the growth of the file
        // system instead.
        self.written = WrittenBytes::default();
        let tree = self.measure_tree();
        self.check_measurement(&tree)
    }

    fn written_since(&self, before: u64) -> u64 {
        self.written.gross.saturating_sub(before)
    }

    fn update_peak(&mut self, bytes: u64, files: u64) {
        self.peak = (self.peak.0.max(bytes), self.peak.1.max(files));
    }

    /// Measures everything: named files, unlinked files and, where the file system's growth is unexplained, files that
    /// only system calls hold.
    fn measure(&mut self) -> Option<Stop> {
        let start = Instant::now();
        self.written_at_measurement = self.written.gross;
        let mut measured = self.measure_tree();
        let exceeded = self.check_measurement(&measured).or_else(|| {
            self.measure_unlinked(&mut measured);
            self.check_measurement(&measured)
                .or_else(|| self.look_for_hidden(&mut measured))
        });
        self.whole_timing = MeasureTiming::ending_now(start);
        self.in_use_at_measurement = self.in_use();
        if !measured.unmeasured {
            let complete = (measured.bytes, measured.files);
            self.progress
                .set_measured(complete, self.in_use_at_measurement);
        }
        exceeded
    }

    /// Looks for files that only a system call in progress holds (see `processes/pause.rs`). Only the growth of the
    /// file system shows them.
    fn look_for_hidden(&mut self, measured: &mut Measured) -> Option<Stop> {
        if measured.unmeasured {
            // All growth is already charged to the run.
            return None;
        }
        let now = self.in_use();
        let (bytes, files) = self.unexplained.get_or_insert_with(|| {
            (
                UnexplainedGrowth::new(self.at_start.0, self.bytes_max / 8 + NEGLIGIBLE_BYTES),
                UnexplainedGrowth::new(self.at_start.1, self.files_max / 8 + NEGLIGIBLE_FILES),
            )
        });
        let by_bytes = bytes.needs_pause(now.0, measured.bytes);
        if !files.needs_pause(now.1, measured.files) && !by_bytes {
            return None;
        }
        let paused = processes::pause(self.process_set);
        let after = in_use(self.workspace.as_fd());
        let all_stopped = paused.all_stopped;
        drop(paused);
        let verdicts = [
            bytes.note_pause(now.0, after.0, measured.bytes, all_stopped),
            files.note_pause(now.1, after.1, measured.files, all_stopped),
        ];
        match verdicts {
            [PauseVerdict::Hidden(hidden), _] => measured.bytes += hidden,
            [_, PauseVerdict::Hidden(hidden)] => measured.files += hidden,
            [PauseVerdict::NotStopped, _] | [_, PauseVerdict::NotStopped] => {
                measured.unmeasured = true
            }
            [PauseVerdict::Nothing, PauseVerdict::Nothing] => return None,
        }
        self.check_measurement(measured)
    }

    /// Compares a measurement with the limits. If something could not be measured, all that the run wrote and all
    /// growth of the file system are charged to the run.
    fn check_measurement(&mut self, measured: &Measured) -> Option<Stop> {
        let (mut bytes, mut files) = (measured.bytes, measured.files);
        if measured.unmeasured {
            let now = self.in_use();
            let grown = now.0.saturating_sub(self.at_start.0);
            bytes = bytes.max(self.written.net).max(grown);
            files = files.max(now.1.saturating_sub(self.at_start.1));
        }
        self.last_measurement = (bytes, files);
        self.update_peak(bytes, files);
        if bytes > self.bytes_max.saturating_add(OWN_DIRECTORIES_BYTES) {
            return Some(Stop::Disk);
        }
        (files > self.files_max).then_some(Stop::Files)
    }

    /// Measures the named files below the workspace.
    fn measure_tree(&mut self) -> Measured {
        let start = Instant::now();
        let mut measured = Measured::default();
        match sys::open_at(&self.workspace, ".", sys::DIRECTORY) {
            Ok(top) => {
                let mut write_rate = WriteRate::new(self);
                measured.directory(top, self.device, DEPTH_MAX, self.files_max, &mut write_rate);
                self.written = write_rate.written;
            }
            Err(_) => measured.unmeasured = true,
        }
        self.tree_timing = MeasureTiming::ending_now(start);
        measured
    }

    /// Adds the unlinked files that a process still holds.
    fn measure_unlinked(&mut self, measured: &mut Measured) {
        let mut sockets = HashSet::new();
        let mut write_rate = WriteRate::new(self);
        let scanned = processes::for_each_open_file(self.process_set, &mut |pid, entry, stat| {
            let kind = FileType::from_raw_mode(stat.st_mode);
            let unlinked = stat.st_nlink == 0 && stat.st_dev == self.device;
            if unlinked && measured.file(stat) {
                // An unlinked file takes an inode like any other.
                measured.files += 1;
            }
            if kind == FileType::Socket {
                sockets.insert(stat.st_ino);
                measured.unmeasured |= processes::has_descriptors_in_flight(pid, entry);
            }
            write_rate.is_acceptable_after_file()
        });
        measured.unmeasured |= scanned != processes::ScanResult::All;
        measured.unmeasured |= processes::maps_deleted_file(
            self.process_set,
            &measured.seen,
            &self.workspace_path,
            &mut || write_rate.is_acceptable(),
        );
        self.written = write_rate.written;
        // A bound socket keeps the inode of its name after the name is removed, and nothing shows which sockets do. So
        // count as many sockets as the file system has unexplained inodes.
        let grown = self.in_use().1.saturating_sub(self.at_start.1);
        let unexplained = grown.saturating_sub(measured.files);
        measured.files += unexplained.min(sockets.len() as u64);
    }

    fn in_use(&self) -> (u64, u64) {
        in_use(self.workspace.as_fd())
    }
}

/// Bytes and inodes in use on the whole file system that holds the workspace.
pub fn in_use(workspace: BorrowedFd<'_>) -> (u64, u64) {
    rustix::fs::fstatvfs(workspace).map_or((0, 0), |s| {
        let bytes = s.f_blocks.saturating_sub(s.f_bfree) * s.f_frsize;
        (bytes, s.f_files.saturating_sub(s.f_ffree))
    })
}

/// Checks that a measurement is faster than the program's writes: if much is written during a measurement, its result
/// is worthless.
struct WriteRate<'a> {
    workspace: BorrowedFd<'a>,
    progress: &'a WatchProgress,
    process_set: ProcessSet,
    bytes_max: u64,
    /// Bytes written when the measurement began.
    before: u64,
    /// Bytes in use when the measurement began.
    in_use_before: u64,
    in_use: u64,
    asked_at: Instant,
    written: WrittenBytes,
}

impl<'a> WriteRate<'a> {
    fn new(disk: &'a Disk) -> Self {
        let in_use = disk.in_use().0;
        WriteRate {
            workspace: disk.workspace.as_fd(),
            progress: &disk.progress,
            process_set: disk.process_set,
            bytes_max: disk.bytes_max,
            before: disk.written.gross,
            in_use_before: in_use,
            in_use,
            asked_at: Instant::now(),
            written: disk.written,
        }
    }

    /// Whether the run has written less than its limit since the measurement began.
    fn is_acceptable(&mut self) -> bool {
        if self.asked_at.elapsed() >= TICK / 2 {
            self.written = processes::written_bytes(self.process_set);
            // Only this shows what was written by children that were never waited for.
            self.in_use = in_use(self.workspace).0;
            self.asked_at = Instant::now();
        }
        self.written.gross.saturating_sub(self.before) <= self.bytes_max
            && self.in_use.saturating_sub(self.in_use_before) <= self.bytes_max
    }

    /// As [`is_acceptable`](Self::is_acceptable), and records progress of the disk watch. Not to be used between reads
    /// from /proc, which can block on a process.
    fn is_acceptable_after_file(&mut self) -> bool {
        self.progress.mark_disk();
        self.is_acceptable()
    }
}

impl Measured {
    /// Adds the size of a file, once for each inode. Returns whether this was the first time.
    fn file(&mut self, stat: &rustix::fs::Stat) -> bool {
        let new = stat.st_nlink == 1 || self.seen.insert(stat.st_ino);
        if new {
            self.bytes += stat.st_blocks as u64 * 512;
        }
        new
    }

    /// Whether to stop measuring: enough files were found to know that the limit is exceeded, or the program writes too
    /// fast.
    fn is_enough(&mut self, files_max: u64, write_rate: &mut WriteRate<'_>) -> bool {
        let acceptable = write_rate.is_acceptable_after_file();
        self.unmeasured |= !acceptable;
        !acceptable || self.files > files_max.saturating_mul(2)
    }

    /// Adds a directory and everything below it.
    fn directory(
        &mut self,
        dir: OwnedFd,
        device: u64,
        depth: usize,
        files_max: u64,
        write_rate: &mut WriteRate<'_>,
    ) {
        let mut space = Vec::with_capacity(32 * 1024);
        let mut below = Vec::new();
        let mut entries = RawDir::new(&dir, space.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let Ok(entry) = entry else {
                self.unmeasured = true;
                break;
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            self.files += 1;
            let stat = match rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(rustix::io::Errno::NOENT) => continue,
                // The directory can be listed but not searched.
                Err(_) => {
                    self.unmeasured = true;
                    continue;
                }
            };
            self.file(&stat);
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                below.push(name.to_owned());
            }
            if self.is_enough(files_max, write_rate) {
                return;
            }
        }
        for name in below {
            match sys::open_at(&dir, name, sys::DIRECTORY) {
                // Do not descend into another file system that is mounted there.
                Ok(child) if rustix::fs::fstat(&child).is_ok_and(|s| s.st_dev != device) => {}
                Ok(child) if depth > 0 => {
                    self.directory(child, device, depth - 1, files_max, write_rate);
                }
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
                Ok(_) | Err(_) => self.unmeasured = true,
            }
            if self.is_enough(files_max, write_rate) {
                return;
            }
        }
    }
}
