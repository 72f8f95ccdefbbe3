//! Project quota: the project id of a file, and the limits of a project.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{check, ioctl};

/// The kernel's `struct fsxattr`, which FS_IOC_FSGETXATTR reads and FS_IOC_FSSETXATTR writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileAttributes {
    pub flags: u32,
    extent_size: u32,
    extents: u32,
    pub project: u32,
    cow_extent_size: u32,
    padding: [u8; 8],
}

/// A directory with this flag gives its project to new files in it.
pub const PROJECT_INHERIT: u32 = 0x200;

/// Reads a file's project and flags.
pub fn file_attributes(file: BorrowedFd<'_>) -> io::Result<FileAttributes> {
    const FS_IOC_FSGETXATTR: u64 = 0x801c_581f;
    let mut attributes = FileAttributes::default();
    // SAFETY: the command writes a 28-byte struct, whose layout `FileAttributes` has.
    unsafe { ioctl(file, FS_IOC_FSGETXATTR, &mut attributes) }.map(|()| attributes)
}

/// Writes a file's project and flags. The other fields should be as they were read.
pub fn set_file_attributes(file: BorrowedFd<'_>, attributes: &FileAttributes) -> io::Result<()> {
    const FS_IOC_FSSETXATTR: u64 = 0x401c_5820;
    // SAFETY: the command reads a 28-byte struct, whose layout `FileAttributes` has.
    unsafe { ioctl(file, FS_IOC_FSSETXATTR, &mut { *attributes }) }
}

/// The kernel's `if_dqblk`: limits and usage of one project. Space limits are in KiB, and 0 means no limit. Usage is
/// in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaBlock {
    pub hard_kib: u64,
    pub soft_kib: u64,
    pub used_bytes: u64,
    pub inodes_hard: u64,
    pub inodes_soft: u64,
    pub inodes_used: u64,
    grace_ends: u64,
    inodes_grace_ends: u64,
    valid: u32,
}

fn quotactl_project(
    on: BorrowedFd<'_>,
    command: u32,
    project: u32,
    block: &mut QuotaBlock,
) -> io::Result<()> {
    const PRJQUOTA: u32 = 2;
    // SAFETY: both commands take a pointer to an `if_dqblk`, whose layout `QuotaBlock` has. `block` is exclusively
    // borrowed for the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            on.as_raw_fd(),
            command << 8 | PRJQUOTA,
            project,
            std::ptr::from_mut(block),
        )
    };
    check(result).map(drop)
}

/// Reads a project's quota on the file system of `on`.
pub fn project_quota(on: BorrowedFd<'_>, project: u32) -> io::Result<QuotaBlock> {
    const Q_GETQUOTA: u32 = 0x80_0007;
    let mut block = QuotaBlock::default();
    quotactl_project(on, Q_GETQUOTA, project, &mut block).map(|()| block)
}

/// Sets a project's limits on the file system of `on`, and changes nothing else of the project.
pub fn set_project_limits(on: BorrowedFd<'_>, project: u32, limits: QuotaBlock) -> io::Result<()> {
    const Q_SETQUOTA: u32 = 0x80_0008;
    const QIF_BLIMITS: u32 = 1;
    const QIF_ILIMITS: u32 = 4;
    let mut block = QuotaBlock {
        valid: QIF_BLIMITS | QIF_ILIMITS,
        ..limits
    };
    quotactl_project(on, Q_SETQUOTA, project, &mut block)
}
