//! Makes program output safe for a terminal as it arrives.
//!
//! A terminal acts on what it receives: escape sequences set its title, send input as if somebody typed, move the
//! cursor over earlier lines, or write the clipboard. [`TerminalFilter`] passes the few sequences that programs need
//! for colours and progress bars, and spells out all others.

use store::types::escaping::is_misleading;

/// The longest colour sequence that passes. Programs send at most about forty bytes (both colours as RGB, and
/// attributes).
const SEQUENCE_BYTES_MAX: usize = 64;
const ESCAPE: u8 = 0x1b;
const RESET: &[u8] = b"\x1b[0m";

/// The filter of one stream. These pass: text, line feed, carriage return, tab, backspace, colours (`CSI … m` with
/// digits, `;` and `:`), and erasing in the line (`CSI K`). The bytes of everything else are spelled out, as
/// [`escape_terminal`](store::types::escaping::escape_terminal) does.
///
/// Invariant: how the stream is cut into pieces does not change what is shown, and at most `SEQUENCE_BYTES_MAX` bytes
/// wait for the piece that completes them.
#[derive(Debug, Default)]
pub struct TerminalFilter {
    /// The start of a character or sequence whose end has not arrived.
    held: Vec<u8>,
    /// Whether the last colour sequence set a colour or attribute.
    coloured: bool,
}

/// What some bytes start with.
enum Token {
    /// This many bytes pass unchanged.
    Pass(usize),
    /// This many bytes pass unchanged. They set colours, or reset them.
    Colour { len: usize, set: bool },
    /// This many bytes are spelled out one by one.
    Bytes(usize),
    /// A character of this many bytes is spelled out.
    Character(char, usize),
    /// More bytes are needed to decide.
    Incomplete,
}

impl TerminalFilter {
    /// Appends to `shown` what may be shown of the stream's next bytes.
    pub fn push(&mut self, bytes: &[u8], shown: &mut Vec<u8>) {
        if self.held.is_empty() {
            return self.filter(bytes, shown);
        }
        let mut all = std::mem::take(&mut self.held);
        all.extend_from_slice(bytes);
        self.filter(&all, shown);
    }

    /// To be called before another writer uses the terminal: spells out the held bytes and resets the colours.
    pub fn interrupt(&mut self, shown: &mut Vec<u8>) {
        for byte in std::mem::take(&mut self.held) {
            spell_byte(byte, shown);
        }
        if std::mem::take(&mut self.coloured) {
            shown.extend_from_slice(RESET);
        }
    }

    fn filter(&mut self, mut rest: &[u8], shown: &mut Vec<u8>) {
        while !rest.is_empty() {
            let len = match token(rest) {
                Token::Pass(len) => {
                    shown.extend_from_slice(&rest[..len]);
                    len
                }
                Token::Colour { len, set } => {
                    shown.extend_from_slice(&rest[..len]);
                    self.coloured = set;
                    len
                }
                Token::Bytes(len) => {
                    rest[..len].iter().for_each(|b| spell_byte(*b, shown));
                    len
                }
                Token::Character(c, len) => {
                    shown.extend_from_slice(format!("\\u{{{:x}}}", u32::from(c)).as_bytes());
                    len
                }
                Token::Incomplete => {
                    self.held = rest.to_vec();
                    return;
                }
            };
            rest = &rest[len..];
        }
    }
}

fn spell_byte(byte: u8, shown: &mut Vec<u8>) {
    shown.extend_from_slice(format!("\\x{byte:02x}").as_bytes());
}

fn token(bytes: &[u8]) -> Token {
    let plain = bytes.iter().position(|b| !passes_alone(*b));
    match plain.unwrap_or(bytes.len()) {
        0 if bytes[0] == ESCAPE => sequence(bytes),
        0 if bytes[0].is_ascii() => Token::Bytes(1),
        0 => character(bytes),
        len => Token::Pass(len),
    }
}

