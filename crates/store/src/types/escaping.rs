//! Makes untrusted bytes safe to store, to print, or to paste into a shell.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;

/// Converts bytes to text without loss. UTF-8 stays as it is, except that a backslash becomes `\\`. A NUL, which
/// PostgreSQL refuses in text, and every byte that is not UTF-8 become `\xNN`.
pub fn escape_text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                '\0' => text.push_str("\\x00"),
                c => text.push(c),
            }
        }
        push_hex(&mut text, chunk.invalid());
    }
    text
}

/// Reverses [`escape_text`]. Returns `None` if `escape_text` cannot have made this text.
pub fn unescape_text(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'\\' {
            bytes.push(*first);
            continue;
        }
        match rest {
            [b'\\', after @ ..] => {
                bytes.push(b'\\');
                rest = after;
            }
            [b'x', high, low, after @ ..] => {
                let digit = |b: u8| char::from(b).to_digit(16);
                bytes.push((digit(*high)? << 4 | digit(*low)?) as u8);
                rest = after;
            }
            _ => return None,
        }
    }
    Some(bytes)
}

/// Makes a name or a message safe for one line of a terminal. Escapes control characters (line feeds and escape
/// sequences among them), bytes that are not UTF-8, and characters that are invisible or change the direction of
/// writing. Everything else stays.
pub fn escape_terminal(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                c if c.is_ascii_control() => push_hex(&mut text, &[c as u8]),
                // Writing to a String cannot fail.
                c if is_misleading(c) => {
                    let _ = write!(text, "\\u{{{:x}}}", u32::from(c));
                }
                c => text.push(c),
            }
        }
        push_hex(&mut text, chunk.invalid());
    }
    text
}

fn push_hex(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "\\x{byte:02x}");
    }
}

/// Whether a terminal acts on this character, hides it, or lets it change the order of the text around it.
pub fn is_misleading(c: char) -> bool {
    matches!(c,
        // C1 controls: on some terminals U+009B begins an escape sequence.
        '\u{80}'..='\u{9f}'
        // Soft hyphen, Arabic letter mark, Hangul and Mongolian fillers: terminals show nothing for them.
        | '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{3164}' | '\u{ffa0}'
        // Zero width, direction marks, line and paragraph separators, overrides and isolates.
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        // Byte order mark, interlinear annotation, tags, noncharacters next to them.
        | '\u{feff}' | '\u{fff0}'..='\u{fffb}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}')
}

/// Quotes a word for a POSIX shell. A word with bytes that a terminal might act on is quoted for bash (`$'...'`).
pub fn quote_for_shell(word: &OsStr) -> String {
    let bytes = word.as_bytes();
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"/._-+,:@%=".contains(b);
    if !bytes.is_empty() && bytes[0] != b'=' && bytes.iter().all(plain) {
        return String::from_utf8_lossy(bytes).into_owned();
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if escape_terminal(bytes) == text => format!("'{}'", text.replace('\'', "'\\''")),
        _ => {
            let mut quoted = String::from("$'");
            for b in bytes {
                match b {
                    b if plain(b) || *b == b' ' => quoted.push(char::from(*b)),
                    b => quoted.push_str(&format!("\\x{b:02x}")),
                }
            }
            quoted.push('\'');
            quoted
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_terminal_is_not_steered() {
        assert_eq!(
            escape_terminal(b"\x1b[2Jx\n\x07\xff"),
            "\\x1b[2Jx\\n\\x07\\xff"
        );
        assert_eq!(
            escape_terminal("a\u{202e}b\u{9b}2J".as_bytes()),
            "a\\u{202e}b\\u{9b}2J"
        );
        assert_eq!(
            escape_terminal("né 日本 e\u{301} C:\\x".as_bytes()),
            "né 日本 e\u{301} C:\\x"
        );
    }

    proptest! {
        #[test]
        fn escaped_text_round_trips(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let text = escape_text(&bytes);
            prop_assert!(!text.contains('\0'));
            prop_assert_eq!(unescape_text(&text), Some(bytes));
        }

        #[test]
        fn unescaping_never_panics(text in any::<String>()) {
            let _ = unescape_text(&text);
        }

        #[test]
        fn terminal_text_is_harmless_and_stable(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let text = escape_terminal(&bytes);
            prop_assert!(!text.chars().any(|c| c.is_control() || is_misleading(c)));
            prop_assert_eq!(escape_terminal(text.as_bytes()), text);
        }

        #[test]
        fn quoting_survives_a_shell(word in prop::collection::vec(1u8.., 1..40)) {
            let quoted = quote_for_shell(OsStr::from_bytes(&word));
            let script = format!("printf %s {quoted}");
            let out = std::process::Command::new("bash").arg("-c").arg(script).output();
            prop_assert_eq!(out.map(|o| o.stdout).ok(), Some(word));
        }
    }
}
