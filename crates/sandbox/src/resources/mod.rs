//! placeholder

pub mod cgroup;
pub mod cpus;
pub mod quota;
pub mod rlimits;
