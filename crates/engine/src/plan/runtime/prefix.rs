//! What a runtime looks like on disk, and which directories are never shown as one.
//!
//! A directory is shown to an analysis because it is a runtime, never because something points at
//! it: the pointers (symlinks, `#!` lines, pyvenv.cfg, .python-version) may have been written by the very
//! code that is about to be confined. So the marks looked for here are ones that a directory
//! of documents, keys or data does not carry, and none of them is believed through a symlink
//! that leaves the directory.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags};

use super::python;

/// Every small text file read here (pyvenv.cfg, .python-version, Renviron) is bounded by this.
pub(super) const TEXT_BYTES_MAX: usize = 64 << 10;

/// The most directory entries looked at when a directory is searched for a mark.
const ENTRIES_MAX: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// pyvenv.cfg and bin/python: needs its base Python as well.
    Venv,
    /// A conda, mamba or pixi environment.
    Conda,
    /// A whole Python: pyenv, uv, python-build-standalone, a build of one's own.
    Python,
    /// Another language that keeps its library beside its program.
    Language,
    /// A plain installation prefix (bin, lib, share, …) that the caller put on PATH.
    Installation,
    /// Only a directory of programs, itself on the caller's PATH.
    Programs,
    /// Named with `--runtime`.
    Named,
}

/// The system runtime, shown by the policy anyway. /etc/alternatives is part of it: Debian's
/// /usr/bin leads through it, and it holds nothing but symlinks.
const SYSTEM: [&str; 8] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
];

pub(super) fn is_system(path: &Path) -> bool {
    SYSTEM.iter().any(|top| path.starts_with(top))
}

/// Programs whose library lies at a fixed place beside them: (bin/program, library).
const LANGUAGES: [(&str, &str); 9] = [
    ("Rscript", "lib/R/library/base/DESCRIPTION"),
    ("Rscript", "lib64/R/library/base/DESCRIPTION"),
    ("julia", "share/julia/base"),
    ("octave-cli", "share/octave"),
    ("node", "include/node/node.h"),
    ("java", "lib/modules"),
    ("perl", "lib/perl5"),
    ("ruby", "lib/ruby"),
    ("ghc", "lib/ghc"),
];

/// What a venv has at its top, tools' receipts included. One that the caller did not choose must
/// hold nothing else, or a pyvenv.cfg dropped beside private files would show them.
const VENV_ENTRIES: [&str; 18] = [
    "bin",
    "lib",
    "lib64",
    "include",
    "share",
    "etc",
    "man",
    "local",
    "pyvenv.cfg",
    ".gitignore",
    ".lock",
    "CACHEDIR.TAG",
    "pip-selfcheck.json",
    "pipx_metadata.json",
    "uv-receipt.toml",
    ".tox-info.json",
    ".project",
    ".Python",
];

/// What an installation prefix has at its top, besides notices in capitals.
const INSTALLATION_ENTRIES: [&str; 15] = [
    "bin", "sbin", "lib", "lib32", "lib64", "libexec", "include", "share", "man", "doc", "docs",
    "etc", "licenses", "plugins", "manifest",
];

/// What `dir`, a canonical path, is by its own marks; `None` for a directory that is no runtime.
pub(super) fn kind(dir: &Path) -> Option<Kind> {
    if !is_real_dir(&dir.join("bin")) {
        return None;
    }
    if is_real_dir(&dir.join("conda-meta")) {
        return Some(Kind::Conda);
    }
    if is_venv(dir) {
        return Some(Kind::Venv);
    }
    if is_python(dir) {
        return Some(Kind::Python);
    }
    let language = LANGUAGES
        .iter()
        .any(|(program, library)| is_own_program(dir, program) && is_own(dir, library));
    language.then_some(Kind::Language)
}

/// A prefix with a library beside its programs and nothing foreign in it. Weak marks, so the caller
/// must have put its bin on PATH as well.
pub(super) fn is_installation(dir: &Path) -> bool {
    let library = ["lib", "lib64", "libexec"]
        .iter()
        .any(|name| is_real_dir(&dir.join(name)));
    let notice = |name: &OsStr| {
        let stem = name
            .as_bytes()
            .split(|b| *b == b'.')
            .next()
            .unwrap_or_default();
        !stem.is_empty()
            && stem
                .iter()
                .all(|b| b.is_ascii_uppercase() || *b == b'_' || *b == b'-')
    };
    let known =
        |name: &OsStr| INSTALLATION_ENTRIES.iter().any(|known| name == *known) || notice(name);
    library && is_real_dir(&dir.join("bin")) && foreign_entry(dir, known).is_none()
}

