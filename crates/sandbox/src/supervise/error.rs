//! Why a run could not be carried out.

use std::io;

use crate::launch_step::LaunchStep;
use crate::spec::SpecError;

/// Fumehood failed to run the program. How a program itself fails is an [`Outcome`](crate::outcome::Outcome) instead.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The spec is invalid.
    #[error("the run is not possible as described")]
    Spec(#[from] SpecError),
    /// The runner itself failed, before or while it supervised.
    #[error("{action}")]
    Start {
        /// What the runner tried to do.
        action: &'static str,
        /// Why that failed.
        source: io::Error,
    },
    /// A launch step failed.
    #[error("{step}: {detail}")]
    Launch {
        /// The step.
        step: LaunchStep,
        /// What the step was doing.
        detail: String,
        /// The kernel's error, if there was one.
        #[source]
        source: Option<io::Error>,
    },
    /// The launcher or init died without a report.
    #[error("the launcher died in the step \"{step}\"")]
    Died {
        /// The step that it had begun last.
        step: LaunchStep,
    },
    /// [`SupervisorHandler::fill`](super::SupervisorHandler::fill) failed.
    #[error("fill the workspace")]
    Fill {
        /// Its error.
        source: io::Error,
    },
}

/// Wraps an I/O error with the action that failed.
pub(super) fn start(action: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |source| RunError::Start { action, source }
}
