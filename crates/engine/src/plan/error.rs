//! Why a run or a submission cannot be planned.

use std::path::{Path, PathBuf};

use store::types::input_name::InputNameError;

use crate::plan::runtime::RuntimeError;
use crate::workspace::copy_in::CopyError;

#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error("the project {path:?} cannot be opened")]
    Project {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("show {path:?}")]
    Unreachable {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("show {path:?}: {why}")]
    Refused { path: PathBuf, why: &'static str },
    #[error(
        "show {path:?}: the operator's policy lists no readable root above it (/etc/fumehood/policy.toml, [read] roots)"
    )]
    NotInReadableRoots { path: PathBuf },
    #[error(
        "show {path:?}: not everybody may read {closed:?}, and a queued analysis is shown only what everybody may; where it \
         is meant, the operator of the worker can list it (/etc/fumehood/policy.toml, [read] roots)"
    )]
    NotWorldReadable { path: PathBuf, closed: PathBuf },
    #[error(
        "show {path:?}: it holds too many files to check that every user may read all of them; name the directories that are needed, or have \
         the operator of the worker list it (/etc/fumehood/policy.toml, [read] roots)"
    )]
    TooLargeToCheck { path: PathBuf },
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
    #[error(
        "show {path:?}: a symlink leads there, and what it leads to may have changed since it was submitted; submit again \
         and name the directory itself with {flag}"
    )]
    QueuedLink { flag: &'static str, path: PathBuf },
    #[error("{flag} {path:?} is not a directory")]
    NotADirectory { flag: &'static str, path: PathBuf },
    #[error("input")]
    Input(#[from] CopyError),
    #[error("input")]
    InputName(#[from] InputNameError),
    #[error(
        "the argument {arg} names a file that exists here but will not inside; add this before the command:\n    {suggestion}"
    )]
    ArgumentNotVisible { arg: String, suggestion: String },
    #[error("--siblings for {script:?}: {why}")]
    Siblings { script: PathBuf, why: &'static str },
    #[error(
        "--siblings for {script:?}: {why}; name the directory that holds them with --input, or install them in a runtime"
    )]
    TooManySiblings { script: PathBuf, why: &'static str },
    #[error(
        "--siblings goes with a Python script; `--` begins a command, whose files are named with --input"
    )]
    SiblingsOfCommand,
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
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
