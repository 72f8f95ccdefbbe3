//! Project quota: the workspace's bytes and inodes, held by the file system itself.
//!
//! ext4 and XFS can count every inode towards a *project*, a number that new files take from their directory, and refuse
//! what would take a project past its limits. Whether they do so depends on how the file system was made and how
//! it was mounted, and counting without refusing looks much the same to whoever asks. So it is tried: [`limit`]
//! says yes only after the file system has refused one inode and some bytes too many. f2fs refuses too, but does not
//! count the block that each inode is, so that many small files would slip past: that is seen, and it does not pass.
//!
//! The program cannot leave its project. Seccomp refuses the calls that would, and the kernel allows them in no
//! user namespace but the first.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use crate::sys::{self, QuotaBlock};

/// How much is asked for when some bytes too many are tried: more than a block of any of these file systems.
const PROBE_BYTES: u64 = 256 * 1024;
/// A workspace is put under quota when it holds a few empty directories. More is not one that was just made.
const DIRECTORIES_MAX: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    /// Nothing was changed, or all of it was changed back.
    #[error("limit a project on this file system: cannot {step}")]
    Unsupported {
        step: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("count the workspace towards project {project}: it belongs to project {other}")]
    OtherProject { project: u32, other: u32 },
    #[error("limit project {project}: something counts towards it already")]
    InUse { project: u32 },
    #[error("count the workspace towards project {project}: it is not a new one, bare of files")]
    NotBare { project: u32 },
    /// The workspace may be left under limits that nobody asked for: it is not to be used.
    #[error("take the workspace out of project {project} again")]
    Undo { project: u32, source: io::Error },
}

fn unsupported<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> QuotaError {
    move |source| QuotaError::Unsupported {
        step,
        source: source.into(),
    }
}

/// A workspace under quota. Dropped, the limits stay: what could still be running must not find them gone.
#[derive(Debug)]
pub struct ProjectQuota {
    /// Any descriptor of the file system would do.
    on: OwnedFd,
    project: u32,
}

/// The first of the candidates that nothing on the file system of `on` counts towards.
///
/// # Errors
/// [`QuotaError::Unsupported`] if the file system keeps no count of projects, or all candidates are in use.
pub fn unused_project(
    on: BorrowedFd<'_>,
    candidates: impl IntoIterator<Item = u32>,
) -> Result<u32, QuotaError> {
    for project in candidates {
        if is_unused(on, project)? {
            return Ok(project);
        }
    }
    Err(QuotaError::Unsupported {
        step: "find a project that is not in use",
        source: Errno::BUSY.into(),
    })
}

fn is_unused(on: BorrowedFd<'_>, project: u32) -> Result<bool, QuotaError> {
    match sys::project_quota(on, project) {
        Ok(block) => Ok(block.used_bytes == 0 && block.inodes_used == 0),
        // XFS has no entry for a project that was never used.
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(true),
        Err(e) => Err(unsupported("read the quota of a project")(e)),
    }
}

/// Puts a workspace that was just made, bare but for a few empty directories, under `project`, which must be unused and
/// the caller's own on this host, with hard limits. Everything made in the workspace from now on counts.
///
/// # Errors
/// Whatever the error, but for [`QuotaError::Undo`], the workspace is as it was and can be used without a quota.
pub fn limit(
    dir: BorrowedFd<'_>,
    project: u32,
    bytes: u64,
    inodes: u64,
) -> Result<ProjectQuota, QuotaError> {
    if !is_unused(dir, project)? {
        return Err(QuotaError::InUse { project });
    }
    let quota = ProjectQuota {
        on: dir
            .try_clone_to_owned()
            .map_err(unsupported("keep a descriptor"))?,
        project,
    };
    let mut directories = Vec::new();
    let held = quota
        .find_directories(dir, &mut directories)
        .and_then(|()| quota.join_project(&directories))
        .and_then(|()| quota.prove(dir, &directories))
        .and_then(|()| quota.set(hard_limits(dir, bytes, inodes)?));
    match held {
        Ok(()) => Ok(quota),
        Err(e) => {
            quota
                .undo(&directories)
                .map_err(|source| QuotaError::Undo { project, source })?;
            Err(e)
        }
    }
}

