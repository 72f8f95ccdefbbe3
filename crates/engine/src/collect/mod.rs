//! From a workspace in which every process is proved dead to a bounded, hashed list of outputs.
//!
//! Assume that an attacker wrote everything in the workspace. Collection moves nothing, changes only modes that
//! forbid reading, and executes or parses nothing:
//!
//! - The walk is that of `crate::workspace::tree`: it starts from the held directory, uses one component at a time,
//!   follows no symlink and enters no mount. Only regular files that belong to the run are opened, with `openat2`
//!   under the same rules and without blocking. Each file is pinned and checked before it is opened, checked to be
//!   the same file after it was opened, and checked to be unchanged after it was hashed.
//! - An entry that is not collected gets a remark with the reason, and the collection goes on. Only problems of
//!   Fumehood's own (no descriptors, no memory, a top directory that cannot be read) are errors: as remarks they would
//!   blame the program permanently.
//!
//! The result does not depend on the order in which a file system lists names, so a repeated collection finds the
//! same:
//!
//! 1. A regular file is a candidate if its path is within the bounds, it is in no cache, a pattern selects it, the
//!    run owns it, it is not an unchanged input, and its length is within `file_bytes`. The first condition that
//!    fails decides what is counted or remarked.
//! 2. Candidates are sorted, so that many files of no interest cannot displace a result: first those whose whole path
//!    `--expect` or `--output` names, then those that match a pattern of `--expect`, then `result.json` at the top,
//!    then all others; among equals the less deep, then the smaller, then the first in byte order of paths. The first
//!    `outputs` are kept, as long as their paths take no more than 256 bytes each on average, or 1 MiB in total if
//!    that is more.
//! 3. In that order, a candidate is refused if it has names outside the workspace, or if its length exceeds what is
//!    left of `total_bytes`; later candidates may still fit. A file with several names is hashed once and counted
//!    with each name, because an export may have to write each.
//!
//! Memory: about 300 bytes and the path for each output, nothing for any other file.
//!
//! - `find.rs`: the walks that find candidates and count names.
//! - `shortlist.rs`: the order of candidates, and the remarks.
//! - `content.rs`: opens and hashes one file.
//! - `globs.rs`: the patterns of `--output` and `--expect`.
//! - `media.rs`: guesses media types.

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

pub use globs::{GlobError, Globs};

use serde::{Deserialize, Serialize};

use content::{EntryRefusal, FileContent, HashingReader, Inode, PinnedFile};
use find::{CachePolicy, FoundFiles, LinkedFile};
use shortlist::{Candidate, RemarkList, displayed_path};
use store::artifacts::files;
use store::artifacts::hashing::HashThreads;
use store::types::manifest::{
    COMPONENT_BYTES_MAX, CollectedOutputs, ContentHash, Output, OutputPath, PATH_BYTES_MAX, Remark,
};

/// The most inputs that can be listed before a run. They are held in memory until it ends.
pub(crate) const STAGED_INPUTS_MAX: u64 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CollectionBounds {
    /// The length of all outputs together. Each name of a file counts.
    pub total_bytes: u64,
    pub file_bytes: u64,
    /// The number of outputs.
    pub outputs: u64,
    /// The number of components of a path.
    pub depth: u32,
}

/// An input as it was before the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StagedInput {
    pub path: OutputPath,
    pub bytes: u64,
    pub blake3: ContentHash,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectionRules<'a> {
    pub bounds: CollectionBounds,
    /// Only files of this user are collected.
    pub owner_uid: u32,
    /// The patterns of `--output`. `None` selects every file.
    pub wanted: Option<&'a Globs>,
    /// The patterns of `--expect`, which take precedence over all other files.
    pub expected: Option<&'a Globs>,
    pub staged_inputs: &'a [StagedInput],
    pub modes: ModePolicy,
}

/// What to do about a mode that forbids reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModePolicy {
    /// Change it: the workspace was made for this run and will be removed.
    Override,
    /// Leave it: the directory belongs to somebody else.
    Respect,
}

