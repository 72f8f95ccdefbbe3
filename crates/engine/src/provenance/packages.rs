//! The packages of a runtime, from the files that their installers wrote. Nothing is executed.
//!
//! Every run pays for this, so it must be cheap. The names of `NAME-VERSION.dist-info` directories, of eggs and of
//! conda's records contain name and version. A file is opened only if its name lacks them, and for R, whose
//! directories have no versions in their names. Names can lie as files can: whoever writes a runtime decides what it
//! claims to be.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::InspectedDir;
use super::{Notes, bounded_path_text};
use crate::plan::runtime::venv_settings;

/// The most packages in all libraries of a run.
pub const PACKAGES_MAX: usize = 10_000;
/// The most bytes of METADATA to read. The headers come first; the readme follows.
const METADATA_BYTES_MAX: usize = 64 << 10;
/// The most bytes of all files that are opened for their headers.
const METADATA_ALL_BYTES_MAX: usize = 32 << 20;
const NAME_BYTES_MAX: usize = 256;
const LIBRARIES_MAX: usize = 64;

/// A directory in which packages are installed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    /// The directory, escaped.
    pub path: String,
    /// Whose packages they are, and so how they are described.
    pub kind: LibraryKind,
    /// Sorted by name.
    pub packages: Vec<Package>,
}

/// Who installs the packages of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LibraryKind {
    /// Python: `site-packages` or `dist-packages`.
    Python,
    /// Conda: the `conda-meta` of an environment.
    Conda,
    /// R: a library of R packages.
    R,
}

/// An installed package.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Package {
    /// The name, as the package states it.
    pub name: String,
    /// `None` if the package does not state a version.
    pub version: Option<String>,
    /// Conda's build string.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<String>,
}

/// Collects libraries, and keeps track of the bounds.
pub(super) struct PackageFinder<'n> {
    pub(super) libraries: Vec<Library>,
    pub(super) packages_left: usize,
    bytes_left: usize,
    /// How many bytes of text may still be listed. The record stores this text, and an attacker may have chosen the
    /// names.
    text_left: usize,
    notes: &'n mut Notes,
}

const TEXT_BYTES_MAX: usize = 1 << 20;

