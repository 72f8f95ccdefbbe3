//! seccomp filters and their user notifications, and the Landlock ABI version.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use super::{check, ioctl, take_ownership};

/// One classic BPF instruction, laid out as the kernel's `struct sock_filter`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub code: u16,
    pub jt: u8,
    pub jf: u8,
    pub k: u32,
}

/// Returns the Landlock ABI of this kernel, or 0 if there is none. Asks the kernel once; forked processes inherit the
/// result.
pub fn landlock_abi() -> i32 {
    static ABI: OnceLock<i32> = OnceLock::new();
    *ABI.get_or_init(|| landlock_version().unwrap_or(0))
}

/// Asks for the Landlock ABI. ENOSYS: the kernel was built without Landlock. EOPNOTSUPP: it was booted without
/// Landlock.
pub fn landlock_version() -> io::Result<i32> {
    const LANDLOCK_CREATE_RULESET_VERSION: libc::c_long = 1;
    // SAFETY: a null attribute of size 0 with this flag only queries the version; the kernel reads no memory.
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

/// Whether a filter passes some calls to a supervisor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    None,
    New,
}

/// Installs a seccomp filter on this process. With [`Listener::New`] returns the notification descriptor.
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
        // SAFETY: `filter` has the layout of `sock_fprog`, points to `len` instructions, and outlives the call.
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
    // Killable wait: once the supervisor has received a call, only a fatal signal interrupts it, so an ordinary
    // signal cannot restart a call that is half done. Linux before 5.19 does not know the flag.
    const NEW_LISTENER: libc::c_ulong = 8;
    const WAIT_KILLABLE_RECV: libc::c_ulong = 32;
    match attempt(NEW_LISTENER | WAIT_KILLABLE_RECV) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => attempt(NEW_LISTENER),
        other => other,
    }
    .map(|fd| Some(take_ownership(fd)))
}

/// A system call that a filter passed to the supervisor (`struct seccomp_notif`).
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
    // SAFETY: all-zero bytes are a valid `seccomp_notif`, and the kernel demands zeroes as input.
    let mut raw: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    const SECCOMP_IOCTL_NOTIF_RECV: u64 = 0xc050_2100;
    // SAFETY: the command writes an 80-byte `seccomp_notif`.
    unsafe { ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &mut raw) }?;
    Ok(Notification {
        id: raw.id,
        pid: raw.pid,
        call: libc::c_long::from(raw.data.nr),
        args: raw.data.args,
    })
}

/// Fails unless the process that made the call still waits for the answer, so that its pid cannot have been reused.
pub fn notification_valid(listener: BorrowedFd<'_>, mut id: u64) -> io::Result<()> {
    const SECCOMP_IOCTL_NOTIF_ID_VALID: u64 = 0x4008_2102;
    // SAFETY: the command reads a 64-bit id.
    unsafe { ioctl(listener, SECCOMP_IOCTL_NOTIF_ID_VALID, &mut id) }
}

/// Answers a notification: success with 0, or an errno.
pub fn notification_answer(listener: BorrowedFd<'_>, id: u64, errno: i32) -> io::Result<()> {
    let answer = match errno {
        0 => NotificationAnswer::Value(0),
        errno => NotificationAnswer::Errno(errno),
    };
    notification_answer_with(listener, id, answer)
}

/// The result of a call that a filter passed to the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotificationAnswer {
    Value(i64),
    Errno(i32),
    /// The kernel makes the call itself, with the caller's memory and descriptors as they are at that time.
    Continue,
}

pub fn notification_answer_with(
    listener: BorrowedFd<'_>,
    id: u64,
    answer: NotificationAnswer,
) -> io::Result<()> {
    const SECCOMP_USER_NOTIF_FLAG_CONTINUE: u32 = 1;
    // SAFETY: all-zero bytes are a valid `seccomp_notif_resp`.
    let mut raw: libc::seccomp_notif_resp = unsafe { std::mem::zeroed() };
    raw.id = id;
    match answer {
        NotificationAnswer::Value(value) => raw.val = value,
        NotificationAnswer::Errno(errno) => raw.error = -errno,
        NotificationAnswer::Continue => raw.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE,
    }
    const SECCOMP_IOCTL_NOTIF_SEND: u64 = 0xc018_2101;
    // SAFETY: the command reads a 24-byte `seccomp_notif_resp`.
    unsafe { ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &mut raw) }
}

/// Answers a notification with a copy of a descriptor, which is close-on-exec or not. The call returns the number of
/// the copy in the caller.
pub fn answer_with_descriptor(
    listener: BorrowedFd<'_>,
    id: u64,
    fd: BorrowedFd<'_>,
    close_on_exec: bool,
) -> io::Result<()> {
    // Add the descriptor and answer in one step (Linux 5.14): otherwise the call could end in between and leave a
    // descriptor behind.
    const SECCOMP_ADDFD_FLAG_SEND: u32 = 2;
    const SECCOMP_IOCTL_NOTIF_ADDFD: u64 = 0x4018_2103;
    let mut raw = libc::seccomp_notif_addfd {
        id,
        flags: SECCOMP_ADDFD_FLAG_SEND,
        srcfd: fd.as_raw_fd() as u32,
        newfd: 0,
        newfd_flags: if close_on_exec {
            libc::O_CLOEXEC as u32
        } else {
            0
        },
    };
    // SAFETY: the command reads a 24-byte `seccomp_notif_addfd`.
    unsafe { ioctl(listener, SECCOMP_IOCTL_NOTIF_ADDFD, &mut raw) }
}
