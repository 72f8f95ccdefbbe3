//! From a file to every directory that must be visible for the file to start.
//!
//! A program in a venv is a symlink to a symlink to an interpreter in another prefix, with its library beside it. A
//! console script begins with the path of another program. [`InterpreterChain`] follows these pointers one by one
//! without executing anything. It admits the prefix of each step, or stops with an error that names the step.

use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use super::RuntimeAlias;
use super::caller::CallerEnvironment;
use super::error::RuntimeError;
use super::host_files::{self, LinkPolicy};
use super::prefix::{self, PrefixKind};
use super::python;
use super::search::{self, CommandSearch};
use super::shebang::{self, Shebang};

/// The most symlinks and interpreters to follow for one runtime in total. The kernel allows 40 symlinks in one path.
const STEPS_MAX: usize = 64;

/// An interpreter may be a script itself. The kernel gives up after four.
const SCRIPTS_MAX: usize = 4;

pub(super) struct InterpreterChain<'a> {
    search: CommandSearch<'a>,
    project: PathBuf,
    cwd: PathBuf,
    /// As written and canonical, so that either form of a home is recognised.
    homes: Vec<PathBuf>,
    /// Prefixes that the caller chose: activated, named, or with their bin on PATH.
    chosen: Vec<PathBuf>,
    /// The canonical directories of the caller's PATH, without relative entries.
    path_dirs: Vec<PathBuf>,
    admitted: Vec<(PathBuf, PrefixKind)>,
    aliases: Vec<RuntimeAlias>,
    /// What `#!/usr/bin/env NAME` lines were resolved to: the name and its directory.
    env_dirs: Vec<(OsString, PathBuf)>,
    steps: usize,
}

/// Where a path comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathOrigin {
    /// The caller's command. A leading symlink in a directory that is no runtime is replaced by its target, so that
    /// the directory need not be shown.
    Command,
    /// A file on disk names the path, so the path must exist inside exactly as written.
    Pointer,
}

enum Visibility {
    Visible,
    Unknown,
}

/// One step of the chain: a file in its canonical directory, and its target if it is a symlink.
struct ChainStep {
    dir: PathBuf,
    file: PathBuf,
    target: Option<PathBuf>,
}

impl<'a> InterpreterChain<'a> {
    pub fn new(caller: &'a CallerEnvironment, named: Option<&'a Path>, project: &Path) -> Self {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let entries = std::env::split_paths(&caller.path).filter(|dir| dir.is_absolute());
        let path_dirs: Vec<PathBuf> = entries.filter_map(|dir| dir.canonicalize().ok()).collect();
        let bins = path_dirs
            .iter()
            .filter(|dir| is_bin(dir))
            .filter_map(|dir| dir.parent());
        let active = ["VIRTUAL_ENV", "CONDA_PREFIX"]
            .into_iter()
            .filter_map(|name| caller.active(name));
        let chosen = bins
            .map(Path::to_path_buf)
            .chain(active.filter_map(|prefix| prefix.canonicalize().ok()))
            .chain(named.map(Path::to_path_buf))
            .collect();
        // Resolving a path takes a system call for each of its parts, so resolve no path twice.
        let home = caller.home().filter(|home| !caller.homes.contains(home));
        let homes = caller
            .homes
            .iter()
            .chain(home.as_ref())
            .flat_map(|home| [home.clone(), real(home)])
            .collect();
        let project = real(project);
        let cwd = match caller.cwd == project {
            true => project.clone(),
            false => real(&caller.cwd),
        };
        InterpreterChain {
            search: CommandSearch { caller, named },
            project,
            cwd,
            homes,
            chosen,
            path_dirs,
            admitted: Vec::new(),
            aliases: Vec::new(),
            env_dirs: Vec::new(),
            steps: 0,
        }
    }

