//! How a run ended, from kernel facts only: wait statuses, cgroup counters, our own timers.

use serde::{Deserialize, Serialize};

/// How the program itself ended, exactly as the kernel told its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

/// Why Fumehood stopped the program, if it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    WallTime,
    CpuTime,
    IdleTime,
    Memory,
    Disk,
    Files,
    Pids,
    /// The run's share of the files that the whole host can have open.
    OpenFiles,
    Cancelled,
}

/// What was measured, summed over every process of the run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceUsage {
    pub wall_ms: u64,
    pub cpu_ms: u64,
    pub memory_peak_bytes: Option<u64>,
    pub pids_peak: Option<u64>,
    /// The largest total seen by the disk watch, or the tmpfs's use at the end.
    pub disk_bytes: u64,
    pub files: u64,
    /// Processes that the kernel killed for want of memory within the run's limit.
    pub oom_kills: u64,
    /// Whether the program's own death by SIGKILL followed such a kill within a second. `None`: it did not die so, or
    /// nobody saw the counter then.
    pub oom_killed_main: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// `None`: the program's end was never seen (its init was killed from outside, or cannot die).
    pub exit: Option<Exit>,
    pub stop: Option<Stop>,
    pub usage: ResourceUsage,
    /// False: some process could not be shown dead in time. Nothing may be collected or removed yet.
    pub all_dead: bool,
}
