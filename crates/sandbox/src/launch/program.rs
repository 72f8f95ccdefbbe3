//! The child: starts as a copy of init, confines itself step by step, and executes the program.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::Mode;
use rustix::net::RecvFlags;
use rustix::process::DumpableBehavior;

use super::namespaces;
use super::stdio;
use crate::channel;
use crate::confine::capabilities::{self, Bounding};
use crate::confine::{landlock, seccomp};
use crate::inside::init::FilterReport;
use crate::inside::kill_helper::{self, KillHelper};
use crate::launch_step::LaunchStep;
use crate::plan::{LaunchPlan, PlanDescriptors};
use crate::resources::{cpus, rlimits};
use crate::spec::{Bytes, ConfinementLevel, LaunchPurpose, Layer, Spec};
use crate::step_report::{LaunchStepError, Reporter, StepContext};
use crate::sys::{self, Instruction, Listener};

pub(super) enum Never {}

/// The child's connections to init and to the kill helper.
pub(super) struct ChildLinks<'a> {
    pub to_init: OwnedFd,
    pub kill_helper: &'a mut Option<KillHelper>,
}

/// Confines this process step by step and executes the program.
pub(super) fn become_program(
    plan: &LaunchPlan,
    descriptors: &PlanDescriptors,
    proc_writable: Option<BorrowedFd<'_>>,
    terminal: Option<OwnedFd>,
    links: ChildLinks<'_>,
    report: &mut Reporter,
) -> Result<Never, LaunchStepError> {
    let spec = &plan.spec;
    // Enter the cgroup first, so that it counts all steps below and all that the program starts. Where clone3 has
    // started this process in its version 2 group, the list of attach files lacks that group. Everywhere else the
    // process writes 0 to the group's file, which waits for an RCU grace period of the whole machine.
    report.begin_step(LaunchStep::AttachToCgroup);
    for file in &descriptors.attach {
        rustix::io::write(file, b"0").doing("write 0 to the group's file")?;
    }
    if plan.attach_files > 0 {
        report.add_layer(Layer::Cgroup, "a group of the run's own");
    }
    // The root of a cgroup namespace is the group in which the process is when it creates the namespace.
    report.begin_step(LaunchStep::CreateCgroupNamespace);
    if spec.has(Layer::CgroupNamespace) {
        sys::unshare(libc::CLONE_NEWCGROUP).doing("unshare")?;
        report.add_layer(Layer::CgroupNamespace, "sees its own group as the root");
    }
    // The inner user namespace comes after the last step that needs the privilege of the outer one.
    if let Some(proc_writable) = proc_writable {
        namespaces::enter_inner_user(spec, proc_writable, report)?;
    }

    report.begin_step(LaunchStep::SetUpStreams);
    rustix::process::setsid().doing("setsid")?;
    stdio::place(descriptors, terminal.as_ref().map(AsFd::as_fd))
        .doing("place descriptors 0, 1, 2")?;

    if spec.level == ConfinementLevel::Full || spec.purpose == LaunchPurpose::Run {
        report.begin_step(LaunchStep::EnterWorkspace);
        rustix::process::chdir(spec.workspace.as_path()).doing("chdir to the workspace")?;
    }
    rustix::process::umask(Mode::from_raw_mode(0o077));
    report.begin_step(LaunchStep::LeaveKeyring);
    leave_keyring(spec)?;

    report.begin_step(LaunchStep::SetResourceLimits);
    rlimits::apply(spec)?;

    report.begin_step(LaunchStep::DropCapabilities);
    if spec.has(Layer::Capabilities) {
        let how = capabilities::drop_capabilities(Bounding::of(spec))?;
        report.add_layer(Layer::Capabilities, how);
    }
    // Landlock and seccomp demand no_new_privs of an unprivileged process.
    report.begin_step(LaunchStep::ForbidNewPrivileges);
    if spec.has(Layer::NoNewPrivs) {
        rustix::thread::set_no_new_privs(true).doing("set no_new_privs")?;
        report.add_layer(
            Layer::NoNewPrivs,
            "set-id bits and file capabilities have no effect",
        );
    }
    report.begin_step(LaunchStep::StartKillHelper);
    *links.kill_helper = kill_helper::start(spec)?;
    report.begin_step(LaunchStep::RestrictWithLandlock);
    let own_proc = match spec.level {
        ConfinementLevel::Full => Vec::new(),
        ConfinementLevel::Landlock => landlock::own_proc(),
    };
    if spec.has(Layer::Landlock)
        && let Some(how) = landlock::restrict(spec, &own_proc)?
    {
        report.add_layer(Layer::Landlock, &how);
    }
    // Prepare everything the program needs now. seccomp comes last, because the filter would refuse the steps above.
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
    sys::close_on_exec_from(3).doing("mark descriptors close-on-exec")?;
    report.begin_step(LaunchStep::WaitForFilter);
    let filter = seccomp::receive(links.to_init.as_fd()).doing("receive the filter from init")?;
    // Pin only now: until it sends the filter, init may still move this process to another CPU.
    cpus::pin(plan.pin_to_cpus).step_context(|| format!("pin to {} CPUs", plan.pin_to_cpus))?;
    report.begin_step(LaunchStep::RestrictWithSeccomp);
    if spec.has(Layer::Seccomp) {
        install_filter(spec, &filter, &links, &own_proc).doing("install the filter")?;
        report.add_layer(
            Layer::Seccomp,
            match spec.level {
                ConfinementLevel::Full => "allow-list; connect() and datagrams through the broker",
                ConfinementLevel::Landlock => {
                    "allow-list; through the guardian modes and times, before ABI 3 lengths, before ABI 6 signals"
                }
            },
        );
    }
    drop(links.to_init);
    report.begin_step(LaunchStep::CheckRequired);
    report.require_layers(&spec.required)?;
    sys::reset_signals().doing("reset signals")?;
    report.begin_step(LaunchStep::ExecuteProgram);
    report.send_started();
    if spec.purpose == LaunchPurpose::Probe {
        sys::exit_now(0);
    }
    Err(sys::execve(&program, &argv, &env))
        .step_context(|| spec.program.as_path().display().to_string())
}

