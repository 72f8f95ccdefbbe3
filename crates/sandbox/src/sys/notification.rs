//! Answers to a system call that a filter handed over, other than success or an errno.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

/// Answers a notification with a copy of a descriptor, closed on exec or not, whose number there becomes what the call
/// returns.
pub fn answer_with_descriptor(
    listener: BorrowedFd<'_>,
    id: u64,
    fd: BorrowedFd<'_>,
    close_on_exec: bool,
) -> io::Result<()> {
    // In one step with the answer: the caller cannot die in between and leave a descriptor behind (Linux 5.14).
    const SECCOMP_ADDFD_FLAG_SEND: u32 = 2;
    const SECCOMP_IOCTL_NOTIF_ADDFD: u64 = 0x4018_2103;
    let raw = libc::seccomp_notif_addfd {
        id,
        flags: SECCOMP_ADDFD_FLAG_SEND,
        srcfd: fd.as_raw_fd() as u32,
        newfd: 0,
        newfd_flags: if close_on_exec {
            libc::O_CLOEXEC as u32
        } else {
            0
        },
    };
    // SAFETY: the ioctl reads the 24-byte struct it is given.
    let result = unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_ADDFD as _, &raw) };
    check(result as libc::c_long).map(drop)
}
