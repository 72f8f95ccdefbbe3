//! The two walks of a collection: one finds the candidates, one counts the names of files that have several.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, Statx, StatxAttributes, StatxFlags};
use rustix::io::Errno;

use super::content::{Content, Inode, Refusal};
use super::shortlist::{Candidate, Rank, Remarks, Shortlist, shown};
use super::{COMPONENT_BYTES_MAX, CollectError, Modes, PATH_BYTES_MAX, Progress, Put, Rules};
use crate::workspace::tree::Fault;
use crate::workspace::tree::walk::{LevelsFull, Next, OPEN_DIR, Visit, Walk};
use crate::workspace::tree::walk::{chmod_pinned, open_beneath, open_unlocked};
use store::types::manifest::{CollectedOutputs, ContentHash, Remark};

/// Directories that hold what a program can make again; files below them are counted, not taken.
///
/// | directory | made by |
/// |---|---|
/// | `__pycache__` | Python, beside every module that is imported |
/// | `.ipynb_checkpoints` | Jupyter, beside every notebook that is saved |
/// | `.pytest_cache`, `.mypy_cache`, `.ruff_cache` | these tools, where they are started |
/// | `.cache` | what follows the XDG rules and was told that this is home |
/// | any below the top with a `CACHEDIR.TAG` | whoever says so by <https://bford.info/cachedir/> |
const CACHES: [&[u8]; 6] = [
    b"__pycache__",
    b".ipynb_checkpoints",
    b".pytest_cache",
    b".mypy_cache",
    b".ruff_cache",
    b".cache",
];
const CACHE_TAG: &CStr = c"CACHEDIR.TAG";
const CACHE_SIGNATURE: &[u8] = b"Signature: 8a477f597d28d172789f06886806bc55";

/// Where the read-only views are mounted during the run, so that empty directories are left there. Whatever the
/// program puts into directories of these names when there is no such view is its own.
const VIEWS: [&[u8]; 2] = [b"data", b"docs"];

/// How often the caller hears of the walk.
const ENTRIES_PER_PROGRESS: u64 = 256;

/// Whether files in caches are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Caches {
    LeftOut,
    Taken,
}

/// What the first walk found.
pub(super) struct Found {
    pub(super) shortlist: Shortlist,
    /// At the path of an input and of its length: only the content, of which the hash is given, can tell whether it
    /// is that input.
    pub(super) suspects: Vec<(Candidate, ContentHash)>,
    pub(super) remarks: Remarks,
    /// Suspects whose modes had to be changed; under another name they may be outputs.
    pub(super) overridden: HashSet<Inode>,
    /// The counts of what is no output; nothing else is filled in.
    pub(super) counts: CollectedOutputs,
}

pub(super) fn find(
    top: BorrowedFd<'_>,
    rules: &Rules<'_>,
    caches: Caches,
    progress: &mut dyn FnMut(Progress),
) -> Result<Found, CollectError> {
    let mut finder = Finder {
        rules,
        caches,
        puts: rules.puts.iter().map(|p| (p.path.as_bytes(), p)).collect(),
        top_device: 0,
        path: Vec::new(),
        levels: Vec::new(),
        entries: 0,
        overridden: false,
        broken: None,
        found: Found {
            shortlist: Shortlist::new(rules.bounds.outputs),
            suspects: Vec::new(),
            remarks: Remarks::default(),
            overridden: HashSet::new(),
            counts: CollectedOutputs::default(),
        },
        progress,
    };
    Walk::new().run(top, &mut finder, LevelsFull::Fail);
    (finder.progress)(Progress::Walked {
        entries: finder.entries,
    });
    match finder.broken {
        None => Ok(finder.found),
        Some(error) => Err(error),
    }
}

struct Finder<'a> {
    rules: &'a Rules<'a>,
    caches: Caches,
    puts: HashMap<&'a [u8], &'a Put>,
    top_device: u64,
    /// Of the directory that the walk is in, with the name of the entry looked at behind it.
    path: Vec<u8>,
    levels: Vec<Level>,
    entries: u64,
    /// The directory opened last had no permissions for us before.
    overridden: bool,
    /// Why the collection as a whole cannot be believed.
    broken: Option<CollectError>,
    found: Found,
    progress: &'a mut dyn FnMut(Progress),
}

/// A directory on the way from the top, which is the first.
struct Level {
    path_bytes: usize,
    in_cache: bool,
    /// Nothing in it can be an output, because of its depth, and that has been said.
    said_too_deep: bool,
}

