//! Moving one output from a workspace into the store.
//!
//! Who wrote the workspace is hostile, and dead: that was proved before the manifest was made. So no name is read
//! twice. The file is pinned by a descriptor, compared with the manifest, and everything else goes by the descriptor.
//!
//! A move is a link. The file becomes ours, loses its attributes and its write permission, and gets its object name;
//! its name in the workspace stays until the workspace is removed. So a crash at any instant leaves every output in
//! the workspace, whole, and the repeat finds either the object or the file. It needs no permission in the workspace's
//! directories either, and no name there is trusted.
//!
//! Invariant: a workspace that was moved from is removed, not kept. Until then its remaining names, also those that
//! the program linked itself, lead to objects. Nobody writes through them: every process that could hold a writable
//! descriptor or a mapping is dead, the file is ours and read-only so that no later owner of the leased uid could open it
//! for writing, and removal only takes names away. A kept workspace is for people to work in, so it is copied from.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;

use super::{ArtifactError, Artifacts, Hold, PLACED, PlaceFault, Placed, files};
use crate::types::crash_points::{self, Step};
use crate::types::manifest::{ContentHash, Output, OutputPath};

/// What becomes of the file in the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// It becomes the object where the file system allows; the workspace is to be removed.
    Move,
    /// It stays as it is, apart from the object; the workspace may be kept.
    Copy,
}

/// Whether the manifest's hash is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// It was computed in this start of the machine, after every process was dead: what could change the content since
    /// would be a fault of ours, which inode, owner, length and time show. Reading all of it again would double the
    /// cost of every run to find nothing.
    Manifest,
    /// It is computed again. For recovery: the manifest is durable, but the file never was synced, and a
    /// power cut leaves length and times right where content is missing.
    Nothing,
}

/// Where outputs come from.
#[derive(Debug)]
pub struct Source<'a> {
    workspace: BorrowedFd<'a>,
    owner_uid: u32,
    transfer: Transfer,
    trust: Trust,
    /// Found out for the first file: most runs leave none.
    in_project: OnceLock<bool>,
}

impl<'a> Source<'a> {
    /// `owner_uid` is the uid that the program ran as, on the host.
    pub fn new(
        workspace: BorrowedFd<'a>,
        owner_uid: u32,
        transfer: Transfer,
        trust: Trust,
    ) -> Source<'a> {
        Source {
            workspace,
            owner_uid,
            transfer,
            trust,
            in_project: OnceLock::new(),
        }
    }
}

/// How an output came into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The object was there already; nothing was done.
    Present,
    /// The file itself became the object.
    Linked,
    /// The object shares the file's blocks until one of them is written to.
    Reflinked,
    Copied,
}

impl Artifacts {
    /// Takes one output of the manifest. Repeating it changes nothing.
    pub fn take(
        &self,
        hold: &Hold,
        source: &Source<'_>,
        output: &Output,
    ) -> Result<Taken, ArtifactError> {
        self.check_hold(hold)?;
        let hash = &output.blake3;
        if self.has(hash, output.bytes)? {
            return Ok(Taken::Present);
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
        check(&stat, source.owner_uid, output, source.trust).map_err(changed)?;
        if source.trust == Trust::Nothing
            && !files::is_content(file.as_fd(), hash, output.bytes).map_err(read)?
        {
            return Err(changed("its content"));
        }
        let in_project = || is_in_project(source.workspace);
        let transfer = match *source.in_project.get_or_init(in_project) {
            // The object would count towards the quota of whoever has the project next.
            true => Transfer::Copy,
            false => source.transfer,
        };
        self.bring(file.as_fd(), hash, output.bytes, transfer)
    }

    /// Makes an object of a pinned file, in the cheapest way that works.
    pub(super) fn bring(
        &self,
        file: BorrowedFd<'_>,
        hash: &ContentHash,
        bytes: u64,
        transfer: Transfer,
    ) -> Result<Taken, ArtifactError> {
        let failed = |source: io::Error| ArtifactError::Place {
            hash: *hash,
            source,
        };
        let linked = match transfer {
            Transfer::Copy => None,
            Transfer::Move => self.link_in(file, hash, bytes)?,
        };
        let (placed, how) = match linked {
            Some(placed) => (placed, Taken::Linked),
            None => self.copy_in(file, hash, bytes)?,
        };
        self.note(*hash)?;
        if placed == Placed::WasThere {
            return Ok(Taken::Present);
        }
        crash_points::at(Step::ObjectMoved).map_err(failed)?;
        Ok(how)
    }

    /// `None` where that cannot be and a copy can.
    fn link_in(
        &self,
        file: BorrowedFd<'_>,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<Option<Placed>, ArtifactError> {
        let placed = make_ours(file)
            .map_err(PlaceFault::from)
            .and_then(|()| self.place(file, hash, bytes));
        match placed {
            Ok(placed) => Ok(Some(placed)),
            // Another file system, or another project's quota.
            Err(PlaceFault::Errno(Errno::XDEV)) => Ok(None),
            // More names than the file system allows: the program may have made all but one of them.
            Err(PlaceFault::Errno(Errno::MLINK)) => Ok(None),
            // The file has something that cannot be taken from it, or the file system has no links. A new file has
            // nothing that we did not give it.
            Err(PlaceFault::Errno(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP)) => Ok(None),
            Err(PlaceFault::Damaged) => Err(ArtifactError::Damaged { hash: *hash }),
            Err(PlaceFault::Errno(e)) => Err(ArtifactError::Place {
                hash: *hash,
                source: e.into(),
            }),
        }
    }

    fn copy_in(
        &self,
        file: BorrowedFd<'_>,
        hash: &ContentHash,
        bytes: u64,
    ) -> Result<(Placed, Taken), ArtifactError> {
        let failed = |source| ArtifactError::Place {
            hash: *hash,
            source,
        };
        let draft = self.draft().map_err(failed)?;
        let how = match rustix::fs::ioctl_ficlone(draft.as_fd(), file) {
            Ok(()) => Taken::Reflinked,
            Err(_not_here) => {
                let copied = files::read_hashed(file, Some(draft.as_fd()), bytes);
                if copied.map_err(failed)? != *hash {
                    return Err(ArtifactError::Damaged { hash: *hash });
                }
                Taken::Copied
            }
        };
        if files::length(draft.as_fd()).map_err(failed)? != bytes {
            return Err(ArtifactError::Damaged { hash: *hash });
        }
        Ok((self.place_draft(draft, hash, bytes)?, how))
    }
}

/// Opens the file at a path of the workspace, whatever it is, for reading.
fn pin(workspace: BorrowedFd<'_>, path: &OutputPath) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    // O_PATH: nothing happens to what is opened, be it a FIFO or a device.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = |dir: BorrowedFd<'_>, path: &[u8]| {
        rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve)
    };
    let held = match open(workspace, path.as_bytes()) {
        // A directory on the way is closed to us, its owner: step by step each can be opened.
        Err(Errno::ACCESS) => {
            let mut held: Option<OwnedFd> = None;
            for part in path.components() {
                let parent = held.as_ref().map_or(workspace, |h| h.as_fd());
                held = Some(with_access(parent, || open(parent, part))?);
            }
            held.ok_or(Errno::NOENT)?
        }
        held => held?,
    };
    let stat = rustix::fs::fstat(&held)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    // The very file that was looked at, now that it is known to be one that can be opened.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    with_access(held.as_fd(), || {
        rustix::fs::open(files::proc_path(held.as_fd()), flags, Mode::empty())
    })
}

