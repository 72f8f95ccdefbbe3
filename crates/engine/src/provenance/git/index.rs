//! Git's index: the tracked files, the state of each when git last read it, and the ids of trees that git has cached.
//!
//! Supports versions 2, 3 and 4. By git's rule a reader must understand an extension whose name begins with a
//! lower-case letter; an index with such an extension (split, sparse) is refused.

use std::collections::HashMap;
use std::ops::Range;

use super::objects;

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
pub(super) struct IndexEntry<'a> {
    path: Range<usize>,
    pub(super) id: &'a [u8],
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
pub(super) struct GitIndex<'a> {
    paths: Vec<u8>,
    /// Sorted by path.
    pub(super) entries: Vec<IndexEntry<'a>>,
    /// By directory: `""` for the top, others with a trailing slash.
    pub(super) trees: HashMap<Vec<u8>, CachedTree>,
}

impl GitIndex<'_> {
    /// `None` if the index is damaged, too large or of an unsupported kind.
    pub(super) fn parse(data: &[u8], id_bytes: usize) -> Option<GitIndex<'_>> {
        let mut rest = data;
        if rest.split_off(..4)? != b"DIRC" {
            return None;
        }
        let version = read_number(&mut rest)?;
        let count = read_number(&mut rest)? as usize;
        if !(2..=4).contains(&version) || count > ENTRIES_MAX {
            return None;
        }
        let mut entries = Vec::new();
        let mut paths = Vec::new();
        let mut last = 0..0;
        for _ in 0..count {
            let entry = read_entry(&mut rest, version, id_bytes, &mut paths, last)?;
            last = entry.path.clone();
            entries.push(entry);
        }
        let path = |entry: &IndexEntry<'_>| &paths[entry.path.clone()];
        if !entries.is_sorted_by(|a, b| path(a) <= path(b)) {
            return None;
        }
        let mut trees = HashMap::new();
        // The trailing checksum is as long as an id.
        while rest.len() > id_bytes {
            let name = rest.split_off(..4)?;
            let length = read_number(&mut rest)? as usize;
            let body = rest.split_off(..length)?;
            match name {
                b"TREE" => read_trees(body, id_bytes, &mut trees)?,
                [b'A'..=b'Z', ..] => {}
                _ => return None,
            }
        }
        Some(GitIndex {
            paths,
            entries,
            trees,
        })
    }

    pub(super) fn path(&self, entry: &IndexEntry<'_>) -> &[u8] {
        &self.paths[entry.path.clone()]
    }
}

fn read_array<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    rest.split_off(..N)?.try_into().ok()
}

fn read_number(rest: &mut &[u8]) -> Option<u32> {
    read_array(rest).map(u32::from_be_bytes)
}

fn read_time(rest: &mut &[u8]) -> Option<IndexTime> {
    Some(IndexTime {
        seconds: read_number(rest)?,
        nanos: read_number(rest)?,
    })
}

fn read_entry<'a>(
    rest: &mut &'a [u8],
    version: u32,
    id_bytes: usize,
    paths: &mut Vec<u8>,
    last: Range<usize>,
) -> Option<IndexEntry<'a>> {
    let start = rest.len();
    let (changed, modified) = (read_time(rest)?, read_time(rest)?);
    let _device = read_number(rest)?;
    let (inode, mode) = (read_number(rest)?, read_number(rest)?);
    let (_user, _group) = (read_number(rest)?, read_number(rest)?);
    let size = read_number(rest)?;
    let id = rest.split_off(..id_bytes)?;
    let flags = u16::from_be_bytes(read_array(rest)?);
    let more = match flags & 0x4000 != 0 && version >= 3 {
        true => u16::from_be_bytes(read_array(rest)?),
        false => 0,
    };
    let from = paths.len();
    if version == 4 {
        // The path says how many bytes to drop from the end of the previous path, and what to append.
        let drop = usize::try_from(objects::read_distance(rest)?).ok()?;
        let keep = last.len().checked_sub(drop)?;
        if from + keep > PATHS_BYTES_MAX {
            return None;
        }
        paths.extend_from_within(last.start..last.start + keep);
    }
    let length = rest.iter().position(|b| *b == 0)?;
    paths.extend_from_slice(rest.split_off(..length)?);
    // In other versions entries end with one to eight NULs, so that each begins at a multiple of eight.
    let read = start - rest.len();
    let padding = match version {
        4 => 1,
        _ => (read + 1).next_multiple_of(8) - read,
    };
    rest.split_off(..padding)?;
    if paths.len() > PATHS_BYTES_MAX {
        return None;
    }
    Some(IndexEntry {
        path: from..paths.len(),
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
        let name = rest.split_off(..rest.iter().position(|b| *b == 0)?)?;
        let line = rest.split_off(..rest.iter().position(|b| *b == b'\n')?)?;
        rest.split_off_first()?;
        let (entries, below) = std::str::from_utf8(&line[1..]).ok()?.split_once(' ')?;
        let (entries, below): (i64, usize) = (entries.parse().ok()?, below.parse().ok()?);
        let mut path = above.last().map(|a| a.path.clone()).unwrap_or_default();
        if let Some(parent) = above.last_mut() {
            parent.left = parent.left.checked_sub(1)?;
            path.extend_from_slice(name);
            path.push(b'/');
        }
        if let Ok(entries) = usize::try_from(entries) {
            let id = rest.split_off(..id_bytes)?.to_vec();
            trees.insert(path.clone(), CachedTree { entries, id });
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
            let _ = GitIndex::parse(&sample(&body), 20);
            let _ = read_trees(&body, 20, &mut HashMap::new());
            let _ = GitIndex::parse(&body, 20);
        }
    }
}
