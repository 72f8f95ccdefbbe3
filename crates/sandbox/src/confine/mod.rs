//! placeholder

pub mod capabilities;
pub mod landlock;
pub mod seccomp;
