//! Guesses why a program failed, from the end of what it printed and from what it was allowed.
//!
//! The program wrote that text. So a hint never decides the reason of a result, and never goes back to the program: it
//! is for the person who started it. A hint must not persuade that person to show something that should stay hidden. So
//! a path that looks like a credential, a home or the project is only named as kept out, with no option to paste.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use store::types::escaping::{escape_terminal, quote_for_shell};

/// How much of the end of standard error is searched.
const LOOK_BYTES: usize = 64 * 1024;
/// The most hints of one attempt.
pub const HINTS_MAX: usize = 5;
/// How many paths are looked up on the host. The program chose the paths, and a lookup may be slow.
const LOOKUPS_MAX: usize = 32;
const PATH_BYTES_MAX: usize = 1024;
const NAME_CHARS_MAX: usize = 80;

/// What a hint is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HintKind {
    /// A path that the program does not see. The text has the option that would show it.
    HiddenPath,
    /// A path that is hidden for a good reason.
    KeptOut,
    /// The network, which is off, or a service of this host, which cannot be reached.
    Network,
    /// A module, package or shared library that the runtime does not have.
    Module,
    /// The workspace, /dev/shm or the host's disk is full.
    Space,
    /// The program tried to write to a path that is read-only.
    ReadOnly,
    /// Memory ran out.
    Memory,
    /// A process or thread could not be started.
    Processes,
    /// A process had too many files open, or all processes together had.
    OpenFiles,
    /// A library or program in a tree from which nothing may be executed.
    NotExecutable,
}

/// A guess why a program failed, for the person who started it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hint {
    /// What the hint is about.
    pub kind: HintKind,
    /// One line, safe for a terminal, that starts with "guess:".
    pub text: String,
}

/// A path that exists on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPath {
    /// The path with every symlink resolved: a link with a harmless name may lead anywhere.
    pub real: PathBuf,
    /// What is at the path.
    pub kind: HostPathKind,
}

/// What is at a path on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPathKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// Anything else.
    Other,
}

/// How much of a limited space was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceUsage {
    /// The most bytes that were used.
    pub used_bytes: u64,
    /// How many bytes may be used.
    pub limit_bytes: u64,
}

/// What the plan allowed and what the kernel counted.
pub struct HintFacts<'a> {
    /// Paths readable inside, as the program names them.
    pub visible: &'a [PathBuf],
    /// The path of the workspace, which is the same inside.
    pub workspace: &'a Path,
    /// The directory of the project on the host.
    pub project: &'a Path,
    /// The host directory of the caller's own script, if one was given.
    pub script_dir: Option<&'a Path>,
    /// Home directories, at least the caller's.
    pub homes: &'a [PathBuf],
    /// Looks up a path on the host. Called at most 32 times.
    pub on_host: &'a dyn Fn(&Path) -> Option<HostPath>,
    /// Whether the program has no network.
    pub network_off: bool,
    /// The workspace. `None`: its use is not known.
    pub disk: Option<SpaceUsage>,
    /// /dev/shm. `None`: its use is not known.
    pub shm: Option<SpaceUsage>,
    /// The prefix of the runtime that runs the program. `None`: the system's.
    pub runtime: Option<&'a Path>,
    /// How many processes the kernel killed at the memory limit.
    pub oom_kills: u64,
    /// How often a new process or thread was refused at the limit.
    pub pids_denied: u64,
}

/// At most [`HINTS_MAX`] guesses. Hints from what the kernel counted come first, then the lines nearest to the end of
/// the text: programs say there why they died.
pub fn hints(stderr_tail: &[u8], facts: &HintFacts<'_>) -> Vec<Hint> {
    let text = &stderr_tail[stderr_tail.len().saturating_sub(LOOK_BYTES)..];
    let mut found = HintList {
        hints: Vec::new(),
        lookups: 0,
    };
    add_counted(facts, &mut found);
    for line in text.rsplit(|b| *b == b'\n' || *b == b'\r') {
        if found.hints.len() >= HINTS_MAX {
            break;
        }
        add_from_line(&plain_quotes(line), facts, &mut found);
    }
    found.hints.truncate(HINTS_MAX);
    found.hints
}

