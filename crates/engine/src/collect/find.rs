//! The two walks of a collection: one finds candidates, one counts the names of files with several hard links.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::ops::ControlFlow;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, Statx, StatxAttributes};
use rustix::io::Errno;

use super::content::{EntryRefusal, FileContent, Inode};
use super::shortlist::{Candidate, Rank, RemarkList, Shortlist};
use super::{
    COMPONENT_BYTES_MAX, CollectError, CollectProgress, CollectionRules, ModePolicy,
    PATH_BYTES_MAX, StagedInput, out_of_resources,
};
use crate::workspace::tree::EntryFault;
use crate::workspace::tree::walk::{DepthOverflow, OPEN_DIR, TreeVisitor, TreeWalk};
use crate::workspace::tree::walk::{EnteredDirectory, VisitAction, WalkedEntry};
use crate::workspace::tree::walk::{open_beneath, open_unlocked};
use store::types::manifest::{CollectedOutputs, ContentHash, Remark};

/// Directories whose content a program can produce again. Files below them are counted, not collected.
///
/// | directory | created by |
/// |---|---|
/// | `__pycache__` | Python, beside each imported module |
/// | `.ipynb_checkpoints` | Jupyter, beside each saved notebook |
/// | `.pytest_cache`, `.mypy_cache`, `.ruff_cache` | these tools, in their working directory |
/// | `.cache` | programs that follow the XDG rules, if HOME is the workspace |
/// | any below the top with a `CACHEDIR.TAG` | any program, see <https://bford.info/cachedir/> |
const CACHE_NAMES: [&[u8]; 6] = [
    b"__pycache__",
    b".ipynb_checkpoints",
    b".pytest_cache",
    b".mypy_cache",
    b".ruff_cache",
    b".cache",
];
const CACHE_TAG: &CStr = c"CACHEDIR.TAG";
const CACHE_SIGNATURE: &[u8] = b"Signature: 8a477f597d28d172789f06886806bc55";

/// Where the read-only views are mounted during the run, which leaves empty directories behind. If there is no such
/// view, the program may use these names for its own outputs.
const VIEWS: [&[u8]; 2] = [b"data", b"docs"];

/// Report progress once per this many entries.
const ENTRIES_PER_PROGRESS: u64 = 256;

/// What to do with files in caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CachePolicy {
    Skip,
    Include,
}

/// The result of the first walk.
pub(super) struct FoundFiles {
    pub(super) shortlist: Shortlist,
    /// Files with the path and length of an input. Only the content shows whether a file is that input, whose hash is
    /// given.
    pub(super) possible_inputs: Vec<(Candidate, ContentHash)>,
    pub(super) remarks: RemarkList,
    /// Possible inputs whose mode had to be changed. Under another name they may be outputs.
    pub(super) overridden: HashSet<Inode>,
    /// Counts of files that are not outputs; the other fields are empty.
    pub(super) counts: CollectedOutputs,
}

pub(super) fn find_candidates(
    top: BorrowedFd<'_>,
    rules: &CollectionRules<'_>,
    cache_policy: CachePolicy,
    progress: &mut dyn FnMut(CollectProgress),
) -> Result<FoundFiles, CollectError> {
    let mut finder = CandidateFinder {
        rules,
        cache_policy,
        staged_inputs: rules
            .staged_inputs
            .iter()
            .map(|p| (p.path.as_bytes(), p))
            .collect(),
        top_device: 0,
        path: Vec::new(),
        levels: Vec::new(),
        entries: EntryCounter { seen: 0, progress },
        overridden: false,
        fatal_error: None,
        found: FoundFiles {
            shortlist: Shortlist::new(rules.bounds.outputs),
            possible_inputs: Vec::new(),
            remarks: RemarkList::default(),
            overridden: HashSet::new(),
            counts: CollectedOutputs::default(),
        },
    };
    TreeWalk::new().run(top, &mut finder, DepthOverflow::Fail);
    finder.entries.report();
    finder.fatal_error.map_or(Ok(finder.found), Err)
}

/// Counts the entries of a walk, and reports them from time to time.
struct EntryCounter<'a> {
    seen: u64,
    progress: &'a mut dyn FnMut(CollectProgress),
}

impl EntryCounter<'_> {
    fn count(&mut self) {
        self.seen += 1;
        if self.seen.is_multiple_of(ENTRIES_PER_PROGRESS) {
            self.report();
        }
    }

    fn report(&mut self) {
        (self.progress)(CollectProgress::Walked { entries: self.seen });
    }
}

