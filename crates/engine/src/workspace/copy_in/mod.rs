//! `--input PATH[:NAME]`: copies a file or a directory into the workspace.
//!
//! The source may be hostile; `source.rs` reads it. In the workspace each name is a single component below a held
//! descriptor and is created exclusively. On failure a partial copy remains; the caller removes the workspace.

pub(crate) mod source;

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, Stat, Statx};
use rustix::io::Errno;
use store::artifacts::files;
use store::types::input_name::{self, InputNameError, check_name};

use self::source::{SourcePath, SourceVisitor};
use super::set_owner;

/// The greatest depth of a copied directory. Copying holds one descriptor per level in the workspace, so this stays
/// well below the usual limit of 1024.
const DEPTH_MAX: usize = input_name::DEPTH_MAX;
/// Bytes per copy step. The budget is checked before each step.
const STEP_BYTES: u64 = 16 << 20;
const BUFFER_BYTES: usize = 256 * 1024;

/// What may still be copied. Copying reduces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyBudget {
    pub bytes: u64,
    /// Files, directories and symlinks.
    pub files: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyTotals {
    pub files: u64,
    /// Data written, without the holes of sparse files.
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

/// Copies `source`, a path without symlinks, to `name` in the workspace. Creates the parent directories of `name`.
/// Gives everything that it creates to `owner`.
pub fn copy_in(
    source: &Path,
    workspace: BorrowedFd<'_>,
    name: &Path,
    owner: Option<(u32, u32)>,
    budget: &mut CopyBudget,
) -> Result<CopyTotals, CopyError> {
    let parts = check_name(name)?;
    let top = rustix::fs::fstat(workspace).map_err(|source| CopyError::Create {
        name: name.to_path_buf(),
        source,
    })?;
    let mut copy = InputCopy {
        owner,
        budget,
        copied: CopyTotals::default(),
        workspace,
        workspace_inode: (top.st_dev, top.st_ino),
        directories: Vec::new(),
        buffer: Vec::new(),
    };
    let at = SourcePath {
        from: source.to_path_buf(),
        to: name.to_path_buf(),
    };
    let opened = source::open_source(source)?;
    let above = parts.split_last().map_or(&[][..], |(_, above)| above);
    for part in above {
        copy.enter_parent(part, &at)?;
    }
    source::visit_source(opened, at, &mut copy)?;
    Ok(copy.copied)
}

/// The errors of a copy, each with the path that it concerns.
impl SourcePath {
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
            Errno::EXIST => self.exists(),
            source => CopyError::Create {
                name: self.to.clone(),
                source,
            },
        }
    }

    fn exists(&self) -> CopyError {
        CopyError::Exists {
            name: self.to.clone(),
        }
    }

    /// The name of the copy in its directory.
    fn name(&self) -> &OsStr {
        self.to.file_name().unwrap_or_default()
    }
}

struct InputCopy<'a> {
    owner: Option<(u32, u32)>,
    budget: &'a mut CopyBudget,
    copied: CopyTotals,
    workspace: BorrowedFd<'a>,
    workspace_inode: (u64, u64),
    /// The directories from the workspace to the one that is being filled.
    directories: Vec<OwnedFd>,
    buffer: Vec<u8>,
}

impl SourceVisitor for InputCopy<'_> {
    type Error = CopyError;

    fn enter_directory(&mut self, stat: &Statx, at: &SourcePath) -> Result<(), CopyError> {
        let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
        // Copying the workspace into itself would end only when the budget is used up.
        if (device, stat.stx_ino) == self.workspace_inode {
            let path = at.from.clone();
            return Err(CopyError::ContainsWorkspace { path });
        }
        let dir = self.make_dir(at.name(), at)?;
        self.directories.push(dir);
        Ok(())
    }

    fn visit_file(&mut self, from: OwnedFd, stat: &Stat, at: &SourcePath) -> Result<(), CopyError> {
        self.charge_file(at)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let to = rustix::fs::openat(self.parent(), at.name(), flags | OFlags::CLOEXEC, mode)
            .map_err(at.create())?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.copy_content(from.as_fd(), to.as_fd(), size, at)?;
        // If the file shrank meanwhile, shorten the copy, so that it is not padded with zeros.
        let now = rustix::fs::fstat(&from).map_err(at.read())?;
        let size = size.min(u64::try_from(now.st_size).unwrap_or(0));
        rustix::fs::ftruncate(&to, size).map_err(at.write())?;
        // Keep only whether the file is executable. Set-id bits and permissions of other users do not belong in the
        // workspace.
        let mode = match stat.st_mode & 0o111 {
            0 => mode,
            _ => mode | Mode::XUSR,
        };
        self.set_owner_and_mode(to.as_fd(), mode, at)
    }

    fn visit_link(&mut self, target: PathBuf, at: &SourcePath) -> Result<(), CopyError> {
        self.charge_file(at)?;
        let (parent, name) = (self.parent(), at.name());
        rustix::fs::symlinkat(&target, parent, name).map_err(at.create())?;
        set_owner(parent, Path::new(name), self.owner).map_err(at.write())
    }

    fn leave_directory(&mut self) {
        self.directories.pop();
    }
}

