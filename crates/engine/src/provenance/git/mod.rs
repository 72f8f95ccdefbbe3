//! The commit of a project, and whether its files match the commit, read from `.git` without git.
//!
//! Git is never started: a project's `.git/config` can name programs that git runs, and the code to be confined may
//! have written the project. For the same reason no symlink in `.git` is followed, a `.git` that points elsewhere
//! (worktrees, submodules) counts only if it belongs to the owner of the project, and every read is bounded. A
//! project is reported clean only if that is proved; otherwise the result says what is unknown.
//!
//! - `changes.rs`: whether tracked files differ from the commit.
//! - `index.rs`: the index.
//! - `objects.rs`: loose and packed objects.

mod changes;
mod index;
mod objects;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FileType;

use super::files::InspectedDir;

/// Every run pays for this, and a large repository must not delay it.
pub(super) const TIME_MAX: Duration = Duration::from_millis(300);
/// The most bytes of decompressed objects and of files compared with them.
const CONTENT_BYTES_MAX: usize = 64 << 20;
const ANCESTORS_MAX: usize = 32;
const LINKS_MAX: usize = 5;
/// The most bytes of HEAD, of a reference, and of a file that names a git directory.
const LINE_BYTES_MAX: usize = 4096;
const PACKED_REFS_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug, thiserror::Error)]
pub(super) enum GitUnknown {
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
    #[error("HEAD cannot be read or understood")]
    Head,
    #[error("no commit of the branch can be found")]
    NoCommit,
    #[error("the index cannot be read, or is of an unsupported kind")]
    Index,
    #[error("the commit's tree cannot be read")]
    Tree,
    #[error("the times of some files differ from the index, and their blobs cannot be read")]
    Content,
    #[error("some files may have passed through a filter")]
    Filter,
    #[error("a submodule cannot be looked into")]
    Submodule,
    #[error("the repository is too large to be checked within the time limit")]
    TooLarge,
}

/// What was found out about a repository.
#[derive(Debug)]
pub(super) struct RepositoryState {
    /// The directory that holds `.git`: the project, or a directory above it.
    pub(super) top: PathBuf,
    pub(super) head: Result<GitHead, GitUnknown>,
    pub(super) dirty: Result<bool, GitUnknown>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GitHead {
    pub(super) commit: Result<Vec<u8>, NoCommit>,
    /// `None` if HEAD names a commit directly.
    pub(super) branch: Option<Vec<u8>>,
}

/// A branch without a commit: in a new repository, or if its references cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoCommit;

/// How much time and data may still be spent on one project.
pub(super) struct ReadBudget {
    deadline: Instant,
    bytes: usize,
}

impl ReadBudget {
    fn new(time_max: Duration) -> ReadBudget {
        ReadBudget {
            deadline: Instant::now() + time_max,
            bytes: CONTENT_BYTES_MAX,
        }
    }

    fn spend(&mut self, bytes: usize) -> Option<()> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        self.has_time().then_some(())
    }

    fn has_time(&self) -> bool {
        Instant::now() < self.deadline
    }
}

/// The repository that contains `project`, a canonical path; `None` if there is none. Whether it is clean stays
/// unknown if that takes longer than `time_max`.
pub(super) fn inspect(
    project: &Path,
    time_max: Duration,
) -> Result<Option<RepositoryState>, GitUnknown> {
    let owner = InspectedDir::open(project)
        .and_then(|dir| dir.owner())
        .map_err(GitUnknown::Project)?;
    for top in project.ancestors().take(ANCESTORS_MAX) {
        let Ok(work) = InspectedDir::open(top) else {
            continue;
        };
        if let Some(repository) = Repository::open(work, owner)? {
            let head = repository.head();
            let commit = head.as_ref().map(|head| head.commit.clone());
            let dirty = match commit {
                Ok(Ok(commit)) => {
                    changes::has_changes(&repository, &commit, &mut ReadBudget::new(time_max))
                }
                _ => Err(GitUnknown::NoCommit),
            };
            return Ok(Some(RepositoryState {
                top: top.to_path_buf(),
                head,
                dirty,
            }));
        }
    }
    Ok(None)
}

