//! Pid 1 and its helpers: the code that runs beside the program, where the program cannot reach it.
//!
//! At level `landlock` the guardian runs the same code in the place of pid 1.
//!
//! - `init`: the loop of pid 1. It reaps, keeps every deadline, obeys the runner's commands and reports how the run
//!   ended.
//! - `watch`: a thread of init that makes a pass ten times a second: it measures memory, CPU time, processes, open
//!   files, and the disk as often as time allows.
//! - `processes`: what /proc says about the run's processes. Init and the watch thread use it.
//! - `oom`: init's check of the cgroup's counter of out-of-memory kills.
//! - `dying`: after SIGKILL, whether the run's processes make progress towards their death.
//! - `broker`: serves the system calls that the seccomp filter hands over. At level `full` a separate process in the
//!   run's cgroup makes socket calls (`broker/process.rs`); `socket_share` bounds how many sockets the run may have.
//! - `syscall_proxy`: level `landlock` only. Threads of the guardian change modes, times and lengths of files for the
//!   program, and send signals for it.
//! - `caller`: the thread that made a call that was handed over. The broker reads its memory and copies its
//!   descriptors.
//! - `kill_helper`: level `landlock` for a plain user only. A process that kills all of the run's processes in one
//!   system call.

mod broker;
mod caller;
pub mod dying;
pub mod init;
pub mod kill_helper;
pub mod oom;
pub mod processes;
mod socket_share;
mod syscall_proxy;
pub mod watch;