impl<'n> PackageFinder<'n> {
    pub(super) fn new(notes: &'n mut Notes) -> PackageFinder<'n> {
        PackageFinder {
            libraries: Vec::new(),
            packages_left: PACKAGES_MAX,
            bytes_left: METADATA_ALL_BYTES_MAX,
            text_left: TEXT_BYTES_MAX,
            notes,
        }
    }

    /// Adds Python's libraries below a prefix: those of one version (`3.11`) if it is known, else of all.
    pub(super) fn add_python(&mut self, prefix: &Path, version: Option<&str>) {
        let mut places = Vec::new();
        for lib in ["lib", "lib64"] {
            let dir = prefix.join(lib);
            let mut pythons = python_dirs(&dir);
            pythons.retain(|python| version.is_none_or(|version| python.version == version));
            for python in pythons {
                places.push(dir.join(&python.name).join("site-packages"));
                places.push(dir.join(&python.name).join("dist-packages"));
            }
        }
        if prefix == Path::new("/usr") {
            // Debian's own packages serve every version. The administrator's packages are in /usr/local.
            places.push(PathBuf::from("/usr/lib/python3/dist-packages"));
            self.add_python(Path::new("/usr/local"), version);
        }
        for place in places {
            self.add_library(&place, LibraryKind::Python);
        }
    }

    pub(super) fn add_conda(&mut self, prefix: &Path) {
        self.add_library(&prefix.join("conda-meta"), LibraryKind::Conda);
    }

    pub(super) fn add_r(&mut self, prefix: &Path) {
        for lib in ["lib", "lib64"] {
            for library in ["library", "site-library"] {
                self.add_library(&prefix.join(lib).join("R").join(library), LibraryKind::R);
            }
        }
        if prefix == Path::new("/usr") {
            self.add_library(Path::new("/usr/local/lib/R/site-library"), LibraryKind::R);
        }
    }

    /// Adds one library, if it exists and is not listed yet.
    pub(super) fn add_library(&mut self, path: &Path, kind: LibraryKind) {
        let shown = bounded_path_text(path.as_os_str().as_bytes());
        let listed = self.libraries.iter().any(|library| library.path == shown);
        let Ok(dir) = InspectedDir::open(path) else {
            return;
        };
        if listed {
            return;
        }
        if self.libraries.len() == LIBRARIES_MAX {
            self.notes
                .add("packages: there are more libraries than are listed");
            return;
        }
        let wanted = |name: &[u8]| match kind {
            LibraryKind::Python => name.ends_with(b".dist-info") || name.ends_with(b".egg-info"),
            LibraryKind::Conda => name.ends_with(b".json"),
            LibraryKind::R => !name.starts_with(b"."),
        };
        let Ok(listing) = dir.list(self.packages_left, wanted) else {
            self.notes
                .add(format!("packages: {shown} cannot be listed"));
            return;
        };
        if listing.more {
            self.notes
                .add(format!("packages: {shown} holds more than are listed"));
        }
        self.packages_left -= listing.names.len();
        let bytes_left = &mut self.bytes_left;
        let mut head = |path: &[u8]| {
            let head = dir.read(path, METADATA_BYTES_MAX.min(*bytes_left)).ok()?;
            *bytes_left -= head.bytes.len();
            Some(head.bytes)
        };
        let names = listing.names.iter();
        let mut packages: Vec<Package> = names
            .filter_map(|name| match kind {
                LibraryKind::Python => python_package(name.to_bytes(), &mut head),
                LibraryKind::Conda => conda_package(name.to_bytes()),
                LibraryKind::R => r_package(name.to_bytes(), &mut head),
            })
            .collect();
        if self.bytes_left == 0 {
            let text = "packages: their files are so large that not all versions were read";
            self.notes.add(text);
        }
        packages.sort();
        let found = packages.len();
        packages.retain(|package| {
            let words = [&package.version, &package.build].into_iter().flatten();
            let bytes = package.name.len() + words.map(String::len).sum::<usize>();
            let left = self.text_left.checked_sub(bytes);
            self.text_left = left.unwrap_or(self.text_left);
            left.is_some()
        });
        if packages.len() < found {
            self.notes.add(format!(
                "packages: {shown} has names so long that not all are listed"
            ));
        }
        if !packages.is_empty() {
            self.libraries.push(Library {
                path: shown,
                kind,
                packages,
            });
        }
    }
}

/// A directory such as `lib/python3.11`: its name, and the version in the name.
pub(super) struct PythonDir {
    pub(super) name: String,
    pub(super) version: String,
}

pub(super) fn python_dirs(lib: &Path) -> Vec<PythonDir> {
    let Ok(dir) = InspectedDir::open(lib) else {
        return Vec::new();
    };
    let wanted = |name: &[u8]| name.starts_with(b"python") || name.starts_with(b"pypy");
    let Ok(listing) = dir.list(1000, wanted) else {
        return Vec::new();
    };
    let names = listing.names.iter().filter_map(|name| name.to_str().ok());
    let dirs = names.filter_map(|name| {
        Some(PythonDir {
            name: name.to_owned(),
            version: version_in(name)?.to_owned(),
        })
    });
    dirs.collect()
}

/// `3.11` for `python3.11`, `3.10` for `pypy3.10`, `3.13` for `python3.13t`; none for `python3`.
pub(super) fn version_in(name: &str) -> Option<&str> {
    let version = name
        .strip_prefix("python")
        .or_else(|| name.strip_prefix("pypy"))?;
    let numbers = version.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let (major, minor) = numbers.split_once('.')?;
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (number(major) && number(minor)).then_some(numbers)
}

/// `head` reads the beginning of a file in the library.
fn python_package(entry: &[u8], head: &mut dyn FnMut(&[u8]) -> Option<Vec<u8>>) -> Option<Package> {
    let (stem, file) = match entry.strip_suffix(b".dist-info") {
        Some(stem) => (stem, "METADATA"),
        None => (entry.strip_suffix(b".egg-info")?, "PKG-INFO"),
    };
    // The name of an egg may end with the version of Python for which it was made.
    let python = |part: &[u8]| part.starts_with(b"-py") && part[3].is_ascii_digit();
    let named = match stem.windows(4).position(python) {
        Some(python) if file == "PKG-INFO" => &stem[..python],
        _ => stem,
    };
    let dash = named.iter().rposition(|b| *b == b'-');
    if let Some(dash) = dash
        && dash > 0
        && named.get(dash + 1).is_some_and(u8::is_ascii_digit)
    {
        return Some(package(&named[..dash], Some(&named[dash + 1..])));
    }
    let inner = [entry, b"/", file.as_bytes()].concat();
    let bytes = head(&inner).or_else(|| head(entry)).unwrap_or_default();
    let name = header(&bytes, b"Name").unwrap_or(stem);
    Some(package(name, header(&bytes, b"Version")))
}

/// Parses `NAME-VERSION-BUILD.json`. Neither version nor build contains a dash.
fn conda_package(entry: &[u8]) -> Option<Package> {
    let stem = entry.strip_suffix(b".json")?;
    let mut parts = stem.rsplitn(3, |b| *b == b'-');
    let (build, version, name) = (parts.next()?, parts.next()?, parts.next()?);
    let build = Some(shown_name(build));
    (!name.is_empty()).then(|| Package {
        build,
        ..package(name, Some(version))
    })
}

fn r_package(entry: &[u8], head: &mut dyn FnMut(&[u8]) -> Option<Vec<u8>>) -> Option<Package> {
    let inner = [entry, b"/DESCRIPTION"].concat();
    let bytes = head(&inner)?;
    let name = header(&bytes, b"Package").unwrap_or(entry);
    Some(package(name, header(&bytes, b"Version")))
}

fn package(name: &[u8], version: Option<&[u8]>) -> Package {
    Package {
        name: shown_name(name),
        version: version.map(shown_name),
        build: None,
    }
}

fn shown_name(bytes: &[u8]) -> String {
    super::bounded_text(bytes, NAME_BYTES_MAX)
}

/// The value of a `Name: value` header before the first empty line.
fn header<'a>(bytes: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let lines = bytes.split(|b| *b == b'\n');
    let headers = lines.take_while(|line| !line.trim_ascii().is_empty());
    let mut values = headers.filter_map(|line| {
        let colon = line.iter().position(|b| *b == b':')?;
        let named = line[..colon].eq_ignore_ascii_case(name);
        named.then(|| line[colon + 1..].trim_ascii())
    });
    values.find(|value| !value.is_empty())
}

