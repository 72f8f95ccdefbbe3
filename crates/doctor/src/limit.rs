//! Who would enforce each limit: a group is made, limited and removed, and a directory put under quota, as a run would.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use sandbox::cgroup::{self, CgroupError, Group};
use sandbox::quota::{self, QuotaError};
use sandbox::spec::{ConfinementLevel, Enforcement, Hardness, LimitName, Limits, WorkspaceKind};

use super::host::{Container, Facts};
use super::storage::{self, Place};
use super::{Finding, Leased, Remedy, Severity, Subject};
use engine::plan::limits::{self, EnforcementContext, WorkspaceStorage, error_chain};

pub fn examine(
    subject: &Subject,
    facts: &Facts,
    level: Option<ConfinementLevel>,
    lease: Leased<'_>,
    findings: &mut Vec<Finding>,
) -> Vec<Enforcement> {
    let asked = &subject.limits;
    let limits = limits::resolve(asked);
    // What a run does first; the scope ends with this process.
    let _as_a_run_would = engine::attempt::systemd_scope::ensure_delegated();
    let host = cgroup::discover();
    let outer = cgroup::ancestor_limits();
    let group = Group::create(&host, "doctor", &limits::group_limits(&limits));
    let ground = EnforcementContext {
        level: level.unwrap_or(ConfinementLevel::Full),
        has_own_uid: matches!(lease, Some(Ok(_))),
        storage: storage_of(subject, &limits, lease, findings),
    };
    let told = group.as_ref().map_err(why_none);
    let enforced =
        |allow: &_| limits::enforcement(asked, &limits, told.clone(), &outer, ground, allow);
    let list = match enforced(&subject.allow_degraded) {
        Ok(list) => list,
        Err(refused) => {
            findings.push(Finding::new(
                "limits",
                Severity::Stops,
                error_chain(&refused),
            ));
            enforced(&LimitName::ALL.into_iter().collect()).unwrap_or_default()
        }
    };
    let soft = |limit: LimitName| {
        let entry = list.iter().find(|e| e.limit == limit);
        entry.is_some_and(|e| e.how_hard == Hardness::Watched)
    };
    findings.push(match (&told, soft(LimitName::Memory)) {
        (Ok(group), false) => Finding::fine("cgroup", held_by(group)),
        (Ok(group), true) => {
            let why = group.why_not(LimitName::Memory).map(|e| error_chain(e));
            no_group(&why.unwrap_or_default(), facts, subject)
        }
        (Err(why), _) => no_group(why, facts, subject),
    });
    drop(told);
    if let Ok(group) = group
        && let Err(e) = group.remove()
    {
        let text = format!("the group made to try it stays behind: {}", error_chain(&e));
        findings.push(Finding::new("cgroup_left", Severity::Warning, text));
    }
    list
}

/// What really happened, without the advice around it: that is given below, for this host.
fn why_none(error: &CgroupError) -> String {
    match error {
        CgroupError::Unavailable {
            refusal: Some(refusal),
        } => error_chain(refusal.as_ref()),
        other => error_chain(other),
    }
}

fn held_by(group: &Group) -> String {
    let by = [LimitName::Memory, LimitName::Pids, LimitName::Cpus]
        .into_iter()
        .filter_map(|limit| group.enforces(limit))
        .map(|e| e.by.as_str());
    format!(
        "a group made, limited and removed: {}",
        by.collect::<Vec<_>>().join(", ")
    )
}

/// Without a group: memory is watched, and a process that leaves its session is swept up, not counted.
fn no_group(why: &str, facts: &Facts, subject: &Subject) -> Finding {
    let text = format!("no cgroup for runs, so memory is watched and not enforced: {why}");
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let required = subject
        .required_layers
        .contains(&sandbox::spec::Layer::Cgroup);
    let severity = match required {
        true => Severity::Stops,
        false => Severity::Warning,
    };
    let remedy = match (facts.container, unified) {
        (Some(Container::Docker), true) => Remedy::new(
            "Give the container a cgroup tree that it may write (Docker 28 or later); or let the container's own \
             limits (--memory, --pids-limit) hold:",
            &["docker run --cgroupns private --security-opt writable-cgroups=true …"],
        )
        .untried(),
        (Some(_), _) => Remedy::new(
            "Let the container's own limits hold (memory and pids of the pod or container), or mount its cgroup \
             tree so that Fumehood may write it.",
            &[],
        )
        .untried(),
        (None, true) if facts.has_systemd => systemd(facts),
        (None, true) => Remedy::new(
            "Give this user a subtree and start the shell in it:",
            &[
                "G=/sys/fs/cgroup/fumehood-$(id -u); sudo mkdir -p $G/fumehood_runner-shell",
                "echo '+cpu +memory +pids' | sudo tee /sys/fs/cgroup/cgroup.subtree_control",
                "sudo chown -R $(id -u) $G; echo $$ | sudo tee $G/fumehood_runner-shell/cgroup.procs",
            ],
        )
        .untried(),
        (None, false) => version_1(facts),
    };
    Finding::new("cgroup", severity, text).with(remedy)
}

