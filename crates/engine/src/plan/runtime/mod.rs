//! Which program runs, and which directories outside the system runtime it needs.
//!
//! A command is resolved as the caller's shell would resolve it, and then followed, without executing
//! anything, through symlinks, venvs, pyenv shims and `#!` lines to the interpreter that the kernel will
//! load. Every prefix on that way is shown read-only at its own path, or the run stops with the
//! step named: another interpreter is never substituted silently.
//!
//! The caller's environment and flags are trusted to choose. What lies on disk is not: a venv in the project,
//! a pyvenv.cfg, a .python-version or a `#!` line may have been written by the code to be confined, and
//! would like to point at a home directory. `prefix` says what may be shown at all.

mod chain;
mod prefix;
mod python;
mod rlibs;
mod search;
mod shebang;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use chain::{Chain, Place};
pub use prefix::Refusal;
use prefix::{Kind, Links};
use shebang::Shebang;

/// What is known of the caller: where its commands are found and which directories are people's homes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// PATH.
    pub path: OsString,
    pub cwd: PathBuf,
    /// Those of HOME, VIRTUAL_ENV, CONDA_PREFIX, PYENV_VERSION, R_LIBS and R_LIBS_USER that are set.
    pub env: BTreeMap<OsString, OsString>,
    /// The home directories of the people on this host.
    pub homes: Vec<PathBuf>,
}

const CALLER_ENV: [&str; 6] = [
    "HOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYENV_VERSION",
    "R_LIBS",
    "R_LIBS_USER",
];

/// Large sites list many people; beyond this a file is not a list of users.
const PASSWD_BYTES_MAX: usize = 16 << 20;

impl Caller {
    /// The process's own environment and the users of this host.
    pub fn from_process() -> Caller {
        let env: BTreeMap<OsString, OsString> = CALLER_ENV
            .iter()
            .filter_map(|name| Some((OsString::from(name), std::env::var_os(name)?)))
            .collect();
        let passwd = prefix::read_head(Path::new("/etc/passwd"), Links::Followed, PASSWD_BYTES_MAX);
        let mut homes: Vec<PathBuf> = env
            .get(OsStr::new("HOME"))
            .map(PathBuf::from)
            .into_iter()
            .collect();
        homes.extend(homes_of(&passwd.unwrap_or_default()));
        Caller {
            path: std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into()),
            cwd: std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
            env,
            homes,
        }
    }

    /// What `~` means.
    fn home(&self) -> Option<PathBuf> {
        let set = self.env.get(OsStr::new("HOME")).map(PathBuf::from);
        set.or_else(|| self.homes.first().cloned())
            .filter(|home| home.is_absolute())
    }

    /// The prefix of an active environment: VIRTUAL_ENV or CONDA_PREFIX.
    fn active(&self, name: &str) -> Option<&Path> {
        self.env
            .get(OsStr::new(name))
            .map(Path::new)
            .filter(|prefix| prefix.is_absolute())
    }
}

/// The homes of root and of people in passwd(5): system accounts have directories of the system for a home.
fn homes_of(passwd: &[u8]) -> Vec<PathBuf> {
    let homes = passwd.split(|b| *b == b'\n').filter_map(|line| {
        let mut fields = line.split(|b| *b == b':').skip(2);
        let uid: u32 = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        let home = PathBuf::from(OsStr::from_bytes(fields.nth(2)?));
        ((uid == 0 || uid >= 1000) && home.is_absolute() && home.parent().is_some()).then_some(home)
    });
    homes.collect()
}

/// A program and what it needs to be started inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// The file to execute, and argument zero as well: Python finds its pyvenv.cfg by that path. Its
    /// directory is canonical; the file itself may be a symlink and must stay one.
    pub program: PathBuf,
    /// Arguments from a script's `#!` line; they come before the script's name.
    pub leading_args: Vec<OsString>,
    /// Canonical directories to show read-only at the same path; none lies below another or in the
    /// system runtime. Open them without following symlinks: what was checked is then what is shown.
    pub prefixes: Vec<PathBuf>,
    /// Other paths at which something of `prefixes`, or of the system, is to appear as well.
    pub aliases: Vec<Alias>,
    /// Directories that lead PATH inside.
    pub path_dirs: Vec<PathBuf>,
    /// Variables the runtime needs, and nothing else.
    pub env: Vec<(OsString, OsString)>,
    /// One line for the user if anything outside the system is used.
    pub notice: Option<String>,
}

