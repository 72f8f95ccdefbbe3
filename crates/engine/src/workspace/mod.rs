//! The private directory of one analysis: made exclusively, held by descriptor, removed by descriptor.

pub mod copy_in;
pub mod tree;
pub mod uid_pool;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation, Gid, Mode, OFlags, StatxFlags, Uid};
use serde::{Deserialize, Serialize};

use crate::request::AnalysisId;
use crate::workspace::tree::TreeError;

#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    #[error("use {root:?} for workspaces")]
    Root { root: PathBuf, source: io::Error },
    #[error(
        "{root:?} can be written by others and is not sticky (chmod +t), so anyone could replace a workspace in it; choose another --workspace-root"
    )]
    RootNotSafe { root: PathBuf },
    #[error("{path:?} exists already and is not touched; remove it, or choose another --id")]
    Exists { path: PathBuf },
    #[error("the workspace {path:?} is still held by a process of its analysis")]
    InUse { path: PathBuf },
    #[error("make the workspace {path:?}")]
    Make { path: PathBuf, source: io::Error },
    #[error("make the link {name:?} in the workspace; an input of that name is in its way")]
    Link { name: PathBuf, source: io::Error },
    #[error("remove the workspace {path:?}")]
    Remove { path: PathBuf, source: TreeError },
    #[error("take over the workspace {path:?}")]
    TakeOver { path: PathBuf, source: TreeError },
}

/// Which directory it is. Inode numbers are used again; the time of birth tells the next holder apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub device: u64,
    pub inode: u64,
    /// Seconds and nanoseconds; `None` where the file system does not say.
    pub born: Option<(i64, u32)>,
}

impl Identity {
    /// Of what stands at a path, itself not followed.
    pub fn of(path: &Path) -> Option<Identity> {
        Identity::at(rustix::fs::CWD, path).ok()
    }

    fn at(dir: BorrowedFd<'_>, name: &Path) -> rustix::io::Result<Identity> {
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW | rustix::fs::AtFlags::EMPTY_PATH;
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = rustix::fs::statx(dir, name, flags, wanted)?;
        let born = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        Ok(Identity {
            device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            born: born.then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec)),
        })
    }

    fn device_and_inode(self) -> (u64, u64) {
        (self.device, self.inode)
    }
}

/// A workspace that this process made and holds locked.
#[derive(Debug)]
pub struct Workspace {
    path: PathBuf,
    name: OsString,
    root: OwnedFd,
    dir: OwnedFd,
    is: Identity,
}

/// The host path of an analysis's workspace.
pub fn path_for(root: &Path, id: &AnalysisId) -> PathBuf {
    root.join(format!("scidex-analysis-{id}"))
}

/// A name that only this run knows: what stands under it is ours whatever happens to us.
pub fn draft_for(root: &Path, id: &AnalysisId) -> PathBuf {
    let mut noise = [0u8; 16];
    // Without randomness the name is merely guessable, and making it exclusive still.
    let _filled = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty());
    root.join(format!(
        ".scidex-analysis-{id}-{:032x}",
        u128::from_ne_bytes(noise)
    ))
}

