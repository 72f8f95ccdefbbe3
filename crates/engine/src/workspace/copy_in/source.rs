//! Reads an input: a file, or a directory with everything below it.
//!
//! The source may be hostile, for example a cloned repository. Therefore everything is opened once, without following
//! symlinks, and judged by its descriptor. Mounts are entered: the user named the directory with all that is mounted
//! below it.

use std::ffi::{CStr, OsStr};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat, Statx};
use rustix::io::Errno;
use store::types::input_name::stays_inside;

use super::{CopyError, DEPTH_MAX};
use crate::workspace::tree::EntryFault;
use crate::workspace::tree::walk::{
    BENEATH, DepthOverflow, EnteredDirectory, OPEN_DIR, TreeVisitor, TreeWalk, VisitAction,
    WalkedEntry, open_resolved,
};

/// NONBLOCK, so that a FIFO in place of the file does not block.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

/// The path of an entry of the source, for messages, and its name in the workspace.
pub(crate) struct SourcePath {
    pub(crate) from: PathBuf,
    pub(crate) to: PathBuf,
}

impl SourcePath {
    fn push(&mut self, name: &CStr) {
        let name = OsStr::from_bytes(name.to_bytes());
        self.from.push(name);
        self.to.push(name);
    }

    fn pop(&mut self) {
        self.from.pop();
        self.to.pop();
    }
}

/// What is done with the entries of a source. The first error ends the walk.
pub(crate) trait SourceVisitor {
    type Error: From<CopyError>;
    fn enter_directory(&mut self, stat: &Statx, at: &SourcePath) -> Result<(), Self::Error>;
    /// `file` is a regular file, open for reading.
    fn visit_file(
        &mut self,
        file: OwnedFd,
        stat: &Stat,
        at: &SourcePath,
    ) -> Result<(), Self::Error>;
    /// `target` stays inside the source.
    fn visit_link(&mut self, target: PathBuf, at: &SourcePath) -> Result<(), Self::Error>;
    /// Called when a directory was walked completely.
    fn leave_directory(&mut self) {}
}

/// Opens a source that the user named. Looks at its type first, because opening some devices has side effects; the
/// check of the descriptor afterwards decides.
pub(crate) fn open_source(source: &Path) -> Result<(OwnedFd, Stat), CopyError> {
    let failed = |e| CopyError::Open {
        path: source.to_path_buf(),
        source: e,
    };
    let stat = rustix::fs::stat(source).map_err(failed)?;
    check_kind(FileType::from_raw_mode(stat.st_mode), source)?;
    // The path was resolved and checked against the policy before, so do not follow a symlink that is there now.
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(CWD, source, READ, Mode::empty(), resolve).map_err(failed)?;
    let stat = rustix::fs::fstat(&file).map_err(failed)?;
    check_kind(FileType::from_raw_mode(stat.st_mode), source)?;
    Ok((file, stat))
}

/// Passes a source, as [`open_source`] returned it, and everything below it to the visitor.
pub(crate) fn visit_source<V: SourceVisitor>(
    (source, stat): (OwnedFd, Stat),
    at: SourcePath,
    visitor: &mut V,
) -> Result<(), V::Error> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return visitor.visit_file(source, &stat, &at);
    }
    let mut walk = SourceWalk {
        visitor,
        at,
        depth: 0,
        error: None,
    };
    TreeWalk::new().run(source.as_fd(), &mut walk, DepthOverflow::Fail);
    walk.error.map_or(Ok(()), Err)
}

fn check_kind(kind: FileType, path: &Path) -> Result<(), CopyError> {
    let kind = match kind {
        FileType::RegularFile | FileType::Directory => return Ok(()),
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "neither file nor directory",
    };
    Err(CopyError::Special {
        path: path.to_path_buf(),
        kind,
    })
}

struct SourceWalk<'a, V: SourceVisitor> {
    visitor: &'a mut V,
    at: SourcePath,
    /// The number of directories from the top to the current one, including both.
    depth: usize,
    error: Option<V::Error>,
}

