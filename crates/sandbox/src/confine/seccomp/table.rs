//! The reviewed list: the action for each system call, with its reason beside it.
//!
//! The list is an allow-list. A call that it does not name gets [`UNLISTED`], so a call that a newer kernel adds is
//! refused until somebody has reviewed it. A refusal is always an errno, never a kill, because libraries probe for
//! calls and fall back. ENOSYS means "this kernel has no such call", for which fallbacks check. EPERM means
//! "refused", for calls whose callers should report a refusal.
//!
//! Arguments are compared by their low 32 bits. Every argument compared here is an `int`, an `unsigned int` or a
//! `umode_t` in the kernel, which ignores the upper half. Comparing the upper half would let garbage there bypass a
//! rule. clone(2) takes a long, of which the kernel uses `lower_32_bits`.

use libc::c_long;

use super::assembler::CAPACITY;
use super::rule::{Action, CallRule, Clause, DENY, Test};
use super::rule::{always, has_any, is, masked, only_when, rule, when};
use super::{Affinity, Connect, Fallocate, FilterOptions, OuterConfinement};
use super::{ioctl, memory, number, threads};

pub(super) const UNLISTED: Action = Action::Errno(libc::ENOSYS);
/// The program may install no filter of its own, by seccomp(2) or PR_SET_SECCOMP. The kernel compiles each filter to
/// machine code, for which the whole host has one bound (net.core.bpf_jit_limit). A process may install eight filters
/// of full length, half a megabyte, and the next process that needs a filter, a browser or another analysis, would be
/// refused. Also, no listener of the program can answer instead of Fumehood's. EINVAL is the answer of a kernel without
/// filters: man and Firefox continue.
const NO_FILTERS: Action = Action::Errno(libc::EINVAL);

