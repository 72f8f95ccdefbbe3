//! What is kept in memory of a tree of any size: the best candidates, and remarks about other entries.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

use super::content::Inode;
use super::{CollectionRules, Globs};
use store::types::escaping::escape_text;
use store::types::manifest::{REMARKS_MAX, Remark, RemarkedPath};

/// The most bytes of a path in a remark.
const SHOWN_BYTES_MAX: usize = 4096;
/// The most bytes of all candidates' paths: this much per output, but no less than the second number.
const PATH_BYTES_EACH: u64 = 256;
const PATH_BYTES_LEAST: u64 = 1 << 20;

/// The output that is also stored as JSON.
const RESULT: &[u8] = b"result.json";

/// Which files come first if there are more than may be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Priority {
    /// `--expect` or `--output` names its whole path.
    Named,
    /// A pattern of `--expect` matches it.
    Expected,
    /// `result.json` at the top.
    Result,
    Other,
}

/// The order in which candidates are kept; the smallest rank comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank<'a> {
    pub(super) priority: Priority,
    /// The number of directories on its path.
    depth: usize,
    bytes: u64,
    path: &'a [u8],
}

impl<'a> Rank<'a> {
    pub(super) fn of(path: &'a [u8], bytes: u64, rules: &CollectionRules<'_>) -> Rank<'a> {
        let named = |globs: &&Globs| globs.names(path);
        let priority = if rules.expected.iter().chain(&rules.wanted).any(named) {
            Priority::Named
        } else if rules
            .expected
            .is_some_and(|globs| globs.matches_bytes(path))
        {
            Priority::Expected
        } else if path == RESULT {
            Priority::Result
        } else {
            Priority::Other
        };
        Rank::new(priority, path, bytes)
    }

    fn new(priority: Priority, path: &'a [u8], bytes: u64) -> Rank<'a> {
        Rank {
            priority,
            depth: path.iter().filter(|byte| **byte == b'/').count(),
            bytes,
            path,
        }
    }
}

/// A file that becomes an output if it can be read. Ordered by its rank.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) path: Box<[u8]>,
    pub(super) bytes: u64,
    pub(super) priority: Priority,
    pub(super) inode: Inode,
    /// The file has more than one hard link.
    pub(super) linked: bool,
}

impl Candidate {
    fn rank(&self) -> Rank<'_> {
        Rank::new(self.priority, &self.path, self.bytes)
    }
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.rank() == other.rank()
    }
}

impl Eq for Candidate {}

/// The first candidates by rank, as many as fit, whatever the order in which they are offered.
///
/// Invariant: the heap holds every candidate offered so far that sorts before `refused_from`. Therefore the kept
/// candidates are the longest prefix of the sorted list that fits, whatever the order of the directory.
pub(super) struct Shortlist {
    heap: BinaryHeap<Candidate>,
    path_bytes: u64,
    path_bytes_max: u64,
    count_max: u64,
    refused_from: Option<Candidate>,
}

impl Shortlist {
    pub(super) fn new(count_max: u64) -> Self {
        Shortlist {
            heap: BinaryHeap::new(),
            path_bytes: 0,
            path_bytes_max: count_max
                .saturating_mul(PATH_BYTES_EACH)
                .max(PATH_BYTES_LEAST),
            count_max,
            refused_from: None,
        }
    }

    /// Whether a candidate of this rank would not be kept. Asking first avoids building the candidate.
    pub(super) fn refuses(&self, rank: &Rank<'_>) -> bool {
        let from = self.refused_from.as_ref();
        from.is_some_and(|from| *rank >= from.rank())
    }

