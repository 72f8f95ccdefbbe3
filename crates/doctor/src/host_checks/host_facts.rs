//! Facts about this host, each read from the file that is named beside it. A file that cannot be read is not an error:
//! its fact stays unknown.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// The capabilities that root's runs need, with their numbers in linux/capability.h. Without any one of these, runs
/// fail in the tests.
pub const CAPABILITIES: [(u32, &str); 7] = [
    // To give the workspace to the leased uid, and to keep access to it.
    (0, "CHOWN"),
    (1, "DAC_OVERRIDE"),
    // To become the leased uid and drop everything else.
    (6, "SETGID"),
    (7, "SETUID"),
    (8, "SETPCAP"),
    // To bring up the sandbox's own loopback.
    (12, "NET_ADMIN"),
    // For namespaces and mounts.
    (21, "SYS_ADMIN"),
];

/// The container runtime that this process runs under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Container {
    Kubernetes,
    Docker,
    Podman,
    Lxc,
    Nspawn,
    Other,
}

/// What files of this host say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostFacts {
    /// The release that `uname` reports.
    pub kernel: String,
    /// The machine that `uname` reports.
    pub machine: String,
    /// The effective uid.
    pub uid: u32,
    /// Whether the effective uid is 0.
    pub is_root: bool,
    /// The container runtime that this process runs under, if any.
    pub container: Option<Container>,
    /// The file or variable that names the container runtime.
    pub container_because: Option<String>,
    /// Whether this process started under a seccomp filter: `Seccomp: 2` in /proc/self/status.
    pub is_filtered: bool,
    /// The AppArmor profile of this process; `None` where there is no AppArmor.
    pub apparmor_profile: Option<String>,
    /// Whether SELinux enforces its policy (/sys/fs/selinux/enforce).
    pub selinux_enforcing: bool,
    /// Mount points below /proc, which cover parts of it.
    pub masked_proc: Vec<PathBuf>,
    /// Whether /proc/self/uid_map maps fewer uids than there are.
    pub in_user_namespace: bool,
    /// Whether no file system is mounted on / as this process sees it.
    pub in_chroot: bool,
    /// Whether systemd is the host's init (/run/systemd/system).
    pub has_systemd: bool,
    /// If this is root: the capabilities that a sandbox needs and this process lacks.
    pub lacks_capabilities: Vec<&'static str>,
    /// The security modules that this kernel started with, if a readable file says so.
    pub security_modules: Option<String>,
    /// Settings that forbid namespaces.
    pub sysctls: Sysctls,
}

/// Settings that forbid namespaces: the file below /proc/sys, and the name in documents.
const SYSCTLS: [(&str, &str); 10] = [
    ("kernel", "apparmor_restrict_unprivileged_userns"),
    ("kernel", "unprivileged_userns_clone"),
    ("user", "max_user_namespaces"),
    ("user", "max_mnt_namespaces"),
    ("user", "max_pid_namespaces"),
    ("user", "max_net_namespaces"),
    ("user", "max_ipc_namespaces"),
    ("user", "max_uts_namespaces"),
    ("user", "max_cgroup_namespaces"),
    ("kernel", "yama_ptrace_scope"),
];

/// The values of [`SYSCTLS`], by name. `None`: this kernel does not have the setting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sysctls(Vec<(&'static str, Option<u64>)>);

impl Serialize for Sysctls {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}

impl HostFacts {
    /// Reads every fact.
    pub fn read() -> HostFacts {
        let name = rustix::system::uname();
        let status = read_text("/proc/self/status");
        let mounts = MountTable::read();
        let is_root = rustix::process::geteuid().is_root();
        let effective = field(&status, "CapEff:").and_then(|t| u64::from_str_radix(t, 16).ok());
        let is_filtered = field(&status, "Seccomp:") == Some("2");
        let masked_proc = mounts.below("/proc");
        // A container's marker file may also be left over in an image that a virtual machine was made from. Require a
        // second sign.
        let shut_in = !is_first_pid_namespace() || is_filtered || !masked_proc.is_empty();
        let (container, container_because) = container().filter(|_| shut_in).unzip();
        HostFacts {
            kernel: name.release().to_string_lossy().into_owned(),
            machine: name.machine().to_string_lossy().into_owned(),
            uid: rustix::process::geteuid().as_raw(),
            is_root,
            container,
            container_because,
            is_filtered,
            apparmor_profile: apparmor_profile(),
            selinux_enforcing: read_text("/sys/fs/selinux/enforce").trim() == "1",
            masked_proc,
            in_user_namespace: !is_whole_map(&read_text("/proc/self/uid_map")),
            in_chroot: mounts.at("/").is_none(),
            has_systemd: Path::new("/run/systemd/system").is_dir(),
            lacks_capabilities: match (is_root, effective) {
                (true, Some(set)) => lacking(set),
                _ => Vec::new(),
            },
            security_modules: security_modules(),
            sysctls: Sysctls::read(),
        }
    }
}

