//! Walks a hostile directory tree by descriptor. `walk.rs` holds the walk itself, this file its use to remove a tree,
//! to change its owner and to measure it. `workspace/copy_in/source.rs` reads inputs with it, and `collect/find.rs`
//! finds outputs.
//!
//! Everything starts from an open directory and uses single path components only, so that no rename, symlink or mount
//! that appears meanwhile can lead the walk elsewhere:
//!
//! - Down: `openat2` of one name with NO_SYMLINKS, NO_XDEV and BENEATH. If the entry has become a symlink or a mount
//!   (including a bind of the same file system), opening fails and is reported. Only inputs are read without NO_XDEV.
//! - Up: the last few directories stay open. Above those the walk opens `..` and checks that it is the directory
//!   through which it came down (device, inode, birth time, mount). The alternative, renaming deep directories to the
//!   top, is not used: on a full disk the rename itself may need a block, and removal must work above all when the
//!   disk is full.
//! - Depth costs one small record per level, but no descriptor and no stack. Beyond a bound the oldest records are
//!   dropped; a removal then starts again from the top and gets further with each round.
//! - Wide directories are read in bounded batches. Each batch is sorted by inode number, which is the order in which
//!   file systems store inodes and makes large directories several times cheaper, and is processed before the next
//!   one.
//! - One bad entry does not stop the walk. The first fault is kept with its path; all faults are counted.

#[cfg(test)]
mod tests;
pub(crate) mod walk;

#[cfg(test)]
use std::collections::HashSet;
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, StatxAttributes, StatxFlags, Uid};
use rustix::io::Errno;

use walk::{DepthOverflow, LEVELS_MAX, TreeVisitor, TreeWalk};
use walk::{EnteredDirectory, VisitAction, WalkedEntry};
use walk::{chmod_pinned, open_beneath, open_unlocked};

/// The most rounds of a removal. Each round must get further than the one before it. An ordinary tree takes one
/// round, or two if a second round must show that nothing is left. If another process keeps creating files, the
/// removal gives up here.
const ROUNDS_MAX: u32 = 64;
/// The most entries that one removal looks at in all rounds. This also bounds a process that keeps creating files.
const ENTRIES_MAX: u64 = 1 << 28;

