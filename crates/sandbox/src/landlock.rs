//! Landlock: the same reading and writing rules as the mounts give, held by a second mechanism.
//!
//! It owns what mounts cannot refuse: writing into a FIFO of a read-only view, signals to processes outside its
//! domain and, from ABI 9 on, connecting to a path-name socket there.

use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};

use crate::channel::StepError;
use crate::mounts::SYSTEM;
use crate::spec::{Exec, Spec};

/// The newest interface the rules below were written for.
const NEWEST: ABI = ABI::V9;

/// Restricts this process and all it will start. Needs no_new_privs. Says what holds.
pub fn restrict(spec: &Spec) -> Result<String, StepError> {
    let failed = |e: landlock::RulesetError| StepError::new(format!("landlock: {e}"));
    let abi = crate::sys::landlock_abi();
    if abi == 0 {
        return Err(StepError::new(
            "this kernel has no Landlock, or it is not enabled (lsm= on the kernel command line)",
        ));
    }
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))
        .map_err(failed)?
        .scope(Scope::from_all(NEWEST))
        .map_err(failed)?
        .create()
        .map_err(failed)?;
    for (path, access) in allowed(spec) {
        // A path that this host does not have needs no rule.
        if let Ok(fd) = PathFd::new(&path) {
            let beneath = PathBeneath::new(fd, access);
            rules = rules.add_rule(beneath).map_err(failed)?;
        }
    }
    let status = rules.restrict_self().map_err(failed)?;
    match status.ruleset {
        RulesetStatus::NotEnforced => Err(StepError::new("landlock: the rules were not enforced")),
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(format!("ABI {abi}")),
    }
}

fn allowed(spec: &Spec) -> Vec<(std::path::PathBuf, BitFlags<AccessFs>)> {
    let look: BitFlags<AccessFs> = AccessFs::ReadDir.into();
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let run = read | AccessFs::Execute;
    let all = AccessFs::from_all(NEWEST);
    let device = read | AccessFs::WriteFile | AccessFs::IoctlDev | AccessFs::Truncate;
    let mut list: Vec<(std::path::PathBuf, BitFlags<AccessFs>)> = vec![
        // So that `ls /` works; everything that stands there may be listed.
        ("/".into(), look),
        ("/etc".into(), read),
        ("/proc".into(), read),
        // /dev itself cannot be written: it is on the read-only root.
        ("/dev".into(), device),
        ("/dev/shm".into(), all),
        ("/tmp".into(), all),
        (spec.workspace.to_path_buf(), all),
    ];
    for system in SYSTEM {
        list.push((Path::new(system).into(), run));
    }
    for view in &spec.views {
        let access = match view.exec {
            Exec::Allowed => run,
            Exec::Refused => read,
        };
        list.push((view.target.to_path_buf(), access));
    }
    list
}