impl Hint {
    /// Marks the text as a guess, and escapes what a program may have written of it.
    pub(crate) fn guess(kind: HintKind, text: &str) -> Hint {
        let text = escape_terminal(format!("guess: {text}").as_bytes());
        Hint { kind, text }
    }
}

struct HintList {
    hints: Vec<Hint>,
    lookups: usize,
}

impl HintList {
    fn add(&mut self, kind: HintKind, text: String) {
        let hint = Hint::guess(kind, &text);
        // One hint is enough for most kinds, but several modules or paths may be missing.
        let several = [HintKind::HiddenPath, HintKind::KeptOut, HintKind::Module].contains(&kind);
        let same = |h: &Hint| h.kind == kind && (!several || h.text == hint.text);
        if !self.hints.iter().any(same) {
            self.hints.push(hint);
        }
    }
}

fn add_counted(facts: &HintFacts<'_>, found: &mut HintList) {
    if facts.oom_kills > 0 {
        let n = facts.oom_kills;
        let text = format!("the kernel killed {n} process(es) at the memory limit; raise --memory");
        found.add(HintKind::Memory, text);
    }
    if facts.pids_denied > 0 {
        let n = facts.pids_denied;
        let text =
            format!("{n} new process(es) or thread(s) were refused at the limit; raise --pids");
        found.add(HintKind::Processes, text);
    }
}

fn add_from_line(line: &[u8], facts: &HintFacts<'_>, found: &mut HintList) {
    let has = |any: &[&str]| any.iter().any(|word| contains(line, word.as_bytes()));
    if has(NO_SPACE) {
        found.add(HintKind::Space, space_text(facts));
    }
    if has(NO_MEMORY) {
        let text = "memory ran out; raise --memory";
        found.add(HintKind::Memory, text.to_owned());
    }
    if has(NO_THREAD)
        || has(&["Resource temporarily unavailable"])
            && has(&["fork", "thread", "clone", "BlockingIOError"])
    {
        let text = "a process or thread could not be started; raise --pids, or start fewer";
        found.add(HintKind::Processes, text.to_owned());
    }
    if has(&["Too many open files"]) {
        let text = "too many files were open at once; raise --open-files, or close some";
        found.add(HintKind::OpenFiles, text.to_owned());
    }
    // Creating a semaphore fails only where the program has no /dev/shm.
    if has(&["SemLock("]) {
        let text = "semaphores need /dev/shm, which is closed at level landlock; --shared-memory host opens the host's";
        found.add(HintKind::KeptOut, text.to_owned());
    }
    if facts.network_off {
        network(line, found);
    }
    // The library exists and cannot be mapped, so no module is missing.
    if has(&["failed to map segment from shared object"]) {
        found.add(HintKind::NotExecutable, NOT_EXECUTABLE.to_owned());
    } else if let Some(module) = missing_module(line) {
        let beside = match has(&["No module named "]) {
            true => script_module_text(&module, facts, found),
            false => None,
        };
        found.add(
            HintKind::Module,
            beside.unwrap_or_else(|| module_text(&module, facts)),
        );
    }
    if has(&["Read-only file system", "Permission denied"]) {
        read_only(line, facts, found);
    }
    if has(NOT_FOUND) {
        for candidate in candidates(line) {
            hidden_path(candidate, facts, found);
        }
    }
}

const NOT_EXECUTABLE: &str = "the library lies in data/ or docs/, or on a file system mounted noexec, and nothing is executed from \
     there; copy it in with --input, or name its directory with --read and use that path";

const NO_SPACE: &[&str] = &[
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "File size limit exceeded",
    "insufficient shared memory",
];
const NO_MEMORY: &[&str] = &[
    "MemoryError",
    "Cannot allocate memory",
    "cannot allocate vector of size",
    "cannot allocate memory block",
    "std::bad_alloc",
    "Unable to allocate",
    "OutOfMemoryError",
];
const NO_THREAD: &[&str] = &[
    "can't start new thread",
    "pthread_create failed",
    "fork: retry",
    "unable to create thread",
];
const NOT_FOUND: &[&str] = &[
    "No such file or directory",
    "FileNotFoundError",
    "does not exist",
    "cannot open",
    "can't open",
    "Cannot open",
    "cannot find",
    "not found",
];
const NETWORK: &[&str] = &[
    "Name or service not known",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "No address associated with hostname",
    "nodename nor servname provided",
    "Could not resolve host",
    "Couldn't resolve host",
    "unable to resolve host address",
    "Failed to establish a new connection",
    "urlopen error",
    "Could not connect to server",
    "Couldn't connect to server",
    "cannot open URL",
    "InternetOpenUrl failed",
    "getaddrinfo failed",
    "EAI_AGAIN",
];

