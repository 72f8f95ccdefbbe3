//! Whether tracked files differ from the commit: the index from the commit's tree (staged), and the files from the index.
//!
//! As git does it, a file that has the size, times and inode that the index remembers is the file git read, unless it was written
//! so late that the index could not tell (its time is not before the index's own). Any other is compared with its blob, byte by byte,
//! so that no hash has to be made. Files that are not tracked do not count.

use std::io::Read;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FileType, Stat};

use super::index::{self, Entry, Index, Time};
use super::objects::{self, Kind, Objects};
use super::{Budget, Dir, Repository, Unknown};

/// Of submodules in submodules.
const REPOSITORY_DEPTH_MAX: usize = 4;
/// Of directories below each other.
const TREE_DEPTH_MAX: usize = 128;
/// Larger files are not compared byte by byte.
const FILE_BYTES_MAX: usize = 4 << 20;
/// The clock is looked at once for so many files.
const STRIDE: usize = 128;

const TYPE: u32 = 0o170_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const SUBMODULE: u32 = 0o160_000;
const DIRECTORY: u32 = 0o040_000;

pub(super) fn any(
    repository: &Repository,
    commit: &[u8],
    budget: &mut Budget,
) -> Result<bool, Unknown> {
    any_at(repository, commit, budget, REPOSITORY_DEPTH_MAX)
}

fn any_at(
    repository: &Repository,
    commit: &[u8],
    budget: &mut Budget,
    depth: usize,
) -> Result<bool, Unknown> {
    let (index, written) = read_index(repository, commit.len()).ok_or(Unknown::Index)?;
    let mut objects = Objects::of(&repository.common, commit.len());
    if index.entries.iter().any(|e| e.conflict || e.to_be_added) {
        return Ok(true);
    }
    let staged = staged(&index, &mut objects, commit, budget);
    if let Ok(true) = staged {
        return Ok(true);
    }
    let mut files = Files {
        repository,
        index: &index,
        written,
        objects,
        dir: None,
        depth,
    };
    // One proof of a change outweighs everything that could not be found out.
    let changed = files.changed(budget)?;
    match changed {
        true => Ok(true),
        false => staged,
    }
}

/// The index, and when it was written.
fn read_index(repository: &Repository, id_bytes: usize) -> Option<(Index, Time)> {
    let file = repository.git.file(b"index").ok()?;
    let meta = file.metadata().ok()?;
    let written = time(meta.mtime(), meta.mtime_nsec() as u64);
    let mut data = Vec::new();
    file.take(index::BYTES_MAX as u64 + 1)
        .read_to_end(&mut data)
        .ok()?;
    if data.len() > index::BYTES_MAX {
        return None;
    }
    Some((Index::parse(data, id_bytes)?, written))
}

fn time(seconds: i64, nanos: u64) -> Time {
    Time {
        seconds: seconds as u32,
        nanos: nanos as u32,
    }
}

/// Whether the index differs from the commit's tree.
fn staged(
    index: &Index,
    objects: &mut Objects,
    commit: &[u8],
    budget: &mut Budget,
) -> Result<bool, Unknown> {
    let mut compare = || {
        let commit = objects.read(commit, Kind::Commit, budget)?;
        let tree = objects::tree_of(&commit)?;
        let mut prefix = Vec::new();
        same_tree(index, &index.entries, &tree, &mut prefix, objects, budget)
    };
    match compare() {
        Some(same) => Ok(!same),
        None if budget.left() => Err(Unknown::Tree),
        None => Err(Unknown::TooLarge),
    }
}

