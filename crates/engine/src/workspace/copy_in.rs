//! `--input PATH[:NAME]`: copying a file or a directory into the workspace.
//!
//! The source may be hostile (a cloned repository, say), so everything is opened once, without
//! following links, and judged by its descriptor. The workspace is written to only by names of one
//! component below a held descriptor, each made exclusively. Whatever fails leaves a partial copy
//! behind: the caller removes the workspace.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, Dir, DirEntry, FileType, Gid, Mode, OFlags, ResolveFlags, SeekFrom, Stat, Uid,
};
use rustix::io::Errno;
use store::types::input_name::{self, InputNameError, check_name, stays_inside};

/// A copied directory may be this deep. Three descriptors are held a level, which this keeps well
/// below the usual limit of 1024.
pub(crate) const DEPTH_MAX: usize = input_name::DEPTH_MAX;
/// One step of copying; the budget is asked before each.
const STEP_BYTES: u64 = 16 << 20;
const BUFFER_BYTES: usize = 256 * 1024;

/// What may still be copied. Copying counts it down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub bytes: u64,
    /// Files, directories and symlinks alike.
    pub files: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    pub files: u64,
    /// Data written; holes in sparse files are not counted.
    pub bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error(transparent)]
    Name(#[from] InputNameError),
    #[error("open input {path:?}")]
    Open {
        path: PathBuf,
        #[source]
        source: Errno,
    },
    #[error("read input {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        source: Errno,
    },
    #[error("create {name:?} in the workspace")]
    Create {
        name: PathBuf,
        #[source]
        source: Errno,
    },
    #[error("write {name:?} in the workspace")]
    Write {
        name: PathBuf,
        #[source]
        source: Errno,
    },
    #[error("{name:?} is in the workspace already; give another name with --input PATH:NAME")]
    Exists { name: PathBuf },
    #[error("input {path:?} is {kind}; only files and directories are copied")]
    Special { path: PathBuf, kind: &'static str },
    #[error(
        "input {path:?} is a symlink to {target:?}, which leads out of the copied directory; show its target with --read, or leave the link out"
    )]
    LinkLeadsOut { path: PathBuf, target: PathBuf },
    #[error("input {path:?} contains the workspace itself")]
    ContainsWorkspace { path: PathBuf },
    #[error("input {path:?} is more than {DEPTH_MAX} directories deep")]
    TooDeep { path: PathBuf },
    #[error(
        "the inputs are larger than the disk limit; raise --disk, or show {path:?} with --read instead of copying it"
    )]
    TooManyBytes { path: PathBuf },
    #[error(
        "the inputs are more files than the limit; raise --files, or show {path:?} with --read instead of copying it"
    )]
    TooManyFiles { path: PathBuf },
}

/// Copies `source`, a path without symlinks, to `name` in the workspace. Directories
/// that `name` leads through are made. With `owner`, everything made is given to it.
pub fn copy_in(
    source: &Path,
    workspace: BorrowedFd<'_>,
    name: &Path,
    owner: Option<(u32, u32)>,
    budget: &mut Budget,
) -> Result<Copied, CopyError> {
    let parts = check_name(name)?;
    let top = rustix::fs::fstat(workspace).map_err(|source| CopyError::Create {
        name: name.to_path_buf(),
        source,
    })?;
    let mut copy = Copy {
        owner: owner.map(|(uid, gid)| (Uid::from_raw(uid), Gid::from_raw(gid))),
        budget,
        copied: Copied::default(),
        workspace: (top.st_dev, top.st_ino),
        buffer: Vec::new(),
    };
    let at = Place {
        from: source.to_path_buf(),
        to: name.to_path_buf(),
    };
    let (file, stat) = open_source(source)?;
    let Some((last, above)) = parts.split_last() else {
        let name = name.to_path_buf();
        return Err(InputNameError::BadName { name }.into());
    };
    let parent = copy.make_parents(workspace, above, &at)?;
    let parent = parent.as_ref().map_or(workspace, |p| p.as_fd());
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => copy.tree(file, stat, parent, last, &at)?,
        _ => copy.file(file.as_fd(), &stat, parent, last, &at)?,
    }
    Ok(copy.copied)
}

