//! Every raw system call; the one file where `unsafe` is allowed.
//!
//! Only what std and rustix lack is here, each wrapped thinly.

#![allow(unsafe_code)]

mod battery;
mod memory;
mod notification;
mod sockets;

#[cfg(target_arch = "x86_64")]
pub use battery::getpid_i386;
pub use battery::{Arg, Call, attempt, fill_page_tables};
pub use memory::{
    forget_beginnings, has_loader_settings, let_go_of_code, share_one_heap, written_by_reaped,
};
pub use notification::answer_with_descriptor;

pub use sockets::{
    Answer, PARTS_MAX, RawMessage, notification_answer_with, numbers_shared_with_children,
    read_memory_parts, send_message, write_memory,
};

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::seccomp::Instruction;

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// Which side of a fork this is.
pub enum Forked {
    Parent { child: i32 },
    Child,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Namespace {
    Ours,
    New,
}

/// Whose child the new process is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Parentage {
    Own,
    /// The caller's own parent becomes the parent: the launcher makes pid 1 the runner's child.
    Sibling,
    /// The caller's, and the first process of a pid namespace, which belongs to this user namespace.
    First {
        user: Namespace,
    },
}

/// Forks a single-threaded process.
///
/// # Errors
/// Refuses when a second thread exists: a forked child of a threaded process may find any lock held.
pub fn fork(parentage: Parentage) -> io::Result<Forked> {
    assert_single_threaded()?;
    let mut args = [0u64; 11];
    let flags = match parentage {
        Parentage::Own => 0,
        Parentage::Sibling => libc::CLONE_PARENT as u64,
        Parentage::First { user } => {
            let user = match user {
                Namespace::Ours => 0,
                Namespace::New => libc::CLONE_NEWUSER,
            };
            (libc::CLONE_NEWPID | user) as u64
        }
    };
    args[0] = flags;
    // The kernel wants no exit signal of its own together with CLONE_PARENT: it is inherited.
    args[4] = match parentage {
        Parentage::Own | Parentage::First { .. } => libc::SIGCHLD as u64,
        Parentage::Sibling => 0,
    };
    // SAFETY: clone3 with no stack and no CLONE_VM behaves like fork; `args` outlives the call and its
    // size is passed with it. The process has one thread, checked above, so no lock can be held by another.
    let pid = match check(unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), 64usize) }) {
        // Container runtimes answer so, because a filter cannot look into clone3's flags.
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => {
            let flags = flags | libc::SIGCHLD as u64;
            // SAFETY: as above; with all other arguments zero their order, which differs between
            // architectures, does not matter.
            check(unsafe { libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, 0usize, 0usize) })?
        }
        other => other?,
    };
    Ok(match pid {
        0 => Forked::Child,
        child => Forked::Parent {
            child: child as i32,
        },
    })
}

/// Forks a process that may have threads, by way of the C library, which sees to its own locks: the child may
/// allocate, and leaves by [`exit_now`].
pub fn fork_threaded() -> io::Result<Forked> {
    // SAFETY: the child runs only code of ours that takes no lock another thread could have held at this moment,
    // save the allocator's, which the C library's fork hands over in a good state.
    let pid = check(unsafe { libc::fork() } as libc::c_long)?;
    Ok(match pid {
        0 => Forked::Child,
        child => Forked::Parent {
            child: child as i32,
        },
    })
}

fn assert_single_threaded() -> io::Result<()> {
    // Linux counts one link for each thread, beside the two of every directory.
    if rustix::fs::stat("/proc/self/task").is_ok_and(|stat| stat.st_nlink == 3) {
        return Ok(());
    }
    let threads = std::fs::read_dir("/proc/self/task").map(|tasks| tasks.count());
    match threads {
        Ok(1) => Ok(()),
        // After pivot_root the old /proc may be gone; this process was single-threaded from birth.
        Err(_) => Ok(()),
        Ok(_) => Err(io::Error::other("fork from a process with several threads")),
    }
}

/// Leaves without running destructors or exit handlers: a forked child shares its parent's state.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(code) }
}

/// `unshare(2)` with raw flags.
pub fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: callers are single-threaded and never pass CLONE_FILES or CLONE_VM, so no invariant of
    // std about shared tables changes.
    check(unsafe { libc::unshare(flags) } as libc::c_long).map(drop)
}

