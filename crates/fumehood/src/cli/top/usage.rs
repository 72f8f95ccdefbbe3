//! The memory and CPU use of analyses of this home, from their cgroups.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use engine::home::Home;
use store::ActiveAttempt;

use crate::cli::run_dirs::{self, NextAction};

/// `None`: the analysis does not run in this home, or no cgroup counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasuredUsage {
    pub memory_bytes: Option<u64>,
    /// CPU time since it began.
    pub cpu_us: Option<u64>,
    /// Thousandths of a CPU, since the last reading.
    pub cpu_milli: Option<u64>,
}

/// The readings of one moment, and when they were taken, to compute the difference to the next ones.
#[derive(Clone, Debug, Default)]
pub struct UsageMeter {
    taken: Option<Instant>,
    used: HashMap<(String, u32), MeasuredUsage>,
}

impl UsageMeter {
    pub fn read(&mut self, home: &Home) {
        let now = Instant::now();
        let before = std::mem::take(&mut self.used);
        let passed_us = self.taken.map(|taken| (now - taken).as_micros());
        for run_dir in run_dirs::list_all(home) {
            if run_dir.next_action() != NextAction::AwaitRunner {
                continue;
            }
            let record = &run_dir.record;
            let key = (record.id.as_str().to_owned(), record.attempt);
            let mut used = read(&record.cgroups);
            let earlier_us = before.get(&key).and_then(|used| used.cpu_us);
            used.cpu_milli = match (used.cpu_us, earlier_us, passed_us) {
                (Some(now_us), Some(earlier_us), Some(passed_us)) if passed_us > 0 => {
                    let used_us = u128::from(now_us.saturating_sub(earlier_us));
                    u64::try_from(used_us * 1_000 / passed_us).ok()
                }
                _ => None,
            };
            self.used.insert(key, used);
        }
        self.taken = Some(now);
    }

    pub fn of(&self, busy: &ActiveAttempt) -> MeasuredUsage {
        // The same id may also run elsewhere, with another attempt number or in another database. Only cgroups of this
        // machine were read.
        let here = busy.host == engine::home::machine_id();
        let used = self.used.get(&(busy.id.clone(), busy.attempt));
        used.filter(|_| here).copied().unwrap_or_default()
    }
}

/// Reads the cgroups. Some of the paths were only planned, so skip those that do not exist.
fn read(cgroups: &[PathBuf]) -> MeasuredUsage {
    let mut used = MeasuredUsage::default();
    for dir in cgroups {
        let memory = number(dir, "memory.current").or_else(|| number(dir, "memory.usage_in_bytes"));
        used.memory_bytes = used.memory_bytes.or(memory);
        let cpu_us = number(dir, "cpuacct.usage").map(|ns| ns / 1_000);
        let cpu_us = cpu_us.or_else(|| keyed(dir, "cpu.stat", "usage_usec"));
        used.cpu_us = used.cpu_us.or(cpu_us);
    }
    used
}

fn number(dir: &Path, name: &str) -> Option<u64> {
    text(dir, name)?.trim().parse().ok()
}

fn keyed(dir: &Path, name: &str, key: &str) -> Option<u64> {
    let text = text(dir, name)?;
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let (_, value) = lines.find(|(word, _)| *word == key)?;
    value.trim().parse().ok()
}

fn text(dir: &Path, name: &str) -> Option<String> {
    const BYTES_MAX: u64 = 16 << 10;
    let mut text = String::new();
    let file = run_dirs::open_file(&dir.join(name)).ok()?;
    file.take(BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_cgroups_are_understood() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        at("memory.current", "4096\n");
        at("cpu.stat", "nr_periods 3\nusage_usec 1500\nuser_usec 1\n");
        let here = [dir.path().join("gone"), dir.path().to_path_buf()];
        let used = read(&here);
        assert_eq!((used.memory_bytes, used.cpu_us), (Some(4096), Some(1500)));
        std::fs::remove_file(dir.path().join("memory.current")).unwrap();
        // cgroup version 1 has a file of this name as well, without the fields that are read here.
        at("cpu.stat", "nr_periods 3\nthrottled_time 0\n");
        at("memory.usage_in_bytes", "8192\n");
        at("cpuacct.usage", "2000000\n");
        let used = read(&here);
        assert_eq!((used.memory_bytes, used.cpu_us), (Some(8192), Some(2000)));
        assert_eq!(read(&[]), MeasuredUsage::default());
    }
}
