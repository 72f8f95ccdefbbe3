//! From a command name to a file: on the caller's PATH, in an active environment, behind pyenv's shims, in the
//! `--runtime` prefix.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::caller::CallerEnvironment;
use super::error::RuntimeError;
use super::host_files::is_executable;
use super::python::{self, ShimTarget};

/// The most directories of PATH to search.
const PATH_DIRS_MAX: usize = 512;

/// A search on the caller's PATH, and first in a named runtime.
pub(super) struct CommandSearch<'a> {
    pub caller: &'a CallerEnvironment,
    /// The canonical prefix given with `--runtime`.
    pub named: Option<&'a Path>,
}

impl CommandSearch<'_> {
    /// Finds the file that a command means. A command with a slash is a path. A shim is replaced by its target.
    pub fn locate(&self, command: &OsStr) -> Result<PathBuf, RuntimeError> {
        if command.is_empty() || command.as_bytes().contains(&0) {
            return Err(RuntimeError::not_found(command, &[]));
        }
        if !command.as_bytes().contains(&b'/') {
            return self.by_name(command);
        }
        let path = self.caller.cwd.join(command);
        if !is_executable(&path) {
            return Err(not_executable(command, &path));
        }
        let root = path.parent().and_then(python::pyenv_root);
        match (root, path.file_name()) {
            (Some(root), Some(name)) => match python::resolve_shim(&root, name, self.caller)? {
                ShimTarget::Program(program) => Ok(program),
                ShimTarget::System => self.by_name(name),
            },
            _ => Ok(path),
        }
    }

    fn by_name(&self, name: &OsStr) -> Result<PathBuf, RuntimeError> {
        if let Some(program) = self.in_named(name)? {
            return Ok(program);
        }
        let searched = self.dirs();
        let mut denied = None;
        for dir in &searched {
            let path = dir.join(name);
            if !is_executable(&path) {
                // Like a shell, continue after a file that may not be executed, but remember it for the error.
                if path.metadata().is_ok_and(|meta| meta.is_file()) {
                    denied.get_or_insert(path);
                }
                continue;
            }
            match python::pyenv_root(dir) {
                Some(root) => match python::resolve_shim(&root, name, self.caller)? {
                    ShimTarget::Program(program) => return Ok(program),
                    ShimTarget::System => continue,
                },
                // A shim of another version manager would read files that do not exist inside.
                None if dir.file_name() == Some(OsStr::new("shims")) => {
                    return Err(RuntimeError::VersionManagerShim { path });
                }
                None => return Ok(path),
            }
        }
        Err(match denied {
            Some(path) => RuntimeError::NotExecutable { path },
            None => RuntimeError::not_found(name, &searched),
        })
    }

    /// Looks in the named runtime. It need not provide a shell, but if it lacks a language interpreter, fail: another
    /// interpreter is never substituted silently.
    pub fn in_named(&self, name: &OsStr) -> Result<Option<PathBuf>, RuntimeError> {
        let Some(prefix) = self.named else {
            return Ok(None);
        };
        let path = prefix.join("bin").join(name);
        match (is_executable(&path), is_language(name)) {
            (true, _) => Ok(Some(path)),
            (false, false) => Ok(None),
            (false, true) => Err(RuntimeError::NotInRuntime {
                command: name.to_owned(),
                prefix: prefix.to_path_buf(),
            }),
        }
    }

    /// The caller's PATH. An environment that is active but not on PATH (in a systemd unit, under sudo) comes first;
    /// otherwise the system's interpreter would replace it.
    fn dirs(&self) -> Vec<PathBuf> {
        let mut dirs: Vec<PathBuf> = std::env::split_paths(&self.caller.path)
            .map(|dir| self.caller.cwd.join(dir))
            .take(PATH_DIRS_MAX)
            .collect();
        for name in ["CONDA_PREFIX", "VIRTUAL_ENV"] {
            let Some(prefix) = self.caller.active(name) else {
                continue;
            };
            let bin = prefix.join("bin");
            let real = bin.canonicalize().ok();
            if real.is_some() && !dirs.iter().any(|dir| dir.canonicalize().ok() == real) {
                dirs.insert(0, bin);
            }
        }
        dirs
    }
}

/// Whether a command is a language interpreter, for which it matters which installation runs.
pub(super) fn is_language(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    let stems = ["python", "pypy", "julia"];
    stems.iter().any(|stem| name.starts_with(stem)) || matches!(name, "R" | "Rscript")
}

/// Why a given path cannot be executed.
pub(super) fn not_executable(command: &OsStr, path: &Path) -> RuntimeError {
    let path = path.to_path_buf();
    match path.metadata() {
        Err(error) if error.kind() != std::io::ErrorKind::PermissionDenied => {
            RuntimeError::not_found(command, &[path])
        }
        _ => RuntimeError::NotExecutable { path },
    }
}
