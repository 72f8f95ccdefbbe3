//! The program that the trials run, what the record must have of it, and the comparison with the database and the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use store::types::manifest::ContentHash;

use crate::database_rows::{Row, Rows, bytes, number, text, truth};

/// A limit so small that one of the outputs and one of the logs exceed it.
pub const INLINE_MAX: &str = "4K";
const INLINE_BYTES: usize = 4096;
const BIG_BYTES: usize = 30_000;
const PRINTED_BYTES: usize = 10_000;

/// Every output contains the id, `$0`, so that the artifact store does not have it yet. With `$1` the program waits for a line
/// of input.
pub const PROGRAM: &str = r#"
echo up
[ -z "$1" ] || read -r word
printf 'alpha %s\n' "$0" > a.txt
ln a.txt link.txt
mkdir deep
yes "big $0" | head -c 30000 > deep/big.bin
printf 'omega %s\n' "$0" > z.txt
yes "out $0" | head -c 10000
echo complaint >&2
echo
echo last
"#;
/// The number of different contents among the outputs. A run passes the crash point `object_moved` this many times.
pub const OBJECTS: u32 = 3;

/// The content of outputs, by path.
pub type Files = BTreeMap<Vec<u8>, Vec<u8>>;

/// What the program leaves when it ends by itself.
pub fn outputs(id: &str) -> Files {
    let file = |path: &str, content: Vec<u8>| (path.as_bytes().to_vec(), content);
    Files::from([
        file("a.txt", format!("alpha {id}\n").into()),
        file("link.txt", format!("alpha {id}\n").into()),
        file("deep/big.bin", repeated(&format!("big {id}\n"), BIG_BYTES)),
        file("z.txt", format!("omega {id}\n").into()),
    ])
}

fn stdout(id: &str) -> Vec<u8> {
    let printed = repeated(&format!("out {id}\n"), PRINTED_BYTES);
    [b"up\n", printed.as_slice(), b"\nlast\n"].concat()
}

const STDERR: &[u8] = b"complaint\n";

fn repeated(line: &str, length: usize) -> Vec<u8> {
    line.bytes().cycle().take(length).collect()
}

/// The outputs of the program that are in a workspace.
pub fn left_in(workspace: &Path, id: &str) -> Files {
    let found = |path: &Vec<u8>| {
        let content = std::fs::read(workspace.join(std::str::from_utf8(path).unwrap())).ok()?;
        Some((path.clone(), content))
    };
    outputs(id).keys().filter_map(found).collect()
}

/// The state that an analysis must be in after recovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedState {
    /// The runner knew that the program had ended: the record has everything.
    Whole,
    /// As `Whole`, but there was no room for the logs: the record counts the missing bytes.
    WholeButLogs,
    /// The runner died before it knew the outcome: the record has what was in the workspace.
    Lost(Files),
    /// Fumehood could not start the program.
    NotRun,
    /// The database does not know the analysis.
    Unknown,
    /// The runner died during its first transaction: the database may know the analysis.
    PerhapsUnknown,
    /// Any of the states above: the trial could not look at the files at the moment of death. The record must be
    /// complete for the state that it shows.
    OneOfThem,
}

/// The database and the artifact store of a deployment.
pub struct StoredState<'a> {
    pub rows: &'a Rows,
    pub artifacts: &'a Path,
    /// The keys for which the post-process command ran.
    pub steps: &'a BTreeSet<String>,
}

