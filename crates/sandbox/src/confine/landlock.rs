//! Landlock: which files the program may reach, by path, and the scopes of signals and abstract sockets.
//!
//! At level `full` Landlock repeats with a second mechanism what the mounts enforce. It adds what mounts cannot
//! refuse: writing to a FIFO in a read-only view, signals to processes outside its domain and, from ABI 9 on,
//! connecting to a path-name socket there. At level `landlock` it alone protects the host's files.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use rustix::fs::{CWD, OFlags};

use crate::layout::{DEVICE_NAMES, ETC_ENTRIES, SYSTEM_DIRS};
use crate::spec::{ConfinementLevel, Exec, LaunchPurpose, SharedMemory, Spec, Terminal};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys;

/// The newest ABI for which the rules below were written.
const ABI_NEWEST: i32 = ABI::V9 as i32;

/// The newest ABI that this process uses. Only tests lower it.
static ABI_MAX: AtomicI32 = AtomicI32::new(ABI_NEWEST);

/// Limits this process and its forks to an older ABI, so that tests can check on a newer kernel what holds with an
/// older Landlock. Never raises the ABI above the kernel's.
pub(crate) fn cap_abi(abi: i32) {
    ABI_MAX.store(abi.min(ABI_NEWEST), Ordering::Relaxed);
}

/// Returns the ABI in use, or 0 if there is no Landlock.
pub(crate) fn abi() -> i32 {
    crate::sys::landlock_abi().min(ABI_MAX.load(Ordering::Relaxed))
}

fn all_rights() -> Rights {
    AccessFs::from_all(ABI::from(abi()))
}

/// The first ABI with a scope for signals.
pub const ABI_WITH_SIGNAL_SCOPE: i32 = 6;

/// Files of the host's /etc that level `full` replaces by generated ones. Libraries fail if such a file exists and
/// cannot be opened. Everybody may read these files; they list the host's users and hold no password.
const ETC_NAMES: &[(&str, &str)] = &[
    ("passwd", "getpwuid, which git, R, pip and Java call"),
    ("group", "getgrgid"),
    ("hosts", "what localhost is"),
    ("nsswitch.conf", "that passwd and group are files"),
];

/// Files of /proc that describe the machine and not its processes. Libraries and interpreters read them.
const MACHINE_PROC_FILES: &[&str] = &[
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

/// Files of /proc/self that the program may read. Not `net`, `mountinfo` and `cgroup`, which describe the host, nor
/// `task`, which contains the same files again.
const OWN_PROC_FILES: &[&str] = &[
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

/// Opens this process's own files in /proc. A Landlock rule for such a file holds only while the kernel keeps this
/// very inode, so some process must keep it open. The guardian does.
pub fn own_proc() -> Vec<OwnedFd> {
    let open = |name: &&str| sys::open(format!("/proc/self/{name}"), OFlags::PATH);
    // A file that this kernel does not have needs no rule.
    OWN_PROC_FILES
        .iter()
        .filter_map(|name| open(name).ok())
        .collect()
}

type Rights = BitFlags<AccessFs>;

/// Restricts this process and all its future children. Needs no_new_privs. Returns a description, or `None` if this
/// kernel has no Landlock and the level does not depend on it. `own_proc` is the result of [`own_proc`].
pub fn restrict(spec: &Spec, own_proc: &[OwnedFd]) -> Result<Option<String>, LaunchStepError> {
    let abi = abi();
    if abi == 0 {
        return match spec.level {
            ConfinementLevel::Full => Ok(None),
            ConfinementLevel::Landlock => Err(LaunchStepError::new(
                "this kernel has no Landlock, or it is not enabled (lsm= on the kernel command line)",
            )),
        };
    }
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all_rights())?;
    let scopes = Scope::from_all(ABI::from(abi));
    if !scopes.is_empty() {
        rules = rules.scope(scopes)?;
    }
    let rules = rules.create()?;
    let rules = match spec.level {
        ConfinementLevel::Full => add_own_root_rules(rules, spec)?,
        ConfinementLevel::Landlock => add_host_rules(rules, spec, own_proc)?,
    };
    let status = rules.restrict_self()?;
    match status.ruleset {
        RulesetStatus::NotEnforced => Err(LaunchStepError::new(
            "landlock: the rules were not enforced",
        )),
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => {
            Ok(Some(format!("ABI {abi}")))
        }
    }
}

/// Enters a domain that refuses only signals to processes outside it. Needs [`ABI_WITH_SIGNAL_SCOPE`].
///
/// A ruleset that does not handle REFER denies it, so in such a domain no file could be renamed or linked from one
/// directory to another. This ruleset therefore handles REFER and grants it everywhere. This widens nothing, because
/// a nested domain can only restrict: the inner domain decides between which directories a file may move.
pub fn scope_signals() -> Result<(), LaunchStepError> {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::Refer)?
        .scope(Scope::Signal)?
        .create()?;
    let root = PathFd::new("/").map_err(|e| LaunchStepError::new(format!("landlock: {e}")))?;
    let rules = rules.add_rule(PathBeneath::new(root, AccessFs::Refer))?;
    rules.restrict_self()?;
    Ok(())
}

