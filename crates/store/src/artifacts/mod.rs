//! The artifact store: outputs and logs as objects, named by the hash of their content.
//!
//! An object is a file at `objects/ab/cdef…`, named by the blake3 hash of its content. It belongs to the user who runs
//! Fumehood and has no write permission and no extended attributes. An object gets its name only when it is complete,
//! by a link from a descriptor. A name that a program chose is used only once, to open the file. A crash at any moment
//! leaves no incomplete object, and no output that is neither in the workspace nor in the store.
//!
//! The mode of an object says whether it is durable. 0400: the object is in place, but a power cut may still damage
//! it, so whoever finds it and did not place it reads it before relying on it. 0444: the object and its directory
//! were synced.
//!
//! The file `lock` keeps a sweep apart from processes that add objects. Such a process holds a shared lock from the
//! first object until the transaction that refers to it is committed. A sweep removes objects that nobody refers to,
//! under an exclusive lock.
//!
//! In reading order:
//!
//! - this file: the store, placing objects, making them durable
//! - `lock`, `identity`, `users`: who may do what, which store this is, which databases refer to it
//! - `transfer`: moving outputs from a workspace into the store
//! - `files`, `hashing`, `page_cache`, `file_system`: operations on single files and on the file system
//! - `export`: writing outputs into a directory of the user
//! - `sweep`: verifying, counting and removing objects

mod export;
mod file_system;
pub mod files;
pub mod hashing;
mod identity;
mod lock;
mod page_cache;
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

use page_cache::ObjectDirectory;

use crate::types::manifest::{ContentHash, OutputPath};
use crate::types::random_hex::random_hex;

pub use export::{ExportContent, ExportError, ExportedFile, Overwrite, export};
pub use file_system::refuse_network_fs;
pub use lock::{ExclusiveLock, SharedLock};
pub use sweep::{ObjectCondition, StoreUsage, SweepTotals};
pub use transfer::{ContentCheck, TransferMethod, TransferMode, TransferSource};
pub use users::StoreUser;

/// In place, not known to be durable.
const PLACED: Mode = Mode::RUSR;
/// Durable.
const DURABLE: Mode = Mode::RUSR.union(Mode::RGRP).union(Mode::ROTH);
/// Up to this many objects are synced one by one, which does not force out the data of other programs. More are
/// synced by one syncfs.
const SYNC_EACH_MAX: usize = 16;
/// When this many objects wait to be made durable, they are made durable at once. Limits memory.
const UNSYNCED_MAX: usize = 65_536;

