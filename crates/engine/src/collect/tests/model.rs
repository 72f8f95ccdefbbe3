//! Generates hostile trees from a description, and computes from the description what a collection should find. The
//! model shares no code with the collector and never reads the directory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::sample::Index;
use rustix::fs::{CWD, FileType, Mode, makedev};

use super::{OTHER_UID, SIGNATURE};
use crate::collect::CollectionBounds;
use store::types::manifest::Remark;

#[derive(Clone, Debug)]
pub(super) enum EntryKind {
    File {
        seed: u8,
        bytes: usize,
        mode: u32,
    },
    Sparse {
        bytes: usize,
    },
    Dir {
        mode: u32,
    },
    Symlink(&'static str),
    Fifo,
    Socket,
    Device,
    /// Another name of a file that was created before.
    LinkTo(Index),
    /// A file that also has a name outside the tree.
    LinkOutside {
        bytes: usize,
    },
    /// A file of another user.
    Foreign {
        bytes: usize,
    },
    ForeignDir,
    /// A CACHEDIR.TAG, whatever the entry's name.
    Tag {
        valid: bool,
    },
}

#[derive(Clone, Debug)]
pub(super) struct EntryDescription {
    parent: Index,
    name: Vec<u8>,
    kind: EntryKind,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum InputChange {
    Unchanged,
    OtherContent,
    OtherLength,
}

#[derive(Clone, Debug)]
pub(super) struct TreeCase {
    pub(super) entries: Vec<EntryDescription>,
    pub(super) inputs: Vec<(Index, InputChange)>,
    pub(super) bounds: CollectionBounds,
    pub(super) wanted: Option<&'static str>,
    /// The pattern of `--expect`.
    pub(super) expected: Option<&'static str>,
}

const NAMES: &[&[u8]] = &[
    b"a",
    b"b",
    b"sub",
    b"x.csv",
    b"plots",
    b"data",
    b"docs",
    b".fumehood",
    b"__pycache__",
    b".cache",
    b".ipynb_checkpoints",
    b"CACHEDIR.TAG",
    b"new\nline",
    b"\x1b[31m",
    b"\xff\xfe",
    b"-rf",
    b" ",
    b"a\\x41",
    b"result.json",
    "日本".as_bytes(),
    &[b'n'; 255],
];
const TARGETS: &[&str] = &[
    "/etc/passwd",
    "/",
    "..",
    "../..",
    ".",
    "nowhere",
    "a",
    "/proc/self/fd/0",
    "/dev/zero",
    "self-loop",
];
const WANTED: &[Option<&str>] = &[
    None,
    None,
    None,
    None,
    Some("*.csv"),
    Some("**/*.csv"),
    Some("plots"),
    Some("plots/"),
    Some("*/x.csv"),
    Some("plots/x.csv"),
];
const EXPECTED: &[Option<&str>] = &[
    None,
    None,
    None,
    Some("*.csv"),
    Some("**/*.csv"),
    Some("plots"),
    Some("plots/x.csv"),
];

/// What each pattern of [`WANTED`] and [`EXPECTED`] means, computed in another way.
fn is_wanted(glob: &str, path: &[u8]) -> bool {
    let parts: Vec<&[u8]> = path.split(|b| *b == b'/').collect();
    match glob {
        "*.csv" => parts[0].ends_with(b".csv"),
        "**/*.csv" => parts.iter().any(|p| p.ends_with(b".csv")),
        "plots" => parts[0] == b"plots",
        "plots/" => parts[0] == b"plots" && parts.len() > 1,
        "*/x.csv" => parts.len() > 1 && parts[1] == b"x.csv",
        "plots/x.csv" => path == b"plots/x.csv" || path.starts_with(b"plots/x.csv/"),
        other => panic!("{other} is not in the model"),
    }
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_filter("a name", |b| *b != 0 && *b != b'/');
    let odd = prop::collection::vec(byte, 1..6);
    let odd = odd.prop_filter("a name", |n| n != b"." && n != b"..");
    let known = prop::sample::select(NAMES).prop_map(<[u8]>::to_vec);
    prop_oneof![8 => known, 2 => odd]
}

fn kind() -> impl Strategy<Value = EntryKind> {
    let bytes = || prop_oneof![Just(0usize), 1usize..200, Just(5000)];
    let file_mode = prop::sample::select(vec![
        0o644, 0o600, 0o600, 0o000, 0o200, 0o4755, 0o2711, 0o6000, 0o1644,
    ]);
    let dir_mode = prop::sample::select(vec![
        0o755, 0o700, 0o700, 0o700, 0o000, 0o100, 0o400, 0o200, 0o2500,
    ]);
    prop_oneof![
        12 => (0u8..3, bytes(), file_mode).prop_map(|(seed, bytes, mode)| EntryKind::File { seed, bytes, mode }),
        2 => (1usize..20_000).prop_map(|bytes| EntryKind::Sparse { bytes }),
        12 => dir_mode.prop_map(|mode| EntryKind::Dir { mode }),
        2 => prop::sample::select(TARGETS).prop_map(EntryKind::Symlink),
        1 => Just(EntryKind::Fifo),
        1 => Just(EntryKind::Socket),
        1 => Just(EntryKind::Device),
        4 => any::<Index>().prop_map(EntryKind::LinkTo),
        1 => bytes().prop_map(|bytes| EntryKind::LinkOutside { bytes }),
        1 => bytes().prop_map(|bytes| EntryKind::Foreign { bytes }),
        1 => Just(EntryKind::ForeignDir),
        1 => any::<bool>().prop_map(|valid| EntryKind::Tag { valid }),
    ]
}

pub(super) fn case() -> impl Strategy<Value = TreeCase> {
    let entry = (any::<Index>(), name(), kind());
    let entry = entry.prop_map(|(parent, name, kind)| EntryDescription { parent, name, kind });
    let input = prop::sample::select(vec![
        InputChange::Unchanged,
        InputChange::OtherContent,
        InputChange::OtherLength,
    ]);
    let bounds = (
        prop_oneof![Just(u64::MAX), 0u64..6000],
        prop_oneof![Just(u64::MAX), 0u64..300],
        prop_oneof![Just(1000u64), 0u64..12],
        prop_oneof![Just(64u32), 0u32..5],
    );
    (
        prop::collection::vec(entry, 0..50),
        prop::collection::vec((any::<Index>(), input), 0..4),
        bounds,
        (prop::sample::select(WANTED), prop::sample::select(EXPECTED)),
    )
        .prop_map(
            |(entries, inputs, (total_bytes, file_bytes, outputs, depth), (wanted, expected))| {
                TreeCase {
                    entries,
                    inputs,
                    bounds: CollectionBounds {
                        total_bytes,
                        file_bytes,
                        outputs,
                        depth,
                    },
                    wanted,
                    expected,
                }
            },
        )
}

#[derive(Clone, Debug)]
struct File {
    content: Vec<u8>,
    mode: u32,
    foreign: bool,
    outside: bool,
}

#[derive(Clone, Debug)]
enum Node {
    /// The index in `files`.
    File(usize),
    Dir {
        mode: u32,
        foreign: bool,
    },
    Special(Remark),
}

/// A tree that was created.
#[derive(Default)]
pub(super) struct CreatedTree {
    nodes: BTreeMap<Vec<u8>, Node>,
    files: Vec<File>,
}

fn below(top: &Path, path: &[u8]) -> PathBuf {
    top.join(OsStr::from_bytes(path))
}

/// Creates the tree. Without root, leaves out what only root can create.
pub(super) fn make(case: &TreeCase, top: &Path, outside: &Path, root: bool) -> CreatedTree {
    let mut made = CreatedTree::default();
    let mut dirs = vec![Vec::new()];
    for entry in &case.entries {
        let parent: &Vec<u8> = entry.parent.get(&dirs);
        let name: &[u8] = match &entry.kind {
            EntryKind::Tag { .. } => b"CACHEDIR.TAG",
            _ => &entry.name,
        };
        let path = match parent.is_empty() {
            true => name.to_vec(),
            false => [parent, name].join(&b'/'),
        };
        if made.nodes.contains_key(&path) || path.len() > 3000 {
            continue;
        }
        let at = below(top, &path);
        if let Some(node) = made.make_one(&entry.kind, &at, &path, top, outside, root) {
            if matches!(node, Node::Dir { .. }) {
                dirs.push(path.clone());
            }
            made.nodes.insert(path, node);
        }
    }
    // The deepest first, since their parents may become inaccessible.
    for (path, node) in made.nodes.iter().rev() {
        if let Node::Dir { mode, .. } = node {
            fs::set_permissions(below(top, path), fs::Permissions::from_mode(*mode)).unwrap();
        }
    }
    made
}

impl CreatedTree {
    fn make_one(
        &mut self,
        kind: &EntryKind,
        at: &Path,
        path: &[u8],
        top: &Path,
        outside: &Path,
        root: bool,
    ) -> Option<Node> {
        let node = |kind| rustix::fs::mknodat(CWD, at, kind, Mode::RUSR, makedev(1, 5)).unwrap();
        let own = || std::os::unix::fs::lchown(at, Some(OTHER_UID), Some(OTHER_UID)).unwrap();
        Some(match kind {
            EntryKind::File { seed, bytes, mode } => self.file(at, vec![*seed; *bytes], *mode),
            EntryKind::Sparse { bytes } => {
                let file = fs::File::create(at).unwrap();
                file.set_len(*bytes as u64).unwrap();
                fs::set_permissions(at, fs::Permissions::from_mode(0o600)).unwrap();
                self.add(vec![0; *bytes], 0o600)
            }
            EntryKind::Tag { valid } => {
                let mut content = SIGNATURE.to_vec();
                content[20] ^= u8::from(!valid);
                content.extend(b"\n# made by a test\n");
                self.file(at, content, 0o600)
            }
            EntryKind::LinkTo(index) => {
                let is_file = |n: &(&Vec<u8>, &Node)| matches!(n.1, Node::File(_));
                let files: Vec<_> = self.nodes.iter().filter(is_file).collect();
                if files.is_empty() {
                    return None;
                }
                let (other, node) = files[index.index(files.len())];
                let foreign = matches!(node, Node::File(n) if self.files[*n].foreign);
                if foreign || path == other.as_slice() {
                    return None;
                }
                // The kernel may forbid hard links to set-id files and to files that the user cannot read and write.
                fs::hard_link(below(top, other), at).ok()?;
                node.clone()
            }
            EntryKind::LinkOutside { bytes } => {
                let made = self.file(at, vec![7; *bytes], 0o600);
                fs::hard_link(at, outside.join(self.files.len().to_string())).unwrap();
                self.files.last_mut().unwrap().outside = true;
                made
            }
            EntryKind::Foreign { bytes } if root => {
                let made = self.file(at, vec![9; *bytes], 0o644);
                own();
                self.files.last_mut().unwrap().foreign = true;
                made
            }
            EntryKind::Dir { mode } => {
                fs::create_dir(at).unwrap();
                Node::Dir {
                    mode: *mode,
                    foreign: false,
                }
            }
            EntryKind::ForeignDir if root => {
                fs::create_dir(at).unwrap();
                own();
                Node::Dir {
                    mode: 0o755,
                    foreign: true,
                }
            }
            EntryKind::Symlink(target) => {
                symlink(target, at).unwrap();
                Node::Special(Remark::Symlink)
            }
            EntryKind::Fifo => {
                node(FileType::Fifo);
                Node::Special(Remark::Fifo)
            }
            EntryKind::Socket => {
                node(FileType::Socket);
                Node::Special(Remark::Socket)
            }
            EntryKind::Device if root => {
                let kinds = [FileType::CharacterDevice, FileType::BlockDevice];
                node(kinds[path.len() % 2]);
                Node::Special(Remark::Device)
            }
            EntryKind::Foreign { .. } | EntryKind::ForeignDir | EntryKind::Device => return None,
        })
    }

