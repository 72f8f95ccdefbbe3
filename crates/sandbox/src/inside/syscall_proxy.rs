//! Level `landlock`: changes modes, times and lengths of files, and sends signals, on the program's behalf.
//!
//! Landlock does not control modes and times, truncation only from ABI 3, and signals only from ABI 6. seccomp cannot
//! see which file or process a call means. So the filter hands these calls to the guardian. The guardian opens the
//! object, checks that it belongs to the run (a file below the workspace, or a descendant of the guardian), and acts on
//! the descriptor it holds. It reads nothing of the program's memory twice, and never lets the kernel continue a call.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW};

use super::caller::{errno, not_found, open_working_directory};
use super::processes;
use crate::confine::seccomp::number;
use crate::spec::Spec;
use crate::sys::procfs::thread_group;
use crate::sys::{self, Notification};

const PATH_BYTES_MAX: usize = 4096;
const SIGNAL_MAX: i32 = 64;

/// Serves calls that change files.
pub struct SyscallProxy {
    workspace: PathBuf,
    uid: u32,
    /// The longest file that truncate may make. The program's RLIMIT_FSIZE does not apply to the guardian.
    length_max: u64,
}

/// Which file a call means.
enum CallTarget {
    /// A path in the caller's memory at address `at`, relative to one of its directory descriptors or to its working
    /// directory.
    Path {
        from: i32,
        at: u64,
        links: SymlinkMode,
        empty: EmptyPath,
    },
    /// A descriptor of the caller.
    Descriptor(i32),
}

/// What an empty path means.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EmptyPath {
    /// ENOENT.
    Missing,
    /// AT_EMPTY_PATH: the directory descriptor itself.
    Base,
}

/// Whether a symbolic link at the end of a path is followed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SymlinkMode {
    Follow,
    NoFollow,
}

/// How a call changes its file.
enum FileChange {
    Mode(u32),
    Times(Timestamps),
    Length(u64),
}

impl SyscallProxy {
    pub fn new(spec: &Spec) -> SyscallProxy {
        SyscallProxy {
            workspace: spec.workspace.to_path_buf(),
            uid: spec.identity.uid(),
            length_max: spec.limits.disk_bytes,
        }
    }

    /// Makes the change, if the file belongs to the run. `still_waits` fails if the caller is gone.
    pub fn perform(
        &self,
        call: &Notification,
        still_waits: impl Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        let (target, change) = read_call(call)?;
        let object = open_target(call.pid, &target)?;
        still_waits()?;
        self.check_own(&object, &change)?;
        apply_change(&object, &change, self.length_max)
    }

    /// Fails unless the file is below the workspace and has the program's uid. The kernel says where the opened file
    /// is. A file in the workspace cannot be moved out, nor can another be moved or linked in, because Landlock lets
    /// the program write nowhere else.
    fn check_own(&self, object: &OwnedFd, change: &FileChange) -> io::Result<()> {
        let path = std::fs::read_link(proc_fd_path(object))?;
        let is_top = path == self.workspace;
        let below = path.starts_with(&self.workspace);
        // The mode of the workspace itself must keep other users out.
        let allowed = below && !(is_top && matches!(change, FileChange::Mode(_)));
        let stat = rustix::fs::fstat(object)?;
        match allowed && stat.st_uid == self.uid {
            true => Ok(()),
            false => Err(errno(libc::EPERM)),
        }
    }
}

fn proc_fd_path(object: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", object.as_raw_fd()))
}

