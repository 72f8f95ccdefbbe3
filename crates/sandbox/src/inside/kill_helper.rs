//! Level `landlock`, for a plain user: a process that can kill all of the run's processes at once.
//!
//! The guardian signals its descendants one by one, and a program that forks fast enough has new processes before the
//! guardian has signalled the last. kill(-1) is atomic and reaches forking processes too, but from the guardian it
//! would reach all of the user's processes. So the child first enters an outer Landlock domain that only restricts the
//! scope of signals, forks the kill helper there, and then enters its own, inner domain. From the outer domain kill(-1)
//! reaches both domains and no other process. From the inner domain no signal reaches the outer one.
//!
//! The kill helper waits until the guardian closes its end of a socket, or dies. It then calls kill(-1) once and exits.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::DumpableBehavior;

use crate::channel;
use crate::confine::landlock;
use crate::spec::{ConfinementLevel, LaunchPurpose, Layer, ProgramIdentity, Spec};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys::{self, ForkSide, Parentage};

/// The guardian's end of the socket, and the kill helper's pid. Dropping this makes the kill helper kill the run's
/// processes.
pub struct KillHelper {
    pub pid: u32,
    pub trigger: OwnedFd,
}

/// Starts a kill helper as a sibling of this process. To be called by the single-threaded child, after no_new_privs and
/// before the child enters its own Landlock domain. Returns `None` if no kill helper is needed, or if Landlock cannot
/// scope signals.
pub fn start(spec: &Spec) -> Result<Option<KillHelper>, LaunchStepError> {
    let own_uid = matches!(spec.identity, ProgramIdentity::Leased { .. });
    let wanted =
        spec.level == ConfinementLevel::Landlock && spec.purpose == LaunchPurpose::Run && !own_uid;
    let layers = spec.has(Layer::Landlock) && spec.has(Layer::Seccomp);
    if !wanted || !layers || landlock::abi() < landlock::ABI_WITH_SIGNAL_SCOPE {
        return Ok(None);
    }
    landlock::scope_signals()?;
    let (trigger, theirs) = channel::pair().doing("make a socket pair")?;
    match sys::fork(Parentage::Sibling).doing("clone the kill helper")? {
        ForkSide::Parent { child } => Ok(Some(KillHelper {
            pid: child as u32,
            trigger,
        })),
        ForkSide::Child => wait_and_kill(theirs.as_fd()),
    }
}

fn wait_and_kill(trigger: BorrowedFd<'_>) -> ! {
    // The guardian's watch reads /proc of every process of the run, which needs a dumpable process.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    // Keep only this end of the socket. An inherited copy of the guardian's end would keep the socket open, and the
    // kill helper would wait for ever.
    if sys::place_descriptor(trigger, 0).is_ok() && sys::close_from(1).is_ok() {
        // Returns when the guardian closes its end, or is dead.
        let _ = rustix::io::read(rustix::stdio::stdin(), &mut [0u8]);
        let _ = sys::kill_all(libc::SIGKILL);
    }
    sys::exit_now(0)
}