#[repr(C)]
#[derive(Default)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

pub const MOUNT_ATTR_RDONLY: u64 = 0x1;
pub const MOUNT_ATTR_NOSUID: u64 = 0x2;
pub const MOUNT_ATTR_NODEV: u64 = 0x4;
pub const MOUNT_ATTR_NOEXEC: u64 = 0x8;
const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
const AT_RECURSIVE: libc::c_int = 0x8000;

fn mount_setattr(mount: BorrowedFd<'_>, attr: &MountAttr, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: the path is a NUL-terminated constant, `attr` has the kernel's layout and its size is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | flags,
            std::ptr::from_ref(attr),
            size_of::<MountAttr>(),
        )
    })
    .map(drop)
}

/// Sets attributes on a mount and everything mounted below it, and makes all of it private.
pub fn mount_restrict(mount: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    let attr = MountAttr {
        attr_set: attributes,
        propagation: libc::MS_PRIVATE,
        ..MountAttr::default()
    };
    mount_setattr(mount, &attr, AT_RECURSIVE)
}

/// Shows a detached mount's files with owners mapped by a user namespace.
pub fn mount_idmap(mount: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
    let attr = MountAttr {
        attr_set: MOUNT_ATTR_IDMAP,
        userns_fd: user_namespace.as_raw_fd() as u64,
        ..MountAttr::default()
    };
    mount_setattr(mount, &attr, AT_RECURSIVE)
}

/// Replaces this process's image. Returns only on failure.
pub fn execve(program: &CStr, argv: &[CString], env: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        list.iter()
            .map(|s| s.as_ptr())
            .chain([std::ptr::null()])
            .collect()
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: both arrays are NULL-terminated, their strings are NUL-terminated, and all outlive the call.
    unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Sends a signal to every process this one may signal, itself excepted; in a pid namespace, to all in it.
pub fn kill_everyone(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: kill has no memory preconditions.
    check(unsafe { libc::kill(-1, signal) } as libc::c_long).map(drop)
}

/// Blocks the given signals (all, if `None`) and returns nothing: children reset the mask themselves.
pub fn block_signals(signals: Option<&[libc::c_int]>) -> io::Result<()> {
    set_mask(libc::SIG_BLOCK, &signal_set(signals))
}

/// Unblocks every signal and sets every disposition to its default.
pub fn reset_signals() -> io::Result<()> {
    // Handlers need no call: execve resets those.
    let ignored = IGNORED_SIGNALS.load(Ordering::Relaxed);
    // The kernel's struct sigaction with every field zero: the default. Larger than it is anywhere.
    let default = [0u64; 8];
    for signal in (1..=64).filter(|signal| ignored >> (signal - 1) & 1 == 1) {
        // SAFETY: the kernel reads one struct sigaction from `default`, which outlives the call, and writes nothing. Not by
        // way of the C library, which refuses the two signals that it keeps for itself. A signal that cannot be ignored is
        // refused, and needs nothing.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, &default, 0usize, 8usize);
        }
    }
    set_mask(libc::SIG_SETMASK, &signal_set(Some(&[])))
}

/// Signals that this process ignores, bit by bit; all of them until [`note_ignored_signals`] has looked.
static IGNORED_SIGNALS: AtomicU64 = AtomicU64::new(u64::MAX);

