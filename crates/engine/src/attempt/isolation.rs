//! Which level a run gets: exactly the one asked for, or the strongest that this host gives, never below the floor.
//!
//! The run itself is the first attempt. Should it not come about at level `full`, a miniature sandbox that has nothing of
//! the request in it is tried: only if that fails too can this host not give the level, and the next is tried. So
//! nothing that a request brings with it, a path that cannot be mounted or the like, can talk us down.

use sandbox::probe;
use sandbox::spec::{ConfinementLevel, Enforcement, Layer, Limits};

use crate::attempt::pipeline::{Audience, PipelineError, Surroundings};
use crate::attempt::recorder::Ledger;
use crate::attempt::{Attempt, Ran};
use crate::plan::Plan;
use crate::plan::limits::{Storage, error_chain};
use crate::request::Request;

/// One run, ready to start.
pub(crate) struct Errand<'a> {
    pub request: &'a Request,
    pub around: &'a Surroundings,
    pub plan: &'a Plan,
    pub limits: &'a Limits,
    pub storage: Storage,
}

/// The levels that may be tried, the strongest first.
pub fn candidates(request: &Request) -> Result<Vec<ConfinementLevel>, PipelineError> {
    let high_enough =
        |level: &ConfinementLevel| crate::request::Level::from(*level) >= request.floor;
    match request.level {
        Some(level) if high_enough(&level) => Ok(vec![level]),
        Some(asked) => Err(PipelineError::BelowFloor {
            asked,
            floor: request.floor,
        }),
        None => Ok([ConfinementLevel::Full, ConfinementLevel::Landlock]
            .into_iter()
            .filter(high_enough)
            .collect()),
    }
}

/// Runs at the strongest of the levels that may be tried.
pub(crate) fn strongest(
    attempt: &mut Attempt,
    errand: &Errand<'_>,
    mut ledger: Option<&mut Ledger>,
    audience: &mut dyn Audience,
) -> Result<(Vec<Enforcement>, Ran), PipelineError> {
    let levels = candidates(errand.request)?;
    let mut stepped_down: Option<String> = None;
    for level in &levels {
        let last = levels.last() == Some(level);
        match at(attempt, errand, *level, ledger.as_deref_mut(), audience) {
            Ok((enforcement, mut ran)) => {
                ran.notices = weaker(&ran, stepped_down.as_deref());
                // The reason for stepping down was told before the program ran.
                if stepped_down.is_none() {
                    ran.notices.iter().for_each(|text| audience.notice(text));
                }
                return Ok((enforcement, ran));
            }
            Err(error) if !last && not_to_be_had(&error, errand.around) => {
                let why = error_chain(&error);
                audience.notice(&no_namespaces(&why));
                stepped_down = Some(why);
            }
            Err(error) => {
                return Err(match stepped_down {
                    None => error,
                    Some(full) => PipelineError::NoLevel {
                        full,
                        landlock: Box::new(error),
                    },
                });
            }
        }
    }
    Err(PipelineError::Cancelled)
}

fn at(
    attempt: &mut Attempt,
    errand: &Errand<'_>,
    level: ConfinementLevel,
    ledger: Option<&mut Ledger>,
    audience: &mut dyn Audience,
) -> Result<(Vec<Enforcement>, Ran), PipelineError> {
    let enforcement = attempt.enforcement(errand.request, errand.limits, errand.storage, level)?;
    let ran = attempt.execute(errand, level, ledger, audience)?;
    Ok((enforcement, ran))
}

/// Whether this host does not give the level at all. Nothing of the program has run when a launch fails.
fn not_to_be_had(error: &PipelineError, around: &Surroundings) -> bool {
    matches!(error, PipelineError::Start(_))
        && probe::try_level(&around.launcher, ConfinementLevel::Full).is_err()
}

fn no_namespaces(why: &str) -> String {
    format!(
        "level full cannot be had here ({why}); this run has level landlock. `fumehood doctor` says how to get more"
    )
}

/// What the result must say about confinement that is less than it might be.
fn weaker(ran: &Ran, stepped_down: Option<&str>) -> Vec<String> {
    let landlock = ran
        .layers
        .iter()
        .any(|(layer, _)| *layer == Layer::Landlock);
    // Cancelled before the program began.
    let nothing_ran = ran.layers.is_empty();
    match (ran.level, stepped_down) {
        (ConfinementLevel::Landlock, Some(why)) => vec![no_namespaces(why)],
        (ConfinementLevel::Full, _) if !landlock && !nothing_ran => vec![String::from(
            "this kernel has no Landlock, or has it switched off: the run rested on the other layers",
        )],
        _ => Vec::new(),
    }
}
