//! The seccomp filter: the reviewed list in `table.rs`, compiled to classic BPF.
//!
//! [`build_filter`] depends only on its options, and `sys` installs its result. The filter first compares the
//! architecture, because the numbers of another ABI mean other calls: a foreign ABI (i386 through `int 0x80` on
//! x86_64) gets ENOSYS. x32 shares x86_64's architecture and sets bit 30 of the number. Such numbers are above every
//! number of the table, so they get ENOSYS with the other unlisted ones.
//!
//! Then a balanced binary search over ranges of numbers finds the call's rule in about eight comparisons. A rule's code
//! neither loads nor compares an argument twice: installing a filter takes the kernel about two thousand instructions
//! for each instruction of the filter, in every run. For a call that is always allowed the filter loads no argument.
//! The kernel proves this when the filter is installed (seccomp_cache_prepare, since 5.11), and from then on does not
//! run the filter for that call at all.

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

/// What the filter depends on. Everything else is the same for every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterOptions {
    pub fallocate: Fallocate,
    pub affinity: Affinity,
    pub connect: Connect,
    pub outer: OuterConfinement,
}

/// What separates the program from the host beside this filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OuterConfinement {
    /// Namespaces of the run's own, so that paths, processes, sockets and IPC objects are the run's. Init is pid 1
    /// there, and `watch` is the thread id of its second thread. The program can have only this uid and gid.
    Namespaces { watch: u32, uid: u32, gid: u32 },
    /// The host itself, seen through Landlock of this ABI. The filter refuses what Landlock does not, or passes it to
    /// the holder of the listener.
    Landlock { abi: i32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallocate {
    Allowed,
    /// EOPNOTSUPP, where the watch and not the kernel enforces the disk limit.
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
    /// The kernel makes connect(2) itself. Only tests use this, as the control for `Brokered`.
    #[cfg_attr(not(test), allow(dead_code))]
    Kernel,
    /// The filter passes connect(2), and a send that may name an address, to the holder of the filter's listener. The
    /// holder must make the call itself. It must not answer CONTINUE where an address matters, because the program
    /// could change the address between the holder's check and the call.
    Brokered,
}

/// The thread id that init's watch thread gets: init is 1 and the program is 2.
pub const WATCH_TID_DEFAULT: u32 = 3;

/// Compiles the filter for one run.
pub fn build_filter(options: &FilterOptions) -> Vec<Instruction> {
    assembler::assemble(&rules(options), table::UNLISTED)
}

/// Returns every rule of one run's filter, sorted by number.
fn rules(options: &FilterOptions) -> Vec<(u32, CallRule)> {
    let mut rules = table::rules(options);
    if let OuterConfinement::Landlock { abi } = options.outer {
        let replaced = landlock_level::rules(abi, options.affinity == Affinity::Fixed);
        rules.retain(|(nr, _)| replaced.iter().all(|(other, _)| other != nr));
        rules.extend(replaced);
    }
    // Putting each rule at the index of its number takes fewer instructions than sorting, and every run does this.
    let mut by_number: Vec<Option<CallRule>> = Vec::new();
    by_number.resize_with(assembler::CAPACITY, || None);
    for (nr, rule) in rules {
        let listed = by_number[call_number(nr) as usize].replace(rule);
        assert!(listed.is_none(), "call {nr} is listed twice");
    }
    let numbered = (0..).zip(by_number);
    numbered
        .filter_map(|(nr, rule)| Some((nr, rule?)))
        .collect()
}

/// Converts a call number, which libc types as long, to the kernel's 32 bits.
fn call_number(nr: libc::c_long) -> u32 {
    u32::try_from(nr).expect("a system call number is positive and fits 32 bits")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
