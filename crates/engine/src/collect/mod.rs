//! From a workspace in which every process is proved dead to a bounded, hashed list of what to keep.
//!
//! Everything in it was written by an attacker. Nothing is moved here, and nothing changed but modes that forbid
//! reading; nothing is executed, parsed or believed:
//!
//! - The walk is that of [`crate::workspace::tree`]: from the held directory, one component at a time, through no symlink and
//!   into no mount. Only a regular file of the run's own is ever opened, by `openat2` with the same rules and
//!   without blocking, after it was pinned and found to be one; it is found to be the same one after it was opened, and unchanged
//!   after it was hashed.
//! - What is not taken is listed with its reason, and the rest goes on. Only what is our own trouble (no descriptors,
//!   no memory, a top that cannot be read) is an error: as a remark it would blame the program for ever.
//!
//! What is taken does not depend on the order in which a file system lists its names, so that a repeat finds the same:
//!
//! 1. A regular file is a candidate if its path is within the bounds, it is in no cache, a pattern asks for it, the run
//!    owns it, it is no unchanged input, and its length is within `file_bytes`; the first of these that it fails is
//!    what is counted or remarked.
//! 2. The candidates are put in order, so that many files of no interest cannot displace a result: first those that
//!    `--expect` or `--output` names by their whole path, then those that a pattern of `--expect` means, then `result.json` at the top, then all
//!    others; among equals the less deep, then the shorter, then the first in the byte order of their paths. The first `outputs` are kept, and
//!    only so many that their paths together stay within 256 bytes each on average (or within 1 MiB in all, where that is more).
//! 3. In that order each is refused if it has names outside the workspace or if its length does not fit into what is left of
//!    `total_bytes`; later ones may still fit. A file with several names is hashed once and counted with each name: whoever
//!    exports the outputs may have to write each.
//!
//! Memory: about 300 bytes and its path for each output, nothing for any other file.

mod content;
mod find;
mod globs;
mod media;
mod shortlist;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

pub use globs::{GLOB_BYTES_MAX, GLOBS_MAX, GlobError, Globs};

use serde::{Deserialize, Serialize};

use content::{Content, Inode, Pinned, Reader, Refusal};
use find::{Caches, Found, Linked};
use shortlist::{Candidate, Remarks, shown};
use store::artifacts::hashing::HashThreads;
pub use store::types::manifest::{COMPONENT_BYTES_MAX, PATH_BYTES_MAX};
use store::types::manifest::{CollectedOutputs, ContentHash, Output, OutputPath, Remark};

/// Inputs that can be listed before a run, which are then held in memory to its end.
pub const PUTS_MAX: u64 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Of all outputs together, by length, whether or not they are names of one file.
    pub total_bytes: u64,
    pub file_bytes: u64,
    /// How many.
    pub outputs: u64,
    /// Components of a path.
    pub depth: u32,
}

/// An input as it was put there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Put {
    pub path: OutputPath,
    pub bytes: u64,
    pub blake3: ContentHash,
}

#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    pub bounds: Bounds,
    /// Whose files are taken.
    pub owner_uid: u32,
    /// `None` takes all.
    pub wanted: Option<&'a Globs>,
    /// What `--expect` names, which is taken before all else.
    pub expected: Option<&'a Globs>,
    pub puts: &'a [Put],
    pub modes: Modes,
}

/// What is done about a mode that forbids reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Modes {
    /// It is changed: the workspace is ours, and will be removed.
    Override,
    /// It is respected: somebody only lends us the directory.
    Respect,
}

/// Told often; the caller decides how much of it anybody sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It may begin again once, when files have several names.
    Walked {
        entries: u64,
    },
    Hashed {
        bytes: u64,
        of: u64,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    #[error("read the working directory of the analysis")]
    Top {
        #[source]
        source: Errno,
    },
    #[error(
        "look at {path:?} in the working directory: this host is short of memory or descriptors; repeat it when it is not"
    )]
    Starved {
        path: String,
        #[source]
        source: Errno,
    },
    #[error(
        "the inputs are more than {PUTS_MAX} files, or have very long paths; show them with --read instead of copying them"
    )]
    TooManyPuts,
}

