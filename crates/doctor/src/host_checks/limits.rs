//! Who would enforce each limit. Makes, limits and removes a cgroup, and puts a directory under quota, as a run would.

use std::path::{Path, PathBuf};

use sandbox::cgroup::{self, CgroupError, Group, OwnProcess};
use sandbox::quota::{self, QuotaError};
use sandbox::spec::{
    ConfinementLevel, Enforcement, Hardness, Layer, LimitName, Limits, WorkspaceKind,
};

use super::host_facts::{Container, HostFacts};
use super::storage::{self, Filesystem};
use super::temporary_workspace::TemporaryWorkspace;
use super::{Finding, LeaseResult, Remedy, Severity, Subject, join_paths};
use engine::plan::limits::{self, EnforcementContext, WorkspaceStorage, error_chain};

pub fn examine(
    subject: &Subject,
    facts: &HostFacts,
    level: Option<ConfinementLevel>,
    lease: LeaseResult<'_>,
    findings: &mut Vec<Finding>,
) -> Vec<Enforcement> {
    let asked = &subject.limits;
    let limits = limits::resolve(asked);
    // Join a systemd scope first, as a run does. The scope ends with this process. If there is no systemd, the
    // examination goes on without a scope and finds what a run would find.
    let _ = engine::attempt::systemd_scope::ensure_delegated();
    let host = cgroup::discover(OwnProcess::MayMove);
    let outer = cgroup::ancestor_limits();
    let group = Group::create(&host, "doctor", &limits::group_limits(&limits));
    let ground = EnforcementContext {
        level: level.unwrap_or(ConfinementLevel::Full),
        has_own_uid: matches!(lease, Some(Ok(_))),
        storage: check_storage(subject, &limits, lease, findings),
    };
    let usable_group = group.as_ref().map_err(cgroup_failure);
    let enforced = |allow: &_| {
        limits::enforcement(asked, &limits, usable_group.clone(), &outer, ground, allow)
    };
    let list = match enforced(&subject.allow_degraded) {
        Ok(list) => list,
        Err(refused) => {
            findings.push(Finding::stops("limits", error_chain(&refused)));
            enforced(&LimitName::ALL.into_iter().collect()).unwrap_or_default()
        }
    };
    let mut memory = list.iter().filter(|e| e.limit == LimitName::Memory);
    let memory_is_soft = memory.any(|e| e.how_hard == Hardness::Watched);
    findings.push(match (&usable_group, memory_is_soft) {
        (Ok(group), false) => Finding::fine("cgroup", describe_group(group)),
        (Ok(group), true) => {
            let why = group.why_not(LimitName::Memory).map(|e| error_chain(e));
            missing_group_finding(&why.unwrap_or_default(), facts, subject)
        }
        (Err(why), _) => missing_group_finding(why, facts, subject),
    });
    drop(usable_group);
    if let Ok(group) = group
        && let Err(e) = group.remove()
    {
        let text = format!("the group made to try it stays behind: {}", error_chain(&e));
        findings.push(Finding::warning("cgroup_left", text));
    }
    list
}

/// Returns the kernel's refusal without the general advice around it; the finding gives advice for this host.
fn cgroup_failure(error: &CgroupError) -> String {
    match error {
        CgroupError::Unavailable {
            refusal: Some(refusal),
        } => error_chain(refusal.as_ref()),
        other => error_chain(other),
    }
}

fn describe_group(group: &Group) -> String {
    let limits = [LimitName::Memory, LimitName::Pids, LimitName::Cpus].into_iter();
    let by = limits.filter_map(|limit| group.enforces(limit));
    let by: Vec<&str> = by.map(|e| e.by.as_str()).collect();
    format!("a group made, limited and removed: {}", by.join(", "))
}

