//! Read-only views of host directories: data, docs, other paths to read, and runtimes.
//!
//! A read-only bind protects content and metadata, but that is not enough. Through it a program can still write to a
//! FIFO, connect to a socket, or take a lock on a file that a host program then waits for. A view is therefore a
//! read-only overlay over the bind. File contents are read through the overlay, while FIFOs, sockets and locks belong
//! to the overlay alone. When root runs Fumehood, the bind below is also idmapped: the data's owner appears as the
//! program, and its groups have no id. The kernel then refuses every write, also to a FIFO or socket (see
//! `namespaces::owner_maps`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::mount::MountAttrFlags;

use super::OwnerMaps;
use super::detached::{DetachedMount, clone_tree, new_filesystem, open_detached};
use super::root_builder::{RootBuilder, below_root};
use crate::spec::{Exec, HostPath, Owner, ReadOnlyView, Spec, ViewContent};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys;

/// How many entries to check in a tree that cannot be shielded by an overlay. A larger tree is refused.
const ENTRIES_MAX: usize = 2_000_000;

/// A view that is open and not yet attached.
pub struct OpenedView {
    piece: DetachedMount,
    source: HostPath,
    exec: Exec,
    attributes: u64,
    /// If the view is idmapped: the uid as which its owner appears. The kernel then refuses writes whatever the
    /// mount's flags.
    shown_owner: Option<u32>,
    /// Whether other file systems are mounted in the view. An overlay would hide them.
    has_mounts: bool,
}

