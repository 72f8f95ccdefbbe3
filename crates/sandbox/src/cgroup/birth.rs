//! Processes that are born in a group. Entering a version 2 group later costs a grace period of the whole machine, ten
//! milliseconds or so; being born there costs nothing.

use super::*;
use crate::sys::{self, Forked};

/// Whether a child was born in the group it is meant for, or has to attach itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Birth {
    InGroup,
    /// In its parent's group; with the kernel's reason, if another one was asked for.
    Outside {
        refusal: Option<Errno>,
    },
}

/// Forks, with the child born in the group of this directory (version 2) where the kernel allows it. Whoever may not
/// write to the group, and to the one above that it shares with its own, is refused by the kernel, and the child is
/// then born outside. The child may allocate, and leaves by [`sys::exit_now`].
///
/// The caller may have threads, whose locks only the C library's fork sees to, and that one knows no groups. So a
/// child of that kind, which has a single thread, makes a second one as its sibling, and is gone.
pub(crate) fn fork_into(group: Option<BorrowedFd<'_>>) -> io::Result<(Forked, Birth)> {
    let Some(group) = group else {
        let outside = Birth::Outside { refusal: None };
        return Ok((sys::fork_threaded()?, outside));
    };
    let (from_between, to_us) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    match sys::fork_threaded()? {
        Forked::Child => {
            drop(from_between);
            Ok((Forked::Child, go_between(group, to_us)))
        }
        Forked::Parent { child: between } => {
            drop(to_us);
            let told = read_pair(from_between);
            if let Ok((0, refusal)) = told {
                let refusal = Some(Errno::from_raw_os_error(refusal));
                return Ok((
                    Forked::Parent { child: between },
                    Birth::Outside { refusal },
                ));
            }
            // Ended already, or about to: it has nothing left to do but that.
            let between = Pid::from_raw(between);
            rustix::process::waitpid(between, rustix::process::WaitOptions::empty())?;
            told.map(|(child, _)| (Forked::Parent { child }, Birth::InGroup))
        }
    }
}

/// Returns as the child: the new one, or, where none can be made in the group, this process itself.
fn go_between(group: BorrowedFd<'_>, to_parent: OwnedFd) -> Birth {
    let tell = |pid: i32, errno: i32| {
        let message = [pid.to_ne_bytes(), errno.to_ne_bytes()].concat();
        rustix::io::write(&to_parent, &message).is_ok_and(|n| n == message.len())
    };
    match sys::fork_sibling_into(group) {
        Ok(Forked::Child) => Birth::InGroup,
        Ok(Forked::Parent { child }) => sys::exit_now(i32::from(!tell(child, 0))),
        Err(e) => {
            let refusal = Errno::from_io_error(&e).unwrap_or(Errno::IO);
            match tell(0, refusal.raw_os_error()) {
                true => Birth::Outside {
                    refusal: Some(refusal),
                },
                // Nobody waits for a child any more.
                false => sys::exit_now(125),
            }
        }
    }
}

/// What the process in between has told: the child's pid, or 0 and why there is no other child than itself.
fn read_pair(from: OwnedFd) -> io::Result<(i32, i32)> {
    let mut message = [0u8; 8];
    io::Read::read_exact(&mut fs::File::from(from), &mut message)?;
    let [a, b, c, d, e, f, g, h] = message;
    Ok((
        i32::from_ne_bytes([a, b, c, d]),
        i32::from_ne_bytes([e, f, g, h]),
    ))
}
