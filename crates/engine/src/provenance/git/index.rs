//! Git's index: the tracked files, the state of each when git last read it, and the ids of trees that git has cached.
//!
//! Supports versions 2, 3 and 4. By git's rule a reader must understand an extension whose name begins with a
//! lower-case letter; an index with such an extension (split, sparse) is refused.

use std::collections::HashMap;
use std::ops::Range;

/// The largest index that is read. With `ENTRIES_MAX` and `PATHS_BYTES_MAX` this keeps the runner below 50 MiB for the
/// worst index. The runner must stay small.
pub(super) const BYTES_MAX: usize = 16 << 20;
/// The greatest number of entries.
const ENTRIES_MAX: usize = 100_000;
/// The greatest total length of the paths. Paths in an index of version 4 share prefixes, so a small file can contain
/// very long paths.
const PATHS_BYTES_MAX: usize = 12 << 20;
/// The greatest number of cached trees. The cache is only a shortcut, so the bounds on it lose nothing.
const TREES_MAX: usize = 50_000;
/// The greatest depth of cached trees.
const TREE_DEPTH_MAX: usize = 32;
/// The longest path of a cached tree.
const TREE_PATH_BYTES_MAX: usize = 1024;

/// Seconds and nanoseconds as git stores them: the low 32 bits of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct IndexTime {
    pub(super) seconds: u32,
    pub(super) nanos: u32,
}

#[derive(Debug)]
pub(super) struct IndexEntry {
    path: Range<usize>,
    id: Range<usize>,
    pub(super) changed: IndexTime,
    pub(super) modified: IndexTime,
    pub(super) inode: u32,
    pub(super) mode: u32,
    pub(super) size: u32,
    /// One of several versions of the file, from an unfinished merge.
    pub(super) conflict: bool,
    /// Announced with `git add -N`, in no tree yet.
    pub(super) to_be_added: bool,
    /// Left out of a sparse checkout.
    pub(super) not_checked_out: bool,
}

/// The tree id that git has cached for a directory, and the number of entries below the directory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CachedTree {
    pub(super) entries: usize,
    pub(super) id: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct GitIndex {
    data: Vec<u8>,
    paths: Vec<u8>,
    /// Sorted by path.
    pub(super) entries: Vec<IndexEntry>,
    /// By directory: `""` for the top, others with a trailing slash.
    pub(super) trees: HashMap<Vec<u8>, CachedTree>,
}

impl GitIndex {
    /// `None` if the index is damaged, too large or of an unsupported kind.
    pub(super) fn parse(data: Vec<u8>, id_bytes: usize) -> Option<GitIndex> {
        let mut reader = IndexReader { data: &data, at: 0 };
        if reader.take(4)? != b"DIRC" {
            return None;
        }
        let version = reader.number()?;
        let count = reader.number()? as usize;
        if !(2..=4).contains(&version) || count > ENTRIES_MAX {
            return None;
        }
        let mut entries = Vec::new();
        let mut paths = Vec::new();
        let mut last = 0..0;
        for _ in 0..count {
            let entry = reader.entry(version, id_bytes, &mut paths, last)?;
            last = entry.path.clone();
            entries.push(entry);
        }
        let sorted =
            |pair: &[IndexEntry]| paths[pair[0].path.clone()] <= paths[pair[1].path.clone()];
        if !entries.windows(2).all(sorted) {
            return None;
        }
        let mut trees = HashMap::new();
        // The trailing checksum is as long as an id.
        while reader.at + id_bytes < data.len() {
            let name = reader.take(4)?;
            let length = reader.number()? as usize;
            let body = reader.take(length)?;
            match name {
                b"TREE" => read_trees(body, id_bytes, &mut trees)?,
                [b'A'..=b'Z', ..] => {}
                _ => return None,
            }
        }
        Some(GitIndex {
            data,
            paths,
            entries,
            trees,
        })
    }

    pub(super) fn path(&self, entry: &IndexEntry) -> &[u8] {
        &self.paths[entry.path.clone()]
    }

    pub(super) fn id(&self, entry: &IndexEntry) -> &[u8] {
        &self.data[entry.id.clone()]
    }
}