pub fn open(spec: &Spec, owner_maps: &OwnerMaps) -> Result<Vec<OpenedView>, LaunchStepError> {
    if spec.views.is_empty() {
        return Ok(Vec::new());
    }
    let mounts = mount_points().doing("read the mounts of this host")?;
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

/// Idmaps the view so that its owner appears as the program, and returns whether that worked. Some file systems (NFS,
/// 9p, older overlays) cannot be idmapped; then everything in the view must be readable by everyone.
fn show_owner(
    piece: &DetachedMount,
    source: &Path,
    owner_maps: &OwnerMaps,
) -> Result<bool, LaunchStepError> {
    let stat =
        rustix::fs::fstat(&piece.mount).step_context(|| format!("look at {}", source.display()))?;
    let map = owner_maps
        .iter()
        .find(|(uid, _)| *uid == stat.st_uid)
        .ok_or_else(|| LaunchStepError::new(format!("{} changed its owner", source.display())))?;
    let Err(refused) = sys::mount_idmap(piece.mount.as_fd(), map.1.as_fd()) else {
        return Ok(true);
    };
    match find_first(piece.mount.as_fd(), source, &is_unreadable) {
        None => Ok(false),
        Some(unreadable) => Err(refused).step_context(|| {
            let unreadable = unreadable.display();
            format!("this file system cannot be shown with another owner, and {unreadable} is not readable by everyone")
        }),
    }
}

/// Attaches every view, and describes how many are overlays.
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
            // The same directory under a second name: show the same overlay twice.
            Some((_, _, first)) => {
                let what = || format!("show {} twice", first.display());
                let first = below_root(first);
                Shield::Overlay(clone_tree(builder.root, first.as_os_str()).step_context(what)?)
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

/// What is attached in place of a view's bind.
enum Shield {
    Overlay(OwnedFd),
    /// An overlay is impossible, and this copy of the bind suffices.
    None(OwnedFd),
    /// A regular file: it holds no FIFO or socket.
    NotNeeded,
}

fn shield(builder: &RootBuilder<'_>, view: &OpenedView) -> Result<Shield, LaunchStepError> {
    let source = view.source.as_path();
    let what = || format!("shield {}", source.display());
    if !view.piece.directory {
        return match find_first(view.piece.mount.as_fd(), source, &is_special) {
            None => Ok(Shield::NotNeeded),
            Some(_) => Err(LaunchStepError::new(format!(
                "{} is not a plain file",
                source.display()
            ))),
        };
    }
    // The kernel can copy a mount, or use it as an overlay's layer, only where it is attached.
    builder.place(view.piece.mount.as_fd(), Path::new("/stage"), true)?;
    let overlay = match view.has_mounts {
        false => overlay(builder, view),
        true => Err(io::ErrorKind::Unsupported.into()),
    };
    let bind = clone_tree(builder.root, "stage".as_ref()).step_context(what)?;
    builder.unmount(Path::new("stage"))?;
    if let Ok(mount) = overlay {
        return Ok(Shield::Overlay(mount));
    }
    if view.shown_owner.is_some() {
        return Ok(Shield::None(bind));
    }
    // The overlay failed: too deep a stack of overlays, mounts inside, or a kernel without overlayfs. Then the tree
    // must hold nothing that the program could write to.
    match find_first(bind.as_fd(), source, &is_special) {
        None => Ok(Shield::None(bind)),
        Some(special) => Err(LaunchStepError::new(format!(
            "{} is a FIFO, socket or device, and this directory cannot be shielded against writing to it; move it away",
            special.display()
        ))),
    }
}

fn overlay(builder: &RootBuilder<'_>, view: &OpenedView) -> io::Result<OwnedFd> {
    // The layers' paths are relative to the new root, where both have names that Fumehood chose. A read-only overlay
    // needs two layers. `userxattr`, because a plain user's overlay may use no other attributes, and so that no
    // attribute in the data redirects a lookup.
    rustix::process::fchdir(builder.root)?;
    let options = [("lowerdir", "stage:empty"), ("userxattr", "")];
    // An overlay reads with the credentials of the process that mounted it. For an idmapped view these must be the
    // shown owner's: root's override does not extend to a file whose group has no id in the mount.
    let as_owner = view.shown_owner.inspect(|uid| sys::set_fs_uid(*uid));
    let created = new_filesystem("overlay", &options, MountAttrFlags::MOUNT_ATTR_NODEV);
    if as_owner.is_some() {
        sys::set_fs_uid(0);
    }
    let mount = created?;
    sys::mount_restrict(mount.as_fd(), view.attributes)?;
    Ok(mount)
}

/// Checks at level `landlock`, where no view can be idmapped, that the program can read every view. The caller has
/// the program's uid. The error names the first path that is not readable.
pub fn check_readable(spec: &Spec) -> Result<(), LaunchStepError> {
    for view in &spec.views {
        let source = view.source.as_path();
        let uid = spec.identity.uid();
        let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::NONBLOCK;
        let top = sys::open(source, flags).step_context(|| {
            let source = source.display();
            format!("without mounts nothing can be shown with another owner, and uid {uid} may not read {source}")
        })?;
        // A runtime, or a view with `Owner::AsIs`, may hold files that only their owner can read.
        if view.content == ViewContent::Runtime || view.owner == Owner::AsIs {
            continue;
        }
        if let Some(unreadable) = find_first(top.as_fd(), source, &is_unreadable) {
            return Err(LaunchStepError::new(format!(
                "without mounts nothing can be shown with another owner, and {} is not readable by everyone; \
                 make it so, or run as its owner",
                unreadable.display()
            )));
        }
    }
    Ok(())
}

/// Lists the mount points of this mount namespace.
fn mount_points() -> io::Result<Vec<PathBuf>> {
    let text = std::fs::read("/proc/self/mountinfo")?;
    Ok(crate::cgroup::mount_points_in(&text))
}

type Predicate = dyn Fn(&std::fs::Metadata) -> bool;

fn is_unreadable(meta: &std::fs::Metadata) -> bool {
    let mode = std::os::unix::fs::PermissionsExt::mode(&meta.permissions());
    !meta.is_symlink() && (mode & 0o4 == 0 || meta.is_dir() && mode & 0o1 == 0)
}

fn is_special(meta: &std::fs::Metadata) -> bool {
    let kind = meta.file_type();
    kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device()
}

/// Returns the first path in a tree that satisfies the predicate or cannot be examined. If the tree has more than
/// `ENTRIES_MAX` entries, returns the path reached.
fn find_first(root: BorrowedFd<'_>, name: &Path, test: &Predicate) -> Option<PathBuf> {
    let base = PathBuf::from(format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&root)
    ));
    let mut pending = vec![PathBuf::new()];
    let mut seen = 0;
    while let Some(relative) = pending.pop() {
        seen += 1;
        // Joining an empty path would append a slash, and a regular file's path with a slash is not found.
        let join = |to: &Path| match relative.as_os_str().is_empty() {
            true => to.to_path_buf(),
            false => to.join(&relative),
        };
        let (here, shown) = (join(&base), join(name));
        // The top itself is a symlink in /proc, so follow it.
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
