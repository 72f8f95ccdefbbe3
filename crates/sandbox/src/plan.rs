//! What the runner hands to the launcher: the plan, and the descriptors that travel beside it.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

use crate::resources::cgroup::CpuUnit;
use crate::spec::{Hardness, Spec};

/// The launcher's instructions: the spec, which optional descriptors come with it, and which limits init must watch
/// itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchPlan {
    /// What to run.
    pub spec: Spec,
    /// Whether a descriptor for standard input comes along.
    pub stdin: bool,
    /// How many files come along that a process writes to in order to join the run's cgroup, one for each hierarchy.
    pub attach_files: usize,
    /// Whether a cgroup directory comes along, for `CLONE_INTO_CGROUP`. The first attach file then belongs to the same
    /// cgroup.
    pub group_directory: bool,
    /// The unit of the cgroup's CPU counter, if that counter comes along.
    pub cpu_counter: Option<CpuUnit>,
    /// Whether the cgroup's counter of out-of-memory kills comes along.
    pub oom_counter: bool,
    /// `Watched` if no cgroup limits memory: init then sums up the memory of the run's processes.
    pub memory: Hardness,
    /// `Watched` if neither a cgroup nor RLIMIT_NPROC limits the number of processes exactly: init then counts them.
    pub pids: Hardness,
    /// To how many CPUs to pin the program. This is the number of CPUs granted, so that a program that counts its CPUs
    /// starts as many threads as it can use.
    pub pin_to_cpus: usize,
    /// Whether the program may not change its CPU affinity. True where no cgroup limits the CPUs, so that the pinning
    /// is the limit.
    pub pinned_for_good: bool,
}

/// The descriptors beside the plan, in the order in which they travel.
pub struct PlanDescriptors {
    /// `None` for the sandbox's own /dev/null, which the program can also reopen by path.
    pub stdin: Option<OwnedFd>,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub workspace: Option<OwnedFd>,
    pub cpu_counter: Option<OwnedFd>,
    pub oom_counter: Option<OwnedFd>,
    pub attach: Vec<OwnedFd>,
    pub group_directory: Option<OwnedFd>,
}

/// Writes the plan into a sealed memory file, which no process can change afterwards.
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
