//! What the runner hands to the launcher: the plan, and the descriptors beside it.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

use crate::resources::cgroup::CpuUnit;
use crate::spec::{Hardness, Spec};

/// What the launcher is told: the spec, which descriptors come with it, and what nobody else watches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchPlan {
    pub spec: Spec,
    pub stdin: bool,
    pub attach_files: usize,
    /// Whether a directory comes along in which the program can be born; the first attach file is then for it.
    pub group_directory: bool,
    pub cpu_counter: Option<CpuUnit>,
    /// Whether the counter of kills for want of memory comes along.
    pub oom_counter: bool,
    /// Watched: no cgroup holds it, so init sums it up.
    pub memory: Hardness,
    /// Watched: neither a cgroup nor a user namespace holds it, so init counts.
    pub pids: Hardness,
    /// As many CPUs as were granted, so that programs which count them count right.
    pub pin_to_cpus: usize,
    /// Where no cgroup limits the CPUs, the pinning does, and cannot be undone from inside.
    pub pinned_for_good: bool,
}

/// Descriptors beside the plan, in the order in which they travel.
pub struct PlanDescriptors {
    /// `None`: the sandbox's own /dev/null, which the program may also reopen.
    pub stdin: Option<OwnedFd>,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub workspace: Option<OwnedFd>,
    pub cpu_counter: Option<OwnedFd>,
    pub oom_counter: Option<OwnedFd>,
    pub attach: Vec<OwnedFd>,
    pub group_directory: Option<OwnedFd>,
}

/// The plan as nobody can change it any more.
pub fn write_sealed(plan: &LaunchPlan) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(
        c"fumehood-plan",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    let mut file = std::fs::File::from(fd);
    serde_json::to_writer(io::BufWriter::new(&mut file), plan)?;
    io::Seek::rewind(&mut file)?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(file.into())
}
