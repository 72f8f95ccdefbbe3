//! Which program runs, and which directories outside the system runtime it needs.
//!
//! A command is resolved as the caller's shell would resolve it. The result is then followed through symlinks, venvs,
//! pyenv shims and `#!` lines to the interpreter that the kernel will load. Nothing is executed. Every prefix on the
//! way is shown read-only at its own path, or the run stops with an error that names the step. Another interpreter is
//! never substituted silently.
//!
//! The caller's environment and options are trusted to choose a runtime. Files on disk are not: the code to be
//! confined may have written a venv in the project, a pyvenv.cfg, a .python-version or a `#!` line that points at a
//! home directory. `prefix.rs` decides which directories may be shown at all.
//!
//! - `caller.rs`: the caller's PATH, variables and home directories.
//! - `search.rs`: from a command name to a file.
//! - `shebang.rs`: the `#!` line of a script.
//! - `chain.rs`: from a file to all directories that it needs.
//! - `prefix.rs`: how a runtime is recognised, and which directories are never shown.
//! - `python.rs`: pyvenv.cfg and pyenv.
//! - `r_libraries.rs`: R's user libraries.
//! - `host_files.rs`: bounded reads of untrusted files.
//! - `error.rs`: why there is no runtime.

mod caller;
mod chain;
mod error;
mod host_files;
mod prefix;
mod python;
mod r_libraries;
mod search;
mod shebang;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

pub use caller::CallerEnvironment;
use chain::{InterpreterChain, PathOrigin};
pub use error::{PrefixRefusal, RuntimeError};
use error::{escape_for_line, list};
use host_files::LinkPolicy;
use prefix::PrefixKind;
pub(crate) use python::venv_settings;
use shebang::Shebang;

/// A program, and what it needs to start inside the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// The file to execute, and also argument zero: Python finds its pyvenv.cfg by that path. The directory is
    /// canonical. The file itself may be a symlink and must stay one.
    pub program: PathBuf,
    /// Arguments of the script's `#!` line; they precede the script's name.
    pub leading_args: Vec<OsString>,
    /// Canonical directories to show read-only at the same path. None lies below another or in the system runtime.
    /// Open them without following symlinks, so that the checked directories are the shown ones.
    pub prefixes: Vec<PathBuf>,
    /// Further paths at which parts of `prefixes`, or of the system, must appear.
    pub aliases: Vec<RuntimeAlias>,
    /// Directories to put first in PATH inside.
    pub path_dirs: Vec<PathBuf>,
    /// The variables that the runtime needs.
    pub env: Vec<(OsString, OsString)>,
    /// One line for the user if anything outside the system is used.
    pub notice: Option<String>,
}

/// A directory that programs reach through a symlink to a directory. `source`, which is canonical and already
/// visible, is also shown read-only at `at`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuntimeAlias {
    /// The further path at which the directory is shown.
    pub at: PathBuf,
    /// The path of the directory.
    pub source: PathBuf,
}

/// The runtime of `run -- COMMAND`.
pub fn for_command(
    command: &OsStr,
    caller: &CallerEnvironment,
    named: Option<&Path>,
    project: &Path,
) -> Result<Runtime, RuntimeError> {
    let named = NamedPrefix::find(named, caller)?;
    let chain = start_chain(caller, named.as_ref(), project)?;
    let found = chain.search().locate(command)?;
    build(chain, caller, named.as_ref(), &found, Vec::new())
}

/// The runtime of `run SCRIPT`: the interpreter of the `#!` line, or else the one for the file name extension.
pub fn for_script(
    script: &Path,
    caller: &CallerEnvironment,
    named: Option<&Path>,
    project: &Path,
) -> Result<Runtime, RuntimeError> {
    let named = NamedPrefix::find(named, caller)?;
    let chain = start_chain(caller, named.as_ref(), project)?;
    let head = host_files::read_head(
        &caller.cwd.join(script),
        LinkPolicy::Follow,
        shebang::HEAD_BYTES,
    )
    .map_err(|source| RuntimeError::ReadScript {
        script: script.to_path_buf(),
        source,
    })?;
    let (found, args) = match shebang::parse(&head) {
        Some(Shebang::Path { interpreter, args }) => {
            (interpreter_by_path(&chain, script, &interpreter)?, args)
        }
        Some(Shebang::Env { name, args }) => (chain.search().locate(&name)?, args),
        Some(Shebang::Unsupported { line }) => {
            return Err(RuntimeError::interpreter_line(script, line));
        }
        None => (interpreter_by_extension(&chain, script)?, Vec::new()),
    };
    build(chain, caller, named.as_ref(), &found, args)
}

