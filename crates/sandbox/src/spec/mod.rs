//! Plain data for one confined run, validated once, when it is made.
//!
//! A [`Spec`] crosses a process boundary: the runner writes it as JSON into a
//! sealed memory file and the launcher reads it back. Descriptors do not travel in it;
//! they go beside it over the control socket (see `plan.rs`).

mod disabled_layers;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use disabled_layers::DisabledLayers;

/// Bytes that are usually text: a path, an argument, an environment value. Text is kept as
/// text in JSON; anything else as a list of bytes, so that every name round-trips.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub Vec<u8>);

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
    pub fn as_os_str(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }
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
            pub fn new(path: impl AsRef<Path>) -> Self {
                $name(Bytes::from(path.as_ref()))
            }
            pub fn as_path(&self) -> &Path {
                Path::new(self.0.as_os_str())
            }
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
    pub source: HostPath,
    pub target: InsidePath,
    pub exec: Exec,
    /// Whether the source's owner is shown to the program as itself (an idmapped mount), so that
    /// files only their owner may read stay readable. Only root can do so; for a plain user the
    /// program has the caller's own file permissions already.
    pub owner: Owner,
    pub content: ViewContent,
}

/// What a view holds, and so whether a file in it that cannot be read stops the run before it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ViewContent {
    /// It does: a program that skips such a file would compute a wrong result from the others.
    Data,
    /// It does not: a runtime is large, and fails visibly when it cannot load a file.
    Runtime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exec {
    Allowed,
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    AsIs,
    Mapped,
}

/// Where the workspace's bytes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceKind {
    /// The directory on the host, held open by the runner.
    Disk,
    /// A tmpfs of the sandbox's own, sized by the disk and file limits.
    Memory,
}

/// The host identity the program runs under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramIdentity {
    /// The caller is root: an unprivileged uid and gid that nobody else on this host has.
    Leased { uid: u32, gid: u32 },
    /// The caller is a plain user: its own uid, in a user namespace.
    Caller { uid: u32, gid: u32 },
}

impl ProgramIdentity {
    pub fn uid(self) -> u32 {
        match self {
            ProgramIdentity::Leased { uid, .. } | ProgramIdentity::Caller { uid, .. } => uid,
        }
    }
    pub fn gid(self) -> u32 {
        match self {
            ProgramIdentity::Leased { gid, .. } | ProgramIdentity::Caller { gid, .. } => gid,
        }
    }
}

/// Every limit of a run. `None` only where the user may switch a limit off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub wall_ms: u64,
    pub cpu_ms: Option<u64>,
    pub idle_ms: Option<u64>,
    pub grace_ms: u64,
    pub memory_bytes: u64,
    /// Thousandths of a CPU.
    pub cpu_milli: u64,
    pub pids: u64,
    /// For each process.
    pub open_files: u64,
    /// Open files of all processes together: the run's share of the host's table. `None`: the run cannot pass it.
    pub open_files_of_run: Option<u64>,
    /// Buffers of all TCP sockets together: the run's share of what the host has for them.
    pub tcp_bytes: u64,
    pub disk_bytes: u64,
    pub files: u64,
    pub log_bytes: u64,
}

/// A limit's name, the same word in the CLI, the record and the documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitName {
    WallTime,
    CpuTime,
    IdleTime,
    Memory,
    Cpus,
    Pids,
    OpenFiles,
    Disk,
    Files,
    Logs,
}

impl LimitName {
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
    /// The kernel refuses or kills at the limit.
    Hard,
    /// A watch looks ten times a second and kills; what happens between two looks is the overshoot.
    Watched,
}

/// One limit as asked for and as it is enforced: what the record says about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforcement {
    pub limit: LimitName,
    /// In the limit's unit: milliseconds, bytes, thousandths of a CPU, or a count.
    pub asked: u64,
    /// The mechanism, in words: `cgroup v1 memory.limit_in_bytes`, `RLIMIT_NOFILE`, …
    pub enforced_by: String,
    pub how_hard: Hardness,
}

/// One layer of confinement. What is on is reported by the launcher, step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    UserNamespace,
    MountNamespace,
    PidNamespace,
    NetNamespace,
    IpcNamespace,
    UtsNamespace,
    CgroupNamespace,
    LeasedUid,
    NoNewPrivs,
    Capabilities,
    Landlock,
    Seccomp,
    /// Level `landlock`: a process out of the program's reach that all its orphans become children of.
    Guardian,
    /// A control group of the run's own.
    Cgroup,
}

