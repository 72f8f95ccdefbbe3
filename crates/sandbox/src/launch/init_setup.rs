//! Pid 1, or the guardian: builds what surrounds the program, starts the child, and goes on in `inside/init.rs`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::{DumpableBehavior, Signal};

use super::mounts::{self, views};
use super::namespaces::{self, Early, Network};
use super::program::{Ways, become_program};
use super::stdio;
use crate::channel::{self, Order, Report, Wait};
use crate::confine::capabilities::{self, Bounding};
use crate::confine::landlock;
use crate::confine::seccomp::{self, Affinity, Connect, Fallocate, Ground};
use crate::inside::init::Init;
use crate::inside::oom::OomWatch;
use crate::inside::processes::Realm;
use crate::inside::watch::{Watch, Watched, Watching};
use crate::plan::{Handed, Plan};
use crate::resources::cgroup::{self, Birth, Entrance};
use crate::resources::{cpus, rlimits};
use crate::spec::{Hardness, Layer, Level, Purpose, Spec, WorkspaceKind};
use crate::step_report::{During, Reporter, StepError};
use crate::sys::{self, Forked, Instruction};

/// Pid 1: builds the sandbox, starts the program, and stays as its init.
pub(super) fn be_init(
    plan: Plan,
    mut handed: Handed,
    early: Option<Early>,
    owner_maps: mounts::OwnerMaps,
    report: &mut Reporter,
) -> Result<(), StepError> {
    let spec = &plan.spec;
    report.step("set up init");
    sys::set_process_name(c"fumehood-init");
    // A signal from inside could only be one with a handler; there is none, and all are blocked.
    sys::block_signals(None).during(|| "block signals".into())?;
    if Realm::of(spec) == Realm::Descendants {
        // Only in tests without a pid namespace.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .during(|| "become the parent of orphans".into())?;
    }

    // As the builder (root, or master of the outer user namespace): the new root, while paths of the host can still be
    // opened and mounts still be made.
    let mut be_filled = |workspace: BorrowedFd<'_>, report: &Reporter| {
        report.tell(&Report::Workspace, &[workspace]);
        match report
            .receive_order(Wait::Block)
            .during(|| "wait for the runner".into())?
        {
            Some(Order::Filled) => Ok(()),
            _ => Err(StepError::new("cancelled before the start")),
        }
    };
    let workspace = handed.workspace.take();
    let (prepared, network) = match early {
        Some(early) => (early.prepared, early.network),
        None => (mounts::prepare(report)?, Network::Bare),
    };
    let fill = &mut be_filled;
    let root = mounts::build(spec, prepared, workspace, &owner_maps, report, fill)?;
    drop(owner_maps);

    report.step("set up the network and the host name");
    if spec.has(Layer::NetNamespace) && network == Network::Bare {
        namespaces::set_up_network(Some(root.proc_writable.as_fd()))?;
    }
    if spec.has(Layer::UtsNamespace) {
        rustix::system::sethostname(spec.host_name.as_bytes())
            .during(|| "set the host name".into())?;
    }

    // From here on nothing needs the host's root. Credentials change, so what they clear is set again.
    namespaces::become_leased(spec, report)?;
    die_with_parent()?;
    let inside = Inside {
        workspace: Some(root.workspace),
        proc_writable: Some(root.proc_writable),
    };
    start_program(&plan, handed, inside, report)
}

/// The guardian: everyone the program leaves behind becomes its child, and it stays until none is left. It has the
/// program's uid, so that it can look into its processes, and is in no Landlock domain, so that
/// nothing in the program's can signal or trace it.
pub(super) fn be_guardian(
    plan: Plan,
    mut handed: Handed,
    report: &mut Reporter,
) -> Result<(), StepError> {
    let spec = &plan.spec;
    report.step("set up the guardian");
    sys::set_process_name(c"fumehood-guard");
    rustix::process::setsid().during(|| "setsid".into())?;
    sys::block_signals(None).during(|| "block signals".into())?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .during(|| "become the parent of orphans".into())?;
    namespaces::become_leased(spec, report)?;
    capabilities::drop_capabilities(Bounding::of(spec))?;
    let workspace = handed.workspace.take();
    if let Some(workspace) = &workspace {
        report.step("look at the workspace");
        is_still_there(workspace.as_fd(), spec)?;
    }
    if spec.is_leased() {
        report.step("look at the read-only views");
        views::check_readable(spec)?;
    }
    report.layer(
        Layer::Guardian,
        "out of the program's reach; orphans become its children, and it leaves last",
    );
    let inside = Inside {
        workspace,
        proc_writable: None,
    };
    start_program(&plan, handed, inside, report)
}

/// Whether the workspace's path leads to the directory that the runner holds.
fn is_still_there(held: BorrowedFd<'_>, spec: &Spec) -> Result<(), StepError> {
    let path = spec.workspace.as_path();
    let what = || format!("look at {}", path.display());
    let found = rustix::fs::lstat(path).during(what)?;
    let held = rustix::fs::fstat(held).during(what)?;
    match (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino) {
        true => Ok(()),
        false => Err(StepError::new(format!(
            "{} is another directory now",
            path.display()
        ))),
    }
}

