//! What the processes inside tell the runner while they build the sandbox: the step they are in, the layers in force, and the
//! step that failed.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::channel::{self, MESSAGE_BYTES_MAX, Order, Report, Wait};
use crate::spec::Layer;
use crate::sys::monotonic_us;

/// Says what is being done, and what went wrong, from inside.
pub struct Reporter {
    socket: OwnedFd,
    step: String,
    /// Where steps are written down, once there is a plan: if nothing follows, that is where it died.
    diary: Option<OwnedFd>,
    /// Those before.
    early: String,
    /// Those that this process, or one that it was forked from, has put in force.
    layers: Vec<(Layer, String)>,
}

/// What was written down: each step, and when it was begun, by [`monotonic_us`].
pub fn read_diary(diary: BorrowedFd<'_>) -> Vec<(String, u64)> {
    const DIARY_BYTES_MAX: usize = 64 << 10;
    let mut bytes = vec![0u8; DIARY_BYTES_MAX];
    let len = rustix::io::pread(diary, &mut bytes, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..len]);
    let entry = |line: &str| {
        let (at, step) = line.split_once(' ')?;
        Some((step.to_owned(), at.parse().ok()?))
    };
    text.lines().filter_map(entry).collect()
}

/// A step that failed: its errno where the kernel gave one, and what it was working on.
#[derive(Debug)]
pub struct StepError {
    pub errno: Option<i32>,
    pub detail: String,
}

impl StepError {
    pub fn new(detail: impl Into<String>) -> Self {
        StepError {
            errno: None,
            detail: detail.into(),
        }
    }
}

/// Adds to an error what it was about.
pub trait During<T> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, StepError>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T, StepError> {
        self.map_err(|e| {
            let error: io::Error = e.into();
            let what = what();
            match error.raw_os_error() {
                Some(errno) => StepError {
                    errno: Some(errno),
                    detail: what,
                },
                None => StepError {
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
            diary: None,
            early: String::new(),
            layers: Vec::new(),
        }
    }

    pub fn write_into(&mut self, diary: OwnedFd) {
        let _no_room = rustix::io::write(&diary, self.early.as_bytes());
        self.diary = Some(diary);
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Writes down what is about to be done. Nobody is woken by it: the runner reads it when it needs to know.
    pub fn step(&mut self, step: &str) {
        step.clone_into(&mut self.step);
        let entry = format!("{} {step}\n", monotonic_us());
        match &self.diary {
            Some(diary) => {
                let _no_room = rustix::io::write(diary, entry.as_bytes());
            }
            None => self.early.push_str(&entry),
        }
    }

    /// For a process beside the one that goes on with the steps.
    pub fn meanwhile(&mut self, step: &str) {
        step.clone_into(&mut self.step);
    }

    pub fn current_step(&self) -> &str {
        &self.step
    }

    pub fn layer(&mut self, layer: Layer, how: &str) {
        self.layers.push((layer, how.to_owned()));
    }

    /// Everything is in force. The runner may be gone; then there is nobody to tell, and init will notice.
    pub fn started(&self) {
        let layers = self.layers.clone();
        self.tell(&Report::Started { layers }, &[]);
    }

    /// The operator's floor: what has not been put in force by now is not.
    pub fn require(&self, required: &BTreeSet<Layer>) -> Result<(), StepError> {
        let missing = |layer: &&Layer| self.layers.iter().all(|(there, _)| there != *layer);
        match required.iter().find(missing) {
            None => Ok(()),
            Some(missing) => Err(StepError::new(format!(
                "the operator's policy requires the layer {}, which is not in force here",
                missing.as_str()
            ))),
        }
    }

    pub fn tell(&self, report: &Report, descriptors: &[BorrowedFd<'_>]) {
        let _gone = channel::send(self.socket(), report, descriptors);
    }

    pub fn failed(&self, error: StepError) {
        let mut detail = error.detail;
        // As JSON each byte may become six.
        detail.truncate(detail.floor_char_boundary(MESSAGE_BYTES_MAX / 8));
        self.tell(
            &Report::Failed {
                step: self.step.clone(),
                errno: error.errno,
                detail,
            },
            &[],
        );
    }

    pub fn receive_order(&self, wait: Wait) -> io::Result<Option<Order>> {
        Ok(channel::receive(self.socket(), wait)?.map(|(order, _)| order))
    }
}
