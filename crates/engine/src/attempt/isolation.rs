//! Chooses the level of confinement: exactly the one that was asked for, or the strongest that this host supports, and
//! never below the floor.
//!
//! The run itself is the first try. If the launch fails at level `full`, a small sandbox that contains nothing of the
//! request is tried. Only if that fails too does the host not support the level, and the next level is tried. So
//! nothing in a request, such as a path that cannot be mounted, can lower the level.

use sandbox::probe;
use sandbox::spec::{ConfinementLevel, Enforcement, Layer};

use crate::attempt::context::{LaunchRequest, RunContext};
use crate::attempt::error::AttemptError;
use crate::attempt::observer::RunObserver;
use crate::attempt::recorder::Recorder;
use crate::attempt::state::{Attempt, ProgramRun};
use crate::plan::limits::error_chain;
use crate::request::Request;

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

/// Runs the program at the strongest allowed level that this host supports.
pub(crate) fn run_at_strongest_level(
    attempt: &mut Attempt,
    launch: &LaunchRequest<'_>,
    mut recorder: Option<&mut Recorder>,
    observer: &mut dyn RunObserver,
) -> Result<(Vec<Enforcement>, ProgramRun), AttemptError> {
    let levels = allowed_levels(launch.request)?;
    let mut stepped_down: Option<String> = None;
    for level in &levels {
        let last = levels.last() == Some(level);
        match run_at(attempt, launch, *level, recorder.as_deref_mut(), observer) {
            Ok((enforcement, mut ran)) => {
                ran.notices = confinement_notices(&ran, stepped_down.as_deref());
                // The notice about a lower level was given before the program ran.
                if stepped_down.is_none() {
                    ran.notices.iter().for_each(|text| observer.notice(text));
                }
                return Ok((enforcement, ran));
            }
            Err(error) if !last && is_level_unavailable(&error, launch.context) => {
                let why = error_chain(&error);
                observer.notice(&step_down_notice(&why));
                stepped_down = Some(why);
            }
            Err(error) => {
                return Err(match stepped_down {
                    None => error,
                    Some(full) => AttemptError::NoLevel {
                        full,
                        landlock: Box::new(error),
                    },
                });
            }
        }
    }
    Err(AttemptError::Cancelled)
}

fn run_at(
    attempt: &mut Attempt,
    launch: &LaunchRequest<'_>,
    level: ConfinementLevel,
    recorder: Option<&mut Recorder>,
    observer: &mut dyn RunObserver,
) -> Result<(Vec<Enforcement>, ProgramRun), AttemptError> {
    let enforcement = attempt.enforcement(launch.request, launch.limits, launch.storage, level)?;
    let ran = attempt.execute(launch, level, recorder, observer)?;
    Ok((enforcement, ran))
}

/// Whether this host does not support the level at all. When a launch fails, nothing of the program has run.
fn is_level_unavailable(error: &AttemptError, context: &RunContext) -> bool {
    matches!(error, AttemptError::Start(_))
        && probe::try_level(&context.launcher, ConfinementLevel::Full).is_err()
}

fn step_down_notice(why: &str) -> String {
    format!(
        "level full cannot be had here ({why}); this run has level landlock. `fumehood doctor` says how to get more"
    )
}

/// What the result must say where the confinement is weaker than it might be.
fn confinement_notices(ran: &ProgramRun, stepped_down: Option<&str>) -> Vec<String> {
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
