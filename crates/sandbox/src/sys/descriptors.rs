//! File descriptors by number: closing ranges of them, and placing one at a number.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use super::check;

/// Closes every descriptor from `first` on: what the caller's parents left open is not for us.
pub fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: called at the birth of the launcher, before it owns any descriptor from `first` on.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    check(result).map(drop)
}

/// Closes every descriptor from 3 on but this one.
pub fn close_all_but(kept: BorrowedFd<'_>) -> io::Result<()> {
    let kept = kept.as_raw_fd();
    if kept > 3 {
        // SAFETY: called at the birth of the launcher, which owns no descriptor but `kept` and those that it leaks on purpose.
        check(unsafe { libc::syscall(libc::SYS_close_range, 3, kept - 1, 0) })?;
    }
    close_from(kept + 1)
}

/// Marks every descriptor from `first` on close-on-exec.
pub fn close_on_exec_from(first: RawFd) -> io::Result<()> {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: only flags of descriptors change.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            libc::c_uint::MAX,
            CLOSE_RANGE_CLOEXEC,
        )
    };
    check(result).map(drop)
}

/// Puts a descriptor at a fixed number, inherited by exec.
pub fn place_descriptor(fd: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    if fd.as_raw_fd() == number {
        // dup2 onto itself would leave close-on-exec set.
        return rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).map_err(Into::into);
    }
    // SAFETY: callers own 0, 1 and 2 in the forked child and hold no Rust object for them.
    check(unsafe { libc::dup2(fd.as_raw_fd(), number) } as libc::c_long).map(drop)
}
