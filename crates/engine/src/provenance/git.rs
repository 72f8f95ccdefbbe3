//! The commit a project stands at, and whether its files are that commit's: read from `.git` by hand.
//!
//! Git is never started: a project's `.git/config` can name programs that git runs, and the project may have been written by the
//! code to be confined. For the same reason no symlink in `.git` is followed, a `.git` that points elsewhere (worktrees,
//! submodules) counts only if it belongs to the owner of the project, and everything read has a bound. What this cannot find out
//! it says; that a project is clean it says only when it has proved it.

mod changes;
mod index;
mod inflate;
mod objects;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FileType;

use super::files::Dir;

/// Every run pays for this, and a large repository must not hold it up.
pub(super) const TIME_MAX: Duration = Duration::from_millis(300);
/// Of objects unpacked and files compared with them.
const CONTENT_BYTES_MAX: usize = 64 << 20;
const ANCESTORS_MAX: usize = 32;
const LINKS_MAX: usize = 5;
/// HEAD, a reference, or where a git directory lies.
const LINE_BYTES_MAX: usize = 4096;
const PACKED_REFS_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug, thiserror::Error)]
pub(super) enum Unknown {
    #[error("the project cannot be opened")]
    Project(#[source] std::io::Error),
    #[error(".git is neither a directory nor a file")]
    Special,
    #[error(".git cannot be read")]
    Unreadable(#[source] std::io::Error),
    #[error(".git or what it points to belongs to somebody else than the project")]
    NotOwned,
    #[error(".git points to a directory that cannot be opened")]
    Elsewhere(#[source] std::io::Error),
    #[error("HEAD is not one that can be read")]
    Head,
    #[error("the branch has no commit that can be found")]
    NoCommit,
    #[error("the index cannot be read, or is of a kind that is not known")]
    Index,
    #[error("the commit's tree cannot be read")]
    Tree,
    #[error(
        "some files have other times than git remembers, and what git has of them cannot be read"
    )]
    Content,
    #[error("some files may have passed through a filter")]
    Filter,
    #[error("a submodule cannot be looked into")]
    Submodule,
    #[error("it is too large to be looked through in the time there is")]
    TooLarge,
}

/// What was found out.
#[derive(Debug)]
pub(super) struct Found {
    /// Where `.git` is: the project, or a directory above it.
    pub(super) top: PathBuf,
    pub(super) head: Result<Head, Unknown>,
    pub(super) dirty: Result<bool, Unknown>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) commit: Result<Vec<u8>, NoCommit>,
    /// `None` if HEAD names a commit.
    pub(super) branch: Option<Vec<u8>>,
}

/// A branch without a commit: a new repository, or references that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoCommit;

/// What may be spent on one project.
pub(super) struct Budget {
    until: Instant,
    bytes: usize,
}

impl Budget {
    fn new(time_max: Duration) -> Budget {
        Budget {
            until: Instant::now() + time_max,
            bytes: CONTENT_BYTES_MAX,
        }
    }

    fn spend(&mut self, bytes: usize) -> Option<()> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        self.left().then_some(())
    }

    fn left(&self) -> bool {
        Instant::now() < self.until
    }
}

/// The repository that `project`, a canonical path, lies in; `None` if it lies in none. After `time_max` it is
/// given up to find out whether that is clean.
pub(super) fn look(project: &Path, time_max: Duration) -> Result<Option<Found>, Unknown> {
    let owner = Dir::open(project)
        .and_then(|dir| dir.owner())
        .map_err(Unknown::Project)?;
    for top in project.ancestors().take(ANCESTORS_MAX) {
        let Ok(work) = Dir::open(top) else {
            continue;
        };
        if let Some(repository) = Repository::of(work, owner)? {
            let head = repository.head();
            let commit = head.as_ref().map(|head| head.commit.clone());
            let dirty = match commit {
                Ok(Ok(commit)) => changes::any(&repository, &commit, &mut Budget::new(time_max)),
                _ => Err(Unknown::NoCommit),
            };
            return Ok(Some(Found {
                top: top.to_path_buf(),
                head,
                dirty,
            }));
        }
    }
    Ok(None)
}

struct Repository {
    /// The files.
    work: Dir,
    /// HEAD and index.
    git: Dir,
    /// References and objects: `git` itself, unless this is one of several worktrees.
    common: Dir,
    /// To whom all of it must belong.
    owner: u32,
}

