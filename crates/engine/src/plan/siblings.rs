//! `--siblings`: the Python modules beside a script that its imports name, and those that they name in turn.
//!
//! Nothing is executed. Modules come from the script's own directory and from packages in it, as regular files that
//! are opened without following a link. That directory must lie below the project's root: at the root lie the platform's
//! own modules and settings, which a name in an untrusted script must not bring in.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::PolicyError;
use super::imports::imports;
use store::types::input_name::RESERVED_NAMES;

/// Modules brought along; more is a library, which belongs in a runtime or is copied with `--input`.
const MODULES_MAX: usize = 256;
/// Bytes of all of them, and of the script, which is read for its imports.
const BYTES_MAX: u64 = 16 << 20;
/// Names looked up, and different names that one source imports. A script may hold any number of import statements.
const LOOKUPS_MAX: usize = 10_000;
/// Names that one source imports, repeated or not.
const NAMES_MAX: usize = 100_000;
const TOO_MANY_NAMES: &str = "their imports name too many modules";
/// Names listed in the notice.
const LISTED_MAX: usize = 20;

/// What is brought along, and what the caller is told about it.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    /// Source, without links, and name in the workspace.
    pub inputs: Vec<(PathBuf, PathBuf)>,
    pub notice: Option<String>,
}

/// Finds the modules. `script` and `project` are resolved paths; `named` are the names in the workspace that the
/// caller's own inputs have, which win.
pub(super) fn siblings(
    script: &Path,
    project: &Path,
    named: &[PathBuf],
) -> Result<Siblings, PolicyError> {
    let refuse = |why| PolicyError::Siblings {
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
    let unreachable = |source: Errno| PolicyError::Unreachable {
        path: script.to_path_buf(),
        source: source.into(),
    };
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::openat2(rustix::fs::CWD, top, flags, Mode::empty(), resolve)
        .map_err(unreachable)?;
    let mut search = Search {
        dir,
        script,
        named,
        bytes_left: BYTES_MAX,
        seen: HashSet::new(),
        pending: VecDeque::new(),
        brought: Vec::new(),
        left_out: Vec::new(),
    };
    let source = search.read(Path::new(own))?;
    let source = source.ok_or_else(|| refuse("it is not a regular file"))?;
    if !is_python(Path::new(own), &source) {
        return Err(refuse(
            "it is no Python script, and only Python's imports are followed; name what it needs with --input",
        ));
    }
    search.seen.insert(PathBuf::from(own));
    search.follow(&source, &[])?;
    while let Some((source, package)) = search.pending.pop_front() {
        search.follow(&source, &package)?;
    }
    let notice = search.notice();
    let inputs = search.brought.into_iter();
    Ok(Siblings {
        inputs: inputs.map(|name| (top.join(&name), name)).collect(),
        notice,
    })
}

fn is_python(name: &Path, source: &[u8]) -> bool {
    let first = source.split(|b| *b == b'\n').next().unwrap_or_default();
    let ending = name.extension().is_some_and(|e| e == "py" || e == "pyw");
    ending || first.starts_with(b"#!") && first.windows(6).any(|w| w == b"python")
}

struct Search<'a> {
    /// The script's directory. Everything is opened below it.
    dir: OwnedFd,
    script: &'a Path,
    named: &'a [PathBuf],
    bytes_left: u64,
    /// Files looked up, by their names in the workspace.
    seen: HashSet<PathBuf>,
    /// Sources whose imports are still to be followed, and the package that each belongs to.
    pending: VecDeque<(Vec<u8>, Vec<String>)>,
    brought: Vec<PathBuf>,
    left_out: Vec<PathBuf>,
}

