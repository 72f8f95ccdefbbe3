//! Confine and run one process. This crate knows nothing of analyses, databases, HTTP or command lines.
//!
//! # Theory of operation
//!
//! At level `full` up to five processes take part. Each holds no more privilege than its next step needs.
//!
//! - The *runner* calls [`supervise::spawn`]. It keeps the caller's identity, makes the pipes and the plan, and hands
//!   them to the launcher. Normally the launcher is a process that the runner forked before it read its
//!   configuration ([`standby`]). Otherwise the launcher is the same binary, executed again with an empty environment
//!   and one socket.
//! - The *launcher* ([`launch`]) enters the new namespaces and receives the plan and its descriptors over the socket. A
//!   standby launcher is pid 1 from the start. An executed launcher starts pid 1 as a child of the runner, and exits.
//! - *Pid 1* completes the new root, gives up its privilege, makes itself undumpable, so that the program cannot trace
//!   it or read its memory, forks the child, and stays as the sandbox's init (`inside::init`): it reaps, keeps every
//!   deadline, and watches the limits in a second thread. When pid 1 exits, the kernel kills everything else in the pid
//!   namespace.
//! - The *child* confines itself, one layer after the other, and executes the program.
//! - The *broker* (`inside::broker`) makes calls that name a socket's address on the program's behalf. Pid 1 starts it
//!   at the first such call.
//!
//! Commands and reports travel over one socket (`channel`). The socket is close-on-exec, so the program never holds it.
//! Inward it carries the commands to start and to stop. Outward it carries the layers in force, the step that failed,
//! and how the run ended. Each process writes a step into a memory file before it tries the step, so a sudden death
//! still names its step. How a run ended comes from init's `wait` and from the cgroup's counters, never from anything
//! the program says.
//!
//! If the runner dies, init receives SIGKILL (PDEATHSIG) and an end-of-file on the socket, whichever comes first. If
//! init dies, the kernel kills the pid namespace. The processes need no other clean-up.
//!
//! All this describes level `full`. At level `landlock` there are no namespaces and no new root. The *guardian* takes
//! the place of pid 1 and runs the same code with another `ProcessSet`. The guardian is a subreaper, so the run's
//! processes are its descendants. When the runner dies, the guardian first kills all its descendants, and then exits.
//! It also performs, on the program's behalf, those calls on the workspace that Landlock cannot judge
//! (`inside::syscall_proxy`). Where the program runs as the caller's own user, a *kill helper* (`inside::kill_helper`)
//! may take part too. The [`probe`] finds a host's level by building a miniature of each. A table says what holds at
//! each level ([`promises`]), and [`attack`] tests that table.
//!
//! # Map
//!
//! A module uses only those above it in this list; there are no cycles.
//!
//! | module | what it is | who runs it |
//! |---|---|---|
//! | `sys` | every raw system call, opening files, and /proc; the only `unsafe` | all |
//! | [`events`] | waiting for descriptors, wake events, timers, signals | all |
//! | [`spec`], [`outcome`] | the request for a run, and how the run ended | plain data |
//! | `channel`, `launch_step`, `step_report`, `layout`, `standby_slot` | messages on the socket; the launch steps; reports of steps and layers; fixed paths and ids; the standby launcher's socket and pid | all |
//! | `confine` | capabilities, Landlock, seccomp | the child |
//! | `resources` | [`cgroup`], [`quota`], rlimits, CPUs | the runner and the child |
//! | `plan` | what the runner hands to the launcher | the runner, the launcher |
//! | `inside` | init, watch, broker, syscall proxy, kill helper | pid 1 or the guardian |
//! | [`launch`] | launcher, namespaces, mounts, the child's steps | the launcher, pid 1, the child |
//! | [`supervise`] | start, streams, deadlines, outcome | the runner |
//! | [`probe`] | which levels and mechanisms this host has | the caller |
//! | [`attack`], [`promises`] | the escape attempts, and their expected results | the attacker |
//!
//! # Example
//!
//! The launcher is the same binary, so the caller's `main` first checks whether it was started as the launcher:
//!
//! ```no_run
//! use std::os::fd::BorrowedFd;
//! use std::path::Path;
//!
//! use sandbox::spec::Spec;
//! use sandbox::supervise::{self, RunError, SpawnResources, Stream, SupervisorHandler};
//!
//! /// Prints the program's output, and never stops the program.
//! struct PrintOutput;
//!
//! impl SupervisorHandler for PrintOutput {
//!     fn fill(&mut self, _workspace: BorrowedFd<'_>) -> std::io::Result<()> {
//!         Ok(())
//!     }
//!     fn output(&mut self, _stream: Stream, bytes: &[u8]) {
//!         print!("{}", String::from_utf8_lossy(bytes));
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
#![warn(missing_docs)]

pub mod attack;
mod channel;
mod confine;
pub mod events;
mod inside;
pub mod launch;
mod launch_step;
mod layout;
pub mod outcome;
mod plan;
pub mod probe;
mod resources;
pub mod spec;
mod standby_slot;
mod step_report;
pub mod supervise;
mod sys;

pub use attack::promises;
pub use launch::standby;
pub use layout::{HIDDEN_DIR, INSIDE_GID, INSIDE_HOME, INSIDE_UID, SYSTEM_DIRS};
pub use plan::LaunchPlan;
pub use resources::{cgroup, quota};
pub use sys::{
    block_signals, drop_code_pages, landlock_abi, monotonic_us, read_signal, reset_sigchld,
    signal_fd,
};