/// A directory that programs reach through a symlinked directory: `source`, canonical and visible
/// already, is shown read-only at `at` too.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alias {
    pub at: PathBuf,
    pub source: PathBuf,
}

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
        why: Refusal,
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
        "follow the venv {venv:?}: there is no Python in its home {home:?}; make the venv anew"
    )]
    NoPython { venv: PathBuf, home: PathBuf },
    #[error("find command {command:?}: the runtime {prefix:?} does not have it in its bin")]
    NotInRuntime { command: OsString, prefix: PathBuf },
    #[error("use {prefix:?} as --runtime: it is not a directory with programs in its bin")]
    NamedHasNoPrograms { prefix: PathBuf },
    #[error(
        "run {path:?}: it is a version manager's stand-in, which works only outside; name the real one with --runtime PREFIX"
    )]
    Shim { path: PathBuf },
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
    /// The exit code by convention: 127 not found, 126 not executable, 125 Fumehood could not run it.
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

/// The runtime of `run -- COMMAND`.
pub fn for_command(
    command: &OsStr,
    caller: &Caller,
    named: Option<&Path>,
    project: &Path,
) -> Result<Runtime, RuntimeError> {
    let named = named.map(|prefix| Named::new(prefix, caller)).transpose()?;
    let mut chain = Chain::new(caller, named.as_ref().map(Named::real), project);
    if let Some(named) = &named {
        chain.admit_named(&named.written)?;
    }
    let found = chain.search().locate(command)?;
    build(chain, caller, named.as_ref(), &found, Vec::new())
}

/// The runtime of `run SCRIPT`: the interpreter of its `#!` line, else by its ending.
pub fn for_script(
    script: &Path,
    caller: &Caller,
    named: Option<&Path>,
    project: &Path,
) -> Result<Runtime, RuntimeError> {
    let named = named.map(|prefix| Named::new(prefix, caller)).transpose()?;
    let mut chain = Chain::new(caller, named.as_ref().map(Named::real), project);
    if let Some(named) = &named {
        chain.admit_named(&named.written)?;
    }
    let head = prefix::read_head(
        &caller.cwd.join(script),
        Links::Followed,
        shebang::HEAD_BYTES,
    )
    .map_err(|source| RuntimeError::ReadScript {
        script: script.to_path_buf(),
        source,
    })?;
    let (found, args) = match shebang::parse(&head) {
        Some(Shebang::Path { interpreter, args }) => (by_line(&chain, script, &interpreter)?, args),
        Some(Shebang::Env { name, args }) => (chain.search().locate(&name)?, args),
        Some(Shebang::Unsupported { line }) => {
            return Err(RuntimeError::InterpreterLine {
                script: script.to_path_buf(),
                line,
            });
        }
        None => (by_ending(&chain, script)?, Vec::new()),
    };
    build(chain, caller, named.as_ref(), &found, args)
}

/// The interpreter a `#!` line names by path. One named with `--runtime` goes before it: that is what the
/// user said last and loudest.
fn by_line(chain: &Chain<'_>, script: &Path, interpreter: &Path) -> Result<PathBuf, RuntimeError> {
    if interpreter.components().count() < 2 {
        let line = interpreter.to_string_lossy().into_owned();
        return Err(RuntimeError::InterpreterLine {
            script: script.to_path_buf(),
            line,
        });
    }
    match interpreter
        .file_name()
        .map(|name| chain.search().in_named(name))
        .transpose()?
        .flatten()
    {
        Some(program) => Ok(program),
        None => chain.search().locate(interpreter.as_os_str()),
    }
}

