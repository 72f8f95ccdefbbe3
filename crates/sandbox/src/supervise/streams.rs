//! Passes the program's standard streams: stdout and stderr, or the terminal, to the handler, and standard input to the
//! program.
//!
//! The runner buffers no output. While the handler cannot take a stream, the runner does not read that stream. Its pipe
//! fills, and the program blocks in `write`, as it would without Fumehood. Init keeps the deadlines, so they go on
//! meanwhile.
//!
//! An unbuffered program writes line by line. If each line woke the runner, both would spend most of their time on
//! wake-ups. So a stream that brings many short reads is *paced*: for a millisecond after each read the runner leaves
//! the stream out of `poll`, and a write then wakes nobody.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::handler::{Stream, SupervisorHandler};
use super::stdio::{CHUNK_BYTES, StdinPump};
use crate::events::PollFlags;

/// How many reads are made from a stream after the last process has died. A pipe cannot hold more.
const DRAIN_READS_MAX: usize = 64;
/// How many short reads in one [`WINDOW`] are made without a pause. After them the stream is paced until the window
/// ends.
const UNPACED_READS_MAX: u32 = 16;
const WINDOW: Duration = Duration::from_millis(10);
const PAUSE: Duration = Duration::from_millis(1);
/// A read of at least this many bytes is not short. This is a quarter of a pipe's size: a full pipe holds at least half
/// of its size, since the kernel leaves a page half empty where the next write does not fit.
const LONG_READ_BYTES: usize = 16 * 1024;

/// What `poll` found ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamEvent {
    /// The program has written to its standard output or error.
    Output(Stream),
    /// The program has written to its terminal.
    Terminal,
    /// The caller has input for the program.
    Input,
    /// The program can take input.
    Program,
    /// The handler can take more of a stream.
    Unblocked(Stream),
}

/// The pacing of one stream.
#[derive(Default)]
struct Pace {
    window_began: Option<Instant>,
    short_reads: u32,
    resume_at: Option<Instant>,
}

impl Pace {
    fn after_read(&mut self, len: usize) {
        if len >= LONG_READ_BYTES {
            self.resume_at = None;
            return;
        }
        let now = Instant::now();
        if self.window_began.is_none_or(|began| now - began > WINDOW) {
            self.window_began = Some(now);
            self.short_reads = 0;
        }
        self.short_reads += 1;
        self.resume_at = (self.short_reads > UNPACED_READS_MAX).then_some(now + PAUSE);
    }

    fn is_paused(&self) -> bool {
        self.resume_at.is_some_and(|at| Instant::now() < at)
    }
}

pub(crate) struct Streams {
    out: [Option<OwnedFd>; 2],
    pub terminal: Option<OwnedFd>,
    stdin: StdinPump,
    paces: [Pace; 2],
    /// The read buffer. Allocated when the first bytes arrive.
    chunk: Vec<u8>,
}

const OUTPUT_STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

impl Streams {
    pub fn new(out: [Option<OwnedFd>; 2], stdin: StdinPump) -> Streams {
        Streams {
            out,
            terminal: None,
            stdin,
            paces: Default::default(),
            chunk: Vec::new(),
        }
    }

