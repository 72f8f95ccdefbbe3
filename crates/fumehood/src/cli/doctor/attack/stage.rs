//! One set of targets, and what shows from outside that one was hit. The control has one and the sandbox has another,
//! alike in everything but their names.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::FlockOperation;
use sandbox::attack::victims::{Queue, Segment};
use sandbox::attack::{PARENT_TARGET, SECRET_PREFIX};

use super::lab::{Lab, Witness, make_open, open_terminal, random_word, set_mode};
use super::said::Said;

/// The acts that hit a file of their own, whose every change is seen: its act, and where it lies in the project.
const CHANGES: &[(&str, &str)] = &[
    ("write_data", "data"),
    ("truncate_data", "data"),
    ("chmod_data", "data"),
    ("utime_data", "data"),
    ("xattr_data", "data"),
    ("link_data", "data"),
    ("write_docs", "docs"),
    ("write_site", "site"),
];
/// The device that the sandbox shows and nobody on a host sets the times of.
const DEVICE: &str = "/dev/full";
/// How long an act holds what a watch is to see, in milliseconds. The run ends as soon as it is seen; for the control
/// nobody looks.
const HELD_FOR: &str = "10000";
/// Acts on processes, each with a witness of its own.
const WITNESSED: [&str; 6] = [
    "signal_others",
    "signal_guardian",
    "signal_by_descriptor",
    "ptrace_others",
    "proc_of_others",
    "limits_of_others",
];

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Control,
    Confined,
}

pub struct Stage {
    side: Side,
    /// What attacks leave where they get.
    pub mark: String,
    /// What attacks are to find, each in one place only.
    secrets: BTreeMap<&'static str, String>,
    pub project: PathBuf,
    /// Of the control: where its attacker works.
    pub workspace: PathBuf,
    outside: PathBuf,
    other_workspace: PathBuf,
    size: u64,
    before: BTreeMap<&'static str, Vec<State>>,
    services: Services,
    witnesses: BTreeMap<&'static str, Witness>,
    limits_before: String,
    segment: Option<Segment>,
    queue: Option<Queue>,
    /// Held until the end.
    _lock: File,
    /// The control's device is a terminal that is gone with the stage: the host's own devices stay as they are.
    terminal: Option<(OwnedFd, OwnedFd)>,
    host_files: Vec<PathBuf>,
}

struct Services {
    tcp: TcpListener,
    fast_open: TcpListener,
    paths: Vec<UnixListener>,
    abstract_name: UnixListener,
    datagrams: Vec<UnixDatagram>,
    udp: UdpSocket,
    dns: UdpSocket,
}

/// Everything about a file that an attack can change.
#[derive(Clone, PartialEq, Eq, Debug)]
enum State {
    Absent,
    There {
        names: Vec<std::ffi::OsString>,
        content: Vec<u8>,
        mode: u32,
        modified: (i64, i64),
        links: u64,
        attribute: Option<Vec<u8>>,
    },
}

impl State {
    fn of(path: &Path) -> State {
        let Ok(meta) = std::fs::symlink_metadata(path) else {
            return State::Absent;
        };
        let mut names: Vec<_> = std::fs::read_dir(path)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.file_name())
            .collect();
        names.sort();
        let mut value = vec![0u8; 256];
        let attribute = rustix::fs::lgetxattr(path, "user.fumehood", &mut value[..]);
        State::There {
            names,
            content: match meta.is_file() {
                true => std::fs::read(path).unwrap_or_default(),
                false => Vec::new(),
            },
            mode: meta.mode(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            links: meta.nlink(),
            attribute: attribute.ok().map(|n| value[..n].to_vec()),
        }
    }
}

