//! `fumehood outputs`: lists outputs, prints one, or exports them to a directory.

use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use engine::attempt::recorder::Recorder;
use engine::collect::Globs;
use serde::Serialize;
use store::StoredOutput;
use store::artifacts::{self, ExportContent, ExportedFile, Overwrite};
use store::types::escaping::{escape_terminal, unescape_text};
use store::types::manifest::{ContentHash, OutputPath};
use store::types::units::format_size;

use super::args::StoreArgs;
use super::attempt_text;
use super::print::{self, Align, StdoutWriter, Table, format_count};
use super::{ids, messages, record_access};

/// List an attempt's outputs, write one of them to a file or stdout, or export them to a directory.
///
/// A PATH matches as typed, in the escaped form that lists and --json show, or as a glob ('plots/*.png'; a directory's
/// name matches everything below it). With -o exactly one output must match.
///
/// --to prints a line `SHA256  PATH` for each file that it wrote, which `sha256sum -c` checks in that directory.
#[derive(Clone, Debug, clap::Args)]
pub struct OutputsArgs {
    #[arg(value_name = "ID[@ATTEMPT]", help = ids::HELP)]
    pub id: OsString,

    /// Only these outputs
    #[arg(value_name = "PATH|GLOB")]
    pub paths: Vec<OsString>,

    /// Write the one output that PATH matches to this file, or to stdout (-). Bytes that a terminal may act on are not
    /// written to a terminal without --force
    #[arg(
        long,
        short,
        value_name = "FILE|-",
        requires = "paths",
        conflicts_with = "to"
    )]
    pub output: Option<OsString>,

    /// Export to this directory, which is created if it does not exist; does not overwrite
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,

    /// Overwrite files; with `-o -`, write any bytes to a terminal
    #[arg(long, short)]
    pub force: bool,

    /// Print one JSON document: the list with hashes (fumehood.outputs/1), or what was exported (fumehood.export/1)
    #[arg(long, conflicts_with = "output")]
    pub json: bool,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// The outputs of an attempt: those that are recorded, or those that were exported.
#[derive(Serialize)]
struct Document<'a, T> {
    schema: &'static str,
    id: &'a str,
    attempt: u32,
    outputs: &'a [T],
}

pub fn outputs(args: &OutputsArgs) -> anyhow::Result<u8> {
    anyhow::ensure!(
        !args.force || args.to.is_some() || args.output.is_some(),
        "--force lets -o and --to overwrite; give one of them with it"
    );
    let (_, mut recorder) = record_access::open(&args.store)?;
    let summary = ids::resolve_attempt(&mut recorder, &args.id, None)?.summary;
    let key = (summary.id.as_str(), summary.attempt);
    let mut stored = recorder.with(|store| store.outputs(key.0, key.1))?;
    if !args.paths.is_empty() {
        stored = select(stored, &args.paths, &summary.id)?;
    }
    let overwrite = match args.force {
        true => Overwrite::Files,
        false => Overwrite::Never,
    };
    match (&args.output, &args.to) {
        (Some(file), _) => {
            let one = only_one(&stored)?;
            match file == "-" {
                true => write_to_stdout(&mut recorder, key, one, args.force)?,
                false => write_file(&mut recorder, key, one, Path::new(file), overwrite)?,
            }
        }
        (None, Some(to)) => {
            let named: Vec<OutputPath> = stored.into_iter().map(|output| output.path).collect();
            // An attempt that has not ended has no outputs either.
            let bytes_max = summary.output_bytes.unwrap_or(u64::MAX);
            let exported = match named.is_empty() {
                true => Vec::new(),
                false => {
                    record_access::export(&mut recorder, key, &named, to, overwrite, bytes_max)?
                }
            };
            print_exported(key, &exported, to, args.json)?;
        }
        (None, None) if args.json => print::json(&Document {
            schema: "fumehood.outputs/1",
            id: key.0,
            attempt: key.1,
            outputs: &stored,
        })?,
        (None, None) => print_list(&stored, summary.state.is_final())?,
    }
    Ok(0)
}

