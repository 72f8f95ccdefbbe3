//! The command line: parses it, calls the command, and returns its exit code.
//!
//! In reading order:
//! - `args`: the options of `run`, `submit` and `shell`. The other commands declare their options in their own files.
//! - `exit`: the exit codes. `print`: what goes to stdout. `messages`: what goes to stderr. `logging`: `FUMEHOOD_LOG`.
//! - `run`, `stream_forwarder`, `progress`: `fumehood run` and `shell`.
//! - `submit`, `worker`, `runner`, `sd_notify`: the queue. `wait`, `cancel`, `retry`, `top`: control of queued and
//!   running analyses.
//! - `list`, `show`, `logs`, `outputs`, `verify`, `db`: read the record. `record`, `workspace`, `remove`, `gc`,
//!   `object_gc`: change it.
//! - `doctor`: prints what the crate `doctor` finds.
//! - `record_access`, `ids`, `attempt_text`, `time_format`: shared by the commands.

pub mod args;
mod attempt_text;
mod cancel;
mod db;
mod doctor;
mod exit;
mod gc;
mod ids;
mod list;
mod logging;
mod logs;
mod messages;
mod object_gc;
mod outputs;
mod print;
mod progress;
mod record;
mod record_access;
mod remove;
mod retry;
mod run;
mod runner;
mod sd_notify;
mod show;
mod stream_forwarder;
mod submit;
mod time_format;
mod top;
mod verify;
mod wait;
mod worker;
mod workspace;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use engine::attempt::terminal_filter::TerminalFilter;
use engine::recovery::run_dirs;

/// The hidden command with which a worker starts a runner.
pub const RUNNER: &str = "__runner";

/// Run untrusted analysis code on Linux, safely and fast, and keep what it produced.
#[derive(Debug, Parser)]
#[command(name = "fumehood", version, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<args::RunArgs>),
    Submit(Box<args::SubmitArgs>),
    Shell(Box<args::ShellArgs>),
    List(list::ListArgs),
    Show(show::ShowArgs),
    Outputs(outputs::OutputsArgs),
    Logs(logs::LogsArgs),
    Worker(worker::WorkerArgs),
    #[command(name = RUNNER, hide = true)]
    Runner(runner::RunnerArgs),
    Wait(wait::WaitArgs),
    Cancel(cancel::CancelArgs),
    Retry(retry::RetryArgs),
    Top(top::TopArgs),
    Workspace(workspace::WorkspaceArgs),
    PostProcess(workspace::PostProcessArgs),
    Record(Box<record::RecordArgs>),
    Rm(remove::RmArgs),
    Gc(gc::GcArgs),
    Verify(verify::VerifyArgs),
    Db(db::DbArgs),
    Doctor(doctor::DoctorArgs),
}

/// Parses the command line. Tries `run` and the runner alone first: building the parser of all commands costs a tenth
/// of a run. Anything that does not parse as one of these goes to the whole parser, which also writes the error.
fn parse() -> Result<Cli, clap::Error> {
    let first = std::env::args_os().nth(1).unwrap_or_default();
    let command = match first.to_str() {
        Some("run") => parse_alone("run").map(|args| Command::Run(Box::new(args))),
        Some(RUNNER) => parse_alone(RUNNER).map(Command::Runner),
        _ => None,
    };
    match command {
        Some(command) => Ok(Cli { command }),
        None => Cli::try_parse().map_err(without_hidden),
    }
}

/// Removes the hidden command from the suggestions of an error.
fn without_hidden(mut error: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    let kind = ContextKind::SuggestedSubcommand;
    if let Some(ContextValue::Strings(mut names)) = error.remove(kind) {
        names.retain(|name| name != RUNNER);
        if !names.is_empty() {
            error.insert(kind, ContextValue::Strings(names));
        }
    }
    error
}

fn parse_alone<A: Args>(name: &'static str) -> Option<A> {
    let command = A::augment_args(clap::Command::new(name));
    let typed = std::env::args_os().skip(1);
    let matches = command.try_get_matches_from(typed).ok()?;
    A::from_arg_matches(&matches).ok()
}

/// Prints a usage error through the terminal filter: the error repeats the arguments, and these may be names of files
/// that a program made, as in `fumehood run *`.
fn print_usage_error(error: &clap::Error) {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let text = match std::io::stderr().is_terminal() && !is_set("NO_COLOR") {
        true => error.render().ansi().to_string(),
        false => error.render().to_string(),
    };
    let (mut filter, mut shown) = (TerminalFilter::default(), Vec::new());
    filter.push(text.as_bytes(), &mut shown);
    filter.interrupt(&mut shown);
    let _ = std::io::stderr().write_all(&shown);
}

pub fn main() -> ExitCode {
    if let Err(error) = logging::start() {
        messages::error(&error.into());
        return exit::COULD_NOT_RUN.into();
    }
    // Wrong usage exits with Fumehood's 125, not with clap's 2, because 2 may be the program's own exit code.
    let cli = match parse() {
        Ok(cli) => cli,
        Err(e) if e.use_stderr() => {
            print_usage_error(&e);
            return exit::COULD_NOT_RUN.into();
        }
        Err(help) => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    let command_result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Submit(args) => submit::submit(&args),
        Command::Shell(args) => run::shell(&args),
        Command::List(args) => list::list(&args),
        Command::Show(args) => show::show(&args),
        Command::Outputs(args) => outputs::outputs(&args),
        Command::Logs(args) => logs::logs(&args),
        Command::Worker(args) => worker::worker(&args),
        Command::Runner(args) => runner::runner(&args),
        Command::Wait(args) => wait::wait(&args),
        Command::Cancel(args) => cancel::cancel(&args),
        Command::Retry(args) => retry::retry(&args),
        Command::Top(args) => top::top(&args),
        Command::Workspace(args) => workspace::workspace(&args),
        Command::PostProcess(args) => workspace::post_process(&args),
        Command::Record(args) => record::record(&args),
        Command::Rm(args) => remove::rm(&args),
        Command::Gc(args) => gc::gc(&args),
        Command::Verify(args) => verify::verify(&args),
        Command::Db(args) => db::db(&args),
        Command::Doctor(args) => doctor::doctor(&args),
    };
    match command_result {
        Ok(code) => code.into(),
        Err(error) if print::is_reader_gone(&error) => print::READER_GONE.into(),
        Err(error) => {
            messages::error(&error);
            exit::COULD_NOT_RUN.into()
        }
    }
}
