//! Merges what all sources ask for into one [`Request`], within the operator's policy.
//!
//! The sources, weakest first: built-in defaults, the user's `config.toml`, the project's `fumehood.toml`, the caller's
//! `FUMEHOOD_*` variables, the options. The strongest source that sets a value wins; lists add up. Then the policy
//! applies to the merged value: a value that the caller asked for and that exceeds the policy is an error that names
//! the policy; a default that exceeds the policy is lowered.
//!
//! Invariant: only this folder can make a [`Request`], and it makes one from checked values, so nothing weaker than the
//! policy can be run. The request of a submission depends on the submission and on the worker's [`WorkerSettings`], and
//! on nothing else of the process that makes it: no environment, no file, no working directory.
//!
//! In reading order:
//! - `table`: the table of all settings, with kinds, bounds and where each may be set.
//! - `sources`: what of the process decides about a request.
//! - `trusted_file`: reads a file that nobody else may have written.
//! - `entries`: the settings of one source. `policy`: the operator's. `post_process`: one section of both files.
//! - `merged`: all entries, merged and bounded. `list_settings`: those that are lists.
//! - `request`: the request of `run` and `shell`. `record`: where results go.
//! - `submit`: what goes into the queue. `worker_settings`: what a worker makes of it.
//! - `error`, `suggestion`, `env_names`, `database_url`: shared by the above.

mod database_url;
pub mod entries;
mod env_names;
mod error;
mod list_settings;
mod merged;
pub mod policy;
mod post_process;
mod record;
mod request;
mod sources;
mod submit;
pub mod suggestion;
pub mod table;
mod trusted_file;
mod worker_settings;

pub use error::ConfigError;
pub use post_process::PostProcessSettings;
pub use record::{
    RecordLocationError, RecordSettings, record_command_settings, record_settings,
    workspace_settings,
};
pub use request::{Presentation, Request, Resolved, run_request, shell_request};
pub use sources::Sources;
pub use submit::{QueueOptions, ResolvedSubmission, SubmissionConfig, env_from_options};
pub(crate) use worker_settings::ReservedCapacity;
pub use worker_settings::WorkerSettings;

#[cfg(test)]
mod tests;