fn network(line: &[u8], found: &mut HintList) {
    let has = |word: &str| contains(line, word.as_bytes());
    let refused = has("Connection refused");
    let named = NETWORK.iter().any(|word| has(word));
    let loopback = ["127.0.0.", "localhost", "[::1]", "\"::1\""];
    let loopback = loopback.iter().any(|word| has(word));
    let text = match (named, refused, loopback) {
        (_, true, true) => {
            "127.0.0.1 inside is the analysis's own: services of this host cannot be reached from it"
        }
        (true, ..) | (_, true, false) => {
            "the network is off inside; fetch what is needed first, then show it with --read or --input"
        }
        _ => return,
    };
    found.add(HintKind::Network, text.to_owned());
}

fn space_text(facts: &HintFacts<'_>) -> String {
    let full = |used: Option<SpaceUsage>| {
        used.is_some_and(|u| u.used_bytes >= u.limit_bytes.saturating_sub(u.limit_bytes / 10))
    };
    let text = match (full(facts.shm), full(facts.disk)) {
        (true, false) => "/dev/shm is full; it counts as memory: raise --memory, or share less",
        (false, true) => "the workspace is full; raise --disk",
        _ => "the workspace (--disk), /dev/shm (--memory) or the host's own disk is full",
    };
    text.to_owned()
}

/// The name in "No module named x" and similar messages.
fn missing_module(line: &[u8]) -> Option<String> {
    const BEFORE: &[&str] = &[
        "No module named ",
        "there is no package called ",
        "Can't locate ",
        "ArgumentError: Package ",
        "error while loading shared libraries: ",
    ];
    let after = BEFORE.iter().find_map(|before| {
        let at = find(line, before.as_bytes())?;
        Some(&line[at + before.len()..])
    })?;
    let text = String::from_utf8_lossy(&after[..after.len().min(4 * NAME_CHARS_MAX)]);
    let name: String = text
        .trim_start_matches(['\'', '"', '`'])
        .chars()
        .take_while(|c| c.is_alphanumeric() || "._-/+:".contains(*c))
        .take(NAME_CHARS_MAX)
        .collect();
    let name = name.trim_end_matches([':', '.']);
    (!name.is_empty()).then(|| name.to_owned())
}

/// The hint for a Python module that lies beside the script, with the option that copies it in.
fn script_module_text(module: &str, facts: &HintFacts<'_>, found: &mut HintList) -> Option<String> {
    let dir = facts.script_dir?;
    let top = module.split('.').next()?;
    let identifier = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if top.is_empty() || !top.chars().all(identifier) {
        return None;
    }
    let tries = [
        (dir.join(format!("{top}.py")), HostPathKind::File),
        (dir.join(top), HostPathKind::Directory),
    ];
    for (path, kind) in tries {
        if found.lookups >= LOOKUPS_MAX {
            return None;
        }
        found.lookups += 1;
        let Some(there) = (facts.on_host)(&path).filter(|there| there.kind == kind) else {
            continue;
        };
        let hidden = kept_out(&path, facts).or_else(|| kept_out(&there.real, facts));
        if hidden.is_some() || path.as_os_str().as_bytes().contains(&b':') {
            return None;
        }
        let shown = quote_for_shell(path.as_os_str());
        let all = match dir != facts.project && dir.starts_with(facts.project) {
            true => "; --siblings brings along every module there that the imports name",
            false => "",
        };
        return Some(format!(
            "{top} lies beside the script; copy it in with: --input {shown}{all}"
        ));
    }
    None
}

