//! The private directory of one analysis. It is created exclusively, and held and removed by descriptor.
//!
//! - `copy_in/`: reads inputs, and copies them into a workspace.
//! - `tree/`: the one walker of hostile directory trees. It serves to read inputs, to collect, to measure, to change
//!   owners and to remove.
//! - `uid_pool.rs`: leases an unprivileged uid to each analysis that root runs.

pub(crate) mod copy_in;
pub(crate) mod tree;
pub mod uid_pool;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, StatxFlags, Uid};
use serde::{Deserialize, Serialize};

use crate::workspace::tree::TreeError;
use store::types::analysis_id::AnalysisId;

/// Why a workspace could not be made, used or removed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum WorkspaceError {
    /// The directory for workspaces could not be opened or examined.
    #[error("use {root:?} for workspaces")]
    Root { root: PathBuf, source: io::Error },
    /// Others could replace a workspace in the directory for workspaces.
    #[error(
        "{root:?} can be written by others and is not sticky (chmod +t), so anyone could replace a workspace in it; choose another --workspace-root"
    )]
    RootNotSafe { root: PathBuf },
    /// Something exists already where the workspace would be.
    #[error("{path:?} exists already and is not touched; remove it, or choose another --id")]
    Exists { path: PathBuf },
    /// A process still holds the workspace's lock.
    #[error("the workspace {path:?} is still held by a process of its analysis")]
    InUse { path: PathBuf },
    /// The workspace's directory could not be made.
    #[error("make the workspace {path:?}")]
    Make { path: PathBuf, source: io::Error },
    /// A link could not be made in the workspace.
    #[error("make the link {name:?} in the workspace; an input has the same name")]
    Link { name: PathBuf, source: io::Error },
    /// The workspace could not be removed completely.
    #[error("remove the workspace {path:?}")]
    Remove { path: PathBuf, source: TreeError },
    /// The workspace's files could not be given another owner.
    #[error("take over the workspace {path:?}")]
    TakeOver { path: PathBuf, source: TreeError },
}

/// Identifies a directory. Inode numbers are reused, so the birth time tells a directory from a later one with the
/// same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryIdentity {
    /// The number of the file system's device.
    pub(crate) device: u64,
    /// The inode number.
    pub(crate) inode: u64,
    /// Seconds and nanoseconds; `None` if the file system does not report a birth time.
    pub(crate) born: Option<(i64, u32)>,
}

impl DirectoryIdentity {
    /// The identity of the directory at a path. The last component is not followed if it is a symlink.
    pub(crate) fn of(path: &Path) -> Option<DirectoryIdentity> {
        DirectoryIdentity::at(rustix::fs::CWD, path).ok()
    }

    fn at(dir: BorrowedFd<'_>, name: &Path) -> rustix::io::Result<DirectoryIdentity> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = rustix::fs::statx(dir, name, flags, wanted)?;
        let born = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        Ok(DirectoryIdentity {
            device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            born: born.then_some((stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec)),
        })
    }

    fn device_and_inode(self) -> (u64, u64) {
        (self.device, self.inode)
    }
}

/// A workspace that this process created, or reopened, and holds locked.
#[derive(Debug)]
pub(crate) struct Workspace {
    path: PathBuf,
    name: OsString,
    root: OwnedFd,
    dir: OwnedFd,
    identity: DirectoryIdentity,
}

/// The host path of an analysis's workspace.
pub fn path_for(root: &Path, id: &AnalysisId) -> PathBuf {
    root.join(format!("scidex-analysis-{id}"))
}

/// A random name for a workspace that is being prepared. Only this run knows the name, so a directory of that name
/// belongs to this run even if this process dies.
pub(crate) fn draft_path_for(root: &Path, id: &AnalysisId) -> PathBuf {
    let mut noise = [0u8; 16];
    // Without randomness the name is guessable, but mkdir still fails if the name exists.
    let _ = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty());
    root.join(format!(
        ".scidex-analysis-{id}-{:032x}",
        u128::from_ne_bytes(noise)
    ))
}

