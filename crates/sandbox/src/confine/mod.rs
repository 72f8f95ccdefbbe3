//! Restrictions that a process puts on itself for good: no capabilities, a Landlock domain, a seccomp filter.
//!
//! The child applies all three before it executes the program (`launch/program.rs`). Init and its watch thread drop
//! their capabilities, and the kill helper enters a Landlock domain of its own.
//!
//! - `capabilities`: drops every capability in every set.
//! - `landlock`: which files the program may reach, and the scopes of signals and abstract sockets.
//! - `seccomp`: the reviewed table of system calls, and its compilation to classic BPF. Init compiles the filter; the
//!   child installs it.

pub mod capabilities;
pub mod landlock;
pub mod seccomp;
