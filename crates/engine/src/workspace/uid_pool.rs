//! Leases an unprivileged uid and gid, unique on the host, to each analysis that root runs.
//!
//! A lease is a lock on a file in a directory that all of root's Fumehood processes share, independent of
//! FUMEHOOD_HOME. A leased uid never belongs to an account, to a subordinate range or to a process.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};

/// Above every range that systemd, shadow and container tools hand out (systemd's UIDS-GIDS document ends its
/// container range at 1879048191), and below the sign bit.
const FIRST: u32 = 1_900_000_000;
const COUNT: u32 = 65_536;
/// Every uid that can be leased.
pub const RANGE: std::ops::Range<u32> = FIRST..FIRST + COUNT;
const DIRECTORY: &str = "/run/fumehood/uids";
/// The content of a lease file begins with this while the lease is held. No boot id begins with it.
const IN_USE: &str = "-";

/// Why no uid could be leased.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum UidLeaseError {
    /// The directory of the leases could not be created or examined.
    #[error("make the directory {path:?} for uid leases")]
    Directory { path: PathBuf, source: io::Error },
    /// Others than root could write to the directory of the leases.
    #[error("{path:?} must belong to root and be writable by root only")]
    NotOurs { path: PathBuf },
    /// The file of a lease could not be opened, locked or written.
    #[error("open the lease {path:?}")]
    Open { path: PathBuf, source: io::Error },
    /// Every uid of the range is leased, reserved, or may still have processes.
    #[error("all {COUNT} uids for analyses are in use; end some analyses")]
    NoneFree,
}

/// A uid, and the gid of the same number, that no other run has until this is dropped.
#[derive(Debug)]
pub struct UidLease {
    /// The leased uid.
    pub uid: u32,
    file: OwnedFd,
    boot_id: String,
}

impl UidLease {
    /// Leases the first uid of [`RANGE`] that is free.
    pub fn acquire() -> Result<UidLease, UidLeaseError> {
        UidLease::acquire_in(Path::new(DIRECTORY), RANGE)
    }

    fn acquire_in(
        directory: &Path,
        range: std::ops::Range<u32>,
    ) -> Result<UidLease, UidLeaseError> {
        prepare_directory(directory)?;
        let reserved = ReservedIds::read();
        let boot_id = crate::home::boot_id();
        let mut holders = None;
        for uid in range.clone() {
            if reserved.contains(uid) {
                continue;
            }
            let path = directory.join(uid.to_string());
            let opened = |source: rustix::io::Errno| UidLeaseError::Open {
                path: path.clone(),
                source: source.into(),
            };
            let file = match lock_file(&path) {
                Ok(file) => file,
                Err(rustix::io::Errno::WOULDBLOCK) => continue,
                Err(e) => return Err(opened(e)),
            };
            let lease = UidLease {
                uid,
                file,
                boot_id: boot_id.clone(),
            };
            let text = lease.read_text();
            // If a lease was released clean in this boot, no process can have the uid. Otherwise look for such
            // processes.
            if !lease.is_clean(&text) {
                // The process that was found at the last walk through /proc usually still has the uid.
                if recorded_holder(&text).is_some_and(|pid| has_id(pid, uid)) {
                    continue;
                }
                // One walk through /proc covers all uids.
                let holders = holders.get_or_insert_with(|| holders_of(&range));
                let holder = holders.as_ref().map(|holders| holders.get(&uid));
                match holder {
                    Some(None) => {}
                    Some(Some(pid)) => {
                        // Only a hint for the next caller, so ignore an error.
                        let _ = lease.write_text(&format!("{IN_USE}{pid}\n"));
                        continue;
                    }
                    // Without /proc any uid may be in use.
                    None => continue,
                }
            }
            lease
                .write_text(IN_USE)
                .map_err(|source| UidLeaseError::Open {
                    path: path.clone(),
                    source,
                })?;
            return Ok(lease);
        }
        Err(UidLeaseError::NoneFree)
    }

    fn read_text(&self) -> Vec<u8> {
        let mut text = [0u8; 64];
        let n = rustix::io::pread(&self.file, &mut text, 0).unwrap_or(0);
        text[..n].to_vec()
    }

    fn is_clean(&self, text: &[u8]) -> bool {
        !self.boot_id.is_empty() && text == self.boot_id.as_bytes()
    }

    /// Writes in place. Truncating and rewriting a file makes some file systems write to disk at once.
    fn write_text(&self, text: &str) -> io::Result<()> {
        rustix::io::pwrite(&self.file, text.as_bytes(), 0)?;
        Ok(())
    }

    /// Releases the uid when no process has it any more. If a lease is dropped without this call, or its runner died,
    /// the next lease of the uid searches for processes first.
    pub fn release_clean(self) {
        // If the write fails, the next lease of the uid searches for processes.
        let _ = self.write_text(&self.boot_id);
    }
}

/// Takes the lock of a uid until it is dropped. The file is not changed, so the next lease of the uid still searches
/// for processes.
pub fn lock_uid(uid: u32) -> Option<OwnedFd> {
    lock_file(&Path::new(DIRECTORY).join(uid.to_string())).ok()
}

