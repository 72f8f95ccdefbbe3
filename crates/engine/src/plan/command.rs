//! From the command of a request to the runtime and the argument list.

use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use store::types::input_name;

use super::error::PlanError;
use super::links::resolve_own_links;
use crate::plan::runtime::{self, CallerEnvironment, Runtime, RuntimeError};
use crate::request::{Command, Input};
use crate::settings::Request;

/// The runtime, the inputs (source, name) that the command needs, and the arguments including argument zero.
pub(super) type ResolvedCommand = (Runtime, Vec<(PathBuf, PathBuf)>, Vec<OsString>);

pub(super) fn resolve_command(
    request: &Request,
    caller: &CallerEnvironment,
    project: &Path,
    workspace: &Path,
) -> Result<ResolvedCommand, PlanError> {
    let named = request.runtime.as_deref();
    let find = |command: &OsStr| runtime::for_command(command, caller, named, project);
    let program = |runtime: &Runtime| vec![runtime.program.clone().into_os_string()];
    match &request.command {
        Command::Script { script, args } => {
            let runtime = runtime::for_script(script, caller, named, project)?;
            let name = input_name::name_for(script, None)?;
            let mut argv = program(&runtime);
            argv.extend(runtime.leading_args.iter().cloned());
            argv.push(name.clone().into_os_string());
            argv.extend(args.iter().cloned());
            let script = resolve_own_links(&caller.cwd.join(script))?;
            Ok((runtime, vec![(script, name)], argv))
        }
        Command::Argv(words) => {
            let none = || RuntimeError::not_found(OsStr::new(""), &[]);
            let (first, rest) = words.split_first().ok_or_else(none)?;
            let runtime = match own_program(first, request) {
                Some(name) => {
                    // The program still gets the runtime that the caller named or activated, as a shell would.
                    Runtime {
                        program: workspace.join(name),
                        leading_args: Vec::new(),
                        ..find(OsStr::new("sh"))?
                    }
                }
                None => find(first)?,
            };
            let mut argv = program(&runtime);
            argv.extend(rest.iter().cloned());
            Ok((runtime, Vec::new(), argv))
        }
        Command::Shell => {
            let runtime = find(OsStr::new("bash")).or_else(|_| find(OsStr::new("sh")))?;
            let mut argv = program(&runtime);
            // /etc/bash.bashrc is not shown. At level landlock it can be seen but not read, and bash would complain.
            if runtime.program.ends_with("bash") {
                argv.push("--norc".into());
            }
            Ok((runtime, Vec::new(), argv))
        }
    }
}

/// The workspace path of a program that is itself an input, as in `run --input tool -- ./tool`.
pub(super) fn own_program(command: &OsStr, request: &Request) -> Option<PathBuf> {
    let relative = Path::new(command);
    if relative.is_absolute() || !command.as_encoded_bytes().contains(&b'/') {
        return None;
    }
    let name: PathBuf = relative
        .components()
        .filter(|c| *c != Component::CurDir)
        .collect();
    let first = name.components().next()?;
    let copied = |input: &Input| {
        let given = input_name::name_for(&input.host, input.name.as_deref()).ok();
        given.is_some_and(|n| n.components().next() == Some(first))
    };
    let plain = name.components().all(|c| matches!(c, Component::Normal(_)));
    (plain && request.inputs.iter().any(copied)).then_some(name)
}
