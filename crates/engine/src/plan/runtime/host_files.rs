//! Bounded looks at files that untrusted code may have written.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags};

/// The most bytes of a small text file (pyvenv.cfg, .python-version, Renviron).
pub(super) const TEXT_BYTES_MAX: usize = 64 << 10;

pub(super) fn is_real_dir(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_dir())
}

/// Whether the path is a regular file that the caller could execute.
pub(super) fn is_executable(path: &Path) -> bool {
    let regular = path.metadata().is_ok_and(|meta| meta.is_file());
    regular && rustix::fs::accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS).is_ok()
}

/// The most directory entries to look at.
pub(super) const ENTRIES_MAX: usize = 4096;

/// The first entries of a directory; none if it cannot be listed.
pub(super) fn entries(dir: &Path) -> impl Iterator<Item = std::fs::DirEntry> + use<> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    entries.take(ENTRIES_MAX).flatten()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkPolicy {
    Follow,
    /// For files that untrusted code may have created: a symlink would make this process read a file of somebody else's
    /// choosing, and quote it in a message.
    Refuse,
}

/// Reads a small regular file. `None` if it is anything else, or larger than the bound.
pub(super) fn read_text(path: &Path, links: LinkPolicy) -> Option<Vec<u8>> {
    let text = read_head(path, links, TEXT_BYTES_MAX + 1).ok()?;
    (text.len() <= TEXT_BYTES_MAX).then_some(text)
}

/// Reads the first bytes of a regular file. Opening a FIFO must not block and opening a device must not have side
/// effects, so check the type before and after opening.
pub(super) fn read_head(
    path: &Path,
    links: LinkPolicy,
    bytes_max: usize,
) -> std::io::Result<Vec<u8>> {
    let not_regular = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
    let meta = match links {
        LinkPolicy::Follow => path.metadata()?,
        LinkPolicy::Refuse => path.symlink_metadata()?,
    };
    if !meta.is_file() {
        return Err(not_regular());
    }
    let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    flags.set(OFlags::NOFOLLOW, links == LinkPolicy::Refuse);
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let opened = file.metadata()?;
    if !opened.is_file() {
        return Err(not_regular());
    }
    // Leave room beyond the end: `read_to_end` detects the end by a read that returns nothing.
    let mut head = Vec::with_capacity(bytes_max.min(opened.len() as usize + 64));
    file.take(bytes_max as u64).read_to_end(&mut head)?;
    Ok(head)
}

pub(super) fn is_plain_absolute(path: &Path) -> bool {
    path.is_absolute()
        && !path.as_os_str().as_bytes().contains(&0)
        && path
            .components()
            .all(|c| matches!(c, Component::RootDir | Component::Normal(_)))
}
