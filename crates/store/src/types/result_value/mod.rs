//! Decides whether `result.json` can be stored as a JSON value that both databases accept and read alike.
//!
//! The analysis wrote the file, so it is checked before the transaction, where a refusal by the database would undo
//! the whole commit. The check makes one pass over the bytes, without recursion and without building a tree. It needs
//! memory for the text, a stack of at most `NESTING_MAX` frames, and sixteen bytes for each key of the objects that
//! are open.
//!
//! The check refuses what PostgreSQL's jsonb refuses (`\u0000`, lone surrogates, numbers beyond its numeric), what
//! SQLite refuses (deep nesting), and what the two databases would read differently: a repeated key (jsonb keeps the
//! last value, SQLite finds the first) and a number that is not a finite double (SQLite reads infinity or zero).
//! Accepted text is stored unchanged. The database must be UTF-8, which the store requires of PostgreSQL.

#[cfg(test)]
mod database_tests;

/// Larger results belong in a file of their own, and every file is kept anyway. Text of this size cannot reach
/// PostgreSQL's own bounds (256 MiB for the elements of one container, for one string, and for one key).
pub const BYTES_MAX: usize = 4 << 20;
/// SQLite stops at 1,000, PostgreSQL when its stack is full (some thousands), and serde_json, which reads the value
/// back, at 128.
pub(crate) const NESTING_MAX: usize = 100;
/// A parsed value costs more memory than its text: two million zeros are 4 MiB of text and 64 MiB in PostgreSQL.
pub(crate) const VALUES_MAX: usize = 1_000_000;
/// The largest number of keys in all objects that are open at one time. The search for repeated keys has to remember
/// them.
pub(crate) const KEYS_MAX: usize = 250_000;
/// Keys are names; people build indexes and column headers from them.
pub(crate) const KEY_BYTES_MAX: usize = 1 << 10;
/// Digits before the exponent. A double needs 17; PostgreSQL accepts 131,072 before the point and 16,383 after it.
pub(crate) const DIGITS_MAX: usize = 1_000;
/// The largest exponent, as written. Together with [`DIGITS_MAX`] it keeps numbers far below PostgreSQL's bounds; no
/// double needs more than 324.
pub(crate) const EXPONENT_MAX: u32 = 400;
/// The largest size of the text that jsonb returns. jsonb has no exponents: it returns `1e300` as 301 digits.
pub(crate) const EXPANDED_BYTES_MAX: usize = 4 * BYTES_MAX;

/// Why `result.json` is kept only as a file. Offsets count bytes from 0.
#[allow(missing_docs, reason = "the variants say what the fields are")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResultRejection {
    /// The text is longer than `BYTES_MAX`.
    #[error("it has {bytes} bytes; up to {BYTES_MAX} are stored as JSON")]
    TooLarge { bytes: usize },
    /// The text begins with a byte order mark.
    #[error("it begins with a byte order mark, which JSON does not allow")]
    ByteOrderMark,
    /// The text is not UTF-8.
    #[error("it is not UTF-8 (byte {at})")]
    NotUtf8 { at: usize },
    /// The text has no value.
    #[error("it is empty")]
    Empty,
    /// The text is not JSON.
    #[error("it is not JSON (byte {at})")]
    Syntax { at: usize },
    /// The text ends within a value.
    #[error("it ends in the middle of a value")]
    CutShort,
    /// The text contains NaN or Infinity.
    #[error("NaN and Infinity are not JSON (byte {at})")]
    NotANumber { at: usize },
    /// More than `NESTING_MAX` arrays and objects are open.
    #[error("it is nested more than {NESTING_MAX} deep (byte {at})")]
    TooDeep { at: usize },
    /// There are more than `VALUES_MAX` values.
    #[error("it has more than {VALUES_MAX} values")]
    TooManyValues,
    /// The objects that are open have more than `KEYS_MAX` keys.
    #[error("its objects have more than {KEYS_MAX} keys at once")]
    TooManyKeys,
    /// A key is longer than `KEY_BYTES_MAX`.
    #[error("a key is longer than {KEY_BYTES_MAX} bytes (byte {at})")]
    KeyTooLong { at: usize },
    /// An object has the same key twice.
    #[error(
        "an object that ends at byte {at} has a key twice, and databases disagree which value counts"
    )]
    RepeatedKey { at: usize },
    /// A string contains U+0000.
    #[error("a string has the character \\u0000, which PostgreSQL does not take (byte {at})")]
    NulCharacter { at: usize },
    /// A string contains one half of a surrogate pair.
    #[error("a string has half of a surrogate pair (byte {at})")]
    LoneSurrogate { at: usize },
    /// A number has more than `DIGITS_MAX` digits.
    #[error("a number has more than {DIGITS_MAX} digits (byte {at})")]
    TooManyDigits { at: usize },
    /// A number is too large or too small for a double.
    #[error("a number is too large or too small for double precision (byte {at})")]
    NumberRange { at: usize },
    /// The numbers would take more than `EXPANDED_BYTES_MAX` without exponents.
    #[error(
        "its numbers, written out without exponents, take more than {EXPANDED_BYTES_MAX} bytes"
    )]
    TooLongWrittenOut,
}

