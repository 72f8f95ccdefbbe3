//! Per-process limits: the floor under the cgroup's, and the only thing some limits have.

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::spec::{ConfinementLevel, Layer, ProgramIdentity, Spec, WorkspaceKind};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys::procfs;

/// Applied in the child after its last user namespace is entered: RLIMIT_NPROC is counted per user and
/// namespace (since Linux 5.14), so there it counts this run's processes and nobody else's.
pub fn apply(spec: &Spec) -> Result<(), LaunchStepError> {
    let limits = &spec.limits;
    let mut table = vec![
        (Resource::Nofile, limits.open_files, "RLIMIT_NOFILE"),
        // 1, not 0: the value by which the kernel also starts no core dump helper on the host.
        (Resource::Core, 1, "RLIMIT_CORE"),
        (Resource::Memlock, 64 << 20, "RLIMIT_MEMLOCK"),
        (Resource::Msgqueue, 819_200, "RLIMIT_MSGQUEUE"),
        (
            Resource::Sigpending,
            limits.pids.saturating_mul(8).max(1024),
            "RLIMIT_SIGPENDING",
        ),
        // No real-time scheduling, no raised priority.
        (Resource::Rtprio, 0, "RLIMIT_RTPRIO"),
        (Resource::Nice, 0, "RLIMIT_NICE"),
    ];
    if let Some(most) = processes_max(spec) {
        table.push((Resource::Nproc, most, "RLIMIT_NPROC"));
    }
    if spec.workspace_kind == WorkspaceKind::Disk {
        table.push((Resource::Fsize, limits.disk_bytes, "RLIMIT_FSIZE"));
    }
    if let Some(cpu_ms) = limits.cpu_ms {
        // No single process outlives the tree's limit, should the watch be late.
        table.push((Resource::Cpu, cpu_ms.div_ceil(1000) + 1, "RLIMIT_CPU"));
    }
    for (resource, value, name) in table {
        lower(resource, value).during(|| format!("set {name} to {value}"))?;
    }
    Ok(())
}

/// The guardian and its watch, and what it starts to serve a call, have the program's uid too.
const GUARDIANS_SHARE: u64 = 8;

/// What the user may start besides, while the run goes on, before the run feels it: with a quarter of the run's own. More
/// would let a bomb grow larger than can be swept in time.
const USERS_SHARE_MIN: u64 = 64;

fn processes_max(spec: &Spec) -> Option<u64> {
    let pids = spec.limits.pids;
    match (spec.level, spec.identity) {
        (ConfinementLevel::Full, _) => spec.has(Layer::UserNamespace).then_some(pids),
        (ConfinementLevel::Landlock, ProgramIdentity::Leased { .. }) => {
            Some(pids.saturating_add(GUARDIANS_SHARE))
        }
        // Counted with all that the user has besides: a bound against bombs, behind which the watch counts exactly.
        (ConfinementLevel::Landlock, ProgramIdentity::Caller { uid, .. }) => {
            let others = procfs::threads_of_user(uid);
            let share = USERS_SHARE_MIN.saturating_add(pids / 4);
            Some(pids.saturating_add(others).saturating_add(share))
        }
    }
}

/// For another process of the same user: it starts no more.
pub fn forbid_forks(pid: u32) -> rustix::io::Result<()> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    // Without a number it would be ourselves.
    pid.map_or(Ok(()), |pid| {
        rustix::process::prlimit(Some(pid), Resource::Nproc, none).map(drop)
    })
}

/// For init itself: as many descriptors as it may have.
pub fn raise_open_files() -> rustix::io::Result<()> {
    let now = rustix::process::getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: now.maximum,
            maximum: now.maximum,
        },
    )
}

/// Sets both the soft and the hard limit, never above what we have ourselves.
fn lower(resource: Resource, value: u64) -> rustix::io::Result<()> {
    let now = rustix::process::getrlimit(resource);
    let value = now.maximum.map_or(value, |most| most.min(value));
    setrlimit(
        resource,
        Rlimit {
            current: Some(value),
            maximum: Some(value),
        },
    )
}