fn module_text(module: &str, facts: &HintFacts<'_>) -> String {
    match facts.runtime {
        Some(prefix) => format!(
            "the runtime {} does not have {module}; install it there, or name another with --runtime",
            quote_for_shell(prefix.as_os_str())
        ),
        None => format!(
            "the system's runtime does not have {module}; use one that does: activate its environment, or name it with --runtime"
        ),
    }
}

fn read_only(line: &[u8], facts: &HintFacts<'_>, found: &mut HintList) {
    let is_input = |path: &Path| {
        let inside = path.strip_prefix(facts.workspace).unwrap_or(path);
        let roots = ["data", "docs"].iter().any(|root| inside.starts_with(root));
        roots || path.is_absolute() && facts.visible.iter().any(|root| path.starts_with(root))
    };
    if candidates(line).any(|c| is_input(Path::new(OsStr::from_bytes(c)))) {
        let text = "what the program is shown, data/ and docs/ too, is read-only; write to the working directory";
        found.add(HintKind::ReadOnly, text.to_owned());
    }
}

/// Replaces typographic quotes, which R prints, by plain ones.
fn plain_quotes(line: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(line.len());
    let mut rest = line;
    while let [first, after @ ..] = rest {
        let (byte, after) = match rest {
            [0xe2, 0x80, 0x98 | 0x99 | 0x9c | 0x9d, after @ ..] => (b'\'', after),
            _ => (*first, after),
        };
        plain.push(byte);
        rest = after;
    }
    plain
}

/// The parts of an error message that may be a path: in quotes, between colons, or, if it starts with a slash, between
/// blanks.
fn candidates(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    // An apostrophe ("can't open '/x'") swaps inside and outside, so try every piece between two quotes of a kind.
    let between = move |quote: u8| line.split(move |b| *b == quote).skip(1);
    let quoted = b"'\"`".iter().flat_map(move |quote| between(*quote));
    let by_colon = line.split(|b| *b == b':').map(<[u8]>::trim_ascii);
    let bare = |word| <[u8]>::strip_suffix(word, b":").or(word.strip_suffix(b","));
    let by_blank = line
        .split(|b| b.is_ascii_whitespace())
        .map(move |word| bare(word).unwrap_or(word))
        .filter(|word| word.starts_with(b"/"));
    quoted
        .chain(by_colon)
        .chain(by_blank)
        .filter(|c| !c.is_empty() && c.len() <= PATH_BYTES_MAX && !c.contains(&0))
}

fn hidden_path(candidate: &[u8], facts: &HintFacts<'_>, found: &mut HintList) {
    let given = Path::new(OsStr::from_bytes(candidate));
    let plain = |c: Component<'_>| matches!(c, Component::RootDir | Component::Normal(_));
    // Skip `..` and `.`: resolved, they lead to another path than the message names.
    if !given.components().all(plain) || found.lookups >= LOOKUPS_MAX {
        return;
    }
    let relative = given
        .strip_prefix(facts.workspace)
        .ok()
        .or(given.is_relative().then_some(given));
    let host = match relative {
        Some(inside) => facts.project.join(inside),
        None => given.to_path_buf(),
    };
    let seen = facts.visible.iter().any(|root| host.starts_with(root));
    // Looking these up can have side effects, and the sandbox has its own of each.
    let own = ["/proc", "/sys", "/dev"];
    let own = own.iter().any(|root| host.starts_with(root));
    if seen || own || relative.is_some_and(|r| r.as_os_str().is_empty()) {
        return;
    }
    found.lookups += 1;
    let Some(on_host) = (facts.on_host)(&host) else {
        return;
    };
    let shown = quote_for_shell(host.as_os_str());
    let why = kept_out(&host, facts).or_else(|| kept_out(&on_host.real, facts));
    let why = why.or((on_host.kind == HostPathKind::Other).then_some("it is no file or directory"));
    if let Some(why) = why {
        let text = format!("{shown} exists on this host and is kept out by design: {why}");
        return found.add(HintKind::KeptOut, text);
    }
    let line = match relative {
        // A colon would be taken for the separator before the name inside.
        _ if host.as_os_str().as_bytes().contains(&b':') => format!(
            "{shown} is not shown inside; its name has a colon, so copy it to another name first, then use --input"
        ),
        Some(inside) => {
            let mut both = host.into_os_string();
            both.push(":");
            both.push(inside);
            let both = quote_for_shell(&both);
            format!("{shown} is not in the workspace; copy it in with: --input {both}")
        }
        // The rest of the project is absent inside, so offer a copy instead of showing the path in place.
        None if host.starts_with(facts.project) => format!(
            "{shown} is not shown inside; copy it in with: --input {shown}, and open the copy"
        ),
        None => format!("{shown} is not shown inside; show it with: --read {shown}"),
    };
    found.add(HintKind::HiddenPath, line);
}

