//! The file systems of workspaces, record and outputs: their kind, and how much room they have.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatVfsMountFlags, StatxFlags};
use sandbox::spec::WorkspaceKind;

use super::host_facts::{MountEntry, MountTable, read_text};
use super::temporary_workspace;
use super::{Finding, Remedy, Subject};
use engine::plan::limits;
use store::artifacts::{ArtifactError, refuse_network_fs};
use store::types::units::format_size;

const TMPFS_MAGIC: u32 = 0x0102_1994;

/// A path, or its nearest ancestor that exists, and the file system there.
pub struct Filesystem {
    pub path: PathBuf,
    pub mount: Option<MountEntry>,
    mount_id: Option<u64>,
    magic: u32,
    free_bytes: u64,
    total_bytes: u64,
    free_files: Option<u64>,
    noexec: bool,
}

impl Filesystem {
    pub fn at(path: &Path) -> Option<Filesystem> {
        let path = path.ancestors().find(|p| p.exists())?;
        let space = rustix::fs::statvfs(path).ok()?;
        let kind = rustix::fs::statfs(path).ok()?;
        let id = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID)
            .ok()
            // Kernels before 5.8 do not report a mount id.
            .filter(|s| s.stx_mask & StatxFlags::MNT_ID.bits() != 0)
            .map(|s| s.stx_mnt_id);
        Some(Filesystem {
            path: path.to_path_buf(),
            mount: id.and_then(|id| MountTable::read().with_id(id).cloned()),
            mount_id: id,
            magic: kind.f_type as u32,
            free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
            total_bytes: space.f_blocks.saturating_mul(space.f_frsize),
            // Btrfs and others do not count inodes.
            free_files: (space.f_files > 0).then_some(space.f_favail),
            noexec: space.f_flag.contains(StatVfsMountFlags::NOEXEC),
        })
    }

    pub fn is_tmpfs(&self) -> bool {
        self.magic == TMPFS_MAGIC
    }

    fn kind(&self) -> &str {
        self.mount.as_ref().map_or("unknown", |m| m.kind.as_str())
    }
}

pub fn examine(subject: &Subject) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.push(check_home(&subject.home));
    let network = [
        ("FUMEHOOD_HOME", Some(&subject.home)),
        ("the database", subject.database.as_ref()),
        ("the artifact store", subject.artifacts.as_ref()),
    ];
    for (what, path) in network {
        findings.extend(path.and_then(|path| check_network_filesystem(what, path)));
    }
    let kept = subject
        .artifacts
        .as_ref()
        .and_then(|path| Filesystem::at(path));
    if let Some(kept) = &kept {
        findings.push(check_reserve(kept, subject.free_reserve_bytes));
    }
    if subject.workspace_kind == WorkspaceKind::Disk {
        findings.extend(check_workspaces(subject, kept.as_ref()));
    }
    findings
}

/// Checks FUMEHOOD_HOME as a run does when it opens it, but does not create it.
fn check_home(path: &Path) -> Finding {
    let shown = path.display();
    let text = match std::fs::metadata(path) {
        Ok(meta) => {
            let ours = meta.uid() == rustix::process::geteuid().as_raw();
            if ours && meta.mode() & 0o022 == 0 && meta.is_dir() {
                return Finding::fine("home", format!("Fumehood keeps its files in {shown}"));
            }
            format!("{shown} belongs to another user, can be written by others or is no directory")
        }
        Err(_) => {
            let write = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
            let above = path.ancestors().find(|p| p.exists());
            if above.is_some_and(|p| rustix::fs::access(p, write).is_ok()) {
                return Finding::fine("home", format!("{shown} will be made by the first run"));
            }
            format!("{shown} is not there and cannot be made by this user")
        }
    };
    Finding::stops("home", text).remedy(
        "Use a directory of your own:",
        &["export FUMEHOOD_HOME=$HOME/.local/share/fumehood"],
    )
}

/// Reports a network file system. Locks and fsync may have no effect there, so a run refuses it.
fn check_network_filesystem(what: &str, path: &Path) -> Option<Finding> {
    let Err(ArtifactError::NetworkFs { kind, .. }) = refuse_network_fs(path) else {
        return None;
    };
    let text = format!("{what} would be at {} on {kind}", path.display());
    Some(Finding::stops("network_file_system", text).remedy(
        "Keep it on a disk of this machine, or use PostgreSQL for what several machines share:",
        &["export FUMEHOOD_HOME=/var/tmp/fumehood-$(id -u)"],
    ))
}

fn check_reserve(kept: &Filesystem, least: u64) -> Finding {
    let free = format_size(kept.free_bytes);
    let shown = kept.path.display();
    if kept.free_bytes >= least {
        return Finding::fine("free_space", format!("{free} are free in {shown}"));
    }
    let reserve = format_size(least);
    Finding::stops(
        "free_space",
        format!(
            "{free} are free where results are kept ({shown}), less than the reserve of {reserve}"
        ),
    )
    .remedy(
        "Make room, for instance of old analyses:",
        &["fumehood gc --older-than 90d"],
    )
}