/// Opens what the user named. Its kind is looked at first, because merely opening some devices
/// does something; what counts is the look at the descriptor afterwards.
pub(crate) fn open_source(source: &Path) -> Result<(OwnedFd, Stat), CopyError> {
    let failed = |e| CopyError::Open {
        path: source.to_path_buf(),
        source: e,
    };
    let stat = rustix::fs::stat(source).map_err(failed)?;
    check_kind(FileType::from_raw_mode(stat.st_mode), source)?;
    // The path was resolved, and checked against the policy, before: a link that stands in it now is not followed.
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(rustix::fs::CWD, source, READ, Mode::empty(), resolve)
        .map_err(failed)?;
    let stat = rustix::fs::fstat(&file).map_err(failed)?;
    check_kind(FileType::from_raw_mode(stat.st_mode), source)?;
    Ok((file, stat))
}

/// NONBLOCK, so that a FIFO put in the file's place does not hold us up.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

pub(crate) fn check_kind(kind: FileType, path: &Path) -> Result<(), CopyError> {
    let kind = match kind {
        FileType::RegularFile | FileType::Directory => return Ok(()),
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "neither file nor directory",
    };
    Err(CopyError::Special {
        path: path.to_path_buf(),
        kind,
    })
}

/// Where copying is, for messages only.
#[derive(Clone)]
struct Place {
    from: PathBuf,
    to: PathBuf,
}

impl Place {
    fn join(&self, name: &OsStr) -> Place {
        Place {
            from: self.from.join(name),
            to: self.to.join(name),
        }
    }
    fn open(&self) -> impl Fn(Errno) -> CopyError + '_ {
        |source| CopyError::Open {
            path: self.from.clone(),
            source,
        }
    }
    fn read(&self) -> impl Fn(Errno) -> CopyError + '_ {
        |source| CopyError::Read {
            path: self.from.clone(),
            source,
        }
    }
    fn write(&self) -> impl Fn(Errno) -> CopyError + '_ {
        |source| CopyError::Write {
            name: self.to.clone(),
            source,
        }
    }
    fn create(&self) -> impl Fn(Errno) -> CopyError + '_ {
        |source| match source {
            Errno::EXIST => CopyError::Exists {
                name: self.to.clone(),
            },
            source => CopyError::Create {
                name: self.to.clone(),
                source,
            },
        }
    }
}

/// One directory being copied.
struct Level {
    entries: Dir,
    from: OwnedFd,
    to: OwnedFd,
    at: Place,
}

struct Copy<'a> {
    owner: Option<(Uid, Gid)>,
    budget: &'a mut Budget,
    copied: Copied,
    workspace: (u64, u64),
    buffer: Vec<u8>,
}

