//! `fumehood doctor --attack`: the escape battery, in real runs of the product on this host.
//!
//! Each act is first done unconfined, by the same program and on the same kind of target, which proves that it would
//! work here; then in the sandbox. Whether it was done is looked up from outside wherever that is possible. What is
//! found is held against the table of `sandbox::promises`, which is the one in SECURITY.md.

mod battery;
mod lab;
mod report;
mod said;
mod stage;

use std::os::fd::AsFd;

use anyhow::{Context, bail};
use sandbox::spec::ConfinementLevel;

use self::lab::Lab;
use self::report::Report;

/// Something got out, or, if that was asked for, the table is not exact.
const FOUND: u8 = 1;

/// What was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked {
    /// Exactly this level; without it, what a run gets on this host.
    pub level: Option<ConfinementLevel>,
    pub json: bool,
    /// Also fail where an act is refused that the table gives up.
    pub strict: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("the levels are full and landlock")]
pub struct UnknownLevel;

/// A level by its name.
pub fn level(name: &str) -> Result<ConfinementLevel, UnknownLevel> {
    let levels = [ConfinementLevel::Full, ConfinementLevel::Landlock];
    let found = levels.into_iter().find(|level| level.as_str() == name);
    found.ok_or(UnknownLevel)
}

pub fn run(asked: &Asked) -> anyhow::Result<u8> {
    // Taken between two steps, so that nothing is left behind.
    let wanted = [1, 2, 15];
    sandbox::block_signals(Some(&wanted)).context("block signals")?;
    let signals = sandbox::signal_fd(&wanted).context("listen for signals")?;
    let go_on = || match sandbox::read_signal(signals.as_fd()) {
        None => Ok(()),
        Some(n) => bail!("stopped by signal {n}"),
    };
    let lab = Lab::make(asked.level)?;
    let results = battery::run(&lab, &go_on)?;
    drop(lab);
    let report = Report::new(&results, sandbox::landlock_abi());
    match asked.json {
        true => report.print_json()?,
        false => report.print()?,
    }
    Ok(match report.is_bad(asked.strict) {
        true => FOUND,
        false => 0,
    })
}
