//! What commands print on stdout: documents, tables, bytes. Text for a terminal goes through [`escape`] first.

mod table;

use std::io::{self, Write};

use anyhow::Context;
use serde::Serialize;
use store::types::escaping::escape_terminal;
use store::types::manifest::OutputPath;
use store::types::units::format_size;

pub use table::{Align, StyledLine, Table, TextStyle, column};

/// The reader of this process's stdout closed it. The command ends without a message, as with SIGPIPE.
#[derive(Debug, thiserror::Error)]
#[error("the reader of stdout closed it")]
pub struct ReaderGone;

/// The exit code that a shell reports for a program that SIGPIPE killed.
pub const READER_GONE: u8 = 128 + 13;

/// Whether a command failed only because nobody reads its stdout any more.
pub fn is_reader_gone(error: &anyhow::Error) -> bool {
    let gone = |e: &io::Error| e.get_ref().is_some_and(|inner| inner.is::<ReaderGone>());
    error
        .chain()
        .any(|e| e.downcast_ref::<io::Error>().is_some_and(gone))
}

/// Buffered standard output. Call `finish` at the end: a drop loses write errors.
pub struct StdoutWriter(io::BufWriter<io::StdoutLock<'static>>);

impl StdoutWriter {
    pub fn new() -> StdoutWriter {
        const BUFFER_BYTES: usize = 64 << 10;
        StdoutWriter(io::BufWriter::with_capacity(
            BUFFER_BYTES,
            io::stdout().lock(),
        ))
    }

    pub fn line(&mut self, text: &str) -> anyhow::Result<()> {
        writeln!(self, "{text}").context(PRINT)
    }

    pub fn finish(mut self) -> anyhow::Result<()> {
        self.flush().context(PRINT)
    }
}

const PRINT: &str = "print on stdout";

fn mark_closed_reader(e: io::Error) -> io::Error {
    match e.kind() {
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, ReaderGone),
        _ => e,
    }
}

impl Write for StdoutWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(mark_closed_reader)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(mark_closed_reader)
    }
}

/// Prints lines. The caller has escaped what comes from elsewhere.
pub fn lines<T: AsRef<str>>(lines: impl IntoIterator<Item = T>) -> anyhow::Result<()> {
    let mut out = StdoutWriter::new();
    for line in lines {
        out.line(line.as_ref())?;
    }
    out.finish()
}

/// Prints one JSON document on one line.
pub fn json<T: Serialize>(document: &T) -> anyhow::Result<()> {
    let text = serde_json::to_string(document).context("write the answer as JSON")?;
    lines([plain_json(&text)])
}

/// Escapes every character in JSON that a terminal may act on or hide. Outside of strings JSON has no such characters,
/// so the value stays the same.
pub fn plain_json(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        let harmless = c.is_ascii() && !c.is_ascii_control() || c == '\n';
        if harmless || (!c.is_ascii() && escape(c.encode_utf8(&mut [0; 4])).starts_with(c)) {
            plain.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            plain.push_str(&format!("\\u{unit:04x}"));
        }
    }
    plain
}

/// Escapes text that may come from a program, a file or another user, for one line of a terminal.
pub fn escape(text: &str) -> String {
    escape_terminal(text.as_bytes())
}

/// Returns an output's path for people. Two different paths never look the same, and `fumehood outputs` accepts this
/// form.
pub fn path(path: &OutputPath) -> String {
    escape(&path.text())
}

/// Cuts text to a number of characters. An ellipsis follows text that was cut.
pub fn shorten(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Formats `1 output`, `3 outputs`.
pub fn format_count(count: u64, one: &str, many: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        n => format!("{n} {many}"),
    }
}

pub fn outputs_and_size(count: u64, bytes: u64) -> String {
    match count {
        0 => String::from("none"),
        n => format!("{n} ({})", format_size(bytes)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn json_for_a_terminal_is_the_same_value() {
        let nasty =
            serde_json::json!({"a": "\u{9b}31m\u{202e}\u{7f}é\u{1}\u{e0001}\n", "b": [1.5]});
        let text = plain_json(&nasty.to_string());
        assert!(!text.contains(['\u{9b}', '\u{202e}', '\u{7f}', '\u{1}', '\u{e0001}']));
        assert!(text.contains('é'));
        let back: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(back, nasty);
    }

    #[test]
    fn only_a_reader_that_left_is_passed_over() {
        let gone = mark_closed_reader(io::Error::from(io::ErrorKind::BrokenPipe));
        let gone = anyhow::Error::from(gone).context("print");
        assert!(is_reader_gone(&gone));
        let other = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(!is_reader_gone(&other));
    }
}
