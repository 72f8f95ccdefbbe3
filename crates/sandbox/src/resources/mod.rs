//! Bounds on the run's use of the machine.
//!
//! - `cgroup`: the runner makes a control group per run, reads its counters and removes it; the child enters it.
//! - `quota`: the runner puts the workspace under a project quota of its file system.
//! - `rlimits`: the child lowers its own limits before it becomes the program.
//! - `cpus`: which CPUs a process may use. The runner and init move a newly forked child; the child pins itself.

pub mod cgroup;
pub mod cpus;
pub mod quota;
pub mod rlimits;
