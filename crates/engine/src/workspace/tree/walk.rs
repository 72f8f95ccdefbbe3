//! The walk itself: it goes down, up and along a tree, and calls a [`TreeVisitor`] for what it finds.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, OsString};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, Statx, StatxFlags,
};
use rustix::io::Errno;
use store::artifacts::files::proc_path;

use super::{EntryFault, TreeError};

/// The most directories held open. Trees no deeper than this never need `..`.
const OPEN_MAX: usize = 16;
/// The most levels remembered: about 24 MB with the longest names.
pub(crate) const LEVELS_MAX: usize = 65_536;
/// The size of one read of a directory, and the smaller size used once many names are deferred.
const READ_BYTES: usize = 256 * 1024;
const READ_BYTES_SMALL: usize = 4096;
/// The most bytes and names in one batch.
const BATCH_BYTES_MAX: usize = 4 << 20;
const BATCH_ENTRIES_MAX: usize = 65_536;
/// The most bytes of subdirectory names that one batch may defer, and all levels together. Beyond the latter each
/// level defers one at a time, so that a tree that is both wide and deep stays affordable.
const DEFERRED_BYTES_MAX: usize = 64 * 1024;
const DEFERRED_TOTAL_MAX: usize = 8 << 20;
/// How much of a path an error shows, counted from its end.
const SHOWN_BYTES_MAX: usize = 1024;

/// What a walk does with the entries that it finds.
pub(crate) trait TreeVisitor {
    /// Opens a subdirectory, or the top directory, which is `.`.
    fn open_directory(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, EntryFault> {
        open_beneath(dir, name, OPEN_DIR)
    }
    /// Called when a directory was opened and examined. If this fails, the walk does not enter it.
    fn enter_directory(&mut self, _entered: EnteredDirectory<'_>) -> Result<(), EntryFault> {
        Ok(())
    }
    /// Called for every entry but `.` and `..`.
    fn visit_entry(&mut self, entry: WalkedEntry<'_>) -> Result<VisitAction, EntryFault>;
    /// Called when a subdirectory was walked completely.
    fn leave_directory(&mut self, _parent: BorrowedFd<'_>, _name: &CStr) -> Result<(), EntryFault> {
        Ok(())
    }
    /// Called when an entry of the current directory failed; `.` is that directory itself. Says whether to go on.
    fn report_fault(&mut self, _name: &CStr, _fault: &EntryFault) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// A directory that was just opened.
#[derive(Clone, Copy)]
pub(crate) struct EnteredDirectory<'a> {
    pub(crate) dir: BorrowedFd<'a>,
    /// `.` for the top directory.
    pub(crate) name: &'a CStr,
    pub(crate) stat: &'a Statx,
}

/// An entry of an open directory.
#[derive(Clone, Copy)]
pub(crate) struct WalkedEntry<'a> {
    pub(crate) dir: BorrowedFd<'a>,
    pub(crate) name: &'a CStr,
    /// A hint: it may be unknown, or the entry may have been replaced since.
    pub(crate) kind: FileType,
}

impl WalkedEntry<'_> {
    /// Examines the entry without following a symlink. `None` if the entry is gone.
    pub(crate) fn stat(self) -> Result<Option<Statx>, EntryFault> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        match rustix::fs::statx(self.dir, self.name, flags, StatxFlags::BASIC_STATS) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(EntryFault::Stat(e)),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum VisitAction {
    Done,
    Enter,
    Stop,
}

/// What to do if the tree is deeper than [`LEVELS_MAX`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum DepthOverflow {
    /// Drop the oldest level. Only for a removal, whose next round has less left to do.
    Forget,
    Fail,
}

/// One directory on the way from the top to the current directory.
struct Level {
    id: DirectoryKey,
    name: CString,
    /// Invariant: the deepest level is open.
    fd: Option<OwnedFd>,
    position: Position,
    /// Subdirectories of the last batch that are still to be entered, in reverse order.
    deferred: Vec<CString>,
}

impl Level {
    fn enter(
        dir: BorrowedFd<'_>,
        name: &CStr,
        visitor: &mut impl TreeVisitor,
    ) -> Result<Self, EntryFault> {
        let fd = visitor.open_directory(dir, name)?;
        let stat = stat_dir(fd.as_fd())?;
        visitor.enter_directory(EnteredDirectory {
            dir: fd.as_fd(),
            name,
            stat: &stat,
        })?;
        Ok(Level {
            id: DirectoryKey::from(&stat),
            name: name.to_owned(),
            fd: Some(fd),
            position: Position::Start,
            deferred: Vec::new(),
        })
    }

