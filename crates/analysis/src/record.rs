//! How an analysis ended, in the words of the design, as the document that `--json` prints.
//!
//! The schema is `docs/result-v1.schema.json`. Status and reason come from the sandbox's outcome: the kernel's
//! facts and our own timers. Nothing the program printed can change them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use sandbox::outcome::{Exit, Outcome, Stop};
use sandbox::spec::{Enforcement, Hardness, Layer, LimitName};
use serde::Serialize;

use crate::hints::Hint;
use crate::logs::Captured;
use crate::request::{AnalysisId, Level};

pub const SCHEMA: &str = "fumehood.result/1";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Succeeded,
    Failed,
    TimedOut,
    OutOfMemory,
    LimitExceeded,
    Cancelled,
    /// Ours, never the program's.
    Error,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Succeeded => "succeeded",
            Status::Failed => "failed",
            Status::TimedOut => "timed_out",
            Status::OutOfMemory => "out_of_memory",
            Status::LimitExceeded => "limit_exceeded",
            Status::Cancelled => "cancelled",
            Status::Error => "error",
        }
    }
}

/// Tells more than the status; one word each, listed in the schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    Exit,
    Signal,
    WallTime,
    CpuTime,
    IdleTime,
    OomKilled,
    MemoryWatch,
    Disk,
    FileSize,
    Files,
    Cancelled,
    /// Init was killed from outside before it could tell.
    InitLost,
    Unkillable,
    /// Fumehood could not start it; the message says at which step.
    NotStarted,
    NotFound,
    NotExecutable,
}