/// Frees a project of its limits after its runner died. The caller holds whatever makes the project its own, so that the
/// limits are not those of somebody who has it now.
pub fn release_left_behind(on: BorrowedFd<'_>, project: u32) -> io::Result<()> {
    match sys::project_quota(on, project) {
        // No quota on this file system, or switched off since, or never used: nothing to free.
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(libc::ENOSYS | libc::ESRCH | libc::ENOENT)
            ) =>
        {
            Ok(())
        }
        Err(e) => Err(e),
        Ok(_) => sys::set_project_limits(on, project, QuotaBlock::default()),
    }
}

/// Limits that the file system can express exactly, no looser than asked, so that reading them back is a test.
fn hard_limits(dir: BorrowedFd<'_>, bytes: u64, inodes: u64) -> Result<QuotaBlock, QuotaError> {
    let block = rustix::fs::fstatvfs(dir)
        .map_err(unsupported("read the block size"))?
        .f_frsize
        .max(1024);
    let hard_kib = (bytes / block * block) / 1024;
    if hard_kib == 0 || inodes == 0 {
        // Zero is the kernel's word for no limit at all.
        return Err(unsupported("express a limit of less than one block")(
            Errno::RANGE,
        ));
    }
    let mut limits = QuotaBlock::default();
    (limits.hard_kib, limits.inodes_hard) = (hard_kib, inodes);
    Ok(limits)
}

impl ProjectQuota {
    pub fn project(&self) -> u32 {
        self.project
    }

    /// Bytes and inodes that count towards the limits now, those of deleted files that are still open included.
    pub fn usage(&self) -> io::Result<(u64, u64)> {
        let block = sys::project_quota(self.on.as_fd(), self.project)?;
        Ok((block.used_bytes, block.inodes_used))
    }

    /// Sets the limits back to none, so that the project is clean for whoever has it next. Only once nothing runs.
    pub fn release(self) -> io::Result<()> {
        sys::set_project_limits(self.on.as_fd(), self.project, QuotaBlock::default())
    }