    pub fn search(&self) -> &CommandSearch<'a> {
        &self.search
    }

    /// The kind under which a prefix was admitted.
    pub fn kind_of(&self, prefix: &Path) -> Option<PrefixKind> {
        self.admitted
            .iter()
            .find(|(admitted, _)| admitted == prefix)
            .map(|(_, kind)| *kind)
    }

    pub fn env_dirs(&self) -> &[(OsString, PathBuf)] {
        &self.env_dirs
    }

    /// Admits everything that `start` needs. Returns the path to execute, with a canonical directory.
    pub fn follow(&mut self, start: &Path, origin: PathOrigin) -> Result<PathBuf, RuntimeError> {
        self.follow_script(start, origin, 0)
    }

    fn follow_script(
        &mut self,
        start: &Path,
        origin: PathOrigin,
        depth: usize,
    ) -> Result<PathBuf, RuntimeError> {
        let mut path = plain(start)?;
        let mut program = None;
        loop {
            self.steps += 1;
            if self.steps > STEPS_MAX || depth > SCRIPTS_MAX {
                return Err(RuntimeError::TooManySteps {
                    path: start.to_path_buf(),
                });
            }
            let step = ChainStep::at(&path, start)?;
            let leading = origin == PathOrigin::Command && program.is_none();
            match self.admit_directory(&step.dir)? {
                Visibility::Unknown if leading && step.may_be_skipped() => {}
                Visibility::Unknown if !self.admit_path_directory(&step.dir) => {
                    return Err(match leading {
                        true => self.unknown_start(start),
                        false => RuntimeError::NotARuntime {
                            path: step.file,
                            pointed_by: start.to_path_buf(),
                        },
                    });
                }
                Visibility::Visible | Visibility::Unknown => {
                    let origin = match leading {
                        true => PathOrigin::Command,
                        false => PathOrigin::Pointer,
                    };
                    self.add_alias(path.parent().unwrap_or(&path), &step.dir, origin)?;
                    program.get_or_insert_with(|| step.program(&path));
                }
            }
            if let Some(target) = step.target {
                path = target;
                continue;
            }
            self.check_file(&step)?;
            self.follow_interpreter(&step.file, depth)?;
            return Ok(program.unwrap_or(step.file));
        }
    }

    fn check_file(&self, step: &ChainStep) -> Result<(), RuntimeError> {
        if !host_files::is_executable(&step.file) {
            return Err(RuntimeError::NotExecutable {
                path: step.file.clone(),
            });
        }
        // These launchers start what their own configuration names, which does not exist inside.
        let launcher = step.file.file_name() == Some(OsStr::new("julialauncher"));
        match launcher || python::pyenv_root(&step.dir).is_some() {
            true => Err(RuntimeError::VersionManagerShim {
                path: step.file.clone(),
            }),
            false => Ok(()),
        }
    }

    /// Follows the interpreter in a script's first line, as the kernel would.
    fn follow_interpreter(&mut self, file: &Path, depth: usize) -> Result<(), RuntimeError> {
        // A program that may be executed but not read is not a script.
        let head = host_files::read_head(file, LinkPolicy::Follow, shebang::HEAD_BYTES)
            .unwrap_or_default();
        match shebang::parse(&head) {
            None => Ok(()),
            Some(Shebang::Unsupported { line }) => Err(RuntimeError::interpreter_line(file, line)),
            Some(Shebang::Path { interpreter, .. }) if !interpreter.is_absolute() => {
                let line = interpreter.to_string_lossy().into_owned();
                Err(RuntimeError::interpreter_line(file, line))
            }
            Some(Shebang::Path { interpreter, .. }) => {
                if interpreter.symlink_metadata().is_err() {
                    return Err(RuntimeError::missing(&interpreter, file));
                }
                self.follow_script(&interpreter, PathOrigin::Pointer, depth + 1)
                    .map(drop)
            }
            Some(Shebang::Env { name, .. }) => {
                let found = self.search.locate(&name)?;
                let program = self.follow_script(&found, PathOrigin::Pointer, depth + 1)?;
                if let Some(dir) = program.parent() {
                    self.env_dirs.push((name, dir.to_path_buf()));
                }
                Ok(())
            }
        }
    }

    /// Whether a canonical directory is visible inside. Admits its prefix if that is a runtime.
    fn admit_directory(&mut self, dir: &Path) -> Result<Visibility, RuntimeError> {
        let prefix = dir.parent().filter(|_| is_bin(dir));
        if prefix.is_some_and(|prefix| self.kind_of(prefix).is_some()) {
            return Ok(Visibility::Visible);
        }
        if prefix::is_system(dir) {
            // A venv below /usr/local is visible already, but its base may lie elsewhere.
            if let Some(prefix) = prefix.filter(|prefix| prefix.join("pyvenv.cfg").exists())
                && prefix::kind(prefix) == Some(PrefixKind::Venv)
            {
                self.admitted.push((prefix.to_path_buf(), PrefixKind::Venv));
                self.follow_venv(prefix)?;
            }
            return Ok(Visibility::Visible);
        }
        if let Some(prefix) = prefix
            && let Some(kind) = prefix::kind(prefix)
        {
            self.admit(prefix, kind)?;
            return Ok(Visibility::Visible);
        }
        Ok(match self.is_admitted(dir) {
            true => Visibility::Visible,
            false => Visibility::Unknown,
        })
    }

    /// Whether the directory is below one that was admitted.
    fn is_admitted(&self, dir: &Path) -> bool {
        let mut admitted = self.admitted.iter();
        admitted.any(|(admitted, _)| dir.starts_with(admitted))
    }

    /// Admits a directory that does not look like a runtime, but only if the caller's own PATH names it.
    fn admit_path_directory(&mut self, dir: &Path) -> bool {
        let in_project = dir.starts_with(&self.project);
        let on_path = self.path_dirs.iter().any(|entry| entry == dir);
        if in_project || self.cwd.starts_with(dir) || !on_path {
            return false;
        }
        let allowed = |dir: &Path| prefix::refuse(dir, &self.homes, &self.project).is_ok();
        let prefix = dir.parent().filter(|_| is_bin(dir));
        let found = match prefix {
            Some(prefix) if prefix::is_installation(prefix) && allowed(prefix) => {
                (prefix, PrefixKind::Installation)
            }
            _ if allowed(dir) => (dir, PrefixKind::Programs),
            _ => return false,
        };
        self.admitted.push((found.0.to_path_buf(), found.1));
        true
    }

    /// Admits a canonical directory that looks like a runtime.
    fn admit(&mut self, prefix: &Path, kind: PrefixKind) -> Result<(), RuntimeError> {
        self.refuse(prefix)?;
        if !self.chosen.iter().any(|chosen| chosen == prefix) {
            // Untrusted code can forge the marks of a runtime where it can write, that is, in the project, and a
            // venv's mark is one small file. A prefix that the caller did not choose must therefore hold nothing but
            // a venv.
            match kind {
                PrefixKind::Venv => {
                    if let Some(entry) = prefix::foreign_to_venv(prefix) {
                        return Err(RuntimeError::MoreThanVenv {
                            prefix: prefix.to_path_buf(),
                            entry,
                        });
                    }
                }
                _ if prefix.starts_with(&self.project) => {
                    return Err(RuntimeError::NotChosen {
                        prefix: prefix.to_path_buf(),
                    });
                }
                _ => {}
            }
        }
        // Invariant: record the prefix before following its pointers, so that a venv that points at itself ends.
        self.admitted.push((prefix.to_path_buf(), kind));
        match kind {
            PrefixKind::Venv => self.follow_venv(prefix),
            _ => Ok(()),
        }
    }

    /// Admits a prefix that the caller named with `--runtime` or activated: any directory with programs in its bin.
    /// Returns its canonical path.
    pub fn admit_named(&mut self, written: &Path) -> Result<PathBuf, RuntimeError> {
        let no_programs = || RuntimeError::NamedHasNoPrograms {
            prefix: written.to_path_buf(),
        };
        let real = written.canonicalize().map_err(|_| no_programs())?;
        if prefix::is_system(&real) {
            return Ok(real);
        }
        self.refuse(&real)?;
        let bin = real.join("bin");
        let mut programs = host_files::entries(&bin);
        if !host_files::is_real_dir(&bin)
            || !programs.any(|entry| host_files::is_executable(&entry.path()))
        {
            return Err(no_programs());
        }
        self.admit(&real, prefix::kind(&real).unwrap_or(PrefixKind::Named))?;
        // Scripts in the prefix may name the path as it was written.
        self.add_alias(&plain(written)?.join("bin"), &bin, PathOrigin::Command)?;
        Ok(real)
    }

    /// Admits a directory of R packages. The caller's environment names it, so it need not look like a runtime.
    pub fn admit_library(&mut self, dir: &Path) -> Result<(), RuntimeError> {
        if !prefix::is_system(dir) {
            self.refuse(dir)?;
            self.admitted.push((dir.to_path_buf(), PrefixKind::Named));
        }
        Ok(())
    }

    fn refuse(&self, dir: &Path) -> Result<(), RuntimeError> {
        prefix::refuse(dir, &self.homes, &self.project).map_err(|why| RuntimeError::Refused {
            prefix: dir.to_path_buf(),
            why,
        })
    }

    /// Admits the base of a venv: the interpreter that its symlinks lead to, and the one that pyvenv.cfg names.
    fn follow_venv(&mut self, venv: &Path) -> Result<(), RuntimeError> {
        let text =
            host_files::read_text(&venv.join("pyvenv.cfg"), LinkPolicy::Refuse).unwrap_or_default();
        let config = python::parse_venv_config(&text);
        if let Some(python) = python::name_in(&venv.join("bin")) {
            self.follow(&python, PathOrigin::Pointer)?;
        }
        if let Some(home) = config.home {
            self.follow_home(venv, &home)?;
        }
        match config.base_prefix {
            Some(base) => self.follow_base_prefix(venv, &base),
            None => Ok(()),
        }
    }

    fn follow_home(&mut self, venv: &Path, home: &Path) -> Result<(), RuntimeError> {
        let no_python = || RuntimeError::NoPython {
            venv: venv.to_path_buf(),
            home: home.to_path_buf(),
        };
        if !host_files::is_plain_absolute(home) {
            return Err(no_python());
        }
        let real = home.canonicalize().map_err(|_| no_python())?;
        if prefix::is_system(&real) && prefix::is_system(home) {
            return Ok(());
        }
        if !prefix::is_system(&real) {
            self.refuse(&real)?;
        }
        // A home may offer only python3.12; the venv then has that name too.
        let names = host_files::entries(&venv.join("bin")).map(|entry| entry.file_name());
        let versioned = names.filter(|name| {
            name.to_str()
                .is_some_and(|name| name.starts_with("python3.") || name.starts_with("pypy3."))
        });
        let names = python::NAMES.iter().map(OsString::from).chain(versioned);
        let program = names
            .map(|name| home.join(name))
            .find(|path| host_files::is_executable(path));
        self.follow(&program.ok_or_else(no_python)?, PathOrigin::Pointer)
            .map(drop)
    }

    fn follow_base_prefix(&mut self, venv: &Path, base: &Path) -> Result<(), RuntimeError> {
        let Ok(real) = base.canonicalize() else {
            return Ok(());
        };
        if prefix::is_system(&real) || self.is_admitted(&real) {
            return Ok(());
        }
        match prefix::kind(&real) {
            Some(kind) => self.admit(&real, kind),
            None => Err(RuntimeError::NotARuntime {
                path: real,
                pointed_by: venv.join("pyvenv.cfg"),
            }),
        }
    }

    /// A path through a symlinked directory (`versions/paper`, `cpython-3.12`) must also exist inside as written,
    /// because the symlink itself lies in a directory that is not shown.
    fn add_alias(
        &mut self,
        written: &Path,
        dir: &Path,
        origin: PathOrigin,
    ) -> Result<(), RuntimeError> {
        if written == dir || prefix::is_system(written) {
            return Ok(());
        }
        let (at, source) = match (written.parent(), dir.parent()) {
            (Some(at), Some(real))
                if is_bin(written)
                    && is_bin(dir)
                    && self.kind_of(real).is_some()
                    && at.canonicalize().is_ok_and(|found| found == real) =>
            {
                (at, real)
            }
            _ => (written, dir),
        };
        match self.refuse(at) {
            Ok(()) => self.aliases.push(RuntimeAlias {
                at: at.to_path_buf(),
                source: source.to_path_buf(),
            }),
            // The program is executed by its canonical path. Only a path that a file names is needed as written.
            Err(_) if origin == PathOrigin::Command => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn unknown_start(&self, start: &Path) -> RuntimeError {
        let path = start.to_path_buf();
        let real = start
            .parent()
            .and_then(|dir| dir.canonicalize().ok())
            .unwrap_or_else(|| path.clone());
        let mut trees = self.homes.iter().chain([&self.project, &self.cwd]);
        match trees.any(|tree| tree.parent().is_some() && real.starts_with(tree)) {
            true => RuntimeError::InCallerTree { path },
            false => RuntimeError::NotARuntime {
                pointed_by: path.clone(),
                path,
            },
        }
    }

    /// The canonical directories to show, none below another, and the further paths at which they appear.
    pub fn finish(mut self) -> (Vec<PathBuf>, Vec<RuntimeAlias>) {
        let mut prefixes: Vec<PathBuf> = Vec::new();
        // In path order a directory precedes the directories below it.
        self.admitted.sort_by(|a, b| a.0.cmp(&b.0));
        for (dir, _) in self.admitted {
            if !prefix::is_system(&dir) && !prefixes.iter().any(|kept| dir.starts_with(kept)) {
                prefixes.push(dir);
            }
        }
        let mut aliases: Vec<RuntimeAlias> = Vec::new();
        self.aliases.sort();
        for alias in self.aliases {
            // Below a shown directory the symlink itself is visible and leads to the right place.
            let below = |top: &PathBuf| alias.at.starts_with(top);
            if !prefixes.iter().any(below) && !aliases.iter().map(|kept| &kept.at).any(below) {
                aliases.push(alias);
            }
        }
        (prefixes, aliases)
    }
}

impl ChainStep {
    fn at(path: &Path, start: &Path) -> Result<ChainStep, RuntimeError> {
        let missing = || RuntimeError::missing(path, start);
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(missing());
        };
        let dir = parent.canonicalize().map_err(|_| missing())?;
        let file = dir.join(name);
        let meta = file.symlink_metadata().map_err(|_| missing())?;
        let target = match meta.is_symlink() {
            true => {
                let link = std::fs::read_link(&file).map_err(|_| missing())?;
                Some(plain(&dir.join(link))?)
            }
            false => None,
        };
        Ok(ChainStep { dir, file, target })
    }

    /// Whether starting the target is the same as starting this symlink. An interpreter finds its prefix from the
    /// target anyway; a program with many names depends on its own name.
    fn may_be_skipped(&self) -> bool {
        let name = self.file.file_name();
        match &self.target {
            Some(target) => target.file_name() == name || name.is_some_and(search::is_language),
            None => false,
        }
    }

    /// The path to execute. System programs keep the path as written. Others get a canonical directory, so that
    /// relative symlinks mean the same inside as on the host.
    fn program(&self, written: &Path) -> PathBuf {
        match prefix::is_system(written) && prefix::is_system(&self.dir) {
            true => written.to_path_buf(),
            false => self.file.clone(),
        }
    }
}

fn is_bin(dir: &Path) -> bool {
    dir.file_name() == Some(OsStr::new("bin"))
}

/// The same file as an absolute path without `.` and `..`. The part before each `..` is made canonical first, because
/// the kernel follows a symlink before it goes up.
fn plain(path: &Path) -> Result<PathBuf, RuntimeError> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                let missing = |_| RuntimeError::missing(&plain, path);
                plain = plain.canonicalize().map_err(missing)?;
                plain.pop();
            }
            Component::CurDir => {}
            _ => plain.push(part),
        }
    }
    Ok(plain)
}
