//! The reviewed list: what each system call gets, with the reason beside it.
//!
//! The list is an allow-list. What it does not name gets [`UNLISTED`], so a call that a newer kernel
//! adds is refused until somebody has read what it does. A refusal is always an errno, never a kill:
//! libraries probe for calls and fall back. ENOSYS says "this kernel has no such call" and is what
//! fallbacks look for; EPERM says "refused" and is for calls whose callers deserve that answer.
//!
//! Arguments are compared by their low 32 bits. Every argument looked at here is an `int`, an `unsigned
//! int` or a `umode_t` in the kernel, which ignores the upper half; comparing it would let garbage
//! there slip past a rule. clone(2) takes a long, of which the kernel uses `lower_32_bits`.

use libc::c_long;

use super::rule::{Action, CallRule, Clause, DENY, Test};
use super::rule::{always, has_any, is, masked, rule, when};
use super::{Affinity, Connect, Fallocate, FilterOptions, OuterConfinement};
use super::{ioctl, memory, number, threads};

pub(super) const UNLISTED: Action = Action::Errno(libc::ENOSYS);
/// No filter of the program's own, by seccomp(2) or PR_SET_SECCOMP. Each is compiled to machine code, for which the whole host has
/// one bound (net.core.bpf_jit_limit): a process may install eight of full length, half a megabyte, and who wants a
/// filter next, a browser or another analysis, would be refused. Nor can a listener of the program's own answer in the place
/// of ours. EINVAL is the answer of a kernel without filters: man and Firefox go on.
const NO_FILTERS: Action = Action::Errno(libc::EINVAL);

