//! Confine and run one process. Knows nothing of analyses, databases, HTTP or command lines.
//!
//! # Theory of operation
//!
//! Up to four processes take part, and each holds no more privilege than its next step needs.
//!
//! - The *runner* calls [`supervise::spawn`]. It keeps the caller's identity, makes the pipes, the
//!   cgroup and the plan, and hands them to the launcher: one that stands by (`standby.rs`) since before the runner had
//!   read anything, or our own binary started again, with an empty environment and one socket.
//! - The *launcher* (`launch.rs`) enters the new namespaces and receives the plan and descriptors over the socket. One that
//!   stood by is pid 1 from its birth; one that was executed starts pid 1 as a child of the runner, and ends.
//! - *Pid 1* (`init.rs`) completes the new root (`mounts.rs`), gives up its privilege, makes itself unreachable, starts
//!   the child, and stays: it reaps, holds every deadline, and watches (`watch.rs`). At the first call that names a
//!   socket's address it starts a process that makes such calls on the program's behalf (`broker`). When pid 1 ends, the
//!   kernel kills everything else.
//! - The *child* confines itself, layer upon layer, and executes the program.
//!
//! The socket is the only channel between inside and outside, it is close-on-exec, and it carries: from the inside, the
//! layers that hold, what failed, how it all ended; from the outside, orders to stop. Each step is written into a memory
//! file before it is tried.
//! How a run ended is therefore known from init's `wait` and from the cgroup's counters, never
//! from anything the program says.
//!
//! If the runner dies, init gets SIGKILL (PDEATHSIG) and an end-of-file on the socket, whichever comes first. If init
//! dies, the kernel kills the pid namespace. Nothing else needs to be cleaned up for the processes
//! to be gone.
//!
//! That is level `full`. At level `landlock` there are no namespaces and no new root. Pid 1's place is taken by the
//! *guardian*, the same code with another `processes::ProcessSet`: the run's processes are its descendants, since it
//! is their subreaper; it does not die with the runner but kills them all first; and it does for the program, on
//! the workspace, what Landlock cannot judge (`deputy.rs`). Which level a host gives is found by building a
//! miniature of it (`probe.rs`); what holds at each is a table (`promises.rs`).

#![deny(unsafe_code)]

pub mod attack;
mod channel;
mod confine;
mod inside;
pub mod launch;
mod layout;
pub mod outcome;
mod plan;
pub mod probe;
pub mod promises;
mod resources;
pub mod spec;
mod standby_slot;
mod step_report;
pub mod supervise;
mod sys;

pub use launch::standby;
pub use layout::{HIDDEN_DIR, INSIDE_GID, INSIDE_HOME, INSIDE_UID, SYSTEM_DIRS};
pub use plan::LaunchPlan;
pub use resources::{cgroup, quota};
pub use sys::{
    block_signals, drop_code_pages, landlock_abi, monotonic_us, read_signal, reset_sigchld,
    signal_fd,
};
