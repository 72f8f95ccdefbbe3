//! Calls of the attacks that neither std nor rustix wraps, with their arguments laid out as the kernel expects them.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use crate::sys::Arg::{Bytes, Number, Text};
use crate::sys::{Call, attempt};

/// Makes the kernel send SIGALRM to this process after `seconds`.
pub fn alarm(seconds: u64) -> io::Result<()> {
    // struct itimerval: first the interval, then the time until the first signal.
    let mut timer = [0u8; 32];
    timer[16..24].copy_from_slice(&seconds.to_ne_bytes());
    attempt(Call::SET_TIMER, &mut [Number(0), Bytes(&mut timer)]).map(drop)
}

/// Reads the start of the file behind a descriptor number, if the number is open.
pub fn read_inherited(number: RawFd, into: &mut [u8]) -> io::Result<usize> {
    let [fd, most, offset] = [number.into(), into.len() as i64, 0].map(Number);
    let args = &mut [fd, Bytes(into), most, offset];
    attempt(Call::PREAD, args).map(|n| n as usize)
}

/// Makes the kernel send this signal to a process (or group, if negative) whenever the descriptor becomes ready.
pub fn signal_owner(of: BorrowedFd<'_>, pid: i32, signal: i32) -> io::Result<()> {
    const F_SETSIG: i32 = 10;
    for (command, value) in [
        (libc::F_SETOWN, pid),
        (F_SETSIG, signal),
        (libc::F_SETFL, libc::O_ASYNC),
    ] {
        let numbers = [of.as_raw_fd(), command, value];
        attempt(Call::FCNTL, &mut numbers.map(|n| Number(n.into())))?;
    }
    Ok(())
}

/// Copies from one descriptor to another. Takes numbers, because another thread may close either descriptor
/// meanwhile.
pub fn send_file(to: RawFd, from: RawFd, bytes: usize) -> io::Result<usize> {
    let numbers = [to.into(), from.into(), 0, bytes as i64];
    attempt(Call::SENDFILE, &mut numbers.map(Number)).map(|n| n as usize)
}

/// Injects a byte into a terminal's input as if it had been typed (TIOCSTI).
pub fn inject_byte(terminal: BorrowedFd<'_>, byte: u8) -> io::Result<()> {
    let (fd, command) = (terminal.as_raw_fd().into(), libc::TIOCSTI as i64);
    let args = &mut [Number(fd), Number(command), Bytes(&mut [byte])];
    attempt(Call::IOCTL, args).map(drop)
}

/// An open message queue. It stays open until the process exits.
pub struct OpenQueue(i64);

impl OpenQueue {
    /// Opens a queue. A new queue is open to all users.
    pub fn open(name: &CStr, flags: libc::c_int) -> io::Result<OpenQueue> {
        let flags = Number((flags | libc::O_CLOEXEC | libc::O_NONBLOCK).into());
        let args = &mut [Text(name), flags, Number(0o666), Number(0)];
        attempt(Call::MQ_OPEN, args).map(OpenQueue)
    }

    pub fn send(&self, message: &[u8]) -> io::Result<()> {
        let (mut message, length) = (message.to_vec(), Number(message.len() as i64));
        let args = &mut [Number(self.0), Bytes(&mut message), length];
        attempt(Call::MQ_SEND, args).map(drop)
    }

    pub fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        let length = Number(into.len() as i64);
        let args = &mut [Number(self.0), Bytes(into), length];
        attempt(Call::MQ_RECEIVE, args).map(|n| n as usize)
    }
}
