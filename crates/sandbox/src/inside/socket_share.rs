//! Bounds how many sockets a run may have of the kinds whose memory no cgroup is charged for.
//!
//! - Netlink. getifaddrs() and getaddrinfo() query the interfaces over a netlink socket. The kernel's answer waits in
//!   the socket until it is read. With as many sockets as a run may open files, such answers could take gigabytes
//!   beyond any memory limit. So the broker makes these sockets, allows few at a time, and gives each a buffer that
//!   holds no more than twice [`NETLINK_BUFFER_BYTES`] and one answer.
//! - TCP. The kernel charges a connection to a cgroup when it is accepted. Until then the connection may hold a whole
//!   receive buffer, and an accepted one may still hold a little once its cgroup has reached its limit. All of it
//!   counts against one number for the whole host (net.ipv4.tcp_mem). Every connection needs a connect(), so the broker
//!   bounds the number of connections.
//!
//! The kernel counts the sockets of a network namespace wherever their descriptors are: open, in flight over another
//! socket, or not yet accepted. Calls that the broker serves at the same time may together exceed a bound, by at most
//! the number of calls it serves at once.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::sockopt::{
    set_socket_recv_buffer_size, set_socket_send_buffer_size, socket_domain, socket_type,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::spec::Limits;
use crate::sys::Notification;

/// The most netlink sockets at a time. A program uses each one only for a moment.
const NETLINK_SOCKETS_MAX: u64 = 32;
/// The buffer size of a netlink socket, which the kernel doubles for its own overhead. A query must fit, because the
/// kernel sends it back whole with an error.
const NETLINK_BUFFER_BYTES: usize = 16 << 10;

/// Roughly how much a TCP socket may hold uncharged: the receive buffer that `launch/namespaces.rs` sets.
const TCP_SOCKET_BYTES: u64 = 64 << 10;
/// Bounds on the number of TCP sockets. Both ends of a connection may be in the run, so there may be only half as many
/// connections.
const TCP_SOCKETS_MAX: u64 = 4096;
const TCP_SOCKETS_MIN: u64 = 256;
/// How much of the host's memory for TCP a socket may hold, charged or not: the largest buffers that
/// `launch/namespaces.rs` sets, one for each direction.
const TCP_BUFFERS_BYTES: u64 = 2 * (128 << 10);
/// The lower bound on a host with very little memory for TCP, so that some connections are always possible.
const TCP_SOCKETS_SMALL_HOST: u64 = 64;

/// Makes the netlink socket that the call requests. The filter hands over only calls with the protocol NETLINK_ROUTE.
pub fn netlink_socket(call: &Notification) -> io::Result<OwnedFd> {
    const SOCK_TYPE_MASK: u32 = 0xf;
    let kind = call.args[1] as u32;
    let nonblocking = match kind & libc::SOCK_NONBLOCK as u32 {
        0 => SocketFlags::empty(),
        _ => SocketFlags::NONBLOCK,
    };
    check_room(&["NETLINK"], NETLINK_SOCKETS_MAX)?;
    let kind = SocketType::from_raw(kind & SOCK_TYPE_MASK);
    let flags = nonblocking | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind, flags, None)?;
    set_socket_recv_buffer_size(&socket, NETLINK_BUFFER_BYTES)?;
    set_socket_send_buffer_size(&socket, NETLINK_BUFFER_BYTES)?;
    Ok(socket)
}

/// Whether the call asks for a close-on-exec descriptor.
pub fn is_close_on_exec(call: &Notification) -> bool {
    call.args[1] as u32 & libc::SOCK_CLOEXEC as u32 != 0
}

/// The largest size that the program may set with SO_SNDBUF or SO_RCVBUF; the kernel doubles it. It lets no buffer
/// become larger than the initial size, or than the bounds above assume.
pub fn buffer_bytes_max(socket: BorrowedFd<'_>) -> io::Result<usize> {
    const KERNEL_DEFAULT_BYTES: usize = 212_992;
    let stream = socket_type(socket)? == SocketType::STREAM;
    Ok(match socket_domain(socket)? {
        AddressFamily::NETLINK => NETLINK_BUFFER_BYTES,
        AddressFamily::INET | AddressFamily::INET6 if stream => TCP_SOCKET_BYTES as usize / 2,
        _ => KERNEL_DEFAULT_BYTES / 2,
    })
}