/// Reads which file a call means and how to change it. Everything behind a pointer, except the path, is copied here,
/// once.
fn read_call(call: &Notification) -> io::Result<(CallTarget, FileChange)> {
    let arg = |n: usize| call.args[n];
    let number = |n: usize| call.args[n] as u32 as i32;
    let path = |from: i32, n: usize, flags: i32| CallTarget::Path {
        from,
        at: call.args[n],
        links: match flags & libc::AT_SYMLINK_NOFOLLOW {
            0 => SymlinkMode::Follow,
            _ => SymlinkMode::NoFollow,
        },
        empty: match flags & libc::AT_EMPTY_PATH {
            0 => EmptyPath::Missing,
            _ => EmptyPath::Base,
        },
    };
    let mode = |n: usize| FileChange::Mode(call.args[n] as u32);
    let times = |n: usize, format: TimeFormat| {
        Ok::<_, io::Error>(FileChange::Times(read_times(call, n, format)?))
    };
    Ok(match call.call {
        libc::SYS_fchmod => (CallTarget::Descriptor(number(0)), mode(1)),
        libc::SYS_fchmodat => (path(number(0), 1, 0), mode(2)),
        number::FCHMODAT2 => (path(number(0), 1, number(3)), mode(2)),
        // Without a path the call means the descriptor's own file.
        libc::SYS_utimensat if arg(1) == 0 => (
            CallTarget::Descriptor(number(0)),
            times(2, TimeFormat::Nanoseconds)?,
        ),
        libc::SYS_utimensat => {
            let target = path(number(0), 1, number(3));
            (target, times(2, TimeFormat::Nanoseconds)?)
        }
        libc::SYS_truncate => {
            let length = u64::try_from(arg(1) as i64).map_err(|_| errno(libc::EINVAL))?;
            (path(libc::AT_FDCWD, 0, 0), FileChange::Length(length))
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_chmod => (path(libc::AT_FDCWD, 0, 0), mode(1)),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_utime => {
            let target = path(libc::AT_FDCWD, 0, 0);
            (target, times(1, TimeFormat::Seconds)?)
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_utimes => {
            let target = path(libc::AT_FDCWD, 0, 0);
            (target, times(1, TimeFormat::Microseconds)?)
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_futimesat if arg(1) == 0 => (
            CallTarget::Descriptor(number(0)),
            times(2, TimeFormat::Microseconds)?,
        ),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_futimesat => {
            let target = path(number(0), 1, 0);
            (target, times(2, TimeFormat::Microseconds)?)
        }
        _ => return Err(errno(libc::ENOSYS)),
    })
}

/// The format of the two times in a call.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
enum TimeFormat {
    Nanoseconds,
    Microseconds,
    Seconds,
}

fn read_times(call: &Notification, arg: usize, format: TimeFormat) -> io::Result<Timestamps> {
    let address = call.args[arg];
    let time = |tv_sec: i64, nanoseconds: i64| Timespec {
        tv_sec,
        tv_nsec: nanoseconds as _,
    };
    if address == 0 {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        return Ok(Timestamps {
            last_access: now,
            last_modification: now,
        });
    }
    let length = match format {
        TimeFormat::Nanoseconds | TimeFormat::Microseconds => 32,
        TimeFormat::Seconds => 16,
    };
    let mut bytes = [0u8; 32];
    read_exactly(call.pid, address, &mut bytes[..length])?;
    let words = bytes.as_chunks::<8>().0;
    let word = |n: usize| i64::from_ne_bytes(words[n]);
    let from_us = |us: i64| match (0..1_000_000).contains(&us) {
        true => Ok(us * 1000),
        false => Err(errno(libc::EINVAL)),
    };
    let (last_access, last_modification) = match format {
        TimeFormat::Nanoseconds => (time(word(0), word(1)), time(word(2), word(3))),
        TimeFormat::Microseconds => (
            time(word(0), from_us(word(1))?),
            time(word(2), from_us(word(3))?),
        ),
        TimeFormat::Seconds => (time(word(0), 0), time(word(1), 0)),
    };
    Ok(Timestamps {
        last_access,
        last_modification,
    })
}

fn read_exactly(pid: u32, address: u64, into: &mut [u8]) -> io::Result<()> {
    match sys::read_memory(pid, address, into) {
        Ok(n) if n == into.len() => Ok(()),
        _ => Err(errno(libc::EFAULT)),
    }
}

/// Reads a path that ends at a zero byte. Reads page by page, because the memory after the path may not be mapped.
fn read_path(pid: u32, address: u64) -> io::Result<PathBuf> {
    const PAGE: u64 = 4096;
    let mut path = Vec::new();
    while path.len() < PATH_BYTES_MAX {
        let at = address
            .checked_add(path.len() as u64)
            .ok_or_else(|| errno(libc::EFAULT))?;
        let rest_of_page = (PAGE - at % PAGE) as usize;
        let mut piece = vec![0u8; rest_of_page.min(PATH_BYTES_MAX - path.len())];
        read_exactly(pid, at, &mut piece)?;
        match piece.iter().position(|byte| *byte == 0) {
            Some(end) => {
                path.extend_from_slice(&piece[..end]);
                return Ok(PathBuf::from(OsStr::from_bytes(&path)));
            }
            None => path.extend_from_slice(&piece),
        }
    }
    Err(errno(libc::ENAMETOOLONG))
}

/// The number of the caller's descriptor that a path names through /proc or /dev/fd. Before Linux 6.6 the C library
/// used such a path to emulate fchmodat without following links.
fn descriptor_named(path: &Path) -> Option<i32> {
    let text = path.to_str()?;
    let dirs = ["/proc/self/fd/", "/proc/thread-self/fd/", "/dev/fd/"];
    let number = dirs.iter().find_map(|dir| text.strip_prefix(dir))?;
    let plain = number.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| number.parse().ok()).flatten()
}

/// Opens the file that a call means, with O_PATH, which gives no access to its content.
fn open_target(pid: u32, target: &CallTarget) -> io::Result<OwnedFd> {
    let open_descriptor = |n: i32| {
        let path = format!("/proc/{pid}/fd/{n}");
        sys::open(path, OFlags::PATH).map_err(|_| errno(libc::EBADF))
    };
    let (from, at, links, empty) = match target {
        CallTarget::Descriptor(n) => return open_descriptor(*n),
        CallTarget::Path {
            from,
            at,
            links,
            empty,
        } => (*from, *at, *links, *empty),
    };
    let mut path = read_path(pid, at)?;
    if let (Some(n), SymlinkMode::Follow) = (descriptor_named(&path), links) {
        return open_descriptor(n);
    }
    if path.as_os_str().is_empty() {
        match (empty, from) {
            (EmptyPath::Missing, _) => return Err(errno(libc::ENOENT)),
            (EmptyPath::Base, libc::AT_FDCWD) => path.push("."),
            (EmptyPath::Base, n) => return open_descriptor(n),
        }
    }
    let base = match from {
        _ if path.is_absolute() => None,
        libc::AT_FDCWD => Some(open_working_directory(pid)?),
        n => Some(open_descriptor(n)?),
    };
    let base = base.as_ref().map_or(rustix::fs::CWD, |fd| fd.as_fd());
    let flags = match links {
        SymlinkMode::Follow => OFlags::PATH,
        SymlinkMode::NoFollow => OFlags::PATH | OFlags::NOFOLLOW,
    };
    sys::open_for_program(base, &path, flags).map_err(not_found)
}

fn apply_change(object: &OwnedFd, change: &FileChange, length_max: u64) -> io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(object)?.st_mode);
    match change {
        FileChange::Mode(_) if kind == FileType::Symlink => Err(errno(libc::EOPNOTSUPP)),
        FileChange::Mode(mode) => Ok(rustix::fs::chmod(
            proc_fd_path(object),
            Mode::from_raw_mode(mode & 0o1777),
        )?),
        FileChange::Times(times) => {
            let empty = Path::new("");
            Ok(rustix::fs::utimensat(
                object,
                empty,
                times,
                AtFlags::EMPTY_PATH,
            )?)
        }
        FileChange::Length(length) if *length > length_max => Err(errno(libc::EFBIG)),
        FileChange::Length(_) if kind == FileType::Directory => Err(errno(libc::EISDIR)),
        FileChange::Length(_) if kind != FileType::RegularFile => Err(errno(libc::EINVAL)),
        FileChange::Length(length) => {
            let file = sys::open(proc_fd_path(object), OFlags::WRONLY | OFlags::NOCTTY)?;
            Ok(rustix::fs::ftruncate(&file, *length)?)
        }
    }
}

