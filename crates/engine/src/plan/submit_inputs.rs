//! What a submission takes with it from where it is submitted, by the rules that hold for a run there.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::links::through_own_links;
use super::path_checks::{Guard, InputDirectory};
use super::{PolicyError, Private, Visible, canonical, own_program};
use crate::plan::runtime::Caller;
use crate::request::{Command, Request, Siblings, Stdin};
use store::types::input_name;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// With the script's words the first is its name in the workspace, where it is the first of the inputs.
    pub command: Command,
    /// Source, resolved, and name in the workspace of everything that is copied.
    pub inputs: Vec<(PathBuf, PathBuf)>,
    pub stdin: Option<PathBuf>,
    /// Where the project has them, its own.
    pub data: Option<PathBuf>,
    pub docs: Option<PathBuf>,
    /// What was asked for, or what the caller has active.
    pub runtime: Option<PathBuf>,
    /// What the caller should know: which modules were brought along.
    pub notice: Option<String>,
}

/// Decides what is read for a submission, and reads none of it. Whether the worker may show the rest is the worker's to say.
pub fn taken(
    request: &Request,
    caller: &Caller,
    private: &Private<'_>,
) -> Result<Taken, PolicyError> {
    // Where workspaces are made here is nobody's input either.
    let workspace_root =
        canonical(&request.workspace_root).unwrap_or_else(|_| request.workspace_root.clone());
    let guard = Guard {
        request,
        workspace_root: &workspace_root,
        private,
    };
    let mut inputs = Vec::new();
    let command = match &request.command {
        Command::Script { script, args } => {
            let name = input_name::name_for(script, None)?;
            let script = caller.cwd.join(script);
            through_own_links(&script)?;
            inputs.push((script, name.clone()));
            Command::Script {
                script: name,
                args: args.clone(),
            }
        }
        Command::Argv(words) => Command::Argv(from_here(words, request, &caller.cwd)),
        Command::Shell => Command::Shell,
    };
    for input in &request.inputs {
        let name = input_name::name_for(&input.host, input.name.as_deref())?;
        inputs.push((input.host.clone(), name));
    }
    for (source, _) in &mut inputs {
        *source = guard.may_copy(source)?;
    }
    let notice = match request.siblings {
        Siblings::Left => None,
        Siblings::Brought => guard.siblings(&guard.project()?, &mut inputs)?,
    };
    let stdin = match &request.stdin {
        Stdin::File(path) => Some(guard.may_copy(path)?),
        Stdin::Null | Stdin::Caller => None,
    };
    let taken = Taken {
        data: guard.to_submit(InputDirectory::Data)?,
        docs: guard.to_submit(InputDirectory::Docs)?,
        runtime: request.runtime.clone().or_else(|| active(caller)),
        command,
        inputs,
        stdin,
        notice,
    };
    check_arguments(request, &taken, &workspace_root, caller)?;
    Ok(taken)
}

/// A program named relative to the current directory is named from / on, unless it is among the inputs.
fn from_here(words: &[OsString], request: &Request, cwd: &Path) -> Vec<OsString> {
    let mut words = words.to_vec();
    if let Some(first) = words.first_mut()
        && first.as_encoded_bytes().contains(&b'/')
        && own_program(first, request).is_none()
    {
        *first = cwd.join(&*first).into_os_string();
    }
    words
}

fn active(caller: &Caller) -> Option<PathBuf> {
    let names = ["VIRTUAL_ENV", "CONDA_PREFIX"];
    names.iter().find_map(|name| {
        let prefix = PathBuf::from(caller.env.get(std::ffi::OsStr::new(name))?);
        (prefix.is_absolute() && prefix.is_dir()).then_some(prefix)
    })
}

/// As a run would, but only for what is named relative to the current directory, which the worker has not: what is named
/// from / on may well be there.
fn check_arguments(
    request: &Request,
    taken: &Taken,
    workspace_root: &Path,
    caller: &Caller,
) -> Result<(), PolicyError> {
    let workspace = crate::workspace::path_for(workspace_root, &request.id);
    let mut inputs = taken.inputs.clone();
    for (name, dir) in [("data", &taken.data), ("docs", &taken.docs)] {
        inputs.extend(dir.clone().map(|dir| (dir, PathBuf::from(name))));
    }
    let args = match &taken.command {
        Command::Argv(words) => words.get(1..).unwrap_or_default(),
        Command::Script { args, .. } => args,
        Command::Shell => &[],
    };
    let visible = Visible {
        views: &[],
        inputs: &inputs,
        workspace: &workspace,
        cwd: &caller.cwd,
    };
    visible.check_arguments(args.iter().filter(|arg| !Path::new(arg).is_absolute()))
}
