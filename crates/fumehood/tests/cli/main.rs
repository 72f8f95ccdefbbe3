//! The real binary, end to end: what a user types, what the binary prints, and what it leaves behind.
//!
//! This program has no libtest harness, because each trial runs as root and as a plain user with a login of its own: testkit
//! starts this program again under that user's id.

#![allow(clippy::unwrap_used)]

mod collection_bounds;
mod concurrent_runs;
mod doctor;
mod doctor_attack;
mod durability;
mod exit_codes;
mod hostile_outputs;
mod input_links;
mod isolation_levels;
mod launcher_and_init;
mod logging;
mod maintenance;
mod options;
mod output;
mod planted_files;
mod policy;
mod postgres;
mod prepared_workspaces;
mod queue_commands;
mod queue_home;
mod queue_privacy;
mod read_commands;
mod record;
mod recovery;
mod runner_crash;
mod runtimes;
mod shell;
mod slow_death;
mod submit;
mod terminal_output;
mod worker_robustness;
mod workspace;

use testkit::Harness;

fn main() {
    Harness::new()
        .with_binary(env!("CARGO_BIN_EXE_fumehood"))
        .run();
}