/// Allowed whatever their arguments are.
#[rustfmt::skip]
const ALLOWED: &[&[c_long]] = &[
    // Bytes in and out of descriptors that the program holds. Which files it may open is for mounts and Landlock.
    &[
        libc::SYS_read, libc::SYS_write, libc::SYS_pread64, libc::SYS_pwrite64, libc::SYS_readv, libc::SYS_writev,
        libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_lseek,
        libc::SYS_sendfile, libc::SYS_tee, libc::SYS_copy_file_range,
        libc::SYS_close, libc::SYS_dup, libc::SYS_dup3, libc::SYS_pipe2,
        libc::SYS_fsync, libc::SYS_fdatasync, number::SYNC_FILE_RANGE, libc::SYS_truncate, libc::SYS_ftruncate,
        libc::SYS_readahead, libc::SYS_fadvise64, number::CACHESTAT, libc::SYS_flock,
    ],
    // Names, directories and what is known about files.
    &[
        libc::SYS_newfstatat, libc::SYS_fstat, libc::SYS_statx, libc::SYS_statfs, libc::SYS_fstatfs,
        libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_readlinkat, libc::SYS_getdents64, libc::SYS_getcwd,
        libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_unlinkat, number::RENAMEAT, libc::SYS_linkat, libc::SYS_symlinkat,
        libc::SYS_utimensat, libc::SYS_umask, number::FILE_GETATTR,
    ],
    // A new directory cannot be set-id: the kernel masks the mode with 01777 (vfs_mkdir).
    &[libc::SYS_mkdirat],
    // Attributes in `user.` and access lists of the program's own files. `security.` and `trusted.` need capabilities.
    &[
        libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr, libc::SYS_getxattr, libc::SYS_lgetxattr,
        libc::SYS_fgetxattr, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr, libc::SYS_removexattr,
        libc::SYS_lremovexattr, libc::SYS_fremovexattr, number::SETXATTRAT, number::GETXATTRAT, number::LISTXATTRAT,
        number::REMOVEXATTRAT,
    ],
    // Waiting for descriptors, and descriptors that exist to be waited for.
    &[
        libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait,
        libc::SYS_epoll_pwait2, libc::SYS_eventfd2, libc::SYS_signalfd4, libc::SYS_timerfd_create,
        libc::SYS_timerfd_settime, libc::SYS_timerfd_gettime,
    ],
    // Its own memory. How much is for the cgroup and RLIMIT_MEMLOCK; memory keys and shadow stacks only tighten. What
    // depends on flags is in `memory.rs`.
    &[
        libc::SYS_munmap, libc::SYS_mremap, libc::SYS_mprotect, libc::SYS_msync, libc::SYS_mincore, libc::SYS_brk,
        libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_munlock, libc::SYS_mlockall, libc::SYS_munlockall,
        libc::SYS_pkey_mprotect, libc::SYS_pkey_alloc, libc::SYS_pkey_free, number::MSEAL, number::MAP_SHADOW_STACK,
        libc::SYS_membarrier,
    ],
    // Placing a thread's memory on NUMA nodes: numactl, hwloc, the JVM. One policy for each thread, and threads are
    // counted. Another process's pages need the right to trace it.
    &[libc::SYS_get_mempolicy, libc::SYS_set_mempolicy, libc::SYS_move_pages],
    // System V and POSIX queues, semaphores and shared memory: they live and die with the IPC namespace.
    &[
        libc::SYS_shmat, libc::SYS_shmdt, libc::SYS_shmctl, libc::SYS_semget, libc::SYS_semop,
        libc::SYS_semtimedop, libc::SYS_semctl, libc::SYS_msgget, libc::SYS_msgsnd, libc::SYS_msgrcv,
        libc::SYS_msgctl, libc::SYS_mq_open, libc::SYS_mq_unlink, libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive,
        libc::SYS_mq_notify, libc::SYS_mq_getsetattr,
    ],
    // Threads and what libc sets up for each.
    &[
        libc::SYS_futex, libc::SYS_futex_waitv, number::FUTEX_WAKE, number::FUTEX_WAIT, number::FUTEX_REQUEUE,
        libc::SYS_set_robust_list, libc::SYS_set_tid_address, libc::SYS_rseq, libc::SYS_gettid, libc::SYS_getcpu,
    ],
    // Programs and their children. no_new_privs makes set-id programs and file capabilities ineffective.
    &[
        libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_wait4, libc::SYS_waitid,
        libc::SYS_getpid, libc::SYS_getppid, libc::SYS_getpgid, libc::SYS_setpgid, libc::SYS_getsid, libc::SYS_setsid,
        libc::SYS_pidfd_open,
    ],
    // Signals. Whom they can reach is for the pid namespace and Landlock.
    &[
        libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill, libc::SYS_pidfd_send_signal, libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask, libc::SYS_rt_sigpending, libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo, libc::SYS_rt_sigsuspend, libc::SYS_rt_sigreturn, libc::SYS_sigaltstack,
    ],
    // The kernel itself resumes an interrupted sleep through this one.
    &[libc::SYS_restart_syscall],
    // Who it is. It has no capability, so it can only become what it is already; `ids` below has the rest.
    &[
        libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid, libc::SYS_getresuid,
        libc::SYS_getresgid, libc::SYS_getgroups, libc::SYS_setfsuid, libc::SYS_setfsgid, libc::SYS_setgroups,
        libc::SYS_capget, libc::SYS_capset,
    ],
    // Reading clocks, sleeping, timers.
    &[
        libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_gettimeofday, libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep, libc::SYS_getitimer, libc::SYS_setitimer, libc::SYS_timer_create,
        libc::SYS_timer_settime, libc::SYS_timer_gettime, libc::SYS_timer_getoverrun, libc::SYS_timer_delete,
        libc::SYS_times,
    ],
    // Looking at its own scheduling; changing it has rules below.
    &[
        libc::SYS_sched_yield, libc::SYS_sched_getaffinity, libc::SYS_sched_getparam, libc::SYS_sched_getscheduler,
        libc::SYS_sched_getattr, libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min,
        libc::SYS_sched_rr_get_interval, libc::SYS_getpriority, libc::SYS_ioprio_get,
    ],
    // Its own limits and usage. Without CAP_SYS_RESOURCE hard limits only go down.
    &[number::GETRLIMIT, number::SETRLIMIT, libc::SYS_getrusage],
    // Facts about the system that /proc tells as well, and random bytes.
    &[libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrandom],
    // Sockets it has. `socket` and `socketpair` below decide which kinds exist, `by_option` which sends may name an
    // address. io_uring, which could connect unseen, is refused; socketcall is of the i386 ABI.
    &[
        libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4, libc::SYS_getsockname,
        libc::SYS_getpeername, libc::SYS_getsockopt, libc::SYS_shutdown, libc::SYS_recvfrom, libc::SYS_recvmsg, libc::SYS_recvmmsg,
    ],
];

