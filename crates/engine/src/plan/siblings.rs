//! `--siblings`: the Python modules beside a script that the script imports, directly or through other such modules.
//!
//! Nothing is executed. Modules come from the script's directory and from packages in it. They must be regular files
//! and are opened without following symlinks. The directory must lie below the project's root: the root holds the
//! platform's own modules and settings, which a name in an untrusted script must not bring in. A directory that holds
//! `.git` or `fumehood.toml` is such a root too.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::error::PlanError;
use super::imports::imports;
use store::types::input_name::RESERVED_NAMES;

/// The most modules. A larger set is a library, which belongs in a runtime or is copied with `--input`.
const MODULES_MAX: usize = 256;
/// The most bytes of the script and all modules together.
const BYTES_MAX: u64 = 16 << 20;
/// The most file names to look up, and the most distinct names that one source may import.
const LOOKUPS_MAX: usize = 10_000;
/// The most names that one source may import, counting repetitions.
const NAMES_MAX: usize = 100_000;
const TOO_MANY_NAMES: &str = "their imports name too many modules";
/// Names that mark the root of a project or repository, whatever the caller's current directory is.
const ROOT_MARKERS: [&str; 2] = [".git", "fumehood.toml"];
/// The most names that the notice lists.
const LISTED_MAX: usize = 20;

/// The modules that were found, and a message about them.
#[derive(Debug, Default)]
pub(super) struct SiblingInputs {
    /// Source (a path without symlinks) and name in the workspace.
    pub inputs: Vec<(PathBuf, PathBuf)>,
    pub notice: Option<String>,
}

/// Finds the modules. `script` and `project` are resolved paths. `input_names` are the workspace names of the
/// caller's own inputs, which take precedence.
pub(super) fn find_siblings(
    script: &Path,
    project: &Path,
    input_names: &[PathBuf],
) -> Result<SiblingInputs, PlanError> {
    let refuse = |why| PlanError::Siblings {
        script: script.to_path_buf(),
        why,
    };
    let (Some(top), Some(own)) = (script.parent(), script.file_name()) else {
        return Err(refuse("it lies in no directory"));
    };
    if top == project || !top.starts_with(project) {
        return Err(refuse(
            "modules are taken only from a directory below the project's root, where the platform's own modules and \
             settings lie; move the script and its modules into a directory of their own, or name each module with --input",
        ));
    }
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat2(rustix::fs::CWD, top, flags, Mode::empty(), resolve)
        .map_err(|errno| PlanError::unreachable(script, errno))?;
    // Any error but ENOENT leaves open whether the marker is there, and counts as a marker.
    let is_absent = |name: &&str| {
        let found = rustix::fs::statat(&dir, *name, AtFlags::SYMLINK_NOFOLLOW);
        found.is_err_and(|e| e == Errno::NOENT)
    };
    if !ROOT_MARKERS.iter().all(is_absent) {
        return Err(refuse(
            "it lies in the root of a project or repository of its own, as .git or fumehood.toml there says, and modules are \
             taken only from a directory below such a root; move the script and its modules into one, or name each module \
             with --input",
        ));
    }
    let mut search = ImportSearch {
        dir,
        script,
        input_names,
        bytes_left: BYTES_MAX,
        seen: HashSet::new(),
        pending: VecDeque::new(),
        found: Vec::new(),
        skipped: Vec::new(),
    };
    let source = search.read_source(Path::new(own))?;
    let source = source.ok_or_else(|| refuse("it is not a regular file"))?;
    if !is_python(Path::new(own), &source) {
        return Err(refuse(
            "it is no Python script, and only Python's imports are followed; name what it needs with --input",
        ));
    }
    search.seen.insert(PathBuf::from(own));
    search.follow_imports(&source, &[])?;
    while let Some((source, package)) = search.pending.pop_front() {
        search.follow_imports(&source, &package)?;
    }
    let notice = search.notice();
    let inputs = search.found.into_iter();
    Ok(SiblingInputs {
        inputs: inputs.map(|name| (top.join(&name), name)).collect(),
        notice,
    })
}

fn is_python(name: &Path, source: &[u8]) -> bool {
    let first = source.split(|b| *b == b'\n').next().unwrap_or_default();
    let ending = name.extension().is_some_and(|e| e == "py" || e == "pyw");
    ending || first.starts_with(b"#!") && first.windows(6).any(|w| w == b"python")
}

