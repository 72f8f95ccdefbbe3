//! Reads git's objects, loose and packed: a commit for its tree, a tree for its entries, a blob to compare with a
//! file. Objects that are damaged, too large or stored elsewhere (`objects/info/alternates`) count as unknown.
//!
//! Ids are not verified against content: whoever writes a project's `.git` can commit anything anyway.

use std::fs::File;
use std::os::unix::fs::FileExt;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{self as inflate, DecompressorOxide, inflate_flags};

use super::{InspectedDir, ReadBudget};

/// The most packs. A maintained repository has fewer.
const PACKS_MAX: usize = 200;
/// The longest delta chain. Git itself creates chains of up to 50.
const CHAIN_MAX: usize = 64;
/// The most bytes of one object, and of the deltas that lead to it. Commits and trees are far smaller; larger blobs
/// are not compared.
const OBJECT_BYTES_MAX: usize = 4 << 20;
/// How many compressed bytes to decompress between two looks at the clock.
const PIECE_BYTES: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectKind {
    Commit,
    Tree,
    Blob,
    Tag,
}

pub(super) struct GitObjects {
    dir: Option<InspectedDir>,
    packs: Option<Vec<Pack>>,
    id_bytes: usize,
}

impl GitObjects {
    /// The objects of a repository, given its common directory.
    pub(super) fn open(common: &InspectedDir, id_bytes: usize) -> GitObjects {
        GitObjects {
            dir: common.open_dir(b"objects").ok(),
            packs: None,
            id_bytes,
        }
    }

    /// Reads an object, if it is of this kind and there is time left.
    pub(super) fn read(
        &mut self,
        id: &[u8],
        kind: ObjectKind,
        budget: &mut ReadBudget,
    ) -> Option<Vec<u8>> {
        budget.has_time().then_some(())?;
        let (found, bytes) = match self.read_loose(id, budget) {
            Some(object) => object,
            None => self.read_packed(id, budget)?,
        };
        (found == kind).then_some(bytes)
    }

    fn read_loose(&self, id: &[u8], budget: &mut ReadBudget) -> Option<(ObjectKind, Vec<u8>)> {
        let name = super::hex(id);
        let path = format!("{}/{}", &name[..2], &name[2..]);
        let packed = self
            .dir
            .as_ref()?
            .read_whole(path.as_bytes(), OBJECT_BYTES_MAX)
            .ok()?;
        let mut bytes = decompress(&packed, OBJECT_BYTES_MAX + 32, budget)?;
        budget.spend(bytes.len())?;
        let head = bytes.iter().take(32).position(|b| *b == 0)?;
        let (kind, length) = std::str::from_utf8(&bytes[..head]).ok()?.split_once(' ')?;
        let kind = match kind {
            "commit" => ObjectKind::Commit,
            "tree" => ObjectKind::Tree,
            "blob" => ObjectKind::Blob,
            "tag" => ObjectKind::Tag,
            _ => return None,
        };
        let length: usize = length.parse().ok()?;
        bytes.drain(..=head);
        (bytes.len() == length).then_some((kind, bytes))
    }

    fn read_packed(&mut self, id: &[u8], budget: &mut ReadBudget) -> Option<(ObjectKind, Vec<u8>)> {
        let dir = self.dir.as_ref()?;
        let id_bytes = self.id_bytes;
        let packs = self.packs.get_or_insert_with(|| open_packs(dir, id_bytes));
        let mut found = packs.iter().filter_map(|pack| Some((pack, pack.find(id)?)));
        let (pack, mut offset) = found.next()?;
        // Go from the entry to the whole object on which it is based, then apply the deltas in reverse.
        let mut deltas: Vec<Vec<u8>> = Vec::new();
        let mut held = 0;
        for _ in 0..CHAIN_MAX {
            let entry = pack.entry(offset, budget)?;
            offset = match entry.base {
                DeltaBase::Whole(kind) => {
                    let whole = deltas.iter().rev().try_fold(entry.bytes, |base, delta| {
                        apply_delta(&base, delta).filter(|made| budget.spend(made.len()).is_some())
                    })?;
                    return Some((kind, whole));
                }
                DeltaBase::At(offset) => offset,
                // The base is in the same pack; only packs sent over a network refer to other packs.
                DeltaBase::Id(base) => pack.find(&base)?,
            };
            held += entry.bytes.len();
            if held > OBJECT_BYTES_MAX {
                return None;
            }
            deltas.push(entry.bytes);
        }
        None
    }
}

