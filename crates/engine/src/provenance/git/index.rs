//! Git's index: what is tracked, how each file looked when git last read it, and which trees that would make.
//!
//! Versions 2, 3 and 4. What an unknown extension with a small letter says cannot be left aside (git's own rule), so an index with
//! one (split, sparse) is not understood.

use std::collections::HashMap;
use std::ops::Range;

/// Together with the next two it keeps the runner, which must stay small, below 50 MiB for the worst index.
pub(super) const BYTES_MAX: usize = 16 << 20;
const ENTRIES_MAX: usize = 100_000;
/// Paths of an index of version 4 share their beginnings, so that a small file can hold very much.
const PATHS_BYTES_MAX: usize = 12 << 20;
/// Trees remembered beyond the first, and how deep they lie: a shortcut only, so a bound loses nothing.
const TREES_MAX: usize = 50_000;
const TREE_DEPTH_MAX: usize = 32;
const TREE_PATH_BYTES_MAX: usize = 1024;

/// Seconds and nanoseconds, each as git keeps them: the low 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Time {
    pub(super) seconds: u32,
    pub(super) nanos: u32,
}

#[derive(Debug)]
pub(super) struct Entry {
    path: Range<usize>,
    id: Range<usize>,
    pub(super) changed: Time,
    pub(super) modified: Time,
    pub(super) inode: u32,
    pub(super) mode: u32,
    pub(super) size: u32,
    /// More than one version of it, of a merge that is not finished.
    pub(super) conflict: bool,
    /// Promised to git with `add -N`, in no tree yet.
    pub(super) to_be_added: bool,
    /// Left out of a sparse checkout.
    pub(super) not_checked_out: bool,
}

/// A tree that the entries below a directory would make, and how many those are.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) entries: usize,
    pub(super) id: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Index {
    data: Vec<u8>,
    paths: Vec<u8>,
    /// In the order of their paths.
    pub(super) entries: Vec<Entry>,
    /// By directory, `""` for the top, each other with a slash at its end.
    pub(super) trees: HashMap<Vec<u8>, Made>,
}

impl Index {
    /// `None` if it is damaged, too large or of a kind that is not known.
    pub(super) fn parse(data: Vec<u8>, id_bytes: usize) -> Option<Index> {
        let mut reader = Reader { data: &data, at: 0 };
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
        let sorted = |pair: &[Entry]| paths[pair[0].path.clone()] <= paths[pair[1].path.clone()];
        if !entries.windows(2).all(sorted) {
            return None;
        }
        let mut trees = HashMap::new();
        // The checksum at the end is as long as an id.
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
        Some(Index {
            data,
            paths,
            entries,
            trees,
        })
    }

    pub(super) fn path(&self, entry: &Entry) -> &[u8] {
        &self.paths[entry.path.clone()]
    }

    pub(super) fn id(&self, entry: &Entry) -> &[u8] {
        &self.data[entry.id.clone()]
    }
}

struct Reader<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
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

    fn time(&mut self) -> Option<Time> {
        Some(Time {
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
    ) -> Option<Entry> {
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
        Some(Entry {
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

    /// Up to and with its NUL.
    fn path(&mut self, paths: &mut Vec<u8>) -> Option<Range<usize>> {
        let rest = self.data.get(self.at..)?;
        let length = rest.iter().position(|b| *b == 0)?;
        let from = paths.len();
        paths.extend_from_slice(&rest[..length]);
        self.at += length + 1;
        (paths.len() <= PATHS_BYTES_MAX).then_some(from..paths.len())
    }

    /// How many bytes to drop from the end of the path before, and what to put there instead.
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

/// Trees come before those below them: a name, how many entries and how many trees below, and the id. A
/// count of -1 stands for one that has to be made anew.
fn read_trees(body: &[u8], id_bytes: usize, trees: &mut HashMap<Vec<u8>, Made>) -> Option<()> {
    /// A tree whose trees are being read.
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
            trees.insert(path.clone(), Made { entries, id });
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
        assert_eq!(trees[b"".as_slice()], Made { entries: 1, id });
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_survived(body in proptest::collection::vec(proptest::num::u8::ANY, 0..600)) {
            let _ = Index::parse(sample(&body), 20);
            let _ = read_trees(&body, 20, &mut HashMap::new());
            let _ = Index::parse(body, 20);
        }
    }
}
