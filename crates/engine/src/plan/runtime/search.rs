//! From a command's name to a file: the caller's PATH, an active environment, pyenv's shims, `--runtime`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::prefix::is_executable;
use super::python::{self, Shim};
use super::{Caller, RuntimeError};

/// The most directories of PATH that are searched.
const PATH_DIRS_MAX: usize = 512;

/// How to look: on whose PATH, and in which named runtime first.
pub(super) struct Search<'a> {
    pub caller: &'a Caller,
    /// The canonical prefix given with `--runtime`.
    pub named: Option<&'a Path>,
}

impl Search<'_> {
    /// The file a command means. With a slash it is a path; a shim is replaced by what it stands for.
    pub fn locate(&self, command: &OsStr) -> Result<PathBuf, RuntimeError> {
        if command.is_empty() || command.as_bytes().contains(&0) {
            return Err(RuntimeError::NotFound {
                command: command.to_owned(),
                searched: Vec::new(),
            });
        }
        if !command.as_bytes().contains(&b'/') {
            return self.by_name(command);
        }
        let path = self.caller.cwd.join(command);
        if !is_executable(&path) {
            return Err(absent(command, &path));
        }
        let root = path.parent().and_then(python::pyenv_root);
        match (root, path.file_name()) {
            (Some(root), Some(name)) => match python::resolve_shim(&root, name, self.caller)? {
                Shim::Program(program) => Ok(program),
                Shim::System => self.by_name(name),
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
                // Like a shell, go on past what may not be executed, but remember it.
                if path.metadata().is_ok_and(|meta| meta.is_file()) {
                    denied.get_or_insert(path);
                }
                continue;
            }
            match python::pyenv_root(dir) {
                Some(root) => match python::resolve_shim(&root, name, self.caller)? {
                    Shim::Program(program) => return Ok(program),
                    Shim::System => continue,
                },
                // Another version manager's: it would ask files that are not there inside.
                None if dir.file_name() == Some(OsStr::new("shims")) => {
                    return Err(RuntimeError::Shim { path });
                }
                None => return Ok(path),
            }
        }
        Err(match denied {
            Some(path) => RuntimeError::NotExecutable { path },
            None => RuntimeError::NotFound {
                command: name.to_owned(),
                searched,
            },
        })
    }

    /// A named runtime comes first. It need not bring a shell, but a language it lacks is an error:
    /// another interpreter is never substituted silently.
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

    /// PATH as the caller has it. An environment that is active but not on PATH (a service's unit, sudo)
    /// leads, for otherwise the system's interpreter would step in for it.
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

/// Commands that are an interpreter of some installation, so that which one runs matters.
pub(super) fn is_language(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    ["python", "pypy", "julia"]
        .iter()
        .any(|stem| name.starts_with(stem))
        || name == "R"
        || name == "Rscript"
}

/// Why a path that was given cannot be executed.
pub(super) fn absent(command: &OsStr, path: &Path) -> RuntimeError {
    match path.metadata() {
        Ok(_) => RuntimeError::NotExecutable {
            path: path.to_path_buf(),
        },
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            RuntimeError::NotExecutable {
                path: path.to_path_buf(),
            }
        }
        Err(_) => RuntimeError::NotFound {
            command: command.to_owned(),
            searched: vec![path.to_path_buf()],
        },
    }
}
