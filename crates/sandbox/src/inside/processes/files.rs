//! Which files the run's processes hold: among their descriptors, in flight over their sockets, in their maps.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use super::{MAPS_BYTES_MAX, ProcessSet, field, is_alive, pids, proc_dirs, read_first};
use crate::sys::procfs::{SMALL_FILE_BYTES, read};

/// Descriptors looked at in one pass. More cannot be looked at in the time between two looks.
const DESCRIPTORS_MAX: usize = 20_000;

/// How far a look at descriptors went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanResult {
    All,
    /// As many as can be looked at in the time, or were asked for.
    Many,
    /// Until a process would not be looked into.
    Hidden,
}

/// Calls `each` for every open descriptor of the run, as long as that says to go on.
pub fn open_files(
    process_set: ProcessSet,
    each: &mut dyn FnMut(u32, &OsStr, &rustix::fs::Stat) -> bool,
) -> ScanResult {
    let mut left = DESCRIPTORS_MAX;
    let own = std::process::id();
    for pid in pids(process_set).into_iter().filter(|pid| *pid != own) {
        let listing = match list_descriptors(pid) {
            Ok(Some(listing)) => listing,
            Ok(None) => continue,
            Err(Unreadable) => return ScanResult::Hidden,
        };
        // A program that was deleted while it runs is held by no descriptor.
        for held in ["exe", "cwd"] {
            if let Ok(stat) = rustix::fs::stat(format!("/proc/{pid}/{held}"))
                && !each(pid, OsStr::new(held), &stat)
            {
                return ScanResult::Many;
            }
        }
        for entry in listing.flatten() {
            left -= 1;
            if left == 0 {
                return ScanResult::Many;
            }
            if let Ok(stat) = rustix::fs::stat(entry.path())
                && !each(pid, &entry.file_name(), &stat)
            {
                return ScanResult::Many;
            }
        }
    }
    ScanResult::All
}

/// A process that lives and would not be looked into.
struct Unreadable;

fn list_descriptors(pid: u32) -> Result<Option<std::fs::ReadDir>, Unreadable> {
    look_into(pid, || {
        proc_dirs(pid).find_map(|dir| std::fs::read_dir(dir.join("fd")).ok())
    })
}

