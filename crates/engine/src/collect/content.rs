//! One regular file below the workspace: opened as exactly the file that was judged, and hashed.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, OFlags, Stat};
use rustix::io::Errno;

use super::media::{self, Look};
use super::{Modes, Progress};
use crate::workspace::tree::Fault;
use crate::workspace::tree::walk::{chmod_pinned, open_beneath};
use store::artifacts::files::{self, HoleHandling};
use store::artifacts::hashing::{HashThreads, LARGE_BYTES, LargeFile};
use store::types::manifest::{ContentHash, Remark};

/// Device and inode number.
pub(super) type Inode = (u64, u64);

/// Why an entry is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It lies in the entry.
    Entry(Remark),
    /// It lies with us: the same entry would be fine on a host that is not short of something.
    Starved(Errno),
}

impl From<Remark> for Refusal {
    fn from(remark: Remark) -> Refusal {
        Refusal::Entry(remark)
    }
}

impl From<&Fault> for Refusal {
    fn from(fault: &Fault) -> Refusal {
        Refusal::Entry(match fault {
            Fault::MountPoint => Remark::MountPoint,
            Fault::Foreign(_) => Remark::NotOwned,
            Fault::TooDeep => Remark::TooDeep,
            Fault::Moved => Remark::Changed,
            Fault::Immutable => Remark::Unreadable,
            Fault::Open(e)
            | Fault::Stat(e)
            | Fault::Read(e)
            | Fault::Unlink(e)
            | Fault::RemoveDir(e)
            | Fault::ChangeMode(e)
            | Fault::ChangeOwner(e) => return Refusal::from(*e),
        })
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        Refusal::from(&fault)
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Refusal {
        match errno {
            Errno::MFILE | Errno::NFILE | Errno::NOMEM => Refusal::Starved(errno),
            // It was there a moment ago, and as something else (a socket cannot be opened at all); or somebody
            // renames, or holds a lease on it.
            Errno::NOENT
            | Errno::NOTDIR
            | Errno::LOOP
            | Errno::NXIO
            | Errno::AGAIN
            | Errno::STALE => Refusal::Entry(Remark::Changed),
            _ => Refusal::Entry(Remark::Unreadable),
        }
    }
}

/// A file that was looked at and cannot be swapped any more, though nothing can be read from it yet: a FIFO, socket
/// or device held in this way was not opened, so that nothing came of it.
pub(super) struct Pinned {
    pin: OwnedFd,
    pub(super) stat: Stat,
}

/// Its times and length: if any of them changes, so may its content have done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) bytes: u64,
    modified: (i64, u64),
    changed: (i64, u64),
}

/// What a file held.
#[derive(Clone, Copy, Debug)]
pub(super) struct Content {
    pub(super) hash: ContentHash,
    pub(super) look: Look,
    pub(super) stamp: Stamp,
    /// Its mode had to be changed before it could be read.
    pub(super) overridden: bool,
}

impl Pinned {
    /// `path` leads from the top. The file must still be the regular file of that inode and owner.
    pub(super) fn new(
        top: BorrowedFd<'_>,
        path: &CStr,
        inode: Inode,
        owner_uid: u32,
    ) -> Result<Pinned, Refusal> {
        let pin = open_beneath(top, path, OFlags::PATH | OFlags::NOFOLLOW)?;
        let stat = rustix::fs::fstat(&pin)?;
        check(&stat, inode, owner_uid)?;
        Ok(Pinned { pin, stat })
    }

    pub(super) fn stamp(&self) -> Stamp {
        stamp(&self.stat)
    }

    /// Unix time in milliseconds.
    pub(super) fn modified_ms(&self) -> i64 {
        let millis = i64::try_from(self.stat.st_mtime_nsec / 1_000_000).unwrap_or(0);
        self.stat
            .st_mtime
            .saturating_mul(1000)
            .saturating_add(millis)
    }

    /// Reads it by the path again and makes sure that what was opened is what is pinned.
    pub(super) fn read(
        &self,
        top: BorrowedFd<'_>,
        path: &CStr,
        modes: Modes,
        reader: &mut Reader<'_>,
    ) -> Result<Content, Refusal> {
        // Non-blocking, and never the terminal of this process: for what may stand there by now.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY;
        let (file, overridden) = match open_beneath(top, path, flags) {
            Err(Fault::Open(Errno::ACCESS)) if modes == Modes::Override => {
                // Set-id bits stay as they are, so that its other names are remarked too.
                chmod_pinned(self.pin.as_fd(), self.stat.st_mode & 0o7777 | 0o400)?;
                (open_beneath(top, path, flags)?, true)
            }
            opened => (opened?, false),
        };
        let before = rustix::fs::fstat(&file)?;
        check(
            &before,
            (self.stat.st_dev, self.stat.st_ino),
            self.stat.st_uid,
        )?;
        let (hash, look) = reader.hash(file.as_fd(), &before)?;
        let after = rustix::fs::fstat(&file)?;
        match stamp(&before) == stamp(&after) {
            true => Ok(Content {
                hash,
                look,
                stamp: stamp(&after),
                overridden,
            }),
            false => Err(Remark::Changed.into()),
        }
    }
}

