//! One set of targets, and the evidence that an attack hit one. The control has one set and the sandbox has another.
//! The two differ only in their names.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::net::{RecvFlags, SocketFlags, SocketType};
use sandbox::attack::victims::{Queue, Segment};
use sandbox::attack::{PARENT_TARGET, SECRET_PREFIX};

use super::attack_output::AttackOutput;
use super::error::{AttackError, OperationContext};
use super::testbed::{BatteryProcess, Testbed, make_dir, open_terminal, random_word, set_mode};

/// The acts that change a file, each with a file of its own in the project, and the part of the project that holds it.
/// Any change to the file is evidence.
const CHANGE_ACTS: &[(&str, &str)] = &[
    ("write_data", "data"),
    ("truncate_data", "data"),
    ("chmod_data", "data"),
    ("utime_data", "data"),
    ("xattr_data", "data"),
    ("link_data", "data"),
    ("write_docs", "docs"),
    ("write_site", "site"),
];
/// The name of PostgreSQL's socket in its directory.
const SOCKET_NAME: &str = ".s.PGSQL.5432";
/// A device that the sandbox shows, and whose timestamps nothing on a host changes.
const DEVICE: &str = "/dev/full";
/// How long an act keeps holding a resource so that the sandbox's watch can see it, in milliseconds. The run ends as
/// soon as the watch sees it. Nothing watches the control.
const HOLD_MS: &str = "10000";
/// Acts that read a secret, each with a secret of its own.
const SECRET_ACTS: [&str; 8] = [
    "read_project",
    "list_project",
    "read_secret_file",
    "read_host_tmp",
    "inherited_descriptor",
    "secret_environment",
    "proc_of_others",
    "symlink_farm",
];
/// Acts on processes, each with a target process of its own.
const PROCESS_ACTS: [&str; 6] = [
    "signal_others",
    "signal_guardian",
    "signal_by_descriptor",
    "ptrace_others",
    "proc_of_others",
    "limits_of_others",
];

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum TargetSide {
    Control,
    Confined,
}

pub struct TargetSet {
    side: TargetSide,
    /// The text that an attacker leaves wherever it gets to.
    pub mark: String,
    secrets: Secrets,
    pub project: PathBuf,
    /// Where the control's attacker works.
    pub workspace: PathBuf,
    outside: PathBuf,
    other_workspace: PathBuf,
    size: u64,
    before: BTreeMap<&'static str, Vec<Option<String>>>,
    /// Sockets that stand in for services, by the act that is to reach them.
    services: BTreeMap<&'static str, Vec<OwnedFd>>,
    processes: BTreeMap<&'static str, BatteryProcess>,
    limits_before: String,
    segment: Option<Segment>,
    queue: Option<Queue>,
    /// Locked until the set is dropped.
    _lock: File,
    /// The control attacks a pseudo-terminal that is closed with the set, so that the host's own devices stay
    /// unchanged.
    terminal: Option<(OwnedFd, OwnedFd)>,
    host_files: Vec<PathBuf>,
}

/// The texts that attackers are to find, each in one target only. They all have one random word.
struct Secrets(String);

impl Secrets {
    fn of(&self, act: &str) -> String {
        format!("{SECRET_PREFIX}{}-{act}", self.0)
    }
}

/// Describes everything about a file that an attack can change. Returns `None` if there is no such file.
fn file_state(path: &Path) -> Option<String> {
    let meta = std::fs::symlink_metadata(path).ok()?;
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|e| e.file_name()).collect();
    names.sort();
    let content = meta.is_file().then(|| std::fs::read(path));
    let mut value = [0u8; 256];
    let attribute = rustix::fs::lgetxattr(path, "user.fumehood", &mut value[..]);
    let attribute = attribute.map(|n| &value[..n]);
    let times = (meta.mtime(), meta.mtime_nsec());
    let numbers = (meta.mode(), meta.nlink(), times);
    Some(format!("{names:?} {content:?} {attribute:?} {numbers:?}"))
}

