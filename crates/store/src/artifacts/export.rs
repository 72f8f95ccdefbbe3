//! Exports outputs from the store into a directory of the user.
//!
//! Other people may have write access to the directory and may put links into it. The export opens the directory once
//! and reaches everything below through descriptors, one component at a time. It never follows a symlink and never
//! writes through one. It finds all conflicts before it writes anything. A file gets its name only when it is
//! complete.
//!
//! Outputs with equal content share their blocks if the file system can clone files. Otherwise each output is a copy
//! of its own, because a later write to one must not change another, as long as the copies do not exceed the size
//! that the record gives. In old records, which counted a hard-linked file once, the names add up to more than that
//! size. Beyond it, equal outputs become hard links, as they were in the workspace.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::files;
use crate::types::escaping::escape_terminal;
use crate::types::manifest::{ContentHash, OutputPath};
use crate::types::random_hex::{random_hex, to_hex};

/// How many conflicts an error message lists.
const CONFLICTS_MAX: usize = 20;
/// The modes of new files and directories, before the user's umask.
const FILE_MODE: Mode = Mode::from_raw_mode(0o644);
const DIR_MODE: Mode = Mode::from_raw_mode(0o755);
/// The mode of the directory to export to, before the umask: that of any directory that the user creates.
const TOP_MODE: Mode = Mode::from_raw_mode(0o777);

/// What to do with what is in the way of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// Report a conflict, and write nothing.
    Never,
    /// Replaces files and links that are in the way, but not directories.
    Files,
}

/// The bytes of an output.
#[derive(Debug)]
pub enum ExportContent {
    /// A file of an artifact store. It is read from its beginning, and holes stay holes.
    File(File),
    /// Bytes from the database.
    Bytes(Vec<u8>),
}

/// One file that an export wrote.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ExportedFile {
    /// The path below the directory exported to.
    pub path: OutputPath,
    /// The length of the file.
    pub bytes: u64,
    /// 64 lower-case hex digits, computed from the bytes that were written.
    pub sha256: String,
}

/// Why an export failed.
#[allow(missing_docs, reason = "the variants say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Opening or making the directory to export to failed.
    #[error("open the directory {path:?} to export to")]
    Open { path: PathBuf, source: io::Error },
    /// Paths are in the way. Nothing was written.
    #[error(
        "export to {to:?}: {} in the way; nothing was written: {}",
        if *.count == 1 { "1 path is".to_owned() } else { format!("{} paths are", .count) },
        .first.join("; ")
    )]
    Conflicts {
        to: PathBuf,
        /// The first conflicts, each with advice.
        first: Vec<String>,
        count: usize,
    },
    /// Finding out what is at a path failed. Nothing was written.
    #[error("look at {path:?} in the directory to export to; nothing was written")]
    Look { path: OutputPath, source: io::Error },
    /// Writing an output failed. `written` lists the outputs that were written before.
    #[error("export {path:?}; {} of the outputs were written before", .written.len())]
    Write {
        path: OutputPath,
        written: Vec<ExportedFile>,
        source: io::Error,
    },
    /// The content of an output is not that of its hash. `written` lists the outputs that were written before.
    #[error(
        "export {path:?}: the store's content is damaged, and was not written; {} of the outputs were written before",
        .written.len()
    )]
    Damaged {
        path: OutputPath,
        written: Vec<ExportedFile>,
    },
}