/// The older forms that only x86_64 has; aarch64's libraries use the forms above.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const ALLOWED_HERE: &[&[c_long]] = &[
    // As their newer forms above.
    &[
        libc::SYS_stat, libc::SYS_lstat, libc::SYS_access, libc::SYS_readlink, libc::SYS_getdents, libc::SYS_rename,
        libc::SYS_rmdir, libc::SYS_unlink, libc::SYS_link, libc::SYS_symlink, libc::SYS_mkdir,
        libc::SYS_utime, libc::SYS_utimes, libc::SYS_futimesat, libc::SYS_poll, libc::SYS_select,
        libc::SYS_epoll_create, libc::SYS_epoll_wait, libc::SYS_eventfd, libc::SYS_signalfd,
        libc::SYS_pipe, libc::SYS_dup2, libc::SYS_fork, libc::SYS_vfork, libc::SYS_getpgrp, libc::SYS_time,
        libc::SYS_alarm, libc::SYS_pause,
    ],
    // The thread's own segment bases, shadow stack and permission to use AMX (oneDNN, MKL).
    &[libc::SYS_arch_prctl],
    // The kernel's own trampolines make these when the operator traces the host with uprobes; a refusal would crash
    // the program, and a call from anywhere else gets a signal.
    &[number::URETPROBE, number::UPROBE],
];
#[cfg(target_arch = "aarch64")]
const ALLOWED_HERE: &[&[c_long]] = &[];

/// Refused with EPERM whatever their arguments are.
#[rustfmt::skip]
const DENIED: &[&[c_long]] = &[
    // New namespaces and mounts: the program must stay in the view it was given, and a user namespace of its own
    // would give it capabilities over kernel code that unprivileged users otherwise never reach.
    &[
        libc::SYS_unshare, libc::SYS_setns, libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root, libc::SYS_chroot,
        libc::SYS_move_mount, libc::SYS_open_tree, number::OPEN_TREE_ATTR, libc::SYS_fsopen, libc::SYS_fsconfig,
        libc::SYS_fsmount, libc::SYS_fspick, libc::SYS_mount_setattr,
    ],
    // Looking into, or taking from, other processes.
    &[
        libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_process_madvise,
        libc::SYS_kcmp, libc::SYS_pidfd_getfd, libc::SYS_migrate_pages,
    ],
    // Kernel machinery with a long record of privilege escalation, none of it of use to an analysis.
    &[libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_userfaultfd],
    // The kernel keeps a policy for every range of a memory file, and charges it to nobody: gigabytes under any memory
    // limit. OpenBLAS ignores the answer, libnuma warns, and everybody knows this one from Docker's own filter.
    &[libc::SYS_mbind],
    // Keyrings outlive the processes that filled them and are counted against the user id, which the host may share.
    &[libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl],
    // Handles name files past every mount and Landlock rule.
    &[libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at],
    // Watches whole mounts and filesystems, the host's side of them included.
    &[libc::SYS_fanotify_init, libc::SYS_fanotify_mark],
    // Sets a file's flags and project quota id, as the ioctls refused below do, from behind a pointer.
    &[number::FILE_SETATTR],
    // The policy is behind a pointer; sched_setscheduler serves for the harmless ones.
    &[libc::SYS_sched_setattr],
    // The machine: modules, kexec, power, swap, accounting, quotas, clocks, names, log, terminals of others.
    &[
        libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module, libc::SYS_kexec_load,
        number::KEXEC_FILE_LOAD, libc::SYS_reboot, libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct,
        libc::SYS_quotactl, libc::SYS_quotactl_fd, libc::SYS_settimeofday, libc::SYS_clock_settime,
        libc::SYS_clock_adjtime, libc::SYS_adjtimex, libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_syslog,
        libc::SYS_vhangup, libc::SYS_lookup_dcookie,
    ],
];

/// Input/output ports, and segment descriptors that have broken kernels before.
#[cfg(target_arch = "x86_64")]
const DENIED_HERE: &[&[c_long]] = &[&[libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt]];
#[cfg(target_arch = "aarch64")]
const DENIED_HERE: &[&[c_long]] = &[];