/// What went wrong with one entry.
#[derive(Debug, thiserror::Error)]
pub enum EntryFault {
    #[error("open it")]
    Open(#[source] Errno),
    #[error("look at it")]
    Stat(#[source] Errno),
    #[error("read the directory")]
    Read(#[source] Errno),
    #[error("delete it")]
    Unlink(#[source] Errno),
    #[error("delete the directory")]
    RemoveDir(#[source] Errno),
    #[error("change its mode")]
    ChangeMode(#[source] Errno),
    #[error("change its owner")]
    ChangeOwner(#[source] Errno),
    #[error("something is mounted on it; unmount it first")]
    MountPoint,
    #[error("it, or its directory, is immutable or append-only; clear that with `chattr -i -a`")]
    Immutable,
    #[error("it belongs to uid {0}, which is not the tree's owner")]
    Foreign(u32),
    #[error("it was moved while it was being walked")]
    Moved,
    #[error("it lies more than {LEVELS_MAX} levels down")]
    TooDeep,
    /// The visitor keeps the reason.
    #[error("it was refused")]
    Refused,
}

impl EntryFault {
    /// The error number of a failed system call.
    pub(crate) fn errno(&self) -> Option<Errno> {
        match self {
            EntryFault::Open(e)
            | EntryFault::Stat(e)
            | EntryFault::Read(e)
            | EntryFault::Unlink(e)
            | EntryFault::RemoveDir(e)
            | EntryFault::ChangeMode(e)
            | EntryFault::ChangeOwner(e) => Some(*e),
            _ => None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    #[error("{path:?} below the directory")]
    At {
        path: PathBuf,
        #[source]
        fault: EntryFault,
    },
    #[error("{failed} entries could not be handled ({done} were); the first is")]
    Incomplete {
        done: u64,
        failed: u64,
        #[source]
        first: Box<TreeError>,
    },
    #[error("something keeps creating files in it ({done} deleted so far); stop that first")]
    Busy { done: u64 },
    #[error("there is no {name:?}")]
    Absent { name: PathBuf },
    #[error("{name:?} is not the directory that was made; it is left alone")]
    NotExpected { name: PathBuf },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemovedEntries {
    pub entries: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReownedEntries {
    pub entries: u64,
}

/// The size of what lies below a directory, without the directory itself.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeSize {
    /// Allocated bytes, `st_blocks * 512`. A file with several links counts once.
    pub bytes: u64,
    /// The number of inodes of any type.
    pub files: u64,
    /// Some entries could not be examined, so the numbers are too small.
    pub unreadable: bool,
    /// The bound was reached, so the numbers are too small.
    pub cut_short: bool,
}

/// Removes everything below an open directory. The caller removes the directory itself.
#[cfg(test)]
pub fn remove_contents(dir: BorrowedFd<'_>) -> Result<RemovedEntries, TreeError> {
    remove_at_most(dir, ENTRIES_MAX, &mut || Ok(TopState::Present))
}

/// Removes the entries of a directory that belong to `uid`, with everything below them. Leaves other entries alone.
pub fn remove_owned(dir: &Path, uid: u32) -> Result<(), TreeError> {
    let at = |name: &OsStr, fault| TreeError::At {
        path: dir.join(name),
        fault,
    };
    let top = OsStr::new("");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let parent =
        rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| at(top, EntryFault::Open(e)))?;
    let listing = rustix::fs::Dir::read_from(&parent).map_err(|e| at(top, EntryFault::Read(e)))?;
    for entry in listing.flatten().take(ENTRIES_MAX as usize) {
        let name = entry.file_name();
        let shown = OsStr::from_bytes(name.to_bytes());
        let stat = rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW);
        let Ok(stat) = stat.as_ref().copied() else {
            continue;
        };
        let dots = name == c"." || name == c"..";
        if dots || stat.st_uid != uid {
            continue;
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                remove(parent.as_fd(), shown, (stat.st_dev, stat.st_ino)).map(drop)?;
            }
            _ => rustix::fs::unlinkat(&parent, name, AtFlags::empty())
                .map_err(|e| at(shown, EntryFault::Unlink(e)))?,
        }
    }
    Ok(())
}

/// Removes the directory `name` in `parent` with everything below it, if its device and inode number are those of
/// `expect`. Anything else of that name is left alone.
pub fn remove(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    expect: (u64, u64),
) -> Result<RemovedEntries, TreeError> {
    let shown = || PathBuf::from(name);
    let at = |fault| TreeError::At {
        path: shown(),
        fault,
    };
    let name_c = CString::new(name.as_bytes()).map_err(|_| at(EntryFault::Open(Errno::INVAL)))?;
    let dir = match open_unlocked(parent, &name_c) {
        Ok(dir) => dir,
        Err(EntryFault::Open(Errno::NOENT)) => return Err(TreeError::Absent { name: shown() }),
        Err(EntryFault::Open(Errno::NOTDIR | Errno::LOOP)) => {
            return Err(TreeError::NotExpected { name: shown() });
        }
        Err(fault) => return Err(at(fault)),
    };
    let is_expected = |stat: Stat| (stat.st_dev, stat.st_ino) == expect;
    let stat = rustix::fs::fstat(&dir).map_err(|e| at(EntryFault::Stat(e)))?;
    if !is_expected(stat) {
        return Err(TreeError::NotExpected { name: shown() });
    }
    let mut top_state = TopState::Present;
    let mut remove_top = || {
        // Another directory may have the name by now. No system call closes the gap between this check and the rmdir;
        // only an empty directory could be lost in it.
        let stat = rustix::fs::statat(parent, &name_c, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| at(EntryFault::Stat(e)))?;
        if !is_expected(stat) {
            return Err(TreeError::NotExpected { name: shown() });
        }
        top_state = match rustix::fs::unlinkat(parent, &name_c, AtFlags::REMOVEDIR) {
            Ok(()) => TopState::Removed,
            Err(Errno::NOTEMPTY | Errno::EXIST) => TopState::Present,
            Err(e) => return Err(at(removal_fault(parent, &name_c, e, EntryFault::RemoveDir))),
        };
        Ok(top_state)
    };
    let removed = remove_at_most(dir.as_fd(), ENTRIES_MAX, &mut remove_top)?;
    match top_state {
        TopState::Removed => Ok(RemovedEntries {
            entries: removed.entries + 1,
        }),
        TopState::Present => Err(at(EntryFault::RemoveDir(Errno::NOTEMPTY))),
    }
}

/// Gives a directory and everything below it to `uid` and `gid`. Clears set-id bits and makes directories readable,
/// writable and searchable by their owner. Changes only entries that belong to the owner of `dir`, or already to
/// `uid`, so that a hard link to another user's file in the tree does not change that file's owner.
pub fn take_over(dir: BorrowedFd<'_>, uid: u32, gid: u32) -> Result<ReownedEntries, TreeError> {
    let stat = rustix::fs::fstat(dir).map_err(|e| TreeError::At {
        path: PathBuf::from("."),
        fault: EntryFault::Stat(e),
    })?;
    let mut owner = TakeOverVisitor {
        from: stat.st_uid,
        uid,
        gid,
        entries: 0,
    };
    let mut walk = TreeWalk::new();
    walk.run(dir, &mut owner, DepthOverflow::Fail);
    match walk.first.take() {
        None => Ok(ReownedEntries {
            entries: owner.entries,
        }),
        Some(first) => Err(walk.incomplete(owner.entries, first)),
    }
}

/// Sums up what lies below a directory, looking at no more than `entries_max` entries. Changes nothing, so a plain
/// user cannot read a directory without permissions; the result says so.
#[cfg(test)]
pub fn measure(dir: BorrowedFd<'_>, entries_max: u64) -> TreeSize {
    let mut measure = MeasureVisitor {
        sum: TreeSize::default(),
        linked: HashSet::new(),
        entries_max,
    };
    let mut walk = TreeWalk::new();
    walk.run(dir, &mut measure, DepthOverflow::Fail);
    measure.sum.unreadable |= walk.failed > 0;
    measure.sum
}

/// Whether the top directory still exists.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TopState {
    Present,
    Removed,
}

/// Removes entries in rounds. Calls `remove_top` after each round without a fault: if the kernel removes the
/// directory itself, nothing is left, and this costs less than another look.
fn remove_at_most(
    dir: BorrowedFd<'_>,
    entries_max: u64,
    remove_top: &mut dyn FnMut() -> Result<TopState, TreeError>,
) -> Result<RemovedEntries, TreeError> {
    let mut remover = RemoveVisitor {
        entries: 0,
        seen: 0,
        entries_max,
    };
    let mut walk = TreeWalk::new();
    for _ in 0..ROUNDS_MAX {
        let (entries_before, seen_before) = (remover.entries, remover.seen);
        walk.run(dir, &mut remover, DepthOverflow::Forget);
        let found_nothing = remover.seen == seen_before;
        let removed_nothing = remover.entries == entries_before;
        match walk.first.take() {
            // Deleting while reading may make some file systems skip names. Only a round that finds nothing shows
            // that nothing is left.
            None if remove_top()? == TopState::Removed || found_nothing => {
                return Ok(RemovedEntries {
                    entries: remover.entries,
                });
            }
            Some(first) if removed_nothing => return Err(walk.incomplete(remover.entries, first)),
            _ if remover.seen >= entries_max => break,
            _ => {}
        }
    }
    Err(TreeError::Busy {
        done: remover.entries,
    })
}

struct RemoveVisitor {
    entries: u64,
    seen: u64,
    entries_max: u64,
}

impl TreeVisitor for RemoveVisitor {
    fn open_directory(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, EntryFault> {
        open_unlocked(dir, name)
    }

    fn enter_directory(&mut self, entered: EnteredDirectory<'_>) -> Result<(), EntryFault> {
        let EnteredDirectory { dir, stat, .. } = entered;
        if stat.stx_mode & 0o700 != 0o700 {
            // If this fails, deleting the entries fails too, and that is reported.
            let _ = rustix::fs::fchmod(dir, Mode::RWXU);
        }
        Ok(())
    }

    fn visit_entry(&mut self, entry: WalkedEntry<'_>) -> Result<VisitAction, EntryFault> {
        let WalkedEntry { dir, name, kind } = entry;
        if self.seen >= self.entries_max {
            return Ok(VisitAction::Stop);
        }
        self.seen += 1;
        if kind == FileType::Directory {
            match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
                Ok(()) => return Ok(self.count_removed()),
                Err(Errno::NOENT) => return Ok(VisitAction::Done),
                Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(VisitAction::Enter),
                Err(Errno::NOTDIR) => {}
                Err(e) => return Err(removal_fault(dir, name, e, EntryFault::RemoveDir)),
            }
        }
        match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) => Ok(self.count_removed()),
            Err(Errno::NOENT) => Ok(VisitAction::Done),
            Err(Errno::ISDIR) => Ok(VisitAction::Enter),
            Err(e) => Err(removal_fault(dir, name, e, EntryFault::Unlink)),
        }
    }

    fn leave_directory(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> Result<(), EntryFault> {
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) => {
                self.count_removed();
                Ok(())
            }
            // Remaining entries were reported, were skipped by the file system, or are new; the next round shows
            // which. The same holds if the name is no directory any more.
            Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => Ok(()),
            Err(e) => Err(removal_fault(parent, name, e, EntryFault::RemoveDir)),
        }
    }
}

impl RemoveVisitor {
    fn count_removed(&mut self) -> VisitAction {
        self.entries += 1;
        VisitAction::Done
    }
}

struct TakeOverVisitor {
    from: u32,
    uid: u32,
    gid: u32,
    entries: u64,
}

impl TakeOverVisitor {
    fn check_owner(&self, uid: u32) -> Result<(), EntryFault> {
        match uid == self.from || uid == self.uid {
            true => Ok(()),
            false => Err(EntryFault::Foreign(uid)),
        }
    }

    /// `file` may be an O_PATH descriptor.
    fn change_owner(&mut self, file: BorrowedFd<'_>, owner: (u32, u32)) -> Result<(), EntryFault> {
        if owner != (self.uid, self.gid) {
            let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
            rustix::fs::chownat(file, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
                .map_err(EntryFault::ChangeOwner)?;
        }
        self.entries += 1;
        Ok(())
    }
}

impl TreeVisitor for TakeOverVisitor {
    fn open_directory(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, EntryFault> {
        open_unlocked(dir, name)
    }

    fn enter_directory(&mut self, entered: EnteredDirectory<'_>) -> Result<(), EntryFault> {
        let EnteredDirectory { dir, stat, .. } = entered;
        let (mode_before, owner) = (u32::from(stat.stx_mode), (stat.stx_uid, stat.stx_gid));
        self.check_owner(stat.stx_uid)?;
        let mode = mode_before & 0o1777 | 0o700;
        if mode_before & 0o7777 != mode {
            rustix::fs::fchmod(dir, Mode::from_raw_mode(mode)).map_err(EntryFault::ChangeMode)?;
        }
        self.change_owner(dir, owner)
    }

    fn visit_entry(&mut self, entry: WalkedEntry<'_>) -> Result<VisitAction, EntryFault> {
        let WalkedEntry { dir, name, kind } = entry;
        if kind == FileType::Directory {
            return Ok(VisitAction::Enter);
        }
        let pin = match open_beneath(dir, name, OFlags::PATH | OFlags::NOFOLLOW) {
            Ok(pin) => pin,
            Err(EntryFault::Open(Errno::NOENT)) => return Ok(VisitAction::Done),
            Err(fault) => return Err(fault),
        };
        let stat = rustix::fs::fstat(&pin).map_err(EntryFault::Stat)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            return Ok(VisitAction::Enter);
        }
        self.check_owner(stat.st_uid)?;
        // Clear the bits before changing the owner, so that the file never has both the new owner and a set-id bit.
        // If the bits return in between, the kernel clears them at the change of owner.
        if kind != FileType::Symlink && stat.st_mode & 0o6000 != 0 {
            chmod_pinned(pin.as_fd(), stat.st_mode & 0o1777)?;
        }
        self.change_owner(pin.as_fd(), (stat.st_uid, stat.st_gid))?;
        Ok(VisitAction::Done)
    }
}

#[cfg(test)]
struct MeasureVisitor {
    sum: TreeSize,
    /// The counted files that have more than one link. Bounded by `entries_max`.
    linked: HashSet<(u32, u32, u64)>,
    entries_max: u64,
}

#[cfg(test)]
impl TreeVisitor for MeasureVisitor {
    fn visit_entry(&mut self, entry: WalkedEntry<'_>) -> Result<VisitAction, EntryFault> {
        if self.entries_max == 0 {
            self.sum.cut_short = true;
            return Ok(VisitAction::Stop);
        }
        self.entries_max -= 1;
        let Some(stat) = entry.stat()? else {
            return Ok(VisitAction::Done);
        };
        if stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
            return Err(EntryFault::MountPoint);
        }
        let kind = FileType::from_raw_mode(stat.stx_mode.into());
        let inode = (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino);
        let is_dir = kind == FileType::Directory;
        if is_dir || stat.stx_nlink <= 1 || self.linked.insert(inode) {
            self.sum.files += 1;
            self.sum.bytes = self
                .sum
                .bytes
                .saturating_add(stat.stx_blocks.saturating_mul(512));
        }
        Ok(if is_dir {
            VisitAction::Enter
        } else {
            VisitAction::Done
        })
    }
}

/// Finds out why an entry could not be deleted, as far as the kernel reveals it.
fn removal_fault(
    dir: BorrowedFd<'_>,
    name: &CStr,
    errno: Errno,
    plain: fn(Errno) -> EntryFault,
) -> EntryFault {
    let fixed = |name: &CStr, flags: AtFlags| {
        let flags = flags | AtFlags::NO_AUTOMOUNT;
        let marks = StatxAttributes::IMMUTABLE | StatxAttributes::APPEND;
        rustix::fs::statx(dir, name, flags, StatxFlags::empty())
            .is_ok_and(|stat| stat.stx_attributes.intersects(marks))
    };
    match errno {
        Errno::BUSY | Errno::XDEV => EntryFault::MountPoint,
        Errno::PERM if fixed(name, AtFlags::SYMLINK_NOFOLLOW) => EntryFault::Immutable,
        Errno::PERM if fixed(c"", AtFlags::EMPTY_PATH) => EntryFault::Immutable,
        e => plain(e),
    }
}