impl Workspace {
    /// Creates the directory under its draft name with mode 0700, and gives it to `owner`. [`Workspace::publish`]
    /// gives it its final name.
    pub(crate) fn draft(
        path: PathBuf,
        draft: &Path,
        owner: Option<(u32, u32)>,
    ) -> Result<Workspace, WorkspaceError> {
        let root_fd = open_root(path.parent().unwrap_or(Path::new("/")))?;
        let name = draft.file_name().unwrap_or_default().to_os_string();
        let failed = |e| make_error(&path, e);
        rustix::fs::mkdirat(&root_fd, &name, Mode::from_raw_mode(0o700)).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&root_fd, &name, flags, Mode::empty()).map_err(failed)?;
        let identity = DirectoryIdentity::at(dir.as_fd(), Path::new("")).map_err(failed)?;
        let workspace = Workspace {
            path: path.clone(),
            name,
            root: root_fd,
            dir,
            identity,
        };
        // Tmp cleaners leave a locked directory alone, and no other process takes it for abandoned.
        rustix::fs::flock(&workspace.dir, FlockOperation::NonBlockingLockExclusive)
            .map_err(failed)?;
        workspace
            .create_private_dirs(workspace.dir.as_fd(), owner)
            .map_err(failed)?;
        Ok(workspace)
    }

    /// Renames the draft to the workspace's path. Fails if anything exists there.
    pub(crate) fn publish(&mut self) -> Result<(), WorkspaceError> {
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
            Err(e) => Err(make_error(&self.path, e)),
        }
    }

    /// Creates the hidden directory that holds the private /tmp and home. `dir` is this workspace or the tmpfs of a
    /// workspace in memory.
    pub(crate) fn create_private_dirs(
        &self,
        dir: BorrowedFd<'_>,
        owner: Option<(u32, u32)>,
    ) -> rustix::io::Result<()> {
        let hidden = Path::new(sandbox::HIDDEN_DIR);
        // The umask may have cleared bits.
        rustix::fs::fchmod(dir, Mode::from_raw_mode(0o700))?;
        for name in [hidden.to_path_buf(), hidden.join("home")] {
            rustix::fs::mkdirat(dir, &name, Mode::from_raw_mode(0o700))?;
            set_owner(dir, &name, owner)?;
        }
        set_owner(dir, Path::new(""), owner)
    }

    /// Creates symlinks, given as (name, target). First removes an empty directory of the same name: an earlier
    /// attempt with mounts leaves such directories behind.
    pub(crate) fn link(
        &self,
        links: &[(PathBuf, PathBuf)],
        owner: Option<(u32, u32)>,
    ) -> Result<(), WorkspaceError> {
        for (name, target) in links {
            let failed = |e: rustix::io::Errno| WorkspaceError::Link {
                name: name.clone(),
                source: e.into(),
            };
            let _ = rustix::fs::unlinkat(&self.dir, name, AtFlags::REMOVEDIR);
            rustix::fs::symlinkat(target, &self.dir, name).map_err(failed)?;
            set_owner(self.dir.as_fd(), name, owner).map_err(failed)?;
        }
        Ok(())
    }

    /// Removes the symlinks that are unchanged, so that they are not collected as outputs.
    pub(crate) fn unlink(&self, links: &[(PathBuf, PathBuf)]) {
        for (name, target) in links {
            let is_ours = rustix::fs::readlinkat(&self.dir, name, Vec::new())
                .is_ok_and(|to| to.as_bytes() == target.as_os_str().as_encoded_bytes());
            if is_ours {
                // A symlink that cannot be removed is listed as not collected.
                let _ = rustix::fs::unlinkat(&self.dir, name, AtFlags::empty());
            }
        }
    }

    pub(crate) fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// Identifies the directory later, by path.
    pub(crate) fn identity(&self) -> DirectoryIdentity {
        self.identity
    }

    /// Whether the workspace is stored in memory, even if a disk was asked for.
    pub(crate) fn is_on_tmpfs(&self) -> bool {
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        rustix::fs::fstatfs(&self.dir).is_ok_and(|s| s.f_type == TMPFS_MAGIC)
    }

    /// Opens a workspace that Fumehood created before and that no process holds any more. `None` if it is gone.
    pub(crate) fn reopen(
        path: PathBuf,
        identity: DirectoryIdentity,
        wait: LockWait,
    ) -> Result<Option<Workspace>, WorkspaceError> {
        wait.retry(|| match lock_existing(&path, identity)? {
            None => Ok(None),
            Some((root, dir)) => {
                let dir = dir.map_err(|e| make_error(&path, e))?;
                let name = path.file_name().unwrap_or_default().to_os_string();
                let path = path.clone();
                Ok(Some(Workspace {
                    path,
                    name,
                    root,
                    dir,
                    identity,
                }))
            }
        })
    }

    /// Prepares the workspace for a program: gives everything to the leased uid, and creates the hidden directory
    /// again if an earlier [`Workspace::keep`] removed it.
    pub(crate) fn prepare(&self, owner: Option<(u32, u32)>) -> Result<(), WorkspaceError> {
        if let Some((uid, gid)) = owner {
            self.take_over(uid, gid)?;
        }
        let hidden = Path::new(sandbox::HIDDEN_DIR);
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        match rustix::fs::statat(&self.dir, hidden, flags) {
            Err(rustix::io::Errno::NOENT) => self.create_private_dirs(self.dir.as_fd(), owner),
            found => found.map(drop),
        }
        .map_err(|e| make_error(&self.path, e))
    }

    fn take_over(&self, uid: u32, gid: u32) -> Result<(), WorkspaceError> {
        let taken = tree::take_over(self.dir.as_fd(), uid, gid);
        taken.map(drop).map_err(|source| WorkspaceError::TakeOver {
            path: self.path.clone(),
            source,
        })
    }

    /// Removes the workspace. The receipt states why nothing is lost.
    pub(crate) fn remove(self, _safe: Receipt) -> Result<(), WorkspaceError> {
        tree::remove(
            self.root.as_fd(),
            &self.name,
            self.identity.device_and_inode(),
        )
        .map(drop)
        .map_err(|source| WorkspaceError::Remove {
            path: self.path.clone(),
            source,
        })
    }

    /// Keeps the workspace: everything in it becomes the property of the user who runs Fumehood, since another analysis
    /// may lease the uid later.
    pub(crate) fn keep(self) -> Result<PathBuf, WorkspaceError> {
        self.reclaim_ownership()?;
        Ok(self.path)
    }

    /// Does what [`Workspace::keep`] does, and keeps holding the workspace.
    pub(crate) fn reclaim_ownership(&self) -> Result<(), WorkspaceError> {
        let (uid, gid) = (
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        // The program may have changed the mode.
        let _ = rustix::fs::fchmod(&self.dir, Mode::from_raw_mode(0o700));
        self.take_over(uid, gid)?;
        for name in ["data", "docs"] {
            // The mount points of the views. rmdir fails if the program created directories of these names and filled
            // them.
            let _ = rustix::fs::unlinkat(&self.dir, name, AtFlags::REMOVEDIR);
        }
        let hidden = Path::new(sandbox::HIDDEN_DIR);
        if let Ok(stat) = rustix::fs::statat(&self.dir, hidden, AtFlags::SYMLINK_NOFOLLOW) {
            // The private /tmp and home are not results.
            let _ = tree::remove(
                self.dir.as_fd(),
                hidden.as_os_str(),
                (stat.st_dev, stat.st_ino),
            );
        }
        Ok(())
    }
}

