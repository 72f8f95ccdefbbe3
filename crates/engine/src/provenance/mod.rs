//! Where a result comes from: everything that is stored with an attempt because it cannot be found out afterwards.
//!
//! Gathering never fails. What could not be found out is null, and `notes` says why. Nothing is executed for it, and every
//! part has a bound, since much of what is looked at (a venv, a `.git`) may have been written by the code to be confined.
//! All text went through [`escape_text`], so it has no NUL and is UTF-8 for every database; where it was too long, it
//! ends in [`CUT`], which escaped text cannot hold otherwise.

mod files;
mod git;
mod packages;
#[cfg(test)]
mod tests;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::system::Uname;
use serde::{Deserialize, Serialize};

use files::Dir;
use packages::Finder;
pub use packages::{Library, LibraryKind, PACKAGES_MAX, Package};
use store::types::escaping::escape_text;
use store::types::manifest::ContentHash;
use store::types::secret_values::{SecretReason, secret_reason};

pub const VERSION: u32 = 1;
/// Inputs that are listed; the rest is in the counts and the hash.
pub const INPUTS_MAX: usize = 1_000;
/// Arguments, and variables, that are listed.
pub const STRINGS_MAX: usize = 1_000;
/// Of one argument or value: a program given with `-c` should fit.
pub const STRING_BYTES_MAX: usize = 64 << 10;
/// Of all arguments, and of all variables.
pub const STRINGS_BYTES_MAX: usize = 512 << 10;
const PATH_BYTES_MAX: usize = 4096;
const NOTES_MAX: usize = 50;
/// The end of a text that was cut.
pub const CUT: &str = "\\[cut]";

