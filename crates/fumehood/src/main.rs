//! The one binary. Dispatch only; the hidden `__launch`, `__probe` and `__attack` are
//! handled first, before any thread exists.

#![forbid(unsafe_code)]

#[allow(
    rustdoc::broken_intra_doc_links,
    reason = "clap prints these comments in --help, where brackets stand for sets and defaults"
)]
mod cli;
mod config;

use std::process::ExitCode;

fn main() -> ExitCode {
    // Whatever runs an analysis: before anything is read that no analysis may find in the sandbox's memory.
    sandbox::standby::fork_launcher(&["run", "shell", cli::RUNNER]);
    if sandbox::launch::is_launcher() {
        sandbox::launch::main();
    }
    if sandbox::probe::mechanisms::is_probe() {
        sandbox::probe::mechanisms::main();
    }
    if sandbox::attack::is_attacker() {
        sandbox::attack::main();
    }
    store::types::timings::mark("start");
    sandbox::reset_sigchld();
    cli::main()
}