    /// All directories of the workspace. A file would keep its old project, and nothing in it would count.
    fn find_directories(
        &self,
        dir: BorrowedFd<'_>,
        found: &mut Vec<OwnedFd>,
    ) -> Result<(), QuotaError> {
        let not_bare = || QuotaError::NotBare {
            project: self.project,
        };
        let open = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let top = rustix::fs::openat(dir, ".", open, Mode::empty());
        found.push(top.map_err(unsupported("open the workspace"))?);
        let mut next = 0;
        while next < found.len() {
            let mut below = Vec::new();
            let mut space = Vec::with_capacity(4096);
            let mut entries = RawDir::new(&found[next], space.spare_capacity_mut());
            while let Some(entry) = entries.next() {
                let entry = entry.map_err(unsupported("list the workspace"))?;
                let name = entry.file_name();
                if name == c"." || name == c".." {
                    continue;
                }
                let stat = rustix::fs::statat(&found[next], name, AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(unsupported("look at the workspace"))?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::Directory
                    || found.len() + below.len() >= DIRECTORIES_MAX
                {
                    return Err(not_bare());
                }
                let child = rustix::fs::openat(&found[next], name, open, Mode::empty());
                below.push(child.map_err(unsupported("open the workspace"))?);
            }
            found.extend(below);
            next += 1;
        }
        Ok(())
    }

    /// Makes the directories members of the project, and whatever is made in them.
    fn join_project(&self, directories: &[OwnedFd]) -> Result<(), QuotaError> {
        for dir in directories {
            let before = sys::file_attributes(dir.as_fd())
                .map_err(unsupported("read the project of a directory"))?;
            if before.project != 0 {
                // Somebody limits the place where workspaces are made; a workspace must not slip out of that.
                return Err(QuotaError::OtherProject {
                    project: self.project,
                    other: before.project,
                });
            }
            let mut wanted = before;
            wanted.project = self.project;
            wanted.flags |= sys::PROJECT_INHERIT;
            sys::set_file_attributes(dir.as_fd(), &wanted)
                .map_err(unsupported("set the project of a directory"))?;
            let after = sys::file_attributes(dir.as_fd())
                .map_err(unsupported("read the project of a directory"))?;
            if after.project != self.project || after.flags & sys::PROJECT_INHERIT == 0 {
                return Err(unsupported("read back the project of a directory")(
                    Errno::OPNOTSUPP,
                ));
            }
        }
        Ok(())
    }

    /// One inode and some bytes too many: possible without limits, refused with them.
    fn prove(&self, dir: BorrowedFd<'_>, directories: &[OwnedFd]) -> Result<(), QuotaError> {
        let file = self.try_without_limits(dir)?;
        self.check_all_counted(&file, directories)?;
        rustix::fs::ftruncate(&file, 0).map_err(unsupported("empty a file"))?;
        let (bytes, inodes) = self.usage().map_err(unsupported("read the use"))?;
        let block = rustix::fs::fstatvfs(dir).map_or(4096, |s| s.f_frsize);
        self.set(hard_limits(dir, bytes.max(block), inodes)?)?;
        let tried = without_exemption(|| {
            Ok((
                make_nameless(dir).err(),
                allocate(file.as_fd(), PROBE_BYTES).err(),
            ))
        });
        match tried.map_err(unsupported("give up CAP_SYS_RESOURCE to try the limits"))? {
            (Some(inode), Some(space)) if is_refusal(inode) && is_refusal(space) => Ok(()),
            _ => Err(unsupported("see the limits enforced")(Errno::OPNOTSUPP)),
        }
    }

    /// The control: without it, a full disk would pass for a limit.
    fn try_without_limits(&self, dir: BorrowedFd<'_>) -> Result<OwnedFd, QuotaError> {
        self.set(QuotaBlock::default())?;
        let try_it = || -> rustix::io::Result<OwnedFd> {
            let file = make_nameless(dir)?;
            allocate(file.as_fd(), PROBE_BYTES)?;
            Ok(file)
        };
        let tried = without_exemption(|| Ok(try_it()?));
        let file = tried.map_err(unsupported("make a file to try the limits"))?;
        let attributes = sys::file_attributes(file.as_fd())
            .map_err(unsupported("read the project of a new file"))?;
        match attributes.project == self.project {
            true => Ok(file),
            false => Err(unsupported("see a new file in the project")(
                Errno::OPNOTSUPP,
            )),
        }
    }

    /// What the files occupy by their own account counts towards the project to the last byte.
    fn check_all_counted(&self, file: &OwnedFd, directories: &[OwnedFd]) -> Result<(), QuotaError> {
        let mut occupied = 0;
        for each in directories.iter().chain([file]) {
            let stat = rustix::fs::fstat(each).map_err(unsupported("look at the workspace"))?;
            occupied += stat.st_blocks as u64 * 512;
        }
        let (counted, _) = self.usage().map_err(unsupported("read the use"))?;
        match counted >= occupied {
            true => Ok(()),
            false => Err(unsupported("see all bytes counted")(Errno::OPNOTSUPP)),
        }
    }

    fn set(&self, limits: QuotaBlock) -> Result<(), QuotaError> {
        sys::set_project_limits(self.on.as_fd(), self.project, limits)
            .map_err(unsupported("set limits"))?;
        let back = match sys::project_quota(self.on.as_fd(), self.project) {
            // XFS has no entry for a project without limits that nothing counts towards.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => QuotaBlock::default(),
            other => other.map_err(unsupported("read the limits"))?,
        };
        let numbers = |b: QuotaBlock| (b.hard_kib, b.soft_kib, b.inodes_hard, b.inodes_soft);
        match numbers(back) == numbers(limits) {
            true => Ok(()),
            false => Err(unsupported("read back the limits as they were set")(
                Errno::RANGE,
            )),
        }
    }

    fn undo(&self, directories: &[OwnedFd]) -> io::Result<()> {
        for dir in directories {
            let mut attributes = match sys::file_attributes(dir.as_fd()) {
                Ok(now) if now.project == self.project => now,
                Ok(_not_joined) => continue,
                // A file system without projects.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::EOPNOTSUPP)) => {
                    continue;
                }
                Err(e) => return Err(e),
            };
            attributes.project = 0;
            attributes.flags &= !sys::PROJECT_INHERIT;
            sys::set_file_attributes(dir.as_fd(), &attributes)?;
        }
        release_left_behind(self.on.as_fd(), self.project)
    }
}

fn make_nameless(dir: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    rustix::fs::openat(dir, ".", flags, Mode::RUSR | Mode::WUSR)
}

fn allocate(file: BorrowedFd<'_>, bytes: u64) -> rustix::io::Result<()> {
    rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes)
}

/// XFS says "no space" where the others say "quota exceeded": a project is a small disk to it.
fn is_refusal(error: Errno) -> bool {
    matches!(error, Errno::DQUOT | Errno::NOSPC)
}