/// Calls that are allowed whatever their arguments.
#[rustfmt::skip]
const ALLOWED: &[&[c_long]] = &[
    // Input and output on descriptors that the program holds. Mounts and Landlock decide which files it may open.
    &[
        libc::SYS_read, libc::SYS_write, libc::SYS_pread64, libc::SYS_pwrite64, libc::SYS_readv, libc::SYS_writev,
        libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_lseek,
        libc::SYS_sendfile, libc::SYS_tee, libc::SYS_copy_file_range,
        libc::SYS_close, libc::SYS_dup, libc::SYS_dup3, libc::SYS_pipe2,
        libc::SYS_fsync, libc::SYS_fdatasync, number::SYNC_FILE_RANGE, libc::SYS_truncate, libc::SYS_ftruncate,
        libc::SYS_readahead, libc::SYS_fadvise64, number::CACHESTAT, libc::SYS_flock,
    ],
    // Names, directories and metadata of files.
    &[
        libc::SYS_newfstatat, libc::SYS_fstat, libc::SYS_statx, libc::SYS_statfs, libc::SYS_fstatfs,
        libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_readlinkat, libc::SYS_getdents64, libc::SYS_getcwd,
        libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_unlinkat, number::RENAMEAT, libc::SYS_linkat, libc::SYS_symlinkat,
        libc::SYS_utimensat, libc::SYS_umask, number::FILE_GETATTR,
    ],
    // A new directory cannot be set-id: the kernel masks the mode with 01777 (vfs_mkdir).
    &[libc::SYS_mkdirat],
    // Attributes in `user.` and access lists of the program's own files. `security.` and `trusted.` need
    // capabilities.
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
    // The program's own memory. The cgroup and RLIMIT_MEMLOCK bound its size; memory keys and shadow stacks only
    // tighten. `memory.rs` has the calls that depend on flags.
    &[
        libc::SYS_munmap, libc::SYS_mremap, libc::SYS_mprotect, libc::SYS_msync, libc::SYS_mincore, libc::SYS_brk,
        libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_munlock, libc::SYS_mlockall, libc::SYS_munlockall,
        libc::SYS_pkey_mprotect, libc::SYS_pkey_alloc, libc::SYS_pkey_free, number::MSEAL, number::MAP_SHADOW_STACK,
        libc::SYS_membarrier,
    ],
    // Placing a thread's memory on NUMA nodes: numactl, hwloc, the JVM. Each thread has one policy, and threads are
    // limited. Moving another process's pages needs the right to trace it.
    &[libc::SYS_get_mempolicy, libc::SYS_set_mempolicy, libc::SYS_move_pages],
    // System V and POSIX queues, semaphores and shared memory. They end with the IPC namespace.
    &[
        libc::SYS_shmat, libc::SYS_shmdt, libc::SYS_shmctl, libc::SYS_semget, libc::SYS_semop,
        libc::SYS_semtimedop, libc::SYS_semctl, libc::SYS_msgget, libc::SYS_msgsnd, libc::SYS_msgrcv,
        libc::SYS_msgctl, libc::SYS_mq_open, libc::SYS_mq_unlink, libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive,
        libc::SYS_mq_notify, libc::SYS_mq_getsetattr,
    ],
    // Threads, and what libc sets up for each.
    &[
        libc::SYS_futex, libc::SYS_futex_waitv, number::FUTEX_WAKE, number::FUTEX_WAIT, number::FUTEX_REQUEUE,
        libc::SYS_set_robust_list, libc::SYS_set_tid_address, libc::SYS_rseq, libc::SYS_gettid, libc::SYS_getcpu,
    ],
    // Executing programs and waiting for children. no_new_privs makes set-id bits and file capabilities ineffective.
    &[
        libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_wait4, libc::SYS_waitid,
        libc::SYS_getpid, libc::SYS_getppid, libc::SYS_getpgid, libc::SYS_setpgid, libc::SYS_getsid, libc::SYS_setsid,
        libc::SYS_pidfd_open,
    ],
    // Signals. The pid namespace and Landlock decide which processes they reach.
    &[
        libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill, libc::SYS_pidfd_send_signal, libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask, libc::SYS_rt_sigpending, libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo, libc::SYS_rt_sigsuspend, libc::SYS_rt_sigreturn, libc::SYS_sigaltstack,
    ],
    // The kernel itself resumes an interrupted sleep through this call.
    &[libc::SYS_restart_syscall],
    // The program's ids. It has no capability, so it can only set the ids it already has; `id_rules` below has the
    // other calls.
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
    // Reading scheduling parameters. `rules` below has the calls that change them.
    &[
        libc::SYS_sched_yield, libc::SYS_sched_getaffinity, libc::SYS_sched_getparam, libc::SYS_sched_getscheduler,
        libc::SYS_sched_getattr, libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min,
        libc::SYS_sched_rr_get_interval, libc::SYS_getpriority, libc::SYS_ioprio_get,
    ],
    // The program's own limits and usage. Without CAP_SYS_RESOURCE it can only lower hard limits.
    &[number::GETRLIMIT, number::SETRLIMIT, libc::SYS_getrusage],
    // Facts about the system that /proc shows as well, and random bytes.
    &[libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrandom],
    // Operations on open sockets. `socket` and `socketpair` below decide which kinds can exist, and `rules_by_option`
    // which sends may name an address. io_uring, which could connect unseen, is refused. socketcall belongs to the
    // i386 ABI.
    &[
        libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4, libc::SYS_getsockname,
        libc::SYS_getpeername, libc::SYS_getsockopt, libc::SYS_shutdown, libc::SYS_recvfrom, libc::SYS_recvmsg, libc::SYS_recvmmsg,
    ],
];

/// Older forms of calls, which only x86_64 has. aarch64's libraries use the forms above.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const ALLOWED_ON_THIS_ARCH: &[&[c_long]] = &[
    // Same reasons as for the newer forms above.
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
    // The kernel's own trampolines make these calls when the operator traces the host with uprobes. A refusal would
    // crash the program. A call from anywhere else gets a signal from the kernel.
    &[number::URETPROBE, number::UPROBE],
];
#[cfg(target_arch = "aarch64")]
const ALLOWED_ON_THIS_ARCH: &[&[c_long]] = &[];