/// The first entry of a venv that does not belong in one.
pub(super) fn foreign_to_venv(dir: &Path) -> Option<PathBuf> {
    foreign_entry(dir, |name| VENV_ENTRIES.iter().any(|known| name == *known))
}

/// The first entry that is not `known`. A directory that cannot be listed, or is too large to look
/// through, counts as foreign itself.
fn foreign_entry(dir: &Path, known: impl Fn(&OsStr) -> bool) -> Option<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Some(dir.to_path_buf());
    };
    for (count, entry) in entries.enumerate() {
        match entry {
            Ok(entry) if count < ENTRIES_MAX && known(&entry.file_name()) => {}
            Ok(entry) => return Some(entry.path()),
            Err(_) => return Some(dir.to_path_buf()),
        }
    }
    None
}

fn is_venv(dir: &Path) -> bool {
    let has_home = read_text(&dir.join("pyvenv.cfg"), Links::Refused)
        .is_some_and(|text| python::parse_config(&text).home.is_some());
    has_home
        && python::NAMES
            .iter()
            .any(|name| dir.join("bin").join(name).symlink_metadata().is_ok())
}

/// A Python that could run by itself: a standard library and an interpreter, both its own.
fn is_python(dir: &Path) -> bool {
    for lib in ["lib", "lib64"] {
        let Ok(entries) = std::fs::read_dir(dir.join(lib)) else {
            continue;
        };
        for entry in entries.take(ENTRIES_MAX).flatten() {
            let name = entry.file_name();
            let versioned = name.to_str().is_some_and(|n| {
                ["python", "pypy"]
                    .iter()
                    .any(|stem| n.strip_prefix(stem).is_some_and(starts_digit))
            });
            if !versioned || !is_own(dir, Path::new(lib).join(&name).join("os.py")) {
                continue;
            }
            // python3.13t's library is lib/python3.13t, pypy's is lib/pypy3.10: the same name in bin.
            let program = name.to_string_lossy();
            if is_own_program(dir, &program) || python::NAMES.iter().any(|n| is_own_program(dir, n))
            {
                return true;
            }
        }
    }
    false
}

fn starts_digit(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
}

fn is_own_program(dir: &Path, name: &str) -> bool {
    let path = dir.join("bin").join(name);
    is_executable(&path) && is_own(dir, Path::new("bin").join(name))
}

/// Whether `inner` exists and, every symlink followed, still lies in `dir`.
fn is_own(dir: &Path, inner: impl AsRef<Path>) -> bool {
    dir.join(inner)
        .canonicalize()
        .is_ok_and(|real| real.starts_with(dir))
}

pub(super) fn is_real_dir(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|meta| meta.is_dir())
}

/// A regular file that the caller could execute.
pub(super) fn is_executable(path: &Path) -> bool {
    let regular = path.metadata().is_ok_and(|meta| meta.is_file());
    regular && rustix::fs::accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS).is_ok()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Links {
    Followed,
    /// For files that untrusted code may have put there: a symlink would make us read, and quote in a
    /// message, a file of somebody else's choosing.
    Refused,
}

/// The whole of a small regular file; `None` if it is anything else, or larger than the bound.
pub(super) fn read_text(path: &Path, links: Links) -> Option<Vec<u8>> {
    let text = read_head(path, links, TEXT_BYTES_MAX + 1).ok()?;
    (text.len() <= TEXT_BYTES_MAX).then_some(text)
}

