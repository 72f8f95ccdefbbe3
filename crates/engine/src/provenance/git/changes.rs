//! Whether tracked files differ from the commit: the index from the commit's tree (staged changes), and the files
//! from the index.
//!
//! As in git, a file whose size, times and inode match the index is unchanged, unless its time is not before the
//! index's own: then it may have been written after git read it. Any other file is compared with its blob byte by
//! byte, so that no hash is needed. Untracked files do not count.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::rc::Rc;

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
    let (data, written) = read_index(repository).ok_or(GitUnknown::Index)?;
    let index = GitIndex::parse(&data, commit.len()).ok_or(GitUnknown::Index)?;
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
    match files.any_changed(budget)? {
        true => Ok(true),
        false => staged,
    }
}

/// Reads the index, and the time when it was written.
fn read_index(repository: &Repository) -> Option<(Vec<u8>, IndexTime)> {
    let file = repository.git.open_file(b"index").ok()?;
    let meta = file.metadata().ok()?;
    let mut data = Vec::new();
    file.take(index::BYTES_MAX as u64 + 1)
        .read_to_end(&mut data)
        .ok()?;
    let written = time(meta.mtime(), meta.mtime_nsec() as u64);
    (data.len() <= index::BYTES_MAX).then_some((data, written))
}

fn time(seconds: i64, nanos: u64) -> IndexTime {
    IndexTime {
        seconds: seconds as u32,
        nanos: nanos as u32,
    }
}

/// Whether the index differs from the commit's tree.
fn differs_from_commit(
    index: &GitIndex<'_>,
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
    index: &GitIndex<'_>,
    entries: &[IndexEntry<'_>],
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
                let below = |e: &&IndexEntry<'_>| index.path(e).starts_with(prefix);
                let run = rest.iter().take_while(below).count();
                if run == 0 || !same_tree(index, &rest[..run], part.id, prefix, objects, budget)? {
                    return Some(false);
                }
                run
            }
            _ => {
                let same = rest.first().is_some_and(|e| {
                    index.path(e) == prefix.as_slice()
                        && e.id == part.id
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

struct FileChecker<'a> {
    repository: &'a Repository,
    index: &'a GitIndex<'a>,
    written: IndexTime,
    objects: GitObjects,
    /// The directory of the previous file, which usually is that of the next too. The inner `None` means that it does
    /// not exist.
    dir: Option<(&'a [u8], Option<Rc<InspectedDir>>)>,
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
            match self.is_changed(entry, budget) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                Err(why) => unknown = unknown.or(Some(why)),
            }
        }
        unknown.map_or(Ok(false), Err)
    }

    fn is_changed(
        &mut self,
        entry: &IndexEntry<'_>,
        budget: &mut ReadBudget,
    ) -> Result<bool, GitUnknown> {
        let path = self.index.path(entry);
        let (above, name) = match path.iter().rposition(|b| *b == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (b".".as_slice(), path),
        };
        if matches!(name, b"" | b"." | b"..") {
            return Err(GitUnknown::Index);
        }
        let Some(dir) = self.open_parent(above)? else {
            return Ok(!entry.not_checked_out);
        };
        let Some(stat) = dir.stat(name).map_err(GitUnknown::Unreadable)? else {
            return Ok(!entry.not_checked_out);
        };
        match (entry.mode & TYPE, FileType::from_raw_mode(stat.st_mode)) {
            (REGULAR, FileType::RegularFile) => {
                if (entry.mode ^ stat.st_mode) & 0o100 != 0 {
                    return Ok(true);
                }
            }
            (SYMLINK, FileType::Symlink) => {}
            (SUBMODULE, FileType::Directory) => {
                return self.is_submodule_changed(entry, &dir, name, budget);
            }
            (REGULAR | SYMLINK | SUBMODULE, _) => return Ok(true),
            _ => return Err(GitUnknown::Index),
        }
        // Git also uses size 0 to mark an entry as uncertain.
        if stat.st_size as u32 != entry.size && entry.size != 0 {
            return Ok(true);
        }
        if matches_index(entry, &stat, self.written) {
            return Ok(false);
        }
        let file = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => dir.read_link(name),
            _ => dir.read_whole(name, FILE_BYTES_MAX),
        };
        let file = file.map_err(|_| GitUnknown::Content)?;
        budget.spend(file.len()).ok_or(GitUnknown::TooLarge)?;
        let blob = self.objects.read(entry.id, ObjectKind::Blob, budget);
        match blob.ok_or(GitUnknown::Content)? {
            // The file has the size in the index, but the blob another: a line-ending conversion or a large-file
            // filter may be the reason.
            blob if blob.len() != file.len() => Err(GitUnknown::Filter),
            blob => Ok(blob != file),
        }
    }

    /// Opens the directory of a file, without following symlinks: git too treats a file behind a symlink as missing.
    fn open_parent(&mut self, above: &'a [u8]) -> Result<Option<Rc<InspectedDir>>, GitUnknown> {
        use rustix::io::Errno;
        const GONE: [Errno; 3] = [Errno::NOENT, Errno::NOTDIR, Errno::LOOP];
        if let Some((path, dir)) = &self.dir
            && *path == above
        {
            return Ok(dir.clone());
        }
        let dir = match self.repository.work.open_dir(above) {
            Ok(dir) => Some(Rc::new(dir)),
            Err(error) if Errno::from_io_error(&error).is_some_and(|e| GONE.contains(&e)) => None,
            Err(error) => return Err(GitUnknown::Unreadable(error)),
        };
        self.dir = Some((above, dir.clone()));
        Ok(dir)
    }

    /// A submodule that was never fetched is unchanged. Any other must be at the recorded commit and unchanged
    /// itself.
    fn is_submodule_changed(
        &self,
        entry: &IndexEntry<'_>,
        dir: &InspectedDir,
        name: &[u8],
        budget: &mut ReadBudget,
    ) -> Result<bool, GitUnknown> {
        let work = dir.open_dir(name).map_err(|_| GitUnknown::Submodule)?;
        let found =
            Repository::open(work, self.repository.owner).map_err(|_| GitUnknown::Submodule)?;
        let Some(inner) = found else {
            return Ok(false);
        };
        let head = inner.head().map_err(|_| GitUnknown::Submodule)?;
        let commit = head.commit.map_err(|_| GitUnknown::Submodule)?;
        if commit != entry.id {
            return Ok(true);
        }
        let depth = self.depth.checked_sub(1).ok_or(GitUnknown::Submodule)?;
        has_changes_at(&inner, &commit, budget, depth)
    }
}

/// Whether the file is the one that git read when it wrote the index at `written`.
fn matches_index(entry: &IndexEntry<'_>, stat: &Stat, written: IndexTime) -> bool {
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
