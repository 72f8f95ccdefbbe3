//! What the run has on disk: the tree below its workspace, and files without a name that some process holds.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir};

use super::TICK;
use super::progress::WatchProgress;
use crate::inside::processes::{self, PauseVerdict, ProcessSet, UnexplainedGrowth, WrittenBytes};
use crate::outcome::Stop;
use crate::spec::{Spec, WorkspaceKind};

/// Files are measured at least this often, whatever the counters say.
const MEASURE_AT_LEAST: Duration = Duration::from_secs(1);
/// Measuring takes at most one part in so many of the watch's time; half of it, when a limit may have been passed.
const MEASURE_SHARE: u32 = 5;
/// A tree that takes no more than this part of it is measured at every look: two milliseconds.
const SOON_SHARE: u32 = 50;
/// What our own directories in the workspace take: not the program's.
pub const OWN_BYTES: u64 = 64 << 10;
/// Growth of a file system that is not worth a pause: directories, extents, what is reserved for a moment.
const NEGLIGIBLE_BYTES: u64 = 4 << 20;
const NEGLIGIBLE_FILES: u64 = 100;
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Directories held open at once while measuring; deeper ones count as unmeasured.
const DEPTH_MAX: usize = 512;

/// What the run has on disk.
pub struct Disk {
    bytes_max: u64,
    files_max: u64,
    pub workspace: OwnedFd,
    /// As the program names it.
    workspace_path: String,
    workspace_kind: WorkspaceKind,
    device: u64,
    process_set: ProcessSet,
    /// The workspace's files are kept in memory.
    is_tmpfs: bool,
    /// Bytes and files that were last measured.
    last: (u64, u64),
    /// Bytes and inodes of the whole file system beyond what was measured.
    unexplained: Option<(UnexplainedGrowth, UnexplainedGrowth)>,
    progress: Arc<WatchProgress>,
    /// Bytes and inodes in use on the whole file system at the start.
    at_start: (u64, u64),
    /// Bytes and inodes in use when last measured: a cheap sign that something was written, or files were made.
    when_measured: (u64, u64),
    written: WrittenBytes,
    /// All that had been written when a measuring last began.
    written_before: u64,
    checked_at: Instant,
    tree: MeasureTiming,
    whole: MeasureTiming,
    /// The most seen: bytes, and files.
    pub seen: (u64, u64),
}

/// When something was last measured, and how long that took.
#[derive(Clone, Copy)]
struct MeasureTiming {
    at: Instant,
    took: Duration,
}

impl MeasureTiming {
    fn started(start: Instant) -> Self {
        MeasureTiming {
            at: Instant::now(),
            took: start.elapsed(),
        }
    }

    /// Whether enough time has passed since for this to take no more than one part in `share` of it.
    fn is_affordable(&self, share: u32) -> bool {
        self.at.elapsed() >= self.took * share
    }
}