impl Layer {
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

/// How much the host lets us build around a program (design, section 3); later ones are stronger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConfinementLevel {
    /// No namespaces: Landlock and seccomp around a program that sees the host's own tree, and a guardian beside it.
    Landlock,
    /// Namespaces and a root of its own, with Landlock and seccomp on top.
    Full,
}

impl ConfinementLevel {
    /// Whether the layer is one of this level's.
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

    pub fn as_str(self) -> &'static str {
        match self {
            ConfinementLevel::Landlock => "landlock",
            ConfinementLevel::Full => "full",
        }
    }
}

/// Which /dev/shm the program has: POSIX shared memory and semaphores live there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SharedMemory {
    /// One of its own; at level `landlock`, where there can be none, none.
    Private,
    /// At level `landlock`, and only if asked for: the host's, with whatever others keep there.
    Host,
}

/// What a launch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchPurpose {
    Run,
    /// Everything is built and nothing is executed: whether this host gives the level.
    Probe,
}

/// What the program is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Terminal {
    /// Pipes, or /dev/null for standard input.
    None,
    /// A pseudo-terminal of the sandbox's own, its other end handed to the runner.
    Own { rows: u16, columns: u16 },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The file to execute, as the program's own view names it.
    pub program: InsidePath,
    pub argv: Vec<Bytes>,
    pub env: Vec<(Bytes, Bytes)>,
    pub workspace: HostPath,
    pub workspace_kind: WorkspaceKind,
    pub views: Vec<ReadOnlyView>,
    pub identity: ProgramIdentity,
    pub limits: Limits,
    pub host_name: String,
    pub terminal: Terminal,
    pub level: ConfinementLevel,
    pub shared_memory: SharedMemory,
    pub purpose: LaunchPurpose,
    /// The launcher stops, before anything runs, unless every one of these is in force.
    pub required: BTreeSet<Layer>,
    /// Layers that a test leaves off. No user input reaches this.
    pub disabled_layers: DisabledLayers,
}

#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    #[error("the command is empty")]
    EmptyCommand,
    #[error("{what} contains a NUL byte")]
    NulByte { what: &'static str },
    #[error("{0:?} is not an absolute path without `..`")]
    NotAbsolute(PathBuf),
    #[error("{0:?} inside is a place of Fumehood's own")]
    ReservedTarget(PathBuf),
    #[error("host uid 0 may not run an analysis")]
    RootIdentity,
    #[error("a workspace in memory needs a mount of its own, which level landlock has not")]
    MemoryWithoutMounts,
    #[error(
        "level landlock cannot show {shown:?} as {target:?}: without mounts a path is seen where it is, or by a link in the workspace"
    )]
    NoOtherName { shown: PathBuf, target: PathBuf },
}

impl Spec {
    /// Checks what every later step relies on. Invariant: a launcher only ever sees a checked spec.
    pub fn check(&self) -> Result<(), SpecError> {
        if self.argv.is_empty() {
            return Err(SpecError::EmptyCommand);
        }
        for arg in &self.argv {
            no_nul(arg, "an argument")?;
        }
        for (name, value) in &self.env {
            no_nul(name, "an environment name")?;
            no_nul(value, "an environment value")?;
        }
        for view in &self.views {
            let target = view.target.as_path();
            // Where the new root is put together (launch/mounts).
            if ["/empty", "/stage"]
                .iter()
                .any(|own| target.starts_with(own))
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
            plain_absolute(path)?;
        }
        if self.identity.uid() == 0 || self.identity.gid() == 0 && self.is_leased() {
            return Err(SpecError::RootIdentity);
        }
        self.check_level()
    }

    /// Without mounts nothing can be moved: what is shown is seen under its own path.
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

    pub fn is_leased(&self) -> bool {
        matches!(self.identity, ProgramIdentity::Leased { .. })
    }

    /// The uid that no process outside the run has. A probe leases none: the uid `nobody`, which it takes as root, is also
    /// that of services of the host.
    pub fn own_uid(&self) -> Option<u32> {
        match (self.identity, self.purpose) {
            (ProgramIdentity::Leased { uid, .. }, LaunchPurpose::Run) => Some(uid),
            _ => None,
        }
    }

    pub fn has(&self, layer: Layer) -> bool {
        self.level.has(layer) && !self.disabled_layers.contains(layer)
    }
}

fn no_nul(bytes: &Bytes, what: &'static str) -> Result<(), SpecError> {
    match bytes.0.contains(&0) {
        true => Err(SpecError::NulByte { what }),
        false => Ok(()),
    }
}

fn plain_absolute(path: &Path) -> Result<(), SpecError> {
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
