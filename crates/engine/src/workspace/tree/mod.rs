//! Walking a hostile directory tree by descriptor: remove it, take it over, measure it.
//!
//! Everything here starts from an open directory and never uses a path of more than one
//! component, so that no rename, symlink or mount made meanwhile can lead the walk elsewhere:
//!
//! - Down: `openat2` of one name with NO_SYMLINKS, NO_XDEV and BENEATH. A swapped-in symlink
//!   fails, a mount (a bind of the same file system too) fails, and both are reported.
//! - Up: the last few directories stay open; above those, `..` is opened and believed only if it
//!   is the very directory the walk came down through (device, inode, birth time, mount). The
//!   other known way, renaming deep directories to the top, was not taken: on a full disk the
//!   rename itself may need a block, and a removal must work above all when the disk is full.
//! - Depth costs one small record a level, no descriptor and no stack. Past a bound the
//!   oldest records are forgotten; a removal then starts again from the top and gets that much
//!   further in each round.
//! - Width is streamed: a bounded batch of names is read, sorted by inode number (the order in
//!   which file systems store inodes, which makes a large directory several times cheaper) and
//!   worked off before the next batch.
//! - One bad entry does not stop the rest. The first fault is kept with its path, all are counted.

#[cfg(test)]
mod tests;
pub(crate) mod walk;

use std::collections::HashSet;
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Stat, Statx, StatxAttributes, StatxFlags, Uid,
};
use rustix::io::Errno;

use walk::{LEVELS_MAX, LevelsFull, Next, OPEN_DIR, Visit, Walk};
use walk::{chmod_pinned, open_beneath, open_unlocked};

/// Rounds of a removal. Each must get further than the one before it, so an ordinary tree takes
/// one, or two where only a second that finds nothing shows the end; a process that keeps creating files is given up on here.
const ROUNDS_MAX: u32 = 64;
/// Entries one removal looks at over all rounds, the second bound on a racing creator.
const ENTRIES_MAX: u64 = 1 << 28;

/// What went wrong with one entry.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
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
}

#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    #[error("{path:?} below the directory")]
    At {
        path: PathBuf,
        #[source]
        fault: Fault,
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
pub struct Removed {
    pub entries: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenOver {
    pub entries: u64,
}

/// What lies below a directory, itself not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// Allocated bytes, `st_blocks * 512`; a file with several links counts once.
    pub bytes: u64,
    /// Inodes: files, directories, symlinks and the rest.
    pub files: u64,
    /// Something could not be looked at: the numbers are too small.
    pub unreadable: bool,
    /// The bound was reached: the numbers are too small.
    pub cut_short: bool,
}

/// Removes everything below an open directory; the caller removes the directory itself.
pub fn remove_contents(dir: BorrowedFd<'_>) -> Result<Removed, TreeError> {
    remove_at_most(dir, ENTRIES_MAX, &mut || Ok(Standing::Yes))
}

/// Removes what belongs to `uid` at the top of a directory, with everything below it. The rest is left alone.
pub fn remove_owned(dir: &Path, uid: u32) -> Result<(), TreeError> {
    let at = |name: &OsStr, fault| TreeError::At {
        path: dir.join(name),
        fault,
    };
    let top = OsStr::new("");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let parent =
        rustix::fs::open(dir, flags, Mode::empty()).map_err(|e| at(top, Fault::Open(e)))?;
    let listing = rustix::fs::Dir::read_from(&parent).map_err(|e| at(top, Fault::Read(e)))?;
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
                .map_err(|e| at(shown, Fault::Unlink(e)))?,
        }
    }
    Ok(())
}

/// Removes `name` in `parent` with everything below it, if it is the directory with the device
/// and inode number of `expect`. What else may stand there under that name is left alone.
pub fn remove(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    expect: (u64, u64),
) -> Result<Removed, TreeError> {
    let shown = || PathBuf::from(name);
    let at = |fault| TreeError::At {
        path: shown(),
        fault,
    };
    let name_c = CString::new(name.as_bytes()).map_err(|_| at(Fault::Open(Errno::INVAL)))?;
    let dir = match open_unlocked(parent, &name_c) {
        Ok(dir) => dir,
        Err(Fault::Open(Errno::NOENT)) => return Err(TreeError::Absent { name: shown() }),
        Err(Fault::Open(Errno::NOTDIR | Errno::LOOP)) => {
            return Err(TreeError::NotExpected { name: shown() });
        }
        Err(fault) => return Err(at(fault)),
    };
    let is_expected = |stat: Stat| (stat.st_dev, stat.st_ino) == expect;
    let stat = rustix::fs::fstat(&dir).map_err(|e| at(Fault::Stat(e)))?;
    if !is_expected(stat) {
        return Err(TreeError::NotExpected { name: shown() });
    }
    let mut standing = Standing::Yes;
    let mut take_away = || {
        // The name may have been given to another directory meanwhile. Between this look and the
        // rmdir the kernel leaves a gap that no call closes; all that could be lost in it is an
        // empty directory.
        let stat = rustix::fs::statat(parent, &name_c, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| at(Fault::Stat(e)))?;
        if !is_expected(stat) {
            return Err(TreeError::NotExpected { name: shown() });
        }
        standing = match rustix::fs::unlinkat(parent, &name_c, AtFlags::REMOVEDIR) {
            Ok(()) => Standing::No,
            Err(Errno::NOTEMPTY | Errno::EXIST) => Standing::Yes,
            Err(e) => return Err(at(removal_fault(parent, &name_c, e, Fault::RemoveDir))),
        };
        Ok(standing)
    };
    let removed = remove_at_most(dir.as_fd(), ENTRIES_MAX, &mut take_away)?;
    match standing {
        Standing::No => Ok(Removed {
            entries: removed.entries + 1,
        }),
        Standing::Yes => Err(at(Fault::RemoveDir(Errno::NOTEMPTY))),
    }
}

