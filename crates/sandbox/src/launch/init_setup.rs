//! Pid 1 or the guardian: builds the sandbox around the program, starts the child, and continues in `inside/init.rs`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::DumpableBehavior;

use super::mounts::{self, views};
use super::namespaces::{self, EarlySandbox, Network};
use super::program::{ChildLinks, become_program};
use super::{die_with_parent, stdio};
use crate::channel::{self, InitCommand, SandboxReport, Wait};
use crate::confine::capabilities::{self, Bounding};
use crate::confine::landlock;
use crate::confine::seccomp::{self, Affinity, Connect, Fallocate, OuterConfinement};
use crate::inside::init::Init;
use crate::inside::oom::OomWatch;
use crate::inside::processes::ProcessSet;
use crate::inside::watch::{LimitWatch, WatchThread, WatchedLimits};
use crate::launch_step::LaunchStep;
use crate::plan::{LaunchPlan, PlanDescriptors};
use crate::resources::cgroup::{self, GroupAccess, GroupEntry};
use crate::resources::{cpus, rlimits};
use crate::spec::{ConfinementLevel, Hardness, LaunchPurpose, Layer, Spec, WorkspaceKind};
use crate::step_report::{LaunchStepError, Reporter, StepContext};
use crate::sys::{self, ForkSide, Instruction};

/// Runs as pid 1: builds the sandbox, starts the program, and stays as the sandbox's init.
pub(super) fn set_up_init(
    plan: LaunchPlan,
    mut descriptors: PlanDescriptors,
    early: Option<EarlySandbox>,
    owner_maps: mounts::OwnerMaps,
    report: &mut Reporter,
) -> Result<(), LaunchStepError> {
    let spec = &plan.spec;
    report.begin_step(LaunchStep::SetUpInit);
    sys::set_process_name(c"fumehood-init");
    // The kernel delivers a signal from inside to pid 1 only if pid 1 has a handler for it. Pid 1 has none, and
    // blocks all.
    sys::block_signals(None).doing("block signals")?;
    if ProcessSet::of(spec) == ProcessSet::Descendants {
        // Only tests run pid 1 without a pid namespace.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .doing("become the parent of orphans")?;
    }

    // Build the new root while this process still has the builder's privilege (root, or the owner of the outer user
    // namespace): it can still open paths of the host and still make mounts.
    let mut fill_workspace = |workspace: BorrowedFd<'_>, report: &Reporter| {
        report.send(&SandboxReport::Workspace, &[workspace]);
        match report
            .receive_command(Wait::Block)
            .doing("wait for the runner")?
        {
            Some(InitCommand::Filled) => Ok(()),
            _ => Err(LaunchStepError::new("cancelled before the start")),
        }
    };
    let workspace = descriptors.workspace.take();
    let (prepared, network) = match early {
        Some(early) => (early.prepared, early.network),
        None => (mounts::prepare(report)?, Network::NotSetUp),
    };
    let fill = &mut fill_workspace;
    let root = mounts::build(spec, prepared, workspace, &owner_maps, report, fill)?;
    drop(owner_maps);

    report.begin_step(LaunchStep::SetUpNetwork);
    if spec.has(Layer::NetNamespace) && network == Network::NotSetUp {
        namespaces::set_up_network(Some(root.proc_writable.as_fd()))?;
    }
    if spec.has(Layer::UtsNamespace) {
        rustix::system::sethostname(spec.host_name.as_bytes()).doing("set the host name")?;
    }

    // Nothing below needs the host's root. A change of credentials clears the parent death signal, so set it again.
    namespaces::leave_root(spec, report)?;
    die_with_parent()?;
    let inside = InsideDescriptors {
        workspace: Some(root.workspace),
        proc_writable: Some(root.proc_writable),
    };
    start_child(&plan, descriptors, inside, report)
}

/// Runs as the guardian: adopts every orphan of the program, and stays until none is left.
///
/// The guardian has the program's uid, so that it may inspect the program's processes. It is in no Landlock domain,
/// so nothing inside the program's domain can signal or trace it.
pub(super) fn set_up_guardian(
    plan: LaunchPlan,
    mut descriptors: PlanDescriptors,
    report: &mut Reporter,
) -> Result<(), LaunchStepError> {
    let spec = &plan.spec;
    report.begin_step(LaunchStep::SetUpGuardian);
    sys::set_process_name(c"fumehood-guard");
    rustix::process::setsid().doing("setsid")?;
    sys::block_signals(None).doing("block signals")?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .doing("become the parent of orphans")?;
    namespaces::leave_root(spec, report)?;
    capabilities::drop_capabilities(Bounding::of(spec))?;
    let workspace = descriptors.workspace.take();
    if let Some(workspace) = &workspace {
        report.begin_step(LaunchStep::LookAtWorkspace);
        check_workspace_unchanged(workspace.as_fd(), spec)?;
    }
    if spec.is_leased() {
        report.begin_step(LaunchStep::LookAtViews);
        views::check_readable(spec)?;
    }
    report.add_layer(
        Layer::Guardian,
        "out of the program's reach; orphans become its children, and it leaves last",
    );
    let inside = InsideDescriptors {
        workspace,
        proc_writable: None,
    };
    start_child(&plan, descriptors, inside, report)
}

/// Fails unless the workspace's path still leads to the directory that the runner holds.
fn check_workspace_unchanged(held: BorrowedFd<'_>, spec: &Spec) -> Result<(), LaunchStepError> {
    let path = spec.workspace.as_path();
    let what = || format!("look at {}", path.display());
    let found = rustix::fs::lstat(path).step_context(what)?;
    let held = rustix::fs::fstat(held).step_context(what)?;
    match (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino) {
        true => Ok(()),
        false => Err(LaunchStepError::new(format!(
            "{} is another directory now",
            path.display()
        ))),
    }
}

