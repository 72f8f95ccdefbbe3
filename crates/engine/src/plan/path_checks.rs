//! Which host paths may be shown or copied, depending on who asks.

use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use sandbox::spec::{Exec, HostPath, InsidePath, Owner, ReadOnlyView, ViewContent};

use super::command::own_program;
use super::error::PlanError;
use super::links::{self, links_are_own};
use super::paths::{canonical_of, inside_target, plain};
use super::{siblings, world_readable};
use crate::plan::runtime::{Runtime, RuntimeAlias, RuntimeError};
use crate::request::{
    Command, NamedBy, NamedDirectory, QueueWriters, ReadRoot, RequestOrigin, SiblingModules,
};
use crate::settings::Request;
use store::types::escaping::quote_for_shell;

const CHANGED: &str = "it changed while it was looked at";

/// The two directories of a project that an analysis may read.
#[derive(Clone, Copy)]
pub(super) enum InputDirectory {
    Data,
    Docs,
}

impl InputDirectory {
    pub(super) const BOTH: [InputDirectory; 2] = [InputDirectory::Data, InputDirectory::Docs];

    fn name(self) -> &'static str {
        match self {
            InputDirectory::Data => "data",
            InputDirectory::Docs => "docs",
        }
    }

    fn flag(self) -> &'static str {
        match self {
            InputDirectory::Data => "--data",
            InputDirectory::Docs => "--docs",
        }
    }

    fn named(self, request: &Request) -> Option<&NamedDirectory> {
        match self {
            InputDirectory::Data => request.data.as_ref(),
            InputDirectory::Docs => request.docs.as_ref(),
        }
    }
}

/// Fumehood's own paths, which no view may show.
pub struct PrivatePaths<'a> {
    /// The directory of [`Home`](crate::home::Home).
    pub home: &'a Path,
    /// The artifact store and, if it is a file, the database. They need not be below the home.
    pub records: &'a [PathBuf],
}

/// The checks for one request.
pub(super) struct PathChecks<'a> {
    pub(super) request: &'a Request,
    pub(super) workspace_root: &'a Path,
    pub(super) private: &'a PrivatePaths<'a>,
}

