//! `fumehood doctor --attack`: starts the attack battery of `doctor::attack` and prints its report.

use std::io::Write;

use anyhow::Context;
use doctor::attack::{self, AttackOptions};
use sandbox::events::SignalQueue;
use sandbox::spec::ConfinementLevel;

use super::DoctorArgs;
use crate::cli::messages;

/// The exit code if an act escaped, or if `--strict` finds that the table promises too little.
const FOUND: u8 = 1;

#[derive(Debug, thiserror::Error)]
#[error("the levels are full and landlock")]
pub struct UnknownLevel;

/// Parses the value of `--level`.
pub fn level(name: &str) -> Result<ConfinementLevel, UnknownLevel> {
    let levels = [ConfinementLevel::Full, ConfinementLevel::Landlock];
    let found = levels.into_iter().find(|level| level.as_str() == name);
    found.ok_or(UnknownLevel)
}

pub fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    // SIGHUP, SIGINT and SIGTERM are read between two acts, so that the battery can remove its targets first.
    let wanted = [1, 2, 15];
    let signals = SignalQueue::block(&wanted).context("listen for signals")?;
    let report = attack::run(&AttackOptions {
        level: args.level,
        stop_signal: &|| signals.take(),
        warn: messages::line,
    })?;
    let text = match args.json {
        true => serde_json::to_string(&report).context("write the report as JSON")? + "\n",
        false => report.text(),
    };
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("print the report")?;
    Ok(match report.is_bad(args.strict) {
        true => FOUND,
        false => 0,
    })
}