/// Why a path must not be suggested, if so. In doubt the path is kept out: the user can still name it without a hint.
fn kept_out(path: &Path, facts: &HintFacts<'_>) -> Option<&'static str> {
    const SYSTEM: &[&str] = &[
        "/etc",
        "/root",
        "/run",
        "/var/run",
        "/boot",
        "/proc",
        "/sys",
        "/dev",
        "/var/lib",
        "/var/log",
        "/var/spool",
        "/lost+found",
    ];
    const SECRET_PARTS: &[&str] = &[
        "secret",
        "credential",
        "passw",
        "token",
        "id_rsa",
        "id_dsa",
        "id_ecdsa",
        "id_ed25519",
        "shadow",
        "apikey",
        "api_key",
        "keyring",
        "kubeconfig",
        "private",
    ];
    const SECRET_ENDINGS: &[&str] = &[
        "pem", "key", "p12", "pfx", "kdbx", "keytab", "jks", "env", "sock",
    ];
    const DATABASES: &[&str] = &["db", "sqlite", "sqlite3", "db-wal", "sqlite-wal"];

    if path.components().count() <= 2 {
        return Some("it is a top directory of the host");
    }
    if facts.project.starts_with(path) {
        return Some("it is, or contains, the project");
    }
    if facts.homes.iter().any(|home| home.starts_with(path)) {
        return Some("it is, or contains, a home directory");
    }
    if path.parent() == Some(Path::new("/home")) {
        return Some("it is a home directory");
    }
    let in_home = facts.homes.iter().any(|home| path.starts_with(home));
    if SYSTEM.iter().any(|root| path.starts_with(root)) && !in_home {
        return Some("it belongs to the system");
    }
    for part in path.iter() {
        let part = part.as_bytes().to_ascii_lowercase();
        if part.starts_with(b".") {
            return Some("hidden files often hold credentials");
        }
        let has = |word: &&str| contains(&part, word.as_bytes());
        if SECRET_PARTS.iter().any(has) {
            return Some("it looks like a credential");
        }
    }
    let ending = path.extension().map(|e| e.as_bytes().to_ascii_lowercase());
    let ends = |list: &[&str]| list.iter().any(|e| ending.as_deref() == Some(e.as_bytes()));
    if ends(SECRET_ENDINGS) {
        return Some("it looks like a credential");
    }
    if ends(DATABASES) && path.starts_with(facts.project) {
        return Some("it is a database of the project");
    }
    None
}

fn contains(text: &[u8], word: &[u8]) -> bool {
    find(text, word).is_some()
}

fn find(text: &[u8], word: &[u8]) -> Option<usize> {
    text.windows(word.len()).position(|w| w == word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Everything below /opt exists, and some of the project, and some dangerous paths.
    fn on_host(path: &Path) -> Option<HostPath> {
        let real = match path {
            p if p == Path::new("/srv/innocent.csv") => PathBuf::from("/etc/shadow"),
            p => p.to_path_buf(),
        };
        let roots = ["/opt", "/etc", "/home", "/root", "/srv", "/var"];
        let project = [
            "",
            "conf/a.yml",
            "b.py",
            "lib/c.py",
            "pkg/utils.py",
            "pkg/tools",
            "pkg/api_token.py",
            "site.db",
            ".git/config",
            "data/y.csv",
        ];
        let project = project.map(|name| Path::new("/proj").join(name));
        let kind = match path.extension() {
            Some(e) if e == "socket" => HostPathKind::Other,
            Some(_) => HostPathKind::File,
            None => HostPathKind::Directory,
        };
        let there = path == Path::new("/")
            || project.contains(&path.to_path_buf())
            || roots.iter().any(|r| path.starts_with(r));
        there.then_some(HostPath { real, kind })
    }

    fn guess(stderr: &[u8]) -> Vec<Hint> {
        let (visible, homes) = (
            [PathBuf::from("/usr"), "/proj/data".into()],
            ["/home/ada".into()],
        );
        let facts = HintFacts {
            visible: &visible,
            workspace: Path::new("/tmp/scidex-analysis-x"),
            project: Path::new("/proj"),
            script_dir: Some(Path::new("/proj/pkg")),
            homes: &homes,
            on_host: &on_host,
            network_off: true,
            disk: Some(SpaceUsage {
                used_bytes: 100,
                limit_bytes: 100,
            }),
            shm: None,
            runtime: Some(Path::new("/opt/venv")),
            oom_kills: 0,
            pids_denied: 0,
        };
        hints(stderr, &facts)
    }

    fn one(stderr: &str) -> (HintKind, String) {
        let mut all = guess(stderr.as_bytes());
        assert_eq!(all.len(), 1, "{stderr}: {all:?}");
        let hint = all.remove(0);
        assert!(hint.text.starts_with("guess: "));
        (hint.kind, hint.text)
    }

    #[test]
    fn a_hidden_path_comes_with_the_option_that_shows_it() {
        for (stderr, line) in [
            (
                "FileNotFoundError: [Errno 2] No such file or directory: '/opt/ref/hg38.fa'",
                "--read /opt/ref/hg38.fa",
            ),
            (
                "cat: /opt/ref/a b.txt: No such file or directory",
                "--read '/opt/ref/a b.txt'",
            ),
            (
                "cannot open file \u{2018}/opt/日本.csv\u{2019}: No such file or directory",
                "--read '/opt/日本.csv'",
            ),
            ("Error: '/opt/it\"s' does not exist", "--read '/opt/it\"s'"),
            (
                "FileNotFoundError: [Errno 2] No such file or directory: 'conf/a.yml'",
                "--input /proj/conf/a.yml:conf/a.yml",
            ),
            (
                "FileNotFoundError: No such file or directory: '/tmp/scidex-analysis-x/b.py'",
                "--input /proj/b.py:b.py",
            ),
            (
                "cat: /proj/lib/c.py: No such file or directory",
                "--input /proj/lib/c.py,",
            ),
        ] {
            let all = guess(stderr.as_bytes());
            assert!(
                all.iter()
                    .any(|h| h.kind == HintKind::HiddenPath && h.text.contains(line)),
                "{stderr}: {all:?}"
            );
        }
    }

    #[test]
    fn a_module_beside_the_script_comes_with_the_option_that_copies_it() {
        for (module, path) in [
            ("utils", "/proj/pkg/utils.py"),
            ("tools.x", "/proj/pkg/tools"),
        ] {
            let (kind, text) = one(&format!("ModuleNotFoundError: No module named '{module}'"));
            assert_eq!(kind, HintKind::Module);
            let line = format!("--input {path};");
            assert!(
                text.contains(&line) && text.contains("--siblings"),
                "{text}"
            );
        }
        for module in ["gone", "api_token", "../../etc", "/etc/passwd", "b"] {
            let (_, text) = one(&format!("ModuleNotFoundError: No module named '{module}'"));
            assert!(!text.contains("--input"), "{text}");
        }
    }

    #[test]
    fn nothing_dangerous_is_suggested() {
        for path in [
            "/",
            "/home",
            "/root",
            "/etc",
            "/etc/shadow",
            "/etc/passwd",
            "/home/ada",
            "/home/bob",
            "/home/ada/.ssh/id_rsa",
            "/home/ada/.aws",
            "/opt/x/.env",
            "/opt/app/credentials.json",
            "/opt/tls/server.key",
            "/proj",
            "/proj/.git/config",
            "/proj/site.db",
            "/var/run/postgresql",
            "/opt/run/x.socket",
            "/srv/innocent.csv",
            "/opt/API_TOKEN.txt",
        ] {
            let all = guess(format!("cat: {path}: No such file or directory").as_bytes());
            assert!(
                !all.iter().any(|h| h.kind == HintKind::HiddenPath),
                "{path}: {all:?}"
            );
            assert!(
                !all.iter()
                    .any(|h| h.text.contains("--read") || h.text.contains("--input")),
                "{path}: {all:?}"
            );
            assert!(
                all.iter().any(|h| h.kind == HintKind::KeptOut),
                "{path}: {all:?}"
            );
        }
        for path in [
            "/opt/../etc/shadow",
            "/proc/1/environ",
            "/dev/sda",
            "/usr/lib/x",
            "/proj/data/y.csv",
            "/nowhere/x",
        ] {
            let all = guess(format!("cat: {path}: No such file or directory").as_bytes());
            assert_eq!(all, [], "{path}");
        }
    }

    #[test]
    fn hints_contain_no_terminal_control_characters() {
        let all = guess(b"cat: /opt/\x1b[2J\xe2\x80\xae'x: No such file or directory");
        assert!(!all.is_empty());
        assert!(
            all.iter()
                .all(|h| h.text.is_ascii() && !h.text.contains('\x1b')),
            "{all:?}"
        );
    }

    #[test]
    fn each_kind_of_message_gives_its_hint() {
        use HintKind::*;
        for (stderr, kind) in [
            (
                "socket.gaierror: [Errno -3] Temporary failure in name resolution",
                Network,
            ),
            ("curl: (6) Could not resolve host: example.org", Network),
            (
                "requests.exceptions.ConnectionError: Failed to establish a new connection",
                Network,
            ),
            ("connect to 10.0.0.1 port 80: Connection refused", Network),
            (
                "connection to server at \"localhost\" (127.0.0.1), port 5432 failed: Connection refused",
                Network,
            ),
            ("ModuleNotFoundError: No module named 'scipy.stats'", Module),
            (
                "Error in library(lme4) : there is no package called \u{2018}lme4\u{2019}",
                Module,
            ),
            ("OSError: [Errno 28] No space left on device", Space),
            (
                "OSError: [Errno 30] Read-only file system: 'data/out.csv'",
                ReadOnly,
            ),
            (
                "PermissionError: [Errno 13] Permission denied: '/proj/data/x'",
                ReadOnly,
            ),
            ("MemoryError", Memory),
            ("Error: cannot allocate vector of size 8.0 Gb", Memory),
            ("bash: fork: Resource temporarily unavailable", Processes),
            ("RuntimeError: can't start new thread", Processes),
            ("OSError: [Errno 24] Too many open files", OpenFiles),
            (
                "ImportError: /proj/data/x.so: failed to map segment from shared object",
                NotExecutable,
            ),
            (
                "data/tool: error while loading shared libraries: libx.so: failed to map segment from shared object",
                NotExecutable,
            ),
        ] {
            let (got, text) = one(stderr);
            assert_eq!(got, kind, "{stderr}: {text}");
        }
        assert!(
            one("ModuleNotFoundError: No module named 'scipy.stats'")
                .1
                .contains("/opt/venv does not have scipy.stats;")
        );
        assert!(
            one("127.0.0.1: Connection refused")
                .1
                .contains("the analysis's own")
        );
        assert_eq!(
            guess(b"PermissionError: [Errno 13] Permission denied: 'out.csv'"),
            []
        );
        assert_eq!(guess(b"all is well"), []);
    }

    #[test]
    fn the_number_of_hints_and_lookups_is_bounded() {
        let lines: String = (0..5000)
            .map(|n| format!("cat: /opt/{n}: No such file or directory\n"))
            .collect();
        let all = guess(lines.as_bytes());
        assert_eq!(all.len(), HINTS_MAX);
        assert!(
            all[0].text.contains("/opt/4999"),
            "the nearest to the end comes first"
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            guess(&bytes);
        }

        #[test]
        fn hostile_paths_stay_one_line(path in prop::collection::vec(1u8.., 0..60)) {
            let line = [b"cat: /opt/".as_slice(), &path, b": No such file or directory"].concat();
            for hint in guess(&line) {
                prop_assert!(!hint.text.chars().any(char::is_control));
            }
        }
    }
}
