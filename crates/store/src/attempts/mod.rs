//! Attempts: begun, committed in one transaction, read, exported, removed.
//!
//! In reading order:
//!
//! - `begin`, `commit`, `commit_rows`: the two transactions that everything else relies on
//! - `give_up`: ending the attempt of a runner that is gone
//! - `read`, `objects`, `export`: what users and other commands read
//! - `remove`: removing analyses, and which objects a sweep must keep

pub(crate) mod begin;
pub(crate) mod commit;
mod commit_rows;
pub(crate) mod export;
pub(crate) mod give_up;
pub(crate) mod objects;
pub(crate) mod read;
pub(crate) mod remove;
