//! Mount attributes, and the file system uid.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

#[repr(C)]
#[derive(Default)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

pub const MOUNT_ATTR_RDONLY: u64 = 0x1;
pub const MOUNT_ATTR_NOSUID: u64 = 0x2;
pub const MOUNT_ATTR_NODEV: u64 = 0x4;
pub const MOUNT_ATTR_NOEXEC: u64 = 0x8;
const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
const AT_RECURSIVE: libc::c_int = 0x8000;

fn mount_setattr(mount: BorrowedFd<'_>, attr: &MountAttr, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: the path is a NUL-terminated constant. `attr` has the kernel's layout, and its size is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | flags,
            std::ptr::from_ref(attr),
            size_of::<MountAttr>(),
        )
    })
    .map(drop)
}

/// Sets attributes on a mount and on everything mounted below it, and makes all these mounts private.
pub fn mount_restrict(mount: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    let attr = MountAttr {
        attr_set: attributes,
        propagation: libc::MS_PRIVATE,
        ..MountAttr::default()
    };
    mount_setattr(mount, &attr, AT_RECURSIVE)
}

/// Idmaps a detached mount through a user namespace, so that its files appear with mapped owners.
pub fn mount_idmap(mount: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
    let attr = MountAttr {
        attr_set: MOUNT_ATTR_IDMAP,
        userns_fd: user_namespace.as_raw_fd() as u64,
        ..MountAttr::default()
    };
    mount_setattr(mount, &attr, AT_RECURSIVE)
}

/// Sets the uid that file systems check. Leaving 0 drops the effective file capabilities, and returning to 0 restores
/// them.
pub fn set_fs_uid(uid: u32) {
    // SAFETY: setfsuid has no memory preconditions. It cannot fail for root; it returns the old value.
    unsafe { libc::syscall(libc::SYS_setfsuid, uid) };
}