/// `None` for a process that is gone. One that is just executing another program cannot be looked into for a moment.
fn look_into<T>(pid: u32, look: impl Fn() -> Option<T>) -> Result<Option<T>, Unreadable> {
    const TRIES: usize = 5;
    for n in 0..TRIES {
        let found = look();
        if found.is_some() || !is_alive(pid) {
            return Ok(found);
        }
        if n + 1 < TRIES {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Err(Unreadable)
}

/// No fewer than the descriptors of all processes of the run: how many the table of each has room for. From files of /proc
/// that are read without waiting for a process. A process that cannot be looked into may have any number.
pub fn descriptors_at_most(process_set: ProcessSet) -> u64 {
    let own = std::process::id();
    let others = pids(process_set).into_iter().filter(|pid| *pid != own);
    let sizes = others.map(|pid| {
        // A first thread that has ended has no table; the others have it still.
        let statuses = proc_dirs(pid).filter_map(|dir| read(dir.join("status"), SMALL_FILE_BYTES));
        let mut sizes = statuses.map(|status| field(&status, "FDSize:"));
        let size = sizes.find(|size| *size > 0);
        size.unwrap_or_else(|| if is_alive(pid) { u64::MAX } else { 0 })
    });
    sizes.fold(0, u64::saturating_add)
}

/// How many mappings of files the processes of the run have; each may hold an open file that has no descriptor. More than can
/// be read between two looks, and those of a process that cannot be looked into, may be any number. Leaves off when
/// `go_on` says no.
pub fn file_mappings(process_set: ProcessSet, go_on: &mut dyn FnMut() -> bool) -> u64 {
    let mut left = MAPS_BYTES_MAX;
    let mut count = 0;
    let own = std::process::id();
    for pid in pids(process_set).into_iter().filter(|pid| *pid != own) {
        if !go_on() {
            break;
        }
        let maps = match look_into(pid, || read_first(pid, "maps", left)) {
            Ok(maps) => maps.unwrap_or_default(),
            Err(Unreadable) => return u64::MAX,
        };
        left = left.saturating_sub(maps.len());
        if left == 0 {
            return u64::MAX;
        }
        count += maps.lines().filter(|line| maps_file(line)).count() as u64;
    }
    count
}

/// Whether a line of /proc/PID/maps has the name of a file. Other memory has none, or one in brackets.
fn maps_file(line: &str) -> bool {
    let name = line.split_ascii_whitespace().nth(5);
    name.is_some_and(|name| !name.starts_with('['))
}

/// Whether descriptors wait in this socket's queue: they may be files that nothing else shows.
pub fn descriptors_in_flight(pid: u32, fd: &OsStr) -> bool {
    let path = Path::new(&format!("/proc/{pid}/fdinfo")).join(fd);
    read(path, SMALL_FILE_BYTES).is_some_and(|text| field(&text, "scm_fds:") > 0)
}

/// Whether some process maps a deleted file of the run's that no descriptor shows: its size cannot be asked for.
/// Also when there are more maps than can be read between two looks, or `go_on` says no.
pub fn map_deleted_files(
    process_set: ProcessSet,
    shown: &HashSet<u64>,
    workspace: &str,
    go_on: &mut dyn FnMut() -> bool,
) -> bool {
    let mut left = MAPS_BYTES_MAX;
    let own = std::process::id();
    pids(process_set)
        .into_iter()
        .filter(|pid| *pid != own)
        .any(|pid| {
            let maps = read_first(pid, "maps", left).unwrap_or_default();
            left = left.saturating_sub(maps.len());
            left == 0 || has_deleted_file(&maps, shown, workspace) || !go_on()
        })
}

fn has_deleted_file(maps: &str, shown: &HashSet<u64>, workspace: &str) -> bool {
    let deleted = maps.lines().filter(|line| line.ends_with(" (deleted)"));
    deleted.into_iter().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(4);
        let inode = fields.next().and_then(|i| i.parse::<u64>().ok());
        let name = fields.next().unwrap_or_default();
        // Elsewhere it is memory, or a library of the host's that was replaced meanwhile.
        let own = name.starts_with("/tmp/") || name.starts_with(workspace);
        own && inode.is_some_and(|i| !shown.contains(&i))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_and_mapped_files_of_a_child_are_counted() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(20);
        let mut mappings = 0;
        // Until it has become the other program, which maps its own file and the C library.
        while mappings < 4 && std::time::Instant::now() < until {
            mappings = file_mappings(ProcessSet::Descendants, &mut || true);
        }
        let descriptors = descriptors_at_most(ProcessSet::Descendants);
        child.kill().unwrap();
        child.wait().unwrap();
        // Other tests of this program have children too.
        assert!((4..u64::MAX).contains(&mappings), "{mappings}");
        assert!((64..u64::MAX).contains(&descriptors), "{descriptors}");
        assert_eq!(file_mappings(ProcessSet::Descendants, &mut || false), 0);
    }

    #[test]
    fn a_mapped_file_is_told_from_other_memory() {
        let mapped = |name: &str| maps_file(&format!("7f00-7f01 rw-s 00000000 00:01 0 {name}"));
        assert!(mapped("/tmp/x") && mapped("/SYSV00000000 (deleted)") && mapped("/dev/zero"));
        assert!(!mapped("") && !mapped("[heap]") && !mapped("[anon: x y]"));
    }

    #[test]
    fn only_deleted_files_on_disk_that_no_descriptor_shows_count() {
        let none = HashSet::new();
        let line = |name: &str| {
            format!("7f0000000000-7f0000001000 rw-s 00000000 fe:00 4711 {name} (deleted)\n")
        };
        let found = |name: &str, shown| has_deleted_file(&line(name), shown, "/scratch/w");
        assert!(found("/tmp/x", &none) && found("/scratch/w/x", &none));
        assert!(found("/tmp/a name with blanks", &none));
        let shown = HashSet::from([4711]);
        assert!(!found("/tmp/x", &shown));
        assert!(!found("/memfd:x", &none) && !found("/usr/lib/x.so", &none));
        let alive = "7f00-7f01 r-xp 00000000 fe:00 12 /tmp/x\n";
        assert!(!has_deleted_file(alive, &none, "/scratch/w"));
    }
}