/// Gives a directory and everything below it to `uid` and `gid`: set-id bits are dropped and
/// directories become readable, writable and searchable by their owner. Only what belongs to the
/// owner of `dir` (or to `uid` already) is touched, so that a hard link to somebody else's
/// file, planted in the tree, does not change hands.
pub fn take_over(dir: BorrowedFd<'_>, uid: u32, gid: u32) -> Result<TakenOver, TreeError> {
    let stat = rustix::fs::fstat(dir).map_err(|e| TreeError::At {
        path: PathBuf::from("."),
        fault: Fault::Stat(e),
    })?;
    let mut owner = TakeOver {
        from: stat.st_uid,
        uid,
        gid,
        entries: 0,
    };
    let mut walk = Walk::new();
    walk.run(dir, &mut owner, LevelsFull::Fail);
    match walk.first.take() {
        None => Ok(TakenOver {
            entries: owner.entries,
        }),
        Some(first) => Err(walk.incomplete(owner.entries, first)),
    }
}

/// Sums up what lies below a directory, looking at no more than `entries_max` entries. Nothing is
/// changed, so as a plain user a directory without permissions stays unread, and is reported.
pub fn measure(dir: BorrowedFd<'_>, entries_max: u64) -> Measured {
    let mut measure = Measure {
        sum: Measured::default(),
        linked: HashSet::new(),
        entries_max,
    };
    let mut walk = Walk::new();
    walk.run(dir, &mut measure, LevelsFull::Fail);
    measure.sum.unreadable |= walk.failed > 0;
    measure.sum
}

/// Whether a directory is still there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    Yes,
    No,
}

/// `take_away` is asked after every round without a fault: that the kernel removes the directory itself shows as well as a
/// look at it that nothing is left, and costs less.
fn remove_at_most(
    dir: BorrowedFd<'_>,
    entries_max: u64,
    take_away: &mut dyn FnMut() -> Result<Standing, TreeError>,
) -> Result<Removed, TreeError> {
    let mut remover = Remove {
        entries: 0,
        seen: 0,
        entries_max,
    };
    let mut walk = Walk::new();
    for _ in 0..ROUNDS_MAX {
        let (entries_before, seen_before) = (remover.entries, remover.seen);
        walk.run(dir, &mut remover, LevelsFull::Forget);
        let found_nothing = remover.seen == seen_before;
        let got_nowhere = remover.entries == entries_before;
        match walk.first.take() {
            // Deleting while reading may make some file systems skip names: only a round that
            // finds nothing shows that nothing is left.
            None if take_away()? == Standing::No || found_nothing => {
                return Ok(Removed {
                    entries: remover.entries,
                });
            }
            Some(first) if got_nowhere => return Err(walk.incomplete(remover.entries, first)),
            _ if remover.seen >= entries_max => break,
            _ => {}
        }
    }
    Err(TreeError::Busy {
        done: remover.entries,
    })
}

struct Remove {
    entries: u64,
    seen: u64,
    entries_max: u64,
}

impl Visit for Remove {
    fn open(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Fault> {
        open_unlocked(dir, name)
    }

    fn entered(&mut self, dir: BorrowedFd<'_>, _: &CStr, stat: &Statx) -> Result<(), Fault> {
        if stat.stx_mode & 0o700 != 0o700 {
            // If this is refused, deleting what is inside will be too, and that is reported.
            let _ = rustix::fs::fchmod(dir, Mode::RWXU);
        }
        Ok(())
    }

    fn entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, kind: FileType) -> Result<Next, Fault> {
        if self.seen >= self.entries_max {
            return Ok(Next::Stop);
        }
        self.seen += 1;
        // The type is a hint: it may be unknown, or the entry may have been swapped since.
        if kind == FileType::Directory {
            match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
                Ok(()) => return Ok(self.gone()),
                Err(Errno::NOENT) => return Ok(Next::Done),
                Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(Next::Enter),
                Err(Errno::NOTDIR) => {}
                Err(e) => return Err(removal_fault(dir, name, e, Fault::RemoveDir)),
            }
        }
        match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) => Ok(self.gone()),
            Err(Errno::NOENT) => Ok(Next::Done),
            Err(Errno::ISDIR) => Ok(Next::Enter),
            Err(e) => Err(removal_fault(dir, name, e, Fault::Unlink)),
        }
    }

    fn left(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Fault> {
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) => {
                self.gone();
                Ok(())
            }
            // What is still inside was reported, was skipped by the file system, or is new: the
            // next round tells which. What is no directory any more was swapped: likewise.
            Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => Ok(()),
            Err(e) => Err(removal_fault(parent, name, e, Fault::RemoveDir)),
        }
    }
}

