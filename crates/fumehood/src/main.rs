//! The one binary. Dispatch only; the hidden `__launch`, `__probe` and `__attack` are
//! handled first, before any thread exists.

#![forbid(unsafe_code)]

mod cli;
mod config;

use std::process::ExitCode;

fn main() -> ExitCode {
    if sandbox::launch::is_launcher() {
        sandbox::launch::main();
    }
    if sandbox::probe::acts::is_probe() {
        sandbox::probe::acts::main();
    }
    if sandbox::attack::is_attacker() {
        sandbox::attack::main();
    }
    // What runs an analysis, as a rule: before anything is read that no analysis may find in the sandbox's memory.
    let word = std::env::args_os().nth(1);
    if word.is_some_and(|word| {
        ["run", "shell", cli::RUNNER]
            .iter()
            .any(|runs| word == *runs)
    }) {
        sandbox::standby::stand_by();
    }
    analysis::timings::mark("start");
    sandbox::hear_of_children();
    cli::main()
}