fn systemd(facts: &Facts) -> Remedy {
    match facts.is_root {
        true => Remedy::new(
            "Start Fumehood in a scope or service of its own that is delegated to it:",
            &["systemd-run --scope -p Delegate=yes fumehood run …"],
        ),
        false => Remedy::new(
            "Start Fumehood in a scope of your own, after letting your systemd hand on all controllers (once, as \
             root; log in again):",
            &[
                "sudo install -D -m 644 packaging/systemd/delegate.conf /etc/systemd/system/user@.service.d/delegate.conf",
                "sudo systemctl daemon-reload",
                "systemd-run --user --scope -p Delegate=yes fumehood run …",
            ],
        ),
    }
}

/// cgroup version 1: a directory that belongs to the user, in each hierarchy, with the shell in it.
fn version_1(facts: &Facts) -> Remedy {
    let host = cgroup::discover();
    let parents: Vec<PathBuf> = cgroup::planned_paths(&host, "doctor")
        .iter()
        .filter_map(|p| p.parent().map(Path::to_path_buf))
        .collect();
    if parents.is_empty() || facts.is_root {
        return Remedy::new(
            "Mount the memory, pids and cpu controllers below /sys/fs/cgroup, or start Fumehood where they are.",
            &[],
        );
    }
    let list = parents.iter().map(|p| p.display().to_string());
    let list = list.collect::<Vec<_>>().join(" ");
    Remedy::new(
        "Give this user a group in each hierarchy and put the shell into it:",
        &[
            &format!("for g in {list}; do"),
            &format!(
                "  g=$g/user-{uid}; sudo mkdir -p $g; sudo chown {uid} $g $g/tasks $g/cgroup.procs",
                uid = facts.uid
            ),
            "  echo $$ | sudo tee $g/tasks >/dev/null; done",
        ],
    )
}

/// Where a run's disk limits would be held.
fn storage_of(
    subject: &Subject,
    limits: &Limits,
    lease: Leased<'_>,
    findings: &mut Vec<Finding>,
) -> WorkspaceStorage {
    if subject.workspace_kind == WorkspaceKind::Memory {
        return WorkspaceStorage::Memory;
    }
    let root = &subject.workspace_root;
    let place = Place::of(root);
    let on_tmpfs = place.as_ref().is_some_and(Place::is_tmpfs);
    let storage = match on_tmpfs {
        true => WorkspaceStorage::DiskOnTmpfs,
        false => WorkspaceStorage::Disk,
    };
    let Some(Ok(lease)) = lease else {
        return storage;
    };
    match try_quota(root, lease.uid, limits) {
        Ok(()) => {
            let text = format!("{} holds a project to its quota", root.display());
            findings.push(Finding::fine("quota", text));
            WorkspaceStorage::Quota
        }
        Err(why) => {
            let text = format!(
                "disk limits are watched, not enforced: no project quota in {} ({why})",
                root.display()
            );
            let note = Finding::new("quota", Severity::Note, text);
            findings.push(match place.and_then(|p| storage::quota_remedy(&p)) {
                Some(remedy) => note.with(remedy),
                None => note,
            });
            storage
        }
    }
}

/// A directory like a new workspace, gone when dropped.
struct Trial {
    path: PathBuf,
    dir: OwnedFd,
}

impl Trial {
    fn new(root: &Path) -> Result<Trial, String> {
        let mut noise = [0u8; 8];
        let _zeros_collide_at_worst =
            rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty());
        let name = format!(".fumehood-doctor-{:016x}", u64::from_ne_bytes(noise));
        let path = root.join(name);
        let failed = |e: rustix::io::Errno| {
            let e = std::io::Error::from(e);
            format!("no workspace can be made in {}: {e}", root.display())
        };
        // Exclusive: what has the name already is nothing of ours.
        rustix::fs::mkdir(&path, Mode::RWXU).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(dir) => Ok(Trial { path, dir }),
            Err(e) => {
                let _still_empty = rustix::fs::rmdir(&path);
                Err(failed(e))
            }
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let _left_to_its_owner = rustix::fs::unlinkat(CWD, &self.path, AtFlags::REMOVEDIR);
    }
}

fn try_quota(root: &Path, uid: u32, limits: &Limits) -> Result<(), String> {
    let trial = Trial::new(root)?;
    let dir = trial.dir.as_fd();
    let project = quota::unused_project(dir, limits::quota_project_ids(uid)).map_err(no_quota)?;
    let held = quota::limit(dir, project, limits.disk_bytes, limits.files).map_err(no_quota)?;
    held.release()
        .map_err(|e| format!("lift the quota again: {e}"))
}

fn no_quota(error: QuotaError) -> String {
    match error {
        QuotaError::Unsupported { step, source } => format!("cannot {step}: {source}"),
        other => error_chain(&other),
    }
}

/// Whether a workspace could be made; what stands in the way otherwise.
pub fn try_workspace(root: &Path) -> Result<(), String> {
    Trial::new(root).map(drop)
}