impl StoredState<'_> {
    /// Asserts that an analysis is in its expected state, with everything that belongs to it.
    #[track_caller]
    pub fn check(&self, id: &str, expected: &ExpectedState) {
        let analyses = self.rows.of("analyses", id);
        let attempts = self.rows.of("attempts", id);
        let may_be_unknown = matches!(
            expected,
            ExpectedState::Unknown | ExpectedState::PerhapsUnknown | ExpectedState::OneOfThem
        );
        if attempts.is_empty() && may_be_unknown {
            assert!(analyses.is_empty(), "{id}: {analyses:?}");
            for table in ["outputs", "logs", "remarks", "remark_counts"] {
                assert!(self.rows.of(table, id).is_empty(), "{id}: {table}");
            }
            return;
        }
        assert_eq!(
            (analyses.len(), attempts.len()),
            (1, 1),
            "{id}: {expected:?}"
        );
        let attempt = attempts[0];
        self.check_end(id, attempt);
        if *expected != ExpectedState::NotRun {
            self.check_step(id, attempt);
        }
        let state = (
            text(attempt, "state").unwrap(),
            text(attempt, "reason").unwrap(),
        );
        match (state, expected) {
            (("succeeded", "exit"), ExpectedState::Whole | ExpectedState::OneOfThem) => {
                self.check_whole(id, attempt)
            }
            (("succeeded", "exit"), ExpectedState::WholeButLogs) => self.check_outputs(id, attempt),
            (("error", "runner_lost"), ExpectedState::Lost(left)) => {
                self.check_lost(id, attempt, Some(left))
            }
            (("error", "runner_lost"), ExpectedState::OneOfThem) => {
                self.check_lost(id, attempt, None)
            }
            (("error", "runner_lost"), ExpectedState::PerhapsUnknown) => {
                self.check_lost(id, attempt, Some(&Files::new()));
            }
            (("error", "not_started"), ExpectedState::NotRun) => {
                assert_eq!(self.outputs(id), Files::new(), "{id}");
            }
            _ => panic!("{id} is {state:?} and should be {expected:?}: {attempt:?}"),
        }
    }

    /// Asserts what holds for every attempt that ended.
    fn check_end(&self, id: &str, attempt: &Row) {
        assert_eq!(number(attempt, "attempt"), Some(1), "{id}");
        assert_eq!(truth(attempt, "superseded"), Some(false), "{id}");
        assert!(
            number(attempt, "committed_ms").is_some(),
            "{id}: {attempt:?}"
        );
        assert_eq!(attempt["committed_by"], attempt["key"], "{id}");
        let outputs = self.rows.of("outputs", id).len();
        assert_eq!(
            number(attempt, "outputs_count"),
            Some(outputs as i64),
            "{id}"
        );
        // Another trial checks that a file which never existed is not reported as lost.
        let remarks = self.rows.of("remarks", id);
        assert!(outputs == 0 || remarks.is_empty(), "{id}: {remarks:?}");
        assert_eq!(self.rows.of("logs", id).len(), 2, "{id}");
    }

    /// Asserts that the post-process command ran for an attempt, and that the database records it.
    pub fn check_step(&self, id: &str, attempt: &Row) {
        assert_eq!(
            text(attempt, "post_process"),
            Some("done"),
            "{id}: {attempt:?}"
        );
        let seen = self.steps.contains(&format!("{id}/1"));
        assert!(seen, "{id} is marked, and no step saw all of it");
    }

    fn check_whole(&self, id: &str, attempt: &Row) {
        self.check_outputs(id, attempt);
        for (stream, all) in [("stdout", stdout(id).as_slice()), ("stderr", STDERR)] {
            let (log, dropped) = self.log(id, stream);
            assert!(
                log == all && dropped == 0,
                "{id}: {:?}",
                self.rows.of("logs", id)
            );
        }
    }

    fn check_outputs(&self, id: &str, attempt: &Row) {
        assert_eq!(truth(attempt, "complete"), Some(true), "{id}: {attempt:?}");
        assert_eq!(number(attempt, "exit_code"), Some(0), "{id}");
        let found = self.outputs(id);
        assert!(
            found == outputs(id),
            "{id}: {:?}",
            self.rows.of("outputs", id)
        );
        for (stream, all) in [("stdout", stdout(id).as_slice()), ("stderr", STDERR)] {
            let (log, dropped) = self.log(id, stream);
            assert!(all.starts_with(&log), "{id}: {stream}");
            assert_eq!(
                log.len() as i64 + dropped,
                all.len() as i64,
                "{id}: {stream}"
            );
        }
    }

    /// `left` is what was in the workspace, if that is known.
    fn check_lost(&self, id: &str, attempt: &Row, left: Option<&Files>) {
        assert_eq!(truth(attempt, "complete"), Some(false), "{id}: {attempt:?}");
        let found = self.outputs(id);
        match left {
            Some(left) => assert!(found == *left, "{id}: {:?}", self.rows.of("outputs", id)),
            None => {
                let all = outputs(id);
                let part = |(path, content): (&Vec<u8>, &Vec<u8>)| all[path].starts_with(content);
                assert!(
                    found.iter().all(part),
                    "{id}: {:?}",
                    self.rows.of("outputs", id)
                );
            }
        }
        for (stream, all) in [("stdout", stdout(id).as_slice()), ("stderr", STDERR)] {
            let (log, dropped) = self.log(id, stream);
            assert!(all.starts_with(&log) && dropped == 0, "{id}: {stream}");
        }
    }

    /// The outputs of an analysis. Asserts that row, inline content and object agree.
    fn outputs(&self, id: &str) -> Files {
        let output = |row: &&Row| {
            let length = number(row, "bytes").unwrap() as usize;
            let content = self.object(text(row, "blake3").unwrap());
            assert_eq!(content.len(), length, "{id}");
            let inline = bytes(row, "content");
            match length <= INLINE_BYTES {
                true => assert_eq!(inline.as_ref(), Some(&content), "{id}"),
                false => assert_eq!(inline, None, "{id}"),
            }
            (bytes(row, "path").unwrap(), content)
        };
        let rows = self.rows.of("outputs", id);
        rows.iter().map(output).collect()
    }

    /// The kept part of a log, and how many bytes are missing. If the log is an object, asserts that the excerpts are its two
    /// ends.
    fn log(&self, id: &str, stream: &str) -> (Vec<u8>, i64) {
        let rows = self.rows.of("logs", id);
        let row = rows
            .iter()
            .find(|row| text(row, "stream") == Some(stream))
            .unwrap();
        let dropped = number(row, "dropped_bytes").unwrap();
        let (head, tail) = (bytes(row, "head").unwrap(), bytes(row, "tail").unwrap());
        let whole = match text(row, "blake3") {
            None => [head, tail].concat(),
            Some(hash) => {
                let whole = self.object(hash);
                assert!(whole.starts_with(&head) && whole.ends_with(&tail), "{id}");
                assert!(whole.len() > INLINE_BYTES, "{id}");
                whole
            }
        };
        let total = number(row, "total_bytes");
        assert_eq!(total, Some(whole.len() as i64 + dropped), "{id}");
        (whole, dropped)
    }

    /// The content of an object. Asserts its hash, owner, mode and link count.
    fn object(&self, hash: &str) -> Vec<u8> {
        let path = self
            .artifacts
            .join("objects")
            .join(&hash[..2])
            .join(&hash[2..]);
        let content = std::fs::read(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        assert_eq!(
            ContentHash::of(&content),
            ContentHash::parse(hash).unwrap(),
            "{path:?}"
        );
        let meta = path.symlink_metadata().unwrap();
        let us = rustix::process::geteuid().as_raw();
        let is = (meta.mode() & 0o7777, meta.uid(), meta.nlink());
        assert_eq!(is, (0o444, us, 1), "{path:?}: mode, owner, names");
        content
    }

    /// Asserts that the artifact store has the objects that some row names, and no other file.
    #[track_caller]
    pub fn check_no_other_objects(&self) {
        let named = ["outputs", "logs"]
            .into_iter()
            .flat_map(|table| self.rows.all(table));
        let named: BTreeSet<String> = named
            .filter_map(|row| text(row, "blake3").map(String::from))
            .collect();
        let mut found = BTreeSet::new();
        for path in files_below(&self.artifacts.join("objects")) {
            let name = path.file_name().unwrap().to_str().unwrap();
            let fan = path
                .parent()
                .unwrap()
                .file_name()
                .unwrap()
                .to_str()
                .unwrap();
            found.insert(format!("{fan}{name}"));
        }
        assert_eq!(found, named, "objects, and what the record names");
        let drafts = files_below(&self.artifacts.join("staging"));
        assert_eq!(drafts, [] as [PathBuf; 0], "half-made objects");
    }
}

/// Every file below a directory, sorted.
pub fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type().unwrap().is_dir() {
                true => todo.push(entry.path()),
                false => found.push(entry.path()),
            }
        }
    }
    found.sort();
    found
}
