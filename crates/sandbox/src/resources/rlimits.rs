//! Per-process limits (rlimits). They back up the cgroup's limits, and are the only mechanism for some limits.

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::spec::{ConfinementLevel, Layer, ProgramIdentity, Spec, WorkspaceKind};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys::procfs;

/// Sets the child's limits, after it has entered its last user namespace. Since Linux 5.14 RLIMIT_NPROC counts per
/// user and user namespace, so there it counts only this run's processes.
pub fn apply(spec: &Spec) -> Result<(), LaunchStepError> {
    let limits = &spec.limits;
    let mut table = vec![
        (Resource::Nofile, limits.open_files, "RLIMIT_NOFILE"),
        // 1, not 0: at 1 the kernel also refuses to start a core dump helper on the host.
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
        // RLIMIT_CPU ends a single process that exceeds the run's limit, even if the watch is late.
        table.push((Resource::Cpu, cpu_ms.div_ceil(1000) + 1, "RLIMIT_CPU"));
    }
    for (resource, value, name) in table {
        lower(resource, value).step_context(|| format!("set {name} to {value}"))?;
    }
    Ok(())
}

/// How many processes the guardian needs: itself, its watch thread, and helpers that serve a call. They have the
/// program's uid too.
const GUARDIAN_PROCESSES: u64 = 8;

/// How many threads the user may start elsewhere while the run goes on, in addition to a quarter of the run's own limit,
/// before the run's forks fail. A larger value would let a fork bomb grow too large to be killed in time.
const OTHER_THREADS_EXTRA: u64 = 64;

fn processes_max(spec: &Spec) -> Option<u64> {
    let pids = spec.limits.pids;
    match (spec.level, spec.identity) {
        (ConfinementLevel::Full, _) => spec.has(Layer::UserNamespace).then_some(pids),
        (ConfinementLevel::Landlock, ProgramIdentity::Leased { .. }) => {
            Some(pids.saturating_add(GUARDIAN_PROCESSES))
        }
        // RLIMIT_NPROC counts the user's other processes too, so the value stops only fork bombs. The watch enforces
        // the exact limit.
        (ConfinementLevel::Landlock, ProgramIdentity::Caller { uid, .. }) => {
            let others = procfs::threads_of_user(uid);
            let share = OTHER_THREADS_EXTRA.saturating_add(pids / 4);
            Some(pids.saturating_add(others).saturating_add(share))
        }
    }
}

/// Forbids another process of the same user to fork.
pub fn forbid_forks(pid: u32) -> rustix::io::Result<()> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    // prlimit without a pid would change this process.
    pid.map_or(Ok(()), |pid| {
        rustix::process::prlimit(Some(pid), Resource::Nproc, none).map(drop)
    })
}

/// Raises this process's limit on open files to its hard limit.
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

/// Sets both the soft and the hard limit, never above this process's own hard limit.
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
