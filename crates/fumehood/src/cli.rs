//! The command line: what was typed, who does it, and with which code it ends.

pub mod args;
mod cancel;
mod db;
mod detail;
mod doctor;
mod document;
mod events;
mod exit;
mod gc;
mod ids;
mod ledger;
mod list;
mod logs;
mod notify;
mod outlet;
mod outputs;
mod print;
mod progress;
mod record;
mod remove;
mod retry;
mod run;
mod runner;
mod show;
mod standing;
mod submit;
mod sweep;
mod top;
mod verify;
mod wait;
mod when;
mod worker;
mod workspace;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use engine::attempt::terminal_filter::TerminalFilter;

/// The word by which a worker starts a runner.
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
    Show(detail::ShowArgs),
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

/// What was typed. The commands that run an analysis are looked for by themselves first: to describe all the others costs
/// as much as a tenth of a run. Whatever is not plainly one of them is read, and complained about, with all there are.
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

/// Nobody is told to try a command that is not for people.
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

/// Wrong arguments are repeated in the error, and may be names of files that a program made: `fumehood run *`.
fn print_usage_error(error: &clap::Error) {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let text = match std::io::stderr().is_terminal() && !is_set("NO_COLOR") {
        true => error.render().ansi().to_string(),
        false => error.render().to_string(),
    };
    let (mut filter, mut shown) = (TerminalFilter::default(), Vec::new());
    filter.push(text.as_bytes(), &mut shown);
    filter.interrupt(&mut shown);
    let _unheard = std::io::stderr().write_all(&shown);
}

pub fn main() -> ExitCode {
    // Wrong usage is Fumehood's 125, not clap's 2: 2 may be the program's own.
    let cli = match parse() {
        Ok(cli) => cli,
        Err(e) if e.use_stderr() => {
            print_usage_error(&e);
            return exit::COULD_NOT_RUN.into();
        }
        Err(help) => {
            let _unheard = help.print();
            return ExitCode::SUCCESS;
        }
    };
    let ended = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Submit(args) => submit::submit(&args),
        Command::Shell(args) => run::shell(&args),
        Command::List(args) => list::list(&args),
        Command::Show(args) => detail::show(&args),
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
    match ended {
        Ok(code) => code.into(),
        Err(error) if print::is_reader_gone(&error) => print::READER_GONE.into(),
        Err(error) => {
            show::error(&error);
            exit::COULD_NOT_RUN.into()
        }
    }
}
