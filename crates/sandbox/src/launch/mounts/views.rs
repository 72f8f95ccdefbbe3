//! Read-only views of host directories: data, docs, whatever else is to be read, and runtimes.
//!
//! A read-only bind keeps content and metadata, and that is not enough. A FIFO in it can still be written, a socket
//! connected to, and a lock taken on a file that a program of the host then waits for. So a view is a
//! read-only overlay over the bind: its files are read through, while FIFOs, sockets and locks are the
//! overlay's own and nobody's outside. Where the host's root runs us, the bind below is also idmapped: the
//! owner of the data is shown as the program, and its groups as nobody, upon which the kernel refuses
//! every write, also one into a FIFO or socket (see `namespaces::owner_maps`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::mount::MountAttrFlags;

use super::OwnerMaps;
use super::detached::{DetachedMount, clone_tree, new_filesystem, open_detached};
use super::root_builder::{RootBuilder, below_root};
use crate::spec::{Exec, HostPath, Owner, ReadOnlyView, Spec, ViewContent};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys;

/// Entries looked at in a tree that cannot be shielded; a larger one is refused.
const ENTRIES_MAX: usize = 2_000_000;

/// A view, opened, waiting to be put in place.
pub struct OpenedView {
    piece: DetachedMount,
    source: HostPath,
    exec: Exec,
    attributes: u64,
    /// Idmapped: whom its owner is shown as. Writes are then refused whatever the mount's own flags.
    shown_owner: Option<u32>,
    /// File systems are mounted in it, which an overlay would hide.
    has_mounts: bool,
}

pub fn open(spec: &Spec, owner_maps: &OwnerMaps) -> Result<Vec<OpenedView>, LaunchStepError> {
    if spec.views.is_empty() {
        return Ok(Vec::new());
    }
    let mounts = mount_points().during(|| "read the mounts of this host".into())?;
    spec.views
        .iter()
        .map(|view| open_view(view, spec, owner_maps, &mounts))
        .collect()
}

fn open_view(
    view: &ReadOnlyView,
    spec: &Spec,
    owner_maps: &OwnerMaps,
    mounts: &[PathBuf],
) -> Result<OpenedView, LaunchStepError> {
    let mut attributes = sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV;
    if view.exec == Exec::Refused {
        attributes |= sys::MOUNT_ATTR_NOEXEC;
    }
    let source = view.source.as_path();
    let piece = open_detached(source, view.target.as_path(), attributes)?;
    let mapped = view.owner == Owner::Mapped && spec.is_leased();
    let idmapped = mapped && show_owner(&piece, source, owner_maps)?;
    Ok(OpenedView {
        piece,
        source: view.source.clone(),
        exec: view.exec,
        attributes,
        shown_owner: idmapped.then(|| spec.identity.uid()),
        has_mounts: mounts.iter().any(|m| m != source && m.starts_with(source)),
    })
}

/// Whether the owner is now shown as the program. Some file systems (NFS, 9p, older overlays) cannot do that;
/// then everything in the view must be readable to anyone.
fn show_owner(
    piece: &DetachedMount,
    source: &Path,
    owner_maps: &OwnerMaps,
) -> Result<bool, LaunchStepError> {
    let stat =
        rustix::fs::fstat(&piece.mount).during(|| format!("look at {}", source.display()))?;
    let map = owner_maps
        .iter()
        .find(|(uid, _)| *uid == stat.st_uid)
        .ok_or_else(|| LaunchStepError::new(format!("{} changed its owner", source.display())))?;
    let Err(refused) = sys::mount_idmap(piece.mount.as_fd(), map.1.as_fd()) else {
        return Ok(true);
    };
    match first(piece.mount.as_fd(), source, &is_unreadable) {
        None => Ok(false),
        Some(unreadable) => Err(refused).during(|| {
            let unreadable = unreadable.display();
            format!("this file system cannot be shown with another owner, and {unreadable} is not readable by everyone")
        }),
    }
}

/// Puts every view in place. Says how many are shielded.
pub fn place(builder: &RootBuilder<'_>, views: Vec<OpenedView>) -> Result<String, LaunchStepError> {
    let mut placed: Vec<(HostPath, Exec, PathBuf)> = Vec::new();
    let (mut shielded, mut bare) = (0, 0);
    for view in views {
        let DetachedMount {
            target, directory, ..
        } = &view.piece;
        let twin = placed
            .iter()
            .find(|(source, exec, _)| *source == view.source && *exec == view.exec);
        let shield = match twin {
            // The same directory under a second name: one overlay, seen twice.
            Some((_, _, first)) => {
                let what = || format!("show {} twice", first.display());
                let first = below_root(first);
                Shield::Overlay(clone_tree(builder.root, first.as_os_str()).during(what)?)
            }
            None => shield(builder, &view)?,
        };
        let (mount, count) = match &shield {
            Shield::Overlay(mount) => (mount, &mut shielded),
            Shield::None(mount) => (mount, &mut bare),
            Shield::NotNeeded => (&view.piece.mount, &mut bare),
        };
        *count += usize::from(twin.is_none());
        builder.place(mount.as_fd(), target, *directory)?;
        if twin.is_none() {
            placed.push((view.source.clone(), view.exec, target.clone()));
        }
    }
    Ok(match bare {
        0 => format!("{shielded} views through overlays"),
        _ => format!(
            "{shielded} views through overlays, {bare} as binds (a single file, or with mounts inside)"
        ),
    })
}