fn make_error(path: &Path, source: rustix::io::Errno) -> WorkspaceError {
    WorkspaceError::Make {
        path: path.to_path_buf(),
        source: source.into(),
    }
}

/// Gives an entry of a directory, or the directory itself if the name is empty, to `owner`. Follows no symlink.
fn set_owner(
    dir: BorrowedFd<'_>,
    name: &Path,
    owner: Option<(u32, u32)>,
) -> rustix::io::Result<()> {
    let Some((uid, gid)) = owner else {
        return Ok(());
    };
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::fs::chownat(dir, name, Some(uid), Some(gid), flags)
}

/// The reason for the removal of a workspace: why nothing is lost that should be recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receipt {
    /// Outputs and record are durable, in the database or in `pending/`.
    OutputsDurable,
    /// No program ran in the workspace; or one ran, and the caller returns an error instead of a result, so that no
    /// output is recorded.
    NothingRan,
}

/// Whether to wait for the init process of a dead runner, which may still hold the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockWait {
    NoWait,
    Brief,
}

/// Removes the workspace of a dead runner, if the directory is still the one that the run record names.
///
/// init inherited the runner's open directory and with it the lock. While the lock is held, a process of the analysis
/// is alive.
pub(crate) fn remove_abandoned(
    path: &Path,
    identity: DirectoryIdentity,
    wait: LockWait,
) -> Result<(), WorkspaceError> {
    wait.retry(|| try_remove(path, identity))
}