fn passes_alone(byte: u8) -> bool {
    matches!(byte, b' '..=b'~' | b'\n' | b'\r' | b'\t' | 0x08)
}

/// `bytes` starts with ESC. If a sequence does not pass, only its ESC is spelled out; without it the rest is plain
/// text.
fn sequence(bytes: &[u8]) -> Token {
    match bytes.get(1) {
        None => return Token::Incomplete,
        Some(b'[') => {}
        Some(_) => return Token::Bytes(1),
    }
    let parameter = |b: &&u8| matches!(b, b'0'..=b'9' | b';' | b':');
    let parameters = bytes[2..].iter().take_while(parameter).count();
    let len = 2 + parameters + 1;
    if len > SEQUENCE_BYTES_MAX {
        return Token::Bytes(1);
    }
    match bytes.get(len - 1) {
        None => Token::Incomplete,
        Some(b'm') => Token::Colour {
            len,
            set: bytes[2..len - 1].iter().any(|b| matches!(b, b'1'..=b'9')),
        },
        Some(b'K') if bytes[2..len - 1].iter().all(u8::is_ascii_digit) => Token::Pass(len),
        Some(_) => Token::Bytes(1),
    }
}

/// `bytes` starts with a byte that is not ASCII.
fn character(bytes: &[u8]) -> Token {
    let first = &bytes[..bytes.len().min(4)];
    let valid = match std::str::from_utf8(first) {
        Ok(text) => text,
        Err(e) => match (e.valid_up_to(), e.error_len()) {
            (0, None) => return Token::Incomplete,
            (0, Some(len)) => return Token::Bytes(len),
            (valid, _) => std::str::from_utf8(&first[..valid]).unwrap_or_default(),
        },
    };
    match valid.chars().next() {
        // The zero-width joiner and non-joiner belong to the spelling of several languages and to many emoji.
        Some(c) if is_misleading(c) && !matches!(c, '\u{200c}' | '\u{200d}') => {
            Token::Character(c, c.len_utf8())
        }
        Some(c) => Token::Pass(c.len_utf8()),
        None => Token::Bytes(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shown(pieces: &[&[u8]]) -> String {
        let (mut filter, mut shown) = (TerminalFilter::default(), Vec::new());
        for piece in pieces {
            filter.push(piece, &mut shown);
            assert!(filter.held.len() < SEQUENCE_BYTES_MAX);
        }
        filter.interrupt(&mut shown);
        String::from_utf8(shown).expect("only UTF-8 passes")
    }

    #[test]
    fn colours_and_progress_bars_pass() {
        for text in [
            "plain\ttext né 日本 e\u{301} \u{1f469}\u{200d}\u{1f52c} C:\\x\r\n",
            "\x1b[31mred\x1b[0m \x1b[1;38;5;12m\x1b[38:2::1:2:3mx\x1b[m",
            "\r 10 %\x1b[K\r 20 %\x1b[2K\x08\x08",
        ] {
            assert_eq!(shown(&[text.as_bytes()]), text);
        }
    }

    #[test]
    fn everything_else_is_spelled_out() {
        let cases: &[(&[u8], &str)] = &[
            (b"\x1b[2J\x1b[1;1H", "\\x1b[2J\\x1b[1;1H"),
            (b"\x1b]0;title\x07", "\\x1b]0;title\\x07"),
            (b"\x1b]52;c;cm0=\x1b\\", "\\x1b]52;c;cm0=\\x1b\\"),
            (
                b"\x1bP+q\x1b\\ \x1b_x \x1b^x \x1bXx \x1bc",
                "\\x1bP+q\\x1b\\ \\x1b_x \\x1b^x \\x1bXx \\x1bc",
            ),
            (
                b"\x1b[>4;1m \x1b[?25l \x1b[?K \x1b[6n \x1b[1 m",
                "\\x1b[>4;1m \\x1b[?25l \\x1b[?K \\x1b[6n \\x1b[1 m",
            ),
            (b"\x1b\x1b[31m", "\\x1b\x1b[31m\x1b[0m"),
            (b"\x1b[3\x1b[1m", "\\x1b[3\x1b[1m\x1b[0m"),
            (
                b"\x00\x05\x07\x0b\x0c\x0e\x0f\x1a\x7f",
                "\\x00\\x05\\x07\\x0b\\x0c\\x0e\\x0f\\x1a\\x7f",
            ),
            (b"\x9b31m \x9d0;t\x9c \xff", "\\x9b31m \\x9d0;t\\x9c \\xff"),
            ("\u{9b}31m \u{90}".as_bytes(), "\\u{9b}31m \\u{90}"),
            (
                "\u{202a}\u{202e}\u{2066}\u{2069}\u{200e}\u{200f}\u{61c}".as_bytes(),
                "\\u{202a}\\u{202e}\\u{2066}\\u{2069}\\u{200e}\\u{200f}\\u{61c}",
            ),
            // A character that is cut or too long, or a surrogate.
            (b"\xe2\x82", "\\xe2\\x82"),
            (b"\xc0\x9b \xed\xa0\x80", "\\xc0\\x9b \\xed\\xa0\\x80"),
            (b"\xe2\x82\x1b[2J", "\\xe2\\x82\\x1b[2J"),
        ];
        for (bytes, wanted) in cases {
            assert_eq!(shown(&[bytes]), *wanted);
            let pieces: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(shown(&pieces), *wanted, "byte by byte");
        }
    }

    #[test]
    fn a_long_sequence_is_text() {
        let long = |len: usize| format!("\x1b[{}m", "1".repeat(len - 3));
        let most = long(SEQUENCE_BYTES_MAX);
        assert_eq!(shown(&[most.as_bytes()]), format!("{most}\x1b[0m"));
        let more = long(SEQUENCE_BYTES_MAX + 1);
        assert_eq!(shown(&[more.as_bytes()]), more.replace('\x1b', "\\x1b"));
        let endless = [b"\x1b[".as_slice(), &[b'1'; 5000]].concat();
        let pieces: Vec<&[u8]> = endless.chunks(7).collect();
        assert!(shown(&pieces).starts_with("\\x1b[1111"));
    }

    #[test]
    fn open_colours_are_reset_at_the_end() {
        assert_eq!(shown(&[b"\x1b[31mred"]), "\x1b[31mred\x1b[0m");
        assert_eq!(shown(&[b"\x1b[31mred\x1b[m"]), "\x1b[31mred\x1b[m");
        assert_eq!(shown(&[b"\x1b[31m\x1b[0;1m"]), "\x1b[31m\x1b[0;1m\x1b[0m");
    }

    proptest! {
        #[test]
        fn the_division_into_pieces_changes_nothing_and_only_allowed_sequences_pass(
            parts in prop::collection::vec(prop_oneof![
                any::<Vec<u8>>(), Just(b"\x1b[".to_vec()), Just(b"\x1b[3".to_vec()), Just(b"\x1b[31m".to_vec()), Just(b"K".to_vec()),
                Just("\u{9b}\u{202e}é日".as_bytes().to_vec()),
            ], 0..12),
            piece in 1usize..9,
        ) {
            let all = parts.concat();
            let whole = shown(&[&all]);
            let pieces: Vec<&[u8]> = all.chunks(piece).collect();
            prop_assert_eq!(&shown(&pieces), &whole);
            let mut rest = whole.as_str();
            while let Some(at) = rest.find(|c: char| c.is_control() && !"\n\r\t\x08".contains(c)) {
                let after = rest[at..].strip_prefix("\x1b[");
                prop_assert!(after.is_some(), "{whole:?}");
                rest = after.unwrap_or_default().trim_start_matches(|c: char| "0123456789;:".contains(c));
                prop_assert!(rest.starts_with(['m', 'K']), "{whole:?}");
            }
            let hidden = whole.chars().find(|c| is_misleading(*c) && !"\u{200c}\u{200d}".contains(*c));
            prop_assert_eq!(hidden, None);
        }
    }
}
