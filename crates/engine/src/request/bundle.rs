//! The files that travel with a submission: [`Bundle`] reads them where the submission is made, `lay_out` writes
//! them where it runs.
//!
//! Reading follows the rules of `workspace/copy_in/source.rs`: open each file once, do not follow links, and judge the
//! file by its descriptor. Whoever can write to the database controls what `lay_out` gets. Therefore `lay_out` checks
//! all names again, creates each file exclusively, and accepts content only if its hash matches.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Stat, Statx};
use rustix::io::Errno;

use crate::workspace::copy_in::CopyError;
use crate::workspace::copy_in::source::{SourcePath, SourceVisitor, open_source, visit_source};
use store::types::input_name::{self, InputNameError};
use store::types::manifest::ContentHash;
use store::types::submission::{
    INPUT_BYTES_MAX, INPUT_FILES_MAX, InputItem, Submission, SubmissionError,
};

/// Names in the directory in which a submission is laid out: the directory of inputs, and the file that becomes
/// standard input.
pub(crate) const INPUTS: &str = "inputs";
pub(crate) const STDIN: &str = "stdin";

/// The most bytes in one [`ContentPool`], which holds the content of a whole batch of submissions.
pub(crate) const POOL_BYTES_MAX: u64 = 1 << 30;

/// Why a submission's files cannot be read, or cannot be laid out.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum BundleError {
    /// A file cannot be read, or may not be an input.
    #[error("input")]
    Copy(#[from] CopyError),
    /// The name of an input in the workspace is not allowed.
    #[error("input")]
    Name(#[from] InputNameError),
    /// With this file, one submission would have more bytes than it may.
    #[error(
        "the inputs are more than {} with {path:?}, and all of them travel with a submission; show large data with --read or --data instead",
        store::types::units::format_size(INPUT_BYTES_MAX)
    )]
    TooManyBytes { path: PathBuf },
    /// With this file, one submission would have more files and directories than it may.
    #[error(
        "the inputs are more than {INPUT_FILES_MAX} files with {path:?}, and all of them travel with a submission; show large data with --read or --data instead"
    )]
    TooManyFiles { path: PathBuf },
    /// With this file, the submissions of one batch would have more bytes together than they may.
    #[error(
        "the inputs of all lines together are more than {} with {path:?}; submit the batch in parts, or show large data with --read or --data",
        store::types::units::format_size(POOL_BYTES_MAX)
    )]
    PoolFull { path: PathBuf },
    /// A name in this input, or the target of a symlink, is not UTF-8.
    #[error("input {path:?}: its name is not UTF-8 text, which a submission must be")]
    NotText { path: PathBuf },
    /// Two inputs have this name in the workspace, or one of them lies below the other, which is not a directory.
    #[error("{name:?} is among the inputs already; give another name with --input PATH:NAME")]
    DuplicateName { name: PathBuf },
    /// Read standard input.
    #[error("read standard input for the submission")]
    Stdin(#[source] std::io::Error),
    /// The submission breaks a rule for submissions.
    #[error(transparent)]
    Submission(#[from] SubmissionError),
    /// Fetch the content with this hash.
    #[error("fetch the content {hash} of the submission")]
    Fetch {
        hash: ContentHash,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The database does not have the content with this hash.
    #[error("the content {hash} of the submission is not in the database")]
    ContentMissing { hash: ContentHash },
    /// The database has other content under this hash.
    #[error("the content {hash} of the submission does not match its hash in the database")]
    ContentMismatch { hash: ContentHash },
    /// Create or write this file of the submission.
    #[error("lay out {name:?} of the submission")]
    LayOut {
        name: PathBuf,
        #[source]
        source: Errno,
    },
}

/// File contents by hash. Submissions with the same content share one copy.
#[derive(Default)]
pub struct ContentPool {
    contents: HashMap<ContentHash, Arc<Vec<u8>>>,
    bytes: u64,
}

impl ContentPool {
    /// Returns the content with this hash, or `None` if the pool does not have it.
    pub fn get(&self, hash: &ContentHash) -> Option<Arc<Vec<u8>>> {
        self.contents.get(hash).cloned()
    }

    fn insert(&mut self, content: Vec<u8>, path: &Path) -> Result<ContentHash, BundleError> {
        let hash = ContentHash::of(&content);
        if !self.contents.contains_key(&hash) {
            self.bytes += content.len() as u64;
            if self.bytes > POOL_BYTES_MAX {
                return Err(BundleError::PoolFull {
                    path: path.to_path_buf(),
                });
            }
            self.contents.insert(hash, Arc::new(content));
        }
        Ok(hash)
    }
}

/// The files of one submission.
#[derive(Default)]
pub struct Bundle {
    /// The files, directories and symlinks. A directory precedes what it contains.
    pub items: Vec<InputItem>,
    /// The hash of the content of standard input. `None`: standard input is empty.
    pub stdin: Option<ContentHash>,
    names: HashSet<PathBuf>,
    bytes: u64,
}

impl Bundle {
    /// Adds the file or directory `source`, a path without symlinks, as `name` in the workspace. Also adds the parent
    /// directories of `name`, before it.
    pub fn add(
        &mut self,
        source: &Path,
        name: &Path,
        pool: &mut ContentPool,
    ) -> Result<(), BundleError> {
        let name = input_name::name_for(source, Some(name))?;
        let opened = open_source(source)?;
        self.add_parents(source, &name)?;
        let at = SourcePath {
            from: source.to_path_buf(),
            to: name,
        };
        visit_source(opened, at, &mut BundledSource { bundle: self, pool })
    }

    /// Adds everything that can be read from `from` as standard input.
    pub fn add_stdin(
        &mut self,
        from: impl Read,
        pool: &mut ContentPool,
    ) -> Result<(), BundleError> {
        let path = Path::new("the standard input");
        let content = self.read_content(from, path, BundleError::Stdin)?;
        self.stdin = Some(pool.insert(content, path)?);
        Ok(())
    }

    /// Adds a file, given by a path without symlinks, as standard input.
    pub fn add_stdin_file(
        &mut self,
        path: &Path,
        pool: &mut ContentPool,
    ) -> Result<(), BundleError> {
        let (file, stat) = open_source(path)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let path = path.to_path_buf();
            let source = Errno::ISDIR;
            return Err(CopyError::Read { path, source }.into());
        }
        self.add_stdin(File::from(file), pool)
    }

    /// All contents of the bundle, without duplicates.
    pub fn contents(&self, pool: &ContentPool) -> Vec<(ContentHash, Arc<Vec<u8>>)> {
        let mut seen = HashSet::new();
        let files = self.items.iter().filter_map(|item| match item {
            InputItem::File { blake3, .. } => Some(*blake3),
            _ => None,
        });
        files
            .chain(self.stdin)
            .filter(|hash| seen.insert(*hash))
            .filter_map(|hash| Some((hash, pool.get(&hash)?)))
            .collect()
    }

    fn add_parents(&mut self, source: &Path, name: &Path) -> Result<(), BundleError> {
        let mut above: Vec<&Path> = name.ancestors().skip(1).collect();
        above.retain(|parent| !parent.as_os_str().is_empty());
        for parent in above.into_iter().rev() {
            if self.names.contains(parent) {
                let made = |item: &InputItem| matches!(item, InputItem::Directory { name } if name == parent);
                if !self.items.iter().any(made) {
                    return Err(BundleError::DuplicateName {
                        name: parent.to_path_buf(),
                    });
                }
                continue;
            }
            self.push_item(
                InputItem::Directory {
                    name: parent.to_path_buf(),
                },
                source,
            )?;
        }
        Ok(())
    }

    fn push_item(&mut self, item: InputItem, path: &Path) -> Result<(), BundleError> {
        let name = item.name().to_path_buf();
        if name.to_str().is_none() {
            return Err(BundleError::NotText {
                path: path.to_path_buf(),
            });
        }
        if self.items.len() >= INPUT_FILES_MAX {
            return Err(BundleError::TooManyFiles {
                path: path.to_path_buf(),
            });
        }
        if !self.names.insert(name.clone()) {
            return Err(BundleError::DuplicateName { name });
        }
        self.items.push(item);
        Ok(())
    }

    /// Reads a whole file. A file may grow meanwhile, so the bound applies to the bytes read and not to the size that
    /// fstat reported.
    fn read_content(
        &mut self,
        from: impl Read,
        path: &Path,
        failed: impl FnOnce(std::io::Error) -> BundleError,
    ) -> Result<Vec<u8>, BundleError> {
        let bytes_left = INPUT_BYTES_MAX - self.bytes;
        let mut content = Vec::new();
        if let Err(e) = from.take(bytes_left + 1).read_to_end(&mut content) {
            return Err(failed(e));
        }
        if content.len() as u64 > bytes_left {
            return Err(BundleError::TooManyBytes {
                path: path.to_path_buf(),
            });
        }
        self.bytes += content.len() as u64;
        Ok(content)
    }
}

/// A source that is being added to a bundle.
struct BundledSource<'a> {
    bundle: &'a mut Bundle,
    pool: &'a mut ContentPool,
}

