//! Level `landlock`, for a plain user: the one process that can end all of the program's at once.
//!
//! The guardian signals its descendants one by one, and a program that forks fast enough has new ones before it is
//! through. kill(-1) reaches everybody in one act, whoever forks meanwhile, but from the guardian it would reach all
//! of the user's processes. So the child first enters a Landlock domain that has nothing but the scope of
//! signals, and leaves a process there before it goes on into its own, inner domain. From that outer domain kill(-1)
//! reaches the two domains and nobody else, and from the inner one nothing reaches the outer.
//!
//! The sweeper waits for a word from the guardian, or for its death; then it strikes, once, and is gone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::DumpableBehavior;

use crate::confine::landlock;
use crate::spec::{Identity, Layer, Level, Purpose, Spec};
use crate::step_report::{During, StepError};
use crate::sys::{self, Forked, Parentage};

/// The guardian's end, and the sweeper's pid. It strikes when this is dropped.
pub struct Sweeper {
    pub pid: u32,
    pub word: OwnedFd,
}

/// Leaves a sweeper behind, as a child of this process's parent. To be called by the child, single-threaded, after
/// no_new_privs and before its own Landlock domain. `None` where there is no need of one, or no way to have it.
pub fn leave(spec: &Spec) -> Result<Option<Sweeper>, StepError> {
    let own_uid = matches!(spec.identity, Identity::Leased { .. });
    let wanted = spec.level == Level::Landlock && spec.purpose == Purpose::Run && !own_uid;
    let layers = spec.has(Layer::Landlock) && spec.has(Layer::Seccomp);
    if !wanted || !layers || landlock::abi() < landlock::KNOWS_SIGNALS {
        return Ok(None);
    }
    landlock::scope_signals()?;
    let (word, theirs) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .during(|| "make a socket pair".into())?;
    match sys::fork(Parentage::Sibling).during(|| "clone the sweeper".into())? {
        Forked::Parent { child } => Ok(Some(Sweeper {
            pid: child as u32,
            word,
        })),
        Forked::Child => wait_and_strike(theirs.as_fd()),
    }
}

fn wait_and_strike(word: BorrowedFd<'_>) -> ! {
    // The guardian looks into every process of the run; this one has nothing to hide.
    let _looked_into = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    // Nothing of the program's stays open here, nor the other end, whose closing is the sign.
    if sys::place(word, 0).is_ok() && sys::close_from(1).is_ok() {
        let _told_or_left_alone = rustix::io::read(rustix::stdio::stdin(), &mut [0u8]);
        let _nobody_left = sys::kill_everyone(libc::SIGKILL);
    }
    sys::exit_now(0)
}