    /// Adds a candidate. Each candidate that no longer fits, perhaps this one, gets the remark that there are too
    /// many.
    pub(super) fn offer(&mut self, candidate: Candidate, remarks: &mut RemarkList) {
        if self.refuses(&candidate.rank()) {
            return remarks.add(&candidate.path, Remark::TooMany);
        }
        self.path_bytes += candidate.path.len() as u64;
        self.heap.push(candidate);
        while self.heap.len() as u64 > self.count_max || self.path_bytes > self.path_bytes_max {
            let Some(last) = self.heap.pop() else {
                return;
            };
            self.path_bytes -= last.path.len() as u64;
            remarks.add(&last.path, Remark::TooMany);
            self.refused_from = Some(last);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Candidate> {
        self.heap.iter()
    }

    /// The candidates in the order of their rank.
    pub(super) fn into_sorted(self) -> Vec<Candidate> {
        self.heap.into_sorted_vec()
    }
}

/// Remarks: the first are listed, all are counted.
#[derive(Default)]
pub(super) struct RemarkList {
    pub(super) listed: Vec<RemarkedPath>,
    pub(super) counts: BTreeMap<Remark, u64>,
}

impl RemarkList {
    pub(super) fn add(&mut self, path: &[u8], remark: Remark) {
        *self.counts.entry(remark).or_default() += 1;
        if self.listed.len() < REMARKS_MAX {
            self.listed.push(RemarkedPath {
                path: displayed_path(path),
                remark,
            });
        }
    }
}

/// The end of a path, escaped. The cut is between bytes and never within an escape sequence.
pub(super) fn displayed_path(path: &[u8]) -> String {
    let mut from = path.len().saturating_sub(SHOWN_BYTES_MAX);
    loop {
        let text = escape_text(&path[from..]);
        match text.len().checked_sub(SHOWN_BYTES_MAX) {
            None | Some(0) => {
                break if text.is_empty() {
                    ".".to_owned()
                } else {
                    text
                };
            }
            // Escaping turns a byte into at most four, so this cuts little more than necessary.
            Some(over) => from += over.div_ceil(4),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use store::types::escaping::unescape_text;

    fn candidate(path: &[u8]) -> Candidate {
        Candidate {
            path: path.into(),
            bytes: 0,
            priority: Priority::Other,
            inode: (0, 0),
            linked: false,
        }
    }

    proptest! {
        /// The order of the directory must not decide what is kept; otherwise a repetition would give another record.
        #[test]
        fn the_order_of_arrival_does_not_matter(
            sizes in prop::collection::vec(1usize..60_000, 0..80),
            count_max in 0u64..120,
            order in any::<u64>(),
        ) {
            let paths: Vec<Vec<u8>> = sizes
                .iter()
                .enumerate()
                .map(|(n, size)| [format!("{n:03}").into_bytes(), vec![b'x'; *size]].concat())
                .collect();
            let mut shuffled: Vec<&Vec<u8>> = paths.iter().collect();
            shuffled.sort_by_key(|p| blake3::hash(&[&p[..3], &order.to_le_bytes()].concat()).as_bytes()[..8].to_vec());
            let mut list = Shortlist::new(count_max);
            let mut remarks = RemarkList::default();
            for path in shuffled {
                list.offer(candidate(path), &mut remarks);
            }
            let mut total = 0;
            let fits = |p: &&Vec<u8>| {
                total += p.len() as u64;
                total <= 1 << 20
            };
            let expected: Vec<&[u8]> = paths.iter().take(count_max as usize).take_while(fits).map(|p| &p[..]).collect();
            let kept = list.into_sorted();
            let kept: Vec<&[u8]> = kept.iter().map(|c| &*c.path).collect();
            prop_assert_eq!(&kept, &expected);
            let refused = remarks.counts.get(&Remark::TooMany).copied().unwrap_or(0);
            prop_assert_eq!(refused as usize, paths.len() - expected.len());
        }

        #[test]
        fn shown_paths_are_bounded_and_whole(path in prop::collection::vec(any::<u8>(), 0..9000)) {
            let text = displayed_path(&path);
            prop_assert!(text.len() <= SHOWN_BYTES_MAX);
            let bytes = unescape_text(&text).unwrap();
            prop_assert!(path.is_empty() || path.ends_with(&bytes));
        }
    }
}
