//! What the caller implements to receive a run's output and to control the run.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Gid, Mode, Uid};

use crate::layout::HIDDEN_DIR;
use crate::spec::ProgramIdentity;

/// An output stream of the program. A terminal's output counts as `Stdout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A request of the caller to a run in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Send SIGTERM to the program, and SIGKILL when the grace has passed.
    Cancel,
    /// Send SIGKILL to the program at once.
    Kill,
    /// The terminal has a new size.
    Resize {
        /// The new number of rows.
        rows: u16,
        /// The new number of columns.
        columns: u16,
    },
}

/// Callbacks for [`Running::supervise`](super::Running::supervise): they take the run's output and may control the run.
pub trait SupervisorHandler {
    /// Fills a workspace in memory with the run's inputs. The program does not run yet. Called for no other workspace.
    fn fill(&mut self, workspace: BorrowedFd<'_>) -> io::Result<()>;
    /// Takes bytes that the program wrote.
    fn output(&mut self, stream: Stream, bytes: &[u8]);
    /// A descriptor that must become writable before the handler can take more of the stream. Until then the runner
    /// does not read the stream, and the program blocks once the pipe is full.
    fn blocked_on(&self, _stream: Stream) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Called when the descriptor of [`blocked_on`](Self::blocked_on) has become writable.
    fn unblocked(&mut self, _stream: Stream) {}
    /// A descriptor that is readable when [`next_control`](Self::next_control) has a request.
    fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Takes the next request.
    fn next_control(&mut self) -> Option<Control> {
        None
    }
}

/// A handler that discards all output and requests nothing. Into a workspace in memory it puts the directories that
/// every workspace has.
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
}
