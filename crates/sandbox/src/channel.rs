//! The socket between the runner and the sandbox's init.
//!
//! Each packet carries one JSON message. Descriptors travel beside the message as `SCM_RIGHTS`.
//!
//! The launcher, pid 1 and the forked child that becomes the program share one end. That end is close-on-exec in each
//! of them, so the program never holds it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::launch_step::LaunchStep;
use crate::outcome::{Exit, ResourceUsage, Stop};
use crate::spec::Layer;

/// The longest message. The plan is larger and travels in a memory file.
pub const MESSAGE_BYTES_MAX: usize = 16 * 1024;
/// The most descriptors in one message: plan, step log, workspace, three streams, counters, the attach files of every
/// cgroup controller, and some to spare.
pub const DESCRIPTORS_MAX: usize = 24;

/// A message from the sandbox to the runner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxReport {
    /// A launch step failed before the program was executed.
    Failed {
        step: LaunchStep,
        errno: Option<i32>,
        detail: String,
    },
    /// The program is about to be executed. Lists the layers that are in force, each with the mechanism that holds it.
    Started { layers: Vec<(Layer, String)> },
    /// The host pid of the sandbox's init, which is a child of the runner.
    Init { pid: i32 },
    /// Carries the descriptor of a workspace in memory. The runner fills the workspace and answers with
    /// [`InitCommand::Filled`].
    Workspace,
    /// Carries the master side of the program's pseudo-terminal.
    Terminal,
    /// Every process was sent SIGKILL, and some are not dead yet. Init sends this report soon after the kill, and again
    /// while it sees progress. The report already says how the run ended; only the last deaths are outstanding.
    Dying(RunEnd),
    /// The program has ended, and init has killed what was left.
    Ended {
        end: RunEnd,
        /// Whether init is the only process left in the pid namespace. Pid 1 inherits every orphan, so a pid 1 without
        /// children is alone.
        alone: bool,
    },
}

/// How a run ended, as far as init knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEnd {
    pub exit: Option<Exit>,
    pub stop: Option<Stop>,
    pub usage: ResourceUsage,
}

/// A message from the runner to the sandbox's init.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InitCommand {
    /// The runner has copied the inputs into the workspace in memory.
    Filled,
    /// The caller has recorded the run, so the program may be executed.
    Go {
        /// How many files the whole host has open, if the run's share of them is watched. The runner reads this number,
        /// because in the sandbox's new /proc the kernel would first have to create the directory entries on the way to
        /// it.
        open_on_host: Option<u64>,
    },
    /// The program printed something, or waits until its output is taken, so it is not idle.
    Active,
    /// Send SIGTERM to every process, and SIGKILL when the grace has passed.
    Stop(Stop),
    /// Send SIGKILL to every process now, regardless of earlier commands.
    Kill,
}

/// Makes a control socket and returns its two ends.
pub fn pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
}

pub fn send<M: Serialize>(
    socket: BorrowedFd<'_>,
    message: &M,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    // The socket's buffer holds many messages. A full buffer means that the peer has stopped reading, so do not wait
    // for it.
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    if descriptors.is_empty() {
        // Avoid sendmsg where no descriptors go along: this process may already have the program's seccomp filter,
        // which hands sendmsg over to the broker.
        rustix::net::send(socket, &bytes, flags)?;
        return Ok(());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, flags)?;
    Ok(())
}

/// Whether [`receive`] waits for a message when the socket is empty.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    Block,
    No,
}

/// Receives one message, or `None` when the peer has closed its end.
pub fn receive<M: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    wait: Wait,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let mut bytes = vec![0u8; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC
        | match wait {
            Wait::Block => RecvFlags::empty(),
            Wait::No => RecvFlags::DONTWAIT,
        };
    let received = loop {
        match rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            flags,
        ) {
            // The kernel reports ECONNRESET once if the peer closed its end with unread messages. Messages that the
            // peer sent are still readable, so retry.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNRESET) => continue,
            other => break other?,
        }
    };
    let descriptors: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::other("message too long"));
    }
    Ok(Some((
        serde_json::from_slice(&bytes[..received.bytes])?,
        descriptors,
    )))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn messages_of_a_closed_peer_are_readable_after_a_connection_reset() {
        let (ours, theirs) = pair().unwrap();
        let go = InitCommand::Go { open_on_host: None };
        send(ours.as_fd(), &go, &[]).unwrap();
        send(theirs.as_fd(), &SandboxReport::Workspace, &[]).unwrap();
        drop(theirs);
        let next = || receive::<SandboxReport>(ours.as_fd(), Wait::No).unwrap();
        assert!(matches!(next(), Some((SandboxReport::Workspace, _))));
        assert!(next().is_none(), "the peer is closed");
    }
}