impl Visit for Finder<'_> {
    fn open(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Fault> {
        let opened = open_beneath(dir, name, OPEN_DIR);
        self.overridden = self.rules.modes == Modes::Override
            && matches!(opened, Err(Fault::Open(Errno::ACCESS)));
        match self.overridden {
            false => opened,
            // Without permission to search it, `.` cannot be looked up in the top; but it is held open.
            true if self.levels.is_empty() => {
                let stat = rustix::fs::fstat(dir).map_err(Fault::Stat)?;
                chmod_pinned(dir, stat.st_mode & 0o1777 | 0o700)?;
                open_beneath(dir, name, OPEN_DIR)
            }
            true => open_unlocked(dir, name),
        }
    }

    fn entered(&mut self, dir: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> Result<(), Fault> {
        let name = name.to_bytes();
        let is_top = self.levels.is_empty();
        let in_cache = self.levels.last().is_some_and(|level| level.in_cache);
        let in_cache = in_cache || (!is_top && self.is_cache_name(name));
        let foreign = stat.stx_uid != self.rules.owner_uid;
        let (device, _) = inode(stat);
        if is_top {
            self.top_device = device;
        } else if device != self.top_device {
            // A subvolume is no mount, yet has inode numbers of its own.
            return Err(Fault::MountPoint);
        } else if foreign && !in_cache && !self.is_view(name) {
            return Err(Fault::Foreign(stat.stx_uid));
        }
        self.overridden |= grant_search(dir, stat, self.rules.modes)?;
        let within_depth = self.levels.len() < self.depth_max();
        let may_be_tagged = !is_top && within_depth && self.caches == Caches::LeftOut;
        let in_cache = in_cache || (may_be_tagged && self.has_cache_tag(dir)?);
        if !is_top {
            self.push(name);
        }
        if self.overridden && !in_cache {
            self.found.remarks.add(&self.path, Remark::ModeOverridden);
        }
        self.levels.push(Level {
            path_bytes: self.path.len(),
            in_cache,
            said_too_deep: false,
        });
        Ok(())
    }

    fn entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, _: FileType) -> Result<Next, Fault> {
        if self.broken.is_some() {
            return Ok(Next::Stop);
        }
        self.entries += 1;
        if self.entries.is_multiple_of(ENTRIES_PER_PROGRESS) {
            (self.progress)(Progress::Walked {
                entries: self.entries,
            });
        }
        if self.levels.len() == 1 && name.to_bytes() == sandbox::HIDDEN_DIR.as_bytes() {
            return Ok(Next::Done);
        }
        if self.is_too_deep() {
            return Ok(Next::Done);
        }
        match look_at(dir, name)? {
            None => Ok(Next::Done),
            Some(stat) => Ok(self.judge(name.to_bytes(), &stat)),
        }
    }

    fn left(&mut self, _: BorrowedFd<'_>, _: &CStr) -> Result<(), Fault> {
        self.levels.pop();
        self.back();
        Ok(())
    }

    fn failed(&mut self, name: &CStr, fault: &Fault) {
        let itself = name == c".";
        let refusal = Refusal::from(fault);
        match (self.levels.as_slice(), refusal) {
            ([], Refusal::Entry(_)) => self.broken = Some(top_error(fault)),
            ([_], Refusal::Entry(_)) if itself => self.broken = Some(top_error(fault)),
            (levels, Refusal::Entry(remark)) => {
                // The way back up is lost, and with it all that was still to be walked, also outside the cache.
                let lost = itself && !matches!(fault, Fault::Read(_));
                let in_cache = levels.last().is_some_and(|level| level.in_cache);
                if !lost && (in_cache || self.is_cache_name(name.to_bytes())) {
                    return;
                }
                if !itself {
                    self.push(name.to_bytes());
                }
                self.found.remarks.add(&self.path, remark);
                self.back();
            }
            (_, Refusal::Starved(source)) => {
                let path = shown(&self.path);
                self.broken
                    .get_or_insert(CollectError::Starved { path, source });
            }
        }
    }
}

