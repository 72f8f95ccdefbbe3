//! Why there is no runtime for a command.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Why no runtime can be shown for a command. Nothing has been executed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum RuntimeError {
    /// The command is in none of the places that were searched.
    #[error("find command {command:?}: not in {}", list(searched))]
    NotFound {
        command: OsString,
        searched: Vec<PathBuf>,
    },
    /// The file may not be executed.
    #[error("execute {path:?}: it is not an executable file (chmod +x, if it is meant to be)")]
    NotExecutable { path: PathBuf },
    /// `path`, which was reached from `pointed_by`, does not exist.
    #[error("follow {pointed_by:?}: it leads to {path:?}, which is not there")]
    Missing { path: PathBuf, pointed_by: PathBuf },
    /// The program is in a home directory, the project or the current directory, and in no runtime.
    #[error(
        "run {path:?}: it is a file of yours, not of a runtime; pass it in with --input {path:?}"
    )]
    InCallerTree { path: PathBuf },
    /// The path is in no directory that is recognised as a runtime, or that may be shown because the caller's PATH
    /// names it.
    #[error(
        "show the runtime of {pointed_by:?}: {path:?} does not lie in a Python, venv, conda, R or Julia prefix, nor in a \
         directory of PATH; name its prefix with --runtime PREFIX, or pass a single file with --input"
    )]
    NotARuntime { path: PathBuf, pointed_by: PathBuf },
    /// The directory is never shown as a runtime.
    #[error(
        "show {prefix:?} as a runtime; make a venv in a directory of its own (python3 -m venv DIR), or name \
         another prefix with --runtime PREFIX"
    )]
    Refused {
        prefix: PathBuf,
        #[source]
        why: PrefixRefusal,
    },
    /// The caller did not choose the venv, and it has an entry that venvs do not have.
    #[error(
        "show the venv {prefix:?}: it holds {entry:?}, which is no part of a venv; if all of it may be read, name it with \
         --runtime {prefix:?}"
    )]
    MoreThanVenv { prefix: PathBuf, entry: PathBuf },
    /// The caller did not choose the runtime, and it is in the project.
    #[error(
        "show {prefix:?} as a runtime: it lies in the project and is not active; activate it, or name it with \
         --runtime {prefix:?}"
    )]
    NotChosen { prefix: PathBuf },
    /// The directory that pyvenv.cfg names as `home` does not exist, or has no Python.
    #[error(
        "follow the venv {venv:?}: there is no Python in its home {home:?}; create the venv again"
    )]
    NoPython { venv: PathBuf, home: PathBuf },
    /// The runtime that the caller named does not have this interpreter, and no other takes its place.
    #[error("find command {command:?}: the runtime {prefix:?} does not have it in its bin")]
    NotInRuntime { command: OsString, prefix: PathBuf },
    /// The directory that the caller named or activated does not exist, or has no programs in its `bin`.
    #[error("use {prefix:?} as --runtime: it is not a directory with programs in its bin")]
    NamedHasNoPrograms { prefix: PathBuf },
    /// The program is a launcher of a version manager. Files that are not shown tell it which program to start.
    #[error(
        "run {path:?}: it is a version manager's shim, which works only outside the sandbox; name the real installation with --runtime PREFIX"
    )]
    VersionManagerShim { path: PathBuf },
    /// pyenv does not have a version that `origin`, a file or `PYENV_VERSION`, asks for.
    #[error(
        "find Python {version:?}, which {origin:?} asks for: pyenv has no such version in {root:?} (pyenv install)"
    )]
    VersionMissing {
        version: String,
        origin: PathBuf,
        root: PathBuf,
    },
    /// No version that `origin`, a file or `PYENV_VERSION`, asks for has the command.
    #[error("find command {command:?}: not in pyenv's {versions:?}, which {origin:?} asks for")]
    NotInVersion {
        command: OsString,
        versions: Vec<String>,
        origin: PathBuf,
    },
    /// The file that names pyenv's versions cannot be read, or is not a small regular file.
    #[error("read {path:?}: it is not a small plain file")]
    VersionFile { path: PathBuf },
    /// The interpreter cannot be told from the `#!` line of the script.
    #[error(
        "read the `#!` line of {script:?}: cannot tell the interpreter from {line:?}; use `run -- INTERPRETER SCRIPT`"
    )]
    InterpreterLine { script: PathBuf, line: String },
    /// The script has no `#!` line, and its file name extension names no interpreter.
    #[error(
        "choose an interpreter for {script:?}: no `#!` line, and its ending is none of .py .R .sh .jl; use `run -- INTERPRETER SCRIPT`"
    )]
    NoInterpreter { script: PathBuf },
    /// Read the beginning of the script.
    #[error("read script {script:?}")]
    ReadScript {
        script: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Following the program to its interpreter takes more steps than are allowed.
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
    /// It is this home directory or contains it.
    #[error("it is or contains the home directory {0:?}")]
    Home(PathBuf),
    /// It is the project or contains it.
    #[error("it is or contains the project {0:?}")]
    Project(PathBuf),
    /// It is a directory that the whole system shares, or contains one.
    #[error("it is or contains {0:?}, which belongs to the whole system")]
    Shared(PathBuf),
    /// It is in a directory in which no runtime is expected.
    #[error("it lies in {0:?}, where no runtime belongs")]
    Foreign(PathBuf),
    /// It is, contains or is in a place of a home directory where credentials or other private files are kept.
    #[error("it is, contains or lies in {0:?}, where private files are kept")]
    Private(PathBuf),
    /// A component of its path has the name of a workspace.
    #[error("it lies in the workspace of an analysis")]
    Workspace,
    /// It is the root of the file system.
    #[error("it is the root of the file system")]
    Root,
    /// Its path is not absolute, or contains `..` or a NUL byte.
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