impl LockWait {
    fn retry<T>(
        self,
        mut attempt: impl FnMut() -> Result<T, WorkspaceError>,
    ) -> Result<T, WorkspaceError> {
        const PAUSE: std::time::Duration = std::time::Duration::from_millis(10);
        let tries = if self == LockWait::NoWait { 1 } else { 100 };
        for _ in 1..tries {
            match attempt() {
                Err(_) => std::thread::sleep(PAUSE),
                done => return done,
            }
        }
        attempt()
    }
}

/// The workspace of an id whose run record is lost, if it certainly belongs to a run: the hidden directory exists,
/// and both directories belong to a uid of [`uid_pool::RANGE`] or, without root, to this user.
pub(crate) fn find_unrecorded(
    root: &Path,
    id: &AnalysisId,
) -> Option<(PathBuf, DirectoryIdentity)> {
    let path = root.join(format!("scidex-analysis-{id}"));
    let own = rustix::process::geteuid();
    let is_a_runs = |path: &Path| {
        rustix::fs::lstat(path).is_ok_and(|stat| {
            let owner = match own.is_root() {
                true => uid_pool::RANGE.contains(&stat.st_uid),
                false => stat.st_uid == own.as_raw(),
            };
            owner
                && FileType::from_raw_mode(stat.st_mode) == FileType::Directory
                && stat.st_mode & 0o777 == 0o700
        })
    };
    let identity = DirectoryIdentity::of(&path)?;
    (is_a_runs(&path) && is_a_runs(&path.join(sandbox::HIDDEN_DIR))).then_some((path, identity))
}