/// What to keep of the directory. Every process that could write in it must be dead.
pub fn collect(
    dir: BorrowedFd<'_>,
    rules: &Rules<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<CollectedOutputs, CollectError> {
    run(
        dir,
        rules,
        Caches::LeftOut,
        HashThreads::PerProcessor,
        progress,
    )
}

/// What was put there before the start, caches too, sorted by path. What is no regular file of the owner is no input to
/// subtract: if it is still there at the end it is remarked then.
pub fn puts(dir: BorrowedFd<'_>, owner_uid: u32) -> Result<Vec<Put>, CollectError> {
    let rules = Rules {
        bounds: Bounds {
            total_bytes: u64::MAX,
            file_bytes: u64::MAX,
            outputs: PUTS_MAX,
            depth: u32::MAX,
        },
        owner_uid,
        wanted: None,
        expected: None,
        puts: &[],
        modes: Modes::Override,
    };
    // The program is started next, by a fork: no thread of ours may be about then.
    let collected = run(dir, &rules, Caches::Taken, HashThreads::One, &mut |_| {})?;
    if collected.remark_counts.contains_key(&Remark::TooMany) {
        return Err(CollectError::TooManyPuts);
    }
    let put = |output: Output| Put {
        path: output.path,
        bytes: output.bytes,
        blake3: output.blake3,
    };
    Ok(collected.outputs.into_iter().map(put).collect())
}

fn run(
    dir: BorrowedFd<'_>,
    rules: &Rules<'_>,
    caches: Caches,
    threads: HashThreads,
    progress: &mut dyn FnMut(Progress),
) -> Result<CollectedOutputs, CollectError> {
    let mut found = find::find(dir, rules, caches, progress)?;
    let suspects = std::mem::take(&mut found.suspects);
    let to_hash = suspects.iter().map(|s| &s.0).chain(found.shortlist.iter());
    let of = to_hash.fold(0, |sum: u64, c| sum.saturating_add(c.bytes));
    let mut reader = Reader::new(of, threads, progress);
    for suspect in suspects {
        subtract(dir, rules, suspect, &mut found, &mut reader)?;
    }
    let several = found.shortlist.iter().filter(|c| c.linked);
    let mut linked: HashMap<_, _> = several.map(|c| (c.inode, Linked::default())).collect();
    if !linked.is_empty() {
        find::count_names(dir, rules.modes, &mut linked, reader.progress)?;
    }
    let Found {
        shortlist,
        remarks,
        overridden,
        mut counts,
        ..
    } = found;
    let mut taker = Taker {
        dir,
        rules,
        linked,
        overridden,
        remarks,
        total_bytes: 0,
    };
    let candidates = shortlist.into_sorted();
    counts.outputs.reserve_exact(candidates.len());
    for candidate in candidates {
        let output = taker.take(candidate, &mut reader)?;
        counts.outputs.extend(output);
    }
    counts.outputs.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    counts.bytes = taker.total_bytes;
    counts.remarks = taker.remarks.listed;
    counts.remark_counts = taker.remarks.counts;
    Ok(counts)
}

/// Counts an input that is as it was put there; another becomes a candidate. One that cannot be read does too, and is
/// refused when its turn comes.
fn subtract(
    dir: BorrowedFd<'_>,
    rules: &Rules<'_>,
    (suspect, put): (Candidate, ContentHash),
    found: &mut Found,
    reader: &mut Reader<'_>,
) -> Result<(), CollectError> {
    reader.turn_to(suspect.bytes);
    let path = c_path(&suspect.path);
    let read = Pinned::new(dir, &path, suspect.inode, rules.owner_uid)
        .and_then(|pinned| pinned.read(dir, &path, rules.modes, reader));
    match read {
        Err(Refusal::Starved(source)) => return Err(starved(&suspect.path, source)),
        Err(Refusal::Entry(_)) => {}
        Ok(content) => {
            if content.overridden {
                found.overridden.insert(suspect.inode);
            }
            if (content.stamp.bytes, content.hash) == (suspect.bytes, put) {
                found.counts.inputs_unchanged += 1;
                return Ok(());
            }
        }
    }
    if suspect.bytes > rules.bounds.file_bytes {
        found.remarks.add(&suspect.path, Remark::FileTooLarge);
        return Ok(());
    }
    reader.expect_more(suspect.bytes);
    found.shortlist.offer(suspect, &mut found.remarks);
    Ok(())
}

/// Turns candidates into outputs, the most wanted first.
struct Taker<'a> {
    dir: BorrowedFd<'a>,
    rules: &'a Rules<'a>,
    linked: HashMap<Inode, Linked>,
    overridden: HashSet<Inode>,
    remarks: Remarks,
    total_bytes: u64,
}