    fn deferred_bytes(&self) -> usize {
        self.deferred
            .iter()
            .map(|n| n.as_bytes_with_nul().len())
            .sum()
    }
}

#[derive(Clone, Copy)]
enum Position {
    Start,
    At(u64),
    End,
}

/// Identifies a directory. The birth time tells a directory from a later one with the same inode number.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct DirectoryKey {
    dev: (u32, u32),
    ino: u64,
    born: Option<(i64, u32)>,
    mount: Option<u64>,
}

impl DirectoryKey {
    pub(crate) fn of(dir: BorrowedFd<'_>) -> Result<Self, EntryFault> {
        Ok(DirectoryKey::from(&stat_dir(dir)?))
    }
}

impl From<&Statx> for DirectoryKey {
    fn from(stat: &Statx) -> Self {
        let has = |flag: StatxFlags| stat.stx_mask & flag.bits() != 0;
        DirectoryKey {
            dev: (stat.stx_dev_major, stat.stx_dev_minor),
            ino: stat.stx_ino,
            born: has(StatxFlags::BTIME).then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec)),
            mount: has(StatxFlags::MNT_ID).then_some(stat.stx_mnt_id),
        }
    }
}

/// Everything that the walk and its visitors need to know about a directory, in one call.
fn stat_dir(dir: BorrowedFd<'_>) -> Result<Statx, EntryFault> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID;
    rustix::fs::statx(dir, c"", AtFlags::EMPTY_PATH, wanted).map_err(EntryFault::Stat)
}

pub(crate) struct TreeWalk {
    levels: VecDeque<Level>,
    batch: Batch,
    deferred_bytes: usize,
    pub(crate) failed: u64,
    pub(crate) first: Option<TreeError>,
}

impl TreeWalk {
    pub(crate) fn new() -> Self {
        TreeWalk {
            levels: VecDeque::new(),
            batch: Batch::default(),
            deferred_bytes: 0,
            failed: 0,
            first: None,
        }
    }

    /// Walks once from the top. Ends early if the way back is lost or the visitor stops it.
    pub(crate) fn run(
        &mut self,
        top: BorrowedFd<'_>,
        visitor: &mut impl TreeVisitor,
        full: DepthOverflow,
    ) {
        self.levels.clear();
        (self.deferred_bytes, self.failed, self.first) = (0, 0, None);
        let _ = self.walk(top, visitor, full);
    }

    fn walk(
        &mut self,
        top: BorrowedFd<'_>,
        visitor: &mut impl TreeVisitor,
        full: DepthOverflow,
    ) -> ControlFlow<()> {
        match Level::enter(top, c".", visitor) {
            Ok(level) => self.levels.push_back(level),
            Err(fault) => self.fail(c".", fault, visitor)?,
        }
        while let Some(level) = self.levels.back_mut() {
            if let Some(name) = level.deferred.pop() {
                self.deferred_bytes -= name.as_bytes_with_nul().len();
                self.step_down(&name, visitor, full)?;
            } else if let Position::End = level.position {
                self.ascend(visitor)?;
            } else {
                self.visit_batch(visitor)?;
            }
        }
        ControlFlow::Continue(())
    }

    fn step_down(
        &mut self,
        name: &CStr,
        visitor: &mut impl TreeVisitor,
        full: DepthOverflow,
    ) -> ControlFlow<()> {
        if self.levels.len() >= LEVELS_MAX {
            match full {
                DepthOverflow::Fail => return self.fail(name, EntryFault::TooDeep, visitor),
                DepthOverflow::Forget => {
                    let forgotten = self.levels.pop_front();
                    self.deferred_bytes -= forgotten.map_or(0, |l| l.deferred_bytes());
                }
            }
        }
        let Some(dir) = self.levels.back().and_then(|l| l.fd.as_ref()) else {
            return ControlFlow::Break(());
        };
        match Level::enter(dir.as_fd(), name, visitor) {
            Ok(level) => self.levels.push_back(level),
            Err(EntryFault::Open(Errno::NOENT)) => {}
            Err(fault) => self.fail(name, fault, visitor)?,
        }
        if let Some(shed) = self.levels.len().checked_sub(OPEN_MAX + 1) {
            self.levels[shed].fd = None;
        }
        ControlFlow::Continue(())
    }

