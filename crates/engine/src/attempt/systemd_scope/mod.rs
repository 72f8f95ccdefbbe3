//! A control group from systemd: where no part of the version 2 tree is ours, its manager is asked to move this process
//! into a scope of its own that is delegated to it, as `systemd-run --scope -p Delegate=yes` does.
//!
//! A move leaves a group behind, and with it whatever limits it had. So it is not made out of a batch system's job, out
//! of a group that somebody else than systemd manages, or out of one that limits memory or CPUs: who set those
//! limits meant us. What cannot be had is no error of the run's; the reason is for the record.
//!
//! A runner of a worker's goes into a scope also where the worker's unit is delegated: what systemd does to that unit
//! when it is restarted then does not reach the runner. Where it cannot have one, it stays in the unit, whose
//! KillMode=process leaves it alive; so it is with version 1 of cgroups, where systemd kills by a hierarchy of its own.

mod bus;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use sandbox::cgroup::{self, Delegation, GroupLocation};

pub use bus::BusError;
use bus::{Connection, Peer, Value};

/// Both take milliseconds. A manager that is busy for longer does not hold up a run; one that has agreed to move us is
/// about to.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const MOVE_WITHIN: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// How this process comes to groups of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Joined {
    /// cgroup version 1, or no cgroups: systemd has nothing to give that we do not have.
    NotNeeded,
    AlreadyDelegated,
    /// Moved into this scope, which ends with this process.
    Scope(String),
}

#[derive(Debug, thiserror::Error)]
pub enum ScopeError {
    #[error("systemd does not manage this host's cgroups")]
    NoSystemd,
    #[error("this process is part of a Slurm job and stays in it")]
    InJob,
    #[error("cgroup {0:?} is no unit of systemd's, so this process stays in it")]
    NotSystemds(PathBuf),
    #[error(
        "cgroup {group:?} limits this process by its {file}, and a scope of its own would not: {instead}"
    )]
    WouldShed {
        group: PathBuf,
        file: &'static str,
        /// What whoever set that limit can do.
        instead: &'static str,
    },
    #[error("{0:?} is not a directory of this user's alone, so no manager is looked for in it")]
    RuntimeDirectory(PathBuf),
    #[error("open the runtime directory {path:?}")]
    OpenRuntimeDirectory { path: PathBuf, source: io::Error },
    #[error("ask systemd for a scope")]
    Ask(#[source] BusError),
    #[error("systemd did not move this process into {0} in time")]
    NotMoved(String),
    #[error("get random bytes")]
    Random(#[source] io::Error),
}

/// What a process wants a scope for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// To make groups. Where it can already, it stays.
    Groups,
    /// To be no part of the unit that it was started in.
    Apart,
}

/// The first who asks decides, since a process moves once and everything it starts then is where it is.
static JOINED: OnceLock<Result<Joined, ScopeError>> = OnceLock::new();

/// Sees to it, once in a process, that this process is where it can make groups, if systemd can help with that. To be
/// called before anything is started: only this process is moved.
pub fn ensure() -> Result<&'static Joined, &'static ScopeError> {
    JOINED.get_or_init(|| join(Wish::Groups)).as_ref()
}

/// The same for a process that is to outlive the unit it is in: it gets a scope of its own in the same slice even where
/// it could make groups already. What it returns, [`ensure`] returns from then on. An error means that the process has
/// stayed in the unit, with whatever groups it may make there.
pub fn ensure_apart() -> Result<&'static Joined, &'static ScopeError> {
    JOINED.get_or_init(|| join(Wish::Apart)).as_ref()
}