impl SourceVisitor for BundledSource<'_> {
    type Error = BundleError;

    fn enter_directory(&mut self, _: &Statx, at: &SourcePath) -> Result<(), BundleError> {
        let name = at.to.clone();
        self.bundle
            .push_item(InputItem::Directory { name }, &at.from)
    }

    fn visit_file(
        &mut self,
        file: OwnedFd,
        stat: &Stat,
        at: &SourcePath,
    ) -> Result<(), BundleError> {
        let path = &at.from;
        let failed = |source: std::io::Error| {
            let source = Errno::from_io_error(&source).unwrap_or(Errno::IO);
            let path = path.clone();
            BundleError::Copy(CopyError::Read { path, source })
        };
        let content = self.bundle.read_content(File::from(file), path, failed)?;
        let item = InputItem::File {
            name: at.to.clone(),
            blake3: self.pool.insert(content, path)?,
            executable: stat.st_mode & 0o111 != 0,
        };
        self.bundle.push_item(item, path)
    }

    fn visit_link(&mut self, target: PathBuf, at: &SourcePath) -> Result<(), BundleError> {
        if target.to_str().is_none() {
            let path = at.from.clone();
            return Err(BundleError::NotText { path });
        }
        let name = at.to.clone();
        self.bundle
            .push_item(InputItem::Link { name, target }, &at.from)
    }
}

