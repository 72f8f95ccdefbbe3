//! What the processes inside tell the runner while they build the sandbox: the step they are in, the layers in force, and the
//! step that failed.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::channel::{self, InitOrder, MESSAGE_BYTES_MAX, SandboxReport, Wait};
use crate::spec::Layer;
use crate::sys::monotonic_us;

/// Says what is being done, and what went wrong, from inside.
pub struct Reporter {
    socket: OwnedFd,
    step: String,
    /// Where steps are written down, once there is a plan: if nothing follows, that is where it died.
    step_log: Option<OwnedFd>,
    /// Those before.
    unsent_log: String,
    /// Those that this process, or one that it was forked from, has put in force.
    layers: Vec<(Layer, String)>,
}

/// What was written down: each step, and when it was begun, by [`monotonic_us`].
pub fn read_step_log(step_log: BorrowedFd<'_>) -> Vec<(String, u64)> {
    const STEP_LOG_BYTES_MAX: usize = 64 << 10;
    let mut bytes = vec![0u8; STEP_LOG_BYTES_MAX];
    let len = rustix::io::pread(step_log, &mut bytes, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..len]);
    let entry = |line: &str| {
        let (at, step) = line.split_once(' ')?;
        Some((step.to_owned(), at.parse().ok()?))
    };
    text.lines().filter_map(entry).collect()
}

/// A step that failed: its errno where the kernel gave one, and what it was working on.
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

/// Adds to an error what it was about.
pub trait StepContext<T> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, LaunchStepError>;
}

impl<T, E: Into<io::Error>> StepContext<T> for Result<T, E> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, LaunchStepError> {
        self.map_err(|e| {
            let error: io::Error = e.into();
            let what = what();
            match error.raw_os_error() {
                Some(errno) => LaunchStepError {
                    errno: Some(errno),
                    detail: what,
                },
                None => LaunchStepError {
                    errno: None,
                    detail: format!("{what}: {error}"),
                },
            }
        })
    }
}

impl Reporter {
    pub fn new(socket: OwnedFd) -> Self {
        Reporter {
            socket,
            step: String::from("start"),
            step_log: None,
            unsent_log: String::new(),
            layers: Vec::new(),
        }
    }

    pub fn open_log(&mut self, step_log: OwnedFd) {
        // The log is only for people; a full memory file costs nothing else.
        let _ = rustix::io::write(&step_log, self.unsent_log.as_bytes());
        self.step_log = Some(step_log);
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Writes down what is about to be done. Nobody is woken by it: the runner reads it when it needs to know.
    pub fn begin_step(&mut self, step: &str) {
        step.clone_into(&mut self.step);
        let entry = format!("{} {step}\n", monotonic_us());
        match &self.step_log {
            Some(step_log) => {
                // The log is only for people; a full memory file costs nothing else.
                let _ = rustix::io::write(step_log, entry.as_bytes());
            }
            None => self.unsent_log.push_str(&entry),
        }
    }

    /// For a process beside the one that goes on with the steps.
    pub fn set_step_unlogged(&mut self, step: &str) {
        step.clone_into(&mut self.step);
    }

    pub fn current_step(&self) -> &str {
        &self.step
    }

    pub fn add_layer(&mut self, layer: Layer, how: &str) {
        self.layers.push((layer, how.to_owned()));
    }

    /// Everything is in force. The runner may be gone; then there is nobody to tell, and init will notice.
    pub fn send_started(&self) {
        let layers = self.layers.clone();
        self.send(&SandboxReport::Started { layers }, &[]);
    }

    /// The operator's floor: what has not been put in force by now is not.
    pub fn require_layers(&self, required: &BTreeSet<Layer>) -> Result<(), LaunchStepError> {
        let missing = |layer: &&Layer| self.layers.iter().all(|(there, _)| there != *layer);
        match required.iter().find(missing) {
            None => Ok(()),
            Some(missing) => Err(LaunchStepError::new(format!(
                "the operator's policy requires the layer {}, which is not in force here",
                missing.as_str()
            ))),
        }
    }

    pub fn send(&self, report: &SandboxReport, descriptors: &[BorrowedFd<'_>]) {
        let _ = channel::send(self.socket(), report, descriptors);
    }

    pub fn send_failure(&self, error: LaunchStepError) {
        let mut detail = error.detail;
        // As JSON each byte may become six.
        detail.truncate(detail.floor_char_boundary(MESSAGE_BYTES_MAX / 8));
        self.send(
            &SandboxReport::Failed {
                step: self.step.clone(),
                errno: error.errno,
                detail,
            },
            &[],
        );
    }

    pub fn receive_order(&self, wait: Wait) -> io::Result<Option<InitOrder>> {
        Ok(channel::receive(self.socket(), wait)?.map(|(order, _)| order))
    }
}
