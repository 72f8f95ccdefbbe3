//! Parses the first line of a script: which interpreter it names, and with which arguments.
//!
//! The line is untrusted text. Odd bytes are no error: a line that cannot name an interpreter counts as no
//! interpreter line. A line whose meaning would have to be guessed is [`Shebang::Unsupported`].

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// The kernel reads 256 bytes. More is needed for the second line of the launcher that pip writes for longer paths.
pub(super) const HEAD_BYTES: usize = 8192;

/// The most arguments that `env -S` may split into, so that a line cannot create an unbounded argument list.
const ARGS_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Shebang {
    /// `#!/path/interpreter arg`: the kernel passes the rest of the line as one argument.
    Path {
        interpreter: PathBuf,
        args: Vec<OsString>,
    },
    /// `#!/usr/bin/env [-S] name args`: the name is looked up on PATH.
    Env { name: OsString, args: Vec<OsString> },
    /// A line that asks `env` for anything else than starting a program by name.
    Unsupported { line: String },
}

/// Parses the first bytes of a file. `None` if the file is not an interpreter script.
pub(super) fn parse(head: &[u8]) -> Option<Shebang> {
    let mut lines = head.strip_prefix(b"#!")?.split(|b| *b == b'\n');
    let line = lines.next()?.trim_ascii();
    // The kernel stops at a NUL; a path cannot hold one.
    let line = line.split(|b| *b == 0).next()?.trim_ascii();
    let (interpreter, rest) = split_word(line);
    if interpreter.is_empty() {
        return None;
    }
    if is_shell(interpreter)
        && let Some(path) = lines.next().and_then(trampoline)
    {
        return Some(Shebang::Path {
            interpreter: path,
            args: Vec::new(),
        });
    }
    if interpreter == b"/usr/bin/env" || interpreter == b"/bin/env" {
        return Some(env_line(rest, line));
    }
    let args = match rest.is_empty() {
        true => Vec::new(),
        false => vec![OsString::from_vec(rest.to_vec())],
    };
    Some(Shebang::Path {
        interpreter: to_path(interpreter),
        args,
    })
}

fn env_line(rest: &[u8], line: &[u8]) -> Shebang {
    let unsupported = || Shebang::Unsupported {
        line: String::from_utf8_lossy(line).chars().take(200).collect(),
    };
    let split = rest
        .strip_prefix(b"-S")
        .or_else(|| rest.strip_prefix(b"--split-string="));
    let words = match split {
        Some(text) => match split_string(text) {
            Some(words) => words,
            None => return unsupported(),
        },
        // Without -S the kernel passes everything after `env ` as one word.
        None => vec![rest.to_vec()],
    };
    let mut words = words.into_iter();
    match words.next() {
        // Options and NAME=VALUE would change the environment, which Fumehood builds from nothing. A name with a
        // blank does not work without -S either.
        Some(name)
            if !name.is_empty()
                && !name.starts_with(b"-")
                && !name.iter().any(|b| *b == b'=' || b.is_ascii_whitespace()) =>
        {
            Shebang::Env {
                name: OsString::from_vec(name),
                args: words.map(OsString::from_vec).collect(),
            }
        }
        _ => unsupported(),
    }
}

/// Splits plain words and quotes as `env -S` does. Escapes and `${NAME}` would need the caller's environment, which
/// is not passed on; they make the line unsupported.
fn split_string(text: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut words: Vec<Vec<u8>> = Vec::new();
    let mut word: Option<Vec<u8>> = None;
    let mut quote: Option<u8> = None;
    for &byte in text {
        match (quote, byte) {
            (_, b'\\' | b'$') => return None,
            (Some(open), _) if byte == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(byte),
            (None, b'\'' | b'"') => {
                quote = Some(byte);
                word.get_or_insert_default();
            }
            (None, _) if byte.is_ascii_whitespace() => words.extend(word.take()),
            (None, _) => word.get_or_insert_default().push(byte),
        }
    }
    words.extend(word);
    (quote.is_none() && words.len() <= ARGS_MAX).then_some(words)
}