    fn ascend(&mut self, visitor: &mut impl TreeVisitor) -> ControlFlow<()> {
        let Some(child) = self.levels.pop_back() else {
            return ControlFlow::Break(());
        };
        let Some(parent) = self.levels.back_mut() else {
            // The top is done, or the levels above were dropped.
            return ControlFlow::Break(());
        };
        let fd = match (parent.fd.take(), &child.fd) {
            (Some(fd), _) => Ok(fd),
            (None, Some(below)) => open_parent(below.as_fd(), parent.id),
            (None, None) => Err(EntryFault::Moved),
        };
        let left = match fd {
            Ok(fd) => visitor.leave_directory(parent.fd.insert(fd).as_fd(), &child.name),
            Err(fault) => {
                // The way back is lost.
                let _ = visitor.report_fault(c".", &fault);
                self.note(&child.name, fault);
                return ControlFlow::Break(());
            }
        };
        match left {
            Ok(()) => ControlFlow::Continue(()),
            Err(fault) => self.fail(&child.name, fault, visitor),
        }
    }

    /// Reads the next batch of the deepest directory and passes it to the visitor.
    fn visit_batch(&mut self, visitor: &mut impl TreeVisitor) -> ControlFlow<()> {
        let crowded = self.deferred_bytes > DEFERRED_TOTAL_MAX;
        let Some(level) = self.levels.back_mut() else {
            return ControlFlow::Break(());
        };
        let Some(dir) = level.fd.take() else {
            return ControlFlow::Break(());
        };
        let filled = self.batch.fill(dir.as_fd(), level.position, crowded);
        level.position = match filled {
            Ok(position) => position,
            Err(_) => Position::End,
        };
        let batch = std::mem::take(&mut self.batch);
        let mut deferred = Vec::new();
        for (name, kind) in batch.names_by_inode() {
            let dir = dir.as_fd();
            match visitor.visit_entry(WalkedEntry { dir, name, kind }) {
                Ok(VisitAction::Done) => {}
                Ok(VisitAction::Enter) => deferred.push(name.to_owned()),
                Ok(VisitAction::Stop) => return ControlFlow::Break(()),
                Err(fault) => self.fail(name, fault, visitor)?,
            }
        }
        self.batch = batch;
        deferred.reverse();
        if let Some(level) = self.levels.back_mut() {
            level.deferred = deferred;
            level.fd = Some(dir);
            self.deferred_bytes += level.deferred_bytes();
        }
        match filled {
            // If another process deleted the directory, reading it returns ENOENT, and nothing is left in it.
            Ok(_) | Err(Errno::NOENT) => ControlFlow::Continue(()),
            Err(e) => self.fail(c".", EntryFault::Read(e), visitor),
        }
    }

    fn fail(
        &mut self,
        name: &CStr,
        fault: EntryFault,
        visitor: &mut impl TreeVisitor,
    ) -> ControlFlow<()> {
        let flow = visitor.report_fault(name, &fault);
        self.note(name, fault);
        flow
    }

    fn note(&mut self, name: &CStr, fault: EntryFault) {
        self.failed += 1;
        if self.first.is_none() {
            self.first = Some(TreeError::At {
                path: self.shown_path(name),
                fault,
            });
        }
    }

    pub(crate) fn incomplete(&self, done: u64, first: TreeError) -> TreeError {
        TreeError::Incomplete {
            done,
            failed: self.failed,
            first: Box::new(first),
        }
    }

    /// The end of the path to `name`, for messages. It is never opened.
    fn shown_path(&self, name: &CStr) -> PathBuf {
        let above = self.levels.iter().skip(1).rev().map(|l| l.name.as_bytes());
        let mut parts: Vec<&[u8]> = Vec::new();
        let mut bytes = 0;
        for part in std::iter::once(name.to_bytes()).chain(above) {
            bytes += part.len() + 1;
            if bytes > SHOWN_BYTES_MAX {
                parts.push(b"...");
                break;
            }
            parts.push(part);
        }
        parts.reverse();
        PathBuf::from(OsString::from_vec(parts.join(&b'/')))
    }
}

#[derive(Default)]
struct Batch {
    raw: Vec<u8>,
    /// The names one after the other, each with its NUL.
    names: Vec<u8>,
    entries: Vec<BatchEntry>,
}

struct BatchEntry {
    ino: u64,
    start: usize,
    kind: FileType,
}

