//! One analysis from request to record. Uses the sandbox crate to confine and run its program.
//!
//! `pipeline.rs` shows the whole sequence; every other module is one stage or one thing that a stage needs.

#![forbid(unsafe_code)]

pub mod copy_in;
pub mod description;
pub mod hints;
pub mod home;
pub mod lease;
pub mod limits;
pub mod logs;
pub mod pipeline;
pub mod policy;
pub mod reaper;
pub mod record;
pub mod request;
pub mod runtime;
pub mod tree;
pub mod units;
pub mod workspace;
