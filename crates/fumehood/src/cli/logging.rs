//! `FUMEHOOD_LOG`: prints on stderr what Fumehood does. Off by default.
//!
//! Only processes outside the sandbox log. The launcher and what it starts are forked before the log is on, or executed
//! with an empty environment.

use std::io::{self, Write};
use std::str::FromStr;
use std::time::Duration;

use rustix::event::PollFlags;
use sandbox::events;
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

/// A pipe that has room at all has room for this many bytes (PIPE_BUF).
const LINE_BYTES_MAX: usize = 4096;

/// Standard error, for whole lines. A line that nobody takes at once is dropped: the log must not stop a run, a renewal of
/// a lease or a worker. A long line is cut.
struct LossyStderr;

impl Write for LossyStderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let stderr = io::stderr();
        if events::wait_for(&stderr, PollFlags::OUT, Duration::ZERO) {
            match line.get(..LINE_BYTES_MAX - 1) {
                None => stderr.lock().write_all(line)?,
                Some(head) => stderr.lock().write_all(&[head, b"\n"].concat())?,
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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
        .with_writer(|| LossyStderr)
        .with_ansi(false);
    let subscriber = tracing_subscriber::registry().with(lines.with_filter(ours));
    tracing::subscriber::set_global_default(subscriber).expect("this process sets it once");
    tracing::debug!(version = env!("CARGO_PKG_VERSION"), "started");
    Ok(())
}
