//! `FUMEHOOD_LOG`: prints on stderr what Fumehood does. Off by default.
//!
//! Only processes outside the sandbox log. The launcher and what it starts are forked before the log is on, or executed
//! with an empty environment.

use std::str::FromStr;

use thiserror::Error;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;

pub const VARIABLE: &str = "FUMEHOOD_LOG";

/// The crates whose events are printed. Those of libraries would print SQL and network addresses.
const CRATES: [&str; 5] = ["fumehood", "doctor", "engine", "store", "sandbox"];

#[derive(Debug, Error)]
#[error("{VARIABLE} is {given:?}; set it to off, error, warn, info, debug or trace")]
pub struct LogLevelError {
    given: String,
}

/// Prints events from now on, if the variable asks for that.
pub fn start() -> Result<(), LogLevelError> {
    let Some(given) = std::env::var_os(VARIABLE).filter(|given| !given.is_empty()) else {
        return Ok(());
    };
    let given = given.to_string_lossy();
    let level = LevelFilter::from_str(&given).map_err(|_| LogLevelError {
        given: given.clone().into_owned(),
    })?;
    let ours = Targets::new().with_targets(CRATES.map(|name| (name, level)));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false);
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(ours));
    tracing::subscriber::set_global_default(subscriber).expect("this process sets it once");
    tracing::debug!(version = env!("CARGO_PKG_VERSION"), "started");
    Ok(())
}