impl Copy<'_> {
    fn make_parents(
        &mut self,
        workspace: BorrowedFd<'_>,
        parts: &[CString],
        at: &Place,
    ) -> Result<Option<OwnedFd>, CopyError> {
        let mut parent: Option<OwnedFd> = None;
        for part in parts {
            let dir = parent.as_ref().map_or(workspace, |p| p.as_fd());
            parent = Some(match open_made(dir, part) {
                Err(Errno::NOENT) => self.make_dir(dir, part, at)?,
                // A file or a link of an earlier input stands in the way.
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    return Err(CopyError::Exists {
                        name: at.to.clone(),
                    });
                }
                opened => opened.map_err(at.create())?,
            });
        }
        Ok(parent)
    }

    fn make_dir(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        at: &Place,
    ) -> Result<OwnedFd, CopyError> {
        self.charge_file(at)?;
        rustix::fs::mkdirat(parent, name, Mode::RWXU).map_err(at.create())?;
        let dir = open_made(parent, name).map_err(at.create())?;
        self.give(dir.as_fd(), Mode::RWXU, at)?;
        Ok(dir)
    }

    /// Owner first: changing it drops mode bits.
    fn give(&self, file: BorrowedFd<'_>, mode: Mode, at: &Place) -> Result<(), CopyError> {
        if let Some((uid, gid)) = self.owner {
            rustix::fs::fchown(file, Some(uid), Some(gid)).map_err(at.write())?;
        }
        rustix::fs::fchmod(file, mode).map_err(at.write())
    }

    fn tree(
        &mut self,
        from: OwnedFd,
        stat: Stat,
        parent: BorrowedFd<'_>,
        name: &CStr,
        at: &Place,
    ) -> Result<(), CopyError> {
        let mut levels = vec![self.enter(from, &stat, parent, name, at.clone())?];
        while let Some(level) = levels.last_mut() {
            let next = level.entries.next().transpose().map_err(level.at.read())?;
            let Some(entry) = next else {
                levels.pop();
                continue;
            };
            let depth = levels.len() - 1;
            let below = self.entry(&levels[depth], &entry, depth)?;
            levels.extend(below);
        }
        Ok(())
    }

    /// Copies one entry of a directory, or, if it is a directory itself, returns it to be walked.
    fn entry(
        &mut self,
        level: &Level,
        entry: &DirEntry,
        depth: usize,
    ) -> Result<Option<Level>, CopyError> {
        let (from, to, name) = (level.from.as_fd(), level.to.as_fd(), entry.file_name());
        if name == c"." || name == c".." {
            return Ok(None);
        }
        let at = level.at.join(OsStr::from_bytes(name.to_bytes()));
        let opened = match entry.file_type() {
            FileType::Symlink => Err(Errno::LOOP),
            FileType::Unknown => open_entry(from, name),
            // Opening some devices does something, so what is known to be one stays closed.
            kind => check_kind(kind, &at.from).map(|()| open_entry(from, name))?,
        };
        let (file, stat) = match opened {
            Err(Errno::LOOP) => return self.link(from, to, name, depth, &at).map(|()| None),
            opened => opened.map_err(at.open())?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if depth + 1 >= DEPTH_MAX => {
                Err(CopyError::TooDeep { path: at.from })
            }
            FileType::Directory => self.enter(file, &stat, to, name, at).map(Some),
            _ => self.file(file.as_fd(), &stat, to, name, &at).map(|()| None),
        }
    }

    fn enter(
        &mut self,
        from: OwnedFd,
        stat: &Stat,
        parent: BorrowedFd<'_>,
        name: &CStr,
        at: Place,
    ) -> Result<Level, CopyError> {
        // Copying the workspace into itself would end only with the budget.
        if (stat.st_dev, stat.st_ino) == self.workspace {
            return Err(CopyError::ContainsWorkspace { path: at.from });
        }
        let to = self.make_dir(parent, name, &at)?;
        let entries = Dir::read_from(&from).map_err(at.read())?;
        Ok(Level {
            entries,
            from,
            to,
            at,
        })
    }

    /// Copies a symlink, `depth` directories below the copied one, if it stays inside.
    fn link(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        name: &CStr,
        depth: usize,
        at: &Place,
    ) -> Result<(), CopyError> {
        let target = rustix::fs::readlinkat(from, name, Vec::new()).map_err(at.read())?;
        if !stays_inside(Path::new(OsStr::from_bytes(target.as_bytes())), depth) {
            let target = PathBuf::from(OsStr::from_bytes(target.as_bytes()));
            return Err(CopyError::LinkLeadsOut {
                path: at.from.clone(),
                target,
            });
        }
        self.charge_file(at)?;
        rustix::fs::symlinkat(&target, to, name).map_err(at.create())?;
        if let Some((uid, gid)) = self.owner {
            rustix::fs::chownat(to, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                .map_err(at.write())?;
        }
        Ok(())
    }

    fn file(
        &mut self,
        from: BorrowedFd<'_>,
        stat: &Stat,
        parent: BorrowedFd<'_>,
        name: &CStr,
        at: &Place,
    ) -> Result<(), CopyError> {
        check_kind(FileType::from_raw_mode(stat.st_mode), &at.from)?;
        self.charge_file(at)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let to =
            rustix::fs::openat(parent, name, flags | OFlags::CLOEXEC, mode).map_err(at.create())?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.content(from, to.as_fd(), size, at)?;
        // A file that shrank meanwhile ends where it now ends, and is not padded with zeros.
        let now = rustix::fs::fstat(from).map_err(at.read())?;
        let size = size.min(u64::try_from(now.st_size).unwrap_or(0));
        rustix::fs::ftruncate(&to, size).map_err(at.write())?;
        // Executable or not is all that is kept of the mode: set-id bits and other people's
        // permissions have no business in the workspace.
        let mode = match stat.st_mode & 0o111 {
            0 => mode,
            _ => mode | Mode::XUSR,
        };
        self.give(to.as_fd(), mode, at)
    }

    /// Copies the data among the first `size` bytes; holes stay holes.
    fn content(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        size: u64,
        at: &Place,
    ) -> Result<(), CopyError> {
        // A clone shares the blocks, but they count: writing to them would use them up.
        if size <= self.budget.bytes && rustix::fs::ioctl_ficlone(to, from).is_ok() {
            return self.charge_bytes(size, at);
        }
        let mut offset = 0;
        while offset < size {
            let Some((start, end)) = next_data(from, offset, size).map_err(at.read())? else {
                break;
            };
            offset = start;
            while offset < end {
                let step = STEP_BYTES.min(end - offset);
                self.charge_bytes(step, at)?;
                let done = self.range(from, to, offset, step, at)?;
                offset += done;
                if done < step {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Copies up to `length` bytes at `offset`; fewer only if the file has ended.
    fn range(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        at: &Place,
    ) -> Result<u64, CopyError> {
        let mut done = 0;
        while done < length {
            let (mut off_in, mut off_out) = (offset + done, offset + done);
            let left = usize::try_from(length - done).unwrap_or(BUFFER_BYTES);
            let copied =
                rustix::fs::copy_file_range(from, Some(&mut off_in), to, Some(&mut off_out), left);
            match copied {
                // Some file systems answer 0 where a read would give data: the read decides.
                Ok(0) => break,
                Ok(n) => done += n as u64,
                Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
                    return copied.map(|_| 0).map_err(at.write());
                }
                Err(_) => break,
            }
        }
        self.buffer.resize(BUFFER_BYTES, 0);
        while done < length {
            let left = usize::try_from(length - done)
                .unwrap_or(BUFFER_BYTES)
                .min(BUFFER_BYTES);
            let got = rustix::io::pread(from, &mut self.buffer[..left], offset + done)
                .map_err(at.read())?;
            if got == 0 {
                break;
            }
            write_all(to, &self.buffer[..got], offset + done).map_err(at.write())?;
            done += got as u64;
        }
        Ok(done)
    }

    fn charge_file(&mut self, at: &Place) -> Result<(), CopyError> {
        match self.budget.files.checked_sub(1) {
            None => Err(CopyError::TooManyFiles {
                path: at.from.clone(),
            }),
            Some(left) => {
                self.budget.files = left;
                self.copied.files += 1;
                Ok(())
            }
        }
    }

    fn charge_bytes(&mut self, bytes: u64, at: &Place) -> Result<(), CopyError> {
        match self.budget.bytes.checked_sub(bytes) {
            None => Err(CopyError::TooManyBytes {
                path: at.from.clone(),
            }),
            Some(left) => {
                self.budget.bytes = left;
                self.copied.bytes += bytes;
                Ok(())
            }
        }
    }
}

/// Opens a directory in the workspace, never through a link or into a mount.
fn open_made(parent: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), resolve)
}

/// Opens an entry of a source directory. Mounts in it are copied like the rest; links are not
/// followed, whatever they may have been swapped for.
pub(crate) fn open_entry(dir: BorrowedFd<'_>, name: &CStr) -> Result<(OwnedFd, Stat), Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let file = rustix::fs::openat2(dir, name, READ | OFlags::NOFOLLOW, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&file)?;
    Ok((file, stat))
}

/// The next stretch of data at or after `offset` and before `size`.
fn next_data(file: BorrowedFd<'_>, offset: u64, size: u64) -> Result<Option<(u64, u64)>, Errno> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // The file system knows nothing of holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((offset, size))),
        Err(e) => return Err(e),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))
        .unwrap_or(size)
        .min(size);
    Ok((start < end).then_some((start, end)))
}