/// Reads which signals are ignored, for [`reset_signals`] in a process that is forked from this one: one file, where
/// asking for each signal would take sixty calls. If the file does not tell, all are reset.
pub fn note_ignored_signals() {
    let status = crate::processes::read("/proc/self/status", 16 << 10).unwrap_or_default();
    let mask = status.split_once("\nSigIgn:\t").map(|(_, rest)| rest);
    let mask = mask.and_then(|rest| u64::from_str_radix(rest.get(..16)?, 16).ok());
    IGNORED_SIGNALS.store(mask.unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Whoever started us may have ignored it, and then no child's end could be waited for.
pub fn hear_of_children() {
    // SAFETY: SIG_DFL is a valid disposition for SIGCHLD.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

fn signal_set(signals: Option<&[libc::c_int]>) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the whole set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised by the line above.
    let mut set = unsafe { set.assume_init() };
    match signals {
        None => {
            // SAFETY: `set` is a valid set.
            unsafe { libc::sigfillset(&mut set) };
        }
        Some(list) => {
            for signal in list {
                // SAFETY: `set` is a valid set; an invalid number is refused by the call.
                unsafe { libc::sigaddset(&mut set, *signal) };
            }
        }
    }
    set
}

fn set_mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `set` is valid and the old mask is not asked for.
    check(unsafe { libc::sigprocmask(how, set, std::ptr::null_mut()) } as libc::c_long).map(drop)
}

/// A descriptor that becomes readable when one of the (blocked) signals is pending.
pub fn signal_fd(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    let set = signal_set(Some(signals));
    // SAFETY: `set` is valid; -1 asks for a new descriptor.
    let fd = check(
        unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) } as libc::c_long,
    )?;
    Ok(own(fd))
}

/// Takes one pending signal off a signal descriptor.
pub fn read_signal(fd: BorrowedFd<'_>) -> Option<i32> {
    let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
    match rustix::io::read(fd, &mut info) {
        Ok(n) if n == info.len() => Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]])),
        _ => None,
    }
}

fn own(fd: libc::c_long) -> OwnedFd {
    // SAFETY: every caller passes a descriptor that the kernel has just made and nobody else holds.
    unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
}

/// Sets the uid that file systems see; away from 0 it takes the file capabilities along, and back to 0 returns them.
pub fn set_fs_uid(uid: u32) {
    // SAFETY: setfsuid has no memory preconditions; it cannot fail for root, and its answer is the old value.
    unsafe { libc::syscall(libc::SYS_setfsuid, uid) };
}

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

/// Brings the loopback interface of this network namespace up.
pub fn loopback_up() -> io::Result<()> {
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
    // SAFETY: SIOCSIFFLAGS reads a struct ifreq, 40 bytes on 64-bit Linux: 16 of name, then the flags.
    let result = unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as _,
            request.as_ptr(),
        )
    };
    check(result as libc::c_long).map(drop)
}

/// Makes an open terminal the controlling terminal of this session.
pub fn make_controlling_terminal(terminal: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: TIOCSCTTY takes an int by value.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) } as libc::c_long)
        .map(drop)
}

/// Leaves the caller's session keyring for a fresh, empty one.
pub fn new_session_keyring() -> io::Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: a null name asks for an anonymous keyring.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0) };
    match check(result) {
        // A kernel built without keyrings has none to leave.
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        other => other.map(drop),
    }
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
pub fn place(fd: BorrowedFd<'_>, number: RawFd) -> io::Result<()> {
    if fd.as_raw_fd() == number {
        // dup2 onto itself would leave close-on-exec set.
        return rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).map_err(Into::into);
    }
    // SAFETY: callers own 0, 1 and 2 in the forked child and hold no Rust object for them.
    check(unsafe { libc::dup2(fd.as_raw_fd(), number) } as libc::c_long).map(drop)
}

/// The Landlock ABI of this kernel; 0 where there is none. Asked for once; forked processes inherit the answer.
pub fn landlock_abi() -> i32 {
    static ABI: OnceLock<i32> = OnceLock::new();
    *ABI.get_or_init(|| landlock_version().unwrap_or(0))
}

/// The Landlock ABI of this kernel. ENOSYS: it was built without; EOPNOTSUPP: it was started without.
pub fn landlock_version() -> io::Result<i32> {
    const LANDLOCK_CREATE_RULESET_VERSION: libc::c_long = 1;
    // SAFETY: a null attribute of size 0 with this flag only asks for the version.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            0usize,
            0usize,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    };
    check(version).map(|version| version as i32)
}

/// Whether a filter hands some calls to a supervisor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    None,
    New,
}

