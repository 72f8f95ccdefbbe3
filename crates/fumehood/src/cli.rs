//! The command line: what was typed, who does it, and with which code it ends.

pub mod args;
mod exit;
mod gc;
mod run;
mod show;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Run untrusted analysis code on Linux, safely and fast.
#[derive(Debug, Parser)]
#[command(name = "fumehood", version, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<args::RunArgs>),
    Shell(Box<args::ShellArgs>),
    Gc(gc::GcArgs),
}

pub fn main() -> ExitCode {
    // Wrong usage is Fumehood's 125, not clap's 2: 2 may be the program's own.
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let help = !e.use_stderr();
            let _unheard = e.print();
            return if help {
                ExitCode::SUCCESS
            } else {
                exit::COULD_NOT_RUN.into()
            };
        }
    };
    let ended = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Shell(args) => run::shell(&args),
        Command::Gc(args) => gc::gc(&args),
    };
    match ended {
        Ok(code) => code.into(),
        Err(error) => {
            show::error(&error);
            exit::COULD_NOT_RUN.into()
        }
    }
}