/// Returns the outputs that the words match, in the order of the record. A word that matches none is an error.
fn select(
    stored: Vec<StoredOutput>,
    words: &[OsString],
    id: &str,
) -> anyhow::Result<Vec<StoredOutput>> {
    let mut wanted = vec![false; stored.len()];
    let mut mark = |is_meant: &dyn Fn(&OutputPath) -> bool| {
        let mut found = false;
        for (output, wanted) in stored.iter().zip(&mut wanted) {
            if is_meant(&output.path) {
                (*wanted, found) = (true, true);
            }
        }
        found
    };
    for word in words {
        let mut found = mark(&|path| is_named(path, word));
        // Look for a file with exactly this name before taking the word for a pattern.
        if let (false, Some(glob)) = (found, word.to_str()) {
            let globs = Globs::new(&[glob.to_owned()])?;
            found = mark(&|path| globs.matches(path));
        }
        anyhow::ensure!(
            found,
            "{id} has no output {:?}; `fumehood outputs {id}` lists what it has",
            escape_terminal(word.as_bytes())
        );
    }
    let meant = stored.into_iter().zip(wanted);
    Ok(meant
        .filter_map(|(o, wanted)| wanted.then_some(o))
        .collect())
}

/// Whether a word names an output: by its bytes, or by the text that `--json` or a list shows for it.
fn is_named(path: &OutputPath, word: &OsStr) -> bool {
    let typed = word
        .as_bytes()
        .strip_prefix(b"./")
        .unwrap_or(word.as_bytes());
    let unescaped = word.to_str().and_then(unescape_text);
    path.as_bytes() == typed
        || Some(path.as_bytes()) == unescaped.as_deref()
        || word.to_str() == Some(print::path(path).as_str())
}

fn only_one(stored: &[StoredOutput]) -> anyhow::Result<&StoredOutput> {
    match stored {
        [one] => Ok(one),
        several => anyhow::bail!(
            "-o writes one output, and {} are meant; name one, or use --to DIR",
            several.len()
        ),
    }
}

fn print_list(stored: &[StoredOutput], ended: bool) -> anyhow::Result<()> {
    let mut table = Table::new(&[Align::Right, Align::Left, Align::Left]);
    for output in stored {
        table.row(attempt_text::output_cells(output));
    }
    print::lines(table.lines())?;
    match (stored.len() as u64, ended) {
        (0, false) => messages::line("it has not ended; outputs are collected at its end"),
        (0, true) => messages::line("it left no outputs"),
        (n, _) => {
            let bytes = stored.iter().map(|o| o.bytes).fold(0, u64::saturating_add);
            let what = format_count(n, "output", "outputs");
            messages::line(&format!("{what}, {}", format_size(bytes)));
        }
    }
    Ok(())
}

