//! The walk itself: down, up and along, knowing nothing of what it is for.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, Statx, StatxFlags,
};
use rustix::io::Errno;

use super::{Fault, TreeError};

/// Directories held open at once. Trees no deeper than this never need `..`.
const OPEN_MAX: usize = 16;
/// Levels remembered at once: with the longest names, about 24 MB.
pub(crate) const LEVELS_MAX: usize = 65_536;
/// One read of a directory, and the smaller one used once many names are waiting already.
const READ_BYTES: usize = 256 * 1024;
const READ_BYTES_SMALL: usize = 4096;
/// A batch: names and their number.
const BATCH_BYTES_MAX: usize = 4 << 20;
const BATCH_ENTRIES_MAX: usize = 65_536;
/// Names of subdirectories one batch may put off until later, and all levels together. Beyond the
/// latter each level puts off one at a time, so that a tree both wide and deep stays affordable.
const PUT_OFF_BYTES_MAX: usize = 64 * 1024;
const PUT_OFF_TOTAL_MAX: usize = 8 << 20;
/// How much of a path an error shows, counted from its end.
const SHOWN_BYTES_MAX: usize = 1024;

/// What a walk does with what it meets.
pub(crate) trait Visit {
    /// Opens a subdirectory.
    fn open(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Fault>;
    /// A directory was opened, the top one (as `.`) included, and found to be `stat`. If this fails it is not entered.
    fn entered(&mut self, dir: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> Result<(), Fault>;
    fn entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, kind: FileType) -> Result<Next, Fault>;
    /// A subdirectory was walked to its end.
    fn left(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Fault>;
    /// Something in the directory that the walk is in failed; `.` is that directory itself.
    fn failed(&mut self, _name: &CStr, _fault: &Fault) {}
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Done,
    Enter,
    Stop,
}

/// What to do when the tree is deeper than [`LEVELS_MAX`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LevelsFull {
    /// Forget the oldest level. Only for a removal, whose next round has less left to do.
    Forget,
    Fail,
}

/// One directory on the way from the top to where the walk is.
struct Level {
    id: Identity,
    name: CString,
    /// Invariant: the deepest level is open.
    fd: Option<OwnedFd>,
    position: Position,
    /// Subdirectories of the batch read last that are still to be entered, the next one last.
    put_off: Vec<CString>,
}

impl Level {
    fn enter(dir: BorrowedFd<'_>, name: &CStr, visitor: &mut impl Visit) -> Result<Self, Fault> {
        let fd = visitor.open(dir, name)?;
        let stat = look_at_dir(fd.as_fd())?;
        visitor.entered(fd.as_fd(), name, &stat)?;
        Ok(Level {
            id: Identity::from(&stat),
            name: name.to_owned(),
            fd: Some(fd),
            position: Position::Start,
            put_off: Vec::new(),
        })
    }

    fn put_off_bytes(&self) -> usize {
        self.put_off
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

/// What tells one directory from every other. The birth time tells a directory from one that was
/// given its inode number after it was deleted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    dev: (u32, u32),
    ino: u64,
    born: Option<(i64, u32)>,
    mount: Option<u64>,
}

impl Identity {
    pub(crate) fn of(dir: BorrowedFd<'_>) -> Result<Self, Fault> {
        Ok(Identity::from(&look_at_dir(dir)?))
    }
}

impl From<&Statx> for Identity {
    fn from(stat: &Statx) -> Self {
        let has = |flag: StatxFlags| stat.stx_mask & flag.bits() != 0;
        Identity {
            dev: (stat.stx_dev_major, stat.stx_dev_minor),
            ino: stat.stx_ino,
            born: has(StatxFlags::BTIME).then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec)),
            mount: has(StatxFlags::MNT_ID).then_some(stat.stx_mnt_id),
        }
    }
}

/// All that the walk and its visitors ask about a directory, in one call.
fn look_at_dir(dir: BorrowedFd<'_>) -> Result<Statx, Fault> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID;
    rustix::fs::statx(dir, c"", AtFlags::EMPTY_PATH, wanted).map_err(Fault::Stat)
}

pub(crate) struct Walk {
    levels: VecDeque<Level>,
    batch: Batch,
    put_off_bytes: usize,
    pub(crate) failed: u64,
    pub(crate) first: Option<TreeError>,
}

