//! What may be shown or copied at all, and to whom.

use std::path::{Component, Path, PathBuf};

use sandbox::spec::{Exec, HostPath, InsidePath, Owner, ReadOnlyView, ViewContent};

use super::links::{self, has_own_links};
use super::{
    PolicyError, Private, canonical, canonical_of, inside_target, own_program, plain, siblings,
    world_readable,
};
use crate::plan::runtime::{Runtime, RuntimeError};
use crate::request::{
    Asker, Command, NamedBy, NamedDirectory, ReadRoot, Request, Siblings, Writers,
};
use store::types::escaping::quote_for_shell;

/// The two directories of a project that an analysis reads.
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

/// What may be shown at all.
pub(super) struct Guard<'a> {
    pub(super) request: &'a Request,
    pub(super) workspace_root: &'a Path,
    pub(super) private: &'a Private<'a>,
}

impl Guard<'_> {
    /// `data/` or `docs/`: at its host path, and by its name in the working directory.
    pub(super) fn input_directory(
        &self,
        directory: InputDirectory,
        workspace: &Path,
        views: &mut Vec<ReadOnlyView>,
    ) -> Result<(), PolicyError> {
        let Some((given, real)) = self.find(directory)? else {
            return Ok(());
        };
        if !real.is_dir() {
            let flag = directory.flag();
            return Err(PolicyError::NotADirectory { flag, path: given });
        }
        self.may_show(&real)?;
        let mut targets = vec![real.clone(), workspace.join(directory.name())];
        targets.extend(plain(&given).filter(|p| *p != real && !self.below_workspaces(p)));
        views.extend(
            targets
                .into_iter()
                .map(|target| self.view(&real, &target, Exec::Refused, ViewContent::Data)),
        );
        Ok(())
    }

    /// The directory that somebody named, or the project's own, as given and resolved. It is resolved once: what is
    /// checked is what is shown. A queued request has what was found when it was submitted.
    fn find(&self, directory: InputDirectory) -> Result<Option<(PathBuf, PathBuf)>, PolicyError> {
        let queued = self.request.asked_by != Asker::Caller;
        match directory.named(self.request) {
            Some(named) if named.named_by == NamedBy::ProjectFile => {
                let real = self.of_project(&named.path, directory)?;
                Ok(Some((named.path.clone(), real)))
            }
            Some(named) => {
                let real = self.real(&named.path)?;
                if queued && !links::is_fixed_at(&named.path, &real) {
                    let (flag, path) = (directory.flag(), named.path.clone());
                    return Err(PolicyError::QueuedLink { flag, path });
                }
                Ok(Some((named.path.clone(), real)))
            }
            None if queued => Ok(None),
            None => {
                let usual = self.request.project.join(directory.name());
                // A project without it is fine; one where it is a plain file has no such directory either.
                match usual.is_dir() {
                    true => Ok(Some((usual.clone(), self.of_project(&usual, directory)?))),
                    false => Ok(None),
                }
            }
        }
    }

    /// What a submission asks a worker to show. A link that can be changed before the worker looks is followed here.
    pub(super) fn to_submit(
        &self,
        directory: InputDirectory,
    ) -> Result<Option<PathBuf>, PolicyError> {
        match directory.named(self.request) {
            // It may exist for the worker only.
            Some(named) if named.named_by == NamedBy::Caller => {
                let here = canonical(&named.path).ok();
                let given = || named.path.clone();
                Ok(Some(match links::is_fixed(&named.path) {
                    true => given(),
                    false => here.unwrap_or_else(given),
                }))
            }
            _ => Ok(self
                .find(directory)?
                .map(|(given, real)| match links::is_fixed(&given) {
                    true => given,
                    false => real,
                })),
        }
    }

    /// What the project decides to show, by a link or in its file. A clone makes every link the caller's, so the links'
    /// owner says nothing about who meant it, and the rest of the project is to stay out of sight (P2).
    fn of_project(&self, path: &Path, directory: InputDirectory) -> Result<PathBuf, PolicyError> {
        let (real, project) = (canonical_of(path)?, canonical_of(&self.request.project)?);
        let own = project.join(directory.name());
        match real == own || links::is_shown_part(&real, &project) && has_own_links(path)? {
            true => Ok(real),
            false => {
                let named = quote_for_shell(real.as_os_str());
                Err(PolicyError::LeadsElsewhere {
                    path: path.to_path_buf(),
                    mend: format!("{} {named}", directory.flag()),
                    real,
                })
            }
        }
    }

    /// A tree that the caller names may be executed: a tool or an environment can lie in it.
    pub(super) fn read_root(
        &self,
        read: &ReadRoot,
        workspace: &Path,
        views: &mut Vec<ReadOnlyView>,
    ) -> Result<(), PolicyError> {
        let real = self.real(&read.host)?;
        self.may_show(&real)?;
        let targets = match &read.inside {
            Some(inside) => vec![inside_target(inside, workspace)?],
            None => {
                let as_given = plain(&read.host).filter(|p| *p != real);
                [real.clone()].into_iter().chain(as_given).collect()
            }
        };
        views.extend(
            targets
                .into_iter()
                .map(|target| self.view(&real, &target, Exec::Allowed, ViewContent::Data)),
        );
        Ok(())
    }

    pub(super) fn runtime_views(
        &self,
        runtime: &Runtime,
        views: &mut Vec<ReadOnlyView>,
    ) -> Result<(), PolicyError> {
        for prefix in &runtime.prefixes {
            self.may_be_runtime(prefix)?;
            views.push(self.view(prefix, prefix, Exec::Allowed, ViewContent::Runtime));
        }
        for alias in &runtime.aliases {
            self.everybodys(&alias.source).or_else(|e| self.untold(e))?;
            views.push(self.view(
                &alias.source,
                &alias.at,
                Exec::Allowed,
                ViewContent::Runtime,
            ));
        }
        Ok(())
    }

    fn may_be_runtime(&self, prefix: &Path) -> Result<(), PolicyError> {
        let may = self
            .listed(prefix)
            .and_then(|()| self.apart_from_ours(prefix))
            .and_then(|()| self.everybodys(prefix));
        may.or_else(|e| self.untold(e))
    }

    /// Where an interpreter leads to that a stranger did not name is not told: it would tell what lies there.
    fn untold(&self, error: PolicyError) -> Result<(), PolicyError> {
        match self.is_strangers() && self.request.runtime.is_none() {
            true => Err(PolicyError::Runtime(RuntimeError::NotFound {
                command: Default::default(),
                searched: Vec::new(),
            })),
            false => Err(error),
        }
    }

    fn may_show(&self, real: &Path) -> Result<(), PolicyError> {
        let refuse = |why| {
            Err(PolicyError::Refused {
                path: real.to_path_buf(),
                why,
            })
        };
        for kernel in ["/proc", "/sys", "/dev"] {
            if real.starts_with(kernel) {
                return refuse("it is the kernel's, and never shown");
            }
        }
        if !real.is_dir() && !real.is_file() {
            return refuse("it is neither a directory nor a plain file");
        }
        // The made-up files there keep their place, and accounts and keys stay out.
        if Path::new("/etc").starts_with(real) {
            return refuse(
                "it contains the system's accounts and keys; show single files or directories in it",
            );
        }
        self.apart_from_ours(real)?;
        self.listed(real)?;
        self.everybodys(real)
    }

    /// A source that is read by the runner itself, resolved.
    pub(super) fn may_copy(&self, source: &Path) -> Result<PathBuf, PolicyError> {
        if let Asker::Queue { staged, .. } = &self.request.asked_by {
            return staged_source(source, staged);
        }
        let real = canonical_of(source)?;
        self.apart_from_ours(&real)?;
        self.listed(&real)?;
        Ok(real)
    }

    /// Adds to `inputs`, whose first is the script, the modules that it imports, if that was asked for. Says which.
    pub(super) fn siblings(
        &self,
        project: &Path,
        inputs: &mut Vec<(PathBuf, PathBuf)>,
    ) -> Result<Option<String>, PolicyError> {
        if self.request.siblings == Siblings::Left {
            return Ok(None);
        }
        let (Command::Script { .. }, Some((script, _))) = (&self.request.command, inputs.first())
        else {
            return Err(PolicyError::SiblingsOfCommand);
        };
        let named: Vec<PathBuf> = inputs.iter().map(|(_, name)| name.clone()).collect();
        let found = siblings::siblings(script, project, &named)?;
        // Found without links below a resolved directory: resolved again, a link put there meanwhile would be followed.
        for (source, _) in &found.inputs {
            self.apart_from_ours(source)?;
            self.listed(source)?;
        }
        inputs.extend(found.inputs);
        Ok(found.notice)
    }

    /// Neither the workspaces nor Fumehood's own files may be seen through a view, from above or within.
    fn apart_from_ours(&self, real: &Path) -> Result<(), PolicyError> {
        let refuse = |why| {
            Err(PolicyError::Refused {
                path: real.to_path_buf(),
                why,
            })
        };
        if self.workspace_root.starts_with(real) {
            return refuse("it contains the workspaces of other analyses");
        }
        if self.below_workspaces(real) {
            return refuse("it is the workspace of an analysis");
        }
        let kept = self.private.kept.iter().map(PathBuf::as_path);
        for own in [self.private.home].into_iter().chain(kept) {
            let own = canonical(own).unwrap_or_else(|_| own.to_path_buf());
            if own.starts_with(real) || real.starts_with(&own) {
                return refuse(
                    "it contains Fumehood's own records (FUMEHOOD_HOME, the database or the artifacts)",
                );
            }
        }
        Ok(())
    }

    /// Whatever root they are under: the name is ours.
    fn below_workspaces(&self, path: &Path) -> bool {
        let names = path.components().map(|c| c.as_os_str().as_encoded_bytes());
        let mut names = names.map(|n| n.strip_prefix(b".").unwrap_or(n));
        names.any(|name| name.starts_with(b"scidex-analysis-"))
    }

    fn listed(&self, real: &Path) -> Result<(), PolicyError> {
        if self.request.readable_roots.is_none() {
            return Ok(());
        }
        let system = ["/usr", "/bin", "/lib", "/lib64", "/sbin"];
        let listed = self.operator_lists(real) || system.iter().any(|root| real.starts_with(root));
        match listed {
            true => Ok(()),
            false => Err(PolicyError::NotListed {
                path: real.to_path_buf(),
            }),
        }
    }

    /// Whether the operator named a directory above it: then it may be read whoever asks.
    fn operator_lists(&self, real: &Path) -> bool {
        let mut roots = self.request.readable_roots.iter().flatten();
        roots.any(|root| canonical(root).is_ok_and(|root| real.starts_with(root)))
    }

    /// Whether our own rights are more than whoever asked may have.
    fn is_strangers(&self) -> bool {
        let asked_by = &self.request.asked_by;
        matches!(asked_by, Asker::Queue { writers, .. } if *writers == Writers::Others)
    }

    /// What a path leads to. A stranger does not learn by it what is where not world_readable may look.
    fn real(&self, path: &Path) -> Result<PathBuf, PolicyError> {
        if !self.is_strangers() {
            return canonical_of(path);
        }
        // What the operator lists is found with our rights; what leads out of it, by a link or by `..`, is not.
        let mut roots = self.request.readable_roots.iter().flatten();
        let is_plain = !path.components().any(|part| part == Component::ParentDir);
        let listed = is_plain && roots.any(|root| path.starts_with(root));
        match canonical(path) {
            Ok(real) if listed && self.operator_lists(&real) => Ok(real),
            // It leads to where world_readable may look, so that it does tells nothing.
            Ok(real) if listed && world_readable::find(&real).is_ok_and(|open| open == real) => {
                Ok(real)
            }
            _ => world_readable::find(path),
        }
    }

    /// A stranger is shown what world_readable may read, or what the operator lists.
    fn everybodys(&self, real: &Path) -> Result<(), PolicyError> {
        if !self.is_strangers() || self.operator_lists(real) {
            return Ok(());
        }
        // The path is resolved, so a link in it is new, and leads elsewhere.
        if world_readable::find(real)? != real {
            return Err(PolicyError::Refused {
                path: real.to_path_buf(),
                why: "it changed while it was looked at",
            });
        }
        // The program runs as our own user, and reads what we read; root's runs as nobody else does.
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
            // To a stranger the owner's private files stay so: inside, the program is not the owner but one of world_readable.
            owner: match self.is_strangers() && !self.operator_lists(source) {
                true => Owner::AsIs,
                false => Owner::Mapped,
            },
        }
    }

    pub(super) fn project(&self) -> Result<PathBuf, PolicyError> {
        let path = &self.request.project;
        if self.is_strangers() && !self.is_staged(path) {
            let real = self.real(path)?;
            self.everybodys(&real)?;
            return Ok(real);
        }
        canonical(path).map_err(|source| PolicyError::Project {
            path: path.clone(),
            source,
        })
    }

    /// What a queued request names to be executed, before it is looked for.
    pub(super) fn check_command(&self) -> Result<(), PolicyError> {
        if self.request.asked_by == Asker::Caller {
            return Ok(());
        }
        if let Command::Argv(words) = &self.request.command
            && let Some(first) = words.first()
            && first.as_encoded_bytes().contains(&b'/')
            && own_program(first, self.request).is_none()
        {
            let path = Path::new(first);
            if !path.is_absolute() {
                return Err(PolicyError::Refused {
                    path: path.to_path_buf(),
                    why: "a queued analysis has no directory but its workspace; name the program among its inputs, or from / on",
                });
            }
            self.everybodys(&self.real(path)?)?;
        }
        match &self.request.runtime {
            Some(runtime) => self.everybodys(&self.real(runtime)?),
            None => Ok(()),
        }
    }

    fn is_staged(&self, path: &Path) -> bool {
        match &self.request.asked_by {
            Asker::Queue { staged, .. } => staged_source(path, staged).is_ok(),
            Asker::Caller => false,
        }
    }
}

/// What came with a submission lies where we laid it out, and nothing else is copied for it.
fn staged_source(source: &Path, staged: &Path) -> Result<PathBuf, PolicyError> {
    let (real, staged) = (canonical_of(source)?, canonical_of(staged)?);
    match real.starts_with(&staged) {
        true => Ok(real),
        false => Err(PolicyError::Refused {
            path: source.to_path_buf(),
            why: "it did not come with the submission, and nothing else is copied for a queued analysis",
        }),
    }
}
