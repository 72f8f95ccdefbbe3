//! Descriptors 0, 1 and 2 of the program: pipes, `/dev/null`, or a terminal of the sandbox's own devpts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;

use crate::channel::SandboxReport;
use crate::launch_step::LaunchStep;
use crate::plan::PlanDescriptors;
use crate::spec::{Spec, Terminal};
use crate::step_report::{LaunchStepError, Reporter, StepContext};
use crate::sys;

/// Opens a terminal in the sandbox's own devpts and sends its outer end to the runner.
pub(super) fn open_terminal(
    spec: &Spec,
    report: &mut Reporter,
) -> Result<Option<OwnedFd>, LaunchStepError> {
    let Terminal::Own { rows, columns } = spec.terminal else {
        return Ok(None);
    };
    report.begin_step(LaunchStep::OpenTerminal);
    let flags = OFlags::RDWR | OFlags::NOCTTY;
    let outer = sys::open("/dev/ptmx", flags).doing("open /dev/ptmx")?;
    rustix::pty::unlockpt(&outer).doing("unlock the terminal")?;
    sys::set_terminal_size(&outer, rows, columns).doing("set the terminal's size")?;
    let open_flags = rustix::pty::OpenptFlags::RDWR
        | rustix::pty::OpenptFlags::NOCTTY
        | rustix::pty::OpenptFlags::CLOEXEC;
    let inner = rustix::pty::ioctl_tiocgptpeer(&outer, open_flags).doing("open the terminal")?;
    report.send(&SandboxReport::Terminal, &[outer.as_fd()]);
    Ok(Some(inner))
}

/// Puts the pipes or the terminal at descriptors 0, 1 and 2.
pub(super) fn place(
    descriptors: &PlanDescriptors,
    terminal: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    if let Some(terminal) = terminal {
        for number in 0..3 {
            sys::place_descriptor(terminal, number)?;
        }
        return sys::make_controlling_terminal(rustix::stdio::stdin());
    }
    match &descriptors.stdin {
        Some(pipe) => sys::place_descriptor(pipe.as_fd(), 0)?,
        None => {
            let null = sys::open("/dev/null", OFlags::RDONLY)?;
            sys::place_descriptor(null.as_fd(), 0)?;
        }
    }
    sys::place_descriptor(descriptors.stdout.as_fd(), 1)?;
    sys::place_descriptor(descriptors.stderr.as_fd(), 2)
}
