//! The table of SECURITY.md: for each forbidden act, what happens at each level. The tests and `doctor --attack`
//! assert exactly this table.
//!
//! At level `full` every act below fails. At level `landlock` the program sees the host's own tree. Where Landlock
//! cannot refuse an act, either seccomp refuses it, or the guardian performs a harmless form of it in the program's
//! place, or the promise is not kept. Each act names the attack that tries it.

use super::{
    AttackAim, AttackResult, files, hidden_files, kernel, limits, privilege, processes, services,
    terminal,
};
use crate::spec::ConfinementLevel;

/// Whether an act fails, and at what cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromiseStatus {
    /// The act fails, and ordinary programs notice nothing.
    Kept,
    /// The act fails because the sandbox refuses this feature, which ordinary programs may miss.
    KeptByRefusing(&'static str),
    /// The act succeeds, or may succeed, for this reason.
    NotKept(&'static str),
}

impl PromiseStatus {
    /// Returns whether the act fails.
    pub fn is_kept(self) -> bool {
        !matches!(self, PromiseStatus::NotKept(_))
    }
}

/// One act, the promise that it would break, and its status at level `landlock`.
pub struct Act {
    /// The promise, such as `P2`.
    pub promise: &'static str,
    /// The attack's name.
    pub name: &'static str,
    /// The status by Landlock ABI: each entry holds from its ABI on, up to the next entry. The first entry is for ABI
    /// 1.
    landlock: &'static [(i32, PromiseStatus)],
    /// The attack itself.
    pub(super) attack: fn(&AttackAim<'_>) -> AttackResult,
}

impl Act {
    /// Describes the status at level `landlock` in words, by Landlock ABI where the ABI matters.
    pub fn at_landlock(&self) -> String {
        let describe = |status: PromiseStatus| match status {
            PromiseStatus::Kept => String::from("held"),
            PromiseStatus::KeptByRefusing(what) => format!("held by refusing {what}"),
            PromiseStatus::NotKept(why) => format!("**not held**: {why}"),
        };
        let row =
            |(n, (from, status)): (usize, &(i32, PromiseStatus))| match self.landlock.get(n + 1) {
                Some((next, _)) => format!("ABI {from} to {}: {}", next - 1, describe(*status)),
                None if n > 0 => format!("from ABI {from}: {}", describe(*status)),
                None => describe(*status),
            };
        let rows: Vec<String> = self.landlock.iter().enumerate().map(row).collect();
        rows.join("; ")
    }
}

const KEPT: &[(i32, PromiseStatus)] = &[(1, PromiseStatus::Kept)];

const NO_PROC: PromiseStatus = PromiseStatus::KeptByRefusing(
    "/proc, but for a few files and what the first process has of its own",
);
const NO_NETWORK: PromiseStatus =
    PromiseStatus::KeptByRefusing("internet sockets, also among its own processes");
const NO_SOCKETS: PromiseStatus =
    PromiseStatus::KeptByRefusing("unix sockets other than a socketpair");
const NO_IPC: PromiseStatus =
    PromiseStatus::KeptByRefusing("System V IPC and POSIX message queues");
const NO_SHM: PromiseStatus = PromiseStatus::KeptByRefusing(
    "/dev/shm, and with it POSIX semaphores and Python's multiprocessing, unless asked for",
);
const NO_FOREIGN_SIGNALS: PromiseStatus = PromiseStatus::KeptByRefusing(
    "sigqueue, pidfd_send_signal and F_SETOWN; kill goes through the guardian",
);

const fn act(
    promise: &'static str,
    name: &'static str,
    attack: fn(&AttackAim<'_>) -> AttackResult,
    landlock: &'static [(i32, PromiseStatus)],
) -> Act {
    Act {
        promise,
        name,
        landlock,
        attack,
    }
}

/// Every act, in the order of the promises.
#[rustfmt::skip]
pub const ACTS: &[Act] = &[
    act("P2", "write_data", files::change, KEPT),
    act("P2", "write_docs", files::change, KEPT),
    act("P2", "truncate_data", files::truncate, KEPT),
    act("P2", "chmod_data", files::change_mode, KEPT),
    act("P2", "utime_data", files::change_times, KEPT),
    act("P2", "xattr_data", files::change_attributes, &[(1, PromiseStatus::KeptByRefusing("extended attributes, everywhere"))]),
    act("P2", "link_data", files::link, KEPT),
    act("P2", "read_project", files::read, KEPT),
    act("P2", "list_project", files::list, KEPT),
    act("P2", "stat_project", files::size, &[(1, PromiseStatus::NotKept("a path whose name is known can be asked for its size, owner and times"))]),
    act("P2", "lock_data", files::lock, &[(1, PromiseStatus::NotKept("advisory locks need no right to write"))]),
    act("P3", "read_secret_file", files::read, KEPT),
    act("P3", "read_host_tmp", files::read, &[(1, PromiseStatus::KeptByRefusing("/tmp; TMPDIR names a place in the workspace"))]),
    act("P4", "write_site", files::change, KEPT),
    act("P4", "write_api_py", files::change, KEPT),
    act("P4", "write_system", files::create, KEPT),
    act("P4", "write_other_workspace", files::create, KEPT),
    act("P4", "write_host_tmp", files::create, &[(1, PromiseStatus::KeptByRefusing("/tmp; TMPDIR names a place in the workspace"))]),
    act("P4", "write_host_shm", files::create, &[(1, NO_SHM)]),
    act("P4", "utime_device", files::set_times_to_now, KEPT),
    act("P6", "postgres_tcp", services::tcp, &[(1, NO_NETWORK)]),
    act("P6", "postgres_socket", services::path_socket, &[(1, NO_SOCKETS)]),
    act("P6", "postgres_abstract", services::abstract_socket, &[(1, NO_SOCKETS)]),
    act("P6", "unix_datagram", services::datagram, &[(1, NO_SOCKETS)]),
    act("P6", "tcp_fast_open", services::fast_open, &[(1, NO_NETWORK)]),
    act("P6", "udp", services::udp, &[(1, NO_NETWORK)]),
    act("P6", "dns", services::dns, &[(1, NO_NETWORK)]),
    act("P6", "vsock", services::vsock, KEPT),
    act("P6", "packet", services::packet, KEPT),
    act("P6", "netlink", services::netlink, &[(1, PromiseStatus::KeptByRefusing("netlink, so no list of network interfaces"))]),
    act("P6", "inherited_descriptor", services::inherited, KEPT),
    act("P6", "secret_environment", services::environment, KEPT),
    act("P7", "signal_others", processes::signal, &[(1, NO_FOREIGN_SIGNALS), (6, PromiseStatus::Kept)]),
    act("P7", "signal_guardian", processes::signal_holder, &[(1, NO_FOREIGN_SIGNALS), (6, PromiseStatus::Kept)]),
    act("P7", "signal_by_descriptor", processes::signal_by_descriptor, &[(1, NO_FOREIGN_SIGNALS), (6, PromiseStatus::Kept)]),
    act("P7", "ptrace_others", processes::trace, KEPT),
    act("P7", "proc_of_others", processes::look_at, &[(1, NO_PROC)]),
    act("P7", "init_memory", processes::memory, KEPT),
    act("P7", "limits_of_others", processes::limit, &[(1, PromiseStatus::KeptByRefusing("prlimit, affinity and priority of any process but the caller"))]),
    act("P7", "system_v_ipc", processes::segment, &[(1, NO_IPC)]),
    act("P7", "message_queue", processes::queue, &[(1, NO_IPC)]),
    act("P7", "watch_system", kernel::watch_system, KEPT),
    act("P8", "set_user_id", privilege::set_user_id, KEPT),
    act("P8", "set_user_id_file", privilege::set_user_id_file, KEPT),
    act("P8", "user_namespace", privilege::user_namespace, KEPT),
    act("P8", "mount", privilege::mount, KEPT),
    act("P8", "io_uring", privilege::io_uring, KEPT),
    act("P8", "bpf", privilege::bpf, KEPT),
    act("P8", "perf", privilege::perf, KEPT),
    act("P8", "keyring", privilege::keyring, KEPT),
    act("P8", "userfaultfd", privilege::userfaultfd, KEPT),
    act("P8", "foreign_abi", privilege::foreign_abi, KEPT),
    act("P9", "terminal_injection", terminal::inject, KEPT),
    act("P10", "fork_bomb", limits::fork, KEPT),
    act("P10", "memory_bomb", limits::memory, KEPT),
    act("P10", "oom_loop", limits::oom_loop, KEPT),
    act("P10", "uncharged_memory", kernel::uncharged_memory, KEPT),
    act("P10", "disk_bomb", limits::disk, KEPT),
    act("P10", "disk_held_by_calls", hidden_files::held_by_calls, KEPT),
    act("P10", "file_bomb", limits::files, KEPT),
    act("P10", "unlinked_files", hidden_files::unlinked, KEPT),
    act("P10", "log_bomb", limits::log, KEPT),
    act("P11", "daemon_outlives_timeout", limits::daemon, KEPT),
    act("P11", "slow_death", limits::slow_death, KEPT),
    act("P12", "daemon_outlives_runner", limits::daemon, KEPT),
    act("P13", "symlink_farm", files::farm, KEPT),
    act("P13", "hard_links", files::hard_links, KEPT),
];

/// Returns the status of an act at a level, on a kernel with this Landlock ABI.
pub fn promise_status(act: &Act, level: ConfinementLevel, landlock_abi: i32) -> PromiseStatus {
    match level {
        ConfinementLevel::Full => PromiseStatus::Kept,
        ConfinementLevel::Landlock => {
            let rows = act.landlock.iter().rev();
            let mut applicable = rows.filter(|(from, _)| *from <= landlock_abi.max(1));
            applicable
                .next()
                .map_or(PromiseStatus::Kept, |(_, status)| *status)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_act_has_a_name_of_its_own_and_an_answer_for_abi_1() {
        for (n, act) in ACTS.iter().enumerate() {
            assert!(ACTS[..n].iter().all(|other| other.name != act.name));
            assert_eq!(act.landlock.first().map(|(from, _)| *from), Some(1));
            assert!(act.landlock.is_sorted_by_key(|(from, _)| *from));
        }
    }

    #[test]
    fn the_status_follows_the_kernels_landlock_abi() {
        let signal = ACTS.iter().find(|a| a.name == "signal_others");
        let at = |abi| signal.map(|act| promise_status(act, ConfinementLevel::Landlock, abi));
        assert_eq!(at(5), Some(NO_FOREIGN_SIGNALS));
        assert_eq!(at(6), Some(PromiseStatus::Kept));
        assert_eq!(at(9), Some(PromiseStatus::Kept));
    }
}
