//! Request, resolved paths, runtime and limits become a [`Spec`]: what may be seen, under which names, with which
//! environment. Decides everything before anything is made.

mod environment;
mod imports;
pub mod limits;
mod links;
mod path_checks;
pub mod runtime;
mod siblings;
mod submit_inputs;
mod world_readable;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use sandbox::spec::{
    Bytes, ConfinementLevel, Exec, HostPath, InsidePath, LaunchPurpose, Layer, Limits,
    ProgramIdentity, ReadOnlyView, Spec, Terminal, ViewContent, WorkspaceKind,
};

use crate::plan::runtime::{Caller, Runtime, RuntimeError};
use crate::request::{Asker, Command, Input, Request, Stdin, Writers};
use crate::workspace::copy_in::CopyError;
use environment::environment;
use links::through_own_links;
use path_checks::{Guard, InputDirectory};
use store::types::escaping::quote_for_shell;
use store::types::input_name::{self, InputNameError};
pub use submit_inputs::{Taken, taken};

#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
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
    NotListed { path: PathBuf },
    #[error(
        "show {path:?}: not everybody may read {closed:?}, and a queued analysis is shown only what everybody may; where it \
         is meant, the operator of the worker can list it (/etc/fumehood/policy.toml, [read] roots)"
    )]
    NotEverybodys { path: PathBuf, closed: PathBuf },
    #[error(
        "show {path:?}: it holds too much to see whether everybody may read all of it; name what is needed of it, or have \
         the operator of the worker list it (/etc/fumehood/policy.toml, [read] roots)"
    )]
    TooLarge { path: PathBuf },
    #[error("show it as {inside:?}: {why}")]
    BadTarget { inside: PathBuf, why: &'static str },
    /// What the project itself decides about is shown only from the project.
    #[error(
        "show {path:?}: it leads to {real:?}, and a project shows only a visible directory of its own that holds \
         neither .git nor .env at any depth, nor more than 100,000 entries; if this one is meant, add this before the command:\n    {mend}"
    )]
    LeadsElsewhere {
        path: PathBuf,
        real: PathBuf,
        mend: String,
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
        "the argument {arg} names a file that exists here but will not inside; add this before the command:\n    {mend}"
    )]
    NotInside { arg: String, mend: String },
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

/// Everything about a run that can be decided before anything is made.
#[derive(Clone, Debug)]
pub struct Plan {
    pub program: PathBuf,
    pub argv: Vec<OsString>,
    pub views: Vec<ReadOnlyView>,
    /// Source and name in the workspace of everything that is copied in.
    pub inputs: Vec<(PathBuf, PathBuf)>,
    /// Resolved: no symlink, no `..`.
    pub workspace_root: PathBuf,
    pub project: PathBuf,
    /// Home directories on this host, by which hints are judged.
    pub homes: Vec<PathBuf>,
    /// What is piped in, resolved.
    pub stdin: Option<PathBuf>,
    pub runtime: Runtime,
    pub notices: Vec<String>,
}

/// Paths of Fumehood's own that no view may show.
pub struct Private<'a> {
    pub home: &'a Path,
    /// Where outputs are kept, and the database where it is a file: not always below the home.
    pub kept: &'a [PathBuf],
}

