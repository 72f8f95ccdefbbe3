//! Forwards the program's output to one of this process's standard streams: unchanged to a file or a pipe; escaped and
//! with its middle left out to a terminal. Memory is bounded: while a reader takes nothing, nothing more is read from
//! the program.
//!
//! Both streams may be one terminal. It may accept a part of a colour sequence or of a character and then be full.
//! Output of the other stream must not follow that part: the program chooses both, and together they could form a
//! sequence that the filter refuses. So filtered output is only queued here; [`StreamForwarder::flush_unless_split`]
//! writes it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use engine::attempt::log_capture::{CapturedLog, OutputChunk};
use engine::attempt::terminal_filter::TerminalFilter;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketType};
use sandbox::events::{self, PollFlags};
use sandbox::supervise::Stream;

/// The size of a write that a ready pipe always accepts whole (PIPE_BUF).
const PIPE_BUF_BYTES: usize = 4096;
/// The device number of /dev/ptmx. Opening it makes a new pseudo-terminal, so it cannot be reopened.
const PTMX: (u32, u32) = (5, 2);

/// How the program's output is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputMode {
    /// On a terminal, escape control sequences.
    Filtered,
    /// Control sequences pass to a terminal, too.
    Raw,
    /// The terminal belongs to the program: everything passes, also what is not kept.
    Session,
}

pub struct StreamForwarder {
    stream: Stream,
    mode: OutputMode,
    target: Option<ForwardTarget>,
    pending: Vec<u8>,
    /// How much of `pending` is written.
    written: usize,
    tail_is_held: bool,
    state: ForwarderState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ForwarderState {
    Open,
    /// The reader closed the stream, which is not a failure.
    Closed,
    Failed(Errno),
}

/// Where the output goes. Determined at the first write: most programs print little, and many nothing.
struct ForwardTarget {
    method: WriteMethod,
    is_terminal: bool,
    filter: Option<TerminalFilter>,
}

/// How to write without waiting. Other programs share this process's standard streams, so they must not become
/// non-blocking.
enum WriteMethod {
    /// A file or a device that never blocks for long.
    Direct,
    /// The same pipe or terminal, opened again.
    Reopened(OwnedFd),
    Socket,
    /// Write at most what a ready pipe accepts whole.
    SmallWrites,
}

impl StreamForwarder {
    pub fn new(stream: Stream, mode: OutputMode) -> StreamForwarder {
        StreamForwarder {
            stream,
            mode,
            target: None,
            pending: Vec::new(),
            written: 0,
            tail_is_held: false,
            state: ForwarderState::Open,
        }
    }

    /// Forwards what the program has just printed.
    pub fn forward_output(&mut self, live: OutputChunk<'_>) {
        let whole = self.mode == OutputMode::Session || !self.target().is_terminal;
        if whole {
            return self.forward(live.bytes);
        }
        self.forward(live.head);
        if live.head.len() < live.bytes.len() && !self.tail_is_held {
            self.tail_is_held = true;
            let name = self.name();
            self.write_message(&format!(
                "\n[fumehood: {name} is longer than half of --log-limit; its end is shown when the program has ended]\n"
            ));
        }
    }

    /// Forwards the end of the output that was held back.
    pub fn forward_tail(&mut self, captured: &CapturedLog) {
        if self.tail_is_held {
            if let Some(note) = captured.note(self.name()) {
                self.write_message(&format!("{note}\n"));
            }
            self.forward(&captured.tail);
        }
        self.interrupt();
    }

    /// Queues a message of Fumehood.
    pub fn write_message(&mut self, text: &str) {
        self.interrupt();
        self.pending.extend_from_slice(text.as_bytes());
    }

    /// Ends open colour sequences, because somebody else writes next.
    pub fn interrupt(&mut self) {
        if let Some(filter) = self.target.as_mut().and_then(|t| t.filter.as_mut()) {
            filter.interrupt(&mut self.pending);
        }
    }

    /// Returns the descriptor that must become writable before more output is wanted.
    pub fn blocked_on(&self) -> Option<BorrowedFd<'_>> {
        let waits = self.written < self.pending.len();
        waits.then(|| match &self.target {
            Some(ForwardTarget {
                method: WriteMethod::Reopened(fd),
                ..
            }) => fd.as_fd(),
            _ => descriptor(self.stream),
        })
    }

    /// Writes as much as the reader takes without waiting. Writes to a terminal only if the other stream has not
    /// stopped inside a sequence or a character. One terminal may have several names, so any two terminals are treated
    /// as one.
    pub fn flush_unless_split(&mut self, other: &mut StreamForwarder) {
        if self.pending.is_empty() {
            return;
        }
        if other.has_split_sequence() && self.target().is_terminal {
            other.flush();
            if other.has_split_sequence() {
                return;
            }
        }
        self.flush();
    }

    /// Whether a terminal has accepted only a part of a sequence or of a character.
    fn has_split_sequence(&self) -> bool {
        let filtered = self.target.as_ref().is_some_and(|t| t.filter.is_some());
        let (written, left) = self.pending.split_at(self.written);
        filtered && splits_sequence(written, left)
    }

    fn flush(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        self.written += self.write(&pending[self.written..]);
        self.pending = pending;
        if self.written == self.pending.len() || self.state != ForwarderState::Open {
            self.pending.clear();
            self.written = 0;
        }
    }

    /// Drops the output that nobody takes and returns its size. Nothing is written after that.
    pub fn give_up(&mut self) -> usize {
        let left = self.pending.len() - self.written;
        if left > 0 {
            self.state = ForwarderState::Closed;
            self.pending.clear();
            self.written = 0;
        }
        left
    }

