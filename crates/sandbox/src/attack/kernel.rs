//! Attacks on kernel state that all users share: memory that is charged to nobody, and information about other users.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsRawFd;

use rustix::fs::inotify::{CreateFlags, WatchFlags};
use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::net::{AddressFamily, SendFlags, SocketType};

use super::{AttackAim, AttackResult, any_of};
use crate::sys::{self, Arg, Call};

/// Watches what is opened and executed in a directory of the system.
pub fn watch_system(_aim: &AttackAim<'_>) -> AttackResult {
    const SYSTEM_DIR: &str = "/usr/bin";
    let mut inotify = || {
        let watch = rustix::fs::inotify::init(CreateFlags::CLOEXEC)?;
        rustix::fs::inotify::add_watch(&watch, SYSTEM_DIR, WatchFlags::OPEN)?;
        Ok("it is watched".into())
    };
    let mut notify = || {
        let directory =
            rustix::fs::open(SYSTEM_DIR, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        // Requests no event: the default action of the signal would end this process.
        let numbers = [directory.as_raw_fd(), libc::F_NOTIFY, 0];
        sys::attempt(Call::FCNTL, &mut numbers.map(|n| Arg::Number(n.into())))?;
        Ok("it would be told".into())
    };
    any_of(&mut [("inotify", &mut inotify), ("F_NOTIFY", &mut notify)])
}

/// Makes one object of each kind that is not charged to a memory cgroup. An attacker could make any number of them.
pub fn uncharged_memory(_aim: &AttackAim<'_>) -> AttackResult {
    let mut unfinished_datagram = || {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        let nobody = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9);
        rustix::net::sendto(&socket, &[0; 1 << 15], SendFlags::MORE, &nobody)?;
        Ok("held back".into())
    };
    let mut huge_pages = || {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
        rustix::fs::memfd_create("pages", flags)?;
        Ok("from the host's pool".into())
    };
    let mut policy = || {
        // The range is empty: if this call is allowed, a real range is allowed too.
        sys::attempt(Call::MBIND, &mut [const { Arg::Number(0) }; 6])?;
        Ok("a policy".into())
    };
    let mut pages_in_pipe = || {
        let (_reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let numbers = [writer.as_raw_fd(), 0, 0, 0];
        // No page, as above.
        sys::attempt(Call::VMSPLICE, &mut numbers.map(|n| Arg::Number(n.into())))?;
        Ok("it takes pages".into())
    };
    any_of(&mut [
        ("half a datagram", &mut unfinished_datagram),
        ("huge pages", &mut huge_pages),
        ("mbind", &mut policy),
        ("vmsplice", &mut pages_in_pipe),
    ])
}
