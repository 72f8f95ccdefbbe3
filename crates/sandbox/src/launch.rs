//! The launcher: single-threaded from birth, with an empty environment. As a rule it is forked before the runner has read
//! anything at all (`standby.rs`), and otherwise our own binary re-executed.
//!
//! Three processes pass through this file, and the order of their steps is the confinement:
//!
//! 1. the *launcher* enters the namespaces, starts pid 1 as the runner's child, and is gone; one that was forked is pid 1;
//! 2. *pid 1* builds the new root, gives up its privilege, and goes on in `init.rs`;
//! 3. the *child* confines itself step by step and becomes the program.
//!
//! At level `landlock` there are no namespaces to enter and no root to build: the second process is the *guardian*,
//! which stands where pid 1 stands and does the same work for its descendants.
//!
//! Each step is announced to the runner before it is tried, so that a failure names its step.

mod stdio;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::RecvFlags;
use rustix::process::{DumpableBehavior, Signal};
use serde::{Deserialize, Serialize};

use crate::cgroup::{self, Birth, CpuUnit, Entrance};
use crate::channel::{self, During, Order, Report, Reporter, StepError, Wait};
use crate::init::Init;
use crate::mounts;
use crate::namespaces::{self, Bounding, Early, Entered, Network};
use crate::oom::OomWatch;
use crate::processes::Realm;
use crate::seccomp::{self, Affinity, Connect, Fallocate, Ground};
use crate::spec::{Bytes, Hardness, Layer, Level, Purpose, Spec, WorkspaceKind};
use crate::sweeper::{self, Sweeper};
use crate::sys::{self, Forked, Listener, Parentage};
use crate::views;
use crate::watch::{Watch, Watched, Watching};
use crate::{cpus, landlock, rlimits};

/// The word after the program's name that makes it the launcher.
pub const ARGUMENT: &str = "__launch";

/// What the launcher is told: the spec, which descriptors come with it, and what nobody else watches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub spec: Spec,
    pub stdin: bool,
    pub attach_files: usize,
    /// Whether a directory comes along in which the program can be born; the first attach file is then for it.
    pub birthplace: bool,
    pub cpu_counter: Option<CpuUnit>,
    /// Whether the counter of kills for want of memory comes along.
    pub oom_counter: bool,
    /// Watched: no cgroup holds it, so init sums it up.
    pub memory: Hardness,
    /// Watched: neither a cgroup nor a user namespace holds it, so init counts.
    pub pids: Hardness,
    /// As many CPUs as were granted, so that programs which count them count right.
    pub pin_to_cpus: usize,
    /// Where no cgroup limits the CPUs, the pinning does, and cannot be undone from inside.
    pub pinned_for_good: bool,
}

/// Descriptors beside the plan, in the order in which they travel.
pub struct Handed {
    /// `None`: the sandbox's own /dev/null, which the program may also reopen.
    pub stdin: Option<OwnedFd>,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub workspace: Option<OwnedFd>,
    pub cpu_counter: Option<OwnedFd>,
    pub oom_counter: Option<OwnedFd>,
    pub attach: Vec<OwnedFd>,
    pub birthplace: Option<OwnedFd>,
}

/// Whether this process was started as the launcher. To be asked before any thread exists.
pub fn is_launcher() -> bool {
    std::env::args_os().nth(1).is_some_and(|a| a == ARGUMENT)
}

/// Never returns: ends as the launcher, as the sandbox's init, or as the program.
pub fn main() -> ! {
    match take_socket() {
        Ok(socket) => work(Reporter::new(socket), Entered::Nothing),
        Err(_) => sys::exit_now(125),
    }
}

pub(crate) fn work(mut report: Reporter, entered: Entered) -> ! {
    // Panics are our own bugs; say them where the runner listens, not on the program's streams.
    if let Err(error) = launch(&mut report, entered) {
        report.failed(error);
        sys::exit_now(125);
    }
    sys::exit_now(0)
}

/// As [`main`], with no more of Landlock than that interface has: for tests of what is held without it. No user's wish
/// leads here; the launcher that is shipped calls `main`.
pub fn main_on_older_landlock(abi: i32) -> ! {
    landlock::make_do_with(abi);
    main()
}

/// The control socket arrives as standard input and is moved away, so that 0, 1 and 2 are free.
fn take_socket() -> io::Result<OwnedFd> {
    sys::close_from(3)?;
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    rustix::net::sockopt::socket_type(&socket)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    sys::place(null.as_fd(), 0)?;
    Ok(socket)
}