impl TargetSet {
    pub fn create(
        testbed: &Testbed,
        side: TargetSide,
        other_workspace: &Path,
    ) -> Result<TargetSet, AttackError> {
        let mark = testbed.mark()?;
        let root = testbed.path(match side {
            TargetSide::Control => "control",
            TargetSide::Confined => "confined",
        });
        let (project, outside) = (root.join("project"), root.join("outside"));
        let secrets = Secrets(random_word()?);
        build_project(&project, &secrets)?;
        make_dir(&outside, 0o755)?;
        write_world_writable(&outside.join("secret"), &secrets.of("read_secret_file"))?;
        make_dir(&outside.join("farm"), 0o755)?;
        write_world_writable(&outside.join("farm/secret"), &secrets.of("symlink_farm"))?;
        write_world_writable(&outside.join("handed"), &secrets.of("inherited_descriptor"))?;
        let size = 4096 + u64::from_str_radix(&random_word()?[..4], 16).unwrap_or(0);
        write_world_writable(&project.join("site/measured"), &"x".repeat(size as usize))?;
        let host_tmp = Path::new("/tmp").join(format!("fumehood-attack-read-{mark}"));
        write_world_writable(&host_tmp, &secrets.of("read_host_tmp"))?;
        let workspace = root.join("workspace");
        make_dir(&workspace, 0o755)?;
        for name in ["data", "docs"] {
            symlink(project.join(name), workspace.join(name)).operation("link the data")?;
        }
        let lock = File::open(project.join("data/locked")).operation("open what is locked")?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).operation("lock it")?;
        let mut processes = BTreeMap::new();
        for act in PROCESS_ACTS {
            let process = BatteryProcess::start_target(testbed, &secrets.of("proc_of_others"))?;
            processes.insert(act, process);
        }
        let mut targets = TargetSet {
            limits_before: processes["limits_of_others"].limits(),
            services: start_services(&project, &outside, &mark).operation("start the services")?,
            segment: Segment::make().ok(),
            queue: Queue::make(&format!("fumehood-attack-{mark}")).ok(),
            before: BTreeMap::new(),
            other_workspace: other_workspace.join(format!("left-by-{mark}")),
            host_files: vec![host_tmp],
            _lock: lock,
            terminal: match side {
                TargetSide::Control => Some(open_terminal()?),
                TargetSide::Confined => None,
            },
            side,
            mark,
            secrets,
            project,
            workspace,
            outside,
            size,
            processes,
        };
        let written = ["write_host_tmp", "write_host_shm"].map(|act| targets.host_file(act));
        targets.host_files.extend(written);
        let acts = CHANGE_ACTS.iter().map(|(act, _)| *act);
        let acts = acts.chain(["write_api_py", "utime_device"]);
        targets.before = acts.map(|act| (act, targets.states(act))).collect();
        Ok(targets)
    }

    pub fn secret(&self, act: &str) -> String {
        self.secrets.of(act)
    }

    /// Returns a descriptor that the next process to be started inherits.
    pub fn inherited_descriptor(&self) -> Result<OwnedFd, AttackError> {
        let file = File::open(self.outside.join("handed")).operation("open what is handed on")?;
        // `dup` does not set close-on-exec, unlike every other way in which this process opens files.
        rustix::io::dup(&file).operation("copy a descriptor")
    }

    fn host_file(&self, act: &str) -> PathBuf {
        match act {
            "write_host_shm" => Path::new("/dev/shm"),
            "write_system" => Path::new("/usr"),
            _ => Path::new("/tmp"),
        }
        .join(format!("fumehood-attack-{}", self.mark))
    }

    fn device(&self) -> PathBuf {
        let terminal = self.terminal.as_ref();
        let name = terminal.and_then(|(outer, _)| rustix::pty::ptsname(outer, Vec::new()).ok());
        let name = name.and_then(|name| name.into_string().ok());
        name.map_or_else(|| DEVICE.into(), PathBuf::from)
    }

    /// Reads the files that this act would change.
    fn states(&self, act: &str) -> Vec<Option<String>> {
        let paths = match CHANGE_ACTS.iter().find(|(name, _)| *name == act) {
            Some((name, area)) => {
                let dir = self.project.join(area).join(name);
                vec![dir.join("file"), dir]
            }
            None if act == "utime_device" => vec![self.device()],
            None => ["api.py", "api.py.new", "api.py.dir"]
                .map(|name| self.project.join(name))
                .to_vec(),
        };
        paths.iter().map(|path| file_state(path)).collect()
    }

    /// Returns the target of an act in the form that the attacker parses.
    pub fn target(&self, act: &str) -> String {
        let (project, outside) = (self.project.display(), self.outside.display());
        let in_project = |name: &str| format!("{project}/{name}|data/../{name}");
        if let Some((name, area)) = CHANGE_ACTS.iter().find(|(name, _)| *name == act) {
            let below = format!("{area}/{name}/file");
            return match *area {
                "site" => in_project(&below),
                _ => format!("{below}|{project}/{below}"),
            };
        }
        let port = |act: &str| {
            let address = rustix::net::getsockname(&self.services[act][0]).ok();
            let address = address.and_then(|a| std::net::SocketAddr::try_from(a).ok());
            address.map_or(0, |a| a.port()).to_string()
        };
        match act {
            "read_project" => in_project(".env"),
            "list_project" => format!("{project}|data/.."),
            "stat_project" => in_project("site/measured"),
            "lock_data" => format!("data/locked|{project}/data/locked"),
            "read_secret_file" => format!("{outside}/secret"),
            "read_host_tmp" => self.host_files[0].display().to_string(),
            "write_api_py" => in_project("api.py"),
            "write_system" | "write_host_tmp" | "write_host_shm" => {
                self.host_file(act).display().to_string()
            }
            "write_other_workspace" => self.other_workspace.display().to_string(),
            "utime_device" => self.device().display().to_string(),
            "netlink" => port("postgres_tcp"),
            "postgres_tcp" | "tcp_fast_open" | "udp" | "dns" => port(act),
            "postgres_socket" => {
                let name = SOCKET_NAME;
                format!("{outside}/{name}|data/{name}|{project}/data/{name}")
            }
            "postgres_abstract" | "message_queue" => format!("fumehood-attack-{}", self.mark),
            "unix_datagram" => {
                format!(
                    "{project}/data/datagram|fumehood-attack-datagram-{}",
                    self.mark
                )
            }
            "signal_guardian" if self.side == TargetSide::Confined => PARENT_TARGET.into(),
            "init_memory" if self.side == TargetSide::Confined => format!("{PARENT_TARGET}|1"),
            "init_memory" => self.processes["proc_of_others"].pid().to_string(),
            "system_v_ipc" => self.segment.as_ref().map_or(-1, Segment::id).to_string(),
            "oom_loop" | "disk_held_by_calls" | "unlinked_files" => match self.side {
                TargetSide::Control => "0".into(),
                TargetSide::Confined => HOLD_MS.into(),
            },
            "symlink_farm" => format!("{outside}/farm/secret|{outside}/farm"),
            _ => {
                let process = self.processes.get(act);
                process.map_or(String::new(), |p| p.pid().to_string())
            }
        }
    }

    /// Returns the evidence that the act succeeded, if there is any: from the host where possible, else from what the
    /// attacker printed.
    pub fn evidence(&mut self, act: &str, attack_output: &AttackOutput) -> Option<String> {
        let reported = || attack_output.success(act);
        if let Some(before) = self.before.get(act) {
            return (self.states(act) != *before)
                .then(|| "the host's file is not as it was".into());
        }
        if let Some(services) = self.services.get(act) {
            let received = services.iter().any(|socket| received(socket, &self.mark));
            return received.then(|| "the service received it".into());
        }
        match act {
            "stat_project" => revealed(attack_output, act, &format!("size {}", self.size)),
            "write_system" if self.side == TargetSide::Control => reported(),
            "write_system" | "write_other_workspace" | "write_host_tmp" | "write_host_shm" => {
                let path = match act {
                    "write_other_workspace" => &self.other_workspace,
                    _ => &self.host_file(act),
                };
                let there = std::fs::symlink_metadata(path).is_ok();
                there.then(|| format!("{} is on the host", path.display()))
            }
            "signal_others" | "signal_guardian" | "signal_by_descriptor" | "ptrace_others" => {
                let died = self
                    .processes
                    .get_mut(act)
                    .is_some_and(BatteryProcess::died);
                let outside = died.then(|| "the process that it was aimed at died".to_owned());
                // Reading another process's memory leaves no trace, so believe the attacker.
                outside.or_else(|| reported().filter(|_| act == "ptrace_others"))
            }
            "limits_of_others" => {
                let changed = self.processes[act].limits() != self.limits_before;
                let outside = changed.then(|| "its limits are not as they were".to_owned());
                outside.or_else(reported)
            }
            "system_v_ipc" => {
                let reached = self.segment.as_ref().map(Segment::was_reached);
                matches!(reached, Some(Ok(true))).then(|| "it was attached to".into())
            }
            "message_queue" => {
                let message = self.queue.as_ref().and_then(Queue::take);
                let ours = message.is_some_and(|m| m == self.mark.as_bytes());
                ours.then(|| "the queue holds the message".into())
            }
            _ if SECRET_ACTS.contains(&act) => revealed(attack_output, act, &self.secret(act)),
            _ => reported(),
        }
    }

    /// Returns why this host cannot try the act at all.
    pub fn why_impossible(&self, act: &str) -> Option<&'static str> {
        match act {
            "system_v_ipc" if self.segment.is_none() => Some("this kernel has no System V IPC"),
            "message_queue" if self.queue.is_none() => Some("this kernel has no message queues"),
            _ => None,
        }
    }
}