/// Writes an output to stdout unchanged. Refuses to write bytes to a terminal that may act on them.
fn write_to_stdout(
    recorder: &mut Recorder,
    key: (&str, u32),
    output: &StoredOutput,
    force: bool,
) -> anyhow::Result<()> {
    const SHOWN_BYTES_MAX: u64 = 1 << 20;
    let name = print::path(&output.path);
    let artifacts = recorder.artifacts().ok();
    let content = record_access::open_output(recorder, artifacts.as_ref(), key, output)
        .with_context(|| format!("read the output {name}"))?;
    // Check the content before writing the first byte: bytes in a pipe cannot be taken back.
    let sound = match (&content, &artifacts) {
        (ExportContent::Bytes(bytes), _) => ContentHash::of(bytes) == output.blake3,
        (ExportContent::File(_), Some(a)) => a.verify(&output.blake3, output.bytes)?.has_content(),
        (ExportContent::File(_), None) => false,
    };
    anyhow::ensure!(
        sound,
        "{name} is damaged in the artifact store, and was not written; `fumehood verify {}` says more",
        key.0
    );
    let mut source: Box<dyn Read> = match content {
        ExportContent::File(file) => Box::new(file),
        ExportContent::Bytes(bytes) => Box::new(io::Cursor::new(bytes)),
    };
    if io::stdout().is_terminal() && !force {
        let refused = || {
            format!(
                "{name} ({}, {}) is not written to a terminal: it is long, or may upset it; use -o FILE, a pipe, or --force",
                output.media_type,
                format_size(output.bytes)
            )
        };
        let mut bytes = Vec::new();
        source
            .by_ref()
            .take(SHOWN_BYTES_MAX + 1)
            .read_to_end(&mut bytes)?;
        anyhow::ensure!(
            bytes.len() as u64 <= SHOWN_BYTES_MAX && is_harmless(&bytes),
            refused()
        );
        source = Box::new(io::Cursor::new(bytes));
    }
    let mut out = StdoutWriter::new();
    io::copy(&mut source.take(output.bytes), &mut out)
        .with_context(|| format!("write the output {name}"))?;
    out.finish()
}

/// Whether a terminal shows these bytes as they are.
pub fn is_harmless(bytes: &[u8]) -> bool {
    let mut lines = bytes.split(|b| matches!(b, b'\n' | b'\t'));
    lines.all(|part| escape_terminal(part).as_bytes() == part)
}

/// Writes an output like an export under another name: the content is checked while it is copied, and the file gets its
/// name only when it is complete.
fn write_file(
    recorder: &mut Recorder,
    key: (&str, u32),
    output: &StoredOutput,
    file: &Path,
    overwrite: Overwrite,
) -> anyhow::Result<()> {
    let name = file.file_name();
    let name = name.with_context(|| format!("-o {file:?} names no file"))?;
    let there = std::fs::symlink_metadata(file);
    // A caller never means to replace /dev/null or the target of a link.
    anyhow::ensure!(
        !there.is_ok_and(|meta| !meta.is_file()),
        "{file:?} is no plain file, so it is not replaced; write to another, or redirect `-o -`"
    );
    let to = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    anyhow::ensure!(to.is_dir(), "{to:?} is no directory; make it first");
    let artifacts = recorder.artifacts().ok();
    let mut source =
        |_: &ContentHash| record_access::open_output(recorder, artifacts.as_ref(), key, output);
    let renamed = OutputPath::new(name.as_bytes().to_vec())?;
    let list = [(renamed, output.bytes, output.blake3)];
    let to = record_access::resolve_export_directory(to)?;
    artifacts::export(&mut source, &list, &to, overwrite, output.bytes)?;
    Ok(())
}

fn print_exported(
    key: (&str, u32),
    exported: &[ExportedFile],
    to: &Path,
    json: bool,
) -> anyhow::Result<()> {
    if json {
        return print::json(&Document {
            schema: "fumehood.export/1",
            id: key.0,
            attempt: key.1,
            outputs: exported,
        });
    }
    let mut out = StdoutWriter::new();
    let terminal = io::stdout().is_terminal();
    for one in exported {
        match terminal {
            true => out.line(&format!("{}  {}", one.sha256, print::path(&one.path)))?,
            false => out.write_all(&checksum_line(&one.sha256, one.path.as_bytes()))?,
        }
    }
    out.finish()?;
    messages::line(&format!(
        "{} exported to {}",
        format_count(exported.len() as u64, "output", "outputs"),
        to.display()
    ));
    Ok(())
}