fn check_workspaces(subject: &Subject, kept: Option<&Filesystem>) -> Vec<Finding> {
    let root = &subject.workspace_root;
    let shown = root.display();
    let elsewhere = |what: &str| {
        Remedy::new(
            format!("{what} (in ~/.config/fumehood/config.toml, or as --workspace-root):"),
            &["workspace_root = \"/var/tmp\""],
        )
    };
    if let Err(why) = temporary_workspace::try_workspace(root) {
        let remedy = elsewhere("Choose a directory that this user may write");
        return vec![Finding::stops("workspace_root", why).with(remedy)];
    }
    let Some(place) = Filesystem::at(root) else {
        return Vec::new();
    };
    let mut findings = vec![Finding::fine(
        "workspace_root",
        format!("workspaces are made in {shown} ({})", place.kind()),
    )];
    if let Err(ArtifactError::NetworkFs { kind, .. }) = refuse_network_fs(root) {
        let text =
            format!("workspaces are made in {shown} on {kind}: slow, and its locks may not hold");
        let remedy = elsewhere("Choose a disk of this machine");
        findings.push(Finding::warning("workspace_network", text).with(remedy));
    }
    if place.is_tmpfs() {
        let text = format!(
            "{shown} is a tmpfs: what analyses write there is memory, and what a crash of the machine leaves there \
             is lost"
        );
        let remedy = elsewhere("Choose a directory on a disk");
        findings.push(Finding::warning("workspace_tmpfs", text).with(remedy));
    }
    if place.noexec {
        let text = format!(
            "{shown} is mounted noexec: programs that analyses compile or copy there cannot run"
        );
        let remedy = match &place.mount {
            Some(mount) => Remedy::new(
                "Mount it without (and in /etc/fstab), or choose another directory:",
                &[&format!(
                    "sudo mount -o remount,exec {}",
                    mount.point.display()
                )],
            ),
            None => elsewhere("Choose another directory"),
        };
        findings.push(Finding::warning("workspace_noexec", text).with(remedy));
    }
    findings.push(check_room(subject, &place).unwrap_or_else(|| {
        let free = format_size(place.free_bytes);
        Finding::fine("workspace_room", format!("{free} are free in {shown}"))
    }));
    findings.extend(kept.and_then(|kept| check_same_mount(root, &place, kept)));
    findings.extend(check_tmpfiles(root));
    findings
}

/// Checks whether one run has room to use its whole disk limit.
fn check_room(subject: &Subject, place: &Filesystem) -> Option<Finding> {
    let limits = limits::resolve(&subject.limits);
    let shown = subject.workspace_root.display();
    let text = match place.free_files {
        _ if place.free_bytes < limits.disk_bytes => format!(
            "{} of {} are free in {shown}, less than the {} that one analysis may use (--disk)",
            format_size(place.free_bytes),
            format_size(place.total_bytes),
            format_size(limits.disk_bytes)
        ),
        Some(files) if files < limits.files => format!(
            "{files} more files fit in {shown}, fewer than the {} that one analysis may make (--files)",
            limits.files
        ),
        _ => return None,
    };
    Some(Finding::warning("workspace_room", text).remedy(
        "Make room, choose another directory (--workspace-root), or give analyses less:",
        &["disk = \"1G\"    # in ~/.config/fumehood/config.toml"],
    ))
}

/// Reports that outputs have to be copied: a hard link does not cross mounts, not even two mounts of one file system.
fn check_same_mount(root: &Path, place: &Filesystem, kept: &Filesystem) -> Option<Finding> {
    if place.mount_id.is_none() || place.mount_id == kept.mount_id {
        return None;
    }
    let text = format!(
        "workspaces ({}) and the artifact store ({}) are on different file systems: every output is copied instead of \
         linked",
        root.display(),
        kept.path.display()
    );
    let beside = kept.path.join("work").display().to_string();
    Some(Finding::note("apart", text).remedy(
        "If outputs are large, make workspaces beside the store (in ~/.config/fumehood/config.toml):",
        &[
            &format!("mkdir -m 700 {beside}"),
            &format!("workspace_root = {beside:?}"),
        ],
    ))
}