/// Parses `'''exec' "/long path/bin/python" "$0" "$@"`. pip writes this on the second line if the interpreter's path
/// is too long for a `#!` line or has blanks in it.
fn trampoline(line: &[u8]) -> Option<PathBuf> {
    let rest = line.strip_prefix(b"'''exec' ")?.trim_ascii_start();
    let path = match rest.strip_prefix(b"\"") {
        Some(quoted) => quoted.split(|b| *b == b'"').next()?,
        None => split_word(rest).0,
    };
    // A relocatable script computes the interpreter's path from its own. Treat such a script as a plain shell script.
    let plain = path.starts_with(b"/") && !path.iter().any(|b| b"$`\\\0".contains(b));
    plain.then(|| to_path(path))
}

fn is_shell(interpreter: &[u8]) -> bool {
    interpreter == b"/bin/sh" || interpreter == b"/usr/bin/sh"
}

fn split_word(text: &[u8]) -> (&[u8], &[u8]) {
    match text.iter().position(|b| *b == b' ' || *b == b'\t') {
        Some(end) => (&text[..end], text[end..].trim_ascii()),
        None => (text, b""),
    }
}

fn to_path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(interpreter: &str, args: &[&str]) -> Option<Shebang> {
        Some(Shebang::Path {
            interpreter: interpreter.into(),
            args: args.iter().map(Into::into).collect(),
        })
    }

    fn env(name: &str, args: &[&str]) -> Option<Shebang> {
        Some(Shebang::Env {
            name: name.into(),
            args: args.iter().map(Into::into).collect(),
        })
    }

    #[test]
    fn reads_the_lines_people_write() {
        assert_eq!(
            parse(b"#!/usr/bin/python3\nx"),
            path("/usr/bin/python3", &[])
        );
        assert_eq!(
            parse(b"#! /usr/bin/python3 -u -B\n"),
            path("/usr/bin/python3", &["-u -B"])
        );
        assert_eq!(parse(b"#!/usr/bin/env python3\r\n"), env("python3", &[]));
        assert_eq!(
            parse(b"#!/usr/bin/env -S python3 -u\n"),
            env("python3", &["-u"])
        );
        assert_eq!(
            parse(b"#!/usr/bin/env -S Rscript '--no save' \"\"\n"),
            env("Rscript", &["--no save", ""])
        );
        assert_eq!(parse(b"#!/bin/sh\necho"), path("/bin/sh", &[]));
        assert_eq!(
            parse(b"#!/bin/sh\n'''exec' \"/a b/bin/python\" \"$0\" \"$@\"\n"),
            path("/a b/bin/python", &[])
        );
    }

    #[test]
    fn text_that_is_not_an_interpreter_line_gives_none() {
        for head in [
            "",
            "#",
            "#!",
            "#!\n/bin/sh",
            "print(1)",
            "\u{feff}#!/bin/sh",
            " #!/bin/sh",
        ] {
            assert_eq!(parse(head.as_bytes()), None, "{head:?}");
        }
    }

    #[test]
    fn unclear_env_lines_are_unsupported() {
        for rest in [
            "",
            "-i python3",
            "A=1 python3",
            "python3 -u",
            "-S",
            "-S A=1 python3",
            "-S py\\tthon",
            "-S $HOME/x",
        ] {
            let parsed = parse(format!("#!/usr/bin/env {rest}\n").as_bytes());
            assert!(
                matches!(parsed, Some(Shebang::Unsupported { .. })),
                "{rest:?}: {parsed:?}"
            );
        }
    }

    #[test]
    fn a_computed_trampoline_is_just_a_shell_script() {
        let head = b"#!/bin/sh\n'''exec' \"$(dirname -- \"$0\")\"/'python' \"$0\" \"$@\"\n";
        assert_eq!(parse(head), path("/bin/sh", &[]));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_do_not_panic(tail in proptest::collection::vec(proptest::num::u8::ANY, 0..600), lead in 0usize..4) {
            let leads: [&[u8]; 4] = [b"", b"#!", b"#!/usr/bin/env -S ", b"#!/bin/sh\n'''exec' "];
            let head = [leads[lead], &tail].concat();
            if let Some(Shebang::Path { interpreter, .. }) = parse(&head) {
                proptest::prop_assert!(!interpreter.as_os_str().as_bytes().contains(&0));
            }
        }
    }
}
