//! A temporary directory where a run would make its workspace.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// A directory made like a new workspace. Dropping it removes it.
pub struct TemporaryWorkspace {
    path: PathBuf,
    dir: OwnedFd,
}

impl TemporaryWorkspace {
    pub fn new(root: &Path) -> Result<TemporaryWorkspace, String> {
        let mut noise = [0u8; 8];
        // If there are no random bytes, the name has zeros and `mkdir` may fail on it.
        let _ = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty());
        let name = format!(".fumehood-doctor-{:016x}", u64::from_ne_bytes(noise));
        let path = root.join(name);
        let make = || {
            // Making it fails if the name exists, so this process made the directory.
            DirBuilder::new().mode(0o700).create(&path)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = rustix::fs::open(&path, flags, Mode::empty());
            // A directory that cannot be opened goes again.
            Ok::<_, io::Error>(opened.inspect_err(|_| drop(std::fs::remove_dir(&path)))?)
        };
        match make() {
            Ok(dir) => Ok(TemporaryWorkspace { path, dir }),
            Err(e) => Err(format!(
                "no workspace can be made in {}: {e}",
                root.display()
            )),
        }
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

impl Drop for TemporaryWorkspace {
    fn drop(&mut self) {
        // A directory that cannot be removed stays; its name says who made it.
        let _ = std::fs::remove_dir(&self.path);
    }
}

/// Tries whether a workspace can be made in `root`. The error says what prevents it.
pub fn try_workspace(root: &Path) -> Result<(), String> {
    TemporaryWorkspace::new(root).map(drop)
}