    /// The descriptors to poll, each with the event that its readiness means.
    pub fn wanted<'s>(
        &'s self,
        handler: &'s dyn SupervisorHandler,
        started: bool,
    ) -> impl Iterator<Item = (StreamEvent, BorrowedFd<'s>, PollFlags)> {
        let output = OUTPUT_STREAMS.into_iter().filter_map(move |stream| {
            if let Some(fd) = handler.blocked_on(stream) {
                return Some((StreamEvent::Unblocked(stream), fd, PollFlags::OUT));
            }
            let out = self.out[stream as usize].as_ref();
            let out = out.filter(|_| !self.paces[stream as usize].is_paused())?;
            Some((StreamEvent::Output(stream), out.as_fd(), PollFlags::IN))
        });
        let terminal = self.terminal.as_ref();
        let terminal = terminal.filter(move |_| handler.blocked_on(Stream::Stdout).is_none());
        let terminal = terminal.map(|fd| (StreamEvent::Terminal, fd.as_fd(), PollFlags::IN));
        // Take nothing from the caller's standard input before there is a program to pass it to.
        let sink = self.stdin.sink.as_ref().or(self.terminal.as_ref());
        let input = sink.filter(|_| started).and_then(|sink| {
            match (self.stdin.pending.is_empty(), &self.stdin.source) {
                (false, _) => Some((StreamEvent::Program, sink.as_fd(), PollFlags::OUT)),
                (true, Some(source)) => Some((StreamEvent::Input, source.as_fd(), PollFlags::IN)),
                (true, None) => None,
            }
        });
        output.chain(terminal).chain(input)
    }

    /// When the next paced stream is to be read again.
    pub fn resume_at(&self) -> Option<Instant> {
        let open = OUTPUT_STREAMS.into_iter().map(|stream| stream as usize);
        let open = open.filter(|n| self.out[*n].is_some() && self.paces[*n].is_paused());
        open.filter_map(|n| self.paces[n].resume_at).min()
    }

    /// Handles one event. Returns whether the program has written something.
    pub fn handle(&mut self, event: StreamEvent, handler: &mut dyn SupervisorHandler) -> bool {
        match event {
            StreamEvent::Output(stream) => {
                let other = match stream {
                    Stream::Stdout => Stream::Stderr,
                    Stream::Stderr => Stream::Stdout,
                };
                // Bytes that wait in a paced stream were most likely written earlier, so pass them first.
                if self.paces[other as usize].is_paused() && handler.blocked_on(other).is_none() {
                    self.pass_output(other, handler);
                }
                self.pass_output(stream, handler)
            }
            StreamEvent::Terminal => self.pass_terminal(handler),
            StreamEvent::Input => {
                self.stdin.read_source();
                false
            }
            StreamEvent::Program => {
                self.stdin.write_sink(self.terminal.as_ref());
                // The caller may hold a dialogue with the program. Do not delay the answers.
                self.paces = Default::default();
                false
            }
            StreamEvent::Unblocked(stream) => {
                handler.unblocked(stream);
                false
            }
        }
    }

    fn pass_output(&mut self, stream: Stream, handler: &mut dyn SupervisorHandler) -> bool {
        let Some(bytes) = read_chunk(&mut self.out[stream as usize], &mut self.chunk) else {
            return false;
        };
        handler.output(stream, bytes);
        self.paces[stream as usize].after_read(bytes.len());
        true
    }

    fn pass_terminal(&mut self, handler: &mut dyn SupervisorHandler) -> bool {
        let bytes = read_chunk(&mut self.terminal, &mut self.chunk);
        bytes.map(|bytes| handler.output(Stream::Stdout, bytes)) == Some(())
    }

    /// Passes what is still in the pipes, without waiting for a process that may still hold a write end.
    pub fn drain(&mut self, handler: &mut dyn SupervisorHandler) {
        for _ in 0..DRAIN_READS_MAX {
            self.pass_terminal(handler);
        }
        for stream in OUTPUT_STREAMS {
            for _ in 0..DRAIN_READS_MAX {
                if !self.pass_output(stream, handler) {
                    break;
                }
            }
            self.out[stream as usize] = None;
        }
    }
}

/// Reads once, into the buffer. Closes the descriptor at its end; a terminal ends with EIO when the last process has
/// closed it.
fn read_chunk<'c>(from: &mut Option<OwnedFd>, chunk: &'c mut Vec<u8>) -> Option<&'c [u8]> {
    if chunk.is_empty() {
        // `vec![0; n]` gets zeroed pages that cost nothing until they are read into; `resize` would write to all of
        // them.
        *chunk = vec![0; CHUNK_BYTES];
    }
    match rustix::io::read(from.as_ref()?, &mut chunk[..]) {
        Ok(len) if len > 0 => return Some(&chunk[..len]),
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
        _ => *from = None,
    }
    None
}
