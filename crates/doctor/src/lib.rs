//! What this host can enforce, and whether it holds.
//!
//! - [`host_checks`] examines the host: it tries each mechanism, level and limit, and names a cause and a remedy for
//!   what does not work. This is `fumehood doctor`.
//! - [`attack`] runs the attack battery: it makes targets, does each forbidden act unconfined (the control) and in a
//!   real sandbox, and compares the results with the promises. This is `fumehood doctor --attack`. The acts themselves
//!   need raw system calls and are in `sandbox::attack`.
//!
//! This crate prints nothing and reads no settings. The caller passes values in and prints what comes back.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod attack;
pub mod host_checks;