fn join(wish: Wish) -> Result<Joined, ScopeError> {
    let place = match wish {
        Wish::Apart => match cgroup::group_location() {
            None => return Ok(Joined::NotNeeded),
            Some(place) => place,
        },
        Wish::Groups => match cgroup::delegation() {
            Delegation::Fixed => return Ok(Joined::NotNeeded),
            Delegation::Delegated => return Ok(Joined::AlreadyDelegated),
            Delegation::Undelegated(place) => place,
        },
    };
    // sd_booted(3): there exactly where systemd is the init of what we see.
    if !Path::new("/run/systemd/system").is_dir() {
        return Err(ScopeError::NoSystemd);
    }
    let uid = rustix::process::geteuid().as_raw();
    let in_job = std::env::var_os("SLURM_JOB_ID").is_some();
    let asking = asking(&place, uid, in_job, wish)?;
    let mut connection = connect(uid, Instant::now() + ANSWER_WITHIN)?;
    // It would stay behind.
    sandbox::standby::dismiss();
    let name = ask(&mut connection, &asking)?;
    let deadline = Instant::now() + MOVE_WITHIN;
    while !is_in(&name) {
        if Instant::now() >= deadline {
            return Err(ScopeError::NotMoved(name));
        }
        // What it says is not needed, only that something has happened; if it is gone, time alone tells.
        if connection.wait(LOOK_AGAIN).is_err() {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
    Ok(Joined::Scope(name))
}

/// What is asked for, beside the name.
#[derive(Debug, PartialEq, Eq)]
struct Asking {
    /// Of the slices we are in, the innermost: what it limits goes on holding.
    slice: Option<String>,
    tasks_max: Option<u64>,
}

fn asking(place: &GroupLocation, uid: u32, in_job: bool, wish: Wish) -> Result<Asking, ScopeError> {
    if in_job {
        return Err(ScopeError::InJob);
    }
    if !is_systemds(&place.group, wish) {
        return Err(ScopeError::NotSystemds(place.group.clone()));
    }
    let (kept, slice) = kept(&place.group, uid);
    match place.limit_lost_by_move(&kept) {
        Some((group, file)) => Err(ScopeError::WouldShed {
            group,
            file,
            instead: match wish {
                Wish::Groups => "set Delegate=yes for that unit instead",
                Wish::Apart => "set that limit for the slice of the worker's unit instead",
            },
        }),
        None => Ok(Asking {
            slice,
            // systemd sets this for every unit, so it is no reason to stay; it is taken along.
            tasks_max: place.pids_max(&kept),
        }),
    }
}

/// Whether systemd put us into this group. Somebody else's would miss us.
fn is_systemds(group: &Path, wish: Wish) -> bool {
    let is_unit = |group: &Path| {
        let name = group.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.ends_with(".scope") || name.ends_with(".service"))
    };
    match wish {
        Wish::Groups => is_unit(group),
        // Where DelegateSubgroup= is set, the worker that started us is one level below its unit.
        Wish::Apart => is_unit(group) || group.parent().is_some_and(is_unit),
    }
}

/// The group that we stay below, and the slice that the manager we ask has for it, if it has.
fn kept(group: &Path, uid: u32) -> (PathBuf, Option<String>) {
    let of_user = format!("/user.slice/user-{uid}.slice");
    let (mut kept, asked) = match uid {
        0 => (PathBuf::from("/"), PathBuf::from("/")),
        _ => {
            let manager = PathBuf::from(format!("{of_user}/user@{uid}.service"));
            (PathBuf::from(of_user), manager)
        }
    };
    if !group.starts_with(&asked) {
        // Out of the system's part of the tree into the user's: what they have in common stays.
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

/// Asks the manager for the scope, and returns its name.
fn ask(connection: &mut Connection, asking: &Asking) -> Result<String, ScopeError> {
    let pid = std::process::id();
    let mut properties = vec![
        (
            "Description",
            Value::Text(format!("Fumehood, process {pid}")),
        ),
        ("Delegate", Value::Flag(true)),
        ("CollectMode", Value::Text("inactive-or-failed".into())),
        // Zero is who asks, by what the kernel says of the socket: our own number may be another in systemd's eyes.
        ("PIDs", Value::Process(0)),
    ];
    if let Some(slice) = &asking.slice {
        properties.push(("Slice", Value::Text(slice.clone())));
    }
    if let Some(tasks_max) = asking.tasks_max {
        properties.push(("TasksMax", Value::Number(tasks_max)));
    }
    // An analysis that is out of memory must not take the runner with it. systemd before 253 has no such property
    // for scopes, and refuses the whole call.
    let mut with_policy = properties.clone();
    with_policy.push(("OOMPolicy", Value::Text("continue".into())));
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
    groups
        .lines()
        .any(|line| line.starts_with("0::") && line.ends_with(&tail))
}

/// Root asks the system's manager, a plain user its own. Each has a private socket, which works without a message bus.
fn connect(uid: u32, deadline: Instant) -> Result<Connection, ScopeError> {
    let held;
    let (private, bus) = match uid {
        0 => (
            PathBuf::from("/run/systemd/private"),
            PathBuf::from("/run/dbus/system_bus_socket"),
        ),
        _ => {
            held = runtime_directory(uid)?;
            // By the descriptor: the directory that was looked at is the one that is used.
            let directory = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
            (directory.join("systemd/private"), directory.join("bus"))
        }
    };
    match Connection::open(&private, Peer::Manager, deadline) {
        Err(BusError::Connect(_)) => Connection::open(&bus, Peer::Bus, deadline),
        other => other,
    }
    .map_err(ScopeError::Ask)
}

/// The user's runtime directory. The environment names it, and is not believed: nobody but this user may be able to put
/// a socket there that we would talk to. After `su` it may be another user's.
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
    fn what_is_kept_is_the_innermost_slice_of_the_manager_that_is_asked() {
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
            // Below a user's manager there are slices that the system's does not know.
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
            let (kept, found) = kept(Path::new(group), uid);
            assert_eq!(
                (kept.as_path(), found.as_deref()),
                (Path::new(expected), slice),
                "{group}"
            );
        }
    }

    #[test]
    fn only_what_systemd_put_somewhere_asks_to_be_moved() {
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
                    is_systemds(group, Wish::Groups),
                    is_systemds(group, Wish::Apart)
                ),
                (groups, apart),
                "{group:?}"
            );
        }
    }

    #[test]
    fn only_a_directory_of_ones_own_is_looked_into() {
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
    fn where_version_1_has_the_controllers_nothing_is_asked() {
        match cgroup::delegation() {
            Delegation::Fixed => {
                assert_eq!(join(Wish::Apart).unwrap(), Joined::NotNeeded);
                assert_eq!(ensure().unwrap(), &Joined::NotNeeded);
                assert_eq!(ensure_apart().unwrap(), &Joined::NotNeeded);
            }
            other => eprintln!("UNAVAILABLE: this host has version 2 alone: {other:?}"),
        }
    }
}
