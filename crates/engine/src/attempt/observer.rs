//! How the caller follows a run and controls it.

use std::os::fd::BorrowedFd;

use sandbox::supervise::{Control, Stream};

use crate::attempt::log_capture::OutputChunk;
use crate::collect::CollectProgress;

/// Receives what happens during a run, and tells the run when to stop. By default it ignores what happens, and lets the
/// run go on.
pub trait RunObserver {
    /// Called with everything that the program prints, including bytes that the log does not keep.
    fn output(&mut self, stream: Stream, chunk: OutputChunk<'_>);
    /// Takes a message for the user that is not an error.
    fn notice(&mut self, _text: &str) {}
    /// How far collection has come. Called often.
    fn progress(&mut self, _progress: CollectProgress) {}
    /// `blocked_on`, `unblocked`, `control_fd` and `next_control` have the same meaning as in
    /// [`sandbox::supervise::SupervisorHandler`].
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
    /// Why the observer asked for the end, if it did. The run calls this after every process is dead. The call may take
    /// long.
    fn cancel_cause(&mut self) -> CancelCause {
        CancelCause::Requested
    }
}

/// Why the observer cancelled a program that was still running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelCause {
    /// A person asked for it.
    Requested,
    /// The lease ended or is about to end, so another runner may have been given the attempt.
    LeaseLost,
    /// The runner was told to stop and nobody cancelled the analysis, for example because the machine is being shut
    /// down.
    RunnerStopped,
}
