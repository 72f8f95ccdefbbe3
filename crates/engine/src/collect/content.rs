//! Opens one regular file below the workspace, checks that it is the file that was judged, and hashes it.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, OFlags, Stat};
use rustix::io::Errno;

use super::media::{self, ContentGuess};
use super::{CollectProgress, ModePolicy};
use crate::workspace::tree::EntryFault;
use crate::workspace::tree::walk::{chmod_pinned, open_beneath};
use store::artifacts::files::{self, HoleHandling};
use store::artifacts::hashing::{HashThreads, LARGE_BYTES, LargeFile};
use store::types::manifest::{ContentHash, Remark};

/// Device and inode number.
pub(super) type Inode = (u64, u64);

/// Why an entry is not collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryRefusal {
    /// Because of the entry itself.
    Entry(Remark),
    /// Because this host is short of descriptors or memory. The entry could be collected otherwise.
    OutOfResources(Errno),
}

impl From<Remark> for EntryRefusal {
    fn from(remark: Remark) -> EntryRefusal {
        EntryRefusal::Entry(remark)
    }
}

impl From<&EntryFault> for EntryRefusal {
    fn from(fault: &EntryFault) -> EntryRefusal {
        if let Some(errno) = fault.errno() {
            return EntryRefusal::from(errno);
        }
        EntryRefusal::Entry(match fault {
            EntryFault::MountPoint => Remark::MountPoint,
            EntryFault::Foreign(_) => Remark::NotOwned,
            EntryFault::TooDeep => Remark::TooDeep,
            EntryFault::Moved => Remark::Changed,
            _ => Remark::Unreadable,
        })
    }
}

impl From<EntryFault> for EntryRefusal {
    fn from(fault: EntryFault) -> EntryRefusal {
        EntryRefusal::from(&fault)
    }
}

impl From<Errno> for EntryRefusal {
    fn from(errno: Errno) -> EntryRefusal {
        match errno {
            Errno::MFILE | Errno::NFILE | Errno::NOMEM => EntryRefusal::OutOfResources(errno),
            // The entry was removed or replaced meanwhile (opening a socket fails with ENXIO), or somebody renames it
            // or holds a lease on it.
            Errno::NOENT
            | Errno::NOTDIR
            | Errno::LOOP
            | Errno::NXIO
            | Errno::AGAIN
            | Errno::STALE => EntryRefusal::Entry(Remark::Changed),
            _ => EntryRefusal::Entry(Remark::Unreadable),
        }
    }
}

/// A file held by an O_PATH descriptor, so that it cannot be replaced any more. O_PATH does not open a FIFO, socket
/// or device, so pinning one has no side effects.
pub(super) struct PinnedFile {
    pin: OwnedFd,
    pub(super) stat: Stat,
}

/// Length and times of a file. If any of them changes, the content may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileStamp {
    pub(super) bytes: u64,
    modified: (i64, u64),
    changed: (i64, u64),
}

/// The content of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileContent {
    pub(super) hash: ContentHash,
    pub(super) guess: ContentGuess,
    pub(super) stamp: FileStamp,
    /// The mode had to be changed before the file could be read.
    pub(super) overridden: bool,
}

impl PinnedFile {
    /// Pins the file at `path`, relative to `top`. It must still be the regular file with that inode and owner.
    pub(super) fn new(
        top: BorrowedFd<'_>,
        path: &CStr,
        inode: Inode,
        owner_uid: u32,
    ) -> Result<PinnedFile, EntryRefusal> {
        let pin = open_beneath(top, path, OFlags::PATH | OFlags::NOFOLLOW)?;
        let stat = rustix::fs::fstat(&pin)?;
        check_same_file(&stat, inode, owner_uid)?;
        Ok(PinnedFile { pin, stat })
    }

    pub(super) fn stamp(&self) -> FileStamp {
        stamp(&self.stat)
    }

