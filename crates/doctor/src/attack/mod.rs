//! `fumehood doctor --attack`: the battery of attacks, in real runs of the installed binary on this host.
//!
//! The battery does each act twice. First the attacker acts unconfined, on the same kind of target: this control proves
//! that the act works on this host. Then the same attacker acts in a sandbox. Wherever possible, the battery looks from
//! outside whether the act took effect, rather than believing the attacker. It compares the outcomes with
//! `sandbox::promises`, the table that SECURITY.md prints.
//!
//! In reading order:
//! - `testbed`: the directory of the battery, the attacker's binary, and the processes it starts.
//! - `targets`: what is attacked, and the evidence that an attack succeeded.
//! - `attack_output`: what the attacker prints.
//! - `battery`: the acts themselves, control and confined.
//! - `report`: the outcomes compared with the promises.

mod attack_output;
mod battery;
mod error;
mod report;
mod targets;
mod testbed;

use sandbox::spec::ConfinementLevel;

pub use self::error::AttackError;
pub use self::report::AttackReport;
use self::testbed::Testbed;

/// What to attack, and how to reach the caller meanwhile.
pub struct AttackOptions<'a> {
    /// Attack exactly this level; `None` attacks the level that a run gets on this host.
    pub level: Option<ConfinementLevel>,
    /// Returns a signal that asks the battery to stop. The battery asks between two acts, so that it can remove the
    /// targets first.
    pub stop_signal: &'a dyn Fn() -> Option<i32>,
    /// Receives a message about a directory that the battery cannot remove.
    pub warn: fn(&str),
}

/// Runs the whole battery and removes what it made.
pub fn run(options: &AttackOptions<'_>) -> Result<AttackReport, AttackError> {
    let testbed = Testbed::make(options)?;
    let results = battery::run(&testbed, options.stop_signal)?;
    drop(testbed);
    Ok(AttackReport::new(&results, sandbox::landlock_abi()))
}
