//! Rules for level `landlock`, where the program sees the host's own files, processes and network.
//!
//! Landlock decides which files can be opened, made, linked and removed. It does not cover modes, owners, times and
//! attributes, sockets other than TCP, System V IPC, or the limits of other processes; before ABI 3 truncation, and
//! before ABI 6 signals. Each rule here replaces the rule of `table.rs` for the same call, and refuses it or passes
//! it to the guardian.

use libc::c_long;

use super::rule::{
    Action, CallRule, Clause, DENY, always, has_any, is, masked, only_when, rule, when,
};
use super::{ioctl as all_ioctls, number, table};
use crate::confine::landlock::ABI_WITH_SIGNAL_SCOPE;

const DENY_ACCESS: Action = Action::Errno(libc::EACCES);
/// The first ABI that covers truncation.
const ABI_WITH_TRUNCATE: i32 = 3;

/// Calls that the guardian makes in the program's place, on files of the workspace only.
#[rustfmt::skip]
const PROXIED: &[c_long] = &[
    // A descriptor opened for reading is enough to change its file's times.
    libc::SYS_utimensat,
    #[cfg(target_arch = "x86_64")] libc::SYS_utime,
    #[cfg(target_arch = "x86_64")] libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")] libc::SYS_futimesat,
];

#[rustfmt::skip]
const REFUSED: &[(Action, &[c_long])] = &[
    // Changing a file's group to another group of the caller needs only a descriptor opened for reading. Copying
    // programs accept EPERM, which any unprivileged process gets.
    (DENY, &[
        libc::SYS_fchown, libc::SYS_fchownat,
        #[cfg(target_arch = "x86_64")] libc::SYS_chown,
        #[cfg(target_arch = "x86_64")] libc::SYS_lchown,
    ]),
    // Attributes of any file by its name. EOPNOTSUPP is the answer of a file system without attributes: cp, ls and
    // tar continue.
    (Action::Errno(libc::EOPNOTSUPP), &[
        libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr, libc::SYS_getxattr, libc::SYS_lgetxattr,
        libc::SYS_fgetxattr, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr, libc::SYS_removexattr,
        libc::SYS_lremovexattr, libc::SYS_fremovexattr, number::SETXATTRAT, number::GETXATTRAT, number::LISTXATTRAT,
        number::REMOVEXATTRAT,
    ]),
    // No socket needs an address: the only sockets are pairs.
    (DENY_ACCESS, &[libc::SYS_connect, libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4]),
    // IPC keys and names that the whole host shares.
    (Action::Errno(libc::ENOSYS), &[
        libc::SYS_shmget, libc::SYS_shmat, libc::SYS_shmdt, libc::SYS_shmctl, libc::SYS_semget, libc::SYS_semop,
        libc::SYS_semtimedop, libc::SYS_semctl, libc::SYS_msgget, libc::SYS_msgsnd, libc::SYS_msgrcv,
        libc::SYS_msgctl, libc::SYS_mq_open, libc::SYS_mq_unlink, libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive,
        libc::SYS_mq_notify, libc::SYS_mq_getsetattr,
    ]),
];

/// Returns every rule that replaces a rule of `table.rs`.
pub(super) fn rules(landlock_abi: i32, fixed_affinity: bool) -> Vec<(c_long, CallRule)> {
    let mut rules: Vec<(c_long, CallRule)> = Vec::new();
    rules.extend(PROXIED.iter().map(|nr| (*nr, always(Action::Notify))));
    for (action, calls) in REFUSED {
        rules.extend(calls.iter().map(|nr| (*nr, always(*action))));
    }
    rules.extend(mode_rules());
    rules.extend(self_only_rules(fixed_affinity));
    rules.push((libc::SYS_socket, socket()));
    rules.push((libc::SYS_prctl, prctl()));
    if landlock_abi < ABI_WITH_TRUNCATE {
        rules.extend(truncation_rules());
    }
    let landlock_scopes_signals = landlock_abi >= ABI_WITH_SIGNAL_SCOPE;
    if !landlock_scopes_signals {
        rules.extend(signal_rules());
    }
    rules.push((libc::SYS_ioctl, ioctl(landlock_scopes_signals)));
    rules
}

/// Refuses set-id bits, as at every level. The guardian handles all other modes.
fn mode_rules() -> Vec<(c_long, CallRule)> {
    let mode = |arg| only_when([has_any(arg, table::SET_ID)], DENY, Action::Notify);
    vec![
        (libc::SYS_fchmod, mode(1)),
        (libc::SYS_fchmodat, mode(2)),
        (number::FCHMODAT2, mode(2)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_chmod, mode(1)),
    ]
}