/// Writes outputs below `to`, which is created if necessary. Fails if `to` leads through a symlink. Copies at most
/// `bytes_max` bytes.
pub fn export(
    source: &mut dyn FnMut(&ContentHash) -> io::Result<ExportContent>,
    outputs: &[(OutputPath, u64, ContentHash)],
    to: &Path,
    overwrite: Overwrite,
    bytes_max: u64,
) -> Result<Vec<ExportedFile>, ExportError> {
    let failed = |source: io::Error| ExportError::Open {
        path: to.to_path_buf(),
        source,
    };
    let dir = open_or_make_top(to).map_err(|e| failed(e.into()))?;
    find_conflicts(dir.as_fd(), outputs, to, overwrite)?;
    // Sort equal contents next to each other, so that only one file has to stay open for cloning.
    let mut first: HashMap<&ContentHash, usize> = HashMap::new();
    let mut ordered: Vec<_> = outputs.iter().enumerate().collect();
    ordered.sort_by_cached_key(|(index, (_, _, hash))| *first.entry(hash).or_insert(*index));
    let mut written = Vec::new();
    let mut places = Vec::with_capacity(outputs.len());
    let mut exporter = Exporter {
        source,
        overwrite,
        bytes_left: bytes_max,
        last: None,
    };
    for (index, (path, bytes, hash)) in ordered {
        match exporter.write(dir.as_fd(), path, *bytes, hash) {
            Ok(Some(sha256)) => {
                places.push(index);
                written.push(ExportedFile {
                    path: path.clone(),
                    bytes: *bytes,
                    sha256,
                });
            }
            Ok(None) => {
                return Err(ExportError::Damaged {
                    path: path.clone(),
                    written,
                });
            }
            Err(source) => {
                return Err(ExportError::Write {
                    path: path.clone(),
                    written,
                    source,
                });
            }
        }
    }
    let mut listed: Vec<_> = places.into_iter().zip(written).collect();
    listed.sort_by_key(|(index, _)| *index);
    Ok(listed.into_iter().map(|(_, exported)| exported).collect())
}

/// Opens the directory to export to. Makes what is missing of it, one component after another and by descriptor, so
/// that nothing is made behind a symlink.
fn open_or_make_top(to: &Path) -> rustix::io::Result<OwnedFd> {
    let open = |parent: BorrowedFd<'_>, path: &Path, access: OFlags| {
        let flags = access | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(parent, path, flags, Mode::empty(), resolve)
    };
    match open(CWD, to, OFlags::RDONLY) {
        Err(Errno::NOENT) => {}
        // A file has the name of the directory.
        Err(Errno::NOTDIR) if to.symlink_metadata().is_ok() => return Err(Errno::EXIST),
        opened => return opened,
    }
    let mut held: Option<OwnedFd> = None;
    for part in to.components() {
        let parent = held.as_ref().map_or(CWD, |dir| dir.as_fd());
        let part = Path::new(part.as_os_str());
        held = Some(files::open_or_make_dir(
            parent,
            part,
            TOP_MODE,
            |parent, part| open(parent, part, OFlags::PATH),
        )?);
    }
    open(
        held.ok_or(Errno::NOENT)?.as_fd(),
        Path::new("."),
        OFlags::RDONLY,
    )
}

/// The file that was written last, for further outputs with the same content.
struct WrittenFile {
    file: OwnedFd,
    hash: ContentHash,
    sha256: String,
}

struct Exporter<'a> {
    source: &'a mut dyn FnMut(&ContentHash) -> io::Result<ExportContent>,
    overwrite: Overwrite,
    /// How many bytes may still be copied.
    bytes_left: u64,
    last: Option<WrittenFile>,
}

impl Exporter<'_> {
    /// Writes one output. Returns the sha256 of what was written, or `None` if the content does not match `hash`.
    fn write(
        &mut self,
        dir: BorrowedFd<'_>,
        path: &OutputPath,
        bytes: u64,
        hash: &ContentHash,
    ) -> io::Result<Option<String>> {
        if let Some(last) = self
            .last
            .as_ref()
            .filter(|last| last.hash == *hash && bytes > 0)
        {
            let target = Target::open(dir, path)?;
            let equal = match target.clone_of(&last.file, self.overwrite) {
                Err(_) if bytes > self.bytes_left => target.link_to(&last.file, self.overwrite),
                cloned => cloned,
            };
            match equal {
                Ok(()) => return Ok(Some(last.sha256.clone())),
                Err(_) if bytes <= self.bytes_left => {}
                Err(e) => return Err(e),
            }
        }
        let Some(bytes_left) = self.bytes_left.checked_sub(bytes) else {
            return Err(io::Error::other(
                "the outputs are more than the record says was collected; export some of them by their paths",
            ));
        };
        let content = (self.source)(hash)?;
        let target = Target::open(dir, path)?;
        let written = target.write(content, bytes, hash, self.overwrite)?;
        Ok(written.map(|(file, sha256)| {
            self.bytes_left = bytes_left;
            self.last = Some(WrittenFile {
                file,
                hash: *hash,
                sha256: sha256.clone(),
            });
            sha256
        }))
    }
}

