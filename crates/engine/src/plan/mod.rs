//! From a [`Request`](crate::settings::Request) to what a run may see and do. Planning reads the host's files and
//! changes nothing.
//!
//! - `planning.rs`: [`plan`] makes the [`Plan`]: program, arguments, views, inputs.
//! - `path_checks.rs`: which host paths may be shown or copied, and for whom.
//! - `links.rs`: symlinks that an untrusted project may not use to choose what is read.
//! - `world_readable.rs`: path resolution with the rights that every user has, for requests of other users.
//! - `command.rs` and `runtime/`: which program runs, and which directories it needs.
//! - `siblings.rs` and `imports.rs`: Python modules beside a script.
//! - `visible_paths.rs`: arguments that name files which the program would not find.
//! - `paths.rs`, `views.rs`: operations on paths and lists of views.
//! - `limits.rs`: which limits hold, and by which mechanism.
//! - `spec.rs` and `environment.rs`: `build_spec` makes the sandbox's spec from a plan.
//! - `submit_inputs.rs`: [`resolve_submit_inputs`] decides which files travel with a submission.
//! - `error.rs`: [`PlanError`].

mod command;
mod environment;
mod error;
mod imports;
pub mod limits;
mod links;
mod path_checks;
mod paths;
mod planning;
pub mod runtime;
mod siblings;
mod spec;
mod submit_inputs;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod views;
mod visible_paths;
mod world_readable;

pub use error::PlanError;
pub use links::resolve_writable_directory;
pub use path_checks::PrivatePaths;
pub(crate) use planning::may_reveal_path;
pub use planning::{Plan, plan};
pub(crate) use spec::{StartParameters, build_spec, workspace_links};
pub use submit_inputs::{SubmitInputs, resolve_submit_inputs};
