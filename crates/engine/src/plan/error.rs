//! Why a run or a submission cannot be planned.

use std::path::{Path, PathBuf};

use store::types::input_name::InputNameError;

use crate::plan::runtime::RuntimeError;
use crate::workspace::copy_in::CopyError;

/// Why a request or a submission is refused, or cannot be planned.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum PlanError {
    /// Resolve the path of the project.
    #[error("the project {path:?} cannot be opened")]
    Project {
        path: PathBuf,
        source: std::io::Error,
    },
    /// Resolve or read a path that is to be shown or copied.
    #[error("show {path:?}")]
    Unreachable {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The path may not be shown or copied, or workspaces may not be in it, for the reason in `why`.
    #[error("show {path:?}: {why}")]
    Refused { path: PathBuf, why: &'static str },
    /// The operator's policy lists readable roots, and the path is below none of them.
    #[error(
        "show {path:?}: the operator's policy lists no readable root above it (/etc/fumehood/policy.toml, [read] roots)"
    )]
    NotInReadableRoots { path: PathBuf },
    /// The request is from a queue to which other users may write, and not every user of the host may read or enter
    /// `closed`: the path, a directory on the way to it, or something below it.
    #[error(
        "show {path:?}: not everybody may read {closed:?}, and a queued analysis is shown only what everybody may; where it \
         is meant, the operator of the worker can list it (/etc/fumehood/policy.toml, [read] roots)"
    )]
    NotWorldReadable { path: PathBuf, closed: PathBuf },
    /// The directory is too large to check that every user of the host may read all of it.
    #[error(
        "show {path:?}: it holds too many files to check that every user may read all of them; name the directories that are needed, or have \
         the operator of the worker list it (/etc/fumehood/policy.toml, [read] roots)"
    )]
    TooLargeToCheck { path: PathBuf },
    /// The path inside, at which something is to be shown, cannot be used.
    #[error("show a path as {inside:?}: {why}")]
    BadTarget { inside: PathBuf, why: &'static str },
    /// The project chose a directory outside of itself, or one that may hold secrets.
    #[error(
        "show {path:?}: it leads to {real:?}, and a project shows only a visible directory of its own that holds \
         neither .git nor .env at any depth, nor more than 100,000 entries; if this one is meant, add this before the command:\n    {suggestion}"
    )]
    ProjectLinkRefused {
        path: PathBuf,
        real: PathBuf,
        suggestion: String,
    },
    /// The request is from a queue, and the path of its `data` or `docs` leads through a symlink that may have changed
    /// since the submission.
    #[error(
        "show {path:?}: a symlink leads there, and what it leads to may have changed since it was submitted; submit again \
         and name the directory itself with {flag}"
    )]
    QueuedLink { flag: &'static str, path: PathBuf },
    /// The path that was named as `data` or `docs` is not a directory.
    #[error("{flag} {path:?} is not a directory")]
    NotADirectory { flag: &'static str, path: PathBuf },
    /// An input may not be copied.
    #[error("input")]
    Input(#[from] CopyError),
    /// The name of an input in the workspace is not allowed.
    #[error("input")]
    InputName(#[from] InputNameError),
    /// The argument names a file of the host that the program would not find.
    #[error(
        "the argument {arg} names a file that exists here but will not inside; add this before the command:\n    {suggestion}"
    )]
    ArgumentNotVisible { arg: String, suggestion: String },
    /// The modules beside this script may not be copied, or the script cannot be read for its imports.
    #[error("--siblings for {script:?}: {why}")]
    Siblings { script: PathBuf, why: &'static str },
    /// The script imports more modules, or larger ones, than are copied.
    #[error(
        "--siblings for {script:?}: {why}; name the directory that holds them with --input, or install them in a runtime"
    )]
    TooManySiblings { script: PathBuf, why: &'static str },
    /// The request asks for the modules beside the script, but its command is not a script.
    #[error(
        "--siblings goes with a Python script; `--` begins a command, whose files are named with --input"
    )]
    SiblingsOfCommand,
    /// No runtime was found for the command.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// Resolve the directory in which workspaces are made.
    #[error("the workspace root {path:?} cannot be opened")]
    WorkspaceRoot {
        path: PathBuf,
        source: std::io::Error,
    },
}

impl PlanError {
    pub(super) fn refused(path: &Path, why: &'static str) -> PlanError {
        PlanError::Refused {
            path: path.to_path_buf(),
            why,
        }
    }

    pub(super) fn unreachable(path: &Path, source: impl Into<std::io::Error>) -> PlanError {
        PlanError::Unreachable {
            path: path.to_path_buf(),
            source: source.into(),
        }
    }
}
