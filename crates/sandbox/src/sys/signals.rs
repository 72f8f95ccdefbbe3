//! Signals: masks, dispositions, descriptors that tell of them, and sending them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{check, own, procfs};

/// Sends a signal to every process this one may signal, itself excepted; in a pid namespace, to all in it.
pub fn kill_all(signal: libc::c_int) -> io::Result<()> {
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
    let status = procfs::read("/proc/self/status", 16 << 10).unwrap_or_default();
    let mask = status.split_once("\nSigIgn:\t").map(|(_, rest)| rest);
    let mask = mask.and_then(|rest| u64::from_str_radix(rest.get(..16)?, 16).ok());
    IGNORED_SIGNALS.store(mask.unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Whoever started us may have ignored it, and then no child's end could be waited for.
pub fn reset_sigchld() {
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

/// Sends any signal, also none (0) and the real-time ones, to a held process.
pub fn signal_pidfd(process: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
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
