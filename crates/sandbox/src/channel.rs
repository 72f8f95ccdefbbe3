//! The socket between the runner and the sandbox's init: one JSON message a packet, descriptors beside it.
//!
//! The launcher, pid 1 and the forked child that becomes the program share one end; it is
//! close-on-exec everywhere, so the program never holds it.

use std::collections::BTreeSet;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::outcome::{Exit, Stop, Usage};
use crate::spec::Layer;

/// No message is longer: the spec itself travels in a memory file.
const MESSAGE_BYTES_MAX: usize = 16 * 1024;
/// Spec, workspace, three streams, the attach files of every controller, and one to spare.
pub const DESCRIPTORS_MAX: usize = 24;

/// From the sandbox to the runner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
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
    /// Carries the descriptor of a workspace that lives in memory; the runner fills it and says [`Order::Filled`].
    Workspace,
    /// Carries the outer end of the program's terminal.
    Terminal,
    /// Every process was sent SIGKILL, and some are not dead. Told a moment after the kill, and again while they are
    /// dying: how the run ends is known by then, whenever the last of them is gone.
    Dying {
        exit: Option<Exit>,
        stop: Option<Stop>,
        usage: Usage,
    },
    /// Everything is over inside.
    Ended {
        exit: Option<Exit>,
        stop: Option<Stop>,
        usage: Usage,
        /// Init has no child left, and as pid 1 it would: nobody else is in there.
        alone: bool,
    },
}

/// From the runner to the sandbox's init.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
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

/// Says what is being done, and what went wrong, from inside.
pub struct Reporter {
    socket: OwnedFd,
    step: String,
    /// Where steps are written down, once there is a plan: if nothing follows, that is where it died.
    diary: Option<OwnedFd>,
    /// Those before.
    early: String,
    /// Those that this process, or one that it was forked from, has put in force.
    layers: Vec<(Layer, String)>,
}

/// A clock that all processes of this machine share.
pub fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

/// What was written down: each step, and when it was begun, by [`monotonic_us`].
pub fn read_diary(diary: BorrowedFd<'_>) -> Vec<(String, u64)> {
    const DIARY_BYTES_MAX: usize = 64 << 10;
    let mut bytes = vec![0u8; DIARY_BYTES_MAX];
    let len = rustix::io::pread(diary, &mut bytes, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..len]);
    let entry = |line: &str| {
        let (at, step) = line.split_once(' ')?;
        Some((step.to_owned(), at.parse().ok()?))
    };
    text.lines().filter_map(entry).collect()
}

/// A step that failed: its errno where the kernel gave one, and what it was working on.
#[derive(Debug)]
pub struct StepError {
    pub errno: Option<i32>,
    pub detail: String,
}

impl StepError {
    pub fn new(detail: impl Into<String>) -> Self {
        StepError {
            errno: None,
            detail: detail.into(),
        }
    }
}

/// Adds to an error what it was about.
pub trait During<T> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, StepError>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, StepError> {
        self.map_err(|e| {
            let error: io::Error = e.into();
            let what = what();
            match error.raw_os_error() {
                Some(errno) => StepError {
                    errno: Some(errno),
                    detail: what,
                },
                None => StepError {
                    errno: None,
                    detail: format!("{what}: {error}"),
                },
            }
        })
    }
}

impl Reporter {
    pub fn new(socket: OwnedFd) -> Self {
        Reporter {
            socket,
            step: String::from("start"),
            diary: None,
            early: String::new(),
            layers: Vec::new(),
        }
    }

    pub fn write_into(&mut self, diary: OwnedFd) {
        let _no_room = rustix::io::write(&diary, self.early.as_bytes());
        self.diary = Some(diary);
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Writes down what is about to be done. Nobody is woken by it: the runner reads it when it needs to know.
    pub fn step(&mut self, step: &str) {
        step.clone_into(&mut self.step);
        let entry = format!("{} {step}\n", monotonic_us());
        match &self.diary {
            Some(diary) => {
                let _no_room = rustix::io::write(diary, entry.as_bytes());
            }
            None => self.early.push_str(&entry),
        }
    }

    /// For a process beside the one that goes on with the steps.
    pub fn meanwhile(&mut self, step: &str) {
        step.clone_into(&mut self.step);
    }

    pub fn current_step(&self) -> &str {
        &self.step
    }

    pub fn layer(&mut self, layer: Layer, how: &str) {
        self.layers.push((layer, how.to_owned()));
    }

    /// Everything is in force. The runner may be gone; then there is nobody to tell, and init will notice.
    pub fn started(&self) {
        let layers = self.layers.clone();
        self.tell(&Report::Started { layers }, &[]);
    }

    /// The operator's floor: what has not been put in force by now is not.
    pub fn require(&self, required: &BTreeSet<Layer>) -> Result<(), StepError> {
        let missing = |layer: &&Layer| self.layers.iter().all(|(there, _)| there != *layer);
        match required.iter().find(missing) {
            None => Ok(()),
            Some(missing) => Err(StepError::new(format!(
                "the operator's policy requires the layer {}, which is not in force here",
                missing.as_str()
            ))),
        }
    }

    pub fn tell(&self, report: &Report, descriptors: &[BorrowedFd<'_>]) {
        let _gone = send(self.socket(), report, descriptors);
    }

    pub fn failed(&self, error: StepError) {
        let mut detail = error.detail;
        // As JSON each byte may become six.
        detail.truncate(detail.floor_char_boundary(MESSAGE_BYTES_MAX / 8));
        self.tell(
            &Report::Failed {
                step: self.step.clone(),
                errno: error.errno,
                detail,
            },
            &[],
        );
    }

    pub fn receive_order(&self, wait: Wait) -> io::Result<Option<Order>> {
        Ok(receive(self.socket(), wait)?.map(|(order, _)| order))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_heard_of_one_that_did_not_listen() {
        let (ours, theirs) = pair().unwrap();
        send(ours.as_fd(), &Order::Go, &[]).unwrap();
        send(theirs.as_fd(), &Report::Workspace, &[]).unwrap();
        drop(theirs);
        let heard = || receive::<Report>(ours.as_fd(), Wait::No).unwrap();
        assert!(matches!(heard(), Some((Report::Workspace, _))));
        assert!(heard().is_none(), "nobody is there any more");
    }
}