struct IndexReader<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> IndexReader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(count)?;
        let bytes = self.data.get(self.at..end)?;
        self.at = end;
        Some(bytes)
    }

    fn number(&mut self) -> Option<u32> {
        let bytes = self.take(4)?;
        Some(u32::from_be_bytes(bytes.try_into().ok()?))
    }

    fn short(&mut self) -> Option<u16> {
        let bytes = self.take(2)?;
        Some(u16::from_be_bytes(bytes.try_into().ok()?))
    }

    fn time(&mut self) -> Option<IndexTime> {
        Some(IndexTime {
            seconds: self.number()?,
            nanos: self.number()?,
        })
    }

    fn entry(
        &mut self,
        version: u32,
        id_bytes: usize,
        paths: &mut Vec<u8>,
        last: Range<usize>,
    ) -> Option<IndexEntry> {
        let start = self.at;
        let (changed, modified) = (self.time()?, self.time()?);
        let _device = self.number()?;
        let (inode, mode) = (self.number()?, self.number()?);
        let (_user, _group) = (self.number()?, self.number()?);
        let size = self.number()?;
        let id = self.at..self.at + id_bytes;
        self.take(id_bytes)?;
        let flags = self.short()?;
        let more = match flags & 0x4000 != 0 && version >= 3 {
            true => self.short()?,
            false => 0,
        };
        let path = match version {
            4 => self.shared_path(paths, last)?,
            _ => {
                let path = self.path(paths)?;
                // Entries end with one to eight NULs, so that each begins at a multiple of eight.
                self.at = start + (self.at - start).next_multiple_of(8);
                path
            }
        };
        Some(IndexEntry {
            path,
            id,
            changed,
            modified,
            inode,
            mode,
            size,
            conflict: flags & 0x3000 != 0,
            to_be_added: more & 0x2000 != 0,
            not_checked_out: more & 0x4000 != 0,
        })
    }

    /// Reads a path with its NUL.
    fn path(&mut self, paths: &mut Vec<u8>) -> Option<Range<usize>> {
        let rest = self.data.get(self.at..)?;
        let length = rest.iter().position(|b| *b == 0)?;
        let from = paths.len();
        paths.extend_from_slice(&rest[..length]);
        self.at += length + 1;
        (paths.len() <= PATHS_BYTES_MAX).then_some(from..paths.len())
    }

    /// Reads a path of version 4: how many bytes to drop from the end of the previous path, and what to append.
    fn shared_path(&mut self, paths: &mut Vec<u8>, last: Range<usize>) -> Option<Range<usize>> {
        let mut drop = 0usize;
        for n in 0.. {
            let byte = self.take(1)?[0];
            drop = drop
                .checked_mul(128)?
                .checked_add(usize::from(byte & 0x7f))?;
            if byte & 0x80 == 0 {
                break;
            }
            if n > 4 {
                return None;
            }
            drop += 1;
        }
        let keep = last.len().checked_sub(drop)?;
        let from = paths.len();
        if from + keep > PATHS_BYTES_MAX {
            return None;
        }
        paths.extend_from_within(last.start..last.start + keep);
        let added = self.path(paths)?;
        Some(from..added.end)
    }
}

/// Parses the TREE extension. Each tree precedes its subtrees: name, number of entries, number of subtrees, id. A
/// count of -1 marks an invalid tree without an id.
fn read_trees(
    body: &[u8],
    id_bytes: usize,
    trees: &mut HashMap<Vec<u8>, CachedTree>,
) -> Option<()> {
    /// A tree whose subtrees are being read.
    struct Above {
        path: Vec<u8>,
        left: usize,
    }
    let mut rest = body;
    let mut above: Vec<Above> = Vec::new();
    while !rest.is_empty() && trees.len() < TREES_MAX {
        let name_end = rest.iter().position(|b| *b == 0)?;
        let line_end = name_end + rest[name_end..].iter().position(|b| *b == b'\n')?;
        let line = std::str::from_utf8(&rest[name_end + 1..line_end]).ok()?;
        let (entries, below) = line.split_once(' ')?;
        let (entries, below): (i64, usize) = (entries.parse().ok()?, below.parse().ok()?);
        let mut path = above.last().map(|a| a.path.clone()).unwrap_or_default();
        if let Some(parent) = above.last_mut() {
            parent.left = parent.left.checked_sub(1)?;
            path.extend_from_slice(&rest[..name_end]);
            path.push(b'/');
        }
        rest = &rest[line_end + 1..];
        if let Ok(entries) = usize::try_from(entries) {
            let (id, after) = rest.split_at_checked(id_bytes)?;
            let id = id.to_vec();
            trees.insert(path.clone(), CachedTree { entries, id });
            rest = after;
        }
        if above.len() == TREE_DEPTH_MAX || path.len() > TREE_PATH_BYTES_MAX {
            return Some(());
        }
        above.push(Above { path, left: below });
        while above.last().is_some_and(|a| a.left == 0) {
            above.pop();
        }
        if above.is_empty() {
            break;
        }
    }
    Some(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn sample(body: &[u8]) -> Vec<u8> {
        [b"DIRC\0\0\0\x04\0\0\0\x02".as_slice(), body].concat()
    }

    #[test]
    fn a_tree_is_read_to_the_bound_of_its_depth() {
        let level = [b"d\0".as_slice(), b"1 1\n", &[7; 20]].concat();
        let body = [b"\x001 1\n".as_slice(), &[9; 20], &level.repeat(100_000)].concat();
        let mut trees = HashMap::new();
        read_trees(&body, 20, &mut trees).unwrap();
        assert_eq!(trees.len(), TREE_DEPTH_MAX + 1);
        let id = vec![9; 20];
        assert_eq!(trees[b"".as_slice()], CachedTree { entries: 1, id });
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_do_not_panic(body in proptest::collection::vec(proptest::num::u8::ANY, 0..600)) {
            let _ = GitIndex::parse(sample(&body), 20);
            let _ = read_trees(&body, 20, &mut HashMap::new());
            let _ = GitIndex::parse(body, 20);
        }
    }
}
