//! From the runner to the program. Three processes pass through this folder; the order of their steps makes the
//! confinement.
//!
//! 1. The *launcher* (`launcher.rs`) is single-threaded from birth and has an empty environment. It enters the
//!    namespaces (`namespaces.rs`), starts pid 1 as the runner's child, and exits. Normally the runner forks the
//!    launcher before it has read any input (`standby.rs`), and that launcher is pid 1 itself. Otherwise the runner
//!    executes our own binary again.
//! 2. *Pid 1* (`init_setup.rs`) builds the new root (`mounts/`), gives up its privilege, forks the child, and goes on in
//!    `inside::init`. At level `landlock` there are no namespaces and no new root: the *guardian* takes the place of pid 1 and does
//!    the same work for its descendants.
//! 3. The *child* (`program.rs`) confines itself step by step and executes the program. `stdio.rs` gives it its standard streams.
//!
//! Each process writes a step into the step log before it tries the step, so that a failure names its step.

mod init_setup;
pub(crate) mod launcher;
pub(crate) mod mounts;
pub(crate) mod namespaces;
mod program;
pub mod standby;
mod stdio;

pub use launcher::{ARGUMENT, is_launcher, main, main_on_older_landlock};
