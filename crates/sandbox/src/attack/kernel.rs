//! Attacks on kernel state that all users share: memory that is charged to nobody, and information about other users.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsRawFd;

use rustix::fs::MemfdFlags;
use rustix::fs::inotify::{CreateFlags, WatchFlags};
use rustix::net::{AddressFamily, SendFlags, SocketType};

use super::{AttackAim, AttackResult, Attempts};
use crate::sys::{self, Arg, Call};

/// Watches what is opened and executed in a directory of the system.
pub fn watch_system(_aim: &AttackAim<'_>) -> AttackResult {
    const SYSTEM_DIR: &str = "/usr/bin";
    let inotify = || {
        let watch = rustix::fs::inotify::init(CreateFlags::CLOEXEC)?;
        rustix::fs::inotify::add_watch(&watch, SYSTEM_DIR, WatchFlags::OPEN)
    };
    let notify = || {
        let directory = File::open(SYSTEM_DIR)?;
        // Requests no event: the default action of the signal would end this process.
        let numbers = [directory.as_raw_fd(), libc::F_NOTIFY, 0];
        sys::attempt(Call::FCNTL, &mut numbers.map(|n| Arg::Number(n.into())))
    };
    Attempts::default()
        .add("inotify", "it is watched", inotify())
        .add("F_NOTIFY", "it would be told", notify())
        .result()
}

/// Makes one object of each kind that is not charged to a memory cgroup. An attacker could make any number of them.
pub fn uncharged_memory(_aim: &AttackAim<'_>) -> AttackResult {
    let unfinished_datagram = || {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        let nobody = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9);
        rustix::net::sendto(&socket, &[0; 1 << 15], SendFlags::MORE, &nobody)
    };
    let huge_pages = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
    let huge_pages = || rustix::fs::memfd_create("pages", huge_pages);
    // The range is empty: if this call is allowed, a real range is allowed too.
    let policy = || sys::attempt(Call::MBIND, &mut [const { Arg::Number(0) }; 6]);
    let pages_in_pipe = || {
        let (_reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let numbers = [writer.as_raw_fd(), 0, 0, 0];
        // No page, as above.
        sys::attempt(Call::VMSPLICE, &mut numbers.map(|n| Arg::Number(n.into())))
    };
    Attempts::default()
        .add("half a datagram", "held back", unfinished_datagram())
        .add("huge pages", "from the host's pool", huge_pages())
        .add("mbind", "a policy", policy())
        .add("vmsplice", "it takes pages", pages_in_pipe())
        .result()
}
