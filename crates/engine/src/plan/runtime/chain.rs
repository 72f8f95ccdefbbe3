//! From a file to every directory that must be visible for it to start.
//!
//! A program in a venv is a symlink to a symlink to an interpreter in some other prefix, whose library lies
//! beside it; a console script begins with the path of another program. The chain walks these
//! pointers one by one without executing anything and admits the prefix of each step, or
//! stops with an error that names the step.

use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use super::prefix::{self, Kind, Links};
use super::python;
use super::search::{self, Search};
use super::shebang::{self, Shebang};
use super::{Alias, Caller, RuntimeError};

/// Symlinks and interpreters followed for one runtime, all together; the kernel allows 40 in one path.
const STEPS_MAX: usize = 64;

/// An interpreter may be a script itself; the kernel gives up after four.
const SCRIPTS_MAX: usize = 4;

pub(super) struct Chain<'a> {
    search: Search<'a>,
    project: PathBuf,
    cwd: PathBuf,
    /// As written and canonical: either form of a refused directory must be recognised.
    homes: Vec<PathBuf>,
    /// Prefixes that the caller chose: active, named, or with their bin on PATH.
    chosen: Vec<PathBuf>,
    /// The canonical directories of the caller's PATH, those written relative left out.
    path_dirs: Vec<PathBuf>,
    shown: Vec<(PathBuf, Kind)>,
    aliases: Vec<Alias>,
    /// What `#!/usr/bin/env NAME` lines were resolved to: the name and its directory.
    env_dirs: Vec<(OsString, PathBuf)>,
    steps: usize,
}

/// Whether a file is where the caller's command starts, or where something on disk points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A leading symlink in a directory that is no runtime is replaced by its target, so that the
    /// directory need not be shown.
    Start,
    /// The path is written down somewhere, so it must exist inside exactly as written.
    Inner,
}

enum Standing {
    Visible,
    Unknown,
}

/// One step: a file by its canonical directory, and where it leads if it is a symlink.
struct Step {
    dir: PathBuf,
    file: PathBuf,
    target: Option<PathBuf>,
}

impl<'a> Chain<'a> {
    pub fn new(caller: &'a Caller, named: Option<&'a Path>, project: &Path) -> Self {
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
        let homes = caller
            .homes
            .iter()
            .chain(caller.home().as_ref())
            .flat_map(|home| [home.clone(), real(home)])
            .collect();
        Chain {
            search: Search { caller, named },
            project: real(project),
            cwd: real(&caller.cwd),
            homes,
            chosen,
            path_dirs,
            shown: Vec::new(),
            aliases: Vec::new(),
            env_dirs: Vec::new(),
            steps: 0,
        }
    }

