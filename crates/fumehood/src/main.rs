//! The `fumehood` binary: the command line in, text or JSON out. The work is done by the crates `engine`, `store`,
//! `sandbox` and `doctor`.
//!
//! The same binary also serves as the launcher, the mechanism trial and the attacker (`__launch`, `__probe`,
//! `__attack`). `main` handles these first, before any thread exists. Every other command goes to [`cli::main`], which
//! parses the command line, calls the library and prints the result.

#![forbid(unsafe_code)]

#[allow(
    rustdoc::broken_intra_doc_links,
    reason = "clap prints these comments in --help, where brackets stand for sets and defaults"
)]
mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    // Commands that run an analysis fork the launcher here, before this process reads anything that an analysis must
    // not find in the sandbox's memory.
    sandbox::standby::fork_launcher(&["run", "shell", cli::RUNNER]);
    if sandbox::launch::is_launcher() {
        sandbox::launch::main();
    }
    if sandbox::probe::mechanisms::is_mechanism_trial() {
        sandbox::probe::mechanisms::main();
    }
    if sandbox::attack::is_attacker() {
        sandbox::attack::main();
    }
    store::types::timings::mark("start");
    sandbox::reset_sigchld();
    cli::main()
}
