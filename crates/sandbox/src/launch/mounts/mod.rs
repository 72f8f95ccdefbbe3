//! The program's view of the file system: a new root of read-only, private binds.
//!
//! Everything is opened by descriptor before the new root is put together, so that no path is resolved
//! twice. What is not listed here, or in the spec's views, does not exist inside.

mod detached;
mod root_builder;
mod system;
pub mod views;

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::mount::{MountPropagationFlags, UnmountFlags};

use crate::layout::HIDDEN_DIR;
use crate::spec::{Layer, Spec, WorkspaceKind};
use crate::step_report::{LaunchStepError, Reporter, StepContext};
use crate::sys;
use detached::{DetachedMount, attach, new_tmpfs, terminals};
pub use detached::{clone_tree, new_filesystem};
use root_builder::{RootBuilder, owner_here};
use system::System;

/// Those that hold the run's own name for this machine.
fn named_after(host_name: &str) -> [(&'static str, String); 2] {
    [
        (
            "hosts",
            format!("127.0.0.1 localhost {host_name}\n::1 localhost ip6-localhost\n"),
        ),
        ("hostname", format!("{host_name}\n")),
    ]
}

/// What the rest of init needs of the new root.
pub struct NewRoot {
    /// A writable instance of the sandbox's own /proc, attached nowhere: only init and the child before
    /// its exec hold it. The one that the program sees is read-only.
    pub proc_writable: OwnedFd,
    pub workspace: OwnedFd,
}

/// User namespaces by which views are shown with their owner as the program, one for each owner.
pub type OwnerMaps = Vec<(u32, OwnedFd)>;

/// A new root with all in it that is the same for every run, and what is to be mounted in it. It is not attached yet: no
/// user namespace can be made where something is mounted over the root, and anywhere else it might hide a view.
pub struct PreparedRoot {
    root: OwnedFd,
    pieces: Vec<DetachedMount>,
}

/// Makes the new root and puts the system runtime into it. In a mount namespace of our own.
pub fn prepare(report: &mut Reporter) -> Result<PreparedRoot, LaunchStepError> {
    report.begin_step("keep mounts to ourselves");
    // Nothing done here may travel to the host's namespace. What the host mounts until there is a plan, because the runner
    // looked there, say, must still come to here.
    propagate(MountPropagationFlags::DOWNSTREAM)?;

    report.begin_step("open the system runtime");
    let system = System::open()?;

    report.begin_step("make the new root");
    let root = new_tmpfs(&[("size", "4m"), ("nr_inodes", "4096"), ("mode", "0755")])
        .during(|| "make a tmpfs for the new root".into())?;
    let builder = RootBuilder { root: root.as_fd() };
    builder.fill(&system)?;
    let mut pieces = system.pieces;
    pieces.push(terminals()?);
    for piece in &pieces {
        builder.make_mount_point(piece)?;
    }
    Ok(PreparedRoot { root, pieces })
}

fn propagate(how: MountPropagationFlags) -> Result<(), LaunchStepError> {
    rustix::mount::mount_change("/", how | MountPropagationFlags::REC)
        .during(|| "change how mounts propagate".into())
}

/// Completes the new root and moves into it. Afterwards the host's tree is out of reach.
pub fn build(
    spec: &Spec,
    prepared: PreparedRoot,
    workspace: Option<OwnedFd>,
    owner_maps: &OwnerMaps,
    report: &mut Reporter,
    fill: &mut dyn FnMut(BorrowedFd<'_>, &Reporter) -> Result<(), LaunchStepError>,
) -> Result<NewRoot, LaunchStepError> {
    report.begin_step("make mounts private");
    propagate(MountPropagationFlags::PRIVATE)?;
    report.begin_step("open the read-only views");
    let views = views::open(spec, owner_maps)?;
    report.begin_step("open the workspace");
    let tmp = Path::new(HIDDEN_DIR);
    let (workspace_mounts, workspace_dir) = match spec.workspace_kind {
        WorkspaceKind::Disk => {
            let dir = workspace.ok_or_else(|| LaunchStepError::new("no workspace descriptor"))?;
            let mounts = [tmp, Path::new("")].map(|below| on_disk(spec, dir.as_fd(), below));
            let [tmp, whole] = mounts;
            (WorkspaceMounts::Open([tmp?, whole?]), dir)
        }
        WorkspaceKind::Memory => {
            let (mount, dir) = memory_workspace(spec)?;
            report.begin_step("fill the workspace");
            fill(dir.as_fd(), report)?;
            restrict_workspace(mount.as_fd())?;
            (WorkspaceMounts::InMemory(mount), dir)
        }
    };

    report.begin_step("put the system runtime in place");
    let root = prepared.root;
    // Any directory will do to hang it on; this namespace's copy of the tree is thrown away below.
    attach(root.as_fd(), CWD, Path::new("/tmp"))
        .or_else(|_| attach(root.as_fd(), CWD, Path::new("/mnt")))
        .during(|| "attach the new root".into())?;
    let builder = RootBuilder { root: root.as_fd() };
    for piece in &prepared.pieces {
        builder.attach_known(piece)?;
    }
    report.begin_step("put the workspace in place");
    for (name, text) in named_after(&spec.host_name) {
        builder.file(&Path::new("etc").join(name), text.as_bytes())?;
    }
    let [tmp, whole] = match workspace_mounts {
        WorkspaceMounts::Open(mounts) => mounts,
        WorkspaceMounts::InMemory(mount) => builder.stage(mount.as_fd(), tmp)?,
    };
    // The workspace may stand below its own /tmp.
    builder.place(tmp.as_fd(), Path::new("/tmp"), true)?;
    builder.place(whole.as_fd(), spec.workspace.as_path(), true)?;
    // The run's own hidden directory is reached as /tmp only; here stands an empty, read-only one.
    let empty = clone_tree(root.as_fd(), OsStr::new("empty"))
        .during(|| "open the empty directory".into())?;
    sys::mount_restrict(
        empty.as_fd(),
        sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOEXEC,
    )
    .during(|| "restrict the empty directory".into())?;
    builder.place(
        empty.as_fd(),
        &spec.workspace.as_path().join(HIDDEN_DIR),
        true,
    )?;

    report.begin_step("put the read-only views in place");
    let shielded = views::place(&builder, views)?;
    report.begin_step("mount /dev/shm");
    builder.shared_memory(spec)?;
    report.begin_step("mount /proc");
    let proc_writable = builder.proc()?;

    report.begin_step("make the new root read-only");
    set_root_read_only(root.as_fd()).during(|| "make / read-only".into())?;
    report.begin_step("change the root");
    pivot(root.as_fd()).during(|| "pivot_root".into())?;
    let how = format!("new root of read-only binds, pivot_root; {shielded}");
    report.add_layer(Layer::MountNamespace, &how);
    Ok(NewRoot {
        proc_writable,
        workspace: workspace_dir,
    })
}

/// The mounts of /tmp and of the workspace.
enum WorkspaceMounts {
    Open([OwnedFd; 2]),
    /// One file system of its own, not yet attached, so that no part of it can be copied.
    InMemory(OwnedFd),
}

fn restrict_workspace(mount: BorrowedFd<'_>) -> Result<(), LaunchStepError> {
    sys::mount_restrict(mount, sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV)
        .during(|| "restrict the workspace's mount".into())
}

/// A mount of the workspace or of a directory in it, found by its path and shown to be the one that the runner holds.
fn on_disk(spec: &Spec, held: BorrowedFd<'_>, below: &Path) -> Result<OwnedFd, LaunchStepError> {
    let path = match below.as_os_str().is_empty() {
        true => spec.workspace.as_path().to_path_buf(),
        false => spec.workspace.as_path().join(below),
    };
    let what = || format!("open {}", path.display());
    let mount = clone_tree(CWD, path.as_os_str()).during(what)?;
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
    let (found, held) = (
        rustix::fs::fstat(&mount).during(what)?,
        rustix::fs::statat(held, below, flags).during(what)?,
    );
    match (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino) {
        true => {
            restrict_workspace(mount.as_fd())?;
            Ok(mount)
        }
        false => Err(LaunchStepError::new(format!(
            "{} was replaced by another directory",
            path.display()
        ))),
    }
}

/// A workspace in memory: the size and the number of files are the file system's own hard limits.
fn memory_workspace(spec: &Spec) -> Result<(OwnedFd, OwnedFd), LaunchStepError> {
    let (uid, gid) = owner_here(spec);
    // It counts against the memory limit too, so what that cannot hold is refused at once.
    let bytes = spec.limits.disk_bytes.min(spec.limits.memory_bytes);
    let mount = new_tmpfs(&[
        ("size", &bytes.to_string()),
        // The root, data/, docs/ and the hidden directories are ours, not the program's.
        (
            "nr_inodes",
            &spec.limits.files.saturating_add(16).to_string(),
        ),
        ("mode", "0700"),
        ("uid", &uid.to_string()),
        ("gid", &gid.to_string()),
    ])
    .during(|| "make a tmpfs for the workspace".into())?;
    let dir = rustix::fs::openat(
        &mount,
        ".",
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .during(|| "open the workspace's tmpfs".into())?;
    Ok((mount, dir))
}

/// Only the root itself: what is mounted on it keeps its own attributes.
fn set_root_read_only(root: BorrowedFd<'_>) -> io::Result<()> {
    let context = rustix::mount::fspick(
        root,
        "",
        rustix::mount::FsPickFlags::FSPICK_EMPTY_PATH | rustix::mount::FsPickFlags::FSPICK_CLOEXEC,
    )?;
    rustix::mount::fsconfig_set_flag(context.as_fd(), "ro")?;
    Ok(rustix::mount::fsconfig_reconfigure(context.as_fd())?)
}

fn pivot(root: BorrowedFd<'_>) -> io::Result<()> {
    rustix::process::fchdir(root)?;
    // The old root ends up stacked on the new one and is then taken off: no directory for it is needed.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}
