//! Whether tracked files differ from the commit: the index from the commit's tree (staged changes), and the files
//! from the index.
//!
//! As in git, a file whose size, times and inode match the index is unchanged, unless its time is not before the
//! index's own: then it may have been written after git read it. Any other file is compared with its blob byte by
//! byte, so that no hash is needed. Untracked files do not count.

use std::io::Read;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FileType, Stat};

use super::index::{self, GitIndex, IndexEntry, IndexTime};
use super::objects::{self, GitObjects, ObjectKind};
use super::{GitUnknown, InspectedDir, ReadBudget, Repository};

/// The greatest nesting depth of submodules.
const REPOSITORY_DEPTH_MAX: usize = 4;
/// The greatest depth of directories.
const TREE_DEPTH_MAX: usize = 128;
/// Larger files are not compared.
const FILE_BYTES_MAX: usize = 4 << 20;
/// The clock is checked once per this many files.
const STRIDE: usize = 128;

const TYPE: u32 = 0o170_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const SUBMODULE: u32 = 0o160_000;
const DIRECTORY: u32 = 0o040_000;

pub(super) fn has_changes(
    repository: &Repository,
    commit: &[u8],
    budget: &mut ReadBudget,
) -> Result<bool, GitUnknown> {
    has_changes_at(repository, commit, budget, REPOSITORY_DEPTH_MAX)
}

fn has_changes_at(
    repository: &Repository,
    commit: &[u8],
    budget: &mut ReadBudget,
    depth: usize,
) -> Result<bool, GitUnknown> {
    let (index, written) = read_index(repository, commit.len()).ok_or(GitUnknown::Index)?;
    let mut objects = GitObjects::open(&repository.common, commit.len());
    if index.entries.iter().any(|e| e.conflict || e.to_be_added) {
        return Ok(true);
    }
    let staged = differs_from_commit(&index, &mut objects, commit, budget);
    if let Ok(true) = staged {
        return Ok(true);
    }
    let mut files = FileChecker {
        repository,
        index: &index,
        written,
        objects,
        dir: None,
        depth,
    };
    // One proven change outweighs everything that could not be found out.
    let changed = files.any_changed(budget)?;
    match changed {
        true => Ok(true),
        false => staged,
    }
}

/// Reads the index, and the time when it was written.
fn read_index(repository: &Repository, id_bytes: usize) -> Option<(GitIndex, IndexTime)> {
    let file = repository.git.open_file(b"index").ok()?;
    let meta = file.metadata().ok()?;
    let written = time(meta.mtime(), meta.mtime_nsec() as u64);
    let mut data = Vec::new();
    file.take(index::BYTES_MAX as u64 + 1)
        .read_to_end(&mut data)
        .ok()?;
    if data.len() > index::BYTES_MAX {
        return None;
    }
    Some((GitIndex::parse(data, id_bytes)?, written))
}

fn time(seconds: i64, nanos: u64) -> IndexTime {
    IndexTime {
        seconds: seconds as u32,
        nanos: nanos as u32,
    }
}

/// Whether the index differs from the commit's tree.
fn differs_from_commit(
    index: &GitIndex,
    objects: &mut GitObjects,
    commit: &[u8],
    budget: &mut ReadBudget,
) -> Result<bool, GitUnknown> {
    let mut compare = || {
        let commit = objects.read(commit, ObjectKind::Commit, budget)?;
        let tree = objects::tree_id_of_commit(&commit)?;
        let mut prefix = Vec::new();
        same_tree(index, &index.entries, &tree, &mut prefix, objects, budget)
    };
    match compare() {
        Some(same) => Ok(!same),
        None if budget.has_time() => Err(GitUnknown::Tree),
        None => Err(GitUnknown::TooLarge),
    }
}