/// Why the artifact store could not do what it was asked to do.
#[allow(missing_docs, reason = "the variants say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// The directory is on a network file system.
    #[error(
        "keep {path:?} on {kind}: locks and durability cannot be relied on there; set FUMEHOOD_HOME to a directory on a local disk, or use PostgreSQL (--db) for the database"
    )]
    NetworkFs { path: PathBuf, kind: &'static str },
    /// Asking for the kind of file system failed.
    #[error("find out what file system {path:?} is on")]
    StatFs { path: PathBuf, source: io::Error },
    /// Opening or creating the directories of the store failed.
    #[error("make the artifact store {path:?}")]
    Make { path: PathBuf, source: io::Error },
    /// A directory of the store could be changed by another user.
    #[error(
        "the artifact store {path:?} belongs to another user or can be written by others; chmod 700 it, or choose another"
    )]
    NotPrivate { path: PathBuf },
    /// Reading or writing the file with the id of the store failed.
    #[error("read the identity of the artifact store, {path:?}")]
    Identity { path: PathBuf, source: io::Error },
    /// A newer Fumehood made the store.
    #[error(
        "the artifact store {path:?} has version {found}, and this Fumehood knows {}; use a newer Fumehood",
        identity::VERSION
    )]
    Version { path: PathBuf, found: u32 },
    /// Locking the store failed.
    #[error("lock the artifact store {path:?}")]
    Lock { path: PathBuf, source: io::Error },
    /// Other processes, `pids`, held the lock for longer than this process waits.
    #[error(
        "the artifact store {path:?} is in use by {}; wait for that to end, and repeat",
        lock::describe(.pids)
    )]
    Busy { path: PathBuf, pids: Vec<u32> },
    /// The lock that the caller passed is that of another store.
    #[error("the lock that was given is another artifact store's, not that of {path:?}")]
    OtherStore { path: PathBuf },
    /// Opening an output in the workspace failed.
    #[error("open the output {path:?} in the workspace")]
    Open { path: OutputPath, source: io::Error },
    /// An output is not as the manifest says.
    #[error(
        "take the output {path:?}: {what} is not what the manifest says; it is left where it is"
    )]
    Changed {
        path: OutputPath,
        what: &'static str,
    },
    /// Reading an output failed.
    #[error("read the output {path:?}")]
    Read { path: OutputPath, source: io::Error },
    /// Writing an object, or giving it its name, failed.
    #[error("put the object {hash} into the artifact store")]
    Place {
        hash: ContentHash,
        source: io::Error,
    },
    /// A file, or an object of another store, has other content than its hash says.
    #[error("the content of the object {hash} is not that of its name")]
    Damaged { hash: ContentHash },
    /// Reading an object of the store, or finding out whether it exists, failed.
    #[error("open the object {hash} in the artifact store {path:?}")]
    Object {
        path: PathBuf,
        hash: ContentHash,
        source: io::Error,
    },
    /// Making objects durable failed.
    #[error("make the objects in the artifact store {path:?} durable")]
    Sync { path: PathBuf, source: io::Error },
    /// Listing the objects of the store failed.
    #[error("list the artifact store {path:?}")]
    List { path: PathBuf, source: io::Error },
    /// Reading or writing the list of databases that use the store failed.
    #[error("note or read who uses the artifact store, in {path:?}")]
    Users { path: PathBuf, source: io::Error },
}

/// How objects were made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncMethod {
    /// All objects were durable already.
    NothingToSync,
    /// Synced one by one.
    Each {
        /// How many objects were synced.
        objects: usize,
    },
    /// Synced together with the whole file system.
    FileSystem {
        /// How many objects were to be synced.
        objects: usize,
    },
}

/// An open store. Threads may share it.
#[derive(Debug)]
pub struct Artifacts {
    path: PathBuf,
    id: String,
    dir: OwnedFd,
    objects: Arc<ObjectDirectory>,
    staging: OwnedFd,
    /// Which of the 256 fan-out directories are known to exist. None is ever removed.
    fans: [AtomicBool; 256],
    /// Objects that this process placed, or found and read, and that are not synced since.
    unsynced: Mutex<HashSet<ContentHash>>,
}

/// What exists at an object's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExistingObject {
    Nothing,
    Durable,
    /// Complete, but a power cut may still damage it.
    Whole,
    /// Damaged, or not a regular file of the user who runs Fumehood.
    Bad,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    New,
    WasThere,
}

#[derive(Debug)]
enum PlaceFault {
    Errno(Errno),
    /// The file that should replace a bad object is damaged as well.
    Damaged,
}

impl PlaceFault {
    fn into_error(self, hash: &ContentHash) -> ArtifactError {
        let hash = *hash;
        match self {
            PlaceFault::Damaged => ArtifactError::Damaged { hash },
            PlaceFault::Errno(e) => ArtifactError::Place {
                hash,
                source: e.into(),
            },
        }
    }
}

impl From<Errno> for PlaceFault {
    fn from(errno: Errno) -> PlaceFault {
        PlaceFault::Errno(errno)
    }
}

