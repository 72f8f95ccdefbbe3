//! Files of /proc, read with a bound, and processes found and held by their number.

use std::io::{self, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// The files of /proc that are a few lines long.
pub const SMALL_FILE_BYTES: usize = 16 << 10;

/// A file of /proc, and no more of it than was asked for: the program has a hand in how long some of them are.
pub fn read(path: impl AsRef<Path>, bytes_max: usize) -> Option<String> {
    // They have no size; with room for most, one call reads the whole and another tells that it is.
    let mut bytes = Vec::with_capacity(bytes_max.min(4096));
    let file = std::fs::File::open(path).ok()?;
    file.take(bytes_max as u64).read_to_end(&mut bytes).ok()?;
    // A cut may go through a character.
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The processes of a user, by real uid.
pub fn pids_of_user(uid: u32) -> Vec<u32> {
    let is_of = |pid: &u32| {
        let status = read(format!("/proc/{pid}/status"), SMALL_FILE_BYTES).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u32>().ok()) == Some(uid)
    };
    numbers_in(Path::new("/proc")).filter(is_of).collect()
}

/// The threads of a user's processes: what RLIMIT_NPROC counts.
pub fn threads_of_user(uid: u32) -> u64 {
    pids_of_user(uid)
        .into_iter()
        .map(|pid| threads(pid).count() as u64)
        .sum()
}

/// The entries of a directory of /proc whose names are numbers.
pub fn numbers_in(dir: &Path) -> impl Iterator<Item = u32> + use<> {
    std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// The numbers of a process's threads.
pub fn threads(pid: u32) -> impl Iterator<Item = u32> {
    numbers_in(Path::new(&format!("/proc/{pid}/task")))
}

/// Holds whichever process has this number now.
pub fn open_pidfd(pid: u32) -> Option<OwnedFd> {
    let number = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
    rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty()).ok()
}

/// The process that a thread belongs to.
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
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = match proc {
        Some(proc) => rustix::fs::openat(proc, name, flags, Mode::empty())?,
        None => rustix::fs::open(format!("/proc/{name}"), flags, Mode::empty())?,
    };
    // A map must be written in one call.
    match rustix::io::write(&file, text.as_bytes())? {
        n if n == text.len() => Ok(()),
        _ => Err(io::Error::other("short write")),
    }
}
