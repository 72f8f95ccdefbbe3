//! What the test programs of the workspace share. Tests alone depend on this crate.
//!
//! A test program with `harness = false` registers its trials with [`trial!`], one line beside each function, and calls
//! [`Harness::run`] in `main`. The harness runs each trial as root and as a plain user, and, where the program asks for
//! it, at both isolation levels. A trial that needs another user or another level than the test program has runs in the
//! same program, started again.
//!
//! | module | what it has |
//! |---|---|
//! | [`harness`] | registered trials, identities, levels, libtest-mimic |
//! | [`account`] | the plain user `fumehood-test` |
//! | [`program`] | the binary under test, copies of the programs that any user can execute |
//! | [`postgres`] | a private PostgreSQL server |
//! | [`home`] | a project, a `FUMEHOOD_HOME` and a workspace root for one trial |
//! | [`command`] | commands that run under a time limit |
//! | [`process`] | processes and cgroups of the host |
//! | [`wait`] | waiting with a bound |

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

pub mod account;
pub mod command;
pub mod harness;
pub mod home;
pub mod postgres;
pub mod process;
pub mod program;
pub mod wait;

#[doc(hidden)]
pub use inventory;

pub use harness::Harness;

/// Whether this process runs as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// An id that no other trial, test process or user has.
pub fn fresh_id(stem: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{stem}-{}-{count}", std::process::id())
}
