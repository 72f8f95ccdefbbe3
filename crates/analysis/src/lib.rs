//! One analysis from request to record. Uses the sandbox crate to confine and run its program.
//!
//! `pipeline.rs` shows the whole sequence; every other module is one stage or one thing that a stage needs.

#![forbid(unsafe_code)]

pub mod artifacts;
mod attempt;
pub mod bundle;
pub mod collect;
pub mod copy_in;
pub mod description;
pub mod doctor;
pub mod fault;
pub mod heart;
pub mod hints;
pub mod home;
pub mod isolation;
pub mod lease;
pub mod ledger;
pub mod limits;
pub mod logs;
pub mod manifest;
pub mod pipeline;
pub mod policy;
pub mod post_process;
pub mod provenance;
pub mod reaper;
pub mod record;
pub mod request;
pub mod result_value;
pub mod run_dir;
pub mod runtime;
pub mod scope;
pub mod settle;
pub mod steps;
pub mod store;
pub mod submission;
pub mod terminal_filter;
pub mod timings;
pub mod tree;
pub mod units;
pub mod worker;
pub mod workspace;
