//! Landlock: which files the program may reach, by path, and the scopes of signals and abstract sockets.
//!
//! At level `full` this is what the mounts give, held by a second mechanism. It owns there what mounts cannot refuse:
//! writing into a FIFO of a read-only view, signals to processes outside its domain and, from ABI 9 on, connecting to
//! a path-name socket there. At level `landlock` it is all that stands before the host's files.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

use crate::layout::{DEVICES, ETC, SYSTEM};
use crate::spec::{Exec, Level, Purpose, SharedMemory, Spec, Terminal};
use crate::step_report::{During, StepError};

/// The newest interface the rules below were written for.
const NEWEST: i32 = ABI::V9 as i32;

/// Above it nothing is used; lowered by tests alone.
static AT_MOST: AtomicI32 = AtomicI32::new(NEWEST);

/// Makes this process, and what it forks, do with an older interface, so that what is held without Landlock there can
/// be tried on a newer kernel. Never made newer than the kernel's.
pub(crate) fn make_do_with(abi: i32) {
    AT_MOST.store(abi.min(NEWEST), Ordering::Relaxed);
}

/// The interface in use; 0 where there is none.
pub(crate) fn abi() -> i32 {
    crate::sys::landlock_abi().min(AT_MOST.load(Ordering::Relaxed))
}

fn everything() -> Rights {
    AccessFs::from_all(ABI::from(abi()))
}

/// The first ABI that knows of signals.
pub const KNOWS_SIGNALS: i32 = 6;

/// Files of the host's /etc in whose place made-up ones stand at level `full`. Libraries give up where they exist and cannot
/// be opened. Everybody may read them; they tell which users this host has and hold no password.
const ETC_NAMES: &[(&str, &str)] = &[
    ("passwd", "getpwuid, which git, R, pip and Java call"),
    ("group", "getgrgid"),
    ("hosts", "what localhost is"),
    ("nsswitch.conf", "that passwd and group are files"),
];

/// Files of /proc that tell of the machine and not of its processes, which libraries and interpreters read.
const PROC: &[&str] = &[
    "cpuinfo",
    "filesystems",
    "loadavg",
    "meminfo",
    "stat",
    "uptime",
    "version",
    "sys/kernel/cap_last_cap",
    "sys/kernel/osrelease",
    "sys/kernel/ostype",
    "sys/kernel/pid_max",
    "sys/kernel/threads-max",
    "sys/vm/max_map_count",
    "sys/vm/overcommit_memory",
];

/// What this process may read of itself in /proc. Not `net`, `mountinfo` and `cgroup`, which tell of the host, nor
/// `task`, which has them again.
const OWN_PROC: &[&str] = &[
    "auxv",
    "cmdline",
    "comm",
    "environ",
    "fd",
    "fdinfo",
    "io",
    "limits",
    "maps",
    "smaps",
    "smaps_rollup",
    "stat",
    "statm",
    "status",
];

/// Opens this process's own files in /proc. A rule for one holds as long as the kernel keeps this very entry, so
/// somebody must hold it: the guardian does.
pub fn own_proc() -> Vec<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let open = |name: &&str| rustix::fs::open(format!("/proc/self/{name}"), flags, Mode::empty());
    // A kernel without one of them has nothing to be read there.
    OWN_PROC.iter().filter_map(|name| open(name).ok()).collect()
}

type Rights = BitFlags<AccessFs>;

/// Restricts this process and all it will start. Needs no_new_privs. Says what holds; `None` where this kernel has no
/// Landlock and the level does not rest on it. `own_proc` is what [`own_proc`] opened.
pub fn restrict(spec: &Spec, own_proc: &[OwnedFd]) -> Result<Option<String>, StepError> {
    let abi = abi();
    if abi == 0 {
        return match spec.level {
            Level::Full => Ok(None),
            Level::Landlock => Err(StepError::new(
                "this kernel has no Landlock, or it is not enabled (lsm= on the kernel command line)",
            )),
        };
    }
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(everything())
        .map_err(failed)?;
    let scopes = Scope::from_all(ABI::from(abi));
    if !scopes.is_empty() {
        rules = rules.scope(scopes).map_err(failed)?;
    }
    let rules = rules.create().map_err(failed)?;
    let rules = match spec.level {
        Level::Full => within_own_root(rules, spec)?,
        Level::Landlock => on_the_host(rules, spec, own_proc)?,
    };
    let status = rules.restrict_self().map_err(failed)?;
    match status.ruleset {
        RulesetStatus::NotEnforced => Err(StepError::new("landlock: the rules were not enforced")),
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => {
            Ok(Some(format!("ABI {abi}")))
        }
    }
}