impl Artifacts {
    /// Opens the store, and creates it if necessary. Any number of processes may do so at the same time.
    pub fn open(path: &Path) -> Result<Artifacts, ArtifactError> {
        refuse_network_fs(path)?;
        let failed = |source: io::Error| ArtifactError::Make {
            path: path.to_path_buf(),
            source,
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || rustix::fs::open(path, flags, Mode::empty());
        // Try to open first: the store is created once and opened in every run.
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
        check_private(dir.as_fd(), path)?;
        let below = |name: &str| -> Result<OwnedFd, ArtifactError> {
            let made = files::open_or_make_dir(dir.as_fd(), name, Mode::RWXU, files::open_dir)
                .map_err(|e| failed(e.into()))?;
            check_private(made.as_fd(), &path.join(name))?;
            Ok(made)
        };
        let (objects, staging) = (below("objects")?, below("staging")?);
        Ok(Artifacts {
            id: identity::read_or_create(path, dir.as_fd(), staging.as_fd())?,
            path: path.to_path_buf(),
            dir,
            objects: Arc::new(ObjectDirectory::new(objects)),
            staging,
            fans: [const { AtomicBool::new(false) }; 256],
            unsynced: Mutex::default(),
        })
    }

    /// A random id of 32 hex digits. The database refers to the store by it, wherever the store is mounted.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The directory of the store, as it was given to [`Artifacts::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds content that Fumehood itself made, such as logs.
    pub fn put(&self, hold: &SharedLock, bytes: &[u8]) -> Result<ContentHash, ArtifactError> {
        self.check_shared(hold)?;
        let hash = ContentHash::of(bytes);
        let length = bytes.len() as u64;
        let failed = |source| ArtifactError::Place { hash, source };
        if !self.has_object(&hash, length)? {
            let draft = self.draft().map_err(failed)?;
            files::write_all_at(draft.as_fd(), bytes, 0).map_err(|e| failed(e.into()))?;
            self.place_draft(draft, &hash, length)?;
            self.note_unsynced(hash)?;
        }
        Ok(hash)
    }

    /// Copies or links an object from another store, such as that of a pending attempt. The other store keeps the
    /// object until the whole store is removed, because this store is not durable yet.
    pub fn import_object(
        &self,
        hold: &SharedLock,
        other: &Artifacts,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<TransferMethod, ArtifactError> {
        self.check_shared(hold)?;
        if self.has_object(hash, bytes)? {
            return Ok(TransferMethod::Present);
        }
        let file = other.open_object(hash)?;
        // The other store may have survived a power cut, so check its objects before relying on them.
        match hashing::is_content(file.as_fd(), hash, bytes) {
            Ok(true) => {}
            Ok(false) => return Err(ArtifactError::Damaged { hash: *hash }),
            Err(source) => return Err(other.object_error(hash, source)),
        }
        self.place_file(file.as_fd(), hash, bytes, TransferMode::Move)
    }

    /// Makes all objects durable that were added or found here since the last call.
    pub fn make_durable(&self) -> Result<SyncMethod, ArtifactError> {
        let unsynced = std::mem::take(&mut *self.lock_unsynced());
        let done = match unsynced.len() {
            0 => Ok(SyncMethod::NothingToSync),
            objects @ ..=SYNC_EACH_MAX => self
                .sync_each(&unsynced)
                .map(|()| SyncMethod::Each { objects }),
            objects => self
                .sync_all(&unsynced)
                .map(|()| SyncMethod::FileSystem { objects }),
        };
        match done {
            Ok(durable) => {
                self.objects.note_synced(unsynced.into_iter());
                Ok(durable)
            }
            Err(source) => {
                self.lock_unsynced().extend(unsynced);
                Err(ArtifactError::Sync {
                    path: self.path.clone(),
                    source: source.into(),
                })
            }
        }
    }

    /// Uses fsync, not fdatasync, because owner and mode must be durable as well.
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
        // The fan-out directory may be new, created by this process or by a process that has not synced it yet.
        rustix::fs::fsync(&self.objects)?;
        let mark = |file: &File| rustix::fs::fchmod(file, DURABLE);
        synced.iter().try_for_each(mark)
    }

    /// syncfs reports write errors since the descriptor was opened, which was when the store was opened.
    fn sync_all(&self, hashes: &HashSet<ContentHash>) -> rustix::io::Result<()> {
        rustix::fs::syncfs(&self.objects)?;
        let mark = |hash: &ContentHash| {
            rustix::fs::chmodat(&self.objects, object_name(hash), DURABLE, AtFlags::empty())
        };
        hashes.iter().try_for_each(mark)
    }

    /// Opens an object for reading. The descriptor stays readable even if a sweep removes the object.
    pub fn open_object(&self, hash: &ContentHash) -> Result<File, ArtifactError> {
        let opened = files::open_object(self.objects.as_fd(), &object_name(hash));
        opened.map_err(|e| self.object_error(hash, e))
    }

    fn object_error(&self, hash: &ContentHash, source: impl Into<io::Error>) -> ArtifactError {
        ArtifactError::Object {
            path: self.path.clone(),
            hash: *hash,
            source: source.into(),
        }
    }

    /// The path of an object, for display or for links by programs that never write to it.
    pub fn object_path(&self, hash: &ContentHash) -> PathBuf {
        self.path.join("objects").join(object_name(hash))
    }

    /// Whether there is an object with this name and length. Does not check the content: see [`Artifacts::verify`].
    pub fn contains(&self, hash: &ContentHash, bytes: u64) -> bool {
        let file = files::open_object(self.objects.as_fd(), &object_name(hash));
        file.and_then(rustix::fs::fstat)
            .is_ok_and(|stat| u64::try_from(stat.st_size) == Ok(bytes))
    }

    /// Whether an intact object exists. Reads it if it is not durable. If the process that placed it has not made it
    /// durable yet, this process's next [`Artifacts::make_durable`] does.
    pub fn has_object(&self, hash: &ContentHash, bytes: u64) -> Result<bool, ArtifactError> {
        let found = self.find_existing(hash, bytes);
        match found.map_err(|e| self.object_error(hash, e))? {
            ExistingObject::Nothing | ExistingObject::Bad => Ok(false),
            ExistingObject::Durable => Ok(true),
            ExistingObject::Whole => self.note_unsynced(*hash).map(|()| true),
        }
    }

    /// Examines an object's name. A durable object was checked by the process that marked it; any other object is
    /// read.
    fn find_existing(&self, hash: &ContentHash, bytes: u64) -> rustix::io::Result<ExistingObject> {
        let name = object_name(hash);
        let stat = match rustix::fs::statat(&self.objects, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(ExistingObject::Nothing),
            stat => stat?,
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
            || u64::try_from(stat.st_size) != Ok(bytes)
            || stat.st_uid != rustix::process::geteuid().as_raw()
        {
            return Ok(ExistingObject::Bad);
        }
        if Mode::from_raw_mode(stat.st_mode) == DURABLE {
            return Ok(ExistingObject::Durable);
        }
        if self.lock_unsynced().contains(hash) {
            return Ok(ExistingObject::Whole);
        }
        let same = files::open_object(self.objects.as_fd(), &name)
            .and_then(|file| hashing::is_content(file.as_fd(), hash, bytes).map_err(errno_of));
        match same {
            Ok(true) => Ok(ExistingObject::Whole),
            // An object that its owner cannot read has a wrong mode, so Fumehood did not place it.
            Ok(false) | Err(Errno::ACCESS) => Ok(ExistingObject::Bad),
            Err(e) => Err(e),
        }
    }

    /// Gives a complete file its object name. The file belongs to the user who runs Fumehood and is read-only.
    fn place(
        &self,
        file: BorrowedFd<'_>,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<Placement, PlaceFault> {
        // Other processes may place the same object at the same time, but the lock keeps a sweep out, so a few turns
        // are enough.
        const TURNS: u32 = 8;
        let name = object_name(hash);
        self.make_fan_out_dir(hash)?;
        for _ in 0..TURNS {
            match files::link(file, self.objects.as_fd(), &name) {
                Ok(()) => return Ok(Placement::New),
                Err(Errno::EXIST) => {}
                Err(e) => return Err(e.into()),
            }
            match self.find_existing(hash, bytes)? {
                ExistingObject::Durable | ExistingObject::Whole => return Ok(Placement::WasThere),
                ExistingObject::Nothing => continue,
                ExistingObject::Bad => {}
            }
            // The power cut that damaged the object may have damaged this file as well. They may even be the same
            // file.
            match hashing::is_content(file, hash, bytes).map_err(errno_of)? {
                true => self.replace(file, &name)?,
                false => return Err(PlaceFault::Damaged),
            }
            return Ok(Placement::New);
        }
        Err(Errno::BUSY.into())
    }

    /// Replaces an object in one step: whoever opens it gets the old one or the new one.
    fn replace(&self, file: BorrowedFd<'_>, object: &str) -> rustix::io::Result<()> {
        let name = random_hex().map_err(errno_of)?;
        files::link(file, self.staging.as_fd(), &name)?;
        let renamed = rustix::fs::renameat(&self.staging, &name, &self.objects, object);
        // The name still exists if the rename failed or if both names are of the same file.
        let _ = rustix::fs::unlinkat(&self.staging, &name, AtFlags::empty());
        renamed
    }

    fn place_draft(
        &self,
        draft: files::Draft<'_>,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<Placement, ArtifactError> {
        let placed = rustix::fs::fchmod(draft.as_fd(), PLACED)
            .map_err(PlaceFault::from)
            .and_then(|()| self.place(draft.as_fd(), hash, bytes));
        placed.map_err(|fault| fault.into_error(hash))
    }

    fn draft(&self) -> io::Result<files::Draft<'_>> {
        files::Draft::new(self.staging.as_fd())
    }

    fn make_fan_out_dir(&self, hash: &ContentHash) -> rustix::io::Result<()> {
        let name = fan_name(hash);
        let index = usize::from_str_radix(&name, 16).expect("a hash is written in hex digits");
        if !self.fans[index].load(Ordering::Relaxed) {
            files::make_dir(self.objects.as_fd(), &name, Mode::RWXU)?;
            self.fans[index].store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Remembers an object that is to be made durable.
    fn note_unsynced(&self, hash: ContentHash) -> Result<(), ArtifactError> {
        let full = {
            let mut unsynced = self.lock_unsynced();
            unsynced.insert(hash);
            unsynced.len() >= UNSYNCED_MAX
        };
        match full {
            true => self.make_durable().map(drop),
            false => Ok(()),
        }
    }

    /// Each operation leaves the set consistent, so a panic elsewhere does not damage it.
    fn lock_unsynced(&self) -> MutexGuard<'_, HashSet<ContentHash>> {
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fails unless the directory belongs to the user who runs Fumehood and nobody else may write to it.
fn check_private(dir: BorrowedFd<'_>, path: &Path) -> Result<(), ArtifactError> {
    let own = rustix::process::geteuid().as_raw();
    let path = path.to_path_buf();
    match rustix::fs::fstat(dir) {
        Ok(stat) if stat.st_uid == own && stat.st_mode & 0o022 == 0 => Ok(()),
        Ok(_) => Err(ArtifactError::NotPrivate { path }),
        Err(e) => Err(ArtifactError::Make {
            path,
            source: e.into(),
        }),
    }
}

fn fan_name(hash: &ContentHash) -> String {
    hash.to_string()[..2].to_owned()
}

/// The object's path below `objects`.
fn object_name(hash: &ContentHash) -> String {
    let mut name = hash.to_string();
    name.insert(2, '/');
    name
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