fn find_conflicts(
    dir: BorrowedFd<'_>,
    outputs: &[(OutputPath, u64, ContentHash)],
    to: &Path,
    overwrite: Overwrite,
) -> Result<(), ExportError> {
    let (mut first, mut count) = (Vec::new(), 0);
    let mut conflict = |path: &OutputPath, what: &str| {
        count += 1;
        if first.len() < CONFLICTS_MAX {
            let shown = escape_terminal(path.text().as_bytes());
            first.push(format!("{shown} {what}"));
        }
    };
    let mut names: HashSet<&[u8]> = HashSet::new();
    for (path, ..) in outputs {
        if !names.insert(path.as_bytes()) {
            conflict(path, "is listed twice");
        }
    }
    for (path, ..) in outputs {
        let slashes = path.as_bytes().iter().enumerate();
        let mut above = slashes.filter_map(|(at, b)| (*b == b'/').then_some(at));
        if above.any(|at| names.contains(&path.as_bytes()[..at])) {
            conflict(path, "would be below another output that is a file");
            continue;
        }
        let in_the_way = find_obstacle(dir, path, overwrite).map_err(|e| ExportError::Look {
            path: path.clone(),
            source: e.into(),
        })?;
        if let Some(what) = in_the_way {
            conflict(path, what);
        }
    }
    match count {
        0 => Ok(()),
        count => Err(ExportError::Conflicts {
            to: to.to_path_buf(),
            first,
            count,
        }),
    }
}

/// What keeps an output from being written to its path, if anything.
fn find_obstacle(
    dir: BorrowedFd<'_>,
    path: &OutputPath,
    overwrite: Overwrite,
) -> rustix::io::Result<Option<&'static str>> {
    let (parent, name) = match open_parent(dir, path, open_below) {
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP) => return Ok(Some("leads through a symlink; move that away")),
        Err(Errno::NOTDIR) => {
            return Ok(Some("leads through what is no directory; move that away"));
        }
        opened => opened?,
    };
    let parent = parent.as_ref().map_or(dir, |parent| parent.as_fd());
    let stat = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(None),
        stat => stat?,
    };
    Ok(match (FileType::from_raw_mode(stat.st_mode), overwrite) {
        (FileType::Directory, _) => Some("is a directory; move it away"),
        (_, Overwrite::Never) => Some("exists; move it away, or use --force"),
        (_, Overwrite::Files) => None,
    })
}

/// Opens the directories that lead to an output, one after the other. Returns the last of them, `None` for `top`
/// itself, and the name of the output in it.
fn open_parent<'a>(
    top: BorrowedFd<'_>,
    path: &'a OutputPath,
    open: impl Fn(BorrowedFd<'_>, &[u8]) -> rustix::io::Result<OwnedFd>,
) -> rustix::io::Result<(Option<OwnedFd>, &'a [u8])> {
    let mut parent: Option<OwnedFd> = None;
    let mut parts = path.components().peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return Ok((parent, part));
        }
        parent = Some(open(parent.as_ref().map_or(top, |dir| dir.as_fd()), part)?);
    }
    Err(Errno::INVAL)
}

/// Opens a subdirectory that is not a link. The user's own mounts may be entered.
fn open_below(parent: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), resolve)
}

/// Whether a draft holds the expected content.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DraftContent {
    Whole,
    Damaged,
}

/// The place of one output: a name in an open directory.
struct Target<'a> {
    dir: OwnedFd,
    name: &'a [u8],
}