struct CandidateFinder<'a> {
    rules: &'a CollectionRules<'a>,
    cache_policy: CachePolicy,
    staged_inputs: HashMap<&'a [u8], &'a StagedInput>,
    top_device: u64,
    /// The path of the current directory, followed by the name of the current entry.
    path: Vec<u8>,
    levels: Vec<OpenDirectory>,
    entries: EntryCounter<'a>,
    /// The directory that was opened last had no permissions for this process.
    overridden: bool,
    /// Why the collection as a whole fails.
    fatal_error: Option<CollectError>,
    found: FoundFiles,
}

/// A directory on the way from the top. The top is the first.
struct OpenDirectory {
    path_bytes: usize,
    in_cache: bool,
    /// The remark that the directory is too deep for outputs has been made.
    depth_reported: bool,
}

impl TreeVisitor for CandidateFinder<'_> {
    fn open_directory(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, EntryFault> {
        let opened = open_beneath(dir, name, OPEN_DIR);
        self.overridden = self.rules.modes == ModePolicy::Override
            && matches!(opened, Err(EntryFault::Open(Errno::ACCESS)));
        match self.overridden {
            true => open_unlocked(dir, name),
            false => opened,
        }
    }

    fn enter_directory(&mut self, entered: EnteredDirectory<'_>) -> Result<(), EntryFault> {
        let EnteredDirectory { dir, name, stat } = entered;
        let name = name.to_bytes();
        let is_top = self.levels.is_empty();
        let in_cache = self.levels.last().is_some_and(|level| level.in_cache);
        let in_cache = in_cache || (!is_top && self.is_cache_name(name));
        let foreign = stat.stx_uid != self.rules.owner_uid;
        let (device, _) = inode(stat);
        if is_top {
            self.top_device = device;
        } else if device != self.top_device {
            // A btrfs subvolume is not a mount, but has inode numbers of its own.
            return Err(EntryFault::MountPoint);
        } else if foreign && !in_cache && !self.is_view(name) {
            return Err(EntryFault::Foreign(stat.stx_uid));
        }
        self.overridden |= grant_search(dir, stat, self.rules.modes)?;
        let within_depth = self.levels.len() < self.depth_max();
        let may_be_tagged = !is_top && within_depth && self.cache_policy == CachePolicy::Skip;
        let in_cache = in_cache || (may_be_tagged && self.has_cache_tag(dir)?);
        if !is_top {
            self.push_name(name);
        }
        if self.overridden && !in_cache {
            self.found.remarks.add(&self.path, Remark::ModeOverridden);
        }
        self.levels.push(OpenDirectory {
            path_bytes: self.path.len(),
            in_cache,
            depth_reported: false,
        });
        Ok(())
    }

    fn visit_entry(&mut self, entry: WalkedEntry<'_>) -> Result<VisitAction, EntryFault> {
        let name = entry.name.to_bytes();
        self.entries.count();
        if self.levels.len() == 1 && name == sandbox::HIDDEN_DIR.as_bytes() {
            return Ok(VisitAction::Done);
        }
        if self.is_too_deep() {
            return Ok(VisitAction::Done);
        }
        match entry.stat()? {
            None => Ok(VisitAction::Done),
            Some(stat) => Ok(self.classify_entry(name, &stat)),
        }
    }

    fn leave_directory(&mut self, _: BorrowedFd<'_>, _: &CStr) -> Result<(), EntryFault> {
        self.levels.pop();
        self.reset_path();
        Ok(())
    }

    fn report_fault(&mut self, name: &CStr, fault: &EntryFault) -> ControlFlow<()> {
        let itself = name == c".";
        let remark = match EntryRefusal::from(fault) {
            EntryRefusal::OutOfResources(source) => {
                self.fatal_error = Some(out_of_resources(&self.path, source));
                return ControlFlow::Break(());
            }
            EntryRefusal::Entry(_)
                if self.levels.is_empty() || itself && self.levels.len() == 1 =>
            {
                let source = fault.errno().unwrap_or(Errno::XDEV);
                self.fatal_error = Some(CollectError::Top { source });
                return ControlFlow::Break(());
            }
            EntryRefusal::Entry(remark) => remark,
        };
        // The walk cannot go back up, so everything that was still to be walked is lost, also outside the cache.
        let lost = itself && !matches!(fault, EntryFault::Read(_));
        let in_cache = self.levels.last().is_some_and(|level| level.in_cache);
        if lost || !in_cache && !self.is_cache_name(name.to_bytes()) {
            if !itself {
                self.push_name(name.to_bytes());
            }
            self.found.remarks.add(&self.path, remark);
            self.reset_path();
        }
        ControlFlow::Continue(())
    }
}