/// Formats a line like `sha256sum`. If the name contains a backslash, a line feed or a carriage return, these are
/// escaped and the line begins with a backslash.
fn checksum_line(sha256: &str, path: &[u8]) -> Vec<u8> {
    let mut line = Vec::with_capacity(sha256.len() + path.len() + 4);
    if path.iter().any(|b| matches!(b, b'\\' | b'\n' | b'\r')) {
        line.push(b'\\');
    }
    line.extend(sha256.as_bytes());
    line.extend(b"  ");
    for byte in path {
        match byte {
            b'\\' => line.extend(b"\\\\"),
            b'\n' => line.extend(b"\\n"),
            b'\r' => line.extend(b"\\r"),
            byte => line.push(*byte),
        }
    }
    line.push(b'\n');
    line
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn output(path: &[u8]) -> StoredOutput {
        StoredOutput {
            path: OutputPath::new(path.to_vec()).unwrap(),
            bytes: 0,
            media_type: String::new(),
            blake3: ContentHash::of(b""),
            modified_ms: 0,
            artifact_store: String::new(),
            host: String::new(),
            inline: false,
        }
    }

    #[test]
    fn checksum_lines_are_as_sha256sum_writes_them() {
        assert_eq!(checksum_line("ab", b"a b*"), b"ab  a b*\n");
        assert_eq!(
            checksum_line("ab", b"a\\b\nc\rd\xff"),
            b"\\ab  a\\\\b\\nc\\rd\xff\n"
        );
    }

    /// The real `sha256sum` reads the lines back, whatever the name.
    #[test]
    fn sha256sum_takes_them() {
        let dir = tempfile::tempdir().unwrap();
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let names: [&[u8]; 5] = [b"plain", b" *x", b"a\\b", b"a\nb", b"\xff\x1b"];
        let mut lines = Vec::new();
        for name in names {
            std::fs::write(dir.path().join(OsStr::from_bytes(name)), "").unwrap();
            lines.extend(checksum_line(empty, name));
        }
        let list = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(list.path(), lines).unwrap();
        let checked = std::process::Command::new("sha256sum")
            .args(["--strict", "--quiet", "-c"])
            .arg(list.path())
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(checked.status.success(), "{checked:?}");
    }

    #[test]
    fn an_output_is_meant_by_bytes_by_text_or_by_glob() {
        let meant = |word: &[u8]| {
            let stored = [
                b"a\\b".as_slice(),
                b"p/1.png",
                b"p/2.png",
                b"\xff",
                b"*",
                b"l\nf",
            ];
            let stored = stored.iter().map(|p| output(p)).collect();
            let word = OsStr::from_bytes(word).to_owned();
            let found = super::select(stored, &[word], "x").ok()?;
            Some(found.into_iter().map(|o| o.path.text()).collect::<Vec<_>>())
        };
        assert_eq!(meant(b"a\\b").unwrap(), ["a\\\\b"]);
        assert_eq!(meant(b"a\\\\b").unwrap(), ["a\\\\b"]);
        assert_eq!(meant(b"\xff").unwrap(), ["\\xff"]);
        assert_eq!(meant(b"\\xff").unwrap(), ["\\xff"]);
        assert_eq!(meant(b"l\\nf").unwrap(), ["l\nf"]);
        assert_eq!(meant(b"./p/1.png").unwrap(), ["p/1.png"]);
        assert_eq!(meant(b"p/*.png").unwrap(), ["p/1.png", "p/2.png"]);
        assert_eq!(meant(b"p").unwrap(), ["p/1.png", "p/2.png"]);
        assert_eq!(meant(b"*").unwrap(), ["*"], "a name before a pattern");
        assert_eq!(meant(b"q"), None);
    }

    #[test]
    fn only_plain_text_is_harmless() {
        assert!(is_harmless("ä\tb\n".as_bytes()) && is_harmless(b""));
        for bytes in [
            b"\x1b[2J".as_slice(),
            b"\xff",
            b"a\0",
            b"a\rb",
            "\u{202e}".as_bytes(),
        ] {
            assert!(!is_harmless(bytes), "{bytes:?}");
        }
    }
}