impl Stage {
    pub fn set(lab: &Lab, side: Side, other_workspace: &Path) -> anyhow::Result<Stage> {
        let mark = lab.mark()?;
        let root = lab.path(match side {
            Side::Control => "control",
            Side::Confined => "confined",
        });
        let (project, outside) = (root.join("project"), root.join("outside"));
        let mut secrets = BTreeMap::new();
        for place in [
            "read_project",
            "list_project",
            "read_secret_file",
            "read_host_tmp",
        ]
        .into_iter()
        .chain([
            "inherited_descriptor",
            "secret_environment",
            "proc_of_others",
        ])
        .chain(["symlink_farm"])
        {
            secrets.insert(place, format!("{SECRET_PREFIX}{}", random_word()?));
        }
        build_project(&project, &secrets)?;
        make_open(&outside, 0o755)?;
        write_open(&outside.join("secret"), &secrets["read_secret_file"])?;
        make_open(&outside.join("farm"), 0o755)?;
        write_open(&outside.join("farm/secret"), &secrets["symlink_farm"])?;
        write_open(&outside.join("handed"), &secrets["inherited_descriptor"])?;
        let size = 4096 + u64::from_str_radix(&random_word()?[..4], 16).unwrap_or(0);
        write_open(&project.join("site/measured"), &"x".repeat(size as usize))?;
        let host_tmp = Path::new("/tmp").join(format!("fumehood-attack-read-{mark}"));
        write_open(&host_tmp, &secrets["read_host_tmp"])?;
        let workspace = root.join("workspace");
        make_open(&workspace, 0o755)?;
        for name in ["data", "docs"] {
            symlink(project.join(name), workspace.join(name)).context("link the data")?;
        }
        let lock = File::open(project.join("data/locked")).context("open what is locked")?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).context("lock it")?;
        let mut witnesses = BTreeMap::new();
        for act in WITNESSED {
            witnesses.insert(act, Witness::start(lab, &secrets["proc_of_others"])?);
        }
        let mut stage = Stage {
            limits_before: witnesses["limits_of_others"].limits(),
            services: Services::start(&project, &outside, &mark)?,
            segment: Segment::make().ok(),
            queue: Queue::make(&format!("fumehood-attack-{mark}")).ok(),
            before: BTreeMap::new(),
            other_workspace: other_workspace.join(format!("left-by-{mark}")),
            host_files: vec![host_tmp],
            _lock: lock,
            terminal: match side {
                Side::Control => Some(open_terminal()?),
                Side::Confined => None,
            },
            side,
            mark,
            secrets,
            project,
            workspace,
            outside,
            size,
            witnesses,
        };
        stage.host_files.extend([
            stage.host_file("write_host_tmp"),
            stage.host_file("write_host_shm"),
        ]);
        let acts = CHANGES
            .iter()
            .map(|(act, _)| *act)
            .chain(["write_api_py", "utime_device"]);
        stage.before = acts.map(|act| (act, stage.states(act))).collect();
        Ok(stage)
    }

    pub fn secret(&self, place: &str) -> &str {
        self.secrets.get(place).map_or("", String::as_str)
    }

    /// A descriptor that whoever is started next inherits.
    pub fn handed_on(&self) -> anyhow::Result<OwnedFd> {
        let file = File::open(self.outside.join("handed")).context("open what is handed on")?;
        // Not close-on-exec, unlike all others.
        rustix::io::dup(&file).context("copy a descriptor")
    }

    pub fn farm_secret(&self) -> PathBuf {
        self.outside.join("farm/secret")
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

    /// Where a change by this act would show.
    fn states(&self, act: &str) -> Vec<State> {
        let paths = match CHANGES.iter().find(|(name, _)| *name == act) {
            Some((name, area)) => {
                let dir = self.project.join(area).join(name);
                vec![dir.join("file"), dir]
            }
            None if act == "utime_device" => vec![self.device()],
            None => ["api.py", "api.py.new", "api.py.dir"]
                .map(|name| self.project.join(name))
                .to_vec(),
        };
        paths.iter().map(|path| State::of(path)).collect()
    }

    /// What the attack of this name is aimed at.
    pub fn target(&self, act: &str) -> String {
        let join = |parts: &[&Path]| {
            let parts: Vec<String> = parts.iter().map(|p| p.display().to_string()).collect();
            parts.join("|")
        };
        if let Some((name, area)) = CHANGES.iter().find(|(name, _)| *name == act) {
            let below = Path::new(area).join(name).join("file");
            return match *area {
                "site" => join(&[
                    &self.project.join(&below),
                    &Path::new("data/..").join(&below),
                ]),
                _ => join(&[&below, &self.project.join(&below)]),
            };
        }
        let port = |socket: &TcpListener| socket.local_addr().map_or(0, |a| a.port()).to_string();
        let udp_port = |socket: &UdpSocket| socket.local_addr().map_or(0, |a| a.port()).to_string();
        let project =
            |name: &str| join(&[&self.project.join(name), &Path::new("data/..").join(name)]);
        match act {
            "read_project" => project(".env"),
            "list_project" => join(&[&self.project, Path::new("data/..")]),
            "stat_project" => project("site/measured"),
            "lock_data" => join(&[Path::new("data/locked"), &self.project.join("data/locked")]),
            "read_secret_file" => join(&[&self.outside.join("secret")]),
            "read_host_tmp" => join(&[&self.host_files[0]]),
            "write_api_py" => project("api.py"),
            "write_system" | "write_host_tmp" | "write_host_shm" => join(&[&self.host_file(act)]),
            "write_other_workspace" => join(&[&self.other_workspace]),
            "utime_device" => join(&[&self.device()]),
            "postgres_tcp" | "netlink" => port(&self.services.tcp),
            "tcp_fast_open" => port(&self.services.fast_open),
            "postgres_socket" => join(&[
                &self.outside.join(".s.PGSQL.5432"),
                Path::new("data/.s.PGSQL.5432"),
                &self.project.join("data/.s.PGSQL.5432"),
            ]),
            "postgres_abstract" => format!("fumehood-attack-{}", self.mark),
            "unix_datagram" => format!(
                "{}|fumehood-attack-datagram-{}",
                self.project.join("data/datagram").display(),
                self.mark
            ),
            "udp" => udp_port(&self.services.udp),
            "dns" => udp_port(&self.services.dns),
            "signal_guardian" if self.side == Side::Confined => PARENT_TARGET.into(),
            "init_memory" if self.side == Side::Confined => format!("{PARENT_TARGET}|1"),
            "init_memory" => self.witnesses["proc_of_others"].pid().to_string(),
            "system_v_ipc" => self.segment.as_ref().map_or(-1, Segment::id).to_string(),
            "message_queue" => format!("fumehood-attack-{}", self.mark),
            "oom_loop" | "disk_held_by_calls" | "unlinked_files" => match self.side {
                Side::Control => "0".into(),
                Side::Confined => HELD_FOR.into(),
            },
            "symlink_farm" => join(&[&self.farm_secret(), &self.outside.join("farm")]),
            _ => match self.witnesses.get(act) {
                Some(witness) => witness.pid().to_string(),
                None => String::new(),
            },
        }
    }

    /// What shows that the act was done, if it was: looked up on the host where it can be.
    pub fn evidence(&mut self, act: &str, said: &Said) -> Option<String> {
        let told = || said.got(act).map(str::to_owned);
        if let Some(before) = self.before.get(act) {
            return (self.states(act) != *before)
                .then(|| "the host's file is not as it was".into());
        }
        match act {
            "stat_project" => found(said, act, &format!("size {}", self.size)),
            "write_system" if self.side == Side::Control => told(),
            "write_system" | "write_other_workspace" | "write_host_tmp" | "write_host_shm" => {
                let path = match act {
                    "write_other_workspace" => &self.other_workspace,
                    _ => &self.host_file(act),
                };
                let there = std::fs::symlink_metadata(path).is_ok();
                there.then(|| format!("{} is on the host", path.display()))
            }
            "postgres_tcp" | "postgres_socket" | "postgres_abstract" | "unix_datagram"
            | "tcp_fast_open" | "udp" | "dns" => {
                let heard = self.services.heard(act, &self.mark);
                heard.then(|| "the service heard it".into())
            }
            "signal_others" | "signal_guardian" | "signal_by_descriptor" | "ptrace_others" => {
                let died = self.witnesses.get_mut(act).is_some_and(Witness::died);
                let outside = died.then(|| "the process that it was aimed at died".to_owned());
                // To read its memory leaves no trace.
                outside.or_else(|| told().filter(|_| act == "ptrace_others"))
            }
            "limits_of_others" => {
                let changed = self.witnesses[act].limits() != self.limits_before;
                let outside = changed.then(|| "its limits are not as they were".to_owned());
                outside.or_else(told)
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
            _ => match self.secrets.get(act) {
                Some(secret) => found(said, act, secret),
                None => told(),
            },
        }
    }

    /// Why an act cannot be tried on this host at all.
    pub fn unable(&self, act: &str) -> Option<&'static str> {
        match act {
            "system_v_ipc" if self.segment.is_none() => Some("this kernel has no System V IPC"),
            "message_queue" if self.queue.is_none() => Some("this kernel has no message queues"),
            _ => None,
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for path in &self.host_files {
            let _never_made = std::fs::remove_file(path);
        }
        if self.side == Side::Confined {
            let _never_made = std::fs::remove_file(self.host_file("write_system"));
        }
    }
}

fn found(said: &Said, act: &str, secret: &str) -> Option<String> {
    let out = said.text.contains(secret);
    out.then(|| {
        format!(
            "what only the host knew came out: {}",
            said.got(act).unwrap_or("")
        )
    })
}

fn build_project(project: &Path, secrets: &BTreeMap<&str, String>) -> anyhow::Result<()> {
    for name in ["", "data", "docs", "site"] {
        make_open(&project.join(name), 0o755)?;
    }
    for (act, area) in CHANGES {
        make_open(&project.join(area).join(act), 0o777)?;
        write_open(&project.join(area).join(act).join("file"), "as it was\n")?;
    }
    write_open(&project.join("data/locked"), "")?;
    write_open(&project.join("api.py"), "# as it was\n")?;
    write_open(&project.join(".env"), &secrets["read_project"])?;
    write_open(&project.join(&secrets["list_project"]), "")
}

/// Open to all: what protects it is the sandbox, or nothing.
fn write_open(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut file = File::create_new(path).with_context(|| format!("make {path:?}"))?;
    file.write_all(text.as_bytes())
        .with_context(|| format!("write {path:?}"))?;
    set_mode(path, 0o666)
}

impl Services {
    fn start(project: &Path, outside: &Path, mark: &str) -> anyhow::Result<Services> {
        let tcp = || {
            let socket = TcpListener::bind("127.0.0.1:0").context("listen on loopback")?;
            socket.set_nonblocking(true).context("listen on loopback")?;
            anyhow::Ok(socket)
        };
        let udp = || {
            let socket = UdpSocket::bind("127.0.0.1:0").context("bind on loopback")?;
            socket.set_nonblocking(true).context("bind on loopback")?;
            anyhow::Ok(socket)
        };
        let mut paths = Vec::new();
        for dir in [outside, &project.join("data")] {
            let path = dir.join(".s.PGSQL.5432");
            let socket =
                UnixListener::bind(&path).with_context(|| format!("listen at {path:?}"))?;
            set_mode(&path, 0o777)?;
            socket.set_nonblocking(true).context("listen at a path")?;
            paths.push(socket);
        }
        let name = SocketAddr::from_abstract_name(format!("fumehood-attack-{mark}"))
            .context("make an abstract name")?;
        let abstract_name = UnixListener::bind_addr(&name).context("listen at a name")?;
        abstract_name
            .set_nonblocking(true)
            .context("listen at a name")?;
        let path = project.join("data/datagram");
        let by_path = UnixDatagram::bind(&path).with_context(|| format!("bind at {path:?}"))?;
        set_mode(&path, 0o777)?;
        let name = SocketAddr::from_abstract_name(format!("fumehood-attack-datagram-{mark}"))
            .context("make an abstract name")?;
        let by_name = UnixDatagram::bind_addr(&name).context("bind at a name")?;
        for socket in [&by_path, &by_name] {
            socket
                .set_nonblocking(true)
                .context("bind a datagram socket")?;
        }
        Ok(Services {
            tcp: tcp()?,
            fast_open: tcp()?,
            paths,
            abstract_name,
            datagrams: vec![by_path, by_name],
            udp: udp()?,
            dns: udp()?,
        })
    }

    /// Whatever has come is waiting in the sockets: nobody has taken any of it yet.
    fn heard(&self, act: &str, mark: &str) -> bool {
        match act {
            "postgres_tcp" => heard_tcp(&self.tcp, mark),
            "tcp_fast_open" => heard_tcp(&self.fast_open, mark),
            "postgres_socket" => self.paths.iter().any(|s| heard_unix(s, mark)),
            "postgres_abstract" => heard_unix(&self.abstract_name, mark),
            "unix_datagram" => self
                .datagrams
                .iter()
                .any(|s| heard_datagram(|b| s.recv(b), mark)),
            "udp" => heard_datagram(|b| self.udp.recv(b), mark),
            _ => heard_datagram(|b| self.dns.recv(b), mark),
        }
    }
}

fn heard_tcp(socket: &TcpListener, mark: &str) -> bool {
    let mut heard = false;
    while let Ok((connection, _)) = socket.accept() {
        let _as_it_is = connection.set_nonblocking(true);
        heard |= says(connection, mark);
    }
    heard
}

fn heard_unix(socket: &UnixListener, mark: &str) -> bool {
    let mut heard = false;
    while let Ok((connection, _)) = socket.accept() {
        let _as_it_is = connection.set_nonblocking(true);
        heard |= says(connection, mark);
    }
    heard
}

fn heard_datagram(receive: impl Fn(&mut [u8]) -> std::io::Result<usize>, mark: &str) -> bool {
    let mut heard = false;
    let mut datagram = [0u8; 1024];
    while let Ok(n) = receive(&mut datagram) {
        heard |= holds(&datagram[..n], mark);
    }
    heard
}

fn says(mut connection: impl Read, mark: &str) -> bool {
    let mut text = Vec::new();
    // It ends with the connection, or where nothing more has come yet.
    let _as_far_as_it_goes = connection.by_ref().take(1024).read_to_end(&mut text);
    holds(&text, mark)
}

fn holds(text: &[u8], mark: &str) -> bool {
    text.windows(mark.len()).any(|w| w == mark.as_bytes())
}