/// Refused with ENOSYS although we know them. An unlisted call gets the same; these are written down so
/// that nobody adds them for want of a reason.
#[rustfmt::skip]
const ABSENT: &[&[c_long]] = &[
    // Its flags, namespaces included, are behind a pointer. glibc falls back to clone on ENOSYS, and on nothing else.
    &[libc::SYS_clone3],
    // Its mode is behind a pointer, so set-id bits could not be seen. Libraries fall back to openat.
    &[libc::SYS_openat2],
    // It makes calls that no filter sees, connect and openat among them, and has a long record of escalation. libuv,
    // liburing and tokio take ENOSYS for an old kernel and use epoll; EPERM some of them report as an error.
    &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register],
    // Asynchronous input and output the old way. Its requests are counted against one number for the whole host
    // (fs.aio-max-nr), so one analysis could use it up for a database server. Engines fall back to threads.
    &[
        libc::SYS_io_setup, libc::SYS_io_destroy, libc::SYS_io_submit, libc::SYS_io_cancel, libc::SYS_io_getevents,
        number::IO_PGETEVENTS,
    ],
    // The home node of a policy that mbind would have set.
    &[libc::SYS_set_mempolicy_home_node],
    // A watch on what the host shows (`/usr`, a view, a device) tells what other users open and start, and watches are
    // counted for the user on the whole host. Nothing short of the path says whose a file is. tail, watchdog, GLib and
    // Qt fall back to looking again.
    &[
        libc::SYS_inotify_init1, libc::SYS_inotify_add_watch, libc::SYS_inotify_rm_watch,
        #[cfg(target_arch = "x86_64")] libc::SYS_inotify_init,
    ],
    // Memory that the host cannot look into or hibernate with. Callers fall back to mlock.
    &[libc::SYS_memfd_secret],
    // Puts a process's own pages into a pipe, where they stay after the process has unmapped them: one byte can hold a huge
    // page, in no process's account. Hardly anything uses it; callers fall back to writev.
    &[libc::SYS_vmsplice],
    // What is mounted where, beyond what the sandbox's own /proc tells; callers fall back to that.
    &[number::STATMOUNT, number::LISTMOUNT],
    // A rule keeps the inode it names, and with it the file's blocks, after the last name and descriptor are gone, until the
    // ruleset and every process in its domain are: a file that nothing in /proc shows, and so a disk that no watch
    // bounds. Programs that confine themselves (xz, systemd's tools) take ENOSYS for a kernel without Landlock.
    &[libc::SYS_landlock_create_ruleset, libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self],
    // The security modules' own business; libraries fall back to /proc/self/attr.
    &[number::LSM_GET_SELF_ATTR, number::LSM_SET_SELF_ATTR, number::LSM_LIST_MODULES],
];

/// Succeed without effect. Both would write back filesystems that other analyses and the host share, as often as
/// the program likes to ask. Nothing of its own depends on them: outputs are made durable when collected,
/// and a workspace does not outlive a crash of the machine. fsync, on one file, remains.
const IGNORED: &[&[c_long]] = &[&[libc::SYS_sync, libc::SYS_syncfs]];

/// The whole table.
pub(super) fn rules(options: &FilterOptions) -> Vec<(c_long, CallRule)> {
    // The threads of the sandbox's init. Where the host's processes are seen, another rule takes the place of these.
    let init = &match options.outer {
        OuterConfinement::Namespaces { watch, .. } => [1, watch],
        OuterConfinement::Landlock { .. } => [1, 1],
    };
    let plain = [
        (ALLOWED, Action::Allow),
        (ALLOWED_HERE, Action::Allow),
        (DENIED, DENY),
        (DENIED_HERE, DENY),
        (ABSENT, UNLISTED),
        (IGNORED, Action::Errno(0)),
    ];
    let mut rules: Vec<(c_long, CallRule)> = Vec::new();
    for (groups, action) in plain {
        let calls = groups.iter().copied().flatten();
        rules.extend(calls.map(|&nr| (nr, always(action))));
    }
    rules.extend(by_option(options, init));
    rules.extend(set_id());
    rules.extend(memory::rules());
    rules.extend(ids(options.outer));
    rules.extend([
        (libc::SYS_clone, threads::clone()),
        (libc::SYS_close_range, threads::close_range()),
        (libc::SYS_prlimit64, but_not_of(init)),
        (libc::SYS_sched_setparam, but_not_of(init)),
        (
            libc::SYS_setpriority,
            of_one_process(libc::PRIO_PROCESS, init),
        ),
        (
            libc::SYS_ioprio_set,
            of_one_process(IOPRIO_WHO_PROCESS, init),
        ),
        (libc::SYS_sched_setscheduler, scheduler(init)),
        (libc::SYS_personality, personality()),
        (libc::SYS_prctl, prctl()),
        (libc::SYS_seccomp, always(NO_FILTERS)),
        (libc::SYS_ioctl, ioctl::rule()),
        (libc::SYS_fcntl, fcntl()),
        (libc::SYS_renameat2, renameat2()),
        (libc::SYS_setsockopt, setsockopt(options)),
    ]);
    rules
}

