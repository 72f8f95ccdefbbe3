//! Runs a command as an analysis and prints its outputs: `fumehood-embed COMMAND [ARGS]...`
//!
//! The settings come from where `fumehood run` finds them: files, `FUMEHOOD_*` variables and the operator's policy.

#![forbid(unsafe_code)]

use std::error::Error;
use std::process::ExitCode;

use engine::attempt::log_capture::OutputChunk;
use engine::attempt::recorder::Recorder;
use engine::home::Home;
use engine::pipeline::{self, RunContext, RunObserver};
use engine::plan::limits::error_chain;
use engine::request::Command;
use engine::settings::{self, Sources};
use sandbox::supervise::Stream;

/// Passes nothing on while the analysis runs.
struct Silent;

impl RunObserver for Silent {
    fn output(&mut self, _: Stream, _: OutputChunk<'_>) {}
}

fn run() -> Result<(), Box<dyn Error>> {
    let command = Command::Argv(std::env::args_os().skip(1).collect());
    let resolved = settings::run_request(command, Vec::new(), &Sources::from_process()?)?;
    let home = Home::from_process()?.open()?;
    let mut recorder = Recorder::from_settings(&resolved.record, &home)?;
    let context = RunContext::new(home, &resolved.record);
    let completed = pipeline::run(&resolved.request, &context, recorder.as_mut(), &mut Silent);
    let record = completed.map_err(|failure| failure.error)?.record;
    println!("{} {}", record.id, record.status.as_str());
    for output in &record.outputs {
        println!(
            "{} bytes {}",
            output.bytes,
            String::from(output.path.clone())
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    // The launcher of the sandbox is this executable again.
    if sandbox::launch::is_launcher() {
        sandbox::launch::main();
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fumehood-embed: {}", error_chain(&*error));
            ExitCode::FAILURE
        }
    }
}
