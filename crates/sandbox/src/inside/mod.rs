//! placeholder

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
