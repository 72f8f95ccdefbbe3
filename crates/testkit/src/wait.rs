//! Waiting for what sends no event: processes that are not children of this one, and files that others write. Every
//! wait has a bound, so that a broken promise fails a test instead of hanging it.

use std::time::{Duration, Instant};

/// The bound of [`eventually`] and of every command. Nothing that a trial waits for takes long.
pub const WAIT_MAX: Duration = Duration::from_secs(120);

/// Waits until `holds`, and panics with `what` after [`WAIT_MAX`].
#[track_caller]
pub fn eventually(what: &str, holds: impl FnMut() -> bool) {
    let held = poll_until(WAIT_MAX, Duration::from_millis(2), holds);
    assert!(held, "waited in vain: {what}");
}

/// Calls `holds` once per `interval` until it returns true. Returns false if that takes longer than `bound`.
pub fn poll_until(bound: Duration, interval: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let give_up = Instant::now() + bound;
    while !holds() {
        if Instant::now() > give_up {
            return false;
        }
        std::thread::sleep(interval);
    }
    true
}
