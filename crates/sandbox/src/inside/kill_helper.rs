//! Level `landlock`, for a plain user: the one process that can end all of the program's at once.
//!
//! The guardian signals its descendants one by one, and a program that forks fast enough has new ones before it is
//! through. kill(-1) reaches everybody in one act, whoever forks meanwhile, but from the guardian it would reach all
//! of the user's processes. So the child first enters a Landlock domain that has nothing but the scope of
//! signals, and leaves a process there before it goes on into its own, inner domain. From that outer domain kill(-1)
//! reaches the two domains and nobody else, and from the inner one nothing reaches the outer.
//!
//! The kill helper waits until the guardian closes its end of a socket, or dies. It then calls kill(-1) once and exits.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::DumpableBehavior;

use crate::confine::landlock;
use crate::spec::{ConfinementLevel, LaunchPurpose, Layer, ProgramIdentity, Spec};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys::{self, ForkSide, Parentage};

/// The guardian's end of the socket, and the kill helper's pid. Dropping this makes the kill helper fire.
pub struct KillHelper {
    pub pid: u32,
    pub trigger: OwnedFd,
}

/// Starts a kill helper, as a child of this process's parent. To be called by the child, single-threaded, after
/// no_new_privs and before its own Landlock domain. `None` where there is no need of one, or no way to have it.
pub fn start(spec: &Spec) -> Result<Option<KillHelper>, LaunchStepError> {
    let own_uid = matches!(spec.identity, ProgramIdentity::Leased { .. });
    let wanted =
        spec.level == ConfinementLevel::Landlock && spec.purpose == LaunchPurpose::Run && !own_uid;
    let layers = spec.has(Layer::Landlock) && spec.has(Layer::Seccomp);
    if !wanted || !layers || landlock::abi() < landlock::ABI_WITH_SIGNAL_SCOPE {
        return Ok(None);
    }
    landlock::scope_signals()?;
    let (trigger, theirs) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .during(|| "make a socket pair".into())?;
    match sys::fork(Parentage::Sibling).during(|| "clone the sweeper".into())? {
        ForkSide::Parent { child } => Ok(Some(KillHelper {
            pid: child as u32,
            trigger,
        })),
        ForkSide::Child => wait_and_kill(theirs.as_fd()),
    }
}

fn wait_and_kill(trigger: BorrowedFd<'_>) -> ! {
    // The guardian looks into every process of the run; this one has nothing to hide.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    // Nothing of the program's stays open here, nor the other end, whose closing is the sign.
    if sys::place_descriptor(trigger, 0).is_ok() && sys::close_from(1).is_ok() {
        // Returns when the guardian writes or is gone.
        let _ = rustix::io::read(rustix::stdio::stdin(), &mut [0u8]);
        let _ = sys::kill_all(libc::SIGKILL);
    }
    sys::exit_now(0)
}