fn open_packs(dir: &InspectedDir, id_bytes: usize) -> Vec<Pack> {
    let open = || {
        let dir = dir.open_dir(b"pack").ok()?;
        let listing = dir.list(PACKS_MAX, |name| name.ends_with(b".idx")).ok()?;
        let packs = listing.names.iter().filter_map(|name| {
            let stem = name.to_bytes().strip_suffix(b".idx")?;
            let index = dir.open_file(name.to_bytes()).ok()?;
            let pack = dir.open_file(&[stem, b".pack"].concat()).ok()?;
            Pack::new(index, pack, id_bytes)
        });
        Some(packs.collect())
    };
    open().unwrap_or_default()
}

/// A pack and its index. Git writes only version 2 of the index since 2007.
struct Pack {
    index: File,
    pack: File,
    id_bytes: usize,
    count: u64,
}

enum DeltaBase {
    Whole(ObjectKind),
    At(u64),
    Id(Vec<u8>),
}

/// A whole object or, if it has a base, the delta to that base.
struct PackEntry {
    base: DeltaBase,
    bytes: Vec<u8>,
}

const FANOUT_AT: u64 = 8;
const IDS_AT: u64 = FANOUT_AT + 256 * 4;

impl Pack {
    fn new(index: File, pack: File, id_bytes: usize) -> Option<Pack> {
        if read_at::<8>(&index, 0)? != *b"\xfftOc\0\0\0\x02" || read_at::<4>(&pack, 0)? != *b"PACK"
        {
            return None;
        }
        let mut pack = Pack {
            index,
            pack,
            id_bytes,
            count: 0,
        };
        pack.count = pack.number(IDS_AT - 4)?;
        Some(pack)
    }

    /// The offset of the object in the pack.
    fn find(&self, id: &[u8]) -> Option<u64> {
        let first = u64::from(*id.first()?);
        let mut low = match first {
            0 => 0,
            _ => self.number(FANOUT_AT + (first - 1) * 4)?,
        };
        let mut high = self.number(FANOUT_AT + first * 4)?.min(self.count);
        let width = self.id_bytes as u64;
        let mut there = vec![0; self.id_bytes];
        while low < high {
            let middle = low + (high - low) / 2;
            self.index
                .read_exact_at(&mut there, IDS_AT + middle * width)
                .ok()?;
            match there.as_slice().cmp(id) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => return self.offset(middle),
            }
        }
        None
    }

    fn offset(&self, n: u64) -> Option<u64> {
        // After the ids come their checksums, then the offsets, then the 64-bit offsets.
        let offsets_at = IDS_AT + self.count * (self.id_bytes as u64 + 4);
        let short = self.number(offsets_at + n * 4)?;
        match short >> 31 {
            0 => Some(short),
            _ => {
                let long_at = offsets_at + self.count * 4 + (short & 0x7fff_ffff) * 8;
                Some(u64::from_be_bytes(read_at(&self.index, long_at)?))
            }
        }
    }

    /// A number of the index.
    fn number(&self, at: u64) -> Option<u64> {
        read_at(&self.index, at).map(|bytes| u64::from(u32::from_be_bytes(bytes)))
    }

    fn entry(&self, offset: u64, budget: &mut ReadBudget) -> Option<PackEntry> {
        let mut head = [0; 64];
        let got = self.pack.read_at(&mut head, offset).ok()?;
        let mut bytes = &head[..got];
        let first = bytes.split_off_first()?;
        let mut size = usize::from(first & 15);
        if first & 0x80 != 0 {
            size |= read_size(&mut bytes)? << 4;
        }
        let base = match first >> 4 & 7 {
            1 => DeltaBase::Whole(ObjectKind::Commit),
            2 => DeltaBase::Whole(ObjectKind::Tree),
            3 => DeltaBase::Whole(ObjectKind::Blob),
            4 => DeltaBase::Whole(ObjectKind::Tag),
            6 => DeltaBase::At(offset.checked_sub(read_distance(&mut bytes)?)?),
            7 => DeltaBase::Id(bytes.split_off(..self.id_bytes)?.to_vec()),
            _ => return None,
        };
        if size > OBJECT_BYTES_MAX {
            return None;
        }
        let begins = offset + (got - bytes.len()) as u64;
        // Incompressible data is stored with at most 5 extra bytes per 64 KiB, and 6 around it.
        let mut packed = vec![0; size + size / 1024 + 64];
        let got = self.pack.read_at(&mut packed, begins).ok()?;
        let bytes = decompress(&packed[..got], size, budget)?;
        budget.spend(bytes.len())?;
        (bytes.len() == size).then_some(PackEntry { base, bytes })
    }
}

