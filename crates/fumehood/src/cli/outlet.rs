//! What the program prints on its way to one of our own streams: whole where that is a file or a pipe, made safe and with its
//! middle left out where it is a person's terminal. Memory is bounded: who cannot be written to is not read for.
//!
//! Both streams may be one terminal, which can take a part of a colour sequence or of a character and then be full. What the other
//! stream prints must not follow that part: the program chooses both, and together they would be a sequence that the
//! filter refuses. So what is filtered is only made ready here; [`Outlet::flush_beside`] writes it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use engine::attempt::log_capture::{CapturedLog, OutputChunk};
use engine::attempt::terminal_filter::TerminalFilter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketType};
use sandbox::supervise::Stream;

/// What a ready pipe takes without waiting.
const ALWAYS_FITS: usize = 4096;
/// The multiplexer of pseudo-terminals, which gives another one to everybody who opens it.
const PTMX: (u32, u32) = (5, 2);

/// How the program's output is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// On a terminal control sequences are spelled out.
    Safe,
    /// They pass there, too.
    Raw,
    /// The terminal is the program's own: everything passes, whatever is kept of it.
    Session,
}

pub struct Outlet {
    stream: Stream,
    view: View,
    target: Option<Target>,
    pending: Vec<u8>,
    /// So many of `pending` are written.
    written: usize,
    held_back: bool,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// Its reader is gone, which is no failure.
    Closed,
    Failed(Errno),
}

/// Found when there is something to write: most programs that end well print little, and many nothing.
struct Target {
    way: Way,
    is_terminal: bool,
    filter: Option<TerminalFilter>,
}

/// How to write without waiting. Our standard streams are shared with other programs, so they are not made non-blocking.
enum Way {
    /// A file or a device, which is never full for long.
    Direct,
    /// The same pipe or terminal, opened once more.
    Reopened(OwnedFd),
    Socket,
    /// No more is written at once than a ready pipe must take.
    Piecewise,
}

impl Outlet {
    pub fn new(stream: Stream, view: View) -> Outlet {
        Outlet {
            stream,
            view,
            target: None,
            pending: Vec::new(),
            written: 0,
            held_back: false,
            state: State::Open,
        }
    }

    /// What the program has just printed.
    pub fn show(&mut self, live: OutputChunk<'_>) {
        let whole = self.view == View::Session || !self.target().is_terminal;
        if whole {
            return self.pass(live.bytes);
        }
        self.pass(live.head);
        if live.head.len() < live.bytes.len() && !self.held_back {
            self.held_back = true;
            let name = self.name();
            self.say(&format!(
                "\n[fumehood: {name} is longer than half of --log-limit; its end is shown when the program has ended]\n"
            ));
        }
    }

    /// The end of what was held back.
    pub fn show_end(&mut self, captured: &CapturedLog) {
        if self.held_back {
            if let Some(note) = captured.note(self.name()) {
                self.say(&format!("{note}\n"));
            }
            self.pass(&captured.tail);
        }
        self.interrupt();
    }

    /// A line of our own.
    pub fn say(&mut self, text: &str) {
        self.interrupt();
        self.pending.extend_from_slice(text.as_bytes());
    }

    /// Somebody else writes next: what is shown so far must not change how that looks.
    pub fn interrupt(&mut self) {
        if let Some(filter) = self.target.as_mut().and_then(|t| t.filter.as_mut()) {
            filter.interrupt(&mut self.pending);
        }
    }

