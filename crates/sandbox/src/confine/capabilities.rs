//! Giving up capabilities for good.

use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::spec::{ConfinementLevel, Spec};
use crate::step_report::{LaunchStepError, StepContext};

/// Whether the bounding set must go too. Only who has a capability over it can drop it; without it no_new_privs alone
/// keeps file capabilities from having an effect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Bounding {
    Dropped,
    DroppedIfAllowed,
    /// For a process that never executes another program. The bounding set limits what execve can give and nothing
    /// else, and dropping it takes a system call for each capability.
    Kept,
}

impl Bounding {
    /// A plain user at level `landlock` has no namespace in which it would be allowed.
    pub fn of(spec: &Spec) -> Bounding {
        match spec.level {
            ConfinementLevel::Full => Bounding::Dropped,
            ConfinementLevel::Landlock => Bounding::DroppedIfAllowed,
        }
    }
}

/// Gives up every capability for good, in every set. Says what holds.
pub fn drop_capabilities(bounding: Bounding) -> Result<&'static str, LaunchStepError> {
    let how = drop_bounding_set(bounding)?;
    rustix::thread::clear_ambient_capability_set()
        .during(|| "clear ambient capabilities".into())?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).during(|| "drop capabilities".into())?;
    Ok(how)
}

fn drop_bounding_set(bounding: Bounding) -> Result<&'static str, LaunchStepError> {
    if bounding == Bounding::Kept {
        return Ok("none; it executes nothing");
    }
    for capability in CapabilitySet::all().iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // A capability that this kernel does not know is not there to be dropped.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            // Refused for want of CAP_SETPCAP, so every other one would be refused too.
            Err(rustix::io::Errno::PERM) if bounding == Bounding::DroppedIfAllowed => {
                return Ok("none; the bounding set is the caller's");
            }
            Err(e) => return Err(e).during(|| "drop the bounding set".into()),
        }
    }
    Ok("none, in any set")
}