fn read_at<const N: usize>(file: &File, offset: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

/// Decompresses a zlib stream: all of it, or the first `bytes_max` bytes. `None` if it is damaged, or if the time is over:
/// a stream of empty blocks takes long and yields nothing.
fn decompress(packed: &[u8], bytes_max: usize, budget: &ReadBudget) -> Option<Vec<u8>> {
    let flags = inflate_flags::TINFL_FLAG_PARSE_ZLIB_HEADER
        | inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let mut state = DecompressorOxide::new();
    let mut bytes = vec![0; bytes_max];
    let (mut read, mut written) = (0, 0);
    while budget.has_time() {
        let end = packed.len().min(read + PIECE_BYTES);
        let more = match end < packed.len() {
            true => inflate_flags::TINFL_FLAG_HAS_MORE_INPUT,
            false => 0,
        };
        let (status, took, made) = inflate::decompress(
            &mut state,
            &packed[read..end],
            &mut bytes,
            written,
            flags | more,
        );
        (read, written) = (read + took, written + made);
        match status {
            TINFLStatus::Done | TINFLStatus::HasMoreOutput => {
                bytes.truncate(written);
                return Some(bytes);
            }
            TINFLStatus::NeedsMoreInput if took > 0 => {}
            _ => return None,
        }
    }
    None
}

/// Reads a distance: seven bits at a time, the highest first, with one added to each but the last. Packs state the
/// distance to a base so, and indexes of version 4 what to drop from a path.
pub(super) fn read_distance(bytes: &mut &[u8]) -> Option<u64> {
    let mut distance = 0u64;
    for _ in 0..9 {
        let byte = bytes.split_off_first()?;
        distance = distance << 7 | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            return Some(distance);
        }
        distance += 1;
    }
    None
}

/// Applies a delta to its base.
fn apply_delta(base: &[u8], mut delta: &[u8]) -> Option<Vec<u8>> {
    if read_size(&mut delta)? != base.len() {
        return None;
    }
    let length = read_size(&mut delta)?;
    if length > OBJECT_BYTES_MAX {
        return None;
    }
    let mut made = Vec::with_capacity(length);
    while let Some(order) = delta.split_off_first() {
        match order {
            0 => return None,
            1..0x80 => made.extend_from_slice(delta.split_off(..usize::from(*order))?),
            _ => {
                // A bit for each byte that is present: four of the offset, three of the length.
                let mut numbers = [0; 7];
                for (bit, number) in numbers.iter_mut().enumerate() {
                    if order >> bit & 1 == 1 {
                        *number = *delta.split_off_first()?;
                    }
                }
                let [a, b, c, d, e, f, g] = numbers;
                let from = u32::from_le_bytes([a, b, c, d]) as usize;
                let count = match u32::from_le_bytes([e, f, g, 0]) as usize {
                    0 => 0x1_0000,
                    count => count,
                };
                made.extend_from_slice(base.get(from..from.checked_add(count)?)?);
            }
        }
        if made.len() > length {
            return None;
        }
    }
    (made.len() == length).then_some(made)
}

fn read_size(bytes: &mut &[u8]) -> Option<usize> {
    let mut size = 0;
    for shift in (0..35).step_by(7) {
        let first = bytes.split_off_first()?;
        size |= usize::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(size);
        }
    }
    None
}

/// One entry of a tree.
pub(super) struct TreeEntry<'a> {
    pub(super) mode: u32,
    pub(super) name: &'a [u8],
    pub(super) id: &'a [u8],
}

/// The entries of a tree in their order; `None` if the tree is damaged.
pub(super) fn tree_entries(tree: &[u8], id_bytes: usize) -> Option<Vec<TreeEntry<'_>>> {
    let mut entries = Vec::new();
    let mut rest = tree;
    while !rest.is_empty() {
        let head = rest.split_off(..rest.iter().position(|b| *b == 0)?)?;
        let space = head.iter().position(|b| *b == b' ')?;
        let mode = std::str::from_utf8(&head[..space]).ok()?;
        rest.split_off_first()?;
        entries.push(TreeEntry {
            mode: u32::from_str_radix(mode, 8).ok()?,
            name: &head[space + 1..],
            id: rest.split_off(..id_bytes)?,
        });
    }
    Some(entries)
}

