//! The calls of the attack battery (`attack/`), which nothing else makes.

use std::ffi::CStr;
use std::io;

use super::check;

/// A system call that an attack of the battery makes and that neither std nor rustix has. Only these, so that
/// [`attempt`] can say of each what it does with its arguments.
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
    /// By the table of x32, the 32-bit ABI of 64-bit processors; on others no call at all.
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

/// Makes one of the battery's calls. Whoever passes a buffer passes one as large as the call takes it to be.
pub fn attempt(call: Call, args: &mut [Arg<'_>]) -> io::Result<i64> {
    let mut raw = [0 as libc::c_long; 6];
    for (to, arg) in raw.iter_mut().zip(args) {
        *to = match arg {
            Arg::Number(n) => *n as libc::c_long,
            Arg::Text(text) => text.as_ptr() as libc::c_long,
            Arg::Bytes(bytes) => bytes.as_mut_ptr() as libc::c_long,
        };
    }
    let [a, b, c, d, e, f] = raw;
    // SAFETY: no call in the list touches memory of this process but through its pointers, which are to live buffers
    // of the call's own size or null; shmat with a null address maps where nothing is, and clone without CLONE_VM is
    // a fork. Descriptors that are made belong to nobody and go with the process.
    check(unsafe { libc::syscall(call.0, a, b, c, d, e, f) })
}

/// Maps memory that is never unmapped, one page of it written, and has the kernel fill in its page tables: all other
/// entries show the one page of zeros. A fork copies the tables, 2 MiB of them for each GiB.
pub fn fill_page_tables(bytes: usize) -> io::Result<()> {
    // SAFETY: a new mapping where the kernel likes.
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
    // SAFETY: the mapping is ours alone; this advice does not change what it holds.
    check(unsafe { libc::madvise(memory, bytes, libc::MADV_NOHUGEPAGE) }.into())?;
    // SAFETY: the first byte of our own writable mapping. Fork copies no tables of a mapping that was never written to.
    unsafe { memory.cast::<u8>().write_volatile(1) };
    // SAFETY: as with the first advice.
    check(unsafe { libc::madvise(memory, bytes, libc::MADV_POPULATE_READ) }.into()).map(drop)
}

/// `getpid` by the table of i386, as 32-bit programs call it. A kernel without it may end the process.
#[cfg(target_arch = "x86_64")]
pub fn getpid_i386() -> i32 {
    const I386_GETPID: i64 = 20;
    let mut answer = I386_GETPID;
    // SAFETY: getpid takes no argument; the kernel changes no register but the answer's, and r8 to r11 on old ones.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("rax") answer, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    answer as i32
}
