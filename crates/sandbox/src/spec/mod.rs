//! The description of one confined run, as plain data.
//!
//! A [`Spec`] crosses a process boundary: the runner writes it as JSON into a sealed memory file, and the launcher
//! reads it back. Descriptors travel beside it over the control socket (see `plan.rs`).

mod disabled_layers;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use disabled_layers::DisabledLayers;

/// Bytes that are usually text: a path, an argument, an environment value. UTF-8 becomes a string in JSON, anything
/// else a list of bytes, so that every name round-trips.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(
    /// The bytes.
    pub Vec<u8>,
);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum BytesForm<'a> {
    Text(std::borrow::Cow<'a, str>),
    Raw(Vec<u8>),
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) => BytesForm::Text(text.into()).serialize(s),
            Err(_) => BytesForm::Raw(self.0.clone()).serialize(s),
        }
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Ok(match BytesForm::deserialize(d)? {
            BytesForm::Text(text) => Bytes(text.into_owned().into_bytes()),
            BytesForm::Raw(raw) => Bytes(raw),
        })
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", OsStr::from_bytes(&self.0))
    }
}

impl<T: AsRef<OsStr> + ?Sized> From<&T> for Bytes {
    fn from(text: &T) -> Self {
        Bytes(text.as_ref().as_bytes().to_vec())
    }
}

impl Bytes {
    /// The bytes as the name of a file, an argument or a value.
    pub fn as_os_str(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }
    /// A copy of the bytes, as [`Bytes::as_os_str`].
    pub fn to_os_string(&self) -> OsString {
        OsString::from_vec(self.0.clone())
    }
}

macro_rules! path_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Bytes);

        impl $name {
            /// Takes over a path as it is.
            pub fn new(path: impl AsRef<Path>) -> Self {
                $name(Bytes::from(path.as_ref()))
            }
            /// The path.
            pub fn as_path(&self) -> &Path {
                Path::new(self.0.as_os_str())
            }
            /// A copy of the path.
            pub fn to_path_buf(&self) -> PathBuf {
                self.as_path().to_path_buf()
            }
        }
    };
}

path_type!(
    /// A path as the host sees it.
    HostPath
);
path_type!(
    /// A path as the confined program sees it.
    InsidePath
);

/// One read-only view of a host path inside the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadOnlyView {
    /// What is shown.
    pub source: HostPath,
    /// Where it is shown.
    pub target: InsidePath,
    /// Whether its files may be executed.
    pub exec: Exec,
    /// Whether an idmapped mount maps the source's owner to the program's uid, so that the program can read files that
    /// only their owner may read. Only root can make such a mount. For a plain user the program has the caller's own
    /// file permissions already.
    pub owner: Owner,
    /// What it holds.
    pub content: ViewContent,
}

/// What a view holds. This decides whether an unreadable file in the view stops the run before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ViewContent {
    /// An unreadable file stops the run: a program that skips the file would compute a wrong result from the others.
    Data,
    /// An unreadable file does not stop the run: a runtime is too large to check, and fails visibly when it cannot load
    /// a file.
    Runtime,
}

/// Whether files of a view may be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exec {
    /// They may be executed.
    Allowed,
    /// They may not.
    Refused,
}

/// Which owner the files of a view have inside the sandbox; see [`ReadOnlyView::owner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// The owner that they have on the host.
    AsIs,
    /// The program.
    Mapped,
}

/// Where the files of the workspace are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceKind {
    /// In a directory on the host, which the runner holds open.
    Disk,
    /// In a tmpfs inside the sandbox. The disk and file limits set its size.
    Memory,
}

/// The host identity the program runs under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramIdentity {
    /// The caller is root. The program gets an unprivileged uid and gid that no other process on this host has.
    Leased {
        /// The leased uid.
        uid: u32,
        /// The gid of the same number.
        gid: u32,
    },
    /// The caller is a plain user. The program keeps the caller's uid, in a user namespace at level `full`.
    Caller {
        /// The caller's uid.
        uid: u32,
        /// The caller's gid.
        gid: u32,
    },
}

impl ProgramIdentity {
    /// The uid on the host.
    pub fn uid(self) -> u32 {
        match self {
            ProgramIdentity::Leased { uid, .. } | ProgramIdentity::Caller { uid, .. } => uid,
        }
    }
    /// The gid on the host.
    pub fn gid(self) -> u32 {
        match self {
            ProgramIdentity::Leased { gid, .. } | ProgramIdentity::Caller { gid, .. } => gid,
        }
    }
}

