//! `result.json` as a value that SQL can ask about: whether both databases would take it, and answer alike.
//!
//! The file was written by the analysis, so it is judged before the transaction, where a refusal would cost the whole
//! record. One pass over the bytes, no recursion, no tree: memory is the text, a stack of at most [`NESTING_MAX`] frames,
//! and sixteen bytes for each key of the objects that are open.
//!
//! Refused are what PostgreSQL's jsonb refuses (`\u0000`, lone surrogates, numbers beyond its numeric), what SQLite
//! refuses (deep nesting), and what the two would read differently: a repeated key (jsonb keeps the last value, SQLite
//! finds the first) and a number that is no finite double (SQLite would say infinity, or zero). What is accepted is
//! stored as it stands. The database must be UTF-8, which the store demands of PostgreSQL.

#[cfg(test)]
mod databases;

/// Larger results belong in a file of their own, which is kept in any case. PostgreSQL's own bounds (256 MiB for the
/// elements of one container, for one string, and for one key) cannot be reached below it.
pub const BYTES_MAX: usize = 4 << 20;
/// SQLite stops at 1,000 and PostgreSQL when its stack is full (at some thousands), but serde_json, with which we and
/// others read the value back, at 128.
pub const NESTING_MAX: usize = 100;
/// What a parser pays for each value is more than its text; two million zeros are 4 MiB, and 64 MiB in PostgreSQL.
pub const VALUES_MAX: usize = 1_000_000;
/// Keys of the objects that are open at one time: what the search for repeated ones has to remember.
pub const KEYS_MAX: usize = 250_000;
/// Keys are names; indexes and column headers are made of them.
pub const KEY_BYTES_MAX: usize = 1 << 10;
/// Digits before the exponent. A double has 17; PostgreSQL takes 131,072 before the point and 16,383 after it.
pub const DIGITS_MAX: usize = 1_000;
/// As written. With [`DIGITS_MAX`] it stays far below PostgreSQL's bounds, and no double needs more than 324.
pub const EXPONENT_MAX: u32 = 400;
/// jsonb has no exponents: `1e300` comes back as 301 digits. The text it gives back may be so long.
pub const EXPANDED_BYTES_MAX: usize = 4 * BYTES_MAX;

/// Why `result.json` is kept as a file only. Offsets count bytes from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotStored {
    #[error("it has {bytes} bytes; up to {BYTES_MAX} are stored as JSON")]
    TooLarge { bytes: usize },
    #[error("it begins with a byte order mark, which JSON does not allow")]
    ByteOrderMark,
    #[error("it is not UTF-8 (byte {at})")]
    NotUtf8 { at: usize },
    #[error("it is empty")]
    Empty,
    #[error("it is not JSON (byte {at})")]
    Syntax { at: usize },
    #[error("it ends in the middle of a value")]
    CutShort,
    #[error("NaN and Infinity are not JSON (byte {at})")]
    NotANumber { at: usize },
    #[error("it is nested more than {NESTING_MAX} deep (byte {at})")]
    TooDeep { at: usize },
    #[error("it has more than {VALUES_MAX} values")]
    TooManyValues,
    #[error("its objects have more than {KEYS_MAX} keys at once")]
    TooManyKeys,
    #[error("a key is longer than {KEY_BYTES_MAX} bytes (byte {at})")]
    KeyTooLong { at: usize },
    #[error(
        "an object that ends at byte {at} has a key twice, and databases disagree which value counts"
    )]
    RepeatedKey { at: usize },
    #[error("a string has the character \\u0000, which PostgreSQL does not take (byte {at})")]
    NulCharacter { at: usize },
    #[error("a string has half of a surrogate pair (byte {at})")]
    LoneSurrogate { at: usize },
    #[error("a number has more than {DIGITS_MAX} digits (byte {at})")]
    TooManyDigits { at: usize },
    #[error("a number is too large or too small for double precision (byte {at})")]
    NumberRange { at: usize },
    #[error(
        "its numbers, written out without exponents, take more than {EXPANDED_BYTES_MAX} bytes"
    )]
    TooLongWrittenOut,
}