fn launch(report: &mut Reporter, entered: Entered) -> Result<(), StepError> {
    report.step("start the launcher");
    // The runner's death is the run's. Set again after every change of credentials, which clears it.
    die_with_parent()?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    sys::note_ignored_signals();
    let (plan, handed) = receive_plan(report)?;
    share_in_want()?;
    match plan.spec.level {
        Level::Full => {
            report.step("map the owners of the views");
            // Before the namespaces: only the host's root may write these maps.
            let owner_maps = namespaces::owner_maps(&plan.spec)?;
            if let Some(early) = namespaces::enter(&plan.spec, entered, report)? {
                return be_init(plan, handed, Some(early), owner_maps, report);
            }
            report.step("start pid 1");
            leave_to(report, |report| {
                become_init(report)?;
                be_init(plan, handed, None, owner_maps, report)
            })
        }
        Level::Landlock => {
            report.step("start the guardian");
            leave_to(report, |report| be_guardian(plan, handed, report))
        }
    }
}

/// Starts the process that stays with the program, as the runner's own child.
fn leave_to(
    report: &mut Reporter,
    be: impl FnOnce(&mut Reporter) -> Result<(), StepError>,
) -> Result<(), StepError> {
    match sys::fork(Parentage::Sibling).during(|| "clone".into())? {
        Forked::Parent { child } => {
            report.tell(&Report::Init { pid: child }, &[]);
            Ok(())
        }
        Forked::Child => {
            if let Err(error) = be(report) {
                report.failed(error);
            }
            sys::exit_now(125)
        }
    }
}

/// The name that lists of processes show.
pub(crate) fn be_called(name: &std::ffi::CStr) {
    let _only_a_name = rustix::thread::set_name(name);
}

fn die_with_parent() -> Result<(), StepError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .during(|| "ask to die with the runner".into())
}

/// A service may be spared when memory runs out (OOMScoreAdjust=); what it runs for others may not: the kernel would
/// leave it alive at the run's own limit. Asking to be spared less needs no privilege.
fn share_in_want() -> Result<(), StepError> {
    let spared = std::fs::read_to_string("/proc/self/oom_score_adj")
        .is_ok_and(|score| score.trim_start().starts_with('-'));
    match spared {
        true => namespaces::write_proc(None, "self/oom_score_adj", "0")
            .during(|| "give up being spared when memory runs out".into()),
        false => Ok(()),
    }
}

fn receive_plan(report: &mut Reporter) -> Result<(Plan, Handed), StepError> {
    report.step("receive the plan");
    let (count, mut fds): (usize, Vec<OwnedFd>) = channel::receive(report.socket(), Wait::Block)
        .during(|| "receive".into())?
        .ok_or_else(|| StepError::new("the runner is gone"))?;
    if fds.len() != count || count < 4 {
        return Err(StepError::new("descriptors were lost on the way"));
    }
    let mut plan = Vec::new();
    io::Read::read_to_end(&mut std::fs::File::from(fds.remove(0)), &mut plan)
        .during(|| "read the plan".into())?;
    report.write_into(fds.remove(0));
    let plan: Plan =
        serde_json::from_slice(&plan).map_err(|e| StepError::new(format!("read the plan: {e}")))?;
    plan.spec
        .check()
        .map_err(|e| StepError::new(e.to_string()))?;
    let mut fds = fds.into_iter();
    let mut next = || {
        fds.next()
            .ok_or_else(|| StepError::new("a descriptor is missing"))
    };
    let handed = Handed {
        stdin: plan.stdin.then(&mut next).transpose()?,
        stdout: next()?,
        stderr: next()?,
        workspace: match (plan.spec.workspace_kind, plan.spec.purpose) {
            (WorkspaceKind::Disk, Purpose::Run) => Some(next()?),
            _ => None,
        },
        cpu_counter: plan.cpu_counter.map(|_| next()).transpose()?,
        oom_counter: plan.oom_counter.then(&mut next).transpose()?,
        attach: (0..plan.attach_files)
            .map(|_| next())
            .collect::<Result<_, _>>()?,
        birthplace: plan.birthplace.then(&mut next).transpose()?,
    };
    Ok((plan, handed))
}

/// Makes a process that was just forked what the one that stands by is from its birth.
fn become_init(report: &mut Reporter) -> Result<(), StepError> {
    report.step("leave the caller's session");
    // Fork cleared it. A runner that died meanwhile shows as a closed control socket in init's loop.
    die_with_parent()?;
    // No terminal's Ctrl-C reaches in here, only the runner's order.
    rustix::process::setsid()
        .during(|| "setsid".into())
        .map(drop)
}

