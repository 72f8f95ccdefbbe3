//! The packages of a runtime, from what their installers wrote down; nothing is executed.
//!
//! Cheap, because every run pays for it: `NAME-VERSION.dist-info` says both, and so do the names of eggs and of conda's records, so that
//! a file is opened only for what does not (and for R, whose directories bear no versions). A name can lie as well as
//! a file can; whoever writes a runtime decides what it claims to be.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::Dir;
use super::{Notes, shown};

/// In all libraries of a run.
pub const PACKAGES_MAX: usize = 10_000;
/// The headers of METADATA come first; what follows is the readme.
const METADATA_BYTES_MAX: usize = 64 << 10;
/// Of all files opened for their headers.
const METADATA_ALL_BYTES_MAX: usize = 32 << 20;
const NAME_BYTES_MAX: usize = 256;
const LIBRARIES_MAX: usize = 64;

/// One directory in which packages are installed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    pub path: String,
    pub kind: LibraryKind,
    /// Sorted by name.
    pub packages: Vec<Package>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LibraryKind {
    Python,
    Conda,
    R,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Package {
    pub name: String,
    /// `None` if the package does not say.
    pub version: Option<String>,
    /// Conda's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<String>,
}

/// What is found while looking, and what is left of the bound.
pub(super) struct Finder<'n> {
    pub(super) libraries: Vec<Library>,
    pub(super) left: usize,
    bytes_left: usize,
    /// Of what is listed, which is kept and stored: names are the prefix's, which an attacker may have made.
    text_left: usize,
    notes: &'n mut Notes,
}

const TEXT_BYTES_MAX: usize = 1 << 20;