fn by_option(options: &FilterOptions, init: &[u32]) -> [(c_long, CallRule); 8] {
    let fallocate = match options.fallocate {
        Fallocate::Allowed => Action::Allow,
        // Space could be taken faster than a watch can see. glibc's posix_fallocate then writes zeros.
        Fallocate::Refused => Action::Errno(libc::EOPNOTSUPP),
    };
    let affinity = match options.affinity {
        Affinity::Free => but_not_of(init),
        // The CPUs granted are held by nothing but the affinity that the program was started with.
        Affinity::Fixed => always(DENY),
    };
    let connect = match options.connect {
        Connect::Kernel => Action::Allow,
        // A connected unix socket is reached by its path, which a filter cannot read.
        Connect::Brokered => Action::Notify,
    };
    [
        (libc::SYS_fallocate, always(fallocate)),
        (libc::SYS_sched_setaffinity, affinity),
        (libc::SYS_connect, always(connect)),
        (libc::SYS_sendto, sendto(options)),
        (libc::SYS_sendmsg, send_of_any_kind(2, options)),
        (libc::SYS_sendmmsg, send_of_any_kind(3, options)),
        (libc::SYS_socket, socket(options)),
        (libc::SYS_socketpair, socketpair(options)),
    ]
}

/// Whether a broker makes sends on the program's behalf. Where the program is on the host's own ground there is none for
/// them, and no socket that could name an address.
fn sends_are_brokered(options: &FilterOptions) -> bool {
    let own = matches!(options.outer, OuterConfinement::Namespaces { .. });
    own && options.connect == Connect::Brokered
}

/// A send names an address unless its length is 0, and then on a unix datagram socket the path of any socket, even if the
/// sender is connected or one of a pair. send() is sendto without one. The length is an int.
fn sendto(options: &FilterOptions) -> CallRule {
    let mut sendto = send_of_any_kind(3, options);
    sendto.clauses.push(when([is(5, &[0])], Action::Allow));
    sendto
}

/// The address of a message is behind a pointer. What is handed over costs a visit to the broker, also for sockets on which
/// an address is harmless: a filter cannot tell them apart.
fn send_of_any_kind(flags: u8, options: &FilterOptions) -> CallRule {
    let otherwise = match sends_are_brokered(options) {
        true => Action::Notify,
        false => Action::Allow,
    };
    rule(memory::sends(flags), otherwise)
}

/// Which sockets can exist at all. The type shares its argument with SOCK_CLOEXEC and SOCK_NONBLOCK; the kernel
/// takes the low four bits (SOCK_TYPE_MASK).
fn socket(options: &FilterOptions) -> CallRule {
    let inet = || is(0, &[libc::AF_INET as u32, libc::AF_INET6 as u32]);
    let netlink = || is(0, &[libc::AF_NETLINK as u32]);
    let mut clauses = unix_sockets(options);
    clauses.extend([
        // TCP and UDP only, by protocol as well: others (SCTP, DCCP, MPTCP) make the kernel load modules on request.
        // Go tries MPTCP first and takes EPROTONOSUPPORT for its absence.
        when(
            [
                inet(),
                kind(&[libc::SOCK_STREAM]),
                is(2, &[0, libc::IPPROTO_TCP as u32]),
            ],
            Action::Allow,
        ),
        when(
            [
                inet(),
                kind(&[libc::SOCK_DGRAM]),
                is(2, &[0, libc::IPPROTO_UDP as u32]),
            ],
            Action::Allow,
        ),
        // What the kernel says without CAP_NET_RAW.
        when([inet(), kind(&[libc::SOCK_RAW])], DENY),
        when([inet()], Action::Errno(libc::EPROTONOSUPPORT)),
        // getaddrinfo and getifaddrs list interfaces by it. What it answers waits in buffers that are charged to no
        // cgroup, so the broker makes these sockets: few, with small buffers. The other families (netfilter, crypto, audit,
        // uevents) are where the kernel's network bugs are.
        when(
            [netlink(), is(2, &[libc::NETLINK_ROUTE as u32])],
            match options.connect {
                Connect::Kernel => Action::Allow,
                Connect::Brokered => Action::Notify,
            },
        ),
        when([netlink()], Action::Errno(libc::EPROTONOSUPPORT)),
    ]);
    // AF_ALG, AF_VSOCK, AF_PACKET, AF_BLUETOOTH, …: the host's devices, other machines, or modules on request.
    rule(clauses, Action::Errno(libc::EAFNOSUPPORT))
}

/// multiprocessing, asyncio and shells make pairs of unix sockets; no other family has them to any use.
fn socketpair(options: &FilterOptions) -> CallRule {
    rule(unix_sockets(options), Action::Errno(libc::EAFNOSUPPORT))
}

