//! Decompresses git's objects (RFC 1950 and 1951). The input is untrusted, the output is bounded, and no table is
//! larger than the format requires. This avoids executing git and adding a library.

/// Decompresses a zlib stream: all of it, or the first `bytes_max` bytes. `None` if it is damaged.
pub(super) fn decompress(packed: &[u8], bytes_max: usize) -> Option<Vec<u8>> {
    // The method must be 8, the header divisible by 31, and no preset dictionary in use.
    let head = u16::from_be_bytes([*packed.first()?, *packed.get(1)?]);
    if head >> 8 & 15 != 8 || head % 31 != 0 || head & 0x20 != 0 {
        return None;
    }
    let mut bits = Bits {
        bytes: &packed[2..],
        held: 0,
        count: 0,
    };
    let mut out = Vec::new();
    loop {
        let last = bits.take(1)? == 1;
        match bits.take(2)? {
            0 => read_stored_block(&mut bits, &mut out, bytes_max)?,
            1 => {
                let (literals, distances) = fixed_codes()?;
                read_compressed_block(&mut bits, &mut out, bytes_max, &literals, &distances)?;
            }
            2 => {
                let (literals, distances) = dynamic_codes(&mut bits)?;
                read_compressed_block(&mut bits, &mut out, bytes_max, &literals, &distances)?;
            }
            _ => return None,
        }
        if last || out.len() >= bytes_max {
            return Some(out);
        }
    }
}

/// Reads bits, starting at the low end of each byte.
struct Bits<'a> {
    bytes: &'a [u8],
    held: u32,
    count: u32,
}

impl Bits<'_> {
    /// Reads at most 16 bits.
    fn take(&mut self, count: u32) -> Option<u32> {
        while self.count < count {
            let (first, rest) = self.bytes.split_first()?;
            self.held |= u32::from(*first) << self.count;
            self.count += 8;
            self.bytes = rest;
        }
        let bits = self.held & ((1 << count) - 1);
        self.held >>= count;
        self.count -= count;
        Some(bits)
    }
}

fn read_stored_block(bits: &mut Bits<'_>, out: &mut Vec<u8>, bytes_max: usize) -> Option<()> {
    // The rest of the byte is padding. Fewer than eight bits are held, so nothing is lost.
    bits.take(bits.count % 8)?;
    let length = bits.take(16)?;
    if bits.take(16)? != length ^ 0xffff {
        return None;
    }
    let length = length as usize;
    let run = bits.bytes.get(..length)?;
    let room = bytes_max.saturating_sub(out.len());
    out.extend_from_slice(&run[..length.min(room)]);
    bits.bytes = &bits.bytes[length..];
    Some(())
}

const CODE_BITS_MAX: usize = 15;

/// A canonical Huffman code: the number of codes of each length, and the symbols in the order of their codes.
struct Code {
    counts: [u16; CODE_BITS_MAX + 1],
    symbols: Vec<u16>,
}

impl Code {
    /// `None` if the lengths need more codes than exist. Fewer are allowed, as in a code of one symbol.
    fn new(lengths: &[u8]) -> Option<Code> {
        let mut counts = [0u16; CODE_BITS_MAX + 1];
        for length in lengths {
            *counts.get_mut(usize::from(*length))? += 1;
        }
        counts[0] = 0;
        let mut left = 1i32;
        for count in &counts[1..] {
            left = (left << 1) - i32::from(*count);
            if left < 0 {
                return None;
            }
        }
        let mut next = [0u16; CODE_BITS_MAX + 2];
        for length in 1..=CODE_BITS_MAX {
            next[length + 1] = next[length] + counts[length];
        }
        let mut symbols = vec![0; lengths.len()];
        for (symbol, length) in lengths.iter().enumerate().filter(|(_, l)| **l != 0) {
            let place = &mut next[usize::from(*length)];
            symbols[usize::from(*place)] = symbol as u16;
            *place += 1;
        }
        Some(Code { counts, symbols })
    }

    fn symbol(&self, bits: &mut Bits<'_>) -> Option<u16> {
        let (mut code, mut first, mut index) = (0u32, 0u32, 0u32);
        for count in &self.counts[1..] {
            code |= bits.take(1)?;
            let count = u32::from(*count);
            if code < first + count {
                return self.symbols.get((index + code - first) as usize).copied();
            }
            index += count;
            first = (first + count) << 1;
            code <<= 1;
        }
        None
    }
}

