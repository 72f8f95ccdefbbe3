//! Opens files, always close-on-exec. Closes ranges of descriptors by number, and places a descriptor at a number.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::path::Arg;

use super::check;

/// How to open a directory to list or measure it.
pub const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW);

/// Opens an existing file.
pub fn open(path: impl Arg, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    open_at(CWD, path, flags)
}

/// As [`open`], relative to a directory.
pub fn open_at(dir: impl AsFd, path: impl Arg, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(dir, path, flags | OFlags::CLOEXEC, Mode::empty())
}

/// As [`open_at`], for a path that was resolved before. Fails at a symlink, because it means that somebody replaced a
/// part of the path.
pub fn open_resolved(dir: impl AsFd, path: impl Arg, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(dir, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

/// As [`open_at`], for a path of the program's. Fails at a magic link, because `/proc/self/fd/N` would lead to a
/// descriptor of this process.
pub fn open_for_program(
    dir: impl AsFd,
    path: impl Arg,
    flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    rustix::fs::openat2(dir, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
}

/// Closes every descriptor from `first` on, so that the launcher keeps nothing that its ancestors left open.
pub fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: the launcher calls this when it starts, before any Rust object owns a descriptor from `first` on.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    check(result).map(drop)
}

/// Closes every descriptor from 3 on except this one.
pub fn close_all_but(kept: BorrowedFd<'_>) -> io::Result<()> {
    let kept = kept.as_raw_fd();
    if kept > 3 {
        // SAFETY: the launcher calls this when it starts, and owns no descriptor but `kept` and those that it leaks
        // on purpose.
        check(unsafe { libc::syscall(libc::SYS_close_range, 3, kept - 1, 0) })?;
    }
    close_from(kept + 1)
}

/// Marks every descriptor from `first` on close-on-exec.
pub fn close_on_exec_from(first: RawFd) -> io::Result<()> {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: the call changes only descriptor flags; no descriptor is closed.
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

/// Puts a copy of a descriptor at a fixed number, inherited by exec.
pub fn place_descriptor(fd: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    if fd.as_raw_fd() == number {
        // dup2 of a descriptor onto itself would keep close-on-exec set.
        return rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).map_err(Into::into);
    }
    // SAFETY: dup2 closes what `number` was. The callers own 0, 1 and 2 and hold no Rust object for them.
    check(unsafe { libc::dup2(fd.as_raw_fd(), number) } as libc::c_long).map(drop)
}