/// The first bytes of a regular file. Opening a FIFO must not block and opening a device must not act,
/// so the file is looked at before and after it is opened.
pub(super) fn read_head(path: &Path, links: Links, bytes_max: usize) -> std::io::Result<Vec<u8>> {
    let not_regular = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
    let meta = match links {
        Links::Followed => path.metadata()?,
        Links::Refused => path.symlink_metadata()?,
    };
    if !meta.is_file() {
        return Err(not_regular());
    }
    let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    flags.set(OFlags::NOFOLLOW, links == Links::Refused);
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let opened = file.metadata()?;
    if !opened.is_file() {
        return Err(not_regular());
    }
    // With room for all of it and more, as its end is told by a read of nothing.
    let mut head = Vec::with_capacity(bytes_max.min(opened.len() as usize + 64));
    file.take(bytes_max as u64).read_to_end(&mut head)?;
    Ok(head)
}

/// Why a directory is never shown, whatever it looks like.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("it is or contains the home directory {0:?}")]
    Home(PathBuf),
    #[error("it is or contains the project {0:?}")]
    Project(PathBuf),
    #[error("it is or contains {0:?}, which belongs to the whole system")]
    Shared(PathBuf),
    #[error("it lies in {0:?}, where no runtime belongs")]
    Foreign(PathBuf),
    #[error("it is, contains or lies in {0:?}, where private files are kept")]
    Private(PathBuf),
    #[error("it lies in the workspace of an analysis")]
    Workspace,
    #[error("it is the root of the file system")]
    Root,
    #[error("its path is relative, or has `..` or a NUL byte in it")]
    Path,
}

/// Never shown whole, though a runtime may lie somewhere below.
const SHARED: [&str; 9] = [
    "/home", "/root", "/var", "/var/lib", "/tmp", "/var/tmp", "/srv", "/mnt", "/media",
];

/// Nothing below these is a runtime: kernel views, sockets, settings and credentials.
const FOREIGN: [&str; 6] = ["/proc", "/sys", "/dev", "/run", "/etc", "/boot"];

/// Places in a home that hold credentials.
const PRIVATE: [&str; 13] = [
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".kube",
    ".docker",
    ".netrc",
    ".pki",
    ".password-store",
    ".mozilla",
    ".local/share/keyrings",
    ".config/gcloud",
    ".config/gh",
];

/// Places in a home that hold credentials among other things: runtimes do live below them.
const MIXED: [&str; 5] = [
    ".local",
    ".local/share",
    ".local/state",
    ".config",
    ".cache",
];

/// Invariant: called for every directory before it is shown, with its canonical path and with every
/// other path under which it is to appear.
pub(super) fn refuse(dir: &Path, homes: &[PathBuf], project: &Path) -> Result<(), Refusal> {
    if !is_plain_absolute(dir) {
        return Err(Refusal::Path);
    }
    if dir.parent().is_none() {
        return Err(Refusal::Root);
    }
    if project.starts_with(dir) {
        return Err(Refusal::Project(project.to_path_buf()));
    }
    // Not every user is in /etc/passwd: whatever lies directly in /home is a home.
    if dir.parent() == Some(Path::new("/home")) {
        return Err(Refusal::Home(dir.to_path_buf()));
    }
    for home in homes {
        if home.starts_with(dir) {
            return Err(Refusal::Home(home.clone()));
        }
        let private = PRIVATE.iter().map(|part| home.join(part));
        if let Some(place) = private
            .into_iter()
            .find(|place| place.starts_with(dir) || dir.starts_with(place))
        {
            return Err(Refusal::Private(place));
        }
        if let Some(place) = MIXED
            .iter()
            .map(|part| home.join(part))
            .find(|place| place.starts_with(dir))
        {
            return Err(Refusal::Private(place));
        }
    }
    if let Some(top) = FOREIGN.iter().find(|top| dir.starts_with(top)) {
        return Err(Refusal::Foreign(top.into()));
    }
    if let Some(top) = SHARED.iter().find(|top| Path::new(top).starts_with(dir)) {
        return Err(Refusal::Shared(top.into()));
    }
    let workspace = |part: &OsStr| part.as_bytes().starts_with(b"scidex-analysis-");
    match dir.iter().any(workspace) {
        true => Err(Refusal::Workspace),
        false => Ok(()),
    }
}

pub(super) fn is_plain_absolute(path: &Path) -> bool {
    use std::path::Component;
    path.is_absolute()
        && !path.as_os_str().as_bytes().contains(&0)
        && path
            .components()
            .all(|c| matches!(c, Component::RootDir | Component::Normal(_)))
}