/// Progress of a collection. Reported often; the caller decides what to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectProgress {
    /// Entries looked at. The count starts again once if files have several names.
    Walked {
        /// How many so far.
        entries: u64,
    },
    /// Bytes hashed.
    Hashed {
        /// How many so far.
        bytes: u64,
        /// How many are expected in all. It grows if a file must be read once more.
        of: u64,
    },
}

/// Why a collection ended without a list of outputs. The program is not to blame.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum CollectError {
    /// The working directory itself could not be read.
    #[error("read the working directory of the analysis")]
    Top {
        #[source]
        source: Errno,
    },
    /// An entry could not be examined because this host is short of memory or descriptors.
    #[error(
        "look at {path:?} in the working directory: this host is short of memory or descriptors; repeat it when it is not"
    )]
    OutOfResources {
        path: String,
        #[source]
        source: Errno,
    },
    /// The inputs are too many to list before the run.
    #[error(
        "the inputs are more than {STAGED_INPUTS_MAX} files, or have very long paths; show them with --read instead of copying them"
    )]
    TooManyInputs,
}

/// Lists what to keep of the directory. Every process that could write to it must be dead.
pub(crate) fn collect(
    dir: BorrowedFd<'_>,
    rules: &CollectionRules<'_>,
    progress: &mut dyn FnMut(CollectProgress),
) -> Result<CollectedOutputs, CollectError> {
    run_collection(
        dir,
        rules,
        CachePolicy::Skip,
        HashThreads::PerProcessor,
        progress,
    )
}

/// Lists the inputs before the program starts, including caches, sorted by path. Entries other than regular files of
/// the owner are not listed; if they still exist at the end, they get a remark then.
pub(crate) fn list_staged_inputs(
    dir: BorrowedFd<'_>,
    owner_uid: u32,
) -> Result<Vec<StagedInput>, CollectError> {
    let rules = CollectionRules {
        bounds: CollectionBounds {
            total_bytes: u64::MAX,
            file_bytes: u64::MAX,
            outputs: STAGED_INPUTS_MAX,
            depth: u32::MAX,
        },
        owner_uid,
        wanted: None,
        expected: None,
        staged_inputs: &[],
        modes: ModePolicy::Override,
    };
    // This thread hashes the inputs alone. The collection of outputs uses several threads.
    let collected = run_collection(
        dir,
        &rules,
        CachePolicy::Include,
        HashThreads::One,
        &mut |_| {},
    )?;
    if collected.remark_counts.contains_key(&Remark::TooMany) {
        return Err(CollectError::TooManyInputs);
    }
    let staged_input = |output: Output| StagedInput {
        path: output.path,
        bytes: output.bytes,
        blake3: output.blake3,
    };
    Ok(collected.outputs.into_iter().map(staged_input).collect())
}

fn run_collection(
    dir: BorrowedFd<'_>,
    rules: &CollectionRules<'_>,
    cache_policy: CachePolicy,
    threads: HashThreads,
    progress: &mut dyn FnMut(CollectProgress),
) -> Result<CollectedOutputs, CollectError> {
    let mut found = find::find_candidates(dir, rules, cache_policy, progress)?;
    let possible_inputs = std::mem::take(&mut found.possible_inputs);
    let to_hash = possible_inputs
        .iter()
        .map(|s| &s.0)
        .chain(found.shortlist.iter());
    let of = to_hash.fold(0, |sum: u64, c| sum.saturating_add(c.bytes));
    let mut reader = HashingReader::new(of, threads, progress);
    for possible_input in possible_inputs {
        subtract_input(dir, rules, possible_input, &mut found, &mut reader)?;
    }
    let several = found.shortlist.iter().filter(|c| c.linked);
    let mut linked: HashMap<_, _> = several.map(|c| (c.inode, LinkedFile::default())).collect();
    if !linked.is_empty() {
        find::count_names(dir, rules.modes, &mut linked, reader.progress)?;
    }
    let FoundFiles {
        shortlist,
        remarks,
        overridden,
        mut counts,
        ..
    } = found;
    let mut collector = OutputCollector {
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
        let output = collector.collect(candidate, &mut reader)?;
        counts.outputs.extend(output);
    }
    counts.outputs.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    counts.bytes = collector.total_bytes;
    counts.remarks = collector.remarks.listed;
    counts.remark_counts = collector.remarks.counts;
    Ok(counts)
}