/// Descriptors of the sandbox's inside that pid 1 or the guardian holds.
struct InsideDescriptors {
    /// `None` for a probe, which executes nothing.
    workspace: Option<OwnedFd>,
    /// See [`mounts::NewRoot`]. `None` at level `landlock`, which uses the host's /proc.
    proc_writable: Option<OwnedFd>,
}

/// The last steps, the same for pid 1 and for the guardian: start the watch and the child, then run init's loop.
fn start_child(
    plan: &LaunchPlan,
    mut descriptors: PlanDescriptors,
    inside: InsideDescriptors,
    report: &mut Reporter,
) -> Result<(), LaunchStepError> {
    let spec = &plan.spec;
    let terminal = stdio::open_terminal(spec, report)?;
    // Not dumpable: nobody inside owns /proc/1/mem, environ, fd or exe, and no process can attach to this one.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .doing("become undumpable")?;

    let InsideDescriptors {
        workspace,
        proc_writable,
    } = inside;

    report.begin_step(LaunchStep::StartChild);
    let (ours, theirs) = channel::pair().doing("make a socket pair")?;
    let group_directory = descriptors.group_directory.take();
    let forked = cgroup::fork_into(group_directory.as_ref().map(AsFd::as_fd));
    let (forked, entry) = forked.doing("fork")?;
    match forked {
        ForkSide::Child => {
            drop(ours);
            if entry == GroupEntry::InGroup {
                // The first attach file names the group in which the kernel started this child. Skip it: a move costs
                // the time that starting inside the group saves.
                descriptors.attach.remove(0);
            }
            let proc_writable = proc_writable.as_ref().map(AsFd::as_fd);
            // Keep the kill helper until the failure is reported: dropping it makes the helper kill this process.
            let mut kill_helper = None;
            let links = ChildLinks {
                to_init: theirs,
                kill_helper: &mut kill_helper,
            };
            let error =
                match become_program(plan, &descriptors, proc_writable, terminal, links, report) {
                    Err(error) => error,
                    Ok(never) => match never {},
                };
            report.send_failure(error);
            sys::exit_now(125)
        }
        ForkSide::Parent { child } => {
            // On an error the child merely starts on this CPU.
            let _ = cpus::move_off_this_cpu(child);
            drop(theirs);
            drop(terminal);
            drop(proc_writable);
            // The child meanwhile puts its layers in force, up to the seccomp filter. Init sends the filter when the
            // program may start.
            report.set_step_unlogged(LaunchStep::StartWatch);
            let watch = match workspace {
                Some(workspace) if spec.purpose == LaunchPurpose::Run => Some(start_watch(
                    plan,
                    workspace,
                    descriptors.cpu_counter.take(),
                )?),
                _ => None,
            };
            let filter = build_filter(plan, watch.as_ref().map(|watch| watch.thread));
            let group_access = GroupAccess {
                directory: group_directory,
                files: std::mem::take(&mut descriptors.attach),
            };
            let oom = descriptors.oom_counter.take().map(OomWatch::new);
            // Init keeps only what it needs: no stream of the program, no capability.
            drop(descriptors);
            if spec.has(Layer::Capabilities) {
                capabilities::drop_capabilities(Bounding::Kept)?;
            }
            rustix::thread::set_no_new_privs(true).doing("set no_new_privs for init")?;
            Init::new(plan, child, (watch, oom), ours, filter, group_access)
                .doing("set up init's watch")?
                .run(report)
        }
    }
}

/// Starts the watch thread. It must exist before the filter, because the filter contains its thread id.
fn start_watch(
    plan: &LaunchPlan,
    workspace: OwnedFd,
    cpu_counter: Option<OwnedFd>,
) -> Result<WatchThread, LaunchStepError> {
    let spec = &plan.spec;
    // The watch holds one directory open for each level of its descent.
    let _ = rlimits::raise_open_files();
    let watched = WatchedLimits {
        memory: plan.memory == Hardness::Watched,
        pids: plan.pids == Hardness::Watched,
    };
    let watch = LimitWatch::new(
        spec,
        workspace,
        cpu_counter.zip(plan.cpu_counter),
        watched,
        ProcessSet::of(spec),
    );
    let watch = watch.doing("look at the workspace")?;
    WatchThread::start(watch, Bounding::Kept).doing("start a thread")
}

fn build_filter(plan: &LaunchPlan, watch_tid: Option<u32>) -> Vec<Instruction> {
    seccomp::build_filter(&seccomp::FilterOptions {
        fallocate: match plan.spec.workspace_kind {
            WorkspaceKind::Disk => Fallocate::Refused,
            WorkspaceKind::Memory => Fallocate::Allowed,
        },
        affinity: match plan.pinned_for_good {
            true => Affinity::Fixed,
            false => Affinity::Free,
        },
        connect: Connect::Brokered,
        outer: match plan.spec.level {
            ConfinementLevel::Full => {
                let (uid, gid) = namespaces::ids_inside(&plan.spec);
                OuterConfinement::Namespaces {
                    watch: watch_tid.unwrap_or(seccomp::WATCH_TID_DEFAULT),
                    uid,
                    gid,
                }
            }
            ConfinementLevel::Landlock => OuterConfinement::Landlock {
                abi: landlock::abi(),
            },
        },
    })
}
