//! Makes directories, files, links and mounts in the new root, below its descriptor.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::mount::{MountAttrFlags, UnmountFlags};

use super::detached::{DetachedMount, attach, clone_tree, new_filesystem, new_tmpfs};
use super::system::SystemRuntime;
use crate::layout::{INSIDE_GID, INSIDE_HOME, INSIDE_UID};
use crate::spec::{ProgramIdentity, Spec};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys;

/// Generated files of /etc: the same on every host, so they reveal nothing about this host.
fn generated_etc_files() -> [(&'static str, String); 4] {
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
        // Files only: the lookup of an unknown name fails at once, and no library looks for a daemon.
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

/// Files of /proc that the kernel filters by uid and not by namespace: they list the caller's keys on the host.
const MASKED_PROC: [&str; 2] = ["keys", "key-users"];

/// The new root under construction. All paths are relative to its descriptor.
pub struct RootBuilder<'a> {
    pub root: BorrowedFd<'a>,
}

impl RootBuilder<'_> {
    pub(super) fn fill(&self, system: &SystemRuntime) -> Result<(), LaunchStepError> {
        for dir in [
            "etc", "dev", "proc", "tmp", "var", "empty", "home", "root", "run",
        ] {
            self.make_directory(Path::new(dir))?;
        }
        // Programs that insist on /var/tmp get the private /tmp.
        self.make_link(Path::new("/tmp"), Path::new("var/tmp"))?;
        for (at, to) in &system.links {
            self.make_link(to, at.strip_prefix("/").unwrap_or(at))?;
        }
        for (at, bytes) in &system.copies {
            self.make_file(at.strip_prefix("/").unwrap_or(at), bytes)?;
        }
        for (to, at) in [
            ("/proc/self/fd", "dev/fd"),
            ("/proc/self/fd/0", "dev/stdin"),
            ("/proc/self/fd/1", "dev/stdout"),
            ("/proc/self/fd/2", "dev/stderr"),
            ("pts/ptmx", "dev/ptmx"),
        ] {
            self.make_link(Path::new(to), Path::new(at))?;
        }
        for (name, text) in generated_etc_files() {
            self.make_file(&Path::new("etc").join(name), text.as_bytes())?;
        }
        Ok(())
    }

    /// Makes copies of a workspace in memory and of its /tmp. The kernel copies a mount only where it is attached, so
    /// the workspace is attached at `/stage` for the time of the copy.
    pub(super) fn stage(
        &self,
        mount: BorrowedFd<'_>,
        tmp: &Path,
    ) -> Result<[OwnedFd; 2], LaunchStepError> {
        let stage = Path::new("stage");
        self.make_directory(stage)?;
        self.place(mount, Path::new("/stage"), true)?;
        let copy = |from: &Path| {
            clone_tree(self.root, from.as_os_str())
                .step_context(|| format!("open {}", from.display()))
        };
        let copies = [copy(&stage.join(tmp))?, copy(stage)?];
        self.unmount(stage)?;
        rustix::fs::unlinkat(self.root, stage, AtFlags::REMOVEDIR)
            .doing("remove the staging directory")?;
        Ok(copies)
    }

    /// Makes the directory or file on which a mount of the system runtime is attached, in the root, /etc or /dev.
    pub(super) fn make_mount_point(&self, detached: &DetachedMount) -> Result<(), LaunchStepError> {
        let target = below_root(&detached.target);
        match detached.directory {
            true => self.make_directory(&target),
            false => self.make_file(&target, b""),
        }
    }

    /// As [`Self::place`], at a target that [`Self::make_mount_point`] made. Fumehood made that path, and it holds no
    /// symlink.
    pub(super) fn attach_known(&self, detached: &DetachedMount) -> Result<(), LaunchStepError> {
        attach(
            detached.mount.as_fd(),
            self.root,
            &below_root(&detached.target),
        )
        .step_context(|| format!("mount {}", detached.target.display()))
    }

    fn make_directory(&self, relative: &Path) -> Result<(), LaunchStepError> {
        match rustix::fs::mkdirat(self.root, relative, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
            Err(e) => Err(e).step_context(|| format!("make the directory /{}", relative.display())),
        }
    }

    fn make_link(&self, to: &Path, at: &Path) -> Result<(), LaunchStepError> {
        rustix::fs::symlinkat(to, self.root, at)
            .step_context(|| format!("make the link /{}", at.display()))
    }

    pub(super) fn make_file(&self, at: &Path, bytes: &[u8]) -> Result<(), LaunchStepError> {
        let what = || format!("make the file /{}", at.display());
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(self.root, at, flags, Mode::from_raw_mode(0o644))
            .step_context(what)?;
        io::Write::write_all(&mut std::fs::File::from(file), bytes).step_context(what)
    }

    /// Makes the directories leading to `target` (and `target` itself), then attaches the mount there.
    ///
    /// Never follows a symlink: below the private /tmp and the workspace the program may have chosen the names.
    pub fn place(
        &self,
        mount: BorrowedFd<'_>,
        target: &Path,
        directory: bool,
    ) -> Result<(), LaunchStepError> {
        let what = || format!("mount {}", target.display());
        let (at, name) = self.mount_point(target, directory).step_context(what)?;
        attach(mount, at.as_fd(), Path::new(&name)).step_context(what)
    }

    fn mount_point(
        &self,
        target: &Path,
        directory: bool,
    ) -> io::Result<(OwnedFd, std::ffi::OsString)> {
        let below = below_root(target);
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
        let walk = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let mut at = sys::open_at(self.root, ".", walk)?;
        for name in above {
            make_directory(at.as_fd(), name)?;
            at = sys::open_at(&at, *name, walk)?;
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

    pub fn unmount(&self, at: &Path) -> Result<(), LaunchStepError> {
        let what = || format!("unmount /{}", at.display());
        // umount takes a path only, so change to the new root and pass a relative path.
        rustix::process::fchdir(self.root).step_context(what)?;
        rustix::mount::unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).step_context(what)
    }

    pub(super) fn mount_shared_memory(&self, spec: &Spec) -> Result<(), LaunchStepError> {
        // /dev/shm counts against the memory limit, so it need not be larger than that limit.
        let (bytes, inodes) = (
            spec.limits.memory_bytes,
            spec.limits.files.saturating_add(1),
        );
        let shm = program_tmpfs(spec, bytes, inodes, "1777").doing("make a tmpfs for /dev/shm")?;
        self.place(shm.as_fd(), Path::new("/dev/shm"), true)
    }

    /// Mounts the pid namespace's own /proc and returns a writable copy. The mount that the program sees is read-only
    /// as a whole, so the program cannot write any file that reaches the host, such as core_pattern or sysrq-trigger,
    /// whatever its mode.
    pub(super) fn mount_proc(&self) -> Result<OwnedFd, LaunchStepError> {
        let mount = new_filesystem("proc", &[], MountAttrFlags::MOUNT_ATTR_NOEXEC)
            .doing("make a proc for the pid namespace")?;
        self.place(mount.as_fd(), Path::new("/proc"), true)?;
        let writable =
            clone_tree(self.root, OsStr::new("proc")).doing("copy the mount of /proc")?;
        for name in MASKED_PROC {
            let path = Path::new("proc").join(name);
            if rustix::fs::statat(self.root, &path, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
                // Cover the file with an empty file of Fumehood.
                let empty = clone_tree(self.root, OsStr::new("etc/resolv.conf"));
                let empty = empty.doing("open an empty file")?;
                self.place(empty.as_fd(), &Path::new("/").join(&path), false)?;
            }
        }
        let attributes = sys::MOUNT_ATTR_RDONLY
            | sys::MOUNT_ATTR_NOSUID
            | sys::MOUNT_ATTR_NODEV
            | sys::MOUNT_ATTR_NOEXEC;
        sys::mount_restrict(mount.as_fd(), attributes).doing("make /proc read-only")?;
        Ok(writable)
    }
}

fn make_directory(at: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match rustix::fs::mkdirat(at, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Returns a path of the new root relative to that root. Inside, /var/tmp is a link to the private /tmp.
pub fn below_root(path: &Path) -> PathBuf {
    match path.strip_prefix("/var/tmp") {
        Ok(rest) => Path::new("tmp").join(rest),
        Err(_) => path.strip_prefix("/").unwrap_or(path).to_path_buf(),
    }
}

/// Makes a tmpfs whose root directory belongs to the program, with hard limits.
pub(super) fn program_tmpfs(
    spec: &Spec,
    bytes: u64,
    inodes: u64,
    mode: &str,
) -> rustix::io::Result<OwnedFd> {
    // The ids as the user namespace of this mount namespace numbers them.
    let (uid, gid) = match spec.identity {
        ProgramIdentity::Leased { uid, gid } => (uid, gid),
        ProgramIdentity::Caller { .. } => (INSIDE_UID, INSIDE_GID),
    };
    new_tmpfs(&[
        ("size", &bytes.to_string()),
        ("nr_inodes", &inodes.to_string()),
        ("mode", mode),
        ("uid", &uid.to_string()),
        ("gid", &gid.to_string()),
    ])
}