struct ImportSearch<'a> {
    /// The script's directory. All files are opened relative to it.
    dir: OwnedFd,
    script: &'a Path,
    input_names: &'a [PathBuf],
    bytes_left: u64,
    /// The names that were looked up, relative to the workspace.
    seen: HashSet<PathBuf>,
    /// Sources whose imports are still to be followed, each with its package.
    pending: VecDeque<(Vec<u8>, Vec<String>)>,
    found: Vec<PathBuf>,
    skipped: Vec<PathBuf>,
}

impl ImportSearch<'_> {
    /// Follows the imports of one source that belongs to `package`.
    fn follow_imports(&mut self, source: &[u8], package: &[String]) -> Result<(), PlanError> {
        let mut done = HashSet::new();
        let mut names = 0;
        imports(source, |import| {
            names += 1;
            let new = !done.contains(&import);
            if names > NAMES_MAX || new && done.len() >= LOOKUPS_MAX {
                return Err(self.too_many(TOO_MANY_NAMES));
            }
            if !new {
                return Ok(());
            }
            let above = import.dots.saturating_sub(1);
            let base = match import.dots {
                0 => Some(&[][..]),
                // Python refuses a relative import that leads above the script's directory, too.
                _ => package.len().checked_sub(above).map(|n| &package[..n]),
            };
            if let Some(base) = base {
                let whole: Vec<String> = base.iter().chain(&import.parts).cloned().collect();
                self.add_module(&whole)?;
            }
            done.insert(import);
            Ok(())
        })
    }

    /// Adds the packages on the way to a module, and the module itself.
    fn add_module(&mut self, parts: &[String]) -> Result<(), PlanError> {
        for end in 1..=parts.len() {
            let (above, here) = (&parts[..end - 1], &parts[..end]);
            let place: PathBuf = here.iter().collect();
            if self.add_file(&place.join("__init__.py"), here)? {
                continue;
            }
            let mut file = place.into_os_string();
            file.push(".py");
            self.add_file(Path::new(&file), above)?;
            return Ok(());
        }
        Ok(())
    }

    /// Whether the module file exists. The first call for a name reads the file and queues its imports.
    fn add_file(&mut self, name: &Path, package: &[String]) -> Result<bool, PlanError> {
        if self.seen.contains(name) {
            return Ok(self.found.iter().any(|known| known == name));
        }
        if self.seen.len() >= LOOKUPS_MAX {
            return Err(self.too_many(TOO_MANY_NAMES));
        }
        self.seen.insert(name.to_path_buf());
        let first = name.components().next().map(|c| c.as_os_str().to_owned());
        let reserved = RESERVED_NAMES
            .iter()
            .any(|r| first.as_deref() == Some(r.as_ref()));
        // An input that the caller named takes precedence.
        if reserved || self.input_names.iter().any(|given| name.starts_with(given)) {
            return Ok(false);
        }
        let Some(source) = self.read_source(name)? else {
            return Ok(false);
        };
        if self.found.len() >= MODULES_MAX {
            return Err(self.too_many("there are more than 256 of them"));
        }
        self.found.push(name.to_path_buf());
        self.pending.push_back((source, package.to_vec()));
        Ok(true)
    }

    /// Reads a regular file below the script's directory. `None` if there is none, or if a symlink leads to it.
    fn read_source(&mut self, name: &Path) -> Result<Option<Vec<u8>>, PlanError> {
        let unreachable = |source: std::io::Error| {
            PlanError::unreachable(&self.script.with_file_name(name), source)
        };
        // Opening some devices has side effects, so look at the type first; the check of the descriptor decides.
        match rustix::fs::statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {}
            Ok(_) => {
                self.skipped.push(name.to_path_buf());
                return Ok(None);
            }
            Err(_) => return Ok(None),
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = match rustix::fs::openat2(&self.dir, name, flags, Mode::empty(), resolve) {
            Ok(file) => File::from(file),
            Err(Errno::LOOP | Errno::NOENT) => {
                self.skipped.push(name.to_path_buf());
                return Ok(None);
            }
            Err(errno) => return Err(unreachable(errno.into())),
        };
        if !file.metadata().map_err(unreachable)?.is_file() {
            return Ok(None);
        }
        let mut source = Vec::new();
        let mut bounded = file.take(self.bytes_left + 1);
        bounded.read_to_end(&mut source).map_err(unreachable)?;
        match self.bytes_left.checked_sub(source.len() as u64) {
            Some(left) => self.bytes_left = left,
            None => return Err(self.too_many("they are larger than 16 MiB")),
        }
        Ok(Some(source))
    }

    fn too_many(&self, why: &'static str) -> PlanError {
        PlanError::TooManySiblings {
            script: self.script.to_path_buf(),
            why,
        }
    }

    fn notice(&self) -> Option<String> {
        let list = |names: &[PathBuf]| {
            let shown = names.iter().take(LISTED_MAX);
            let shown: Vec<String> = shown.map(|name| name.display().to_string()).collect();
            match names.len().saturating_sub(LISTED_MAX) {
                0 => shown.join(", "),
                more => format!("{} and {more} more", shown.join(", ")),
            }
        };
        let copied = match self.found.is_empty() {
            true => String::from("no modules beside the script were copied in"),
            false => format!(
                "modules beside the script, copied in: {}",
                list(&self.found)
            ),
        };
        match (self.found.is_empty(), self.skipped.is_empty()) {
            (true, true) => None,
            (false, true) => Some(copied),
            (_, false) => {
                let skipped = list(&self.skipped);
                Some(format!(
                    "{copied}; left out, as links are not followed: {skipped}"
                ))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    struct Project(tempfile::TempDir);

    impl Project {
        fn new(files: &[(&str, &str)]) -> Project {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                let path = dir.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Project(dir)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().canonicalize().unwrap().join(name)
        }

        fn find(&self, script: &str, input_names: &[&str]) -> Result<SiblingInputs, PlanError> {
            let input_names: Vec<PathBuf> = input_names.iter().map(PathBuf::from).collect();
            find_siblings(&self.path(script), &self.path(""), &input_names)
        }

        fn names(&self, script: &str, input_names: &[&str]) -> Vec<String> {
            let found = self.find(script, input_names).unwrap();
            for (source, name) in &found.inputs {
                assert_eq!(*source, self.path(script).parent().unwrap().join(name));
            }
            let names = found.inputs.iter().map(|(_, n)| n.display().to_string());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        }
    }

    #[test]
    fn imports_are_followed_with_cycles_and_packages() {
        let project = Project::new(&[
            (
                "pkg/main.py",
                "import utils, json, gone\nfrom lib import model\nimport main",
            ),
            ("pkg/utils.py", "import helper\nimport utils"),
            ("pkg/helper.py", "import utils"),
            ("pkg/unused.py", ""),
            ("pkg/lib/__init__.py", "from . import extra"),
            (
                "pkg/lib/model.py",
                "from .deep.leaf import x\nfrom ..utils import y\nimport other\nfrom ... import api",
            ),
            ("pkg/lib/extra.py", ""),
            ("pkg/lib/unused.py", ""),
            ("pkg/lib/deep/__init__.py", ""),
            ("pkg/lib/deep/leaf.py", ""),
            ("pkg/other.py", ""),
            ("pkg/plain/x.py", ""),
            ("api.py", "import settings"),
            ("settings.py", ""),
        ]);
        let lib = [
            "lib/__init__.py",
            "lib/deep/__init__.py",
            "lib/deep/leaf.py",
            "lib/extra.py",
            "lib/model.py",
        ];
        let all: Vec<&str> = ["helper.py"]
            .into_iter()
            .chain(lib)
            .chain(["other.py", "utils.py"])
            .collect();
        assert_eq!(project.names("pkg/main.py", &[]), all);
        // Modules that the caller names as inputs are not copied twice.
        assert_eq!(project.names("pkg/main.py", &["lib", "utils.py"]), [""; 0]);
        let notice = project.find("pkg/main.py", &[]).unwrap().notice.unwrap();
        assert!(
            notice.contains("utils.py") && notice.contains("lib/model.py"),
            "{notice}"
        );
    }

    #[test]
    fn the_projects_root_and_places_outside_are_refused() {
        let project = Project::new(&[
            ("main.py", "import api"),
            ("api.py", ""),
            ("pkg/x.sh", "echo"),
            ("pkg/y", "#!/usr/bin/env python3\n"),
        ]);
        let error = project.find("main.py", &[]).unwrap_err().to_string();
        assert!(
            error.contains("below the project's root") && error.contains("--input"),
            "{error}"
        );
        // The root of a clone below the caller's project.
        for marker in ["clone/.git/config", "clone/.git", "clone/fumehood.toml"] {
            let above = Project::new(&[
                (marker, ""),
                ("clone/main.py", "import api"),
                ("clone/api.py", ""),
                ("clone/pkg/main.py", ""),
            ]);
            let error = above.find("clone/main.py", &[]).unwrap_err().to_string();
            assert!(error.contains("root of a project"), "{marker}: {error}");
            assert!(above.find("clone/pkg/main.py", &[]).is_ok());
        }
        let other = Project::new(&[("a/main.py", "")]);
        let outside = find_siblings(&other.path("a/main.py"), &project.path(""), &[]);
        assert!(outside.is_err());
        let error = project.find("pkg/x.sh", &[]).unwrap_err().to_string();
        assert!(error.contains("Python"), "{error}");
        assert!(project.find("pkg/y", &[]).is_ok());
    }

    #[test]
    fn links_and_special_files_are_left_out() {
        let project = Project::new(&[
            (
                "pkg/main.py",
                "import secret, up, pack.inner, fifo, data, folder",
            ),
            ("api.py", "secret"),
            ("out/inner.py", ""),
            ("out/__init__.py", ""),
            ("pkg/data/__init__.py", ""),
            ("pkg/folder.py/x", ""),
        ]);
        symlink("/etc/passwd", project.path("pkg/secret.py")).unwrap();
        symlink("../api.py", project.path("pkg/up.py")).unwrap();
        symlink("../out", project.path("pkg/pack")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            project.path("pkg/fifo.py"),
            FileType::Fifo,
            Mode::RWXU,
            0,
        )
        .unwrap();
        assert_eq!(project.names("pkg/main.py", &[]), [""; 0]);
        let notice = project.find("pkg/main.py", &[]).unwrap().notice.unwrap();
        for name in ["secret.py", "up.py", "pack/__init__.py"] {
            assert!(notice.contains(name), "{notice}");
        }
    }

    #[test]
    fn number_bytes_and_lookups_are_bounded() {
        let why = |result: Result<SiblingInputs, PlanError>| result.unwrap_err().to_string();
        let names: Vec<String> = (0..=MODULES_MAX).map(|n| format!("pkg/m{n}.py")).collect();
        let bomb: String = (0..=MODULES_MAX)
            .map(|n| format!("import m{n}\n"))
            .collect();
        let mut files: Vec<(&str, &str)> = names.iter().map(|n| (n.as_str(), "")).collect();
        files.push(("pkg/main.py", &bomb));
        assert!(why(Project::new(&files).find("pkg/main.py", &[])).contains("256"));

        let project = Project::new(&[("pkg/main.py", "import huge")]);
        File::create(project.path("pkg/huge.py"))
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert!(why(project.find("pkg/main.py", &[])).contains("16 MiB"));

        let bomb: String = (0..LOOKUPS_MAX).map(|n| format!("import m{n}\n")).collect();
        let project = Project::new(&[("pkg/main.py", &bomb)]);
        assert!(why(project.find("pkg/main.py", &[])).contains("too many"));

        // Each name below a missing package is looked up only once, but each would be remembered.
        let names: Vec<String> = (0..=LOOKUPS_MAX).map(|n| format!("m{n}")).collect();
        let deep = vec!["a"; 16].join(".");
        let bomb = format!("from {deep} import {}", names.join(","));
        let project = Project::new(&[("pkg/main.py", &bomb)]);
        assert!(why(project.find("pkg/main.py", &[])).contains("too many"));
    }

    #[test]
    fn a_source_of_names_takes_little_memory() {
        // Each name of one byte stands for an import of 17 parts. Collected, these would take half a gigabyte.
        let deep = vec!["a"; 16].join(".");
        let bomb = format!("from {deep} import {}", "a,".repeat(1 << 20));
        let project = Project::new(&[("pkg/main.py", &bomb)]);
        let before = memory_peak_bytes();
        let error = project.find("pkg/main.py", &[]).unwrap_err().to_string();
        assert!(error.contains("too many"), "{error}");
        let grown = memory_peak_bytes() - before;
        assert!(grown < 256 << 20, "{grown} bytes");
    }

    /// Peak memory of the whole process.
    fn memory_peak_bytes() -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
        let kib: u64 = peak
            .unwrap()
            .trim()
            .split(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        kib << 10
    }
}
