//! Which files travel with a submission. The rules are those of a run on the submitting host.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::command::own_program;
use super::error::PlanError;
use super::links::resolve_own_links;
use super::path_checks::{InputDirectory, PathChecks, PrivatePaths};
use super::visible_paths::VisiblePaths;
use crate::plan::runtime::CallerEnvironment;
use crate::request::{Command, SiblingModules, Stdin};
use crate::settings::Request;
use store::types::input_name;

/// The files that travel with a submission, and the directories of the worker's host that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubmitInputs {
    /// For a script, its path is the name in the workspace; the script is the first of `inputs`.
    pub command: Command,
    /// The files to copy: resolved source, and name in the workspace.
    pub inputs: Vec<(PathBuf, PathBuf)>,
    /// The file to pipe to standard input, resolved. `None`: the submission names no file for it.
    pub stdin: Option<PathBuf>,
    /// The directory that was named, or the project's own.
    pub data: Option<PathBuf>,
    /// As `data`, for the directory `docs`.
    pub docs: Option<PathBuf>,
    /// The runtime that was requested, or the environment that the caller has activated.
    pub runtime: Option<PathBuf>,
    /// A message for the caller: which sibling modules are included.
    pub notice: Option<String>,
}

/// Decides which files travel with a submission, without reading their content. The worker decides later whether it
/// may show the other paths.
pub fn resolve_submit_inputs(
    request: &Request,
    caller: &CallerEnvironment,
    private: &PrivatePaths<'_>,
) -> Result<SubmitInputs, PlanError> {
    // The local workspace root may not be an input either.
    let root = &request.workspace_root;
    let workspace_root = root.canonicalize().unwrap_or_else(|_| root.clone());
    let checks = PathChecks {
        request,
        workspace_root: &workspace_root,
        private,
    };
    let mut inputs = Vec::new();
    let command = match &request.command {
        Command::Script { script, args } => {
            let name = input_name::name_for(script, None)?;
            let script = resolve_own_links(&caller.cwd.join(script))?;
            inputs.push((script, name.clone()));
            Command::Script {
                script: name,
                args: args.clone(),
            }
        }
        Command::Argv(words) => Command::Argv(absolute_program(words, request, &caller.cwd)),
        Command::Shell => Command::Shell,
    };
    for input in &request.inputs {
        let name = input_name::name_for(&input.host, input.name.as_deref())?;
        inputs.push((input.host.clone(), name));
    }
    checks.resolve_copied_sources(&mut inputs)?;
    let notice = match request.siblings {
        SiblingModules::Exclude => None,
        SiblingModules::Include => checks.add_siblings(&checks.resolve_project()?, &mut inputs)?,
    };
    let stdin = match &request.stdin {
        Stdin::File(path) => Some(checks.resolve_copied_source(path)?),
        Stdin::Null | Stdin::Caller => None,
    };
    let submit_inputs = SubmitInputs {
        data: checks.directory_to_submit(InputDirectory::Data)?,
        docs: checks.directory_to_submit(InputDirectory::Docs)?,
        runtime: request.runtime.clone().or_else(|| active_prefix(caller)),
        command,
        inputs,
        stdin,
        notice,
    };
    check_arguments(request, &submit_inputs, &workspace_root, caller)?;
    Ok(submit_inputs)
}

/// Makes a program path absolute if it is relative to the current directory, unless the program is one of the inputs.
fn absolute_program(words: &[OsString], request: &Request, cwd: &Path) -> Vec<OsString> {
    let mut words = words.to_vec();
    if let Some(first) = words.first_mut()
        && first.as_encoded_bytes().contains(&b'/')
        && own_program(first, request).is_none()
    {
        *first = cwd.join(&*first).into_os_string();
    }
    words
}

fn active_prefix(caller: &CallerEnvironment) -> Option<PathBuf> {
    let active = |name: &&str| caller.active(name).filter(|prefix| prefix.is_dir());
    let prefix = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().find_map(active);
    prefix.map(Path::to_path_buf)
}

/// Checks the arguments as for a run, but only relative paths: the worker does not have the current directory. An
/// absolute path may exist on the worker.
fn check_arguments(
    request: &Request,
    submit_inputs: &SubmitInputs,
    workspace_root: &Path,
    caller: &CallerEnvironment,
) -> Result<(), PlanError> {
    let workspace = crate::workspace::path_for(workspace_root, &request.id);
    let mut inputs = submit_inputs.inputs.clone();
    for (name, dir) in [("data", &submit_inputs.data), ("docs", &submit_inputs.docs)] {
        inputs.extend(dir.clone().map(|dir| (dir, PathBuf::from(name))));
    }
    let args = match &submit_inputs.command {
        Command::Argv(words) => words.get(1..).unwrap_or_default(),
        Command::Script { args, .. } => args,
        Command::Shell => &[],
    };
    let visible = VisiblePaths {
        views: &[],
        inputs: &inputs,
        workspace: &workspace,
        cwd: &caller.cwd,
    };
    visible.check_arguments(args.iter().filter(|arg| !Path::new(arg).is_absolute()))
}