/// The version of a Python, in full if it can be found: from pyvenv.cfg, conda's record or the C header, else from
/// the name of the interpreter or of the only library.
pub(super) fn python_version(program: &Path, prefix: &Path) -> Option<String> {
    let dir = InspectedDir::open(prefix).ok()?;
    if let Some(version) = venv_setting(&dir, &[b"version", b"version_info"]) {
        return Some(shown_name(&version));
    }
    if let Some(version) = conda_python(&dir) {
        return Some(version);
    }
    let short = named_version(program).or_else(|| {
        let mut dirs = python_dirs(&prefix.join("lib"));
        let only = dirs.pop()?;
        dirs.is_empty().then_some(only.version)
    })?;
    let header_at = format!("include/python{short}/patchlevel.h");
    let header = dir.read(header_at.as_bytes(), METADATA_BYTES_MAX).ok();
    let full = header.and_then(|head| {
        let mut lines = head.bytes.split(|b| *b == b'\n');
        let quoted = |line: &[u8]| {
            let value = line.strip_prefix(b"#define PY_VERSION")?.trim_ascii();
            Some(shown_name(value.strip_prefix(b"\"")?.strip_suffix(b"\"")?))
        };
        lines.find_map(quoted)
    });
    Some(full.unwrap_or(short))
}

/// The two numbers in the name of the library's directory.
pub(super) fn short_version(version: &str) -> Option<String> {
    let mut numbers = version.split('.');
    let (major, minor) = (numbers.next()?, numbers.next()?);
    let minor: String = minor.chars().take_while(char::is_ascii_digit).collect();
    Some(format!("{major}.{minor}"))
}

fn conda_python(prefix: &InspectedDir) -> Option<String> {
    let meta = prefix.open_dir(b"conda-meta").ok()?;
    let records = meta.list(100, |name| name.starts_with(b"python-")).ok()?;
    let mut found = records.names.iter().filter_map(|name| {
        let package = conda_package(name.to_bytes())?;
        package.version.filter(|_| package.name == "python")
    });
    found.next()
}

/// `3.11` for a program called `python3.11`, or for a `python3` that is a symlink to such a program.
fn named_version(program: &Path) -> Option<String> {
    const LINKS_MAX: usize = 4;
    let dir = InspectedDir::open(program.parent()?).ok()?;
    let mut name = program.file_name()?.as_bytes().to_vec();
    for _ in 0..LINKS_MAX {
        if let Some(version) = std::str::from_utf8(&name).ok().and_then(version_in) {
            return Some(version.to_owned());
        }
        name = dir.read_link(&name).ok()?;
        if name.contains(&b'/') {
            let last = Path::new(OsStr::from_bytes(&name)).file_name()?;
            return version_in(last.to_str()?).map(str::to_owned);
        }
    }
    None
}

/// The first value of one of these keys in pyvenv.cfg.
pub(super) fn venv_setting(prefix: &InspectedDir, keys: &[&[u8]]) -> Option<Vec<u8>> {
    let text = prefix.read_whole(b"pyvenv.cfg", METADATA_BYTES_MAX).ok()?;
    let mut settings = venv_settings(&text);
    let (_, value) = settings.find(|(key, _)| keys.contains(&key.as_slice()))?;
    Some(value.to_vec())
}

/// The version of R: that of its package `base`.
pub(super) fn r_version(libraries: &[Library]) -> Option<String> {
    let r = libraries.iter().filter(|l| l.kind == LibraryKind::R);
    let mut packages = r.flat_map(|library| &library.packages);
    let base = packages.find(|package| package.name == "base")?;
    base.version.clone()
}