/// Refuses a TCP connection past the run's share. Other sockets are charged to the cgroup, or hold nothing.
pub fn check_connection(socket: BorrowedFd<'_>, sockets_max: u64) -> io::Result<()> {
    let internet = [AddressFamily::INET, AddressFamily::INET6].contains(&socket_domain(socket)?);
    match internet && socket_type(socket)? == SocketType::STREAM {
        true => check_room(&["TCP", "TCPv6"], sockets_max),
        false => Ok(()),
    }
}

/// How many TCP sockets the run may have. Together they hold no more uncharged memory than the run's memory limit, and
/// no more than the run's share of the host's memory for TCP.
pub fn tcp_sockets_max(limits: &Limits) -> u64 {
    tcp_sockets_for(limits.memory_bytes, limits.tcp_bytes)
}

fn tcp_sockets_for(memory_bytes: u64, tcp_bytes: u64) -> u64 {
    let uncharged = (memory_bytes / TCP_SOCKET_BYTES).clamp(TCP_SOCKETS_MIN, TCP_SOCKETS_MAX);
    uncharged.min((tcp_bytes / TCP_BUFFERS_BYTES).max(TCP_SOCKETS_SMALL_HOST))
}

/// Fails with ENOBUFS unless one more socket of these protocols may exist in this network namespace.
fn check_room(protocols: &[&str], sockets_max: u64) -> io::Result<()> {
    let table = std::fs::read_to_string("/proc/self/net/protocols")?;
    match count(&table, protocols) {
        Some(now) if now < sockets_max => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::ENOBUFS)),
    }
}

/// Sums up the sockets of these protocols. The table has a line for each protocol: name, size of a socket, number of
/// sockets. A protocol may be missing: a kernel may have no IPv6.
fn count(table: &str, protocols: &[&str]) -> Option<u64> {
    let mut sum = None;
    for line in table.lines() {
        let mut words = line.split_ascii_whitespace();
        if words.next().is_some_and(|name| protocols.contains(&name)) {
            let sockets: u64 = words.nth(1)?.parse().ok()?;
            sum = Some(sum.unwrap_or(0) + sockets);
        }
    }
    sum
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_table_counts_open_sockets() {
        let socket = |family| {
            let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
            rustix::net::socket_with(family, kind, flags, None).unwrap()
        };
        let listeners = [(); 8].map(|()| {
            let socket = socket(AddressFamily::INET);
            rustix::net::listen(&socket, 1).unwrap();
            socket
        });
        assert!(check_room(&["TCP", "TCPv6"], 8).is_err());
        assert!(check_room(&["TCP", "TCPv6"], u64::MAX).is_ok());
        check_connection(std::os::fd::AsFd::as_fd(&listeners[0]), u64::MAX).unwrap();
    }

    #[test]
    fn sockets_are_counted_by_protocol_and_bounded_by_memory() {
        let table =
            "protocol size sockets memory\nTCPv6 2400 3 7 no\nTCP 2300 40 7 no\nUDP 9 5 1 no\n";
        assert_eq!(count(table, &["TCP", "TCPv6"]), Some(43));
        assert_eq!(count(table, &["NETLINK"]), None);
        assert_eq!(count("TCP 1\n", &["TCP"]), None);
        let of = |mib: u64| tcp_sockets_for(mib << 20, u64::MAX);
        assert_eq!([of(1), of(64), of(1 << 20)], [256, 1024, 4096]);
        let of = |tcp_mib: u64| tcp_sockets_for(4 << 30, tcp_mib << 20);
        assert_eq!([of(1), of(64), of(1 << 20)], [64, 256, 4096]);
    }
}
