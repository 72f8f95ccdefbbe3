//! Attacks on services and on ways to reach them: sockets of every kind, descriptors, credentials. The attacks test
//! reachability: the targets stand in for a database and accept any data.

use std::io::{self, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::time::Duration;

use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::calls;
use super::files::try_each_path;
use super::{
    AttackAim, AttackResult, Attempts, SECRET_PREFIX, SECRET_VARIABLE, all_or, refused, unable,
};

/// Sends the first bytes of a PostgreSQL client, then the mark.
fn send_greeting(mut stream: impl Write, mark: &str) -> io::Result<()> {
    stream.write_all(&[0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f])?;
    stream.write_all(mark.as_bytes())
}

pub fn tcp(aim: &AttackAim<'_>) -> AttackResult {
    let port: u16 = aim.number()?;
    send_greeting(TcpStream::connect(("127.0.0.1", port))?, aim.mark)?;
    Ok("connected".into())
}

pub fn path_socket(aim: &AttackAim<'_>) -> AttackResult {
    try_each_path(aim, |path| {
        send_greeting(UnixStream::connect(path)?, aim.mark)?;
        Ok("connected".into())
    })
}

pub fn abstract_socket(aim: &AttackAim<'_>) -> AttackResult {
    let address = SocketAddr::from_abstract_name(aim.target.as_bytes())?;
    send_greeting(UnixStream::connect_addr(&address)?, aim.mark)?;
    Ok("connected".into())
}

/// Sends to a path and to an abstract name, also from one half of a pair, which needs no socket call.
pub fn datagram(aim: &AttackAim<'_>) -> AttackResult {
    let parts = aim.parts();
    let [path, name] = parts[..] else {
        return unable("a path and an abstract name are needed");
    };
    let mark = aim.mark.as_bytes();
    let to_path = || UnixDatagram::unbound()?.send_to(mark, path);
    let to_name = || {
        let address = SocketAddr::from_abstract_name(name.as_bytes())?;
        UnixDatagram::unbound()?.send_to_addr(mark, &address)
    };
    let pair = || {
        let (kind, flags) = (SocketType::DGRAM, SocketFlags::CLOEXEC);
        rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None).map(|(one, _other)| one)
    };
    let from_pair = || {
        let address = SocketAddrUnix::new(path)?;
        rustix::net::sendto(pair()?, mark, SendFlags::empty(), &address)
    };
    let from_pair_to_name = || {
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        let one = pair()?;
        rustix::net::connect(&one, &address)?;
        rustix::net::send(&one, mark, SendFlags::empty())
    };
    Attempts::default()
        .add("to a path", "sent", to_path())
        .add("to a name", "sent", to_name())
        .add("from a pair", "sent", from_pair())
        .add("from a pair to a name", "sent", from_pair_to_name())
        .result()
}

/// Opens a socket that is closed when a program is executed.
fn open_socket(
    family: AddressFamily,
    kind: SocketType,
    protocol: Option<Protocol>,
) -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, protocol)
}

/// Sends data with the first packet (TCP fast open): a send that also connects.
pub fn fast_open(aim: &AttackAim<'_>) -> AttackResult {
    const MSG_FASTOPEN: SendFlags = SendFlags::from_bits_retain(libc::MSG_FASTOPEN as u32);
    let port: u16 = aim.number()?;
    let to = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    let socket = open_socket(AddressFamily::INET, SocketType::STREAM, None)?;
    rustix::net::sendto(&socket, aim.mark.as_bytes(), MSG_FASTOPEN, &to)?;
    // An early close could lose the data together with the connection.
    rustix::net::shutdown(&socket, rustix::net::Shutdown::Write)?;
    Ok("sent".into())
}

pub fn udp(aim: &AttackAim<'_>) -> AttackResult {
    let port: u16 = aim.number()?;
    let to = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    let mark = aim.mark.as_bytes();
    let bound = || UdpSocket::bind("127.0.0.1:0")?.send_to(mark, to);
    let unbound = || {
        let socket = open_socket(AddressFamily::INET, SocketType::DGRAM, None)?;
        rustix::net::sendto(&socket, mark, SendFlags::empty(), &to)
    };
    Attempts::default()
        .add("bound", "sent", bound())
        .add("unbound", "sent", unbound())
        .result()
}

/// Sends a well-formed query with the mark in the name. Data can leave in this way where only name lookups are
/// allowed.
pub fn dns(aim: &AttackAim<'_>) -> AttackResult {
    let port: u16 = aim.number()?;
    let mut question = vec![0x46, 0x48, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in [aim.mark, "invalid"] {
        question.push(u8::try_from(label.len()).or_else(|_| unable("a long mark"))?);
        question.extend(label.bytes());
    }
    question.extend([0, 0, 1, 0, 1]);
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(("127.0.0.1", port))?;
    socket.send(&question)?;
    Ok("asked".into())
}

pub fn vsock(_aim: &AttackAim<'_>) -> AttackResult {
    let success = "a socket to the machine's host";
    let open = |kind| open_socket(AddressFamily::VSOCK, kind, None);
    Attempts::default()
        .add("stream", success, open(SocketType::STREAM))
        .add("datagram", success, open(SocketType::DGRAM))
        .result()
}

pub fn packet(_aim: &AttackAim<'_>) -> AttackResult {
    let success = "a socket that hears every packet";
    // ETH_P_ALL, in the network's byte order.
    let every_protocol = std::num::NonZeroU32::new(0x0300).map(Protocol::from_raw);
    let packet = |kind| open_socket(AddressFamily::PACKET, kind, every_protocol);
    let icmp = Some(rustix::net::ipproto::ICMP);
    let raw_ip = || open_socket(AddressFamily::INET, SocketType::RAW, icmp);
    Attempts::default()
        .add("raw", success, packet(SocketType::RAW))
        .add("datagram", success, packet(SocketType::DGRAM))
        .add("raw IP", success, raw_ip())
        .result()
}

const NETLINK_ROUTE: u32 = 0;
const NETLINK_SOCK_DIAG: u32 = 4;
const NETLINK_UEVENT: u32 = 15;
const NETLINK_GENERIC: u32 = 16;

fn netlink_socket(protocol: u32) -> rustix::io::Result<OwnedFd> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    let protocol = std::num::NonZeroU32::new(protocol).map(Protocol::from_raw);
    let socket = open_socket(AddressFamily::NETLINK, SocketType::RAW, protocol)?;
    let _ = set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(2)));
    Ok(socket)
}

