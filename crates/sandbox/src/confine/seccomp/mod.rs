//! The seccomp filter: the reviewed list in `table.rs`, compiled to classic BPF.
//!
//! [`build_filter`] depends on nothing but its options; `sys` installs what it returns. The program first compares the
//! architecture. Another ABI's numbers mean other calls, so a foreign one (i386 through `int 0x80` on
//! x86_64) gets ENOSYS. x32 shares x86_64's architecture and sets bit 30 of the number; such numbers
//! are above every number of the table and get ENOSYS with the other unlisted ones.
//!
//! Then a balanced binary search over ranges of numbers finds the call's rule in about eight
//! comparisons. A call that is always allowed is reached without loading an argument: the kernel
//! (seccomp_cache_prepare, since 5.11) proves that when the filter is installed, and from then on
//! does not run the filter for that call at all.

mod assembler;
mod ioctl;
mod landlock_level;
mod memory;
pub mod number;
mod rule;
mod table;
mod threads;
mod transfer;

use crate::sys::Instruction;
use rule::CallRule;
pub use transfer::{receive, send};

/// What the filter must know about the run. Everything else is the same for every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterOptions {
    pub fallocate: Fallocate,
    pub affinity: Affinity,
    pub connect: Connect,
    pub outer: OuterConfinement,
}

/// What stands between the program and the host beside this filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OuterConfinement {
    /// Namespaces of its own: paths, processes, sockets and segments are the run's. Init is number 1 there, and `watch` is the
    /// number of its second thread. The only ids that the program can have are these.
    Namespaces { watch: u32, uid: u32, gid: u32 },
    /// The host itself, seen through Landlock of this ABI: what that does not refuse is refused here, or handed to the
    /// holder of the listener.
    Landlock { abi: i32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallocate {
    Allowed,
    /// EOPNOTSUPP, where the disk limit is watched and not enforced by the kernel.
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Affinity {
    Free,
    /// sched_setaffinity gets EPERM.
    Fixed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connect {
    /// The kernel makes connect(2) itself. Only the tests ask for this, as the control of the other.
    #[cfg_attr(not(test), allow(dead_code))]
    Kernel,
    /// connect(2), and a send that may name an address, is not made but handed to the holder of the filter's listener. The
    /// holder must make the call itself and not answer CONTINUE where an address matters: it could change between the
    /// holder's look and the call.
    Brokered,
}

/// The number of whoever is born second beside pid 1, after the program: the watch.
pub const WATCH_TID_DEFAULT: u32 = 3;

/// The filter for one run.
pub fn build_filter(options: &FilterOptions) -> Vec<Instruction> {
    assembler::assemble(&rules(options), table::UNLISTED)
}

/// Every rule of one run's filter, sorted by number.
fn rules(options: &FilterOptions) -> Vec<(u32, CallRule)> {
    let mut rules = table::rules(options);
    if let OuterConfinement::Landlock { abi } = options.outer {
        let replaced = landlock_level::rules(abi, options.affinity == Affinity::Fixed);
        rules.retain(|(nr, _)| replaced.iter().all(|(other, _)| other != nr));
        rules.extend(replaced);
    }
    let mut rules: Vec<_> = rules
        .into_iter()
        .map(|(nr, rule)| (low(nr), rule))
        .collect();
    rules.sort_by_key(|(nr, _)| *nr);
    rules
}

/// System call numbers are small and positive; libc types them as long.
fn low(nr: libc::c_long) -> u32 {
    u32::try_from(nr).expect("a system call number is positive and fits 32 bits")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
