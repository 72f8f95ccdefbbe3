//! `fumehood __runner`: one attempt that a worker has claimed.

use engine::settings::{Sources, WorkerSettings};
use engine::worker::runner::{Runner, RunnerResult};

use super::args::StoreArgs;
use super::{exit, record_access};

/// Started by `fumehood worker`; not for people.
#[derive(Clone, Debug, clap::Args)]
pub struct RunnerArgs {
    #[command(flatten)]
    pub store: StoreArgs,
}

pub fn runner(args: &RunnerArgs) -> anyhow::Result<u8> {
    let runner = Runner::from_stdin()?;
    let settings = WorkerSettings::read(args.store.given_settings(), &Sources::from_process()?)?;
    let home = record_access::home()?;
    let recorder = record_access::open_required(&settings.record, &home)?;
    Ok(match runner.run(&settings, &home, recorder)? {
        RunnerResult::Complete | RunnerResult::Unfinished => 0,
        // Nothing ran. The worker counts such exits, because the machine may be at fault.
        RunnerResult::NotStarted => exit::COULD_NOT_RUN,
    })
}
