//! What an analysis left, as data: the manifest. Written by collection, durable before the first file moves, read by
//! the store and by recovery, which therefore never walk a half-moved tree.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::escaping::{escape_text, unescape_text};

/// The longest path. The kernel would take 4,095 bytes in one call, but a path is part of a key, for which PostgreSQL
/// has 2,704 bytes in all, and other programs put directories before it.
pub const PATH_BYTES_MAX: usize = 2047;
/// What nearly every file system allows, and what an artifact can be exported under.
pub const COMPONENT_BYTES_MAX: usize = 255;

pub const VERSION: u32 = 1;
/// How many entries that were not taken as they were are listed; the rest is counted.
pub const REMARKS_MAX: usize = 1_000;

/// A path below the workspace: any bytes, in components that lead nowhere else. As text (JSON, SQL, terminal) it is
/// escaped by [`escape_text`], which round-trips.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OutputPath(Vec<u8>);

#[derive(Debug, thiserror::Error)]
#[error("{given:?} is not a relative path of plain components")]
pub struct BadPath {
    given: String,
}

impl OutputPath {
    pub fn new(bytes: Vec<u8>) -> Result<OutputPath, BadPath> {
        let plain = |part: &[u8]| !part.is_empty() && part != b"." && part != b"..";
        match !bytes.contains(&0) && bytes.split(|b| *b == b'/').all(plain) {
            true => Ok(OutputPath(bytes)),
            false => Err(BadPath {
                given: escape_text(&bytes).chars().take(200).collect(),
            }),
        }
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Escaped; what is stored and shown.
    pub fn text(&self) -> String {
        escape_text(&self.0)
    }

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
    type Error = BadPath;
    fn try_from(text: String) -> Result<OutputPath, BadPath> {
        match unescape_text(&text) {
            Some(bytes) => OutputPath::new(bytes),
            None => Err(BadPath { given: text }),
        }
    }
}

impl From<OutputPath> for String {
    fn from(path: OutputPath) -> String {
        path.text()
    }
}

/// The blake3 of some content; names its object in the store. 64 lower-case hex digits as text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContentHash([u8; 32]);

#[derive(Debug, thiserror::Error)]
#[error("{given:?} is not a hash of 64 lower-case hex digits")]
pub struct BadHash {
    given: String,
}

impl ContentHash {
    pub fn of(bytes: &[u8]) -> ContentHash {
        ContentHash(*blake3::hash(bytes).as_bytes())
    }

    pub fn from_bytes(bytes: [u8; 32]) -> ContentHash {
        ContentHash(bytes)
    }

    pub fn parse(text: &str) -> Result<ContentHash, BadHash> {
        let bad = || BadHash {
            given: text.chars().take(100).collect(),
        };
        let digits: Vec<u8> = text
            .bytes()
            .map(|b| match b {
                b'0'..=b'9' => Ok(b - b'0'),
                b'a'..=b'f' => Ok(b - b'a' + 10),
                _ => Err(bad()),
            })
            .collect::<Result<_, _>>()?;
        let bytes: Vec<u8> = digits
            .chunks(2)
            .map(|pair| pair[0] << 4 | pair.get(1).copied().unwrap_or(0))
            .collect();
        match (digits.len(), <[u8; 32]>::try_from(bytes)) {
            (64, Ok(bytes)) => Ok(ContentHash(bytes)),
            _ => Err(bad()),
        }
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TryFrom<String> for ContentHash {
    type Error = BadHash;
    fn try_from(text: String) -> Result<ContentHash, BadHash> {
        ContentHash::parse(&text)
    }
}

impl From<ContentHash> for String {
    fn from(hash: ContentHash) -> String {
        hash.to_string()
    }
}

/// One file that was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    pub path: OutputPath,
    /// Its length; of a sparse file too.
    pub bytes: u64,
    pub blake3: ContentHash,
    /// Guessed from the first bytes and the ending; says nothing about safety.
    pub media_type: String,
    /// Unix time in milliseconds, as the program left it; so it proves nothing.
    pub modified_ms: i64,
    /// The inode it was when it was hashed: several outputs with the same one are hard links of each other.
    pub inode: u64,
}

/// Why something was not taken, or not taken as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remark {
    Symlink,
    Fifo,
    Socket,
    Device,
    /// Another file system, or a bind of the same one, is mounted there.
    MountPoint,
    /// A hard link whose other name is outside the workspace.
    LinkedElsewhere,
    /// Owned by another than the run.
    NotOwned,
    NameTooLong,
    TooDeep,
    TooMany,
    FileTooLarge,
    TotalTooLarge,
    /// It changed while it was read: somebody is alive.
    Changed,
    /// The kernel would not let it be read.
    Unreadable,
    /// It was on the list, and was gone before it could be taken (/tmp emptied after a crash).
    Lost,
    /// Taken, and its set-id bits were dropped.
    SetIdDropped,
    /// Taken, though its mode forbade reading.
    ModeOverridden,
}

impl Remark {
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

    /// Whether the file is among the outputs all the same.
    pub fn taken(self) -> bool {
        matches!(self, Remark::SetIdDropped | Remark::ModeOverridden)
    }

    /// Whether content may be missing because of it. What never was a file has none.
    pub fn loses_content(self) -> bool {
        use Remark::{Device, Fifo, Socket, Symlink};
        !self.taken() && !matches!(self, Symlink | Fifo | Socket | Device)
    }
}

/// One of the listed ones. The path may be too long or too deep to be an [`OutputPath`] of ours; it is then cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remarked {
    /// Escaped by [`escape_text`]; at most 4,096 bytes of it, from the end.
    pub path: String,
    pub remark: Remark,
}

/// Everything that collection found out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    /// Sorted by path.
    pub outputs: Vec<Output>,
    /// Sum of the lengths, each hard-linked file once.
    pub bytes: u64,
    /// The first [`REMARKS_MAX`] in the order of the walk.
    pub remarks: Vec<Remarked>,
    pub remark_counts: BTreeMap<Remark, u64>,
    /// Inputs that are as they were put there.
    pub inputs_unchanged: u64,
    /// Files in caches.
    pub cached: u64,
    /// Files that no `--output` asked for.
    pub not_asked: u64,
}

impl Collected {
    pub fn refused(&self) -> u64 {
        let refused = |(remark, count): (&Remark, &u64)| (!remark.taken()).then_some(*count);
        self.remark_counts.iter().filter_map(refused).sum()
    }

    pub fn loses_content(&self) -> bool {
        self.remark_counts.keys().any(|r| r.loses_content())
    }
}

/// What is committed of what an attempt left. Durable before the first file moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub version: u32,
    pub collected: Collected,
    /// Patterns of `--expect` that nothing matches.
    pub missing: Vec<String>,
    /// `result.json`, where both databases take it.
    pub result: Option<String>,
    /// Why it is not taken, where there is one.
    pub result_note: Option<String>,
}