    /// What must become writable before more is wanted.
    pub fn blocked_on(&self) -> Option<BorrowedFd<'_>> {
        let waits = self.written < self.pending.len();
        waits.then(|| match &self.target {
            Some(Target {
                way: Way::Reopened(fd),
                ..
            }) => fd.as_fd(),
            _ => descriptor(self.stream),
        })
    }

    /// Writes as much as is taken without waiting. To a terminal only when the other stream does not stand within a sequence
    /// or a character; one terminal has several names, so any two are taken for one.
    pub fn flush_beside(&mut self, other: &mut Outlet) {
        if self.pending.is_empty() {
            return;
        }
        if other.is_cut() && self.target().is_terminal {
            other.flush();
            if other.is_cut() {
                return;
            }
        }
        self.flush();
    }

    /// Whether a terminal has taken only a part of a sequence or of a character.
    fn is_cut(&self) -> bool {
        let filtered = self.target.as_ref().is_some_and(|t| t.filter.is_some());
        let (written, left) = self.pending.split_at(self.written);
        filtered && cuts(written, left)
    }

    fn flush(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        self.written += self.write(&pending[self.written..]);
        self.pending = pending;
        if self.written == self.pending.len() || self.state != State::Open {
            self.pending.clear();
            self.written = 0;
        }
    }

    /// Gives up what nobody takes; how many bytes that were. Nothing is written from now on.
    pub fn give_up(&mut self) -> usize {
        let left = self.pending.len() - self.written;
        if left > 0 {
            self.state = State::Closed;
            self.pending.clear();
            self.written = 0;
        }
        left
    }

    /// Why not everything could be written; not that a reader has left.
    pub fn failure(&self) -> Option<Errno> {
        match self.state {
            State::Failed(errno) => Some(errno),
            State::Open | State::Closed => None,
        }
    }

    pub fn name(&self) -> &'static str {
        match self.stream {
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
        }
    }

    /// What is not filtered is written at once.
    fn pass(&mut self, bytes: &[u8]) {
        if self.state != State::Open {
            return;
        }
        let mut pending = std::mem::take(&mut self.pending);
        match &mut self.target().filter {
            Some(filter) => {
                filter.push(bytes, &mut pending);
                self.pending = pending;
                return;
            }
            // Straight from where it was read.
            None if pending.is_empty() => {
                let written = self.write(bytes);
                if self.state == State::Open {
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

    fn target(&mut self) -> &mut Target {
        let (stream, view) = (self.stream, self.view);
        self.target
            .get_or_insert_with(|| Target::find(descriptor(stream), view))
    }

    /// How many of `bytes` were taken without waiting.
    fn write(&mut self, bytes: &[u8]) -> usize {
        let fd = descriptor(self.stream);
        let mut written = 0;
        while written < bytes.len() && self.state == State::Open {
            let left = &bytes[written..];
            let taken = match &self.target().way {
                Way::Direct => rustix::io::write(fd, left),
                Way::Reopened(fd) => rustix::io::write(fd, left),
                Way::Socket => {
                    rustix::net::send(fd, left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
                }
                Way::Piecewise if !is_ready(fd) => break,
                Way::Piecewise => rustix::io::write(fd, &left[..left.len().min(ALWAYS_FITS)]),
            };
            match taken {
                Ok(n) => written += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // The program goes on; its output is still captured.
                Err(Errno::PIPE | Errno::CONNRESET) => self.state = State::Closed,
                Err(errno) => self.state = State::Failed(errno),
            }
        }
        written
    }
}

impl Target {
    fn find(fd: BorrowedFd<'_>, view: View) -> Target {
        let is_terminal = rustix::termios::isatty(fd);
        Target {
            way: Way::find(fd, is_terminal),
            is_terminal,
            filter: (is_terminal && view == View::Safe).then(TerminalFilter::default),
        }
    }
}

impl Way {
    fn find(fd: BorrowedFd<'_>, is_terminal: bool) -> Way {
        let Ok(stat) = rustix::fs::fstat(fd) else {
            return Way::Piecewise;
        };
        let rdev = stat.st_rdev;
        let device = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
        let reopened = || {
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            let opened = rustix::fs::open(path, flags, Mode::empty()).ok()?;
            let same = rustix::fs::fstat(&opened).ok()?;
            let same = (same.st_dev, same.st_ino) == (stat.st_dev, stat.st_ino);
            same.then_some(Way::Reopened(opened))
        };
        let way = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::BlockDevice => Some(Way::Direct),
            FileType::CharacterDevice if !is_terminal => Some(Way::Direct),
            FileType::CharacterDevice if device != PTMX => reopened(),
            FileType::Fifo => reopened(),
            FileType::Socket => {
                let kind = rustix::net::sockopt::socket_type(fd);
                (kind == Ok(SocketType::STREAM)).then_some(Way::Socket)
            }
            _ => None,
        };
        way.unwrap_or(Way::Piecewise)
    }
}

/// Whether `left` goes on with a character or a colour sequence that `written` begins.
fn cuts(written: &[u8], left: &[u8]) -> bool {
    let Some(next) = left.first().filter(|_| !written.is_empty()) else {
        return false;
    };
    let is_parameter = |b: &u8| matches!(b, b'[' | b'0'..=b'9' | b';' | b':');
    let text = written.iter().rposition(|b| !is_parameter(b));
    let in_sequence = text.is_some_and(|at| written[at] == 0x1b);
    in_sequence || (0x80..0xc0).contains(next)
}

/// Whether something can be written to stderr without waiting for its reader.
pub fn stderr_is_ready() -> bool {
    is_ready(descriptor(Stream::Stderr))
}

fn is_ready(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
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
            .filter(|at| cuts(&all[..*at], &all[*at..]))
            .collect();
        assert_eq!(cut, [7, 8, 9, 10, 11, 12, 14, 17, 18]);
    }
}
