//! The programs that trials execute: the test program itself and the binary under test.
//!
//! A checkout below a home directory is closed to the test account. So the harness copies both programs to a directory
//! that any user can execute them from.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rustix::fs::{FlockOperation, flock};

/// The first argument of a test program that was started again for one trial.
const INNER: &str = "__inner_trial";

static BINARY: OnceLock<PathBuf> = OnceLock::new();

/// The name of the trial that this process was started again for.
pub fn inner_trial() -> Option<String> {
    let mut args = std::env::args().skip(1);
    (args.next()? == INNER).then(|| args.next().unwrap())
}

/// The arguments that make a test program run one trial in its own process.
pub fn inner_arguments(name: &str) -> [String; 2] {
    [INNER.to_owned(), name.to_owned()]
}

pub(crate) fn set_binary(path: &Path) {
    let _ = BINARY.set(path.to_path_buf());
}

/// The binary under test, at a path where the user of this process can execute it.
pub fn binary() -> PathBuf {
    let built = BINARY.get().expect("the harness was given a binary");
    let own = std::env::current_exe().unwrap();
    let copied = own.with_file_name(built.file_name().unwrap());
    // A trial of the test account runs in the copy of the test program, beside the copy of the binary.
    match inner_trial().is_some() && copied.exists() {
        true => copied,
        false => built.clone(),
    }
}

/// A directory with copies of this test program and of the binary under test that any user can execute.
///
/// The directory is named after the two files that were copied, so that all processes of one build share it.
pub fn executable_copies() -> &'static Path {
    struct Copies {
        dir: PathBuf,
        /// Held shared by every process that uses the directory.
        _lock: File,
    }
    static COPIES: OnceLock<Copies> = OnceLock::new();
    let copies = COPIES.get_or_init(|| {
        let mut programs = vec![std::env::current_exe().unwrap()];
        programs.extend(BINARY.get().cloned());
        let stem = format!("fumehood-tests-{}", file_name(&programs[0]));
        let version = programs.iter().map(|program| {
            let meta = fs::metadata(program).unwrap();
            format!("-{}-{}", meta.ino(), meta.mtime())
        });
        let dir = Path::new("/var/tmp").join(stem.clone() + &version.collect::<String>());
        loop {
            if !dir.exists() {
                remove_unused_copies(&stem);
                copy_programs(&programs, &dir);
            }
            let lock = File::open(&dir).unwrap();
            flock(&lock, FlockOperation::LockShared).unwrap();
            let meta = lock.metadata().unwrap();
            assert_eq!(
                meta.uid(),
                rustix::process::geteuid().as_raw(),
                "{}",
                dir.display()
            );
            // Another process may have removed the directory before the lock was held.
            if fs::metadata(&dir).is_ok_and(|now| now.ino() == meta.ino()) {
                return Copies { dir, _lock: lock };
            }
        }
    });
    &copies.dir
}

/// The copy of this test program in [`executable_copies`].
pub(crate) fn own_copy() -> PathBuf {
    executable_copies().join(file_name(&std::env::current_exe().unwrap()))
}

/// The name of a program, without the hash that cargo appends to the name of a test program.
fn file_name(program: &Path) -> String {
    let name = program.file_name().unwrap().to_str().unwrap();
    let is_hash = |text: &str| text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    match name.rsplit_once('-') {
        Some((stem, hash)) if is_hash(hash) => stem.to_owned(),
        _ => name.to_owned(),
    }
}

fn copy_programs(programs: &[PathBuf], dir: &Path) {
    let draft = tempfile::Builder::new()
        .prefix("fumehood-draft-")
        .tempdir_in(dir.parent().unwrap())
        .unwrap();
    for program in programs {
        // Another process copies: a descriptor of this process that is open for writing could be inherited by a child
        // that another thread forks just then, and nobody can execute the copy while the child has it.
        let copied = Command::new("cp")
            .arg(program)
            .arg(draft.path().join(file_name(program)))
            .status();
        assert!(copied.unwrap().success());
    }
    fs::set_permissions(draft.path(), Permissions::from_mode(0o755)).unwrap();
    // Fails if another process has made the same directory first.
    if fs::rename(draft.path(), dir).is_ok() {
        let _ = draft.keep();
    }
}

/// Removes the copies of older builds of this test program that no process uses.
fn remove_unused_copies(stem: &str) {
    for entry in fs::read_dir("/var/tmp").unwrap().flatten() {
        let name = entry.file_name();
        let is_older = name
            .to_str()
            .and_then(|n| n.strip_prefix(stem)?.strip_prefix('-'));
        if !is_older.is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit() || b == b'-')) {
            continue;
        }
        let Ok(dir) = File::open(entry.path()) else {
            continue;
        };
        if flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