/// Installs a seccomp filter on this process; with [`Listener::New`] returns the notification descriptor.
pub fn seccomp_install(program: &[Instruction], listener: Listener) -> io::Result<Option<OwnedFd>> {
    #[repr(C)]
    struct Filter {
        len: u16,
        instructions: *const Instruction,
    }
    let filter = Filter {
        len: u16::try_from(program.len())
            .map_err(|_| io::Error::other("seccomp program too long"))?,
        instructions: program.as_ptr(),
    };
    let attempt = |flags: libc::c_ulong| {
        // SAFETY: `filter` has the layout of sock_fprog, points to `len` instructions, and outlives the call.
        check(unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                std::ptr::from_ref(&filter),
            )
        })
    };
    if listener == Listener::None {
        return attempt(0).map(|_| None);
    }
    // Killable wait: once the broker has a call in hand, an ordinary signal no longer restarts it
    // half done. Linux before 5.19 does not know the flag.
    const NEW_LISTENER: libc::c_ulong = 8;
    const WAIT_KILLABLE_RECV: libc::c_ulong = 32;
    match attempt(NEW_LISTENER | WAIT_KILLABLE_RECV) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => attempt(NEW_LISTENER),
        other => other,
    }
    .map(|fd| Some(own(fd)))
}

/// A system call that a filter handed over, as the kernel describes it.
#[derive(Clone, Copy, Debug)]
pub struct Notification {
    pub id: u64,
    pub pid: u32,
    /// The system call's number.
    pub call: libc::c_long,
    pub args: [u64; 6],
}

/// Receives one notification.
pub fn notification_receive(listener: BorrowedFd<'_>) -> io::Result<Notification> {
    // SAFETY: an all-zero seccomp_notif is what the kernel demands as input.
    let mut raw: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    const SECCOMP_IOCTL_NOTIF_RECV: u64 = 0xc050_2100;
    // SAFETY: the ioctl fills the 80-byte struct it is given.
    let result = unsafe {
        libc::ioctl(
            listener.as_raw_fd(),
            SECCOMP_IOCTL_NOTIF_RECV as _,
            &mut raw,
        )
    };
    check(result as libc::c_long)?;
    Ok(Notification {
        id: raw.id,
        pid: raw.pid,
        call: libc::c_long::from(raw.data.nr),
        args: raw.data.args,
    })
}

/// Whether the process that made the call still waits for its answer: its pid has not been reused.
pub fn notification_valid(listener: BorrowedFd<'_>, id: u64) -> io::Result<()> {
    const SECCOMP_IOCTL_NOTIF_ID_VALID: u64 = 0x4008_2102;
    // SAFETY: the ioctl reads the 64-bit id.
    let result =
        unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_ID_VALID as _, &id) };
    check(result as libc::c_long).map(drop)
}

/// Answers a notification: success with 0, or an errno.
pub fn notification_answer(listener: BorrowedFd<'_>, id: u64, errno: i32) -> io::Result<()> {
    let answer = match errno {
        0 => Answer::Value(0),
        errno => Answer::Errno(errno),
    };
    notification_answer_with(listener, id, answer)
}

/// Copies up to `into.len()` bytes out of another process's memory.
pub fn read_memory(pid: u32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    let all = into.len();
    read_memory_parts(pid, &[(address, all)], into)
}

/// Sends any signal, also none (0) and the real-time ones, to a held process.
pub fn signal_held(process: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: without an info structure the kernel makes up that of kill(2).
    check(unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            signal,
            0usize,
            0u32,
        )
    })
    .map(drop)
}

/// Sends a signal to one thread of a process.
pub fn signal_thread(process: i32, thread: i32, signal: i32) -> io::Result<()> {
    // SAFETY: tgkill takes three numbers and touches no memory of ours.
    check(unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) }).map(drop)
}

/// Whether two processes are one in memory, as between vfork and exec. An error where we may not look, or not compare.
pub fn share_memory(one: u32, other: u32) -> io::Result<bool> {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: kcmp compares kernel pointers of the two processes and touches no memory of ours.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0usize, 0usize) };
    check(order).map(|order| order == 0)
}

/// Connects a socket to an address given as raw bytes.
pub fn connect_raw(socket: BorrowedFd<'_>, address: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel copies `len` bytes from the pointer and checks their meaning itself.
    let result = unsafe {
        libc::connect(
            socket.as_raw_fd(),
            address.as_ptr().cast(),
            address.len() as libc::socklen_t,
        )
    };
    check(result as libc::c_long).map(drop)
}

