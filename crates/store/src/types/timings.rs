//! How long each part of a run took, as the runner itself saw it.
//!
//! One process makes one run, so there is one list. A mark says what has just been done; the named steps of `fault.rs`
//! are marks, and the steps of building the sandbox come from its diary.

use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

type Moments = Vec<(String, u64)>;

static MARKS: Mutex<Moments> = Mutex::new(Vec::new());
static DIARY: Mutex<Moments> = Mutex::new(Vec::new());

/// The parts of a run in their order, and how long each took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    pub total_us: u64,
    pub steps: Vec<Part>,
    /// What building the sandbox consisted of.
    pub sandbox: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub name: String,
    pub us: u64,
}

/// Microseconds of the monotonic clock, which the sandbox uses for its own steps too.
fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

/// Notes that something is done; the first one, that the clock runs.
pub fn mark(what: &str) {
    let moment = (what.to_owned(), monotonic_us());
    MARKS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(moment);
}

/// What the sandbox wrote down while it was built; of the last one, should several have been tried.
pub fn built(diary: Vec<(String, u64)>) {
    *DIARY.lock().unwrap_or_else(PoisonError::into_inner) = diary;
}

pub fn so_far() -> Timings {
    let of = |moments: &Mutex<Moments>| {
        let moments = moments.lock().unwrap_or_else(PoisonError::into_inner);
        moments.clone()
    };
    add_up(of(&MARKS), &of(&DIARY))
}

/// The diary says when each step was begun; a mark, when something was done.
fn add_up(mut done: Moments, diary: &Moments) -> Timings {
    // With its last step the sandbox is built; from there on the program runs.
    if let Some((_, last)) = diary.last() {
        let at = done.partition_point(|(_, us)| us <= last);
        done.insert(at, (String::from("sandbox"), *last));
    }
    let took = |pair: &[(String, u64)]| pair[1].1.saturating_sub(pair[0].1);
    let part = |name: &str, us| Part {
        name: name.to_owned(),
        us,
    };
    let ends = done.first().zip(done.last());
    Timings {
        total_us: ends.map_or(0, |(first, last)| last.1.saturating_sub(first.1)),
        steps: done.windows(2).map(|p| part(&p[1].0, took(p))).collect(),
        sandbox: diary.windows(2).map(|p| part(&p[0].0, took(p))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(all: &[(&str, u64)]) -> Moments {
        all.iter()
            .map(|(name, us)| ((*name).to_owned(), *us))
            .collect()
    }

    fn parts(parts: &[Part]) -> Moments {
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
        let diary = list(&[("unshare", 20), ("mount", 30), ("execute", 45)]);
        let timings = add_up(marks, &diary);
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
        assert_eq!(add_up(Vec::new(), &Vec::new()), Timings::default());
    }
}