#[derive(Default)]
struct Measured {
    bytes: u64,
    files: u64,
    unmeasured: bool,
    /// Inodes with several names, or none, counted once.
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
            last: (0, 0),
            unexplained: None,
            progress,
            at_start: (0, 0),
            when_measured: (0, 0),
            written: WrittenBytes::default(),
            written_before: 0,
            checked_at: now.at,
            tree: now,
            whole: now,
            seen: (0, 0),
        };
        let now = disk.in_use();
        disk.begin(now);
        Ok(disk)
    }

    /// The program is about to run, and this is in use.
    pub fn begin(&mut self, in_use: (u64, u64)) {
        (self.at_start, self.when_measured) = (in_use, in_use);
        self.unexplained = None;
        self.progress.measured((0, 0), in_use);
    }

    /// What the workspace's files take of memory.
    pub fn bytes_in_memory(&self) -> u64 {
        if self.is_tmpfs { self.last.0 } else { 0 }
    }

    /// The top directory is the program's, and so is its mode: opened to others, it is closed again.
    pub fn restrict_top_directory(&self) {
        let open = rustix::fs::fstat(&self.workspace).is_ok_and(|s| s.st_mode & 0o7777 != 0o700);
        if open {
            let _ = rustix::fs::fchmod(&self.workspace, Mode::from_raw_mode(0o700));
        }
    }

    /// In the midst of something else that takes long.
    pub fn check_if_due(&mut self) -> Option<Stop> {
        (self.checked_at.elapsed() >= TICK)
            .then(|| self.check())
            .flatten()
    }

    /// What was written, and what is there if that may be too much.
    pub fn check(&mut self) -> Option<Stop> {
        let passed = self.look();
        self.checked_at = Instant::now();
        self.progress.mark_disk();
        passed
    }

    fn look(&mut self) -> Option<Stop> {
        let (bytes, inodes) = self.in_use();
        if self.workspace_kind == WorkspaceKind::Memory {
            // The tmpfs refuses what is too much; here it is only noted.
            self.last = (bytes, inodes);
            self.note(bytes, inodes);
            return None;
        }
        self.written = processes::written(self.process_set);
        let grown = |now: u64, before: u64, limit: u64| now.saturating_sub(before) > limit / 8;
        let near = self.written.net > self.bytes_max
            || self.written.unreadable
            || grown(bytes, self.when_measured.0, self.bytes_max)
            || grown(inodes, self.when_measured.1, self.files_max);
        let due = self.whole.at.elapsed() >= MEASURE_AT_LEAST || near;
        if !due && self.tree.is_affordable(SOON_SHARE) {
            let tree = self.measure_tree();
            return self.judge(&tree);
        }
        let share = if near { 1 } else { MEASURE_SHARE };
        // What has names is soon measured, and is as a rule all there is.
        if !due || !self.tree.is_affordable(share) {
            return None;
        }
        let much = self.written_since(self.written_before) > self.bytes_max;
        match much || self.whole.is_affordable(share) {
            true => self.measure(),
            false => {
                let tree = self.measure_tree();
                self.judge(&tree)
            }
        }
    }

    /// When nobody is left who could hold a file without a name.
    pub fn look_at_end(&mut self) -> Option<Stop> {
        if self.workspace_kind == WorkspaceKind::Memory {
            return self.look();
        }
        // Of what the dead have written nobody tells how much was deleted again; what there is more than at the start does.
        self.written = WrittenBytes::default();
        let tree = self.measure_tree();
        self.judge(&tree)
    }

    fn written_since(&self, before: u64) -> u64 {
        self.written.gross.saturating_sub(before)
    }

    fn note(&mut self, bytes: u64, files: u64) {
        self.seen = (self.seen.0.max(bytes), self.seen.1.max(files));
    }

    fn measure(&mut self) -> Option<Stop> {
        let start = Instant::now();
        self.written_before = self.written.gross;
        let mut measured = self.measure_tree();
        let passed = self.judge(&measured).or_else(|| {
            self.measure_unlinked(&mut measured);
            self.judge(&measured)
                .or_else(|| self.look_for_hidden(&mut measured))
        });
        self.whole = MeasureTiming::started(start);
        self.when_measured = self.in_use();
        if !measured.unmeasured {
            let known = (measured.bytes, measured.files);
            self.progress.measured(known, self.when_measured);
        }
        passed
    }

    /// Files that only a system call holds (see `pause.rs`). The file system shows them, and nothing else does.
    fn look_for_hidden(&mut self, measured: &mut Measured) -> Option<Stop> {
        if measured.unmeasured {
            // It answers for all growth already.
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
        let answered = paused.answered;
        drop(paused);
        let verdicts = [
            bytes.note_pause(now.0, after.0, measured.bytes, answered),
            files.note_pause(now.1, after.1, measured.files, answered),
        ];
        match verdicts {
            [PauseVerdict::Hidden(hidden), _] => measured.bytes += hidden,
            [_, PauseVerdict::Hidden(hidden)] => measured.files += hidden,
            [PauseVerdict::Unanswered, _] | [_, PauseVerdict::Unanswered] => {
                measured.unmeasured = true
            }
            [PauseVerdict::Nothing, PauseVerdict::Nothing] => return None,
        }
        self.judge(measured)
    }

    fn judge(&mut self, measured: &Measured) -> Option<Stop> {
        let (mut bytes, mut files) = (measured.bytes, measured.files);
        if measured.unmeasured {
            let now = self.in_use();
            let grown = now.0.saturating_sub(self.at_start.0);
            bytes = bytes.max(self.written.net).max(grown);
            files = files.max(now.1.saturating_sub(self.at_start.1));
        }
        self.last = (bytes, files);
        self.note(bytes, files);
        if bytes > self.bytes_max.saturating_add(OWN_BYTES) {
            return Some(Stop::Disk);
        }
        (files > self.files_max).then_some(Stop::Files)
    }

    fn measure_tree(&mut self) -> Measured {
        let start = Instant::now();
        let mut measured = Measured::default();
        let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat(&self.workspace, ".", open, Mode::empty()) {
            Ok(top) => {
                let mut pace = Pace::new(self);
                measured.directory(top, self.device, DEPTH_MAX, self.files_max, &mut pace);
                self.written = pace.written;
            }
            Err(_) => measured.unmeasured = true,
        }
        self.tree = MeasureTiming::started(start);
        measured
    }

    /// Files without a name that some process still holds.
    fn measure_unlinked(&mut self, measured: &mut Measured) {
        let mut sockets = HashSet::new();
        let mut pace = Pace::new(self);
        let looked = processes::open_files(self.process_set, &mut |pid, entry, stat| {
            let kind = FileType::from_raw_mode(stat.st_mode);
            let unlinked = stat.st_nlink == 0 && stat.st_dev == self.device;
            if unlinked && measured.file(stat) {
                // It takes an inode like any other.
                measured.files += 1;
            }
            if kind == FileType::Socket {
                sockets.insert(stat.st_ino);
                measured.unmeasured |= processes::descriptors_in_flight(pid, entry);
            }
            pace.may_go_on_at_file()
        });
        measured.unmeasured |= looked != processes::ScanResult::All;
        measured.unmeasured |= processes::map_deleted_files(
            self.process_set,
            &measured.seen,
            &self.workspace_path,
            &mut || pace.holds(),
        );
        self.written = pace.written;
        // A bound socket keeps the inode of its name after that is gone, and nothing tells which sockets do: as many of them
        // as the file system has inodes beyond those that were found.
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

/// Whether measuring keeps pace with writing: what was measured at its begin says little when much was written since.
struct Pace<'a> {
    workspace: BorrowedFd<'a>,
    progress: &'a WatchProgress,
    process_set: ProcessSet,
    bytes_max: u64,
    before: u64,
    in_use_before: u64,
    in_use: u64,
    asked_at: Instant,
    written: WrittenBytes,
}

impl<'a> Pace<'a> {
    fn new(disk: &'a Disk) -> Self {
        let in_use = disk.in_use().0;
        Pace {
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

    fn holds(&mut self) -> bool {
        if self.asked_at.elapsed() >= TICK / 2 {
            self.written = processes::written(self.process_set);
            // Of what is written by children that nobody waits for only this tells.
            self.in_use = in_use(self.workspace).0;
            self.asked_at = Instant::now();
        }
        self.written.gross.saturating_sub(self.before) <= self.bytes_max
            && self.in_use.saturating_sub(self.in_use_before) <= self.bytes_max
    }

    /// The same where no file is read that waits for a process.
    fn may_go_on_at_file(&mut self) -> bool {
        self.progress.mark_disk();
        self.holds()
    }
}

impl Measured {
    /// Counts what it takes, once for each inode, and tells whether this was the first time.
    fn file(&mut self, stat: &rustix::fs::Stat) -> bool {
        let new = stat.st_nlink == 1 || self.seen.insert(stat.st_ino);
        if new {
            self.bytes += stat.st_blocks as u64 * 512;
        }
        new
    }

    /// More than enough to know that the limit is passed, or more than can be measured.
    fn is_enough(&mut self, files_max: u64, pace: &mut Pace<'_>) -> bool {
        let holds = pace.may_go_on_at_file();
        self.unmeasured |= !holds;
        !holds || self.files > files_max.saturating_mul(2)
    }

    fn directory(
        &mut self,
        dir: OwnedFd,
        device: u64,
        depth: usize,
        files_max: u64,
        pace: &mut Pace<'_>,
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
                // Listed, and not to be looked at: a directory without the right to search it.
                Err(_) => {
                    self.unmeasured = true;
                    continue;
                }
            };
            self.file(&stat);
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                below.push(name.to_owned());
            }
            if self.is_enough(files_max, pace) {
                return;
            }
        }
        for name in below {
            let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            match rustix::fs::openat(&dir, name, open, Mode::empty()) {
                // Never into another file system, should one be mounted there.
                Ok(child) if rustix::fs::fstat(&child).is_ok_and(|s| s.st_dev != device) => {}
                Ok(child) if depth > 0 => {
                    self.directory(child, device, depth - 1, files_max, pace);
                }
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
                Ok(_) | Err(_) => self.unmeasured = true,
            }
            if self.is_enough(files_max, pace) {
                return;
            }
        }
    }
}