/// Fetches content by its hash; `None` if there is no such content.
pub(crate) type FetchContent<'a> =
    dyn FnMut(&ContentHash) -> Result<Option<Vec<u8>>, Box<dyn Error + Send + Sync>> + 'a;

/// Writes a submission's files to `staged`, an empty directory that nobody else can reach: inputs below [`INPUTS`],
/// standard input as [`STDIN`]. On failure part of the files remain; the caller removes the directory.
pub(crate) fn lay_out(
    submission: &Submission,
    staged: BorrowedFd<'_>,
    fetch: &mut FetchContent<'_>,
) -> Result<(), BundleError> {
    submission.check()?;
    let mut content = ContentFetcher {
        fetch,
        last: None,
        bytes_left: INPUT_BYTES_MAX,
    };
    let failed = |name: &Path| {
        let name = name.to_path_buf();
        move |source| BundleError::LayOut { name, source }
    };
    let inputs = Path::new(INPUTS);
    rustix::fs::mkdirat(staged, inputs, Mode::RWXU).map_err(failed(inputs))?;
    let top = open_directory(staged, inputs).map_err(failed(inputs))?;
    for item in &submission.inputs {
        let name = item.name();
        let (Some(last), parent) = (name.file_name(), name.parent().unwrap_or(Path::new("")))
        else {
            return Err(failed(name)(Errno::INVAL));
        };
        let parent = match parent.as_os_str().is_empty() {
            true => None,
            false => Some(open_directory(top.as_fd(), parent).map_err(failed(name))?),
        };
        let parent = parent.as_ref().map_or(top.as_fd(), |dir| dir.as_fd());
        match item {
            InputItem::Directory { .. } => rustix::fs::mkdirat(parent, last, Mode::RWXU),
            InputItem::Link { target, .. } => rustix::fs::symlinkat(target, parent, last),
            InputItem::File {
                blake3, executable, ..
            } => make_file(parent, last, content.get(blake3, name)?, *executable),
        }
        .map_err(failed(name))?;
    }
    if let Some(hash) = &submission.stdin {
        let name = Path::new(STDIN);
        make_file(staged, name.as_os_str(), content.get(hash, name)?, false)
            .map_err(failed(name))?;
    }
    Ok(())
}

/// Fetches contents on demand. Keeps the last content, because many files of a submission may be the same.
struct ContentFetcher<'a, 'f> {
    fetch: &'a mut FetchContent<'f>,
    last: Option<(ContentHash, Vec<u8>)>,
    bytes_left: u64,
}

