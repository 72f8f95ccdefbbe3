//! The content-addressed store of outputs and logs.
//!
//! An object is a file at `objects/ab/cdef…`, named by the blake3 of its content, ours, without write permission and
//! without extended attributes. It gets its name only when it is whole, by a link from a descriptor: no name that a
//! program chose is used for anything but opening the file once, and there is no instant at which a crash leaves half
//! an object, or an output that is neither in the workspace nor in the store.
//!
//! Its mode says whether it is durable. 0400: in place, but a power cut may yet tear it, so whoever finds it and did
//! not put it there reads it before believing it. 0444: it was synced, its directory too.
//!
//! `lock` keeps the garbage collector apart from whoever puts objects in: those hold it together from the first object
//! until the transaction that refers to it is committed, the collector holds it alone.

mod cache;
mod export;
mod file_system;
pub mod files;
pub mod hashing;
mod identity;
mod lock;
mod sweep;
#[cfg(test)]
mod tests;
mod transfer;
mod users;

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use cache::Objects;

use crate::types::manifest::{ContentHash, OutputPath};

pub use export::{Content, ExportError, Exported, Overwrite, export};
pub use file_system::refuse_network_fs;
pub use lock::{Alone, Hold};
pub use sweep::{Swept, Used, Verdict};
pub use transfer::{Source, Taken, Transfer, Trust};
pub use users::User;

/// Placed, not known to be durable.
const PLACED: Mode = Mode::RUSR;
/// Durable.
const DURABLE: Mode = Mode::RUSR.union(Mode::RGRP).union(Mode::ROTH);
/// Up to so many objects are synced one by one, which leaves what other programs write alone; more by one syncfs.
const FEW: usize = 16;
/// So many are remembered until they are made durable; then that is done at once. Bounds the memory.
const UNSYNCED_MAX: usize = 65_536;

#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    #[error(
        "keep {path:?} on {kind}: locks and durability cannot be relied on there; set FUMEHOOD_HOME to a directory on a local disk, or use PostgreSQL (--db) for the database"
    )]
    NetworkFs { path: PathBuf, kind: &'static str },
    #[error("find out what file system {path:?} is on")]
    StatFs { path: PathBuf, source: io::Error },
    #[error("make the artifact store {path:?}")]
    Make { path: PathBuf, source: io::Error },
    #[error(
        "the artifact store {path:?} belongs to another user or can be written by others; chmod 700 it, or choose another"
    )]
    NotOurs { path: PathBuf },
    #[error("read the identity of the artifact store, {path:?}")]
    Identity { path: PathBuf, source: io::Error },
    #[error(
        "the artifact store {path:?} has version {found}, and this Fumehood knows {}; use a newer Fumehood",
        identity::VERSION
    )]
    Version { path: PathBuf, found: u32 },
    #[error("lock the artifact store {path:?}")]
    Lock { path: PathBuf, source: io::Error },
    #[error(
        "the artifact store {path:?} is in use by {}; wait for that to end, and repeat",
        lock::describe(.pids)
    )]
    Busy { path: PathBuf, pids: Vec<u32> },
    #[error("the lock that was given is another artifact store's, not that of {path:?}")]
    OtherStore { path: PathBuf },
    #[error("open the output {path:?} in the workspace")]
    Open { path: OutputPath, source: io::Error },
    #[error(
        "take the output {path:?}: {what} is not what the manifest says; it is left where it is"
    )]
    Changed {
        path: OutputPath,
        what: &'static str,
    },
    #[error("read the output {path:?}")]
    Read { path: OutputPath, source: io::Error },
    #[error("put the object {hash} into the artifact store")]
    Place {
        hash: ContentHash,
        source: io::Error,
    },
    #[error("the content of the object {hash} is not that of its name")]
    Damaged { hash: ContentHash },
    #[error("open the object {hash} in the artifact store {path:?}")]
    Object {
        path: PathBuf,
        hash: ContentHash,
        source: io::Error,
    },
    #[error("make the objects in the artifact store {path:?} durable")]
    Sync { path: PathBuf, source: io::Error },
    #[error("list the artifact store {path:?}")]
    List { path: PathBuf, source: io::Error },
    #[error("note or read who uses the artifact store, in {path:?}")]
    Users { path: PathBuf, source: io::Error },
}

/// How objects were made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durable {
    /// There was nothing that was not durable already.
    Already,
    /// One by one.
    Each { objects: usize },
    /// By one sync of the whole file system.
    FileSystem { objects: usize },
}