/// What the caller knows. Paths are canonical.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// As the program gets it.
    pub argv: &'a [OsString],
    pub rights: Rights,
    /// Where the script lay, and what it was.
    pub script: Option<(&'a Path, Option<ContentHash>)>,
    /// Path in the workspace (escaped), bytes, hash.
    pub inputs: &'a [(String, u64, ContentHash)],
    /// As the user gave it, with `--env`.
    pub env: &'a [(OsString, OsString)],
    /// Names whose values are withheld: a name, or the beginning of one and a star.
    pub secret_names: &'a [String],
    /// What is executed: `Plan::program`.
    pub program: &'a Path,
    /// Shown for the runtime besides the system: `Runtime::prefixes`.
    pub prefixes: &'a [PathBuf],
    /// The environment inside: `Plan::env`. Only R_LIBS, R_LIBS_USER and R_LIBS_SITE are looked at.
    pub inside_env: &'a [(OsString, OsString)],
    pub project: &'a Path,
    pub data: Option<&'a Path>,
    pub docs: Option<&'a Path>,
    /// `--read`: where on the host, where inside.
    pub reads: &'a [(PathBuf, PathBuf)],
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    pub version: u32,
    pub fumehood: String,
    pub argv: Vec<String>,
    /// How many arguments are not listed.
    pub argv_left_out: u64,
    pub script: Option<Script>,
    pub inputs: Inputs,
    pub env: Vec<Variable>,
    pub env_left_out: u64,
    pub runtime: Runtime,
    pub project: String,
    pub data: Option<String>,
    pub docs: Option<String>,
    pub reads: Vec<Read>,
    pub git: Option<Git>,
    pub host: Host,
    pub submitter: Submitter,
    /// What could not be found out, and why.
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Script {
    pub path: String,
    pub blake3: Option<ContentHash>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// The first [`INPUTS_MAX`] by path.
    pub files: Vec<InputFile>,
    pub count: u64,
    pub bytes: u64,
    /// Of all of them in the order of their paths: the length of the path (8 bytes, little end first), the path, the
    /// bytes (likewise), the hash (64 hex digits).
    pub blake3: ContentHash,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    pub path: String,
    pub bytes: u64,
    pub blake3: ContentHash,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variable {
    pub name: String,
    /// `None` if it is withheld.
    pub value: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withheld: Option<SecretReason>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// What is executed.
    pub program: String,
    /// The file behind it, all symlinks followed.
    pub interpreter: Option<String>,
    /// The prefix that the program lies in.
    pub prefix: Option<String>,
    pub kind: RuntimeKind,
    /// In full where that can be found out, else `3.11`.
    pub version: Option<String>,
    pub libraries: Vec<Library>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuntimeKind {
    Python,
    R,
    /// A shell, say: the libraries of all runtimes that it could start are listed.
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    pub host: String,
    pub inside: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Git {
    /// The project, or a directory above it.
    pub top: String,
    /// In hex.
    pub commit: Option<String>,
    /// `None` if HEAD is detached or not known.
    pub branch: Option<String>,
    /// Whether tracked files differ from the commit anywhere below `top`. `None`: not known.
    pub dirty: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    pub name: String,
    pub kernel: String,
    pub architecture: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Submitter {
    pub uid: u32,
    pub name: Option<String>,
    /// Who became root with sudo, as sudo says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sudo_user: Option<String>,
}

/// With whose rights the host is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Of whoever asked, too.
    Callers,
    /// Ours, which whoever asked may not have: nothing is looked at that only the request names.
    Ours,
}

pub fn gather(facts: &Facts<'_>) -> Provenance {
    let mut notes = Notes::default();
    let (argv, argv_left_out) = bounded_list(facts.argv, |arg| {
        let text = bounded(arg.as_bytes(), STRING_BYTES_MAX);
        (text.len(), text)
    });
    let (env, env_left_out) = bounded_list(facts.env, |(name, value)| {
        let variable = variable(name, value, facts.secret_names);
        let value_bytes = variable.value.as_ref().map_or(0, String::len);
        (variable.name.len() + value_bytes, variable)
    });
    let (reads, reads_left_out) = bounded_list(facts.reads, |(host, inside)| {
        let read = Read {
            host: shown_path(host),
            inside: shown_path(inside),
        };
        (read.host.len() + read.inside.len(), read)
    });
    if reads_left_out > 0 {
        notes.add(format!("reads: {reads_left_out} are not listed"));
    }
    Provenance {
        version: VERSION,
        fumehood: env!("CARGO_PKG_VERSION").to_owned(),
        argv,
        argv_left_out,
        script: facts.script.map(|(path, blake3)| Script {
            path: shown_path(path),
            blake3,
        }),
        inputs: inputs(facts.inputs),
        env,
        env_left_out,
        runtime: runtime(facts, &mut notes),
        project: shown_path(facts.project),
        data: facts.data.map(shown_path),
        docs: facts.docs.map(shown_path),
        reads,
        git: match facts.rights {
            _ if facts.project.as_os_str().is_empty() => None,
            Rights::Callers => git_state(facts.project, git::TIME_MAX, &mut notes),
            Rights::Ours => None,
        },
        host: host(),
        submitter: submitter(&mut notes),
        notes: notes.0,
    }
}

#[derive(Debug, Default)]
struct Notes(Vec<String>);

impl Notes {
    fn add(&mut self, note: impl Into<String>) {
        if self.0.len() < NOTES_MAX {
            self.0.push(note.into());
        }
    }
}

/// Escaped; if it is longer than the bound, its beginning and [`CUT`].
fn bounded(bytes: &[u8], bytes_max: usize) -> String {
    match bytes.len() <= bytes_max {
        true => escape_text(bytes),
        false => escape_text(&bytes[..bytes_max]) + CUT,
    }
}

/// The same for text that is escaped already.
fn cut(text: &str) -> String {
    match text.char_indices().nth(PATH_BYTES_MAX) {
        Some((end, _)) => format!("{}{CUT}", &text[..end]),
        None => text.to_owned(),
    }
}

/// A path for the record.
fn shown(bytes: &[u8]) -> String {
    bounded(bytes, PATH_BYTES_MAX)
}

fn shown_path(path: &Path) -> String {
    shown(path.as_os_str().as_bytes())
}

/// As many as the bounds allow, each with what it costs, and how many were left out.
fn bounded_list<T, U>(all: &[T], make: impl Fn(&T) -> (usize, U)) -> (Vec<U>, u64) {
    let mut room = STRINGS_BYTES_MAX;
    let mut list = Vec::new();
    for item in all.iter().take(STRINGS_MAX) {
        let (bytes, made) = make(item);
        match room.checked_sub(bytes) {
            Some(left) => room = left,
            None => break,
        }
        list.push(made);
    }
    let left_out = (all.len() - list.len()) as u64;
    (list, left_out)
}

fn inputs(all: &[(String, u64, ContentHash)]) -> Inputs {
    let mut sorted: Vec<&(String, u64, ContentHash)> = all.iter().collect();
    sorted.sort();
    let mut hasher = blake3::Hasher::new();
    for (path, bytes, hash) in &sorted {
        hasher.update(&(path.len() as u64).to_le_bytes());
        hasher.update(path.as_bytes());
        hasher.update(&bytes.to_le_bytes());
        hasher.update(hash.to_string().as_bytes());
    }
    let listed = sorted.iter().take(INPUTS_MAX);
    Inputs {
        files: listed
            .map(|(path, bytes, blake3)| InputFile {
                path: cut(path),
                bytes: *bytes,
                blake3: *blake3,
            })
            .collect(),
        count: all.len() as u64,
        bytes: all
            .iter()
            .fold(0, |sum, (_, bytes, _)| sum.saturating_add(*bytes)),
        blake3: ContentHash::from_bytes(*hasher.finalize().as_bytes()),
    }
}

fn variable(name: &OsStr, value: &OsStr, secret_names: &[String]) -> Variable {
    let withheld = secret_reason(name.as_bytes(), value.as_bytes(), secret_names);
    let value = || bounded(value.as_bytes(), STRING_BYTES_MAX);
    Variable {
        name: bounded(name.as_bytes(), PATH_BYTES_MAX),
        value: withheld.is_none().then(value),
        withheld,
    }
}

fn runtime(facts: &Facts<'_>, notes: &mut Notes) -> Runtime {
    let name = facts
        .program
        .file_name()
        .and_then(OsStr::to_str)
        .unwrap_or_default();
    let kind = match name {
        "R" | "Rscript" => RuntimeKind::R,
        name if name.starts_with("python") || name.starts_with("pypy") => RuntimeKind::Python,
        _ => RuntimeKind::Other,
    };
    let prefix = facts.program.parent().and_then(Path::parent);
    let mut version = None;
    let mut finder = Finder::new(notes);
    match (kind, prefix) {
        (RuntimeKind::Python, Some(prefix)) => {
            version = packages::python_version(facts.program, prefix);
            python(&mut finder, facts, prefix, version.as_deref());
        }
        (RuntimeKind::R, Some(prefix)) => {
            r(&mut finder, facts, prefix);
            version = packages::r_version(&finder.libraries);
        }
        _ => {
            let all = facts.prefixes.iter().map(PathBuf::as_path).chain(prefix);
            for prefix in all {
                finder.python(prefix, None);
                finder.conda(prefix);
                r(&mut finder, facts, prefix);
            }
        }
    }
    let libraries = finder.libraries;
    if kind != RuntimeKind::Other && version.is_none() {
        notes
            .add("runtime: its version is written nowhere that it can be read without starting it");
    }
    Runtime {
        program: shown_path(facts.program),
        interpreter: facts
            .program
            .canonicalize()
            .ok()
            .map(|path| shown_path(&path)),
        prefix: prefix.map(shown_path),
        kind,
        version,
        libraries,
    }
}

/// The libraries of a Python, and those of the Python below a venv that asks for them.
fn python(finder: &mut Finder<'_>, facts: &Facts<'_>, prefix: &Path, version: Option<&str>) {
    let short = version.and_then(packages::short_version);
    finder.python(prefix, short.as_deref());
    finder.conda(prefix);
    let setting = |key: &[u8]| packages::venv_setting(&Dir::open(prefix).ok()?, &[key]);
    let shared = setting(b"include-system-site-packages");
    if !shared.is_some_and(|value| value.eq_ignore_ascii_case(b"true")) {
        return;
    }
    let home = setting(b"home").map(|home| PathBuf::from(OsStr::from_bytes(&home)));
    let base = home.as_deref().and_then(Path::parent);
    // pyvenv.cfg may be hostile: only what is shown to the program anyway is looked at.
    let visible = |base: &&Path| {
        base.starts_with("/usr") || facts.prefixes.iter().any(|prefix| base.starts_with(prefix))
    };
    if let Some(base) = base.filter(visible) {
        finder.python(base, short.as_deref());
        finder.conda(base);
    }
}

/// R's libraries: its own, and those that the environment inside names.
fn r(finder: &mut Finder<'_>, facts: &Facts<'_>, prefix: &Path) {
    finder.r(prefix);
    let named = |name: &OsStr| {
        ["R_LIBS", "R_LIBS_USER", "R_LIBS_SITE"]
            .iter()
            .any(|n| name == *n)
    };
    for (_, value) in facts.inside_env.iter().filter(|(name, _)| named(name)) {
        for path in value
            .as_bytes()
            .split(|b| *b == b':')
            .filter(|p| p.starts_with(b"/"))
        {
            finder.library(Path::new(OsStr::from_bytes(path)), LibraryKind::R);
        }
    }
}

fn git_state(project: &Path, time_max: Duration, notes: &mut Notes) -> Option<Git> {
    let found = match git::look(project, time_max) {
        Ok(found) => found?,
        Err(why) => {
            notes.add(format!("git: {why}"));
            return None;
        }
    };
    let mut state = Git {
        top: shown_path(&found.top),
        commit: None,
        branch: None,
        dirty: None,
    };
    match found.head {
        Ok(head) => {
            state.branch = head.branch.map(|name| bounded(&name, PATH_BYTES_MAX));
            state.commit = head.commit.ok().map(|id| git::hex(&id));
        }
        Err(why) => {
            notes.add(format!("git: {why}"));
            return Some(state);
        }
    }
    match found.dirty {
        Ok(dirty) => state.dirty = Some(dirty),
        Err(why @ git::Unknown::NoCommit) => notes.add(format!("git: {why}")),
        Err(why) => notes.add(format!("git: whether it is clean is not known: {why}")),
    }
    Some(state)
}

fn host() -> Host {
    let uname = rustix::system::uname();
    let text = |part: fn(&Uname) -> &std::ffi::CStr| bounded(part(&uname).to_bytes(), 256);
    Host {
        name: text(Uname::nodename),
        kernel: text(Uname::release),
        architecture: text(Uname::machine),
    }
}

/// Large sites list many people; beyond this a file is not a list of users.
const PASSWD_BYTES_MAX: usize = 16 << 20;

/// Who asks, in a word: by name where there is one.
pub fn submitter_name() -> String {
    let who = submitter(&mut Notes::default());
    let name = who.sudo_user.or(who.name);
    name.unwrap_or_else(|| who.uid.to_string())
}

fn submitter(notes: &mut Notes) -> Submitter {
    static NAME: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let uid = rustix::process::getuid().as_raw();
    let read = || {
        let etc = Dir::open(Path::new("/etc"));
        let passwd = etc.and_then(|etc| etc.read_whole(b"passwd", PASSWD_BYTES_MAX));
        user_name(&passwd.unwrap_or_default(), uid)
    };
    let name = NAME.get_or_init(read).clone();
    if name.is_none() {
        notes.add("submitter: /etc/passwd has no name for it");
    }
    let sudo_user = std::env::var_os("SUDO_USER").filter(|_| uid == 0);
    Submitter {
        uid,
        name,
        sudo_user: sudo_user.map(|name| bounded(name.as_bytes(), 256)),
    }
}

fn user_name(passwd: &[u8], uid: u32) -> Option<String> {
    let uid = uid.to_string();
    let mut users = passwd.split(|b| *b == b'\n').filter_map(|line| {
        let mut fields = line.split(|b| *b == b':');
        let name = fields.next()?;
        (fields.nth(1)? == uid.as_bytes()).then(|| bounded(name, 256))
    });
    users.next()
}