impl InputCopy<'_> {
    fn parent(&self) -> BorrowedFd<'_> {
        self.directories
            .last()
            .map_or(self.workspace, |dir| dir.as_fd())
    }

    /// Opens a directory on the way to the copy, or makes it.
    fn enter_parent(&mut self, name: &CStr, at: &SourcePath) -> Result<(), CopyError> {
        let dir = match open_workspace_dir(self.parent(), name) {
            Err(Errno::NOENT) => self.make_dir(name, at)?,
            // An earlier input has put a file or a symlink there.
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(at.exists()),
            opened => opened.map_err(at.create())?,
        };
        self.directories.push(dir);
        Ok(())
    }

    fn make_dir(
        &mut self,
        name: impl rustix::path::Arg + Copy,
        at: &SourcePath,
    ) -> Result<OwnedFd, CopyError> {
        self.charge_file(at)?;
        rustix::fs::mkdirat(self.parent(), name, Mode::RWXU).map_err(at.create())?;
        let dir = open_workspace_dir(self.parent(), name).map_err(at.create())?;
        self.set_owner_and_mode(dir.as_fd(), Mode::RWXU, at)?;
        Ok(dir)
    }

    /// Sets the owner first, because changing the owner clears mode bits.
    fn set_owner_and_mode(
        &self,
        file: BorrowedFd<'_>,
        mode: Mode,
        at: &SourcePath,
    ) -> Result<(), CopyError> {
        set_owner(file, Path::new(""), self.owner).map_err(at.write())?;
        rustix::fs::fchmod(file, mode).map_err(at.write())
    }

    /// Copies the data of the first `size` bytes. Holes stay holes.
    fn copy_content(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        size: u64,
        at: &SourcePath,
    ) -> Result<(), CopyError> {
        // A clone shares the blocks but counts in full: writing to it would use up that space.
        if size <= self.budget.bytes && rustix::fs::ioctl_ficlone(to, from).is_ok() {
            return self.charge_bytes(size, at);
        }
        let mut offset = 0;
        while offset < size {
            let (start, end) = files::next_data(from, offset, size).map_err(at.read())?;
            offset = start;
            while offset < end {
                let step = STEP_BYTES.min(end - offset);
                self.charge_bytes(step, at)?;
                let done = self.copy_range(from, to, offset, step, at)?;
                offset += done;
                if done < step {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Copies up to `length` bytes at `offset`; fewer only if the file ends.
    fn copy_range(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        at: &SourcePath,
    ) -> Result<u64, CopyError> {
        let mut done = 0;
        while done < length {
            let (mut off_in, mut off_out) = (offset + done, offset + done);
            let left = usize::try_from(length - done).unwrap_or(BUFFER_BYTES);
            let copied =
                rustix::fs::copy_file_range(from, Some(&mut off_in), to, Some(&mut off_out), left);
            match copied {
                // Some file systems return 0 where a read would return data, so let the read below decide.
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
            files::write_all_at(to, &self.buffer[..got], offset + done).map_err(at.write())?;
            done += got as u64;
        }
        Ok(done)
    }

    fn charge_file(&mut self, at: &SourcePath) -> Result<(), CopyError> {
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

    fn charge_bytes(&mut self, bytes: u64, at: &SourcePath) -> Result<(), CopyError> {
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

/// Opens a directory in the workspace, without following a symlink or entering a mount.
fn open_workspace_dir(
    parent: BorrowedFd<'_>,
    name: impl rustix::path::Arg,
) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), resolve)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use rustix::fs::FileType;
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};

    const AMPLE_BUDGET: CopyBudget = CopyBudget {
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
        fn copy(&self, from: &str, name: &str) -> Result<CopyTotals, CopyError> {
            self.copy_within(from, name, &mut AMPLE_BUDGET.clone())
        }
        fn copy_within(
            &self,
            from: &str,
            name: &str,
            budget: &mut CopyBudget,
        ) -> Result<CopyTotals, CopyError> {
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
                CopyTotals {
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
        assert_eq!(copied, CopyTotals { files: 6, bytes: 1 });
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
        let mut budget = AMPLE_BUDGET;
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
    fn existing_entries_are_neither_replaced_nor_followed() {
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
                &mut CopyBudget {
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
                &mut CopyBudget {
                    bytes: 1 << 20,
                    files: 5,
                },
            )
            .unwrap_err();
        assert!(error.to_string().contains("--files"), "{error}");
        let mut budget = CopyBudget {
            bytes: 10_000,
            files: 11,
        };
        dirs.copy_within("t", "c", &mut budget).unwrap();
        assert_eq!(budget, CopyBudget { bytes: 0, files: 0 });
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
    fn files_are_copied_across_file_systems() {
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
        let mut budget = AMPLE_BUDGET;
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
        let (name, mut budget) = (Path::new("p/t"), AMPLE_BUDGET);
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

    /// The file is swapped with a FIFO, truncated and extended while it is copied. Each copy returns, with at most
    /// the bytes that the file had when it was opened.
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