/// Whether `entries`, which are all entries of the index below `prefix`, match the tree.
fn same_tree(
    index: &GitIndex,
    entries: &[IndexEntry],
    tree: &[u8],
    prefix: &mut Vec<u8>,
    objects: &mut GitObjects,
    budget: &mut ReadBudget,
) -> Option<bool> {
    // Use the tree id that git has cached in the index.
    if let Some(cached) = index.trees.get(prefix)
        && cached.entries == entries.len()
    {
        return Some(cached.id == tree);
    }
    if prefix.iter().filter(|b| **b == b'/').count() > TREE_DEPTH_MAX {
        return None;
    }
    let content = objects.read(tree, ObjectKind::Tree, budget)?;
    let mut rest = entries;
    let length = prefix.len();
    for part in objects::tree_entries(&content, tree.len())? {
        prefix.truncate(length);
        prefix.extend_from_slice(part.name);
        let run = match part.mode & TYPE {
            DIRECTORY => {
                prefix.push(b'/');
                let below = |e: &&IndexEntry| index.path(e).starts_with(prefix);
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

/// Git keeps only whether a file is executable; very old trees hold more permission bits.
fn plain_mode(mode: u32) -> (u32, bool) {
    (mode & TYPE, mode & TYPE == REGULAR && mode & 0o100 != 0)
}

/// The result of checking one file.
enum FileState {
    Same,
    Changed,
}

struct FileChecker<'a> {
    repository: &'a Repository,
    index: &'a GitIndex,
    written: IndexTime,
    objects: GitObjects,
    /// The directory of the previous file, which usually is that of the next too. The inner `None` means that it does
    /// not exist.
    dir: Option<(&'a [u8], Option<InspectedDir>)>,
    depth: usize,
}

impl<'a> FileChecker<'a> {
    /// Whether any file differs from the index.
    fn any_changed(&mut self, budget: &mut ReadBudget) -> Result<bool, GitUnknown> {
        let mut unknown = None;
        for (n, entry) in self.index.entries.iter().enumerate() {
            if n % STRIDE == 0 && !budget.has_time() {
                return Err(GitUnknown::TooLarge);
            }
            match self.check_file(entry, budget) {
                Ok(FileState::Same) => {}
                Ok(FileState::Changed) => return Ok(true),
                Err(why) => unknown = unknown.or(Some(why)),
            }
        }
        unknown.map_or(Ok(false), Err)
    }

    fn check_file(
        &mut self,
        entry: &IndexEntry,
        budget: &mut ReadBudget,
    ) -> Result<FileState, GitUnknown> {
        let index = self.index;
        let path = index.path(entry);
        let (above, name) = match path.iter().rposition(|b| *b == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (b".".as_slice(), path),
        };
        if matches!(name, b"" | b"." | b"..") {
            return Err(GitUnknown::Index);
        }
        let gone = match entry.not_checked_out {
            true => Ok(FileState::Same),
            false => Ok(FileState::Changed),
        };
        self.open_parent(above)?;
        let Some((_, Some(dir))) = &self.dir else {
            return gone;
        };
        let Some(stat) = dir.stat(name).map_err(GitUnknown::Unreadable)? else {
            return gone;
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        match (entry.mode & TYPE, kind) {
            (REGULAR, FileType::RegularFile) => {
                if (entry.mode ^ stat.st_mode) & 0o100 != 0 {
                    return Ok(FileState::Changed);
                }
            }
            (SYMLINK, FileType::Symlink) => {}
            (SUBMODULE, FileType::Directory) => return self.check_submodule(entry, name, budget),
            (REGULAR | SYMLINK | SUBMODULE, _) => return Ok(FileState::Changed),
            _ => return Err(GitUnknown::Index),
        }
        // Git also uses size 0 to mark an entry as uncertain.
        if stat.st_size as u32 != entry.size && entry.size != 0 {
            return Ok(FileState::Changed);
        }
        match matches_index(entry, &stat, self.written) {
            true => Ok(FileState::Same),
            false => self.compare(entry, name, &stat, budget),
        }
    }

    /// Opens the directory of a file, without following symlinks: git too treats a file behind a symlink as missing.
    fn open_parent(&mut self, above: &'a [u8]) -> Result<(), GitUnknown> {
        use std::io::ErrorKind::{NotADirectory, NotFound};
        if self.dir.as_ref().is_some_and(|(path, _)| *path == above) {
            return Ok(());
        }
        let dir = match self.repository.work.open_dir(above) {
            Ok(dir) => Some(dir),
            Err(error) if matches!(error.kind(), NotFound | NotADirectory) => None,
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                None
            }
            Err(error) => return Err(GitUnknown::Unreadable(error)),
        };
        self.dir = Some((above, dir));
        Ok(())
    }

    /// Compares a file with its blob.
    fn compare(
        &mut self,
        entry: &IndexEntry,
        name: &[u8],
        stat: &Stat,
        budget: &mut ReadBudget,
    ) -> Result<FileState, GitUnknown> {
        let Some((_, Some(dir))) = &self.dir else {
            return Err(GitUnknown::Index);
        };
        let file = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => dir.read_link(name),
            _ => dir.read_whole(name, FILE_BYTES_MAX),
        };
        let file = file.map_err(|_| GitUnknown::Content)?;
        budget.spend(file.len()).ok_or(GitUnknown::TooLarge)?;
        let id = self.index.id(entry);
        let blob = self.objects.read(id, ObjectKind::Blob, budget);
        match blob.ok_or(GitUnknown::Content)? {
            blob if blob == file => Ok(FileState::Same),
            // The file has the size in the index, but the blob another: a line-ending conversion or a large-file
            // filter may be the reason.
            blob if blob.len() != file.len() => Err(GitUnknown::Filter),
            _ => Ok(FileState::Changed),
        }
    }

    /// A submodule that was never fetched is unchanged. Any other must be at the recorded commit and unchanged
    /// itself.
    fn check_submodule(
        &self,
        entry: &IndexEntry,
        name: &[u8],
        budget: &mut ReadBudget,
    ) -> Result<FileState, GitUnknown> {
        let Some((_, Some(dir))) = &self.dir else {
            return Err(GitUnknown::Index);
        };
        let work = dir.open_dir(name).map_err(|_| GitUnknown::Submodule)?;
        let found =
            Repository::open(work, self.repository.owner).map_err(|_| GitUnknown::Submodule)?;
        let Some(inner) = found else {
            return Ok(FileState::Same);
        };
        let head = inner.head().map_err(|_| GitUnknown::Submodule)?;
        let commit = head.commit.map_err(|_| GitUnknown::Submodule)?;
        if commit != self.index.id(entry) {
            return Ok(FileState::Changed);
        }
        let depth = self.depth.checked_sub(1).ok_or(GitUnknown::Submodule)?;
        match has_changes_at(&inner, &commit, budget, depth)? {
            true => Ok(FileState::Changed),
            false => Ok(FileState::Same),
        }
    }
}

/// Whether the file is the one that git read when it wrote the index at `written`.
fn matches_index(entry: &IndexEntry, stat: &Stat, written: IndexTime) -> bool {
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

/// Some programs write no nanoseconds to an index.
fn same_time(remembered: IndexTime, now: IndexTime) -> bool {
    remembered.seconds == now.seconds && (remembered.nanos == now.nanos || remembered.nanos == 0)
}
