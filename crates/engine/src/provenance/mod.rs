//! Where a result comes from: everything that is stored with an attempt because it cannot be found out later.
//!
//! Gathering never fails. A value that could not be found is null, and `notes` says why. Nothing is executed and
//! every part is bounded, since the code to be confined may have written much of what is read (a venv, a `.git`). All
//! text goes through [`escape_text`], so it has no NUL and is UTF-8 for every database. Text that was too long ends
//! in `CUT`, which escaped text cannot contain otherwise.
//!
//! - `git/`: the commit of the project, read without git.
//! - `packages.rs`: the installed packages of a runtime.
//! - `files.rs`: bounded reads of untrusted files.

pub(crate) mod files;
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

use files::InspectedDir;
use packages::PackageFinder;
pub use packages::{Library, LibraryKind, PACKAGES_MAX, Package};
use store::types::escaping::escape_text;
use store::types::manifest::ContentHash;
use store::types::secret_values::{SecretReason, secret_reason};

/// The version of the document's format.
pub const VERSION: u32 = 1;
/// The most inputs that are listed. The rest is included in the counts and the hash.
pub const INPUTS_MAX: usize = 1_000;
/// The most arguments, and the most variables, that are listed.
pub(crate) const STRINGS_MAX: usize = 1_000;
/// The most bytes of one argument or value. A program given with `-c` should fit.
pub(crate) const STRING_BYTES_MAX: usize = 64 << 10;
/// The most bytes of all arguments, and of all variables.
pub(crate) const STRINGS_BYTES_MAX: usize = 512 << 10;
const PATH_BYTES_MAX: usize = 4096;
const NOTES_MAX: usize = 50;
/// The end of a text that was cut.
pub(crate) const CUT: &str = "\\[cut]";

/// What the caller knows. Paths are canonical.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProvenanceFacts<'a> {
    /// The arguments as the program gets them.
    pub argv: &'a [OsString],
    pub rights: InspectionRights,
    /// The path of the script, and the hash of its content.
    pub script: Option<(&'a Path, Option<ContentHash>)>,
    /// Path in the workspace (escaped), bytes, hash.
    pub inputs: &'a [(String, u64, ContentHash)],
    /// The variables that the user gave with `--env`.
    pub env: &'a [(OsString, OsString)],
    /// Names of variables whose values are withheld; a name may end in `*`.
    pub secret_names: &'a [String],
    /// The program that is executed: `Plan::program`.
    pub program: &'a Path,
    /// The directories shown for the runtime besides the system: `Runtime::prefixes`.
    pub prefixes: &'a [PathBuf],
    /// The environment of the program. Only R_LIBS, R_LIBS_USER and R_LIBS_SITE are used.
    pub inside_env: &'a [(OsString, OsString)],
    pub project: &'a Path,
    pub data: Option<&'a Path>,
    pub docs: Option<&'a Path>,
    /// `--read`: path on the host, path inside.
    pub reads: &'a [(PathBuf, PathBuf)],
}

/// What a result was made from. It is stored with the attempt as JSON. Paths and texts are escaped, and cut where they
/// are too long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The format: [`VERSION`].
    pub version: u32,
    /// The version of Fumehood.
    pub fumehood: String,
    /// The arguments as the program gets them, the program's name first.
    pub argv: Vec<String>,
    /// The number of arguments that are not listed.
    pub argv_left_out: u64,
    /// The script. `None`: the request named a command.
    pub script: Option<Script>,
    /// The files that were copied into the workspace.
    pub inputs: InputSummary,
    /// The variables that the user gave with `--env`.
    pub env: Vec<Variable>,
    /// The number of variables that are not listed.
    pub env_left_out: u64,
    /// The program, and the packages that it can load.
    pub runtime: ProvenanceRuntime,
    /// The project's directory. Empty if there is none.
    pub project: String,
    /// The project's data directory, if it is shown to the program.
    pub data: Option<String>,
    /// The project's directory of documents, if it is shown to the program.
    pub docs: Option<String>,
    /// The paths that were shown by `--read`.
    pub reads: Vec<ReadMapping>,
    /// The state of the repository that contains the project. `None`: there is none, it was not looked at, or the notes
    /// say why it is not known.
    pub git: Option<GitState>,
    /// The machine.
    pub host: ProvenanceHost,
    /// The user of the process that made the attempt.
    pub submitter: ProvenanceSubmitter,
    /// What could not be found out, and why.
    pub notes: Vec<String>,
}