/// Does something in a thread that has no CAP_SYS_RESOURCE, which would exempt it from every limit (except on XFS).
/// Capabilities are a thread's own, so the caller keeps them.
fn without_exemption<T: Send>(act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            let mut sets = rustix::thread::capabilities(None)?;
            sets.effective -= CapabilitySet::SYS_RESOURCE;
            rustix::thread::set_capabilities(None, sets)?;
            act()
        })?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::path::PathBuf;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A directory on a file system that an environment variable names: not every machine has one. A separate
    /// project for each test keeps them apart.
    fn on_file_system(variable: &str) -> Option<(tempfile::TempDir, File)> {
        let Some(place) = std::env::var_os(variable).map(PathBuf::from) else {
            eprintln!("UNAVAILABLE: {variable} does not name a directory, owned by root");
            return None;
        };
        let dir = tempfile::tempdir_in(place).unwrap();
        std::fs::create_dir_all(dir.path().join("hidden/tmp/home")).unwrap();
        let fd = File::open(dir.path()).unwrap();
        Some((dir, fd))
    }

    fn enforcing() -> Option<(tempfile::TempDir, File)> {
        on_file_system("FUMEHOOD_TEST_PROJECT_QUOTA")
    }

    fn refusal(error: &io::Error) -> bool {
        matches!(error.raw_os_error(), Some(libc::EDQUOT | libc::ENOSPC))
    }

    fn limits_of(dir: &File, project: u32) -> (u64, u64) {
        sys::project_quota(dir.as_fd(), project).map_or((0, 0), |b| (b.hard_kib, b.inodes_hard))
    }

    #[test]
    fn a_file_system_without_projects_is_unsupported_and_untouched() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let fd = File::open(dir.path()).unwrap();
        let said = limit(fd.as_fd(), 1_899_999_001, MIB, 10);
        assert!(matches!(said, Err(QuotaError::Unsupported { .. })));
        let said = unused_project(fd.as_fd(), [1_899_999_001]);
        assert!(matches!(said, Err(QuotaError::Unsupported { .. })));
        File::create(dir.path().join("x")).unwrap();
    }

    #[test]
    fn refusing_nothing_or_counting_in_part_is_unsupported_and_undone() {
        let Some((dir, fd)) = on_file_system("FUMEHOOD_TEST_PROJECT_COUNTED") else {
            return;
        };
        let project = 1_899_999_002;
        // The control: it does count, so that only trying tells.
        assert_eq!(unused_project(fd.as_fd(), [project]).unwrap(), project);
        let said = limit(fd.as_fd(), project, MIB, 10);
        assert!(
            matches!(&said, Err(QuotaError::Unsupported { step, .. })
                if step.contains("enforced") || step.contains("counted")),
            "{said:?}"
        );
        for path in ["", "hidden", "hidden/tmp", "hidden/tmp/home"] {
            let now = sys::file_attributes(File::open(dir.path().join(path)).unwrap().as_fd());
            let now = now.unwrap();
            assert_eq!((now.project, now.flags & sys::PROJECT_INHERIT), (0, 0));
        }
        assert_eq!(limits_of(&fd, project), (0, 0));
    }

    #[test]
    fn bytes_past_the_limit_are_refused_wherever_they_are_written() {
        let Some((dir, fd)) = enforcing() else { return };
        let quota = limit(fd.as_fd(), 1_899_999_003, 4 * MIB, 1000).unwrap();
        for place in ["", "hidden", "hidden/tmp", "hidden/tmp/home"] {
            let path = dir.path().join(place).join("x");
            let written = without_exemption(|| {
                let mut file = File::create(&path)?;
                let mut written = 0;
                loop {
                    match file.write_all(&[7; 65536]).and_then(|()| file.sync_data()) {
                        Ok(()) => written += 65536,
                        Err(e) => return Ok((written, e)),
                    }
                }
            });
            let (written, error) = written.unwrap();
            assert!(refusal(&error), "{error}");
            assert!((3 * MIB..=4 * MIB).contains(&written), "{written}");
            let (bytes, _) = quota.usage().unwrap();
            assert!((3 * MIB..=4 * MIB).contains(&bytes), "{bytes}");
            std::fs::remove_file(path).unwrap();
            wait_until(|| quota.usage().unwrap().0 < MIB);
        }
        // The control: beside the workspace there is room for more.
        let beside = tempfile::tempfile_in(dir.path().parent().unwrap()).unwrap();
        without_exemption(|| Ok(allocate(beside.as_fd(), 8 * MIB)?)).unwrap();
        quota.release().unwrap();
    }

    /// XFS frees what was deleted in the background.
    fn wait_until(done: impl Fn() -> bool) {
        let bound = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !done() {
            assert!(std::time::Instant::now() < bound, "it never came about");
            std::thread::yield_now();
        }
    }

    #[test]
    fn space_that_is_only_reserved_counts_and_so_does_a_deleted_file() {
        let Some((dir, fd)) = enforcing() else { return };
        let quota = limit(fd.as_fd(), 1_899_999_004, 4 * MIB, 1000).unwrap();
        without_exemption(|| {
            let nameless = make_nameless(fd.as_fd())?;
            allocate(nameless.as_fd(), 3 * MIB)?;
            let named = File::create(dir.path().join("x"))?;
            let error = allocate(named.as_fd(), 2 * MIB).unwrap_err();
            assert!(is_refusal(error), "{error}");
            Ok(())
        })
        .unwrap();
        quota.release().unwrap();
    }

    #[test]
    fn inodes_past_the_limit_are_refused_empty_as_they_are() {
        let Some((dir, fd)) = enforcing() else { return };
        let quota = limit(fd.as_fd(), 1_899_999_005, 64 * MIB, 100).unwrap();
        let made = without_exemption(|| {
            let mut made = 0;
            loop {
                match std::os::unix::fs::symlink("x", dir.path().join(made.to_string())) {
                    Ok(()) => made += 1,
                    Err(e) => return Ok((made, e)),
                }
            }
        });
        let (made, error) = made.unwrap();
        assert!(refusal(&error), "{error}");
        // Four directories were there; what the probe left may take a moment to be gone on XFS.
        assert!((94..=96).contains(&made), "{made}");
        assert!(quota.usage().unwrap().1 <= 100);
        quota.release().unwrap();
    }

    #[test]
    fn a_released_project_is_clean_and_one_in_use_is_passed_over() {
        let Some((dir, fd)) = enforcing() else { return };
        let (project, next) = (1_899_999_006, 1_899_999_007);
        let quota = limit(fd.as_fd(), project, 4 * MIB, 1000).unwrap();
        assert_eq!(limits_of(&fd, project), (4096, 1000));
        assert_eq!(unused_project(fd.as_fd(), [project, next]).unwrap(), next);
        let other = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
        let other = File::open(other.path()).unwrap();
        let said = limit(other.as_fd(), project, MIB, 10);
        assert!(matches!(said, Err(QuotaError::InUse { .. })), "{said:?}");
        assert_eq!(limits_of(&fd, project), (4096, 1000));

        quota.release().unwrap();
        assert_eq!(limits_of(&fd, project), (0, 0));
        without_exemption(|| Ok(allocate(make_nameless(fd.as_fd())?.as_fd(), 8 * MIB)?)).unwrap();
        let on = File::open(dir.path().parent().unwrap()).unwrap();
        drop((fd, dir));
        wait_until(|| unused_project(on.as_fd(), [project]).is_ok());
        release_left_behind(on.as_fd(), project).unwrap();
    }

    #[test]
    fn a_workspace_with_a_file_or_in_a_project_of_the_hosts_is_left_alone() {
        let Some((dir, fd)) = enforcing() else { return };
        File::create(dir.path().join("hidden/file")).unwrap();
        let said = limit(fd.as_fd(), 1_899_999_008, MIB, 10);
        assert!(matches!(said, Err(QuotaError::NotBare { .. })), "{said:?}");
        std::fs::remove_file(dir.path().join("hidden/file")).unwrap();

        let mut attributes = sys::file_attributes(fd.as_fd()).unwrap();
        attributes.project = 1_899_999_009;
        attributes.flags |= sys::PROJECT_INHERIT;
        sys::set_file_attributes(fd.as_fd(), &attributes).unwrap();
        let said = limit(fd.as_fd(), 1_899_999_008, MIB, 10);
        assert!(
            matches!(
                said,
                Err(QuotaError::OtherProject {
                    other: 1_899_999_009,
                    ..
                })
            ),
            "{said:?}"
        );
        let now = sys::file_attributes(fd.as_fd()).unwrap();
        assert_eq!(now.project, 1_899_999_009);
        let said = limit(fd.as_fd(), 1_899_999_010, 100, 10);
        assert!(said.is_err(), "less than a block cannot be a limit");
    }
}