impl From<RulesetError> for LaunchStepError {
    fn from(error: RulesetError) -> LaunchStepError {
        LaunchStepError::new(format!("landlock: {error}"))
    }
}

fn allow(
    rules: RulesetCreated,
    what: impl AsFd,
    rights: Rights,
) -> Result<RulesetCreated, LaunchStepError> {
    Ok(rules.add_rule(PathBeneath::new(what, rights & all_rights()))?)
}

/// Allows a path if it exists. A path that this host does not have needs no rule.
fn allow_if_exists(
    rules: RulesetCreated,
    path: &Path,
    rights: Rights,
) -> Result<RulesetCreated, LaunchStepError> {
    match PathFd::new(path) {
        Ok(fd) => allow(rules, fd, rights),
        Err(_) => Ok(rules),
    }
}

fn read_rights() -> Rights {
    AccessFs::ReadFile | AccessFs::ReadDir
}

fn exec_rights() -> Rights {
    read_rights() | AccessFs::Execute
}

fn device_rights() -> Rights {
    read_rights() | AccessFs::WriteFile | AccessFs::IoctlDev | AccessFs::Truncate
}

fn view_rights(exec: Exec) -> Rights {
    match exec {
        Exec::Allowed => exec_rights(),
        Exec::Refused => read_rights(),
    }
}

/// Adds the rules for level `full`. The root is the run's own, so the program may see everything in it.
fn add_own_root_rules(
    mut rules: RulesetCreated,
    spec: &Spec,
) -> Result<RulesetCreated, LaunchStepError> {
    let all = all_rights();
    let list = [
        // So that `ls /` works. The program may list everything in its own root.
        (Path::new("/"), AccessFs::ReadDir.into()),
        (Path::new("/etc"), read_rights()),
        (Path::new("/proc"), read_rights()),
        // /dev itself cannot be written, because it is on the read-only root.
        (Path::new("/dev"), device_rights()),
        (Path::new("/dev/shm"), all),
        (Path::new("/tmp"), all),
        (spec.workspace.as_path(), all),
    ];
    for (path, rights) in list {
        rules = allow_if_exists(rules, path, rights)?;
    }
    for system in SYSTEM_DIRS {
        rules = allow_if_exists(rules, Path::new(system), exec_rights())?;
    }
    for view in &spec.views {
        rules = allow_if_exists(rules, view.target.as_path(), view_rights(view.exec))?;
    }
    Ok(rules)
}

/// Adds the rules for level `landlock`: only the named paths of the host. A rule for a directory covers everything
/// below it, so there is no rule for `/`.
fn add_host_rules(
    mut rules: RulesetCreated,
    spec: &Spec,
    own_proc: &[OwnedFd],
) -> Result<RulesetCreated, LaunchStepError> {
    let all = all_rights();
    for system in SYSTEM_DIRS {
        rules = allow_if_exists(rules, Path::new(system), exec_rights())?;
    }
    for (name, _reason) in ETC_ENTRIES.iter().chain(ETC_NAMES) {
        rules = allow_if_exists(rules, &Path::new("/etc").join(name), read_rights())?;
    }
    for name in DEVICE_NAMES {
        rules = allow_if_exists(rules, &Path::new("/dev").join(name), device_rights())?;
    }
    for name in MACHINE_PROC_FILES {
        rules = allow_if_exists(
            rules,
            &Path::new("/proc").join(name),
            AccessFs::ReadFile.into(),
        )?;
    }
    for own in own_proc {
        rules = allow(rules, own, read_rights())?;
    }
    if matches!(spec.terminal, Terminal::Own { .. }) {
        rules = allow_if_exists(rules, Path::new("/dev/tty"), device_rights())?;
    }
    if spec.shared_memory == SharedMemory::Host {
        rules = allow_if_exists(rules, Path::new("/dev/shm"), all)?;
    }
    for view in &spec.views {
        let what = open_without_symlinks(view.source.as_path())?;
        rules = allow(rules, what, view_rights(view.exec))?;
    }
    if spec.purpose == LaunchPurpose::Run {
        rules = allow(rules, open_without_symlinks(spec.workspace.as_path())?, all)?;
    }
    Ok(rules)
}

fn open_without_symlinks(path: &Path) -> Result<OwnedFd, LaunchStepError> {
    sys::open_resolved(CWD, path, OFlags::PATH).step_context(|| format!("open {}", path.display()))
}
