//! Merges what all sources ask for into one [`Request`](engine::request::Request), within the operator's policy.
//!
//! The sources, weakest first: built-in defaults, the user's `config.toml`, the project's `fumehood.toml`, the caller's
//! `FUMEHOOD_*` variables, the options. The strongest source that sets a value wins; lists add up. Then the policy
//! applies to the merged value: a value that the caller asked for and that exceeds the policy is an error that names
//! the policy; a default that exceeds the policy is lowered.
//!
//! Invariant: the request is only ever built from checked values, in `request.rs`, so nothing weaker than the policy
//! reaches it.
//!
//! In reading order:
//! - `settings`: the table of all settings, with kinds, bounds and where each may be set.
//! - `sources`: the process environment that decides about a request.
//! - `trusted_file`: reads a file that nobody else may have written.
//! - `entries`: the settings of one source. `policy`: the operator's. `post_process`: one section of both files.
//! - `merged`: all entries, merged and bounded. `list_settings`: those that are lists.
//! - `request`: the request of `run` and `shell`. `record`: where results go.
//! - `submit`: what goes into the queue. `worker_request`: what a worker makes of it.
//! - `error`, `suggestion`, `env_names`, `database_url`: shared by the above.

pub mod database_url;
pub mod entries;
mod env_names;
mod error;
mod list_settings;
mod merged;
pub mod policy;
pub mod post_process;
pub mod record;
mod request;
pub mod settings;
mod sources;
mod submit;
pub mod suggestion;
pub mod trusted_file;
mod worker_request;

pub use record::{RecordSettings, record_command_settings, record_settings, workspace_settings};
pub use request::{Presentation, Resolved, run_request, shell_request};
pub use sources::Sources;
pub use submit::{QueueOptions, ResolvedSubmission, SubmissionConfig, env_from_options};
pub use worker_request::request_from_submission;

#[cfg(test)]
mod tests;
