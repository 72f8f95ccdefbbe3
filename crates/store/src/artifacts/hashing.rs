//! The hash of a large file, by several threads.
//!
//! blake3 is a tree of hashes, so that pieces of a file can be hashed apart and put together: the result is the very
//! hash that one thread would have found, which the tests compare. What `blake3` itself offers for this wants the whole file
//! mapped (one that is cut short meanwhile would kill us by SIGBUS) or a pool of threads that stays; here each thread reads its
//! own pieces, and is gone when the file is done.
//!
//! Invariant: a piece is a power of two of blake3's chunks, and only the last may be shorter. Cut in this way every piece is
//! one whole subtree.

use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};

use super::files::{self, Holes};
use crate::types::manifest::ContentHash;

const PIECE_BYTES: u64 = 1 << 20;
/// From here on it is worth starting threads, which costs as much as hashing about 100 kB each.
pub const LARGE_BYTES: u64 = 4 << 20;
/// The threads are started anew for so much of the file, which bounds what is remembered of its pieces.
const WINDOW_BYTES: u64 = 4096 * PIECE_BYTES;
/// What was copied is sent to the disk in parts of so much, so that the sync that follows does not find all of it still to do.
const SEND_BYTES: u64 = 16 * PIECE_BYTES;
/// More would not be faster than memory is, and the host has other work.
const THREADS_MAX: usize = 8;

/// How many threads may be at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// For who must not have others, since it is about to fork.
    One,
    /// As many as there are processors, within a bound.
    Several,
}

impl Threads {
    fn count(self) -> usize {
        match self {
            Threads::One => 1,
            Threads::Several => {
                std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS_MAX))
            }
        }
    }
}

/// A file of which the first `bytes` are read, and written to the same places of `to`, without the holes.
#[derive(Clone, Copy)]
pub struct Large<'a> {
    pub from: BorrowedFd<'a>,
    pub to: Option<BorrowedFd<'a>>,
    pub bytes: u64,
    pub holes: Holes,
}

