//! The system runtime: which parts of the host every run sees, why, and what stands for each inside.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::detached::{DetachedMount, open_detached};
use crate::layout::{DEVICE_NAMES, ETC_ENTRIES, SYSTEM_DIRS};
use crate::step_report::{LaunchStepError, StepContext};
use crate::sys;

/// No larger file of /etc is copied.
const COPY_BYTES_MAX: u64 = 16 << 10;

/// The parts of the system runtime that this host has, and what stands for each inside.
#[derive(Default)]
pub struct System {
    pub pieces: Vec<DetachedMount>,
    pub links: Vec<(PathBuf, PathBuf)>,
    /// What everybody may read and is small: a copy costs less than a mount, which every run makes and takes down.
    pub copies: Vec<(PathBuf, Vec<u8>)>,
}

impl System {
    pub fn open() -> Result<System, LaunchStepError> {
        let mut system = System::default();
        for name in SYSTEM_DIRS {
            system.add(Path::new(name))?;
        }
        for (name, _reason) in ETC_ENTRIES {
            system.add(&Path::new("/etc").join(name))?;
        }
        for name in DEVICE_NAMES {
            let path = Path::new("/dev").join(name);
            // Read-only: who may write to a file may also set its times. Writing to a device asks nothing of its mount.
            let attributes =
                sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NOEXEC;
            system.pieces.push(open_detached(&path, &path, attributes)?);
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
            let to = std::fs::read_link(path).during(what)?;
            self.links.push((path.to_path_buf(), to));
            return Ok(());
        }
        if is_small_and_open(&found)
            && let Some(bytes) = read_small(path).during(what)?
        {
            self.copies.push((path.to_path_buf(), bytes));
            return Ok(());
        }
        let attributes = sys::MOUNT_ATTR_RDONLY | sys::MOUNT_ATTR_NOSUID | sys::MOUNT_ATTR_NODEV;
        self.pieces.push(open_detached(path, path, attributes)?);
        Ok(())
    }
}

fn is_small_and_open(stat: &rustix::fs::Stat) -> bool {
    rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile
        && stat.st_mode & 0o004 != 0
        && (0..=COPY_BYTES_MAX as i64).contains(&stat.st_size)
}

/// `None`: it is another file by now.
fn read_small(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    if !is_small_and_open(&rustix::fs::fstat(&file)?) {
        return Ok(None);
    }
    let mut bytes = Vec::with_capacity(COPY_BYTES_MAX as usize);
    let file = std::fs::File::from(file);
    io::Read::read_to_end(&mut io::Read::take(file, COPY_BYTES_MAX), &mut bytes)?;
    Ok(Some(bytes))
}