impl Finder<'_> {
    fn depth_max(&self) -> usize {
        usize::try_from(self.rules.bounds.depth).unwrap_or(usize::MAX)
    }

    /// In the directory that the walk is in.
    fn is_view(&self, name: &[u8]) -> bool {
        self.levels.len() == 1 && VIEWS.contains(&name)
    }

    fn is_cache_name(&self, name: &[u8]) -> bool {
        self.caches == Caches::LeftOut && CACHES.contains(&name)
    }

    /// Whether the directory that the walk is in lies too deep to hold outputs. Said once, and only of one that is
    /// not empty.
    fn is_too_deep(&mut self) -> bool {
        let depth_max = self.depth_max();
        let depth = self.levels.len().saturating_sub(1);
        let Some(level) = self.levels.last_mut().filter(|_| depth >= depth_max) else {
            return false;
        };
        if !level.said_too_deep && !level.in_cache {
            self.found.remarks.add(&self.path, Remark::TooDeep);
        }
        level.said_too_deep = true;
        true
    }

    fn judge(&mut self, name: &[u8], stat: &Statx) -> Next {
        let kind = FileType::from_raw_mode(stat.stx_mode.into());
        let is_dir = kind == FileType::Directory;
        let parent_in_cache = self.levels.last().is_some_and(|level| level.in_cache);
        if parent_in_cache || (is_dir && self.is_cache_name(name)) {
            // Below a cache nothing is worth a remark, so there is nothing to see beyond the depth either.
            let enter = is_dir && self.levels.len() < self.depth_max();
            self.found.counts.cached += u64::from(!is_dir);
            return if enter { Next::Enter } else { Next::Done };
        }
        let is_view = is_dir && self.is_view(name);
        self.push(name);
        let judged = match (self.judge_path(name, is_view, stat), kind) {
            (Some(remark), _) => Err(remark),
            (None, FileType::Directory) => Ok(Next::Enter),
            (None, FileType::RegularFile) => self.judge_file(stat),
            (None, FileType::Symlink) => Err(Remark::Symlink),
            (None, FileType::Fifo) => Err(Remark::Fifo),
            (None, FileType::Socket) => Err(Remark::Socket),
            (None, FileType::CharacterDevice | FileType::BlockDevice) => Err(Remark::Device),
            (None, FileType::Unknown) => Err(Remark::Unreadable),
        };
        let next = judged.unwrap_or_else(|remark| {
            if !(is_view && remark == Remark::MountPoint) {
                self.found.remarks.add(&self.path, remark);
            }
            Next::Done
        });
        self.back();
        next
    }

    fn judge_path(&self, name: &[u8], is_view: bool, stat: &Statx) -> Option<Remark> {
        let is_dir = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory;
        let mounted = stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
        if self.path.len() > PATH_BYTES_MAX || name.len() > COMPONENT_BYTES_MAX {
            Some(Remark::NameTooLong)
        } else if mounted || (is_dir && inode(stat).0 != self.top_device) {
            Some(Remark::MountPoint)
        } else if is_dir && !is_view && stat.stx_uid != self.rules.owner_uid {
            Some(Remark::NotOwned)
        } else {
            None
        }
    }

    fn judge_file(&mut self, stat: &Statx) -> Result<Next, Remark> {
        let found = &mut self.found;
        let wanted = self.rules.wanted;
        if wanted.is_some_and(|globs| !globs.matches_bytes(&self.path)) {
            found.counts.not_asked += 1;
            return Ok(Next::Done);
        }
        if stat.stx_uid != self.rules.owner_uid {
            return Err(Remark::NotOwned);
        }
        let put = self.puts.get(self.path.as_slice());
        let put = put.filter(|put| put.bytes == stat.stx_size);
        if put.is_none() && stat.stx_size > self.rules.bounds.file_bytes {
            return Err(Remark::FileTooLarge);
        }
        let rank = Rank::of(&self.path, stat.stx_size, self.rules);
        if put.is_none() && found.shortlist.refuses(&rank) {
            return Err(Remark::TooMany);
        }
        let candidate = Candidate {
            path: self.path.as_slice().into(),
            bytes: stat.stx_size,
            priority: rank.priority,
            inode: inode(stat),
            linked: stat.stx_nlink > 1,
        };
        match put {
            Some(put) => found.suspects.push((candidate, put.blake3)),
            None => found.shortlist.offer(candidate, &mut found.remarks),
        }
        Ok(Next::Done)
    }

    fn push(&mut self, name: &[u8]) {
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
    }

    /// Makes the path that of the directory again.
    fn back(&mut self) {
        let bytes = self.levels.last().map_or(0, |level| level.path_bytes);
        self.path.truncate(bytes);
    }

    /// Whether a directory says of itself that it is a cache. Its tag is opened like any other file: only when it
    /// was seen to be a regular one, and believed only if it still is.
    fn has_cache_tag(&self, dir: BorrowedFd<'_>) -> Result<bool, Fault> {
        let ours = |file: &OwnedFd| {
            rustix::fs::fstat(file).is_ok_and(|stat| {
                FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                    && stat.st_uid == self.rules.owner_uid
            })
        };
        let plain = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        for flags in [OFlags::PATH | OFlags::NOFOLLOW, OFlags::RDONLY | plain] {
            let file = match open_beneath(dir, CACHE_TAG, flags) {
                Ok(file) => file,
                Err(fault) => match Refusal::from(&fault) {
                    Refusal::Starved(_) => return Err(fault),
                    Refusal::Entry(_) => return Ok(false),
                },
            };
            if !ours(&file) {
                return Ok(false);
            }
            if flags.contains(OFlags::PATH) {
                continue;
            }
            let mut begins = [0; CACHE_SIGNATURE.len()];
            let read = rustix::io::pread(&file, &mut begins[..], 0);
            return Ok(read == Ok(begins.len()) && begins == CACHE_SIGNATURE);
        }
        Ok(false)
    }
}

