//! Captures what a program prints, within a bound.
//!
//! A stream keeps its beginning and its end. The first half of the limit is the head. What follows goes through a queue
//! that holds the rest of the limit, and bytes that fall out of the queue are counted. So an endless line or
//! gigabytes of output cost no more than the limit.

use std::collections::VecDeque;

use store::types::escaping::escape_text;

/// One stream while it is captured.
#[derive(Debug)]
pub struct LogCapture {
    limit_bytes: usize,
    head: Vec<u8>,
    head_open: bool,
    tail: VecDeque<u8>,
    total_bytes: u64,
}

/// Bytes that a program has just printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputChunk<'a> {
    /// All the bytes.
    pub bytes: &'a [u8],
    /// The part of `bytes` that belongs to the head. Of later bytes only the end is kept, and which bytes those are is
    /// known at the end.
    pub head: &'a [u8],
}

/// One stream after its end: `head`, then `dropped_bytes` that are gone, then `tail`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapturedLog {
    /// The beginning of the stream.
    pub head: Vec<u8>,
    /// How many bytes between `head` and `tail` were dropped.
    pub dropped_bytes: u64,
    /// What is kept of the rest of the stream: its end.
    pub tail: Vec<u8>,
    /// How many bytes the program printed.
    pub total_bytes: u64,
    /// Whether bytes were dropped.
    pub truncated: bool,
}

impl LogCapture {
    /// Invariant: at most `limit_bytes` of the stream are kept.
    pub fn new(limit_bytes: usize) -> Self {
        LogCapture {
            limit_bytes,
            head: Vec::new(),
            head_open: true,
            tail: VecDeque::new(),
            total_bytes: 0,
        }
    }

    /// Takes the next bytes of the stream.
    pub fn push<'a>(&mut self, bytes: &'a [u8]) -> OutputChunk<'a> {
        self.total_bytes += bytes.len() as u64;
        let (head, rest) = bytes.split_at(self.head_share(bytes));
        self.head.extend_from_slice(head);
        if !rest.is_empty() {
            self.head_open = false;
            let tail_max = self.limit_bytes - self.head.len();
            let rest = &rest[rest.len().saturating_sub(tail_max)..];
            let over = (self.tail.len() + rest.len()).saturating_sub(tail_max);
            self.tail.drain(..over);
            self.tail.extend(rest);
        }
        OutputChunk { bytes, head }
    }

    /// Ends the stream, and returns what is kept of it.
    pub fn finish(mut self) -> CapturedLog {
        let kept = self.head.len() as u64 + self.tail.len() as u64;
        let truncated = self.total_bytes > kept;
        if truncated {
            // Drop the end of a character whose beginning is gone: it would show as damage.
            let first = self.tail.iter().take(3);
            let broken = first.take_while(|b| is_continuation(**b)).count();
            self.tail.drain(..broken);
        }
        let kept = self.head.len() as u64 + self.tail.len() as u64;
        CapturedLog {
            head: self.head,
            dropped_bytes: self.total_bytes - kept,
            tail: self.tail.into(),
            total_bytes: self.total_bytes,
            truncated,
        }
    }

    /// How many of `bytes` belong to the head: the rest of the head's half, and the end of a character that would be
    /// cut there, if the limit allows.
    fn head_share(&self, bytes: &[u8]) -> usize {
        if !self.head_open {
            return 0;
        }
        let head_max = self.limit_bytes / 2;
        let share = bytes.len().min(head_max.saturating_sub(self.head.len()));
        if share == bytes.len() {
            return share;
        }
        let from = share.saturating_sub(3);
        let mut last = self.head[self.head.len().saturating_sub(3)..].to_vec();
        last.extend_from_slice(&bytes[from..share]);
        let missing = missing_continuations(&last);
        let room = self.limit_bytes - self.head.len() - share;
        let next = bytes[share..].iter().take(missing);
        let given = next.take_while(|b| is_continuation(**b)).count();
        match missing <= room {
            true => share + given,
            false => share,
        }
    }
}

impl CapturedLog {
    /// The line that stands for the dropped bytes, if there are any.
    pub fn note(&self, stream: &str) -> Option<String> {
        let bytes = group_digits(self.dropped_bytes);
        self.truncated
            .then(|| format!("[fumehood: {bytes} bytes of {stream} not shown]"))
    }

    /// The stream for a JSON document, see [`escape_text`]. A gap is marked by the note with a backslash before it. A
    /// program cannot forge that, because its own backslashes are doubled.
    pub fn text(&self, stream: &str) -> String {
        let Some(note) = self.note(stream) else {
            return escape_text(&[self.head.as_slice(), &self.tail].concat());
        };
        let (head, tail) = (escape_text(&self.head), escape_text(&self.tail));
        format!("{head}\n\\{note}\n{tail}")
    }
}

fn is_continuation(byte: u8) -> bool {
    byte & 0xc0 == 0x80
}

