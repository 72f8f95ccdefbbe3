//! How many sockets a run may have of the kinds that hold memory which no cgroup is charged for.
//!
//! - Netlink. getifaddrs() and getaddrinfo() ask for the interfaces by one. What the kernel answers waits in the socket until it
//!   is read: with as many sockets as a run may open files that was gigabytes under any memory limit. So the broker makes these
//!   sockets, few at a time, and each holds no more than twice [`NETLINK_BUFFER_BYTES`] and one answer.
//! - TCP. A connection is charged when it is accepted; until then it may hold a whole receive buffer. One that was accepted may
//!   still hold a little when its cgroup has reached its limit. All of it counts against one number for the whole
//!   host (net.ipv4.tcp_mem). No connection comes to be without a connect(), so the broker bounds their number.
//!
//! The kernel counts sockets for the network namespace, wherever their descriptors are: open, in flight over another
//! socket, or not yet accepted. Calls that are served at the same time may pass a bound, by as many as the broker serves.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::sockopt::{
    set_socket_recv_buffer_size, set_socket_send_buffer_size, socket_domain, socket_type,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::spec::Limits;
use crate::sys::Notification;

/// Each is used for a moment.
const NETLINK_SOCKETS_MAX: u64 = 32;
/// What the kernel doubles for its own overhead. A question must fit, and is sent back whole with an error.
const NETLINK_BUFFER_BYTES: usize = 16 << 10;

/// What a TCP socket may hold uncharged, roughly: the receive buffer that `launch/namespaces.rs` sets.
const TCP_SOCKET_BYTES: u64 = 64 << 10;
/// With both ends of a connection in the run, half as many connections.
const TCP_SOCKETS_MAX: u64 = 4096;
const TCP_SOCKETS_MIN: u64 = 256;
/// What a TCP socket may hold of the host's memory for TCP, charged or not: the largest buffers that `launch/namespaces.rs` sets, one for
/// each direction.
const TCP_BUFFERS_BYTES: u64 = 2 * (128 << 10);
/// On a host with very little memory for TCP, still some connections.
const TCP_SOCKETS_LEAST: u64 = 64;

/// Makes the netlink socket that the call asks for. The filter has seen to the family and the protocol, NETLINK_ROUTE.
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

/// Whether the program asked for a descriptor that a program it executes does not get.
pub fn is_close_on_exec(call: &Notification) -> bool {
    call.args[1] as u32 & libc::SOCK_CLOEXEC as u32 != 0
}

/// The largest size that the program may ask for, by SO_SNDBUF or SO_RCVBUF; the kernel counts twice as much. No buffer becomes
/// larger than it is from the start, or than the bounds above rest on.
pub fn buffer_bytes_max(socket: BorrowedFd<'_>) -> io::Result<usize> {
    const KERNELS_DEFAULT: usize = 212_992;
    let stream = socket_type(socket)? == SocketType::STREAM;
    Ok(match socket_domain(socket)? {
        AddressFamily::NETLINK => NETLINK_BUFFER_BYTES,
        AddressFamily::INET | AddressFamily::INET6 if stream => TCP_SOCKET_BYTES as usize / 2,
        _ => KERNELS_DEFAULT / 2,
    })
}

/// Refuses a connection past the run's share. Only of TCP sockets: others are charged, or hold nothing.
pub fn check_connection(socket: BorrowedFd<'_>, most: u64) -> io::Result<()> {
    let internet = [AddressFamily::INET, AddressFamily::INET6].contains(&socket_domain(socket)?);
    match internet && socket_type(socket)? == SocketType::STREAM {
        true => check_room(&["TCP", "TCPv6"], most),
        false => Ok(()),
    }
}

/// So many that they hold no more uncharged than the run may have charged, and in all no more than the run's share of what the
/// host has for TCP.
pub fn tcp_sockets_max(limits: &Limits) -> u64 {
    tcp_sockets_for(limits.memory_bytes, limits.tcp_bytes)
}

fn tcp_sockets_for(memory_bytes: u64, tcp_bytes: u64) -> u64 {
    let uncharged = (memory_bytes / TCP_SOCKET_BYTES).clamp(TCP_SOCKETS_MIN, TCP_SOCKETS_MAX);
    uncharged.min((tcp_bytes / TCP_BUFFERS_BYTES).max(TCP_SOCKETS_LEAST))
}

/// Whether there is room for one more socket of these protocols in this network namespace.
fn check_room(protocols: &[&str], most: u64) -> io::Result<()> {
    let table = std::fs::read_to_string("/proc/self/net/protocols")?;
    match count(&table, protocols) {
        Some(now) if now < most => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::ENOBUFS)),
    }
}

/// The table has a line for each protocol: its name, the size of its sockets, their number. A kernel may be without IPv6.
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
    fn the_kernel_counts_sockets() {
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
    fn a_table_is_read_by_its_names() {
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
