//! Whoever watches a run from the runner's side.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Gid, Mode, Uid};

use crate::layout::HIDDEN_DIR;
use crate::spec::ProgramIdentity;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// What whoever watches the run wants of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// SIGTERM, the grace, SIGKILL.
    Cancel,
    /// SIGKILL.
    Kill,
    /// The terminal has a new size.
    Resize { rows: u16, columns: u16 },
}

/// What the caller of [`Running::supervise`](super::Running::supervise) provides: it takes the output of the run and may control the run.
pub trait SupervisorHandler {
    /// A workspace in memory is there to be filled; nothing runs yet.
    fn fill(&mut self, workspace: BorrowedFd<'_>) -> io::Result<()>;
    fn output(&mut self, stream: Stream, bytes: &[u8]);
    /// A descriptor that must become writable before more of a stream is wanted. Until then the program waits.
    fn blocked_on(&self, stream: Stream) -> Option<BorrowedFd<'_>>;
    fn unblocked(&mut self, stream: Stream);
    /// A descriptor that is readable when [`next_control`](Self::next_control) has something to say.
    fn control_fd(&self) -> Option<BorrowedFd<'_>>;
    fn next_control(&mut self) -> Option<Control>;
}

/// Listens to nothing; puts into the workspace in memory what every workspace has.
pub struct SilentHandler(pub ProgramIdentity);

impl SupervisorHandler for SilentHandler {
    fn fill(&mut self, workspace: BorrowedFd<'_>) -> io::Result<()> {
        let hidden = Path::new(HIDDEN_DIR);
        for dir in [hidden.to_path_buf(), hidden.join("home")] {
            rustix::fs::mkdirat(workspace, &dir, Mode::from_raw_mode(0o700))?;
            if let ProgramIdentity::Leased { uid, gid } = self.0 {
                let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                rustix::fs::chownat(workspace, &dir, Some(uid), Some(gid), AtFlags::empty())?;
            }
        }
        Ok(())
    }
    fn output(&mut self, _stream: Stream, _bytes: &[u8]) {}
    fn blocked_on(&self, _stream: Stream) -> Option<BorrowedFd<'_>> {
        None
    }
    fn unblocked(&mut self, _stream: Stream) {}
    fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn next_control(&mut self) -> Option<Control> {
        None
    }
}