impl Workspace {
    /// Makes it under its draft name, mode 0700, for `owner` if given. It is not an analysis's workspace yet.
    pub fn draft(
        path: PathBuf,
        draft: &Path,
        owner: Option<(u32, u32)>,
    ) -> Result<Workspace, WorkspaceError> {
        let root_fd = open_root(path.parent().unwrap_or(Path::new("/")))?;
        let name = draft.file_name().unwrap_or_default().to_os_string();
        let failed = |e: rustix::io::Errno| WorkspaceError::Make {
            path: path.clone(),
            source: e.into(),
        };
        rustix::fs::mkdirat(&root_fd, &name, Mode::from_raw_mode(0o700)).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&root_fd, &name, flags, Mode::empty()).map_err(failed)?;
        let is = Identity::at(dir.as_fd(), Path::new("")).map_err(failed)?;
        let workspace = Workspace {
            path: path.clone(),
            name,
            root: root_fd,
            dir,
            is,
        };
        // Tmp cleaners leave a locked directory alone, and nobody else takes it for abandoned.
        rustix::fs::flock(&workspace.dir, FlockOperation::NonBlockingLockExclusive)
            .map_err(failed)?;
        workspace
            .furnish(workspace.dir.as_fd(), owner)
            .map_err(failed)?;
        Ok(workspace)
    }

    /// Gives it its name. Whatever stands there already, of whatever kind, is left alone.
    pub fn publish(&mut self) -> Result<(), WorkspaceError> {
        let name = self.path.file_name().unwrap_or_default().to_os_string();
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.root, &self.name, &self.root, &name, flags) {
            Ok(()) => {
                self.name = name;
                Ok(())
            }
            Err(rustix::io::Errno::EXIST) => Err(WorkspaceError::Exists {
                path: self.path.clone(),
            }),
            Err(e) => Err(WorkspaceError::Make {
                path: self.path.clone(),
                source: e.into(),
            }),
        }
    }

    /// The hidden place for the private /tmp and home. Also done in a workspace that lives in memory.
    pub fn furnish(
        &self,
        dir: BorrowedFd<'_>,
        owner: Option<(u32, u32)>,
    ) -> rustix::io::Result<()> {
        let hidden = Path::new(sandbox::HIDDEN_DIR);
        let owner = owner.map(|(uid, gid)| (Uid::from_raw(uid), Gid::from_raw(gid)));
        // umask may have taken more than it should.
        rustix::fs::fchmod(dir, Mode::from_raw_mode(0o700))?;
        for name in [hidden.to_path_buf(), hidden.join("home")] {
            rustix::fs::mkdirat(dir, &name, Mode::from_raw_mode(0o700))?;
            if let Some((uid, gid)) = owner {
                rustix::fs::chownat(
                    dir,
                    &name,
                    Some(uid),
                    Some(gid),
                    rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
                )?;
            }
        }
        if let Some((uid, gid)) = owner {
            rustix::fs::fchown(dir, Some(uid), Some(gid))?;
        }
        Ok(())
    }

    /// Makes links in it, by name and target. An empty directory in a link's place is what an attempt with mounts left.
    pub fn link(
        &self,
        links: &[(PathBuf, PathBuf)],
        owner: Option<(u32, u32)>,
    ) -> Result<(), WorkspaceError> {
        use rustix::fs::AtFlags;
        for (name, target) in links {
            let failed = |e: rustix::io::Errno| WorkspaceError::Link {
                name: name.clone(),
                source: e.into(),
            };
            let _none_there = rustix::fs::unlinkat(&self.dir, name, AtFlags::REMOVEDIR);
            rustix::fs::symlinkat(target, &self.dir, name).map_err(failed)?;
            if let Some((uid, gid)) = owner {
                let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::chownat(&self.dir, name, Some(uid), Some(gid), flags)
                    .map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Takes away those of the links that are still as they were made: they are no outputs.
    pub fn unlink(&self, links: &[(PathBuf, PathBuf)]) {
        for (name, target) in links {
            let is_ours = rustix::fs::readlinkat(&self.dir, name, Vec::new())
                .is_ok_and(|to| to.as_bytes() == target.as_os_str().as_encoded_bytes());
            if is_ours {
                // One that stays is listed as a link that was not taken.
                let _stays = rustix::fs::unlinkat(&self.dir, name, rustix::fs::AtFlags::empty());
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// What proves later that a path still is this directory.
    pub fn is(&self) -> Identity {
        self.is
    }

    /// Whether its bytes are memory, whatever was asked for.
    pub fn is_on_tmpfs(&self) -> bool {
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        rustix::fs::fstatfs(&self.dir).is_ok_and(|s| s.f_type == TMPFS_MAGIC)
    }

    /// Takes up a workspace that Fumehood made before and no process holds any more: `None` if it is gone.
    pub fn reopen(
        path: PathBuf,
        is: Identity,
        patience: Patience,
    ) -> Result<Option<Workspace>, WorkspaceError> {
        patience.until_free(|| match held_again(&path, is)? {
            None => Ok(None),
            Some((root, dir)) => {
                let dir = dir.map_err(|e| WorkspaceError::Make {
                    path: path.clone(),
                    source: e.into(),
                })?;
                let name = path.file_name().unwrap_or_default().to_os_string();
                let path = path.clone();
                Ok(Some(Workspace {
                    path,
                    name,
                    root,
                    dir,
                    is,
                }))
            }
        })
    }

    /// For a program that is to run in it: everything becomes the leased uid's, and what an earlier keeping took
    /// away is there again.
    pub fn prepare(&self, owner: Option<(u32, u32)>) -> Result<(), WorkspaceError> {
        if let Some((uid, gid)) = owner {
            let taken = tree::take_over(self.dir.as_fd(), uid, gid);
            taken.map_err(|source| WorkspaceError::TakeOver {
                path: self.path.clone(),
                source,
            })?;
        }
        let hidden = Path::new(sandbox::HIDDEN_DIR);
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        match rustix::fs::statat(&self.dir, hidden, flags) {
            Err(rustix::io::Errno::NOENT) => self.furnish(self.dir.as_fd(), owner),
            found => found.map(drop),
        }
        .map_err(|e| WorkspaceError::Make {
            path: self.path.clone(),
            source: e.into(),
        })
    }

    /// Removing it demands to know that what the program left is safe.
    pub fn remove(self, _safe: Receipt) -> Result<(), WorkspaceError> {
        tree::remove(self.root.as_fd(), &self.name, self.is.device_and_inode())
            .map(drop)
            .map_err(|source| WorkspaceError::Remove {
                path: self.path.clone(),
                source,
            })
    }

    /// For a kept workspace: everything becomes the caller's, since the leased uid will be another's tomorrow.
    pub fn keep(self) -> Result<PathBuf, WorkspaceError> {
        self.take_back()?;
        Ok(self.path)
    }

    /// What [`Workspace::keep`] does, still holding it.
    pub fn take_back(&self) -> Result<(), WorkspaceError> {
        let (uid, gid) = (
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        // Whatever the program made of it.
        let _reset = rustix::fs::fchmod(&self.dir, Mode::from_raw_mode(0o700));
        let failed = |source| WorkspaceError::TakeOver {
            path: self.path.clone(),
            source,
        };
        tree::take_over(self.dir.as_fd(), uid, gid).map_err(failed)?;
        for name in ["data", "docs"] {
            // Where the views were mounted; empty, unless the program made directories of these names itself.
            let _its_own = rustix::fs::unlinkat(&self.dir, name, rustix::fs::AtFlags::REMOVEDIR);
        }
        let hidden = Path::new(sandbox::HIDDEN_DIR);
        if let Ok(stat) =
            rustix::fs::statat(&self.dir, hidden, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        {
            // The private /tmp and home are nobody's results.
            let _left = tree::remove(
                self.dir.as_fd(),
                hidden.as_os_str(),
                (stat.st_dev, stat.st_ino),
            );
        }
        Ok(())
    }
}

/// Why nothing is lost with a workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipt {
    /// Outputs and record are durable, in the database or in `pending/`.
    Settled,
    /// No program ever ran in it.
    NothingRan,
    /// The user wants no record.
    Unrecorded,
}

/// For how long a dead runner's init may still be dying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    None,
    AMoment,
}

/// Removes what a dead runner left, if it is still the directory that its record names.
///
/// The runner's lock on it is init's too, who got the same open directory: while it is held, something lives.
pub fn remove_left_behind(
    path: &Path,
    is: Identity,
    patience: Patience,
) -> Result<(), WorkspaceError> {
    patience.until_free(|| try_remove(path, is))
}

impl Patience {
    fn until_free<T>(
        self,
        mut attempt: impl FnMut() -> Result<T, WorkspaceError>,
    ) -> Result<T, WorkspaceError> {
        const PAUSE: std::time::Duration = std::time::Duration::from_millis(10);
        let tries = if self == Patience::None { 1 } else { 100 };
        for _ in 1..tries {
            match attempt() {
                Err(_) => std::thread::sleep(PAUSE),
                done => return done,
            }
        }
        attempt()
    }
}

/// The workspace of an id whose record was lost, if one stands in that root and is a run's beyond doubt: what every workspace
/// has hidden in it is there, and both belong to a uid that only runs have or, for a plain user, to the user alone.
pub fn without_record(root: &Path, id: &AnalysisId) -> Option<(PathBuf, Identity)> {
    let path = root.join(format!("scidex-analysis-{id}"));
    let own = rustix::process::geteuid();
    let is_a_runs = |path: &Path| {
        rustix::fs::lstat(path).is_ok_and(|stat| {
            let owner = match own.is_root() {
                true => crate::workspace::uid_pool::RANGE.contains(&stat.st_uid),
                false => stat.st_uid == own.as_raw(),
            };
            owner
                && FileType::from_raw_mode(stat.st_mode) == FileType::Directory
                && stat.st_mode & 0o777 == 0o700
        })
    };
    let is = Identity::of(&path)?;
    (is_a_runs(&path) && is_a_runs(&path.join(sandbox::HIDDEN_DIR))).then_some((path, is))
}

/// The root and, if it can be opened, the directory itself, locked: if it is still the one meant. What is gone, or
/// somebody else's by now, is `None`.
#[allow(clippy::type_complexity)]
fn held_again(
    path: &Path,
    is: Identity,
) -> Result<Option<(OwnedFd, rustix::io::Result<OwnedFd>)>, WorkspaceError> {
    let (Some(root), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(None);
    };
    let root_fd = match open_root(root) {
        Ok(fd) => fd,
        Err(WorkspaceError::Root { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    match Identity::at(root_fd.as_fd(), Path::new(name)) {
        Ok(found) if found == is => {}
        _ => return Ok(None),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut held = rustix::fs::openat(&root_fd, name, flags, Mode::empty());
    if held.as_ref().err() == Some(&rustix::io::Errno::ACCESS) {
        // The program closed its own directory.
        let pin = flags | OFlags::PATH;
        held = rustix::fs::openat(&root_fd, name, pin, Mode::empty())
            .and_then(|pin| {
                let itself = format!("/proc/self/fd/{}", pin.as_raw_fd());
                rustix::fs::chmod(itself, Mode::from_raw_mode(0o700))
            })
            .and_then(|()| rustix::fs::openat(&root_fd, name, flags, Mode::empty()));
    }
    if let Ok(dir) = &held
        && rustix::fs::flock(dir, FlockOperation::NonBlockingLockExclusive)
            == Err(rustix::io::Errno::WOULDBLOCK)
    {
        return Err(WorkspaceError::InUse {
            path: path.to_path_buf(),
        });
    }
    Ok(Some((root_fd, held)))
}

fn try_remove(path: &Path, is: Identity) -> Result<(), WorkspaceError> {
    // What cannot be opened is not locked by us; the removal has its own ways.
    let Some((root_fd, _held)) = held_again(path, is)? else {
        return Ok(());
    };
    let name = path.file_name().unwrap_or_default();
    match tree::remove(root_fd.as_fd(), name, is.device_and_inode()) {
        Ok(_) | Err(TreeError::Absent { .. } | TreeError::NotExpected { .. }) => Ok(()),
        Err(source) => Err(WorkspaceError::Remove {
            path: path.to_path_buf(),
            source,
        }),
    }
}

/// A directory in which a name, once ours, stays ours: ours or root's, and either closed to others or sticky.
fn open_root(root: &Path) -> Result<OwnedFd, WorkspaceError> {
    let failed = |e: rustix::io::Errno| WorkspaceError::Root {
        root: root.to_path_buf(),
        source: e.into(),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(root, flags, Mode::empty()).map_err(failed)?;
    let stat = rustix::fs::fstat(&fd).map_err(failed)?;
    let owner_fine = [0, rustix::process::geteuid().as_raw()].contains(&stat.st_uid);
    let closed = stat.st_mode & 0o022 == 0 || stat.st_mode & 0o1000 != 0;
    match owner_fine && closed {
        true => Ok(fd),
        false => Err(WorkspaceError::RootNotSafe {
            root: root.to_path_buf(),
        }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// A root, and in it a workspace with a file that must not be lost.
    fn left_behind() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("scidex-analysis-mine");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("precious"), "x").unwrap();
        (root, path)
    }

    #[test]
    fn another_directory_of_the_same_name_is_left_alone() {
        let (_root, path) = left_behind();
        let is = Identity::of(&path).unwrap();
        let (seconds, nanoseconds) = is.born.unwrap();
        let others = [
            Identity {
                born: Some((seconds, nanoseconds ^ 1)),
                ..is
            },
            Identity {
                born: Some((seconds - 1, nanoseconds)),
                ..is
            },
            Identity { born: None, ..is },
            Identity {
                inode: is.inode + 1,
                ..is
            },
            Identity {
                device: is.device + 1,
                ..is
            },
        ];
        for other in others {
            remove_left_behind(&path, other, Patience::None).unwrap();
            assert!(path.join("precious").exists(), "{other:?}");
        }
        remove_left_behind(&path, is, Patience::None).unwrap();
        assert!(!path.exists(), "the control");
    }

    #[test]
    fn a_directory_that_somebody_holds_is_left_alone() {
        let (_root, path) = left_behind();
        let is = Identity::of(&path).unwrap();
        let holder = std::fs::File::open(&path).unwrap();
        rustix::fs::flock(&holder, FlockOperation::NonBlockingLockExclusive).unwrap();
        for patience in [Patience::None, Patience::AMoment] {
            let removed = remove_left_behind(&path, is, patience);
            assert!(matches!(removed, Err(WorkspaceError::InUse { .. })));
            assert!(path.join("precious").exists());
        }
        drop(holder);
        remove_left_behind(&path, is, Patience::None).unwrap();
        assert!(!path.exists(), "the control");
    }

    #[test]
    fn an_unsafe_root_is_reported_and_nothing_is_removed() {
        let (root, path) = left_behind();
        let is = Identity::of(&path).unwrap();
        let open = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(root.path(), mode).unwrap();
        };
        for mode in [0o777, 0o770, 0o707] {
            open(mode);
            let removed = remove_left_behind(&path, is, Patience::None);
            let told = matches!(removed, Err(WorkspaceError::RootNotSafe { .. }));
            assert!(told, "{mode:o}: {removed:?}");
            assert!(path.join("precious").exists());
        }
        open(0o1777);
        remove_left_behind(&path, is, Patience::None).unwrap();
        assert!(!path.exists(), "the control");
    }

    #[test]
    fn a_root_that_is_gone_has_nothing_left() {
        let (root, path) = left_behind();
        let is = Identity::of(&path).unwrap();
        drop(root);
        remove_left_behind(&path, is, Patience::None).unwrap();
    }

    #[test]
    fn a_link_in_the_place_of_a_workspace_is_not_followed() {
        let (root, path) = left_behind();
        let is = Identity::of(&path).unwrap();
        let moved = root.path().join("moved");
        std::fs::rename(&path, &moved).unwrap();
        std::os::unix::fs::symlink(&moved, &path).unwrap();
        remove_left_behind(&path, is, Patience::None).unwrap();
        assert!(moved.join("precious").exists());
    }

    #[test]
    fn a_kept_workspace_is_closed_again() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("scidex-analysis-mine");
        let draft = root.path().join(".scidex-analysis-mine-1");
        let mut workspace = Workspace::draft(path.clone(), &draft, None).unwrap();
        workspace.publish().unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
        workspace.keep().unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o700);
    }
}