/// Counts an input that is unchanged. A changed one becomes a candidate. One that cannot be read does too, and is
/// refused later.
fn subtract_input(
    dir: BorrowedFd<'_>,
    rules: &CollectionRules<'_>,
    (possible_input, staged_input): (Candidate, ContentHash),
    found: &mut FoundFiles,
    reader: &mut HashingReader<'_>,
) -> Result<(), CollectError> {
    reader.begin_file(possible_input.bytes);
    let path = c_path(&possible_input.path);
    let read = PinnedFile::new(dir, &path, possible_input.inode, rules.owner_uid)
        .and_then(|pinned| pinned.read(dir, &path, rules.modes, reader));
    match read {
        Err(EntryRefusal::OutOfResources(source)) => {
            return Err(out_of_resources(&possible_input.path, source));
        }
        Err(EntryRefusal::Entry(_)) => {}
        Ok(content) => {
            if content.overridden {
                found.overridden.insert(possible_input.inode);
            }
            if (content.stamp.bytes, content.hash) == (possible_input.bytes, staged_input) {
                found.counts.inputs_unchanged += 1;
                return Ok(());
            }
        }
    }
    if possible_input.bytes > rules.bounds.file_bytes {
        found
            .remarks
            .add(&possible_input.path, Remark::FileTooLarge);
        return Ok(());
    }
    reader.add_expected_bytes(possible_input.bytes);
    found.shortlist.offer(possible_input, &mut found.remarks);
    Ok(())
}

/// Turns candidates into outputs, in the order of their rank.
struct OutputCollector<'a> {
    dir: BorrowedFd<'a>,
    rules: &'a CollectionRules<'a>,
    linked: HashMap<Inode, LinkedFile>,
    overridden: HashSet<Inode>,
    remarks: RemarkList,
    total_bytes: u64,
}

impl OutputCollector<'_> {
    fn collect(
        &mut self,
        candidate: Candidate,
        reader: &mut HashingReader<'_>,
    ) -> Result<Option<Output>, CollectError> {
        reader.begin_file(candidate.bytes);
        let path = c_path(&candidate.path);
        let owner_uid = self.rules.owner_uid;
        let read_result =
            PinnedFile::new(self.dir, &path, candidate.inode, owner_uid).and_then(|pinned| {
                let content = self.content(&candidate, &path, &pinned, reader)?;
                Ok((pinned, content))
            });
        let (pinned, content) = match read_result {
            Ok(pair) => pair,
            Err(EntryRefusal::OutOfResources(source)) => {
                return Err(out_of_resources(&candidate.path, source));
            }
            Err(EntryRefusal::Entry(remark)) => {
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
        let media_type = media::media_type(&candidate.path, content.guess).to_owned();
        let Ok(path) = OutputPath::new(candidate.path.into_vec()) else {
            // The kernel returns no name that is empty, `.`, `..` or contains a slash.
            return Ok(None);
        };
        Ok(Some(Output {
            path,
            bytes: content.stamp.bytes,
            blake3: content.hash,
            media_type,
            modified_ms: files::modified_ms(&pinned.stat),
            inode: candidate.inode.1,
        }))
    }

    /// The content of a candidate, if it fits the bounds. A file with several names is read once.
    fn content(
        &mut self,
        candidate: &Candidate,
        path: &CStr,
        pinned: &PinnedFile,
        reader: &mut HashingReader<'_>,
    ) -> Result<FileContent, EntryRefusal> {
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

fn out_of_resources(path: &[u8], source: Errno) -> CollectError {
    CollectError::OutOfResources {
        path: displayed_path(path),
        source,
    }
}