impl ContentFetcher<'_, '_> {
    fn get(&mut self, hash: &ContentHash, name: &Path) -> Result<&[u8], BundleError> {
        let kept = self.last.take().filter(|(last, _)| last == hash);
        let content = match kept {
            Some((_, content)) => content,
            None => {
                let fetched = (self.fetch)(hash).map_err(|source| BundleError::Fetch {
                    hash: *hash,
                    source,
                })?;
                let content = fetched.ok_or(BundleError::ContentMissing { hash: *hash })?;
                if ContentHash::of(&content) != *hash {
                    return Err(BundleError::ContentMismatch { hash: *hash });
                }
                content
            }
        };
        // Each file uses disk space of its own, even if files share their content in the database.
        self.bytes_left = self
            .bytes_left
            .checked_sub(content.len() as u64)
            .ok_or_else(|| BundleError::TooManyBytes {
                path: name.to_path_buf(),
            })?;
        Ok(&self.last.insert((*hash, content)).1)
    }
}

fn open_directory(at: BorrowedFd<'_>, path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(at, path, flags, Mode::empty(), resolve)
}

fn make_file(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    content: &[u8],
    executable: bool,
) -> rustix::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = match executable {
        true => Mode::RWXU,
        false => Mode::RUSR | Mode::WUSR,
    };
    let file = rustix::fs::openat(parent, name, flags, mode)?;
    // The umask may have cleared bits.
    rustix::fs::fchmod(&file, mode)?;
    File::from(file)
        .write_all(content)
        .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use store::types::analysis_id::AnalysisId;
    use store::types::submission::{SubmittedCommand, VERSION};

    fn submission(bundle: &Bundle) -> Submission {
        Submission {
            version: VERSION,
            id: AnalysisId::new("x").unwrap(),
            command: SubmittedCommand::Argv(vec!["true".into()]),
            settings: BTreeMap::new(),
            inputs: bundle.items.clone(),
            stdin: bundle.stdin,
        }
    }

    fn lay_out_in(
        submission: &Submission,
        contents: &[(ContentHash, Vec<u8>)],
        to: &Path,
    ) -> Result<(), BundleError> {
        let dir = fs::File::open(to).unwrap();
        lay_out(submission, dir.as_fd(), &mut |hash| {
            let found = contents.iter().find(|(known, _)| known == hash);
            Ok(found.map(|(_, content)| content.clone()))
        })
    }

    fn owned_contents(bundle: &Bundle, pool: &ContentPool) -> Vec<(ContentHash, Vec<u8>)> {
        let contents = bundle.contents(pool).into_iter();
        contents
            .map(|(hash, content)| (hash, content.to_vec()))
            .collect()
    }

    #[test]
    fn submitted_files_are_laid_out_as_read() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let source = dir.join("source");
        fs::create_dir_all(source.join("sub")).unwrap();
        fs::write(source.join("sub/tool"), "#!/bin/sh\n").unwrap();
        fs::set_permissions(source.join("sub/tool"), fs::Permissions::from_mode(0o6755)).unwrap();
        fs::write(source.join("text"), "one").unwrap();
        symlink("sub/tool", source.join("link")).unwrap();
        let (mut bundle, mut pool) = (Bundle::default(), ContentPool::default());
        bundle.add(&source, Path::new("a/b"), &mut pool).unwrap();
        bundle
            .add(&source.join("text"), Path::new("a/c"), &mut pool)
            .unwrap();
        bundle.add_stdin(&b"one"[..], &mut pool).unwrap();
        assert_eq!(
            bundle.contents(&pool).len(),
            2,
            "the same content is there once"
        );
        // A later change of the source does not matter.
        fs::write(source.join("text"), "two").unwrap();
        let staged = dir.join("staged");
        fs::create_dir(&staged).unwrap();
        lay_out_in(
            &submission(&bundle),
            &owned_contents(&bundle, &pool),
            &staged,
        )
        .unwrap();
        let read = |name: &str| fs::read_to_string(staged.join(name)).unwrap();
        assert_eq!(read("inputs/a/b/text"), "one");
        assert_eq!(read("inputs/a/c"), "one");
        assert_eq!(read("stdin"), "one");
        let mode = |name: &str| {
            fs::metadata(staged.join(name))
                .unwrap()
                .permissions()
                .mode()
                & 0o7777
        };
        assert_eq!(mode("inputs/a/b/sub/tool"), 0o700, "no set-user-id bit");
        assert_eq!(mode("inputs/a/b/text"), 0o600);
        assert_eq!(
            fs::read_link(staged.join("inputs/a/b/link")).unwrap(),
            Path::new("sub/tool")
        );
        // The names exist now, so laying out again fails.
        assert!(
            lay_out_in(
                &submission(&bundle),
                &owned_contents(&bundle, &pool),
                &staged
            )
            .is_err()
        );
    }

    #[test]
    fn files_that_cannot_be_submitted_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let add = |source: &Path, name: &str| {
            let (mut bundle, mut pool) = (Bundle::default(), ContentPool::default());
            bundle.add(source, Path::new(name), &mut pool)
        };
        let tree = dir.join("tree");
        fs::create_dir(&tree).unwrap();
        add(&tree, "t").unwrap();
        symlink("/etc/passwd", tree.join("l")).unwrap();
        assert!(matches!(
            add(&tree, "t"),
            Err(BundleError::Copy(CopyError::LinkLeadsOut { .. }))
        ));
        assert!(add(&tree.join("l"), "t").is_err(), "a link is not followed");
        fs::remove_file(tree.join("l")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, tree.join("p"), Mode::RWXU).unwrap();
        assert!(matches!(
            add(&tree, "t"),
            Err(BundleError::Copy(CopyError::Special { .. }))
        ));
        fs::remove_file(tree.join("p")).unwrap();
        fs::write(tree.join(OsStr::from_bytes(b"\xff")), "").unwrap();
        assert!(matches!(add(&tree, "t"), Err(BundleError::NotText { .. })));
        for name in ["data", "../x", "/x", ""] {
            assert!(add(&dir, name).is_err(), "{name:?}");
        }
        let large = fs::File::create(dir.join("large")).unwrap();
        large.set_len(INPUT_BYTES_MAX).unwrap();
        add(&dir.join("large"), "x").unwrap();
        large.set_len(INPUT_BYTES_MAX + 1).unwrap();
        assert!(matches!(
            add(&dir.join("large"), "x"),
            Err(BundleError::TooManyBytes { .. })
        ));
        let (mut bundle, mut pool) = (Bundle::default(), ContentPool::default());
        fs::write(dir.join("f"), "").unwrap();
        bundle
            .add(&dir.join("f"), Path::new("f"), &mut pool)
            .unwrap();
        let again = bundle.add(&dir.join("f"), Path::new("f"), &mut pool);
        assert!(matches!(again, Err(BundleError::DuplicateName { .. })));
        let below = bundle.add(&dir.join("f"), Path::new("f/g"), &mut pool);
        assert!(matches!(below, Err(BundleError::DuplicateName { .. })));
    }

    #[test]
    fn a_hostile_database_writes_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let fresh = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir(&path).unwrap();
            path
        };
        let (hash, other) = (ContentHash::of(b"good"), ContentHash::of(b"other"));
        let file = |name: &str, blake3| InputItem::File {
            name: name.into(),
            blake3,
            executable: false,
        };
        let with = |inputs: Vec<InputItem>| {
            let mut submission = submission(&Bundle::default());
            submission.inputs = inputs;
            submission
        };
        let good = vec![(hash, b"good".to_vec())];
        lay_out_in(&with(vec![file("a", hash)]), &good, &fresh("good")).unwrap();
        let gone = lay_out_in(&with(vec![file("a", other)]), &good, &fresh("gone"));
        assert!(matches!(gone, Err(BundleError::ContentMissing { .. })));
        let damaged = lay_out_in(
            &with(vec![file("a", hash)]),
            &[(hash, b"evil".to_vec())],
            &fresh("damaged"),
        );
        assert!(matches!(damaged, Err(BundleError::ContentMismatch { .. })));
        let escape = lay_out_in(&with(vec![file("../../x", hash)]), &good, &fresh("escape"));
        assert!(matches!(escape, Err(BundleError::Submission(_))));
        assert!(!dir.path().join("x").exists());
        // One content under many names counts once per name.
        let large = vec![7u8; (INPUT_BYTES_MAX / 4) as usize];
        let hash = ContentHash::of(&large);
        let many = (0..5).map(|n| file(&format!("f{n}"), hash)).collect();
        let bomb = lay_out_in(&with(many), &[(hash, large)], &fresh("bomb"));
        assert!(matches!(bomb, Err(BundleError::TooManyBytes { .. })));
    }
}