/// The script that was run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Script {
    /// Its path.
    pub path: String,
    /// The hash of its content. `None`: it was not hashed.
    pub blake3: Option<ContentHash>,
}

/// The inputs as they were before the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputSummary {
    /// The first [`INPUTS_MAX`] by path.
    pub files: Vec<InputFile>,
    /// The number of all files.
    pub count: u64,
    /// The length of all files together.
    pub bytes: u64,
    /// The hash of all inputs in the order of their paths. For each: the length of the path (8 bytes, little-endian),
    /// the path, the length of the file (likewise), the hash (64 hex digits).
    pub blake3: ContentHash,
}

/// One input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    /// Its path in the workspace.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// The hash of its content.
    pub blake3: ContentHash,
}

/// An environment variable that the user gave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variable {
    /// The name.
    pub name: String,
    /// `None` if the value is withheld.
    pub value: Option<String>,
    /// Why the value is withheld. `None`: it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withheld: Option<SecretReason>,
}

/// The program that was executed, and what it can load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProvenanceRuntime {
    /// The program that is executed.
    pub program: String,
    /// The file behind the program, with all symlinks followed.
    pub interpreter: Option<String>,
    /// The prefix that contains the program.
    pub prefix: Option<String>,
    /// Which interpreter the program is, by its name.
    pub kind: RuntimeKind,
    /// The full version if it can be found, else a short one such as `3.11`.
    pub version: Option<String>,
    /// The directories with packages that it can load.
    pub libraries: Vec<Library>,
}

/// The interpreters whose version and packages can be found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuntimeKind {
    /// Python or PyPy.
    Python,
    /// R or Rscript.
    R,
    /// Another program, such as a shell: the libraries of all runtimes that it could start are listed.
    Other,
}

/// A path that `--read` shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadMapping {
    /// The path on the host.
    pub host: String,
    /// The path inside the sandbox.
    pub inside: String,
}

/// The state of a git repository before the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GitState {
    /// The directory that holds `.git`: the project, or a directory above it.
    pub top: String,
    /// In hexadecimal.
    pub commit: Option<String>,
    /// `None` if HEAD is detached or unknown.
    pub branch: Option<String>,
    /// Whether tracked files anywhere below `top` differ from the commit. `None` if unknown.
    pub dirty: Option<bool>,
}

/// The machine, as uname(2) describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProvenanceHost {
    /// The host name.
    pub name: String,
    /// The release of the kernel.
    pub kernel: String,
    /// The architecture, such as `x86_64`.
    pub architecture: String,
}

/// The user who ran Fumehood.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProvenanceSubmitter {
    /// The real uid.
    pub uid: u32,
    /// The user's name. `None`: /etc/passwd does not have it.
    pub name: Option<String>,
    /// The user who became root with sudo, as sudo reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sudo_user: Option<String>,
}

/// Whose rights this process has when it looks at the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InspectionRights {
    /// Rights that the requester has too.
    SharedWithCaller,
    /// Rights that the requester may not have. Nothing is read that only the request names.
    WorkerOnly,
}