    fn file(&mut self, at: &Path, content: Vec<u8>, mode: u32) -> Node {
        fs::write(at, &content).unwrap();
        fs::set_permissions(at, fs::Permissions::from_mode(mode)).unwrap();
        self.add(content, mode)
    }

    fn add(&mut self, content: Vec<u8>, mode: u32) -> Node {
        self.files.push(File {
            content,
            mode,
            foreign: false,
            outside: false,
        });
        Node::File(self.files.len() - 1)
    }

    /// The inputs of the case: path, length and hash.
    pub(super) fn inputs(&self, case: &TreeCase) -> BTreeMap<Vec<u8>, (u64, blake3::Hash)> {
        let files: Vec<(&Vec<u8>, &File)> = self
            .nodes
            .iter()
            .filter_map(|(p, n)| match n {
                Node::File(file) => Some((p, &self.files[*file])),
                _ => None,
            })
            .collect();
        let mut inputs = BTreeMap::new();
        for (index, input) in case.inputs.iter().filter(|_| !files.is_empty()) {
            let (path, file) = files[index.index(files.len())];
            let bytes = file.content.len() as u64;
            let hash = blake3::hash(&file.content);
            let was = match input {
                InputChange::Unchanged => (bytes, hash),
                InputChange::OtherContent => (bytes, blake3::hash(b"something else")),
                InputChange::OtherLength => (bytes + 1, hash),
            };
            inputs.insert(path.clone(), was);
        }
        inputs
    }
}

/// The expected result of a collection.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ExpectedCollection {
    /// Path, length, hash, and index of the file.
    pub(super) outputs: Vec<(Vec<u8>, u64, String, usize)>,
    pub(super) bytes: u64,
    pub(super) remarks: BTreeSet<(Vec<u8>, Remark)>,
    pub(super) inputs_unchanged: u64,
    pub(super) cached: u64,
    pub(super) not_asked: u64,
}

#[derive(Clone, Copy)]
struct WalkedDirectory {
    in_cache: bool,
    depth: u32,
}

impl CreatedTree {
    pub(super) fn expected(&self, case: &TreeCase, root: bool) -> ExpectedCollection {
        let inputs = self.inputs(case);
        let mut expected = ExpectedCollection::default();
        let mut candidates = Vec::new();
        let mut walked: HashMap<&[u8], WalkedDirectory> = HashMap::new();
        walked.insert(
            b"",
            WalkedDirectory {
                in_cache: false,
                depth: 0,
            },
        );
        for (path, node) in &self.nodes {
            let (parent, name) = split(path);
            let Some(up) = walked.get(parent).copied() else {
                continue;
            };
            if path == b".fumehood" {
                continue;
            }
            if up.depth >= case.bounds.depth {
                let dir = if parent.is_empty() { b"." } else { parent };
                expected.remarks.insert((dir.to_vec(), Remark::TooDeep));
                continue;
            }
            let known_cache =
                [&b"__pycache__"[..], b".cache", b".ipynb_checkpoints"].contains(&name);
            let deeper = up.depth + 1;
            match node {
                Node::Dir { .. } if up.in_cache || known_cache => {
                    if deeper < case.bounds.depth {
                        walked.insert(
                            path,
                            WalkedDirectory {
                                in_cache: true,
                                depth: deeper,
                            },
                        );
                    }
                }
                _ if up.in_cache => expected.cached += 1,
                Node::Dir { foreign, mode } => {
                    let view = path == b"data" || path == b"docs";
                    if *foreign && !view {
                        expected.remarks.insert((path.clone(), Remark::NotOwned));
                        continue;
                    }
                    let in_cache = deeper < case.bounds.depth && self.is_tagged(path);
                    if !root && mode & 0o500 != 0o500 && !in_cache {
                        expected
                            .remarks
                            .insert((path.clone(), Remark::ModeOverridden));
                    }
                    walked.insert(
                        path,
                        WalkedDirectory {
                            in_cache,
                            depth: deeper,
                        },
                    );
                }
                Node::Special(remark) => {
                    expected.remarks.insert((path.clone(), *remark));
                }
                Node::File(file) => {
                    self.judge(case, &inputs, path, *file, &mut expected, &mut candidates)
                }
            }
        }
        candidates.sort_by_key(|(path, file)| self.sort_key(case, path, *file));
        for (path, _) in candidates.iter().skip(case.bounds.outputs as usize) {
            expected.remarks.insert((path.clone(), Remark::TooMany));
        }
        candidates.truncate(case.bounds.outputs as usize);
        self.take(case, candidates, root, &mut expected);
        expected.outputs.sort();
        expected
    }