fn write_all(file: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, offset) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(n) => {
                bytes = &bytes[n..];
                offset += n as u64;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};

    const PLENTY: Budget = Budget {
        bytes: 1 << 40,
        files: 1000,
    };

    struct Dirs {
        source: tempfile::TempDir,
        workspace: tempfile::TempDir,
    }

    impl Dirs {
        fn new() -> Self {
            Dirs {
                source: tempfile::tempdir().unwrap(),
                workspace: tempfile::tempdir().unwrap(),
            }
        }
        fn from(&self, name: &str) -> PathBuf {
            self.source.path().join(name)
        }
        fn to(&self, name: &str) -> PathBuf {
            self.workspace.path().join(name)
        }
        fn copy(&self, from: &str, name: &str) -> Result<Copied, CopyError> {
            self.copy_within(from, name, &mut PLENTY.clone())
        }
        fn copy_within(
            &self,
            from: &str,
            name: &str,
            budget: &mut Budget,
        ) -> Result<Copied, CopyError> {
            let workspace = File::open(self.workspace.path()).unwrap();
            copy_in(
                &self.from(from),
                workspace.as_fd(),
                Path::new(name),
                None,
                budget,
            )
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_file_keeps_its_content_and_whether_it_is_executable() {
        let dirs = Dirs::new();
        let content: Vec<u8> = (0..3_000_000u32).map(|n| n as u8).collect();
        for (name, bits, want) in [
            ("a", 0o444, 0o600),
            ("b", 0o6755, 0o700),
            ("c", 0o666, 0o600),
        ] {
            fs::write(dirs.from(name), &content).unwrap();
            fs::set_permissions(dirs.from(name), fs::Permissions::from_mode(bits)).unwrap();
            let copied = dirs.copy(name, name).unwrap();
            assert_eq!(
                copied,
                Copied {
                    files: 1,
                    bytes: 3_000_000
                }
            );
            assert_eq!(fs::read(dirs.to(name)).unwrap(), content);
            assert_eq!(mode(&dirs.to(name)), want);
        }
    }

    #[test]
    fn a_link_put_in_the_way_is_not_followed_and_names_may_have_directories() {
        let dirs = Dirs::new();
        fs::write(dirs.from("real"), "x").unwrap();
        symlink("real", dirs.from("link")).unwrap();
        assert!(matches!(
            dirs.copy("link", "linked"),
            Err(CopyError::Open { .. })
        ));
        assert_eq!(dirs.copy("real", "sub/deep/name").unwrap().files, 3);
        assert!(
            fs::symlink_metadata(dirs.to("sub/deep/name"))
                .unwrap()
                .is_file()
        );
        dirs.copy("real", "sub/other").unwrap();
        assert_eq!(mode(&dirs.to("sub")), 0o700);
    }

    #[test]
    fn a_tree_keeps_links_that_stay_inside() {
        let dirs = Dirs::new();
        fs::create_dir_all(dirs.from("t/a/b")).unwrap();
        fs::write(dirs.from("t/a/b/f"), "x").unwrap();
        symlink("../../top", dirs.from("t/a/b/up")).unwrap();
        symlink("a/b", dirs.from("t/down")).unwrap();
        let copied = dirs.copy("t", "t").unwrap();
        assert_eq!(copied, Copied { files: 6, bytes: 1 });
        assert_eq!(
            fs::read_link(dirs.to("t/a/b/up")).unwrap(),
            Path::new("../../top")
        );
        assert_eq!(fs::read(dirs.to("t/down/f")).unwrap(), b"x");
    }

    #[test]
    fn links_that_lead_out_are_refused_by_name() {
        for target in [
            "/etc/passwd",
            "..",
            "../x",
            "a/../../x",
            "a/..",
            "a/b/../../../x",
        ] {
            let dirs = Dirs::new();
            fs::create_dir_all(dirs.from("t/a")).unwrap();
            symlink(target, dirs.from("t/evil")).unwrap();
            let error = dirs.copy("t", "t").unwrap_err();
            let text = error.to_string();
            assert!(
                matches!(error, CopyError::LinkLeadsOut { .. }),
                "{target}: {text}"
            );
            assert!(text.contains("t/evil") && text.contains("--read"), "{text}");
        }
    }

    #[test]
    fn special_files_are_refused_without_waiting_for_them() {
        let dirs = Dirs::new();
        fs::create_dir(dirs.from("t")).unwrap();
        let dir = File::open(dirs.from("t")).unwrap();
        rustix::fs::mknodat(&dir, "fifo", FileType::Fifo, Mode::RUSR, 0).unwrap();
        for name in ["t", "t/fifo"] {
            let error = dirs.copy(name, "x").unwrap_err();
            assert!(
                matches!(error, CopyError::Special { kind: "a FIFO", .. }),
                "{error:?}"
            );
            let _ = fs::remove_dir_all(dirs.to("x"));
        }
        let workspace = File::open(dirs.workspace.path()).unwrap();
        let mut budget = PLENTY;
        let zero = copy_in(
            Path::new("/dev/zero"),
            workspace.as_fd(),
            Path::new("z"),
            None,
            &mut budget,
        );
        assert!(
            matches!(
                zero,
                Err(CopyError::Special {
                    kind: "a device",
                    ..
                })
            ),
            "{zero:?}"
        );
    }

    #[test]
    fn names_are_checked() {
        let dirs = Dirs::new();
        fs::write(dirs.from("f"), "x").unwrap();
        for name in ["", "/abs", "../f", "a/../../f", ".", "a\0b"] {
            let error = dirs.copy("f", name).unwrap_err();
            assert!(
                matches!(error, CopyError::Name(InputNameError::BadName { .. })),
                "{name:?}: {error:?}"
            );
        }
        for name in ["data", "docs/x", ".fumehood", "./data"] {
            let error = dirs.copy("f", name).unwrap_err();
            let refused = matches!(
                error,
                CopyError::Name(InputNameError::Reserved { .. } | InputNameError::BadName { .. })
            );
            assert!(refused, "{name:?}: {error:?}");
        }
    }

    #[test]
    fn what_is_there_already_is_neither_replaced_nor_gone_through() {
        let dirs = Dirs::new();
        fs::write(dirs.from("f"), "new").unwrap();
        fs::write(dirs.to("old"), "old").unwrap();
        symlink(dirs.source.path(), dirs.to("link")).unwrap();
        for name in ["old", "link", "link/planted", "old/x"] {
            let error = dirs.copy("f", name).unwrap_err();
            assert!(
                matches!(error, CopyError::Exists { .. }),
                "{name}: {error:?}"
            );
        }
        assert_eq!(fs::read(dirs.to("old")).unwrap(), b"old");
        assert!(!dirs.from("planted").exists());
    }

    #[test]
    fn the_budget_holds_and_names_the_option() {
        let dirs = Dirs::new();
        fs::create_dir(dirs.from("t")).unwrap();
        for n in 0..10 {
            fs::write(dirs.from(&format!("t/{n}")), vec![1; 1000]).unwrap();
        }
        let error = dirs
            .copy_within(
                "t",
                "a",
                &mut Budget {
                    bytes: 5500,
                    files: 100,
                },
            )
            .unwrap_err();
        assert!(error.to_string().contains("--disk"), "{error}");
        let error = dirs
            .copy_within(
                "t",
                "b",
                &mut Budget {
                    bytes: 1 << 20,
                    files: 5,
                },
            )
            .unwrap_err();
        assert!(error.to_string().contains("--files"), "{error}");
        let mut budget = Budget {
            bytes: 10_000,
            files: 11,
        };
        dirs.copy_within("t", "c", &mut budget).unwrap();
        assert_eq!(budget, Budget { bytes: 0, files: 0 });
    }

    #[test]
    fn holes_stay_holes() {
        let dirs = Dirs::new();
        let file = File::create(dirs.from("s")).unwrap();
        file.write_all_at(b"middle", 1 << 30).unwrap();
        file.set_len(1 << 34).unwrap();
        let copied = dirs.copy("s", "s").unwrap();
        let meta = fs::metadata(dirs.to("s")).unwrap();
        assert_eq!(meta.len(), 1 << 34);
        assert!(
            meta.blocks() * 512 < 1 << 20 && copied.bytes < 1 << 20,
            "{copied:?}"
        );
        let mut got = [0; 6];
        File::open(dirs.to("s"))
            .unwrap()
            .read_exact_at(&mut got, 1 << 30)
            .unwrap();
        assert_eq!(&got, b"middle");
    }

    #[test]
    fn across_file_systems_too() {
        let mut dirs = Dirs::new();
        dirs.workspace = tempfile::tempdir_in("/dev/shm").unwrap();
        let content: Vec<u8> = (0..1_000_003u32).map(|n| (n >> 3) as u8).collect();
        fs::write(dirs.from("f"), &content).unwrap();
        dirs.copy("f", "f").unwrap();
        assert_eq!(fs::read(dirs.to("f")).unwrap(), content);
    }

    #[test]
    fn the_workspace_is_not_copied_into_itself() {
        let dirs = Dirs::new();
        fs::create_dir(dirs.to("inner")).unwrap();
        let workspace = File::open(dirs.to("inner")).unwrap();
        let mut budget = PLENTY;
        let error = copy_in(
            dirs.workspace.path(),
            workspace.as_fd(),
            Path::new("x"),
            None,
            &mut budget,
        );
        assert!(
            matches!(error, Err(CopyError::ContainsWorkspace { .. })),
            "{error:?}"
        );
    }

    #[test]
    fn a_tree_that_is_too_deep_is_refused() {
        let dirs = Dirs::new();
        let deep: PathBuf = std::iter::repeat_n("d", DEPTH_MAX).collect();
        fs::create_dir_all(dirs.from("t").join(&deep)).unwrap();
        let error = dirs.copy("t", "t").unwrap_err();
        assert!(matches!(error, CopyError::TooDeep { .. }), "{error:?}");
        let most: PathBuf = std::iter::repeat_n("d", DEPTH_MAX - 1).collect();
        fs::create_dir_all(dirs.from("u").join(&most)).unwrap();
        dirs.copy("u", "u").unwrap();
    }

    #[test]
    fn everything_made_is_given_to_the_owner() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dirs = Dirs::new();
        fs::create_dir(dirs.from("t")).unwrap();
        fs::write(dirs.from("t/x.sh"), "x").unwrap();
        fs::set_permissions(dirs.from("t/x.sh"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("x.sh", dirs.from("t/l")).unwrap();
        let workspace = File::open(dirs.workspace.path()).unwrap();
        let (name, mut budget) = (Path::new("p/t"), PLENTY);
        copy_in(
            &dirs.from("t"),
            workspace.as_fd(),
            name,
            Some((54_321, 54_322)),
            &mut budget,
        )
        .unwrap();
        for name in ["p", "p/t", "p/t/x.sh", "p/t/l"] {
            let meta = fs::symlink_metadata(dirs.to(name)).unwrap();
            assert_eq!((meta.uid(), meta.gid()), (54_321, 54_322), "{name}");
        }
        assert_eq!(mode(&dirs.to("p/t/x.sh")), 0o700);
    }

    /// The file is swapped for a FIFO and back, and truncated and grown: the copy always comes
    /// back, with at most what the file had when it was opened.
    #[test]
    fn a_file_that_changes_meanwhile_does_not_hang_the_copy() {
        let dirs = Dirs::new();
        let dir = File::open(dirs.source.path()).unwrap();
        rustix::fs::mknodat(&dir, "g", FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let file = File::create(dirs.from("f")).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let flags = rustix::fs::RenameFlags::EXCHANGE;
                    let _ = rustix::fs::renameat_with(&dir, "f", &dir, "g", flags);
                    let _ = file.set_len(0);
                    let _ = file.write_all_at(&[7; 100_000], 0);
                }
            });
            for n in 0..300 {
                let copied = dirs.copy("f", &n.to_string());
                assert!(
                    matches!(copied, Ok(_) | Err(CopyError::Special { .. })),
                    "{copied:?}"
                );
                let length = fs::metadata(dirs.to(&n.to_string())).map_or(0, |m| m.len());
                assert!(length <= 100_000);
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}
