//! Gets a delegated cgroup from systemd. If no part of the cgroup v2 tree belongs to this process, it asks the service
//! manager to move it into a scope of its own, as `systemd-run --scope -p Delegate=yes` does.
//!
//! A process that moves leaves its group, and with it the limits of that group. So this process does not move out of a
//! batch job, out of a group that something other than systemd manages, or out of a group that limits memory or CPUs:
//! those limits were meant for it. A failure to get a scope is not an error of the run. The record states the reason.
//!
//! A worker's runner moves into a scope even if the worker's unit is delegated, so that what systemd does to the unit
//! on a restart does not reach the runner. If the runner cannot get a scope, it stays in the unit, whose
//! KillMode=process leaves it alive. The same holds for cgroup v1, where systemd kills by its own hierarchy.
//!
//! `bus` speaks as much D-Bus as that one request takes.

mod bus;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use sandbox::cgroup::{self, Delegation, GroupLocation};

pub use bus::BusError;
use bus::{BusConnection, BusPeer, PropertyValue};

/// Each normally takes milliseconds. A manager that takes longer to answer must not delay a run. A manager that has
/// agreed to move this process will do so soon, so that wait is longer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const MOVE_WITHIN: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// How this process gets its own cgroups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopeMembership {
    /// The host has cgroup v1 or no cgroups, so systemd cannot help.
    NotNeeded,
    /// The process can create cgroups where it is.
    AlreadyDelegated,
    /// The manager moved this process into this scope, which ends with the process.
    Scope(String),
}

/// Why systemd gave this process no scope.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum ScopeError {
    /// systemd is not the init of this host or container.
    #[error("systemd does not manage this host's cgroups")]
    NoSystemd,
    /// The process is part of a Slurm job, whose limits and accounting it would leave.
    #[error("this process is part of a Slurm job and stays in it")]
    InJob,
    /// The process is in a cgroup that is not a scope or service of systemd.
    #[error("cgroup {0:?} is not a unit of systemd, so this process stays in it")]
    NotSystemds(PathBuf),
    /// A limit of the process's cgroup would not hold in a new scope.
    #[error(
        "cgroup {group:?} limits this process by its {file}, and a new scope would not have that limit: {instead}"
    )]
    WouldLoseLimit {
        group: PathBuf,
        file: &'static str,
        /// What the person who set that limit can do instead.
        instead: &'static str,
    },
    /// The user's runtime directory belongs to another user, or its mode is not 0700.
    #[error(
        "{0:?} is not private to this user, so Fumehood does not look for a service manager in it"
    )]
    RuntimeDirectory(PathBuf),
    /// Open the user's runtime directory.
    #[error("open the runtime directory {path:?}")]
    OpenRuntimeDirectory { path: PathBuf, source: io::Error },
    /// Ask the service manager to start the scope.
    #[error("ask systemd for a scope")]
    Ask(#[source] BusError),
    /// systemd agreed to start the scope of this name, and did not move the process into it in time.
    #[error("systemd did not move this process into {0} in time")]
    NotMoved(String),
    /// Get random bytes for the name of the scope.
    #[error("get random bytes")]
    Random(#[source] io::Error),
}

/// Why a process wants a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScopePurpose {
    /// To create cgroups. A process that can do so already stays where it is.
    Groups,
    /// To leave the unit in which it was started.
    OwnScope,
}

/// The first call decides: a process moves once, and the processes it starts afterwards are in the same group.
static MEMBERSHIP: OnceLock<Result<ScopeMembership, ScopeError>> = OnceLock::new();

/// Puts this process where it can create cgroups, if systemd can help with that. Only the first call does something. It
/// must come before anything is started, because only this process is moved.
pub fn ensure_delegated() -> Result<&'static ScopeMembership, &'static ScopeError> {
    membership(ScopePurpose::Groups)
}

/// The same for a process that must outlive its unit: it gets a scope in the same slice even if it can create cgroups
/// already. [`ensure_delegated`] returns the same result from then on. On an error the process has stayed in the unit,
/// and may still be able to create cgroups there.
pub(crate) fn ensure_own_scope() -> Result<&'static ScopeMembership, &'static ScopeError> {
    membership(ScopePurpose::OwnScope)
}