impl Drop for TargetSet {
    fn drop(&mut self) {
        for path in &self.host_files {
            // The attack may not have made the file.
            let _ = std::fs::remove_file(path);
        }
        if self.side == TargetSide::Confined {
            let _ = std::fs::remove_file(self.host_file("write_system"));
        }
    }
}

fn revealed(attack_output: &AttackOutput, act: &str, secret: &str) -> Option<String> {
    let success = attack_output.success(act).unwrap_or_default();
    let out = attack_output.text.contains(secret);
    out.then(|| format!("a secret of the host was read: {success}"))
}

fn build_project(project: &Path, secrets: &Secrets) -> Result<(), AttackError> {
    for name in ["", "data", "docs", "site"] {
        make_dir(&project.join(name), 0o755)?;
    }
    for (act, area) in CHANGE_ACTS {
        make_dir(&project.join(area).join(act), 0o777)?;
        write_world_writable(&project.join(area).join(act).join("file"), "as it was\n")?;
    }
    write_world_writable(&project.join("data/locked"), "")?;
    write_world_writable(&project.join("api.py"), "# as it was\n")?;
    write_world_writable(&project.join(".env"), &secrets.of("read_project"))?;
    write_world_writable(&project.join(secrets.of("list_project")), "")
}

/// Anybody may read and write the file: only the sandbox protects it.
fn write_world_writable(path: &Path, text: &str) -> Result<(), AttackError> {
    let mut file = File::create_new(path).operation_on("make", path)?;
    file.write_all(text.as_bytes())
        .operation_on("write", path)?;
    set_mode(path, 0o666)
}

