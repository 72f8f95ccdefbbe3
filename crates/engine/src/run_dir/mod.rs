//! The run directory of one attempt.
//!
//! A runner creates and locks it before anything else of the attempt exists, and removes it after everything else is
//! gone. If the directory is not locked, its runner is dead. Its files then say what the runner left and how far it
//! came, which is all that finishing the attempt needs.
//!
//! | file | content | written |
//! |---|---|---|
//! | `run.json` | [`RunRecord`] | before each thing that it names is created |
//! | `puts.json` | the files copied into the workspace, with hashes | before the start, if there are any |
//! | `provenance.json` | what the attempt is made from | before the start |
//! | `stdout`, `stderr` | the logs, up to half their limit | as output arrives |
//! | `stdout.tail`, `stderr.tail` | the ends of the logs | when every process is dead |
//! | `outcome.json` | how the program ended | when every process is dead |
//! | `manifest.json` | the outputs to take | before the first file moves; if none moves, when the commit fails |
//! | `objects/` | outputs that the artifact store did not take | when the store fails |
//!
//! Each file is written so that a kill leaves it whole or absent. A power cut may tear it, remove it or leave it empty,
//! until `RunDir::make_durable` is called. That call comes before the first file moves, and before anybody is told
//! that the attempt awaits its commit. If no file moves, the commit itself is the first durable step.
//!
//! In reading order: `record` (what `run.json` says), `dir` (lock, move and removal of the directory), `state_files`
//! (its files), `claim` (how an attempt gets its directory).

mod claim;
mod dir;
mod record;
mod state_files;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub(crate) use claim::{attempt_exists, attempt_exists_with_key};
pub use dir::RunDir;
#[cfg(test)]
pub(crate) use record::RECORD_VERSION;
pub use record::{CommitPlan, ProcessIdentity, RunRecord, RunState, new_attempt_key};
pub use state_files::StateFile;
pub(crate) use state_files::{Durability, tail_name};