fn by_ending(chain: &Chain<'_>, script: &Path) -> Result<PathBuf, RuntimeError> {
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
struct Named {
    written: PathBuf,
    real: PathBuf,
}

impl Named {
    fn new(prefix: &Path, caller: &Caller) -> Result<Named, RuntimeError> {
        let written = caller.cwd.join(prefix);
        match written.canonicalize() {
            Ok(real) => Ok(Named { written, real }),
            Err(_) => Err(RuntimeError::NamedHasNoPrograms { prefix: written }),
        }
    }

    fn real(&self) -> &Path {
        &self.real
    }
}

fn build(
    mut chain: Chain<'_>,
    caller: &Caller,
    named: Option<&Named>,
    found: &Path,
    leading_args: Vec<OsString>,
) -> Result<Runtime, RuntimeError> {
    let mut notices = Vec::new();
    let program = chain.follow(found, Place::Start)?;
    let active = match named {
        Some(_) => None,
        None => active_for_shell(&mut chain, caller, &program, &mut notices),
    };
    notices.extend(passed_over(caller, named, &program));

    let own = program
        .parent()
        .and_then(Path::parent)
        .map(Path::to_path_buf);
    let lead = named.map(|named| named.real.clone()).or(active).or(own);
    let mut env = active_env(&chain, lead.as_deref());
    if rlibs::is_r(&program) {
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

/// A shell script means by `python` what its caller would get: the active environment. If that may not be
/// shown the shell still runs, and the line says what it goes without.
fn active_for_shell(
    chain: &mut Chain<'_>,
    caller: &Caller,
    program: &Path,
    notices: &mut Vec<String>,
) -> Option<PathBuf> {
    let name = program.file_name().and_then(OsStr::to_str)?;
    if !matches!(
        name,
        "sh" | "bash" | "dash" | "zsh" | "ksh" | "fish" | "make"
    ) {
        return None;
    }
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(prefix) = caller.active(variable) else {
            continue;
        };
        match chain.admit_named(prefix) {
            Ok(real) => return Some(real),
            Err(RuntimeError::Refused { why, .. }) => {
                notices.push(format!("without {variable} {}: {why}", shown(prefix)));
            }
            Err(error) => notices.push(format!("without {variable}: {error}")),
        }
    }
    None
}

/// A venv that is active, while the Python found on PATH is another: nothing wrong, but never silent.
fn passed_over(caller: &Caller, named: Option<&Named>, program: &Path) -> Option<String> {
    let venv = caller.active("VIRTUAL_ENV")?;
    let real = venv.canonicalize().unwrap_or_else(|_| venv.to_path_buf());
    let python = program
        .file_name()
        .and_then(OsStr::to_str)
        .is_some_and(|name| name.starts_with("python"));
    let other = named.is_none() && python && !program.starts_with(&real);
    other.then(|| format!("{}, not the active venv {}", shown(program), shown(venv)))
}

fn active_env(chain: &Chain<'_>, lead: Option<&Path>) -> Vec<(OsString, OsString)> {
    let Some(prefix) = lead else {
        return Vec::new();
    };
    let name = match chain.kind_of(prefix) {
        Some(Kind::Venv) => "VIRTUAL_ENV",
        Some(Kind::Conda) => "CONDA_PREFIX",
        _ => return Vec::new(),
    };
    vec![(name.into(), prefix.into())]
}

fn r_env(
    chain: &mut Chain<'_>,
    caller: &Caller,
    program: &Path,
) -> Result<Vec<(OsString, OsString)>, RuntimeError> {
    let mut env = Vec::new();
    for (name, dirs) in rlibs::libraries(program, caller) {
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

/// What leads PATH inside: the runtime's own programs. Where a console script asks `env` for an
/// interpreter that the program's directory has too, the one that was resolved goes first.
fn path_dirs(chain: &Chain<'_>, lead: Option<&Path>, program: &Path) -> Vec<PathBuf> {
    let own = program.parent().map(Path::to_path_buf);
    let bin = lead
        .filter(|prefix| chain.kind_of(prefix).is_some())
        .map(|prefix| prefix.join("bin"));
    let mut dirs: Vec<PathBuf> = Vec::new();
    for (name, dir) in chain.env_dirs() {
        let shadowed = own
            .as_ref()
            .is_some_and(|own| own != dir && prefix::is_executable(&own.join(name)));
        if shadowed || !prefix::is_system(dir) {
            dirs.push(dir.clone());
        }
    }
    dirs.extend(bin);
    dirs.extend(own.filter(|dir| !prefix::is_system(dir)));
    let mut seen = Vec::new();
    dirs.retain(|dir| {
        let new = !seen.contains(dir);
        seen.push(dir.clone());
        new
    });
    dirs
}

fn list(paths: &[PathBuf]) -> String {
    paths
        .iter()
        .map(|path| shown(path))
        .collect::<Vec<_>>()
        .join(", ")
}

/// A path for one line on a terminal: whoever named the directory must not get to steer the terminal.
fn shown(path: &Path) -> String {
    match path.to_str() {
        Some(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => format!("{path:?}"),
    }
}
