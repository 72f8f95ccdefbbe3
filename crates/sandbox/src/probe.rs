//! What this host can really enforce, found by doing it.
//!
//! A probe is a whole sandbox in miniature that executes nothing: the launcher takes every step of the level, and its
//! report is the answer. It leaves nothing behind. The workspace is in memory or there is none, no cgroup is
//! made, and no user's file is looked at, so that nobody's data can decide which level a host is said to have.

pub mod acts;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Gid, Mode, Uid};

use crate::mounts::HIDDEN;
use crate::spec::{
    HostPath, Identity, InsidePath, Layer, Level, Limits, Purpose, SharedMemory, Spec, Terminal,
    WorkspaceKind,
};
use crate::supervise::{self, Attendant, Means, RunError, Stream, Wish};

/// Builds a sandbox of that level, and says which layers held, or which step failed.
pub fn try_level(launcher: &Path, level: Level) -> Result<Vec<(Layer, String)>, RunError> {
    let spec = miniature(level);
    let means = Means {
        launcher,
        workspace: None,
        stdin: None,
        group: None,
    };
    let finished = supervise::spawn(&spec, means)?.supervise(&mut Nobody(spec.identity))?;
    Ok(finished.layers)
}

/// The kernel's Landlock interface; 0 where there is none.
pub fn landlock_abi() -> i32 {
    crate::sys::landlock_abi()
}

/// Who owns nothing; a probe runs no program that could make use of it.
const NOBODY: u32 = 65_534;

fn miniature(level: Level) -> Spec {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    Spec {
        program: InsidePath::new("/nothing"),
        argv: vec!["nothing".into()],
        env: Vec::new(),
        workspace: HostPath::new("/tmp/scidex-analysis-probe"),
        workspace_kind: WorkspaceKind::Memory,
        views: Vec::new(),
        identity: match uid.is_root() {
            true => Identity::Leased {
                uid: NOBODY,
                gid: NOBODY,
            },
            false => Identity::Caller {
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
        purpose: Purpose::Probe,
        required: BTreeSet::new(),
        without: BTreeSet::new(),
    }
}

/// Listens to nothing; puts into the workspace in memory what every workspace has.
pub(crate) struct Nobody(pub Identity);

impl Attendant for Nobody {
    fn fill(&mut self, workspace: BorrowedFd<'_>) -> io::Result<()> {
        let hidden = Path::new(HIDDEN);
        for dir in [hidden.to_path_buf(), hidden.join("home")] {
            rustix::fs::mkdirat(workspace, &dir, Mode::from_raw_mode(0o700))?;
            if let Identity::Leased { uid, gid } = self.0 {
                let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                rustix::fs::chownat(workspace, &dir, Some(uid), Some(gid), AtFlags::empty())?;
            }
        }
        Ok(())
    }
    fn output(&mut self, _stream: Stream, _bytes: &[u8]) {}
    fn blocked_on(&self, _stream: Stream) -> Option<BorrowedFd<'_>> {
        None
    }
    fn unblocked(&mut self, _stream: Stream) {}
    fn wishes(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn wish(&mut self) -> Option<Wish> {
        None
    }
}
