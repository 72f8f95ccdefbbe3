//! Signals: masks, dispositions, signal descriptors, and sending.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{check, procfs, take_ownership};

/// Sends a signal to every process that this one may signal, except itself. In a pid namespace these are all others
/// in it.
pub fn kill_all(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: kill takes two integers and accesses no memory.
    check(unsafe { libc::kill(-1, signal) } as libc::c_long).map(drop)
}

/// Blocks the given signals (all, if `None`). Children reset the mask themselves, so the old mask is not returned.
pub fn block_signals(signals: Option<&[libc::c_int]>) -> io::Result<()> {
    set_mask(libc::SIG_BLOCK, &signal_set(signals))
}

/// Unblocks every signal and sets every ignored signal to its default disposition.
pub fn reset_signals() -> io::Result<()> {
    // execve resets handlers, so only ignored signals need a call.
    let ignored = IGNORED_SIGNALS.load(Ordering::Relaxed);
    // The kernel's struct sigaction with every field zero means the default. The array is larger than the struct on
    // any architecture.
    let default = [0u64; 8];
    for signal in (1..=64).filter(|signal| ignored >> (signal - 1) & 1 == 1) {
        // SAFETY: the kernel reads one struct sigaction from `default`, which outlives the call, and writes nothing.
        // A raw call, because the C library refuses the two signals that it reserves. The kernel refuses SIGKILL and
        // SIGSTOP, which cannot be ignored, so the result does not matter.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, &default, 0usize, 8usize);
        }
    }
    set_mask(libc::SIG_SETMASK, &signal_set(Some(&[])))
}

/// A bit mask of the signals that this process ignores. All bits are set until [`note_ignored_signals`] has run.
static IGNORED_SIGNALS: AtomicU64 = AtomicU64::new(u64::MAX);

/// Reads which signals this process ignores, for [`reset_signals`] in its forked children. Reading one file replaces
/// sixty calls of sigaction. If the file cannot be parsed, all signals are reset.
pub fn note_ignored_signals() {
    let status = procfs::read("/proc/self/status", 16 << 10).unwrap_or_default();
    let mask = status.split_once("\nSigIgn:\t").map(|(_, rest)| rest);
    let mask = mask.and_then(|rest| u64::from_str_radix(rest.get(..16)?, 16).ok());
    IGNORED_SIGNALS.store(mask.unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Sets SIGCHLD to its default. The parent may have ignored it, and then waiting for a child would fail.
pub fn reset_sigchld() {
    // SAFETY: SIG_DFL is a valid disposition for SIGCHLD and installs no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

fn signal_set(signals: Option<&[libc::c_int]>) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the whole set through a pointer to a local.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: sigemptyset has initialised the set.
    let mut set = unsafe { set.assume_init() };
    match signals {
        None => {
            // SAFETY: `set` is initialised and exclusively borrowed.
            unsafe { libc::sigfillset(&mut set) };
        }
        Some(list) => {
            for signal in list {
                // SAFETY: `set` is initialised and exclusively borrowed; the call refuses an invalid number.
                unsafe { libc::sigaddset(&mut set, *signal) };
            }
        }
    }
    set
}

fn set_mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `set` is initialised, and the null pointer means that the old mask is not written.
    check(unsafe { libc::sigprocmask(how, set, std::ptr::null_mut()) } as libc::c_long).map(drop)
}

/// Returns a descriptor that becomes readable when one of the signals, which must be blocked, is pending.
pub fn signal_fd(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    let set = signal_set(Some(signals));
    // SAFETY: `set` is initialised; -1 asks for a new descriptor.
    let fd = check(
        unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) } as libc::c_long,
    )?;
    Ok(take_ownership(fd))
}

/// Takes one pending signal from a signal descriptor.
pub fn read_signal(fd: BorrowedFd<'_>) -> Option<i32> {
    let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
    match rustix::io::read(fd, &mut info) {
        Ok(n) if n == info.len() => Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]])),
        _ => None,
    }
}

/// Sends a signal, including 0 and the real-time signals, to the process of a pidfd.
pub fn signal_pidfd(process: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: the info pointer is null, so the kernel fills in the info as for kill(2) and reads no memory.
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
    // SAFETY: tgkill takes three integers and accesses no memory.
    check(unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) }).map(drop)
}
