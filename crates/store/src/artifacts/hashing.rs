//! Hashes files, large ones with several threads.
//!
//! blake3 is a tree of hashes, so pieces of a file can be hashed separately and combined. The result is the same hash
//! that one thread would compute; the tests compare them. The `blake3` crate's own functions for this need the whole
//! file mapped into memory (if the file is truncated meanwhile, SIGBUS kills the process) or a permanent thread pool.
//! Here each thread reads its own pieces and ends with the file.
//!
//! Invariant: the length of a piece is a power of two of blake3's chunks, and only the last piece may be shorter. So
//! every piece is one whole subtree.

use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};

use super::files::{self, HoleHandling};
use crate::types::manifest::ContentHash;

const PIECE_BYTES: u64 = 1 << 20;
/// From this size on, threads are worth their cost: starting one costs as much as hashing about 100 kB.
pub const LARGE_BYTES: u64 = 4 << 20;
/// Threads are started anew for each window of the file, which limits how many piece hashes are in memory.
const WINDOW_BYTES: u64 = 4096 * PIECE_BYTES;
/// While copying, writeback to disk starts after every part of this size, so that the later sync has less left to do.
const WRITEBACK_BYTES: u64 = 16 * PIECE_BYTES;
/// More threads would exceed the bandwidth of memory, and the host has other work.
const THREADS_MAX: usize = 8;

/// How many threads to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashThreads {
    /// Only the caller's thread. Used for inputs, before the program starts.
    One,
    /// As many as there are processors, up to a bound.
    PerProcessor,
}

impl HashThreads {
    fn count(self) -> usize {
        match self {
            HashThreads::One => 1,
            HashThreads::PerProcessor => {
                std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS_MAX))
            }
        }
    }
}

/// A file whose first `bytes` are hashed and, if `to` is given, copied to the same offsets there, without the holes.
#[derive(Clone, Copy)]
pub struct LargeFile<'a> {
    /// The file to read.
    pub from: BorrowedFd<'a>,
    /// The file to copy to, if the content is to be copied.
    pub to: Option<BorrowedFd<'a>>,
    /// How many bytes to read.
    pub bytes: u64,
    /// What to do with holes.
    pub holes: HoleHandling,
}