/// Limits, priority and CPUs of a process: the caller could name any process of the same user. Only the number zero,
/// by which libc names the caller itself, is allowed. A filter cannot distinguish the caller's own threads from
/// foreign ones by number.
fn self_only_rules(fixed_affinity: bool) -> Vec<(c_long, CallRule)> {
    let is_self = || is(0, &[0]);
    let self_only = || only_when([is_self()], Action::Allow, DENY);
    let one_process = |kind: u32| only_when([is(0, &[kind]), is(1, &[0])], Action::Allow, DENY);
    let ordinary = table::ordinary_scheduler();
    let affinity = match fixed_affinity {
        true => always(DENY),
        false => self_only(),
    };
    vec![
        (libc::SYS_prlimit64, self_only()),
        (libc::SYS_sched_setparam, self_only()),
        (libc::SYS_move_pages, self_only()),
        (libc::SYS_sched_setaffinity, affinity),
        (
            libc::SYS_sched_setscheduler,
            only_when([is_self(), ordinary], Action::Allow, DENY),
        ),
        (libc::SYS_setpriority, one_process(libc::PRIO_PROCESS)),
        (libc::SYS_ioprio_set, one_process(table::IOPRIO_WHO_PROCESS)),
    ]
}

/// The table's prctl rule, but a process must stay dumpable. The guardian has the program's uid and no capability: it
/// could not inspect a process that is not dumpable, whose memory would then go uncounted.
fn prctl() -> CallRule {
    let table_prctl = table::prctl();
    let become_undumpable = [is(0, &[libc::PR_SET_DUMPABLE]), is(1, &[0])];
    let mut clauses = vec![when(become_undumpable, DENY)];
    clauses.extend(table_prctl.clauses);
    rule(clauses, table_prctl.otherwise)
}

/// Refuses every socket. A unix socket can reach any listener, an internet socket has the host's network, and netlink
/// lists that network. socketpair makes pairs.
fn socket() -> CallRule {
    let known = [
        libc::AF_UNIX,
        libc::AF_INET,
        libc::AF_INET6,
        libc::AF_NETLINK,
    ];
    only_when(
        [is(0, &known)],
        DENY_ACCESS,
        Action::Errno(libc::EAFNOSUPPORT),
    )
}

/// Before ABI 3 Landlock checks the right to write only when a file is opened for writing. O_TRUNC also truncates a
/// file that is opened for reading, or with access mode 3, which is neither.
fn truncation_rules() -> Vec<(c_long, CallRule)> {
    let open = |flags: u8| {
        let mut clauses: Vec<Clause> = table::creates_set_id(flags);
        let read_only_truncation = [
            has_any(flags, libc::O_TRUNC),
            masked(flags, libc::O_ACCMODE as u32, &[libc::O_RDONLY, 3]),
        ];
        clauses.push(when(read_only_truncation, DENY_ACCESS));
        rule(clauses, Action::Allow)
    };
    vec![
        (libc::SYS_truncate, always(Action::Notify)),
        (libc::SYS_openat, open(2)),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_open, open(1)),
    ]
}

/// The caller could signal any process of the same user. kill and the calls of raise() and abort() go to the
/// guardian, which knows the program's descendants. The rarer calls are refused.
fn signal_rules() -> Vec<(c_long, CallRule)> {
    let proxied = [libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill];
    let refused = [
        libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo,
        libc::SYS_pidfd_send_signal,
    ];
    // fcntl can make input and output raise a signal in any process that it names.
    const F_SETOWN_EX: u32 = 15;
    let owner = [libc::F_SETOWN as u32, F_SETOWN_EX, 10]; // F_SETSIG
    let mut fcntl = vec![when([is(1, &owner)], DENY)];
    fcntl.extend(table::fcntl().clauses);
    let mut rules: Vec<(c_long, CallRule)> = Vec::new();
    rules.extend(proxied.map(|nr| (nr, always(Action::Notify))));
    rules.extend(refused.map(|nr| (nr, always(DENY))));
    rules.push((libc::SYS_fcntl, rule(fcntl, Action::Allow)));
    rules
}

/// Any socket, even one of a pair, answers queries about the host's interfaces, their addresses and hardware.
fn ioctl(landlock_scopes_signals: bool) -> CallRule {
    const SOCKETS: u32 = 0x8900;
    // FIOGETOWN, SIOCGPGRP, SIOCATMARK, SIOCGSTAMP. FIOSETOWN and SIOCSPGRP only where Landlock checks whom they
    // signal.
    let mut own = vec![0x8903, 0x8904, 0x8905, 0x8906];
    if landlock_scopes_signals {
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
