//! What the list must refuse, or hand over, where the program stands on the host's own ground (level `landlock`).
//!
//! Landlock decides which files can be opened, made, linked and removed. It does not know of modes, owners, times and
//! attributes, of sockets other than TCP, of System V IPC, of other processes' limits; before ABI 3 not of
//! truncation, before ABI 6 not of signals. Each rule here replaces the one of `table.rs` for the same call.

use libc::c_long;

use super::rule::{Action, CallRule, Clause, DENY, always, has_any, is, masked, rule, when};
use super::{ioctl as all_ioctls, number, table};
use crate::confine::landlock::ABI_WITH_SIGNAL_SCOPE;

const CLOSED: Action = Action::Errno(libc::EACCES);
/// The first ABI that knows of truncation.
const ABI_WITH_TRUNCATE: i32 = 3;

/// Handed to the guardian, which does it on the workspace and nowhere else.
#[rustfmt::skip]
const HANDED_OVER: &[c_long] = &[
    // A descriptor that was opened for reading is enough to change its file's times.
    libc::SYS_utimensat,
    #[cfg(target_arch = "x86_64")] libc::SYS_utime,
    #[cfg(target_arch = "x86_64")] libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")] libc::SYS_futimesat,
];

#[rustfmt::skip]
const REFUSED: &[(Action, &[c_long])] = &[
    // To another group of the caller's; a descriptor opened for reading is enough. Copying programs take EPERM for what
    // anyone without privilege gets.
    (DENY, &[
        libc::SYS_fchown, libc::SYS_fchownat,
        #[cfg(target_arch = "x86_64")] libc::SYS_chown,
        #[cfg(target_arch = "x86_64")] libc::SYS_lchown,
    ]),
    // Attributes of any file by its name. As on a file system without them: cp, ls and tar go on.
    (Action::Errno(libc::EOPNOTSUPP), &[
        libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr, libc::SYS_getxattr, libc::SYS_lgetxattr,
        libc::SYS_fgetxattr, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr, libc::SYS_removexattr,
        libc::SYS_lremovexattr, libc::SYS_fremovexattr, number::SETXATTRAT, number::GETXATTRAT, number::LISTXATTRAT,
        number::REMOVEXATTRAT,
    ]),
    // No address leads anywhere: the only sockets are pairs.
    (CLOSED, &[libc::SYS_connect, libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4]),
    // Keys and names that all of the host shares.
    (Action::Errno(libc::ENOSYS), &[
        libc::SYS_shmget, libc::SYS_shmat, libc::SYS_shmdt, libc::SYS_shmctl, libc::SYS_semget, libc::SYS_semop,
        libc::SYS_semtimedop, libc::SYS_semctl, libc::SYS_msgget, libc::SYS_msgsnd, libc::SYS_msgrcv,
        libc::SYS_msgctl, libc::SYS_mq_open, libc::SYS_mq_unlink, libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive,
        libc::SYS_mq_notify, libc::SYS_mq_getsetattr,
    ]),
];

/// Every rule that takes another's place.
pub(super) fn rules(landlock_abi: i32, fixed_affinity: bool) -> Vec<(c_long, CallRule)> {
    let mut rules: Vec<(c_long, CallRule)> = Vec::new();
    rules.extend(HANDED_OVER.iter().map(|nr| (*nr, always(Action::Notify))));
    for (action, calls) in REFUSED {
        rules.extend(calls.iter().map(|nr| (*nr, always(*action))));
    }
    rules.extend(modes());
    rules.extend(of_the_caller_itself(fixed_affinity));
    rules.push((libc::SYS_socket, socket()));
    rules.push((libc::SYS_prctl, prctl()));
    if landlock_abi < ABI_WITH_TRUNCATE {
        rules.extend(truncation());
    }
    let signals_by_kernel = landlock_abi >= ABI_WITH_SIGNAL_SCOPE;
    if !signals_by_kernel {
        rules.extend(signals());
    }
    rules.push((libc::SYS_ioctl, ioctl(signals_by_kernel)));
    rules
}

/// Set-id bits are refused as everywhere; the rest is the guardian's.
fn modes() -> Vec<(c_long, CallRule)> {
    let mode = |arg| {
        rule(
            vec![when([has_any(arg, table::SET_ID)], DENY)],
            Action::Notify,
        )
    };
    vec![
        (libc::SYS_fchmod, mode(1)),
        (libc::SYS_fchmodat, mode(2)),
        (number::FCHMODAT2, mode(2)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chmod, mode(1)),
    ]
}

