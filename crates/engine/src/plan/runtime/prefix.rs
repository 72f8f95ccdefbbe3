//! How a runtime is recognised on disk, and which directories are never shown as one.
//!
//! A directory is shown to an analysis because it is a runtime, never because something points at it: the code that
//! is about to be confined may have written the pointers (symlinks, `#!` lines, pyvenv.cfg, .python-version).
//! Therefore the marks looked for here are ones that a directory of documents, keys or data does not have. A mark
//! behind a symlink that leaves the directory does not count.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::error::PrefixRefusal;
use super::host_files::{self, ENTRIES_MAX, LinkPolicy};
use super::host_files::{is_executable, is_plain_absolute, is_real_dir, read_text};
use super::python;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefixKind {
    /// A directory with pyvenv.cfg and bin/python. It needs its base Python as well.
    Venv,
    /// A conda, mamba or pixi environment.
    Conda,
    /// A complete Python: from pyenv, uv, python-build-standalone, or built by the user.
    Python,
    /// Another language that keeps its library beside its program.
    Language,
    /// A plain installation prefix (bin, lib, share, …) whose bin the caller put on PATH.
    Installation,
    /// A directory of programs that is itself on the caller's PATH.
    Programs,
    /// Named with `--runtime`.
    Named,
}

/// The system runtime, which every run may see. It includes /etc/alternatives: Debian's /usr/bin leads through it,
/// and it holds only symlinks.
const SYSTEM_DIRS: [&str; 8] = [
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
    SYSTEM_DIRS.iter().any(|top| path.starts_with(top))
}

/// Programs whose library lies at a fixed place beside them: (program in bin, library).
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

/// The top-level entries of a venv, including files of packaging tools. A venv that the caller did not choose must
/// hold nothing else; otherwise a pyvenv.cfg placed beside private files would show them.
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

/// The top-level entries of an installation prefix, besides notices in capitals such as LICENSE.
const INSTALLATION_ENTRIES: [&str; 15] = [
    "bin", "sbin", "lib", "lib32", "lib64", "libexec", "include", "share", "man", "doc", "docs",
    "etc", "licenses", "plugins", "manifest",
];

/// The kind of runtime that `dir`, a canonical path, is by its own marks. `None` if it is no runtime.
pub(super) fn kind(dir: &Path) -> Option<PrefixKind> {
    if !is_real_dir(&dir.join("bin")) {
        return None;
    }
    if is_real_dir(&dir.join("conda-meta")) {
        return Some(PrefixKind::Conda);
    }
    if is_venv(dir) {
        return Some(PrefixKind::Venv);
    }
    if is_python(dir) {
        return Some(PrefixKind::Python);
    }
    let is_language =
        |(program, library): &(&str, &str)| is_own_program(dir, program) && is_own(dir, library);
    let language = LANGUAGES.iter().any(is_language);
    language.then_some(PrefixKind::Language)
}

/// Whether a prefix has a library beside its programs and no unknown entries. These marks are weak, so the caller
/// must also have put its bin on PATH.
pub(super) fn is_installation(dir: &Path) -> bool {
    let is_dir = |name: &&str| is_real_dir(&dir.join(name));
    let library = ["lib", "lib64", "libexec"].iter().any(is_dir);
    let capital = |b: &u8| b.is_ascii_uppercase() || matches!(b, b'_' | b'-');
    let notice = |name: &OsStr| {
        let stem = name.as_bytes().split(|b| *b == b'.').next();
        stem.is_some_and(|stem| !stem.is_empty() && stem.iter().all(capital))
    };
    let known =
        |name: &OsStr| INSTALLATION_ENTRIES.iter().any(|known| name == *known) || notice(name);
    library && is_real_dir(&dir.join("bin")) && foreign_entry(dir, known).is_none()
}

/// The first entry that does not belong in a venv.
pub(super) fn foreign_to_venv(dir: &Path) -> Option<PathBuf> {
    foreign_entry(dir, |name| VENV_ENTRIES.iter().any(|known| name == *known))
}