pub(crate) fn gather(facts: &ProvenanceFacts<'_>) -> Provenance {
    let mut notes = Notes::default();
    let (argv, argv_left_out) = bounded_list(facts.argv, |arg| {
        let text = bounded_text(arg.as_bytes(), STRING_BYTES_MAX);
        (text.len(), text)
    });
    let (env, env_left_out) = bounded_list(facts.env, |(name, value)| {
        let variable = record_variable(name, value, facts.secret_names);
        let value_bytes = variable.value.as_ref().map_or(0, String::len);
        (variable.name.len() + value_bytes, variable)
    });
    let (reads, reads_left_out) = bounded_list(facts.reads, |(host, inside)| {
        let read = ReadMapping {
            host: path_text(host),
            inside: path_text(inside),
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
            path: path_text(path),
            blake3,
        }),
        inputs: summarize_inputs(facts.inputs),
        env,
        env_left_out,
        runtime: inspect_runtime(facts, &mut notes),
        project: path_text(facts.project),
        data: facts.data.map(path_text),
        docs: facts.docs.map(path_text),
        reads,
        git: match facts.rights {
            _ if facts.project.as_os_str().is_empty() => None,
            InspectionRights::SharedWithCaller => {
                inspect_git(facts.project, git::TIME_MAX, &mut notes)
            }
            InspectionRights::WorkerOnly => None,
        },
        host: inspect_host(),
        submitter: find_submitter(&mut notes),
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

/// Escapes text. If it is longer than the bound, keeps the beginning and appends [`CUT`].
fn bounded_text(bytes: &[u8], bytes_max: usize) -> String {
    match bytes.len() <= bytes_max {
        true => escape_text(bytes),
        false => escape_text(&bytes[..bytes_max]) + CUT,
    }
}

/// The same for text that is escaped already.
fn cut_escaped(text: &str) -> String {
    match text.char_indices().nth(PATH_BYTES_MAX) {
        Some((end, _)) => format!("{}{CUT}", &text[..end]),
        None => text.to_owned(),
    }
}

/// A path for the record.
fn bounded_path_text(bytes: &[u8]) -> String {
    bounded_text(bytes, PATH_BYTES_MAX)
}

fn path_text(path: &Path) -> String {
    bounded_path_text(path.as_os_str().as_bytes())
}

/// Converts as many items as the bounds allow. `make` returns the size and the item. Also returns how many were left
/// out.
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

fn summarize_inputs(all: &[(String, u64, ContentHash)]) -> InputSummary {
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
    InputSummary {
        files: listed
            .map(|(path, bytes, blake3)| InputFile {
                path: cut_escaped(path),
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

fn record_variable(name: &OsStr, value: &OsStr, secret_names: &[String]) -> Variable {
    let withheld = secret_reason(name.as_bytes(), value.as_bytes(), secret_names);
    let value = || bounded_text(value.as_bytes(), STRING_BYTES_MAX);
    Variable {
        name: bounded_text(name.as_bytes(), PATH_BYTES_MAX),
        value: withheld.is_none().then(value),
        withheld,
    }
}

const NO_VERSION: &str =
    "runtime: its version is written nowhere that it can be read without starting it";

fn inspect_runtime(facts: &ProvenanceFacts<'_>, notes: &mut Notes) -> ProvenanceRuntime {
    let name = facts.program.file_name().and_then(OsStr::to_str);
    let kind = match name.unwrap_or_default() {
        "R" | "Rscript" => RuntimeKind::R,
        name if name.starts_with("python") || name.starts_with("pypy") => RuntimeKind::Python,
        _ => RuntimeKind::Other,
    };
    let prefix = facts.program.parent().and_then(Path::parent);
    let mut version = None;
    let mut finder = PackageFinder::new(notes);
    match (kind, prefix) {
        (RuntimeKind::Python, Some(prefix)) => {
            version = packages::python_version(facts.program, prefix);
            add_python_libraries(&mut finder, facts, prefix, version.as_deref());
        }
        (RuntimeKind::R, Some(prefix)) => {
            add_r_libraries(&mut finder, facts, prefix);
            version = packages::r_version(&finder.libraries);
        }
        _ => {
            let all = facts.prefixes.iter().map(PathBuf::as_path).chain(prefix);
            for prefix in all {
                finder.add_python(prefix, None);
                finder.add_conda(prefix);
                add_r_libraries(&mut finder, facts, prefix);
            }
        }
    }
    let libraries = finder.libraries;
    if kind != RuntimeKind::Other && version.is_none() {
        notes.add(NO_VERSION);
    }
    let interpreter = facts.program.canonicalize().ok();
    ProvenanceRuntime {
        program: path_text(facts.program),
        interpreter: interpreter.as_deref().map(path_text),
        prefix: prefix.map(path_text),
        kind,
        version,
        libraries,
    }
}

/// Adds the libraries of a Python. If a venv includes the system's packages, also adds those of its base.
fn add_python_libraries(
    finder: &mut PackageFinder<'_>,
    facts: &ProvenanceFacts<'_>,
    prefix: &Path,
    version: Option<&str>,
) {
    let short = version.and_then(packages::short_version);
    finder.add_python(prefix, short.as_deref());
    finder.add_conda(prefix);
    let setting = |key: &[u8]| packages::venv_setting(&InspectedDir::open(prefix).ok()?, &[key]);
    let shared = setting(b"include-system-site-packages");
    if !shared.is_some_and(|value| value.eq_ignore_ascii_case(b"true")) {
        return;
    }
    let home = setting(b"home").map(|home| PathBuf::from(OsStr::from_bytes(&home)));
    let base = home.as_deref().and_then(Path::parent);
    // pyvenv.cfg may be hostile, so look only at directories that the program sees anyway.
    let visible = |base: &&Path| {
        base.starts_with("/usr") || facts.prefixes.iter().any(|prefix| base.starts_with(prefix))
    };
    if let Some(base) = base.filter(visible) {
        finder.add_python(base, short.as_deref());
        finder.add_conda(base);
    }
}

/// Adds R's own libraries, and those that the program's environment names.
fn add_r_libraries(finder: &mut PackageFinder<'_>, facts: &ProvenanceFacts<'_>, prefix: &Path) {
    finder.add_r(prefix);
    const VARIABLES: [&str; 3] = ["R_LIBS", "R_LIBS_USER", "R_LIBS_SITE"];
    let named = |name: &OsStr| VARIABLES.iter().any(|variable| name == *variable);
    for (_, value) in facts.inside_env.iter().filter(|(name, _)| named(name)) {
        for path in std::env::split_paths(value).filter(|path| path.is_absolute()) {
            finder.add_library(&path, LibraryKind::R);
        }
    }
}

fn inspect_git(project: &Path, time_max: Duration, notes: &mut Notes) -> Option<GitState> {
    let found = match git::inspect(project, time_max) {
        Ok(found) => found?,
        Err(why) => {
            notes.add(format!("git: {why}"));
            return None;
        }
    };
    let mut state = GitState {
        top: path_text(&found.top),
        commit: None,
        branch: None,
        dirty: None,
    };
    match found.head {
        Ok(head) => {
            state.branch = head.branch.map(|name| bounded_text(&name, PATH_BYTES_MAX));
            state.commit = head.commit.ok().map(|id| git::hex(&id));
        }
        Err(why) => {
            notes.add(format!("git: {why}"));
            return Some(state);
        }
    }
    match found.dirty {
        Ok(dirty) => state.dirty = Some(dirty),
        Err(why @ git::GitUnknown::NoCommit) => notes.add(format!("git: {why}")),
        Err(why) => notes.add(format!("git: whether it is clean is not known: {why}")),
    }
    Some(state)
}

fn inspect_host() -> ProvenanceHost {
    let uname = rustix::system::uname();
    let text = |part: fn(&Uname) -> &std::ffi::CStr| bounded_text(part(&uname).to_bytes(), 256);
    ProvenanceHost {
        name: text(Uname::nodename),
        kernel: text(Uname::release),
        architecture: text(Uname::machine),
    }
}

/// The most bytes of /etc/passwd to read. Large sites list many people.
const PASSWD_BYTES_MAX: usize = 16 << 20;

/// The name of the requesting user, or the uid if there is no name.
pub fn submitter_name() -> String {
    let who = find_submitter(&mut Notes::default());
    let name = who.sudo_user.or(who.name);
    name.unwrap_or_else(|| who.uid.to_string())
}

fn find_submitter(notes: &mut Notes) -> ProvenanceSubmitter {
    static NAME: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let uid = rustix::process::getuid().as_raw();
    let read = || {
        let etc = InspectedDir::open(Path::new("/etc"));
        let passwd = etc.and_then(|etc| etc.read_whole(b"passwd", PASSWD_BYTES_MAX));
        user_name(&passwd.unwrap_or_default(), uid)
    };
    let name = NAME.get_or_init(read).clone();
    if name.is_none() {
        notes.add("submitter: /etc/passwd has no name for it");
    }
    let sudo_user = std::env::var_os("SUDO_USER").filter(|_| uid == 0);
    ProvenanceSubmitter {
        uid,
        name,
        sudo_user: sudo_user.map(|name| bounded_text(name.as_bytes(), 256)),
    }
}

fn user_name(passwd: &[u8], uid: u32) -> Option<String> {
    let uid = uid.to_string();
    let mut users = passwd.split(|b| *b == b'\n').filter_map(|line| {
        let mut fields = line.split(|b| *b == b':');
        let name = fields.next()?;
        (fields.nth(1)? == uid.as_bytes()).then(|| bounded_text(name, 256))
    });
    users.next()
}