    /// Returns why the output could not be written. A reader who left is not a failure.
    pub fn failure(&self) -> Option<Errno> {
        match self.state {
            ForwarderState::Failed(errno) => Some(errno),
            ForwarderState::Open | ForwarderState::Closed => None,
        }
    }

    pub fn name(&self) -> &'static str {
        match self.stream {
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
        }
    }

    /// Queues filtered output. Writes unfiltered output at once.
    fn forward(&mut self, bytes: &[u8]) {
        if self.state != ForwarderState::Open {
            return;
        }
        let mut pending = std::mem::take(&mut self.pending);
        match &mut self.target().filter {
            Some(filter) => {
                filter.push(bytes, &mut pending);
                self.pending = pending;
                return;
            }
            // Write from the buffer that was read, without a copy.
            None if pending.is_empty() => {
                let written = self.write(bytes);
                if self.state == ForwarderState::Open {
                    pending.extend_from_slice(&bytes[written..]);
                }
                self.pending = pending;
                return;
            }
            None => pending.extend_from_slice(bytes),
        }
        self.pending = pending;
        self.flush();
    }

    fn target(&mut self) -> &mut ForwardTarget {
        let (stream, mode) = (self.stream, self.mode);
        self.target
            .get_or_insert_with(|| ForwardTarget::find(descriptor(stream), mode))
    }

    /// Returns how many of `bytes` were written without waiting.
    fn write(&mut self, bytes: &[u8]) -> usize {
        let fd = descriptor(self.stream);
        let mut written = 0;
        while written < bytes.len() && self.state == ForwarderState::Open {
            let left = &bytes[written..];
            let taken = match &self.target().method {
                WriteMethod::Direct => rustix::io::write(fd, left),
                WriteMethod::Reopened(fd) => rustix::io::write(fd, left),
                WriteMethod::Socket => {
                    rustix::net::send(fd, left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
                }
                WriteMethod::SmallWrites if !is_ready(fd) => break,
                WriteMethod::SmallWrites => {
                    rustix::io::write(fd, &left[..left.len().min(PIPE_BUF_BYTES)])
                }
            };
            match taken {
                Ok(n) => written += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // The program goes on, and its output is still captured.
                Err(Errno::PIPE | Errno::CONNRESET) => self.state = ForwarderState::Closed,
                Err(errno) => self.state = ForwarderState::Failed(errno),
            }
        }
        written
    }
}

impl ForwardTarget {
    fn find(fd: BorrowedFd<'_>, mode: OutputMode) -> ForwardTarget {
        let is_terminal = rustix::termios::isatty(fd);
        ForwardTarget {
            method: WriteMethod::find(fd, is_terminal),
            is_terminal,
            filter: (is_terminal && mode == OutputMode::Filtered).then(TerminalFilter::default),
        }
    }
}

impl WriteMethod {
    fn find(fd: BorrowedFd<'_>, is_terminal: bool) -> WriteMethod {
        let Ok(stat) = rustix::fs::fstat(fd) else {
            return WriteMethod::SmallWrites;
        };
        let rdev = stat.st_rdev;
        let device = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
        let reopened = || {
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            let opened = rustix::fs::open(path, flags, Mode::empty()).ok()?;
            let same = rustix::fs::fstat(&opened).ok()?;
            let same = (same.st_dev, same.st_ino) == (stat.st_dev, stat.st_ino);
            same.then_some(WriteMethod::Reopened(opened))
        };
        let method = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::BlockDevice => Some(WriteMethod::Direct),
            FileType::CharacterDevice if !is_terminal => Some(WriteMethod::Direct),
            FileType::CharacterDevice if device != PTMX => reopened(),
            FileType::Fifo => reopened(),
            FileType::Socket => {
                let kind = rustix::net::sockopt::socket_type(fd);
                (kind == Ok(SocketType::STREAM)).then_some(WriteMethod::Socket)
            }
            _ => None,
        };
        method.unwrap_or(WriteMethod::SmallWrites)
    }
}

/// Whether `left` continues a character or a colour sequence that begins in `written`.
fn splits_sequence(written: &[u8], left: &[u8]) -> bool {
    let Some(next) = left.first().filter(|_| !written.is_empty()) else {
        return false;
    };
    let is_parameter = |b: &u8| matches!(b, b'[' | b'0'..=b'9' | b';' | b':');
    let text = written.iter().rposition(|b| !is_parameter(b));
    let in_sequence = text.is_some_and(|at| written[at] == 0x1b);
    in_sequence || (0x80..0xc0).contains(next)
}

/// Whether stderr accepts a write without waiting for its reader.
pub fn stderr_is_ready() -> bool {
    is_ready(descriptor(Stream::Stderr))
}

fn is_ready(fd: BorrowedFd<'_>) -> bool {
    events::wait_for(fd, PollFlags::OUT, std::time::Duration::ZERO)
}

fn descriptor(stream: Stream) -> BorrowedFd<'static> {
    match stream {
        Stream::Stdout => rustix::stdio::stdout(),
        Stream::Stderr => rustix::stdio::stderr(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_sequence_or_of_a_character_is_known() {
        let all = "a[1;2m\x1b[1;31m\u{db}b\x1b[Kc".as_bytes();
        let cut: Vec<usize> = (0..=all.len())
            .filter(|at| splits_sequence(&all[..*at], &all[*at..]))
            .collect();
        assert_eq!(cut, [7, 8, 9, 10, 11, 12, 14, 17, 18]);
    }
}
