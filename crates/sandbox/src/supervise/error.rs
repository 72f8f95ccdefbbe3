//! Why a run could not be carried out.

use std::io;

use crate::spec::SpecError;

/// Fumehood failed to run the program. How a program itself fails is an [`Outcome`](crate::outcome::Outcome) instead.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("the run is not possible as described")]
    Spec(#[from] SpecError),
    #[error("{action}")]
    Start {
        action: &'static str,
        source: io::Error,
    },
    #[error("{step}: {detail}")]
    Step {
        step: String,
        detail: String,
        #[source]
        source: Option<io::Error>,
    },
    #[error("the launcher died in the step \"{step}\"")]
    Died { step: String },
    #[error("fill the workspace")]
    Fill { source: io::Error },
}

/// Wraps an I/O error with the action that failed.
pub(super) fn start(action: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |source| RunError::Start { action, source }
}