impl CandidateFinder<'_> {
    fn depth_max(&self) -> usize {
        usize::try_from(self.rules.bounds.depth).unwrap_or(usize::MAX)
    }

    /// Whether a name in the current directory is a mount point of a view.
    fn is_view(&self, name: &[u8]) -> bool {
        self.levels.len() == 1 && VIEWS.contains(&name)
    }

    fn is_cache_name(&self, name: &[u8]) -> bool {
        self.cache_policy == CachePolicy::Skip && CACHE_NAMES.contains(&name)
    }

    /// Whether the current directory lies too deep for outputs. Adds a remark once, when the first entry is found.
    fn is_too_deep(&mut self) -> bool {
        let depth_max = self.depth_max();
        let depth = self.levels.len().saturating_sub(1);
        let Some(level) = self.levels.last_mut().filter(|_| depth >= depth_max) else {
            return false;
        };
        if !level.depth_reported && !level.in_cache {
            self.found.remarks.add(&self.path, Remark::TooDeep);
        }
        level.depth_reported = true;
        true
    }

    fn classify_entry(&mut self, name: &[u8], stat: &Statx) -> VisitAction {
        let kind = FileType::from_raw_mode(stat.stx_mode.into());
        let is_dir = kind == FileType::Directory;
        let parent_in_cache = self.levels.last().is_some_and(|level| level.in_cache);
        if parent_in_cache || (is_dir && self.is_cache_name(name)) {
            // Nothing below a cache gets a remark, so there is no need to walk deeper than outputs may lie.
            let enter = is_dir && self.levels.len() < self.depth_max();
            self.found.counts.cached += u64::from(!is_dir);
            return if enter {
                VisitAction::Enter
            } else {
                VisitAction::Done
            };
        }
        let is_view = is_dir && self.is_view(name);
        self.push_name(name);
        let classified = match (self.classify_path(name, is_view, stat), kind) {
            (Some(remark), _) => Err(remark),
            (None, FileType::Directory) => Ok(VisitAction::Enter),
            (None, FileType::RegularFile) => self.classify_file(stat),
            (None, FileType::Symlink) => Err(Remark::Symlink),
            (None, FileType::Fifo) => Err(Remark::Fifo),
            (None, FileType::Socket) => Err(Remark::Socket),
            (None, FileType::CharacterDevice | FileType::BlockDevice) => Err(Remark::Device),
            (None, FileType::Unknown) => Err(Remark::Unreadable),
        };
        let next = classified.unwrap_or_else(|remark| {
            if !(is_view && remark == Remark::MountPoint) {
                self.found.remarks.add(&self.path, remark);
            }
            VisitAction::Done
        });
        self.reset_path();
        next
    }

    fn classify_path(&self, name: &[u8], is_view: bool, stat: &Statx) -> Option<Remark> {
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

    fn classify_file(&mut self, stat: &Statx) -> Result<VisitAction, Remark> {
        let found = &mut self.found;
        let wanted = self.rules.wanted;
        if wanted.is_some_and(|globs| !globs.matches_bytes(&self.path)) {
            found.counts.not_asked += 1;
            return Ok(VisitAction::Done);
        }
        if stat.stx_uid != self.rules.owner_uid {
            return Err(Remark::NotOwned);
        }
        let staged_input = self.staged_inputs.get(self.path.as_slice());
        let staged_input = staged_input.filter(|staged_input| staged_input.bytes == stat.stx_size);
        if staged_input.is_none() && stat.stx_size > self.rules.bounds.file_bytes {
            return Err(Remark::FileTooLarge);
        }
        let rank = Rank::of(&self.path, stat.stx_size, self.rules);
        if staged_input.is_none() && found.shortlist.refuses(&rank) {
            return Err(Remark::TooMany);
        }
        let candidate = Candidate {
            path: self.path.as_slice().into(),
            bytes: stat.stx_size,
            priority: rank.priority,
            inode: inode(stat),
            linked: stat.stx_nlink > 1,
        };
        match staged_input {
            Some(staged_input) => found.possible_inputs.push((candidate, staged_input.blake3)),
            None => found.shortlist.offer(candidate, &mut found.remarks),
        }
        Ok(VisitAction::Done)
    }

    fn push_name(&mut self, name: &[u8]) {
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name);
    }

    /// Shortens the path to that of the current directory.
    fn reset_path(&mut self) {
        let bytes = self.levels.last().map_or(0, |level| level.path_bytes);
        self.path.truncate(bytes);
    }

    /// Whether a directory has a CACHEDIR.TAG. The tag is opened like any other file: it is checked to be a regular
    /// file before and after opening.
    fn has_cache_tag(&self, dir: BorrowedFd<'_>) -> Result<bool, EntryFault> {
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
                Err(fault) => match EntryRefusal::from(&fault) {
                    EntryRefusal::OutOfResources(_) => return Err(fault),
                    EntryRefusal::Entry(_) => return Ok(false),
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

fn inode(stat: &Statx) -> Inode {
    let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    (device, stat.stx_ino)
}

/// Gives the owner search permission on a directory. Returns whether that was necessary. This asks the kernel, since
/// root may search a directory despite its mode.
fn grant_search(dir: BorrowedFd<'_>, stat: &Statx, modes: ModePolicy) -> Result<bool, EntryFault> {
    let mode = u32::from(stat.stx_mode);
    if mode & 0o100 != 0 || modes == ModePolicy::Respect {
        return Ok(false);
    }
    match rustix::fs::accessat(dir, c".", Access::EXEC_OK, AtFlags::EACCESS) {
        Ok(()) => Ok(false),
        Err(Errno::ACCESS) => {
            let mode = Mode::from_raw_mode(mode & 0o1777 | 0o700);
            rustix::fs::fchmod(dir, mode).map_err(EntryFault::ChangeMode)?;
            Ok(true)
        }
        Err(e) => Err(EntryFault::Stat(e)),
    }
}

/// A file with several hard links.
#[derive(Default)]
pub(super) struct LinkedFile {
    /// The number of its names in the workspace.
    pub(super) names: u64,
    /// The content, once the file was read under one of its names.
    pub(super) content: Option<FileContent>,
}

/// How deep names are counted. Beyond this depth each level costs memory, and no path leads there.
const COUNTED_DEPTH_MAX: usize = 4095;

/// Counts the names of the given files anywhere in the workspace: also in caches, in the hidden directory, and deeper
/// than outputs may lie. Names that cannot be reached are not counted, so such files count as linked elsewhere.
pub(super) fn count_names(
    top: BorrowedFd<'_>,
    modes: ModePolicy,
    files: &mut HashMap<Inode, LinkedFile>,
    progress: &mut dyn FnMut(CollectProgress),
) -> Result<(), CollectError> {
    let mut counter = NameCounter {
        modes,
        files,
        depth: 0,
        entries: EntryCounter { seen: 0, progress },
        out_of_resources: None,
    };
    TreeWalk::new().run(top, &mut counter, DepthOverflow::Fail);
    counter.out_of_resources.map_or(Ok(()), Err)
}

struct NameCounter<'a> {
    modes: ModePolicy,
    files: &'a mut HashMap<Inode, LinkedFile>,
    depth: usize,
    entries: EntryCounter<'a>,
    out_of_resources: Option<CollectError>,
}

impl TreeVisitor for NameCounter<'_> {
    fn open_directory(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, EntryFault> {
        match self.modes {
            ModePolicy::Override => open_unlocked(dir, name),
            ModePolicy::Respect => open_beneath(dir, name, OPEN_DIR),
        }
    }

    fn enter_directory(&mut self, entered: EnteredDirectory<'_>) -> Result<(), EntryFault> {
        grant_search(entered.dir, entered.stat, self.modes)?;
        self.depth += 1;
        Ok(())
    }

    fn visit_entry(&mut self, entry: WalkedEntry<'_>) -> Result<VisitAction, EntryFault> {
        self.entries.count();
        let enter = match self.depth < COUNTED_DEPTH_MAX {
            true => VisitAction::Enter,
            false => VisitAction::Done,
        };
        match entry.kind {
            FileType::Directory => return Ok(enter),
            FileType::RegularFile | FileType::Unknown => {}
            _ => return Ok(VisitAction::Done),
        }
        let Some(stat) = entry.stat()? else {
            return Ok(VisitAction::Done);
        };
        if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory {
            return Ok(enter);
        }
        if let Some(linked) = self.files.get_mut(&inode(&stat)) {
            linked.names += 1;
        }
        Ok(VisitAction::Done)
    }

    fn leave_directory(&mut self, _: BorrowedFd<'_>, _: &CStr) -> Result<(), EntryFault> {
        self.depth -= 1;
        Ok(())
    }

    fn report_fault(&mut self, name: &CStr, fault: &EntryFault) -> ControlFlow<()> {
        match EntryRefusal::from(fault) {
            EntryRefusal::Entry(_) => ControlFlow::Continue(()),
            EntryRefusal::OutOfResources(source) => {
                self.out_of_resources = Some(out_of_resources(name.to_bytes(), source));
                ControlFlow::Break(())
            }
        }
    }
}