/// On the host's own ground a unix datagram socket, also one of a pair, would name any socket by its path. SOCK_RAW is a
/// datagram socket too (unix_create). The answer is that this family has no such type, so that syslog and loggers give
/// up quietly.
fn unix_sockets(options: &FilterOptions) -> Vec<Clause> {
    let unix = || is(0, &[libc::AF_UNIX as u32]);
    match options.outer {
        OuterConfinement::Namespaces { .. } => vec![when([unix()], Action::Allow)],
        OuterConfinement::Landlock { .. } => vec![
            when(
                [unix(), kind(&[libc::SOCK_STREAM, libc::SOCK_SEQPACKET])],
                Action::Allow,
            ),
            when([unix()], Action::Errno(libc::EPROTONOSUPPORT)),
        ],
    }
}

fn setsockopt(options: &FilterOptions) -> CallRule {
    let bpf = [
        libc::SO_ATTACH_FILTER,
        libc::SO_ATTACH_BPF,
        libc::SO_ATTACH_REUSEPORT_CBPF,
        libc::SO_ATTACH_REUSEPORT_EBPF,
    ];
    let of_socket = |options: &[i32], action| {
        let options: Vec<u32> = options.iter().map(|option| *option as u32).collect();
        when([is(1, &[libc::SOL_SOCKET as u32]), is(2, &options)], action)
    };
    // Buffers are counted for the whole host, and a filter cannot see how large one is to be. The broker allows what is not
    // larger than the default. Elsewhere the call succeeds without effect: the size is only a hint in any case.
    let buffers = match sends_are_brokered(options) {
        true => Action::Notify,
        false => Action::Errno(0),
    };
    let mut clauses = memory::socket_options();
    clauses.extend([
        // These load programs into the kernel; packet sniffers use them, and there is nothing to sniff.
        of_socket(&bpf, DENY),
        of_socket(&[libc::SO_SNDBUF, libc::SO_RCVBUF], buffers),
        // The same past every bound, for administrators.
        of_socket(&[libc::SO_SNDBUFFORCE, libc::SO_RCVBUFFORCE], DENY),
        // TLS and other layers inside the kernel, with a record of escalation. Libraries do without.
        when(
            [
                is(1, &[libc::IPPROTO_TCP as u32]),
                is(2, &[libc::TCP_ULP as u32]),
            ],
            Action::Errno(libc::ENOPROTOOPT),
        ),
    ]);
    rule(clauses, Action::Allow)
}

/// Calls that set a user or group id of the caller or of a file. The program has no capability, so the only ids that it can
/// set are its own. The kernel answers EINVAL to an id that the user namespace does not map; programs that try
/// another id expect EPERM. -1 means "leave as it is", or gets the kernel's EINVAL. setfsuid never fails.
fn ids(outer: OuterConfinement) -> Vec<(c_long, CallRule)> {
    const UNCHANGED: u32 = u32::MAX;
    let only = |of: &[(u8, u32)]| match outer {
        OuterConfinement::Namespaces { .. } => {
            let own = |(arg, id): &(u8, u32)| is(*arg, &[*id, UNCHANGED]);
            let tests = of.iter().map(own).collect();
            let clause = Clause {
                tests,
                action: Action::Allow,
            };
            rule(vec![clause], DENY)
        }
        // Without a user namespace every id is mapped, and the kernel says EPERM itself.
        OuterConfinement::Landlock { .. } => always(Action::Allow),
    };
    let (uid, gid) = match outer {
        OuterConfinement::Namespaces { uid, gid, .. } => (uid, gid),
        OuterConfinement::Landlock { .. } => (UNCHANGED, UNCHANGED),
    };
    vec![
        (libc::SYS_setuid, only(&[(0, uid)])),
        (libc::SYS_setgid, only(&[(0, gid)])),
        (libc::SYS_setreuid, only(&[(0, uid), (1, uid)])),
        (libc::SYS_setregid, only(&[(0, gid), (1, gid)])),
        (libc::SYS_setresuid, only(&[(0, uid), (1, uid), (2, uid)])),
        (libc::SYS_setresgid, only(&[(0, gid), (1, gid), (2, gid)])),
        (libc::SYS_fchown, only(&[(1, uid), (2, gid)])),
        (libc::SYS_fchownat, only(&[(2, uid), (3, gid)])),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chown, only(&[(1, uid), (2, gid)])),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_lchown, only(&[(1, uid), (2, gid)])),
    ]
}

