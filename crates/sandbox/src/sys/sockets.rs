//! What serving another process's socket calls needs: access to its memory, connecting, and sending raw messages.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

/// The maximal number of parts that one system call takes (UIO_MAXIOV).
pub const PARTS_MAX: usize = 1024;

/// Copies parts of another process's memory, given as (address, length), one after the other into `into`. Returns the
/// number of bytes before the first unreadable one.
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
    // SAFETY: `local` describes `into`, which is exclusively borrowed and bounds the write. The kernel only reads the
    // remote addresses, and checks them.
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

/// Copies up to `into.len()` bytes out of another process's memory.
pub fn read_memory(pid: u32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    let all = into.len();
    read_memory_parts(pid, &[(address, all)], into)
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
    // SAFETY: the kernel only reads `local`. It writes to the other process's memory, whose address it checks.
    let n = check(
        unsafe { libc::process_vm_writev(pid as i32, &local, 1, &remote, 1, 0) } as libc::c_long,
    )?;
    match n as usize == bytes.len() {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// One message. Its address and its control data may be empty.
pub struct RawMessage<'a> {
    pub data: &'a [u8],
    pub address: &'a [u8],
    /// In the layout of the kernel's list of `cmsghdr`.
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
    // SAFETY: all-zero bytes are a valid msghdr: no address, no data, no control data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_name = message.address.as_ptr().cast_mut().cast();
    header.msg_namelen = message.address.len() as libc::socklen_t;
    header.msg_iov = &mut part;
    header.msg_iovlen = 1;
    header.msg_control = message.control.as_ptr().cast_mut().cast();
    header.msg_controllen = message.control.len() as _;
    // SAFETY: every pointer refers to a slice that outlives the call and comes with its length. The kernel only reads
    // them.
    let n = check(unsafe { libc::sendmsg(socket.as_raw_fd(), &header, flags) } as libc::c_long)?;
    Ok(n as usize)
}

/// Connects a socket to an address given as raw bytes.
pub fn connect_raw(socket: BorrowedFd<'_>, address: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel copies `address.len()` bytes from a live slice and checks their meaning itself.
    let result = unsafe {
        libc::connect(
            socket.as_raw_fd(),
            address.as_ptr().cast(),
            address.len() as libc::socklen_t,
        )
    };
    check(result as libc::c_long).map(drop)
}
