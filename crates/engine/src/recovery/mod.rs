//! Finishes what dead runners left, and runs the stages of an attempt one by one on request.
//!
//! In reading order:
//!
//! - `reaper`: finds run directories whose runner is dead, commits their attempts or removes what is left of them.
//! - `staged_commands`: `workspace create`, `post-process`, `workspace remove` and `record`, which use the reaper's
//!   parts.
//!
//! Both enter the sequence of an attempt at `attempt::finalize`; the attempt itself never calls recovery.

pub mod reaper;
pub mod staged_commands;
