//! Why there is no runtime for a command.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("find command {command:?}: not in {}", list(searched))]
    NotFound {
        command: OsString,
        searched: Vec<PathBuf>,
    },
    #[error("execute {path:?}: it is not an executable file (chmod +x, if it is meant to be)")]
    NotExecutable { path: PathBuf },
    #[error("follow {pointed_by:?}: it leads to {path:?}, which is not there")]
    Missing { path: PathBuf, pointed_by: PathBuf },
    #[error(
        "run {path:?}: it is a file of yours, not of a runtime; pass it in with --input {path:?}"
    )]
    InCallerTree { path: PathBuf },
    #[error(
        "show the runtime of {pointed_by:?}: {path:?} does not lie in a Python, venv, conda, R or Julia prefix, nor in a \
         directory of PATH; name its prefix with --runtime PREFIX, or pass a single file with --input"
    )]
    NotARuntime { path: PathBuf, pointed_by: PathBuf },
    #[error(
        "show {prefix:?} as a runtime; make a venv in a directory of its own (python3 -m venv DIR), or name \
         another prefix with --runtime PREFIX"
    )]
    Refused {
        prefix: PathBuf,
        #[source]
        why: PrefixRefusal,
    },
    #[error(
        "show the venv {prefix:?}: it holds {entry:?}, which is no part of a venv; if all of it may be read, name it with \
         --runtime {prefix:?}"
    )]
    MoreThanVenv { prefix: PathBuf, entry: PathBuf },
    #[error(
        "show {prefix:?} as a runtime: it lies in the project and is not active; activate it, or name it with \
         --runtime {prefix:?}"
    )]
    NotChosen { prefix: PathBuf },
    #[error(
        "follow the venv {venv:?}: there is no Python in its home {home:?}; create the venv again"
    )]
    NoPython { venv: PathBuf, home: PathBuf },
    #[error("find command {command:?}: the runtime {prefix:?} does not have it in its bin")]
    NotInRuntime { command: OsString, prefix: PathBuf },
    #[error("use {prefix:?} as --runtime: it is not a directory with programs in its bin")]
    NamedHasNoPrograms { prefix: PathBuf },
    #[error(
        "run {path:?}: it is a version manager's shim, which works only outside the sandbox; name the real installation with --runtime PREFIX"
    )]
    VersionManagerShim { path: PathBuf },
    #[error(
        "find Python {version:?}, which {origin:?} asks for: pyenv has no such version in {root:?} (pyenv install)"
    )]
    VersionMissing {
        version: String,
        origin: PathBuf,
        root: PathBuf,
    },
    #[error("find command {command:?}: not in pyenv's {versions:?}, which {origin:?} asks for")]
    NotInVersion {
        command: OsString,
        versions: Vec<String>,
        origin: PathBuf,
    },
    #[error("read {path:?}: it is not a small plain file")]
    VersionFile { path: PathBuf },
    #[error(
        "read the `#!` line of {script:?}: cannot tell the interpreter from {line:?}; use `run -- INTERPRETER SCRIPT`"
    )]
    InterpreterLine { script: PathBuf, line: String },
    #[error(
        "choose an interpreter for {script:?}: no `#!` line, and its ending is none of .py .R .sh .jl; use `run -- INTERPRETER SCRIPT`"
    )]
    NoInterpreter { script: PathBuf },
    #[error("read script {script:?}")]
    ReadScript {
        script: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("follow {path:?}: too many symlinks and interpreters")]
    TooManySteps { path: PathBuf },
}

impl RuntimeError {
    pub(in crate::plan) fn not_found(command: &OsStr, searched: &[PathBuf]) -> RuntimeError {
        RuntimeError::NotFound {
            command: command.to_owned(),
            searched: searched.to_vec(),
        }
    }

    pub(super) fn interpreter_line(script: &Path, line: String) -> RuntimeError {
        RuntimeError::InterpreterLine {
            script: script.to_path_buf(),
            line,
        }
    }

    pub(super) fn missing(path: &Path, pointed_by: &Path) -> RuntimeError {
        RuntimeError::Missing {
            path: path.to_path_buf(),
            pointed_by: pointed_by.to_path_buf(),
        }
    }

    /// The conventional exit code: 127 not found, 126 not executable, 125 Fumehood could not run it.
    pub fn exit_code(&self) -> u8 {
        match self {
            RuntimeError::NotFound { .. }
            | RuntimeError::Missing { .. }
            | RuntimeError::NotInRuntime { .. }
            | RuntimeError::NotInVersion { .. } => 127,
            RuntimeError::NotExecutable { .. } => 126,
            _ => 125,
        }
    }
}

/// Why a directory is never shown, whatever it looks like.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrefixRefusal {
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

pub(super) fn list(paths: &[PathBuf]) -> String {
    let shown: Vec<String> = paths.iter().map(|path| escape_for_line(path)).collect();
    shown.join(", ")
}

/// Formats a path for one line on a terminal. Whoever named the directory must not be able to send control characters
/// to the terminal.
pub(super) fn escape_for_line(path: &Path) -> String {
    match path.to_str() {
        Some(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => format!("{path:?}"),
    }
}
