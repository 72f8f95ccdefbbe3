//! Threads and processes: what a new one may share with its creator, and what it must share.

use super::rule::{Action, CallRule, DENY, has_any, masked, only_when, rule, when};

pub(super) fn clone() -> CallRule {
    // CLONE_NEWTIME is not here: in clone(2) that bit belongs to the exit signal, and the kernel masks it off.
    const NAMESPACES: i32 = libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET;
    // CLONE_PARENT would make children of the sandbox's own init. Only container runtimes use it.
    let refused = (NAMESPACES | libc::CLONE_PARENT) as u32;
    // A thread with a descriptor table of its own could hold files that its process's /proc list does not show. A
    // process that shares another's table could replace a socket that the broker has checked, or close a file that a
    // call still holds: the pause that finds such files waits for threads, not for other processes.
    let (threads, files) = (libc::CLONE_THREAD as u32, libc::CLONE_FILES as u32);
    let own_files = [has_any(0, threads), masked(0, files, &[0])];
    let shared_files = [has_any(0, files), masked(0, threads, &[0])];
    // A thread with a working directory of its own could keep a removed directory, which may be large, alive. The
    // watch checks one working directory for each process. Thread libraries share it.
    let own_directory = [has_any(0, threads), masked(0, libc::CLONE_FS as u32, &[0])];
    let clauses = vec![
        when([has_any(0, refused)], DENY),
        when(own_files, DENY),
        when(own_directory, DENY),
        when(shared_files, DENY),
    ];
    rule(clauses, Action::Allow)
}

/// CLOSE_RANGE_UNSHARE gives a thread a descriptor table of its own, which `clone` refuses too. EINVAL is the answer
/// of a kernel that does not know the flag; callers then close the range without it.
pub(super) fn close_range() -> CallRule {
    let unshare = [has_any(2, libc::CLOSE_RANGE_UNSHARE)];
    only_when(unshare, Action::Errno(libc::EINVAL), Action::Allow)
}
