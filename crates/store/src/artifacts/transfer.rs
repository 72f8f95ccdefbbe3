//! Takes one output from a workspace into the artifact store: by a link ([`TransferMode::Move`]), or by a copy.
//!
//! The program that wrote the workspace is hostile, and it is dead: that was proved before the manifest was made. No
//! name is looked up twice. The file is opened once, compared with the manifest, and everything else is done through
//! its descriptor.
//!
//! A move is a link. The file becomes the property of the user who runs Fumehood, loses its extended attributes and its
//! write permission, and gets its object name. Its name in the workspace stays until the workspace is removed. So a
//! crash at any moment leaves every output complete in the workspace, and a repeat finds either the object or the file.
//! A link also needs no permission in the workspace's directories, and trusts no name there.
//!
//! Invariant: after a move the workspace is removed, not kept. Until then its remaining names, including hard links
//! that the program made, lead to objects. Nobody writes through them: every process that could hold a writable
//! descriptor or a mapping is dead, the file belongs to the user who runs Fumehood and is read-only, so a later user of
//! the leased uid cannot open it for writing, and removal only removes names. People may work in a kept workspace, so
//! its files are copied.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;

use super::{ArtifactError, Artifacts, PLACED, PlaceFault, Placement, SharedLock, files, hashing};
use crate::types::crash_points::{self, CrashPoint};
use crate::types::manifest::{ContentHash, Output, OutputPath};

/// What happens to the file in the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferMode {
    /// The file becomes the object, by a hard link, if the file system allows it. Its name in the workspace stays until
    /// the workspace is removed, which must happen afterwards.
    Move,
    /// The file stays as it is, separate from the object. The workspace may be kept.
    Copy,
}

/// Whether to rely on the hash in the manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentCheck {
    /// The hash was computed since the last boot, after every process was dead. Only a fault of Fumehood could have
    /// changed the file since, which inode, owner, length and time would show. Reading every file again would double
    /// the cost of every run.
    TrustManifest,
    /// Compute the hash again. For recovery: the manifest is durable, but the file was never synced, and a power cut
    /// can lose content while length and times are right.
    Rehash,
}

/// The workspace that outputs come from.
#[derive(Debug)]
pub struct TransferSource<'a> {
    workspace: BorrowedFd<'a>,
    owner_uid: u32,
    transfer: TransferMode,
    check: ContentCheck,
    /// Determined with the first file, since most runs have no outputs.
    under_project_quota: OnceLock<bool>,
}

impl<'a> TransferSource<'a> {
    /// `owner_uid` is the host uid that the program ran with.
    pub fn new(
        workspace: BorrowedFd<'a>,
        owner_uid: u32,
        transfer: TransferMode,
        check: ContentCheck,
    ) -> TransferSource<'a> {
        TransferSource {
            workspace,
            owner_uid,
            transfer,
            check,
            under_project_quota: OnceLock::new(),
        }
    }
}

/// How an output came into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferMethod {
    /// The object existed already. Nothing was done.
    Present,
    /// The file itself became the object.
    Linked,
    /// The object shares the file's blocks until one of them is written to.
    Reflinked,
    /// The content was copied.
    Copied,
}

impl Artifacts {
    /// Takes one output of the manifest into the store. Repeating the call is safe.
    pub fn take_output(
        &self,
        hold: &SharedLock,
        source: &TransferSource<'_>,
        output: &Output,
    ) -> Result<TransferMethod, ArtifactError> {
        self.check_shared(hold)?;
        let hash = &output.blake3;
        if self.has_object(hash, output.bytes)? {
            return Ok(TransferMethod::Present);
        }
        let file = pin(source.workspace, &output.path).map_err(|e| ArtifactError::Open {
            path: output.path.clone(),
            source: e.into(),
        })?;
        let changed = |what| ArtifactError::Changed {
            path: output.path.clone(),
            what,
        };
        let read = |source| ArtifactError::Read {
            path: output.path.clone(),
            source,
        };
        let stat = rustix::fs::fstat(&file).map_err(|e| read(e.into()))?;
        compare_with_manifest(&stat, source.owner_uid, output, source.check).map_err(changed)?;
        if source.check == ContentCheck::Rehash
            && !hashing::is_content(file.as_fd(), hash, output.bytes).map_err(read)?
        {
            return Err(changed("its content"));
        }
        let under_project_quota = || is_under_project_quota(source.workspace);
        let transfer = match *source.under_project_quota.get_or_init(under_project_quota) {
            // As a link, the object would count towards the quota of whoever gets the project id next.
            true => TransferMode::Copy,
            false => source.transfer,
        };
        self.place_file(file.as_fd(), hash, output.bytes, transfer)
    }

