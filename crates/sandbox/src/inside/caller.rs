//! The thread that made a call which seccomp handed over. The broker copies memory and descriptors from it.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::sys::procfs::thread_group;
use crate::sys::{self, Notification};

/// The thread that made a call, held by a pidfd of its process.
pub struct CallingThread {
    pub thread: u32,
    pub process: u32,
    pidfd: OwnedFd,
}

impl CallingThread {
    pub fn of(call: &Notification) -> io::Result<CallingThread> {
        let open = |pid: u32| {
            let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
            let number = number.ok_or_else(|| errno(libc::ESRCH))?;
            rustix::process::pidfd_open(number, PidfdFlags::empty()).map_err(|_| errno(libc::ESRCH))
        };
        // The notification names a thread, and descriptors belong to its process. pidfd_open accepts only the first
        // thread of a process, so if it succeeds the thread is its process, and no lookup is needed.
        if let Ok(pidfd) = open(call.pid) {
            return Ok(CallingThread {
                thread: call.pid,
                process: call.pid,
                pidfd,
            });
        }
        let process = thread_group(call.pid)? as u32;
        Ok(CallingThread {
            thread: call.pid,
            process,
            pidfd: open(process)?,
        })
    }

    /// Copies one of the caller's descriptors. All threads of a process share their descriptors, because seccomp
    /// refuses to make a thread that does not.
    pub fn descriptor(&self, number: u64) -> io::Result<OwnedFd> {
        let number = number as i32;
        // rustix panics on a negative descriptor.
        if number < 0 {
            return Err(errno(libc::EBADF));
        }
        rustix::process::pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty())
            .map_err(|_| errno(libc::EBADF))
    }

    /// Whether the process has only this thread, which waits for the answer to its call. Then nothing can change the
    /// process's descriptors meanwhile: seccomp refuses to share them with another process.
    pub fn is_alone(&self) -> bool {
        // The link count of /proc/PID/task is two, as for every directory, plus one for each thread.
        let tasks = rustix::fs::stat(format!("/proc/{}/task", self.process));
        self.thread == self.process && tasks.is_ok_and(|stat| stat.st_nlink == 3)
    }

    /// Reads these parts of the caller's memory, completely or not at all.
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

/// Opens the working directory of a thread or process, for a lookup.
pub fn open_working_directory(pid: u32) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    Ok(sys::open(format!("/proc/{pid}/cwd"), flags)?)
}

/// Converts an error of a path lookup for the program. ELOOP becomes ENOENT: it would reveal which descriptors this
/// process has open, because openat2 returns it for a magic link.
pub fn not_found(error: rustix::io::Errno) -> io::Error {
    match error {
        rustix::io::Errno::LOOP => errno(libc::ENOENT),
        other => other.into(),
    }
}
