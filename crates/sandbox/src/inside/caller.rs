//! The thread that made a call, and what is taken from its process: copies of memory and of descriptors.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::sys::procfs::thread_group;
use crate::sys::{self, Notification};

pub struct CallingThread {
    pub thread: u32,
    pub process: u32,
    held: OwnedFd,
}

impl CallingThread {
    pub fn of(call: &Notification) -> io::Result<CallingThread> {
        let open = |pid: u32| {
            let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
            let number = number.ok_or_else(|| errno(libc::ESRCH))?;
            rustix::process::pidfd_open(number, PidfdFlags::empty()).map_err(|_| errno(libc::ESRCH))
        };
        // The notification names a thread; descriptors belong to its process. Only a process's first thread can be
        // held by its own number, which spares looking up whose thread it is.
        if let Ok(held) = open(call.pid) {
            return Ok(CallingThread {
                thread: call.pid,
                process: call.pid,
                held,
            });
        }
        let process = thread_group(call.pid)? as u32;
        Ok(CallingThread {
            thread: call.pid,
            process,
            held: open(process)?,
        })
    }

    /// A copy of one of its descriptors. Threads share them: seccomp refuses to make one that does not.
    pub fn descriptor(&self, number: u64) -> io::Result<OwnedFd> {
        let number = number as i32;
        // rustix asserts that it gets none of these.
        if number < 0 {
            return Err(errno(libc::EBADF));
        }
        rustix::process::pidfd_getfd(&self.held, number, PidfdGetfdFlags::empty())
            .map_err(|_| errno(libc::EBADF))
    }

    /// Whether nobody but the thread that waits for our answer could change its descriptors. Seccomp refuses descriptors
    /// that are shared with another process.
    pub fn is_alone(&self) -> bool {
        // Linux counts one link for each thread, beside the two of every directory.
        let tasks = rustix::fs::stat(format!("/proc/{}/task", self.process));
        self.thread == self.process && tasks.is_ok_and(|stat| stat.st_nlink == 3)
    }

    /// Exactly these parts of its memory.
    pub fn read_parts(&self, parts: &[(u64, usize)]) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; parts.iter().map(|(_, len)| len).sum()];
        if bytes.is_empty() {
            return Ok(bytes);
        }
        match sys::read_memory_parts(self.thread, parts, &mut bytes) {
            Ok(n) if n == bytes.len() => Ok(bytes),
            _ => Err(errno(libc::EFAULT)),
        }
    }

    pub fn read<const N: usize>(&self, address: u64) -> io::Result<[u8; N]> {
        let bytes = self.read_parts(&[(address, N)])?;
        bytes.try_into().map_err(|_| errno(libc::EFAULT))
    }

    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        sys::write_memory(self.thread, address, bytes).map_err(|_| errno(libc::EFAULT))
    }
}

pub fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// What the program is told when a path led nowhere. That a magic link was met would say which descriptors we have open.
pub fn not_found(error: rustix::io::Errno) -> io::Error {
    match error {
        rustix::io::Errno::LOOP => errno(libc::ENOENT),
        other => other.into(),
    }
}