impl PathChecks<'_> {
    /// Adds the views of `data/` or `docs/`: at its host path, and by its name in the working directory.
    pub(super) fn add_input_directory(
        &self,
        directory: InputDirectory,
        workspace: &Path,
        views: &mut Vec<ReadOnlyView>,
    ) -> Result<(), PlanError> {
        let Some((given, real)) = self.find_directory(directory)? else {
            return Ok(());
        };
        if !real.is_dir() {
            let flag = directory.flag();
            return Err(PlanError::NotADirectory { flag, path: given });
        }
        self.check_may_show(&real)?;
        let mut targets = vec![real.clone(), workspace.join(directory.name())];
        targets.extend(plain(&given).filter(|p| *p != real && !self.is_in_workspace(p)));
        let view = |target: PathBuf| self.view(&real, &target, Exec::Refused, ViewContent::Data);
        views.extend(targets.into_iter().map(view));
        Ok(())
    }

    /// Finds the directory that somebody named, or the project's own; returns it as given and resolved. It is
    /// resolved once, so the checked path is the shown path. A queued request already names what was found when it
    /// was submitted.
    fn find_directory(
        &self,
        directory: InputDirectory,
    ) -> Result<Option<(PathBuf, PathBuf)>, PlanError> {
        let queued = self.request.asked_by != RequestOrigin::Caller;
        match directory.named(self.request) {
            Some(named) if named.named_by == NamedBy::ProjectFile => {
                let real = self.resolve_in_project(&named.path, directory)?;
                Ok(Some((named.path.clone(), real)))
            }
            Some(named) => {
                let real = self.resolve(&named.path)?;
                if queued && !links::is_stable_path_to(&named.path, &real) {
                    let (flag, path) = (directory.flag(), named.path.clone());
                    return Err(PlanError::QueuedLink { flag, path });
                }
                Ok(Some((named.path.clone(), real)))
            }
            None if queued => Ok(None),
            None => {
                let usual = self.request.project.join(directory.name());
                // A project may lack the directory. A regular file of that name counts as lacking it.
                if !usual.is_dir() {
                    return Ok(None);
                }
                let real = self.resolve_in_project(&usual, directory)?;
                Ok(Some((usual, real)))
            }
        }
    }

    /// The directory that a submission names for the worker. If the path leads through a symlink that could change
    /// before the worker looks, submit the resolved path.
    pub(super) fn directory_to_submit(
        &self,
        directory: InputDirectory,
    ) -> Result<Option<PathBuf>, PlanError> {
        match directory.named(self.request) {
            // The directory may exist on the worker only.
            Some(named) if named.named_by == NamedBy::Caller => {
                let here = named.path.canonicalize().ok();
                let given = || named.path.clone();
                Ok(Some(match links::is_stable_path(&named.path) {
                    true => given(),
                    false => here.unwrap_or_else(given),
                }))
            }
            _ => Ok(self.find_directory(directory)?.map(
                |(given, real)| match links::is_stable_path(&given) {
                    true => given,
                    false => real,
                },
            )),
        }
    }

    /// Resolves a directory that the project chose, by a symlink or in its configuration file. After `git clone` all
    /// symlinks belong to the caller, so ownership does not show who chose the target. The rest of the project must
    /// stay hidden (promise P2).
    fn resolve_in_project(
        &self,
        path: &Path,
        directory: InputDirectory,
    ) -> Result<PathBuf, PlanError> {
        let (real, project) = (canonical_of(path)?, canonical_of(&self.request.project)?);
        let own = project.join(directory.name());
        match real == own || links::may_project_show(&real, &project) && links_are_own(path)? {
            true => Ok(real),
            false => {
                let named = quote_for_shell(real.as_os_str());
                Err(PlanError::ProjectLinkRefused {
                    path: path.to_path_buf(),
                    suggestion: format!("{} {named}", directory.flag()),
                    real,
                })
            }
        }
    }

    /// Adds the views of a `--read` path. The tree may be executed, since it can hold a tool or an environment.
    pub(super) fn add_read_root(
        &self,
        read: &ReadRoot,
        workspace: &Path,
        views: &mut Vec<ReadOnlyView>,
    ) -> Result<(), PlanError> {
        let real = self.resolve(&read.host)?;
        self.check_may_show(&real)?;
        let targets = match &read.inside {
            Some(inside) => vec![inside_target(inside, workspace)?],
            None => {
                let as_given = plain(&read.host).filter(|p| *p != real);
                [real.clone()].into_iter().chain(as_given).collect()
            }
        };
        let view = |target: PathBuf| self.view(&real, &target, Exec::Allowed, ViewContent::Data);
        views.extend(targets.into_iter().map(view));
        Ok(())
    }

    pub(super) fn add_runtime_views(
        &self,
        runtime: &Runtime,
        views: &mut Vec<ReadOnlyView>,
    ) -> Result<(), PlanError> {
        for prefix in &runtime.prefixes {
            self.check_runtime_prefix(prefix)?;
            views.push(self.view(prefix, prefix, Exec::Allowed, ViewContent::Runtime));
        }
        for alias in &runtime.aliases {
            self.check_world_readable(&alias.source)
                .or_else(|e| self.hide_from_other_users(e))?;
            let RuntimeAlias { at, source } = alias;
            views.push(self.view(source, at, Exec::Allowed, ViewContent::Runtime));
        }
        Ok(())
    }

    fn check_runtime_prefix(&self, prefix: &Path) -> Result<(), PlanError> {
        let may = self
            .check_readable_roots(prefix)
            .and_then(|()| self.check_not_private(prefix))
            .and_then(|()| self.check_world_readable(prefix));
        may.or_else(|e| self.hide_from_other_users(e))
    }

    /// Replaces an error about an interpreter path that the other user did not name: the original message would
    /// reveal what lies on this host.
    fn hide_from_other_users(&self, error: PlanError) -> Result<(), PlanError> {
        match self.is_from_other_users() && self.request.runtime.is_none() {
            true => Err(RuntimeError::not_found(OsStr::new(""), &[]).into()),
            false => Err(error),
        }
    }

    fn check_may_show(&self, real: &Path) -> Result<(), PlanError> {
        let refuse = |why| Err(PlanError::refused(real, why));
        for kernel in ["/proc", "/sys", "/dev"] {
            if real.starts_with(kernel) {
                return refuse("it is the kernel's, and never shown");
            }
        }
        if !real.is_dir() && !real.is_file() {
            return refuse("it is neither a directory nor a plain file");
        }
        // Fumehood puts generated files in /etc, and the host's accounts and keys must stay hidden.
        if Path::new("/etc").starts_with(real) {
            return refuse(
                "it contains the system's accounts and keys; show single files or directories in it",
            );
        }
        self.check_not_private(real)?;
        self.check_readable_roots(real)?;
        self.check_world_readable(real)
    }

    /// Checks and resolves a file that the runner itself reads and copies.
    pub(super) fn resolve_copied_source(&self, source: &Path) -> Result<PathBuf, PlanError> {
        if let RequestOrigin::Queue { staged, .. } = &self.request.asked_by {
            return resolve_staged_source(source, staged);
        }
        let real = canonical_of(source)?;
        self.check_not_private(&real)?;
        self.check_readable_roots(&real)?;
        Ok(real)
    }

    /// Checks and resolves the sources of all inputs. A script is the first input, and its path is resolved already, so
    /// a symlink in that path is new.
    pub(super) fn resolve_copied_sources(
        &self,
        inputs: &mut [(PathBuf, PathBuf)],
    ) -> Result<(), PlanError> {
        let is_script = matches!(self.request.command, Command::Script { .. });
        for (index, (source, _)) in inputs.iter_mut().enumerate() {
            let real = self.resolve_copied_source(source)?;
            if is_script && index == 0 && real != *source {
                return Err(PlanError::refused(source, CHANGED));
            }
            *source = real;
        }
        Ok(())
    }

    /// With `--siblings`, adds the modules that the script imports to `inputs`, of which the script is the first.
    /// Returns a message that lists them.
    pub(super) fn add_siblings(
        &self,
        project: &Path,
        inputs: &mut Vec<(PathBuf, PathBuf)>,
    ) -> Result<Option<String>, PlanError> {
        if self.request.siblings == SiblingModules::Exclude {
            return Ok(None);
        }
        let (Command::Script { .. }, Some((script, _))) = (&self.request.command, inputs.first())
        else {
            return Err(PlanError::SiblingsOfCommand);
        };
        let named: Vec<PathBuf> = inputs.iter().map(|(_, name)| name.clone()).collect();
        let found = siblings::find_siblings(script, project, &named)?;
        // The search found these paths without following links, below a resolved directory. Do not resolve them
        // again: that would follow a link created meanwhile.
        for (source, _) in &found.inputs {
            self.check_not_private(source)?;
            self.check_readable_roots(source)?;
        }
        inputs.extend(found.inputs);
        Ok(found.notice)
    }

    /// Refuses a path that contains, or lies in, the workspaces or Fumehood's own files.
    fn check_not_private(&self, real: &Path) -> Result<(), PlanError> {
        let refuse = |why| Err(PlanError::refused(real, why));
        if self.workspace_root.starts_with(real) {
            return refuse("it contains the workspaces of other analyses");
        }
        if self.is_in_workspace(real) {
            return refuse("it is the workspace of an analysis");
        }
        let records = self.private.records.iter().map(PathBuf::as_path);
        for own in [self.private.home].into_iter().chain(records) {
            let own = own.canonicalize().unwrap_or_else(|_| own.to_path_buf());
            if own.starts_with(real) || real.starts_with(&own) {
                return refuse(
                    "it contains Fumehood's own records (FUMEHOOD_HOME, the database or the artifacts)",
                );
            }
        }
        Ok(())
    }

    /// Whether a path lies in a workspace. Workspaces are recognised by name, below any root.
    fn is_in_workspace(&self, path: &Path) -> bool {
        let names = path.components().map(|c| c.as_os_str().as_encoded_bytes());
        let mut names = names.map(|n| n.strip_prefix(b".").unwrap_or(n));
        names.any(|name| name.starts_with(b"scidex-analysis-"))
    }

    fn check_readable_roots(&self, real: &Path) -> Result<(), PlanError> {
        if self.request.readable_roots.is_none() {
            return Ok(());
        }
        let system = ["/usr", "/bin", "/lib", "/lib64", "/sbin"];
        let listed =
            self.is_in_readable_roots(real) || system.iter().any(|root| real.starts_with(root));
        match listed {
            true => Ok(()),
            false => Err(PlanError::NotInReadableRoots {
                path: real.to_path_buf(),
            }),
        }
    }

    /// Whether the operator lists a directory above the path. Then every requester may read it.
    fn is_in_readable_roots(&self, real: &Path) -> bool {
        let mut roots = self.request.readable_roots.iter().flatten();
        roots.any(|root| root.canonicalize().is_ok_and(|root| real.starts_with(root)))
    }

    /// Whether the requester may have fewer rights than this process.
    fn is_from_other_users(&self) -> bool {
        let asked_by = &self.request.asked_by;
        matches!(asked_by, RequestOrigin::Queue { writers, .. } if *writers == QueueWriters::OtherUsers)
    }

    /// Resolves a path. A requester with fewer rights must not learn about directories that are not world-readable.
    fn resolve(&self, path: &Path) -> Result<PathBuf, PlanError> {
        if !self.is_from_other_users() {
            return canonical_of(path);
        }
        // Below a directory that the operator lists, resolve with the rights of this process. A link or `..` that leads
        // out of it does not qualify.
        let mut roots = self.request.readable_roots.iter().flatten();
        let is_plain = !path.components().any(|part| part == Component::ParentDir);
        let listed = is_plain && roots.any(|root| path.starts_with(root));
        match path.canonicalize() {
            Ok(real) if listed && self.is_in_readable_roots(&real) => Ok(real),
            // The target is world-readable, so nothing is revealed.
            Ok(real) if listed && world_readable::resolve(&real).is_ok_and(|open| open == real) => {
                Ok(real)
            }
            _ => world_readable::resolve(path),
        }
    }

    /// For a requester with fewer rights: fails unless every user of the host may read the path, or the operator
    /// lists it.
    fn check_world_readable(&self, real: &Path) -> Result<(), PlanError> {
        if !self.is_from_other_users() || self.is_in_readable_roots(real) {
            return Ok(());
        }
        // The path was resolved before, so a symlink in it is new.
        if world_readable::resolve(real)? != real {
            return Err(PlanError::refused(real, CHANGED));
        }
        // Without root the program runs as this process's user and reads what this process can read. Under root it runs
        // with a uid that owns nothing.
        match real.is_dir() && !rustix::process::geteuid().is_root() {
            true => world_readable::check_nothing_private(real),
            false => Ok(()),
        }
    }

    fn view(&self, source: &Path, target: &Path, exec: Exec, content: ViewContent) -> ReadOnlyView {
        ReadOnlyView {
            source: HostPath::new(source),
            target: InsidePath::new(target),
            exec,
            content,
            // For a requester with fewer rights, do not map ownership: the owner's private files stay unreadable
            // inside.
            owner: match self.is_from_other_users() && !self.is_in_readable_roots(source) {
                true => Owner::AsIs,
                false => Owner::Mapped,
            },
        }
    }

    pub(super) fn resolve_project(&self) -> Result<PathBuf, PlanError> {
        let path = &self.request.project;
        if self.is_from_other_users() && !self.is_staged(path) {
            let real = self.resolve(path)?;
            self.check_world_readable(&real)?;
            return Ok(real);
        }
        path.canonicalize().map_err(|source| PlanError::Project {
            path: path.clone(),
            source,
        })
    }

    /// Checks the program and the runtime that a queued request names, before searching for them.
    pub(super) fn check_command(&self) -> Result<(), PlanError> {
        if self.request.asked_by == RequestOrigin::Caller {
            return Ok(());
        }
        if let Command::Argv(words) = &self.request.command
            && let Some(first) = words.first()
            && first.as_encoded_bytes().contains(&b'/')
            && own_program(first, self.request).is_none()
        {
            let path = Path::new(first);
            if !path.is_absolute() {
                return Err(PlanError::refused(
                    path,
                    "a queued analysis has no directory but its workspace; name the program among its inputs, or from / on",
                ));
            }
            self.check_world_readable(&self.resolve(path)?)?;
        }
        match &self.request.runtime {
            Some(runtime) => self.check_world_readable(&self.resolve(runtime)?),
            None => Ok(()),
        }
    }

    fn is_staged(&self, path: &Path) -> bool {
        match &self.request.asked_by {
            RequestOrigin::Queue { staged, .. } => resolve_staged_source(path, staged).is_ok(),
            RequestOrigin::Caller => false,
        }
    }
}

/// Resolves a file of a submission. Nothing outside the directory in which Fumehood laid the submission out is
/// copied.
fn resolve_staged_source(source: &Path, staged: &Path) -> Result<PathBuf, PlanError> {
    let (real, staged) = (canonical_of(source)?, canonical_of(staged)?);
    match real.starts_with(&staged) {
        true => Ok(real),
        false => Err(PlanError::refused(
            source,
            "it did not come with the submission, and nothing else is copied for a queued analysis",
        )),
    }
}