/// The text to store, if both databases will take it and read it alike.
pub fn check(bytes: &[u8]) -> Result<String, NotStored> {
    if bytes.len() > BYTES_MAX {
        let bytes = bytes.len();
        return Err(NotStored::TooLarge { bytes });
    }
    if bytes.starts_with(b"\xef\xbb\xbf") {
        return Err(NotStored::ByteOrderMark);
    }
    let text = std::str::from_utf8(bytes).map_err(|error| NotStored::NotUtf8 {
        at: error.valid_up_to(),
    })?;
    let mut reader = Reader {
        text,
        at: 0,
        open: Vec::new(),
        keys: Vec::new(),
        values: 0,
        expanded: bytes.len(),
        key: Vec::new(),
    };
    reader.document()?;
    Ok(text.to_owned())
}

/// A container that has begun and not ended.
enum Open {
    Array,
    /// Its keys are the hashes from `keys_from` on.
    Object {
        keys_from: usize,
    },
}

/// What stands after something complete.
enum Next {
    Value,
    End,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Key,
    Value,
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    /// Invariant: at most `NESTING_MAX` long.
    open: Vec<Open>,
    /// The first 16 bytes of the blake3 of each key, escapes undone: `"a"` and `"\u0061"` are one key. Equal
    /// keys are never missed; a collision would take somebody years and lose only their own result.
    keys: Vec<u128>,
    values: usize,
    expanded: usize,
    /// The key being read, kept so that its memory is used again.
    key: Vec<u8>,
}