/// Does something that `at` must permit, and if its mode forbids that to us, its owner, changes it for that long.
fn with_access<T>(
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

/// Compares a pinned file with what the manifest says of it; says what differs.
fn check(stat: &Stat, owner_uid: u32, output: &Output, trust: Trust) -> Result<(), &'static str> {
    // A take that was interrupted has made it ours already. The program had no way to: the manifest lists only what
    // belonged to the program's uid, and this inode is the one it lists.
    let owners = [owner_uid, rustix::process::geteuid().as_raw()];
    // Where its content is read again, that decides.
    let read_again = trust == Trust::Nothing;
    let told = [
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
            read_again || modified_ms(stat) == output.modified_ms,
            "its time of change",
        ),
    ];
    match told.iter().find(|(same, _)| !same) {
        None => Ok(()),
        Some((_, what)) => Err(what),
    }
}

/// As the manifest has it. The program may have set a time that no number of milliseconds can tell.
fn modified_ms(stat: &Stat) -> i64 {
    let below = i64::try_from(stat.st_mtime_nsec / 1_000_000).unwrap_or(0);
    stat.st_mtime.saturating_mul(1_000).saturating_add(below)
}

/// Owner, attributes, mode. Its time of change stays, so that a repeat still knows the file.
fn make_ours(file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let stat = rustix::fs::fstat(file)?;
    if (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid)) != (uid, gid) {
        rustix::fs::fchown(file, Some(uid), Some(gid))?;
    }
    remove_attributes(file)?;
    // Last: set-id bits go, and what an access list had made of the group's bits.
    rustix::fs::fchmod(file, PLACED)
}

/// Access lists, capabilities and whatever the program attached.
fn remove_attributes(file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    /// The kernel lists no more.
    const LIST_BYTES_MAX: usize = 65_536;
    let length = match rustix::fs::flistxattr_query(file) {
        // The file system has none.
        Ok(0) | Err(Errno::OPNOTSUPP) => return Ok(()),
        length => length?.min(LIST_BYTES_MAX),
    };
    // Without write permission the kernel removes none of the user's, not even for the owner.
    rustix::fs::fchmod(file, Mode::RUSR | Mode::WUSR)?;
    let mut names = vec![0u8; length];
    let length = rustix::fs::flistxattr(file, &mut names[..])?;
    for name in names[..length].split(|b| *b == 0) {
        // Labels are the security module's, which keeps its own; where none is in force, a program can have made them up.
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

/// Whether the workspace's files count towards a project's quota, and would go on to do so in the store.
fn is_in_project(workspace: BorrowedFd<'_>) -> bool {
    /// FS_PROJINHERIT_FL: a workspace under quota has it on every directory.
    const PROJECT_INHERIT: u32 = 0x2000_0000;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(workspace, ".", flags, Mode::empty())
        .and_then(rustix::fs::ioctl_getflags)
        .is_ok_and(|flags| flags.bits() & PROJECT_INHERIT != 0)
}
