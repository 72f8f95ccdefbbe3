//! The part of D-Bus that one request to systemd takes: authenticate, call a method, read the reply.
//!
//! Written by hand, because the one call is a few hundred bytes, and a library would bring seventeen more crates and an
//! event loop. Everything that is received is bounded in size and time. A message that cannot be parsed ends the
//! connection.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sandbox::events::{self, PollFlags};

/// No expected reply is nearly as large. A larger signal of the manager is not worth the memory.
const MESSAGE_BYTES_MAX: usize = 1 << 20;
const LINE_BYTES_MAX: usize = 256;
/// How many messages may arrive before the reply.
const OTHERS_MAX: usize = 1000;

/// Why a call to the service manager failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum BusError {
    /// Connect to the socket.
    #[error("connect to the service manager")]
    Connect(#[source] io::Error),
    /// Send the handshake or a message.
    #[error("send to the service manager")]
    Send(#[source] io::Error),
    /// Receive an answer.
    #[error("receive from the service manager")]
    Receive(#[source] io::Error),
    /// The answer did not come before the deadline.
    #[error("the service manager did not answer in time")]
    TimedOut,
    /// The other end does not accept this process as the user with this uid.
    #[error("the service manager does not accept this process as uid {0}")]
    NotAuthenticated(u32),
    /// The other end sent something that is not D-Bus, or more than is read.
    #[error("the service manager sent something that is not D-Bus")]
    Malformed,
    /// The service manager answered with an error.
    #[error("the service manager refused: {message} ({name})")]
    Refused { name: String, message: String },
}

/// A value of one of the types that the properties here have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PropertyValue {
    Text(String),
    Flag(bool),
    Number(u64),
    /// A list that contains this one process.
    Process(u32),
}

/// What is at the other end of the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusPeer {
    /// The manager itself, at its private socket.
    Manager,
    /// A message bus, which expects a Hello first.
    Bus,
}

/// A connection that is authenticated and ready for calls.
#[derive(Debug)]
pub struct BusConnection {
    stream: UnixStream,
    deadline: Instant,
    serial: u32,
}

impl BusConnection {
    pub fn open(path: &Path, peer: BusPeer, deadline: Instant) -> Result<BusConnection, BusError> {
        let connect = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // Do not block: a server that accepts no connections must not delay this process.
            rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
            rustix::io::ioctl_fionbio(&socket, false)?;
            Ok(UnixStream::from(socket))
        };
        let stream = connect().map_err(|e: Errno| BusError::Connect(e.into()))?;
        BusConnection::from_stream(stream, peer, deadline)
    }

    fn from_stream(
        stream: UnixStream,
        peer: BusPeer,
        deadline: Instant,
    ) -> Result<BusConnection, BusError> {
        let mut connection = BusConnection {
            stream,
            deadline,
            serial: 0,
        };
        connection.authenticate()?;
        if peer == BusPeer::Bus {
            connection.call(&MethodCall {
                destination: "org.freedesktop.DBus",
                path: "/org/freedesktop/DBus",
                interface: "org.freedesktop.DBus",
                member: "Hello",
                signature: "",
                body: Vec::new(),
            })?;
        }
        Ok(connection)
    }

    /// EXTERNAL: the kernel tells the other end this process's uid, and this process states the same uid as text.
    fn authenticate(&mut self) -> Result<(), BusError> {
        let uid = rustix::process::geteuid().as_raw();
        let digits = uid.to_string();
        let hex: String = digits.bytes().map(|b| format!("{b:02x}")).collect();
        self.send(format!("\0AUTH EXTERNAL {hex}\r\n").as_bytes())?;
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            let mut byte = [0];
            self.fill(&mut byte)?;
            line.push(byte[0]);
            if line.len() > LINE_BYTES_MAX {
                return Err(BusError::Malformed);
            }
        }
        match line.starts_with(b"OK ") {
            true => self.send(b"BEGIN\r\n"),
            false => Err(BusError::NotAuthenticated(uid)),
        }
    }

    /// Asks the manager to start a transient unit. A reply means that the manager will try.
    pub fn start_transient_unit(
        &mut self,
        name: &str,
        properties: &[(&str, PropertyValue)],
    ) -> Result<(), BusError> {
        let mut body = MessageBuilder::default();
        body.text(name);
        // `fail`: if a job for the same name is queued already, do not replace it.
        body.text("fail");
        body.array(8, |body| {
            for (name, value) in properties {
                body.align(8);
                body.text(name);
                body.variant(value);
            }
        });
        // No auxiliary units.
        body.array(8, |_| {});
        self.call(&MethodCall {
            destination: "org.freedesktop.systemd1",
            path: "/org/freedesktop/systemd1",
            interface: "org.freedesktop.systemd1.Manager",
            member: "StartTransientUnit",
            signature: "ssa(sv)a(sa(sv))",
            body: body.0,
        })
    }

    fn call(&mut self, call: &MethodCall<'_>) -> Result<(), BusError> {
        self.serial += 1;
        self.send(&call.message(self.serial))?;
        for _ in 0..OTHERS_MAX {
            let message = self.receive()?;
            if message.answers == Some(self.serial) {
                return match message.error {
                    None => Ok(()),
                    Some(name) => Err(BusError::Refused {
                        name,
                        message: message.text,
                    }),
                };
            }
        }
        Err(BusError::Malformed)
    }

    /// Waits until the manager sends some message, but not longer than `at_most`.
    pub fn wait(&mut self, at_most: Duration) -> Result<(), BusError> {
        let stream = [((), self.stream.as_fd(), PollFlags::IN)];
        let ready = events::wait_for_any(stream, at_most).map_err(BusError::Receive)?;
        match ready.is_empty() {
            true => Ok(()),
            false => self.receive().map(drop),
        }
    }

    fn receive(&mut self) -> Result<Message, BusError> {
        let mut head = [0u8; 16];
        self.fill(&mut head)?;
        let rest = bytes_after(&head).ok_or(BusError::Malformed)?;
        let mut message = head.to_vec();
        message.resize(16 + rest, 0);
        self.fill(&mut message[16..])?;
        parse(&message).ok_or(BusError::Malformed)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), BusError> {
        let left = left(self.deadline)?;
        let sent = self.stream.set_write_timeout(Some(left));
        sent.and_then(|()| self.stream.write_all(bytes))
            .map_err(|e| timeout_or(e, BusError::Send))
    }

    fn fill(&mut self, mut into: &mut [u8]) -> Result<(), BusError> {
        while !into.is_empty() {
            self.stream
                .set_read_timeout(Some(left(self.deadline)?))
                .map_err(BusError::Receive)?;
            match self.stream.read(into) {
                Ok(0) => {
                    let end = io::Error::from(io::ErrorKind::UnexpectedEof);
                    return Err(BusError::Receive(end));
                }
                Ok(n) => into = &mut into[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(timeout_or(e, BusError::Receive)),
            }
        }
        Ok(())
    }
}