    /// Makes an object of an open file, in the cheapest way that works.
    pub(super) fn place_file(
        &self,
        file: BorrowedFd<'_>,
        hash: &ContentHash,
        bytes: u64,
        transfer: TransferMode,
    ) -> Result<TransferMethod, ArtifactError> {
        let failed = |source: io::Error| ArtifactError::Place {
            hash: *hash,
            source,
        };
        let linked = match transfer {
            TransferMode::Copy => None,
            TransferMode::Move => self.link_in(file, hash, bytes)?,
        };
        let (placed, how) = match linked {
            Some(placed) => (placed, TransferMethod::Linked),
            None => self.copy_in(file, hash, bytes)?,
        };
        self.note_unsynced(*hash)?;
        if placed == Placement::WasThere {
            return Ok(TransferMethod::Present);
        }
        crash_points::reach(CrashPoint::ObjectMoved).map_err(failed)?;
        Ok(how)
    }

    /// Returns `None` if the file cannot be linked, but could be copied.
    fn link_in(
        &self,
        file: BorrowedFd<'_>,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<Option<Placement>, ArtifactError> {
        let placed = take_ownership(file)
            .map_err(PlaceFault::from)
            .and_then(|()| self.place(file, hash, bytes));
        match placed {
            Ok(placed) => Ok(Some(placed)),
            // The store is on another file system or under another project quota.
            Err(PlaceFault::Errno(Errno::XDEV)) => Ok(None),
            // The file already has as many names as the file system allows. The program may have made them.
            Err(PlaceFault::Errno(Errno::MLINK)) => Ok(None),
            // The file has an attribute that cannot be removed, or the file system has no hard links. A copy has only
            // what Fumehood gives it.
            Err(PlaceFault::Errno(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP)) => Ok(None),
            Err(fault) => Err(fault.into_error(hash)),
        }
    }

    fn copy_in(
        &self,
        file: BorrowedFd<'_>,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<(Placement, TransferMethod), ArtifactError> {
        let failed = |source| ArtifactError::Place {
            hash: *hash,
            source,
        };
        let draft = self.draft().map_err(failed)?;
        let how = match rustix::fs::ioctl_ficlone(draft.as_fd(), file) {
            Ok(()) => TransferMethod::Reflinked,
            Err(_) => {
                let copied = hashing::read_hashed(file, Some(draft.as_fd()), bytes);
                if copied.map_err(failed)? != *hash {
                    return Err(ArtifactError::Damaged { hash: *hash });
                }
                TransferMethod::Copied
            }
        };
        if files::length(draft.as_fd()).map_err(failed)? != bytes {
            return Err(ArtifactError::Damaged { hash: *hash });
        }
        Ok((self.place_draft(draft, hash, bytes)?, how))
    }
}

/// Opens the regular file at a path of the workspace for reading.
fn pin(workspace: BorrowedFd<'_>, path: &OutputPath) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    // O_PATH has no side effects, even on a FIFO or a device.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = |dir: BorrowedFd<'_>, path: &[u8]| {
        rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve)
    };
    let held = match open(workspace, path.as_bytes()) {
        // This process owns the directories, but the mode of one of them denies it access. Open them one by one and
        // change modes on the way.
        Err(Errno::ACCESS) => {
            let mut held: Option<OwnedFd> = None;
            for part in path.components() {
                let parent = held.as_ref().map_or(workspace, |h| h.as_fd());
                held = Some(with_owner_access(parent, || open(parent, part))?);
            }
            held.ok_or(Errno::NOENT)?
        }
        held => held?,
    };
    let stat = rustix::fs::fstat(&held)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    // Open the same file for reading, now that it is known to be a regular file.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    with_owner_access(held.as_fd(), || {
        rustix::fs::open(files::proc_path(held.as_fd()), flags, Mode::empty())
    })
}