struct Repository {
    /// The working tree.
    work: InspectedDir,
    /// The directory with HEAD and index.
    git: InspectedDir,
    /// The directory with references and objects: the same as `git`, except in an additional worktree.
    common: InspectedDir,
    /// The uid to which all three directories must belong.
    owner: u32,
}

impl Repository {
    /// Opens the repository of a working tree. `None` if the directory has no `.git`.
    fn open(work: InspectedDir, owner: u32) -> Result<Option<Repository>, GitUnknown> {
        let Some(stat) = work.stat(b".git").map_err(GitUnknown::Unreadable)? else {
            return Ok(None);
        };
        let git = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => work.open_dir(b".git").map_err(GitUnknown::Unreadable)?,
            FileType::RegularFile => {
                let text = work
                    .read_whole(b".git", LINE_BYTES_MAX)
                    .map_err(GitUnknown::Unreadable)?;
                let path = text.strip_prefix(b"gitdir:").ok_or(GitUnknown::Special)?;
                work.open_stated(path.trim_ascii())
                    .map_err(GitUnknown::Elsewhere)?
            }
            _ => return Err(GitUnknown::Special),
        };
        let common = match git.read_whole(b"commondir", LINE_BYTES_MAX) {
            Ok(path) => git.open_stated(path.trim_ascii()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => git.open_stated(b"."),
            Err(error) => Err(error),
        };
        let common = common.map_err(GitUnknown::Elsewhere)?;
        for dir in [&work, &git, &common] {
            if dir.owner().map_err(GitUnknown::Unreadable)? != owner {
                return Err(GitUnknown::NotOwned);
            }
        }
        Ok(Some(Repository {
            work,
            git,
            common,
            owner,
        }))
    }

    fn head(&self) -> Result<GitHead, GitUnknown> {
        let text = self
            .git
            .read_whole(b"HEAD", LINE_BYTES_MAX)
            .map_err(|_| GitUnknown::Head)?;
        let Some(name) = text.strip_prefix(b"ref:") else {
            let commit = unhex(text.trim_ascii()).ok_or(GitUnknown::Head)?;
            let branch = None;
            return Ok(GitHead {
                commit: Ok(commit),
                branch,
            });
        };
        let name = name.trim_ascii();
        if !is_reference(name) {
            return Err(GitUnknown::Head);
        }
        let branch = name.strip_prefix(b"refs/heads/").unwrap_or(name).to_vec();
        Ok(GitHead {
            commit: self.resolve(name.to_vec()).ok_or(NoCommit),
            branch: Some(branch),
        })
    }

    /// The commit to which a reference leads.
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
                Err(_) => return self.find_packed(&name),
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

    /// Finds a reference in `packed-refs`, which holds one per line.
    fn find_packed(&self, name: &[u8]) -> Option<Vec<u8>> {
        let file = self.common.open_file(b"packed-refs").ok()?;
        let mut lines = BufReader::with_capacity(1 << 16, file.take(PACKED_REFS_BYTES_MAX));
        let mut line = Vec::new();
        loop {
            line.clear();
            let mut bounded = lines.by_ref().take(2 * LINE_BYTES_MAX as u64);
            let got = bounded.read_until(b'\n', &mut line).ok()?;
            // A line without a newline is the last, or longer than any reference.
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

/// Whether this is `refs/…` with plain components. Every reference that git creates passes.
fn is_reference(name: &[u8]) -> bool {
    let plain = |part: &[u8]| !part.is_empty() && part != b"." && part != b"..";
    name.starts_with(b"refs/")
        && name.len() <= 1024
        && name.iter().all(|b| *b >= b' ' && *b != 0x7f)
        && name.split(|b| *b == b'/').all(plain)
}

pub(super) fn hex(id: &[u8]) -> String {
    id.iter().map(|b| format!("{b:02x}")).collect()
}

/// Parses an id: SHA-1, or SHA-256 in repositories that use it.
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
