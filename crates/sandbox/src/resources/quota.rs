//! Project quota: the file system itself limits the workspace's bytes and inodes.
//!
//! ext4 and XFS can count every inode towards a *project*, an id that new files take from their directory, and refuse
//! operations that would exceed the project's limits. Whether they do so depends on how the file system was made and
//! mounted. A file system that counts without refusing answers the same queries. [`limit`] therefore tries it, and
//! succeeds only after the file system has refused one inode and some bytes too many. f2fs also refuses, but does not
//! count the block that each inode occupies, so many small files would exceed the limit; [`limit`] detects this and
//! reports the quota as unsupported.
//!
//! The program cannot leave its project. Seccomp refuses the calls that would change the project, and the kernel
//! allows them only in the initial user namespace.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use crate::sys::{self, QuotaBlock};

/// How many bytes the test of the limit asks for: more than a block of any of these file systems.
const PROBE_BYTES: u64 = 256 * 1024;
/// A new workspace holds only a few empty directories. A workspace with more directories than this is not new.
const DIRECTORIES_MAX: usize = 16;

/// Why a workspace is not under quota.
#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    /// Nothing was changed, or every change was undone.
    #[error("limit a project on this file system: cannot {step}")]
    Unsupported {
        /// What could not be done.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The administrator has put the workspace's place under another project.
    #[error("count the workspace towards project {project}: it belongs to project {other}")]
    OtherProject {
        /// The project that was asked for.
        project: u32,
        /// The project that the workspace belongs to.
        other: u32,
    },
    /// Another owner uses the project.
    #[error("limit project {project}: something counts towards it already")]
    InUse {
        /// The project that was asked for.
        project: u32,
    },
    /// The workspace holds a file, or too many directories.
    #[error("count the workspace towards project {project}: it is not a new one, bare of files")]
    NotBare {
        /// The project that was asked for.
        project: u32,
    },
    /// The workspace may still be under limits that nobody asked for, so it must not be used.
    #[error("take the workspace out of project {project} again")]
    Undo {
        /// The project.
        project: u32,
        /// Why that failed.
        source: io::Error,
    },
}

fn unsupported<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> QuotaError {
    move |source| QuotaError::Unsupported {
        step,
        source: source.into(),
    }
}

/// A workspace under quota. Dropping it keeps the limits, because processes of the run may still exist.
#[derive(Debug)]
pub struct ProjectQuota {
    /// Any descriptor on the file system.
    on: OwnedFd,
    project: u32,
}

/// Returns the first candidate towards which nothing on the file system of `on` counts.
///
/// # Errors
/// [`QuotaError::Unsupported`] if the file system does not count projects, or if all candidates are in use.
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

/// Puts a new workspace, which holds only a few empty directories, under `project` with hard limits. The project must
/// be unused and reserved for the caller on this host. Everything made in the workspace from now on counts.
///
/// # Errors
/// After any error except [`QuotaError::Undo`] the workspace is unchanged and can be used without a quota.
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
    let result = quota
        .find_directories(dir, &mut directories)
        .and_then(|()| quota.join_project(&directories))
        .and_then(|()| quota.prove(dir, &directories))
        .and_then(|()| quota.set(hard_limits(dir, bytes, inodes)?));
    match result {
        Ok(()) => Ok(quota),
        Err(e) => {
            quota
                .undo(&directories)
                .map_err(|source| QuotaError::Undo { project, source })?;
            Err(e)
        }
    }
}