impl Repository {
    /// `None` if there is no `.git` in the directory.
    fn of(work: Dir, owner: u32) -> Result<Option<Repository>, Unknown> {
        let Some(stat) = work.stat(b".git").map_err(Unknown::Unreadable)? else {
            return Ok(None);
        };
        let git = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => work.sub(b".git").map_err(Unknown::Unreadable)?,
            FileType::RegularFile => {
                let text = work
                    .read_whole(b".git", LINE_BYTES_MAX)
                    .map_err(Unknown::Unreadable)?;
                let path = text.strip_prefix(b"gitdir:").ok_or(Unknown::Special)?;
                work.stated(path.trim_ascii()).map_err(Unknown::Elsewhere)?
            }
            _ => return Err(Unknown::Special),
        };
        let common = match git.read_whole(b"commondir", LINE_BYTES_MAX) {
            Ok(path) => git.stated(path.trim_ascii()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => git.stated(b"."),
            Err(error) => Err(error),
        };
        let common = common.map_err(Unknown::Elsewhere)?;
        for dir in [&work, &git, &common] {
            if dir.owner().map_err(Unknown::Unreadable)? != owner {
                return Err(Unknown::NotOwned);
            }
        }
        Ok(Some(Repository {
            work,
            git,
            common,
            owner,
        }))
    }

    fn head(&self) -> Result<Head, Unknown> {
        let text = self
            .git
            .read_whole(b"HEAD", LINE_BYTES_MAX)
            .map_err(|_| Unknown::Head)?;
        let Some(name) = text.strip_prefix(b"ref:") else {
            let commit = unhex(text.trim_ascii()).ok_or(Unknown::Head)?;
            let branch = None;
            return Ok(Head {
                commit: Ok(commit),
                branch,
            });
        };
        let name = name.trim_ascii();
        if !is_reference(name) {
            return Err(Unknown::Head);
        }
        let branch = name.strip_prefix(b"refs/heads/").unwrap_or(name).to_vec();
        Ok(Head {
            commit: self.resolve(name.to_vec()).ok_or(NoCommit),
            branch: Some(branch),
        })
    }

    /// The commit that a reference leads to.
    fn resolve(&self, mut name: Vec<u8>) -> Option<Vec<u8>> {
        for _ in 0..LINKS_MAX {
            let own = [
                b"refs/worktree/".as_slice(),
                b"refs/bisect/",
                b"refs/rewritten/",
            ];
            let dir = match own.iter().any(|own| name.starts_with(own)) {
                true => &self.git,
                false => &self.common,
            };
            let text = match dir.read_whole(&name, LINE_BYTES_MAX) {
                Ok(text) => text,
                Err(_) => return self.packed(&name),
            };
            match text.strip_prefix(b"ref:") {
                None => return unhex(text.trim_ascii()),
                Some(next) => name = next.trim_ascii().to_vec(),
            }
            if !is_reference(&name) {
                return None;
            }
        }
        None
    }

    /// A reference kept in `packed-refs`, one to a line.
    fn packed(&self, name: &[u8]) -> Option<Vec<u8>> {
        let file = self.common.file(b"packed-refs").ok()?;
        let mut lines = BufReader::with_capacity(1 << 16, file.take(PACKED_REFS_BYTES_MAX));
        let mut line = Vec::new();
        loop {
            line.clear();
            let mut bounded = lines.by_ref().take(2 * LINE_BYTES_MAX as u64);
            let got = bounded.read_until(b'\n', &mut line).ok()?;
            // A line without an end is the last, or longer than any reference.
            if got == 0 || !line.ends_with(b"\n") {
                return None;
            }
            let line = line.trim_ascii_end();
            if let Some(commit) = line.strip_suffix(name).and_then(|l| l.strip_suffix(b" ")) {
                return unhex(commit);
            }
        }
    }
}

/// `refs/…` of plain components. Stricter than git in nothing that git makes.
fn is_reference(name: &[u8]) -> bool {
    let plain = |part: &[u8]| !part.is_empty() && part != b"." && part != b"..";
    name.starts_with(b"refs/")
        && name.len() <= 1024
        && name.iter().all(|b| *b >= b' ' && *b != 0x7f)
        && name.split(|b| *b == b'/').all(plain)
}

pub(super) fn hex(id: &[u8]) -> String {
    let digit = |n: u8| char::from(b"0123456789abcdef"[usize::from(n)]);
    let pairs = id.iter().map(|b| [digit(b >> 4), digit(b & 15)]);
    pairs.flatten().collect()
}

/// An id: SHA-1, or SHA-256 in repositories that use it.
fn unhex(text: &[u8]) -> Option<Vec<u8>> {
    if !matches!(text.len(), 40 | 64) {
        return None;
    }
    let digit = |b: u8| match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'a'..=b'f' => Some(b - b'a' + 10),
        _ => None,
    };
    text.chunks(2)
        .map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?))
        .collect()
}
