//! Processes and cgroups of the host, found through /proc and /sys/fs/cgroup.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The names in a directory; none if it does not exist.
pub fn names_in(dir: &Path) -> Vec<OsString> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|e| e.file_name()).collect()
}

pub fn all_pids() -> impl Iterator<Item = u32> {
    names_in(Path::new("/proc"))
        .into_iter()
        .filter_map(|name| name.to_str()?.parse().ok())
}

/// The processes of the host, other than this one, that have `word` as one of their arguments.
pub fn processes_with(word: &str) -> Vec<u32> {
    let has_word = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).any(|arg| arg == word.as_bytes())
    };
    let own = std::process::id();
    all_pids().filter(|p| *p != own).filter(has_word).collect()
}

/// A number from /proc/PID/status.
pub fn status_number(pid: u32, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    line.trim_start_matches(':')
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// The cgroups, in any hierarchy, that Fumehood made for ids which begin with `id`.
pub fn cgroups_of(id: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![(PathBuf::from("/sys/fs/cgroup"), 0)];
    let stem = format!("fumehood-{id}");
    while let Some((dir, depth)) = pending.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|t| t.is_dir()) {
                continue;
            }
            if entry.file_name().to_string_lossy().starts_with(&stem) {
                found.push(entry.path());
            } else if depth < 5 {
                pending.push((entry.path(), depth + 1));
            }
        }
    }
    found
}
