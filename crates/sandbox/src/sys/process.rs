//! fork, unshare, execve and exit.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::process::Pid;

use super::check;

/// Which side of a fork this is.
pub enum ForkSide {
    Parent { child: i32 },
    Child,
}

impl ForkSide {
    pub(super) fn of(pid: libc::c_long) -> ForkSide {
        match pid {
            0 => ForkSide::Child,
            child => ForkSide::Parent {
                child: child as i32,
            },
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Namespace {
    Current,
    New,
}

/// Whose child the new process is, and in which namespaces it starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Parentage {
    Own,
    /// The caller's parent becomes the parent. The launcher makes pid 1 the runner's child in this way.
    Sibling,
    /// A child of the caller, and the first process of a new pid namespace that belongs to the given user namespace.
    First {
        user: Namespace,
    },
}

impl Parentage {
    fn flags(self) -> u64 {
        let flags = match self {
            Parentage::Own => 0,
            Parentage::Sibling => libc::CLONE_PARENT,
            Parentage::First {
                user: Namespace::Current,
            } => libc::CLONE_NEWPID,
            Parentage::First {
                user: Namespace::New,
            } => libc::CLONE_NEWPID | libc::CLONE_NEWUSER,
        };
        flags as u64
    }
}

/// Forks a single-threaded process.
///
/// # Errors
/// Refuses when a second thread exists: another thread might hold a lock, which would stay locked in the child.
pub fn fork(parentage: Parentage) -> io::Result<ForkSide> {
    match clone3(parentage, None) {
        // Container runtimes answer ENOSYS, because a seccomp filter cannot inspect clone3's flags.
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => {
            let flags = parentage.flags() | libc::SIGCHLD as u64;
            // SAFETY: as in `clone3`, which has checked that there is one thread. All other arguments are zero, so their
            // order, which differs between architectures, does not matter.
            check(unsafe { libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, 0usize, 0usize) })
                .map(ForkSide::of)
        }
        other => other,
    }
}

/// As [`fork`], with the child started in another cgroup (version 2), given by its directory.
pub fn fork_into_group(group: BorrowedFd<'_>, parentage: Parentage) -> io::Result<ForkSide> {
    clone3(parentage, Some(group))
}

fn clone3(parentage: Parentage, group: Option<BorrowedFd<'_>>) -> io::Result<ForkSide> {
    assert_single_threaded()?;
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    // struct clone_args: the flags are the first field, the exit signal is the fifth, the cgroup is the last. Kernels
    // before 5.7 know only the 64 bytes before the last three fields.
    let mut args = [0u64; 11];
    args[0] = parentage.flags();
    // With CLONE_PARENT the child inherits the exit signal, and the kernel refuses one in the arguments.
    args[4] = match parentage {
        Parentage::Own | Parentage::First { .. } => libc::SIGCHLD as u64,
        Parentage::Sibling => 0,
    };
    let mut size = 64usize;
    if let Some(group) = group {
        args[0] |= CLONE_INTO_CGROUP;
        args[10] = group.as_raw_fd() as u64;
        size = 88;
    }
    // SAFETY: clone3 with no stack and no CLONE_VM behaves like fork. `args` outlives the call, and the size of its used
    // part is passed. The check above found one thread, so no other thread can hold a lock.
    check(unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), size) }).map(ForkSide::of)
}

/// Forks a process that may have threads through the C library, which handles its own locks. The child may allocate,
/// and must leave by [`exit_now`].
pub fn fork_threaded() -> io::Result<ForkSide> {
    // SAFETY: the child runs only code of ours that takes no lock that another thread could hold at the time of the
    // fork, except the allocator's, which the C library's fork leaves unlocked in the child.
    check(unsafe { libc::fork() } as libc::c_long).map(ForkSide::of)
}

/// As [`fork_threaded`], with a child that runs `act` and exits with the code that it returns.
pub fn fork_and_run(act: impl FnOnce() -> i32) -> io::Result<Pid> {
    match fork_threaded()? {
        ForkSide::Child => exit_now(act()),
        ForkSide::Parent { child } => {
            Ok(Pid::from_raw(child).expect("fork gives the parent the pid of the child"))
        }
    }
}

fn assert_single_threaded() -> io::Result<()> {
    // Linux counts one link for each thread, beside the two of every directory.
    if rustix::fs::stat("/proc/self/task").is_ok_and(|stat| stat.st_nlink == 3) {
        return Ok(());
    }
    let threads = std::fs::read_dir("/proc/self/task").map(|tasks| tasks.count());
    match threads {
        Ok(1) => Ok(()),
        // After pivot_root the old /proc may be gone. This process was single-threaded when it started.
        Err(_) => Ok(()),
        Ok(_) => Err(io::Error::other("fork from a process with several threads")),
    }
}

/// Exits without running destructors or exit handlers, because a forked child shares state with its parent.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(code) }
}

/// `unshare(2)` with raw flags.
pub fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: the callers are single-threaded and never pass CLONE_FILES or CLONE_VM, so no table that std assumes to
    // be shared is split.
    check(unsafe { libc::unshare(flags) } as libc::c_long).map(drop)
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
    // SAFETY: both arrays are NULL-terminated, their strings are NUL-terminated, and all of them outlive the call.
    unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Sets the name that process listings show. A failure has no other effect, so it is ignored.
pub fn set_process_name(name: &CStr) {
    let _ = rustix::thread::set_name(name);
}
