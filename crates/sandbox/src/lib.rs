//! Confine and run one process. This crate knows nothing of analyses, databases, HTTP or command lines.
//!
//! # Theory of operation
//!
//! Up to five processes take part. Each holds no more privilege than its next step needs.
//!
//! - The *runner* calls [`supervise::spawn`]. It keeps the caller's identity, makes the pipes and the plan, and hands them to the
//!   launcher. The launcher is either one that stands by since before the runner had read anything ([`standby`]), or our own binary
//!   executed again with an empty environment and one socket.
//! - The *launcher* ([`launch`]) enters the new namespaces and receives the plan and its descriptors over the socket. A launcher that
//!   stood by is pid 1 from its birth; one that was executed starts pid 1 as a child of the runner, and exits.
//! - *Pid 1* completes the new root, gives up its privilege, makes itself unreachable, forks the child, and stays as the sandbox's
//!   init (`inside::init`): it reaps, keeps every deadline, and watches the limits in a second thread. When pid 1 exits, the kernel
//!   kills everything else in the pid namespace.
//! - The *child* confines itself, layer upon layer, and executes the program.
//! - The *broker* (`inside::broker`) is started by pid 1 at the first call that names a socket's address. It makes such calls on the
//!   program's behalf.
//!
//! The socket is the only channel between inside and outside (`channel`). It is close-on-exec, so the program never holds it. From the
//! inside it carries the layers that hold, the step that failed, and how the run ended; from the outside it carries orders to start and
//! to stop. Each step is written into a memory file before it is tried. How a run ended is therefore known from init's `wait` and
//! from the cgroup's counters, never from anything the program says.
//!
//! If the runner dies, init gets SIGKILL (PDEATHSIG) and an end-of-file on the socket, whichever comes first. If init dies, the kernel
//! kills the pid namespace. Nothing else needs to be cleaned up for the processes to be gone.
//!
//! That is level `full`. At level `landlock` there are no namespaces and no new root. The *guardian* takes the place of pid 1: it runs
//! the same code with another `ProcessSet`. The run's processes are its descendants, since it is their subreaper; it does not die with
//! the runner but kills them all first; and it does for the program, on the workspace, what Landlock cannot judge
//! (`inside::syscall_proxy`). Which level a host gives is found by building a miniature of it ([`probe`]); what holds at each level is
//! a table ([`promises`]), which [`attack`] tries.
//!
//! # Map
//!
//! A module uses only those above it in this list; there are no cycles.
//!
//! | module | what it is | who runs it |
//! |---|---|---|
//! | `sys` | every raw system call, and /proc; the only `unsafe` | all |
//! | [`spec`], [`outcome`] | a run as it is asked for, and how it ended | plain data |
//! | `channel`, `step_report`, `layout`, `standby_slot` | messages on the socket; steps and layers; fixed paths and ids; the launcher that stands by | all |
//! | `confine` | capabilities, Landlock, seccomp | the child |
//! | `resources` | [`cgroup`], [`quota`], rlimits, CPUs | the runner and the child |
//! | `plan` | what the runner hands to the launcher | the runner, the launcher |
//! | `inside` | init, watch, broker, syscall proxy, kill helper | pid 1 or the guardian |
//! | [`launch`] | launcher, namespaces, mounts, the child's steps | the launcher, pid 1, the child |
//! | [`supervise`] | start, streams, deadlines, outcome | the runner |
//! | [`probe`] | which levels and mechanisms this host has | the caller |
//! | [`attack`], [`promises`] | the escape battery, and what it must find | the attacker |
//!
//! # Example
//!
//! The caller's `main` gives the launcher its chance first, since the launcher is the same binary:
//!
//! ```no_run
//! use std::os::fd::BorrowedFd;
//! use std::path::Path;
//!
//! use sandbox::spec::Spec;
//! use sandbox::supervise::{self, Control, RunError, SpawnResources, Stream, SupervisorHandler};
//!
//! /// Prints the program's output and never stops the program.
//! struct PrintOutput;
//!
//! impl SupervisorHandler for PrintOutput {
//!     fn fill(&mut self, _workspace: BorrowedFd<'_>) -> std::io::Result<()> {
//!         Ok(())
//!     }
//!     fn output(&mut self, _stream: Stream, bytes: &[u8]) {
//!         print!("{}", String::from_utf8_lossy(bytes));
//!     }
//!     fn blocked_on(&self, _stream: Stream) -> Option<BorrowedFd<'_>> {
//!         None
//!     }
//!     fn unblocked(&mut self, _stream: Stream) {}
//!     fn control_fd(&self) -> Option<BorrowedFd<'_>> {
//!         None
//!     }
//!     fn next_control(&mut self) -> Option<Control> {
//!         None
//!     }
//! }
//!
//! fn run(spec: &Spec, workspace: BorrowedFd<'_>) -> Result<(), RunError> {
//!     let resources = SpawnResources {
//!         launcher: Path::new("/proc/self/exe"),
//!         workspace: Some(workspace),
//!         stdin: None,
//!         group: None,
//!     };
//!     let finished = supervise::spawn(spec, resources)?.supervise(&mut PrintOutput)?;
//!     println!("{:?}", finished.outcome);
//!     Ok(())
//! }
//!
//! if sandbox::launch::is_launcher() {
//!     sandbox::launch::main();
//! }
//! ```

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
