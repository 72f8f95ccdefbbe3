//! The program's view of the file system: a new root of read-only, private binds.
//!
//! Everything is opened by descriptor before the new root is put together, so that no path is resolved
//! twice. What is not listed here, or in the spec's views, does not exist inside.

mod system;

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags,
};

use crate::channel::{During, Reporter, StepError};
use crate::spec::{Identity, Layer, Spec, WorkspaceKind};
use crate::sys;
use crate::views;

pub use system::SYSTEM;
use system::System;
pub(crate) use system::{DEVICES, ETC};

/// Who the program is inside, always: the host's names and numbers are nobody's business there.
pub const INSIDE_UID: u32 = 1000;
pub const INSIDE_GID: u32 = 1000;
/// The program's /tmp: private to the run, below the workspace on the host, and empty when seen there from inside.
pub const HIDDEN: &str = ".fumehood";
/// The program's home: in its private /tmp, so counted as disk and never collected.
pub const INSIDE_HOME: &str = "/tmp/home";

/// Files of /etc that are made up: the same on every host, and telling nothing of this one.
fn made_up_etc() -> [(&'static str, String); 4] {
    [
        (
            "passwd",
            format!(
                "root:x:0:0:root:/:/usr/sbin/nologin\n\
                 analysis:x:{INSIDE_UID}:{INSIDE_GID}:analysis:{INSIDE_HOME}:/bin/sh\n\
                 nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
            ),
        ),
        (
            "group",
            format!("root:x:0:\nanalysis:x:{INSIDE_GID}:\nnogroup:x:65534:\n"),
        ),
        // Files only: a name that is not in them fails at once, and no library looks for a daemon.
        (
            "nsswitch.conf",
            String::from(
                "passwd: files\ngroup: files\nshadow: files\nhosts: files\nnetworks: files\n\
                 services: files\nprotocols: files\n",
            ),
        ),
        ("resolv.conf", String::new()),
    ]
}

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

/// The number of terminals is bounded for the whole host (kernel.pty.max); this is the run's share.
const TERMINALS_MAX: &str = "64";

/// What /proc tells by uid rather than by namespace: the names of the caller's keys on the host.
const MASKED_PROC: [&str; 2] = ["keys", "key-users"];

/// A host path, opened as a detached copy of its mount, restricted, waiting to be put in place.
pub(crate) struct Piece {
    pub mount: OwnedFd,
    pub target: PathBuf,
    pub directory: bool,
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
pub struct Prepared {
    root: OwnedFd,
    pieces: Vec<Piece>,
}

/// Makes the new root and puts the system runtime into it. In a mount namespace of our own.
pub fn prepare(report: &mut Reporter) -> Result<Prepared, StepError> {
    report.step("keep mounts to ourselves");
    // Nothing done here may travel to the host's namespace. What the host mounts until there is a plan, because the runner
    // looked there, say, must still come to here.
    propagate(MountPropagationFlags::DOWNSTREAM)?;

    report.step("open the system runtime");
    let system = System::open()?;

    report.step("make the new root");
    let root = new_tmpfs(&[("size", "4m"), ("nr_inodes", "4096"), ("mode", "0755")])
        .during(|| "make a tmpfs for the new root".into())?;
    let skeleton = Skeleton { root: root.as_fd() };
    skeleton.fill(&system)?;
    let mut pieces = system.pieces;
    pieces.push(terminals()?);
    for piece in &pieces {
        skeleton.make_point(piece)?;
    }
    Ok(Prepared { root, pieces })
}

fn propagate(how: MountPropagationFlags) -> Result<(), StepError> {
    rustix::mount::mount_change("/", how | MountPropagationFlags::REC)
        .during(|| "change how mounts propagate".into())
}

/// Completes the new root and moves into it. Afterwards the host's tree is out of reach.
pub fn build(
    spec: &Spec,
    prepared: Prepared,
    workspace: Option<OwnedFd>,
    owner_maps: &OwnerMaps,
    report: &mut Reporter,
    fill: &mut dyn FnMut(BorrowedFd<'_>, &Reporter) -> Result<(), StepError>,
) -> Result<NewRoot, StepError> {
    report.step("make mounts private");
    propagate(MountPropagationFlags::PRIVATE)?;
    report.step("open the read-only views");
    let views = views::open(spec, owner_maps)?;
    report.step("open the workspace");
    let tmp = Path::new(HIDDEN);
    let (workspace_mounts, workspace_dir) = match spec.workspace_kind {
        WorkspaceKind::Disk => {
            let dir = workspace.ok_or_else(|| StepError::new("no workspace descriptor"))?;
            let mounts = [tmp, Path::new("")].map(|below| on_disk(spec, dir.as_fd(), below));
            let [tmp, whole] = mounts;
            (WorkspaceMounts::Open([tmp?, whole?]), dir)
        }
        WorkspaceKind::Memory => {
            let (mount, dir) = memory_workspace(spec)?;
            report.step("fill the workspace");
            fill(dir.as_fd(), report)?;
            restrict_workspace(mount.as_fd())?;
            (WorkspaceMounts::InMemory(mount), dir)
        }
    };

    report.step("put the system runtime in place");
    let root = prepared.root;
    // Any directory will do to hang it on; this namespace's copy of the tree is thrown away below.
    attach(root.as_fd(), CWD, Path::new("/tmp"))
        .or_else(|_| attach(root.as_fd(), CWD, Path::new("/mnt")))
        .during(|| "attach the new root".into())?;
    let skeleton = Skeleton { root: root.as_fd() };
    for piece in &prepared.pieces {
        skeleton.place_known(piece)?;
    }
    report.step("put the workspace in place");
    for (name, text) in named_after(&spec.host_name) {
        skeleton.file(&Path::new("etc").join(name), text.as_bytes())?;
    }
    let [tmp, whole] = match workspace_mounts {
        WorkspaceMounts::Open(mounts) => mounts,
        WorkspaceMounts::InMemory(mount) => skeleton.stage(mount.as_fd(), tmp)?,
    };
    // The workspace may stand below its own /tmp.
    skeleton.place(tmp.as_fd(), Path::new("/tmp"), true)?;
    skeleton.place(whole.as_fd(), spec.workspace.as_path(), true)?;
    // The run's own hidden directory is reached as /tmp only; here stands an empty, read-only one.
    let empty = clone_tree(root.as_fd(), OsStr::new("empty"))
        .during(|| "open the empty directory".into())?;
    sys::mount_restrict(
        empty.as_fd(),
        sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOEXEC,
    )
    .during(|| "restrict the empty directory".into())?;
    skeleton.place(empty.as_fd(), &spec.workspace.as_path().join(HIDDEN), true)?;

    report.step("put the read-only views in place");
    let shielded = views::place(&skeleton, views)?;
    report.step("mount /dev/shm");
    skeleton.shared_memory(spec)?;
    report.step("mount /proc");
    let proc_writable = skeleton.proc()?;

    report.step("make the new root read-only");
    set_root_read_only(root.as_fd()).during(|| "make / read-only".into())?;
    report.step("change the root");
    pivot(root.as_fd()).during(|| "pivot_root".into())?;
    let how = format!("new root of read-only binds, pivot_root; {shielded}");
    report.layer(Layer::MountNamespace, &how);
    Ok(NewRoot {
        proc_writable,
        workspace: workspace_dir,
    })
}

pub(crate) fn open_piece(
    source: &Path,
    target: &Path,
    attributes: u64,
) -> Result<Piece, StepError> {
    let mount =
        clone_tree(CWD, source.as_os_str()).during(|| format!("open {}", source.display()))?;
    let directory =
        is_directory(mount.as_fd()).during(|| format!("look at {}", source.display()))?;
    sys::mount_restrict(mount.as_fd(), attributes)
        .during(|| format!("make {} read-only", source.display()))?;
    Ok(Piece {
        mount,
        target: target.to_path_buf(),
        directory,
    })
}

/// A detached copy of the mounts at a path. The path holds no symlink: the runner resolved it once, and
/// what was a directory then and is a link now is somebody's trick.
pub(crate) fn clone_tree(at: BorrowedFd<'_>, path: &OsStr) -> rustix::io::Result<OwnedFd> {
    let found = rustix::fs::openat2(
        at,
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )?;
    rustix::mount::open_tree(
        &found,
        "",
        OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE
            | OpenTreeFlags::AT_EMPTY_PATH,
    )
}

fn is_directory(fd: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode);
    Ok(kind == rustix::fs::FileType::Directory)
}

pub(crate) fn new_filesystem(
    kind: &str,
    options: &[(&str, &str)],
    attributes: MountAttrFlags,
) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        match value.is_empty() {
            true => rustix::mount::fsconfig_set_flag(context.as_fd(), *key)?,
            false => rustix::mount::fsconfig_set_string(context.as_fd(), *key, *value)?,
        }
    }
    rustix::mount::fsconfig_create(context.as_fd())?;
    rustix::mount::fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NOSUID | attributes,
    )
}