impl Reader<'_> {
    fn document(&mut self) -> Result<(), NotStored> {
        self.blanks();
        if self.peek().is_none() {
            return Err(NotStored::Empty);
        }
        loop {
            if self.value()? {
                continue;
            }
            if let Next::End = self.after_value()? {
                return Ok(());
            }
        }
    }

    /// Reads a scalar, or the beginning of a container. True if another value must follow at once, which is
    /// the first of a container that is not empty.
    fn value(&mut self) -> Result<bool, NotStored> {
        self.values += 1;
        if self.values > VALUES_MAX {
            return Err(NotStored::TooManyValues);
        }
        self.blanks();
        match self.peek().ok_or(NotStored::CutShort)? {
            b'[' => {
                self.enter(Open::Array)?;
                self.blanks();
                Ok(self.peek() != Some(b']'))
            }
            b'{' => {
                let keys_from = self.keys.len();
                self.enter(Open::Object { keys_from })?;
                self.blanks();
                match self.peek() {
                    Some(b'}') => Ok(false),
                    _ => self.member_name().map(|()| true),
                }
            }
            b'"' => self.string(Role::Value).map(|()| false),
            b'-' | b'0'..=b'9' => self.number().map(|()| false),
            b't' => self.word("true").map(|()| false),
            b'f' => self.word("false").map(|()| false),
            b'n' => self.word("null").map(|()| false),
            b'N' | b'I' => Err(NotStored::NotANumber { at: self.at }),
            _ => Err(self.syntax()),
        }
    }

    /// Closes what ends here. A value follows, or nothing does.
    fn after_value(&mut self) -> Result<Next, NotStored> {
        loop {
            self.blanks();
            let next = self.peek();
            let Some(top) = self.open.last() else {
                return match next {
                    None => Ok(Next::End),
                    Some(_) => Err(self.syntax()),
                };
            };
            match (top, next.ok_or(NotStored::CutShort)?) {
                (Open::Array, b',') => {
                    self.at += 1;
                    return Ok(Next::Value);
                }
                (Open::Object { .. }, b',') => {
                    self.at += 1;
                    self.blanks();
                    self.member_name()?;
                    return Ok(Next::Value);
                }
                (Open::Array, b']') => {}
                (&Open::Object { keys_from }, b'}') => self.keys_differ(keys_from)?,
                _ => return Err(self.syntax()),
            }
            self.open.pop();
            self.at += 1;
        }
    }

    fn enter(&mut self, container: Open) -> Result<(), NotStored> {
        if self.open.len() == NESTING_MAX {
            return Err(NotStored::TooDeep { at: self.at });
        }
        self.open.push(container);
        self.at += 1;
        Ok(())
    }

    /// `"name" :`
    fn member_name(&mut self) -> Result<(), NotStored> {
        match self.peek().ok_or(NotStored::CutShort)? {
            b'"' => self.string(Role::Key)?,
            _ => return Err(self.syntax()),
        }
        if self.keys.len() == KEYS_MAX {
            return Err(NotStored::TooManyKeys);
        }
        let mut first = [0; 16];
        first.copy_from_slice(&blake3::hash(&self.key).as_bytes()[..16]);
        self.keys.push(u128::from_ne_bytes(first));
        self.blanks();
        match self.peek().ok_or(NotStored::CutShort)? {
            b':' => self.at += 1,
            _ => return Err(self.syntax()),
        }
        Ok(())
    }

    /// Checks and forgets the keys of the object that ends here.
    fn keys_differ(&mut self, keys_from: usize) -> Result<(), NotStored> {
        let keys = &mut self.keys[keys_from..];
        keys.sort_unstable();
        if keys.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(NotStored::RepeatedKey { at: self.at });
        }
        self.keys.truncate(keys_from);
        Ok(())
    }

    /// A string, from its quotation mark to after the other one. A key is left in `key`.
    fn string(&mut self, role: Role) -> Result<(), NotStored> {
        let start = self.at;
        self.at += 1;
        self.key.clear();
        loop {
            let plain = self.rest().iter().take_while(|b| is_plain(**b)).count();
            self.keep(role, start, self.at..self.at + plain)?;
            self.at += plain;
            match self.peek().ok_or(NotStored::CutShort)? {
                b'"' => break,
                b'\\' => {
                    let c = self.escape()?;
                    self.keep_char(role, start, c)?;
                }
                _ => return Err(self.syntax()),
            }
        }
        self.at += 1;
        Ok(())
    }

    fn keep(
        &mut self,
        role: Role,
        start: usize,
        range: std::ops::Range<usize>,
    ) -> Result<(), NotStored> {
        if role == Role::Value {
            return Ok(());
        }
        if self.key.len() + range.len() > KEY_BYTES_MAX {
            return Err(NotStored::KeyTooLong { at: start });
        }
        self.key.extend_from_slice(&self.text.as_bytes()[range]);
        Ok(())
    }

    fn keep_char(&mut self, role: Role, start: usize, c: char) -> Result<(), NotStored> {
        if role == Role::Key {
            let mut utf8 = [0; 4];
            self.key
                .extend_from_slice(c.encode_utf8(&mut utf8).as_bytes());
            if self.key.len() > KEY_BYTES_MAX {
                return Err(NotStored::KeyTooLong { at: start });
            }
        }
        Ok(())
    }

    /// The character an escape stands for; a pair of surrogates is one.
    fn escape(&mut self) -> Result<char, NotStored> {
        let start = self.at;
        self.at += 1;
        let c = match self.peek().ok_or(NotStored::CutShort)? {
            b'u' => return self.unicode_escape(start),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            c @ (b'"' | b'\\' | b'/') => char::from(c),
            _ => return Err(self.syntax()),
        };
        self.at += 1;
        Ok(c)
    }

    fn unicode_escape(&mut self, start: usize) -> Result<char, NotStored> {
        let lone = NotStored::LoneSurrogate { at: start };
        let first = self.four_digits()?;
        let code = match first {
            0 => return Err(NotStored::NulCharacter { at: start }),
            0xd800..=0xdbff => {
                if !self.rest().starts_with(b"\\u") {
                    return Err(lone);
                }
                self.at += 1;
                match self.four_digits()? {
                    second @ 0xdc00..=0xdfff => {
                        0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00)
                    }
                    _ => return Err(lone),
                }
            }
            other => other,
        };
        char::from_u32(code).ok_or(lone)
    }

    /// From the `u` to after its digits.
    fn four_digits(&mut self) -> Result<u32, NotStored> {
        self.at += 1;
        let mut code = 0;
        for _ in 0..4 {
            let byte = self.peek().ok_or(NotStored::CutShort)?;
            let digit = char::from(byte).to_digit(16).ok_or_else(|| self.syntax())?;
            code = code << 4 | digit;
            self.at += 1;
        }
        Ok(code)
    }

    fn number(&mut self) -> Result<(), NotStored> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        let whole_at = self.at;
        let mut digits = match self.peek() {
            // -Infinity
            Some(b'I') => return Err(NotStored::NotANumber { at: start }),
            _ => self.digits()?,
        };
        if digits > 1 && self.text.as_bytes()[whole_at] == b'0' {
            return Err(NotStored::Syntax { at: whole_at });
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            digits += self.digits()?;
        }
        if digits > DIGITS_MAX {
            return Err(NotStored::TooManyDigits { at: start });
        }
        let mantissa = start..self.at;
        if let Some(b'e' | b'E') = self.peek() {
            self.exponent(start)?;
        }
        let zero = !self.text[mantissa].contains(|c: char| ('1'..='9').contains(&c));
        // What JSON calls a number, Rust reads as one.
        match self.text[start..self.at].parse::<f64>() {
            Ok(double) if double.is_finite() && (double != 0.0 || zero) => Ok(()),
            _ => Err(NotStored::NumberRange { at: start }),
        }
    }

    fn exponent(&mut self, number_at: usize) -> Result<(), NotStored> {
        self.at += 1;
        if let Some(b'+' | b'-') = self.peek() {
            self.at += 1;
        }
        let from = self.at;
        self.digits()?;
        let written = &self.text[from..self.at];
        // Leading zeros may be many; more than fits is too much anyway.
        match written.trim_start_matches('0') {
            "" => Ok(()),
            text => match text.parse::<u32>() {
                Ok(exponent) if exponent <= EXPONENT_MAX => {
                    self.expanded += exponent as usize;
                    match self.expanded > EXPANDED_BYTES_MAX {
                        true => Err(NotStored::TooLongWrittenOut),
                        false => Ok(()),
                    }
                }
                _ => Err(NotStored::NumberRange { at: number_at }),
            },
        }
    }

    /// At least one.
    fn digits(&mut self) -> Result<usize, NotStored> {
        let count = self
            .rest()
            .iter()
            .take_while(|b| b.is_ascii_digit())
            .count();
        self.at += count;
        match (count, self.peek()) {
            (0, None) => Err(NotStored::CutShort),
            (0, Some(_)) => Err(self.syntax()),
            _ => Ok(count),
        }
    }

    fn word(&mut self, word: &str) -> Result<(), NotStored> {
        let there = self.rest();
        if there.starts_with(word.as_bytes()) {
            self.at += word.len();
            return Ok(());
        }
        match word.as_bytes().starts_with(there) {
            true => Err(NotStored::CutShort),
            false if there.starts_with(b"nan") => Err(NotStored::NotANumber { at: self.at }),
            false => Err(self.syntax()),
        }
    }

    fn blanks(&mut self) {
        let blank = |b: &&u8| matches!(**b, b' ' | b'\t' | b'\n' | b'\r');
        self.at += self.rest().iter().take_while(blank).count();
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn rest(&self) -> &[u8] {
        &self.text.as_bytes()[self.at..]
    }

    fn syntax(&self) -> NotStored {
        NotStored::Syntax { at: self.at }
    }
}