/// What is put in place of a view's bind.
enum Shield {
    Overlay(OwnedFd),
    /// There can be no overlay, and this copy of the bind alone will do.
    None(OwnedFd),
    /// A plain file: there is nothing in it to be reached.
    NotNeeded,
}

fn shield(builder: &RootBuilder<'_>, view: &OpenedView) -> Result<Shield, LaunchStepError> {
    let source = view.source.as_path();
    let what = || format!("shield {}", source.display());
    if !view.piece.directory {
        return match first(view.piece.mount.as_fd(), source, &is_special) {
            None => Ok(Shield::NotNeeded),
            Some(_) => Err(LaunchStepError::new(format!(
                "{} is not a plain file",
                source.display()
            ))),
        };
    }
    // A mount can be copied, and be a layer, only where it is attached.
    builder.place(view.piece.mount.as_fd(), Path::new("/stage"), true)?;
    let overlay = match view.has_mounts {
        false => overlay(builder, view),
        true => Err(io::ErrorKind::Unsupported.into()),
    };
    let bind = clone_tree(builder.root, "stage".as_ref()).during(what)?;
    builder.unmount(Path::new("stage"))?;
    if let Ok(mount) = overlay {
        return Ok(Shield::Overlay(mount));
    }
    if view.shown_owner.is_some() {
        return Ok(Shield::None(bind));
    }
    // Too deep a stack of overlays, mounts inside, a kernel without: then nothing may be there to be reached.
    match first(bind.as_fd(), source, &is_special) {
        None => Ok(Shield::None(bind)),
        Some(special) => Err(LaunchStepError::new(format!(
            "{} is a FIFO, socket or device, and this directory cannot be shielded against writing to it; move it away",
            special.display()
        ))),
    }
}

fn overlay(builder: &RootBuilder<'_>, view: &OpenedView) -> io::Result<OwnedFd> {
    // Relative to the new root, where both layers stand under names of ours. Two layers, because a read-only
    // overlay must have two; user attributes, because a plain user's may not use others, and so
    // that nothing written in the data redirects a look-up.
    rustix::process::fchdir(builder.root)?;
    let options = [("lowerdir", "stage:empty"), ("userxattr", "")];
    // An overlay reads with the rights of whoever mounted it. In an idmapped view that must be the owner shown:
    // root's own rights end where a group has no name.
    let as_owner = view.shown_owner.inspect(|uid| sys::set_fs_uid(*uid));
    let made = new_filesystem("overlay", &options, MountAttrFlags::MOUNT_ATTR_NODEV);
    if as_owner.is_some() {
        sys::set_fs_uid(0);
    }
    let mount = made?;
    sys::mount_restrict(mount.as_fd(), view.attributes)?;
    Ok(mount)
}

/// At level `landlock` nothing can be shown with another owner: whoever runs the program must be able to read all of it.
/// Asked by the process that has the program's uid. Says which path is the first that cannot be read.
pub fn check_readable(spec: &Spec) -> Result<(), LaunchStepError> {
    for view in &spec.views {
        let source = view.source.as_path();
        let uid = spec.identity.uid();
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let top = rustix::fs::open(source, flags, Mode::empty()).during(|| {
            let source = source.display();
            format!("without mounts nothing can be shown with another owner, and uid {uid} may not read {source}")
        })?;
        // What is shown as it is keeps to itself what its owner keeps.
        if view.content == ViewContent::Runtime || view.owner == Owner::AsIs {
            continue;
        }
        if let Some(unreadable) = first(top.as_fd(), source, &is_unreadable) {
            return Err(LaunchStepError::new(format!(
                "without mounts nothing can be shown with another owner, and {} is not readable by everyone; \
                 make it so, or run as its owner",
                unreadable.display()
            )));
        }
    }
    Ok(())
}

/// Where this mount namespace has something mounted.
fn mount_points() -> io::Result<Vec<PathBuf>> {
    let text = std::fs::read("/proc/self/mountinfo")?;
    Ok(crate::cgroup::mount_points_in(&text))
}

type Test = dyn Fn(&std::fs::Metadata) -> bool;

fn is_unreadable(meta: &std::fs::Metadata) -> bool {
    let mode = std::os::unix::fs::PermissionsExt::mode(&meta.permissions());
    !meta.is_symlink() && (mode & 0o4 == 0 || meta.is_dir() && mode & 0o1 == 0)
}

fn is_special(meta: &std::fs::Metadata) -> bool {
    let kind = meta.file_type();
    kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device()
}

/// The first path in a tree that a test finds, or that could not be looked at; past a bounded number of
/// entries, the place that was reached.
fn first(root: BorrowedFd<'_>, name: &Path, test: &Test) -> Option<PathBuf> {
    let base = PathBuf::from(format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&root)
    ));
    let mut pending = vec![PathBuf::new()];
    let mut seen = 0;
    while let Some(relative) = pending.pop() {
        seen += 1;
        // Joining nothing would add a slash, behind which a plain file is not found.
        let join = |to: &Path| match relative.as_os_str().is_empty() {
            true => to.to_path_buf(),
            false => to.join(&relative),
        };
        let (here, shown) = (join(&base), join(name));
        // The top itself is a link in /proc.
        let meta = match seen {
            1 => std::fs::metadata(&here),
            _ => std::fs::symlink_metadata(&here),
        };
        let Ok(meta) = meta else { return Some(shown) };
        if test(&meta) || seen > ENTRIES_MAX {
            return Some(shown);
        }
        if meta.is_dir() {
            let Ok(entries) = std::fs::read_dir(&here) else {
                return Some(shown);
            };
            pending.extend(entries.flatten().map(|e| relative.join(e.file_name())));
        }
    }
    None
}
