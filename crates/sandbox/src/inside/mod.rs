//! Pid 1 and its helpers: what runs beside the program while it runs, out of the program's reach.
//!
//! At level `landlock` the guardian runs the same code in the place of pid 1.
//!
//! - `init`: the loop of pid 1. It reaps, keeps every deadline, obeys the runner's orders and reports how the run ended.
//! - `watch`: a thread of init that sums up disk, memory, CPU time and processes ten times a second.
//! - `processes`: what /proc tells of the run's processes. Init and the watch thread read it.
//! - `oom`: init's look at the cgroup's counter of processes killed for want of memory.
//! - `dying`: after SIGKILL, whether the run's processes come nearer to their end.
//! - `broker`: serves the system calls that the filter hands over. At level `full` a process of its own makes socket calls, in the run's
//!   cgroup (`broker/process.rs`); `socket_share` bounds how many sockets the run may have.
//! - `syscall_proxy`: level `landlock`; threads of the guardian change modes, times and lengths of files for the program, and send
//!   signals.
//! - `caller`: the thread that made a call that was handed over. The broker and the syscall proxy read its memory and descriptors.
//! - `kill_helper`: level `landlock` for a plain user; the process that kills all of the run's processes in one system call.

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
