//! The launcher: single-threaded from birth, with an empty environment. As a rule it is forked before the runner has read
//! anything at all (`standby.rs`), and otherwise our own binary re-executed.
//!
//! Three processes pass through this file, and the order of their steps is the confinement:
//!
//! 1. the *launcher* enters the namespaces, starts pid 1 as the runner's child, and is gone; one that was forked is pid 1;
//! 2. *pid 1* builds the new root, gives up its privilege, and goes on in `init.rs`;
//! 3. the *child* confines itself step by step and becomes the program.
//!
//! At level `landlock` there are no namespaces to enter and no root to build: the second process is the *guardian*,
//! which stands where pid 1 stands and does the same work for its descendants.
//!
//! Each step is announced to the runner before it is tried, so that a failure names its step.

mod init_setup;
pub(crate) mod launcher;
pub(crate) mod mounts;
pub(crate) mod namespaces;
mod program;
pub mod standby;
mod stdio;

pub use launcher::{ARGUMENT, is_launcher, main, main_on_older_landlock};