impl<'n> Finder<'n> {
    pub(super) fn new(notes: &'n mut Notes) -> Finder<'n> {
        Finder {
            libraries: Vec::new(),
            left: PACKAGES_MAX,
            bytes_left: METADATA_ALL_BYTES_MAX,
            text_left: TEXT_BYTES_MAX,
            notes,
        }
    }

    /// Python's libraries below a prefix; of one version (`3.11`) if that is known, else of all.
    pub(super) fn python(&mut self, prefix: &Path, version: Option<&str>) {
        let mut places = Vec::new();
        for lib in ["lib", "lib64"] {
            let dir = prefix.join(lib);
            for python in python_dirs(&dir) {
                let wanted = version.is_none_or(|version| python.version == version);
                if wanted {
                    places.push(dir.join(&python.name).join("site-packages"));
                    places.push(dir.join(&python.name).join("dist-packages"));
                }
            }
        }
        if prefix == Path::new("/usr") {
            // Debian's own packages serve every version; what the administrator adds lies in /usr/local.
            places.push(PathBuf::from("/usr/lib/python3/dist-packages"));
            self.python(Path::new("/usr/local"), version);
        }
        for place in places {
            self.library(&place, LibraryKind::Python);
        }
    }

    pub(super) fn conda(&mut self, prefix: &Path) {
        self.library(&prefix.join("conda-meta"), LibraryKind::Conda);
    }

    pub(super) fn r(&mut self, prefix: &Path) {
        for lib in ["lib", "lib64"] {
            for library in ["library", "site-library"] {
                self.library(&prefix.join(lib).join("R").join(library), LibraryKind::R);
            }
        }
        if prefix == Path::new("/usr") {
            self.library(Path::new("/usr/local/lib/R/site-library"), LibraryKind::R);
        }
    }

    /// One library, if it is there and not listed yet.
    pub(super) fn library(&mut self, path: &Path, kind: LibraryKind) {
        let said = shown(path.as_os_str().as_bytes());
        let listed = self.libraries.iter().any(|library| library.path == said);
        let Ok(dir) = Dir::open(path) else {
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
        let Ok(listing) = dir.list(self.left, wanted) else {
            self.notes.add(format!("packages: {said} cannot be listed"));
            return;
        };
        if listing.more {
            self.notes
                .add(format!("packages: {said} holds more than are listed"));
        }
        self.left -= listing.names.len();
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
        let text_left = &mut self.text_left;
        packages.retain(|package| {
            let words =
                [&package.version, &package.build].map(|w| w.as_ref().map_or(0, String::len));
            let bytes = package.name.len() + words.iter().sum::<usize>();
            let fits = bytes <= *text_left;
            *text_left -= if fits { bytes } else { 0 };
            fits
        });
        if packages.len() < found {
            self.notes.add(format!(
                "packages: {said} has names so long that not all are listed"
            ));
        }
        if !packages.is_empty() {
            self.libraries.push(Library {
                path: said,
                kind,
                packages,
            });
        }
    }
}

/// `lib/python3.11`: the name, and the version in it.
pub(super) struct PythonDir {
    pub(super) name: String,
    pub(super) version: String,
}

pub(super) fn python_dirs(lib: &Path) -> Vec<PythonDir> {
    let Ok(dir) = Dir::open(lib) else {
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

/// `3.11` of `python3.11`, `pypy3.10` or `python3.13t`; nothing of `python3`.
pub(super) fn version_in(name: &str) -> Option<&str> {
    let version = name
        .strip_prefix("python")
        .or_else(|| name.strip_prefix("pypy"))?;
    let numbers = version.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let (major, minor) = numbers.split_once('.')?;
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (number(major) && number(minor)).then_some(numbers)
}

/// `head` gives the beginning of a file of the library.
fn python_package(entry: &[u8], head: &mut dyn FnMut(&[u8]) -> Option<Vec<u8>>) -> Option<Package> {
    let (stem, file) = match entry.strip_suffix(b".dist-info") {
        Some(stem) => (stem, "METADATA"),
        None => (entry.strip_suffix(b".egg-info")?, "PKG-INFO"),
    };
    // Eggs may say for which Python they were made.
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

/// `NAME-VERSION-BUILD.json`; neither version nor build has a dash in it.
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
    super::bounded(bytes, NAME_BYTES_MAX)
}

/// The value of `Name: value` before the first empty line.
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

/// What a Python says of its own version, in full where it can be found: the settings of a venv, the record of conda, the
/// header for C, else the name of the interpreter or of the only library.
pub(super) fn python_version(program: &Path, prefix: &Path) -> Option<String> {
    let dir = Dir::open(prefix).ok()?;
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

/// The two numbers with which the library's directory is named.
pub(super) fn short_version(version: &str) -> Option<String> {
    let mut numbers = version.split('.');
    let (major, minor) = (numbers.next()?, numbers.next()?);
    let minor: String = minor.chars().take_while(char::is_ascii_digit).collect();
    Some(format!("{major}.{minor}"))
}

fn conda_python(prefix: &Dir) -> Option<String> {
    let meta = prefix.sub(b"conda-meta").ok()?;
    let records = meta.list(100, |name| name.starts_with(b"python-")).ok()?;
    let mut found = records.names.iter().filter_map(|name| {
        let package = conda_package(name.to_bytes())?;
        package.version.filter(|_| package.name == "python")
    });
    found.next()
}

/// `3.11` of a program called `python3.11`, or of what `python3` leads to in its own directory.
fn named_version(program: &Path) -> Option<String> {
    const LINKS_MAX: usize = 4;
    let dir = Dir::open(program.parent()?).ok()?;
    let mut name = program.file_name()?.as_bytes().to_vec();
    for _ in 0..LINKS_MAX {
        if let Some(version) = std::str::from_utf8(&name).ok().and_then(version_in) {
            return Some(version.to_owned());
        }
        name = dir.link(&name).ok()?;
        if name.contains(&b'/') {
            let last = Path::new(OsStr::from_bytes(&name)).file_name()?;
            return version_in(last.to_str()?).map(str::to_owned);
        }
    }
    None
}

/// The first value of one of these keys in pyvenv.cfg.
pub(super) fn venv_setting(prefix: &Dir, keys: &[&[u8]]) -> Option<Vec<u8>> {
    let text = prefix.read_whole(b"pyvenv.cfg", METADATA_BYTES_MAX).ok()?;
    let mut lines = text.split(|b| *b == b'\n');
    lines.find_map(|line| {
        let equals = line.iter().position(|b| *b == b'=')?;
        let key = line[..equals].trim_ascii().to_ascii_lowercase();
        let value = line[equals + 1..].trim_ascii();
        let found = !value.is_empty() && keys.contains(&key.as_slice());
        found.then(|| value.to_vec())
    })
}

/// Of R: the version of its package `base`.
pub(super) fn r_version(libraries: &[Library]) -> Option<String> {
    let r = libraries.iter().filter(|l| l.kind == LibraryKind::R);
    let mut packages = r.flat_map(|library| &library.packages);
    packages
        .find(|package| package.name == "base")?
        .version
        .clone()
}
