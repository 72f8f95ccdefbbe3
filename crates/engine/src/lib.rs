//! One analysis from request to committed record, and the worker that runs queued ones.
//!
//! The sandbox crate confines and runs the program; the store crate keeps the record. `attempt/pipeline.rs` shows the whole
//! sequence; every other module is one stage or one thing that a stage needs.

#![forbid(unsafe_code)]

pub mod attempt;
pub mod collect;
pub mod home;
pub mod plan;
pub mod provenance;
pub mod recovery;
pub mod request;
pub mod run_dir;
pub mod worker;
pub mod workspace;
