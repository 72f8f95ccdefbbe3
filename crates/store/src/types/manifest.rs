//! The manifest: the list of outputs that an attempt left. Finalizing writes the manifest and makes it durable before
//! the first file moves, so the store and recovery read the manifest and never walk a half-moved tree.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::escaping::{escape_text, unescape_text};

/// The longest path. The kernel accepts 4,095 bytes per call, but a path is part of a database key, for which
/// PostgreSQL has 2,704 bytes in all, and other programs put directories before it.
pub const PATH_BYTES_MAX: usize = 2047;
/// The longest component, which nearly every file system supports. An export can therefore use the same names.
pub const COMPONENT_BYTES_MAX: usize = 255;

/// The version of [`Manifest`] that this Fumehood writes.
pub const VERSION: u32 = 1;
/// How many remarks are listed. Further remarks are only counted.
pub const REMARKS_MAX: usize = 1_000;

/// A relative path below the workspace. Its components may hold any bytes but `/` and NUL, and none of them is `.` or
/// `..`. As text (JSON, SQL, terminal) the path is escaped by [`escape_text`], which is reversible.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OutputPath(Vec<u8>);

/// The bytes are not an [`OutputPath`], or the text is not the escaped form of one.
#[derive(Debug, thiserror::Error)]
#[error("{given:?} is not a relative path of plain components")]
pub struct OutputPathError {
    given: String,
}

impl OutputPath {
    /// Checks that the path is relative and that all its components are plain names.
    pub fn new(bytes: Vec<u8>) -> Result<OutputPath, OutputPathError> {
        let plain = |part: &[u8]| !part.is_empty() && part != b"." && part != b"..";
        match !bytes.contains(&0) && bytes.split(|b| *b == b'/').all(plain) {
            true => Ok(OutputPath(bytes)),
            false => Err(OutputPathError {
                given: escape_text(&bytes).chars().take(200).collect(),
            }),
        }
    }

    /// The path as it was in the workspace, not escaped.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The path as it is stored and shown: escaped.
    pub fn text(&self) -> String {
        escape_text(&self.0)
    }

    /// The components of the path, none of them empty.
    pub fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|b| *b == b'/')
    }
}

impl fmt::Debug for OutputPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text())
    }
}

impl TryFrom<String> for OutputPath {
    type Error = OutputPathError;
    fn try_from(text: String) -> Result<OutputPath, OutputPathError> {
        match unescape_text(&text) {
            Some(bytes) => OutputPath::new(bytes),
            None => Err(OutputPathError { given: text }),
        }
    }
}

impl From<OutputPath> for String {
    fn from(path: OutputPath) -> String {
        path.text()
    }
}

/// The blake3 hash of some content. It names the content's object in the artifact store. As text it has 64 lower-case
/// hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContentHash([u8; 32]);

/// The text is not a [`ContentHash`].
#[derive(Debug, thiserror::Error)]
#[error("{given:?} is not a hash of 64 lower-case hex digits")]
pub struct ContentHashError {
    given: String,
}

impl ContentHash {
    /// Hashes some bytes.
    pub fn of(bytes: &[u8]) -> ContentHash {
        ContentHash(*blake3::hash(bytes).as_bytes())
    }

    /// Makes a hash from its 32 bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> ContentHash {
        ContentHash(bytes)
    }

    /// Reads the 64 lower-case hex digits of a hash.
    pub fn parse(text: &str) -> Result<ContentHash, ContentHashError> {
        let hash = blake3::Hash::from_hex(text).ok();
        let hash = hash.map(|hash| ContentHash(*hash.as_bytes()));
        // Upper-case digits would be a second name of the same object.
        let exact = hash.filter(|hash| hash.to_string() == text);
        exact.ok_or_else(|| ContentHashError {
            given: text.chars().take(100).collect(),
        })
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TryFrom<String> for ContentHash {
    type Error = ContentHashError;
    fn try_from(text: String) -> Result<ContentHash, ContentHashError> {
        ContentHash::parse(&text)
    }
}

impl From<ContentHash> for String {
    fn from(hash: ContentHash) -> String {
        hash.to_string()
    }
}

/// One collected file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// The path below the workspace.
    pub path: OutputPath,
    /// The length of the file; also for a sparse file.
    pub bytes: u64,
    /// The hash of the content.
    pub blake3: ContentHash,
    /// Guessed from the first bytes and the file's extension. Says nothing about safety.
    pub media_type: String,
    /// Unix time in milliseconds. The program can set it, so it proves nothing.
    pub modified_ms: i64,
    /// The inode at the time of hashing. Outputs with the same inode are hard links of each other.
    pub inode: u64,
}