/// Sends a request for a whole table and passes every message of the answer to `look`.
fn dump(
    socket: BorrowedFd<'_>,
    kind: u16,
    body: &[u8],
    mut look: impl FnMut(&[u8]),
) -> rustix::io::Result<()> {
    const REQUEST_AND_DUMP: u16 = 0x301;
    const ANSWERS_MAX: usize = 4096;
    const LAST_KINDS: [u16; 2] = [2, 3];
    let mut request = Vec::new();
    request.extend((16 + body.len() as u32).to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend(REQUEST_AND_DUMP.to_ne_bytes());
    request.extend([0; 8]);
    request.extend(body);
    rustix::net::send(socket, &request, SendFlags::empty())?;
    let mut answer = vec![0u8; 1 << 16];
    for _ in 0..ANSWERS_MAX {
        let (n, _) = rustix::net::recv(socket, &mut answer[..], RecvFlags::empty())?;
        let mut rest = &answer[..n];
        while let Some(&[a, b, c, d, e, f, ..]) = rest.get(..16) {
            let length = u32::from_ne_bytes([a, b, c, d]) as usize;
            if LAST_KINDS.contains(&u16::from_ne_bytes([e, f])) || length < 16 {
                return Ok(());
            }
            look(rest.get(16..length).unwrap_or_default());
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
    Ok(())
}

/// Lists the host's sockets and interfaces through the kernel, and opens netlink families that lead into the kernel.
pub fn netlink(aim: &AttackAim<'_>) -> AttackResult {
    let port: u16 = aim.number()?;
    let sockets = || {
        // struct inet_diag_req_v2: IPv4, TCP, listening sockets, any address.
        let mut body = vec![2, 6, 0, 0];
        body.extend((1u32 << 10).to_ne_bytes());
        body.extend([0; 48]);
        let socket = netlink_socket(NETLINK_SOCK_DIAG)?;
        let mut found = false;
        let look = |m: &[u8]| found |= m.get(4..6) == Some(&port.to_be_bytes());
        dump(socket.as_fd(), 20, &body, look)?;
        match found {
            true => Ok("a socket of the host is listed".into()),
            false => refused("lists none of the host's"),
        }
    };
    let interfaces = || {
        let socket = netlink_socket(NETLINK_ROUTE)?;
        let mut others = 0;
        // struct ifinfomsg: the field at offset 4 is the interface's index; loopback is always 1.
        let look = |m: &[u8]| others += usize::from(m.get(4..8) != Some(&1i32.to_ne_bytes()));
        dump(socket.as_fd(), 18, &[0; 16], look)?;
        match others {
            0 => refused("lists only loopback"),
            _ => Ok(format!("{others} interfaces of the host are listed")),
        }
    };
    Attempts::default()
        .add_result("sockets", sockets())
        .add_result("interfaces", interfaces())
        .add("events", "opened", netlink_socket(NETLINK_UEVENT))
        .add("generic", "opened", netlink_socket(NETLINK_GENERIC))
        .result()
}

/// Returns the text if it is a planted secret, and nothing else: unconfined, an attack may also find real secrets.
fn planted_secret(found: &[u8]) -> Option<String> {
    let is_planted = found.starts_with(SECRET_PREFIX.as_bytes());
    is_planted.then(|| String::from_utf8_lossy(found).into_owned())
}

/// Reads every file that the caller left open.
pub fn inherited(_aim: &AttackAim<'_>) -> AttackResult {
    const DESCRIPTOR_MAX: i32 = 1023;
    let mut found = Vec::new();
    for number in 0..=DESCRIPTOR_MAX {
        let mut content = [0u8; 256];
        let length = calls::read_inherited(number, &mut content).unwrap_or(0);
        let secret = planted_secret(&content[..length]);
        found.extend(secret.map(|text| format!("{number} holds {text}")));
    }
    all_or(found, "no descriptor leads to a file")
}

/// Searches the attacker's own environment, and that of every process it can inspect.
pub fn environment(_aim: &AttackAim<'_>) -> AttackResult {
    let own = std::env::var_os(SECRET_VARIABLE).unwrap_or_default();
    let own = planted_secret(own.as_bytes()).map(|value| format!("own: {value}"));
    let mut found = Vec::from_iter(own);
    let prefix = format!("{SECRET_VARIABLE}=");
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let environ = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let variables = environ.split(|b| *b == 0);
        let values = variables.filter_map(|v| v.strip_prefix(prefix.as_bytes()));
        let secrets = values.filter_map(planted_secret);
        found.extend(secrets.map(|value| format!("{}: {value}", entry.path().display())));
    }
    all_or(found, "found in no environment")
}