pub fn plan(
    request: &Request,
    caller: &Caller,
    private: &Private<'_>,
) -> Result<Plan, PolicyError> {
    let workspace_root =
        canonical(&request.workspace_root).map_err(|source| PolicyError::WorkspaceRoot {
            path: request.workspace_root.clone(),
            source,
        })?;
    if ["/dev", "/proc", "/sys"]
        .iter()
        .any(|dir| workspace_root.starts_with(dir))
    {
        let why = "it is the kernel's; choose a directory on a disk, or --workspace memory";
        return Err(PolicyError::Refused {
            path: workspace_root,
            why,
        });
    }
    let workspace = crate::workspace::path_for(&workspace_root, &request.id);
    let guard = Guard {
        request,
        workspace_root: &workspace_root,
        private,
    };
    let project = guard.project()?;
    guard.check_command()?;
    let mut views = Vec::new();
    for directory in InputDirectory::BOTH {
        guard.input_directory(directory, &workspace, &mut views)?;
    }
    for read in &request.reads {
        guard.read_root(read, &workspace, &mut views)?;
    }
    let (runtime, mut inputs, argv) = resolve_command(request, caller, &project, &workspace)?;
    for input in &request.inputs {
        inputs.push((
            input.host.clone(),
            input_name::name_for(&input.host, input.name.as_deref())?,
        ));
    }
    // Resolved here, once: what is checked is what is opened later.
    for (source, _) in &mut inputs {
        *source = guard.may_copy(source)?;
    }
    let brought = guard.siblings(&project, &mut inputs)?;
    let stdin = match &request.stdin {
        Stdin::File(path) => Some(guard.may_copy(path)?),
        Stdin::Null | Stdin::Caller => None,
    };
    guard.runtime_views(&runtime, &mut views)?;
    let visible = Visible {
        views: &views,
        inputs: &inputs,
        workspace: &workspace,
        cwd: &caller.cwd,
    };
    // Where a request was queued its words mean the submitter's files, not ours, of which we would only tell tales.
    if request.asked_by == Asker::Caller {
        visible.check_arguments(argv.get(1..).unwrap_or_default())?;
    }
    in_mount_order(&mut views);
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

/// What of a run is decided only when it is about to start.
pub struct Place<'a> {
    pub identity: ProgramIdentity,
    pub kind: WorkspaceKind,
    pub terminal: Terminal,
    pub level: ConfinementLevel,
    pub required: &'a BTreeSet<Layer>,
}

/// The spec of one run.
pub fn spec(
    plan: &Plan,
    request: &Request,
    limits: &Limits,
    place: Place<'_>,
) -> Result<Spec, PolicyError> {
    let workspace = crate::workspace::path_for(&plan.workspace_root, &request.id);
    let views = match place.level {
        ConfinementLevel::Full => plan.views.clone(),
        ConfinementLevel::Landlock => where_they_are(&plan.views),
    };
    let env = environment(request, &plan.runtime, limits, place.level, &workspace);
    let bytes = |text: &OsString| Bytes::from(text.as_os_str());
    Ok(Spec {
        program: InsidePath::new(&plan.program),
        argv: plan.argv.iter().map(bytes).collect(),
        env: env.iter().map(|(k, v)| (bytes(k), bytes(v))).collect(),
        workspace: HostPath::new(workspace),
        workspace_kind: place.kind,
        views,
        identity: place.identity,
        limits: limits.clone(),
        host_name: String::from("fumehood"),
        terminal: place.terminal,
        level: place.level,
        shared_memory: request.shared_memory,
        purpose: LaunchPurpose::Run,
        required: place.required.clone(),
        disabled_layers: sandbox::spec::DisabledLayers::from_environment(),
    })
}

/// Without mounts everything is seen under its own path, once.
fn where_they_are(views: &[ReadOnlyView]) -> Vec<ReadOnlyView> {
    let mut own: Vec<ReadOnlyView> = Vec::new();
    for view in views {
        let target = InsidePath::new(view.source.as_path());
        match own.iter_mut().find(|known| known.source == view.source) {
            Some(known) => merge(known, view),
            None => own.push(ReadOnlyView {
                target,
                ..view.clone()
            }),
        }
    }
    own
}

/// One source under one name, asked for twice: what either may do, and the stricter check of the two.
fn merge(known: &mut ReadOnlyView, other: &ReadOnlyView) {
    if other.exec == Exec::Allowed {
        known.exec = Exec::Allowed;
    }
    if other.content == ViewContent::Data {
        known.content = ViewContent::Data;
    }
}

