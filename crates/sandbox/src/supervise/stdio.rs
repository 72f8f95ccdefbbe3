//! The program's pipes, and the copying of standard input from the caller into a pipe or a terminal.

use std::os::fd::OwnedFd;

use rustix::fs::{Gid, Uid};

use super::error::{RunError, start};
use crate::spec::{ProgramIdentity, Spec, Terminal};

/// How much is read from a stream in one call.
pub const CHUNK_BYTES: usize = 64 * 1024;

/// Copies the caller's standard input to the program.
#[derive(Default)]
pub struct StdinPump {
    /// The caller's standard input; `None` after its end.
    pub source: Option<OwnedFd>,
    /// The write end of the program's pipe; `None` if the program has a terminal.
    pub sink: Option<OwnedFd>,
    /// Bytes that were read from the source and not yet written.
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
            // End of input. Dropping the sink closes the pipe, so the program sees the end too.
            _ => *self = StdinPump::default(),
        }
    }

    pub fn write_sink(&mut self, terminal: Option<&OwnedFd>) {
        let Some(sink) = self.sink.as_ref().or(terminal) else {
            return;
        };
        // Write to a terminal in small pieces, because its buffer is small.
        let length = match self.sink {
            Some(_) => self.pending.len(),
            None => self.pending.len().min(1024),
        };
        match rustix::io::write(sink, &self.pending[..length]) {
            Ok(len) => drop(self.pending.drain(..len)),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            // The program has closed its standard input.
            Err(_) => *self = StdinPump::default(),
        }
    }
}

/// Makes a pipe that belongs to the program's uid, because a program can reopen its pipe as /dev/stdout only if it owns
/// the pipe.
pub(crate) fn pipe(identity: ProgramIdentity) -> Result<(OwnedFd, OwnedFd), RunError> {
    let make = || -> rustix::io::Result<(OwnedFd, OwnedFd)> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        if let ProgramIdentity::Leased { uid, gid } = identity {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            rustix::fs::fchown(&write, Some(uid), Some(gid))?;
        }
        Ok((read, write))
    };
    make().map_err(|e| start("make a pipe")(e.into()))
}

pub(crate) fn set_nonblocking(fd: &OwnedFd) -> Result<(), RunError> {
    rustix::io::ioctl_fionbio(fd, true).map_err(|e| start("make a pipe")(e.into()))
}

/// Makes the program's end of its standard input, if that is a pipe, and the pump that fills it.
pub(crate) fn stdin_pair(
    spec: &Spec,
    source: Option<OwnedFd>,
) -> Result<(Option<OwnedFd>, StdinPump), RunError> {
    let terminal = matches!(spec.terminal, Terminal::Own { .. });
    let has_pipe = source.is_some() && !terminal;
    let (read, sink) = has_pipe.then(|| pipe(spec.identity)).transpose()?.unzip();
    sink.as_ref().map(set_nonblocking).transpose()?;
    let pending = Vec::new();
    Ok((
        read,
        StdinPump {
            source,
            sink,
            pending,
        },
    ))
}
