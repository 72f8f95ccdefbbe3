//! The plan of a run: everything that is decided before anything is created.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use sandbox::spec::ReadOnlyView;
use store::types::input_name;

use super::command::resolve_command;
use super::error::PlanError;
use super::path_checks::{InputDirectory, PathChecks, PrivatePaths};
use super::views::sort_for_mounting;
use super::visible_paths::VisiblePaths;
use super::world_readable;
use crate::plan::runtime::{CallerEnvironment, Runtime};
use crate::request::{QueueWriters, RequestOrigin, Stdin};
use crate::settings::Request;

/// Everything about a run that is decided before anything is created.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The path of the program to execute.
    pub program: PathBuf,
    /// The arguments, from argument zero.
    pub argv: Vec<OsString>,
    /// What to show read-only, in the order in which to mount it.
    pub views: Vec<ReadOnlyView>,
    /// The files to copy in: source, and name in the workspace.
    pub inputs: Vec<(PathBuf, PathBuf)>,
    /// Resolved: without symlinks and `..`.
    pub workspace_root: PathBuf,
    /// The directory of the project, resolved.
    pub project: PathBuf,
    /// The home directories of this host. Hints use them to recognise private paths.
    pub homes: Vec<PathBuf>,
    /// The file to pipe to standard input, resolved.
    pub stdin: Option<PathBuf>,
    /// The runtime that the program needs.
    pub runtime: Runtime,
    /// Messages for the user: which runtime is shown, and which modules are copied.
    pub notices: Vec<String>,
}

/// Plans the run of a request. `private` has the paths of Fumehood itself, which nothing may show.
pub fn plan(
    request: &Request,
    caller: &CallerEnvironment,
    private: &PrivatePaths<'_>,
) -> Result<Plan, PlanError> {
    let root = &request.workspace_root;
    let workspace_root = root
        .canonicalize()
        .map_err(|source| PlanError::WorkspaceRoot {
            path: root.clone(),
            source,
        })?;
    let kernel = ["/dev", "/proc", "/sys"];
    if kernel.iter().any(|dir| workspace_root.starts_with(dir)) {
        let why = "it is the kernel's; choose a directory on a disk, or --workspace memory";
        return Err(PlanError::refused(&workspace_root, why));
    }
    let workspace = crate::workspace::path_for(&workspace_root, &request.id);
    let checks = PathChecks {
        request,
        workspace_root: &workspace_root,
        private,
    };
    let project = checks.resolve_project()?;
    checks.check_command()?;
    let mut views = Vec::new();
    for directory in InputDirectory::BOTH {
        checks.add_input_directory(directory, &workspace, &mut views)?;
    }
    for read in &request.reads {
        checks.add_read_root(read, &workspace, &mut views)?;
    }
    let (runtime, mut inputs, argv) = resolve_command(request, caller, &project, &workspace)?;
    for input in &request.inputs {
        let name = input_name::name_for(&input.host, input.name.as_deref())?;
        inputs.push((input.host.clone(), name));
    }
    // Resolve each source once: the path that is checked here is the path that is opened later.
    checks.resolve_copied_sources(&mut inputs)?;
    let brought = checks.add_siblings(&project, &mut inputs)?;
    let stdin = match &request.stdin {
        Stdin::File(path) => Some(checks.resolve_copied_source(path)?),
        Stdin::Null | Stdin::Caller => None,
    };
    checks.add_runtime_views(&runtime, &mut views)?;
    let visible = VisiblePaths {
        views: &views,
        inputs: &inputs,
        workspace: &workspace,
        cwd: &caller.cwd,
    };
    // Skip this check for queued requests: their arguments refer to the submitter's files, and an error would reveal
    // which files the worker has.
    if request.asked_by == RequestOrigin::Caller {
        visible.check_arguments(argv.get(1..).unwrap_or_default())?;
    }
    sort_for_mounting(&mut views);
    Ok(Plan {
        program: runtime.program.clone(),
        argv,
        views,
        inputs,
        workspace_root,
        project,
        homes: caller.homes.clone(),
        stdin,
        notices: runtime.notice.iter().cloned().chain(brought).collect(),
        runtime,
    })
}

/// Whether the requester may learn that a path exists on this host.
pub fn may_reveal_path(request: &Request, path: &Path) -> bool {
    match &request.asked_by {
        RequestOrigin::Queue {
            writers: QueueWriters::OtherUsers,
            ..
        } => world_readable::resolve(path).is_ok(),
        _ => true,
    }
}
