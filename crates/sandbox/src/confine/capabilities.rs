//! Drops capabilities for good.

use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::spec::{ConfinementLevel, Spec};
use crate::step_report::{LaunchStepError, StepContext};

/// What to do with the bounding set. Dropping it needs CAP_SETPCAP. If it stays, no_new_privs alone makes file
/// capabilities ineffective.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Bounding {
    Dropped,
    DroppedIfAllowed,
    /// For a process that never executes another program. The bounding set only limits what execve can grant, and
    /// dropping it takes one system call for each capability.
    Kept,
}

impl Bounding {
    /// At level `landlock` a plain user has no namespace in which the kernel would allow it to drop the bounding set.
    pub fn of(spec: &Spec) -> Bounding {
        match spec.level {
            ConfinementLevel::Full => Bounding::Dropped,
            ConfinementLevel::Landlock => Bounding::DroppedIfAllowed,
        }
    }
}

/// Drops every capability for good, in every set, and describes the result.
pub fn drop_capabilities(bounding: Bounding) -> Result<&'static str, LaunchStepError> {
    let how = drop_bounding_set(bounding)?;
    rustix::thread::clear_ambient_capability_set().doing("clear ambient capabilities")?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).doing("drop capabilities")?;
    Ok(how)
}

fn drop_bounding_set(bounding: Bounding) -> Result<&'static str, LaunchStepError> {
    if bounding == Bounding::Kept {
        return Ok("none; it executes nothing");
    }
    for capability in CapabilitySet::all().iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // EINVAL: this kernel does not know the capability, so there is nothing to drop.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            // EPERM: this process lacks CAP_SETPCAP, so the kernel would refuse every other capability too.
            Err(rustix::io::Errno::PERM) if bounding == Bounding::DroppedIfAllowed => {
                return Ok("none; the bounding set is the caller's");
            }
            Err(e) => return Err(e).doing("drop the bounding set"),
        }
    }
    Ok("none, in any set")
}