impl Sysctls {
    fn read() -> Sysctls {
        let value = |dir: &str, name: &str| {
            // Yama has a directory of its own.
            let file = name.replace("yama_", "yama/");
            let text = read_text(&format!("/proc/sys/{dir}/{file}"));
            text.trim().parse().ok()
        };
        Sysctls(SYSCTLS.map(|(dir, name)| (name, value(dir, name))).to_vec())
    }

    /// Returns the value of a setting, if this kernel has it.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.0.iter().find(|(n, _)| *n == name)?.1
    }

    #[cfg(test)]
    pub fn with(name: &'static str, value: u64) -> Sysctls {
        Sysctls(vec![(name, Some(value))])
    }
}

/// Reads a small file as text. Returns an empty string if the file cannot be read.
pub fn read_text(path: &str) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .map(str::trim)
}

fn lacking(effective: u64) -> Vec<&'static str> {
    let missing = CAPABILITIES
        .iter()
        .filter(|(number, _)| effective >> number & 1 == 0);
    missing.map(|(_, name)| *name).collect()
}

/// The initial user namespace maps every uid to itself.
fn is_whole_map(map: &str) -> bool {
    let mut numbers = map.split_ascii_whitespace();
    [numbers.next(), numbers.next(), numbers.next()] == [Some("0"), Some("0"), Some("4294967295")]
}

fn apparmor_profile() -> Option<String> {
    // AppArmor alone writes the newer file. The older one is shared with other security modules.
    let enabled = read_text("/sys/module/apparmor/parameters/enabled");
    let own = read_text("/proc/self/attr/apparmor/current");
    let named = match (own.is_empty(), enabled.trim()) {
        (false, _) => own,
        (true, "Y") => read_text("/proc/self/attr/current"),
        (true, _) => return None,
    };
    let named = named.trim_end_matches(['\0', '\n']);
    (!named.is_empty()).then(|| named.to_owned())
}

fn security_modules() -> Option<String> {
    let list = read_text("/sys/kernel/security/lsm");
    let list = list.trim();
    if !list.is_empty() {
        return Some(list.to_owned());
    }
    let line = read_text("/proc/cmdline");
    let mut words = line.split_ascii_whitespace().rev();
    words.find_map(|word| word.strip_prefix("lsm=").map(str::to_owned))
}

/// The kernel gives the initial pid namespace this inode number (PROC_PID_INIT_INO), and no other.
fn is_first_pid_namespace() -> bool {
    fs::read_link("/proc/self/ns/pid").is_ok_and(|l| l == Path::new("pid:[4026531836]"))
}

/// Returns the container runtime of this process, and the file or variable that names it.
fn container() -> Option<(Container, String)> {
    let exists = |path: &str| Path::new(path).exists();
    let said = |kind, because: &str| Some((kind, because.to_owned()));
    if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
        || exists("/var/run/secrets/kubernetes.io")
    {
        return said(
            Container::Kubernetes,
            "KUBERNETES_SERVICE_HOST or /var/run/secrets/kubernetes.io",
        );
    }
    let markers = [
        ("/run/.containerenv", Container::Podman),
        ("/.dockerenv", Container::Docker),
    ];
    if let Some((marker, kind)) = markers.into_iter().find(|(marker, _)| exists(marker)) {
        return said(kind, marker);
    }
    if let Some(kind) = container_of_groups(&read_text("/proc/1/cgroup")) {
        return said(kind, "/proc/1/cgroup");
    }
    match read_text("/run/systemd/container").trim() {
        "" => None,
        name => said(
            container_of_name(name),
            &format!("/run/systemd/container says {name}"),
        ),
    }
}

fn container_of_name(name: &str) -> Container {
    match name {
        "docker" => Container::Docker,
        "podman" => Container::Podman,
        "lxc" | "lxc-libvirt" => Container::Lxc,
        "systemd-nspawn" => Container::Nspawn,
        _ => Container::Other,
    }
}

fn container_of_groups(groups: &str) -> Option<Container> {
    let words = [
        ("kubepods", Container::Kubernetes),
        ("libpod", Container::Podman),
        ("docker", Container::Docker),
        ("/lxc", Container::Lxc),
        ("containerd", Container::Other),
    ];
    // Look at the path of the group, not at the controllers before it. The host's own docker.service is not a
    // container.
    let paths = groups.lines().filter_map(|l| l.splitn(3, ':').nth(2));
    let inside = |word: &str| {
        let mut paths = paths.clone();
        paths.any(|p| p.contains(word) && !p.ends_with(".service"))
    };
    let found = words.into_iter().find(|(word, _)| inside(word));
    found.map(|(_, kind)| kind)
}