fn left(until: Instant) -> Result<Duration, BusError> {
    let left = until.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(BusError::TimedOut),
        false => Ok(left),
    }
}

fn timeout_or(e: io::Error, otherwise: fn(io::Error) -> BusError) -> BusError {
    match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => BusError::TimedOut,
        _ => otherwise(e),
    }
}

struct MethodCall<'a> {
    destination: &'a str,
    path: &'a str,
    interface: &'a str,
    member: &'a str,
    signature: &'a str,
    body: Vec<u8>,
}

impl MethodCall<'_> {
    /// A method call, little-endian, as in "Message Format" of the D-Bus specification.
    fn message(&self, serial: u32) -> Vec<u8> {
        // Little-endian; method call; flag NO_AUTO_START; protocol version 1.
        let mut out = MessageBuilder(vec![b'l', 1, 2, 1]);
        out.number(self.body.len() as u32);
        out.number(serial);
        let fields = [
            (1, "o", self.path),
            (2, "s", self.interface),
            (3, "s", self.member),
            (6, "s", self.destination),
        ];
        out.array(8, |out| {
            for (code, kind, text) in fields {
                out.align(8);
                out.0.push(code);
                out.signature(kind);
                out.text(text);
            }
            if !self.signature.is_empty() {
                out.align(8);
                out.0.push(8);
                out.signature("g");
                out.signature(self.signature);
            }
        });
        out.align(8);
        out.0.extend(&self.body);
        out.0
    }
}

/// The bytes of a message while it is built. Alignment counts from the start of the message; a body starts aligned.
#[derive(Default)]
struct MessageBuilder(Vec<u8>);

impl MessageBuilder {
    fn align(&mut self, to: usize) {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
    }

    fn number(&mut self, value: u32) {
        self.align(4);
        self.0.extend(value.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u32);
        self.0.extend(text.as_bytes());
        self.0.push(0);
    }

    fn signature(&mut self, text: &str) {
        self.0.push(text.len() as u8);
        self.0.extend(text.as_bytes());
        self.0.push(0);
    }

    fn array(&mut self, align: usize, elements: impl FnOnce(&mut MessageBuilder)) {
        self.number(0);
        let length_at = self.0.len() - 4;
        // The padding before the first element is not part of the length. It is there even if the array is empty.
        self.align(align);
        let start = self.0.len();
        elements(self);
        let length = (self.0.len() - start) as u32;
        self.0[length_at..length_at + 4].copy_from_slice(&length.to_le_bytes());
    }

