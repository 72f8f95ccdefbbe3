//! How long each part of a run took, as measured by the runner.
//!
//! A process makes one run at a time, so there is one global list. A mark names the part that has just ended. The
//! crash points of `crash_points.rs` are marks; the steps of building the sandbox come from the launcher.

use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

type TimePoints = Vec<(String, u64)>;

static MARKS: Mutex<TimePoints> = Mutex::new(Vec::new());
static SANDBOX_STEPS: Mutex<TimePoints> = Mutex::new(Vec::new());

/// The parts of a run in order, and how long each took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// From the first mark to the last, in microseconds.
    pub total_us: u64,
    /// The parts that marks ended.
    pub steps: Vec<TimedPart>,
    /// The steps of building the sandbox.
    pub sandbox: Vec<TimedPart>,
}

/// One part of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimedPart {
    /// The name of the mark that ended the part, or of the step that began it.
    pub name: String,
    /// How long the part took, in microseconds.
    pub us: u64,
}

/// Microseconds of the monotonic clock, the clock that the launcher uses for its steps.
fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

/// Records that the part `what` has just ended, and logs it. The first mark starts the clock.
pub fn mark(what: &str) {
    tracing::debug!(point = what, "reached");
    let point = (what.to_owned(), monotonic_us());
    MARKS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(point);
}

/// Records the steps that the launcher reported. If several sandboxes were tried, the last one counts.
pub fn note_sandbox_steps(sandbox_steps: Vec<(String, u64)>) {
    *SANDBOX_STEPS.lock().unwrap_or_else(PoisonError::into_inner) = sandbox_steps;
}

/// Computes the durations from the times recorded so far.
pub fn read() -> Timings {
    let of = |points: &Mutex<TimePoints>| {
        let points = points.lock().unwrap_or_else(PoisonError::into_inner);
        points.clone()
    };
    compute(of(&MARKS), &of(&SANDBOX_STEPS))
}

/// Computes durations. A time in `sandbox_steps` says when a step began; a mark says when a part ended.
fn compute(mut done: TimePoints, sandbox_steps: &TimePoints) -> Timings {
    // The launcher's last step ends the building of the sandbox. From then on the program runs.
    if let Some((_, last)) = sandbox_steps.last() {
        let at = done.partition_point(|(_, us)| us <= last);
        done.insert(at, (String::from("sandbox"), *last));
    }
    let took = |pair: &[(String, u64)]| pair[1].1.saturating_sub(pair[0].1);
    let part = |name: &str, us| TimedPart {
        name: name.to_owned(),
        us,
    };
    let ends = done.first().zip(done.last());
    Timings {
        total_us: ends.map_or(0, |(first, last)| last.1.saturating_sub(first.1)),
        steps: done.windows(2).map(|p| part(&p[1].0, took(p))).collect(),
        sandbox: sandbox_steps
            .windows(2)
            .map(|p| part(&p[0].0, took(p)))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(all: &[(&str, u64)]) -> TimePoints {
        all.iter()
            .map(|(name, us)| ((*name).to_owned(), *us))
            .collect()
    }

    fn parts(parts: &[TimedPart]) -> TimePoints {
        parts.iter().map(|p| (p.name.clone(), p.us)).collect()
    }

    #[test]
    fn parts_are_what_lies_between_marks() {
        let marks = list(&[
            ("start", 10),
            ("plan", 15),
            ("program", 60),
            ("finished", 70),
        ]);
        let sandbox_steps = list(&[("unshare", 20), ("mount", 30), ("execute", 45)]);
        let timings = compute(marks, &sandbox_steps);
        assert_eq!(timings.total_us, 60);
        let steps = [
            ("plan", 5),
            ("sandbox", 30),
            ("program", 15),
            ("finished", 10),
        ];
        assert_eq!(parts(&timings.steps), list(&steps));
        let building = [("unshare", 10), ("mount", 15)];
        assert_eq!(parts(&timings.sandbox), list(&building));
        assert_eq!(compute(Vec::new(), &Vec::new()), Timings::default());
    }
}