impl Taker<'_> {
    fn take(
        &mut self,
        candidate: Candidate,
        reader: &mut Reader<'_>,
    ) -> Result<Option<Output>, CollectError> {
        reader.turn_to(candidate.bytes);
        let path = c_path(&candidate.path);
        let owner_uid = self.rules.owner_uid;
        let taken = Pinned::new(self.dir, &path, candidate.inode, owner_uid).and_then(|pinned| {
            let content = self.content(&candidate, &path, &pinned, reader)?;
            Ok((pinned, content))
        });
        let (pinned, content) = match taken {
            Ok(taken) => taken,
            Err(Refusal::Starved(source)) => return Err(starved(&candidate.path, source)),
            Err(Refusal::Entry(remark)) => {
                self.remarks.add(&candidate.path, remark);
                return Ok(None);
            }
        };
        if pinned.stat.st_mode & 0o6000 != 0 {
            self.remarks.add(&candidate.path, Remark::SetIdDropped);
        }
        if content.overridden || self.overridden.contains(&candidate.inode) {
            self.remarks.add(&candidate.path, Remark::ModeOverridden);
        }
        let media_type = media::media_type(&candidate.path, content.look).to_owned();
        let Ok(path) = OutputPath::new(candidate.path.into_vec()) else {
            // The kernel gives no name that is empty, `.`, `..` or has a slash in it.
            return Ok(None);
        };
        Ok(Some(Output {
            path,
            bytes: content.stamp.bytes,
            blake3: content.hash,
            media_type,
            modified_ms: pinned.modified_ms(),
            inode: candidate.inode.1,
        }))
    }

    /// What it holds, if that fits; read only under the first of its names.
    fn content(
        &mut self,
        candidate: &Candidate,
        path: &CStr,
        pinned: &Pinned,
        reader: &mut Reader<'_>,
    ) -> Result<Content, Refusal> {
        let linked = self.linked.get_mut(&candidate.inode);
        let names = linked.as_ref().map_or(1, |linked| linked.names);
        let bytes = pinned.stamp().bytes;
        #[allow(clippy::useless_conversion, reason = "it has 32 bits on aarch64")]
        let links = u64::from(pinned.stat.st_nlink);
        if links > names {
            return Err(Remark::LinkedElsewhere.into());
        }
        if bytes > self.rules.bounds.file_bytes {
            return Err(Remark::FileTooLarge.into());
        }
        let total_bytes = self.total_bytes.saturating_add(bytes);
        if total_bytes > self.rules.bounds.total_bytes {
            return Err(Remark::TotalTooLarge.into());
        }
        let content = match linked.as_ref().and_then(|linked| linked.content) {
            Some(content) if content.stamp == pinned.stamp() => content,
            Some(_) => return Err(Remark::Changed.into()),
            None => pinned.read(self.dir, path, self.rules.modes, reader)?,
        };
        if content.stamp.bytes != bytes {
            return Err(Remark::Changed.into());
        }
        self.total_bytes = total_bytes;
        if let Some(linked) = linked {
            linked.content = Some(content);
        }
        Ok(content)
    }
}

fn c_path(path: &[u8]) -> CString {
    CString::new(path).expect("names that the kernel gave hold no NUL")
}

fn starved(path: &[u8], source: Errno) -> CollectError {
    CollectError::Starved {
        path: shown(path),
        source,
    }
}
