//! Reads files of /proc with a bound, and finds and opens processes by pid.

use std::io::{self, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::str::FromStr;

use rustix::fs::OFlags;

use super::descriptors::{open, open_at};

/// A bound for the files of /proc that are a few lines long.
pub const SMALL_FILE_BYTES: usize = 16 << 10;

/// Reads at most `bytes_max` bytes of a file of /proc. The bound matters: the program controls how long some files
/// are.
pub fn read(path: impl AsRef<Path>, bytes_max: usize) -> Option<String> {
    // Files of /proc report no size. With room for a typical file, one read fetches it and a second finds its end.
    let mut bytes = Vec::with_capacity(bytes_max.min(4096));
    let file = std::fs::File::open(path).ok()?;
    file.take(bytes_max as u64).read_to_end(&mut bytes).ok()?;
    // The bound may cut through a character.
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The fields of /proc/PID/stat, or of /proc/PID/task/TID/stat, after the name.
pub struct ProcessStat(String);

impl ProcessStat {
    /// Reads the fields from the `stat` in this directory.
    pub fn read(dir: impl AsRef<Path>) -> Option<ProcessStat> {
        let text = read(dir.as_ref().join("stat"), SMALL_FILE_BYTES)?;
        // The name in parentheses may contain anything, so search for the last parenthesis.
        Some(ProcessStat(text.rsplit_once(')')?.1.to_owned()))
    }

    pub fn of(pid: u32) -> Option<ProcessStat> {
        ProcessStat::read(format!("/proc/{pid}"))
    }

    /// The n-th field, where the state is field 0.
    pub fn number<T: FromStr>(&self, n: usize) -> Option<T> {
        self.0.split_ascii_whitespace().nth(n)?.parse().ok()
    }

    /// Running, sleeping, stopped and so on, by the kernel's letter.
    pub fn state(&self) -> Option<char> {
        self.0.trim_start().chars().next()
    }
}

/// Returns the pids of a user's processes, by real uid.
pub fn pids_of_user(uid: u32) -> Vec<u32> {
    let is_of_user = |pid: &u32| {
        let status = read(format!("/proc/{pid}/status"), SMALL_FILE_BYTES).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u32>().ok()) == Some(uid)
    };
    numbers_in(Path::new("/proc")).filter(is_of_user).collect()
}

/// Counts the threads of a user's processes, as RLIMIT_NPROC does.
pub fn threads_of_user(uid: u32) -> u64 {
    pids_of_user(uid)
        .into_iter()
        .map(|pid| threads(pid).count() as u64)
        .sum()
}

/// Returns the entries of a directory of /proc whose names are numbers.
pub fn numbers_in(dir: &Path) -> impl Iterator<Item = u32> + use<> {
    std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// Returns the ids of a process's threads.
pub fn threads(pid: u32) -> impl Iterator<Item = u32> {
    numbers_in(Path::new(&format!("/proc/{pid}/task")))
}

/// Opens a pidfd for the process that has this pid now.
pub fn open_pidfd(pid: u32) -> Option<OwnedFd> {
    let number = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
    rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty()).ok()
}

/// Returns the pid of the process that a thread belongs to.
pub fn thread_group(thread: u32) -> io::Result<i32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"))?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("Tgid:"))
        .and_then(|n| n.trim().parse().ok())
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}

/// Writes a file below `proc`, or below /proc, in one call.
pub fn write(proc: Option<BorrowedFd<'_>>, name: &str, text: &str) -> io::Result<()> {
    let file = match proc {
        Some(proc) => open_at(proc, name, OFlags::WRONLY)?,
        None => open(format!("/proc/{name}"), OFlags::WRONLY)?,
    };
    // The kernel accepts a uid or gid map only in a single write.
    match rustix::io::write(&file, text.as_bytes())? {
        n if n == text.len() => Ok(()),
        _ => Err(io::Error::other("short write")),
    }
}