/// An open store. Threads may share it.
#[derive(Debug)]
pub struct Artifacts {
    path: PathBuf,
    id: String,
    dir: OwnedFd,
    objects: Arc<Objects>,
    staging: OwnedFd,
    /// Which of the 256 fan-out directories are known to be there; none is ever removed.
    fans: [AtomicBool; 256],
    /// Put in place by us, or found in place and read, and not synced since.
    unsynced: Mutex<HashSet<ContentHash>>,
}

/// What stands at an object's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    Durable,
    /// Whole, but a power cut may still tear it.
    Whole,
    /// Torn, or no object at all.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placed {
    New,
    WasThere,
}

#[derive(Debug)]
enum PlaceFault {
    Errno(Errno),
    /// What should have replaced a bad object is no better.
    Damaged,
}

impl From<Errno> for PlaceFault {
    fn from(errno: Errno) -> PlaceFault {
        PlaceFault::Errno(errno)
    }
}

impl Artifacts {
    /// Opens the store, and makes it if there is none. Any number of processes may do so at the same time.
    pub fn open(path: &Path) -> Result<Artifacts, ArtifactError> {
        refuse_network_fs(path)?;
        let failed = |source: io::Error| ArtifactError::Make {
            path: path.to_path_buf(),
            source,
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || rustix::fs::open(path, flags, Mode::empty());
        // It is made once and opened in every run.
        let dir = match open() {
            Err(Errno::NOENT) => {
                let mut builder = std::fs::DirBuilder::new();
                builder.recursive(true).mode(0o700);
                builder.create(path).map_err(failed)?;
                open()
            }
            opened => opened,
        };
        let dir = dir.map_err(|e| failed(e.into()))?;
        if !is_private(dir.as_fd()).map_err(|e| failed(e.into()))? {
            return Err(ArtifactError::NotOurs {
                path: path.to_path_buf(),
            });
        }
        let below = |name: &str| -> Result<OwnedFd, ArtifactError> {
            let made = open_or_make(dir.as_fd(), name).map_err(|e| failed(e.into()))?;
            match is_private(made.as_fd()).map_err(|e| failed(e.into()))? {
                true => Ok(made),
                false => Err(ArtifactError::NotOurs {
                    path: path.join(name),
                }),
            }
        };
        let (objects, staging) = (below("objects")?, below("staging")?);
        Ok(Artifacts {
            id: identity::find(path, dir.as_fd(), staging.as_fd())?,
            path: path.to_path_buf(),
            dir,
            objects: Arc::new(Objects::new(objects)),
            staging,
            fans: [const { AtomicBool::new(false) }; 256],
            unsynced: Mutex::default(),
        })
    }

    /// Made once, random, of 32 hex digits: what the database calls this store by, wherever it is mounted.
    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts in what we made ourselves, such as logs.
    pub fn put(&self, hold: &Hold, bytes: &[u8]) -> Result<ContentHash, ArtifactError> {
        self.check_hold(hold)?;
        let hash = ContentHash::of(bytes);
        let length = bytes.len() as u64;
        let failed = |source| ArtifactError::Place { hash, source };
        if !self.has(&hash, length)? {
            let draft = self.draft().map_err(failed)?;
            files::write_all_at(draft.as_fd(), bytes, 0).map_err(|e| failed(e.into()))?;
            self.place_draft(draft, &hash, length)?;
            self.note(hash)?;
        }
        Ok(hash)
    }

    /// Brings an object over from another store, such as one of the pending ones, which keeps it until it is removed
    /// as a whole: before this store is durable there must not be only one of them.
    pub fn adopt(
        &self,
        hold: &Hold,
        other: &Artifacts,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<Taken, ArtifactError> {
        self.check_hold(hold)?;
        if self.has(hash, bytes)? {
            return Ok(Taken::Present);
        }
        let file = other.open_object(hash)?;
        // A store may be recovered after a power cut: its objects are believed only when they were read.
        match files::is_content(file.as_fd(), hash, bytes) {
            Ok(true) => {}
            Ok(false) => return Err(ArtifactError::Damaged { hash: *hash }),
            Err(source) => {
                return Err(ArtifactError::Object {
                    path: other.path.clone(),
                    hash: *hash,
                    source,
                });
            }
        }
        self.bring(file.as_fd(), hash, bytes, Transfer::Move)
    }

    /// Makes everything durable that was taken, put, adopted or found here since the last time.
    pub fn make_durable(&self) -> Result<Durable, ArtifactError> {
        let unsynced = std::mem::take(&mut *self.unsynced());
        let done = match unsynced.len() {
            0 => Ok(Durable::Already),
            objects @ ..=FEW => self
                .sync_each(&unsynced)
                .map(|()| Durable::Each { objects }),
            objects => self
                .sync_all(&unsynced)
                .map(|()| Durable::FileSystem { objects }),
        };
        match done {
            Ok(durable) => {
                self.objects.note_synced(unsynced.into_iter());
                Ok(durable)
            }
            Err(source) => {
                self.unsynced().extend(unsynced);
                Err(ArtifactError::Sync {
                    path: self.path.clone(),
                    source: source.into(),
                })
            }
        }
    }

    /// fsync and not fdatasync: that the file is ours and that nobody may write to it must be durable, too.
    fn sync_each(&self, hashes: &HashSet<ContentHash>) -> rustix::io::Result<()> {
        let mut synced = Vec::with_capacity(hashes.len());
        for hash in hashes {
            let file = files::open_object(self.objects.as_fd(), &object_name(hash))?;
            rustix::fs::fsync(&file)?;
            synced.push(file);
        }
        let fans: HashSet<String> = hashes.iter().map(fan_name).collect();
        for fan in fans {
            rustix::fs::fsync(files::open_dir(self.objects.as_fd(), &fan)?)?;
        }
        // The fan-out directory may be new, by us or by somebody who has not synced it yet.
        rustix::fs::fsync(&self.objects)?;
        let mark = |file: &File| rustix::fs::fchmod(file, DURABLE);
        synced.iter().try_for_each(mark)
    }

    /// The kernel reports here what failed to be written since the descriptor was opened, with the store.
    fn sync_all(&self, hashes: &HashSet<ContentHash>) -> rustix::io::Result<()> {
        rustix::fs::syncfs(&self.objects)?;
        let mark = |hash: &ContentHash| {
            rustix::fs::chmodat(&self.objects, object_name(hash), DURABLE, AtFlags::empty())
        };
        hashes.iter().try_for_each(mark)
    }

    /// For reading. It stays readable through the descriptor whatever the garbage collector does.
    pub fn open_object(&self, hash: &ContentHash) -> Result<File, ArtifactError> {
        let opened = files::open_object(self.objects.as_fd(), &object_name(hash));
        opened.map_err(|e| ArtifactError::Object {
            path: self.path.clone(),
            hash: *hash,
            source: e.into(),
        })
    }

    /// Where an object is, to be shown, or linked to by what never writes to it.
    pub fn object_path(&self, hash: &ContentHash) -> PathBuf {
        self.path.join("objects").join(object_name(hash))
    }

    /// Whether there is an object of this name and length. Says nothing about its content: see [`Artifacts::verify`].
    pub fn contains(&self, hash: &ContentHash, bytes: u64) -> bool {
        let file = files::open_object(self.objects.as_fd(), &object_name(hash));
        file.and_then(rustix::fs::fstat)
            .is_ok_and(|stat| u64::try_from(stat.st_size) == Ok(bytes))
    }

    /// Whether an object is there and sound: one that is not durable is read. If its maker, who may be at it right now,
    /// has not made it durable, our next [`Artifacts::make_durable`] does.
    pub fn has(&self, hash: &ContentHash, bytes: u64) -> Result<bool, ArtifactError> {
        let found = self.find(hash, bytes).map_err(|e| ArtifactError::Object {
            path: self.path.clone(),
            hash: *hash,
            source: e.into(),
        })?;
        match found {
            Found::Nothing | Found::Bad => Ok(false),
            Found::Durable => Ok(true),
            Found::Whole => self.note(*hash).map(|()| true),
        }
    }

    /// What stands at an object's name. What is durable was checked by whoever marked it so; what is not is read.
    fn find(&self, hash: &ContentHash, bytes: u64) -> rustix::io::Result<Found> {
        let name = object_name(hash);
        let stat = match rustix::fs::statat(&self.objects, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(Found::Nothing),
            stat => stat?,
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
            || u64::try_from(stat.st_size) != Ok(bytes)
            || stat.st_uid != rustix::process::geteuid().as_raw()
        {
            return Ok(Found::Bad);
        }
        if Mode::from_raw_mode(stat.st_mode) == DURABLE {
            return Ok(Found::Durable);
        }
        if self.unsynced().contains(hash) {
            return Ok(Found::Whole);
        }
        let same = files::open_object(self.objects.as_fd(), &name)
            .and_then(|file| files::is_content(file.as_fd(), hash, bytes).map_err(errno_of));
        match same {
            Ok(true) => Ok(Found::Whole),
            // Without its mode it cannot be read, and it is none of ours.
            Ok(false) | Err(Errno::ACCESS) => Ok(Found::Bad),
            Err(e) => Err(e),
        }
    }

    /// Gives a whole file, ours and closed to changes, its object name.
    fn place(
        &self,
        file: BorrowedFd<'_>,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<Placed, PlaceFault> {
        // Another may put the same object in at the same time, and the collector may not: so few turns are enough.
        const TURNS: u32 = 8;
        let name = object_name(hash);
        self.make_fan(hash)?;
        for _ in 0..TURNS {
            match files::link(file, self.objects.as_fd(), &name) {
                Ok(()) => return Ok(Placed::New),
                Err(Errno::EXIST) => {}
                Err(e) => return Err(e.into()),
            }
            match self.find(hash, bytes)? {
                Found::Durable | Found::Whole => return Ok(Placed::WasThere),
                Found::Nothing => continue,
                Found::Bad => {}
            }
            // A power cut that tore the object may have torn this file as well: they may even be the same.
            match files::is_content(file, hash, bytes).map_err(errno_of)? {
                true => self.replace(file, &name)?,
                false => return Err(PlaceFault::Damaged),
            }
            return Ok(Placed::New);
        }
        Err(Errno::BUSY.into())
    }

    /// In one step: whoever opens the object gets the old one or the new one.
    fn replace(&self, file: BorrowedFd<'_>, object: &str) -> rustix::io::Result<()> {
        let name = random_hex().map_err(errno_of)?;
        files::link(file, self.staging.as_fd(), &name)?;
        let renamed = rustix::fs::renameat(&self.staging, &name, &self.objects, object);
        // Still there if the rename failed, or if both names were of the same file.
        let _gone = rustix::fs::unlinkat(&self.staging, &name, AtFlags::empty());
        renamed
    }

    fn place_draft(
        &self,
        draft: files::Draft<'_>,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<Placed, ArtifactError> {
        let placed = rustix::fs::fchmod(draft.as_fd(), PLACED)
            .map_err(PlaceFault::from)
            .and_then(|()| self.place(draft.as_fd(), hash, bytes));
        placed.map_err(|fault| match fault {
            PlaceFault::Damaged => ArtifactError::Damaged { hash: *hash },
            PlaceFault::Errno(e) => ArtifactError::Place {
                hash: *hash,
                source: e.into(),
            },
        })
    }

    fn draft(&self) -> io::Result<files::Draft<'_>> {
        files::Draft::new(self.staging.as_fd())
    }

    fn make_fan(&self, hash: &ContentHash) -> rustix::io::Result<()> {
        let name = fan_name(hash);
        let index = usize::from_str_radix(&name, 16).expect("a hash is written in hex digits");
        if !self.fans[index].load(Ordering::Relaxed) {
            match rustix::fs::mkdirat(&self.objects, &name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(e),
            }
            self.fans[index].store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Remembers an object that is to be made durable.
    fn note(&self, hash: ContentHash) -> Result<(), ArtifactError> {
        let full = {
            let mut unsynced = self.unsynced();
            unsynced.insert(hash);
            unsynced.len() >= UNSYNCED_MAX
        };
        match full {
            true => self.make_durable().map(drop),
            false => Ok(()),
        }
    }

    /// The set is whole after every single operation, so a panic elsewhere does not spoil it.
    fn unsynced(&self) -> MutexGuard<'_, HashSet<ContentHash>> {
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open_or_make(dir: BorrowedFd<'_>, name: &str) -> rustix::io::Result<OwnedFd> {
    match files::open_dir(dir, name) {
        Err(Errno::NOENT) => {}
        opened => return opened,
    }
    match rustix::fs::mkdirat(dir, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => files::open_dir(dir, name),
        Err(e) => Err(e),
    }
}

/// Ours, and nobody else may write there.
fn is_private(dir: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let stat = rustix::fs::fstat(dir)?;
    Ok(stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o022 == 0)
}

fn fan_name(hash: &ContentHash) -> String {
    hash.to_string()[..2].to_owned()
}

/// Below `objects`.
fn object_name(hash: &ContentHash) -> String {
    let mut name = hash.to_string();
    name.insert(2, '/');
    name
}

fn random_hex() -> io::Result<String> {
    let mut noise = [0u8; 16];
    let got = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty())?;
    match got == noise.len() {
        true => Ok(format!("{:032x}", u128::from_ne_bytes(noise))),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