/// Every limit of a run. A limit is an `Option` only where the user may switch it off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// The time from the start of the program to its stop.
    pub wall_ms: u64,
    /// CPU time.
    pub cpu_ms: Option<u64>,
    /// For how long the program may print nothing and use hardly any CPU.
    pub idle_ms: Option<u64>,
    /// The time between SIGTERM and SIGKILL when Fumehood stops the run.
    pub grace_ms: u64,
    /// Memory, with swap.
    pub memory_bytes: u64,
    /// Thousandths of a CPU.
    pub cpu_milli: u64,
    /// Processes, of which each thread is one.
    pub pids: u64,
    /// The limit of each process (RLIMIT_NOFILE).
    pub open_files: u64,
    /// The limit of all processes together: the run's share of the host's table of open files. `None` if the other
    /// limits already keep the run below this share.
    pub open_files_of_run: Option<u64>,
    /// Bytes in the buffers of all TCP sockets together: the run's share of the host's memory for TCP.
    pub tcp_bytes: u64,
    /// Bytes of all files in the workspace and /tmp.
    pub disk_bytes: u64,
    /// Files and directories in the workspace and /tmp.
    pub files: u64,
    /// How many bytes the caller keeps of each output stream.
    pub log_bytes: u64,
}

/// The name of a limit: the same word in the CLI, the record and the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitName {
    /// [`Limits::wall_ms`].
    WallTime,
    /// [`Limits::cpu_ms`].
    CpuTime,
    /// [`Limits::idle_ms`].
    IdleTime,
    /// [`Limits::memory_bytes`].
    Memory,
    /// [`Limits::cpu_milli`].
    Cpus,
    /// [`Limits::pids`].
    Pids,
    /// [`Limits::open_files`].
    OpenFiles,
    /// [`Limits::disk_bytes`].
    Disk,
    /// [`Limits::files`].
    Files,
    /// [`Limits::log_bytes`].
    Logs,
}

impl LimitName {
    /// Every limit, in the order in which they are listed.
    pub const ALL: [LimitName; 10] = [
        LimitName::WallTime,
        LimitName::CpuTime,
        LimitName::IdleTime,
        LimitName::Memory,
        LimitName::Cpus,
        LimitName::Pids,
        LimitName::OpenFiles,
        LimitName::Disk,
        LimitName::Files,
        LimitName::Logs,
    ];

    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            LimitName::WallTime => "wall_time",
            LimitName::CpuTime => "cpu_time",
            LimitName::IdleTime => "idle_time",
            LimitName::Memory => "memory",
            LimitName::Cpus => "cpus",
            LimitName::Pids => "pids",
            LimitName::OpenFiles => "open_files",
            LimitName::Disk => "disk",
            LimitName::Files => "files",
            LimitName::Logs => "logs",
        }
    }
}

/// How firmly a limit holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hardness {
    /// The kernel refuses or kills at the limit, or Fumehood itself enforces the limit: wall time by a deadline, logs
    /// by what the runner keeps.
    Hard,
    /// Init measures the use, up to ten times a second, and stops the run past the limit. The run can overshoot between
    /// two measurements.
    Watched,
}

/// One limit with the value in force and the mechanism that enforces it, for the record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforcement {
    /// Which limit.
    pub limit: LimitName,
    /// The value in force: the requested one or the default. In the limit's unit: milliseconds, bytes, thousandths of a
    /// CPU, or a count.
    pub asked: u64,
    /// The mechanism in words, such as `cgroup v1 memory.limit_in_bytes` or `RLIMIT_NOFILE`.
    pub enforced_by: String,
    /// How firmly it holds.
    pub how_hard: Hardness,
}

/// One layer of confinement. The launcher reports which layers are in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    /// A user namespace that owns nothing.
    UserNamespace,
    /// A mount namespace with a new root.
    MountNamespace,
    /// A pid namespace with an init of its own.
    PidNamespace,
    /// A network namespace with a loopback only.
    NetNamespace,
    /// An IPC namespace.
    IpcNamespace,
    /// A host name of its own.
    UtsNamespace,
    /// A cgroup namespace whose root is the run's group.
    CgroupNamespace,
    /// A uid that no other process of the host has.
    LeasedUid,
    /// No program gains privilege when it is executed.
    NoNewPrivs,
    /// No capability in any set.
    Capabilities,
    /// A Landlock domain.
    Landlock,
    /// The seccomp filter.
    Seccomp,
    /// Level `landlock` only: a process that the program cannot reach, and whose children all of the program's orphans
    /// become.
    Guardian,
    /// A control group for this run alone.
    Cgroup,
}