impl Remove {
    fn gone(&mut self) -> Next {
        self.entries += 1;
        Next::Done
    }
}

struct TakeOver {
    from: u32,
    uid: u32,
    gid: u32,
    entries: u64,
}

impl TakeOver {
    fn check_owner(&self, uid: u32) -> Result<(), Fault> {
        match uid == self.from || uid == self.uid {
            true => Ok(()),
            false => Err(Fault::Foreign(uid)),
        }
    }

    /// `file` may be an O_PATH descriptor.
    fn change_owner(&mut self, file: BorrowedFd<'_>, owner: (u32, u32)) -> Result<(), Fault> {
        if owner != (self.uid, self.gid) {
            let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
            rustix::fs::chownat(file, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
                .map_err(Fault::ChangeOwner)?;
        }
        self.entries += 1;
        Ok(())
    }
}

impl Visit for TakeOver {
    fn open(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Fault> {
        open_unlocked(dir, name)
    }

    fn entered(&mut self, dir: BorrowedFd<'_>, _: &CStr, stat: &Statx) -> Result<(), Fault> {
        let (mode_before, owner) = (u32::from(stat.stx_mode), (stat.stx_uid, stat.stx_gid));
        self.check_owner(stat.stx_uid)?;
        let mode = mode_before & 0o1777 | 0o700;
        if mode_before & 0o7777 != mode {
            rustix::fs::fchmod(dir, Mode::from_raw_mode(mode)).map_err(Fault::ChangeMode)?;
        }
        self.change_owner(dir, owner)
    }

    fn entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, kind: FileType) -> Result<Next, Fault> {
        if kind == FileType::Directory {
            return Ok(Next::Enter);
        }
        let pin = match open_beneath(dir, name, OFlags::PATH | OFlags::NOFOLLOW) {
            Ok(pin) => pin,
            Err(Fault::Open(Errno::NOENT)) => return Ok(Next::Done),
            Err(fault) => return Err(fault),
        };
        let stat = rustix::fs::fstat(&pin).map_err(Fault::Stat)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            return Ok(Next::Enter);
        }
        self.check_owner(stat.st_uid)?;
        // Before the change of owner, so that there is no instant with both the new owner and
        // the bit; the kernel drops it at that change once more, should it have come back.
        if kind != FileType::Symlink && stat.st_mode & 0o6000 != 0 {
            chmod_pinned(pin.as_fd(), stat.st_mode & 0o1777)?;
        }
        self.change_owner(pin.as_fd(), (stat.st_uid, stat.st_gid))?;
        Ok(Next::Done)
    }

    fn left(&mut self, _: BorrowedFd<'_>, _: &CStr) -> Result<(), Fault> {
        Ok(())
    }
}

struct Measure {
    sum: Measured,
    /// Files with more than one link that were counted. Bounded by `entries_max`.
    linked: HashSet<(u32, u32, u64)>,
    entries_max: u64,
}

impl Visit for Measure {
    fn open(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Fault> {
        open_beneath(dir, name, OPEN_DIR)
    }

    fn entered(&mut self, _: BorrowedFd<'_>, _: &CStr, _: &Statx) -> Result<(), Fault> {
        Ok(())
    }

    fn entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, _: FileType) -> Result<Next, Fault> {
        if self.entries_max == 0 {
            self.sum.cut_short = true;
            return Ok(Next::Stop);
        }
        self.entries_max -= 1;
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let stat = match rustix::fs::statx(dir, name, flags, StatxFlags::BASIC_STATS) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(Next::Done),
            Err(e) => return Err(Fault::Stat(e)),
        };
        if stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
            return Err(Fault::MountPoint);
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
        Ok(if is_dir { Next::Enter } else { Next::Done })
    }

    fn left(&mut self, _: BorrowedFd<'_>, _: &CStr) -> Result<(), Fault> {
        Ok(())
    }
}

/// Says why an entry could not be deleted, as far as the kernel lets one find out.
fn removal_fault(
    dir: BorrowedFd<'_>,
    name: &CStr,
    errno: Errno,
    plain: fn(Errno) -> Fault,
) -> Fault {
    let fixed = |name: &CStr, flags: AtFlags| {
        let flags = flags | AtFlags::NO_AUTOMOUNT;
        let marks = StatxAttributes::IMMUTABLE | StatxAttributes::APPEND;
        rustix::fs::statx(dir, name, flags, StatxFlags::empty())
            .is_ok_and(|stat| stat.stx_attributes.intersects(marks))
    };
    match errno {
        Errno::BUSY | Errno::XDEV => Fault::MountPoint,
        Errno::PERM if fixed(name, AtFlags::SYMLINK_NOFOLLOW) => Fault::Immutable,
        Errno::PERM if fixed(c"", AtFlags::EMPTY_PATH) => Fault::Immutable,
        e => plain(e),
    }
}