impl Large<'_> {
    /// Tells now and then, on the caller's thread, how many bytes are done. At least [`LARGE_BYTES`] must be there to do.
    pub fn hash(&self, threads: Threads, told: &mut dyn FnMut(u64)) -> io::Result<ContentHash> {
        if let Some(to) = self.to {
            rustix::fs::ftruncate(to, self.bytes)?;
        }
        let mut subtrees = Subtrees::default();
        let mut at = 0;
        while at < self.bytes {
            let end = self.bytes.min(at.saturating_add(WINDOW_BYTES));
            for value in self.hash_window(at..end, threads.count(), told)? {
                subtrees.push(value);
            }
            at = end;
            told(at);
        }
        subtrees
            .root()
            .ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// The pieces of a part of the file, in their order.
    fn hash_window(
        &self,
        window: Range<u64>,
        threads: usize,
        told: &mut dyn FnMut(u64),
    ) -> io::Result<Vec<ChainingValue>> {
        let shared = Shared {
            next: AtomicU64::new(window.start),
            done: AtomicU64::new(window.start),
            end: window.end,
            data: Mutex::new(0..0),
        };
        let pieces = (window.end - window.start).div_ceil(PIECE_BYTES);
        let helpers = (threads as u64).min(pieces).saturating_sub(1);
        let mut hashed = std::thread::scope(|scope| -> io::Result<Vec<(u64, ChainingValue)>> {
            let help = |_| {
                let work = || self.work(&shared, &mut |_| {});
                // A host that grants no more threads is merely slower.
                std::thread::Builder::new().spawn_scoped(scope, work).ok()
            };
            let helpers: Vec<_> = (0..helpers).filter_map(help).collect();
            let mut hashed = self.work(&shared, told);
            for helper in helpers {
                let helped = helper.join().unwrap_or_else(|panic| {
                    std::panic::resume_unwind(panic);
                });
                hashed = hashed.and_then(|mut all| {
                    all.extend(helped?);
                    Ok(all)
                });
            }
            hashed
        })?;
        hashed.sort_unstable_by_key(|(start, _)| *start);
        Ok(hashed.into_iter().map(|(_, value)| value).collect())
    }

    /// Whether holes have to be looked for in this piece. A file system in memory walks through all pages up to the next hole:
    /// asked for each piece, of a large file without holes, that took longer than all the rest. So what is known to be data is
    /// remembered.
    fn holes_in(&self, piece: &Range<u64>, shared: &Shared) -> Holes {
        if self.holes == Holes::None {
            return Holes::None;
        }
        let within = |data: &Range<u64>| data.start <= piece.start && piece.end <= data.end;
        let mut data = shared.data.lock().unwrap_or_else(PoisonError::into_inner);
        if !within(&data)
            && let Ok((start, end)) = files::next_data(self.from, piece.start, self.bytes)
        {
            *data = start..end;
        }
        match within(&data) {
            true => Holes::None,
            false => Holes::Sought,
        }
    }

    /// Has the kernel begin to write the part that ends here. Other threads may not be through with theirs of it, and then
    /// that is written by the sync.
    fn send_off(&self, end: u64) {
        if let Some(to) = self.to
            && end.is_multiple_of(SEND_BYTES)
        {
            let length = NonZeroU64::new(SEND_BYTES);
            let advice = rustix::fs::Advice::DontNeed;
            let _sooner_or_later = rustix::fs::fadvise(to, end - SEND_BYTES, length, advice);
        }
    }

    /// Hashes one free piece after the other. A failure leaves none to the others, so that it is known soon.
    fn work(
        &self,
        shared: &Shared,
        told: &mut dyn FnMut(u64),
    ) -> io::Result<Vec<(u64, ChainingValue)>> {
        let mut buffer = Vec::new();
        let mut hashed = Vec::new();
        loop {
            let start = shared.next.fetch_add(PIECE_BYTES, Ordering::Relaxed);
            if start >= shared.end {
                return Ok(hashed);
            }
            let piece = start..shared.end.min(start + PIECE_BYTES);
            let bytes = piece.end - piece.start;
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(start);
            let mut see = |chunk: &[u8]| {
                hasher.update(chunk);
            };
            let holes = self.holes_in(&piece, shared);
            let read = files::read_stretch(self.from, self.to, piece, holes, &mut buffer, &mut see);
            if let Err(error) = read {
                shared.next.store(shared.end, Ordering::Relaxed);
                return Err(error);
            }
            hashed.push((start, hasher.finalize_non_root()));
            self.send_off(start + bytes);
            told(shared.done.fetch_add(bytes, Ordering::Relaxed) + bytes);
        }
    }
}

/// What the threads share of one window.
struct Shared {
    /// Where the next free piece begins; at or behind `end` there is none.
    next: AtomicU64,
    done: AtomicU64,
    end: u64,
    /// A stretch that is known to have no hole.
    data: Mutex<Range<u64>>,
}

/// The left edge of the tree: what was pushed, put together as far as more pieces cannot change it.
#[derive(Default)]
struct Subtrees {
    stack: Vec<ChainingValue>,
    pieces: u64,
}

impl Subtrees {
    fn push(&mut self, value: ChainingValue) {
        // A full binary tree for each one bit of their number. Not sooner than the next piece is here: the last two
        // that are put together make the root, which is hashed in another way.
        while self.stack.len() > self.pieces.count_ones() as usize {
            let (right, left) = (self.stack.pop(), self.stack.pop());
            if let (Some(left), Some(right)) = (left, right) {
                self.stack
                    .push(merge_subtrees_non_root(&left, &right, Mode::Hash));
            }
        }
        self.stack.push(value);
        self.pieces += 1;
    }