/// Returns how to make or mount the file system so that project quota works.
pub fn quota_remedy(place: &Filesystem) -> Option<Remedy> {
    let mount = place.mount.as_ref()?;
    let (point, source) = (mount.point.display(), &mount.source);
    let remount = format!("mount -o prjquota {source} {point}");
    Some(match mount.kind.as_str() {
        "ext4" => Remedy::new(
            "The watch is enough for most. For a hard limit give the file system project quota, while it is \
             unmounted (for / from a rescue system), and mount it with prjquota:",
            &[
                &format!("tune2fs -O project,quota -Q prjquota {source}"),
                &remount,
            ],
        ),
        "xfs" => Remedy::new(
            "The watch is enough for most. For a hard limit mount it with project quota (for /, rootflags=prjquota \
             on the kernel command line); a remount does not do:",
            &[&remount],
        ),
        _ => Remedy::new(
            "The watch is enough for most. For a hard limit put workspaces on ext4 or XFS mounted with prjquota, or \
             in memory (--workspace memory).",
            &[],
        ),
    })
}

/// Reports that systemd-tmpfiles empties the directory at boot or removes old files from it. Applies only where systemd
/// runs.
fn check_tmpfiles(root: &Path) -> Option<Finding> {
    if !Path::new("/run/systemd/system").is_dir() {
        return None;
    }
    let rules = tmpfiles_rules();
    let sweep = TmpfilesCleanup::find(root, rules.iter().map(String::as_str))?;
    let shown = root.display();
    let text = match &sweep {
        TmpfilesCleanup::AtBoot => format!(
            "{shown} is emptied when the machine starts (tmpfiles.d): kept workspaces go with it"
        ),
        TmpfilesCleanup::Older(age) => format!(
            "systemd-tmpfiles removes what is older than {age} from {shown}, of kept workspaces too"
        ),
    };
    Some(Finding::note("workspace_swept", text).remedy(
        "Leave workspaces to Fumehood:",
        &[&format!(
            "echo 'x {shown}/scidex-analysis-*' | sudo tee /etc/tmpfiles.d/fumehood.conf"
        )],
    ))
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TmpfilesCleanup {
    AtBoot,
    Older(String),
}

impl TmpfilesCleanup {
    /// Returns what the rules of tmpfiles.d(5) do to the content of a directory.
    fn find<'a>(root: &Path, rules: impl Iterator<Item = &'a str>) -> Option<TmpfilesCleanup> {
        let mut found = None;
        for rule in rules {
            let fields: Vec<&str> = rule.split_ascii_whitespace().collect();
            let [kind, path, ..] = fields[..] else {
                continue;
            };
            let spared = Path::new(path).parent().is_some_and(|p| p == root)
                && path.ends_with("/scidex-analysis-*");
            if spared && kind.starts_with(['x', 'X']) {
                return None;
            }
            if Path::new(path) != root {
                continue;
            }
            let age = fields.get(5).filter(|age| **age != "-");
            match (kind.chars().next(), age) {
                (Some('D'), _) => found = Some(TmpfilesCleanup::AtBoot),
                (Some('d' | 'q' | 'Q' | 'e' | 'v'), Some(age)) => {
                    found = found.or_else(|| Some(TmpfilesCleanup::Older((*age).to_owned())));
                }
                _ => {}
            }
        }
        found
    }
}

/// Returns the lines of every file in force. Of two files with one name, the one in the earlier directory counts.
fn tmpfiles_rules() -> Vec<String> {
    let mut seen = std::collections::BTreeSet::new();
    let mut rules = Vec::new();
    for dir in [
        "/etc/tmpfiles.d",
        "/run/tmpfiles.d",
        "/usr/local/lib/tmpfiles.d",
        "/usr/lib/tmpfiles.d",
    ] {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.as_encoded_bytes().ends_with(b".conf") && seen.insert(name) {
                let content = read_text(&entry.path().to_string_lossy());
                rules.extend(content.lines().map(str::to_owned));
            }
        }
    }
    rules
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_rules_of_tmpfiles_are_understood() {
        let of = |rules: &[&str]| TmpfilesCleanup::find(Path::new("/tmp"), rules.iter().copied());
        let debian = ["# a comment", "D /tmp 1777 root root -"];
        assert_eq!(of(&debian), Some(TmpfilesCleanup::AtBoot));
        let fedora = ["q /tmp 1777 root root 10d", "q /var/tmp 1777 root root 30d"];
        assert_eq!(
            of(&fedora),
            Some(TmpfilesCleanup::Older(String::from("10d")))
        );
        assert_eq!(of(&["d /tmp 1777 root root -"]), None);
        let spared = ["q /tmp 1777 root root 10d", "x /tmp/scidex-analysis-*"];
        assert_eq!(of(&spared), None);
        assert_eq!(
            of(&["x /tmp/systemd-private-*", fedora[0]]),
            Some(TmpfilesCleanup::Older(String::from("10d")))
        );
    }

    #[test]
    fn a_place_that_is_not_there_is_looked_at_from_above() {
        let dir = tempfile::tempdir().unwrap();
        let place = Filesystem::at(&dir.path().join("a/b/c")).unwrap();
        assert_eq!(place.path, dir.path());
        assert!(place.total_bytes > 0);
    }
}
