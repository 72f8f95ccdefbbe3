//! Starts processes inside a cgroup. Moving a process into a version 2 group later waits for an RCU grace period of
//! the whole machine, about ten milliseconds; starting it there costs nothing.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::sys::{self, ForkSide, Parentage};

/// Whether a child started in its group, or has to attach itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupEntry {
    InGroup,
    /// The child is in its parent's group. `refusal` is the kernel's reason, if another group was asked for.
    Outside {
        refusal: Option<Errno>,
    },
}

/// Forks a child in the group of this version 2 directory, where the kernel allows it. The kernel requires write
/// access to the group and to the nearest ancestor that it shares with the caller's group; otherwise the child starts
/// in the caller's group. Both processes have a single thread, and the child must leave by [`sys::exit_now`].
pub(crate) fn fork_into(group: Option<BorrowedFd<'_>>) -> io::Result<(ForkSide, GroupEntry)> {
    let refusal = match group.map(|group| sys::fork_into_group(group, Parentage::Own)) {
        Some(Ok(forked)) => return Ok((forked, GroupEntry::InGroup)),
        Some(Err(e)) => Some(Errno::from_io_error(&e).unwrap_or(Errno::IO)),
        None => None,
    };
    let forked = sys::fork(Parentage::Own)?;
    Ok((forked, GroupEntry::Outside { refusal }))
}

/// How a process that init starts later enters the run's group.
#[derive(Default)]
pub(crate) struct GroupAccess {
    pub directory: Option<OwnedFd>,
    /// The descriptors of `Group::attach_fds`. The first belongs to the group of `directory`.
    pub files: Vec<OwnedFd>,
}

impl GroupAccess {
    /// Moves this process into the group, or forks a sibling of this process inside the group. The sibling gets
    /// `None`, and this process gets the sibling's pid. The caller must have a single thread.
    pub fn enter(&self) -> io::Result<Option<i32>> {
        let directory = self.directory.as_ref().map(AsFd::as_fd);
        let forked = directory.map(|group| sys::fork_into_group(group, Parentage::Sibling));
        let files = match forked {
            Some(Ok(ForkSide::Parent { child })) => return Ok(Some(child)),
            Some(Ok(ForkSide::Child)) => self.files.get(1..).unwrap_or_default(),
            Some(Err(_)) | None => &self.files,
        };
        for file in files {
            rustix::io::write(file, b"0")?;
        }
        Ok(None)
    }
}
