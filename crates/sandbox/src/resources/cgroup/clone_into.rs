//! Processes that are born in a group. Entering a version 2 group later costs a grace period of the whole machine, ten
//! milliseconds or so; being born there costs nothing.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::sys::{self, ForkSide, Parentage};

/// Whether a child was born in the group it is meant for, or has to attach itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupEntry {
    InGroup,
    /// In its parent's group; with the kernel's reason, if another one was asked for.
    Outside {
        refusal: Option<Errno>,
    },
}

/// Forks, with the child born in the group of this directory (version 2) where the kernel allows it. Whoever may not
/// write to the group, and to the one above that it shares with its own, is refused by the kernel, and the child is
/// then born outside. Both have a single thread; the child leaves by [`sys::exit_now`].
pub(crate) fn fork_into(group: Option<BorrowedFd<'_>>) -> io::Result<(ForkSide, GroupEntry)> {
    let refusal = match group.map(|group| sys::fork_into_group(group, Parentage::Own)) {
        Some(Ok(forked)) => return Ok((forked, GroupEntry::InGroup)),
        Some(Err(e)) => Some(Errno::from_io_error(&e).unwrap_or(Errno::IO)),
        None => None,
    };
    let forked = sys::fork(Parentage::Own)?;
    Ok((forked, GroupEntry::Outside { refusal }))
}

/// The way into the run's group for a process that init starts later.
#[derive(Default)]
pub(crate) struct GroupAccess {
    pub directory: Option<OwnedFd>,
    /// As `Group::attach_fds` gave them; the first is for the group of `directory`.
    pub files: Vec<OwnedFd>,
}

impl GroupAccess {
    /// Enters the group, or has a child enter that is born in it as this process's sibling: that child returns `None`, and
    /// to this process its number is returned. For a process with a single thread.
    pub fn enter(&self) -> io::Result<Option<i32>> {
        let directory = self.directory.as_ref().map(AsFd::as_fd);
        let born = directory.map(|group| sys::fork_into_group(group, Parentage::Sibling));
        let files = match born {
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
