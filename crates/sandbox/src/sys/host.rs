//! The loopback interface, the controlling terminal, the session keyring and the clock.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use super::{check, ioctl};

/// Brings the loopback interface of this network namespace up.
pub fn loopback_up() -> io::Result<()> {
    const SIOCSIFFLAGS: u64 = 0x8914;
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    let mut request = [0u8; 40];
    request[..2].copy_from_slice(b"lo");
    let flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    request[16..18].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: SIOCSIFFLAGS reads a struct ifreq, which has 40 bytes on 64-bit Linux (16 of name, then the flags), as
    // `request` has.
    unsafe { ioctl(socket, SIOCSIFFLAGS, &mut request) }
}

/// Makes an open terminal the controlling terminal of this session.
pub fn make_controlling_terminal(terminal: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: TIOCSCTTY takes an int by value, so no pointer is passed.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) } as libc::c_long)
        .map(drop)
}

/// Sets the size of a terminal, by either of its ends.
pub fn set_terminal_size(terminal: impl AsFd, rows: u16, columns: u16) -> rustix::io::Result<()> {
    let size = rustix::termios::Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    rustix::termios::tcsetwinsize(terminal, size)
}

/// Replaces the caller's session keyring by a new, empty one.
pub fn new_session_keyring() -> io::Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: the name pointer is null, which asks for an anonymous keyring, so no memory is read.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0) };
    match check(result) {
        // A kernel built without keyrings has no keyring to leave.
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        other => other.map(drop),
    }
}

/// Returns the microseconds of CLOCK_MONOTONIC, a clock that all processes of this machine share.
pub fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}
