//! Which files the run's processes hold: among their descriptors, in flight over their sockets, in their maps.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use super::{MAPS_BYTES_MAX, Realm, SMALL, field, lives, pids, places, read, read_first};

/// Descriptors looked at in one pass. More cannot be looked at in the time between two looks.
const DESCRIPTORS_MAX: usize = 20_000;

/// How far a look at descriptors went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    All,
    /// As many as can be looked at in the time, or were asked for.
    Many,
    /// Until a process would not be looked into.
    Hidden,
}

/// Calls `each` for every open descriptor of the run, as long as that says to go on.
pub fn open_files(
    realm: Realm,
    each: &mut dyn FnMut(u32, &OsStr, &rustix::fs::Stat) -> bool,
) -> Looked {
    let mut left = DESCRIPTORS_MAX;
    let own = std::process::id();
    for pid in pids(realm).into_iter().filter(|pid| *pid != own) {
        let listing = match list_descriptors(pid) {
            Ok(Some(listing)) => listing,
            Ok(None) => continue,
            Err(Unreadable) => return Looked::Hidden,
        };
        // A program that was deleted while it runs is held by no descriptor.
        for held in ["exe", "cwd"] {
            if let Ok(stat) = rustix::fs::stat(format!("/proc/{pid}/{held}"))
                && !each(pid, OsStr::new(held), &stat)
            {
                return Looked::Many;
            }
        }
        for entry in listing.flatten() {
            left -= 1;
            if left == 0 {
                return Looked::Many;
            }
            if let Ok(stat) = rustix::fs::stat(entry.path())
                && !each(pid, &entry.file_name(), &stat)
            {
                return Looked::Many;
            }
        }
    }
    Looked::All
}

/// A process that lives and would not be looked into.
struct Unreadable;

/// `None` for one that is gone. A process that is just executing another program cannot be looked into for a moment.
fn list_descriptors(pid: u32) -> Result<Option<std::fs::ReadDir>, Unreadable> {
    const TRIES: usize = 5;
    for n in 0..TRIES {
        let listing = places(pid).find_map(|dir| std::fs::read_dir(dir.join("fd")).ok());
        if listing.is_some() || !lives(pid) {
            return Ok(listing);
        }
        if n + 1 < TRIES {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Err(Unreadable)
}

/// Whether descriptors wait in this socket's queue: they may be files that nothing else shows.
pub fn descriptors_in_flight(pid: u32, fd: &OsStr) -> bool {
    let path = Path::new(&format!("/proc/{pid}/fdinfo")).join(fd);
    read(path, SMALL).is_some_and(|text| field(&text, "scm_fds:") > 0)
}

/// Whether some process maps a deleted file of the run's that no descriptor shows: its size cannot be asked for.
/// Also when there are more maps than can be read between two looks, or `go_on` says no.
pub fn map_deleted_files(
    realm: Realm,
    shown: &HashSet<u64>,
    workspace: &str,
    go_on: &mut dyn FnMut() -> bool,
) -> bool {
    let mut left = MAPS_BYTES_MAX;
    let own = std::process::id();
    pids(realm)
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
mod tests {
    use super::*;

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
