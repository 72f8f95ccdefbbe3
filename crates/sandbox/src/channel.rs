//! The socket between the runner and the sandbox's init: one JSON message a packet, descriptors beside it.
//!
//! The launcher, pid 1 and the forked child that becomes the program share one end; it is
//! close-on-exec everywhere, so the program never holds it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::outcome::{Exit, ResourceUsage, Stop};
use crate::spec::Layer;

/// No message is longer: the spec itself travels in a memory file.
pub const MESSAGE_BYTES_MAX: usize = 16 * 1024;
/// Spec, workspace, three streams, the attach files of every controller, and one to spare.
pub const DESCRIPTORS_MAX: usize = 24;

/// From the sandbox to the runner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxReport {
    /// The step failed; nothing of the program has run.
    Failed {
        step: String,
        errno: Option<i32>,
        detail: String,
    },
    /// The program is about to be executed; the layers that are in force, and how.
    Started { layers: Vec<(Layer, String)> },
    /// The host pid of the sandbox's init, now a child of the runner.
    Init { pid: i32 },
    /// Carries the descriptor of a workspace that lives in memory; the runner fills it and says [`InitOrder::Filled`].
    Workspace,
    /// Carries the outer end of the program's terminal.
    Terminal,
    /// Every process was sent SIGKILL, and some are not dead. Told a moment after the kill, and again while they are
    /// dying: how the run ends is known by then, whenever the last of them is gone.
    Dying {
        exit: Option<Exit>,
        stop: Option<Stop>,
        usage: ResourceUsage,
    },
    /// Everything is over inside.
    Ended {
        exit: Option<Exit>,
        stop: Option<Stop>,
        usage: ResourceUsage,
        /// Init has no child left, and as pid 1 it would: nobody else is in there.
        alone: bool,
    },
}

/// From the runner to the sandbox's init.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InitOrder {
    /// The workspace in memory has its inputs.
    Filled,
    /// Whoever records the run knows of it: the program may be executed.
    Go,
    /// The program printed something: it is not idle.
    Active,
    /// SIGTERM to all, the grace, then SIGKILL.
    Stop(Stop),
    /// SIGKILL now, whatever was ordered before.
    Kill,
}

/// The two ends of such a socket.
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
    // A few small messages always fit; whoever does not take them for so long is not waited for.
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    if descriptors.is_empty() {
        // Not by sendmsg: the program's filter, which this process may have by now, hands that over.
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

/// Whether an empty socket is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    Block,
    No,
}

/// Receives one message; `None` when the other side is gone.
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
    let got = loop {
        match rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            flags,
        ) {
            // Told once, of one that ended and had not read everything; what it said before is still to be had.
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
    if got.bytes == 0 {
        return Ok(None);
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::other("message too long"));
    }
    Ok(Some((
        serde_json::from_slice(&bytes[..got.bytes])?,
        descriptors,
    )))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn last_words_are_heard_of_one_that_did_not_listen() {
        let (ours, theirs) = pair().unwrap();
        send(ours.as_fd(), &InitOrder::Go, &[]).unwrap();
        send(theirs.as_fd(), &SandboxReport::Workspace, &[]).unwrap();
        drop(theirs);
        let heard = || receive::<SandboxReport>(ours.as_fd(), Wait::No).unwrap();
        assert!(matches!(heard(), Some((SandboxReport::Workspace, _))));
        assert!(heard().is_none(), "nobody is there any more");
    }
}