fn check(stat: &Stat, inode: Inode, owner_uid: u32) -> Result<(), Refusal> {
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !regular || (stat.st_dev, stat.st_ino) != inode {
        return Err(Remark::Changed.into());
    }
    match stat.st_uid == owner_uid {
        true => Ok(()),
        false => Err(Remark::NotOwned.into()),
    }
}

fn stamp(stat: &Stat) -> Stamp {
    Stamp {
        bytes: u64::try_from(stat.st_size).unwrap_or(u64::MAX),
        modified: (stat.st_mtime, stat.st_mtime_nsec),
        changed: (stat.st_ctime, stat.st_ctime_nsec),
    }
}

/// Hashes one file after the other with the same buffer, and tells how far it is.
pub(super) struct Reader<'a> {
    buffer: Vec<u8>,
    head: Vec<u8>,
    pub(super) progress: &'a mut dyn FnMut(Progress),
    hashed: u64,
    /// Where `hashed` will be when the present file is done, were it read or not.
    until: u64,
    of: u64,
    threads: HashThreads,
}

impl<'a> Reader<'a> {
    /// `of` bytes are to be hashed in all.
    pub(super) fn new(
        of: u64,
        threads: HashThreads,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        Reader {
            buffer: Vec::new(),
            head: Vec::new(),
            progress,
            hashed: 0,
            until: 0,
            of,
            threads,
        }
    }

    /// The next file, of this length.
    pub(super) fn turn_to(&mut self, bytes: u64) {
        self.hashed = self.until;
        self.until = self.until.saturating_add(bytes);
    }

    /// One that was read already will be read once more.
    pub(super) fn expect_more(&mut self, bytes: u64) {
        self.of = self.of.saturating_add(bytes);
    }

    /// Exactly the length it had when it was opened; a file that ends before that has changed.
    fn hash(&mut self, file: BorrowedFd<'_>, stat: &Stat) -> Result<(ContentHash, Look), Refusal> {
        let bytes = stamp(stat).bytes;
        let stored_bytes = u64::try_from(stat.st_blocks)
            .unwrap_or(0)
            .saturating_mul(512);
        let holes = match stored_bytes < bytes {
            true => HoleHandling::Skip,
            false => HoleHandling::ReadAsZeros,
        };
        self.head.clear();
        let hash = match bytes >= LARGE_BYTES {
            true => self.hash_large(file, bytes, holes),
            false => self.hash_small(file, bytes, holes),
        };
        let hash = hash.map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => Refusal::from(Remark::Changed),
            _ => Refusal::from(Errno::from_io_error(&e).unwrap_or(Errno::IO)),
        })?;
        Ok((hash, media::look(&self.head, bytes)))
    }

    fn hash_large(
        &mut self,
        file: BorrowedFd<'_>,
        bytes: u64,
        holes: HoleHandling,
    ) -> io::Result<ContentHash> {
        let head = 0..media::HEAD_BYTES as u64;
        let mut keep = |piece: &[u8]| self.head.extend_from_slice(piece);
        files::read_range(file, None, head, holes, &mut self.buffer, &mut keep)?;
        let (before, until) = (self.hashed, self.until);
        let large = LargeFile {
            from: file,
            to: None,
            bytes,
            holes,
        };
        large.hash(self.threads, &mut |done| {
            self.hashed = before.saturating_add(done).min(until);
            (self.progress)(Progress::Hashed {
                bytes: self.hashed,
                of: self.of,
            });
        })
    }

    fn hash_small(
        &mut self,
        file: BorrowedFd<'_>,
        bytes: u64,
        holes: HoleHandling,
    ) -> io::Result<ContentHash> {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut feed = |piece: &[u8]| {
            let wanted = media::HEAD_BYTES.saturating_sub(self.head.len());
            self.head
                .extend_from_slice(&piece[..wanted.min(piece.len())]);
            hasher.update(piece);
            self.hashed = (self.hashed + piece.len() as u64).min(self.until);
            (self.progress)(Progress::Hashed {
                bytes: self.hashed,
                of: self.of,
            });
        };
        let read = files::read_range(file, None, 0..bytes, holes, &mut buffer, &mut feed);
        self.buffer = buffer;
        read?;
        Ok(ContentHash::from_bytes(*hasher.finalize().as_bytes()))
    }
}