/// Calls that are refused with EPERM whatever their arguments.
#[rustfmt::skip]
const DENIED: &[&[c_long]] = &[
    // New namespaces and mounts. The program must stay in the view that it was given, and a user namespace of its own
    // would give it capabilities over kernel code that unprivileged users otherwise never reach.
    &[
        libc::SYS_unshare, libc::SYS_setns, libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root, libc::SYS_chroot,
        libc::SYS_move_mount, libc::SYS_open_tree, number::OPEN_TREE_ATTR, libc::SYS_fsopen, libc::SYS_fsconfig,
        libc::SYS_fsmount, libc::SYS_fspick, libc::SYS_mount_setattr,
    ],
    // Inspecting other processes, or taking memory or descriptors from them.
    &[
        libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_process_madvise,
        libc::SYS_kcmp, libc::SYS_pidfd_getfd, libc::SYS_migrate_pages,
    ],
    // Kernel subsystems with a long record of privilege escalation. An analysis needs none of them.
    &[libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_userfaultfd],
    // The kernel keeps a policy for every range of a memory file and charges it to nobody: gigabytes under any memory
    // limit. OpenBLAS ignores the error and libnuma warns. Docker's own filter refuses the call too, so programs cope
    // with EPERM.
    &[libc::SYS_mbind],
    // Keyrings outlive the processes that filled them and count against the user id, which the host may share.
    &[libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl],
    // File handles open files without regard to mounts or Landlock rules.
    &[libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at],
    // fanotify watches whole mounts and file systems, including the host's side of them.
    &[libc::SYS_fanotify_init, libc::SYS_fanotify_mark],
    // Sets a file's flags and project id, as the ioctls refused in `ioctl.rs` do, but from behind a pointer.
    &[number::FILE_SETATTR],
    // The scheduling policy is behind a pointer. sched_setscheduler serves the harmless policies.
    &[libc::SYS_sched_setattr],
    // Administration of the machine: modules, kexec, power, swap, accounting, quotas, clocks, names, log, foreign
    // terminals.
    &[
        libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module, libc::SYS_kexec_load,
        number::KEXEC_FILE_LOAD, libc::SYS_reboot, libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct,
        libc::SYS_quotactl, libc::SYS_quotactl_fd, libc::SYS_settimeofday, libc::SYS_clock_settime,
        libc::SYS_clock_adjtime, libc::SYS_adjtimex, libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_syslog,
        libc::SYS_vhangup, libc::SYS_lookup_dcookie,
    ],
];

/// I/O ports, and segment descriptors, which have caused kernel bugs before.
#[cfg(target_arch = "x86_64")]
const DENIED_ON_THIS_ARCH: &[&[c_long]] =
    &[&[libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt]];
#[cfg(target_arch = "aarch64")]
const DENIED_ON_THIS_ARCH: &[&[c_long]] = &[];