/// A domain that holds nothing back but signals to whoever is outside of it. Needs [`KNOWS_SIGNALS`].
///
/// A ruleset that does not handle REFER denies it, so that nothing in such a domain could be renamed or linked from one
/// directory to another. This one handles REFER and grants it everywhere. A domain only takes away, so this
/// widens nothing: which directories a file may move between is the inner domain's to say.
pub fn scope_signals() -> Result<(), StepError> {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::Refer)
        .map_err(failed)?
        .scope(Scope::Signal)
        .map_err(failed)?
        .create()
        .map_err(failed)?;
    let root = PathFd::new("/").map_err(|e| StepError::new(format!("landlock: {e}")))?;
    let rules = rules
        .add_rule(PathBeneath::new(root, AccessFs::Refer))
        .map_err(failed)?;
    rules.restrict_self().map(drop).map_err(failed)
}

fn failed(error: RulesetError) -> StepError {
    StepError::new(format!("landlock: {error}"))
}

fn allow(
    rules: RulesetCreated,
    what: impl AsFd,
    rights: Rights,
) -> Result<RulesetCreated, StepError> {
    rules
        .add_rule(PathBeneath::new(what, rights & everything()))
        .map_err(failed)
}

/// A path that this host does not have needs no rule.
fn allow_if_there(
    rules: RulesetCreated,
    path: &Path,
    rights: Rights,
) -> Result<RulesetCreated, StepError> {
    match PathFd::new(path) {
        Ok(fd) => allow(rules, fd, rights),
        Err(_) => Ok(rules),
    }
}

fn reading() -> Rights {
    AccessFs::ReadFile | AccessFs::ReadDir
}

fn running() -> Rights {
    reading() | AccessFs::Execute
}

fn using_devices() -> Rights {
    reading() | AccessFs::WriteFile | AccessFs::IoctlDev | AccessFs::Truncate
}

fn of_view(exec: Exec) -> Rights {
    match exec {
        Exec::Allowed => running(),
        Exec::Refused => reading(),
    }
}

/// In a root of the run's own everything that stands there may be seen.
fn within_own_root(mut rules: RulesetCreated, spec: &Spec) -> Result<RulesetCreated, StepError> {
    let all = everything();
    let list = [
        // So that `ls /` works; everything that stands there may be listed.
        (Path::new("/"), AccessFs::ReadDir.into()),
        (Path::new("/etc"), reading()),
        (Path::new("/proc"), reading()),
        // /dev itself cannot be written: it is on the read-only root.
        (Path::new("/dev"), using_devices()),
        (Path::new("/dev/shm"), all),
        (Path::new("/tmp"), all),
        (spec.workspace.as_path(), all),
    ];
    for (path, rights) in list {
        rules = allow_if_there(rules, path, rights)?;
    }
    for system in SYSTEM {
        rules = allow_if_there(rules, Path::new(system), running())?;
    }
    for view in &spec.views {
        rules = allow_if_there(rules, view.target.as_path(), of_view(view.exec))?;
    }
    Ok(rules)
}

/// On the host only what is named: a rule for a directory is one for everything below it, so there is none for `/`.
fn on_the_host(
    mut rules: RulesetCreated,
    spec: &Spec,
    own_proc: &[OwnedFd],
) -> Result<RulesetCreated, StepError> {
    let all = everything();
    for system in SYSTEM {
        rules = allow_if_there(rules, Path::new(system), running())?;
    }
    for (name, _reason) in ETC.iter().chain(ETC_NAMES) {
        rules = allow_if_there(rules, &Path::new("/etc").join(name), reading())?;
    }
    for name in DEVICES {
        rules = allow_if_there(rules, &Path::new("/dev").join(name), using_devices())?;
    }
    for name in PROC {
        rules = allow_if_there(
            rules,
            &Path::new("/proc").join(name),
            AccessFs::ReadFile.into(),
        )?;
    }
    for own in own_proc {
        rules = allow(rules, own, reading())?;
    }
    if matches!(spec.terminal, Terminal::Own { .. }) {
        rules = allow_if_there(rules, Path::new("/dev/tty"), using_devices())?;
    }
    if spec.shared_memory == SharedMemory::Host {
        rules = allow_if_there(rules, Path::new("/dev/shm"), all)?;
    }
    for view in &spec.views {
        let what = open_plainly(view.source.as_path())?;
        rules = allow(rules, what, of_view(view.exec))?;
    }
    if spec.purpose == Purpose::Run {
        rules = allow(rules, open_plainly(spec.workspace.as_path())?, all)?;
    }
    Ok(rules)
}

/// The path was resolved when the run was planned: a link that stands there now is somebody's trick.
fn open_plainly(path: &Path) -> Result<OwnedFd, StepError> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve)
        .during(|| format!("open {}", path.display()))
}
