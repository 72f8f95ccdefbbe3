//! How a run ended.
//!
//! Every value comes from the kernel or from Fumehood's own timers (wait statuses, cgroup counters, deadlines), never
//! from the program's output.

use serde::{Deserialize, Serialize};

/// How the program itself ended, as the kernel reported it to the program's parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// The exit code.
    Code(i32),
    /// The number of the signal that killed the program.
    Signal(i32),
}

/// Why Fumehood stopped the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// It ran for longer than its wall time.
    WallTime,
    /// It used more CPU time than its limit.
    CpuTime,
    /// It was idle for longer than its limit.
    IdleTime,
    /// It used more memory than its limit, or the kernel killed too many of its processes at that limit.
    Memory,
    /// Its files took more bytes than its limit.
    Disk,
    /// It had more files than its limit.
    Files,
    /// It had more processes than its limit.
    Pids,
    /// The run passed its share of the host's table of open files.
    OpenFiles,
    /// The caller asked for the stop.
    Cancelled,
}

/// Resources that the run used, summed over all of its processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceUsage {
    /// The time from the start of the program to its end.
    pub wall_ms: u64,
    /// The CPU time.
    pub cpu_ms: u64,
    /// The most memory at one time, as far as it was measured.
    pub memory_peak_bytes: Option<u64>,
    /// The most processes at one time, as far as they were counted.
    pub pids_peak: Option<u64>,
    /// The largest total that the disk watch measured. For a workspace in memory, the largest use of the tmpfs.
    pub disk_bytes: u64,
    /// The largest number of files that the disk watch counted.
    pub files: u64,
    /// How many processes of the run the kernel's out-of-memory killer killed at the run's own memory limit.
    pub oom_kills: u64,
    /// Whether the program itself died of SIGKILL within a second after `oom_kills` rose. `None` if the program did not
    /// die of SIGKILL, or if no counter could be read.
    pub oom_killed_main: Option<bool>,
}

/// How a run ended, and what it used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// `None` if init did not report the program's exit: init was killed from outside, or could not be killed.
    pub exit: Option<Exit>,
    /// Why Fumehood stopped the program. `None` if the program ended by itself.
    pub stop: Option<Stop>,
    /// What the run used.
    pub usage: ResourceUsage,
    /// Whether every process of the run is proved dead. While this is false, the workspace may be neither collected nor
    /// removed.
    pub all_dead: bool,
}