fn fixed_codes() -> Option<(Code, Code)> {
    let mut lengths = [8u8; 288];
    lengths[144..256].fill(9);
    lengths[256..280].fill(7);
    Some((Code::new(&lengths)?, Code::new(&[5; 30])?))
}

fn dynamic_codes(bits: &mut Bits<'_>) -> Option<(Code, Code)> {
    /// The order in which the code lengths of the code-length code are stored.
    const ORDER: [usize; 19] = [
        16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15,
    ];
    let literals = bits.take(5)? as usize + 257;
    let distances = bits.take(5)? as usize + 1;
    let given = bits.take(4)? as usize + 4;
    if literals > 286 || distances > 30 {
        return None;
    }
    let mut lengths = [0u8; 19];
    for place in &ORDER[..given] {
        lengths[*place] = bits.take(3)? as u8;
    }
    let code = Code::new(&lengths)?;
    let mut lengths: Vec<u8> = Vec::with_capacity(literals + distances);
    while lengths.len() < literals + distances {
        let (length, times) = match code.symbol(bits)? {
            16 => (*lengths.last()?, 3 + bits.take(2)?),
            17 => (0, 3 + bits.take(3)?),
            18 => (0, 11 + bits.take(7)?),
            length => (length as u8, 1),
        };
        lengths.extend(std::iter::repeat_n(length, times as usize));
    }
    // A run may cross from the literal lengths to the distance lengths, but not go beyond both.
    let all = lengths.len() == literals + distances;
    let (first, second) = lengths.split_at(literals);
    match all {
        true => Some((Code::new(first)?, Code::new(second)?)),
        false => None,
    }
}

fn read_compressed_block(
    bits: &mut Bits<'_>,
    out: &mut Vec<u8>,
    bytes_max: usize,
    literals: &Code,
    distances: &Code,
) -> Option<()> {
    while out.len() < bytes_max {
        let symbol = usize::from(literals.symbol(bits)?);
        match symbol {
            0..256 => out.push(symbol as u8),
            256 => return Some(()),
            _ => {
                let length = run_length(bits, symbol - 257)?;
                let symbol = usize::from(distances.symbol(bits)?);
                let distance = run_distance(bits, symbol)?;
                let from = out.len().checked_sub(distance)?;
                // The run may overlap its own output.
                for at in from..from + length.min(bytes_max - out.len()) {
                    out.push(out[at]);
                }
            }
        }
    }
    Some(())
}

fn run_length(bits: &mut Bits<'_>, symbol: usize) -> Option<usize> {
    match symbol {
        0..8 => Some(symbol + 3),
        28 => Some(258),
        8..28 => {
            let extra = symbol as u32 / 4 - 1;
            let base = ((4 + symbol % 4) << extra) + 3;
            Some(base + bits.take(extra)? as usize)
        }
        _ => None,
    }
}

fn run_distance(bits: &mut Bits<'_>, symbol: usize) -> Option<usize> {
    match symbol {
        0..4 => Some(symbol + 1),
        4..30 => {
            let extra = symbol as u32 / 2 - 1;
            let base = ((2 + symbol % 2) << extra) + 1;
            Some(base + bits.take(extra)? as usize)
        }
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::process::{Command, Stdio};

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
                assert_eq!(decompress(&packed, 1 << 20).as_ref(), Some(bytes));
                let some = bytes.len() / 3;
                assert_eq!(decompress(&packed, some).as_deref(), Some(&bytes[..some]));
                if let Some(cut) = decompress(&packed[..packed.len() / 2], 1 << 20) {
                    assert!(bytes.starts_with(&cut));
                }
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_do_not_panic(body in proptest::collection::vec(proptest::num::u8::ANY, 0..400)) {
            let packed = [&[0x78, 0x9c], body.as_slice()].concat();
            proptest::prop_assert!(decompress(&packed, 5_000).is_none_or(|out| out.len() <= 5_000));
            let _ = decompress(&body, 5_000);
        }
    }
}