/// The interpreter that a `#!` line names by path. An interpreter of the same name in the `--runtime` prefix takes
/// precedence, because the user chose it explicitly.
fn interpreter_by_path(
    chain: &InterpreterChain<'_>,
    script: &Path,
    interpreter: &Path,
) -> Result<PathBuf, RuntimeError> {
    if interpreter.components().count() < 2 {
        let line = interpreter.to_string_lossy().into_owned();
        return Err(RuntimeError::interpreter_line(script, line));
    }
    if let Some(name) = interpreter.file_name()
        && let Some(program) = chain.search().in_named(name)?
    {
        return Ok(program);
    }
    chain.search().locate(interpreter.as_os_str())
}

fn interpreter_by_extension(
    chain: &InterpreterChain<'_>,
    script: &Path,
) -> Result<PathBuf, RuntimeError> {
    let locate = |name: &str| chain.search().locate(OsStr::new(name));
    match script.extension().and_then(OsStr::to_str) {
        Some("py") => locate("python3"),
        Some("R" | "r") => locate("Rscript"),
        Some("jl") => locate("julia"),
        Some("sh") => match locate("bash") {
            Err(RuntimeError::NotFound { .. }) => locate("sh"),
            found => found,
        },
        _ => Err(RuntimeError::NoInterpreter {
            script: script.to_path_buf(),
        }),
    }
}

/// The prefix given with `--runtime`.
struct NamedPrefix {
    written: PathBuf,
    real: PathBuf,
}

impl NamedPrefix {
    fn find(
        prefix: Option<&Path>,
        caller: &CallerEnvironment,
    ) -> Result<Option<NamedPrefix>, RuntimeError> {
        let Some(prefix) = prefix else {
            return Ok(None);
        };
        let written = caller.cwd.join(prefix);
        match written.canonicalize() {
            Ok(real) => Ok(Some(NamedPrefix { written, real })),
            Err(_) => Err(RuntimeError::NamedHasNoPrograms { prefix: written }),
        }
    }
}

fn start_chain<'a>(
    caller: &'a CallerEnvironment,
    named: Option<&'a NamedPrefix>,
    project: &Path,
) -> Result<InterpreterChain<'a>, RuntimeError> {
    let mut chain = InterpreterChain::new(caller, named.map(|n| n.real.as_path()), project);
    if let Some(named) = named {
        chain.admit_named(&named.written)?;
    }
    Ok(chain)
}

fn build(
    mut chain: InterpreterChain<'_>,
    caller: &CallerEnvironment,
    named: Option<&NamedPrefix>,
    found: &Path,
    leading_args: Vec<OsString>,
) -> Result<Runtime, RuntimeError> {
    let mut notices = Vec::new();
    let program = chain.follow(found, PathOrigin::Command)?;
    let active = match named {
        Some(_) => None,
        None => admit_active_for_shell(&mut chain, caller, &program, &mut notices),
    };
    notices.extend(unused_venv_notice(caller, named, &program));

    let own = program.parent().and_then(Path::parent);
    let lead = named.map(|named| named.real.clone()).or(active);
    let lead = lead.or(own.map(Path::to_path_buf));
    let mut env = active_env(&chain, lead.as_deref());
    if r_libraries::is_r(&program) {
        env.extend(r_env(&mut chain, caller, &program)?);
    }
    let path_dirs = path_dirs(&chain, lead.as_deref(), &program);
    let (prefixes, aliases) = chain.finish();
    if !prefixes.is_empty() {
        notices.insert(0, format!("{} (read-only)", list(&prefixes)));
    }
    let notice = (!notices.is_empty()).then(|| format!("runtime: {}", notices.join("; ")));
    Ok(Runtime {
        program,
        leading_args,
        prefixes,
        aliases,
        path_dirs,
        env,
        notice,
    })
}

