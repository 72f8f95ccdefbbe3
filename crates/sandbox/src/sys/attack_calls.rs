//! Raw system calls that only the attacks (`attack/`) make.

use std::ffi::CStr;
use std::io;

use super::{ForkSide, check};

/// A system call that an attack makes and that neither std nor rustix wraps. The list is closed, so that the safety
/// comment in [`attempt`] can cover every call in it.
#[derive(Clone, Copy)]
pub struct Call(libc::c_long);

#[rustfmt::skip]
impl Call {
    pub const ADD_KEY: Call = Call(libc::SYS_add_key);
    pub const BPF: Call = Call(libc::SYS_bpf);
    pub const CLONE: Call = Call(libc::SYS_clone);
    pub const CLONE3: Call = Call(libc::SYS_clone3);
    pub const FCHMODAT2: Call = Call(452);
    pub const IOPRIO_SET: Call = Call(libc::SYS_ioprio_set);
    pub const IO_URING_SETUP: Call = Call(libc::SYS_io_uring_setup);
    pub const KEYCTL: Call = Call(libc::SYS_keyctl);
    pub const MBIND: Call = Call(libc::SYS_mbind);
    pub const MQ_UNLINK: Call = Call(libc::SYS_mq_unlink);
    pub const PERF_EVENT_OPEN: Call = Call(libc::SYS_perf_event_open);
    pub const PTRACE: Call = Call(libc::SYS_ptrace);
    pub const RT_SIGQUEUEINFO: Call = Call(libc::SYS_rt_sigqueueinfo);
    pub const SENDFILE: Call = Call(libc::SYS_sendfile);
    pub const SHMAT: Call = Call(libc::SYS_shmat);
    pub const SHMCTL: Call = Call(libc::SYS_shmctl);
    pub const SHMGET: Call = Call(libc::SYS_shmget);
    pub const TGKILL: Call = Call(libc::SYS_tgkill);
    pub const TRUNCATE: Call = Call(libc::SYS_truncate);
    pub const USERFAULTFD: Call = Call(libc::SYS_userfaultfd);
    pub const VMSPLICE: Call = Call(libc::SYS_vmsplice);
    /// getpid in the numbering of x32, the 32-bit ABI of x86_64. Other architectures have no such call.
    pub const X32_GETPID: Call = Call(0x4000_0000 | 39);
    pub const FCNTL: Call = Call(libc::SYS_fcntl);
    pub const IOCTL: Call = Call(libc::SYS_ioctl);
    pub const MQ_OPEN: Call = Call(libc::SYS_mq_open);
    pub const MQ_SEND: Call = Call(libc::SYS_mq_timedsend);
    pub const MQ_RECEIVE: Call = Call(libc::SYS_mq_timedreceive);
    pub const PREAD: Call = Call(libc::SYS_pread64);
    pub const SET_TIMER: Call = Call(libc::SYS_setitimer);
}

pub enum Arg<'a> {
    Number(i64),
    Text(&'a CStr),
    Bytes(&'a mut [u8]),
}

/// Makes one of the listed calls. A caller that passes a buffer must pass one as large as the call expects.
pub fn attempt(call: Call, args: &mut [Arg<'_>]) -> io::Result<i64> {
    let mut raw = [0 as libc::c_long; 6];
    for (slot, arg) in raw.iter_mut().zip(args) {
        *slot = match arg {
            Arg::Number(n) => *n as libc::c_long,
            Arg::Text(text) => text.as_ptr() as libc::c_long,
            Arg::Bytes(bytes) => bytes.as_mut_ptr() as libc::c_long,
        };
    }
    let [a, b, c, d, e, f] = raw;
    // SAFETY: the listed calls access this process's memory only through their pointer arguments, which are null or
    // point to live buffers of the size that the call expects. shmat with a null address maps at an unused address,
    // and clone without CLONE_VM behaves like fork. No Rust object owns a descriptor that such a call makes; it lives
    // until the process exits.
    check(unsafe { libc::syscall(call.0, a, b, c, d, e, f) })
}

/// Forks with clone into new namespaces.
pub fn clone_into(namespaces: libc::c_int) -> io::Result<ForkSide> {
    let flags = Arg::Number((namespaces | libc::SIGCHLD).into());
    attempt(Call::CLONE, &mut [flags]).map(ForkSide::of)
}

/// Forks with clone3 into new namespaces.
pub fn clone3_into(namespaces: libc::c_int) -> io::Result<ForkSide> {
    // struct clone_args has eight fields: the flags are the first, the exit signal is the fifth.
    let mut args = [0u8; 64];
    args[..4].copy_from_slice(&namespaces.to_ne_bytes());
    args[32..36].copy_from_slice(&libc::SIGCHLD.to_ne_bytes());
    let args = &mut [Arg::Bytes(&mut args), Arg::Number(64)];
    attempt(Call::CLONE3, args).map(ForkSide::of)
}

/// Maps memory that is never unmapped, writes one page of it, and makes the kernel populate its page tables. All
/// other entries map the shared zero page. A fork copies the tables, 2 MiB for each GiB of memory.
pub fn fill_page_tables(bytes: usize) -> io::Result<()> {
    // SAFETY: a new anonymous mapping at an address that the kernel chooses touches no existing memory.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `memory` and `bytes` describe the mapping made above, which nobody else uses. This advice keeps its
    // content.
    check(unsafe { libc::madvise(memory, bytes, libc::MADV_NOHUGEPAGE) }.into())?;
    // SAFETY: the first byte of the writable mapping made above. The write matters: fork does not copy the page
    // tables of a mapping that was never written to.
    unsafe { memory.cast::<u8>().write_volatile(1) };
    // SAFETY: as for the first madvise; populating pages keeps the mapping's content.
    check(unsafe { libc::madvise(memory, bytes, libc::MADV_POPULATE_READ) }.into()).map(drop)
}

/// Calls `getpid` through the i386 table, as 32-bit programs do. A kernel without 32-bit support may kill the
/// process.
#[cfg(target_arch = "x86_64")]
pub fn getpid_i386() -> i32 {
    const I386_GETPID: i64 = 20;
    let mut answer = I386_GETPID;
    // SAFETY: getpid takes no argument. The kernel changes only rax, and r8 to r11 on old kernels, all declared as
    // outputs.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("rax") answer, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    answer as i32
}