/// Returns the text to store, if both databases accept it and read it alike.
pub fn check(bytes: &[u8]) -> Result<String, ResultRejection> {
    if bytes.len() > BYTES_MAX {
        let bytes = bytes.len();
        return Err(ResultRejection::TooLarge { bytes });
    }
    if bytes.starts_with(b"\xef\xbb\xbf") {
        return Err(ResultRejection::ByteOrderMark);
    }
    let text = std::str::from_utf8(bytes).map_err(|error| ResultRejection::NotUtf8 {
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

/// A container that has begun and not yet ended.
enum OpenContainer {
    Array,
    /// The hashes of the object's keys start at `keys_from` in `Reader::keys`.
    Object {
        keys_from: usize,
    },
}

/// What follows a complete value.
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
    /// Invariant: holds at most `NESTING_MAX` entries.
    open: Vec<OpenContainer>,
    /// The first 16 bytes of the blake3 hash of each key. Escapes are decoded first, so `"a"` and `"\u0061"` are one
    /// key. Equal keys always have equal hashes. To find a collision would take an attacker years and cost only the
    /// attacker's own result.
    keys: Vec<u128>,
    values: usize,
    expanded: usize,
    /// The key that is being read. Kept here to reuse its memory.
    key: Vec<u8>,
}

impl<'a> Reader<'a> {
    fn document(&mut self) -> Result<(), ResultRejection> {
        self.skip_blanks();
        if self.peek().is_none() {
            return Err(ResultRejection::Empty);
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

    /// Reads a scalar or the beginning of a container. Returns true if another value must follow at once: the first
    /// value of a container that is not empty.
    fn value(&mut self) -> Result<bool, ResultRejection> {
        self.values += 1;
        if self.values > VALUES_MAX {
            return Err(ResultRejection::TooManyValues);
        }
        self.skip_blanks();
        match self.next_byte()? {
            b'[' => {
                self.enter(OpenContainer::Array)?;
                self.skip_blanks();
                Ok(self.peek() != Some(b']'))
            }
            b'{' => {
                let keys_from = self.keys.len();
                self.enter(OpenContainer::Object { keys_from })?;
                self.skip_blanks();
                match self.peek() {
                    Some(b'}') => Ok(false),
                    _ => self.member_name().map(|()| true),
                }
            }
            b'"' => self.string(Role::Value).map(|()| false),
            b'-' | b'0'..=b'9' => self.number().map(|()| false),
            b't' => self.literal("true").map(|()| false),
            b'f' => self.literal("false").map(|()| false),
            b'n' => self.literal("null").map(|()| false),
            b'N' | b'I' => Err(ResultRejection::NotANumber { at: self.at }),
            _ => Err(self.syntax_error()),
        }
    }

    /// Closes every container that ends here, and says whether another value follows.
    fn after_value(&mut self) -> Result<Next, ResultRejection> {
        loop {
            self.skip_blanks();
            let next = self.peek();
            let Some(top) = self.open.last() else {
                return match next {
                    None => Ok(Next::End),
                    Some(_) => Err(self.syntax_error()),
                };
            };
            match (top, next.ok_or(ResultRejection::CutShort)?) {
                (OpenContainer::Array, b',') => {
                    self.at += 1;
                    return Ok(Next::Value);
                }
                (OpenContainer::Object { .. }, b',') => {
                    self.at += 1;
                    self.skip_blanks();
                    self.member_name()?;
                    return Ok(Next::Value);
                }
                (OpenContainer::Array, b']') => {}
                (&OpenContainer::Object { keys_from }, b'}') => {
                    self.check_keys_distinct(keys_from)?
                }
                _ => return Err(self.syntax_error()),
            }
            self.open.pop();
            self.at += 1;
        }
    }

    fn enter(&mut self, container: OpenContainer) -> Result<(), ResultRejection> {
        if self.open.len() == NESTING_MAX {
            return Err(ResultRejection::TooDeep { at: self.at });
        }
        self.open.push(container);
        self.at += 1;
        Ok(())
    }

    /// Reads `"name" :`.
    fn member_name(&mut self) -> Result<(), ResultRejection> {
        match self.next_byte()? {
            b'"' => self.string(Role::Key)?,
            _ => return Err(self.syntax_error()),
        }
        if self.keys.len() == KEYS_MAX {
            return Err(ResultRejection::TooManyKeys);
        }
        let hash = blake3::hash(&self.key);
        let first = hash.as_bytes().first_chunk().expect("a hash has 32 bytes");
        self.keys.push(u128::from_ne_bytes(*first));
        self.skip_blanks();
        match self.next_byte()? {
            b':' => self.at += 1,
            _ => return Err(self.syntax_error()),
        }
        Ok(())
    }

    /// Checks that the keys of the object that ends here differ, and removes them from the list.
    fn check_keys_distinct(&mut self, keys_from: usize) -> Result<(), ResultRejection> {
        let keys = &mut self.keys[keys_from..];
        keys.sort_unstable();
        if keys.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(ResultRejection::RepeatedKey { at: self.at });
        }
        self.keys.truncate(keys_from);
        Ok(())
    }

    /// Reads a string, including both quotation marks. Leaves a key in `self.key`.
    fn string(&mut self, role: Role) -> Result<(), ResultRejection> {
        let start = self.at;
        self.at += 1;
        self.key.clear();
        loop {
            let plain = self.rest().iter().take_while(|b| is_plain(**b)).count();
            let part = &self.text.as_bytes()[self.at..self.at + plain];
            self.at += plain;
            self.keep(role, start, part)?;
            match self.next_byte()? {
                b'"' => break,
                b'\\' => {
                    let c = self.escape()?;
                    self.keep(role, start, c.encode_utf8(&mut [0; 4]).as_bytes())?;
                }
                _ => return Err(self.syntax_error()),
            }
        }
        self.at += 1;
        Ok(())
    }

    fn keep(&mut self, role: Role, start: usize, part: &[u8]) -> Result<(), ResultRejection> {
        if role == Role::Value {
            return Ok(());
        }
        if self.key.len() + part.len() > KEY_BYTES_MAX {
            return Err(ResultRejection::KeyTooLong { at: start });
        }
        self.key.extend_from_slice(part);
        Ok(())
    }

    /// Decodes one escape. A pair of surrogates is one character.
    fn escape(&mut self) -> Result<char, ResultRejection> {
        let start = self.at;
        self.at += 1;
        let c = match self.next_byte()? {
            b'u' => return self.unicode_escape(start),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            c @ (b'"' | b'\\' | b'/') => char::from(c),
            _ => return Err(self.syntax_error()),
        };
        self.at += 1;
        Ok(c)
    }

    fn unicode_escape(&mut self, start: usize) -> Result<char, ResultRejection> {
        let lone = ResultRejection::LoneSurrogate { at: start };
        let first = self.four_digits()?;
        let code = match first {
            0 => return Err(ResultRejection::NulCharacter { at: start }),
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

    /// Reads the four digits after `u`, starting at the `u`.
    fn four_digits(&mut self) -> Result<u32, ResultRejection> {
        self.at += 1;
        let mut code = 0;
        for _ in 0..4 {
            let digit = char::from(self.next_byte()?).to_digit(16);
            code = code << 4 | digit.ok_or_else(|| self.syntax_error())?;
            self.at += 1;
        }
        Ok(code)
    }

    fn number(&mut self) -> Result<(), ResultRejection> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        let whole_at = self.at;
        let mut digits = match self.peek() {
            // The number is `-Infinity`.
            Some(b'I') => return Err(ResultRejection::NotANumber { at: start }),
            _ => self.digits()?,
        };
        if digits > 1 && self.text.as_bytes()[whole_at] == b'0' {
            return Err(ResultRejection::Syntax { at: whole_at });
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            digits += self.digits()?;
        }
        if digits > DIGITS_MAX {
            return Err(ResultRejection::TooManyDigits { at: start });
        }
        let mantissa = start..self.at;
        if let Some(b'e' | b'E') = self.peek() {
            self.exponent(start)?;
        }
        let zero = !self.text[mantissa].contains(|c: char| ('1'..='9').contains(&c));
        // Every JSON number is also a Rust floating-point literal.
        match self.text[start..self.at].parse::<f64>() {
            Ok(double) if double.is_finite() && (double != 0.0 || zero) => Ok(()),
            _ => Err(ResultRejection::NumberRange { at: start }),
        }
    }

    fn exponent(&mut self, number_at: usize) -> Result<(), ResultRejection> {
        self.at += 1;
        if let Some(b'+' | b'-') = self.peek() {
            self.at += 1;
        }
        let from = self.at;
        self.digits()?;
        let written = &self.text[from..self.at];
        // Skip leading zeros. A number that then does not fit 32 bits is too large anyway.
        let exponent = match written.trim_start_matches('0') {
            "" => Some(0),
            text => text.parse().ok().filter(|n| *n <= EXPONENT_MAX),
        };
        let exponent = exponent.ok_or(ResultRejection::NumberRange { at: number_at })?;
        self.expanded += exponent as usize;
        match self.expanded > EXPANDED_BYTES_MAX {
            true => Err(ResultRejection::TooLongWrittenOut),
            false => Ok(()),
        }
    }

    /// Skips digits, at least one.
    fn digits(&mut self) -> Result<usize, ResultRejection> {
        let digits = self.rest().iter().take_while(|b| b.is_ascii_digit());
        let count = digits.count();
        self.at += count;
        match (count, self.peek()) {
            (0, None) => Err(ResultRejection::CutShort),
            (0, Some(_)) => Err(self.syntax_error()),
            _ => Ok(count),
        }
    }

    fn literal(&mut self, word: &str) -> Result<(), ResultRejection> {
        let there = self.rest();
        if there.starts_with(word.as_bytes()) {
            self.at += word.len();
            return Ok(());
        }
        Err(match word.as_bytes().starts_with(there) {
            true => ResultRejection::CutShort,
            false if there.starts_with(b"nan") => ResultRejection::NotANumber { at: self.at },
            false => self.syntax_error(),
        })
    }

    fn skip_blanks(&mut self) {
        let blank = |b: &&u8| matches!(**b, b' ' | b'\t' | b'\n' | b'\r');
        self.at += self.rest().iter().take_while(blank).count();
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn next_byte(&self) -> Result<u8, ResultRejection> {
        self.peek().ok_or(ResultRejection::CutShort)
    }

    fn rest(&self) -> &'a [u8] {
        &self.text.as_bytes()[self.at..]
    }

    fn syntax_error(&self) -> ResultRejection {
        ResultRejection::Syntax { at: self.at }
    }
}

/// Whether the byte stands for itself in a string. Control characters must be escaped.
fn is_plain(byte: u8) -> bool {
    byte >= 0x20 && byte != b'"' && byte != b'\\'
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ResultRejection::*;

    /// Unusual documents that must be stored.
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

    /// Documents that must be refused, each with the reason.
    pub(super) fn bad() -> Vec<(Vec<u8>, ResultRejection)> {
        let table: &[(&[u8], ResultRejection)] = &[
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
        let mut all: Vec<(Vec<u8>, ResultRejection)> = table
            .iter()
            .map(|(doc, why)| (doc.to_vec(), why.clone()))
            .collect();
        let depth = NESTING_MAX + 1;
        let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        all.push((deep.into_bytes(), TooDeep { at: NESTING_MAX }));
        // Many opening brackets must not overflow the stack.
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
    fn a_valid_result_is_stored_unchanged() {
        for doc in good() {
            let shown = String::from_utf8_lossy(&doc[..doc.len().min(60)]).into_owned();
            let stored = check(&doc).unwrap_or_else(|why| panic!("{shown}: {why}"));
            assert_eq!(stored.as_bytes(), doc);
        }
    }

    #[test]
    fn an_invalid_result_is_refused_with_its_reason() {
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

        /// Compares `check` with serde_json: everything that `check` accepts is JSON, and everything that is not JSON is
        /// refused.
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

        /// The same for valid documents that are cut short or changed in one byte.
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
