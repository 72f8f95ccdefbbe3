//! The socket calls that the broker makes on the program's behalf: connect, sendto, sendmsg, sendmmsg, setsockopt of
//! buffer sizes, and socket for netlink. `socket_share.rs` bounds the number of connections and netlink sockets.
//!
//! Every decision is made on copies: the address is read once, the socket is a copy of the caller's, and the call is
//! made with both. So another thread that changes memory or descriptors meanwhile changes nothing.
//!
//! The broker tells the kernel to continue the program's own call in one case only: a send on a socket that is not a
//! unix datagram socket, by a process with one thread. For such a socket no address leads out of the network namespace,
//! so it does not matter what the memory holds by then. No other thread can replace the socket, since the only thread
//! waits.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketType};

use super::message::{ADDRESS_BYTES_MAX, HEADER_BYTES, MULTI_HEADER_BYTES, Message};
use crate::events::{self, PollFlags};
use crate::inside::caller::{CallingThread, errno, not_found, open_working_directory};
use crate::inside::socket_share;
use crate::spec::Spec;
use crate::sys::{self, Notification, NotificationAnswer, RawMessage};

/// The size of struct sockaddr_un.
const UNIX_ADDRESS_BYTES_MAX: usize = 110;
/// The longest datagram, and how much of a stream is copied at a time: the kernel's default buffer size.
const COPIED_BYTES_MAX: usize = 212_992;
/// How long the broker waits for room before it checks again that the caller still waits.
const ROOM_WAIT: Duration = Duration::from_millis(20);
/// How long the broker waits before it tries again. Polling a unix datagram socket does not show whether the addressed
/// receiver has room.
const ROOM_RETRY: Duration = Duration::from_millis(2);
/// The flags of a send that are passed on. The filter refuses some of the others. MSG_ZEROCOPY is not passed on,
/// because the broker's copy of the data is freed before the kernel is done with it.
const SEND_FLAGS: i32 =
    libc::MSG_OOB | libc::MSG_DONTROUTE | libc::MSG_DONTWAIT | libc::MSG_EOR | libc::MSG_CONFIRM;

/// Makes socket calls, with what it needs to judge them.
#[derive(Clone)]
pub struct Sockets {
    /// The mount ids of the workspace, the private /tmp and /dev/shm. A socket in one of these mounts belongs to the
    /// run.
    own_mounts: Vec<u64>,
    /// How many TCP sockets the run may have.
    tcp_sockets_max: u64,
}

/// How to answer a call.
pub enum CallReply {
    Answer(NotificationAnswer),
    /// A new descriptor for the caller.
    Descriptor {
        fd: OwnedFd,
        close_on_exec: bool,
    },
}

/// A call to serve. `valid` fails if the caller no longer waits. If it succeeds, the pid has belonged to the caller all
/// the time, so nothing was read from another process.
pub struct PendingCall<'a> {
    pub call: &'a Notification,
    pub valid: &'a dyn Fn() -> io::Result<()>,
}

/// The address to use. If it names a path-name socket, it does so by `/proc/self/fd`, so the descriptor must stay open.
struct Target {
    address: Vec<u8>,
    _socket: Option<OwnedFd>,
}

impl Sockets {
    pub fn new(spec: &Spec) -> io::Result<Sockets> {
        let own = [
            spec.workspace.as_path(),
            "/tmp".as_ref(),
            "/dev/shm".as_ref(),
        ];
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let mounts = own.map(|path| mount_id(sys::open(path, flags)?.as_fd()));
        Ok(Sockets {
            own_mounts: mounts.into_iter().collect::<io::Result<_>>()?,
            tcp_sockets_max: socket_share::tcp_sockets_max(&spec.limits),
        })
    }

    pub fn perform(&self, pending: &PendingCall<'_>) -> CallReply {
        let result = match pending.call.call {
            libc::SYS_socket => match socket_share::netlink_socket(pending.call) {
                Ok(fd) => {
                    return CallReply::Descriptor {
                        fd,
                        close_on_exec: socket_share::is_close_on_exec(pending.call),
                    };
                }
                Err(e) => Err(e),
            },
            libc::SYS_connect => self.connect(pending),
            libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_sendmmsg => self.send(pending),
            libc::SYS_setsockopt => set_buffer_size(pending),
            _ => Err(errno(libc::ENOSYS)),
        };
        let refused =
            |e: io::Error| NotificationAnswer::Errno(e.raw_os_error().unwrap_or(libc::EACCES));
        CallReply::Answer(result.unwrap_or_else(refused))
    }

    fn connect(&self, pending: &PendingCall<'_>) -> io::Result<NotificationAnswer> {
        let args = &pending.call.args;
        let length = args[2] as u32 as usize;
        if !(2..=ADDRESS_BYTES_MAX).contains(&length) {
            return Err(errno(libc::EINVAL));
        }
        let caller = CallingThread::of(pending.call)?;
        let address = caller.read_parts(&[(args[1], length)])?;
        let socket = caller.descriptor(args[0])?;
        (pending.valid)()?;
        let target = self.target(&caller, address)?;
        socket_share::check_connection(socket.as_fd(), self.tcp_sockets_max)?;
        sys::connect_raw(socket.as_fd(), &target.address)?;
        Ok(NotificationAnswer::Value(0))
    }

