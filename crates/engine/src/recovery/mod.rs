//! Finishes what dead runners left, and runs the stages of an attempt one by one on request.
//!
//! In reading order:
//!
//! - `reaper`: finds run directories whose runner is dead, commits their attempts or removes what is left of them.
//! - `run_dirs`: lists the run directories of a home, and what to do next about each.
//! - `staged_commands`: `workspace create`, `post-process`, `workspace remove` and `record`, which use the reaper's
//!   parts.
//!
//! Both enter the sequence of an attempt at `attempt::finalize`; the attempt itself never calls recovery.

pub mod reaper;
pub mod run_dirs;
pub mod staged_commands;