/// The run's own terminals.
fn terminals() -> Result<Piece, StepError> {
    let mount = new_filesystem(
        "devpts",
        &[
            ("ptmxmode", "0666"),
            ("mode", "0620"),
            ("max", TERMINALS_MAX),
        ],
        // Not nodev: terminals are devices, and the only ones that can come to be here.
        MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )
    .during(|| "make a devpts".into())?;
    Ok(Piece {
        mount,
        target: PathBuf::from("/dev/pts"),
        directory: true,
    })
}

fn new_tmpfs(options: &[(&str, &str)]) -> rustix::io::Result<OwnedFd> {
    new_filesystem("tmpfs", options, MountAttrFlags::MOUNT_ATTR_NODEV)
}

/// The owner to give a tmpfs's root, as this mount namespace's user namespace numbers it.
fn owner_here(spec: &Spec) -> (u32, u32) {
    match spec.identity {
        Identity::Leased { uid, gid } => (uid, gid),
        Identity::Caller { .. } => (INSIDE_UID, INSIDE_GID),
    }
}

/// The mounts of /tmp and of the workspace.
enum WorkspaceMounts {
    Open([OwnedFd; 2]),
    /// One file system of its own, not yet attached, so that no part of it can be copied.
    InMemory(OwnedFd),
}

