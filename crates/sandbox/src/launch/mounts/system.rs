//! The system runtime: the parts of the host that every run sees, and how each part appears inside.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::detached::{DetachedMount, open_detached};
use crate::layout::{DEVICE_NAMES, ETC_ENTRIES, SYSTEM_DIRS};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys;

/// A larger file of /etc is mounted, not copied.
const COPY_BYTES_MAX: u64 = 16 << 10;

/// The parts of the system runtime that this host has.
#[derive(Default)]
pub struct SystemRuntime {
    pub mounts: Vec<DetachedMount>,
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Small files that everybody may read. A copy costs less than a mount, which every run makes and takes down.
    pub copies: Vec<(PathBuf, Vec<u8>)>,
}

impl SystemRuntime {
    pub fn open() -> Result<SystemRuntime, LaunchStepError> {
        let mut system = SystemRuntime::default();
        for name in SYSTEM_DIRS {
            system.add(Path::new(name))?;
        }
        for (name, _reason) in ETC_ENTRIES {
            system.add(&Path::new("/etc").join(name))?;
        }
        for name in DEVICE_NAMES {
            let path = Path::new("/dev").join(name);
            // Read-only, because a process that may write to a file may also set its times. The kernel does not check
            // the mount's read-only flag for writes to a device.
            let attributes =
                sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NOEXEC;
            system.mounts.push(open_detached(&path, &path, attributes)?);
        }
        Ok(system)
    }

    fn add(&mut self, path: &Path) -> Result<(), LaunchStepError> {
        let Ok(found) = rustix::fs::lstat(path) else {
            return Ok(());
        };
        let what = || format!("read {}", path.display());
        let kind = rustix::fs::FileType::from_raw_mode(found.st_mode);
        if kind == rustix::fs::FileType::Symlink {
            let to = std::fs::read_link(path).step_context(what)?;
            self.links.push((path.to_path_buf(), to));
            return Ok(());
        }
        if is_small_and_world_readable(&found)
            && let Some(bytes) = read_small(path).step_context(what)?
        {
            self.copies.push((path.to_path_buf(), bytes));
            return Ok(());
        }
        let attributes = sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV;
        self.mounts.push(open_detached(path, path, attributes)?);
        Ok(())
    }
}

fn is_small_and_world_readable(stat: &rustix::fs::Stat) -> bool {
    rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile
        && stat.st_mode & 0o004 != 0
        && (0..=COPY_BYTES_MAX as i64).contains(&stat.st_size)
}

/// Returns `None` if the file has been replaced since its lstat.
fn read_small(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = sys::open(path, flags)?;
    if !is_small_and_world_readable(&rustix::fs::fstat(&file)?) {
        return Ok(None);
    }
    let mut bytes = Vec::with_capacity(COPY_BYTES_MAX as usize);
    let file = std::fs::File::from(file);
    io::Read::read_to_end(&mut io::Read::take(file, COPY_BYTES_MAX), &mut bytes)?;
    Ok(Some(bytes))
}
