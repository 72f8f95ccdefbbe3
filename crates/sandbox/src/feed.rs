//! The program's standard input: bytes on their way from the caller into a pipe or a terminal.

use std::os::fd::OwnedFd;

/// Read at once from a stream.
pub const CHUNK_BYTES: usize = 64 * 1024;

/// Bytes on their way into the program.
#[derive(Default)]
pub struct Feed {
    pub source: Option<OwnedFd>,
    pub sink: Option<OwnedFd>,
    pub pending: Vec<u8>,
}

impl Feed {
    pub fn take_in(&mut self) {
        let Some(source) = &self.source else { return };
        let mut chunk = vec![0u8; CHUNK_BYTES];
        match rustix::io::read(source, &mut chunk) {
            Ok(len) if len > 0 => {
                chunk.truncate(len);
                self.pending = chunk;
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            // The end: the program sees it when the sink is closed.
            _ => *self = Feed::default(),
        }
    }

    pub fn hand_on(&mut self, terminal: Option<&OwnedFd>) {
        let Some(sink) = self.sink.as_ref().or(terminal) else {
            return;
        };
        // No more than one page at a time into a terminal, which may be slow to take it.
        let most = if self.sink.is_some() {
            self.pending.len()
        } else {
            self.pending.len().min(1024)
        };
        match rustix::io::write(sink, &self.pending[..most]) {
            Ok(len) => drop(self.pending.drain(..len)),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            // The program has closed its end.
            Err(_) => *self = Feed::default(),
        }
    }
}