impl<'a> Target<'a> {
    /// Creates the directories that lead to the output.
    fn open(top: BorrowedFd<'_>, path: &'a OutputPath) -> io::Result<Target<'a>> {
        let open = |parent: BorrowedFd<'_>, part: &[u8]| {
            files::open_or_make_dir(parent, part, DIR_MODE, open_below)
        };
        let (dir, name) = open_parent(top, path, open)?;
        let dir = dir.map_or_else(|| top.try_clone_to_owned(), Ok)?;
        Ok(Target { dir, name })
    }

    /// Writes the content. Returns the file and its sha256, or `None` if the content does not match `hash`.
    fn write(
        &self,
        content: ExportContent,
        bytes: u64,
        hash: &ContentHash,
        overwrite: Overwrite,
    ) -> io::Result<Option<(OwnedFd, String)>> {
        let mut sha256 = None;
        let file = self.draft(overwrite, |to| {
            sha256 = write_checked(to, content, bytes, hash)?;
            Ok(match sha256 {
                Some(_) => DraftContent::Whole,
                None => DraftContent::Damaged,
            })
        })?;
        Ok(file.zip(sha256))
    }

    /// Creates a file that shares its blocks with another.
    fn clone_of(&self, file: &OwnedFd, overwrite: Overwrite) -> io::Result<()> {
        let cloned = self.draft(overwrite, |to| {
            rustix::fs::ioctl_ficlone(to, file)?;
            Ok(DraftContent::Whole)
        });
        cloned.map(drop)
    }

    /// Creates another name for a file that was written before.
    fn link_to(&self, file: &OwnedFd, overwrite: Overwrite) -> io::Result<()> {
        let draft = format!(".fumehood-{}.part", random_hex()?);
        files::link_by_proc(file.as_fd(), self.dir.as_fd(), &draft)?;
        let published = self.publish(file.as_fd(), &draft, overwrite);
        if published.is_err() {
            let _ = rustix::fs::unlinkat(&self.dir, &draft, AtFlags::empty());
        }
        published
    }

    /// Fills a new file and gives it its name when it is complete.
    fn draft(
        &self,
        overwrite: Overwrite,
        fill: impl FnOnce(BorrowedFd<'_>) -> io::Result<DraftContent>,
    ) -> io::Result<Option<OwnedFd>> {
        let draft = format!(".fumehood-{}.part", random_hex()?);
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, &draft, flags, FILE_MODE)?;
        let done = fill(file.as_fd()).and_then(|filled| {
            if filled == DraftContent::Whole {
                self.publish(file.as_fd(), &draft, overwrite)?;
            }
            Ok(filled)
        });
        if !matches!(done, Ok(DraftContent::Whole)) {
            // Ignore a failure here: the first error is the one to report.
            let _ = rustix::fs::unlinkat(&self.dir, &draft, AtFlags::empty());
        }
        Ok((done? == DraftContent::Whole).then_some(file))
    }

    fn publish(&self, file: BorrowedFd<'_>, draft: &str, overwrite: Overwrite) -> io::Result<()> {
        match overwrite {
            Overwrite::Files => rustix::fs::renameat(&self.dir, draft, &self.dir, self.name)?,
            Overwrite::Never => self.publish_new(draft)?,
        }
        // Another user with write access may have replaced the exported file.
        let named = rustix::fs::statat(&self.dir, self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        let ours = rustix::fs::fstat(file)?;
        match (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino) {
            true => Ok(()),
            false => Err(io::Error::other("somebody else changed the directory")),
        }
    }

    fn publish_new(&self, draft: &str) -> rustix::io::Result<()> {
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.dir, draft, &self.dir, self.name, flags) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
            done => return done,
        }
        // NFS and some other file systems cannot rename without replacing in one step. Claim the name with an empty
        // file, which this process may then replace.
        let claim = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::openat(&self.dir, self.name, claim, FILE_MODE)?;
        rustix::fs::renameat(&self.dir, draft, &self.dir, self.name)
    }
}

/// Writes the content and checks its hash on the way, so that a damaged object is never exported with a new checksum.
fn write_checked(
    to: BorrowedFd<'_>,
    content: ExportContent,
    bytes: u64,
    hash: &ContentHash,
) -> io::Result<Option<String>> {
    let (mut sha256, mut blake3) = (Sha256::new(), blake3::Hasher::new());
    let mut see = |chunk: &[u8]| {
        sha256.update(chunk);
        blake3.update(chunk);
    };
    let length = match &content {
        ExportContent::Bytes(all) => {
            see(all);
            files::write_all_at(to, all, 0)?;
            all.len() as u64
        }
        ExportContent::File(file) => {
            let length = files::length(file.as_fd())?;
            if length == bytes {
                files::read_through(file.as_fd(), Some(to), bytes, &mut see)?;
            }
            length
        }
    };
    let found = ContentHash::from_bytes(*blake3.finalize().as_bytes());
    Ok((length == bytes && found == *hash).then(|| to_hex(&sha256.finalize())))
}