/// Whether `entries`, which are all of the index below `prefix`, are what the tree holds.
fn same_tree(
    index: &Index,
    entries: &[Entry],
    tree: &[u8],
    prefix: &mut Vec<u8>,
    objects: &mut Objects,
    budget: &mut Budget,
) -> Option<bool> {
    // What git has worked out itself need not be worked out again.
    if let Some(made) = index.trees.get(prefix)
        && made.entries == entries.len()
    {
        return Some(made.id == tree);
    }
    if prefix.iter().filter(|b| **b == b'/').count() > TREE_DEPTH_MAX {
        return None;
    }
    let content = objects.read(tree, Kind::Tree, budget)?;
    let mut rest = entries;
    let length = prefix.len();
    for part in objects::tree_entries(&content, tree.len())? {
        prefix.truncate(length);
        prefix.extend_from_slice(part.name);
        let run = match part.mode & TYPE {
            DIRECTORY => {
                prefix.push(b'/');
                let below = |e: &&Entry| index.path(e).starts_with(prefix);
                let run = rest.iter().take_while(below).count();
                if run == 0 || !same_tree(index, &rest[..run], part.id, prefix, objects, budget)? {
                    return Some(false);
                }
                run
            }
            _ => {
                let same = rest.first().is_some_and(|e| {
                    index.path(e) == prefix.as_slice()
                        && index.id(e) == part.id
                        && plain_mode(e.mode) == plain_mode(part.mode)
                });
                if !same {
                    return Some(false);
                }
                1
            }
        };
        rest = &rest[run..];
    }
    prefix.truncate(length);
    Some(rest.is_empty())
}

/// Of the permissions git keeps only whether a file is executable; very old trees hold more.
fn plain_mode(mode: u32) -> (u32, bool) {
    (mode & TYPE, mode & TYPE == REGULAR && mode & 0o100 != 0)
}

/// What one file turned out to be.
enum Verdict {
    Same,
    Changed,
}

struct Files<'a> {
    repository: &'a Repository,
    index: &'a Index,
    written: Time,
    objects: Objects,
    /// The directory of the file before, which most often is that of the next as well; `None` in it if it is gone.
    dir: Option<(&'a [u8], Option<Dir>)>,
    depth: usize,
}

impl<'a> Files<'a> {
    /// Whether any file differs from the index.
    fn changed(&mut self, budget: &mut Budget) -> Result<bool, Unknown> {
        let mut unknown = None;
        for (n, entry) in self.index.entries.iter().enumerate() {
            if n % STRIDE == 0 && !budget.left() {
                return Err(Unknown::TooLarge);
            }
            match self.verdict(entry, budget) {
                Ok(Verdict::Same) => {}
                Ok(Verdict::Changed) => return Ok(true),
                Err(why) => unknown = unknown.or(Some(why)),
            }
        }
        unknown.map_or(Ok(false), Err)
    }

    fn verdict(&mut self, entry: &Entry, budget: &mut Budget) -> Result<Verdict, Unknown> {
        let index = self.index;
        let path = index.path(entry);
        let (above, name) = match path.iter().rposition(|b| *b == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (b".".as_slice(), path),
        };
        if matches!(name, b"" | b"." | b"..") {
            return Err(Unknown::Index);
        }
        let gone = match entry.not_checked_out {
            true => Ok(Verdict::Same),
            false => Ok(Verdict::Changed),
        };
        self.enter(above)?;
        let Some((_, Some(dir))) = &self.dir else {
            return gone;
        };
        let Some(stat) = dir.stat(name).map_err(Unknown::Unreadable)? else {
            return gone;
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        match (entry.mode & TYPE, kind) {
            (REGULAR, FileType::RegularFile) => {
                if (entry.mode ^ stat.st_mode) & 0o100 != 0 {
                    return Ok(Verdict::Changed);
                }
            }
            (SYMLINK, FileType::Symlink) => {}
            (SUBMODULE, FileType::Directory) => return self.submodule(entry, name, budget),
            (REGULAR | SYMLINK | SUBMODULE, _) => return Ok(Verdict::Changed),
            _ => return Err(Unknown::Index),
        }
        // A size of 0 is also git's own mark for a file that it could not be sure of.
        if stat.st_size as u32 != entry.size && entry.size != 0 {
            return Ok(Verdict::Changed);
        }
        match as_remembered(entry, &stat, self.written) {
            true => Ok(Verdict::Same),
            false => self.compare(entry, name, &stat, budget),
        }
    }

    /// Holds the directory, through no symlink: git, too, takes what lies behind one as gone.
    fn enter(&mut self, above: &'a [u8]) -> Result<(), Unknown> {
        use std::io::ErrorKind::{NotADirectory, NotFound};
        if self.dir.as_ref().is_some_and(|(path, _)| *path == above) {
            return Ok(());
        }
        let dir = match self.repository.work.sub(above) {
            Ok(dir) => Some(dir),
            Err(error) if matches!(error.kind(), NotFound | NotADirectory) => None,
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                None
            }
            Err(error) => return Err(Unknown::Unreadable(error)),
        };
        self.dir = Some((above, dir));
        Ok(())
    }