fn membership(purpose: ScopePurpose) -> Result<&'static ScopeMembership, &'static ScopeError> {
    MEMBERSHIP.get_or_init(|| join(purpose)).as_ref()
}

/// Why this process could not be put into a scope, if that was tried.
pub(crate) fn move_error() -> Option<&'static ScopeError> {
    MEMBERSHIP.get()?.as_ref().err()
}

fn join(purpose: ScopePurpose) -> Result<ScopeMembership, ScopeError> {
    let place = match purpose {
        ScopePurpose::OwnScope => match cgroup::group_location() {
            None => return Ok(ScopeMembership::NotNeeded),
            Some(place) => place,
        },
        ScopePurpose::Groups => match cgroup::delegation() {
            Delegation::Fixed => return Ok(ScopeMembership::NotNeeded),
            Delegation::Delegated => return Ok(ScopeMembership::AlreadyDelegated),
            Delegation::Undelegated(place) => place,
        },
    };
    // sd_booted(3): this directory exists exactly if systemd is the init of this host or container.
    if !Path::new("/run/systemd/system").is_dir() {
        return Err(ScopeError::NoSystemd);
    }
    let uid = rustix::process::geteuid().as_raw();
    let in_job = std::env::var_os("SLURM_JOB_ID").is_some();
    let request = scope_request(&place, uid, in_job, purpose)?;
    let mut connection = connect(uid, Instant::now() + ANSWER_WITHIN)?;
    // The standby launcher is a process of its own, and would stay in the old group.
    sandbox::standby::dismiss();
    let name = start_scope(&mut connection, &request)?;
    let deadline = Instant::now() + MOVE_WITHIN;
    while !is_in(&name) {
        if Instant::now() >= deadline {
            return Err(ScopeError::NotMoved(name));
        }
        // The content of the message does not matter, only that something happened. If the connection is gone, sleep
        // instead.
        if connection.wait(LOOK_AGAIN).is_err() {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
    Ok(ScopeMembership::Scope(name))
}

/// The properties of the scope, besides its name.
#[derive(Debug, PartialEq, Eq)]
struct ScopeRequest {
    /// The innermost slice that contains this process. Its limits continue to hold.
    slice: Option<String>,
    tasks_max: Option<u64>,
}

fn scope_request(
    place: &GroupLocation,
    uid: u32,
    in_job: bool,
    purpose: ScopePurpose,
) -> Result<ScopeRequest, ScopeError> {
    if in_job {
        return Err(ScopeError::InJob);
    }
    if !is_systemd_unit(&place.group, purpose) {
        return Err(ScopeError::NotSystemds(place.group.clone()));
    }
    let (kept, slice) = kept_ancestor(&place.group, uid);
    match place.limit_lost_by_move(&kept) {
        Some((group, file)) => Err(ScopeError::WouldLoseLimit {
            group,
            file,
            instead: match purpose {
                ScopePurpose::Groups => "set Delegate=yes for that unit instead",
                ScopePurpose::OwnScope => {
                    "set that limit for the slice of the worker's unit instead"
                }
            },
        }),
        None => Ok(ScopeRequest {
            slice,
            // systemd sets this limit for every unit, so it is no reason to stay. The scope gets the same limit.
            tasks_max: place.pids_max(&kept),
        }),
    }
}

/// Whether systemd put this process into the group. Another manager would lose track of a process that moves.
fn is_systemd_unit(group: &Path, purpose: ScopePurpose) -> bool {
    let is_unit = |group: &Path| {
        let name = group.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.ends_with(".scope") || name.ends_with(".service"))
    };
    match purpose {
        ScopePurpose::Groups => is_unit(group),
        // With DelegateSubgroup=, the worker that started this process is one level below its unit.
        ScopePurpose::OwnScope => is_unit(group) || group.parent().is_some_and(is_unit),
    }
}

/// The ancestor group that this process stays below, and the slice for it, if the manager that is asked has one.
fn kept_ancestor(group: &Path, uid: u32) -> (PathBuf, Option<String>) {
    let of_user = format!("/user.slice/user-{uid}.slice");
    let (mut kept, asked) = match uid {
        0 => (PathBuf::from("/"), PathBuf::from("/")),
        _ => {
            let manager = PathBuf::from(format!("{of_user}/user@{uid}.service"));
            (PathBuf::from(of_user), manager)
        }
    };
    if !group.starts_with(&asked) {
        // The move goes from the system's part of the tree to the user's: only their common ancestor stays.
        while !group.starts_with(&kept) && kept.pop() {}
        return (kept, None);
    }
    kept = asked;
    let mut slice = None;
    let below = group.strip_prefix(&kept).unwrap_or(Path::new(""));
    let names = below.iter().map_while(|name| name.to_str());
    for name in names.take_while(|name| name.ends_with(".slice")) {
        kept.push(name);
        slice = Some(name.to_owned());
    }
    (kept, slice)
}

/// Asks the manager to start the scope, and returns its name.
fn start_scope(
    connection: &mut BusConnection,
    request: &ScopeRequest,
) -> Result<String, ScopeError> {
    let text = |text: &str| PropertyValue::Text(text.to_owned());
    let description = format!("Fumehood, process {}", std::process::id());
    let mut properties = vec![
        ("Description", text(&description)),
        ("Delegate", PropertyValue::Flag(true)),
        ("CollectMode", text("inactive-or-failed")),
        // Zero means the sender, by the credentials of the socket: this process may have another pid in the pid
        // namespace of systemd.
        ("PIDs", PropertyValue::Process(0)),
    ];
    if let Some(slice) = &request.slice {
        properties.push(("Slice", text(slice)));
    }
    if let Some(tasks_max) = request.tasks_max {
        properties.push(("TasksMax", PropertyValue::Number(tasks_max)));
    }
    // An analysis that runs out of memory must not take the runner with it. systemd before 253 does not have this
    // property for scopes and refuses the whole call.
    let mut with_policy = properties.clone();
    with_policy.push(("OOMPolicy", text("continue")));
    let name = new_name()?;
    match connection.start_transient_unit(&name, &with_policy) {
        Ok(()) => return Ok(name),
        Err(BusError::Refused { .. }) => {}
        Err(e) => return Err(ScopeError::Ask(e)),
    }
    let name = new_name()?;
    let asked = connection.start_transient_unit(&name, &properties);
    asked.map(|()| name).map_err(ScopeError::Ask)
}

fn new_name() -> Result<String, ScopeError> {
    let mut noise = [0u8; 8];
    rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| ScopeError::Random(e.into()))?;
    Ok(cgroup::scope_name(u64::from_ne_bytes(noise)))
}