fn top_error(fault: &Fault) -> CollectError {
    let source = match fault {
        Fault::Open(e) | Fault::Stat(e) | Fault::Read(e) | Fault::ChangeMode(e) => *e,
        // Nothing else happens to a directory that is held open.
        _ => Errno::XDEV,
    };
    CollectError::Top { source }
}

fn inode(stat: &Statx) -> Inode {
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    (device, stat.stx_ino)
}

/// `None` if it is gone.
fn look_at(dir: BorrowedFd<'_>, name: &CStr) -> Result<Option<Statx>, Fault> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    match rustix::fs::statx(dir, name, flags, StatxFlags::BASIC_STATS) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(Fault::Stat(e)),
    }
}

/// Lets the owner search a directory, and says whether that was needed: the kernel is asked, since root may do what
/// the mode forbids.
fn grant_search(dir: BorrowedFd<'_>, stat: &Statx, modes: Modes) -> Result<bool, Fault> {
    let mode = u32::from(stat.stx_mode);
    if mode & 0o100 != 0 || modes == Modes::Respect {
        return Ok(false);
    }
    match rustix::fs::accessat(dir, c".", Access::EXEC_OK, AtFlags::EACCESS) {
        Ok(()) => Ok(false),
        Err(Errno::ACCESS) => {
            let mode = Mode::from_raw_mode(mode & 0o1777 | 0o700);
            rustix::fs::fchmod(dir, mode).map_err(Fault::ChangeMode)?;
            Ok(true)
        }
        Err(e) => Err(Fault::Stat(e)),
    }
}

/// A file with several names.
#[derive(Default)]
pub(super) struct Linked {
    /// How many of them are in the workspace.
    pub(super) names: u64,
    /// What it held, once one of them was read.
    pub(super) content: Option<Content>,
}

/// How deep names are counted: beyond this each level costs memory, and no path leads there.
const COUNTED_DEPTH_MAX: usize = 4095;

/// Counts the names that the given files have anywhere in the workspace, be it in a cache, in the hidden directory or
/// deeper than outputs may lie. What cannot be reached is not counted, so that its files count as linked elsewhere.
pub(super) fn count_names(
    top: BorrowedFd<'_>,
    modes: Modes,
    files: &mut HashMap<Inode, Linked>,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), CollectError> {
    let mut counter = Counter {
        modes,
        files,
        depth: 0,
        entries: 0,
        starved: None,
        progress,
    };
    Walk::new().run(top, &mut counter, LevelsFull::Fail);
    match counter.starved {
        None => Ok(()),
        Some((path, source)) => Err(CollectError::Starved { path, source }),
    }
}

struct Counter<'a> {
    modes: Modes,
    files: &'a mut HashMap<Inode, Linked>,
    depth: usize,
    entries: u64,
    starved: Option<(String, Errno)>,
    progress: &'a mut dyn FnMut(Progress),
}

impl Visit for Counter<'_> {
    fn open(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Fault> {
        match self.modes {
            Modes::Override => open_unlocked(dir, name),
            Modes::Respect => open_beneath(dir, name, OPEN_DIR),
        }
    }

    fn entered(&mut self, dir: BorrowedFd<'_>, _: &CStr, stat: &Statx) -> Result<(), Fault> {
        grant_search(dir, stat, self.modes)?;
        self.depth += 1;
        Ok(())
    }

    fn entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, kind: FileType) -> Result<Next, Fault> {
        if self.starved.is_some() {
            return Ok(Next::Stop);
        }
        self.entries += 1;
        if self.entries.is_multiple_of(ENTRIES_PER_PROGRESS) {
            (self.progress)(Progress::Walked {
                entries: self.entries,
            });
        }
        let enter = match self.depth < COUNTED_DEPTH_MAX {
            true => Next::Enter,
            false => Next::Done,
        };
        match kind {
            FileType::Directory => return Ok(enter),
            FileType::RegularFile | FileType::Unknown => {}
            _ => return Ok(Next::Done),
        }
        let Some(stat) = look_at(dir, name)? else {
            return Ok(Next::Done);
        };
        if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory {
            return Ok(enter);
        }
        if let Some(linked) = self.files.get_mut(&inode(&stat)) {
            linked.names += 1;
        }
        Ok(Next::Done)
    }

    fn left(&mut self, _: BorrowedFd<'_>, _: &CStr) -> Result<(), Fault> {
        self.depth -= 1;
        Ok(())
    }

    fn failed(&mut self, name: &CStr, fault: &Fault) {
        if let Refusal::Starved(source) = Refusal::from(fault) {
            let path = shown(name.to_bytes());
            self.starved.get_or_insert((path, source));
        }
    }
}
