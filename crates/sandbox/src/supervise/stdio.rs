//! The program's pipes, and its standard input: bytes on their way from the caller into a pipe or a terminal.

use std::os::fd::OwnedFd;

use super::error::{RunError, start};
use crate::spec::{ProgramIdentity, Spec, Terminal};

/// Read at once from a stream.
pub const CHUNK_BYTES: usize = 64 * 1024;

/// Bytes on their way into the program.
#[derive(Default)]
pub struct StdinPump {
    pub source: Option<OwnedFd>,
    pub sink: Option<OwnedFd>,
    pub pending: Vec<u8>,
}

impl StdinPump {
    pub fn read_source(&mut self) {
        let Some(source) = &self.source else { return };
        let mut chunk = vec![0u8; CHUNK_BYTES];
        match rustix::io::read(source, &mut chunk) {
            Ok(len) if len > 0 => {
                chunk.truncate(len);
                self.pending = chunk;
            }
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            // The end: the program sees it when the sink is closed.
            _ => *self = StdinPump::default(),
        }
    }

    pub fn write_sink(&mut self, terminal: Option<&OwnedFd>) {
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
            Err(_) => *self = StdinPump::default(),
        }
    }
}

/// A pipe that the program may reopen as /dev/stdout: it must own it.
pub(crate) fn pipe(identity: ProgramIdentity) -> Result<(OwnedFd, OwnedFd), RunError> {
    let made = || -> rustix::io::Result<(OwnedFd, OwnedFd)> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        if let ProgramIdentity::Leased { uid, gid } = identity {
            let (uid, gid) = (
                rustix::fs::Uid::from_raw(uid),
                rustix::fs::Gid::from_raw(gid),
            );
            rustix::fs::fchown(&write, Some(uid), Some(gid))?;
        }
        Ok((read, write))
    };
    made().map_err(|e| start("make a pipe")(e.into()))
}

pub(crate) fn set_nonblocking(fd: &OwnedFd) -> Result<(), RunError> {
    rustix::io::ioctl_fionbio(fd, true).map_err(|e| start("make a pipe")(e.into()))
}

/// The program's end of its standard input, if it has one, and what is to be fed into it.
pub(crate) fn stdin_pair(
    spec: &Spec,
    source: Option<OwnedFd>,
) -> Result<(Option<OwnedFd>, StdinPump), RunError> {
    let terminal = matches!(spec.terminal, Terminal::Own { .. });
    if source.is_none() || terminal {
        let stdin_pump = StdinPump {
            source,
            ..StdinPump::default()
        };
        return Ok((None, stdin_pump));
    }
    let (read, write) = pipe(spec.identity)?;
    set_nonblocking(&write)?;
    let stdin_pump = StdinPump {
        source,
        sink: Some(write),
        pending: Vec::new(),
    };
    Ok((Some(read), stdin_pump))
}