    pub fn search(&self) -> &Search<'a> {
        &self.search
    }

    /// The kind under which a prefix was admitted.
    pub fn kind_of(&self, prefix: &Path) -> Option<Kind> {
        self.shown
            .iter()
            .find(|(shown, _)| shown == prefix)
            .map(|(_, kind)| *kind)
    }

    pub fn env_dirs(&self) -> &[(OsString, PathBuf)] {
        &self.env_dirs
    }

    /// Admits everything that `start` needs; gives the path to execute, its directory canonical.
    pub fn follow(&mut self, start: &Path, place: Place) -> Result<PathBuf, RuntimeError> {
        self.follow_script(start, place, 0)
    }

    fn follow_script(
        &mut self,
        start: &Path,
        place: Place,
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
            let step = Step::at(&path, start)?;
            let leading = place == Place::Start && program.is_none();
            match self.stand(&step.dir)? {
                Standing::Unknown if leading && step.may_be_skipped() => {}
                Standing::Unknown if !self.stand_on_path(&step.dir) => {
                    return Err(match leading {
                        true => self.unknown_start(start),
                        false => RuntimeError::NotARuntime {
                            path: step.file,
                            pointed_by: start.to_path_buf(),
                        },
                    });
                }
                Standing::Visible | Standing::Unknown => {
                    let place = if leading { Place::Start } else { Place::Inner };
                    self.add_alias(path.parent().unwrap_or(&path), &step.dir, place)?;
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

    fn check_file(&self, step: &Step) -> Result<(), RuntimeError> {
        if !prefix::is_executable(&step.file) {
            return Err(RuntimeError::NotExecutable {
                path: step.file.clone(),
            });
        }
        // These start what their own settings name, which are not there inside.
        let launcher = step.file.file_name() == Some(OsStr::new("julialauncher"));
        match launcher || python::pyenv_root(&step.dir).is_some() {
            true => Err(RuntimeError::Shim {
                path: step.file.clone(),
            }),
            false => Ok(()),
        }
    }

    /// The kernel starts a script's interpreter by the path in its first line.
    fn follow_interpreter(&mut self, file: &Path, depth: usize) -> Result<(), RuntimeError> {
        // A program that may be executed but not read is no script.
        let head =
            prefix::read_head(file, Links::Followed, shebang::HEAD_BYTES).unwrap_or_default();
        match shebang::parse(&head) {
            None => Ok(()),
            Some(Shebang::Unsupported { line }) => Err(RuntimeError::InterpreterLine {
                script: file.to_path_buf(),
                line,
            }),
            Some(Shebang::Path { interpreter, .. }) if !interpreter.is_absolute() => {
                Err(RuntimeError::InterpreterLine {
                    script: file.to_path_buf(),
                    line: interpreter.to_string_lossy().into_owned(),
                })
            }
            Some(Shebang::Path { interpreter, .. }) => {
                if interpreter.symlink_metadata().is_err() {
                    return Err(RuntimeError::Missing {
                        path: interpreter,
                        pointed_by: file.to_path_buf(),
                    });
                }
                self.follow_script(&interpreter, Place::Inner, depth + 1)
                    .map(drop)
            }
            Some(Shebang::Env { name, .. }) => {
                let found = self.search.locate(&name)?;
                let program = self.follow_script(&found, Place::Inner, depth + 1)?;
                if let Some(dir) = program.parent() {
                    self.env_dirs.push((name, dir.to_path_buf()));
                }
                Ok(())
            }
        }
    }

    /// Whether a canonical directory is visible inside; admits its prefix if that is a runtime.
    fn stand(&mut self, dir: &Path) -> Result<Standing, RuntimeError> {
        let prefix = dir.parent().filter(|_| is_bin(dir));
        if prefix.is_some_and(|prefix| self.kind_of(prefix).is_some()) {
            return Ok(Standing::Visible);
        }
        if prefix::is_system(dir) {
            // A venv below /usr/local is visible already, but its base may lie elsewhere.
            if let Some(prefix) = prefix.filter(|prefix| prefix.join("pyvenv.cfg").exists())
                && prefix::kind(prefix) == Some(Kind::Venv)
            {
                self.shown.push((prefix.to_path_buf(), Kind::Venv));
                self.follow_venv(prefix)?;
            }
            return Ok(Standing::Visible);
        }
        if let Some((prefix, kind)) =
            prefix.and_then(|prefix| Some((prefix, prefix::kind(prefix)?)))
        {
            self.admit(prefix, kind)?;
            return Ok(Standing::Visible);
        }
        if self.shown.iter().any(|(shown, _)| dir.starts_with(shown)) {
            return Ok(Standing::Visible);
        }
        Ok(Standing::Unknown)
    }

    /// A directory without the marks of a runtime is shown only because the caller's own PATH names it.
    fn stand_on_path(&mut self, dir: &Path) -> bool {
        let in_project = dir.starts_with(&self.project);
        let on_path = self.path_dirs.iter().any(|entry| entry == dir);
        if in_project || self.cwd.starts_with(dir) || !on_path {
            return false;
        }
        let allowed = |dir: &Path| prefix::refuse(dir, &self.homes, &self.project).is_ok();
        let prefix = dir.parent().filter(|_| is_bin(dir));
        let found = match prefix {
            Some(prefix) if prefix::is_installation(prefix) && allowed(prefix) => {
                (prefix, Kind::Installation)
            }
            _ if allowed(dir) => (dir, Kind::Programs),
            _ => return false,
        };
        self.shown.push((found.0.to_path_buf(), found.1));
        true
    }

    /// Admits a canonical directory that bears the marks of a runtime.
    fn admit(&mut self, prefix: &Path, kind: Kind) -> Result<(), RuntimeError> {
        self.refuse(prefix)?;
        if !self.chosen.iter().any(|chosen| chosen == prefix) {
            // Marks can be forged where untrusted code can write, that is, in the project; and a venv's
            // mark is one small file. What nobody chose must hold nothing but a venv.
            match kind {
                Kind::Venv => {
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
        // Invariant: shown before its pointers are followed, so that a venv pointing at itself ends.
        self.shown.push((prefix.to_path_buf(), kind));
        match kind {
            Kind::Venv => self.follow_venv(prefix),
            _ => Ok(()),
        }
    }

    /// Admits a prefix that the caller named, with `--runtime` or by activating it: any directory with
    /// programs in its bin. Gives its canonical path.
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
        let mut programs = std::fs::read_dir(&bin)
            .into_iter()
            .flatten()
            .take(4096)
            .flatten();
        if !prefix::is_real_dir(&bin) || !programs.any(|entry| prefix::is_executable(&entry.path()))
        {
            return Err(no_programs());
        }
        self.admit(&real, prefix::kind(&real).unwrap_or(Kind::Named))?;
        // Its scripts may begin with the path as it was written.
        self.add_alias(&plain(written)?.join("bin"), &bin, Place::Start)?;
        Ok(real)
    }

    /// A directory of R packages: the caller's environment names it, so it needs no marks.
    pub fn admit_library(&mut self, dir: &Path) -> Result<(), RuntimeError> {
        if !prefix::is_system(dir) {
            self.refuse(dir)?;
            self.shown.push((dir.to_path_buf(), Kind::Named));
        }
        Ok(())
    }

    fn refuse(&self, dir: &Path) -> Result<(), RuntimeError> {
        prefix::refuse(dir, &self.homes, &self.project).map_err(|why| RuntimeError::Refused {
            prefix: dir.to_path_buf(),
            why,
        })
    }

    /// A venv needs its base: the interpreter its links lead to, and the one pyvenv.cfg names.
    fn follow_venv(&mut self, venv: &Path) -> Result<(), RuntimeError> {
        let text = prefix::read_text(&venv.join("pyvenv.cfg"), Links::Refused).unwrap_or_default();
        let config = python::parse_config(&text);
        let bin = venv.join("bin");
        if let Some(name) = python::NAMES
            .iter()
            .find(|name| bin.join(name).symlink_metadata().is_ok())
        {
            self.follow(&bin.join(name), Place::Inner)?;
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
        if !prefix::is_plain_absolute(home) {
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
        let entries = std::fs::read_dir(venv.join("bin"))
            .into_iter()
            .flatten()
            .take(4096)
            .flatten();
        let versioned = entries.map(|entry| entry.file_name()).filter(|name| {
            name.to_str()
                .is_some_and(|name| name.starts_with("python3.") || name.starts_with("pypy3."))
        });
        let names = python::NAMES.iter().map(OsString::from).chain(versioned);
        let program = names
            .map(|name| home.join(name))
            .find(|path| prefix::is_executable(path));
        self.follow(&program.ok_or_else(no_python)?, Place::Inner)
            .map(drop)
    }

    fn follow_base_prefix(&mut self, venv: &Path, base: &Path) -> Result<(), RuntimeError> {
        let Ok(real) = base.canonicalize() else {
            return Ok(());
        };
        if prefix::is_system(&real) || self.shown.iter().any(|(shown, _)| real.starts_with(shown)) {
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

    /// A path written through a symlinked directory (`versions/paper`, `cpython-3.12`) must exist inside as
    /// written too, for the symlink itself lies in a directory that is not shown.
    fn add_alias(&mut self, written: &Path, dir: &Path, place: Place) -> Result<(), RuntimeError> {
        if written == dir || prefix::is_system(written) {
            return Ok(());
        }
        let whole = match (written.parent(), dir.parent()) {
            (Some(at), Some(real))
                if is_bin(written) && is_bin(dir) && self.kind_of(real).is_some() =>
            {
                at.canonicalize()
                    .is_ok_and(|found| found == real)
                    .then_some((at, real))
            }
            _ => None,
        };
        let (at, source) = whole.unwrap_or((written, dir));
        match self.refuse(at) {
            Ok(()) => self.aliases.push(Alias {
                at: at.to_path_buf(),
                source: source.to_path_buf(),
            }),
            // The program is executed by its canonical path; only what is written down needs this one.
            Err(_) if place == Place::Start => {}
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

    /// What to show: canonical directories, none below another; and the other paths they appear under.
    pub fn finish(mut self) -> (Vec<PathBuf>, Vec<Alias>) {
        let mut prefixes: Vec<PathBuf> = Vec::new();
        // In order of paths a directory comes before what lies below it.
        self.shown.sort_by(|a, b| a.0.cmp(&b.0));
        for (dir, _) in self.shown {
            if !prefix::is_system(&dir) && !prefixes.iter().any(|kept| dir.starts_with(kept)) {
                prefixes.push(dir);
            }
        }
        let mut aliases: Vec<Alias> = Vec::new();
        self.aliases.sort();
        for alias in self.aliases {
            // Below something shown, the symlink is visible itself and leads to the right place.
            let below = |top: &PathBuf| alias.at.starts_with(top);
            if !prefixes.iter().any(below) && !aliases.iter().map(|kept| &kept.at).any(below) {
                aliases.push(alias);
            }
        }
        (prefixes, aliases)
    }
}

impl Step {
    fn at(path: &Path, start: &Path) -> Result<Step, RuntimeError> {
        let missing = || RuntimeError::Missing {
            path: path.to_path_buf(),
            pointed_by: start.to_path_buf(),
        };
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
        Ok(Step { dir, file, target })
    }

    /// Whether starting the target is the same as starting this symlink: an interpreter finds its
    /// prefix from the target anyway; a program of many names needs its own.
    fn may_be_skipped(&self) -> bool {
        let name = self.file.file_name();
        match &self.target {
            Some(target) => target.file_name() == name || name.is_some_and(search::is_language),
            None => false,
        }
    }

    /// The path to execute: as written for the system's programs, else with its directory canonical, so
    /// that relative symlinks mean inside what they mean here.
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

/// An absolute path without `.` and `..`, meaning the same file: what lies before a `..` is made
/// canonical first, because the kernel follows a symlink before it goes up.
fn plain(path: &Path) -> Result<PathBuf, RuntimeError> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain = plain.canonicalize().map_err(|_| RuntimeError::Missing {
                    path: plain.clone(),
                    pointed_by: path.to_path_buf(),
                })?;
                plain.pop();
            }
            Component::CurDir => {}
            _ => plain.push(part),
        }
    }
    Ok(plain)
}
