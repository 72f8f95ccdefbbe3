//! A temporary directory where a run would make its workspace.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

/// A directory made like a new workspace. Dropping it removes it.
pub struct TrialDirectory {
    path: PathBuf,
    dir: OwnedFd,
}

impl TrialDirectory {
    pub fn new(root: &Path) -> Result<TrialDirectory, String> {
        let mut noise = [0u8; 8];
        // If there are no random bytes, the name has zeros and `mkdir` may fail on it.
        let _ = rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty());
        let name = format!(".fumehood-doctor-{:016x}", u64::from_ne_bytes(noise));
        let path = root.join(name);
        let failed = |e: rustix::io::Errno| {
            let e = std::io::Error::from(e);
            format!("no workspace can be made in {}: {e}", root.display())
        };
        // `mkdir` fails if the name exists, so this process made the directory.
        rustix::fs::mkdir(&path, Mode::RWXU).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(dir) => Ok(TrialDirectory { path, dir }),
            Err(e) => {
                let _ = rustix::fs::rmdir(&path);
                Err(failed(e))
            }
        }
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

impl Drop for TrialDirectory {
    fn drop(&mut self) {
        // A directory that cannot be removed stays; its name says who made it.
        let _ = rustix::fs::unlinkat(CWD, &self.path, AtFlags::REMOVEDIR);
    }
}

/// Tries whether a workspace can be made in `root`. The error says what prevents it.
pub fn try_workspace(root: &Path) -> Result<(), String> {
    TrialDirectory::new(root).map(drop)
}
