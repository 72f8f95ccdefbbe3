//! The promises of the design, one file each, tried on this kernel.
//!
//! This program has no libtest harness, for two reasons. The sandbox starts this binary again as its launcher. And each
//! trial runs as root and as a plain user with a login of its own, at level `full` and at level `landlock`: testkit
//! starts this binary again under that user's id, or with the level in its environment. If a trial cannot run at a
//! level, its registration says so and gives the reason.

#![allow(clippy::unwrap_used)]

mod confined_run;
mod landlock_file_metadata;
mod landlock_level;
mod landlock_older_kernels;
mod layers;
mod p02_inputs;
mod p03_runtime;
mod p04_writes;
mod p06_services;
mod p07_others;
mod p08_privilege;
mod p09_streams;
mod p10_hidden_usage;
mod p10_host_tables;
mod p10_kernel_memory;
mod p10_limits;
mod p10_watch;
mod p11_deadline;
mod p11_slow_death;
mod p12_runner_death;
mod p17_outcomes;
mod science;
mod science_tools;

use testkit::Harness;

fn main() {
    if sandbox::launch::is_launcher() {
        match confined_run::older_landlock() {
            Some(abi) => sandbox::launch::main_on_older_landlock(abi),
            None => sandbox::launch::main(),
        }
    }
    if let Some(role) = p12_runner_death::inner_role() {
        p12_runner_death::play(&role);
        return;
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    Harness::new()
        .with_levels()
        // Most trials wait for deadlines and for the passes of the watch.
        .with_threads(2 * cpus)
        .with_spread(&["p10_hidden_usage", "p10_limits", "p10_watch"])
        .run();
}