    fn send(&self, pending: &PendingCall<'_>) -> io::Result<NotificationAnswer> {
        let Notification { call, args, .. } = pending.call;
        let caller = CallingThread::of(pending.call)?;
        // Check this before the socket is copied, so that a second thread which replaces the socket and exits is
        // noticed. A caller that is alone waits for the broker's answer and cannot start a second thread.
        let alone = caller.is_alone();
        let socket = Socket::new(caller.descriptor(args[0])?)?;
        if !socket.takes_paths && alone {
            (pending.valid)()?;
            return Ok(NotificationAnswer::Continue);
        }
        let sending = SendCall {
            sockets: self,
            pending,
            caller: &caller,
            socket: &socket,
        };
        let sent = match *call {
            libc::SYS_sendto => {
                let message =
                    Message::from_sendto(&caller, (args[1], args[2]), (args[4], args[5]))?;
                sending.send(message, args[3] as i32)?
            }
            libc::SYS_sendmsg => {
                let header = caller.read::<HEADER_BYTES>(args[1])?;
                sending.send(Message::from_header(&caller, &header)?, args[2] as i32)?
            }
            _ => sending.send_several(args[1], args[2] as u32, args[3] as i32)?,
        };
        Ok(NotificationAnswer::Value(sent as i64))
    }

    /// The address to use for a call. A path is looked up here, once, and must lead to a socket that belongs to the
    /// run.
    fn target(&self, caller: &CallingThread, address: Vec<u8>) -> io::Result<Target> {
        // Only the family in the address matters here: the kernel refuses an address of another family than the
        // socket's.
        let of_unix = address.starts_with(&(libc::AF_UNIX as u16).to_ne_bytes());
        if of_unix && address.len() > UNIX_ADDRESS_BYTES_MAX {
            return Err(errno(libc::EINVAL));
        }
        let path = match address.get(2..) {
            Some([first, ..]) if of_unix && *first != 0 => &address[2..],
            _ => {
                return Ok(Target {
                    address,
                    _socket: None,
                });
            }
        };
        let path = path.split(|b| *b == 0).next().unwrap_or_default();
        let socket = open_own_socket(caller.thread, path, &self.own_mounts)?;
        let fd_path = format!("/proc/self/fd/{}\0", socket.as_raw_fd());
        Ok(Target {
            address: [&address[..2], fd_path.as_bytes()].concat(),
            _socket: Some(socket),
        })
    }
}

/// A copy of the caller's socket.
struct Socket {
    fd: OwnedFd,
    stream: bool,
    /// Whether a send on this socket can name a path: only on a unix datagram socket. Unix streams and sequenced
    /// packets refuse or ignore addresses (unix_stream_sendmsg, unix_seqpacket_sendmsg).
    takes_paths: bool,
}

impl Socket {
    fn new(fd: OwnedFd) -> io::Result<Socket> {
        let kind = sockopt::socket_type(&fd)?;
        let stream = kind == SocketType::STREAM;
        let unix = sockopt::socket_domain(&fd)? == AddressFamily::UNIX;
        Ok(Socket {
            fd,
            stream,
            takes_paths: unix && !stream && kind != SocketType::SEQPACKET,
        })
    }
}

/// One sendto, sendmsg or sendmmsg call.
struct SendCall<'a> {
    sockets: &'a Sockets,
    pending: &'a PendingCall<'a>,
    caller: &'a CallingThread,
    socket: &'a Socket,
}