/// Calls `act`, which needs access to `at`. If the mode of `at` denies access to this process, which owns it, changes
/// the mode for the duration of the call.
fn with_owner_access<T>(
    at: BorrowedFd<'_>,
    act: impl Fn() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    let done = act();
    if !matches!(done, Err(Errno::ACCESS)) {
        return done;
    }
    let mode = Mode::from_raw_mode(rustix::fs::fstat(at)?.st_mode);
    let path = files::proc_path(at);
    rustix::fs::chmod(&path, mode | Mode::RWXU)?;
    let done = act();
    rustix::fs::chmod(&path, mode)?;
    done
}

/// Compares an open file with its entry in the manifest. The error says what differs.
fn compare_with_manifest(
    stat: &Stat,
    owner_uid: u32,
    output: &Output,
    check: ContentCheck,
) -> Result<(), &'static str> {
    // An interrupted move may have given the file to the user who runs Fumehood already. The program could not fake
    // that: the manifest lists only files that the program's uid owned, and the inode is the listed one.
    let owners = [owner_uid, rustix::process::geteuid().as_raw()];
    // If the content is hashed again, inode and time need not match.
    let read_again = check == ContentCheck::Rehash;
    let facts = [
        (
            read_again || stat.st_ino == output.inode,
            "which file it is",
        ),
        (owners.contains(&stat.st_uid), "its owner"),
        (
            u64::try_from(stat.st_size) == Ok(output.bytes),
            "its length",
        ),
        (
            read_again || files::modified_ms(stat) == output.modified_ms,
            "its time of change",
        ),
    ];
    match facts.iter().find(|(same, _)| !same) {
        None => Ok(()),
        Some((_, what)) => Err(what),
    }
}

/// Changes owner, attributes and mode. The modification time stays, so that a repeat recognizes the file.
fn take_ownership(file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let stat = rustix::fs::fstat(file)?;
    if (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid)) != (uid, gid) {
        rustix::fs::fchown(file, Some(uid), Some(gid))?;
    }
    remove_attributes(file)?;
    // Set the mode last: this removes set-id bits, and group bits that an access list had set.
    rustix::fs::fchmod(file, PLACED)
}

/// Removes access lists, capabilities and all other extended attributes that the program may have set.
fn remove_attributes(file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    /// The kernel's limit for the list of names.
    const LIST_BYTES_MAX: usize = 65_536;
    let length = match rustix::fs::flistxattr_query(file) {
        // There are no attributes, or the file system does not support them.
        Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(()),
        length => length?.min(LIST_BYTES_MAX),
    };
    // Without write permission the kernel does not let even the owner remove `user.` attributes.
    rustix::fs::fchmod(file, Mode::RUSR | Mode::WUSR)?;
    let mut names = vec![0u8; length];
    let length = rustix::fs::flistxattr(file, &mut names[..])?;
    for name in names[..length].split(|b| *b == 0) {
        // A security module protects its own labels. If none is active, the program may have set them.
        let label = [
            &b"security.selinux"[..],
            b"security.SMACK64",
            b"security.apparmor",
        ];
        if name.is_empty() {
            continue;
        }
        match rustix::fs::fremovexattr(file, name) {
            Ok(()) | Err(Errno::NODATA) => {}
            Err(_) if label.contains(&name) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Whether the workspace is under a project quota, which linked files would still count towards in the store.
fn is_under_project_quota(workspace: BorrowedFd<'_>) -> bool {
    /// FS_PROJINHERIT_FL. Every directory of a workspace under quota has it.
    const PROJECT_INHERIT: u32 = 0x2000_0000;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(workspace, ".", flags, Mode::empty())
        .and_then(rustix::fs::ioctl_getflags)
        .is_ok_and(|flags| flags.bits() & PROJECT_INHERIT != 0)
}