    /// `None` for a single piece, which has no parent.
    fn root(mut self) -> Option<ContentHash> {
        let mut right = self.stack.pop()?;
        loop {
            let left = self.stack.pop()?;
            if self.stack.is_empty() {
                let root = merge_subtrees_root(&left, &right, Mode::Hash);
                return Some(ContentHash::from_bytes(*root.as_bytes()));
            }
            right = merge_subtrees_non_root(&left, &right, Mode::Hash);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileExt, MetadataExt};

    fn filled(bytes: usize) -> (File, Vec<u8>) {
        let mut content = vec![0; bytes];
        blake3::Hasher::new()
            .update(&bytes.to_le_bytes())
            .finalize_xof()
            .fill(&mut content);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&content).unwrap();
        (file, content)
    }

    fn large(from: &File, bytes: u64) -> Large<'_> {
        Large {
            from: from.as_fd(),
            to: None,
            bytes,
            holes: Holes::Sought,
        }
    }

    #[test]
    fn pieces_make_the_hash_that_one_pass_makes() {
        const PIECE: usize = PIECE_BYTES as usize;
        // Every shape of the tree up to nine pieces, and lengths about each of their ends.
        for pieces in 1..=9 {
            for extra in [1, 1023, 1024, 1025, PIECE / 2 + 7, PIECE - 1, PIECE] {
                let bytes = pieces * PIECE + extra;
                let (file, content) = filled(bytes);
                for threads in [Threads::One, Threads::Several] {
                    let found = large(&file, bytes as u64).hash(threads, &mut |_| {});
                    assert_eq!(found.unwrap(), ContentHash::of(&content), "{bytes}");
                }
            }
        }
    }

    #[test]
    fn any_number_of_pieces_is_put_together_as_blake3_does() {
        // Pieces of one chunk each, so that there can be many.
        let content = vec![7; 1024 * 300];
        for chunks in 2..=300_usize {
            let mut subtrees = Subtrees::default();
            for chunk in 0..chunks {
                let mut hasher = blake3::Hasher::new();
                hasher.set_input_offset(chunk as u64 * 1024);
                hasher.update(&content[chunk * 1024..][..1024]);
                subtrees.push(hasher.finalize_non_root());
            }
            let expected = ContentHash::of(&content[..chunks * 1024]);
            assert_eq!(subtrees.root(), Some(expected), "{chunks}");
        }
    }

    #[test]
    fn a_copy_has_the_same_bytes_and_holes() {
        const LENGTH: u64 = 64 << 20;
        let from = tempfile::tempfile().unwrap();
        from.set_len(LENGTH).unwrap();
        from.write_all_at(b"begins", 0).unwrap();
        from.write_all_at(b"middle", LENGTH / 2 - 3).unwrap();
        from.write_all_at(b"ends", LENGTH - 4).unwrap();
        let to = tempfile::tempfile().unwrap();
        let job = Large {
            to: Some(to.as_fd()),
            ..large(&from, LENGTH)
        };
        let mut told = Vec::new();
        let found = job.hash(Threads::Several, &mut |bytes| told.push(bytes));
        let mut content = vec![0; LENGTH as usize];
        from.read_exact_at(&mut content, 0).unwrap();
        assert_eq!(found.unwrap(), ContentHash::of(&content));
        let mut copied = vec![1; LENGTH as usize];
        to.read_exact_at(&mut copied, 0).unwrap();
        assert!(copied == content);
        assert!(to.metadata().unwrap().blocks() * 512 < LENGTH / 8);
        assert!(told.is_sorted() && told.last() == Some(&LENGTH));
    }

    #[test]
    fn a_file_that_is_shorter_than_told_is_an_error() {
        let (file, _) = filled(9 << 20);
        for bytes in [(9 << 20) + 1, 64 << 20] {
            for threads in [Threads::One, Threads::Several] {
                let found = large(&file, bytes).hash(threads, &mut |_| {});
                assert_eq!(found.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            }
        }
    }
}