/// Status and reason, from facts.
pub fn judge(outcome: &Outcome) -> (Status, Reason) {
    if !outcome.all_dead {
        return (Status::Error, Reason::Unkillable);
    }
    match outcome.stop {
        Some(Stop::WallTime) => return (Status::TimedOut, Reason::WallTime),
        Some(Stop::CpuTime) => return (Status::TimedOut, Reason::CpuTime),
        Some(Stop::IdleTime) => return (Status::TimedOut, Reason::IdleTime),
        Some(Stop::Memory) => return (Status::OutOfMemory, Reason::MemoryWatch),
        Some(Stop::Disk) => return (Status::LimitExceeded, Reason::Disk),
        Some(Stop::Files) => return (Status::LimitExceeded, Reason::Files),
        Some(Stop::Cancelled) => return (Status::Cancelled, Reason::Cancelled),
        None => {}
    }
    const SIGKILL: i32 = 9;
    const SIGXCPU: i32 = 24;
    const SIGXFSZ: i32 = 25;
    match outcome.exit {
        Some(Exit::Code(0)) => (Status::Succeeded, Reason::Exit),
        Some(Exit::Code(_)) => (Status::Failed, Reason::Exit),
        // Only the kernel's killer and we send it to all; a child's death by it is not the program's.
        Some(Exit::Signal(SIGKILL)) if outcome.usage.oom_kills > 0 => {
            (Status::OutOfMemory, Reason::OomKilled)
        }
        Some(Exit::Signal(SIGXFSZ)) => (Status::LimitExceeded, Reason::FileSize),
        Some(Exit::Signal(SIGXCPU)) => (Status::TimedOut, Reason::CpuTime),
        Some(Exit::Signal(_)) => (Status::Failed, Reason::Signal),
        None if outcome.usage.oom_kills > 0 => (Status::OutOfMemory, Reason::OomKilled),
        None => (Status::Error, Reason::InitLost),
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct Log {
    /// Valid UTF-8 as it is; other bytes as `\xNN`, a backslash as `\\`. A gap is marked `\[fumehood: …]`.
    pub text: String,
    pub bytes: u64,
    pub truncated: bool,
    pub dropped_bytes: u64,
}

impl Log {
    pub fn new(captured: &Captured, stream: &str) -> Log {
        Log {
            text: captured.text(stream),
            bytes: captured.total_bytes,
            truncated: captured.truncated,
            dropped_bytes: captured.dropped_bytes,
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct Isolation {
    pub level: Option<Level>,
    /// Each layer that the launcher reported, and how it holds.
    pub layers: BTreeMap<Layer, String>,
}

#[derive(Clone, Debug, Serialize)]
pub struct LimitEntry {
    /// In milliseconds, bytes, thousandths of a CPU, or a count.
    pub asked: u64,
    pub enforced_by: String,
    pub how_hard: Hardness,
}

#[derive(Clone, Debug, Serialize)]
pub struct Times {
    /// Unix time in milliseconds.
    pub started_ms: u64,
    pub ended_ms: u64,
    pub wall_ms: u64,
}

/// One attempt's result: what `--json` prints and, later, what is committed.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    pub schema: &'static str,
    pub id: AnalysisId,
    pub attempt: u32,
    pub status: Status,
    pub reason: Reason,
    /// What went wrong on our side, for `error`.
    pub message: Option<String>,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub times: Times,
    pub cpu_ms: u64,
    pub memory_peak_bytes: Option<u64>,
    pub pids_peak: Option<u64>,
    pub disk_bytes: u64,
    pub files: u64,
    pub oom_kills: u64,
    pub stdout: Log,
    pub stderr: Log,
    pub workspace: PathBuf,
    /// Unix seconds; `null` when the workspace is gone.
    pub kept_until: Option<u64>,
    pub isolation: Isolation,
    pub limits: BTreeMap<LimitName, LimitEntry>,
    pub hints: Vec<Hint>,
    /// Things the user should know that are no error: a runtime that was shown, a limit that is only watched.
    pub notices: Vec<String>,
}

pub fn limit_entries(list: &[Enforcement]) -> BTreeMap<LimitName, LimitEntry> {
    let entry = |e: &Enforcement| LimitEntry {
        asked: e.asked,
        enforced_by: e.enforced_by.clone(),
        how_hard: e.how_hard,
    };
    list.iter().map(|e| (e.limit, entry(e))).collect()
}

#[cfg(test)]
mod tests {
    use sandbox::outcome::Usage;

    use super::*;

    fn outcome(exit: Option<Exit>, stop: Option<Stop>, oom_kills: u64) -> Outcome {
        Outcome {
            exit,
            stop,
            usage: Usage {
                oom_kills,
                ..Usage::default()
            },
            all_dead: true,
        }
    }

    #[test]
    fn a_stop_of_ours_outranks_whatever_the_program_made_of_it() {
        let graceful = outcome(Some(Exit::Code(0)), Some(Stop::WallTime), 0);
        assert_eq!(judge(&graceful), (Status::TimedOut, Reason::WallTime));
    }

    #[test]
    fn an_oom_that_the_program_survived_is_not_the_status() {
        assert_eq!(
            judge(&outcome(Some(Exit::Code(0)), None, 3)),
            (Status::Succeeded, Reason::Exit)
        );
        assert_eq!(
            judge(&outcome(Some(Exit::Code(1)), None, 3)),
            (Status::Failed, Reason::Exit)
        );
        assert_eq!(
            judge(&outcome(Some(Exit::Signal(9)), None, 1)),
            (Status::OutOfMemory, Reason::OomKilled)
        );
    }

    #[test]
    fn a_kill_without_an_oom_is_a_signal() {
        assert_eq!(
            judge(&outcome(Some(Exit::Signal(9)), None, 0)),
            (Status::Failed, Reason::Signal)
        );
    }

    #[test]
    fn what_cannot_be_shown_dead_is_our_error() {
        let mut stuck = outcome(None, Some(Stop::WallTime), 0);
        stuck.all_dead = false;
        assert_eq!(judge(&stuck), (Status::Error, Reason::Unkillable));
        assert_eq!(
            judge(&outcome(None, None, 0)),
            (Status::Error, Reason::InitLost)
        );
    }
}