/// Limits, priority and CPUs of a process: any of the same user could be named. The caller names itself by zero, as libc
/// does; a thread of its own cannot be told from a stranger by its number.
fn of_the_caller_itself(fixed_affinity: bool) -> Vec<(c_long, CallRule)> {
    let own = || is(0, &[0]);
    let only_own = || rule(vec![when([own()], Action::Allow)], DENY);
    let one_process = |kind: u32| {
        rule(
            vec![when([is(0, &[kind]), is(1, &[0])], Action::Allow)],
            DENY,
        )
    };
    let ordinary = table::ordinary_scheduler();
    let affinity = match fixed_affinity {
        true => always(DENY),
        false => only_own(),
    };
    vec![
        (libc::SYS_prlimit64, only_own()),
        (libc::SYS_sched_setparam, only_own()),
        (libc::SYS_move_pages, only_own()),
        (libc::SYS_sched_setaffinity, affinity),
        (
            libc::SYS_sched_setscheduler,
            rule(vec![when([own(), ordinary], Action::Allow)], DENY),
        ),
        (libc::SYS_setpriority, one_process(libc::PRIO_PROCESS)),
        (libc::SYS_ioprio_set, one_process(table::IOPRIO_WHO_PROCESS)),
    ]
}

/// As everywhere, but a process stays open to the guardian, which has its uid and no capability: what it could not look
/// into could hold memory that nobody counts.
fn prctl() -> CallRule {
    let table_prctl = table::prctl();
    let hide = [is(0, &[libc::PR_SET_DUMPABLE as u32]), is(1, &[0])];
    let mut clauses = vec![when(hide, DENY)];
    clauses.extend(table_prctl.clauses);
    rule(clauses, table_prctl.otherwise)
}

/// None at all: a unix socket reaches whatever listens, an internet one has the host's network, netlink lists it. Pairs
/// are made by socketpair.
fn socket() -> CallRule {
    let known = [
        libc::AF_UNIX,
        libc::AF_INET,
        libc::AF_INET6,
        libc::AF_NETLINK,
    ]
    .map(|f| f as u32);
    rule(
        vec![when([is(0, &known)], CLOSED)],
        Action::Errno(libc::EAFNOSUPPORT),
    )
}

/// Landlock before ABI 3 asks for the right to write only where a file is opened for writing. O_TRUNC empties it all
/// the same when it is opened for reading, or for neither (3).
fn truncation() -> Vec<(c_long, CallRule)> {
    let open = |flags: u8| {
        let mut clauses: Vec<Clause> = table::creates_set_id(flags);
        let unseen = [
            has_any(flags, libc::O_TRUNC as u32),
            masked(flags, libc::O_ACCMODE as u32, &[libc::O_RDONLY as u32, 3]),
        ];
        clauses.push(when(unseen, CLOSED));
        rule(clauses, Action::Allow)
    };
    vec![
        (libc::SYS_truncate, always(Action::Notify)),
        (libc::SYS_openat, open(2)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_open, open(1)),
    ]
}

/// Any process of the same user could be named. kill and what raise() and abort() use go through the guardian, which
/// knows whose child is whose; the rarer ways are refused.
fn signals() -> Vec<(c_long, CallRule)> {
    let handed = [libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill];
    let refused = [
        libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo,
        libc::SYS_pidfd_send_signal,
    ];
    // Input and output can be made to raise a signal, in whichever process was named for it.
    const F_SETOWN_EX: u32 = 15;
    let owner = [libc::F_SETOWN as u32, F_SETOWN_EX, 10]; // F_SETSIG
    let mut fcntl = vec![when([is(1, &owner)], DENY)];
    fcntl.extend(table::fcntl().clauses);
    let mut rules: Vec<(c_long, CallRule)> = Vec::new();
    rules.extend(handed.map(|nr| (nr, always(Action::Notify))));
    rules.extend(refused.map(|nr| (nr, always(DENY))));
    rules.push((libc::SYS_fcntl, rule(fcntl, Action::Allow)));
    rules
}

/// Any socket, also one of a pair, answers questions about the host's interfaces, their addresses and hardware.
fn ioctl(signals_by_kernel: bool) -> CallRule {
    const SOCKETS: u32 = 0x8900;
    // FIOGETOWN, SIOCGPGRP, SIOCATMARK, SIOCGSTAMP; and FIOSETOWN, SIOCSPGRP where Landlock sees to whom they signal.
    let mut own = vec![0x8903, 0x8904, 0x8905, 0x8906];
    if signals_by_kernel {
        own.extend([0x8901, 0x8902]);
    }
    let table_ioctl = all_ioctls::rule();
    let mut clauses = vec![
        when([is(1, &own)], Action::Allow),
        when([masked(1, 0xff00, &[SOCKETS])], DENY),
    ];
    clauses.extend(table_ioctl.clauses);
    rule(clauses, table_ioctl.otherwise)
}