/// Reports that runs get no cgroup. Fumehood then watches memory instead of limiting it, and finds processes through
/// /proc instead of through a cgroup.
fn missing_group_finding(why: &str, facts: &HostFacts, subject: &Subject) -> Finding {
    let text = format!("no cgroup for runs, so memory is watched and not enforced: {why}");
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let severity = match subject.required_layers.contains(&Layer::Cgroup) {
        true => Severity::Stops,
        false => Severity::Warning,
    };
    let remedy = match (facts.container, unified) {
        (Some(Container::Docker), true) => Remedy::untried(
            "Give the container a cgroup tree that it may write (Docker 28 or later); or let the container's own \
             limits (--memory, --pids-limit) hold:",
            &["docker run --cgroupns private --security-opt writable-cgroups=true …"],
        ),
        (Some(_), _) => Remedy::untried(
            "Let the container's own limits hold (memory and pids of the pod or container), or mount its cgroup \
             tree so that Fumehood may write it.",
            &[],
        ),
        (None, true) if facts.has_systemd => systemd(facts),
        (None, true) => Remedy::untried(
            "Give this user a subtree and start the shell in it:",
            &[
                "G=/sys/fs/cgroup/fumehood-$(id -u); sudo mkdir -p $G/fumehood_runner-shell",
                "echo '+cpu +memory +pids' | sudo tee /sys/fs/cgroup/cgroup.subtree_control",
                "sudo chown -R $(id -u) $G; echo $$ | sudo tee $G/fumehood_runner-shell/cgroup.procs",
            ],
        ),
        (None, false) => version_1(facts),
    };
    Finding::new("cgroup", severity, text).with(remedy)
}

fn systemd(facts: &HostFacts) -> Remedy {
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

/// The remedy for cgroup version 1: in each hierarchy a directory that belongs to the user, with the shell in it.
fn version_1(facts: &HostFacts) -> Remedy {
    let host = cgroup::discover(OwnProcess::Stays);
    let planned = cgroup::planned_paths(&host, "doctor");
    let parents = planned
        .iter()
        .filter_map(|p| p.parent().map(Path::to_path_buf));
    let parents: Vec<PathBuf> = parents.collect();
    if parents.is_empty() || facts.is_root {
        return Remedy::new(
            "Mount the memory, pids and cpu controllers below /sys/fs/cgroup, or start Fumehood where they are.",
            &[],
        );
    }
    let uid = facts.uid;
    Remedy::new(
        "Give this user a group in each hierarchy and put the shell into it:",
        &[
            &format!("for g in {}; do", join_paths(&parents, " ")),
            &format!(
                "  g=$g/user-{uid}; sudo mkdir -p $g; sudo chown {uid} $g $g/tasks $g/cgroup.procs"
            ),
            "  echo $$ | sudo tee $g/tasks >/dev/null; done",
        ],
    )
}

/// Finds out what would enforce a run's disk limits.
fn check_storage(
    subject: &Subject,
    limits: &Limits,
    lease: LeaseResult<'_>,
    findings: &mut Vec<Finding>,
) -> WorkspaceStorage {
    if subject.workspace_kind == WorkspaceKind::Memory {
        return WorkspaceStorage::Memory;
    }
    let root = &subject.workspace_root;
    let place = Filesystem::at(root);
    let on_tmpfs = place.as_ref().is_some_and(Filesystem::is_tmpfs);
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
            let remedy = place.and_then(|p| storage::quota_remedy(&p));
            findings.push(Finding::note("quota", text).with(remedy));
            storage
        }
    }
}

fn try_quota(root: &Path, uid: u32, limits: &Limits) -> Result<(), String> {
    let trial = TemporaryWorkspace::new(root)?;
    let dir = trial.as_fd();
    let project =
        quota::unused_project(dir, limits::quota_project_ids(uid)).map_err(quota_failure)?;
    let held =
        quota::limit(dir, project, limits.disk_bytes, limits.files).map_err(quota_failure)?;
    held.release()
        .map_err(|e| format!("lift the quota again: {e}"))
}

fn quota_failure(error: QuotaError) -> String {
    match error {
        QuotaError::Unsupported { step, source } => format!("cannot {step}: {source}"),
        other => error_chain(&other),
    }
}
