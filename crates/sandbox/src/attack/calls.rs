//! The battery's calls that neither std nor rustix has, each with its arguments laid out as the kernel takes them.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use crate::sys::{Arg, Call, ForkSide, attempt};

/// SIGALRM after this long.
pub fn alarm(seconds: u64) -> io::Result<()> {
    // struct itimerval: how often again, then how long until the first.
    let mut timer = [0u8; 32];
    timer[16..24].copy_from_slice(&seconds.to_ne_bytes());
    attempt(
        Call::SET_TIMER,
        &mut [Arg::Number(0), Arg::Bytes(&mut timer)],
    )
    .map(drop)
}

/// The beginning of whatever file stands behind a number, if one does.
pub fn read_inherited(number: RawFd, into: &mut [u8]) -> io::Result<usize> {
    let (fd, most) = (Arg::Number(number.into()), Arg::Number(into.len() as i64));
    let args = &mut [fd, Arg::Bytes(into), most, Arg::Number(0)];
    attempt(Call::PREAD, args).map(|n| n as usize)
}

/// Has the kernel send a process (below zero: a group) this signal whenever the descriptor becomes ready.
pub fn signal_owner(of: BorrowedFd<'_>, pid: i32, signal: i32) -> io::Result<()> {
    const F_SETSIG: i32 = 10;
    for (command, value) in [
        (libc::F_SETOWN, pid),
        (F_SETSIG, signal),
        (libc::F_SETFL, libc::O_ASYNC),
    ] {
        let numbers = [of.as_raw_fd(), command, value];
        let mut args = numbers.map(|n| Arg::Number(n.into()));
        attempt(Call::FCNTL, &mut args)?;
    }
    Ok(())
}

/// Copies from one descriptor to another, by their numbers: another thread may close either meanwhile.
pub fn send_file(to: RawFd, from: RawFd, bytes: usize) -> io::Result<usize> {
    let (to, from) = (Arg::Number(to.into()), Arg::Number(from.into()));
    let args = &mut [to, from, Arg::Number(0), Arg::Number(bytes as i64)];
    attempt(Call::SENDFILE, args).map(|n| n as usize)
}

/// Puts a byte into a terminal's input as if it had been typed.
pub fn type_into(terminal: BorrowedFd<'_>, byte: u8) -> io::Result<()> {
    let (fd, command) = (terminal.as_raw_fd().into(), libc::TIOCSTI as i64);
    let args = &mut [
        Arg::Number(fd),
        Arg::Number(command),
        Arg::Bytes(&mut [byte]),
    ];
    attempt(Call::IOCTL, args).map(drop)
}

/// An open message queue, for as long as the process lives.
pub struct OpenQueue(i64);

impl OpenQueue {
    /// A new one is open to all.
    pub fn open(name: &CStr, flags: libc::c_int) -> io::Result<OpenQueue> {
        let flags = Arg::Number((flags | libc::O_CLOEXEC | libc::O_NONBLOCK).into());
        let args = &mut [Arg::Text(name), flags, Arg::Number(0o666), Arg::Number(0)];
        attempt(Call::MQ_OPEN, args).map(OpenQueue)
    }

    pub fn send(&self, message: &[u8]) -> io::Result<()> {
        let (mut message, length) = (message.to_vec(), Arg::Number(message.len() as i64));
        let args = &mut [Arg::Number(self.0), Arg::Bytes(&mut message), length];
        attempt(Call::MQ_SEND, args).map(drop)
    }

    pub fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        let length = Arg::Number(into.len() as i64);
        let args = &mut [Arg::Number(self.0), Arg::Bytes(into), length];
        attempt(Call::MQ_RECEIVE, args).map(|n| n as usize)
    }
}

/// A fork into namespaces of its own.
pub fn clone_into(namespaces: libc::c_int) -> io::Result<ForkSide> {
    let flags = Arg::Number((namespaces | libc::SIGCHLD).into());
    attempt(Call::CLONE, &mut [flags]).map(forked)
}

pub fn clone3_into(namespaces: libc::c_int) -> io::Result<ForkSide> {
    // struct clone_args: the flags first, the signal fifth, of eight.
    let mut args = [0u8; 64];
    args[..4].copy_from_slice(&namespaces.to_ne_bytes());
    args[32..36].copy_from_slice(&libc::SIGCHLD.to_ne_bytes());
    let args = &mut [Arg::Bytes(&mut args), Arg::Number(64)];
    attempt(Call::CLONE3, args).map(forked)
}

fn forked(pid: i64) -> ForkSide {
    match pid {
        0 => ForkSide::Child,
        child => ForkSide::Parent {
            child: child as i32,
        },
    }
}
