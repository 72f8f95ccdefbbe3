//! Why the battery could not run to its end. What an act achieves is an outcome, never one of these errors.

use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum AttackError {
    #[error("{operation}")]
    System {
        operation: &'static str,
        source: io::Error,
    },
    #[error("{operation} {path:?}")]
    Path {
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("find a place for the battery: {}", .failures.join("; "))]
    NoDirectory { failures: Vec<String> },
    #[error("start the attacker")]
    AttackerNotStarted { source: Box<AttackError> },
    #[error("the process to be attacked did not get ready")]
    TargetProcessNotReady,
    #[error("start a run to attack: {output}")]
    TargetRunNotStarted { output: String },
    #[error("the run that is attacked did not start: {reason}")]
    AttackedRunNotStarted { reason: String },
    #[error("the run gave no result: {output}")]
    NoRunRecord {
        output: String,
        source: serde_json::Error,
    },
    #[error("the run says it was confined at level {level:?}")]
    UnknownLevel { level: Option<String> },
    #[error("the standard output of a started process is not piped")]
    NoPipe,
    #[error("the thread that ran {act} panicked")]
    ThreadPanicked { act: &'static str },
    #[error("stopped by signal {signal}")]
    Stopped { signal: i32 },
}

impl AttackError {
    /// Makes the closure for `map_err` on a system call.
    pub fn system<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> AttackError {
        move |error| AttackError::System {
            operation,
            source: error.into(),
        }
    }

    /// Makes the closure for `map_err` on an operation on a path.
    pub fn path<E: Into<io::Error>>(
        operation: &'static str,
        path: &Path,
    ) -> impl FnOnce(E) -> AttackError {
        move |error| AttackError::Path {
            operation,
            path: path.to_path_buf(),
            source: error.into(),
        }
    }
}