impl Layer {
    /// The layer's word in the record.
    pub fn as_str(self) -> &'static str {
        match self {
            Layer::UserNamespace => "user_namespace",
            Layer::MountNamespace => "mount_namespace",
            Layer::PidNamespace => "pid_namespace",
            Layer::NetNamespace => "net_namespace",
            Layer::IpcNamespace => "ipc_namespace",
            Layer::UtsNamespace => "uts_namespace",
            Layer::CgroupNamespace => "cgroup_namespace",
            Layer::LeasedUid => "leased_uid",
            Layer::NoNewPrivs => "no_new_privs",
            Layer::Capabilities => "capabilities",
            Layer::Landlock => "landlock",
            Layer::Seccomp => "seccomp",
            Layer::Guardian => "guardian",
            Layer::Cgroup => "cgroup",
        }
    }
}

/// The level of confinement of a run. Later variants are stronger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConfinementLevel {
    /// No namespaces: Landlock and seccomp confine a program that sees the host's own file tree, and a guardian process
    /// supervises it.
    Landlock,
    /// Namespaces and a private root file system, with Landlock and seccomp on top.
    Full,
}

impl ConfinementLevel {
    /// Whether the layer belongs to this level.
    pub fn has(self, layer: Layer) -> bool {
        match layer {
            Layer::UserNamespace
            | Layer::MountNamespace
            | Layer::PidNamespace
            | Layer::NetNamespace
            | Layer::IpcNamespace
            | Layer::UtsNamespace
            | Layer::CgroupNamespace => self == ConfinementLevel::Full,
            Layer::Guardian => self == ConfinementLevel::Landlock,
            Layer::LeasedUid
            | Layer::NoNewPrivs
            | Layer::Capabilities
            | Layer::Landlock
            | Layer::Seccomp
            | Layer::Cgroup => true,
        }
    }

    /// The level's word.
    pub fn as_str(self) -> &'static str {
        match self {
            ConfinementLevel::Landlock => "landlock",
            ConfinementLevel::Full => "full",
        }
    }
}

/// Which /dev/shm the program has. POSIX shared memory and semaphores are files there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SharedMemory {
    /// A private /dev/shm. At level `landlock`, which cannot mount one, the program has no /dev/shm.
    Private,
    /// The host's /dev/shm, including the files of other processes. Only at level `landlock`, and only on request.
    Host,
}

/// What a launch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchPurpose {
    /// Execute the program.
    Run,
    /// Build the sandbox and execute nothing, to find out whether this host supports the level.
    Probe,
}

/// The terminal of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Terminal {
    /// No terminal: standard output and error are pipes, standard input is a pipe or /dev/null.
    None,
    /// A pseudo-terminal made inside the sandbox. The runner gets its master side.
    Own {
        /// The number of rows at the start.
        rows: u16,
        /// The number of columns at the start.
        columns: u16,
    },
}

/// The description of one confined run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The file to execute.
    pub program: InsidePath,
    /// Its arguments, the name first.
    pub argv: Vec<Bytes>,
    /// Its whole environment.
    pub env: Vec<(Bytes, Bytes)>,
    /// The workspace. It has this path on the host and inside.
    pub workspace: HostPath,
    /// Where the files of the workspace are.
    pub workspace_kind: WorkspaceKind,
    /// What the program sees of the host beside the system runtime.
    pub views: Vec<ReadOnlyView>,
    /// As whom it runs.
    pub identity: ProgramIdentity,
    /// What it may use.
    pub limits: Limits,
    /// The host name that it sees.
    pub host_name: String,
    /// Whether it has a terminal.
    pub terminal: Terminal,
    /// The level of confinement.
    pub level: ConfinementLevel,
    /// Which /dev/shm it has.
    pub shared_memory: SharedMemory,
    /// Whether anything is executed.
    pub purpose: LaunchPurpose,
    /// The operator's floor: the launcher does not start the program unless all of these layers are in force.
    pub required: BTreeSet<Layer>,
    /// Layers that a test leaves off. No user input reaches this field.
    pub disabled_layers: DisabledLayers,
}

