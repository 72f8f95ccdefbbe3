//! Chooses the level of confinement: exactly the one that was asked for, or the strongest that this host supports, and
//! never below the floor.
//!
//! The run itself is the first try; see `execute`. If the launch fails at level `full`, a small sandbox that contains nothing of the
//! request is tried. If that small sandbox fails too, the host does not support the level, and Fumehood tries the next level.
//! So nothing in a request, such as a path that cannot be mounted, can lower the level.

use sandbox::probe;
use sandbox::spec::{ConfinementLevel, Layer};

use crate::attempt::context::RunContext;
use crate::attempt::error::AttemptError;
use crate::attempt::states::ProgramRun;
use crate::settings::Request;

/// The levels that may be tried, the strongest first.
pub fn allowed_levels(request: &Request) -> Result<Vec<ConfinementLevel>, AttemptError> {
    let high_enough =
        |level: &ConfinementLevel| crate::request::IsolationLevel::from(*level) >= request.floor;
    match request.level {
        Some(level) if high_enough(&level) => Ok(vec![level]),
        Some(asked) => Err(AttemptError::BelowFloor {
            asked,
            floor: request.floor,
        }),
        None => Ok([ConfinementLevel::Full, ConfinementLevel::Landlock]
            .into_iter()
            .filter(high_enough)
            .collect()),
    }
}

/// Returns true if the launch failed and a probe of level `full` fails too. When a launch fails, nothing of the program
/// has run.
pub(super) fn host_lacks_full(error: &AttemptError, context: &RunContext) -> bool {
    matches!(error, AttemptError::Start(_))
        && probe::try_level(&context.launcher, ConfinementLevel::Full).is_err()
}

pub(super) fn step_down_notice(why: &str) -> String {
    format!(
        "level full cannot be had here ({why}); this run has level landlock. `fumehood doctor` says how to get more"
    )
}

/// What the result must say where the confinement is weaker than it might be.
pub(super) fn confinement_notices(ran: &ProgramRun, stepped_down: Option<&str>) -> Vec<String> {
    let landlock = ran
        .layers
        .iter()
        .any(|(layer, _)| *layer == Layer::Landlock);
    // The run was cancelled before the program started.
    let nothing_ran = ran.layers.is_empty();
    match (ran.level, stepped_down) {
        (ConfinementLevel::Landlock, Some(why)) => vec![step_down_notice(why)],
        (ConfinementLevel::Full, _) if !landlock && !nothing_ran => vec![String::from(
            "this kernel has no Landlock, or has it switched off; the other layers confined the run",
        )],
        _ => Vec::new(),
    }
}