/// The tree of a commit: its first line.
pub(super) fn tree_id_of_commit(commit: &[u8]) -> Option<Vec<u8>> {
    let line = commit.split(|b| *b == b'\n').next()?;
    super::unhex(line.strip_prefix(b"tree ")?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    fn ample() -> ReadBudget {
        ReadBudget::new(Duration::from_secs(600))
    }

    /// Compresses with zlib itself, through Python.
    fn compress(bytes: &[u8], level: u32, strategy: u32) -> Vec<u8> {
        let program = format!(
            "import sys, zlib\nc = zlib.compressobj({level}, strategy={strategy})\n\
             sys.stdout.buffer.write(c.compress(sys.stdin.buffer.read()) + c.flush())"
        );
        let mut python = Command::new("/usr/bin/python3")
            .args(["-I", "-c", &program])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        python.stdin.take().unwrap().write_all(bytes).unwrap();
        python.wait_with_output().unwrap().stdout
    }

    #[test]
    fn data_compressed_by_zlib_is_decompressed() {
        let mut noise = 1u32;
        let mut random = || {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (noise >> 24) as u8
        };
        let noisy: Vec<u8> = (0..70_000).map(|_| random()).collect();
        let text: Vec<u8> = (0..9_000u32)
            .flat_map(|n| format!("{} ", n * n % 977).into_bytes())
            .collect();
        let kinds = [Vec::new(), b"a".to_vec(), vec![b'x'; 100_000], noisy, text];
        for bytes in &kinds {
            // Stored, fast and best; the default strategy, Huffman only, and fixed codes.
            for (level, strategy) in [(0, 0), (1, 0), (9, 0), (9, 2), (9, 4)] {
                let packed = compress(bytes, level, strategy);
                assert_eq!(decompress(&packed, 1 << 20, &ample()).as_ref(), Some(bytes));
                let some = bytes.len() / 3;
                assert_eq!(
                    decompress(&packed, some, &ample()).as_deref(),
                    Some(&bytes[..some])
                );
                if let Some(cut) = decompress(&packed[..packed.len() / 2], 1 << 20, &ample()) {
                    assert!(bytes.starts_with(&cut));
                }
            }
        }
    }

    #[test]
    fn a_stream_that_takes_long_and_yields_little_is_given_up() {
        let stream = |times: usize| {
            // Four empty blocks with fixed codes, of ten bits each.
            let blocks = (1u64 << 1 | 1 << 11 | 1 << 21 | 1 << 31).to_le_bytes();
            let mut packed = vec![0x78, 0x9c];
            for _ in 0..times {
                packed.extend(&blocks[..5]);
            }
            // The last block has the byte `x`, without compression; its checksum follows.
            packed.extend([1, 1, 0, 0xfe, 0xff, b'x', 0, 0x79, 0, 0x79]);
            packed
        };
        let short = decompress(&stream(2), 10, &ample());
        assert_eq!(short.as_deref(), Some(&b"x"[..]));
        let budget = ReadBudget::new(Duration::from_millis(300));
        assert_eq!(decompress(&stream(OBJECT_BYTES_MAX / 5), 10, &budget), None);
    }

    #[test]
    fn a_delta_copies_and_inserts() {
        let base = b"hello wonderful world";
        // From 21 to 17 bytes: copy 6 from 0, insert "small", copy 6 from 15.
        let delta = [
            21,
            17,
            0b1001_0000,
            6,
            5,
            b's',
            b'm',
            b'a',
            b'l',
            b'l',
            0b1001_0001,
            15,
            6,
        ];
        assert_eq!(apply_delta(base, &delta).unwrap(), b"hello small world");
        for end in 0..delta.len() {
            assert_eq!(apply_delta(base, &delta[..end]), None);
        }
        assert_eq!(apply_delta(b"other", &delta), None);
    }

    proptest::proptest! {
        #[test]
        fn any_compressed_bytes_do_not_panic(body in proptest::collection::vec(proptest::num::u8::ANY, 0..400)) {
            let packed = [&[0x78, 0x9c], body.as_slice()].concat();
            proptest::prop_assert!(decompress(&packed, 5_000, &ample()).is_none_or(|out| out.len() <= 5_000));
            let _ = decompress(&body, 5_000, &ample());
        }

        #[test]
        fn any_bytes_do_not_panic(base in proptest::collection::vec(proptest::num::u8::ANY, 0..40),
                                  delta in proptest::collection::vec(proptest::num::u8::ANY, 0..80)) {
            let _ = apply_delta(&base, &delta);
            let _ = apply_delta(&base, &[&[base.len() as u8, 50], delta.as_slice()].concat());
            let _ = tree_entries(&delta, 20);
            let _ = tree_id_of_commit(&delta);
            let _ = read_distance(&mut delta.as_slice());
        }
    }
}