fn start_services(
    project: &Path,
    outside: &Path,
    mark: &str,
) -> std::io::Result<BTreeMap<&'static str, Vec<OwnedFd>>> {
    let tcp = || TcpListener::bind("127.0.0.1:0").map(OwnedFd::from);
    let udp = || UdpSocket::bind("127.0.0.1:0").map(OwnedFd::from);
    let everybody = || std::fs::Permissions::from_mode(0o777);
    let listen = |dir: &Path| {
        let path = dir.join(SOCKET_NAME);
        let socket = UnixListener::bind(&path)?;
        std::fs::set_permissions(path, everybody())?;
        Ok::<OwnedFd, std::io::Error>(socket.into())
    };
    let path = project.join("data/datagram");
    let datagram = UnixDatagram::bind(&path)?;
    std::fs::set_permissions(path, everybody())?;
    let abstract_name = |name: &str| SocketAddr::from_abstract_name(format!("{name}-{mark}"));
    let listener = UnixListener::bind_addr(&abstract_name("fumehood-attack")?)?;
    let named_datagram = UnixDatagram::bind_addr(&abstract_name("fumehood-attack-datagram")?)?;
    let files = [listen(outside)?, listen(&project.join("data"))?];
    let services = BTreeMap::from([
        ("postgres_tcp", vec![tcp()?]),
        ("tcp_fast_open", vec![tcp()?]),
        ("postgres_socket", Vec::from(files)),
        ("postgres_abstract", vec![listener.into()]),
        (
            "unix_datagram",
            vec![datagram.into(), named_datagram.into()],
        ),
        ("udp", vec![udp()?]),
        ("dns", vec![udp()?]),
    ]);
    for socket in services.values().flatten() {
        // Looking for what arrived must not wait.
        rustix::io::ioctl_fionbio(socket, true)?;
    }
    Ok(services)
}

/// Whatever arrived is still queued in the socket, because nothing has read from it.
fn received(socket: &OwnedFd, mark: &str) -> bool {
    std::iter::from_fn(|| next_arrival(socket)).any(|text| contains(&text, mark))
}

/// Returns the next datagram, or what the next connection has sent.
fn next_arrival(socket: &OwnedFd) -> Option<Vec<u8>> {
    if rustix::net::sockopt::socket_type(socket) != Ok(SocketType::STREAM) {
        let mut datagram = vec![0u8; 1024];
        let (n, _) = rustix::net::recv(socket, &mut datagram[..], RecvFlags::empty()).ok()?;
        datagram.truncate(n);
        return Some(datagram);
    }
    // A blocking connection would only delay this process until the attacker's end closes.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let connection = rustix::net::accept_with(socket, flags).ok()?;
    let mut text = Vec::new();
    // The read ends at the end of the connection, or with an error where nothing more has arrived. What was read counts
    // in both cases.
    let _ = File::from(connection).take(1024).read_to_end(&mut text);
    Some(text)
}

/// Returns whether the bytes contain a text.
pub fn contains(text: &[u8], mark: &str) -> bool {
    text.windows(mark.len()).any(|w| w == mark.as_bytes())
}