impl Search<'_> {
    /// Follows the imports of one source in `package`.
    fn follow(&mut self, source: &[u8], package: &[String]) -> Result<(), PolicyError> {
        let mut done = HashSet::new();
        let mut names = 0;
        imports(source, |import| {
            names += 1;
            if names > NAMES_MAX {
                return Err(self.too_much(TOO_MANY_NAMES));
            }
            if done.contains(&import) {
                return Ok(());
            }
            if done.len() >= LOOKUPS_MAX {
                return Err(self.too_much(TOO_MANY_NAMES));
            }
            let above = import.dots.saturating_sub(1);
            let base = match import.dots {
                0 => Some(&[][..]),
                // What climbs out of the script's directory is nothing that Python would import either.
                _ => package.len().checked_sub(above).map(|n| &package[..n]),
            };
            if let Some(base) = base {
                let whole: Vec<String> = base.iter().chain(&import.parts).cloned().collect();
                self.module(&whole)?;
            }
            done.insert(import);
            Ok(())
        })
    }

    /// Each package on the way to a module, and the module.
    fn module(&mut self, parts: &[String]) -> Result<(), PolicyError> {
        for end in 1..=parts.len() {
            let (above, here) = (&parts[..end - 1], &parts[..end]);
            let place: PathBuf = here.iter().collect();
            if self.take(&place.join("__init__.py"), here)? {
                continue;
            }
            let mut file = place.into_os_string();
            file.push(".py");
            self.take(Path::new(&file), above)?;
            return Ok(());
        }
        Ok(())
    }

    /// Whether the file is there; it is read and queued the first time.
    fn take(&mut self, name: &Path, package: &[String]) -> Result<bool, PolicyError> {
        if self.seen.contains(name) {
            return Ok(self.brought.iter().any(|known| known == name));
        }
        if self.seen.len() >= LOOKUPS_MAX {
            return Err(self.too_much(TOO_MANY_NAMES));
        }
        self.seen.insert(name.to_path_buf());
        let first = name.components().next().map(|c| c.as_os_str().to_owned());
        let reserved = RESERVED_NAMES
            .iter()
            .any(|r| first.as_deref() == Some(r.as_ref()));
        // What the caller names comes in as the caller says.
        if reserved || self.named.iter().any(|given| name.starts_with(given)) {
            return Ok(false);
        }
        let Some(source) = self.read(name)? else {
            return Ok(false);
        };
        if self.brought.len() >= MODULES_MAX {
            return Err(self.too_much("there are more than 256 of them"));
        }
        self.brought.push(name.to_path_buf());
        self.pending.push_back((source, package.to_vec()));
        Ok(true)
    }

    /// The content of a regular file below the directory. `None` where there is none, or no link-free way to it.
    fn read(&mut self, name: &Path) -> Result<Option<Vec<u8>>, PolicyError> {
        let unreachable = |source: std::io::Error| PolicyError::Unreachable {
            path: self.script.with_file_name(name),
            source,
        };
        // Opening some devices does something, so the kind is looked at first; the descriptor decides.
        match rustix::fs::statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {}
            Ok(_) => {
                self.left_out.push(name.to_path_buf());
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
                self.left_out.push(name.to_path_buf());
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
            None => return Err(self.too_much("they are larger than 16 MiB")),
        }
        Ok(Some(source))
    }

    fn too_much(&self, why: &'static str) -> PolicyError {
        PolicyError::TooManySiblings {
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
        let left_out = match self.left_out.is_empty() {
            true => String::new(),
            false => format!(
                "; left out, as links are not followed: {}",
                list(&self.left_out)
            ),
        };
        match (self.brought.is_empty(), left_out.is_empty()) {
            (true, true) => None,
            (true, false) => Some(format!(
                "no modules beside the script were copied in{left_out}"
            )),
            _ => Some(format!(
                "modules beside the script, copied in: {}{left_out}",
                list(&self.brought)
            )),
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

        fn find(&self, script: &str, named: &[&str]) -> Result<Siblings, PolicyError> {
            let named: Vec<PathBuf> = named.iter().map(PathBuf::from).collect();
            siblings(&self.path(script), &self.path(""), &named)
        }

        fn names(&self, script: &str, named: &[&str]) -> Vec<String> {
            let found = self.find(script, named).unwrap();
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
        // What the caller names itself is not copied twice.
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
        let other = Project::new(&[("a/main.py", "")]);
        let outside = siblings(&other.path("a/main.py"), &project.path(""), &[]);
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
        let why = |result: Result<Siblings, PolicyError>| result.unwrap_err().to_string();
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

        // Names below one that is not there are looked up once, but each would be remembered.
        let names: Vec<String> = (0..=LOOKUPS_MAX).map(|n| format!("m{n}")).collect();
        let deep = vec!["a"; 16].join(".");
        let bomb = format!("from {deep} import {}", names.join(","));
        let project = Project::new(&[("pkg/main.py", &bomb)]);
        assert!(why(project.find("pkg/main.py", &[])).contains("too many"));
    }

    #[test]
    fn a_source_of_names_takes_little_memory() {
        // Each name of one byte stands for an import of 17 parts: gathered, these are half a gigabyte.
        let deep = vec!["a"; 16].join(".");
        let bomb = format!("from {deep} import {}", "a,".repeat(1 << 20));
        let project = Project::new(&[("pkg/main.py", &bomb)]);
        let before = memory_peak_bytes();
        let error = project.find("pkg/main.py", &[]).unwrap_err().to_string();
        assert!(error.contains("too many"), "{error}");
        let grown = memory_peak_bytes() - before;
        assert!(grown < 256 << 20, "{grown} bytes");
    }

    /// Of the whole process.
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
