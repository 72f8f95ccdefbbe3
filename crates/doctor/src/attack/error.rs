//! Why the battery could not run to its end. What an act achieves is an outcome, never one of these errors.

use std::io;
use std::path::Path;

/// Why the battery stopped. The messages describe the variants.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the variants")]
pub enum AttackError {
    #[error("{operation}")]
    System {
        operation: String,
        source: io::Error,
    },
    #[error("find a place for the battery: {}", .failures.join("; "))]
    NoDirectory { failures: Vec<String> },
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
    #[error("stopped by signal {signal}")]
    Stopped { signal: i32 },
}

/// Turns an error of the system into an [`AttackError`] that says what was being done.
pub trait OperationContext<T> {
    fn operation(self, operation: &str) -> Result<T, AttackError>;
    fn operation_on(self, operation: &str, path: &Path) -> Result<T, AttackError>;
}

impl<T, E: Into<io::Error>> OperationContext<T> for Result<T, E> {
    fn operation(self, operation: &str) -> Result<T, AttackError> {
        self.map_err(|error| AttackError::System {
            operation: operation.into(),
            source: error.into(),
        })
    }

    fn operation_on(self, operation: &str, path: &Path) -> Result<T, AttackError> {
        self.operation(&format!("{operation} {path:?}"))
    }
}