/// One line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    pub id: u64,
    pub point: PathBuf,
    pub options: String,
    pub kind: String,
    pub source: String,
}

/// All mounts that this process sees.
#[derive(Clone, Debug, Default)]
pub struct MountTable(Vec<MountEntry>);

impl MountTable {
    pub fn read() -> MountTable {
        MountTable::parse(&read_text("/proc/self/mountinfo"))
    }

    fn parse(mountinfo: &str) -> MountTable {
        let parse = |line: &str| {
            let (before, after) = line.split_once(" - ")?;
            let mut fields = before.split(' ');
            let id = fields.next()?.parse().ok()?;
            let point = unescape(fields.nth(3)?);
            let options = fields.next()?.to_owned();
            let mut fields = after.split(' ');
            Some(MountEntry {
                id,
                point: point.into(),
                options,
                kind: fields.next()?.to_owned(),
                source: unescape(fields.next()?),
            })
        };
        MountTable(mountinfo.lines().filter_map(parse).collect())
    }

    fn at(&self, point: &str) -> Option<&MountEntry> {
        self.0.iter().find(|m| m.point == Path::new(point))
    }

    /// Returns the mount points strictly below a path.
    fn below(&self, path: &str) -> Vec<PathBuf> {
        let points = self.0.iter().map(|m| &m.point);
        let mut below: Vec<PathBuf> = points
            .filter(|p| p.starts_with(path) && *p != Path::new(path))
            // The kernel mounts it on first access; it covers nothing.
            .filter(|p| *p != Path::new("/proc/sys/fs/binfmt_misc"))
            .cloned()
            .collect();
        below.dedup();
        below
    }

    pub fn with_id(&self, id: u64) -> Option<&MountEntry> {
        self.0.iter().find(|m| m.id == id)
    }
}

/// Decodes the octal escapes of mountinfo: the kernel writes a space, a tab, a new line and a backslash as a backslash
/// and three digits.
fn unescape(field: &str) -> String {
    let escapes = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ];
    let decode = |text: String, (from, to)| text.replace(from, to);
    escapes.into_iter().fold(field.to_owned(), decode)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_told_by_the_groups_of_the_first_process() {
        for (groups, kind) in [
            ("0::/", None),
            ("0::/init.scope", None),
            ("0::/system.slice/docker.service", None),
            ("1:name=systemd:/docker/4f1c", Some(Container::Docker)),
            (
                "0::/kubepods.slice/kubepods-pod1.slice/x",
                Some(Container::Kubernetes),
            ),
            (
                "0::/machine.slice/libpod-12.scope/container",
                Some(Container::Podman),
            ),
        ] {
            assert_eq!(container_of_groups(groups), kind, "{groups}");
        }
    }

    #[test]
    fn mounts_are_read_with_odd_names() {
        let text = "25 1 0:23 / / rw,relatime - ext4 /dev/vda rw\n\
            30 25 0:5 / /proc rw - proc proc rw\n\
            31 30 0:5 /sys /proc/sys ro,nosuid - proc proc rw\n\
            32 30 0:9 / /proc/sys/fs/binfmt_misc rw - binfmt_misc none rw\n\
            40 25 0:30 / /a\\040b rw,noexec shared:3 - tmpfs a\\134b rw\n";
        let mounts = MountTable::parse(text);
        assert_eq!(mounts.below("/proc"), [PathBuf::from("/proc/sys")]);
        assert!(mounts.at("/").is_some());
        let odd = mounts.with_id(40).unwrap();
        assert_eq!(odd.point, Path::new("/a b"));
        assert_eq!(
            (odd.options.as_str(), odd.source.as_str()),
            ("rw,noexec", "a\\b")
        );
    }

    #[test]
    fn the_first_user_namespace_is_known_by_its_map() {
        assert!(is_whole_map("         0          0 4294967295\n"));
        assert!(!is_whole_map("         0     100000      65536\n"));
        assert!(!is_whole_map("      1000       1000          1\n"));
    }

    #[test]
    fn missing_capabilities_of_root_are_named() {
        assert_eq!(lacking(u64::MAX), Vec::<&str>::new());
        // The capabilities that Docker leaves to root by default.
        let docker = 0xa804_25fb;
        assert_eq!(lacking(docker), ["NET_ADMIN", "SYS_ADMIN"]);
    }
}
