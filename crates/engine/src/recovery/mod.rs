//! Finishes what dead runners left, and runs the stages of an attempt one by one on request.

pub mod reaper;
pub mod staged_commands;