/// Why a [`Spec`] is invalid.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// There are no arguments, not even a name.
    #[error("the command is empty")]
    EmptyCommand,
    /// A string that the kernel could not take whole.
    #[error("{what} contains a NUL byte")]
    NulByte {
        /// Where it is.
        what: &'static str,
    },
    /// A path that depends on a working directory or leads upwards.
    #[error("{0:?} is not an absolute path without `..`")]
    NotAbsolute(PathBuf),
    /// A view at a path that building the new root needs.
    #[error("{0:?} inside the sandbox is reserved for Fumehood")]
    ReservedTarget(PathBuf),
    /// The program would be root on the host.
    #[error("host uid 0 may not run an analysis")]
    RootIdentity,
    /// A workspace in memory at level `landlock`.
    #[error("a workspace in memory needs a mount, which level landlock cannot make")]
    MemoryWithoutMounts,
    /// A view under another name at level `landlock`.
    #[error(
        "level landlock cannot show {shown:?} as {target:?}: it has no mounts, so a path is visible only where it is, or by a link in the workspace"
    )]
    NoOtherName {
        /// The path on the host.
        shown: PathBuf,
        /// The path inside.
        target: PathBuf,
    },
}

impl Spec {
    /// Checks what every later step relies on. Invariant: the launcher acts only on a checked spec; it repeats the
    /// check after it has read the plan.
    pub fn check(&self) -> Result<(), SpecError> {
        if self.argv.is_empty() {
            return Err(SpecError::EmptyCommand);
        }
        for arg in &self.argv {
            check_no_nul(arg, "an argument")?;
        }
        for (name, value) in &self.env {
            check_no_nul(name, "an environment name")?;
            check_no_nul(value, "an environment value")?;
        }
        for view in &self.views {
            let target = view.target.as_path();
            // `launch/mounts` assembles the new root in these directories.
            if ["/empty", "/stage"]
                .iter()
                .any(|reserved| target.starts_with(reserved))
            {
                return Err(SpecError::ReservedTarget(target.to_path_buf()));
            }
        }
        let paths = self
            .views
            .iter()
            .flat_map(|v| [v.source.as_path(), v.target.as_path()])
            .chain([self.program.as_path(), self.workspace.as_path()]);
        for path in paths {
            check_plain_absolute(path)?;
        }
        if self.identity.uid() == 0 || self.identity.gid() == 0 && self.is_leased() {
            return Err(SpecError::RootIdentity);
        }
        self.check_level()
    }

    /// Level `landlock` has no mounts, so it can show a host path only under that same path.
    fn check_level(&self) -> Result<(), SpecError> {
        if self.level == ConfinementLevel::Full || self.purpose == LaunchPurpose::Probe {
            return Ok(());
        }
        if self.workspace_kind == WorkspaceKind::Memory {
            return Err(SpecError::MemoryWithoutMounts);
        }
        match self
            .views
            .iter()
            .find(|view| view.source.as_path() != view.target.as_path())
        {
            None => Ok(()),
            Some(moved) => Err(SpecError::NoOtherName {
                shown: moved.source.to_path_buf(),
                target: moved.target.to_path_buf(),
            }),
        }
    }

    /// Whether the program has a leased uid.
    pub(crate) fn is_leased(&self) -> bool {
        matches!(self.identity, ProgramIdentity::Leased { .. })
    }

    /// The uid that only this run's processes have, if there is one. A probe leases no uid: as root it uses `nobody`,
    /// which services of the host may use too.
    pub fn own_uid(&self) -> Option<u32> {
        match (self.identity, self.purpose) {
            (ProgramIdentity::Leased { uid, .. }, LaunchPurpose::Run) => Some(uid),
            _ => None,
        }
    }

    /// Whether this run is to have the layer.
    pub fn has(&self, layer: Layer) -> bool {
        self.level.has(layer) && !self.disabled_layers.contains(layer)
    }
}

fn check_no_nul(bytes: &Bytes, what: &'static str) -> Result<(), SpecError> {
    match bytes.0.contains(&0) {
        true => Err(SpecError::NulByte { what }),
        false => Ok(()),
    }
}

fn check_plain_absolute(path: &Path) -> Result<(), SpecError> {
    use std::path::Component;
    let plain = path.is_absolute()
        && !path.as_os_str().as_bytes().contains(&0)
        && path
            .components()
            .all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    match plain {
        true => Ok(()),
        false => Err(SpecError::NotAbsolute(path.to_path_buf())),
    }
}