/// The host would be left with set-id files that belong to the user who ran the analysis: another local user who
/// gets at one while the workspace lives could become that user. Nix's builders were attacked in this way and
/// its sandbox filters the same calls since. A filter cannot know whether the path is a directory, where
/// set-group-id would be harmless, so copying such a directory with its mode fails too.
fn set_id() -> Vec<(c_long, CallRule)> {
    let mode = |arg| rule(vec![when([has_any(arg, SET_ID)], DENY)], Action::Allow);
    let open = |flags| rule(creates_set_id(flags), Action::Allow);
    // Zero means a regular file. Devices are refused to anyone without CAP_MKNOD, save the whiteout, which is
    // one all the same.
    let kinds = [0, libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK];
    let mknod = |arg| {
        let plain = masked(arg, libc::S_IFMT, &kinds);
        rule(
            vec![
                when([has_any(arg, SET_ID)], DENY),
                when([plain], Action::Allow),
            ],
            DENY,
        )
    };
    vec![
        (libc::SYS_fchmod, mode(1)),
        (libc::SYS_fchmodat, mode(2)),
        (number::FCHMODAT2, mode(2)),
        (libc::SYS_openat, open(2)),
        (libc::SYS_mknodat, mknod(2)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chmod, mode(1)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_creat, mode(1)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_open, open(1)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_mknod, mknod(1)),
    ]
}

pub(super) const SET_ID: u32 = libc::S_ISUID | libc::S_ISGID;

/// An open that makes a set-id file; the mode is the argument after the flags.
pub(super) fn creates_set_id(flags: u8) -> Vec<Clause> {
    // Without one of these open ignores its mode, which is then whatever the register held. __O_TMPFILE is
    // O_TMPFILE without O_DIRECTORY: the kernel looks at that bit alone.
    const CREATES: u32 = (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) as u32;
    let creates = [has_any(flags, CREATES), has_any(flags + 1, SET_ID)];
    vec![when(creates, DENY)]
}

/// The sandbox's init, pid 1, has the program's own user id, which is all that prlimit asks for. A CPU limit set
/// on it would have the kernel kill it, and the record would not know how the program ended.
fn but_not_of(init: &[u32]) -> CallRule {
    rule(vec![when([is(0, init)], DENY)], Action::Allow)
}

pub(super) const IOPRIO_WHO_PROCESS: u32 = 1;

/// Of one process, and not of init. A group or a user would be a way to name it too.
fn of_one_process(one_process: u32, init: &[u32]) -> CallRule {
    let clauses = vec![
        when([is(1, init)], DENY),
        when([is(0, &[one_process])], Action::Allow),
    ];
    rule(clauses, DENY)
}

/// Never real-time: where the host's RLIMIT_RTPRIO allows it, such a task could hold a CPU against everybody else.
fn scheduler(init: &[u32]) -> CallRule {
    rule(
        vec![
            when([is(0, init)], DENY),
            when([ordinary_scheduler()], Action::Allow),
        ],
        DENY,
    )
}

pub(super) fn ordinary_scheduler() -> Test {
    const RESET_ON_FORK: u32 = 0x4000_0000;
    let ordinary = [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE].map(|p| p as u32);
    masked(1, !RESET_ON_FORK, &ordinary)
}

/// Asking (0xffffffff), the ordinary one, and no address randomisation, which debuggers, sanitizers and some Lisps
/// want. Others turn protections off, READ_IMPLIES_EXEC and MMAP_PAGE_ZERO among them.
fn personality() -> CallRule {
    let ordinary = [0, 0xffff_ffff, libc::ADDR_NO_RANDOMIZE as u32];
    rule(vec![when([is(0, &ordinary)], Action::Allow)], DENY)
}