/// Calls that are known and get ENOSYS, as an unlisted call does. They are listed with their reasons so that nobody
/// allows them by mistake.
#[rustfmt::skip]
const ABSENT: &[&[c_long]] = &[
    // Its flags, namespaces included, are behind a pointer. glibc falls back to clone on ENOSYS only.
    &[libc::SYS_clone3],
    // Its mode is behind a pointer, so the filter could not see set-id bits. Libraries fall back to openat.
    &[libc::SYS_openat2],
    // io_uring makes calls that no filter sees, among them connect and openat, and has a long record of escalation.
    // libuv, liburing and tokio take ENOSYS for an old kernel and use epoll; some of them report EPERM as an error.
    &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register],
    // Linux AIO. Its requests count against one number for the whole host (fs.aio-max-nr), so one analysis could
    // exhaust it for a database server. I/O engines fall back to threads.
    &[
        libc::SYS_io_setup, libc::SYS_io_destroy, libc::SYS_io_submit, libc::SYS_io_cancel, libc::SYS_io_getevents,
        number::IO_PGETEVENTS,
    ],
    // The home node of a policy that mbind, which is refused, would have set.
    &[libc::SYS_set_mempolicy_home_node],
    // An inotify watch on a shared path (`/usr`, a view, a device) reveals what other users open and start, and
    // watches count for the user on the whole host. A filter cannot read the path, so it cannot tell shared files
    // from the run's own. tail, watchdog, GLib and Qt fall back to polling.
    &[
        libc::SYS_inotify_init1, libc::SYS_inotify_add_watch, libc::SYS_inotify_rm_watch,
        #[cfg(target_arch = "x86_64")] libc::SYS_inotify_init,
    ],
    // Memory that the host cannot inspect or hibernate with. Callers fall back to mlock.
    &[libc::SYS_memfd_secret],
    // vmsplice puts a process's own pages into a pipe, where they stay after the process has unmapped them. One byte
    // can hold a huge page that no process's usage shows. Hardly any program uses it; callers fall back to writev.
    &[libc::SYS_vmsplice],
    // These list mounts in more detail than the sandbox's own /proc. Callers fall back to /proc.
    &[number::STATMOUNT, number::LISTMOUNT],
    // A Landlock rule keeps the inode it names, and with it the file's blocks, after the last name and descriptor are
    // gone, until the ruleset and every process in its domain are gone. /proc shows no such file, so no watch could
    // bound the disk usage. Programs that confine themselves (xz, systemd's tools) take ENOSYS for a kernel without
    // Landlock.
    &[libc::SYS_landlock_create_ruleset, libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self],
    // Administration of security modules. Libraries fall back to /proc/self/attr.
    &[number::LSM_GET_SELF_ATTR, number::LSM_SET_SELF_ATTR, number::LSM_LIST_MODULES],
];

/// Calls that succeed without effect. Both would write back file systems that other analyses and the host share, as
/// often as the program asks. Nothing of the program depends on them: outputs are made durable when collected, and a
/// workspace does not outlive a crash of the machine. fsync, on one file, remains allowed.
const IGNORED: &[&[c_long]] = &[&[libc::SYS_sync, libc::SYS_syncfs]];