/// Opens and locks the directory at `path` if it is still the expected one. Returns its root and, if it can be
/// opened, the directory. `None` if it is gone or is another directory.
#[allow(clippy::type_complexity)]
fn lock_existing(
    path: &Path,
    identity: DirectoryIdentity,
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
    match DirectoryIdentity::at(root_fd.as_fd(), Path::new(name)) {
        Ok(found) if found == identity => {}
        _ => return Ok(None),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut held = rustix::fs::openat(&root_fd, name, flags, Mode::empty());
    if held.as_ref().err() == Some(&rustix::io::Errno::ACCESS) {
        // The program removed the permissions of its own directory.
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

fn try_remove(path: &Path, identity: DirectoryIdentity) -> Result<(), WorkspaceError> {
    // A directory that cannot be opened is not locked; the removal can deal with it.
    let Some((root_fd, _held)) = lock_existing(path, identity)? else {
        return Ok(());
    };
    let name = path.file_name().unwrap_or_default();
    match tree::remove(root_fd.as_fd(), name, identity.device_and_inode()) {
        Ok(_) | Err(TreeError::Absent { .. } | TreeError::NotExpected { .. }) => Ok(()),
        Err(source) => Err(WorkspaceError::Remove {
            path: path.to_path_buf(),
            source,
        }),
    }
}

/// Opens a workspace root. Nobody else must be able to replace a name in it: the root belongs to the user who runs
/// Fumehood or to root, and is either writable by its owner only or sticky.
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
    fn abandoned_workspace() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("scidex-analysis-mine");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("precious"), "x").unwrap();
        (root, path)
    }

    #[test]
    fn another_directory_of_the_same_name_is_left_alone() {
        let (_root, path) = abandoned_workspace();
        let identity = DirectoryIdentity::of(&path).unwrap();
        let (seconds, nanoseconds) = identity.born.unwrap();
        let others = [
            DirectoryIdentity {
                born: Some((seconds, nanoseconds ^ 1)),
                ..identity
            },
            DirectoryIdentity {
                born: Some((seconds - 1, nanoseconds)),
                ..identity
            },
            DirectoryIdentity {
                born: None,
                ..identity
            },
            DirectoryIdentity {
                inode: identity.inode + 1,
                ..identity
            },
            DirectoryIdentity {
                device: identity.device + 1,
                ..identity
            },
        ];
        for other in others {
            remove_abandoned(&path, other, LockWait::NoWait).unwrap();
            assert!(path.join("precious").exists(), "{other:?}");
        }
        remove_abandoned(&path, identity, LockWait::NoWait).unwrap();
        assert!(!path.exists(), "the control");
    }

    #[test]
    fn a_directory_that_somebody_holds_is_left_alone() {
        let (_root, path) = abandoned_workspace();
        let identity = DirectoryIdentity::of(&path).unwrap();
        let holder = std::fs::File::open(&path).unwrap();
        rustix::fs::flock(&holder, FlockOperation::NonBlockingLockExclusive).unwrap();
        for wait in [LockWait::NoWait, LockWait::Brief] {
            let removed = remove_abandoned(&path, identity, wait);
            assert!(matches!(removed, Err(WorkspaceError::InUse { .. })));
            assert!(path.join("precious").exists());
        }
        drop(holder);
        remove_abandoned(&path, identity, LockWait::NoWait).unwrap();
        assert!(!path.exists(), "the control");
    }

    #[test]
    fn an_unsafe_root_is_reported_and_nothing_is_removed() {
        let (root, path) = abandoned_workspace();
        let identity = DirectoryIdentity::of(&path).unwrap();
        let open = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(root.path(), mode).unwrap();
        };
        for mode in [0o777, 0o770, 0o707] {
            open(mode);
            let removed = remove_abandoned(&path, identity, LockWait::NoWait);
            let told = matches!(removed, Err(WorkspaceError::RootNotSafe { .. }));
            assert!(told, "{mode:o}: {removed:?}");
            assert!(path.join("precious").exists());
        }
        open(0o1777);
        remove_abandoned(&path, identity, LockWait::NoWait).unwrap();
        assert!(!path.exists(), "the control");
    }

    #[test]
    fn a_root_that_is_gone_has_nothing_left() {
        let (root, path) = abandoned_workspace();
        let identity = DirectoryIdentity::of(&path).unwrap();
        drop(root);
        remove_abandoned(&path, identity, LockWait::NoWait).unwrap();
    }

    #[test]
    fn a_link_in_the_place_of_a_workspace_is_not_followed() {
        let (root, path) = abandoned_workspace();
        let identity = DirectoryIdentity::of(&path).unwrap();
        let moved = root.path().join("moved");
        std::fs::rename(&path, &moved).unwrap();
        std::os::unix::fs::symlink(&moved, &path).unwrap();
        remove_abandoned(&path, identity, LockWait::NoWait).unwrap();
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