impl Batch {
    /// Reads from `position` until the batch is full or the directory ends.
    fn fill(
        &mut self,
        dir: BorrowedFd<'_>,
        position: Position,
        crowded: bool,
    ) -> Result<Position, Errno> {
        let Batch {
            raw,
            names,
            entries,
        } = self;
        names.clear();
        entries.clear();
        if let Position::At(cookie) = position {
            rustix::fs::seek(dir, SeekFrom::Start(cookie))?;
        }
        let (read_bytes, deferred_max) = match crowded {
            true => (READ_BYTES_SMALL, 0),
            false => (READ_BYTES, DEFERRED_BYTES_MAX),
        };
        raw.reserve(READ_BYTES);
        let mut reader = RawDir::new(dir, &mut raw.spare_capacity_mut()[..read_bytes]);
        let mut deferred_bytes = 0;
        let mut end = Ok(Position::End);
        while let Some(entry) = reader.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // Names read before the error are still visited.
                Err(e) => {
                    end = Err(e);
                    break;
                }
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let kind = entry.file_type();
            if matches!(kind, FileType::Directory | FileType::Unknown) {
                deferred_bytes += name.to_bytes_with_nul().len();
            }
            entries.push(BatchEntry {
                ino: entry.ino(),
                start: names.len(),
                kind,
            });
            names.extend_from_slice(name.to_bytes_with_nul());
            let full = names.len() > BATCH_BYTES_MAX || entries.len() >= BATCH_ENTRIES_MAX;
            if full || deferred_bytes > deferred_max {
                end = Ok(Position::At(entry.next_entry_cookie()));
                break;
            }
        }
        entries.sort_unstable_by_key(|e| e.ino);
        end
    }

    fn names_by_inode(&self) -> impl Iterator<Item = (&CStr, FileType)> {
        self.entries.iter().filter_map(|entry| {
            let name = CStr::from_bytes_until_nul(&self.names[entry.start..]).ok()?;
            Some((name, entry.kind))
        })
    }
}

pub(crate) const OPEN_DIR: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK);

/// What keeps a path below the directory that it starts from. Mounts are entered.
pub(crate) const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);

/// Opens a name in `dir`, or a path below it, without following a symlink or entering another mount.
pub(crate) fn open_beneath(
    dir: BorrowedFd<'_>,
    name: &CStr,
    flags: OFlags,
) -> Result<OwnedFd, EntryFault> {
    open_resolved(dir, name, flags, BENEATH | ResolveFlags::NO_XDEV)
}

/// Opens `..` of a directory and checks that it is the directory from which the walk came.
pub(crate) fn open_parent(
    dir: BorrowedFd<'_>,
    expect: DirectoryKey,
) -> Result<OwnedFd, EntryFault> {
    // BENEATH would refuse `..`, and NO_XDEV the way out of a mount that the visitor chose to enter. The identity,
    // which includes the mount, keeps the walk inside.
    let parent = open_resolved(dir, c"..", OPEN_DIR, ResolveFlags::NO_SYMLINKS)?;
    match DirectoryKey::of(parent.as_fd())? == expect {
        true => Ok(parent),
        false => Err(EntryFault::Moved),
    }
}

pub(crate) fn open_resolved(
    dir: BorrowedFd<'_>,
    name: &CStr,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, EntryFault> {
    // The kernel returns EAGAIN if a concurrent rename makes it unsure about `..`.
    for _ in 0..1000 {
        match rustix::fs::openat2(dir, name, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
            Ok(fd) => return Ok(fd),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(Errno::XDEV) => return Err(EntryFault::MountPoint),
            Err(e) => return Err(EntryFault::Open(e)),
        }
    }
    Err(EntryFault::Open(Errno::AGAIN))
}

/// Opens a subdirectory, first giving its owner the permissions if they are missing.
pub(crate) fn open_unlocked(dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, EntryFault> {
    match open_beneath(dir, name, OPEN_DIR) {
        Err(EntryFault::Open(Errno::ACCESS)) => {}
        done => return done,
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let pin = match name == c"." {
        // Without search permission `.` cannot be looked up in a directory, but that directory is open.
        true => None,
        false => Some(open_beneath(dir, name, flags)?),
    };
    let pin = pin.as_ref().map_or(dir, |pin| pin.as_fd());
    let stat = rustix::fs::fstat(pin).map_err(EntryFault::Stat)?;
    chmod_pinned(pin, stat.st_mode & 0o1777 | 0o700)?;
    open_beneath(pin, c".", OPEN_DIR)
}

/// Changes the mode of exactly the file that an O_PATH descriptor holds. fchmod refuses such a descriptor, and
/// fchmodat2 is newer than the oldest supported kernels. /proc/self/fd names the open file itself and not its path,
/// so nothing is looked up again.
pub(crate) fn chmod_pinned(pin: BorrowedFd<'_>, mode: u32) -> Result<(), EntryFault> {
    rustix::fs::chmod(proc_path(pin), Mode::from_raw_mode(mode)).map_err(EntryFault::ChangeMode)
}