fn is_in(scope: &str) -> bool {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let tail = format!("/{scope}");
    let mut lines = groups.lines();
    lines.any(|line| line.starts_with("0::") && line.ends_with(&tail))
}

/// Root asks the system's manager, a plain user the user's own. Each has a private socket, which works without a
/// message bus.
fn connect(uid: u32, deadline: Instant) -> Result<BusConnection, ScopeError> {
    let held;
    let (private, bus) = match uid {
        0 => (
            PathBuf::from("/run/systemd/private"),
            PathBuf::from("/run/dbus/system_bus_socket"),
        ),
        _ => {
            held = runtime_directory(uid)?;
            // Go through the descriptor, so that the directory that was checked is the one that is used.
            let directory = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
            (directory.join("systemd/private"), directory.join("bus"))
        }
    };
    match BusConnection::open(&private, BusPeer::Manager, deadline) {
        Err(BusError::Connect(_)) => BusConnection::open(&bus, BusPeer::Bus, deadline),
        other => other,
    }
    .map_err(ScopeError::Ask)
}

/// The user's runtime directory. The environment names it and is not trusted: only this user may be able to put a
/// socket there. After `su`, the variable may name another user's directory.
fn runtime_directory(uid: u32) -> Result<OwnedFd, ScopeError> {
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let usual = PathBuf::from(format!("/run/user/{uid}"));
    match named.filter(|path| path.is_absolute() && *path != usual) {
        Some(named) => open_private(&named, uid).or_else(|_| open_private(&usual, uid)),
        None => open_private(&usual, uid),
    }
}