/// Returns the whole table.
pub(super) fn rules(options: &FilterOptions) -> Vec<(c_long, CallRule)> {
    // The thread ids of the sandbox's init. At level `landlock` other rules replace those that use these ids.
    let init = &match options.outer {
        OuterConfinement::Namespaces { watch, .. } => [1, watch],
        OuterConfinement::Landlock { .. } => [1, 1],
    };
    let plain = [
        (ALLOWED, Action::Allow),
        (ALLOWED_ON_THIS_ARCH, Action::Allow),
        (DENIED, DENY),
        (DENIED_ON_THIS_ARCH, DENY),
        (ABSENT, UNLISTED),
        (IGNORED, Action::Errno(0)),
    ];
    let mut rules: Vec<(c_long, CallRule)> = Vec::with_capacity(CAPACITY);
    for (groups, action) in plain {
        let calls = groups.iter().copied().flatten();
        rules.extend(calls.map(|&nr| (nr, always(action))));
    }
    rules.extend(rules_by_option(options, init));
    rules.extend(set_id_rules());
    rules.extend(memory::rules());
    rules.extend(id_rules(options.outer));
    rules.extend([
        (libc::SYS_clone, threads::clone()),
        (libc::SYS_close_range, threads::close_range()),
        (libc::SYS_prlimit64, deny_for_init(init)),
        (libc::SYS_sched_setparam, deny_for_init(init)),
        (
            libc::SYS_setpriority,
            one_process_but_not_init(libc::PRIO_PROCESS, init),
        ),
        (
            libc::SYS_ioprio_set,
            one_process_but_not_init(IOPRIO_WHO_PROCESS, init),
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

fn rules_by_option(options: &FilterOptions, init: &[u32]) -> [(c_long, CallRule); 8] {
    let fallocate = match options.fallocate {
        Fallocate::Allowed => Action::Allow,
        // fallocate could take space faster than the watch sees it. On EOPNOTSUPP glibc's posix_fallocate writes
        // zeros.
        Fallocate::Refused => Action::Errno(libc::EOPNOTSUPP),
    };
    let affinity = match options.affinity {
        Affinity::Free => deny_for_init(init),
        // Only the affinity that the program was started with enforces its share of CPUs.
        Affinity::Fixed => always(DENY),
    };
    let connect = match options.connect {
        Connect::Kernel => Action::Allow,
        // A unix socket is connected by a path, which a filter cannot read.
        Connect::Brokered => Action::Notify,
    };
    [
        (libc::SYS_fallocate, always(fallocate)),
        (libc::SYS_sched_setaffinity, affinity),
        (libc::SYS_connect, always(connect)),
        (libc::SYS_sendto, sendto(options)),
        (libc::SYS_sendmsg, send_rule(2, options)),
        (libc::SYS_sendmmsg, send_rule(3, options)),
        (libc::SYS_socket, socket(options)),
        (libc::SYS_socketpair, socketpair(options)),
    ]
}

/// Returns whether a broker makes sends on the program's behalf. At level `landlock` there is no such broker, and no
/// socket that could name an address.
fn sends_are_brokered(options: &FilterOptions) -> bool {
    let has_namespaces = matches!(options.outer, OuterConfinement::Namespaces { .. });
    has_namespaces && options.connect == Connect::Brokered
}

/// A send names an address unless the address length is 0. On a unix datagram socket the address is the path of any
/// socket, even if the sender is connected or one of a pair. send() is sendto without an address. The length is an
/// int.
fn sendto(options: &FilterOptions) -> CallRule {
    let mut sendto = send_rule(3, options);
    sendto.clauses.push(when([is(5, &[0])], Action::Allow));
    sendto
}

/// The address of a message is behind a pointer. Passing the call to the broker costs a round trip, even for sockets
/// on which an address is harmless, because a filter cannot tell the sockets apart.
fn send_rule(flags: u8, options: &FilterOptions) -> CallRule {
    let otherwise = match sends_are_brokered(options) {
        true => Action::Notify,
        false => Action::Allow,
    };
    rule(memory::send_clauses(flags), otherwise)
}

/// Which sockets can exist at all. The type shares its argument with SOCK_CLOEXEC and SOCK_NONBLOCK; the kernel uses
/// the low four bits (SOCK_TYPE_MASK).
fn socket(options: &FilterOptions) -> CallRule {
    let inet = || is(0, &[libc::AF_INET, libc::AF_INET6]);
    let netlink = || is(0, &[libc::AF_NETLINK]);
    let mut clauses = unix_sockets(options);
    clauses.extend([
        // Only TCP and UDP, also by protocol: for others (SCTP, DCCP, MPTCP) the kernel loads modules on request. Go
        // tries MPTCP first and takes EPROTONOSUPPORT for its absence.
        when(
            [
                inet(),
                socket_type(&[libc::SOCK_STREAM]),
                is(2, &[0, libc::IPPROTO_TCP]),
            ],
            Action::Allow,
        ),
        when(
            [
                inet(),
                socket_type(&[libc::SOCK_DGRAM]),
                is(2, &[0, libc::IPPROTO_UDP]),
            ],
            Action::Allow,
        ),
        // The kernel's own answer without CAP_NET_RAW.
        when([inet(), socket_type(&[libc::SOCK_RAW])], DENY),
        when([inet()], Action::Errno(libc::EPROTONOSUPPORT)),
        // getaddrinfo and getifaddrs list interfaces through NETLINK_ROUTE. Its answers wait in buffers that are
        // charged to no cgroup, so the broker makes these sockets, few of them and with small buffers. The other
        // families (netfilter, crypto, audit, uevents) have most of the kernel's network bugs.
        when(
            [netlink(), is(2, &[libc::NETLINK_ROUTE])],
            match options.connect {
                Connect::Kernel => Action::Allow,
                Connect::Brokered => Action::Notify,
            },
        ),
        when([netlink()], Action::Errno(libc::EPROTONOSUPPORT)),
    ]);
    // AF_ALG, AF_VSOCK, AF_PACKET, AF_BLUETOOTH, …: they reach the host's devices or other machines, or load modules.
    rule(clauses, Action::Errno(libc::EAFNOSUPPORT))
}

/// multiprocessing, asyncio and shells make pairs of unix sockets. Pairs of another family have no use.
fn socketpair(options: &FilterOptions) -> CallRule {
    rule(unix_sockets(options), Action::Errno(libc::EAFNOSUPPORT))
}

/// At level `landlock` a unix datagram socket, even one of a pair, could name any socket of the host by its path.
/// SOCK_RAW is a datagram socket too (unix_create). EPROTONOSUPPORT says that this family has no such type, so that
/// syslog and loggers give up quietly.
fn unix_sockets(options: &FilterOptions) -> Vec<Clause> {
    let unix = || is(0, &[libc::AF_UNIX]);
    match options.outer {
        OuterConfinement::Namespaces { .. } => vec![when([unix()], Action::Allow)],
        OuterConfinement::Landlock { .. } => vec![
            when(
                [
                    unix(),
                    socket_type(&[libc::SOCK_STREAM, libc::SOCK_SEQPACKET]),
                ],
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
    let socket_level =
        |options: &[i32], action| when([is(1, &[libc::SOL_SOCKET]), is(2, options)], action);
    // Socket buffers count for the whole host, and a filter cannot see the requested size. The broker allows sizes up
    // to the default. Without a broker the call succeeds without effect, since the size is only a hint.
    let buffers = match sends_are_brokered(options) {
        true => Action::Notify,
        false => Action::Errno(0),
    };
    let mut clauses = memory::socket_option_clauses();
    clauses.extend([
        // These options load programs into the kernel. Packet sniffers use them, and there is nothing to sniff.
        socket_level(&bpf, DENY),
        socket_level(&[libc::SO_SNDBUF, libc::SO_RCVBUF], buffers),
        // These two options set any size and need CAP_NET_ADMIN.
        socket_level(&[libc::SO_SNDBUFFORCE, libc::SO_RCVBUFFORCE], DENY),
        // TLS and other layers inside the kernel, with a record of escalation. Libraries work without them.
        when(
            [is(1, &[libc::IPPROTO_TCP]), is(2, &[libc::TCP_ULP])],
            Action::Errno(libc::ENOPROTOOPT),
        ),
    ]);
    rule(clauses, Action::Allow)
}

/// Calls that set a user or group id of the caller or of a file. The program has no capability, so it can only set
/// its own ids. For an id that the user namespace does not map the kernel answers EINVAL, but programs that try
/// another id expect EPERM. -1 means "leave unchanged", or gets the kernel's EINVAL. setfsuid never fails.
fn id_rules(outer: OuterConfinement) -> Vec<(c_long, CallRule)> {
    const UNCHANGED: u32 = u32::MAX;
    let only_own = |of: &[(u8, u32)]| match outer {
        OuterConfinement::Namespaces { .. } => {
            let own = |(arg, id): &(u8, u32)| is(*arg, &[*id, UNCHANGED]);
            let tests = of.iter().map(own).collect();
            let clause = Clause {
                tests,
                action: Action::Allow,
            };
            rule(vec![clause], DENY)
        }
        // Without a user namespace every id is mapped, and the kernel itself answers EPERM.
        OuterConfinement::Landlock { .. } => always(Action::Allow),
    };
    let (uid, gid) = match outer {
        OuterConfinement::Namespaces { uid, gid, .. } => (uid, gid),
        OuterConfinement::Landlock { .. } => (UNCHANGED, UNCHANGED),
    };
    vec![
        (libc::SYS_setuid, only_own(&[(0, uid)])),
        (libc::SYS_setgid, only_own(&[(0, gid)])),
        (libc::SYS_setreuid, only_own(&[(0, uid), (1, uid)])),
        (libc::SYS_setregid, only_own(&[(0, gid), (1, gid)])),
        (
            libc::SYS_setresuid,
            only_own(&[(0, uid), (1, uid), (2, uid)]),
        ),
        (
            libc::SYS_setresgid,
            only_own(&[(0, gid), (1, gid), (2, gid)]),
        ),
        (libc::SYS_fchown, only_own(&[(1, uid), (2, gid)])),
        (libc::SYS_fchownat, only_own(&[(2, uid), (3, gid)])),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chown, only_own(&[(1, uid), (2, gid)])),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_lchown, only_own(&[(1, uid), (2, gid)])),
    ]
}

/// Refuses set-id bits. Set-id files would belong to the user who ran the analysis: another local user who reaches
/// one while the workspace exists could become that user. Nix's builders were attacked in this way, and its sandbox
/// has filtered the same calls since. A filter cannot know whether the path is a directory, where set-group-id would
/// be harmless, so copying such a directory with its mode fails too.
fn set_id_rules() -> Vec<(c_long, CallRule)> {
    let mode = |arg| only_when([has_any(arg, SET_ID)], DENY, Action::Allow);
    let open = |flags| rule(creates_set_id(flags), Action::Allow);
    // Zero means a regular file. The kernel refuses devices to anyone without CAP_MKNOD, except the whiteout, which
    // is a device node too.
    let plain_types = [0, libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK];
    let mknod = |arg| {
        let plain = masked(arg, libc::S_IFMT, &plain_types);
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

/// Refuses an open that creates a set-id file. The mode is the argument after the flags.
pub(super) fn creates_set_id(flags: u8) -> Vec<Clause> {
    // Without one of these flags open ignores its mode, which is then whatever the register holds. __O_TMPFILE is
    // O_TMPFILE without O_DIRECTORY; the kernel checks only that bit.
    const CREATES: u32 = (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) as u32;
    let creates = [has_any(flags, CREATES), has_any(flags + 1, SET_ID)];
    vec![when(creates, DENY)]
}

/// Refuses the call on init's threads, given in the first argument. The sandbox's init, pid 1, has the program's uid,
/// and prlimit checks only the uid. With a CPU limit on init the kernel would kill init, and the record would lose
/// how the program ended.
fn deny_for_init(init: &[u32]) -> CallRule {
    only_when([is(0, init)], DENY, Action::Allow)
}

pub(super) const IOPRIO_WHO_PROCESS: u32 = 1;

/// Allows the call on one process that is not init. A process group or a user could include init, so both are
/// refused.
fn one_process_but_not_init(one_process: u32, init: &[u32]) -> CallRule {
    let clauses = vec![
        when([is(1, init)], DENY),
        when([is(0, &[one_process])], Action::Allow),
    ];
    rule(clauses, DENY)
}

/// No real-time policy. Where the host's RLIMIT_RTPRIO allows it, such a task could hold a CPU against everybody
/// else.
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
    let ordinary = [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE];
    masked(1, !RESET_ON_FORK, &ordinary)
}

/// Allows the query (0xffffffff), the default personality, and no address randomisation, which debuggers, sanitizers
/// and some Lisps set. Others switch protections off, for example READ_IMPLIES_EXEC and MMAP_PAGE_ZERO.
fn personality() -> CallRule {
    let ordinary = [0, 0xffff_ffff, libc::ADDR_NO_RANDOMIZE as u32];
    only_when([is(0, &ordinary)], Action::Allow, DENY)
}

/// An allow-list as well: an option that a newer kernel adds gets EINVAL, as from a kernel that does not have it.
#[rustfmt::skip]
pub(super) fn prctl() -> CallRule {
    let allowed = [
        // Names, core dumps, parent death signal, subreaper: libc, Python, the JVM and process supervisors.
        libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_PDEATHSIG, libc::PR_GET_PDEATHSIG, libc::PR_SET_DUMPABLE,
        libc::PR_GET_DUMPABLE, libc::PR_SET_CHILD_SUBREAPER, libc::PR_GET_CHILD_SUBREAPER, libc::PR_GET_TID_ADDRESS,
        // Crash handlers set who may trace them. Tracing itself is refused.
        libc::PR_SET_PTRACER,
        // The program's own timers and memory: huge pages (JVM, jemalloc), names of mappings (glibc, Go).
        libc::PR_SET_TIMERSLACK, libc::PR_GET_TIMERSLACK, libc::PR_GET_TIMING, libc::PR_GET_TSC,
        libc::PR_SET_THP_DISABLE, libc::PR_GET_THP_DISABLE, libc::PR_SET_VMA,
        0x4155_5856,                // PR_GET_AUXV
        // Confining itself further, and querying its rights.
        libc::PR_SET_NO_NEW_PRIVS, libc::PR_GET_NO_NEW_PRIVS, libc::PR_GET_SECCOMP,
        libc::PR_SET_MDWE, libc::PR_GET_MDWE, libc::PR_SET_SPECULATION_CTRL, libc::PR_GET_SPECULATION_CTRL,
        libc::PR_CAPBSET_READ, libc::PR_CAP_AMBIENT, libc::PR_GET_KEEPCAPS, libc::PR_GET_SECUREBITS,
        // Vector length, pointer keys, memory tags and shadow stack of an arm thread; EINVAL elsewhere.
        50, 51, 63, 64,             // PR_SVE_SET_VL, PR_SVE_GET_VL, PR_SME_SET_VL, PR_SME_GET_VL
        54, 60, 61,                 // PR_PAC_RESET_KEYS, PR_PAC_SET_ENABLED_KEYS, PR_PAC_GET_ENABLED_KEYS
        55, 56,                     // PR_SET_TAGGED_ADDR_CTRL, PR_GET_TAGGED_ADDR_CTRL
        74, 75, 76,                 // PR_GET_, PR_SET_ and PR_LOCK_SHADOW_STACK_STATUS
    ];
    let denied = [
        // Changes the kernel's record of the process's memory layout; only checkpointing uses it.
        libc::PR_SET_MM,
        // Keeps other tasks off the sibling hardware threads of a core.
        libc::PR_SCHED_CORE,
        // Turns calls into signals, for emulators of other systems.
        59,                         // PR_SET_SYSCALL_USER_DISPATCH
        // The timing of merged pages reveals what other processes hold in memory.
        67,                         // PR_SET_MEMORY_MERGE
        // Privileged, or about machine errors, counters and time stamps: an analysis needs none of them.
        libc::PR_SET_KEEPCAPS, libc::PR_SET_SECUREBITS, libc::PR_CAPBSET_DROP, libc::PR_MCE_KILL,
        libc::PR_TASK_PERF_EVENTS_DISABLE, libc::PR_TASK_PERF_EVENTS_ENABLE, libc::PR_SET_TSC,
        57,                         // PR_SET_IO_FLUSHER
    ];
    rule(
        vec![
            when([is(0, &allowed)], Action::Allow),
            when([is(0, &denied)], DENY),
        ],
        Action::Errno(libc::EINVAL),
    )
}

/// The owner of a file can take a lease on it, which delays every process on the host that opens it. Where the
/// program runs as their owner, these can be data files. Delegations (F_SETDELEG) are the same on newer kernels.
pub(super) fn fcntl() -> CallRule {
    const F_SETDELEG: u32 = 1024 + 16;
    // The expected lifetime of data, which the kernel stores on the inode through any descriptor.
    const F_SET_RW_HINT: u32 = 1024 + 12;
    const F_SET_FILE_RW_HINT: u32 = 1024 + 14;
    let refused = [
        libc::F_SETLEASE as u32,
        F_SETDELEG,
        F_SET_RW_HINT,
        F_SET_FILE_RW_HINT,
    ];
    // Reports by a signal what happens in any readable directory: inotify's predecessor.
    let notify = is(1, &[libc::F_NOTIFY]);
    rule(
        vec![
            when([is(1, &refused)], DENY),
            when([notify], Action::Errno(libc::EINVAL)),
        ],
        Action::Allow,
    )
}

/// RENAME_WHITEOUT leaves a device node behind and needs no privilege. EINVAL is the answer of a file system without
/// whiteouts.
fn renameat2() -> CallRule {
    let whiteout = [has_any(4, libc::RENAME_WHITEOUT)];
    only_when(whiteout, Action::Errno(libc::EINVAL), Action::Allow)
}

/// Tests the type of a socket, which is the second argument without its flags.
fn socket_type(types: &[i32]) -> Test {
    masked(1, 0xf, types)
}