    /// The sort key of a candidate; the smallest keys are kept.
    fn sort_key(&self, case: &TreeCase, path: &[u8], file: usize) -> (u8, usize, usize, Vec<u8>) {
        let is_whole = |glob: Option<&str>| {
            matches!(glob, Some("plots" | "plots/x.csv")) && glob.map(str::as_bytes) == Some(path)
        };
        let class = if is_whole(case.wanted) || is_whole(case.expected) {
            0
        } else if case.expected.is_some_and(|glob| is_wanted(glob, path)) {
            1
        } else if path == b"result.json" {
            2
        } else {
            3
        };
        let depth = path.split(|byte| *byte == b'/').count();
        (class, depth, self.files[file].content.len(), path.to_vec())
    }

    fn is_tagged(&self, dir: &[u8]) -> bool {
        let tag = [dir, b"CACHEDIR.TAG"].join(&b'/');
        match self.nodes.get(&tag) {
            Some(Node::File(file)) => self.files[*file].content.starts_with(SIGNATURE),
            _ => false,
        }
    }

    fn judge(
        &self,
        case: &TreeCase,
        inputs: &BTreeMap<Vec<u8>, (u64, blake3::Hash)>,
        path: &[u8],
        file: usize,
        expected: &mut ExpectedCollection,
        candidates: &mut Vec<(Vec<u8>, usize)>,
    ) {
        let (content, foreign) = (&self.files[file].content, self.files[file].foreign);
        let as_put = (content.len() as u64, blake3::hash(content));
        if case.wanted.is_some_and(|glob| !is_wanted(glob, path)) {
            expected.not_asked += 1;
        } else if foreign {
            expected.remarks.insert((path.to_vec(), Remark::NotOwned));
        } else if inputs.get(path) == Some(&as_put) {
            expected.inputs_unchanged += 1;
        } else if content.len() as u64 > case.bounds.file_bytes {
            expected
                .remarks
                .insert((path.to_vec(), Remark::FileTooLarge));
        } else {
            candidates.push((path.to_vec(), file));
        }
    }

    fn take(
        &self,
        case: &TreeCase,
        candidates: Vec<(Vec<u8>, usize)>,
        root: bool,
        expected: &mut ExpectedCollection,
    ) {
        for (path, number) in candidates {
            let file = &self.files[number];
            let bytes = file.content.len() as u64;
            if file.outside {
                expected.remarks.insert((path, Remark::LinkedElsewhere));
                continue;
            }
            if expected.bytes + bytes > case.bounds.total_bytes {
                expected.remarks.insert((path, Remark::TotalTooLarge));
                continue;
            }
            expected.bytes += bytes;
            if file.mode & 0o6000 != 0 {
                expected
                    .remarks
                    .insert((path.clone(), Remark::SetIdDropped));
            }
            if !root && file.mode & 0o400 == 0 {
                expected
                    .remarks
                    .insert((path.clone(), Remark::ModeOverridden));
            }
            let hash = blake3::hash(&file.content).to_hex().to_string();
            expected.outputs.push((path, bytes, hash, number));
        }
    }
}

/// The directory and the name in it.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}