impl Walk {
    pub(crate) fn new() -> Self {
        Walk {
            levels: VecDeque::new(),
            batch: Batch::default(),
            put_off_bytes: 0,
            failed: 0,
            first: None,
        }
    }

    /// One walk from the top. It ends early if the way back is lost or the visitor says so.
    pub(crate) fn run(&mut self, top: BorrowedFd<'_>, visitor: &mut impl Visit, full: LevelsFull) {
        self.levels.clear();
        (self.put_off_bytes, self.failed, self.first) = (0, 0, None);
        match Level::enter(top, c".", visitor) {
            Ok(level) => self.levels.push_back(level),
            Err(fault) => self.fail(c".", fault, visitor),
        }
        while let Some(level) = self.levels.back_mut() {
            if let Some(name) = level.put_off.pop() {
                self.put_off_bytes -= name.as_bytes_with_nul().len();
                self.step_down(&name, visitor, full);
            } else if let Position::End = level.position {
                if let Err((name, fault)) = self.ascend(visitor) {
                    visitor.failed(c".", &fault);
                    self.note(&name, fault);
                    return;
                }
            } else if self.work_off_batch(visitor) == Next::Stop {
                return;
            }
        }
    }

    fn step_down(&mut self, name: &CStr, visitor: &mut impl Visit, full: LevelsFull) {
        if self.levels.len() >= LEVELS_MAX {
            match full {
                LevelsFull::Fail => return self.fail(name, Fault::TooDeep, visitor),
                LevelsFull::Forget => {
                    let forgotten = self.levels.pop_front();
                    self.put_off_bytes -= forgotten.map_or(0, |l| l.put_off_bytes());
                }
            }
        }
        let Some(dir) = self.levels.back().and_then(|l| l.fd.as_ref()) else {
            return;
        };
        match Level::enter(dir.as_fd(), name, visitor) {
            Ok(level) => self.levels.push_back(level),
            Err(Fault::Open(Errno::NOENT)) => {}
            Err(fault) => self.fail(name, fault, visitor),
        }
        if let Some(shed) = self.levels.len().checked_sub(OPEN_MAX + 1) {
            self.levels[shed].fd = None;
        }
    }

    fn ascend(&mut self, visitor: &mut impl Visit) -> Result<(), (CString, Fault)> {
        let Some(child) = self.levels.pop_back() else {
            return Ok(());
        };
        // Nothing above: the top is done, or what lay above was forgotten.
        let Some(parent) = self.levels.back_mut() else {
            return Ok(());
        };
        let fd = match (parent.fd.take(), &child.fd) {
            (Some(fd), _) => Ok(fd),
            (None, Some(below)) => open_parent(below.as_fd(), parent.id),
            (None, None) => Err(Fault::Moved),
        };
        match fd {
            Err(fault) => Err((child.name, fault)),
            Ok(fd) => {
                let fd = parent.fd.insert(fd);
                let left = visitor.left(fd.as_fd(), &child.name);
                if let Err(fault) = left {
                    self.fail(&child.name, fault, visitor);
                }
                Ok(())
            }
        }
    }

    /// Reads the next batch of the deepest directory and shows it to the visitor.
    fn work_off_batch(&mut self, visitor: &mut impl Visit) -> Next {
        let crowded = self.put_off_bytes > PUT_OFF_TOTAL_MAX;
        let Some(level) = self.levels.back_mut() else {
            return Next::Stop;
        };
        let Some(dir) = level.fd.take() else {
            return Next::Stop;
        };
        let filled = self.batch.fill(dir.as_fd(), level.position, crowded);
        level.position = match filled {
            Ok(position) => position,
            Err(_) => Position::End,
        };
        let batch = std::mem::take(&mut self.batch);
        let mut put_off = Vec::new();
        let mut next = Next::Done;
        for (name, kind) in batch.names_in_order() {
            match visitor.entry(dir.as_fd(), name, kind) {
                Ok(Next::Done) => {}
                Ok(Next::Enter) => put_off.push(name.to_owned()),
                Ok(Next::Stop) => {
                    next = Next::Stop;
                    break;
                }
                Err(fault) => self.fail(name, fault, visitor),
            }
        }
        self.batch = batch;
        put_off.reverse();
        if let Some(level) = self.levels.back_mut() {
            level.put_off = put_off;
            level.fd = Some(dir);
            self.put_off_bytes += level.put_off_bytes();
        }
        match filled {
            // A directory that somebody else deleted under us reads as absent: nothing is left.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(e) => self.fail(c".", Fault::Read(e), visitor),
        }
        next
    }