/// Clears the limits of a project whose runner has died. The caller must hold the project's reservation, so that the
/// limits are not those of a new owner.
pub fn release_left_behind(on: BorrowedFd<'_>, project: u32) -> io::Result<()> {
    match sys::project_quota(on, project) {
        // The file system has no quota, or quota is switched off, or the project was never used: there is nothing to
        // clear.
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

/// Rounds the limits down to values that the file system represents exactly, so that they can be read back and
/// compared.
fn hard_limits(dir: BorrowedFd<'_>, bytes: u64, inodes: u64) -> Result<QuotaBlock, QuotaError> {
    let block = rustix::fs::fstatvfs(dir)
        .map_err(unsupported("read the block size"))?
        .f_frsize
        .max(1024);
    let hard_kib = (bytes / block * block) / 1024;
    if hard_kib == 0 || inodes == 0 {
        // The kernel reads zero as no limit.
        return Err(unsupported("express a limit of less than one block")(
            Errno::RANGE,
        ));
    }
    let mut limits = QuotaBlock::default();
    (limits.hard_kib, limits.inodes_hard) = (hard_kib, inodes);
    Ok(limits)
}

impl ProjectQuota {
    /// The project towards which the workspace counts.
    pub fn project(&self) -> u32 {
        self.project
    }

    /// Returns the bytes and inodes that count towards the limits now, including deleted files that are still open.
    pub fn usage(&self) -> io::Result<(u64, u64)> {
        let block = sys::project_quota(self.on.as_fd(), self.project)?;
        Ok((block.used_bytes, block.inodes_used))
    }

    /// Clears the limits, so that the next owner of the project finds none. Call it only when no process of the run
    /// exists.
    pub fn release(self) -> io::Result<()> {
        sys::set_project_limits(self.on.as_fd(), self.project, QuotaBlock::default())
    }

    /// Finds all directories of the workspace. Fails if there is a file: it would keep its old project and would not
    /// count.
    fn find_directories(
        &self,
        dir: BorrowedFd<'_>,
        found: &mut Vec<OwnedFd>,
    ) -> Result<(), QuotaError> {
        let not_bare = || QuotaError::NotBare {
            project: self.project,
        };
        let top = sys::open_at(dir, ".", sys::DIRECTORY);
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
                let child = sys::open_at(&found[next], name, sys::DIRECTORY);
                below.push(child.map_err(unsupported("open the workspace"))?);
            }
            found.extend(below);
            next += 1;
        }
        Ok(())
    }

    /// Adds the directories to the project, and marks them so that new files in them join it.
    fn join_project(&self, directories: &[OwnedFd]) -> Result<(), QuotaError> {
        for dir in directories {
            let before = sys::file_attributes(dir.as_fd())
                .map_err(unsupported("read the project of a directory"))?;
            if before.project != 0 {
                // The administrator limits the place where workspaces are made. A workspace must not escape that
                // limit.
                return Err(QuotaError::OtherProject {
                    project: self.project,
                    other: before.project,
                });
            }
            let mut joined = before;
            joined.project = self.project;
            joined.flags |= sys::PROJECT_INHERIT;
            sys::set_file_attributes(dir.as_fd(), &joined)
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

    /// Tests the limits: one inode and some bytes too many must succeed without limits and fail with them.
    fn prove(&self, dir: BorrowedFd<'_>, directories: &[OwnedFd]) -> Result<(), QuotaError> {
        let file = self.try_without_limits(dir)?;
        self.check_all_counted(&file, directories)?;
        rustix::fs::ftruncate(&file, 0).map_err(unsupported("empty a file"))?;
        let (bytes, inodes) = self.usage().map_err(unsupported("read the use"))?;
        let block = rustix::fs::fstatvfs(dir).map_or(4096, |s| s.f_frsize);
        self.set(hard_limits(dir, bytes.max(block), inodes)?)?;
        let attempt = without_sys_resource(|| {
            Ok((
                make_unnamed_file(dir).err(),
                allocate(file.as_fd(), PROBE_BYTES).err(),
            ))
        });
        match attempt.map_err(unsupported("give up CAP_SYS_RESOURCE to try the limits"))? {
            (Some(inode), Some(space)) if is_refusal(inode) && is_refusal(space) => Ok(()),
            _ => Err(unsupported("see the limits enforced")(Errno::OPNOTSUPP)),
        }
    }

    /// The control of the test: without it, a full disk would look like an enforced limit.
    fn try_without_limits(&self, dir: BorrowedFd<'_>) -> Result<OwnedFd, QuotaError> {
        self.set(QuotaBlock::default())?;
        let try_it = || -> rustix::io::Result<OwnedFd> {
            let file = make_unnamed_file(dir)?;
            allocate(file.as_fd(), PROBE_BYTES)?;
            Ok(file)
        };
        let attempt = without_sys_resource(|| Ok(try_it()?));
        let file = attempt.map_err(unsupported("make a file to try the limits"))?;
        let attributes = sys::file_attributes(file.as_fd())
            .map_err(unsupported("read the project of a new file"))?;
        match attributes.project == self.project {
            true => Ok(file),
            false => Err(unsupported("see a new file in the project")(
                Errno::OPNOTSUPP,
            )),
        }
    }

    /// Checks that all space the files occupy, by their own stat, counts towards the project.
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
            // XFS has no entry for a project that has no limits and no usage.
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
                Ok(_) => continue,
                // The file system has no projects.
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

fn make_unnamed_file(dir: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    rustix::fs::openat(dir, ".", flags, Mode::RUSR | Mode::WUSR)
}

fn allocate(file: BorrowedFd<'_>, bytes: u64) -> rustix::io::Result<()> {
    rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes)
}

/// XFS returns ENOSPC where the others return EDQUOT, because XFS treats a project as a small disk.
fn is_refusal(error: Errno) -> bool {
    matches!(error, Errno::DQUOT | Errno::NOSPC)
}

/// Runs `act` in a thread without CAP_SYS_RESOURCE, which exempts its holder from every limit (except on XFS).
/// Capabilities belong to a thread, so the caller keeps its own.
fn without_sys_resource<T: Send>(act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
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

    /// Makes a directory on the file system that an environment variable names; not every machine has one. Each test
    /// uses a project of its own, so that the tests do not affect each other.
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

    fn enforcing_file_system() -> Option<(tempfile::TempDir, File)> {
        on_file_system("FUMEHOOD_TEST_PROJECT_QUOTA")
    }

    fn is_io_refusal(error: &io::Error) -> bool {
        matches!(error.raw_os_error(), Some(libc::EDQUOT | libc::ENOSPC))
    }

    fn limits_of(dir: &File, project: u32) -> (u64, u64) {
        sys::project_quota(dir.as_fd(), project).map_or((0, 0), |b| (b.hard_kib, b.inodes_hard))
    }

    #[test]
    fn a_file_system_without_projects_is_unsupported_and_untouched() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let fd = File::open(dir.path()).unwrap();
        let result = limit(fd.as_fd(), 1_899_999_001, MIB, 10);
        assert!(matches!(result, Err(QuotaError::Unsupported { .. })));
        let result = unused_project(fd.as_fd(), [1_899_999_001]);
        assert!(matches!(result, Err(QuotaError::Unsupported { .. })));
        File::create(dir.path().join("x")).unwrap();
    }

    #[test]
    fn a_file_system_that_does_not_refuse_or_counts_in_part_is_unsupported_and_undone() {
        let Some((dir, fd)) = on_file_system("FUMEHOOD_TEST_PROJECT_COUNTED") else {
            return;
        };
        let project = 1_899_999_002;
        // The control: the file system does count, so only the attempt reveals that it does not refuse.
        assert_eq!(unused_project(fd.as_fd(), [project]).unwrap(), project);
        let result = limit(fd.as_fd(), project, MIB, 10);
        assert!(
            matches!(&result, Err(QuotaError::Unsupported { step, .. })
                if step.contains("enforced") || step.contains("counted")),
            "{result:?}"
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
        let Some((dir, fd)) = enforcing_file_system() else {
            return;
        };
        let quota = limit(fd.as_fd(), 1_899_999_003, 4 * MIB, 1000).unwrap();
        for place in ["", "hidden", "hidden/tmp", "hidden/tmp/home"] {
            let path = dir.path().join(place).join("x");
            let written = without_sys_resource(|| {
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
            assert!(is_io_refusal(&error), "{error}");
            assert!((3 * MIB..=4 * MIB).contains(&written), "{written}");
            let (bytes, _) = quota.usage().unwrap();
            assert!((3 * MIB..=4 * MIB).contains(&bytes), "{bytes}");
            std::fs::remove_file(path).unwrap();
            wait_until(|| quota.usage().unwrap().0 < MIB);
        }
        // The control: outside the workspace there is room for more.
        let beside = tempfile::tempfile_in(dir.path().parent().unwrap()).unwrap();
        without_sys_resource(|| Ok(allocate(beside.as_fd(), 8 * MIB)?)).unwrap();
        quota.release().unwrap();
    }

    /// XFS frees deleted files in the background.
    fn wait_until(done: impl Fn() -> bool) {
        let bound = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !done() {
            assert!(
                std::time::Instant::now() < bound,
                "the condition did not hold within 60 s"
            );
            std::thread::yield_now();
        }
    }

    #[test]
    fn reserved_space_and_deleted_files_count() {
        let Some((dir, fd)) = enforcing_file_system() else {
            return;
        };
        let quota = limit(fd.as_fd(), 1_899_999_004, 4 * MIB, 1000).unwrap();
        without_sys_resource(|| {
            let unnamed = make_unnamed_file(fd.as_fd())?;
            allocate(unnamed.as_fd(), 3 * MIB)?;
            let named = File::create(dir.path().join("x"))?;
            let error = allocate(named.as_fd(), 2 * MIB).unwrap_err();
            assert!(is_refusal(error), "{error}");
            Ok(())
        })
        .unwrap();
        quota.release().unwrap();
    }

    #[test]
    fn inodes_past_the_limit_are_refused_even_without_content() {
        let Some((dir, fd)) = enforcing_file_system() else {
            return;
        };
        let quota = limit(fd.as_fd(), 1_899_999_005, 64 * MIB, 100).unwrap();
        let made = without_sys_resource(|| {
            let mut made = 0;
            loop {
                match std::os::unix::fs::symlink("x", dir.path().join(made.to_string())) {
                    Ok(()) => made += 1,
                    Err(e) => return Ok((made, e)),
                }
            }
        });
        let (made, error) = made.unwrap();
        assert!(is_io_refusal(&error), "{error}");
        // Four directories exist already. XFS may take a moment to free the files of the probe.
        assert!((94..=96).contains(&made), "{made}");
        assert!(quota.usage().unwrap().1 <= 100);
        quota.release().unwrap();
    }

    #[test]
    fn a_released_project_has_no_limits_and_a_project_in_use_is_skipped() {
        let Some((dir, fd)) = enforcing_file_system() else {
            return;
        };
        let (project, next) = (1_899_999_006, 1_899_999_007);
        let quota = limit(fd.as_fd(), project, 4 * MIB, 1000).unwrap();
        assert_eq!(limits_of(&fd, project), (4096, 1000));
        assert_eq!(unused_project(fd.as_fd(), [project, next]).unwrap(), next);
        let other = tempfile::tempdir_in(dir.path().parent().unwrap()).unwrap();
        let other = File::open(other.path()).unwrap();
        let result = limit(other.as_fd(), project, MIB, 10);
        assert!(
            matches!(result, Err(QuotaError::InUse { .. })),
            "{result:?}"
        );
        assert_eq!(limits_of(&fd, project), (4096, 1000));

        quota.release().unwrap();
        assert_eq!(limits_of(&fd, project), (0, 0));
        without_sys_resource(|| Ok(allocate(make_unnamed_file(fd.as_fd())?.as_fd(), 8 * MIB)?))
            .unwrap();
        let on = File::open(dir.path().parent().unwrap()).unwrap();
        drop((fd, dir));
        wait_until(|| unused_project(on.as_fd(), [project]).is_ok());
        release_left_behind(on.as_fd(), project).unwrap();
    }

    #[test]
    fn a_workspace_with_a_file_or_in_another_project_is_unchanged() {
        let Some((dir, fd)) = enforcing_file_system() else {
            return;
        };
        File::create(dir.path().join("hidden/file")).unwrap();
        let result = limit(fd.as_fd(), 1_899_999_008, MIB, 10);
        assert!(
            matches!(result, Err(QuotaError::NotBare { .. })),
            "{result:?}"
        );
        std::fs::remove_file(dir.path().join("hidden/file")).unwrap();

        let mut attributes = sys::file_attributes(fd.as_fd()).unwrap();
        attributes.project = 1_899_999_009;
        attributes.flags |= sys::PROJECT_INHERIT;
        sys::set_file_attributes(fd.as_fd(), &attributes).unwrap();
        let result = limit(fd.as_fd(), 1_899_999_008, MIB, 10);
        assert!(
            matches!(
                result,
                Err(QuotaError::OtherProject {
                    other: 1_899_999_009,
                    ..
                })
            ),
            "{result:?}"
        );
        let now = sys::file_attributes(fd.as_fd()).unwrap();
        assert_eq!(now.project, 1_899_999_009);
        let result = limit(fd.as_fd(), 1_899_999_010, 100, 10);
        assert!(result.is_err(), "less than a block cannot be a limit");
    }
}
