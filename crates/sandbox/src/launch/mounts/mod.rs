//! The program's view of the file system: a new root of read-only, private binds.
//!
//! Every source is opened by descriptor before the new root is put together, so no path is resolved twice. A path
//! that neither this module nor the spec's views list does not exist inside.

mod detached;
mod root_builder;
mod system;
pub mod views;

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD};
use rustix::mount::{MountPropagationFlags, UnmountFlags};

use crate::launch_step::LaunchStep;
use crate::layout::HIDDEN_DIR;
use crate::spec::{Layer, Spec, WorkspaceKind};
use crate::step_report::{LaunchStepError, Reporter, StepContext};
use crate::sys;
use detached::{DetachedMount, attach, new_devpts, new_tmpfs};
pub use detached::{clone_tree, new_filesystem};
use root_builder::{RootBuilder, program_tmpfs};
use system::SystemRuntime;

/// The files of /etc that hold the run's host name.
fn etc_files_with_host_name(host_name: &str) -> [(&'static str, String); 2] {
    [
        (
            "hosts",
            format!("127.0.0.1 localhost {host_name}\n::1 localhost ip6-localhost\n"),
        ),
        ("hostname", format!("{host_name}\n")),
    ]
}

/// What the rest of init needs from the new root.
pub struct NewRoot {
    /// A writable instance of the sandbox's own /proc, attached nowhere. Only init, and the child before its execve,
    /// hold it. The instance that the program sees is read-only.
    pub proc_writable: OwnedFd,
    pub workspace: OwnedFd,
}

/// Pairs of an owner's uid and a user namespace. A view that is idmapped through the namespace shows that owner as
/// the program's uid.
pub type OwnerMaps = Vec<(u32, OwnedFd)>;

/// A new root that holds everything that is the same for every run, and the mounts to attach in it. The root is not
/// attached yet: the kernel refuses to make a user namespace where something is mounted over the root, and attached
/// anywhere else the new root might hide a view.
pub struct PreparedRoot {
    root: OwnedFd,
    mounts: Vec<DetachedMount>,
}

/// Makes the new root and puts the system runtime into it. The caller is in a mount namespace of its own.
pub fn prepare(report: &mut Reporter) -> Result<PreparedRoot, LaunchStepError> {
    report.begin_step(LaunchStep::KeepMounts);
    // No mount made here may propagate to the host's namespace. Mounts that the host makes until the plan arrives
    // must still propagate to this one: the runner's own look at a path may trigger an automount.
    propagate(MountPropagationFlags::DOWNSTREAM)?;

    report.begin_step(LaunchStep::OpenSystemRuntime);
    let system = SystemRuntime::open()?;

    report.begin_step(LaunchStep::MakeRoot);
    let root = new_tmpfs(&[("size", "4m"), ("nr_inodes", "4096"), ("mode", "0755")])
        .doing("make a tmpfs for the new root")?;
    let builder = RootBuilder { root: root.as_fd() };
    builder.fill(&system)?;
    let mut mounts = system.mounts;
    mounts.push(new_devpts()?);
    for mount in &mounts {
        builder.make_mount_point(mount)?;
    }
    Ok(PreparedRoot { root, mounts })
}

fn propagate(how: MountPropagationFlags) -> Result<(), LaunchStepError> {
    rustix::mount::mount_change("/", how | MountPropagationFlags::REC)
        .doing("change how mounts propagate")
}

/// Completes the new root and pivots into it. Afterwards the host's tree is out of reach.
pub fn build(
    spec: &Spec,
    prepared: PreparedRoot,
    workspace: Option<OwnedFd>,
    owner_maps: &OwnerMaps,
    report: &mut Reporter,
    fill: &mut dyn FnMut(BorrowedFd<'_>, &Reporter) -> Result<(), LaunchStepError>,
) -> Result<NewRoot, LaunchStepError> {
    report.begin_step(LaunchStep::MakeMountsPrivate);
    propagate(MountPropagationFlags::PRIVATE)?;
    report.begin_step(LaunchStep::OpenViews);
    let views = views::open(spec, owner_maps)?;
    report.begin_step(LaunchStep::OpenWorkspace);
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
            report.begin_step(LaunchStep::FillWorkspace);
            fill(dir.as_fd(), report)?;
            restrict_workspace(mount.as_fd())?;
            (WorkspaceMounts::InMemory(mount), dir)
        }
    };

    report.begin_step(LaunchStep::PlaceSystemRuntime);
    let root = prepared.root;
    // Attach the new root to any directory: this namespace's copy of the host's tree is dropped below.
    attach(root.as_fd(), CWD, Path::new("/tmp"))
        .or_else(|_| attach(root.as_fd(), CWD, Path::new("/mnt")))
        .doing("attach the new root")?;
    let builder = RootBuilder { root: root.as_fd() };
    for mount in &prepared.mounts {
        builder.attach_known(mount)?;
    }
    report.begin_step(LaunchStep::PlaceWorkspace);
    for (name, text) in etc_files_with_host_name(&spec.host_name) {
        builder.make_file(&Path::new("etc").join(name), text.as_bytes())?;
    }
    let [tmp, whole] = match workspace_mounts {
        WorkspaceMounts::Open(mounts) => mounts,
        WorkspaceMounts::InMemory(mount) => builder.stage(mount.as_fd(), tmp)?,
    };
    // First /tmp, then the workspace, because the workspace's path may be below /tmp.
    builder.place(tmp.as_fd(), Path::new("/tmp"), true)?;
    builder.place(whole.as_fd(), spec.workspace.as_path(), true)?;
    // The program reaches its hidden directory as /tmp only. Cover its other name with an empty, read-only directory.
    let empty = clone_tree(root.as_fd(), OsStr::new("empty")).doing("open the empty directory")?;
    sys::mount_restrict(
        empty.as_fd(),
        sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOEXEC,
    )
    .doing("restrict the empty directory")?;
    builder.place(
        empty.as_fd(),
        &spec.workspace.as_path().join(HIDDEN_DIR),
        true,
    )?;

    report.begin_step(LaunchStep::PlaceViews);
    let shielded = views::place(&builder, views)?;
    report.begin_step(LaunchStep::MountSharedMemory);
    builder.mount_shared_memory(spec)?;
    report.begin_step(LaunchStep::MountProc);
    let proc_writable = builder.mount_proc()?;

    report.begin_step(LaunchStep::MakeRootReadOnly);
    set_root_read_only(root.as_fd()).doing("make / read-only")?;
    report.begin_step(LaunchStep::ChangeRoot);
    pivot(root.as_fd()).doing("pivot_root")?;
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
    /// A new tmpfs that is not attached yet. The kernel copies parts of a mount only where it is attached.
    InMemory(OwnedFd),
}

