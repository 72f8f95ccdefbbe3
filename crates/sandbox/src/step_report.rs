//! How the processes that build the sandbox report to the runner: the step in progress, the layers in force, and the
//! step that failed.
//!
//! Each step is written to the *step log*, a memory file that the runner shares, before it is tried. If the launcher
//! dies without a report, the log's last line names the step it died in.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::channel::{self, InitCommand, MESSAGE_BYTES_MAX, SandboxReport, Wait};
use crate::launch_step::LaunchStep;
use crate::spec::Layer;
use crate::sys::monotonic_us;

/// Reports steps, layers and failures from inside the sandbox to the runner.
pub struct Reporter {
    socket: OwnedFd,
    step: LaunchStep,
    /// The step log. It arrives with the plan.
    step_log: Option<OwnedFd>,
    /// Log lines of the steps before the step log arrived.
    unsent_log: String,
    /// The layers that this process, or a process that it was forked from, has put in force.
    layers: Vec<(Layer, String)>,
}

/// Reads the step log: each step, and the [`monotonic_us`] time at which it began. Each line of the log holds the time
/// and the number of a step.
pub fn read_step_log(step_log: BorrowedFd<'_>) -> Vec<(LaunchStep, u64)> {
    const STEP_LOG_BYTES_MAX: usize = 64 << 10;
    let mut bytes = vec![0u8; STEP_LOG_BYTES_MAX];
    let len = rustix::io::pread(step_log, &mut bytes, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..len]);
    let entry = |line: &str| {
        let (at, step) = line.split_once(' ')?;
        let step = LaunchStep::ALL.get(step.parse::<usize>().ok()?)?;
        Some((*step, at.parse().ok()?))
    };
    text.lines().filter_map(entry).collect()
}

/// Why a step failed: the kernel's errno, if it gave one, and what the step was doing.
#[derive(Debug)]
pub struct LaunchStepError {
    pub errno: Option<i32>,
    pub detail: String,
}

impl LaunchStepError {
    pub fn new(detail: impl Into<String>) -> Self {
        LaunchStepError {
            errno: None,
            detail: detail.into(),
        }
    }
}

/// Turns an error into a [`LaunchStepError`] that says what was being done.
pub trait StepContext<T>: Sized {
    fn step_context(self, what: impl FnOnce() -> String) -> Result<T, LaunchStepError>;

    /// As [`step_context`](Self::step_context), with a constant text.
    fn doing(self, what: &str) -> Result<T, LaunchStepError> {
        self.step_context(|| what.to_owned())
    }
}

impl<T, E: Into<io::Error>> StepContext<T> for Result<T, E> {
    fn step_context(self, what: impl FnOnce() -> String) -> Result<T, LaunchStepError> {
        self.map_err(|e| {
            let error: io::Error = e.into();
            let errno = error.raw_os_error();
            let detail = match errno {
                Some(_) => what(),
                None => format!("{}: {error}", what()),
            };
            LaunchStepError { errno, detail }
        })
    }
}

impl Reporter {
    pub fn new(socket: OwnedFd) -> Self {
        Reporter {
            socket,
            step: LaunchStep::StartLauncher,
            step_log: None,
            unsent_log: String::new(),
            layers: Vec::new(),
        }
    }

    /// Starts writing to the step log, with the steps so far.
    pub fn open_log(&mut self, step_log: OwnedFd) {
        // The log is only a diagnostic, so a failed write does not stop the launch.
        let _ = rustix::io::write(&step_log, self.unsent_log.as_bytes());
        self.step_log = Some(step_log);
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Logs the step that is about to be tried. This does not wake the runner, which reads the log only when it needs
    /// it.
    pub fn begin_step(&mut self, step: LaunchStep) {
        self.step = step;
        let entry = format!("{} {}\n", monotonic_us(), step as u8);
        match &self.step_log {
            Some(step_log) => {
                // The log is only a diagnostic, so a failed write does not stop the launch.
                let _ = rustix::io::write(step_log, entry.as_bytes());
            }
            None => self.unsent_log.push_str(&entry),
        }
    }

    /// Names the step for error reports without logging it. For a process that works in parallel to the one whose steps
    /// are logged.
    pub fn set_step_unlogged(&mut self, step: LaunchStep) {
        self.step = step;
    }

    pub fn current_step(&self) -> LaunchStep {
        self.step
    }

    pub fn add_layer(&mut self, layer: Layer, how: &str) {
        self.layers.push((layer, how.to_owned()));
    }

    /// Reports that all layers are in force. If the runner is gone the message is lost, and init notices the closed
    /// socket.
    pub fn send_started(&self) {
        let layers = self.layers.clone();
        self.send(&SandboxReport::Started { layers }, &[]);
    }

    /// Checks the operator's floor. To be called after the last layer: fails if a required layer is not in force.
    pub fn require_layers(&self, required: &BTreeSet<Layer>) -> Result<(), LaunchStepError> {
        let missing = |layer: &&Layer| self.layers.iter().all(|(in_force, _)| in_force != *layer);
        match required.iter().find(missing) {
            None => Ok(()),
            Some(missing) => Err(LaunchStepError::new(format!(
                "the operator's policy requires the layer {}, which is not in force here",
                missing.as_str()
            ))),
        }
    }

    /// Sends a report. An error is ignored: it means that the runner is gone, and init notices the closed socket.
    pub fn send(&self, report: &SandboxReport, descriptors: &[BorrowedFd<'_>]) {
        let _ = channel::send(self.socket(), report, descriptors);
    }

    pub fn send_failure(&self, error: LaunchStepError) {
        let mut detail = error.detail;
        // JSON may escape one byte as six, and the whole message must fit.
        detail.truncate(detail.floor_char_boundary(MESSAGE_BYTES_MAX / 8));
        self.send(
            &SandboxReport::Failed {
                step: self.step,
                errno: error.errno,
                detail,
            },
            &[],
        );
    }

    pub fn receive_command(&self, wait: Wait) -> io::Result<Option<InitCommand>> {
        Ok(channel::receive(self.socket(), wait)?.map(|(command, _)| command))
    }
}