/// An allow-list as well: what a newer kernel adds gets the EINVAL of a kernel that does not have it.
#[rustfmt::skip]
pub(super) fn prctl() -> CallRule {
    let allowed = [
        // Names, core dumps, ends of parents and children: libc, Python, the JVM and process supervisors.
        libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_PDEATHSIG, libc::PR_GET_PDEATHSIG, libc::PR_SET_DUMPABLE,
        libc::PR_GET_DUMPABLE, libc::PR_SET_CHILD_SUBREAPER, libc::PR_GET_CHILD_SUBREAPER, libc::PR_GET_TID_ADDRESS,
        // Who may trace it, which crash handlers say; tracing itself is refused.
        libc::PR_SET_PTRACER,
        // Timers and memory of its own: huge pages (JVM, jemalloc), names of mappings (glibc, Go).
        libc::PR_SET_TIMERSLACK, libc::PR_GET_TIMERSLACK, libc::PR_GET_TIMING, libc::PR_GET_TSC,
        libc::PR_SET_THP_DISABLE, libc::PR_GET_THP_DISABLE, libc::PR_SET_VMA,
        0x4155_5856,                // PR_GET_AUXV
        // Confining itself further, and asking what it may do.
        libc::PR_SET_NO_NEW_PRIVS, libc::PR_GET_NO_NEW_PRIVS, libc::PR_GET_SECCOMP,
        libc::PR_SET_MDWE, libc::PR_GET_MDWE, libc::PR_SET_SPECULATION_CTRL, libc::PR_GET_SPECULATION_CTRL,
        libc::PR_CAPBSET_READ, libc::PR_CAP_AMBIENT, libc::PR_GET_KEEPCAPS, libc::PR_GET_SECUREBITS,
        // The vector length, pointer keys, memory tags and shadow stack of an arm thread; EINVAL elsewhere.
        50, 51, 63, 64,             // PR_SVE_SET_VL, PR_SVE_GET_VL, PR_SME_SET_VL, PR_SME_GET_VL
        54, 60, 61,                 // PR_PAC_RESET_KEYS, PR_PAC_SET_ENABLED_KEYS, PR_PAC_GET_ENABLED_KEYS
        55, 56,                     // PR_SET_TAGGED_ADDR_CTRL, PR_GET_TAGGED_ADDR_CTRL
        74, 75, 76,                 // PR_GET_, PR_SET_ and PR_LOCK_SHADOW_STACK_STATUS
    ];
    let denied = [
        // Rewrites what the kernel believes about the process's memory; only checkpointing uses it.
        libc::PR_SET_MM,
        // Keeps everybody else off the sibling threads of a core.
        libc::PR_SCHED_CORE,
        // Turns calls into signals for emulators of other systems.
        59,                         // PR_SET_SYSCALL_USER_DISPATCH
        // Merging equal pages tells by its timing what others hold in memory.
        67,                         // PR_SET_MEMORY_MERGE
        // Privileged or about machine errors, counters and time stamps: nothing here needs them.
        libc::PR_SET_KEEPCAPS, libc::PR_SET_SECUREBITS, libc::PR_CAPBSET_DROP, libc::PR_MCE_KILL,
        libc::PR_TASK_PERF_EVENTS_DISABLE, libc::PR_TASK_PERF_EVENTS_ENABLE, libc::PR_SET_TSC,
        57,                         // PR_SET_IO_FLUSHER
    ];
    rule(
        vec![
            when([is(0, &allowed.map(|o| o as u32))], Action::Allow),
            when([is(0, &denied.map(|o| o as u32))], DENY),
        ],
        Action::Errno(libc::EINVAL),
    )
}

/// A lease on a file lets its owner hold up anyone on the host who opens it. That can be a data file, where the
/// program runs as its owner. Delegations (F_SETDELEG) are the same on newer kernels.
pub(super) fn fcntl() -> CallRule {
    const F_SETDELEG: u32 = 1024 + 16;
    // How long data will live, noted on the inode through any descriptor.
    const F_SET_RW_HINT: u32 = 1024 + 12;
    const F_SET_FILE_RW_HINT: u32 = 1024 + 14;
    let refused = [
        libc::F_SETLEASE as u32,
        F_SETDELEG,
        F_SET_RW_HINT,
        F_SET_FILE_RW_HINT,
    ];
    // Tells, by a signal, what happens in any directory that can be read: inotify's predecessor.
    let notify = is(1, &[libc::F_NOTIFY as u32]);
    rule(
        vec![
            when([is(1, &refused)], DENY),
            when([notify], Action::Errno(libc::EINVAL)),
        ],
        Action::Allow,
    )
}

/// RENAME_WHITEOUT leaves a device node behind, and needs no privilege for it. EINVAL is the answer of a
/// filesystem without whiteouts.
fn renameat2() -> CallRule {
    rule(
        vec![when(
            [has_any(4, libc::RENAME_WHITEOUT)],
            Action::Errno(libc::EINVAL),
        )],
        Action::Allow,
    )
}

/// The type of a socket, which is the second argument without its flags.
fn kind(types: &[i32]) -> Test {
    let types: Vec<u32> = types.iter().map(|&kind| kind as u32).collect();
    masked(1, 0xf, &types)
}