/// What the process beside the program holds of the inside.
struct Inside {
    /// `None` where nothing is executed.
    workspace: Option<OwnedFd>,
    /// See [`mounts::NewRoot`]; the host's /proc needs none.
    proc_writable: Option<OwnedFd>,
}

/// The last steps of pid 1 and the guardian alike: the watch, the child, and then to stay.
fn start_program(
    plan: &Plan,
    mut handed: Handed,
    inside: Inside,
    report: &mut Reporter,
) -> Result<(), StepError> {
    let spec = &plan.spec;
    let terminal = stdio::open_terminal(spec, report)?;
    // Not dumpable: /proc/1/mem, environ, fd and exe belong to nobody inside, and nothing can attach.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .during(|| "become undumpable".into())?;

    let Inside {
        workspace,
        proc_writable,
    } = inside;

    report.step("start the child");
    let (ours, theirs) = channel::pair().during(|| "make a socket pair".into())?;
    let birthplace = handed.birthplace.take();
    let born = cgroup::fork_into(birthplace.as_ref().map(AsFd::as_fd));
    let (forked, birth) = born.during(|| "fork".into())?;
    match forked {
        Forked::Child => {
            drop(ours);
            if birth == Birth::InGroup {
                // Entering it once more would cost what being born there spares.
                handed.attach.remove(0);
            }
            let proc_writable = proc_writable.as_ref().map(AsFd::as_fd);
            // Held until the failure is told: who lets go of the sweeper is struck by it.
            let mut sweeper = None;
            let ways = Ways {
                to_init: theirs,
                sweeper: &mut sweeper,
            };
            let error = match become_program(plan, &handed, proc_writable, terminal, ways, report) {
                Err(error) => error,
                Ok(never) => match never {},
            };
            report.failed(error);
            sys::exit_now(125)
        }
        Forked::Parent { child } => {
            let _where_it_was_born = cpus::move_from_here(child);
            drop(theirs);
            drop(terminal);
            drop(proc_writable);
            // While the child puts its layers in force, up to the filter, which it gets from here with the word to go.
            report.meanwhile("start the watch");
            let watching = match workspace {
                Some(workspace) if spec.purpose == Purpose::Run => {
                    Some(start_watch(plan, workspace, handed.cpu_counter.take())?)
                }
                _ => None,
            };
            let filter = filter(plan, watching.as_ref().map(|watching| watching.thread));
            let entrance = Entrance {
                directory: birthplace,
                files: std::mem::take(&mut handed.attach),
            };
            let oom = handed.oom_counter.take().map(OomWatch::new);
            // Init keeps nothing that it does not need: no stream of the program's, no capability.
            drop(handed);
            if spec.has(Layer::Capabilities) {
                capabilities::drop_capabilities(Bounding::Kept)?;
            }
            rustix::thread::set_no_new_privs(true).during(|| "set no_new_privs for init".into())?;
            Init::new(plan, child, (watching, oom), ours, filter, entrance)
                .during(|| "set up init's watch".into())?
                .run(report)
        }
    }
}

/// The watch, before the child has its filter, which must know the number of this thread.
fn start_watch(
    plan: &Plan,
    workspace: OwnedFd,
    cpu_counter: Option<OwnedFd>,
) -> Result<Watching, StepError> {
    let spec = &plan.spec;
    // It holds a directory open for every level it is down.
    let _as_many_as_allowed = rlimits::raise_open_files();
    let watched = Watched {
        memory: plan.memory == Hardness::Watched,
        pids: plan.pids == Hardness::Watched,
    };
    let watch = Watch::new(
        spec,
        workspace,
        cpu_counter.zip(plan.cpu_counter),
        watched,
        Realm::of(spec),
    );
    let watch = watch.during(|| "look at the workspace".into())?;
    Watching::start(watch, Bounding::Kept).during(|| "start a thread".into())
}

fn filter(plan: &Plan, watch: Option<u32>) -> Vec<Instruction> {
    seccomp::program(&seccomp::Options {
        fallocate: match plan.spec.workspace_kind {
            WorkspaceKind::Disk => Fallocate::Refused,
            WorkspaceKind::Memory => Fallocate::Allowed,
        },
        affinity: match plan.pinned_for_good {
            true => Affinity::Fixed,
            false => Affinity::Free,
        },
        connect: Connect::Brokered,
        ground: match plan.spec.level {
            Level::Full => {
                let (uid, gid) = namespaces::ids_inside(&plan.spec);
                Ground::Own {
                    watch: watch.unwrap_or(seccomp::SECOND_BORN),
                    uid,
                    gid,
                }
            }
            Level::Landlock => Ground::Shared {
                landlock_abi: landlock::abi(),
            },
        },
    })
}

pub(super) fn die_with_parent() -> Result<(), StepError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .during(|| "ask to die with the runner".into())
}
