//! What serving another process's socket calls needs: its memory, sending raw messages, and answers.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicU64;

use super::check;

/// As many parts as one call of the kernel's takes (UIO_MAXIOV).
pub const PARTS_MAX: usize = 1024;

/// Copies parts of another process's memory, addresses and lengths, one after the other into `into`. Returns how many bytes
/// could be read before the first that could not.
pub fn read_memory_parts(pid: u32, parts: &[(u64, usize)], into: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    let remote: Vec<libc::iovec> = parts
        .iter()
        .map(|(address, len)| libc::iovec {
            iov_base: *address as usize as *mut libc::c_void,
            iov_len: *len,
        })
        .collect();
    // SAFETY: `local` describes `into`, which is exclusively borrowed and bounds what is written; the remote addresses are
    // only read, and checked by the kernel.
    let n = check(unsafe {
        libc::process_vm_readv(
            pid as i32,
            &local,
            1,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    } as libc::c_long)?;
    Ok(n as usize)
}

/// Writes bytes into another process's memory.
pub fn write_memory(pid: u32, address: u64, bytes: &[u8]) -> io::Result<()> {
    let local = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let remote = libc::iovec {
        iov_base: address as usize as *mut libc::c_void,
        iov_len: bytes.len(),
    };
    // SAFETY: `local` is only read; the other process's memory is none of ours, and the kernel checks its address.
    let n = check(
        unsafe { libc::process_vm_writev(pid as i32, &local, 1, &remote, 1, 0) } as libc::c_long,
    )?;
    match n as usize == bytes.len() {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// One message, with an address and control data that may be empty.
pub struct RawMessage<'a> {
    pub data: &'a [u8],
    pub address: &'a [u8],
    /// Laid out as the kernel's list of `cmsghdr`.
    pub control: &'a [u8],
}

pub fn send_message(
    socket: BorrowedFd<'_>,
    message: &RawMessage<'_>,
    flags: libc::c_int,
) -> io::Result<usize> {
    let mut part = libc::iovec {
        iov_base: message.data.as_ptr().cast_mut().cast(),
        iov_len: message.data.len(),
    };
    // SAFETY: zeroes are a valid msghdr: no address, no data, no control.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_name = message.address.as_ptr().cast_mut().cast();
    header.msg_namelen = message.address.len() as libc::socklen_t;
    header.msg_iov = &mut part;
    header.msg_iovlen = 1;
    header.msg_control = message.control.as_ptr().cast_mut().cast();
    header.msg_controllen = message.control.len() as _;
    // SAFETY: every pointer is to a slice that outlives the call and comes with its length; the kernel only reads them.
    let n = check(unsafe { libc::sendmsg(socket.as_raw_fd(), &header, flags) } as libc::c_long)?;
    Ok(n as usize)
}

/// How a call that was handed over ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Value(i64),
    Errno(i32),
    /// The kernel makes the call itself, with the caller's memory and descriptors as they are by then.
    Continue,
}

pub fn notification_answer_with(
    listener: BorrowedFd<'_>,
    id: u64,
    answer: Answer,
) -> io::Result<()> {
    const SECCOMP_USER_NOTIF_FLAG_CONTINUE: u32 = 1;
    // SAFETY: an all-zero seccomp_notif_resp is a valid value.
    let mut raw: libc::seccomp_notif_resp = unsafe { std::mem::zeroed() };
    raw.id = id;
    match answer {
        Answer::Value(value) => raw.val = value,
        Answer::Errno(errno) => raw.error = -errno,
        Answer::Continue => raw.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE,
    }
    const SECCOMP_IOCTL_NOTIF_SEND: u64 = 0xc018_2101;
    // SAFETY: the ioctl reads the 24-byte struct it is given.
    let result = unsafe {
        libc::ioctl(
            listener.as_raw_fd(),
            SECCOMP_IOCTL_NOTIF_SEND as _,
            &mut raw,
        )
    };
    check(result as libc::c_long).map(drop)
}

/// Zeroes in memory that this process shares with those it forks from now on, for as long as it lives.
pub fn numbers_shared_with_children(count: usize) -> io::Result<&'static [AtomicU64]> {
    // SAFETY: a new mapping where the kernel likes.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            count * size_of::<AtomicU64>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is page-aligned, zeroed, large enough, never unmapped, and all access to it is atomic.
    Ok(unsafe { std::slice::from_raw_parts(memory.cast::<AtomicU64>(), count) })
}