/// The first entry that is not `known`. A directory that cannot be listed or is too large counts as unknown itself.
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
    let has_home = read_text(&dir.join("pyvenv.cfg"), LinkPolicy::Refuse)
        .is_some_and(|text| python::parse_venv_config(&text).home.is_some());
    has_home && python::name_in(&dir.join("bin")).is_some()
}

/// Whether this is a Python that can run by itself: with a standard library and an interpreter of its own.
fn is_python(dir: &Path) -> bool {
    for lib in ["lib", "lib64"] {
        for entry in host_files::entries(&dir.join(lib)) {
            let name = entry.file_name();
            let versioned = name.to_str().is_some_and(|n| {
                ["python", "pypy"]
                    .iter()
                    .any(|stem| n.strip_prefix(stem).is_some_and(starts_digit))
            });
            if !versioned || !is_own(dir, Path::new(lib).join(&name).join("os.py")) {
                continue;
            }
            // python3.13t has lib/python3.13t, pypy has lib/pypy3.10: the same name as the program.
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

/// Whether `inner` exists and still lies in `dir` after all symlinks are followed.
fn is_own(dir: &Path, inner: impl AsRef<Path>) -> bool {
    dir.join(inner)
        .canonicalize()
        .is_ok_and(|real| real.starts_with(dir))
}

/// Directories that are never shown as a whole, though a runtime may lie below them.
const SHARED_DIRS: [&str; 9] = [
    "/home", "/root", "/var", "/var/lib", "/tmp", "/var/tmp", "/srv", "/mnt", "/media",
];

/// Directories below which no runtime is: kernel views, sockets, configuration and credentials.
const NEVER_RUNTIME_DIRS: [&str; 6] = ["/proc", "/sys", "/dev", "/run", "/etc", "/boot"];

/// Paths in a home that hold credentials.
const CREDENTIAL_PATHS: [&str; 13] = [
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

/// Paths in a home that hold credentials among other things. Runtimes do live below them.
const PARTLY_PRIVATE_PATHS: [&str; 5] = [
    ".local",
    ".local/share",
    ".local/state",
    ".config",
    ".cache",
];

/// Refuses directories that must never be shown. Invariant: called for every directory before it is shown, with its
/// canonical path and with every other path at which it will appear.
pub(super) fn refuse(dir: &Path, homes: &[PathBuf], project: &Path) -> Result<(), PrefixRefusal> {
    if !is_plain_absolute(dir) {
        return Err(PrefixRefusal::Path);
    }
    if dir.parent().is_none() {
        return Err(PrefixRefusal::Root);
    }
    if project.starts_with(dir) {
        return Err(PrefixRefusal::Project(project.to_path_buf()));
    }
    // Not every user is in /etc/passwd, so treat each directory in /home as a home.
    if dir.parent() == Some(Path::new("/home")) {
        return Err(PrefixRefusal::Home(dir.to_path_buf()));
    }
    for home in homes {
        if home.starts_with(dir) {
            return Err(PrefixRefusal::Home(home.clone()));
        }
        let in_home = |part: &&str| home.join(part);
        let mut private = CREDENTIAL_PATHS.iter().map(in_home);
        let mut partly = PARTLY_PRIVATE_PATHS.iter().map(in_home);
        let place = private
            .find(|place| place.starts_with(dir) || dir.starts_with(place))
            .or_else(|| partly.find(|place| place.starts_with(dir)));
        if let Some(place) = place {
            return Err(PrefixRefusal::Private(place));
        }
    }
    if let Some(top) = NEVER_RUNTIME_DIRS.iter().find(|top| dir.starts_with(top)) {
        return Err(PrefixRefusal::Foreign(top.into()));
    }
    let mut shared = SHARED_DIRS.iter();
    if let Some(top) = shared.find(|top| Path::new(top).starts_with(dir)) {
        return Err(PrefixRefusal::Shared(top.into()));
    }
    let workspace = |part: &OsStr| part.as_bytes().starts_with(b"scidex-analysis-");
    match dir.iter().any(workspace) {
        true => Err(PrefixRefusal::Workspace),
        false => Ok(()),
    }
}
