//! Looking through the whole store, one entry at a time: what is sound, what it takes, what nobody refers to.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, Dir, FileType, Stat};
use rustix::io::Errno;

use super::{Alone, ArtifactError, Artifacts, DURABLE, PLACED, files, object_name};
use crate::types::manifest::ContentHash;

/// What is known of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Sound,
    Missing,
    /// A directory, a link or something else stands at its name.
    NotAFile,
    WrongLength {
        found: u64,
    },
    WrongContent {
        found: ContentHash,
    },
    /// The content is right, but somebody may write to it, or we may not read it.
    WrongMode {
        found: u32,
    },
    WrongOwner {
        found: u32,
    },
}

impl Verdict {
    /// Whether it can be read and is what it should be, whatever its owner and mode.
    pub fn has_content(&self) -> bool {
        matches!(self, Verdict::Sound | Verdict::WrongOwner { .. })
    }
}

/// What was removed, or with a dry run would have been.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    pub objects: u64,
    /// As the disk counts them.
    pub bytes: u64,
    /// Names in `staging`, which only a crash leaves.
    pub stale: u64,
    /// Could not be removed or looked at; the sweep went on.
    pub failed: u64,
    /// In the store under names that no object has; left alone.
    pub foreign: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    pub objects: u64,
    /// As the disk counts them: less than the lengths where files are sparse.
    pub bytes: u64,
}

impl Artifacts {
    /// Reads a whole object, and compares it with what it should be.
    pub fn verify(&self, hash: &ContentHash, bytes: u64) -> Result<Verdict, ArtifactError> {
        let failed = |source: std::io::Error| ArtifactError::Object {
            path: self.path.clone(),
            hash: *hash,
            source,
        };
        let name = object_name(hash);
        let stat = match rustix::fs::statat(&self.objects, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(Verdict::Missing),
            stat => stat.map_err(|e| failed(e.into()))?,
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(Verdict::NotAFile);
        }
        let mode = Verdict::WrongMode {
            found: stat.st_mode & 0o7777,
        };
        let file = match files::open_object(self.objects.as_fd(), &name) {
            Err(Errno::ACCESS) => return Ok(mode),
            Err(Errno::NOENT) => return Ok(Verdict::Missing),
            file => file.map_err(|e| failed(e.into()))?,
        };
        let found = files::length(file.as_fd()).map_err(failed)?;
        if found != bytes {
            return Ok(Verdict::WrongLength { found });
        }
        let found = files::hash_of(file.as_fd(), bytes).map_err(failed)?;
        if found != *hash {
            // No longer believed: the next output of this content takes its place.
            let _by_its_owner = rustix::fs::fchmod(&file, PLACED);
            return Ok(Verdict::WrongContent { found });
        }
        // A power cut may have lost the mark that it is durable, and nothing else.
        let allowed = [DURABLE.as_raw_mode(), PLACED.as_raw_mode()];
        Ok(match stat.st_uid == rustix::process::geteuid().as_raw() {
            false => Verdict::WrongOwner { found: stat.st_uid },
            true if allowed.contains(&(stat.st_mode & 0o7777)) => Verdict::Sound,
            true => mode,
        })
    }

    /// Removes the objects that nobody refers to. `referenced` speaks for the database and also for every manifest
    /// whose attempt is not committed: after a crash its objects may be here already.
    pub fn remove_unreferenced(
        &self,
        alone: &Alone,
        referenced: &dyn Fn(&ContentHash) -> bool,
        dry_run: bool,
    ) -> Result<Swept, ArtifactError> {
        self.check_alone(alone)?;
        let mut swept = Swept::default();
        let mut foreign = 0;
        let mut failed = 0;
        foreign += self.each_object(&mut |fan, name, hash| {
            if referenced(hash) {
                return;
            }
            match remove(fan, name, dry_run) {
                Ok(stat) => {
                    swept.objects += 1;
                    swept.bytes += freed(&stat);
                }
                Err(_left) => failed += 1,
            }
        })?;
        // Nobody else is at work, so whoever had these is dead, and none of them is the only name of an output.
        each_entry(self.staging.as_fd(), &mut |name| match remove(
            self.staging.as_fd(),
            name,
            dry_run,
        ) {
            Ok(stat) => {
                swept.stale += 1;
                swept.bytes += freed(&stat);
            }
            Err(_left) => failed += 1,
        })
        .map_err(|e| self.list_failed(e))?;
        (swept.failed, swept.foreign) = (failed, foreign);
        Ok(swept)
    }

    /// Counts everything, in memory that does not grow with it.
    pub fn used(&self) -> Result<Used, ArtifactError> {
        let mut used = Used::default();
        self.each_object(&mut |fan, name, _hash| {
            // One that went since it was listed takes nothing.
            if let Ok(stat) = rustix::fs::statat(fan, name, AtFlags::SYMLINK_NOFOLLOW) {
                used.objects += 1;
                used.bytes += allocated(&stat);
            }
        })?;
        Ok(used)
    }

    /// Shows every object, and counts what is none.
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
            let listed = each_entry(fan.as_fd(), &mut |name| {
                let name = std::str::from_utf8(name).unwrap_or_default();
                match ContentHash::parse(&format!("{fan_name}{name}")) {
                    Ok(hash) => see(fan.as_fd(), name, &hash),
                    Err(_no_object) => foreign += 1,
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

fn each_entry(dir: BorrowedFd<'_>, see: &mut dyn FnMut(&[u8])) -> rustix::io::Result<()> {
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            see(name);
        }
    }
    Ok(())
}

fn remove<P: rustix::path::Arg + Copy>(
    dir: BorrowedFd<'_>,
    name: P,
    dry_run: bool,
) -> rustix::io::Result<Stat> {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if !dry_run {
        rustix::fs::unlinkat(dir, name, AtFlags::empty())?;
    }
    Ok(stat)
}

fn allocated(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks)
        .unwrap_or(0)
        .saturating_mul(512)
}

/// A file with other names takes what it takes until the last one goes.
fn freed(stat: &Stat) -> u64 {
    match stat.st_nlink {
        0 | 1 => allocated(stat),
        _ => 0,
    }
}