fn restrict_workspace(mount: BorrowedFd<'_>) -> Result<(), LaunchStepError> {
    sys::mount_restrict(mount, sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV)
        .doing("restrict the workspace's mount")
}

/// Opens a mount of the workspace, or of a directory in it, by path, and checks that it is the directory that the
/// runner holds.
fn on_disk(spec: &Spec, held: BorrowedFd<'_>, below: &Path) -> Result<OwnedFd, LaunchStepError> {
    let path = match below.as_os_str().is_empty() {
        true => spec.workspace.as_path().to_path_buf(),
        false => spec.workspace.as_path().join(below),
    };
    let what = || format!("open {}", path.display());
    let mount = clone_tree(CWD, path.as_os_str()).step_context(what)?;
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
    let (found, held) = (
        rustix::fs::fstat(&mount).step_context(what)?,
        rustix::fs::statat(held, below, flags).step_context(what)?,
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

/// Makes a workspace in memory. The size and the number of files are hard limits of the file system.
fn memory_workspace(spec: &Spec) -> Result<(OwnedFd, OwnedFd), LaunchStepError> {
    // The tmpfs counts against the memory limit too, so it need not be larger than that limit.
    let bytes = spec.limits.disk_bytes.min(spec.limits.memory_bytes);
    // The extra inodes are for the root, data/, docs/ and the hidden directories, which the program did not make.
    let inodes = spec.limits.files.saturating_add(16);
    let mount =
        program_tmpfs(spec, bytes, inodes, "0700").doing("make a tmpfs for the workspace")?;
    let dir = sys::open_at(&mount, ".", sys::DIRECTORY).doing("open the workspace's tmpfs")?;
    Ok((mount, dir))
}

/// Makes only the root's own file system read-only. The mounts on it keep their own attributes.
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
    // pivot_root stacks the old root on the new one, and unmount takes it off. No directory for the old root is
    // needed.
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}
