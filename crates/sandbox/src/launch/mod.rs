//! From the runner to the program. Three processes pass through this folder; the order of their steps makes the
//! confinement.
//!
//! 1. The *launcher* enters the namespaces (`namespaces.rs`). Normally it is a standby launcher (`standby.rs`): the
//!    runner forks it as pid 1 before the runner has read any input. Otherwise the runner executes its own binary again
//!    with an empty environment (`launcher.rs`), and that launcher starts pid 1 as the runner's child, and exits.
//!    Either launcher is single-threaded from the start and holds none of the caller's variables.
//! 2. *Pid 1* (`init_setup.rs`) builds the new root (`mounts/`), gives up its privilege, forks the child, and goes on
//!    in `inside::init`. At level `landlock` there are no namespaces and no new root: the *guardian* takes the place of
//!    pid 1 and does the same work for its descendants.
//! 3. The *child* (`program.rs`) confines itself step by step and executes the program. `stdio.rs` gives it its
//!    standard streams.
//!
//! Each process writes a step into the step log before it tries the step, so that a failure names its step.

mod init_setup;
pub(crate) mod launcher;
pub(crate) mod mounts;
pub(crate) mod namespaces;
mod program;
pub mod standby;
mod stdio;

use rustix::process::Signal;

use crate::step_report::{LaunchStepError, StepContext};

pub use launcher::{ARGUMENT, is_launcher, main, main_on_older_landlock};

/// Asks the kernel to kill this process when its parent dies.
pub(crate) fn die_with_parent() -> Result<(), LaunchStepError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .doing("ask to die with the parent")
}