    fn fail(&mut self, name: &CStr, fault: Fault, visitor: &mut impl Visit) {
        visitor.failed(name, &fault);
        self.note(name, fault);
    }

    fn note(&mut self, name: &CStr, fault: Fault) {
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

    /// The end of the path to `name`, for people; nothing is ever opened by it.
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
    /// Names one after the other, each with its NUL.
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
        let (read_bytes, put_off_max) = match crowded {
            true => (READ_BYTES_SMALL, 0),
            false => (READ_BYTES, PUT_OFF_BYTES_MAX),
        };
        raw.reserve(READ_BYTES);
        let mut reader = RawDir::new(dir, &mut raw.spare_capacity_mut()[..read_bytes]);
        let mut put_off_bytes = 0;
        let mut end = Ok(Position::End);
        while let Some(entry) = reader.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // Only what was read before the error is worked off.
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
                put_off_bytes += name.to_bytes_with_nul().len();
            }
            entries.push(BatchEntry {
                ino: entry.ino(),
                start: names.len(),
                kind,
            });
            names.extend_from_slice(name.to_bytes_with_nul());
            let full = names.len() > BATCH_BYTES_MAX || entries.len() >= BATCH_ENTRIES_MAX;
            if full || put_off_bytes > put_off_max {
                end = Ok(Position::At(entry.next_entry_cookie()));
                break;
            }
        }
        entries.sort_unstable_by_key(|e| e.ino);
        end
    }

    fn names_in_order(&self) -> impl Iterator<Item = (&CStr, FileType)> {
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

/// Opens a name in `dir`, or a path below it, never through a symlink, never into another mount.
pub(crate) fn open_beneath(
    dir: BorrowedFd<'_>,
    name: &CStr,
    flags: OFlags,
) -> Result<OwnedFd, Fault> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    open_resolved(dir, name, flags, resolve)
}

/// Opens `..` of a directory and makes sure it is the one the walk came from.
pub(crate) fn open_parent(dir: BorrowedFd<'_>, expect: Identity) -> Result<OwnedFd, Fault> {
    // BENEATH would refuse `..`; the identity is what keeps the walk inside.
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let parent = open_resolved(dir, c"..", OPEN_DIR, resolve)?;
    match Identity::of(parent.as_fd())? == expect {
        true => Ok(parent),
        false => Err(Fault::Moved),
    }
}

fn open_resolved(
    dir: BorrowedFd<'_>,
    name: &CStr,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Fault> {
    // The kernel answers EAGAIN when a rename elsewhere made it unsure about `..`.
    for _ in 0..1000 {
        match rustix::fs::openat2(dir, name, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
            Ok(fd) => return Ok(fd),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(Errno::XDEV) => return Err(Fault::MountPoint),
            Err(e) => return Err(Fault::Open(e)),
        }
    }
    Err(Fault::Open(Errno::AGAIN))
}

/// Opens a subdirectory, giving its owner the permissions first if they are missing.
pub(crate) fn open_unlocked(dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Fault> {
    match open_beneath(dir, name, OPEN_DIR) {
        Err(Fault::Open(Errno::ACCESS)) => {}
        done => return done,
    }
    let pin = open_beneath(
        dir,
        name,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW,
    )?;
    let stat = rustix::fs::fstat(&pin).map_err(Fault::Stat)?;
    chmod_pinned(pin.as_fd(), stat.st_mode & 0o1777 | 0o700)?;
    open_beneath(pin.as_fd(), c".", OPEN_DIR)
}

/// Changes the mode of exactly the file that an O_PATH descriptor holds. Such a descriptor takes
/// no fchmod, and fchmodat2 is younger than the kernels supported: /proc names the open file
/// itself, not its path, so nothing is looked up again.
pub(crate) fn chmod_pinned(pin: BorrowedFd<'_>, mode: u32) -> Result<(), Fault> {
    let path = format!("/proc/self/fd/{}", pin.as_raw_fd());
    rustix::fs::chmod(path, Mode::from_raw_mode(mode)).map_err(Fault::ChangeMode)
}