/// How many bytes the last character still lacks; 0 if it is complete or not a character.
fn missing_continuations(bytes: &[u8]) -> usize {
    let last = bytes.iter().rev().take(3);
    let after = last.take_while(|b| is_continuation(**b)).count();
    let Some(lead) = bytes.len().checked_sub(after + 1).map(|at| bytes[at]) else {
        return 0;
    };
    let length = match lead {
        0xc2..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xf4 => 4,
        _ => 1,
    };
    usize::saturating_sub(length, after + 1)
}

/// 1234567 as `1,234,567`.
fn group_digits(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use store::types::escaping::unescape_text;

    fn capture(limit_bytes: usize, chunks: &[Vec<u8>]) -> (Vec<u8>, CapturedLog) {
        let mut capture = LogCapture::new(limit_bytes);
        let live = chunks
            .iter()
            .flat_map(|c| capture.push(c).head)
            .copied()
            .collect();
        (live, capture.finish())
    }

    #[test]
    fn a_short_stream_is_kept_whole() {
        let (live, got) = capture(100, &[b"hello ".to_vec(), b"world\n".to_vec()]);
        assert_eq!(live, b"hello world\n");
        assert_eq!(
            (got.truncated, got.dropped_bytes, got.total_bytes),
            (false, 0, 12)
        );
        assert_eq!(got.note("stdout"), None);
        assert_eq!(got.text("stdout"), "hello world\n");
    }

    #[test]
    fn a_long_stream_keeps_both_ends_and_says_what_is_missing() {
        let (live, got) = capture(10, &[b"0123456789".to_vec(), b"abcdefghij".to_vec()]);
        assert_eq!(live, b"01234");
        assert_eq!(
            (got.head.as_slice(), got.tail.as_slice()),
            (&b"01234"[..], &b"fghij"[..])
        );
        assert_eq!(
            got.note("stderr").as_deref(),
            Some("[fumehood: 10 bytes of stderr not shown]")
        );
        let text = got.text("stderr");
        assert_eq!(
            text,
            "01234\n\\[fumehood: 10 bytes of stderr not shown]\nfghij"
        );
        assert_eq!(
            unescape_text(&text),
            None,
            "a gap is no text the program could have printed"
        );
    }

    #[test]
    fn characters_are_not_cut_at_the_seams() {
        let text = "ééééééééééééé".as_bytes();
        for limit_bytes in 4..text.len() {
            for chunk in 1..5 {
                let chunks: Vec<_> = text.chunks(chunk).map(<[u8]>::to_vec).collect();
                let (_, got) = capture(limit_bytes, &chunks);
                assert!(
                    std::str::from_utf8(&got.head).is_ok(),
                    "limit {limit_bytes}"
                );
                assert!(
                    std::str::from_utf8(&got.tail).is_ok(),
                    "limit {limit_bytes}"
                );
            }
        }
    }

    #[test]
    fn endless_output_costs_bounded_memory() {
        let mut capture = LogCapture::new(1 << 16);
        let chunk = vec![b'x'; 1 << 20];
        for _ in 0..1000 {
            capture.push(&chunk);
        }
        assert!(capture.head.capacity() + capture.tail.capacity() <= 1 << 18);
        assert_eq!(capture.finish().total_bytes, 1000 << 20);
    }

    #[test]
    fn numbers_are_grouped_by_thousands() {
        let all: Vec<_> = [0, 999, 1000, 1_234_567].map(group_digits).to_vec();
        assert_eq!(all, ["0", "999", "1,000", "1,234,567"]);
    }

    proptest! {
        #[test]
        fn equals_a_naive_model(
            limit_bytes in 0usize..64,
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..12),
        ) {
            let all = chunks.concat();
            let (live, got) = capture(limit_bytes, &chunks);
            prop_assert_eq!(&live, &got.head);
            prop_assert!(all.starts_with(&got.head));
            prop_assert!(all.ends_with(&got.tail));
            let kept = got.head.len() + got.tail.len();
            prop_assert!(kept <= limit_bytes);
            prop_assert_eq!(kept as u64 + got.dropped_bytes, got.total_bytes);
            prop_assert_eq!(got.total_bytes, all.len() as u64);
            prop_assert_eq!(got.truncated, got.dropped_bytes > 0);
            prop_assert_eq!(got.truncated, all.len() > limit_bytes);
            if got.truncated {
                prop_assert!(kept + 3 >= limit_bytes, "no more is dropped than must be");
                prop_assert!(got.head.len() >= limit_bytes / 2);
                prop_assert!(got.head.len() <= limit_bytes / 2 + 3);
            }
        }

        #[test]
        fn the_division_into_chunks_changes_nothing(
            text in "[a-zé日😀]{0,60}", limit_bytes in 0usize..64, chunk in 1usize..9,
        ) {
            let chunks: Vec<_> = text.as_bytes().chunks(chunk).map(<[u8]>::to_vec).collect();
            let whole = capture(limit_bytes, &[text.as_bytes().to_vec()]);
            prop_assert_eq!(capture(limit_bytes, &chunks), whole);
        }
    }
}