/// Whether a call sends a signal.
pub fn is_signal(call: &Notification) -> bool {
    matches!(
        call.call,
        libc::SYS_kill | libc::SYS_tkill | libc::SYS_tgkill
    )
}

/// Sends the signal of a call, but only to descendants of this process. `still_waits` fails if the caller is gone.
pub fn signal(call: &Notification, still_waits: impl Fn() -> io::Result<()>) -> io::Result<()> {
    let arg = |n: usize| call.args[n] as u32 as i32;
    still_waits()?;
    if call.call == libc::SYS_kill {
        return signal_processes(call.pid, arg(0), check_signal(arg(1))?);
    }
    let (process, thread, signal) = match call.call {
        libc::SYS_tkill if arg(0) <= 0 => return Err(errno(libc::EINVAL)),
        libc::SYS_tkill => {
            let group = thread_group(arg(0) as u32).map_err(|_| errno(libc::ESRCH))?;
            (group, arg(0), arg(1))
        }
        _ => (arg(0), arg(1), arg(2)),
    };
    let signal = check_signal(signal)?;
    if process <= 0 || thread <= 0 {
        return Err(errno(libc::EINVAL));
    }
    // Hold the process while the signal is sent, so that its pid cannot be reused.
    let _pidfd = processes::open_descendant(process as u32).ok_or_else(|| errno(libc::ESRCH))?;
    sys::signal_thread(process, thread, signal)
}

fn check_signal(signal: i32) -> io::Result<i32> {
    match (0..=SIGNAL_MAX).contains(&signal) {
        true => Ok(signal),
        false => Err(errno(libc::EINVAL)),
    }
}

/// Sends a signal to `target`, which means what the first argument of kill(2) means.
fn signal_processes(caller: u32, target: i32, signal: i32) -> io::Result<()> {
    let no_such_process = || errno(libc::ESRCH);
    let leader = thread_group(caller).map_err(|_| no_such_process())? as u32;
    let group_of = |pid: u32| processes::relations(pid).map(|of| of.group);
    let is_target: Box<dyn Fn(u32) -> bool> = match target {
        i32::MIN => return Err(no_such_process()),
        -1 => Box::new(|pid| pid != leader),
        0 => {
            let own = group_of(leader).ok_or_else(no_such_process)?;
            Box::new(move |pid| group_of(pid) == Some(own))
        }
        group if group < 0 => Box::new(move |pid| group_of(pid) == Some(group.unsigned_abs())),
        pid => {
            let pidfd = processes::open_descendant(pid as u32).ok_or_else(no_such_process)?;
            return sys::signal_pidfd(pidfd.as_fd(), signal);
        }
    };
    // As in kill(2), the call succeeds if one process was reached.
    let mut result = Err(no_such_process());
    for (pid, pidfd) in processes::open_descendants() {
        if is_target(pid) {
            let sent = sys::signal_pidfd(pidfd.as_fd(), signal);
            result = result.or(sent);
        }
    }
    result
}