impl<V: SourceVisitor> TreeVisitor for SourceWalk<'_, V> {
    fn open_directory(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, EntryFault> {
        open_resolved(dir, name, OPEN_DIR, BENEATH).map_err(|fault| match fault {
            // The walk would skip a directory that is gone. The copy would not be what was listed.
            EntryFault::Open(Errno::NOENT) => EntryFault::Moved,
            fault => fault,
        })
    }

    fn enter_directory(&mut self, entered: EnteredDirectory<'_>) -> Result<(), EntryFault> {
        if self.depth >= DEPTH_MAX {
            return Err(EntryFault::TooDeep);
        }
        if self.depth > 0 {
            self.at.push(entered.name);
        }
        self.depth += 1;
        let done = self.visitor.enter_directory(entered.stat, &self.at);
        done.map_err(|error| self.refuse(error))
    }

    fn visit_entry(&mut self, entry: WalkedEntry<'_>) -> Result<VisitAction, EntryFault> {
        if entry.kind == FileType::Directory {
            return Ok(VisitAction::Enter);
        }
        self.at.push(entry.name);
        let visited = self.visit_other(entry);
        self.at.pop();
        visited.map_err(|error| self.refuse(error))
    }

    fn leave_directory(&mut self, _: BorrowedFd<'_>, _: &CStr) -> Result<(), EntryFault> {
        self.at.pop();
        self.depth -= 1;
        self.visitor.leave_directory();
        Ok(())
    }

    fn report_fault(&mut self, name: &CStr, fault: &EntryFault) -> ControlFlow<()> {
        if self.error.is_none() {
            if name != c"." {
                self.at.push(name);
            }
            let path = self.at.from.clone();
            let error = match (fault, fault.errno()) {
                (EntryFault::TooDeep, _) => CopyError::TooDeep { path },
                (EntryFault::Read(_) | EntryFault::Stat(_), Some(source)) => {
                    CopyError::Read { path, source }
                }
                (_, errno) => CopyError::Open {
                    path,
                    source: errno.unwrap_or(Errno::NOENT),
                },
            };
            self.error = Some(error.into());
        }
        ControlFlow::Break(())
    }
}

impl<V: SourceVisitor> SourceWalk<'_, V> {
    /// Keeps the error of the visitor, which ends the walk.
    fn refuse(&mut self, error: V::Error) -> EntryFault {
        self.error = Some(error);
        EntryFault::Refused
    }

    /// Visits an entry that is not known to be a directory.
    fn visit_other(&mut self, entry: WalkedEntry<'_>) -> Result<VisitAction, V::Error> {
        let opened = match entry.kind {
            FileType::Symlink => Err(Errno::LOOP),
            // Opening some devices has side effects, so check the type that the directory reports first.
            kind => {
                if kind != FileType::Unknown {
                    check_kind(kind, &self.at.from)?;
                }
                open_entry(entry)
            }
        };
        let (file, stat) = match opened {
            Err(Errno::LOOP) => return self.visit_link(entry),
            opened => opened.map_err(|source| CopyError::Open {
                path: self.at.from.clone(),
                source,
            })?,
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            return Ok(VisitAction::Enter);
        }
        check_kind(kind, &self.at.from)?;
        self.visitor.visit_file(file, &stat, &self.at)?;
        Ok(VisitAction::Done)
    }

    /// Visits a symlink, if it does not lead out of the source.
    fn visit_link(&mut self, entry: WalkedEntry<'_>) -> Result<VisitAction, V::Error> {
        let path = || self.at.from.clone();
        let target =
            rustix::fs::readlinkat(entry.dir, entry.name, Vec::new()).map_err(|source| {
                let path = path();
                CopyError::Read { path, source }
            })?;
        let target = PathBuf::from(OsStr::from_bytes(target.as_bytes()));
        if !stays_inside(&target, self.depth - 1) {
            let path = path();
            return Err(CopyError::LinkLeadsOut { path, target }.into());
        }
        self.visitor.visit_link(target, &self.at)?;
        Ok(VisitAction::Done)
    }
}

/// Opens an entry of a source directory. A symlink is not followed, even if it has replaced the entry meanwhile.
fn open_entry(entry: WalkedEntry<'_>) -> Result<(OwnedFd, Stat), Errno> {
    let flags = READ | OFlags::NOFOLLOW;
    let file = rustix::fs::openat2(entry.dir, entry.name, flags, Mode::empty(), BENEATH)?;
    let stat = rustix::fs::fstat(&file)?;
    Ok((file, stat))
}