/// Pid 1: builds the sandbox, starts the program, and stays as its init.
fn be_init(
    plan: Plan,
    mut handed: Handed,
    early: Option<Early>,
    owner_maps: mounts::OwnerMaps,
    report: &mut Reporter,
) -> Result<(), StepError> {
    let spec = &plan.spec;
    report.step("set up init");
    be_called(c"fumehood-init");
    // A signal from inside could only be one with a handler; there is none, and all are blocked.
    sys::block_signals(None).during(|| "block signals".into())?;
    if realm(spec) == Realm::Descendants {
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
fn be_guardian(plan: Plan, mut handed: Handed, report: &mut Reporter) -> Result<(), StepError> {
    let spec = &plan.spec;
    report.step("set up the guardian");
    be_called(c"fumehood-guard");
    rustix::process::setsid().during(|| "setsid".into())?;
    sys::block_signals(None).during(|| "block signals".into())?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .during(|| "become the parent of orphans".into())?;
    namespaces::become_leased(spec, report)?;
    namespaces::drop_capabilities(Bounding::of(spec))?;
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
                namespaces::drop_capabilities(Bounding::Kept)?;
            }
            rustix::thread::set_no_new_privs(true).during(|| "set no_new_privs for init".into())?;
            Init::new(plan, child, (watching, oom), ours, filter, entrance)
                .during(|| "set up init's watch".into())?
                .run(report)
        }
    }
}

/// Whose processes are the run's.
pub fn realm(spec: &Spec) -> Realm {
    match spec.has(Layer::PidNamespace) {
        true => Realm::Namespace,
        false => Realm::Descendants,
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
        realm(spec),
    );
    let watch = watch.during(|| "look at the workspace".into())?;
    Watching::start(watch, Bounding::Kept).during(|| "start a thread".into())
}

enum Never {}

/// What joins the child to those who stay beside the program.
struct Ways<'a> {
    to_init: OwnedFd,
    sweeper: &'a mut Option<Sweeper>,
}

/// The child: from init's copy to the program.
fn become_program(
    plan: &Plan,
    handed: &Handed,
    proc_writable: Option<BorrowedFd<'_>>,
    terminal: Option<OwnedFd>,
    ways: Ways<'_>,
    report: &mut Reporter,
) -> Result<Never, StepError> {
    let spec = &plan.spec;
    // First into the cgroup, so that everything below and all it starts is counted. The process attaches
    // itself: moving it from outside costs a grace period of the whole machine.
    report.step("attach to the cgroup");
    for file in &handed.attach {
        rustix::io::write(file, b"0").during(|| "write 0 to the group's file".into())?;
    }
    if plan.attach_files > 0 {
        report.layer(Layer::Cgroup, "a group of the run's own");
    }
    // Then the cgroup namespace, whose root is where the process is at this moment.
    report.step("create the cgroup namespace");
    if spec.has(Layer::CgroupNamespace) {
        sys::unshare(libc::CLONE_NEWCGROUP).during(|| "unshare".into())?;
        report.layer(Layer::CgroupNamespace, "sees its own group as the root");
    }
    // The inner user namespace comes after the last step that needs the outer one's privilege.
    if let Some(proc_writable) = proc_writable {
        namespaces::enter_inner_user(spec, proc_writable, report)?;
    }

    report.step("set up the streams");
    rustix::process::setsid().during(|| "setsid".into())?;
    stdio::place(handed, terminal.as_ref().map(AsFd::as_fd))
        .during(|| "place descriptors 0, 1, 2".into())?;

    if spec.level == Level::Full || spec.purpose == Purpose::Run {
        report.step("enter the workspace");
        rustix::process::chdir(spec.workspace.as_path())
            .during(|| "chdir to the workspace".into())?;
    }
    rustix::process::umask(Mode::from_raw_mode(0o077));
    report.step("leave the session keyring");
    leave_keyring(spec)?;

    report.step("set resource limits");
    rlimits::apply(spec)?;

    report.step("drop capabilities");
    if spec.has(Layer::Capabilities) {
        let how = namespaces::drop_capabilities(Bounding::of(spec))?;
        report.layer(Layer::Capabilities, how);
    }
    // Before Landlock and seccomp, which demand it of the unprivileged.
    report.step("forbid new privileges");
    if spec.has(Layer::NoNewPrivs) {
        rustix::thread::set_no_new_privs(true).during(|| "set no_new_privs".into())?;
        report.layer(
            Layer::NoNewPrivs,
            "set-id bits and file capabilities have no effect",
        );
    }
    report.step("leave a sweeper");
    *ways.sweeper = sweeper::leave(spec)?;
    report.step("restrict with Landlock");
    let own_proc = match spec.level {
        Level::Full => Vec::new(),
        Level::Landlock => landlock::own_proc(),
    };
    if spec.has(Layer::Landlock)
        && let Some(how) = landlock::restrict(spec, &own_proc)?
    {
        report.layer(Layer::Landlock, &how);
    }
    // Everything the program needs is prepared before seccomp, which comes last: it would
    // refuse the steps above.
    let program = c_string(spec.program.as_path().as_os_str().into())?;
    let argv = spec
        .argv
        .iter()
        .cloned()
        .map(c_string)
        .collect::<Result<Vec<_>, _>>()?;
    let env = spec
        .env
        .iter()
        .map(env_entry)
        .collect::<Result<Vec<_>, _>>()?;
    sys::close_on_exec_from(3).during(|| "mark descriptors close-on-exec".into())?;
    report.step("wait for the word to go");
    let filter = seccomp::receive(ways.to_init.as_fd()).during(|| "listen to init".into())?;
    // Init has moved this process to another CPU for the last time.
    cpus::pin(plan.pin_to_cpus).during(|| format!("pin to {} CPUs", plan.pin_to_cpus))?;
    report.step("restrict with seccomp");
    if spec.has(Layer::Seccomp) {
        restrict_calls(spec, &filter, &ways, &own_proc).during(|| "install the filter".into())?;
        report.layer(
            Layer::Seccomp,
            match spec.level {
                Level::Full => "allow-list; connect() and datagrams through the broker",
                Level::Landlock => "allow-list; modes and times of files through the guardian",
            },
        );
    }
    drop(ways.to_init);
    report.step("check what is required");
    report.require(&spec.required)?;
    sys::reset_signals().during(|| "reset signals".into())?;
    report.step("execute the program");
    report.started();
    if spec.purpose == Purpose::Probe {
        sys::exit_now(0);
    }
    Err(sys::execve(&program, &argv, &env)).during(|| spec.program.as_path().display().to_string())
}