impl SendCall<'_> {
    /// Sends the messages of a sendmmsg call, and writes the length of each into the caller's memory. After the first
    /// message an error only ends the call, as in the kernel.
    fn send_several(&self, headers: u64, count: u32, flags: i32) -> io::Result<usize> {
        let count = (count as usize).min(sys::PARTS_MAX);
        for sent in 0..count {
            let at = headers.wrapping_add((sent * MULTI_HEADER_BYTES) as u64);
            let send_one = || {
                let header = self.caller.read::<HEADER_BYTES>(at)?;
                let length = self.send(Message::from_header(self.caller, &header)?, flags)?;
                let length_at = at.wrapping_add(HEADER_BYTES as u64);
                self.caller.write(length_at, &(length as u32).to_ne_bytes())
            };
            match send_one() {
                Ok(()) => {}
                Err(_) if sent > 0 => return Ok(sent),
                Err(e) => return Err(e),
            }
        }
        Ok(count)
    }

    fn send(&self, message: Message, flags: i32) -> io::Result<usize> {
        let length = message.length();
        if !self.socket.stream && length > COPIED_BYTES_MAX {
            return Err(errno(libc::EMSGSIZE));
        }
        let target = self.sockets.target(self.caller, message.address.clone())?;
        let timeout = SendTimeout::of(self.socket.fd.as_fd(), flags)?;
        // Never block in the kernel. The broker waits for room itself, so that it notices when the caller is gone.
        let passed_on = flags & SEND_FLAGS | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        let mut sent = 0;
        loop {
            let data = message.read_data(self.caller, sent, COPIED_BYTES_MAX)?;
            (self.pending.valid)()?;
            let raw = RawMessage {
                data: &data,
                address: &target.address,
                // Control data goes with the first bytes only.
                control: match sent {
                    0 => &message.control.bytes,
                    _ => &[],
                },
            };
            match sys::send_message(self.socket.fd.as_fd(), &raw, passed_on) {
                Ok(n) if !self.socket.stream => return Ok(n),
                Ok(n) => sent += n,
                Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => {
                    if !timeout.wait(self.socket.fd.as_fd()) {
                        return if sent > 0 { Ok(sent) } else { Err(e) };
                    }
                }
                Err(_) if sent > 0 => return Ok(sent),
                Err(e) => {
                    self.raise_sigpipe(&e, flags);
                    return Err(e);
                }
            }
            if sent >= length {
                return Ok(sent);
            }
        }
    }

    /// Sends SIGPIPE to the caller after EPIPE on a stream, as the kernel does, unless the caller passed MSG_NOSIGNAL.
    fn raise_sigpipe(&self, error: &io::Error, flags: i32) {
        let broken = error.raw_os_error() == Some(libc::EPIPE) && self.socket.stream;
        if broken && flags & libc::MSG_NOSIGNAL == 0 {
            let (process, thread) = (self.caller.process as i32, self.caller.thread as i32);
            // An error means that the caller is gone.
            let _ = sys::signal_thread(process, thread, libc::SIGPIPE);
        }
    }
}

/// How long a send may wait for room.
enum SendTimeout {
    None,
    Until(Option<Instant>),
}

impl SendTimeout {
    fn of(socket: BorrowedFd<'_>, flags: i32) -> io::Result<SendTimeout> {
        let nonblocking = rustix::fs::fcntl_getfl(socket)?.contains(OFlags::NONBLOCK);
        if nonblocking || flags & libc::MSG_DONTWAIT != 0 {
            return Ok(SendTimeout::None);
        }
        let at_most = sockopt::socket_timeout(socket, Timeout::Send)?;
        let end = at_most.and_then(|at_most| Instant::now().checked_add(at_most));
        Ok(SendTimeout::Until(end))
    }

    /// Waits a little. Returns false if the time is over.
    fn wait(&self, socket: BorrowedFd<'_>) -> bool {
        match self {
            SendTimeout::None => return false,
            SendTimeout::Until(Some(end)) if Instant::now() >= *end => return false,
            SendTimeout::Until(_) => {}
        }
        if events::wait_for(socket, PollFlags::OUT, ROOM_WAIT) {
            std::thread::sleep(ROOM_RETRY);
        }
        true
    }
}

/// Serves setsockopt of SO_SNDBUF and SO_RCVBUF. Buffers are kernel memory that counts for the whole host, so no buffer
/// may become larger than its initial size. A larger size is reduced silently, as the kernel does.
fn set_buffer_size(pending: &PendingCall<'_>) -> io::Result<NotificationAnswer> {
    let args = &pending.call.args;
    if (args[4] as u32 as i32) < 4 {
        return Err(errno(libc::EINVAL));
    }
    let caller = CallingThread::of(pending.call)?;
    let wanted = u32::from_ne_bytes(caller.read::<4>(args[3])?);
    let socket = caller.descriptor(args[0])?;
    (pending.valid)()?;
    let bytes = (wanted as usize).min(socket_share::buffer_bytes_max(socket.as_fd())?);
    match args[2] as i32 {
        libc::SO_SNDBUF => sockopt::set_socket_send_buffer_size(&socket, bytes)?,
        libc::SO_RCVBUF => sockopt::set_socket_recv_buffer_size(&socket, bytes)?,
        _ => return Err(errno(libc::ENOPROTOOPT)),
    }
    Ok(NotificationAnswer::Value(0))
}

/// Opens the socket that a path leads to from the caller's working directory, if the socket belongs to the run.
fn open_own_socket(pid: u32, path: &[u8], own_mounts: &[u64]) -> io::Result<OwnedFd> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::path::Path::new(std::ffi::OsStr::from_bytes(path));
    let cwd = open_working_directory(pid)?;
    let target = sys::open_for_program(&cwd, path, OFlags::PATH).map_err(not_found)?;
    if FileType::from_raw_mode(rustix::fs::fstat(&target)?.st_mode) != FileType::Socket {
        return Err(errno(libc::ECONNREFUSED));
    }
    match own_mounts.contains(&mount_id(target.as_fd())?) {
        true => Ok(target),
        false => Err(errno(libc::EACCES)),
    }
}

fn mount_id(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    match stat.stx_mask & StatxFlags::MNT_ID.bits() {
        0 => Err(errno(libc::ENOSYS)),
        _ => Ok(stat.stx_mnt_id),
    }
}