/// Opens a lease file and locks it, without waiting for the lock.
fn lock_file(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

fn prepare_directory(directory: &Path) -> Result<(), UidLeaseError> {
    let failed = |source| UidLeaseError::Directory {
        path: directory.to_path_buf(),
        source,
    };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(failed)?;
    let meta = std::fs::symlink_metadata(directory).map_err(failed)?;
    match meta.is_dir() && meta.uid() == 0 && meta.mode() & 0o022 == 0 {
        true => Ok(()),
        false => Err(UidLeaseError::NotOurs {
            path: directory.to_path_buf(),
        }),
    }
}

/// Ids that the host's own files assign to somebody.
struct ReservedIds {
    accounts: Vec<u32>,
    ranges: Vec<(u64, u64)>,
}

impl ReservedIds {
    fn read() -> ReservedIds {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let number = |line: &str, field: usize| line.split(':').nth(field)?.parse::<u32>().ok();
        let mut accounts = Vec::new();
        for (path, fields) in [("/etc/passwd", 2..4), ("/etc/group", 2..3)] {
            let text = read(path);
            let numbers = |line| fields.clone().filter_map(move |field| number(line, field));
            accounts.extend(text.lines().flat_map(numbers));
        }
        let mut ranges = Vec::new();
        for path in ["/etc/subuid", "/etc/subgid"] {
            for line in read(path).lines() {
                let fields: Vec<u64> = line
                    .split(':')
                    .skip(1)
                    .filter_map(|n| n.parse().ok())
                    .collect();
                if let [first, count] = fields[..] {
                    ranges.push((first, first.saturating_add(count)));
                }
            }
        }
        ReservedIds { accounts, ranges }
    }

    fn contains(&self, uid: u32) -> bool {
        self.accounts.contains(&uid)
            || self
                .ranges
                .iter()
                .any(|(first, end)| (*first..*end).contains(&u64::from(uid)))
    }
}

/// The process that a lease file names as having the uid.
fn recorded_holder(text: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(text).ok()?.strip_prefix(IN_USE)?;
    text.split_once('\n')?.0.parse().ok()
}

/// Whether the process has this number as a real, effective, saved or file-system uid or gid.
fn has_id(pid: u32, id: u32) -> bool {
    ids_of(pid).contains(&id)
}

fn ids_of(pid: u32) -> Vec<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let lines = status.lines();
    let lines = lines.filter(|l| l.starts_with("Uid:") || l.starts_with("Gid:"));
    lines
        .flat_map(|line| line.split_ascii_whitespace().skip(1))
        .filter_map(|number| number.parse().ok())
        .collect()
}

/// Searches all processes for uids and gids of the range. Maps each id that is in use to one process that has it.
/// `None` if there is no /proc.
fn holders_of(range: &std::ops::Range<u32>) -> Option<HashMap<u32, u32>> {
    let mut holders = HashMap::new();
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let pid = entry.file_name().to_str().and_then(|n| n.parse().ok());
        for (pid, id) in pid
            .into_iter()
            .flat_map(|pid| ids_of(pid).into_iter().map(move |id| (pid, id)))
        {
            if range.contains(&id) {
                holders.insert(id, pid);
            }
        }
    }
    Some(holders)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn two_leases_never_share_a_uid_and_a_returned_one_is_used_again() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: leases are root's");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("uids");
        let acquire = || UidLease::acquire_in(&directory, 1_899_999_990..1_899_999_993);
        let first = acquire().unwrap();
        let second = acquire().unwrap();
        let third = acquire().unwrap();
        assert!(first.uid != second.uid && second.uid != third.uid && first.uid != third.uid);
        assert!(matches!(acquire(), Err(UidLeaseError::NoneFree)));
        let uid = second.uid;
        second.release_clean();
        assert_eq!(acquire().unwrap().uid, uid);
    }

    #[test]
    fn a_uid_that_a_process_has_is_not_leased() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: leases are root's");
            return;
        }
        use std::os::unix::process::CommandExt;
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("uids");
        let taken = 1_899_999_980;
        let acquire = || UidLease::acquire_in(&directory, taken..taken + 1);
        assert_eq!(acquire().unwrap().uid, taken);
        let mut holder = std::process::Command::new("sleep")
            .arg("60")
            .uid(taken)
            .spawn()
            .unwrap();
        assert!(matches!(acquire(), Err(UidLeaseError::NoneFree)));
        // The next caller finds the process without a walk through /proc.
        let text = std::fs::read(directory.join(taken.to_string())).unwrap();
        assert_eq!(recorded_holder(&text), Some(holder.id()));
        assert!(matches!(acquire(), Err(UidLeaseError::NoneFree)));
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!(acquire().unwrap().uid, taken);
    }

    /// The rest of a longer text after a shorter one does not name a process.
    #[test]
    fn a_holder_is_read_from_its_own_line_alone() {
        assert_eq!(recorded_holder(b"-1234\n-4f1b-9d1d"), Some(1234));
        for text in [&b"-"[..], b"-234-5678", b"1234\n", b"", b"-x\n"] {
            assert_eq!(recorded_holder(text), None, "{text:?}");
        }
    }

    #[test]
    fn accounts_and_subordinate_ranges_are_reserved() {
        let reserved = ReservedIds {
            accounts: vec![7],
            ranges: vec![(100_000, 165_536)],
        };
        assert!(reserved.contains(7) && reserved.contains(100_000) && reserved.contains(165_535));
        assert!(!reserved.contains(8) && !reserved.contains(165_536));
        assert!(ReservedIds::read().contains(0));
    }
}
