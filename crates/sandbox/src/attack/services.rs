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
use super::{AttackAim, AttackFailure, AttackResult, SECRET_PREFIX, SECRET_VARIABLE, any_of};

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
    let mut ways: Vec<(String, Box<dyn FnMut() -> AttackResult>)> = Vec::new();
    for path in aim.paths() {
        let connect = move || {
            send_greeting(UnixStream::connect(path)?, aim.mark)?;
            Ok("connected".into())
        };
        ways.push((path.display().to_string(), Box::new(connect)));
    }
    let mut list: Vec<super::Attempt<'_>> = Vec::new();
    for (name, way) in &mut ways {
        list.push((name, way));
    }
    any_of(&mut list)
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
        return Err(AttackFailure::Unable(
            "a path and an abstract name are needed".into(),
        ));
    };
    let mark = aim.mark.as_bytes();
    let mut to_path = || {
        UnixDatagram::unbound()?.send_to(mark, path)?;
        Ok("sent".into())
    };
    let mut to_name = || {
        let address = SocketAddr::from_abstract_name(name.as_bytes())?;
        UnixDatagram::unbound()?.send_to_addr(mark, &address)?;
        Ok("sent".into())
    };
    let pair = |kind: SocketType| -> io::Result<OwnedFd> {
        let (one, _other) =
            rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        Ok(one)
    };
    let mut from_pair = || {
        let address = SocketAddrUnix::new(path)?;
        rustix::net::sendto(pair(SocketType::DGRAM)?, mark, SendFlags::empty(), &address)?;
        Ok("sent".into())
    };
    let mut from_pair_to_name = || {
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        let one = pair(SocketType::DGRAM)?;
        rustix::net::connect(&one, &address)?;
        rustix::net::send(&one, mark, SendFlags::empty())?;
        Ok("sent".into())
    };
    any_of(&mut [
        ("to a path", &mut to_path),
        ("to a name", &mut to_name),
        ("from a pair", &mut from_pair),
        ("from a pair to a name", &mut from_pair_to_name),
    ])
}

/// Sends data with the first packet (TCP fast open): a send that also connects.
pub fn fast_open(aim: &AttackAim<'_>) -> AttackResult {
    const MSG_FASTOPEN: SendFlags = SendFlags::from_bits_retain(libc::MSG_FASTOPEN as u32);
    let port: u16 = aim.number()?;
    let to = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::sendto(&socket, aim.mark.as_bytes(), MSG_FASTOPEN, &to)?;
    // An early close could lose the data together with the connection.
    rustix::net::shutdown(&socket, rustix::net::Shutdown::Write)?;
    Ok("sent".into())
}

pub fn udp(aim: &AttackAim<'_>) -> AttackResult {
    let port: u16 = aim.number()?;
    let mut send_to = || {
        UdpSocket::bind("127.0.0.1:0")?.send_to(aim.mark.as_bytes(), ("127.0.0.1", port))?;
        Ok("sent".into())
    };
    let mut unbound = || {
        let to = std::net::SocketAddr::from(([127, 0, 0, 1], port));
        let (kind, flags) = (SocketType::DGRAM, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::INET, kind, flags, None)?;
        rustix::net::sendto(&socket, aim.mark.as_bytes(), SendFlags::empty(), &to)?;
        Ok("sent".into())
    };
    any_of(&mut [("bound", &mut send_to), ("unbound", &mut unbound)])
}