fn restrict_workspace(mount: BorrowedFd<'_>) -> Result<(), StepError> {
    sys::mount_restrict(mount, sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV)
        .during(|| "restrict the workspace's mount".into())
}

/// A mount of the workspace or of a directory in it, found by its path and shown to be the one that the runner holds.
fn on_disk(spec: &Spec, held: BorrowedFd<'_>, below: &Path) -> Result<OwnedFd, StepError> {
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
        false => Err(StepError::new(format!(
            "{} was replaced by another directory",
            path.display()
        ))),
    }
}

/// A workspace in memory: the size and the number of files are the file system's own hard limits.
fn memory_workspace(spec: &Spec) -> Result<(OwnedFd, OwnedFd), StepError> {
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

fn attach(mount: BorrowedFd<'_>, at: BorrowedFd<'_>, target: &Path) -> rustix::io::Result<()> {
    rustix::mount::move_mount(
        mount,
        "",
        at,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
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

/// The new root while it is being furnished. All paths are taken below its descriptor.
pub(crate) struct Skeleton<'a> {
    pub root: BorrowedFd<'a>,
}

impl Skeleton<'_> {
    fn fill(&self, system: &System) -> Result<(), StepError> {
        for dir in [
            "etc", "dev", "proc", "tmp", "var", "empty", "home", "root", "run",
        ] {
            self.directory(Path::new(dir))?;
        }
        // Programs that insist on /var/tmp get the private /tmp.
        self.link(Path::new("/tmp"), Path::new("var/tmp"))?;
        for (at, to) in &system.links {
            self.link(to, at.strip_prefix("/").unwrap_or(at))?;
        }
        for (at, bytes) in &system.copies {
            self.file(at.strip_prefix("/").unwrap_or(at), bytes)?;
        }
        for (to, at) in [
            ("/proc/self/fd", "dev/fd"),
            ("/proc/self/fd/0", "dev/stdin"),
            ("/proc/self/fd/1", "dev/stdout"),
            ("/proc/self/fd/2", "dev/stderr"),
            ("pts/ptmx", "dev/ptmx"),
        ] {
            self.link(Path::new(to), Path::new(at))?;
        }
        for (name, text) in made_up_etc() {
            self.file(&Path::new("etc").join(name), text.as_bytes())?;
        }
        Ok(())
    }

    /// Copies of a workspace in memory and of its /tmp. A mount can only be copied where it is attached: so it waits on a
    /// stage.
    fn stage(&self, mount: BorrowedFd<'_>, tmp: &Path) -> Result<[OwnedFd; 2], StepError> {
        let stage = Path::new("stage");
        self.directory(stage)?;
        self.place(mount, Path::new("/stage"), true)?;
        let copy = |from: &Path| {
            clone_tree(self.root, from.as_os_str()).during(|| format!("open {}", from.display()))
        };
        let copies = [copy(&stage.join(tmp))?, copy(stage)?];
        self.unmount(stage)?;
        rustix::fs::unlinkat(self.root, stage, AtFlags::REMOVEDIR)
            .during(|| "clear the stage".into())?;
        Ok(copies)
    }

    /// What a piece is mounted on, in the root, /etc or /dev.
    fn make_point(&self, piece: &Piece) -> Result<(), StepError> {
        let target = views::below_root(&piece.target);
        match piece.directory {
            true => self.directory(&target),
            false => self.file(&target, b""),
        }
    }

    /// As [`Self::place`] on what [`Self::make_point`] made: all of that is ours, and there is no link on the way.
    fn place_known(&self, piece: &Piece) -> Result<(), StepError> {
        attach(
            piece.mount.as_fd(),
            self.root,
            &views::below_root(&piece.target),
        )
        .during(|| format!("mount {}", piece.target.display()))
    }

    fn directory(&self, relative: &Path) -> Result<(), StepError> {
        match rustix::fs::mkdirat(self.root, relative, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
            Err(e) => Err(e).during(|| format!("make the directory /{}", relative.display())),
        }
    }

    fn link(&self, to: &Path, at: &Path) -> Result<(), StepError> {
        rustix::fs::symlinkat(to, self.root, at)
            .during(|| format!("make the link /{}", at.display()))
    }

    fn file(&self, at: &Path, bytes: &[u8]) -> Result<(), StepError> {
        let what = || format!("make the file /{}", at.display());
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file =
            rustix::fs::openat(self.root, at, flags, Mode::from_raw_mode(0o644)).during(what)?;
        io::Write::write_all(&mut std::fs::File::from(file), bytes).during(what)
    }

    /// Makes the directories leading to `target` (and `target` itself), then mounts there.
    ///
    /// Never through a symlink: below the private /tmp and the workspace the names may be the program's.
    pub(crate) fn place(
        &self,
        mount: BorrowedFd<'_>,
        target: &Path,
        directory: bool,
    ) -> Result<(), StepError> {
        let what = || format!("mount {}", target.display());
        let (at, name) = self.mount_point(target, directory).during(what)?;
        attach(mount, at.as_fd(), Path::new(&name)).during(what)
    }

    fn mount_point(
        &self,
        target: &Path,
        directory: bool,
    ) -> io::Result<(OwnedFd, std::ffi::OsString)> {
        let below = views::below_root(target);
        let names: Vec<&OsStr> = below
            .components()
            .filter_map(|c| match c {
                Component::Normal(name) => Some(name),
                _ => None,
            })
            .collect();
        let (last, above) = names
            .split_last()
            .ok_or_else(|| io::Error::other("cannot mount on /"))?;
        let walk = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut at = rustix::fs::openat(self.root, ".", walk, Mode::empty())?;
        for name in above {
            make_directory(at.as_fd(), name)?;
            at = rustix::fs::openat(&at, *name, walk, Mode::empty())?;
        }
        match directory {
            true => make_directory(at.as_fd(), last)?,
            false => {
                let flags = OFlags::WRONLY
                    | OFlags::CREATE
                    | OFlags::NOFOLLOW
                    | OFlags::CLOEXEC
                    | OFlags::NONBLOCK;
                match rustix::fs::openat(
                    &at,
                    *last,
                    flags | OFlags::EXCL,
                    Mode::from_raw_mode(0o444),
                ) {
                    Ok(_) | Err(rustix::io::Errno::EXIST) => {}
                    Err(e) => return Err(e.into()),
                }
            }
        }
        let is_link = rustix::fs::statat(&at, *last, AtFlags::SYMLINK_NOFOLLOW).map(|s| {
            rustix::fs::FileType::from_raw_mode(s.st_mode) == rustix::fs::FileType::Symlink
        })?;
        match is_link {
            true => Err(io::Error::from_raw_os_error(
                rustix::io::Errno::LOOP.raw_os_error(),
            )),
            false => Ok((at, last.to_os_string())),
        }
    }

    pub(crate) fn unmount(&self, at: &Path) -> Result<(), StepError> {
        let what = || format!("unmount /{}", at.display());
        // By way of the working directory: umount takes paths only.
        rustix::process::fchdir(self.root).during(what)?;
        rustix::mount::unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).during(what)
    }

    fn shared_memory(&self, spec: &Spec) -> Result<(), StepError> {
        let (uid, gid) = owner_here(spec);
        // Shared memory is memory: it may not exceed the memory limit, which it counts against too.
        let shm = new_tmpfs(&[
            ("size", &spec.limits.memory_bytes.to_string()),
            (
                "nr_inodes",
                &spec.limits.files.saturating_add(1).to_string(),
            ),
            ("mode", "1777"),
            ("uid", &uid.to_string()),
            ("gid", &gid.to_string()),
        ])
        .during(|| "make a tmpfs for /dev/shm".into())?;
        self.place(shm.as_fd(), Path::new("/dev/shm"), true)
    }

    /// The pid namespace's own /proc. The program's is read-only as a whole: nothing in it that
    /// reaches the host, such as core_pattern or sysrq-trigger, can be written whatever its mode.
    fn proc(&self) -> Result<OwnedFd, StepError> {
        let mount = new_filesystem("proc", &[], MountAttrFlags::MOUNT_ATTR_NOEXEC)
            .during(|| "make a proc for the pid namespace".into())?;
        self.place(mount.as_fd(), Path::new("/proc"), true)?;
        let writable = clone_tree(self.root, OsStr::new("proc"))
            .during(|| "copy the mount of /proc".into())?;
        for name in MASKED_PROC {
            let path = Path::new("proc").join(name);
            if rustix::fs::statat(self.root, &path, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
                // An empty file of ours stands in for it.
                let empty = clone_tree(self.root, OsStr::new("etc/resolv.conf"));
                let empty = empty.during(|| "open an empty file".into())?;
                self.place(empty.as_fd(), &Path::new("/").join(&path), false)?;
            }
        }
        let attributes = sys::MOUNT_ATTR_RDONLY
            | sys::MOUNT_ATTR_NOSUID
            | sys::MOUNT_ATTR_NODEV
            | sys::MOUNT_ATTR_NOEXEC;
        sys::mount_restrict(mount.as_fd(), attributes).during(|| "make /proc read-only".into())?;
        Ok(writable)
    }
}

fn make_directory(at: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match rustix::fs::mkdirat(at, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