/// A keyring of the caller's that stays joined is of no use to a program that may make no call on keys. Container
/// runtimes refuse those calls to us as well.
fn leave_keyring(spec: &Spec) -> Result<(), StepError> {
    match sys::new_session_keyring() {
        Err(e)
            if spec.level == Level::Landlock
                && spec.has(Layer::Seccomp)
                && matches!(e.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) =>
        {
            Ok(())
        }
        other => other.during(|| "join a new one".into()),
    }
}

fn filter(plan: &Plan, watch: Option<u32>) -> Vec<seccomp::Instruction> {
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

/// What the child tells init once it has its filter. Descriptors come along, if sendmsg is still allowed: the listener, what
/// the sweeper waits for, and the program's own files in /proc.
#[derive(Serialize, Deserialize)]
pub struct Filtered {
    pub sweeper: Option<u32>,
    /// Where the listener is among the child's descriptors, for init to take a copy.
    pub listener: Option<i32>,
}

fn restrict_calls(
    spec: &Spec,
    filter: &[seccomp::Instruction],
    ways: &Ways<'_>,
    own_proc: &[OwnedFd],
) -> io::Result<()> {
    if spec.level == Level::Full {
        // As what it becomes by execve is: init takes the listener from it.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    }
    let listener = sys::seccomp_install(filter, Listener::New)?
        .ok_or_else(|| io::Error::other("no listener"))?;
    let to_init = ways.to_init.as_fd();
    if spec.level == Level::Full {
        // The filter hands sendmsg over, and only who has the listener could serve it.
        let told = Filtered {
            sweeper: None,
            listener: Some(listener.as_raw_fd()),
        };
        channel::send(to_init, &told, &[])?;
        // Init closes its end when it has taken the listener.
        let _closed = rustix::net::recv(to_init, &mut [0u8][..], RecvFlags::empty());
        return Ok(());
    }
    let mut fds = vec![listener.as_fd()];
    let sweeper = ways.sweeper.as_ref();
    fds.extend(sweeper.map(|sweeper| sweeper.word.as_fd()));
    fds.extend(own_proc.iter().map(AsFd::as_fd));
    let told = Filtered {
        sweeper: sweeper.map(|sweeper| sweeper.pid),
        listener: None,
    };
    channel::send(to_init, &told, &fds)
}

fn c_string(bytes: Bytes) -> Result<CString, StepError> {
    CString::new(bytes.0).map_err(|_| StepError::new("a NUL byte in an argument"))
}

fn env_entry((name, value): &(Bytes, Bytes)) -> Result<CString, StepError> {
    c_string(Bytes(
        [name.0.as_slice(), b"=", value.0.as_slice()].concat(),
    ))
}