/// Sends a well-formed query with the mark in the name. Data can leave in this way where only name lookups are
/// allowed.
pub fn dns(aim: &AttackAim<'_>) -> AttackResult {
    let port: u16 = aim.number()?;
    let mut question = vec![0x46, 0x48, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in [aim.mark, "invalid"] {
        let length =
            u8::try_from(label.len()).map_err(|_| AttackFailure::Unable("a long mark".into()))?;
        question.push(length);
        question.extend(label.bytes());
    }
    question.extend([0, 0, 1, 0, 1]);
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(("127.0.0.1", port))?;
    socket.send(&question)?;
    Ok("asked".into())
}

pub fn vsock(_aim: &AttackAim<'_>) -> AttackResult {
    let kind = |kind| {
        let flags = SocketFlags::CLOEXEC;
        rustix::net::socket_with(AddressFamily::VSOCK, kind, flags, None)?;
        Ok("a socket to the machine's host".to_owned())
    };
    any_of(&mut [
        ("stream", &mut || kind(SocketType::STREAM)),
        ("datagram", &mut || kind(SocketType::DGRAM)),
    ])
}

pub fn packet(_aim: &AttackAim<'_>) -> AttackResult {
    let every_protocol = Protocol::from_raw(
        std::num::NonZeroU32::new(0x0300)
            .ok_or_else(|| AttackFailure::Unable("no number".into()))?,
    );
    let open = |family, kind, protocol| {
        rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?;
        Ok("a socket that hears every packet".to_owned())
    };
    let (packet, inet) = (AddressFamily::PACKET, AddressFamily::INET);
    let icmp = Some(rustix::net::ipproto::ICMP);
    any_of(&mut [
        ("raw", &mut || {
            open(packet, SocketType::RAW, Some(every_protocol))
        }),
        ("datagram", &mut || {
            open(packet, SocketType::DGRAM, Some(every_protocol))
        }),
        ("raw IP", &mut || open(inet, SocketType::RAW, icmp)),
    ])
}

const NETLINK_ROUTE: u32 = 0;
const NETLINK_SOCK_DIAG: u32 = 4;
const NETLINK_UEVENT: u32 = 15;
const NETLINK_GENERIC: u32 = 16;

fn netlink_socket(protocol: u32) -> Result<OwnedFd, AttackFailure> {
    let protocol = std::num::NonZeroU32::new(protocol).map(Protocol::from_raw);
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    let receive_timeout = Some(Duration::from_secs(2));
    let _ = rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        receive_timeout,
    );
    Ok(socket)
}

/// Sends a request for a whole table and passes every message of the answer to `look`.
fn dump(
    socket: BorrowedFd<'_>,
    kind: u16,
    body: &[u8],
    mut look: impl FnMut(&[u8]),
) -> Result<(), AttackFailure> {
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
    let mut sockets = || {
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
            false => Err(AttackFailure::Refused("lists none of the host's".into())),
        }
    };
    let mut interfaces = || {
        let socket = netlink_socket(NETLINK_ROUTE)?;
        let mut others = 0;
        // struct ifinfomsg: the field at offset 4 is the interface's index; loopback is always 1.
        let look = |m: &[u8]| others += usize::from(m.get(4..8) != Some(&1i32.to_ne_bytes()));
        dump(socket.as_fd(), 18, &[0; 16], look)?;
        match others {
            0 => Err(AttackFailure::Refused("lists only loopback".into())),
            _ => Ok(format!("{others} interfaces of the host are listed")),
        }
    };
    let open = |protocol| netlink_socket(protocol).map(|_| "opened".to_owned());
    any_of(&mut [
        ("sockets", &mut sockets),
        ("interfaces", &mut interfaces),
        ("events", &mut || open(NETLINK_UEVENT)),
        ("generic", &mut || open(NETLINK_GENERIC)),
    ])
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
        if let Ok(n) = calls::read_inherited(number, &mut content)
            && n > 0
        {
            found
                .extend(planted_secret(&content[..n]).map(|text| format!("{number} holds {text}")));
        }
    }
    match found.is_empty() {
        false => Ok(found.join("; ")),
        true => Err(AttackFailure::Refused(
            "no descriptor leads to a file".into(),
        )),
    }
}

/// Searches the attacker's own environment, and that of every process it can inspect.
pub fn environment(_aim: &AttackAim<'_>) -> AttackResult {
    let mut found = Vec::new();
    let own = std::env::var_os(SECRET_VARIABLE).unwrap_or_default();
    found.extend(planted_secret(own.as_bytes()).map(|value| format!("own: {value}")));
    let prefix = format!("{SECRET_VARIABLE}=");
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let environ = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        for variable in environ.split(|b| *b == 0) {
            if let Some(value) = variable.strip_prefix(prefix.as_bytes()) {
                let place = entry.path();
                found.extend(
                    planted_secret(value).map(|value| format!("{}: {value}", place.display())),
                );
            }
        }
    }
    match found.is_empty() {
        false => Ok(found.join("; ")),
        true => Err(AttackFailure::Refused("found in no environment".into())),
    }
}