/// Level `landlock`: the links in the workspace, by name, that stand for mounts there. Another name outside of it cannot
/// be had, unless the host has it already.
pub fn links(plan: &Plan, request: &Request) -> Result<Vec<(PathBuf, PathBuf)>, PolicyError> {
    let workspace = crate::workspace::path_for(&plan.workspace_root, &request.id);
    let mut links = Vec::new();
    for view in &plan.views {
        let (source, target) = (view.source.as_path(), view.target.as_path());
        match target.strip_prefix(&workspace) {
            Ok(name) if name.components().count() == 1 => {
                links.push((name.to_path_buf(), source.to_path_buf()));
            }
            Err(_) if canonical(target).is_ok_and(|real| real == source) => {}
            _ => {
                return Err(PolicyError::BadTarget {
                    inside: target.to_path_buf(),
                    why: "at level landlock a path is seen where it is, or by a name at the top of the workspace",
                });
            }
        }
    }
    Ok(links)
}

/// Whether whoever asked may be told that a path is there.
pub fn may_tell(request: &Request, path: &Path) -> bool {
    match &request.asked_by {
        Asker::Queue {
            writers: Writers::Others,
            ..
        } => world_readable::find(path).is_ok(),
        _ => true,
    }
}

fn canonical(path: &Path) -> std::io::Result<PathBuf> {
    std::fs::canonicalize(path)
}

fn canonical_of(path: &Path) -> Result<PathBuf, PolicyError> {
    canonical(path).map_err(|source| PolicyError::Unreachable {
        path: path.to_path_buf(),
        source,
    })
}

/// Parents before children, so that nothing covers what was put in place before it.
fn in_mount_order(views: &mut Vec<ReadOnlyView>) {
    views.sort_by_key(|v| (v.target.as_path().components().count(), v.target.clone()));
    views.dedup_by(|later, kept| {
        let same = later.target == kept.target;
        if same && later.source == kept.source {
            merge(kept, later);
        }
        same
    });
}

/// A path that can be a mount's place as it is written.
fn plain(path: &Path) -> Option<PathBuf> {
    let fine = path.is_absolute()
        && path
            .components()
            .all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    fine.then(|| path.components().collect())
}

/// Where `--read PATH:INSIDE` may put things: nowhere that would hide the system or our own.
fn inside_target(inside: &Path, workspace: &Path) -> Result<PathBuf, PolicyError> {
    let bad = |why| PolicyError::BadTarget {
        inside: inside.to_path_buf(),
        why,
    };
    let target = plain(&workspace.join(inside))
        .ok_or_else(|| bad("it must be a plain path without `..`"))?;
    let made = ["/etc", "/proc", "/sys", "/dev"];
    let mut taken = sandbox::SYSTEM_DIRS.iter().chain(&made);
    if target == Path::new("/") || taken.any(|t| target.starts_with(t)) {
        return Err(bad("the system is there"));
    }
    let own = workspace.starts_with(&target)
        || target.starts_with(workspace.join(sandbox::HIDDEN_DIR))
        || target == Path::new("/tmp");
    match own {
        true => Err(bad("it would cover the workspace")),
        false => Ok(target),
    }
}

/// The runtime, what is copied in for it, and the arguments from argument zero on.
type Resolved = (Runtime, Vec<(PathBuf, PathBuf)>, Vec<OsString>);

fn resolve_command(
    request: &Request,
    caller: &Caller,
    project: &Path,
    workspace: &Path,
) -> Result<Resolved, PolicyError> {
    let named = request.runtime.as_deref();
    match &request.command {
        Command::Script { script, args } => {
            let runtime = runtime::for_script(script, caller, named, project)?;
            let name = input_name::name_for(script, None)?;
            let mut argv = vec![runtime.program.clone().into_os_string()];
            argv.extend(runtime.leading_args.iter().cloned());
            argv.push(name.clone().into_os_string());
            argv.extend(args.iter().cloned());
            let script = caller.cwd.join(script);
            through_own_links(&script)?;
            Ok((runtime, vec![(script, name)], argv))
        }
        Command::Argv(words) => {
            let (first, rest) = words.split_first().ok_or_else(|| {
                PolicyError::Runtime(RuntimeError::NotFound {
                    command: OsString::new(),
                    searched: Vec::new(),
                })
            })?;
            let runtime = match own_program(first, request) {
                Some(name) => {
                    // It still gets the runtime that the caller named or has active, as a shell would.
                    let shell = runtime::for_command(OsStr::new("sh"), caller, named, project)?;
                    Runtime {
                        program: workspace.join(name),
                        leading_args: Vec::new(),
                        ..shell
                    }
                }
                None => runtime::for_command(first, caller, named, project)?,
            };
            let mut argv = vec![runtime.program.clone().into_os_string()];
            argv.extend(rest.iter().cloned());
            Ok((runtime, Vec::new(), argv))
        }
        Command::Shell => {
            let runtime = runtime::for_command(OsStr::new("bash"), caller, named, project)
                .or_else(|_| runtime::for_command(OsStr::new("sh"), caller, named, project))?;
            let mut argv = vec![runtime.program.clone().into_os_string()];
            // The system's start-up file is not shown, and where it can be seen it would be complained about.
            if runtime.program.ends_with("bash") {
                argv.push("--norc".into());
            }
            Ok((runtime, Vec::new(), argv))
        }
    }
}

