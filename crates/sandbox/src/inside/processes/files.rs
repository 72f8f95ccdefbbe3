//! Which files the run's processes hold: by descriptor, in flight over a socket, or by a mapping.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use super::{MAPS_BYTES_MAX, ProcessSet, field, is_alive, other_pids, proc_dirs, read_first};
use crate::sys::procfs::{SMALL_FILE_BYTES, read};

/// How many descriptors one pass of the watch examines. More cannot be examined in the time between two passes.
const DESCRIPTORS_MAX: usize = 20_000;

/// How far a scan of all descriptors went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanResult {
    /// All descriptors were examined.
    All,
    /// The scan ended at the bound, or because the callback asked it to.
    Many,
    /// The scan ended at a live process that could not be read.
    Hidden,
}

/// Calls `each` for every open descriptor of the run, as long as `each` returns true. Also for the `exe` and `cwd` of
/// each process.
pub fn for_each_open_file(
    process_set: ProcessSet,
    each: &mut dyn FnMut(u32, &OsStr, &rustix::fs::Stat) -> bool,
) -> ScanResult {
    let mut left = DESCRIPTORS_MAX;
    for pid in other_pids(process_set) {
        let listing = match list_descriptors(pid) {
            Ok(Some(listing)) => listing,
            Ok(None) => continue,
            Err(Unreadable) => return ScanResult::Hidden,
        };
        // A process holds its executable and its working directory without a descriptor. Either may be deleted.
        for link in ["exe", "cwd"] {
            if let Ok(stat) = rustix::fs::stat(format!("/proc/{pid}/{link}"))
                && !each(pid, OsStr::new(link), &stat)
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

/// The process is alive, and its files in /proc cannot be read.
struct Unreadable;

fn list_descriptors(pid: u32) -> Result<Option<std::fs::ReadDir>, Unreadable> {
    read_with_retries(pid, || {
        proc_dirs(pid).find_map(|dir| std::fs::read_dir(dir.join("fd")).ok())
    })
}

/// Reads something of a process. Returns `None` for a process that is gone. Tries several times, because a process is
/// unreadable for a moment while it executes another program.
fn read_with_retries<T>(pid: u32, read: impl Fn() -> Option<T>) -> Result<Option<T>, Unreadable> {
    const TRIES: usize = 5;
    for n in 0..TRIES {
        let found = read();
        if found.is_some() || !is_alive(pid) {
            return Ok(found);
        }
        if n + 1 < TRIES {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Err(Unreadable)
}

/// An upper bound on the descriptors of all processes of the run: the sizes of their descriptor tables. Reads only
/// files of /proc that never block on a process. An unreadable process counts as having any number.
pub fn descriptors_at_most(process_set: ProcessSet) -> u64 {
    let sizes = other_pids(process_set).map(|pid| {
        // A first thread that has ended has no table, but the other threads still do.
        let statuses = proc_dirs(pid).filter_map(|dir| read(dir.join("status"), SMALL_FILE_BYTES));
        let mut sizes = statuses.map(|status| field(&status, "FDSize:"));
        let size = sizes.find(|size| *size > 0);
        size.unwrap_or_else(|| if is_alive(pid) { u64::MAX } else { 0 })
    });
    sizes.fold(0, u64::saturating_add)
}

/// Counts the mappings of files in all processes of the run. Each may hold an open file that has no descriptor. Returns
/// `u64::MAX` if there are more than can be read between two passes, or if a process is unreadable. Stops early when
/// `should_continue` returns false.
pub fn count_file_mappings(
    process_set: ProcessSet,
    should_continue: &mut dyn FnMut() -> bool,
) -> u64 {
    let mut left = MAPS_BYTES_MAX;
    let mut count = 0;
    for pid in other_pids(process_set) {
        if !should_continue() {
            break;
        }
        let maps = match read_with_retries(pid, || read_first(pid, "maps", left)) {
            Ok(maps) => maps.unwrap_or_default(),
            Err(Unreadable) => return u64::MAX,
        };
        left = left.saturating_sub(maps.len());
        if left == 0 {
            return u64::MAX;
        }
        count += maps.lines().filter(|line| is_file_mapping(line)).count() as u64;
    }
    count
}

/// Whether a line of /proc/PID/maps is a mapping of a file. Other memory has no name, or a name in brackets.
fn is_file_mapping(line: &str) -> bool {
    let name = line.split_ascii_whitespace().nth(5);
    name.is_some_and(|name| !name.starts_with('['))
}

/// Whether descriptors wait in the queue of this socket. They may be of files that nothing else shows.
pub fn has_descriptors_in_flight(pid: u32, fd: &OsStr) -> bool {
    let path = Path::new(&format!("/proc/{pid}/fdinfo")).join(fd);
    read(path, SMALL_FILE_BYTES).is_some_and(|text| field(&text, "scm_fds:") > 0)
}

/// Whether a process maps a deleted file of the run that is not among `shown`, the inodes found by descriptor. The size
/// of such a file cannot be read. Also returns true if there are more mappings than can be read between two passes, or
/// if `should_continue` returns false.
pub fn maps_deleted_file(
    process_set: ProcessSet,
    shown: &HashSet<u64>,
    workspace: &str,
    should_continue: &mut dyn FnMut() -> bool,
) -> bool {
    let mut left = MAPS_BYTES_MAX;
    other_pids(process_set).any(|pid| {
        let maps = read_first(pid, "maps", left).unwrap_or_default();
        left = left.saturating_sub(maps.len());
        left == 0 || has_deleted_file(&maps, shown, workspace) || !should_continue()
    })
}

fn has_deleted_file(maps: &str, shown: &HashSet<u64>, workspace: &str) -> bool {
    let deleted = maps.lines().filter(|line| line.ends_with(" (deleted)"));
    deleted.into_iter().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(4);
        let inode = fields.next().and_then(|i| i.parse::<u64>().ok());
        let name = fields.next().unwrap_or_default();
        // Elsewhere a deleted file is memory, or a library of the host that was replaced meanwhile.
        let own = name.starts_with("/tmp/") || name.starts_with(workspace);
        own && inode.is_some_and(|i| !shown.contains(&i))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_and_file_mappings_of_a_child_are_counted() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(20);
        let mut mappings = 0;
        // Wait until the child has executed `sleep`, which maps its own file and the C library.
        while mappings < 4 && std::time::Instant::now() < until {
            mappings = count_file_mappings(ProcessSet::Descendants, &mut || true);
        }
        let descriptors = descriptors_at_most(ProcessSet::Descendants);
        child.kill().unwrap();
        child.wait().unwrap();
        // Children of other tests in this process count too, so only bounds can be checked.
        assert!((4..u64::MAX).contains(&mappings), "{mappings}");
        assert!((64..u64::MAX).contains(&descriptors), "{descriptors}");
        assert_eq!(
            count_file_mappings(ProcessSet::Descendants, &mut || false),
            0
        );
    }

    #[test]
    fn a_file_mapping_is_distinguished_from_other_memory() {
        let mapped =
            |name: &str| is_file_mapping(&format!("7f00-7f01 rw-s 00000000 00:01 0 {name}"));
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
