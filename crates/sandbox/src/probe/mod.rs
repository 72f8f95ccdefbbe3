//! Finds what this host can really enforce, by doing it.
//!
//! A probe builds a miniature sandbox that executes nothing: the launcher takes every step of the level, and its
//! report is the answer. A probe leaves nothing behind. Its workspace is in memory or absent, and it makes no cgroup.
//! It reads no user's file, so no user's data can influence which level the host is said to have.

pub mod mechanisms;

use std::collections::BTreeSet;
use std::path::Path;

use crate::spec::{
    ConfinementLevel, DisabledLayers, HostPath, InsidePath, LaunchPurpose, Layer, Limits,
    ProgramIdentity, SharedMemory, Spec, Terminal, WorkspaceKind,
};
use crate::supervise::{self, RunError, SilentHandler, SpawnResources};

/// Builds a sandbox of this level, and returns the layers in force or the step that failed.
pub fn try_level(
    launcher: &Path,
    level: ConfinementLevel,
) -> Result<Vec<(Layer, String)>, RunError> {
    let spec = probe_spec(level);
    let resources = SpawnResources {
        launcher,
        workspace: None,
        stdin: None,
        group: None,
    };
    let finished =
        supervise::spawn(&spec, resources)?.supervise(&mut SilentHandler(spec.identity))?;
    Ok(finished.layers)
}

/// Returns the kernel's Landlock ABI, or 0 if there is none.
pub fn landlock_abi() -> i32 {
    crate::sys::landlock_abi()
}

/// The errnos that probes and attacks meet.
#[rustfmt::skip]
const ERRNO_NAMES: [(i32, &str); 30] = [
    (libc::EACCES, "EACCES"), (libc::EAFNOSUPPORT, "EAFNOSUPPORT"), (libc::EAGAIN, "EAGAIN"),
    (libc::EBADF, "EBADF"), (libc::EBUSY, "EBUSY"), (libc::ECONNREFUSED, "ECONNREFUSED"),
    (libc::EDQUOT, "EDQUOT"), (libc::EEXIST, "EEXIST"), (libc::EFAULT, "EFAULT"),
    (libc::EINTR, "EINTR"), (libc::EINVAL, "EINVAL"), (libc::EIO, "EIO"),
    (libc::ELOOP, "ELOOP"), (libc::EMFILE, "EMFILE"), (libc::ENETUNREACH, "ENETUNREACH"),
    (libc::ENODEV, "ENODEV"), (libc::ENOENT, "ENOENT"), (libc::ENOMEM, "ENOMEM"),
    (libc::ENOSPC, "ENOSPC"), (libc::ENOSYS, "ENOSYS"), (libc::ENOTDIR, "ENOTDIR"),
    (libc::ENOTTY, "ENOTTY"), (libc::ENXIO, "ENXIO"), (libc::EOPNOTSUPP, "EOPNOTSUPP"),
    (libc::EPERM, "EPERM"), (libc::EPROTONOSUPPORT, "EPROTONOSUPPORT"), (libc::EROFS, "EROFS"),
    (libc::ESRCH, "ESRCH"), (libc::EUSERS, "EUSERS"), (libc::EXDEV, "EXDEV"),
];

/// Returns the symbolic name of an errno.
pub fn errno_name(errno: i32) -> Option<&'static str> {
    let mut names = ERRNO_NAMES.iter();
    names.find(|(e, _)| *e == errno).map(|(_, name)| *name)
}

/// Returns the symbolic name of an errno, or its number.
pub fn describe_errno(errno: i32) -> String {
    errno_name(errno).map_or_else(|| format!("errno {errno}"), str::to_owned)
}

/// A uid that owns nothing. A probe runs no program that could use it.
const NOBODY: u32 = 65_534;

fn probe_spec(level: ConfinementLevel) -> Spec {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    Spec {
        program: InsidePath::new("/nothing"),
        argv: vec!["nothing".into()],
        env: Vec::new(),
        workspace: HostPath::new("/tmp/scidex-analysis-probe"),
        workspace_kind: WorkspaceKind::Memory,
        views: Vec::new(),
        identity: match uid.is_root() {
            true => ProgramIdentity::Leased {
                uid: NOBODY,
                gid: NOBODY,
            },
            false => ProgramIdentity::Caller {
                uid: uid.as_raw(),
                gid: gid.as_raw(),
            },
        },
        limits: Limits {
            wall_ms: 5000,
            cpu_ms: None,
            idle_ms: None,
            grace_ms: 0,
            memory_bytes: 64 << 20,
            cpu_milli: 1000,
            pids: 16,
            open_files: 64,
            open_files_of_run: None,
            tcp_bytes: 0,
            disk_bytes: 1 << 20,
            files: 16,
            log_bytes: 4096,
        },
        host_name: String::from("fumehood"),
        terminal: Terminal::None,
        level,
        shared_memory: SharedMemory::Private,
        purpose: LaunchPurpose::Probe,
        required: BTreeSet::new(),
        disabled_layers: DisabledLayers::none(),
    }
}