/// Joins a new session keyring, so that the program does not keep the caller's. Container runtimes refuse the keyring
/// calls. At level `landlock` that is no loss: the seccomp filter refuses every keyring call, so the program cannot
/// use the caller's keyring.
fn leave_keyring(spec: &Spec) -> Result<(), LaunchStepError> {
    match sys::new_session_keyring() {
        Err(e)
            if spec.level == ConfinementLevel::Landlock
                && spec.has(Layer::Seccomp)
                && matches!(e.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) =>
        {
            Ok(())
        }
        other => other.doing("join a new one"),
    }
}

fn install_filter(
    spec: &Spec,
    filter: &[Instruction],
    links: &ChildLinks<'_>,
    own_proc: &[OwnedFd],
) -> io::Result<()> {
    if spec.level == ConfinementLevel::Full {
        // Init takes the listener out of this process, which it may do only if the process is dumpable, as it is
        // again after execve.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    }
    let listener = sys::seccomp_install(filter, Listener::New)?
        .ok_or_else(|| io::Error::other("no listener"))?;
    let to_init = links.to_init.as_fd();
    if spec.level == ConfinementLevel::Full {
        // Send the descriptor's number, not the descriptor: the new filter already hands sendmsg over, and nobody
        // serves such calls until init has the listener.
        let report = FilterReport {
            kill_helper: None,
            listener: Some(listener.as_raw_fd()),
        };
        channel::send(to_init, &report, &[])?;
        // Init closes its end when it has taken the listener.
        let _ = rustix::net::recv(to_init, &mut [0u8][..], RecvFlags::empty());
        return Ok(());
    }
    let mut fds = vec![listener.as_fd()];
    let kill_helper = links.kill_helper.as_ref();
    fds.extend(kill_helper.map(|kill_helper| kill_helper.trigger.as_fd()));
    fds.extend(own_proc.iter().map(AsFd::as_fd));
    let report = FilterReport {
        kill_helper: kill_helper.map(|kill_helper| kill_helper.pid),
        listener: None,
    };
    channel::send(to_init, &report, &fds)
}

fn c_string(bytes: Bytes) -> Result<CString, LaunchStepError> {
    CString::new(bytes.0).map_err(|_| LaunchStepError::new("a NUL byte in an argument"))
}

fn env_entry((name, value): &(Bytes, Bytes)) -> Result<CString, LaunchStepError> {
    c_string(Bytes(
        [name.0.as_slice(), b"=", value.0.as_slice()].concat(),
    ))
}