fn open_private(path: &Path, uid: u32) -> Result<OwnedFd, ScopeError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty())
        .and_then(|fd| Ok((rustix::fs::fstat(&fd)?, fd)));
    match opened {
        Ok((stat, fd)) if stat.st_uid == uid && stat.st_mode & 0o777 == 0o700 => Ok(fd),
        Ok(_) => Err(ScopeError::RuntimeDirectory(path.to_path_buf())),
        Err(e) => Err(ScopeError::OpenRuntimeDirectory {
            path: path.to_path_buf(),
            source: e.into(),
        }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_process_stays_in_the_innermost_slice_of_its_manager() {
        for (group, uid, expected, slice) in [
            (
                "/system.slice/cron.service",
                0,
                "/system.slice",
                Some("system.slice"),
            ),
            (
                "/user.slice/user-0.slice/session-3.scope",
                0,
                "/user.slice/user-0.slice",
                Some("user-0.slice"),
            ),
            // A user's manager has slices that the system's manager does not know.
            (
                "/user.slice/user-0.slice/user@0.service/app.slice/a.scope",
                0,
                "/user.slice/user-0.slice",
                Some("user-0.slice"),
            ),
            ("/init.scope", 0, "/", None),
            (
                "/fumehood.slice/fumehood-worker.service/main",
                0,
                "/fumehood.slice",
                Some("fumehood.slice"),
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.slice/x.scope",
                1000,
                "/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.slice",
                Some("app-x.slice"),
            ),
            (
                "/user.slice/user-1000.slice/session-1.scope",
                1000,
                "/user.slice/user-1000.slice",
                None,
            ),
            ("/system.slice/job.service", 1000, "/", None),
            (
                "/user.slice/user-1001.slice/session-2.scope",
                1000,
                "/user.slice",
                None,
            ),
        ] {
            let (kept, found) = kept_ancestor(Path::new(group), uid);
            assert_eq!(
                (kept.as_path(), found.as_deref()),
                (Path::new(expected), slice),
                "{group}"
            );
        }
    }

    #[test]
    fn only_a_process_in_a_systemd_unit_asks_to_be_moved() {
        for (group, groups, apart) in [
            ("/fumehood.slice/fumehood-worker.service", true, true),
            ("/fumehood.slice/fumehood-worker.service/main", false, true),
            ("/user.slice/user-1000.slice/session-1.scope", true, true),
            ("/system.slice/slurmd.service/job_1/step_0", false, false),
            ("/docker/0123", false, false),
            ("/fumehood.slice", false, false),
            ("/", false, false),
        ] {
            let group = Path::new(group);
            assert_eq!(
                (
                    is_systemd_unit(group, ScopePurpose::Groups),
                    is_systemd_unit(group, ScopePurpose::OwnScope)
                ),
                (groups, apart),
                "{group:?}"
            );
        }
    }

    #[test]
    fn only_a_private_runtime_directory_is_used() {
        let uid = rustix::process::geteuid().as_raw();
        let directory = tempfile::tempdir().unwrap();
        let mode = |mode| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(directory.path(), permissions).unwrap();
        };
        mode(0o700);
        assert!(open_private(directory.path(), uid).is_ok());
        assert!(open_private(directory.path(), uid + 1).is_err());
        for open in [0o755, 0o770, 0o701, 0o777, 0o1777] {
            mode(open);
            let answer = open_private(directory.path(), uid);
            assert!(
                matches!(answer, Err(ScopeError::RuntimeDirectory(_))),
                "{open:o}"
            );
        }
        mode(0o700);
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path(), &link).unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "").unwrap();
        for path in [link, file, directory.path().join("none")] {
            let answer = open_private(&path, uid);
            assert!(
                matches!(answer, Err(ScopeError::OpenRuntimeDirectory { .. })),
                "{path:?}"
            );
        }
    }

    #[test]
    fn with_cgroup_v1_systemd_is_not_asked() {
        match cgroup::delegation() {
            Delegation::Fixed => {
                assert_eq!(
                    join(ScopePurpose::OwnScope).unwrap(),
                    ScopeMembership::NotNeeded
                );
                assert_eq!(ensure_delegated().unwrap(), &ScopeMembership::NotNeeded);
                assert_eq!(ensure_own_scope().unwrap(), &ScopeMembership::NotNeeded);
            }
            other => eprintln!("UNAVAILABLE: this host has version 2 alone: {other:?}"),
        }
    }
}