/// What FS_IOC_FSGETXATTR tells of a file, and FS_IOC_FSSETXATTR changes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileAttributes {
    pub flags: u32,
    extent_size: u32,
    extents: u32,
    pub project: u32,
    cow_extent_size: u32,
    padding: [u8; 8],
}

/// New files in a directory with this flag belong to the directory's project.
pub const PROJECT_INHERIT: u32 = 0x200;

/// Reads a file's project and flags.
pub fn file_attributes(file: BorrowedFd<'_>) -> io::Result<FileAttributes> {
    const FS_IOC_FSGETXATTR: u64 = 0x801c_581f;
    let mut attributes = FileAttributes::default();
    // SAFETY: the ioctl fills the 28-byte struct it is given.
    let result = unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            FS_IOC_FSGETXATTR as _,
            std::ptr::from_mut(&mut attributes),
        )
    };
    check(result as libc::c_long).map(|_| attributes)
}

/// Writes a file's project and flags; the rest should be as it was read.
pub fn set_file_attributes(file: BorrowedFd<'_>, attributes: &FileAttributes) -> io::Result<()> {
    const FS_IOC_FSSETXATTR: u64 = 0x401c_5820;
    // SAFETY: the ioctl reads the 28-byte struct it is given.
    let result = unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            FS_IOC_FSSETXATTR as _,
            std::ptr::from_ref(attributes),
        )
    };
    check(result as libc::c_long).map(drop)
}

/// The kernel's `if_dqblk`: limits and use of one project. Limits on space are in KiB, 0 is none; use is in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaBlock {
    pub hard_kib: u64,
    pub soft_kib: u64,
    pub used_bytes: u64,
    pub inodes_hard: u64,
    pub inodes_soft: u64,
    pub inodes_used: u64,
    grace_ends: u64,
    inodes_grace_ends: u64,
    valid: u32,
}

fn quotactl_project(
    on: BorrowedFd<'_>,
    command: u32,
    project: u32,
    block: &mut QuotaBlock,
) -> io::Result<()> {
    const PRJQUOTA: u32 = 2;
    // SAFETY: both commands that are passed take a pointer to an if_dqblk, whose layout `QuotaBlock` has and
    // which is exclusively borrowed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            on.as_raw_fd(),
            command << 8 | PRJQUOTA,
            project,
            std::ptr::from_mut(block),
        )
    };
    check(result).map(drop)
}

/// Reads a project's quota on the file system of `on`.
pub fn project_quota(on: BorrowedFd<'_>, project: u32) -> io::Result<QuotaBlock> {
    const Q_GETQUOTA: u32 = 0x80_0007;
    let mut block = QuotaBlock::default();
    quotactl_project(on, Q_GETQUOTA, project, &mut block).map(|()| block)
}

/// Sets a project's limits, and only those, on the file system of `on`.
pub fn set_project_limits(on: BorrowedFd<'_>, project: u32, limits: QuotaBlock) -> io::Result<()> {
    const Q_SETQUOTA: u32 = 0x80_0008;
    const QIF_BLIMITS: u32 = 1;
    const QIF_ILIMITS: u32 = 4;
    let mut block = QuotaBlock {
        valid: QIF_BLIMITS | QIF_ILIMITS,
        ..limits
    };
    quotactl_project(on, Q_SETQUOTA, project, &mut block)
}

/// As [`fork`], with the child born in another control group (version 2, its directory).
pub fn fork_into_group(group: BorrowedFd<'_>, parentage: Parentage) -> io::Result<Forked> {
    assert_single_threaded()?;
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    // struct clone_args: the flags first, the group last.
    let mut args = [0u64; 11];
    // With CLONE_PARENT the exit signal is inherited.
    (args[0], args[4]) = match parentage {
        Parentage::Own | Parentage::First { .. } => (CLONE_INTO_CGROUP, libc::SIGCHLD as u64),
        Parentage::Sibling => (CLONE_INTO_CGROUP | libc::CLONE_PARENT as u64, 0),
    };
    args[10] = group.as_raw_fd() as u64;
    // SAFETY: as for `fork`, of which this is the same with a group.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), 88usize) })? as i32;
    Ok(match pid {
        0 => Forked::Child,
        child => Forked::Parent { child },
    })
}