/// What stands for itself in a string. Control characters must be escaped.
fn is_plain(byte: u8) -> bool {
    byte >= 0x20 && byte != b'"' && byte != b'\\'
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use NotStored::*;

    /// Documents that must be stored, strange as they are.
    pub(super) fn good() -> Vec<Vec<u8>> {
        let nested = |open: &str, value: &str, close: &str| {
            let depth = NESTING_MAX;
            format!("{}{value}{}", open.repeat(depth), close.repeat(depth)).into_bytes()
        };
        let mut all: Vec<Vec<u8>> = [
            "null",
            "true",
            " false\r\n\t ",
            "0",
            "-0",
            "-0.0",
            "0e5",
            "0e-400",
            "1E+5",
            "1e-05",
            "1.5e308",
            "-1.7976931348623157e308",
            "5e-324",
            "1e00000000000000000000000000000000000000005",
            "123456789012345678901234567890.1234567890123456789",
            "18446744073709551616",
            r#""""#,
            r#""\ud83d\ude00 \u00e9 \u0001 \u007f \uffff \ufffe \ufdd0 \/ \b\f\n\r\t\"\\""#,
            "\"\u{7f}\u{80}\u{feff}\u{2028}\u{10ffff}\u{fffe}\"",
            "[]",
            "{}",
            "[ ]",
            "{ }",
            "[[],[[]],{}]",
            r#"{"":{"":{"":0}}}"#,
            r#"{"a":1,"A":2," a":3,"b":{"a":1}}"#,
            r#"[{"a":1},{"a":2}]"#,
            r#"{"$":1,"a.b":2,"'; drop table x; --":3,"\"":4,"\\":5}"#,
            r#"{"__proto__":{},"constructor":null}"#,
        ]
        .iter()
        .map(|text| text.as_bytes().to_vec())
        .collect();
        all.push(nested("[", "", "]"));
        all.push(nested("{\"a\":", "1", "}"));
        all.push(format!("{}.{}", "9".repeat(300), "9".repeat(700)).into_bytes());
        all.push(format!("0.{}1", "0".repeat(300)).into_bytes());
        all.push(format!("[{}1]", "1e308,".repeat(5_000)).into_bytes());
        all.push(format!("{{\"{}\":1}}", "k".repeat(KEY_BYTES_MAX)).into_bytes());
        all.push(format!("\"{}\"", "s".repeat(BYTES_MAX - 2)).into_bytes());
        all.push(format!("[{}0]", "0,".repeat(VALUES_MAX - 2)).into_bytes());
        let members: Vec<String> = (0..KEYS_MAX).map(|n| format!("\"{n:x}\":0")).collect();
        all.push(format!("{{{}}}", members.join(",")).into_bytes());
        all
    }

    /// Documents that must not, and why.
    pub(super) fn bad() -> Vec<(Vec<u8>, NotStored)> {
        let table: &[(&[u8], NotStored)] = &[
            (b"", Empty),
            (b" \n", Empty),
            (b"\xef\xbb\xbf1", ByteOrderMark),
            (b"\"\xff\"", NotUtf8 { at: 1 }),
            (b"\"\xed\xa0\x80\"", NotUtf8 { at: 1 }),
            (b"\"\xc0\x80\"", NotUtf8 { at: 1 }),
            (b"1 2", Syntax { at: 2 }),
            (b"1\0", Syntax { at: 1 }),
            (b"\"\0\"", Syntax { at: 1 }),
            (b"\"\n\"", Syntax { at: 1 }),
            (b"\"\x1f\"", Syntax { at: 1 }),
            (b"[1,]", Syntax { at: 3 }),
            (b"[,1]", Syntax { at: 1 }),
            (b"[1 2]", Syntax { at: 3 }),
            (b"[1}", Syntax { at: 2 }),
            (b"{\"a\":1]", Syntax { at: 6 }),
            (b"{\"a\":1,}", Syntax { at: 7 }),
            (b"{,}", Syntax { at: 1 }),
            (b"{\"a\" 1}", Syntax { at: 5 }),
            (b"{a:1}", Syntax { at: 1 }),
            (b"{1:1}", Syntax { at: 1 }),
            (b"{'a':1}", Syntax { at: 1 }),
            (b"'a'", Syntax { at: 0 }),
            (b"]", Syntax { at: 0 }),
            (b"// x\n1", Syntax { at: 0 }),
            (b"1 /* x */", Syntax { at: 2 }),
            (b"+1", Syntax { at: 0 }),
            (b".5", Syntax { at: 0 }),
            (b"5.", CutShort),
            (b"[5.]", Syntax { at: 3 }),
            (b"01", Syntax { at: 0 }),
            (b"-01", Syntax { at: 1 }),
            (b"-", CutShort),
            (b"1e", CutShort),
            (b"[1e+]", Syntax { at: 4 }),
            (b"0x10", Syntax { at: 1 }),
            (b"1_000", Syntax { at: 1 }),
            (b"True", Syntax { at: 0 }),
            (b"truex", Syntax { at: 4 }),
            (b"tru", CutShort),
            (b"nul]", Syntax { at: 0 }),
            (b"\xc2\xa01", Syntax { at: 0 }),
            (b"\x0b1", Syntax { at: 0 }),
            (b"[", CutShort),
            (b"[1", CutShort),
            (b"[1,", CutShort),
            (b"{", CutShort),
            (b"{\"a\"", CutShort),
            (b"{\"a\":", CutShort),
            (b"{\"a\":1", CutShort),
            (b"{\"a\":1,", CutShort),
            (b"\"a", CutShort),
            (b"\"\\", CutShort),
            (b"\"\\u12", CutShort),
            (b"\"\\x41\"", Syntax { at: 2 }),
            (b"\"\\u12g4\"", Syntax { at: 5 }),
            (b"\"\\u+123\"", Syntax { at: 3 }),
            (b"NaN", NotANumber { at: 0 }),
            (b"nan", NotANumber { at: 0 }),
            (b"[Infinity]", NotANumber { at: 1 }),
            (b"[-Infinity]", NotANumber { at: 1 }),
            (b"\"a\\u0000\"", NulCharacter { at: 2 }),
            (b"{\"\\u0000\":1}", NulCharacter { at: 2 }),
            (b"\"\\ud800\"", LoneSurrogate { at: 1 }),
            (b"\"\\uDFFF\"", LoneSurrogate { at: 1 }),
            (b"\"\\ud800\\u0041\"", LoneSurrogate { at: 1 }),
            (b"\"\\ud800x\\udc00\"", LoneSurrogate { at: 1 }),
            (b"\"\\udc00\\ud800\"", LoneSurrogate { at: 1 }),
            (b"{\"\\ud800\\ud800\":1}", LoneSurrogate { at: 2 }),
            (b"1e400000", NumberRange { at: 0 }),
            (b"-1e400000", NumberRange { at: 0 }),
            (b"1e-400000", NumberRange { at: 0 }),
            (b"[1e99999999999999999999]", NumberRange { at: 1 }),
            (b"0e999999999", NumberRange { at: 0 }),
            (b"1e309", NumberRange { at: 0 }),
            (b"1e-330", NumberRange { at: 0 }),
            (b"{\"a\":1,\"a\":2}", RepeatedKey { at: 12 }),
            (b"{\"a\":1,\"b\":{},\"\\u0061\":2}", RepeatedKey { at: 24 }),
            (
                b"[{\"\\ud83d\\ude00\":1,\"\xf0\x9f\x98\x80\":1}]",
                RepeatedKey { at: 27 },
            ),
            (b"{\"\":1,\"\":1}", RepeatedKey { at: 10 }),
        ];
        let mut all: Vec<(Vec<u8>, NotStored)> = table
            .iter()
            .map(|(doc, why)| (doc.to_vec(), why.clone()))
            .collect();
        let depth = NESTING_MAX + 1;
        let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        all.push((deep.into_bytes(), TooDeep { at: NESTING_MAX }));
        // No amount of opening brackets may cost a stack.
        all.push((vec![b'['; BYTES_MAX], TooDeep { at: NESTING_MAX }));
        all.push((
            vec![b' '; BYTES_MAX + 1],
            TooLarge {
                bytes: BYTES_MAX + 1,
            },
        ));
        all.push((
            "1".repeat(DIGITS_MAX + 1).into_bytes(),
            TooManyDigits { at: 0 },
        ));
        all.push((
            format!("0.{}1", "0".repeat(DIGITS_MAX)).into_bytes(),
            TooManyDigits { at: 0 },
        ));
        all.push(("9".repeat(310).into_bytes(), NumberRange { at: 0 }));
        let key = "k".repeat(KEY_BYTES_MAX + 1);
        all.push((
            format!("{{\"{key}\":1}}").into_bytes(),
            KeyTooLong { at: 1 },
        ));
        let escaped = "\\u00e9".repeat(KEY_BYTES_MAX / 2 + 1);
        all.push((
            format!("{{\"{escaped}\":1}}").into_bytes(),
            KeyTooLong { at: 1 },
        ));
        all.push((
            format!("[{}0]", "0,".repeat(VALUES_MAX - 1)).into_bytes(),
            TooManyValues,
        ));
        let members: Vec<String> = (0..=KEYS_MAX).map(|n| format!("\"{n:x}\":0")).collect();
        all.push((
            format!("{{{}}}", members.join(",")).into_bytes(),
            TooManyKeys,
        ));
        all.push((
            format!("[{}1]", "1e300,".repeat(60_000)).into_bytes(),
            TooLongWrittenOut,
        ));
        all
    }

    #[test]
    fn what_must_be_stored_is_stored_as_it_stands() {
        for doc in good() {
            let shown = String::from_utf8_lossy(&doc[..doc.len().min(60)]).into_owned();
            let stored = check(&doc).unwrap_or_else(|why| panic!("{shown}: {why}"));
            assert_eq!(stored.as_bytes(), doc);
        }
    }

    #[test]
    fn what_must_not_be_is_refused_for_its_reason() {
        for (doc, why) in bad() {
            let shown = String::from_utf8_lossy(&doc[..doc.len().min(60)]).into_owned();
            assert_eq!(check(&doc), Err(why.clone()), "{shown}");
            let said = why.to_string();
            assert!(!said.is_empty() && said.len() < 120, "{said}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_survived(doc in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = check(&doc);
        }

        /// An independent reader as judge: what is accepted is JSON to it, what it refuses is refused.
        #[test]
        fn never_more_than_another_parser(doc in "[\\[\\]{},:\" \\\\u0d8cAe1.+\\-]{0,24}") {
            let theirs = serde_json::from_str::<serde_json::Value>(&doc);
            match check(doc.as_bytes()) {
                Ok(_) => proptest::prop_assert!(theirs.is_ok(), "{doc:?}: {theirs:?}"),
                Err(Syntax { .. } | CutShort | Empty) => {
                    proptest::prop_assert!(theirs.is_err(), "{doc:?} is JSON to serde_json");
                }
                Err(_) => {}
            }
        }

        /// The same for documents that are whole, by cutting and by changing one byte.
        #[test]
        fn damage_is_seen_as_another_parser_sees_it(at in 0usize..90, byte in 0u8..128) {
            let whole = br#"{"a":[1,-2.5e3,{"b":"\ud83d\ude00x\n"},true,false,null],"c":{},"d":[[]], "e" : 0}"#;
            let mut doc = whole.to_vec();
            if let Some(there) = doc.get_mut(at) {
                *there = byte;
            }
            for doc in [doc.as_slice(), &whole[..at.min(whole.len())]] {
                let theirs = serde_json::from_slice::<serde_json::Value>(doc);
                let ours = check(doc);
                let beyond = matches!(ours, Err(RepeatedKey { .. } | NulCharacter { .. } | NumberRange { .. }));
                proptest::prop_assert!(beyond || ours.is_ok() == theirs.is_ok(), "{ours:?} {theirs:?}");
            }
        }
    }
}