/// For a shell script, admits the caller's active environment, because `python` in the script means that one. If the
/// environment may not be shown, the shell still runs, and a notice says what is missing.
fn admit_active_for_shell(
    chain: &mut InterpreterChain<'_>,
    caller: &CallerEnvironment,
    program: &Path,
    notices: &mut Vec<String>,
) -> Option<PathBuf> {
    const SHELLS: [&str; 7] = ["sh", "bash", "dash", "zsh", "ksh", "fish", "make"];
    let name = program.file_name().and_then(OsStr::to_str)?;
    if !SHELLS.contains(&name) {
        return None;
    }
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(prefix) = caller.active(variable) else {
            continue;
        };
        match chain.admit_named(prefix) {
            Ok(real) => return Some(real),
            Err(RuntimeError::Refused { why, .. }) => {
                let prefix = escape_for_line(prefix);
                notices.push(format!("without {variable} {prefix}: {why}"));
            }
            Err(error) => notices.push(format!("without {variable}: {error}")),
        }
    }
    None
}

/// A notice for the case that a venv is active, but PATH leads to another Python. This is allowed, but must not go
/// unnoticed.
fn unused_venv_notice(
    caller: &CallerEnvironment,
    named: Option<&NamedPrefix>,
    program: &Path,
) -> Option<String> {
    let venv = caller.active("VIRTUAL_ENV")?;
    let real = venv.canonicalize().unwrap_or_else(|_| venv.to_path_buf());
    let name = program.file_name().and_then(OsStr::to_str);
    let python = name.is_some_and(|name| name.starts_with("python"));
    let (program_shown, venv) = (escape_for_line(program), escape_for_line(venv));
    let other = named.is_none() && python && !program.starts_with(&real);
    other.then(|| format!("{program_shown}, not the active venv {venv}"))
}

fn active_env(chain: &InterpreterChain<'_>, lead: Option<&Path>) -> Vec<(OsString, OsString)> {
    let Some(prefix) = lead else {
        return Vec::new();
    };
    let name = match chain.kind_of(prefix) {
        Some(PrefixKind::Venv) => "VIRTUAL_ENV",
        Some(PrefixKind::Conda) => "CONDA_PREFIX",
        _ => return Vec::new(),
    };
    vec![(name.into(), prefix.into())]
}

fn r_env(
    chain: &mut InterpreterChain<'_>,
    caller: &CallerEnvironment,
    program: &Path,
) -> Result<Vec<(OsString, OsString)>, RuntimeError> {
    let mut env = Vec::new();
    for (name, dirs) in r_libraries::libraries(program, caller) {
        for dir in &dirs {
            chain.admit_library(dir)?;
        }
        // A directory with a colon in its name cannot be listed; R could not use it either.
        if let Ok(value) = std::env::join_paths(&dirs) {
            env.push((name, value));
        }
    }
    Ok(env)
}

/// The directories to put first in PATH inside. If a console script asks `env` for an interpreter that the program's
/// own directory also has, the resolved interpreter's directory goes first.
fn path_dirs(chain: &InterpreterChain<'_>, lead: Option<&Path>, program: &Path) -> Vec<PathBuf> {
    let own = program.parent().map(Path::to_path_buf);
    let bin = lead
        .filter(|prefix| chain.kind_of(prefix).is_some())
        .map(|prefix| prefix.join("bin"));
    let mut dirs: Vec<PathBuf> = Vec::new();
    for (name, dir) in chain.env_dirs() {
        let shadowed = own
            .as_ref()
            .is_some_and(|own| own != dir && host_files::is_executable(&own.join(name)));
        if shadowed || !prefix::is_system(dir) {
            dirs.push(dir.clone());
        }
    }
    dirs.extend(bin);
    dirs.extend(own.filter(|dir| !prefix::is_system(dir)));
    let mut seen = HashSet::new();
    dirs.retain(|dir| seen.insert(dir.clone()));
    dirs
}