/// `run --input tool -- ./tool`: a program that is copied in runs from the workspace.
fn own_program(command: &OsStr, request: &Request) -> Option<PathBuf> {
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

/// What the program will find under a path.
struct Visible<'a> {
    views: &'a [ReadOnlyView],
    inputs: &'a [(PathBuf, PathBuf)],
    workspace: &'a Path,
    cwd: &'a Path,
}

impl Visible<'_> {
    /// Stops before the start when an argument names a file that is here and will not be there.
    fn check_arguments<'a>(
        &self,
        args: impl IntoIterator<Item = &'a OsString>,
    ) -> Result<(), PolicyError> {
        for arg in args {
            let path = Path::new(arg);
            let bytes = arg.as_encoded_bytes();
            if bytes.is_empty() || bytes.len() > 4096 || bytes[0] == b'-' || bytes.contains(&b'\n')
            {
                continue;
            }
            let Ok(meta) = std::fs::metadata(self.cwd.join(path)) else {
                continue;
            };
            // A bare word may happen to be a directory's name; a path with a slash is meant as one.
            let meant =
                meta.is_file() || meta.is_dir() && bytes.contains(&b'/') && path != Path::new("/");
            if !meant || self.shows(path) {
                continue;
            }
            let quoted = quote_for_shell(arg);
            let mend = self.mending_line(path);
            return Err(PolicyError::NotInside { arg: quoted, mend });
        }
        Ok(())
    }

    /// The option that puts the file where the argument looks for it.
    fn mending_line(&self, path: &Path) -> String {
        let plain: PathBuf = path
            .components()
            .filter(|c| *c != Component::CurDir)
            .collect();
        let option = if path.is_absolute() {
            plain.into_os_string()
        } else if plain.components().any(|c| c == Component::ParentDir) {
            // It leads out of the workspace, to a place that only a view can be put at.
            let real = canonical(&self.cwd.join(path)).unwrap_or_else(|_| self.cwd.join(path));
            with_colon(&real, &without_parents(&self.workspace.join(path)))
        } else if plain.components().count() == 1 {
            return format!("--input {}", quote_for_shell(plain.as_os_str()));
        } else {
            // `sub/file.csv` would arrive as `file.csv`; the argument names `sub/file.csv`.
            return format!("--input {}", quote_for_shell(&with_colon(&plain, &plain)));
        };
        format!("--read {}", quote_for_shell(&option))
    }

    fn shows(&self, path: &Path) -> bool {
        let inside = without_parents(&self.workspace.join(path));
        let system = [
            "/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/etc", "/dev",
        ];
        system.iter().any(|s| inside.starts_with(s))
            || self
                .views
                .iter()
                .any(|v| inside.starts_with(v.target.as_path()))
            || self
                .inputs
                .iter()
                .any(|(_, name)| inside.starts_with(self.workspace.join(name)))
    }
}

fn with_colon(first: &Path, second: &Path) -> OsString {
    let mut both = first.as_os_str().to_owned();
    both.push(":");
    both.push(second);
    both
}

/// A path with `.` and `..` taken out by name. Inside, no directory on the way is a link.
fn without_parents(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
