//! For root: an unprivileged uid and gid for each running analysis, leased host-wide.
//!
//! The lease is a lock on a file in a directory of root's that all of root's Fumehoods share, whatever
//! their home. A uid is never one that an account, a subordinate range or a process has.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};

/// Above every range that systemd, shadow and container tools hand out (systemd's UIDS-GIDS document ends its
/// container range at 1879048191), below the sign bit.
const FIRST: u32 = 1_900_000_000;
const COUNT: u32 = 65_536;
/// Every uid that an analysis of root's may get.
pub const RANGE: std::ops::Range<u32> = FIRST..FIRST + COUNT;
const DIRECTORY: &str = "/run/fumehood/uids";
/// What a lease begins with while it is held. No boot id does.
const IN_USE: &str = "-";

#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    #[error("make the directory {path:?} for uid leases")]
    Directory { path: PathBuf, source: io::Error },
    #[error("{path:?} must belong to root and be closed to others")]
    NotOurs { path: PathBuf },
    #[error("open the lease {path:?}")]
    Open { path: PathBuf, source: io::Error },
    #[error("all {COUNT} uids for analyses are leased or taken; end some analyses")]
    NoneFree,
}

/// A uid (and the gid of the same number) that is this run's alone until dropped.
#[derive(Debug)]
pub struct Lease {
    pub uid: u32,
    file: OwnedFd,
    boot_id: String,
}

impl Lease {
    pub fn take() -> Result<Lease, LeaseError> {
        Lease::take_in(Path::new(DIRECTORY), RANGE)
    }

    fn take_in(directory: &Path, range: std::ops::Range<u32>) -> Result<Lease, LeaseError> {
        prepare(directory)?;
        let reserved = Reserved::read();
        let boot_id = crate::home::boot_id();
        let mut holders = None;
        for uid in range.clone() {
            if reserved.holds(uid) {
                continue;
            }
            let path = directory.join(uid.to_string());
            let opened = |source: rustix::io::Errno| LeaseError::Open {
                path: path.clone(),
                source: source.into(),
            };
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let file =
                rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600)).map_err(opened)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => continue,
                Err(e) => return Err(opened(e)),
            }
            let lease = Lease {
                uid,
                file,
                boot_id: boot_id.clone(),
            };
            let text = lease.text();
            // Given back with everything dead, in this boot: nobody can have it. Otherwise look.
            if !lease.is_clean(&text) {
                // As a rule that is who was found when somebody last walked through all processes.
                if noted_holder(&text).is_some_and(|pid| has_id(pid, uid)) {
                    continue;
                }
                // One walk tells of all uids.
                let holders = holders.get_or_insert_with(|| holders_of(&range));
                let holder = holders.as_ref().map(|holders| holders.get(&uid));
                match holder {
                    Some(None) => {}
                    Some(Some(pid)) => {
                        let _only_a_hint = lease.mark(&format!("{IN_USE}{pid}\n"));
                        continue;
                    }
                    // Without /proc nothing is known, so every uid may be held.
                    None => continue,
                }
            }
            lease.mark(IN_USE).map_err(|source| LeaseError::Open {
                path: path.clone(),
                source,
            })?;
            return Ok(lease);
        }
        Err(LeaseError::NoneFree)
    }

    fn text(&self) -> Vec<u8> {
        let mut text = [0u8; 64];
        let n = rustix::io::pread(&self.file, &mut text, 0).unwrap_or(0);
        text[..n].to_vec()
    }

    fn is_clean(&self, text: &[u8]) -> bool {
        !self.boot_id.is_empty() && text == self.boot_id.as_bytes()
    }

    /// In place: a file that is cut short and written again makes some file systems write to the disk at once.
    fn mark(&self, text: &str) -> io::Result<()> {
        rustix::io::pwrite(&self.file, text.as_bytes(), 0)?;
        Ok(())
    }

    /// Gives the uid back knowing that no process has it any more. A lease that is merely dropped, or whose
    /// runner died, is looked at again before it is given out.
    pub fn give_back_clean(self) {
        let _looked_at_again = self.mark(&self.boot_id);
    }
}

/// The lock by which a uid is given to one run at a time, held until dropped. Nothing is written: the next to
/// lease the uid still looks whether some process has it.
pub fn lock(uid: u32) -> Option<OwnedFd> {
    let path = Path::new(DIRECTORY).join(uid.to_string());
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).ok()?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(file)
}

fn prepare(directory: &Path) -> Result<(), LeaseError> {
    let failed = |source| LeaseError::Directory {
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
        false => Err(LeaseError::NotOurs {
            path: directory.to_path_buf(),
        }),
    }
}

/// Numbers that belong to someone by the host's own files.
struct Reserved {
    accounts: Vec<u32>,
    ranges: Vec<(u64, u64)>,
}

impl Reserved {
    fn read() -> Reserved {
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
        Reserved { accounts, ranges }
    }

    fn holds(&self, uid: u32) -> bool {
        self.accounts.contains(&uid)
            || self
                .ranges
                .iter()
                .any(|(first, end)| (*first..*end).contains(&u64::from(uid)))
    }
}

/// The process that a lease names as having its uid.
fn noted_holder(text: &[u8]) -> Option<u32> {
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

/// Looks through every process for uids and gids of the range: for each that some process has, one such process.
/// `None`: there is no /proc to look through.
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
        let take = || Lease::take_in(&directory, 1_899_999_990..1_899_999_993);
        let first = take().unwrap();
        let second = take().unwrap();
        let third = take().unwrap();
        assert!(first.uid != second.uid && second.uid != third.uid && first.uid != third.uid);
        assert!(matches!(take(), Err(LeaseError::NoneFree)));
        let uid = second.uid;
        second.give_back_clean();
        assert_eq!(take().unwrap().uid, uid);
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
        let take = || Lease::take_in(&directory, taken..taken + 1);
        assert_eq!(take().unwrap().uid, taken);
        let mut holder = std::process::Command::new("sleep")
            .arg("60")
            .uid(taken)
            .spawn()
            .unwrap();
        assert!(matches!(take(), Err(LeaseError::NoneFree)));
        // The next to ask finds who has it without a walk through all processes.
        let text = std::fs::read(directory.join(taken.to_string())).unwrap();
        assert_eq!(noted_holder(&text), Some(holder.id()));
        assert!(matches!(take(), Err(LeaseError::NoneFree)));
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert_eq!(take().unwrap().uid, taken);
    }

    /// What stays of a longer text behind a shorter one names nobody.
    #[test]
    fn a_holder_is_read_from_its_own_line_alone() {
        assert_eq!(noted_holder(b"-1234\n-4f1b-9d1d"), Some(1234));
        for text in [&b"-"[..], b"-234-5678", b"1234\n", b"", b"-x\n"] {
            assert_eq!(noted_holder(text), None, "{text:?}");
        }
    }

    #[test]
    fn accounts_and_subordinate_ranges_are_reserved() {
        let reserved = Reserved {
            accounts: vec![7],
            ranges: vec![(100_000, 165_536)],
        };
        assert!(reserved.holds(7) && reserved.holds(100_000) && reserved.holds(165_535));
        assert!(!reserved.holds(8) && !reserved.holds(165_536));
        assert!(Reserved::read().holds(0));
    }
}