    /// The file against its blob.
    fn compare(
        &mut self,
        entry: &Entry,
        name: &[u8],
        stat: &Stat,
        budget: &mut Budget,
    ) -> Result<Verdict, Unknown> {
        let Some((_, Some(dir))) = &self.dir else {
            return Err(Unknown::Index);
        };
        let file = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => dir.link(name),
            _ => dir.read_whole(name, FILE_BYTES_MAX),
        };
        let file = file.map_err(|_| Unknown::Content)?;
        budget.spend(file.len()).ok_or(Unknown::TooLarge)?;
        let id = self.index.id(entry);
        let blob = self.objects.read(id, Kind::Blob, budget);
        match blob.ok_or(Unknown::Content)? {
            blob if blob == file => Ok(Verdict::Same),
            // Of another length though the file kept its own: line ends or a large-file store may be why.
            blob if blob.len() != file.len() => Err(Unknown::Filter),
            _ => Ok(Verdict::Changed),
        }
    }

    /// One that was never fetched has not changed; any other must stand at the commit that is recorded, unchanged.
    fn submodule(
        &self,
        entry: &Entry,
        name: &[u8],
        budget: &mut Budget,
    ) -> Result<Verdict, Unknown> {
        let Some((_, Some(dir))) = &self.dir else {
            return Err(Unknown::Index);
        };
        let work = dir.sub(name).map_err(|_| Unknown::Submodule)?;
        let found = Repository::of(work, self.repository.owner).map_err(|_| Unknown::Submodule)?;
        let Some(inner) = found else {
            return Ok(Verdict::Same);
        };
        let head = inner.head().map_err(|_| Unknown::Submodule)?;
        let commit = head.commit.map_err(|_| Unknown::Submodule)?;
        if commit != self.index.id(entry) {
            return Ok(Verdict::Changed);
        }
        let depth = self.depth.checked_sub(1).ok_or(Unknown::Submodule)?;
        match any_at(&inner, &commit, budget, depth)? {
            true => Ok(Verdict::Changed),
            false => Ok(Verdict::Same),
        }
    }
}

/// Whether the file is the one that git read when it wrote the index at `written`.
fn as_remembered(entry: &Entry, stat: &Stat, written: Time) -> bool {
    let (modified, changed) = (
        time(stat.st_mtime, stat.st_mtime_nsec),
        time(stat.st_ctime, stat.st_ctime_nsec),
    );
    let before = match entry.modified.nanos {
        0 => entry.modified.seconds < written.seconds,
        _ => entry.modified < written,
    };
    before
        && stat.st_size as u32 == entry.size
        && stat.st_ino as u32 == entry.inode
        && same_time(entry.modified, modified)
        && same_time(entry.changed, changed)
}

/// Some programs that write an index keep no nanoseconds.
fn same_time(remembered: Time, now: Time) -> bool {
    remembered.seconds == now.seconds && (remembered.nanos == now.nanos || remembered.nanos == 0)
}