    fn variant(&mut self, value: &PropertyValue) {
        match value {
            PropertyValue::Text(text) => {
                self.signature("s");
                self.text(text);
            }
            PropertyValue::Flag(flag) => {
                self.signature("b");
                self.number(u32::from(*flag));
            }
            PropertyValue::Number(number) => {
                self.signature("t");
                self.align(8);
                self.0.extend(number.to_le_bytes());
            }
            PropertyValue::Process(pid) => {
                self.signature("au");
                self.array(4, |body| body.number(*pid));
            }
        }
    }
}

/// What the caller needs to know of a message.
#[derive(Debug, Default, PartialEq, Eq)]
struct Message {
    answers: Option<u32>,
    error: Option<String>,
    /// The first argument, if it is a string.
    text: String,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<usize> {
    let value = u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
    usize::try_from(value).ok()
}

/// How many bytes follow the first 16 bytes of a message.
fn bytes_after(head: &[u8; 16]) -> Option<usize> {
    let (body, fields) = (u32_at(head, 4)?, u32_at(head, 12)?);
    let rest = fields.checked_next_multiple_of(8)?.checked_add(body)?;
    (head[0] == b'l' && head[3] == 1 && rest <= MESSAGE_BYTES_MAX).then_some(rest)
}

fn text_at(bytes: &[u8], at: usize) -> Option<(String, usize)> {
    let length = u32_at(bytes, at)?;
    let text = bytes.get(at + 4..(at + 4).checked_add(length)?)?;
    // People see this text, so remove control characters.
    let text = String::from_utf8_lossy(text);
    let shown = text.chars().filter(|c| !c.is_control()).take(300);
    Some((shown.collect(), at + 4 + length + 1))
}

fn parse(bytes: &[u8]) -> Option<Message> {
    const REPLY_SERIAL: u8 = 5;
    const ERROR_NAME: u8 = 4;
    let fields_end = 16usize.checked_add(u32_at(bytes, 12)?)?;
    let mut message = Message::default();
    let mut body_begins_with_text = false;
    let mut at = 16usize;
    while at < fields_end {
        at = at.checked_next_multiple_of(8)?;
        // Field code, length of the signature, one letter, NUL.
        let head = bytes.get(at..at + 4)?;
        let (code, kind) = (head[0], head[2]);
        at += 4;
        if head[1] != 1 || head[3] != 0 {
            return None;
        }
        match kind {
            b's' | b'o' => {
                let (text, after) = text_at(bytes, at)?;
                if code == ERROR_NAME {
                    message.error = Some(text);
                }
                at = after;
            }
            b'g' => {
                let length = usize::from(*bytes.get(at)?);
                body_begins_with_text = length > 0 && *bytes.get(at + 1)? == b's';
                at += length + 2;
            }
            b'u' => {
                let value = u32_at(bytes, at)?;
                if code == REPLY_SERIAL {
                    message.answers = u32::try_from(value).ok();
                }
                at += 4;
            }
            _ => return None,
        }
    }
    let body = fields_end.checked_next_multiple_of(8)?;
    if body_begins_with_text && bytes.len() > body {
        message.text = text_at(bytes, body)?.0;
    }
    Some(message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Compares every byte of a short call with the rules of the specification. `bin/vm-systemd` asks a real systemd.
    #[test]
    fn a_call_has_the_form_of_the_specification() {
        let call = MethodCall {
            destination: "d",
            path: "/p",
            interface: "i",
            member: "m",
            signature: "s",
            body: b"\x01\0\0\0x\0".to_vec(),
        };
        let expected = [
            &b"l\x01\x02\x01\x06\0\0\0\x09\0\0\0\x47\0\0\0"[..],
            b"\x01\x01o\0\x02\0\0\0/p\0\0\0\0\0\0",
            b"\x02\x01s\0\x01\0\0\0i\0\0\0\0\0\0\0",
            b"\x03\x01s\0\x01\0\0\0m\0\0\0\0\0\0\0",
            b"\x06\x01s\0\x01\0\0\0d\0\0\0\0\0\0\0",
            b"\x08\x01g\0\x01s\0\0",
            b"\x01\0\0\0x\0",
        ]
        .concat();
        assert_eq!(call.message(9), expected);
    }

    #[test]
    fn values_are_aligned() {
        let mut body = MessageBuilder::default();
        body.variant(&PropertyValue::Number(5));
        assert_eq!(body.0, b"\x01t\0\0\0\0\0\0\x05\0\0\0\0\0\0\0");
        let mut body = MessageBuilder::default();
        body.variant(&PropertyValue::Process(7));
        assert_eq!(body.0, b"\x02au\0\x04\0\0\0\x07\0\0\0");
        let mut body = MessageBuilder::default();
        body.array(8, |_| {});
        assert_eq!(body.0, [0; 8]);
    }

    fn message(kind: u8, fields: impl FnOnce(&mut MessageBuilder), body: &[u8]) -> Vec<u8> {
        let mut out = MessageBuilder(vec![b'l', kind, 0, 1]);
        out.number(body.len() as u32);
        out.number(77);
        out.array(8, fields);
        out.align(8);
        out.0.extend(body);
        out.0
    }

    fn error_to(serial: u32) -> Vec<u8> {
        let fields = |out: &mut MessageBuilder| {
            out.0.extend(b"\x05\x01u\0");
            out.number(serial);
            out.align(8);
            out.0.extend(b"\x04\x01s\0");
            out.text("org.example.No");
            out.align(8);
            out.0.extend(b"\x08\x01g\0\x01s\0");
        };
        message(3, fields, b"\x06\0\0\0no\x1b[m!\0")
    }

    /// Runs a call against a server that does this after the client has connected. The server keeps the stream open
    /// until the client has closed its end.
    fn served(answer: impl FnOnce(&mut UnixStream) + Send + 'static) -> Result<(), BusError> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let deadline = Instant::now() + Duration::from_millis(300);
        let server = std::thread::spawn(move || {
            answer(&mut theirs);
            let mut rest = Vec::new();
            // Returns when the client closes its end.
            let _ = theirs.read_to_end(&mut rest);
        });
        let answer = BusConnection::from_stream(ours, BusPeer::Manager, deadline)
            .and_then(|mut connection| connection.start_transient_unit("a.scope", &[]));
        server.join().unwrap();
        answer
    }

    fn let_in(stream: &mut UnixStream) {
        stream.write_all(b"OK 1234\r\n").unwrap();
    }

    #[test]
    fn every_misbehaving_server_ends_the_connection() {
        let silent = served(|_| {});
        assert!(matches!(silent, Err(BusError::TimedOut)), "{silent:?}");
        let rejected = served(|s| s.write_all(b"REJECTED EXTERNAL\r\n").unwrap());
        assert!(
            matches!(rejected, Err(BusError::NotAuthenticated(_))),
            "{rejected:?}"
        );
        let endless = served(|s| s.write_all(&[b'x'; 1000]).unwrap());
        assert!(matches!(endless, Err(BusError::Malformed)), "{endless:?}");
        let mute = served(let_in);
        assert!(matches!(mute, Err(BusError::TimedOut)), "{mute:?}");
        let gone = served(|s| {
            let_in(s);
            s.shutdown(std::net::Shutdown::Write).unwrap();
        });
        assert!(matches!(gone, Err(BusError::Receive(_))), "{gone:?}");
        let huge = served(|s| {
            let_in(s);
            s.write_all(b"l\x02\0\x01\xff\xff\xff\xff\x01\0\0\0\xff\xff\xff\xff")
                .unwrap();
        });
        assert!(matches!(huge, Err(BusError::Malformed)), "{huge:?}");
        let others = served(|s| {
            let_in(s);
            // Signals without end, until the client disconnects.
            let signal = message(4, |_| {}, b"");
            while s.write_all(&signal).is_ok() {}
        });
        assert!(matches!(others, Err(BusError::Malformed)), "{others:?}");
    }

    #[test]
    fn replies_are_distinguished_from_other_messages() {
        let refused = served(|s| {
            let_in(s);
            s.write_all(&message(4, |_| {}, b"")).unwrap();
            s.write_all(&error_to(99)).unwrap();
            s.write_all(&error_to(1)).unwrap();
        });
        match refused {
            Err(BusError::Refused { name, message }) => {
                assert_eq!(
                    (name.as_str(), message.as_str()),
                    ("org.example.No", "no[m!")
                );
            }
            other => panic!("{other:?}"),
        }
        let taken = served(|s| {
            let_in(s);
            let fields = |out: &mut MessageBuilder| {
                out.0.extend(b"\x05\x01u\0");
                out.number(1);
            };
            s.write_all(&message(2, fields, b"")).unwrap();
        });
        assert!(taken.is_ok(), "{taken:?}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes: Vec<u8>, head: [u8; 16]) {
            let _ = parse(&bytes);
            let _ = parse(&[&head[..], &bytes].concat());
            prop_assert!(bytes_after(&head).is_none_or(|n| n <= MESSAGE_BYTES_MAX));
        }

        #[test]
        fn one_changed_byte_does_not_make_the_parser_panic(at in 0usize..100, to: u8) {
            let mut bytes = error_to(1);
            let length = bytes.len();
            bytes[at % length] = to;
            let _ = parse(&bytes);
        }
    }
}
