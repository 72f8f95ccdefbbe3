//! The launcher: from the control socket to the start of pid 1 or of the guardian.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use super::die_with_parent;
use super::init_setup::{set_up_guardian, set_up_init};
use super::namespaces::{self, EarlyResult};
use crate::channel::{self, SandboxReport, Wait};
use crate::confine::landlock;
use crate::launch_step::LaunchStep;
use crate::plan::{LaunchPlan, PlanDescriptors};
use crate::spec::{ConfinementLevel, LaunchPurpose, WorkspaceKind};
use crate::step_report::{LaunchStepError, Reporter, StepContext};
use crate::sys::{self, ForkSide, Parentage, procfs};

/// The first argument that makes this binary the launcher.
pub const ARGUMENT: &str = "__launch";

/// Returns whether this process was started as the launcher. Call it before any thread exists.
pub fn is_launcher() -> bool {
    std::env::args_os().nth(1).is_some_and(|a| a == ARGUMENT)
}

/// Runs the launcher. The process ends as the launcher, as the sandbox's init, or as the program.
pub fn main() -> ! {
    match take_socket() {
        Ok(socket) => run(Reporter::new(socket), EarlyResult::Nothing),
        Err(_) => sys::exit_now(125),
    }
}

pub(crate) fn run(mut report: Reporter, entered: EarlyResult) -> ! {
    // Report the failure to the runner, never on the program's streams.
    if let Err(error) = launch(&mut report, entered) {
        report.send_failure(error);
        sys::exit_now(125);
    }
    sys::exit_now(0)
}

/// Runs [`main`] with at most this Landlock ABI, for tests of older kernels. No user option leads here; the shipped
/// launcher calls `main`.
pub fn main_on_older_landlock(abi: i32) -> ! {
    landlock::cap_abi(abi);
    main()
}

/// Takes the control socket, which arrives as standard input, and moves it away so that 0, 1 and 2 are free.
fn take_socket() -> io::Result<OwnedFd> {
    sys::close_from(3)?;
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    rustix::net::sockopt::socket_type(&socket)?;
    let null = sys::open("/dev/null", OFlags::RDWR)?;
    sys::place_descriptor(null.as_fd(), 0)?;
    Ok(socket)
}

fn launch(report: &mut Reporter, entered: EarlyResult) -> Result<(), LaunchStepError> {
    report.begin_step(LaunchStep::StartLauncher);
    // The run must die with the runner. Every change of credentials clears this setting, so it is set again later.
    die_with_parent()?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    sys::note_ignored_signals();
    let (plan, descriptors) = receive_plan(report)?;
    reset_oom_score_adj()?;
    match plan.spec.level {
        ConfinementLevel::Full => {
            report.begin_step(LaunchStep::MapViewOwners);
            // Before the namespaces: only the host's root may write the maps of these user namespaces.
            let owner_maps = namespaces::owner_maps(&plan.spec)?;
            if let Some(early) = namespaces::enter(&plan.spec, entered, report)? {
                return set_up_init(plan, descriptors, Some(early), owner_maps, report);
            }
            report.begin_step(LaunchStep::StartInit);
            fork_init(report, |report| {
                leave_caller_session(report)?;
                set_up_init(plan, descriptors, None, owner_maps, report)
            })
        }
        ConfinementLevel::Landlock => {
            report.begin_step(LaunchStep::StartGuardian);
            fork_init(report, |report| set_up_guardian(plan, descriptors, report))
        }
    }
}

/// Forks the process that stays with the program, as a child of the runner.
fn fork_init(
    report: &mut Reporter,
    run_child: impl FnOnce(&mut Reporter) -> Result<(), LaunchStepError>,
) -> Result<(), LaunchStepError> {
    match sys::fork(Parentage::Sibling).doing("clone")? {
        ForkSide::Parent { child } => {
            report.send(&SandboxReport::Init { pid: child }, &[]);
            Ok(())
        }
        ForkSide::Child => {
            if let Err(error) = run_child(report) {
                report.send_failure(error);
            }
            sys::exit_now(125)
        }
    }
}

/// Resets a negative OOM score adjustment. The operator may protect a service with `OOMScoreAdjust=`, but its
/// analyses must not inherit the protection: the kernel would spare them at the run's own memory limit. Raising the
/// score needs no privilege.
fn reset_oom_score_adj() -> Result<(), LaunchStepError> {
    let is_protected = std::fs::read_to_string("/proc/self/oom_score_adj")
        .is_ok_and(|score| score.trim_start().starts_with('-'));
    match is_protected {
        true => {
            procfs::write(None, "self/oom_score_adj", "0").doing("reset the OOM score adjustment")
        }
        false => Ok(()),
    }
}

fn receive_plan(report: &mut Reporter) -> Result<(LaunchPlan, PlanDescriptors), LaunchStepError> {
    report.begin_step(LaunchStep::ReceivePlan);
    let (count, mut fds): (usize, Vec<OwnedFd>) = channel::receive(report.socket(), Wait::Block)
        .doing("receive")?
        .ok_or_else(|| LaunchStepError::new("the runner is gone"))?;
    if fds.len() != count || count < 4 {
        return Err(LaunchStepError::new("descriptors were lost on the way"));
    }
    let mut plan = Vec::new();
    io::Read::read_to_end(&mut std::fs::File::from(fds.remove(0)), &mut plan)
        .doing("read the plan")?;
    report.open_log(fds.remove(0));
    let plan: LaunchPlan = serde_json::from_slice(&plan)
        .map_err(|e| LaunchStepError::new(format!("read the plan: {e}")))?;
    plan.spec
        .check()
        .map_err(|e| LaunchStepError::new(e.to_string()))?;
    let mut fds = fds.into_iter();
    let mut next = || {
        fds.next()
            .ok_or_else(|| LaunchStepError::new("a descriptor is missing"))
    };
    let descriptors = PlanDescriptors {
        stdin: plan.stdin.then(&mut next).transpose()?,
        stdout: next()?,
        stderr: next()?,
        workspace: match (plan.spec.workspace_kind, plan.spec.purpose) {
            (WorkspaceKind::Disk, LaunchPurpose::Run) => Some(next()?),
            _ => None,
        },
        cpu_counter: plan.cpu_counter.map(|_| next()).transpose()?,
        oom_counter: plan.oom_counter.then(&mut next).transpose()?,
        attach: (0..plan.attach_files)
            .map(|_| next())
            .collect::<Result<_, _>>()?,
        group_directory: plan.group_directory.then(&mut next).transpose()?,
    };
    Ok((plan, descriptors))
}

/// Gives a newly forked pid 1 the state that a standby launcher has from the start.
fn leave_caller_session(report: &mut Reporter) -> Result<(), LaunchStepError> {
    report.begin_step(LaunchStep::LeaveSession);
    // Fork cleared the parent death signal. If the runner died meanwhile, init's loop sees the control socket closed.
    die_with_parent()?;
    // A new session, so that a terminal's Ctrl-C reaches only the runner.
    rustix::process::setsid().doing("setsid").map(drop)
}