/// Why a file was not collected, or was changed when it was collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remark {
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character or block device.
    Device,
    /// Another file system, or a bind mount, is mounted there.
    MountPoint,
    /// A hard link with another name outside the workspace.
    LinkedElsewhere,
    /// Another user than the program's owns it.
    NotOwned,
    /// The path or one of its components is too long.
    NameTooLong,
    /// The path has too many components.
    TooDeep,
    /// There are more files than may be collected.
    TooMany,
    /// The file is larger than one output may be.
    FileTooLarge,
    /// With this file, the outputs would be larger than they may be in all.
    TotalTooLarge,
    /// The file changed while it was read, so some process still writes to it.
    Changed,
    /// The kernel refused to read it.
    Unreadable,
    /// The manifest lists the file, but it was gone before it could be moved (for example, /tmp was emptied after a
    /// crash).
    Lost,
    /// Collected; its set-uid and set-gid bits were dropped.
    SetIdDropped,
    /// Collected, although its mode forbade reading.
    ModeOverridden,
}

impl Remark {
    /// The word that the record and every document use for the remark.
    pub fn as_str(self) -> &'static str {
        match self {
            Remark::Symlink => "symlink",
            Remark::Fifo => "fifo",
            Remark::Socket => "socket",
            Remark::Device => "device",
            Remark::MountPoint => "mount_point",
            Remark::LinkedElsewhere => "linked_elsewhere",
            Remark::NotOwned => "not_owned",
            Remark::NameTooLong => "name_too_long",
            Remark::TooDeep => "too_deep",
            Remark::TooMany => "too_many",
            Remark::FileTooLarge => "file_too_large",
            Remark::TotalTooLarge => "total_too_large",
            Remark::Changed => "changed",
            Remark::Unreadable => "unreadable",
            Remark::Lost => "lost",
            Remark::SetIdDropped => "set_id_dropped",
            Remark::ModeOverridden => "mode_overridden",
        }
    }

    /// Whether the file is among the outputs in spite of the remark.
    pub fn is_taken(self) -> bool {
        matches!(self, Remark::SetIdDropped | Remark::ModeOverridden)
    }

    /// Whether the remark means that content may be missing. Links, FIFOs, sockets and devices have no content to
    /// lose.
    pub fn loses_content(self) -> bool {
        use Remark::{Device, Fifo, Socket, Symlink};
        !self.is_taken() && !matches!(self, Symlink | Fifo | Socket | Device)
    }
}

/// A path and the remark about it. A path that is too long or too deep to be an [`OutputPath`] is cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemarkedPath {
    /// Escaped by [`escape_text`]; at most the last 4,096 bytes.
    pub path: String,
    /// Why the file was not collected, or what was changed.
    pub remark: Remark,
}

/// The result of collection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectedOutputs {
    /// Sorted by path.
    pub outputs: Vec<Output>,
    /// Sum of the lengths of all outputs. Each name of a hard-linked file counts.
    pub bytes: u64,
    /// The first [`REMARKS_MAX`] remarks, in the order of the walk.
    pub remarks: Vec<RemarkedPath>,
    /// How many remarks of each kind there are, listed or not.
    pub remark_counts: BTreeMap<Remark, u64>,
    /// Inputs that the program did not change.
    pub inputs_unchanged: u64,
    /// Files in cache directories.
    pub cached: u64,
    /// Files that match no `--output` pattern.
    pub not_asked: u64,
}

impl CollectedOutputs {
    /// How many things in the workspace were not collected.
    pub fn refused_count(&self) -> u64 {
        let refused = |(remark, count): (&Remark, &u64)| (!remark.is_taken()).then_some(*count);
        self.remark_counts.iter().filter_map(refused).sum()
    }

    /// Whether content may be missing from the outputs. See [`Remark::loses_content`].
    pub fn loses_content(&self) -> bool {
        self.remark_counts.keys().any(|r| r.loses_content())
    }
}

/// What is to be committed of an attempt's workspace. Durable before the first file moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The version of the format, [`VERSION`].
    pub version: u32,
    /// The outputs and the remarks.
    pub collected: CollectedOutputs,
    /// Patterns of `--expect` that no output matches.
    pub missing: Vec<String>,
    /// The text of `result.json`, if both databases accept it.
    pub result: Option<String>,
    /// Why `result.json` is not stored as JSON, if it exists and is not.
    pub result_note: Option<String>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_has_one_spelling() {
        let hash = ContentHash::of(b"content");
        let text = hash.to_string();
        assert_eq!(text, blake3::hash(b"content").to_hex().as_str());
        assert_eq!(ContentHash::parse(&text).unwrap(), hash);
        let upper = text.to_ascii_uppercase();
        for wrong in [
            &upper,
            &text[1..],
            &format!("{text}0"),
            &text.replace(&text[..1], "g"),
            "",
        ] {
            assert!(ContentHash::parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
