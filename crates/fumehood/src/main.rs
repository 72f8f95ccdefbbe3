//! The one binary. Dispatch only; the hidden `__launch` is handled first, before any thread exists.

#![forbid(unsafe_code)]

mod cli;
mod config;

use std::process::ExitCode;

fn main() -> ExitCode {
    if sandbox::launch::is_launcher() {
        sandbox::launch::main();
    }
    cli::main()
}
