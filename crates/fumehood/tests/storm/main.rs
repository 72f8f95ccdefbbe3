//! P15 and P16 through the binary: the trials kill runners, collectors and databases, and check that the next start finishes
//! what they left, exactly once.
//!
//! Every trial runs as root and as a plain user, as in `tests/cli`. `FUMEHOOD_TEST_STORM` is how many runners are killed on
//! each database, over all identities; `FUMEHOOD_TEST_QUEUE` is how many analyses each identity queues on each database while
//! everything is killed; `FUMEHOOD_TEST_SEED` repeats the random choices of an earlier run.

#![allow(clippy::unwrap_used)]

mod admission;
mod cluster;
mod database_rows;
mod deployment;
mod execution_monitor;
mod expected_state;
mod io_faults;
mod kill_at_crash_points;
mod leases;
mod many_at_once;
mod outages;
mod queue_under_kills;
mod random_kills;
mod workers;

use std::sync::OnceLock;

use testkit::{Harness, is_root, program};

const KILLS_VARIABLE: &str = "FUMEHOOD_TEST_STORM";
const QUEUE_VARIABLE: &str = "FUMEHOOD_TEST_QUEUE";
const SEED_VARIABLE: &str = "FUMEHOOD_TEST_SEED";

/// How much this run of the storm does, from the environment.
pub struct StormSettings {
    /// Runners to be killed on each database by this identity.
    pub kills: usize,
    /// Analyses to be queued on each database by this identity.
    pub queued: usize,
    pub seed: u64,
}

pub fn settings() -> &'static StormSettings {
    static SETTINGS: OnceLock<StormSettings> = OnceLock::new();
    SETTINGS.get_or_init(StormSettings::from_environment)
}

impl StormSettings {
    fn from_environment() -> StormSettings {
        let number = |name: &str| -> Option<u64> {
            let text = std::env::var(name).ok()?;
            Some(text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
        };
        let from_clock = || {
            let now = std::time::SystemTime::now();
            let now = now.duration_since(std::time::UNIX_EPOCH).unwrap();
            u64::from(now.subsec_nanos()) ^ now.as_secs()
        };
        let kills = number(KILLS_VARIABLE).unwrap_or(500) as usize;
        // Root does half of the kills and gives the test account the other half.
        let kills = match is_root() {
            true => kills.div_ceil(2),
            false => kills,
        };
        StormSettings {
            kills,
            queued: number(QUEUE_VARIABLE).unwrap_or(60) as usize,
            seed: number(SEED_VARIABLE).unwrap_or_else(from_clock),
        }
    }
}

/// Prints a line of numbers, whether the trial succeeds or not.
pub fn report(line: &str) {
    println!("    {line}");
}

fn main() {
    let settings = settings();
    let is_listing = std::env::args().any(|argument| argument == "--list");
    if program::inner_trial().is_none() && !is_listing {
        println!("{SEED_VARIABLE}={}", settings.seed);
    }
    Harness::new()
        .with_binary(env!("CARGO_BIN_EXE_fumehood"))
        .with_variable(KILLS_VARIABLE, settings.kills)
        .with_variable(QUEUE_VARIABLE, settings.queued)
        .with_variable(SEED_VARIABLE, settings.seed)
        .showing_output()
        // Most trials wait for disks and for processes to die.
        .with_threads(4)
        .with_first(&["random_kills", "queue_under_kills", "kill_at_crash_points"])
        .run();
}
