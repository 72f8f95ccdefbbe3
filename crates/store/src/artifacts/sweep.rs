//! Goes through the whole store: verifies objects, counts them, and removes those that nobody refers to.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

use super::{
    ArtifactError, Artifacts, DURABLE, ExclusiveLock, PLACED, files, hashing, object_name,
};
use crate::types::manifest::ContentHash;

/// The condition of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectCondition {
    /// It can be read, and owner, mode, length and content are right.
    Sound,
    /// There is no such object.
    Missing,
    /// Its name belongs to a directory, a link or something else.
    NotAFile,
    /// Its length is not that in the record.
    WrongLength {
        /// The length of the file.
        found: u64,
    },
    /// Its content has another hash.
    WrongContent {
        /// The hash of the content.
        found: ContentHash,
    },
    /// Others may write to it, or this process may not read it.
    WrongMode {
        /// The mode of the file: permissions and set-id bits.
        found: u32,
    },
    /// Another user owns it.
    WrongOwner {
        /// The uid of the owner.
        found: u32,
    },
}

impl ObjectCondition {
    /// Whether the object can be read and has the right content, whatever its owner and mode.
    pub fn has_content(&self) -> bool {
        matches!(
            self,
            ObjectCondition::Sound | ObjectCondition::WrongOwner { .. }
        )
    }
}

/// What was removed, or in a dry run would be removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SweepTotals {
    /// The number of objects.
    pub objects: u64,
    /// Space on disk.
    pub bytes: u64,
    /// Files in `staging`, which only a crash leaves behind.
    pub stale: u64,
    /// Entries that could not be removed or examined. The sweep continued.
    pub failed: u64,
    /// Files whose names are not names of objects. They are left alone.
    pub foreign: u64,
}

/// How much the store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreUsage {
    /// The number of objects.
    pub objects: u64,
    /// Space on disk, which is less than the length for sparse files.
    pub bytes: u64,
}

impl Artifacts {
    /// Reads a whole object and compares it with its name and length.
    pub fn verify(&self, hash: &ContentHash, bytes: u64) -> Result<ObjectCondition, ArtifactError> {
        let failed = |source: std::io::Error| self.object_error(hash, source);
        let name = object_name(hash);
        let stat = match rustix::fs::statat(&self.objects, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(ObjectCondition::Missing),
            stat => stat.map_err(|e| failed(e.into()))?,
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(ObjectCondition::NotAFile);
        }
        let mode = ObjectCondition::WrongMode {
            found: stat.st_mode & 0o7777,
        };
        let file = match files::open_object(self.objects.as_fd(), &name) {
            Err(Errno::ACCESS) => return Ok(mode),
            Err(Errno::NOENT) => return Ok(ObjectCondition::Missing),
            file => file.map_err(|e| failed(e.into()))?,
        };
        let found = files::length(file.as_fd()).map_err(failed)?;
        if found != bytes {
            return Ok(ObjectCondition::WrongLength { found });
        }
        let found = hashing::hash_of(file.as_fd(), bytes).map_err(failed)?;
        if found != *hash {
            // Mark the object as not durable, so that the next output with this content replaces it. Fails if another
            // user owns it.
            let _ = rustix::fs::fchmod(&file, PLACED);
            return Ok(ObjectCondition::WrongContent { found });
        }
        // A power cut may have lost the mode that marks a durable object, so both modes are right.
        let allowed = [DURABLE.as_raw_mode(), PLACED.as_raw_mode()];
        Ok(match stat.st_uid == rustix::process::geteuid().as_raw() {
            false => ObjectCondition::WrongOwner { found: stat.st_uid },
            true if allowed.contains(&(stat.st_mode & 0o7777)) => ObjectCondition::Sound,
            true => mode,
        })
    }

    /// Removes the objects that nobody refers to. `referenced` must answer for the databases and for the manifests of
    /// attempts that are not committed, since after a crash their objects may already be here.
    pub fn remove_unreferenced(
        &self,
        alone: &ExclusiveLock,
        referenced: &dyn Fn(&ContentHash) -> bool,
        dry_run: bool,
    ) -> Result<SweepTotals, ArtifactError> {
        self.check_exclusive(alone)?;
        let mut swept = SweepTotals::default();
        let foreign = self.each_object(&mut |fan, name, hash| {
            if !referenced(hash) {
                swept.objects += swept.remove(fan, name, dry_run);
            }
        })?;
        swept.foreign = foreign;
        // This process holds the exclusive lock, so the processes that created these files are dead. None of the files
        // is the only name of an output.
        let staging = self.staging.as_fd();
        files::each_entry(staging, &mut |name| {
            swept.stale += swept.remove(staging, name, dry_run);
        })
        .map_err(|e| self.list_failed(e))?;
        Ok(swept)
    }

    /// Counts all objects, with constant memory.
    pub fn usage(&self) -> Result<StoreUsage, ArtifactError> {
        let mut used = StoreUsage::default();
        self.each_object(&mut |fan, name, _hash| {
            // An object that was removed since it was listed takes no space.
            if let Ok(stat) = rustix::fs::statat(fan, name, AtFlags::SYMLINK_NOFOLLOW) {
                used.objects += 1;
                used.bytes += allocated(&stat);
            }
        })?;
        Ok(used)
    }

    /// Calls `see` for every object. Returns how many other files there are.
    fn each_object(
        &self,
        see: &mut dyn FnMut(BorrowedFd<'_>, &str, &ContentHash),
    ) -> Result<u64, ArtifactError> {
        let mut foreign = 0;
        for byte in 0..=u8::MAX {
            let fan_name = format!("{byte:02x}");
            let fan = match files::open_dir(self.objects.as_fd(), &fan_name) {
                Err(Errno::NOENT) => continue,
                fan => fan.map_err(|e| self.list_failed(e))?,
            };
            let listed = files::each_entry(fan.as_fd(), &mut |name| {
                let name = name.to_str().unwrap_or_default();
                match ContentHash::parse(&format!("{fan_name}{name}")) {
                    Ok(hash) => see(fan.as_fd(), name, &hash),
                    Err(_) => foreign += 1,
                }
            });
            listed.map_err(|e| self.list_failed(e))?;
        }
        Ok(foreign)
    }

    fn list_failed(&self, errno: Errno) -> ArtifactError {
        ArtifactError::List {
            path: self.path.clone(),
            source: errno.into(),
        }
    }
}

impl SweepTotals {
    /// Removes a file and counts its space, or counts the failure. Returns how many files were removed.
    fn remove<P: rustix::path::Arg + Copy>(
        &mut self,
        dir: BorrowedFd<'_>,
        name: P,
        dry_run: bool,
    ) -> u64 {
        let found = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
        let removed = found.and_then(|stat| {
            if !dry_run {
                rustix::fs::unlinkat(dir, name, AtFlags::empty())?;
            }
            Ok(stat)
        });
        match removed {
            Ok(stat) => {
                self.bytes += freed(&stat);
                1
            }
            Err(_) => {
                self.failed += 1;
                0
            }
        }
    }
}

fn allocated(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks)
        .unwrap_or(0)
        .saturating_mul(512)
}

/// A file with further names frees no space until the last name is removed.
fn freed(stat: &Stat) -> u64 {
    match stat.st_nlink {
        0 | 1 => allocated(stat),
        _ => 0,
    }
}