    /// Opens the path again, checks that it leads to the pinned file, and hashes the file.
    pub(super) fn read(
        &self,
        top: BorrowedFd<'_>,
        path: &CStr,
        modes: ModePolicy,
        reader: &mut HashingReader<'_>,
    ) -> Result<FileContent, EntryRefusal> {
        // Non-blocking and without a controlling terminal, in case the entry is another file by now.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY;
        let (file, overridden) = match open_beneath(top, path, flags) {
            Err(EntryFault::Open(Errno::ACCESS)) if modes == ModePolicy::Override => {
                // Keep the set-id bits, so that the file's other names get their remark too.
                chmod_pinned(self.pin.as_fd(), self.stat.st_mode & 0o7777 | 0o400)?;
                (open_beneath(top, path, flags)?, true)
            }
            opened => (opened?, false),
        };
        let before = rustix::fs::fstat(&file)?;
        check_same_file(
            &before,
            (self.stat.st_dev, self.stat.st_ino),
            self.stat.st_uid,
        )?;
        let (hash, guess) = reader.hash(file.as_fd(), &before)?;
        let after = rustix::fs::fstat(&file)?;
        match stamp(&before) == stamp(&after) {
            true => Ok(FileContent {
                hash,
                guess,
                stamp: stamp(&after),
                overridden,
            }),
            false => Err(Remark::Changed.into()),
        }
    }
}

fn check_same_file(stat: &Stat, inode: Inode, owner_uid: u32) -> Result<(), EntryRefusal> {
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !regular || (stat.st_dev, stat.st_ino) != inode {
        return Err(Remark::Changed.into());
    }
    match stat.st_uid == owner_uid {
        true => Ok(()),
        false => Err(Remark::NotOwned.into()),
    }
}

fn stamp(stat: &Stat) -> FileStamp {
    FileStamp {
        bytes: u64::try_from(stat.st_size).unwrap_or(u64::MAX),
        modified: (stat.st_mtime, stat.st_mtime_nsec),
        changed: (stat.st_ctime, stat.st_ctime_nsec),
    }
}

/// Hashes files one after the other with the same buffer, and reports progress.
pub(super) struct HashingReader<'a> {
    buffer: Vec<u8>,
    head: Vec<u8>,
    pub(super) progress: &'a mut dyn FnMut(CollectProgress),
    hashed: u64,
    /// The value of `hashed` after the current file, whether or not the file is read.
    file_end: u64,
    total_bytes: u64,
    threads: HashThreads,
}

impl<'a> HashingReader<'a> {
    /// `total_bytes` is the number of bytes to hash in all files.
    pub(super) fn new(
        total_bytes: u64,
        threads: HashThreads,
        progress: &'a mut dyn FnMut(CollectProgress),
    ) -> Self {
        HashingReader {
            buffer: Vec::new(),
            head: Vec::new(),
            progress,
            hashed: 0,
            file_end: 0,
            total_bytes,
            threads,
        }
    }

    /// Starts the next file, of this length.
    pub(super) fn begin_file(&mut self, bytes: u64) {
        self.hashed = self.file_end;
        self.file_end = self.file_end.saturating_add(bytes);
    }

    /// A file that was read before will be read once more.
    pub(super) fn add_expected_bytes(&mut self, bytes: u64) {
        self.total_bytes = self.total_bytes.saturating_add(bytes);
    }

    /// Hashes exactly the length that the file had when it was opened. A file that ends earlier has changed.
    fn hash(
        &mut self,
        file: BorrowedFd<'_>,
        stat: &Stat,
    ) -> Result<(ContentHash, ContentGuess), EntryRefusal> {
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
            io::ErrorKind::UnexpectedEof => EntryRefusal::from(Remark::Changed),
            _ => EntryRefusal::from(Errno::from_io_error(&e).unwrap_or(Errno::IO)),
        })?;
        Ok((hash, media::guess_content(&self.head, bytes)))
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
        let (before, file_end) = (self.hashed, self.file_end);
        let large = LargeFile {
            from: file,
            to: None,
            bytes,
            holes,
        };
        large.hash(self.threads, &mut |done| {
            self.hashed = before.saturating_add(done).min(file_end);
            (self.progress)(CollectProgress::Hashed {
                bytes: self.hashed,
                of: self.total_bytes,
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
            self.hashed = (self.hashed + piece.len() as u64).min(self.file_end);
            (self.progress)(CollectProgress::Hashed {
                bytes: self.hashed,
                of: self.total_bytes,
            });
        };
        let read = files::read_range(file, None, 0..bytes, holes, &mut buffer, &mut feed);
        self.buffer = buffer;
        read?;
        Ok(ContentHash::from_bytes(*hasher.finalize().as_bytes()))
    }
}
