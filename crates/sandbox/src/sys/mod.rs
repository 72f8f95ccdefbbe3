//! Every raw system call, and the only folder where `unsafe` is allowed.
//!
//! It holds only calls that std and rustix lack, each with a thin wrapper, and the ways to open a file, so that every
//! descriptor is close-on-exec. `sys` uses no other module of this crate.

#![allow(unsafe_code)]

mod attack_calls;
mod descriptors;
mod host;
mod memory;
mod mount;
mod process;
pub mod procfs;
mod quota;
mod seccomp;
mod signals;
mod sockets;

#[cfg(target_arch = "x86_64")]
pub use attack_calls::getpid_i386;
pub use attack_calls::{Arg, Call, attempt, clone_into, clone3_into, fill_page_tables};
pub use descriptors::{
    DIRECTORY, close_all_but, close_from, close_on_exec_from, open, open_at, open_for_program,
    open_resolved, place_descriptor,
};
pub use host::{
    loopback_up, make_controlling_terminal, monotonic_us, new_session_keyring, set_terminal_size,
};
pub use memory::{
    bytes_written_by_reaped, drop_code_pages, has_loader_settings, share_memory, shared_counters,
    use_one_malloc_arena, wipe_start_strings,
};
pub use mount::{
    MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY, mount_idmap,
    mount_restrict, set_fs_uid,
};
pub use process::{
    ForkSide, Namespace, Parentage, execve, exit_now, fork, fork_and_run, fork_into_group,
    fork_threaded, set_process_name, unshare,
};
pub use quota::{
    PROJECT_INHERIT, QuotaBlock, file_attributes, project_quota, set_file_attributes,
    set_project_limits,
};
pub use seccomp::{
    Instruction, Listener, Notification, NotificationAnswer, answer_with_descriptor, landlock_abi,
    landlock_version, notification_answer, notification_answer_with, notification_receive,
    notification_valid, seccomp_install,
};
pub use signals::{
    block_signals, kill_all, note_ignored_signals, read_signal, reset_sigchld, reset_signals,
    signal_fd, signal_pidfd, signal_thread,
};
pub use sockets::{
    PARTS_MAX, RawMessage, connect_raw, read_memory, read_memory_parts, send_message, write_memory,
};

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// Calls ioctl with a pointer to a value.
///
/// # Safety
/// The command must read and write no more than the kernel's structure for it, whose layout `T` must have.
unsafe fn ioctl<T>(fd: impl AsFd, command: u64, value: &mut T) -> io::Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: `value` is exclusively borrowed for the call, and the caller promises that `T` fits the command.
    check(unsafe { libc::ioctl(fd, command as _, std::ptr::from_mut(value)) }.into()).map(drop)
}

/// Takes ownership of a descriptor that the kernel has just returned.
fn take_ownership(fd: libc::c_long) -> OwnedFd {
    // SAFETY: every caller passes a descriptor that the kernel has just made and that nobody else owns.
    unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
}