impl LargeFile<'_> {
    /// Hashes the file. Calls `progress` from time to time, on the caller's thread, with the number of bytes done.
    /// `bytes` must be at least [`LARGE_BYTES`].
    pub fn hash(
        &self,
        threads: HashThreads,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<ContentHash> {
        if let Some(to) = self.to {
            rustix::fs::ftruncate(to, self.bytes)?;
        }
        let mut subtrees = Subtrees::default();
        let mut at = 0;
        while at < self.bytes {
            let end = self.bytes.min(at.saturating_add(WINDOW_BYTES));
            for value in self.hash_window(at..end, threads.count(), progress)? {
                subtrees.push(value);
            }
            at = end;
            progress(at);
        }
        subtrees
            .root()
            .ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// The hashes of the pieces of a window, in order.
    fn hash_window(
        &self,
        window: Range<u64>,
        threads: usize,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<Vec<ChainingValue>> {
        let shared = WindowProgress {
            next: AtomicU64::new(window.start),
            done: AtomicU64::new(window.start),
            end: window.end,
            data: Mutex::new(0..0),
        };
        let pieces = (window.end - window.start).div_ceil(PIECE_BYTES);
        let helpers = (threads as u64).min(pieces).saturating_sub(1);
        let mut hashed = std::thread::scope(|scope| -> io::Result<Vec<(u64, ChainingValue)>> {
            let help = |_| {
                let work = || self.hash_pieces(&shared, &mut |_| {});
                // If the host refuses another thread, hashing is merely slower.
                std::thread::Builder::new().spawn_scoped(scope, work).ok()
            };
            let helpers: Vec<_> = (0..helpers).filter_map(help).collect();
            let mut hashed = self.hash_pieces(&shared, progress);
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

    /// Whether to look for holes in this piece. On tmpfs the kernel walks all pages up to the next hole. Doing that
    /// for each piece of a large file without holes took longer than all the rest, so the last range of data is
    /// remembered.
    fn holes_in(&self, piece: &Range<u64>, shared: &WindowProgress) -> HoleHandling {
        if self.holes == HoleHandling::ReadAsZeros {
            return HoleHandling::ReadAsZeros;
        }
        let within = |data: &Range<u64>| data.start <= piece.start && piece.end <= data.end;
        let mut data = shared.data.lock().unwrap_or_else(PoisonError::into_inner);
        if !within(&data)
            && let Ok((start, end)) = files::next_data(self.from, piece.start, self.bytes)
        {
            *data = start..end;
        }
        match within(&data) {
            true => HoleHandling::ReadAsZeros,
            false => HoleHandling::Skip,
        }
    }

    /// Asks the kernel to start writing the part that ends here. Data that other threads have not written yet is
    /// written by the later sync.
    fn start_writeback(&self, end: u64) {
        if let Some(to) = self.to
            && end.is_multiple_of(WRITEBACK_BYTES)
        {
            let length = NonZeroU64::new(WRITEBACK_BYTES);
            let advice = rustix::fs::Advice::DontNeed;
            let _ = rustix::fs::fadvise(to, end - WRITEBACK_BYTES, length, advice);
        }
    }

    /// Hashes one free piece after another. After a failure no pieces are left for the other threads, so that they
    /// end soon.
    fn hash_pieces(
        &self,
        shared: &WindowProgress,
        progress: &mut dyn FnMut(u64),
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
            let read = files::read_range(self.from, self.to, piece, holes, &mut buffer, &mut see);
            if let Err(error) = read {
                shared.next.store(shared.end, Ordering::Relaxed);
                return Err(error);
            }
            hashed.push((start, hasher.finalize_non_root()));
            self.start_writeback(start + bytes);
            progress(shared.done.fetch_add(bytes, Ordering::Relaxed) + bytes);
        }
    }
}

/// Whether a file has this length and hash. Reads the whole file.
pub(crate) fn is_content(file: BorrowedFd<'_>, hash: &ContentHash, bytes: u64) -> io::Result<bool> {
    if files::length(file)? != bytes {
        return Ok(false);
    }
    match hash_of(file, bytes) {
        Ok(found) => Ok(found == *hash),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e),
    }
}

pub(crate) fn hash_of(file: BorrowedFd<'_>, bytes: u64) -> io::Result<ContentHash> {
    read_hashed(file, None, bytes)
}

/// Hashes the first `bytes` of a file. If `to` is given, writes the data to the same offsets there, without the
/// holes. A file that is too short is an error.
pub(crate) fn read_hashed(
    from: BorrowedFd<'_>,
    to: Option<BorrowedFd<'_>>,
    bytes: u64,
) -> io::Result<ContentHash> {
    if bytes >= LARGE_BYTES {
        let large = LargeFile {
            from,
            to,
            bytes,
            holes: HoleHandling::Skip,
        };
        return large.hash(HashThreads::PerProcessor, &mut |_| {});
    }
    let mut hasher = blake3::Hasher::new();
    files::read_through(from, to, bytes, &mut |chunk| {
        hasher.update(chunk);
    })?;
    Ok(ContentHash::from_bytes(*hasher.finalize().as_bytes()))
}

/// What the threads of one window share.
struct WindowProgress {
    /// The start of the next free piece. At or beyond `end` there is none.
    next: AtomicU64,
    done: AtomicU64,
    end: u64,
    /// A range that is known to have no hole.
    data: Mutex<Range<u64>>,
}

/// The left edge of the tree: the hashes so far, merged as far as further pieces cannot change the result.
#[derive(Default)]
struct Subtrees {
    stack: Vec<ChainingValue>,
    pieces: u64,
}

impl Subtrees {
    fn push(&mut self, value: ChainingValue) {
        // After n pieces the stack holds one full binary tree for each one bit of n. Merge only when the next piece
        // arrives: the last merge makes the root, which is hashed differently.
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

    fn large(from: &File, bytes: u64) -> LargeFile<'_> {
        LargeFile {
            from: from.as_fd(),
            to: None,
            bytes,
            holes: HoleHandling::Skip,
        }
    }

    #[test]
    fn pieces_make_the_hash_that_one_pass_makes() {
        const PIECE: usize = PIECE_BYTES as usize;
        // Every shape of the tree up to nine pieces, with lengths near the boundaries of pieces.
        for pieces in 1..=9 {
            for extra in [1, 1023, 1024, 1025, PIECE / 2 + 7, PIECE - 1, PIECE] {
                let bytes = pieces * PIECE + extra;
                let (file, content) = filled(bytes);
                for threads in [HashThreads::One, HashThreads::PerProcessor] {
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
        let job = LargeFile {
            to: Some(to.as_fd()),
            ..large(&from, LENGTH)
        };
        let mut told = Vec::new();
        let found = job.hash(HashThreads::PerProcessor, &mut |bytes| told.push(bytes));
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
            for threads in [HashThreads::One, HashThreads::PerProcessor] {
                let found = large(&file, bytes).hash(threads, &mut |_| {});
                assert_eq!(found.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            }
        }
    }
}
