//! One attempt: the states and transitions of a single run, from the claimed id to the committed record.
//!
//! [`crate::pipeline::run`] calls the transitions in order. In reading order:
//!
//! - `context`: what a run needs besides its request; `observer`: how the caller follows the run; `error`: what can
//!   fail.
//! - `state`: `Attempt`, which owns everything that has been created so far.
//! - `begin`: claims the run directory and the uid; also has `ensure_row`, which begins the database row later.
//! - `prepare`: creates the workspace, the quota and the cgroup; `input_copy` copies the inputs and records what they
//!   were.
//! - `isolation`: chooses the level of confinement; `execute`: runs the program, with `log_capture` and
//!   `idle_connection`; `systemd_scope`: asks systemd for a delegated cgroup.
//! - `record`: the result document; `record_builder`: builds it from what was measured; `hints`: guesses why the
//!   program failed.
//! - `end`: every way out of an attempt; `finalize`: collection and commit, which recovery uses too; `post_process`:
//!   the command that the operator configured to run after a commit.
//! - `recorder`: the database connection and the artifact store that all of these use.
//! - `terminal_filter`: makes program output safe for a terminal.
//!
//! This folder uses `run_dir` and never `recovery`: recovery enters the sequence at `finalize`.

pub(crate) mod begin;
pub mod context;
pub mod end;
pub mod error;
mod execute;
pub mod finalize;
pub mod hints;
mod idle_connection;
mod input_copy;
pub mod isolation;
pub mod log_capture;
pub mod observer;
pub mod post_process;
mod prepare;
pub mod record;
pub mod record_builder;
pub mod recorder;
pub(crate) mod state;
pub mod systemd_scope;
pub mod terminal_filter;
